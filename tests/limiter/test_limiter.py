"""The verbs of Limiter that return at once; test_waiting.py tests those that wait."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from ratekeeper import (
    CapacityError,
    ConfigError,
    InvalidCost,
    InvalidKey,
    Limit,
    Limiter,
    StoreFull,
)
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.testing import ManualClock

SECOND = 1_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def limiter(clock: ManualClock) -> Limiter:
    """Two at once, one every ten seconds."""
    return Limiter("2/20s", clock=clock, name="orders")


# ------------------------------------------------------------------------------------ creating


@pytest.mark.parametrize(
    "limits",
    [
        "10/s; 100/m",
        ["10/s", "100/m"],
        ("10/s; 100/m",),
        [Limit(10, per=1), "100/m"],
        (Limit(10, per=1), Limit(100, per=60)),
    ],
)
def test_limits_have_several_forms(limits: Any) -> None:
    """A string, a Limit, or several of these."""
    assert Limiter(limits).limits == (Limit(10, per=1), Limit(100, per=60))


def test_one_limit_alone() -> None:
    """A Limit needs no list around it."""
    assert Limiter(Limit(10, per=1)).limits == (Limit(10, per=1),)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"limits": []}, "a limiter has 1 to 16 limits, not 0"),
        ({"limits": [f"1/{n}s" for n in range(1, 18)]}, "a limiter has 1 to 16 limits, not 17"),
        ({"limits": ["5/s", "6/s"]}, "Limit(5, per=1) and Limit(6, per=1) would share one count"),
        ({"limits": ["5/s", 7]}, "a rate is text such as"),
        ({"limits": {"5/s"}}, "limits={'5/s'} is not a rate, a Limit, or a list of them"),
        ({"limits": None}, "limits=None is not a rate, a Limit, or a list of them"),
        ({"limits": "5/fortnight"}, "expected a unit"),
        ({"limits": "5/s", "store": "nowhere://"}, "no known scheme"),
        ({"limits": "5/s", "store": 5}, "store=5 is not a URI or a store"),
        ({"limits": "5/s", "clock": 5}, "clock=5 has no now_ns()"),
        ({"limits": "5/s", "name": "a\tb"}, "name='a\\tb' is not printable text"),
        ({"limits": "5/s", "by": "user"}, "by='user' is not a list"),
        ({"limits": "5/s", "on_failure": "maybe"}, "on_failure='maybe' is not known"),
    ],
    ids=repr,
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], problem: str) -> None:
    """ConfigError describes the mistake, before any store is opened."""
    with pytest.raises(ConfigError) as caught:
        Limiter(**arguments)
    assert problem in str(caught.value)


def test_the_same_limit_twice_is_rejected() -> None:
    """It would be charged once and refunded twice."""
    limit = Limit(5, per=60)
    with pytest.raises(ConfigError, match="would share one count"):
        Limiter([limit, limit])


def test_two_limits_of_one_window_with_names(clock: ManualClock) -> None:
    """Limits with different names have separate counts."""
    limiter = Limiter([Limit(5, per=60), Limit(3, per=60, name="narrow")], clock=clock)
    assert limiter.check("k", 3).policy.name == "narrow"
    assert not limiter.check("k")


def test_a_store_may_be_shared(clock: ManualClock) -> None:
    """Limiters with one name on one store share their counts; other names have separate counts."""
    first = Limiter("2/20s", clock=clock)
    second = Limiter("2/20s", store=first.store, clock=clock)
    other = Limiter("2/20s", store=first.store, clock=clock, name="other")
    first.check("k", 2)
    assert not second.check("k")
    assert other.check("k")


class RecordingStore(PythonMemoryStore):
    """A store that counts calls of `close`."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_closing_closes_the_store_that_the_limiter_opened(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is closed with the limiter, also if its block raises."""
    store = RecordingStore(clock)
    monkeypatch.setattr("ratekeeper.limiter.setup.store_of", lambda uri, clock: store)
    with pytest.raises(RuntimeError), Limiter("2/20s", clock=clock):
        raise RuntimeError
    assert store.closed == 1


def test_closing_leaves_a_shared_store_open(clock: ManualClock) -> None:
    """The application closes a store that it passed in."""
    store = RecordingStore(clock)
    with Limiter("2/20s", store=store, clock=clock) as limiter:
        limiter.check("k")
    limiter.close()
    assert store.closed == 0


def test_stats_are_those_of_the_store(limiter: Limiter) -> None:
    """One key under one limit is one state."""
    limiter.check("k")
    assert limiter.stats().states == 1


