"""Five regions on this machine: real services and Redis servers, joined by slow links.

    python -m bench.regions              # seven minutes; each figure with its goal
    python -m bench.regions --only exact known

One of the regions has a Redis Cluster (3 primaries, 3 replicas). Messages between two regions take
50 to 150 ms in each direction. The services run in processes of their own; this process relays
between the regions and sends the requests, at a bounded rate.

exact       subjects at 0.9 times a limit of a minute, whose buckets are filled to 0.8 before; a
            subject that moves; cold bursts
partitions  load at twice the limit in all regions while links are cut, for each algorithm
eventual    subjects at 0.9, 2 and 10 times the limit, from all regions together
known       from a check until all other regions know of it, less the link's delay
p99         checks of global rules beside a regional rule on the same Redis
bytes       between all regions, for subjects that send one request a minute
redis       on a server of its own: time of a check, memory of a subject, bytes of a report

failed      checks that a service could not decide: its Redis did not answer in time
over        units above the limit in the worst interval, by the history checker of `tests/faults`
fewer       requests that one central limiter would have admitted in addition
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.answering import answer, awaited
from tests.faults.checker import Admitted, excess
from tests.redis_servers import Single
from tests.region_links import NAMES, RegionServers
from tests.service_process import ServiceProcess

from bench.fleet import NodeClient, Sent, central, progress
from bench.measure import SEED
from bench.region_checks import PATIENCE_MS, ROUNDS, CheckBench, Costs
from ratekeeper import Limit
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS
from ratekeeper.decide.regional import Accepted, AcrossRegions, RegionalCounts, Shares
from ratekeeper.decide.store import Counter, Store
from ratekeeper.decide.stores import open_store
from ratekeeper.regions.status import STATUS_NOTE

EU, US, AP, SA, AF = NAMES
CLUSTER: Final = AP
PARTS: Final = ("exact", "partitions", "eventual", "known", "p99", "bytes", "redis")
MINUTE: Final = Limit(1_000, per=60)
RATE: Final = MINUTE.limit / 60
# Exact limits, by each algorithm. Buckets are filled so far, in this time.
EXACT_LIMIT: Final = 600
EXACT_RATE: Final = EXACT_LIMIT / 60
FILLED, FILLED_S = 0.8, 17.0
# The limits of the partitions: as short as five regions allow, 2 s for each. The share of the
# bucket is used up before the links are cut.
SHORT_LIMIT, SHORT_PER_S, SHORT_CAPACITY = 200, 10, 60
DELAY_S: Final = (0.05, 0.15)
MOVES_S: Final = 10.0
MOVED_S: Final = 2.0
# Load before a cut; the time in which all leaders find it; the time after that; and after healing.
BEFORE_S, FOUND_S, PARTITION_S, AFTER_S = 5.0, 7.0, 18.0, 2.0
SUBJECTS: Final = (10_000, 100_000)
BYTES_S: Final = 8.0
KNOWN_SAMPLES: Final = 400
KNOWN_EVERY_S: Final = (0.05, 0.15)
KNOWN_POLL_S: Final = 0.02
KNOWN_S_MAX: Final = 10.0
READY_S_MAX: Final = 120.0
CHECKS: Final = 1_000
AT_ONCE_MAX: Final = 200
SECONDS: Final = 75.0


class Figure(NamedTuple):
    """One printed line."""

    name: str
    value: str
    goal: str = ""
    met: bool = True


class Planned(NamedTuple):
    """A request to send."""

    at_s: float
    region: str
    endpoint: str
    user: str


class Got(NamedTuple):
    """A request and its answer."""

    planned: Planned
    sent: Sent


def exact_limit(algorithm: str) -> Limit:
    """Return the limit of the exact rules, by one algorithm."""
    return Limit(EXACT_LIMIT, per=60, algorithm=algorithm)  # type: ignore[arg-type]  # known


def short_limit(algorithm: str) -> Limit:
    """Return the limit of the partitions, by one algorithm."""
    capacity = SHORT_CAPACITY if algorithm in BUCKETS else 0
    return Limit(SHORT_LIMIT, per=SHORT_PER_S, algorithm=algorithm, capacity=capacity)  # type: ignore[arg-type]  # known


def document() -> dict[str, Any]:
    """Return the rules: of a minute for each mode, and short exact ones, for each algorithm."""

    def rule(name: str, limit: Limit, across: str) -> dict[str, Any]:
        written = {"limit": limit.limit, "per": f"{limit.per:g}s", "algorithm": limit.algorithm}
        if limit.algorithm in BUCKETS:
            written["capacity"] = limit.capacity
        found = {
            "id": name,
            "match": {"endpoint": f"/{name}"},
            "by": ["user"],
            "limits": [written],
            "on_failure": "closed",
        }
        return (
            found if across == "region" else {**found, "scope": "global", "across_regions": across}
        )

    rules = [rule("eventual", MINUTE, "eventual")]
    rules += [rule(f"exact-{each}", exact_limit(each), "exact") for each in UNIT_ALGORITHMS]
    rules += [rule(f"short-{each}", short_limit(each), "exact") for each in UNIT_ALGORITHMS]
    return {"version": 1, "rules": rules}


class World:
    """The servers, the links, and a service in each region."""

    def __init__(self, stack: ExitStack) -> None:
        self.servers = stack.enter_context(RegionServers(NAMES, cluster=CLUSTER))
        chance = random.Random(SEED)
        self.delays: dict[frozenset[str], float] = {}
        for one, other in permutations(NAMES, 2):
            if one < other:
                delay_s = self.delays[frozenset((one, other))] = chance.uniform(*DELAY_S)
                self.servers.delay(one, other, delay_s)
        services = {region: self._service(region) for region in NAMES}
        with ThreadPoolExecutor(len(NAMES)) as pool:  # a start takes seconds
            list(pool.map(stack.enter_context, services.values()))
        self.clients = {
            region: NodeClient(each.url, may_fail=True) for region, each in services.items()
        }
        eu = self.servers.servers[EU]
        assert isinstance(eu, Single)
        self._eu = stack.enter_context(closing(eu.client()))
        self.stores = {region: open_store(self.servers.uri(region)) for region in NAMES}
        for store in self.stores.values():
            stack.callback(store.close)

    def _service(self, region: str) -> ServiceProcess:
        table = self.servers.settings(region).stores
        named = [word for name, uri in table.items() for word in ("--regions", f"{name}={uri}")]
        return ServiceProcess(document(), "--region", region, *named)

    def counts(self, region: str) -> RegionalCounts:
        """Return the counts of a region, without a link."""
        found = self.stores[region].regional
        assert found is not None
        return found

    async def links(self, region: str) -> set[str]:
        """Return the states of the links of a region, as its leader has noted them."""
        note = json.loads((await self.counts(region).notes()).get(STATUS_NOTE, "{}"))
        return {each["state"] for each in note.get("links", [{"state": "down"}])}

    async def until_synced(self) -> None:
        """Wait until all regions exchange totals."""
        ends_s = time.monotonic() + READY_S_MAX
        for region in NAMES:
            while (states := await self.links(region)) != {"up"}:
                assert time.monotonic() < ends_s, f"{region} does not work: its links are {states}"
                await asyncio.sleep(0.1)

    def redis_s(self) -> float:
        """Return the processor time that the Redis server of eu has used so far."""
        used = self._eu.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def send(self, plan: Iterable[Planned]) -> list[Got]:
        """Send each request at its time."""
        await asyncio.gather(*(client.connect() for client in self.clients.values()))
        began_s = time.monotonic()
        found: list[Got] = []

        async def send(each: Planned) -> None:
            sent = await self.clients[each.region].check(f"/{each.endpoint}", each.user)
            found.append(Got(each, sent))

        async with asyncio.TaskGroup() as group:
            for each in sorted(plan):
                wait_s = began_s + each.at_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(send(each))
        return found


def steady(
    endpoint: str,
    user: str,
    per_s: float,
    seconds: float,
    region_at: Callable[[float, random.Random], str],
    since_s: float = 0.0,
) -> Iterator[Planned]:
    """Return the requests of a subject: at random times, each in the region of the moment."""
    chance = random.Random(f"{SEED} {user} {per_s}")
    at_s = since_s + chance.expovariate(per_s)
    while at_s < seconds:
        yield Planned(at_s, region_at(at_s, chance), endpoint, user)
        at_s += chance.expovariate(per_s)


def anywhere(_: float, chance: random.Random) -> str:
    """Return any region."""
    return chance.choice(NAMES)


def mostly_eu(_: float, chance: random.Random) -> str:
    """Return eu for seven requests of ten, otherwise any region."""
    return EU if chance.random() < 0.7 else chance.choice(NAMES)


def moving(at_s: float, _: random.Random) -> str:
    """Return another region every ten seconds."""
    return NAMES[int(at_s / MOVES_S) % len(NAMES)]


def of(found: Sequence[Got], user: str) -> list[Got]:
    """Return the answers of one subject."""
    return [each for each in found if each.planned.user == user]


def over_of(limit: Limit, found: Iterable[Got]) -> int:
    """Return the units above the limit in the worst interval."""
    return excess(
        limit,
        [Admitted(got.sent.sent_ns, got.sent.answered_ns) for got in found if got.sent.allowed],
    )


def fewer_of(limit: Limit, found: Sequence[Got]) -> int:
    """Return the requests that a central limiter would have admitted in addition."""
    return central(limit, [got.sent for got in found]) - sum(got.sent.allowed for got in found)


# ── Exact ─────────────────────────────────────────────────────────────────────────────────────────

# Subjects below their limits: the algorithm, and where their requests are.
BELOW: Final = {
    "in one region": ("token_bucket", lambda *_: SA),
    "mostly in one region": ("token_bucket", mostly_eu),
    "in another region every 10 s": ("token_bucket", moving),
    **{f"in all regions, {each}": (each, anywhere) for each in UNIT_ALGORITHMS},
}


async def measure_exact(world: World, seconds: float) -> dict[str, Any]:
    """Return the figures of exact limits while all links work."""
    plan = [
        *steady("exact-token_bucket", "moves above", 2.0 * EXACT_RATE, seconds, moving),
        # It is at its limit from the first move on.
        *steady("exact-token_bucket", "moves above", EXACT_LIMIT / MOVES_S, MOVES_S, anywhere),
    ]
    for user, (algorithm, region_at) in BELOW.items():
        endpoint, since_s = f"exact-{algorithm}", 0.0
        if algorithm in BUCKETS:
            per_s = FILLED * EXACT_LIMIT / FILLED_S + EXACT_RATE
            plan += steady(endpoint, user, per_s, FILLED_S, region_at)
            since_s = FILLED_S
        plan += steady(endpoint, user, 0.9 * EXACT_RATE, seconds, region_at, since_s)
    found = await world.send(plan)
    limits = {user: exact_limit(algorithm) for user, (algorithm, _) in BELOW.items()}
    limits["moves above"] = exact_limit("token_bucket")
    return {
        "over": max(over_of(limit, of(found, user)) for user, limit in limits.items()),
        "fewer": {user: fewer_of(limits[user], of(found, user)) for user in BELOW},
        "sent": {user: len(of(found, user)) for user in BELOW},
        "failed": sum(each.sent.failed for each in found),
        "moved": moved_rate(of(found, "moves above"), seconds),
        "burst": await measure_bursts(world),
    }


def moved_rate(found: Sequence[Got], seconds: float) -> float:
    """Return the lowest rate in a region, from 2 s after the subject has moved there.

    As a part of the limit's rate. A region that has denied nothing is left out.
    """
    rates = []
    for number in range(1, int(seconds // MOVES_S)):
        since_s, ends_s = number * MOVES_S + MOVED_S, (number + 1) * MOVES_S
        asked = [each for each in found if since_s <= each.planned.at_s < ends_s]
        admitted = sum(each.sent.allowed for each in asked)
        if len(asked) > admitted:
            rates.append(admitted / (ends_s - since_s) / EXACT_RATE)
    return min(rates, default=0.0)


async def measure_bursts(world: World) -> dict[str, int]:
    """Send more than the share at once, and again when the first denial says so."""
    plan = [
        Planned(0.0, region, f"short-{algorithm}", f"burst-{region}")
        for algorithm in UNIT_ALGORITHMS
        for region in (EU, AP, SA)
        for _ in range(short_limit(algorithm).capacity // len(NAMES) + 5)
    ]
    found = await world.send(plan)
    first: dict[tuple[str, str], Got] = {}
    for got in found:
        if not got.sent.allowed and not got.sent.failed:
            first.setdefault((got.planned.endpoint, got.planned.user), got)

    async def again(got: Got) -> bool:
        left_s = got.sent.answered_ns / 1e9 + got.sent.retry_after_s - time.time()
        await asyncio.sleep(max(left_s, 0.0))
        planned = got.planned
        client = world.clients[planned.region]
        return (await client.check(f"/{planned.endpoint}", planned.user)).allowed

    true = sum(await asyncio.gather(*map(again, first.values())))
    return {"denied": len(first), "true": true}


def exact_figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Return the lines of exact limits."""
    yield Figure("over in any interval", f"{found['over']}", "0", found["over"] == 0)
    for user, fewer in found["fewer"].items():
        value = f"{fewer} of {found['sent'][user]:,}"
        yield Figure(f"fewer at 0.9, {user}", value, "0", fewer <= 0)
    moved, burst = found["moved"], found["burst"]
    yield Figure("rate in another region, 2 s later", f"{moved:.2f}", ">= 0.95", moved >= 0.95)
    value, is_true = f"{burst['true']} of {burst['denied']}", burst["true"] == burst["denied"] > 0
    yield Figure("retry_after of a cold burst is true", value, "all", is_true)
    yield Figure("failed", f"{found['failed']}")


