"""Connections to Redis servers: a pool of sockets for threads, a pipelined connection for asyncio.

**Threads** (`ConnectionPool`). Plain sockets, up to 64 idle ones per server, each lent to one call
at a time. A call is one `send` and usually one `recv`. A request that asks several servers sends to
all of them before it receives. Python enforces the deadline with a `poll`
before each, which costs less than can be measured. The kernel could enforce it (SO_RCVTIMEO), but a
signal ends its wait and Python starts it again: forever, under a profiler. A connection that timed
out still owes a reply, so it is closed: the next call must not receive that reply.

**asyncio** (`PipelinedConnection`). One connection per server, and every waiting call leaves
together. redis-py lends a connection to each call, so a call is a `send` and a `recv` of its own,
after a wait for the pool. Here a call appends its bytes and a future. Once the event loop has run
all tasks that were ready, one `send` carries them all, one `recv` brings many replies, and hiredis
parses them. Redis replies in order, so replies find their futures without any number. Deadlines
cost no timer per call: calls that leave together are due together, and one timer per connection
watches the oldest batch. An overdue call fails; its reply, if it comes, is discarded.

**Deadlines.** A deadline bounds the time that the server has, from when a call is sent. A process
that waits for a processor does not take that time away: when a deadline ends, the replies that have
arrived by then are read first, and only calls without a reply fail. If the process sees the end of
the deadline late, it was not running, and a server on the same machine may not have run either: it
waits as long again as it was late, at most for another deadline.

**Connecting** has a timeout of its own, `connect_ns`. While the server has not failed, a call waits
for its connection until then: an application that starts is not refused because its first
connection takes longer than a call. Once the server has failed, and until it answers again, a call
waits only as long as its deadline.

Both share the handshake and the server's circuit breaker: it counts their failures, and once it is
open, calls to the dead server fail before anything is sent, and none connects. Both parse with a
`ReplyReader`, which never allocates memory for elements that a server only announces.

An error says whether the call may have reached the server. `NotSent` means that it has not left
this process. Any other error after sending ends with "the call may have been counted once".
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import islice
from typing import Any, Final

import hiredis
from hiredis import ReplyError

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from ratekeeper.decide.stores.redis.breakers import ServerBreaker
from ratekeeper.decide.stores.redis.config import REPEATED_ARGUMENTS, Address, RedisConfig
from ratekeeper.decide.stores.redis.scripts import COUNTS, pack

# Threads: idle connections kept per server; more threads at a time open and close theirs.
IDLE_MAX: Final = 64
# Threads: connections to one server that are made at the same time.
DIALS_MAX: Final = 16
# Enough for a reply. Python allocates all of it at each read, and frees the rest.
_READ_BYTES: Final = 4_096
# A connection that idled longer is polled before its next use: the server may have closed it.
_FRESH_NS: Final = 5_000_000
# Threads: the most reads after the deadline, of what has arrived by then. A server may go on to
# send one byte at a time.
_LATE_READS_MAX: Final = 64
# asyncio: an event loop that was held up finds a reply and its deadline together. In so many
# more iterations it polls the sockets, reads the reply, and wakes the task that waits for it.
ITERATIONS: Final = 3
# asyncio: calls in flight on one connection, about 10 MB of them. Beyond, a call fails at once.
PENDING_MAX: Final = 65_536
# asyncio: a connection that owes replies and was silent for this many deadlines is closed, because
# the other end may be gone. At least a quarter of a second, for a server that pauses.
_SILENT_DEADLINES: Final = 4
_SILENT_S_MIN: Final = 0.25

# The elements of an array in a reply: below 100,000. The scripts reply with a few dozen.
_ELEMENT_DIGITS_MAX: Final = 5

_MAY_BE_COUNTED: Final = "; the call may have been counted once"
_CLOSED: Final = "the store is closed; open another one"


class NotSent(StoreUnavailable):
    """The call has not left this process, so it may be sent elsewhere."""


# ── Errors that a server returns ───────────────────────────────────────────────────────────────

# A missing permission inside a script, in Redis 7.0 and in later versions.
_NOPERM_IN_SCRIPT: Final = ("The user executing the script can't", "ACL failure in script")

# The errors of the scripts: a key has too many limits, or states of another layout.
_CROWDED: Final = "CROWDED"
_OTHER_LAYOUT: Final = ": LAYOUT"

_HINTS: Final = {
    "NOAUTH": "; give username and password in the URI or as arguments",
    "WRONGPASS": "; check username and password",
    "NOPERM": "; the user needs ~<prefix>:* +eval +evalsha +script|load "
    "+hget +hset +hdel +hrandfield +pttl +pexpire +time, for logs +set +getrange +setrange +del, "
    "for requests in flight +zadd +zcount +zrangebyscore +zremrangebyscore +zrevrange +zscore "
    "+zrem, "
    "and for global limits and cells +get +set +mget +hkeys +zadd +zrem +zrangebyscore +zcard",
    "READONLY": "; this is a replica: name the primary, or use redis+sentinel://",
    "MISCONF": "; Redis cannot write its snapshots: repair the disk, or see its log",
    "WRONGTYPE": "; another application has a key of that name: set another prefix=",
    "NOREPLICAS": "; fewer replicas than min-replicas-to-write are connected",
}


def refusal_error(refusal: ReplyError, config: RedisConfig) -> StoreError:
    """Return our error for a server's error, with the remedy."""
    text, repeated, _ = str(refusal).partition(REPEATED_ARGUMENTS)
    word = "NOPERM" if any(each in text for each in _NOPERM_IN_SCRIPT) else text.partition(" ")[0]
    error: StoreError
    if word == "OOM":
        error = StoreFull(
            f"{config.shown()} is out of memory (maxmemory) and refuses new states; "
            f"raise maxmemory, or add nodes"
        )
    elif _CROWDED in text:
        error = StoreFull(
            "this key holds hundreds of limits of one name, more than one key may have of it; give "
            "limits that differ in algorithm or window other names. More memory does not help"
        )
    elif _OTHER_LAYOUT in text:
        error = StoreUnavailable(
            f"{config.shown()} has states that another version of Ratekeeper has written, and they "
            f"were not changed; use that version, or set another prefix="
        )
    else:
        hint = _HINTS.get(word, "")
        error = StoreUnavailable(f"{config.shown()} refuses: {text[:200]}{hint}")
    # The cause's traceback would show the part that the message omits.
    error.__cause__ = None if repeated else refusal
    return error


