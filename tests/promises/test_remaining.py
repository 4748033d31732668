"""Promise 4: `remaining` is exact. That many single requests pass at that instant."""

from __future__ import annotations

from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.strategies import (
    KEY,
    clock_at,
    limits,
    move,
    play,
    promise,
    several_limits,
    starts_ns,
    traces,
)

# Small enough to try every single request.
UNITS_MAX = 40


def assert_exactly(counter: LocalCounter, remaining: int) -> None:
    """Assert that this many pass, each with one unit less remaining, and the next is denied."""
    for left in range(remaining - 1, -1, -1):
        decision = counter.check(KEY, 1)
        assert decision.allowed
        assert decision.remaining == left <= decision.limit
    assert not counter.check(KEY, 1).allowed


@every_algorithm
@promise(60, data=st.data())
def test_remaining_is_exact(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """After any trace, `remaining` of the last decision is exact, allowed or denied. So is that of
    peek."""
    limit = data.draw(limits(algorithm, units_max=UNITS_MAX))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], rewinds=True, fitting=True, steps_max=12))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        play(counter, clock, trace[:-1])
        gap_ns, cost = trace[-1]
        move(clock, gap_ns)
        peeked = counter.peek(KEY, cost)
        decision = counter.check(KEY, cost)
        assert decision.allowed == peeked.allowed
        assert decision.remaining == peeked.remaining - (cost if decision.allowed else 0)
        assert_exactly(counter, decision.remaining)


@promise(
    100,
    limits=several_limits(units_max=UNITS_MAX),
    start_ns=starts_ns(),
    units=st.integers(0, UNITS_MAX),
    data=st.data(),
)
def test_remaining_is_exact_with_several_limits_and_a_grant(
    limits: list[Limit], start_ns: int, units: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """It is the smallest of all limits, each with the rest of its grant."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, fitting=True, steps_max=12))
    ttl_ns = data.draw(st.integers(1, 3 * limits[0].window_ns))
    with open_store(clock) as store:
        counter = store.counter(limits, "")
        if units:
            counter.grant(KEY, units, clock.steps_up_ns(ttl_ns))
        play(counter, clock, trace[:-1])
        gap_ns, cost = trace[-1]
        move(clock, gap_ns)
        assert_exactly(counter, counter.check(KEY, cost).remaining)


@every_algorithm
@promise(40, data=st.data(), refunded=st.integers(0, 2 * UNITS_MAX))
def test_remaining_is_exact_after_a_refund(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject, refunded: int
) -> None:
    """A refund returns its units, and never exceeds a whole quota."""
    limit = data.draw(limits(algorithm, units_max=UNITS_MAX))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], rewinds=True, fitting=True, steps_max=12))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        play(counter, clock, trace)
        before = counter.peek(KEY, 0).remaining
        counter.refund(KEY, refunded, None)
        after = counter.peek(KEY, 0).remaining
        assert before <= after <= min(before + refunded, limit.capacity)
        assert_exactly(counter, after)
