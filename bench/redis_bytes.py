"""The memory of a state of peers: `used_memory` of a fresh server before and after it is filled.

The states of ratekeeper share keys. redis_packed.py measures their memory.

`used_memory` is the memory that the allocator gave the server. It includes keys, expiries and the
hash tables of both. The resident set is reported, too.

A state is one limit's count of one subject. Subjects start at `user:1000000`, so their names are as
long as those of ten million users. Each subject has spent between 1 and 10,000 units. The numbers
are drawn on a logarithmic scale: as many subjects spent 1 to 10 as 1,000 to 10,000. Limits are
10,000 units in windows from an hour to 30 days; a single limit has a window of 30 days.

The size for 10 million states is computed. The memory of a key does not depend on the number of
keys, except for two hash tables: all keys, and all keys that expire. Each has 8 bytes per slot and
a power of two as the number of slots. So the memory of the tables is subtracted, and that of the
tables for the other number of keys is added. To verify this, a larger measured size is also
computed from a smaller one, and both are printed. One thing is not included: while a table doubles,
which takes minutes at most, the old one exists as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Final

from tests.redis_servers import Single, until

from bench.measure import SEED
from bench.redis_engines import (
    CONNECTIONS_MAX,
    DAY,
    HOUR,
    LIMITS_FIXED,
    THROTTLED,
    AsyncSession,
    Rates,
    RedisEngine,
)
from bench.redis_measure import RedisEffort

MANY: Final = 10_000_000
SPENT_MAX: Final = 10_000
_WINDOWS: Final = (
    *(HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR),
    *(DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY),
)
# No limit is larger than the most that is spent, because a full bucket is removed. At 10,000 units
# per 30 days, one unit is refilled in four minutes; at a million units, it would be three seconds.
TEN_LIMITS: Final = tuple((SPENT_MAX, seconds) for seconds in _WINDOWS)
ONE_LIMIT: Final = TEN_LIMITS[-1:]
_FIRST_USER: Final = 1_000_000
_SLOT_BYTES: Final = 8
# One table of all keys, and one of those that expire. With every engine, every key expires.
_TABLES: Final = 2
# Memory that has not changed for so long is steady. No measured size is just above a power of two,
# so no table is still being resized then.
_STEADY_SECONDS: Final = 0.5
_STEADY_SECONDS_MAX: Final = 10.0


@dataclass(frozen=True, slots=True)
class Filling:
    """The content of a server: the engine that checks every subject, and the limits."""

    work: str
    engine: RedisEngine
    rates: Rates
    subjects: int

    @property
    def states(self) -> int:
        """Return the number of all states."""
        return self.subjects * len(self.rates)


@dataclass(frozen=True, slots=True)
class Bytes:
    """The measured sizes of one server."""

    work: str
    engine: str
    subjects: int
    states: int
    keys: int
    grown: int
    resident: int

    @property
    def per_state(self) -> float:
        """Return the bytes per state, by `used_memory`."""
        return self.grown / self.states

    @property
    def resident_per_state(self) -> float:
        """Return the bytes that a state adds to the resident set of the server."""
        return self.resident / self.states

    def per_state_with(self, keys: int) -> float:
        """Return the computed bytes per state if the server had so many keys."""
        of_keys = (self.grown - _tables_bytes(self.keys)) / self.keys
        return (of_keys + _tables_bytes(keys) / keys) * self.keys / self.states

    @property
    def per_state_of_many(self) -> float:
        """Return the bytes per state with ten million states in the server."""
        return self.per_state_with(MANY * self.keys // self.states)

    @property
    def per_state_of_many_keys(self) -> float:
        """Return the bytes per state with ten million keys in the server."""
        return self.per_state_with(MANY)


def _tables_bytes(keys: int) -> int:
    slots = 1 << (keys - 1).bit_length()
    return _TABLES * _SLOT_BYTES * slots


def fillings(effort: RedisEffort) -> Iterator[Filling]:
    """Return all servers to measure."""
    for peer in (LIMITS_FIXED, THROTTLED):
        yield Filling("ten limits", peer, TEN_LIMITS, effort.subjects)
        yield Filling("one limit", peer, ONE_LIMIT, effort.subjects)
        yield Filling("one limit", peer, ONE_LIMIT, 3 * effort.subjects)


def measure_bytes(filling: Filling) -> Bytes:
    """Start a server, fill it, and return its sizes."""
    with Single() as server:
        # First load the scripts and allocate the buffers. FLUSHALL frees the tables.
        asyncio.run(_fill(server.uri, filling, subjects=CONNECTIONS_MAX))
        server.flush()
        before = _settled(server)
        asyncio.run(_fill(server.uri, filling, filling.subjects))
        after = _settled(server)
        keys = int(server.admin.dbsize())
        if keys % filling.subjects:
            raise RuntimeError(f"{keys} keys of {filling.subjects} subjects: some have expired")
    return Bytes(
        filling.work,
        filling.engine.name,
        filling.subjects,
        filling.states,
        keys,
        grown=after[0] - before[0],
        resident=after[1] - before[1],
    )


async def _fill(uri: str, filling: Filling, subjects: int) -> None:
    rng = random.Random(SEED)

    def cost() -> int:
        return int(SPENT_MAX ** rng.random())

    session = filling.engine.open_async(uri, filling.rates)
    work = iter(range(_FIRST_USER, _FIRST_USER + subjects))
    await asyncio.gather(*(_spend(session, work, cost) for _ in range(CONNECTIONS_MAX)))
    await session.close()


async def _spend(session: AsyncSession, work: Iterator[int], cost: Callable[[], int]) -> None:
    for number in work:
        units = cost()
        if not session.allowed(await session.check(f"user:{number}", units)):
            raise RuntimeError(f"user:{number} was denied {units} units, far below its limits")


def _settled(server: Single) -> tuple[int, int]:
    """Return `used_memory` and the resident set after connections are closed and it is steady."""
    seen, since = (0, 0), 0.0

    def settled() -> bool:
        nonlocal seen, since
        facts = server.admin.info()
        found = int(facts["used_memory"]), int(facts["used_memory_rss"])
        if found[0] != seen[0] or facts["connected_clients"] > 1:
            since = monotonic()
        seen = found
        return monotonic() - since >= _STEADY_SECONDS

    until(settled, "the server's memory is steady", _STEADY_SECONDS_MAX)
    return seen
