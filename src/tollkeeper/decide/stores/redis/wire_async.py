"""The wire for asyncio: one connection a server, and everything that waits goes out together.

redis-py lends a connection to each call, so a call is a `send` and a `recv` of its own, and a pool
to wait for. Here a call appends its bytes and a future; once the event loop has run all tasks that
were ready, one `send` carries them all, one `recv` brings many answers, and hiredis parses them.
Redis answers in order, so answers find their futures without any number.

Deadlines cost no timer a call: what goes out together is due together, and one timer a connection
looks at the oldest. A call that is overdue fails; its answer, should it come, is thrown away.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import hiredis

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from tollkeeper.decide.stores.redis import handshake
from tollkeeper.decide.stores.redis.backoff import Backoff
from tollkeeper.decide.stores.redis.breakers import NodeBreaker
from tollkeeper.decide.stores.redis.calls import NotSent
from tollkeeper.decide.stores.redis.config import Address, RedisConfig

# Calls that may be under way on one connection: about 10 MB of them. Beyond, a call fails at once.
PENDING_MAX: Final = 65_536
# A connection that has been owing answers for so many deadlines, and brought none, is given up: the
# other end may be gone without a word. At least a quarter of a second, for a server that pauses.
_SILENT_DEADLINES: Final = 4
_SILENT_S_MIN: Final = 0.25

_MAYBE: Final = "; the call may have been counted once"

Answer = asyncio.Future[Any]


class Link(asyncio.Protocol):
    """One connection."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deadline_s: float, breaker: NodeBreaker
    ) -> None:
        self._loop = loop
        self._breaker = breaker
        self._deadline_s = deadline_s
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        # Futures of calls in the order they were sent; None where nobody wants the answer.
        self._pending: deque[Answer | None] = deque()
        self._buffer: list[bytes] = []
        # What went out together: when it is due, and how many answers will have come by then.
        self._batches: deque[tuple[float, int]] = deque()
        self._answered = 0
        # So many were answered or have failed.
        self._settled = 0
        self._timer: asyncio.TimerHandle | None = None
        # When it last brought an answer, or began to owe one.
        self._lively_at = loop.time()
        self._why: Exception | None = None
        # Ends the message of an error after which nobody knows what the server did.
        self._warning = ""
        self._closing = False
        self.closed = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # asyncio hands a Transport over

    def greeted(self, deadline_s: float) -> None:
        """The handshake is over; from here on a call has this long."""
        self._deadline_s = deadline_s
        self._warning = _MAYBE
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def submit(self, payload: bytes, unwanted: int = 0) -> Answer:
        """Send a call; its answer is after so many that nobody wants."""
        pending, buffer, transport = self._pending, self._buffer, self._transport
        if transport is None:
            raise NotSent(f"the connection is closed: {self._why or 'the server closed it'}")
        if len(pending) >= PENDING_MAX:
            raise NotSent(f"{PENDING_MAX:,} calls are under way already; the server is too slow")
        idle = not pending
        for _ in range(unwanted):
            pending.append(None)
        answer = self._loop.create_future()
        pending.append(answer)
        if idle:
            # Nobody to wait for. The others that are ready will find this one pending.
            transport.write(payload)
            self._lively_at = self._due()
        else:
            if not buffer:
                self._loop.call_soon(self._flush)
            buffer.append(payload)
        return answer

    def _flush(self) -> None:
        if self._transport is not None and self._buffer:
            self._transport.write(b"".join(self._buffer))
            self._buffer.clear()
            self._due()

    def _due(self) -> float:
        """Note when what has just been sent is due; what time it is."""
        now = self._loop.time()
        due = now + self._deadline_s
        self._batches.append((due, self._answered + len(self._pending)))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._expire)
        return now

    def data_received(self, data: bytes) -> None:
        pending = self._pending
        gets = self._reader.gets
        before = self._answered
        try:
            self._reader.feed(data)
            while (reply := gets()) is not False:
                answer = pending.popleft()
                self._answered += 1
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except hiredis.ProtocolError as error:
            self._abort(StoreUnavailable(f"not an answer of Redis: {error}"))
            return
        except IndexError:
            self._abort(StoreUnavailable(f"the server said unasked: {reply!r}"))
            return
        if self._answered == before:
            return
        if self._breaker.stirred:
            self._breaker.succeeded(self._answered - before)
        self._lively_at = self._loop.time()
        batches = self._batches
        while batches and batches[0][1] <= self._answered:
            batches.popleft()

    def _expire(self) -> None:
        """Fail what is overdue; look again when the next is."""
        self._timer = None
        now = self._loop.time()
        last, due = 0, now
        while self._batches and self._batches[0][0] <= now:
            due, last = self._batches.popleft()
        # Only those that no earlier look has failed: a stopped server may owe thousands.
        first = max(self._settled, self._answered)
        for answer in islice(self._pending, first - self._answered, max(last - self._answered, 0)):
            if answer is not None and not answer.done():
                answer.set_exception(
                    StoreTimeout(f"no answer in {1_000 * self._deadline_s:g} ms{self._warning}")
                )
        if last > first and self._warning:  # of a handshake, who connects will tell
            # Also those that nobody waits for any more: the server owes them all the same.
            self._tell(f"no answer in {1_000 * self._deadline_s:g} ms", last - first, due)
        self._settled = max(first, last)
        if not self._pending:
            return
        silent_s = max(_SILENT_DEADLINES * self._deadline_s, _SILENT_S_MIN)
        if now - self._lively_at > silent_s:
            self._abort(StoreUnavailable(f"the server has been silent for {silent_s:g} s"))
            return
        next_due = self._batches[0][0] if self._batches else now + self._deadline_s
        self._timer = self._loop.call_at(next_due, self._expire)

    def _tell(self, why: str, count: int, due: float) -> None:
        """So many calls failed, the last of which was due then."""
        age_s = self._loop.time() - due + self._deadline_s
        began_ns = time.monotonic_ns() - int(age_s * NS_PER_SECOND)
        self._breaker.failed(f"{self._breaker.address}: {why}", began_ns, count)

    def _abort(self, why: Exception) -> None:
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        why = self._why or error or "the server closed it"
        owed = len(self._pending) - max(self._settled - self._answered, 0)
        if owed and self._warning and not self._closing:
            due = self._batches[-1][0] if self._batches else self._loop.time()
            self._tell(f"the connection broke: {why}", owed, due)
        unsent = len(self._buffer)
        for index, answer in enumerate(self._pending):
            if answer is None or answer.done():
                continue
            if index >= len(self._pending) - unsent:
                answer.set_exception(NotSent(f"the connection broke: {why}"))
            else:
                answer.set_exception(
                    StoreUnavailable(f"the connection broke: {why}{self._warning}")
                )
        self._pending.clear()
        self._buffer.clear()
        self._batches.clear()
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def idle(self) -> bool:
        """Is nothing under way?"""
        return not self._pending

    def close(self) -> None:
        self._closing = True
        # At once: a server that takes nothing in would never let it be closed in good order.
        self._abort(StoreUnavailable("the store was closed"))


