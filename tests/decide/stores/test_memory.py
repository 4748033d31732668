"""The internals of the Python memory store: bounded memory, and no limited key is lost.

The conformance suite tests the behaviour that all stores share; this file may use private parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import ns_from_seconds as ns
from ratekeeper.core.errors import StoreFull, StoreUnavailable
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName, Limit
from ratekeeper.decide.stores.memory import _LEFT_OVER_ITEMS_MIN, MemoryCounter, PythonMemoryStore
from ratekeeper.testing import ManualClock

TWO_LIMITS = (Limit(5, per=1), Limit(100, per=60, algorithm="sliding_window_log"))


def _open(*limits: Limit, states_max: int = 1_000) -> tuple[PythonMemoryStore, MemoryCounter]:
    store = PythonMemoryStore(ManualClock(), states_max)
    return store, store.counter(limits or (Limit(5, per=1),), "")


def _clock_of(store: PythonMemoryStore) -> ManualClock:
    assert isinstance(store._clock, ManualClock)
    return store._clock


def _held(store: PythonMemoryStore) -> int:
    """Return the number of entries, counted one by one."""
    return sum(len(table.entries) for table in store._tables.values())


def _check_refund(counter: MemoryCounter, subject: str) -> None:
    counter.check(subject, 1)
    counter.refund(subject, 1, None)


def _check_reset(counter: MemoryCounter, subject: str) -> None:
    counter.check(subject, 1)
    counter.reset(subject)


def _grant_reset(counter: MemoryCounter, subject: str) -> None:
    counter.grant(subject, 1, None)
    counter.reset(subject)


@pytest.mark.parametrize("loop", [_check_refund, _check_reset, _grant_reset])
@pytest.mark.parametrize("lasting", [0, 10, 200])
@pytest.mark.parametrize("limits", [TWO_LIMITS[:1], TWO_LIMITS], ids=["one", "two"])
def test_the_heap_stays_bounded(
    loop: Callable[[MemoryCounter, str], None], lasting: int, limits: tuple[Limit, ...]
) -> None:
    """Keys that come and go leave heap items behind: at most one per key, and 64 more."""
    store, counter = _open(*limits)
    for key in range(lasting):
        counter.check(f"lasting:{key}", 1)
    for turn in range(2_000):
        loop(counter, f"passing:{turn % 3}")
        for table in store._tables.values():
            assert len(table.expiries) <= 2 * len(table.entries) + _LEFT_OVER_ITEMS_MIN + 2
    assert store.stats().states == _held(store) == lasting * len(limits)


def test_stale_heap_items_do_not_hide_expired_entries() -> None:
    """After the heap is rebuilt, every entry is still in it and expires on time."""
    store, counter = _open()
    for turn in range(500):
        _check_reset(counter, "passing")
        if turn % 10 == 0:
            counter.check(f"lasting:{turn}", 1)
    assert store.stats().states == 50
    _clock_of(store).advance(1)
    assert store.sweep() == 50
    assert store.stats().states == _held(store) == 0


def test_each_insert_reclaims_two_expired_entries() -> None:
    """Inserts of new keys alone remove all expired ones."""
    store, counter = _open()
    for key in range(100):
        counter.check(f"old:{key}", 1)
    _clock_of(store).advance(1)
    for key in range(50):
        counter.check(f"new:{key}", 1)
    assert store.stats().states == 50
    assert store.stats().expired == 100


def test_a_key_that_keeps_spending_is_not_reclaimed() -> None:
    """Its heap item is too early. Reclaiming uses the expiry of the entry, not that of the item."""
    store, counter = _open(Limit(5, per=5))
    for _ in range(8):
        counter.check("busy", 1)
        _clock_of(store).advance(0.5)
        assert store.sweep() == 0
    _clock_of(store).advance(5)
    assert store.sweep() == 1


def test_a_full_store_rejects_new_keys_and_evicts_none() -> None:
    """If every key is still limited, a new key is rejected and the others are unchanged."""
    store, counter = _open(states_max=3)
    for key in "abc":
        counter.check(key, 5)
    for attempt in range(1, 11):
        with pytest.raises(StoreFull, match=r"all 3 states .*memory://\?capacity=6"):
            counter.check(f"new:{attempt}", 1)
        assert store.stats().refused == attempt
    assert [counter.check(key, 1).allowed for key in "abc"] == [False] * 3


def test_a_full_store_answers_checks_that_need_no_room() -> None:
    """Known keys, denials, peeks and a cost of 0 need no new state."""
    _, counter = _open(states_max=1)
    counter.check("a", 1)
    assert counter.check("a", 1).allowed
    assert counter.peek("b", 1).allowed
    assert counter.check("b", 0).allowed
    counter.refund("b", 1, None)
    counter.reset("b")


def test_a_full_store_first_drops_expired_entries() -> None:
    """Expired entries of any table make room before a key is rejected."""
    store, counter = _open(states_max=3)
    other = store.counter((Limit(1, per=60),), "other")
    other.check("x", 1)
    counter.check("a", 1)
    counter.check("b", 1)
    _clock_of(store).advance(1)
    assert other.check("y", 1).allowed
    assert store.stats().expired == 2


def test_no_room_for_all_limits_charges_none() -> None:
    """With two limits and room for one state, the check is rejected and charges neither."""
    store, counter = _open(*TWO_LIMITS, states_max=3)
    counter.check("a", 1)
    with pytest.raises(StoreFull):
        counter.check("b", 1)
    assert store.stats().states == _held(store) == 2
    assert counter.peek("b", 1).remaining == 5


def test_no_room_for_a_grant_grants_nothing() -> None:
    """A grant needs a state too."""
    store, counter = _open(states_max=1)
    counter.check("a", 1)
    with pytest.raises(StoreFull):
        counter.grant("b", 1, None)
    assert store.stats().states == _held(store) == 1


def test_a_full_refund_frees_the_state() -> None:
    """A key with a full refund equals a new key, so it needs no state."""
    store, counter = _open(*TWO_LIMITS)
    counter.check("a", 3)
    counter.refund("a", 3, None)
    assert store.stats().states == _held(store) == 0


def test_a_denied_key_takes_no_state() -> None:
    """A request that one limit denies leaves no state in the others."""
    store = PythonMemoryStore(ManualClock(), 10)
    narrow = store.counter((Limit(1, per=60),), "")
    both = store.counter((Limit(1, per=60), Limit(9, per=3_600)), "")
    narrow.check("a", 1)
    assert not both.check("a", 1).allowed
    assert store.stats().states == _held(store) == 1


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_an_entry_expires_exactly_at_reset_after(algorithm: AlgorithmName) -> None:
    """One nanosecond before `reset_after` the sweep keeps the state; at `reset_after` it drops
    it."""
    store, counter = _open(Limit(3, per=7, algorithm=algorithm))
    _clock_of(store).advance(3)
    decision = counter.check("a", 2)
    _clock_of(store).advance_ns(decision.reset_after_ns - 1)
    assert store.sweep() == 0
    _clock_of(store).advance_ns(1)
    assert counter.peek("a", 1).remaining == 3
    assert store.sweep() == 1


def test_a_spent_grant_does_not_keep_its_key() -> None:
    """A grant for a year is spent at once: the key expires with its limit, a second later."""
    store, counter = _open(Limit(1, per=1), states_max=1)
    counter.grant("a", 1, ns(366 * 86_400))
    counter.check("a", 2)
    _clock_of(store).advance(1)
    assert counter.check("b", 1).allowed


def test_a_refund_brings_the_expiry_forward() -> None:
    """A key refunded from 100 units to 1 expires after 36 s, not after an hour."""
    store, counter = _open(Limit(100, per=3_600))
    counter.check("a", 100)
    counter.refund("a", 99, None)
    _clock_of(store).advance(36)
    assert counter.peek("a", 1).remaining == 100
    assert store.sweep() == 1


def test_a_raised_limit_brings_the_expiry_forward() -> None:
    """After a change from 1 to 3,600 an hour, a key that spends again expires in 2 s."""
    store, counter = _open(Limit(1, per=3_600), states_max=1)
    counter.check("a", 1)
    store.counter((Limit(3_600, per=3_600),), "").check("a", 1)
    _clock_of(store).advance(2)
    assert counter.check("b", 1).allowed


def test_never_more_states_than_the_maximum() -> None:
    """Making room may drop the expired entry of the subject itself; its new entry must fit as
    well."""
    store = PythonMemoryStore(ManualClock(), 2)
    store.counter((Limit(1, per=1),), "").check("k", 1)
    store.counter((Limit(1, per=3_600),), "other").check("z", 1)
    _clock_of(store).advance(2)
    with suppress(StoreFull):
        store.counter((Limit(1, per=1), Limit(1, per=60)), "").check("k", 1)
    assert store.stats().states <= 2


def test_closing_forgets_everything() -> None:
    """A closed store is empty, and its statistics show it."""
    store, counter = _open(*TWO_LIMITS)
    counter.check("a", 5)
    store.close()
    assert _held(store) == 0


@pytest.mark.parametrize("limits", [TWO_LIMITS[:1], TWO_LIMITS], ids=["one", "two"])
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("check", (1,)),
        ("check", (0,)),
        ("peek", (1,)),
        ("refund", (1, None)),
        ("refund", (1, 0)),
        ("grant", (1, None)),
        ("grant", (0, None)),
        ("reset", ()),
    ],
)
def test_the_verbs_of_a_closed_store_raise(
    verb: str, arguments: tuple[int | None, ...], limits: tuple[Limit, ...]
) -> None:
    """A counter may outlive its store by mistake. Each verb raises an error and keeps nothing."""
    store, counter = _open(*limits)
    counter.check("a", 5)
    store.close()
    with pytest.raises(StoreUnavailable, match="the store is closed; open another one"):
        getattr(counter, verb)("a", *arguments)
    assert _held(store) == 0
    for call in (
        store.stats,
        store.sweep,
        lambda: store.counter(limits, ""),
    ):
        with pytest.raises(StoreUnavailable, match="the store is closed; open another one"):
            call()


def test_stats_estimate_the_memory() -> None:
    """More states take more bytes: some hundreds each."""
    store, counter = _open(states_max=10_000)
    empty = store.stats().bytes
    for key in range(5_000):
        counter.check(f"k{key}", 1)
    stats = store.stats()
    assert (stats.states, stats.states_max, stats.fullness) == (5_000, 10_000, 0.5)
    assert 200 <= (stats.bytes - empty) / 5_000 <= 1_000


def test_rules_and_windows_have_separate_counts() -> None:
    """The same limit under the same rule shares its counts; another rule or window does not."""
    store, counter = _open(Limit(2, per=60))
    counter.check("a", 2)
    assert store.counter((Limit(3, per=60),), "").peek("a", 1).remaining == 1
    assert store.counter((Limit(2, per=60),), "other").peek("a", 1).remaining == 2
    assert store.counter((Limit(2, per=61),), "").peek("a", 1).remaining == 2
    assert store.counter((Limit(2, per=60, name="n"),), "").peek("a", 1).remaining == 2


_VERBS = ("check", "check", "check", "refund", "reset", "grant", "peek", "sweep", "advance")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(_VERBS),
            st.sampled_from("abcde"),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_the_count_of_states_is_the_number_of_entries(steps: list[tuple[str, str, int]]) -> None:
    """After any sequence of verbs, the statistics equal the number of entries and stay within the
    maximum."""
    store, counter = _open(*TWO_LIMITS, states_max=6)
    for verb, subject, units in steps:
        try:
            if verb == "sweep":
                store.sweep()
            elif verb == "advance":
                _clock_of(store).advance(units / 4)
            elif verb == "grant":
                counter.grant(subject, units, ns(units + 1))
            elif verb == "reset":
                counter.reset(subject)
            elif verb == "refund":
                counter.refund(subject, units, None if units % 2 else ns(units / 4))
            else:
                getattr(counter, verb)(subject, units)
        except StoreFull:
            pass
        assert store.stats().states == _held(store)
        for table in store._tables.values():
            assert {subject for _, subject in table.expiries} >= set(table.entries)
