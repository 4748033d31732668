"""Charges: the last word counts, once, and only where something was charged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import Decision, InvalidCost, Limit, Limiter
from tollkeeper.core.model import AppliedRule, CheckResult, ResultKind
from tollkeeper.testing import ManualClock
from tollkeeper.web.charges import PASSED, Charge, joined

LIMIT = Limit(10, per=60)
APPLIED = AppliedRule("orders", [LIMIT])


def _ruling(
    *,
    allowed: bool = True,
    remaining: int = 9,
    degraded: bool = False,
    kind: ResultKind = "limited",
) -> CheckResult:
    decision = Decision(allowed, LIMIT, remaining, rule="orders", degraded=degraded)
    return CheckResult(decision, (APPLIED,), kind)


def test_a_charge_that_nobody_settles_is_as_it_was() -> None:
    """Without a word from the application there is nothing to apply."""
    assert Charge(_ruling(), "k", 3).take() is None


def test_the_last_word_counts_and_is_applied_once() -> None:
    """Of several settlements the last is taken, and taking it again takes nothing."""
    charge = Charge(_ruling(), "k", 100)
    charge.settle(50)
    charge.settle(37)
    assert charge.take() == (100, 37)
    assert charge.take() is None


def test_a_word_after_it_was_applied_is_a_further_difference() -> None:
    """What a background task settles later starts from what is charged by then."""
    charge = Charge(_ruling(), "k", 100)
    charge.settle(37)
    charge.take()
    charge.settle(40)
    assert charge.take() == (37, 40)


def test_an_outcome_that_does_not_count_costs_nothing_whatever_was_settled() -> None:
    """`count` goes before `settle`: a successful login is free, whatever it cost."""
    charge = Charge(_ruling(), "k", 1)
    charge.settle(5)
    assert charge.take(counts=False) == (1, 0)


@pytest.mark.parametrize(
    "ruling",
    [
        _ruling(allowed=False, remaining=0),
        _ruling(degraded=True),
        _ruling(kind="exempt"),
        _ruling(kind="unlimited"),
        _ruling(allowed=False, kind="blocked"),
        _ruling(allowed=False, degraded=True, kind="unavailable"),
        PASSED,
    ],
    ids=["denied", "degraded", "exempt", "unlimited", "blocked", "unavailable", "passed"],
)
def test_what_was_not_charged_is_not_settled(ruling: CheckResult) -> None:
    """A refund of what nobody spent would be a gift."""
    charge = Charge(ruling, "k", 1)
    charge.refund()
    assert charge.take() is None
    charge.settle(5)
    assert charge.take(counts=False) is None


@pytest.mark.parametrize("units", [-1, 1.5, "3", None, True])
def test_a_wrong_cost_is_told_to_whoever_says_it(units: object) -> None:
    """The application hears of its mistake where it makes it, not in a log afterwards."""
    with pytest.raises(InvalidCost):
        Charge(_ruling(), "k", 1).settle(units)  # type: ignore[arg-type]  # that is the point


@given(st.lists(st.one_of(st.integers(0, 50), st.none()), max_size=20))
def test_however_often_it_is_applied_the_end_is_the_last_word(words: list[int | None]) -> None:
    """Settling and applying in any order leaves exactly the last settlement charged."""
    limiter = Limiter("1000/minute", clock=ManualClock())
    charge = Charge(limiter.evaluate("k", 20), "k", 20)
    for units in words:
        if units is not None:
            charge.settle(units)
        elif due := charge.take():
            assert limiter.settle("k", *due) == 0
    if due := charge.take():
        limiter.settle("k", *due)
    said = [units for units in words if units is not None]
    assert limiter.peek("k").remaining == 1000 - (said[-1] if said else 20)


def test_of_several_rulings_the_tightest_speaks_and_all_are_listed() -> None:
    """A response with a global and a route's limit tells the one that a client must heed."""
    other = AppliedRule("search", [Limit(5, per=1)])
    tight = CheckResult(
        Decision(True, other.limits[0], 2, rule="search"), (other,), "limited", ("s",)
    )
    whole = joined([_ruling(), tight])
    assert whole.decision is tight.decision
    assert whole.applied == (APPLIED, other)
    assert whole.shadow_denied == ("s",)


def test_who_was_counted_is_known_of_all_or_of_none() -> None:
    """It goes with the rules, one for one, so a part of it would be wrong."""
    known = _ruling()._replace(counted=(("user:1", 2),))
    assert joined([known, known]).counted == (("user:1", 2), ("user:1", 2))
    assert joined([known, _ruling()]).counted == ()


def test_a_denial_speaks_before_all_that_allowed() -> None:
    """The last of several rulings is the one that can deny, whatever remains elsewhere."""
    allowed, denied = _ruling(remaining=0), _ruling(allowed=False, remaining=3)
    whole = joined([allowed, denied])
    assert whole.decision is denied.decision
    assert whole.kind == "limited"
    assert len(whole.applied) == 2


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (("unlimited", "limited"), "limited"),
        (("exempt", "limited"), "limited"),
        (("limited", "exempt"), "limited"),
        (("unlimited", "exempt"), "exempt"),
        (("unlimited", "unlimited"), "unlimited"),
    ],
)
def test_what_allowed_without_a_limit_does_not_hide_one(
    kinds: tuple[ResultKind, ResultKind], kind: ResultKind
) -> None:
    """Exempt from one and limited by another is limited."""
    assert joined([_ruling(kind=each) for each in kinds]).kind == kind


def test_blocked_tells_no_numbers() -> None:
    """Who is blocked learns nothing of the limits that let it pass before."""
    blocked = _ruling(allowed=False, kind="blocked")
    assert joined([_ruling(), blocked]) is blocked


def test_a_charge_says_what_it_is() -> None:
    """In a debugger or a log a charge shows its decision, and no key."""
    assert repr(Charge(_ruling(), "secret", 2)) == (
        "<Charge of 2 units: <Decision allowed remaining=9/10 reset_after=0 rule='orders'>>"
    )
