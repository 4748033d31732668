"""GET /metrics: what all workers of this service have counted, for Prometheus.

A scrape reaches one worker, and must tell of all. Each worker therefore leaves its counts in a file
once a second, in a folder of this run of the service, and whoever is scraped adds them up. Before
it answers, it leaves its own: what was told once is then on file, and a worker that is killed the
moment after takes nothing along. What a worker had counted that has died is added to a file of its
own when the next one starts, under a lock that those who add up respect. So no counter goes down.

What the store holds is asked in a thread, at most every STATS_SECONDS: for a store in Redis it
takes many trips. A scrape waits for it a moment, and a check never.

Everything that is told is in `metrics/counters.py`, with its labels and their bounds.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tollkeeper.core.errors import StoreError
from tollkeeper.core.version import __version__
from tollkeeper.decide.store import StoreStats
from tollkeeper.metrics.counters import FAMILIES, JOIN, Family, Reading, Snapshot
from tollkeeper.metrics.histograms import LENGTH, cumulative
from tollkeeper.service.http.node import Node

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
WRITE_SECONDS: Final = 1.0
# Of a worker's time, what it may take at most to leave them.
WRITE_SHARE_MAX: Final = 0.01
STATS_SECONDS: Final = 15.0
# How long a scrape waits for what the store holds; then it tells what was known before.
STATS_WAIT_SECONDS: Final = 1.0
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_GONE: Final = "gone.json"
_LOCK: Final = "lock"

log = logging.getLogger("tollkeeper.service")


@dataclass(slots=True)
class Left:
    """What one worker has counted, as it is written; or, of those that are gone, all of them."""

    counted: Snapshot = field(default_factory=Snapshot)
    folded: list[int] = field(default_factory=list)
    """Of the gone: whose files are in it already, and only still to be removed."""


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Left).decode


class Metrics:
    """The counters of this worker, and the sum of all workers'."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reading = Reading(node.limiter)
        self._folder = node.settings.counters
        self._written = b""
        self._failing = False
        self._stats: StoreStats | None = None
        self._asked_s = -STATS_SECONDS
        self._asking: asyncio.Task[None] | None = None

    def snapshot(self) -> Snapshot:
        """Of this worker, now."""
        found = self._node.counters.snapshot()
        found.add(self._reading.snapshot())
        found.put("worker_starts", 1)
        found.put("start_time_seconds", self._node.started_ns / 1e9)
        found.put("build_info", 1, __version__)
        found.put("records_dropped", _dropped(self._node))
        return found

    async def keep_writing(self) -> None:
        """Leave the counts for the others, once a second, until cancelled.

        With ten thousand rules that are all busy it takes some 20 ms, and is done less often.
        """
        while self._folder is not None:
            began_s = time.monotonic()
            self.write()
            taken_s = time.monotonic() - began_s
            await asyncio.sleep(max(WRITE_SECONDS, taken_s / WRITE_SHARE_MAX))

    def write(self) -> None:
        """Leave the counts for the others, if they have changed. A full disk is only told of."""
        if self._folder is None:
            return
        text = _encode(Left(self.snapshot()))
        path = self._folder / f"{os.getpid()}.json"
        try:
            if text != self._written or not path.exists():
                _replace(path, text)
                self._written = text
        except OSError as error:
            if not self._failing:  # said once, and not every second
                log.warning(
                    "metrics: the counts are not written for the others: %s", error.strerror
                )
            self._failing = True
        else:
            self._failing = False

    def total(self) -> Snapshot:
        """Of all workers of this service."""
        own = os.getpid()
        with _locked(self._folder, fcntl.LOCK_SH):
            self.write()
            total = self.snapshot()
            gone = Left() if self._folder is None else _read(self._folder / _GONE) or Left()
            total.add(gone.counted)
            for path in _workers(self._folder):
                number = int(path.stem)
                if number != own and number not in gone.folded and (found := _read(path)):
                    total.add(found.counted if _is_alive(path) else found.counted.lasting())
        total.put("workers", self.workers())
        return total

    def workers(self) -> int:
        """How many workers are alive."""
        return max(sum(_is_alive(path) for path in _workers(self._folder)), 1)

    async def scraped(self) -> bytes:
        """What Prometheus reads, with what the store holds."""
        if self._asking is None and time.monotonic() - self._asked_s >= STATS_SECONDS:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=STATS_WAIT_SECONDS)
        return self.text()

    async def _ask(self) -> None:
        self._asked_s = time.monotonic()
        try:
            self._stats = await asyncio.to_thread(self._node.limiter.stats)
        except StoreError:
            self._stats = None  # nobody knows; what was known is no longer true
        except Exception:
            log.exception("metrics: the store does not say what it holds")
        finally:
            self._asking = None

    def text(self) -> bytes:
        """What Prometheus reads."""
        total = self.total()
        if self._stats is not None:
            total.put("store_states", self._stats.states)
            total.put("store_states_max", self._stats.states_max)
            total.put("store_bytes", self._stats.bytes)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(_metric(family, total) for family in FAMILIES))
        text: bytes = generate_latest(registry)
        return text


