"""Nodes with leases that are killed, stopped, added and cut off: no leased limit is ever over.

All nodes are real processes on a real Redis or Redis Cluster. Every answer of every node counts,
also those of nodes that were killed.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from ratekeeper.core.model import BUCKETS
from tests.faults.conditions import lost_datagrams, wrong_clock
from tests.faults.load import CASES, LONG, Key, Record, exact_excess, limit_of
from tests.faults.nodes import NodeProcess
from tests.faults.test_cluster import LOST_MAX, place_of
from tests.redis_servers import Cluster, Single
from tests.redis_servers.ports import free_port

LIMIT = 40
NODES = 4
# Each node checks each key 25 times a second, so all together ask for twice the limit.
RUN_S = 1.5
CONVERGED_S_MAX = 60.0
KEYS = tuple(Key("leased", case) for case in CASES)
SETTINGS = {"nodes": NODES, "lease_seconds": 1.0}

RULES = json.dumps(
    {
        "version": 1,
        "rules": [
            {
                "id": f"leased-{case}",
                "match": {"endpoint": f"/leased/{case}"},
                "by": ["user"],
                "limits": [
                    {
                        "limit": limit.limit,
                        "per": f"{limit.per}s",
                        "algorithm": limit.algorithm,
                        **({"capacity": limit.capacity} if limit.algorithm in BUCKETS else {}),
                    }
                ],
                "on_failure": "closed",
                "consistency": "leased",
            }
            for case in CASES
            for limit in [limit_of(case, LIMIT)]
        ],
    }
)


class RunningFleet:
    """Nodes that check the same keys, and what they answered."""

    def __init__(self, stack: ExitStack, uri: str, keys: Sequence[Key]) -> None:
        self.record = Record()
        self.nodes: list[NodeProcess] = []
        self.counted: list[dict[str, Any]] = []
        self._stack = stack
        self._uri = uri
        self._keys = keys

    def add(self, **options: Any) -> NodeProcess:
        """Start a node; `start` waits for it."""
        fleet = {**SETTINGS, **options.pop("fleet", {})}
        name = f"node {len(self.nodes)}"
        node = NodeProcess(name, self._uri, self._keys, rules=RULES, fleet=fleet, **options)
        self.nodes.append(self._stack.enter_context(node))
        return node

    def kill(self, node: NodeProcess) -> None:
        """Kill a node in the middle of its work."""
        node.signal(signal.SIGKILL)
        node.add_to(self.record)
        self.nodes.remove(node)

    def verify(self, what: str, lossy: Sequence[Key] = ()) -> None:
        """End all nodes; no limit was over, and each admitted nearly all that it could."""
        self.counted = [node.finish(self.record) for node in self.nodes]
        own, asked = (sum(each[name] for each in self.counted) for name in ("own", "asked"))
        for key in self._keys:
            over = exact_excess(self.record, key, limit_of(key.case, LIMIT))
            noted = self.record.of(key)
            admitted = sum(each.allowed for each in noted)
            print(f"{what}, {key.case}: {admitted} of {len(noted)} admitted, over by {over}")
            assert over <= (LOST_MAX if key in lossy else 0)
            assert admitted
        print(f"{what}: answered in the node {own}, by the authority {asked}")
        assert own > asked / 20


@contextmanager
def fleet(uri: str, keys: Sequence[Key] = KEYS) -> Iterator[RunningFleet]:
    """Run a fleet for the length of the block."""
    with ExitStack() as stack:
        yield RunningFleet(stack, uri, keys)


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Start one Redis for the tests that do not harm it."""
    with Single() as found:
        yield found


async def test_nodes_are_killed_stopped_and_added(server: Single) -> None:
    """A killed node takes its leases with it, and a stopped one spends none that has ended."""
    server.flush()
    with fleet(server.uri) as running:
        killed, stopped, *_ = [running.add() for _ in range(NODES)]
        for node in list(running.nodes):
            node.ready()
        await asyncio.sleep(RUN_S)
        running.kill(killed)
        stopped.signal(signal.SIGSTOP)
        added = running.add()
        added.ready()
        await asyncio.sleep(RUN_S)
        stopped.signal(signal.SIGCONT)
        await asyncio.sleep(RUN_S)
        running.verify("nodes killed, stopped and added")


async def test_clocks_that_are_a_minute_wrong(server: Single) -> None:
    """Leases last for a time, not until a time: a node's own clock changes nothing."""
    server.flush()
    with fleet(server.uri) as running:
        for seconds in (60, -60):
            node = running.add(env=wrong_clock(seconds))
            assert node.ready() == pytest.approx(seconds, abs=1)
        running.add().ready()
        await asyncio.sleep(2 * RUN_S)
        running.verify("clocks 60 s ahead and behind")


async def test_a_primary_is_killed_under_leases() -> None:
    """The promoted replica knows the leases; on its shard at most the last writes are lost."""
    users = [Key("leased", case, f"user {n}") for case in ("token_bucket", LONG) for n in range(3)]
    with Cluster(full_coverage=False) as cluster, fleet(cluster.uri, users) as running:
        for _ in range(NODES):
            running.add()
        for node in running.nodes:
            node.ready()
        await asyncio.sleep(RUN_S)
        slot = place_of(users[-1])
        victim = cluster.node_of(slot).port
        lossy = [key for key in users if cluster.node_of(place_of(key)).port == victim]
        await asyncio.to_thread(cluster.kill_primary, slot)
        await asyncio.to_thread(cluster.wait_promoted, slot)
        await asyncio.sleep(RUN_S)
        running.verify("Cluster primary killed under leases", lossy)


async def test_gossip_is_cut_one_way_and_both_ways(server: Single) -> None:
    """Hints and membership suffer, limits do not; the nodes find each other again."""
    server.flush()
    addresses = [(f"127.0.0.{10 + number}", free_port()) for number in range(3)]
    peers = [f"{host}:{port}" for host, port in addresses]
    with fleet(server.uri) as running:
        nodes = [
            running.add(fleet={"gossip": address, "peers": peers, "dead_seconds": 1.0})
            for address in peers
        ]
        for node in nodes:
            node.ready()
        await every(nodes, 3)
        # The last node hears nothing, and is heard: it believes the others dead.
        with lost_datagrams([(each, addresses[2]) for each in addresses[:2]]):
            await every(nodes[2:], 1)
        await every(nodes, 3)
        both = [(one, other) for one in addresses for other in addresses[2:]]
        with lost_datagrams(both + [(other, one) for one, other in both]):
            await every(nodes[2:], 1)
            await every(nodes[:2], 2)
        await every(nodes, 3)
        running.verify("gossip cut")


async def every(nodes: Sequence[NodeProcess], count: int) -> None:
    """Wait until these nodes count so many live nodes."""
    waits: list[Callable[[], None]] = [
        lambda node=node: node.await_live(count, CONVERGED_S_MAX) for node in nodes
    ]
    await asyncio.gather(*(asyncio.to_thread(wait) for wait in waits))
