"""The rules change under load, and their database is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from ratekeeper import AsyncLimiter, Limiter
from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.reading import read
from tests.faults.checker import excess
from tests.faults.load import (
    KEYS,
    Record,
    document,
    later,
    limit_of,
    now_ns,
    running_load,
)
from tests.faults.reporting import verify
from tests.postgres_server import Postgres
from tests.redis_servers import Single

LIMITS = (20, 5, 40, 10)
CHANGES = 10
IN_FORCE_S_MAX = 20.0
# Where Redis is well, a busy machine must not lead checks past their deadline. `verify` allows a
# second more than the deadline of production.
PATIENT = "deadline_ms=900&connect_ms=10000"


async def until_true(condition: Callable[[], bool], what: str) -> int:
    """Wait for a condition without blocking the load; return when it became true."""
    ends_ns = now_ns() + int(IN_FORCE_S_MAX * 1e9)
    while not condition():
        assert now_ns() < ends_ns, f"waited {IN_FORCE_S_MAX:g} s for this: {what}"
        await asyncio.sleep(0.01)
    return now_ns()


def written(path: Path, limit: int) -> None:
    """Replace the rule file by one with another limit, atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document(limit=limit), indent=1), encoding="utf-8")
    new.replace(path)


def over_between(record: Record, limit: int, from_ns: int, to_ns: int) -> int:
    """Return by how many units all keys exceed the limit of an interval."""
    return sum(
        excess(
            limit_of(key.case, limit),
            [
                each.admitted
                for each in record.of(key)
                if each.allowed and from_ns <= each.sent_ns and each.answered_ns <= to_ns
            ],
        )
        for key in KEYS
    )


def _changed(limiters: Sequence[AsyncLimiter | Limiter], before: str) -> bool:
    return all(each.rules_status().version != before for each in limiters)


async def test_rules_change_under_load(tmp_path: Path) -> None:
    """While a version is in force on all nodes, no user gets more than its limit.

    Earlier admissions count too, so a lower limit acts at once. Over the whole time, no user gets
    more than the highest limit.
    """
    path = tmp_path / "rules.yaml"
    written(path, LIMITS[0])
    record = Record()
    held: list[tuple[int, int, int]] = []
    delays_s = []
    with Single() as server:
        awaited = AsyncLimiter.from_rules(path, store=server.uri, poll=0.05)
        threaded = Limiter.from_rules(path, store=server.uri, poll=0.05)
        try:
            async with running_load(record, awaited, threaded):
                for limit in islice(cycle(LIMITS[1:]), CHANGES):
                    before = awaited.rules_status().version
                    began_ns = now_ns()
                    written(path, limit)
                    in_force_ns = await until_true(
                        partial(_changed, (awaited, threaded), before),
                        "a version is in force",
                    )
                    delays_s.append((in_force_ns - began_ns) / 1e9)
                    await asyncio.sleep(0.4)
                    held.append((limit, in_force_ns, now_ns()))
        finally:
            await awaited.close()
            await asyncio.to_thread(threaded.close)
    degraded = sum(each.degraded for each in record.noted)
    print(
        f"{CHANGES} changes of the rules: {sum(each.allowed for each in record.noted)} admitted, "
        f"{degraded} answers degraded, over by "
        f"{sum(over_between(record, *each) for each in held)} units; in force on both nodes after "
        f"{max(delays_s):.2f} s at most; slowest {record.slowest_ns() / 1e6:.0f} ms, "
        f"this machine {record.lag_ns / 1e6:.0f} late"
    )
    exact = Record([each for each in record.noted if not each.degraded])
    assert [over_between(exact, *each) for each in held] == [0] * CHANGES
    assert over_between(exact, max(LIMITS), 0, now_ns()) == 0
    # The load did reach the limits; otherwise the checks above would prove nothing.
    assert any(not each.allowed for each in exact.noted)


async def test_postgresql_is_killed() -> None:
    """The last good rules stay in force, and nodes follow changes again once PostgreSQL is back."""
    record = Record()
    with Single() as server, Postgres() as database:
        url = database.new_database()
        rules = read(json.dumps(document(), indent=1))
        changed = replace(rules, deny=("user:nobody",))
        async with await Repository.open(url) as repository:
            await repository.apply(rules, author="ann", expected=0)
        store = f"{server.uri}?{PATIENT}"
        awaited = await asyncio.to_thread(
            lambda: AsyncLimiter.from_rules(url, store=store, poll=0.2)
        )
        threaded = await asyncio.to_thread(lambda: Limiter.from_rules(url, store=store, poll=0.2))
        limiters = (awaited, threaded)
        try:
            async with running_load(record, awaited, threaded):
                await later(1.0, database.kill)
                killed_ns = now_ns()
                seen_ns = await until_true(
                    lambda: all(bool(each.rules_status().error) for each in limiters),
                    "both nodes notice the dead database",
                )
                await later(0.5, database.start)
                healed_ns = now_ns()
                async with await Repository.open(url) as repository:
                    await repository.apply(changed, author="ann", expected=1)
                back_ns = await until_true(
                    lambda: all(each.rules_status().version == "2" for each in limiters),
                    "the next version is in force",
                )
                # On a busy machine one more poll may fail before one succeeds.
                await until_true(
                    lambda: not any(each.rules_status().error for each in limiters), "no error"
                )
                await later(0.5)
        finally:
            await awaited.close()
            await asyncio.to_thread(threaded.close)
    found = verify(
        record,
        f"PostgreSQL killed: noticed after {(seen_ns - killed_ns) / 1e9:.1f} s, a change in force "
        f"{(back_ns - healed_ns) / 1e9:.1f} s after it was back",
    )
    noted = len(record.noted)
    assert sum(each.degraded for each in found.values()) < 0.05 * noted
