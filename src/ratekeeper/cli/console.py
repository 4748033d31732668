"""`ratekeeper console`: log in to the console of a service, and list and end its sessions.

These commands use the data folder of the service and not its API: the owner of the folder needs no
token.
"""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from ratekeeper.cli.common import (
    OK,
    CliCommand,
    CliGroup,
    JsonOption,
    print_json,
    print_table,
    print_text,
    time_text,
)
from ratekeeper.cli.service_client import URL_DEFAULT, UrlOption, checked_url
from ratekeeper.cli.tokens import DataOption, FileOption, tokens_path
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.service.console.sessions import (
    LINK_SECONDS,
    Session,
    Sessions,
    link_url,
    login_name,
)
from ratekeeper.service.http.tokens import Role, Tokens
from ratekeeper.service.process.settings import state_folder

app: Final = typer.Typer(
    cls=CliGroup,
    help="Log in to the console of a service on this machine; list and end its sessions.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show secrets.
    pretty_exceptions_enable=False,
)

_HEADINGS: Final = ("SESSION", "NAME", "ROLE", "SINCE", "UNTIL")
# Of the name of a session, this much is shown: enough to tell 1,000 sessions apart.
_SHOWN: Final = 12
_ROLES: Final = ("admin", "read")


@app.command(cls=CliCommand)
def link(
    role: Annotated[
        str,
        typer.Option(
            metavar="admin|read", help="read: see everything; admin: also change everything."
        ),
    ] = "admin",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The name for the audit log. [default: the login name]"),
    ] = None,
    url: UrlOption = URL_DEFAULT,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a new one-time link that logs in to the console, for 15 minutes.

    The browser that opens it first gets the role, so keep it secret. --url is the address under
    which the browser reaches the service.

    Example: ratekeeper console link --data build/run

    Example: ratekeeper console link --role read --name ann --url https://limits.example
    """
    if role not in _ROLES:
        raise ConfigError(f"--role {show(role)} has no use in the console; choose admin or read")
    address = checked_url(url).geturl()
    folder = _own_folder(data)
    sessions = Sessions.of(folder)
    if not any(folder.glob("run-*")):
        print_text(f"no service runs with the folder {folder} now", to_stderr=True)
    code = sessions.make_link(name or login_name(), cast("Role", role))
    found = link_url(address, code)
    if as_json:
        print_json({"exit_code": OK, "link": found, "expires_seconds": LINK_SECONDS})
        return
    # Only the link goes to the standard output, so that a script can read it.
    minutes = LINK_SECONDS // 60
    print_text(f"a link for the role {role}, once, within {minutes} minutes:", to_stderr=True)
    print_text(found)


@app.command(cls=CliCommand)
def sessions(
    data: DataOption = None, tokens: FileOption = None, as_json: JsonOption = False
) -> None:
    """List the sessions of the console: who has logged in, with which role, since and until when.

    Example: ratekeeper console sessions --data build/run
    """
    found = _sessions(data, tokens)
    if as_json:
        print_json({"exit_code": OK, "sessions": [_data(each) for each in found]})
    elif found:
        print_table(_HEADINGS, [_row(each) for each in found])
    else:
        print_text("the console has no sessions; log in with: ratekeeper console link")


@app.command(cls=CliCommand)
def end(
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="SESSION", help="The session, as `ratekeeper console sessions` shows it."
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="End all sessions, and all unused links.")
    ] = False,
    data: DataOption = None,
    tokens: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a session of the console, or all. The next request of its browser has to log in.

    Example: ratekeeper console end 3f2a91c05d7e

    Example: ratekeeper console end --all
    """
    if (session is None) == (not all_):
        raise ConfigError(
            "name one session, as `ratekeeper console sessions` shows it, or give --all"
        )
    kept = Sessions.of(_own_folder(data))
    if session is None:
        count = kept.end_all()
        what = f"{count} sessions, and all unused links"
    else:
        chosen = _named(session, _sessions(data, tokens))
        count, what = int(kept.end(chosen.key)), f"{_id(chosen)} ({chosen.token.name})"
    if as_json:
        print_json({"exit_code": OK, "ended": count})
    else:
        print_text(f"ended: {what}")


def _own_folder(data: str | None) -> Path:
    """Return the data folder. Raises ConfigError if it is not one, or of another user's service.

    A file that another user (also root) creates there could not be read by the service. While the
    service runs, it has a folder of its own user there; a volume may belong to another user.
    """
    folder = Path(data).expanduser() if data else state_folder()
    advice = "give the folder of the running service: --data FOLDER (its log shows the folder)"
    try:
        owned = next(folder.glob("run-*"), folder)
        number = owned.stat().st_uid
    except OSError as error:
        raise ConfigError(f"--data {folder}: {error.strerror}; {advice}") from None
    if not folder.is_dir():
        raise ConfigError(f"--data {folder} is not a folder; {advice}")
    if number != os.geteuid():
        user = _user_name(owned, number)
        raise ConfigError(
            f"{owned} belongs to the user {user}, as whom the service runs; run: "
            f"sudo -u {shlex.quote(user)} ratekeeper console … --data {shlex.quote(str(folder))}"
        )
    return folder


def _user_name(folder: Path, number: int) -> str:
    try:
        return folder.owner()
    except (KeyError, OSError):
        return f"#{number}"


def _sessions(data: str | None, tokens: str | None) -> list[Session]:
    folder = _own_folder(data)
    return Sessions.of(folder).all(Tokens.load(tokens_path(tokens, str(folder))))


def _named(text: str, found: list[Session]) -> Session:
    chosen = [each for each in found if _whole_id(each).startswith(text)]
    if len(chosen) != 1 or not text:
        which = "no session" if not chosen or not text else f"{len(chosen)} sessions"
        raise ConfigError(
            f"{which} {show(text)}; list them with: ratekeeper console sessions, and name one"
        )
    return chosen[0]


def _whole_id(session: Session) -> str:
    return session.key.partition("-")[2]


def _id(session: Session) -> str:
    return _whole_id(session)[:_SHOWN]


def _data(session: Session) -> dict[str, Any]:
    return {
        "session": _id(session),
        "name": session.token.name,
        "role": session.token.role,
        "since": time_text(_time(session.created_s)),
        "until": time_text(_time(session.expires_s)),
    }


def _row(session: Session) -> tuple[str, ...]:
    return tuple(str(each) for each in _data(session).values())


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
