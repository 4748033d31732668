"""A token bucket that is refilled in steps, on every store."""

from __future__ import annotations

from ratekeeper import Limit, Limiter
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock

STEPPED = Limit(100, per=60, refill_every=3)


def test_units_come_in_steps_after_an_exact_wait(store: LocalStore, clock: SteppedClock) -> None:
    """Five units at the end of each three seconds from the first request, and none before."""
    limiter = Limiter(STEPPED, store=store, clock=clock)
    assert limiter.check("k", 100).reset_after == 60
    clock.advance(1)
    assert limiter.check("k").retry_after == 2
    clock.advance_ns(2 * 10**9 - clock.step_ns)
    denied = limiter.check("k", 6)
    assert (denied.remaining, denied.retry_after_ns) == (0, 3 * 10**9 + clock.step_ns)
    clock.advance_ns(clock.step_ns)
    assert limiter.check("k", 5).allowed
    assert limiter.check("k").retry_after == 3
    clock.advance(7)
    assert limiter.peek("k").remaining == 10


def test_a_late_refund_returns_no_step_twice(store: LocalStore, clock: SteppedClock) -> None:
    """Of a charge of 8, a step of 5 that later charges have used is not returned, nor are two."""
    limiter = Limiter(STEPPED, store=store, clock=clock)
    counter = store.counter([STEPPED], "")
    assert limiter.check("k", 92).allowed
    charged_ns = limiter.check("k", 8).charged_ns
    clock.advance(3)
    assert limiter.check("k").remaining == 4
    counter.refund("k", 8, charged_ns)
    assert limiter.peek("k").remaining == 7
    clock.advance(3)
    assert limiter.check("k").remaining == 11
    counter.refund("k", 8, charged_ns)
    assert limiter.peek("k").remaining == 11


def test_a_limit_keeps_its_count_when_its_steps_change(
    store: LocalStore, clock: SteppedClock
) -> None:
    """From steps to a continuous refill and back, no spent unit is forgotten."""
    stepped = Limiter(STEPPED, store=store, clock=clock)
    continuous = Limiter("100/minute", store=store, clock=clock)
    assert stepped.check("k", 100).allowed
    clock.advance(1.5)
    assert (stepped.peek("k").remaining, continuous.peek("k").remaining) == (0, 2)
    assert continuous.check("k", 2).allowed
    clock.advance(3)
    assert stepped.peek("k").remaining == 5
