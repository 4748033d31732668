"""Carry out script calls: find the server, send the call, and handle a refusal.

The first attempt is straight: the server that has the key, one round trip. Only a refusal takes the
long way. A *refusal* is an answer that says that the call did not run (a redirection, an unknown
script, a server that loads its data), or NotSent.

A call must never be charged twice. So it is sent again only after a refusal. After a timeout or a
broken connection it is unknown whether the call ran: the caller gets an error that says that it
may have been counted once.

The deadline of a call begins when it is sent, and a refused call has another one for the next
attempt. After the deadline of the first attempt, only an answer is followed by one more. A store
that has never found its servers waits for them once, for as long as connecting may take
(`connect_ns`).

`RedisDriver` has the logic, once, as steps without I/O (see `core/steps.py`). `ThreadDriver` and
`AsyncioDriver` carry the steps out: they know how to send, to sleep and to wait. `RedisServers` is
the part that all drivers of a store share: where the servers are, and their circuit breakers.
`Links` are the drivers of a store, one for threads and one for each event loop.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from hiredis import ReplyError

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.clock import NS_PER_SECOND, SystemClock
from ratekeeper.core.errors import StoreError, StoreFull, StoreUnavailable, show
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Limit
from ratekeeper.core.steps import Ask, Call, Steps, Together, run, run_async
from ratekeeper.decide.stores.redis.batches import Batcher
from ratekeeper.decide.stores.redis.breakers import BreakerProber, ServerBreakers
from ratekeeper.decide.stores.redis.config import Address, RedisConfig
from ratekeeper.decide.stores.redis.connections import (
    BlockingConnection,
    ConnectionPool,
    NotSent,
    PipelinedConnection,
    ReplyFuture,
    refusal_error,
)
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.scripts import (
    SERVER_TIME,
    RuleScripts,
    ScriptCall,
    charge_replies,
    pack,
)
from ratekeeper.decide.stores.redis.topology import Topology, slot_of

if TYPE_CHECKING:
    from ratekeeper.decide.stores.redis.counters import CheckGroup

Refusal = ReplyError | NotSent

# A refused call is sent at most this often. A slot on the move takes two or three attempts.
ATTEMPTS_MAX: Final = 16
# The first pause before a call is sent again; each pause doubles, up to the longest.
PAUSE_S_MIN: Final = 0.001
PAUSE_S_MAX: Final = 0.032
# After a lookup has failed, calls get its error at once, until the next lookup begins.
_FIND_AGAIN_NS: Final = 200_000_000
# While there are calls, the driver asks the Sentinels for the primary this often.
LOOK_NS: Final = 2_000_000_000

ASKING: Final = pack("ASKING")
# Refusals that end by themselves: a cluster elects, keys of a slot move, a server reads its file,
# another client's script takes long.
_TEMPORARY: Final = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "BUSY", "MASTERDOWN"})


# ── The servers of a store ─────────────────────────────────────────────────────────────────────


class RedisServers:
    """Where a store's servers are, their breakers, and threads for slow work."""

    def __init__(self, config: RedisConfig) -> None:
        self.config = config
        self.tls = config.tls.context() if config.tls is not None else None
        self.topology = Topology(config)
        self.clustered = config.mode == "cluster"
        # When to look for the primary again. Never, unless there are Sentinels: in a cluster, a
        # primary that was replaced says so itself.
        self._look_ns = 0 if config.mode == "sentinel" else sys.maxsize
        self.closed = False
        # Number of calls that a server refused for lack of memory. Counted without a lock, so
        # approximate.
        self.refused = 0
        self.breakers = ServerBreakers(config)
        self._lock = fork_safe(threading.Lock())
        self._start()

    def _start(self) -> None:
        # Finding servers may take longer than a call.
        self._finder = ThreadPoolExecutor(1, "ratekeeper-redis-find")
        self._finding: Future[None] | None = None
        # Until when calls wait for a lookup, if none has succeeded; None: there was none yet.
        self._patient_until_ns: int | None = None
        self._find_again_ns = 0
        single = self.config.mode == "standalone"
        self._prober = BreakerProber(
            self.breakers,
            lambda address: probe(address, self.config, self.tls),
            None if single else self.find,
            None if single else self.topology.known,
        )

    def slot(self, key: bytes) -> int:
        """Return the slot of a key; 0 outside a cluster."""
        return slot_of(key) if self.clustered else 0

    def address_of(self, slot: int) -> Address:
        """Return the server of a slot. Raises NotSent while it is unknown."""
        if self.closed:
            raise _closed()
        if self._look_ns != sys.maxsize and time.monotonic_ns() > self._look_ns:
            self._look()
        address = self.topology.slots[slot]
        if address is None:
            raise NotSent(f"no primary is known for {self.config.shown()}")
        return address

    def without_slots(self, addresses: Iterable[Address]) -> list[Address]:
        """Return the servers that have no slot any more; their connections may be closed."""
        known = self.topology.known()
        return [each for each in addresses if known and each not in known]

    def require_closed(self, key: bytes) -> None:
        """Raise StoreUnavailable if the breaker of the key's server is open.

        For a caller that knows that some breaker is open, before it does anything in vain.
        """
        self.breakers.require_closed(self.topology.slots[self.slot(key)])

    def error_of(self, refusal: ReplyError) -> StoreError:
        """Return our error for a server's error."""
        error = refusal_error(refusal, self.config)
        if isinstance(error, StoreFull):
            self.refused += 1
        return error

    def _look(self) -> None:
        """Ask the Sentinels for the primary, in the background.

        A manual fail-over leaves the old primary running. With Sentinel's defaults it accepts
        writes for eight seconds beside the new primary, and those are lost. So calls do not wait
        until the old primary refuses.
        """
        self._look_ns = time.monotonic_ns() + LOOK_NS
        with suppress(StoreError):
            self.find()

    def find(self) -> Future[None]:
        """Look up where the servers are, in the background; concurrent callers share a lookup.

        While lookups fail, most callers get the last failure at once.
        """
        with self._lock:
            if self._finding is not None and not self._finding.done():
                return self._finding
            if self._finding is None or time.monotonic_ns() >= self._find_again_ns:
                try:
                    self._finding = self._finder.submit(self._find)
                except RuntimeError as error:  # the store is closed, or the process exits
                    raise _closed() from error
            if self._patient_until_ns is None:
                self._patient_until_ns = time.monotonic_ns() + self.config.connect_ns
            return self._finding

    def find_due_ns(self, due_ns: int) -> int:
        """Return until when a call that is due at `due_ns` waits for a lookup.

        As long as none has succeeded, until the first one has had the time to connect.
        """
        return max(due_ns, self._patient_until_ns or 0)

    def _find(self) -> None:
        try:
            self.topology.refresh()
        except StoreError:
            self._find_again_ns = time.monotonic_ns() + _FIND_AGAIN_NS
            raise
        self._patient_until_ns = self._find_again_ns = 0

    def forked(self) -> None:
        """In a forked child: start again, without the parent's threads."""
        self.topology = Topology(self.config)
        self.breakers.forked()
        self._start()

    def close(self) -> None:
        """Stop the threads; every later call raises StoreUnavailable."""
        self._prober.close()
        with self._lock:
            self.closed = True
            self._finder.shutdown(wait=False)
        self.topology.close()


