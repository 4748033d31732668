"""Units that a node takes from a limit in advance, and units that it reports late.

The store that decides finally on a limit is its *authority*. A node that shares the limit with
others can answer most checks itself:

- With `consistency: leased`, a check takes more units than it costs. The rest is a *lease*: the
  node spends it without asking, until it ends, and then gives back the unspent units.
- With `consistency: eventual`, the node admits requests within a part of the room that it last saw,
  and reports them afterwards, each with its age: a *late charge*.

This module has the values of both, and `Authority`, the seam: a store that can lease declares it as
`store.authority`. The algorithms have the functions (`lease`, `give_back`, `charge`). Their bounds
hold in every interval, whenever the nodes spend their leases ([ADR 13](docs/adr/0013-leases.md)).

The size and the end of a lease are those that suit all limits of the rule:

- A lease is at most room / (2 × nodes), where room is the units that remain after the check. So one
  node never takes all, and near the limit there are no leases: each check is decided by the
  authority.
- It lasts at most a tenth of the time in which an empty limit is whole again, and at most
  `LEASE_NS_MAX`. A lease that would last less than `LEASE_NS_MIN` is not worth its round trip.
- Granted units are not leased: they are not part of the room. A leaky bucket does not lease.
- A clock that was set back, to before the last change of a state, leases nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, NamedTuple, Protocol

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError
from ratekeeper.core.model import Decision, Limit
from ratekeeper.core.steps import Ask
from ratekeeper.decide.algorithms import LeasingAlgorithm, State
from ratekeeper.decide.algorithms.holds import LEASE_NS_MAX, lease_ns_max
from ratekeeper.decide.store import Answer, Counter

# A state is kept for this time after a late charge, even if it no longer differs from a new one:
# the next late charge may be of a time at which it did. Otherwise charges that come one by one,
# each older than the time in which its units are refilled, would all be forgotten.
LATE_KEPT_NS: Final = 2 * NS_PER_SECOND
LEASE_NS_MIN: Final = NS_PER_SECOND // 50


class LeaseTerms(NamedTuple):
    """The lease that a node asks for with a check."""

    wanted: int
    """Units that it expects to spend during the lifetime; 0 for no lease."""
    nodes: int
    """The nodes that share the limit, from 1 up. A lease is at most room / (2 × nodes)."""
    lifetime_ns: int
    """How long the lease is to last, at most. See `lifetime_ns`, which also bounds it."""


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

    counter: Counter
    subject: str
    cost: int
    terms: LeaseTerms


class GiveBack(NamedTuple):
    """Units of a lease that were not spent."""

    counter: Counter
    subject: str
    units: int
    ends_ns: int
    """`Lease.ends_ns`."""


class LateCharge(NamedTuple):
    """Units that a node has admitted already, and reports now."""

    counter: Counter
    subject: str
    units: int
    age_ns: int
    """How long ago they were admitted, by the node's clock."""


Report = GiveBack | LateCharge


class Authority(Protocol):
    """A store that leases units and takes late charges."""

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer] | Ask:
        """Check several subjects, all or none, and lease units with those that are charged.

        As `Store.check_together`, also in its errors. A denial comes without a lease.
        """
        ...

    def report(self, reports: Sequence[Report]) -> list[Answer] | Ask:
        """Give units back and charge late, in one batch for each server.

        The answers are in order: the decision of a check that costs nothing, made after the report;
        or the error, and then the report may or may not have been counted.
        """
        ...


def lifetime_ns(limits: Sequence[Limit], wanted_ns: int) -> int:
    """Return how long a lease of these limits lasts; 0 if they cannot be leased."""
    if any(limit.algorithm == "leaky_bucket" for limit in limits):
        return 0
    lasts_ns = min(wanted_ns // 1_000 * 1_000, *map(lease_ns_max, limits))
    return lasts_ns if lasts_ns >= LEASE_NS_MIN else 0


def size_of(
    parts: Sequence[tuple[Limit, LeasingAlgorithm, State]], now_ns: int, terms: LeaseTerms
) -> tuple[int, int]:
    """Return the units of a lease and its end, by the states after the check; 0 units for none."""
    lasts_ns = lifetime_ns([limit for limit, _, _ in parts], terms.lifetime_ns)
    if not lasts_ns:
        return 0, now_ns
    room = min(each.decide(state, limit, now_ns, 0)[1].remaining for limit, each, state in parts)
    ends_ns = min(each.lease_until(state, limit, now_ns, lasts_ns) for limit, each, state in parts)
    units = min(terms.wanted, room // (2 * terms.nodes))
    return (units, ends_ns) if units > 0 and ends_ns - now_ns >= LEASE_NS_MIN else (0, now_ns)


def may_be_given_back(ends_ns: int, now_ns: int) -> bool:
    """Return False for units that come too late: they may have been given back before."""
    return now_ns < ends_ns + LEASE_NS_MAX
