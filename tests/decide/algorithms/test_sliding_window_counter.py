"""Sliding window counter, row by row."""

from __future__ import annotations

import pytest

from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import sliding_window_counter
from tests.decide.algorithms.table import Row, never, no, play, yes

HUNDRED = Limit(100, per=60, algorithm="sliding_window_counter")
TEN = Limit(10, per=60, algorithm="sliding_window_counter")
NS = 0.000_000_001

# 42 in the window that begins at 0 s, 18 in the one that begins at 60 s.
WORKED: list[Row] = [
    yes(0, 42, left=58, reset=120),
    yes(60, 18, left=40, reset=120),
]


def test_the_worked_example() -> None:
    """42 × 0.75 + 18 = 49.5 are counted 15 s into the minute, so 50 of 100 remain."""
    play(HUNDRED, [*WORKED, never(75, 101), yes(75, 0, left=50, reset=105)])


def test_half_a_unit_is_not_enough() -> None:
    """With 50.5 free, 50 pass. The 51st waits until the previous window has faded to 31."""
    play(
        HUNDRED,
        [
            *WORKED,
            # 42 × (60 − e) / 60 <= 100 − 18 − 51 at e = 15.714285715 s, rounded up.
            no(75, 51, left=50, reset=105, retry=0.714_285_715),
            no(75.714_285_714, 51, left=50, reset=104.285_714_286, retry=NS),
            yes(75.714_285_715, 51, left=0, reset=104.285_714_285),
        ],
    )


def test_retry_exactly_at_the_edge() -> None:
    """A cost that needs the previous window to be zero fits when the next window begins."""
    play(
        HUNDRED,
        [
            *WORKED,
            no(75, 82, left=50, reset=105, retry=45),
            no(120 - NS, 82, left=81, reset=60 + NS, retry=NS),
            yes(120, 82, left=0, reset=120),
        ],
    )


def test_retry_across_the_edge() -> None:
    """A cost without room in this window fits in the next, when the 18 of this one have faded
    enough."""
    play(
        HUNDRED,
        [
            *WORKED,
            # 18 × (60 − e) / 60 <= 10 at e = 26.666666667 s of the window that begins at 120 s.
            no(75, 90, left=50, reset=105, retry=71.666_666_667),
            no(146.666_666_666, 90, left=89, reset=33.333_333_334, retry=NS),
            yes(146.666_666_667, 90, left=0, reset=93.333_333_333),
        ],
    )


def test_the_whole_limit_needs_two_quiet_windows() -> None:
    """A cost of the whole limit passes when the count is zero."""
    play(
        HUNDRED,
        [
            *WORKED,
            no(75, 100, left=50, reset=105, retry=105),
            no(180 - NS, 100, left=99, reset=NS, retry=NS),
            yes(180, 100, left=0, reset=120),
        ],
    )


def test_a_full_window_fades_one_unit_at_a_time() -> None:
    """After 10 of 10, the next window admits one every 6 s."""
    play(
        TEN,
        [
            yes(30, 10, left=0, reset=90),
            no(30, 1, left=0, reset=90, retry=36),
            no(60, 1, left=0, reset=60, retry=6),
            no(66 - NS, 1, left=0, reset=54 + NS, retry=NS),
            yes(66, 1, left=0, reset=114),
            no(66, 1, left=0, reset=114, retry=6),
            yes(72, 1, left=0, reset=108),
        ],
    )


def test_after_a_quiet_window_nothing_is_counted() -> None:
    """Two edges later the key equals a new one."""
    play(TEN, [yes(59, 10, left=0, reset=61), yes(120, 0, left=10, reset=0)])


def test_a_clock_that_goes_back_restores_no_count() -> None:
    """A clock behind the last admission, by a second or a window, gets the count of that
    admission."""
    play(
        TEN,
        [
            yes(70, 4, left=6, reset=110),
            yes(61, 0, left=6, reset=119),
            yes(5, 2, left=4, reset=175),
            no(5, 5, left=4, reset=175, retry=125),
            yes(70, 4, left=0, reset=110),
        ],
    )


def test_a_raised_limit_adds_the_difference_at_once() -> None:
    """The count stays and the limit changes: 10 → 12 admits two more."""
    state = play(TEN, [yes(0, 10, left=0, reset=120)])
    twelve = Limit(12, per=60, algorithm="sliding_window_counter")
    play(
        twelve,
        [yes(0, 2, left=0, reset=120), no(0, 1, left=0, reset=120, retry=65)],
        state,
    )


def test_a_lowered_limit_applies_at_once() -> None:
    """Lowered to 4 with 10 counted, nothing passes until the count has faded below 4."""
    state = play(TEN, [yes(0, 10, left=0, reset=120)])
    four = Limit(4, per=60, algorithm="sliding_window_counter")
    play(
        four,
        [
            never(0, 5),
            yes(0, 0, left=0, reset=120),
            # 10 × (60 − e) / 60 <= 3 at e = 42 s of the next window.
            no(0, 1, left=0, reset=120, retry=102),
            no(102 - NS, 1, left=0, reset=18 + NS, retry=NS),
            yes(102, 1, left=0, reset=78),
        ],
        state,
    )


def test_huge_numbers_are_exact() -> None:
    """At 1e9 per 366 days, products have 25 digits, and the result is exact to a unit and a
    nanosecond."""
    window_ns = 366 * 86_400 * 1_000_000_000
    limit = Limit(10**9, per=366 * 86_400, algorithm="sliding_window_counter")
    state, _ = sliding_window_counter.decide(None, limit, 0, 10**9)
    # One unit fits when 1e9 × (W − e) <= (1e9 − 1) × W: a 1e9th of W later, 31,622,400 ns.
    due_ns = window_ns + 31_622_400
    state, denied = sliding_window_counter.decide(state, limit, window_ns, 1)
    assert (denied.allowed, denied.retry_after_ns) == (False, 31_622_400)
    assert not sliding_window_counter.decide(state, limit, due_ns - 1, 1)[1].allowed
    assert sliding_window_counter.decide(state, limit, due_ns, 1)[1].allowed


@pytest.mark.parametrize(
    ("units", "left"),
    [
        (0, 50),
        (18, 68),  # the 18 of this window: 31.5 are still counted
        (999, 68),  # no more than those
    ],
)
def test_refund_without_a_time_takes_from_this_window(units: int, left: int) -> None:
    """At 75 s of the worked example, a refund leaves this many units."""
    state = play(HUNDRED, WORKED)
    state = sliding_window_counter.refund(state, HUNDRED, 75_000_000_000, units, None)
    _, outcome = sliding_window_counter.decide(state, HUNDRED, 75_000_000_000, 0)
    assert outcome.remaining == left


@pytest.mark.parametrize(
    ("charged", "units", "left"),
    [
        (60, 18, 68),  # this window
        (0, 2, 52),  # the previous window: 40 × 0.75 = 30 are counted instead of 31.5
        (0, 99, 82),  # no more than the window that was charged has
        (-1, 18, 50),  # the window before that no longer counts
        (120, 18, 50),  # a window that has not begun
    ],
)
def test_refund_takes_from_the_window_of_the_charge(charged: int, units: int, left: int) -> None:
    """At 75 s of the worked example, a refund of a charge made at this second leaves this many."""
    state = play(HUNDRED, WORKED)
    charged_ns = charged * 1_000_000_000
    state = sliding_window_counter.refund(state, HUNDRED, 75_000_000_000, units, charged_ns)
    _, outcome = sliding_window_counter.decide(state, HUNDRED, 75_000_000_000, 0)
    assert outcome.remaining == left
