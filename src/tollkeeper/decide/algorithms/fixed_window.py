"""Fixed window: one counter for each window, aligned to the epoch.

It is the cheapest algorithm, and the only one that can admit two windows' units around an edge:
`limit` just before it and `limit` just after. Within one aligned window it admits at most `limit`.

The state is (last_ns, count): the last admission, and the count of that time's window.

A lease ends at the window's edge at the latest, so its units are spent in the window that counts
them.
"""

from __future__ import annotations

from tollkeeper.core.errors import CapacityError
from tollkeeper.core.model import Limit
from tollkeeper.decide.algorithms.outcome import Outcome

# (last_ns, count), or None when nothing was counted
State = tuple[int, int] | None


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Count `cost` units if the current window has room for them."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    window_ns = limit.window_ns
    at_ns = now_ns
    count = 0
    if state is not None:
        last_ns, counted = state
        if last_ns > now_ns:
            at_ns = last_ns
        if last_ns // window_ns == at_ns // window_ns:
            count = counted
    window_left_ns = (at_ns // window_ns + 1) * window_ns - now_ns
    if count + cost <= limit.limit or cost == 0:
        if cost:
            count += cost
            state = (at_ns, count)
        remaining = max(limit.limit - count, 0)
        reset_ns = window_left_ns if count else 0
        return state, Outcome(True, remaining, 0, reset_ns, 0, at_ns if cost else None)
    return state, Outcome(False, max(limit.limit - count, 0), window_left_ns, window_left_ns, 0)


def refund(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int | None) -> State:
    """Subtract `units` from the window that they were charged in, if the state is of that window.

    `charged_ns` is the time of the charge; None for the present window.
    """
    if state is None or units == 0:
        return state
    last_ns, count = state
    if charged_ns is None:
        charged_ns = max(now_ns, last_ns)
    if charged_ns // limit.window_ns != last_ns // limit.window_ns:
        return state
    return (last_ns, count - units) if count > units else None


def lease_until(state: tuple[int, ...] | None, limit: Limit, now_ns: int, lifetime_ns: int) -> int:
    """Return when a lease that is taken now ends; `now_ns` if none can be taken."""
    if state is not None and state[0] > now_ns:
        return now_ns
    return min(now_ns + lifetime_ns, (now_ns // limit.window_ns + 1) * limit.window_ns)


def lease(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Count the units of a lease in the current window."""
    return decide(state, limit, now_ns, units)[0]


def give_back(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Subtract unspent units of a lease from the window that it was charged in."""
    return refund(state, limit, now_ns, units, ends_ns - 1)


def charge(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int) -> State:
    """Count units that were admitted at `charged_ns` already, if that is in the present window."""
    last_ns, count = state or (charged_ns, 0)
    window_ns = limit.window_ns
    if charged_ns // window_ns != max(now_ns, last_ns) // window_ns:
        return state
    if last_ns // window_ns != charged_ns // window_ns:
        last_ns, count = charged_ns, 0
    return max(last_ns, charged_ns), max(count, min(count + units, limit.limit))
