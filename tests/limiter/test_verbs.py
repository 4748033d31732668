"""Settling a cost that is known later, on every store."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper import AsyncLimiter, ConfigError, InvalidKey, Limiter, Request
from ratekeeper.core.model import Settlement
from ratekeeper.testing import ManualClock

DEAR = """
version: 1
rules:
  - {id: user, by: user, limits: [3/minute, 100/hour]}
  - {id: tenant, by: tenant, limits: 5/minute}
  - {id: dear, match: {endpoint: /dear}, by: ip, limits: 100/minute, cost: 10}
"""


@pytest.mark.parametrize(
    ("actual", "left", "retry_s", "forgiven"),
    [
        (5, 5, 0, 0),
        (2, 8, 0, 0),
        (0, 10, 0, 0),
        (10, 0, 6, 0),
        (12, 0, 18, 0),
        (110, 0, 606, 0),
        (500, 0, 606, 390),
    ],
)
def test_settling(make_limiter: Any, actual: int, left: int, retry_s: int, forgiven: int) -> None:
    """`settle` refunds the difference, or charges it in full: the limit owes up to 100 units."""
    limiter = make_limiter("10/minute")
    limiter.check("ann", 5)
    assert limiter.settle("ann", 5, actual) == Settlement(actual - forgiven, forgiven)
    assert limiter.peek("ann", 0).remaining == left
    assert limiter.peek("ann").retry_after == retry_s


def test_a_limit_without_debt_is_charged_what_fits(make_limiter: Any) -> None:
    """`debt 0`: the rest is forgiven."""
    limiter = make_limiter("10/minute debt 0")
    limiter.check("ann", 5)
    assert limiter.settle("ann", 5, 40) == Settlement(10, 30)
    assert limiter.peek("ann").retry_after == 6


def test_forgiven_units_are_counted_and_logged(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """By rule, so that an operator sees which reservations are too low."""
    with Limiter("10/minute debt 20", clock=clock, name="tokens") as limiter:
        limiter.settle("ann", 0, 100)
        counted = limiter.counts()["tokens"]
    assert (counted.settled, counted.forgiven) == (30, 70)
    assert "'tokens' owes as much as it may" in caplog.text
    assert "70 of 100 units" in caplog.text


def test_a_grant_pays_before_the_limit_owes(make_limiter: Any) -> None:
    """`remaining` shows what is left of it; the limit owes when it is used up."""
    limiter = make_limiter("10/minute")
    limiter.grant("ann", 20)
    assert limiter.settle("ann", 0, 15) == Settlement(15)
    assert limiter.peek("ann", 0).remaining == 15
    assert limiter.settle("ann", 0, 20) == Settlement(20)
    assert limiter.peek("ann").retry_after == 36


def test_a_reset_clears_what_is_owed(make_limiter: Any) -> None:
    """The quota is whole again."""
    limiter = make_limiter("10/minute")
    limiter.settle("ann", 0, 100)
    limiter.reset("ann")
    assert limiter.peek("ann", 0).remaining == 10


def test_a_request_in_flight_beside_others_is_paid_in_full(
    make_limiter: Any, clock: ManualClock
) -> None:
    """Ten requests reserve 100 of 1,000 a minute and use 1,000 each: nine minutes are owed."""
    limiter = make_limiter("1000/minute")
    decisions = [limiter.check("ann", 100) for _ in range(10)]
    assert all(decisions)
    for decision in decisions:
        assert limiter.settle("ann", 100, 1_000, decision) == Settlement(1_000)
    denied = limiter.check("ann", 100)
    assert (denied.remaining, denied.retry_after) == (0, 9 * 60 + 6)
    clock.advance(9 * 60 + 6 - 0.001)
    assert not limiter.check("ann", 100)
    clock.advance(0.001)
    assert limiter.check("ann", 100)


def test_settling_a_rule_that_charges_several_units_per_request(make_limiter: Any) -> None:
    """What a rule forgives is said in units of the cost."""
    limiter = make_limiter(rules=DEAR)
    dear = Request(ip="192.0.2.1", endpoint="/dear", user="u1", tenant="t1")
    assert limiter.check(dear, 1).allowed
    # Its rule has room for 90 units and owes up to 1,000; the user's for 2, and up to 30.
    assert limiter.settle(dear, 1, 40) == Settlement(33, 7)
    assert limiter.peek(dear, 0).remaining == 0
    assert limiter.settle(dear, 0, 100).forgiven == 100


def test_settling_charges_every_limit(make_limiter: Any) -> None:
    """A reservation of 5 cost 40: the minute owes then, and the day is charged all of it."""
    limiter = make_limiter("10/minute; 1000/day")
    decision = limiter.check("ann", 5)
    assert limiter.settle("ann", 5, 40, decision) == Settlement(40)
    assert limiter.peek("ann", 0).remaining == 0
    day = make_limiter("1000/day")
    assert day.peek("ann", 0).remaining == 960


def test_settling_charges_every_rule(make_limiter: Any) -> None:
    """Each rule that applies is charged the excess in full."""
    limiter = make_limiter(
        rules="""
