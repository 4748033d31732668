"""Failure policies: the answer to a check when the store cannot decide, and local limits."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limiter, Request
from ratekeeper.core.errors import (
    ConfigError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.core.model import Decision, Limit
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.decide import failure
from ratekeeper.decide.failure import (
    FAILURE_POLICIES,
    LOG_EVERY_S,
    OUTAGE_GAP_NS,
    FailedCheck,
    FailurePolicy,
    LocalCheck,
    LocalFallback,
    LocalLimits,
    check_policy,
)
from ratekeeper.decide.store import BreakerState, Store
from ratekeeper.decide.stores import open_fallback_store
from ratekeeper.testing import ManualClock
from tests.redis_servers import Single

LIMIT = Limit(10, per=1)
ERROR = StoreTimeout("late")


def answered(*policies: FailurePolicy, decided: Sequence[Decision] = ()) -> Decision:
    """Return the answer to checks that failed, with these policies."""
    check = LocalCheck((LIMIT,), "orders", "user:ann", 1)
    failed = [FailedCheck(ERROR, policy, check) for policy in policies]
    return LocalLimits(LocalFallback(), ManualClock()).answer(failed, decided, None, spend=True)


def test_open_allows_with_nothing_remaining() -> None:
    """`open` allows, degraded, with `remaining` 0 because nothing was counted."""
    decision = answered("open")
    assert decision == Decision(True, LIMIT, 0, 0, 1_000_000_000, 0, "orders", True)
    assert [each.subject for each in decision.uncounted] == ["user:ann"]


@pytest.mark.parametrize("others", [(), ("open",), ("local", "open")])
def test_closed_denies_for_a_second(others: Sequence[FailurePolicy]) -> None:
    """`closed` denies, degraded. The second keeps clients from retrying in a tight loop."""
    decision = answered(*others, "closed")
    assert decision == Decision(False, LIMIT, 0, 1_000_000_000, 1_000_000_000, 0, "orders", True)
    assert decision.retry_after == 1.0


def test_raise_raises_the_error() -> None:
    """`raise` raises the store's own error, not a copy, whatever the other policies are."""
    with pytest.raises(StoreError) as caught:
        answered("closed", "raise")
    assert caught.value is ERROR


def test_the_decisions_of_the_store_are_in_the_answer() -> None:
    """The limit that the store has decided has numbers, and the answer is degraded."""
    exact = Decision(True, Limit(5, per=1), 3, 0, 1_000_000_000, 0, "tenant")
    decision = answered("open", decided=[exact])
    assert (decision.rule, decision.remaining, decision.degraded) == ("tenant", 3, True)


def test_there_are_four_policies() -> None:
    """Each of the four is accepted."""
    assert FAILURE_POLICIES == ("open", "closed", "local", "raise")
    for policy in FAILURE_POLICIES:
        check_policy(policy)


@pytest.mark.parametrize("policy", ["", "OPEN", "nearby", None, 1, [], {}, object])
def test_an_unknown_policy_is_rejected(policy: Any) -> None:
    """The error shows the given value and the known policies."""
    with pytest.raises(ConfigError, match="choose one of open, closed, local, raise"):
        check_policy(policy)


TEN = (Limit(10, per=60),)
UNAVAILABLE = StoreUnavailable("connection refused")


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """The URI of a server that was killed: its port refuses connections."""
    with Single() as server:
        server.kill()
        yield server.uri


def check_locally(
    counts: LocalLimits, user: str = "ann", units: int = 1, ip: str = "192.0.2.1"
) -> Any:
    """Check the rule `api` once while the store is unavailable."""
    counts.note_failure(UNAVAILABLE)
    return counts.decide([LocalCheck(TEN, "api", f"user:{user}", units)], ip, spend=True)


def passed(counts: LocalLimits, times: int, **request: Any) -> int:
    """Return how many of `times` checks pass."""
    return sum(all(check_locally(counts, **request)) for _ in range(times))


