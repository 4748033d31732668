"""`ratekeeper reconcile`: look for defects in the states of a store, and repair them on request.

`doctor` checks the servers; this command checks the states that they store. It scans Redis gently,
in small steps with pauses, and compares replicas with their primaries. With a rule document it also
finds rules that never apply. It changes nothing without `--repair`, and prints each repair.

As a job (`--every`), it reads the rules and the metrics of the service again each time, because
they may change between two runs.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import unquote, urlsplit

import typer

from ratekeeper.cli.common import (
    OK,
    TROUBLE,
    CliCommand,
    FindingLines,
    JsonOption,
    PrefixOption,
    StoreOption,
    parse_duration_s,
    print_findings,
    print_json,
    print_text,
    time_text,
)
from ratekeeper.cli.rules import current_rules, source_from_file
from ratekeeper.cli.service_client import (
    TIMEOUT_S,
    CaOption,
    Scrape,
    ServiceClient,
    ServiceError,
    TimeoutOption,
    TokenOption,
)
from ratekeeper.core.errors import ConfigError, RatekeeperError, StoreError, StoreUnavailable, show
from ratekeeper.core.model import BUCKETS, Limit, Limits
from ratekeeper.core.version import __version__
from ratekeeper.decide.store import LOG_FULLNESS_HIGH, StoreStats
from ratekeeper.decide.stores import examine_shared, open_store
from ratekeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from ratekeeper.decide.stores.redis.config import RedisConfig
from ratekeeper.decide.stores.redis.config import parse as parse_redis
from ratekeeper.metrics.counters import OTHERS
from ratekeeper.rules.document.model import Document, Rule
from ratekeeper.rules.document.reading import from_data
from ratekeeper.rules.document.safety import findings
from ratekeeper.rules.penalties import room_s

if TYPE_CHECKING:
    # These need the libraries of the redis extra; a shared:// store does not.
    from ratekeeper.decide.stores.redis.audit import (
        AuditedServer,
        DefectKind,
        KeyDefect,
        ReplicaComparison,
    )
    from ratekeeper.decide.stores.redis.topology import Topology

FindingLevel = Literal["ok", "warning", "problem"]
RepairMode = Literal["no", "expiry", "all"]

EXAMPLES_MAX: Final = 5
RULES_SHOWN_MAX: Final = 20
REPAIRS_MAX: Final = 10_000
FULLNESS_HIGH: Final = 0.8
# The findings of `doctor` that this command repeats.
_REPEATED_CHECKS: Final = frozenset({"clock", "connection"})
_CHECK_WIDTH: Final = 13
_SQLITE: Final = "sqlite:///"
_NS_PER_MS: Final = 1_000_000
_MS_PER_SECOND: Final = 1_000
# Scripts set an expiry an eighth further than needed, and at least a second.
_EXPIRY_MARGIN: Final = 8

LIMIT_KEYS: Final = 1_000_000
PAUSE_MS: Final = 2.0
PAUSE_MS_MAX: Final = 60_000.0
DURATION_S_MIN: Final = 1.0
DURATION_S_MAX: Final = 366 * 86_400.0
SINCE: Final = "7d"

RulesOption = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="FILE|URL",
        help="The rules in force: a document or a database. [default: those of the service at "
        "--url]",
    ),
]
ServiceOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="RATEKEEPER_URL",
        metavar="URL",
        help="A service that uses these rules. Its metrics show which rules were applied.",
    ),
]
RecordsOption = Annotated[
    str | None,
    typer.Option(
        "--records",
        metavar="URL",
        help="The database of recorded usage. It shows which rules were applied.",
    ),
]
SinceOption = Annotated[
    str,
    typer.Option(
        "--since", metavar="TIME", help="How far back to look in --records: 90m, 12h, 7d."
    ),
]
RepairOption = Annotated[
    str | None,
    typer.Option(
        "--repair",
        metavar="[=all]",
        help="Set missing expiries. With =all, also remove states that cannot be read. Without "
        "--repair, nothing changes.",
    ),
]
EveryOption = Annotated[
    str | None,
    typer.Option(
        "--every",
        metavar="TIME",
        help="Run again and again until a signal; print one line of JSON each time: 1h.",
    ),
]
LimitOption = Annotated[
    int,
    typer.Option("--limit-keys", metavar="N", help="At most N keys of each primary; 0: all keys."),
]
PauseOption = Annotated[
    float, typer.Option("--pause", metavar="MS", help="The pause after each 100 keys.")
]


class ReconcileCommand(CliCommand):
    """A command whose `--repair` needs no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `--repair` alone means `--repair=expiry`."""
        given: list[str] = []
        for index, word in enumerate(args):
            alone = word == "--repair" and args[index + 1 : index + 2] not in (["all"], ["expiry"])
            given.append("--repair=expiry" if alone else word)
        return super().parse_args(ctx, given)


def reconcile_command(
    store: StoreOption,
    rules: RulesOption = None,
    url: ServiceOption = None,
    records: RecordsOption = None,
    since: SinceOption = SINCE,
    repair: RepairOption = None,
    every: EveryOption = None,
    limit_keys: LimitOption = LIMIT_KEYS,
    pause: PauseOption = PAUSE_MS,
    prefix: PrefixOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Check the states of a store: missing expiries, unreadable states, replicas that differ.

    Scans every key of Ratekeeper in Redis, in small steps with pauses, and compares replicas with
    their primaries. With the rules, it also reports rules that were never applied. Nothing changes
    without --repair, and keys with other prefixes never change.

    Exit code: 0 no findings; 1 findings; 2 the store could not be checked.

    Example: ratekeeper reconcile --store redis://localhost:6379 --rules limits.yaml

    Example: ratekeeper reconcile --store redis+cluster://h1:7000,h2:7000 --repair

    Example: ratekeeper reconcile --store redis://localhost:6379 --every 1h >> reconcile.log
    """

    def open_service() -> ServiceClient | None:
        return ServiceClient(url, token, timeout_s=timeout, ca_file=ca) if url else None

    options = ReconcileOptions(
        store,
        {} if prefix is None else {"prefix": prefix},
        repair=_repair_mode(repair),
        keys_max=_keys_max(limit_keys),
        pause_seconds=_pause_s(pause),
    )
    inputs = ReconcileInputs(options, rules, open_service, records, _duration_s("--since", since))
    if every is not None:
        _repeat(inputs, _duration_s("--every", every))
        raise typer.Exit(OK)
    report = reconcile(inputs.read())
    if as_json:
        print_json(report_data(report))
    else:
        print_report(report)
    raise typer.Exit(report.exit_code)


