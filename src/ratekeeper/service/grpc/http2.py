"""The server on libnghttp2: an asyncio protocol for each connection.

`_http2.Connection` turns bytes into calls and replies into bytes. It does no I/O and reads no
clock. This module calls its `tick` once a second. The connection decides by the number of ticks
which clients are too slow, too quiet or too busy.

**The fast path.** A batch of bytes with calls costs one `receive`, one step of each method, one
`reply` each and one `write`. A method in `Methods.at_once` makes its first step without a task.
Only if it has to wait is a task created for the rest of it.

**Shutdown.** The listeners close. Each client gets a notice (GOAWAY with the highest id), so that
it opens no more streams here. When it has confirmed that, the final GOAWAY follows, and the
connection ends after its last call.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from asyncio import AbstractEventLoop, Future, Task, TimerHandle
from collections import Counter, deque
from collections.abc import Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.service.grpc import _http2
from ratekeeper.service.grpc._http2 import (
    CALL,
    CLOSED,
    MESSAGE,
    OPENED,
    Connection,
    Http2Error,
)
from ratekeeper.service.grpc.calls import (
    STOP_SECONDS,
    Bounds,
    CallError,
    Methods,
    Status,
    TlsFiles,
    call_error_of,
    count,
)

log = logging.getLogger("ratekeeper.grpc")

# Connections of one worker, if it may open so many files. One address has at most half of them.
CONNECTIONS_MAX: Final = 1_024
# Concurrent TLS handshakes: each takes 290 kB before the client is authenticated. One address has
# at most a quarter of them.
HANDSHAKES_MAX: Final = 256
# Streams of one connection. Envoy opens another connection if it needs more.
STREAMS_MAX: Final = 256
# Unfinished messages of all connections. One connection has at most a quarter.
POOL_BYTES_MAX: Final = 128 * 1024 * 1024
# Each frame costs points; a call that is answered gives 8 back (see session.c). A client that
# resets every call can make 2,000 calls, then 500 a second.
POINTS_MAX: Final = 12_000
POINTS_PER_TICK: Final = 3_000
TICK_SECONDS: Final = 1.0
# A connection has to begin, and a request has to arrive, in this time.
REQUEST_TICKS: Final = 10
# A client that does not read its replies for this time loses the call, and then the connection.
UNREAD_TICKS: Final = 30
# A connection without a byte for this time gets a PING, and is closed if no byte follows.
KEEPALIVE_TICKS: Final = 30
PING_TICKS: Final = 20
# How long a client may take to confirm the notice of a shutdown.
NOTICE_TICKS: Final = 2
# How long a client may take to close a connection that has ended.
CLOSE_TICKS: Final = 2
# How long clients get to read the status of calls that were cancelled at shutdown.
CLOSE_SECONDS: Final = 1.0
# The bytes that are written at once, and the output of one connection that is buffered.
SEND_BYTES: Final = 256 * 1024
# A streaming method waits while more of its output is unsent.
UNSENT_BYTES_MAX: Final = 64 * 1024
RENEWAL_TICKS: Final = 10
# The pause after a connection could not be accepted.
ACCEPT_SECONDS: Final = 0.1
BACKLOG: Final = 1_024

CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"

UNIMPLEMENTED: Final = CallError(Status.UNIMPLEMENTED, "unknown method")
TOO_MANY_CALLS: Final = CallError(Status.RESOURCE_EXHAUSTED, "too many calls are in flight")
TOO_LATE: Final = CallError(Status.DEADLINE_EXCEEDED, "the deadline has passed")
STOPPED: Final = CallError(Status.UNAVAILABLE, "the server is shutting down")
CANCELLED: Final = CallError(Status.CANCELLED, "the call was cancelled")


async def start(
    methods: Methods,
    address: str,
    tls: TlsFiles | None,
    bounds: Bounds,
    counted: dict[str, int],
    resets: dict[str, int] | None = None,
) -> Http2Server:
    """Start a server. Raises OSError if it cannot listen, ConfigError for unusable TLS files."""
    certificate = None if tls is None else _Certificate(tls)
    server = Http2Server(methods, bounds, certificate, counted, {} if resets is None else resets)
    try:
        if address.startswith("unix:"):
            await server.listen_on_path(address.removeprefix("unix:").removeprefix("//"))
        else:
            host, _, port = address.rpartition(":")
            for each in await _sockets(host.removeprefix("[").removesuffix("]"), int(port)):
                await server.listen(each)
    except BaseException:
        await server.stop(0)
        raise
    return server


async def _sockets(host: str, port: int) -> list[socket.socket]:
    """Return a bound socket for each address of a host. Raises OSError if there is none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    failed = OSError("the host has no address")
    for family, kind, protocol, _, (at, *_) in found:
        try:
            # A port of 0: the first address chooses, the others follow.
            chosen = bound[0].getsockname()[1] if bound else port
            bound.append(_bound(socket.socket(family, kind, protocol), str(at), chosen))
        except OSError as error:
            failed = error
    if not bound:
        raise failed
    return bound


