"""Explanations: for every rule, whether it applies to a request and why."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ratekeeper import AsyncLimiter, Limiter, Request
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.rules.compiled import CompiledRules
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.explain import explain
from ratekeeper.testing import ManualClock
from tests.regions.stores import two_regions

DOCUMENT = """
version: 1
tiers: {free: 10/minute, pro: 20/minute}
assign: {"user:7": pro}
rules:
  - {id: writes, match: {method: [POST, PUT]}, by: user, limits: 1/minute}
  - {id: eu, match: {attributes: {region: "eu-*"}}, by: user, limits: 2/minute}
  - {id: rollout, by: user, limits: 3/minute, rollout: 0}
  - {id: gone, by: user, limits: 3/minute, mode: "off"}
  - {id: orders, match: {endpoint: "/v1/orders/*"}, by: user, limits: 4/minute, cost: 2}
  - {id: rest, by: user, limits: 5/minute}
  - {id: tried, by: user, limits: 6/minute, mode: shadow}
  - {id: tiered, by: tenant}
  - {id: keyed, by: api_key, limits: 7/minute, keys: {"sk_*": 8/minute}}
allow: ["ip:10.0.0.0/8"]
deny: ["user:mallory"]
overrides:
  - for: {user: boss}
    rule: orders
    limits: 99/minute
    until: 2030-01-01T00:00:00Z
    reason: launch week
    author: ops@shop.example
"""
ORDER = Request(user="42", endpoint="/v1/orders/9", method="GET")


@pytest.fixture
def limiter() -> Limiter:
    return Limiter.from_rules(DOCUMENT, clock=ManualClock(start=1_800_000_000))


@pytest.mark.parametrize(
    ("rule", "applies", "why"),
    [
        ("writes", False, "method 'GET' does not match POST, PUT"),
        ("eu", False, "the request has no region"),
        ("rollout", False, "its rollout of 0 % does not reach this subject"),
        ("gone", False, "it is off"),
        ("orders", True, "all its conditions hold"),
        ("rest", False, "rule orders counts by the same and goes first"),
        ("tried", True, "all its conditions hold"),
        ("tiered", False, "it has no limits for requests without a tier"),
        ("keyed", True, "all its conditions hold"),
    ],
)
def test_every_rule_is_explained(limiter: Limiter, rule: str, applies: bool, why: str) -> None:
    """Rules are explained in the order of the document, each with a reason."""
    explanation = limiter.explain(ORDER)
    found = {each.id: each for each in explanation.rules}
    assert list(found) == [each.id for each in limiter.compiled_rules.document.rules]
    assert (found[rule].applies, found[rule].why) == (applies, why)
    assert (found[rule].decision is not None) is applies
    assert [each.id for each in explanation.applying] == ["orders", "tried", "keyed"]


@pytest.mark.parametrize(
    ("request_", "rule", "why"),
    [
        (Request(endpoint="/v2"), "orders", "endpoint '/v2' does not match /v1/orders/*"),
        (Request(), "orders", "endpoint None does not match /v1/orders/*"),
        (Request(attributes={"region": "us"}), "eu", "region 'us' does not match eu-*"),
        (Request(tier="x"), "tiered", "it has no limits for tier x"),
        (Request(user="mallory"), "rest", "user:mallory on the deny list goes before all rules"),
        (Request(ip="10.9.9.9"), "rest", "ip:10.0.0.0/8 on the allow list goes before all rules"),
    ],
)
def test_reasons(limiter: Limiter, request_: Request, rule: str, why: str) -> None:
    """A reason names the condition that fails and the values that it expects."""
    [found] = [each for each in limiter.explain(request_).rules if each.id == rule]
    assert (found.applies, found.why) == (False, why)


def test_the_decision_and_the_cost_of_a_rule(limiter: Limiter) -> None:
    """Limits, subject and units, and the decision that a check would get now."""
    limiter.check(ORDER)
    [orders] = [each for each in limiter.explain(ORDER, cost=2).rules if each.id == "orders"]
    assert (orders.by, orders.mode, orders.subject, orders.units) == (
        ("user",),
        "enforce",
        "user:42",
        4,
    )
    assert orders.decision is not None
    assert (orders.decision.allowed, orders.decision.remaining) == (False, 2)
    assert orders.decision.retry_after == 30.0


@pytest.mark.parametrize(
    ("spent", "cost", "verdict", "decides"),
    [
        (0, 1, "allowed", "narrow"),
        (2, 1, "denied", "narrow"),
        (0, 3, "denied", "narrow"),  # never fits
    ],
)
def test_the_tightest_rule_decides(spent: int, cost: int, verdict: str, decides: str) -> None:
    """A denial comes first, then the least remaining; a rule in shadow mode decides nothing."""
    document = """
