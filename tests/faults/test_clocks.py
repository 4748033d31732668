"""Nodes whose clocks are wrong by a minute."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conditions import wrong_clock
from tests.faults.load import KEYS, later, steady_load, until_calm
from tests.faults.nodes import NodeProcess
from tests.faults.reporting import verify
from tests.redis_servers import Single

# Tasks, threads, and the two nodes with wrong clocks. Each has a quarter of the limit on a busy
# machine, where Redis' answers may miss the deadline.
NODES = 4


async def test_clocks_that_are_a_minute_wrong() -> None:
    """One node a minute ahead, one a minute behind and one right share exact limits on Redis."""
    with (
        Single() as server,
        NodeProcess("ahead", server.uri, KEYS, nodes=NODES, env=wrong_clock(60)) as ahead,
        NodeProcess("behind", server.uri, KEYS, nodes=NODES, env=wrong_clock(-60)) as behind,
    ):
        assert await asyncio.to_thread(ahead.ready) == pytest.approx(60, abs=1)
        assert await asyncio.to_thread(behind.ready) == pytest.approx(-60, abs=1)
        async with steady_load(server.uri, nodes=NODES) as record:
            await later(3.0)
            await until_calm(record)
        for node in (ahead, behind):
            await asyncio.to_thread(node.finish, record)
    verify(record, "clocks 60 s ahead and behind")
    exact = [each for each in record.noted if each.allowed and not each.degraded]
    share = {
        name: sum(each.source == name for each in exact)
        for name in ("ahead", "behind", "tasks", "threads")
    }
    print(f"admitted by node: {share}")
    # Every node gets a fair share of the admissions.
    assert all(count > 0.05 * len(exact) for count in share.values())
