"""The properties that all five algorithms share, on the pure functions."""

from __future__ import annotations

import pytest

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import ALGORITHM_NAMES, UNIT_ALGORITHMS, AlgorithmName, Limit
from ratekeeper.decide.algorithms import ALGORITHMS, Algorithm

SECOND = 1_000_000_000

every = pytest.mark.parametrize("name", UNIT_ALGORITHMS)


def _both(name: AlgorithmName, units: int = 4, per: float = 60) -> tuple[Algorithm, Limit]:
    return ALGORITHMS[name], Limit(units, per=per, algorithm=name)


def test_each_name_has_an_algorithm() -> None:
    """The names that a Limit accepts are those of the algorithms."""
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES


@every
def test_a_new_key_is_whole(name: AlgorithmName) -> None:
    """The state None means a new key: all units remain and there is no wait."""
    algorithm, limit = _both(name)
    assert algorithm.decide(None, limit, 5 * SECOND, 0) == (None, (True, 4, 0, 0, 0, None))


@every
def test_a_cost_above_the_capacity_is_an_error_in_any_state(name: AlgorithmName) -> None:
    """A cost of 5 never fits a limit of 4, for a new key and for a spent one."""
    algorithm, limit = _both(name)
    spent, _ = algorithm.decide(None, limit, 0, 4)
    for state in (None, spent):
        with pytest.raises(CapacityError) as caught:
            algorithm.decide(state, limit, 0, 5)
        assert (caught.value.cost, caught.value.limit) == (5, limit)


@every
def test_the_retry_time_counts_from_the_clock_of_the_caller(name: AlgorithmName) -> None:
    """A caller whose clock is 7 s behind waits 7 s longer, for the same instant."""
    algorithm, limit = _both(name)
    state, _ = algorithm.decide(None, limit, 600 * SECOND, 4)
    _, here = algorithm.decide(state, limit, 600 * SECOND, 1)
    _, behind = algorithm.decide(state, limit, 593 * SECOND, 1)
    assert behind.retry_after_ns - here.retry_after_ns == 7 * SECOND
    assert behind.reset_after_ns - here.reset_after_ns == 7 * SECOND


@every
def test_times_before_the_epoch_work(name: AlgorithmName) -> None:
    """A manual clock may start anywhere, so divisions must be correct below 0."""
    algorithm, limit = _both(name)
    state, _ = algorithm.decide(None, limit, -90 * SECOND, 4)
    _, denied = algorithm.decide(state, limit, -90 * SECOND, 1)
    assert not denied.allowed
    due_ns = -90 * SECOND + denied.retry_after_ns
    assert not algorithm.decide(state, limit, due_ns - 1, 1)[1].allowed
    assert algorithm.decide(state, limit, due_ns, 1)[1].allowed


@every
def test_a_full_refund_gives_the_state_of_a_new_key(name: AlgorithmName) -> None:
    """After a full refund, the state is None."""
    algorithm, limit = _both(name)
    state, _ = algorithm.decide(None, limit, 0, 3)
    assert algorithm.refund(state, limit, 0, 3, None) is None
    assert algorithm.refund(None, limit, 0, 3, None) is None


@every
def test_a_refund_of_the_charge_gives_the_state_of_a_new_key(name: AlgorithmName) -> None:
    """The same with the time of the charge."""
    algorithm, limit = _both(name)
    state, outcome = algorithm.decide(None, limit, 7, 3)
    assert outcome.charged_ns == 7
    assert algorithm.refund(state, limit, 7, 3, outcome.charged_ns) is None


@every
def test_a_clock_that_is_behind_charges_at_the_time_of_the_last_charge(name: AlgorithmName) -> None:
    """The time of the charge is the time that the state has, so that a refund finds the units."""
    algorithm, limit = _both(name)
    state, _ = algorithm.decide(None, limit, 65 * SECOND, 1)
    state, outcome = algorithm.decide(state, limit, 3 * SECOND, 2)
    assert outcome.charged_ns == 65 * SECOND
    after = algorithm.refund(state, limit, 3 * SECOND, 2, outcome.charged_ns)
    assert algorithm.decide(after, limit, 65 * SECOND, 0)[1].remaining == 3


@every
def test_a_refund_after_two_windows_returns_nothing(name: AlgorithmName) -> None:
    """Time has returned the units by then; the units of another request stay spent."""
    algorithm, limit = _both(name)
    state, late = algorithm.decide(None, limit, 0, 4)
    now_ns = 2 * limit.window_ns
    state, _ = algorithm.decide(state, limit, now_ns, 3)
    after = algorithm.refund(state, limit, now_ns, 4, late.charged_ns)
    assert algorithm.decide(after, limit, now_ns, 0)[1].remaining == 1


@every
def test_refunding_nothing_changes_nothing(name: AlgorithmName) -> None:
    """A refund of 0 returns the same state."""
    algorithm, limit = _both(name)
    state, _ = algorithm.decide(None, limit, 0, 3)
    assert algorithm.refund(state, limit, 0, 0, None) is state


@every
@pytest.mark.parametrize("units", [1, 7, 100, 999_983])
@pytest.mark.parametrize("per", [0.001, 1, 60, 86_400, 366 * 86_400])
def test_a_new_key_admits_exactly_the_limit(name: AlgorithmName, units: int, per: float) -> None:
    """`limit` units pass at one instant, and not one more."""
    algorithm, limit = _both(name, units, per)
    now_ns = 1_700_000_000_123_456_789
    state, _ = algorithm.decide(None, limit, now_ns, units - 1)
    state, last = algorithm.decide(state, limit, now_ns, 1)
    assert (last.allowed, last.remaining) == (True, 0)
    _, over = algorithm.decide(state, limit, now_ns, 1)
    assert not over.allowed
    assert over.retry_after_ns > 0
