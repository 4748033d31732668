"""The arguments that several commands of `tollkeeper rules` have in common."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tollkeeper.cli.rules_print import TROUBLE, say_json

_URL: Final = re.compile(r"\S*://\S*")

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A rule document; - is the standard input.")
]
MaybeFile = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A rule document; - is the standard input.")
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="TOLLKEEPER_DATABASE",
        metavar="URL",
        help="sqlite:///rules.db or postgresql://user@host/name. In the variable, a password is "
        "seen by nobody who lists the machine's processes.",
    ),
]
AuthorOption = Annotated[
    str | None,
    typer.Option(
        "--author",
        envvar="TOLLKEEPER_AUTHOR",
        metavar="NAME",
        help="Who makes the change. [default: the login name]",
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why.")]
ExpectedOption = Annotated[
    int | None,
    typer.Option(
        "--expected",
        metavar="N",
        help="The version that this is a change of; 0: there is none yet. Exit code 3 if there is "
        "another. [default: the current one when the command starts]",
    ),
]
AnnounceOption = Annotated[
    str | None,
    typer.Option(
        "--announce",
        envvar="TOLLKEEPER_ANNOUNCE",
        metavar="URI",
        help="The Redis store of the nodes: they hear of the new version at once.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def was_typed(context: typer.Context, name: str) -> bool:
    """Was this option given on the command line, and not by a variable or not at all?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class Command(TyperCommand):
    """A command that repeats no URL, and whose `--json` holds for a wrong argument too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does."""
        as_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # its class is not one that typer gives a name to
            if isinstance(said := getattr(error, "message", None), str):
                error.message = self.without_secrets(said)  # type: ignore[attr-defined]  # seen
                if as_json:
                    say_json({"exit_code": TROUBLE, "error": _words(error)})
                    raise typer.Exit(TROUBLE) from None
            raise

    def without_secrets(self, said: str) -> str:
        """What is told of a wrong argument repeats it, and a URL may hold a password."""
        return _URL.sub("a URL", said)


def _words(error: Any) -> str:
    """With which option it is, where the error knows."""
    words: str = error.format_message()
    return words


class Group(TyperGroup):
    """Commands, and a group of them that repeats no URL."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer does."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:  # its class is not one that typer gives a name to
            if isinstance(said := getattr(error, "message", None), str):
                error.message = _URL.sub("a URL", said)  # type: ignore[attr-defined]  # just seen
            raise
