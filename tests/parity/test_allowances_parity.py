"""The kernel's allowances agree with the reference, answer for answer, on long random traces.

Each trace has its own seed; a failure prints it, and `trace(seed, …)` replays it alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ratekeeper import Decision, Limit
from ratekeeper.decide.allowances import (
    ALLOWANCE_UNITS_MAX,
    SUBJECT_BYTES_MAX,
    AllowanceGate,
    Allowances,
    PythonAllowances,
    UnitClaim,
)
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.stores.native import KernelAllowances
from ratekeeper.testing import ManualClock

# The seeds are the same on every run; RATEKEEPER_EXPLORE=10 runs ten times as many traces.
TRACES = 40 * int(os.environ.get("RATEKEEPER_EXPLORE", "1"))
STEPS = 500
MS = 1_000_000
WAITS_NS = (0, 1, 17 * MS, 17 * MS, 100 * MS, 999 * MS, 1_000 * MS, 5_000 * MS, 11_000 * MS)
LIMITS = (Limit(10_000_000, per=60), Limit(100_000_000, per=3_600))
SUBJECTS = (
    "ada",
    "ada",
    "ada",
    "bob",
    "bob",
    "",
    "é" * (SUBJECT_BYTES_MAX // 2),
    "x" * (SUBJECT_BYTES_MAX + 1),
)
VERBS = (
    *("spend",) * 8,
    *("put",) * 4,
    *("deny", "stop", "unspend", "unspend", "claim", "claim of one", "confirm"),
)


class Engine:
    """A table with two gates, and the decisions and claims that later steps refer to."""

    def __init__(self, table: Allowances) -> None:
        self.table = table
        self.gates: list[AllowanceGate] = [
            table.gate(LIMITS, "api", "leased", 300 * MS),
            table.gate(LIMITS, "api", "eventual", 300 * MS),
        ]
        self.charged_ns = 0
        self.claims: list[UnitClaim] = []

    def step(self, random: Random, now_ns: int) -> Any:
        """Make one random call; return its answer."""
        verb, gate = random.choice(VERBS), random.choice(self.gates)
        subject, units = random.choice(SUBJECTS), random_units(random)
        if verb == "spend":
            decision = gate.spend(subject, units)
            self.charged_ns = (decision and decision.charged_ns) or self.charged_ns
            return decision, gate.demand(subject), gate.held(subject)
        if verb == "put":
            return gate.put(subject, *random_answer(random, now_ns), units)
        if verb == "deny":
            return gate.deny(subject, units, random.choice(WAITS_NS))
        if verb == "stop":
            return gate.stop(subject)
        if verb == "claim of one":
            claim = gate.claim(subject)
            self.claims += [claim] if claim is not None else []
            return claim
        if verb == "unspend":
            return gate.unspend(subject, units, self.charged_ns)
        if verb == "confirm":
            self.table.confirm(random.sample(self.claims, random.randint(0, len(self.claims))))
        else:
            ending = random.random() < 0.2
            self.claims = sorted(self.table.claim(100, 50 * MS, ending=ending))
        return self.claims, self.table.stats()._replace(held_max=0)


def random_units(random: Random) -> int:
    return random.choice((0, *(1,) * 8, 2, 2, 5, 5, 30, 30, ALLOWANCE_UNITS_MAX, 1_000_000_000))


def random_answer(random: Random, now_ns: int) -> tuple[Lease, Decision]:
    """Return an answer of an authority whose clock is another one, and not quite steady."""
    denied = random.random() < 0.2
    store_ns = now_ns + 7_000_000 * MS + random.choice((0, 0, -3 * MS, 5 * MS))
    denied_ns = random.choice((0, 0, 0, 0, 40 * MS, 9_000 * MS))
    units = 0 if denied else 5 * random_units(random)
    lasts_ns = random.choice((*WAITS_NS, 2_000 * MS, 3_000 * MS, 60_000 * MS))
    lease = Lease(units, store_ns + random.randint(0, 9), lasts_ns, denied_ns)
    return lease, Decision(
        not denied,
        random.choice(LIMITS),
        random.choice((0, 3, 400, 1_000_000_000)),
        random.choice((1, 300 * MS, 70_000 * MS)) if denied else 0,
        random.choice((0, 500 * MS, 86_400_000 * MS)),
        rule="api",
        charged_ns=None if denied or random.random() < 0.1 else store_ns,
        decided_ns=store_ns,
    )


def trace(seed: int, path: Path | None) -> None:
    """Run one trace on both engines."""
    random = Random(seed)
    clock = ManualClock(start=random.choice((0, 1_790_000_000)))
    reference = Engine(PythonAllowances(clock))
    kernel = Engine(KernelAllowances(clock, path, 1_000, 0o600))
    for number in range(STEPS):
        clock.advance_ns(random.choice(WAITS_NS) if random.random() < 0.2 else 0)
        if random.random() < 0.01:
            clock.advance_ns(-random.choice(WAITS_NS))
        replay = random.random()
        wanted = reference.step(Random(replay), clock.now_ns())
        got = kernel.step(Random(replay), clock.now_ns())
        assert got == wanted, f"seed {seed}, step {number}"
    kernel.table.close()


@pytest.mark.parametrize("shard", range(4))
def test_many_steps_agree_in_memory(shard: int) -> None:
    """memory:// gives the answers of the reference implementation."""
    for seed in range(shard, TRACES, 4):
        trace(seed, None)


def test_many_steps_agree_in_a_file(tmp_path: Path) -> None:
    """shared:// gives the answers of the reference implementation."""
    for seed in range(TRACES, TRACES + TRACES // 4):
        trace(seed, tmp_path / f"{seed}")
