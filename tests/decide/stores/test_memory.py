"""What the Python memory store keeps inside: bounded, counted, and nothing limited is lost.

What every store does is in the conformance suite; this file may look at private parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.core.clock import ns_from_seconds as ns
from tollkeeper.core.errors import StoreFull, StoreUnavailable
from tollkeeper.core.model import ALGORITHM_NAMES, AlgorithmName, Limit
from tollkeeper.decide.stores.memory import _LEFT_OVER_ITEMS_MIN, MemoryGate, PythonMemoryStore
from tollkeeper.testing import ManualClock

TWO_LIMITS = (Limit(5, per=1), Limit(100, per=60, algorithm="sliding_window_log"))


def _open(*limits: Limit, states_max: int = 1_000) -> tuple[PythonMemoryStore, MemoryGate]:
    store = PythonMemoryStore(ManualClock(), states_max)
    return store, store.gate(limits or (Limit(5, per=1),), "")


def _clock_of(store: PythonMemoryStore) -> ManualClock:
    assert isinstance(store._clock, ManualClock)
    return store._clock


def _held(store: PythonMemoryStore) -> int:
    """How many entries there are, counted."""
    return sum(len(table.entries) for table in store._tables.values())


def _check_refund(gate: MemoryGate, subject: str) -> None:
    gate.check(subject, 1)
    gate.refund(subject, 1)


def _check_reset(gate: MemoryGate, subject: str) -> None:
    gate.check(subject, 1)
    gate.reset(subject)


def _grant_reset(gate: MemoryGate, subject: str) -> None:
    gate.grant(subject, 1, None)
    gate.reset(subject)


@pytest.mark.parametrize("loop", [_check_refund, _check_reset, _grant_reset])
@pytest.mark.parametrize("lasting", [0, 10, 200])
@pytest.mark.parametrize("limits", [TWO_LIMITS[:1], TWO_LIMITS], ids=["one", "two"])
def test_the_heap_stays_bounded(
    loop: Callable[[MemoryGate, str], None], lasting: int, limits: tuple[Limit, ...]
) -> None:
    """Keys that come and go leave items behind, but never more than there are keys, and 64."""
    store, gate = _open(*limits)
    for key in range(lasting):
        gate.check(f"lasting:{key}", 1)
    for turn in range(2_000):
        loop(gate, f"passing:{turn % 3}")
        for table in store._tables.values():
            assert len(table.expiries) <= 2 * len(table.entries) + _LEFT_OVER_ITEMS_MIN + 2
    assert store.stats().states == _held(store) == lasting * len(limits)


def test_left_over_items_do_not_hide_what_expires() -> None:
    """After the heap was made anew, every entry is still in it and goes when its time comes."""
    store, gate = _open()
    for turn in range(500):
        _check_reset(gate, "passing")
        if turn % 10 == 0:
            gate.check(f"lasting:{turn}", 1)
    assert store.stats().states == 50
    _clock_of(store).advance(1)
    assert store.sweep() == 50
    assert store.stats().states == _held(store) == 0


def test_each_insert_clears_up_after_two() -> None:
    """Garbage goes faster than it comes: new keys alone empty the table of expired ones."""
    store, gate = _open()
    for key in range(100):
        gate.check(f"old:{key}", 1)
    _clock_of(store).advance(1)
    for key in range(50):
        gate.check(f"new:{key}", 1)
    assert store.stats().states == 50
    assert store.stats().expired == 100


def test_a_key_that_goes_on_spending_is_put_back() -> None:
    """Its item in the heap is too early; reclaiming looks at the entry, not at the item."""
    store, gate = _open(Limit(5, per=5))
    for _ in range(8):
        gate.check("busy", 1)
        _clock_of(store).advance(0.5)
        assert store.sweep() == 0
    _clock_of(store).advance(5)
    assert store.sweep() == 1


def test_a_full_store_refuses_and_evicts_nobody() -> None:
    """With every key still limited, the new one is refused and the others stay as they are."""
    store, gate = _open(states_max=3)
    for key in "abc":
        gate.check(key, 5)
    for attempt in range(1, 11):
        with pytest.raises(StoreFull, match=r"all 3 states .*memory://\?capacity=6"):
            gate.check(f"new:{attempt}", 1)
        assert store.stats().refused == attempt
    assert [gate.check(key, 1).allowed for key in "abc"] == [False] * 3


def test_a_full_store_still_answers_what_needs_no_room() -> None:
    """Known keys, denials, peeks and cost 0 take no new state, so they do not fail."""
    _, gate = _open(states_max=1)
    gate.check("a", 1)
    assert gate.check("a", 1).allowed
    assert gate.peek("b", 1).allowed
    assert gate.check("b", 0).allowed
    gate.refund("b", 1)
    gate.reset("b")


def test_a_full_store_first_drops_what_has_expired() -> None:
    """Expired entries of any table make room before anyone is refused."""
    store, gate = _open(states_max=3)
    other = store.gate((Limit(1, per=60),), "other")
    other.check("x", 1)
    gate.check("a", 1)
    gate.check("b", 1)
    _clock_of(store).advance(1)
    assert other.check("y", 1).allowed
    assert store.stats().expired == 2


def test_no_room_for_all_limits_charges_none() -> None:
    """Two limits, room for one state: refused, and neither limit has counted anything."""
    store, gate = _open(*TWO_LIMITS, states_max=3)
    gate.check("a", 1)
    with pytest.raises(StoreFull):
        gate.check("b", 1)
    assert store.stats().states == _held(store) == 2
    assert gate.peek("b", 1).remaining == 5


def test_no_room_for_a_grant_grants_nothing() -> None:
    """A grant needs a state too."""
    store, gate = _open(states_max=1)
    gate.check("a", 1)
    with pytest.raises(StoreFull):
        gate.grant("b", 1, None)
    assert store.stats().states == _held(store) == 1


def test_a_refund_of_everything_frees_the_place() -> None:
    """A key that got all back is as good as new, so it takes no room."""
    store, gate = _open(*TWO_LIMITS)
    gate.check("a", 3)
    gate.refund("a", 3)
    assert store.stats().states == _held(store) == 0


def test_a_denied_key_takes_no_place() -> None:
    """A request that one limit denies leaves no state in the others."""
    store = PythonMemoryStore(ManualClock(), 10)
    narrow = store.gate((Limit(1, per=60),), "")
    both = store.gate((Limit(1, per=60), Limit(9, per=3_600)), "")
    narrow.check("a", 1)
    assert not both.check("a", 1).allowed
    assert store.stats().states == _held(store) == 1


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_an_entry_goes_exactly_when_it_is_as_good_as_new(algorithm: AlgorithmName) -> None:
    """One nanosecond before `reset_after` the state is there, and at it the sweep takes it."""
    store, gate = _open(Limit(3, per=7, algorithm=algorithm))
    _clock_of(store).advance(3)
    decision = gate.check("a", 2)
    _clock_of(store).advance_ns(decision.reset_after_ns - 1)
    assert store.sweep() == 0
    _clock_of(store).advance_ns(1)
    assert gate.peek("a", 1).remaining == 3
    assert store.sweep() == 1


def test_a_spent_grant_does_not_keep_its_key() -> None:
    """A grant for a year, spent at once: the key expires with its limit, a second later."""
    store, gate = _open(Limit(1, per=1), states_max=1)
    gate.grant("a", 1, ns(366 * 86_400))
    gate.check("a", 2)
    _clock_of(store).advance(1)
    assert gate.check("b", 1).allowed


def test_a_refund_brings_the_expiry_forward() -> None:
    """A key refunded from 100 units to 1 is as good as new after 36 s, not after an hour."""
    store, gate = _open(Limit(100, per=3_600))
    gate.check("a", 100)
    gate.refund("a", 99)
    _clock_of(store).advance(36)
    assert gate.peek("a", 1).remaining == 100
    assert store.sweep() == 1


def test_a_raised_limit_brings_the_expiry_forward() -> None:
    """Raised from 1 to 3,600 an hour, a key that spends again is as good as new in 2 s."""
    store, gate = _open(Limit(1, per=3_600), states_max=1)
    gate.check("a", 1)
    store.gate((Limit(3_600, per=3_600),), "").check("a", 1)
    _clock_of(store).advance(2)
    assert gate.check("b", 1).allowed


def test_never_more_states_than_the_maximum() -> None:
    """Making room drops the subject's own expired entry; its new one must fit too."""
    store = PythonMemoryStore(ManualClock(), 2)
    store.gate((Limit(1, per=1),), "").check("k", 1)
    store.gate((Limit(1, per=3_600),), "other").check("z", 1)
    _clock_of(store).advance(2)
    with suppress(StoreFull):
        store.gate((Limit(1, per=1), Limit(1, per=60)), "").check("k", 1)
    assert store.stats().states <= 2


