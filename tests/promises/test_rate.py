"""Promise 5: the configured rate is delivered, within 0.1 %, from 1/day to 1,000,000/s.

The client is greedy: it asks, and when denied comes back exactly at retry_after.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st

from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore
from tests.promises.strategies import (
    DAY_NS,
    KEY,
    LATEST_NS,
    LOG_LIMIT_MAX,
    clock_at,
    limit_of,
    promise,
    starts_ns,
    windows_us,
)
from tollkeeper import Limit
from tollkeeper.core.model import AlgorithmName
from tollkeeper.decide.store import Gate

WINDOWS = 6
REQUESTS = 300


@st.composite
def steady_limits(draw: st.DrawFn, algorithm: AlgorithmName) -> tuple[Limit, int]:
    """A limit between 1/day and 1,000,000/s, and a cost that divides it into 1 to 20 requests."""
    window_us = draw(windows_us())
    low = -(window_us * 1_000 // -DAY_NS)
    high = min(window_us, LOG_LIMIT_MAX)
    requests = draw(st.integers(1, 20))
    low_cost = -(low // -requests)
    cost = draw(st.integers(low_cost, max(low_cost, high // requests)))
    return limit_of(algorithm, requests * cost, window_us), cost


def greedy(gate: Gate, clock: SteppedClock, cost: int, until_ns: int) -> list[int]:
    """When a greedy client's requests are admitted, until a time."""
    admitted = []
    while clock.now_ns() < until_ns:
        decision = gate.check(KEY, cost)
        if decision.allowed:
            admitted.append(clock.now_ns())
        else:
            clock.advance_ns(decision.retry_after_ns)
    return admitted


def assert_bucket_delivers(gate: Gate, clock: SteppedClock, limit: Limit, cost: int) -> None:
    """From an empty bucket on: never more than rate × time, and at least 99.9 % of it, but for
    what the clock's step costs a client that can only come at whole steps.

    Coming late by part of a step, it finds more than it asked for. What the bucket has room to keep
    beyond the cost is there for the next request; the rest runs over, each time. Where a step is a
    nanosecond both are nothing, since a wait is in whole nanoseconds anyway."""
    gate.check(KEY, limit.capacity)
    start_ns = clock.now_ns()
    delivered = 0  # in units × window_ns, as what is due
    for _ in range(REQUESTS):
        clock.advance_ns(gate.check(KEY, cost).retry_after_ns)
        assert gate.check(KEY, cost).allowed
        delivered += cost * limit.window_ns
        if clock.now_ns() > LATEST_NS:
            break
    due = limit.limit * (clock.now_ns() - start_ns)
    late = limit.limit * (clock.step_ns - 1)
    run_over = REQUESTS * max(late - (limit.capacity - cost) * limit.window_ns, 0)
    assert delivered <= due
    assert due * 999 <= (delivered + late + run_over) * 1_000


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
@pytest.mark.parametrize(
    ("units", "window_us"),
    [
        (1, 86_400_000_000),
        (7, 86_400_000_000),
        (90, 60_000_000),  # whole-second clocks turn this into 60
        (3, 1_000_000),
        (1_000, 1_000_000),
        (999_983, 1_000_000),  # a prime: no unit takes a whole number of nanoseconds
        (1_000_000, 1_000_000),
        (1_000, 1_000),
    ],
)
@pytest.mark.parametrize("capacity", [1, 0])
def test_buckets_deliver_the_rates_of_the_promise(
    algorithm: AlgorithmName, units: int, window_us: int, capacity: int, open_store: OpenStore
) -> None:
    """The rates named in the promise, with no burst and with a window's worth of it."""
    limit = limit_of(algorithm, units, window_us, capacity)
    clock = clock_at(1_700_000_000_123_456_789)
    with open_store(clock) as store:
        assert_bucket_delivers(store.gate([limit], ""), clock, limit, 1)


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
@promise(25, data=st.data())
def test_buckets_deliver_any_rate(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """Any rate and any cost: what rounding loses at each admission is below a millionth."""
    limit, cost = data.draw(steady_limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        assert_bucket_delivers(store.gate([limit], ""), clock, limit, cost)


@promise(40, steady=steady_limits("sliding_window_log"), start_ns=starts_ns())
def test_the_log_delivers_the_limit_in_every_window(
    steady: tuple[Limit, int], start_ns: int, open_store: OpenStore
) -> None:
    """Exactly the limit in each window from the first request on."""
    limit, cost = steady
    clock = clock_at(start_ns)
    with open_store(clock) as store:
        gate = store.gate([limit], "")
        start_ns = clock.now_ns()
        admitted = greedy(gate, clock, cost, start_ns + WINDOWS * limit.window_ns)
    windows = Counter((at_ns - start_ns) // limit.window_ns for at_ns in admitted)
    assert windows == dict.fromkeys(range(WINDOWS), limit.limit // cost)


@promise(40, steady=steady_limits("fixed_window"), start_ns=starts_ns())
def test_the_fixed_window_delivers_the_limit_in_every_window(
    steady: tuple[Limit, int], start_ns: int, open_store: OpenStore
) -> None:
    """Exactly the limit in each window of the epoch, the one it starts within included."""
    limit, cost = steady
    clock = clock_at(start_ns)
    first = start_ns // limit.window_ns
    with open_store(clock) as store:
        gate = store.gate([limit], "")
        admitted = greedy(gate, clock, cost, (first + WINDOWS) * limit.window_ns)
    windows = Counter(at_ns // limit.window_ns for at_ns in admitted)
    assert windows == dict.fromkeys(range(first, first + WINDOWS), limit.limit // cost)


@promise(60, steady=steady_limits("sliding_window_counter"), start_ns=starts_ns())
def test_the_counter_delivers_all_but_one_request_a_window(
    steady: tuple[Limit, int], start_ns: int, open_store: OpenStore
) -> None:
    """What is true of this algorithm: of n requests a window it delivers n − 1 or n, since the
    previous window counts until its very end. Within 0.1 % from 1,000 a window on."""
    limit, cost = steady
    requests = limit.limit // cost
    clock = clock_at(start_ns)
    first = start_ns // limit.window_ns
    with open_store(clock) as store:
        gate = store.gate([limit], "")
        admitted = greedy(gate, clock, cost, (first + 1 + WINDOWS) * limit.window_ns)
    windows = Counter(at_ns // limit.window_ns for at_ns in admitted)
    full = [windows[number] for number in range(first + 1, first + 1 + WINDOWS)]
    assert all(requests - 1 <= count <= requests for count in full)
    if requests == 1:  # every other window
        assert sum(full) == WINDOWS // 2


def test_the_counter_delivers_a_thousand_within_a_thousandth(open_store: OpenStore) -> None:
    """A greedy client gets 999 to 1,000 of 1,000 in each window."""
    limit = Limit(1_000, per=1, algorithm="sliding_window_counter")
    clock = SteppedClock(start=1_700_000_000)
    with open_store(clock) as store:
        admitted = greedy(store.gate([limit], ""), clock, 1, clock.now_ns() + 4 * 10**9)
    windows = Counter(at_ns // 10**9 for at_ns in admitted)
    assert all(999 <= count <= 1_000 for count in windows.values())
    assert len(windows) == 4
