"""Carrying calls out: for threads, and for asyncio. The two say the same, line by line.

The first try is straight: the node that has the key, one trip. Only a refusal goes through
`calls.recover`. Whatever happens, a call ends by its deadline.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hiredis import ReplyError

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable, show
from tollkeeper.decide.stores.redis.backoff import Backoff
from tollkeeper.decide.stores.redis.breakers import Breakers
from tollkeeper.decide.stores.redis.calls import (
    ASKING,
    Call,
    Moved,
    NotSent,
    Pause,
    Refresh,
    Send,
    Step,
    recover,
)
from tollkeeper.decide.stores.redis.config import Address, RedisConfig
from tollkeeper.decide.stores.redis.denied import Denied
from tollkeeper.decide.stores.redis.flights import Flights
from tollkeeper.decide.stores.redis.probes import Prober, probe
from tollkeeper.decide.stores.redis.scripts import CHECK
from tollkeeper.decide.stores.redis.topology import Topology, slot_of
from tollkeeper.decide.stores.redis.wire import Node
from tollkeeper.decide.stores.redis.wire_async import AsyncNode

if TYPE_CHECKING:
    from tollkeeper.decide.stores.redis.gates import Commands

Refusal = ReplyError | NotSent
PROBES_MAX: Final = 16
# So often, while there are calls, the Sentinels are asked anew who the primary is.
LOOK_NS: Final = 2_000_000_000


class Servers:
    """What both ways share: where the servers are, and threads for what takes long."""

    def __init__(self, config: RedisConfig) -> None:
        self.config = config
        self.tls = config.tls.context() if config.tls is not None else None
        self.topology = Topology(config)
        self.clustered = config.mode == "cluster"
        # When to look again; never, where a primary that was replaced says so itself.
        self._look_ns = 0 if config.mode == "sentinel" else sys.maxsize
        self.closed = False
        # Times a call found no memory left; counted without a lock: about right.
        self.refused = 0
        self.breakers = Breakers(config)
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        # Threads that probe, and one that finds servers: these may take longer than a call may.
        # It is another one, because probing hosts that are gone may keep all of them busy.
        self._probers = ThreadPoolExecutor(PROBES_MAX, "tollkeeper-redis-probes")
        self._finder = ThreadPoolExecutor(1, "tollkeeper-redis-find")
        self._finding: Future[None] | None = None
        self._backoff = Backoff()
        single = self.config.mode == "standalone"
        self._prober = Prober(
            self.breakers,
            lambda address: probe(address, self.config, self.tls),
            self._probers,
            None if single else self.find,
            None if single else self.topology.known,
        )

    def slot(self, key: bytes) -> int:
        return slot_of(key) if self.clustered else 0

    def address_of(self, slot: int) -> Address:
        """The node to ask. Raises NotSent while nobody knows."""
        if self.closed:
            raise _closed()
        if self._look_ns != sys.maxsize and time.monotonic_ns() > self._look_ns:
            self._look()
        address = self.topology.address_of(slot)
        if address is None:
            raise NotSent(f"no primary is known for {self.config.shown()}")
        return address

    def not_in_use(self, addresses: Iterable[Address]) -> list[Address]:
        """Those that have no slot any more; to be let go when another one is first asked."""
        known = self.topology.known()
        return [each for each in addresses if known and each not in known]

    def require_closed(self, commands: Commands, subject: str) -> None:
        """Raise StoreUnavailable if the breaker is open of the server that has a subject.

        For a caller who knows that some breaker is open, and wants to do nothing in vain.
        """
        slot = slot_of(commands.key(subject)) if self.clustered else 0
        self.breakers.require_closed(self.topology.address_of(slot))

    def _look(self) -> None:
        """Ask the Sentinels, in the background.

        An operator's switch leaves the old primary running: as Sentinel comes, it takes writes for
        eight seconds beside the new one, and those are lost. So nobody waits until it says no.
        """
        self._look_ns = time.monotonic_ns() + LOOK_NS
        with suppress(StoreError):
            self.find()

    def find(self) -> Future[None]:
        """Find the servers anew, in the background; those who ask meanwhile share it.

        While none can be found, most who ask get the last failure, at once.
        """
        with self._lock:
            if self._finding is not None and not self._finding.done():
                return self._finding
            if self._finding is None or self._backoff.may_try(time.monotonic_ns()):
                try:
                    self._finding = self._finder.submit(self._find)
                except RuntimeError as error:  # closed, or the process ends
                    raise _closed() from error
            return self._finding

    def _find(self) -> None:
        began_ns = time.monotonic_ns()
        try:
            self.topology.refresh()
        except StoreError as error:
            self._backoff.failed(began_ns, time.monotonic_ns(), str(error))
            raise
        self._backoff.succeeded()

    def forked(self) -> None:
        """In a child process: start anew, whatever the parent's threads were at."""
        self._lock = threading.Lock()
        self.topology = Topology(self.config)
        self.breakers.forked()
        self._start()

    def close(self) -> None:
        self._prober.close()
        with self._lock:
            self.closed = True
            self._probers.shutdown(wait=False, cancel_futures=True)
            self._finder.shutdown(wait=False)
        self.topology.close()


