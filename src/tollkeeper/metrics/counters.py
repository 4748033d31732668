"""The metrics: their names, how they are read from a limiter, and how processes add them up.

On the path of a request, counting is one addition to a dictionary or a field, without a lock,
because there is one event loop. Everything else happens when the metrics are read. A
*MetricsSnapshot* holds what one process has counted, by family and by label values. Counters of
several processes are added; of a gauge, such as the age of the rules, the worst value is reported.

No counter goes down while the service runs: the counts of rules that left the document and of
workers that died are kept.

Labels are bounded: each process reports the first RULES_MAX rules by name and the rest together,
and at most NODES_MAX servers. No label ever holds a key, a subject, a user or a path.

A *histogram* counts durations in fixed ranges: all that a quantile needs, in constant memory. The
bounds are the same everywhere and never change, so the histograms of several workers, dead ones
included, add up range by range.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, attrgetter, sub
from typing import Any, Final, Literal, NamedTuple

from tollkeeper.core.errors import ConfigError

RULES_MAX: Final = 1_000
NODES_MAX: Final = 64
OTHERS: Final = "(others)"
# Joins the values of labels; no rule id has a control character.
JOIN: Final = "\x1f"

# ── Histograms ─────────────────────────────────────────────────────────────────────────────────

# Upper bounds, inclusive: from a check in memory to longer than any client waits.
BOUNDS_NS: Final = (
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
)
# One more range for longer durations, and the sum.
LENGTH: Final = len(BOUNDS_NS) + 2


class Histogram:
    """Durations, counted without a lock: exact in one event loop, approximate in threads.

    >>> taken = Histogram()
    >>> taken.note(60_000)
    >>> taken.data()[:3], taken.data()[-1]
    ([0, 1, 0], 60000)
    """

    __slots__ = ("_counts", "_total_ns")

    def __init__(self) -> None:
        self._counts = [0] * (LENGTH - 1)
        self._total_ns = 0

    def note(self, taken_ns: int) -> None:
        """Count one duration; it takes some 200 ns."""
        self._counts[bisect_left(BOUNDS_NS, taken_ns)] += 1
        self._total_ns += taken_ns

    def data(self) -> list[int]:
        """Return the counts, range by range, and then the sum in nanoseconds."""
        return [*self._counts, self._total_ns]


def added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the data of two histograms as those of one."""
    return [mine + theirs for mine, theirs in zip(one, other, strict=True)]


def cumulative(data: Sequence[int]) -> list[tuple[float, int]]:
    """Return, for each bound in seconds, the count up to it; the last bound is infinite.

    >>> cumulative([1, 2] + [0] * 13 + [300_000])[:3]
    [(5e-05, 1), (0.0001, 3), (0.00025, 3)]
    """
    bounds_s = [*(bound / 1e9 for bound in BOUNDS_NS), float("inf")]
    return list(zip(bounds_s, accumulate(data[:-1]), strict=True))


# ── Families ───────────────────────────────────────────────────────────────────────────────────

FamilyKind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max", "min"]


class MetricFamily(NamedTuple):
    """A metric: its name is `tollkeeper_`, the name here and, for a counter, `_total`."""

    name: str
    kind: FamilyKind
    help: str
    labels: tuple[str, ...] = ()
    merge: Merge = "sum"
    """How the values of several workers become one."""

    @property
    def full_name(self) -> str:
        """Return the name in Prometheus."""
        return f"tollkeeper_{self.name}{'_total' if self.kind == 'counter' else ''}"


