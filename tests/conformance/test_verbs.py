"""What check, peek, refund, grant and reset do, whatever the algorithm and the store."""

from __future__ import annotations

import pytest

from tests.clocks import SteppedClock
from tests.conformance.stores import every_algorithm
from tollkeeper import AsyncLimiter, CapacityError, Limit, Limiter
from tollkeeper.core.model import AlgorithmName
from tollkeeper.decide.store import Store

pytestmark = every_algorithm


@pytest.fixture
def limit(algorithm: AlgorithmName) -> Limit:
    """Five every ten seconds."""
    return Limit(5, per=10, algorithm=algorithm)


@pytest.fixture
def limiter(limit: Limit, store: Store, clock: SteppedClock) -> Limiter:
    return Limiter(limit, store=store, clock=clock, name="orders")


def test_check_counts_down_and_then_denies(limiter: Limiter) -> None:
    """Five pass, each with one less remaining; the sixth is denied."""
    decisions = [limiter.check("k") for _ in range(6)]
    assert [d.allowed for d in decisions] == [True] * 5 + [False]
    assert [d.remaining for d in decisions] == [4, 3, 2, 1, 0, 0]


def test_an_allowed_decision_is_complete(limiter: Limiter, limit: Limit) -> None:
    """Allowed: nothing to wait for, a quota to become whole, and the limit that spoke."""
    decision = limiter.check("k")
    assert decision
    assert decision.limit == 5
    assert decision.policy == limit
    assert decision.retry_after_ns == 0
    assert decision.reset_after_ns > 0
    assert decision.delay_ns == 0
    assert decision.rule == "orders"
    assert not decision.degraded


def test_a_denied_decision_is_complete(limiter: Limiter, limit: Limit) -> None:
    """Denied: a time to wait, never after the quota is whole, and no delay."""
    limiter.check("k", 5)
    decision = limiter.check("k")
    assert not decision
    assert decision.policy == limit
    assert 0 < decision.retry_after_ns <= decision.reset_after_ns
    assert decision.delay_ns == 0
    assert decision.rule == "orders"
    assert not decision.degraded


def test_a_cost_is_spent_whole_or_not_at_all(limiter: Limiter) -> None:
    """With two remaining, three do not pass and two do."""
    assert limiter.check("k", 3).remaining == 2
    denied = limiter.check("k", 3)
    assert (denied.allowed, denied.remaining) == (False, 2)
    allowed = limiter.check("k", 2)
    assert (allowed.allowed, allowed.remaining) == (True, 0)


def test_a_cost_of_nothing_reads_the_quota(limiter: Limiter) -> None:
    """Cost 0 is always allowed, spends nothing and keeps nothing."""
    assert limiter.check("k", 0).remaining == 5
    assert limiter.stats().states == 0
    limiter.check("k", 5)
    decision = limiter.check("k", 0)
    assert (decision.allowed, decision.remaining) == (True, 0)


def test_a_cost_above_the_capacity_is_an_error(limiter: Limiter, limit: Limit) -> None:
    """No wait would help: CapacityError from check and peek, and nothing is spent or kept."""
    for verb in (limiter.check, limiter.peek):
        with pytest.raises(CapacityError) as caught:
            verb("k", 6)
        assert (caught.value.cost, caught.value.limit) == (6, limit)
    assert limiter.stats().states == 0
    limiter.check("k", 2)
    with pytest.raises(CapacityError):
        limiter.check("k", 6)
    assert limiter.peek("k").remaining == 3


def test_peek_spends_and_keeps_nothing(limiter: Limiter) -> None:
    """However often one looks, the quota and the store stay as they were."""
    assert [limiter.peek("k").remaining for _ in range(3)] == [5, 5, 5]
    assert limiter.stats().states == 0
    limiter.check("k", 2)
    assert [limiter.peek("k", 3).remaining for _ in range(3)] == [3, 3, 3]


def test_peek_answers_what_check_would(limiter: Limiter) -> None:
    """Allowed where check allows; where it denies, the same decision in every field."""
    limiter.check("k", 3)
    assert limiter.peek("k", 2).allowed
    assert limiter.peek("k", 2).retry_after_ns == 0
    peeked = limiter.peek("k", 3)
    assert not peeked.allowed
    assert peeked == limiter.check("k", 3)


