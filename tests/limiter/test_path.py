"""A decision with its grounds: evaluate, evaluate_all and settle, on every kind of store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.redis_servers import Single
from tollkeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    InvalidCost,
    Limit,
    Limiter,
    Request,
    StoreError,
)
from tollkeeper.core.model import AppliedRule, CheckResult
from tollkeeper.decide.store import Store
from tollkeeper.testing import ManualClock, limiting_off

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


class Awaited:
    """AsyncLimiter with the verbs of Limiter: each is awaited at once, in one event loop."""

    def __init__(self, runner: asyncio.Runner, limiter: AsyncLimiter) -> None:
        self._runner = runner
        self._limiter = limiter

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._limiter, name)

        def awaited(*args: Any, **kwargs: Any) -> Any:
            async def ask() -> Any:
                return await verb(*args, **kwargs)

            return self._runner.run(ask())

        return awaited


@pytest.fixture(params=["threads", "asyncio"])
def face(request: pytest.FixtureRequest, store: Store, clock: ManualClock) -> Iterator[Any]:
    """Makes a limiter of either face from limits or rules: face(rules=...), face("3/minute")."""
    runner = asyncio.Runner()

    def make(limits: str = "", rules: str = "", **options: Any) -> Any:
        kind = Limiter if request.param == "threads" else AsyncLimiter
        if rules:
            limiter: Any = kind.from_rules(rules, store=store, clock=clock, **options)
        else:
            limiter = kind(limits, store=store, clock=clock, **options)
        return limiter if request.param == "threads" else Awaited(runner, limiter)

    with runner:
        yield make
        if hasattr(store, "aclose"):
            runner.run(store.aclose())


def names(ruling: CheckResult) -> list[str]:
    return [applied.rule for applied in ruling.applied]


def remaining(rulings: Sequence[CheckResult]) -> list[int]:
    return [each.decision.remaining for each in rulings]


def test_a_limiter_with_limits_names_them(face: Any) -> None:
    """The grounds are the limiter's own limits, under its name or "default"."""
    ruling = face("3/minute; 100/hour").evaluate("ann")
    assert ruling.decision.remaining == 2
    assert names(ruling) == ["default"]
    assert [limit.limit for limit in ruling.applied[0].limits] == [3, 100]
    assert (ruling.kind, ruling.shadow_denied) == ("limited", ())
    assert names(face("3/minute", name="login").evaluate("ann")) == ["login"]


def test_rules_are_named_in_order_with_the_limits_they_had(face: Any) -> None:
    """Every rule that had to pass is named; the decision is the tightest's."""
    ruling = face(rules=RULES).evaluate(ANN)
    assert names(ruling) == ["user", "tenant"]
    assert [limit.limit for limit in ruling.applied[0].limits] == [3, 100]
    assert (ruling.decision.rule, ruling.decision.remaining) == ("user", 2)


def test_grounds_are_the_same_object_for_all_who_have_them(face: Any) -> None:
    """What is derived from the grounds can be kept by them."""
    limiter = face(rules=RULES)
    first, second = limiter.evaluate(ANN), limiter.evaluate(BOB)
    assert first.applied == second.applied
    assert len({first.applied, second.applied}) == 1
    limits = face("3/minute")
    assert limits.evaluate("ann").applied is limits.evaluate("bob").applied


@pytest.mark.parametrize(
    ("request_", "kind", "allowed"),
    [
        (ROOT, "exempt", True),
        (MALLORY, "blocked", False),
        (ANN, "limited", True),
    ],
)
def test_kinds(face: Any, request_: Request, kind: str, allowed: bool) -> None:
    """Lists are told apart from limits."""
    ruling = face(rules=RULES).evaluate(request_)
    assert (ruling.kind, ruling.decision.allowed) == (kind, allowed)
    assert bool(ruling.applied) == (kind == "limited")


def test_a_request_that_no_rule_is_for_is_unlimited(face: Any) -> None:
    """No rule, no grounds."""
    rules = "version: 1\nrules:\n  - {id: a, match: {endpoint: /a}, by: user, limits: 1/minute}\n"
    ruling = face(rules=rules).evaluate(Request(user="ann", endpoint="/b"))
    assert (ruling.kind, ruling.applied, ruling.decision.allowed) == ("unlimited", (), True)


