"""A simulated fleet: many nodes and one authority, with the real protocol code, from one seed.

The nodes run the code of `tollkeeper.fleet` and the tables of `decide/allowances.py`. The authority
is the reference store, `PythonMemoryStore`. Only the edges are simulated: clocks, the network, and
the load balancer. Where the protocol yields a Call of the authority (`core/steps.py`), the call
travels through the network, is carried out when it arrives, and its answer travels back. A node
that gets no answer in time continues with StoreTimeout, while the call may still be carried out.

A call that fails denies its request (`on_failure: closed`), so faults of the network cause fewer
admissions and never more. Calls travel over TCP: a lost packet is sent again after a while, and
only a partition loses a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tollkeeper.core.clock import NS_PER_SECOND, ns_from_seconds
from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from tollkeeper.core.model import Decision, Limit
from tollkeeper.core.steps import Call, Steps
from tollkeeper.decide.store import Gate
from tollkeeper.decide.stores.memory import PythonMemoryStore
from tollkeeper.lab.checkers import CentralLimiter, NeverOver
from tollkeeper.lab.faults import Faults
from tollkeeper.lab.network import (
    NS_PER_MS,
    START_NS,
    Cut,
    EventLoop,
    Network,
    NodeClock,
    Quality,
    seeded,
)
from tollkeeper.lab.traffic import USUAL_MIX, Traffic

RULE: Final = "simulated"
AUTHORITY: Final = -1
"""The authority's address in the network."""
DEADLINE_NS: Final = 50 * NS_PER_MS
"""The timeout of a call: the default of `redis://`."""
RETRANSMIT_NS: Final = 200 * NS_PER_MS
CLOCK_STEP_S: Final = 60
FAILOVER_LAG_S_MAX: Final = 1.0
# The time after the traffic in which calls return and reports arrive.
DRAIN_NS: Final = NS_PER_SECOND // 2


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to simulate."""

    limits: tuple[Limit, ...]
    consistency: str = "strict"
    nodes: int = 100
    seconds: float = 60.0
    seed: int = 0
    traffic: Traffic = USUAL_MIX
    lease_seconds: float = 1.0
    flush_seconds: float = 0.2
    warm: float = 0.5
    faults: Faults = field(default_factory=Faults)
    quality: Quality = field(default_factory=Quality)


@dataclass(slots=True)
class SecondOfTraffic:
    """What happened in one second, for the plot."""

    requests: int = 0
    admitted: int = 0
    in_node: int = 0
    ideal: int = 0


@dataclass(slots=True)
class FleetCounts:
    """What all nodes did."""

    requests: int = 0
    admitted: int = 0
    denied: int = 0
    failed: int = 0
    """Requests without an answer of the authority in time; they are denied."""
    in_node: int = 0
    """Requests that a node answered without a call."""
    calls: int = 0
    """Calls to the authority, of requests and of reports."""
    by_subject: dict[str, int] = field(default_factory=dict)
    """Requests that were admitted."""
    seconds: list[SecondOfTraffic] = field(default_factory=list)


class SimulatedAuthority:
    """The store that has the final word: it may be unreachable, and forget its last writes."""

    def __init__(self, loop: EventLoop, limits: tuple[Limit, ...], never_over: NeverOver) -> None:
        self._loop = loop
        self._never_over = never_over
        self.store = PythonMemoryStore(loop)
        self.gate: Gate = self.store.gate(limits, RULE)
        self.is_up = True
        self._replicas: list[_Replica] = []

    def carry_out(self, call: Call, node: int) -> Any:
        """Make a call that has arrived; return its result or the StoreError that it raised."""
        try:
            result = call.function(*call.args)
        except StoreError as error:
            return error
        if isinstance(result, Decision) and result.allowed and call.function.__name__ == "check":
            subject, cost = call.args
            self._note_charge(subject, cost, cost, node)
        return result

    def _note_charge(self, subject: str, cost: int, units: int, node: int) -> None:
        """Note an admission of `cost`, for which `units` were charged."""
        self._never_over.admitted(subject, cost, self._loop.now, f"the authority for node {node}")
        for replica in self._replicas:
            replica.missed[subject] = replica.missed.get(subject, 0) + units

    def fail_over_after(self, lag_ns: int) -> None:
        """Fail over to a replica that is `lag_ns` behind: all writes from now until then are lost.

        Outstanding calls are answered by the new primary.
        """
        replica = _Replica(deepcopy(self._states()))
        self._replicas.append(replica)
        self._loop.after(lag_ns, self._fail_over, replica)

    def _fail_over(self, replica: _Replica) -> None:
        for table, (entries, expiries) in zip(self._tables(), replica.states, strict=True):
            table.entries, table.expiries = entries, expiries
        self._replicas.remove(replica)
        for subject, units in replica.missed.items():
            self._never_over.forget(subject, units)

    def _states(self) -> list[Any]:
        return [(table.entries, table.expiries) for table in self._tables()]

    def _tables(self) -> list[Any]:
        tables = self.store._tables  # noqa: SLF001 - a failover is no function of a store
        return list(tables.values())


@dataclass(slots=True)
class _Replica:
    """A copy of the authority's states, and the units that were charged since."""

    states: list[Any]
    missed: dict[str, int] = field(default_factory=dict)


