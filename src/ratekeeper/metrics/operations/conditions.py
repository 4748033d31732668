"""The conditions of the alerts, evaluated by a node on its own counters.

An operator without Prometheus sees the same alerts in the admin API. `alerts.yaml` has the texts,
severities and durations, and the condition of each alert as an expression for Prometheus. Here each
condition is a function of the counters of one node in the last 15 minutes (Window), with the same
thresholds. The tests of the alerts (`alerts_test.yaml`) run against both, so the two cannot differ.
NOT_EVALUATED names the alerts that one node cannot evaluate, and why.

**Time.** An alert is active when its condition has held for as long as `for` in `alerts.yaml` says.
So each evaluation keeps since when each condition has held (Held), as Prometheus does. The times
are on a clock that does not step.

**Windows.** As in Prometheus, a rate over five minutes is the increase in that time divided by five
minutes, also if the service has run for less. A counter that is new in the window has started from
zero, except for the counters of servers, which are older than the service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ratekeeper.core.histogram import quantile
from ratekeeper.metrics.counters import JOIN, MetricsSnapshot, Values
from ratekeeper.metrics.operations import DEFAULTS

HISTORY_SECONDS: Final = 900.0

# The families that the conditions read; a sample has no others.
_VALUES: Final = (
    *("checks", "degraded_checks", "store_errors", "records_dropped", "busiest_subject_rate"),
    *("worker_starts", "start_time_seconds", "rules_age_seconds", "rules_failing"),
    *("breaker_state", "clock_offset_seconds", "store_keys_evicted", "store_kept_since_seconds"),
    *("store_states", "store_states_max", "store_log_bytes", "store_log_bytes_max"),
    *("fleet_pending_units", "fleet_reports", "fleet_allowances_refused"),
    *("fleet_live_nodes", "fleet_registered_nodes"),
    *("gossip_lag_seconds", "gossip_drops"),
    *("region_link_state", "region_lag_seconds"),
    *("region_clock_offset_seconds", "region_excess_units"),
)
_HISTOGRAMS: Final = ("decision_seconds", "store_seconds")
_MINUTE: Final = 60.0


# ── Samples ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Held:
    """A condition that holds, for one set of labels."""

    alert: str
    labels: str
    """The values of the labels that the condition names, joined."""
    value: float
    since_s: float
    """Since when it has held, on the clock of the samples."""


@dataclass(slots=True)
class Sample:
    """The counters of a node at one moment, and the conditions that hold then."""

    at_s: float
    """On a clock that does not step."""
    unix_s: float
    counted: MetricsSnapshot
    held: list[Held] = field(default_factory=list)


def sample_of(counted: MetricsSnapshot, at_s: float, unix_s: float) -> Sample:
    """Return the counters that the conditions read."""
    values, histograms = counted.values, counted.histograms
    return Sample(
        at_s,
        unix_s,
        MetricsSnapshot(
            {name: values[name] for name in _VALUES if name in values},
            {name: histograms[name] for name in _HISTOGRAMS if name in histograms},
        ),
    )


class Window:
    """The samples of a node, as the conditions read them. The newest is now."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """`samples` has at least one, oldest first."""
        self._samples = samples
        self.now = samples[-1]

    def latest(self, family: str) -> Values:
        """Return the newest values, by labels."""
        return self.now.counted.values.get(family, {})

    def gauge(self, family: str) -> float | None:
        """Return the newest value of a family without labels; None if there is none."""
        return self.latest(family).get("")

    def least(self, family: str, seconds: float) -> float:
        """Return the lowest value of a family without labels; 0 if a sample has none."""
        return min(each.counted.values.get(family, {}).get("", 0) for each in self._since(seconds))

    def first(self, family: str) -> Values:
        """Return the oldest values; empty if there are none."""
        found = (values for each in self._samples if (values := each.counted.values.get(family)))
        return next(found, {})

    def increase(self, family: str, seconds: float) -> dict[str, float]:
        """Return how much each counter has grown; one that is new has grown from zero."""
        before = self._since(seconds)[0].counted.values.get(family, {})
        return {
            labels: _grown(value, before.get(labels, 0))
            for labels, value in self.latest(family).items()
        }

    def increase_of_known(self, family: str, seconds: float) -> dict[str, float]:
        """Return the same, but a counter that is new has not grown."""
        samples = self._since(seconds)
        found = {}
        for labels, value in self.latest(family).items():
            known = (each.counted.values.get(family, {}).get(labels) for each in samples)
            found[labels] = _grown(value, next(each for each in known if each is not None))
        return found

    def p99_ms(self, family: str, seconds: float) -> dict[str, float]:
        """Return the milliseconds that 99 of 100 durations did not exceed."""
        before = self._since(seconds)[0].counted.histograms.get(family, {})
        found = {}
        for labels, data in self.now.counted.histograms.get(family, {}).items():
            old = before.get(labels, [0] * len(data))
            p99_s = quantile([max(a - b, 0) for a, b in zip(data, old, strict=True)], 0.99)
            if p99_s is not None:
                found[labels] = p99_s * 1_000
        return found

    def _since(self, seconds: float) -> Sequence[Sample]:
        begin_s = self.now.at_s - seconds
        place = next(at for at, each in enumerate(self._samples) if each.at_s >= begin_s)
        return self._samples[place:]


def _grown(after: float, before: float) -> float:
    # A counter that is lower than before has started again from zero.
    return after - before if after >= before else after


# ── Conditions ─────────────────────────────────────────────────────────────────────────────────

Thresholds = Mapping[str, float]
Found = dict[str, float]
"""The value of a condition that holds, by the values of its labels."""


class Condition(NamedTuple):
    """When an alert fires on one node."""

    alert: str
    labels: tuple[str, ...]
    """The names of the labels, beside the node's."""
    found: Callable[[Window, Thresholds], Found]