def test_shadow_rules_that_would_have_denied_are_named(face: Any) -> None:
    """They never deny, and whoever looks can see that they would have."""
    limiter = face(rules=RULES)
    bot = Request(user="ann", attributes={"agent": "a-bot"})
    assert [limiter.evaluate(bot).shadow_denied for _ in range(2)] == [(), ("bots",)]
    alone = limiter.evaluate_all([(Request(user="ann", attributes={"agent": "a-bot"}), 1)])
    assert (alone[0].decision.allowed, alone[0].shadow_denied) == (True, ("bots",))


def test_judging_without_spending(face: Any) -> None:
    """The answer of peek, with the same grounds, as often as one likes."""
    limiter = face(rules=RULES)
    assert [limiter.evaluate(ANN, spend=False).decision.remaining for _ in range(3)] == [3, 3, 3]
    limits = face("3/minute", name="b")
    assert [limits.evaluate("ann", 2, spend=False).decision.allowed for _ in range(3)] == [True] * 3


def test_several_requests_pass_together_or_none_is_charged(face: Any) -> None:
    """One that is denied leaves the others' quotas as they were."""
    limiter = face(rules=RULES)
    carol = Request(user="carol")
    assert all(each.decision for each in limiter.evaluate_all([(ANN, 2), (carol, 1)]))
    denied = limiter.evaluate_all([(ANN, 2), (carol, 1)])
    assert [each.decision.allowed for each in denied] == [False, True]
    assert [names(each) for each in denied] == [["user", "tenant"], ["user", "tenant"]]
    assert remaining([limiter.evaluate(who, spend=False) for who in (ANN, carol)]) == [1, 2]


def test_the_same_subject_twice_in_one_is_counted_twice(face: Any) -> None:
    """Two requests that each have room, but not both, are denied together and cost nothing."""
    limiter = face("3/minute")
    rulings = limiter.evaluate_all([("ann", 2), ("ann", 2)])
    assert not all(each.decision.allowed for each in rulings)
    assert limiter.evaluate("ann", spend=False).decision.remaining == 3


def test_one_on_the_deny_list_stops_all(face: Any) -> None:
    """Nobody is charged for a request that is blocked."""
    limiter = face(rules=RULES)
    rulings = limiter.evaluate_all([(ANN, 1), (MALLORY, 1)])
    assert [each.kind for each in rulings] == ["limited", "blocked"]
    assert limiter.evaluate(ANN, spend=False).decision.remaining == 3


def test_several_of_which_none_is_limited(face: Any) -> None:
    """Nothing to ask the store."""
    rulings = face(rules=RULES).evaluate_all([(ROOT, 1), (ROOT, 1)])
    assert [each.kind for each in rulings] == ["exempt", "exempt"]
    assert face(rules=RULES).evaluate_all([]) == []


def test_a_cost_that_never_fits_is_an_error_and_costs_nothing(face: Any) -> None:
    """CapacityError, for one and for several."""
    limiter = face(rules=RULES)
    with pytest.raises(CapacityError):
        limiter.evaluate(ANN, 4)
    with pytest.raises(CapacityError):
        limiter.evaluate_all([(BOB, 1), (ANN, 4)])
    assert limiter.evaluate(BOB, spend=False).decision.remaining == 3


@pytest.mark.parametrize("cost", [-1, 1.5, "1", True, None])
def test_wrong_costs_are_refused(face: Any, cost: Any) -> None:
    """With the error of check."""
    for limiter, key in ((face(rules=RULES), ANN), (face("3/minute"), "ann")):
        with pytest.raises(InvalidCost):
            limiter.evaluate(key, cost)
        with pytest.raises(InvalidCost):
            limiter.evaluate_all([(key, cost)])
        with pytest.raises(InvalidCost):
            limiter.settle(key, 1, cost)


