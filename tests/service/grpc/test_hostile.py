"""Hostile clients over real sockets: each gets its error and is counted, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from ratekeeper.service.grpc import http2
from ratekeeper.service.grpc.calls import Bounds, GrpcCall, Methods, StreamingCall
from tests.service.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    OPENING,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call,
    frame,
    headers,
    message,
    request,
)
from tests.service.grpc.test__http2 import resident_bytes
from tests.service.grpc.test_http2 import WAIT_SECONDS, Client, connected, echo

STREAMING = "/test.Test/stream"
WAITING = "/test.Test/wait"
LARGE = "/test.Test/large"
ENHANCE_YOUR_CALM, PROTOCOL_ERROR = 11, 1
GROWTH_BYTES_MAX = 30_000_000

OPEN = headers(request(STREAMING), 1)
SMALL_WINDOW = frame(SETTINGS, b"\0\4\0\0\0\0")


def reset(stream: int) -> bytes:
    """Return a RST_STREAM frame of a client that cancels a call."""
    return frame(RST_STREAM, b"\0\0\0\x08", stream=stream)


@dataclass
class Attacked:
    """A server, the counters of an operator, and a client that does no harm."""

    server: http2.Http2Server
    friend: Client
    codes: dict[str, int] = field(default_factory=dict)
    resets: dict[str, int] = field(default_factory=dict)
    stream: int = 1

    async def serves_others(self) -> None:
        """Call a method on the harmless connection."""
        self.stream += 2
        self.friend.writer.write(call(b"friend", self.stream))
        found = await self.friend.until(
            lambda got: self.stream in got.streams and got.streams[self.stream].is_complete
        )
        assert found.streams[self.stream].data == message(b"friend")

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition of the server or of its counters."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                await asyncio.sleep(0.005)
                self.server._count_refused()

    def pass_seconds(self, count: int) -> None:
        """Let the server believe that time has passed."""
        for _ in range(count):
            self.server.tick()


async def answered(client: Client) -> None:
    """Wait until the server has read everything that the client has sent."""

    def answers() -> int:
        return [each.payload for each in client.responses.kinds(PING)].count(b"answered")

    before = answers()
    client.writer.write(frame(PING, b"answered"))
    await client.until(lambda _: answers() > before)


@pytest.fixture(autouse=True)
def _no_points_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, a flood lasts for seconds."""
    monkeypatch.setattr(http2, "POINTS_PER_TICK", 0)


async def wait(_: bytes, __: GrpcCall) -> bytes:
    """Wait until the call is cancelled."""
    await asyncio.Event().wait()
    return b""


async def large(_: bytes, __: GrpcCall) -> bytes:
    """Return more than a window of flow control."""
    return b"a" * 70_000


async def first(stream: StreamingCall) -> None:
    """Receive one message, as a health watch does."""
    await stream.receive()
    await asyncio.Event().wait()


@asynccontextmanager
async def attacked(**bounds: int) -> AsyncIterator[Attacked]:
    """Run a server. Afterwards it holds nothing of its clients any more."""
    methods = Methods({"/test.Test/echo": echo, WAITING: wait, LARGE: large}, {STREAMING: first})
    codes: dict[str, int] = {}
    resets: dict[str, int] = {}
    server = await http2.start(methods, "127.0.0.1:0", None, Bounds(**bounds), codes, resets)
    try:
        async with connected(server) as friend:
            friend.writer.write(OPENING)
            await answered(friend)
            target = Attacked(server, friend, codes, resets)
            before = resident_bytes()
            yield target
            assert resident_bytes() - before < GROWTH_BYTES_MAX
            await target.serves_others()
        await asyncio.wait_for(server.lost(), WAIT_SECONDS)
        await target.until(lambda: server.calls == 0)
        assert server.shared.pool_bytes == 0
    finally:
        await server.stop(0)


