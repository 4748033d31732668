"""Simulated fleets keep their promises, and the checkers find planted bugs."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import Decision, Limit
from ratekeeper.core.rates import parse_limits
from ratekeeper.decide.algorithms import token_bucket
from ratekeeper.decide.leasing import GiveBack, LateCharge, Lease, Report
from ratekeeper.decide.stores.memory import MemoryCounter
from ratekeeper.fleet import totals
from ratekeeper.fleet.node import KnownGate, Node
from ratekeeper.fleet.settings import Fleet
from ratekeeper.fleet.totals import Totals
from tests.simulator import node as node_module
from tests.simulator.faults import ALL_FAULTS, Faults
from tests.simulator.fleet import FleetPlan, SimulatedFleet, simulate
from tests.simulator.network import Cut, seeded
from tests.simulator.summary import summary_of
from tests.simulator.traffic import Recording, TrafficGroup

PLAN = FleetPlan(
    limits=parse_limits("20/second"),
    nodes=10,
    seconds=10,
    traffic=(TrafficGroup("light", 10, 120), TrafficGroup("heavy", 3, 6_000)),
)


def test_a_strict_fleet_admits_what_a_central_limiter_would() -> None:
    """Without faults, a strict fleet is never over, and differs only by the trips' jitter."""
    fleet = simulate(PLAN)
    assert fleet.counts.requests > 2_500
    assert not fleet.never_over.violations
    assert fleet.central.shortfall(fleet.counts.by_subject) <= 3
    assert fleet.counts.calls == fleet.counts.requests
    assert fleet.counts.in_node == fleet.counts.failed == 0


def test_the_same_seed_gives_the_same_run() -> None:
    """A run is reproduced from its seed, with all faults; another seed gives another run."""
    plan = replace(PLAN, faults=ALL_FAULTS)
    once, again, other = (simulate(replace(plan, seed=seed)) for seed in (1, 1, 2))
    assert once.counts == again.counts != other.counts


def test_a_strict_fleet_is_never_over_with_faults() -> None:
    """Faults cause failed requests and no admission beyond the limit."""
    fleet = simulate(replace(PLAN, faults=ALL_FAULTS, seed=3))
    assert fleet.counts.failed
    assert not fleet.never_over.violations


def test_an_authority_that_forgets_is_accepted_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker allows exactly for the units that a failover lost."""
    plan = replace(PLAN, faults=Faults(failovers=3), seed=4)
    assert not simulate(plan).never_over.violations
    monkeypatch.setattr("tests.simulator.checkers.NeverOver.forget", lambda *_: None)
    assert simulate(plan).never_over.violations


def test_a_store_that_admits_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: every tenth denial becomes an admission."""
    check = MemoryCounter.check
    denials = 0

    @wraps(check)
    def leaky(self: MemoryCounter, subject: str, cost: int) -> Decision:
        nonlocal denials
        decision = check(self, subject, cost)
        denials += not decision.allowed
        if decision.allowed or denials % 10:
            return decision
        return Decision(True, decision.policy, 0)

    monkeypatch.setattr(MemoryCounter, "check", leaky)
    fleet = simulate(PLAN)
    assert "admitted by the authority for node" in fleet.never_over.violations[0]


# ── Leases and budgets, and planted bugs that the checkers must find ───────────────────────────

Phase = tuple[float, float, int, int]  # from and until in seconds, requests, their cost


def _phases(cycles: int, cycle_s: float, *phases: Phase) -> tuple[Recording]:
    """Return the traffic of one subject: in every cycle, requests at random times of each phase."""
    random = seeded(1)
    requests = [
        (int((cycle * cycle_s + random.uniform(begin, end)) * NS_PER_SECOND), "user", cost)
        for cycle in range(cycles)
        for begin, end, count, cost in phases
        for _ in range(count)
    ]
    return (Recording(tuple(sorted(requests))),)


