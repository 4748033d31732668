"""Random fleets of regions on the reference, and the checks of what they admitted.

A fleet is made from one seed: regions, lags, loss, repeats, cuts in each direction, refunds, share
changes and traffic. `CentralCount` is the limit as one store would count it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from random import Random

from ratekeeper.core.clock import NS_PER_SECOND, ManualClock
from ratekeeper.core.model import BUCKETS, MICROS_PER_UNIT, Decision, Limit
from ratekeeper.decide.regional import (
    Accepted,
    AcrossRegions,
    Learnt,
    MemoryRegional,
    Report,
    Shares,
    micros_left,
)
from tests.simulator.regions import result_of

START_S = 1_800_000_000


class CentralCount:
    """One limit, as one store would count all regions. `over` is the most units above it."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.over = Fraction(0)
        self._level = Fraction(0)
        self._at_ns = 0
        self._entries: list[list[int]] = []  # when, units

    def _used(self, now_ns: int) -> Fraction:
        limit = self.limit
        window_ns = limit.window_ns
        if limit.algorithm in BUCKETS:
            drained = Fraction(limit.limit * (now_ns - self._at_ns), window_ns)
            self._level, self._at_ns = max(self._level - drained, Fraction(0)), now_ns
            return self._level
        number = now_ns // window_ns
        if limit.algorithm == "sliding_window_log":
            self._entries = [each for each in self._entries if each[0] > now_ns - window_ns]
            return Fraction(sum(units for _, units in self._entries))
        self._entries = [each for each in self._entries if each[0] // window_ns >= number - 3]
        used = Fraction(sum(units for at, units in self._entries if at // window_ns == number))
        if limit.algorithm == "sliding_window_counter":
            before = sum(units for at, units in self._entries if at // window_ns == number - 1)
            used += Fraction(before * ((number + 1) * window_ns - now_ns), window_ns)
        return used

    def admit(self, now_ns: int, units: int) -> None:
        """Count units that a region has admitted."""
        self._used(now_ns)
        self._level += units
        self._entries.append([now_ns, units])
        self.over = max(self.over, self._used(now_ns) - self.limit.capacity)

    def refund(self, now_ns: int, units: int, charged_ns: int) -> None:
        """Take off units that a region has taken back."""
        left = micros_left(self.limit, units * MICROS_PER_UNIT, now_ns, charged_ns)
        self._used(now_ns)
        self._level = max(self._level - Fraction(left, MICROS_PER_UNIT), Fraction(0))
        for each in self._entries:
            if each[0] == charged_ns and left:
                each[1] -= left // MICROS_PER_UNIT
                break


@dataclass
class RandomRegion:
    """One region: its store, and what its sync knows."""

    name: str
    clock: ManualClock
    store: MemoryRegional
    token: int
    share: Fraction
    accepted: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    """Of each other region: the generation, total and returned units that it has accepted."""
    epoch: int = 1
    announced: dict[str, int] = field(default_factory=dict)
    """The epoch that each other region has announced."""


class RandomRegions:
    """Regions that share the limits of one rule and subject, with a network between them."""

    def __init__(
        self,
        seed: int,
        limits: tuple[Limit, ...],
        across: AcrossRegions,
        *,
        store: Callable[[ManualClock], MemoryRegional] = MemoryRegional,
    ) -> None:
        self.random = random = Random(seed)
        self.now_ns = START_S * NS_PER_SECOND
        self.limits = limits
        self.across = across
        self.central = [CentralCount(limit) for limit in limits]
        count = random.randint(2, 5)
        names = [f"r{number}" for number in range(count)]
        self.regions: dict[str, RandomRegion] = {}
        weights = [random.randint(1, 4) for _ in names]
        for name, weight in zip(names, weights, strict=True):
            clock = ManualClock(START_S)
            made = store(clock)
            _, token = result_of(made.lead(name, 10**18))
            share = Fraction(weight, sum(weights))
            region = RandomRegion(name, clock, made, token, share)
            self.regions[name] = region
            self._set(region, share, share)
        self.lag_s = random.choice([0.05, 0.3, 2.0])
        self.loss = random.choice([0.0, 0.2, 0.6])
        self.cut: set[tuple[str, str]] = set()
        self.charged: list[tuple[RandomRegion, int, int]] = []
        self.asked = self.admitted = 0
        self.gained = Fraction(0)
        """Seconds that clocks were set forward, times the share of the region."""
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def _set(self, region: RandomRegion, share: Fraction, before: Fraction) -> None:
        others = tuple(name for name in self.regions if name != region.name)
        region.share = share
        shares = Shares(region.epoch, share, before, region.clock.now_ns(), others)
        assert result_of(region.store.set_shares(shares, region.token))

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Run an event after some time."""
        self._count += 1
        at_ns = self.now_ns + int(seconds * NS_PER_SECOND)
        heapq.heappush(self._events, (at_ns, self._count, event))

    def run(self, seconds: float) -> None:
        """Run the events of the next seconds."""
        end_ns = self.now_ns + int(seconds * NS_PER_SECOND)
        while self._events and self._events[0][0] <= end_ns:
            at_ns, _, event = heapq.heappop(self._events)
            self._advance(at_ns)
            event()
        self._advance(end_ns)

    def _advance(self, at_ns: int) -> None:
        for region in self.regions.values():
            region.clock.advance((at_ns - self.now_ns) / NS_PER_SECOND)
        self.now_ns = at_ns

    def costs(self) -> Sequence[int]:
        """Return costs that fit the smallest share twice."""
        smallest = min(region.share for region in self.regions.values())
        room = min(limit.capacity for limit in self.limits) * smallest
        return [cost for cost in self.random.choice([[1], [1, 2, 3]]) if cost <= room / 2] or [1]

    # ── Traffic ────────────────────────────────────────────────────────────────────────────────

    def check(self, region: RandomRegion, cost: int) -> Decision:
        """Ask a region."""
        counter = region.store.global_counter(self.limits, "api", self.across)
        decision = counter.check("ann", cost)
        self.asked += cost
        if decision:
            self.admitted += cost
            for central in self.central:
                # A fixed window is that of the region's clock.
                fixed = central.limit.algorithm == "fixed_window"
                central.admit(region.clock.now_ns() if fixed else self.now_ns, cost)
            self.charged.append((region, cost, self.now_ns))
        return decision

    def refund(self) -> None:
        """Return some units of one of the last requests."""
        if self.charged:
            region, cost, at_ns = self.charged.pop(self.random.randrange(len(self.charged)))
            units = self.random.randint(1, cost)
            counter = region.store.global_counter(self.limits, "api", self.across)
            counter.refund("ann", units, at_ns)
            for central in self.central:
                central.refund(self.now_ns, units, at_ns)
            del self.charged[:-20]

    # ── Sync ───────────────────────────────────────────────────────────────────────────────────

    def sync(self, region: RandomRegion) -> None:
        """Send the reports of a region that are due."""
        for report in result_of(region.store.due(10, region.token)):
            for other in self.regions.values():
                if other is not region:
                    self._send(region, other, report, region.epoch)

    def _reaches(self, source: RandomRegion, target: RandomRegion) -> bool:
        return (source.name, target.name) not in self.cut and self.random.random() >= self.loss

    def _send(self, source: RandomRegion, target: RandomRegion, report: Report, epoch: int) -> None:
        def arrive() -> None:
            if not self._reaches(source, target):
                return
            (learnt,) = result_of(target.store.learn(source.name, epoch, [report]))
            if self._reaches(target, source):
                self.later(self._delay(), lambda: self._answered(source, target, report, learnt))

        for _ in range(self.random.choice([1, 1, 1, 2])):
            self.later(self._delay(), arrive)

    def _delay(self) -> float:
        return self.random.uniform(0, self.lag_s)

    def _answered(
        self, region: RandomRegion, other: RandomRegion, report: Report, learnt: Learnt
    ) -> None:
        if not learnt.accepted:
            return
        new = (report.generation, report.total, report.returned)
        region.accepted[other.name] = max(region.accepted.get(other.name, new), new)
        have = [region.accepted.get(name) for name in self.regions if name != region.name]
        if None not in have:
            generation, total, returned = min(each for each in have if each is not None)
            found = Accepted(report.key, generation, total, returned)
            result_of(region.store.accept(region.epoch, [found], region.token))

    # ── Faults ─────────────────────────────────────────────────────────────────────────────────

    def cut_some(self) -> None:
        """Cut another set of links, each in one direction."""
        part = self.random.choice([0.0, 0.3, 0.6, 1.0])
        names = list(self.regions)
        self.cut = {(a, b) for a in names for b in names if self.random.random() < part}

    def change_shares(self, epoch: int, target: dict[str, Fraction]) -> None:
        """Change the shares: each region lowers its own, and raises it when all have lowered."""

        def lower(region: RandomRegion) -> None:
            region.epoch = epoch
            region.accepted.clear()
            before = min(region.share, target[region.name])
            self._set(region, before, before)
            for other in self.regions.values():
                if other is not region:
                    announce(region, other)

        def announce(region: RandomRegion, other: RandomRegion) -> None:
            def heard() -> None:
                other.announced[region.name] = epoch
                if other.epoch == epoch and all(
                    other.announced.get(name) == epoch
                    for name in self.regions
                    if name != other.name
                ):
                    self._set(other, target[other.name], other.share)

            self.later(self._delay(), heard)

        for region in self.regions.values():
            self.later(self._delay(), partial(lower, region))


def _random_shares(random: Random, names: Sequence[str]) -> dict[str, Fraction]:
    weights = [random.randint(1, 4) for _ in names]
    return {name: Fraction(each, sum(weights)) for name, each in zip(names, weights, strict=True)}


def run_random(
    seed: int,
    limits: tuple[Limit, ...],
    across: AcrossRegions = "exact",
    *,
    seconds: float = 30,
    refunds: bool = True,
    shares: bool = True,
    clocks: tuple[float, float] | None = None,
    ahead_s: float = 0.0,
    store: Callable[[ManualClock], MemoryRegional] = MemoryRegional,
) -> RandomRegions:
    """Run a random fleet and return it."""
    fleet = RandomRegions(seed, limits, across, store=store)
    random = fleet.random
    for region in fleet.regions.values() if ahead_s else ():
        region.clock.advance(random.uniform(0, ahead_s))
    rate = max(limit.limit / limit.window for limit in limits) * random.choice([1, 3, 20])
    costs = fleet.costs()
    busy = random.choices(list(fleet.regions.values()), k=3) + list(fleet.regions.values())
    pace = max(rate, 10.0)

    def ask() -> None:
        fleet.check(random.choice(busy), random.choice(costs))
        if refunds and random.random() < 0.1:
            fleet.refund()
        # Bursts and pauses.
        wait = 0.0 if random.random() < 0.5 else random.expovariate(pace / 2)
        fleet.later(2.0 if random.random() < 0.01 else wait, ask)

    def sync(region: RandomRegion) -> None:
        fleet.sync(region)
        fleet.later(random.uniform(0.02, 0.1), lambda: sync(region))

    def cut() -> None:
        fleet.cut_some()
        fleet.later(random.uniform(0.5, 10), cut)

    def change() -> None:
        change_to = _random_shares(random, list(fleet.regions))
        if min(change_to.values()) * min(limit.capacity for limit in limits) >= 3:
            epochs[0] += 1
            fleet.change_shares(epochs[0], change_to)
        fleet.later(random.uniform(3, 10), change)

    def step() -> None:
        """Set the clock of a store: seconds between these two."""
        assert clocks is not None
        region, seconds = random.choice(list(fleet.regions.values())), random.uniform(*clocks)
        region.clock.advance(seconds)
        fleet.gained += region.share * Fraction(max(seconds, 0))
        fleet.later(random.uniform(1, 4), step)

    epochs = [1]
    fleet.later(0, ask)
    for region in fleet.regions.values():
        fleet.later(random.random() * 0.1, partial(sync, region))
    if random.random() < 0.8:
        fleet.later(0, cut)
    if clocks is not None:
        fleet.later(1, step)
    if shares and random.random() < 0.5:
        fleet.later(3, change)
    fleet.run(seconds)
    return fleet
