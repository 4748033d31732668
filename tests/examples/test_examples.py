"""The examples check themselves; these tests run them as a reader would."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratekeeper.core.model import UNIT_ALGORITHMS
from tests.examples import warnings_in

EXAMPLES = Path(__file__).parents[2] / "examples"
LIVE = EXAMPLES / "live.py"
TIMEOUT_SECONDS = 60
BRIEF = {"live.py": ["--seconds", "0.5"]}


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def names() -> list[str]:
    return sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_there_are_examples() -> None:
    """The list below is not empty by mistake."""
    assert "live.py" in names()
    assert len(names()) >= 5


@pytest.mark.parametrize("name", names())
def test_an_example_runs_and_finds_itself_right(name: str) -> None:
    """It exits with status 0 and prints output without a warning or traceback."""
    done = run(EXAMPLES / name, *BRIEF.get(name, []))
    assert (done.returncode, warnings_in(done.stderr)) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_live_keeps_every_client_within_the_bound(algorithm: str) -> None:
    """This holds for each algorithm; exit status 1 would mean that a client got more."""
    done = run(LIVE, "--seconds", "0.7", "--algorithm", algorithm, "--limits", "4/200ms; 7/second")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": within") == 4


def test_live_explains_a_wrong_limit() -> None:
    """It exits with status 2 and shows the position of the error and a correct example."""
    done = run(LIVE, "--limits", "5/fortnight")
    assert done.returncode == 2
    assert "expected a unit" in done.stderr
    assert "Traceback" not in done.stderr


def test_live_ends_on_ctrl_c_with_its_summary() -> None:
    """Interrupted after its first line, it prints the admitted requests and exits with 0."""
    process = subprocess.Popen(
        [sys.executable, str(LIVE), "--seconds", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert out.count(": within") == 4


def test_live_redraws_a_terminal_in_place_and_leaves_it_as_it_was() -> None:
    """The cursor is hidden, moves up over the last frame, and is shown again at the end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(LIVE), "--seconds", "0.5"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = bytearray()
    # On Linux, reading a terminal that no process has open is an I/O error, not end of file.
    try:
        while chunk := os.read(ours, 65_536):
            shown += chunk
    except OSError:
        pass
    os.close(ours)
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert shown.startswith(b"\x1b[?25l")
    assert shown.count(b"\x1b[11A") >= 5
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.count(b": within") == 4
