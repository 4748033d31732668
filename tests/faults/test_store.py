"""Redis fails under load: killed, stopped, full, and behind a network that does what it likes."""

from __future__ import annotations

from tests.faults.load import later, now_ns, steady_load, until_calm
from tests.faults.telling import verify
from tests.redis_servers import Single

BEFORE_S = 1.0


async def test_killed_and_started_again() -> None:
    """With its file: what it had counted still counts, and each policy answers meanwhile."""
    with Single(aof=True) as server:
        async with steady_load(server.uri) as record:
            await later(BEFORE_S, server.kill)
            await later(1.5, server.start)
            healed_ns = now_ns()
            await until_calm(record)
        found = verify(record, "Redis killed for 1.5 s", healed_ns)
        assert all(each.degraded for each in found.values())
        assert found["closed"].over == 0


async def test_stopped_for_three_seconds() -> None:
    """SIGSTOP: connections stay, and nobody answers."""
    with Single() as server:
        async with steady_load(server.uri) as record:
            await later(BEFORE_S, server.pause)
            await later(3.0, server.resume)
            healed_ns = now_ns()
            await until_calm(record)
        found = verify(record, "Redis stopped for 3 s", healed_ns)
        assert all(each.degraded for each in found.values())
        assert found["closed"].over == 0


async def test_out_of_memory() -> None:
    """`maxmemory` without eviction: it answers, but takes nothing more."""
    with Single(lines=["maxmemory-policy noeviction"]) as server:
        async with steady_load(server.uri) as record:
            await later(BEFORE_S, lambda: server.admin.config_set("maxmemory", 1))
            await later(1.5, lambda: server.admin.config_set("maxmemory", 0))
            healed_ns = now_ns()
            await until_calm(record)
        found = verify(record, "Redis out of memory for 1.5 s", healed_ns)
        assert all(each.degraded for each in found.values())
        assert found["closed"].over == 0
