"""Check, peek, refund, owe, grant and reset, for every algorithm and store."""

from __future__ import annotations

import pytest

from ratekeeper import AsyncLimiter, CapacityError, Limit, Limiter
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import every_algorithm

pytestmark = every_algorithm


@pytest.fixture
def limit(algorithm: AlgorithmName) -> Limit:
    """Five every ten seconds."""
    return Limit(5, per=10, algorithm=algorithm)


@pytest.fixture
def limiter(limit: Limit, store: LocalStore, clock: SteppedClock) -> Limiter:
    return Limiter(limit, store=store, clock=clock, name="orders")


def test_check_counts_down_and_then_denies(limiter: Limiter) -> None:
    """Five pass, each with one unit less remaining; the sixth is denied."""
    decisions = [limiter.check("k") for _ in range(6)]
    assert [d.allowed for d in decisions] == [True] * 5 + [False]
    assert [d.remaining for d in decisions] == [4, 3, 2, 1, 0, 0]


def test_an_allowed_decision_is_complete(limiter: Limiter, limit: Limit) -> None:
    """It has no wait, a time until the quota is whole, and the limit."""
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
    """It has a wait, at most until the quota is whole, and no delay."""
    limiter.check("k", 5)
    decision = limiter.check("k")
    assert not decision
    assert decision.policy == limit
    assert 0 < decision.retry_after_ns <= decision.reset_after_ns
    assert decision.delay_ns == 0
    assert decision.rule == "orders"
    assert not decision.degraded


def test_a_cost_is_spent_whole_or_not_at_all(limiter: Limiter) -> None:
    """With two units remaining, a cost of three is denied and a cost of two passes."""
    assert limiter.check("k", 3).remaining == 2
    denied = limiter.check("k", 3)
    assert (denied.allowed, denied.remaining) == (False, 2)
    allowed = limiter.check("k", 2)
    assert (allowed.allowed, allowed.remaining) == (True, 0)


def test_a_cost_of_zero_reads_the_quota(limiter: Limiter) -> None:
    """A cost of 0 is always allowed, spends nothing and keeps nothing."""
    assert limiter.check("k", 0).remaining == 5
    assert limiter.stats().states == 0
    limiter.check("k", 5)
    decision = limiter.check("k", 0)
    assert (decision.allowed, decision.remaining) == (True, 0)


def test_a_cost_above_the_capacity_is_an_error(limiter: Limiter, limit: Limit) -> None:
    """No wait would help: check and peek raise CapacityError, and nothing is spent or kept."""
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
    """Any number of peeks leaves the quota and the store unchanged."""
    assert [limiter.peek("k").remaining for _ in range(3)] == [5, 5, 5]
    assert limiter.stats().states == 0
    limiter.check("k", 2)
    assert [limiter.peek("k", 3).remaining for _ in range(3)] == [3, 3, 3]


def test_peek_returns_the_decision_of_check(limiter: Limiter) -> None:
    """Peek allows if check allows; a denial is equal in every field."""
    limiter.check("k", 3)
    assert limiter.peek("k", 2).allowed
    assert limiter.peek("k", 2).retry_after_ns == 0
    peeked = limiter.peek("k", 3)
    assert not peeked.allowed
    assert peeked == limiter.check("k", 3)


def test_retry_after_and_reset_after_are_exact(limiter: Limiter, clock: SteppedClock) -> None:
    """At retry_after the request passes; at reset_after the key equals a new one."""
    limiter.check("k", 5)
    clock.advance(limiter.check("k").retry_after)
    allowed = limiter.check("k")
    assert allowed
    clock.advance(allowed.reset_after)
    assert limiter.peek("k") == limiter.peek("never seen")


def test_refund_returns_units(limiter: Limiter) -> None:
    """With two of four refunded, three remain and three pass."""
    limiter.check("k", 4)
    limiter.refund("k", 2)
    assert limiter.peek("k").remaining == 3
    assert limiter.check("k", 3)
    assert not limiter.check("k")


def test_refund_never_exceeds_an_untouched_quota(limiter: Limiter) -> None:
    """A refund above the spent units leaves a whole quota, and no credit."""
    limiter.check("k", 2)
    limiter.refund("k", 1_000_000)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0
    assert limiter.check("k", 5).remaining == 0


def test_a_full_refund_keeps_nothing(limiter: Limiter) -> None:
    """After a full refund, the key equals a new one."""
    limiter.check("k", 2)
    limiter.check("k", 1)
    limiter.refund("k", 3)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