def _bound(made: socket.socket, host: str, port: int) -> socket.socket:
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if made.family == socket.AF_INET6:
            # `[::]` listens for IPv4 too.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


class _Certificate:
    """The TLS context of a server, which follows its files when they are renewed."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._signature()
        self.context = _context(files)

    def follow(self) -> None:
        """Load the files again if they have changed; keep the old ones if they are unusable.

        A context cannot forget an authority: one that was replaced is accepted until the worker
        restarts (SIGHUP).
        """
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            _context(self._files)  # a certificate without its key must not reach the real one
            _load(self.context, self._files)
        except ConfigError as error:
            log.warning("gRPC goes on with the certificate that it has: %s", error)
        else:
            log.info("gRPC uses the certificate %s, which was renewed", self._files.certificate)

    def _signature(self) -> list[tuple[int, int, int] | None]:
        files = (self._files.certificate, self._files.key, self._files.authority)
        return [_signature(each) for each in files if each is not None]


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _tls_options(context: ssl.SSLContext) -> dict[str, Any]:
    return {
        "ssl": context,
        "ssl_handshake_timeout": REQUEST_TICKS * TICK_SECONDS,
        "ssl_shutdown_timeout": CLOSE_SECONDS,
    }


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["h2"])
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    files.contents()  # an unreadable file is named
    try:
        # A key with a pass phrase is rejected: at a restart, no operator is there to type it.
        context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        if files.authority is not None:
            context.load_verify_locations(files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{files.certificate} and {files.key} are not a certificate and its key in PEM, "
            f"without a pass phrase ({error})"
        ) from None


def _connections_max() -> int:
    """Return how many connections there may be: fewer if the worker may open only few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if files < 0 else min(CONNECTIONS_MAX, files // 4)


class Http2Server:
    """A running server."""

    def __init__(
        self,
        methods: Methods,
        bounds: Bounds,
        certificate: _Certificate | None,
        counted: dict[str, int],
        resets: dict[str, int],
    ) -> None:
        """Use `start`."""
        self.counted = counted
        self._resets = resets
        self.closed = SeldomLog(log, logging.INFO)
        self.unary = {path.encode(): method for path, method in methods.unary.items()}
        self.streaming = {path.encode(): method for path, method in methods.streaming.items()}
        self.at_once = frozenset(path.encode() for path in methods.at_once)
        self.calls = 0
        self.calls_max = bounds.calls
        # Streaming calls last long, so they get at most half of the calls.
        self.streaming_calls = 0
        self.streaming_calls_max = (bounds.calls + 1) // 2
        self.shared = _http2.Server(
            tuple(self.streaming),
            streams_max=STREAMS_MAX,
            message_bytes_max=bounds.message_bytes,
            stream_message_bytes_max=bounds.streamed_bytes,
            metadata_bytes_max=bounds.metadata_bytes,
            pool_bytes_max=max(POOL_BYTES_MAX, 4 * bounds.streamed_bytes),
            points_max=POINTS_MAX,
            points_per_tick=POINTS_PER_TICK,
            request_ticks=REQUEST_TICKS,
            unread_ticks=UNREAD_TICKS,
            keepalive_ticks=KEEPALIVE_TICKS,
            ping_ticks=PING_TICKS,
        )
        self._refused = self.shared.refused
        self._reset = self.shared.resets
        self.loop = asyncio.get_running_loop()
        self._certificate = certificate
        self._listeners: list[asyncio.Server] = []
        self._port = 0
        self._connections: set[_Connection] = set()
        self._addresses: Counter[str] = Counter()
        self._accepting: list[Task[None]] = []
        self._handshakes: dict[Task[None], str] = {}
        self.ticks = 0
        self._ticking = self.loop.call_later(TICK_SECONDS, self._keep_ticking)
        self._all_lost = asyncio.Event()
        self._all_lost.set()

    @property
    def port(self) -> int:
        """See GrpcServer.port."""
        return self._port

    async def listen(self, bound: socket.socket) -> None:
        """Accept connections on a bound socket."""
        self._port = bound.getsockname()[1]
        if self._certificate is None:
            listener = await self.loop.create_server(self._connection, sock=bound, backlog=BACKLOG)
            self._listeners.append(listener)
        else:
            bound.listen(BACKLOG)
            accepting = self.loop.create_task(self._accept(bound, self._certificate.context))
            self._accepting.append(accepting)

    async def listen_on_path(self, path: str) -> None:
        """Accept connections on a Unix socket."""
        tls = {} if self._certificate is None else _tls_options(self._certificate.context)
        listener = await self.loop.create_unix_server(
            self._connection, path, backlog=BACKLOG, **tls
        )
        self._listeners.append(listener)

    def _connection(self) -> _Connection:
        return _Connection(self)

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections with TLS.

        asyncio could accept them itself. It tells the protocol about a connection after the
        handshake, so that connections without one would have no bound.
        """
        try:
            while True:
                try:
                    accepted, (address, *_) = await self.loop.sock_accept(listener)
                except OSError as error:  # too many files are open, or the client has gone
                    self.closed.note("gRPC cannot accept a connection", error=error)
                    await asyncio.sleep(ACCEPT_SECONDS)
                    continue
                if self._may_begin_handshake(address):
                    handshake = self.loop.create_task(self._shake_hands(accepted, context))
                    self._handshakes[handshake] = address
                    handshake.add_done_callback(self._handshakes.pop)
                else:
                    accepted.close()
        finally:
            listener.close()

    def _may_begin_handshake(self, address: str) -> bool:
        of_address = sum(address == each for each in self._handshakes.values())
        if len(self._handshakes) >= HANDSHAKES_MAX or of_address >= HANDSHAKES_MAX // 4:
            self._count_resets("connections", 1)
            return False
        return True

    async def _shake_hands(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await self.loop.connect_accepted_socket(
                self._connection, accepted, **_tls_options(context)
            )
        except OSError as error:
            log.debug("a TLS handshake failed: %s", error)
            accepted.close()
        except BaseException:
            accepted.close()
            raise

    def admit(self, connection: _Connection, address: str) -> bool:
        """Return False if there are too many connections, and none of them is idle.

        A client beyond the bound of its address closes its own idle connections first.
        """
        most = _connections_max()
        is_full = len(self._connections) >= most
        at_bound = bool(address) and self._addresses[address] >= most // 2
        if (is_full or at_bound) and not self._close_idle(address if at_bound else ""):
            self._count_resets("connections", 1)
            return False
        self._connections.add(connection)
        self._addresses[address] += 1
        self._all_lost.clear()
        return True

    def _close_idle(self, address: str) -> bool:
        """Close the connection that has been idle for the longest time; False if none is.

        One that never made a call comes first. With an address, only connections from there count.
        """
        idle = [
            each for each in self._connections if each.is_idle and address in {"", each.address}
        ]
        if idle:
            min(idle, key=lambda each: (each.has_called, each.active_tick)).stop()
        return bool(idle)

    def forget(self, connection: _Connection, address: str) -> None:
        """Note that a connection was lost."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
        if not self._connections:
            self._all_lost.set()

    def _keep_ticking(self) -> None:
        self._ticking = self.loop.call_later(TICK_SECONDS, self._keep_ticking)
        self.tick()

    def tick(self) -> None:
        """Note that a second has passed."""
        self.ticks += 1
        for connection in list(self._connections):
            try:
                connection.tick()
            except Exception as error:
                # Time passes for the others all the same.
                self.closed.note("a gRPC connection was closed", error=error)
                connection.abort()
        self._count_refused()
        if self._certificate is not None and self.ticks % RENEWAL_TICKS == 0:
            self._certificate.follow()

    def _count_refused(self) -> None:
        """Count the calls that no method of this module has seen, and the resets."""
        refused = self.shared.refused
        for status, (now, before) in enumerate(zip(refused, self._refused, strict=True)):
            if now > before:
                count(self.counted, Status(status), now - before)
        self._refused = refused
        reset = self.shared.resets
        for reason, now in reset.items():
            if now > self._reset[reason]:
                self._count_resets(reason, now - self._reset[reason])
        self._reset = reset

    def _count_resets(self, reason: str, number: int) -> None:
        self._resets[reason] = self._resets.get(reason, 0) + number

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """See GrpcServer.stop."""
        for listener in self._listeners:
            listener.close()
        waiting = [*self._accepting, *self._handshakes]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for connection in list(self._connections):
            connection.notice()
        if not await self._lost_within(grace_s):
            for connection in list(self._connections):
                connection.stop()
            if not await self._lost_within(CLOSE_SECONDS):
                for connection in list(self._connections):
                    connection.abort()
                await self.lost()
        self._ticking.cancel()
        self._count_refused()

    async def lost(self) -> None:
        """Wait until there are no connections."""
        await self._all_lost.wait()

    async def _lost_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._all_lost.wait(), seconds)
        except TimeoutError:
            return False
        return True