# ------------------------------------------------------------------------------------ check, peek


def test_the_example_of_the_readme() -> None:
    """On the real clock, two of two requests pass and the third is denied."""
    limiter = Limiter("2/minute")
    assert [bool(limiter.check("user:42")) for _ in range(3)] == [True, True, False]


def test_a_decision_names_its_limiter(limiter: Limiter) -> None:
    """`decision.rule` is the name of the limiter."""
    assert limiter.check("k").rule == "orders"
    assert limiter.peek("k").rule == "orders"


def test_peek_spends_nothing(limiter: Limiter) -> None:
    """`peek` returns the decision of `check` for any cost, any number of times."""
    for _ in range(5):
        assert limiter.peek("k", 2).allowed
        assert limiter.peek("k").remaining == 2
    limiter.check("k", 2)
    denied = limiter.peek("k", 2)
    assert (denied.allowed, denied.retry_after) == (False, 20.0)


class Four:
    """A number that is not an int, like those of numpy."""

    def __index__(self) -> int:
        return 4


def test_a_cost_is_any_whole_number(clock: ManualClock) -> None:
    """Any object with `__index__` counts as its number. A cost of 0 reads the quota."""
    limiter = Limiter("10/m", clock=clock)
    assert limiter.check("k", Four()).remaining == 6  # type: ignore[arg-type]  # like an integer of numpy
    assert limiter.check("k", 0).remaining == 6


WRONG_COSTS = [-1, -(10**30), 1.0, 0.5, "1", b"1", None, True, False, [], (1,), 1j]


@pytest.mark.parametrize("cost", WRONG_COSTS, ids=repr)
@pytest.mark.parametrize("verb", ["check", "peek", "refund", "grant", "wait"])
def test_invalid_costs_are_rejected(limiter: Limiter, verb: str, cost: Any) -> None:
    """Every verb rejects negative numbers, fractions, text and booleans."""
    with pytest.raises(InvalidCost, match=r"is not a whole number from 0 up; for example"):
        getattr(limiter, verb)("k", cost)
    assert limiter.peek("k").remaining == 2


@pytest.mark.parametrize("key", ["", None, 42, b"k", ["k"], ("a", 1), "x" * 513], ids=repr)
@pytest.mark.parametrize("verb", ["check", "peek", "refund", "reset", "wait"])
def test_invalid_keys_are_rejected(limiter: Limiter, verb: str, key: Any) -> None:
    """Every verb rejects them."""
    with pytest.raises(InvalidKey):
        getattr(limiter, verb)(key)


@pytest.mark.parametrize("verb", ["check", "peek", "wait"])
def test_a_cost_that_can_never_fit_is_an_error(limiter: Limiter, verb: str) -> None:
    """Every verb that checks raises it at once, because no wait would help."""
    with pytest.raises(CapacityError):
        getattr(limiter, verb)("k", 3)


# ------------------------------------------------------------------------------------ refund, grant


def test_refund_never_exceeds_the_quota(limiter: Limiter) -> None:
    """A refund of one returns one of two; a second refund of five does not make seven."""
    limiter.check("k", 2)
    limiter.refund("k")
    assert limiter.peek("k").remaining == 1
    limiter.refund("k", 5)
    assert limiter.peek("k").remaining == 2


def test_refunding_a_denial_returns_nothing(limiter: Limiter) -> None:
    """A denied check has spent nothing; a refund of it must not give room to another."""
    limiter.check("k", 2)
    denied = limiter.check("k")
    limiter.refund("k", 1, denied)
    assert limiter.peek("k").remaining == 0


def test_a_grant_adds_units_until_it_ends(limiter: Limiter, clock: ManualClock) -> None:
    """A grant adds three units for 5 s. At 5 s it has ended."""
    limiter.grant("k", 3, ttl=5)
    assert limiter.peek("k").remaining == 5
    clock.advance(4.999_999_999)
    assert limiter.peek("k").remaining == 5
    clock.advance_ns(1)
    assert limiter.peek("k").remaining == 2


def test_a_grant_lasts_one_window_by_default(limiter: Limiter, clock: ManualClock) -> None:
    """Without a ttl, a grant is valid for one window of each limit."""
    limiter.grant("k", 3)
    clock.advance(19.9)
    assert limiter.peek("k").remaining == 5
    clock.advance(0.1)
    assert limiter.peek("k").remaining == 2


