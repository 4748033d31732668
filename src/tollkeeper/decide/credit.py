"""Granted units: extra quota on top of a limit, until it is spent or its time is over.

A credit is (units, until_ns). It is drawn on only for what the limit itself has no room for, so
that granting never wastes what refills anyway. One rule serves all five algorithms, because it
asks them nothing but `decide`.
"""

from __future__ import annotations

from tollkeeper.decide.algorithms import Algorithm, Outcome, State
from tollkeeper.model import UNITS_MAX, Limit

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


def granted(credit: Credit | None, units: int, now_ns: int, until_ns: int) -> Credit:
    """`credit` with `units` more, good until the later of both times; a billion at most."""
    if credit is None or now_ns >= credit[1]:
        return min(units, UNITS_MAX), until_ns
    return min(credit[0] + units, UNITS_MAX), max(credit[1], until_ns)
