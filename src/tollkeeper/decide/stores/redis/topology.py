"""Where the servers are: which node has a slot, and which server is the primary.

The store asks `address_of` before each call and is answered from memory: a list with an address
for each of the 16,384 slots, one and the same where there is no cluster. It is brought up to date
in two ways. A node that no longer has a slot says who has it (`moved`), which corrects that slot
alone. When nothing is known, or a server is gone, the store calls `refresh`, which asks around:

    cluster    any node for the slots of all. A node that is cut off from the others, or was taken
               out, knows old news: so one that does not call the cluster whole is believed only
               when no other is better.
    sentinel   one Sentinel after another for the primary, and then that server for its role: for
               some seconds after a promotion, a Sentinel may still name the old one.

A thousand callers notice a dead primary at once, so a refresh is shared: whoever comes while one
runs waits for it and takes its result. One that succeeded is good for 50 ms. Servers are asked in
random order, which spreads the load of a fleet, and those that failed last time come last: a dead
host costs its timeout once, not in every refresh.

Blocking, for threads; asyncio calls `refresh` in one. The connections made here are redis-py's; the
store has its own for the checks.
"""

from __future__ import annotations

import random
import ssl
import time
from binascii import crc_hqx
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.retry import Retry

from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable, show
from tollkeeper.decide.stores.redis.config import Address, RedisConfig

SLOTS: Final = 16_384
REFRESH_INTERVAL_NS_MIN: Final = 50_000_000
# Enough to meet four dead hosts in a row, at the default of a second each.
REFRESH_NS_MAX: Final = 5_000_000_000
_NS_PER_SECOND: Final = 1_000_000_000

# UnicodeError is Python's for a host name that cannot be one.
_VENDOR_ERRORS: Final = (redis.RedisError, OSError, UnicodeError)
# A server that does not know AUTH repeats what follows it, which is the password.
_REPEATED: Final = ", with args beginning with"


def slot_of(key: bytes) -> int:
    """The slot that a cluster keeps a key in: of what is in the first braces, if anything is.

    >>> slot_of(b"tk:{user:42}") == slot_of(b"user:42")
    True
    """
    opened = key.find(b"{")
    if opened >= 0:
        closed = key.find(b"}", opened + 1)
        if closed > opened + 1:
            key = key[opened + 1 : closed]
    return crc_hqx(key, 0) % SLOTS


