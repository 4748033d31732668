"""GET /metrics: what all workers of this service have counted, for Prometheus.

A scrape reaches one worker, and must tell of all. Each worker therefore leaves its counts in a file
once a second, in a folder of this run of the service, and whoever is scraped adds them up: its own
as they are, the others' as they were a second ago. What a worker had counted that has died is added
to a file of its own when the next one starts, so that no counter ever goes down.

Labels are bounded: routes are those that there are, and rules those of the document, the busiest
of them by name.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tollkeeper.edge.service.node import Node

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
WRITE_SECONDS: Final = 1.0
RULES_MAX: Final = 1_000
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_REST: Final = "(others)"
_GONE: Final = "gone.json"
_OUTCOMES: Final = ("allowed", "denied", "shadow_denied", "failed")

log = logging.getLogger("tollkeeper.service")


class Counts(msgspec.Struct):
    """What one worker has counted, as it is written."""

    requests: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    """By route and status."""
    checks: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """By rule and outcome."""

    def add(self, other: Counts) -> None:
        """What the other has counted, too."""
        for route, statuses in other.requests.items():
            mine = self.requests.setdefault(route, {})
            for status, count in statuses.items():
                mine[status] = mine.get(status, 0) + count
        for rule, outcomes in other.checks.items():
            held = self.checks.setdefault(rule, {})
            for outcome, count in outcomes.items():
                held[outcome] = held.get(outcome, 0) + count


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Counts).decode


class Metrics:
    """The counters of this worker, and the sum of all workers'."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Counted on the path of every request: one dict, no lock, for there is one event loop.
        self.requests: dict[tuple[str, int], int] = {}
        self._folder = node.settings.counters
        self._written = b""
        # Of rules that have left the document: their counts must not go down either.
        self._before: dict[str, Counter[str]] = {}
        self._last: dict[str, Counter[str]] = {}

    def counts(self) -> Counts:
        """Of this worker, now."""
        found = Counts(checks=self._checks())
        for (route, status), count in list(self.requests.items()):
            found.requests.setdefault(route, {})[status] = count
        return found

    def _checks(self) -> dict[str, dict[str, int]]:
        now: dict[str, Counter[str]] = {}
        for rule, counted in self._node.limiter.counts().items():
            now[rule] = Counter({each: getattr(counted, each) for each in _OUTCOMES})
        for rule, old in self._last.items():
            if rule not in now or now[rule].total() < old.total():
                kept = rule if len(self._before) < RULES_MAX else _REST
                self._before.setdefault(kept, Counter()).update(old)
        self._last = now
        names = {*now, *self._before}
        total = {
            each: now.get(each, Counter()) + self._before.get(each, Counter()) for each in names
        }
        return {rule: dict(each) for rule, each in total.items() if each}

    async def keep_writing(self) -> None:
        """Leave the counts for the others, once a second, until cancelled."""
        while self._folder is not None:
            self.write()
            await asyncio.sleep(WRITE_SECONDS)

    def write(self) -> None:
        """Leave the counts for the others, if they have changed. A full disk is only told of."""
        if self._folder is None:
            return
        text = _encode(self.counts())
        path = self._folder / f"{os.getpid()}.json"
        try:
            if text != self._written or not path.exists():
                _replace(path, text)
                self._written = text
        except OSError as error:
            log.warning("metrics: the counts are not written for the others: %s", error.strerror)

    def total(self) -> Counts:
        """Of all workers of this service."""
        total = self.counts()
        own = f"{os.getpid()}.json"
        for path in _files(self._folder):
            if path.name != own and (found := _read(path)) is not None:
                total.add(found)
        return total

    def workers(self) -> int:
        """How many workers are alive."""
        alive = [path for path in _files(self._folder) if _is_alive(path)]
        return max(len(alive), 1)

    def text(self) -> bytes:
        """What Prometheus reads."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._families()))
        text: bytes = generate_latest(registry)
        return text

    def _families(self) -> list[Metric]:
        total = self.total()
        requests = CounterMetricFamily(
            "tollkeeper_requests", "Requests answered.", labels=["route", "status"]
        )
        for route, statuses in sorted(total.requests.items()):
            for status, count in sorted(statuses.items()):
                requests.add_metric([route, str(status)], count)
        checks = CounterMetricFamily(
            "tollkeeper_checks", "What each rule decided.", labels=["rule", "outcome"]
        )
        for rule, outcomes in _busiest(total.checks):
            for outcome, count in sorted(outcomes.items()):
                checks.add_metric([rule, outcome], count)
        return [requests, checks, *self._gauges()]

    def _gauges(self) -> Iterator[Metric]:
        status = self._node.limiter.rules_status()
        info = GaugeMetricFamily(
            "tollkeeper_rules_info", "The version of the rules in force.", labels=["version"]
        )
        info.add_metric([status.version], 1)
        yield info
        if status.age is not None:
            yield GaugeMetricFamily(
                "tollkeeper_rules_age_seconds",
                "Seconds since the source of the rules said what is current.",
                value=status.age,
            )
        yield GaugeMetricFamily("tollkeeper_workers", "Workers alive.", value=self.workers())
        yield GaugeMetricFamily(
            "tollkeeper_start_time_seconds",
            "When this worker started, in Unix time.",
            value=self._node.started_ns / 1e9,
        )


class _Collector(Collector):
    """What a registry asks, once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _busiest(checks: dict[str, dict[str, int]]) -> list[tuple[str, dict[str, int]]]:
    """At most RULES_MAX by name, the busiest; what the others counted is told together."""
    ranked = sorted(checks.items(), key=lambda each: (-sum(each[1].values()), each[0]))
    if len(ranked) <= RULES_MAX:
        return sorted(ranked)
    rest = Counts()
    for _, outcomes in ranked[RULES_MAX:]:
        rest.add(Counts(checks={_REST: outcomes}))
    return [*sorted(ranked[:RULES_MAX]), (_REST, rest.checks[_REST])]


def fold_dead(folder: Path) -> None:
    """Add up what dead workers have left, and remove their files. A lock keeps others off."""
    try:
        with (folder / "lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            dead = [path for path in _files(folder) if path.name != _GONE and not _is_alive(path)]
            if not dead:
                return
            total = _read(folder / _GONE) or Counts()
            for path in dead:
                total.add(_read(path) or Counts())
            _replace(folder / _GONE, _encode(total))
            for path in dead:
                path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("metrics: what dead workers left is not added up: %s", error.strerror)


def _files(folder: Path | None) -> list[Path]:
    return [] if folder is None else list(folder.glob("*.json"))


def _is_alive(path: Path) -> bool:
    if not path.stem.isdecimal():
        return False
    try:
        os.kill(int(path.stem), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> Counts | None:
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
