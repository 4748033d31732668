"""Token bucket: a bucket of `capacity` units, refilled at limit / window.

The state is (last_ns, used): the micro-units missing from a full bucket when it was last written.
Other libraries keep one number instead, the time at which the bucket will be full (GCRA). That time
depends on the rate: after a change from 1/s to 10/s, a client that owed 9 s still owes 9 s. The
units *used* do not depend on the limit, so a changed limit applies at once (docs/adr/0001).

A bucket is refilled continuously, or in steps: with `refill_every`, the units of a whole step are
added at its end. A continuous refill is one in steps of a nanosecond: a time is rounded to whole
nanoseconds first, and then to longer steps if there are any. The steps count from the first
admission of a full bucket, not from the epoch. So the buckets of many clients are not all refilled
at the same instant, and a client that empties a full bucket waits for a whole step. The state needs
no further number: `last_ns` is the end of the last step that was refilled. An admission from a full
bucket sets it to the admission's own time, as for a new bucket.

Between two steps there is at least `refill_every`. So within any interval of T ns there are at most
⌈T / refill_every⌉ steps, and at most capacity + ⌈T / refill_every⌉ × refill_every × limit / window
units are admitted. For a continuous refill that is capacity + T × limit / window.

**Late refunds.** A charge of u units at time c is outstanding until it is refunded. At time t it
can return at most u − refill(c, t) units: refill has returned the others. This needs no further
state. Let `own` be the units that would be in use if only the requests that are never refunded had
been made. Then `used >= own + Σ max(0, u − refill since c)` holds, with the sum over all
outstanding charges. A charge adds the same amount to both sides, a refund subtracts the same
amount. In a time in which x micro-units are refilled, the left side falls by at most ⌊x⌋. The right
side falls by ⌊x⌋ or to 0, because each of its terms does so on its own: ⌊y + x⌋ − ⌊y⌋ >= ⌊x⌋. So
`used` never falls below `own`, and other requests get no more than they would have got without the
refunded ones. With steps, the refill since c is that of the steps since c, counted from c and
rounded up: at least as many as the bucket has made since.

**Leases.** Units that are leased are charged at once, and a node spends them at any time until the
lease ends. Refill must not return units that may still be spent. Therefore the state has `holds`
while leases are outstanding (see `holds.py`), and refill never brings `used` below the held units.
So at every time t

    used(t) >= level(t) + unspent(t)

where `level` is that of a bucket which is charged when requests are admitted, by the authority or
by a node, and `unspent` are the units of leases that a node may still spend. A charge adds to
`used` and `level`, a lease to `used` and `unspent`. A node that spends moves units from `unspent`
to `level`. In refill, `level` falls at the full rate until it is 0, and `used` at the full rate
until it is `held`: then used >= held >= unspent, and level = 0. Units that are given back leave
`used`, `held` and `unspent` alike. So `level` never exceeds the capacity, which is the bound above.
All units of a lease can be given back while they are held, because refill has not touched them. For
that, they are held for one more lifetime after the lease's end. Later, none are given back.

With this floor, the level at t is the highest of three plain buckets: (last_ns, used); the sum of
both groups of holds, full until the first group ends and refilled from then on; and the second
group alone, likewise. So a hold is a plain bucket whose time is in the future, and every outcome is
that of the tightest of the three. With steps the bound holds too. From a time s on, follow the
first bucket if it has at least the unspent units of s; it makes at most ⌈T / refill_every⌉ steps.
Otherwise follow the group that has them: it ends after s, and makes its steps from its end on.

**Debt.** A bucket that owes has its debt in the state too (see `debt.py`), after the holds. Its
first plain bucket is then used + debt below full, and is refilled like any other.
"""

from __future__ import annotations

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import MICROS_PER_UNIT, Limit
from ratekeeper.decide.algorithms import holds as holds_
from ratekeeper.decide.algorithms.holds import Holds
from ratekeeper.decide.algorithms.outcome import Outcome, outcome_of

