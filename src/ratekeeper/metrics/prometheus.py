"""Prometheus: the counts of all limiters of an application, by `prometheus_client`.

    register()

One process reads the counts when it is scraped. With several workers, a scrape reaches one of them
and must report all. `prometheus_client` has a multi-process mode for this: each worker writes its
values to files in PROMETHEUS_MULTIPROC_DIR, and its `MultiProcessCollector` adds them up. In this
mode a thread of each worker writes the counters once a second, and once more when the worker exits.
A worker that is killed loses at most a second of its counts. Files keep the counters of workers
that have ended. Gauges and histograms are not written.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable
from typing import Final

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.core.histogram import LENGTH, cumulative
from ratekeeper.metrics.counters import (
    FAMILIES,
    JOIN,
    MetricFamily,
    MetricsSnapshot,
    ProcessMetrics,
    Values,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        f"prometheus_client is not installed: pip install 'ratekeeper[prometheus]' ({error})"
    ) from error

FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
WRITE_SECONDS: Final = 1.0
_writer: _Writer | None = None
_starting: Final = threading.Lock()

log = logging.getLogger("ratekeeper")


def register(registry: CollectorRegistry = REGISTRY) -> None:
    """Report the counts of all limiters of this process, present and future, to a registry.

    Those of web integrations and of their routes are among them. Raises ValueError if they are
    already registered. In multi-process mode the counts go to its files instead, once for each
    process however often this is called, and `MultiProcessCollector` reports them.
    """
    global _writer  # noqa: PLW0603 - one for each process, because they share its files
    if FOLDER not in os.environ:
        registry.register(_LimiterCollector())
        return
    with _starting:
        if _writer is None:
            _writer = _Writer()


class _LimiterCollector(Collector):
    """Reads the counts when the registry is scraped."""

    def __init__(self) -> None:
        self._metrics = ProcessMetrics()

    def collect(self) -> Iterable[Metric]:
        found = self._metrics.snapshot()
        for family in FAMILIES:
            if family.name in found.values or family.name in found.histograms:
                yield metric_of(family, found)

    def describe(self) -> Iterable[Metric]:
        """Return the names, by which the registry finds duplicates."""
        return [metric_of(family, MetricsSnapshot()) for family in FAMILIES]


class _Writer:
    """Writes the counters of this process to the files of the multi-process mode."""

    def __init__(self) -> None:
        # No fork happens during a write: the child would inherit locks that no thread releases.
        self._lock = fork_safe(threading.Lock())
        self._reading = ProcessMetrics()
        self._written: dict[str, Values] = {}
        self._counters = {
            family.name: Counter(
                f"ratekeeper_{family.name}", family.help, family.labels, registry=None
            )
            for family in FAMILIES
            if family.kind == "counter"
        }
        after_fork(self._start_in_child)
        atexit.register(self.write)
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._keep_writing, name="ratekeeper-metrics", daemon=True).start()

    def _start_in_child(self) -> None:
        """Continue in a forked process. The parent writes the counts from before the fork."""
        self._written = self._reading.snapshot().values
        self._start()

    def _keep_writing(self) -> None:
        pause, failing = threading.Event(), False
        while not pause.wait(WRITE_SECONDS):
            try:
                self.write()
                failing = False
            except OSError as error:
                if not failing:  # logged once, and not every second
                    log.warning("metrics: the counters cannot be written: %s", error.strerror)
                failing = True

    def write(self) -> None:
        """Add the counts since the last write."""
        with self._lock:
            now = self._reading.snapshot().values
            for name, counter in self._counters.items():
                written = self._written.setdefault(name, {})
                for labels, value in now.get(name, {}).items():
                    new = value - written.get(labels, 0)
                    if new > 0:
                        (counter.labels(*labels.split(JOIN)) if labels else counter).inc(new)
                        written[labels] = value


def metric_of(family: MetricFamily, total: MetricsSnapshot) -> Metric:
    """Return the values of a family in the form that a registry takes."""
    name = f"ratekeeper_{family.name}"
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
        by_labels = total.histograms.get(family.name, {})
        if not family.labels:
            by_labels = by_labels or {"": [0] * LENGTH}
        for labels, data in sorted(by_labels.items()):
            ranges = [(_bound(upper), float(count)) for upper, count in cumulative(data)]
            histogram.add_metric(
                labels.split(JOIN) if family.labels else [], ranges, data[-1] / 1e9
            )
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: CounterMetricFamily | GaugeMetricFamily = kind(name, family.help, labels=family.labels)
    values = total.values.get(family.name, {})
    if family.kind == "counter" and not family.labels:
        values = values or {"": 0}
    for labels, value in sorted(values.items()):
        metric.add_metric(labels.split(JOIN) if family.labels else [], value)
    return metric


def _bound(upper_s: float) -> str:
    return "+Inf" if upper_s == float("inf") else f"{upper_s:g}"