# ── Partitions ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Partition:
    """Which links are cut."""

    name: str
    cuts: tuple[tuple[str, str], ...]


def _between(some: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in permutations(NAMES, 2) if (pair[0] in some) != (pair[1] in some))


PARTITIONS: Final = (
    Partition("two and three", _between((EU, US))),
    Partition("one alone", _between((AP,))),
    Partition("one pair", tuple(permutations((EU, US), 2))),
    Partition("one way", ((EU, US), (EU, AP), (SA, AF))),
    Partition("all alone", tuple(permutations(NAMES, 2))),
)


async def measure_partition(world: World, partition: Partition) -> dict[str, Any]:
    """Return the figures of one partition."""
    seconds = BEFORE_S + FOUND_S + PARTITION_S + AFTER_S
    per_s = 2 * SHORT_LIMIT / SHORT_PER_S
    plan = [
        each
        for algorithm in UNIT_ALGORITHMS
        for each in steady(
            f"short-{algorithm}", f"{partition.name} {algorithm}", per_s, seconds, anywhere
        )
    ]

    async def cut() -> float:
        await asyncio.sleep(BEFORE_S)
        for pair in partition.cuts:
            world.servers.cut(*pair)
        began_s = time.monotonic()
        # A call needs both directions, so both ends of a link find it.
        for region in {name for pair in partition.cuts for name in pair}:
            while await world.links(region) == {"up"}:  # noqa: ASYNC110 - another process notes it
                await asyncio.sleep(0.1)
        found_s = time.monotonic() - began_s
        await asyncio.sleep(began_s + FOUND_S + PARTITION_S - time.monotonic())
        world.servers.heal()
        return found_s

    found, found_s = await asyncio.gather(world.send(plan), cut())
    users = {algorithm: of(found, f"{partition.name} {algorithm}") for algorithm in UNIT_ALGORITHMS}
    steps_s = (BEFORE_S, BEFORE_S + FOUND_S, BEFORE_S + FOUND_S + PARTITION_S)
    buckets = [got for algorithm, got in users.items() if algorithm in BUCKETS]
    return {
        "failed": sum(each.sent.failed for each in found),
        "over": {each: over_of(short_limit(each), got) for each, got in users.items()},
        "admitted": {each: sum(one.sent.allowed for one in got) for each, got in users.items()},
        "found_s": found_s,
        "first": min(delivered(got, *steps_s[:2]) for got in buckets),
        "of_share": min(delivered(got, *steps_s[1:]) for got in buckets),
    }


