"""The reply of ShouldRateLimit in protobuf's wire format, written without message objects.

The service sends thousands of replies a second, and filling a RateLimitResponse takes longer than
the decision. Field numbers are those of `service.proto`; tests parse the output of this module with
the classes that are generated from that file.

Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# The largest number that one byte of a varint holds.
_BYTE_MAX: Final = 0x7F
UINT32_MAX: Final = 0xFFFF_FFFF

# For each name of a header: the start of its HeaderValue, up to the tag of the value.
_starts: dict[bytes, bytes] = {}
_STARTS_MAX: Final = 256


def varint(value: int) -> bytes:
    """Return a number that is not negative, seven bits in a byte, the lowest first.

    >>> varint(1), varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    if value <= _BYTE_MAX:
        return b"%c" % value
    found = bytearray()
    while value > _BYTE_MAX:
        found.append(value & _BYTE_MAX | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number_field(field: int, value: int) -> bytes:
    """Return a field with a number; nothing for 0, which is the default."""
    return b"%c%b" % (field << 3, varint(value)) if value else b""


def bytes_field(field: int, value: bytes) -> bytes:
    """Return a field with bytes, a text or a message, also an empty one."""
    return b"%c%b%b" % (field << 3 | 2, varint(len(value)), value)


def header_field(field: int, name: bytes, value: bytes) -> bytes:
    """Return a field with a HeaderValue."""
    start = _starts.get(name)
    if start is None:
        if len(_starts) >= _STARTS_MAX:
            _starts.clear()
        start = _starts[name] = bytes_field(1, name) + b"\x12"
    length = len(start) + 1 + len(value)
    if length <= _BYTE_MAX:  # then the length of the value has one byte, too
        return b"%c%c%b%c%b" % (field << 3 | 2, length, start, len(value), value)
    return bytes_field(field, start + varint(len(value)) + value)


def rate_limit(requests: int, unit: int, name: str, times: int) -> bytes:
    """Return a RateLimit: `requests` per `times` units."""
    several = bytes_field(4, number_field(1, times)) if times > 1 else b""
    named = bytes_field(3, name.encode()) if name else b""
    return number_field(1, requests) + number_field(2, unit) + named + several


def descriptor_status(
    code: int, limit: bytes | None = None, remaining: int = 0, seconds: int = 0, nanos: int = 0
) -> bytes:
    """Return a DescriptorStatus; `limit` is a RateLimit, and None leaves out all numbers."""
    if limit is None:
        return number_field(1, code)
    duration = number_field(1, seconds) + number_field(2, nanos)
    return b"%b%b%b%b" % (
        number_field(1, code),
        bytes_field(2, limit),
        number_field(3, min(remaining, UINT32_MAX)),
        bytes_field(4, duration),
    )


def rate_limit_response(
    code: int,
    statuses: Iterable[bytes],
    headers: Iterable[tuple[bytes, bytes]],
    raw_body: bytes = b"",
) -> bytes:
    """Return a RateLimitResponse; `statuses` are of `descriptor_status`."""
    parts = [number_field(1, code)]
    parts += [bytes_field(2, each) for each in statuses]
    parts += [header_field(3, name, value) for name, value in headers]
    if raw_body:
        parts.append(bytes_field(5, raw_body))
    return b"".join(parts)
