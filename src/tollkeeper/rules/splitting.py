"""A subject too busy for one place in the store: its limits in parts, each kept apart.

A rule with `split: 8` keeps the limits of each subject in eight parts, under eight keys, which a
cluster spreads over its nodes. A request meets one of them, chosen at random, which has its part of
the limits: 100 a minute in eight is four parts of 13 and four of 12.

The bound: the parts add up to the limits exactly, so all of them together never admit more than the
rule allows, in any interval. What is given up is the other side. A request is denied when its own
part is used up, though another may have room: with n parts and a limit of m, chance loads one part
more than the others by about the square root of n/m. `remaining` is an estimate (that of the part,
times their number), and Retry-After is that of the part: asking again may meet another one. A cost
has to fit a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tollkeeper.core.model import BUCKETS, REFILL_NS_MAX, Decision, Limit, Limits, decision_with
from tollkeeper.core.subjects import SEPARATOR

# Between a subject and the number of its part; no attribute's name begins with it.
_PART: Final = SEPARATOR + "~"


def parts_of(limits: Sequence[Limit], split: int) -> int:
    """How many parts: as many as asked for, but none without a unit of its own."""
    return min(split, *(min(limit.limit, limit.capacity) for limit in limits))


def share(limits: Sequence[Limit], parts: int, part: int) -> Limits:
    """The limits of one part. Over all parts they add up to the whole.

    >>> [share([Limit(10, per=1)], 4, part)[0].limit for part in range(4)]
    [3, 3, 2, 2]
    """
    return tuple(_share(limit, parts, part) for limit in limits)


def _share(limit: Limit, parts: int, part: int) -> Limit:
    units = _part_of(limit.limit, parts, part)
    capacity = 0
    if limit.algorithm in BUCKETS:
        # A rate that was rounded down may leave a bucket that refills too slowly for what it holds.
        refillable = REFILL_NS_MAX * units // limit.window_ns
        capacity = max(1, min(_part_of(limit.capacity, parts, part), refillable))
    return Limit(units, limit.per, algorithm=limit.algorithm, capacity=capacity, name=limit.name)


def _part_of(units: int, parts: int, part: int) -> int:
    whole, rest = divmod(units, parts)
    return whole + (part < rest)


def subject_of_part(subject: str, part: int) -> str:
    """What a part's counts are kept under."""
    return f"{subject}{_PART}{part}"


def granted(units: int, parts: int) -> list[int]:
    """Extra units, spread over the parts; together, all of them.

    >>> granted(10, 4)
    [3, 3, 2, 2]
    """
    return [_part_of(units, parts, part) for part in range(parts)]


def widened(decision: Decision, of_part: Sequence[Limit], whole: Sequence[Limit]) -> Decision:
    """A part's decision as one about the whole: its limit, and an estimate of what remains."""
    place = next((at for at, each in enumerate(of_part) if each == decision.policy), 0)
    limit = whole[place]
    remaining = decision.remaining * limit.capacity // max(of_part[place].capacity, 1)
    return decision_with(decision, policy=limit, remaining=min(remaining, limit.capacity))


def summed(looks: Sequence[Decision], of_part: Sequence[Limit], whole: Sequence[Limit]) -> Decision:
    """What a look at every part tells of the whole."""
    soonest = min(looks, key=lambda look: (not look.allowed, look.retry_after_ns))
    place = next((at for at, each in enumerate(of_part) if each == soonest.policy), 0)
    return decision_with(
        soonest,
        policy=whole[place],
        remaining=min(sum(look.remaining for look in looks), whole[place].capacity),
        reset_after_ns=max(look.reset_after_ns for look in looks),
    )
