"""Facts for operators: the number of states, and the health of the servers.

`count_states` walks the keys with SCAN, a page at a time, and at most KEYS_LOOKED_AT_MAX of them,
so no server is blocked. If these are all keys, the count is exact. If not, it is the share of our
keys among them, times the size of the database. count.lua counts the states of each key, or of a
sample of the keys.

`survey` queries every server, several at a time, and asks each Sentinel whether it could carry out
a failover. A fact that a server does not return, because the user lacks permission or the version
does not know it, is None and never an error.

`server_status` is for metrics: the clock of each primary, its evictions, and how old its *marker*
is. The marker is a small key that holds the time of its creation. A server that lost its keys (by
FLUSHALL, by a restart without persistence, or as an empty replica that was promoted) has lost the
marker too, so the next reading creates one with a later time. All nodes read the same marker, so
all report the same time. A key that was evicted is in the server's own count. Writes that only a
crash lost, after the last fsync or snapshot, leave no trace.

Everything here blocks. It uses redis-py's connections, not those of the checks.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha1
from importlib.resources import files
from statistics import median
from typing import Any, Final

import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ResponseError,
)

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.decide.store import BreakerState, ServerStatus
from ratekeeper.decide.stores.redis.config import Address, Mode, RedisConfig
from ratekeeper.decide.stores.redis.findings import (
    FindingLevel,
    HealthFinding,
    ServerHealth,
    evaluate,
    merge_findings,
)
from ratekeeper.decide.stores.redis.topology import (
    REDIS_PY_ERRORS,
    Topology,
    error_text,
    pipelined,
    slot_of,
    store_errors,
)

KEYS_LOOKED_AT_MAX: Final = 10_000
KEYS_PER_SCAN: Final = 1_000
# Of the keys found, this many have their states counted, and this many are measured.
KEYS_COUNTED_MAX: Final = 1_000
KEYS_WEIGHED_MAX: Final = 50
NODES_AT_ONCE_MAX: Final = 16
PINGS_MIN, PINGS_MAX = 3, 20
PINGING_NS_MAX: Final = NS_PER_SECOND // 2
_NS_PER_MS: Final = 1_000_000
# Readings of the clock; the one with the shortest round trip counts.
CLOCK_READINGS: Final = 3
# A marker is renewed at each reading, and expires when no node reads it any more.
MARKER_SECONDS: Final = 30 * 86_400
# Keys that are tried to find one in a slot of a server. A server with one slot in a hundred has one
# among the first thousand with near certainty; a server without any has no marker.
_MARKERS_TRIED_MAX: Final = 4_096

_COUNT: Final = files("ratekeeper.decide.stores.redis").joinpath("lua/count.lua").read_bytes()
# Redis identifies scripts by SHA-1; it protects no secret.
_COUNT_SHA: Final = sha1(_COUNT, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class StateCounts:
    """The states of one prefix on all primaries. A *state* is one limit's count of one subject."""

    keys: int
    states: int
    exact: bool
    """True if everything was counted; otherwise the numbers are estimates from a part."""
    bytes: int
    """Memory of all keys, estimated from a sample; 0 if the server does not say."""
    expired_keys: int
    """Keys of any prefix that these servers expired; 0 if they do not say."""


@dataclass(frozen=True, slots=True)
class RedisHealth:
    """The health of a store's servers."""

    mode: Mode
    nodes: tuple[ServerHealth, ...]
    """Primaries, and the replicas that Sentinel or the cluster names."""
    cluster_state: str | None
    """`ok` if every node that answers reports it."""
    slots_covered: int | None
    """Of 16,384; the smallest number that any node reports."""
    findings: tuple[HealthFinding, ...]
    """The warnings and problems."""
    breakers: tuple[BreakerState, ...] = ()
    """The breakers of the servers that this store has called."""

    @property
    def warnings(self) -> list[str]:
        """The findings as text: the problem, the servers, the remedy."""
        return [str(finding) for finding in self.findings]


