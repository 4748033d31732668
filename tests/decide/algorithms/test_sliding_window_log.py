"""Sliding window log, row by row."""

from __future__ import annotations

import pytest

from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import sliding_window_log
from tests.decide.algorithms.table import never, no, play, yes

SECOND = 1_000_000_000
THREE_IN_TEN = Limit(3, per=10, algorithm="sliding_window_log")
NS = 0.000_000_001


def test_an_entry_leaves_exactly_one_window_later() -> None:
    """An entry at t counts at t + 10 s − 1 ns and not at t + 10 s."""
    play(
        THREE_IN_TEN,
        [
            never(0, 4),
            yes(0, 1, left=2, reset=10),
            yes(1, 1, left=1, reset=10),
            yes(2, 1, left=0, reset=10),
            no(5, 1, left=0, reset=7, retry=5),
            no(10 - NS, 1, left=0, reset=2 + NS, retry=NS),
            yes(10, 1, left=0, reset=10),
            no(10, 1, left=0, reset=10, retry=1),
            no(10, 2, left=0, reset=10, retry=2),
            no(10, 3, left=0, reset=10, retry=10),
            yes(12, 2, left=0, reset=10),
            yes(22, 3, left=0, reset=10),
        ],
    )


def test_windows_have_no_edge() -> None:
    """Three requests just before a multiple of the window leave no room just after it."""
    play(
        THREE_IN_TEN,
        [
            yes(9.9, 3, left=0, reset=10),
            no(10, 1, left=0, reset=9.9, retry=9.9),
            no(19.8, 1, left=0, reset=0.1, retry=0.1),
            yes(19.9, 3, left=0, reset=10),
        ],
    )


def test_cost_zero_reports_the_remaining_units() -> None:
    """A cost of 0 writes no entry, and old entries leave one by one."""
    play(
        THREE_IN_TEN,
        [
            yes(0, 0, left=3, reset=0),
            yes(0, 1, left=2, reset=10),
            yes(4, 2, left=0, reset=10),
            yes(4, 0, left=0, reset=10),
            yes(10, 0, left=1, reset=4),
            yes(14 - NS, 0, left=1, reset=NS),
            yes(14, 0, left=3, reset=0),
        ],
    )


def test_a_clock_that_goes_back_removes_no_entry() -> None:
    """A request in the past is written at the time of the latest entry."""
    play(
        THREE_IN_TEN,
        [
            yes(100, 2, left=1, reset=10),
            yes(95, 1, left=0, reset=15),
            no(95, 1, left=0, reset=15, retry=15),
            no(109, 1, left=0, reset=1, retry=1),
            yes(110, 3, left=0, reset=10),
        ],
    )


def test_a_changed_limit_applies_at_once() -> None:
    """The log contains times, so it has the same meaning under any limit."""
    state = play(THREE_IN_TEN, [yes(0, 1, left=2, reset=10), yes(5, 2, left=0, reset=10)])
    four = Limit(4, per=10, algorithm="sliding_window_log")
    play(four, [yes(5, 1, left=0, reset=10), no(5, 1, left=0, reset=10, retry=5)], state)


def test_a_limit_below_the_admitted_units() -> None:
    """Lowered to 1 with three in the log, all three must leave."""
    state = play(THREE_IN_TEN, [yes(0, 1, left=2, reset=10), yes(5, 2, left=0, reset=10)])
    one = Limit(1, per=10, algorithm="sliding_window_log")
    play(
        one,
        [
            never(5, 2),
            yes(5, 0, left=0, reset=10),
            no(5, 1, left=0, reset=10, retry=10),
            no(15 - NS, 1, left=0, reset=NS, retry=NS),
            yes(15, 1, left=0, reset=10),
        ],
        state,
    )


def test_a_longer_window_keeps_entries_longer() -> None:
    """After a change from 10 s to 20 s, an entry of 4 s ago stays for another 16."""
    state = play(THREE_IN_TEN, [yes(0, 3, left=0, reset=10)])
    wider = Limit(3, per=20, algorithm="sliding_window_log")
    play(wider, [no(4, 1, left=0, reset=16, retry=16), yes(20, 1, left=2, reset=20)], state)


