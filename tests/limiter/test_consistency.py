"""`consistency` of limiters and of rules: the same verbs and answers, fewer calls of the store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Fleet,
    Limiter,
    LimitExceeded,
    Request,
    StoreUnavailable,
)
from ratekeeper.core.model import CONSISTENCIES, Consistency
from ratekeeper.fleet.store import FleetStore
from ratekeeper.testing import ManualClock
from tests.fleet.nodes import SharedStore
from tests.redis_servers.waiting import until

KEY = "user:42"


def leased(
    limits: str = "1000/hour", consistency: Consistency = "leased", **more: Any
) -> tuple[ManualClock, SharedStore, Limiter]:
    """Return a limiter whose checks the node answers where it can."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    limiter = Limiter(limits, store=shared, clock=clock, consistency=consistency, **more)
    return clock, shared, limiter


def asked(limiter: Limiter | AsyncLimiter) -> int:
    """Return how many checks the authority decided."""
    store = limiter.store
    assert isinstance(store, FleetStore)
    assert store.node is not None
    return sum(each.asked for each in store.node.answers().values())


@pytest.mark.parametrize("consistency", ["leased", "eventual"])
def test_most_checks_of_a_limiter_ask_nobody(consistency: Consistency) -> None:
    """Every check is counted once, whoever answers it."""
    _, shared, limiter = leased("10000/hour", consistency)
    with limiter:
        for _ in range(500):
            assert limiter.check(KEY).allowed
        assert asked(limiter) < 40
        assert limiter.peek(KEY).remaining == 9_500
        assert limiter.counts()["default"].allowed == 500
        assert limiter.consistency == consistency
    strict = Limiter("10000/hour", store=shared, clock=limiter.clock)
    assert strict.peek(KEY).remaining == 9_500


def test_asyncio_answers_the_same() -> None:
    """AsyncLimiter takes the same arguments."""
    clock = ManualClock(1_000)

    async def main() -> None:
        async with AsyncLimiter(
            "10000/hour", store=SharedStore(clock), clock=clock, consistency="leased", fleet=Fleet()
        ) as limiter:
            for _ in range(100):
                assert (await limiter.check(KEY)).allowed
            assert asked(limiter) < 20
            assert (await limiter.peek(KEY)).remaining == 9_900

    asyncio.run(main())


def test_the_verbs_of_a_leased_limiter() -> None:
    """refund, settle, grant, reset, reserve and wait work as on any store."""
    clock, _, limiter = leased()
    for _ in range(10):
        decision = limiter.check(KEY)
    limiter.refund(KEY, 1, decision)
    assert limiter.peek(KEY).remaining == 991
    decision = limiter.check(KEY, 5)
    assert limiter.settle(KEY, 5, 2, decision).charged == 2
    given_back = "the replaced lease is given back"
    until(lambda: limiter.peek(KEY).remaining == 989, given_back, 20)
    assert limiter.settle(KEY, 0, 980).charged == 980
    until(lambda: limiter.peek(KEY).remaining == 9, given_back, 20)
    assert limiter.settle(KEY, 0, 20).charged == 20
    assert limiter.peek(KEY, 1).retry_after > 11 * 3.6
    limiter.grant(KEY, 3)
    with limiter.reserve(KEY, 3):
        pass
    with pytest.raises(LimitExceeded), limiter.reserve(KEY):
        pass
    assert limiter.wait(KEY, 1, timeout=60).allowed
    limiter.reset(KEY)
    assert limiter.peek(KEY).remaining == 1000
    clock.advance(1)
    limiter.close()


@pytest.mark.parametrize("uri", ["memory://", "shared:///{path}/limits"])
def test_a_store_that_machines_do_not_share_is_refused(uri: str, tmp_path: Any) -> None:
    """At the start, with the reason; for limits and for rules."""
    store = uri.replace("/{path}", str(tmp_path))
    for consistency in ("leased", "eventual"):
        with pytest.raises(ConfigError, match=r"does not work here: .*redis://localhost"):
            Limiter("5/minute", store=store, consistency=consistency)
        rules = "{version: 1, rules: [{id: r, by: user, limits: 5/s, consistency: %s}]}"
        rules %= consistency
        with pytest.raises(ConfigError, match=rf"rule r: consistency: {consistency} does not work"):
            Limiter.from_rules(rules, store=store)
        strict = Limiter.from_rules(rules.replace(consistency, "strict"), store=store)
        with pytest.raises(ConfigError, match="does not work here"):
            strict.use(rules)
        assert strict.check(Request(user="a")).allowed
        strict.close()