FAMILIES: Final = (
    MetricFamily("checks", "counter", "Decisions of each rule.", ("rule", "outcome", "source")),
    MetricFamily("degraded_checks", "counter", "Checks without the store's decision.", ("rule",)),
    MetricFamily("decision_seconds", "histogram", "How long checks took, from request to result."),
    MetricFamily("requests", "counter", "Requests answered over HTTP.", ("route", "status")),
    MetricFamily("grpc_requests", "counter", "Calls answered over gRPC.", ("code",)),
    MetricFamily("store_seconds", "histogram", "How long checks waited for a remote store."),
    MetricFamily("store_errors", "counter", "Checks that failed in the store, by kind.", ("kind",)),
    MetricFamily("node_failures", "counter", "Failed calls to a server of the store.", ("node",)),
    MetricFamily("store_states", "gauge", "States in the store."),
    MetricFamily("store_states_max", "gauge", "States that fit the store; 0: it has no limit."),
    MetricFamily("store_bytes", "gauge", "Memory of the states."),
    MetricFamily("store_log_bytes", "gauge", "Memory of the sliding window logs."),
    MetricFamily("store_log_bytes_max", "gauge", "Memory for such logs; 0: it has no limit."),
    MetricFamily("breaker_state", "gauge", "0 closed, 1 half-open, 2 open.", ("node",), "max"),
    MetricFamily("breaker_opened", "counter", "How often a breaker opened.", ("node",)),
    MetricFamily("denied_cache_hits", "counter", "Denials answered by the denial cache."),
    MetricFamily("coalesced_checks", "counter", "Checks that shared a store call with another."),
    MetricFamily("penalties", "counter", "Cool-downs and blocks given.", ("rule", "kind")),
    MetricFamily("rules_info", "gauge", "The version of the rules in force.", ("version",), "max"),
    MetricFamily(
        "rules_age_seconds", "gauge", "Seconds since the rules' source last answered.", merge="max"
    ),
    MetricFamily("rules_failing", "gauge", "1 while the rules' source has an error.", merge="max"),
    MetricFamily("rules_load_errors", "counter", "How often reading the rules failed."),
    MetricFamily("records_dropped", "counter", "Records dropped because they did not fit."),
    MetricFamily("workers", "gauge", "Workers that are alive."),
    MetricFamily("worker_starts", "counter", "Workers started, including those that died."),
    MetricFamily(
        "start_time_seconds", "gauge", "When the first worker started, in Unix time.", (), "min"
    ),
    MetricFamily("build_info", "gauge", "The version of Tollkeeper.", ("version",), "max"),
)
BY_NAME: Final = {family.name: family for family in FAMILIES}

Values = dict[str, float]
Row = tuple[int, ...]
_MERGES: Final[dict[Merge, Callable[[float, float], float]]] = {"sum": add, "max": max, "min": min}


class Counters:
    """What one process of the service counts on the path of its requests."""

    __slots__ = ("decision_seconds", "grpc_requests", "requests")

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        """By route and status."""
        self.grpc_requests: dict[str, int] = {}
        """By the name of the status code."""
        self.decision_seconds = Histogram()

    def snapshot(self) -> MetricsSnapshot:
        """Return the present counts."""
        found = MetricsSnapshot()
        for (route, status), count in list(self.requests.items()):
            found.put("requests", count, route, str(status))
        for code, count in list(self.grpc_requests.items()):
            found.put("grpc_requests", count, code)
        found.histograms["decision_seconds"] = self.decision_seconds.data()
        return found


@dataclass(slots=True)
class MetricsSnapshot:
    """The counts of a process, by family and by label values."""

    values: dict[str, Values] = field(default_factory=dict)
    histograms: dict[str, list[int]] = field(default_factory=dict)

    def put(self, family: str, value: float, *labels: str) -> None:
        """Set a value."""
        self.values.setdefault(family, {})[JOIN.join(labels)] = value

    def add(self, other: MetricsSnapshot) -> None:
        """Add the counts of another process; unknown families are left out."""
        for name, values in other.values.items():
            if name in BY_NAME:
                merge = _MERGES[BY_NAME[name].merge]
                mine = self.values.setdefault(name, {})
                for labels, value in values.items():
                    mine[labels] = merge(mine[labels], value) if labels in mine else value
        for name, data in other.histograms.items():
            if name in BY_NAME and len(data) == LENGTH:
                self.histograms[name] = added(self.histograms.get(name, [0] * LENGTH), data)

    def lasting(self) -> MetricsSnapshot:
        """Return what stays valid after the process has ended: everything but gauges."""
        kept = {
            name: values
            for name, values in self.values.items()
            if name in BY_NAME and (BY_NAME[name].kind == "counter" or BY_NAME[name].merge == "min")
        }
        return MetricsSnapshot(kept, self.histograms)


