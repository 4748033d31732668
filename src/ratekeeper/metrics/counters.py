"""The metrics: their names, how they are read from a limiter, and how processes add them up.

On the path of a request, counting is one addition to a dictionary or a field, without a lock,
because there is one event loop. Everything else happens when the metrics are read. A
*MetricsSnapshot* holds the counts of one process, by family and by label values. Counters of
several processes are added; of a gauge, such as the age of the rules, the worst value is reported.

No counter goes down while the service runs: the counts of rules that left the document and of
workers that died are kept.

A check and its rules are counted apart: a check that three rules apply to is one of `checks`, and
three of `rule_decisions`.

Labels are bounded: each process reports the first RULES_MAX rules by name and the rest together,
and at most SERVERS_MAX servers. Algorithm and endpoint are those of the rule, as the document has
them, so they add no series. No label ever holds a key, a subject, a user or a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from operator import add, attrgetter, sub
from threading import Lock
from time import monotonic
from typing import Any, Final, Literal, NamedTuple
from weakref import ReferenceType, WeakValueDictionary, proxy, ref

from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.histogram import LENGTH, Histogram, added
from ratekeeper.core.model import DEFAULT_NAME, CheckResult, Limit
from ratekeeper.decide.allowances import AllowanceStats
from ratekeeper.decide.decider import lost
from ratekeeper.decide.fleet_monitor import FleetMonitor, FleetNode, GossipCounts, ReportCounts
from ratekeeper.decide.region_monitor import RegionMonitor, RegionStatus
from ratekeeper.decide.regional import REGIONS_MAX
from ratekeeper.decide.store import ServerStatus, StoreMonitor, StoreStats, shared_store

RULES_MAX: Final = 1_000
SERVERS_MAX: Final = 64
OTHERS: Final = "(others)"
# Joins the values of labels; no rule id has a control character.
JOIN: Final = "\x1f"

# ── Families ───────────────────────────────────────────────────────────────────────────────────

FamilyKind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max", "min"]


class MetricFamily(NamedTuple):
    """A metric: its name is `ratekeeper_`, the name here and, for a counter, `_total`."""

    name: str
    kind: FamilyKind
    help: str
    labels: tuple[str, ...] = ()
    merge: Merge = "sum"
    """How the values of several workers become one."""

    @property
    def full_name(self) -> str:
        """Return the name in Prometheus."""
        return f"ratekeeper_{self.name}{'_total' if self.kind == 'counter' else ''}"


FAMILIES: Final = (
    MetricFamily("checks", "counter", "Checks, each counted once.", ("outcome",)),
    MetricFamily("degraded_checks", "counter", "Checks that the store did not decide alone."),
    MetricFamily(
        "rule_decisions",
        "counter",
        "Decisions of rules: a check has one for each rule that applies.",
        ("rule", "algorithm", "endpoint", "outcome", "source"),
    ),
    MetricFamily("rule_failures", "counter", "Decisions that the store failed to make.", ("rule",)),
    MetricFamily(
        "busiest_subject_rate", "gauge", "Checks per second of the busiest subject.", (), "max"
    ),
    MetricFamily("decision_seconds", "histogram", "How long checks took, from request to result."),
    MetricFamily("requests", "counter", "Requests answered over HTTP.", ("route", "status")),
    MetricFamily("grpc_requests", "counter", "Calls answered over gRPC.", ("code",)),
    MetricFamily(
        "grpc_resets", "counter", "Calls and connections that ended without status.", ("reason",)
    ),
    MetricFamily("envoy_quota_streams", "gauge", "Envoys that are connected for quotas."),
    MetricFamily("envoy_quota_buckets", "gauge", "Buckets of these Envoys."),
    MetricFamily("envoy_quota_reports", "counter", "Reports of Envoys on their buckets."),
    MetricFamily(
        "envoy_quota_assignments", "counter", "Actions sent to Envoys, by kind.", ("kind",)
    ),
    MetricFamily(
        "envoy_quota_blankets",
        "counter",
        "Assignments that let all requests of a bucket pass, or none, by reason.",
        ("reason",),
    ),
    MetricFamily("store_seconds", "histogram", "How long calls to a server took.", ("server",)),
    MetricFamily("store_errors", "counter", "Checks that failed in the store, by kind.", ("kind",)),
    MetricFamily(
        "lost_charges", "counter", "Charges of denied requests that may stay.", ("reason",)
    ),
    MetricFamily("server_failures", "counter", "Failed calls to a store's server.", ("server",)),
    MetricFamily("store_states", "gauge", "States in the store."),
    MetricFamily("store_states_max", "gauge", "States that fit the store; 0: it has no limit."),
    MetricFamily("store_bytes", "gauge", "Memory of the states."),
    MetricFamily("store_log_bytes", "gauge", "Memory of the sliding window logs."),
    MetricFamily("store_log_bytes_max", "gauge", "Memory for such logs; 0: it has no limit."),
    MetricFamily("clock_offset_seconds", "gauge", "A server's clock minus ours.", ("server",)),
    MetricFamily("store_keys_evicted", "counter", "Keys that a server evicted.", ("server",)),
    MetricFamily(
        "store_kept_since_seconds",
        "gauge",
        "Since when a server has kept its keys, in Unix time; 0: since before this process.",
        ("server",),
    ),
    MetricFamily("breaker_state", "gauge", "0 closed, 1 half-open, 2 open.", ("server",), "max"),
    MetricFamily("breaker_opened", "counter", "How often a breaker opened.", ("server",)),
    MetricFamily("denied_cache_hits", "counter", "Denials answered by the denial cache."),
    MetricFamily("coalesced_checks", "counter", "Checks that shared a store call with another."),
    MetricFamily("waiting_requests", "gauge", "Requests that wait for room in a queue."),
    MetricFamily("waiting_longest", "gauge", "Requests in the longest queue.", (), "max"),
    MetricFamily(
        "in_flight", "gauge", "Requests that have a slot of a limit of such requests.", ("rule",)
    ),
    MetricFamily(
        "renewals_failed",
        "counter",
        "Slots of requests in flight that were not renewed.",
        ("rule",),
    ),
    MetricFamily("penalties", "counter", "Cool-downs and blocks given.", ("rule", "kind")),
    MetricFamily(
        "settled_units", "counter", "Units charged later, above the reservation.", ("rule",)
    ),
    MetricFamily(
        "forgiven_units",
        "counter",
        "Units that a limit may not owe, and did not charge.",
        ("rule",),
    ),
    MetricFamily("rules_info", "gauge", "The version of the rules in force.", ("version",), "max"),
    MetricFamily(
        "rules_age_seconds", "gauge", "Seconds since the rules' source last answered.", merge="max"
    ),
    MetricFamily("rules_failing", "gauge", "1 while the rules' source has an error.", merge="max"),
    MetricFamily("rules_load_errors", "counter", "How often reading the rules failed."),
    MetricFamily(
        "load_factor", "gauge", "The factor of a rule's limits, by the load.", ("rule",), "min"
    ),
    MetricFamily(
        "load_age_seconds", "gauge", "Seconds since a load was last known.", ("source",), "max"
    ),
    MetricFamily(
        "fleet_checks",
        "counter",
        "Checks of leased and eventual rules: allowed or denied by the node, or asked.",
        ("rule", "consistency", "outcome"),
    ),
    MetricFamily("fleet_allowances", "gauge", "Allowances in the node's table.", (), "max"),
    MetricFamily("fleet_allowances_max", "gauge", "Allowances that fit the table.", (), "max"),
    MetricFamily("fleet_allowances_refused", "counter", "Allowances that did not fit.", (), "max"),
    MetricFamily("fleet_leased_units", "gauge", "Units of leases, not spent yet.", (), "max"),
    MetricFamily("fleet_pending_units", "gauge", "Units spent, not reported yet.", (), "max"),
    MetricFamily("fleet_returned_units", "counter", "Units of leases that were given back."),
    MetricFamily("fleet_charged_units", "counter", "Units that were charged late."),
    MetricFamily("fleet_lost_units", "counter", "Units never given back, or never charged."),
    MetricFamily("fleet_reports", "counter", "Reports to the authority.", ("outcome",)),
    MetricFamily(
        "fleet_divergence_units",
        "counter",
        "Differences between the remaining units that the node expected and the authority's.",
    ),
    MetricFamily("fleet_flush_seconds", "histogram", "How long a batch of reports took."),
    MetricFamily("fleet_live_nodes", "gauge", "Nodes that share the limits.", (), "max"),
    MetricFamily("fleet_registered_nodes", "gauge", "Nodes that the authority knows.", (), "max"),
    MetricFamily("fleet_nodes", "gauge", "Nodes that this node knows.", ("state",), "max"),
    MetricFamily("gossip_messages", "counter", "Datagrams of gossip.", ("direction",)),
    MetricFamily("gossip_bytes", "counter", "Bytes of gossip.", ("direction",)),
    MetricFamily("gossip_drops", "counter", "Datagrams that were dropped.", ("reason",)),
    MetricFamily("gossip_hint_seconds", "histogram", "The age of hints when they arrive."),
    MetricFamily(
        "gossip_lag_seconds",
        "gauge",
        "Seconds since the last news of the live node that has been silent for longest.",
        (),
        "max",
    ),
    MetricFamily(
        "region_leader",
        "gauge",
        "1 where a process leads the sync of its region.",
        ("region",),
        "max",
    ),
    MetricFamily("region_share", "gauge", "The share of exact limits.", ("region",), "max"),
    MetricFamily(
        "region_backlog", "gauge", "Subjects with totals not accepted yet.", ("region",), "max"
    ),
    MetricFamily("region_unaccepted_units", "gauge", "Units of these totals.", ("region",), "max"),
    MetricFamily(
        "region_link_state",
        "gauge",
        "0 up, 1 down, 2 refused, 3 removed.",
        ("region", "peer"),
        "max",
    ),
    MetricFamily(
        "region_lag_seconds",
        "gauge",
        "The age of the oldest total not yet reported to the other region.",
        ("region", "peer"),
        "max",
    ),
    MetricFamily(
        "region_reports",
        "counter",
        "Reports to another region: accepted, pending or failed.",
        ("region", "peer", "outcome"),
    ),
    MetricFamily(
        "region_bytes", "counter", "Bytes between regions.", ("region", "peer", "direction")
    ),
    MetricFamily(
        "region_excess_units",
        "counter",
        "Units by which reports brought subjects above their limits.",
        ("region", "peer"),
    ),
    MetricFamily(
        "region_sync_seconds",
        "histogram",
        "Seconds from a check until another region knows its units.",
        ("region", "peer"),
    ),
    MetricFamily("records_dropped", "counter", "Records dropped because they did not fit."),
    MetricFamily("workers", "gauge", "Workers that are alive."),
    MetricFamily("worker_starts", "counter", "Workers started, including those that died."),
    MetricFamily(
        "start_time_seconds", "gauge", "When the first worker started, in Unix time.", (), "min"
    ),
    MetricFamily("build_info", "gauge", "The version of Ratekeeper.", ("version",), "max"),
)
BY_NAME: Final = {family.name: family for family in FAMILIES}
# The only gauge that stays valid after the process has ended.
_FIRST_START: Final = "start_time_seconds"

Values = dict[str, float]
Row = tuple[int, ...]
_MERGES: Final[dict[Merge, Callable[[float, float], float]]] = {"sum": add, "max": max, "min": min}


class Counters:
    """The counts that one process of the service makes while it answers requests."""

    __slots__ = (
        *("checks", "decision_seconds", "degraded_checks"),
        *("grpc_requests", "grpc_resets", "requests"),
        *("quota_assignments", "quota_blankets", "quota_buckets", "quota_reports", "quota_streams"),
        "store_errors",
    )

    def __init__(self) -> None:
        self.checks: dict[str, int] = {}
        """Checks by limits that came with the call, by outcome. The limiter counts all others."""
        self.degraded_checks = 0
        """The checks in `checks` that the store did not decide."""
        self.store_errors: dict[str, int] = {}
        """Such checks by kind of error: timeout, unavailable or full."""
        self.requests: dict[tuple[str, int], int] = {}
        """By route and status."""
        self.grpc_requests: dict[str, int] = {}
        """By the name of the status code."""
        self.grpc_resets: dict[str, int] = {}
        """By reason."""
        self.decision_seconds = Histogram()
        self.quota_streams = 0
        """Envoys that are connected for quotas."""
        self.quota_buckets = 0
        """Their buckets."""
        self.quota_reports = 0
        self.quota_assignments: dict[str, int] = {}
        """By kind."""
        self.quota_blankets: dict[str, int] = {}
        """By reason."""

    def note_check(self, result: CheckResult) -> None:
        """Count a check by limits that came with the call."""
        outcome: str = result.kind
        if outcome == "limited":
            outcome = "allowed" if result.decision.allowed else "denied"
        self.checks[outcome] = self.checks.get(outcome, 0) + 1
        self.degraded_checks += result.decision.degraded

    def snapshot(self) -> MetricsSnapshot:
        """Return the present counts."""
        found = MetricsSnapshot()
        for outcome, count in list(self.checks.items()):
            found.put("checks", count, outcome)
        found.put("degraded_checks", self.degraded_checks)
        for kind, count in list(self.store_errors.items()):
            found.put("store_errors", count, kind)
        for (route, status), count in list(self.requests.items()):
            found.put("requests", count, route, str(status))
        for code, count in list(self.grpc_requests.items()):
            found.put("grpc_requests", count, code)
        for reason, count in list(self.grpc_resets.items()):
            found.put("grpc_resets", count, reason)
        if self.quota_reports:
            found.put("envoy_quota_streams", self.quota_streams)
            found.put("envoy_quota_buckets", self.quota_buckets)
            found.put("envoy_quota_reports", self.quota_reports)
        for kind, count in list(self.quota_assignments.items()):
            found.put("envoy_quota_assignments", count, kind)
        for reason, count in list(self.quota_blankets.items()):
            found.put("envoy_quota_blankets", count, reason)
        found.histograms["decision_seconds"] = {"": self.decision_seconds.data()}
        return found


@dataclass(slots=True)
class MetricsSnapshot:
    """The counts of a process, by family and by label values."""

    values: dict[str, Values] = field(default_factory=dict)
    histograms: dict[str, dict[str, list[int]]] = field(default_factory=dict)

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
        for name, by_labels in other.histograms.items():
            sums = self.histograms.setdefault(name, {}) if name in BY_NAME else {}
            for labels, data in by_labels.items():
                if len(data) == LENGTH:
                    sums[labels] = added(sums.get(labels, [0] * LENGTH), data)

    def lasting(self) -> MetricsSnapshot:
        """Return the values that stay valid after the process has ended: counters and its start."""
        kept = {
            name: values
            for name, values in self.values.items()
            if name in BY_NAME and (BY_NAME[name].kind == "counter" or name == _FIRST_START)
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
        self.names: Mapping[str, str] = {}
        """The name under which a rule is reported, if it is not the rule's id."""
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
        """Return the rule's name if it is among the first RULES_MAX that were counted, else OTHERS.

        Where rules have longer names, OTHERS has as many parts as they have.
        """
        name = self.names.get(rule, rule)
        if name in self.totals or len(self.totals) < RULES_MAX:
            return name
        return OTHERS + JOIN * name.count(JOIN)


