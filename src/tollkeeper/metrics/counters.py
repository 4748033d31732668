"""What is counted, under which names, and how the counts of several processes become one.

On the path of a request nothing is done but to add one in a dictionary, or to a field: there is
one event loop, so no lock. Everything else happens when somebody looks. A *snapshot* is what one
process has counted so far: by family, and by the values of its labels. Counters of several
processes are added; of a gauge that each has, such as the age of the rules, the worst is told.

No counter goes down while the service runs: what a rule had counted that left the document is kept,
and so is what a worker had counted that died.

Labels are bounded: rules are those of a document, RULES_MAX of them by name in each process and the
rest together, servers NODES_MAX. No key, subject, user or path is ever one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add, attrgetter, sub
from typing import Any, Final, Literal, NamedTuple

from tollkeeper.core.errors import ConfigError
from tollkeeper.metrics.histograms import LENGTH, Histogram, added

RULES_MAX: Final = 1_000
NODES_MAX: Final = 64
OTHERS: Final = "(others)"
# Joins the values of labels; no rule's id has a control character.
JOIN: Final = "\x1f"

Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max", "min"]


class Family(NamedTuple):
    """A metric: `tollkeeper_` and the name, and `_total` after a counter's."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    merge: Merge = "sum"
    """Of several workers' values, which is told."""

    @property
    def full_name(self) -> str:
        """As Prometheus has it."""
        return f"tollkeeper_{self.name}{'_total' if self.kind == 'counter' else ''}"


FAMILIES: Final = (
    Family("checks", "counter", "What each rule decided.", ("rule", "outcome", "source")),
    Family("degraded_checks", "counter", "Checks that the store could not decide.", ("rule",)),
    Family("decision_seconds", "histogram", "How long checks took, from request to ruling."),
    Family("requests", "counter", "Requests answered over HTTP.", ("route", "status")),
    Family("grpc_requests", "counter", "Calls answered over gRPC.", ("code",)),
    Family("store_seconds", "histogram", "How long checks waited for a store that is away."),
    Family("store_errors", "counter", "Checks that the store failed, by kind.", ("kind",)),
    Family("node_failures", "counter", "Calls that a server of the store failed.", ("node",)),
    Family("store_states", "gauge", "States that the store holds."),
    Family("store_states_max", "gauge", "States that fit the store; 0: it has no bound."),
    Family("store_bytes", "gauge", "Memory that the states take."),
    Family("breaker_state", "gauge", "0 closed, 1 half-open, 2 open.", ("node",), "max"),
    Family("breaker_opened", "counter", "Times that a breaker opened.", ("node",)),
    Family("denied_cache_hits", "counter", "Denials told again without asking the store."),
    Family("coalesced_checks", "counter", "Checks that went to the store with another."),
    Family("penalties", "counter", "Cool-downs and blocks given.", ("rule", "kind")),
    Family("rules_info", "gauge", "The version of the rules in force.", ("version",), "max"),
    Family(
        "rules_age_seconds", "gauge", "Since the source last said what is current.", merge="max"
    ),
    Family("rules_failing", "gauge", "1 while the rules' source has an error.", merge="max"),
    Family("rules_load_errors", "counter", "Times that the rules could not be read."),
    Family("records_dropped", "counter", "Records that there was no room for."),
    Family("workers", "gauge", "Workers alive."),
    Family("worker_starts", "counter", "Workers started, those that died included."),
    Family(
        "start_time_seconds", "gauge", "When the first worker started, in Unix time.", (), "min"
    ),
    Family("build_info", "gauge", "The version of Tollkeeper.", ("version",), "max"),
)
BY_NAME: Final = {family.name: family for family in FAMILIES}

Values = dict[str, float]
Row = tuple[int, ...]
_MERGES: Final[dict[Merge, Callable[[float, float], float]]] = {"sum": add, "max": max, "min": min}


class Counters:
    """What the service counts on the path of its requests, in one process."""

    __slots__ = ("decision_seconds", "grpc_requests", "requests")

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        """By route and status."""
        self.grpc_requests: dict[str, int] = {}
        """By the status code's name."""
        self.decision_seconds = Histogram()

    def snapshot(self) -> Snapshot:
        """What was counted so far."""
        found = Snapshot()
        for (route, status), count in list(self.requests.items()):
            found.put("requests", count, route, str(status))
        for code, count in list(self.grpc_requests.items()):
            found.put("grpc_requests", count, code)
        found.histograms["decision_seconds"] = self.decision_seconds.data()
        return found


@dataclass(slots=True)
class Snapshot:
    """What a process has counted, by family and by its labels' values."""

    values: dict[str, Values] = field(default_factory=dict)
    histograms: dict[str, list[int]] = field(default_factory=dict)

    def put(self, family: str, value: float, *labels: str) -> None:
        """Set one value."""
        self.values.setdefault(family, {})[JOIN.join(labels)] = value

    def add(self, other: Snapshot) -> None:
        """What the other has counted, too. Families that are not known here are left out."""
        for name, values in other.values.items():
            if name in BY_NAME:
                merge = _MERGES[BY_NAME[name].merge]
                mine = self.values.setdefault(name, {})
                for labels, value in values.items():
                    mine[labels] = merge(mine[labels], value) if labels in mine else value
        for name, data in other.histograms.items():
            if name in BY_NAME and len(data) == LENGTH:
                self.histograms[name] = added(self.histograms.get(name, [0] * LENGTH), data)

    def lasting(self) -> Snapshot:
        """What counts when the process is gone: all but what it said of the moment."""
        kept = {
            name: values
            for name, values in self.values.items()
            if name in BY_NAME and (BY_NAME[name].kind == "counter" or BY_NAME[name].merge == "min")
        }
        return Snapshot(kept, self.histograms)