def _closed() -> StoreUnavailable:
    return StoreUnavailable("the store is closed; open another one")


def _raise_failure(found: Future[None] | asyncio.Future[None]) -> None:
    """What a search failed with, as a new error: many callers cannot add to one traceback."""
    error = found.exception()
    if isinstance(error, StoreError):
        raise type(error)(str(error)) from error
    if error is not None:
        raise error


@dataclass(slots=True)
class _Plan:
    """A call that was refused: the steps to take, and how long there is for them."""

    call: Call
    slot: int
    due_ns: int
    refusal: Refusal
    steps: Generator[Step, Any, Any]
    asked: Address | None

    def left_ns(self) -> int:
        """Time left. Raises StoreUnavailable when there is none: a refused call was not counted."""
        left_ns = self.due_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise StoreUnavailable(
                f"refused until the deadline, and not counted: {self.refusal}"
            ) from self.refusal
        return left_ns

    def named(self, address: Address) -> Address:
        """An address as a node told it; one without a host is on the host that was asked."""
        host = address.host or (self.asked.host if self.asked else "")
        return Address(host, address.port)


def _plan(call: Call, due_ns: int, refusal: Refusal, servers: Servers) -> _Plan:
    slot = servers.slot(call.key)
    steps = recover(call, refusal, servers.config)
    return _Plan(call, slot, due_ns, refusal, steps, servers.topology.address_of(slot))


def _answer(call: Call, reply: Any) -> Any:
    """The reply, if it is one that the script gives. What is no Redis may say anything."""
    wanted = list if call.script is CHECK else int
    if type(reply) is not wanted and not isinstance(reply, StoreError):
        raise StoreUnavailable(
            f"not an answer of Redis: {show(reply)}; the call may have been counted once"
        )
    return reply


def _no_defect(found: list[Any]) -> list[Any]:
    """All that came; an error that is neither the store's nor a refusal is raised."""
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, StoreError | ReplyError):
            raise each
    return found


def _target(step: Send, plan: _Plan, servers: Servers) -> Address:
    if step.address is None:
        return servers.address_of(plan.slot)
    return plan.named(step.address)