@dataclass(slots=True)
class _Waiting:
    """A call that waits for the connection; and then, on it, for its answer."""

    payload: bytes
    unwanted: int
    answer: Answer
    sent: bool = False


class AsyncNode:
    """One server, for one event loop: its connection, made when it is first needed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: Address,
        config: RedisConfig,
        tls: ssl.SSLContext | None,
        breaker: NodeBreaker,
    ) -> None:
        self.address = address
        self._breaker = breaker
        self._loop = loop
        self._config = config
        self._tls = tls
        self._deadline_s = config.deadline_ns / NS_PER_SECOND
        self._backoff = Backoff()
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: deque[_Waiting] = deque()
        self._closed = False

    def submit(self, payload: bytes, unwanted: int = 0) -> Answer:
        """Send a call, connecting first if need be. The future may fail with NotSent."""
        if self._breaker.open:
            raise self._breaker.refusal()
        link = self._link
        if link is not None and link.open:
            return link.submit(payload, unwanted)
        return self._wait_for_link(payload, unwanted)

    @property
    def connected(self) -> bool:
        """Would a call leave at once?"""
        return self._link is not None and self._link.open

    def _wait_for_link(self, payload: bytes, unwanted: int) -> Answer:
        if self._closed:
            raise StoreUnavailable("the store is closed; open another one")
        if self._connecting is None:
            if not self._backoff.may_try(time.monotonic_ns()):
                raise NotSent(f"{self.address} is down: {self._backoff.reason}")
            self._connecting = self._loop.create_task(self._connect())
        if len(self._waiting) >= PENDING_MAX:
            raise NotSent(f"{PENDING_MAX:,} calls wait for a connection to {self.address}")
        waiting = _Waiting(payload, unwanted, self._loop.create_future())
        self._waiting.append(waiting)
        timer = self._loop.call_later(self._deadline_s, self._too_late, waiting)
        waiting.answer.add_done_callback(lambda _: timer.cancel())
        return waiting.answer

    def _too_late(self, waiting: _Waiting) -> None:
        """The deadline counts from the call on, however much of it went into connecting."""
        if waiting.answer.done():
            return
        in_ms = f"in {1_000 * self._deadline_s:g} ms"
        if waiting.sent:
            waiting.answer.set_exception(StoreTimeout(f"no answer {in_ms}{_MAYBE}"))
        else:
            why = f"no connection to {self.address} {in_ms}"
            if self._breaker.proven:
                began_ns = time.monotonic_ns() - self._config.deadline_ns
                self._breaker.failed(why, began_ns)
            waiting.answer.set_exception(NotSent(why))

    async def _connect(self) -> None:
        began_ns = time.monotonic_ns()
        try:
            link = await self._linked()
        except (OSError, TimeoutError, StoreError) as error:
            reason = _reason(error) or f"no answer in {self._config.connect_ns / 1e6:g} ms"
            self._backoff.failed(began_ns, time.monotonic_ns(), reason)
            why = f"cannot connect to {self.address}: {reason}"
            self._breaker.failed(why, began_ns)
            self._fail_waiting(why)
            return
        finally:
            self._connecting = None
        self._backoff.succeeded()
        self._breaker.proven = True
        self._link = link
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting.answer.done():
                continue
            try:
                _pass_on(link.submit(waiting.payload, waiting.unwanted), waiting.answer)
            except NotSent as error:
                waiting.answer.set_exception(error)
            else:
                waiting.sent = True

    async def _linked(self) -> Link:
        """A connection, through the handshake."""
        loop, address = self._loop, self.address
        connect_s = self._config.connect_ns / NS_PER_SECOND
        link = Link(loop, connect_s, self._breaker)
        async with asyncio.timeout(connect_s):
            name = None
            if self._tls is not None and self._config.tls is not None:
                name = self._config.tls.server_name or address.host
            if address.port == 0:
                await loop.create_unix_connection(
                    lambda: link, address.host, ssl=self._tls, server_hostname=name
                )
            else:
                await loop.create_connection(
                    lambda: link, *address, ssl=self._tls, server_hostname=name
                )
            try:
                commands = handshake.greeting(self._config)
                answers = [link.submit(handshake.payload([each])) for each in commands]
                replies = await asyncio.gather(*answers)
                handshake.check_replies(commands, replies, address, self._config)
            except BaseException:
                link.close()
                raise
        link.greeted(self._deadline_s)
        return link

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            answer = self._waiting.popleft().answer
            if not answer.done():
                answer.set_exception(NotSent(why))

    def let_go(self) -> bool:
        """Close the connection, unless there are calls that want it. Was it closed?"""
        if self._connecting is not None or (self._link is not None and not self._link.idle):
            return False
        if self._link is not None:
            self._link.close()
        return True

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        self._fail_waiting("the store is closed; open another one")
        if self._link is not None:
            self._link.close()
            await self._link.closed


def _pass_on(source: Answer, target: Answer) -> None:
    """Let `target` become what `source` becomes; a caller who leaves takes both along."""

    def done(answer: Answer) -> None:
        error = None if answer.cancelled() else answer.exception()
        if target.done():
            return
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(answer.result())

    source.add_done_callback(done)


def _reason(error: Exception) -> str:
    """As the system says it: asyncio has "Connect call failed" for whatever it was."""
    if isinstance(error, OSError) and "Connect call failed" in str(error) and error.errno:
        return f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return str(error)
