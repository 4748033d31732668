"""Splitting: the limits of a very busy subject are kept in parts, under separate keys.

A rule with `split: 8` keeps the limits of each subject in eight parts, under eight keys, which a
cluster spreads over its nodes. Each request is checked against one part, chosen at random. The part
has its share of the limits: 100 a minute in eight parts is four parts of 13 and four of 12.

The bound: the shares add up to the limits exactly, so all parts together never admit more than the
rule allows, in any interval. The price is that a request is denied when its part is used up, even
if another part has room: with n parts and a limit of m, chance loads one part more than the others
by about the square root of n/m. `remaining` is an estimate (that of the part, times the number of
parts), and Retry-After is that of the part; a retry may be checked against another one. A cost has
to fit into one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from ratekeeper.core.model import BUCKETS, REFILL_NS_MAX, Decision, Limit, Limits, decision_with
from ratekeeper.core.rates import with_numbers
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.decide.regional import RegionalUsage, RegionPart

# Between a subject and the number of its part; no attribute's name starts with it.
_PART: Final = SEPARATOR + "~"


def part_count(limits: Sequence[Limit], split: int) -> int:
    """Return the number of parts: `split`, or fewer if a part would have less than one unit."""
    return min(split, *(min(limit.limit, limit.capacity) for limit in limits))


def part_limits(limits: Sequence[Limit], parts: int, part: int) -> Limits:
    """Return the limits of one part. Over all parts they add up to the whole.

    >>> [part_limits([Limit(10, per=1)], 4, part)[0].limit for part in range(4)]
    [3, 3, 2, 2]
    """
    return tuple(_part_limit(limit, parts, part) for limit in limits)


def _part_limit(limit: Limit, parts: int, part: int) -> Limit:
    units = _share(limit.limit, parts, part)
    capacity = 0
    if limit.algorithm in BUCKETS:
        # A rate that was rounded down may be too slow to refill the part's share of the capacity.
        refillable = REFILL_NS_MAX * units // limit.window_ns
        capacity = max(1, min(_share(limit.capacity, parts, part), refillable))
    return with_numbers(limit, units, capacity)


def _share(units: int, parts: int, part: int) -> int:
    whole, rest = divmod(units, parts)
    return whole + (part < rest)


def part_subject(subject: str, part: int) -> str:
    """Return the subject that a part's counts are kept under."""
    return f"{subject}{_PART}{part}"


def shares_of(units: int, parts: int) -> list[int]:
    """Return units spread over the parts.

    >>> shares_of(10, 4)
    [3, 3, 2, 2]
    """
    return [_share(units, parts, part) for part in range(parts)]


def whole_decision(decision: Decision, part: Sequence[Limit], whole: Sequence[Limit]) -> Decision:
    """Return a part's decision as one about the whole limit, with an estimate of `remaining`."""
    position = _position(decision, part)
    limit = whole[position]
    share = max(part[position].capacity, 1)
    granted = decision.granted * limit.capacity // share
    remaining = min(decision.remaining * limit.capacity // share, limit.capacity + granted)
    return decision_with(decision, policy=limit, remaining=remaining, granted=granted)


def sum_of_parts(
    decisions: Sequence[Decision], part: Sequence[Limit], whole: Sequence[Limit]
) -> Decision:
    """Return one decision about the whole limit from a peek at every part."""
    soonest = min(decisions, key=lambda decision: (not decision.allowed, decision.retry_after_ns))
    limit = whole[_position(soonest, part)]
    granted = sum(decision.granted for decision in decisions)
    remaining = sum(decision.remaining for decision in decisions)
    return decision_with(
        soonest,
        policy=limit,
        remaining=min(remaining, limit.capacity + granted),
        granted=granted,
        reset_after_ns=max(decision.reset_after_ns for decision in decisions),
    )


def usage_of_parts(parts: Sequence[RegionalUsage], region: str) -> RegionalUsage:
    """Return the usage of the whole limit in all regions; `region` is the one of the store."""
    units: dict[str, int] = {}
    ages_ns: dict[str, int] = {}
    for each in chain.from_iterable(usage.parts for usage in parts):
        name = each.region or region
        units[name] = units.get(name, 0) + each.part
        ages_ns[name] = max(ages_ns.get(name, 0), each.age_ns)
    return RegionalUsage(
        tuple(map(sum, zip(*(each.used for each in parts), strict=True))),
        tuple(map(sum, zip(*(each.unaccepted for each in parts), strict=True))),
        tuple(RegionPart(name, units[name], ages_ns[name]) for name in units),
    )


def _position(decision: Decision, part: Sequence[Limit]) -> int:
    """Return the position of the limit that a part's decision reports."""
    return next((at for at, limit in enumerate(part) if limit == decision.policy), 0)
