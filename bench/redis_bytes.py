"""The memory of a state in Redis: `used_memory` of a fresh server before and after it is filled.

`used_memory` is the memory that the allocator gave the server. It includes keys, expiries and the
hash tables of both. The resident set is reported, too.

A state is one limit's count of one subject. Subjects start at `user:1000000`, so their names are as
long as those of ten million users. Each subject has spent between 1 and 10,000 units. The numbers
are drawn on a logarithmic scale: as many subjects spent 1 to 10 as 1,000 to 10,000. Limits are
10,000 units in windows from an hour to 30 days; a single limit has a window of 30 days. A count
above 4,294 units takes 9 bytes instead of 5, so both extremes are measured as well.

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
from collections.abc import Callable, Iterator, Sequence
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
    OURS,
    THROTTLED,
    AsyncSession,
    Rates,
    RedisEngine,
    our_rule,
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

Cost = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Filling:
    """The content of a server: the engines that check every subject, with their limits."""

    work: str
    engine: str
    parts: Sequence[tuple[RedisEngine, Rates]]
    subjects: int
    cost: Cost

    @property
    def states(self) -> int:
        """Return the number of all states."""
        return self.subjects * sum(len(rates) for _, rates in self.parts)


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
    """Return all servers to measure. Peers get fewer subjects, because they are slower."""
    many, few = effort.subjects, effort.subjects // 10
    fewer = 3 * few
    rng = random.Random(SEED)

    def mixed() -> int:
        return int(SPENT_MAX ** rng.random())

    # With a hash for each subject, whose size does not depend on the number of subjects. For
    # packed states, see redis_packed.py.
    ten, one = (OURS, TEN_LIMITS), (OURS, ONE_LIMIT)
    orders = (our_rule("orders"), TEN_LIMITS)
    rules = [(our_rule(f"rule{number}"), (each,)) for number, each in enumerate(TEN_LIMITS)]
    yield Filling("ten limits in one", OURS.name, [ten], fewer, mixed)
    yield Filling("ten limits in one", OURS.name, [ten], many, mixed)
    yield Filling("  a rule's: orders", OURS.name, [orders], fewer, mixed)
    yield Filling("  each spent 1", OURS.name, [ten], few, lambda: 1)
    yield Filling("  each spent 10,000", OURS.name, [ten], few, lambda: SPENT_MAX)
    yield Filling("ten rules of one", OURS.name, rules, few, mixed)
    for peer in (LIMITS_FIXED, THROTTLED):
        yield Filling("ten limits", peer.name, [(peer, TEN_LIMITS)], few, mixed)
    yield Filling("one limit", OURS.name, [one], many, mixed)
    for peer in (LIMITS_FIXED, THROTTLED):
        yield Filling("one limit", peer.name, [(peer, ONE_LIMIT)], fewer, mixed)


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
        filling.engine,
        filling.subjects,
        filling.states,
        keys,
        grown=after[0] - before[0],
        resident=after[1] - before[1],
    )


async def _fill(uri: str, filling: Filling, subjects: int) -> None:
    own = f"{uri}?layout=subject"
    sessions = [
        engine.open_async(own if engine.ours else uri, rates) for engine, rates in filling.parts
    ]
    work = iter(range(_FIRST_USER, _FIRST_USER + subjects))
    await asyncio.gather(*(_spend(sessions, work, filling.cost) for _ in range(CONNECTIONS_MAX)))
    for session in sessions:
        await session.close()


async def _spend(sessions: Sequence[AsyncSession], work: Iterator[int], cost: Cost) -> None:
    for number in work:
        units = cost()
        for session in sessions:
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
