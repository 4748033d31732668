"""The command `tollkeeper` and its subcommands."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tollkeeper.cli import check
from tollkeeper.cli.blocklist import blocklist
from tollkeeper.cli.common import CliCommand, CliGroup
from tollkeeper.cli.doctor import doctor
from tollkeeper.cli.entries import app as entries
from tollkeeper.cli.entries import override_app as override
from tollkeeper.cli.fleet import fleet
from tollkeeper.cli.load import app as load
from tollkeeper.cli.metrics import app as metrics
from tollkeeper.cli.reconcile import ReconcileCommand, reconcile_command
from tollkeeper.cli.records import app as records
from tollkeeper.cli.regions import regions
from tollkeeper.cli.rules import app as rules
from tollkeeper.cli.serve import serve
from tollkeeper.cli.simulate import app as simulate
from tollkeeper.cli.tokens import app as tokens
from tollkeeper.cli.top import top
from tollkeeper.core.version import __version__

app: Final = typer.Typer(
    cls=CliGroup,
    help="Rate limits that are never exceeded, at the speed of local memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show passwords.
    pretty_exceptions_enable=False,
)

app.add_typer(rules, name="rules")
app.add_typer(entries, name="entries")
app.add_typer(override, name="override")
app.add_typer(tokens, name="token")
app.add_typer(load, name="load")
app.add_typer(metrics, name="metrics")
app.add_typer(records, name="records")
app.add_typer(simulate, name="simulate")
for command in (serve, *check.COMMANDS, top, fleet, regions, blocklist, doctor):
    app.command(cls=CliCommand)(command)
app.command("reconcile", cls=ReconcileCommand)(reconcile_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tollkeeper {__version__}")
        raise typer.Exit


@app.callback()
def tollkeeper(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Rate limits that are never exceeded, at the speed of local memory."""
