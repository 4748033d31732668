"""Leaky bucket: requests are served evenly spaced, one every window / limit.

A request pours its cost into a bucket that leaks at limit / window. It is admitted at once, with
the `delay` after which to serve it: the time in which the units before it leak. A request that
would exceed the capacity is denied. So no two units are served closer together than window / limit,
which protects a fragile backend.

The token bucket with the same numbers decides whether a request fits: the units in this bucket are
the units used of that one. This module calls it and adds the delay.

It does not lease: a lease would reserve places in the queue, and other requests would wait behind
requests that may never come.
"""

from __future__ import annotations

from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import token_bucket
from ratekeeper.decide.algorithms.outcome import Outcome, outcome_of

State = token_bucket.State


def decide(state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
    """Queue `cost` units if the bucket has room; the outcome has the delay before serving them."""
    after, outcome = token_bucket.decide(state, limit, now_ns, cost)
    if state is None or not outcome.allowed:
        return after, outcome
    # The time in which the units before this request leak. Rounds up: never too early.
    last_ns = state[0]
    used = token_bucket.level_of(state, limit)
    delay_ns = last_ns - (-used * limit.ns_denominator // limit.micros_numerator) - now_ns
    if delay_ns <= 0:
        return after, outcome
    _, remaining, _, reset_ns, _, charged_ns = outcome
    return after, outcome_of((True, remaining, 0, reset_ns, delay_ns, charged_ns))


refund = token_bucket.refund
lease = token_bucket.lease
give_back = token_bucket.give_back
charge = token_bucket.charge
owe = token_bucket.owe
debt_of = token_bucket.debt_of
reset = token_bucket.reset


def lease_until(state: State, limit: Limit, now_ns: int, lifetime_ns: int) -> int:  # noqa: ARG001 - every algorithm has the same signature
    """Return `now_ns`: no lease can be taken."""
    return now_ns