def _dropped(node: Node) -> int:
    """What whoever keeps records had no room for; a node need not keep any."""
    dropped = getattr(getattr(node, "recorder", None), "dropped", 0)
    return int(dropped() if callable(dropped) else dropped)


# ── As Prometheus reads it ─────────────────────────────────────────────────────────────────────


class _Collector(Collector):
    """What a registry asks, once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _metric(family: Family, total: Snapshot) -> Metric:
    name = f"tollkeeper_{family.name}"
    if family.kind == "histogram":
        data = total.histograms.get(family.name, [0] * LENGTH)
        ranges = [(_bound(upper), float(count)) for upper, count in cumulative(data)]
        return HistogramMetricFamily(name, family.help, buckets=ranges, sum_value=data[-1] / 1e9)
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


# ── The files ──────────────────────────────────────────────────────────────────────────────────


def fold_dead(folder: Path) -> None:
    """Add up what dead workers have left, and remove their files."""
    try:
        with _locked(folder, fcntl.LOCK_EX):
            gone = _read(folder / _GONE) or Left()
            # Of one who was killed in the middle of this.
            for number in gone.folded:
                (folder / f"{number}.json").unlink(missing_ok=True)
            dead = [path for path in _workers(folder) if not _is_alive(path)]
            # Numbers that stay there would be left out, when other workers get them.
            if not dead and not gone.folded:
                return
            for path in dead:
                if found := _read(path):
                    gone.counted.add(found.counted.lasting())
            gone.folded = [int(path.stem) for path in dead]
            _replace(folder / _GONE, _encode(gone))
            for path in dead:
                path.unlink(missing_ok=True)
            gone.folded = []
            _replace(folder / _GONE, _encode(gone))
    except OSError as error:
        log.warning("metrics: what dead workers left is not added up: %s", error.strerror)


@contextmanager
def _locked(folder: Path | None, how: int) -> Iterator[None]:
    """Keep those off who fold, or all; where there is no folder, there is nobody."""
    with ExitStack() as stack:
        if folder is not None:
            with suppress(OSError):  # without a folder, or room in it, nobody folds either
                fcntl.flock(stack.enter_context((folder / _LOCK).open("w")), how)
        yield


def _workers(folder: Path | None) -> list[Path]:
    return [] if folder is None else [each for each in folder.glob("*.json") if each.stem.isdigit()]


def _is_alive(path: Path) -> bool:
    try:
        os.kill(int(path.stem), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> Left | None:
    """What stands there; None if it is gone or cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        if path.stat().st_size <= FILE_BYTES_MAX:
            return _decode(path.read_bytes())
    return None


def _replace(path: Path, text: bytes) -> None:
    # No sync: after a crash of the machine there is another run, which begins anew.
    temporary = path.with_suffix(".new")
    temporary.write_bytes(text)
    temporary.replace(path)
