"""Penalties for clients that do not wait: growing cool-downs, then a block, on every store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limiter, Request, StoreError
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores import open_store
from ratekeeper.rules.document.model import PenaltySettings
from ratekeeper.rules.penalties import (
    COOLDOWN,
    LOOK_NS,
    TRACKED_MAX,
    Penalty,
    PenaltyTracker,
    penalty_counters,
    penalty_s,
)
from ratekeeper.testing import ManualClock
from tests.failing_store import PartlyFailing
from tests.redis_servers import Single, running

PENALTY = (
    "{after: 3, within: 1m, cooldown: 10s, cooldown_max: 25s, block_after: 3, block: 1h, decay: 1h}"
)
RULES = f"""
version: 1
rules:
  - {{id: api, by: user, limits: 1/second, penalty: {PENALTY}}}
  - {{id: all, by: tenant, limits: 1000/second}}
"""
ANN = Request(user="ann", tenant="acme")
BOB = Request(user="bob", tenant="acme")


def storm(limiter: Limiter, times: int) -> list[float]:
    """Return the retry time of each of `times` requests at one instant."""
    return [limiter.check(ANN).retry_after for _ in range(times)]


def test_the_first_cool_down(store: Store, clock: ManualClock) -> None:
    """After three denials without waiting, no request passes until the cool-down ends."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        assert storm(limiter, 6) == [0, 1, 1, 1, 1, 10]
        clock.advance(9.999)
        assert limiter.peek(ANN).retry_after == pytest.approx(0.001)
        clock.advance(0.001)
        assert limiter.check(ANN).allowed


def test_a_retry_waits_for_the_limit_that_is_longer_than_the_cool_down(
    store: Store, clock: ManualClock
) -> None:
    """Waiting for Retry-After is enough, on every node, also after a cool-down was extended."""
    rules = RULES.replace("1/second", "1/minute")
    with (
        Limiter.from_rules(rules, store=store, clock=clock) as limiter,
        Limiter.from_rules(rules, store=store, clock=clock) as other,
    ):
        assert storm(limiter, 9) == [0, 60, 60, 60, 60, 60, 60, 60, 60]
        clock.advance(5)
        denied = other.check(ANN)
        assert (denied.penalty, denied.retry_after) == ("cooldown", 55)
        clock.advance(54.999)
        assert not other.check(ANN)
        clock.advance(0.001)
        assert limiter.check(ANN)


def test_a_client_that_waits_is_not_penalised(store: Store, clock: ManualClock) -> None:
    """After each of a hundred denials, the client waits for Retry-After and gets no penalty."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        for _ in range(100):
            assert limiter.check(ANN).allowed
            denied = limiter.check(ANN)
            clock.advance(denied.retry_after)
        assert limiter.penalties() == []


def test_other_users_are_not_penalised(store: Store, clock: ManualClock) -> None:
    """Other users of the tenant pass, and denied requests cost the tenant nothing."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 20)
        assert limiter.check(BOB).allowed
        look = {rule.id: rule.decision for rule in limiter.explain(BOB).applying}
        assert look["all"] is not None
        assert look["all"].remaining == 998


def test_cool_downs_grow_to_a_block_and_are_forgotten(store: Store, clock: ManualClock) -> None:
    """10, 20, 25 (the longest) and an hour. Levels expire one by one, down to the first."""
    reported: list[Penalty] = []
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        limiter.on_penalty(reported.append)
        for _ in range(4):
            while not limiter.penalties():
                limiter.check(ANN)
            clock.advance(limiter.peek(ANN).retry_after + 0.001)
        assert [(each.level, each.seconds, each.blocked) for each in reported] == [
            (1, 10, False),
            (2, 20, False),
            (3, 25, False),
            (4, 3600, True),
        ]
        assert {(each.rule, each.subject) for each in reported} == {("api", "user:ann")}
        clock.advance(4 * 3600)
        storm(limiter, 6)
        assert (reported[-1].level, reported[-1].seconds) == (1, 10)


