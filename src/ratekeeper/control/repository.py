"""The rules of a fleet, in versions: many people change them at once, and no change is lost.

    repository = await Repository.open("sqlite:///rules.db")
    version = await repository.apply(document, author="ann", reason="launch", expected=0)
    await repository.edit(change, kind="set-tier", author="ann")
    await repository.rollback(1, author="bob", reason="too strict", expected=2)

A version is a whole document with its author, time and reason. Versions are numbered 1, 2, 3 …
without gaps. No version is ever changed or removed; a rollback adds a new version with the old
text.

**Optimistic concurrency.** A caller passes the number of the version that it has edited
(`expected`; 0 or None if there was none). The change raises VersionConflict if another version is
current. The small edits (set a tier, put a rule) need no number: they read, edit and retry
until no other change came between. Everything is validated before the writers' lock is taken;
under the lock, the number is compared and two rows are added.

**Lost answers.** A change that raises StoreTimeout or StoreUnavailable may have been committed, if
the connection broke during the commit. Applying the same document again is safe: if it is current,
nothing changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self

from sqlalchemy import func, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratekeeper.control import edits
from ratekeeper.control.audit import AuditLog
from ratekeeper.control.database import CHANNEL, Database, listen
from ratekeeper.control.edits import DocumentText, document_diff, has_other_comments, kept_text
from ratekeeper.control.entries import EntryRows, check_signature
from ratekeeper.control.schema import audit, bring_up_to_date, versions
from ratekeeper.core.chance import RANDOM
from ratekeeper.core.errors import (
    ConfigError,
    SafetyFinding,
    UnsafeChange,
    VersionConflict,
    quoted,
    show,
)
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import DocumentError, read
from ratekeeper.rules.document.safety import new_findings
from ratekeeper.rules.document.writing import to_yaml

__all__ = ["Kind", "Repository", "Version"]

ROWS_MAX: Final = 1_000
"""The largest page of the history or the audit."""
# Each conflict is a change by another writer, so only a crowd causes this many in a row.
EDIT_ATTEMPTS_MAX: Final = 50
_PAUSE_SECONDS_MIN: Final = 0.005
_PAUSE_SECONDS_MAX: Final = 0.5
_NUMBER_MAX: Final = 2**31 - 1

Kind = Literal[
    "apply",
    "rollback",
    "put-rule",
    "patch-rule",
    "remove-rule",
    "promote",
    "demote",
    "set-tier",
    "remove-tier",
    "assign",
    "unassign",
    "override",
    "remove-override",
    "list",
    "unlist",
]


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the rules."""

    number: int
    author: str
    reason: str
    created_at: datetime
    """In UTC, by the clock of the database server."""
    text: str
    """The document in canonical form, or as its author wrote it in YAML."""
    base: int | None
    """The number of the version that was changed; None for the first."""
    kind: str
    """The kind of change: apply, rollback, assign and so on."""


@dataclass(frozen=True, slots=True)
class _ChangeRequest:
    """The kind of a change, its author and its reason."""

    kind: Kind
    author: str
    reason: str
    force: bool = False
    text: str | None = None
    """The document as its author wrote it, in YAML, to be kept with its comments."""

    def __post_init__(self) -> None:
        check_signature(self.author, self.reason)


@dataclass(frozen=True, slots=True)
class _PreparedChange:
    """The next version after `base`, validated and ready to commit."""

    request: _ChangeRequest
    base: int
    text: str
    diff: str
    forced: str = ""


