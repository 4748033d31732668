"""Five regions on this machine: real services and Redis servers, joined by slow links.

    python -m bench.regions              # a few minutes
    python -m bench.regions --seconds 20 --only exact

One of the regions has a Redis Cluster (3 primaries, 3 replicas). Messages between two regions take
50 to 150 ms in each direction. The services run in processes of their own; this process relays
between the regions and sends the requests, at a bounded rate.

exact       subjects below their limit, in one or all regions; a subject that moves; cold bursts
partitions  load at three times the limit in all regions while links are cut, for each algorithm
eventual    subjects at 0.9, 2 and 10 times the limit, from all regions together
known       from the answer to a check until all other regions know of it, less the link's delay
p99         checks of global rules beside a regional rule on the same Redis
bytes       between all regions, for subjects that send one request a minute

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
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.faults.checker import Admitted, excess
from tests.region_links import NAMES, RegionServers
from tests.service_process import ServiceProcess

from bench.fleet import NodeClient, Sent, central, progress
from bench.measure import SEED
from tollkeeper import Limit
from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.model import ALGORITHM_NAMES
from tollkeeper.decide.regional import AcrossRegions, RegionalCounts
from tollkeeper.decide.stores import open_store

EU, US, AP, SA, AF = NAMES
CLUSTER: Final = AP
PARTS: Final = ("exact", "partitions", "eventual", "known", "p99", "bytes")
MINUTE: Final = Limit(1_000, per=60)
RATE: Final = MINUTE.limit / 60
# Short enough for the partitions, and as long as five regions need: 2 s for each.
SHORT_LIMIT, SHORT_PER_S = 100, 10
DELAY_S: Final = (0.05, 0.15)
MOVES_S: Final = 10.0
MOVED_S: Final = 2.0
PARTITION_S, LONG_PARTITION_S = 12.0, 25.0
SETTLED_S: Final = 3.0
SUBJECTS: Final = (1_000, 10_000, 100_000)
BYTES_S: Final = 8.0
KNOWN_SAMPLES: Final = 400
KNOWN_EVERY_S: Final = (0.05, 0.15)
KNOWN_POLL_S: Final = 0.02
KNOWN_S_MAX: Final = 10.0
READY_S_MAX: Final = 120.0
CHECKS: Final = 1_000
AT_ONCE_MAX: Final = 200


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


def short_limit(algorithm: str) -> Limit:
    """Return the limit of the partitions, by one algorithm."""
    return Limit(SHORT_LIMIT, per=SHORT_PER_S, algorithm=algorithm)  # type: ignore[arg-type]  # known


def document() -> dict[str, Any]:
    """Return the rules: of a minute for each mode, and short exact ones for each algorithm."""

    def rule(name: str, limit: Limit, across: str) -> dict[str, Any]:
        written = {"limit": limit.limit, "per": f"{limit.per:g}s", "algorithm": limit.algorithm}
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

    rules = [rule(across, MINUTE, across) for across in ("exact", "eventual", "region")]
    rules += [rule(f"short-{each}", short_limit(each), "exact") for each in ALGORITHM_NAMES]
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

    async def until_synced(self) -> None:
        """Wait until all regions exchange totals."""
        ends_s = time.monotonic() + READY_S_MAX
        for region in NAMES:
            while True:
                note = json.loads((await self.counts(region).notes()).get("status", "{}"))
                states = {each["state"] for each in note.get("links", [{"state": "down"}])}
                if states == {"up"}:
                    break
                assert time.monotonic() < ends_s, f"{region} does not work: {note}"
                await asyncio.sleep(0.1)

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
) -> Iterator[Planned]:
    """Return the requests of a subject: at random times, each in the region of the moment."""
    chance = random.Random(f"{SEED} {user}")
    at_s = chance.expovariate(per_s)
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


async def measure_exact(world: World, seconds: float) -> dict[str, Any]:
    """Return the figures of exact limits while all links work."""
    plan = [
        *steady("exact", "one region", 0.9 * RATE, seconds, lambda *_: SA),
        *steady("exact", "all regions", 0.9 * RATE, seconds, anywhere),
        *steady("exact", "mostly one", 0.9 * RATE, seconds, mostly_eu),
        *steady("exact", "moves below", 0.9 * RATE, seconds, moving),
        *steady("exact", "moves above", 2.0 * RATE, seconds, moving),
        # It is at its limit from the first move on.
        *steady("exact", "moves above", MINUTE.limit / MOVES_S, MOVES_S, anywhere),
    ]
    found = await world.send(plan)
    below = ["one region", "all regions", "mostly one", "moves below"]
    return {
        "over": max(over_of(MINUTE, of(found, user)) for user in {each.user for each in plan}),
        "fewer": {user: fewer_of(MINUTE, of(found, user)) for user in below},
        "sent": {user: len(of(found, user)) for user in below},
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
            rates.append(admitted / (ends_s - since_s) / RATE)
    return min(rates, default=1.0)


async def measure_bursts(world: World) -> dict[str, int]:
    """Send more than the share at once, and again when the first denial says so."""
    plan = [
        Planned(0.0, region, f"short-{algorithm}", f"burst-{region}")
        for algorithm in ALGORITHM_NAMES
        for region in NAMES
        for _ in range(SHORT_LIMIT // len(NAMES) + 5)
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


# ── Partitions ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Partition:
    """Which links are cut, and how long."""

    name: str
    cuts: tuple[tuple[str, str], ...]
    seconds: float = PARTITION_S


def _between(some: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in permutations(NAMES, 2) if (pair[0] in some) != (pair[1] in some))


PARTITIONS: Final = (
    Partition("two and three", _between((EU, US))),
    Partition("one alone", _between((AP,))),
    Partition("one way", ((EU, US), (EU, AP), (SA, AF))),
    Partition("all alone", tuple(permutations(NAMES, 2)), LONG_PARTITION_S),
)


async def measure_partition(world: World, partition: Partition) -> dict[str, Any]:
    """Return the figures of one partition."""
    seconds = SETTLED_S + partition.seconds + SETTLED_S
    per_s = 3 * SHORT_LIMIT / SHORT_PER_S
    plan = [
        each
        for algorithm in ALGORITHM_NAMES
        for each in steady(
            f"short-{algorithm}", f"{partition.name} {algorithm}", per_s, seconds, anywhere
        )
    ]

    async def cut() -> None:
        await asyncio.sleep(SETTLED_S)
        for pair in partition.cuts:
            world.servers.cut(*pair)
        await asyncio.sleep(partition.seconds)
        world.servers.heal()

    found, _ = await asyncio.gather(world.send(plan), cut())
    users = {algorithm: of(found, f"{partition.name} {algorithm}") for algorithm in ALGORITHM_NAMES}
    return {
        "failed": sum(each.sent.failed for each in found),
        "over": {each: over_of(short_limit(each), got) for each, got in users.items()},
        "admitted": {each: sum(one.sent.allowed for one in got) for each, got in users.items()},
        "of_share": {
            each: shares_delivered(users[each], partition.seconds)
            for each in ("token_bucket", "leaky_bucket")
        },
    }


def shares_delivered(found: Sequence[Got], seconds: float) -> float:
    """Return the least that a region has admitted in a partition, as a part of its share."""
    since_s, ends_s = 2 * SETTLED_S, SETTLED_S + seconds
    share = SHORT_LIMIT / SHORT_PER_S / len(NAMES)
    rates = []
    for region in NAMES:
        admitted = sum(
            each.sent.allowed
            for each in found
            if each.planned.region == region and since_s <= each.planned.at_s < ends_s
        )
        rates.append(admitted / (ends_s - since_s) / share)
    return min(rates)


# ── Eventual ──────────────────────────────────────────────────────────────────────────────────────


async def measure_eventual(world: World, seconds: float) -> dict[str, Any]:
    """Return the figures of eventual limits at several times the limit."""
    found = {}
    for times in (0.9, 2, 10):
        user = f"{times} times"
        got = await world.send(steady("eventual", user, times * RATE, seconds, anywhere))
        found[user] = {
            "sent": len(got),
            "admitted": sum(each.sent.allowed for each in got),
            "failed": sum(each.sent.failed for each in got),
            "over": over_of(MINUTE, got),
            "fewer": fewer_of(MINUTE, got),
        }
    return found


async def measure_known(world: World) -> dict[str, float]:
    """Return how long it takes until the other regions know of a unit, less the link's delay."""
    gates = {
        region: world.counts(region).global_async_gate((MINUTE,), "eventual", "eventual")
        for region in NAMES
    }
    chance = random.Random(SEED)

    async def sample(region: str, subject: str) -> list[float]:
        began_ns = time.time_ns()
        await gates[region].check(subject, 1)
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