version: 1
rules:
  - {id: wide, by: tenant, limits: 9/minute}
  - {id: narrow, by: user, limits: 2/minute}
  - {id: trial, by: ip, limits: 1/minute, mode: shadow}
"""
    limiter = Limiter.from_rules(document, clock=ManualClock())
    request = Request(user="42", tenant="acme", ip="192.0.2.7")
    if spent:
        limiter.check(request, spent)
    found = limiter.explain(request, cost)
    assert found.verdict == verdict
    assert found.decides is not None
    assert found.decides.id == decides


def test_explaining_spends_nothing(limiter: Limiter) -> None:
    """Any number of explanations spends and counts nothing."""
    first = limiter.explain(ORDER)
    for _ in range(20):
        assert limiter.explain(ORDER) == first
    assert limiter.counts() == {}
    assert limiter.check(ORDER).allowed


def test_the_source_of_the_limits(limiter: Limiter) -> None:
    """The rule, a tier, a key or an override, with its reason, author and end."""

    def sources(request: Request) -> dict[str, str]:
        return {each.id: each.source for each in limiter.explain(request).rules}

    assert sources(ORDER)["orders"] == "default"
    assert sources(Request(user="7"))["tiered"] == "tier pro"
    assert sources(Request(api_key="sk_1"))["keyed"] == "key sk_*"
    assert sources(Request())["tiered"] == ""
    boss = Request(user="boss", endpoint="/v1/orders/9")
    [orders] = [each for each in limiter.explain(boss).rules if each.id == "orders"]
    assert orders.source == "override user:boss"
    assert orders.limits[0].limit == 99
    assert orders.override is not None
    assert (orders.override.reason, orders.override.author, orders.override.until) == (
        "launch week",
        "ops@shop.example",
        datetime(2030, 1, 1, tzinfo=UTC),
    )


def test_a_rule_that_does_not_apply_shows_its_limits(limiter: Limiter) -> None:
    """The limits show the effect of another order of the rules."""
    [rest] = [each for each in limiter.explain(ORDER).rules if each.id == "rest"]
    assert ([limit.limit for limit in rest.limits], rest.subject, rest.units) == ([5], "", 0)


def test_tier_version_and_list(limiter: Limiter) -> None:
    """An explanation has the tier, the version and the list entry of the request."""
    limiter.use(DOCUMENT, "v7")
    explanation = limiter.explain(Request(user="7"))
    assert (explanation.version, explanation.tier, explanation.listed) == ("v7", "pro", "")
    assert limiter.explain(Request(user="mallory")).listed == "deny user:mallory"
    assert limiter.explain(Request(ip="10.1.1.1")).applying == ()


async def test_explanations_on_asyncio(limiter: Limiter) -> None:
    """AsyncLimiter returns the same explanation."""
    awaited = AsyncLimiter.from_rules(DOCUMENT, clock=ManualClock(start=1_800_000_000))
    assert await awaited.explain(ORDER) == limiter.explain(ORDER)


def test_a_rule_without_limits_for_a_tier_takes_precedence() -> None:
    """The first rule that matches applies even without limits for the tier; the next names it."""
    limiter = Limiter.from_rules("""
version: 1
tiers: {free: 10/minute}
rules:
  - {id: first, by: user}
  - {id: second, by: user, limits: 5/minute}
