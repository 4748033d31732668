"""The limits of a node while the authority is away, and what it is charged afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.model import Limit
from ratekeeper.decide.failure import LocalCheck, LocalFallback, LocalLimits
from ratekeeper.fleet.gossip import MemberChange, ReceivedPayload
from ratekeeper.fleet.outage import (
    ALONE_NS,
    DEAD_COUNT_NS,
    GROUPS_MAX,
    SILENCE_NS,
    SLOW_NS,
    SLOW_PAUSE,
    LiveMajority,
    NodeTotals,
    OutageCharges,
    answer_of,
    checks_in,
    decisions_in,
    question_of,
)
from ratekeeper.testing import ManualClock

LIMITS = (Limit(60, per=3600),)
SECOND = 1_000_000_000


class Wire:
    """The agent of one node: payloads arrive at once, and questions at the agent's totals."""

    def __init__(self, node: int, nodes: dict[int, NodeTotals]) -> None:
        self.node, self._nodes = node, nodes
        self.agent: NodeTotals | None = None
        self.asked = self.takes_ns = 0
        self.clock: ManualClock | None = None
        self.sharing = self.heard = 0
        self.charges = OutageCharges()
        self.sent: list[tuple[int, bytes]] = []

    def publish(self, payload: bytes) -> int | None:
        self.sent.append((self.node, payload))
        return len(self.sent)

    def ask(self, question: bytes) -> bytes | None:
        self.asked += 1
        if self.clock is not None:
            self.clock.advance_ns(self.takes_ns)
        return None if self.agent is None else self.agent.answer(question)

    def sharing_nodes(self) -> int:
        return self.sharing or len(self._nodes)

    def heard_nodes(self) -> int:
        return self.heard

    def deliver(self) -> None:
        sent, self.sent = self.sent, []
        for node, payload in sent:
            for other, totals in self._nodes.items():
                if other != node:
                    totals.on_payloads([ReceivedPayload(node, 1, payload)])


def totals_of(wire: Wire, clock: ManualClock, nodes: int = 1) -> NodeTotals:
    def note(checks: Sequence[LocalCheck]) -> None:
        wire.charges.note(checks, clock.now_ns())

    return NodeTotals(wire, clock.now_ns, nodes, note)


