"""Settling a cost that is known later, on every store."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper import AsyncLimiter, ConfigError, InvalidKey, Limiter, Request
from ratekeeper.testing import ManualClock

DEAR = """
version: 1
rules:
  - {id: user, by: user, limits: [3/minute, 100/hour]}
  - {id: tenant, by: tenant, limits: 5/minute}
  - {id: dear, match: {endpoint: /dear}, by: ip, limits: 100/minute, cost: 10}
"""


@pytest.mark.parametrize(
    ("reserved", "actual", "left", "unsettled"),
    [
        (5, 5, 5, 0),
        (5, 2, 8, 0),
        (5, 0, 10, 0),
        (5, 9, 1, 0),
        (5, 10, 0, 0),
        (5, 12, 0, 2),
        (5, 40, 0, 30),
    ],
)
def test_settling(make_limiter: Any, reserved: int, actual: int, left: int, unsettled: int) -> None:
    """`settle` refunds the difference, or spends as much of it as fits and returns the rest."""
    limiter = make_limiter("10/minute")
    limiter.check("ann", reserved)
    assert limiter.settle("ann", reserved, actual) == unsettled
    assert limiter.peek("ann", 0).remaining == left


def test_settling_a_rule_that_charges_several_units_per_request(make_limiter: Any) -> None:
    """The part of the cost that fits is spent, although `remaining` counts other units."""
    limiter = make_limiter(rules=DEAR)
    dear = Request(ip="192.0.2.1", endpoint="/dear", user="u1", tenant="t1")
    assert limiter.check(dear, 1).allowed
    # Its rule has room for 9 more at 10 units each; the user's for 2.
    assert limiter.settle(dear, 1, 7) == 4
    assert limiter.peek(dear, 0).remaining == 0


def test_settling_charges_every_limit(make_limiter: Any) -> None:
    """A reservation of 5 cost 40: the minute is full then, and the day is charged all of it."""
    limiter = make_limiter("10/minute; 1000/day")
    decision = limiter.check("ann", 5)
    assert limiter.settle("ann", 5, 40, decision) == 30
    assert limiter.peek("ann", 0).remaining == 0
    day = make_limiter("1000/day")
    assert day.peek("ann", 0).remaining == 960


def test_settling_charges_every_rule(make_limiter: Any) -> None:
    """Each rule that applies is charged the excess as far as it has room."""
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
    assert limiter.settle(ann, 5, 40, decision) == 30
    left = [rule.decision.remaining for rule in limiter.explain(ann, 0).rules]
    assert left == [0, 960]


def test_a_settlement_that_failed_can_be_repeated(make_limiter: Any) -> None:
    """Its mark is removed with the error."""
    limiter = make_limiter("10/minute")
    with pytest.raises(ConfigError):
        limiter.settle("ann", 5, 2, "no decision", "request-1")
    with pytest.raises(InvalidKey):
        limiter.settle("", 5, 2, None, "request-1")
    limiter.check("ann", 5)
    assert limiter.settle("ann", 5, 2, None, "request-1") == 0
    assert limiter.peek("ann", 0).remaining == 8


def test_settling_twice_changes_nothing(make_limiter: Any) -> None:
    """The name of the reservation marks the first settlement; another name is another one."""
    limiter = make_limiter("10/minute")
    decision = limiter.check("ann", 5)
    for _ in range(3):
        assert limiter.settle("ann", 5, 2, decision, "request-1") == 0
    assert limiter.peek("ann", 0).remaining == 8
    assert limiter.settle("ann", 0, 4, reservation="request-2") == 0
    assert limiter.settle("ann", 0, 4, reservation="request-2") == 0
    assert limiter.peek("ann", 0).remaining == 4


def test_settling_late_returns_no_quota_twice(make_limiter: Any, clock: ManualClock) -> None:
    """The reservation's minute is over, and its units have come back."""
    limiter = make_limiter("10/minute")
    decision = limiter.check("ann", 10)
    clock.advance(60)
    assert limiter.check("ann", 10).allowed
    assert limiter.settle("ann", 10, 0, decision) == 0
    assert limiter.peek("ann", 0).remaining == 0


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
async def test_settling_on_a_full_store(kind: Any) -> None:
    """The peek finds room in the limit, and the check finds none in the store: nothing is spent."""
    limiter = kind("10/minute", store="memory://?capacity=2")

    async def called(verb: str, *arguments: Any) -> Any:
        found = getattr(limiter, verb)(*arguments)
        return await found if kind is AsyncLimiter else found

    assert (await called("check", "ann")).allowed
    assert (await called("check", "bob")).allowed
    assert await called("settle", "cid", 0, 3) == 3
    assert await called("settle", "ann", 1, 4) == 0


class SteppingClock(ManualClock):
    """A clock that advances by 10 µs at each reading, up to 100,000 readings."""

    def now_ns(self) -> int:
        self.advance_ns(10_000)
        assert super().now_ns() < 1_000_000_000, "it was read 100,000 times"
        return super().now_ns()


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
async def test_settling_ends_although_the_limit_refills_between_attempts(kind: Any) -> None:
    """Otherwise a caller that settles a huge cost would block the process."""
    limiter = kind("1000000/second", clock=SteppingClock())
    unsettled = limiter.settle("ann", 0, 1_000_000_000)
    if kind is AsyncLimiter:
        unsettled = await unsettled
    assert 990_000_000 < unsettled <= 999_000_000