def test_rules_are_asked_about_requests(face: Any) -> None:
    """A key has nothing for them to match."""
    limiter = face(rules=RULES)
    with pytest.raises(ConfigError, match="Request"):
        limiter.evaluate("ann")
    with pytest.raises(ConfigError, match="Request"):
        limiter.evaluate_all([("ann", 1)])


def test_limiting_off_judges_unlimited(face: Any) -> None:
    """A test that switches limiting off sees no limits in the answers either."""
    limiter, limits = face(rules=RULES), face("1/minute")
    with limiting_off():
        assert limiter.evaluate(ANN).kind == "unlimited"
        assert [each.kind for each in limits.evaluate_all([("a", 1), ("a", 1)])] == [
            "unlimited"
        ] * 2
    assert limits.evaluate("a").decision.allowed


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
def test_settling(face: Any, reserved: int, actual: int, left: int, unsettled: int) -> None:
    """The difference is given back, or spent as far as there is room, and the rest is told."""
    limiter = face("10/minute")
    limiter.check("ann", reserved)
    assert limiter.settle("ann", reserved, actual) == unsettled
    assert limiter.peek("ann", 0).remaining == left


def test_settling_a_rule_that_charges_several_units_for_each(face: Any) -> None:
    """What fits is spent, though the remaining units are not the request's."""
    limiter = face(rules=RULES)
    dear = Request(ip="192.0.2.1", endpoint="/dear", user="u1", tenant="t1")
    assert limiter.check(dear, 1).allowed
    # Its rule has room for 9 more at 10 units each; the user's for 2.
    assert limiter.settle(dear, 1, 7) == 4
    assert limiter.peek(dear, 0).remaining == 0


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
async def test_settling_what_a_full_store_does_not_count(kind: Any) -> None:
    """A look finds room in the limit, and a check none in the store: nothing was spent."""
    limiter = kind("10/minute", store="memory://?capacity=2")

    async def called(verb: str, *asked: Any) -> Any:
        found = getattr(limiter, verb)(*asked)
        return await found if kind is AsyncLimiter else found

    assert (await called("check", "ann")).allowed
    assert (await called("check", "bob")).allowed
    assert await called("settle", "cid", 0, 3) == 3
    assert await called("settle", "ann", 1, 4) == 0


class Hurrying(ManualClock):
    """A clock that goes on by 10 µs whenever it is read, and not for ever."""

    def now_ns(self) -> int:
        self.advance_ns(10_000)
        assert super().now_ns() < 1_000_000_000, "it was read 100,000 times"
        return super().now_ns()


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
async def test_settling_ends_though_a_limit_is_refilled_as_fast_as_it_is_asked(kind: Any) -> None:
    """Who settles a huge cost would otherwise have this process to himself."""
    limiter = kind("1000000/second", clock=Hurrying())
    unsettled = limiter.settle("ann", 0, 1_000_000_000)
    if kind is AsyncLimiter:
        unsettled = await unsettled
    assert 990_000_000 < unsettled <= 999_000_000


def test_a_store_that_is_away_is_told_apart() -> None:
    """`closed` denies as unavailable; `open` lets pass, degraded; for limits and for rules."""
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
            for ruling in (limiter.evaluate(ANN), *limiter.evaluate_all([(ANN, 1)])):
                assert (ruling.kind, ruling.decision.allowed) == (kind, allowed), policy
                assert ruling.decision.degraded
                assert names(ruling) == ["a"]
            assert limiter.settle(ANN, 1, 3) == 2, policy
    with Limiter("3/minute", store=uri, on_failure="closed") as limits:
        assert limits.evaluate("ann").kind == "unavailable"
        assert [each.kind for each in limits.evaluate_all([("ann", 1)])] == ["unavailable"]
    with (
        Limiter("3/minute", store=uri, on_failure="raise") as limits,
        pytest.raises(StoreError),
    ):
        limits.evaluate("ann")


def test_grounds_are_shown() -> None:
    """For whoever debugs."""
    assert repr(AppliedRule("a", [Limit(3, per=60)])) == "AppliedRule('a', [Limit(3, per=60)])"