def test_retry_after_and_reset_after_are_when_they_say(
    limiter: Limiter, clock: SteppedClock
) -> None:
    """At retry_after the request passes; at reset_after the key is as one never seen."""
    limiter.check("k", 5)
    clock.advance(limiter.check("k").retry_after)
    allowed = limiter.check("k")
    assert allowed
    clock.advance(allowed.reset_after)
    assert limiter.peek("k") == limiter.peek("never seen")


def test_refund_gives_back(limiter: Limiter) -> None:
    """Two of four refunded: three remain, and three pass."""
    limiter.check("k", 4)
    limiter.refund("k", 2)
    assert limiter.peek("k").remaining == 3
    assert limiter.check("k", 3)
    assert not limiter.check("k")


def test_refund_never_exceeds_an_untouched_quota(limiter: Limiter) -> None:
    """Refunding more than was spent leaves a fresh key, and no credit beyond."""
    limiter.check("k", 2)
    limiter.refund("k", 1_000_000)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0
    assert limiter.check("k", 5).remaining == 0


def test_refund_of_all_that_was_spent_keeps_nothing(limiter: Limiter) -> None:
    """Given back to the last unit, the key is one never seen."""
    limiter.check("k", 2)
    limiter.check("k", 1)
    limiter.refund("k", 3)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


def test_refund_of_an_unknown_key_keeps_nothing(limiter: Limiter) -> None:
    """There is nothing to give back, and nothing to remember."""
    limiter.refund("k", 3)
    assert limiter.stats().states == 0
    assert limiter.peek("k").remaining == 5


def test_refund_of_nothing_changes_nothing(limiter: Limiter) -> None:
    """Refunding 0 leaves every field as it was."""
    limiter.check("k", 3)
    before = limiter.peek("k")
    limiter.refund("k", 0)
    assert limiter.peek("k") == before


def test_refund_of_another_period_gives_nothing(limiter: Limiter, clock: SteppedClock) -> None:
    """Once the quota is whole again, a late refund adds nothing to it."""
    clock.advance(limiter.check("k", 5).reset_after)
    limiter.refund("k", 5)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.check("k", 5)
    assert not limiter.check("k")


