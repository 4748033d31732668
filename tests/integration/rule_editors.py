"""Processes that change one repository, run as separate programs.

    python -m tests.integration.rule_editors assign URL NAME TASKS EDITS
    python -m tests.integration.rule_editors apply URL NAME EXPECTED
    python -m tests.integration.rule_editors forever URL NAME
    python -m tests.integration.rule_editors open URL

Each waits for a line on its input, so that several start together, and prints one line of JSON at
its end. `forever` prints the number of each version that was committed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import VersionConflict
from tests.integration import rule_documents
from tests.integration.rule_documents import document

# Longer than anything here takes: reaching it means that a process hangs.
HANGS_AFTER_SECONDS = 120.0


async def assign(url: str, name: str, tasks: str, edits: str) -> list[int]:
    """Assign `user:NAME-TASK-EDIT` to a tier, and return the version numbers."""
    async with await Repository.open(url) as repository:

        async def edit(task: int) -> list[int]:
            # A repository of its own: tasks of one repository take turns.
            async with await Repository.open(url) as own:
                return [
                    (
                        await rule_documents.assign(
                            own, f"user:{name}-{task}-{each}", "pro", author=name
                        )
                    ).number
                    for each in range(int(edits))
                ]

        assert await repository.number() >= 1
        found = await asyncio.gather(*(edit(task) for task in range(int(tasks))))
    return [number for numbers in found for number in numbers]


async def apply(url: str, name: str, expected: str) -> str:
    """Apply a document that only this process has, and return the outcome."""
    mine = document(more=f"assign: {{'user:{name}': pro}}")
    async with await Repository.open(url) as repository:
        try:
            version = await repository.apply(mine, author=name, expected=int(expected))
        except VersionConflict as error:
            return f"conflict {error.expected} {error.current}"
        return f"applied {version.number}"


async def forever(url: str, name: str) -> None:
    """Edit until killed."""
    async with await Repository.open(url) as repository:
        for each in range(1_000_000):
            version = await rule_documents.assign(
                repository, f"user:{name}-{each}", "pro", author=name
            )
            print(version.number, flush=True)


async def open_only(url: str) -> int:
    """Open the repository, and return the current number."""
    async with await Repository.open(url) as repository:
        return await repository.number()


def started(arguments: Sequence[Sequence[object]]) -> list[subprocess.Popen[str]]:
    """Start one process for each; all wait for a line."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rule_editors", *map(str, each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]


def results(*arguments: Sequence[object]) -> list[Any]:
    """Run all at the same time, and return what each printed."""
    processes = started(arguments)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=HANGS_AFTER_SECONDS)
        assert process.returncode == 0, errors
        found.append(json.loads(out))
    return found


if __name__ == "__main__":
    work: dict[str, Any] = {"assign": assign, "apply": apply, "forever": forever, "open": open_only}
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(work[sys.argv[1]](*sys.argv[2:]))))
