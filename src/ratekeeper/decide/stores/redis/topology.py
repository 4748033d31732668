"""Where the servers are: which node has a slot, and which server is the primary.

The driver reads `slots` before each call, from memory: a list with an address for each of the
16,384 slots, all equal outside a cluster. It is updated in two ways. A node that no longer has a
slot names the node that has it (`moved`), which corrects that slot alone. If nothing is known, or a
server is gone, the driver calls `refresh`, which asks the servers:

    cluster    any node for all slots. A node that is cut off from the others, or was removed, has
               stale data. So the answer of a node that does not call the cluster healthy is used
               only if no other answer is better.
    sentinel   one Sentinel after another for the primary, and then that server for its role: for
               some seconds after a promotion, a Sentinel may still name the old primary.

A thousand callers notice a dead primary at once, so a refresh is shared: callers that come while
one runs wait for it and take its result. A successful refresh is valid for 50 ms. Servers are asked
in random order, which spreads the load of a fleet, and those that failed last time come last: a
dead host costs its timeout once, not in every refresh.

Blocking, for threads; asyncio runs `refresh` in a thread. The connections made here are redis-py's;
the driver has its own for the checks.
"""

from __future__ import annotations

import ssl
import time
from binascii import crc_hqx
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable, show
from ratekeeper.decide.stores.redis.config import REPEATED_ARGUMENTS, Address, RedisConfig
from ratekeeper.decide.stores.redis.findings import FORBIDDEN

SLOTS: Final = 16_384
REFRESH_INTERVAL_NS_MIN: Final = 50_000_000
# Enough for four dead hosts in a row, at the default of a second each.
REFRESH_NS_MAX: Final = 5_000_000_000
_NS_PER_SECOND: Final = 1_000_000_000

# Python raises UnicodeError for an invalid host name.
REDIS_PY_ERRORS: Final = (redis.RedisError, OSError, UnicodeError)


@lru_cache(maxsize=SLOTS)
def slot_of(key: bytes) -> int:
    """Return the cluster's slot of a key: of the text in its first braces, if there is any.

    >>> slot_of(b"rk:{user:42}") == slot_of(b"user:42")
    True
    """
    opened = key.find(b"{")
    if opened >= 0:
        closed = key.find(b"}", opened + 1)
        if closed > opened + 1:
            key = key[opened + 1 : closed]
    return crc_hqx(key, 0) % SLOTS


class Topology:
    """Which server has which slot. Thread-safe."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._factory = _ClientFactory(config)
        alone = config.addresses[:1] if config.mode == "standalone" else ()
        # The primary of each slot, as far as it is known. Read without a lock.
        self.slots: list[Address | None] = list(alone or (None,)) * SLOTS
        self._nodes: tuple[Address, ...] = alone
        self._failed: set[Address] = set()
        self._refreshed_ns: int | None = None
        self._running: Future[None] | None = None
        self._clients: dict[Address, redis.Redis] = {}
        self._closed = False
        # Never held during I/O.
        self._lock = Lock()

    def moved(self, slot: int, address: Address) -> None:
        """Note that a slot is on another node now."""
        with self._lock:
            self.slots[slot] = address
            if address not in self._nodes:
                self._nodes = (*self._nodes, address)

    def primaries(self) -> list[Address]:
        """Return every server that has a slot; refresh if none is known. Raises as `refresh`."""
        if not self._nodes:
            self.refresh()
        return list(dict.fromkeys(filter(None, self.slots)))

    def known(self) -> set[Address]:
        """Return every server that is known to have a slot. From memory; may be empty."""
        return set(filter(None, self.slots))

    def nodes(self) -> list[Address]:
        """Return every server and replica; refresh if none is known. Raises as `refresh`."""
        if not self._nodes:
            self.refresh()
        return list(self._nodes)

    def refresh(self) -> None:
        """Ask the servers where everything is, in at most about REFRESH_NS_MAX.

        Raises StoreUnavailable with the answer of each server, or StoreTimeout if none answered.
        Then the previous data stays.
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
            self._ask_servers()
        except BaseException as error:
            self._finish(mine, error)
            raise
        self._finish(mine, None)

    def client(self, address: Address) -> redis.Redis:
        """Return a redis-py client for administration: logged in, without retries.

        It is kept for the next caller, and closed by `close` or when the server has left. It waits
        `connect_ns` for the connection and for each reply, and raises redis-py's own errors.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self._config.shown()} has been closed; open it again")
            client = self._clients.get(address)
            if client is None:
                client = self._factory.client(address, self._config.connect_ns)
                self._clients[address] = client
            return client

    def close(self) -> None:
        """Close the clients. The known slots stay."""
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

    def _ask_servers(self) -> None:
        """Update the slots. Only one thread at a time runs this."""
        attempt = _Refresh(self._config, self._factory)
        if self._config.mode == "cluster":
            known = dict.fromkeys((*self._nodes, *self._config.addresses))
            found = attempt.slots(self._in_turn(known), skip=self._failed)
        else:
            found = attempt.primary(self._in_turn(self._config.addresses))
        self._failed = {address for address, _, _ in attempt.failures} | (
            self._failed - attempt.answered
        )
        if found is None:
            raise attempt.error()
        with self._lock:
            self.slots, self._nodes = found.slots, found.nodes
            kept = {*found.nodes, *self._config.addresses}
            left = [self._clients.pop(address) for address in self._clients.keys() - kept]
        self._failed &= kept
        for client in left:
            client.connection_pool.disconnect()

    def _in_turn(self, addresses: Iterable[Address]) -> list[Address]:
        """Return them in random order, with those that failed last time at the end."""
        each = list(addresses)
        RANDOM.shuffle(each)
        return sorted(each, key=self._failed.__contains__)


# ── redis-py, for everything that is not a check ───────────────────────────────────────────────


def pipelined(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the replies to several commands in one round trip; some may be ResponseErrors."""
    if not commands:
        return []
    pipeline: Any = client.pipeline(transaction=False)
    for command in commands:
        # Word by word, so that redis-py applies no parser: they differ by version.
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def timed_out(error: Exception) -> bool:
    """Return True for a timeout."""
    return isinstance(error, redis.TimeoutError | TimeoutError)


