"""The method of the benchmarks in memory.

Engines take turns: in every round each engine runs its batches, in an order that rotates. So a
machine that slows down affects all engines. A batch is a loop over prepared keys, timed as a whole;
p50 is the median of the batches. p99 is measured in a separate loop, in which each call is timed.
It includes the cost of reading the timer. Nothing is subtracted, and the garbage collector is off
during each measurement. The printed numbers are medians over the rounds. A ratio is the median of
the ratios of the rounds, so it compares numbers measured moments apart.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Final

from bench.engines import Engine, Rate, Session
from ratekeeper.core.model import AlgorithmName

SEED: Final = 20_240_229
DAY: Final = 86_400


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of rounds, batches and calls."""

    rounds: int
    batches: int
    batch_calls: int
    sampled_calls: int


FULL: Final = Effort(rounds=7, batches=5, batch_calls=1_000, sampled_calls=2_000)
QUICK: Final = Effort(rounds=3, batches=3, batch_calls=500, sampled_calls=500)


@dataclass(frozen=True, slots=True)
class Scene:
    """The keys of a benchmark. Limits are per day, so nothing refills or expires during it."""

    name: str
    keys: int
    limit: int
    allowed: bool


SCENES: Final = (
    Scene("one hot key", keys=1, limit=1_000_000, allowed=True),
    Scene("one key, denied", keys=1, limit=1, allowed=False),
    Scene("100,000 keys", keys=100_000, limit=1_000, allowed=True),
    Scene("1,000,000 keys", keys=1_000_000, limit=1_000, allowed=True),
)


@dataclass(slots=True)
class Row:
    """One engine in one benchmark. Each list has one number per round."""

    engine: Engine
    p50s: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    bytes_per_key: float | None = None

    @property
    def p50(self) -> float:
        return median(self.p50s)

    @property
    def p99(self) -> float:
        return median(self.p99s)

    def ratio_to(self, other: Row) -> float:
        """Return the time of this engine, divided by that of the other."""
        pairs = zip(self.p50s, other.p50s, strict=True)
        return median(mine / theirs for mine, theirs in pairs)


def keys_of(scene: Scene) -> list[str]:
    """Return all keys of a scene."""
    return [f"user:{number}" for number in range(scene.keys)]


def rate_of(scene: Scene, algorithm: AlgorithmName) -> Rate:
    """Return the limit and the capacity of a scene."""
    return Rate(algorithm, scene.limit, DAY, keys_max=scene.keys + 1_000)


def measure(
    scene: Scene, algorithm: AlgorithmName, engines: Sequence[Engine], effort: Effort
) -> list[Row]:
    """Measure the engines in turns."""
    rng = random.Random(SEED)
    keys = keys_of(scene)
    rows = [Row(engine) for engine in engines]
    sessions = [_filled(engine, rate_of(scene, algorithm), keys) for engine in engines]
    for number in range(effort.rounds):
        if number and scene.keys == 1:
            # A new session, so that logs have the same length in every round: up to 7,000 entries.
            _close(sessions)
            sessions = [_filled(engine, rate_of(scene, algorithm), keys) for engine in engines]
        batches = [rng.choices(keys, k=effort.batch_calls) for _ in range(effort.batches)]
        sampled = rng.choices(keys, k=effort.sampled_calls)
        turns = list(zip(rows, sessions, strict=True))
        first = number % len(turns)
        for row, session in turns[first:] + turns[:first]:
            _expect(session, batches[0][0], scene.allowed, row.engine)
            with collector_off():
                row.p50s.append(median(_batch_ns(session.check, batch) for batch in batches))
                row.p99s.append(_p99_ns(session.check, sampled))
            session.rest()
            _expect(session, batches[0][0], scene.allowed, row.engine)
            session.rest()
    _close(sessions)
    return rows


def _filled(engine: Engine, rate: Rate, keys: Sequence[str]) -> Session:
    session = engine.open(rate)
    fill(session, keys)
    return session


def fill(session: Session, keys: Sequence[str]) -> None:
    """Check every key twice, so that no batch includes the first check of a key.

    Twice, because a key may take more memory at the second sight than at the first: new pages
    in one call of a hundred are just what a p99 shows.
    """
    for _ in range(2):
        for key in keys:
            session.check(key)
    session.rest()


def _close(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.close()


def _expect(session: Session, key: str, allowed: bool, engine: Engine) -> None:
    if session.allowed(session.check(key)) is not allowed:
        raise RuntimeError(f"{engine.name} answered {not allowed} where {allowed} was expected")


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the garbage collector during the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _batch_ns(check: Callable[[str], object], keys: Sequence[str]) -> float:
    start_ns = perf_counter_ns()
    for key in keys:
        check(key)
    return (perf_counter_ns() - start_ns) / len(keys)


def _p99_ns(check: Callable[[str], object], keys: Sequence[str]) -> float:
    # Allocated before, so that storing the samples needs no new pages.
    taken_ns = array("q", bytes(8 * len(keys)))
    for number, key in enumerate(keys):
        start_ns = perf_counter_ns()
        check(key)
        taken_ns[number] = perf_counter_ns() - start_ns
    return sorted(taken_ns)[len(taken_ns) * 99 // 100]
