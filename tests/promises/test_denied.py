"""Promise 2: a denied request costs nothing, in any of its limits."""

from __future__ import annotations

from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.strategies import (
    KEY,
    check,
    clock_at,
    limits,
    move,
    promise,
    several_limits,
    starts_ns,
    traces,
)


def assert_denials_cost_nothing(
    one: LocalCounter, twin: LocalCounter, clock: SteppedClock, trace: list[tuple[int, int]]
) -> None:
    """`one` gets every request and `twin` only those that `one` admitted: their decisions never
    differ."""
    for gap_ns, cost in trace:
        move(clock, gap_ns)
        before = one.peek(KEY, 1)
        decision = check(one, cost)
        if decision != "never" and decision.allowed:
            assert twin.check(KEY, cost) == decision
        else:
            assert one.peek(KEY, 1) == before
        assert one.peek(KEY, 0) == twin.peek(KEY, 0)
        assert one.peek(KEY, 1) == twin.peek(KEY, 1)


@every_algorithm
@promise(40, data=st.data())
def test_a_denied_request_costs_nothing(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """A limiter that denied, or raised CapacityError, equals in every field a twin that never saw
    those requests."""
    limit = data.draw(limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], rewinds=True))
    with open_store(clock) as one, open_store(clock) as two:
        assert_denials_cost_nothing(
            one.counter([limit], ""), two.counter([limit], ""), clock, trace
        )


@promise(120, limits=several_limits(), start_ns=starts_ns(), data=st.data())
def test_a_request_denied_by_one_limit_costs_nothing_in_the_others(
    limits: list[Limit], start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """Several limits together agree with their twin, and with each limit alone."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, rewinds=True))
    with open_store(clock) as one, open_store(clock) as two:
        assert_denials_cost_nothing(one.counter(limits, ""), two.counter(limits, ""), clock, trace)
        for limit in limits:
            alone, twin = one.counter([limit], ""), two.counter([limit], "")
            assert alone.peek(KEY, 0) == twin.peek(KEY, 0)
        assert one.stats().states == two.stats().states


@promise(
    80,
    limits=several_limits(units_max=100),
    start_ns=starts_ns(),
    units=st.integers(1, 100),
    data=st.data(),
)
def test_a_denied_request_spends_no_granted_units(
    limits: list[Limit], start_ns: int, units: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """Only a request that passes all limits spends granted units."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits))
    ttl_ns = data.draw(st.integers(1, 3 * limits[0].window_ns))
    with open_store(clock) as one, open_store(clock) as two:
        for store in (one, two):
            store.counter(limits, "").grant(KEY, units, clock.steps_up_ns(ttl_ns))
        assert_denials_cost_nothing(one.counter(limits, ""), two.counter(limits, ""), clock, trace)
