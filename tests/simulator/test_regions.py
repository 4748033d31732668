"""Simulated regions: what they promise, and that the simulator finds broken promises."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from time import process_time

import pytest

from ratekeeper.core.model import Limit
from tests.simulator import planted
from tests.simulator.regions import (
    PARTITIONS,
    Load,
    Partition,
    RegionsPlan,
    SimulatedRegions,
    random_regions,
    run_random_regions,
)
from tests.simulator.trials import SEED_BITS

# Fresh seeds on every run, for so much processor time; `make fuzz` tries more.
SECONDS = float(os.environ.get("RATEKEEPER_TRIAL_SECONDS", "2"))
MINUTE = (Limit(600, per=60),)
STEADY = (Limit(300, per=60, capacity=60),)


def simulated(plan: RegionsPlan) -> SimulatedRegions:
    """Run a plan."""
    run = SimulatedRegions(plan)
    run.run()
    return run


PLANTED: dict[str, tuple[planted.Plant, RegionsPlan, str]] = {
    "own drains while known is not empty": (
        planted.bucket(planted.DrainsOwnAtOnce),
        RegionsPlan(
            (Limit(60, per=10),),
            nodes=1,
            seconds=12,
            loads=(Load("many", 10),),
            partition="one-way",
        ),
        "units over",
    ),
    "own is in known and drains as well": (
        planted.bucket(planted.KeepsOwnInKnown),
        RegionsPlan(
            (Limit(60, per=10),),
            nodes=1,
            seconds=20,
            seed=2,
            loads=(Load("many", 10),),
            partition="one-way",
        ),
        "units over",
    ),
    "accepts everything": (
        planted.accepts_everything,
        RegionsPlan(
            (Limit(60, per=10),),
            regions=3,
            nodes=1,
            seconds=40,
            loads=(Load("many", 10),),
            partition="pairs",
        ),
        "units over",
    ),
    "own moves twice": (
        planted.bucket(planted.MovesTwice),
        RegionsPlan(STEADY, regions=2, nodes=1, seconds=40, loads=(Load("some", 0.85),)),
        "below its limit",
    ),
    "a rise adds nothing": (
        planted.rises_without_addition,
        RegionsPlan(
            (Limit(600, per=600),),
            regions=3,
            nodes=1,
            seconds=26,
            loads=(Load("many", 60),),
            removals=1,
        ),
        "units over",
    ),
    "a share rises at once": (
        planted.rises_at_once,
        RegionsPlan(MINUTE, regions=3, nodes=1, seconds=8, loads=(Load("some", 0.5),), changes=2),
        "the shares in use added up to",
    ),
    "a total is reported once": (
        planted.reports_once,
        RegionsPlan(
            MINUTE, nodes=1, seconds=10, loads=(Load("some", 0.5),), partition="all", is_long=True
        ),
        "has not learnt the total",
    ),
    "a dead leader keeps the lead": (
        planted.leads_for_long,
        RegionsPlan(MINUTE, regions=2, nodes=2, seconds=15, loads=(Load("some", 0.5),), kills=1),
        "had no leader",
    ),
    "retry_after is too short": (
        planted.bucket(planted.PromisesTooSoon),
        RegionsPlan(MINUTE, regions=2, nodes=1, seconds=10, loads=(Load("some", 1, "patient"),)),
        "waited for retry_after",
    ),
    "each region takes the whole": (
        planted.ignores_demand,
        RegionsPlan(
            (Limit(100, per=60),),
            "eventual",
            regions=3,
            nodes=1,
            seconds=12,
            loads=(Load("many", 20),),
        ),
        "over an eventual limit",
    ),
}


@pytest.mark.long  # 20 runs, which test the simulator
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checker fails on a defect, and finds nothing without it."""
    plant, plan, problem = PLANTED[name]
    assert not simulated(plan).problems()
    plant(monkeypatch)
    problems = simulated(plan).problems()
    assert problems
    assert problem in problems[0]


def test_the_same_seed_is_the_same_run() -> None:
    """All requests, faults and elections follow from the seed."""
    plan = replace(random_regions(12), kills=2, stops=1, changes=1, partition="one-way")
    once, again = simulated(plan), simulated(plan)
    assert once.subjects == again.subjects
    assert once.known_s(0.99) == again.known_s(0.99)
    assert once.takeovers_s == again.takeovers_s
    plans = [random_regions(seed) for seed in range(100)]
    assert {plan.partition for plan in plans} == set(PARTITIONS)
    assert len({plan.limits[0].algorithm for plan in plans}) == 5


@pytest.mark.long
@pytest.mark.parametrize("partition", ["pairs", "alone", "all"])
def test_a_long_partition_leaves_each_region_its_share_of_the_rate(partition: Partition) -> None:
    """Also if one region reaches all others, as with this seed, and would take the rate of all."""
    plan = RegionsPlan(
        (Limit(300, per=60, capacity=30),),
        nodes=1,
        seconds=150,
        loads=(Load("many", 3),),
        partition=partition,
        is_long=True,
    )
    run = simulated(plan)
    assert not run.problems()
    assert run.delivered("many") >= 0.95


def test_a_subject_that_moves_gets_its_full_rate_within_two_seconds() -> None:
    """Exact limits, at 0.9 times the limit."""
    plan = RegionsPlan(MINUTE, nodes=1, seconds=60, loads=(Load("moves", 0.9, "moving"),))
    run = simulated(plan)
    assert not run.problems()
    assert run.subjects["moves"].denied_late == 0


def test_other_regions_know_within_100_ms_and_the_latency() -> None:
    """A report is read every 50 ms, and needs half a round trip."""
    plan = RegionsPlan(MINUTE, "eventual", nodes=1, seconds=10, loads=(Load("some", 1),))
    run = simulated(plan)
    assert run.known_s(0.99) <= 0.1 + 0.15 * 1.1


@pytest.mark.parametrize("seed", range(3))
def test_known_seeds_of_regions_break_no_promise(seed: int) -> None:
    """A few sets of regions that are always the same, for `make check`."""
    assert not run_random_regions(seed)


@pytest.mark.long
def test_no_random_regions_break_a_promise() -> None:
    """Fresh seeds on every run; a failure prints the command that repeats it."""
    until_s = process_time() + SECONDS
    while process_time() < until_s:
        seed = secrets.randbits(SEED_BITS)
        problems = run_random_regions(seed)
        assert not problems, f"repeat it with: python -m tests.simulator random --seed {seed}"