@pytest.mark.parametrize(("nodes", "admitted"), [(1, 10), (2, 5), (3, 3), (10, 1), (1000, 1)])
def test_each_node_has_its_share(clock: ManualClock, nodes: int, admitted: int) -> None:
    """All nodes together stay within the limit. A share below one unit is one unit."""
    counts = LocalLimits(LocalFallback(nodes=nodes), clock)
    assert passed(counts, 20) == admitted
    assert all(each.degraded for each in check_locally(counts))


def test_the_ceiling_counts_all_requests_together(clock: ManualClock) -> None:
    """The ceiling applies to all subjects and rules together. Denied requests cost nothing."""
    counts = LocalLimits(LocalFallback(ceiling="3/minute"), clock)
    assert [passed(counts, 2, user=name) for name in ("ann", "bob", "cid")] == [2, 1, 0]
    assert check_locally(counts, "dan")[-1].rule == "ceiling"
    clock.advance(60)
    assert passed(counts, 5, user="dan") == 3
    # The requests that the ceiling denied spent nothing of dan's limit.
    assert (
        counts.decide([LocalCheck(TEN, "api", "user:dan", 0)], None, spend=False)[0].remaining == 7
    )


def test_emergency_limits_apply_in_a_long_outage(clock: ManualClock) -> None:
    """They apply by address from `emergency_after` on. A gap without failures ends the outage."""
    counts = LocalLimits(LocalFallback(emergency="2/minute", emergency_after=60), clock)
    assert passed(counts, 5) == 5
    for _ in range(20):
        clock.advance(3)
        counts.note_failure(UNAVAILABLE)
    assert counts.outage_ns() == 60 * 10**9
    assert passed(counts, 5, ip="192.0.2.2") == 2
    assert passed(counts, 5, ip="192.0.2.3") == 2
    assert check_locally(counts, ip="192.0.2.3")[-1].rule == "emergency"
    clock.advance((OUTAGE_GAP_NS + 1) / 1e9)
    assert counts.outage_ns() == 0
    assert passed(counts, 5, ip="192.0.2.3") == 5


def test_requests_without_an_address_share_one_emergency_limit(clock: ManualClock) -> None:
    """A client cannot evade the emergency limits by hiding its address."""
    counts = LocalLimits(LocalFallback(emergency="2/minute", emergency_after=0), clock)
    found = [counts.decide([], None, spend=True) for _ in range(3)]
    assert [[each.rule for each in every] for every in found] == [[], [], ["emergency"]]


def test_no_decision_without_any_local_limit(clock: ManualClock) -> None:
    """Without local rules and without a ceiling, the failure policy alone answers."""
    assert LocalLimits(LocalFallback(), clock).decide([], "192.0.2.1", spend=True) == []


def test_a_peek_spends_nothing(clock: ManualClock) -> None:
    """A peek spends nothing while the store is unavailable, either."""
    counts = LocalLimits(LocalFallback(ceiling="3/minute"), clock)
    for _ in range(5):
        found = counts.decide([LocalCheck(TEN, "api", "user:ann", 1)], None, spend=False)
        assert [each.remaining for each in found] == [10]


def test_a_cost_above_the_share_is_denied(clock: ManualClock) -> None:
    """The cost fits the limit, so it may pass when the store is available again."""
    decision = check_locally(LocalLimits(LocalFallback(nodes=5), clock), units=9)[0]
    assert (decision.allowed, decision.degraded, decision.retry_after) == (False, True, 1.0)


def _admit(path: str, times: int, results: Any) -> None:
    counts = LocalLimits(LocalFallback(store=f"shared://{path}"), ManualClock(start=1_800_000_000))
    results.put(passed(counts, times))


