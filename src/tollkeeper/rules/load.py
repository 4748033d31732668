"""Limits that follow the load: how busy the machine is, and the factor of a rule's limits.

A load is a number from 0.0 (idle) to 1.0, or None while it is unknown. It comes from a probe of the
CPU or the memory, or the application pushes it. A *factor* is between a rule's `least` and 1.0:
all of the limits at `low` and below, `least` of them at `high` and above, linear in between, and
smoothed, so that limits do not jump with every reading.

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
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.rules.document.model import LoadSource, Scale

SAMPLE_NS: Final = 250_000_000
# Only the first line of /proc/stat is needed; the rest is long on large machines.
_STAT_BYTES: Final = 512
_FILE_BYTES_MAX: Final = 16_384

Reading = Callable[[], float | None]


class Factor:
    """The part of its limits that a rule has now. Calling it is about as fast as reading a clock.

    >>> now_ns = 0
    >>> factor = Factor(Scale(low=0.5, high=1.0, least=0.2, smoothing_s=0), lambda: 0.75,
    ...                 lambda: now_ns)
    >>> factor()
    0.6
    """

    __slots__ = ("_due_ns", "_now_ns", "_read", "_sampling", "_then_ns", "_value", "scale")

    def __init__(self, scale: Scale, read: Reading, now_ns: Callable[[], int]) -> None:
        """`read` returns the load, `now_ns` the time for smoothing."""
        self.scale = scale
        self._read = read
        self._now_ns = now_ns
        self._sampling = threading.Lock()
        self._value: float | None = None  # until there is a first reading
        self._then_ns = 0
        self._due_ns: int | None = None

    def __call__(self) -> float:
        now_ns = self._now_ns()
        if self._due_ns is None or now_ns >= self._due_ns:
            self._sample(now_ns)
        return 1.0 if self._value is None else self._value

    def _sample(self, now_ns: int) -> None:
        if not self._sampling.acquire(blocking=False):
            return  # another thread takes the reading
        try:
            self._due_ns = now_ns + SAMPLE_NS
            load = self._read()
            if load is None:
                return
            aim = aimed_at(self.scale, load)
            # The first reading takes effect at once: a process may start on a busy machine.
            self._value = aim if self._value is None else self._smoothed(aim, now_ns)
            self._then_ns = now_ns
        finally:
            self._sampling.release()

    def _smoothed(self, aim: float, now_ns: int) -> float:
        before = 1.0 if self._value is None else self._value
        if not self.scale.smoothing_s:
            return aim
        passed_s = max(now_ns - self._then_ns, 0) / NS_PER_SECOND
        kept = math.exp(-passed_s / self.scale.smoothing_s)
        return aim + (before - aim) * kept


def aimed_at(scale: Scale, load: float) -> float:
    """Return the factor of a constant load.

    >>> [round(aimed_at(Scale(low=0.5, high=1.0, least=0.2), load), 3) for load in (0.4, 0.9, 1)]
    [1.0, 0.36, 0.2]
    """
    if load <= scale.low:
        return 1.0
    if load >= scale.high:
        return scale.least
    return 1.0 - (1.0 - scale.least) * (load - scale.low) / (scale.high - scale.low)


class Loads:
    """The load by source: the probes, read at most every SAMPLE_NS, and the pushed number.

    Rules with the same source share one reading: that of the CPU is an average since the last.
    """

    def __init__(
        self, now_ns: Callable[[], int], probes: Mapping[LoadSource, Reading] | None = None
    ) -> None:
        self._now_ns = now_ns
        self._probes = dict(probes) if probes is not None else _probes()
        self._readings: dict[LoadSource, tuple[int, float | None]] = {}
        self._pushed: float | None = None

    def push(self, load: float) -> None:
        """Set the load from the application. Raises ConfigError unless it is from 0.0 to 1.0."""
        number = isinstance(load, int | float) and not isinstance(load, bool)
        if not number or not 0 <= load <= 1:
            raise ConfigError(
                f"load={show(load)} is not a number from 0.0 (idle) to 1.0; "
                f"for example push_load(0.8)"
            )
        self._pushed = float(load)

    def reading(self, source: LoadSource) -> float | None:
        """Return the load of a source; None while it is unknown."""
        if source == "pushed":
            return self._pushed
        now_ns = self._now_ns()
        due_ns, load = self._readings.get(source, (now_ns, None))
        if now_ns >= due_ns:
            found = self._probes[source]()
            # Two threads may read at once, and no time passes between their readings.
            load = load if found is None else found
            self._readings[source] = now_ns + SAMPLE_NS, load
        return load


@cache
def _probes() -> Mapping[LoadSource, Reading]:
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
        self._lock = threading.Lock()

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
