"""Those who do not wait: cool-downs that grow, then a block, on every kind of store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.redis_servers import Single, running
from tollkeeper import AsyncLimiter, Limiter, Request
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.rules.document.model import PenaltySettings
from tollkeeper.rules.penalties import LOOK_NS, TRACKED_MAX, Penalty, PenaltyTracker, penalty_s
from tollkeeper.testing import ManualClock

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
    """When each of so many requests at one instant is told to come back."""
    return [limiter.check(ANN).retry_after for _ in range(times)]


def test_the_first_cool_down(store: Store, clock: ManualClock) -> None:
    """The denials that did not wait are three; from then on nothing passes until it is over."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        assert storm(limiter, 6) == [0, 1, 1, 1, 1, 10]
        clock.advance(9.999)
        assert limiter.peek(ANN).retry_after == pytest.approx(0.001)
        clock.advance(0.001)
        assert limiter.check(ANN).allowed


def test_who_waits_is_left_alone(store: Store, clock: ManualClock) -> None:
    """A hundred denials, each waited for as it said: no penalty."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        for _ in range(100):
            assert limiter.check(ANN).allowed
            denied = limiter.check(ANN)
            clock.advance(denied.retry_after)
        assert limiter.penalties() == []


def test_others_are_not_penalised_along(store: Store, clock: ManualClock) -> None:
    """Of the same tenant; and what was denied cost the tenant nothing."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 20)
        assert limiter.check(BOB).allowed
        look = {rule.id: rule.decision for rule in limiter.explain(BOB).applying}
        assert look["all"] is not None
        assert look["all"].remaining == 998


def test_cool_downs_grow_to_a_block_and_are_forgotten(store: Store, clock: ManualClock) -> None:
    """10, 20, 25 (the longest) and an hour; then, by and by, it begins anew."""
    told: list[Penalty] = []
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        limiter.on_penalty(told.append)
        for _ in range(4):
            while not limiter.penalties():
                limiter.check(ANN)
            clock.advance(limiter.peek(ANN).retry_after + 0.001)
        assert [(each.level, each.seconds, each.blocked) for each in told] == [
            (1, 10, False),
            (2, 20, False),
            (3, 25, False),
            (4, 3600, True),
        ]
        assert {(each.rule, each.subject) for each in told} == {("api", "user:ann")}
        clock.advance(4 * 3600)
        storm(limiter, 6)
        assert (told[-1].level, told[-1].seconds) == (1, 10)


def test_who_goes_on_in_a_cool_down_gets_the_next_on_top(store: Store, clock: ManualClock) -> None:
    """So that nobody gains by not stopping."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        assert storm(limiter, 5)[-1] == 1
        assert storm(limiter, 4) == [10, 10, 10, 30]
        assert [each.level for each in limiter.penalties()] == [2]


def test_who_goes_on_in_a_block_is_blocked_once(store: Store, clock: ManualClock) -> None:
    """It is on top of all cool-downs, told once, and there is an honest Retry-After; the next one
    comes when there is room for it.
    """
    told: list[Penalty] = []
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        limiter.on_penalty(told.append)
        other.on_penalty(told.append)
        storm(limiter, 200)
        assert [each.seconds for each in told] == [10, 20, 25, 3600]
        left_s = 10 + 20 + 25 + 3600
        assert limiter.check(ANN).retry_after == left_s
        assert [each.until_ns - clock.now_ns() for each in limiter.penalties()] == [left_s * 10**9]
        counts = limiter.counts()["api"]
        assert (counts.cooldowns, counts.blocks) == (3, 1)
        storm(other, 200)  # which cannot give one either, nor says so
        assert len(told) == 4
        clock.advance(left_s - 20)
        storm(limiter, 200)
        assert [(each.seconds, each.blocked) for each in told[4:]] == [(3600, True)]
        assert limiter.peek(ANN).retry_after == 3620


def test_the_store_is_not_asked_for_what_it_has_no_room_for(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storm in a block is not one there: it is told once that there is no room."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 100)
        all_gates = limiter._rules().penalties.gates
        gates = all_gates["api"]
        calls: list[object] = []
        spy: Any = SimpleNamespace(check=lambda *args: calls.append(args), peek=gates.cooldown.peek)
        monkeypatch.setitem(all_gates, "api", gates._replace(level=spy, cooldown=spy))
        storm(limiter, 1_000)
        assert not calls


def test_a_listener_that_fails_is_no_concern_of_the_request(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is denied as it would be without one, and the log has the reason."""

    def fail(_: Penalty) -> None:
        raise ValueError("nobody is at home")

    with Limiter.from_rules(RULES, clock=clock) as limiter:
        limiter.on_penalty(fail)
        assert storm(limiter, 6)[-1] == 10
    assert "nobody is at home" in caplog.text


def test_a_node_that_has_not_heard_of_a_cool_down_gives_none(
    store: Store, clock: ManualClock
) -> None:
    """A client of many nodes was told by one; by the others it is told first, and then counted."""
    told: list[Penalty] = []
    with (
        Limiter.from_rules(RULES, store=store, clock=clock) as limiter,
        Limiter.from_rules(RULES, store=store, clock=clock) as other,
    ):
        other.check(ANN)  # looks, and will not for a second
        other.on_penalty(told.append)
        storm(limiter, 5)
        assert [each.level for each in limiter.penalties()] == [1]
        assert storm(other, 5) == [1, 1, 1, 1, 10]
        assert not told
        storm(other, 3)
        assert [each.level for each in told] == [2]


