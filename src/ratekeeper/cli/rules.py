"""`ratekeeper rules`: validate, compare, apply and explain rule documents.

A document comes from a file, from the standard input, or from a database of versions. Databases
need libraries that files do not need, so those are imported when a command uses a database.

`apply`, `rollback`, `promote` and `demote` create a new version. They compare with the current
version first and fail with exit code 3 if another person changes the rules in between. `common.py`
lists the exit codes.
"""

from __future__ import annotations

import asyncio
import getpass
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

import typer

from ratekeeper.cli.check import request_fields
from ratekeeper.cli.common import (
    OK,
    PROBLEMS,
    TIME_FORMS,
    TROUBLE,
    CliCommand,
    CliGroup,
    DocumentCommand,
    JsonOption,
    ReasonOption,
    UndoesChanges,
    parse_period,
    print_json,
    print_table,
    print_text,
    seconds_text,
    time_text,
    with_options,
)
from ratekeeper.cli.service_client import (
    URL_DEFAULT,
    CaOption,
    ServiceClient,
    TimeoutOption,
    TokenOption,
    UrlOption,
    json_objects,
    one_line,
    override_origin,
    service_client,
    service_opener,
)
from ratekeeper.control import edits
from ratekeeper.control.edits import unified_diff
from ratekeeper.control.follow import announce
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.errors import (
    ConfigError,
    SafetyFinding,
    StoreError,
    UnsafeChange,
    VersionConflict,
    quoted,
)
from ratekeeper.core.model import Decision, Request
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.decide.regional import MemoryRegional, Shares
from ratekeeper.decide.store import SharedStore, Store
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.memory import MemoryAuthority
from ratekeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from ratekeeper.fleet.settings import Fleet
from ratekeeper.fleet.store import FleetStore
from ratekeeper.limiter import Limiter
from ratekeeper.regions.store import only_region
from ratekeeper.rules.document.grammar import document_schema, limit_data, to_data
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import DocumentError, DocumentPositions, read
from ratekeeper.rules.document.safety import advice, findings, new_findings
from ratekeeper.rules.document.tree import (
    BYTES_MAX,
    TOO_LONG,
    DocumentProblem,
)
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.rules.explain import Explanation, RuleExplained

if TYPE_CHECKING:
    from ratekeeper.control.audit import AuditedChange, AuditPage
    from ratekeeper.control.database import Database
    from ratekeeper.control.repository import Repository, Version

