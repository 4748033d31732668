"""How long things took, in counts of fixed ranges: all that a quantile needs, in constant memory.

The bounds are the same everywhere and for good, so that histograms of several workers, and of
workers that have died, add up range by range.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

# From what a check in memory takes to what nobody would wait for. Upper ends, which belong to them.
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
# One more range for what took longer, and the sum.
LENGTH: Final = len(BOUNDS_NS) + 2


class Histogram:
    """Durations, counted without a lock: for one event loop, or about right.

    >>> taken = Histogram()
    >>> taken.note(60_000)
    >>> taken.data()[:3], taken.data()[-1]
    ([0, 1, 0], 60000)
    """

    __slots__ = ("_counts", "_total_ns")

    def __init__(self) -> None:
        self._counts = [0] * (LENGTH - 1)
        self._total_ns = 0

    def note(self, taken_ns: int) -> None:
        """Count one; some 200 ns."""
        self._counts[bisect_left(BOUNDS_NS, taken_ns)] += 1
        self._total_ns += taken_ns

    def data(self) -> list[int]:
        """The counts, range by range, and then the sum in nanoseconds."""
        return [*self._counts, self._total_ns]


def added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Two histograms' data as one's."""
    return [mine + theirs for mine, theirs in zip(one, other, strict=True)]


def cumulative(data: Sequence[int]) -> list[tuple[float, int]]:
    """How many took at most so many seconds, for each bound; the last bound is infinite.

    >>> cumulative([1, 2] + [0] * 13 + [300_000])[:3]
    [(5e-05, 1), (0.0001, 3), (0.00025, 3)]
    """
    found = []
    count = 0
    for bound_s, each in zip(
        [*(bound / 1e9 for bound in BOUNDS_NS), float("inf")], data[:-1], strict=True
    ):
        count += each
        found.append((bound_s, count))
    return found
