"""Redis fails under load: killed, stopped, out of memory, and behind a broken network."""

from __future__ import annotations

import asyncio

from tests.faults.conditions import FarRedis, reset_all
from tests.faults.load import later, now_ns, steady_load, until_calm
from tests.faults.reporting import verify
from tests.integration.tcp_proxy import Mode, Proxy
from tests.redis_servers import Single

BEFORE_S = 1.0
MODES: tuple[Mode, ...] = ("hold", "drip", "cut", "swallow")


async def test_killed_and_started_again() -> None:
    """A Redis with AOF keeps its counts through a kill, and each policy answers meanwhile."""
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
    """While Redis is stopped, its connections stay open without answers, and each policy holds."""
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
    """At `maxmemory` without eviction, Redis rejects writes, and each policy holds."""
    with Single(lines=["maxmemory-policy noeviction"]) as server:
        async with steady_load(server.uri) as record:
            await later(BEFORE_S, lambda: server.admin.config_set("maxmemory", 1))
            await later(1.5, lambda: server.admin.config_set("maxmemory", 0))
            healed_ns = now_ns()
            await until_calm(record)
        found = verify(record, "Redis out of memory for 1.5 s", healed_ns)
        assert all(each.degraded for each in found.values())
        assert found["closed"].over == 0


async def test_a_network_that_misbehaves() -> None:
    """The network drops, delays, truncates and resets in turn, and each policy holds."""
    quick = "?breaker_open_ms=200&breaker_open_max_ms=400"
    with Single() as server, Proxy(server.port) as proxy:
        async with steady_load(f"{proxy.uri}{quick}") as record:
            await asyncio.sleep(BEFORE_S)
            for _ in range(10):
                await later(0.1, lambda: reset_all(proxy))
            for mode in MODES:
                await asyncio.sleep(0.5)
                proxy.mode = mode
                await asyncio.sleep(0.7)
                proxy.mode = "pass"
                await asyncio.to_thread(reset_all, proxy)
            healed_ns = now_ns()
            await until_calm(record)
        found = verify(record, "drops, delays, cuts and resets", healed_ns)
        assert all(each.degraded for each in found.values())
        assert found["closed"].over == 0


async def test_a_partition() -> None:
    """The cable to Redis is unplugged for two seconds without an error, and each policy holds."""
    with FarRedis() as far:
        async with steady_load(far.uri) as record:
            await later(BEFORE_S, far.part)
            await later(2.0, far.join)
            healed_ns = now_ns()
            await until_calm(record)
        found = verify(record, "partition of 2 s", healed_ns)
        assert all(each.degraded for each in found.values())
        assert found["closed"].over == 0
