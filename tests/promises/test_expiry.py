"""Promise 8: every key expires as soon as it equals a new one.

A store that expires states by its own clock is tested with that clock
(`tests/integration/test_redis_expiry.py`). Here, its decisions must be those of a new key.
"""

from __future__ import annotations

from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter, LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, StoreFactory, every_algorithm, sweeping_stores
from tests.promises.strategies import (
    KEY,
    check,
    clock_at,
    limits,
    move,
    play,
    promise,
    several_limits,
    starts_ns,
    traces,
)


def slack_ns(factory: StoreFactory, limit: Limit, reset_ns: int) -> int:
    """Return how much longer the store may keep a state that it wrote before now. The slack is a
    fraction of the remaining time, which is at most this sum."""
    longest_ns = max(2 * limit.window_ns, limit.capacity * limit.window_ns // limit.limit + 1)
    return int((reset_ns + longest_ns) * factory.expiry_slack)


def assert_as_new(counter: LocalCounter) -> None:
    """Assert that every decision equals that of a new key in every field."""
    (limit,) = counter.limits
    for cost in (0, 1, limit.capacity):
        assert counter.peek(KEY, cost) == counter.peek("never seen", cost)


def assert_expires_when_whole(
    factory: StoreFactory, store: LocalStore, counter: LocalCounter, clock: SteppedClock
) -> None:
    """Assert that the state is kept until one step before reset_after, and expires at it."""
    reset_ns, step_ns = counter.peek(KEY, 0).reset_after_ns, clock.step_ns
    if reset_ns == 0:
        assert_as_new(counter)
        return
    assert store.stats().states == 1
    clock.advance_ns(reset_ns - step_ns)
    assert counter.peek(KEY, 0).reset_after_ns == step_ns
    assert counter.peek(KEY, 0) != counter.peek("never seen", 0)
    assert store.sweep() == 0
    assert counter.peek(KEY, 0).reset_after_ns == step_ns
    clock.advance_ns(step_ns)
    assert_as_new(counter)
    if factory.sweeps:
        clock.advance_ns(slack_ns(factory, counter.limits[0], reset_ns))
        assert store.sweep() == 1
        assert store.stats().states == 0
        assert_as_new(counter)


@every_algorithm
@promise(60, data=st.data())
def test_a_key_expires_when_its_quota_is_whole(
    algorithm: AlgorithmName, factory: StoreFactory, open_store: OpenStore, data: st.DataObject
) -> None:
    """For any trace and any jump of the clock, the key expires on time, to the step."""
    limit = data.draw(limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], rewinds=True, steps_max=12))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        for gap_ns, cost in trace:
            move(clock, gap_ns)
            decision = check(counter, cost)
            if decision != "never":
                assert decision.reset_after_ns == counter.peek(KEY, 0).reset_after_ns
        assert_expires_when_whole(factory, store, counter, clock)


@every_algorithm
@promise(60, data=st.data())
def test_a_key_expires_when_its_quota_is_whole_after_refunds(
    algorithm: AlgorithmName, factory: StoreFactory, open_store: OpenStore, data: st.DataObject
) -> None:
    """A refund brings the expiry forward."""
    limit = data.draw(limits(algorithm, units_max=10))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], fitting=True, steps_max=8))
    refunds = data.draw(
        st.lists(st.sampled_from([0, 0, 1, 2, 10]), min_size=len(trace), max_size=len(trace))
    )
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        for (gap_ns, cost), refunded in zip(trace, refunds, strict=True):
            move(clock, gap_ns)
            decision = counter.check(KEY, cost)
            counter.refund(KEY, refunded, decision.charged_ns)
        assert_expires_when_whole(factory, store, counter, clock)


@every_algorithm
@promise(40, data=st.data(), units=st.integers(1, 50))
def test_a_granted_key_expires_after_quota_and_grant(
    algorithm: AlgorithmName,
    factory: StoreFactory,
    open_store: OpenStore,
    data: st.DataObject,
    units: int,
) -> None:
    """An unused grant keeps the key until it ends, and not longer."""
    limit = data.draw(limits(algorithm, units_max=1_000))
    clock = clock_at(data.draw(starts_ns()))
    ttl_ns = data.draw(st.integers(1, 3 * limit.window_ns))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        reset_ns = counter.check(KEY, data.draw(st.integers(0, limit.capacity))).reset_after_ns
        ttl_ns = clock.steps_up_ns(ttl_ns)
        counter.grant(KEY, units, ttl_ns)
        end_ns = max(reset_ns, ttl_ns)
        clock.advance_ns(end_ns - clock.step_ns)
        assert counter.peek(KEY, 0) != counter.peek("never seen", 0)
        before = counter.peek(KEY, 0)
        store.sweep()
        assert counter.peek(KEY, 0) == before
        clock.advance_ns(clock.step_ns)
        assert_as_new(counter)
        if factory.sweeps:
            clock.advance_ns(slack_ns(factory, limit, end_ns))
            store.sweep()
            assert store.stats().states == 0


@sweeping_stores
@promise(60, limits=several_limits(), start_ns=starts_ns(), data=st.data())
def test_each_limit_expires_separately(
    limits: list[Limit],
    start_ns: int,
    data: st.DataObject,
    factory: StoreFactory,
    open_store: OpenStore,
) -> None:
    """Each state of a key expires when the quota of its limit is whole."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, steps_max=12))
    with open_store(clock) as store:
        play(store.counter(limits, ""), clock, trace)
        store.sweep()
        alone = [store.counter([limit], "") for limit in limits]
        ends_ns = sorted(clock.now_ns() + counter.peek(KEY, 0).reset_after_ns for counter in alone)
        for end_ns in ends_ns:
            clock.advance_ns(max(end_ns - clock.now_ns(), 0))
            store.sweep()
            held = sum(counter.peek(KEY, 0).reset_after_ns > 0 for counter in alone)
            states = store.stats().states
            assert states >= held if factory.expiry_slack else states == held
        clock.advance_ns(max(slack_ns(factory, limit, ends_ns[-1]) for limit in limits))
        store.sweep()
        assert store.stats().states == 0