def _repair_mode(text: str | None) -> RepairMode:
    match text:
        case None:
            return "no"
        case "expiry" | "all":
            return text
        case _:
            raise ConfigError(f"--repair={show(text)} is not known; use --repair or --repair=all")


def _keys_max(count: int) -> int:
    if count < 0:
        raise ConfigError(f"--limit-keys {count} is negative; use 0 for all keys")
    return count


def _pause_s(pause_ms: float) -> float:
    if not 0 <= pause_ms <= PAUSE_MS_MAX:
        raise ConfigError(f"--pause {pause_ms:g} is not between 0 and {PAUSE_MS_MAX:g} ms; try 2")
    return pause_ms / 1_000


def _duration_s(option: str, text: str) -> float:
    seconds = parse_duration_s(option, text)
    if not DURATION_S_MIN <= seconds <= DURATION_S_MAX:
        raise ConfigError(
            f"{option} {show(text)} is not between 1 second and 366 days; try 10m, 1h or 7d"
        )
    return seconds


# ── One run, or many ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReconcileInputs:
    """Where the rules and the traffic of a run come from."""

    options: ReconcileOptions
    rules: str | None
    open_service: Callable[[], ServiceClient | None]
    records: str | None
    since_s: float

    def read(self) -> ReconcileOptions:
        """Return the options with the current rules and traffic.

        Raises ConfigError, StoreError, ServiceError.
        """
        document = None if self.rules is None else _read_rules(self.rules)
        metrics = None
        service = self.open_service()
        if service is not None:
            with service:
                metrics = service.metrics()
                document = document or _rules_of(service)
        found = replace(self.options, document=document, metrics=metrics)
        if self.records is None or document is None:
            return found
        since = datetime.now(UTC) - timedelta(seconds=self.since_s)
        used = asyncio.run(rules_used(self.records, since))
        return replace(found, used=used, used_since=time_text(since))


def _read_rules(name: str) -> Document:
    return (current_rules(name) if "://" in name else source_from_file(name)).document()


