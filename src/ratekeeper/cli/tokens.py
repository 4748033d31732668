"""`ratekeeper token`: create, list and remove the tokens of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from ratekeeper.cli.common import (
    OK,
    CliCommand,
    CliGroup,
    JsonOption,
    parse_pairs,
    print_json,
    print_table,
    print_text,
)
from ratekeeper.service.http.tokens import Role, Token, create_token, read_tokens, remove_token
from ratekeeper.service.process.settings import state_folder

app: Final = typer.Typer(
    cls=CliGroup,
    help="Create, list and remove the tokens of a service. It notices a change within a second.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show secrets.
    pretty_exceptions_enable=False,
)

_HEADINGS: Final = ("NAME", "ROLE", "SCOPE", "CREATED")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.")]
FileOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        envvar="RATEKEEPER_TOKENS",
        metavar="FILE",
        help="The token file. [default: tokens.json in the data folder]",
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        envvar="RATEKEEPER_DATA",
        metavar="FOLDER",
        help="The data folder of the service. [default: $XDG_STATE_HOME/ratekeeper]",
    ),
]


@app.command(cls=CliCommand)
def create(
    name: NameArgument,
    role: Annotated[
        str,
        typer.Option(
            metavar="check|limit|read|admin",
            help="check: check requests and read quotas; limit: also give limits with the call; "
            "read: read quotas and the admin API; admin: everything.",
        ),
    ],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only for requests with this value, such as tenant=acme; can be repeated.",
        ),
    ] = None,
    tokens: FileOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print its secret. It is not stored, so it is printed only this once.

    Example: ratekeeper token create checkout --role check --scope tenant=acme
    """
    path = tokens_path(tokens, data)
    secret = create_token(
        path, name, cast("Role", role), parse_pairs("--scope", scope or [], "tenant=acme")
    )
    if as_json:
        print_json({"exit_code": OK, "name": name, "role": role, "token": secret})
    else:
        # Only the secret goes to the standard output, so that a script can read it.
        print_text(
            f"a token with the role {role}, in {path}; store its secret safely:", to_stderr=True
        )
        print_text(secret)


@app.command("list", cls=CliCommand)
def list_(tokens: FileOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """List the tokens with their roles and scopes, without their secrets.

    Example: ratekeeper token list
    """
    path = tokens_path(tokens, data)
    found = read_tokens(path) if path.exists() else ()
    if as_json:
        print_json({"exit_code": OK, "tokens": [_data(each) for each in found]})
    elif found:
        print_table(_HEADINGS, [_row(each) for each in found])
    else:
        print_text(
            f"{path} has no tokens; create one with: ratekeeper token create NAME --role check"
        )


@app.command(cls=CliCommand)
def remove(
    name: NameArgument,
    tokens: FileOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a token. The service rejects it within a second.

    Example: ratekeeper token remove checkout
    """
    remove_token(tokens_path(tokens, data), name)
    if as_json:
        print_json({"exit_code": OK, "removed": name})
    else:
        print_text(f"removed: {name}")


def tokens_path(tokens: str | None, data: str | None) -> Path:
    """Return the token file of the options."""
    if tokens:
        return Path(tokens)
    return (Path(data) if data else state_folder()) / "tokens.json"


def _data(token: Token) -> dict[str, Any]:
    scope = dict(token.scope)
    return {"name": token.name, "role": token.role, "scope": scope, "created": token.created}


def _row(token: Token) -> tuple[str, ...]:
    scope = ", ".join(f"{name}={value}" for name, value in token.scope.items())
    return token.name, token.role, scope or "-", token.created
