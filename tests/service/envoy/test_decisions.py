"""All descriptors of a call pass, or none is charged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ratekeeper import AsyncLimiter, Request
from ratekeeper.core.errors import CapacityError, InvalidCost, InvalidKey, StoreError
from ratekeeper.core.model import CheckResult
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.service.envoy.decisions import OVERRIDES_MAX, Decider
from ratekeeper.service.envoy.descriptors import DescriptorCheck, DescriptorLimit
from ratekeeper.testing import ManualClock
from tests.redis_servers import running
from tests.redis_servers.ports import HOST, free_port

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
OWN = DescriptorLimit(2, HOUR_NS)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.server)])
async def limiter(request: pytest.FixtureRequest) -> AsyncIterator[AsyncLimiter]:
    """Yield a limiter on a store in this process, and one on a remote store."""
    store = "memory://"
    if request.param == "redis":
        server = running("single")
        server.flush()
        store = f"{server.uri}?deadline_ms=10000"
    async with AsyncLimiter.from_rules(RULES, store=store) as found:
        yield found


def passing(results: list[CheckResult]) -> list[bool]:
    return [each.decision.allowed for each in results]


async def left(limiter: AsyncLimiter, request: Request) -> int:
    return (await limiter.peek(request)).remaining


async def test_rules_decide_together(limiter: AsyncLimiter) -> None:
    """Three of the tenant pass; then the user is not charged for the tenant's denial."""
    decider = Decider(limiter)
    for _ in range(3):
        assert passing(await decider.decide([DescriptorCheck(ANN), DescriptorCheck(ACME)])) == [
            True,
            True,
        ]
    assert passing(await decider.decide([DescriptorCheck(ANN), DescriptorCheck(ACME)])) == [
        True,
        False,
    ]
    assert (await left(limiter, ANN), await left(limiter, ACME)) == (2, 0)


async def test_zero_units_peek(limiter: AsyncLimiter) -> None:
    """They pass while there is room for one, and otherwise deny the whole call."""
    decider = Decider(limiter)
    assert passing(await decider.decide([DescriptorCheck(ACME, 0), DescriptorCheck(ANN)])) == [
        True,
        True,
    ]
    assert (await left(limiter, ANN), await left(limiter, ACME)) == (4, 3)
    await decider.decide([DescriptorCheck(ACME, 3)])
    assert passing(await decider.decide([DescriptorCheck(ACME, 0), DescriptorCheck(ANN)])) == [
        False,
        True,
    ]
    assert await left(limiter, ANN) == 4


async def test_a_descriptor_limit_replaces_the_rules(limiter: AsyncLimiter) -> None:
    """The rule is neither checked nor charged; the descriptor has its own count."""
    decider = Decider(limiter)
    found = [(await decider.decide([DescriptorCheck(ANN, 1, OWN)]))[0] for _ in range(3)]
    assert passing(found) == [True, True, False]
    assert found[0].applied[0].rule == "envoy.descriptor"
    assert await left(limiter, ANN) == 5
    assert passing(await decider.decide([DescriptorCheck(Request(user="bob"), 1, OWN)])) == [True]


async def test_a_descriptor_limit_keeps_consumption_when_it_changes(
    limiter: AsyncLimiter,
) -> None:
    """A limit that is raised from 2 to 3 an hour has one left, not three."""
    decider = Decider(limiter)
    await decider.decide([DescriptorCheck(ANN, 2, OWN)])
    found = [
        (await decider.decide([DescriptorCheck(ANN, 1, DescriptorLimit(3, HOUR_NS))]))[0]
        for _ in range(2)
    ]
    assert passing(found) == [True, False]


async def test_a_descriptor_limit_is_refunded_after_a_denial(limiter: AsyncLimiter) -> None:
    """If a rule denies, whatever the order."""
    decider = Decider(limiter)
    await decider.decide([DescriptorCheck(ACME, 3)])
    for _ in range(4):
        both = [DescriptorCheck(ANN, 1, OWN), DescriptorCheck(ACME)]
        assert passing(await decider.decide(both)) == [True, False]
        assert passing(await decider.decide(both[::-1])) == [False, True]
    assert (await decider.look(DescriptorCheck(ANN, 1, OWN))).decision.remaining == 2


