"""The method of the Redis benchmarks: closed loops of callers; engines take turns.

In a run, each of several callers checks its own key again as soon as the previous check returns,
for a fraction of a second on an empty database. The result is the checks per second, and p50 and
p99 of all calls, which are timed one by one. In every round each engine has one run, in an order
that rotates. The printed numbers are medians over the rounds; a ratio is the median of the ratios
of the rounds. The garbage collector is off during every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter_ns, process_time_ns
from typing import Final, Protocol

from bench.engines import Session
from bench.measure import collector_off
from bench.redis_engines import AsyncSession, Rates, RedisEngine

# redis-benchmark expands `user:__rand_int__` in this way, so it uses the same keys.
_KEY: Final = "user:{:012}"


@dataclass(frozen=True, slots=True)
class RedisEffort:
    """The number of rounds, and the size of each."""

    rounds: int
    run_seconds: float
    tool_requests: int
    """Requests of redis-benchmark in a run."""
    subjects: int
    """The subjects that are loaded to measure the memory of peers."""
    packed_states: int
    """The largest number of subjects that are loaded to measure our memory."""
    packed_rounds: int


FULL: Final = RedisEffort(
    rounds=5,
    run_seconds=0.25,
    tool_requests=50_000,
    subjects=5_000,
    packed_states=400_000,
    packed_rounds=60,
)
QUICK: Final = RedisEffort(
    rounds=3,
    run_seconds=0.1,
    tool_requests=20_000,
    subjects=2_000,
    packed_states=50_000,
    packed_rounds=20,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one run."""

    checks_per_second: float
    p50_us: float
    p99_us: float
    processor_us: float = 0.0
    """The processor time of this process for a check."""


@dataclass(slots=True)
class RedisRow:
    """One engine in one benchmark, with a sample per round."""

    name: str
    ours: bool = False
    connections: int = 0
    samples: list[Sample] = field(default_factory=list)

    @property
    def checks_per_second(self) -> float:
        return median(each.checks_per_second for each in self.samples)

    @property
    def p50_us(self) -> float:
        return median(each.p50_us for each in self.samples)

    @property
    def p99_us(self) -> float:
        return median(each.p99_us for each in self.samples)

    def behind(self, first: RedisRow) -> float:
        """Return the checks per second of the first row, divided by those of this row."""
        pairs = zip(self.samples, first.samples, strict=True)
        return median(theirs.checks_per_second / mine.checks_per_second for mine, theirs in pairs)

    def costlier(self, first: RedisRow) -> float:
        """Return the processor time of a check, divided by that of the first row."""
        pairs = zip(self.samples, first.samples, strict=True)
        return median(mine.processor_us / theirs.processor_us for mine, theirs in pairs)

    def slower(self, first: RedisRow) -> float:
        """Return the p50 of this row, divided by that of the first row."""
        pairs = zip(self.samples, first.samples, strict=True)
        return median(mine.p50_us / theirs.p50_us for mine, theirs in pairs)


class Servers(Protocol):
    """One server or a cluster."""

    @property
    def uri(self) -> str:
        """Return the URI of the store."""

    def flush(self) -> None:
        """Remove every key."""


class Outside(Protocol):
    """Another program that takes turns with the engines: redis-benchmark."""

    name: str
    connections: int

    async def run(self) -> Sample:
        """Run it once."""


async def measure_async(
    servers: Servers,
    engines: Sequence[RedisEngine],
    rates: Rates,
    tasks: int,
    effort: RedisEffort,
    outside: Sequence[Outside] = (),
) -> list[RedisRow]:
    """Measure the engines in turns, each with this number of tasks."""
    keys = _keys(tasks)
    sessions = [engine.open_async(servers.uri, rates) for engine in engines]
    turns: list[tuple[RedisRow, Callable[[], Awaitable[Sample]]]] = []
    for engine, session in zip(engines, sessions, strict=True):
        before = _clients(servers)
        servers.flush()  # the strategies of `limits` use the same keys
        await _warm_up(session, keys)
        row = RedisRow(engine.name, engine.ours, _clients(servers) - before)
        turns.append((row, _runner(engine, session, keys, effort.run_seconds)))
    turns += [(RedisRow(each.name, connections=each.connections), each.run) for each in outside]
    for number in range(effort.rounds):
        first = number % len(turns)
        for row, run in turns[first:] + turns[:first]:
            servers.flush()
            row.samples.append(await run())
    for session in sessions:
        await session.close()
    return [row for row, _ in turns]


