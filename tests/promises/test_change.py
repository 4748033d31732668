"""Promise 9: a changed limit keeps consumption. Raising never denies; lowering applies at once."""

from __future__ import annotations

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from ratekeeper import Limit, Limiter
from ratekeeper.core.model import BUCKETS, UNITS_MAX, WINDOW_COUNTS, AlgorithmName
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, StoreFactory, every_algorithm, sweeping_stores
from tests.promises.oracles import admissions, assert_never_over
from tests.promises.strategies import (
    KEY,
    LOG_LIMIT_MAX,
    REFILL_NS_MAX,
    check,
    clock_at,
    limit_of,
    limits,
    move,
    play,
    promise,
    starts_ns,
    traces,
    windows_us,
)


@st.composite
def limit_pairs(draw: st.DrawFn, algorithm: AlgorithmName) -> tuple[Limit, Limit]:
    """Two limits with one identity, the second at least as generous in every number.

    A named bucket or log may also change its window; a count for each window may not.
    """
    strict = draw(limits(algorithm, units_max=1_000, name="n"))
    window_us = strict.window_ns // 1_000
    more = draw(st.just(0) | st.integers(0, 10 * strict.limit))
    if algorithm in WINDOW_COUNTS:
        return strict, limit_of(algorithm, strict.limit + more, window_us, name="n")
    if algorithm not in BUCKETS:
        shorter_us = draw(st.just(window_us) | st.integers(1_000, window_us))
        units = min(strict.limit + more, LOG_LIMIT_MAX)
        return strict, limit_of(algorithm, units, shorter_us, name="n")
    other_us = draw(st.just(window_us) | windows_us())
    # Rounded up: at least the old rate, in any window.
    units = -(strict.limit * other_us // -window_us) + more
    capacity = strict.capacity + draw(st.just(0) | st.integers(0, 1_000))
    assume(units <= UNITS_MAX and capacity * other_us * 1_000 <= REFILL_NS_MAX * units)
    return strict, limit_of(algorithm, units, other_us, capacity, name="n")


@every_algorithm
def test_a_refund_of_a_lower_limit_returns_its_units_alone(
    algorithm: AlgorithmName, open_store: OpenStore
) -> None:
    """A request that was admitted before the limit was raised is refunded by the lower limit."""
    clock = clock_at(3_600 * 10**9)
    with open_store(clock) as store:
        low = store.counter([Limit(50, per=3_600, algorithm=algorithm)], "")
        high = store.counter([Limit(100, per=3_600, algorithm=algorithm)], "")
        charged_ns = low.check(KEY, 5).charged_ns
        assert high.check(KEY, 95).allowed
        low.refund(KEY, 5, charged_ns)
        assert high.peek(KEY, 0).remaining == 5


@every_algorithm
@promise(80, data=st.data())
def test_raising_a_limit_never_causes_a_denial(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """Of two equal counters, one gets a raised limit. It admits all that the other admits, with at
    least as many units remaining, and no wait is longer."""
    low, high = data.draw(limit_pairs(algorithm))
    # A step returns units that a continuous refill has returned before, and that were spent since:
    # shortly before the step, the wait for more of them is shorter with steps.
    assume(not low.refill_every)
    clock = clock_at(data.draw(starts_ns()))
    before = data.draw(traces([low], steps_max=10))
    after = data.draw(traces([low], fitting=True, steps_max=12))
    with open_store(clock) as one, open_store(clock) as two:
        kept = one.counter([low], "")
        start_ns = clock.now_ns()
        play(kept, clock, before)
        clock.advance_ns(start_ns - clock.now_ns())
        play(two.counter([low], ""), clock, before)
        raised = two.counter([high], "")
        for gap_ns, cost in after:
            move(clock, gap_ns)
            old, new = kept.peek(KEY, cost), raised.peek(KEY, cost)
            assert new.remaining >= old.remaining
            assert new.retry_after_ns <= old.retry_after_ns
            if kept.check(KEY, cost).allowed:
                assert raised.check(KEY, cost).allowed
            one.sweep()
            two.sweep()


@every_algorithm
@promise(80, data=st.data())
def test_lowering_a_limit_applies_at_once(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """Spent units count against the new capacity, and from then on the new bound holds.

    A bucket whose new capacity is below the spent units was empty at the last admission. It is not
    in debt, so the refill since then is available.
    """
    low, high = data.draw(limit_pairs(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    before = data.draw(traces([high], steps_max=10))
    after = data.draw(traces([low], steps_max=12))
    with open_store(clock) as store:
        counter = store.counter([high], "")
        spent_at_ns, used = clock.now_ns(), 0
        for gap_ns, cost in before:
            move(clock, gap_ns)
            decision = check(counter, cost)
            if decision != "never" and decision.allowed and cost:
                spent_at_ns, used = clock.now_ns(), high.capacity - decision.remaining
        kept = counter.peek(KEY, 0).remaining
        lowered = store.counter([low], "")
        remaining = lowered.peek(KEY, 0).remaining
        if algorithm in BUCKETS:
            come_in = -(low.limit * (clock.now_ns() - spent_at_ns) // -low.window_ns)
            assert remaining <= min(max(low.capacity - used, 0) + come_in, kept)
        elif algorithm in WINDOW_COUNTS or low.window_ns == high.window_ns:
            assert remaining == max(low.capacity - (high.capacity - kept), 0)
        else:
            assert remaining <= max(low.capacity - (high.capacity - kept), 0)
        assert_never_over(low, admissions(lowered, clock, after))


@every_algorithm
@promise(40, data=st.data())
def test_raising_and_lowering_again_changes_nothing(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """A limit that was raised and lowered again without a request in between is unchanged."""
    low, high = data.draw(limit_pairs(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        counter = store.counter([low], "")
        play(counter, clock, data.draw(traces([low], rewinds=True, steps_max=10)))
        before = counter.peek(KEY, 1)
        store.counter([high], "").peek(KEY, 1)
        assert store.counter([low], "").peek(KEY, 1) == before
        assert counter.peek(KEY, 1) == before


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
def test_a_raised_rate_shortens_the_wait(algorithm: AlgorithmName, open_store: OpenStore) -> None:
    """Other libraries store debts as time: after 1/s → 10/s with a capacity of 10, they deny for 9
    s. Here the next request passes after a tenth of a second."""
    clock = SteppedClock(start=1_700_000_000)
    with open_store(clock) as store:
        slow = Limit(1, per=1, algorithm=algorithm, capacity=10)
        fast = Limit(10, per=1, algorithm=algorithm, capacity=10)
        Limiter(slow, store=store, clock=clock).check(KEY, 10)
        raised = Limiter(fast, store=store, clock=clock)
        assert raised.check(KEY).retry_after == 0.1
        clock.advance(0.1)
        assert raised.check(KEY)
        clock.advance(1)
        assert raised.peek(KEY).remaining == 10


@sweeping_stores
@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
def test_a_state_expires_by_the_limit_that_wrote_it(
    algorithm: AlgorithmName, factory: StoreFactory, open_store: OpenStore
) -> None:
    """Ten units are spent at 10/s, and the rate is lowered to 1/s. For one second the lower rate
    applies, with or without sweeps. Then a sweep may drop the state."""
    clock = SteppedClock(start=1_700_000_000)
    with open_store(clock) as store:
        fast = Limit(10, per=1, algorithm=algorithm, capacity=10)
        slow = Limit(1, per=1, algorithm=algorithm, capacity=10)
        Limiter(fast, store=store, clock=clock).check(KEY, 10)
        lowered = Limiter(slow, store=store, clock=clock)
        clock.advance_ns(10**9 - 1)
        assert store.sweep() == 0
        assert lowered.peek(KEY).remaining == 0
        clock.advance_ns(1 + int(10**9 * factory.expiry_slack))
        assert store.sweep() == 1
        assert lowered.peek(KEY).remaining == 10


@sweeping_stores
@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket", "sliding_window_log"])
def test_a_state_expires_sooner_after_a_raised_limit(
    algorithm: AlgorithmName, factory: StoreFactory, open_store: OpenStore
) -> None:
    """Spent under 10 a day and used again under 10 a second, the state expires after a second."""
    clock = SteppedClock(start=1_700_000_000)
    with open_store(clock) as store:
        slow = Limit(10, per=86_400, algorithm=algorithm, name="n")
        fast = Limit(10, per=1, algorithm=algorithm, name="n")
        Limiter(slow, store=store, clock=clock).check(KEY, 5)
        reset_ns = Limiter(fast, store=store, clock=clock).check(KEY, 5).reset_after_ns
        clock.advance_ns(reset_ns + int(reset_ns * factory.expiry_slack))
        assert store.sweep() == 1
