"""Granted units: extra quota on top of a limit, until it is spent or its time is over.

A credit is (units, until_ns). It is drawn on only for what the limit itself has no room for, so
that granting never wastes what refills anyway. One rule serves all five algorithms, because it
asks them nothing but `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tollkeeper.core.model import UNITS_MAX, Limit
from tollkeeper.decide.algorithms import Algorithm, Outcome, State

Credit = tuple[int, int]


def decide(
    algorithm: Algorithm, state: State, credit: Credit, limit: Limit, now_ns: int, cost: int
) -> tuple[State, Credit | None, Outcome]:
    """As the algorithm's `decide`, with `credit` to draw on; the credit left comes back too."""
    units, until_ns = credit
    if now_ns >= until_ns:
        after, outcome = algorithm.decide(state, limit, now_ns, cost)
        return after, None, outcome
    _, look = algorithm.decide(state, limit, now_ns, 0)
    own = min(cost, look.remaining)
    left = units - (cost - own)
    if left >= 0:
        after, outcome = algorithm.decide(state, limit, now_ns, own)
        outcome = outcome._replace(remaining=outcome.remaining + left)
        return after, (left, until_ns) if left else None, outcome
    return state, credit, _denied(algorithm, state, credit, limit, now_ns, cost)


def _denied(
    algorithm: Algorithm, state: State, credit: Credit, limit: Limit, now_ns: int, cost: int
) -> Outcome:
    units, until_ns = credit
    if cost - units <= limit.capacity:
        _, outcome = algorithm.decide(state, limit, now_ns, cost - units)
        if now_ns + outcome.retry_after_ns < until_ns:
            return outcome._replace(remaining=outcome.remaining + units)
    # By the time the rest fits, the credit is over: the limit has to hold the whole cost.
    _, outcome = algorithm.decide(state, limit, now_ns, cost)
    return outcome._replace(remaining=outcome.remaining + units)


def wait_together(
    held: Sequence[tuple[Algorithm, State, Credit | None, Limit]],
    now_ns: int,
    cost: int,
    wait_ns: int,
) -> int:
    """How long until all limits would pass, given that one needs `wait_ns`.

    Others that pass now may lean on a credit that is over by then. So all are asked again as of
    then, and again as of when the slowest of those would pass, until all do. Each round some credit
    is over that was not before. CapacityError when without it the cost can never fit.
    """
    while True:
        for algorithm, state, credit, limit in held:
            then_ns = now_ns + wait_ns
            if credit is None:
                _, outcome = algorithm.decide(state, limit, then_ns, cost)
            else:
                _, _, outcome = decide(algorithm, state, credit, limit, then_ns, cost)
            if not outcome.allowed:
                wait_ns += outcome.retry_after_ns
                break
        else:
            return wait_ns


def granted(credit: Credit | None, units: int, now_ns: int, until_ns: int) -> Credit:
    """`credit` with `units` more, good until the later of both times; a billion at most."""
    if credit is None or now_ns >= credit[1]:
        return min(units, UNITS_MAX), until_ns
    return min(credit[0] + units, UNITS_MAX), max(credit[1], until_ns)
