"""Random fleets with random faults: each trial follows from its seed.

A trial is small, so that many of them fit into a minute: a few nodes, a few busy subjects, and a
short limit that is reached again and again. `python -m tests.simulator random` runs trials, and
repeats one by its seed.
"""

from __future__ import annotations

from random import Random
from typing import Final

from ratekeeper.core.model import UNIT_ALGORITHMS, Limit
from tests.simulator.faults import random_faults
from tests.simulator.fleet import FleetPlan, SimulatedFleet
from tests.simulator.network import seeded
from tests.simulator.traffic import TrafficGroup

SEED_BITS: Final = 32


def random_plan(seed: int) -> FleetPlan:
    """Return the fleet of a seed."""
    random = seeded(seed)
    limit = _random_limit(random)
    faults = random_faults(random)
    per_minute = limit.limit * 60 / limit.window
    traffic = tuple(
        TrafficGroup(
            name,
            users=random.randint(1, 3),
            # At most some thousand requests a second in all, so that a trial takes a second.
            per_minute=min(per_minute * random.choice((0.3, 0.9, 2, 10)), 30_000),
            cost=random.randint(1, max(min(3, limit.limit // 3), 1)),
            burst=random.choice((1, 1, random.randint(2, 20))),
        )
        for name in ("some", "others")
    )
    return FleetPlan(
        limits=(limit,),
        consistency=random.choice(("leased", "leased", "leased", "eventual", "strict")),
        nodes=max(random.randint(1, 20), faults.scale_from),
        seconds=random.randint(5, 15),
        seed=seed,
        traffic=traffic,
        lease_seconds=random.choice((0.05, 0.2, 1.0, 2.0)),
        flush_seconds=random.choice((0.05, 0.2, 0.5)),
        faults=faults,
    )


def _random_limit(random: Random) -> Limit:
    units = random.choice((5, 20, 100, 500))
    seconds = random.choice((0.5, 1, 2, 5, 10))
    algorithm = random.choice((*UNIT_ALGORITHMS, "token_bucket"))
    if algorithm == "token_bucket" and random.random() < 0.3:
        every = random.choice((0.1, 0.25)) * seconds
        return Limit(units, per=seconds, refill_every=every)
    if algorithm == "token_bucket":
        return Limit(units, per=seconds, burst=random.choice((0, 0, units)))
    return Limit(units, per=seconds, algorithm=algorithm)


def run_trial(seed: int) -> list[str]:
    """Run the trial of a seed; return its problems."""
    fleet = SimulatedFleet(random_plan(seed))
    fleet.run()
    return fleet.problems()
