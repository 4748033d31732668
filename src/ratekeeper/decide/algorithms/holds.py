"""Leased units that nodes may still spend, in at most two groups.

A node spends a lease whenever it likes until the lease ends. So the authority cannot know when the
units were spent, and has to assume the worst time: the end. It *holds* the units until then. A hold
of a bucket keeps them from being refilled, and a hold of a log keeps them in the window. A window
counter counts leased units in the window that they are spent in. It has holds for resets only.

A reset keeps the holds, because nodes that do not know of it go on to spend their leases. The units
of all holds are used after it, also those that were spent before it: the authority cannot tell them
apart. So units that are given back later were in use, whenever the reset was.

One number of units for each lease would cost memory and time in proportion to the nodes. Therefore
leases are added up in two groups, each with the latest time at which one of its holds ends. A new
lease goes to the first group if it ends no later, otherwise to the second. When the first group
has ended, the second becomes the first. A hold lasts at most three lifetimes longer than it must.

The end of a hold also identifies its group, so that units which are given back leave the group that
they are in: every hold of the second group ends later than the first group.
"""

from __future__ import annotations

from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import MICROS_PER_UNIT, Limit

# (units, until_ns) of one or two groups, the one that ends first being the first.
Holds = tuple[tuple[int, int], ...]

# A lease lasts at most this long, and its units may be given back until as long after its end. Both
# together are shorter than the time after which a node reports units again because it does not
# know whether they were reported (`allowances.CLAIM_NS`). So no units are given back twice.
LEASE_NS_MAX: Final = 2 * NS_PER_SECOND
# The part of the time in which an empty limit is whole again that a lease lasts at most.
LEASE_PART: Final = 10
# Times of leases are whole microseconds, as on Redis.
_STEP_NS: Final = 1_000


def lease_ns_max(limit: Limit) -> int:
    """Return how long a lease of this limit lasts at most, so that short windows do not suffer."""
    whole_ns = limit.window_ns
    if limit.algorithm in {"token_bucket", "leaky_bucket"}:
        whole_ns = limit.capacity * MICROS_PER_UNIT * limit.ns_denominator
        whole_ns = -(-whole_ns // (limit.micros_numerator * _STEP_NS)) * _STEP_NS
    return min(LEASE_NS_MAX, whole_ns // (LEASE_PART * _STEP_NS) * _STEP_NS)


def until_edge(limit: Limit, ends_ns: int) -> int:
    """Return until when a window counter holds the units of a lease.

    They can be given back until then, or in the next window: see the algorithms.
    """
    edge_ns = ((ends_ns - 1) // limit.window_ns + 1) * limit.window_ns
    return min(ends_ns + lease_ns_max(limit), edge_ns)


def with_lease(holds: Holds, units: int, until_ns: int) -> Holds:
    """Return the holds with those of another lease. None of them has ended."""
    if not holds:
        return ((units, until_ns),)
    first_units, first_ns = holds[0]
    if until_ns <= first_ns:
        return ((first_units + units, first_ns), *holds[1:])
    if len(holds) == 1:
        return (holds[0], (units, until_ns))
    last_units, last_ns = holds[1]
    return (holds[0], (last_units + units, max(last_ns, until_ns)))


def given_back(holds: Holds, units: int, until_ns: int) -> tuple[Holds, int]:
    """Return the holds without `units` of a lease that is held until then, and how many those are.

    The hold of that lease has not ended.
    """
    for place, (held, ends_ns) in enumerate(holds):
        if until_ns <= ends_ns:
            units = min(units, held)
            rest = ((held - units, ends_ns),) if held > units else ()
            return holds[:place] + rest + holds[place + 1 :], units
    return holds, 0


def total(holds: Holds) -> int:
    """Return the units of both groups."""
    return sum(units for units, _ in holds)


def live(holds: Holds, now_ns: int) -> Holds:
    """Return the holds that have not ended."""
    return tuple(group for group in holds if group[1] > now_ns)
