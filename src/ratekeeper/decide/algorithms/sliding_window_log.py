"""Sliding window log: exact. At most `limit` units in any window, wherever it starts.

The log holds the time of each of the last `limit` units admitted. A request is allowed if the unit
`limit` admissions before it has left the window, so a decision reads one entry. Counting the
remaining units is a binary search, because the times are sorted. An entry of time t leaves the
window at t + window.

The state is (times, start, end): an array of 8-byte times and the range of it that is live.
Appending reuses the array, so a decision copies nothing. Therefore, if two decisions start from the
same state, only the later result may be used; the state they started from stays valid.

Leased units count as admitted at the end of their lease, the latest time at which a node can spend
them. Until then they are held beside the times (see `holds.py`), because the times of other
requests are earlier: the state is then (times, start, end, holds). The next admission after the end
of a hold logs it. So the times are sorted, and a hold is later than all of them.

A log that owes has its debt in the state too (see `debt.py`), after the holds: a number, and no
entries. When an entry leaves the window, a unit of debt enters the log at that time. So the log is
the beginning of a longer sequence, in which each of the last `limit` entries comes again one window
later, and again, until the debt is used up. It is decided as if the whole sequence were in the log.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import holds as holds_
from ratekeeper.decide.algorithms.holds import Holds
from ratekeeper.decide.algorithms.outcome import Outcome, outcome_of

# (times, start, end)
_Plain = tuple["array[int]", int, int]
_Held = tuple["array[int]", int, int, Holds]
_Owing = tuple["array[int]", int, int, Holds, int]
# With holds while leases are outstanding, with debt while it owes; None when empty
State = _Plain | _Held | _Owing | None

# The expired front of the array is removed when it is longer than the live part, but not if it is
# shorter than this: copying a few entries again and again would cost more than it frees.
_DEAD_ENTRIES_MIN = 64
# Times of leases are whole microseconds, as on Redis.
_STEP_NS = 1_000


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
    if len(state) == 5:
        return _decide_owing(state, limit, now_ns, cost)
    if len(state) == 4:
        return _decide_held(state, limit, now_ns, cost)
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
        return state, outcome_of(
            (False, remaining if remaining > 0 else 0, retry_ns, reset_ns, 0, None)
        )
    if cost == 0:
        return state, Outcome(True, remaining if remaining > 0 else 0, 0, reset_ns, 0)
    after = _append(times, live, end, at_ns, cost)
    reset_ns = at_ns + window_ns - now_ns
    return after, outcome_of((True, remaining - cost, 0, reset_ns, 0, at_ns))


def _append(times: array[int], live: int, end: int, at_ns: int, cost: int) -> _Plain:
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
    if len(state) == 5:
        return _refund_owing(state, limit, now_ns, units, charged_ns)
    holds = state[3] if len(state) == 4 else ()  # what is held stays held
    return _with_holds(_refund(state[:3], limit, now_ns, units, charged_ns), holds)


def _refund(log: _Plain, limit: Limit, now_ns: int, units: int, charged_ns: int | None) -> _Plain:
    times, start, end = log
    if start == end:
        return log
    if charged_ns is None:
        oldest_ns = max(now_ns, times[end - 1]) - limit.window_ns
        start = bisect_right(times, oldest_ns, start, end) + units
        return times, min(start, end), end
    cut = bisect_right(times, charged_ns, start, end)
    kept = max(cut - units, start)
    if cut == end:
        return times, start, kept
    if kept == cut:
        return log
    return times[start:kept] + times[cut:end], 0, kept - start + end - cut


def _refund_owing(
    state: _Owing, limit: Limit, now_ns: int, units: int, charged_ns: int | None
) -> State:
    """Refund debt first, unless units were charged after these.

    The units that were charged last are the last ones of the sequence: debt, and then the newest
    entries. Others are entries, and debt takes their room.
    """
    at_ns = max(now_ns, _last_ns(state))
    times, start, end, holds, debt = _settled(state, limit, at_ns)
    if charged_ns is not None and charged_ns < _last_ns(state):
        left = _refund((times, start, end), limit, now_ns, units, charged_ns)
        return _with_debt((*left, holds), end - start - (left[2] - left[1]), debt, at_ns)
    units, debt = max(units - debt, 0), max(debt - units, 0)
    if charged_ns is None:
        start = min(start + units, end)
    else:
        end = max(end - units, start)
    return _with_debt((times, start, end, holds), 0, debt, at_ns)


def lease_until(state: State, limit: Limit, now_ns: int, lifetime_ns: int) -> int:  # noqa: ARG001 - every algorithm has the same signature
    """Return when a lease that is taken now ends; `now_ns` if none can be taken."""
    return now_ns if state is not None and _last_ns(state) > now_ns else now_ns + lifetime_ns


def lease(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Hold `units` until the lease's end; from then on they are in the log."""
    if state is None:
        return array("q"), 0, 0, ((units, ends_ns),)
    times, start, end, holds = _logged(_settled(state, limit, now_ns)[:4], now_ns)
    return times, start, end, holds_.with_lease(holds, units, ends_ns)


