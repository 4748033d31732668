"""Promise 3: Retry-After is exact. Denied just before it and allowed at it."""

from __future__ import annotations

from hypothesis import strategies as st

from ratekeeper import Decision, Limit, Limiter
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm
from tests.promises.strategies import (
    KEY,
    LATEST_NS,
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

# When to check again between the denial and the retry, in thousandths of the wait.
partway = st.integers(0, 999)


def assert_exact(
    counter: LocalCounter, clock: SteppedClock, denied: Decision, cost: int, thousandths: int
) -> None:
    """Check partway, one step before, and at the retry time of a denial."""
    wait_ns, step_ns = denied.retry_after_ns, clock.step_ns
    assert wait_ns > 0
    assert wait_ns % step_ns == 0
    part_ns = wait_ns * thousandths // 1_000 // step_ns * step_ns
    for gap_ns, left_ns in ((part_ns, wait_ns - part_ns), (wait_ns - step_ns - part_ns, step_ns)):
        clock.advance_ns(gap_ns)
        again = counter.check(KEY, cost)
        assert not again.allowed
        assert again.retry_after_ns == left_ns
    clock.advance_ns(step_ns)
    assert counter.check(KEY, cost).allowed


def assert_all_exact(
    counter: LocalCounter, clock: SteppedClock, trace: list[tuple[int, int]], thousandths: int
) -> None:
    """Assert that the retry time of every denial of a trace is exact."""
    for gap_ns, cost in trace:
        move(clock, gap_ns)
        if clock.now_ns() >= LATEST_NS:
            return
        decision = check(counter, cost)
        if decision == "never":
            continue
        if decision.allowed:
            assert decision.retry_after_ns == 0
        else:
            assert_exact(counter, clock, decision, cost, thousandths)


@every_algorithm
@promise(80, data=st.data(), thousandths=partway)
def test_retry_after_is_exact(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject, thousandths: int
) -> None:
    """Before it, the same cost is denied with the rest of the wait. At it, the cost passes."""
    limit = data.draw(limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], steps_max=12))
    with open_store(clock) as store:
        assert_all_exact(store.counter([limit], ""), clock, trace, thousandths)


@promise(150, limits=several_limits(), start_ns=starts_ns(), data=st.data(), thousandths=partway)
def test_retry_after_is_exact_with_several_limits(
    limits: list[Limit],
    start_ns: int,
    data: st.DataObject,
    thousandths: int,
    open_store: OpenStore,
) -> None:
    """The wait lasts until all limits pass, to the step of the clock."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, steps_max=12))
    with open_store(clock) as store:
        assert_all_exact(store.counter(limits, ""), clock, trace, thousandths)


@every_algorithm
@promise(60, data=st.data(), thousandths=partway, units=st.integers(1, 30))
def test_retry_after_is_exact_while_a_grant_runs_out(
    algorithm: AlgorithmName,
    open_store: OpenStore,
    data: st.DataObject,
    thousandths: int,
    units: int,
) -> None:
    """Granted units shorten the wait only if they last until its end."""
    limit = data.draw(limits(algorithm, units_max=100))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], fitting=True, steps_max=12))
    ttl_ns = data.draw(st.integers(1, 3 * limit.window_ns))
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        counter.grant(KEY, units, clock.steps_up_ns(ttl_ns))
        assert_all_exact(counter, clock, trace, thousandths)


@promise(
    400,
    shrink=False,
    limits=several_limits(units_max=20),
    start_ns=starts_ns(),
    data=st.data(),
    thousandths=partway,
    units=st.integers(1, 30),
)
def test_retry_after_is_exact_with_several_limits_while_a_grant_runs_out(
    limits: list[Limit],
    start_ns: int,
    data: st.DataObject,
    thousandths: int,
    units: int,
    open_store: OpenStore,
) -> None:
    """The wait includes a limit that passes now only with its grant, if the grant ends before the
    others pass."""
    clock = clock_at(start_ns)
    trace = data.draw(traces(limits, fitting=True, steps_max=12))
    windows = [limit.window_ns for limit in limits]
    ttl_ns = data.draw(st.integers(1, 3 * min(windows)) | st.integers(1, max(windows)))
    with open_store(clock) as store:
        counter = store.counter(limits, "")
        counter.grant(KEY, units, clock.steps_up_ns(ttl_ns))
        assert_all_exact(counter, clock, trace, thousandths)


@every_algorithm
@promise(60, data=st.data())
def test_waiting_retry_after_seconds_always_suffices(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """`retry_after` is a float of seconds, rounded up, so a client that waits that long passes."""
    limit = data.draw(limits(algorithm))
    cost = data.draw(st.integers(1, limit.capacity))
    clock = clock_at(data.draw(starts_ns()))
    trace = data.draw(traces([limit], rewinds=True, steps_max=12))
    with open_store(clock) as store:
        play(store.counter([limit], ""), clock, trace)
        limiter = Limiter(limit, store=store, clock=clock)
        for _ in range(5):
            decision = limiter.check(KEY, cost)
            if not decision.allowed and clock.now_ns() < LATEST_NS:
                assert decision.retry_after > 0
                clock.advance(decision.retry_after)
                assert limiter.check(KEY, cost).allowed
