"""Token bucket: a bucket of `capacity` units, refilled at limit / window.

The state is (last_ns, used): the micro-units missing from a full bucket when it was last written.
Other libraries keep one number instead, the time at which the bucket will be full (GCRA). That time
depends on the rate: after a change from 1/s to 10/s, a client that owed 9 s still owes 9 s. The
units *used* do not depend on the limit, so a changed limit applies at once (docs/adr/0001).

A bucket is refilled continuously, or in steps: with `refill_every`, the units of a whole step are
added at its end. A continuous refill is one in steps of a nanosecond, so one formula serves both.
The steps count from the first admission of a full bucket, not from the epoch. So the buckets of
many clients are not all refilled at the same instant, and a client that empties a full bucket waits
for a whole step. The state needs no further number: `last_ns` is the end of the last step that was
refilled. An admission from a full bucket sets it to the admission's own time, as for a new bucket.

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
"""

from __future__ import annotations

from typing import Final

from tollkeeper.core.errors import CapacityError
from tollkeeper.core.model import MICROS_PER_UNIT, Limit
from tollkeeper.decide.algorithms.outcome import Outcome

# Twice as fast as calling Outcome, whose constructor is written in Python.
_new: Final = tuple.__new__

# (last_ns, used_micros), or None when full
State = tuple[int, int] | None


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
        last_ns, used = state
        if used > capacity:  # the capacity was lowered: the bucket is empty, and not in debt
            used = capacity
        used_now = used
        if now_ns > last_ns:
            # Rounds down: neither a part of a step nor a part of a micro-unit can be spent.
            elapsed_ns = (now_ns - last_ns) // step_ns * step_ns
            used_now -= elapsed_ns * numerator // denominator
            if used_now < 0:
                used_now = 0
    cost_micros = cost * MICROS_PER_UNIT
    free = capacity - used_now - cost_micros
    if free >= 0:
        charged_ns = None
        if cost:
            charged_ns = now_ns if now_ns > last_ns else last_ns
            last_ns = last_ns + elapsed_ns if used_now else charged_ns
            used = used_now + cost_micros
            state = (last_ns, used)
        reset_ns = 0
        if used_now or cost:
            # Rounds up to whole steps, as all waits do: -(-a // b) is a / b rounded up.
            reset_ns = last_ns - -used * denominator // (numerator * step_ns) * step_ns - now_ns
        allowed = (True, free // MICROS_PER_UNIT, 0, reset_ns, 0, charged_ns)
        return state, _new(Outcome, allowed)
    # Computed from the written state, not from the refilled one: the refill is rounded once, so the
    # result is the same instant at whatever time it is computed.
    rate = numerator * step_ns
    retry_ns = last_ns - (capacity - used - cost_micros) * denominator // rate * step_ns - now_ns
    reset_ns = last_ns - -used * denominator // rate * step_ns - now_ns
    return state, Outcome(False, (free + cost_micros) // MICROS_PER_UNIT, retry_ns, reset_ns, 0)


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
    refund of the last charge is exact.
    """
    if state is None or units == 0:
        return state
    last_ns, used = state
    capacity = limit.capacity
    micros = min(units, capacity) * MICROS_PER_UNIT
    if charged_ns is not None and charged_ns < last_ns:
        # Steps round up: the bucket may have made one that began before the charge. Micro-units
        # round down, as in each refill that the bucket has made since.
        elapsed_ns = -((charged_ns - last_ns) // limit.refill_step_ns) * limit.refill_step_ns
        micros -= elapsed_ns * limit.micros_numerator // limit.ns_denominator
        if micros <= 0:
            return state
    used = min(used, capacity * MICROS_PER_UNIT) - micros
    return (last_ns, used) if used > 0 else None