# ── Replies ────────────────────────────────────────────────────────────────────────────────────

# The head of an array with too many elements: at the beginning of a line, as in "*2000000000".
# The star comes first in the pattern, because `re` finds a literal byte ten times as fast as a set.
_HEAD: Final = rb"\*[0-9]{%d}" % (_ELEMENT_DIGITS_MAX + 1)
_announces_too_many: Final = re.compile(rb"%b(?<![^\n]%b)" % (_HEAD, _HEAD)).search
# The longest part of such a head that a read may end with, and the byte before it.
_TAIL_BYTES: Final = _ELEMENT_DIGITS_MAX + 2
# Maps, sets, pushes and attributes have the same head as arrays, with another first byte. No script
# replies with one.
_AS_ARRAYS: Final = bytes.maketrans(b"%~>|", b"****")
_PERCENT, _TILDE, _GREATER, _BAR = b"%~>|"  # numbers: a search for `b"%"` takes six times as long
_NEWLINE: Final = 10


class ReplyReader:
    """hiredis' parser, which rejects an array with too many elements before it allocates any.

    hiredis allocates an array as soon as its head arrives. An array of two billion elements takes
    16 GB of address space, and freeing it stops all threads of the process for four seconds.
    """

    __slots__ = ("_feed", "_tail", "gets", "has_data")

    def __init__(self) -> None:
        reader = hiredis.Reader()
        self._feed = reader.feed
        self._tail = b""
        self.gets = reader.gets
        self.has_data = reader.has_data

    def feed(self, data: bytes) -> None:
        """Add bytes from the server. Raises hiredis.ProtocolError."""
        # The last read may have ended in the middle of a head.
        tail = self._tail
        seen = tail + data if tail else data
        start = 1 if tail else 0
        if _announces_too_many(seen, start) or (
            (_PERCENT in seen or _TILDE in seen or _GREATER in seen or _BAR in seen)
            and _announces_too_many(seen.translate(_AS_ARRAYS), start)
        ):
            raise hiredis.ProtocolError(
                f"an array of more than {10**_ELEMENT_DIGITS_MAX - 1:,} elements"
            )
        if seen[-1] != _NEWLINE:
            # The newline stands before the first byte of a connection, or of a line.
            self._tail = (b"\n" + seen[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        elif tail:
            self._tail = b""
        self._feed(data)


# ── The handshake ──────────────────────────────────────────────────────────────────────────────

_Command = tuple[str | int | bytes, ...]
# Errors with which a server answers any first command, before it closes the connection or repeats.
_FINAL: Final = ("LOADING", "NOAUTH", "DENIED", "ERR max number of clients")


def handshake_commands(config: RedisConfig) -> list[_Command]:
    """Return the commands to send on a new connection. Each has one reply."""
    commands: list[_Command] = []
    if config.password is not None:
        user = () if config.username is None else (config.username,)
        commands.append(("AUTH", *user, config.password))
    if config.db:
        commands.append(("SELECT", config.db))
    if config.mode == "sentinel":
        commands.append(("ROLE",))
    # Loaded in advance, so that no call needs a second round trip.
    commands.append(("SCRIPT", "LOAD", COUNTS.text))
    return commands


def handshake_payload(commands: Sequence[_Command]) -> bytes:
    """Return the bytes of the commands."""
    return b"".join(pack(*command) for command in commands)


def check_handshake(
    commands: Sequence[_Command], replies: Sequence[object], address: Address, config: RedisConfig
) -> None:
    """Raise NotSent if the server rejects this client, or is not the primary."""
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, ReplyError):
            # A script that could not be loaded in advance goes along with the first call.
            if command[0] != "SCRIPT" or str(reply).startswith(_FINAL):
                error = refusal_error(reply, config)
                raise NotSent(str(error)) from error.__cause__
        elif command[0] == "ROLE" and isinstance(reply, list) and reply[0] != b"master":
            raise NotSent(f"{address} is not the primary any more")


# ── One server, as threads and asyncio both see it ─────────────────────────────────────────────


class ServerEndpoint:
    """One server: how to connect to it, and what to do when that fails."""

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        tls: ssl.SSLContext | None,
        breaker: ServerBreaker,
    ) -> None:
        self.address = address
        self._config = config
        self._tls = tls
        self._breaker = breaker
        self._closed = False

    def _connect_failed(self, began_ns: int, reason: str) -> NotSent:
        """Note that no connection could be made; return the error of the calls that wait for it."""
        why = f"cannot connect to {self.address}: {reason}"
        self._breaker.failed(why, began_ns)
        return NotSent(why)

    def _is_overdue(self, began_ns: int) -> bool:
        """Return True if a connection takes longer than connecting may take."""
        return time.monotonic_ns() - began_ns >= self._config.connect_ns

    def _connect_late(self, began_ns: int) -> NotSent:
        """Note that a call has waited in vain for a connection, since `began_ns`."""
        waited_ms = (time.monotonic_ns() - began_ns) // 1_000_000
        why = f"no connection to {self.address} in {waited_ms} ms"
        self._breaker.failed(why, began_ns)
        return NotSent(why)


