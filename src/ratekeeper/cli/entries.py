"""`ratekeeper entries`, `override` and `tier`: the data beside the rules.

Assignments of tiers, overrides, and entries of the allow and deny lists are rows of the rule
database. The commands use the database at --database or, without one, the admin API of the service
at --url, where the author is the name of the token.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path
from time import monotonic
from typing import IO, Annotated, Any, Final
from urllib.parse import quote

import typer

from ratekeeper.cli.common import (
    OK,
    CliCommand,
    CliGroup,
    DocumentCommand,
    JsonOption,
    ReasonOption,
    print_json,
    print_table,
    print_text,
    seconds_text,
    time_text,
    with_options,
)
from ratekeeper.cli.rules import (
    STDIN,
    AuthorOption,
    DatabaseOption,
    author_of,
    open_repository,
)
from ratekeeper.cli.service_client import ServiceClient, json_objects, service_opener
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.rules.entries import (
    ENTRY_KINDS,
    Entry,
    assignment,
    end_of,
    override_entry,
    parse_override,
)
from ratekeeper.rules.matching.lists import without_kind

PROGRESS_SECONDS: Final = 1.0
_UPLOAD_BYTES: Final = 256 * 1024
_FORMS: Final = ("csv", "json", "jsonl")

OpenService = Callable[[], ServiceClient]
FormOption = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="csv, json or jsonl. [default: by the name]"),
]

app: Final = typer.Typer(
    cls=CliGroup,
    help="Import and export assignments, overrides and list entries. Exit codes: 0 success; 1 the "
    "file has mistakes; 2 it could not be done.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # tracebacks that show variables would show passwords
)
override_app: Final = typer.Typer(
    cls=CliGroup,
    help="Other limits for one user, API key, tenant or address, until a time. Exit codes: 0 "
    "success; 2 it could not be done.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # same
)
tier_app: Final = typer.Typer(
    cls=CliGroup,
    help="The tier of one user, API key or tenant. Exit codes: 0 success; 2 it could not be done.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # same
)


# ── Import and export ──────────────────────────────────────────────────────────────────────────


class Progress:
    """Prints a line to the standard error from time to time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next_s = monotonic() + PROGRESS_SECONDS

    def __call__(self, done: int) -> None:
        """Print how much is done, if the last line is a second old."""
        if monotonic() >= self._next_s:
            self._next_s = monotonic() + PROGRESS_SECONDS
            print_text(f"{done:,} {self._what}", to_stderr=True)


@app.command("import", cls=DocumentCommand)
@with_options(service=service_opener)
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="- is the standard input.")],
    service: OpenService,
    form: FormOption = None,
    replace_overrides: Annotated[
        bool, typer.Option("--replace", help="An override replaces the one with the same id.")
    ] = False,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Import the entries of a CSV, JSON or JSON lines file: all of them, or none.

    A CSV file starts with the names of its columns: kind, subject, tier, id, rule, limits,
    multiply, until, reason, author. Without `kind`, every row is an assignment. A file with
    mistakes changes nothing, and each bad line is printed with its number.

    Exit code: 0 imported; 1 the file has mistakes; 2 it could not be done.

    Example: ratekeeper entries import customers.csv --reason "new plan"
    """
    chosen = _form_of(file, form)
    began_s = monotonic()
    with _opened(file) as content:
        if database:
            made = asyncio.run(
                _import_to(
                    database,
                    content,
                    ImportedFile("<stdin>" if file == STDIN else file, chosen, replace_overrides),
                    author_of(author),
                    reason,
                )
            )
        else:
            query = {"format": chosen, **({"replace": "true"} if replace_overrides else {})}
            with service() as client:
                parts = _parts(content, Progress("bytes sent"))
                made = client.upload("/v1/admin/entries/import", parts, query, reason)
    if as_json:
        print_json({"exit_code": OK, **made})
    else:
        taken = seconds_text(monotonic() - began_s)
        print_text(
            f"imported {made['entries']:,} entries in {taken}; "
            f"{made['changed']:,} of them are new or different"
        )


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A file to import."""

    name: str
    form: Any
    replace: bool