class Topology:
    """Which server to ask for which slot. Every method may be called from any thread."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._dialer = _Dialer(config)
        alone = config.addresses[:1] if config.mode == "standalone" else ()
        self._found = _Found(list(alone or (None,)) * SLOTS, alone)
        self._failed: set[Address] = set()
        self._refreshed_ns: int | None = None
        self._running: Future[None] | None = None
        self._clients: dict[Address, redis.Redis] = {}
        self._closed = False
        # Held for memory alone, never while a server is asked.
        self._lock = Lock()

    def address_of(self, slot: int) -> Address | None:
        """The primary that has a slot, as far as is known. From memory, without a lock."""
        return self._found.slots[slot]

    def moved(self, slot: int, address: Address) -> None:
        """A node said that another one has the slot now. Counts at once."""
        with self._lock:
            found = self._found
            found.slots[slot] = address
            if address not in found.nodes:
                found.nodes = (*found.nodes, address)

    def primaries(self) -> list[Address]:
        """Every server that has a slot; asks if none is known. Raises what `refresh` raises."""
        if not self._found.nodes:
            self.refresh()
        return list(dict.fromkeys(filter(None, self._found.slots)))

    def known(self) -> set[Address]:
        """Every server that is known to have a slot. From memory; may be empty."""
        return set(filter(None, self._found.slots))

    def nodes(self) -> list[Address]:
        """Every server, replicas too; asks if none is known. Raises what `refresh` raises."""
        if not self._found.nodes:
            self.refresh()
        return list(self._found.nodes)

    def refresh(self) -> None:
        """Ask the servers where everything is, in at most about REFRESH_NS_MAX.

        Raises StoreUnavailable, which says who was asked and what each said; StoreTimeout when
        there was nothing but silence. What was known before is kept then.
        """
        if self._config.mode == "standalone":
            return
        with self._lock:
            last_ns = self._refreshed_ns
            if last_ns is not None and time.monotonic_ns() - last_ns < REFRESH_INTERVAL_NS_MIN:
                return
            running, mine = self._running, Future[None]()
            if running is None:
                self._running = mine
        if running is not None:
            _result_of(running)
            return
        try:
            self._ask_around()
        except BaseException as error:
            self._finish(mine, error)
            raise
        self._finish(mine, None)

    def client(self, address: Address) -> redis.Redis:
        """For administration: logged in, in the config's database, without retries.

        Kept for the next caller; closed by `close`, or when the server has left. It waits
        `connect_ns` for the connection and for each answer, and raises redis-py's own errors.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self._config.shown()} has been closed; open it again")
            client = self._clients.get(address)
            if client is None:
                client = self._dialer.client(address, self._config.connect_ns)
                self._clients[address] = client
            return client

    def close(self) -> None:
        """Close the clients that were handed out. What is known stays known."""
        with self._lock:
            self._closed = True
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.connection_pool.disconnect()

    def _finish(self, mine: Future[None], error: BaseException | None) -> None:
        with self._lock:
            self._running = None
            if error is None:
                self._refreshed_ns = time.monotonic_ns()
        if error is None:
            mine.set_result(None)
        else:
            mine.set_exception(error)

    def _ask_around(self) -> None:
        """Only one thread at a time is here."""
        inquiry = _Inquiry(self._config, self._dialer)
        if self._config.mode == "cluster":
            known = dict.fromkeys((*self._found.nodes, *self._config.addresses))
            found = inquiry.slots(self._in_turn(known), skip=self._failed)
        else:
            found = inquiry.primary(self._in_turn(self._config.addresses))
        self._failed = {address for address, _, _ in inquiry.failures} | (
            self._failed - inquiry.answered
        )
        if found is None:
            raise inquiry.error()
        with self._lock:
            self._found = found
            kept = {*found.nodes, *self._config.addresses}
            left = [self._clients.pop(address) for address in self._clients.keys() - kept]
        self._failed &= kept
        for client in left:
            client.connection_pool.disconnect()

    def _in_turn(self, addresses: Iterable[Address]) -> list[Address]:
        """In random order, and those that failed last time at the end."""
        each = list(addresses)
        random.shuffle(each)
        return sorted(each, key=self._failed.__contains__)


def _result_of(running: Future[None]) -> None:
    """Another thread's result; its error as a new one, for two cannot add to one traceback."""
    error = running.exception()
    if isinstance(error, StoreError):
        raise type(error)(str(error)) from error
    if error is not None:
        raise StoreUnavailable("the refresh that this call waited for was broken off") from error


@dataclass(slots=True)
class _Found:
    """Where everything is, as somebody said it."""

    slots: list[Address | None]
    nodes: tuple[Address, ...]

    @property
    def covered(self) -> int:
        return SLOTS - self.slots.count(None)