def test_refund_returns_no_granted_units(limiter: Limiter) -> None:
    """Granted units stay spent: of 5 units, only the 2 of the limit are returned."""
    limiter.grant("k", 3)
    limiter.check("k", 5)
    limiter.refund("k", 5)
    assert limiter.peek("k").remaining == 2


def test_grant_lets_a_larger_cost_pass(limiter: Limiter) -> None:
    """With 3 granted units on top of 2, a cost of 5 fits."""
    limiter.grant("k", 3)
    assert limiter.check("k", 5)


YEAR = 366 * 86_400


@pytest.mark.parametrize("ttl", [1e-9, 5, YEAR, timedelta(seconds=5), timedelta(days=366)])
def test_a_ttl_is_a_duration(limiter: Limiter, clock: ManualClock, ttl: Any) -> None:
    """A ttl is seconds or a timedelta, from a nanosecond to 366 days; then the grant ends."""
    limiter.grant("k", 3, ttl=ttl)
    assert limiter.peek("k").remaining == 5
    clock.advance(ttl.total_seconds() if isinstance(ttl, timedelta) else ttl)
    assert limiter.peek("k").remaining == 2


@pytest.mark.parametrize(
    "ttl", [0, 1e-10, YEAR + 1, 10**30, math.inf, timedelta(0), timedelta(days=367)], ids=repr
)
def test_a_ttl_out_of_range_is_rejected(limiter: Limiter, ttl: Any) -> None:
    """A ttl is more than 0 and at most 366 days."""
    with pytest.raises(ConfigError, match="is not between 1 ns and 366 days"):
        limiter.grant("k", 1, ttl=ttl)
    assert limiter.peek("k").remaining == 2


@pytest.mark.parametrize("ttl", [-1, -1e-9, math.nan, True, "5", timedelta(seconds=-1)], ids=repr)
def test_an_invalid_ttl_is_rejected(limiter: Limiter, ttl: Any) -> None:
    """Negative values, NaN and other types are rejected."""
    with pytest.raises(ConfigError, match=r"^ttl=.* is not a length of time"):
        limiter.grant("k", 1, ttl=ttl)
    assert limiter.peek("k").remaining == 2


def test_reset_forgets_spent_and_granted_units(limiter: Limiter) -> None:
    """`reset` forgets spent units and granted units."""
    limiter.grant("k", 3)
    limiter.check("k", 5)
    limiter.grant("k", 3)
    limiter.reset("k")
    assert limiter.peek("k").remaining == 2
    limiter.reset("never seen")


# ------------------------------------------------------------------------------------ failures


@pytest.fixture
def full_store() -> Limiter:
    """A store with room for one state, which is in use."""
    clock = ManualClock()
    limiter = Limiter("2/20s", store=PythonMemoryStore(clock, 1), clock=clock)
    limiter.check("taken", 2)
    return limiter


@pytest.mark.parametrize(
    ("policy", "allowed", "retry"), [("open", True, 0.0), ("closed", False, 1.0)]
)
def test_the_failure_policy_answers_if_the_store_cannot_decide(
    full_store: Limiter, policy: Any, allowed: bool, retry: float
) -> None:
    """`open` allows and `closed` denies, degraded. Keys with a state are decided as usual."""
    limiter = Limiter("2/20s", store=full_store.store, on_failure=policy)
    decision = limiter.check("new")
    assert (decision.allowed, decision.degraded) == (allowed, True)
    assert decision.retry_after == retry
    taken = limiter.check("taken")
    assert (taken.allowed, taken.degraded) == (False, False)


def test_the_failure_policy_may_raise(full_store: Limiter) -> None:
    """`raise` raises the StoreError to the caller."""
    limiter = Limiter("2/20s", store=full_store.store, on_failure="raise")
    with pytest.raises(StoreFull):
        limiter.check("new")


def test_open_is_the_default(full_store: Limiter) -> None:
    """By default, serving requests matters more than limiting them."""
    assert full_store.check("new").allowed


def test_a_grant_without_room_is_an_error(full_store: Limiter) -> None:
    """A grant has no decision to degrade, so the error reaches the caller."""
    with pytest.raises(StoreFull):
        full_store.grant("new", 5)


def test_wait_retries_an_unavailable_store_until_the_timeout(full_store: Limiter) -> None:
    """`closed` denies for a second at a time. The last decision is still degraded."""
    clock = ManualClock()
    limiter = Limiter("2/20s", store=full_store.store, clock=clock, on_failure="closed")
    decision = limiter.wait("new", timeout=3.5)
    assert (decision.allowed, decision.degraded) == (False, True)
    assert clock.now_ns() == 3 * SECOND