async def test_what_is_on_its_way_at_once_is_one_cool_down(clock: ManualClock) -> None:
    """Nobody of them could know of it."""
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


def test_a_reset_is_the_way_out(store: Store, clock: ManualClock) -> None:
    """And what came before is forgotten with it."""
    with Limiter.from_rules(RULES, store=store, clock=clock) as limiter:
        storm(limiter, 30)
        assert not limiter.check(ANN)
        limiter.reset(ANN)
        assert limiter.check(ANN).allowed
        assert limiter.penalties() == []
        assert storm(limiter, 6)[-1] == 10


def test_other_nodes_know_it(store: Store, clock: ManualClock) -> None:
    """A second limiter on the same store denies too; and lets pass a second after a pardon."""
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


async def test_awaited(store: Store, clock: ManualClock) -> None:
    """The same for asyncio: one by one, and several in one."""
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


async def test_a_pardon_is_known_to_whoever_asks_the_store(
    request: pytest.FixtureRequest, store: Store, clock: ManualClock
) -> None:
    """Also where the one who gave the cool-down has not heard of it; not of another's memory."""
    other_sees = "memory" not in request.node.name
    giving = AsyncLimiter.from_rules(RULES, store=store, clock=clock)
    other = AsyncLimiter.from_rules(RULES, store=store, clock=clock)
    for _ in range(6):
        await giving.check(ANN)
    assert await other.is_barred("api", "user:ann")
    assert await other.is_barred("api", "user:bob") != other_sees
    assert await other.is_barred("all", "tenant:acme") != other_sees
    await other.reset(ANN)
    assert giving.penalties()
    assert await giving.is_barred("api", "user:ann") != other_sees
    await giving.close()
    await other.close()


def test_one_in_a_cool_down_stops_all_that_are_asked_together(
    store: Store, clock: ManualClock
) -> None:
    """Nothing is spent by any, as with every other denial."""
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


def test_denials_that_are_asked_together_count(clock: ManualClock) -> None:
    """A gateway asks about several at once; not waiting there is not waiting."""
    with Limiter.from_rules(RULES, clock=clock) as limiter:
        for _ in range(5):
            limiter.evaluate_all([(ANN, 1)])
        assert [each.seconds for each in limiter.penalties()] == [10]


def test_a_store_that_is_away_penalises_nobody() -> None:
    """The failure policy answers, and what it denies is nobody's fault."""
    with Single() as server:
        server.kill()
        rules = RULES.replace("penalty", "on_failure: closed, penalty")
        with Limiter.from_rules(rules, store=server.uri) as limiter:
            assert not any(limiter.check(ANN) for _ in range(20))
            assert limiter.penalties() == []

        async def main() -> list[Any]:
            async with AsyncLimiter.from_rules(rules, store=server.uri) as awaited:
                assert not any([await awaited.check(ANN) for _ in range(20)])
                assert await awaited.is_barred("api", "user:ann")  # for all that is known
                return awaited.penalties()

        assert asyncio.run(main()) == []


def test_off_by_default(clock: ManualClock) -> None:
    """A rule that does not ask for it denies for as long as the limit says, however often."""
    rules = "version: 1\nrules:\n  - {id: api, by: user, limits: 1/second}\n"
    with Limiter.from_rules(rules, clock=clock) as limiter:
        assert set(storm(limiter, 1_000)) == {0, 1}
        assert limiter.penalties() == []


def test_strikes_are_counted_within_a_while() -> None:
    """Two that did not wait, and then one a minute later, are not three in a minute."""
    tracker, penalty, second = PenaltyTracker(), PenaltySettings(after=3, within_s=60), 10**9
    key = ("api", "user:ann")

    def denied(at_s: int) -> bool:
        return tracker.note_denial(key, penalty, at_s * second, 1_000 * second)

    assert [denied(at) for at in (100, 101, 102)] == [False, False, False]
    assert [denied(at) for at in (170, 171, 172)] == [False, False, True]


def test_what_is_watched_is_bounded() -> None:
    """Whoever makes up names pushes out the oldest, and nothing grows."""
    tracker = PenaltyTracker()
    for number in range(TRACKED_MAX + 100):
        tracker.note_cooldown(("api", f"user:{number}"), 1, 0)
    assert len(tracker._tracked) == TRACKED_MAX
    assert tracker.cooldown_ns(("api", "user:0"), 1) is None
    assert tracker.cooldown_ns(("api", f"user:{TRACKED_MAX}"), 1) == 0


@pytest.mark.parametrize(
    ("level", "seconds"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 5), (6, 8), (100, 8)]
)
def test_lengths_are_rounded_up_to_seconds(level: int, seconds: int) -> None:
    """Doubled from the first, up to the longest; then the block's."""
    penalty = PenaltySettings(cooldown_s=0.5, cooldown_max_s=4.5, block_after=5, block_s=7.5)
    assert penalty_s(penalty, level) == seconds
