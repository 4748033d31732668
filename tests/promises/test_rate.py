"""Promise 5: the configured rate is delivered, within 0.1 %, from 1/day to 1,000,000/s.

The client is greedy: after a denial it retries exactly at retry_after.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter
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


def greedy(counter: LocalCounter, clock: SteppedClock, cost: int, until_ns: int) -> list[int]:
    """Return the admission times of a greedy client until a time."""
    admitted = []
    while clock.now_ns() < until_ns:
        decision = counter.check(KEY, cost)
        if decision.allowed:
            admitted.append(clock.now_ns())
        else:
            clock.advance_ns(decision.retry_after_ns)
    return admitted


def assert_bucket_delivers(
    counter: LocalCounter, clock: SteppedClock, limit: Limit, cost: int
) -> None:
    """Assert that an empty bucket delivers at most rate × time, and at least 99.9 % of it, except
    for the loss of a client that can only send at whole steps of the clock.

    A client that is late by part of a step finds more units than its cost. The bucket keeps the
    surplus that fits for the next request and loses the rest, each time. With a step of one
    nanosecond there is no loss, because waits are whole nanoseconds.
    """
    counter.check(KEY, limit.capacity)
    start_ns = clock.now_ns()
    delivered = 0  # in units × window_ns, like `due`
    for _ in range(REQUESTS):
        clock.advance_ns(counter.check(KEY, cost).retry_after_ns)
        assert counter.check(KEY, cost).allowed
        delivered += cost * limit.window_ns
        if clock.now_ns() > LATEST_NS:
            break
    due = limit.limit * (clock.now_ns() - start_ns)
    late = limit.limit * (clock.step_ns - 1)
    overflow = REQUESTS * max(late - (limit.capacity - cost) * limit.window_ns, 0)
    assert delivered <= due
    assert due * 999 <= (delivered + late + overflow) * 1_000


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
@pytest.mark.parametrize(
    ("units", "window_us"),
    [
        (1, 86_400_000_000),
        (7, 86_400_000_000),
        (90, 60_000_000),  # clocks of whole seconds deliver 60
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
    """The rates of the promise are delivered, without a burst and with one of a window."""
    limit = limit_of(algorithm, units, window_us, capacity)
    clock = clock_at(1_700_000_000_123_456_789)
    with open_store(clock) as store:
        assert_bucket_delivers(store.counter([limit], ""), clock, limit, 1)


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
@promise(25, data=st.data())
def test_buckets_deliver_any_rate(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """For any rate and cost, each admission loses less than a millionth by rounding."""
    limit, cost = data.draw(steady_limits(algorithm))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        assert_bucket_delivers(store.counter([limit], ""), clock, limit, cost)


@promise(40, steady=steady_limits("sliding_window_log"), start_ns=starts_ns())
def test_the_log_delivers_the_limit_in_every_window(
    steady: tuple[Limit, int], start_ns: int, open_store: OpenStore
) -> None:
    """Each window from the first request on has exactly the limit."""
    limit, cost = steady
    clock = clock_at(start_ns)
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        start_ns = clock.now_ns()
        admitted = greedy(counter, clock, cost, start_ns + WINDOWS * limit.window_ns)
    windows = Counter((at_ns - start_ns) // limit.window_ns for at_ns in admitted)
    assert windows == dict.fromkeys(range(WINDOWS), limit.limit // cost)


@promise(40, steady=steady_limits("fixed_window"), start_ns=starts_ns())
def test_the_fixed_window_delivers_the_limit_in_every_window(
    steady: tuple[Limit, int], start_ns: int, open_store: OpenStore
) -> None:
    """Each window of the epoch has exactly the limit, including the one in which it starts."""
    limit, cost = steady
    clock = clock_at(start_ns)
    first = start_ns // limit.window_ns
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        admitted = greedy(counter, clock, cost, (first + WINDOWS) * limit.window_ns)
    windows = Counter(at_ns // limit.window_ns for at_ns in admitted)
    assert windows == dict.fromkeys(range(first, first + WINDOWS), limit.limit // cost)


@promise(60, steady=steady_limits("sliding_window_counter"), start_ns=starts_ns())
def test_the_counter_delivers_all_but_one_request_a_window(
    steady: tuple[Limit, int], start_ns: int, open_store: OpenStore
) -> None:
    """Of n requests a window, this algorithm delivers n − 1 or n, because the previous window
    counts until its end. From 1,000 a window on, that is within 0.1 %."""
    limit, cost = steady
    requests = limit.limit // cost
    clock = clock_at(start_ns)
    first = start_ns // limit.window_ns
    with open_store(clock) as store:
        counter = store.counter([limit], "")
        admitted = greedy(counter, clock, cost, (first + 1 + WINDOWS) * limit.window_ns)
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
        admitted = greedy(store.counter([limit], ""), clock, 1, clock.now_ns() + 4 * 10**9)
    windows = Counter(at_ns // 10**9 for at_ns in admitted)
    assert all(999 <= count <= 1_000 for count in windows.values())
    assert len(windows) == 4
