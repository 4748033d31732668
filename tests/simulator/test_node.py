"""A simulated node drives the fleet's own code: timeouts, crashes, reports and hints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.rates import parse_limits
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.network import Quality
from tests.simulator.node import DEADLINE_NS, NodeProcess, address_of, number_of
from tests.simulator.test_fleet import PLAN

QUIET = replace(PLAN, traffic=(), nodes=3, limits=parse_limits("1000/minute"))


def _started(consistency: str) -> tuple[SimulatedFleet, list[NodeProcess]]:
    """Return a fleet without traffic, half a second after its start."""
    fleet = SimulatedFleet(replace(QUIET, consistency=consistency))  # type: ignore[arg-type]  # given as text
    for node in fleet.nodes:
        fleet.start_node(node)
    fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND)
    return fleet, [node.process for node in fleet.nodes if node.process is not None]


def test_addresses_are_those_of_nodes() -> None:
    """Every node of a large fleet has its own address."""
    assert all(number_of(address_of(number)) == number for number in range(1_000))


def test_the_nodes_know_each_other() -> None:
    """Gossip runs: each node counts all nodes, and uses the count for its leases."""
    fleet, processes = _started("leased")
    assert [process.node.live_nodes() for process in processes] == [3, 3, 3]
    assert len(fleet.joined_ns) == 1


@pytest.mark.parametrize("fault", ["down", "cut off"])
def test_a_call_without_an_answer_fails(fault: str) -> None:
    """A refused call and a timeout both deny the request; nothing waits forever."""
    fleet, (process, *_) = _started("strict")
    if fault == "down":
        fleet.authority.is_up = False
    else:
        fleet.network.quality = Quality(DEADLINE_NS, DEADLINE_NS)
    process.check("user", 1)
    fleet.loop.run_until(fleet.loop.now + 2 * DEADLINE_NS)
    assert (fleet.counts.failed, fleet.counts.admitted) == (1, 0)


def test_a_killed_node_gets_no_answer() -> None:
    """The answer to a process that was killed is dropped, also if the node has started again."""
    fleet, (process, *_) = _started("strict")
    process.check("user", 1)
    fleet.kill_node(process.machine)
    fleet.start_node(process.machine)
    fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND // 50)
    assert fleet.authority.counter.peek("user", 0).remaining == 999
    fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND)
    assert fleet.counts.admitted == fleet.counts.failed == 0


def test_units_are_spent_in_the_node_and_given_back_when_it_stops() -> None:
    """A busy subject gets a lease, whose rest returns to the authority in an orderly shutdown."""
    fleet, (process, *_) = _started("leased")
    for _ in range(5):
        process.check("user", 1)
        fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND // 50)
    leased = process.table.stats().leased_units
    before = fleet.authority.counter.peek("user", 0).remaining
    assert leased > 0
    fleet.stop_node(process.machine)
    fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND // 100)
    assert fleet.authority.counter.peek("user", 0).remaining >= before + leased


def test_a_denial_reaches_the_other_nodes() -> None:
    """A node that did not ask denies a subject that another node was denied."""
    fleet, (one, other, _) = _started("eventual")
    for _ in range(25):
        one.check("user", 900)
        fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND // 500)
    fleet.loop.run_until(fleet.loop.now + NS_PER_SECOND // 50)
    calls = fleet.counts.calls
    denied = fleet.counts.denied
    other.check("user", 900)
    assert (fleet.counts.calls, fleet.counts.denied) == (calls, denied + 1)
    assert fleet.denial_times.heard_ns
