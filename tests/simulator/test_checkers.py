"""The checkers accept what the algorithms promise, and find a single unit beyond it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName, Limit
from ratekeeper.decide.algorithms import ALGORITHMS, State
from tests.simulator.checkers import CentralLimiter, NeverOver, percentile

START_S = 1_800_000_000
Arrivals = list[tuple[int, int]]  # milliseconds since the one before, and cost

arrivals = st.lists(st.tuples(st.integers(0, 1_500), st.integers(1, 4)), max_size=40)


def _checked(limit: Limit, admitted: Arrivals) -> NeverOver:
    checker = NeverOver((limit,))
    now_ns = START_S * NS_PER_SECOND
    for wait_ms, units in admitted:
        now_ns += wait_ms * NS_PER_SECOND // 1_000
        checker.admitted("user", units, now_ns, "a test")
    return checker


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
@given(arrivals=arrivals)
def test_what_the_algorithm_admits_is_never_over(
    algorithm: AlgorithmName, arrivals: Arrivals
) -> None:
    """No admission of the reference algorithm exceeds the checker's bound."""
    limit = Limit(5, per=2, algorithm=algorithm)
    state: State = None
    checker = NeverOver((limit,))
    now_ns = START_S * NS_PER_SECOND
    for wait_ms, units in arrivals:
        now_ns += wait_ms * NS_PER_SECOND // 1_000
        state, outcome = ALGORITHMS[algorithm].decide(state, limit, now_ns, units)
        if outcome.allowed:
            checker.admitted("user", units, now_ns, "a test")
    assert not checker.violations
    assert checker.overshoot() == 0


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
@given(arrivals=arrivals)
def test_the_bound_is_that_of_every_interval(algorithm: AlgorithmName, arrivals: Arrivals) -> None:
    """The checker finds the same as a look at every pair of admissions."""
    limit = Limit(5, per=2, algorithm=algorithm)
    checker = _checked(limit, arrivals)
    times = []
    now_ms = 0
    for wait_ms, units in arrivals:
        now_ms += wait_ms
        times.append((now_ms, units))
    worst = 0.0
    for first in range(len(times)):
        for last in range(first, len(times)):
            length_ms = times[last][0] - times[first][0]
            units = sum(units for _, units in times[first : last + 1])
            if algorithm == "token_bucket":
                worst = max(worst, units - 5 - length_ms * 5 / 2_000)
            elif length_ms < 2_000:
                worst = max(worst, units - 5)
    assert bool(checker.violations) == (worst > 1e-9)
    assert checker.over.get("user", 0) == pytest.approx(worst, abs=1.0)


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_one_unit_more_is_found(algorithm: AlgorithmName) -> None:
    """A full limit and one unit more at the same instant is a violation, which names the node."""
    limit = Limit(5, per=2, algorithm=algorithm)
    assert not _checked(limit, [(0, 5)]).violations
    checker = _checked(limit, [(0, 5), (0, 1)])
    assert checker.over == {"user": 1}
    assert f"user: 1 units over {limit}, at" in checker.violations[0]
    assert "admitted by a test" in checker.violations[0]
    assert checker.overshoot() == 0.2


def test_windows_are_aligned_and_the_previous_one_fades() -> None:
    """A fixed window starts empty; in a sliding counter, half of the previous window counts."""
    full = [(1_900, 5), (1_100, 5)]  # the second comes 1 s into the next window
    assert not _checked(Limit(5, per=2, algorithm="fixed_window"), full).violations
    sliding = Limit(5, per=2, algorithm="sliding_window_counter")
    assert _checked(sliding, full).over == {"user": 3}
    assert not _checked(sliding, [(1_900, 5), (1_100, 2)]).violations


def test_forgotten_units_may_be_admitted_again_and_no_more() -> None:
    """An authority that forgot 2 units admits 2 more; a third is a violation."""
    checker = NeverOver((Limit(5, per=2),))
    now_ns = START_S * NS_PER_SECOND
    checker.admitted("user", 5, now_ns, "a test")
    checker.forget("user", 2)
    checker.admitted("user", 2, now_ns, "a test")
    assert not checker.violations
    checker.admitted("user", 1, now_ns, "a test")
    assert checker.over == {"user": 1}


def test_the_central_limiter_charges_all_limits_or_none() -> None:
    """A request that one limit denies does not use up the other."""
    central = CentralLimiter((Limit(2, per=1), Limit(3, per=60)))
    now_ns = START_S * NS_PER_SECOND
    assert [central.arrived("user", 1, now_ns) for _ in range(3)] == [True, True, False]
    assert central.arrived("user", 1, now_ns + 10 * NS_PER_SECOND)
    assert central.shortfall({"user": 1}) == 2
    assert central.shortfall({"user": 9}) == 0


def test_percentiles_are_of_the_values() -> None:
    """p99 of 100 values is the 99th, and that of one value is the value."""
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7], 0.99) == 7