def test_requests_during_a_cool_down_extend_it(store: Store, clock: ManualClock) -> None:
    """A client gains nothing by continuing."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        assert storm(limiter, 5)[-1] == 1
        assert storm(limiter, 4) == [10, 10, 10, 30]
        assert [each.level for each in limiter.penalties()] == [2]


def test_requests_during_a_block_do_not_extend_it(store: Store, clock: ManualClock) -> None:
    """The block is added to all cool-downs and reported once, and Retry-After is exact. The next
    block is given when there is room for it."""
    reported: list[Penalty] = []
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        limiter.on_penalty(reported.append)
        other.on_penalty(reported.append)
        storm(limiter, 200)
        assert [each.seconds for each in reported] == [10, 20, 25, 3600]
        left_s = 10 + 20 + 25 + 3600
        assert limiter.check(ANN).retry_after == left_s
        assert [each.until_ns - clock.now_ns() for each in limiter.penalties()] == [left_s * 10**9]
        counts = limiter.counts()["api"]
        assert (counts.cooldowns, counts.blocks) == (3, 1)
        storm(other, 200)  # it cannot give a penalty either, and reports none
        assert len(reported) == 4
        clock.advance(left_s - 20)
        storm(limiter, 200)
        assert [(each.seconds, each.blocked) for each in reported[4:]] == [(3600, True)]
        assert limiter.peek(ANN).retry_after == 3620


def test_the_store_is_not_called_for_a_penalty_without_room(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a block, the process does not try to give another penalty."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 100)
        all_counters = limiter._rules().penalties.counters
        counters = all_counters["api"]
        calls: list[object] = []
        spy: Any = SimpleNamespace(
            check=lambda *args: calls.append(args), peek=lambda *args: calls.append(args)
        )
        monkeypatch.setitem(all_counters, "api", counters._replace(level=spy, cooldown=spy))
        storm(limiter, 1_000)
        assert not calls


def test_a_check_is_one_call_of_redis(clock: ManualClock) -> None:
    """The limits and the cool-down are one call. A cool-down that is known costs none."""
    server = running("single")
    server.flush()
    uri = f"{server.uri}?deadline_ms=10000&connect_ms=10000"

    def calls(limiter: Limiter) -> int:
        server.admin.config_resetstat()
        limiter.check(ANN)
        stats = server.admin.info("commandstats")
        return sum(
            stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval")
        )

    with (
        Limiter.from_rules(RULES, store=uri, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=uri, clock=clock) as other,
    ):
        storm(limiter, 1)
        other.check(BOB)  # the script is loaded
        clock.advance(1)
        assert calls(other) == 1
        clock.advance(0.9)
        assert calls(other) == 1
        clock.advance(0.1)
        assert calls(other) == 1
        storm(limiter, 5)
        for _ in range(2):  # the first one also loads the script that returns units
            clock.advance(LOOK_NS / 1e9)
            found = [calls(limiter) for _ in range(2)]
        assert found == [3, 0]  # the charge, and the return of both units


def test_a_failing_listener_does_not_affect_the_request(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is denied as usual, and the error is logged."""

    def fail(_: Penalty) -> None:
        raise ValueError("the listener failed")

    with Limiter.from_rules(RULES, clock=clock) as limiter:
        limiter.on_penalty(fail)
        assert storm(limiter, 6)[-1] == 10
    assert "the listener failed" in caplog.text


def test_a_node_that_does_not_know_a_cool_down_gives_no_second_one(
    store: Store, clock: ManualClock
) -> None:
    """The node first reports the cool-down to the client, and only then counts further denials."""
    reported: list[Penalty] = []
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        other.check(ANN)  # reads the store, and not again for a second
        other.on_penalty(reported.append)
        storm(limiter, 5)
        assert [each.level for each in limiter.penalties()] == [1]
        assert storm(other, 5) == [1, 1, 1, 1, 10]
        assert not reported
        storm(other, 3)
        assert [each.level for each in reported] == [2]


