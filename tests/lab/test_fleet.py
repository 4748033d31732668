"""Simulated fleets keep their promises, and the checkers find planted bugs."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import pytest

from tollkeeper.core.model import Decision
from tollkeeper.core.rates import parse_limits
from tollkeeper.decide.stores.memory import MemoryGate
from tollkeeper.lab.faults import ALL_FAULTS, Faults
from tollkeeper.lab.fleet import FleetPlan, simulate
from tollkeeper.lab.traffic import TrafficGroup

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
    assert sum(second.requests for second in fleet.counts.seconds) == fleet.counts.requests


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
    monkeypatch.setattr("tollkeeper.lab.checkers.NeverOver.forget", lambda *_: None)
    assert simulate(plan).never_over.violations


def test_a_store_that_admits_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: every tenth denial becomes an admission."""
    check = MemoryGate.check
    denials = 0

    @wraps(check)
    def leaky(self: MemoryGate, subject: str, cost: int) -> Decision:
        nonlocal denials
        decision = check(self, subject, cost)
        denials += not decision.allowed
        if decision.allowed or denials % 10:
            return decision
        return Decision(True, decision.policy, 0)

    monkeypatch.setattr(MemoryGate, "check", leaky)
    fleet = simulate(PLAN)
    assert "admitted by the authority for node" in fleet.never_over.violations[0]