def test_a_million_in_a_year() -> None:
    """The largest log is exact: a million pass and one more waits for a year."""
    year = 366 * 86_400
    limit = Limit(1_000_000, per=year, algorithm="sliding_window_log")
    play(
        limit,
        [
            never(0, 1_000_001),
            yes(0, 999_999, left=1, reset=year),
            yes(1, 1, left=0, reset=year),
            no(2, 1, left=0, reset=year - 1, retry=year - 2),
            no(2, 1_000_000, left=0, reset=year - 1, retry=year - 1),
            yes(year, 999_999, left=0, reset=year),
        ],
    )


def test_the_log_stays_bounded() -> None:
    """After months of traffic, the array has the live entries, as many dead ones, and a few
    more."""
    limit = Limit(100, per=1, algorithm="sliding_window_log")
    state: sliding_window_log.State = None
    for step in range(20_000):
        state, outcome = sliding_window_log.decide(state, limit, step * 10_000_000, 1)
        assert outcome.allowed
        assert state is not None
        assert len(state[0]) <= 2 * limit.limit + sliding_window_log._DEAD_ENTRIES_MIN


def test_an_unused_decision_leaves_no_entry() -> None:
    """If another limit denied, the next decision overwrites the entry."""
    kept, _ = sliding_window_log.decide(None, THREE_IN_TEN, 0, 1)
    sliding_window_log.decide(kept, THREE_IN_TEN, 1_000_000_000, 2)
    after, outcome = sliding_window_log.decide(kept, THREE_IN_TEN, 5_000_000_000, 1)
    assert outcome.remaining == 1
    assert after is not None
    times, start, end = after
    assert list(times[start:end]) == [0, 5_000_000_000]


@pytest.mark.parametrize(
    ("units", "left", "reset"),
    [(0, 0, 10), (1, 1, 10), (2, 2, 10), (3, 3, 0), (99, 3, 0)],
)
def test_refund_without_a_time_removes_the_oldest_entries(
    units: int, left: int, reset: float
) -> None:
    """Of entries at 0, 5 and 5, a refund removes the oldest first: they leave the window first
    anyway."""
    state = play(THREE_IN_TEN, [yes(0, 1, left=2, reset=10), yes(5, 2, left=0, reset=10)])
    state = sliding_window_log.refund(state, THREE_IN_TEN, 5_000_000_000, units, None)
    play(THREE_IN_TEN, [yes(5, 0, left=left, reset=reset)], state)


@pytest.mark.parametrize(
    ("charged", "units", "times"),
    [
        (5, 1, [0, 7]),  # its own entry
        (5, 2, [7]),  # its own, and an older one
        (7, 1, [0, 5]),
        (7, 9, []),
        (0, 1, [5, 7]),
        (0, 2, [5, 7]),  # never a newer one
        (4, 1, [5, 7]),  # an older one in the place of its own
        (-1, 1, [0, 5, 7]),
    ],
)
def test_refund_removes_its_own_entries(charged: int, units: int, times: list[int]) -> None:
    """Of entries at 0, 5 and 7, a refund of a charge made at this second leaves these."""
    before = None
    for second in (0, 5, 7):
        before, _ = sliding_window_log.decide(before, THREE_IN_TEN, second * SECOND, 1)
    after = sliding_window_log.refund(before, THREE_IN_TEN, 8 * SECOND, units, charged * SECOND)
    assert _seconds(after) == times
    assert _seconds(before) == [0, 5, 7], "the state that it started from stays valid"


def test_refund_removes_the_oldest_entries_of_the_window() -> None:
    """Without a time, entries that have left the window are not worth anything."""
    state = None
    for second in (0, 5, 7):
        state, _ = sliding_window_log.decide(state, THREE_IN_TEN, second * SECOND, 1)
    after = sliding_window_log.refund(state, THREE_IN_TEN, 12 * SECOND, 1, None)
    assert _seconds(after) == [7]


def _seconds(state: sliding_window_log.State) -> list[int]:
    if state is None:
        return []
    times, start, end = state
    return [time // SECOND for time in times[start:end]]
