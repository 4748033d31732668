"""The C extension: bytes of a client in, events and bytes of the server out."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.service.grpc import _http2
from ratekeeper.service.grpc._http2 import (
    CALL,
    CLOSED,
    HALF_CLOSED,
    MESSAGE,
    OPENED,
    Connection,
    Http2Error,
    Server,
)
from tests.service.grpc import frames
from tests.service.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    OPENING,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Responses,
    block_of,
    call,
    frame,
    headers,
    message,
    request,
)

STREAMING = "/test.Test/stream"
INTERNAL_ERROR, CANCEL = 2, 8


def server(**changed: int) -> Server:
    """Return a server with small bounds."""
    bounds = {
        "streams_max": 10,
        "message_bytes_max": 1_000,
        "stream_message_bytes_max": 500_000,
        "metadata_bytes_max": 4_096,
        "pool_bytes_max": 4_000_000,
        "points_max": 500,
        "points_per_tick": 50,
        "request_ticks": 10,
        "unread_ticks": 30,
        "keepalive_ticks": 30,
        "ping_ticks": 20,
    }
    return Server((STREAMING.encode(),), **{**bounds, **changed})


class Session:
    """A connection, and what its client has read."""

    def __init__(self, of: Server | None = None) -> None:
        self.server = of or server()
        self.connection = Connection(self.server)
        self.responses = Responses()
        assert self(OPENING) == []

    def __call__(self, data: bytes) -> list[tuple[Any, ...]]:
        """Send bytes to the server; return events."""
        try:
            return self.connection.receive(data)
        finally:
            self.read()

    def read(self) -> Responses:
        """Read what the server sends."""
        while data := self.connection.to_send(16_384):
            self.responses.read(data)
        return self.responses

    def ticks(self, count: int) -> list[tuple[Any, ...]]:
        """Let seconds pass; return events."""
        found = []
        for _ in range(count):
            found += self.connection.tick()
            self.read()
        return found

    def reply_to(self, stream: int) -> frames.Response:
        """Return what the client has read of a stream."""
        return self.read().streams[stream]


def test_a_unary_call() -> None:
    """One event has everything; the reply is headers, a message, and trailers."""
    session = Session()
    fields = [*request(grpc_timeout="20m"), ("authorization", "Bearer a")]
    (event,) = session(call(b"abc", 1, fields))
    kind, stream, path, metadata, timeout_ns, content = event
    assert (kind, stream, path, timeout_ns) == (CALL, 1, b"/test.Test/echo", 20_000_000)
    assert content == b"abc"
    assert _http2.find(metadata, "authorization") == "Bearer a"
    session.connection.reply(1, b"defg")
    response = session.reply_to(1)
    assert response.fields == {":status": "200", "content-type": "application/grpc"}
    assert response.data == message(b"defg")
    assert response.trailers == {"grpc-status": "0"}
    assert response.is_complete
    assert session.connection.streams == 0


def test_bytes_may_arrive_one_by_one() -> None:
    """No boundary of a read matters."""
    session = Session()
    events = [event for byte in call(b"abc") for event in session(bytes([byte]))]
    assert [(each[0], each[-1]) for each in events] == [(CALL, b"abc")]


def test_a_second_reply_is_cheap() -> None:
    """The constant fields are in the client's table: one byte each."""
    session = Session()
    for stream in (1, 3):
        session(call(b"", stream))
        session.connection.reply(stream, b"")
    sent = [each for each in session.read().kinds(HEADERS) if each.stream == 3]
    assert [len(each.payload) for each in sent] == [2, 1]


def test_metadata() -> None:
    """The first value of a name; text that is not ASCII is not text."""
    session = Session()
    fields = [*request(), ("a", "1"), ("a", "2"), ("b", "ä"), ("empty", "")]
    ((*_, metadata, _, _),) = session(call(b"", 1, fields))
    found = [_http2.find(metadata, name) for name in ("a", "b", "empty", "c", "", "te")]
    assert found == ["1", None, "", None, None, None]


@pytest.mark.parametrize(
    ("sent", "timeout_ns"),
    [
        ("0n", 0),
        ("1u", 1_000),
        ("99999999m", 99_999_999_000_000),
        ("1S", 10**9),
        ("2M", 120 * 10**9),
        ("1H", 3_600 * 10**9),
        ("99999999H", 2**63 - 1),
        ("", -1),
    ],
)
def test_timeouts(sent: str, timeout_ns: int) -> None:
    """Every unit of gRPC, and none."""
    ((*_, found, _),) = Session()(call(b"", 1, request(grpc_timeout=sent)))
    assert found == timeout_ns


