"""Fixed window, row by row."""

from __future__ import annotations

import pytest

from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import fixed_window
from tests.decide.algorithms.table import never, no, play, yes

FIVE = Limit(5, per=60, algorithm="fixed_window")
NS = 0.000_000_001


def test_one_window_and_its_edge() -> None:
    """Five fit in a minute. The sixth waits for the edge, which belongs to the new minute."""
    play(
        FIVE,
        [
            never(0, 6),
            yes(0, 1, left=4, reset=60),
            yes(30, 3, left=1, reset=30),
            no(30, 2, left=1, reset=30, retry=30),
            yes(30, 1, left=0, reset=30),
            no(60 - NS, 1, left=0, reset=NS, retry=NS),
            yes(60, 1, left=4, reset=60),
        ],
    )


def test_up_to_twice_the_limit_around_an_edge() -> None:
    """The documented price of the cheapest algorithm: ten within two seconds, never eleven."""
    play(
        FIVE,
        [
            yes(59, 5, left=0, reset=1),
            no(59, 1, left=0, reset=1, retry=1),
            yes(60, 5, left=0, reset=60),
            no(60, 1, left=0, reset=60, retry=60),
        ],
    )


def test_windows_are_aligned_to_the_epoch() -> None:
    """A window is a minute of the clock, not a minute from the first request."""
    play(FIVE, [yes(119, 5, left=0, reset=1), yes(120, 5, left=0, reset=60)])


def test_cost_zero_reads() -> None:
    """A cost of 0 reports the count of the window, and an empty new window."""
    play(
        FIVE,
        [
            yes(0, 0, left=5, reset=0),
            yes(10, 5, left=0, reset=50),
            yes(20, 0, left=0, reset=40),
            yes(60, 0, left=5, reset=0),
        ],
    )


def test_a_clock_that_goes_back_reopens_no_window() -> None:
    """After five in the second minute, a clock in the first minute still gets the count of the
    second."""
    play(
        FIVE,
        [
            yes(61, 4, left=1, reset=59),
            yes(59, 1, left=0, reset=61),
            no(59, 1, left=0, reset=61, retry=61),
            no(119, 1, left=0, reset=1, retry=1),
            yes(120, 1, left=4, reset=60),
        ],
    )


def test_a_raised_limit_adds_the_difference_at_once() -> None:
    """5 → 7 admits two more in the same minute."""
    state = play(FIVE, [yes(0, 5, left=0, reset=60)])
    seven = Limit(7, per=60, algorithm="fixed_window")
    play(seven, [yes(0, 2, left=0, reset=60), no(0, 1, left=0, reset=60, retry=60)], state)


def test_a_lowered_limit_applies_at_once() -> None:
    """5 → 2 with five counted admits nothing more this minute and two in the next."""
    state = play(FIVE, [yes(0, 5, left=0, reset=60)])
    two = Limit(2, per=60, algorithm="fixed_window")
    play(
        two,
        [
            never(0, 3),
            yes(0, 0, left=0, reset=60),
            no(0, 1, left=0, reset=60, retry=60),
            yes(60, 2, left=0, reset=60),
        ],
        state,
    )


def test_a_billion_a_year_is_exact_to_the_unit() -> None:
    """At 1e9 in 366 days, the last unit passes and the next wait is exact to the nanosecond."""
    year = 366 * 86_400
    play(
        Limit(10**9, per=year, algorithm="fixed_window"),
        [
            yes(0, 999_999_999, left=1, reset=year),
            yes(1, 1, left=0, reset=year - 1),
            no(1, 1, left=0, reset=year - 1, retry=year - 1),
            yes(year, 10**9, left=0, reset=year),
        ],
    )


@pytest.mark.parametrize(
    ("now", "units", "left"),
    [
        (0, 0, 1),
        (0, 1, 2),
        (0, 4, 5),
        (0, 99, 5),  # never beyond an untouched quota
        (60, 1, 5),  # the minute is over, and its count no longer applies
        (-60, 1, 2),  # also on a clock that went back
    ],
)
def test_refund(now: int, units: int, left: int) -> None:
    """Of 4 counted in the first minute, a refund leaves this many free."""
    state, _ = fixed_window.decide(None, FIVE, 0, 4)
    state = fixed_window.refund(state, FIVE, now * 1_000_000_000, units, None)
    _, outcome = fixed_window.decide(state, FIVE, max(now, 0) * 1_000_000_000, 0)
    assert outcome.remaining == left


@pytest.mark.parametrize(
    ("charged", "left"),
    [
        (0, 2),  # the window that was charged
        (59, 2),
        (-1, 1),  # the window before: its units no longer count
        (60, 1),  # a window that has not begun
    ],
)
def test_refund_of_another_window_returns_nothing(charged: int, left: int) -> None:
    """Of 4 counted in the first minute, a refund of a charge made at this second leaves this many
    free."""
    state, _ = fixed_window.decide(None, FIVE, 0, 4)
    state = fixed_window.refund(state, FIVE, 59_000_000_000, 1, charged * 1_000_000_000)
    _, outcome = fixed_window.decide(state, FIVE, 59_000_000_000, 0)
    assert outcome.remaining == left
