"""Split limits: the parts add up to the whole, and never admit more."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import AsyncLimiter, CapacityError, Limit, Limiter, Request
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS
from ratekeeper.decide.regional import RegionalUsage, RegionPart
from ratekeeper.decide.store import Store
from ratekeeper.rules.splitting import part_count, part_limits, shares_of, usage_of_parts
from ratekeeper.testing import ManualClock
from tests.promises.strategies import limits as any_limits
from tests.redis_servers import running

RULES = "version: 1\nrules:\n  - {id: hot, by: user, limits: %s, split: %d}\n"
ANN = Request(user="ann")


@given(limit=st.sampled_from(UNIT_ALGORITHMS).flatmap(any_limits), split=st.integers(1, 64))
def test_the_parts_add_up_to_the_whole(limit: Limit, split: int) -> None:
    """The rates add up, and so do the capacities of buckets."""
    parts = part_count([limit], split)
    shares = [part_limits([limit], parts, part)[0] for part in range(parts)]
    assert sum(each.limit for each in shares) == limit.limit
    assert min(each.limit for each in shares) >= 1
    assert {(each.algorithm, each.window_ns, each.name) for each in shares} == {
        (limit.algorithm, limit.window_ns, limit.name)
    }
    if limit.algorithm in BUCKETS:
        assert sum(each.capacity for each in shares) <= limit.capacity
    # A limit keeps its counts if only its numbers change.
    assert {each.identity for each in shares} == {limit.identity}


@given(units=st.integers(0, 10**9), parts=st.integers(1, 64))
def test_grants_are_spread_over_the_parts(units: int, parts: int) -> None:
    """The shares add up to the grant and differ by at most one unit."""
    spread = shares_of(units, parts)
    assert sum(spread) == units
    assert max(spread) - min(spread) <= 1


def test_all_parts_together_admit_exactly_the_limit(store: Store, clock: ManualClock) -> None:
    """With enough requests, every part admits its share: the limit, and not one more."""
    with Limiter.from_rules(RULES % ("100/minute", 8), store=store, clock=clock) as limiter:
        assert sum(bool(limiter.check(ANN)) for _ in range(3_000)) == 100
        clock.advance(60)
        assert sum(bool(limiter.check(ANN)) for _ in range(3_000)) == 100


async def test_all_parts_together_admit_exactly_the_limit_on_asyncio(
    store: Store, clock: ManualClock
) -> None:
    """Concurrent checks on asyncio admit the limit, and not one more."""
    limiter = AsyncLimiter.from_rules(RULES % ("100/minute", 8), store=store, clock=clock)
    found = await asyncio.gather(*(limiter.check(ANN) for _ in range(2_000)))
    assert sum(map(bool, found)) == 100
    assert (await limiter.peek(ANN)).remaining == 0
    await limiter.reset(ANN)
    assert (await limiter.peek(ANN)).remaining == 100
    await limiter.grant(ANN, 20)
    found = await asyncio.gather(*(limiter.check(ANN) for _ in range(2_000)))
    assert sum(map(bool, found)) == 120
    await limiter.close()


def test_under_the_limit_few_are_denied(clock: ManualClock) -> None:
    """At nine tenths of a limit of 10,000 in 4 parts, chance rarely overloads a part."""
    with Limiter.from_rules(RULES % ("10000/minute", 4), clock=clock) as limiter:
        denied = 0
        for _ in range(9_000):
            clock.advance(60 / 9_000)
            denied += not limiter.check(ANN)
        assert denied == 0


def test_a_peek_reports_the_whole_limit(store: Store, clock: ManualClock) -> None:
    """Peek, explain and the limit of a decision cover all parts together."""
    with Limiter.from_rules(RULES % ("100/minute", 8), store=store, clock=clock) as limiter:
        for _ in range(10):
            ruling = limiter.evaluate(ANN)
            assert ruling.decision.limit == 100
            assert ruling.decision.policy in ruling.applied[0].limits
            assert 0 < ruling.decision.remaining <= 100
        assert limiter.peek(ANN).remaining == 90
        explained = limiter.explain(ANN).applying[0]
        assert (explained.subject, explained.limits) == ("user:ann", (Limit(100, per=60),))
        assert explained.decision is not None
        assert explained.decision.remaining == 90


def test_every_verb_reaches_every_part(store: Store, clock: ManualClock) -> None:
    """Reset and grant reach all parts. A refund goes to one part and never exceeds its quota."""
    with Limiter.from_rules(RULES % ("10/minute", 4), store=store, clock=clock) as limiter:
        assert sum(bool(limiter.check(ANN)) for _ in range(300)) == 10
        limiter.refund(ANN, 1)
        assert limiter.peek(ANN).remaining == 1
        limiter.reset(ANN)
        assert limiter.peek(ANN).remaining == 10
        limiter.refund(ANN, 2)
        assert limiter.peek(ANN).remaining == 10
        limiter.grant(ANN, 6)
        assert sum(bool(limiter.check(ANN)) for _ in range(300)) == 16


def test_a_grant_is_on_top_of_the_whole_limit(store: Store, clock: ManualClock) -> None:
    """A peek has the limit, the granted units and what remains of both over all parts."""
    with Limiter.from_rules(RULES % ("16/minute", 4), store=store, clock=clock) as limiter:
        limiter.grant(ANN, 8)
        peeked = limiter.peek(ANN)
        assert (peeked.limit, peeked.granted, peeked.remaining) == (24, 8, 24)
        checked = limiter.check(ANN)
        assert checked.remaining <= checked.limit == 24


def test_the_part_that_was_charged_owes_a_settled_cost(clock: ManualClock) -> None:
    """The others go on; the bound of each part is its share."""
    with Limiter.from_rules(RULES % ("40/minute debt 80", 4), clock=clock) as limiter:
        decision = limiter.check(ANN)
        assert limiter.settle(ANN, 1, 35, decision).charged == 30
        assert limiter.peek(ANN).remaining == 30


def test_every_part_has_at_least_one_unit(clock: ManualClock) -> None:
    """A limit of 3 has at most three parts; a limit of 1 is not split."""
    for limit in (1, 3):
        with Limiter.from_rules(RULES % (f"{limit}/minute", 64), clock=clock) as limiter:
            assert sum(bool(limiter.check(ANN)) for _ in range(500)) == limit


def test_a_cost_has_to_fit_a_part(clock: ManualClock) -> None:
    """A part holds less than the whole. The error has the capacity of the part."""
    with Limiter.from_rules(RULES % ("100/minute", 10), clock=clock) as limiter:
        assert limiter.check(ANN, 10)
        with pytest.raises(CapacityError, match="holds 10 at most"):
            limiter.check(ANN, 11)


def test_every_part_has_a_separate_key() -> None:
    """The load of one subject spreads over several keys."""
    server = running("single")
    server.flush()
    with Limiter.from_rules(
        RULES % ("1000000/minute", 4), store=f"{server.uri}?deadline_ms=10000"
    ) as limiter:
        for _ in range(400):
            assert limiter.check(ANN)
    assert len(server.admin.keys("rk:*")) == 4


def test_the_steps_of_a_part_fit_its_capacity() -> None:
    """A part of a bucket that is refilled in steps keeps them, or has shorter ones."""
    whole = Limit(10, per=1, capacity=5, refill_every=0.5)
    parts = [part_limits([whole], 4, part)[0] for part in range(4)]
    assert [(each.limit, each.capacity) for each in parts] == [(3, 2), (3, 1), (2, 1), (2, 1)]
    assert [each.refill_every for each in parts] == [0.5, 0.333333, 0.5, 0.5]


def test_the_usage_of_parts_is_that_of_the_whole() -> None:
    """Units of a region are summed; its age is that of the oldest part."""
    parts = [
        RegionalUsage((3, 4), (1, 1), (RegionPart("", 3, 0), RegionPart("us", 2, 5))),
        RegionalUsage((10, 20), (0, 2), (RegionPart("", 1, 0), RegionPart("us", 4, 9))),
    ]
    assert usage_of_parts(parts, "eu") == RegionalUsage(
        (13, 24), (1, 3), (RegionPart("eu", 4, 0), RegionPart("us", 6, 9))
    )
