"""Redis by its own clock: the reference decides at the time that each reply contains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

import ratekeeper.core.clock
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.model import BUCKETS, DECISION_FIELDS, UNIT_ALGORITHMS, Limit
from ratekeeper.decide.store import LocalCounter, LocalStore
from tests.conformance.stores import CONNECTIONS, STORES
from tests.parity.in_microseconds import ALGORITHMS_US
from tests.parity.reference import ReferenceCounter, States, answer
from tests.parity.server_times import TimedDecoder, timed

pytestmark = pytest.mark.server

OPENERS = {factory.name: factory.open for factory in STORES + CONNECTIONS}
# Shorter than a trace, which takes about a tenth of a second, and one that never ends in it.
WINDOWS_S = (0.001, 0.0033, 0.01, 0.02, 0.1, 3_600)
STEPS = 1_000
DECIDED = DECISION_FIELDS.index("decided_ns")


def short_limits(random: Random) -> tuple[Limit, ...]:
    """One to three limits that fill and empty many times in a trace."""
    found = []
    for index in range(random.choice((1, 1, 2, 3))):
        algorithm = random.choice(UNIT_ALGORITHMS)
        units = random.choice((1, 3, 10, 70, 1_000))
        capacity = random.randint(1, 2 * units) if algorithm in BUCKETS else 0
        per = random.choice(WINDOWS_S)
        found.append(Limit(units, per, algorithm=algorithm, capacity=capacity, name=f"n{index}"))
    return tuple(found)


def trace(seed: int, store: LocalStore) -> int:
    """Run one trace; return the number of denied decisions."""
    random = Random(seed)
    states: States = {}
    denied = 0

    def counters() -> tuple[LocalCounter, TimedDecoder, ReferenceCounter]:
        limits = short_limits(random)
        counter = store.counter(limits, "rule")
        return counter, timed(counter), ReferenceCounter(states, limits, "rule", ALGORITHMS_US)

    counter, times, reference = counters()
    for number in range(STEPS):
        subject = random.choice(("a", "b"))
        cost = random.choice((0, 1, 1, 1, 2, random.randint(1, reference.limits[0].capacity)))
        dice = random.random()
        if dice < 0.002:
            counter, times, reference = counters()
        elif dice < 0.01:
            counter.reset(subject)
            reference.reset(subject)
        looks = dice > 0.9
        got = answer(counter.peek if looks else counter.check, subject, cost)
        now_ns = times.now_ns
        if not looks and got[0] is False:  # a denial may be cached: then it has a time of its own
            now_ns = got[DECIDED]
        wanted = answer(reference.check, subject, cost, now_ns, spend=not looks)
        assert got == wanted, f"seed {seed}, step {number} at {times.now_ns}: {reference.limits}"
        denied += got[0] is False
    return denied


@pytest.mark.parametrize("name", ["redis", "redis-async", "cluster"])
def test_decisions_by_the_servers_clock_agree(name: str, tmp_path: Path) -> None:
    """At the times of the server, the reference makes the same decisions, field by field."""
    denied = 0
    for seed in range(10):
        with OPENERS[name](SystemClock(), 0, tmp_path) as store:
            denied += trace(seed, store)
    assert denied > STEPS


@contextmanager
def clock_off_by(seconds: float) -> Iterator[None]:
    """Shift the wall clock of this process."""
    before_ns = ratekeeper.core.clock.EPOCH_OFFSET_NS
    ratekeeper.core.clock.EPOCH_OFFSET_NS += int(seconds * 10**9)
    try:
        yield
    finally:
        ratekeeper.core.clock.EPOCH_OFFSET_NS = before_ns


@pytest.mark.parametrize("seconds", [-60, 60])
@pytest.mark.parametrize("name", ["redis", "redis-async"])
def test_the_clock_of_the_caller_changes_no_decision(
    name: str, seconds: float, tmp_path: Path
) -> None:
    """With the clock of the caller a minute off, each decision equals that of the reference at the
    time of the server."""
    for seed in range(100, 105):
        with clock_off_by(seconds), OPENERS[name](SystemClock(), 0, tmp_path) as store:
            trace(seed, store)
