"""Decisions with the rules that applied: evaluate and evaluate_all, on every store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    InvalidCost,
    Limit,
    Limiter,
    LocalFallback,
    Request,
    StoreError,
)
from ratekeeper.core.model import AppliedRule, CheckResult
from ratekeeper.testing import ManualClock, limiting_off
from tests.redis_servers import Single

RULES = """
version: 1
rules:
  - {id: user, by: user, limits: [3/minute, 100/hour]}
  - {id: tenant, by: tenant, limits: 5/minute}
  - {id: bots, match: {attributes: {agent: "*bot*"}}, by: user, limits: 1/hour, mode: shadow}
  - {id: dear, match: {endpoint: /dear}, by: ip, limits: 100/minute, cost: 10}
allow: ["user:root"]
deny: ["user:mallory"]
"""
ANN = Request(user="ann", tenant="acme")
BOB = Request(user="bob", tenant="acme")
ROOT = Request(user="root")
MALLORY = Request(user="mallory")


def names(result: CheckResult) -> list[str]:
    return [applied.rule for applied in result.applied]


def remaining(results: Sequence[CheckResult]) -> list[int]:
    return [each.decision.remaining for each in results]


def test_a_limiter_with_limits_names_them(make_limiter: Any) -> None:
    """The applied rule has the limits of the limiter, and its name or "default"."""
    result = make_limiter("3/minute; 100/hour").evaluate("ann")
    assert result.decision.remaining == 2
    assert names(result) == ["default"]
    assert [limit.limit for limit in result.applied[0].limits] == [3, 100]
    assert (result.kind, result.shadow_denied) == ("limited", ())
    assert names(make_limiter("3/minute", name="login").evaluate("ann")) == ["login"]


def test_results_name_the_applied_rules_in_order(make_limiter: Any) -> None:
    """A result names every rule that had to pass. Its decision is that of the tightest rule."""
    result = make_limiter(rules=RULES).evaluate(ANN)
    assert names(result) == ["user", "tenant"]
    assert [limit.limit for limit in result.applied[0].limits] == [3, 100]
    assert (result.decision.rule, result.decision.remaining) == ("user", 2)


def test_equal_applied_rules_are_the_same_object(make_limiter: Any) -> None:
    """Callers can cache values that they derive from an applied rule."""
    limiter = make_limiter(rules=RULES)
    first, second = limiter.evaluate(ANN), limiter.evaluate(BOB)
    assert first.applied == second.applied
    assert len({first.applied, second.applied}) == 1
    limits = make_limiter("3/minute")
    assert limits.evaluate("ann").applied is limits.evaluate("bob").applied


@pytest.mark.parametrize(
    ("request_", "kind", "allowed"),
    [
        (ROOT, "exempt", True),
        (MALLORY, "blocked", False),
        (ANN, "limited", True),
    ],
)
def test_the_kind_of_a_result(
    make_limiter: Any, request_: Request, kind: str, allowed: bool
) -> None:
    """A result distinguishes lists from limits."""
    result = make_limiter(rules=RULES).evaluate(request_)
    assert (result.kind, result.decision.allowed) == (kind, allowed)
    assert bool(result.applied) == (kind == "limited")


def test_a_request_without_a_matching_rule_is_unlimited(make_limiter: Any) -> None:
    """The result names no rule."""
    rules = "version: 1\nrules:\n  - {id: a, match: {endpoint: /a}, by: user, limits: 1/minute}\n"
    result = make_limiter(rules=rules).evaluate(Request(user="ann", endpoint="/b"))
    assert (result.kind, result.applied, result.decision.allowed) == ("unlimited", (), True)


def test_shadow_rules_that_would_have_denied_are_named(make_limiter: Any) -> None:
    """Shadow rules never deny, and the result names those that would have denied."""
    limiter = make_limiter(rules=RULES)
    bot = Request(user="ann", attributes={"agent": "a-bot"})
    assert [limiter.evaluate(bot).shadow_denied for _ in range(2)] == [(), ("bots",)]
    alone = limiter.evaluate_all([(Request(user="ann", attributes={"agent": "a-bot"}), 1)])
    assert (alone[0].decision.allowed, alone[0].shadow_denied) == (True, ("bots",))


def test_evaluating_without_spending(make_limiter: Any) -> None:
    """`spend=False` returns the decision of `peek` with the same rules, any number of times."""
    limiter = make_limiter(rules=RULES)
    assert [limiter.evaluate(ANN, spend=False).decision.remaining for _ in range(3)] == [3, 3, 3]
    limits = make_limiter("3/minute", name="b")
    assert [limits.evaluate("ann", 2, spend=False).decision.allowed for _ in range(3)] == [True] * 3


def test_several_requests_pass_together_or_none_is_charged(make_limiter: Any) -> None:
    """One denied request leaves the quotas of the others unchanged."""
    limiter = make_limiter(rules=RULES)
    carol = Request(user="carol")
    assert all(each.decision for each in limiter.evaluate_all([(ANN, 2), (carol, 1)]))
    denied = limiter.evaluate_all([(ANN, 2), (carol, 1)])
    assert [each.decision.allowed for each in denied] == [False, True]
    assert [names(each) for each in denied] == [["user", "tenant"], ["user", "tenant"]]
    assert remaining([limiter.evaluate(user, spend=False) for user in (ANN, carol)]) == [1, 2]


def test_the_same_subject_twice_in_one_call_is_counted_twice(make_limiter: Any) -> None:
    """Two requests that fit separately but not together are denied and cost nothing."""
    limiter = make_limiter("3/minute")
    results = limiter.evaluate_all([("ann", 2), ("ann", 2)])
    assert not all(each.decision.allowed for each in results)
    assert limiter.evaluate("ann", spend=False).decision.remaining == 3


def test_one_request_on_the_deny_list_denies_all(make_limiter: Any) -> None:
    """No quota is charged if one of the requests is blocked."""
    limiter = make_limiter(rules=RULES)
    results = limiter.evaluate_all([(ANN, 1), (MALLORY, 1)])
    assert [each.kind for each in results] == ["limited", "blocked"]
    assert limiter.evaluate(ANN, spend=False).decision.remaining == 3


def test_several_requests_without_limits(make_limiter: Any) -> None:
    """The store is not called."""
    results = make_limiter(rules=RULES).evaluate_all([(ROOT, 1), (ROOT, 1)])
    assert [each.kind for each in results] == ["exempt", "exempt"]
    assert make_limiter(rules=RULES).evaluate_all([]) == []


def test_a_cost_that_never_fits_is_an_error_and_costs_nothing(make_limiter: Any) -> None:
    """CapacityError is raised for one request and for several."""
    limiter = make_limiter(rules=RULES)
    with pytest.raises(CapacityError):
        limiter.evaluate(ANN, 4)
    with pytest.raises(CapacityError):
        limiter.evaluate_all([(BOB, 1), (ANN, 4)])
    assert limiter.evaluate(BOB, spend=False).decision.remaining == 3


@pytest.mark.parametrize("cost", [-1, 1.5, "1", True, None])
def test_invalid_costs_are_rejected(make_limiter: Any, cost: Any) -> None:
    """The error is that of `check`."""
    for limiter, key in ((make_limiter(rules=RULES), ANN), (make_limiter("3/minute"), "ann")):
        with pytest.raises(InvalidCost):
            limiter.evaluate(key, cost)
        with pytest.raises(InvalidCost):
            limiter.evaluate_all([(key, cost)])
        with pytest.raises(InvalidCost):
            limiter.settle(key, 1, cost)


def test_rules_need_a_request(make_limiter: Any) -> None:
    """A plain key has no fields for rules to match."""
    limiter = make_limiter(rules=RULES)
    with pytest.raises(ConfigError, match="Request"):
        limiter.evaluate("ann")
    with pytest.raises(ConfigError, match="Request"):
        limiter.evaluate_all([("ann", 1)])


def test_limiting_off_evaluates_as_unlimited(make_limiter: Any) -> None:
    """A test that switches limiting off sees no limits in the results."""
    limiter, limits = make_limiter(rules=RULES), make_limiter("1/minute")
    with limiting_off():
        assert limiter.evaluate(ANN).kind == "unlimited"
        assert [each.kind for each in limits.evaluate_all([("a", 1), ("a", 1)])] == [
            "unlimited"
        ] * 2
    assert limits.evaluate("a").decision.allowed


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
async def test_a_batch_that_this_machine_denies_spends_nothing_on_the_store(kind: Any) -> None:
    """The store has no room for bob, and the machine's share of the limit, one a minute, is used.

    So the batch is denied, and ann's unit is not spent either.
    """
    limiter = kind(
        "10/minute",
        store="memory://?capacity=2",
        on_failure="local",
        local_fallback=LocalFallback(nodes=10),
        clock=ManualClock(),
    )

    async def called(verb: str, *arguments: Any) -> Any:
        found = getattr(limiter, verb)(*arguments)
        return await found if kind is AsyncLimiter else found

    assert (await called("check", "ann")).allowed
    assert (await called("check", "cid")).allowed
    batch = [("ann", 1), ("bob", 1)]
    assert all(each.decision for each in await called("evaluate_all", batch))
    assert not all(each.decision for each in await called("evaluate_all", batch))
    assert (await called("peek", "ann", 0)).remaining == 8


def test_an_unavailable_store_is_visible_in_the_result() -> None:
    """`closed` denies as unavailable and `open` allows, degraded, for limits and for rules."""
    with Single() as server:
        uri = server.uri
        server.kill()
    rules = "version: 1\nrules:\n  - {id: a, by: user, limits: 3/minute, on_failure: %s}\n"
    for policy, kind, allowed in (
        ("closed", "unavailable", False),
        ("open", "limited", True),
        ("local", "limited", True),
    ):
        with Limiter.from_rules(rules % policy, store=uri) as limiter:
            for result in (limiter.evaluate(ANN), *limiter.evaluate_all([(ANN, 1)])):
                assert (result.kind, result.decision.allowed) == (kind, allowed), policy
                assert result.decision.degraded
                assert names(result) == ["a"]
            assert limiter.settle(ANN, 1, 3).uncounted == 2, policy
    with Limiter("3/minute", store=uri, on_failure="closed") as limits:
        assert limits.evaluate("ann").kind == "unavailable"
        assert [each.kind for each in limits.evaluate_all([("ann", 1)])] == ["unavailable"]
    with (
        Limiter("3/minute", store=uri, on_failure="raise") as limits,
        pytest.raises(StoreError),
    ):
        limits.evaluate("ann")


def test_the_repr_of_an_applied_rule() -> None:
    """The repr shows the id and the limits."""
    assert repr(AppliedRule("a", [Limit(3, per=60)])) == "AppliedRule('a', [Limit(3, per=60)])"