class SimulatedNode:
    """One node: its clock, and the requests that it has under way."""

    def __init__(self, fleet: SimulatedFleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.wall_offset_ns = 0
        self.drift_ppm = 0
        self.is_alive = False
        self.starts = 0
        """Times that it was started. An answer to an earlier process is dropped."""
        self.clock = NodeClock(fleet.loop)

    def start(self) -> None:
        """Start a process with an empty table."""
        self.clock = NodeClock(self.fleet.loop, self.wall_offset_ns, self.drift_ppm)
        self.starts += 1
        self.is_alive = True

    def kill(self) -> None:
        """Kill the machine: its table and its calls are gone."""
        self.is_alive = False

    def check(self, subject: str, cost: int) -> None:
        """Decide a request."""
        _Run(self, _strict(self.fleet.authority.gate, subject, cost), subject, cost).go()


def _strict(gate: Gate, subject: str, cost: int) -> Steps[Decision]:
    decision: Decision = yield Call(gate.check, subject, cost)
    return decision


class _Run:
    """Steps that one node carries out, with the calls that they make."""

    __slots__ = ("_call", "_node", "_number", "_started", "_steps", "_waits", "cost", "subject")

    def __init__(
        self, node: SimulatedNode, steps: Steps[Decision], subject: str, cost: int
    ) -> None:
        self._node = node
        self._steps = steps
        self._started = node.starts
        self._number = 0  # of the call that is under way
        self._waits = False
        self._call: Call | None = None
        self.subject = subject
        self.cost = cost

    def go(self, result: Any = None) -> None:
        """Continue with the result of the last call, or with its error."""
        try:
            if isinstance(result, Exception):
                step = self._steps.throw(result)
            else:
                step = self._steps.send(result)
        except StopIteration as done:
            self._node.fleet.decided(self, done.value)
            return
        except StoreError:
            self._node.fleet.decided(self, None)
            return
        if not isinstance(step, Call):
            raise NotImplementedError("the steps of a fleet make one call at a time")
        self._send(step)

    def _send(self, call: Call) -> None:
        fleet = self._node.fleet
        fleet.counts.calls += 1
        self._number += 1
        self._waits = True
        self._call = call
        fleet.send_call(self._node.number, AUTHORITY, self._arrive, call, self._number)
        fleet.loop.after(DEADLINE_NS, self._timeout, self._number)

    def _arrive(self, call: Call, number: int) -> None:
        fleet, node = self._node.fleet, self._node.number
        if not fleet.authority.is_up:
            refused = StoreUnavailable("the authority is down")
            fleet.send_call(AUTHORITY, node, self._answered, refused, number)
            return
        result = fleet.authority.carry_out(call, node)
        fleet.send_call(AUTHORITY, node, self._answered, result, number)

    def _answered(self, result: Any, number: int) -> None:
        if self._waits and number == self._number and self._is_current():
            self._waits = False
            self.go(result)

    def _timeout(self, number: int) -> None:
        if self._waits and number == self._number and self._is_current():
            self._waits = False
            self.go(StoreTimeout("the authority did not answer in time"))

    def _is_current(self) -> bool:
        return self._node.is_alive and self._node.starts == self._started

    @property
    def was_local(self) -> bool:
        """True if the node decided without a call."""
        return self._number == 0

    @property
    def node(self) -> int:
        """The number of the node."""
        return self._node.number


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
        self.network = Network(self.loop, seeded(self.random.random()), quality)
        self.never_over = NeverOver(plan.limits)
        self.central = CentralLimiter(plan.limits)
        self.counts = FleetCounts()
        self.authority = SimulatedAuthority(self.loop, plan.limits, self.never_over)
        self.nodes = [SimulatedNode(self, number) for number in range(plan.nodes)]
        self.live: list[SimulatedNode] = []
        self._second = SecondOfTraffic()

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run the whole plan. `progress` is called with the simulated seconds so far."""
        for _ in self.steps():
            if progress is not None:
                progress((self.loop.now - START_NS) / NS_PER_SECOND)

    def steps(self) -> Iterator[None]:
        """Run the plan, one simulated second at a time."""
        self._start()
        end_ns = START_NS + ns_from_seconds(self.plan.seconds)
        while self.loop.now < end_ns:
            self._second = SecondOfTraffic()
            self.counts.seconds.append(self._second)
            self.loop.run_until(min(self.loop.now + NS_PER_SECOND, end_ns))
            yield
        self._end()

    def _start(self) -> None:
        for node in self.nodes[: self.plan.faults.scale_from or None]:
            self.start_node(node)
        _FaultSchedule(self).start()
        random = seeded(self.random.random())
        for group in self.plan.traffic:
            group.start(self.loop, random, self.arrived)

    def _end(self) -> None:
        self.live = []  # no further request is counted
        self.loop.run_until(self.loop.now + DRAIN_NS)

    def start_node(self, node: SimulatedNode) -> None:
        """Start a node that is not running."""
        if not node.is_alive:
            node.start()
            self.live.append(node)

    def kill_node(self, node: SimulatedNode) -> None:
        """Kill a node, if it is running."""
        if node.is_alive:
            node.kill()
            self.live.remove(node)

    # Called by traffic and nodes.

    def arrived(self, subject: str, cost: int) -> None:
        """Give a request to a live node."""
        if not self.live:
            return
        self.counts.requests += 1
        second = self._second
        second.requests += 1
        if self.central.arrived(subject, cost, self.loop.now):
            second.ideal += 1
        self.random.choice(self.live).check(subject, cost)

    def decided(self, run: _Run, decision: Decision | None) -> None:
        """Count an answer; None if the authority did not answer."""
        counts, second = self.counts, self._second
        if run.was_local:
            counts.in_node += 1
            second.in_node += 1
        if decision is None:
            counts.failed += 1
        elif decision.allowed:
            counts.admitted += 1
            second.admitted += 1
            by_subject = counts.by_subject
            by_subject[run.subject] = by_subject.get(run.subject, 0) + 1
            if run.was_local:
                by = f"node {run.node}"
                self.never_over.admitted(run.subject, run.cost, self.loop.now, by)
        else:
            counts.denied += 1

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
