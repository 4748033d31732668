"""What `tollkeeper rules` prints, and the exit codes that scripts go by.

    0    all is well
    1    the document has problems, or the two differ, or the change was refused as unsafe
    2    it could not be done: an argument, a file that cannot be read, a database that is away
    3    somebody else changed the rules meanwhile
    70   a bug in Tollkeeper
    141  whoever read the output has gone, as for any program in a pipeline

Results go to the standard output and complaints to the standard error. With `--json` both are one
document on the standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tollkeeper.core.errors import (
    SafetyFinding,
    TollkeeperError,
    UnsafeChange,
    VersionConflict,
    quoted,
)
from tollkeeper.rules.document.reading import DocumentError

if TYPE_CHECKING:
    from tollkeeper.control.repository import Version

OK: Final = 0
PROBLEMS: Final = 1
TROUBLE: Final = 2
CONFLICT: Final = 3
BUG: Final = 70  # EX_SOFTWARE of sysexits.h
READER_GONE: Final = 128 + 13  # what a shell says of a program that SIGPIPE ended

TRACEBACK: Final = "TOLLKEEPER_TRACEBACK"
_COLUMN_GAP: Final = 2


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a line, or several. As UTF-8, whatever the locale: documents are UTF-8."""
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:  # it is closed, so nobody wants to know
        return
    # A file's name may hold bytes that are no text.
    left = memoryview(f"{text}\n".encode(errors="backslashreplace"))
    stream.flush()
    # With PYTHONUNBUFFERED a full disk or a reader that has gone is told by the second write only:
    # the first has written a part.
    while left:
        left = left[stream.buffer.write(left) :]
    stream.buffer.flush()


def say_json(data: object) -> None:
    """Print one JSON document."""
    say(json.dumps(data, indent=2))


# ---------------------------------------------------------------------------------------- errors


@contextmanager
def telling(as_json: bool, *, problems: int = PROBLEMS) -> Iterator[None]:
    """End the command with what is told of an error in this block, and its exit code.

    `problems` is the code for a document that is wrong. No traceback for what is no bug.
    """
    try:
        try:
            yield
            code = OK
        except TollkeeperError as error:
            code = _exit_code(error, problems)
            _tell(error, code, as_json)
    except typer.Exit:
        raise
    except BrokenPipeError:
        _leave_stdout()
        code = READER_GONE
    except OSError as error:  # a full disk
        _leave_stdout()
        say(f"tollkeeper: {error.strerror or error}", to_stderr=True)
        code = TROUBLE
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        say(_bug(error), to_stderr=True)
        code = BUG
    raise typer.Exit(code)


def _exit_code(error: TollkeeperError, problems: int) -> int:
    if isinstance(error, VersionConflict):
        return CONFLICT
    if isinstance(error, UnsafeChange):
        return PROBLEMS
    return problems if isinstance(error, DocumentError) else TROUBLE


def _tell(error: TollkeeperError, code: int, as_json: bool) -> None:
    if as_json:
        data: dict[str, object] = {"exit_code": code, "error": str(error)}
        if isinstance(error, DocumentError):
            data["problems"] = [asdict(problem) for problem in error.problems]
        elif isinstance(error, UnsafeChange):
            data["findings"] = [asdict(finding) for finding in error.findings]
        elif isinstance(error, VersionConflict):
            data |= {"expected": error.expected, "current": error.current}
        say_json(data)
    elif isinstance(error, DocumentError):
        say(str(error), to_stderr=True)  # each line begins with the file and the place in it
    elif isinstance(error, UnsafeChange):
        say(f"tollkeeper: refused, and nothing has changed:\n{error}", to_stderr=True)
        say("To put it in force all the same: --force", to_stderr=True)
    elif isinstance(error, VersionConflict):
        say(f"tollkeeper: {error}", to_stderr=True)
        if error.expected and error.current:
            look = f"tollkeeper rules diff {error.expected} {error.current}"
            say(f"What has changed: {look}", to_stderr=True)
    else:
        say(f"tollkeeper: {error}", to_stderr=True)


def _bug(error: Exception) -> str:
    """Where it happened, but not the error's text: that may hold anything, also a password."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"tollkeeper: {type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: "
        f"this is a bug; please report it. {TRACEBACK}=1 shows all of it"
    )


def _leave_stdout() -> None:
    """Nobody reads it any more: Python would complain of that when it flushes at the end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------------------------- tables


def say_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings: fitted to a terminal; in a pipe, each row is one line."""
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), header_style="bold")
        for heading in headings:
            table.add_column(heading, overflow="fold")  # by default long words lose their end
        for row in rows:
            table.add_row(*map(Text, row))  # as Text: brackets are no markup
        console.print(table)
        return
    # The last column is as long as it is, and so are lines.
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    widths[-1] = 0
    gap = " " * _COLUMN_GAP
    for row in (headings, *rows):
        line = gap.join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        say(line.rstrip())


def finding_text(finding: SafetyFinding) -> str:
    """What a finding says, for whoever cannot force it."""
    rule = f" (rule {quoted(finding.rule)})" if finding.rule else ""
    return f"{finding.where}{rule}: {finding.what}: {finding.why}; {finding.remedy}"


# -------------------------------------------------------------------------------------- versions


def time_text(time: datetime) -> str:
    """To the second, in UTC."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def version_data(version: Version) -> dict[str, object]:
    """A version for JSON, without its text."""
    return {
        "version": version.number,
        "created_at": version.created_at.isoformat(),
        "author": version.author,
        "kind": version.kind,
        "base": version.base,
        "reason": version.reason,
    }


def say_history(versions: Sequence[Version]) -> None:
    """Print versions, each on a line."""
    say_table(
        ("VERSION", "TIME", "AUTHOR", "KIND", "REASON"),
        [
            (
                str(version.number),
                time_text(version.created_at),
                version.author,
                version.kind,
                " ".join(version.reason.split()),
            )
            for version in versions
        ],
    )
