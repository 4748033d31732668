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

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from hashlib import sha1
from importlib.resources import files
from operator import itemgetter
from statistics import median
from typing import Any, Final, NamedTuple

import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MovedError,
    NoPermissionError,
    ResponseError,
)

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.decide.store import BreakerState, ServerStatus
from ratekeeper.decide.stores.redis.config import Address, Mode, RedisConfig
from ratekeeper.decide.stores.redis.findings import (
    FindingLevel,
    HealthFinding,
    ServerHealth,
    evaluate,
    facts_in,
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
_NS_PER_MS: Final = 1_000_000
# Readings of the clock for metrics; and for a survey, which measures the round trip, too.
CLOCK_READINGS, SURVEY_READINGS = 3, 20
READING_NS_MAX: Final = NS_PER_SECOND // 2
# A marker is renewed at each reading, and expires when no node reads it any more.
MARKER_SECONDS: Final = 30 * 86_400
# Keys that are tried to find one in a slot of a server. A server with one slot in a hundred has one
# among the first thousand with near certainty; a server without any has no marker.
_MARKERS_TRIED_MAX: Final = 4_096

_COUNT: Final = files("ratekeeper.decide.stores.redis").joinpath("lua/count.lua").read_bytes()
# Redis identifies scripts by SHA-1; it protects no secret.
_COUNT_SHA: Final = sha1(_COUNT, usedforsecurity=False).hexdigest()


class StateCounts(NamedTuple):
    """The states of one prefix. A *state* is one limit's count of one subject."""

    keys: int
    states: int
    bytes: int
    """Memory of all keys, estimated from a sample; 0 if the server does not say."""
    expired_keys: int
    """Keys of any prefix that the servers expired; 0 if they do not say."""


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
    try:
        return _count_all(topology, prefix)
    except StoreError:
        # A primary may have been replaced, or may have lost slots, since the last refresh.
        topology.refresh()
        return _count_all(topology, prefix, without_moved=True)


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


def _count_all(topology: Topology, prefix: str, *, without_moved: bool = False) -> StateCounts:
    primaries = topology.primaries()
    keys_max = max(KEYS_LOOKED_AT_MAX // len(primaries), 1)
    parts = []
    for address in primaries:
        needed = "; to count, the user needs +scan +eval +evalsha +hkeys +hget +get"
        with store_errors(address, needed):
            client = topology.client(address)
            parts.append(_count(client, f"{prefix}:{{*", keys_max, without_moved=without_moved))
    return StateCounts(*map(sum, zip(*parts, strict=True)))


def _count(client: Any, pattern: str, keys_max: int, *, without_moved: bool) -> StateCounts:
    """Count the states of one primary."""
    page = min(KEYS_PER_SCAN, keys_max)
    how = ("MATCH", pattern, "COUNT", page)
    first, dbsize, info = pipelined(client, [("SCAN", 0, *how), ("DBSIZE",), ("INFO", "stats")])
    if isinstance(first, ResponseError):
        raise first
    cursor, found = first
    keys, looked_at = dict.fromkeys(found), page
    while cursor and looked_at < keys_max:
        cursor, found = client.execute_command("SCAN", cursor, *how)
        keys |= dict.fromkeys(found)
        looked_at += page
    count = len(keys)
    if cursor and isinstance(dbsize, int):
        count = max(dbsize * count // looked_at, count)
    sample = list(keys)
    if len(sample) > KEYS_COUNTED_MAX:
        sample = RANDOM.sample(sample, KEYS_COUNTED_MAX)
    # The first call contains the script; the others name it.
    calls = [("EVAL", _COUNT, 1, key) for key in sample[:1]]
    calls += [("EVALSHA", _COUNT_SHA.encode(), 1, key) for key in sample[1:]]
    weighing = [("MEMORY USAGE", key) for key in sample[:KEYS_WEIGHED_MAX]]
    replies = pipelined(client, [*calls, *weighing])
    states = [reply for reply in replies[: len(sample)] if isinstance(reply, int)]
    moved = [reply for reply in replies if isinstance(reply, MovedError)]
    if moved and not without_moved:
        raise moved[0]
    if sample and not states and not moved:
        raise replies[0]
    sizes = [reply for reply in replies[len(sample) :] if isinstance(reply, int)]
    expired = info.get("expired_keys", 0) if isinstance(info, dict) else 0
    return StateCounts(count, _scaled(states, count), _scaled(sizes, count), expired)


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
        _, offset_ns = _clock(client, CLOCK_READINGS)
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


def _clock(client: Any, readings_max: int) -> tuple[float, int | None]:
    """Return the median round trip of TIME in nanoseconds, and the server's clock minus ours.

    The offset is that of the fastest reading; None if the user may not read the clock.
    """
    readings: list[tuple[int, int | None]] = []
    started_ns = time.monotonic_ns()
    while len(readings) < readings_max:
        before_ns = time.monotonic_ns()
        if len(readings) >= CLOCK_READINGS and before_ns - started_ns > READING_NS_MAX:
            break
        offset_ns = None
        with suppress(NoPermissionError):  # this reply takes as long
            seconds, microseconds = client.execute_command("TIME")
            offset_ns = seconds * NS_PER_SECOND + microseconds * 1_000 - time.time_ns()
        trip_ns = time.monotonic_ns() - before_ns
        readings.append((trip_ns, None if offset_ns is None else offset_ns + trip_ns // 2))
    _, fastest_ns = min(readings, key=itemgetter(0))
    return median(trip_ns for trip_ns, _ in readings), fastest_ns


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
    trip_ns, offset_ns = _clock(client, SURVEY_READINGS)
    commands: list[tuple[str, ...]] = [("INFO",), ("DBSIZE",), ("CONFIG", "GET", "appendfsync")]
    commands += [("CLUSTER", "INFO")] if mode == "cluster" else []
    names = (" ".join(each[:2]) for each in commands)
    replies = dict(zip(names, pipelined(client, commands), strict=True))
    asked = {"TIME": offset_ns, **replies}
    keys, setting = replies["DBSIZE"], replies["CONFIG GET"]
    return ServerHealth(
        address,
        reachable=True,
        latency_ms=trip_ns / _NS_PER_MS,
        clock_offset_ms=None if offset_ns is None else offset_ns / _NS_PER_MS,
        keys=None if isinstance(keys, ResponseError) else keys,
        # CONFIG GET returns a name and a value.
        aof_fsync=setting[1].decode() if isinstance(setting, list) and len(setting) == 2 else None,
        unanswered=tuple(
            name
            for name, reply in asked.items()
            if reply is None or isinstance(reply, ResponseError)
        ),
        **_from_info(replies["INFO"]),
        **facts_in("CLUSTER INFO", _lines(replies.get("CLUSTER INFO"))),
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


def _lines(reply: object) -> dict[str, str]:
    """Read CLUSTER INFO: a name, a colon and a value on each line."""
    if not isinstance(reply, bytes):
        return {}
    pairs = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


def _from_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        return {}
    found = facts_in("INFO", info)
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
