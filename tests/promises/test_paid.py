"""The promise of settlements: what is settled is paid.

In any interval, the settled units are at most the algorithm's bound, plus the overruns of the
requests that were in flight at the last admission in it, plus what the debt bound forgave. After
the last admission of an interval, only requests that were in flight then are settled. So the
promise says: in any interval that ends with an admission, no more units are charged than without
debts.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from ratekeeper.core.model import BUCKETS, AlgorithmName, Limit
from ratekeeper.decide.store import LocalCounter
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.oracles import Charged, assert_paid
from tests.promises.strategies import (
    KEY,
    Step,
    check,
    clock_at,
    limits,
    move,
    promise,
    several_limits,
    starts_ns,
    traces,
)

# Of a request: after how many further steps it is settled, and by how much it exceeds its cost.
Overrun = tuple[int, int]


def overruns(steps: int, units_max: int) -> st.SearchStrategy[list[Overrun]]:
    """Most requests use what they reserved; the others exceed it, a few of them by far."""
    units = st.just(0) | st.integers(1, units_max) | st.integers(1, 40 * units_max)
    return st.lists(st.tuples(st.integers(1, 6), units), min_size=steps, max_size=steps)


def with_bound(limit: Limit, debt: int | None) -> Limit:
    """Return the limit with another bound of its debt, if it can pay so much back."""
    bounded = None if debt is None else min(debt, limit.debt_max)
    capacity = limit.capacity if limit.algorithm in BUCKETS else 0
    return replace(limit, capacity=capacity, debt=bounded)


def charged(
    counter: LocalCounter, clock: SteppedClock, trace: list[Step], exceeding: list[Overrun]
) -> list[Charged]:
    """Return what was charged, without what was forgiven."""
    found: list[Charged] = []
    due: list[tuple[int, int]] = []
    for number, ((gap_ns, cost), (steps, units)) in enumerate(zip(trace, exceeding, strict=True)):
        move(clock, gap_ns)
        for _, more in [each for each in due if each[0] == number]:
            forgiven = counter.owe(KEY, more)
            assert 0 <= forgiven <= more
            found.append((clock.now_ns(), more - forgiven, False))
        decision = check(counter, cost)
        if decision == "never" or decision.charged_ns is None:
            continue
        found.append((decision.charged_ns, cost, True))
        if units:
            due.append((number + steps, units))
    return found


@every_algorithm
@promise(200, data=st.data())
def test_what_is_settled_is_paid(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """For any costs, and any bound of the debt."""
    debts = st.none() | st.integers(0, 3) | st.integers(0, 500)
    limit = with_bound(data.draw(limits(algorithm, units_max=50)), data.draw(debts))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], fitting=True))
    exceeding = data.draw(overruns(len(trace), limit.limit))
    with open_store(clock) as store:
        assert_paid(limit, charged(store.counter([limit], ""), clock, list(trace), exceeding))


@promise(100, limits=several_limits(50), start_ns=starts_ns(), data=st.data())
def test_what_is_settled_is_paid_in_each_of_several_limits(
    limits: list[Limit], start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """Each limit is charged what the limit that forgives most is."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, fitting=True))
    exceeding = data.draw(overruns(len(trace), min(limit.limit for limit in limits)))
    with open_store(clock) as store:
        found = charged(store.counter(limits, ""), clock, list(trace), exceeding)
    for limit in limits:
        assert_paid(limit, found)
