"""Limits that follow the load: how busy a system is, and the factor of a rule's limits.

A load is a number. It comes from a probe of the CPU or the memory (from 0.0, idle, to 1.0), or the
protected system pushes it, under a name and in a unit of its own. A *factor* multiplies a rule's
limits: by `most` at the load `idle` and below, by 1 at `low`, by `least` at `high` and above, and
by a straight line in between.

    factor
    most  ──────╮
                 ╲
    1             ╲╮
                    ╲
    least            ╲──────
              idle  low  high    load

Each factor is smoothed, so that limits do not jump with every reading. A rule that follows several
loads uses the smallest of their factors. A load that was never known changes nothing. A load that
is too old counts as `low`: a system that no longer reports its load gets its base limits back.

There is no thread. The first check after SAMPLE_NS takes the next reading: one or two small files
of the kernel. No other thread waits for it; they use the previous factor.

The probes are for Linux. In a container they use its limits if cgroup v2 sets them.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.forks import fork_safe
from ratekeeper.rules.document.model import LOAD_MAX, SHARE_SOURCES, Scale

SAMPLE_NS: Final = 250_000_000
# The source of a load that is pushed without a name.
PUSHED: Final = "pushed"
# How long a push may say that its load is valid.
VALID_S_MIN: Final = 1.0
VALID_S_MAX: Final = 86_400.0
# Only the first line of /proc/stat is needed; the rest is long on large machines.
_STAT_BYTES: Final = 512
_FILE_BYTES_MAX: Final = 16_384


class LoadReading(NamedTuple):
    """A load, the time when it was read or pushed, and how long it is valid."""

    load: float
    at_ns: int
    valid_s: float | None = None
    """As the push says; None: each rule's `stale_after`."""

    def is_stale(self, scale: Scale, now_ns: int) -> bool:
        """Return True if the load is too old for a rule. A clock that steps back makes none old."""
        valid_s = scale.stale_after_s if self.valid_s is None else self.valid_s
        return now_ns - self.at_ns > valid_s * NS_PER_SECOND


Probe = Callable[[], float | None]
Read = Callable[[str], LoadReading | None]


class SourceFactor(NamedTuple):
    """The factor of a rule by one of the loads that it follows."""

    source: str
    factor: float
    is_stale: bool
    """True if the load is unknown or too old, so that the factor returns to 1."""


class Factor:
    """The factor of a rule's limits. Calling it is about as fast as reading a clock.

    >>> scale = Scale("queue", low=100, high=200, least=0.2, smoothing_s=0)
    >>> Factor((scale,), lambda source: LoadReading(150, at_ns=0), lambda: 0)()
    0.6
    """

    __slots__ = (
        "_due_ns",
        "_now_ns",
        "_read",
        "_sampling",
        "_then_ns",
        "_value",
        "_values",
        "scales",
    )

    def __init__(self, scales: tuple[Scale, ...], read: Read, now_ns: Callable[[], int]) -> None:
        """`read` returns the load of a source, `now_ns` the time for smoothing and ages."""
        self.scales = scales
        self._read = read
        self._now_ns = now_ns
        self._sampling = fork_safe(threading.Lock())
        # By scale: None until its load is known for the first time.
        self._values: list[float | None] = [None] * len(scales)
        self._value = 1.0
        self._then_ns = 0
        self._due_ns: int | None = None

    def __call__(self) -> float:
        now_ns = self._now_ns()
        if self._due_ns is None or now_ns >= self._due_ns:
            self._sample(now_ns)
        return self._value

    def by_source(self) -> list[SourceFactor]:
        """Return the factor by each load, of the last sample."""
        self()
        now_ns = self._now_ns()
        return [
            SourceFactor(
                scale.source,
                1.0 if value is None else value,
                (reading := self._read(scale.source)) is None or reading.is_stale(scale, now_ns),
            )
            for scale, value in zip(self.scales, self._values, strict=True)
        ]

    def _sample(self, now_ns: int) -> None:
        if not self._sampling.acquire(blocking=False):
            return  # another thread takes the reading
        try:
            self._due_ns = now_ns + SAMPLE_NS
            passed_s = max(now_ns - self._then_ns, 0) / NS_PER_SECOND
            self._then_ns = now_ns
            self._values = [
                self._next(scale, value, now_ns, passed_s)
                for scale, value in zip(self.scales, self._values, strict=True)
            ]
            self._value = min(1.0 if value is None else value for value in self._values)
        finally:
            self._sampling.release()

    def _next(
        self, scale: Scale, before: float | None, now_ns: int, passed_s: float
    ) -> float | None:
        reading = self._read(scale.source)
        if reading is None:
            return before
        aim = 1.0 if reading.is_stale(scale, now_ns) else factor_at(scale, reading.load)
        # The first reading takes effect at once: a process may start on a busy machine.
        if before is None or not scale.smoothing_s:
            return aim
        return aim + (before - aim) * math.exp(-passed_s / scale.smoothing_s)


