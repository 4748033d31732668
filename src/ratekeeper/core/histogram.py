"""Histograms of durations: all that a quantile needs, in constant memory.

The bounds are the same everywhere and never change, so the histograms of several workers, dead ones
included, add up range by range.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

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

    def note(self, taken_ns: int, count: int = 1) -> None:
        """Count a duration, of `count` calls; it takes some 200 ns."""
        self._counts[bisect_left(BOUNDS_NS, taken_ns)] += count
        self._total_ns += taken_ns * count

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


def quantile(data: Sequence[int], share: float) -> float | None:
    """Return the seconds that this share of the durations did not exceed; None without durations.

    Durations are taken as evenly spread inside their range, as Prometheus does. Longer ones than
    the last bound count as the last bound.

    >>> quantile([0, 100] + [0] * 14, 0.5)
    7.5e-05
    """
    counts = data[:-1]
    rank = share * sum(counts)
    if not rank:
        return None
    below, low_ns = 0, 0
    for count, high_ns in zip(counts, BOUNDS_NS, strict=False):
        if count and below + count >= rank:
            return (low_ns + (high_ns - low_ns) * (rank - below) / count) / 1e9
        below, low_ns = below + count, high_ns
    return BOUNDS_NS[-1] / 1e9
