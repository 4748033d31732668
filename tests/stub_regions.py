"""Three regions for tests of what an operator sees: fixed values, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.histogram import LENGTH
from ratekeeper.decide.region_monitor import LinkStatus, PeerCounts, RegionStatus
from ratekeeper.regions.settings import Regions
from ratekeeper.regions.store import RegionStore
from ratekeeper.testing import ManualClock
from tests.shared_memory import SharedMemory

EU = RegionStatus(
    "eu",
    is_self=True,
    leader="eu-1/4711",
    age_s=0.4,
    epoch=3,
    share=Fraction(2, 5),
    backlog=12,
    unaccepted_units=40,
    excess_units=7,
    links=(
        LinkStatus("us", "up", lag_s=0.25, heard_s=0.1, clock_offset_s=-0.002),
        LinkStatus("ap", "down", "no answer within 1 s", lag_s=8.5, heard_s=9.25),
    ),
)
US = RegionStatus(
    "us",
    leader="us-3/902",
    age_s=0.9,
    epoch=3,
    share=Fraction(2, 5),
    target=Fraction(1, 2),
    backlog=3,
    unaccepted_units=5,
    links=(LinkStatus("eu", "up"), LinkStatus("ap", "refused", "this is the store of region sa")),
)
AP = RegionStatus("ap", problem="no answer within 2 s")


class StubRegions:
    """Implements RegionMonitor with values that a test may change."""

    region = "eu"

    def __init__(self) -> None:
        self.names: Sequence[str] = ("eu", "us", "ap")
        self.known: Sequence[RegionStatus] = (EU, US, AP)
        self.leads = True
        self.exchanged = {
            "us": PeerCounts(9, 2, 1, 1_000, 300, 7, [1] * LENGTH),
            "ap": PeerCounts(failed=30, sent_bytes=50),
        }
        self.shares = {"eu": Fraction(2, 5), "us": Fraction(2, 5), "ap": Fraction(1, 5)}
        self.changed: list[Mapping[str, Fraction]] = []
        self.unreachable: Mapping[str, str] = {}
        self.listeners: list[Callable[[str, str, str, int], None]] = []

    def here(self) -> RegionStatus | None:
        """See RegionMonitor."""
        return self.known[0] if self.leads else None

    def counts(self) -> Mapping[str, PeerCounts]:
        """See RegionMonitor."""
        return self.exchanged

    async def own_status(self) -> RegionStatus:
        """See RegionMonitor."""
        return self.known[0]

    async def status(self) -> Sequence[RegionStatus]:
        """See RegionMonitor."""
        return self.known

    async def table(self) -> Mapping[str, Fraction]:
        """See RegionMonitor."""
        return self.shares

    async def change_shares(self, shares: Mapping[str, Fraction]) -> Mapping[str, str]:
        """See RegionMonitor."""
        if sum(shares.values()) != 1:
            raise ConfigError("the shares do not add up to 1")
        self.changed.append(shares)
        return self.unreachable

    def on_excess(self, listener: Callable[[str, str, str, int], None]) -> None:
        """See RegionMonitor."""
        self.listeners.append(listener)


class StubRegionStore(RegionStore):
    """The store of a node in eu, with StubRegions."""

    regions: Any = None

    def __init__(self) -> None:
        clock = ManualClock()
        links = {name: SharedMemory(clock) for name in ("eu", "us", "ap")}
        uris = {name: f"redis://{name}.internal" for name in links}
        super().__init__(links["eu"], Regions("eu", uris, sync=False), clock, links=links)
        self.regions = StubRegions()


def store_with_regions() -> StubRegionStore:
    """Return a store in memory with StubRegions."""
    return StubRegionStore()
