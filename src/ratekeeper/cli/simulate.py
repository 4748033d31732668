"""`ratekeeper simulate`: try a fleet without risk, before it is built."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ratekeeper.cli.common import (
    OK,
    PROBLEMS,
    CliCommand,
    CliGroup,
    JsonOption,
    print_json,
    print_table,
    print_text,
)
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import ALGORITHM_NAMES, CONSISTENCIES, AlgorithmName, Consistency
from ratekeeper.core.rates import parse_limits
from ratekeeper.decide.regional import REGIONS_MAX, AcrossRegions
from ratekeeper.lab.faults import NAMES, parse_faults
from ratekeeper.lab.fleet import FleetPlan, SimulatedFleet
from ratekeeper.lab.regions import (
    PARTITIONS,
    Partition,
    RegionsPlan,
    SimulatedRegions,
    results_of,
    rows_of_regions,
    run_random_regions,
)
from ratekeeper.lab.summary import chart_of, rows_of, summary_of, svg_of
from ratekeeper.lab.traffic import USUAL_MIX, read_traffic
from ratekeeper.lab.trials import SEED_BITS, run_trial

app: Final = typer.Typer(
    cls=CliGroup,
    help="Simulate a fleet of nodes that share limits, with traffic and faults.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # as for all commands
)


LimitOption = Annotated[
    str, typer.Option("--limit", metavar="RATE", help="The limits of each subject.")
]
AlgorithmOption = Annotated[
    str, typer.Option("--algorithm", metavar="NAME", help=f"{', '.join(ALGORITHM_NAMES)}.")
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=1, max=3_600, help="The simulated time.")
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="The same seed gives the same run. [default: at random]"),
]
TrafficOption = Annotated[
    Path | None,
    typer.Option(
        "--traffic",
        metavar="FILE",
        help="A CSV file: groups of users (group,users,per_minute,cost,burst,from,until) or "
        "a recording (time,subject,cost). [default: 250 light users at 50 a minute, 40 heavy "
        "ones at 900, 10 abusers at 5,000]",
    ),
]
FaultsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--faults",
        metavar="NAME=NUMBER,…",
        help=f"all, or any of {', '.join(NAMES)}. May be repeated.",
    ),
]


@app.callback()
def simulate() -> None:
    """Simulate a fleet of nodes that share limits, with traffic and faults."""


@app.command(cls=CliCommand)
def fleet(
    limit: LimitOption = "1000/minute",
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=1_000, help="How many nodes share the limits.")
    ] = 100,
    consistency: Annotated[
        str,
        typer.Option("--consistency", metavar="NAME", help=f"{', '.join(CONSISTENCIES)}."),
    ] = "eventual",
    algorithm: AlgorithmOption = "token_bucket",
    traffic: TrafficOption = None,
    seconds: SecondsOption = 60.0,
    seed: SeedOption = None,
    lease_seconds: Annotated[
        float, typer.Option("--lease-seconds", help="How long a lease lasts, at most.")
    ] = 1.0,
    flush_seconds: Annotated[
        float, typer.Option("--flush-seconds", help="How long a pending charge waits, at most.")
    ] = 0.2,
    warm: Annotated[
        float,
        typer.Option("--warm", help="From this share of a limit on, the authority decides."),
    ] = 0.5,
    faults: FaultsOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Also write a plot.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate nodes that share limits: how many checks they answer, and what they admit.

    The nodes run the code of a real fleet, with a virtual clock and network. All requests and
    faults follow from the seed.

    Exit code: 0 no promise was broken; 1 a promise was broken, which is a bug; 2 an argument is
    wrong.

    Example: ratekeeper simulate fleet --nodes 200 --limit 1000/minute --consistency eventual

    Example: ratekeeper simulate fleet --consistency leased --traffic traffic.csv --faults all
    """
    plan = FleetPlan(
        limits=parse_limits(limit, algorithm=_algorithm(algorithm)),
        consistency=_consistency(consistency),
        nodes=nodes,
        seconds=seconds,
        seed=secrets.randbits(32) if seed is None else seed,
        traffic=USUAL_MIX if traffic is None else read_traffic(traffic),
        lease_seconds=lease_seconds,
        flush_seconds=flush_seconds,
        warm=warm,
        faults=parse_faults(faults or []),
    )
    run = SimulatedFleet(plan)
    with _bar(seconds, shown=not as_json) as progress:
        run.run(progress)
    _print_results(run, as_json)
    if plot is not None:
        _write_plot(run, plot)
    if summary_of(run).problems:
        raise typer.Exit(PROBLEMS)


