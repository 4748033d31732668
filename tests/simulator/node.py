"""A node of a simulated fleet: the real counters, reports and gossip, driven by virtual time.

The node's code is the same as in production: `fleet/counters.py`, `fleet/reports.py`, the table of
allowances, and the state machine of gossip. Where it yields a Call of the authority, the call
travels through the simulated network (`Run`). Events of the loop replace the threads of a process:
one for the reports, one for gossip.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.core.model import Decision
from ratekeeper.core.steps import Call, Steps
from ratekeeper.decide.allowances import PythonAllowances
from ratekeeper.decide.failure import LocalCheck
from ratekeeper.decide.store import Counter
from ratekeeper.fleet.counters import NodeCounter
from ratekeeper.fleet.datagrams import Address, Message
from ratekeeper.fleet.gossip import Gossip
from ratekeeper.fleet.node import Node
from ratekeeper.fleet.outage import NodeTotals
from ratekeeper.fleet.reports import BATCH_MAX, Reports, round_ns
from ratekeeper.fleet.settings import Fleet
from tests.simulator.authority import RULE
from tests.simulator.network import NS_PER_MS, NodeClock, seeded

if TYPE_CHECKING:
    from tests.simulator.fleet import SimulatedFleet

AUTHORITY: Final = -1
"""The authority's address in the network."""
DEADLINE_NS: Final = 50 * NS_PER_MS
"""The timeout of a call: the default of `redis://`."""
PORT: Final = 7946


def address_of(number: int) -> Address:
    """Return the address of a node.

    >>> address_of(258)
    ('10.0.1.2', 7946)
    """
    return f"10.0.{number // 256}.{number % 256}", PORT


def number_of(address: Address) -> int:
    """Return the number of the node at an address."""
    _, _, high, low = address[0].split(".")
    return int(high) * 256 + int(low)


