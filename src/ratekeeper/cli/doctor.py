"""`ratekeeper doctor`: check that a store is fit for use, and name the remedy for each problem.

It checks the URI, every server, and a complete check of a temporary subject on each primary.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import unquote, urlsplit

import typer

from ratekeeper.cli.common import (
    FindingLines,
    JsonOption,
    PrefixOption,
    StoreOption,
    print_findings,
    print_json,
    print_text,
)
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.errors import ConfigError, StoreError, StoreUnavailable
from ratekeeper.core.model import Limit
from ratekeeper.core.version import __version__
from ratekeeper.decide import kernel
from ratekeeper.decide.store import LOG_FULLNESS_HIGH, Store, StoreStats
from ratekeeper.decide.stores import examine_shared, open_store
from ratekeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from ratekeeper.decide.stores.redis.config import RedisConfig
from ratekeeper.decide.stores.redis.config import parse as parse_redis
from ratekeeper.decide.stores.redis.findings import (
    FORBIDDEN,
    FindingLevel,
    HealthFinding,
    ServerHealth,
    merge_findings,
)
from ratekeeper.fleet.datagrams import KeyFile
from ratekeeper.fleet.settings import split_address
from ratekeeper.limiter import Limiter
from ratekeeper.service.process.settings import ServiceSettings, free_udp

if TYPE_CHECKING:
    # These need the libraries of the redis extra; memory:// and shared:// do not.
    from ratekeeper.decide.stores.redis.health import RedisHealth
    from ratekeeper.decide.stores.redis.topology import Topology

CHECKS: Final = (
    *("uri", "file", "kernel", "capacity"),
    *("connection", "authentication", "version", "permissions", "scripts"),
    *("persistence", "eviction", "memory", "clock", "replication", "sentinel", "cluster"),
    "round trip",
    *("grpc", "gossip", "gossip key", "peers"),
)
"""All checks, in the order in which they are printed. Not every store has all of them."""

# The commands that the scripts call; the user needs permission for them.
SCRIPT_COMMANDS: Final = (
    *("hget", "hset", "hdel", "hrandfield", "pttl", "pexpire", "time"),
    *("getrange", "setrange", "set", "del"),
)
FULLNESS_HIGH: Final = 0.9
_SUBJECTS_TRIED_MAX: Final = 10_000
_NS_PER_MS: Final = 1_000_000


_CHECK_WIDTH: Final = 16


def doctor(
    store: StoreOption,
    as_json: JsonOption = False,
    prefix: PrefixOption = None,
    deadline_ms: Annotated[
        str | None, typer.Option(help="The deadline of a check.", metavar="MS")
    ] = None,
    connect_ms: Annotated[
        str | None, typer.Option(help="The timeout of a connection attempt.", metavar="MS")
    ] = None,
    gossip: Annotated[
        str | None, typer.Option(help="The option of `serve`; check it too.", metavar="HOST:PORT")
    ] = None,
    gossip_key: Annotated[
        str | None,
        typer.Option(help="The key file that `serve --gossip-key` would use.", metavar="FILE"),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="The peers that `serve --peers` would use.",
            metavar="HOST:PORT,…|dns:NAME:PORT|store",
        ),
    ] = None,
) -> None:
    """Check a store; print each problem with its remedy.

    Connects to every server, and checks login, version, permissions, scripts, persistence,
    eviction, memory, clocks, replication, Sentinels, the state of the cluster and the round-trip
    time. It counts a temporary subject for a moment, and leaves nothing behind. With --gossip, it
    also checks whether this machine can be a node of a fleet: the address, the key file, the peers.

    Exit code: 0 if there are no problems, or only warnings; 1 if there are problems; 2 if the store
    cannot be reached or an argument is wrong.

    Example: ratekeeper doctor --store redis://localhost:6379

    Example: ratekeeper doctor --store redis+cluster://h1:7000,h2:7000 --json

    Example: ratekeeper doctor --store redis://cache --gossip 10.0.0.5:7946 --gossip-key gossip.key
    """
    report = examine(store, prefix=prefix, deadline_ms=deadline_ms, connect_ms=connect_ms)
    report = replace(report, findings=(*report.findings, *examine_grpc()))
    if gossip or gossip_key or peers:
        found = examine_gossip(store, gossip, gossip_key, peers)
        report = replace(report, findings=(*report.findings, *found))
    if as_json:
        print_json(
            {
                "ratekeeper": __version__,
                "store": report.store,
                "exit_code": report.exit_code,
                "findings": [asdict(finding) for finding in report.findings],
            }
        )
    else:
        print_findings(map(_lines_of, report.findings), _CHECK_WIDTH)
        counts = Counter(finding.level for finding in report.findings)
        summary = f"problems {counts['problem']}, warnings {counts['warning']}"
        print_text(f"{report.store}: {summary}")
    raise typer.Exit(report.exit_code)


def _lines_of(finding: HealthFinding) -> FindingLines:
    nodes = f" ({', '.join(finding.nodes)})" if finding.nodes else ""
    remedy = (f"-> {finding.remedy}",) if finding.remedy else ()
    return FindingLines(finding.level, finding.check, f"{finding.found}{nodes}", remedy)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings about a store."""

    store: str
    """The URI of the store, without secrets."""
    findings: tuple[HealthFinding, ...]
    usable: bool
    """Whether the store could be opened and at least one server answers."""

    @property
    def exit_code(self) -> int:
        """0: no problems, or only warnings. 1: problems. 2: the store cannot be used."""
        if not self.usable:
            return 2
        return int(any(finding.level == "problem" for finding in self.findings))


