"""Random traces: a mix of limits, costs, times and verbs that reveals differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, AlgorithmName, Limit

WINDOWS_US = (1_000, 7_000, 999_999, 1_000_000, 1_500_000, 60_000_000, 86_400_000_000)
# Most refunds undo one of the latest charges.
CHARGES = (0, 1, 1, 2, 3, 5, 10, 40)
DEBT_US_MAX = 50 * 366 * 86_400_000_000
WINDOWS_LONG_US = (30 * 86_400_000_000, 365 * 86_400_000_000)


@dataclass(frozen=True, slots=True)
class Step:
    """One call. `verb` is check, peek, refund, owe, grant, reset, sweep or change (of the limits).

    A refund undoes the `charge`th latest charge; 0 stands for a charge at an unknown time.
    """

    verb: str
    subject: str
    units: int
    now_ns: int
    ttl_ns: int | None = None
    charge: int = 0


def random_limit(random: Random, algorithm: AlgorithmName, name: str = "") -> Limit:
    """Return a limit between 1 a year and a billion a millisecond; often a small one."""
    window_us = random.choice(WINDOWS_US + WINDOWS_LONG_US)
    most = 1_000 if algorithm == "sliding_window_log" else 10 ** random.choice((1, 2, 4, 9))
    units = random.randint(1, most)
    capacity = 0
    if algorithm in BUCKETS and random.random() < 0.5:
        capacity = min(random.randint(1, 2 * units), 90 * units * 366 * 86_400_000_000 // window_us)
        capacity = max(1, min(capacity, 1_000_000_000))
    refill_us = 0
    if algorithm == "token_bucket" and random.random() < 0.4:
        longest_us = min(window_us, (capacity or units) * window_us // units)
        refill_us = max(longest_us // random.choice((1, 2, 3, 60)), 1_000)
        refill_us = refill_us if refill_us <= longest_us else 0
    return Limit(
        units,
        window_us / 1e6,
        algorithm=algorithm,
        capacity=capacity,
        name=name,
        refill_every=refill_us / 1e6,
        debt=min(random.choice((0, 1, units, 10**9)), units * DEBT_US_MAX // window_us, 10**9)
        if random.random() < 0.3
        else None,
    )


def random_limits(random: Random) -> tuple[Limit, ...]:
    """Return one to four limits of any algorithm, with different names."""
    count = random.choice((1, 1, 2, 4))
    return tuple(
        random_limit(random, random.choice(UNIT_ALGORITHMS), f"limit-{index}")
        for index in range(count)
    )


def changed(random: Random, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Return limits with the same names and other numbers."""
    return tuple(random_limit(random, limit.algorithm, limit.name) for limit in limits)


def steps(
    random: Random, limits: tuple[Limit, ...], count: int, *, rewinds: bool, owes: bool = False
) -> Iterator[Step]:
    """A trace of `count` steps over a handful of subjects; with `owes` some charge beyond the room.

    With `rewinds` the clock may step back and limits may change, but there are no sweeps: a dropped
    state cannot answer for an earlier time.
    """
    window_ns = random.choice(limits).window_ns
    smallest = min(limit.capacity for limit in limits)
    now_ns = random.choice((0, 1, window_ns, 1_790_000_000_123_456_789))
    subjects = [f"subject-{index}" for index in range(random.choice((1, 3, 20)))]
    odd_verbs = ("change",) if rewinds else ("sweep",)
    if owes:
        odd_verbs += ("owe", "owe", "owe")
    for _ in range(count):
        now_ns += _pause_ns(random, window_ns, rewinds=rewinds)
        now_ns = min(max(now_ns, -(10**17)), 3 * 10**18)
        dice = random.random()
        if dice < 0.85:
            verb = "check"
        else:
            verb = random.choice(("peek", "peek", "refund", "refund", "grant", "reset", *odd_verbs))
        ttl_ns = random.choice((None, 1, window_ns // 3 or 1, 2 * window_ns))
        subject, units = random.choice(subjects), _units(random, smallest)
        yield Step(verb, subject, units, now_ns, ttl_ns, random.choice(CHARGES))


def _pause_ns(random: Random, window_ns: int, *, rewinds: bool) -> int:
    dice = random.random()
    if dice < 0.4:
        return 0
    if dice < 0.7:
        return random.randint(0, window_ns // 50 + 2)
    if dice < 0.9:
        return random.randint(0, window_ns // 3 + 2)
    if dice < 0.97 or not rewinds:
        return random.randint(0, 3 * window_ns)
    return -random.randint(0, 2 * window_ns)


def _units(random: Random, smallest: int) -> int:
    dice = random.random()
    if dice < 0.6:
        return 1
    if dice < 0.65:
        return 0
    if dice < 0.98:
        return random.randint(1, max(1, min(smallest, 1_000)))
    return random.randint(0, 2 * smallest)