class SimulatedNode:
    """One machine. Its wall clock and its address outlive its processes."""

    def __init__(self, fleet: SimulatedFleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.wall_offset_ns = 0
        self.drift_ppm = 0
        self.starts = 0
        """How often the node was started. An answer to an earlier process is dropped."""
        self.process: NodeProcess | None = None

    @property
    def is_alive(self) -> bool:
        """True if the machine has a process."""
        return self.process is not None

    def start(self) -> None:
        """Start a process with an empty table."""
        self.starts += 1
        self.process = NodeProcess(self)
        self.process.start()

    def kill(self) -> None:
        """Kill the machine: its table and its calls are gone."""
        if self.process is not None:
            sent = self.process.gossip.counters().get("sent_bytes", 0)
            self.fleet.sent_bytes[self.number] += sent
        self.process = None

    def stop(self) -> None:
        """Shut the process down in order: it reports all charges, and leaves."""
        if self.process is not None:
            self.process.stop()
        self.kill()

    def check(self, subject: str, cost: int) -> None:
        """Decide a request."""
        if self.process is not None:
            self.process.check(subject, cost)


class NodeProcess:
    """One process of a node: its table, its counter, its reports and its gossip."""

    def __init__(self, machine: SimulatedNode) -> None:
        fleet = machine.fleet
        self.fleet = fleet
        self.machine = machine
        self.clock = NodeClock(fleet.loop, machine.wall_offset_ns, machine.drift_ppm)
        self.table = PythonAllowances(self.clock)
        plan = fleet.plan
        settings = Fleet(
            lease_seconds=plan.lease_seconds,
            flush_seconds=plan.flush_seconds,
            warm=plan.warm,
            nodes=plan.faults.scale_from or plan.nodes,
        )
        self.node = Node(settings, self.clock, self.table, fleet.authority.store)
        self.reports = Reports(self.node)
        self.counter: NodeCounter | None = None
        if plan.consistency != "strict":
            self.counter = NodeCounter(
                self.node, plan.limits, RULE, plan.consistency, fleet.authority.counter
            )
        seed = fleet.random.random()
        self.gossip = Gossip(address_of(machine.number), seeded(seed), self.clock.now_ns())
        self.node.make_counter = fleet.authority.store.counter
        self.totals = NodeTotals(self, self.clock.now_ns, settings.nodes, self.node.note_admitted)
        self._tick_ns = 0  # when the next tick of gossip is scheduled
        self._round_ns = round_ns(settings)

    @property
    def is_current(self) -> bool:
        """False after the process was killed."""
        return self.machine.process is self

    def start(self) -> None:
        """Start reports and gossip."""
        fleet = self.fleet
        if self.counter is None:
            return
        # The processes of a fleet do not start at the same instant.
        fleet.loop.after(fleet.random.randrange(self._round_ns), self._report)
        self.node.on_urgent = self._report_soon
        if fleet.plan.gossip:
            self.node.live_nodes = self.sharing_nodes
            self.node.hints = self
            self.node.hears_hints = self._knows_others
            self.totals.lead(self.gossip.node)
            self.gossip.join([address_of(node.number) for node in fleet.live])
            self._schedule_tick()

    def stop(self) -> None:
        """Report everything, and announce to the other nodes that this one leaves."""
        steps = self.reports.flushing(self.node.authority.report, ending=True)
        Run(self, steps, outlives=True).go()
        self._send(self.gossip.leave(self.clock.now_ns()))

    def check(self, subject: str, cost: int) -> None:
        """Decide a request: in the table, or by the authority."""
        counter = self.counter
        if counter is None:
            strict = _strict(self.fleet.authority.counter, subject, cost)
            CheckRun(self, strict, subject, cost).go()
            return
        decision = counter.spent(subject, cost)
        if decision is not None:
            self.fleet.decided(self.machine.number, subject, cost, decision, in_node=True)
            return
        steps = counter.asking(subject, cost)
        CheckRun(self, steps, subject, cost).go()

    def decide_locally(self, subject: str, cost: int) -> bool:
        """Decide a request while the authority is away: `on_failure: local`."""
        if self.counter is None or not self.fleet.plan.gossip:
            return False
        check = LocalCheck(self.fleet.plan.limits, RULE, subject, cost)
        decisions = self.totals.decide([check], spend=True)
        if not decisions or not all(decisions):
            return False
        self.node.note_admitted([check])
        return True

    def has_budget(self, subject: str) -> bool:
        """Return True if the node may admit the subject by itself."""
        if self.counter is None:
            return False
        record = self.table.records.get((self.counter.allowance.number, subject))
        now_ns = self.clock.now_ns()
        return (
            record is not None
            and record.left > 0
            and record.denied_until_ns <= now_ns < record.until_ns
        )

    # ── Reports ────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> None:
        """One round of the thread that reports."""
        if self.is_current:
            self._report_now()
            self.totals.publish()
            self.fleet.loop.after(self._round_ns, self._report)

    def _report_soon(self) -> None:
        """Wake the thread that reports."""
        self.fleet.loop.after(0, self._report_now)

    def _report_now(self) -> None:
        if self.is_current:
            Run(self, self._reporting()).go()

    def _reporting(self) -> Steps[None]:
        report = self.node.authority.report
        while (yield from self.reports.flushing(report)) == BATCH_MAX:
            pass

    # ── Gossip, as the node's agent connects it ────────────────────────────────────────────────

    def sharing_nodes(self) -> int:
        """Return how many nodes share the limits: never fewer than configured."""
        return max(self.gossip.live_nodes(), self.node.fleet.nodes)

    def heard_nodes(self) -> int:
        """Return how many nodes are alive by gossip: a process that starts knows none."""
        return 0

    def _knows_others(self) -> bool:
        return self.gossip.live_nodes() > 1

    def warm(self, gate: int, subject: str) -> None:
        """Announce to other nodes that a subject is warm."""
        self.gossip.warm(gate, subject, self.clock.now_ns())
        self._schedule_tick()

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """Announce to other nodes that a subject is denied."""
        self.fleet.denial_times.told(subject, self.machine.number)
        self.gossip.denied(gate, subject, cost, lasts_ns, self.clock.now_ns())
        self._schedule_tick()

    def received(self, message: Message, source: Address) -> None:
        """Handle a datagram."""
        if not self.is_current:
            return
        self._send(self.gossip.receive(message, source, self.clock.now_ns()))
        self._take_news()
        self._schedule_tick()

    def _take_news(self) -> None:
        """Pass on the hints, changes and payloads that have arrived."""
        if changes := self.gossip.take_changes():
            self.totals.on_changes(changes)
        if payloads := self.gossip.take_payloads():
            self.totals.on_payloads(payloads)
        for hint in self.gossip.take_hints():
            self.node.heard(hint)
            if hint.kind == "denied":
                self.fleet.denial_times.heard(hint.subject, self.machine.number)

    def publish(self, payload: bytes) -> int | None:
        """Send a payload of the totals to all nodes."""
        sequence = self.gossip.publish(payload, self.clock.now_ns())
        self._schedule_tick()
        return sequence

    def ask(self, question: bytes) -> None:
        """Return None: the process is its own agent."""

    def _schedule_tick(self) -> None:
        """Schedule the next tick, unless one is scheduled that is early enough."""
        wait_ns = max(self.gossip.due_ns - self.clock.now_ns(), 0)
        at_ns = self.fleet.loop.now + wait_ns
        if self._tick_ns <= self.fleet.loop.now or at_ns < self._tick_ns:
            self._tick_ns = max(at_ns, self.fleet.loop.now + 1)
            self.fleet.loop.at(self._tick_ns, self._tick, self._tick_ns)

    def _tick(self, at_ns: int) -> None:
        if self.is_current and at_ns == self._tick_ns:
            self._send(self.gossip.tick(self.clock.now_ns()))
            self._take_news()
            self._schedule_tick()

    def _send(self, messages: Iterable[tuple[Address, Message]]) -> None:
        source = address_of(self.machine.number)
        for address, message in messages:
            self.fleet.send_datagram(self.machine.number, number_of(address), message, source)


def _strict(counter: Counter, subject: str, cost: int) -> Steps[Decision]:
    decision: Decision = yield Call(counter.check, subject, cost)
    return decision


class Run:
    """Steps that a process carries out, with the calls that they make.

    An answer that arrives after the timeout of its call, or after its process was killed, is
    dropped. With `outlives`, the steps go on during the shutdown of the process, which waits for
    them.
    """

    __slots__ = ("_calls", "_outlives", "_process", "_steps", "_waits")

    def __init__(self, process: NodeProcess, steps: Steps[Any], *, outlives: bool = False) -> None:
        self._process = process
        self._steps = steps
        self._outlives = outlives
        self._calls = 0
        self._waits = False

    def go(self, result: Any = None) -> None:
        """Continue with the result of the last call, or with its error."""
        try:
            if isinstance(result, Exception):
                step = self._steps.throw(result)
            else:
                step = self._steps.send(result)
        except StopIteration as done:
            self.done(done.value)
            return
        except StoreError:
            self.done(None)
            return
        if not isinstance(step, Call):
            raise NotImplementedError("the steps of a fleet make one call at a time")
        self._send(step)

    def done(self, value: Any) -> None:
        """Take the result of the steps; None if a call failed."""

    def _send(self, call: Call) -> None:
        fleet, node = self._process.fleet, self._process.machine.number
        fleet.counts.calls += 1
        self._calls += 1
        self._waits = True
        fleet.send_call(node, AUTHORITY, self._arrive, call, self._calls)
        fleet.loop.after(DEADLINE_NS, self._timeout, self._calls)

    def _arrive(self, call: Call, number: int) -> None:
        fleet, node = self._process.fleet, self._process.machine.number
        if fleet.authority.is_up:
            result = fleet.authority.carry_out(call, node)
        else:
            result = StoreUnavailable("the authority is down")
        fleet.send_call(AUTHORITY, node, self._answered, result, number)

    def _answered(self, result: Any, number: int) -> None:
        if self._waits and number == self._calls and self._goes_on():
            self._waits = False
            self.go(result)

    def _timeout(self, number: int) -> None:
        if self._waits and number == self._calls and self._goes_on():
            self._waits = False
            self.go(StoreTimeout("the authority did not answer in time"))

    def _goes_on(self) -> bool:
        return self._outlives or self._process.is_current


class CheckRun(Run):
    """A check that the authority decides."""

    __slots__ = ("_cost", "_subject")

    def __init__(
        self, process: NodeProcess, steps: Steps[Decision], subject: str, cost: int
    ) -> None:
        super().__init__(process, steps)
        self._subject = subject
        self._cost = cost

    def done(self, value: Decision | None) -> None:
        """Count the answer."""
        process, subject, cost = self._process, self._subject, self._cost
        if value is None and process.decide_locally(subject, cost):
            process.fleet.admitted_locally(process.machine.number, subject, cost)
        else:
            process.fleet.decided(process.machine.number, subject, cost, value, in_node=False)
