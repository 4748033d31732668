"""The names of settlements: each is applied once, and they never take the room of states."""

from __future__ import annotations

import pytest

from ratekeeper import Limit, Limiter
from ratekeeper.decide.store import MARKS_MAX, LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, bounded_stores, every_connection

LIMIT = Limit(1_000_000, per=3_600)


@every_connection
def test_a_name_is_settled_once_for_each_key_and_limiter(
    store: LocalStore, clock: SteppedClock
) -> None:
    """The name of one key or limiter is unknown under another."""
    limiters = [Limiter(LIMIT, store=store, clock=clock, name=name) for name in ("a", "b")]
    for limiter in limiters:
        for key in ("ann", "bob"):
            for name in ("one", "two", "one", "two"):
                limiter.settle(key, 0, 10, reservation=name)
            assert limiter.peek(key).remaining == LIMIT.limit - 20


@every_connection
def test_the_last_names_of_a_key_are_remembered(store: LocalStore, clock: SteppedClock) -> None:
    """After MARKS_MAX newer names the oldest is forgotten, and settles again."""
    limiter = Limiter(LIMIT, store=store, clock=clock)
    for number in range(MARKS_MAX + 1):
        limiter.settle("ann", 0, 1, reservation=f"r{number}")
    limiter.settle("bob", 0, 1, reservation="r1")
    for number in (1, MARKS_MAX // 2, MARKS_MAX):
        limiter.settle("ann", 0, 1, reservation=f"r{number}")
    assert limiter.peek("ann").remaining == LIMIT.limit - MARKS_MAX - 1
    limiter.settle("ann", 0, 1, reservation="r0")
    assert limiter.peek("ann").remaining == LIMIT.limit - MARKS_MAX - 2


@bounded_stores
def test_names_are_forgotten_an_hour_after_the_last_one(
    store: LocalStore, clock: SteppedClock
) -> None:
    """Each settlement of the key prolongs the time of its earlier names."""
    limiter = Limiter("1000000 / 7 days", store=store, clock=clock)
    limiter.settle("ann", 0, 10, reservation="one")
    clock.advance(3_599)
    limiter.settle("ann", 0, 10, reservation="two")
    clock.advance(3_599)
    limiter.settle("ann", 0, 10, reservation="one")
    fresh = limiter.peek("bob").remaining
    assert fresh - limiter.peek("ann").remaining <= 20
    clock.advance(1)
    limiter.refund("ann", 20)
    limiter.settle("ann", 0, 10, reservation="one")
    assert fresh - limiter.peek("ann").remaining == 10


@bounded_stores
def test_settlements_of_one_key_leave_the_room_to_others(
    open_store: OpenStore, clock: SteppedClock
) -> None:
    """All of 1,500 settlements apply in a store for 1,000 states, and 998 keys find room."""
    with open_store(clock, 1_000) as store:
        limiter = Limiter(LIMIT, store=store, clock=clock, name="tokens", on_failure="raise")
        for number in range(1_500):
            assert limiter.settle("ann", 0, 1, reservation=f"r{number}").charged == 1
        assert limiter.peek("ann").remaining == LIMIT.limit - 1_500
        assert store.stats().states == 1
        logins = Limiter("5/hour", store=store, clock=clock, name="logins", on_failure="raise")
        assert all(logins.check(f"user:{number}") for number in range(998))


@bounded_stores
def test_names_of_many_keys_make_room_for_states(
    open_store: OpenStore, clock: SteppedClock
) -> None:
    """Each key has settled once. As many states fit as in an empty store."""
    with open_store(clock, 1_000) as store:
        limiter = Limiter(LIMIT, store=store, clock=clock, name="tokens")
        for number in range(1_500):
            limiter.settle(f"user:{number}", 10, 10, reservation="one")
        assert store.stats().states == 0
        logins = Limiter("5/hour", store=store, clock=clock, name="logins", on_failure="raise")
        assert all(logins.check(f"user:{number}") for number in range(1_000))


@pytest.mark.parametrize("capacity", [1, 8])
@bounded_stores
def test_a_settlement_is_applied_although_its_name_finds_no_room(
    capacity: int, open_store: OpenStore, clock: SteppedClock
) -> None:
    """In a full store, a known key is settled all the same."""
    with open_store(clock, capacity) as store:
        limiter = Limiter(LIMIT, store=store, clock=clock, on_failure="open")
        keys = [f"user:{number}" for number in range(100 * capacity)]
        known = next(key for key in keys if not limiter.check(key).degraded)
        for key in keys:
            limiter.check(key)
        before = limiter.peek(known).remaining
        assert not limiter.settle(known, 1, 0, reservation="one").repeated
        assert limiter.peek(known).remaining == before + 1