def put_store(
    found: MetricsSnapshot, stats: StoreStats | None, servers: Sequence[ServerStatus]
) -> None:
    """Add the values that only the store knows: its size, and the status of its servers."""
    if stats is not None:
        found.put("store_states", stats.states)
        found.put("store_states_max", stats.states_max)
        found.put("store_bytes", stats.bytes)
        found.put("store_log_bytes", stats.log_bytes)
        found.put("store_log_bytes_max", stats.log_bytes_max)
        if stats.lost_s is not None:
            found.put("store_kept_since_seconds", round(stats.lost_s, 3), FILE)
    for server in servers[:SERVERS_MAX]:
        if server.clock_offset_ns is not None:
            found.put("clock_offset_seconds", server.clock_offset_ns / 1e9, server.address)
        if server.evicted_keys is not None:
            found.put("store_keys_evicted", server.evicted_keys, server.address)
        if server.kept_since_s is not None:
            found.put("store_kept_since_seconds", server.kept_since_s, server.address)


# ── From a limiter ─────────────────────────────────────────────────────────────────────────────

# Each field of a rule's counts, with its family and the labels after the rule's.
_OF_RULES: Final = {
    "allowed": ("rule_decisions", "allowed", "store"),
    "denied": ("rule_decisions", "denied", "store"),
    "penalty_denied": ("rule_decisions", "denied", "penalty"),
    "shadow_denied": ("rule_decisions", "shadow_denied", "store"),
    "local_allowed": ("rule_decisions", "allowed", "local"),
    "local_denied": ("rule_decisions", "denied", "local"),
    "policy_allowed": ("rule_decisions", "allowed", "policy"),
    "policy_denied": ("rule_decisions", "denied", "policy"),
    "raised": ("rule_decisions", "failed", "policy"),
    "failed": ("rule_failures",),
    "cooldowns": ("penalties", "cooldown"),
    "blocks": ("penalties", "block"),
    "settled": ("settled_units",),
    "renewals_failed": ("renewals_failed",),
    "forgiven": ("forgiven_units",),
}
_ROW: Final[Callable[[Any], Row]] = attrgetter(*_OF_RULES)
_NOTHING: Final = [0] * len(_OF_RULES)
_DENIED: Final = list(_OF_RULES).index("denied")
# The endpoint label of rules that apply to every endpoint, and its longest value.
ANY_ENDPOINT: Final = "*"
ENDPOINT_LENGTH_MAX: Final = 200
_STATES: Final = {"closed": 0, "half_open": 1, "open": 2}
# The server label of a store that is a file.
FILE: Final = "(file)"