def count_states(topology: Topology, prefix: str) -> StateCounts:
    """Count the states under a prefix. Two round trips to each primary while there are few.

    Raises StoreUnavailable or StoreTimeout if a primary does not answer or denies permission.
    """
    primaries = topology.primaries()
    try:
        counted = _count_all(topology, primaries, prefix)
    except StoreError:
        counted = []
    if counted and not any(one.moved for one in counted):
        return _sum(counted)
    # A primary may have been replaced, or may have lost slots, since the last refresh.
    topology.refresh()
    return _sum(_count_all(topology, topology.primaries(), prefix))


def forget_states(topology: Topology, prefix: str) -> int:
    """Remove every key of counts under a prefix; return how many states they held.

    SCAN and UNLINK, a page at a time, so that no server is blocked. The number is an estimate where
    `count_states` estimates. Raises StoreUnavailable or StoreTimeout.
    """
    topology.refresh()
    states = count_states(topology, prefix).states
    for address in topology.primaries():
        with store_errors(address, "; to forget counts, the user needs +scan +unlink"):
            client: Any = topology.client(address)
            _unlink(client, f"{prefix}:{{*")
            _unlink(client, f"{prefix}:settled:{{*")
    return states


def _unlink(client: Any, pattern: str) -> None:
    """Remove the keys that match a pattern."""
    cursor, first = 0, True
    while first or cursor:
        first = False
        how = ("MATCH", pattern, "COUNT", KEYS_PER_SCAN)
        cursor, found = client.execute_command("SCAN", cursor, *how)
        # One command for each key: those of one command must be in one slot of a cluster.
        for reply in pipelined(client, [("UNLINK", key) for key in found]):
            if isinstance(reply, ResponseError):
                raise reply


@dataclass(frozen=True, slots=True)
class _Counted:
    """The counts of one primary."""

    counts: StateCounts
    moved: bool
    """True if a key has moved to another node."""