def _above(values: Mapping[str, float], threshold: float) -> Found:
    return {labels: value for labels, value in values.items() if value > threshold}


def _if(value: float | None, holds: bool) -> Found:
    return {"": value} if value is not None and holds else {}


def _denied_per_second(window: Window) -> float:
    return window.increase("checks", 5 * _MINUTE).get("denied", 0) / (5 * _MINUTE)


def _rejection_rate(window: Window, limits: Thresholds) -> Found:
    denied = _denied_per_second(window)
    allowed = window.increase("checks", 5 * _MINUTE).get("allowed", 0) / (5 * _MINUTE)
    return _if(denied, denied > limits["rejections"] * (allowed + denied) and denied > 1)


def _violations(window: Window, limits: Thresholds) -> Found:
    return _above({"": 60 * _denied_per_second(window)}, limits["violations"])


def _busiest_subject(window: Window, limits: Thresholds) -> Found:
    return _above(window.latest("busiest_subject_rate"), limits["subject_rate"])


def _store_latency(window: Window, limits: Thresholds) -> Found:
    return _above(window.p99_ms("store_seconds", 5 * _MINUTE), 1_000 * limits["store_p99"])


def _decision_latency(window: Window, limits: Thresholds) -> Found:
    return _above(window.p99_ms("decision_seconds", 5 * _MINUTE), 1_000 * limits["decision_p99"])


def _degraded(window: Window, _: Thresholds) -> Found:
    increase = window.increase("degraded_checks", _MINUTE)
    return _above({labels: each / _MINUTE for labels, each in increase.items()}, 0)


def _breakers(window: Window, _: Thresholds) -> Found:
    return _above(window.latest("breaker_state"), 0)


def _rules_stale(window: Window, limits: Thresholds) -> Found:
    return _above(window.latest("rules_age_seconds"), limits["rules_age"]) or _above(
        window.latest("rules_failing"), 0
    )


def _records_dropped(window: Window, _: Thresholds) -> Found:
    return _above(window.increase("records_dropped", 10 * _MINUTE), 0)


