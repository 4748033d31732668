"""What a limit owes is paid back by time before anything is admitted, and is bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, AlgorithmName, Limit
from ratekeeper.decide.algorithms import ALGORITHMS
from ratekeeper.decide.algorithms.holds import lease_ns_max
from tests.decide.algorithms.table import no, play, yes

SECOND = 1_000_000_000

every = pytest.mark.parametrize("name", UNIT_ALGORITHMS)
gaps = st.sampled_from((0, 1, SECOND // 7, SECOND, 9 * SECOND, 31 * SECOND, 100 * SECOND))


def owing(name: AlgorithmName, units: int = 7) -> tuple[Limit, Any]:
    """Return 4 a minute and the state in which it was empty at 0 s and owes so many units."""
    limit = Limit(4, per=60, algorithm=name)
    return limit, ALGORITHMS[name].owe(None, limit, 0, 4 + units)[0]


def test_a_bucket_that_owes_is_refilled_from_below_zero() -> None:
    """4 units and 7 of debt come back in 165 s, at 15 s each, and the first is free after 120 s."""
    limit, state = owing("token_bucket")
    play(
        limit,
        [
            no(0, 1, left=0, reset=165, retry=120),
            no(0, 4, left=0, reset=165, retry=165),
            yes(30, 0, left=0, reset=135),
            no(119, 1, left=0, reset=46, retry=1),
            yes(120, 1, left=0, reset=60),
        ],
        state,
    )


def test_debt_is_charged_to_the_next_fixed_windows() -> None:
    """7 of debt fill the second window and three quarters of the third."""
    limit, state = owing("fixed_window")
    play(
        limit,
        [
            no(10, 1, left=0, reset=170, retry=110),
            no(10, 2, left=0, reset=170, retry=170),
            no(60, 1, left=0, reset=120, retry=60),
            yes(121, 0, left=1, reset=59),
            yes(121, 1, left=0, reset=59),
            yes(180, 4, left=0, reset=60),
        ],
        state,
    )


def test_debt_is_charged_to_the_next_windows_of_a_counter() -> None:
    """The third window has 3 of debt; the 4 of the second one have faded at its end."""
    limit, state = owing("sliding_window_counter")
    play(
        limit,
        [
            no(10, 1, left=0, reset=230, retry=170),
            no(10, 2, left=0, reset=230, retry=190),
            no(60, 1, left=0, reset=180, retry=120),
            no(179, 1, left=0, reset=61, retry=1),
            yes(180, 1, left=0, reset=120),
        ],
        state,
    )


def test_a_unit_of_debt_takes_the_place_of_each_entry_that_leaves_a_log() -> None:
    """Entries of 0 s and 20 s: the debt enters the log at 60 s and 80 s, and again after that."""
    limit = Limit(4, per=60, algorithm="sliding_window_log")
    state = play(limit, [yes(0, 1, left=3, reset=60), yes(20, 3, left=0, reset=60)])
    state = ALGORITHMS["sliding_window_log"].owe(state, limit, 20 * SECOND, 5)[0]
    play(
        limit,
        [
            no(30, 1, left=0, reset=150, retry=110),  # the entry of 80 s leaves
            no(30, 3, left=0, reset=150, retry=110),
            no(30, 4, left=0, reset=150, retry=150),  # that of 120 s, the last debt, leaves
            no(139, 1, left=0, reset=41, retry=1),
            yes(140, 3, left=0, reset=60),
        ],
        state,
    )


def test_a_denied_check_of_a_log_that_owes_copies_nothing() -> None:
    """Otherwise each of them would cost as much time and memory as a log of 100,000 is long."""
    limit = Limit(100_000, per=60, algorithm="sliding_window_log")
    log = ALGORITHMS["sliding_window_log"]
    state = log.owe(log.decide(None, limit, 0, 50_000)[0], limit, SECOND, 120_000)[0]
    tracemalloc.start()
    try:
        _, outcome = log.decide(state, limit, 30 * SECOND, 1)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    assert (outcome.allowed, outcome.retry_after_ns) == (False, 31 * SECOND)


@every
def test_a_debt_is_at_most_a_capacity_or_what_ten_minutes_pay_back(name: AlgorithmName) -> None:
    """Whatever is charged at once, a key is locked out for some minutes, or one window."""
    algorithm = ALGORITHMS[name]
    for limit, most in (
        (Limit(4, per=60, algorithm=name), 40),
        (Limit(4, per=3_600, algorithm=name), 4),
        (Limit(10**9, per=0.001, algorithm=name) if name != "sliding_window_log" else None, 10**9),
    ):
        if limit is None:
            continue
        assert limit.debt_max == most
        bounded, none = algorithm.owe(None, limit, 0, limit.capacity + most)
        beyond, forgiven = algorithm.owe(None, limit, 0, limit.capacity + most + 10**9)
        exact, again = algorithm.owe(beyond, limit, 0, 3)
        assert (none, forgiven, again) == (0, 10**9, 3)
        answers = {algorithm.decide(state, limit, 0, 1)[1] for state in (bounded, beyond, exact)}
        assert len(answers) == 1


@every
def test_a_debt_is_cut_to_the_bound_of_the_limit_that_reads_it(name: AlgorithmName) -> None:
    """A limit lowered from 1,000 a second to 1 a minute owes 10 units, not 600,000."""
    algorithm = ALGORITHMS[name]
    high = Limit(1_000, per=1, algorithm=name, name="changed")
    low = Limit(1, per=60, algorithm=name, name="changed")
    state, _ = algorithm.owe(None, high, 0, 1_000_000)
    _, outcome = algorithm.decide(state, low, 0, 1)
    assert 10 * 60 * SECOND <= outcome.retry_after_ns <= 12 * 60 * SECOND


@every
def test_a_raised_limit_takes_the_debt_into_its_room(name: AlgorithmName) -> None:
    """7 of debt beside 4 units are 11 units of a limit of 12."""
    algorithm = ALGORITHMS[name]
    _, state = owing(name)
    raised = Limit(12, per=60, algorithm=name)
    assert algorithm.decide(state, raised, 0, 0)[1].remaining == 1
    assert algorithm.decide(state, raised, 0, 1)[1].allowed


@every
def test_a_refund_returns_debt_first(name: AlgorithmName) -> None:
    """Of 7 owed units, a refund of 7 leaves an empty limit, and 2 more are free."""
    algorithm = ALGORITHMS[name]
    limit, state = owing(name)
    for charged_ns in (0, None):
        empty = algorithm.refund(state, limit, 0, 7, charged_ns)
        spent, _ = algorithm.decide(None, limit, 0, 4)
        assert algorithm.decide(empty, limit, 0, 1)[1] == algorithm.decide(spent, limit, 0, 1)[1]
        free = algorithm.refund(empty, limit, 0, 2, charged_ns)
        assert algorithm.decide(free, limit, 0, 0)[1].remaining == 2


@every
def test_a_reset_clears_a_debt_and_a_late_charge_is_forgotten(name: AlgorithmName) -> None:
    """Late charges of other nodes find no room in a limit that owes."""
    algorithm = ALGORITHMS[name]
    limit, state = owing(name)
    assert algorithm.reset(state, limit, 0) is None
    late = algorithm.charge(state, limit, 0, 3, 0)
    assert algorithm.decide(late, limit, 0, 1)[1] == algorithm.decide(state, limit, 0, 1)[1]


# A gap, a verb and units.
events = st.lists(
    st.tuples(
        gaps,
        st.sampled_from(("check", "check", "owe", "refund", "lease", "back")),
        st.integers(1, 12),
    ),
    min_size=2,
    max_size=25,
)
limits = st.tuples(st.integers(1, 12), st.sampled_from((1, 7, 60, 3_600)), st.integers(0, 20))


def limit_of(name: AlgorithmName, drawn: tuple[int, int, int]) -> Limit:
    units, per, capacity = drawn
    return Limit(units, per=per, algorithm=name, capacity=capacity if name in BUCKETS else 0)


def after(
    limit: Limit, trace: Sequence[tuple[int, str, int]], verbs: Sequence[str]
) -> tuple[Any, int, list[tuple[int, int, bool]]]:
    """Return the state after a trace, its time, and what was charged: time, units, by a check."""
    algorithm = ALGORITHMS[limit.algorithm]
    state: Any = None
    now_ns, charged, leased_ns = 12_345 * SECOND, [], 0
    for gap_ns, verb, drawn in trace:
        now_ns += gap_ns
        looked = algorithm.decide(state, limit, now_ns, 0)[1]
        units = min(drawn, limit.capacity)
        if verb not in verbs:
            continue
        if verb == "check":
            state, outcome = algorithm.decide(state, limit, now_ns, units)
            if outcome.allowed:
                charged.append((now_ns, units, True))
        elif verb == "owe" and looked.remaining:
            state, _ = algorithm.owe(state, limit, now_ns, units)
            charged.append((now_ns, units, False))
        elif verb == "refund":
            state = algorithm.refund(state, limit, now_ns, units, None)
        elif verb == "lease" and looked.remaining >= units:
            ends_ns = algorithm.lease_until(state, limit, now_ns, lease_ns_max(limit))
            if ends_ns > now_ns:
                state, leased_ns = algorithm.lease(state, limit, now_ns, units, ends_ns), ends_ns
        elif verb == "back":
            state = algorithm.give_back(state, limit, now_ns, units, leased_ns)
    return state, now_ns, charged


@every
@settings(max_examples=200, deadline=None, derandomize=True)
@given(drawn=limits, trace=events)
def test_what_is_settled_is_paid(
    name: AlgorithmName, drawn: tuple[int, int, int], trace: list[tuple[int, str, int]]
) -> None:
    """In any interval that ends with an admission, no more is charged than without debts.

    The trace owes only within the bound.
    """
    limit = limit_of(name, drawn)
    _, _, charged = after(limit, trace, ("check", "owe"))
    for last, (end_ns, _, by_check) in enumerate(charged):
        units = 0
        for start_ns, more, _ in reversed(charged[: last + 1]) if by_check else ():
            units += more
            elapsed_ns = end_ns - start_ns
            if name in BUCKETS:
                over = (units - limit.capacity) * limit.window_ns
                assert over <= limit.limit * elapsed_ns
            elif name == "sliding_window_log":
                assert units <= limit.limit * (elapsed_ns // limit.window_ns + 1)
            else:
                windows = end_ns // limit.window_ns - start_ns // limit.window_ns + 1
                assert units <= limit.limit * windows


@every
@settings(max_examples=200, deadline=None, derandomize=True)
@given(drawn=limits, trace=events, cost=st.integers(1, 12), later=gaps)
def test_waits_of_a_limit_that_owes_are_exact(
    name: AlgorithmName,
    drawn: tuple[int, int, int],
    trace: list[tuple[int, str, int]],
    cost: int,
    later: int,
) -> None:
    """The cost is denied just before its time and allowed at it; whoever asks, and when.

    Just before the time of reset something is missing, and from then on nothing is.
    """
    limit = limit_of(name, drawn)
    algorithm = ALGORITHMS[name]
    state, now_ns, _ = after(limit, trace, ("check", "owe", "refund", "lease", "back"))
    state, _ = algorithm.owe(state, limit, now_ns, cost)
    cost = min(cost, limit.capacity)
    _, outcome = algorithm.decide(state, limit, now_ns, cost)
    passes_ns = now_ns + outcome.retry_after_ns
    if not outcome.allowed:
        assert not algorithm.decide(state, limit, passes_ns - 1, cost)[1].allowed
    assert algorithm.decide(state, limit, passes_ns, cost)[1].allowed
    _, again = algorithm.decide(state, limit, now_ns + later, cost)
    assert again.allowed or now_ns + later + again.retry_after_ns == passes_ns
    whole_ns = now_ns + outcome.reset_after_ns if not outcome.allowed else 0
    if whole_ns:
        assert algorithm.decide(state, limit, whole_ns - 1, limit.capacity)[1].allowed is False
        assert algorithm.decide(state, limit, whole_ns, 0)[1].remaining == limit.capacity
