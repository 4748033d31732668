"""Rules while Redis is unavailable: each rule's own failure policy, with threads and asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Decision, Limiter, Request, StoreError
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.decide.stores import open_store
from tests.redis_servers import Single, until

ANN = Request(user="ann", tenant="acme", ip="192.0.2.7")
BOB = Request(user="bob", tenant="other", ip="192.0.2.8")
DEADLINE_MS = 2_000


@pytest.fixture(scope="module")
def dead() -> Iterator[Single]:
    """Return a server that has stopped: no process listens on its port."""
    with Single() as server:
        server.kill()
        yield server


def document(**on_failure: str) -> str:
    """Return one rule each by user, tenant and ip; the arguments set their failure policies."""
    lines = [
        f"  - {{id: {name}, by: {name}, limits: 3/minute"
        + (f", on_failure: {policy}}}" if policy else "}")
        for name, policy in on_failure.items()
    ]
    return "\n".join(["version: 1", "rules:", *lines])


def checks(dead: Single, rules: str, times: int = 1, **options: Any) -> list[Decision]:
    """Return the decisions of a Limiter; an AsyncLimiter must make the same decisions."""
    with Limiter.from_rules(rules, store=dead.uri, **options) as limiter:
        found = [limiter.check(ANN) for _ in range(times)]

    async def ask() -> list[Decision]:
        async with AsyncLimiter.from_rules(rules, store=dead.uri, **options) as awaited:
            return [await awaited.check(ANN) for _ in range(times)]

    same = [(each.allowed, each.rule, each.degraded) for each in asyncio.run(ask())]
    assert same == [(each.allowed, each.rule, each.degraded) for each in found]
    return found


@pytest.mark.parametrize(
    ("on_failure", "limiters", "allowed"),
    [
        # The rule's own policy overrides the limiter's.
        ({"user": "open"}, "closed", True),
        ({"user": "closed"}, "open", False),
        ({"user": "closed"}, "raise", False),
        ({"user": ""}, "open", True),
        ({"user": ""}, "closed", False),
        # Each rule decides, also without a policy of its own, and all must allow the request.
        ({"user": "open", "tenant": ""}, "open", True),
        ({"user": "open", "tenant": ""}, "closed", False),
        ({"user": "", "tenant": "closed"}, "open", False),
        ({"user": "local", "tenant": "open"}, "open", True),
        ({"user": "local", "tenant": "closed"}, "open", False),
        ({"user": "local", "tenant": ""}, "closed", False),
    ],
    ids=repr,
)
def test_each_rule_applies_its_failure_policy(
    dead: Single, on_failure: dict[str, str], limiters: Any, allowed: bool
) -> None:
    """A rule uses its `on_failure`, or else the limiter's; every decision is marked degraded."""
    [decision] = checks(dead, document(**on_failure), on_failure=limiters)
    assert (decision.allowed, decision.degraded) == (allowed, True)
    assert decision.rule in on_failure


@pytest.mark.parametrize("on_failure", [{"user": ""}, {"user": "local", "tenant": ""}], ids=repr)
def test_a_rule_without_a_policy_raises_if_the_limiter_raises(
    dead: Single, on_failure: dict[str, str]
) -> None:
    """The local counts of the other rules are not charged for the failed check."""
    rules = document(**on_failure)
    with Limiter.from_rules(rules, store=dead.uri, on_failure="raise") as limiter:
        for verb in (limiter.check, limiter.peek):
            with pytest.raises(StoreError):
                verb(ANN)


def test_local_counts_in_this_process(dead: Single) -> None:
    """The limits hold for this process, and the decisions are marked degraded."""
    found = checks(dead, document(user="local"), times=5)
    assert [bool(each) for each in found] == [True, True, True, False, False]
    assert [each.remaining for each in found] == [2, 1, 0, 0, 0]
    assert {(each.rule, each.degraded) for each in found} == {("user", True)}
    assert found[-1].retry_after > 0


def test_each_of_several_processes_has_a_share_of_the_limits(dead: Single) -> None:
    """Three processes with a third each admit one limit together; a share is at least 1."""
    found = checks(dead, document(user="local"), times=3, local_fallback=LocalFallback(nodes=3))
    assert [bool(each) for each in found] == [True, False, False]
    found = checks(dead, document(user="local"), times=2, local_fallback=LocalFallback(nodes=100))
    assert [bool(each) for each in found] == [True, False]


def test_a_split_rule_has_one_share_on_this_machine(dead: Single) -> None:
    """A twentieth of each of eight parts would round up to 8 units, 160 on twenty machines."""
    rules = "version: 1\nrules:\n  - {id: all, by: [], limits: 100/hour, split: 8, on_failure: %s}"
    found = checks(dead, rules % "local", times=20, local_fallback=LocalFallback(nodes=20))
    assert sum(map(bool, found)) == 5
    assert {each.policy.limit for each in found} == {5}
    assert {each.policy.limit for each in checks(dead, rules % "closed", times=8)} == {100}


