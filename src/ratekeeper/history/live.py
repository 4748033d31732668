"""The busiest subjects and the active penalties of all workers of a machine.

**A sketch** finds the heavy hitters of a stream in bounded memory. Exact counts would need a
counter for every subject. Space-Saving keeps COUNTERS_MAX counters and an error: an item without a
counter occurred at most `missed` times, and an item with one occurred at most `count` times and at
least `count - missed` times. With N occurrences and k counters, `missed` is at most N / (k + 1), so
an item that occurred more than N / k times always has a counter.

Counts are added in batches, the way Misra-Gries summaries are merged: the counts are added, and if
there are more than k, the count of number k + 1 is subtracted from all. Each time, this takes at
least k + 1 times as much from the sum as it adds to the error, so the bound holds. Sketches of
several workers are merged in the same way, with the same bound for their sum.

Everything (counts, error and sum) is halved every HALF_LIFE_SECONDS. So the bound holds for counts
that decay in the same way, and the result is about the last minutes.

**Workers share their sketches through files**, because a query reaches one worker and is about all
of them. Each worker publishes a report in a file in the folder of this run, and the worker that is
queried merges the reports of the workers that are alive. A file is replaced by a rename, so a
reader always sees a complete one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from math import log
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

COUNTERS_MAX: Final = 1_000
HALF_LIFE_SECONDS: Final = 60.0
# A steady rate of 1 per second has this count: the sum of the counts that have not decayed.
SECONDS_COUNTED: Final = HALF_LIFE_SECONDS / log(2)
# A smaller count is not reported: the item did not occur in the last minutes.
_COUNT_MIN: Final = 0.5

# Three sketches and the penalties: 4,000 entries, each with a subject of 512 characters and a rule.
FILE_BYTES_MAX: Final = 12 * 1024 * 1024
PENALTIES_MAX: Final = 1_000
SUFFIX: Final = ".live"

Item = TypeVar("Item")


# ── The sketch ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class HeavyHitter(Generic[Item]):
    """One of the most frequent items."""

    item: Item
    count: float
    """The decayed count; the true one is not higher."""
    error: float
    """The true count is not lower than `count - error`."""


class Sketch(Generic[Item]):
    """Counts of the most frequent items.

    >>> sketch = Sketch(counters_max=2)
    >>> sketch.add({"ann": 50, "bob": 30, "eve": 1}, now_s=0)
    >>> [(each.item, each.count, each.error) for each in sketch.top(2, now_s=60)]
    [('ann', 25.0, 0.5), ('bob', 15.0, 0.5)]
    """

    __slots__ = ("_at_s", "_counters_max", "_counts", "missed", "total")

    def __init__(self, counters_max: int = COUNTERS_MAX, now_s: float = 0.0) -> None:
        self._counters_max = counters_max
        self._counts: dict[Item, float] = {}
        self._at_s = now_s
        self.missed = 0.0
        """The largest count that an item without a counter may have."""
        self.total = 0.0
        """The sum of all counts."""

    def add(self, counts: Mapping[Item, float], now_s: float) -> None:
        """Add the counts of a batch; some 0.3 µs per item."""
        self._decay(now_s)
        mine = self._counts
        for item, count in counts.items():
            mine[item] = mine.get(item, 0.0) + count
        self.total += sum(counts.values())
        self._cut()

    def merge(
        self,
        counts: Iterable[tuple[Item, float]],
        missed: float,
        total: float,
        age_s: float = 0.0,
    ) -> None:
        """Add the `data` of another sketch, which is `age_s` old."""
        factor = decayed(age_s)
        mine = self._counts
        for item, count in counts:
            mine[item] = mine.get(item, 0.0) + count * factor
        self.missed += missed * factor
        self.total += total * factor
        self._cut()

    def data(self, now_s: float) -> tuple[list[tuple[Item, float]], float, float]:
        """Return the counts, `missed` and `total`, for `merge` of another sketch."""
        self._decay(now_s)
        return list(self._counts.items()), self.missed, self.total

    def top(self, limit: int, now_s: float) -> list[HeavyHitter[Item]]:
        """Return the most frequent items, the most frequent first."""
        self._decay(now_s)
        return [
            HeavyHitter(item, count + self.missed, self.missed)
            for item, count in nlargest(limit, self._counts.items(), key=itemgetter(1))
            if count >= _COUNT_MIN
        ]

    def _decay(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:  # the clock was set back: nothing decays until it has caught up
            return
        self._at_s = now_s
        factor = decayed(passed_s)
        self._counts = {item: count * factor for item, count in self._counts.items()}
        self.missed *= factor
        self.total *= factor

    def _cut(self) -> None:
        """Reduce the counters to the maximum."""
        most = self._counters_max
        if len(self._counts) <= most:
            return
        *_, next_one = nlargest(most + 1, self._counts.values())
        self._counts = {
            item: count - next_one for item, count in self._counts.items() if count > next_one
        }
        self.missed += next_one


def decayed(passed_s: float) -> float:
    """Return the remaining part of a count of 1 after this time."""
    return float(0.5 ** (max(passed_s, 0.0) / HALF_LIFE_SECONDS))


# ── Denials in a row ───────────────────────────────────────────────────────────────────────────

# Addresses whose denials a worker counts: those with the most. A report has the first of them.
STREAKS_MAX: Final = 4_000
STREAKS_REPORTED_MAX: Final = 1_000
# A streak ends after this time without a denial.
STREAK_SECONDS: Final = 600.0
# How long a worker reports that it allowed an address which it had denied before.
ALLOWED_SECONDS: Final = 60.0


class DenialStreak(msgspec.Struct):
    """The denials of an address in a row, by one worker."""

    address: str
    denied: int
    last_s: float
    """The last denial, by the clock that counts from boot."""


class DenialStreaks:
    """Counts how often each address was denied in a row, in batches of about a second.

    An address of which any request in the batch was allowed starts again. So the count is never too
    high, and may be too low by the denials of a second. If there are too many addresses, those with
    the fewest denials are forgotten: a flood of made-up addresses cannot replace a persistent one.

    >>> streaks = DenialStreaks()
    >>> for counts in ((0, 600), (0, 500), (1, 7)):
    ...     streaks.add({"192.0.2.7": counts}, now_s=0)
    ...     [(each.address, each.denied) for each in streaks.most(9, now_s=0)]
    [('192.0.2.7', 600)]
    [('192.0.2.7', 1100)]
    []
    """

    __slots__ = ("_allowed_s", "_streaks", "_streaks_max")

    def __init__(self, streaks_max: int = STREAKS_MAX) -> None:
        self._streaks_max = streaks_max
        self._streaks: dict[str, DenialStreak] = {}
        self._allowed_s: dict[str, float] = {}

    def add(self, counts: Mapping[str, tuple[int, int]], now_s: float) -> None:
        """Add the allowed and denied requests of a batch, by address."""
        streaks = self._streaks
        for address, (allowed, denied) in counts.items():
            streak = streaks.get(address)
            if allowed:
                if streak is not None:
                    del streaks[address]
                    self._allowed_s[address] = now_s
            elif streak is None:
                streaks[address] = DenialStreak(address, denied, now_s)
            else:
                streak.denied += denied
                streak.last_s = now_s
        if len(streaks) > self._streaks_max:
            kept = self.most(self._streaks_max, now_s)
            self._streaks = {each.address: each for each in kept}
        recently = ((each, at_s) for each, at_s in self._allowed_s.items())
        self._allowed_s = {each: at_s for each, at_s in recently if now_s - at_s <= ALLOWED_SECONDS}

    def most(self, limit: int, now_s: float) -> list[DenialStreak]:
        """Return the longest streaks, the longest first."""
        lasting = (each for each in self._streaks.values() if now_s - each.last_s <= STREAK_SECONDS)
        return nlargest(limit, lasting, key=attrgetter("denied"))

    def allowed(self, now_s: float) -> list[str]:
        """Return addresses that were denied before and were allowed in the last minute."""
        recent = [each for each, at_s in self._allowed_s.items() if now_s - at_s <= ALLOWED_SECONDS]
        return recent[-STREAKS_REPORTED_MAX:]


# ── Reports of workers ─────────────────────────────────────────────────────────────────────────


class SketchData(msgspec.Struct):
    """A sketch in a report: the counts by subject and rule, the error, and the sum."""

    counts: list[tuple[tuple[str, str], float]]
    missed: float
    total: float


class ActivePenalty(msgspec.Struct, frozen=True):
    """A cool-down or a block that has not ended."""

    rule: str
    subject: str
    level: int
    seconds: int
    blocked: bool
    until_ns: int


class WorkerReport(msgspec.Struct):
    """The sketches and penalties of one worker."""

    at_s: float
    """By the clock that counts from boot, which all workers of a machine share."""
    checks: SketchData
    denied: SketchData
    penalties: list[ActivePenalty] = []
    shadow_denied: SketchData = msgspec.field(default_factory=lambda: SketchData([], 0.0, 0.0))
    streaks: list[DenialStreak] = []
    allowed: list[str] = []
    """Addresses that were denied before and were allowed in the last minute."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(WorkerReport).decode


class ReportFolder:
    """The folder with the reports; `number` identifies this process."""

    def __init__(self, folder: Path, number: int | None = None) -> None:
        self._folder = folder
        self._number = os.getpid() if number is None else number

    def publish(self, report: WorkerReport) -> None:
        """Replace the report of this worker. Raises OSError."""
        path = self._folder / f"{self._number}{SUFFIX}"
        temporary = path.with_suffix(".leaving")
        temporary.write_bytes(_encode(report))
        temporary.replace(path)

    def others(self) -> Iterator[WorkerReport]:
        """Yield the reports of the other workers that are alive; remove those of dead ones."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            if not path.stem.isdigit() or int(path.stem) == self._number:
                continue
            with suppress(OSError, msgspec.DecodeError):
                if not _is_alive(int(path.stem)):
                    path.unlink()
                elif path.stat().st_size <= FILE_BYTES_MAX:
                    yield _decode(path.read_bytes())


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