async def test_concurrent_requests_get_one_cool_down(clock: ManualClock) -> None:
    """No request in flight could know about the cool-down."""
    server = running("single")
    server.flush()
    store = open_store(server.uri, clock, deadline_ms=10_000)
    async with AsyncLimiter.from_rules(RULES, store=store, clock=clock) as limiter:
        answers = await asyncio.gather(*(limiter.check(ANN) for _ in range(30)))
        assert sum(answer.allowed for answer in answers) == 1
        assert [each.level for each in limiter.penalties()] == [1]
        for _ in range(3):
            await limiter.check(ANN)
        assert [each.level for each in limiter.penalties()] == [2]
    store.close()


def test_a_reset_ends_the_penalties(store: Store, clock: ManualClock) -> None:
    """The reset also forgets earlier penalties."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 30)
        assert not limiter.check(ANN)
        limiter.reset(ANN)
        assert limiter.check(ANN).allowed
        assert limiter.penalties() == []
        assert storm(limiter, 6)[-1] == 10


def test_a_cool_down_applies_on_other_nodes(store: Store, clock: ManualClock) -> None:
    """A second limiter on the same store denies too, and allows within a second after a reset."""
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        storm(limiter, 5)
        clock.advance(2)  # the limit itself has room again
        assert not other.check(ANN).allowed
        assert other.evaluate(ANN).decision.retry_after == 8
        limiter.reset(ANN)
        clock.advance(LOOK_NS / 1e9)
        assert other.check(ANN).allowed


def test_a_cool_down_that_is_discovered_costs_the_other_rules_nothing(
    store: Store, clock: ManualClock
) -> None:
    """The other node charges the tenant before it sees the cool-down, and returns the unit."""
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        storm(limiter, 5)
        clock.advance(2)  # the limits have room again
        both = other.evaluate_all([(BOB, 1), (ANN, 1)])
        assert [each.decision.allowed for each in both] == [True, False]
        assert both[1].decision.penalty == "cooldown"
        assert limiter.peek(BOB).remaining == 1
        remaining = [
            each.decision and each.decision.remaining for each in limiter.explain(BOB).rules
        ]
        assert remaining == [1, 1000]
        assert {name: each.allowed for name, each in other.counts().items()} == {"api": 0}


def test_only_requests_without_penalties_are_decided_in_the_kernel() -> None:
    """A denial by a compiled check would give no penalty."""
    rules = """
    version: 1
    rules:
      - {id: login, match: {endpoint: /login}, by: ip, limits: 1/hour, penalty: {after: 3}}
      - {id: api, by: ip, limits: 1/hour}
    """
    with Limiter.from_rules(rules) as limiter:
        login, other = (Request(ip="192.0.2.1", endpoint=path) for path in ("/login", "/other"))
        found = [limiter.evaluate(login).decision.penalty for _ in range(6)]
        assert found == [None] * 5 + ["cooldown"]
        assert [limiter.evaluate(other).decision.allowed for _ in range(2)] == [True, False]
        assert limiter._rules().compiled_rules.compiled(other) is not None


@pytest.mark.parametrize("policy", ["open", "closed", "local", "raise"])
def test_the_limits_decide_if_only_the_cool_down_cannot_be_read(
    clock: ManualClock, policy: Any
) -> None:
    """A rule that must not pass undecided denies or raises, and charges nothing."""
    store = PartlyFailing(clock)
    with Limiter.from_rules(RULES, store=store, clock=clock, on_failure=policy) as limiter:
        store.failing = frozenset(["api" + COOLDOWN])
        if policy == "raise":
            for verb in (limiter.check, limiter.peek):
                with pytest.raises(StoreError):
                    verb(ANN)
        else:
            found = [limiter.peek(ANN), limiter.check(ANN), limiter.check(ANN)]
            expected = [False] * 3 if policy == "closed" else [True, True, False]
            assert [each.allowed for each in found] == expected
            assert {each.degraded for each in found} == {policy == "closed"}
        store.failing = frozenset()
        left = 1000 - (policy in {"open", "local"})
        explained = {each.id: each.decision for each in limiter.explain(ANN).applying}
        assert explained["all"] is not None
        assert explained["all"].remaining == left


def test_every_view_of_a_quota_tells_the_penalty(store: Store, clock: ManualClock) -> None:
    """`check`, `peek` and `explain` agree in every process, also one that has just looked."""
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        assert other.check(ANN).penalty is None
        storm(limiter, 4)
        clock.advance(2)  # the limit itself has room again
        for each in (other, limiter):
            explained = {rule.id: rule.decision for rule in each.explain(ANN).applying}
            api, everyone = explained["api"], explained["all"]
            for decision in (api, each.check(ANN), each.peek(ANN)):
                assert decision is not None
                assert (decision.allowed, decision.remaining) == (False, 0)
                assert (decision.penalty, decision.retry_after) == ("cooldown", 8)
            assert everyone is not None
            assert (everyone.allowed, everyone.penalty) == (True, None)
            assert each.counts()["api"].penalty_denied == 1
        clock.advance(8)
        assert limiter.explain(ANN).applying[0].decision == limiter.peek(ANN)
        assert limiter.check(ANN).penalty is None


def test_a_block_is_told_from_a_cool_down(store: Store, clock: ManualClock) -> None:
    """By its process until it ends, by others while more is left than any cool-downs."""
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        for _ in range(4):
            while not limiter.penalties():
                limiter.check(ANN)
            if not limiter.penalties()[0].blocked:
                clock.advance(limiter.peek(ANN).retry_after + 0.001)
        assert (limiter.check(ANN).penalty, other.check(ANN).penalty) == ("block", "block")
        clock.advance(limiter.peek(ANN).retry_after - 55)
        assert (limiter.check(ANN).penalty, other.check(ANN).penalty) == ("block", "cooldown")


def test_a_rule_in_shadow_mode_tells_no_penalty(store: Store, clock: ManualClock) -> None:
    """A penalty of a rule that is now in shadow mode denies no request."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 5)
        limiter.use(RULES.replace("id: api,", "id: api, mode: shadow,"))
        decision = limiter.explain(ANN).applying[0].decision
        assert decision is not None
        assert decision.penalty is None


