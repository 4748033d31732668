"""What an answer asks of its client, read from headers of every kind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.web.advice import WAIT_NS_MAX, Advice, advice_of

SECOND = 1_000_000_000
# 2026-01-01T00:00:00Z
NOW_S = 1_767_225_600
NOW_NS = NOW_S * SECOND
MOMENT = "Thu, 01 Jan 2026 00:00:07 GMT"


def seconds_of(advice: Advice) -> tuple[float | None, ...]:
    return tuple(None if each is None else each / SECOND for each in advice)


@pytest.mark.parametrize(
    ("headers", "wait_s", "spent_s"),
    [
        ({}, None, None),
        # Retry-After, in each of its forms
        ({"retry-after": "5"}, 5, None),
        ({"retry-after": "0"}, 0, None),
        ({"retry-after": " 5 "}, 5, None),
        ({"retry-after": "1.25"}, 1.25, None),
        ({"retry-after": "1."}, 1, None),
        ({"retry-after": "5, 9"}, 9, None),
        ({"retry-after": MOMENT}, 7, None),
        ({"retry-after": "Thursday, 01-Jan-26 00:00:07 GMT"}, 7, None),
        ({"retry-after": "Thu Jan  1 00:00:07 2026"}, 7, None),
        ({"retry-after": "Wed, 31 Dec 2025 23:59:00 GMT"}, 0, None),
        # the server's own date is what its other dates are meant by
        ({"retry-after": MOMENT, "date": "Thu, 01 Jan 2026 00:00:03 GMT"}, 4, None),
        ({"retry-after": MOMENT, "date": "garbled"}, 7, None),
        # what is not a time says nothing
        ({"retry-after": "soon"}, None, None),
        ({"retry-after": "-5"}, None, None),
        ({"retry-after": "٥"}, None, None),
        ({"retry-after": ""}, None, None),
        ({"retry-after": "1" * 5_000}, WAIT_NS_MAX / SECOND, None),
        # draft 10
        ({"ratelimit": '"orders";r=73;t=36'}, 36, 0),
        ({"ratelimit": '"orders";r=0;t=5'}, 5, 5),
        ({"ratelimit": '"a";r=0;t=5, "b";r=0;t=9, "c";r=7;t=60'}, 9, 9),
        ({"ratelimit": '"a, b\\"; r=0;t=99";r=3;t=4'}, 4, 0),
        ({"ratelimit": '"orders";r=0'}, None, None),
        ({"ratelimit": '"orders";r=0;pk=:cGs=:;t=5'}, 5, 5),
        # draft 7
        ({"ratelimit": "limit=100, remaining=0, reset=5"}, 5, 5),
        ({"ratelimit": "limit=100, remaining=4, reset=5"}, 5, 0),
        # draft 6
        ({"ratelimit-remaining": "0", "ratelimit-reset": "5"}, 5, 5),
        # the oldest: a moment, or seconds
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW_S + 8)}, 8, 8),
        ({"x-ratelimit-remaining": "3", "x-ratelimit-reset": str(NOW_S + 8)}, 8, 0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "8"}, 8, 8),
        ({"x-ratelimit-reset": str(NOW_S - 8)}, 0, None),
        ({"x-ratelimit-remaining": "-1"}, None, None),
        # the standard one goes before the draft, and the draft before the oldest
        ({"retry-after": "2", "ratelimit": '"a";r=0;t=5'}, 2, 5),
        ({"ratelimit": '"a";r=0;t=5', "x-ratelimit-reset": str(NOW_S + 60)}, 5, 5),
        ({"ratelimit": "garbled", "x-ratelimit-reset": str(NOW_S + 60)}, 60, None),
    ],
)
def test_what_headers_ask_for(
    headers: dict[str, str], wait_s: float | None, spent_s: float | None
) -> None:
    """Each header that servers send, and which goes before which."""
    assert seconds_of(advice_of(headers, NOW_NS)) == (wait_s, spent_s)


def test_fractions_round_up() -> None:
    """A wait of a little more than a nanosecond is two: never below what was asked."""
    assert advice_of({"retry-after": "0.0000000011"}, NOW_NS).wait_ns == 2
    assert advice_of({"retry-after": "0.0000000010"}, NOW_NS).wait_ns == 1


NAMES = ["retry-after", "date", "ratelimit", "ratelimit-remaining", "ratelimit-reset"]
NAMES += ["x-ratelimit-remaining", "x-ratelimit-reset"]
# Pieces that headers are made of, so that random texts come close to real ones.
PIECES = ["0", "5", "1767225700", "r=", "t=", ";", ",", '"', "\\", " ", "=", "remaining", "reset"]
PIECES += [
    "GMT",
    "Thu",
    "Jan",
    "2026",
    ":",
    "-",
    "+9999",
    "e9",
    "\x00",
    "é",
    "99999999999999999999",
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES)).map("".join))


@given(st.dictionaries(st.sampled_from(NAMES), TEXTS), st.integers(0, 2**63))
def test_any_headers_are_read(headers: dict[str, str], now_ns: int) -> None:
    """Whatever a server sends: no error, and lengths of time that can be waited for."""
    advice = advice_of(headers, now_ns)
    for found_ns in advice:
        assert found_ns is None or 0 <= found_ns <= WAIT_NS_MAX + SECOND


@given(
    st.decimals(0, 10**9, allow_nan=False, allow_infinity=False, places=12),
    st.dictionaries(st.sampled_from(NAMES[2:]), TEXTS),
)
def test_never_less_than_was_asked(seconds: object, others: dict[str, str]) -> None:
    """Any number in Retry-After, whatever else is said: that long, and less than 1 ns more."""
    text = format(seconds, "f")
    wait_ns = advice_of({**others, "retry-after": text}, NOW_NS).wait_ns
    assert wait_ns is not None
    asked_picos = int(text.replace(".", ""))
    assert asked_picos <= wait_ns * 1_000 < asked_picos + 1_000


@given(st.integers(0, 10**9), st.integers(-(10**6), 10**6))
def test_never_before_a_date_that_was_asked(after_s: int, skew_s: int) -> None:
    """A date is that far away by the server's clock, whatever ours says."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    headers = {
        "date": format_datetime(start, usegmt=True),
        "retry-after": format_datetime(start + timedelta(seconds=after_s), usegmt=True),
    }
    assert advice_of(headers, NOW_NS + skew_s * SECOND).wait_ns == after_s * SECOND