def _closed() -> StoreUnavailable:
    return StoreUnavailable("the store is closed; open another one")


def probe(address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> None:
    """Do what a call does, on a new connection. Raises StoreError if there is no reply in time."""
    scripts = RuleScripts((Limit(1, per=1),), "probe", config, SystemClock())
    call = scripts.peek("probe", 1, SERVER_TIME)
    connection = BlockingConnection(address, config, tls)
    try:
        # Any reply will do. In a cluster it is most likely that the key is elsewhere.
        connection.exchange(pack("PING") + call.by_sha(), 2, config.deadline_ns, warning="")
    finally:
        connection.close()


# ── The logic, without I/O ─────────────────────────────────────────────────────────────────────


class RedisDriver(ABC):
    """Runs script calls. A subclass does the I/O, in threads or in asyncio.

    The abstract methods return their result (threads) or an awaitable of it (asyncio).
    """

    def __init__(self, servers: RedisServers, cache: DenialCache) -> None:
        self.servers = servers
        self.cache = cache

    @abstractmethod
    def send(self, key: bytes, payload: bytes) -> Any:
        """Send a call to the server of a key; return its reply. Raises NotSent."""

    @abstractmethod
    def _send_all(self, commands: Sequence[tuple[bytes, bytes]], due_ns: int, /) -> Any:
        """Send several keys' payloads; return the list of their replies and StoreErrors."""

    @abstractmethod
    def _send_to(self, address: Address, payload: bytes, discarded: int) -> Any:
        """Send to a server; return the reply after `discarded` others. Raises NotSent."""

    @abstractmethod
    def settle(self, call: ScriptCall, due_ns: int, reply: Any) -> Any:
        """Return a valid reply itself; if it is a refusal, the final reply. See `settling`."""

    @abstractmethod
    def _sleep(self, seconds: float) -> Any:
        """Sleep."""

    @abstractmethod
    def _wait(self, finding: Future[None], seconds: float) -> Any:
        """Wait up to `seconds`; return whether `finding` is done."""

    def due_ns(self) -> int:
        """Return the deadline of a call that starts now."""
        return time.monotonic_ns() + self.servers.config.deadline_ns

    def running(self, call: ScriptCall) -> Steps[Any]:
        """Send a call and return its reply. Raises StoreError."""
        due_ns = self.due_ns()
        try:
            reply = yield Call(self.send, call.key, call.by_sha())
        except NotSent as error:
            reply = error
        if isinstance(reply, Refusal):
            return (yield from self.settling(call, due_ns, reply))
        return _valid(call, reply)

    def running_all(self, calls: Sequence[ScriptCall]) -> Steps[list[Any]]:
        """Send several calls together; return their replies and StoreErrors, in order."""
        due_ns = self.due_ns()
        replies = yield Call(self._send_all, [(each.key, each.by_sha()) for each in calls], due_ns)
        refused = [at for at, reply in enumerate(replies) if type(reply) is not list]
        if refused:
            settled = yield Together(
                [Call(self.settle, calls[at], due_ns, replies[at]) for at in refused]
            )
            for at, reply in zip(refused, _only_store_errors(settled), strict=True):
                replies[at] = reply
        return cast("list[Any]", replies)

    def settling(self, call: ScriptCall, due_ns: int, reply: Any) -> Steps[Any]:
        """Return a valid reply; after a refusal, send the call again until it is not refused.

        After `due_ns` begins only the first of these attempts, and none if the call was not sent.
        Raises StoreError.
        """
        if not isinstance(reply, Refusal):
            return _valid(call, reply)
        servers, refusal = self.servers, reply
        slot = servers.slot(call.key)
        refused_by = servers.topology.slots[slot]
        pause_s, by_text, refreshed = PAUSE_S_MIN, False, False
        for attempt in range(ATTEMPTS_MAX):
            target, asking = None, False
            word, _, rest = str(refusal).partition(" ")
            if isinstance(refusal, NotSent):
                # Once: another server may have taken its place, or it may just be down.
                if refreshed or servers.config.mode == "standalone":
                    raise refusal
                refreshed = True
                due_ns = yield from self._finding(due_ns)
            elif word == "NOSCRIPT":
                by_text = True
            elif word in {"MOVED", "ASK"}:
                target = _redirection(rest, refusal, refused_by, servers.config)
                asking = word == "ASK"
                if not asking:
                    servers.topology.moved(slot, target)
                    servers.find()
            elif _is_temporary(word, servers.config):
                # Partly random, so that calls that were refused together do not return together.
                pause = pause_s * (0.5 + RANDOM.random())
                yield Call(self._sleep, min(pause, _left_ns(due_ns, refusal) / NS_PER_SECOND))
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                if word != "TRYAGAIN":
                    due_ns = yield from self._finding(due_ns)
            else:
                raise servers.error_of(refusal)
            payload = call.by_text() if by_text else call.by_sha()
            # The process may have waited for a processor since the answer, so one attempt begins.
            is_free = attempt == 0 and not isinstance(refusal, NotSent)
            _left_ns(sys.maxsize if is_free else due_ns, refusal)
            try:
                refused_by = target or servers.address_of(slot)
                payload = ASKING + payload if asking else payload
                reply = yield Call(self._send_to, refused_by, payload, int(asking))
            except NotSent as error:
                reply = error
            if not isinstance(reply, Refusal):
                return _valid(call, reply)
            refusal = reply
        raise refusal if isinstance(refusal, NotSent) else servers.error_of(refusal)

    def _finding(self, due_ns: int) -> Steps[int]:
        """Look up where the servers are, and wait for it until the deadline.

        Return the deadline of the next attempt, which does not include the first lookup of all.
        """
        # Started even if no time is left, for the next caller.
        finding = self.servers.find()
        until_ns = self.servers.find_due_ns(due_ns)
        left_s = max(until_ns - time.monotonic_ns(), 0) / NS_PER_SECOND
        if (yield Call(self._wait, finding, left_s)):
            error = finding.exception()
            if isinstance(error, StoreError):
                # A new one, because each caller adds its own traceback.
                raise type(error)(str(error)) from error
            if error is not None:
                raise error
        return due_ns if until_ns == due_ns else self.due_ns()


def _is_temporary(word: str, config: RedisConfig) -> bool:
    return word in _TEMPORARY or (word == "READONLY" and config.mode != "standalone")


def _left_ns(due_ns: int, refusal: Refusal) -> int:
    """Return the time left. Raises StoreUnavailable if there is none."""
    left_ns = due_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise StoreUnavailable(
            f"refused until the deadline, and not counted: {refusal}"
        ) from refusal
    return left_ns


def _redirection(
    rest: str, refusal: ReplyError, refused_by: Address | None, config: RedisConfig
) -> Address:
    """Return the server that a redirection such as `MOVED 3999 10.0.0.7:6381` names.

    A node that does not know its own name omits the host. Then it is the host that redirected.
    """
    if config.mode != "cluster":
        raise StoreUnavailable(
            f"{config.shown()} is a node of a cluster; use redis+cluster://"
        ) from refusal
    host, colon, port = rest.rpartition(" ")[2].rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise StoreUnavailable(
            f"{config.shown()} sent an invalid redirection: {show(str(refusal))}"
        ) from refusal
    return Address(host.strip("[]") or (refused_by.host if refused_by else ""), int(port))


def _valid(call: ScriptCall, reply: Any) -> Any:
    """Return a reply that the script can give, or a StoreError. Raises for any other reply."""
    if type(reply) is not call.script.reply and not isinstance(reply, StoreError):
        raise StoreUnavailable(
            f"not a reply of Redis: {show(reply)}; the call may have been counted once"
        )
    return reply


def _only_store_errors(results: list[Any]) -> list[Any]:
    """Return the results; raise an exception among them that is a defect, not a StoreError."""
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, StoreError | ReplyError):
            raise each
    return results


