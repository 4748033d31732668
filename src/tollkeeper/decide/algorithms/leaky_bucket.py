"""Leaky bucket: requests are served evenly spaced, one every window / limit.

A request pours its cost into a bucket that leaks at limit / window. What is in the bucket ahead of
it is how long it has to wait: it is admitted at once, with the `delay` after which to serve it. One
that would overflow the capacity is denied. Served that way, no two units are closer together than
window / limit, which is what a fragile backend wants.

Whether a request fits is the token bucket's question with the same numbers (what is poured in is
what is used), so this module asks it there and adds the delay.
"""

from __future__ import annotations

from tollkeeper.core.model import MICROS_PER_UNIT, Limit
from tollkeeper.decide.algorithms import token_bucket
from tollkeeper.decide.algorithms.outcome import Outcome

State = token_bucket.State


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Queue `cost` units if the bucket has room; the outcome's delay says when to serve them."""
    after, outcome = token_bucket.decide(state, limit, now_ns, cost)
    if state is None or not outcome.allowed:
        return after, outcome
    # How long what was in the bucket before this request takes to drain. Up: never too early.
    last_ns = state[0]
    used = min(state[1], limit.capacity * MICROS_PER_UNIT)
    delay_ns = last_ns - (-used * limit.ns_denominator // limit.micros_numerator) - now_ns
    if delay_ns <= 0:
        return after, outcome
    return after, Outcome(True, outcome.remaining, 0, outcome.reset_after_ns, delay_ns)


refund = token_bucket.refund
