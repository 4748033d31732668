"""Problems of the servers: from the facts about each server to findings with remedies.

Pure: it does no I/O and needs no Redis library. `health` collects the facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Final, Literal

from ratekeeper.decide.stores.redis.config import Mode, RedisConfig

VERSION_MIN: Final = (6, 2)
VERSION_TESTED: Final = (7, 0)
SAFE_EVICTION: Final = frozenset({"noeviction", "volatile-ttl"})
MEMORY_SHARE_HIGH, MEMORY_SHARE_FULL = 0.8, 0.95
CLOCK_SPREAD_MS_MAX: Final = 1_000.0
# A replica acknowledges once a second: a busy primary is this far ahead of a healthy one.
LAG_BYTES_MAX: Final = 64 * 2**20
_SLOTS: Final = 16_384
_NS_PER_MS: Final = 1_000_000

# The errors of all versions when a user, or a user's script, lacks a permission.
FORBIDDEN: Final = re.compile("NOPERM|can't run this command|ACL failure")

FindingLevel = Literal["ok", "warning", "problem"]


FactSource = Literal["INFO", "CLUSTER INFO"]


def _fact(source: FactSource, name: str, read: Callable[[Any], Any]) -> Any:
    """Describe a fact: the command that returns it, the server's name of it, and its reader."""
    return field(default=None, metadata={"source": source, "name": name, "read": read})


def _is(expected: str) -> Callable[[Any], bool]:
    return lambda value: bool(value == expected)


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """The facts about one server. A fact that it did not return is None."""

    address: str
    reachable: bool
    """True if it answers; if not, `reason` says why."""
    reason: str = ""
    login_refused: bool = False
    role: Literal["primary", "replica"] | None = _fact(
        "INFO", "role", {"master": "primary", "slave": "replica"}.get
    )
    server: str | None = None
    """redis or valkey."""
    version: str | None = _fact("INFO", "redis_version", str)
    loading: bool | None = _fact("INFO", "loading", bool)
    """True while it reads its data from disk and refuses all calls."""
    latency_ms: float | None = None
    """Round trip of TIME, the median of up to 20."""
    clock_offset_ms: float | None = None
    """The server's clock minus ours, as the fastest of these calls has it."""
    keys: int | None = None
    """Keys of any prefix in the store's database."""
    used_memory_bytes: int | None = _fact("INFO", "used_memory", int)
    maxmemory_bytes: int | None = _fact("INFO", "maxmemory", int)
    """0 if unbounded."""
    maxmemory_policy: str | None = _fact("INFO", "maxmemory_policy", str)
    evicted_keys: int | None = _fact("INFO", "evicted_keys", int)
    aof_enabled: bool | None = _fact("INFO", "aof_enabled", bool)
    aof_fsync: str | None = None
    aof_last_write_ok: bool | None = _fact("INFO", "aof_last_write_status", _is("ok"))
    rdb_last_save_ok: bool | None = _fact("INFO", "rdb_last_bgsave_status", _is("ok"))
    replicas_connected: int | None = None
    """Replicas of this server that are in sync."""
    replication_lag_bytes: int | None = None
    """Bytes that the slowest replica has not acknowledged."""
    link_up: bool | None = _fact("INFO", "master_link_status", _is("up"))
    """For a replica: True if it is connected to its primary."""
    cluster_enabled: bool | None = _fact("INFO", "cluster_enabled", bool)
    cluster_state: str | None = _fact("CLUSTER INFO", "cluster_state", str)
    cluster_slots_ok: int | None = _fact("CLUSTER INFO", "cluster_slots_ok", int)
    unanswered: tuple[str, ...] = ()
    """The commands that it did not answer."""