class Nodes:
    """Three nodes of one process each."""

    def __init__(self, clock: ManualClock, count: int = 3) -> None:
        self.clock = clock
        self.totals: dict[int, NodeTotals] = {}
        self.wires = [Wire(node, self.totals) for node in range(1, count + 1)]
        for wire in self.wires:
            self.totals[wire.node] = totals_of(wire, clock)
        for node, totals in self.totals.items():
            totals.lead(node)
            totals.on_changes([MemberChange(each, True) for each in self.totals if each != node])
        self.talk(2)
        self.local = {node: LocalLimits(LocalFallback(), clock) for node in self.totals}
        for node, local in self.local.items():
            local.fleet = self.totals[node]

    def talk(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.clock.advance(0.1)
            for wire in self.wires:
                wire.deliver()
            for totals in self.totals.values():
                totals.publish()

    def admit(self, node: int, times: int, limits: Sequence[Limit] = LIMITS) -> int:
        check = LocalCheck(tuple(limits), "api", "user:ann", 1)
        return sum(all(self.local[node].decide([check], None, spend=True)) for _ in range(times))


def test_one_busy_node_gets_more_than_a_share_and_all_get_no_more_than_the_limit(
    clock: ManualClock,
) -> None:
    """One of three nodes gets two shares of 20; with the others, no more than 60 in all."""
    nodes = Nodes(clock)
    assert nodes.admit(1, 100) == 20
    for _ in range(20):
        nodes.talk(0.5)
        nodes.admit(1, 100)
    first = sum(charge.units for charge in nodes.wires[0].charges.take(100))
    assert 35 <= first <= 41  # the ceiling, and what one limit refills in ten seconds
    others = 0
    for _ in range(20):
        nodes.talk(0.5)
        others += nodes.admit(2, 100) + nodes.admit(3, 100)
    assert first + others <= 61


def lose(nodes: Nodes, node: int, *lost: int, left: bool = False) -> None:
    """Tell a node one by one that others are no longer there; they hear nothing of each other."""
    nodes.wires[node - 1].sharing = 1  # gossip counts itself only, and nothing is configured
    for each in lost:
        nodes.totals[node].on_changes([MemberChange(each, False, left)])


def test_a_node_that_has_lost_the_others_keeps_its_share(clock: ManualClock) -> None:
    """Each of 20 nodes that were all cut off would admit the whole limit otherwise."""
    nodes = Nodes(clock, count=20)
    nodes.talk(30)
    minute = (Limit(100, per=60),)
    lose(nodes, 1, *range(2, 21))
    assert nodes.totals[1].nodes() == 20
    admitted = 0
    for _ in range(240):
        clock.advance(5)
        nodes.totals[1].publish()
        admitted += nodes.admit(1, 3, minute)
    assert 95 <= admitted <= 105  # a share of 5 a minute, for 20 minutes


def test_half_of_the_fleet_is_not_the_fleet(clock: ManualClock) -> None:
    """Of four nodes, two and two no longer hear each other: neither part takes the other's."""
    nodes = Nodes(clock, count=4)
    everyone = dict(nodes.totals)
    for node, lost in ((1, (3, 4)), (2, (3, 4)), (3, (1, 2)), (4, (1, 2))):
        lose(nodes, node, *lost)
    admitted = 0
    for part in ((1, 2), (3, 4)) * 20:
        nodes.totals.clear()
        nodes.totals.update({node: everyone[node] for node in part})
        nodes.talk(0.5)
        admitted += nodes.admit(part[0], 100) + nodes.admit(part[1], 100)
    assert 55 <= admitted <= 61


def test_nodes_that_said_that_they_leave_are_not_missed(clock: ManualClock) -> None:
    """The last node of a fleet that was scaled down has the whole limit, in time."""
    nodes = Nodes(clock, count=4)
    lose(nodes, 1, 2, 3, 4, left=True)
    assert nodes.totals[1].nodes() == 1
    assert nodes.admit(1, 100) == 60


def test_dead_nodes_count_for_ten_minutes(clock: ManualClock) -> None:
    """Nodes that die long after each other never make the others a minority."""
    majority = LiveMajority(5)
    assert [majority.lost(live, 0) for live in (5, 4, 3, 2, 1)] == [0, 0, 0, 3, 4]
    assert majority.lost(3, DEAD_COUNT_NS - 1) == 0
    assert majority.lost(2, DEAD_COUNT_NS - 1) == 3
    assert majority.lost(3, DEAD_COUNT_NS) == 0
    assert majority.lost(2, DEAD_COUNT_NS) == 0
    assert majority.lost(1, 9 * DEAD_COUNT_NS) == 2


def test_a_new_agent_has_no_share_until_it_has_heard_of_others(clock: ManualClock) -> None:
    """It may be one of many nodes. After some seconds it is alone."""
    wire = Wire(1, {})
    agent = totals_of(wire, clock)
    agent.lead(1)
    check = [LocalCheck(LIMITS, "api", "user:ann", 1)]
    assert not all(agent.decide(check, spend=True) or [])
    clock.advance(ALONE_NS / SECOND)
    agent.publish()
    assert all(agent.decide(check, spend=True) or [False])


def test_a_process_that_takes_over_knows_how_many_nodes_there_were(clock: ManualClock) -> None:
    """It has no share until most of them have confirmed it; after a while, the fixed share."""
    wire = Wire(1, {})
    wire.heard = 20
    agent = totals_of(wire, clock)
    agent.lead(1)
    check = [LocalCheck(LIMITS, "api", "user:ann", 1)]
    for _ in range(4):
        clock.advance(4)
        agent.publish()
        assert not all(agent.decide(check, spend=True) or [])
    clock.advance(4)
    assert agent.decide(check, spend=True) is None
    assert agent.nodes() == 20


def test_another_process_of_the_node_asks_the_agent(clock: ManualClock) -> None:
    """Both spend from the same totals; each notes its own charges."""
    nodes = Nodes(clock)
    wire = Wire(1, nodes.totals)
    wire.agent = nodes.totals[1]
    worker = totals_of(wire, clock)
    check = LocalCheck(LIMITS, "api", "user:ann", 15)
    [decision] = worker.decide([check], spend=True) or []
    assert (decision.allowed, decision.remaining, decision.rule) == (True, 5, "api")
    assert decision.policy is LIMITS[0]
    assert nodes.admit(1, 100) == 5
    [denied] = worker.decide([check], spend=True) or []
    assert not denied.allowed
    assert denied.retry_after > 0
    assert [each.units for each in nodes.wires[0].charges.take(9)] == [5]
    assert len(wire.charges) == 0
    worker.note_admitted([check])
    assert [each.units for each in wire.charges.take(9)] == [15]


def test_an_agent_that_does_not_answer_is_not_asked_for_a_second(clock: ManualClock) -> None:
    """A dead agent must not delay every request."""
    wire = Wire(1, {})
    worker = totals_of(wire, clock)
    check = [LocalCheck(LIMITS, "api", "user:ann", 1)]
    for _ in range(5):
        assert worker.decide(check, spend=True) is None
    assert wire.asked == 1
    clock.advance(SILENCE_NS / SECOND)
    worker.decide(check, spend=True)
    assert wire.asked == 2
    assert worker.nodes() == 1


def test_a_slow_agent_is_asked_less_often(clock: ManualClock) -> None:
    """A process spends a twentieth of its time with slow answers; quick ones do not matter."""
    nodes = Nodes(clock)
    wire = Wire(1, nodes.totals)
    wire.agent = nodes.totals[1]
    worker = totals_of(wire, clock)
    check = [LocalCheck(LIMITS, "api", "user:ann", 0)]
    wire.clock, wire.takes_ns = clock, SLOW_NS
    assert worker.decide(check, spend=True)
    wire.takes_ns = 3 * SLOW_NS
    assert worker.decide(check, spend=True)
    assert worker.decide(check, spend=True) is None
    clock.advance_ns(SLOW_PAUSE * wire.takes_ns - 1)
    assert worker.decide(check, spend=True) is None
    clock.advance_ns(1)
    assert worker.decide(check, spend=True)
    assert wire.asked == 3


def test_a_process_that_leads_no_longer_asks(clock: ManualClock) -> None:
    """Its totals are gone, and the totals of a forked child are its parent's."""
    nodes = Nodes(clock)
    nodes.totals[1].lead(None)
    check = [LocalCheck(LIMITS, "api", "user:ann", 1)]
    assert nodes.totals[1].decide(check, spend=True) is None
    assert nodes.wires[0].asked == 1
    nodes.totals[1].publish()
    assert nodes.totals[1].answer(question_of(check, spend=True)) == b"null"


def test_the_bytes_of_payloads_are_bounded(clock: ManualClock) -> None:
    """A node with many peers sends less often."""
    nodes = Nodes(clock, count=20)
    nodes.talk(30)
    before = [0, 0]
    sent = nodes.wires[0].sent
    for number in range(3000):
        check = LocalCheck(LIMITS, "api", f"user:{number}", 1)
        nodes.totals[1].decide([check], spend=True)
        clock.advance(0.002)
        before[0] += sum(len(payload) for _, payload in sent)
        before[1] += len(sent)
        sent.clear()
    assert 0 < before[0] * 19 / 6 < 30_000


LIMIT = st.builds(
    Limit,
    st.integers(1, 10**6),
    st.sampled_from((0.001, 0.25, 1, 60, 86_400 * 366)),
    st.sampled_from(("fixed_window", "token_bucket", "sliding_window_log")),
    name=st.text(st.characters(categories=("L", "N")), max_size=9),
)
CHECK = st.builds(
    LocalCheck,
    st.lists(LIMIT, min_size=1, max_size=3).map(tuple),
    st.text(max_size=9),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.integers(0, 10**9),
    part=st.none(),  # the agent decides by the whole limits
)


@given(st.lists(CHECK, max_size=3), st.booleans())
def test_a_question_says_what_was_asked(checks: list[LocalCheck], spend: bool) -> None:
    """Limits, names and units arrive as they were."""
    assert checks_in(question_of(checks, spend=spend)) == (checks, spend)


@given(st.binary(max_size=99))
def test_bytes_that_make_no_sense_are_no_question_and_no_answer(content: bytes) -> None:
    """They are dropped without an error."""
    checks_in(content)
    decisions_in(content, [LocalCheck(LIMITS, "api", "ann", 1)], 0)


@pytest.mark.parametrize(
    "content",
    [
        None,
        1,
        [],
        [True],
        [True, [1]],
        [True, [["r", "s", -1, []]]],
        [True, [["r", "s", 1, []]]],
        [True, [["r", "s", 1, [["", 9, 1, 1, 1, 1]]]]],
        [True, [["r", "s", 1, [["", 0, "x", 1, 1, 1]]]]],
        [True, [["r", "s", 1, [["", 0, 1, 1, 10**30, 1]]]]],
        [True, [["r", "s", True, [["", 0, 1, 1, 1000, 0]]]]],
    ],
    ids=str,
)
def test_a_question_of_another_shape_is_dropped(content: Any) -> None:
    """Also JSON that is not a question, and limits that are not valid."""
    assert checks_in(json.dumps(content).encode()) is None


def test_an_answer_of_another_shape_is_dropped() -> None:
    """The process then has its fixed share."""
    check = LocalCheck(LIMITS, "api", "ann", 1)
    assert answer_of([check], None) == b"null"
    for content in (None, [], [[True]], [[True, 9, 0, 0, 0, 0]], [[True, 0, -1, 0, 0, 0]]):
        assert decisions_in(json.dumps(content).encode(), [check], 0) is None


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3 * SECOND), st.booleans()), max_size=60)
)
def test_no_charge_is_lost_or_counted_twice(events: list[tuple[int, int, bool]]) -> None:
    """Whatever is taken and put back; the groups of a subject are bounded and in order."""
    charges = OutageCharges()
    noted, now_ns = 0, SECOND
    for units, pause_ns, retry in events:
        charges.note([LocalCheck(LIMITS, "api", "ann", units)], now_ns)
        noted += units
        now_ns += pause_ns
        if retry:
            charges.put_back(charges.take(9))
    found = charges.take(9)
    assert sum(each.units for each in found) == noted
    assert len(found) <= GROUPS_MAX
    assert [each.at_ns for each in found] == sorted(each.at_ns for each in found)
    assert charges.take(9) == []


def test_charges_are_bounded() -> None:
    """A subject without room is counted as lost."""
    charges = OutageCharges(subjects_max=2)
    lost = [
        charges.note([LocalCheck(LIMITS, "api", subject, 3)], SECOND)
        for subject in ("ann", "bob", "cid", "ann")
    ]
    assert (len(charges), charges.lost_units, lost) == (2, 3, [0, 0, 3, 0])
    charges.clear()
    assert len(charges) == 0


def test_shares_are_announced_when_membership_is_calm(clock: ManualClock) -> None:
    """A node that learns of many others, one by one, tells them its shares once, not each time."""
    wire = Wire(1, {})
    totals = totals_of(wire, clock)
    totals.lead(1)
    for node in range(2, 52):
        totals.on_changes([MemberChange(node, live=True)])
        clock.advance(0.02)
    assert not wire.sent
    clock.advance(1)
    totals.publish()
    assert len(wire.sent) == 1
