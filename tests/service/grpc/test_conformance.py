"""The server on libnghttp2 answers each violation of RFC 9113 as the RFC demands it.

A violation is an error of its stream, or of the whole connection. In the cases where the RFC leaves
the choice to the server, the table has what libnghttp2 does.
"""

from __future__ import annotations

import struct

import pytest

from ratekeeper.service.grpc._http2 import CALL, Connection
from tests.service.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    OPENING,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Fields,
    Responses,
    block_of,
    call,
    frame,
    headers,
    message,
    request,
)
from tests.service.grpc.test__http2 import STREAMING, Session, server

PUSH_PROMISE = 5
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR = 7, 9

BLOCK = block_of(request())
OPEN = headers(request(STREAMING), 1)
ENDED = call(b"", 1)  # half-closed by the client: the method has not replied
RESET = OPEN + frame(RST_STREAM, b"\0\0\0\x08", stream=1)
UNFINISHED = headers(request(), 1, flags=0)


def setting(number: int, value: int) -> bytes:
    """Return a SETTINGS frame with one setting."""
    return frame(SETTINGS, struct.pack(">HI", number, value))


def window(by: int, stream: int = 0) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, struct.pack(">I", by), stream=stream)


IGNORED = {
    "4.1 a frame of an unknown type": frame(0x16, b"12345678"),
    "4.1 unknown flags": frame(PING, b"12345678", flags=0x16),
    "4.1 the reserved bit": frame(PING, b"12345678", stream=0x8000_0000),
    "5.1 PRIORITY on an idle stream": frame(PRIORITY, b"\0\0\0\0\x10", stream=7),
    "5.1 WINDOW_UPDATE on a closed stream": RESET + window(1, 1),
    "5.1 RST_STREAM on a closed stream": RESET + frame(RST_STREAM, b"\0\0\0\x08", stream=1),
    "5.1.1 a stream below the last: it counts as closed": call(b"", 5) + headers(request(), 3),
    "6.3 PRIORITY on stream 0: priorities are off": frame(PRIORITY, b"\0\0\0\0\x10"),
    "6.5.2 an unknown setting": setting(0xFF, 1),
    "6.5.2 a setting twice": frame(SETTINGS, struct.pack(">HIHI", 4, 1, 4, 65_535)),
    "6.7 PING with ACK": frame(PING, b"12345678", flags=ACK),
    "6.9.1 a window of the most bytes": window(2**31 - 1 - 65_535),
    "8.1 trailers": OPEN + headers([("a", "b")], 1, flags=END_HEADERS | END_STREAM),
}


@pytest.mark.parametrize("sent", IGNORED.values(), ids=IGNORED.keys())
def test_no_error(sent: bytes) -> None:
    """The connection goes on."""
    session = Session()
    session(sent)
    assert session(call(b"", 11))[-1][0] == CALL
    assert session.read().goaway is None


