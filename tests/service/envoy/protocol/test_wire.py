"""What is written by hand is what protobuf reads."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.service.envoy.protocol import wire
from ratekeeper.service.envoy.protocol.messages import RateLimitResponse

NUMBERS = st.integers(0, wire.UINT32_MAX)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
HEADERS = st.lists(
    st.tuples(st.sampled_from([b"ratelimit", b"x-a", b"n" * 130]), st.binary(max_size=400)),
    max_size=4,
)
LIMITS = st.tuples(NUMBERS, st.integers(0, 7), TEXTS, st.integers(1, wire.UINT32_MAX))
STATUSES = st.tuples(
    st.sampled_from([1, 2]),
    st.none() | LIMITS,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 999_999_999),
)


@given(st.integers(0, 2**63))
def test_a_number_is_read_again(value: int) -> None:
    """The numbers of a duration have up to 63 bits."""
    shift = found = 0
    for byte in wire.varint(value):
        found |= (byte & 0x7F) << shift
        shift += 7
    assert found == value


@given(code=st.sampled_from([1, 2]), statuses=st.lists(STATUSES, max_size=3), headers=HEADERS,
       raw_body=st.binary(max_size=300))  # fmt: skip
def test_a_reply_is_read_again(
    code: int, statuses: list[Any], headers: list[tuple[bytes, bytes]], raw_body: bytes
) -> None:
    """Every field has its value, and nothing else is there."""
    headers = [(name, value.hex().encode()) for name, value in headers]
    written = wire.rate_limit_response(
        code,
        [
            wire.descriptor_status(code, limit and wire.rate_limit(*limit), *rest)
            for code, limit, *rest in statuses
        ],
        headers,
        raw_body,
    )
    expected = RateLimitResponse(overall_code=code, raw_body=raw_body)
    for each, limit, remaining, seconds, nanos in statuses:
        status = expected.statuses.add(code=each)
        if limit is not None:
            requests, unit, name, times = limit
            status.current_limit.requests_per_unit = requests
            status.current_limit.unit = unit
            status.current_limit.name = name
            if times > 1:
                status.current_limit.unit_multiplier.value = times
            status.limit_remaining = min(remaining, wire.UINT32_MAX)
            status.duration_until_reset.seconds = seconds
            status.duration_until_reset.nanos = nanos
            status.current_limit.SetInParent()
            status.duration_until_reset.SetInParent()
    for name, value in headers:
        expected.response_headers_to_add.add(key=name.decode(), value=value.decode())
    found = RateLimitResponse.FromString(written)
    assert found == expected