def error_text(error: Exception) -> str:
    """Describe an error of redis-py, without secrets."""
    if timed_out(error):
        return "no answer in time"
    below = error.__context__
    # redis-py's own message repeats the address.
    text = (below.strerror if isinstance(below, OSError) else None) or str(error)
    return text.partition(REPEATED_ARGUMENTS)[0].strip() or type(error).__name__


def store_error(where: object, error: Exception, permissions: str = "") -> StoreError:
    """Return a StoreError for an error of redis-py; `permissions` names those that it needs."""
    text = error_text(error)
    if isinstance(error, NoPermissionError) or FORBIDDEN.search(text):
        text += permissions
    made = StoreTimeout if timed_out(error) else StoreUnavailable
    return made(f"{where}: {text}")


@contextmanager
def store_errors(where: object, permissions: str = "") -> Iterator[None]:
    """Raise StoreError for errors of redis-py. See `store_error`."""
    try:
        yield
    except REDIS_PY_ERRORS as error:
        # The cause's traceback would show the part that the message omits.
        cause = None if REPEATED_ARGUMENTS in str(error) else error
        raise store_error(where, error, permissions) from cause


# ── One refresh ────────────────────────────────────────────────────────────────────────────────


def _result_of(running: Future[None]) -> None:
    """Raise another thread's error, as a new one: each caller adds its own traceback."""
    error = running.exception()
    if isinstance(error, StoreError):
        raise type(error)(str(error)) from error
    if error is not None:
        raise StoreUnavailable("the refresh that this call waited for was interrupted") from error


@dataclass(frozen=True, slots=True)
class _SlotMap:
    """Where everything is, according to one server."""

    slots: list[Address | None]
    nodes: tuple[Address, ...]

    @property
    def covered(self) -> int:
        return SLOTS - self.slots.count(None)


