"""The C table under the compiler's sanitizers, and under SIGKILL."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kernel.build import SANITIZED, build

# The seed is fixed; `make fuzz` tries new ones.
ROUNDS = 50


def run(driver: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(driver), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, text=True, timeout=300)


def test_random_calls_and_damaged_files_pass_the_sanitizers(tmp_path: Path) -> None:
    """Millions of random calls cause no address error, undefined behaviour, leak or hang.

    A third of them use a file that is overwritten with random bytes, and sometimes truncated.
    """
    done = run(build("random_driver.c", tmp_path, *SANITIZED), tmp_path, 1, ROUNDS)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout == f"{ROUNDS} rounds of 20000 steps\n"


def test_a_process_killed_at_any_instruction_charges_completely_or_not_at_all(
    tmp_path: Path,
) -> None:
    """A check survives SIGKILL at any instruction: new and known keys, logs, limits, grants."""
    done = run(build("kill_driver.c", tmp_path, "-O2"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert "killed inside the lock" in done.stdout


def test_random_calls_conserve_units_and_pass_the_sanitizers(tmp_path: Path) -> None:
    """A quarter of the rounds use a file of allowances that is damaged while in use."""
    done = run(build("allowances_driver.c", tmp_path, *SANITIZED), tmp_path, 1, ROUNDS)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout == f"{ROUNDS} rounds of 10000 steps\n"


def test_a_process_killed_at_any_instruction_loses_no_pending_unit_and_spends_none_twice(
    tmp_path: Path,
) -> None:
    """Allowances survive SIGKILL at any instruction of any call."""
    done = run(build("allowances_kill_driver.c", tmp_path, "-O2"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert "killed inside the lock" in done.stdout


def test_a_forked_child_uses_the_file_at_every_moment(tmp_path: Path) -> None:
    """At no instruction of its fork handler could another process find the file unused."""
    done = run(build("fork_driver.c", tmp_path, "-O2"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert int(done.stdout.split()[0]) > 100


def test_looking_for_room_takes_a_bounded_number_of_steps(tmp_path: Path) -> None:
    """With 200,000 logs in the table, a check takes at most 60,000 steps, about 50 µs.

    The slab is full of live logs, full of expired ones, or scattered. A claim on 100,000
    allowances, of which two have pending units, takes at most a quarter of that.
    """
    program = build("bound_driver.c", tmp_path, "-O2", "-fsanitize-coverage=trace-pc")
    done = run(program, 60_000)
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert "scattered" in done.stdout
    assert "claim of two" in done.stdout