@app.command(cls=CliCommand)
def regions(
    limit: LimitOption = "1000/minute",
    across: Annotated[
        str, typer.Option("--across-regions", metavar="NAME", help="exact or eventual.")
    ] = "eventual",
    algorithm: AlgorithmOption = "token_bucket",
    count: Annotated[
        int, typer.Option("--regions", min=1, max=REGIONS_MAX, help="How many regions.")
    ] = 5,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=100, help="Nodes of each region.")
    ] = 20,
    seconds: SecondsOption = 60.0,
    seed: SeedOption = None,
    latency: Annotated[
        tuple[float, float],
        typer.Option("--latency-ms", help="A round trip between regions: the least, the most."),
    ] = (100, 300),
    loss: Annotated[
        float, typer.Option("--loss", min=0, max=0.9, help="The part of packets that is lost.")
    ] = 0.0,
    partition: Annotated[
        str, typer.Option("--partition", metavar="NAME", help=f"{', '.join(PARTITIONS)}.")
    ] = "none",
    long: Annotated[
        bool, typer.Option("--long", help="One partition as long as the traffic.")
    ] = False,
    kills: Annotated[int, typer.Option("--kills", min=0, help="Leaders that are killed.")] = 0,
    stops: Annotated[int, typer.Option("--stops", min=0, help="Leaders that are stopped.")] = 0,
    changes: Annotated[int, typer.Option("--changes", min=0, help="Changes of the shares.")] = 0,
    removals: Annotated[
        int, typer.Option("--removals", min=0, help="Regions that are lost, and added again.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate regions that share limits: what they admit, and how soon they know of each other.

    The regions run the code of real ones, with a virtual clock and network. Six subjects ask: one
    below its limit, one that moves to another region every 15 s, two at 2 and 10 times the limit in
    all regions, one at 3 times in one region, and one that waits for retry_after when it is denied.

    Exit code: 0 no promise was broken; 1 a promise was broken, which is a bug; 2 an argument is
    wrong.

    Example: ratekeeper simulate regions --limit 1000/minute --across-regions exact

    Example: ratekeeper simulate regions --across-regions exact --partition one-way --kills 3
    """
    plan = RegionsPlan(
        limits=parse_limits(limit, algorithm=_algorithm(algorithm)),
        across=_across(across),
        regions=count,
        nodes=nodes,
        seconds=seconds,
        seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        latency_ms=latency,
        loss=loss,
        partition=_partition(partition),
        is_long=long,
        kills=kills,
        stops=stops,
        changes=changes,
        removals=removals,
    )
    run = SimulatedRegions(plan)
    with _bar(seconds, shown=not as_json) as progress:
        run.run(progress)
    _print_regions(run, as_json)


@app.command("random", cls=CliCommand)
def random_(
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="How long to go on with further seeds.")
    ] = 60.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Run only the fleet of this seed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate random fleets and regions with random faults, and look for broken promises.

    Each seed is a fleet, and regions. It is printed if a promise is broken.

    Exit code: 0 none is broken; 1 a promise is broken, which is a bug; 2 an argument is wrong.

    Example: ratekeeper simulate random --seconds 600

    Example: ratekeeper simulate random --seed 1234
    """
    until_s = monotonic() + seconds
    trials = 0
    problems: list[str] = []
    while not problems and (trials == 0 or (seed is None and monotonic() < until_s)):
        chosen = secrets.randbits(SEED_BITS) if seed is None else seed
        problems = run_trial(chosen) + run_random_regions(chosen)
        trials += 1
    code = PROBLEMS if problems else OK
    if as_json:
        broken = {"seed": chosen, "problems": problems} if problems else {}
        print_json({"exit_code": code, "fleets": trials, **broken})
    else:
        print_text(f"{trials:,} random fleets, and as many sets of regions, simulated")
        for problem in problems:
            print_text(f"PROBLEM: {problem}")
        if problems:
            print_text(f"To repeat it: ratekeeper simulate random --seed {chosen}")
    if problems:
        raise typer.Exit(code)


def _print_regions(run: SimulatedRegions, as_json: bool) -> None:
    """Print the results. Exits with PROBLEMS if a promise was broken."""
    plan = run.plan
    problems = run.problems()
    if as_json:
        code = PROBLEMS if problems else OK
        print_json({"exit_code": code, "seed": plan.seed, **results_of(run)})
    else:
        print_text(
            f"{plan.regions} regions of {plan.nodes} nodes, {'; '.join(map(str, plan.limits))}, "
            f"{plan.across}, {plan.seconds:g} s, seed {plan.seed}"
        )
        print_table(("RESULT", "VALUE"), rows_of_regions(run))
        for problem in problems:
            print_text(f"PROBLEM: {problem}")
    if problems:
        raise typer.Exit(PROBLEMS)


def _consistency(text: str) -> Consistency:
    for name in CONSISTENCIES:
        if name == text:
            found: Consistency = name
            return found
    raise ConfigError(
        f"--consistency {show(text)} is not known; choose one of {', '.join(CONSISTENCIES)}"
    )


def _across(text: str) -> AcrossRegions:
    if text in {"exact", "eventual"}:
        return "exact" if text == "exact" else "eventual"
    raise ConfigError(f"--across-regions {show(text)} is not known; choose exact or eventual")


def _partition(text: str) -> Partition:
    for name in PARTITIONS:
        if name == text:
            return name
    raise ConfigError(
        f"--partition {show(text)} is not known; choose one of {', '.join(PARTITIONS)}"
    )


def _algorithm(text: str) -> AlgorithmName:
    for name in ALGORITHM_NAMES:
        if name == text:
            return name
    raise ConfigError(
        f"--algorithm {show(text)} is not known; choose one of {', '.join(ALGORITHM_NAMES)}"
    )


@contextmanager
def _bar(seconds: float, *, shown: bool) -> Iterator[Callable[[float], None] | None]:
    """Show a progress bar on the standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=seconds)
        yield lambda done: progress.update(task, completed=done)


def _print_results(run: SimulatedFleet, as_json: bool) -> None:
    plan, summary = run.plan, summary_of(run)
    if as_json:
        code = PROBLEMS if summary.problems else OK
        seconds = [asdict(each) for each in run.counts.seconds]
        print_json({"exit_code": code, "seed": plan.seed, **asdict(summary), "seconds": seconds})
        return
    print_text(
        f"{plan.nodes} nodes, {'; '.join(map(str, plan.limits))}, {plan.consistency}, "
        f"{plan.seconds:g} s, seed {plan.seed}"
    )
    for line in chart_of(run):
        print_text(line)
    print_table(("RESULT", "VALUE"), rows_of(summary))
    for problem in summary.problems:
        print_text(f"PROBLEM: {problem}")


def _write_plot(run: SimulatedFleet, path: Path) -> None:
    try:
        path.write_text(svg_of(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: the plot cannot be written: {error}") from None