class Threads:
    """Calls from threads, each of which waits for its answer."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._nodes: dict[Address, Node] = {}
        self._lock = threading.Lock()

    def start(self, key: bytes, payload: bytes) -> Any:
        """Send a call to the node that has the key; its reply, a refusal too. Raises NotSent."""
        servers = self.servers
        address = servers.address_of(slot_of(key) if servers.clustered else 0)
        node = self._nodes.get(address)
        if node is None:
            node = self._node(address)
        return node.exchange(payload, 1, servers.config.deadline_ns)[0]

    def run(self, call: Call, payload: bytes) -> Any:
        """The answer to one call, which `payload` already spells."""
        started_ns = time.monotonic_ns()
        try:
            reply = self.start(call.key, payload)
        except NotSent as error:
            reply = error
        return self.settled(call, started_ns, reply)

    def settled(self, call: Call, started_ns: int, reply: Any) -> Any:
        """The reply itself; or, if it is a refusal, what came of it in the end."""
        return self._settled(call, started_ns + self.servers.config.deadline_ns, reply)

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers to several calls, those to one server in one trip; StoreErrors among them."""
        servers = self.servers
        due_ns = time.monotonic_ns() + servers.config.deadline_ns
        answers: list[Any] = [None] * len(calls)
        by_address: dict[Address, list[int]] = {}
        for index, call in enumerate(calls):
            try:
                address = servers.address_of(servers.slot(call.key))
                by_address.setdefault(address, []).append(index)
            except StoreError as error:
                answers[index] = error
        for address, indexes in by_address.items():
            payload = b"".join(calls[index].by_sha() for index in indexes)
            left_ns = due_ns - time.monotonic_ns()
            try:
                if left_ns <= 0:
                    raise NotSent("the calls to other servers took all the time")
                replies = self._node(address).exchange(payload, len(indexes), left_ns)
            except StoreError as error:
                replies = [error] * len(indexes)
            for index, reply in zip(indexes, replies, strict=True):
                answers[index] = reply
        for index, call in enumerate(calls):
            try:
                answers[index] = self._settled(call, due_ns, answers[index])
            except StoreError as error:
                answers[index] = error
        return answers

    def _settled(self, call: Call, due_ns: int, reply: Any) -> Any:
        """The reply itself; or, if it is a refusal, what came of it in the end."""
        if not isinstance(reply, Refusal):
            return _answer(call, reply)
        plan = _plan(call, due_ns, reply, self.servers)
        result = None
        while True:
            try:
                step = plan.steps.send(result)
            except StopIteration as done:
                return _answer(call, done.value)
            except StoreFull:
                self.servers.refused += 1
                raise
            result = self._take(step, plan)

    def _take(self, step: Step, plan: _Plan) -> Any:
        servers = self.servers
        # Begun even when no time is left: whoever calls next will be glad of it.
        finding = servers.find() if isinstance(step, Refresh) else None
        left_ns = plan.left_ns()
        if isinstance(step, Pause):
            time.sleep(min(step.seconds, left_ns / NS_PER_SECOND))
        elif isinstance(step, Moved):
            servers.topology.moved(plan.slot, plan.named(step.address))
            servers.find()
        elif finding is not None:
            if wait([finding], left_ns / NS_PER_SECOND).done:
                _raise_failure(finding)
        elif isinstance(step, Send):
            try:
                plan.asked = _target(step, plan, servers)
                payload = ASKING + step.payload if step.asking else step.payload
                reply = self._node(plan.asked).exchange(payload, 1 + step.asking, left_ns)[-1]
            except NotSent as error:
                reply = error
            if isinstance(reply, Refusal):
                plan.refusal = reply
            return reply
        return None

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            servers = self.servers
            breaker = servers.breakers.of(address)
            with self._lock:
                for gone in servers.not_in_use(self._nodes):
                    self._nodes.pop(gone).let_go()
                made = Node(address, servers.config, servers.tls, breaker)
                node = self._nodes.setdefault(address, made)
        return node

    def forked(self) -> None:
        """In a child process: let go of the parent's connections."""
        self._lock = threading.Lock()
        parents, self._nodes = self._nodes, {}
        for node in parents.values():
            node.let_go()

    def close(self) -> None:
        with self._lock:
            for node in self._nodes.values():
                node.close()