# Nodes take leases, one request in a hundred takes nearly all that is left, and the leases are
# spent just before they end.
LEASED = FleetPlan(
    limits=(Limit(1_000, per=10),),
    consistency="leased",
    nodes=5,
    seconds=96,
    traffic=_phases(8, 12, (0, 0.8, 60, 1), (0.85, 0.9, 4, 240), (0.92, 1.32, 150, 1)),
)
# Bursts after which nodes hold units that other nodes need.
BUSY = replace(
    LEASED,
    limits=(Limit(500, per=10),),
    nodes=4,
    seconds=20,
    seed=1,
    traffic=(TrafficGroup("bursty", 2, 3_000, burst=40), TrafficGroup("steady", 2, 2_000)),
)
# A burst at the end of a window, which is reported in the next one, where it does not count.
LATE = FleetPlan(
    limits=(Limit(100, per=2, algorithm="fixed_window"),),
    consistency="eventual",
    nodes=2,
    seconds=40,
    flush_seconds=1.0,
    warm=0.9,
    traffic=_phases(10, 4, (0.7, 0.95, 16, 1), (1.1, 1.55, 99, 1)),
)
# A subject that reaches each node every three seconds, and all nodes together too often.
RARE = FleetPlan(
    limits=(Limit(60, per=60, capacity=40),),
    consistency="eventual",
    nodes=10,
    seconds=45,
    traffic=(TrafficGroup("rare", 3, 240),),
)


@pytest.mark.parametrize("plan", [LEASED, BUSY, LATE, RARE])
def test_leased_and_eventual_fleets_admit_neither_too_much_nor_too_little(plan: FleetPlan) -> None:
    """The plans of the planted bugs are clean without them."""
    found = summary_of(simulate(plan))
    assert found.over_units == 0
    assert found.fewer_requests <= 2
    assert found.in_node_share > 0.4
    assert not found.problems


@pytest.mark.parametrize("consistency", ["leased", "eventual"])
def test_the_same_seed_gives_the_same_fleet_with_gossip_and_faults(consistency: str) -> None:
    """Leases, reports and gossip follow from the seed, too."""
    plan = replace(PLAN, consistency=consistency, seconds=5, faults=ALL_FAULTS)  # type: ignore[arg-type]  # given as text
    once, again = (simulate(plan) for _ in range(2))
    assert once.counts == again.counts
    assert once.sent_bytes == again.sent_bytes
    assert once.denial_times.heard_ns == again.denial_times.heard_ns


@pytest.mark.long  # it tests the simulator
def test_bug_refill_ignores_outstanding_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that are leased and refilled are admitted twice."""
    monkeypatch.setattr(token_bucket, "_lines_of", lambda holds: [])
    fleet = simulate(LEASED)
    assert fleet.never_over.over["user"] > 10
    assert "admitted by node" in fleet.problems()[0]


@pytest.mark.long  # it tests the simulator
def test_bug_a_return_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority admits what another node still holds."""
    report = MemoryCounter.report

    def twice(self: MemoryCounter, each: Report) -> Decision:
        report(self, each)
        return report(self, each)

    monkeypatch.setattr(MemoryCounter, "report", twice)
    plan = replace(
        LEASED, traffic=_phases(12, 4, (0, 0.8, 100, 1), (0.85, 0.9, 40, 25), (1, 1.8, 150, 1))
    )
    assert simulate(plan).problems()


@pytest.mark.long  # it tests the simulator
def test_bug_a_return_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests are admitted than by a central limiter."""
    report = MemoryCounter.report

    def lost(self: MemoryCounter, each: Report) -> Decision:
        return self.peek(each.subject, 0) if isinstance(each, GiveBack) else report(self, each)

    monkeypatch.setattr(MemoryCounter, "report", lost)
    found = summary_of(simulate(BUSY))
    assert found.over_units == 0
    assert found.fewer_share > 0.01


@pytest.mark.long  # it tests the simulator
def test_bug_a_node_spends_after_the_end_of_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of one window are spent in the next."""
    put = Node._put

    def late(
        self: Node, known: KnownGate, subject: str, cost: int, answer: tuple[Decision, Lease]
    ) -> None:
        decision, lease = answer
        lease = lease._replace(lasts_ns=5 * lease.lasts_ns)
        put(self, known, subject, cost, (decision, lease))

    plan = replace(BUSY, limits=(Limit(500, per=10, algorithm="fixed_window"),))
    assert not simulate(plan).problems()
    monkeypatch.setattr(Node, "_put", late)
    assert simulate(plan).problems()