class RuleTotals:
    """Totals by rule that never go down, even when a rule leaves the document or returns.

    Each update adds what a rule has counted since the previous one. If its counts are lower than
    before, the rule was compiled again and has counted from zero.
    """

    def __init__(self) -> None:
        self.totals: dict[str, list[int]] = {}
        """By the name under which the rule is reported."""
        self._last: dict[str, Row] = {}

    def update(self, now: dict[str, Row]) -> None:
        """Add the increase since the last call; `now` has the counts of the rules in force."""
        last = self._last
        for rule, row in now.items():
            old = last.get(rule)
            if row == old:  # true for most of ten thousand rules in any second
                continue
            new = list(row) if old is None else list(map(sub, row, old))
            if min(new) < 0:
                new = list(row)
            name = self.name(rule)
            total = self.totals.get(name)
            self.totals[name] = new if total is None else list(map(add, total, new))
        self._last = now

    def name(self, rule: str) -> str:
        """Return the rule if it is among the first RULES_MAX that were counted, else OTHERS."""
        return rule if rule in self.totals or len(self.totals) < RULES_MAX else OTHERS


# ── From a limiter ─────────────────────────────────────────────────────────────────────────────

# Each field of a rule's counts, with its family and the labels after the rule.
_OF_RULES: Final = {
    "allowed": ("checks", "allowed", "store"),
    "denied": ("checks", "denied", "store"),
    "penalty_denied": ("checks", "denied", "penalty"),
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
# The rule label of checks without a rule.
NO_RULE: Final = "(none)"
_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}


class LimiterMetrics:
    """Reads the counts of one limiter and its store."""

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._totals = RuleTotals()
        # By rule: cache hits and denials at the previous snapshot, and denials from the cache.
        self._hits: dict[str, int] = {}
        self._denied: dict[str, int] = {}
        self._cached: dict[str, int] = {}

    def snapshot(self) -> MetricsSnapshot:
        """Return all counts that need no I/O. A limiter without rules counts nothing itself."""
        found = MetricsSnapshot()
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

    def _of_rules(self, found: MetricsSnapshot, counts: Mapping[str, Any]) -> None:
        totals = self._totals
        totals.update({rule: _ROW(counted) for rule, counted in counts.items()})
        columns = [
            (found.values.setdefault(family, {}), JOIN.join(("", *labels)))
            for family, *labels in _OF_RULES.values()
        ]
        for rule, total in totals.totals.items():
            for (values, labels), count in zip(columns, total, strict=True):
                if count:
                    values[rule + labels] = count
        self._from_cache(found)

    def _from_cache(self, found: MetricsSnapshot) -> None:
        """Split denials into those from the denial cache and those from the store.

        Not every cache hit is a denial of the rule: the rule may be in shadow mode, or another rule
        of the request may have denied. So of the new hits, no more count than new denials.
        """
        cached: dict[str, int] = {}
        monitor = self._limiter.store.monitor
        hits_by_rule = {} if monitor is None else monitor.denied_by_rule()
        for rule, hits in hits_by_rule.items():
            name = self._totals.name(rule)
            cached[name] = cached.get(name, 0) + hits
        for rule, hits in cached.items():
            denied = self._totals.totals.get(rule, _NOTHING)[_DENIED]
            new_hits = hits - self._hits.get(rule, 0)
            new_denied = denied - self._denied.get(rule, 0)
            from_cache = self._cached.get(rule, 0) + max(min(new_hits, new_denied), 0)
            self._hits[rule], self._denied[rule], self._cached[rule] = hits, denied, from_cache
            if from_cache:
                found.put("checks", denied - from_cache, rule, "denied", "store")
                found.put("checks", from_cache, rule, "denied", "denied_cache")

    def _beside_rules(self, found: MetricsSnapshot) -> None:
        tally = self._limiter.tally()
        for kind, count in list(tally.unruled.items()):
            found.put("checks", count, NO_RULE, kind, "none")
        for kind in ("timeout", "unavailable", "full"):
            found.put("store_errors", tally.errors.get(kind, 0), kind)
        found.histograms["store_seconds"] = tally.store_seconds.data()

    def _rules_status(self, found: MetricsSnapshot) -> None:
        status = self._limiter.rules_status()
        found.put("rules_info", 1, status.version)
        if status.age is not None:
            found.put("rules_age_seconds", round(status.age, 3))
        found.put("rules_failing", int(bool(status.error)))
        found.put("rules_load_errors", status.failures)

    def _store(self, found: MetricsSnapshot) -> None:
        """Read what a remote store counts; other stores count nothing."""
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
