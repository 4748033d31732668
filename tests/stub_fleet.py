"""A fleet of three nodes for tests of what an operator sees: fixed counts, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ratekeeper.core.histogram import LENGTH
from ratekeeper.decide.allowances import AllowanceKind, AllowanceStats
from ratekeeper.decide.fleet_monitor import (
    FleetNode,
    GossipCounts,
    NodeAnswers,
    ReportCounts,
)
from ratekeeper.decide.store import SharedStore
from ratekeeper.fleet.settings import Fleet
from ratekeeper.fleet.store import FleetStore
from ratekeeper.testing import ManualClock
from tests.shared_memory import SharedMemory


class StubFleet:
    """Implements FleetMonitor with values that a test may change."""

    def __init__(self) -> None:
        self.counted: dict[tuple[str, AllowanceKind], NodeAnswers] = {
            ("users", "leased"): NodeAnswers(allowed=80, denied=5, asked=15),
            ("", "eventual"): NodeAnswers(allowed=3, denied=0, asked=1),
        }
        self.reported = ReportCounts(7, 9, 4, 1, 2, lost_units=3)
        self.reported.flush_seconds.note(1)
        self.gossiped: GossipCounts | None = GossipCounts(
            10, 20, 1_000, 2_000, {"authentication": 3}, [1] * LENGTH
        )
        own = FleetNode("a", "10.0.0.1:7946", "alive", "1.0", "v12", "eu", 350, 6, is_self=True)
        other = replace(own, is_self=False, leased_units=3)
        self.known = [
            own,
            replace(other, name="b", address="10.0.0.2:7946", lag_s=0.25),
            replace(other, name="c", state="suspected", rules_version="v11", lag_s=6.5),
        ]
        self.registered = 3
        self.rules_version = ""

    def answers(self) -> dict[tuple[str, AllowanceKind], NodeAnswers]:
        """See FleetMonitor."""
        return self.counted

    def reports(self) -> ReportCounts:
        """See FleetMonitor."""
        return self.reported

    def table(self) -> AllowanceStats:
        """See FleetMonitor."""
        return AllowanceStats(40, 100_000, 350, 6, 2)

    def gossip(self) -> GossipCounts | None:
        """See FleetMonitor."""
        return self.gossiped

    def nodes(self) -> Sequence[FleetNode]:
        """See FleetMonitor."""
        return self.known

    def live_nodes(self) -> int:
        """See FleetMonitor."""
        return len(self.known)

    def registered_nodes(self) -> int:
        """See FleetMonitor."""
        return self.registered

    def use_rules(self, version: str) -> None:
        """See FleetMonitor."""
        self.rules_version = version


class StubFleetStore(FleetStore):
    """The store of a node in a StubFleet."""

    fleet: Any = None

    def __init__(self, store: SharedStore) -> None:
        super().__init__(store, Fleet(), ManualClock())
        self.fleet = StubFleet()


def store_with_fleet(store: SharedStore | None = None) -> StubFleetStore:
    """Return a store in memory, or this one, with a StubFleet."""
    return StubFleetStore(store or SharedMemory(ManualClock()))
