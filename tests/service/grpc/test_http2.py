"""The server on libnghttp2 over real sockets. What all servers do alike is in test_server.py."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.grpc import http2
from ratekeeper.service.grpc._http2 import Http2Error
from ratekeeper.service.grpc.calls import (
    Bounds,
    CallError,
    GrpcCall,
    Methods,
    Status,
    StreamingCall,
    TlsFiles,
)
from tests.redis_servers.certificates import make_certificates
from tests.service.grpc.frames import (
    OPENING,
    PING,
    SETTINGS,
    Response,
    Responses,
    call,
    frame,
    headers,
    message,
    request,
)

PATH = "/test.Test/echo"
WAIT_SECONDS = 60.0


@asynccontextmanager
async def serving(
    method: Any, *, at_once: bool = True, bounds: Bounds | None = None
) -> AsyncIterator[tuple[http2.Http2Server, Any]]:
    """Run a server with one method, and return a client's function for it."""
    methods = Methods({PATH: method}, at_once=frozenset({PATH} if at_once else ()))
    server = await http2.start(methods, "127.0.0.1:0", None, bounds or Bounds(), {})
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel.unary_unary(PATH)
    finally:
        await server.stop(0)


async def code_of(sent: Any) -> str:
    """Return the name of the status of a call."""
    return str((await sent.code()).name)


