"""Completion in the shell: the script for each shell, and the suggestions that it gets.

bash runs for real: the test calls the function that the TAB key calls. For zsh and fish, the tests
set the environment variables that their scripts set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded_command import PreloadedCommand

ROOT = Path(__file__).parents[2]


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the command `ratekeeper` runs this code."""
    command = tmp_path / "ratekeeper"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ratekeeper "$@"\n')
    command.chmod(0o755)
    paths = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": paths, "HOME": str(tmp_path)}


@pytest.fixture(scope="module")
def preloaded() -> Iterator[dict[str, str]]:
    """Return an environment in which the command starts at once.

    Its parent is not the shell, so it cannot detect the shell.
    """
    with PreloadedCommand() as command:
        yield {**os.environ, "PATH": f"{command.folder}{os.pathsep}{os.environ['PATH']}"}


def bash(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


# The calls that bash makes when the user presses TAB after these words.
TAB = """
COMP_WORDS=({words}); COMP_CWORD={last}
_ratekeeper_completion ratekeeper
echo "${{COMPREPLY[@]}}"
"""
COMPLETED = {
    "ratekeeper ru": {"rules"},
    "ratekeeper re": {"reset", "reconcile", "records", "regions"},
    "ratekeeper rules ro": {"rollback"},
    "ratekeeper override cr": {"create"},
    "ratekeeper check --at": {"--attribute"},
    "ratekeeper check --user 42 --co": {"--cost", "--count"},
}


def test_bash_completes_commands_and_options(preloaded: dict[str, str]) -> None:
    """The script for bash defines a function that returns the matching names."""
    presses = [TAB.format(words=each, last=len(each.split()) - 1) for each in COMPLETED]
    defined = 'eval "$(_RATEKEEPER_COMPLETE=source_bash ratekeeper)"'
    answers = bash("\n".join([defined, *presses]), preloaded).splitlines()
    found = {words: set(answer.split()) for words, answer in zip(COMPLETED, answers, strict=True)}
    assert found == COMPLETED


def test_bash_shows_and_installs_the_script(commands: dict[str, str]) -> None:
    """`--show-completion` detects the shell and prints the same script that is installed."""
    shown = bash("ratekeeper --show-completion; true", commands)
    assert "complete -o default -F _ratekeeper_completion ratekeeper" in shown
    installed = bash("ratekeeper --install-completion; true", commands)
    assert "bash completion installed in" in installed
    written = [each.read_text() for each in Path(commands["HOME"]).rglob("*ratekeeper.sh")]
    assert [each.strip() for each in written] == [shown.strip()]


@pytest.mark.parametrize(
    ("shell", "first", "variables"),
    [
        ("zsh", "#compdef ratekeeper", {}),
        ("fish", "complete --command ratekeeper", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_zsh_and_fish_get_a_script_and_suggestions(
    shell: str, first: str, variables: dict[str, str], preloaded: dict[str, str]
) -> None:
    """Each shell gets its own form of the script and of the suggestions."""
    script = bash(f"_RATEKEEPER_COMPLETE=source_{shell} ratekeeper | grep .", preloaded)
    assert script.startswith(first)
    environment = {
        **preloaded,
        **variables,
        "_RATEKEEPER_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "ratekeeper ru",
    }
    suggestions = bash("ratekeeper", environment)
    assert "rules" in suggestions
    assert "reset" not in suggestions


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_documentation_has_every_shell(shell: str) -> None:
    """The page has the command for each shell."""
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert "ratekeeper --install-completion" in page
    assert f"_RATEKEEPER_COMPLETE=source_{shell} ratekeeper" in page
