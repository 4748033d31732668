"""A simulated fleet: many nodes and one authority, with the real protocol code, from one seed.

The nodes run the code of `ratekeeper.fleet` and the tables of `decide/allowances.py`. The authority
is the reference store, `PythonMemoryStore`. Only the edges are simulated: clocks, the network, and
the load balancer. Where the protocol yields a Call of the authority (`core/steps.py`), the call
travels through the network, is carried out when it arrives, and its answer travels back. A node
that gets no answer in time continues with StoreTimeout, while the call may still be carried out.

A request without an answer is decided by the totals of the fleet (`on_failure: local`). Strict
nodes, and nodes without gossip, deny it. Calls travel over TCP: a lost packet is sent again after a
while, and only a partition loses a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ratekeeper.core.clock import NS_PER_SECOND, ns_from_seconds
from ratekeeper.core.model import Consistency, Decision, Limit
from ratekeeper.fleet.datagrams import Address, Message
from tests.simulator.authority import SimulatedAuthority
from tests.simulator.checkers import CentralLimiter, DenialTimes, NeverOver
from tests.simulator.faults import Faults
from tests.simulator.network import (
    NS_PER_MS,
    START_NS,
    Cut,
    EventLoop,
    Quality,
    VirtualNetwork,
    seeded,
)
from tests.simulator.node import AUTHORITY, SimulatedNode
from tests.simulator.traffic import USUAL_MIX, Traffic

RETRANSMIT_NS: Final = 200 * NS_PER_MS
CLOCK_STEP_S: Final = 60
FAILOVER_LAG_S_MAX: Final = 1.0
# The time after the traffic in which calls return and reports arrive.
DRAIN_NS: Final = NS_PER_SECOND // 2
# All nodes together may admit this part of a limit before they report it to the authority.
EVENTUAL_OVER_MAX: Final = 0.25
# Faults that lose neither charges nor hints.
_HARMLESS: Final = frozenset({"duplication", "delay_ms", "stops", "clock_steps", "drift_ppm"})
# Faults in which a node dies, or in which the nodes do not know all nodes of the fleet.
_LOSES_MEMBERS: Final = frozenset({"crashes", "stops", "scale_from"})
# How often the simulation checks whether all nodes agree.
MEMBERSHIP_LOOK_NS: Final = 50 * NS_PER_MS
BUDGET_LOOK_NS: Final = 2 * NS_PER_MS
BUDGET_LOOKS_MAX: Final = 2_500


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to simulate."""

    limits: tuple[Limit, ...]
    consistency: Consistency = "strict"
    nodes: int = 100
    seconds: float = 60.0
    seed: int = 0
    traffic: Traffic = USUAL_MIX
    lease_seconds: float = 1.0
    flush_seconds: float = 0.2
    warm: float = 0.5
    gossip: bool = True
    """False: the nodes do not know each other."""
    faults: Faults = field(default_factory=Faults)
    quality: Quality = field(default_factory=Quality)

    @property
    def is_exact(self) -> bool:
        """True if the limits must never be exceeded, whatever happens."""
        return self.consistency != "eventual"


@dataclass(slots=True)
class FleetCounts:
    """The counts of all nodes together."""

    requests: int = 0
    admitted: int = 0
    denied: int = 0
    failed: int = 0
    """Requests without an answer of the authority in time; they are denied."""
    locally: int = 0
    """Requests that nodes admitted by the fleet's totals, without the authority."""
    in_node: int = 0
    """Requests that a node answered without a call."""
    calls: int = 0
    """Calls to the authority, of requests and of reports."""
    by_subject: dict[str, int] = field(default_factory=dict)
    """Requests that were admitted."""


