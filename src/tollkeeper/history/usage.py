"""Who used how much, minute by minute, until it is written: bounded, and exact as long as it fits.

A *bucket* is what one subject did under one rule in one minute: requests that passed, requests that
the rule denied, and units that were spent. Buckets are added to, never set, here and in the
database: so what several workers and nodes have counted adds up, in whichever order it comes.

There are BUCKETS_MAX at a time. Those beyond are counted together, by rule, as OTHERS: sums stay
right, and only who it was is lost. Where even those are too many (rules times minutes, while the
database is away for long), they are dropped, and that is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

BUCKETS_MAX: Final = 50_000
OTHERS_MAX: Final = 5_000
OTHERS: Final = "(others)"
MINUTE_NS: Final = 60 * 10**9
MINUTE_SECONDS: Final = 60

# Who, under which rule, in which minute since the epoch.
Bucket = tuple[str, str, int]
# Allowed, denied, units: a list, for what is added to it on the path.
Counts = list[int]


class Used(NamedTuple):
    """A bucket to be added to the database."""

    subject: str
    rule: str
    start_s: int
    allowed: int
    denied: int
    units: int


class Usage:
    """Buckets, for one thread."""

    __slots__ = ("_buckets_max", "_others_max", "buckets", "dropped")

    def __init__(self, buckets_max: int = BUCKETS_MAX, others_max: int = OTHERS_MAX) -> None:
        self.buckets: dict[Bucket, Counts] = {}
        self._buckets_max = buckets_max
        self._others_max = others_max
        self.dropped = 0
        """Requests that there was no bucket for."""

    def __len__(self) -> int:
        return len(self.buckets)

    def new(self, bucket: Bucket) -> Counts:
        """The counts of a bucket that is not there yet; of the others', if there is no room."""
        buckets = self.buckets
        if len(buckets) >= self._buckets_max:
            _, rule, minute = bucket
            bucket = (OTHERS, rule, minute)
            found = buckets.get(bucket)
            if found is not None:
                return found
            if len(buckets) >= self._buckets_max + self._others_max:
                self.dropped += 1
                return [0, 0, 0]
        counts = buckets[bucket] = [0, 0, 0]
        return counts

    def add(self, bucket: Bucket, counts: Counts) -> None:
        """Add what was counted elsewhere."""
        mine = self.buckets.get(bucket)
        if mine is None:
            dropped = self.dropped
            mine = self.new(bucket)
            if self.dropped > dropped:
                self.dropped = dropped + counts[0] + counts[1]
        for at, count in enumerate(counts):
            mine[at] += count

    def take(self, most: int) -> list[Used]:
        """Remove and tell at most so many, in the one order in which all take locks on rows."""
        buckets = self.buckets
        taken = list(buckets) if len(buckets) <= most else _first(buckets, most)
        taken.sort()
        found = []
        for bucket in taken:
            subject, rule, minute = bucket
            found.append(Used(subject, rule, minute * MINUTE_SECONDS, *buckets.pop(bucket)))
        return found


def _first(buckets: Iterable[Bucket], most: int) -> list[Bucket]:
    """The ones that are there longest."""
    return [bucket for bucket, _ in zip(buckets, range(most), strict=False)]