def _rules_of(service: ServiceClient) -> Document | None:
    """Return the rules of a service; None if the token does not allow to read them."""
    try:
        return from_data(service.call("GET", "/v1/admin/rules", expected="rules"), service.url)
    except ServiceError as error:
        if error.status in {401, 403, 404}:
            return None
        raise


async def rules_used(url: str, since: datetime) -> frozenset[str]:
    """Return the ids of rules with recorded usage since a time. Raises ConfigError, StoreError."""
    try:
        from sqlalchemy import text  # noqa: PLC0415 - an extra

        from ratekeeper.control.database import Database  # noqa: PLC0415 - as above
        from ratekeeper.history import tables  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ratekeeper":
            raise
        raise ConfigError(
            f"records in a database need {error.name}, which is not installed; "
            f"install it with: pip install 'ratekeeper[control]'"
        ) from None
    database = Database(url)
    if not database.is_postgresql:
        _expect_file(Path(database.name.removeprefix(_SQLITE)))
    query = text("SELECT DISTINCT rule FROM ratekeeper_usage WHERE start_s + step_s > :since")
    try:
        async with database.reading() as connection:
            found = await tables.version(connection, is_postgresql=database.is_postgresql)
            if found is None:
                raise ConfigError(
                    f"--records: {database.name} contains no records; correct the URL, or start "
                    f"the service with --record"
                )
            tables.check_version(found, database.name)
            rows = await connection.execute(query, {"since": int(since.timestamp())})
            return frozenset(map(str, rows.scalars()))
    finally:
        await database.close()


def _expect_file(file: Path) -> None:
    """Raise ConfigError if there is no such file: opening a database would create it."""
    if not file.exists():
        raise ConfigError(f"--records: there is no file {file}; correct the URL")


