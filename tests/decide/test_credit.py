"""Granted units on top of a limit."""

from __future__ import annotations

import pytest

from ratekeeper.core.clock import ns_from_seconds as ns
from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import UNIT_ALGORITHMS, UNITS_MAX, AlgorithmName, Limit
from ratekeeper.decide.algorithms import ALGORITHMS, Outcome, State, token_bucket
from ratekeeper.decide.credit import Credit, decide, granted

THREE = Limit(3, per=30)  # one every 10 s
EMPTY: State = (0, 3_000_000)
UNTIL = ns(100)


def _decide(
    state: State, credit: Credit, cost: int, at: float = 0
) -> tuple[State, Credit | None, Outcome]:
    return decide(token_bucket, state, credit, THREE, ns(at), cost)


@pytest.mark.parametrize(
    ("cost", "credit_left", "left"),
    [
        (0, 5, 8),  # a cost of 0 reports both
        (1, 5, 7),  # units of the limit first
        (3, 5, 5),
        (4, 4, 4),  # one unit did not fit
        (8, None, 0),  # all units: more than the capacity of the limit
    ],
)
def test_credit_is_spent_last(cost: int, credit_left: int | None, left: int) -> None:
    """Of 3 units that refill and 5 granted ones, a request spends those that refill first."""
    _, credit, outcome = _decide(None, (5, UNTIL), cost)
    assert outcome.allowed
    assert outcome.remaining == left
    assert credit == (None if credit_left is None else (credit_left, UNTIL))


def test_credit_is_spent_when_the_limit_is_empty() -> None:
    """An empty bucket stays unchanged, and the credit shrinks."""
    state, credit, outcome = _decide(EMPTY, (5, UNTIL), 2)
    assert (state, credit, outcome.allowed, outcome.remaining) == (EMPTY, (3, UNTIL), True, 3)


def test_a_cost_above_both_is_denied_and_spends_nothing() -> None:
    """A cost of 9 does not fit 3 and 5. A denial spends neither."""
    state = (0, 1_000_000)
    after, credit, outcome = _decide(state, (5, UNTIL), 8)
    assert (after, credit) == (state, (5, UNTIL))
    # Two of three left and five granted. The eighth is available when the bucket is full, in 10 s.
    assert outcome == Outcome(False, 7, ns(10), ns(10), 0)


def test_the_retry_time_includes_credit_that_lasts() -> None:
    """A cost of 7 fits when the bucket holds 2, because 5 are granted until 100 s."""
    _, _, outcome = _decide(EMPTY, (5, UNTIL), 7)
    assert outcome.retry_after_ns == ns(20)
    assert not _decide(EMPTY, (5, UNTIL), 7, at=20 - 1e-9)[2].allowed
    assert _decide(EMPTY, (5, UNTIL), 7, at=20)[2].allowed


def test_the_retry_time_excludes_credit_that_ends_before() -> None:
    """A grant until 5 s ends before the bucket refills, so the whole cost must fit the bucket."""
    _, credit, outcome = _decide(EMPTY, (1, ns(5)), 3)
    assert credit == (1, ns(5))
    assert (outcome.allowed, outcome.remaining, outcome.retry_after_ns) == (False, 1, ns(30))


@pytest.mark.parametrize("until", [10, 10 + 1e-9])
def test_credit_that_ends_at_the_retry_time(until: float) -> None:
    """A credit that ends when the rest would fit does not count; one nanosecond later it does."""
    _, _, outcome = _decide(EMPTY, (1, ns(until)), 2)
    assert outcome.retry_after_ns == (ns(20) if until == 10 else ns(10))


def test_a_cost_that_needs_expired_credit_never_fits() -> None:
    """A cost of 4 needs a bucket of 3 and a grant of 1 until 5 s: no wait would help."""
    with pytest.raises(CapacityError):
        _decide(EMPTY, (1, ns(5)), 4)
    with pytest.raises(CapacityError):
        _decide(EMPTY, (1, UNTIL), 5)


@pytest.mark.parametrize(("at", "allowed"), [(100 - 1e-9, True), (100, False)])
def test_a_credit_ends_on_time(at: float, allowed: bool) -> None:
    """Granted until 100 s means up to, and not including, 100 s."""
    state = (ns(100), 3_000_000)
    _, credit, outcome = _decide(state, (5, UNTIL), 1, at)
    assert outcome.allowed is allowed
    assert credit == ((4, UNTIL) if allowed else None)


@pytest.mark.parametrize("name", UNIT_ALGORITHMS)
def test_credit_works_with_every_algorithm(name: AlgorithmName) -> None:
    """With 2 granted units, exactly limit + 2 pass at one instant."""
    limit = Limit(4, per=60, algorithm=name)
    state: State = None
    credit: Credit | None = (2, ns(60))
    for left in (5, 4, 3, 2, 1, 0):
        assert credit is not None
        state, credit, outcome = decide(ALGORITHMS[name], state, credit, limit, 0, 1)
        assert (outcome.allowed, outcome.remaining) == (True, left)
    assert credit is None
    assert not ALGORITHMS[name].decide(state, limit, 0, 1)[1].allowed


@pytest.mark.parametrize(
    ("before", "units", "until", "after"),
    [
        (None, 5, 60, (5, 60)),  # the first grant
        ((2, 50), 5, 60, (7, 60)),  # the sum, until the later end
        ((2, 90), 5, 60, (7, 90)),
        ((2, 10), 5, 60, (5, 60)),  # ends at 10, which is now
        ((UNITS_MAX, 90), 5, 60, (UNITS_MAX, 90)),  # the bound applies
    ],
)
def test_granting(before: Credit | None, units: int, until: int, after: Credit) -> None:
    """A grant at time 10 changes one credit into the other."""
    assert granted(before, units, 10, until) == after


def test_a_second_grant_never_removes_units() -> None:
    """The bound on granted units applies from the first grant on, so a second grant only adds."""
    first = granted(None, 2 * UNITS_MAX, 0, 60)
    second = granted(first, 1, 0, 60)
    assert first[0] <= UNITS_MAX
    assert second[0] >= first[0]