def _workers_restarting(window: Window, limits: Thresholds) -> Found:
    started_s = window.gauge("start_time_seconds")
    if started_s is None or window.now.unix_s - started_s <= 15 * _MINUTE:
        return {}
    return _above(window.increase("worker_starts", 15 * _MINUTE), limits["restarts"])


def _store_full(window: Window, limits: Thresholds) -> Found:
    return _share(window, "store_states", "store_states_max", limits["store_fullness"])


def _logs_full(window: Window, limits: Thresholds) -> Found:
    return _share(window, "store_log_bytes", "store_log_bytes_max", limits["log_fullness"])


def _share(window: Window, used: str, most: str, threshold: float) -> Found:
    part, whole = window.gauge(used), window.gauge(most)
    return _above({"": part / whole}, threshold) if part is not None and whole else {}


def _store_errors(window: Window, limits: Thresholds) -> Found:
    seconds = 5 * _MINUTE
    checks = sum(window.increase("checks", seconds).values()) / seconds
    errors = window.increase("store_errors", seconds)
    rates = {kind: each / seconds for kind, each in errors.items()}
    return _above(rates, limits["store_errors"] * checks)


def _clock_drift(window: Window, limits: Thresholds) -> Found:
    return _above(_absolute(window.latest("clock_offset_seconds")), limits["clock_offset"])


def _absolute(values: Mapping[str, float]) -> Found:
    return {labels: abs(value) for labels, value in values.items()}


def _keys_lost(window: Window, _: Thresholds) -> Found:
    before = window.first("store_kept_since_seconds")
    latest = window.latest("store_kept_since_seconds")
    return _above(latest, max(before.values())) if before else {}


def _keys_evicted(window: Window, _: Thresholds) -> Found:
    return _above(window.increase_of_known("store_keys_evicted", 15 * _MINUTE), 0)


def _pending_charges(window: Window, _: Thresholds) -> Found:
    least = window.least("fleet_pending_units", 2 * _MINUTE)
    answered = window.increase("fleet_reports", 2 * _MINUTE).get("answered", 0)
    return _if(least, least > 0 and not answered)


def _partitioned(window: Window, _: Thresholds) -> Found:
    live, registered = window.gauge("fleet_live_nodes"), window.gauge("fleet_registered_nodes")
    return _above({"": registered - live}, 0) if live is not None and registered else {}


def _gossip_lag(window: Window, limits: Thresholds) -> Found:
    return _above(window.latest("gossip_lag_seconds"), limits["gossip_lag"])


def _gossip_forged(window: Window, _: Thresholds) -> Found:
    return _above({"": window.increase("gossip_drops", 10 * _MINUTE).get("forged", 0)}, 0)


def _allowances_refused(window: Window, _: Thresholds) -> Found:
    return _above(window.increase_of_known("fleet_allowances_refused", 10 * _MINUTE), 0)


def _links_in(state: int) -> Callable[[Window, Thresholds], Found]:
    def found(window: Window, _: Thresholds) -> Found:
        links = window.latest("region_link_state")
        return {labels: value for labels, value in links.items() if value == state}

    return found


def _region_lag(window: Window, limits: Thresholds) -> Found:
    states = window.latest("region_link_state")
    late = _above(window.latest("region_lag_seconds"), limits["region_lag"])
    return {labels: value for labels, value in late.items() if not states.get(labels, 0)}


def _region_excess(window: Window, limits: Thresholds) -> Found:
    """Return the highest excess of a region: all its peers count the same subjects."""
    found: Found = {}
    for labels, units in window.increase("region_excess_units", 10 * _MINUTE).items():
        region = labels.partition(JOIN)[0]
        found[region] = max(found.get(region, 0), units)
    return _above(found, limits["region_excess"])


def _region_clocks(window: Window, limits: Thresholds) -> Found:
    return _above(_absolute(window.latest("region_clock_offset_seconds")), limits["region_clock"])


