"""What is wrong with the servers: from the facts about each to findings, each with its remedy.

Pure: asks nobody, and needs no Redis library. `health` collects the facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

from tollkeeper.decide.stores.redis.config import Mode, RedisConfig

VERSION_MIN: Final = (6, 2)
VERSION_TESTED: Final = (7, 0)
SAFE_EVICTION: Final = frozenset({"noeviction", "volatile-ttl"})
MEMORY_SHARE_HIGH, MEMORY_SHARE_FULL = 0.8, 0.95
CLOCK_SPREAD_MS_MAX: Final = 1_000.0
# A replica acknowledges once a second: a busy primary is that far ahead of it without any trouble.
LAG_BYTES_MAX: Final = 64 * 2**20
_SLOTS: Final = 16_384
_NS_PER_MS: Final = 1_000_000

# What servers of all versions say when a user, or a script of theirs, may not do something.
FORBIDDEN: Final = re.compile("NOPERM|can't run this command|ACL failure")

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One server. What it did not tell is None."""

    address: str
    reachable: bool
    """Does it answer us? If not, `reason` says why."""
    reason: str = ""
    login_refused: bool = False
    role: Literal["primary", "replica"] | None = None
    server: str | None = None
    """redis or valkey."""
    version: str | None = None
    uptime_seconds: int | None = None
    loading: bool | None = None
    """Is it reading its data from disk, and refusing all else?"""
    latency_ms: float | None = None
    """Round trip of a PING, the median of up to 20."""
    latency_max_ms: float | None = None
    clock_offset_ms: float | None = None
    """The server's clock against ours; half of the round trip is taken off."""
    ops_per_second: int | None = None
    keys: int | None = None
    """In the store's database, of whatever prefix."""
    used_memory_bytes: int | None = None
    maxmemory_bytes: int | None = None
    """0: no bound."""
    maxmemory_policy: str | None = None
    evicted_keys: int | None = None
    aof_enabled: bool | None = None
    aof_fsync: str | None = None
    aof_last_write_ok: bool | None = None
    rdb_save_points: str | None = None
    """As in `save 3600 1`; empty: no snapshots."""
    rdb_last_save_ok: bool | None = None
    replicas_connected: int | None = None
    """Those that copy from this one and are in sync."""
    replication_lag_bytes: int | None = None
    """What the slowest of them has not acknowledged."""
    min_replicas_to_write: int | None = None
    link_up: bool | None = None
    """Of a replica: is it connected to its primary?"""
    cluster_enabled: bool | None = None
    cluster_state: str | None = None
    cluster_slots_ok: int | None = None
    cluster_full_coverage: bool | None = None
    unanswered: tuple[str, ...] = ()
    """What it was asked and did not tell."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found and, unless all is well, what to do."""

    check: str
    level: Level
    found: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({', '.join(self.nodes)})" if self.nodes else ""
        what = f": {self.remedy}" if self.remedy else ""
        return f"{self.found}{where}{what}"


def evaluate(nodes: Sequence[NodeHealth], config: RedisConfig) -> Iterator[Finding]:
    """What is wrong with each node, and between them."""
    for node in nodes:
        yield from _judge(node, config)
    yield from _judge_together(nodes)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same said of several nodes, said once."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    return tuple(replace(finding, nodes=tuple(each)) for finding, each in nodes.items())


_Said = tuple[str, Level, str, str]


def _judge(node: NodeHealth, config: RedisConfig) -> Iterator[Finding]:
    if node.reachable:
        said = chain(
            _judge_access(node, config),
            _judge_storage(node),
            _judge_memory(node),
            _judge_replication(node, config.mode),
        )
    elif node.login_refused:
        remedy = "give the right username and password, as in redis://user:password@host"
        said = chain([("authentication", "problem", node.reason, remedy)])
    else:
        remedy = "start it, or correct its address; where it speaks TLS, write rediss://"
        if "CERTIFICATE" in node.reason:
            remedy = "name its authority with tls_ca=, or the name in it with tls_server_name="
        said = chain([("connection", "problem", f"no connection: {node.reason}", remedy)])
    for check, level, found, remedy in said:
        yield Finding(check, level, found, remedy, (node.address,))


def _judge_access(node: NodeHealth, config: RedisConfig) -> Iterator[_Said]:
    if node.loading:
        found = "it is loading its data, and refuses checks until that is done"
        yield "connection", "warning", found, "wait; redis-cli INFO persistence says how long"
    if node.unanswered:
        rules = " ".join(f"+{name.lower().replace(' ', '|')}" for name in node.unanswered)
        found = f"{', '.join(node.unanswered)} not answered, so some facts are unknown"
        yield "permissions", "warning", found, f"ACL SETUSER {config.username or 'default'} {rules}"
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", node.version or "")[:2])
    if node.server == "redis" and numbers < VERSION_TESTED:
        old = numbers < VERSION_MIN
        found = f"Redis {node.version} is {'too old' if old else 'older than what is tested'}"
        yield "version", "problem" if old else "warning", found, "upgrade to Redis 7.0 or newer"
    deadline_ms = config.deadline_ns / _NS_PER_MS
    if node.latency_ms is not None and node.latency_ms > deadline_ms / 2:
        found = f"half of all round trips take {node.latency_ms:.1f} ms or more"
        remedy = f"raise deadline_ms ({deadline_ms:g}) to {4 * node.latency_ms:.0f}, or move closer"
        yield "round trip", "problem", found, remedy


