"""Promises 1 and 6: never over the limit, and time never rewinds."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import strategies as st

from ratekeeper import Limit, parse_limit
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import AlgorithmName
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.oracles import Admission, admissions, assert_never_over
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


@every_algorithm
@promise(120, data=st.data())
def test_never_over(algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject) -> None:
    """For any requests and any clock, no interval admits more than its bound."""
    limit = data.draw(limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], rewinds=True))
    with open_store(clock) as store:
        assert_never_over(limit, admissions(store.counter([limit], ""), clock, trace))


@promise(60, units=st.integers(1, 30), seconds=st.integers(1, 600), data=st.data())
def test_a_rate_in_any_time(
    units: int, seconds: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """`5 in any 60s` admits at most 5 units in any 60 s, wherever they start."""
    limit = parse_limit(f"{units} in any {seconds}s")
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], fitting=True))
    with open_store(clock) as store:
        admitted = admissions(store.counter([limit], ""), clock, trace)
    for start_ns, _ in admitted:
        end_ns = start_ns + seconds * NS_PER_SECOND
        assert sum(cost for at_ns, cost in admitted if start_ns <= at_ns < end_ns) <= units


@promise(100, limits=several_limits(), start_ns=starts_ns(), data=st.data())
def test_never_over_in_any_of_several_limits(
    limits: list[Limit], start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """The requests that pass several limits are within the bound of each."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, rewinds=True))
    with open_store(clock) as store:
        admitted = admissions(store.counter(limits, ""), clock, trace)
    for limit in limits:
        assert_never_over(limit, admitted)


@every_algorithm
@promise(40, data=st.data())
def test_never_over_while_states_come_and_go(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """Three keys share a store with random sweeps: no state is dropped too early."""
    limit = data.draw(limits(algorithm, units_max=1_000))
    trace = data.draw(traces([limit], fitting=True))
    keys = data.draw(
        st.lists(st.sampled_from(["a", "b", "c"]), min_size=len(trace), max_size=len(trace))
    )
    sweeps = data.draw(st.sets(st.integers(0, len(trace))))
    clock = clock_at(data.draw(starts_ns()))
    admitted: dict[str, list[Admission]] = {"a": [], "b": [], "c": []}
    with open_store(clock, 3) as store:
        counter = store.counter([limit], "")
        for index, ((gap_ns, cost), key) in enumerate(zip(trace, keys, strict=True)):
            move(clock, gap_ns)
            if counter.check(key, cost) and cost:
                admitted[key].append((clock.now_ns(), cost))
            if index in sweeps:
                store.sweep()
    for of_key in admitted.values():
        assert_never_over(limit, of_key)


@promise(80, limit=limits("leaky_bucket"), start_ns=starts_ns(), data=st.data())
def test_a_leaky_bucket_serves_evenly_spaced(
    limit: Limit, start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """Served after its delay, each request starts at least cost × window / limit after the previous
    one, up to the nanosecond that a delay rounds up by, with any clock."""
    clock = clock_at(start_ns)
    served: list[tuple[int, int]] = []
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        for gap_ns, cost in data.draw(traces([limit], rewinds=True, fitting=True)):
            move(clock, gap_ns)
            decision = counter.check(KEY, cost)
            assert decision.delay_ns >= 0
            if decision.allowed and cost:
                served.append((clock.now_ns() + decision.delay_ns, cost))
    for (before_ns, units), (after_ns, _) in pairwise(served):
        assert after_ns - before_ns > Fraction(units * limit.window_ns, limit.limit) - 1


@every_algorithm
@promise(60, data=st.data())
def test_jumping_back_admits_no_more_than_standing_still(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """The clock of one counter stops and that of its twin goes back further and further: the twin
    never admits more."""
    limit = data.draw(limits(algorithm, units_max=30))
    before = data.draw(traces([limit], steps_max=10))
    jumps = data.draw(st.lists(st.integers(1, 3 * limit.window_ns), min_size=1, max_size=40))
    start_ns = data.draw(starts_ns())
    still, jumping = clock_at(start_ns), clock_at(start_ns)
    with open_store(still) as one, open_store(jumping) as two:
        at_rest, back = one.counter([limit], ""), two.counter([limit], "")
        play(at_rest, still, before)
        play(back, jumping, before)
        top_ns = still.now_ns()
        lead = 0
        for jump_ns in sorted(jumps):
            move(jumping, top_ns - jump_ns - jumping.now_ns())
            lead += at_rest.check(KEY, 1).allowed - back.check(KEY, 1).allowed
            assert lead >= 0


@every_algorithm
@promise(60, data=st.data())
def test_after_a_jump_back_times_count_from_the_clock(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """A denial after the clock was set back has a wait by that clock: the time until it is where it
    was, and then the original wait."""
    limit = data.draw(limits(algorithm))
    cost = data.draw(st.integers(1, limit.capacity))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        counter.check(KEY, limit.capacity)
        before = counter.check(KEY, cost)
        start_ns = clock.now_ns()
        move(clock, -data.draw(st.integers(0, 3 * limit.window_ns)))
        jump_ns = start_ns - clock.now_ns()
        after = counter.check(KEY, cost)
        assert after.retry_after_ns == before.retry_after_ns + jump_ns
        assert after.reset_after_ns == before.reset_after_ns + jump_ns
        assert after.remaining == before.remaining
        clock.advance_ns(after.retry_after_ns - 1)
        assert not counter.check(KEY, cost)
        clock.advance_ns(1)
        assert counter.check(KEY, cost)