def rule_names(document: Any) -> dict[str, str]:
    """Return, for each rule of a document, its id, algorithms and endpoints, joined as labels."""
    found = {}
    for rule in document.rules:
        sets = document.limit_sets(rule)
        algorithms = algorithms_of(limit for each in sets for limit in each.limits)
        found[rule.id] = JOIN.join((rule.id, algorithms, endpoint_label(rule.match.endpoint)))
    return found


def endpoint_label(endpoints: Iterable[str]) -> str:
    """Return some endpoints as the value of a label."""
    endpoint = ", ".join(endpoints).replace(JOIN, " ") or ANY_ENDPOINT
    if len(endpoint) > ENDPOINT_LENGTH_MAX:
        endpoint = f"{endpoint[: ENDPOINT_LENGTH_MAX - 1]}…"
    return endpoint


def algorithms_of(limits: Iterable[Limit]) -> str:
    """Return the algorithms of some limits as the value of a label."""
    return "+".join(sorted({limit.algorithm for limit in limits}))


# The node's answers to checks, in the order of a row of RuleTotals.
_OUTCOMES: Final = ("allowed", "denied", "asked")
# Reasons and states are few and fixed; this holds if a later version has more.
REASONS_MAX: Final = 32


class FleetMetrics:
    """Reads the counts of a fleet: checks that this node answers itself, its reports, gossip."""

    def __init__(self, fleet: FleetMonitor) -> None:
        self._fleet = fleet
        self._answers = RuleTotals()

    def snapshot(self) -> MetricsSnapshot:
        """Return the present counts. Does no I/O."""
        found = MetricsSnapshot()
        self._of_answers(found)
        _put_table(found, self._fleet.table())
        _put_reports(found, self._fleet.reports())
        _put_nodes(found, self._fleet.nodes(), self._fleet.live_nodes())
        found.put("fleet_registered_nodes", self._fleet.registered_nodes())
        gossip = self._fleet.gossip()
        if gossip is not None:
            _put_gossip(found, gossip)
        return found

    def _of_answers(self, found: MetricsSnapshot) -> None:
        self._answers.update(
            {
                JOIN.join((rule or DEFAULT_NAME, kind)): (each.allowed, each.denied, each.asked)
                for (rule, kind), each in self._fleet.answers().items()
            }
        )
        for name, row in self._answers.totals.items():
            for outcome, count in zip(_OUTCOMES, row, strict=True):
                if count:
                    found.put("fleet_checks", count, name, outcome)