def test_wrong_arguments_are_refused() -> None:
    """The error says what would be right."""
    with pytest.raises(ConfigError, match="'lazy' is not known; choose one of strict, leased"):
        Limiter("5/minute", consistency="lazy")  # type: ignore[arg-type]  # wrong
    with pytest.raises(ConfigError, match="fleet=3 is not a Fleet"):
        Limiter("5/minute", fleet=3)  # type: ignore[arg-type]  # wrong
    with pytest.raises(ConfigError, match="fleet=3 is not a Fleet"):
        Limiter.from_rules("{version: 1, rules: []}", fleet=3)  # type: ignore[arg-type]  # wrong


def test_a_table_that_cannot_be_opened_is_an_error_at_the_start() -> None:
    """Not at the first check of a rule."""
    clock = ManualClock()
    fleet = Fleet(store="shared:///nowhere/at/all")
    with pytest.raises((ConfigError, StoreUnavailable)):
        Limiter("5/minute", store=SharedStore(clock), consistency="leased", fleet=fleet)
    rules = "{version: 1, rules: [{id: r, by: user, limits: 5/m, consistency: leased}]}"
    with pytest.raises((ConfigError, StoreUnavailable)):
        Limiter.from_rules(rules, store=SharedStore(clock), fleet=fleet)


# ── Rules ──────────────────────────────────────────────────────────────────────────────────────

MIXED = """
version: 1
tiers: {default: 1000/hour}
rules:
  - {id: user, by: user, limits: 10000/hour, consistency: %s}
  - {id: tenant, by: tenant, limits: 10000/hour, consistency: %s}
  - {id: all, by: [], limits: 100/hour, consistency: %s}
  - {id: tried, by: user, limits: 5/hour, mode: shadow, consistency: leased}
  - {id: parts, by: ip, limits: 8000/hour, split: 4, consistency: leased}
"""
REQUEST = Request(user="42", tenant="acme", ip="192.0.2.7")


@pytest.mark.parametrize(
    "consistency",
    [CONSISTENCIES, CONSISTENCIES[::-1], ("leased", "eventual", "leased"), ("leased",) * 3],
)
def test_rules_of_any_consistency_pass_together_or_cost_nothing(
    consistency: tuple[Consistency, ...],
) -> None:
    """Also with rules in shadow mode, split rules and a refund; the strict view agrees after."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    limiter = Limiter.from_rules(MIXED % consistency, store=shared, clock=clock)
    decisions = [limiter.check(REQUEST) for _ in range(130)]
    allowed = [each for each in decisions if each.allowed]
    assert len(allowed) == 100
    limiter.refund(REQUEST, 1, allowed[-1])
    limiter.close()
    strict = Limiter.from_rules(MIXED % (("strict",) * 3), store=shared, clock=clock)
    explained = strict.explain(REQUEST).rules
    left = {each.id: each.decision.remaining for each in explained if each.decision is not None}
    assert (left["user"], left["tenant"], left["all"]) == (9_901, 9_901, 1)
    assert left["parts"] == 8_000 - 99
    assert left["tried"] == 0


@given(
    consistency=st.tuples(*[st.sampled_from(CONSISTENCIES)] * 3),
    costs=st.lists(st.integers(0, 9), max_size=40),
    policy=st.sampled_from(["open", "closed", "raise"]),
    failing=st.frozensets(st.integers(0, 39)),
)
def test_failures_charge_all_rules_or_none(
    consistency: tuple[Consistency, ...], costs: list[int], policy: Any, failing: frozenset[int]
) -> None:
    """An authority that is away at times: no rule is charged without the others."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    rules = MIXED % consistency
    limiter = Limiter.from_rules(rules, store=shared, clock=clock, on_failure=policy)
    used = 0
    for at, cost in enumerate(costs):
        shared.controlled.fails = StoreUnavailable("away") if at in failing else None
        try:
            decision = limiter.check(REQUEST, cost)
        except StoreUnavailable:
            continue
        if decision.allowed and not decision.degraded:
            used += cost
    shared.controlled.fails = None
    store = limiter.store
    assert isinstance(store, FleetStore)
    assert store.node is not None
    counters = store.node.counters
    lost = counters.lost_units
    limiter.close()
    strict = Limiter.from_rules(MIXED % (("strict",) * 3), store=shared, clock=clock)
    left = {each.id: each.decision for each in strict.explain(REQUEST).rules}
    for rule, whole in (("user", 10_000), ("tenant", 10_000), ("all", 100)):
        decision = left[rule]
        assert decision is not None
        assert whole - used - lost - counters.lost_units <= decision.remaining
        if policy != "open":
            # An eventual rule may be over by what could not be reported while the store was away.
            over = whole // 4 if "eventual" in consistency else 0
            assert used <= whole + over
            assert decision.remaining <= max(whole - used, 0)


