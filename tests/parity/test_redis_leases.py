"""Leases on Redis agree with the reference, field by field, on random traces of all verbs.

The traces are those of `tests/promises/leases.py`, with refunds, grants, resets and corrections.
The Python store is the reference. Its waits are in nanoseconds, those of Redis in microseconds.
"""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from ratekeeper import Decision, Limit
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName, decision_with
from ratekeeper.core.rates import scaled
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.memory import MemoryAuthority
from tests.answering import AnsweringStore
from tests.clocks import SteppedClock
from tests.conformance.stores import PATIENCE
from tests.promises.leases import CLOCK_STEPS, STEP_BYTES, LeasePlay
from tests.promises.strategies import clock_at, limit_of
from tests.redis_servers import running

pytestmark = pytest.mark.server

TRACES = 30
STARTS_NS = (1_000 * 10**9, 1_700_000_000 * 10**9)
WINDOWS_US = (300_000, 10**6, 10**7, 6 * 10**7, 3_600 * 10**6)


def random_limit(random: Random, algorithm: AlgorithmName, name: str) -> Limit:
    """Return a limit of few units whose leases last long enough to be given."""
    window_us, units = random.choice(WINDOWS_US), random.randint(1, 60)
    if algorithm == "sliding_window_log" and random.random() < 0.3:
        units = random.randint(60, 250)  # several chunks of times
    capacity = refill_us = 0
    if "bucket" in algorithm:
        capacity = random.choice((0, 0, random.randint(1, 60)))
    if algorithm == "token_bucket" and random.random() < 0.4:
        longest_us = min(window_us, (capacity or units) * window_us // units)
        refill_us = longest_us // random.choice((1, 2, 3)) if longest_us >= 3_000 else 0
    return limit_of(algorithm, units, window_us, capacity, name, refill_us)


def comparable(answer: object) -> object:
    """Return an answer with its waits rounded up to microseconds, as Redis gives them."""
    if isinstance(answer, Decision):
        waits = (answer.retry_after_ns, answer.reset_after_ns)
        retry_ns, reset_ns = (-(-wait_ns // 1_000) * 1_000 for wait_ns in waits)
        return decision_with(answer, retry_after_ns=retry_ns, reset_after_ns=reset_ns)
    if isinstance(answer, Lease):
        return tuple(answer._replace(denied_ns=-(-answer.denied_ns // 1_000) * 1_000))
    if isinstance(answer, list | tuple):
        return tuple(comparable(each) for each in answer)
    return answer


def opened(uri: str, clock: SteppedClock, prefix: str) -> AnsweringStore:
    """Return a store on Redis without a denial cache."""
    return AnsweringStore(open_store(uri, clock, prefix=prefix, denied_cache_ms=0, **PATIENCE))


def played(
    seed: int, kind: str, *algorithms: AlgorithmName, changes: int = 0
) -> tuple[LeasePlay, ...]:
    """Play one trace on the reference and on Redis. The limits change so many times."""
    random = Random(seed)
    limits = [random_limit(random, each, f"n{at}") for at, each in enumerate(algorithms)]
    steps = [random.randbytes(STEP_BYTES) for _ in range(random.randint(5, 60))]
    start_ns = random.choice(STARTS_NS)
    clock_steps = random.choice(((), CLOCK_STEPS[:1], CLOCK_STEPS[1:]))
    parts = [Fraction(random.randint(1, 16), 8) for _ in range(changes)]
    plays = []
    for place in ("reference", kind):
        clock = clock_at(start_ns)
        clock.step_ns = 1_000
        prefix = f"leases{seed}"
        store = (
            MemoryAuthority(clock)
            if place == "reference"
            else opened(running(kind).uri, clock, prefix)
        )
        play = LeasePlay(store, clock, limits, clock_steps, all_verbs=True)
        play.earlier = [scaled(limits, part) for part in parts]
        play.play(steps)
        store.close()
        plays.append(play)
    return tuple(plays)


def assert_alike(reference: LeasePlay, redis: LeasePlay, seed: int) -> None:
    """Every answer is the same."""
    for number, pair in enumerate(zip(reference.answers, redis.answers, strict=True)):
        wanted, got = (comparable(each) for each in pair)
        assert got == wanted, f"seed {seed}, step {number} on {reference.limits}"


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_leases_of_one_limit(algorithm: AlgorithmName) -> None:
    """Lease, give back, late charge and all other verbs."""
    leased = 0
    for seed in range(TRACES):
        reference, redis = played(seed, "single", algorithm)
        assert_alike(reference, redis, seed)
        leased += redis.leased
    assert leased == 0 if algorithm == "leaky_bucket" else leased > TRACES
    running("single").flush()


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_leases_of_a_limit_that_changes(algorithm: AlgorithmName) -> None:
    """Leases and late charges of earlier limits, which were lower or higher."""
    for seed in range(TRACES):
        reference, redis = played(seed, "single", algorithm, changes=1 + seed % 3)
        assert_alike(reference, redis, seed)
    running("single").flush()


@pytest.mark.parametrize(("kind", "traces"), [("single", TRACES), ("cluster", 5), ("sentinel", 5)])
def test_leases_of_several_limits(kind: str, traces: int) -> None:
    """The limits of a rule lease together."""
    for seed in range(traces):
        random = Random(-1 - seed)
        algorithms = random.choices(UNIT_ALGORITHMS, k=random.choice((2, 3)))
        assert_alike(*played(seed, kind, *algorithms), seed)
    running(kind).flush()


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_never_over_on_redis(algorithm: AlgorithmName) -> None:
    """Whenever nodes spend their leases, no interval admits more than its bound.

    Half of the traces have resets: the bound holds from each of them on.
    """
    for seed in range(20):
        random = Random(seed)
        limit = random_limit(random, algorithm, "")
        clock = clock_at(random.choice(STARTS_NS))
        clock.step_ns = 1_000
        uri = running("single").uri
        store = opened(uri, clock, f"over{seed}")
        clock_steps = CLOCK_STEPS[seed % 2 : seed % 2 + 1]
        play = LeasePlay(store, clock, [limit], clock_steps, resets=seed % 2 == 0)
        play.play([random.randbytes(STEP_BYTES) for _ in range(60)])
        store.close()
        play.assert_never_over(limit)
    running("single").flush()