async def test_penalties_on_asyncio(store: Store, clock: ManualClock) -> None:
    """AsyncLimiter gives the same penalties, for one request and for several in one call."""
    limiter = AsyncLimiter.from_rules(RULES, store=store, clock=clock)
    found = [(await limiter.check(ANN)).retry_after for _ in range(6)]
    assert found == [0, 1, 1, 1, 1, 10]
    assert (await limiter.peek(ANN)).retry_after == 10
    clock.advance(2)  # the limit itself has room again
    both = await limiter.evaluate_all([(BOB, 1), (ANN, 1)])
    assert [each.decision.allowed for each in both] == [True, False]
    assert both[1].decision.retry_after == 8
    assert (await limiter.peek(BOB)).remaining == 1
    await limiter.reset(ANN)
    assert (await limiter.evaluate(ANN)).decision.allowed
    await limiter.close()


async def test_is_barred_reads_the_store(
    request: pytest.FixtureRequest, store: Store, clock: ManualClock
) -> None:
    """After a reset it returns False, even on the node that gave the cool-down. A store in memory
    knows only its own process."""
    other_sees = "memory" not in request.node.name
    first = AsyncLimiter.from_rules(RULES, store=store, clock=clock)
    other = AsyncLimiter.from_rules(RULES, store=store, clock=clock)
    for _ in range(6):
        await first.check(ANN)
    assert await other.is_barred("api", "user:ann")
    assert await other.is_barred("api", "user:bob") != other_sees
    assert await other.is_barred("all", "tenant:acme") != other_sees
    await other.reset(ANN)
    assert first.penalties()
    assert await first.is_barred("api", "user:ann") != other_sees
    await first.close()
    await other.close()


