"""All descriptors of a call pass, or none is charged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.redis_servers import running
from tests.redis_servers.ports import HOST, free_port
from tollkeeper import AsyncLimiter, Request
from tollkeeper.core.errors import CapacityError, InvalidKey, StoreError
from tollkeeper.core.model import CheckResult
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.service.envoy.deciding import OVERRIDE_NAME, OVERRIDES_MAX, Decider
from tollkeeper.service.envoy.mapping import Asked, Override
from tollkeeper.testing import ManualClock

HOUR_NS = 3600 * 10**9
RULES = {
    "version": 1,
    "rules": [
        {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["5/hour"]},
        {"id": "tenants", "match": {"tenant": "*"}, "by": ["tenant"], "limits": ["3/hour"]},
    ],
    "allow": ["user:root"],
    "deny": ["user:mallory"],
}
ANN = Request(user="ann")
ACME = Request(tenant="acme")
OWN = Override(2, HOUR_NS)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.server)])
async def limiter(request: pytest.FixtureRequest) -> AsyncIterator[AsyncLimiter]:
    """On a store in this process, and on one that is a trip away."""
    store = "memory://"
    if request.param == "redis":
        server = running("single")
        server.flush()
        store = f"{server.uri}?deadline_ms=10000"
    async with AsyncLimiter.from_rules(RULES, store=store) as found:
        yield found


def passing(rulings: list[CheckResult]) -> list[bool]:
    return [each.decision.allowed for each in rulings]


async def left(limiter: AsyncLimiter, request: Request) -> int:
    return (await limiter.peek(request)).remaining


async def test_rules_decide_together(limiter: AsyncLimiter) -> None:
    """Three of the tenant pass; then the user is not charged for what the tenant denies."""
    decider = Decider(limiter)
    for _ in range(3):
        assert passing(await decider.decide([Asked(ANN), Asked(ACME)])) == [True, True]
    assert passing(await decider.decide([Asked(ANN), Asked(ACME)])) == [True, False]
    assert (await left(limiter, ANN), await left(limiter, ACME)) == (2, 0)


async def test_nought_looks_and_charges_nothing(limiter: AsyncLimiter) -> None:
    """It passes while there is room for one, and denies the others where there is none."""
    decider = Decider(limiter)
    assert passing(await decider.decide([Asked(ACME, 0), Asked(ANN)])) == [True, True]
    assert (await left(limiter, ANN), await left(limiter, ACME)) == (4, 3)
    await decider.decide([Asked(ACME, 3)])
    assert passing(await decider.decide([Asked(ACME, 0), Asked(ANN)])) == [False, True]
    assert await left(limiter, ANN) == 4


async def test_a_limit_of_its_own_goes_before_the_rules(limiter: AsyncLimiter) -> None:
    """The rule is neither asked nor charged, and the count is the descriptor's own."""
    decider = Decider(limiter)
    found = [(await decider.decide([Asked(ANN, 1, OWN)]))[0] for _ in range(3)]
    assert passing(found) == [True, True, False]
    assert found[0].applied[0].rule == OVERRIDE_NAME
    assert await left(limiter, ANN) == 5
    assert passing(await decider.decide([Asked(Request(user="bob"), 1, OWN)])) == [True]


async def test_a_limit_of_its_own_keeps_what_was_spent_when_it_changes(
    limiter: AsyncLimiter,
) -> None:
    """A plan that is raised from 2 to 3 an hour has one left, not three."""
    decider = Decider(limiter)
    await decider.decide([Asked(ANN, 2, OWN)])
    found = [(await decider.decide([Asked(ANN, 1, Override(3, HOUR_NS))]))[0] for _ in range(2)]
    assert passing(found) == [True, False]


async def test_what_a_limit_of_its_own_was_charged_is_given_back(limiter: AsyncLimiter) -> None:
    """Where a rule denies beside it, whatever the order."""
    decider = Decider(limiter)
    await decider.decide([Asked(ACME, 3)])
    for _ in range(4):
        both = [Asked(ANN, 1, OWN), Asked(ACME)]
        assert passing(await decider.decide(both)) == [True, False]
        assert passing(await decider.decide(both[::-1])) == [False, True]
    assert (await decider.look(Asked(ANN, 1, OWN))).decision.remaining == 2


async def test_a_rule_is_not_charged_where_a_limit_of_its_own_denies(
    limiter: AsyncLimiter,
) -> None:
    """And of two limits of their own, the first is given back."""
    decider = Decider(limiter)
    bob = Request(user="bob")
    await decider.decide([Asked(bob, 2, OWN)])
    asked = [Asked(ACME), Asked(ANN, 1, OWN), Asked(bob, 1, OWN)]
    assert passing(await decider.decide(asked)) == [True, True, False]
    assert await left(limiter, ACME) == 3
    assert (await decider.look(Asked(ANN, 1, OWN))).decision.remaining == 2


async def test_lists_go_before_a_limit_of_its_own(limiter: AsyncLimiter) -> None:
    """Who is blocked stays blocked, and who is exempt is not counted."""
    decider = Decider(limiter)
    kinds = [
        (await decider.decide([Asked(Request(user=name), 9, OWN)]))[0].kind
        for name in ("root", "mallory")
    ]
    assert kinds == ["exempt", "blocked"]


