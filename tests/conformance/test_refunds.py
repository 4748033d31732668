"""Late refunds: a refund returns only what time has not returned, for every algorithm and store."""

from __future__ import annotations

import pytest

from ratekeeper import Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter, LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import every_algorithm

SECOND = 1_000_000_000


@pytest.fixture
def counter(algorithm: AlgorithmName, store: LocalStore) -> LocalCounter:
    """Five every ten seconds."""
    return store.counter([Limit(5, per=10, algorithm=algorithm)], "orders")


def _passing(counter: LocalCounter) -> int:
    """Return how many requests pass now."""
    return sum(counter.check("k", 1).allowed for _ in range(20))


@every_algorithm
def test_a_charge_has_the_time_of_the_store(counter: LocalCounter, clock: SteppedClock) -> None:
    """An allowed decision has the time of its charge; a decision that spent nothing has none."""
    clock.advance(3)
    assert counter.check("k", 5).charged_ns == clock.now_ns()
    assert counter.check("k", 1).charged_ns is None
    assert counter.check("k", 0).charged_ns is None
    assert counter.peek("other", 1).charged_ns is None


@every_algorithm
def test_requests_held_open_for_a_window_do_not_return_it_twice(
    counter: LocalCounter, clock: SteppedClock
) -> None:
    """Five requests stay open for a window and then fail. Time has returned their units, so five
    requests pass at that instant, not ten."""
    held = [counter.check("k", 1) for _ in range(5)]
    clock.advance(10)
    admitted = _passing(counter)
    for decision in held:
        counter.refund("k", 1, decision.charged_ns)
    assert admitted + _passing(counter) <= 5


@every_algorithm
def test_a_refund_in_time_returns_all_units(counter: LocalCounter) -> None:
    """A request that fails at once costs nothing."""
    first, second = counter.check("k", 2), counter.check("k", 3)
    counter.refund("k", 2, first.charged_ns)
    assert counter.peek("k", 0).remaining == 2
    counter.refund("k", 3, second.charged_ns)
    assert counter.peek("k", 0).remaining == 5


@every_algorithm
def test_a_charge_of_the_future_returns_no_more_than_it_took(
    counter: LocalCounter, clock: SteppedClock
) -> None:
    """A wrong time in a refund cannot return more units than it names."""
    counter.check("k", 5)
    counter.refund("k", 1, clock.now_ns() + 3_600 * SECOND)
    assert counter.peek("k", 0).remaining <= 1
    counter.refund("k", 1, -(10**30))
    assert counter.peek("k", 0).remaining <= 1


@pytest.mark.parametrize(("charged", "left_at_ten"), [(0, 3), (4, 4)])
def test_a_log_removes_the_entries_of_the_charge(
    store: LocalStore, clock: SteppedClock, charged: int, left_at_ten: int
) -> None:
    """Entries at 0, 4 and 8 s. One of the first two is refunded at 9 s. At 10 s the first leaves
    the window, if it is still there."""
    counter = store.counter([Limit(5, per=10, algorithm="sliding_window_log")], "log")
    start_ns = clock.now_ns()
    for _ in range(3):
        counter.check("k", 1)
        clock.advance(4)
    clock.advance_ns(start_ns + 9 * SECOND - clock.now_ns())
    counter.refund("k", 1, start_ns + charged * SECOND)
    assert counter.peek("k", 0).remaining == 3
    clock.advance(1)
    assert counter.peek("k", 0).remaining == left_at_ten
    clock.advance(4)
    assert counter.peek("k", 0).remaining == 4


@pytest.mark.parametrize("length", [9, 70, 200])
def test_a_refund_in_the_middle_of_a_long_log(
    store: LocalStore, clock: SteppedClock, length: int
) -> None:
    """Removing entries moves the newer ones down, over the borders of chunks and blocks."""
    limit = Limit(length, per=3_600, algorithm="sliding_window_log")
    counter = store.counter([limit], "log")
    charges = []
    for _ in range(length):
        charges.append(counter.check("k", 1).charged_ns)
        clock.advance(1)
    for second in range(2, length - 2, 3):
        counter.refund("k", 1, charges[second])
    refunded = len(range(2, length - 2, 3))
    assert counter.peek("k", 0).remaining == refunded
    clock.advance(3_600 - length)
    for second in range(length):  # each entry that is left leaves the window at its own time
        gone = sum(1 for each in range(second + 1) if each not in range(2, length - 2, 3))
        assert counter.peek("k", 0).remaining == refunded + gone
        clock.advance(1)