def test_grant_adds_to_the_quota(limiter: Limiter) -> None:
    """Five and three granted make eight, and the ninth is denied."""
    limiter.grant("k", 3)
    assert limiter.peek("k").remaining == 8
    assert [limiter.check("k").remaining for _ in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert not limiter.check("k")


def test_grant_lets_a_cost_above_the_capacity_pass(limiter: Limiter) -> None:
    """Up to capacity + grant; one more is still a CapacityError."""
    limiter.grant("k", 3)
    with pytest.raises(CapacityError):
        limiter.check("k", 9)
    assert limiter.check("k", 8).remaining == 0


def test_grant_is_drawn_on_last(limiter: Limiter, clock: SteppedClock) -> None:
    """What refills anyway goes first: after a window the granted units are all still there."""
    limiter.grant("k", 3, ttl=1000)
    decision = limiter.check("k", 5)
    assert decision.remaining == 3
    clock.advance(decision.reset_after)
    assert limiter.peek("k").remaining == 8


@pytest.mark.parametrize("spent", [0, 2, 5])
def test_grant_ends_at_exactly_its_ttl(limiter: Limiter, clock: SteppedClock, spent: int) -> None:
    """There until one nanosecond before, gone at the ttl."""
    limiter.check("k", spent)
    limiter.grant("k", 1_000, ttl=3)
    clock.advance_ns(3 * 10**9 - 1)
    assert limiter.peek("k").remaining >= 1_000
    clock.advance_ns(1)
    assert limiter.peek("k").remaining <= 5


def test_grant_lasts_one_window_by_default(limiter: Limiter, clock: SteppedClock) -> None:
    """Ten seconds here."""
    limiter.grant("k", 3)
    clock.advance_ns(10 * 10**9 - 1)
    assert limiter.peek("k").remaining == 8
    clock.advance_ns(1)
    assert limiter.peek("k") == limiter.peek("never seen")


def test_grants_add_up_until_the_later_end(limiter: Limiter, clock: SteppedClock) -> None:
    """Three for 20 s and two for 5 s are five for 20 s; one after the end starts anew."""
    limiter.grant("k", 3, ttl=20)
    limiter.grant("k", 2, ttl=5)
    clock.advance(19)
    assert limiter.peek("k").remaining == 10
    clock.advance(1)
    limiter.grant("k", 1, ttl=5)
    assert limiter.peek("k").remaining == 6


def test_grant_counts_in_a_denial(limiter: Limiter) -> None:
    """A denial says how many would pass, granted ones included."""
    limiter.check("k", 5)
    limiter.grant("k", 3)
    denied = limiter.check("k", 4)
    assert (denied.allowed, denied.remaining) == (False, 3)
    assert limiter.check("k", 3)


def test_a_grant_that_ends_as_the_rest_fits_is_no_help(
    limiter: Limiter, store: Store, limit: Limit
) -> None:
    """Two are asked for and one is granted until exactly when the other one fits: at that instant
    the grant is over, so the wait is for both."""
    limiter.check("k", 5)
    until_one_ns = limiter.peek("k", 1).retry_after_ns
    until_two_ns = limiter.peek("k", 2).retry_after_ns
    store.gate([limit], "orders").grant("k", 1, until_one_ns)
    assert limiter.check("k", 2).retry_after_ns == until_two_ns
    store.gate([limit], "orders").grant("k", 1, until_one_ns + 1)
    assert limiter.check("k", 3).retry_after_ns == until_one_ns


def test_a_grant_of_nothing_keeps_nothing(limiter: Limiter) -> None:
    """A key granted 0 units is a fresh key, and takes no place."""
    limiter.grant("k", 0, ttl=100)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


def test_refund_does_not_refill_a_grant(limiter: Limiter) -> None:
    """A refund goes to the quota; what was drawn from the grant is gone."""
    limiter.grant("k", 3)
    limiter.check("k", 8)
    limiter.refund("k", 8)
    assert limiter.peek("k").remaining == 5


def test_reset_forgets_what_was_spent_and_granted(limiter: Limiter) -> None:
    """As a key never seen, and its place in the store is free."""
    limiter.grant("k", 3)
    limiter.check("k", 7)
    limiter.reset("k")
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


def test_reset_touches_no_other_key(limiter: Limiter) -> None:
    """Resetting one key, known or not, leaves the others."""
    limiter.check("a", 5)
    limiter.check("b", 4)
    limiter.reset("b")
    limiter.reset("unknown")
    assert not limiter.check("a")
    assert limiter.peek("b").remaining == 5


def test_keys_are_counted_apart(limiter: Limiter) -> None:
    """One key's spending is nobody else's."""
    limiter.check("a", 5)
    assert limiter.check("b").remaining == 4
    assert not limiter.check("a")


def test_time_that_stands_still_refills_nothing(limiter: Limiter) -> None:
    """However often one asks at one instant, denied stays denied, with the same wait."""
    limiter.check("k", 5)
    assert len({limiter.check("k") for _ in range(50)}) == 1


def test_a_gate_is_its_limits(store: Store, limit: Limit) -> None:
    """A gate shows the limits it was made of, and names its rule in its decisions."""
    gate = store.gate([limit], "orders")
    assert list(gate.limits) == [limit]
    assert gate.check("k", 2).rule == gate.peek("k", 1).rule == "orders"
    assert gate.peek("k", 1).remaining == 3


async def test_async_verbs_do_the_same(
    limiter: Limiter, limit: Limit, store: Store, clock: SteppedClock
) -> None:
    """AsyncLimiter on the same store shares the count and answers the same."""
    waiting = AsyncLimiter(limit, store=store, clock=clock, name="orders")
    limiter.check("k", 2)
    assert (await waiting.check("k")).remaining == 2
    await waiting.grant("k", 1)
    assert await waiting.peek("k", 4) == limiter.peek("k", 4)
    await waiting.refund("k", 3)
    assert limiter.peek("k").remaining == 6
    await waiting.reset("k")
    assert limiter.peek("k").remaining == 5
    if hasattr(store, "aclose"):  # its connections are this event loop's, which ends here
        await store.aclose()
