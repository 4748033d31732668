"""A client of HTTP/2 that writes its frames by hand, so that it can also write wrong ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8

Fields = list[tuple[str, str]]


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Return the bytes of a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(content: bytes, *, flag: int = 0) -> bytes:
    """Return a gRPC message: a flag, the length, the content."""
    return struct.pack(">BI", flag, len(content)) + content


def request(path: str = "/test.Test/echo", **changed: str) -> Fields:
    """Return the fields of a request; `content_type=""` leaves a field out."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    for name, value in changed.items():
        fields[(":" if name in {"method", "scheme"} else "") + name.replace("_", "-")] = value
    return [(name, value) for name, value in fields.items() if value]


def headers(fields: Fields, stream: int, *, flags: int = END_HEADERS) -> bytes:
    """Return a HEADERS frame whose fields do not depend on earlier ones."""
    return frame(HEADERS, block_of(fields), flags=flags, stream=stream)


def block_of(fields: Fields) -> bytes:
    """Return a header block that leaves the server's table as it is."""
    return _encoded(tuple(fields))


@lru_cache  # the same fields are sent thousands of times
def _encoded(fields: tuple[tuple[str, str], ...]) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    block: bytes = encoder.encode(fields)
    return block


def call(content: bytes = b"", stream: int = 1, fields: Fields | None = None) -> bytes:
    """Return the frames of a unary call."""
    return headers(request() if fields is None else fields, stream) + frame(
        DATA, message(content), flags=END_STREAM, stream=stream
    )


OPENING = PREFACE + frame(SETTINGS)


@dataclass
class Response:
    """What arrived on one stream."""

    fields: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False
    reset: int | None = None

    @property
    def status(self) -> str | None:
        """The gRPC status, from the trailers or the only headers."""
        return {**self.fields, **self.trailers}.get("grpc-status")


class Frame(NamedTuple):
    """A frame of the server."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Responses:
    """Reads the frames of a server."""

    def __init__(self) -> None:
        """Start with a new connection."""
        self._decoder = hpack.Decoder()
        self._rest = b""
        self.streams: dict[int, Response] = {}
        self.frames: list[Frame] = []

    def read(self, data: bytes) -> Responses:
        """Read bytes of the server."""
        self._rest += data
        while len(self._rest) >= 9:
            length = int.from_bytes(self._rest[:3])
            if len(self._rest) < 9 + length:
                break
            kind, flags, stream = struct.unpack(">BBI", self._rest[3:9])
            self._note(Frame(kind, flags, stream, self._rest[9 : 9 + length]))
            self._rest = self._rest[9 + length :]
        return self

    def _note(self, found: Frame) -> None:
        self.frames.append(found)
        stream = self.streams.setdefault(found.stream, Response())
        if found.kind == HEADERS:
            fields = dict(self._decoder.decode(found.payload))
            (stream.trailers if stream.fields else stream.fields).update(fields)
        elif found.kind == DATA:
            stream.data += found.payload
        elif found.kind == RST_STREAM:
            stream.reset = int.from_bytes(found.payload)
        if found.kind in {HEADERS, DATA} and found.flags & END_STREAM:
            stream.is_complete = True

    def kinds(self, kind: int) -> list[Frame]:
        """Return the frames of one kind."""
        return [each for each in self.frames if each.kind == kind]

    @property
    def goaway(self) -> tuple[int, int] | None:
        """The last stream and the error of the last GOAWAY; None if there was none."""
        found = self.kinds(GOAWAY)
        return struct.unpack(">II", found[-1].payload[:8]) if found else None  # type: ignore[return-value]  # two numbers