def _keys(callers: int) -> list[str]:
    return [_KEY.format(number) for number in range(callers)]


def _clients(servers: Servers) -> int:
    """Return the number of connections of a server; 0 for a cluster."""
    admin = getattr(servers, "admin", None)
    return int(admin.info("clients")["connected_clients"]) if admin else 0


async def _warm_up(session: AsyncSession, keys: Sequence[str]) -> None:
    """Load the scripts, open the connections and create the keys."""
    await session.check(keys[0])
    for _ in range(2):
        await asyncio.gather(*(session.check(key) for key in keys))


def _runner(
    engine: RedisEngine, session: AsyncSession, keys: Sequence[str], seconds: float
) -> Callable[[], Awaitable[Sample]]:
    async def run() -> Sample:
        await _warm_up(session, keys)
        with collector_off():
            sample = await _run_async(session.check, keys, seconds)
        _expect(session.allowed(await session.check(keys[0])), engine)
        return sample

    return run


async def _run_async(
    check: Callable[[str], Awaitable[object]], keys: Sequence[str], seconds: float
) -> Sample:
    taken_ns: list[int] = []
    start_ns = perf_counter_ns()
    processor_ns = process_time_ns()
    stop_ns = start_ns + int(seconds * 1e9)

    async def caller(key: str) -> None:
        begin_ns = perf_counter_ns()
        while begin_ns < stop_ns:
            await check(key)
            end_ns = perf_counter_ns()
            taken_ns.append(end_ns - begin_ns)
            begin_ns = end_ns

    await asyncio.gather(*map(caller, keys))
    elapsed_ns, processor_ns = perf_counter_ns() - start_ns, process_time_ns() - processor_ns
    return replace(_sample(taken_ns, elapsed_ns), processor_us=processor_ns / len(taken_ns) / 1e3)


def measure_sync(
    servers: Servers, engines: Sequence[RedisEngine], rates: Rates, effort: RedisEffort
) -> list[RedisRow]:
    """Measure the engines in turns, each with one caller that waits for every result."""
    (key,) = _keys(1)
    rows = [RedisRow(engine.name, engine.ours, connections=1) for engine in engines]
    sessions = [engine.open(servers.uri, rates) for engine in engines]
    turns = list(zip(engines, rows, sessions, strict=True))
    for number in range(effort.rounds):
        first = number % len(turns)
        for engine, row, session in turns[first:] + turns[:first]:
            servers.flush()
            row.samples.append(_run_sync(session, key, effort.run_seconds))
            _expect(session.allowed(session.check(key)), engine)
    for session in sessions:
        session.close()
    return rows


def _run_sync(session: Session, key: str, seconds: float) -> Sample:
    check = session.check
    for _ in range(10):
        check(key)
    taken_ns: list[int] = []
    with collector_off():
        start_ns = begin_ns = perf_counter_ns()
        stop_ns = start_ns + int(seconds * 1e9)
        while begin_ns < stop_ns:
            check(key)
            end_ns = perf_counter_ns()
            taken_ns.append(end_ns - begin_ns)
            begin_ns = end_ns
    return _sample(taken_ns, begin_ns - start_ns)


def _sample(taken_ns: list[int], elapsed_ns: int) -> Sample:
    taken_ns.sort()
    return Sample(
        checks_per_second=len(taken_ns) * 1e9 / elapsed_ns,
        p50_us=taken_ns[len(taken_ns) // 2] / 1e3,
        p99_us=taken_ns[len(taken_ns) * 99 // 100] / 1e3,
    )


def _expect(allowed: bool, engine: RedisEngine) -> None:
    if not allowed:
        raise RuntimeError(f"{engine.name} denied a check far below its limits")
