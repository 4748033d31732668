"""`tollkeeper doctor`: is this store fit for use, and if not, what mends it?

Looks at what the URI says, at every server, and at the whole way of a check, which it goes with
subjects of its own. Knows nothing of terminals: `cli.py` prints what is found here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from tollkeeper.core.errors import ConfigError, StoreError, StoreUnavailable
from tollkeeper.decide import kernel
from tollkeeper.decide.store import Store, StoreStats
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from tollkeeper.decide.stores.redis.config import RedisConfig
from tollkeeper.decide.stores.redis.config import parse as parse_redis
from tollkeeper.decide.stores.redis.findings import (
    FORBIDDEN,
    HealthFinding,
    ServerHealth,
    merge_findings,
)
from tollkeeper.limiter import Limiter

if TYPE_CHECKING:
    # These need the libraries of the redis extra, which memory:// and shared:// do without.
    from tollkeeper.decide.stores.redis.health import RedisHealth
    from tollkeeper.decide.stores.redis.topology import Topology

CHECKS: Final = (
    *("uri", "file", "kernel", "capacity"),
    *("connection", "authentication", "version", "permissions", "scripts"),
    *("persistence", "eviction", "memory", "clock", "replication", "sentinel", "cluster"),
    "round trip",
)
"""Everything that is looked at, in the order it is told; not all of it for every store."""

# What the scripts do inside the server, which the user must be allowed to.
SCRIPT_COMMANDS: Final = ("hget", "hset", "hdel", "pttl", "pexpire", "time")
FULLNESS_HIGH: Final = 0.9
_SUBJECTS_TRIED_MAX: Final = 10_000
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Report:
    """What was found about a store."""

    store: str
    """Its URI, without secrets."""
    findings: tuple[HealthFinding, ...]
    usable: bool
    """Could it be opened, and does any server answer?"""

    @property
    def exit_code(self) -> int:
        """0: fine, or warnings only. 1: problems. 2: of no use as it is."""
        if not self.usable:
            return 2
        return int(any(finding.level == "problem" for finding in self.findings))


def examine(uri: str, **options: object) -> Report:
    """Look at the store that a URI names. `options` as in `open_store`; None is one not given.

    Takes seconds at most. Writes nothing that stays: a `shared://` file that is not there is not
    made, and the subjects it counts are reset.
    """
    scheme, separator, _ = uri.partition("://")
    scheme = scheme.lower() if separator else ""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if scheme in REDIS_SCHEMES:
            return _examine_redis(uri, given)
        if scheme == "shared":
            return _examine_shared(uri, given)
        if scheme == "memory":
            return _examine_memory(uri, given)
    except ConfigError as error:
        wrong = HealthFinding(
            "uri", "problem", str(error), "correct it, or the option that it names"
        )
        return Report(f"{scheme}://", (wrong,), usable=False)
    known = ", ".join(f"{name}://" for name in ("memory", "shared", *REDIS_SCHEMES))
    # Nothing of it is repeated: it may hold a password anywhere.
    wrong = HealthFinding(
        "uri", "problem", "the URI has no known scheme", f"begin it with one of {known}"
    )
    return Report("unknown", (wrong,), usable=False)


def _examine_memory(uri: str, options: dict[str, object]) -> Report:
    with closing(open_store(uri, None, **options)) as store:
        room = f"for {store.stats().states_max:,} states"
    here = "quotas of each process by itself, so there is nothing to connect to"
    findings = (HealthFinding("uri", "ok", here), _kernel(), HealthFinding("capacity", "ok", room))
    return Report(uri, findings, usable=True)


def _kernel() -> HealthFinding:
    if kernel.BUILT:
        return HealthFinding("kernel", "ok", "the C kernel decides")
    remedy = "install a C compiler and the Python headers, then tollkeeper again"
    return HealthFinding(
        "kernel", "warning", "not built: Python decides, some 20 times slower", remedy
    )


def _examine_shared(uri: str, options: dict[str, object]) -> Report:
    parts = urlsplit(uri)
    path = Path(unquote(parts.path))
    if not parts.netloc and path.name and not path.exists():
        return _examine_missing(uri, path)
    try:
        store = open_store(uri, None, **options)
    except StoreError as error:
        remedy = "correct the path, or its owner and mode; or delete the file to make it anew"
        wrong = HealthFinding("file", "problem", str(error), remedy)
        return Report(uri, (wrong,), usable=False)
    with closing(store):
        capacity = _capacity(store.stats(), parts.path)
    found = f"{path} is there and of this version"
    return Report(uri, (HealthFinding("file", "ok", found), _kernel(), capacity), usable=True)


def _capacity(stats: StoreStats, path: str) -> HealthFinding:
    found = f"{stats.states:,} of {stats.states_max:,} states"
    if stats.fullness < FULLNESS_HIGH and not stats.refused:
        return HealthFinding("capacity", "ok", found)
    found += f"; {stats.refused:,} new ones found no room"
    larger = f"shared://{path}?capacity={2 * stats.states_max}"
    remedy = f"stop the service, delete the file, and start it with {larger}"
    return HealthFinding("capacity", "warning", found, remedy)


def _examine_missing(uri: str, path: Path) -> Report:
    """Not opened, because that would make the file, and as whoever runs this."""
    usable = path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
    if usable:
        found = f"{path} is not there yet; the first process that opens it makes it"
        missing = HealthFinding("file", "warning", found, "start the service, or correct the path")
    else:
        found = f"{path} is not there, and this user cannot make it"
        remedy = f"mkdir -p {path.parent}, and give it to the user that runs the service"
        missing = HealthFinding("file", "problem", found, remedy)
    return Report(uri, (missing, _kernel()), usable)


def _examine_redis(uri: str, options: dict[str, object]) -> Report:
    config = parse_redis(uri, **options)
    deadline_ms = config.deadline_ns / _NS_PER_MS
    found = f"{config.shown()}, prefix {config.prefix}, deadline {deadline_ms:g} ms"
    findings = [HealthFinding("uri", "ok", found)]
    # Whether calls meet the deadline is told by the round trip; here it is whether they work.
    patient_ms = max(config.deadline_ns, config.connect_ns) / _NS_PER_MS
    with closing(open_store(uri, None, **{**options, "deadline_ms": patient_ms})) as store:
        # Imported here: open_store has said by now if their libraries are missing.
        from tollkeeper.decide.stores.redis.health import survey  # noqa: PLC0415 - see above
        from tollkeeper.decide.stores.redis.topology import Topology  # noqa: PLC0415 - see above

        with closing(Topology(config)) as topology:
            try:
                health = survey(topology, config)
            except StoreError as error:
                remedy = "start the servers that the URI names, or correct it"
                findings.append(HealthFinding("connection", "problem", str(error), remedy))
                return Report(config.shown(), tuple(findings), usable=False)
            findings += health.findings
            usable = any(node.reachable for node in health.nodes)
            if usable:
                findings += _try_scripts(store, topology, health, config)
                findings += _what_is_fine(findings, health, config)
    findings.sort(key=lambda finding: CHECKS.index(finding.check))
    return Report(config.shown(), tuple(findings), usable)


def _try_scripts(
    store: Store, topology: Topology, health: RedisHealth, config: RedisConfig
) -> tuple[HealthFinding, ...]:
    """Go the whole way of a check on each primary."""
    user = config.username or "default"
    allowed = " ".join(f"+{name}" for name in ("eval", "evalsha", "script|load", *SCRIPT_COMMANDS))
    limiter = Limiter("10/second", store=store, name="doctor", on_failure="raise")
    answering = {node.address for node in health.nodes if node.reachable and not node.loading}
    findings = []
    for address, subject in _subjects(topology, config.prefix):
        if address not in answering:
            continue
        try:
            _try_verbs(limiter, subject)
        except StoreError as error:
            check, remedy = "scripts", "mend what it says; until then checks fail"
            if FORBIDDEN.search(str(error)):
                check, remedy = "permissions", f"ACL SETUSER {user} ~{config.prefix}:* {allowed}"
            findings.append(HealthFinding(check, "problem", str(error), remedy, (address,)))
    return merge_findings(findings)


def _subjects(topology: Topology, prefix: str) -> Iterator[tuple[str, str]]:
    """For each primary a subject that nobody else has."""
    from tollkeeper.decide.stores.redis.topology import slot_of  # noqa: PLC0415 - the redis extra

    left = set(topology.primaries())
    for _ in range(_SUBJECTS_TRIED_MAX):
        subject = f"tollkeeper-doctor:{token_hex(8)}"
        address = topology.slots[slot_of(f"{prefix}:{{{subject}}}".encode())]
        if address in left:
            left.remove(address)
            yield str(address), subject
        if not left:
            return


def _try_verbs(limiter: Limiter, subject: str) -> None:
    first = limiter.check(subject)
    limiter.refund(subject)
    limiter.grant(subject, 1)
    limiter.reset(subject)
    after = limiter.peek(subject)
    if (first.allowed, first.remaining, after.remaining) != (True, 9, 10):
        raise StoreUnavailable(
            f"of 10 units, a new subject had {first.remaining} left after one and "
            f"{after.remaining} after a reset; another program writes under this prefix"
        )


def _what_is_fine(
    findings: Sequence[HealthFinding], health: RedisHealth, config: RedisConfig
) -> Iterator[HealthFinding]:
    """A line for each check that has found nothing wrong."""
    told = {finding.check for finding in findings}
    if any(finding.check == "permissions" and finding.level == "problem" for finding in findings):
        told.add("scripts")
    nodes = [node for node in health.nodes if node.reachable]
    fine: dict[str, str | None] = {
        "connection": f"{len(nodes)} of {len(health.nodes)} servers answer",
        "authentication": f"as {config.username or 'the default user'}"
        + ("" if config.password else ", without a password"),
        "permissions": "the user may do all that is needed",
        "scripts": "on each primary a subject was checked, refunded, granted and reset",
        "version": _of_all(nodes, _version),
        "persistence": _of_all(nodes, _persistence),
        "eviction": _of_all(nodes, _eviction),
        "memory": _memory(nodes),
        "clock": _clock(nodes),
        "replication": _replication(nodes),
        "round trip": _round_trip(nodes, config),
    }
    if health.mode == "sentinel":
        fine["sentinel"] = f"{len(config.addresses)} Sentinels answer, and can agree on a fail-over"
    if health.mode == "cluster":
        fine["cluster"] = _cluster(nodes, health)
    for check, found in fine.items():
        if check in told:
            continue
        if found is None:
            yield HealthFinding(
                check, "warning", "not known: no server tells it", "see permissions"
            )
        else:
            yield HealthFinding(check, "ok", found)


def _of_all(nodes: Sequence[ServerHealth], say: Callable[[ServerHealth], str | None]) -> str | None:
    """What is said of the nodes, each thing once; None if of one of them nothing can be."""
    said = [say(node) for node in nodes]
    known = [each for each in dict.fromkeys(said) if each is not None]
    return "; ".join(known) if known and None not in said else None


def _version(node: ServerHealth) -> str | None:
    return node.version and f"{str(node.server).capitalize()} {node.version}"


_LOST_WITH: Final = {
    "always": "whatever was answered survives a crash",
    "everysec": "a crash loses up to two seconds",
    "no": "a crash loses what the system had not written, about 30 seconds",
}


def _persistence(node: ServerHealth) -> str | None:
    if node.aof_enabled is None:
        return None
    if node.aof_fsync not in _LOST_WITH:
        return "AOF is on"
    return f"AOF is on, appendfsync {node.aof_fsync}: {_LOST_WITH[node.aof_fsync]}"


_WHEN_FULL: Final = {
    "noeviction": "a full server refuses new states, and forgets none",
    "volatile-ttl": "a full server forgets what expires soonest: quota that is whole early",
}


def _eviction(node: ServerHealth) -> str | None:
    policy = node.maxmemory_policy
    return policy and f"{policy}: {_WHEN_FULL.get(policy, '')}"


def _memory(nodes: Sequence[ServerHealth]) -> str | None:
    """Of the node that has least room left."""
    known = [(node.used_memory_bytes, node.maxmemory_bytes) for node in nodes]
    used, maximum = max(
        ((used, maximum) for used, maximum in known if used is not None and maximum is not None),
        key=lambda pair: (pair[0] / pair[1] if pair[1] else 0.0, pair[0]),
        default=(None, None),
    )
    if used is None:
        return None
    if not maximum:
        return f"{used / 2**20:.1f} MiB used, and no maxmemory: the machine's memory is the bound"
    return f"{used / maximum:.0%} of {maximum / 2**20:.1f} MiB used"


def _clock(nodes: Sequence[ServerHealth]) -> str | None:
    offsets_ms = [node.clock_offset_ms for node in nodes if node.clock_offset_ms is not None]
    if not offsets_ms:
        return None
    furthest_ms = max(offsets_ms, key=abs)
    shown = f"{round(furthest_ms, 1) + 0.0:+.1f} ms"  # no minus before a zero
    return f"{shown} from this machine's, which is no matter: the server's decides"


def _replication(nodes: Sequence[ServerHealth]) -> str | None:
    primaries = [node for node in nodes if node.role == "primary"]
    fewest = min((node.replicas_connected or 0 for node in primaries), default=0)
    if not fewest:
        return None
    lag_bytes = max(node.replication_lag_bytes or 0 for node in primaries)
    found = f"{fewest} in sync for each primary, at most {lag_bytes:,} bytes behind"
    if any(node.min_replicas_to_write == 0 for node in primaries):
        found += "; with min-replicas-to-write 1, a primary that is cut off would stop admitting"
    return found


def _cluster(nodes: Sequence[ServerHealth], health: RedisHealth) -> str | None:
    if health.cluster_state is None or health.slots_covered is None:
        return None
    found = f"state {health.cluster_state}, {health.slots_covered:,} slots served"
    if any(node.cluster_full_coverage is False for node in nodes):
        found += "; cluster-require-full-coverage is no: without a primary only its slots stop"
    return found


def _round_trip(nodes: Sequence[ServerHealth], config: RedisConfig) -> str | None:
    medians_ms = [node.latency_ms for node in nodes if node.latency_ms is not None]
    worst_ms = [node.latency_max_ms for node in nodes if node.latency_max_ms is not None]
    if not medians_ms or not worst_ms:
        return None
    return (
        f"median {max(medians_ms):.2f} ms, worst {max(worst_ms):.2f} ms, "
        f"of a deadline of {config.deadline_ns / _NS_PER_MS:g} ms"
    )