async def test_a_limit_of_nothing_lets_nothing_pass(limiter: AsyncLimiter) -> None:
    """0 an hour is a way to block."""
    found = await Decider(limiter).decide([Asked(ANN, 1, Override(0, HOUR_NS))])
    assert (passing(found), found[0].kind) == ([False], "blocked")
    assert passing(await Decider(limiter).decide([Asked(ANN, -1, Override(0, HOUR_NS))])) == [False]


async def test_units_are_given_back_at_the_end(limiter: AsyncLimiter) -> None:
    """If nothing denies; never beyond an untouched quota, and never denied itself."""
    decider = Decider(limiter)
    await decider.decide([Asked(ANN, 5)])
    assert passing(await decider.decide([Asked(ANN, -2)])) == [True]
    assert await left(limiter, ANN) == 2
    await decider.decide([Asked(ANN, -100)])
    assert await left(limiter, ANN) == 5
    await decider.decide([Asked(ANN, 5), Asked(ACME, 3)])
    assert passing(await decider.decide([Asked(ANN, -2), Asked(ACME)])) == [True, False]
    assert await left(limiter, ANN) == 0


async def test_what_is_settled_spends_all_that_fits(limiter: AsyncLimiter) -> None:
    """It comes when the request is over, and is never denied."""
    decider = Decider(limiter)
    assert passing(await decider.decide([Asked(ANN, 3, settles=True)])) == [True]
    assert await left(limiter, ANN) == 2
    assert passing(await decider.decide([Asked(ANN, 9, settles=True)])) == [True]
    assert await left(limiter, ANN) == 0
    await decider.decide([Asked(ANN, 9, OWN, settles=True)])
    assert (await decider.look(Asked(ANN, 1, OWN))).decision.remaining == 0


async def test_what_can_never_fit_charges_nothing(limiter: AsyncLimiter) -> None:
    """The error is for the caller, and what was charged before it is given back."""
    decider = Decider(limiter)
    with pytest.raises(CapacityError):
        await decider.decide([Asked(ANN, 1, OWN), Asked(ANN), Asked(ACME, 4)])
    with pytest.raises(CapacityError):
        await decider.decide([Asked(ANN), Asked(ACME, 4)])
    with pytest.raises(InvalidKey):
        await decider.decide([Asked(ANN, 1, OWN), Asked(Request(user="x" * 600))])
    assert (await left(limiter, ANN), await left(limiter, ACME)) == (5, 3)
    assert (await decider.look(Asked(ANN, 1, OWN))).decision.remaining == 2


async def test_limits_that_were_brought_along_are_bounded() -> None:
    """Ever new ones fill no memory; what they have counted is in the store."""
    async with AsyncLimiter.from_rules(RULES) as limiter:
        decider = Decider(limiter)
        for units in range(1, OVERRIDES_MAX + 50):
            await decider.look(Asked(ANN, 1, Override(units, HOUR_NS)))
        assert len(decider._own) <= OVERRIDES_MAX


@pytest.mark.parametrize(
    ("on_failure", "kind", "allowed"), [("open", "limited", True), ("closed", "unavailable", False)]
)
async def test_a_store_that_is_away(on_failure: FailurePolicy, kind: str, allowed: bool) -> None:
    """`on_failure` answers for rules and for limits of their own, alone and together."""
    store = f"redis://{HOST}:{free_port()}"
    async with AsyncLimiter.from_rules(RULES, store=store, on_failure=on_failure) as limiter:
        decider = Decider(limiter, on_failure)
        for asked in ([Asked(ANN)], [Asked(ANN), Asked(ACME)], [Asked(ANN, 1, OWN)],
                      [Asked(ANN, 0)], [Asked(ANN, -1)]):  # fmt: skip
            found = await decider.decide(asked)
            assert [(each.kind, each.decision.allowed) for each in found] == [
                (kind, allowed)
            ] * len(asked)
            assert all(each.decision.degraded for each in found)


async def test_a_store_that_is_away_may_raise() -> None:
    """With on_failure="raise" the error is for the caller."""
    store = f"redis://{HOST}:{free_port()}"
    async with AsyncLimiter.from_rules(RULES, store=store, on_failure="raise") as limiter:
        for asked in ([Asked(ANN)], [Asked(ANN, 1, OWN)], [Asked(ANN, 0)]):
            with pytest.raises(StoreError):
                await Decider(limiter, "raise").decide(asked)


async def test_time_brings_the_units_of_an_own_limit_back() -> None:
    """It is a limit like any other: after the wait that it names, one passes."""
    clock = ManualClock()
    async with AsyncLimiter.from_rules(RULES, clock=clock) as limiter:
        decider = Decider(limiter)
        await decider.decide([Asked(ANN, 2, OWN)])
        denied = (await decider.decide([Asked(ANN, 1, OWN)]))[0].decision
        clock.advance_ns(denied.retry_after_ns - 1)
        assert passing(await decider.decide([Asked(ANN, 1, OWN)])) == [False]
        clock.advance_ns(1)
        assert passing(await decider.decide([Asked(ANN, 1, OWN)])) == [True]
