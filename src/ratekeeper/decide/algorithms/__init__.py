"""The six algorithms as pure functions: the specification that every engine follows.

Each module has the same two functions, on integer time and without clock, I/O or lock:

    decide(state, limit, now_ns, cost) → (state, outcome)
    refund(state, limit, now_ns, units, charged_ns) → state

`state` is None for a new key, and for one that no longer differs from a new key. A denied request
and a cost of 0 return the state that they were given. A cost of 0 is always allowed and spends
nothing, so it reads a quota. A cost above the limit's capacity raises CapacityError, because
waiting would not help.

Time never rewinds: each state holds the time of its last change, and an earlier `now_ns` counts as
that time. Times in an outcome are still relative to the given `now_ns`, so a caller whose clock is
behind waits longer.

Every division says how it rounds. Spent units round up and free units round down, so rounding never
admits a request. Waiting times round up, so waiting always suffices.

A refund undoes a charge, and may come late: a request is held open for an hour and then fails. By
then, refill or a window's edge may have returned the units already, and a refund that returned them
again would admit other requests beyond the limit. Therefore a refund carries `charged_ns`, the
`Outcome.charged_ns` of its charge, and returns only what time has not returned. Requests that are
not refunded stay within the algorithm's bound, however late and in whatever order the refunds of
others come (`tests/promises/test_refunds.py`).

With `charged_ns` None, the time of the charge is not known. Such a refund is the correction of an
operator. The windows then take the units from the present window, the log its oldest live entries
(the first to leave the window anyway), and the buckets at most the units in use.

Each module has five more functions, for nodes that share a limit (`decide/leasing.py`):

    lease_until(state, limit, now_ns, lifetime_ns) → ends_ns
    lease(state, limit, now_ns, units, ends_ns) → state
    give_back(state, limit, now_ns, units, ends_ns) → state
    charge(state, limit, now_ns, units, charged_ns) → state
    reset(state, limit, now_ns) → state

`lease` charges units that a node spends at any time until `ends_ns`. The bound of the algorithm
holds for the times at which nodes admit requests, not only for the time of the lease. `give_back`
returns units of a lease that were not spent. `charge` counts units that a node has already
admitted, at `charged_ns`. It does not ask whether they fit, and an excess is forgotten. `reset`
forgets everything but the units that nodes may still spend or give back: these stay used, so that
the bound holds from the reset on.

And one for costs that are known late:

    owe(state, limit, now_ns, units) → (state, forgiven)

It charges units in full. What does not fit is debt, up to a bound (see `debt.py`); the units above
the bound are forgiven. Nothing is admitted until time has paid the debt back; all functions above
know it. `debt_of(state, limit, now_ns)` returns the units that are owed.

`in_flight` counts requests instead of units, and has an object with these functions for each
request, because a request has a name: see there. Nodes do not lease it.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from ratekeeper.core.model import AlgorithmName, Limit
from ratekeeper.decide.algorithms import (
    fixed_window,
    in_flight,
    leaky_bucket,
    sliding_window_counter,
    sliding_window_log,
    token_bucket,
)
from ratekeeper.decide.algorithms.outcome import Outcome

__all__ = ["ALGORITHMS", "Algorithm", "LeasingAlgorithm", "Outcome", "State"]

# Each algorithm knows its own state; to all other code it is opaque.
State = Any


class Algorithm(Protocol):
    """The functions that decide."""

    def decide(
        self, state: State, limit: Limit, now_ns: int, cost: int, /
    ) -> tuple[State, Outcome]: ...

    def refund(
        self, state: State, limit: Limit, now_ns: int, units: int, charged_ns: int | None, /
    ) -> State: ...


class LeasingAlgorithm(Algorithm, Protocol):
    """The functions of every algorithm's module."""

    def lease_until(self, state: State, limit: Limit, now_ns: int, lifetime_ns: int, /) -> int: ...

    def lease(
        self, state: State, limit: Limit, now_ns: int, units: int, ends_ns: int, /
    ) -> State: ...

    def give_back(
        self, state: State, limit: Limit, now_ns: int, units: int, ends_ns: int, /
    ) -> State: ...

    def charge(
        self, state: State, limit: Limit, now_ns: int, units: int, charged_ns: int, /
    ) -> State: ...

    def reset(self, state: State, limit: Limit, now_ns: int, /) -> State: ...

    def owe(self, state: State, limit: Limit, now_ns: int, units: int, /) -> tuple[State, int]: ...

    def debt_of(self, state: State, limit: Limit, now_ns: int, /) -> int: ...


ALGORITHMS: Final[dict[AlgorithmName, LeasingAlgorithm]] = {
    "token_bucket": token_bucket,
    "leaky_bucket": leaky_bucket,
    "sliding_window_log": sliding_window_log,
    "sliding_window_counter": sliding_window_counter,
    "fixed_window": fixed_window,
    "in_flight": in_flight.InFlight(),
}
