"""The command `ratekeeper` and its subcommands.

A subcommand is imported when it runs or for the list of all: importing every one would double the
processor time until `ratekeeper serve` reads its options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.main import get_group

from ratekeeper.cli.common import CliCommand, CliGroup
from ratekeeper.core.version import __version__

# The commands in the order of `--help`: the module in this folder, the name there, and the class
# if it is not CliCommand.
_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "serve": ("serve", "serve", "ServeCommand"),
    "check": ("check", "check"),
    "limit": ("check", "limit"),
    "quota": ("check", "quota"),
    "reset": ("check", "reset"),
    "grant": ("check", "grant"),
    "top": ("top", "top"),
    "fleet": ("fleet", "fleet"),
    "regions": ("regions", "regions"),
    "blocklist": ("blocklist", "blocklist"),
    "doctor": ("doctor", "doctor"),
    "reconcile": ("reconcile", "reconcile_command", "ReconcileCommand"),
    "rules": ("rules", "app"),
    "entries": ("entries", "app"),
    "tier": ("entries", "tier_app"),
    "override": ("entries", "override_app"),
    "token": ("tokens", "app"),
    "console": ("console", "app"),
    "load": ("load", "app"),
    "metrics": ("metrics", "app"),
    "records": ("records", "app"),
}


@cache
def _command(name: str) -> Any:
    """Import a command and build its options."""
    module, attribute, *classes = _COMMANDS[name]
    source = vars(import_module(f"ratekeeper.cli.{module}"))
    built = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found := source[attribute], typer.Typer):
        built.add_typer(found, name=name)
    else:
        built.command(name, cls=source[classes[0]] if classes else CliCommand)(found)
    return get_group(built).commands[name]


class _LazyCommands(Mapping[str, Any]):
    """All commands by their names. A command is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _CommandLine(CliGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _LazyCommands()  # type: ignore[assignment]  # nothing adds a command


app: Final = typer.Typer(
    cls=_CommandLine,
    help="Rate limits that are never exceeded, at the speed of local memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show passwords.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ratekeeper {__version__}")
        raise typer.Exit


@app.callback()
def ratekeeper(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Rate limits that are never exceeded, at the speed of local memory."""