def test_refund_of_an_unknown_key_keeps_nothing(limiter: Limiter) -> None:
    """There is nothing to refund, and no state is written."""
    limiter.refund("k", 3)
    assert limiter.stats().states == 0
    assert limiter.peek("k").remaining == 5


def test_refund_of_nothing_changes_nothing(limiter: Limiter) -> None:
    """A refund of 0 leaves every field unchanged."""
    limiter.check("k", 3)
    before = limiter.peek("k")
    limiter.refund("k", 0)
    assert limiter.peek("k") == before


def test_a_late_refund_adds_nothing(limiter: Limiter, clock: SteppedClock) -> None:
    """After the quota is whole again, a refund adds nothing to it."""
    clock.advance(limiter.check("k", 5).reset_after)
    limiter.refund("k", 5)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.check("k", 5)
    assert not limiter.check("k")


def test_grant_adds_to_the_quota(limiter: Limiter) -> None:
    """With five units and three granted, eight pass and the ninth is denied."""
    limiter.grant("k", 3)
    assert limiter.peek("k").remaining == 8
    assert [limiter.check("k").remaining for _ in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert not limiter.check("k")


def test_granted_units_are_on_top_of_the_limit(limiter: Limiter) -> None:
    """`limit` is the most that can remain: five, and the granted units that are left."""
    limiter.grant("k", 3)
    decisions = [limiter.peek("k"), *(limiter.check("k") for _ in range(9))]
    assert [each.limit for each in decisions] == [8, 8, 8, 8, 8, 8, 7, 6, 5, 5]
    assert [each.remaining for each in decisions] == [8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    limiter.grant("k", 2)
    denied = limiter.check("k", 3)
    assert (denied.allowed, denied.limit, denied.granted, denied.remaining) == (False, 7, 2, 2)


def test_a_decision_has_the_time_it_was_made_at(limiter: Limiter, clock: SteppedClock) -> None:
    """All verbs, allowed and denied: the waits of a decision count from this time."""
    clock.advance(1_000.25)
    for _ in range(7):
        assert limiter.check("k").decided_ns == clock.now_ns()
        assert limiter.peek("k").decided_ns == clock.now_ns()
        clock.advance(0.5)


def test_grant_lets_a_cost_above_the_capacity_pass(limiter: Limiter) -> None:
    """A cost of capacity + grant passes; one more still raises CapacityError."""
    limiter.grant("k", 3)
    with pytest.raises(CapacityError):
        limiter.check("k", 9)
    assert limiter.check("k", 8).remaining == 0


def test_granted_units_are_spent_last(limiter: Limiter, clock: SteppedClock) -> None:
    """Units that refill are spent first: after a window, all granted units are still available."""
    limiter.grant("k", 3, ttl=1000)
    decision = limiter.check("k", 5)
    assert decision.remaining == 3
    clock.advance(decision.reset_after)
    assert limiter.peek("k").remaining == 8


@pytest.mark.parametrize("spent", [0, 2, 5])
def test_grant_ends_at_exactly_its_ttl(limiter: Limiter, clock: SteppedClock, spent: int) -> None:
    """The units are available until one nanosecond before the ttl, and not at it."""
    limiter.check("k", spent)
    limiter.grant("k", 1_000, ttl=3)
    clock.advance_ns(3 * 10**9 - 1)
    assert limiter.peek("k").remaining >= 1_000
    clock.advance_ns(1)
    assert limiter.peek("k").remaining <= 5


def test_grant_lasts_one_window_by_default(limiter: Limiter, clock: SteppedClock) -> None:
    """The window is ten seconds here."""
    limiter.grant("k", 3)
    clock.advance_ns(10 * 10**9 - 1)
    assert limiter.peek("k").remaining == 8
    clock.advance_ns(1)
    assert limiter.peek("k") == limiter.peek("never seen")


def test_grants_add_up_until_the_later_end(limiter: Limiter, clock: SteppedClock) -> None:
    """Three for 20 s and two for 5 s are five for 20 s. A grant after the end is a new one."""
    limiter.grant("k", 3, ttl=20)
    limiter.grant("k", 2, ttl=5)
    clock.advance(19)
    assert limiter.peek("k").remaining == 10
    clock.advance(1)
    limiter.grant("k", 1, ttl=5)
    assert limiter.peek("k").remaining == 6


def test_a_denial_includes_granted_units(limiter: Limiter) -> None:
    """`remaining` of a denial includes granted units."""
    limiter.check("k", 5)
    limiter.grant("k", 3)
    denied = limiter.check("k", 4)
    assert (denied.allowed, denied.remaining) == (False, 3)
    assert limiter.check("k", 3)


def test_a_grant_that_ends_at_the_retry_time_does_not_count(
    limiter: Limiter, store: LocalStore, limit: Limit
) -> None:
    """For a cost of two, one unit is granted until the other one fits. At that instant the grant
    has ended, so the wait is for both."""
    limiter.check("k", 5)
    until_one_ns = limiter.peek("k", 1).retry_after_ns
    until_two_ns = limiter.peek("k", 2).retry_after_ns
    store.counter([limit], "orders").grant("k", 1, until_one_ns)
    assert limiter.check("k", 2).retry_after_ns == until_two_ns
    store.counter([limit], "orders").grant("k", 1, until_one_ns + 1)
    assert limiter.check("k", 3).retry_after_ns == until_one_ns


def test_a_grant_of_nothing_keeps_nothing(limiter: Limiter) -> None:
    """A key with a grant of 0 units equals a new key and takes no state."""
    limiter.grant("k", 0, ttl=100)
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


def test_refund_does_not_refill_a_grant(limiter: Limiter) -> None:
    """A refund goes to the quota. Granted units stay spent."""
    limiter.grant("k", 3)
    limiter.check("k", 8)
    limiter.refund("k", 8)
    assert limiter.peek("k").remaining == 5


def test_reset_forgets_spent_and_granted_units(limiter: Limiter) -> None:
    """The key equals a new one, and its state in the store is freed."""
    limiter.grant("k", 3)
    limiter.check("k", 7)
    limiter.reset("k")
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


def test_reset_changes_no_other_key(limiter: Limiter) -> None:
    """A reset of one key, known or not, leaves the others unchanged."""
    limiter.check("a", 5)
    limiter.check("b", 4)
    limiter.reset("b")
    limiter.reset("unknown")
    assert not limiter.check("a")
    assert limiter.peek("b").remaining == 5


def test_keys_have_separate_counts(limiter: Limiter) -> None:
    """Units that one key spends are not spent by another."""
    limiter.check("a", 5)
    assert limiter.check("b").remaining == 4
    assert not limiter.check("a")


def test_time_that_stands_still_refills_nothing(limiter: Limiter) -> None:
    """At one instant, repeated checks stay denied with the same wait."""
    limiter.check("k", 5)
    assert len({limiter.check("k") for _ in range(50)}) == 1


def test_a_counter_has_its_limits_and_rule(store: LocalStore, limit: Limit) -> None:
    """A counter has the limits that it was made from, and its decisions have its rule."""
    counter = store.counter([limit], "orders")
    assert list(counter.limits) == [limit]
    assert counter.check("k", 2).rule == counter.peek("k", 1).rule == "orders"
    assert counter.peek("k", 1).remaining == 3


async def test_async_verbs_do_the_same(
    limiter: Limiter, limit: Limit, store: LocalStore, clock: SteppedClock
) -> None:
    """AsyncLimiter on the same store shares the count and returns the same decisions."""
    waiting = AsyncLimiter(limit, store=store, clock=clock, name="orders")
    limiter.check("k", 2)
    assert (await waiting.check("k")).remaining == 2
    await waiting.grant("k", 1)
    assert await waiting.peek("k", 4) == limiter.peek("k", 4)
    await waiting.refund("k", 3)
    assert limiter.peek("k").remaining == 6
    await waiting.reset("k")
    assert limiter.peek("k").remaining == 5
    if hasattr(store, "aclose"):  # its connections belong to this event loop, which ends here
        await store.aclose()


def test_a_charge_in_full_is_owed_and_paid_back(
    limiter: Limiter, limit: Limit, store: LocalStore, clock: SteppedClock
) -> None:
    """Of 12 units, 5 have room; when `retry_after` has passed, nothing is owed any more."""
    counter = store.counter([limit], "orders")
    assert (counter.owe("k", 12), counter.owed("k")) == (0, 7)
    denied = limiter.check("k")
    assert (denied.allowed, denied.remaining) == (False, 0)
    clock.advance_ns(denied.retry_after_ns)
    assert counter.owed("k") == 0
    assert limiter.check("k").allowed
    assert counter.owe("k", 1_000_000) > 999_000
    assert counter.owed("k") == limit.debt_max
    limiter.reset("k")
    assert (counter.owed("k"), limiter.peek("k").remaining) == (0, 5)