CONNECTION_ERRORS = {
    "3.4 no SETTINGS after the preface": (PREFACE + call(), PROTOCOL_ERROR),
    "4.2 a large DATA frame": (OPEN + frame(DATA, b"a" * 16_385, stream=1), FRAME_SIZE_ERROR),
    "4.2 a large SETTINGS frame": (frame(SETTINGS, b"\0" * 16_386), FRAME_SIZE_ERROR),
    "4.3 a block that is not HPACK": (
        frame(HEADERS, b"\xff" * 8, flags=END_HEADERS, stream=1),
        COMPRESSION_ERROR,
    ),
    "4.3 an index that the table does not have": (
        frame(HEADERS, b"\xff\x60", flags=END_HEADERS, stream=1),
        COMPRESSION_ERROR,
    ),
    "4.3 a larger table than was offered": (
        frame(HEADERS, b"\x3f\xe1\xff\x03" + BLOCK, flags=END_HEADERS, stream=1),
        COMPRESSION_ERROR,
    ),
    "4.3 PRIORITY inside a block": (
        UNFINISHED + frame(PRIORITY, b"\0\0\0\0\x10", stream=1),
        PROTOCOL_ERROR,
    ),
    "4.3 HEADERS inside a block": (UNFINISHED + headers(request(), 3), PROTOCOL_ERROR),
    "5.1 DATA on an idle stream": (frame(DATA, stream=1), PROTOCOL_ERROR),
    "5.1 RST_STREAM on an idle stream": (
        frame(RST_STREAM, b"\0\0\0\x08", stream=1),
        PROTOCOL_ERROR,
    ),
    "5.1 WINDOW_UPDATE on an idle stream": (window(1, 1), PROTOCOL_ERROR),
    "5.1 CONTINUATION on an idle stream": (
        frame(CONTINUATION, flags=END_HEADERS, stream=1),
        PROTOCOL_ERROR,
    ),
    "5.1 DATA after the end": (ENDED + frame(DATA, stream=1), STREAM_CLOSED),
    "5.1 HEADERS after the end": (ENDED + headers(request(), 1), STREAM_CLOSED),
    "5.1.1 an even stream": (headers(request(), 2), PROTOCOL_ERROR),
    "5.5 an unknown frame inside a block": (UNFINISHED + frame(0x16), PROTOCOL_ERROR),
    "6.1 DATA on stream 0": (frame(DATA, b"a"), PROTOCOL_ERROR),
    "6.1 more padding than payload": (
        OPEN + frame(DATA, b"\x09abc", flags=PADDED, stream=1),
        PROTOCOL_ERROR,
    ),
    "6.2 HEADERS on stream 0": (headers(request(), 0), PROTOCOL_ERROR),
    "6.2 HEADERS with more padding than payload": (
        frame(HEADERS, b"\xff" + BLOCK, flags=END_HEADERS | PADDED, stream=1),
        PROTOCOL_ERROR,
    ),
    "6.3 PRIORITY of 4 bytes": (frame(PRIORITY, b"\0" * 4, stream=1), FRAME_SIZE_ERROR),
    "6.4 RST_STREAM on stream 0": (frame(RST_STREAM, b"\0\0\0\x08"), PROTOCOL_ERROR),
    "6.4 RST_STREAM of 3 bytes": (OPEN + frame(RST_STREAM, b"abc", stream=1), FRAME_SIZE_ERROR),
    "6.5 SETTINGS with ACK and content": (
        frame(SETTINGS, b"\0" * 6, flags=ACK),
        FRAME_SIZE_ERROR,
    ),
    "6.5 SETTINGS on a stream": (frame(SETTINGS, stream=1), PROTOCOL_ERROR),
    "6.5 SETTINGS of 3 bytes": (frame(SETTINGS, b"abc"), FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH of 2": (setting(2, 2), PROTOCOL_ERROR),
    "6.5.2 a window of 2^31": (setting(4, 2**31), FLOW_CONTROL_ERROR),
    "6.5.2 frames of at most 16383 bytes": (setting(5, 16_383), PROTOCOL_ERROR),
    "6.5.2 frames of at most 2^24 bytes": (setting(5, 2**24), PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE of a client": (
        OPEN + frame(PUSH_PROMISE, b"\0\0\0\2" + BLOCK, flags=END_HEADERS, stream=1),
        PROTOCOL_ERROR,
    ),
    "6.7 PING on a stream": (frame(PING, b"12345678", stream=1), PROTOCOL_ERROR),
    "6.7 PING of 7 bytes": (frame(PING, b"1234567"), FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": (frame(GOAWAY, b"\0" * 8, stream=1), PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of 0": (window(0), PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of 0 on a stream": (OPEN + window(0, 1), PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of 3 bytes": (frame(WINDOW_UPDATE, b"abc"), FRAME_SIZE_ERROR),
    "6.9.1 a window that overflows": (window(2**31 - 1), FLOW_CONTROL_ERROR),
    "6.10 CONTINUATION after the end of a block": (
        OPEN + frame(CONTINUATION, b"", flags=END_HEADERS, stream=1),
        PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION of another stream": (
        UNFINISHED + frame(CONTINUATION, b"", flags=END_HEADERS, stream=3),
        PROTOCOL_ERROR,
    ),
    "6.10 DATA inside a block": (UNFINISHED + frame(DATA, stream=1), PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("sent", "code"), CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS.keys())
def test_an_error_of_the_connection(sent: bytes, code: int) -> None:
    """The client gets GOAWAY with the code, the connection ends, and it is counted."""
    connection, responses = Connection(of := server()), Responses()
    connection.receive(sent if sent.startswith(PREFACE) else OPENING + sent)
    while data := connection.to_send(65_536):
        responses.read(data)
    assert responses.goaway is not None
    assert responses.goaway[1] == code
    assert connection.finished
    assert of.resets["violation"] == 1


def with_field(name: str, value: str, **changed: str) -> Fields:
    """Return a request with one more field."""
    return [*request(**changed), (name, value)]


STREAM_ERRORS = {
    "6.9.1 a window that overflows": (OPEN + window(2**31 - 1, 1), FLOW_CONTROL_ERROR),
    "6.9.2 a setting that makes a window overflow": (
        OPEN + window(2**31 - 65_536, 1) + setting(4, 2**31 - 1),
        FLOW_CONTROL_ERROR,
    ),
    "8.1 HEADERS twice, without the end": (OPEN + headers([("a", "b")], 1), PROTOCOL_ERROR),
    "8.1 a pseudo-field in trailers": (
        OPEN + headers([(":path", "/a")], 1, flags=END_HEADERS | END_STREAM),
        PROTOCOL_ERROR,
    ),
    **{
        f"8.2 {name}": (headers(fields, 1), PROTOCOL_ERROR)
        for name, fields in {
            "a name in upper case": with_field("Upper", "a"),
            "an empty name": with_field("", "a"),
            "a name with a space": with_field("a b", "a"),
            "a new line in a value": with_field("a", "b\nc"),
            "a carriage return in a value": with_field("a", "b\rc"),
            "NUL in a value": with_field("a", "b\0c"),
            "connection": with_field("connection", "close"),
            "transfer-encoding": with_field("transfer-encoding", "chunked"),
            "te that is not trailers": request(te="gzip"),
            "an unknown pseudo-field": [(":unknown", "a"), *request()],
            "a pseudo-field of a response": [(":status", "200"), *request()],
            "a pseudo-field after others": with_field(":authority", "a"),
            "no :method": request(method=""),
            "no :scheme": request(scheme=""),
            "no :path": request(""),
            "an empty :path": [(":path", ""), *request("")],
            "two of :path": [(":path", "/a"), *request()],
            "two of :method": [(":method", "GET"), *request()],
            "a content-length that is no number": with_field("content-length", "many"),
        }.items()
    },
    "8.1.1 more than content-length": (
        headers(with_field("content-length", "1"), 1)
        + frame(DATA, message(b"abc"), flags=END_STREAM, stream=1),
        PROTOCOL_ERROR,
    ),
    "8.1.1 less than content-length": (
        headers(with_field("content-length", "100"), 1)
        + frame(DATA, message(b"abc"), flags=END_STREAM, stream=1),
        PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize(("sent", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS.keys())
def test_an_error_of_a_stream(sent: bytes, code: int) -> None:
    """The client gets RST_STREAM with the code; no method runs, and other calls are served."""
    session = Session()
    assert CALL not in [event[0] for event in session(sent)]
    assert session.reply_to(1).reset == code
    assert session.connection.streams == 0
    assert session.server.resets["malformed"] == 1
    assert session(call(b"", 11))[-1][0] == CALL
    assert session.read().goaway is None


def test_more_streams_than_offered() -> None:
    """5.1.2: the client may repeat those."""
    session = Session(server(streams_max=1))
    session(OPEN + headers(request(), 3))
    assert session.reply_to(3).reset == REFUSED_STREAM
    assert session.server.resets["streams"] == 1


def test_data_beyond_the_window() -> None:
    """6.9: a client that ignores flow control loses the stream."""
    session = Session()
    session(OPEN)
    for _ in range(10):  # the method takes nothing, so that the window stays closed
        session(frame(DATA, message(b"a" * 16_000), stream=1))
    assert session.reply_to(1).reset == FLOW_CONTROL_ERROR


def test_padding_counts_for_the_windows_and_is_given_back() -> None:
    """6.9.1: a client that pads its messages can go on for ever."""
    session = Session(server(points_max=5_000))
    session(OPEN)
    padded = b"\xff" + message(b"a" * 2_000) + b"\0" * 255
    for _ in range(100):
        session(frame(DATA, padded, flags=PADDED, stream=1))
        session.connection.taken(1, 2_000)
    assert session.connection.streams == 1
    given = {
        stream: sum(
            int.from_bytes(each.payload)
            for each in session.read().kinds(WINDOW_UPDATE)
            if each.stream == stream
        )
        for stream in (0, 1)
    }
    assert all(each > 100 * len(padded) - 65_535 for each in given.values())


def test_a_window_that_becomes_negative() -> None:
    """6.9.2: a smaller initial window holds replies back until it is open again."""
    session = Session()
    session(OPEN)
    session.connection.send(1, b"a" * 65_530)
    session.read()
    session(setting(4, 0))
    session.connection.send(1, b"b" * 100)
    session(window(65_535, 1) + window(65_535))
    assert len(session.reply_to(1).data) == 65_535
    session(window(50, 1))
    assert len(session.reply_to(1).data) == 65_585