class SimulatedFleet:
    """One run of a plan."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.random = seeded(plan.seed)
        self.loop = EventLoop()
        faults = plan.faults
        quality = replace(
            plan.quality,
            delay_ns_mean=plan.quality.delay_ns_mean + int(faults.delay_ms * NS_PER_MS),
            loss=faults.loss,
            duplication=faults.duplication,
        )
        self.network = VirtualNetwork(self.loop, seeded(self.random.random()), quality)
        self.never_over = NeverOver(plan.limits)
        self.outage_over = NeverOver(plan.limits)
        """The same for the admissions of nodes while the authority is away."""
        self.central = CentralLimiter(plan.limits)
        self.counts = FleetCounts()
        self.authority = SimulatedAuthority(self.loop, plan.limits, self.never_over)
        self.denial_times = DenialTimes(self.loop)
        self.nodes = [SimulatedNode(self, number) for number in range(plan.nodes)]
        self.live: list[SimulatedNode] = []
        self.sent_bytes = [0] * plan.nodes
        """The bytes that each node has sent by gossip, headers included."""
        self.stopped_ns: list[int] = []
        """From the first denial of a subject until no node has a budget for it."""
        self.joined_ns: list[int] = []
        """From the start of a node until all nodes know exactly the live nodes."""
        self.noticed_ns: list[int] = []
        """The same after a node was killed."""
        self._denied: set[str] = set()
        self._changed_ns = 0
        self._after_kill = False
        self._looks = False

    def run(self) -> None:
        """Run the whole plan."""
        for node in self.nodes[: self.plan.faults.scale_from or None]:
            self.start_node(node)
        _FaultSchedule(self).start()
        random = seeded(self.random.random())
        for group in self.plan.traffic:
            group.start(self.loop, random, self.arrived)
        self.loop.run_until(START_NS + ns_from_seconds(self.plan.seconds))
        self.live = []  # no further request is counted
        self.loop.run_until(self.loop.now + DRAIN_NS)
        for node in self.nodes:
            node.kill()

    def problems(self) -> list[str]:
        """Return the promises that the run has broken.

        An eventual limit may be over by the charges on their way, at most a quarter, as long as no
        charge and no hint is lost. The units that the nodes admit while the authority is away are
        within the limit, too, as long as no node dies before it has announced its units.
        """
        faults = self.plan.faults.given()
        found = [] if faults & _LOSES_MEMBERS else list(self.outage_over.violations)
        if self.plan.is_exact:
            return found + self.never_over.violations
        over = self.never_over.overshoot()
        if over > EVENTUAL_OVER_MAX and faults <= _HARMLESS:
            found.append(f"an eventual limit is over by {over:.0%}")
        return found

    def start_node(self, node: SimulatedNode) -> None:
        """Start a node that is not running."""
        if not node.is_alive:
            self.live.append(node)
            node.start()
            self._membership_changed()

    def kill_node(self, node: SimulatedNode) -> None:
        """Kill a node, if it is running."""
        if node.is_alive:
            node.kill()
            self.live.remove(node)
            self._membership_changed(killed=True)

    def stop_node(self, node: SimulatedNode) -> None:
        """Shut a node down in order, if it is running."""
        if node.is_alive:
            node.stop()
            self.live.remove(node)
            self._membership_changed()

    # Traffic and nodes call these methods.

    def arrived(self, subject: str, cost: int) -> None:
        """Send a request to a live node."""
        if not self.live:
            return
        self.counts.requests += 1
        self.central.arrived(subject, cost, self.loop.now)
        self.random.choice(self.live).check(subject, cost)

    def decided(
        self, node: int, subject: str, cost: int, decision: Decision | None, *, in_node: bool
    ) -> None:
        """Count an answer; None if the authority did not answer."""
        counts = self.counts
        if in_node:
            counts.in_node += 1
        if decision is None:
            counts.failed += 1
        elif decision.allowed:
            counts.admitted += 1
            counts.by_subject[subject] = counts.by_subject.get(subject, 0) + 1
            if in_node:
                self.never_over.admitted(subject, cost, self.loop.now, f"node {node}")
        else:
            counts.denied += 1
            if subject not in self._denied and not self.plan.is_exact:
                self._denied.add(subject)
                self._look_for_budgets(subject, 0)

    def admitted_locally(self, node: int, subject: str, cost: int) -> None:
        """Count a request that a node admitted by the fleet's totals, without the authority."""
        counts = self.counts
        counts.locally += 1
        counts.admitted += 1
        counts.by_subject[subject] = counts.by_subject.get(subject, 0) + 1
        self.outage_over.admitted(subject, cost, self.loop.now, f"the totals of node {node}")

    def send_datagram(self, source: int, target: int, message: Message, address: Address) -> None:
        """Send a message of gossip."""
        node = self.nodes[target]
        self.network.send(source, target, self._deliver, node, message, address)

    def _deliver(self, node: SimulatedNode, message: Message, source: Address) -> None:
        if node.process is not None:
            node.process.received(message, source)

    def send_call(self, source: int, target: int, deliver: Callable[..., None], *args: Any) -> None:
        """Send a call to the authority or its answer, over TCP."""
        network = self.network
        if network.is_cut(source, target):
            network.lost += 1
            return
        delay_ns = network.delay_ns()
        if network.quality.loss and network.random.random() < network.quality.loss:
            delay_ns += RETRANSMIT_NS
        self.loop.after(delay_ns, deliver, *args)

    # Measurements.

    def _look_for_budgets(self, subject: str, looks: int) -> None:
        """Measure how long any node may still admit a subject that was denied."""
        processes = (node.process for node in self.live)
        if looks < BUDGET_LOOKS_MAX and any(
            each and each.has_budget(subject) for each in processes
        ):
            self.loop.after(BUDGET_LOOK_NS, self._look_for_budgets, subject, looks + 1)
        else:
            self.stopped_ns.append(looks * BUDGET_LOOK_NS)

    def _membership_changed(self, *, killed: bool = False) -> None:
        self._changed_ns = self.loop.now
        self._after_kill = killed
        if not self._looks and self.plan.gossip and self.plan.consistency != "strict":
            self._looks = True
            self.loop.after(MEMBERSHIP_LOOK_NS, self._look_at_membership)

    def _look_at_membership(self) -> None:
        """Measure how long the nodes take to agree on the live nodes."""
        count = len(self.live)
        processes = (node.process for node in self.live)
        if any(each and each.gossip.live_nodes() != count for each in processes):
            self.loop.after(MEMBERSHIP_LOOK_NS, self._look_at_membership)
            return
        self._looks = False
        times = self.noticed_ns if self._after_kill else self.joined_ns
        times.append(self.loop.now - self._changed_ns)


