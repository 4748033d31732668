"""Redis decides global limits as the reference does, call for call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from random import Random

import pytest

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import BUCKETS, Decision, Limits, decision_fields, decision_with
from ratekeeper.decide.regional import (
    Accepted,
    AcrossRegions,
    MemoryRegional,
    RegionalCounts,
    Report,
    Shares,
)
from ratekeeper.decide.store import LocalCounter
from ratekeeper.decide.stores.redis import regional
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringCounter
from tests.conformance.stores import PATIENCE
from tests.parity.in_microseconds import up_to_us
from tests.promises.strategies import limit_of
from tests.redis_servers import running

pytestmark = pytest.mark.server

LIMITS: dict[str, Limits] = {
    "bucket": (limit_of("token_bucket", 90, 60_000_000),),
    "stepped": (limit_of("token_bucket", 7, 5_000_000, 20, refill_us=1_300_000),),
    "leaky": (limit_of("leaky_bucket", 13, 3_000_000, 40),),
    "fixed": (limit_of("fixed_window", 20, 7_000_000),),
    "counter": (limit_of("sliding_window_counter", 30, 9_000_001),),
    "log": (limit_of("sliding_window_log", 25, 10_000_000),),
    "several": (
        limit_of("token_bucket", 100, 60_000_000),
        limit_of("sliding_window_counter", 12, 1_000_000),
        limit_of("sliding_window_log", 40, 20_000_000),
    ),
}
SUBJECTS = ("ann", "bob:{x}")
REGIONS = ("eu", "us", "ap")
_numbers = count()


@dataclass
class Region:
    """A region on Redis and on the reference."""

    name: str
    counters: tuple[LocalCounter, LocalCounter]
    stores: tuple[RegionalCounts, RegionalCounts]


def in_us(decision: Decision) -> Decision:
    """Return a decision with waits that are rounded up to whole microseconds."""
    return decision_with(
        decision,
        retry_after_ns=up_to_us(decision.retry_after_ns),
        reset_after_ns=up_to_us(decision.reset_after_ns),
    )


def answer(counter: LocalCounter, verb: str, subject: str, cost: int) -> object:
    """Return the decision of a counter, or the text of a CapacityError."""
    try:
        return decision_fields(in_us(getattr(counter, verb)(subject, cost)))
    except CapacityError as error:
        return str(error)


class Regions:
    """Three regions on both engines. Each method makes the same call on both, and compares."""

    def __init__(
        self, clock: ManualClock, stores: list[RedisStore], limits: Limits, across: AcrossRegions
    ) -> None:
        self.clock, self.limits, self.across = clock, limits, across
        rule = f"rule{next(_numbers)}"
        self.rule, self.epoch = rule, 1
        self.regions = []
        for name, store in zip(REGIONS, stores, strict=True):
            memory = MemoryRegional(clock)
            counters = (
                AnsweringCounter(store.regional.global_counter(limits, rule, across)),
                memory.global_counter(limits, rule, across),
            )
            self.regions.append(Region(name, counters, (store.regional, memory)))

    def change_limits(self, region: Region, random: Random) -> None:
        """Use other numbers or another mode in one region, as when a rule is edited."""
        factor = random.choice([1, 1, 2, 3])
        limits = tuple(
            limit_of(
                each.algorithm,
                each.limit * factor,
                each.window_ns // 1_000,
                each.capacity * factor if each.algorithm in BUCKETS else 0,
                refill_us=each.refill_step_ns // 1_000,
            )
            for each in self.limits
        )
        across: AcrossRegions = random.choice(["exact", "eventual", self.across, self.across])
        redis, memory = region.stores
        region.counters = (
            AnsweringCounter(redis.global_counter(limits, self.rule, across)),
            AnsweringCounter(memory.global_counter(limits, self.rule, across)),
        )

    async def share(self, region: Region, shares: Shares) -> None:
        for store in region.stores:
            _, token = await store.lead("leader", 10**18)
            assert await store.set_shares(shares, token)
            assert await store.shares() == shares

    def check(self, region: Region, verb: str, subject: str, cost: int) -> None:
        redis, memory = (answer(counter, verb, subject, cost) for counter in region.counters)
        assert redis == memory

    async def due(self, region: Region, most: int) -> list[Report]:
        redis, memory = [
            await store.due(most, (await store.lead("leader", 10**18))[1])
            for store in region.stores
        ]
        mine = [each for each in redis if each.key.rule == self.number]
        assert mine == memory
        return memory

    @property
    def number(self) -> str:
        return regional.rule_number(self.limits, self.rule)

    async def learn(self, region: Region, sender: str, reports: list[Report]) -> None:
        redis, memory = [await store.learn(sender, self.epoch, reports) for store in region.stores]
        assert redis == memory

    async def accept(self, region: Region, accepted: list[Accepted]) -> None:
        for store in region.stores:
            _, token = await store.lead("leader", 10**18)
            await store.accept(self.epoch, accepted, token)

    async def compare(self, region: Region, subject: str) -> None:
        redis, memory = [
            await store.usage(self.limits, self.rule, subject) for store in region.stores
        ]
        assert redis._replace(parts=tuple(sorted(redis.parts))) == memory._replace(
            parts=tuple(sorted(memory.parts))
        )


@contextmanager
def stores_of(kind: str, clock: ManualClock) -> Iterator[list[RedisStore]]:
    """Open the stores of three regions: one server with three prefixes."""
    uri = running(kind).uri
    found = []
    for name in REGIONS:
        joint = "&" if "?" in uri else "?"
        options = "&".join(f"{option}={value}" for option, value in PATIENCE.items())
        config = parse(f"{uri}{joint}{options}&prefix=r{next(_numbers)}-{name}")
        found.append(RedisStore(config, clock))
    yield found
    for store in found:
        store.close()


class Trace:
    """Random calls, from one seed."""

    def __init__(self, regions: Regions, clock: ManualClock, seed: int) -> None:
        self.random = Random(seed)
        self.regions, self.clock = regions, clock
        self.steps: list[str] = []

    async def run(self, steps: int) -> None:
        third = Fraction(1, 3)
        for region in self.regions.regions:
            others = tuple(name for name in REGIONS if name != region.name)
            await self.regions.share(region, Shares(1, third, third, self.clock.now_ns(), others))
        for _ in range(steps):
            await self.step()

    async def step(self) -> None:
        random, regions = self.random, self.regions
        region = random.choice(regions.regions)
        subject = random.choice(SUBJECTS)
        cost = random.choice([0, 1, 1, 2, 3, random.randint(0, 30)])
        verb = random.choice(["check"] * 6 + ["sync", "time"] * 3 + RARE)
        self.steps.append(f"{verb} {region.name} {subject} {cost}")
        if verb in {"check", "peek"}:
            regions.check(region, verb, subject, cost)
        elif verb == "refund":
            ago_ns = random.choice([None, random.randrange(3_000_000) * 1_000])
            charged_ns = None if ago_ns is None else self.clock.now_ns() - ago_ns
            for counter in region.counters:
                counter.refund(subject, cost, charged_ns)
        elif verb == "grant":
            ttl_ns = random.choice([None, random.randint(1, 5_000_000) * 1_000])
            for counter in region.counters:
                counter.grant(subject, cost + 1, ttl_ns)
        elif verb == "reset":
            for counter in region.counters:
                counter.reset(subject)
        elif verb == "limits":
            regions.change_limits(region, random)
        elif verb == "back":  # the clock of the stores is set back
            self.clock.advance_ns(-random.randrange(random.choice([5, 20_000_000])) * 1_000)
        elif verb == "sync":
            await self.sync(region)
        elif verb == "shares":
            await self.change_shares(region)
        else:
            span_us = random.randrange(random.choice([5, 100_000, 2_000_000, 30_000_000]))
            self.clock.advance_ns(span_us * 1_000)
            await regions.compare(region, subject)

    async def sync(self, region: Region) -> None:
        """Carry reports to some of the other regions; some totals are then accepted."""
        random, regions = self.random, self.regions
        for report in await regions.due(region, random.choice([1, 10])):
            for other in regions.regions:
                if other is not region and random.random() < 0.7:
                    await regions.learn(other, region.name, [report])
            if random.random() < 0.7:
                accepted = Accepted(
                    report.key,
                    report.generation,
                    report.total,
                    report.returned,
                    everywhere=random.random() < 0.7,
                )
                await regions.accept(region, [accepted])

    async def change_shares(self, region: Region) -> None:
        random = self.random
        now = random.randint(1, 100)
        before = random.randint(1, now)
        live = tuple(random.sample(REGIONS, random.randint(0, 3)))
        changed_ns = self.clock.now_ns() - random.randrange(3_000_000) * 1_000
        epoch = random.choice([1, 1, 2])
        shares = Shares(epoch, Fraction(now, 100), Fraction(before, 100), changed_ns, live)
        await self.regions.share(region, shares)


RARE = ["peek", "refund", "grant", "reset", "shares", "limits", "back"]
# Of one server in a usual run, with all limits; a Cluster runs one trace of several limits.
SEEDS = range(int(os.environ.get("RATEKEEPER_EXPLORE") or 1) * 2)
TRACES = [("single", name, seed) for name in LIMITS for seed in SEEDS]


@pytest.mark.parametrize("across", ["exact", "eventual"])
@pytest.mark.parametrize(("kind", "name", "seed"), [*TRACES, ("cluster", "several", 0)])
def test_every_call_agrees_with_the_reference(
    kind: str, name: str, seed: int, across: AcrossRegions
) -> None:
    """Checks, verbs, reports and shares in random order have the same results on both."""
    clock = ManualClock(1_800_000_000)
    with stores_of(kind, clock) as stores:
        trace = Trace(Regions(clock, stores, LIMITS[name], across), clock, seed)
        try:
            asyncio.run(trace.run(80))
        except BaseException:
            print("\n".join(trace.steps))
            raise
