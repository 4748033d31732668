"""What limits while the store is away: a machine's share, the ceiling, the emergency limits."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.redis_servers import Single
from tollkeeper import (
    AsyncLimiter,
    ConfigError,
    Decision,
    Limit,
    Limiter,
    Request,
    StoreUnavailable,
)
from tollkeeper.decide.local_fallback import OUTAGE_GAP_NS, LocalCheck, LocalFallback, LocalLimits
from tollkeeper.testing import ManualClock

TEN = (Limit(10, per=60),)
AWAY = StoreUnavailable("nobody listens")


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """The URI of a server that is gone: nobody listens on its port."""
    with Single() as server:
        server.kill()
        yield server.uri


def ask(counts: LocalLimits, user: str = "ann", units: int = 1, ip: str = "192.0.2.1") -> Any:
    """One check under the rule `api`, while the store is away."""
    counts.note_failure(AWAY)
    return counts.decide([LocalCheck(TEN, "api", f"user:{user}", units)], ip, spend=True)


def passed(counts: LocalLimits, times: int, **who: Any) -> int:
    """How many of so many checks pass."""
    return sum(all(ask(counts, **who)) for _ in range(times))


@pytest.mark.parametrize(("nodes", "admitted"), [(1, 10), (2, 5), (3, 3), (10, 1), (1000, 1)])
def test_each_node_has_its_share(clock: ManualClock, nodes: int, admitted: int) -> None:
    """So that all of them together stay within the limit; below one unit each, each has one."""
    counts = LocalLimits(LocalFallback(nodes=nodes), clock)
    assert passed(counts, 20) == admitted
    assert all(each.degraded for each in ask(counts))


def test_the_ceiling_is_for_everyone_together(clock: ManualClock) -> None:
    """Whoever asks, and under whichever rule: no more than that; denied ones cost nothing."""
    counts = LocalLimits(LocalFallback(ceiling="3/minute"), clock)
    assert [passed(counts, 2, user=name) for name in ("ann", "bob", "cid")] == [2, 1, 0]
    assert ask(counts, "dan")[-1].rule == "ceiling"
    clock.advance(60)
    assert passed(counts, 5, user="dan") == 3
    # Of what dan was let, nothing was spent by those that the ceiling denied.
    assert (
        counts.decide([LocalCheck(TEN, "api", "user:dan", 0)], None, spend=False)[0].remaining == 7
    )


def test_an_old_outage_meets_the_emergency_limits(clock: ManualClock) -> None:
    """By address, from `emergency_after` on; a gap without failures is the end of an outage."""
    counts = LocalLimits(LocalFallback(emergency="2/minute", emergency_after=60), clock)
    assert passed(counts, 5) == 5
    for _ in range(20):
        clock.advance(3)
        counts.note_failure(AWAY)
    assert counts.away_ns() == 60 * 10**9
    assert passed(counts, 5, ip="192.0.2.2") == 2
    assert passed(counts, 5, ip="192.0.2.3") == 2
    assert ask(counts, ip="192.0.2.3")[-1].rule == "emergency"
    clock.advance((OUTAGE_GAP_NS + 1) / 1e9)
    assert counts.away_ns() == 0
    assert passed(counts, 5, ip="192.0.2.3") == 5


def test_those_without_an_address_share_one(clock: ManualClock) -> None:
    """Nobody gets around the emergency limits by hiding where they come from."""
    counts = LocalLimits(LocalFallback(emergency="2/minute", emergency_after=0), clock)
    found = [counts.decide([], None, spend=True) for _ in range(3)]
    assert [[each.rule for each in every] for every in found] == [[], [], ["emergency"]]


def test_nothing_to_say_where_nothing_is_set(clock: ManualClock) -> None:
    """No rule that counts here, no ceiling: the failure policy alone answers."""
    assert LocalLimits(LocalFallback(), clock).decide([], "192.0.2.1", spend=True) == []


def test_looking_spends_nothing(clock: ManualClock) -> None:
    """A peek while the store is away, as ever."""
    counts = LocalLimits(LocalFallback(ceiling="3/minute"), clock)
    for _ in range(5):
        found = counts.decide([LocalCheck(TEN, "api", "user:ann", 1)], None, spend=False)
        assert [each.remaining for each in found] == [10]


def test_a_cost_beyond_the_share_is_denied_for_now(clock: ManualClock) -> None:
    """It fits the limit, so it may pass when the store is back."""
    decision = ask(LocalLimits(LocalFallback(nodes=5), clock), units=9)[0]
    assert (decision.allowed, decision.degraded, decision.retry_after) == (False, True, 1.0)


def _admit(path: str, times: int, results: Any) -> None:
    counts = LocalLimits(LocalFallback(store=f"shared://{path}"), ManualClock(start=1_800_000_000))
    results.put(passed(counts, times))


def test_the_workers_of_a_machine_count_together(tmp_path: Path) -> None:
    """Four processes on one file admit what one would."""
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
    """`on_failure="local"`, threads and asyncio, alone and together."""
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


def test_the_ceiling_bounds_what_is_open(dead: str) -> None:
    """Open lets pass uncounted, but not more than the machine can bear; for rules and limits."""
    local_fallback = LocalFallback(ceiling="3/minute")
    with Limiter("1/minute", store=dead, local_fallback=local_fallback) as limiter:
        assert degraded([limiter.check("ann") for _ in range(4)]) == [True, True, True, False]
    rules = "version: 1\nrules:\n  - {id: api, by: user, limits: 1/minute}\n"
    with Limiter.from_rules(rules, store=dead, local_fallback=local_fallback) as limiter:
        who = [Request(user=name) for name in ("ann", "ann", "bob", "cid")]
        assert degraded([limiter.check(each) for each in who]) == [True, True, True, False]


def test_the_emergency_limits_are_by_address_without_rules_too(dead: str) -> None:
    """A limiter that counts requests by something else still knows where they come from."""
    local_fallback = LocalFallback(emergency="2/minute", emergency_after=0)
    how: Any = {"store": dead, "by": ["user"], "local_fallback": local_fallback}
    asked = [Request(user="ann", ip=ip) for ip in ("192.0.2.1", "192.0.2.2") for _ in range(3)]
    with Limiter("9/minute", **how) as limiter:
        assert degraded([limiter.check(each) for each in asked]) == [True, True, False] * 2
    with Limiter("9/minute", **how) as limiter:
        found = limiter.evaluate_all([(each, 1) for each in asked])
        assert degraded([each.decision for each in found]) == [True, True, False] * 2

    async def main() -> list[Decision]:
        async with AsyncLimiter("9/minute", **how) as awaited:
            together = await awaited.evaluate_all([(each, 1) for each in asked[:3]])
            return [each.decision for each in together] + [
                await awaited.check(each) for each in asked[3:]
            ]

    assert degraded(asyncio.run(main())) == [True, True, False] * 2


def test_closing_a_limiter_lets_go_of_the_file(dead: str, tmp_path: Path) -> None:
    """Of either kind: a file can be open so many times and no more."""
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
def test_wrong_settings_are_refused(how: dict[str, Any], problem: str) -> None:
    """At once, with what would be right."""
    with pytest.raises(ConfigError, match=problem):
        LocalFallback(**how)


def test_what_is_no_standby_is_refused() -> None:
    """With an example of one."""
    with pytest.raises(ConfigError, match=r"local_fallback=LocalFallback\(nodes=20\)"):
        Limiter("1/minute", local_fallback=3)  # type: ignore[arg-type]  # on purpose


def test_a_file_that_cannot_be_used_is_known_at_the_start() -> None:
    """Not when the store is away already."""
    with pytest.raises(Exception, match="nowhere"):
        Limiter("1/minute", local_fallback=LocalFallback(store="shared:///nowhere/at/all"))


def test_an_outage_is_told_in_the_log_once_a_minute(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """When it begins, while it lasts, and when the next one begins; not with every check."""
    counts = LocalLimits(LocalFallback(), clock)
    for _ in range(65):
        counts.note_failure(AWAY)
        clock.advance(1)
    clock.advance(OUTAGE_GAP_NS / 1e9)
    counts.note_failure(AWAY)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(",")[2].partition(" now")[0] for line in said] == [
        " for 0 s",
        " for 60 s",
        " for 0 s",
    ]
    assert all("nobody listens" in line for line in said)