def _put_table(found: MetricsSnapshot, table: AllowanceStats) -> None:
    found.put("fleet_allowances", table.held)
    found.put("fleet_allowances_max", table.held_max)
    found.put("fleet_allowances_refused", table.refused)
    found.put("fleet_leased_units", table.leased_units)
    found.put("fleet_pending_units", table.pending_units)


def _put_reports(found: MetricsSnapshot, reports: ReportCounts) -> None:
    found.put("fleet_returned_units", reports.returned_units)
    found.put("fleet_charged_units", reports.charged_units)
    found.put("fleet_lost_units", reports.lost_units)
    found.put("fleet_reports", reports.reports, "answered")
    found.put("fleet_reports", reports.failed, "failed")
    found.put("fleet_divergence_units", reports.divergence_units)
    found.histograms["fleet_flush_seconds"] = {"": reports.flush_seconds.data()}


def _put_nodes(found: MetricsSnapshot, nodes: Sequence[FleetNode], live: int) -> None:
    found.put("fleet_live_nodes", live)
    for state in ("alive", "suspected", "dead"):
        found.put("fleet_nodes", sum(each.state == state for each in nodes), state)
    lags_s = [each.lag_s for each in nodes if each.state != "dead" and each.lag_s is not None]
    found.put("gossip_lag_seconds", round(max(lags_s, default=0.0), 3))


