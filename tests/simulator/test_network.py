"""The virtual clock, the event loop, and the network's faults."""

from __future__ import annotations

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from tests.simulator.network import (
    NS_PER_MS,
    START_NS,
    Cut,
    EventLoop,
    NodeClock,
    Quality,
    VirtualNetwork,
    seeded,
)


def test_events_run_in_order_of_time_then_of_scheduling() -> None:
    """The loop is deterministic: equal times run in the order in which they were scheduled."""
    loop = EventLoop()
    seen: list[str] = []
    loop.after(20, seen.append, "later")
    loop.after(10, seen.append, "first")
    loop.after(10, seen.append, "second")
    loop.at(0, seen.append, "in the past: at once")
    loop.run_until(START_NS + 20)
    assert seen == ["in the past: at once", "first", "second", "later"]
    assert loop.now_ns() == START_NS + 20


def test_the_loop_stops_at_the_end() -> None:
    """An event after the end stays for the next part of the run."""
    loop = EventLoop()
    seen: list[int] = []
    loop.after(NS_PER_SECOND, seen.append, 1)
    loop.run_until(START_NS + 5)
    assert not seen
    loop.run_until(START_NS + NS_PER_SECOND)
    assert seen == [1]


async def test_simulated_code_cannot_wait() -> None:
    """Code that would block a virtual clock fails instead of hanging."""
    loop = EventLoop()
    clock = NodeClock(loop)
    for sleep in (loop.sleep, clock.sleep):
        with pytest.raises(NotImplementedError):
            sleep(1)
    for sleep_async in (loop.sleep_async, clock.sleep_async):
        with pytest.raises(NotImplementedError):
            await sleep_async(1)


def test_a_node_clock_has_its_own_offset_and_rate() -> None:
    """A node's clock is off by its offset, and drifts by its parts per million."""
    loop = EventLoop()
    clock = NodeClock(loop, wall_offset_ns=-60 * NS_PER_SECOND, drift_ppm=100)
    assert clock.now_ns() == START_NS - 60 * NS_PER_SECOND
    loop.run_until(START_NS + 10 * NS_PER_SECOND)
    assert clock.now_ns() - loop.now == -60 * NS_PER_SECOND + NS_PER_MS


def _arrivals(network: VirtualNetwork, count: int) -> list[int]:
    arrived: list[int] = []
    for number in range(count):
        network.send(0, 1, arrived.append, number)
    network.loop.run_until(network.loop.now + NS_PER_SECOND)
    return arrived


def test_a_good_network_delivers_everything_once_but_not_in_order() -> None:
    """Without loss, each message arrives once; messages overtake one another."""
    arrived = _arrivals(VirtualNetwork(EventLoop(), seeded(1)), 200)
    assert sorted(arrived) == list(range(200))
    assert arrived != sorted(arrived)


def test_messages_are_lost_and_repeated() -> None:
    """The shares of lost and repeated messages are those that were asked for."""
    quality = Quality(loss=0.3, duplication=0.2)
    arrived = _arrivals(VirtualNetwork(EventLoop(), seeded(1), quality), 2_000)
    assert 1_250 <= len(set(arrived)) <= 1_550  # of 1,400
    assert 180 <= len(arrived) - len(set(arrived)) <= 380  # of 280


@pytest.mark.parametrize(("both_ways", "back"), [(True, 0), (False, 1)])
def test_a_cut_stops_one_direction_or_both(both_ways: bool, back: int) -> None:
    """A one-way partition lets the other direction through; both heal."""
    network = VirtualNetwork(EventLoop(), seeded(1))
    network.cut_for(Cut(frozenset({0}), frozenset({1, 2}), both_ways), NS_PER_SECOND)
    arrived: list[str] = []
    network.send(0, 1, arrived.append, "there")
    network.send(1, 0, arrived.append, "back")
    network.send(2, 1, arrived.append, "elsewhere")
    network.loop.run_until(START_NS + NS_PER_SECOND)
    assert arrived.count("there") == 0
    assert arrived.count("back") == back
    assert arrived.count("elsewhere") == 1
    network.send(0, 1, arrived.append, "there")
    network.loop.run_until(START_NS + 2 * NS_PER_SECOND)
    assert arrived.count("there") == 1