async def test_a_rule_is_not_charged_if_a_descriptor_limit_denies(
    limiter: AsyncLimiter,
) -> None:
    """Of two descriptor limits, the first is refunded."""
    decider = Decider(limiter)
    bob = Request(user="bob")
    await decider.decide([DescriptorCheck(bob, 2, OWN)])
    asked = [DescriptorCheck(ACME), DescriptorCheck(ANN, 1, OWN), DescriptorCheck(bob, 1, OWN)]
    assert passing(await decider.decide(asked)) == [True, True, False]
    assert await left(limiter, ACME) == 3
    assert (await decider.look(DescriptorCheck(ANN, 1, OWN))).decision.remaining == 2


async def test_lists_have_priority_over_descriptor_limits(limiter: AsyncLimiter) -> None:
    """A blocked client stays blocked, and an exempt one is not counted."""
    decider = Decider(limiter)
    kinds = [
        (await decider.decide([DescriptorCheck(Request(user=name), 9, OWN)]))[0].kind
        for name in ("root", "mallory")
    ]
    assert kinds == ["exempt", "blocked"]


async def test_a_descriptor_limit_of_zero_blocks(limiter: AsyncLimiter) -> None:
    """0 an hour is a way to block."""
    found = await Decider(limiter).decide([DescriptorCheck(ANN, 1, DescriptorLimit(0, HOUR_NS))])
    assert (passing(found), found[0].kind) == ([False], "blocked")
    assert passing(
        await Decider(limiter).decide([DescriptorCheck(ANN, -1, DescriptorLimit(0, HOUR_NS))])
    ) == [False]


async def test_units_are_returned_at_the_end(limiter: AsyncLimiter) -> None:
    """If nothing is denied; never beyond an untouched quota, and never denied."""
    decider = Decider(limiter)
    await decider.decide([DescriptorCheck(ANN, 5)])
    assert passing(await decider.decide([DescriptorCheck(ANN, -2)])) == [True]
    assert await left(limiter, ANN) == 2
    await decider.decide([DescriptorCheck(ANN, -100)])
    assert await left(limiter, ANN) == 5
    await decider.decide([DescriptorCheck(ANN, 5), DescriptorCheck(ACME, 3)])
    assert passing(await decider.decide([DescriptorCheck(ANN, -2), DescriptorCheck(ACME)])) == [
        True,
        False,
    ]
    assert await left(limiter, ANN) == 0


async def test_a_settlement_spends_as_much_as_fits(limiter: AsyncLimiter) -> None:
    """It comes after the request, and is never denied."""
    decider = Decider(limiter)
    assert passing(await decider.decide([DescriptorCheck(ANN, 3, settles=True)])) == [True]
    assert await left(limiter, ANN) == 2
    assert passing(await decider.decide([DescriptorCheck(ANN, 9, settles=True)])) == [True]
    assert await left(limiter, ANN) == 0
    await decider.decide([DescriptorCheck(ANN, 9, OWN, settles=True)])
    assert (await decider.look(DescriptorCheck(ANN, 1, OWN))).decision.remaining == 0


async def test_a_cost_that_can_never_fit_charges_nothing(limiter: AsyncLimiter) -> None:
    """The caller gets the error, and earlier charges are refunded."""
    decider = Decider(limiter)
    with pytest.raises(CapacityError):
        await decider.decide(
            [DescriptorCheck(ANN, 1, OWN), DescriptorCheck(ANN), DescriptorCheck(ACME, 4)]
        )
    with pytest.raises(CapacityError):
        await decider.decide([DescriptorCheck(ANN), DescriptorCheck(ACME, 4)])
    with pytest.raises(InvalidKey):
        await decider.decide(
            [DescriptorCheck(ANN, 1, OWN), DescriptorCheck(Request(user="x" * 600))]
        )
    assert (await left(limiter, ANN), await left(limiter, ACME)) == (5, 3)
    assert (await decider.look(DescriptorCheck(ANN, 1, OWN))).decision.remaining == 2


