"""`tollkeeper rules history|apply|rollback`: the versions in a database, and new ones."""

from __future__ import annotations

import asyncio
import getpass
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tollkeeper.cli.rules_options import (
    AnnounceOption,
    AuthorOption,
    DatabaseOption,
    ExpectedOption,
    FileArgument,
    JsonOption,
    ReasonOption,
)
from tollkeeper.cli.rules_print import (
    OK,
    TROUBLE,
    say,
    say_history,
    say_json,
    telling,
    time_text,
    version_data,
)
from tollkeeper.cli.rules_read import from_file, opened, source_of
from tollkeeper.control.edits import unified_diff
from tollkeeper.control.follow import announce
from tollkeeper.core.errors import ConfigError, StoreError, UnsafeChange, VersionConflict
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from tollkeeper.rules.document.model import Document

if TYPE_CHECKING:
    from tollkeeper.control.repository import Repository, Version


def history(
    database: DatabaseOption = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Show so many, up to 1000.")] = 50,
    before: Annotated[
        int | None, typer.Option(metavar="N", help="Only those below this number.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the versions in a database: number, time, author, kind and reason, the newest first.

    Exit code: 0 fine, also if there is none yet; 2 it cannot be read.

    Example: tollkeeper rules history --database sqlite:///rules.db --limit 10
    """

    async def versions() -> list[Version]:
        async with opened(database) as repository:
            return await repository.history(limit, before)

    with telling(as_json):
        found = asyncio.run(versions())
        if as_json:
            say_json([version_data(version) for version in found])
        else:
            say_history(found)


def apply(
    file: FileArgument,
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    expected: ExpectedOption = None,
    force: Annotated[bool, typer.Option("--force", help="Also if it is unsafe.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")
    ] = False,
    announce_to: AnnounceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a document in force, as the next version in the database. Prints what it changes.

    What would most likely be a mistake, such as denying everyone, is refused with the reasons. A
    document that is in force already changes nothing, so that applying it again is safe. The first
    apply makes the tables (and, with SQLite, the file).

    Exit code: 0 it is in force; 1 the document has problems, or it is unsafe; 2 it could not be
    done; 3 there is another version than the expected one, so nothing has changed.

    Example: tollkeeper rules apply limits.yaml --database sqlite:///rules.db --reason launch
    """
    with telling(as_json):
        source = from_file(file)
        document = source.document()
        who = _author(author)
        nodes = _nodes(announce_to)

        async def change() -> _Change:
            async with opened(database, makes=not dry_run) as repository:
                step = await _begin(repository, source.name, source.canonical(), as_json)
                base = step.base if expected is None else expected
                if dry_run:
                    await asyncio.to_thread(_try, step, document, base, force)
                    return step
                version = await repository.apply(
                    document, author=who, reason=reason, expected=base, force=force
                )
                return replace(step, version=version)

        _conclude(asyncio.run(change()), nodes, as_json)


def rollback(
    number: Annotated[int, typer.Argument(metavar="N", help="The version to go back to.")],
    database: DatabaseOption = None,
    author: AuthorOption = None,
    reason: ReasonOption = "",
    expected: ExpectedOption = None,
    announce_to: AnnounceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an old version, by a new one with the same rules. Prints what it changes.

    Exit code: 0 it is in force; 2 it could not be done; 3 there is another version than the
    expected one, so nothing has changed.

    Example: tollkeeper rules rollback 3 --database sqlite:///rules.db --reason "too strict"
    """
    with telling(as_json, problems=TROUBLE):
        who = _author(author)
        nodes = _nodes(announce_to)

        async def change() -> _Change:
            async with opened(database) as repository:
                old = await repository.version(number)
                step = await _begin(repository, f"version {number}", old.text, as_json)
                version = await repository.rollback(
                    number,
                    author=who,
                    reason=reason,
                    expected=step.base if expected is None else expected,
                )
                return replace(step, version=version)

        _conclude(asyncio.run(change()), nodes, as_json)


# ---------------------------------------------------------------------------------- what both do


@dataclass(frozen=True, slots=True)
class _Change:
    """What there was when the command began, what is to be changed in it, and what came of it."""

    before: Version | None
    diff: str
    version: Version | None = None
    """The one in force at the end; None if this was only tried."""

    @property
    def base(self) -> int:
        return self.before.number if self.before else 0


async def _begin(repository: Repository, name: str, text: str, as_json: bool) -> _Change:
    """Look at what there is, and show what would be changed."""
    before = await repository.current()
    old = source_of(before)
    diff = await asyncio.to_thread(unified_diff, old.text, text, old.name, name)
    if not as_json:
        who = f" (by {before.author}, {time_text(before.created_at)})" if before else ""
        say(f"based on {old.name}{who}")
        if diff:
            say(diff)
    return _Change(before, diff)


def _try(change: _Change, document: Document, expected: int, force: bool) -> None:
    """Raise what `Repository.apply` would, of what is known before it is asked."""
    from tollkeeper.rules.document.safety import new_findings  # noqa: PLC0415 - the rules extra

    if not change.diff:
        return
    if expected != change.base:
        raise VersionConflict(expected, change.base)
    before = source_of(change.before)
    unsafe = new_findings(document, before.document() if before.number else None)
    if unsafe and not force:
        raise UnsafeChange(unsafe)


def _conclude(change: _Change, nodes: Store | None, as_json: bool) -> None:
    """Tell the nodes, and print what was done."""
    version = change.version
    announced = nodes is not None and version is not None and _announced(nodes, version.number)
    changed = version is not None and version.number != change.base
    if as_json:
        made = version_data(version) if version else {"version": None}
        told = {"changed": changed, "announced": announced, "diff": change.diff}
        say_json({"exit_code": OK, **made, "before": change.base, **told})
    elif version is None:
        say("nothing was changed: this was a dry run")
    elif changed:
        say(f"version {version.number} is in force")
    else:
        say(f"nothing to change: version {version.number} says the same")


def _author(given: str | None) -> str:
    if given is not None:
        return given
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        raise ConfigError("who makes the change? Give --author, or set TOLLKEEPER_AUTHOR") from None


def _nodes(uri: str | None) -> Store | None:
    """The store whose nodes are to be told. Opened before anything changes: it may be wrong."""
    if uri is None:
        return None
    if uri.partition("://")[0].lower() not in REDIS_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in REDIS_SCHEMES)
        raise ConfigError(f"--announce is for a store on Redis; begin it with one of {known}")
    return open_store(uri)


def _announced(nodes: Store, number: int) -> bool:
    """The version is in force; that nobody could be told of it changes only when they see it."""
    try:
        with closing(nodes):
            return announce(nodes, number)
    except StoreError as error:
        say(f"tollkeeper: warning: not announced: {error}", to_stderr=True)
        say("The nodes find the new version by themselves, somewhat later.", to_stderr=True)
        return False