@pytest.mark.long
def test_the_workers_of_a_machine_count_together(tmp_path: Path) -> None:
    """Four processes on one file admit as much as one process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    path = str(tmp_path / "local_fallback")
    workers = [context.Process(target=_admit, args=(path, 10, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    admitted = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert sum(admitted) == 10


def degraded(found: list[Decision]) -> list[bool]:
    assert all(each.degraded for each in found)
    return [each.allowed for each in found]


def test_a_limiter_without_rules_limits_locally_too(dead: str) -> None:
    """`on_failure="local"` works for threads and asyncio, for one check and for several."""
    how: Any = {"store": dead, "on_failure": "local", "local_fallback": LocalFallback(nodes=2)}
    with Limiter("4/minute", **how) as limiter:
        assert degraded([limiter.check("ann") for _ in range(3)]) == [True, True, False]
        assert limiter.evaluate("ann").kind == "limited"
        both = limiter.evaluate_all([("bob", 1), ("ann", 1)])
        assert degraded([each.decision for each in both]) == [True, False]
        assert limiter.peek("bob").remaining == 1

    async def main() -> list[Decision]:
        async with AsyncLimiter("4/minute", **how) as awaited:
            return [await awaited.check("ann") for _ in range(3)]

    assert degraded(asyncio.run(main())) == [True, True, False]


def test_the_ceiling_also_limits_rules_that_fail_open(dead: str) -> None:
    """`open` allows without counting, up to the ceiling of the machine; for rules and limits."""
    local_fallback = LocalFallback(ceiling="3/minute")
    with Limiter("1/minute", store=dead, local_fallback=local_fallback) as limiter:
        assert degraded([limiter.check("ann") for _ in range(4)]) == [True, True, True, False]
    rules = "version: 1\nrules:\n  - {id: api, by: user, limits: 1/minute}\n"
    with Limiter.from_rules(rules, store=dead, local_fallback=local_fallback) as limiter:
        requests = [Request(user=name) for name in ("ann", "ann", "bob", "cid")]
        assert degraded([limiter.check(each) for each in requests]) == [True, True, True, False]


class Monitored:
    """The monitor of a store whose one server has been failing for some time."""

    failing_s = 0.0

    def breakers(self) -> list[BreakerState]:
        state = BreakerState("server", "closed", 0.0, 0, 0, None, "")
        return [replace(state, failing_s=self.failing_s)]


def test_the_clock_of_an_outage_follows_the_store_not_the_traffic(clock: ManualClock) -> None:
    """One request a minute: the emergency limits apply once the server has failed long enough."""
    counts = LocalLimits(LocalFallback(emergency="1/hour", emergency_after=60), clock)
    monitor: Any = Monitored()
    counts.monitor = monitor
    for minute in range(3):
        monitor.failing_s = minute * 60.0
        counts.note_failure(UNAVAILABLE)
        assert counts.outage_ns() == minute * 60 * 10**9
        assert passed(counts, 1) == (minute < 2)
        clock.advance(60)
    # The server has answered since.
    monitor.failing_s = 0.0
    assert counts.outage_ns() == 0


def test_an_outage_goes_on_until_the_server_answers(dead: str, clock: ManualClock) -> None:
    """Also in the pauses between the requests of a limiter, and for one without rules."""
    with Limiter("1/minute", store=dead, clock=clock) as limiter:
        assert limiter._local.outage_ns() == 0
        assert limiter.check("ann").degraded
        clock.advance(3_600)  # no request: the server's own clock goes on
        assert limiter._local.outage_ns() > 0


def test_the_emergency_limits_are_by_address_without_rules_too(dead: str) -> None:
    """A limiter that counts requests by another field still uses their address."""
    local_fallback = LocalFallback(emergency="2/minute", emergency_after=0)
    how: Any = {"store": dead, "by": ["user"], "local_fallback": local_fallback}
    requests = [Request(user="ann", ip=ip) for ip in ("192.0.2.1", "192.0.2.2") for _ in range(3)]
    with Limiter("9/minute", **how) as limiter:
        assert degraded([limiter.check(each) for each in requests]) == [True, True, False] * 2
    with Limiter("9/minute", **how) as limiter:
        found = limiter.evaluate_all([(each, 1) for each in requests])
        assert degraded([each.decision for each in found]) == [True, True, False] * 2

    async def main() -> list[Decision]:
        async with AsyncLimiter("9/minute", **how) as awaited:
            together = await awaited.evaluate_all([(each, 1) for each in requests[:3]])
            return [each.decision for each in together] + [
                await awaited.check(each) for each in requests[3:]
            ]

    assert degraded(asyncio.run(main())) == [True, True, False] * 2


def test_closing_a_limiter_closes_the_shared_file(dead: str, tmp_path: Path) -> None:
    """Both limiters close it, because the number of processes that map a file is bounded."""
    path = tmp_path / "local_fallback"
    how: Any = {"store": dead, "local_fallback": LocalFallback(store=f"shared://{path}")}

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    with Limiter("9/minute", **how):
        assert mapped() > 0
    assert mapped() == 0

    async def main() -> None:
        async with AsyncLimiter("9/minute", **how):
            assert mapped() > 0
        assert mapped() == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"nodes": 0}, "nodes=0 is not a whole number from 1"),
        ({"nodes": True}, "nodes=True"),
        ({"nodes": 1.5}, "nodes=1.5"),
        ({"store": "redis://localhost"}, "is not on this machine"),
        ({"store": None}, "is not on this machine"),
        ({"ceiling": "lots"}, "lots"),
        ({"emergency": []}, "1 to"),
        ({"emergency_after": -1}, "emergency_after"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_settings_are_rejected(how: dict[str, Any], problem: str) -> None:
    """The constructor rejects them and shows a correct example."""
    with pytest.raises(ConfigError, match=problem):
        LocalFallback(**how)


def test_an_argument_of_another_type_is_rejected() -> None:
    """The error shows a correct example."""
    with pytest.raises(ConfigError, match=r"local_fallback=LocalFallback\(nodes=20\)"):
        Limiter("1/minute", local_fallback=3)  # type: ignore[arg-type]  # on purpose


def test_an_unusable_file_is_an_error_at_startup() -> None:
    """The error does not wait for the first outage."""
    with pytest.raises(Exception, match="nowhere"):
        Limiter("1/minute", local_fallback=LocalFallback(store="shared:///nowhere/at/all"))


def test_an_outage_is_logged_once_a_minute(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all limiters of the process together, and for each kind of error."""
    seldom = SeldomLog(failure._log, logging.WARNING, LOG_EVERY_S, lambda: clock.now_ns() / 1e9)
    monkeypatch.setattr(failure, "_outages", seldom)
    limiters = [LocalLimits(LocalFallback(), clock) for _ in range(1_000)]
    for _ in range(61):
        for counts in limiters:
            counts.note_failure(UNAVAILABLE)
        clock.advance(1)
    limiters[0].note_failure(StoreFull("no room"))
    omitted = " (59999 more were not logged)"
    assert [record.getMessage().removeprefix("the store has ") for record in caplog.records] == [
        "been unable to decide for 0 s, and on_failure answers: connection refused",
        f"been unable to decide for 60 s, and on_failure answers: connection refused{omitted}",
        "been unable to decide for 61 s, and on_failure answers: no room",
    ]


