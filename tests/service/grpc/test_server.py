"""Every implementation of the server runs the same methods in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.grpc import server
from ratekeeper.service.grpc.calls import (
    Bounds,
    CallError,
    GrpcCall,
    GrpcServer,
    Methods,
    Status,
    StreamingCall,
    TlsFiles,
)
from tests.redis_servers.certificates import make_certificates

ADDRESS = "127.0.0.1:0"
SMALL = Bounds(message_bytes=1_000, streamed_bytes=5_000, metadata_bytes=8_192, calls=3)


class Tried:
    """Methods for the tests, and what happened to their calls."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.release = asyncio.Event()

    @property
    def methods(self) -> Methods:
        """All of them."""
        unary = {"echo": self.echo, "who": self.who, "left": self.left, "wait": self.wait}
        unary |= {"refuse": self.refuse, "fail": self.fail}
        streaming = {"repeat": self.repeat, "push": self.push, "forever": self.forever}
        return Methods(
            {f"/test.Test/{name}": method for name, method in unary.items()},
            {f"/test.Test/{name}": method for name, method in streaming.items()},
        )

    async def echo(self, message: bytes, _: GrpcCall) -> bytes:
        return message

    async def who(self, _: bytes, call: GrpcCall) -> bytes:
        return f"{call.metadata('authorization')} {call.metadata('other')}".encode()

    async def left(self, _: bytes, call: GrpcCall) -> bytes:
        left_s = call.time_remaining()
        return b"none" if left_s is None else str(left_s).encode()

    async def wait(self, message: bytes, _: GrpcCall) -> bytes:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return message

    async def refuse(self, message: bytes, _: GrpcCall) -> bytes:
        raise CallError(Status(message[0]), "100 % refused: größer, and a\nnew line")

    async def fail(self, _: bytes, __: GrpcCall) -> bytes:
        raise RuntimeError("a secret of the server")

    async def repeat(self, call: StreamingCall) -> None:
        while (message := await call.receive()) is not None:
            await call.send(message * 2)

    async def push(self, call: StreamingCall) -> None:
        for number in range(3):
            await call.send(b"%d" % number)
        raise CallError(Status.FAILED_PRECONDITION, "three are enough")

    async def forever(self, call: StreamingCall) -> None:
        self.started.set()
        try:
            while True:
                await call.send(b"x" * 10_000)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Client:
    """A client of the methods."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel

    async def __call__(self, name: str, message: bytes = b"", **options: Any) -> bytes:
        call = self.channel.unary_unary(f"/test.Test/{name}")
        found: bytes = await call(message, **{"timeout": 10, **options})
        return found

    def stream(self, name: str, **options: Any) -> Any:
        return self.channel.stream_stream(f"/test.Test/{name}")(**{"timeout": 10, **options})


@pytest.fixture(params=get_args(server.Implementation))
def on(request: pytest.FixtureRequest) -> server.Implementation:
    """Return each implementation."""
    found: server.Implementation = request.param
    return found


@asynccontextmanager
async def running(
    on: server.Implementation, bounds: Bounds | None = None, tls: TlsFiles | None = None
) -> AsyncIterator[tuple[Tried, GrpcServer]]:
    """Run a server with the methods above."""
    tried = Tried()
    handle = await server.start(tried.methods, ADDRESS, tls, bounds=bounds, on=on)
    try:
        yield tried, handle
    finally:
        tried.release.set()
        await handle.stop(0)


@asynccontextmanager
async def both(
    on: server.Implementation, bounds: Bounds | None = None
) -> AsyncIterator[tuple[Tried, Client]]:
    """Run a server, and a client of it."""
    async with (
        running(on, bounds) as (tried, handle),
        grpc.aio.insecure_channel(f"127.0.0.1:{handle.port}") as channel,
    ):
        yield tried, Client(channel)


def code_of(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> str:
    """Return the name of the status of a failed call."""
    return error.value.code().name


@pytest.mark.parametrize("length", [0, 1, 20_000, 1_000_000])
async def test_a_message_comes_back(on: server.Implementation, length: int) -> None:
    """Also one that is larger than a frame and than a window of flow control."""
    async with both(on) as (_, call):
        assert await call("echo", b"a" * length) == b"a" * length


async def test_many_calls_at_once(on: server.Implementation) -> None:
    """Each reply belongs to its call."""
    async with both(on) as (_, call):
        sent = [b"%d" % number for number in range(300)]
        assert await asyncio.gather(*[call("echo", each) for each in sent]) == sent


async def test_metadata(on: server.Implementation) -> None:
    """The first value of a name; binary values are not text."""
    async with both(on) as (_, call):
        sent = (("authorization", "Bearer rk"), ("authorization", "second"), ("other-bin", b"\0"))
        assert await call("who", metadata=sent) == b"Bearer rk None"


async def test_the_deadline_of_a_client(on: server.Implementation) -> None:
    """The method knows it."""
    async with both(on) as (_, call):
        # A client may round it up to a whole second.
        assert 50 < float(await call("left", timeout=100)) <= 101
        assert await call("left", timeout=None) == b"none"


async def test_a_call_past_its_deadline_is_cancelled(on: server.Implementation) -> None:
    """The client gets DEADLINE_EXCEEDED, and the method does not run on."""
    async with both(on) as (tried, call):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("wait", timeout=0.3)
        assert code_of(error) == "DEADLINE_EXCEEDED"
        await asyncio.wait_for(tried.cancelled.wait(), 10)


async def test_a_call_that_the_client_gives_up_is_cancelled(on: server.Implementation) -> None:
    """A unary call, and a stream that sends without end."""
    async with both(on) as (tried, call):
        for name in ("wait", "forever"):
            tried.started.clear()
            tried.cancelled.clear()
            given_up = call.stream(name) if name == "forever" else None
            task = asyncio.ensure_future(call(name)) if given_up is None else None
            await asyncio.wait_for(tried.started.wait(), 10)
            (given_up or task).cancel()  # type: ignore[union-attr]  # one of them is there
            await asyncio.wait_for(tried.cancelled.wait(), 10)


@pytest.mark.parametrize("status", [each for each in Status if each is not Status.OK])
async def test_a_refusal_reaches_the_client(on: server.Implementation, status: Status) -> None:
    """With its status and its message, whatever characters that has."""
    async with both(on) as (_, call):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("refuse", bytes([status]))
        assert code_of(error) == status.name
        assert error.value.details() == "100 % refused: größer, and a\nnew line"


async def test_an_unexpected_error_tells_the_client_nothing(on: server.Implementation) -> None:
    """It gets a status; the server goes on."""
    async with both(on) as (_, call):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("fail")
        assert code_of(error) in {"UNKNOWN", "INTERNAL"}
        assert "secret" not in str(error.value.details())
        assert await call("echo", b"a") == b"a"


async def test_an_unknown_method_is_unimplemented(on: server.Implementation) -> None:
    """Also one of an unknown service."""
    async with both(on) as (_, call):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("other")
        assert code_of(error) == "UNIMPLEMENTED"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.channel.unary_unary("/a.B/c")(b"", timeout=10)
        assert code_of(error) == "UNIMPLEMENTED"


async def test_calls_that_no_method_answers_are_counted(on: server.Implementation) -> None:
    """By their status; a method counts its own."""
    counted: dict[str, int] = {}
    handle = await server.start(Tried().methods, ADDRESS, bounds=SMALL, counted=counted, on=on)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{handle.port}") as channel:
        call = Client(channel)
        # One after another: grpcio does not tell which calls it refuses because there are too many.
        for name, message in (("fail", b""), ("other", b""), ("echo", b"a" * 1_001)):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(name, message)
        with pytest.raises(grpc.aio.AioRpcError):
            await call("refuse", b"\5")
        await call("echo")
    await handle.stop(0)
    assert counted == {"INTERNAL": 1, "UNIMPLEMENTED": 1, "RESOURCE_EXHAUSTED": 1}


async def test_a_compressed_message_is_refused_or_read(on: server.Implementation) -> None:
    """Never misread."""
    async with both(on) as (_, call):
        sent = b"a" * 500
        asked = call.channel.unary_unary("/test.Test/echo")(
            sent, timeout=10, compression=grpc.Compression.Gzip
        )
        if await asked.code() == grpc.StatusCode.OK:
            assert await asked == sent
        else:
            assert await asked.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_of_messages(on: server.Implementation) -> None:
    """In order; the call ends with OK when the method returns."""
    async with both(on) as (_, call):
        stream = call.stream("repeat")
        for number in range(20):
            await stream.write(b"%d" % number)
            assert await stream.read() == b"%d" % number * 2
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK


async def test_a_stream_that_the_server_ends(on: server.Implementation) -> None:
    """The messages before the refusal arrive."""
    async with both(on) as (_, call):
        stream = call.stream("push")
        assert [await stream.read() for _ in range(3)] == [b"0", b"1", b"2"]
        assert await stream.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert await stream.details() == "three are enough"


async def test_messages_are_bounded(on: server.Implementation) -> None:
    """Those of streams may be larger."""
    async with both(on, SMALL) as (_, call):
        assert len(await call("echo", b"a" * 1_000)) == 1_000
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("echo", b"a" * 1_001)
        assert code_of(error) == "RESOURCE_EXHAUSTED"
        stream = call.stream("repeat")
        await stream.write(b"a" * 2_000)
        assert len(await stream.read()) == 4_000
        await stream.write(b"a" * 5_001)
        assert await stream.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_in_flight_are_bounded(on: server.Implementation) -> None:
    """Those in flight get their replies."""
    async with both(on, SMALL) as (tried, call):
        held = [asyncio.ensure_future(call("wait", b"%d" % number)) for number in range(3)]
        await asyncio.wait_for(tried.started.wait(), 10)
        refused = await refusal_of(call)
        assert refused == "RESOURCE_EXHAUSTED"
        tried.release.set()
        assert await asyncio.gather(*held) == [b"0", b"1", b"2"]
        assert await call("echo", b"a") == b"a"


async def refusal_of(call: Client, timeout: float = 10) -> str:
    """Call until a call fails, and return its status."""
    async with asyncio.timeout(20):
        while True:
            try:
                await call("echo", b"a", timeout=timeout)
            except grpc.aio.AioRpcError as error:
                return error.code().name


async def test_calls_in_flight_end_before_the_server(on: server.Implementation) -> None:
    """Within the grace period; no new call is accepted."""
    async with (
        running(on) as (tried, handle),
        grpc.aio.insecure_channel(f"127.0.0.1:{handle.port}") as channel,
    ):
        call = Client(channel)
        held = asyncio.ensure_future(call("wait", b"a"))
        await asyncio.wait_for(tried.started.wait(), 10)
        stopping = asyncio.create_task(handle.stop(10))
        refused = await refusal_of(call, timeout=2)
        assert refused in {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
        tried.release.set()
        assert await held == b"a"
        await asyncio.wait_for(stopping, 10)


async def test_a_call_that_outlives_the_grace_period_is_cancelled(
    on: server.Implementation,
) -> None:
    """The server does not wait for ever."""
    async with (
        running(on) as (tried, handle),
        grpc.aio.insecure_channel(f"127.0.0.1:{handle.port}") as channel,
    ):
        held = asyncio.ensure_future(Client(channel)("wait", b"a"))
        await asyncio.wait_for(tried.started.wait(), 10)
        await asyncio.wait_for(handle.stop(0.1), 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await held
        await asyncio.wait_for(tried.cancelled.wait(), 10)


async def test_tls_with_client_certificates(on: server.Implementation, tmp_path: Path) -> None:
    """A client with a certificate of the authority gets a reply, others do not."""
    made = make_certificates(tmp_path)
    authority = made.ca_path.read_bytes()
    own = (made.client_key_path.read_bytes(), made.client_cert_path.read_bytes())
    tls = TlsFiles(made.server_cert_path, made.server_key_path, made.ca_path)
    async with running(on, tls=tls) as (_, handle):
        target = f"127.0.0.1:{handle.port}"
        trusted = grpc.ssl_channel_credentials(authority, *own)
        async with grpc.aio.secure_channel(target, trusted) as channel:
            assert await Client(channel)("echo", b"a") == b"a"
        without = grpc.ssl_channel_credentials(authority)
        async with grpc.aio.secure_channel(target, without) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await Client(channel)("echo", b"a", timeout=2)


async def test_servers_share_a_port(on: server.Implementation) -> None:
    """As the workers of a machine do."""
    async with running(on) as (tried, first):
        second = await server.start(tried.methods, f"127.0.0.1:{first.port}", on=on)
        assert second.port == first.port
        await second.stop(0)


async def test_a_unix_socket(on: server.Implementation, tmp_path: Path) -> None:
    """The client of the same machine needs no port."""
    handle = await server.start(Tried().methods, f"unix:{tmp_path}/s", on=on)
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            assert await Client(channel)("echo", b"a") == b"a"
    finally:
        await handle.stop(0)


@pytest.mark.parametrize(
    "address",
    ["192.0.2.1:0", "nowhere.invalid:80", "", "127.0.0.1", "127.0.0.1:99999", ":80", "a:b"],
)
async def test_an_invalid_address_is_an_error(on: server.Implementation, address: str) -> None:
    """The error names it, and shows a valid one."""
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8081"):
        await server.start(Methods(), address, on=on)


async def test_a_missing_certificate_is_an_error(on: server.Implementation, tmp_path: Path) -> None:
    """The error names the file."""
    tls = TlsFiles(tmp_path / "absent.pem", tmp_path / "absent.key")
    with pytest.raises(ConfigError, match=r"absent\.pem cannot be read"):
        await server.start(Methods(), ADDRESS, tls, on=on)


def test_the_implementation_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the fast one if it was built; the error says what to do if it was not."""
    assert [server.chosen("auto"), server.chosen("libnghttp2")] == ["libnghttp2"] * 2
    assert server.chosen("grpcio") == "grpcio"
    monkeypatch.setattr(server, "BUILT", False)
    with pytest.raises(ConfigError, match="or choose --grpc-server grpcio"):
        server.chosen("libnghttp2")
