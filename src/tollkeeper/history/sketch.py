"""Who asks most, in bounded memory: the heavy ones of a stream, of the last minutes.

To know exactly who asks most, one has to count everybody. Space-Saving keeps COUNTERS_MAX counters
and an error: whoever has no counter has come at most `missed` times, and whoever has one has come
`count` times at most and `count - missed` times at least. For N in all and k counters, `missed` is
at most N / (k + 1); so nobody who came more than N / k times is ever without a counter.

What comes is added in batches, as Misra-Gries summaries are merged, which keep the same (each is
the other but for an addition): counts are added, and if there are more than k, what the next one
after them has is taken from all. Each time that takes at least k + 1 times as much from the whole
as it adds to the error, which is why the bound holds. Sketches of several workers are merged in the
same way, with the same bound for their sum.

The past fades: everything, the error and the sum too, is halved every HALF_LIFE_SECONDS. So the
bound holds for counts that fade in the same way, and what is told is about the last minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, Generic, TypeVar

COUNTERS_MAX: Final = 1_000
HALF_LIFE_SECONDS: Final = 60.0
# A steady rate of 1 a second has this count: the sum of what has not faded yet.
SECONDS_COUNTED: Final = HALF_LIFE_SECONDS / 0.693_147_180_559_945_3
# What has faded below this is not told of: nobody came in the last minutes.
_TOLD_MIN: Final = 0.5

Who = TypeVar("Who")


@dataclass(frozen=True, slots=True)
class Heavy(Generic[Who]):
    """One of those who come most."""

    who: Who
    count: float
    """At most so many, faded."""
    error: float
    """At least so many fewer: `count - error`."""


class Sketch(Generic[Who]):
    """Counts of those who come most.

    >>> sketch = Sketch(counters_max=2)
    >>> sketch.add({"ann": 50, "bob": 30, "eve": 1}, now_s=0)
    >>> [(each.who, each.count, each.error) for each in sketch.top(2, now_s=60)]
    [('ann', 25.0, 0.5), ('bob', 15.0, 0.5)]
    """

    __slots__ = ("_at_s", "_counters_max", "_counts", "missed", "total")

    def __init__(self, counters_max: int = COUNTERS_MAX, now_s: float = 0.0) -> None:
        self._counters_max = counters_max
        self._counts: dict[Who, float] = {}
        self._at_s = now_s
        self.missed = 0.0
        """How much whoever has no counter may have."""
        self.total = 0.0
        """Of everybody."""

    def add(self, counts: Mapping[Who, float], now_s: float) -> None:
        """What came since; some 0.3 µs for each in `counts`."""
        self._fade(now_s)
        mine = self._counts
        for who, count in counts.items():
            mine[who] = mine.get(who, 0.0) + count
        self.total += sum(counts.values())
        self._cut()

    def merge(
        self,
        counts: Iterable[tuple[Who, float]],
        missed: float,
        total: float,
        age_s: float = 0.0,
    ) -> None:
        """What another has counted, as `data` told it `age_s` ago."""
        part = faded(age_s)
        mine = self._counts
        for who, count in counts:
            mine[who] = mine.get(who, 0.0) + count * part
        self.missed += missed * part
        self.total += total * part
        self._cut()

    def data(self, now_s: float) -> tuple[list[tuple[Who, float]], float, float]:
        """For `merge` of another: the counts, what may be missed, and the sum."""
        self._fade(now_s)
        return list(self._counts.items()), self.missed, self.total

    def top(self, most: int, now_s: float) -> list[Heavy[Who]]:
        """Those who come most, the first first."""
        self._fade(now_s)
        found = nlargest(most, self._counts.items(), key=_count)
        return [
            Heavy(who, count + self.missed, self.missed)
            for who, count in found
            if count >= _TOLD_MIN
        ]

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:  # a clock that was set back; nothing fades until it is there again
            return
        self._at_s = now_s
        part = faded(passed_s)
        self._counts = {who: count * part for who, count in self._counts.items()}
        self.missed *= part
        self.total *= part

    def _cut(self) -> None:
        """Back to as many counters as there may be."""
        most = self._counters_max
        if len(self._counts) <= most:
            return
        *_, (_, next_one) = nlargest(most + 1, self._counts.items(), key=_count)
        self._counts = {
            who: count - next_one for who, count in self._counts.items() if count > next_one
        }
        self.missed += next_one


def faded(passed_s: float) -> float:
    """What is left of 1 after so long."""
    return float(0.5 ** (max(passed_s, 0.0) / HALF_LIFE_SECONDS))


def _count(item: tuple[object, float]) -> float:
    return item[1]