class Fleet:
    """Shared counts with a fixed room; `answers` is False if they cannot answer."""

    def __init__(self, nodes: int = 5, room: int = 100, store: Store | None = None) -> None:
        self.count, self.room, self.answers, self.store = nodes, room, True, store
        self.asked: list[int] = []
        self.admitted: list[LocalCheck] = []

    def nodes(self) -> int:
        return self.count

    def decide(self, checks: Sequence[LocalCheck], *, spend: bool) -> list[Decision] | None:
        if not self.answers:
            return None
        units = sum(each.units for each in checks)
        self.asked.append(units)
        allowed = units <= self.room
        self.room -= units if allowed and spend else 0
        wait_ns = 0 if allowed else 3_000_000_000
        return [
            Decision(allowed, each.limits[0], self.room, wait_ns, wait_ns, rule=each.rule)
            for each in checks
        ]

    def note_admitted(self, checks: Sequence[LocalCheck]) -> None:
        self.admitted.extend(checks)


def in_fleet(clock: ManualClock, fleet: Fleet, **how: Any) -> LocalLimits:
    counts = LocalLimits(LocalFallback(**how), clock)
    counts.fleet = fleet
    return counts


def test_a_node_of_a_fleet_admits_up_to_twice_its_share(clock: ManualClock) -> None:
    """The others see nothing of the subject, so it may have more than a share: 2 of 10/5."""
    fleet = Fleet(nodes=5)
    counts = in_fleet(clock, fleet, nodes=1)
    assert passed(counts, 20) == 4
    assert all(each.degraded for each in check_locally(counts))
    assert [each.units for each in fleet.admitted] == [1] * 4


