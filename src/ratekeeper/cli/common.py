"""Everything that the commands share: exit codes, error messages, printing, and common options.

    0    the command succeeded
    1    a negative answer: the document has problems, two documents differ, a change is unsafe
    2    it could not be done: a wrong argument, an unreadable file, an unavailable server
    3    another person changed the rules at the same time
    70   a bug in Ratekeeper
    141  the reader of the output has gone, as for any program in a pipeline

Results go to the standard output and errors to the standard error. With `--json`, both are one JSON
document on the standard output. No message repeats a URL or a token that was typed: a URL may
contain a password.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import (
    ConfigError,
    RatekeeperError,
    UnsafeChange,
    VersionConflict,
    show,
)
from ratekeeper.core.rates import UNIT_NS
from ratekeeper.rules.document.reading import DocumentError

OK: Final = 0
PROBLEMS: Final = 1
TROUBLE: Final = 2
CONFLICT: Final = 3
BUG: Final = 70  # EX_SOFTWARE in sysexits.h
READER_GONE: Final = 128 + 13  # how a shell reports a program that SIGPIPE ended

TRACEBACK: Final = "RATEKEEPER_TRACEBACK"
_COLUMN_GAP: Final = 2
_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH: Final = 9
_URL: Final = re.compile(r"\S*://\S*")
_TOKEN: Final = re.compile(r"\brk_[\w-]+")
_DURATION: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?P<unit>[a-z]{0,12})")
_TIME_OF_DAY: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
TIME_FORMS: Final = "14:03 (the last one, UTC), 2h (ago), 2026-11-15 or 2026-11-15T14:30Z"

ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="The reason for the change.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="RATEKEEPER_STORE",
        metavar="URI",
        help="The URI of the store. If it contains a password, use the variable: other users can "
        "see the arguments of a process.",
    ),
]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", metavar="TEXT", help="The prefix of all keys in Redis.")
]


# ── Commands ───────────────────────────────────────────────────────────────────────────────────


class CliCommand(TyperCommand):
    """A command that reports errors as described above."""

    document_problems = TROUBLE
    """The exit code if a rule document has problems."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; with `--json`, also report a wrong argument as JSON."""
        as_json = "--json" in args
        with _without_secrets():
            try:
                return super().parse_args(ctx, args)
            except Exception as error:  # typer does not export the class of these errors
                if not as_json or not isinstance(getattr(error, "message", None), str):
                    raise
                message = hide_secrets(error.format_message())  # type: ignore[attr-defined]  # has it
                print_json({"exit_code": TROUBLE, "error": message})
                raise typer.Exit(TROUBLE) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error ends it with a message and an exit code."""
        can_force = any(each.name == "force" for each in self.params)
        as_json = bool(ctx.params.get("as_json"))
        with _reported_errors(as_json, self.document_problems, can_force=can_force):
            return super().invoke(ctx)


class DocumentCommand(CliCommand):
    """A command about one rule document: exit code 1 if that document has problems."""

    document_problems = PROBLEMS


class CliGroup(TyperGroup):
    """A group of commands. Its messages repeat no URL and no token."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by its name."""
        with _without_secrets():
            return super().resolve_command(ctx, args)


@contextmanager
def _without_secrets() -> Iterator[None]:
    """Remove secrets from the message of a usage error."""
    try:
        yield
    except Exception as error:  # typer does not export the class of these errors
        if isinstance(text := getattr(error, "message", None), str):
            error.message = hide_secrets(text)  # type: ignore[attr-defined]  # it has one
        raise


def hide_secrets(text: str) -> str:
    """Replace URLs and tokens in a message.

    >>> hide_secrets("No such command 'redis://:s3cret@host'.")
    'No such command a URL'
    """
    return _TOKEN.sub("a token", _URL.sub("a URL", text))