def facts_in(source: FactSource, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in a reply, as far as the server returned valid values."""
    found = {}
    for each in fields(ServerHealth):
        if each.metadata.get("source") == source:
            with suppress(LookupError, TypeError, ValueError):
                found[each.name] = each.metadata["read"](reply[each.metadata["name"]])
    return found


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """The result of one check: its finding and, unless it is ok, the remedy."""

    check: str
    level: FindingLevel
    found: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({', '.join(self.nodes)})" if self.nodes else ""
        what = f": {self.remedy}" if self.remedy else ""
        return f"{self.found}{where}{what}"


def evaluate(nodes: Sequence[ServerHealth], config: RedisConfig) -> Iterator[HealthFinding]:
    """Yield the findings about each server, and about differences between them."""
    for node in nodes:
        yield from _evaluate_server(node, config)
    yield from _evaluate_differences(nodes)


def merge_findings(findings: Iterable[HealthFinding]) -> tuple[HealthFinding, ...]:
    """Merge equal findings about several servers into one."""
    nodes: dict[HealthFinding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    return tuple(replace(finding, nodes=tuple(each)) for finding, each in nodes.items())


_FindingParts = tuple[str, FindingLevel, str, str]


def _evaluate_server(node: ServerHealth, config: RedisConfig) -> Iterator[HealthFinding]:
    if node.reachable:
        findings = chain(
            _evaluate_access(node, config),
            _evaluate_storage(node),
            _evaluate_memory(node),
            _evaluate_replication(node, config.mode),
        )
    elif node.login_refused:
        remedy = "give the right username and password, as in redis://user:password@host"
        findings = chain([("authentication", "problem", node.reason, remedy)])
    else:
        remedy = "start it, or correct its address; if it uses TLS, write rediss://"
        if "CERTIFICATE" in node.reason:
            remedy = (
                "give its authority with tls_ca=, or the certificate's name with tls_server_name="
            )
        findings = chain([("connection", "problem", f"no connection: {node.reason}", remedy)])
    for check, level, found, remedy in findings:
        yield HealthFinding(check, level, found, remedy, (node.address,))


def _evaluate_access(node: ServerHealth, config: RedisConfig) -> Iterator[_FindingParts]:
    if node.loading:
        found = "it is loading its data and refuses checks until then"
        yield "connection", "warning", found, "wait; redis-cli INFO persistence shows the progress"
    if node.unanswered:
        rules = " ".join(f"+{name.lower().replace(' ', '|')}" for name in node.unanswered)
        found = f"{', '.join(node.unanswered)} not answered, so some facts are unknown"
        yield "permissions", "warning", found, f"ACL SETUSER {config.username or 'default'} {rules}"
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", node.version or "")[:2])
    if node.server == "redis" and numbers < VERSION_TESTED:
        old = numbers < VERSION_MIN
        found = f"Redis {node.version} is {'too old' if old else 'older than the tested versions'}"
        yield "version", "problem" if old else "warning", found, "upgrade to Redis 7.0 or newer"
    deadline_ms = config.deadline_ns / _NS_PER_MS
    if node.latency_ms is not None and node.latency_ms > deadline_ms / 2:
        found = f"half of all round trips take {node.latency_ms:.1f} ms or more"
        remedy = f"raise deadline_ms ({deadline_ms:g}) to {4 * node.latency_ms:.0f}, or move closer"
        yield "round trip", "problem", found, remedy


def _evaluate_storage(node: ServerHealth) -> Iterator[_FindingParts]:
    if node.aof_enabled is False:
        found = "AOF is off: a restart loses all counts since the last snapshot, if there is one"
        yield "persistence", "warning", found, "CONFIG SET appendonly yes, then CONFIG REWRITE"
    if node.aof_last_write_ok is False:
        found = "the AOF cannot be written, so the server refuses every check"
        yield "persistence", "problem", found, "repair the disk; see the server's log"
    if node.rdb_last_save_ok is False:
        found = "the last snapshot failed; by default Redis then refuses every check"
        remedy = "repair the disk, or CONFIG SET stop-writes-on-bgsave-error no"
        yield "persistence", "problem", found, remedy


def _evaluate_memory(node: ServerHealth) -> Iterator[_FindingParts]:
    policy, used, maximum = node.maxmemory_policy, node.used_memory_bytes, node.maxmemory_bytes
    if policy is not None and policy not in SAFE_EVICTION:
        found = f"{policy} may evict a subject's counts, which gives it its full quota again"
        if maximum == 0:
            found += " (maxmemory is not set, so not yet)"
        yield "eviction", "problem", found, "CONFIG SET maxmemory-policy noeviction"
    if node.evicted_keys:
        found = (
            f"{node.evicted_keys:,} keys were evicted; their subjects got their full quota again"
        )
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


def _evaluate_replication(node: ServerHealth, mode: Mode) -> Iterator[_FindingParts]:
    if node.role == "replica" and mode == "standalone":
        found = "it is a replica and refuses every check"
        yield "replication", "problem", found, "name the primary, or use redis+sentinel://"
    if node.role == "replica" and node.link_up is False:
        found = "the replica has lost its primary and falls behind"
        yield "replication", "warning", found, "see redis-cli INFO replication and the server's log"
    if node.role == "primary" and node.replicas_connected == 0:
        found = (
            "no replica is in sync: if this server fails, its counts are lost and none takes over"
        )
        yield "replication", "warning", found, _ADD_REPLICA[mode]
    if node.replication_lag_bytes is not None and node.replication_lag_bytes > LAG_BYTES_MAX:
        found = f"a replica is {node.replication_lag_bytes:,} bytes behind"
        yield "replication", "warning", found, "check its load and its network"
    if node.cluster_enabled and mode != "cluster":
        found = "it is a node of a cluster and refuses subjects of the other nodes"
        yield "cluster", "problem", found, "write redis+cluster:// before its address"
    if node.cluster_state not in {None, "ok"}:
        found = f"the cluster's state is {node.cluster_state}"
        yield "cluster", "problem", found, f"redis-cli --cluster check {node.address}"
    if node.cluster_slots_ok is not None and node.cluster_slots_ok < _SLOTS:
        found = f"{node.cluster_slots_ok:,} of {_SLOTS:,} slots are served"
        yield "cluster", "problem", found, f"redis-cli --cluster fix {node.address}"


def _evaluate_differences(nodes: Sequence[ServerHealth]) -> Iterator[HealthFinding]:
    """Yield the findings about differences between servers."""
    offsets = {n.address: n.clock_offset_ms for n in nodes if n.clock_offset_ms is not None}
    if len(offsets) > 1:
        behind, ahead = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
        spread_ms = offsets[ahead] - offsets[behind]
        if spread_ms > CLOCK_SPREAD_MS_MAX:
            found = f"clocks differ by {spread_ms / 1_000:.1f} s: a fail-over would make time jump"
            remedy = "run NTP (chrony, systemd-timesyncd) on every server"
            yield HealthFinding("clock", "warning", found, remedy, (behind, ahead))