async def _import_to(
    database: str, content: IO[bytes], file: ImportedFile, author: str, reason: str
) -> dict[str, Any]:
    async with open_repository(database) as repository:
        # The control extra, which open_repository has checked.
        from ratekeeper.control.entries import IMPORT_ENTRIES_MAX  # noqa: PLC0415 - see above
        from ratekeeper.control.entry_files import read_entries, write_file  # noqa: PLC0415 - same

        found = await asyncio.to_thread(
            read_entries,
            content,
            file.form,
            datetime.now(UTC),
            name=file.name,
            entries_max=IMPORT_ENTRIES_MAX,
            progress=Progress("lines read"),
        )
        made = await write_file(
            repository.entries,
            found,
            author=author,
            reason=reason,
            replace=file.replace,
            progress=Progress(f"of {len(found.entries):,} entries written"),
        )
        return {"seq": made.seq, "entries": len(found.entries), "changed": made.count}


@app.command("export", cls=CliCommand)
@with_options(service=service_opener)
def export(
    service: OpenService,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="[default: the standard output]")
    ] = STDIN,
    form: FormOption = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only assignment, override, allow or deny."),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export assignments, overrides and list entries as CSV, JSON or JSON lines.

    The file can be imported. Expired overrides are left out. With --json, the format is json.

    Exit code: 0 exported; 2 it could not be done.

    Example: ratekeeper entries export customers.csv --kind assignment
    """
    chosen = _form_of(file, "json" if as_json and form is None else form)
    if kind is not None and kind not in ENTRY_KINDS:
        raise ConfigError(f"--kind {show(kind)} is none of {', '.join(ENTRY_KINDS)}")
    progress, done = Progress("bytes written"), 0
    with ExitStack() as stack:
        target = stack.enter_context(_target(file))
        if database:
            parts = _exported(database, chosen, kind)
        else:
            query = {"format": chosen, **({"kind": kind} if kind else {})}
            parts = stack.enter_context(service()).download("/v1/admin/entries/export", query)
        for part in parts:
            target.write(part)
            progress(done := done + len(part))
    if file != STDIN:
        print_text(f"{file}: {done:,} bytes", to_stderr=True)


def _exported(database: str, form: Any, kind: Any) -> Iterator[bytes]:
    async def parts() -> AsyncIterator[bytes]:
        async with open_repository(database) as repository:
            from ratekeeper.control.entry_files import (  # noqa: PLC0415 - see above
                file_head,
                file_tail,
                write_entries,
            )

            yield file_head(form).encode()
            first = True
            async with aclosing(repository.entries.stream([kind] if kind else None)) as batches:
                async for batch in batches:
                    yield write_entries(batch, form, first=first).encode()
                    first = False
            yield file_tail(form).encode()

    with asyncio.Runner() as runner:
        found = parts()
        while (part := runner.run(_next(found))) is not None:
            yield part


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def _form_of(file: str, given: str | None) -> str:
    if given is None:
        ending = Path(file).suffix.removeprefix(".").lower()
        given = {"ndjson": "jsonl"}.get(ending, ending if ending in _FORMS else "csv")
    if given not in _FORMS:
        raise ConfigError(f"--format {show(given)} is none of {', '.join(_FORMS)}")
    return given


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == STDIN:
        yield sys.stdin.buffer if sys.stdin else io.BytesIO()
        return
    with ExitStack() as stack:
        try:
            content = stack.enter_context(Path(file).open("rb"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{file!r} cannot be read: {why}") from None
        yield content


@contextmanager
def _target(file: str) -> Iterator[IO[bytes]]:
    if file == STDIN:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # A new file in place of the old one, so that a failure leaves no half of it.
    part = Path(f"{file}.part")
    try:
        with part.open("wb") as content:
            yield content
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _parts(content: IO[bytes], progress: Progress) -> Iterator[bytes]:
    done = 0
    while part := content.read(_UPLOAD_BYTES):
        yield part
        progress(done := done + len(part))


# ── Overrides ──────────────────────────────────────────────────────────────────────────────────

_HEADINGS: Final = ("ID", "FOR", "RULE", "LIMITS", "UNTIL", "REASON", "AUTHOR")
_OWNERS: Final = ("user", "api_key", "tenant", "ip")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the override.")]


def override_data(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="user:42, api_key:sk_1, tenant:acme or ip:203.0.113.7.",
        ),
    ],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why it is made; required.")],
    multiply: Annotated[
        float | None, typer.Option(metavar="N", help="Multiply the limits of the rule.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE", help="Other limits: 100/minute; can be repeated."),
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long: 2h, 30d.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="The end: 2030-12-31T23:59:59Z.")
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help="Only this rule. [default: each that counts by the subject]"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="[default: a random one]")
    ] = None,
) -> dict[str, Any]:
    """Return the override that the options describe, as plain data. Raises ConfigError."""
    end = duration if until is None else until
    if end is None or (duration and until):
        raise ConfigError("give --for or --until, one of them; for example --for 2h")
    if (multiply is None) == (not limit):
        raise ConfigError("give --multiply or --limit, one of them; for example --multiply 5")
    given = {"id": name, "rule": rule, "multiply": multiply, "limits": limit or None}
    return {
        "for": owner_of(subject),
        **{field: value for field, value in given.items() if value is not None},
        "until": end_of(end, datetime.now(UTC)).isoformat(),
        "reason": reason,
    }


def owner_of(subject: str) -> dict[str, str]:
    """Return the subject of an override as the document writes it. Raises ConfigError.

    >>> owner_of("user:42"), owner_of("203.0.113.7")
    ({'user': '42'}, {'ip': '203.0.113.7'})
    """
    attribute, colon, value = subject.partition(":")
    if colon and attribute in _OWNERS and value:
        return {attribute: value}
    try:
        ip_network(subject)
    except ValueError:
        if not colon and subject:
            raise ConfigError(f"subject {show(subject)} {without_kind(subject)}") from None
        raise ConfigError(
            f"{show(subject)} is not a subject; write user:42, api_key:sk_1, tenant:acme or "
            f"ip:203.0.113.7"
        ) from None
    return {"ip": subject}


@override_app.command("create", cls=CliCommand)
@with_options(override=override_data, service=service_opener)
def create(
    override: dict[str, Any],
    service: OpenService,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give one user, API key, tenant or address other limits, until a time.

    Exit code: 0 created; 2 it could not be done.

    Example: ratekeeper override create tenant:acme --multiply 5 --for 2h --reason "launch"

    Example: ratekeeper override create user:42 --limit 10/second --until 2030-12-31T23:59:59Z
    --rule orders --reason "migrates an archive"
    """
    if database:
        made = asyncio.run(_create_in(database, override, author_of(author)))
    else:
        body = {"id": f"ov_{secrets.token_hex(6)}", **override}
        with service() as client:
            client.call("POST", "/v1/admin/overrides", body=body)
        made = body
    _print_override(made, as_json, done="created")