class Tasks:
    """Calls from the tasks of one event loop."""

    def __init__(self, servers: Servers, loop: asyncio.AbstractEventLoop, denied: Denied) -> None:
        self._servers = servers
        self.flights = Flights(servers.config.deadline_ns, denied, self)
        # None once it is closed: then the store does not keep a loop that is gone.
        self.loop: asyncio.AbstractEventLoop | None = loop
        self._nodes: dict[Address, AsyncNode] = {}
        self._closing: asyncio.Task[None] | None = None
        self._until_loop_ends = self._end_with_loop()
        with suppress(StopIteration):
            self._until_loop_ends.__anext__().send(None)  # to where it waits

    async def _end_with_loop(self) -> AsyncGenerator[None, None]:
        """`asyncio.run` closes generators that wait when it ends, and so our connections.

        A program may run one loop after another with one store, and nobody tells us of their ends.
        """
        try:
            yield
        finally:
            await self.close()
            del self._until_loop_ends  # which refers to the loop, to tell it of its own end

    def start(self, key: bytes, payload: bytes) -> asyncio.Future[Any]:
        """Send a call to the node that has the key. Raises NotSent."""
        servers = self._servers
        address = servers.address_of(slot_of(key) if servers.clustered else 0)
        node = self._nodes.get(address)
        if node is None:
            node = self._node(address)
        return node.submit(payload)

    def unconnected(self, key: bytes) -> str | None:
        """Where a call of the key would wait for a connection; None: it would leave at once."""
        address = self._servers.topology.address_of(self._servers.slot(key))
        node = self._nodes.get(address) if address is not None else None
        if node is not None and node.connected:
            return None
        return str(address or self._servers.config.shown())

    async def run(self, call: Call, payload: bytes) -> Any:
        """The answer to one call, which `payload` already spells."""
        started_ns = time.monotonic_ns()
        try:
            reply = await self.start(call.key, payload)
        except NotSent as error:
            reply = error
        if type(reply) is list:
            return reply
        return await self.settled(call, started_ns, reply)

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers to several calls, sent together; StoreErrors among them."""
        started_ns = time.monotonic_ns()
        replies: list[Any] = []
        for call in calls:  # started in one go, so that they leave in one piece
            try:
                replies.append(self.start(call.key, call.by_sha()))
            except StoreError as error:
                replies.append(error)
        under_way = [each for each in replies if isinstance(each, asyncio.Future)]
        came = iter(_no_defect(await asyncio.gather(*under_way, return_exceptions=True)))
        replies = [next(came) if isinstance(each, asyncio.Future) else each for each in replies]
        if all(type(reply) is list for reply in replies):
            return replies
        asked = zip(calls, replies, strict=True)
        settling = (self.settled(call, started_ns, reply) for call, reply in asked)
        return _no_defect(await asyncio.gather(*settling, return_exceptions=True))

    async def settled(self, call: Call, started_ns: int, reply: Any) -> Any:
        """The reply itself; or, if it is a refusal, what came of it in the end."""
        if not isinstance(reply, Refusal):
            return _answer(call, reply)
        servers = self._servers
        plan = _plan(call, started_ns + servers.config.deadline_ns, reply, servers)
        result = None
        while True:
            try:
                step = plan.steps.send(result)
            except StopIteration as done:
                return _answer(call, done.value)
            except StoreFull:
                self._servers.refused += 1
                raise
            result = await self._take(step, plan)

    async def _take(self, step: Step, plan: _Plan) -> Any:
        servers = self._servers
        finding = servers.find() if isinstance(step, Refresh) else None
        left_s = plan.left_ns() / NS_PER_SECOND
        if isinstance(step, Pause):
            await asyncio.sleep(min(step.seconds, left_s))
        elif isinstance(step, Moved):
            servers.topology.moved(plan.slot, plan.named(step.address))
            servers.find()
        elif finding is not None:
            # `wait` leaves it running when time is up: others wait for the same one.
            awaited = asyncio.wrap_future(finding)
            awaited.add_done_callback(asyncio.Future.exception)  # so that nobody misses it
            if (await asyncio.wait({awaited}, timeout=left_s))[0]:
                _raise_failure(awaited)
        elif isinstance(step, Send):
            try:
                plan.asked = _target(step, plan, servers)
                payload = ASKING + step.payload if step.asking else step.payload
                async with asyncio.timeout(left_s):
                    reply = await self._node(plan.asked).submit(payload, int(step.asking))
            except NotSent as error:
                reply = error
            except TimeoutError:
                raise StoreTimeout("no answer by the deadline; it may have been counted") from None
            if isinstance(reply, Refusal):
                plan.refusal = reply
            return reply
        return None

    def _node(self, address: Address) -> AsyncNode:
        node = self._nodes.get(address)
        if node is None:
            if self.loop is None:
                raise _closed()
            servers = self._servers
            for gone in servers.not_in_use(self._nodes):
                if self._nodes[gone].let_go():
                    del self._nodes[gone]
            breaker = servers.breakers.of(address)
            node = AsyncNode(self.loop, address, servers.config, servers.tls, breaker)
            self._nodes[address] = node
        return node

    def close_soon(self) -> None:
        """`close`, for a caller outside the loop."""
        if self.loop is not None:
            self._closing = self.loop.create_task(self.close())

    async def close(self) -> None:
        """Close every connection; calls under way fail. May be called again."""
        self.loop = None
        while self._nodes:
            await self._nodes.popitem()[1].close()