def with_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Declare options that several commands share once, in a function that uses them.

    `@with_options(service=service_client)` replaces the parameter `service` of a command by the
    parameters of `service_client`. When the command runs, it gets the result of that function.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        options = {name: each for name, each in own.items() if name not in groups}
        parts = {
            name: inspect.signature(build, eval_str=True).parameters
            for name, build in groups.items()
        }
        for parameters in parts.values():
            options |= parameters

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, build in groups.items():
                given[name] = build(**{each: given.pop(each) for each in parts[name]})
            command(**given)

        keyword_only = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
            [each.replace(kind=keyword_only) for each in options.values()]
        )
        run.__annotations__ = {name: each.annotation for name, each in options.items()}
        return run

    return decorate


# ── Errors ─────────────────────────────────────────────────────────────────────────────────────


class UndoesChanges(ConfigError):
    """A document would undo changes that were made since the last document was applied."""


@contextmanager
def _reported_errors(as_json: bool, document_problems: int, *, can_force: bool) -> Iterator[None]:
    """Print an error that is raised in the block, and end the command with its exit code."""
    try:
        try:
            yield
            code = OK
        except RatekeeperError as error:
            code = _exit_code(error, document_problems)
            _print_error(error, code, as_json, can_force=can_force)
    except typer.Exit:
        raise
    except BrokenPipeError:
        _abandon_stdout()
        code = READER_GONE
    except OSError as error:  # such as a full disk
        _abandon_stdout()
        print_text(f"ratekeeper: {error.strerror or error}", to_stderr=True)
        code = TROUBLE
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        print_text(_bug_report(error), to_stderr=True)
        code = BUG
    if code != OK:
        raise typer.Exit(code)


def _exit_code(error: RatekeeperError, document_problems: int) -> int:
    if isinstance(error, VersionConflict):
        return CONFLICT
    if isinstance(error, UnsafeChange | UndoesChanges):
        return PROBLEMS
    return document_problems if isinstance(error, DocumentError) else TROUBLE


def _print_error(error: RatekeeperError, code: int, as_json: bool, *, can_force: bool) -> None:
    if as_json:
        data: dict[str, object] = {"exit_code": code, "error": str(error)}
        if isinstance(error, DocumentError):
            data["problems"] = [asdict(problem) for problem in error.problems]
        elif isinstance(error, UnsafeChange):
            data["findings"] = [asdict(finding) for finding in error.findings]
        elif isinstance(error, VersionConflict):
            data |= {"expected": error.expected, "current": error.current}
        print_json(data)
    elif isinstance(error, DocumentError):
        print_text(str(error), to_stderr=True)  # each line starts with the file and the position
    elif isinstance(error, UnsafeChange):
        print_text(f"ratekeeper: rejected; nothing has changed:\n{error}", to_stderr=True)
        if can_force:
            print_text("To apply it anyway: --force", to_stderr=True)
    elif isinstance(error, VersionConflict):
        print_text(f"ratekeeper: {error}", to_stderr=True)
        if error.expected and error.current:
            command = f"ratekeeper rules diff {error.expected} {error.current}"
            print_text(f"To see the changes: {command}", to_stderr=True)
    else:
        print_text(f"ratekeeper: {error}", to_stderr=True)


def _bug_report(error: Exception) -> str:
    """Return where the error happened. Its text is left out, because it may hold a password."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"ratekeeper: {type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: "
        f"this is a bug; please report it. {TRACEBACK}=1 shows the traceback"
    )


def _abandon_stdout() -> None:
    """Discard further output, so that Python does not complain when it flushes at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ── Printing ───────────────────────────────────────────────────────────────────────────────────


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """Print one or more lines, as UTF-8 in every locale: rule documents are UTF-8."""
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:  # it was closed
        return
    # The name of a file may hold bytes that are not text.
    left = memoryview(f"{text}\n".encode(errors="backslashreplace"))
    stream.flush()
    # With PYTHONUNBUFFERED, the first write may be partial; only the second one then reports a
    # full disk or a closed pipe.
    while left:
        left = left[stream.buffer.write(left) :]
    stream.buffer.flush()