# ── Threads ────────────────────────────────────────────────────────────────────────────────────


class BlockingConnection:
    """One socket, after the handshake."""

    __slots__ = (
        "_deadline_ns",
        "_poll",
        "_reader",
        "_recv",
        "_send",
        "_socket",
        "began_ns",
        "used_ns",
    )

    def __init__(self, address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> None:
        self._reader = ReplyReader()
        self._deadline_ns = 0
        self._socket = _connected_socket(address, config, tls)
        self._recv = self._socket.recv
        self._send = self._socket.sendall
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.began_ns = self.used_ns = 0
        try:
            commands = handshake_commands(config)
            payload = handshake_payload(commands)
            replies = self.exchange(payload, len(commands), config.connect_ns, warning="")
            check_handshake(commands, replies, address, config)
        except BaseException:
            self.close()
            raise

    def exchange(
        self,
        payload: bytes,
        replies: int,
        deadline_ns: int,
        meanwhile: Callable[[], None] | None = None,
        warning: str = _MAY_BE_COUNTED,
    ) -> list[Any]:
        """Send commands and read `replies` replies. After an error the connection is unusable.

        `meanwhile` is called in between. It raises no StoreError, and its time counts.

        `warning` ends the message of an error after which the server may have run the commands.
        """
        started_ns = self.began_ns = time.monotonic_ns()
        if deadline_ns != self._deadline_ns:
            self._set_deadline(deadline_ns)
        found: list[Any] = []
        try:
            try:
                self._send(payload)
                if meanwhile is not None:
                    meanwhile()
                    # A new deadline costs two system calls, so a short time is not subtracted.
                    # What has arrived is read even after the deadline.
                    passed_ns = time.monotonic_ns() - started_ns
                    if passed_ns > deadline_ns // 8:
                        self._set_deadline(max(deadline_ns - passed_ns, 0))
                self._reader.feed(self._recv(_READ_BYTES) or _raise_closed())
                while True:
                    reply = self._reader.gets()
                    if reply is not False:
                        found.append(reply)
                        if len(found) == replies:
                            break
                        continue
                    # A server that sends one byte at a time gets no new deadline for each.
                    left_ns = started_ns + deadline_ns - time.monotonic_ns()
                    if left_ns <= 0:
                        raise TimeoutError
                    self._set_deadline(left_ns)
                    self._reader.feed(self._recv(_READ_BYTES) or _raise_closed())
            except _TIMEOUTS:
                late_ns = max(time.monotonic_ns() - started_ns - deadline_ns, 0)
                if not self._read_late(found, replies, min(late_ns, deadline_ns)):
                    raise _timeout(deadline_ns, warning) from None
        except hiredis.ProtocolError as error:
            raise StoreUnavailable(f"not a reply of Redis: {error}{warning}") from error
        except OSError as error:
            raise StoreUnavailable(f"the connection broke: {error}{warning}") from error
        if self._reader.has_data():
            # The next call would take it for its own reply.
            raise StoreUnavailable(f"the server sent more replies than commands{warning}")
        self.used_ns = time.monotonic_ns()
        return found

    def _read_late(self, found: list[Any], replies: int, wait_ns: int) -> bool:
        """Read after the deadline; return True if all replies have arrived.

        The thread may have waited for a processor or for the interpreter's lock. Wait for the first
        bytes for `wait_ns`, and read then what has arrived.
        """
        self._set_deadline(wait_ns)
        for _ in range(_LATE_READS_MAX):
            try:
                self._reader.feed(self._recv(_READ_BYTES) or _raise_closed())
            except _TIMEOUTS:
                return False
            self._set_deadline(0)  # do not wait
            while len(found) < replies and (reply := self._reader.gets()) is not False:
                found.append(reply)
            if len(found) == replies:
                return True
        return False

    def _set_deadline(self, deadline_ns: int) -> None:
        self._socket.settimeout(deadline_ns / NS_PER_SECOND)
        self._deadline_ns = deadline_ns

    def readable(self) -> bool:
        """Return True if the server has closed it or sent anything while it was idle."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


_TIMEOUTS: Final = (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _timeout(deadline_ns: float, warning: str) -> StoreTimeout:
    return StoreTimeout(f"no answer in {deadline_ns / 1e6:g} ms{warning}")


def _raise_closed() -> bytes:
    raise ConnectionResetError("the server closed it")


def _connected_socket(
    address: Address, config: RedisConfig, tls: ssl.SSLContext | None
) -> socket.socket:
    timeout_s = config.connect_ns / NS_PER_SECOND
    try:
        if address.port == 0:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.settimeout(timeout_s)
            plain.connect(address.host)
        else:
            plain = socket.create_connection(address, timeout_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None or config.tls is None:
            return plain
        try:
            return tls.wrap_socket(plain, server_hostname=config.tls.server_name or address.host)
        except BaseException:
            plain.close()
            raise
    except OSError as error:  # a timeout and a TLS error are OSErrors too
        raise NotSent(str(error)) from error


class ConnectionPool(ServerEndpoint):
    """The connections of all threads to one server."""

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        tls: ssl.SSLContext | None,
        breaker: ServerBreaker,
    ) -> None:
        super().__init__(address, config, tls, breaker)
        # One per server, so that a silent server does not block connections to others. It starts
        # no thread before it is needed.
        self._dialer = ThreadPoolExecutor(DIALS_MAX, "ratekeeper-redis")
        self._idle: deque[BlockingConnection] = deque()
        self._idle_max = IDLE_MAX

    def exchange(
        self,
        payload: bytes,
        replies: int,
        deadline_ns: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Send commands and return their replies. Raises NotSent if nothing was sent.

        `meanwhile` is called once they are sent.
        """
        breaker = self._breaker
        if breaker.open:
            raise breaker.refusal()
        connection = self._take()
        if connection is None:
            connection = self._dial(deadline_ns)
        try:
            found = connection.exchange(payload, replies, deadline_ns, meanwhile)
        except BaseException as error:
            connection.close()
            if isinstance(error, StoreError):
                # The breaker repeats the reason to calls that it refuses, which are not counted.
                why = str(error).removesuffix(_MAY_BE_COUNTED)
                breaker.failed(f"{self.address}: {why}", connection.began_ns)
            if isinstance(error, StoreTimeout):
                breaker.seconds.note(deadline_ns, replies)
            raise
        breaker.seconds.note(connection.used_ns - connection.began_ns, replies)
        self._idle.append(connection)
        if len(self._idle) > self._idle_max:
            self._drop_idle()
        if breaker.counting:
            breaker.succeeded()
        return found

    def _take(self) -> BlockingConnection | None:
        while True:
            try:
                # The one used last, so that unneeded connections become stale and are closed.
                connection = self._idle.pop()
            except IndexError:
                return None
            idle_ns = time.monotonic_ns() - connection.used_ns
            if idle_ns <= _FRESH_NS or not connection.readable():
                return connection
            connection.close()

    def _dial(self, deadline_ns: int) -> BlockingConnection:
        """Return a new connection. Another thread makes it: it may take longer than the call."""
        began_ns = time.monotonic_ns()
        try:
            dialing = self._dialer.submit(self._connect, began_ns)
            return self._awaited(dialing, began_ns, deadline_ns)
        except (CancelledError, RuntimeError) as error:
            if not self._closed:
                raise NotSent(f"no connection to {self.address}: {error}") from error
            raise StoreUnavailable(_CLOSED) from error

    def _awaited(
        self, dialing: Future[BlockingConnection], began_ns: int, deadline_ns: int
    ) -> BlockingConnection:
        """Return the connection that another thread makes, or one that a call has given back.

        Each `deadline_ns`, look whether to wait on: not if the server has failed.
        """
        connection = None
        while connection is None:
            try:
                return dialing.result(deadline_ns / NS_PER_SECOND)
            except FutureTimeout:
                connection = self._take()
                if connection is None and (self._breaker.failing or self._is_overdue(began_ns)):
                    break
        # The next call may use the connection. If no thread has started to dial, none will.
        if not dialing.cancel():
            dialing.add_done_callback(self._keep)
        if connection is None:
            raise self._connect_late(began_ns)
        return connection

    def _connect(self, began_ns: int) -> BlockingConnection:
        if self._breaker.open:
            raise self._breaker.refusal()
        try:
            connection = BlockingConnection(self.address, self._config, self._tls)
        except StoreError as error:
            raise self._connect_failed(began_ns, str(error)) from error
        self._breaker.failing = False
        return connection

    def _keep(self, dialing: Future[BlockingConnection]) -> None:
        if not dialing.cancelled() and dialing.exception() is None:
            self._idle.append(dialing.result())
            self._drop_idle()

    def _drop_idle(self) -> None:
        while len(self._idle) > self._idle_max:
            try:
                self._idle.popleft().close()
            except IndexError:
                return

    def retire(self) -> None:
        """Close idle connections now, and those in use when they are given back."""
        self._closed = True
        self._idle_max = 0
        self._drop_idle()

    def close(self) -> None:
        """Retire the pool; calls that wait for a connection fail."""
        self.retire()
        self._dialer.shutdown(wait=False, cancel_futures=True)


# ── asyncio ────────────────────────────────────────────────────────────────────────────────────

ReplyFuture = asyncio.Future[Any]


class PipelineProtocol(asyncio.Protocol):
    """One connection that sends calls in batches and matches replies to them in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deadline_s: float, breaker: ServerBreaker
    ) -> None:
        self._loop = loop
        self._breaker = breaker
        self._deadline_s = deadline_s
        self._reader = ReplyReader()
        self._transport: asyncio.Transport | None = None
        # The futures of the calls in the order they were sent; None for a reply to discard.
        self._pending: deque[ReplyFuture | None] = deque()
        self._buffer: list[bytes] = []
        # For each batch: when it is due, and the total number of replies after its last one.
        self._batches: deque[tuple[float, int]] = deque()
        # Number of replies that have arrived.
        self._answered = 0
        # Number of calls that were answered or have failed.
        self._settled = 0
        # Number of calls whose durations were counted.
        self._measured = 0
        self._timer: asyncio.Handle | None = None
        # When the last reply arrived, or when the connection began to owe one.
        self._active_at = loop.time()
        self._why: Exception | None = None
        # Ends the message of an error after which the server may have run the call.
        self._warning = ""
        self._closing = False
        self.closed = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # asyncio passes a Transport

    def handshake_done(self, deadline_s: float) -> None:
        """From now on, calls have this deadline."""
        self._deadline_s = deadline_s
        self._warning = _MAY_BE_COUNTED
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def submit(self, payload: bytes, discarded: int = 0, reply: Any = None) -> ReplyFuture:
        """Send a call; return the future of its last reply, after `discarded` other replies.

        `reply` is a SharedCall, in place of the future.
        """
        pending, buffer, transport = self._pending, self._buffer, self._transport
        if transport is None:
            raise NotSent(f"the connection is closed: {self._why or 'the server closed it'}")
        if len(pending) >= PENDING_MAX:
            raise NotSent(f"{PENDING_MAX:,} calls are in flight already; the server is too slow")
        idle = not pending
        if discarded:
            pending.extend([None] * discarded)
        future = reply or self._loop.create_future()
        pending.append(future)
        if idle:
            # No call to wait for. Other ready tasks will find this one pending, and form a batch.
            transport.write(payload)
            self._active_at = self._batch_sent()
        else:
            if not buffer:
                self._loop.call_soon(self._flush)
            buffer.append(payload)
        return future

    def _flush(self) -> None:
        if self._transport is not None and self._buffer:
            self._transport.write(b"".join(self._buffer))
            self._buffer.clear()
            self._batch_sent()

    def _batch_sent(self) -> float:
        """Note when the batch that was just sent is due; return the current time."""
        now = self._loop.time()
        due = now + self._deadline_s
        self._batches.append((due, self._answered + len(self._pending)))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._expire, due)
        return now

    def data_received(self, data: bytes) -> None:
        pending = self._pending
        gets = self._reader.gets
        before = self._answered
        try:
            self._reader.feed(data)
            while (reply := gets()) is not False:
                future = pending.popleft()
                self._answered += 1
                if future is not None:
                    try:  # noqa: SIM105 - `suppress` takes longer than asking for `done`
                        future.set_result(reply)
                    except asyncio.InvalidStateError:
                        pass  # its caller is gone, or it was late
        except hiredis.ProtocolError as error:
            self._abort(StoreUnavailable(f"not a reply of Redis: {error}"))
            return
        except IndexError:
            self._abort(StoreUnavailable(f"the server sent a reply to no command: {reply!r}"))
            return
        if self._answered == before:
            return
        # A reply that came too late is no success: its call has failed.
        in_time = self._answered - max(before, self._settled)
        if in_time > 0 and self._breaker.counting:
            self._breaker.succeeded(in_time)
        now = self._active_at = self._loop.time()
        batches = self._batches
        while batches and batches[0][1] <= self._answered:
            due, last = batches.popleft()
            if self._warning:  # the handshake is over
                taken_ns = int((now - due + self._deadline_s) * NS_PER_SECOND)
                self._breaker.seconds.note(taken_ns, last - max(self._settled, self._measured))
            self._measured = last

    def _expire(self, at: float) -> None:
        """Fail the overdue calls, after the replies that have arrived were read.

        `at` is the time of the timer, which may be late.
        """
        now = self._loop.time()
        late_s = min(max(now - at, 0.0), self._deadline_s)
        self._timer = self._loop.call_later(
            late_s, self._read_first, now, self._answered, ITERATIONS
        )

    def _read_first(self, now: float, answered: int, iterations: int) -> None:
        """Let the event loop read for some iterations, and for more while replies come."""
        if not iterations and self._answered > answered:
            answered, iterations = self._answered, ITERATIONS
        if iterations and self._batches and self._batches[0][0] <= now:
            self._timer = self._loop.call_soon(self._read_first, now, answered, iterations - 1)
        else:
            self._fail_overdue(now)

    def _fail_overdue(self, now: float) -> None:
        """Fail the calls that were due by `now`; set the timer for the next batch."""
        self._timer = None
        last, due = 0, now
        while self._batches and self._batches[0][0] <= now:
            due, last = self._batches.popleft()
        # Skip calls that failed in an earlier run: a stopped server may owe thousands.
        first = max(self._settled, self._answered)
        late_ns = self._deadline_s * NS_PER_SECOND
        for future in islice(self._pending, first - self._answered, max(last - self._answered, 0)):
            if future is not None and not future.done():
                future.set_exception(_timeout(late_ns, self._warning))
        if last > first and self._warning:  # a handshake's failure is reported by `_connect`
            # This counts cancelled calls too: the server owes their replies all the same.
            self._report_failure(str(_timeout(late_ns, "")), last - first, due)
            self._breaker.seconds.note(int(late_ns), last - first)
        self._settled = max(first, last)
        if not self._pending:
            return
        silent_s = max(_SILENT_DEADLINES * self._deadline_s, _SILENT_S_MIN)
        if now - self._active_at > silent_s:
            self._abort(StoreUnavailable(f"the server has been silent for {silent_s:g} s"))
            return
        next_due = self._batches[0][0] if self._batches else now + self._deadline_s
        at = max(next_due, self._loop.time())
        self._timer = self._loop.call_at(at, self._expire, at)

    def _report_failure(self, why: str, count: int, due: float) -> None:
        """Report failed calls to the breaker; the last of them was due at `due`."""
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
        why = f"the connection broke: {self._why or error or 'the server closed it'}"
        owed = len(self._pending) - max(self._settled - self._answered, 0)
        if owed and self._warning and not self._closing:
            due = self._batches[-1][0] if self._batches else self._loop.time()
            self._report_failure(why, owed, due)
        unsent_from = len(self._pending) - len(self._buffer)
        for index, future in enumerate(self._pending):
            if future is None or future.done():
                continue
            if index >= unsent_from:
                future.set_exception(NotSent(why))
            else:
                future.set_exception(StoreUnavailable(f"{why}{self._warning}"))
        self._pending.clear()
        self._buffer.clear()
        self._batches.clear()
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def open(self) -> bool:
        """True while calls can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def idle(self) -> bool:
        """True if no call is in flight."""
        return not self._pending

    def close(self) -> None:
        """Close the connection; calls in flight fail."""
        self._closing = True
        # Aborted, because a graceful close would wait for a server that reads nothing.
        self._abort(StoreUnavailable("the store was closed"))


class PipelinedConnection(ServerEndpoint):
    """The connection of one event loop to one server, made at the first call."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: Address,
        config: RedisConfig,
        tls: ssl.SSLContext | None,
        breaker: ServerBreaker,
    ) -> None:
        super().__init__(address, config, tls, breaker)
        self._loop = loop
        self._protocol: PipelineProtocol | None = None
        # Its result is the connection, or why there is none.
        self._connecting: asyncio.Task[PipelineProtocol | str] | None = None
        # The calls that wait for it.
        self._waiting: set[asyncio.Task[None]] = set()

    def submit(self, payload: bytes, discarded: int = 0, reply: Any = None) -> ReplyFuture:
        """Send a call, after connecting if necessary. The future may fail with NotSent.

        Its deadline begins when it is sent.
        """
        if self._breaker.open:
            raise self._breaker.refusal()
        protocol = self._protocol
        if protocol is not None and protocol.open:
            return protocol.submit(payload, discarded, reply)
        return self._submit_when_connected(payload, discarded, reply)

    def _submit_when_connected(self, payload: bytes, discarded: int, reply: Any) -> ReplyFuture:
        if self._closed:
            raise StoreUnavailable(_CLOSED)
        if len(self._waiting) >= PENDING_MAX:
            raise NotSent(f"{PENDING_MAX:,} calls wait for a connection to {self.address}")
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
        future = reply or self._loop.create_future()
        leave = reply.leave if reply else lambda: payload
        sending = self._send_when_connected(self._connecting, leave, discarded, future)
        task = self._loop.create_task(sending)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return future

    async def _send_when_connected(
        self,
        connecting: asyncio.Task[PipelineProtocol | str],
        leave: Callable[[], bytes],
        discarded: int,
        reply: ReplyFuture,
    ) -> None:
        """Wait for the connection, for a deadline if the server has failed; then send the call."""
        began_ns = time.monotonic_ns()
        deadline_s = self._config.deadline_ns / NS_PER_SECOND
        error: NotSent | None = None
        while error is None and not (await asyncio.wait({connecting}, timeout=deadline_s))[0]:
            # While the server has not failed, wait until connecting has succeeded or failed.
            if self._breaker.failing:
                error = self._connect_late(began_ns)
        payload = leave()
        if reply.done():
            return
        made = _CLOSED if connecting.cancelled() else error or connecting.result()
        if isinstance(made, PipelineProtocol):
            try:
                made.submit(payload, discarded, reply)
            except NotSent as refusal:
                reply.set_exception(refusal)
        else:
            reply.set_exception(NotSent(str(made)))

    async def _connect(self) -> PipelineProtocol | str:
        began_ns = time.monotonic_ns()
        try:
            self._protocol = await self._open_connection()
        except (OSError, TimeoutError, StoreError) as error:
            reason = _reason(error) or f"no answer in {self._config.connect_ns / 1e6:g} ms"
            return str(self._connect_failed(began_ns, reason))
        finally:
            self._connecting = None
        self._breaker.failing = False
        return self._protocol

    async def _open_connection(self) -> PipelineProtocol:
        """Return a new connection, after the handshake."""
        loop, address, config = self._loop, self.address, self._config
        connect_s = config.connect_ns / NS_PER_SECOND
        protocol = PipelineProtocol(loop, connect_s, self._breaker)
        async with asyncio.timeout(connect_s):
            name = None
            if self._tls is not None and config.tls is not None:
                name = config.tls.server_name or address.host
            if address.port == 0:
                await loop.create_unix_connection(
                    lambda: protocol, address.host, ssl=self._tls, server_hostname=name
                )
            else:
                await loop.create_connection(
                    lambda: protocol, *address, ssl=self._tls, server_hostname=name
                )
            try:
                commands = handshake_commands(config)
                futures = [protocol.submit(handshake_payload([each])) for each in commands]
                replies = await asyncio.gather(*futures)
                check_handshake(commands, replies, address, config)
            except BaseException:
                protocol.close()
                raise
        protocol.handshake_done(config.deadline_ns / NS_PER_SECOND)
        return protocol

    def retire(self) -> bool:
        """Close the connection unless calls need it; return whether it was closed."""
        if self._connecting is not None or (self._protocol and not self._protocol.idle):
            return False
        if self._protocol is not None:
            self._protocol.close()
        return True

    async def close(self) -> None:
        """Close the connection; calls in flight fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._protocol is not None:
            self._protocol.close()
            await self._protocol.closed


def _reason(error: Exception) -> str:
    """Return the system's message: asyncio's is "Connect call failed" for every error."""
    if isinstance(error, OSError) and "Connect call failed" in str(error) and error.errno:
        return f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return str(error)