def test_local_rules_pass_together_or_not_at_all(dead: Single) -> None:
    """A request that one rule denies costs the other rules nothing."""
    rules = document(user="local", tenant="local").replace(
        "by: tenant, limits: 3/minute", "by: tenant, limits: 5/minute"
    )
    with Limiter.from_rules(rules, store=dead.uri) as limiter:
        found = [bool(limiter.check(ANN)) for _ in range(5)]
        assert found == [True, True, True, False, False]
        bob = Request(user="bob", tenant="acme")
        assert [bool(limiter.check(bob)) for _ in range(3)] == [True, True, False]


def test_a_closed_rule_leaves_local_counts_alone(dead: Single) -> None:
    """A denied request is not charged, and a peek is not either."""
    both = document(user="local", tenant="closed")
    with Limiter.from_rules(both, store=dead.uri) as limiter:
        assert not any(limiter.check(ANN) for _ in range(5))
        limiter.use(document(user="local"))
        assert [limiter.peek(ANN).remaining for _ in range(2)] == [3, 3]
        assert limiter.check(ANN).remaining == 2


def test_a_cost_above_the_share_is_denied_without_an_error(dead: Single) -> None:
    """It fits the whole limit, so it may be allowed when the store is available again."""
    rules = document(user="local")
    with Limiter.from_rules(
        rules, store=dead.uri, local_fallback=LocalFallback(nodes=2)
    ) as limiter:
        decision = limiter.check(ANN, cost=3)
        assert (decision.allowed, decision.degraded) == (False, True)


def test_failures_are_counted_and_explained(dead: Single) -> None:
    """Every rule's failure is counted, shadow rules included, and `explain` shows the error."""
    rules = document(user="open", tenant="open") + (
        "\n  - {id: tried, by: ip, limits: 1/minute, mode: shadow}"
    )
    with Limiter.from_rules(rules, store=dead.uri) as limiter:
        assert limiter.check(ANN)
        assert {name: each.failed for name, each in limiter.counts().items()} == {
            "user": 1,
            "tenant": 1,
            "tried": 1,
        }
        explained = limiter.explain(ANN)
        assert [rule.applies for rule in explained.rules] == [True] * 3
        assert all(rule.decision is None and rule.error for rule in explained.rules)


_SHADOWS = document(user="open") + "".join(
    f"\n  - {{id: s{n}, by: [user, a{n}], limits: 1/minute, mode: shadow}}" for n in range(5)
)
_PENALTIES = document(user="open", tenant="open").replace("minute", "minute, penalty: {after: 3}")


@pytest.mark.parametrize("rules", [_SHADOWS, _PENALTIES], ids=["shadows", "penalties"])
def test_a_check_waits_once_for_a_server_that_does_not_answer(rules: str) -> None:
    """Neither rules in shadow mode nor rules with penalties add a second timeout."""
    with Single() as server:
        store = open_store(server.uri, deadline_ms=DEADLINE_MS, denied_cache_ms=0)

        def seconds_of(ask: Any) -> float:
            server.pause()
            start = time.monotonic()
            decision = ask()
            passed = time.monotonic() - start
            server.resume()
            assert (decision.allowed, decision.degraded) == (True, True)
            return passed

        limiter = Limiter.from_rules(rules, store=store)
        assert not limiter.check(BOB).degraded
        assert seconds_of(lambda: limiter.check(ANN)) < 2 * DEADLINE_MS / 1_000
        store.close()

        async def ask() -> float:
            fresh = open_store(server.uri, deadline_ms=DEADLINE_MS, denied_cache_ms=0)
            awaited = AsyncLimiter.from_rules(rules, store=fresh)
            answered: Awaitable[Decision] = awaited.check(BOB)
            assert not (await answered).degraded
            server.pause()
            start = time.monotonic()
            assert (await awaited.check(ANN)).degraded
            passed = time.monotonic() - start
            server.resume()
            await fresh.aclose()  # type: ignore[attr-defined]  # Redis has it
            return passed

        assert asyncio.run(ask()) < 2 * DEADLINE_MS / 1_000


def test_a_store_that_comes_back_decides_again() -> None:
    """Decisions change from local to exact without a restart."""
    rules = document(user="local")
    with Single() as server, Limiter.from_rules(rules, store=server.uri) as limiter:
        until(lambda: not limiter.check(ANN).degraded, "the store decides", 20)
        server.kill()
        assert limiter.check(ANN).degraded
        server.start()
        until(lambda: not limiter.check(ANN).degraded, "the store decides again", 20)
