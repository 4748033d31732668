"""Memory and server time of states in buckets.

A bucket holds the states of many subjects, so the memory of a state depends on the number of
subjects: with few of them, most buckets hold one state. The rows show the sizes from a thousand
subjects to 40 million. A row loads at most `RedisEffort.packed_states` subjects, in as many buckets
as have the number of states that each would have with all subjects: 400,000 subjects in 10,486
buckets are as dense as ten million in 262,144. `--subjects 10000000` loads all of them.

The memory is the growth of `used_memory`. The server time is that of `INFO commandstats`: the mean
time of EVALSHA in the fastest run of 500 calls, which other processes have disturbed least. For new
subjects, it is the fastest of the last quarter of the runs, when the buckets are nearly full.
Subjects have spent 1 to 5,000 units on a logarithmic scale; calls spend one more.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import hiredis
from tests.redis_servers import Single

from bench.measure import SEED
from bench.redis_bytes import ONE_LIMIT, SPENT_MAX, TEN_LIMITS
from bench.redis_engines import Rates, our_limits
from bench.redis_measure import RedisEffort
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.stores.redis.codec import BUCKETS, bucket_name
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import COUNTS, RuleScripts, pack

SUBJECTS: Final = (1_000, 100_000, 1_000_000, 10_000_000, 40_000_000)
_CALLS: Final = 500
_REPLY_BYTES: Final = 1 << 16
_FIRST_USER: Final = 1_000_000
# The columns of the table, and their widths.
_COLUMNS: Final = {
    "work": 12,
    "subjects": 10,
    "loaded": 10,
    "bytes": 8,
    "µs new": 8,
    "µs check": 8,
}


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The sizes and times with one number of subjects."""

    work: str
    subjects: int
    loaded: int
    bytes_per_state: float
    new_us: float
    """Server time of a call that creates a subject's states."""
    check_us: float
    """Server time of a call that finds them."""


@dataclass(slots=True)
class _Loaded:
    """A server, and a connection that sends checks to it."""

    server: Single
    scripts: RuleScripts
    buckets: int
    connection: socket.socket
    reader: Any = field(default_factory=hiredis.Reader)

    def payload(self, number: int, cost: int) -> bytes:
        key = b"rk:{%%%b}" % bucket_name(number % self.buckets)
        gate = self.scripts.place(f"user:{number}")[1]
        return pack("EVALSHA", COUNTS.sha, 1, key, gate, cost)

    def run(self, numbers: Sequence[int], cost: Callable[[], int]) -> float:
        """Send these checks at once, and return the server's microseconds per call."""
        payloads = [self.payload(number, cost()) for number in numbers]
        self.server.admin.config_resetstat()
        self.connection.sendall(b"".join(payloads))
        missing = len(payloads)
        while missing:
            self.reader.feed(self.connection.recv(_REPLY_BYTES))
            while (reply := self.reader.gets()) is not False:
                if type(reply) is not list or reply[0] < 0:
                    raise RuntimeError(f"a check was not allowed: {reply!r}")
                missing -= 1
        found: dict[str, Any] = self.server.admin.info("commandstats")
        return float(found["cmdstat_evalsha"]["usec_per_call"])

    def used_memory(self) -> int:
        return int(self.server.admin.info("memory")["used_memory"])


def measure_packed(effort: RedisEffort) -> Iterator[PackedRow]:
    """Measure one limit with each number of subjects, and ten limits with one of them."""
    for subjects in SUBJECTS:
        yield _row("one limit", ONE_LIMIT, subjects, effort)
    yield _row("ten limits", TEN_LIMITS, SUBJECTS[2], effort)


def _row(work: str, rates: Rates, subjects: int, effort: RedisEffort) -> PackedRow:
    loaded = min(subjects, effort.packed_states) // _CALLS * _CALLS
    buckets = max(BUCKETS * loaded // subjects, 1)
    rng = random.Random(SEED)
    with Single() as server, socket.create_connection(server.address) as connection:
        server.admin.script_load(COUNTS.text)
        scripts = RuleScripts(our_limits(rates), "", parse(server.uri), SystemClock())
        one = _Loaded(server, scripts, buckets, connection)
        one.run(range(_CALLS), lambda: 1)  # allocates the buffers
        server.flush()
        before = one.used_memory()
        new_us = _load(one, loaded, rng)
        per_state = (one.used_memory() - before) / loaded / len(rates)
        check_us = min(
            one.run([_FIRST_USER + rng.randrange(loaded) for _ in range(_CALLS)], lambda: 1)
            for _ in range(effort.packed_rounds)
        )
    return PackedRow(work, subjects, loaded, per_state, new_us, check_us)


def _load(one: _Loaded, subjects: int, rng: random.Random) -> float:
    """Create the states of the subjects; return the server time of a call."""

    def mixed() -> int:
        return int((SPENT_MAX // 2) ** rng.random())

    starts = range(_FIRST_USER, _FIRST_USER + subjects, _CALLS)
    times = [one.run(range(start, start + _CALLS), mixed) for start in starts]
    return min(times[-len(times) // 4 :])


def packed_heading() -> str:
    """Return the lines above the rows."""
    return (
        "\nredis, bytes per state of ratekeeper: used_memory; and the server time of a call that "
        "creates a subject's states (new)\nor finds them (check); units spent: 1 to 5,000\n"
        f"{_line(_COLUMNS)}\n{_line('-' * width for width in _COLUMNS.values())}"
    )


def packed_line(row: PackedRow) -> str:
    """Return the line of one row."""
    measured = (row.bytes_per_state, row.new_us, row.check_us)
    numbers = f"{row.subjects:,}", f"{row.loaded:,}", *(f"{each:.2f}" for each in measured)
    return _line((row.work, *numbers))


def _line(cells: Iterable[str]) -> str:
    aligned = [
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, _COLUMNS.values(), strict=True))
    ]
    return "  ".join(aligned)
