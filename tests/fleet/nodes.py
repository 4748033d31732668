"""Nodes for tests: several share one authority in memory, each with its own table and clock."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ratekeeper import Fleet, StoreError
from ratekeeper.core.steps import run
from ratekeeper.decide.leasing import LeaseCheck, LeasedAnswer, Report
from ratekeeper.decide.store import Answer
from ratekeeper.decide.stores.memory import MemoryAuthority
from ratekeeper.fleet.node import Node
from ratekeeper.fleet.reports import Reports
from ratekeeper.fleet.store import FleetStore
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringStore
from tests.shared_memory import SharedMemory


class Heard:
    """Keeps the hints that a node sends."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def warm(self, gate: int, subject: str) -> None:
        """Keep it."""
        self.said.append(("warm", gate, subject))

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """Keep it."""
        self.said.append(("denied", gate, subject, cost, lasts_ns))


class ControlledAuthority:
    """Passes calls on to a store in memory. A test can make them fail, or late."""

    def __init__(self, store: MemoryAuthority, clock: ManualClock) -> None:
        self._store = store
        self._clock = clock
        self.fails: StoreError | None = None
        self.way_back_ns = 0
        """The time that an answer takes."""
        self.leases = 0
        self.reported: list[Report] = []

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer]:
        """See Authority."""
        self.leases += 1
        if self.fails is not None:
            raise self.fails
        found = self._store.lease(checks, optional)
        self._clock.advance_ns(self.way_back_ns)
        return found

    def report(self, reports: Sequence[Report]) -> list[Answer]:
        """See Authority."""
        self.reported += reports
        if self.fails is not None:
            return [self.fails] * len(reports)
        return self._store.report(reports)


class SharedStore(SharedMemory):
    """The store that nodes share. A test controls its authority."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.controlled = ControlledAuthority(self, clock)
        self.authority = self.controlled


class NodeOfTest:
    """A node whose reports are sent when the test says so."""

    def __init__(self, store: SharedStore, clock: ManualClock, fleet: Fleet | None = None) -> None:
        fleet_store = FleetStore(store, fleet or Fleet(), clock, owns_store=False)
        self.store = AnsweringStore(fleet_store)
        self.node: Node = fleet_store.open_node()
        self.node.on_work = self.node.on_urgent = lambda: None
        self.heard = Heard()
        self.node.hints = self.heard
        self._reports = Reports(self.node)

    def flush(self, *, ending: bool = False) -> int:
        """Report one batch to the authority."""
        return run(self._reports.flushing(self.node.authority.report, ending=ending))
