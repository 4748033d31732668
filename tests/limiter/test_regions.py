"""`scope` of limiters and rules: the same verbs and answers, counted across regions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Fleet,
    Limiter,
    LocalFallback,
    Regions,
    Request,
    StoreUnavailable,
    open_store,
)
from ratekeeper.fleet.store import FleetStore
from ratekeeper.regions.store import RegionStore
from ratekeeper.testing import ManualClock
from tests.regions.stores import RegionalStore, two_regions

KEY = "user:42"
TABLE = {"eu": "redis://eu.internal", "us": "redis://us.internal"}
EU = Regions("eu", TABLE)
ANNA = Request(user="anna")


class Calls:
    """A limiter of either kind, whose calls are made in this thread."""

    def __init__(self, kind: Callable[..., Any], store: RegionStore, clock: ManualClock) -> None:
        self.kind = kind
        self.clock = clock
        self.store = store

    def limiter(self, limits: str, **more: Any) -> Any:
        """Return a limiter."""
        return self.kind(limits, store=self.store, clock=self.clock, **more)

    def rules(self, rules: str, **more: Any) -> Any:
        """Return a limiter from rules."""
        text = f"{{version: 1, rules: [{rules}]}}"
        make = self.kind.from_rules  # type: ignore[attr-defined]  # of a limiter
        return make(text, store=self.store, clock=self.clock, follow=False, **more)

    def __call__(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found


@pytest.fixture(params=[Limiter, AsyncLimiter])
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    """A node in eu."""
    clock = ManualClock(6_000)
    store, _, _ = two_regions(clock)
    yield Calls(request.param, store, clock)
    store.close()


def test_all_verbs_of_a_global_limiter(calls: Calls) -> None:
    """Check, peek, evaluate, settle, refund, grant, reset and wait."""
    limiter = calls.limiter("10/minute", scope="global", name="api")
    decision = calls(limiter.check, KEY, 4)
    assert (decision.allowed, decision.remaining, decision.rule) == (True, 6, "api")
    assert calls(limiter.peek, KEY).remaining == 6
    assert calls(limiter.settle, KEY, 4, 7, decision).charged == 7
    assert calls(limiter.peek, KEY).remaining == 3
    assert calls(limiter.settle, KEY, 4, 9, decision).forgiven == 2  # it owes nothing
    calls(limiter.refund, KEY, 4, decision)
    assert calls(limiter.peek, KEY).remaining == 4
    calls(limiter.grant, KEY, 2)
    assert calls(limiter.peek, KEY).remaining == 6
    calls(limiter.reset, KEY)
    assert calls(limiter.evaluate, KEY, 10).decision.allowed
    assert not calls(limiter.check, KEY).allowed
    assert calls(limiter.wait, KEY, timeout=60).allowed
    results = calls(limiter.evaluate_all, [("a", 3), ("b", 3)])
    assert [each.decision.allowed for each in results] == [True, True]


def test_further_charges_go_to_all_limits_of_a_global_rule(calls: Calls) -> None:
    """They are counted together: a counter of one of them would have other counts."""
    limiter = calls.rules("{id: r, by: user, limits: [10/minute, 100/hour], scope: global}")
    decision = calls(limiter.check, ANNA, 2)
    assert calls(limiter.settle, ANNA, 2, 6, decision).charged == 6
    assert calls(limiter.peek, ANNA).remaining == 4
    assert calls(limiter.settle, ANNA, 2, 9, decision).forgiven == 3
    assert calls(limiter.peek, ANNA, 0).remaining == 0


@pytest.mark.parametrize("across", ["exact", "eventual"])
def test_rules_of_both_scopes_pass_together(calls: Calls, across: str) -> None:
    """A request that the global rule denies costs the regional one nothing, and the other way."""
    limiter = calls.rules(
        "{id: r, by: user, match: {user: '*'}, limits: 7/minute},"
        "{id: g, by: tenant, match: {tenant: '*'}, limits: 8/minute,"
        f" scope: global, across_regions: {across}}}"
    )
    anna, bert = Request(user="anna", tenant="t"), Request(user="bert", tenant="t")
    room = 4 if across == "exact" else 8
    assert calls(limiter.check, anna, 3).allowed
    denied = calls(limiter.check, bert, room - 2)
    assert (denied.allowed, denied.rule) == (False, "g")
    assert calls(limiter.peek, Request(user="bert"), 0).remaining == 7
    for _ in range(2):
        calls(limiter.check, Request(user="anna"), 2)
    denied = calls(limiter.check, anna, 1)
    assert (denied.allowed, denied.rule) == (False, "r")
    assert calls(limiter.peek, Request(tenant="t"), 0).remaining == room - 3
    counts = limiter.counts()
    assert (counts["r"].denied, counts["g"].denied) == (1, 1)


def test_shadow_split_and_penalty_rules_can_be_global(calls: Calls) -> None:
    """A shadow rule never denies; a split rule counts in parts; a penalty is of this region."""
    limiter = calls.rules(
        "{id: s, by: user, match: {user: '*'}, limits: 1/minute, scope: global, mode: shadow},"
        "{id: p, by: tenant, match: {tenant: '*'}, limits: 8/minute, scope: global, split: 2},"
        "{id: x, by: api_key, match: {api_key: '*'}, limits: 1/minute, scope: global,"
        " penalty: {after: 2, cooldown: 20}}"
    )
    results = [calls(limiter.evaluate, ANNA) for _ in range(3)]
    assert [each.decision.allowed for each in results] == [True] * 3
    assert [each.shadow_denied for each in results] == [(), ("s",), ("s",)]
    allowed = sum(calls(limiter.check, Request(tenant="t")).allowed for _ in range(30))
    assert 4 <= allowed <= 8
    answers = [calls(limiter.check, Request(api_key="k")) for _ in range(6)]
    assert [each.allowed for each in answers] == [True] + [False] * 5
    assert answers[-1].penalty is not None
    calls(limiter.reset, Request(api_key="k"))
    assert calls(limiter.check, Request(api_key="k")).allowed


@pytest.mark.parametrize(
    ("policy", "allowed"), [("open", [True] * 6), ("closed", [False] * 6), ("local", [True, True])]
)
def test_the_failure_policy_answers_if_the_regions_redis_fails(
    calls: Calls, policy: Any, allowed: list[bool]
) -> None:
    """A local fallback has the share of this region: here half of the limit."""
    limiter = calls.rules(
        f"{{id: g, by: user, limits: 4/minute, scope: global, on_failure: {policy}}}",
        local_fallback=LocalFallback(nodes=1),
    )
    calls.store.regional._shares = None  # type: ignore[attr-defined]  # the reference: no shares
    answers = [calls(limiter.check, ANNA) for _ in range(6)]
    assert all(each.degraded for each in answers)
    assert [each.allowed for each in answers] == allowed + [False] * (6 - len(allowed))
    own = calls.limiter("4/minute", scope="global", on_failure=policy)
    assert [calls(own.check, KEY).allowed for _ in range(6)] == [each.allowed for each in answers]


def test_a_store_of_another_limiter_keeps_its_regions() -> None:
    """The same regions may be passed again; others are an error."""
    clock = ManualClock()
    store, _, _ = two_regions(clock)
    first = Limiter("5/minute", store=store, clock=clock, scope="global")
    assert Limiter("5/minute", store=first.store, regions=EU, scope="global").store is store
    node = Limiter("5/minute", store=store, regions=EU, fleet=Fleet(nodes=2))
    assert isinstance(node.store, FleetStore)
    assert Limiter("5/minute", store=node.store, regions=EU, scope="global").store is node.store
    with pytest.raises(ConfigError, match="with other regions; omit regions, or omit store"):
        Limiter("5/minute", store=store, regions=Regions("us", TABLE))
    alone = FleetStore(RegionalStore(clock), Fleet(), clock)
    with pytest.raises(ConfigError, match="without regions; omit regions, or omit store"):
        Limiter("5/minute", store=alone, regions=EU)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scope": "global"}, r'scope="global" does not work without regions: .*Regions\("eu"'),
        ({"scope": "planet"}, r"scope='planet' is not known; choose one of region, global"),
        ({"across_regions": "exact"}, r"no effect on a limit of one region"),
        ({"regions": "eu"}, r"regions='eu' is not a Regions"),
        (
            {"regions": EU, "store": "redis://other"},
            r"store has no effect with regions.*'eu'.*omit",
        ),
        (
            {"regions": EU, "scope": "global", "consistency": "leased"},
            r"'leased' does not work with scope=\"global\"",
        ),
    ],
)
@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_wrong_arguments_are_refused(kind: Any, arguments: dict[str, Any], says: str) -> None:
    """At the start; the error says what would be right."""
    with pytest.raises(ConfigError, match=says):
        kind("5/minute", **arguments)


def test_an_exact_limit_needs_a_unit_for_each_region() -> None:
    """For limits and for rules, at the start and when other rules are put in force."""
    clock = ManualClock()
    store, _, _ = two_regions(clock)
    says = "a limit of 1 is less than one unit for the region"
    with pytest.raises(ConfigError, match=rf"limiter api: {says}"):
        Limiter("1/minute", store=store, name="api", scope="global", across_regions="exact")
    rules = (
        "{version: 1, rules: [{id: r, by: user, limits: %s, scope: global, across_regions: exact}]}"
    )
    with pytest.raises(ConfigError, match=rf"rule r.limits: {says}"):
        Limiter.from_rules(rules % "1/minute", store=store)
    limiter = Limiter.from_rules(rules % "2/minute", store=store)
    with pytest.raises(ConfigError, match=says):
        limiter.use(rules % "1/minute")
    assert limiter.check(ANNA).allowed


def test_a_global_rule_without_regions_is_refused_at_the_start() -> None:
    """The error names the rule and what is missing; also for a store that could be a region."""
    rules = "{version: 1, rules: [{id: r, by: user, limits: 5/s, scope: global}]}"
    for store in ("memory://", open_store("redis://localhost:1")):
        says = r'rule r: scope: global does not work without regions: .*regions=Regions\("eu"'
        with pytest.raises(ConfigError, match=says):
            Limiter.from_rules(rules, store=store)
    limiter = Limiter.from_rules("{version: 1, rules: []}")
    with pytest.raises(ConfigError, match="rule r: scope"):
        limiter.use(rules)


def test_a_failed_reset_is_an_error(calls: Calls) -> None:
    """The caller hears which region was not reached."""

    def fail(_: Any) -> None:
        raise StoreUnavailable("no route")

    calls.store._links["us"].regional.reset = fail  # type: ignore[union-attr]  # the reference
    limiter = calls.limiter("10/minute", scope="global")
    with pytest.raises(StoreUnavailable, match="not in us"):
        calls(limiter.reset, KEY)