async def test_the_cache_of_descriptor_limits_is_bounded() -> None:
    """New limits fill no memory; their counts are in the store."""
    async with AsyncLimiter.from_rules(RULES) as limiter:
        decider = Decider(limiter)
        for units in range(1, OVERRIDES_MAX + 50):
            await decider.look(DescriptorCheck(ANN, 1, DescriptorLimit(units, HOUR_NS)))
        assert len(decider._own) <= OVERRIDES_MAX


@pytest.mark.parametrize(
    ("on_failure", "kind", "allowed"), [("open", "limited", True), ("closed", "unavailable", False)]
)
async def test_the_failure_policy_decides_while_the_store_fails(
    on_failure: FailurePolicy, kind: str, allowed: bool
) -> None:
    """For rules and for descriptor limits, alone and together."""
    store = f"redis://{HOST}:{free_port()}"
    async with AsyncLimiter.from_rules(RULES, store=store, on_failure=on_failure) as limiter:
        decider = Decider(limiter, on_failure)
        own = DescriptorCheck(ANN, 1, OWN)
        for checks in (
            [DescriptorCheck(ANN)],
            [DescriptorCheck(ANN), DescriptorCheck(ACME)],
            [own],
            [DescriptorCheck(ANN, 0)],
            [DescriptorCheck(ANN, -1)],
        ):
            found = await decider.decide(checks)
            assert [(each.kind, each.decision.allowed) for each in found] == [
                (kind, allowed)
            ] * len(checks)
            assert all(each.decision.degraded for each in found)


async def test_on_failure_raise_raises() -> None:
    """The caller gets the error."""
    store = f"redis://{HOST}:{free_port()}"
    async with AsyncLimiter.from_rules(RULES, store=store, on_failure="raise") as limiter:
        for asked in (
            [DescriptorCheck(ANN)],
            [DescriptorCheck(ANN, 1, OWN)],
            [DescriptorCheck(ANN, 0)],
        ):
            with pytest.raises(StoreError):
                await Decider(limiter, "raise").decide(asked)


async def test_a_descriptor_limit_refills() -> None:
    """After the time in retry_after, one request passes."""
    clock = ManualClock()
    async with AsyncLimiter.from_rules(RULES, clock=clock) as limiter:
        decider = Decider(limiter)
        await decider.decide([DescriptorCheck(ANN, 2, OWN)])
        denied = (await decider.decide([DescriptorCheck(ANN, 1, OWN)]))[0].decision
        clock.advance_ns(denied.retry_after_ns - 1)
        assert passing(await decider.decide([DescriptorCheck(ANN, 1, OWN)])) == [False]
        clock.advance_ns(1)
        assert passing(await decider.decide([DescriptorCheck(ANN, 1, OWN)])) == [True]


UNITS = {
    "version": 1,
    "rules": [
        {"id": "requests", "by": ["user"], "limits": ["5/hour"]},
        {"id": "tokens", "by": ["user"], "unit": "tokens", "limits": ["1000/hour"]},
    ],
}


async def test_a_descriptor_counts_the_unit_that_it_names() -> None:
    """Requests before the stream, tokens at its end; rules of another unit count nothing."""
    limiter = AsyncLimiter.from_rules(UNITS)
    decider = Decider(limiter)

    async def left_by_rule() -> list[int]:
        return [
            (await limiter.peek_rule(each._replace(units=0))).remaining
            for each in limiter.compiled_rules.plan(ANN, 1).checks
        ]

    tokens = DescriptorCheck(ANN, 400, unit="tokens")
    checks = [DescriptorCheck(ANN, unit="requests"), tokens]
    assert passing(await decider.decide(checks)) == [True, True]
    assert await left_by_rule() == [4, 600]
    (ended,) = await decider.decide([tokens._replace(units=500, settles=True)])
    assert ended.decision.allowed
    assert await left_by_rule() == [4, 100]
    assert passing(await decider.decide(checks)) == [True, False]
    assert await left_by_rule() == [4, 100]
    await decider.decide([tokens._replace(units=-300)])
    assert await left_by_rule() == [4, 400]
    with pytest.raises(InvalidCost, match='no limit counts "token"; did you mean "tokens"'):
        await decider.decide([DescriptorCheck(ANN, unit="token")])
