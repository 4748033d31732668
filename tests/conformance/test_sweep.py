"""Sweeping drops expired states, and no others."""

from __future__ import annotations

import pytest

from ratekeeper import Limit, Limiter
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import StoreFactory, every_algorithm, past_expiry, sweeping_stores

pytestmark = sweeping_stores


@every_algorithm
def test_sweep_drops_expired_states_only(
    algorithm: AlgorithmName, factory: StoreFactory, store: LocalStore, clock: SteppedClock
) -> None:
    """Of three whole quotas and two limited ones, the sweep drops three and counts them."""
    short = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    long = Limiter(Limit(5, per=1000, algorithm=algorithm), store=store, clock=clock)
    decisions = [short.check(key, 5) for key in ("a", "b", "c")]
    long.check("a", 5)
    long.check("d", 5)
    assert store.sweep() == 0
    past_expiry(factory, clock, decisions[0].reset_after_ns)
    assert store.sweep() == 3
    assert store.sweep() == 0
    stats = store.stats()
    assert (stats.states, stats.expired) == (2, 3)
    assert not long.check("a")
    assert not long.check("d")


@every_algorithm
def test_sweep_keeps_a_grant_that_lasts(
    algorithm: AlgorithmName, factory: StoreFactory, store: LocalStore, clock: SteppedClock
) -> None:
    """A key with a whole quota and a grant stays until the grant ends."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    limiter.grant("k", 3, ttl=100)
    clock.advance(limiter.check("k", 5).reset_after)
    assert store.sweep() == 0
    assert limiter.peek("k").remaining == 8
    past_expiry(factory, clock, 100 * 10**9)
    assert store.sweep() > 0
    assert limiter.peek("k").remaining == 5
    assert store.stats().states == 0


@every_algorithm
def test_a_spent_grant_does_not_keep_the_state(
    algorithm: AlgorithmName, factory: StoreFactory, store: LocalStore, clock: SteppedClock
) -> None:
    """Granted for a day and spent at once: the state expires with the quota, not a day later."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    limiter.grant("k", 1, ttl=86_400)
    past_expiry(factory, clock, limiter.check("k", 6).reset_after_ns)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert store.sweep() > 0
    assert store.stats().states == 0


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket", "sliding_window_log"])
def test_a_refund_brings_the_expiry_forward(
    algorithm: AlgorithmName, factory: StoreFactory, store: LocalStore, clock: SteppedClock
) -> None:
    """After a refund the quota is whole sooner, and the state expires then."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    limiter.check("k", 2)
    clock.advance(3)
    limiter.check("k", 3)
    limiter.refund("k", 3)
    past_expiry(factory, clock, limiter.peek("k").reset_after_ns)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert store.sweep() == 1


def test_a_refund_of_a_whole_window_brings_the_expiry_forward(
    factory: StoreFactory, store: LocalStore, clock: SteppedClock
) -> None:
    """With the units of this window refunded, those of the previous one expire at the end of this
    one."""
    limit = Limit(5, per=10, algorithm="sliding_window_counter")
    limiter = Limiter(limit, store=store, clock=clock)
    limiter.check("k", 2)
    clock.advance(10)
    limiter.check("k", 3)
    limiter.refund("k", 3)
    assert limiter.peek("k").reset_after == 10.0
    past_expiry(factory, clock, 10 * 10**9)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert store.sweep() == 1