_LINK: Final = ("region", "peer")
CONDITIONS: Final = (
    Condition("RatekeeperRejectionRateHigh", (), _rejection_rate),
    Condition("RatekeeperViolationsHigh", (), _violations),
    Condition("RatekeeperSubjectGoneWild", (), _busiest_subject),
    Condition("RatekeeperStoreLatencyHigh", ("server",), _store_latency),
    Condition("RatekeeperDecisionLatencyHigh", (), _decision_latency),
    Condition("RatekeeperDegraded", (), _degraded),
    Condition("RatekeeperBreakerOpen", ("server",), _breakers),
    Condition("RatekeeperRulesStale", (), _rules_stale),
    Condition("RatekeeperRecordsDropped", (), _records_dropped),
    Condition("RatekeeperWorkersRestarting", (), _workers_restarting),
    Condition("RatekeeperStoreNearlyFull", (), _store_full),
    Condition("RatekeeperLogsNearlyFull", (), _logs_full),
    Condition("RatekeeperStoreErrors", ("kind",), _store_errors),
    Condition("RatekeeperClockDrift", ("server",), _clock_drift),
    Condition("RatekeeperKeysLost", ("server",), _keys_lost),
    Condition("RatekeeperKeysEvicted", ("server",), _keys_evicted),
    Condition("RatekeeperPendingChargesStuck", (), _pending_charges),
    Condition("RatekeeperFleetPartitioned", (), _partitioned),
    Condition("RatekeeperGossipLagging", (), _gossip_lag),
    Condition("RatekeeperGossipForged", (), _gossip_forged),
    Condition("RatekeeperAllowancesRefused", (), _allowances_refused),
    Condition("RatekeeperRegionLinkDown", _LINK, _links_in(1)),
    Condition("RatekeeperRegionLinkRefused", _LINK, _links_in(2)),
    Condition("RatekeeperRegionLagging", _LINK, _region_lag),
    Condition("RatekeeperRegionExcess", ("region",), _region_excess),
    Condition("RatekeeperRegionClocks", _LINK, _region_clocks),
)
LABELS: Final = {each.alert: each.labels for each in CONDITIONS}
NOT_EVALUATED: Final[Mapping[str, str]] = {
    "RatekeeperRuleGoneWild": (
        "it compares a rule with the hour before, and a node keeps 15 minutes; the overview shows "
        "the denials of each rule"
    ),
    "RatekeeperHitRateLow": (
        "it needs the counts of 25 minutes, and a node keeps 15; `GET /v1/admin/fleet` has the "
        "share of each rule since the service started"
    ),
    "RatekeeperRegionWithoutLeader": (
        "the leader may be a process of another node; `GET /v1/admin/regions` names the leader of "
        "each region"
    ),
}


def evaluate(
    samples: Sequence[Sample], before: Sequence[Held], thresholds: Thresholds = DEFAULTS
) -> list[Held]:
    """Return the conditions that hold at the newest sample.

    `before` is the result at the previous sample: a condition that held has its time from there.
    """
    window = Window(samples)
    since_s = {(each.alert, each.labels): each.since_s for each in before}
    return [
        Held(each.alert, labels, value, since_s.get((each.alert, labels), window.now.at_s))
        for each in CONDITIONS
        for labels, value in each.found(window, thresholds).items()
    ]


def rendered(text: str, labels: Mapping[str, str], value: float) -> str:
    """Return a text of `alerts.yaml` with its labels and its value.

    >>> rendered('{{ $labels.server }} takes {{ $value | printf "%.1f" }} ms', {"server": "h:1"}, 2)
    'h:1 takes 2.0 ms'
    """
    found = _LABEL.sub(lambda name: labels.get(name[1], ""), text)
    return _VALUE.sub(lambda form: form[1] % value, found)


_LABEL: Final = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_VALUE: Final = re.compile(r'\{\{ \$value \| printf "(%\.\df)" \}\}')
