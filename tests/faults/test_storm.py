"""A retry storm: denied clients retry without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ratekeeper import AsyncLimiter
from ratekeeper.core.model import UNIT_ALGORITHMS
from tests.faults.load import LIMIT, PER_S, RULES_TEXT, Key, Record, exact_excess, now_ns
from tests.redis_servers import Single

CLIENTS = 200
STORM_S = 2.0
TIMES = 10
# One that admits, and one that finds the next denial, which the process then remembers.
CALLS_MAX = 2
KEYS = {
    "a client of each rule": tuple(
        Key("closed", algorithm, algorithm) for algorithm in UNIT_ALGORITHMS
    ),
    "one client of all rules": tuple(Key("closed", algorithm) for algorithm in UNIT_ALGORITHMS),
}


def calls_of(server: Single) -> int:
    """Return the number of script calls that the server has received."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


async def storm(limiter: AsyncLimiter, record: Record, keys: Sequence[Key]) -> None:
    """Run all clients, at `TIMES` times the limit together and at equal rates."""
    gap_s = CLIENTS / len(keys) / (TIMES * LIMIT / PER_S)
    ends_ns = now_ns() + int(STORM_S * 1e9)

    async def ask(number: int) -> None:
        key = keys[number % len(keys)]
        await asyncio.sleep(gap_s * number / CLIENTS)
        while now_ns() < ends_ns:
            sent_ns = now_ns()
            record.note(key, sent_ns, await limiter.check(key.request), "client")
            await asyncio.sleep(gap_s)

    await asyncio.gather(*(ask(number) for number in range(CLIENTS)))


@pytest.mark.parametrize(
    ("clients", "tries"),
    [
        ("a client of each rule", 4),
        ("one client of all rules", 4),
    ],
)
async def test_a_retry_storm_costs_the_store_almost_nothing(clients: str, tries: int) -> None:
    """However many denials there are, Redis gets at most two calls for each admission.

    The test tries again, because a busy machine lets the clients pile up.
    """
    for _ in range(tries):
        each_admission = await calls_for_each_admission(clients)
        if each_admission < CALLS_MAX:
            break
    assert each_admission < CALLS_MAX


async def calls_for_each_admission(clients: str) -> float:
    """Run one storm; print and return its calls to Redis for each admission."""
    record, keys = Record(), KEYS[clients]
    with Single() as server:
        async with AsyncLimiter.from_rules(RULES_TEXT, store=server.uri) as limiter:
            await storm(limiter, record, keys)
        calls = calls_of(server)
    exact = [each for each in record.noted if not each.degraded]
    admitted = sum(each.allowed for each in exact)
    denied = len(exact) - admitted
    print(
        f"retry storm, {CLIENTS} clients at {TIMES} times the limit, {clients}: "
        f"{admitted} admitted, {denied} denied, "
        f"{len(record.noted) - len(exact)} answers degraded; {calls} calls to "
        f"Redis, {calls / admitted:.2f} for each admission"
    )
    assert sum(exact_excess(record, key) for key in keys) == 0
    return calls / admitted
