"""The server on libnghttp2 over real sockets. What all servers do alike is in test_server.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.grpc.frames import OPENING, Responses, call, frame, headers, message, request
from tollkeeper.service.grpc import http2
from tollkeeper.service.grpc.calls import Bounds, CallError, GrpcCall, Methods, Status

PATH = "/test.Test/echo"
WAIT_SECONDS = 10.0


@asynccontextmanager
async def serving(
    method: Any, *, at_once: bool = True, bounds: Bounds | None = None
) -> AsyncIterator[tuple[http2.Http2Server, Any]]:
    """Run a server with one method, and return a client's function for it."""
    methods = Methods({PATH: method}, at_once=frozenset({PATH} if at_once else ()))
    server = await http2.start(methods, "127.0.0.1:0", None, bounds or Bounds())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel.unary_unary(PATH)
    finally:
        await server.stop(0)


async def code_of(sent: Any) -> str:
    """Return the name of the status of a call."""
    return str((await sent.code()).name)


async def test_a_method_that_ends_at_once_runs_in_no_task() -> None:
    """It is called by the protocol itself."""

    async def method(_: bytes, __: GrpcCall) -> bytes:
        return b"no" if asyncio.current_task() is None else b"yes"

    async with serving(method) as (_, client):
        assert await client(b"", timeout=WAIT_SECONDS) == b"no"
    async with serving(method, at_once=False) as (_, client):
        assert await client(b"", timeout=WAIT_SECONDS) == b"yes"


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
async def connected(server: http2.Http2Server) -> AsyncIterator[Client]:
    """Connect to a server."""
    client = Client(*await asyncio.open_connection("127.0.0.1", server.port))
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


async def test_a_call_whose_deadline_has_passed_does_not_run() -> None:
    """The client gets DEADLINE_EXCEEDED."""

    async def method(_: bytes, __: GrpcCall) -> bytes:
        raise AssertionError("it runs")

    async with serving(method) as (server, _), connected(server) as client:
        client.writer.write(OPENING + call(b"", 1, request(grpc_timeout="0n")))
        found = await client.until(lambda got: 1 in got.streams and got.streams[1].is_complete)
        assert found.streams[1].status == "4"


async def test_a_flood_ends_its_connection_only() -> None:
    """Other clients notice nothing."""
    async with serving(echo) as (server, other), connected(server) as client:
        client.writer.write(OPENING + frame(6, b"12345678") * 20_000)
        found = await client.closed()
        assert found.goaway is not None
        assert await other(b"a", timeout=WAIT_SECONDS) == b"a"


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address has half of them; an idle connection makes room for a new one."""
    monkeypatch.setattr(http2, "CONNECTIONS_MAX", 4)
    async with (
        serving(echo) as (server, _),
        connected(server) as first,
        connected(server) as second,
        connected(server) as third,
    ):
        await first.until(lambda got: got.frames)
        await second.until(lambda got: got.frames)
        assert not (await third.closed()).frames


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
        found = await client.until(lambda got: 1 in got.streams and got.streams[1].is_complete)
        assert found.streams[1].data == message(b"abc")


async def test_a_socket_file_is_replaced(tmp_path: Path) -> None:
    """One that a server has left behind does not stop the next one."""
    for _ in range(2):
        server = await http2.start(Methods(), f"unix:{tmp_path}/s", None, Bounds())
        await server.stop(0)
    (tmp_path / "file").write_text("not a socket")
    with pytest.raises(OSError, match="already in use"):
        await http2.start(Methods(), f"unix:{tmp_path}/file", None, Bounds())