def _put_gossip(found: MetricsSnapshot, gossip: GossipCounts) -> None:
    found.put("gossip_messages", gossip.sent, "sent")
    found.put("gossip_messages", gossip.received, "received")
    found.put("gossip_bytes", gossip.sent_bytes, "sent")
    found.put("gossip_bytes", gossip.received_bytes, "received")
    for reason, count in list(gossip.dropped.items())[:REASONS_MAX]:
        found.put("gossip_drops", count, reason)
    found.histograms["gossip_hint_seconds"] = {"": list(gossip.hint_seconds)}


_LINKS: Final = {"up": 0, "down": 1, "refused": 2, "removed": 3}


def regions_snapshot(regions: RegionMonitor) -> MetricsSnapshot:
    """Return the counts of the regions in this process. Does no I/O.

    Only the leader of a region knows its links and its backlog.
    """
    found = MetricsSnapshot()
    region = regions.region
    here = regions.here()
    found.put("region_leader", int(here is not None), region)
    if here is not None:
        _put_region(found, here)
    seconds = found.histograms["region_sync_seconds"] = {}
    for peer, counts in list(regions.counts().items())[:REGIONS_MAX]:
        found.put("region_reports", counts.accepted, region, peer, "accepted")
        found.put("region_reports", counts.pending, region, peer, "pending")
        found.put("region_reports", counts.failed, region, peer, "failed")
        found.put("region_bytes", counts.sent_bytes, region, peer, "sent")
        found.put("region_bytes", counts.received_bytes, region, peer, "received")
        found.put("region_excess_units", counts.excess_units, region, peer)
        seconds[JOIN.join((region, peer))] = list(counts.seconds)
    return found


