"""`tollkeeper reconcile`: is what the store holds as it should be, and if not, what mends it?

`doctor` asks whether the servers are fit; this looks at what they keep. It walks Redis gently
(`decide/stores/redis/audit.py`), compares replicas with their primaries, and, told
the rules, says which of them nobody meets. It changes nothing unless `--repair` asks for it, and
then says each thing that it did. `reconcile_command.py` is the command; here nobody prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote, urlsplit

from tollkeeper.cli import reconcile_rules
from tollkeeper.cli.scrape import Scrape
from tollkeeper.core.errors import ConfigError, StoreError
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from tollkeeper.decide.stores.redis.config import RedisConfig
from tollkeeper.decide.stores.redis.config import parse as parse_redis
from tollkeeper.rules.document.model import Document

if TYPE_CHECKING:
    # These need the libraries of the redis extra, which shared:// does without.
    from tollkeeper.decide.stores.redis.audit import (
        AuditedServer,
        DefectKind,
        KeyDefect,
        ReplicaComparison,
    )
    from tollkeeper.decide.stores.redis.topology import Topology

Level = Literal["ok", "warning", "problem"]
Repairing = Literal["no", "expiry", "all"]

EXAMPLES_MAX: Final = 5
RULES_TOLD_MAX: Final = 20
REPAIRS_MAX: Final = 10_000
FULLNESS_HIGH: Final = 0.8
# One who holds so great a share of the states is worth a word, if there are enough of them.
SHARE_HIGH: Final = 0.25
STATES_MIN: Final = 1_000
# What no clock of one machine against another's should be, as `doctor` has it.
_CLOCK_CHECKS: Final = frozenset({"clock", "connection"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, where, and what to do unless all is well."""

    check: str
    level: Level
    what: str
    where: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing that was to be mended."""

    node: str
    key: str
    what: str
    done: bool
    """False: it had changed by then, and was left alone."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, and what was done about it."""

    store: str
    """Its URI, without secrets."""
    findings: tuple[Finding, ...]
    counted: Mapping[str, int]
    at: datetime
    seconds: float
    repairs: tuple[Repair, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: all is well. 1: something was found, and may have been mended."""
        return int(any(finding.level != "ok" for finding in self.findings))


@dataclass(frozen=True, slots=True)
class Asked:
    """What to look at, and how."""

    store: str
    options: Mapping[str, object] = field(default_factory=dict)
    document: Document | None = None
    metrics: Scrape | None = None
    """Of a service that runs with these rules."""
    used: frozenset[str] | None = None
    """Rules that a table of usage has seen since `used_since`."""
    used_since: str = ""
    repair: Repairing = "no"
    keys_max: int = 0
    pause_seconds: float | None = None


def reconcile(asked: Asked) -> Report:
    """Look, and mend what is asked for. Raises ConfigError, StoreError."""
    at, started_s = datetime.now(UTC), monotonic()
    scheme, separator, _ = asked.store.partition("://")
    scheme = scheme.lower() if separator else ""
    if scheme in REDIS_SCHEMES:
        shown, findings, counted, repairs = _redis(asked)
    elif scheme == "shared":
        shown, findings, counted = _shared(asked)
        repairs = ()
    elif scheme == "memory":
        raise ConfigError(
            "memory:// is in the memory of each process, where nobody else can look; "
            "its numbers are in limiter.stats()"
        )
    else:
        known = ", ".join(f"{name}://" for name in ("shared", *REDIS_SCHEMES))
        raise ConfigError(f"--store has no known scheme; begin it with one of {known}")
    findings += _rules(asked)
    seconds = round(monotonic() - started_s, 3)
    return Report(shown, tuple(findings), counted, at, seconds, tuple(repairs))


# ── Files ──────────────────────────────────────────────────────────────────────────────────────


def _shared(asked: Asked) -> tuple[str, list[Finding], dict[str, int]]:
    path = Path(unquote(urlsplit(asked.store).path))
    if not path.exists():
        raise ConfigError(f"there is no file {path}; correct the path, or start the service")
    with closing(open_store(asked.store, None, **asked.options)) as store:
        swept = store.sweep() if asked.repair != "no" else 0
        stats = store.stats()
    where = (str(path),)
    findings = [
        Finding("version", "ok", "the file is of this version, and whole", where),
        Finding("expiry", "ok", "every state in a file has its end in it; none can lack one"),
        Finding("drift", "ok", "a file has no replicas"),
    ]
    found = f"{stats.states:,} of {stats.states_max:,} states are taken"
    if stats.refused:
        found += f"; {stats.refused:,} new ones found no room"
    full = stats.fullness >= FULLNESS_HIGH or bool(stats.refused)
    larger = f"shared://{path}?capacity={2 * stats.states_max}"
    remedy = f"stop the service, delete the file, and start it with {larger}" if full else ""
    findings.append(Finding("occupancy", "warning" if full else "ok", found, where, remedy))
    if swept:
        findings.append(Finding("swept", "ok", f"{swept:,} states were over, and are gone", where))
    counted = {"states": stats.states, "states_max": stats.states_max, "bytes": stats.bytes}
    return asked.store.partition("?")[0], findings, counted


# ── Redis ──────────────────────────────────────────────────────────────────────────────────────


def _redis(asked: Asked) -> tuple[str, list[Finding], dict[str, int], tuple[Repair, ...]]:
    config = parse_redis(asked.store, **asked.options)
    # Says so if its libraries are missing.
    open_store(asked.store, None, **asked.options).close()
    from tollkeeper.decide.stores.redis import audit  # noqa: PLC0415 - the redis extra
    from tollkeeper.decide.stores.redis.topology import Topology  # noqa: PLC0415 - as above

    needed_ms = 0 if asked.document is None else reconcile_rules.needed_ms(asked.document)
    pause_s = audit.PAUSE_SECONDS if asked.pause_seconds is None else asked.pause_seconds
    logs = frozenset() if asked.document is None else reconcile_rules.logs_of(asked.document)
    pace = audit.AuditPace(asked.keys_max, pause_s, ttl_ms_max=needed_ms or None, logs=logs)
    with closing(Topology(config)) as topology:
        walked = audit.audit(topology, config.prefix, pace)
        compared = [
            each
            for one in walked
            for each in audit.compare_replicas(topology, one.address, one.sample, config.prefix)
        ]
        repairs = tuple(_Repairs(topology, walked, asked.repair, needed_ms).made())
        findings = [
            *_walked(walked, config, asked, repairs),
            *_drift(compared),
            *_clocks(topology, config),
        ]
    return config.shown(), findings, _counted(walked), repairs


def _counted(walked: Sequence[AuditedServer]) -> dict[str, int]:
    states = sum(one.states for one in walked)
    memory_bytes = sum(one.memory_bytes for one in walked)
    return {
        "keys": sum(one.keys for one in walked),
        "states": states,
        "bytes": memory_bytes,
        "bytes a state": memory_bytes // states if states else 0,
        "primaries": len(walked),
    }


def _walked(
    walked: Sequence[AuditedServer], config: RedisConfig, asked: Asked, repairs: Sequence[Repair]
) -> Iterator[Finding]:
    yield _coverage(walked, config)
    for kind, (level, what, remedy) in _DEFECTS.items():
        count = sum(one.counts[kind] for one in walked)
        if kind == "long expiry" and asked.document is None:
            told = "not looked at: without --rules nobody knows how long is too long"
            yield Finding(kind, "ok", told)
        elif not count:
            yield Finding(kind, "ok", f"none of the keys {_FINE[kind]}")
        else:
            some = [defect for one in walked for defect in one.defects if defect.kind == kind]
            where = tuple(
                f"{key_text(defect.key)} on {defect.node}: {defect.why}"
                for defect in some[:EXAMPLES_MAX]
            )
            if count > len(where):
                where = (*where, f"and {count - len(where):,} more")
            yield Finding(kind, level, what.format(count=f"{count:,}"), where, remedy)
    if done := sum(repair.done for repair in repairs):
        yield Finding("repair", "ok", f"mended: {done:,}")
    yield _memory(walked)
    yield from _anomalies(walked)
    if asked.document is not None:
        yield from _stored(asked.document, walked)


_DEFECTS: Final[Mapping[DefectKind, tuple[Level, str, str]]] = {
    "no expiry": (
        "problem",
        "keys that never expire, and would stay for good: {count}",
        "--repair gives them an expiry; who wrote or restored them?",
    ),
    "wrong type": (
        "problem",
        "keys that are no hashes, so that checks of their subjects fail: {count}",
        "give the program that writes them another prefix; --repair=all removes them",
    ),
    "unreadable": (
        "problem",
        "fields that cannot be read, so that checks of their subjects fail: {count}",
        "is another version using this prefix? --repair=all removes them, to begin anew",
    ),
    "long expiry": (
        "warning",
        "keys that live far longer than any limit in force could need: {count}",
        "were limits shortened, or is the wrong document given? They go by themselves",
    ),
    "not ours": (
        "warning",
        "keys whose names begin like ours and are not: {count}",
        "give the other program another prefix; they are never touched here",
    ),
}
_FINE: Final[Mapping[DefectKind, str]] = {
    "no expiry": "lacks an expiry",
    "wrong type": "is of another type than ours",
    "unreadable": "has a field that cannot be read",
    "long expiry": "lives longer than the limits in force need",
    "not ours": "has a name that is not ours",
}


def _coverage(walked: Sequence[AuditedServer], config: RedisConfig) -> Finding:
    keys = sum(one.keys for one in walked)
    servers = "a primary" if len(walked) == 1 else f"{len(walked)} primaries"
    found = f"{keys:,} keys of prefix {config.prefix} on {servers} were looked at"
    if all(one.complete for one in walked):
        return Finding("keys", "ok", found)
    there = sum(one.keys_in_all or 0 for one in walked)
    found += f", and not all: the databases hold {there:,} keys"
    return Finding("keys", "ok", found, remedy="raise --limit-keys to look at more")


def _memory(walked: Sequence[AuditedServer]) -> Finding:
    if not any(one.weighed for one in walked):
        return Finding(
            "memory", "ok", "not known: there are no keys, or no server tells their size"
        )
    counted = _counted(walked)
    found = (
        f"{counted['bytes'] / 2**20:,.1f} MiB in {counted['states']:,} states: "
        f"{counted['bytes a state']:,} bytes a state"
    )
    return Finding("memory", "ok", found)


def _anomalies(walked: Sequence[AuditedServer]) -> Iterator[Finding]:
    """One who holds a large share of everything."""
    states = sum(one.states for one in walked)
    holders: Counter[bytes] = Counter()
    for one in walked:
        holders.update(one.holders)
    large = [
        (holder, count)
        for holder, count in holders.most_common(EXAMPLES_MAX)
        if states >= STATES_MIN and count >= SHARE_HIGH * states
    ]
    if not large:
        yield Finding("shares", "ok", f"nobody holds more than {SHARE_HIGH:.0%} of the states")
    for holder, count in large:
        found = f"{key_text(holder)} has {count / states:.0%} of all {states:,} states"
        remedy = "does it make up keys? Add a rule that counts by what it cannot choose"
        yield Finding("shares", "warning", found, remedy=remedy)


def _stored(document: Document, walked: Sequence[AuditedServer]) -> Iterator[Finding]:
    """Which rules the states are of."""
    fields: Counter[bytes] = Counter()
    for one in walked:
        fields.update(one.rules)
    held = reconcile_rules.states_by_rule(document, fields)
    kept = sum(bool(count) for count in held.values())
    yield Finding("rules kept", "ok", f"{kept:,} of {len(held):,} rules have states in the store")
    strange = reconcile_rules.of_no_rule(document, fields)
    if strange:
        named = [f"{name} {count:,}" for name, count in strange.most_common(EXAMPLES_MAX)]
        what = f"{strange.total():,} states are of rules that are not in the document"
        remedy = "rules that were removed go by themselves; others may share this prefix"
        yield Finding("rules kept", "ok", what, tuple(named), remedy)


def _drift(compared: Sequence[ReplicaComparison]) -> Iterator[Finding]:
    fine = [one for one in compared if not (one.drifted or one.error or one.behind)]
    if not compared:
        yield Finding("drift", "ok", "not looked at: no primary has a replica")
    elif fine:
        keys = sum(one.compared for one in fine)
        unsettled = sum(one.unsettled for one in fine)
        what = f"{keys:,} keys were compared and are alike; replicas: {len(fine)}"
        if unsettled:
            what += f"; {unsettled:,} changed all the while, and say nothing"
        yield Finding("drift", "ok", what)
    for one in compared:
        where = (f"{one.replica} of {one.primary}",)
        if one.error:
            remedy = "start it, or take it out"
            yield Finding("drift", "warning", f"not compared: {one.error}", where, remedy)
        elif one.drifted:
            named = [f"{key_text(key)}: {how}" for key, how in one.drifted[:EXAMPLES_MAX]]
            what = f"of {one.compared:,} keys, {len(one.drifted):,} differ from the primary's"
            if one.behind:
                what += ", which it has not caught up with"
            remedy = "after a fail-over its quota would be wrong: let it copy anew (REPLICAOF)"
            yield Finding("drift", "problem", what, (*where, *named), remedy)
        elif one.behind:
            remedy = "look at its load and its network"
            yield Finding("drift", "warning", "it does not catch up", where, remedy)


def _clocks(topology: Topology, config: RedisConfig) -> Iterator[Finding]:
    """Servers that cannot be asked, and clocks that are apart; `doctor` tells the rest."""
    from tollkeeper.decide.stores.redis.health import survey  # noqa: PLC0415 - the redis extra

    health = survey(topology, config)
    told = [each for each in health.findings if each.check in _CLOCK_CHECKS]
    for each in told:
        yield Finding(each.check, each.level, each.found, each.nodes, each.remedy)
    if not any(each.check == "clock" for each in told):
        asked = sum(node.clock_offset_ms is not None for node in health.nodes)
        what = (
            f"the clocks of {asked} servers are together"
            if asked > 1
            else "one is known: none to compare"
        )
        yield Finding("clock", "ok", what)


class _Repairs:
    """What is mended: the missing expiries; and, where all is asked for, what cannot be read."""

    def __init__(
        self, topology: Topology, walked: Sequence[AuditedServer], how: Repairing, needed_ms: int
    ) -> None:
        self._topology = topology
        self._walked = walked
        self._how = how
        self._needed_ms = needed_ms

    def made(self) -> Iterator[Repair]:
        """Each, when it is done."""
        left = REPAIRS_MAX if self._how != "no" else 0
        for one in self._walked:
            for defect in one.defects:
                mend = self._mending(one, defect) if left else None
                if mend is None:
                    continue
                left -= 1
                what, do = mend
                try:
                    done = do()
                except StoreError as error:
                    # What was done before is told all the same; the next would fail as well.
                    yield Repair(defect.node, key_text(defect.key), str(error), done=False)
                    return
                yield Repair(defect.node, key_text(defect.key), what, done)

    def _mending(
        self, one: AuditedServer, defect: KeyDefect
    ) -> tuple[str, Callable[[], bool]] | None:
        from tollkeeper.decide.stores.redis import audit  # noqa: PLC0415 - an extra

        if defect.kind == "no expiry":
            ttl_ms = max(self._needed_ms, defect.needed_ms)
            if not ttl_ms:
                return "it says not how long it is needed; give --rules", lambda: False
            what = f"expires in {ttl_ms / 1_000:,.0f} s"
            return what, lambda: audit.set_expiry(self._topology, one.address, defect.key, ttl_ms)
        if self._how == "all" and defect.kind in {"wrong type", "unreadable"}:
            what = f"removed: {defect.why}"
            return what, lambda: audit.remove(self._topology, one.address, defect)
        return None


# ── Rules ──────────────────────────────────────────────────────────────────────────────────────


def _rules(asked: Asked) -> list[Finding]:
    document = asked.document
    if document is None:
        return [Finding("rules", "ok", "not looked at: give --rules, or --url and a token")]
    covered = reconcile_rules.covered(document)
    found = [
        Finding("rules", "warning", f"rule {each.rule}: {each.what}: {each.why}", (), each.remedy)
        for each in covered[:RULES_TOLD_MAX]
    ]
    if not covered:
        found.append(
            Finding("rules", "ok", f"none of {len(document.rules):,} is covered by others")
        )
    found += _traffic(asked, document)
    return found


def _traffic(asked: Asked, document: Document) -> Iterator[Finding]:
    idle: list[str] | None = None
    since = ""
    if asked.used is not None:
        idle = [each.id for each in reconcile_rules.in_force(document) if each.id not in asked.used]
        since = f" since {asked.used_since}"
    elif asked.metrics is not None:
        idle = reconcile_rules.without_checks(document, asked.metrics)
        started_s = asked.metrics.value("tollkeeper_start_time_seconds")
        if started_s is not None:
            since = f" since {datetime.fromtimestamp(started_s, UTC):%Y-%m-%d %H:%M:%S}Z"
        if idle is None:
            yield Finding("traffic", "ok", "not known: the service has too many rules to name each")
    else:
        yield Finding("traffic", "ok", "not looked at: give --url, or --records and --since")
    if idle:
        named = (*idle[:RULES_TOLD_MAX], *(["…"] if len(idle) > RULES_TOLD_MAX else []))
        what = f"rules that have decided nothing{since}: {len(idle):,}"
        remedy = "are their endpoints spelled as requests have them? tollkeeper rules explain"
        yield Finding("traffic", "warning", what, named, remedy)
    elif idle is not None:
        yield Finding("traffic", "ok", f"every rule has decided something{since}")


def key_text(key: bytes) -> str:
    """A key for people: what is no text, or would be obeyed by a terminal, is escaped."""
    return ascii(key.decode("utf-8", "backslashreplace").replace("\x1f", " "))[1:-1]