version: 1
rules:
  - {id: user, by: user, limits: 10/minute}
  - {id: tenant, by: tenant, limits: 1000/day}
"""
    )
    ann = Request(user="ann", tenant="acme")
    decision = limiter.check(ann, 5)
    assert limiter.settle(ann, 5, 40, decision) == Settlement(40)
    left = [rule.decision.remaining for rule in limiter.explain(ann, 0).rules]
    assert left == [0, 960]


def test_a_rule_that_was_charged_nothing_is_settled(make_limiter: Any) -> None:
    """A check that reserves 0 tokens has charged the rule of requests only."""
    limiter = make_limiter(
        rules="""
version: 1
rules:
  - {id: requests, by: user, limits: 10/minute}
  - {id: tokens, by: user, unit: tokens, limits: 1000/day}
"""
    )
    ann, reserved = Request(user="ann"), {"tokens": 0}
    decision = limiter.check(ann, costs=reserved)
    limiter.settle(ann, reserved, {"tokens": 40}, decision)
    left = [rule.decision.remaining for rule in limiter.explain(ann, 0).rules]
    assert left == [9, 960]


def test_a_settlement_that_failed_can_be_repeated(make_limiter: Any) -> None:
    """Its mark is removed with the error."""
    limiter = make_limiter("10/minute")
    with pytest.raises(ConfigError):
        limiter.settle("ann", 5, 2, "no decision", "request-1")
    with pytest.raises(InvalidKey):
        limiter.settle("", 5, 2, None, "request-1")
    limiter.check("ann", 5)
    assert limiter.settle("ann", 5, 2, None, "request-1") == Settlement(2)
    assert limiter.peek("ann", 0).remaining == 8


def test_settling_twice_changes_nothing(make_limiter: Any) -> None:
    """The name of the reservation marks the first settlement; another name is another one."""
    limiter = make_limiter("10/minute")
    decision = limiter.check("ann", 5)
    settled = [limiter.settle("ann", 5, 2, decision, "request-1") for _ in range(3)]
    assert [each.repeated for each in settled] == [False, True, True]
    assert limiter.peek("ann", 0).remaining == 8
    assert limiter.settle("ann", 0, 4, reservation="request-2") == Settlement(4)
    assert limiter.settle("ann", 0, 4, reservation="request-2").repeated
    assert limiter.peek("ann", 0).remaining == 4


def test_settling_late_returns_no_quota_twice(make_limiter: Any, clock: ManualClock) -> None:
    """The reservation's minute is over, and its units have come back."""
    limiter = make_limiter("10/minute")
    decision = limiter.check("ann", 10)
    clock.advance(60)
    assert limiter.check("ann", 10).allowed
    assert limiter.settle("ann", 10, 0, decision) == Settlement(0)
    assert limiter.peek("ann", 0).remaining == 0


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
async def test_settling_on_a_full_store(kind: Any) -> None:
    """The store has no room for the state of a new key: its units are not counted."""
    limiter = kind("10/minute", store="memory://?capacity=2")

    async def called(verb: str, *arguments: Any) -> Any:
        found = getattr(limiter, verb)(*arguments)
        return await found if kind is AsyncLimiter else found

    assert (await called("check", "ann")).allowed
    assert (await called("check", "bob")).allowed
    assert await called("settle", "cid", 0, 3) == Settlement(0, uncounted=3)
    assert await called("settle", "ann", 1, 4) == Settlement(4)