@pytest.mark.parametrize(
    ("changed", "http", "status"),
    [
        ({"content_type": "application/json"}, "415", "13"),
        ({"content_type": "application/grpc-web"}, "415", "13"),
        ({"content_type": ""}, "415", "13"),
        ({"method": "GET"}, "405", "13"),
        ({"grpc_timeout": "1"}, "200", "13"),
        ({"grpc_timeout": "1x"}, "200", "13"),
        ({"grpc_timeout": "-1S"}, "200", "13"),
        ({"grpc_timeout": "123456789S"}, "200", "13"),
        ({"long": "a" * 4_000}, "200", "8"),
    ],
)
def test_a_request_that_is_not_grpc(changed: dict[str, str], http: str, status: str) -> None:
    """No method sees it, and the connection goes on."""
    session = Session()
    assert session(call(b"", 1, request(**changed))) == []
    assert session.reply_to(1).fields[":status"] == http
    assert session.reply_to(1).status == status
    assert session.server.refused[int(status)] == sum(session.server.refused) == 1
    assert session(call(b"", 3))[0][0] == CALL


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_a_content_type_with_a_suffix(kind: str) -> None:
    """It is gRPC. A missing `te` is accepted, too."""
    assert Session()(call(b"", 1, request(content_type=kind, te="")))[0][0] == CALL


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (message(b"a" * 1_001), "8"),
        (message(b"a", flag=1), "13"),
        (message(b"a", flag=2), "13"),
        (message(b"a") + message(b"b"), "12"),
        (b"", "12"),
        (message(b"abc")[:-1], "13"),
        (b"\0\0", "13"),
    ],
)
def test_a_wrong_message(sent: bytes, status: str) -> None:
    """Too large, compressed without an encoding, unknown flags, two, none, and cut ones."""
    session = Session()
    data = headers(request(), 1) + frame(DATA, sent, flags=END_STREAM, stream=1)
    assert session(data) == []
    assert session.reply_to(1).status == status
    assert session.connection.streams == 0


def test_a_compressed_message() -> None:
    """The client learns which encodings there are."""
    session = Session()
    data = headers(request(grpc_encoding="gzip"), 1)
    assert session(data + frame(DATA, message(b"a", flag=1), flags=END_STREAM, stream=1)) == []
    assert session.reply_to(1).status == "12"
    assert session.reply_to(1).fields["grpc-accept-encoding"] == "identity"
    plain = headers(request(grpc_encoding="gzip"), 3)
    assert session(plain + frame(DATA, message(b"a"), flags=END_STREAM, stream=3))[0][0] == CALL


def test_a_refused_client_is_told_to_stop() -> None:
    """It has not ended its request: RST_STREAM follows the status, without an error."""
    session = Session()
    session(headers(request(), 1) + frame(DATA, message(b"a" * 1_001)[:10], stream=1))
    assert session.reply_to(1).status == "8"
    assert session.reply_to(1).reset == 0
    assert session.connection.streams == 0


def test_padding_trailers_and_priority() -> None:
    """A request may have them."""
    session = Session()
    padded = b"\5" + message(b"abc") + b"\0" * 5
    events = session(
        headers(request(), 1)
        + frame(PRIORITY, b"\0\0\0\0\x10", stream=1)
        + frame(DATA, padded, flags=PADDED, stream=1)
        + headers([("trailer", "a")], 1, flags=END_HEADERS | END_STREAM)
    )
    assert [(each[0], each[-1]) for each in events] == [(CALL, b"abc")]


def test_a_status_with_a_text() -> None:
    """Percent-encoded as gRPC demands it, and of bounded length."""
    session = Session()
    session(call())
    session.connection.end(1, 5, "a % ü\n".encode())
    assert session.reply_to(1).fields["grpc-status"] == "5"
    assert session.reply_to(1).fields["grpc-message"] == "a %25 %C3%BC%0A"
    session(call(b"", 3))
    session.connection.end(3, 99, b"a" * 5_000)
    assert session.reply_to(3).status == "2"
    assert len(session.reply_to(3).fields["grpc-message"]) == 1_024


def test_a_reset_in_the_same_batch_costs_no_call() -> None:
    """The event is dropped with its stream."""
    session = Session()
    assert session(call() + frame(RST_STREAM, b"\0\0\0\x08", stream=1)) == []


