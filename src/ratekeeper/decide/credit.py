"""Granted units: extra quota on top of a limit, until it is spent or expires.

A credit is (units, until_ns). A check draws on it only for units that do not fit the limit, so that
a grant never wastes units that refill anyway. The same code serves all five algorithms, because it
needs only their `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratekeeper.core.model import UNITS_MAX, Limit
from ratekeeper.decide.algorithms import Algorithm, LeasingAlgorithm, Outcome, State

Credit = tuple[int, int]


def decide(
    algorithm: Algorithm, state: State, credit: Credit | None, limit: Limit, now_ns: int, cost: int
) -> tuple[State, Credit | None, Outcome]:
    """Decide as the algorithm does, with a credit if there is one; also return its rest."""
    if credit is None or now_ns >= credit[1]:
        after, outcome = algorithm.decide(state, limit, now_ns, cost)
        return after, None, outcome
    units, until_ns = credit
    _, look = algorithm.decide(state, limit, now_ns, 0)
    own = min(cost, look.remaining)
    left = units - (cost - own)
    if left >= 0:
        after, outcome = algorithm.decide(state, limit, now_ns, own)
        outcome = outcome._replace(remaining=outcome.remaining + left)
        return after, (left, until_ns) if left else None, outcome
    return state, credit, _denied(algorithm, state, credit, limit, now_ns, cost)


def owe(
    algorithm: LeasingAlgorithm,
    state: State,
    credit: Credit | None,
    limit: Limit,
    now_ns: int,
    units: int,
) -> tuple[State, Credit | None, int]:
    """Charge units in full. A credit pays those that do not fit the limit, before it owes any.

    Also return the units that the bound of the debt forgave.
    """
    if credit is None or now_ns >= credit[1]:
        after, forgiven = algorithm.owe(state, limit, now_ns, units)
        return after, None, forgiven
    _, look = algorithm.decide(state, limit, now_ns, 0)
    paid = min(max(units - look.remaining, 0), credit[0])
    left = (credit[0] - paid, credit[1]) if credit[0] > paid else None
    if paid == units:
        return state, left, 0
    after, forgiven = algorithm.owe(state, limit, now_ns, units - paid)
    return after, left, forgiven


def _denied(
    algorithm: Algorithm, state: State, credit: Credit, limit: Limit, now_ns: int, cost: int
) -> Outcome:
    units, until_ns = credit
    if cost - units <= limit.capacity:
        _, outcome = algorithm.decide(state, limit, now_ns, cost - units)
        if now_ns + outcome.retry_after_ns < until_ns:
            return outcome._replace(remaining=outcome.remaining + units)
    # The credit expires before the rest fits, so the limit has to hold the whole cost.
    _, outcome = algorithm.decide(state, limit, now_ns, cost)
    return outcome._replace(remaining=outcome.remaining + units)


def wait_together(
    held: Sequence[tuple[Algorithm, State, Credit | None, Limit]],
    now_ns: int,
    cost: int,
    wait_ns: int,
) -> int:
    """Return the time until all limits would pass, given that one of them needs `wait_ns`.

    Another limit that passes now may depend on a credit that expires by then. So all limits are
    decided again at that time, and again when the slowest of them would pass, until all pass. In
    each round another credit has expired. Raises CapacityError if the cost never fits without it.
    """
    while True:
        for algorithm, state, credit, limit in held:
            _, _, outcome = decide(algorithm, state, credit, limit, now_ns + wait_ns, cost)
            if not outcome.allowed:
                wait_ns += outcome.retry_after_ns
                break
        else:
            return wait_ns


def granted(credit: Credit | None, units: int, now_ns: int, until_ns: int) -> Credit:
    """Return `credit` plus `units`, valid until the later of both times; a billion at most."""
    if credit is None or now_ns >= credit[1]:
        return min(units, UNITS_MAX), until_ns
    return min(credit[0] + units, UNITS_MAX), max(credit[1], until_ns)