def test_closing_forgets_everything() -> None:
    """A closed store is empty, and its numbers say so."""
    store, gate = _open(*TWO_LIMITS)
    gate.check("a", 5)
    store.close()
    assert _held(store) == 0


@pytest.mark.parametrize("limits", [TWO_LIMITS[:1], TWO_LIMITS], ids=["one", "two"])
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("check", (1,)),
        ("check", (0,)),
        ("peek", (1,)),
        ("refund", (1,)),
        ("grant", (1, None)),
        ("grant", (0, None)),
        ("reset", ()),
    ],
)
def test_a_closed_store_answers_nothing(
    verb: str, arguments: tuple[int | None, ...], limits: tuple[Limit, ...]
) -> None:
    """A gate outlives its store by mistake: each verb says so, and nothing is kept."""
    store, gate = _open(*limits)
    gate.check("a", 5)
    store.close()
    with pytest.raises(StoreUnavailable, match="the store is closed; open another one"):
        getattr(gate, verb)("a", *arguments)
    assert _held(store) == 0
    for ask in (store.stats, store.sweep, lambda: store.busiest(1), lambda: store.gate(limits, "")):
        with pytest.raises(StoreUnavailable, match="the store is closed; open another one"):
            ask()


def test_stats_estimate_the_memory() -> None:
    """More states, more bytes: some hundreds for each."""
    store, gate = _open(states_max=10_000)
    empty = store.stats().bytes
    for key in range(5_000):
        gate.check(f"k{key}", 1)
    stats = store.stats()
    assert (stats.states, stats.states_max, stats.fullness) == (5_000, 10_000, 0.5)
    assert 200 <= (stats.bytes - empty) / 5_000 <= 1_000


def test_rules_and_limits_keep_apart_what_differs() -> None:
    """The same limit under the same rule shares its counts; another rule or window does not."""
    store, gate = _open(Limit(2, per=60))
    gate.check("a", 2)
    assert store.gate((Limit(3, per=60),), "").peek("a", 1).remaining == 1
    assert store.gate((Limit(2, per=60),), "other").peek("a", 1).remaining == 2
    assert store.gate((Limit(2, per=61),), "").peek("a", 1).remaining == 2
    assert store.gate((Limit(2, per=60, name="n"),), "").peek("a", 1).remaining == 2


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
    """After any sequence of verbs, what stats say is what is there, within the maximum."""
    store, gate = _open(*TWO_LIMITS, states_max=6)
    for verb, subject, units in steps:
        try:
            if verb == "sweep":
                store.sweep()
            elif verb == "advance":
                _clock_of(store).advance(units / 4)
            elif verb == "grant":
                gate.grant(subject, units, ns(units + 1))
            elif verb == "reset":
                gate.reset(subject)
            else:
                getattr(gate, verb)(subject, units)
        except StoreFull:
            pass
        assert store.stats().states == _held(store)
        for table in store._tables.values():
            assert {subject for _, subject in table.expiries} >= set(table.entries)