def _put_region(found: MetricsSnapshot, here: RegionStatus) -> None:
    found.put("region_share", round(float(here.share), 6), here.region)
    found.put("region_backlog", here.backlog, here.region)
    found.put("region_unaccepted_units", here.unaccepted_units, here.region)
    for link in here.links[:REGIONS_MAX]:
        labels = here.region, link.peer
        found.put("region_link_state", _LINKS[link.state], *labels)
        found.put("region_lag_seconds", round(link.lag_s, 3), *labels)


class LimiterMetrics:
    """Reads the counts of one limiter and its store."""

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._fleet: FleetMetrics | None = None
        self._totals = RuleTotals()
        self._document: Any = None
        # Cache hits by rule at the previous snapshot; by name, denials then, and from the cache.
        self._hits: Mapping[str, int] = {}
        self._denied: dict[str, int] = {}
        self._cached: dict[str, int] = {}

    def snapshot(self) -> MetricsSnapshot:
        """Return all counts of the limiter and its store that need no I/O."""
        found = self.limiter_snapshot()
        shared = shared_store(self._limiter.store)
        found.add(store_snapshot(None if shared is None else shared.monitor))
        fleet = self._limiter.fleet
        if fleet is not None:
            self._fleet = self._fleet or FleetMetrics(fleet)
            found.add(self._fleet.snapshot())
        regions = self._limiter.regions
        if regions is not None:
            found.add(regions_snapshot(regions))
        return found

    def limiter_snapshot(self) -> MetricsSnapshot:
        """Return the counts of the limiter alone; several limiters may share a store."""
        found = MetricsSnapshot()
        self._of_checks(found)
        if self._limiter.has_rules:
            self._name_rules()
            rates = self.subject_rates().values()
            found.put("busiest_subject_rate", round(max(rates, default=0.0), 1))
            self._rules_status(found)
            self._loads(found)
        else:
            self._name_limits()
        self._of_rules(found, self._limiter.counts())
        return found

    def subject_rates(self) -> dict[str, float]:
        """Return the checks per second of the busiest subjects in this process, by digest."""
        rates = self._limiter.tally().subjects.rates(monotonic())
        return {
            blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(): rate
            for subject, rate in rates.items()
        }

    def _name_rules(self) -> None:
        document = self._limiter.compiled_rules.document
        if document is not self._document:
            self._document = document
            self._totals.names = rule_names(document)

    def _name_limits(self) -> None:
        """Report a limiter without rules as one rule with its name."""
        limiter = self._limiter
        name = limiter.name or DEFAULT_NAME
        labels = JOIN.join((name, algorithms_of(limiter.limits), limiter.endpoint))
        # The store knows a limiter without a name as "".
        self._totals.names = {name: labels, limiter.name: labels}

    def _of_rules(self, found: MetricsSnapshot, counts: Mapping[str, Any]) -> None:
        totals = self._totals
        totals.update({rule: _ROW(counted) for rule, counted in counts.items()})
        columns = [
            (family, found.values.setdefault(family, {}), JOIN.join(("", *labels)))
            for family, *labels in _OF_RULES.values()
        ]
        for name, total in totals.totals.items():
            rule = name.partition(JOIN)[0]
            for (family, values, labels), count in zip(columns, total, strict=True):
                if count and family == "rule_decisions":
                    values[name + labels] = count
                elif count:  # a rule that changed its algorithm has two names
                    values[rule + labels] = values.get(rule + labels, 0) + count
        self._from_cache(found)

    def _from_cache(self, found: MetricsSnapshot) -> None:
        """Split denials into those from the denial cache and those from the store.

        Not every cache hit is a denial of the rule: the rule may be in shadow mode, or another rule
        of the request may have denied. So of the new hits, no more count than new denials.
        """
        shared = shared_store(self._limiter.store)
        hits_by_rule = {} if shared is None else dict(shared.monitor.denied_by_rule())
        new_hits = dict.fromkeys(self._cached, 0)
        for rule, hits in hits_by_rule.items():
            name = self._totals.name(rule)
            new_hits[name] = new_hits.get(name, 0) + hits - self._hits.get(rule, 0)
        self._hits = hits_by_rule
        for name, hits in new_hits.items():
            denied = self._totals.totals.get(name, _NOTHING)[_DENIED]
            new_denied = denied - self._denied.get(name, 0)
            from_cache = self._cached.get(name, 0) + max(min(hits, new_denied), 0)
            self._cached[name] = from_cache
            if from_cache:
                found.put("rule_decisions", denied - from_cache, name, "denied", "store")
                found.put("rule_decisions", from_cache, name, "denied", "denied_cache")
        # Of all names: the first hits of a rule must not count its earlier denials as new.
        self._denied = {name: total[_DENIED] for name, total in self._totals.totals.items()}

    def _of_checks(self, found: MetricsSnapshot) -> None:
        tally = self._limiter.tally()
        for outcome, count in {
            "allowed": tally.allowed,
            "denied": tally.denied,
            "unavailable": tally.unavailable,
            "failed": tally.raised,
            **tally.unruled,
        }.items():
            found.put("checks", count, outcome)
        found.put("degraded_checks", tally.degraded)
        for rule, requests in tally.slots.by_rule().items():
            found.put("in_flight", requests, rule or self._limiter.name or DEFAULT_NAME)
        for kind in ("timeout", "unavailable", "full"):
            found.put("store_errors", tally.errors.get(kind, 0), kind)

    def _rules_status(self, found: MetricsSnapshot) -> None:
        status = self._limiter.rules_status()
        found.put("rules_info", 1, status.version)
        if status.age is not None:
            found.put("rules_age_seconds", round(status.age, 3))
        found.put("rules_failing", int(bool(status.error)))
        found.put("rules_load_errors", status.failures)

    def _loads(self, found: MetricsSnapshot) -> None:
        """Read the factors; those of the rules after the first RULES_MAX share the lowest one."""
        others = 1.0
        for number, (rule, factor) in enumerate(self._limiter.factors().items()):
            if number < RULES_MAX:
                found.put("load_factor", factor, rule)
            else:
                others = min(others, factor)
                found.put("load_factor", others, OTHERS)
        for source, (_, age_s) in self._limiter.loads.all().items():
            if age_s is not None:
                found.put("load_age_seconds", round(age_s, 3), source)