def _judge_storage(node: NodeHealth) -> Iterator[_Said]:
    if node.aof_enabled is False:
        left = "be that of the last snapshot after" if node.rdb_save_points else "not survive"
        found = f"AOF is off: quota would {left} a restart"
        yield "persistence", "warning", found, "CONFIG SET appendonly yes, then CONFIG REWRITE"
    if node.aof_last_write_ok is False:
        found = "the AOF cannot be written, so that every check is refused"
        yield "persistence", "problem", found, "mend the disk; the server's log says more"
    if node.rdb_last_save_ok is False:
        found = "the last snapshot failed, after which Redis by default refuses every check"
        remedy = "mend the disk, or CONFIG SET stop-writes-on-bgsave-error no"
        yield "persistence", "problem", found, remedy


def _judge_memory(node: NodeHealth) -> Iterator[_Said]:
    policy, used, maximum = node.maxmemory_policy, node.used_memory_bytes, node.maxmemory_bytes
    if policy is not None and policy not in SAFE_EVICTION:
        found = f"{policy} may evict a key that is limited, and its quota would be whole again"
        if maximum == 0:
            found += " (once maxmemory is set; it is not)"
        yield "eviction", "problem", found, "CONFIG SET maxmemory-policy noeviction"
    if node.evicted_keys:
        found = f"{node.evicted_keys:,} keys were evicted; if of ours, their quota was whole again"
        yield "eviction", "warning", found, "raise maxmemory"
    if used is not None and maximum and used >= MEMORY_SHARE_HIGH * maximum:
        full = used >= MEMORY_SHARE_FULL * maximum
        found = f"{used / maximum:.0%} of maxmemory is used"
        yield "memory", "problem" if full else "warning", found, "raise maxmemory, or add nodes"


_ADD_REPLICA: Final[dict[Mode, str]] = {
    "standalone": "add a replica (REPLICAOF) and Sentinels, and use redis+sentinel://",
    "sentinel": "start the replica, or add one (REPLICAOF)",
    "cluster": "start the replica, or add one: redis-cli --cluster add-node … --cluster-slave",
}


def _judge_replication(node: NodeHealth, mode: Mode) -> Iterator[_Said]:
    if node.role == "replica" and mode == "standalone":
        found = "it is a replica, and refuses every check"
        yield "replication", "problem", found, "name the primary, or use redis+sentinel://"
    if node.role == "replica" and node.link_up is False:
        found = "the replica has lost its primary, and falls behind"
        yield "replication", "warning", found, "redis-cli INFO replication, and the server's log"
    if node.role == "primary" and node.replicas_connected == 0:
        found = "no replica is in sync: if this server is lost, its quota is, and none takes over"
        yield "replication", "warning", found, _ADD_REPLICA[mode]
    if node.replication_lag_bytes is not None and node.replication_lag_bytes > LAG_BYTES_MAX:
        found = f"a replica is {node.replication_lag_bytes:,} bytes behind"
        yield "replication", "warning", found, "look at its load and its network"
    if node.cluster_enabled and mode != "cluster":
        found = "it is a node of a cluster, and refuses subjects of the others"
        yield "cluster", "problem", found, "write redis+cluster:// before its address"
    if node.cluster_state not in {None, "ok"}:
        found = f"the cluster is called {node.cluster_state}"
        yield "cluster", "problem", found, f"redis-cli --cluster check {node.address}"
    if node.cluster_slots_ok is not None and node.cluster_slots_ok < _SLOTS:
        found = f"{node.cluster_slots_ok:,} of {_SLOTS:,} slots are served"
        yield "cluster", "problem", found, f"redis-cli --cluster fix {node.address}"


def _judge_together(nodes: Sequence[NodeHealth]) -> Iterator[Finding]:
    """What is wrong between nodes."""
    offsets = {n.address: n.clock_offset_ms for n in nodes if n.clock_offset_ms is not None}
    if len(offsets) > 1:
        behind, ahead = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
        spread_ms = offsets[ahead] - offsets[behind]
        if spread_ms > CLOCK_SPREAD_MS_MAX:
            found = f"clocks differ by {spread_ms / 1_000:.1f} s: a fail-over would jump by that"
            remedy = "run NTP (chrony, systemd-timesyncd) on every server"
            yield Finding("clock", "warning", found, remedy, (behind, ahead))
