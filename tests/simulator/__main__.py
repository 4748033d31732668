"""Run the simulator: `python -m tests.simulator random`, `… fleet` or `… regions`.

`random` simulates fleets and regions with random faults, each from its seed, for some time. If a
promise is broken, it prints the seed that repeats it and exits with 1. `fleet` and `regions` print
the tables of `docs/fleet.md` and `docs/regions.md`.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from time import monotonic
from typing import get_args

from ratekeeper.core.model import CONSISTENCIES
from ratekeeper.core.rates import parse_limits
from ratekeeper.decide.regional import AcrossRegions
from tests.simulator.faults import Faults
from tests.simulator.fleet import FleetPlan, simulate
from tests.simulator.regions import (
    PARTITIONS,
    RegionsPlan,
    SimulatedRegions,
    rows_of_regions,
    run_random_regions,
)
from tests.simulator.summary import rows_of, summary_of
from tests.simulator.traffic import USUAL_MIX, TrafficGroup
from tests.simulator.trials import SEED_BITS, run_trial


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if a promise was broken."""
    given = _parser().parse_args(arguments)
    problems: list[str] = given.run(given)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    commands = parser.add_subparsers(required=True)
    random = commands.add_parser("random", help="random fleets and regions, each from its seed")
    random.add_argument("--seconds", type=float, default=60, help="time for further seeds")
    random.add_argument("--seed", type=int, help="run only this seed")
    random.set_defaults(run=_random)
    fleet = commands.add_parser("fleet", help="nodes that share a limit")
    fleet.add_argument("--consistency", choices=CONSISTENCIES, default="eventual")
    fleet.add_argument("--nodes", type=int, default=100)
    fleet.add_argument("--users", type=int, help="of one group, instead of the usual traffic")
    fleet.add_argument("--per-minute", type=float, default=5_000, help="requests of each user")
    fleet.add_argument("--burst", type=int, default=1, help="requests that arrive together")
    fleet.add_argument("--scale-from", type=int, default=0, help="nodes at first; 0: all")
    fleet.add_argument("--crashes", type=int, default=0, help="nodes that are killed")
    fleet.set_defaults(run=_fleet)
    regions = commands.add_parser("regions", help="regions that share a limit")
    regions.add_argument("--across-regions", choices=get_args(AcrossRegions), default="exact")
    regions.add_argument("--partition", choices=PARTITIONS, default="none")
    regions.add_argument("--long", action="store_true", help="one partition for all the time")
    for name in ("--kills", "--stops", "--changes"):
        regions.add_argument(name, type=int, default=0)
    regions.set_defaults(run=_regions)
    for command in (fleet, regions):
        command.add_argument("--limit", type=parse_limits, default=parse_limits("1000/minute"))
        command.add_argument("--seconds", type=float, default=60, help="the simulated time")
        command.add_argument("--seed", type=int, default=1)
    return parser


def _random(given: argparse.Namespace) -> list[str]:
    until_s = monotonic() + given.seconds
    trials = 0
    problems: list[str] = []
    while not problems and (trials == 0 or (given.seed is None and monotonic() < until_s)):
        seed = secrets.randbits(SEED_BITS) if given.seed is None else given.seed
        problems = run_trial(seed) + run_random_regions(seed)
        trials += 1
    print(f"{trials:,} random fleets, and as many sets of regions, simulated")
    if problems:
        print(f"To repeat it: python -m tests.simulator random --seed {seed}")
    return problems


def _fleet(given: argparse.Namespace) -> list[str]:
    group = TrafficGroup("user", given.users or 1, given.per_minute, burst=given.burst)
    summary = summary_of(
        simulate(
            FleetPlan(
                limits=given.limit,
                consistency=given.consistency,
                nodes=given.nodes,
                seconds=given.seconds,
                seed=given.seed,
                traffic=(group,) if given.users else USUAL_MIX,
                faults=Faults(scale_from=given.scale_from, crashes=given.crashes),
            )
        )
    )
    _print_rows(rows_of(summary))
    return list(summary.problems)


def _regions(given: argparse.Namespace) -> list[str]:
    run = SimulatedRegions(
        RegionsPlan(
            given.limit,
            given.across_regions,
            seconds=given.seconds,
            seed=given.seed,
            partition=given.partition,
            is_long=given.long,
            kills=given.kills,
            stops=given.stops,
            changes=given.changes,
        )
    )
    run.run()
    _print_rows(rows_of_regions(run))
    return run.problems()


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name:46} {value}")


if __name__ == "__main__":
    sys.exit(main())