class _Inquiry:
    """One refresh: the time it has left, who answered, and what went wrong with whom."""

    def __init__(self, config: RedisConfig, dialer: _Dialer) -> None:
        self._config = config
        self._dialer = dialer
        self._deadline_ns = time.monotonic_ns() + REFRESH_NS_MAX
        self.answered: set[Address] = set()
        # Whom to ask last next time, what to call it in a message, and what it did.
        self.failures: list[tuple[Address, str, Exception]] = []
        self._roles: dict[Address, Any] = {}

    def slots(self, addresses: Sequence[Address], skip: set[Address]) -> _Found | None:
        """Of the first node that calls the cluster whole, or of the one that knows most."""
        best: _Found | None = None
        for address in addresses:
            # Something is known, and this one failed a moment ago: not worth its timeout.
            if best is not None and address in skip:
                continue
            with self._noting(address, str(address)):
                slots, info = self._ask(address, ("CLUSTER", "SLOTS"), ("CLUSTER", "INFO"))
                found = _slots_in(slots, address)
                # Whoever may not ask for the state takes it to be good.
                broken = isinstance(info, bytes) and b"cluster_state:ok" not in info
                if found.covered == SLOTS and not broken:
                    return found
                if best is None or found.covered > best.covered:
                    best = found
        return best

    def primary(self, sentinels: Sequence[Address]) -> _Found | None:
        """The first that a Sentinel names and that is one."""
        service = self._config.service
        commands = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME"), ("SENTINEL", "REPLICAS")
        for sentinel in sentinels:
            with self._noting(sentinel, f"Sentinel {sentinel}"):
                named, replicas = self._ask(
                    sentinel, *((*command, service) for command in commands), of_sentinel=True
                )
                primary = _primary_in(named, service)
                nodes = dict.fromkeys((primary, *_replicas_in(replicas)))
                with self._noting(sentinel, f"{primary}, named by Sentinel {sentinel}"):
                    self._check_role(primary)
                    return _Found([primary] * SLOTS, tuple(nodes))
        return None

    def error(self) -> StoreError:
        """What went wrong, as one error, when nothing was found."""
        reasons = "; ".join(_reason(name, error) for _, name, error in self.failures)
        sought = "who is the primary" if self._config.mode == "sentinel" else "who has which slot"
        message = f"{self._config.shown()}: no server could say {sought}: {reasons}"
        silent = all(_timed_out(error) for _, _, error in self.failures)
        made = StoreTimeout(message) if silent else StoreUnavailable(message)
        cause = self.failures[-1][2]
        # Its traceback would show what the message leaves out.
        made.__cause__ = None if _REPEATED in str(cause) else cause
        return made

    def _check_role(self, primary: Address) -> None:
        """Asks once: if all Sentinels name a dead host, its timeout is not waited for each time."""
        if primary not in self._roles:
            try:
                (self._roles[primary],) = self._ask(primary, ("ROLE",))
            except _VENDOR_ERRORS as error:
                self._roles[primary] = error
        reply = self._roles[primary]
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, list) or reply[:1] != [b"master"]:
            raise redis.InvalidResponse("it is not a primary (any more, or yet)")

    @contextmanager
    def _noting(self, blamed: Address, name: str) -> Iterator[None]:
        try:
            yield
        except _VENDOR_ERRORS as error:
            self.failures.append((blamed, name, error))

    def _ask(
        self, address: Address, *commands: tuple[str, ...], of_sentinel: bool = False
    ) -> list[Any]:
        """The replies, in a single round trip on a connection of its own; some may be errors.

        Of its own, because one that was kept may lead to a host that is gone without a word.
        """
        left_ns = self._deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise redis.TimeoutError
        timeout_ns = min(left_ns, self._config.connect_ns)
        client = self._dialer.client(address, timeout_ns, of_sentinel=of_sentinel)
        try:
            pipeline: Any = client.pipeline(transaction=False)
            for command in commands:
                # Word by word: redis-py then finds no parser for it, and these differ by version.
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        finally:
            client.connection_pool.disconnect()
        self.answered.add(address)
        return replies