def test_a_reset_later_cancels_the_call() -> None:
    """Its reply is ignored then."""
    session = Session()
    session(call())
    assert session(frame(RST_STREAM, b"\0\0\0\x08", stream=1)) == [(CLOSED, 1)]
    session.connection.reply(1, b"late")
    session.connection.end(1, 0, b"")
    assert 1 not in session.read().streams


def test_replies_for_unknown_streams_are_ignored() -> None:
    """The client may have reset them; a second reply has no effect either."""
    session = Session()
    for stream in (0, 1, 2, -1, 2**31 - 1, 2**40):
        session.connection.reply(stream, b"a")
        session.connection.end(stream, 0, b"")
        assert session.connection.send(stream, b"a") == 0
        session.connection.taken(stream, 5)
        assert session.connection.unsent(stream) == 0
    session(call())
    session.connection.reply(1, b"first")
    session.connection.reply(1, b"second")
    assert session.reply_to(1).data == message(b"first")


# ── Streaming ──────────────────────────────────────────────────────────────────────────────────


def test_a_streaming_call() -> None:
    """It opens before its messages arrive; both sides send."""
    session = Session()
    (opened,) = session(headers(request(STREAMING, grpc_timeout="1S"), 1))
    assert (opened[:3], opened[-1]) == ((OPENED, 1, STREAMING.encode()), 10**9)
    two = message(b"a") + message(b"bc")
    assert session(frame(DATA, two[:8], stream=1)) == [(MESSAGE, 1, b"a")]
    assert session(frame(DATA, two[8:], stream=1)) == [(MESSAGE, 1, b"bc")]
    assert session.connection.send(1, b"x") == 6
    assert session.reply_to(1).data == message(b"x")
    assert session.connection.unsent(1) == 0
    assert session(frame(DATA, flags=END_STREAM, stream=1)) == [(HALF_CLOSED, 1)]
    session.connection.send(1, b"y")
    session.connection.end(1, 9, b"enough")
    assert session.reply_to(1).data == message(b"x") + message(b"y")
    assert session.reply_to(1).trailers == {"grpc-status": "9", "grpc-message": "enough"}


def test_a_streaming_call_that_ends_while_it_waits() -> None:
    """The status follows although no output is queued."""
    session = Session()
    session(headers(request(STREAMING), 1))
    session.connection.send(1, b"x")
    session.read()
    session.connection.end(1, 0, b"")
    assert session.reply_to(1).trailers == {"grpc-status": "0"}
    assert session.reply_to(1).reset == 0


def test_a_wrong_message_ends_a_streaming_call() -> None:
    """The method is cancelled, and the client gets the status."""
    session = Session()
    session(headers(request(STREAMING), 1))
    assert session(frame(DATA, message(b"", flag=7), stream=1)) == [(CLOSED, 1)]
    assert session.reply_to(1).status == "13"


def test_a_method_that_does_not_receive_stops_its_client() -> None:
    """The window of the stream is not opened again until messages are taken."""
    session = Session()
    session(headers(request(STREAMING), 1))
    content = message(b"a" * 16_000)
    for _ in range(16):
        session(frame(DATA, content, stream=1))
    opened = sum(
        int.from_bytes(each.payload)
        for each in session.read().kinds(WINDOW_UPDATE)
        if each.stream == 1
    )
    assert opened < 131_072
    for _ in range(16):
        session.connection.taken(1, 16_000)
    assert any(each.stream == 1 for each in session.read().kinds(WINDOW_UPDATE))


def test_a_client_that_opens_no_window_gets_no_messages() -> None:
    """What waits is reported, so that the method can wait."""
    session = Session()
    session(frame(SETTINGS, b"\0\4\0\0\0\0"))
    session(headers(request(STREAMING), 1))
    assert session.connection.send(1, b"a" * 1_000) == 1_005
    assert session.reply_to(1).data == b""
    session(frame(WINDOW_UPDATE, b"\0\0\3\xe8", stream=1))
    assert session.connection.unsent(1) == 5


def test_a_large_message_crosses_windows() -> None:
    """Of the stream and of the connection."""
    session = Session()
    session(headers(request(STREAMING), 1))
    data = message(b"a" * 500_000)
    events = []
    for at in range(0, len(data), 16_384):
        events += session(frame(DATA, data[at : at + 16_384], stream=1))
    assert [(each[0], len(each[-1])) for each in events] == [(MESSAGE, 500_000)]
    assert session.server.pool_bytes > 0
    session.connection.taken(1, 500_000)
    assert session.server.pool_bytes == 0