def _count_all(topology: Topology, primaries: Sequence[Address], prefix: str) -> list[_Counted]:
    keys_max = max(KEYS_LOOKED_AT_MAX // len(primaries), 1)
    return [_count(topology, address, prefix, keys_max) for address in primaries]


def _sum(counted: Sequence[_Counted]) -> StateCounts:
    parts = [one.counts for one in counted]
    return StateCounts(
        keys=sum(part.keys for part in parts),
        states=sum(part.states for part in parts),
        exact=all(part.exact for part in parts),
        bytes=sum(part.bytes for part in parts),
        expired_keys=sum(part.expired_keys for part in parts),
    )


def _count(topology: Topology, address: Address, prefix: str, keys_max: int) -> _Counted:
    with store_errors(address, "; to count, the user needs +scan +eval +evalsha +hkeys +hget +get"):
        return _Scan(topology.client(address), f"{prefix}:{{*", keys_max).counted()


class _Scan:
    """A scan of one primary's keys."""

    def __init__(self, client: Any, pattern: str, keys_max: int) -> None:
        self._client = client
        page = min(KEYS_PER_SCAN, keys_max)
        how = ("MATCH", pattern, "COUNT", page)
        first, dbsize, info = pipelined(client, [("SCAN", 0, *how), ("DBSIZE",), ("INFO", "stats")])
        if isinstance(first, ResponseError):
            raise first
        cursor, found = first
        keys, looked_at = set(found), page
        while cursor and looked_at < keys_max:
            cursor, found = client.execute_command("SCAN", cursor, *how)
            keys.update(found)
            looked_at += page
        self.whole = cursor == 0
        self.keys: list[bytes] = list(keys)
        self.key_count = len(keys)
        if cursor and isinstance(dbsize, int):
            self.key_count = max(dbsize * len(keys) // looked_at, len(keys))
        self.expired_keys = info.get("expired_keys", 0) if isinstance(info, dict) else 0

    def counted(self) -> _Counted:
        """Return the counts of this primary."""
        sample = self.keys
        if len(sample) > KEYS_COUNTED_MAX:
            sample = random.sample(sample, KEYS_COUNTED_MAX)
        # The first call contains the script; the others name it.
        calls = [("EVAL", _COUNT, 1, key) for key in sample[:1]]
        calls += [("EVALSHA", _COUNT_SHA.encode(), 1, key) for key in sample[1:]]
        weighing = [("MEMORY USAGE", key) for key in sample[:KEYS_WEIGHED_MAX]]
        replies = pipelined(self._client, [*calls, *weighing])
        states = [reply for reply in replies[: len(sample)] if isinstance(reply, int)]
        sizes = [reply for reply in replies[len(sample) :] if isinstance(reply, int)]
        moved = any(isinstance(reply, MovedError) for reply in replies)
        if sample and not states and not moved:
            raise replies[0]
        return _Counted(
            StateCounts(
                keys=self.key_count,
                states=_scaled(states, self.key_count),
                exact=self.whole and len(states) == self.key_count,
                bytes=_scaled(sizes, self.key_count),
                expired_keys=self.expired_keys,
            ),
            moved,
        )


def _scaled(sample: Sequence[int], keys: int) -> int:
    """Extrapolate the sum of a sample to all keys."""
    return round(sum(sample) * keys / len(sample)) if sample else 0


def server_status(topology: Topology, prefix: str) -> list[ServerStatus]:
    """Query every primary; those that do not answer are left out. Raises StoreError."""
    primaries = topology.primaries()
    workers = max(min(NODES_AT_ONCE_MAX, len(primaries)), 1)
    with ThreadPoolExecutor(workers, "ratekeeper-status") as pool:
        found = pool.map(lambda each: _status(topology, each, prefix), primaries)
        return [status for status in found if status is not None]


def _status(topology: Topology, address: Address, prefix: str) -> ServerStatus | None:
    client: Any = topology.client(address)
    try:
        offset_ns = _clock_offset_ns(client)
        key = marker_key(topology, address, prefix)
        if key is None:
            return None
        # By the server's clock, if it is known: the nodes' clocks may differ.
        now_ms = (time.time_ns() + (offset_ns or 0)) // _NS_PER_MS
        info, _, kept, _ = pipelined(
            client,
            [
                ("INFO", "stats"),
                ("SET", key, now_ms, "NX", "EX", MARKER_SECONDS),
                ("GET", key),
                ("EXPIRE", key, MARKER_SECONDS),
            ],
        )
    except REDIS_PY_ERRORS:
        return None
    evicted = info.get("evicted_keys") if isinstance(info, dict) else None
    return ServerStatus(
        str(address),
        offset_ns,
        evicted if isinstance(evicted, int) else None,
        int(kept) / 1_000 if isinstance(kept, bytes) and kept.isdigit() else None,
    )


def _clock_offset_ns(client: Any) -> int | None:
    """Return the server's clock minus ours; None if the user may not read it."""
    best: tuple[int, int] | None = None
    for _ in range(CLOCK_READINGS):
        before_ns = time.monotonic_ns()
        server_time = _permitted(client, "TIME")
        trip_ns = time.monotonic_ns() - before_ns
        if server_time is None:
            return None
        seconds, microseconds = server_time
        offset_ns = seconds * NS_PER_SECOND + microseconds * 1_000 - time.time_ns() + trip_ns // 2
        best = min(best or (trip_ns, offset_ns), (trip_ns, offset_ns))
    return best and best[1]


def marker_key(topology: Topology, address: Address, prefix: str) -> bytes | None:
    """Return the key of a server's marker, in a slot of that server; None if it has no slots."""
    keys = (f"{prefix}:marker:{{{number}}}".encode() for number in range(_MARKERS_TRIED_MAX))
    return next((key for key in keys if topology.slots[slot_of(key)] == address), None)


def health(topology: Topology, config: RedisConfig) -> RedisHealth:
    """Return the result of `survey`. Raises StoreUnavailable if no server answers."""
    found = survey(topology, config)
    if not any(node.reachable for node in found.nodes):
        reasons = "; ".join(f"{node.address}: {node.reason}" for node in found.nodes)
        raise StoreUnavailable(f"{config.shown()}: no server answers: {reasons}")
    return found


def survey(topology: Topology, config: RedisConfig) -> RedisHealth:
    """Query every server; those that do not answer are in the result too.

    Takes as long as the slowest server, which gets `connect_ms` for the connection and for each
    reply. Raises StoreError only if no server can name the others.
    """
    topology.nodes()
    findings: list[HealthFinding] = []
    try:
        topology.refresh()
    except StoreError as error:
        found = f"the list of servers may be stale: {error}"
        remedy = "start the servers that the URI names, or repair the network to them"
        findings.append(HealthFinding("connection", "warning", found, remedy))
    addresses = topology.nodes()
    with ThreadPoolExecutor(min(NODES_AT_ONCE_MAX, len(addresses)), "ratekeeper-health") as pool:
        nodes = tuple(pool.map(lambda each: _server_health(topology, each, config.mode), addresses))
        if config.mode == "sentinel":
            for some in pool.map(lambda each: _sentinel_findings(config, each), config.addresses):
                findings += some
    findings += evaluate(nodes, config)
    states = {node.cluster_state for node in nodes if node.cluster_state is not None}
    slots = [node.cluster_slots_ok for node in nodes if node.cluster_slots_ok is not None]
    return RedisHealth(
        mode=config.mode,
        nodes=nodes,
        cluster_state=max(states - {"ok"} or states, default=None),
        slots_covered=min(slots, default=None),
        findings=merge_findings(findings),
    )


_Reader = Callable[[Any], Any]
# Our field: the server's name of it, and the function that converts its value.
_FROM_INFO: Final[Mapping[str, tuple[str, _Reader]]] = {
    "role": ("role", {"master": "primary", "slave": "replica"}.get),
    "version": ("redis_version", str),
    "uptime_seconds": ("uptime_in_seconds", int),
    "loading": ("loading", bool),
    "ops_per_second": ("instantaneous_ops_per_sec", int),
    "used_memory_bytes": ("used_memory", int),
    "maxmemory_bytes": ("maxmemory", int),
    "maxmemory_policy": ("maxmemory_policy", str),
    "evicted_keys": ("evicted_keys", int),
    "aof_enabled": ("aof_enabled", bool),
    "aof_last_write_ok": ("aof_last_write_status", "ok".__eq__),
    "rdb_last_save_ok": ("rdb_last_bgsave_status", "ok".__eq__),
    "link_up": ("master_link_status", "up".__eq__),
    "cluster_enabled": ("cluster_enabled", bool),
}
_FROM_CONFIG: Final[Mapping[str, tuple[str, _Reader]]] = {
    "aof_fsync": ("appendfsync", str),
    "rdb_save_points": ("save", str),
    "min_replicas_to_write": ("min-replicas-to-write", int),
    "cluster_full_coverage": ("cluster-require-full-coverage", "yes".__eq__),
}
_FROM_CLUSTER: Final[Mapping[str, tuple[str, _Reader]]] = {
    "cluster_state": ("cluster_state", str),
    "cluster_slots_ok": ("cluster_slots_ok", int),
}


def _server_health(topology: Topology, address: Address, mode: Mode) -> ServerHealth:
    client: Any = topology.client(address)
    try:
        return _query_server(client, str(address), mode)
    except BusyLoadingError as error:
        # It answers only INFO then, and not even a login to another database.
        loading = ServerHealth(str(address), reachable=True, reason=_reason(error), loading=True)
        try:
            return replace(loading, **_from_info(client.execute_command("INFO")))
        except REDIS_PY_ERRORS:
            return loading
    except REDIS_PY_ERRORS as error:
        refused = isinstance(error, AuthenticationError)
        return ServerHealth(
            str(address), reachable=False, reason=_reason(error), login_refused=refused
        )


def _query_server(client: redis.Redis, address: str, mode: Mode) -> ServerHealth:
    # The first PING may have to connect, so it is not measured.
    _permitted(client, "PING")
    times_ns: list[int] = []
    started_ns = time.monotonic_ns()
    while len(times_ns) < PINGS_MAX:
        before_ns = time.monotonic_ns()
        if len(times_ns) >= PINGS_MIN and before_ns - started_ns > PINGING_NS_MAX:
            break
        _permitted(client, "PING")
        times_ns.append(time.monotonic_ns() - before_ns)
    before_ns = time.time_ns()
    server_time = _permitted(client, "TIME")
    between_ns = (before_ns + time.time_ns()) // 2

    settings = [("CONFIG", "GET", name) for name, _ in _FROM_CONFIG.values()]
    cluster = [("CLUSTER", "INFO")] if mode == "cluster" else []
    info, keys, *replies = pipelined(client, [("INFO",), ("DBSIZE",), *settings, *cluster])
    replies_of = {"TIME": server_time, "INFO": info, "DBSIZE": keys, "CONFIG GET": replies[0]}
    if cluster:
        replies_of["CLUSTER INFO"] = replies[-1]
    unanswered = tuple(
        name
        for name, reply in replies_of.items()
        if reply is None or isinstance(reply, ResponseError)
    )
    configured = {reply[0].decode(): reply[1].decode() for reply in replies if _is_setting(reply)}
    return ServerHealth(
        address,
        reachable=True,
        latency_ms=median(times_ns) / _NS_PER_MS,
        latency_max_ms=max(times_ns) / _NS_PER_MS,
        clock_offset_ms=server_time and _offset_ms(server_time, between_ns),
        keys=None if isinstance(keys, ResponseError) else keys,
        unanswered=unanswered,
        **_from_info(info),
        **_read(_FROM_CONFIG, configured),
        **_read(_FROM_CLUSTER, _lines(replies[-1]) if cluster else {}),
    )


def _sentinel_findings(config: RedisConfig, address: Address) -> list[HealthFinding]:
    """Return the findings about one Sentinel, which has its own login."""
    alone = replace(
        config,
        mode="standalone",
        addresses=(address,),
        db=0,
        username=config.sentinel_username,
        password=config.sentinel_password,
    )
    with closing(Topology(alone)) as topology:
        client: Any = topology.client(address)
        try:
            client.execute_command("SENTINEL", "CKQUORUM", config.service)
        except ResponseError as error:
            level: FindingLevel = "problem"
            found = f"the Sentinels could not agree on a fail-over: {_reason(error)}"
        except REDIS_PY_ERRORS as error:
            level, found = "warning", f"no answer from a Sentinel: {_reason(error)}"
        else:
            return []
    remedy = "start the missing Sentinels, each on its own machine"
    return [HealthFinding("sentinel", level, found, remedy, (str(address),))]


def _permitted(client: Any, command: str) -> Any:
    """Return the reply; None if the server denies permission or cannot answer in its state."""
    try:
        return client.execute_command(command)
    except (NoPermissionError, MasterDownError):
        return None
    except ResponseError as error:
        # A server that cannot write its snapshots refuses even PING.
        if str(error).startswith("MISCONF"):
            return None
        raise


def _offset_ms(server_time: tuple[int, int], ours_ns: int) -> float:
    seconds, microseconds = server_time
    return (seconds * NS_PER_SECOND + microseconds * 1_000 - ours_ns) / _NS_PER_MS


def _is_setting(reply: object) -> bool:
    """Return True for [name, value] of CONFIG GET; it is empty for an unknown setting."""
    return isinstance(reply, list) and len(reply) == 2


def _lines(reply: object) -> dict[str, str]:
    """Read CLUSTER INFO: a name, a colon and a value on each line."""
    if not isinstance(reply, bytes):
        return {}
    pairs = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


def _read(fields: Mapping[str, tuple[str, _Reader]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields, as far as the server returned valid values."""
    found = {}
    for field, (name, reader) in fields.items():
        try:
            found[field] = reader(facts[name])
        except (LookupError, TypeError, ValueError):
            continue
    return found


def _from_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        return {}
    found = _read(_FROM_INFO, info)
    if "valkey_version" in info:
        # For old clients, Valkey reports a Redis version besides.
        found |= {"server": "valkey", "version": str(info["valkey_version"])}
    elif "version" in found:
        found["server"] = "redis"
    replicas = [info[name] for name in info if re.fullmatch(r"slave\d+", name)]
    offsets = [one["offset"] for one in replicas if one.get("state") == "online"]
    if found.get("role") == "primary":
        found["replicas_connected"] = len(offsets)
        if offsets:
            found["replication_lag_bytes"] = max(info["master_repl_offset"] - min(offsets), 0)
    return found


def _reason(error: Exception) -> str:
    text = error_text(error)
    return f"it rejects the login: {text}" if isinstance(error, AuthenticationError) else text