FLOODS = {
    "PING": frame(PING, b"12345678") * 8_000,
    "PING with ACK": frame(PING, b"12345678", flags=ACK) * 8_000,
    "SETTINGS": frame(SETTINGS) * 2_000,
    "SETTINGS with all settings": frame(SETTINGS, b"\0\4\0\0\xff\xff" * 30) * 2_000,
    "PRIORITY": frame(PRIORITY, b"\0\0\0\0\x10", stream=1) * 13_000,
    "WINDOW_UPDATE": frame(WINDOW_UPDATE, b"\0\0\0\1") * 13_000,
    "WINDOW_UPDATE of a stream": OPEN + frame(WINDOW_UPDATE, b"\0\0\0\1", stream=1) * 13_000,
    "empty DATA": OPEN + frame(DATA, stream=1) * 13_000,
    "one byte of DATA": OPEN + frame(DATA, b"\0", stream=1) * 13_000,
    "DATA of padding": OPEN + frame(DATA, b"\0", flags=PADDED, stream=1) * 13_000,
    "unknown frames": frame(0x77) * 13_000,
    "HEADERS without END_HEADERS": headers(request(), 1, flags=0)
    + frame(CONTINUATION, stream=1) * 100,
    "a huge header block": headers(request(), 1, flags=0)
    + frame(CONTINUATION, b"a" * 16_000, stream=1) * 4,
    "rapid resets": b"".join(call(b"", each) + reset(each) for each in range(1, 5_000, 2)),
    "rapid resets of waiting calls": b"".join(
        call(b"", each, request(WAITING)) + reset(each) for each in range(1, 5_000, 2)
    ),
    "rapid resets of streams": b"".join(
        headers(request(STREAMING), each) + reset(each) for each in range(1, 6_000, 2)
    ),
    "errors that make the server reset": b"".join(
        headers(request(STREAMING), each) + frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff", stream=each)
        for each in range(1, 13_000, 2)
    ),
}


@pytest.mark.parametrize("sent", FLOODS.values(), ids=FLOODS.keys())
async def test_floods(sent: bytes) -> None:
    """A flood of frames ends its connection with ENHANCE_YOUR_CALM.

    Among them are the floods of CVE-2019-9512, 9515 and 9518, rapid resets (CVE-2023-44487, and
    CVE-2025-8671 where the server resets) and CONTINUATION (CVE-2024-27316).
    """
    async with attacked() as target:
        async with connected(target.server) as client:
            client.writer.write(OPENING + sent)
            await target.serves_others()
            found = await client.closed()
        await target.until(lambda: "flood" in target.resets)
        if found.goaway is not None:  # the rest of a flood may reset the connection before
            assert found.goaway[1] == ENHANCE_YOUR_CALM


VIOLATIONS = {
    "HTTP/1.1": b"POST /test.Test/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(range(200)),
    "garbage after the preface": PREFACE + bytes(range(256)) * 4,
    "garbage after SETTINGS": OPENING + bytes(range(255, -1, -1)) * 4,
    "half a frame of 16 MiB": OPENING + b"\xff\xff\xff\0\0\0\0\0\1" + b"a" * 1_000,
}


@pytest.mark.parametrize("sent", VIOLATIONS.values(), ids=VIOLATIONS.keys())
async def test_other_protocols(sent: bytes) -> None:
    """The connection ends at once, with GOAWAY."""
    async with attacked() as target:
        async with connected(target.server) as client:
            client.writer.write(sent)
            await target.serves_others()
            found = await client.closed()
        assert found.goaway is not None
        await target.until(lambda: target.resets == {"violation": 1})


async def test_thousands_of_streams() -> None:
    """Those over the bound are refused, and the client may repeat them elsewhere."""
    async with attacked() as target, connected(target.server) as client:
        opened = range(1, 4_001, 2)
        client.writer.write(OPENING + b"".join(headers(request(), each) for each in opened))
        found = await client.until(lambda got: 3_999 in got.streams and got.streams[3_999].reset)
        refused = [each for each in opened if each in found.streams]
        assert len(refused) == len(opened) - http2.STREAMS_MAX
        assert {found.streams[each].reset for each in refused} == {7}
        await target.serves_others()
        await target.until(lambda: target.resets == {"streams": len(refused)})


async def test_messages_that_are_announced_and_not_sent() -> None:
    """The server keeps what arrives, and not what is announced; the rest has ten seconds."""
    start = b"\0" + (1_000_000).to_bytes(4) + b"a" * 100
    async with attacked() as target, connected(target.server) as client:
        opened = range(1, 2 * http2.STREAMS_MAX, 2)
        client.writer.write(OPENING)
        for each in opened:
            client.writer.write(headers(request(), each) + frame(DATA, start, stream=each))
        await answered(client)
        target.pass_seconds(http2.REQUEST_TICKS + 1)
        await target.until(lambda: target.codes.get("DEADLINE_EXCEEDED") == len(opened))
        found = await client.until(lambda got: len(got.streams) > len(opened))
        assert {found.streams[each].status for each in opened} == {"4"}


@pytest.mark.parametrize("announced", [1024 * 1024 + 1, 2**31, 2**32 - 1])
async def test_a_message_that_is_too_large(announced: int) -> None:
    """It is refused by its length; the client may stop."""
    async with attacked() as target, connected(target.server) as client:
        start = b"\0" + announced.to_bytes(4) + b"a" * 100
        client.writer.write(OPENING + headers(request(), 1) + frame(DATA, start, stream=1))
        found = await client.until(lambda got: 1 in got.streams and got.streams[1].reset == 0)
        assert found.streams[1].status == "8"
        await target.until(lambda: target.codes == {"RESOURCE_EXHAUSTED": 1})


