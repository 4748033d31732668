"""The view of a fleet for operators: its nodes, and how many checks each node answers itself.

A store that is shared by a fleet declares a FleetMonitor as `store.fleet`. Metrics, the admin API
and `ratekeeper fleet` read it. Reading it does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ratekeeper.core.histogram import LENGTH, Histogram
from ratekeeper.decide.allowances import AllowanceKind, AllowanceStats

NodeState = Literal["alive", "suspected", "dead"]


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node, as this node knows it."""

    name: str
    address: str
    """HOST:PORT of its gossip; empty without gossip."""
    state: NodeState
    version: str = ""
    """The version of Ratekeeper."""
    rules_version: str = ""
    """The version of the rules in force; empty for a limiter without rules."""
    region: str = ""
    leased_units: int = 0
    """Units of leases that the node has not spent."""
    pending_units: int = 0
    """Units that the node has admitted and not reported yet."""
    lag_s: float | None = None
    """Seconds since the last news of the node; None for this node."""
    is_self: bool = False


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """How the checks of one rule were answered in this process."""

    allowed: int = 0
    """Allowed by the node."""
    denied: int = 0
    """Denied by the node, because it knew of a denial."""
    asked: int = 0
    """The authority was asked to decide them, also if it failed."""

    def __add__(self, other: NodeAnswers) -> NodeAnswers:
        """Return the sums."""
        return NodeAnswers(
            self.allowed + other.allowed, self.denied + other.denied, self.asked + other.asked
        )


@dataclass(slots=True)
class ReportCounts:
    """The counts of this process's reports, kept without a lock: approximate with threads."""

    returned_units: int = 0
    """Units of leases that were not spent and were given back."""
    charged_units: int = 0
    """Units that were charged late."""
    reports: int = 0
    """Reports that the authority has answered: one for each rule and subject."""
    failed: int = 0
    """Reports that failed. Late charges are reported again."""
    divergence_units: int = 0
    """The sum, over all answers to late charges, of the difference between the remaining units that
    the node expected and those that the authority has."""
    flush_seconds: Histogram = field(default_factory=Histogram)
    """How long the authority took for a batch of reports."""
    lost_units: int = 0
    """Units that were not given back, or not charged, and never will be."""


@dataclass(frozen=True, slots=True)
class GossipCounts:
    """The gossip of this process. Only one process of a node has any."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Messages that were dropped, by reason; the reasons are few and fixed."""
    hint_seconds: list[int] = field(default_factory=lambda: [0] * LENGTH)
    """The data of a histogram: the age of each hint when it arrived."""


class FleetMonitor(Protocol):
    """The counters and the nodes of a fleet, as this process knows them."""

    def answers(self) -> Mapping[tuple[str, AllowanceKind], NodeAnswers]:
        """Return how checks were answered, by rule and kind; the counts of this process."""
        ...

    def reports(self) -> ReportCounts:
        """Return the counts of this process's reports."""
        ...

    def table(self) -> AllowanceStats:
        """Return the statistics of the node's table."""
        ...

    def gossip(self) -> GossipCounts | None:
        """Return the counts of gossip; None if this process runs none."""
        ...

    def nodes(self) -> Sequence[FleetNode]:
        """Return the nodes that this node knows; the first is this node."""
        ...

    def live_nodes(self) -> int:
        """Return how many nodes share the limits, this one included."""
        ...

    def registered_nodes(self) -> int:
        """Return how many nodes have registered at the authority; 0 until they are counted.

        If they stay more than the live nodes, gossip between the nodes is lost.
        """
        ...

    def use_rules(self, version: str) -> None:
        """Take note of the version of the rules in force, which other nodes see."""
        ...