class _Call:
    """A unary call."""

    __slots__ = ("_due_s", "_loop", "_metadata")

    def __init__(self, loop: AbstractEventLoop, metadata: bytes, due_s: float | None) -> None:
        self._loop = loop
        self._metadata = metadata
        self._due_s = due_s

    def metadata(self, name: str) -> str | None:
        return None if name.endswith("-bin") else _http2.find(self._metadata, name)

    def time_remaining(self) -> float | None:
        return None if self._due_s is None else max(self._due_s - self._loop.time(), 0.0)


class _StreamingCall(_Call):
    """A call in which both sides send messages."""

    __slots__ = ("_connection", "_half_closed", "_messages", "_receiver", "_stream")

    def __init__(
        self, connection: _Connection, stream: int, metadata: bytes, due_s: float | None
    ) -> None:
        super().__init__(connection.loop, metadata, due_s)
        self._connection = connection
        self._stream = stream
        self._messages: deque[bytes] = deque()
        self._half_closed = False
        self._receiver: Future[None] | None = None

    async def receive(self) -> bytes | None:
        while not self._messages:
            if self._half_closed:
                return None
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        message = self._messages.popleft()
        self._connection.taken(self._stream, message)
        return message

    async def send(self, message: bytes) -> None:
        await self._connection.send(self._stream, message)

    def add(self, message: bytes | None) -> None:
        """Note a message; None: the client sends no more."""
        if message is None:
            self._half_closed = True
        else:
            self._messages.append(message)
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)