def lost_snapshot() -> MetricsSnapshot:
    """Return what the decider of this process has counted as lost, in all limiters."""
    found = MetricsSnapshot()
    found.put("lost_charges", lost.unknown, "unknown")
    found.put("lost_charges", lost.returns, "return")
    return found


def waiting_snapshot(queues: Any) -> MetricsSnapshot:
    """Return how many requests wait on one store."""
    found, now = MetricsSnapshot(), queues.stats()
    found.put("waiting_requests", now.waiters)
    found.put("waiting_longest", now.longest)
    return found


def store_snapshot(monitor: StoreMonitor | None) -> MetricsSnapshot:
    """Return the counts of a remote store; other stores have no monitor and count nothing."""
    found = MetricsSnapshot()
    counters = {} if monitor is None else monitor.counters()
    found.put("denied_cache_hits", counters.get("denied_cache_hits", 0))
    found.put("coalesced_checks", counters.get("coalesced_checks", 0))
    for breaker in [] if monitor is None else list(monitor.breakers())[:SERVERS_MAX]:
        server = str(breaker.address)
        found.put("breaker_state", _STATES[breaker.state], server)
        found.put("breaker_opened", breaker.opened_times, server)
        found.put("server_failures", breaker.failed_calls, server)
    latencies = {} if monitor is None else dict(monitor.latencies())
    found.histograms["store_seconds"] = dict(list(latencies.items())[:SERVERS_MAX])
    return found


