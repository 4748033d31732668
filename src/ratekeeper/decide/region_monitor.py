"""The view of regions for operators: their leaders, links, shares, and totals not exchanged yet.

A store that counts global limits declares a RegionMonitor as `store.regions`. Metrics read its
counts, which does no I/O. The admin API and `ratekeeper regions` read the status of all regions:
the leader of each region notes it in its own store once a second, and every process can read it
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Protocol

from ratekeeper.core.histogram import LENGTH

LinkState = Literal["up", "down", "refused", "removed"]
"""`up`: totals are exchanged. `down`: the store of the other region does not answer. `refused`: it
answers, but it would be unsafe to exchange totals: another region, layout or store is there, or it
has not started. `removed`: the other region has no share, so there is nothing to exchange."""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link from one region to another, as the leader of the first one knows it."""

    peer: str
    """The name of the other region."""
    state: LinkState
    problem: str = ""
    """What is wrong and what to do: also of a link that is up, such as clocks that differ."""
    lag_s: float = 0.0
    """The age of the oldest total that the other region has not received; 0.0 if there is none."""
    heard_s: float | None = None
    """Seconds since the other region's store answered last; None: never."""
    clock_offset_s: float | None = None
    """The clock of the other region's store minus that of this region's store."""


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """One region, as its leader has noted it in the region's store."""

    region: str
    is_self: bool = False
    """True for the region of this process."""
    leader: str = ""
    """The name of the process that syncs; empty if there is none."""
    age_s: float | None = None
    """Seconds since the leader noted this; None if it could not be read."""
    problem: str = ""
    """Why the status could not be read, or what is wrong with the region."""
    epoch: int = 0
    """Which table of shares is in use there."""
    share: Fraction = Fraction(0)
    """The share that is in use there, for exact limits."""
    target: Fraction | None = None
    """The share that it will have when all regions have lowered theirs; None: no change."""
    backlog: int = 0
    """Subjects with totals that not all other regions have accepted."""
    unaccepted_units: int = 0
    """Units of these totals."""
    excess_units: int = 0
    """Units by which its reports have brought subjects above their limits, so far."""
    links: tuple[LinkStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """The counts of this process's exchange with one other region, while it was the leader."""

    accepted: int = 0
    """Reports that the other region has learnt and accepted."""
    pending: int = 0
    """Reports that it has learnt and does not accept yet: it has no room to leave for them."""
    failed: int = 0
    """Reports that could not be delivered. They are sent again."""
    sent_bytes: int = 0
    received_bytes: int = 0
    excess_units: int = 0
    """Units by which reports have brought subjects above their limits there."""
    seconds: list[int] = field(default_factory=lambda: [0] * LENGTH)
    """The data of a histogram: from the first moment at which a total was due until the other
    region had learnt it."""


class RegionMonitor(Protocol):
    """The regions, as this process knows them."""

    @property
    def region(self) -> str:
        """The region of this process."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """All regions that are set up, this one included."""
        ...

    def here(self) -> RegionStatus | None:
        """Return the status of this region if this process is its leader, else None. No I/O."""
        ...

    def counts(self) -> Mapping[str, PeerCounts]:
        """Return the counts of this process's exchange with each other region. No I/O."""
        ...

    async def own_status(self) -> RegionStatus:
        """Return the status of this region, from its own store; see `status`."""
        ...

    async def status(self) -> Sequence[RegionStatus]:
        """Return the status of all regions, this one first. Reads each region's store.

        A region that cannot be read within two seconds has a problem instead. Raises nothing.
        """
        ...

    async def table(self) -> Mapping[str, Fraction]:
        """Return the newest table of shares in this region's store. Raises StoreError."""
        ...

    async def change_shares(self, shares: Mapping[str, Fraction]) -> Mapping[str, str]:
        """Write a new table of shares to every region that can be reached.

        A region that is not in it is removed. Returns the regions that could not be reached, and
        why. Raises ConfigError for shares that do not add up or for an unknown region, and
        StoreError if the region of this process could not be reached: then nothing has changed.
        Raises ChangeRefused if another change was made at the same time and is in use instead.
        """
        ...

    def on_excess(self, listener: Callable[[str, str, str, int], None]) -> None:
        """Call `listener` with rule, subject, other region and units of each excess.

        `rule` is the name under which a gate was made, if this process has made one; else its
        number (`rule_number`). The calls come from the thread of the sync and must not block.
        """
        ...