def factor_at(scale: Scale, load: float) -> float:
    """Return the factor of a constant load.

    >>> scale = Scale(low=0.5, high=1.0, least=0.2, most=1.5, idle=0.1)
    >>> [round(factor_at(scale, load), 3) for load in (0.1, 0.3, 0.5, 0.9, 1)]
    [1.5, 1.25, 1.0, 0.36, 0.2]
    """
    if load >= scale.high:
        return scale.least
    if load > scale.low:
        return 1.0 - (1.0 - scale.least) * (load - scale.low) / (scale.high - scale.low)
    if scale.most == 1.0:
        return 1.0
    idle = scale.idle_load
    return 1.0 + (scale.most - 1.0) * min((scale.low - load) / (scale.low - idle), 1.0)


class Loads:
    """The load by source: the probes, read at most every SAMPLE_NS, and the pushed numbers.

    Rules with the same source share one reading: that of the CPU is an average since the last.
    """

    def __init__(
        self, now_ns: Callable[[], int], probes: Mapping[str, Probe] | None = None
    ) -> None:
        self._now_ns = now_ns
        self._probes = dict(probes) if probes is not None else _probes()
        self._due_ns: dict[str, int] = {}
        self._readings: dict[str, LoadReading] = {}
        self.sources: tuple[str, ...] = ()
        """The sources that the rules follow."""

    def follow(self, sources: Iterable[str]) -> None:
        """Set the sources that the rules follow. Loads of other sources are dropped."""
        self.sources = tuple(sorted(set(sources)))
        kept = {*self.sources, PUSHED}
        self._readings = {name: each for name, each in self._readings.items() if name in kept}

    def push(
        self, load: float, name: str = PUSHED, valid_for: float | None = None, age_s: float = 0.0
    ) -> None:
        """Set the load of a pushed source. Raises ConfigError.

        `valid_for`  the seconds after which it is stale; None: each rule's `stale_after`.
        `age_s`      the seconds since the protected system pushed it.
        """
        self.check_name(name)
        valid_s = check_load(load, name, valid_for)
        at_ns = self._now_ns() - int(age_s * NS_PER_SECOND)
        known = self._readings.get(name)
        if age_s and known is not None and known.at_ns > at_ns:
            return  # a newer one arrived by another path
        self._readings[name] = LoadReading(float(load), at_ns, valid_s)

    @property
    def pushed_sources(self) -> tuple[str, ...]:
        """The sources that the rules follow and the protected system pushes."""
        return tuple(each for each in self.sources if each not in self._probes)

    def check_name(self, name: Any) -> None:
        """Raise ConfigError for the name of a source that cannot be pushed."""
        if name == PUSHED or name in self.pushed_sources:
            return
        if isinstance(name, str) and name in self._probes:
            raise ConfigError(f"{name} is measured by each process and cannot be pushed")
        known = ", ".join(self.pushed_sources) or "no pushed load"
        raise ConfigError(
            f"no rule follows the load {show(name)}; the rules follow {known}. "
            f"For example scale: {{source: queue_depth, low: 100, high: 5000}}"
        )

    def reading(self, source: str) -> LoadReading | None:
        """Return the last load of a source; None while it is unknown."""
        probe = self._probes.get(source)
        if probe is not None:
            now_ns = self._now_ns()
            if now_ns >= self._due_ns.get(source, now_ns):
                self._due_ns[source] = now_ns + SAMPLE_NS
                load = probe()
                # Two threads may read at once, and no time passes between their readings.
                if load is not None:
                    self._readings[source] = LoadReading(load, now_ns)
        return self._readings.get(source)

    def all(self) -> dict[str, tuple[LoadReading | None, float | None]]:
        """Return the last load of each source that the rules follow, and its age in seconds."""
        found: dict[str, tuple[LoadReading | None, float | None]] = {}
        for source in self.sources:
            reading = self.reading(source)
            age_ns = None if reading is None else max(self._now_ns() - reading.at_ns, 0)
            found[source] = reading, None if age_ns is None else age_ns / NS_PER_SECOND
        return found