class Repository:
    """The versions in one database. For one event loop and any number of tasks."""

    def __init__(self, database: Database) -> None:
        """Use `Repository.open`, which also creates or migrates the schema."""
        self._database = database
        # Edits of one process take turns: racing each other, most would do their work in vain.
        self._editing = asyncio.Lock()
        # The newest parsed document and its number: parsing 10,000 rules takes seconds.
        self._parsed: tuple[int, Document] | None = None
        self.entries = EntryRows(database, self.newest_document)
        """The assignments, overrides and list entries beside the document."""
        self.audit_log = AuditLog(database)
        """Every change of the document, of entries and of counts."""

    @classmethod
    async def open(cls, url: str) -> Self:
        """Open the repository in a database, and create or migrate its schema.

        `url` is `sqlite:///rules.db` or `postgresql://user:password@host/name`. Raises ConfigError
        for an unusable URL or a schema newer than this code, and StoreUnavailable if the database
        cannot be reached.
        """
        database = Database(url)
        try:
            await bring_up_to_date(database)
        except BaseException:
            await database.close()
            raise
        return cls(database)

    async def close(self) -> None:
        """Close all connections."""
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ── Reading ────────────────────────────────────────────────────────────────────────────────

    async def number(self) -> int:
        """Return the number of the current version; 0 if there is none. It reads no text."""
        async with self._database.reading() as connection:
            return await _newest(connection)

    async def current(self) -> Version | None:
        """Return the current version; None if there is none yet."""
        found = await self.history(limit=1)
        return found[0] if found else None

    async def version(self, number: int) -> Version:
        """Return one version. Raises NotFound if no version has this number."""
        _check_number(number)
        async with self._database.reading() as connection:
            query = select(versions).where(versions.c.number == number)
            row = (await connection.execute(query)).mappings().one_or_none()
            if row is None:
                newest = await _newest(connection)
                there_is = f"there are 1 to {newest}" if newest else "there is none yet"
                raise edits.NotFound(f"there is no version {number}; {there_is}")
        return Version(**row)

    async def history(
        self, limit: int = 50, before: int | None = None, *, texts: bool = True
    ) -> list[Version]:
        """Return versions, the newest first, with numbers below `before` if that is given.

        Without `texts`, their texts are empty: many large documents would fill the memory.
        """
        columns: list[Any] = [
            column for column in versions.c if texts or column is not versions.c.text
        ]
        if not texts:
            columns.append(literal("").label("text"))
        query = _page(select(*columns), versions.c.number, limit, before)
        async with self._database.reading() as connection:
            return [Version(**row) for row in (await connection.execute(query)).mappings()]

    async def document_of(self, version: Version) -> Document:
        """Return the parsed document of a version. Raises DocumentError.

        The newest one is cached; versions never change.
        """
        cached = self._parsed
        if cached is not None and cached[0] == version.number:
            return cached[1]
        document = await asyncio.to_thread(read, version.text, f"version {version.number}")
        if self._parsed is None or self._parsed[0] < version.number:
            self._parsed = (version.number, document)
        return document

    async def newest_document(self) -> Document:
        """Return the newest document, parsed once for each version; an empty one if none is."""
        number = await self.number()
        if self._parsed is not None and self._parsed[0] == number:
            return self._parsed[1]
        current = await self.current()
        return Document() if current is None else await self.document_of(current)

    async def diff(self, a: int, b: int) -> str:
        """Return the changes from version `a` to version `b` as a unified diff; empty if equal."""
        old, new = await self.version(a), await self.version(b)
        return await asyncio.to_thread(_diff_of_versions, old, new)

    async def listen(self) -> AsyncGenerator[int, None]:
        """Yield the current number at once, then each newer one as soon as it is committed.

        PostgreSQL sends it by NOTIFY; of several at a time, only the newest is yielded. Raises
        StoreUnavailable when the connection is lost, and ConfigError on SQLite, which cannot push.
        Closing the generator closes its connection: use `async with aclosing(repository.listen())`.
        """
        if not self._database.is_postgresql:
            raise ConfigError("SQLite has no push; call number() every second instead")
        async with aclosing(listen(self._database)) as numbers:
            async for number in numbers:
                yield number

    # ── Changing ───────────────────────────────────────────────────────────────────────────────

    async def apply(
        self,
        document: Document,
        *,
        author: str,
        reason: str = "",
        expected: int | None,
        force: bool = False,
        text: str | None = None,
    ) -> Version:
        """Add a document as the next version, and return that version.

        `expected`  the number of the version that was edited; 0 or None if there was none
        `force`     apply it even if it is unsafe; the audit keeps the findings
        `text`      the document as its author wrote it; if it is YAML, its comments are kept

        A document equal to the current one changes nothing: the current version is returned, unless
        the `text` has other comments. Raises
        VersionConflict if the current version is not the expected one, UnsafeChange for safety
        findings that are not in force already, and DocumentError for an invalid document.
        """
        request = _ChangeRequest("apply", author, reason, force, kept_text(text))
        _check_expected(expected)
        return await self._apply(document, request, await self.current(), expected or 0)

    async def rollback(
        self, number: int, *, author: str, reason: str = "", expected: int | None
    ) -> Version:
        """Add a new version with the text of an old one. Safety findings do not stop a rollback."""
        request = _ChangeRequest("rollback", author, reason)
        _check_expected(expected)
        old, current = await self.version(number), await self.current()
        if current is not None and current.text == old.text:
            return current
        _check_current(expected or 0, current)
        # The old text must still be valid for the grammar of this release.
        await asyncio.to_thread(read, old.text, f"version {number}")
        newest = replace(old, number=(current.number if current else 0) + 1)
        diff = await asyncio.to_thread(_diff_of_versions, current, newest)
        return await self._commit(_PreparedChange(request, expected or 0, old.text, diff))

    async def edit(
        self,
        edit: Callable[[Document], Document],
        *,
        kind: Kind,
        author: str,
        reason: str = "",
        expected: int | None = None,
        force: bool = False,
        text: str | None = None,
    ) -> Version:
        """Change the document by a function: one of `edits`, or a combination of several.

        The function is called with the newest document, and again after a conflict. With
        `expected`, it raises VersionConflict if another version is current (0: none yet).
        """
        _check_expected(expected)
        return await self._edit(
            edit, _ChangeRequest(kind, author, reason, force, kept_text(text)), expected
        )

    async def _edit(
        self,
        edit: Callable[[Document], Document],
        request: _ChangeRequest,
        expected: int | None = None,
    ) -> Version:
        """Read, edit and apply; retry on the newest version after a conflict."""
        async with self._editing:
            for attempt in range(1, EDIT_ATTEMPTS_MAX + 1):
                current = await self.current()
                if expected is not None:
                    _check_current(expected, current)
                document = Document() if current is None else await self.document_of(current)
                number = current.number if current else 0
                try:
                    return await self._apply(edit(document), request, current, number)
                except VersionConflict:
                    if attempt == EDIT_ATTEMPTS_MAX or expected is not None:
                        raise
                longest = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS_MIN * 2**attempt)
                await asyncio.sleep(RANDOM.uniform(0, longest))
        raise AssertionError("the last attempt returns or raises")

    async def _apply(
        self, document: Document, request: _ChangeRequest, current: Version | None, expected: int
    ) -> Version:
        texts, checked = await asyncio.to_thread(_texts, document, request.text)
        if current is not None and current.text == texts.kept:
            return current
        before = None if current is None else await self.document_of(current)
        if current is not None and before == checked:
            is_kept = request.text is not None and has_other_comments(current.text, texts.kept)
            if not is_kept:
                return current
        _check_current(expected, current)
        unsafe = await asyncio.to_thread(new_findings, checked, before)
        gone = set(before.tiers) - set(checked.tiers) if before is not None else set()
        unsafe += tuple(
            SafetyFinding(
                "orphaned-tier",
                "tiers",
                f"there is no tier {quoted(tier)} any more",
                f"{show(member)} is assigned to it beside the document",
                "keep the tier, or assign its members to another one",
            )
            for tier, member in (await self.entries.members_of(gone)).items()
        )
        if unsafe and not request.force:
            raise UnsafeChange(unsafe)
        diff = await asyncio.to_thread(_diff, current, before, texts)
        forced = "\n".join(map(str, unsafe))
        version = await self._commit(_PreparedChange(request, expected, texts.kept, diff, forced))
        self._parsed = (version.number, checked)
        return version

    async def _commit(self, change: _PreparedChange) -> Version:
        """Add the next version, its audit entry and its notification in one transaction."""
        # Server time, not ours: nodes skew, and times would not follow the numbers.
        on_server = self._database.is_postgresql
        now: Any = func.clock_timestamp() if on_server else datetime.now(UTC)
        request, base = change.request, change.base
        async with self._database.writing() as connection:
            newest = await _newest(connection)
            if newest != base:
                raise VersionConflict(base, newest)
            fields: dict[str, Any] = {
                "author": request.author,
                "reason": request.reason,
                "kind": request.kind,
            }
            row = {"number": newest + 1, "base": base or None, "text": change.text, **fields}
            added = await connection.execute(
                insert(versions).values(created_at=now, **row).returning(versions.c.created_at)
            )
            fields["created_at"] = added.scalar_one()
            entry = {"version": newest + 1, "diff": change.diff, "forced": change.forced, **fields}
            await connection.execute(insert(audit).values(**entry))
            if on_server:
                await connection.execute(select(func.pg_notify(CHANNEL, str(newest + 1))))
        return Version(**{**row, **fields})