class Lasting:
    """Counts by rule that do not go down when a rule leaves the document, or comes back.

    What a rule has counted since the last look is added to its total. A rule whose counts are lower
    than they were has begun anew, and all that it has counted is new.
    """

    def __init__(self) -> None:
        self.totals: dict[str, list[int]] = {}
        """By the name that the rule goes by."""
        self._last: dict[str, Row] = {}

    def update(self, now: dict[str, Row]) -> None:
        """Add what is new; `now` is what the rules in force have counted, field by field."""
        last = self._last
        for rule, row in now.items():
            old = last.get(rule)
            if row == old:  # as for most of ten thousand rules in any second
                continue
            new = list(row) if old is None else list(map(sub, row, old))
            if min(new) < 0:
                new = list(row)
            name = self.name(rule)
            total = self.totals.get(name)
            self.totals[name] = new if total is None else list(map(add, total, new))
        self._last = now

    def name(self, rule: str) -> str:
        """The rule, if it is among the first RULES_MAX that were counted."""
        return rule if rule in self.totals or len(self.totals) < RULES_MAX else OTHERS


# ── From a limiter ─────────────────────────────────────────────────────────────────────────────

# The fields of a rule's counts, as family and labels after the rule.
_OF_RULES: Final = {
    "allowed": ("checks", "allowed", "store"),
    "denied": ("checks", "denied", "store"),
    "shadow_denied": ("checks", "shadow_denied", "store"),
    "local_allowed": ("checks", "allowed", "local"),
    "local_denied": ("checks", "denied", "local"),
    "policy_allowed": ("checks", "allowed", "policy"),
    "policy_denied": ("checks", "denied", "policy"),
    "raised": ("checks", "failed", "policy"),
    "failed": ("degraded_checks",),
    "cooldowns": ("penalties", "cooldown"),
    "blocks": ("penalties", "block"),
}
_ROW: Final[Callable[[Any], Row]] = attrgetter(*_OF_RULES)
_NOTHING: Final = [0] * len(_OF_RULES)
_DENIED: Final = list(_OF_RULES).index("denied")
# What a check without a rule is counted under.
NO_RULE: Final = "(none)"
_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}


class Reading:
    """Reads what a limiter and its store have counted; for one limiter."""

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._lasting = Lasting()
        # By rule: hits of the denied cache and denials at the last look, and which were both.
        self._hits: dict[str, int] = {}
        self._denied: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def snapshot(self) -> Snapshot:
        """Everything that needs no I/O. A limiter without rules has counted nothing of its own."""
        found = Snapshot()
        try:
            counts = self._limiter.counts()
        except ConfigError:
            counts = {}
        else:
            self._beside_rules(found)
            self._rules_status(found)
        self._of_rules(found, counts)
        self._store(found)
        return found

    def _of_rules(self, found: Snapshot, counts: Mapping[str, Any]) -> None:
        lasting = self._lasting
        lasting.update({rule: _ROW(counted) for rule, counted in counts.items()})
        columns = [
            (found.values.setdefault(family, {}), JOIN.join(("", *labels)))
            for family, *labels in _OF_RULES.values()
        ]
        for rule, total in lasting.totals.items():
            for (values, labels), count in zip(columns, total, strict=True):
                if count:
                    values[rule + labels] = count
        self._from_cache(found)

    def _from_cache(self, found: Snapshot) -> None:
        """Tell denials that the store was not asked for apart from the others.

        Not every hit is a denial of the rule: it may be in shadow mode, or another rule of the same
        request denied. So of what is new since the last look, no more hits count than denials.
        """
        cached: dict[str, int] = {}
        monitor = self._limiter.store.monitor
        hits_by_rule = {} if monitor is None else monitor.denied_by_rule()
        for rule, hits in hits_by_rule.items():
            name = self._lasting.name(rule)
            cached[name] = cached.get(name, 0) + hits
        for rule, hits in cached.items():
            denied = self._lasting.totals.get(rule, _NOTHING)[_DENIED]
            new_hits = hits - self._hits.get(rule, 0)
            new_denied = denied - self._denied.get(rule, 0)
            known = self._known.get(rule, 0) + max(min(new_hits, new_denied), 0)
            self._hits[rule], self._denied[rule], self._known[rule] = hits, denied, known
            if known:
                found.put("checks", denied - known, rule, "denied", "store")
                found.put("checks", known, rule, "denied", "denied_cache")

    def _beside_rules(self, found: Snapshot) -> None:
        tally = self._limiter.tally()
        for kind, count in list(tally.unruled.items()):
            found.put("checks", count, NO_RULE, kind, "none")
        for kind in ("timeout", "unavailable", "full"):
            found.put("store_errors", tally.errors.get(kind, 0), kind)
        found.histograms["store_seconds"] = tally.store_seconds.data()

    def _rules_status(self, found: Snapshot) -> None:
        status = self._limiter.rules_status()
        found.put("rules_info", 1, status.version)
        if status.age is not None:
            found.put("rules_age_seconds", round(status.age, 3))
        found.put("rules_failing", int(bool(status.error)))
        found.put("rules_load_errors", status.failures)

    def _store(self, found: Snapshot) -> None:
        """What a store counts by itself; most have none of it."""
        store = self._limiter.store
        monitor = store.monitor
        counters = {} if monitor is None else monitor.counters()
        found.put("denied_cache_hits", counters.get("denied_cache_hits", 0))
        found.put("coalesced_checks", counters.get("coalesced_checks", 0))
        for breaker in [] if monitor is None else list(monitor.breakers())[:NODES_MAX]:
            node = str(breaker.address)
            found.put("breaker_state", _STATES[breaker.state], node)
            found.put("breaker_opened", breaker.opened_times, node)
            found.put("node_failures", breaker.failed_calls, node)