def give_back(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Remove unspent units of a lease: held ones, or if they were logged, as many older ones.

    A lease was logged at its end or later. So while all times are earlier, its units are held.
    """
    if state is None or _last_ns(state) >= ends_ns:
        return refund(state, limit, now_ns, units, ends_ns)
    if len(state) == 3:
        return state
    at_ns = max(now_ns, _last_ns(state))
    times, start, end, holds, debt = _settled(state, limit, at_ns)
    holds, units = holds_.given_back(holds, units, ends_ns)
    return _with_debt((times, start, end, holds), units, debt, at_ns)


def charge(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Log units that were admitted at `charged_ns` already.

    The log then has at most `limit` units. The oldest ones leave it, which no decision reads. If it
    has more, which a higher limit has admitted, it keeps as many.
    """
    if state is None:
        state = (array("q"), 0, 0)
    at_ns = max(charged_ns, _last_ns(state))
    times, start, end, holds, debt = _settled(state, limit, at_ns)
    if debt:
        return state
    times, start, end, holds = _logged((times, start, end, holds), at_ns)
    live = bisect_right(times, at_ns - limit.window_ns, start, end)
    room = max(limit.limit - holds_.total(holds), 0)
    kept = max(room, end - live)
    times, live, end = _append(times, live, end, at_ns, min(units, room))
    return _with_holds((times, max(live, end - kept), end), holds)


def owe(state: State, limit: Limit, now_ns: int, units: int) -> tuple[State, int]:
    """Log units as far as there is room for them; the limit owes the excess.

    Also return the units that the bound forgave.
    """
    if units == 0:
        return state, 0
    at_ns = max(now_ns, _last_ns(state)) if state is not None else now_ns
    times, start, end, holds, debt = _settled(state or (array("q"), 0, 0), limit, at_ns)
    times, start, end, holds = _logged((times, start, end, holds), at_ns)
    start = bisect_right(times, at_ns - limit.window_ns, start, end)
    room = max(limit.limit - (end - start) - holds_.total(holds), 0)
    most = limit.debt_max + min(units, room)
    owed = min(debt + units, most)
    return _with_debt((times, start, end, holds), room, owed, at_ns), debt + units - owed


def debt_of(state: State, limit: Limit, now_ns: int) -> int:
    """Return the units that are owed."""
    return 0 if state is None else _settled(state, limit, max(now_ns, _last_ns(state)))[4]


def reset(state: State, limit: Limit, now_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Forget all units but those that are held.

    Also those whose hold ends at this instant: they are given back as if logged at it.
    """
    if state is None or len(state) == 3:
        return None
    at_ns = max(_last_ns(state), now_ns)
    return _with_holds((array("q"), 0, 0), holds_.live(state[3], at_ns - 1))


def _last_ns(state: _Plain | _Held | _Owing) -> int:
    """Return the last time in the log, 0 if there is none."""
    return state[0][state[2] - 1] if state[2] > state[1] else 0


def _logged(state: _Plain | _Held, at_ns: int) -> _Held:
    """Return the state with the holds that have ended in the log."""
    if len(state) == 3:
        return (*state, ())
    times, start, end, holds = state
    for held, until_ns in holds:
        if until_ns <= at_ns:
            times, start, end = _append(times, start, end, until_ns, held)
    return times, start, end, holds_.live(holds, at_ns)


def _with_holds(log: _Plain, holds: Holds) -> State:
    if holds:
        return (*log, holds)
    return log if log[2] > log[1] else None


def _decide_held(state: _Held, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Decide as without holds, where the held units are the last ones of the log."""
    window_ns = limit.window_ns
    at_ns = max(_last_ns(state), now_ns)
    times, start, end, holds = _logged(state, at_ns)
    live = bisect_right(times, at_ns - window_ns, start, end)
    leaves = times[live:end]
    for held, until_ns in holds:
        leaves.extend(array("q", (until_ns,)) * held)
    remaining = max(limit.limit - len(leaves), 0)
    reset_ns = leaves[-1] + window_ns - now_ns if leaves else 0
    if cost > remaining:
        blocking = leaves[len(leaves) - limit.limit + cost - 1]
        return state, Outcome(False, remaining, blocking + window_ns - now_ns, reset_ns, 0)
    if cost == 0:
        return state, Outcome(True, remaining, 0, reset_ns, 0)
    after = _with_holds(_append(times, live, end, at_ns, cost), holds)
    reset_ns = max(reset_ns, at_ns + window_ns - now_ns)
    return after, Outcome(True, remaining - cost, 0, reset_ns, 0, at_ns)


class _Sequence:
    """The times of all entries of a log that owes, in order, with those that the debt will be.

    They are computed when they are read: a denied check must not cost as much as the log is long.
    """

    def __init__(self, state: _Owing, limit: Limit) -> None:
        self._times, self._start, end, holds, debt = state
        debt = min(debt, limit.debt_max)
        self._window_ns = limit.window_ns
        size, held = end - self._start, holds_.total(holds)
        # If the limit was raised, debt has entered the log with its last entry. If all entries are
        # held, it did so before the first of them ends.
        last_ns = self._times[end - 1] if size else holds[0][1] - limit.window_ns + _STEP_NS
        filled = min(debt, max(limit.limit - size - held, 0))
        self._size = size
        # The entries after the times of the log: where a run of equal ones ends, and its time.
        self._runs = [(size + filled, last_ns)]
        for units, until_ns in holds:
            self._runs.append((self._runs[-1][0] + units, until_ns))
        self._first = size + filled + held
        self._again = min(self._first, limit.limit)
        self._length = size + held + debt

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return self.part(index, index + 1)[0]

    def part(self, start: int, end: int) -> array[int]:
        """Return the times from one place up to another."""
        found = array("q")
        while start < end:
            place, later_ns = start, 0
            if start >= self._first:
                rounds, place = divmod(start - self._first, self._again)
                place += self._first - self._again
                later_ns = (rounds + 1) * self._window_ns
            if place < self._size:
                count = min(self._size - place, end - start)
                times = self._times[self._start + place : self._start + place + count]
                found.extend(time_ns + later_ns for time_ns in times)
            else:
                stop, time_ns = next(run for run in self._runs if place < run[0])
                count = min(stop - place, end - start)
                found.extend(array("q", (time_ns + later_ns,)) * count)
            start += count
        return found


def _settled(state: _Plain | _Held | _Owing, limit: Limit, at_ns: int) -> _Owing:
    """Return the state with the debt that has entered the log by then; unchanged without debt."""
    if len(state) != 5:
        return state[0], state[1], state[2], state[3] if len(state) == 4 else (), 0
    sequence = _Sequence(state, limit)
    due = bisect_right(sequence, at_ns)
    gone = bisect_right(sequence, at_ns - limit.window_ns, 0, due)
    holds = holds_.live(state[3], at_ns)
    debt = len(sequence) - due - holds_.total(holds)
    return sequence.part(gone, due), 0, due - gone, holds, debt


def _with_debt(log: _Held, room: int, debt: int, at_ns: int) -> State:
    """Return the log with as much of the debt as there is room for, and the rest of it."""
    times, start, end, holds = log
    entering = min(room, debt)
    if entering:
        times, start, end = _append(times, start, end, at_ns, entering)
    if debt > entering:
        return times, start, end, holds, debt - entering
    return _with_holds((times, start, end), holds)


def _decide_owing(state: _Owing, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    at_ns = max(now_ns, _last_ns(state))
    sequence = _Sequence(state, limit)
    entries = len(sequence)
    if entries - bisect_right(sequence, at_ns) <= holds_.total(holds_.live(state[3], at_ns)):
        times, start, end, holds, _ = _settled(state, limit, at_ns)
        after, outcome = decide(_with_holds((times, start, end), holds), limit, now_ns, cost)
        return state if outcome.charged_ns is None else after, outcome
    reset_ns = sequence[entries - 1] + limit.window_ns - now_ns
    if not cost:
        return state, Outcome(True, 0, 0, reset_ns, 0)
    # As in `decide`: the entry that must leave the window first.
    blocking = sequence[entries - limit.limit + cost - 1]
    return state, Outcome(False, 0, blocking + limit.window_ns - now_ns, reset_ns, 0)
