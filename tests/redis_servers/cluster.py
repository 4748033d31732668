"""A Redis Cluster: three primaries, a replica each, and slots that can be moved.

The harness sends the commands of `redis-cli --cluster create`, without its pauses. Most of the
start is the nodes' own time: a node serves no request in its first two seconds.

To find the owner of a slot, the harness asks each node about that node only. During a promotion or
a move, the nodes' views of each other differ for some milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import redis

from tests.redis_servers.cluster_view import NodeView, parse_nodes
from tests.redis_servers.ports import HOST
from tests.redis_servers.promotion import Promotion
from tests.redis_servers.server import Server, ServerFailed, Startable
from tests.redis_servers.single import COMMON_LINES
from tests.redis_servers.waiting import until

SLOTS = 16_384
PRIMARIES = 3
_SETTLED_SECONDS_MAX = 30.0
_KEYS_PER_MIGRATE = 100
_MIGRATE_TIMEOUT_MS = 5_000


class Cluster(Startable):
    """Six nodes. At the start `nodes[:3]` are the primaries, in the order of their slots.

    `node_timeout_ms`  how long a primary is silent before it is replaced: short for a test that
                       kills one, long if a busy machine must not look like a dead node
    `full_coverage`    whether all slots stop when one has no primary
    `lines`            further lines of each node's configuration
    """

    def __init__(
        self,
        *,
        node_timeout_ms: int = 1_000,
        full_coverage: bool = True,
        lines: Sequence[str] = (),
    ) -> None:
        chosen = (
            *COMMON_LINES,
            "port {port}",
            "cluster-enabled yes",
            f"cluster-node-timeout {node_timeout_ms}",
            f"cluster-require-full-coverage {'yes' if full_coverage else 'no'}",
            # A replica may be promoted with data of any age, and stays with its primary's slots.
            "cluster-replica-validity-factor 0",
            "cluster-allow-replica-migration no",
            # By default a primary waits five seconds for more replicas that need the same copy.
            "repl-diskless-sync-delay 0",
            *lines,
        )
        self.nodes = tuple(Server("redis-server", chosen) for _ in range(2 * PRIMARIES))

    @property
    def uri(self) -> str:
        """Return the store's URI. It names three nodes; clients find the others through them."""
        seeds = (f"{HOST}:{node.port}" for node in self.nodes[:PRIMARIES])
        return f"redis+cluster://{','.join(seeds)}"

    def start(self) -> None:
        """Start the nodes, form the cluster, and wait until every node sees a complete cluster."""
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.await_ready()
        self._form()
        self._await_settled()

    def stop(self) -> None:
        """Kill all nodes and remove their files. The cluster cannot be started again."""
        for node in self.nodes:
            node.stop()

    def flush(self) -> None:
        """Remove every key, in less than a millisecond."""
        for node in self._answering():
            try:
                node.admin.flushall()
            except redis.exceptions.ReadOnlyError:
                continue  # a replica, which its primary flushes

    def primaries(self) -> list[Server]:
        """Return the nodes that report slots of their own."""
        return [node for node in self._answering() if _itself(node).is_primary]

    def node_of(self, slot: int) -> Server:
        """Return the primary that has a slot. Raises ServerFailed while the slot has no primary."""
        node = self._owner(slot)
        if node is None:
            raise ServerFailed(f"no node that answers has slot {slot}; see wait_promoted")
        return node

    def kill_primary(self, slot: int) -> tuple[str, int]:
        """Send SIGKILL to the primary that has a slot; return its address."""
        node = self.node_of(slot)
        node.kill()
        return node.address

    def wait_promoted(self, slot: int, timeout_seconds: float = 15.0) -> Promotion:
        """Wait until a live node has the slot of a killed or paused primary."""
        node = until(
            lambda: self._owner(slot), f"a replica takes over slot {slot}", timeout_seconds
        )
        return Promotion(node.address, time.monotonic())

    def revive(self) -> None:
        """Start killed nodes, resume paused nodes, and wait until all are in sync."""
        for node in self.nodes:
            if node.is_paused:
                node.resume()
            elif not node.pid:
                node.launch()
        for node in self.nodes:
            node.await_ready()
        self._await_settled()

    def move_slot(self, slot: int, to_port: int) -> None:
        """Move a slot and its keys to another primary, as `redis-cli --cluster reshard` does."""
        if self.node_of(slot).port != to_port:
            self.begin_move(slot, to_port)
            self.move_keys(slot, to_port)
            self.end_move(slot, to_port)

    def move_slots(self, slots: Iterable[int], to_port: int) -> None:
        """Move each of the slots, one after the other."""
        for slot in slots:
            self.move_slot(slot, to_port)

    def begin_move(self, slot: int, to_port: int) -> None:
        """Begin a move: the old primary now answers ASK for keys that it does not have."""
        source, target = self.node_of(slot), self._on(to_port)
        _cluster(target, "SETSLOT", slot, "IMPORTING", _itself(source).node_id)
        _cluster(source, "SETSLOT", slot, "MIGRATING", _itself(target).node_id)

    def move_keys(self, slot: int, to_port: int, keys_max: int | None = None) -> int:
        """Move the keys of a slot, at most `keys_max`; return how many were moved."""
        source, moved = self.node_of(slot), 0
        while keys_max is None or moved < keys_max:
            wanted = min(_KEYS_PER_MIGRATE, (keys_max or SLOTS) - moved)
            keys = _cluster(source, "GETKEYSINSLOT", slot, wanted)
            if not keys:
                break
            source.admin.execute_command(
                "MIGRATE", HOST, to_port, "", 0, _MIGRATE_TIMEOUT_MS, "KEYS", *keys
            )
            moved += len(keys)
        return moved

    def end_move(self, slot: int, to_port: int) -> None:
        """Give the slot to its new primary, and wait until every node knows it."""
        source, target = self.node_of(slot), self._on(to_port)
        target_id = _itself(target).node_id
        # The new primary comes first; otherwise the slot would have no owner for a moment.
        others = [node for node in self.primaries() if node not in (source, target)]
        for node in (target, source, *others):
            _cluster(node, "SETSLOT", slot, "NODE", target_id)
        until(
            lambda: all(self._seen_owner(node, slot) == to_port for node in self._answering()),
            f"every node knows that slot {slot} is on port {to_port}",
            _SETTLED_SECONDS_MAX,
        )

    def _form(self) -> None:
        # Introduce every node to every other, which is quicker than waiting for gossip. Assign the
        # slots first, so that no node is ever in a cluster without slots.
        primaries, replicas = self.nodes[:PRIMARIES], self.nodes[PRIMARIES:]
        for number, node in enumerate(self.nodes):
            _cluster(node, "SET-CONFIG-EPOCH", number + 1)
        for number, node in enumerate(primaries):
            first, after = SLOTS * number // PRIMARIES, SLOTS * (number + 1) // PRIMARIES
            _cluster(node, "ADDSLOTSRANGE", first, after - 1)
        for node, other in combinations(self.nodes, 2):
            _cluster(node, "MEET", HOST, other.port)
        until(
            lambda: all(self._knows_all(node) for node in self.nodes),
            "every node knows every other",
            _SETTLED_SECONDS_MAX,
            self._views,
        )
        for replica, primary in zip(replicas, primaries, strict=True):
            _cluster(replica, "REPLICATE", _itself(primary).node_id)

    def _await_settled(self) -> None:
        until(self._is_settled, "the cluster is complete", _SETTLED_SECONDS_MAX, self._views)

    def _is_settled(self) -> bool:
        """Return True if every node sees the same three primaries and replicas, all in sync."""
        layouts = {_layout(views) for views in map(_nodes, self.nodes)}
        return (
            len(layouts) == 1
            and None not in layouts
            and all("cluster_state:ok" in _cluster(node, "INFO") for node in self.nodes)
            and all(_is_in_sync(node) for node in self.nodes)
        )

    def _knows_all(self, node: Server) -> bool:
        views = _nodes(node)
        return len(views) == len(self.nodes) and all(view.is_well for view in views)

    def _answering(self) -> list[Server]:
        return [node for node in self.nodes if node.pid and not node.is_paused]

    def _owner(self, slot: int) -> Server | None:
        """Return the node that claims the slot; of two, the one with the later config epoch."""
        views = [(_itself(node), node) for node in self._answering()]
        owners = [(view, node) for view, node in views if view.is_primary and view.has(slot)]
        if not owners:
            return None
        return max(owners, key=lambda owner: owner[0].config_epoch)[1]

    def _seen_owner(self, node: Server, slot: int) -> int | None:
        return next((view.port for view in _nodes(node) if view.has(slot)), None)

    def _on(self, port: int) -> Server:
        for node in self.nodes:
            if node.port == port:
                return node
        ports = ", ".join(str(node.port) for node in self.nodes)
        raise ValueError(f"no node of this cluster is on port {port}; there are {ports}")

    def _views(self) -> str:
        answers = (f"{node.port} says:\n{_cluster(node, 'NODES')}" for node in self._answering())
        return "\n".join(answers)


def _cluster(node: Server, *words: str | int) -> Any:
    # Separate words keep redis-py from parsing the answer.
    return node.admin.execute_command("CLUSTER", *words)


def _nodes(node: Server) -> list[NodeView]:
    return parse_nodes(_cluster(node, "NODES"))


def _itself(node: Server) -> NodeView:
    return _nodes(node)[0]


def _layout(views: Sequence[NodeView]) -> frozenset[tuple[int, str, tuple[range, ...]]] | None:
    """Return each node's slots and primary; None if the cluster is incomplete."""
    slots = sum(len(some) for view in views for some in view.slots)
    replicas = sum("slave" in view.flags for view in views)
    if slots != SLOTS or replicas != PRIMARIES or not all(view.is_well for view in views):
        return None
    return frozenset((view.port, view.primary_id, view.slots) for view in views)


def _is_in_sync(node: Server) -> bool:
    facts = node.admin.info("replication")
    return facts["role"] == "master" or bool(facts["master_link_status"] == "up")
