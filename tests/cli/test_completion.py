"""Completion in the shell: what each shell is given to read, and what it is then told.

With the real bash, where a user's TAB calls the function that the script defines. zsh and fish ask
in the same way, by variables of the environment; those are set here as their scripts set them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """An environment in which `tollkeeper` is this one, whatever is installed."""
    command = tmp_path / "tollkeeper"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tollkeeper "$@"\n')
    command.chmod(0o755)
    paths = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": paths, "HOME": str(tmp_path)}


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


# What bash does at a TAB behind these words.
TAB = """
eval "$(_TOLLKEEPER_COMPLETE=source_bash tollkeeper)"
COMP_WORDS=({words}); COMP_CWORD={last}
_tollkeeper_completion tollkeeper
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["tollkeeper", "ru"], {"rules"}),
        (["tollkeeper", "re"], {"reset", "reconcile"}),
        (["tollkeeper", "rules", "ro"], {"rollback"}),
        (["tollkeeper", "check", "--at"], {"--attribute"}),
        (["tollkeeper", "check", "--user", "42", "--co"], {"--cost", "--count"}),
    ],
)
def test_bash_completes_commands_and_options(
    words: list[str], wanted: set[str], commands: dict[str, str]
) -> None:
    """The script that it is given defines a function that finds them."""
    script = TAB.format(words=" ".join(words), last=len(words) - 1)
    assert set(bash(script, commands).split()) == wanted


def test_bash_shows_and_installs_the_script(commands: dict[str, str]) -> None:
    """`--show-completion` finds out which shell it runs in; what is installed is the same."""
    shown = bash("tollkeeper --show-completion; true", commands)
    assert "complete -o default -F _tollkeeper_completion tollkeeper" in shown
    told = bash("tollkeeper --install-completion; true", commands)
    assert "bash completion installed in" in told
    written = [each.read_text() for each in Path(commands["HOME"]).rglob("*tollkeeper.sh")]
    assert [each.strip() for each in written] == [shown.strip()]


@pytest.mark.parametrize(
    ("shell", "first", "asks"),
    [
        ("zsh", "#compdef tollkeeper", {}),
        ("fish", "complete --command tollkeeper", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_zsh_and_fish_are_given_a_script_and_answers(
    shell: str, first: str, asks: dict[str, str], commands: dict[str, str]
) -> None:
    """Each in its own form."""
    script = bash(f"_TOLLKEEPER_COMPLETE=source_{shell} tollkeeper | grep .", commands)
    assert script.startswith(first)
    asking = {
        **commands,
        **asks,
        "_TOLLKEEPER_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "tollkeeper ru",
    }
    found = bash("tollkeeper", asking)
    assert "rules" in found
    assert "reset" not in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_page_tells_how(shell: str) -> None:
    """With the line for each shell, as it was run here."""
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert "tollkeeper --install-completion" in page
    assert f"_TOLLKEEPER_COMPLETE=source_{shell} tollkeeper" in page