# ── Bounds ─────────────────────────────────────────────────────────────────────────────────────


def test_what_all_clients_may_hold_is_bounded() -> None:
    """A connection has a quarter of the pool; the messages of others go on."""
    shared = server(pool_bytes_max=400_000)
    first, second = Session(shared), Session(shared)
    for session in (first, second):
        session(headers(request(STREAMING), 1))
    start = message(b"a" * 500_000)
    for at in range(0, 163_840, 16_384):
        first(frame(DATA, start[at : at + 16_384], stream=1))
    assert first.reply_to(1).status == "8"
    assert shared.pool_bytes == 0
    assert second(frame(DATA, start[:16_384], stream=1)) == []
    assert shared.pool_bytes > 0
    assert 1 not in second.read().streams
    del second, session
    assert shared.pool_bytes == 0


def test_small_messages_that_a_method_does_not_take_are_bounded() -> None:
    """A thousand of them take as much from the pool as a large one, until they are taken."""
    session = Session(server(pool_bytes_max=800_000, points_max=5_000))
    session(headers(request(STREAMING), 1))
    small = frame(DATA, message(b"ab") * 1_000, stream=1)
    assert len(session(small)) == 1_000
    assert 60_000 < session.server.pool_bytes < 70_000
    for _ in range(1_000):
        session.connection.taken(1, 2)
    assert session.server.pool_bytes == 0
    events = [event for _ in range(5) for event in session(small)]
    assert events[-1] == (CLOSED, 1)
    assert len(events) < 4_000
    assert session.reply_to(1).status == "8"
    assert session.server.pool_bytes == 0


def test_a_client_that_always_leaves_a_byte_unread() -> None:
    """The memory of what it has read is used again."""
    session = Session()
    session(headers(request(STREAMING), 1) + frame(SETTINGS, b"\0\4\0\0\0\0"))
    before = resident_bytes()
    session.connection.send(1, b"a" * 30_000)
    for _ in range(2_000):
        window = session.connection.send(1, b"a" * 30_000) - 1
        opened = window.to_bytes(4)
        session(frame(WINDOW_UPDATE, opened, stream=1) + frame(WINDOW_UPDATE, opened))
        session.responses = Responses()
    assert session.connection.unsent(1) == 1
    assert resident_bytes() - before < 20_000_000  # of 60 MB that were sent


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def test_calls_that_are_answered_cost_nothing() -> None:
    """A busy client never runs out of points."""
    session = Session()
    for stream in range(1, 4_001, 2):
        session(call(b"", stream) + frame(WINDOW_UPDATE, b"\0\0\0\1") + frame(PING, b"12345678"))
        session.connection.reply(stream, b"")
    assert session.reply_to(3_999).status == "0"


def test_points_come_back_with_time() -> None:
    """A client that is a bit noisy can go on."""
    session = Session()
    for _ in range(100):
        session(frame(PING, b"12345678") * 20)
        session.ticks(1)


def test_a_header_block_that_repeats_a_large_field() -> None:
    """It is reset before its fields take long to read; the next call is fine."""
    session = Session()
    large = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4_000  # a literal that the table keeps
    block = frames.hpack.Encoder().encode(request()) + large + b"\xbe" * 5_000
    assert session(frame(HEADERS, block, flags=END_HEADERS, stream=1)) == []
    assert session.reply_to(1).reset == INTERNAL_ERROR
    assert session(call(b"", 3))[0][0] == CALL


def test_trailers_that_repeat_a_large_field() -> None:
    """They are reset as well, and the method is cancelled."""
    session = Session()
    block = frames.hpack.Encoder().encode(request(STREAMING))
    session(frame(HEADERS, block, flags=END_HEADERS, stream=1))
    large = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4_000
    ended = END_HEADERS | END_STREAM
    assert session(frame(HEADERS, large + b"\xbe" * 5_000, flags=ended, stream=1)) == []
    assert session.reply_to(1).reset is not None
    assert session(b"") == [(CLOSED, 1)]


def test_a_header_block_in_pieces() -> None:
    """A few CONTINUATION frames are fine."""
    session = Session()
    block = block_of(request())
    data = frame(HEADERS, block[:5], stream=1) + frame(CONTINUATION, block[5:9], stream=1)
    data += frame(CONTINUATION, block[9:], flags=END_HEADERS, stream=1)
    assert session(data + frame(DATA, message(b""), flags=END_STREAM, stream=1))[0][0] == CALL