@contextmanager
def _stop_signals() -> Iterator[Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that a run is finished first."""
    stopped = Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _repeat(inputs: ReconcileInputs, every_s: float) -> None:
    """Print one line of JSON per run. A run that fails prints its error; the next may succeed."""
    with _stop_signals() as stopped:
        while not stopped.is_set():
            try:
                data = report_data(reconcile(inputs.read()))
            except RatekeeperError as error:
                at = datetime.now(UTC).isoformat(timespec="seconds")
                data = {"at": at, "exit_code": TROUBLE, "error": str(error)}
            print_text(json.dumps(data, separators=(",", ":")))
            stopped.wait(every_s)


# ── Options, findings, report ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReconcileFinding:
    """The result of one check: the finding, its places, and the remedy if there is a problem."""

    check: str
    level: FindingLevel
    what: str
    where: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class StateRepair:
    """One repair, tried or done."""

    node: str
    key: str
    what: str
    done: bool
    """False: the key had changed in between, and was not touched."""


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """The findings and repairs of one run."""

    store: str
    """The URI of the store, without secrets."""
    findings: tuple[ReconcileFinding, ...]
    counted: Mapping[str, int]
    at: datetime
    seconds: float
    repairs: tuple[StateRepair, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 if there are findings, repaired or not."""
        return int(any(finding.level != "ok" for finding in self.findings))


@dataclass(frozen=True, slots=True)
class ReconcileOptions:
    """What to check, and how."""

    store: str
    options: Mapping[str, object] = field(default_factory=dict)
    document: Document | None = None
    metrics: Scrape | None = None
    """The metrics of a service that uses these rules."""
    used: frozenset[str] | None = None
    """The rules with recorded usage since `used_since`."""
    used_since: str = ""
    repair: RepairMode = "no"
    keys_max: int = 0
    pause_seconds: float | None = None


def report_data(report: ReconcileReport) -> dict[str, Any]:
    """Return a report for JSON."""
    return {
        "ratekeeper": __version__,
        "at": report.at.isoformat(timespec="seconds"),
        "seconds": report.seconds,
        "store": report.store,
        "exit_code": report.exit_code,
        "counted": dict(report.counted),
        "findings": [asdict(finding) for finding in report.findings],
        "repairs": [asdict(repair) for repair in report.repairs],
    }


def print_report(report: ReconcileReport) -> None:
    """Print the findings, the repairs and a summary."""
    print_findings(map(_lines_of, report.findings), _CHECK_WIDTH)
    for repair in report.repairs:
        done = "repaired" if repair.done else "skipped"
        print_text(f"{done:9}{repair.key} on {repair.node}: {repair.what}")
    levels = Counter(finding.level for finding in report.findings)
    counted = ", ".join(f"{name} {value:,}" for name, value in report.counted.items())
    print_text(
        f"{report.store}: problems {levels['problem']}, warnings {levels['warning']}; {counted}; "
        f"{report.seconds:g} s"
    )


def _lines_of(finding: ReconcileFinding) -> FindingLines:
    remedy = (f"-> {finding.remedy}",) if finding.remedy else ()
    where = tuple(f"   {each}" for each in finding.where)
    return FindingLines(finding.level, finding.check, finding.what, (*where, *remedy))


# ── The run ────────────────────────────────────────────────────────────────────────────────────


def reconcile(options: ReconcileOptions) -> ReconcileReport:
    """Check a store, and repair it if the options say so. Raises ConfigError, StoreError."""
    at, started_s = datetime.now(UTC), monotonic()
    scheme, separator, _ = options.store.partition("://")
    scheme = scheme.lower() if separator else ""
    if scheme in REDIS_SCHEMES:
        shown, found, counted, repairs = _check_redis(options)
    elif scheme == "shared":
        shown, found, counted = _check_shared(options)
        repairs = ()
    elif scheme == "memory":
        raise ConfigError(
            "memory:// is in the memory of each process, which another process cannot read; "
            "use limiter.stats() there"
        )
    else:
        known = ", ".join(f"{name}://" for name in ("shared", *REDIS_SCHEMES))
        raise ConfigError(f"--store has no known scheme; start it with one of {known}")
    found += _rule_findings(options)
    seconds = round(monotonic() - started_s, 3)
    return ReconcileReport(shown, tuple(found), counted, at, seconds, tuple(repairs))


# ── shared:// ──────────────────────────────────────────────────────────────────────────────────


def _check_shared(
    options: ReconcileOptions,
) -> tuple[str, list[ReconcileFinding], dict[str, int]]:
    path = Path(unquote(urlsplit(options.store).path))
    if not path.exists():
        raise ConfigError(f"there is no file {path}; correct the path, or start the service")
    swept = 0
    if options.repair != "no":
        with closing(open_store(options.store, None, **options.options)) as store:
            swept = store.sweep()
    stats, damage = examine_shared(options.store, **options.options)
    if damage:
        raise StoreUnavailable(f"{damage}; the next process that opens it replaces it by a new one")
    where = (str(path),)
    found = [
        ReconcileFinding("version", "ok", "the file has the current format and is intact", where),
        ReconcileFinding("expiry", "ok", "every state in a file has an expiry"),
        ReconcileFinding("drift", "ok", "a file has no replicas"),
    ]
    usage = f"{stats.states:,} of {stats.states_max:,} states are in use"
    if stats.refused:
        usage += f"; {stats.refused:,} new ones were rejected because the file was full"
    explained = stats.log_fullness >= LOG_FULLNESS_HIGH  # by the lack of memory for logs
    full = stats.fullness >= FULLNESS_HIGH or (bool(stats.refused) and not explained)
    larger = f"shared://{path}?capacity={2 * stats.states_max}"
    remedy = f"stop the service, delete the file, and start it with {larger}" if full else ""
    found.append(ReconcileFinding("occupancy", "warning" if full else "ok", usage, where, remedy))
    found.append(_log_occupancy(stats, path))
    if swept:
        found.append(
            ReconcileFinding("swept", "ok", f"{swept:,} expired states were removed", where)
        )
    counted = {"states": stats.states, "states_max": stats.states_max, "bytes": stats.bytes}
    return options.store.partition("?")[0], found, counted


def _log_occupancy(stats: StoreStats, path: Path) -> ReconcileFinding:
    full = stats.log_fullness >= LOG_FULLNESS_HIGH
    usage = f"{stats.log_bytes:,} of {stats.log_bytes_max:,} bytes for sliding window logs"
    larger = f"shared://{path}?log_bytes={2 * stats.log_bytes_max}"
    remedy = f"stop the service, delete the file, and start it with {larger}" if full else ""
    return ReconcileFinding("logs", "warning" if full else "ok", usage, (str(path),), remedy)


# ── Redis ──────────────────────────────────────────────────────────────────────────────────────


def _check_redis(
    options: ReconcileOptions,
) -> tuple[str, list[ReconcileFinding], dict[str, int], tuple[StateRepair, ...]]:
    config = parse_redis(options.store, **options.options)
    # Raises ConfigError if the libraries are missing.
    open_store(options.store, None, **options.options).close()
    from ratekeeper.decide.stores.redis import audit  # noqa: PLC0415 - the redis extra
    from ratekeeper.decide.stores.redis.topology import Topology  # noqa: PLC0415 - as above

    needed_ms = 0 if options.document is None else needed_ms_of(options.document)
    pause_s = audit.PAUSE_SECONDS if options.pause_seconds is None else options.pause_seconds
    with closing(Topology(config)) as topology:
        audited = audit.audit(topology, config.prefix, options.keys_max, pause_s)
        compared = [
            each
            for one in audited
            for each in audit.compare_replicas(topology, one.address, one.sample, config.prefix)
        ]
        repairs = tuple(_repairs(topology, audited, options.repair, needed_ms))
        found = [
            *_scan_findings(audited, config, repairs),
            *_drift_findings(compared),
            *_clock_findings(topology, config),
        ]
    return config.shown(), found, _counted(audited), repairs


def _counted(audited: Sequence[AuditedServer]) -> dict[str, int]:
    states = sum(one.states for one in audited)
    memory_bytes = sum(one.memory_bytes for one in audited)
    return {
        "keys": sum(one.keys for one in audited),
        "states": states,
        "bytes": memory_bytes,
        "bytes a state": memory_bytes // states if states else 0,
        "primaries": len(audited),
    }


def _scan_findings(
    audited: Sequence[AuditedServer],
    config: RedisConfig,
    repairs: Sequence[StateRepair],
) -> Iterator[ReconcileFinding]:
    yield _coverage(audited, config)
    for kind, (level, what, remedy) in _DEFECTS.items():
        count = sum(one.counts[kind] for one in audited)
        if not count:
            yield ReconcileFinding(kind, "ok", f"no key {_FINE[kind]}")
        else:
            some = [defect for one in audited for defect in one.defects if defect.kind == kind]
            where = tuple(
                f"{key_text(defect.key)} on {defect.node}: {defect.why}"
                for defect in some[:EXAMPLES_MAX]
            )
            if count > len(where):
                where = (*where, f"and {count - len(where):,} more")
            yield ReconcileFinding(kind, level, what.format(count=f"{count:,}"), where, remedy)
    if done := sum(repair.done for repair in repairs):
        yield ReconcileFinding("repair", "ok", f"repaired: {done:,}")
    yield _memory(audited)


_DEFECTS: Final[Mapping[DefectKind, tuple[FindingLevel, str, str]]] = {
    "no expiry": (
        "problem",
        "keys without an expiry, which would stay forever: {count}",
        "--repair sets an expiry; find out which program wrote or restored them",
    ),
    "wrong type": (
        "problem",
        "keys of the wrong type, so checks of their subjects fail: {count}",
        "give the program that writes them another prefix; --repair=all removes the keys",
    ),
    "unreadable": (
        "problem",
        "fields that cannot be read, so checks of their subjects fail: {count}",
        "does another version use this prefix? --repair=all removes the fields",
    ),
    "not ours": (
        "warning",
        "keys with this prefix that are not Ratekeeper's: {count}",
        "give the other program another prefix; this command never changes such keys",
    ),
}
_FINE: Final[Mapping[DefectKind, str]] = {
    "no expiry": "lacks an expiry",
    "wrong type": "has the wrong type",
    "unreadable": "has a field that cannot be read",
    "not ours": "belongs to another program",
}


def _coverage(audited: Sequence[AuditedServer], config: RedisConfig) -> ReconcileFinding:
    keys = sum(one.keys for one in audited)
    servers = "a primary" if len(audited) == 1 else f"{len(audited)} primaries"
    found = f"{keys:,} keys of prefix {config.prefix} on {servers} were checked"
    if all(one.complete for one in audited):
        return ReconcileFinding("keys", "ok", found)
    there = sum(one.keys_in_all or 0 for one in audited)
    found += f", not all: the databases contain {there:,} keys"
    return ReconcileFinding("keys", "ok", found, remedy="raise --limit-keys to check more")


def _memory(audited: Sequence[AuditedServer]) -> ReconcileFinding:
    if not any(one.memory_bytes for one in audited):
        return ReconcileFinding(
            "memory", "ok", "unknown: there are no keys, or no server reports sizes"
        )
    counted = _counted(audited)
    found = (
        f"{counted['bytes'] / 2**20:,.1f} MiB in {counted['states']:,} states: "
        f"{counted['bytes a state']:,} bytes per state"
    )
    return ReconcileFinding("memory", "ok", found)


def _drift_findings(compared: Sequence[ReplicaComparison]) -> Iterator[ReconcileFinding]:
    fine = [one for one in compared if not (one.drifted or one.error or one.behind)]
    if not compared:
        yield ReconcileFinding("drift", "ok", "not checked: no primary has a replica")
    elif fine:
        keys = sum(one.compared for one in fine)
        unsettled = sum(one.unsettled for one in fine)
        what = f"{keys:,} keys were compared and are equal; replicas: {len(fine)}"
        if unsettled:
            what += f"; {unsettled:,} changed too often to be compared"
        yield ReconcileFinding("drift", "ok", what)
    for one in compared:
        where = (f"{one.replica} of {one.primary}",)
        if one.error:
            remedy = "start the replica, or remove it"
            yield ReconcileFinding("drift", "warning", f"not compared: {one.error}", where, remedy)
        elif one.drifted:
            named = [f"{key_text(key)}: {how}" for key, how in one.drifted[:EXAMPLES_MAX]]
            what = f"{len(one.drifted):,} of {one.compared:,} keys differ from the primary"
            if one.behind:
                what += "; the replica is behind"
            remedy = "quota would be wrong after a fail-over: let it synchronise again (REPLICAOF)"
            yield ReconcileFinding("drift", "problem", what, (*where, *named), remedy)
        elif one.behind:
            remedy = "check its load and its network"
            yield ReconcileFinding("drift", "warning", "the replica stays behind", where, remedy)


def _clock_findings(topology: Topology, config: RedisConfig) -> Iterator[ReconcileFinding]:
    """Report unreachable servers and clocks that differ; `doctor` reports the rest."""
    from ratekeeper.decide.stores.redis.health import survey  # noqa: PLC0415 - the redis extra

    health = survey(topology, config)
    reported = [each for each in health.findings if each.check in _REPEATED_CHECKS]
    for each in reported:
        yield ReconcileFinding(each.check, each.level, each.found, each.nodes, each.remedy)
    if not any(each.check == "clock" for each in reported):
        known = sum(node.clock_offset_ms is not None for node in health.nodes)
        what = (
            f"the clocks of {known} servers agree"
            if known > 1
            else "only one clock is known; there is nothing to compare"
        )
        yield ReconcileFinding("clock", "ok", what)


def _repairs(
    topology: Topology, audited: Sequence[AuditedServer], mode: RepairMode, needed_ms: int
) -> Iterator[StateRepair]:
    """Repair defects as the mode says, and yield each repair."""
    left = REPAIRS_MAX if mode != "no" else 0
    for one in audited:
        for defect in one.defects:
            repair = _repair_of(topology, one, defect, mode, needed_ms) if left else None
            if repair is None:
                continue
            left -= 1
            what, run = repair
            try:
                done = run()
            except StoreError as error:
                # Earlier repairs are reported all the same. Later ones would fail, too.
                yield StateRepair(defect.node, key_text(defect.key), str(error), done=False)
                return
            yield StateRepair(defect.node, key_text(defect.key), what, done)


def _repair_of(
    topology: Topology, one: AuditedServer, defect: KeyDefect, mode: RepairMode, needed_ms: int
) -> tuple[str, Callable[[], bool]] | None:
    """Return how to repair a defect: a description and a function; None if it is left alone."""
    from ratekeeper.decide.stores.redis import audit  # noqa: PLC0415 - an extra

    if defect.kind == "no expiry":
        ttl_ms = max(needed_ms, defect.needed_ms)
        if not ttl_ms:
            return "how long it is needed is unknown; give --rules", lambda: False
        what = f"expires in {ttl_ms / 1_000:,.0f} s"
        return what, lambda: audit.set_expiry(topology, one.address, defect.key, ttl_ms)
    if mode == "all" and defect.kind in {"wrong type", "unreadable"}:
        what = f"removed: {defect.why}"
        return what, lambda: audit.remove(topology, one.address, defect)
    return None


# ── Rules ──────────────────────────────────────────────────────────────────────────────────────


def _rule_findings(options: ReconcileOptions) -> list[ReconcileFinding]:
    document = options.document
    if document is None:
        return [ReconcileFinding("rules", "ok", "not checked: give --rules, or --url and a token")]
    unused = [each for each in findings(document) if each.code == "unreachable"]
    found = [
        ReconcileFinding(
            "rules", "warning", f"rule {each.rule}: {each.what}: {each.why}", (), each.remedy
        )
        for each in unused[:RULES_SHOWN_MAX]
    ]
    if not unused:
        what = f"none of {len(document.rules):,} rules is behind a rule for all requests"
        found.append(ReconcileFinding("rules", "ok", what))
    found += _traffic_findings(options, document)
    return found


def _traffic_findings(options: ReconcileOptions, document: Document) -> Iterator[ReconcileFinding]:
    idle: list[str] | None = None
    since = ""
    if options.used is not None:
        idle = [each.id for each in active_rules(document) if each.id not in options.used]
        since = f" since {options.used_since}"
    elif options.metrics is not None:
        idle = rules_without_checks(document, options.metrics)
        started_s = options.metrics.value("ratekeeper_start_time_seconds")
        if started_s is not None:
            since = f" since {datetime.fromtimestamp(started_s, UTC):%Y-%m-%d %H:%M:%S}Z"
        if idle is None:
            yield ReconcileFinding(
                "traffic", "ok", "unknown: the service has too many rules to count each"
            )
    else:
        yield ReconcileFinding("traffic", "ok", "not checked: give --url, or --records and --since")
    if idle:
        named = (*idle[:RULES_SHOWN_MAX], *(["…"] if len(idle) > RULES_SHOWN_MAX else []))
        what = f"rules that were never applied{since}: {len(idle):,}"
        remedy = "do their endpoints match those of requests? Try ratekeeper rules explain"
        yield ReconcileFinding("traffic", "warning", what, named, remedy)
    elif idle is not None:
        yield ReconcileFinding("traffic", "ok", f"every rule was applied{since}")


def needed_ms_of(document: Document) -> int:
    """Return how long a state of these rules can be needed at most; 0 without limits."""
    longest = max(map(_limit_ms, chain.from_iterable(_all_limits(document))), default=0)
    penalties = [rule.penalty for rule in document.rules if rule.penalty is not None]
    for penalty in penalties:
        levels_s = (penalty.block_after + 1) * penalty.decay_s
        longest = max(longest, round(max(room_s(penalty), levels_s) * _MS_PER_SECOND))
    return longest + longest // _EXPIRY_MARGIN + _MS_PER_SECOND if longest else 0


def _all_limits(document: Document) -> Iterator[Limits]:
    for rule in document.rules:
        yield from (each.limits for each in document.limit_sets(rule))
    for override in document.overrides:
        yield override.limits


def _limit_ms(limit: Limit) -> int:
    """Return when a state of the limit has no effect any more, rounded up."""
    if limit.algorithm in BUCKETS:
        # A bucket that is refilled in steps is full at the end of one.
        full_ns = -(-limit.capacity * limit.window_ns // limit.limit) + limit.refill_step_ns - 1
        return -(-full_ns // _NS_PER_MS)
    windows = 2 if limit.algorithm == "sliding_window_counter" else 1
    return -(-windows * limit.window_ns // _NS_PER_MS)


def active_rules(document: Document) -> list[Rule]:
    """Return the rules that can apply: not off, and rolled out."""
    return [rule for rule in document.rules if rule.mode != "off" and rule.rollout > 0]


def rules_without_checks(document: Document, metrics: Scrape) -> list[str] | None:
    """Return the rules without checks; None if the service does not count each rule."""
    counted = metrics.by("ratekeeper_rule_decisions_total", "rule")
    if OTHERS in counted:
        return None
    return [rule.id for rule in active_rules(document) if not counted.get(rule.id)]


def key_text(key: bytes) -> str:
    """Return a key for a terminal, with everything escaped that is not plain text."""
    return ascii(key.decode("utf-8", "backslashreplace").replace("\x1f", " "))[1:-1]
