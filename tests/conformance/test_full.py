"""Capacity: a full store rejects new keys, keeps limited ones, and reclaims expired ones."""

from __future__ import annotations

from itertools import count

import pytest

from ratekeeper import CapacityError, Limit, Limiter, StoreFull
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import (
    OpenStore,
    StoreFactory,
    bounded_stores,
    every_algorithm,
    past_expiry,
)

pytestmark = bounded_stores

CAPACITY = 8


@pytest.fixture
def small(open_store: OpenStore, clock: SteppedClock) -> LocalStore:
    """A store for a handful of states."""
    with open_store(clock, CAPACITY) as store:
        yield store


def strict(store: LocalStore, clock: SteppedClock, limit: Limit, name: str = "") -> Limiter:
    """Return a limiter that raises StoreFull."""
    return Limiter(limit, store=store, clock=clock, name=name, on_failure="raise")


def fill(limiter: Limiter, cost: int = 1) -> list[str]:
    """Check new keys until the store rejects one; return the accepted keys."""
    keys = []
    for number in count():
        try:
            limiter.check(f"filler:{number}", cost)
        except StoreFull:
            return keys
        keys.append(f"filler:{number}")
        assert number < 100 * CAPACITY, "the store is never full"
    raise AssertionError


@every_algorithm
def test_the_requested_capacity_fits(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """At least the requested states fit, at most the reported maximum. The rejection is counted."""
    keys = fill(strict(small, clock, Limit(5, per=10, algorithm=algorithm)))
    stats = small.stats()
    assert CAPACITY <= len(keys) <= stats.states_max
    assert stats.states == len(keys)
    assert stats.refused == 1


@every_algorithm
def test_a_full_store_rejects_new_keys_and_serves_the_others(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """Each new key is rejected and counted. Keys with a state are decided as usual."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    keys = fill(limiter)
    for number in range(3):
        with pytest.raises(StoreFull):
            limiter.check(f"new:{number}")
    assert small.stats().refused == 4
    assert small.stats().states == len(keys)
    assert [limiter.check(key).remaining for key in keys] == [3] * len(keys)


@every_algorithm
def test_no_flood_of_keys_evicts_a_limited_one(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """A denied key stays denied while hundreds of other keys arrive."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    limiter.check("blocked", 5)
    before = limiter.check("blocked")
    fill(limiter)
    for number in range(300):
        with pytest.raises(StoreFull):
            limiter.check(f"flood:{number}", 5)
    assert limiter.check("blocked") == before


@every_algorithm
def test_calls_that_need_no_room_are_not_rejected(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """In a full store, a new key can be peeked, checked at a cost of 0, refunded and reset. A cost
    that never fits is still CapacityError."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    fill(limiter)
    assert limiter.peek("new").remaining == 5
    assert limiter.check("new", 0).remaining == 5
    limiter.refund("new")
    limiter.reset("new")
    with pytest.raises(CapacityError):
        limiter.check("new", 6)
    assert small.stats().refused == 1


@every_algorithm
def test_a_grant_needs_room(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """In a full store, a grant for a new key raises StoreFull, and nothing is kept."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    keys = fill(limiter)
    with pytest.raises(StoreFull):
        limiter.grant("new", 1)
    assert limiter.peek("new").remaining == 5
    assert small.stats().states == len(keys)


@every_algorithm
def test_a_grant_for_a_known_key_is_complete_or_rejected(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """A store may need more room for a grant. It rejects the grant before it changes anything."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    key = fill(limiter)[0]
    try:
        limiter.grant(key, 1)
    except StoreFull:
        assert limiter.peek(key).remaining == 4
    else:
        assert limiter.peek(key).remaining == 5


@every_algorithm
def test_expired_states_make_room_without_a_sweep(
    algorithm: AlgorithmName, factory: StoreFactory, small: LocalStore, clock: SteppedClock
) -> None:
    """After all quotas are whole again, as many new keys fit as before, without a sweep."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    keys = fill(limiter, 5)
    past_expiry(factory, clock, limiter.peek(keys[0]).reset_after_ns)
    assert all(limiter.check(f"new:{key}", 5) for key in keys)
    stats = small.stats()
    assert stats.states == len(keys)
    assert stats.expired == len(keys)


@every_algorithm
def test_states_of_one_limit_make_room_for_another(
    algorithm: AlgorithmName, factory: StoreFactory, small: LocalStore, clock: SteppedClock
) -> None:
    """Expired states of one limiter are reclaimed for the keys of another."""
    first = strict(small, clock, Limit(5, per=10, algorithm=algorithm), "first")
    keys = fill(first)
    past_expiry(factory, clock, first.peek(keys[0]).reset_after_ns)
    second = strict(small, clock, Limit(5, per=20, algorithm=algorithm), "second")
    assert all(second.check(key) for key in keys)


@every_algorithm
def test_reset_makes_room(algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock) -> None:
    """A reset key makes room for exactly one new key."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    keys = fill(limiter)
    limiter.reset(keys[-1])
    assert limiter.check("new")
    with pytest.raises(StoreFull):
        limiter.check("newer")


@every_algorithm
def test_a_stream_of_short_lived_keys_is_never_rejected(
    algorithm: AlgorithmName, factory: StoreFactory, small: LocalStore, clock: SteppedClock
) -> None:
    """Hundreds of keys, a few at a time, pass through a store of a handful."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))
    for number in range(300):
        decision = limiter.check(f"k{number}", 5)
        if number % CAPACITY == CAPACITY - 1:
            past_expiry(factory, clock, decision.reset_after_ns)
    assert small.stats().states <= small.stats().states_max
    assert small.stats().refused == 0


@every_algorithm
def test_repeated_resets_leave_nothing(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """The memory of the store does not grow with keys that were reset."""
    limiter = strict(small, clock, Limit(5, per=10, algorithm=algorithm))

    def churn(times: int) -> int:
        for number in range(times):
            limiter.check(f"k{number}")
            limiter.reset(f"k{number}")
        return small.stats().bytes

    after_some = churn(500)
    assert churn(2_000) <= 2 * after_some
    assert small.stats().states == 0


@every_algorithm
def test_several_limits_find_room_together_or_not_at_all(
    algorithm: AlgorithmName, small: LocalStore, clock: SteppedClock
) -> None:
    """With room for one state, a key with two limits is rejected and takes none."""
    filler = strict(small, clock, Limit(5, per=10, algorithm=algorithm), "filler")
    keys = fill(filler)
    filler.reset(keys[-1])
    two = [Limit(5, per=10 * n, algorithm=algorithm, name=f"n{n}") for n in (1, 2)]
    limiter = Limiter(two, store=small, clock=clock, on_failure="raise")
    with pytest.raises(StoreFull):
        limiter.check("k")
    with pytest.raises(StoreFull):
        limiter.grant("k", 1)
    assert limiter.peek("k").remaining == 5
    assert small.stats().states == len(keys) - 1
    assert filler.check("last")


@pytest.mark.parametrize(("policy", "allowed"), [("open", True), ("closed", False)])
def test_the_failure_policy_answers_for_a_full_store(
    policy: FailurePolicy, allowed: bool, small: LocalStore, clock: SteppedClock
) -> None:
    """`open` allows and `closed` denies, both degraded. Denials have a retry time."""
    limit = Limit(5, per=10)
    fill(strict(small, clock, limit))
    decision = Limiter(limit, store=small, clock=clock, on_failure=policy).check("new")
    assert decision.allowed is allowed
    assert decision.degraded
    assert decision.remaining == 0
    assert (decision.retry_after > 0) is not allowed


def test_the_failure_policy_does_not_affect_keys_with_a_state(
    small: LocalStore, clock: SteppedClock
) -> None:
    """The store decides them under any policy."""
    limit = Limit(5, per=10)
    keys = fill(strict(small, clock, limit))
    open_limiter = Limiter(limit, store=small, clock=clock, on_failure="open")
    decisions = [open_limiter.check(keys[0]) for _ in range(5)]
    assert [d.allowed for d in decisions] == [True] * 4 + [False]
    assert not any(d.degraded for d in decisions)


def test_the_statistics_of_an_empty_store(small: LocalStore) -> None:
    """No states, none expired, none rejected, and the requested capacity."""
    stats = small.stats()
    assert (stats.states, stats.expired, stats.refused) == (0, 0, 0)
    assert stats.states_max >= CAPACITY
    assert stats.fullness == 0.0
    assert stats.bytes >= 0


def test_fullness_is_the_part_in_use(small: LocalStore, clock: SteppedClock) -> None:
    """It grows from 0.0 towards 1.0 with each key, and bytes are counted."""
    limiter = strict(small, clock, Limit(5, per=10))
    limiter.check("k")
    stats = limiter.stats()
    assert stats.fullness == 1 / stats.states_max
    assert stats.bytes > 0
    fill(limiter)
    assert 0.5 < small.stats().fullness <= 1.0


def test_states_never_exceed_their_maximum(
    factory: StoreFactory, small: LocalStore, clock: SteppedClock
) -> None:
    """This also holds if the reclaimed state belongs to the key that needs room."""
    limits = [Limit(1, per=10 * n, algorithm="fixed_window") for n in (1, 10)]
    limiter = Limiter(limits, store=small, clock=clock, on_failure="raise")
    limiter.check("k")
    past_expiry(factory, clock, 10 * 10**9)
    assert small.sweep() == 1  # the state of the shorter window; that of the longer one stays
    fill(strict(small, clock, Limit(1, per=10_000, algorithm="fixed_window"), "filler"))
    clock.advance(200)
    try:
        assert limiter.check("k")
    except StoreFull:
        assert limiter.peek("k").remaining == 1
    assert small.stats().states <= small.stats().states_max


def test_a_key_with_many_limits_leaves_the_room_to_others(
    open_store: OpenStore, clock: SteppedClock
) -> None:
    """2,000 limiters of one key find room, as do the keys of another limiter."""
    with open_store(clock, 10_000) as store:
        for number in range(2_000):
            assert strict(store, clock, Limit(5, per=3_600), f"n{number}").check("k")
        others = strict(store, clock, Limit(5, per=3_600), "other")
        assert all(others.check(f"user:{number}") for number in range(8_000))
        assert store.stats().states == 10_000


def test_a_key_with_many_limits_of_one_name_leaves_the_room_to_others(
    open_store: OpenStore, clock: SteppedClock
) -> None:
    """As many limits of one name and key fit as a rule can have, and other keys find room."""
    with open_store(clock, 10_000) as store:
        refused = 0
        for seconds in range(1, 3_001):
            try:
                assert strict(store, clock, Limit(5, per=3_600 + seconds), "one").check("k")
            except StoreFull:
                assert seconds > 16
                refused += 1
        stats = store.stats()
        assert (stats.refused, stats.crowded) == (0, refused)
        others = Limiter("5/hour", store=store, clock=clock, name="other", on_failure="closed")
        # One in 65,536 of the keys in the same segment is taken for the crowded one.
        assert sum(bool(others.check(f"user:{number}")) for number in range(6_000)) >= 5_990