# ── From all limiters of a process ─────────────────────────────────────────────────────────────

# Every limiter of this process, by id. A limiter adds itself when it starts.
LIMITERS: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
# How many labels name the rule; those after them have few values.
_RULE_LABELS: Final = {
    "rule_decisions": 3,
    "rule_failures": 1,
    "penalties": 1,
    "settled_units": 1,
    "in_flight": 1,
    "renewals_failed": 1,
    "forgiven_units": 1,
    "load_factor": 1,
    "fleet_checks": 2,
}


_Read = Callable[[], MetricsSnapshot]


class ProcessMetrics:
    """Reads the counts of all limiters of this process and of their stores, as one.

    The last known counts of a limiter or a store that was deleted are kept, so that no counter
    goes down. Of all limiters together, at most RULES_MAX are reported by name.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._sources: dict[tuple[str, int], _Source] = {}
        self._deleted = MetricsSnapshot()
        self._names: dict[str, set[str]] = {}

    def snapshot(self) -> MetricsSnapshot:
        """Return the present counts."""
        with self._lock:
            limiters = [each for found in LIMITERS.valuerefs() if (each := found()) is not None]
            for key in [key for key, source in self._sources.items() if source.of() is None]:
                self._deleted.add(self._sources.pop(key).last.lasting())
            for limiter in limiters:
                shared = shared_store(limiter.store)
                monitor = None if shared is None else shared.monitor
                self._note("limiter", limiter, lambda it: LimiterMetrics(it).limiter_snapshot)
                self._note("monitor", monitor, lambda it: partial(store_snapshot, it))
                self._note("fleet", limiter.fleet, lambda it: FleetMetrics(it).snapshot)
                self._note("waiting", limiter.queues, lambda it: partial(waiting_snapshot, it))
                self._note("regions", limiter.regions, lambda it: partial(regions_snapshot, it))
            total = MetricsSnapshot()
            total.add(self._deleted)
            total.add(lost_snapshot())
            for source in self._sources.values():
                total.add(source.snapshot())
            return self._bounded(total)

    def _note(self, kind: str, of: Any, reader: Callable[[Any], _Read]) -> None:
        """Read an object from now on, unless it is None. A store may be several kinds in one."""
        if of is not None and (kind, id(of)) not in self._sources:
            self._sources[kind, id(of)] = _Source(ref(of), reader(proxy(of)))

    def _bounded(self, total: MetricsSnapshot) -> MetricsSnapshot:
        for family, length in _RULE_LABELS.items():
            known = self._names.setdefault(family, set())
            values: Values = {}
            for labels, value in total.values.get(family, {}).items():
                parts = labels.split(JOIN)
                name = JOIN.join(parts[:length])
                if name not in known and len(known) >= RULES_MAX:
                    parts[:length] = [OTHERS] + [""] * (length - 1)
                else:
                    known.add(name)
                bounded = JOIN.join(parts)
                merge = _MERGES[BY_NAME[family].merge]
                values[bounded] = merge(values[bounded], value) if bounded in values else value
            total.values[family] = values
        return total


@dataclass(slots=True)
class _Source:
    """A limiter or a store, and its last known counts."""

    of: ReferenceType[Any]
    read: _Read
    last: MetricsSnapshot = field(default_factory=MetricsSnapshot)

    def snapshot(self) -> MetricsSnapshot:
        """Read the counts, unless the object has just been deleted or its store is closed."""
        alive = self.of()
        if alive is not None:
            try:
                self.last = self.read()
            except StoreUnavailable:
                self.last = self.last.lasting()
        return self.last