async def test_replies_that_a_client_does_not_read() -> None:
    """A window of zero (CVE-2019-9517): the replies wait for 30 seconds, then they are dropped."""
    async with attacked() as target, connected(target.server) as client:
        opened = range(1, 400, 2)
        client.writer.write(OPENING + SMALL_WINDOW)
        client.writer.write(b"".join(call(b"", each, request(LARGE)) for each in opened))
        await client.until(lambda got: 399 in got.streams)
        await target.serves_others()
        for _ in range(http2.UNREAD_TICKS + 1):
            target.pass_seconds(1)
            await answered(client)  # it is not quiet
        await target.until(lambda: target.resets == {"slow": len(opened)})
        found = await client.until(lambda got: got.streams[399].reset)
        assert not any(found.streams[each].data for each in opened)


async def test_messages_that_a_method_does_not_take() -> None:
    """A client that goes on sending to a health watch runs into the window, then into the pool."""
    async with attacked() as target, connected(target.server) as client:
        client.writer.write(OPENING + frame(SETTINGS, flags=ACK))
        small = message(b"ab") * 2_000
        for each in range(1, 61, 2):
            client.writer.write(headers(request(STREAMING), each))
            client.writer.write(frame(DATA, small, stream=each) * 18)
        await target.until(lambda: "RESOURCE_EXHAUSTED" in target.codes)
        await target.serves_others()
        assert target.server.shared.pool_bytes <= http2.POOL_BYTES_MAX // 4


@pytest.mark.parametrize(
    "fields",
    [
        [("metadata", "a" * 17_000)],
        [(f"a{number}", "b") for number in range(600)],
        [("a", "")] * 600,
    ],
    ids=["one large", "many small", "empty"],
)
async def test_much_metadata(fields: list[tuple[str, str]]) -> None:
    """It gets a status, and the next call of the client is served."""
    async with attacked() as target, connected(target.server) as client:
        sent = [*request(), *fields]
        block = headers(sent, 1)[9:]
        parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
        data = frame(1, parts[0], stream=1, flags=0 if parts[1:] else END_HEADERS)
        if parts[1:]:
            data += frame(CONTINUATION, parts[1], stream=1, flags=END_HEADERS)
        client.writer.write(OPENING + data + frame(DATA, message(b""), flags=END_STREAM, stream=1))
        client.writer.write(call(b"next", 3))
        found = await client.until(lambda got: 3 in got.streams and got.streams[3].is_complete)
        assert found.streams[1].status == "8"
        assert found.streams[3].data == message(b"next")
        await target.until(lambda: target.codes == {"RESOURCE_EXHAUSTED": 1})


async def test_calls_that_are_reset_while_their_methods_run() -> None:
    """All are cancelled and counted."""
    async with attacked() as target, connected(target.server) as client:
        opened = range(1, 401, 2)
        client.writer.write(OPENING)
        client.writer.write(b"".join(call(b"", each, request(WAITING)) for each in opened))
        await target.until(lambda: target.server.calls == len(opened))
        client.writer.write(b"".join(map(reset, opened)))
        await target.until(lambda: target.server.calls == 0)
        assert target.codes == {"CANCELLED": len(opened)}


async def test_a_client_that_closes_its_half() -> None:
    """Its calls in flight are cancelled, and the connection ends."""
    async with attacked() as target, connected(target.server) as client:
        client.writer.write(OPENING + call(b"", 1, request(WAITING)) + call(b"a", 3))
        await target.until(lambda: target.server.calls == 1)
        client.writer.write_eof()
        found = await client.closed()
        assert found.streams[3].data == message(b"a")
        await target.until(lambda: target.codes == {"CANCELLED": 1})


async def test_a_flood_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address has half of the connections; another one is served."""
    monkeypatch.setattr(http2, "CONNECTIONS_MAX", 40)
    async with attacked() as target, contextlib.AsyncExitStack() as stack:
        await target.serves_others()
        for _ in range(60):
            client = await stack.enter_async_context(connected(target.server))
            client.writer.write(OPENING)
        await target.until(lambda: target.server._addresses["127.0.0.1"] <= 20)
        async with connected(target.server, "127.0.0.2") as other:
            other.writer.write(OPENING + call(b"a"))
            await other.until(lambda got: 1 in got.streams and got.streams[1].is_complete)
