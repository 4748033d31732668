"""Random fleets, each from its seed."""

from __future__ import annotations

import os
import secrets
from time import process_time

import pytest

from tests.simulator.trials import SEED_BITS, random_plan, run_trial

# Fresh seeds on every run, for so much processor time; `make fuzz` tries more.
SECONDS = float(os.environ.get("RATEKEEPER_TRIAL_SECONDS", "2"))


def test_a_seed_is_a_fleet() -> None:
    """The same seed gives the same plan, another one another."""
    assert random_plan(1) == random_plan(1)
    plans = [random_plan(seed) for seed in range(100)]
    assert {plan.consistency for plan in plans} == {"strict", "leased", "eventual"}
    assert len({plan.limits[0].algorithm for plan in plans}) == 5


@pytest.mark.parametrize("seed", range(5))
def test_known_seeds_break_no_promise(seed: int) -> None:
    """A few fleets that are always the same, for `make check`."""
    assert not run_trial(seed)


@pytest.mark.long
def test_no_random_fleet_breaks_a_promise() -> None:
    """Fresh seeds on every run; a failure prints the command that repeats it."""
    until_s = process_time() + SECONDS
    while process_time() < until_s:
        seed = secrets.randbits(SEED_BITS)
        problems = run_trial(seed)
        assert not problems, f"repeat it with: python -m tests.simulator random --seed {seed}"