def check_load(load: Any, name: str, valid_for: Any) -> float | None:
    """Return the validated time for which a load is valid. Raises ConfigError."""
    most, example = (1.0, "0.8") if name in SHARE_SOURCES else (LOAD_MAX, "340")
    if not _is_number(load) or not 0 <= load <= most:
        raise ConfigError(
            f"load={show(load)} of {name} is not a number from 0 to {most:g}; for example {example}"
        )
    if valid_for is None:
        return None
    if not _is_number(valid_for) or not VALID_S_MIN <= valid_for <= VALID_S_MAX:
        raise ConfigError(
            f"valid_for={show(valid_for)} is not a number of seconds from {VALID_S_MIN:g} to "
            f"{VALID_S_MAX:g}; for example valid_for=120"
        )
    return float(valid_for)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _probes() -> Mapping[str, Probe]:
    # Shared by the process: two limiters with a probe each would shorten each other's interval.
    return {"cpu": CpuProbe().load, "memory": MemoryProbe().load}


class CpuProbe:
    """The share of CPU time that was used since the last reading; of the container's, if limited.

    `proc` and `cgroup` are where those file systems are mounted. Waiting for a disk is not work.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = _limited_cgroup(proc, cgroup, "cpu.max")
        self._before = (0, 0)
        self._cpus = 1.0  # CPUs that the quota of the container allows
        self._lock = fork_safe(threading.Lock())

    def load(self) -> float | None:
        """Return the load from 0.0 to 1.0; None at the first reading or without a source."""
        with self._lock:
            try:
                now = self._of(self._cgroup) if self._cgroup else self._of_machine()
            except (OSError, ValueError, LookupError):
                return _load_average()
            before, self._before = self._before, now
        if before == (0, 0) or now[1] <= before[1]:
            return None
        used = (now[0] - before[0]) / (now[1] - before[1]) / self._cpus
        return min(max(used, 0.0), 1.0)

    def _of_machine(self) -> tuple[int, int]:
        """Return the busy ticks and all ticks since the machine started."""
        line = _read(self._proc / "stat", _STAT_BYTES).split("\n", 1)[0]
        # user nice system idle iowait irq softirq steal; the rest is in user and nice already.
        ticks = [int(each) for each in line.split()[1:9]]
        total = sum(ticks)
        return total - ticks[3] - ticks[4], total

    def _of(self, cgroup: Path) -> tuple[int, int]:
        """Return the microseconds of CPU time used, and of time."""
        quota, period = _read(cgroup / "cpu.max").split()
        used_us = _numbers(_read(cgroup / "cpu.stat"))["usage_usec"]
        self._cpus = int(quota) / int(period)
        return used_us, time.monotonic_ns() // 1_000


class MemoryProbe:
    """The share of memory in use; of the container's memory too, if it is limited."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = _limited_cgroup(proc, cgroup, "memory.max")

    def load(self) -> float | None:
        """Return the load from 0.0 to 1.0; None without a source."""
        try:
            load = self._of_machine()
            return load if self._cgroup is None else max(load, _memory_of(self._cgroup))
        except (OSError, ValueError, KeyError):
            return None

    def _of_machine(self) -> float:
        sizes = _numbers(_read(self._proc / "meminfo"))
        return 1.0 - min(sizes["MemAvailable"] / sizes["MemTotal"], 1.0)


def _memory_of(cgroup: Path) -> float:
    most = int(_read(cgroup / "memory.max"))
    used = int(_read(cgroup / "memory.current"))
    # The kernel drops cached files when it needs the memory.
    used -= _numbers(_read(cgroup / "memory.stat")).get("inactive_file", 0)
    return min(max(used / max(most, 1), 0.0), 1.0)


def _limited_cgroup(proc: Path, root: Path, limit: str) -> Path | None:
    """Return the nearest cgroup (v2) of this process that sets a limit; None if none does."""
    try:
        groups = _read(proc / "self/cgroup").splitlines()
    except (OSError, ValueError):
        return None
    for line in groups:
        if not line.startswith("0::/"):
            continue
        folder = root / line.removeprefix("0::/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(root):
                break
            try:
                if not _read(each / limit).startswith("max"):
                    return each
            except (OSError, ValueError):
                continue
    return None


def _numbers(text: str) -> dict[str, int]:
    """Return the first number of each line, by the name before it."""
    found = re.finditer(r"^(\w+):?\s+(\d+)", text, re.MULTILINE)
    return {each[1]: int(each[2]) for each in found}


def _read(path: Path, bytes_max: int = _FILE_BYTES_MAX) -> str:
    # Not Path.read_text: its buffers and decoders take longer than the kernel.
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, bytes_max).decode()
    finally:
        os.close(file)


def _load_average() -> float | None:
    """Return the load average of the last minute, on systems without these files."""
    try:
        return min(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
    except OSError:
        return None