# (last_ns, used_micros)
_Plain = tuple[int, int]
_Held = tuple[int, int, Holds]
# (last_ns, used_micros, holds, debt_micros)
_Owing = tuple[int, int, Holds, int]
# With holds while leases are outstanding, with debt while it owes; None when full
State = _Plain | _Held | _Owing | None


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Spend `cost` units if the bucket holds them."""
    if cost > limit.capacity:
        raise CapacityError(cost, limit)
    numerator = limit.micros_numerator
    denominator = limit.ns_denominator
    step_ns = limit.refill_step_ns
    capacity = limit.capacity * MICROS_PER_UNIT
    last_ns = now_ns
    used = used_now = elapsed_ns = 0
    if state is not None:
        if len(state) != 2 and state[2]:
            return _decide_held(state, limit, now_ns, cost)
        last_ns, used = state[0], state[1]
        # If the capacity was lowered, the bucket is empty, and not in debt.
        used = used if used < capacity else capacity
        if len(state) == 4:
            used += _debt_of(state, limit)
        used_now = used
        if now_ns > last_ns:
            # Rounds down: neither a part of a step nor a part of a micro-unit can be spent.
            elapsed_ns = now_ns - last_ns
            if step_ns > 1:
                elapsed_ns -= elapsed_ns % step_ns
            used_now -= elapsed_ns * numerator // denominator
            if used_now < 0:
                used_now = 0
    cost_micros = cost * MICROS_PER_UNIT
    free = capacity - used_now - cost_micros
    if free >= 0 or not cost:
        charged_ns = None
        if cost:
            charged_ns = now_ns if now_ns > last_ns else last_ns
            last_ns = last_ns + elapsed_ns if used_now else charged_ns
            used = used_now + cost_micros
            state = (last_ns, used)
        reset_ns = 0
        if used_now or cost:
            # Rounds up to whole steps, as all waits do: -(-a // b) is a / b rounded up.
            whole_ns = -used * denominator // numerator
            if step_ns > 1:
                whole_ns -= whole_ns % step_ns
            reset_ns = last_ns - whole_ns - now_ns
        remaining = free // MICROS_PER_UNIT if free > 0 else 0
        return state, outcome_of((True, remaining, 0, reset_ns, 0, charged_ns))
    # Computed from the written state, not from the refilled one: the refill is rounded once, so the
    # result is the same instant at whatever time it is computed. Both times are negative, so that
    # rounding down makes the waits longer.
    fits_ns = (capacity - used - cost_micros) * denominator // numerator
    whole_ns = -used * denominator // numerator
    if step_ns > 1:
        fits_ns -= fits_ns % step_ns
        whole_ns -= whole_ns % step_ns
    retry_ns = last_ns - fits_ns - now_ns
    reset_ns = last_ns - whole_ns - now_ns
    free += cost_micros
    remaining = free // MICROS_PER_UNIT if free > 0 else 0
    return state, outcome_of((False, remaining, retry_ns, reset_ns, 0, None))


def level_of(state: _Plain | _Held | _Owing, limit: Limit) -> int:
    """Return the micro-units by which the first plain bucket is below full, and those it owes."""
    used = min(state[1], limit.capacity * MICROS_PER_UNIT)
    return used + _debt_of(state, limit)


def _debt_of(state: _Plain | _Held | _Owing, limit: Limit) -> int:
    return min(state[3], limit.debt_max * MICROS_PER_UNIT) if len(state) == 4 else 0


def _with_more(last_ns: int, used: int, holds: Holds, debt: int) -> _Plain | _Held | _Owing:
    if debt:
        return last_ns, used, holds, debt
    return (last_ns, used, holds) if holds else (last_ns, used)


def refund(
    state: State,
    limit: Limit,
    now_ns: int,  # noqa: ARG001 - every algorithm has the same signature
    units: int,
    charged_ns: int | None,
) -> State:
    """Return `units`, without those that were refilled since `charged_ns`, to the bucket.

    `charged_ns` is the time of the charge; with None, all units are returned. The state keeps its
    time: nothing was charged since, so a refund then and a refund now have the same effect. A
    refund of the last charge is exact. Units above the capacity stay used: `limit` may be the
    lower limit of the charge, and a higher one may have admitted others since. Debt is returned
    first. What is held stays held.
    """
    if state is None or units == 0:
        return state
    last_ns, used = state[0], state[1]
    holds = state[2] if len(state) != 2 else ()
    debt = _debt_of(state, limit)
    capacity = limit.capacity
    micros = (units if debt else min(units, capacity)) * MICROS_PER_UNIT
    if charged_ns is not None and charged_ns < last_ns:
        # Steps round up: the bucket may have made one that began before the charge. Micro-units
        # round down, as in each refill that the bucket has made since.
        elapsed_ns = -((charged_ns - last_ns) // limit.refill_step_ns) * limit.refill_step_ns
        micros -= elapsed_ns * limit.micros_numerator // limit.ns_denominator
        if micros <= 0:
            return state
    if charged_ns is None:  # a correction gives room, also if the capacity was lowered
        used = min(used, capacity * MICROS_PER_UNIT)
    used, debt = max(used - max(micros - debt, 0), 0), max(debt - micros, 0)
    return _with_more(last_ns, used, holds, debt) if used or holds else None


def lease_until(state: State, limit: Limit, now_ns: int, lifetime_ns: int) -> int:  # noqa: ARG001 - every algorithm has the same signature
    """Return when a lease that is taken now ends; `now_ns` if none can be taken."""
    return now_ns if state is not None and state[0] > now_ns else now_ns + lifetime_ns


def lease(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Charge `units`, and hold them until one lifetime after the lease's end."""
    after = _charged(state, limit, now_ns, units)
    until_ns = ends_ns + holds_.lease_ns_max(limit)
    holds = holds_.with_lease(after[2] if len(after) != 2 else (), units, until_ns)
    return _with_more(after[0], after[1], holds, _debt_of(after, limit))