def print_json(data: object) -> None:
    """Print one JSON document."""
    print_text(json.dumps(data, indent=2))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings: fitted to a terminal; in a pipe, each row is one line."""
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), header_style="bold")
        for heading in headings:
            table.add_column(heading, overflow="fold")  # the default cuts long words off
        for row in rows:
            table.add_row(*map(Text, row))  # as Text: brackets are not markup
        console.print(table)
        return
    # rich would fit the lines of a pipe to 80 columns. The last column has no padding.
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    widths[-1] = 0
    gap = " " * _COLUMN_GAP
    for row in (headings, *rows):
        line = gap.join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print_text(line.rstrip())


class FindingLines(NamedTuple):
    """A finding of `doctor` or `reconcile` as it is printed."""

    level: str
    check: str
    text: str
    below: tuple[str, ...]
    """Further lines: where it was found, and the remedy."""


def print_findings(findings: Iterable[FindingLines], check_width: int) -> None:
    """Print findings: as a table on a terminal; in a pipe, each line is one line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        for each in findings:
            print_text(f"{each.level:{_LEVEL_WIDTH}}{each.check:{check_width}}{each.text}")
            for line in each.below:
                print_text(f"{'':{_LEVEL_WIDTH + check_width}}{line}")
        return
    table = Table.grid(padding=(0, 2))
    for each in findings:
        # As Text: brackets belong to an address and are not markup.
        table.add_row(Text(each.level, style=_COLOURS[each.level]), each.check, Text(each.text))
        for line in each.below:
            table.add_row("", "", Text(line, style="bold" if line.startswith("->") else ""))
    console.print(table)


def time_text(time: datetime) -> str:
    """Return a time in UTC, to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def seconds_text(seconds: object) -> str:
    """Return a duration to three digits; "?" for anything that is not a number."""
    if not isinstance(seconds, int | float):
        return "?"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


# ── Values of options ──────────────────────────────────────────────────────────────────────────


def parse_duration_s(option: str, text: str) -> float:
    """Parse a duration: a number, and a unit unless it is in seconds. Raises ConfigError.

    >>> parse_duration_s("--ttl", "90"), parse_duration_s("--ttl", "1.5h")
    (90.0, 5400.0)
    """
    found = _DURATION.fullmatch(text)
    unit_ns = UNIT_NS.get(found["unit"] or "s") if found else None
    if found is None or unit_ns is None:
        raise ConfigError(f"{option} {show(text)} is not a duration; try 90s, 10m or 1h")
    return float(found["number"]) * unit_ns / NS_PER_SECOND


def parse_period(
    options: tuple[str, str],
    start: str | None,
    end: str | None,
    now: datetime | None = None,
) -> tuple[datetime | None, datetime | None]:
    """Parse the start and the end of a period, each in one of the TIME_FORMS. Raises ConfigError.

    A start that would be later today was yesterday, and so was an end that would be later today.

    >>> now = datetime(2026, 11, 15, 0, 10, tzinfo=UTC)
    >>> [f"{time:%d %H:%M}" for time in parse_period(("--from", "--to"), "23:50", "23:55", now)]
    ['14 23:50', '14 23:55']
    >>> [f"{time:%d %H:%M}" for time in parse_period(("--from", "--to"), "0:05", "9:00", now)]
    ['15 00:05', '15 09:00']
    """
    now = datetime.now(UTC) if now is None else now
    times = [_moment(*each, now) for each in zip(options, (start, end), strict=True)]
    if start and times[0] and _TIME_OF_DAY.fullmatch(start) and times[0] > now:
        times[0] -= timedelta(days=1)
        if end and times[1] and _TIME_OF_DAY.fullmatch(end) and times[1] > now:
            times[1] -= timedelta(days=1)
    return times[0], times[1]


def _moment(option: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    try:
        if found := _TIME_OF_DAY.fullmatch(text):
            hour, minute, second = (int(each or 0) for each in found.groups())
            return now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        found = _DURATION.fullmatch(text.removesuffix(" ago"))
        if found is not None and found["unit"] in UNIT_NS:
            return now - timedelta(seconds=parse_duration_s(option, text.removesuffix(" ago")))
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option} {show(text)} is not a time; write {TIME_FORMS}") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_pairs(option: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Parse an option NAME=VALUE that may be repeated. Raises ConfigError."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ConfigError(f"{option} {show(each)} is not NAME=VALUE; try {example}")
        if name in found:
            raise ConfigError(f"{option} {show(name)} is given twice")
        found[name] = value
    return found