def delivered(found: Sequence[Got], since_s: float, ends_s: float) -> float:
    """Return the least that a region has admitted in this time, as a part of its share."""
    share = SHORT_LIMIT / SHORT_PER_S / len(NAMES)
    admitted = dict.fromkeys(NAMES, 0)
    for each in found:
        if since_s <= each.planned.at_s < ends_s:
            admitted[each.planned.region] += each.sent.allowed
    return min(admitted.values()) / (ends_s - since_s) / share


def partition_figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Return the lines of the partitions."""
    for name, each in found.items():
        over, share = max(each["over"].values()), each["of_share"]
        yield Figure(f"{name}: over in any interval", f"{over}", "0", over == 0)
        yield Figure(f"{name}: of the share", f"{share:.2f}", ">= 0.95", share >= 0.95)
        first = f"{each['first']:.2f}, found after {each['found_s']:.1f} s"
        yield Figure(f"{name}: in the first {FOUND_S:g} s", first)
        admitted = ", ".join(f"{count}" for count in each["admitted"].values())
        yield Figure(f"{name}: admitted; failed", f"{admitted}; {each['failed']}")


# ── Eventual ──────────────────────────────────────────────────────────────────────────────────────


async def measure_eventual(world: World, seconds: float) -> dict[str, Any]:
    """Return the figures of eventual limits at several times the limit, all at the same time."""
    users = {f"{times} times": times for times in (0.9, 2, 10)}
    plan: list[Planned] = []
    for user, times in users.items():
        plan += steady("eventual", user, times * RATE, seconds, anywhere)
        if times < 10:  # the others have used up their bucket after some seconds
            more = FILLED * MINUTE.limit / FILLED_S + (1 - times) * RATE
            plan += steady("eventual", user, more, FILLED_S, anywhere)
    got = await world.send(plan)
    found = {}
    for user in users:
        mine = of(got, user)
        admitted = sum(each.sent.allowed for each in mine)
        found[user] = {
            "sent": len(mine),
            "admitted": admitted,
            "failed": sum(each.sent.failed for each in mine),
            "over": over_of(MINUTE, mine),
            "fewer": fewer_of(MINUTE, mine),
        }
    return found


def eventual_figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Return the lines of eventual limits."""
    for user, each in found.items():
        over = each["over"] / MINUTE.limit
        yield Figure(f"{user}: over", f"{each['over']} ({over:.1%})", "<= 1.0%", over <= 0.01)
        value = f"{each['fewer']} of {each['admitted']:,} ({each['sent']:,} sent)"
        # However long it takes: a unit in the part of each region is free when the load ends.
        goal, most = f"<= {len(NAMES)} units", len(NAMES)
        yield Figure(f"{user}: fewer", value, goal, each["fewer"] <= most)
        yield Figure(f"{user}: failed", f"{each['failed']}")