STDIN: Final = "-"
_SQLITE: Final = "sqlite:///"
# No version number has more digits, and int() of a million digits takes seconds.
_DIGITS_MAX: Final = 10
# How many versions `apply` looks back for the one that was applied last.
_HISTORY_MAX: Final = 1_000
_SHOWN_MAX: Final = 10
# A person waits for the answer, and a first connection takes longer than a check.
_EXPLAIN_DEADLINE_MS: Final = 2_000
_PERIOD: Final = ("--since", "--until")
# A service replays for up to 10 s.
_PREVIEW_TIMEOUT_S: Final = 30.0
# Without a store, a global rule is explained as if there were one region.
_ONLY_SHARE: Final = Shares(1, Fraction(1), Fraction(1), 0, ())

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
        envvar="RATEKEEPER_DATABASE",
        metavar="URL",
        help="sqlite:///rules.db or postgresql://user@host/name. If it contains a password, use "
        "the variable: other users can see the arguments of a process.",
    ),
]
AuthorOption = Annotated[
    str | None,
    typer.Option(
        "--author",
        envvar="RATEKEEPER_AUTHOR",
        metavar="NAME",
        help="The author of the change. [default: the login name]",
    ),
]
ExpectedOption = Annotated[
    int | None,
    typer.Option(
        "--expected",
        metavar="N",
        help="The version that you have seen; 0 if there was none. If the current version is "
        "another one, nothing changes and the exit code is 3. [default: the version that is "
        "current when the command starts]",
    ),
]
AnnounceOption = Annotated[
    str | None,
    typer.Option(
        "--announce",
        envvar="RATEKEEPER_ANNOUNCE",
        metavar="URI",
        help="The Redis store of the nodes: they load the new version at once.",
    ),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Make the change even if it is unsafe.")]
RuleArgument = Annotated[str, typer.Argument(metavar="RULE", help="The id of the rule.")]

app: Final = typer.Typer(
    cls=CliGroup,
    help="Validate, compare, apply and explain rule documents. Exit codes: 0 success; 1 problems "
    "or differences; 2 it could not be done; 3 another person changed the rules at the same time.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show passwords.
    pretty_exceptions_enable=False,
)


# ── Where documents come from ──────────────────────────────────────────────────────────────────


class UnreadableFile(ConfigError):
    """A file cannot be read, so nothing is known about the document in it."""


@dataclass(frozen=True, slots=True)
class RuleSource:
    """The text of a rule document, and its name in messages."""

    name: str
    text: str
    number: int | None = None
    """The number of a version; 0: no version yet; None: a file."""

    def document(self) -> Document:
        """Parse the text. Raises DocumentError."""
        return Document() if self.number == 0 else read(self.text, self.name)

    def canonical(self) -> str:
        """Return the text as Ratekeeper writes it; a version that it cannot read, as it is.

        Raises DocumentError for a file.
        """
        try:
            return "" if self.number == 0 else to_yaml(self.document())
        except DocumentError:
            if self.number is None:
                raise
            return self.text


def source_from_file(name: str) -> RuleSource:
    """Read a file, or the standard input if its name is `-`. Reads once: it may be a pipe.

    Raises UnreadableFile, or DocumentError if the content is too long or not text.
    """
    shown = "<stdin>" if name == STDIN else name
    if "://" in name:
        # The URL is not repeated: it may contain a password.
        raise UnreadableFile("this command expects a FILE, not a URL; use --database URL")
    try:
        content = _read_bytes(name)
    except IsADirectoryError:
        raise UnreadableFile(f"{shown} is a folder; give the files in it") from None
    except OSError as error:
        raise UnreadableFile(f"{shown}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null character in the name
        raise UnreadableFile(f"{shown!r}: cannot be read: {error}") from None
    if len(content) > BYTES_MAX:
        raise DocumentError((DocumentProblem(shown, 0, 0, "", TOO_LONG),))
    try:
        return RuleSource(shown, content.decode())
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8; save the file as UTF-8"
        raise DocumentError((DocumentProblem(shown, 0, 0, "", message),)) from None


def _read_bytes(name: str) -> bytes:
    """Read one byte more than a document may have, at most."""
    if name == STDIN:
        if sys.stdin is None:
            raise OSError("standard input is closed")
        return sys.stdin.buffer.read(BYTES_MAX + 1)
    with Path(name).open("rb") as file:
        return file.read(BYTES_MAX + 1)


@asynccontextmanager
async def open_repository(url: str | None, *, create: bool = False) -> AsyncIterator[Repository]:
    """Open the repository at a URL and close it at the end. Creates a file only with `create`.

    Raises ConfigError, StoreUnavailable.
    """
    if not url:
        raise ConfigError(
            "no database; give --database URL, or set RATEKEEPER_DATABASE; "
            "for example sqlite:///rules.db or postgresql://user@host/rules"
        )
    try:
        from ratekeeper.control.database import Database  # noqa: PLC0415 - the control extra
        from ratekeeper.control.repository import Repository  # noqa: PLC0415 - the control extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ratekeeper":
            raise
        raise ConfigError(
            f"rules in a database need {error.name}, which is not installed; "
            f"install it with: pip install 'ratekeeper[control]'"
        ) from None
    if not create:
        _expect_file(Database(url))
    async with await Repository.open(url) as repository:
        yield repository


def _expect_file(database: Database) -> None:
    file = Path(database.name.removeprefix(_SQLITE))
    if not database.is_postgresql and not file.exists():
        raise ConfigError(
            f"there is no file {file}; correct the URL, or create the first version: "
            f"ratekeeper rules apply FILE"
        )


def _source_of(version: Version | None) -> RuleSource:
    if version is None:
        return RuleSource("no version", "", 0)
    return RuleSource(f"version {version.number}", version.text, version.number)


def source_from_database(url: str | None, number: int | None = None) -> RuleSource:
    """Read a version, by default the current one. Raises ConfigError, StoreError."""

    async def find() -> RuleSource:
        async with open_repository(url) as repository:
            if number is not None:
                return _source_of(await repository.version(number))
            return _source_of(await repository.current())

    return asyncio.run(find())


def current_rules(url: str) -> RuleSource:
    """Read the current version. Raises ConfigError if there is none yet, and StoreError."""
    source = source_from_database(url)
    if source.number == 0:
        raise ConfigError(
            "the database contains no rules yet; add some with: ratekeeper rules apply FILE"
        )
    return source


def _from_either(context: typer.Context, file: str | None, database: str | None) -> RuleSource:
    """Read a FILE or, if none is given, the current version in the database.

    A FILE and a database in the environment do not conflict: the variable is for all commands.
    """
    given_as = context.get_parameter_source("database")
    if file is not None and given_as is not None and given_as.name == "COMMANDLINE":
        raise ConfigError("give a FILE or --database, not both")
    if file is not None:
        return source_from_file(file)
    if not database:
        raise ConfigError("give a FILE or --database URL (or set RATEKEEPER_DATABASE)")
    return current_rules(database)


# ── validate ───────────────────────────────────────────────────────────────────────────────────


@app.command(cls=CliCommand)
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Rule documents; - is the standard input.")
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as problems.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the problems of rule documents, one per line, with file, line and column.

    Warnings are about documents that are valid but probably not intended, such as one that denies
    every request; `apply` rejects those.

    Exit code: 0 no problems; 1 problems; 2 a file cannot be read.

    Example: ratekeeper rules validate --strict limits.yaml

    Example: generate-limits | ratekeeper rules validate -
    """
    if files.count(STDIN) > 1:
        raise ConfigError("the standard input can be read only once; give - once")
    checked = [ValidatedFile(file) for file in files]
    code = max(each.exit_code(strict) for each in checked)
    if as_json:
        print_json({"exit_code": code, "files": [each.data() for each in checked]})
    else:
        for each in checked:
            each.print(strict)
    raise typer.Exit(code)


class ValidatedFile:
    """A file, with its problems and warnings."""

    def __init__(self, file: str) -> None:
        self.name = file
        self.error = ""
        self.problems: tuple[DocumentProblem, ...] = ()
        self.warnings: list[dict[str, Any]] = []
        self.rules = 0
        try:
            source = source_from_file(file)
            self.name = source.name
            document = source.document()
        except UnreadableFile as error:
            self.error = str(error)
        except DocumentError as error:
            self.problems = error.problems
        else:
            self.rules = len(document.rules)
            self._find_warnings(source, document)

    def _find_warnings(self, source: RuleSource, document: Document) -> None:
        found = findings(document)
        # A document does not know its positions, so the text is parsed again.
        positions = DocumentPositions(source.text if found else "")
        for finding in found:
            line, column = positions.of(finding.where)
            text = _finding_text(finding)
            self.warnings.append({"line": line, "column": column, "text": text, **asdict(finding)})

    def exit_code(self, strict: bool) -> int:
        """Return the exit code for this file."""
        if self.error:
            return TROUBLE
        return PROBLEMS if self.problems or (strict and self.warnings) else OK

    def data(self) -> dict[str, object]:
        """Return the result for JSON."""
        return {
            "file": self.name,
            "error": self.error or None,
            "problems": [asdict(problem) for problem in self.problems],
            "warnings": self.warnings,
        }

    def print(self, strict: bool) -> None:
        """Print the result, one line per problem and warning."""
        if self.error:
            print_text(f"ratekeeper: {self.error}", to_stderr=True)
        for problem in self.problems:
            print_text(str(problem))
        for each in self.warnings:
            level = "" if strict else "warning: "
            print_text(f"{self.name}:{each['line']}:{each['column']}: {level}{each['text']}")
        if self.exit_code(strict) == OK:
            print_text(f"{self.name}: ok, rules: {self.rules}, warnings: {len(self.warnings)}")


def _finding_text(finding: SafetyFinding) -> str:
    rule = f" (rule {quoted(finding.rule)})" if finding.rule else ""
    return f"{finding.where}{rule}: {finding.what}: {finding.why}; {finding.remedy}"


# ── show, diff, schema ─────────────────────────────────────────────────────────────────────────


@app.command(cls=DocumentCommand)
def show(
    context: typer.Context,
    file: MaybeFile = None,
    database: DatabaseOption = None,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="[default: the current version]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a rule document in canonical form, from a FILE or else from the database.

    The same rules always give the same text. A FILE overrides RATEKEEPER_DATABASE.

    Exit code: 0 printed; 1 the document has problems; 2 it cannot be read.

    Example: ratekeeper rules show limits.yaml

    Example: ratekeeper rules show --database sqlite:///rules.db --version 3
    """
    if version is None:
        source = _from_either(context, file, database)
    elif file is None:
        source = source_from_database(database, version)
    else:
        raise ConfigError("--version is for the database; a FILE has no versions")
    if as_json:
        print_json(to_data(source.document()))
    else:
        print_text(source.canonical().removesuffix("\n"))


@app.command(cls=CliCommand)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A FILE or the number of a version.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The same. [default: the current version]"),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the differences between two documents, as a unified diff of their canonical texts.

    A number is a version in the database; a file with such a name is ./7. `diff FILE` shows what
    applying the file would change, and `diff N` shows what has changed since version N.

    Exit code, like diff(1): 0 equal; 1 different; 2 trouble.

    Example: ratekeeper rules diff old.yaml new.yaml

    Example: ratekeeper rules diff limits.yaml --database sqlite:///rules.db
    """
    old = _file_or_version(a, database)
    if b is not None:
        new = _file_or_version(b, database)
    elif old.number is None:
        old, new = source_from_database(database), old
    else:
        new = source_from_database(database)
    text = unified_diff(old.canonical(), new.canonical(), old.name, new.name)
    if as_json:
        print_json({"a": old.name, "b": new.name, "equal": not text, "diff": text})
    elif text:
        print_text(text)
    raise typer.Exit(1 if text else 0)


def _file_or_version(name: str, database: str | None) -> RuleSource:
    is_number = name.isascii() and name.isdigit() and len(name) <= _DIGITS_MAX
    return source_from_database(database, int(name)) if is_number else source_from_file(name)


@app.command(cls=CliCommand)
def schema(
    as_json: Annotated[  # noqa: ARG001 - accepted, like in every other command
        bool, typer.Option("--json", help="The schema is always JSON.")
    ] = True,
) -> None:
    """Print the JSON Schema of rule documents, for editors that complete and check them.

    Exit code: 0.

    Example: ratekeeper rules schema > rules.schema.json
    """
    print_json(document_schema())


# ── history, apply, rollback ───────────────────────────────────────────────────────────────────


@app.command(cls=CliCommand)
def history(
    database: DatabaseOption = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most N versions, up to 1000.")] = 50,
    before: Annotated[
        int | None, typer.Option(metavar="N", help="Only versions with a lower number.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the versions in a database: number, time, author, kind and reason, newest first.

    Exit code: 0 listed, also if there are none; 2 the database cannot be read.

    Example: ratekeeper rules history --database sqlite:///rules.db --limit 10
    """

    async def find() -> list[Version]:
        async with open_repository(database) as repository:
            return await repository.history(limit, before)

    versions = asyncio.run(find())
    if as_json:
        print_json([_version_data(version) for version in versions])
    else:
        headings = ("VERSION", "TIME", "AUTHOR", "KIND", "REASON")
        print_table(headings, [_version_row(version) for version in versions])


def _version_data(version: Version) -> dict[str, object]:
    return {
        "version": version.number,
        "created_at": version.created_at.isoformat(),
        "author": version.author,
        "kind": version.kind,
        "base": version.base,
        "reason": version.reason,
    }


def _version_row(version: Version) -> tuple[str, ...]:
    reason = " ".join(version.reason.split())
    time = time_text(version.created_at)
    return str(version.number), time, version.author, version.kind, reason


@app.command("audit", cls=CliCommand)
def audit_(
    database: DatabaseOption = None,
    author: Annotated[str | None, typer.Option(metavar="NAME", help="By this author.")] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Of this kind: apply, assign, grant, …")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Of this subject, override, list entry or rule."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"From this time: {TIME_FORMS}.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most N changes, up to 1000.")] = 50,
    before: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The end of the previous page.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who changed what, when and why: versions, entries, grants and resets, newest first.

    Exit code: 0 shown, also if there is nothing; 2 the database cannot be read.

    Example: ratekeeper rules audit --database sqlite:///rules.db --key user:42

    Example: ratekeeper rules audit --kind grant --since 2026-11-15 --json
    """
    from ratekeeper.control.audit import AuditCursor, AuditFilter  # noqa: PLC0415 - needs an extra

    wanted = AuditFilter(author, kind, key, *parse_period(_PERIOD, since, until))
    cursor = None if before is None else AuditCursor.read(before)

    async def find() -> AuditPage:
        async with open_repository(database) as repository:
            return await repository.audit_log.page(wanted, limit, cursor)

    page = asyncio.run(find())
    following = None if page.next is None else str(page.next)
    if as_json:
        items = [{**asdict(each), "created_at": each.created_at.isoformat()} for each in page.items]
        print_json({"items": items, "next": following})
        return
    print_table(
        ("TIME", "AUTHOR", "KIND", "WHAT", "REASON"), [_audit_row(each) for each in page.items]
    )
    if following:
        print_text(f"more: --before {following}")


def _audit_row(change: AuditedChange) -> tuple[str, ...]:
    what = one_line(change.key, 80) if change.version is None else f"version {change.version}"
    if change.count > 1:
        what = f"{what} ({change.count:,} entries)".strip()
    reason = one_line(change.reason)
    return time_text(change.created_at), change.author, change.kind, what, reason


@app.command(cls=DocumentCommand)
def apply(
    file: FileArgument,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    expected: ExpectedOption = None,
    force: ForceOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")
    ] = False,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Undo changes that were made since the last apply."),
    ] = False,
    announce_to: AnnounceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Apply a document as the next version in the database. Prints what it changes.

    A document that is probably a mistake, such as one that denies every request, is rejected with
    the reasons. So is one that would undo a change made through the admin API or by another command
    since the last apply, unless --undo is given. Entries beside the document are not touched.
    Applying a document that is already in force changes nothing. The first apply creates the tables
    (and, with SQLite, the file).

    Exit code: 0 the document is in force; 1 it has problems, is unsafe or would undo changes; 2 it
    could not be applied; 3 the current version is not the expected one, so nothing has changed.

    Example: ratekeeper rules apply limits.yaml --database sqlite:///rules.db --reason launch
    """
    source = source_from_file(file)
    document = source.document()
    changed_by = author_of(author)
    nodes = _announce_store(announce_to)
    for each in advice(document):
        print_text(f"ratekeeper: warning: {each}", to_stderr=True)

    async def change() -> RuleChange:
        async with open_repository(database, create=not dry_run) as repository:
            begun = await _begin(repository, source.name, source.canonical(), as_json)
            base = begun.base if expected is None else expected
            if begun.before is not None and begun.diff and not undo:
                await _check_undone(repository, begun.before, document)
            if dry_run:
                await asyncio.to_thread(_try_apply, begun, document, base, force)
                return begun
            version = await repository.apply(
                document, author=changed_by, reason=reason, expected=base, force=force
            )
            return replace(begun, version=version)

    _finish(asyncio.run(change()), nodes, as_json)


@app.command(cls=CliCommand)
def rollback(
    number: Annotated[int, typer.Argument(metavar="N", help="The version to go back to.")],
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    expected: ExpectedOption = None,
    announce_to: AnnounceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an old version: create a new one with the same rules. Prints what it changes.

    Exit code: 0 the rules are in force; 2 it could not be done; 3 the current version is not the
    expected one, so nothing has changed.

    Example: ratekeeper rules rollback 3 --database sqlite:///rules.db --reason "too strict"
    """
    changed_by = author_of(author)
    nodes = _announce_store(announce_to)

    async def change() -> RuleChange:
        async with open_repository(database) as repository:
            old = await repository.version(number)
            text = await asyncio.to_thread(_source_of(old).canonical)
            begun = await _begin(repository, f"version {number}", text, as_json)
            version = await repository.rollback(
                number,
                author=changed_by,
                reason=reason,
                expected=begun.base if expected is None else expected,
            )
            return replace(begun, version=version)

    _finish(asyncio.run(change()), nodes, as_json)


@app.command(cls=CliCommand)
@with_options(service=service_opener)
def promote(
    rule: RuleArgument,
    service: Callable[[], ServiceClient],
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    expected: ExpectedOption = None,
    force: ForceOption = False,
    announce_to: AnnounceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Enforce a rule that is in shadow mode, with the counts that it has.

    If the rule names another one as `replaces`, it takes the place of that rule, and `demote` makes
    it a shadow again. The rules are those of the database or, without --database, of the service at
    --url.

    Exit code: 0 the rule is enforced; 1 the change is unsafe; 2 it could not be done; 3 the current
    version is not the expected one, so nothing has changed.

    Example: ratekeeper rules promote stricter --database sqlite:///rules.db --reason tried

    Example: ratekeeper rules promote stricter --url http://127.0.0.1:8080
    """
    changed = RuleEdit("promote", rule, reason, force, expected)
    _edit_rule(changed, database, service, author, announce_to, as_json)


@app.command(cls=CliCommand)
@with_options(service=service_opener)
def demote(
    rule: RuleArgument,
    service: Callable[[], ServiceClient],
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    expected: ExpectedOption = None,
    force: ForceOption = False,
    announce_to: AnnounceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reverse a promotion: the rule goes back into shadow mode, and the rule that it replaced
    applies again, with the counts that are left.

    The rules are those of the database or, without --database, of the service at --url.

    Exit code: 0 done; 1 the change is unsafe; 2 it could not be done; 3 the current version is not
    the expected one, so nothing has changed.

    Example: ratekeeper rules demote stricter --reason "acme was denied"
    """
    changed = RuleEdit("demote", rule, reason, force, expected)
    _edit_rule(changed, database, service, author, announce_to, as_json)


class RuleEdit(NamedTuple):
    """A change of one rule: promote or demote."""

    kind: Literal["promote", "demote"]
    rule: str
    reason: str
    force: bool
    expected: int | None

    def of(self, document: Document) -> Document:
        """Return the document with the change. Raises NotFound, ConfigError."""
        edit = edits.promote if self.kind == "promote" else edits.demote
        return edit(document, self.rule)


def _edit_rule(
    edit: RuleEdit,
    database: str | None,
    service: Callable[[], ServiceClient],
    author: str | None,
    announce_to: str | None,
    as_json: bool,
) -> None:
    if not database:
        _edit_over_http(edit, service, as_json)
        return
    changed_by = author_of(author)
    nodes = _announce_store(announce_to)

    async def change() -> RuleChange:
        async with open_repository(database) as repository:
            before = await repository.current()
            version = await repository.edit(
                edit.of,
                kind=edit.kind,
                author=changed_by,
                reason=edit.reason,
                expected=edit.expected,
                force=edit.force,
            )
            if before is None or version.number == before.number:
                return RuleChange(version, "", version)
            return RuleChange(before, await repository.diff(before.number, version.number), version)

    made = asyncio.run(change())
    if made.diff and not as_json:
        print_text(made.diff)
    _finish(made, nodes, as_json)


def _edit_over_http(edit: RuleEdit, service: Callable[[], ServiceClient], as_json: bool) -> None:
    """Make the change through the admin API."""
    if edit.expected is not None:
        raise ConfigError("--expected is for the database; give --database URL")
    path = f"/v1/admin/rules/{quote(edit.rule, safe='')}/{edit.kind}"
    with service() as client:
        made = client.call(
            "POST",
            path,
            query={"force": "true"} if edit.force else None,
            body={"reason": edit.reason} if edit.reason else None,
            expected="number",
        )
    if as_json:
        print_json({"exit_code": OK, **made})
    else:
        print_text(f"version {made['number']} is in force")


@dataclass(frozen=True, slots=True)
class RuleChange:
    """The version when a command began, the diff to it, and the version at the end."""

    before: Version | None
    diff: str
    version: Version | None = None
    """The version in force at the end; None after a dry run."""

    @property
    def base(self) -> int:
        """The number of the version when the command began; 0 if there was none."""
        return self.before.number if self.before else 0


async def _begin(repository: Repository, name: str, text: str, as_json: bool) -> RuleChange:
    """Read the current version, and print the diff to the new text."""
    before = await repository.current()
    old = _source_of(before)
    canonical = await asyncio.to_thread(old.canonical)
    diff = await asyncio.to_thread(unified_diff, canonical, text, old.name, name)
    if not as_json:
        made = f" (by {before.author}, {time_text(before.created_at)})" if before else ""
        print_text(f"based on {old.name}{made}")
        if diff:
            print_text(diff)
    return RuleChange(before, diff)


async def _check_undone(repository: Repository, current: Version, document: Document) -> None:
    """Raise UndoesChanges if a document would undo changes made since the last apply."""
    since = await repository.history(_HISTORY_MAX, texts=False)
    made = list(takewhile(lambda version: version.kind != "apply", since))
    if not made:
        return
    # Without an apply among so many versions, the oldest of them counts as one.
    applied = await repository.version(since[min(len(made), len(since) - 1)].number)
    undone = await asyncio.to_thread(
        lambda: edits.undone(read(applied.text, "applied"), read(current.text, "current"), document)
    )
    if not undone:
        return
    parts = [f"  {part}" for part in undone[:_SHOWN_MAX]]
    changes = [
        f"  version {each.number}: {each.kind} by {each.author}, {time_text(each.created_at)}"
        for each in made[:_SHOWN_MAX]
    ]
    if len(undone) > _SHOWN_MAX:
        parts.append(f"  and {len(undone) - _SHOWN_MAX:,} more")
    raise UndoesChanges(
        "\n".join(
            [
                f"the document would undo changes made since version {applied.number}:",
                *parts,
                "they were made by:",
                *changes,
                (
                    "put them into the document (`ratekeeper rules show` prints it), or "
                    "undo them with --undo"
                ),
            ]
        )
    )


def _try_apply(change: RuleChange, document: Document, expected: int, force: bool) -> None:
    """Raise the errors that `Repository.apply` would raise."""
    if not change.diff:
        return
    if expected != change.base:
        raise VersionConflict(expected, change.base)
    before = _source_of(change.before)
    unsafe = new_findings(document, before.document() if before.number else None)
    if unsafe and not force:
        raise UnsafeChange(unsafe)


def _finish(change: RuleChange, nodes: Store | None, as_json: bool) -> None:
    """Announce the new version to the nodes, and print the result."""
    version = change.version
    announced = nodes is not None and version is not None and _announce(nodes, version.number)
    changed = version is not None and version.number != change.base
    if as_json:
        made = _version_data(version) if version else {"version": None}
        result = {"changed": changed, "announced": announced, "diff": change.diff}
        print_json({"exit_code": OK, **made, "before": change.base, **result})
    elif version is None:
        print_text("nothing was changed: this was a dry run")
    elif changed:
        print_text(f"version {version.number} is in force")
    else:
        print_text(f"nothing to change: version {version.number} has the same rules")


def author_of(given: str | None) -> str:
    """Return the author of a change: the one given, or the login name. Raises ConfigError."""
    if given is not None:
        return given
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        raise ConfigError(
            "the author is unknown; give --author, or set RATEKEEPER_AUTHOR"
        ) from None


def _announce_store(uri: str | None) -> Store | None:
    """Open the store of the nodes, before anything changes: the URI may be wrong."""
    if uri is None:
        return None
    if uri.partition("://")[0].lower() not in REDIS_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in REDIS_SCHEMES)
        raise ConfigError(f"--announce needs a Redis store; start it with one of {known}")
    return open_store(uri)


def _announce(nodes: Store, number: int) -> bool:
    """Announce a version. A failure is only a warning: the version is in force anyway."""
    try:
        with closing(nodes):
            return announce(nodes, number)
    except StoreError as error:
        print_text(f"ratekeeper: warning: not announced: {error}", to_stderr=True)
        print_text("The nodes will find the new version at their next poll.", to_stderr=True)
        return False


# ── preview ────────────────────────────────────────────────────────────────────────────────────


def patient_client(
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = _PREVIEW_TIMEOUT_S,
) -> ServiceClient:
    """Return a client that waits for a replay. Raises ConfigError."""
    return service_client(url, token, ca, timeout)


@app.command(cls=DocumentCommand)
@with_options(service=patient_client)
def preview(
    file: FileArgument,
    service: ServiceClient,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help=f"From this time: {TIME_FORMS}. [default: the last hour]"
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time.")] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="The newest N decisions, up to 20000.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a document would have done: the last recorded decisions of a service, replayed.

    The service replays them under its rules and under the document, and applies nothing. It must
    record decisions (`ratekeeper serve --record`).

    Exit code: 0 replayed, whatever the differences; 1 the document has problems; 2 it could not be
    done.

    Example: ratekeeper rules preview limits.yaml --url http://127.0.0.1:8080 --since 2026-11-15
    """
    document = source_from_file(file).document()
    period = parse_period(_PERIOD, since, until)
    query = {n: time.isoformat() for n, time in zip(("from", "to"), period, strict=True) if time}
    if limit is not None:
        query["limit"] = str(limit)
    with service as client:
        found = client.call(
            "POST", "/v1/admin/rules/preview", query=query, body=to_data(document), expected="total"
        )
    if as_json:
        print_json({"exit_code": OK, **found})
    else:
        _print_preview(found)


def _print_preview(found: Mapping[str, Any]) -> None:
    total = found["total"]
    about = "about " if found.get("estimate") else ""
    print_text(
        f"{found['decisions']:,} recorded decisions, {about}{found['requests']:,} requests, "
        f"{found.get('first')} to {found.get('last')}"
    )
    print_text(
        f"denied: {total['denied_before']:,} before, {total['denied_after']:,} after; "
        f"{total['newly_denied']:,} newly denied, {total['newly_allowed']:,} newly allowed"
    )
    agreement = found.get("agreement")
    if agreement is not None:
        print_text(f"the replay agrees with {agreement:.1%} of the recorded decisions")
    headings = ("BEFORE", "AFTER", "NEWLY DENIED", "NEWLY ALLOWED")
    for name in ("rule", "subject", "endpoint"):
        rows = [
            (one_line(_joined(each[name])), *(f"{each[count]:,}" for count in _PREVIEW_COUNTS))
            for each in json_objects(found.get(f"{name}s"))
        ]
        if rows:
            print_text("")
            print_table((name.upper(), *headings), rows[:_SHOWN_MAX])
    for each in json_objects(found.get("not_replayed")):
        print_text(one_line(f"not replayed: rule {each['rule']}: {each['reason']}"))
    for note in found.get("notes", ()):
        print_text(one_line(f"note: {note}"))


_PREVIEW_COUNTS: Final = ("denied_before", "denied_after", "newly_denied", "newly_allowed")


def _joined(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value)


# ── explain ────────────────────────────────────────────────────────────────────────────────────


@app.command(cls=DocumentCommand)
@with_options(request=request_fields, service=service_opener)
def explain(
    context: typer.Context,
    request: dict[str, Any],
    service: Callable[[], ServiceClient],
    file: MaybeFile = None,
    database: DatabaseOption = None,
    cost: Annotated[int, typer.Option(metavar="N", help="The cost of the request.")] = 1,
    store: Annotated[
        str,
        typer.Option(
            envvar="RATEKEEPER_STORE",
            metavar="URI",
            help="The URI of the store. [default: an empty store, with every quota whole]",
        ),
    ] = "memory://",
    as_json: JsonOption = False,
) -> None:
    """Show which rules apply to a request and why, which do not, and what each decides now.

    The rules are those of FILE or, without one, the current ones in the database, with the
    assignments, overrides and list entries beside them. Without either, the service at --url
    explains the request by its rules, entries and counts. A FILE has no entries beside it. With
    --store, the decisions are those of the real store; nothing is charged.

    Exit code: 0 explained, whether allowed or denied; 1 the document has problems; 2 it cannot be
    read, or the store is unavailable.

    Example: ratekeeper rules explain limits.yaml --endpoint /v1/orders/7 --method POST --api-key
    sk_1

    Example: ratekeeper rules explain --user 42 --attribute region=eu --url http://127.0.0.1:8080
    """
    if file is None and not database:
        if not _is_default(context, "store"):
            raise ConfigError("--store needs the rules: give a FILE or --database URL, too")
        with service() as client:
            body = {**request, "cost": cost}
            found = client.call("POST", "/v1/admin/explain", body=body, expected="verdict")
            name = f"{client.url}, rules {found.get('version')}"
    else:
        source = _from_either(context, file, database)
        rules = source.document() if file is not None else database
        with (
            closing(_open_existing(store)) as opened,
            Limiter.from_rules(
                cast("Document | str", rules), store=opened, follow=False
            ) as limiter,
        ):
            explanation = limiter.explain(Request(**request), cost)
        found = explanation_data(explanation)
        name = source.name
    if as_json:
        print_json({"source": name, "entries": file is None, **found})
    else:
        note = "" if file is None else ", without the entries of a service"
        print_explanation(found, f"{name}{note}")
    raise typer.Exit(TROUBLE if found["verdict"] == "unknown" else OK)


def _is_default(context: typer.Context, name: str) -> bool:
    """Return True if an option was not typed; the environment is for all commands."""
    given_as = context.get_parameter_source(name)
    return given_as is None or given_as.name != "COMMANDLINE"


def _open_existing(uri: str) -> Store:
    scheme = uri.partition("://")[0].lower()
    clock = SystemClock()
    if scheme in REDIS_SCHEMES:
        opened = open_store(uri, clock, deadline_ms=_EXPLAIN_DEADLINE_MS)
        return only_region(cast("SharedStore", opened), clock)
    if scheme == "memory":
        # Nothing is counted here, and rules of any consistency and scope can be explained.
        store = MemoryAuthority(clock)
        counts = MemoryRegional(clock)
        asyncio.run(counts.set_shares(_ONLY_SHARE, 0))
        shared = cast("Any", store)
        shared.regional = counts
        shared.monitor = shared.channel = None  # there are no servers and no messages
        return FleetStore(only_region(shared, clock), Fleet(), clock)
    if scheme == "shared" and not Path(unquote(urlsplit(uri).path)).exists():
        # Opening it would create it, with this user as its owner.
        raise ConfigError("the file of --store does not exist; start the service first")
    return open_store(uri)


def explanation_data(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation for JSON."""
    return {
        "verdict": explanation.verdict,
        "decides": explanation.decides and explanation.decides.id,
        "tier": explanation.tier,
        "listed": explanation.listed or None,
        "rules": [_rule_data(rule) for rule in explanation.rules],
    }


def _rule_data(rule: RuleExplained) -> dict[str, object]:
    override = rule.override
    return {
        "id": rule.id,
        "applies": rule.applies,
        "why": rule.why,
        "mode": rule.mode,
        "by": list(rule.by),
        "subject": rule.subject.split(SEPARATOR) if rule.subject else None,
        "units": rule.units if rule.applies else None,
        "limits": [limit_data(limit) for limit in rule.limits],
        "source": rule.source or None,
        "consistency": rule.consistency,
        "scope": "region" if rule.across is None else "global",
        "across_regions": rule.across,
        "envoy_quota": rule.envoy_quota,
        "override": override
        and {
            "reason": override.reason,
            "author": override.author,
            "until": override.until and override.until.isoformat(),
        },
        "factor": rule.factor,
        "decision": None if rule.decision is None else _decision_data(rule.decision),
        "error": rule.error or None,
    }


def _decision_data(decision: Decision) -> dict[str, object]:
    return {
        "allowed": decision.allowed,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
        "reset_after": decision.reset_after,
        "delay": decision.delay,
        "penalty": decision.penalty,
        "tightest": limit_data(decision.policy),
    }


def print_explanation(found: Mapping[str, Any], name: str) -> None:
    """Print the verdict, and one line per rule, of this command or of a service."""
    result = str(found["verdict"])
    rules = json_objects(found.get("rules"))
    if listed := found.get("listed"):
        result += f": on the list: {one_line(listed)}"
    elif not any(rule.get("applies") for rule in rules):
        result += ": no rule applies"
    tier = found.get("tier") or "none"
    print_text(f"{result} ({name}; tier: {tier}; nothing was charged)")
    if rules:
        headings = ("RULE", "APPLIES", "COUNTS", "LIMITS", "FROM", "NOW", "WHY")
        print_table(headings, [_rule_row(rule) for rule in rules])
    if omitted := found.get("omitted"):
        print_text(f"{omitted:,} more rules do not apply")


def _rule_row(rule: Mapping[str, Any]) -> tuple[str, ...]:
    mode, across = rule.get("mode"), rule.get("across_regions")
    applies = "no"
    if rule.get("applies"):
        applies = "yes" if mode == "enforce" else str(mode)
    counts = ", ".join(rule.get("subject") or rule.get("by") or ())
    limits = "; ".join(map(_limit_text, rule.get("limits") or ()))
    if rule.get("factor", 1) != 1:
        limits += f" (at {rule['factor']:.0%}, by the load)"
    if rule.get("consistency") != "strict":
        limits += f" ({rule.get('consistency')})"
    if rule.get("scope") == "global":
        limits += f" (global, {across})" if across else " (global)"
    if rule.get("envoy_quota") is not None:
        limits += f" (Envoy: {rule['envoy_quota']})"
    origin = override_origin(rule.get("source"), rule.get("override"))
    now, why = _now_text(rule), str(rule.get("why"))
    return str(rule.get("id")), applies, counts or "all", limits, origin, now, why


def _limit_text(limit: str | Mapping[str, Any]) -> str:
    if isinstance(limit, str):
        return limit
    data = dict(limit)
    number, window, algorithm = (data.pop(each, "?") for each in ("limit", "per", "algorithm"))
    others = "".join(f" {name} {value}" for name, value in data.items())
    return f"{number}/{window} {algorithm}{others}"


def _now_text(rule: Mapping[str, Any]) -> str:
    decision = rule.get("decision")
    if not isinstance(decision, Mapping):
        return str(rule.get("error") or "").partition("\n")[0]
    left = f"{decision['remaining']:,} of {decision['limit']:,} left"
    costs = f", costs {rule['units']:,}" if rule.get("units") != 1 else ""
    if decision["allowed"]:
        delay = f", after {seconds_text(decision['delay'])}" if decision.get("delay") else ""
        return f"allows, {left}{costs}{delay}"
    if decision.get("penalty"):
        left = "a block" if decision["penalty"] == "block" else "a cool-down"
    return f"denies, {left}{costs}, retry in {seconds_text(decision['retry_after'])}"
