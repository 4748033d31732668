"""`python -m tests.simulator`, which `make fuzz` runs."""

from __future__ import annotations

import pytest

from tests.simulator import __main__ as simulator


def test_a_broken_promise_is_reported_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and the output has the command that repeats the fleet."""
    assert simulator.main(["random", "--seed", "5"]) == 0
    monkeypatch.setattr(simulator, "run_trial", lambda seed: [f"user: {seed} units over"])
    assert simulator.main(["random", "--seed", "7"]) == 1
    assert capsys.readouterr().out == (
        "1 random fleets, and as many sets of regions, simulated\n"
        "1 random fleets, and as many sets of regions, simulated\n"
        "To repeat it: python -m tests.simulator random --seed 7\n"
        "PROBLEM: user: 7 units over\n"
    )


def test_the_tables_of_the_documentation_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command prints the same table; another seed prints another."""
    fleet = ["fleet", "--nodes=4", "--users=3", "--limit=5/s", "--seconds=3", "--crashes=1"]
    tables = []
    for seed in (1, 1, 2):
        assert simulator.main([*fleet, f"--seed={seed}"]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]
    assert simulator.main(["regions", "--limit=100/minute", "--seconds=3", "--kills=1"]) == 0
    assert "known in other regions" in capsys.readouterr().out