# ── Threads ────────────────────────────────────────────────────────────────────────────────────


class ThreadDriver(RedisDriver):
    """Calls from threads, each of which blocks until its reply."""

    def __init__(self, servers: RedisServers, cache: DenialCache) -> None:
        super().__init__(servers, cache)
        self._pools: dict[Address, ConnectionPool] = {}
        self._lock = fork_safe(threading.Lock())

    def decide(self, group: CheckGroup) -> Any:
        """Return the answer to a group of charges."""
        due_ns = time.monotonic_ns() + self.servers.config.deadline_ns
        try:
            try:
                reply = self.send(*group.command())
            except NotSent as error:
                reply = error
            if type(reply) is not list:
                reply = self.settle(group.call(), due_ns, reply)
        except StoreError as error:
            return group.failed(error)
        return group.read((reply,) if group.alone else charge_replies(reply, len(group.charges)))

    def decide_all(self, asked: Sequence[tuple[CheckGroup]]) -> list[Any]:
        """Return the answers to several groups, or their errors, after one round trip."""
        due_ns = self.due_ns()
        replies = self._send_all([group.command() for (group,) in asked], due_ns)
        answers: list[Any] = []
        for (group,), reply in zip(asked, replies, strict=True):
            try:
                if type(reply) is not list:
                    reply = self.settle(group.call(), due_ns, reply)  # noqa: PLW2901 - final
                answers.append(group.read(charge_replies(reply, len(group.charges))))
            except Exception as error:
                answers.append(error)
        return answers

    def settle(self, call: ScriptCall, due_ns: int, reply: Any) -> Any:
        return run(self.settling(call, due_ns, reply))

    def send(self, key: bytes, payload: bytes) -> Any:
        servers = self.servers
        address = servers.address_of(slot_of(key) if servers.clustered else 0)
        pool = self._pools.get(address) or self._pool(address)
        return pool.exchange(payload, 1, servers.config.deadline_ns)[0]

    def _send_all(self, commands: Sequence[tuple[bytes, bytes]], due_ns: int, /) -> list[Any]:
        """Send the calls of each server together, and wait for all servers at the same time."""
        servers = self.servers
        replies: list[Any] = [None] * len(commands)
        by_address: dict[Address, list[int]] = {}
        for index, (key, _) in enumerate(commands):
            try:
                address = servers.address_of(servers.slot(key))
                by_address.setdefault(address, []).append(index)
            except StoreError as error:
                replies[index] = error
        failed = False

        def exchange() -> None:
            """Send to the next server; before its replies are read, send to the others."""
            nonlocal failed
            if not by_address:
                return
            address = next(iter(by_address))
            indexes = by_address.pop(address)
            payload = b"".join([commands[index][1] for index in indexes])
            found: Sequence[Any]
            try:
                if failed and time.monotonic_ns() >= due_ns:
                    raise NotSent("the calls to other servers took until the deadline")
                found = self._pool(address).exchange(
                    payload, len(indexes), servers.config.deadline_ns, exchange
                )
            except StoreError as error:
                found, failed = [error] * len(indexes), True
            for index, reply in zip(indexes, found, strict=True):
                replies[index] = reply

        while by_address:  # a call that could not be sent has left the others
            exchange()
        return replies

    def _send_to(self, address: Address, payload: bytes, discarded: int) -> Any:
        deadline_ns = self.servers.config.deadline_ns
        return self._pool(address).exchange(payload, 1 + discarded, deadline_ns)[-1]

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _wait(self, finding: Future[None], seconds: float) -> bool:
        return bool(wait([finding], seconds).done)

    def _pool(self, address: Address) -> ConnectionPool:
        pool = self._pools.get(address)
        if pool is None:
            servers = self.servers
            breaker = servers.breakers.of(address)
            with self._lock:
                for gone in servers.without_slots(self._pools):
                    self._pools.pop(gone).retire()
                made = ConnectionPool(address, servers.config, servers.tls, breaker)
                pool = self._pools.setdefault(address, made)
        return pool

    def forked(self) -> None:
        """In a forked child: drop the parent's connections."""
        parents, self._pools = self._pools, {}
        for pool in parents.values():
            pool.retire()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for pool in self._pools.values():
                pool.close()


