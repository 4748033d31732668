"""Promises 10 and 11: a cost that never fits is an error at once, and keys never collide."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, example
from hypothesis import strategies as st

from ratekeeper import CapacityError, Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR, Key, subject_of
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.strategies import (
    KEY,
    clock_at,
    limits,
    play,
    promise,
    several_limits,
    starts_ns,
    traces,
)


@every_algorithm
@promise(60, data=st.data(), excess=st.integers(1, 3) | st.integers(1, 10**30))
def test_a_cost_above_the_capacity_is_an_error_at_once(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject, excess: int
) -> None:
    """In any state, check and peek raise and spend nothing. A cost of the capacity does not
    raise."""
    limit = data.draw(limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        play(counter, clock, data.draw(traces([limit], rewinds=True, steps_max=10)))
        before = counter.peek(KEY, 0)
        for verb in (counter.check, counter.peek):
            with pytest.raises(CapacityError) as caught:
                verb(KEY, limit.capacity + excess)
            assert caught.value.limit == limit
        assert counter.peek(KEY, 0) == before
        counter.check(KEY, limit.capacity)


@promise(60, limits=several_limits(), start_ns=starts_ns(), data=st.data())
def test_the_smallest_of_several_capacities_decides(
    limits: list[Limit], start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """One more than the smallest capacity raises; the smallest capacity itself does not."""
    clock = clock_at(start_ns)
    capacity = min(limit.capacity for limit in limits)
    with open_store(clock) as store:
        counter = store.counter(limits, "")
        play(counter, clock, data.draw(traces(limits, rewinds=True, steps_max=10)))
        with pytest.raises(CapacityError):
            counter.check(KEY, capacity + 1)
        counter.check(KEY, capacity)


@every_algorithm
@promise(60, data=st.data(), units=st.integers(1, 100))
def test_a_grant_raises_the_largest_cost(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject, units: int
) -> None:
    """A cost of capacity + grant passes while the grant lasts, and one more raises. A cost that
    needs the grant raises after its end."""
    limit = data.draw(limits(algorithm, units_max=1_000))
    clock = clock_at(data.draw(starts_ns()))
    ttl_ns = data.draw(st.integers(1, 3 * limit.window_ns))
    with open_store(clock) as store:
        ttl_ns = clock.steps_up_ns(ttl_ns)
        counter = store.counter([limit], "")
        for key in ("now", "later"):
            counter.grant(key, units, ttl_ns)
        with pytest.raises(CapacityError):
            counter.check("now", limit.capacity + units + 1)
        clock.advance_ns(ttl_ns - 1)
        assert counter.check("now", limit.capacity + units).remaining == 0
        clock.advance_ns(1)
        with pytest.raises(CapacityError):
            counter.check("later", limit.capacity + 1)
        assert counter.check("later", limit.capacity).allowed


@every_algorithm
@promise(60, data=st.data(), units=st.integers(1, 30))
def test_an_error_means_that_no_wait_would_help(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject, units: int
) -> None:
    """A cost that needs the grant is checked when the quota is spent. Either it is denied with a
    wait that suffices, or it raises and would not pass just before the grant ends."""
    limit = data.draw(limits(algorithm, units_max=100))
    clock = clock_at(data.draw(starts_ns()))
    ttl_ns = data.draw(st.integers(1, 3 * limit.window_ns))
    cost = limit.capacity + data.draw(st.integers(1, units))
    with open_store(clock) as store:
        ttl_ns = clock.steps_up_ns(ttl_ns)
        counter = store.counter([limit], "")
        counter.check(KEY, data.draw(st.integers(1, limit.capacity)))
        counter.grant(KEY, units, ttl_ns)
        try:
            decision = counter.check(KEY, cost)
        except CapacityError:
            clock.advance_ns(ttl_ns - 1)
            with pytest.raises(CapacityError):
                counter.check(KEY, cost)
            return
        if not decision.allowed:
            assert decision.retry_after_ns < ttl_ns
            clock.advance_ns(decision.retry_after_ns)
            assert counter.check(KEY, cost).allowed


# Characters that code could join, split, quote or fold by; and any other text.
tricky_text = st.text(alphabet="ab/:|,=\\\"'{} \x00\x1e\u00e9\u0301", min_size=1, max_size=6)
any_text = st.text(st.characters(codec="utf-8", exclude_characters=SEPARATOR), min_size=1)
parts = tricky_text | any_text.filter(lambda text: len(text) < KEY_LENGTH_MAX // PARTS_MAX)
keys = parts | st.lists(parts, min_size=1, max_size=PARTS_MAX).map(tuple)


def plain(key: Key) -> Key:
    """Return a tuple of one part as that part: both are the same key."""
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


@promise(300, one=keys, other=keys)
@example(one=("a/b", "c"), other=("a", "b/c"))
@example(one=("a", "b"), other="a/b")
def test_keys_never_collide(one: Key, other: Key) -> None:
    """Two keys have one subject only if they are the same key."""
    assert (subject_of(one) == subject_of(other)) == (plain(one) == plain(other))


@promise(200, text=tricky_text.filter(lambda text: len(text) > 2), data=st.data())
def test_the_parts_of_a_key_matter(text: str, data: st.DataObject) -> None:
    """One text that is split at different places gives different subjects."""

    def cut(places: set[int]) -> Key:
        edges = [0, *sorted(places), len(text)]
        return tuple(text[start:end] for start, end in pairwise(edges))

    places = st.sets(st.integers(1, len(text) - 1))
    one, other = data.draw(places), data.draw(places)
    assume(one != other)
    assert len({subject_of(cut(one)), subject_of(cut(other))}) == 2


@promise(60, found=st.lists(keys, min_size=2, max_size=20, unique_by=plain))
def test_a_store_counts_random_keys_separately(found: list[Key], open_store: OpenStore) -> None:
    """Each of twenty random keys has its own count."""
    limit = Limit(100, per=60, algorithm="fixed_window")
    clock = clock_at(1_700_000_000 * 10**9)
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        for cost, key in enumerate(found):
            counter.check(subject_of(key), cost)
        spent = [100 - counter.peek(subject_of(key), 0).remaining for key in found]
    assert spent == list(range(len(found)))