class _Refresh:
    """One refresh: its deadline, the servers that answered, and the failures."""

    def __init__(self, config: RedisConfig, factory: _ClientFactory) -> None:
        self._config = config
        self._factory = factory
        self._deadline_ns = time.monotonic_ns() + REFRESH_NS_MAX
        self.answered: set[Address] = set()
        # The server to ask last next time, its name in a message, and its error.
        self.failures: list[tuple[Address, str, Exception]] = []
        self._roles: dict[Address, Any] = {}

    def slots(self, addresses: Sequence[Address], skip: set[Address]) -> _SlotMap | None:
        """Ask nodes until one calls the cluster healthy; else return the most complete map."""
        best: _SlotMap | None = None
        for address in addresses:
            # There is a map already, and this node failed recently: not worth its timeout.
            if best is not None and address in skip:
                continue
            with self._noting(address, str(address)):
                slots, info = self._ask(address, ("CLUSTER", "SLOTS"), ("CLUSTER", "INFO"))
                found = _slots_in(slots, address)
                # Without permission for CLUSTER INFO, assume that the cluster is healthy.
                broken = isinstance(info, bytes) and b"cluster_state:ok" not in info
                if found.covered == SLOTS and not broken:
                    return found
                if best is None or found.covered > best.covered:
                    best = found
        return best

    def primary(self, sentinels: Sequence[Address]) -> _SlotMap | None:
        """Return the first server that a Sentinel names and whose role is primary."""
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
                    return _SlotMap([primary] * SLOTS, tuple(nodes))
        return None

    def error(self) -> StoreError:
        """Return one error for all failures."""
        reasons = "; ".join(_reason(name, error) for _, name, error in self.failures)
        sought = "the primary" if self._config.mode == "sentinel" else "the cluster's slots"
        message = f"{self._config.shown()}: no server could name {sought}: {reasons}"
        silent = all(timed_out(error) for _, _, error in self.failures)
        made = StoreTimeout(message) if silent else StoreUnavailable(message)
        cause = self.failures[-1][2]
        # The cause's traceback would show the part that the message omits.
        made.__cause__ = None if REPEATED_ARGUMENTS in str(cause) else cause
        return made

    def _check_role(self, primary: Address) -> None:
        """Raise unless a server is a primary. Asks it once: a dead host costs one timeout."""
        if primary not in self._roles:
            try:
                (self._roles[primary],) = self._ask(primary, ("ROLE",))
            except REDIS_PY_ERRORS as error:
                self._roles[primary] = error
        reply = self._roles[primary]
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, list) or reply[:1] != [b"master"]:
            raise redis.InvalidResponse("it is not a primary (any more, or not yet)")

    @contextmanager
    def _noting(self, blamed: Address, name: str) -> Iterator[None]:
        try:
            yield
        except REDIS_PY_ERRORS as error:
            self.failures.append((blamed, name, error))

    def _ask(
        self, address: Address, *commands: tuple[str, ...], of_sentinel: bool = False
    ) -> list[Any]:
        """Return the replies of one round trip on a new connection; some may be errors.

        A new one, because a kept connection may lead to a host that has silently disappeared.
        """
        left_ns = self._deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise redis.TimeoutError
        timeout_ns = min(left_ns, self._config.connect_ns)
        client = self._factory.client(address, timeout_ns, of_sentinel=of_sentinel)
        try:
            replies = pipelined(client, commands)
        finally:
            client.connection_pool.disconnect()
        self.answered.add(address)
        return replies


class _ClientFactory:
    """Makes redis-py's clients with the login, TLS and timeouts of the config."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        tls = self._config.tls
        return None if tls is None else tls.context()

    def client(
        self, address: Address, timeout_ns: int, *, of_sentinel: bool = False
    ) -> redis.Redis:
        """Return a client. It connects at its first use."""
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
    """A connection with our TLS context.

    redis-py's would trust the system's authorities besides `tls_ca`, read the files for each
    connection, and verify no other name than the host.
    """

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


def _slots_in(reply: Any, source: Address) -> _SlotMap:
    """Read CLUSTER SLOTS: [first, last, [host, port, …] of the primary, … of each replica]."""
    if isinstance(reply, Exception):
        raise reply
    slots: list[Address | None] = [None] * SLOTS
    nodes: dict[Address, None] = {}
    try:
        for first, last, *servers in reply:
            if not 0 <= first <= last < SLOTS:
                raise redis.InvalidResponse(f"it returned slots from {first} to {last}")
            addresses = [_address(server[0], server[1], source) for server in servers]
            slots[first : last + 1] = [addresses[0]] * (last + 1 - first)
            nodes |= dict.fromkeys(addresses)
    except (TypeError, ValueError, LookupError) as error:
        raise redis.InvalidResponse("it returned an invalid reply to CLUSTER SLOTS") from error
    if not nodes:
        raise redis.InvalidResponse("it has no slots and knows no node with slots")
    return _SlotMap(slots, tuple(nodes))


def _primary_in(reply: Any, service: str) -> Address:
    if isinstance(reply, Exception):
        raise reply
    if reply is None:
        raise redis.InvalidResponse(f"it monitors no primary called {show(service)}")
    try:
        return _address(reply[0], reply[1])
    except (TypeError, ValueError, LookupError) as error:
        raise redis.InvalidResponse("it returned an invalid address of the primary") from error


def _replicas_in(reply: Any) -> list[Address]:
    """Read SENTINEL REPLICAS: [name, value, name, value, …] of each; empty if it is invalid."""
    try:
        facts = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]
        return [_address(each[b"ip"], each[b"port"]) for each in facts]
    except (TypeError, ValueError, LookupError):
        return []


def _address(host: bytes | None, port: bytes | int, source: Address | None = None) -> Address:
    """Return an address. A node that does not know its host is on the host that answered."""
    number = int(port)
    if not 1 <= number <= 65_535:
        raise ValueError("port")
    if host and host != b"?":
        return Address(host.decode(), number)
    if source is None:
        raise ValueError("host")
    return Address(source.host, number)


def _reason(name: str, error: Exception) -> str:
    """Describe a failure, with the remedy if there is an obvious one."""
    text = error_text(error)
    if isinstance(error, redis.AuthenticationError):
        kind = "sentinel_" if name.startswith("Sentinel") else ""
        text = f"it rejects the login ({text}); check {kind}username and {kind}password"
    elif "cluster support disabled" in text:
        text = "it is a single server, not a cluster; write redis:// instead of redis+cluster://"
    return f"{name}: {text}"