# ── Time ───────────────────────────────────────────────────────────────────────────────────────


def test_a_streaming_call_may_be_quiet() -> None:
    """Between messages, not inside of one."""
    session = Session()
    session(headers(request(STREAMING), 1) + frame(DATA, message(b"a"), stream=1))
    for _ in range(100):
        session(frame(PING, b"12345678", flags=ACK))
        assert session.ticks(1) == []
    session(frame(DATA, message(b"ab")[:-1], stream=1))
    assert session.ticks(12) == [(CLOSED, 1)]
    assert session.reply_to(1).reset == CANCEL


def test_pings_are_answered() -> None:
    """With the same content."""
    session = Session()
    session(frame(PING, b"12345678"))
    assert [each.payload for each in session.read().kinds(PING)] == [b"12345678"]


# ── Shutdown ───────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_goes_away() -> None:
    """After its GOAWAY and its last call, the connection has ended."""
    session = Session()
    session(call() + frame(frames.GOAWAY, b"\0" * 8))
    assert not session.connection.finished
    session.connection.reply(1, b"")
    session.read()
    assert session.connection.finished


# ── Arguments ──────────────────────────────────────────────────────────────────────────────────


def test_arguments_are_checked() -> None:
    """A mistake in Python is an exception."""
    connection = Connection(server())
    wrong: Any = connection
    with pytest.raises(TypeError):
        wrong.receive("text")
    with pytest.raises(TypeError):
        wrong.reply(1, "text")
    with pytest.raises(TypeError):
        wrong.reply(1)
    with pytest.raises(TypeError):
        wrong.end(1, None, b"")
    with pytest.raises(TypeError):
        wrong.to_send(None)
    with pytest.raises(TypeError):
        wrong.taken("1", 1)
    with pytest.raises(TypeError):
        Connection(None)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(TypeError):
        _http2.find("text", "name")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(TypeError):
        Server([b"/a"])  # type: ignore[arg-type, call-arg]  # that is the test


def use_everything(of: Server) -> None:
    """Use all methods of a connection, with errors of every kind."""
    session = Session(of)
    connection: Any = session.connection
    session(call(b"abc", 1, [*request(grpc_timeout="1S"), ("authorization", "a")]))
    session(headers(request(STREAMING), 3) + frame(DATA, message(b"a" * 5_000), stream=3))
    connection.reply(1, b"b")
    connection.send(3, b"c" * 100)
    connection.taken(3, 5_000)
    connection.end(3, 5, b"d")
    session.ticks(1)
    assert (connection.streams, connection.finished, of.pool_bytes) == (0, False, 0)
    for wrong in (
        lambda: connection.receive(memoryview(b"abc")[::2]),
        lambda: connection.reply("1", b""),
        lambda: connection.end(1, 2**80, b""),
        lambda: connection.unsent(None),
        lambda: Server((b"a", 1)),  # type: ignore[arg-type, call-arg]  # that is the test
    ):
        with pytest.raises((TypeError, OverflowError, BufferError)):
            wrong()
    session(call(b"", 5) + headers(request(STREAMING), 7))
    with pytest.raises(Http2Error, match="header block"):
        session(headers(request(), 9, flags=0) + frame(CONTINUATION, stream=9) * 20)
    with pytest.raises(Http2Error, match="header block"):
        connection.receive(b"")
    assert (of.refused[0], of.resets["violation"]) == (0, 0)


def test_nothing_leaks() -> None:
    """Neither objects nor references to the server, whatever happens to a connection."""
    of = server()
    for _ in range(20):
        use_everything(of)
    gc.collect()
    blocks, references = sys.getallocatedblocks(), sys.getrefcount(of)
    for _ in range(200):
        use_everything(of)
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 200
    assert sys.getrefcount(of) == references
    assert of.pool_bytes == 0


def test_events_without_memory() -> None:
    """If Python has no memory for the events, receive raises MemoryError, and leaks nothing."""
    testcapi = pytest.importorskip("_testcapi", reason="this Python was built without it")
    data = call(b"a" * 600) + headers(request(STREAMING), 3) + frame(DATA, message(b"b"), stream=3)
    failed = 0
    for at in range(40):
        session = Session()
        receive = session.connection.receive
        testcapi.set_nomemory(at, at + 1)
        try:
            receive(data)
        except MemoryError:
            failed += 1
        finally:
            testcapi.remove_mem_hooks()
        session.connection.tick()
    assert failed > 3