# ── asyncio ────────────────────────────────────────────────────────────────────────────────────


class AsyncioDriver(RedisDriver):
    """Calls from the tasks of one event loop."""

    def __init__(
        self, servers: RedisServers, loop: asyncio.AbstractEventLoop, cache: DenialCache
    ) -> None:
        super().__init__(servers, cache)
        # None after closing, so that the store keeps no reference to a loop that has ended.
        self.loop: asyncio.AbstractEventLoop | None = loop
        self._connections: dict[Address, PipelinedConnection] = {}
        self.batches = Batcher(self)
        self._closing: asyncio.Task[None] | None = None
        self._until_loop_ends = self._end_with_loop()
        with suppress(StopIteration):
            self._until_loop_ends.__anext__().send(None)  # run it to its yield

    async def _end_with_loop(self) -> AsyncGenerator[None, None]:
        """Close the connections at the end of `asyncio.run`, which closes suspended generators.

        A program may run several loops one after another with one store, and asyncio has no other
        notification of their ends.
        """
        try:
            yield
        finally:
            await self.close()
            del self._until_loop_ends  # it refers to the loop

    async def settle(self, call: ScriptCall, due_ns: int, reply: Any) -> Any:
        return await run_async(self.settling(call, due_ns, reply))

    def send(self, key: bytes, payload: bytes) -> ReplyFuture:
        return self.connection_of(key).submit(payload)

    def connection_of(self, key: bytes) -> PipelinedConnection:
        """Return the connection to the server of a key, connected or not. Raises NotSent."""
        servers = self.servers
        address = servers.address_of(slot_of(key) if servers.clustered else 0)
        return self._connections.get(address) or self._connection(address)

    async def _send_all(
        self, commands: Sequence[tuple[bytes, bytes]], _due_ns: int, /
    ) -> list[Any]:
        """Send all calls at once, so that they leave in one batch."""
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(self.send(*command))
            except StoreError as error:
                replies.append(error)
        in_flight = [each for each in replies if isinstance(each, asyncio.Future)]
        received = iter(
            _only_store_errors(await asyncio.gather(*in_flight, return_exceptions=True))
        )
        return [next(received) if isinstance(each, asyncio.Future) else each for each in replies]

    async def _send_to(self, address: Address, payload: bytes, discarded: int) -> Any:
        return await self._connection(address).submit(payload, discarded)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _wait(self, finding: Future[None], seconds: float) -> bool:
        awaited = asyncio.wrap_future(finding)
        # Mark its exception as retrieved: perhaps no other call reads it.
        awaited.add_done_callback(lambda each: each.cancelled() or each.exception())
        # `wait` does not cancel it at the timeout: other calls wait for the same lookup.
        return bool((await asyncio.wait({awaited}, timeout=seconds))[0])

    def _connection(self, address: Address) -> PipelinedConnection:
        connection = self._connections.get(address)
        if connection is None:
            if self.loop is None:
                raise _closed()
            servers = self.servers
            for gone in servers.without_slots(self._connections):
                if self._connections[gone].retire():
                    del self._connections[gone]
            breaker = servers.breakers.of(address)
            connection = PipelinedConnection(
                self.loop, address, servers.config, servers.tls, breaker
            )
            self._connections[address] = connection
        return connection

    def close_soon(self) -> None:
        """Close from outside the event loop."""
        if self.loop is not None:
            self._closing = self.loop.create_task(self.close())

    async def close(self) -> None:
        """Close every connection; calls in flight fail. May be called again."""
        self.loop = None
        while self._connections:
            await self._connections.popitem()[1].close()


