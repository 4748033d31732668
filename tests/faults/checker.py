"""Verify from the outside that limits held: from the requests, the answers and their times.

The store decides a request at an unknown instant between its sending and its answer. So the checker
reports a broken bound only if every choice of those instants breaks it: a request counts as inside
an interval if it was sent and answered inside the interval.

The store's own decisions must keep the bound in *every* interval, even while the store fails. That
is stronger than the bound in the intervals without degraded answers, where the store makes all
decisions. Decisions by a failure policy are marked as degraded. The tests report by how many units
both kinds together exceed the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from ratekeeper import Limit

# Redis' clock has whole microseconds, so two instants may be this much closer than they seem.
CLOCK_STEP_NS = 1_000


class Admitted(NamedTuple):
    """Units that were admitted at an unknown instant of an interval, by the wall clock."""

    sent_ns: int
    answered_ns: int
    units: int = 1


def excess(limit: Limit, admitted: Iterable[Admitted]) -> int:
    """Return by how many units the worst interval certainly exceeds the bound; 0 if none does."""
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
    """Return the excess over capacity + rate × time, from any request to any later answer."""
    worst = 0  # in units × window_ns: whole numbers are ten times as fast as fractions
    for first, begun in enumerate(ordered):
        units = -limit.capacity
        for each in sorted(ordered[first:], key=lambda one: one.answered_ns):
            units += each.units
            time_ns = each.answered_ns - begun.sent_ns + CLOCK_STEP_NS
            worst = max(worst, units * limit.window_ns - limit.limit * time_ns)
    return -(-worst // limit.window_ns)


def _excess_of_log(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """Return the excess over the limit in any interval shorter than the window."""
    worst = 0
    for first, begun in enumerate(ordered):
        ends_ns = begun.sent_ns + limit.window_ns - CLOCK_STEP_NS
        inside = sum(each.units for each in ordered[first:] if each.answered_ns < ends_ns)
        worst = max(worst, inside - limit.limit)
    return worst


def _windows(limit: Limit, ordered: Sequence[Admitted]) -> dict[int, int]:
    """Return the units certainly admitted in each window, by its number since the epoch."""
    windows: dict[int, int] = {}
    for each in ordered:
        number = each.sent_ns // limit.window_ns
        if number == (each.answered_ns + CLOCK_STEP_NS) // limit.window_ns:
            windows[number] = windows.get(number, 0) + each.units
    return windows


def _excess_of_windows(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """Return the excess over the limit in any window aligned to the epoch."""
    return max((units - limit.limit for units in _windows(limit, ordered).values()), default=0)


def _excess_of_counter(limit: Limit, ordered: Sequence[Admitted]) -> int:
    """Return the excess of previous × the rest of the window + current, at any admission."""
    windows = _windows(limit, ordered)
    worst = 0
    for place, last in enumerate(ordered):
        number, elapsed_ns = divmod(last.answered_ns + CLOCK_STEP_NS, limit.window_ns)
        if last.sent_ns // limit.window_ns != number:
            continue  # it may be in either of two windows
        left = Fraction(limit.window_ns - elapsed_ns, limit.window_ns)
        current = last.units + sum(
            each.units
            for each in ordered[:place]
            if each.answered_ns <= last.sent_ns and each.sent_ns // limit.window_ns == number
        )
        worst = max(worst, ceil(windows.get(number - 1, 0) * left) + current - limit.limit)
    return worst
