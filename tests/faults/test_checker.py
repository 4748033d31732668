"""The checker finds admissions over a limit, and reports no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limit, Limiter
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.testing import ManualClock
from tests.faults.checker import Admitted, excess

S = 10**9
START_NS = 1_700_000_000 * S


def at(*seconds: float, took_s: float = 0.0) -> list[Admitted]:
    """Return one admitted unit for each of these moments."""
    sent = [START_NS + round(each * S) for each in seconds]
    return [Admitted(each, each + round(took_s * S)) for each in sent]


@pytest.mark.parametrize(
    ("algorithm", "admitted", "over"),
    [
        ("token_bucket", at(0, 0, 0, 0), 0),
        ("token_bucket", at(0, 0, 0, 0, 0), 1),
        ("token_bucket", at(0, 0, 0, 0, 0.25), 0),
        ("token_bucket", at(0, 0, 0, 0, 0.2), 1),
        # The excess is that of an interval, not of the whole time.
        ("token_bucket", at(0, 9, 9, 9, 9, 9, 9), 2),
        ("leaky_bucket", at(0, 0, 0, 0, 0), 1),
        ("sliding_window_log", at(0, 0.3, 0.6, 0.9, 1.0), 0),
        ("sliding_window_log", at(0, 0.3, 0.6, 0.9, 0.99), 1),
        ("sliding_window_log", at(0, 0.3, 0.6, 0.9, 1.1, 1.2), 1),
        ("fixed_window", at(0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0, 1.0), 0),
        ("fixed_window", at(0.5, 0.6, 0.7, 0.8, 0.9), 1),
        ("sliding_window_counter", at(0.9, 0.9, 0.9, 0.9, 1.5, 1.5), 0),
        ("sliding_window_counter", at(0.9, 0.9, 0.9, 0.9, 1.5, 1.6, 1.6), 1),
        ("sliding_window_counter", at(0.5, 0.6, 0.7, 0.8, 0.9), 1),
    ],
)
def test_each_bound(algorithm: AlgorithmName, admitted: list[Admitted], over: int) -> None:
    """With 4 a second, admissions within the bound are not over; one more is over by one."""
    assert excess(Limit(4, per=1, algorithm=algorithm), admitted) == over


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_a_slow_answer_is_no_excess(algorithm: AlgorithmName) -> None:
    """Five requests with answers two seconds later may have been admitted at different times."""
    limit = Limit(4, per=1, algorithm=algorithm)
    assert excess(limit, at(0.1, 0.1, 0.1, 0.1, 0.1, took_s=2)) == 0
    assert excess(limit, at(0.1, 0.1, 0.1, 0.1, 0.1, took_s=0.001)) == 1


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_units_are_counted(algorithm: AlgorithmName) -> None:
    """The checker counts units, not requests."""
    limit = Limit(4, per=1, algorithm=algorithm)
    assert excess(limit, [Admitted(START_NS, START_NS, 9)]) == 5


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
@given(gaps_ms=st.lists(st.integers(0, 700), min_size=5, max_size=60))
def test_a_limiters_admissions_are_not_over_and_one_more_is(
    algorithm: AlgorithmName, gaps_ms: list[int]
) -> None:
    """A limiter's admissions keep the bound at any times; one denied request more breaks it."""
    clock = ManualClock(1_700_000_000)
    limiter = Limiter(Limit(4, per=1, algorithm=algorithm), clock=clock)
    admitted: list[Admitted] = []
    denied: Admitted | None = None
    for gap_ms in gaps_ms:
        clock.advance_ns(gap_ms * 1_000_000)
        request = Admitted(clock.now_ns(), clock.now_ns())
        if limiter.check("ann"):
            admitted.append(request)
        elif limiter.peek("ann").retry_after > 0.01:
            denied = request
            break
    assert excess(limiter.limits[0], admitted) == 0
    if denied is not None:
        assert excess(limiter.limits[0], [*admitted, denied]) >= 1