def give_back(state: State, limit: Limit, now_ns: int, units: int, ends_ns: int) -> State:
    """Return unspent units of a lease while they are held; none after that.

    A higher limit may have admitted more than the capacity of the lease's limit: that stays used.
    """
    until_ns = ends_ns + holds_.lease_ns_max(limit)
    if state is None or len(state) == 2 or now_ns >= until_ns:
        return state
    holds, units = holds_.given_back(state[2], units, until_ns)
    debt, micros = _debt_of(state, limit), units * MICROS_PER_UNIT
    used, debt = max(state[1] - max(micros - debt, 0), 0), max(debt - micros, 0)
    return _with_more(state[0], used, holds, debt) if used or holds else None


def charge(state: State, limit: Limit, now_ns: int, units: int, charged_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Charge units that were admitted at `charged_ns` already, up to an empty bucket.

    Units above the capacity stay used: a higher limit has admitted them.
    """
    return _charged(state, limit, charged_ns, units, is_late=True)


def owe(state: State, limit: Limit, now_ns: int, units: int) -> tuple[State, int]:
    """Charge units whether or not there is room for them; the bucket owes the excess.

    Also return the units that the bound forgave, rounded up.
    """
    last_ns, level, holds = _drained_now(state, limit, now_ns)
    level += units * MICROS_PER_UNIT
    used = min(level, limit.capacity * MICROS_PER_UNIT)
    debt = min(level - used, limit.debt_max * MICROS_PER_UNIT)
    forgiven = -((used + debt - level) // MICROS_PER_UNIT)
    return _with_more(last_ns, used, holds, debt), forgiven


def debt_of(state: State, limit: Limit, now_ns: int) -> int:
    """Return the units that are owed, rounded up."""
    used = _drained_now(state, limit, now_ns)[1]
    return max(-(limit.capacity + (-used // MICROS_PER_UNIT)), 0)


def reset(state: State, limit: Limit, now_ns: int) -> State:  # noqa: ARG001 - every algorithm has the same signature
    """Forget all units but those that are held: a node may still spend them, or give them back."""
    if state is None or len(state) == 2:
        return None
    at_ns = max(now_ns, state[0])
    holds = holds_.live(state[2], at_ns)
    return (at_ns, holds_.total(holds) * MICROS_PER_UNIT, holds) if holds else None


def _charged(
    state: State, limit: Limit, now_ns: int, units: int, *, is_late: bool = False
) -> _Plain | _Held | _Owing:
    """Return the state after a charge, up to an empty bucket. Holds that ended are gone."""
    micros, capacity = units * MICROS_PER_UNIT, limit.capacity * MICROS_PER_UNIT
    last_ns, used, holds = _drained_now(state, limit, now_ns, is_late=is_late)
    if used > capacity and state is not None and len(state) == 4:
        return state
    return _with_more(last_ns, max(used, min(used + micros, capacity)), holds, 0)


def _drained_now(
    state: State, limit: Limit, now_ns: int, *, is_late: bool = False
) -> tuple[int, int, Holds]:
    """Return the end of the last step, the level of the tightest plain bucket, and the holds."""
    if state is None:
        return now_ns, 0, ()
    capacity = limit.capacity * MICROS_PER_UNIT
    holds = state[2] if len(state) != 2 else ()
    lines = [(state[0], state[1]), *_lines_of(holds)]
    if not is_late:  # the capacity may have been lowered: see `decide`
        lines = [(line_ns, min(used, capacity)) for line_ns, used in lines]
    lines[0] = (state[0], lines[0][1] + _debt_of(state, limit))
    drained = [_drained(line, limit, now_ns) for line in lines]
    used = max(used for _, used in drained)
    at_ns = max(now_ns, state[0])
    return drained[0][0] if used else at_ns, used, holds_.live(holds, at_ns)


def _drained(line: _Plain, limit: Limit, now_ns: int) -> _Plain:
    """Return a plain bucket as of now: the end of its last step, and the micro-units used."""
    last_ns, used = line
    if now_ns > last_ns:
        elapsed_ns = (now_ns - last_ns) // limit.refill_step_ns * limit.refill_step_ns
        used = max(used - elapsed_ns * limit.micros_numerator // limit.ns_denominator, 0)
        last_ns += elapsed_ns
    return last_ns, used


def _lines_of(holds: Holds) -> list[_Plain]:
    """Return the holds as plain buckets."""
    lines: list[_Plain] = []
    units = holds_.total(holds)
    for held, until_ns in holds:
        lines.append((until_ns, units * MICROS_PER_UNIT))
        units -= held
    return lines


def _decide_held(
    state: _Held | _Owing, limit: Limit, now_ns: int, cost: int
) -> tuple[State, Outcome]:
    """Decide by the tightest of the plain buckets that a state with holds consists of."""
    owed = (state[0], state[1], (), state[3]) if len(state) == 4 else state[:2]
    lines: list[_Plain | _Owing] = [owed, *_lines_of(state[2])]
    retry_ns = max(decide(line, limit, now_ns, cost)[1].retry_after_ns for line in lines)
    if retry_ns == 0 and cost:
        after = _charged(state, limit, now_ns, cost)
        _, look = decide(after, limit, now_ns, 0)
        return after, look._replace(charged_ns=max(now_ns, state[0]))
    looks = [decide(line, limit, now_ns, 0)[1] for line in lines]
    remaining = min(look.remaining for look in looks)
    reset_ns = max(look.reset_after_ns for look in looks)
    return state, Outcome(retry_ns == 0, remaining, retry_ns, reset_ns, 0)