class _Dialer:
    """Makes redis-py's clients with what the config says: login, TLS, timeouts."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        tls = self._config.tls
        return None if tls is None else tls.context()

    def client(
        self, address: Address, timeout_ns: int, *, of_sentinel: bool = False
    ) -> redis.Redis:
        """Connects when it is first used."""
        config = self._config
        timeout_seconds = timeout_ns / _NS_PER_SECOND
        how: dict[str, Any] = {
            "username": config.sentinel_username if of_sentinel else config.username,
            "password": config.sentinel_password if of_sentinel else config.password,
            "db": 0 if of_sentinel else config.db,
            "socket_connect_timeout": timeout_seconds,
            "socket_timeout": timeout_seconds,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if address.port == 0:
            pool = ConnectionPool(UnixDomainSocketConnection, path=address.host, **how)
        elif self._tls is None:
            pool = ConnectionPool(Connection, host=address.host, port=address.port, **how)
        else:
            how |= {"tls": self._tls, "tls_name": config.tls and config.tls.server_name}
            pool = ConnectionPool(_TlsConnection, host=address.host, port=address.port, **how)
        return redis.Redis(connection_pool=pool)


class _TlsConnection(Connection):
    """With our own context: redis-py's would believe the system's authorities besides `tls_ca`,
    read the files for each connection, and take no other name than the host's."""

    def __init__(self, tls: ssl.SSLContext, tls_name: str | None, **how: Any) -> None:
        super().__init__(**how)  # type: ignore[no-untyped-call]  # redis-py leaves it so
        self._tls = tls
        self._tls_name = tls_name

    def _connect(self) -> ssl.SSLSocket:
        plain = super()._connect()  # type: ignore[no-untyped-call]  # redis-py leaves it so
        try:
            return self._tls.wrap_socket(plain, server_hostname=self._tls_name or self.host)
        except OSError:
            plain.close()
            raise


def _slots_in(reply: Any, asked: Address) -> _Found:
    """CLUSTER SLOTS: [first slot, last slot, [host, port, …] of the primary, … of each replica]."""
    if isinstance(reply, Exception):
        raise reply
    slots: list[Address | None] = [None] * SLOTS
    nodes: dict[Address, None] = {}
    try:
        for first, last, *servers in reply:
            if not 0 <= first <= last < SLOTS:
                raise redis.InvalidResponse(f"it has slots from {first} to {last}")
            addresses = [_address(server[0], server[1], asked) for server in servers]
            slots[first : last + 1] = [addresses[0]] * (last + 1 - first)
            nodes |= dict.fromkeys(addresses)
    except (TypeError, ValueError, LookupError) as error:
        raise redis.InvalidResponse("its answer to CLUSTER SLOTS is none") from error
    if not nodes:
        raise redis.InvalidResponse("it has no slots and knows no node that has")
    return _Found(slots, tuple(nodes))


def _primary_in(reply: Any, service: str) -> Address:
    if isinstance(reply, Exception):
        raise reply
    if reply is None:
        raise redis.InvalidResponse(f"it watches no primary called {show(service)}")
    try:
        return _address(reply[0], reply[1])
    except (TypeError, ValueError, LookupError) as error:
        raise redis.InvalidResponse("its answer about the primary is none") from error


def _replicas_in(reply: Any) -> list[Address]:
    """SENTINEL REPLICAS: [name, value, name, value, …] of each. Good to know, and no more."""
    try:
        facts = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]
        return [_address(each[b"ip"], each[b"port"]) for each in facts]
    except (TypeError, ValueError, LookupError):
        return []


def _address(host: bytes | None, port: bytes | int, asked: Address | None = None) -> Address:
    """A node that does not know its own name is where the one that was asked is."""
    number = int(port)
    if not 1 <= number <= 65_535:
        raise ValueError("port")
    if host and host != b"?":
        return Address(host.decode(), number)
    if asked is None:
        raise ValueError("host")
    return Address(asked.host, number)


def _timed_out(error: Exception) -> bool:
    return isinstance(error, redis.TimeoutError | TimeoutError)


def _reason(name: str, error: Exception) -> str:
    """What a server did, and where that tells, what to do about it."""
    below = error.__context__
    # redis-py's own message repeats the address.
    said = (below.strerror if isinstance(below, OSError) else None) or str(error)
    text = said.partition(_REPEATED)[0].strip() or type(error).__name__
    if _timed_out(error):
        text = "no answer in time"
    elif isinstance(error, redis.AuthenticationError):
        kind = "sentinel_" if name.startswith("Sentinel") else ""
        text = f"it refuses the login ({text}); check {kind}username and {kind}password"
    elif "cluster support disabled" in text:
        text = "it is one server and no cluster; write redis:// instead of redis+cluster://"
    return f"{name}: {text}"