def examine(uri: str, **options: object) -> DoctorReport:
    """Check the store at a URI. `options` are those of `open_store`; None means not given.

    Takes a few seconds at most and leaves nothing behind: it does not create a missing `shared://`
    file, and it resets the subjects that it counts.
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
            "uri", "problem", str(error), "correct the URI, or the option in the message"
        )
        return DoctorReport(f"{scheme}://", (wrong,), usable=False)
    known = ", ".join(f"{name}://" for name in ("memory", "shared", *REDIS_SCHEMES))
    # The URI is not repeated: it may contain a password.
    wrong = HealthFinding(
        "uri", "problem", "the URI has no known scheme", f"start it with one of {known}"
    )
    return DoctorReport("unknown", (wrong,), usable=False)


def examine_gossip(
    uri: str, gossip: str | None, gossip_key: str | None, peers: str | None
) -> tuple[HealthFinding, ...]:
    """Check the options of a node of a fleet. Binds the port for a moment, and sends nothing."""
    given = {"store": uri, "gossip": gossip, "gossip_key": gossip_key, "peers": peers}
    try:
        settings = ServiceSettings.gather(given)
    except ConfigError as error:
        return (HealthFinding("gossip", "problem", str(error), "correct that option"),)
    findings = [_gossip_address(settings)]
    if settings.gossip_key:
        findings.append(_gossip_key(Path(settings.gossip_key)))
    return (*findings, _peers(settings))


def _gossip_address(settings: ServiceSettings) -> HealthFinding:
    try:
        free_udp(settings.gossip)
    except ConfigError as error:
        remedy = "none if the service runs on this machine; otherwise choose another port"
        level: FindingLevel = "warning" if "in use" in str(error) else "problem"
        remedy = remedy if level == "warning" else "use an address of this machine"
        return HealthFinding("gossip", level, str(error), remedy)
    return HealthFinding("gossip", "ok", f"{settings.gossip} can be bound")


def _gossip_key(path: Path) -> HealthFinding:
    try:
        count = len(KeyFile(path).keys)
    except ConfigError as error:
        return HealthFinding("gossip key", "problem", str(error), "correct the key file")
    several = "" if count == 1 else f", of which the first signs and all {count} are accepted"
    return HealthFinding("gossip key", "ok", f"{path} can be used{several}")


def _peers(settings: ServiceSettings) -> HealthFinding:
    """Resolve each peer; a name that resolves to several addresses is all of them."""
    addresses = settings.peer_addresses
    if not addresses:
        return HealthFinding("peers", "ok", "nodes find each other through the store")
    found = 0
    for peer in addresses:
        host, port = split_address("--peers", peer)
        try:
            found += len(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
        except OSError as error:
            remedy = "correct --peers, or the DNS record"
            return HealthFinding("peers", "problem", f"{peer}: {error.strerror}", remedy)
    return HealthFinding("peers", "ok", f"{len(addresses)} given, {found} addresses")


def examine_grpc() -> list[HealthFinding]:
    """Check what the service would serve gRPC on; nothing without the packages of the service."""
    if find_spec("grpc_health") is None:
        return []
    from ratekeeper.service.grpc import server  # noqa: PLC0415 - only where the packages are

    if server.BUILT:
        return [HealthFinding("grpc", "ok", "the service serves gRPC on libnghttp2")]
    remedy = "install a C compiler and libnghttp2-dev, then reinstall ratekeeper"
    found = "the service serves gRPC on grpcio, which takes over ten times as long for a call"
    return [HealthFinding("grpc", "warning", found, remedy)]


def _examine_memory(uri: str, options: dict[str, object]) -> DoctorReport:
    with closing(open_store(uri, None, **options)) as store:
        room = f"for {store.stats().states_max:,} states"
    here = "each process has its own quotas, so there is nothing to connect to"
    findings = (HealthFinding("uri", "ok", here), _kernel(), HealthFinding("capacity", "ok", room))
    return DoctorReport(uri, findings, usable=True)


def _kernel() -> HealthFinding:
    if kernel.BUILT:
        return HealthFinding("kernel", "ok", "the C kernel is in use")
    reason, remedy = kernel.MISSING
    found = f"the C kernel {reason}: decisions in Python are about 20 times slower"
    return HealthFinding("kernel", "warning", found, remedy)


def _examine_shared(uri: str, options: dict[str, object]) -> DoctorReport:
    parts = urlsplit(uri)
    path = Path(unquote(parts.path))
    if not parts.netloc and path.name and not path.exists():
        return _examine_missing(uri, path)
    try:
        stats, damage = examine_shared(uri, **options)
    except StoreError as error:
        remedy = "correct the path, or its owner and mode; or delete the file to create a new one"
        wrong = HealthFinding("file", "problem", str(error), remedy)
        return DoctorReport(uri, (wrong,), usable=False)
    if damage:
        remedy = (
            "nothing was changed; the next process that opens the file replaces it by a new one "
            "with fresh quotas. Find out which program damaged it"
        )
        wrong = HealthFinding("file", "problem", damage, remedy)
        return DoctorReport(uri, (wrong, _kernel()), usable=True)
    found = HealthFinding("file", "ok", f"{path} exists and has the current format")
    findings = (found, _kernel(), _capacity(stats, parts.path), _logs(stats, parts.path))
    return DoctorReport(uri, findings, usable=True)


def _capacity(stats: StoreStats, path: str) -> HealthFinding:
    found = f"{stats.states:,} of {stats.states_max:,} states"
    explained = stats.log_fullness >= LOG_FULLNESS_HIGH  # by the lack of memory for logs
    if stats.fullness >= FULLNESS_HIGH or (stats.refused and not explained):
        found += f"; {stats.refused:,} new ones were rejected because the file was full"
        larger = f"shared://{path}?capacity={2 * stats.states_max}"
        remedy = f"stop the service, delete the file, and start it with {larger}"
        return HealthFinding("capacity", "warning", found, remedy)
    if stats.crowded:
        found += f"; {stats.crowded:,} of keys with too many limits of one name were rejected"
        remedy = (
            "give limits that differ in algorithm or window different names; more capacity does "
            "not help, and other keys are not affected"
        )
        return HealthFinding("capacity", "warning", found, remedy)
    return HealthFinding("capacity", "ok", found)


def _logs(stats: StoreStats, path: str) -> HealthFinding:
    found = f"{stats.log_bytes:,} of {stats.log_bytes_max:,} bytes for sliding window logs"
    if stats.log_fullness < LOG_FULLNESS_HIGH:
        return HealthFinding("logs", "ok", found)
    larger = f"shared://{path}?log_bytes={2 * stats.log_bytes_max}"
    remedy = (
        f"stop the service, delete the file, and start it with {larger}; or use "
        f"sliding_window_counter for large limits"
    )
    return HealthFinding("logs", "warning", found, remedy)


def _examine_missing(uri: str, path: Path) -> DoctorReport:
    """Report a missing file. Opening it would create it, with this user as its owner."""
    usable = path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
    if usable:
        found = f"{path} does not exist yet; the first process that opens it creates it"
        missing = HealthFinding("file", "warning", found, "start the service, or correct the path")
    else:
        found = f"{path} does not exist, and this user cannot create it"
        remedy = f"mkdir -p {path.parent}, and make the user of the service its owner"
        missing = HealthFinding("file", "problem", found, remedy)
    return DoctorReport(uri, (missing, _kernel()), usable)


def _examine_redis(uri: str, options: dict[str, object]) -> DoctorReport:
    config = parse_redis(uri, **options)
    deadline_ms = config.deadline_ns / _NS_PER_MS
    found = f"{config.shown()}, prefix {config.prefix}, deadline {deadline_ms:g} ms"
    findings = [HealthFinding("uri", "ok", found)]
    # "round trip" checks the deadline; here, the calls only have to work.
    patient_ms = max(config.deadline_ns, config.connect_ns) / _NS_PER_MS
    with closing(open_store(uri, None, **{**options, "deadline_ms": patient_ms})) as store:
        # Imported here: open_store has reported a missing library by now.
        from ratekeeper.decide.stores.redis.health import survey  # noqa: PLC0415 - see above
        from ratekeeper.decide.stores.redis.topology import Topology  # noqa: PLC0415 - see above

        with closing(Topology(config)) as topology:
            try:
                health = survey(topology, config)
            except StoreError as error:
                remedy = "start the servers in the URI, or correct it"
                findings.append(HealthFinding("connection", "problem", str(error), remedy))
                return DoctorReport(config.shown(), tuple(findings), usable=False)
            findings += health.findings
            usable = any(node.reachable for node in health.nodes)
            if usable:
                findings += _try_scripts(store, topology, health, config)
                findings += _ok_findings(findings, health, config)
    findings.sort(key=lambda finding: CHECKS.index(finding.check))
    return DoctorReport(config.shown(), tuple(findings), usable)


def _try_scripts(
    store: Store, topology: Topology, health: RedisHealth, config: RedisConfig
) -> tuple[HealthFinding, ...]:
    """Check, refund, grant and reset a temporary subject on each primary."""
    user = config.username or "default"
    allowed = " ".join(f"+{name}" for name in ("eval", "evalsha", "script|load", *SCRIPT_COMMANDS))
    # A log too: it needs more commands.
    limits = [Limit(10, per=1), Limit(10, per=1, algorithm="sliding_window_log")]
    limiter = Limiter(limits, store=store, name="doctor", on_failure="raise")
    answering = {node.address for node in health.nodes if node.reachable and not node.loading}
    findings = []
    for address, subject in _subjects(topology, config, limiter):
        if address not in answering:
            continue
        try:
            _try_verbs(limiter, subject)
        except StoreError as error:
            check, remedy = "scripts", "fix what the message says; until then, checks fail"
            if FORBIDDEN.search(str(error)):
                check, remedy = "permissions", f"ACL SETUSER {user} ~{config.prefix}:* {allowed}"
            findings.append(HealthFinding(check, "problem", str(error), remedy, (address,)))
    return merge_findings(findings)


def _subjects(
    topology: Topology, config: RedisConfig, limiter: Limiter
) -> Iterator[tuple[str, str]]:
    """Yield each primary with a new subject that is stored there."""
    from ratekeeper.decide.stores.redis.scripts import RuleScripts  # noqa: PLC0415 - the redis extra
    from ratekeeper.decide.stores.redis.topology import slot_of  # noqa: PLC0415 - as above

    scripts = RuleScripts(limiter.limits, "doctor", config, SystemClock())
    left = set(topology.primaries())
    for _ in range(_SUBJECTS_TRIED_MAX):
        subject = f"ratekeeper-doctor:{token_hex(8)}"
        address = topology.slots[slot_of(scripts.key(subject))]
        if address in left:
            left.remove(address)
            yield str(address), subject
        if not left:
            return


def _try_verbs(limiter: Limiter, subject: str) -> None:
    first = limiter.check(subject)
    limiter.check(subject)
    limiter.refund(subject, 2)
    limiter.grant(subject, 1)
    limiter.reset(subject)
    after = limiter.peek(subject)
    if (first.allowed, first.remaining, after.remaining) != (True, 9, 10):
        raise StoreUnavailable(
            f"of 10 units, a new subject had {first.remaining} left after one check and "
            f"{after.remaining} after a reset; another program writes keys with this prefix"
        )


def _ok_findings(
    findings: Sequence[HealthFinding], health: RedisHealth, config: RedisConfig
) -> Iterator[HealthFinding]:
    """Yield a finding for each check without problems."""
    reported = {finding.check for finding in findings}
    if any(finding.check == "permissions" and finding.level == "problem" for finding in findings):
        reported.add("scripts")
    nodes = [node for node in health.nodes if node.reachable]
    fine: dict[str, str | None] = {
        "connection": f"{len(nodes)} of {len(health.nodes)} servers answer",
        "authentication": f"as {config.username or 'the default user'}"
        + ("" if config.password else ", without a password"),
        "permissions": "the user has all permissions that it needs",
        "scripts": "a subject was checked, refunded, granted and reset on each primary",
        "version": _of_all(nodes, _version),
        "persistence": _of_all(nodes, _persistence),
        "eviction": _of_all(nodes, _eviction),
        "memory": _memory(nodes),
        "clock": _clock(nodes),
        "replication": _replication(nodes),
        "round trip": _round_trip(nodes, config),
    }
    if health.mode == "sentinel":
        fine["sentinel"] = f"{len(config.addresses)} Sentinels answer and can agree on a fail-over"
    if health.mode == "cluster":
        fine["cluster"] = _cluster(health)
    for check, found in fine.items():
        if check in reported:
            continue
        if found is None:
            yield HealthFinding(
                check, "warning", "unknown: no server reports it", "see permissions"
            )
        else:
            yield HealthFinding(check, "ok", found)


def _of_all(
    nodes: Sequence[ServerHealth], text_of: Callable[[ServerHealth], str | None]
) -> str | None:
    """Return the distinct texts of all nodes; None if one of them is unknown."""
    texts = [text_of(node) for node in nodes]
    known = [each for each in dict.fromkeys(texts) if each is not None]
    return "; ".join(known) if known and None not in texts else None


def _version(node: ServerHealth) -> str | None:
    return node.version and f"{str(node.server).capitalize()} {node.version}"


_LOST_WITH: Final = {
    "always": "a crash loses nothing that was answered",
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
    "noeviction": "a full server rejects new states, and evicts none",
    "volatile-ttl": "a full server evicts states that expire soonest; their quota is whole early",
}


def _eviction(node: ServerHealth) -> str | None:
    policy = node.maxmemory_policy
    return policy and f"{policy}: {_WHEN_FULL.get(policy, '')}"


def _memory(nodes: Sequence[ServerHealth]) -> str | None:
    """Return the memory of the node with the least room."""
    known = [(node.used_memory_bytes, node.maxmemory_bytes) for node in nodes]
    used, maximum = max(
        ((used, maximum) for used, maximum in known if used is not None and maximum is not None),
        key=lambda pair: (pair[0] / pair[1] if pair[1] else 0.0, pair[0]),
        default=(None, None),
    )
    if used is None:
        return None
    if not maximum:
        return (
            f"{used / 2**20:.1f} MiB used; no maxmemory, so the memory of the machine is the limit"
        )
    return f"{used / maximum:.0%} of {maximum / 2**20:.1f} MiB used"


def _clock(nodes: Sequence[ServerHealth]) -> str | None:
    offsets_ms = [node.clock_offset_ms for node in nodes if node.clock_offset_ms is not None]
    if not offsets_ms:
        return None
    furthest_ms = max(offsets_ms, key=abs)
    shown = f"{round(furthest_ms, 1) + 0.0:+.1f} ms"  # no minus before a zero
    return f"{shown} from this machine; that is harmless, because the clock of the server decides"


def _replication(nodes: Sequence[ServerHealth]) -> str | None:
    primaries = [node for node in nodes if node.role == "primary"]
    fewest = min((node.replicas_connected or 0 for node in primaries), default=0)
    if not fewest:
        return None
    lag_bytes = max(node.replication_lag_bytes or 0 for node in primaries)
    return f"{fewest} in sync for each primary, at most {lag_bytes:,} bytes behind"


def _cluster(health: RedisHealth) -> str | None:
    if health.cluster_state is None or health.slots_covered is None:
        return None
    return f"state {health.cluster_state}, {health.slots_covered:,} slots served"


def _round_trip(nodes: Sequence[ServerHealth], config: RedisConfig) -> str | None:
    medians_ms = [node.latency_ms for node in nodes if node.latency_ms is not None]
    if not medians_ms:
        return None
    deadline_ms = config.deadline_ns / _NS_PER_MS
    return f"median {max(medians_ms):.2f} ms, of a deadline of {deadline_ms:g} ms"
