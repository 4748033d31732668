"""Redis agrees with the reference, field by field, on long random traces.

Each trace has its own seed. A failure prints it, and `trace(seed)` replays it alone. The tests set
the time; `test_redis_server_clock.py` tests the clock of the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ratekeeper import Limiter
from ratekeeper.core.model import Limit
from ratekeeper.decide.store import LocalStore
from ratekeeper.decide.stores.redis.codec import is_log
from ratekeeper.testing import ManualClock
from tests.conformance.stores import CONNECTIONS, STORES
from tests.parity.in_microseconds import Moments, Pair
from tests.parity.traces import CHARGES, Step, changed, random_limits, steps
from tests.redis_servers import Single, running

pytestmark = pytest.mark.server

OPENERS = {factory.name: factory.open for factory in STORES + CONNECTIONS}
STEPS = 500
SHARDS = 10

# A rule name of up to 12 bytes is a field of the hash; from 13 bytes on, its digest is.
RULES = ("", "orders", "twelve bytes", "thirteen byte", "Zölle: 一二三", "a" * 128)
# Characters of hash tags, and the characters that escape them.
HEADS = ("", "{", "}", "%", "%}", "%%", "{}", "}{")

LOG_LIMITS = (1, 2, 3, 8, 9, 10, 30, 64, 200, 6_000)
# Costs that fill a part of a log, so that its ring turns, grows and shrinks.
COSTS = (2, 9, 64, 512)
TIME_BYTES = 7
HEAD_BYTES = 21 + 33  # also of units granted


def named(step: Step, seed: int) -> Step:
    """Return the same step for a subject that is difficult to use in a key."""
    number = int(step.subject.rpartition("-")[2]) + seed
    return replace(step, subject=f"{HEADS[number % len(HEADS)]}{number // len(HEADS)}")


def trace(
    seed: int, store: LocalStore, clock: ManualClock, count: int = STEPS, *, owes: bool = False
) -> int:
    """Run one trace on two rules that share their subjects; return the number of compared
    decisions."""
    random = Random(seed)
    limits = random_limits(random)
    pairs = [Pair(store, clock, limits, rule) for rule in random.sample(RULES, 2)]
    rewinds = random.random() < 0.5
    moments = Moments(random)
    compared = 0
    subjects = set()
    for number, drawn in enumerate(steps(random, limits, count, rewinds=rewinds, owes=owes)):
        step = moments.timed(named(drawn, seed))
        pair = random.choices(pairs, weights=(9, 1))[0]
        if step.verb == "change":
            pair.change(changed(random, limits))
        got, wanted = pair.apply(step)
        assert got == wanted, f"seed {seed}, step {number}: {step} on {pair.limits}"
        moments.note(step, got)
        compared += got is not None
        subjects.add(step.subject)
    for pair in pairs:
        pair.forget(subjects)
    return compared


def log_steps(random: Random, limit: Limit, count: int) -> Iterator[Step]:
    """A trace on the log of one subject, with costs and refunds of one unit, some and many."""
    window_ns = limit.window_ns
    now_ns = 1_700_000_000 * 10**9
    verbs = ("check", "refund", "peek", "grant", "reset", "change")
    for _ in range(count):
        verb = random.choices(verbs, weights=(60, 25, 5, 3, 1, 6))[0]
        several = random.choice(COSTS)
        units = random.choice((0, 1, 1, several, several + 1, random.randint(1, limit.limit)))
        ttl_ns = random.choice((None, window_ns // 3))
        yield Step(verb, "k", units, now_ns, ttl_ns, random.choice(CHARGES))
        span_ns = random.choice((0, 0, window_ns // 100, window_ns // 3, 2 * window_ns))
        now_ns += random.randint(-span_ns // 20, span_ns)


def log_bytes(server: Single) -> int:
    """Return the bytes of all logs on the server."""
    keys = [key for key in server.admin.scan_iter() if is_log(key.encode())]
    return sum(server.admin.strlen(key) for key in keys)


def log_trace(seed: int, store: LocalStore, clock: ManualClock, server: Single, count: int) -> None:
    """Run one trace on logs of several lengths, and check their size on the server."""
    random = Random(seed)

    def logs() -> tuple[Limit, ...]:
        names = ("log", "log 2")[: random.choice((1, 1, 2))]
        return tuple(
            Limit(random.choice(LOG_LIMITS), 10, algorithm="sliding_window_log", name=name)
            for name in names
        )

    pair = Pair(store, clock, logs())
    longest = max(limit.limit for limit in pair.limits)
    moments = Moments(random)
    for number, drawn in enumerate(log_steps(random, pair.limits[0], count)):
        step = moments.timed(drawn)
        if step.verb == "change":
            pair.change(logs())
            longest = max(longest, *(limit.limit for limit in pair.limits))
        got, wanted = pair.apply(step)
        assert got == wanted, f"seed {seed}, step {number}: {step} on {pair.limits}"
        moments.note(step, got)
        if number % 50 == 0:
            assert log_bytes(server) <= 2 * (longest * TIME_BYTES + HEAD_BYTES)
    pair.forget(["k"])


@pytest.mark.parametrize("shard", range(SHARDS))
def test_thousands_of_steps_agree(shard: int, tmp_path: Path) -> None:
    """redis:// gives the decisions of the reference, and reset subjects leave nothing behind."""
    server = running("single")
    server.flush()
    compared = 0
    for seed in range(shard, 6 * SHARDS, SHARDS):
        clock = ManualClock()
        with OPENERS["redis"](clock, 0, tmp_path) as store:
            compared += trace(seed, store, clock)
            assert server.admin.keys() == []
    assert compared > 6 * STEPS * 4 // 5