def test_the_counts_of_the_fleet_deny_below_the_ceiling(clock: ManualClock) -> None:
    """A denial by them takes nothing from the ceiling, and tells when to retry."""
    fleet = Fleet(nodes=5, room=3)
    counts = in_fleet(clock, fleet)
    assert passed(counts, 3) == 3
    [denied] = check_locally(counts)
    assert (denied.allowed, denied.degraded, denied.retry_after) == (False, True, 3.0)
    assert passed(counts, 20) == 0
    fleet.room = 100
    assert passed(counts, 20) == 1  # the ceiling: 4 of this subject


def test_without_an_answer_of_the_fleet_the_share_is_fixed(clock: ManualClock) -> None:
    """It is the share of one of the last known number of nodes, and counts what came before."""
    fleet = Fleet(nodes=5)
    counts = in_fleet(clock, fleet, nodes=1)
    fleet.answers = False
    assert passed(counts, 20) == 2
    assert len(fleet.admitted) == 2
    fleet.answers = True
    assert passed(counts, 20) == 2  # the ceiling counts them, too
    assert check_locally(counts)[0].allowed is False


def test_ceiling_emergency_and_fleet_pass_together(clock: ManualClock) -> None:
    """A request that one of them denies takes nothing from the others."""
    fleet = Fleet(nodes=5, room=1)
    counts = in_fleet(clock, fleet, ceiling="3/minute", emergency="3/minute", emergency_after=0)
    assert passed(counts, 5) == 1  # the fleet denies the others
    fleet.room = 10
    assert passed(counts, 5, user="bob") == 2  # the ceiling has counted one request of ann
    assert fleet.room == 8
    assert check_locally(counts, "cid")[-1].rule in {"ceiling", "emergency"}
    clock.advance(60)
    fleet.room = 2
    both = [LocalCheck(TEN, "api", "user:dan", 1), LocalCheck(TEN, "login", "user:dan", 9)]
    assert not all(counts.decide(both, None, spend=True))  # the second is above its ceiling
    assert fleet.room == 2
    assert passed(counts, 5, user="dan") == 2


def test_the_ceiling_is_that_of_the_node_not_of_each_process(
    clock: ManualClock, tmp_path: Path
) -> None:
    """The processes count in the node's table. A file of the local fallback comes first."""
    uri = f"shared://{tmp_path / 'node'}"
    stores = [open_fallback_store(uri, clock) for _ in range(2)]
    workers = [in_fleet(clock, Fleet(nodes=5, store=store)) for store in stores]
    assert [passed(worker, 20) for worker in workers] == [4, 0]
    own = in_fleet(
        clock, Fleet(nodes=5, store=stores[0]), store=f"shared://{tmp_path / 'fallback'}"
    )
    assert passed(own, 20) == 4
    for worker in (*workers, own):
        worker.close()
    assert stores[0].counter(TEN, "api").peek("user:ann", 0).remaining == 6  # it is still open
    for store in stores:
        store.close()


def test_a_peek_in_a_fleet_spends_nothing(clock: ManualClock) -> None:
    """Neither of the node's counts nor of the fleet's."""
    fleet = Fleet(nodes=5)
    counts = in_fleet(clock, fleet)
    check = LocalCheck(TEN, "api", "user:ann", 1)
    for _ in range(9):
        assert counts.decide([check], None, spend=False)[0].remaining == 4
    assert (fleet.room, fleet.admitted) == (100, [])