def test_penalties_work_with_leased_rules() -> None:
    """The cool-down is kept at the authority: every node sees it."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    rules = """
    version: 1
    rules:
      - {id: r, by: user, limits: 3/minute, consistency: leased, penalty: {after: 2, cooldown: 60s}}
    """
    one, two = (Limiter.from_rules(rules, store=shared, clock=clock) for _ in range(2))
    for _ in range(8):
        decision = one.check(REQUEST)
    assert decision.penalty == "cooldown"
    assert two.check(REQUEST).penalty == "cooldown"
    one.close()
    two.close()


def test_a_lower_limit_holds_on_every_node_within_one_lease_lifetime() -> None:
    """A lease of the old limits is spent at most until it ends."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    rules = "{version: 1, rules: [{id: r, by: user, limits: %s/hour, consistency: leased}]}"
    one, two = (Limiter.from_rules(rules % 1000, store=shared, clock=clock) for _ in range(2))
    for _ in range(20):
        assert one.check(REQUEST).allowed
        assert two.check(REQUEST).allowed
    one.use(rules % 30)
    two.use(rules % 30)
    clock.advance(1.01)
    assert not one.check(REQUEST).allowed
    assert not two.check(REQUEST).allowed
    one.close()
    two.close()


def test_a_document_may_become_leased_and_strict_again() -> None:
    """The limiter needs no restart, and units of leases go back."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    rules = "{version: 1, rules: [{id: r, by: user, limits: 1000/hour, consistency: %s}]}"
    limiter = Limiter.from_rules(rules % "strict", store=shared, clock=clock)
    limiter.check(REQUEST)
    limiter.use(rules % "leased")
    for _ in range(10):
        limiter.check(REQUEST)
    limiter.use(rules % "strict")
    assert limiter.check(REQUEST).allowed
    limiter.close()
    after = Limiter.from_rules(rules % "strict", store=shared, clock=clock)
    assert after.peek(REQUEST).remaining == 1000 - 12


def test_explain_tells_the_consistency() -> None:
    """That of the rule, or of the tier or key that applies."""
    clock = ManualClock(1_000)
    rules = """
    version: 1
    tiers: {default: 5/minute, pro: {limits: 9/minute, consistency: eventual}}
    rules: [{id: r, by: user, consistency: leased}]
    """
    limiter = Limiter.from_rules(rules, store=SharedStore(clock), clock=clock)
    [rule] = limiter.explain(Request(user="a")).rules
    assert rule.consistency == "leased"
    [rule] = limiter.explain(Request(user="a", tier="pro")).rules
    assert rule.consistency == "eventual"
    limiter.close()


def test_two_limiters_can_share_the_node() -> None:
    """`limiter.store` has the same table, and closing one does not close the other."""
    _, _, one = leased()
    two = Limiter("1000/hour", store=one.store, clock=one.clock, consistency="leased")
    for _ in range(10):
        one.check(KEY)
    before = asked(one)
    assert two.check(KEY).allowed
    assert asked(one) == before
    two.close()
    assert one.check(KEY).allowed
    one.close()