@pytest.mark.parametrize("shard", range(SHARDS))
def test_debts_agree(shard: int, tmp_path: Path) -> None:
    """A limit that owes is decided, refunded, granted units and reset as by the reference."""
    server = running("single")
    server.flush()
    for seed in range(2_000 + shard, 2_000 + 6 * SHARDS, SHARDS):
        clock = ManualClock()
        with OPENERS["redis"](clock, 0, tmp_path) as store:
            trace(seed, store, clock, owes=True)
            assert server.admin.keys() == []


def test_the_debt_of_a_log_is_copied_in_blocks(tmp_path: Path) -> None:
    """Debt enters a log of 300 times. One by one, a million would take seconds of the server."""
    server = running("single")
    server.flush()
    limit, clock = Limit(1_000, per=60, algorithm="sliding_window_log"), ManualClock()
    with OPENERS["redis"](clock, 0, tmp_path) as store, Limiter(limit, clock=clock) as memory:
        redis = Limiter(limit, store=store, clock=clock)
        for _ in range(300):
            assert memory.check("k", 2) == redis.check("k", 2)
            clock.advance(0.1)
        for pause_s, units in ((0, 2_900), (50, 1), (45, 700), (61, 5), (130, 1)):
            clock.advance(pause_s)
            server.admin.config_resetstat()
            assert memory.settle("k", 0, units) == redis.settle("k", 0, units)
            assert server.admin.info("commandstats")["cmdstat_getrange"]["calls"] < 200
            for cost in (1, 400, 999):
                assert memory.peek("k", cost) == redis.peek("k", cost)


@pytest.mark.parametrize("name", ["redis-async", "cluster", "cluster-async"])
def test_thousands_of_steps_agree_on_other_connections(name: str, tmp_path: Path) -> None:
    """The verbs for asyncio and a cluster give the same decisions."""
    for seed in range(1_000, 1_005):
        clock = ManualClock()
        with OPENERS[name](clock, 0, tmp_path) as store:
            trace(seed, store, clock)
            assert store.stats().states == 0


def test_logs_agree_while_their_rings_turn_grow_and_shrink(tmp_path: Path) -> None:
    """Logs are spent and refunded across the ends of their rings. Their memory follows their live
    entries, and reset subjects leave nothing behind."""
    server = running("single")
    for seed in range(30):
        clock = ManualClock()
        with OPENERS["redis"](clock, 0, tmp_path) as store:
            log_trace(seed, store, clock, server, 400)
            assert server.admin.keys() == []
