"""Units that a node takes from a limit in advance, and units that it reports late.

The store that has the final word on a limit is its *authority*. A node that shares the limit with
others can answer most checks itself:

- With `consistency: leased`, a check takes more units than it costs. The rest is a *lease*: the
  node spends it without asking, until it ends, and then gives back what it has not spent.
- With `consistency: eventual`, the node admits requests within a part of the room that it last saw,
  and reports them afterwards, each with its age: a *late charge*.

This module has the values of both, and `Authority`, the seam: a store that can lease declares it as
`store.authority`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

from tollkeeper.core.errors import StoreError
from tollkeeper.core.model import Decision
from tollkeeper.decide.store import Answer, AnyGate


class LeaseTerms(NamedTuple):
    """What a node asks for beside the units of a check."""

    wanted: int
    """Units that it expects to spend during the lifetime; 0 for no lease."""
    nodes: int
    """The nodes that share the limit, from 1 up. A lease is at most room / (2 × nodes)."""
    lifetime_ns: int
    """How long the lease is to last, at most."""


class Lease(NamedTuple):
    """Units that an authority gave in advance, with a check that it allowed."""

    units: int
    """0: no lease. Then a check is as strict as any other."""
    ends_ns: int
    """The authority's time at which it ends. It identifies the lease when units are given back."""
    lasts_ns: int
    """How long the node may still spend it. The time of the round trip is subtracted."""
    denied_ns: int = 0
    """How long the same cost is denied from now on; 0 if it would be allowed once more."""


NO_LEASE = Lease(0, 0, 0)

LeasedAnswer = tuple[Decision, Lease] | StoreError


class LeaseCheck(NamedTuple):
    """One check of a request, with the lease that the node asks for."""

    gate: AnyGate
    subject: str
    cost: int
    terms: LeaseTerms


class GiveBack(NamedTuple):
    """Units of a lease that were not spent."""

    gate: AnyGate
    subject: str
    units: int
    ends_ns: int
    """`Lease.ends_ns`."""


class LateCharge(NamedTuple):
    """Units that a node has admitted already, and reports now."""

    gate: AnyGate
    subject: str
    units: int
    age_ns: int
    """How long ago they were admitted, by the node's clock."""


Report = GiveBack | LateCharge


class Authority(Protocol):
    """A store that leases units and takes late charges, for threads and for asyncio."""

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer]:
        """Check several subjects, all or none, and lease units with those that are charged.

        As `Store.check_together`, also in its errors. A denial comes without a lease.
        """
        ...

    async def lease_async(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer]:
        """See `lease`."""
        ...

    def report(self, reports: Sequence[Report]) -> list[Answer]:
        """Give units back and charge late, in one batch for each server.

        The answers are in order: the decision of a check that costs nothing, made after the report;
        or the error, and then the report may or may not have been counted.
        """
        ...

    async def report_async(self, reports: Sequence[Report]) -> list[Answer]:
        """See `report`."""
        ...