# ── The links of a store ───────────────────────────────────────────────────────────────────────


class Links:
    """The drivers of a store: one for threads, and one for each event loop."""

    def __init__(self, servers: RedisServers, cache: DenialCache) -> None:
        self.servers = servers
        self.cache = cache
        self.threads = ThreadDriver(servers, cache)
        self.wait = self.threads.decide
        self.wait_together = self.threads.decide_all
        self._lock = fork_safe(threading.Lock())
        self._last: AsyncioDriver | None = None
        # A loop that is garbage-collected takes its driver along.
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncioDriver] = (
            weakref.WeakKeyDictionary()
        )

    def send(self, group: CheckGroup) -> Awaitable[Any]:
        """Return the awaitable of the answer to a group of charges."""
        driver = self._last
        if driver is None or driver.loop is not asyncio.get_running_loop():
            driver = self._last = self.of_loop()
        batches = driver.batches
        return batches.submit(group) if group.raises else batches.decide(group)

    def joint_ask(self, group: CheckGroup) -> Ask:
        """Return the Ask of a group that a thread can send together with others."""
        ask = Ask(self.wait, self.send, group)
        ask.together = self.wait_together
        return ask

    def ask(self, steps: Callable[..., Steps[Any]], *args: Any) -> Ask:
        """Return the Ask of steps that begin with a driver."""
        return Ask(self._run, self._run_async, steps, *args)

    def _run(self, steps: Callable[..., Steps[Any]], *args: Any) -> Any:
        return run(steps(self.threads, *args))

    def _run_async(self, steps: Callable[..., Steps[Any]], *args: Any) -> Awaitable[Any]:
        return run_async(steps(self.of_loop(), *args))

    def of_loop(self) -> AsyncioDriver:
        """Return the driver of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            driver = self._drivers.get(loop)
            if driver is None:
                # The connections of a closed loop keep it alive, so drop it here.
                for closed in [each for each in self._drivers if each.is_closed()]:
                    del self._drivers[closed]
                driver = self._drivers[loop] = AsyncioDriver(self.servers, loop, self.cache)
            return driver

    @property
    def coalesced(self) -> int:
        """Number of checks that shared a call with others, in the current event loops."""
        return sum(driver.batches.coalesced for driver in list(self._drivers.values()))

    def close(self) -> None:
        """Close the connections of threads now, and those of event loops in their loops."""
        self.cache.clear()
        self.servers.close()
        self.threads.close()
        for loop, driver in list(self._drivers.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(driver.close_soon)

    async def aclose(self) -> None:
        """Close, and wait until this loop's connections are closed."""
        driver = self._drivers.pop(asyncio.get_running_loop(), None)
        self.close()
        if driver is not None:
            await driver.close()

    def forked(self) -> None:
        """In a forked child: drop the parent's connections."""
        self.cache.clear()
        self.servers.forked()
        self.threads.forked()
        self._drivers.clear()
        self._last = None
