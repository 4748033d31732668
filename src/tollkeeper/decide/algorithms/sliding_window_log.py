"""Sliding window log: exact. At most `limit` units in any window, wherever it starts.

The log holds the time of each of the last `limit` units admitted. A request is allowed if the unit
`limit` admissions before it has left the window, so a decision reads one entry. Counting the
remaining units is a binary search, because the times are sorted. An entry of time t leaves the
window at t + window.

The state is (times, start, end): an array of 8-byte times and the range of it that is live.
Appending reuses the array, so a decision copies nothing. Therefore, if two decisions start from the
same state, only the later result may be used; the state they started from stays valid.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from tollkeeper.core.errors import CapacityError
from tollkeeper.core.model import Limit
from tollkeeper.decide.algorithms.outcome import Outcome

# (times, start, end), or None when empty
State = tuple["array[int]", int, int] | None

# The expired front of the array is removed when it is longer than the live part, but not if it is
# shorter than this: copying a few entries again and again would cost more than it frees.
_DEAD_ENTRIES_MIN = 64


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Log `cost` units if the window has room for them."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    window_ns = limit.window_ns
    if state is None:
        if cost == 0:
            return None, Outcome(True, limit.limit, 0, 0, 0)
        times = array("q", (now_ns,)) * cost
        outcome = Outcome(True, limit.limit - cost, 0, window_ns, 0, now_ns)
        return (times, 0, cost), outcome
    times, start, end = state
    last_ns = times[end - 1]
    at_ns = max(last_ns, now_ns)
    live = bisect_right(times, at_ns - window_ns, start, end)
    remaining = limit.limit - (end - live)
    reset_ns = last_ns + window_ns - now_ns if live < end else 0
    if cost > remaining and cost > 0:
        # The unit that must leave the window first: without it, exactly `cost` fit.
        blocking = end - limit.limit + cost - 1
        retry_ns = times[blocking] + window_ns - now_ns
        return state, Outcome(False, remaining if remaining > 0 else 0, retry_ns, reset_ns, 0)
    if cost == 0:
        return state, Outcome(True, remaining if remaining > 0 else 0, 0, reset_ns, 0)
    after = _append(times, live, end, at_ns, cost)
    return after, Outcome(True, remaining - cost, 0, at_ns + window_ns - now_ns, 0, at_ns)


def _append(times: array[int], live: int, end: int, at_ns: int, cost: int) -> State:
    if live > _DEAD_ENTRIES_MIN and live > end - live:
        times, live, end = times[live:end], 0, end - live
    elif len(times) > end:
        del times[end:]  # entries of a decision whose result was not used
    if cost == 1:
        times.append(at_ns)
    else:
        times.extend(array("q", (at_ns,)) * cost)
    return (times, live, end + cost)


def refund(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int | None) -> State:
    """Remove the `units` entries that were logged at `charged_ns`.

    The log does not know which request made an entry, but entries of the same time are alike. If
    some have left the log, the next older entries go in their place: these leave the window no
    later, so that the log admits no more. A newer entry is never removed. Without a time, the
    oldest entries of the window are removed.
    """
    if state is None or units == 0:
        return state
    times, start, end = state
    if charged_ns is None:
        oldest_ns = max(now_ns, times[end - 1]) - limit.window_ns
        start = bisect_right(times, oldest_ns, start, end) + units
        return (times, start, end) if start < end else None
    cut = bisect_right(times, charged_ns, start, end)
    kept = max(cut - units, start)
    if cut == end:
        return (times, start, kept) if kept > start else None
    if kept == cut:
        return state
    return times[start:kept] + times[cut:end], 0, kept - start + end - cut