async def test_a_method_that_waits_for_nothing_gets_no_task() -> None:
    """A task would cost more than everything else."""
    tasks = []

    def made(loop: Any, running: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(running)
        return asyncio.Task(running, loop=loop, **options)

    async def method(content: bytes, _: GrpcCall) -> bytes:
        if content:
            await asyncio.sleep(0)
        return b""

    async with serving(method) as (server, _), connected(server) as client:
        client.writer.write(OPENING)
        await client.until(lambda got: got.frames)
        asyncio.get_running_loop().set_task_factory(made)
        for stream, content, expected in ((1, b"", 0), (3, b"wait", 1)):
            client.writer.write(call(content, stream))
            await client.replied(stream)
            assert len(tasks) == expected


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_method_that_waits_goes_on_in_a_task(at_once: bool) -> None:
    """After its first step, several times, with exceptions from what it waits for."""

    async def method(content: bytes, _: GrpcCall) -> bytes:
        await asyncio.sleep(0)
        failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(failing.set_exception, ValueError("expected"))
        with pytest.raises(ValueError, match="expected"):
            await failing
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.sleep(0)
        return content * 2

    async with serving(method, at_once=at_once) as (server, client):
        assert await client(b"ab", timeout=WAIT_SECONDS) == b"abab"
        assert server.calls == 0


async def test_a_method_whose_first_step_needs_a_task_has_one() -> None:
    """Timeouts work from the first step on, unless the method declared that it needs none."""

    async def method(_: bytes, __: GrpcCall) -> bytes:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        return b"in time"

    async with serving(method, at_once=False) as (_, client):
        assert await client(b"", timeout=WAIT_SECONDS) == b"in time"


@pytest.mark.parametrize("first_waits", [True, False])
async def test_a_method_that_ends_at_once_may_refuse(first_waits: bool) -> None:
    """In its first step, or later."""

    async def method(_: bytes, __: GrpcCall) -> bytes:
        if first_waits:
            await asyncio.sleep(0)
        raise CallError(Status.NOT_FOUND, "nothing here")

    async with serving(method) as (server, client):
        assert await code_of(client(b"", timeout=WAIT_SECONDS)) == "NOT_FOUND"
        assert server.calls == 0


class Client:
    """A client that writes its own bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.responses = Responses()

    async def until(self, condition: Any) -> Responses:
        """Read until a condition of the responses holds."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition(self.responses):
                data = await self._reader.read(65_536)
                assert data, "the server closed the connection"
                self.responses.read(data)
        return self.responses

    async def replied(self, stream: int) -> Response:
        """Read until a call has its status."""
        found = await self.until(lambda got: got.streams.get(stream, Response()).is_complete)
        return found.streams[stream]

    async def closed(self) -> Responses:
        """Read until the server closes the connection."""
        async with asyncio.timeout(WAIT_SECONDS):
            try:
                while data := await self._reader.read(65_536):
                    self.responses.read(data)
            except ConnectionResetError:
                pass
        return self.responses


@asynccontextmanager
async def connected(server: http2.Http2Server, address: str = "127.0.0.1") -> AsyncIterator[Client]:
    """Connect to a server, from an address."""
    client = Client(
        *await asyncio.open_connection("127.0.0.1", server.port, local_addr=(address, 0))
    )
    try:
        yield client
    finally:
        client.writer.close()


async def echo(content: bytes, _: GrpcCall) -> bytes:
    """Return the message."""
    return content


async def test_replies_of_a_batch_are_written_together() -> None:
    """All of them are there after one read."""
    async with serving(echo) as (server, _), connected(server) as client:
        client.writer.write(OPENING + b"".join(call(b"a", stream) for stream in range(1, 41, 2)))
        found = await client.until(lambda got: 39 in got.streams and got.streams[39].is_complete)
        assert {each.status for stream, each in found.streams.items() if stream} == {"0"}


async def test_calls_that_no_method_answers_are_counted() -> None:
    """By status: refused by the extension, by the server, past the deadline, and cancelled."""
    started = asyncio.Event()

    async def method(_: bytes, __: GrpcCall) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    async with serving(method) as (server, _), connected(server) as client:
        malformed = headers(request(), 1) + frame(0, message(b"", flag=1), flags=1, stream=1)
        unknown = call(b"", 3, request("/test.Test/other"))
        late = call(b"", 5, request(grpc_timeout="1m"))
        client.writer.write(OPENING + malformed + unknown + late)
        for stream in (1, 3, 5):
            await client.replied(stream)
        started.clear()
        client.writer.write(call(b"", 7))
        await asyncio.wait_for(started.wait(), WAIT_SECONDS)
        client.writer.write(frame(3, b"\0\0\0\x08", stream=7) + frame(PING, b"12345678"))
        await client.until(lambda got: got.kinds(PING))
        server.tick()
        expected = {"INTERNAL": 1, "UNIMPLEMENTED": 1, "DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
        assert server.counted == expected


async def test_a_call_whose_deadline_has_passed_does_not_run() -> None:
    """The client gets DEADLINE_EXCEEDED."""

    async def method(_: bytes, __: GrpcCall) -> bytes:
        raise AssertionError("it runs")

    async with serving(method) as (server, _), connected(server) as client:
        client.writer.write(OPENING + call(b"", 1, request(grpc_timeout="0n")))
        reply = await client.replied(1)
        assert reply.status == "4"


async def test_a_flood_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    """Other clients notice nothing; the log names the address."""
    caplog.set_level("INFO")
    async with serving(echo) as (server, other), connected(server) as client:
        client.writer.write(OPENING + frame(6, b"12345678") * 20_000)
        found = await client.closed()
        assert found.goaway is not None
        assert "a gRPC connection from 127.0.0.1 was closed: too many frames" in caplog.text
        assert await other(b"a", timeout=WAIT_SECONDS) == b"a"


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address has half of them: its next one closes its idle one, and is refused if none is."""
    monkeypatch.setattr(http2, "CONNECTIONS_MAX", 4)
    started = asyncio.Event()

    async def method(_: bytes, __: GrpcCall) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    async with (
        serving(method) as (server, _),
        connected(server, "127.0.0.2") as other,
        connected(server) as silent,
        connected(server) as busy,
    ):
        await other.until(lambda got: got.frames)
        await silent.until(lambda got: got.frames)
        busy.writer.write(OPENING + call())
        await asyncio.wait_for(started.wait(), WAIT_SECONDS)
        started.clear()
        async with connected(server) as new:
            assert (await silent.closed()).goaway is not None
            new.writer.write(OPENING + call())
            await asyncio.wait_for(started.wait(), WAIT_SECONDS)
            async with connected(server) as refused:
                assert not (await refused.closed()).frames
        assert not other.responses.goaway
        assert not busy.responses.goaway


async def test_a_worker_with_few_files_has_few_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the files that it may open."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    async with (
        serving(echo) as (server, _),
        connected(server) as first,
    ):
        await first.until(lambda got: got.frames)
        server.tick()
        async with connected(server) as second, connected(server) as third:
            await second.until(lambda got: got.frames)
            await third.until(lambda got: got.frames)
            assert (await first.closed()).goaway is not None


async def test_an_idle_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has been idle for the longest time, and none with a call."""
    started = asyncio.Event()

    async def method(_: bytes, __: GrpcCall) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    async with (
        serving(method) as (server, _),
        connected(server) as busy,
        connected(server) as idle,
        connected(server) as active,
    ):
        monkeypatch.setattr(server, "_addresses", Counter())  # as if from different addresses
        busy.writer.write(OPENING + call())
        await asyncio.wait_for(started.wait(), WAIT_SECONDS)
        await idle.until(lambda got: got.frames)
        server.tick()
        active.writer.write(OPENING)
        await active.until(lambda got: len(got.kinds(SETTINGS)) == 2)
        monkeypatch.setattr(http2, "CONNECTIONS_MAX", 3)
        server._addresses.clear()
        async with connected(server) as new:
            await new.until(lambda got: got.frames)
            assert (await idle.closed()).goaway is not None
            assert not busy.responses.goaway
            assert not active.responses.goaway


async def test_each_of_many_new_connections_closes_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if they arrive before the first of those has been closed."""
    monkeypatch.setattr(http2, "CONNECTIONS_MAX", 4)
    async with serving(echo) as (server, _), AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connected(server, f"127.0.0.{2 + number // 2}"))
            for number in range(4)
        ]
        for client in clients:
            await client.until(lambda got: got.frames)
        server.tick()
        more = await asyncio.gather(
            *[
                stack.enter_async_context(connected(server, f"127.0.0.{10 + number}"))
                for number in range(4)
            ]
        )
        for client in more:
            await client.until(lambda got: got.frames)
        for client in clients:
            assert (await client.closed()).goaway is not None


class Exhausted:
    """The session of a connection that has no more memory."""

    streams = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def tick(self) -> None:
        raise self._error

    def to_send(self, _: int) -> bytes:
        raise MemoryError


@pytest.mark.parametrize("error", [Http2Error("out of memory"), MemoryError()])
async def test_a_connection_without_memory_ends(error: Exception) -> None:
    """Time passes for the others all the same."""
    async with serving(echo) as (server, _), connected(server) as client:
        await client.until(lambda got: got.frames)
        (connection,) = server._connections
        connection._http2 = Exhausted(error)  # type: ignore[assignment]  # that is the test
        server.tick()
        await client.closed()
        await asyncio.wait_for(server.lost(), WAIT_SECONDS)


async def test_streams_leave_room_for_other_calls() -> None:
    """Streaming calls last: they have at most half of the calls in flight."""

    async def forever(stream: StreamingCall) -> None:
        await stream.receive()

    streaming = {"/test.Test/forever": forever}
    methods = Methods({PATH: echo}, streaming)
    server = await http2.start(methods, "127.0.0.1:0", None, Bounds(calls=4), {})
    try:
        async with connected(server) as client:
            fields = request("/test.Test/forever")
            client.writer.write(OPENING + b"".join(headers(fields, each) for each in (1, 3, 5)))
            found = await client.until(lambda got: 5 in got.streams)
            assert found.streams[5].status == "8"
            client.writer.write(call(b"a", 7))
            reply = await client.replied(7)
            assert reply.status == "0"
    finally:
        await server.stop(0)


async def test_tasks_of_a_stream_may_send_at_the_same_time() -> None:
    """All of them go on when the client reads."""

    async def push(stream: StreamingCall) -> None:
        await asyncio.gather(*[stream.send(b"a" * 100_000) for _ in range(3)])

    methods = Methods({}, {"/test.Test/push": push})
    server = await http2.start(methods, "127.0.0.1:0", None, Bounds(), {})
    try:
        async with connected(server) as client:
            client.writer.write(OPENING + headers(request("/test.Test/push"), 1))
            await client.until(lambda got: got.streams.get(1, Response()).data)
            window = b"\0\x0f\0\0"
            client.writer.write(frame(8, window) + frame(8, window, stream=1))
            assert (await client.replied(1)).status == "0"
    finally:
        await server.stop(0)


async def test_a_text_that_is_not_unicode_reaches_the_client() -> None:
    """Half a character in a message of a method does not end the connection."""

    async def method(_: bytes, __: GrpcCall) -> bytes:
        raise CallError(Status.NOT_FOUND, "a \ud800 b")

    async with serving(method) as (server, _), connected(server) as client:
        client.writer.write(OPENING + call())
        assert (await client.replied(1)).fields["grpc-message"] == "a ? b"


async def test_a_method_is_cancelled_once() -> None:
    """A deadline, or the end of the connection, does not stop it from cleaning up."""
    started, cleaned = asyncio.Event(), asyncio.Event()
    go_on = asyncio.Event()

    async def method(_: bytes, __: GrpcCall) -> bytes:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await go_on.wait()
            cleaned.set()
        return b""

    async with serving(method) as (server, _):
        async with connected(server) as client:
            client.writer.write(OPENING + call(b"", 1, request(grpc_timeout="1m")))
            await asyncio.wait_for(started.wait(), WAIT_SECONDS)
            found = await client.until(lambda got: 1 in got.streams)
            assert found.streams[1].status == "4"
        await asyncio.wait_for(server.lost(), WAIT_SECONDS)
        go_on.set()
        await asyncio.wait_for(cleaned.wait(), WAIT_SECONDS)


async def test_a_method_cleans_up_before_its_task_has_begun() -> None:
    """Its first step was made without the task, so that it has something to clean up."""
    cleaned = asyncio.Event()

    async def method(_: bytes, __: GrpcCall) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()
        return b""

    async with serving(method) as (server, _), connected(server) as client:
        await client.until(lambda got: got.frames)
        (connection,) = server._connections
        connection.data_received(OPENING + call())
        assert server.calls == 1
        connection.data_received(frame(3, b"\0\0\0\x08", stream=1))
        await asyncio.wait_for(cleaned.wait(), WAIT_SECONDS)


@pytest.mark.parametrize(
    "sent",
    [b"", b"PRI * HTTP/2.0", OPENING + headers(request(), 1, flags=0)],
    ids=["nothing", "half a preface", "half of the headers"],
)
async def test_a_client_that_is_too_slow(sent: bytes) -> None:
    """Its connection ends after ten seconds."""
    async with serving(echo) as (server, _), connected(server) as client:
        client.writer.write(sent)
        await client.until(lambda got: len(got.frames) >= (3 if len(sent) > 24 else 2))
        for _ in range(11):
            server.tick()
        await client.closed()


async def test_a_quiet_client_is_asked_and_then_closed() -> None:
    """Keep-alive: a PING after 30 seconds, the end after 20 more without an answer."""
    async with serving(echo) as (server, _), connected(server) as client:
        client.writer.write(OPENING)
        await client.until(lambda got: len(got.kinds(SETTINGS)) == 2)
        for _ in range(30):
            server.tick()
        await client.until(lambda got: got.kinds(PING))
        for _ in range(20):
            server.tick()
        await client.closed()


async def test_a_client_that_does_not_read_is_closed() -> None:
    """What waits for it is bounded, and so is the time."""

    async def large(_: bytes, __: GrpcCall) -> bytes:
        return b"a" * 1_000_000

    async with serving(large) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        window = frame(SETTINGS, b"\0\4\x7f\xff\xff\xff") + frame(8, b"\x7f\0\0\0")
        writer.write(OPENING + window)
        writer.write(b"".join(call(b"", stream) for stream in range(1, 101, 2)))
        # It reads enough to show that the server has begun to write, and no more.
        await asyncio.wait_for(reader.read(20_000), WAIT_SECONDS)
        for _ in range(31):
            server.tick()
        await asyncio.wait_for(server.lost(), WAIT_SECONDS)
        writer.transport.abort()


async def test_shutdown_tells_the_client_first() -> None:
    """A notice; calls that cross it are served; the last GOAWAY; the end."""
    release = asyncio.Event()

    async def method(content: bytes, _: GrpcCall) -> bytes:
        if content:
            await release.wait()
        return content

    async with serving(method) as (server, _), connected(server) as client:
        client.writer.write(OPENING + call(b"a", 1))
        await client.until(lambda got: len(got.kinds(SETTINGS)) == 2)
        stopping = asyncio.create_task(server.stop(WAIT_SECONDS))
        found = await client.until(lambda got: got.kinds(PING))
        assert found.goaway == (2**31 - 1, 0)
        client.writer.write(call(b"", 3) + frame(PING, found.kinds(PING)[0].payload, flags=1))
        await client.until(lambda got: got.goaway == (3, 0))
        assert found.streams[3].status == "0"
        release.set()
        found = await client.closed()
        assert found.streams[1].data == message(b"a")
        client.writer.close()
        await asyncio.wait_for(stopping, WAIT_SECONDS)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_server_that_stops_loses_no_call() -> None:
    """Clients under load go on at another server of the same port."""

    async def method(content: bytes, _: GrpcCall) -> bytes:
        await asyncio.sleep(0.001)
        return content

    replies = 0
    under_load = asyncio.Event()

    async def load(port: int) -> None:
        nonlocal replies
        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
            for _ in range(50):
                sent = channel.unary_unary(PATH)(b"a", timeout=30, wait_for_ready=True)
                assert await sent == b"a"
                replies += 1
                if replies == 100:
                    under_load.set()

    async with serving(method) as (first, _):
        address = f"127.0.0.1:{first.port}"
        second = await http2.start(Methods({PATH: method}), address, None, Bounds(), {})
        clients = [asyncio.create_task(load(first.port)) for _ in range(8)]
        await asyncio.wait_for(under_load.wait(), 30)
        await first.stop(30)
        await asyncio.gather(*clients)
        await second.stop(0)


async def test_a_client_that_does_not_confirm_the_notice() -> None:
    """It gets the last GOAWAY after two seconds all the same."""
    async with serving(echo) as (server, _), connected(server) as client:
        client.writer.write(OPENING)
        await client.until(lambda got: len(got.kinds(SETTINGS)) == 2)
        stopping = asyncio.create_task(server.stop(WAIT_SECONDS))
        await client.until(lambda got: got.goaway)
        for _ in range(2):
            server.tick()
        await client.closed()
        assert client.responses.goaway == (0, 0)
        client.writer.close()
        await asyncio.wait_for(stopping, WAIT_SECONDS)


async def test_a_client_that_goes_away_cancels_its_calls() -> None:
    """The server does not work for it any more."""
    cancelled, started = asyncio.Event(), asyncio.Event()

    async def method(_: bytes, __: GrpcCall) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with serving(method) as (server, _):
        async with connected(server) as client:
            client.writer.write(OPENING + call())
            await asyncio.wait_for(started.wait(), WAIT_SECONDS)
            assert server.calls == 1
        await asyncio.wait_for(cancelled.wait(), WAIT_SECONDS)
        await server.stop(0)
        assert server.calls == 0


async def test_a_request_in_pieces() -> None:
    """Over a real socket."""
    async with serving(echo) as (server, _), connected(server) as client:
        client.writer.write(OPENING + headers(request(), 1))
        await client.until(lambda got: got.frames)
        client.writer.write(frame(0, message(b"abc"), flags=1, stream=1))
        reply = await client.replied(1)
        assert reply.data == message(b"abc")


async def test_a_socket_file_is_replaced(tmp_path: Path) -> None:
    """One that a server has left behind does not stop the next one."""
    for _ in range(2):
        server = await http2.start(Methods(), f"unix:{tmp_path}/s", None, Bounds(), {})
        await server.stop(0)
    (tmp_path / "file").write_text("not a socket")
    with pytest.raises(OSError, match="already in use"):
        await http2.start(Methods(), f"unix:{tmp_path}/file", None, Bounds(), {})


async def test_every_address_of_a_host() -> None:
    """`[::]` listens for IPv4 too; all addresses have one port."""
    server = await http2.start(Methods({PATH: echo}), "[::]:0", None, Bounds(), {})
    try:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, server.port)
            assert await asyncio.wait_for(reader.read(1), WAIT_SECONDS)
            writer.close()
    finally:
        await server.stop(0)


# ── TLS ────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def secured(files: TlsFiles) -> AsyncIterator[http2.Http2Server]:
    """Run a server with TLS."""
    server = await http2.start(Methods({PATH: echo}), "127.0.0.1:0", files, Bounds(), {})
    try:
        yield server
    finally:
        await server.stop(0)


def context_of(*protocols: str, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Return the context of a client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if version is not None:
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
    return context


async def certificate_of(server: http2.Http2Server) -> bytes:
    """Return the certificate that a server shows."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context_of("h2"))
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(shown)


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
async def test_tls_is_for_http2(protocols: tuple[str, ...], tmp_path: Path) -> None:
    """A client that does not ask for h2 is refused."""
    made = make_certificates(tmp_path)
    async with secured(TlsFiles(made.server_cert_path, made.server_key_path)) as server:
        client = None
        with contextlib.suppress(ssl.SSLError, ConnectionResetError):
            client = Client(
                *await asyncio.open_connection("127.0.0.1", server.port, ssl=context_of(*protocols))
            )
            assert not (await client.closed()).frames
        if client is not None:
            client.writer.close()


async def test_a_client_that_begins_no_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed, although the server has seen no connection yet."""
    monkeypatch.setattr(http2, "TICK_SECONDS", 0.01)
    made = make_certificates(tmp_path)
    async with (
        secured(TlsFiles(made.server_cert_path, made.server_key_path)) as server,
        connected(server) as client,
    ):
        assert not (await client.closed()).frames


async def test_handshakes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One address has a quarter of them, others get in, and they end with the server."""
    monkeypatch.setattr(http2, "HANDSHAKES_MAX", 8)
    made = make_certificates(tmp_path)
    files = TlsFiles(made.server_cert_path, made.server_key_path)
    async with secured(files) as server, AsyncExitStack() as stack:
        first = [await stack.enter_async_context(connected(server)) for _ in range(3)]
        assert not (await first[2].closed()).frames
        for number in range(2, 8):
            await stack.enter_async_context(connected(server, f"127.0.0.{number}"))
        last = await stack.enter_async_context(connected(server, "127.0.0.9"))
        assert not (await last.closed()).frames
        assert len(server._handshakes) == 8
        for client in first[:2]:
            client.writer.write(b"this is not TLS")
            assert not (await client.closed()).frames
        assert await certificate_of(server)
        await asyncio.wait_for(server.stop(0), WAIT_SECONDS)
        assert not server._handshakes


def test_handshakes_on_uvloop(tmp_path: Path) -> None:
    """The service runs on uvloop. No byte of a client that is quick is lost."""
    made = make_certificates(tmp_path)
    files = TlsFiles(made.server_cert_path, made.server_key_path)

    async def shake_hands() -> int:
        async with secured(files) as server, asyncio.timeout(WAIT_SECONDS):
            return len([await certificate_of(server) for _ in range(40)])

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(uvloop.run, shake_hands()).result() == 40


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    """TLS 1.2 is the oldest."""
    made = make_certificates(tmp_path)
    async with secured(TlsFiles(made.server_cert_path, made.server_key_path)) as server:
        old = context_of("h2", version=ssl.TLSVersion.TLSv1_1)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=old)
        known = context_of("h2", version=ssl.TLSVersion.TLSv1_2)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=known)
        writer.close()


async def test_a_certificate_is_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections get it; half of a renewal, or a wrong file, changes nothing."""
    (tmp_path / "new").mkdir()
    old, new = make_certificates(tmp_path), make_certificates(tmp_path / "new")
    files = TlsFiles(old.server_cert_path, old.server_key_path)
    before = files.certificate.read_bytes()
    async with secured(files) as server:
        first = await certificate_of(server)
        for content in (new.server_cert_path.read_bytes(), b"nothing"):
            files.certificate.write_bytes(content)
            for _ in range(10):
                server.tick()
            assert await certificate_of(server) == first
            assert "goes on with the certificate" in caplog.text
        files.certificate.write_bytes(new.server_cert_path.read_bytes())
        files.key.write_bytes(new.server_key_path.read_bytes())
        for _ in range(10):
            server.tick()
        assert await certificate_of(server) not in {first, before}


async def test_a_certificate_without_its_key_is_an_error(tmp_path: Path) -> None:
    """The server does not start, and the error names both files."""
    made = make_certificates(tmp_path)
    files = TlsFiles(made.server_cert_path, made.client_key_path)
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        await http2.start(Methods(), "127.0.0.1:0", files, Bounds(), {})
