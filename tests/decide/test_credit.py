"""Granted units on top of a limit."""

from __future__ import annotations

import pytest

from tollkeeper.core.clock import ns_from_seconds as ns
from tollkeeper.core.errors import CapacityError
from tollkeeper.core.model import ALGORITHM_NAMES, UNITS_MAX, AlgorithmName, Limit
from tollkeeper.decide.algorithms import ALGORITHMS, Outcome, State, token_bucket
from tollkeeper.decide.credit import Credit, decide, granted

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
        (0, 5, 8),  # reading: both are there
        (1, 5, 7),  # the limit's own first
        (3, 5, 5),
        (4, 4, 4),  # one had no room
        (8, None, 0),  # everything: more than the limit alone could ever hold
    ],
)
def test_credit_is_spent_last(cost: int, credit_left: int | None, left: int) -> None:
    """Of 3 that refill and 5 granted, a request takes the ones that refill first."""
    _, credit, outcome = _decide(None, (5, UNTIL), cost)
    assert outcome.allowed
    assert outcome.remaining == left
    assert credit == (None if credit_left is None else (credit_left, UNTIL))


def test_credit_pays_when_the_limit_is_empty() -> None:
    """An empty bucket stays as it is; the grant shrinks."""
    state, credit, outcome = _decide(EMPTY, (5, UNTIL), 2)
    assert (state, credit, outcome.allowed, outcome.remaining) == (EMPTY, (3, UNTIL), True, 3)


def test_too_little_of_both_is_denied_and_spends_neither() -> None:
    """3 and 5 do not make 9, and a denial touches neither."""
    state = (0, 1_000_000)
    after, credit, outcome = _decide(state, (5, UNTIL), 8)
    assert (after, credit) == (state, (5, UNTIL))
    # Two left of three, five granted; the eighth is there when the bucket is full, in 10 s.
    assert outcome == Outcome(False, 7, ns(10), ns(10), 0)


def test_retry_counts_on_the_credit_while_it_lasts() -> None:
    """A cost of 7 fits when the bucket holds 2, because 5 are granted until 100 s."""
    _, _, outcome = _decide(EMPTY, (5, UNTIL), 7)
    assert outcome.retry_after_ns == ns(20)
    assert not _decide(EMPTY, (5, UNTIL), 7, at=20 - 1e-9)[2].allowed
    assert _decide(EMPTY, (5, UNTIL), 7, at=20)[2].allowed


def test_retry_does_not_count_on_a_credit_that_will_be_over() -> None:
    """Granted until 5 s, it is over when the bucket has refilled: the whole cost must fit."""
    _, credit, outcome = _decide(EMPTY, (1, ns(5)), 3)
    assert credit == (1, ns(5))
    assert (outcome.allowed, outcome.remaining, outcome.retry_after_ns) == (False, 1, ns(30))


@pytest.mark.parametrize("until", [10, 10 + 1e-9])
def test_the_credits_last_instant(until: float) -> None:
    """A credit that ends just when the rest would fit is no use then; a nanosecond later it is."""
    _, _, outcome = _decide(EMPTY, (1, ns(until)), 2)
    assert outcome.retry_after_ns == (ns(20) if until == 10 else ns(10))


def test_a_cost_that_fits_only_with_the_credit_and_too_late_never_fits() -> None:
    """4 of a bucket of 3 with 1 granted until 5 s: no wait would help."""
    with pytest.raises(CapacityError):
        _decide(EMPTY, (1, ns(5)), 4)
    with pytest.raises(CapacityError):
        _decide(EMPTY, (1, UNTIL), 5)


@pytest.mark.parametrize(("at", "allowed"), [(100 - 1e-9, True), (100, False)])
def test_a_credit_is_over_at_its_time(at: float, allowed: bool) -> None:
    """Granted until 100 s means up to, not including, 100 s."""
    state = (ns(100), 3_000_000)
    _, credit, outcome = _decide(state, (5, UNTIL), 1, at)
    assert outcome.allowed is allowed
    assert credit == ((4, UNTIL) if allowed else None)


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_one_rule_serves_every_algorithm(name: AlgorithmName) -> None:
    """With 2 granted, exactly limit + 2 pass at one instant, whatever counts them."""
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
        (None, 5, 60, (5, 60)),  # the first
        ((2, 50), 5, 60, (7, 60)),  # added up, until the later time
        ((2, 90), 5, 60, (7, 90)),
        ((2, 10), 5, 60, (5, 60)),  # over at 10, which is now
        ((UNITS_MAX, 90), 5, 60, (UNITS_MAX, 90)),  # a bound holds
    ],
)
def test_granting(before: Credit | None, units: int, until: int, after: Credit) -> None:
    """Granting at time 10 turns one credit into the other."""
    assert granted(before, units, 10, until) == after


def test_granting_more_never_takes_away() -> None:
    """The bound on granted units holds from the first grant on, so a second only adds."""
    first = granted(None, 2 * UNITS_MAX, 0, 60)
    second = granted(first, 1, 0, 60)
    assert first[0] <= UNITS_MAX
    assert second[0] >= first[0]
