"""Sliding window counter: the previous window's count, fading out, plus the current one's.

    counted = previous × (1 − elapsed / window) + current

Two counters approximate a sliding window as if the previous window's requests had come evenly. With
42 in the previous window, 18 in this one, and 15 s of 60 s gone, 42 × 0.75 + 18 = 49.5 are counted.

The state is (last_ns, previous, current): the last admission tells which window `current` is of.
Within one aligned window at most `limit` units are admitted, and around an edge what the
formula gives.
"""

from __future__ import annotations

from tollkeeper.core.errors import CapacityError
from tollkeeper.core.model import Limit
from tollkeeper.decide.algorithms.outcome import Outcome

# (last_ns, previous, current), or None when nothing is counted
State = tuple[int, int, int] | None


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Count `cost` units if the weighted count has room for them."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    window_ns = limit.window_ns
    at_ns, previous, current = _rolled(state, window_ns, now_ns)
    start_ns = at_ns - at_ns % window_ns
    # Up: a request of the previous window counts until it has faded out entirely. Everything
    # else is whole, so rounding this one term rounds the sum.
    faded = -(previous * (start_ns - at_ns + window_ns) // -window_ns)
    room = limit.limit - current - faded
    if cost <= room or cost == 0:
        if cost:
            current += cost
            state = (at_ns, previous, current)
        reset_ns = _whole_at(start_ns, window_ns, previous, current, now_ns) - now_ns
        return state, Outcome(True, max(room - cost, 0), 0, reset_ns, 0)
    need = limit.limit - current - cost
    if need >= 0:
        # In this window, once previous × (window − elapsed) <= need × window; at the latest at
        # the edge, where the previous window is gone and this one counts whole.
        # Down, because it is taken from the window's end: the wait rounds up.
        fits_ns = start_ns + window_ns - need * window_ns // previous
    else:
        # In the next window, where `current` is the one that fades.
        fits_ns = start_ns + 2 * window_ns - (limit.limit - cost) * window_ns // current
    reset_ns = _whole_at(start_ns, window_ns, previous, current, now_ns) - now_ns
    return state, Outcome(False, max(room, 0), fits_ns - now_ns, reset_ns, 0)


def refund(state: State, limit: Limit, now_ns: int, units: int) -> State:
    """Uncount `units`, from the current window first and then from the previous one."""
    if state is None or units == 0:
        return state
    at_ns, previous, current = _rolled(state, limit.window_ns, now_ns)
    from_current = min(current, units)
    current -= from_current
    previous -= min(previous, units - from_current)
    return (at_ns, previous, current) if previous or current else None


def _rolled(state: State, window_ns: int, now_ns: int) -> tuple[int, int, int]:
    """The time that counts, and the two counters as of it."""
    if state is None:
        return now_ns, 0, 0
    last_ns, previous, current = state
    if now_ns <= last_ns:
        return last_ns, previous, current
    windows = now_ns // window_ns - last_ns // window_ns
    if windows == 0:
        return now_ns, previous, current
    return now_ns, current if windows == 1 else 0, 0


def _whole_at(start_ns: int, window_ns: int, previous: int, current: int, now_ns: int) -> int:
    """When nothing is counted any more: a request counts until the end of the next window."""
    if current:
        return start_ns + 2 * window_ns
    return start_ns + window_ns if previous else now_ns
