"""Fixed window: one counter for each window, aligned to the epoch.

It is the cheapest algorithm, and the only one that can admit two windows' units around an edge:
`limit` just before it and `limit` just after. Within one aligned window it admits at most `limit`.

The state is (last_ns, count): the last admission, and the count of that time's window.

A lease ends at the window's edge at the latest, so its units are spent in the window that counts
them. The state has `holds` of such units (see `holds.py`), because a reset must not forget them. A
hold ends one lifetime after its lease, or at the window's edge. Until then the units can be given
back. So a lease that a reset has forgotten is never given back.

A limit that owes has its debt in the state too (see `debt.py`), after the holds.
"""

from __future__ import annotations

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import holds as holds_
from ratekeeper.decide.algorithms.debt import carried, windows_until_room
from ratekeeper.decide.algorithms.holds import Holds
from ratekeeper.decide.algorithms.outcome import Outcome, outcome_of

# (last_ns, count)
_Plain = tuple[int, int]
_Held = tuple[int, int, Holds]
_Owing = tuple[int, int, Holds, int]
# With holds while leases are outstanding, with debt while it owes; None when nothing was counted
State = _Plain | _Held | _Owing | None


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Count `cost` units if the current window has room for them."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    window_ns = limit.window_ns
    at_ns = now_ns
    count = 0
    if state is not None:
        if len(state) != 2:
            return _decide_more(state, limit, now_ns, cost)
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
        return state, outcome_of((True, remaining, 0, reset_ns, 0, at_ns if cost else None))
    remaining = max(limit.limit - count, 0)
    return state, outcome_of((False, remaining, window_left_ns, window_left_ns, 0, None))


def _decide_more(
    state: _Held | _Owing, limit: Limit, now_ns: int, cost: int
) -> tuple[State, Outcome]:
    """Decide as without holds, if nothing is owed. A charge drops the holds that have ended."""
    last_ns, count, holds, debt = _carried(state, limit, now_ns)
    if debt:
        window_ns = limit.window_ns
        start_ns = last_ns - last_ns % window_ns - now_ns
        waits = windows_until_room(limit, debt, cost)
        whole_ns = start_ns + (windows_until_room(limit, debt, 0) + 1) * window_ns
        retry_ns = start_ns + waits * window_ns if cost else 0
        return state, Outcome(not cost, 0, retry_ns, whole_ns, 0)
    after, outcome = decide((last_ns, count), limit, now_ns, cost)
    if after is None or outcome.charged_ns is None:
        return state, outcome
    return _with_more(after[0], after[1], holds_.live(holds, outcome.charged_ns)), outcome


def _carried(state: _Plain | _Held | _Owing, limit: Limit, now_ns: int) -> _Owing:
    """Return the state with its debt carried over the edges until now; unchanged without debt."""
    if len(state) != 4:
        return state[0], state[1], state[2] if len(state) == 3 else (), 0
    last_ns, count, holds, debt = state
    at_ns = max(now_ns, last_ns)
    windows = at_ns // limit.window_ns - last_ns // limit.window_ns
    count, debt = carried(limit, count, min(debt, limit.debt_max), windows)
    return at_ns, count, holds, debt


def _with_more(last_ns: int, count: int, holds: Holds, debt: int = 0) -> _Plain | _Held | _Owing:
    if debt:
        return last_ns, count, holds, debt
    return (last_ns, count, holds) if holds else (last_ns, count)


def refund(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int | None) -> State:
    """Subtract `units` from the window that they were charged in, if the state is of that window.

    `charged_ns` is the time of the charge; None for the present window. Debt is subtracted first.
    What is held stays held.
    """
    if state is None or units == 0:
        return state
    last_ns, count, holds, debt = _carried(state, limit, now_ns if charged_ns is None else state[0])
    if charged_ns is None:
        charged_ns = max(now_ns, last_ns)
    if charged_ns // limit.window_ns != last_ns // limit.window_ns:
        return state
    count, debt = max(count - max(units - debt, 0), 0), max(debt - units, 0)
    return _with_more(last_ns, count, holds, debt) if count or holds else None


def lease_until(state: tuple[int, ...] | None, limit: Limit, now_ns: int, lifetime_ns: int) -> int:
    """Return when a lease that is taken now ends; `now_ns` if none can be taken."""
    if state is not None and state[0] > now_ns:
        return now_ns
    return min(now_ns + lifetime_ns, (now_ns // limit.window_ns + 1) * limit.window_ns)


def lease(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Count the units of a lease in the current window, and hold them for a reset."""
    after, _ = decide(state, limit, now_ns, units)
    assert after is not None  # noqa: S101 - ours: a lease has units
    last_ns, count, holds, debt = _carried(after, limit, now_ns)
    until_ns = holds_.until_edge(limit, ends_ns)
    return _with_more(last_ns, count, holds_.with_lease(holds, units, until_ns), debt)


def give_back(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Subtract unspent units of a lease while they are held, if the window still counts."""
    if state is None or len(state) == 2 or now_ns >= ends_ns + holds_.lease_ns_max(limit):
        return state
    if state[0] // limit.window_ns != (ends_ns - 1) // limit.window_ns:
        return state
    last_ns, count, holds, debt = _carried(state, limit, state[0])
    holds, units = holds_.given_back(holds, units, holds_.until_edge(limit, ends_ns))
    count, debt = max(count - max(units - debt, 0), 0), max(debt - units, 0)
    return _with_more(last_ns, count, holds, debt) if count or holds else None


def charge(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int) -> State:
    """Count units that were admitted at `charged_ns` already, if that is in the present window."""
    last_ns, count, holds, debt = _carried(state or (charged_ns, 0), limit, now_ns)
    window_ns = limit.window_ns
    if debt or charged_ns // window_ns != max(now_ns, last_ns) // window_ns:
        return state
    if last_ns // window_ns != charged_ns // window_ns:
        last_ns, count = charged_ns, 0
    last_ns, count = max(last_ns, charged_ns), max(count, min(count + units, limit.limit))
    return _with_more(last_ns, count, holds_.live(holds, last_ns))


def owe(state: State, limit: Limit, now_ns: int, units: int) -> tuple[State, int]:
    """Charge units whether or not there is room for them; the limit owes the excess.

    Also return the units that the bound forgave.
    """
    last_ns, count, holds, debt = _carried(state or (now_ns, 0), limit, now_ns)
    at_ns = max(now_ns, last_ns)
    if last_ns // limit.window_ns != at_ns // limit.window_ns:
        count = 0
    count, debt = carried(limit, count, debt + units, 0)
    owed = min(debt, limit.debt_max)
    return _with_more(at_ns, count, holds_.live(holds, at_ns), owed), debt - owed


def debt_of(state: State, limit: Limit, now_ns: int) -> int:
    """Return the units that are owed."""
    return 0 if state is None else _carried(state, limit, now_ns)[3]


def reset(state: State, limit: Limit, now_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Forget all units but those that are held: a node may still spend them, or give them back."""
    if state is None or len(state) == 2:
        return None
    at_ns = max(now_ns, state[0])
    holds = holds_.live(state[2], at_ns)
    return (at_ns, holds_.total(holds), holds) if holds else None