class _FaultSchedule:
    """Schedules the faults of a plan."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._random = seeded(fleet.random.random())
        self._length_ns = ns_from_seconds(fleet.plan.seconds)

    def start(self) -> None:
        """Schedule all faults."""
        fleet, faults = self._fleet, self._fleet.plan.faults
        if faults.scale_from:
            for node in fleet.nodes[faults.scale_from :]:
                start_ns = self._random.randrange(self._length_ns // 2)
                fleet.loop.after(start_ns, fleet.start_node, node)
        for node in fleet.nodes:
            node.drift_ppm = self._random.randint(-faults.drift_ppm, faults.drift_ppm)
            if faults.clock_steps:
                node.wall_offset_ns = self._clock_offset_ns()
        for event, count in (
            (self._cut, faults.partitions),
            (self._cut_one_way, faults.one_way),
            (self._crash, faults.crashes),
            (self._stop, faults.stops),
            (self._step_clock, faults.clock_steps),
            (self._fail_over, faults.failovers),
            (self._outage, faults.outages),
        ):
            for _ in range(count):
                fleet.loop.after(self._moment_ns(), event)

    def _moment_ns(self) -> int:
        return int(self._random.uniform(0.1, 0.9) * self._length_ns)

    def _while_ns(self) -> int:
        return int(self._random.uniform(0.02, 0.2) * self._length_ns)

    def _clock_offset_ns(self) -> int:
        return int(self._random.uniform(-CLOCK_STEP_S, CLOCK_STEP_S) * NS_PER_SECOND)

    def _part(self) -> frozenset[int]:
        nodes = range(len(self._fleet.nodes))
        count = self._random.randint(1, max(len(nodes) // 2, 1))
        return frozenset(self._random.sample(nodes, count))

    def _cut(self, both_ways: bool = True) -> None:
        """Cut a part of the nodes off from the others; the authority is on either side."""
        part = self._part()
        rest = frozenset({AUTHORITY, *range(len(self._fleet.nodes))}) - part
        if self._random.random() < 0.5:
            part, rest = rest, part
        self._fleet.network.cut_for(Cut(part, rest, both_ways), self._while_ns())

    def _cut_one_way(self) -> None:
        self._cut(both_ways=False)

    def _crash(self) -> None:
        fleet = self._fleet
        if len(fleet.live) > 1:
            node = self._random.choice(fleet.live)
            fleet.kill_node(node)
            fleet.loop.after(self._while_ns(), fleet.start_node, node)

    def _stop(self) -> None:
        fleet = self._fleet
        if len(fleet.live) > 1:
            node = self._random.choice(fleet.live)
            fleet.stop_node(node)
            fleet.loop.after(self._while_ns(), fleet.start_node, node)

    def _fail_over(self) -> None:
        lag_ns = int(self._random.uniform(0.0, FAILOVER_LAG_S_MAX) * NS_PER_SECOND)
        self._fleet.authority.fail_over_after(lag_ns)

    def _outage(self) -> None:
        """Take the authority away: it refuses calls, or does not answer at all."""
        if self._random.random() < 0.5:
            everything = frozenset(range(AUTHORITY, len(self._fleet.nodes)))
            cut = Cut(everything, frozenset({AUTHORITY}))
            self._fleet.network.cut_for(cut, self._while_ns())
        else:
            self._fleet.authority.is_up = False
            self._fleet.loop.after(self._while_ns(), self._end_outage)

    def _end_outage(self) -> None:
        self._fleet.authority.is_up = True

    def _step_clock(self) -> None:
        self._random.choice(self._fleet.nodes).wall_offset_ns = self._clock_offset_ns()


def simulate(plan: FleetPlan) -> SimulatedFleet:
    """Run a plan to its end and return the fleet."""
    fleet = SimulatedFleet(plan)
    fleet.run()
    return fleet
