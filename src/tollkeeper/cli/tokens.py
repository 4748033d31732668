"""`tollkeeper token`: make, list and remove the tokens that the service asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from tollkeeper.cli.rules_options import Command, Group, JsonOption
from tollkeeper.cli.rules_print import OK, say, say_json, say_table, telling
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.service.http.tokens import Role, Token, create_token, read_tokens, remove_token
from tollkeeper.service.process.settings import state_folder

app: Final = typer.Typer(
    cls=Group,
    help="The tokens that a service asks for. It sees a change within a second.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show secrets.
    pretty_exceptions_enable=False,
)

_HEADINGS: Final = ("NAME", "ROLE", "SCOPE", "CREATED")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")]
FileOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        envvar="TOLLKEEPER_TOKENS",
        metavar="FILE",
        help="The token file. [default: tokens.json in the data folder]",
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        envvar="TOLLKEEPER_DATA",
        metavar="FOLDER",
        help="The data folder of the service. [default: $XDG_STATE_HOME/tollkeeper]",
    ),
]


@app.command(cls=Command)
def create(
    name: NameArgument,
    role: Annotated[
        str,
        typer.Option(
            metavar="check|read|admin",
            help="check: spend and look at quotas; read: look at quotas and at what admins see; "
            "admin: everything.",
        ),
    ],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only for requests with this value, such as tenant=acme; may be given again.",
        ),
    ] = None,
    tokens: FileOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token, and show its secret: this once, for it is kept nowhere.

    Example: tollkeeper token create checkout --role check --scope tenant=acme
    """
    with telling(as_json):
        path = _path(tokens, data)
        secret = create_token(path, name, cast("Role", role), _scope(scope or []))
        if as_json:
            say_json({"exit_code": OK, "name": name, "role": role, "token": secret})
        else:
            # The secret alone goes to the standard output, so that a script can take it.
            say(f"a token with the role {role}, in {path}; keep it well:", to_stderr=True)
            say(secret)


@app.command("list", cls=Command)
def list_(tokens: FileOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Show who has a token, and what for. No secrets: nobody has them but their owners.

    Example: tollkeeper token list
    """
    with telling(as_json):
        path = _path(tokens, data)
        found = read_tokens(path) if path.exists() else ()
        if as_json:
            say_json({"exit_code": OK, "tokens": [_data(each) for each in found]})
        elif found:
            say_table(_HEADINGS, [_row(each) for each in found])
        else:
            say(f"{path} has no tokens; make one with: tollkeeper token create NAME --role check")


@app.command(cls=Command)
def remove(
    name: NameArgument,
    tokens: FileOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a token's rights away. A service refuses it within a second.

    Example: tollkeeper token remove checkout
    """
    with telling(as_json):
        remove_token(_path(tokens, data), name)
        if as_json:
            say_json({"exit_code": OK, "removed": name})
        else:
            say(f"removed: {name} may do nothing any more")


def _path(tokens: str | None, data: str | None) -> Path:
    if tokens:
        return Path(tokens)
    return (Path(data) if data else state_folder()) / "tokens.json"


def _scope(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ConfigError(f"--scope {show(each)} is not FIELD=VALUE; try tenant=acme")
        if name in found:
            raise ConfigError(f"--scope {show(name)} is given twice")
        found[name] = value
    return found


def _data(token: Token) -> dict[str, Any]:
    scope = dict(token.scope)
    return {"name": token.name, "role": token.role, "scope": scope, "created": token.created}


def _row(token: Token) -> tuple[str, ...]:
    scope = ", ".join(f"{name}={value}" for name, value in token.scope.items())
    return token.name, token.role, scope or "-", token.created
