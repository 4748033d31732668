"""The leader of a region: it carries reports between the stores of the regions.

Every process with global limits has a RegionSync: a thread with an event loop of its own. All of
them are candidates; one leads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from tollkeeper.decide.region_monitor import PeerCounts, RegionStatus
from tollkeeper.decide.regional import RegionalCounts
from tollkeeper.regions.table import ShareTable


class RegionSync:
    """One process's part in the sync of its region. Implements `RegionMonitor`."""

    def __init__(
        self,
        region: str,
        first: ShareTable,
        stores: Mapping[str, RegionalCounts],
        name: str = "",
    ) -> None:
        """`first` is the table of the settings. `stores` has the store of every region.

        The caller opens the stores, and closes them after `close`. `name` is that of this process,
        for operators; by default the host name, the process id and a random part.
        """
        raise NotImplementedError

    @property
    def region(self) -> str:
        """The region of this process."""
        raise NotImplementedError

    @property
    def names(self) -> Sequence[str]:
        """All regions that are set up, this one included."""
        raise NotImplementedError

    def name_rule(self, number: str, rule: str) -> None:
        """Note the name of a rule, for `on_excess`. The number is that of `rule_number`."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread, unless it runs. Does no I/O in the calling thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Step down and end the thread. Takes at most CLOSE_S_MAX."""
        raise NotImplementedError

    def here(self) -> RegionStatus | None:
        """Return the status of this region if this process is its leader, else None. No I/O."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, PeerCounts]:
        """Return what this process has exchanged, by the other region. No I/O."""
        raise NotImplementedError

    async def status(self) -> Sequence[RegionStatus]:
        """Return the status of all regions, this one first. See RegionMonitor."""
        raise NotImplementedError

    async def table(self) -> Mapping[str, Fraction]:
        """Return the newest table of shares in this region's store. See RegionMonitor."""
        raise NotImplementedError

    async def change_shares(self, shares: Mapping[str, Fraction]) -> Mapping[str, str]:
        """Write a new table of shares to every region. See RegionMonitor."""
        raise NotImplementedError

    def on_excess(self, listener: Callable[[str, str, str, int], None]) -> None:
        """Call `listener` with rule, subject, other region and units of each excess."""
        raise NotImplementedError
