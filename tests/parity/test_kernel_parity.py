"""The kernel agrees with the reference, field for field, on long random traces.

Each trace has its own seed; a failure prints it, and `trace(seed)` replays it alone.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import Limit
from ratekeeper.decide.kernel import _kernel
from tests.parity.reference import ReferenceCounter, States, answer
from tests.parity.traces import Step, changed, random_limits, steps

# The seeds are the same on every run; RATEKEEPER_EXPLORE=10 runs ten times as many traces.
TRACES = 300 * int(os.environ.get("RATEKEEPER_EXPLORE", "1"))
STEPS = 1_000
SHARDS = 10


def apply(step: Step, kernel: _kernel.Counter, reference: ReferenceCounter) -> tuple[Any, Any]:
    """Apply the step to both; return both answers."""
    verb, subject, units, now_ns = step.verb, step.subject, step.units, step.now_ns
    if verb in ("check", "peek"):
        spend = verb == "check"
        return (
            answer(kernel.check if spend else kernel.peek, subject, units, now_ns),
            answer(reference.check, subject, units, now_ns, spend=spend),
        )
    if verb == "refund":
        charged_ns = reference.charged_ns(step.charge)
        kernel.refund(subject, units, charged_ns, now_ns)
        reference.refund(subject, units, charged_ns, now_ns)
    elif verb == "owe":
        got = kernel.owe(subject, units, now_ns), kernel.owed(subject, now_ns)
        return got, (reference.owe(subject, units, now_ns), reference.owed(subject, now_ns))
    elif verb == "grant":
        kernel.grant(subject, units, step.ttl_ns, now_ns)
        reference.grant(subject, units, step.ttl_ns, now_ns)
    elif verb == "reset":
        kernel.reset(subject)
        reference.reset(subject)
    return None, None


def trace(seed: int, table: _kernel.Table, *, count: int = STEPS, owes: bool = False) -> int:
    """Run one trace; return the number of compared decisions."""
    random = Random(seed)
    limits = random_limits(random)
    rule = f"trace-{seed}"
    states: States = {}
    kernel = _kernel.Counter(table, limits, rule)
    reference = ReferenceCounter(states, limits, rule)
    rewinds = random.random() < 0.5
    compared = 0
    for number, step in enumerate(steps(random, limits, count, rewinds=rewinds, owes=owes)):
        if step.verb == "change":
            limits = changed(random, limits)
            kernel = _kernel.Counter(table, limits, rule)
            reference = ReferenceCounter(states, limits, rule)
        elif step.verb == "sweep":
            table.sweep(step.now_ns)
        got, wanted = apply(step, kernel, reference)
        assert got == wanted, f"seed {seed}, step {number}: {step} on {limits}"
        compared += got is not None
    return compared


@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_steps_agree_in_memory(shard: int) -> None:
    """memory:// gives the decisions of the reference implementation."""
    compared = 0
    for seed in range(shard, TRACES, SHARDS):
        # Each trace has its own table, because their times differ.
        table = _kernel.Table(None, capacity=4_000, log_bytes=1 << 22)
        compared += trace(seed, table)
        table.close()
    assert compared > TRACES * STEPS // SHARDS // 2


@pytest.mark.parametrize("shard", range(SHARDS))
def test_debts_agree(shard: int) -> None:
    """A limit that owes is decided, refunded and reset as by the reference implementation."""
    for seed in range(shard, TRACES, SHARDS):
        table = _kernel.Table(None, capacity=4_000, log_bytes=1 << 22)
        trace(seed, table, owes=True)
        table.close()


def test_a_debt_that_is_at_its_bound_again_lasts_as_long_as_it_must() -> None:
    """Half of it was paid. Its number is the same as before, and its end is later."""
    table = _kernel.Table(None, capacity=4_000, log_bytes=1 << 22)
    kernel = _kernel.Counter(table, (Limit(10, per=60, debt=10),), "rule")
    reference = ReferenceCounter({}, (Limit(10, per=60, debt=10),), "rule")
    for now_s, units in ((0, 1_000), (30, 1_000)):
        owed = kernel.owe("k", units, now_s * NS_PER_SECOND)
        assert owed == reference.owe("k", units, now_s * NS_PER_SECOND)
    for now_s in range(31, 160):
        table.sweep(now_s * NS_PER_SECOND)
        now_ns = now_s * NS_PER_SECOND
        assert kernel.owed("k", now_ns) == reference.owed("k", now_ns), now_s
        got = answer(kernel.peek, "k", 1, now_ns)
        assert got == answer(reference.check, "k", 1, now_ns, spend=False), now_s
    table.close()


def test_many_steps_agree_in_a_file(tmp_path: Any) -> None:
    """shared:// gives the decisions of the reference implementation."""
    for seed in range(TRACES, TRACES + TRACES // 10):
        path = tmp_path / f"{seed}.limits"
        table = _kernel.Table(path, capacity=4_000, log_bytes=1 << 22)
        trace(seed, table)
        table.close()
        path.unlink()