async def _create_in(database: str, data: dict[str, Any], author: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    entry = override_entry(parse_override({**data, "author": author}, None, now), now)
    async with open_repository(database) as repository:
        await repository.entries.put(entry, author=author, reason=data["reason"])
    return {"id": entry.key, **json.loads(entry.data)}


@override_app.command("list", cls=CliCommand)
@with_options(service=service_opener)
def list_(
    service: OpenService,
    subject: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Only those of this subject.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the overrides that have not ended.

    Exit code: 0 listed; 2 it could not be done.

    Example: ratekeeper override list --subject tenant:acme
    """
    wanted = None if subject is None else owner_of(subject)
    found = [
        each for each in _overrides(database, service) if wanted is None or each["for"] == wanted
    ]
    if as_json:
        print_json({"exit_code": OK, "overrides": found})
    elif found:
        print_table(_HEADINGS, [_override_row(each) for each in found])
    else:
        print_text("there are no overrides")


@override_app.command("show", cls=CliCommand)
@with_options(service=service_opener)
def show_(
    name: IdArgument,
    service: OpenService,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one override.

    Exit code: 0 shown; 2 it could not be done.

    Example: ratekeeper override show ov_5f2c91d07b3a
    """
    if database:
        found = asyncio.run(_override_in(database, name))
    else:
        with service() as client:
            path = f"/v1/admin/overrides/{quote(name, safe='')}"
            found = client.call("GET", path, expected="for")
    _print_override(found, as_json)


async def _override_in(database: str, name: str) -> dict[str, Any]:
    async with open_repository(database) as repository:
        entry = await repository.entries.get("override", name)
    if entry is None:
        raise ConfigError(f"there is no override {show(name)}; it has perhaps ended")
    return {"id": entry.key, **json.loads(entry.data)}


@override_app.command("delete", cls=CliCommand)
@with_options(service=service_opener)
def delete(
    name: IdArgument,
    service: OpenService,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Delete an override before its end.

    Exit code: 0 deleted; 2 it could not be done.

    Example: ratekeeper override delete ov_5f2c91d07b3a --reason "the launch is over"
    """
    if database:
        asyncio.run(_delete_from(database, name, author_of(author), reason))
    else:
        with service() as client:
            client.call("DELETE", f"/v1/admin/overrides/{quote(name, safe='')}", reason=reason)
    if as_json:
        print_json({"exit_code": OK, "deleted": name})
    else:
        print_text(f"deleted: {name}")


async def _delete_from(database: str, name: str, author: str, reason: str) -> None:
    async with open_repository(database) as repository:
        await repository.entries.remove("override", name, author=author, reason=reason)


def _overrides(database: str | None, service: OpenService) -> list[dict[str, Any]]:
    """Return the overrides that have not ended, by their ids."""
    if database:
        text = b"".join(_exported(database, "json", "override"))
    else:
        with service() as client:
            query = {"format": "json", "kind": "override"}
            text = b"".join(client.download("/v1/admin/entries/export", query))
    try:
        found = json_objects(json.loads(text))
        return [
            {"id": each["id"], "for": owner_of(each["subject"]), **_rest(each)} for each in found
        ]
    except (ValueError, KeyError, TypeError):
        raise ConfigError("the answer is not a list of overrides; is --url right?") from None


def _rest(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in row if name not in {"kind", "subject", "id"}}


def _print_override(data: dict[str, Any], as_json: bool, done: str = "") -> None:
    if as_json:
        print_json({"exit_code": OK, **data})
        return
    if done:
        print_text(f"{done}: {data['id']}")
    print_table(_HEADINGS, [_override_row(data)])


def _override_row(data: Mapping[str, Any]) -> tuple[str, ...]:
    limits = data.get("limits") or []
    shown = "; ".join(each if isinstance(each, str) else json.dumps(each) for each in limits)
    until = datetime.fromisoformat(data["until"])
    return (
        str(data["id"]),
        ", ".join(f"{name}:{value}" for name, value in data["for"].items()),
        str(data.get("rule", f"every rule by {next(iter(data['for']))}")),
        shown or f"× {data.get('multiply', 1):g}",
        time_text(until),
        " ".join(str(data.get("reason", "")).split()),
        str(data.get("author", "")),
    )


# ── Tiers ──────────────────────────────────────────────────────────────────────────────────────

SubjectArgument = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="user:42, api_key:sk_1 or tenant:acme.")
]


@tier_app.command("assign", cls=CliCommand)
@with_options(service=service_opener)
def assign(
    subject: SubjectArgument,
    tier: Annotated[str, typer.Argument(metavar="TIER", help="A tier of the rules: pro.")],
    service: OpenService,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Assign a tier to a user, an API key or a tenant, in place of the tier that it had.

    Exit code: 0 assigned; 2 it could not be done.

    Example: ratekeeper tier assign user:42 pro --reason "new plan"
    """
    entry = assignment(subject, tier)
    if database:
        asyncio.run(_change(database, author, reason, put=entry))
    else:
        with service() as client:
            path = f"/v1/admin/assignments/{quote(subject, safe='')}"
            client.call("PUT", path, body={"tier": tier, "reason": reason})
    if as_json:
        print_json({"exit_code": OK, "subject": subject, "tier": tier})
    else:
        print_text(f"{subject} has the tier {tier}")


@tier_app.command("remove", cls=CliCommand)
@with_options(service=service_opener)
def remove(
    subject: SubjectArgument,
    service: OpenService,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Remove the assigned tier of a user, an API key or a tenant.

    Exit code: 0 removed; 2 it could not be done.

    Example: ratekeeper tier remove user:42 --reason "the plan has ended"
    """
    if database:
        asyncio.run(_change(database, author, reason, removed=subject))
    else:
        with service() as client:
            path = f"/v1/admin/assignments/{quote(subject, safe='')}"
            client.call("DELETE", path, reason=reason)
    if as_json:
        print_json({"exit_code": OK, "subject": subject, "tier": None})
    else:
        print_text(f"{subject} has no assigned tier")


async def _change(
    database: str, author: str | None, reason: str, *, put: Entry | None = None, removed: str = ""
) -> None:
    async with open_repository(database) as repository:
        if put is not None:
            await repository.entries.put(put, author=author_of(author), reason=reason)
        else:
            await repository.entries.remove(
                "assignment", removed, author=author_of(author), reason=reason
            )