class _InFlight:
    """A call that waits: its task, and the timer of its deadline."""

    __slots__ = ("_is_cancelled", "_task", "_timer", "call", "is_uncounted")

    def __init__(
        self, task: Task[bytes | None], timer: TimerHandle | None, call: _StreamingCall | None
    ) -> None:
        self._task = task
        self._timer = timer
        self._is_cancelled = False
        self.is_uncounted = True
        self.call = call

    def cancel(self) -> None:
        """Cancel the method: once, because a second time would stop it from cleaning up."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()
            self.stop_timer()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Rest(Coroutine[Any, Any, bytes]):
    """A coroutine that has made its first step outside of a task; a task runs the rest of it.

    It is not a generator, because one that is cancelled before it starts would not pass that on.
    """

    __slots__ = ("_has_begun", "_started", "_waits_for")

    def __init__(self, started: Coroutine[Any, Any, bytes], waits_for: Any) -> None:
        self._started = started
        self._waits_for = waits_for
        self._has_begun = False

    def send(self, value: Any, /) -> Any:
        if self._has_begun:
            return self._started.send(value)
        self._has_begun = True
        return self._waits_for

    def throw(self, *error: Any) -> Any:
        self._has_begun = True
        return self._started.throw(*error)

    def close(self) -> None:
        self._started.close()

    def __await__(self) -> Generator[Any, Any, bytes]:
        raise NotImplementedError("a task runs it")


def _address_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of a client; nothing if it is on this machine."""
    peer = transport.get_extra_info("peername")
    return peer[0] if isinstance(peer, tuple) else ""