# ── Costs ─────────────────────────────────────────────────────────────────────────────────────────


def measure_p99(world: World) -> dict[str, dict[str, float]]:
    """Return the time of a check by a regional and by global rules, on the same Redis."""
    gates = {"region": world.stores[EU].gate((MINUTE,), "region")}
    modes: tuple[AcrossRegions, ...] = ("exact", "eventual")
    for mode in modes:
        gates[mode] = world.counts(EU).global_gate((MINUTE,), mode, mode)
    took: dict[str, list[float]] = {name: [] for name in gates}
    for number in range(CHECKS):
        for name, gate in gates.items():
            began_s = time.perf_counter()
            gate.check(f"cost-{number % 500}", 1)
            took[name].append(time.perf_counter() - began_s)
    found = {}
    for name, times in took.items():
        times.sort()
        found[name] = {
            "p50_us": 1e6 * times[len(times) // 2],
            "p99_us": 1e6 * times[int(0.99 * len(times))],
        }
    return found


async def measure_bytes(world: World, subjects: int) -> dict[str, float]:
    """Return the bytes between all regions, with subjects that send a request a minute."""
    gates = [
        world.counts(region).global_async_gate((MINUTE,), "bytes", "eventual") for region in NAMES
    ]
    chance = random.Random(SEED)
    per_s = subjects / 60
    before = world.servers.sent_bytes()
    began_s = time.monotonic()
    sent = 0
    while (spent_s := time.monotonic() - began_s) < BYTES_S:
        due = min(int(spent_s * per_s) - sent, AT_ONCE_MAX)
        sent += due
        numbers = [chance.randrange(subjects) for _ in range(due)]
        await asyncio.gather(
            *(chance.choice(gates).check(f"user-{number:06}", 1) for number in numbers)
        )
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    bytes_per_s = (world.servers.sent_bytes() - before) / (time.monotonic() - began_s)
    return {"checks_per_s": sent / BYTES_S, "bytes_per_s": bytes_per_s}


async def measure_part(part: str, world: World, seconds: float) -> dict[Any, Any]:
    """Return the figures of one part."""
    if part == "exact":
        return await measure_exact(world, seconds)
    if part == "eventual":
        return await measure_eventual(world, seconds)
    if part == "known":
        return await measure_known(world)
    if part == "p99":
        return measure_p99(world)
    if part == "bytes":
        return {count: await measure_bytes(world, count) for count in (0, *SUBJECTS)}
    found = {}
    for each in PARTITIONS:
        progress(f"measuring the partition {each.name} …")
        found[each.name] = await measure_partition(world, each)
        await world.until_synced()
    return found


async def measure_all(seconds: float, only: Sequence[str]) -> dict[str, Any]:
    """Start everything, print the figures of each part and return all."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        progress("starting five regions …")
        world = World(stack)
        for part in only:
            await world.until_synced()
            progress(f"measuring {part} …")
            found[part] = await measure_part(part, world, seconds)
            progress("")
            print(report(part, found[part]), flush=True)
        for client in world.clients.values():
            client.close()
    return found


def report(part: str, figures: dict[Any, Any]) -> str:
    """Return the figures of one part as lines."""
    return "\n".join([f"\n{part}", *(f"  {line}" for line in _LINES[part](figures))])


def _exact_lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"over in any interval               {figures['over']}"
    yield f"failed                             {figures['failed']}"
    for user, fewer in figures["fewer"].items():
        yield f"fewer, {user + ', 0.9 times':<27} {fewer} of {figures['sent'][user]:,}"
    yield f"2 s after a move, of the rate      {figures['moved']:.2f}"
    burst = figures["burst"]
    yield f"retry_after of a cold burst true   {burst['true']} of {burst['denied']}"


def _partition_lines(figures: dict[str, Any]) -> Iterator[str]:
    for name, each in figures.items():
        over, least = each["over"].values(), min(each["of_share"].values())
        admitted = ", ".join(f"{count}" for count in each["admitted"].values())
        yield (
            f"{name:<14} over {max(over)}, admitted {admitted}, failed {each['failed']}; "
            f"{least:.2f} of the share"
        )


def _eventual_lines(figures: dict[str, Any]) -> Iterator[str]:
    for user, each in figures.items():
        over = each["over"] / MINUTE.limit
        yield (
            f"{user:<10} over {each['over']} ({over:.1%}), fewer {each['fewer']}, "
            f"failed {each['failed']}, admitted {each['admitted']:,} of {each['sent']:,}"
        )


def _known_lines(figures: dict[str, float]) -> Iterator[str]:
    took = ", ".join(f"{name} {figures[f'{name}_ms']:.0f}" for name in ("p50", "p90", "p99", "max"))
    yield f"beyond the link's delay: {took} ms, of {figures['samples']:,.0f}"


def _p99_lines(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    base = figures["region"]
    for name, each in figures.items():
        yield (
            f"{name:<9} p50 {each['p50_us']:.0f} us ({each['p50_us'] / base['p50_us']:.2f}), "
            f"p99 {each['p99_us']:.0f} us ({each['p99_us'] / base['p99_us']:.2f})"
        )


def _bytes_lines(figures: dict[int, dict[str, float]]) -> Iterator[str]:
    idle = figures[0]["bytes_per_s"]
    for count, each in figures.items():
        more = each["bytes_per_s"] - idle
        yield (
            f"{count:>7,} subjects  {each['checks_per_s']:>6,.0f} checks/s  "
            f"{each['bytes_per_s'] / 1e3:>8,.0f} kB/s  "
            f"{more / max(each['checks_per_s'], 1):>6,.0f} bytes for a check"
        )


_LINES: Final[dict[str, Callable[[Any], Iterator[str]]]] = {
    "exact": _exact_lines,
    "partitions": _partition_lines,
    "eventual": _eventual_lines,
    "known": _known_lines,
    "p99": _p99_lines,
    "bytes": _bytes_lines,
}


def main() -> None:
    """Measure five regions and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.regions", description=__doc__)
    parser.add_argument("--seconds", type=float, default=70.0, help="of the load, for each mode")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there too")
    options = parser.parse_args()
    found = asyncio.run(measure_all(options.seconds, options.only))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