def test_one_request_in_a_cool_down_denies_all_of_the_call(
    store: Store, clock: ManualClock
) -> None:
    """No quota is charged, as with every other denial."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 6)
        clock.advance(2)  # the limit itself has room again
        both = limiter.evaluate_all([(BOB, 1), (ANN, 1)])
        assert [each.decision.allowed for each in both] == [True, False]
        assert both[1].decision.retry_after == 8
        assert limiter.peek(BOB).remaining == 1
        for _ in range(3):
            limiter.evaluate_all([(ANN, 1)])
        assert [each.level for each in limiter.penalties()] == [2]


def test_denials_of_several_requests_in_one_call_count(clock: ManualClock) -> None:
    """A gateway checks several requests in one call. Denials there count as well."""
    with Limiter.from_rules(RULES, clock=clock) as limiter:
        for _ in range(5):
            limiter.evaluate_all([(ANN, 1)])
        assert [each.seconds for each in limiter.penalties()] == [10]


def test_an_unavailable_store_gives_no_penalties() -> None:
    """The denials of the failure policy do not count."""
    with Single() as server:
        server.kill()
        rules = RULES.replace("penalty", "on_failure: closed, penalty")
        with Limiter.from_rules(rules, store=server.uri) as limiter:
            assert not any(limiter.check(ANN) for _ in range(20))
            assert limiter.penalties() == []

        async def main() -> list[Any]:
            async with AsyncLimiter.from_rules(rules, store=server.uri) as awaited:
                assert not any([await awaited.check(ANN) for _ in range(20)])
                assert await awaited.is_barred("api", "user:ann")  # unknown counts as barred
                return awaited.penalties()

        assert asyncio.run(main()) == []


def test_penalties_are_off_by_default(clock: ManualClock) -> None:
    """Without `penalty`, a rule denies for as long as its limit requires, however often."""
    rules = "version: 1\nrules:\n  - {id: api, by: user, limits: 1/second}\n"
    with Limiter.from_rules(rules, clock=clock) as limiter:
        assert set(storm(limiter, 1_000)) == {0, 1}
        assert limiter.penalties() == []


def test_strikes_are_counted_within_a_period() -> None:
    """Two strikes, and one a minute later, are not three in a minute."""
    tracker, second = PenaltyTracker(), 10**9
    store = open_store("memory://")
    penalty = penalty_counters(PenaltySettings(after=3, within_s=60), "api", store.counter)
    key = ("api", "user:ann")

    def denied(at_s: int) -> bool:
        return tracker.note_denial(key, penalty, at_s * second, 1_000 * second)

    assert [denied(at) for at in (100, 101, 102)] == [False, False, False]
    assert [denied(at) for at in (170, 171, 172)] == [False, False, True]


def test_a_late_answer_does_not_end_a_cool_down() -> None:
    """The store was asked before the cool-down was given, and answered after it."""
    tracker, key, second = PenaltyTracker(), ("api", "user:ann"), 10**9
    assert tracker.note_cooldown(key, 2 * second, 10 * second)
    assert not tracker.note_cooldown(key, second, 0)
    assert tracker.cooldown_ns(key, 2 * second) == 10 * second


def test_the_tracked_subjects_are_bounded() -> None:
    """A new subject replaces the oldest, so invented names do not fill the memory."""
    tracker = PenaltyTracker()
    for number in range(TRACKED_MAX + 100):
        tracker.note_cooldown(("api", f"user:{number}"), 1, 0)
    assert len(tracker._tracked) == TRACKED_MAX
    assert tracker.cooldown_ns(("api", "user:0"), 1) is None
    assert tracker.cooldown_ns(("api", f"user:{TRACKED_MAX}"), 1) == 0


@pytest.mark.parametrize(
    ("level", "seconds"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 5), (6, 8), (100, 8)]
)
def test_penalties_are_rounded_up_to_seconds(level: int, seconds: int) -> None:
    """Cool-downs double up to the longest; then comes the block."""
    penalty = PenaltySettings(cooldown_s=0.5, cooldown_max_s=4.5, block_after=5, block_s=7.5)
    assert penalty_s(penalty, level) == seconds