_NUMBER: Final = select(func.coalesce(func.max(versions.c.number), 0))


async def _newest(connection: AsyncConnection) -> int:
    number: int = (await connection.execute(_NUMBER)).scalar_one()
    return number


def _page(query: Any, number: Any, limit: int, before: int | None) -> Any:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= ROWS_MAX:
        raise ConfigError(f"limit={show(limit)} is not from 1 to {ROWS_MAX:,}; try limit=50")
    if before is not None:
        _check_number(before)
        query = query.where(number < before)
    return query.order_by(number.desc()).limit(limit)


def _check_current(expected: int, current: Version | None) -> None:
    number = current.number if current else 0
    if number != expected:
        raise VersionConflict(expected, number)


def _texts(document: Document, text: str | None) -> tuple[DocumentText, Document]:
    """Return the text to store and its parsed form. Raises DocumentError if it is invalid."""
    written = to_yaml(document)
    if text is not None:
        checked = read(text, "<document>")
        if checked == document:
            return DocumentText(text, written), checked
    checked = read(written, "<document>")
    # A document made by hand may differ in form only, as in the time zone of a date.
    written = written if checked == document else to_yaml(checked)
    return DocumentText(written, written), checked


def _diff(current: Version | None, before: Document | None, after: DocumentText) -> str:
    number = current.number if current else 0
    old = DocumentText("", "")
    if current is not None and before is not None:
        old = DocumentText(current.text, to_yaml(before))
    return document_diff(old, after, f"version {number}", f"version {number + 1}")


def _diff_of_versions(before: Version | None, after: Version) -> str:
    names = f"version {before.number if before else 0}", f"version {after.number}"
    return document_diff(_texts_of(before), _texts_of(after), *names)


def _texts_of(version: Version | None) -> DocumentText:
    """Return the texts of a version. One that this release cannot read is compared as it is."""
    if version is None:
        return DocumentText("", "")
    try:
        return DocumentText(version.text, to_yaml(read(version.text)))
    except DocumentError:
        return DocumentText(version.text, version.text)


def _check_number(number: int) -> None:
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    if not is_integer or not 1 <= number <= _NUMBER_MAX:
        raise ConfigError(f"{show(number)} is not the number of a version; those are 1, 2, 3 …")


def _check_expected(expected: int | None) -> None:
    """Raise ConfigError unless it is a version's number, or 0 or None for no version."""
    if expected is not None and expected != 0:
        _check_number(expected)