async def measure_known(world: World) -> dict[str, float]:
    """Return how long it takes until the other regions know of a unit, less the link's delay."""
    counters = {
        region: world.counts(region).global_counter((MINUTE,), "eventual", "eventual")
        for region in NAMES
    }
    chance = random.Random(SEED)

    async def sample(region: str, subject: str) -> list[float]:
        began_ns = time.time_ns()
        await awaited(counters[region].check(subject, 1))
        others = [other for other in NAMES if other != region]
        found = await asyncio.gather(
            *(_known_s(world, region, other, subject, began_ns) for other in others)
        )
        return list(found)

    samples = []
    async with asyncio.TaskGroup() as group:
        for number in range(KNOWN_SAMPLES):
            await asyncio.sleep(chance.uniform(*KNOWN_EVERY_S))
            region = NAMES[number % len(NAMES)]
            samples.append(group.create_task(sample(region, f"known-{number}")))
    took = sorted(each for one in samples for each in one.result())
    return {
        "p50_ms": 1e3 * took[len(took) // 2],
        "p90_ms": 1e3 * took[int(0.9 * len(took))],
        "p99_ms": 1e3 * took[int(0.99 * len(took))],
        "max_ms": 1e3 * took[-1],
        "samples": len(took),
    }


async def _known_s(world: World, region: str, other: str, subject: str, began_ns: int) -> float:
    """Return the time from the check to the moment at which the other region's Redis learnt it."""
    while True:
        usage = await world.counts(other).usage((MINUTE,), "eventual", subject)
        now_ns = time.time_ns()
        # Not `used`: one unit of this limit is refilled in 60 ms, before it arrives elsewhere.
        ages_ns = [each.age_ns for each in usage.parts if each.region == region and each.part]
        took_s = (now_ns - min(ages_ns, default=0) - began_ns) / NS_PER_SECOND
        if ages_ns or took_s > KNOWN_S_MAX:
            return took_s - world.delays[frozenset((region, other))]
        await asyncio.sleep(KNOWN_POLL_S)


def known_figures(found: dict[str, float]) -> Iterator[Figure]:
    """Return the lines of the time until other regions know."""
    for name in ("p50", "p90", "p99", "max"):
        took, is_goal = found[f"{name}_ms"], name == "p99"
        goal = "<= 100 ms" if is_goal else ""
        yield Figure(f"{name} beyond the link's delay", f"{took:.0f} ms", goal, took <= 100)
    yield Figure("samples", f"{found['samples']:,.0f}")


# ── Costs ─────────────────────────────────────────────────────────────────────────────────────────


def _counters(store: Store) -> dict[str, Counter]:
    """Return a counter of a regional rule, and one of each kind of global rule."""
    assert store.regional is not None
    counters = {"region": store.counter((MINUTE,), "region")}
    modes: tuple[AcrossRegions, ...] = ("exact", "eventual")
    for mode in modes:
        counters[mode] = store.regional.global_counter((MINUTE,), mode, mode)
    return counters


def measure_p99(world: World) -> dict[str, Costs]:
    """Return the time of checks by a regional and by global rules, on the same Redis.

    The services and the leader of the region use it as well: `bench.region_checks` has one alone.
    """
    server = world.servers.servers[EU]
    assert isinstance(server, Single)
    with closing(open_store(server.uri, denied_cache_ms=0, deadline_ms=PATIENCE_MS)) as store:
        checks = CheckBench(store, server.admin)
        return {
            name: checks.measure("token_bucket", allowed=name == "allowed", rounds=ROUNDS)
            for name in ("allowed", "denied")
        }


def p99_figures(found: dict[str, Costs]) -> Iterator[Figure]:
    """Return the lines of the time of a check."""
    for name, costs in found.items():
        for kind, each in costs.items():
            times, of = (each["p50_ratio"], each["p99_ratio"]), f"{kind}, {name}"
            yield Figure(f"{of}: p50, p99", f"{each['p50']:.0f}, {each['p99']:.0f} us")
            if kind != "region":
                yield Figure(f"{of}: times regional, p50", f"{times[0]:.2f}")
                yield Figure(
                    f"{of}: times regional, p99", f"{times[1]:.2f}", "<= 1.20", times[1] <= 1.2
                )


async def measure_bytes(world: World, subjects: int) -> dict[str, float]:
    """Return the bytes between all regions, with subjects that send a request a minute."""
    counters = [
        world.counts(region).global_counter((MINUTE,), "bytes", "eventual") for region in NAMES
    ]
    chance = random.Random(SEED)
    per_s = subjects / 60
    before, used_s = world.servers.sent_bytes(), world.redis_s()
    began_s = time.monotonic()
    sent = 0
    while (spent_s := time.monotonic() - began_s) < BYTES_S:
        due = min(int(spent_s * per_s) - sent, AT_ONCE_MAX)
        sent += due
        numbers = [chance.randrange(subjects) for _ in range(due)]
        await asyncio.gather(
            *(awaited(chance.choice(counters).check(f"user-{number:06}", 1)) for number in numbers)
        )
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    took_s = time.monotonic() - began_s
    return {
        "checks_per_s": sent / BYTES_S,
        "bytes_per_s": (world.servers.sent_bytes() - before) / took_s,
        "redis": (world.redis_s() - used_s) / took_s,
    }


def bytes_figures(found: dict[int, dict[str, float]]) -> Iterator[Figure]:
    """Return the lines of the traffic."""
    idle = found[0]["bytes_per_s"]
    for subjects, each in found.items():
        value = f"{each['bytes_per_s'] / 1e3:,.0f} kB/s at {each['checks_per_s']:,.0f} checks/s"
        yield Figure(f"{subjects:,} subjects, all links", value)
        if subjects:
            more = (each["bytes_per_s"] - idle) / max(each["checks_per_s"], 1)
            yield Figure(f"{subjects:,} subjects, for a check", f"{more:,.0f} bytes")
        value = f"{each['redis']:.1%} of a processor"
        yield Figure(f"{subjects:,} subjects, the Redis of {EU}", value)


async def measure_redis() -> dict[str, float]:
    """Return what one region costs its Redis, on a server that does nothing else."""
    with (
        Single() as server,
        closing(open_store(f"{server.uri}?deadline_ms=10000")) as store,
        closing(server.client()) as raw,
    ):
        counts = store.regional
        assert counts is not None
        _, token = await counts.lead("bench", 3_600 * NS_PER_SECOND)
        fifth = Fraction(1, len(NAMES))
        await counts.set_shares(Shares(1, fifth, fifth, 0, NAMES[1:]), token)
        counters = _counters(store)

        answer(counters["exact"].check("warm", 1))
        empty = raw.info("memory")["used_memory"]

        def memory() -> float:
            return float(raw.info("memory")["used_memory"] - empty) / SUBJECTS[0]

        for number in range(SUBJECTS[0]):
            answer(counters["exact"].check(f"user-{number:06}", 1))
        found = {"checked_bytes": memory()}
        reports = await counts.due(2 * SUBJECTS[0], token)
        done = [Accepted(each.key, each.generation, each.total, each.returned) for each in reports]
        await counts.accept(1, done, token)
        found["accepted_bytes"] = memory()
        before = counts.traffic()
        for region in NAMES[1:]:
            await counts.learn(region, 1, reports)
        found["learnt_bytes"] = memory()
        messages = len(reports) * len(NAMES[1:])
        for name, was, now in zip(("report", "answer"), before, counts.traffic(), strict=True):
            found[f"{name}_bytes"] = (now - was) / messages
        for name, counter in counters.items():
            answer(counter.check("warm", 1))
            used = raw.info("commandstats")["cmdstat_evalsha"]["usec"]
            for number in range(CHECKS):
                answer(counter.check(f"cost-{number % 500}", 1))
            used = raw.info("commandstats")["cmdstat_evalsha"]["usec"] - used
            found[f"{name}_us"] = used / CHECKS
        return found


def redis_figures(found: dict[str, float]) -> Iterator[Figure]:
    """Return the lines of one region's Redis."""
    for name in ("region", "exact", "eventual"):
        yield Figure(f"server time of a check, {name}", f"{found[f'{name}_us']:.1f} us")
    value = f"{found['checked_bytes']:.0f}, {found['accepted_bytes']:.0f} bytes"
    yield Figure("memory of a subject; accepted", value)
    yield Figure("learnt from four regions as well", f"{found['learnt_bytes']:.0f} bytes")
    value = f"{found['report_bytes']:.0f}, {found['answer_bytes']:.0f} bytes"
    yield Figure("a report; its answer", value)


# ── All ───────────────────────────────────────────────────────────────────────────────────────────


async def measure_part(part: str, world: World, seconds: float) -> dict[Any, Any]:
    """Return the figures of one part."""
    if part == "exact":
        return await measure_exact(world, seconds)
    if part == "eventual":
        return await measure_eventual(world, seconds)
    if part == "known":
        return await measure_known(world)
    if part == "p99":
        return await asyncio.to_thread(measure_p99, world)
    if part == "bytes":
        return {count: await measure_bytes(world, count) for count in (0, *SUBJECTS)}
    if part == "redis":
        return await measure_redis()
    found = {}
    for each in PARTITIONS:
        progress(f"measuring the partition {each.name} …")
        found[each.name] = await measure_partition(world, each)
        await world.until_synced()
    return found


async def measure_all(seconds: float, only: Sequence[str]) -> dict[str, Any]:
    """Start everything, print the figures of each part and return all."""
    found: dict[str, Any] = {}
    figures: list[Figure] = []
    with ExitStack() as stack:
        progress("starting five regions …")
        world = World(stack)
        for part in only:
            await world.until_synced()
            progress(f"measuring {part} …")
            found[part] = await measure_part(part, world, seconds)
            progress("")
            lines = list(_FIGURES[part](found[part]))
            print(report(part, lines), flush=True)
            figures += lines
        for client in world.clients.values():
            client.close()
    goals = [each for each in figures if each.goal]
    missed = [each for each in goals if not each.met]
    print(f"\n{len(goals) - len(missed)} of {len(goals)} goals are met", flush=True)
    return found


def report(part: str, figures: Iterable[Figure]) -> str:
    """Return the figures of one part as lines."""
    lines = [f"\n{part}"]
    for name, value, goal, met in figures:
        verdict = f"goal {goal:<10} {'met' if met else 'MISSED'}" if goal else ""
        lines.append(f"  {name:<52} {value:<34} {verdict}".rstrip())
    return "\n".join(lines)


_FIGURES: Final[dict[str, Callable[[Any], Iterator[Figure]]]] = {
    "exact": exact_figures,
    "partitions": partition_figures,
    "eventual": eventual_figures,
    "known": known_figures,
    "p99": p99_figures,
    "bytes": bytes_figures,
    "redis": redis_figures,
}


def main() -> None:
    """Measure five regions and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.regions", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the load, for each mode")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there too")
    options = parser.parse_args()
    found = asyncio.run(measure_all(options.seconds, options.only))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
