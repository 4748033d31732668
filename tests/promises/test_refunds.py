"""Promise 1 with refunds: however late they come, other requests stay within the bound.

A request is charged, held open, and refunded at any later time, in any order. The requests that are
not refunded are within the algorithm's bound, as if the others had not been made.

The clock does not step back here: a key whose charges are all refunded or expired has no state, so
it does not remember the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.oracles import Admission, assert_never_over
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

# For each step: keep the request (0), or refund it after this many further steps.
Lateness = Sequence[int]


def latenesses(steps: int) -> st.SearchStrategy[list[int]]:
    """Half of the requests are kept; the others are refunded sooner or later."""
    one = st.just(0) | st.integers(1, 8)
    return st.lists(one, min_size=steps, max_size=steps)


def kept(
    counter: LocalCounter, clock: SteppedClock, trace: Sequence[Step], late: Lateness
) -> list[Admission]:
    """Return the admissions that are not refunded, at the time that the store charged them."""
    admitted: list[Admission] = []
    due: list[tuple[int, int, int]] = []
    for number, ((gap_ns, cost), steps) in enumerate(zip(trace, late, strict=True)):
        move(clock, gap_ns)
        for _, units, charged_ns in [each for each in due if each[0] == number]:
            counter.refund(KEY, units, charged_ns)
        decision = check(counter, cost)
        if decision == "never" or decision.charged_ns is None:
            continue
        if steps:
            due.append((number + steps, cost, decision.charged_ns))
        else:
            admitted.append((decision.charged_ns, cost))
    return admitted


@every_algorithm
@promise(200, data=st.data())
def test_never_over_with_late_refunds(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """Requests that are not refunded stay within the bound, for any refunds."""
    limit = data.draw(limits(algorithm, units_max=50))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], fitting=True))
    late = data.draw(latenesses(len(trace)))
    with open_store(clock) as store:
        assert_never_over(limit, kept(store.counter([limit], ""), clock, trace, late))


@promise(100, limits=several_limits(50), start_ns=starts_ns(), data=st.data())
def test_never_over_with_late_refunds_in_any_of_several_limits(
    limits: list[Limit], start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """The same for each of several limits of one counter."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, fitting=True))
    late = data.draw(latenesses(len(trace)))
    with open_store(clock) as store:
        admitted = kept(store.counter(limits, ""), clock, trace, late)
    for limit in limits:
        assert_never_over(limit, admitted)


@every_algorithm
@promise(60, data=st.data())
def test_a_refund_at_once_leaves_no_trace(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """A request that is refunded at the time of its charge costs nothing."""
    limit = data.draw(limits(algorithm, units_max=50))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        for gap_ns, cost in data.draw(traces([limit], fitting=True)):
            move(clock, gap_ns)
            before = counter.peek(KEY, 0)
            decision = counter.check(KEY, cost)
            if decision.charged_ns is not None:
                counter.refund(KEY, cost, decision.charged_ns)
            assert counter.peek(KEY, 0).remaining == before.remaining
            counter.check(KEY, 1)
