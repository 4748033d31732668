"""Sliding window counter: a fading share of the previous window's count plus the current count.

    counted = previous × (1 − elapsed / window) + current

Two counters approximate a sliding window, as if the previous window's requests had been evenly
spaced. With 42 in the previous window, 18 in this one, and 15 s of 60 s gone, the count is
42 × 0.75 + 18 = 49.5.

The state is (last_ns, previous, current), where last_ns is the last admission and `current` the
count of its window. Within one aligned window at most `limit` units are admitted. Around an edge,
the formula gives the bound.

A lease ends at the window's edge at the latest, so its units are spent in the window that counts
them. They are held as those of a fixed window. In the next window, units can be given back that
were held until the edge.

A limit that owes has its debt in the state too (see `debt.py`), after the holds.
"""

from __future__ import annotations

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import fixed_window
from ratekeeper.decide.algorithms import holds as holds_
from ratekeeper.decide.algorithms.debt import carried, windows_until_room
from ratekeeper.decide.algorithms.holds import Holds
from ratekeeper.decide.algorithms.outcome import Outcome, outcome_of

# (last_ns, previous, current)
_Plain = tuple[int, int, int]
_Held = tuple[int, int, int, Holds]
_Owing = tuple[int, int, int, Holds, int]
# With holds while leases are outstanding, with debt while it owes; None when nothing is counted
State = _Plain | _Held | _Owing | None


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Count `cost` units if the weighted count has room for them."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    if state is not None and len(state) != 3:
        return _decide_more(state, limit, now_ns, cost)
    window_ns = limit.window_ns
    at_ns, previous, current = _aged(state, window_ns, now_ns)
    start_ns = at_ns - at_ns % window_ns
    # Rounds up: a request of the previous window counts until its share is zero. All other terms
    # are whole, so rounding this one rounds the sum.
    faded = -(previous * (start_ns - at_ns + window_ns) // -window_ns)
    room = limit.limit - current - faded
    if cost <= room or cost == 0:
        if cost:
            current += cost
            state = (at_ns, previous, current)
        reset_ns = _whole_at(start_ns, window_ns, previous, current, now_ns) - now_ns
        charged_ns = at_ns if cost else None
        return state, outcome_of((True, max(room - cost, 0), 0, reset_ns, 0, charged_ns))
    need = limit.limit - current - cost
    if need >= 0:
        # It fits in this window, once previous × (window − elapsed) <= need × window; at the latest
        # at the edge, where the previous window no longer counts. The division rounds down because
        # its result is subtracted from the window's end: the wait rounds up.
        fits_ns = start_ns + window_ns - need * window_ns // previous
    else:
        # It fits in the next window, in which `current` fades.
        fits_ns = start_ns + 2 * window_ns - (limit.limit - cost) * window_ns // current
    reset_ns = _whole_at(start_ns, window_ns, previous, current, now_ns) - now_ns
    return state, outcome_of((False, max(room, 0), fits_ns - now_ns, reset_ns, 0, None))


def _decide_more(
    state: _Held | _Owing, limit: Limit, now_ns: int, cost: int
) -> tuple[State, Outcome]:
    """Decide as without holds, if nothing is owed. A charge drops the holds that have ended."""
    last_ns, previous, current, holds, debt = _rolled(state, limit, now_ns)
    if debt:
        return state, _owing(limit, last_ns, current, debt, now_ns, cost)
    after, outcome = decide((last_ns, previous, current), limit, now_ns, cost)
    if after is None or outcome.charged_ns is None:
        return state, outcome
    return _with_more(*after[:3], holds_.live(holds, outcome.charged_ns)), outcome


def _owing(limit: Limit, at_ns: int, current: int, debt: int, now_ns: int, cost: int) -> Outcome:
    """Return the outcome while the current window is full and debt is left."""
    window_ns = limit.window_ns
    start_ns = at_ns - at_ns % window_ns
    whole_ns = start_ns + (windows_until_room(limit, debt, 0) + 2) * window_ns
    if not cost:
        return Outcome(True, 0, 0, whole_ns - now_ns, 0)
    # The cost fits in the first window in which it fits beside the debt, once the window before
    # has faded. Rounds down as in `decide`, so the wait rounds up.
    windows = windows_until_room(limit, debt, cost)
    faded, left = carried(limit, current, debt, windows - 1)
    current, _ = carried(limit, faded, left, 1)
    need = limit.limit - current - cost
    fits_ns = start_ns + (windows + 1) * window_ns - need * window_ns // faded
    return Outcome(False, 0, fits_ns - now_ns, whole_ns - now_ns, 0)


def _with_more(last_ns: int, previous: int, current: int, holds: Holds, debt: int = 0) -> State:
    if debt:
        return last_ns, previous, current, holds, debt
    if holds:
        return last_ns, previous, current, holds
    return (last_ns, previous, current) if previous or current else None


def refund(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int | None) -> State:
    """Subtract `units` from the window that they were charged in, while that window counts.

    `charged_ns` is the time of the charge; None for the current window. Debt is subtracted before
    the units of the current window. What is held stays held.
    """
    if state is None or units == 0:
        return state
    window_ns = limit.window_ns
    at_ns, previous, current, holds, debt = _rolled(state, limit, now_ns)
    ago = 0 if charged_ns is None else at_ns // window_ns - charged_ns // window_ns
    if ago == 0:
        current, debt = max(current - max(units - debt, 0), 0), max(debt - units, 0)
    elif ago == 1:
        previous = max(previous - units, 0)
    else:
        return state
    return _with_more(at_ns, previous, current, holds, debt)


# A lease of either kind of window ends at its edge.
lease_until = fixed_window.lease_until


def lease(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Count the units of a lease in the current window, and hold them for a reset."""
    after, _ = decide(state, limit, now_ns, units)
    assert after is not None  # noqa: S101 - ours: a lease has units
    at_ns, previous, current, holds, debt = _rolled(after, limit, now_ns)
    until_ns = holds_.until_edge(limit, ends_ns)
    return _with_more(at_ns, previous, current, holds_.with_lease(holds, units, until_ns), debt)


def give_back(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Subtract unspent units of a lease from the window that it was charged in.

    In the current window they are held. If that window is the previous one, they were held until
    its end, so that no reset has forgotten them.
    """
    if state is None or now_ns >= ends_ns + holds_.lease_ns_max(limit):
        return state
    at_ns = max(now_ns, state[0])
    if at_ns // limit.window_ns != (ends_ns - 1) // limit.window_ns:
        return refund(state, limit, now_ns, units, ends_ns - 1)
    if len(state) == 3:
        return state
    at_ns, previous, current, holds, debt = _rolled(state, limit, now_ns)
    holds, units = holds_.given_back(holds, units, holds_.until_edge(limit, ends_ns))
    current, debt = max(current - max(units - debt, 0), 0), max(debt - units, 0)
    return _with_more(at_ns, previous, current, holds, debt)


def charge(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int) -> State:
    """Count units that were admitted at `charged_ns` already, in the window of that time."""
    window_ns = limit.window_ns
    at_ns, previous, current, holds, debt = _rolled(state, limit, now_ns)
    ago = at_ns // window_ns - charged_ns // window_ns
    if ago > 1:
        return state
    if ago == 1:
        previous = max(previous, min(previous + units, limit.limit))
    else:
        current = max(current, min(current + units, limit.limit))
    return _with_more(at_ns, previous, current, holds_.live(holds, at_ns), debt)


def owe(state: State, limit: Limit, now_ns: int, units: int) -> tuple[State, int]:
    """Charge units whether or not there is room for them; the limit owes the excess.

    Also return the units that the bound forgave.
    """
    at_ns, previous, current, holds, debt = _rolled(state, limit, now_ns)
    current, debt = carried(limit, current, debt + units, 0)
    owed = min(debt, limit.debt_max)
    after = _with_more(at_ns, previous, current, holds_.live(holds, at_ns), owed)
    return after, debt - owed


def debt_of(state: State, limit: Limit, now_ns: int) -> int:
    """Return the units that are owed."""
    return _rolled(state, limit, now_ns)[4]


def reset(state: State, limit: Limit, now_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Forget all units but those that are held: a node may still spend them, or give them back."""
    if state is None or len(state) == 3:
        return None
    at_ns = max(now_ns, state[0])
    holds = holds_.live(state[3], at_ns)
    return (at_ns, 0, holds_.total(holds), holds) if holds else None


def _rolled(state: State, limit: Limit, now_ns: int) -> _Owing:
    """Return the state at that time: the counters, the holds and the debt."""
    holds = state[3] if state is not None and len(state) != 3 else ()
    if state is None or len(state) != 5:
        return *_aged(state, limit.window_ns, now_ns), holds, 0
    at_ns, previous, current = state[0], state[1], state[2]
    debt = min(state[4], limit.debt_max)
    windows = max(now_ns, at_ns) // limit.window_ns - at_ns // limit.window_ns
    if windows:
        previous, left = carried(limit, current, debt, windows - 1)
        current, debt = carried(limit, previous, left, 1)
    else:
        current, debt = carried(limit, current, debt, 0)
    return max(now_ns, at_ns), previous, current, holds, debt


def _aged(state: State, window_ns: int, now_ns: int) -> tuple[int, int, int]:
    """Return the time to use (now, or the state's if later) and the two counters at that time."""
    if state is None:
        return now_ns, 0, 0
    last_ns, previous, current = state[:3]
    if now_ns <= last_ns:
        return last_ns, previous, current
    windows = now_ns // window_ns - last_ns // window_ns
    if windows == 0:
        return now_ns, previous, current
    return now_ns, current if windows == 1 else 0, 0


def _whole_at(start_ns: int, window_ns: int, previous: int, current: int, now_ns: int) -> int:
    """Return the time from which on the count is 0: a request counts until the next window ends."""
    if current:
        return start_ns + 2 * window_ns
    return start_ns + window_ns if previous else now_ns