@pytest.mark.long  # it tests the simulator
def test_bug_hints_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes go on admitting a subject that the authority would deny."""
    monkeypatch.setattr(Node, "heard_warm", lambda *_: None)
    monkeypatch.setattr(Node, "heard_denied", lambda *_: None)
    assert simulate(RARE).never_over.overshoot() > 0


@pytest.mark.long  # it tests the simulator
def test_bug_late_charges_are_not_dated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of one window count in the next, where they deny others."""
    report = MemoryCounter.report

    def undated(self: MemoryCounter, each: Report) -> Decision:
        return report(self, each._replace(age_ns=0) if isinstance(each, LateCharge) else each)

    monkeypatch.setattr(MemoryCounter, "report", undated)
    assert summary_of(simulate(LATE)).fewer_share > 0.05


# The authority does not answer for a while: the nodes go on by their totals.
OUTAGE = FleetPlan(
    limits=(Limit(200, per=10),),
    consistency="leased",
    nodes=6,
    seconds=20,
    seed=3,
    faults=Faults(outages=2),
    traffic=(TrafficGroup("user", 2, 6_000),),
)


def test_the_nodes_go_on_without_the_authority() -> None:
    """All nodes together admit no more than the limit while the authority is away."""
    fleet = simulate(OUTAGE)
    assert fleet.counts.locally > 300
    assert not fleet.problems()
    alone = simulate(replace(OUTAGE, gossip=False))
    assert alone.counts.locally == 0
    assert alone.counts.failed > fleet.counts.failed


def test_nodes_that_lose_the_authority_and_each_other_keep_their_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each believes the others dead after 15 s; the number of nodes is not configured."""
    monkeypatch.setattr(node_module, "Fleet", lambda **given: Fleet(**{**given, "nodes": 1}))
    traffic = (TrafficGroup("user", 1, 3_000),)
    fleet = SimulatedFleet(replace(OUTAGE, seconds=50, faults=Faults(), traffic=traffic))
    everything = frozenset({node_module.AUTHORITY, *range(6)})
    for node in range(6):
        cut = Cut(frozenset({node}), everything - {node})
        fleet.loop.after(3 * NS_PER_SECOND, fleet.network.cut_for, cut, 60 * NS_PER_SECOND)
    fleet.run()
    assert fleet.counts.locally > 300
    assert not fleet.problems()


@pytest.mark.long  # it tests the simulator
def test_bug_totals_are_merged_by_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that have each admitted 10 units have admitted 20, not 10."""
    learn = Totals._learn

    def by_maximum(
        self: Totals, member: int, entry: totals._Entry, now_ns: int
    ) -> tuple[int, int] | None:
        key = (entry.gate.number, entry.subject)
        state = self._states.get(key)
        if state is not None:
            most = max((total for _, total in state.seen.values()), default=0)
            state.seen[member] = (entry.generation, max(most, state.seen.get(member, (0, 0))[1]))
        return learn(self, member, entry, now_ns)

    monkeypatch.setattr(Totals, "_learn", by_maximum)
    assert "admitted by the totals of node" in simulate(OUTAGE).problems()[0]


# ── Gossip ─────────────────────────────────────────────────────────────────────────────────────


def test_membership_converges_and_a_dead_node_is_noticed() -> None:
    """The fleet grows from 3 to 20 nodes; a node that is killed is dead after 15 s."""
    plan = replace(PLAN, consistency="leased", nodes=20, seconds=4, traffic=())
    fleet = simulate(replace(plan, faults=Faults(scale_from=3)))
    assert 0 < summary_of(fleet).joined_s_max < 2
    fleet = SimulatedFleet(replace(plan, nodes=5, seconds=20))
    fleet.loop.after(NS_PER_SECOND, fleet.kill_node, fleet.nodes[0])
    fleet.run()
    assert 10 < summary_of(fleet).noticed_s_max < 17


def test_a_denial_reaches_all_nodes_in_milliseconds() -> None:
    """p99 over all nodes; without gossip no node hears of it."""
    plan = replace(
        PLAN,
        limits=(Limit(50, per=10, algorithm="fixed_window"),),
        consistency="leased",
        nodes=30,
        seconds=5,
    )
    found = summary_of(simulate(plan))
    assert 0 < found.known_ms_p99 < 50
    assert summary_of(simulate(replace(plan, gossip=False))).known_ms_p99 == 0
    assert found.gossip_bytes_per_s_max < 50_000