class _Connection(asyncio.Protocol):
    """One connection."""

    _http2: Connection
    _transport: asyncio.Transport

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        self.loop = server.loop
        self.address = ""
        self._in_flight: dict[int, _InFlight] = {}
        self._senders: dict[int, list[Future[None]]] = {}
        self._is_flushing = False
        self._is_paused = False
        self._has_ended = False
        self._noticed_ticks = 0
        self._stuck_ticks = 0
        self.active_tick = server.ticks
        self.has_called = False

    # ── Bytes ──────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http2 = Connection(self._server.shared)
        self.address = _address_of(transport)
        secured = transport.get_extra_info("ssl_object")
        if not self._server.admit(self, self.address) or (
            secured is not None and secured.selected_alpn_protocol() != "h2"
        ):
            self.abort()
            return
        self._transport.set_write_buffer_limits(SEND_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        self.active_tick = self._server.ticks
        try:
            events = self._http2.receive(data)
        except Http2Error as error:
            self._fail(error)
            return
        if events:
            self.has_called = True
        for event in events:
            if event[0] == CALL:
                self._start_unary(*event[1:])
            else:
                self._handle(event)
        self._flush()

    def _flush(self) -> None:
        self._is_flushing = False
        # A transport with TLS cannot be written to after the client has closed it.
        if self._has_ended or self._transport.is_closing():
            return
        while not self._is_paused:
            data = self._to_send()
            if data:
                self._transport.write(data)
            if len(data) < SEND_BYTES:
                break
        if self._senders:
            self._wake_senders()
        if self._http2.finished:
            self._end()

    def _to_send(self) -> bytes:
        """Return bytes for the client. If memory is exhausted, the connection ends."""
        try:
            return self._http2.to_send(SEND_BYTES)
        except MemoryError:
            self.abort()
            return b""

    def _flush_soon(self) -> None:
        """Flush once, after all callbacks that are ready to run."""
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush)

    def pause_writing(self) -> None:
        # The server reads no more calls from a client that does not read its replies.
        self._is_paused = True
        self._stuck_ticks = 0
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()
        self._flush()

    def _fail(self, error: Http2Error) -> None:
        text = f"a gRPC connection from {self.address or 'this machine'} was closed: {error}"
        self._server.closed.note("%s", text)
        if not self._is_paused and not self._transport.is_closing():
            self._transport.write(self._to_send())
        self._has_ended = True
        self._stuck_ticks = 0
        self._transport.close()

    def _end(self) -> None:
        """Close the sending side; the client closes the connection once it has read everything."""
        self._has_ended = True
        self._stuck_ticks = 0
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has closed it already
            self._transport.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._has_ended = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._has_ended = True
        self._server.forget(self, self.address)
        for each in self._in_flight.values():
            each.cancel()

    # ── Time and shutdown ──────────────────────────────────────────────────────────────────────

    @property
    def is_idle(self) -> bool:
        """Return True if there is no call on this connection, and it has not ended."""
        return not (self._has_ended or self._http2.streams)

    def tick(self) -> None:
        """Note that a second has passed."""
        if self._has_ended or self._is_paused:
            self._stuck_ticks += 1
            if self._stuck_ticks > (CLOSE_TICKS if self._has_ended else UNREAD_TICKS):
                self.abort()
            return
        try:
            events = self._http2.tick()
        except Http2Error as error:
            self._fail(error)
            return
        for event in events:
            self._handle(event)
        if self._noticed_ticks:
            self._noticed_ticks += 1
            if self._noticed_ticks > NOTICE_TICKS:
                self._http2.goaway()
        self._flush()

    def notice(self) -> None:
        """Announce the shutdown to the client."""
        self._noticed_ticks = 1
        self._http2.notice()
        self._flush()

    def stop(self) -> None:
        """Cancel the calls in flight, and close the connection."""
        for stream in list(self._in_flight):
            self._cancel(stream, STOPPED)
        self._http2.goaway()
        self._flush()
        self._has_ended = True
        self._transport.close()

    # ── Calls ──────────────────────────────────────────────────────────────────────────────────

    def _start_unary(
        self, stream: int, path: bytes, metadata: bytes, timeout_ns: int, message: bytes
    ) -> None:
        server = self._server
        method = server.unary.get(path)
        if method is None or server.calls >= server.calls_max or not timeout_ns:
            full = TOO_MANY_CALLS if timeout_ns else TOO_LATE
            self._refuse(stream, UNIMPLEMENTED if method is None else full)
            return
        due_s = None if timeout_ns < 0 else self.loop.time() + timeout_ns / NS_PER_SECOND
        running = cast(
            "Coroutine[Any, Any, bytes]", method(message, _Call(self.loop, metadata, due_s))
        )
        if path in server.at_once:
            try:
                waits_for = running.send(None)
            except StopIteration as done:
                self._http2.reply(stream, done.value)
                return
            except Exception as error:
                self._end_call(stream, call_error_of(error, server.counted))
                return
            running = _Rest(running, waits_for)
        self._track(stream, running, due_s, None)

    def _start_streaming(self, stream: int, path: bytes, metadata: bytes, timeout_ns: int) -> None:
        server = self._server
        method = server.streaming[path]
        is_full = server.streaming_calls >= server.streaming_calls_max
        if is_full or server.calls >= server.calls_max or not timeout_ns:
            self._refuse(stream, TOO_MANY_CALLS if timeout_ns else TOO_LATE)
            return
        due_s = None if timeout_ns < 0 else self.loop.time() + timeout_ns / NS_PER_SECOND
        call = _StreamingCall(self, stream, metadata, due_s)
        self._track(stream, cast("Coroutine[Any, Any, None]", method(call)), due_s, call)

    def _refuse(self, stream: int, reason: CallError) -> None:
        """End a call with a status that the server and not the method chooses."""
        count(self._server.counted, reason.status)
        self._end_call(stream, reason)

    def _track(
        self,
        stream: int,
        running: Coroutine[Any, Any, bytes | None],
        due_s: float | None,
        call: _StreamingCall | None,
    ) -> None:
        task: Task[bytes | None] = self.loop.create_task(running)
        timer = None
        if due_s is not None:
            timer = self.loop.call_at(due_s, self._cancel, stream, TOO_LATE)
        self._in_flight[stream] = _InFlight(task, timer, call)
        self._server.calls += 1
        self._server.streaming_calls += call is not None
        task.add_done_callback(partial(self._done, stream))

    def _done(self, stream: int, task: Task[bytes | None]) -> None:
        in_flight = self._in_flight.pop(stream)
        self._server.calls -= 1
        self._server.streaming_calls -= in_flight.call is not None
        in_flight.stop_timer()
        if task.cancelled():
            self._end_call(stream, CANCELLED)  # unless the client knows already
            if in_flight.is_uncounted:
                count(self._server.counted, Status.CANCELLED)
        elif (error := task.exception()) is not None:
            if not isinstance(error, Exception):
                raise error
            self._end_call(stream, call_error_of(error, self._server.counted))
        elif in_flight.call is None:
            self._http2.reply(stream, cast("bytes", task.result()))
        else:
            self._http2.end(stream, Status.OK, b"")
        self._flush_soon()

    def _cancel(self, stream: int, reason: CallError) -> None:
        """End a call with a status, and cancel its method."""
        self._refuse(stream, reason)
        self._in_flight[stream].is_uncounted = False
        self._in_flight[stream].cancel()
        self._flush_soon()

    def _end_call(self, stream: int, error: CallError) -> None:
        self._http2.end(stream, error.status, error.message.encode(errors="replace"))

    def _handle(self, event: tuple[Any, ...]) -> None:
        """Handle an event of a streaming call, or the end of a call."""
        kind, stream, *rest = event
        if kind == OPENED:
            self._start_streaming(stream, *rest)
            return
        in_flight = self._in_flight.get(stream)
        if in_flight is None:
            return
        if kind == CLOSED:
            in_flight.cancel()
        elif in_flight.call is not None:
            in_flight.call.add(rest[0] if kind == MESSAGE else None)

    # ── Streams of messages ────────────────────────────────────────────────────────────────────

    def taken(self, stream: int, message: bytes) -> None:
        """Note that a method has received a message, so that the client may send more."""
        self._http2.taken(stream, len(message))
        self._flush_soon()

    async def send(self, stream: int, message: bytes) -> None:
        """Send a message; wait while the client does not read."""
        unsent = self._http2.send(stream, message)
        self._flush_soon()
        while unsent > UNSENT_BYTES_MAX and not self._has_ended:
            waiter: Future[None] = self.loop.create_future()
            self._senders.setdefault(stream, []).append(waiter)
            await waiter
            unsent = self._http2.unsent(stream)

    def _wake_senders(self) -> None:
        ready = [each for each in self._senders if self._http2.unsent(each) <= UNSENT_BYTES_MAX]
        for stream in ready:
            for waiter in self._senders.pop(stream):
                if not waiter.done():
                    waiter.set_result(None)
