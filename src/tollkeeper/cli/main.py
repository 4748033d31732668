"""The command line: arguments in, findings out. What they mean is worked out elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tollkeeper.cli.doctor import Report, examine
from tollkeeper.cli.metrics import app as metrics
from tollkeeper.cli.reconcile_command import ReconcileCommand, reconcile_command
from tollkeeper.cli.remote import COMMANDS, RemoteCommand
from tollkeeper.cli.rules import app as rules
from tollkeeper.cli.rules_options import Command
from tollkeeper.cli.rules_print import say_json, telling
from tollkeeper.cli.serve import serve
from tollkeeper.cli.tokens import app as tokens
from tollkeeper.cli.top import top
from tollkeeper.core.version import __version__

app: Final = typer.Typer(
    help="Rate limits that are never exceeded, at the speed of local memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show passwords.
    pretty_exceptions_enable=False,
)

app.add_typer(rules, name="rules")
app.add_typer(tokens, name="token")
app.add_typer(metrics, name="metrics")
app.command(cls=Command)(serve)
for command in (*COMMANDS, top):
    app.command(cls=RemoteCommand)(command)
app.command("reconcile", cls=ReconcileCommand)(reconcile_command)

_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tollkeeper {__version__}")
        raise typer.Exit


@app.callback()
def tollkeeper(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Rate limits that are never exceeded, at the speed of local memory."""


@app.command(cls=Command)
def doctor(
    store: Annotated[
        str,
        typer.Option(
            envvar="TOLLKEEPER_STORE",
            metavar="URI",
            help="The store, as given to a Limiter. In the variable, a password is seen by nobody "
            "who lists the machine's processes.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    prefix: Annotated[
        str | None, typer.Option(help="What every key in Redis begins with.", metavar="TEXT")
    ] = None,
    deadline_ms: Annotated[
        str | None, typer.Option(help="How long a check may take.", metavar="MS")
    ] = None,
    connect_ms: Annotated[
        str | None, typer.Option(help="How long a connection may take.", metavar="MS")
    ] = None,
) -> None:
    """Look at a store, say what is wrong, and what to do about it.

    Connects to every server, and looks at login, version, permissions, scripts, persistence,
    eviction, memory, clocks, replication, Sentinels, the cluster's state and the round trip. It
    counts a subject of its own for a moment, and leaves nothing behind.

    Exit code: 0 if all is well or there are only warnings, 1 if there are problems, 2 if the store
    cannot be connected to or an argument is wrong.

    Example: tollkeeper doctor --store redis://localhost:6379

    Example: tollkeeper doctor --store redis+cluster://h1:7000,h2:7000 --json
    """
    with telling(as_json):
        report = examine(store, prefix=prefix, deadline_ms=deadline_ms, connect_ms=connect_ms)
        if as_json:
            say_json(_document(report))
        else:
            _print(report)
        raise typer.Exit(report.exit_code)


def _document(report: Report) -> dict[str, object]:
    return {
        "tollkeeper": __version__,
        "store": report.store,
        "exit_code": report.exit_code,
        "findings": [asdict(finding) for finding in report.findings],
    }


def _print(report: Report) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in report.findings:
        # As Text: what is in brackets is an address, and no markup.
        level = Text(finding.level, style=_COLOURS[finding.level])
        found = Text(finding.found)
        if finding.nodes:
            found.append(f" ({', '.join(finding.nodes)})")
        remedy = Text(f"-> {finding.remedy}", style="bold") if finding.remedy else None
        if console.is_terminal:
            table.add_row(level, finding.check, found)
            if remedy is not None:
                table.add_row("", "", remedy)
            continue
        # Whoever reads a file or a pipe wants a line to be a line, however long.
        console.print(Text.assemble(f"{finding.level:9}{finding.check:16}", found), soft_wrap=True)
        if remedy is not None:
            console.print(Text.assemble(" " * 25, remedy), soft_wrap=True)
    if console.is_terminal:
        console.print(table)
    counts = Counter(finding.level for finding in report.findings)
    summary = f"{report.store}: problems {counts['problem']}, warnings {counts['warning']}"
    console.print(Text(summary), soft_wrap=True)
