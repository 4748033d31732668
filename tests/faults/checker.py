"""Whether the limits held, told from the outside: from what was sent, answered, and when.

The store decided a request at some instant between sending and answer; nobody here knows which. So
a bound is broken only if it is, whatever those instants were: what counts as inside an interval is
what was sent and answered inside of it.

What a store decided must keep the bound in *every* interval, those in which it failed included:
that is stronger than keeping it in the intervals without degraded answers, in which all admissions
are the store's. What was admitted in its place is marked degraded, and by how much the two together
exceed the limit is counted and told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from tollkeeper import Limit

# Redis tells the time in whole microseconds: two instants may be so much nearer than they seem.
CLOCK_STEP_NS = 1_000


class Admitted(NamedTuple):
    """Units that were admitted at some instant of an interval, by the wall clock."""

    sent_ns: int
    told_ns: int
    units: int = 1


def excess(limit: Limit, admitted: Iterable[Admitted]) -> int:
    """By how many units the bound was exceeded for certain, in the worst interval; 0 if never."""
    return max(_excess(limit, sorted(admitted)), 0)


def _excess(limit: Limit, ordered: Sequence[Admitted]) -> int:
    if limit.algorithm in ("token_bucket", "leaky_bucket"):
        return _excess_of_bucket(limit, ordered)
    if limit.algorithm == "sliding_window_log":
        return _excess_of_log(limit, ordered)
    aligned = _excess_of_windows(limit, ordered)
    if limit.algorithm == "sliding_window_counter":
        return max(aligned, _excess_of_counter(limit, ordered))
    return aligned


def _excess_of_bucket(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """From any request to any later answer: at most capacity + rate × time."""
    worst = Fraction(0)
    for first, begun in enumerate(ordered):
        units = 0
        for each in sorted(ordered[first:], key=lambda one: one.told_ns):
            units += each.units
            time_ns = each.told_ns - begun.sent_ns + CLOCK_STEP_NS
            worst = max(
                worst, units - limit.capacity - Fraction(limit.limit, limit.window_ns) * time_ns
            )
    return ceil(worst)


def _excess_of_log(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """In any interval that is shorter than the window: at most the limit."""
    worst = 0
    for first, begun in enumerate(ordered):
        ends_ns = begun.sent_ns + limit.window_ns - CLOCK_STEP_NS
        inside = sum(each.units for each in ordered[first:] if each.told_ns < ends_ns)
        worst = max(worst, inside - limit.limit)
    return worst


def _windows(limit: Limit, ordered: Sequence[Admitted]) -> dict[int, int]:
    """The units that were admitted in each window for certain, by its number since the epoch."""
    windows: dict[int, int] = {}
    for each in ordered:
        number = each.sent_ns // limit.window_ns
        if number == (each.told_ns + CLOCK_STEP_NS) // limit.window_ns:
            windows[number] = windows.get(number, 0) + each.units
    return windows


def _excess_of_windows(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """In every window aligned to the epoch: at most the limit."""
    return max((units - limit.limit for units in _windows(limit, ordered).values()), default=0)


def _excess_of_counter(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """At each admission: previous × what is left of its window + current <= limit."""
    windows = _windows(limit, ordered)
    worst = 0
    for place, last in enumerate(ordered):
        number, elapsed_ns = divmod(last.told_ns + CLOCK_STEP_NS, limit.window_ns)
        if last.sent_ns // limit.window_ns != number:
            continue  # in which of two windows, nobody knows
        left = Fraction(limit.window_ns - elapsed_ns, limit.window_ns)
        current = last.units + sum(
            each.units
            for each in ordered[:place]
            if each.told_ns <= last.sent_ns and each.sent_ns // limit.window_ns == number
        )
        worst = max(worst, ceil(windows.get(number - 1, 0) * left) + current - limit.limit)
    return worst