""")
    first, second = limiter.explain(Request(user="1")).rules
    assert first.why == "it has no limits for requests without a tier"
    assert (second.applies, second.why) == (False, "rule first counts by the same and goes first")
    assert limiter.check(Request(user="1")).rule == ""


def test_a_path_with_dot_segments_has_the_rules_of_both_its_spellings() -> None:
    """Both rules apply although they count by the same; a third one that matches too does not."""
    limiter = Limiter.from_rules(
        """
version: 1
rules:
  - {id: public, by: ip, match: {endpoint: "/public/*"}, limits: 9/second}
  - {id: login, by: ip, match: {endpoint: /login}, limits: 9/second}
  - {id: all, by: ip, limits: 9/second}
"""
    )
    found = limiter.explain(Request(ip="192.0.2.1", endpoint="/public/%2e%2e/login"))
    assert [(rule.id, rule.applies, rule.why) for rule in found.rules] == [
        ("public", True, "all its conditions hold"),
        ("login", True, "all its conditions hold"),
        ("all", False, "rule public counts by the same and goes first"),
    ]


@pytest.mark.parametrize(
    ("mode", "tier", "found"),
    [
        (
            "shadow",
            None,
            {
                "vip": (False, "the request has no tier"),
                "new": (
                    True,
                    "all its conditions hold; once promoted, it takes the place of rule old",
                ),
                "old": (True, "all its conditions hold"),
            },
        ),
        (
            "shadow",
            "vip",
            {
                "vip": (True, "all its conditions hold"),
                "new": (False, "rule vip goes before rule old, which it would replace"),
                "old": (False, "rule vip counts by the same and goes first"),
            },
        ),
        (
            "enforce",
            None,
            {
                "vip": (False, "the request has no tier"),
                "new": (True, "all its conditions hold; it takes the place of rule old"),
                "old": (False, "rule new replaces it"),
            },
        ),
    ],
)
def test_which_rule_takes_which_place(
    mode: str, tier: str | None, found: dict[str, tuple[bool, str]]
) -> None:
    """Before and after the promotion of a rule."""
    limiter = Limiter.from_rules(f"""
version: 1
rules:
  - {{id: vip, match: {{tier: vip}}, by: user, limits: 1/minute}}
  - {{id: new, by: user, limits: 2/minute, mode: {mode}, replaces: old}}
  - {{id: old, by: user, limits: 3/minute}}
""")
    explained = limiter.explain(Request(user="ann", tier=tier)).rules
    assert {rule.id: (rule.applies, rule.why) for rule in explained} == found


def test_a_global_rule_says_how_regions_share_it() -> None:
    """Also if it does not apply, like its consistency."""
    store, _, _ = two_regions(ManualClock())
    limiter = Limiter.from_rules(
        """
version: 1
rules:
  - {id: plan, by: user, limits: 10/minute, scope: global, across_regions: exact}
  - {id: search, match: {endpoint: /s}, by: ip, limits: 10/minute, scope: global}
  - {id: burst, by: tenant, limits: 5/second}
""",
        store=store,
    )
    explained = limiter.explain(Request(user="ann")).rules
    found = {rule.id: rule.across for rule in explained}
    assert found == {"plan": "exact", "search": "eventual", "burst": None}


def test_a_rule_says_how_envoys_get_parts_of_it() -> None:
    """`explain` shows the field, for rules that apply and for others."""
    store = PythonMemoryStore(clock := ManualClock())
    compiled = CompiledRules(
        read(
            "{version: 1, rules: [{id: plan, by: tenant, limits: 9/s, consistency: leased, "
            "envoy_quota: grants}, {id: all, by: [], limits: 9/s}]}"
        ),
        lambda limits, rule, *_: store.counter(limits, rule),  # which cannot lease
        clock.now_ns,
    )
    explanation, _ = explain(compiled, Request(tenant="acme"), 1)
    assert {rule.id: rule.envoy_quota for rule in explanation.rules} == {
        "plan": "grants",
        "all": None,
    }
