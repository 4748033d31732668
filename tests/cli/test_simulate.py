"""`ratekeeper simulate`: a fleet by its arguments, random fleets, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ratekeeper.cli import simulate
from tests.cli.stub_service import run

SMALL = ("simulate", "fleet", "--nodes", "4", "--seconds", "5", "--seed", "7", "--limit", "5/s")


@pytest.fixture
def traffic(tmp_path: Path) -> str:
    """Return the path of a file of traffic that exceeds the limit of 5/s."""
    path = tmp_path / "traffic.csv"
    path.write_text("group,users,per_minute\nlight,5,60\nheavy,2,1200\n")
    return str(path)


def test_a_fleet_is_simulated_and_shown(traffic: str, tmp_path: Path) -> None:
    """The output has the plan with its seed, a plot, and a table of results; --plot writes SVG."""
    plot = tmp_path / "plot.svg"
    found = run(*SMALL, "--consistency", "strict", "--traffic", traffic, "--plot", str(plot))
    assert found.exit_code == 0, found.output
    for words in (
        "4 nodes, 5/second, strict, 5 s, seed 7",
        "█",
        "answered in the node                           0.0%",
        "over the limit, worst subject and moment       0 units, 0.00%",
    ):
        assert words in found.output, found.output
    lines = ET.fromstring(plot.read_text()).iter("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [5, 5, 5, 5]


def test_the_same_seed_gives_the_same_json(traffic: str) -> None:
    """A run is repeated by the seed that the output names; without --seed it is another."""
    arguments = (*SMALL, "--traffic", traffic, "--faults", "all", "--json")
    once, again = (json.loads(run(*arguments).stdout) for _ in range(2))
    assert once == again
    assert (once["exit_code"], once["seed"], once["problems"]) == (0, 7, [])
    assert len(once["seconds"]) == 5
    seeds = [
        json.loads(run(*SMALL[:6], "--seconds", "1", "--json").stdout)["seed"] for _ in range(2)
    ]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "5/fortnight"), "expected a unit: ms, second, minute"),
        (("--consistency", "loose"), "is not known; choose one of strict, leased, eventual"),
        (("--algorithm", "bucket"), "choose one of token_bucket, leaky_bucket"),
        (("--faults", "meteors=1"), "for example --faults loss=0.05,crashes=3"),
        (("--faults", "scale_from=9"), "scale_from=9 is more than the 4 nodes of the fleet"),
        (("--traffic", "missing.csv"), "missing.csv: the traffic cannot be read"),
        (("--plot", "missing/plot.svg"), "missing/plot.svg: the plot cannot be written"),
        (("--nodes", "0"), "Invalid value for '--nodes'"),
    ],
)
def test_a_wrong_argument_says_what_is_right(arguments: tuple[str, ...], message: str) -> None:
    """The exit code is 2, and the message names the argument and a valid value."""
    found = run(*SMALL, "--seconds", "1", *arguments)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


def test_random_fleets_are_simulated() -> None:
    """Random fleets keep their promises; one seed is one fleet."""
    found = run("simulate", "random", "--seed", "5")
    assert (found.exit_code, found.output) == (
        0,
        "1 random fleets, and as many sets of regions, simulated\n",
    )
    as_json = json.loads(run("simulate", "random", "--seconds", "0", "--json").stdout)
    assert as_json == {"exit_code": 0, "fleets": 1}


def test_a_broken_promise_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1, and the output has the command that repeats the fleet."""
    monkeypatch.setattr(simulate, "run_trial", lambda seed: ["user: 1 units over"])
    found = run("simulate", "random", "--seed", "5")
    assert found.exit_code == 1
    assert found.output == (
        "1 random fleets, and as many sets of regions, simulated\nPROBLEM: user: 1 units over\n"
        "To repeat it: ratekeeper simulate random --seed 5\n"
    )
    as_json = json.loads(run("simulate", "random", "--seed", "5", "--json").stdout)
    assert as_json["problems"] == ["user: 1 units over"]


def test_help_is_complete() -> None:
    """It has every option, the exit codes, and an example."""
    found = run("simulate", "fleet", "--help").output
    for words in ("--limit", "--nodes", "--traffic", "--faults", "--warm", "Exit code", "Example"):
        assert words in found


def test_regions_are_simulated_and_shown() -> None:
    """The same seed gives the same results, as a table and as JSON."""
    args = (
        "simulate",
        "regions",
        "--regions",
        "2",
        "--nodes",
        "1",
        "--seconds",
        "3",
        "--seed",
        "7",
    )
    found = run(*args, "--limit", "100/minute", "--across-regions", "exact")
    assert found.exit_code == 0
    assert "2 regions of 1 nodes, 100/minute, exact, 3 s, seed 7" in found.output
    as_json = [json.loads(run(*args, "--limit", "9/s", "--json").stdout) for _ in range(2)]
    assert as_json[0] == as_json[1]
    assert as_json[0]["subjects"]["tenfold"]["admitted"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--across-regions", "maybe"), "choose exact or eventual"),
        (("--partition", "half"), "choose one of none, pairs, one-way, alone, all"),
        (("--latency-ms", "300", "100"), "is not the least and the most latency"),
    ],
)
def test_wrong_arguments_of_regions_are_explained(args: tuple[str, ...], message: str) -> None:
    """Nothing is simulated."""
    found = run("simulate", "regions", *args)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
