"""The rules of a fleet, kept in versions: changed by many at once, and no change is ever lost.

    repository = await Repository.open("sqlite:///rules.db")
    version = await repository.apply(document, author="ann", reason="launch", expected=0)
    await repository.assign("user:42", "pro", author="ann")
    await repository.rollback(1, author="bob", reason="too strict", expected=2)

A version is a whole document with its author, time and reason. Versions are numbered 1, 2, 3 … with
no gap, and none is ever changed or removed; going back to an old one makes a new one like it.

Whoever changes the rules says which version he has seen (`expected`; 0 or None if there was none).
If there is another one by now, the change is refused with VersionConflict. The small edits (a tier
assigned, an override added) need not say it: they read, edit and try again until nobody else was
quicker. Everything is checked before the lock is taken; under it, only the number is looked at and
two rows are added.

A change that ends in StoreTimeout or StoreUnavailable may have been made all the same, if the
connection broke while it was committed. To apply the same document again is safe: where it is in
force already, nothing changes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Self

from sqlalchemy import func, insert, literal, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from tollkeeper.control import edits
from tollkeeper.control.database import Database
from tollkeeper.control.diffs import unified_diff
from tollkeeper.control.listening import CHANNEL, listen
from tollkeeper.control.schema import bring_up_to_date
from tollkeeper.control.tables import audit, versions
from tollkeeper.control.versions import (
    AuditEntry,
    Kind,
    Version,
    check_expected,
    check_number,
    check_rows,
    check_who_and_why,
)
from tollkeeper.core.errors import ConfigError, UnsafeChange, VersionConflict
from tollkeeper.core.model import Limits
from tollkeeper.rules.document.model import Document, Override
from tollkeeper.rules.document.reading import read
from tollkeeper.rules.document.safety import new_findings
from tollkeeper.rules.document.writing import to_yaml

__all__ = ["AuditEntry", "Repository", "Version"]

# Each conflict is a change that somebody else got through, so this many in a row take a crowd.
EDIT_ATTEMPTS_MAX: Final = 50
_PAUSE_SECONDS_MIN: Final = 0.005
_PAUSE_SECONDS_MAX: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who wants a change, which kind of change, and why."""

    kind: Kind
    author: str
    reason: str
    force: bool = False

    def __post_init__(self) -> None:
        check_who_and_why(self.author, self.reason)


@dataclass(frozen=True, slots=True)
class _Change:
    """What is to be the next version after `base`, checked and ready."""

    asked: _Asked
    base: int
    text: str
    diff: str
    forced: str = ""


class Repository:
    """The versions in one database. For one event loop; any number of tasks."""

    def __init__(self, database: Database) -> None:
        """Use `Repository.open`, which sees to the schema."""
        self._database = database
        # Tasks of one process do not race each other: each would do its work in vain.
        self._editing = asyncio.Lock()
        # The newest document that was read, and its number: reading 10,000 rules takes seconds.
        self._read: tuple[int, Document] | None = None

    @classmethod
    async def open(cls, url: str) -> Self:
        """The repository in a database, whose schema is made or brought up to date.

        `sqlite:///rules.db` or `postgresql://user:password@host/name`. Raises ConfigError for a URL
        that cannot be used or a schema that is newer than this code, StoreUnavailable if the
        database cannot be reached.
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

    # ------------------------------------------------------------------------------------ looking

    async def number(self) -> int:
        """The number of the current version; 0 if there is none. Cheap: no text is read."""
        async with self._database.reading() as connection:
            return await _newest(connection)

    async def current(self) -> Version | None:
        """The version in force; None if there is none yet."""
        found = await self.history(limit=1)
        return found[0] if found else None

    async def version(self, number: int) -> Version:
        """One version. Raises Missing if there is none with this number."""
        check_number(number)
        async with self._database.reading() as connection:
            query = select(versions).where(versions.c.number == number)
            row = (await connection.execute(query)).mappings().one_or_none()
            if row is None:
                newest = await _newest(connection)
                there_is = f"there are 1 to {newest}" if newest else "there is none yet"
                raise edits.Missing(f"there is no version {number}; {there_is}")
        return Version(**row)

    async def history(
        self, limit: int = 50, before: int | None = None, *, texts: bool = True
    ) -> list[Version]:
        """Versions, the newest first; those below the number `before`, if that is given.

        Without `texts`, theirs are empty: a list of many large documents would fill the memory.
        """
        columns: list[Any] = [
            column for column in versions.c if texts or column is not versions.c.text
        ]
        if not texts:
            columns.append(literal("").label("text"))
        query = _page(select(*columns), versions.c.number, limit, before)
        async with self._database.reading() as connection:
            return [Version(**row) for row in (await connection.execute(query)).mappings()]

    async def audit(
        self, limit: int = 50, before: int | None = None, *, diff_length_max: int | None = None
    ) -> list[AuditEntry]:
        """Who changed what, the newest first; below the version `before`, if that is given.

        With `diff_length_max`, longer differences are cut there.
        """
        columns: list[Any] = list(audit.c)
        if diff_length_max is not None:
            cut = func.substr(audit.c.diff, 1, diff_length_max).label("diff")
            columns = [cut if column is audit.c.diff else column for column in columns]
        query = _page(select(*columns), audit.c.version, limit, before)
        async with self._database.reading() as connection:
            return [AuditEntry(**row) for row in (await connection.execute(query)).mappings()]

    async def document_of(self, version: Version) -> Document:
        """What a version says; that of the newest is kept. Raises DocumentError.

        Versions never change, so neither does what was read of one.
        """
        known = self._read
        if known is not None and known[0] == version.number:
            return known[1]
        document = await asyncio.to_thread(read, version.text, f"version {version.number}")
        if self._read is None or self._read[0] < version.number:
            self._read = (version.number, document)
        return document

    async def diff(self, a: int, b: int) -> str:
        """What changed from version `a` to version `b`, as a unified diff; empty if nothing did."""
        old, new = await self.version(a), await self.version(b)
        names = f"version {old.number}", f"version {new.number}"
        return await asyncio.to_thread(unified_diff, old.text, new.text, *names)

    async def listen(self) -> AsyncGenerator[int, None]:
        """The current number at once, then each newer one as soon as it is committed.

        On PostgreSQL, by NOTIFY; where several come at a time, only the newest is told. Raises
        StoreUnavailable when the connection is lost, and ConfigError on SQLite, which has no push.
        Its connection is closed with it: use `async with aclosing(repository.listen())`.
        """
        if not self._database.is_postgresql:
            raise ConfigError("SQLite has no push; ask for number() every second instead")
        async with aclosing(listen(self._database)) as numbers:
            async for number in numbers:
                yield number

    # ----------------------------------------------------------------------------------- changing

    async def apply(
        self,
        document: Document,
        *,
        author: str,
        reason: str = "",
        expected: int | None,
        force: bool = False,
    ) -> Version:
        """Put a document in force as the next version, and return that.

        `expected`  the number of the version that was edited; 0 or None: there was none
        `force`     also if it is unsafe; what was found is kept in the audit

        A document that is the current one changes nothing: the current version is returned. Raises
        VersionConflict if the current version is not the expected one, UnsafeChange for what
        `match.safety` finds and was not in force already, and DocumentError if the document is not
        right.
        """
        asked = _Asked("apply", author, reason, force)
        check_expected(expected)
        return await self._apply(document, asked, await self.current(), expected or 0)

    async def rollback(
        self, number: int, *, author: str, reason: str = "", expected: int | None
    ) -> Version:
        """Make a new version with the text of an old one. It was accepted once, so it is again."""
        asked = _Asked("rollback", author, reason)
        check_expected(expected)
        old, current = await self.version(number), await self.current()
        if current is not None and current.text == old.text:
            return current
        _refuse_conflict(expected or 0, current)
        # What was right once may not be for the grammar of today.
        await asyncio.to_thread(read, old.text, f"version {number}")
        diff = await asyncio.to_thread(_diff, current, old.text)
        return await self._commit(_Change(asked, expected or 0, old.text, diff))

    async def assign(
        self, subject: str, tier: str, *, author: str, reason: str = "", force: bool = False
    ) -> Version:
        """Put `user:42`, `api_key:sk_1` or `tenant:acme` in a tier, in place of the one it had."""
        return await self._edit(
            lambda document: edits.assign(document, subject, tier),
            _Asked("assign", author, reason, force),
        )

    async def unassign(
        self, subject: str, *, author: str, reason: str = "", force: bool = False
    ) -> Version:
        """Take a subject out of its tier. Raises Missing if it is in none."""
        return await self._edit(
            lambda document: edits.unassign(document, subject),
            _Asked("unassign", author, reason, force),
        )

    async def add_override(
        self, override: Override, *, author: str, reason: str = "", force: bool = False
    ) -> Version:
        """Add an override, in place of the one for the same subject and rule.

        Where it has no author or reason of its own, it gets these.
        """
        signed = replace(
            override, author=override.author or author, reason=override.reason or reason
        )
        return await self._edit(
            lambda document: edits.add_override(document, signed),
            _Asked("override", author, reason, force),
        )

    async def remove_override(
        self,
        attribute: str,
        value: str,
        rule: str | None = None,
        *,
        author: str,
        reason: str = "",
        force: bool = False,
    ) -> Version:
        """Take out a subject's override for a rule (None: the one for every rule).

        Raises Missing if there is none.
        """
        return await self._edit(
            lambda document: edits.remove_override(document, attribute, value, rule),
            _Asked("remove-override", author, reason, force),
        )

    async def set_tier(
        self, name: str, limits: Limits, *, author: str, reason: str = "", force: bool = False
    ) -> Version:
        """Give a tier these limits; a new name makes a new tier."""
        return await self._edit(
            lambda document: edits.set_tier(document, name, limits),
            _Asked("set-tier", author, reason, force),
        )

    async def edit(
        self,
        edit: Callable[[Document], Document],
        *,
        kind: Kind,
        author: str,
        reason: str = "",
        expected: int | None = None,
        force: bool = False,
    ) -> Version:
        """Change the document by a function: one of `edits`, or what is made of several.

        It is called with the newest document, and again if somebody was quicker. With `expected` it
        is a change of that version (0: of none yet) or of none: raises VersionConflict.
        """
        check_expected(expected)
        return await self._edit(edit, _Asked(kind, author, reason, force), expected)

    # ------------------------------------------------------------------------------------ privates

    async def _edit(
        self,
        edit: Callable[[Document], Document],
        asked: _Asked,
        expected: int | None = None,
    ) -> Version:
        """Read, edit, apply; and again, on what there is then, if somebody was quicker."""
        async with self._editing:
            for attempt in range(1, EDIT_ATTEMPTS_MAX + 1):
                current = await self.current()
                if expected is not None:
                    _refuse_conflict(expected, current)
                document = Document() if current is None else await self.document_of(current)
                number = current.number if current else 0
                try:
                    return await self._apply(edit(document), asked, current, number)
                except VersionConflict:
                    if attempt == EDIT_ATTEMPTS_MAX or expected is not None:
                        raise
                longest = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS_MIN * 2**attempt)
                await asyncio.sleep(random.uniform(0, longest))  # noqa: S311 - no secret
        raise AssertionError("the last attempt returns or raises")

    async def _apply(
        self, document: Document, asked: _Asked, current: Version | None, expected: int
    ) -> Version:
        written, checked = await asyncio.to_thread(_canonical, document)
        if current is not None and current.text == written:
            return current
        _refuse_conflict(expected, current)
        before = None if current is None else await self.document_of(current)
        unsafe = await asyncio.to_thread(new_findings, checked, before)
        if unsafe and not asked.force:
            raise UnsafeChange(unsafe)
        diff = await asyncio.to_thread(_diff, current, written)
        forced = "\n".join(map(str, unsafe))
        version = await self._commit(_Change(asked, expected, written, diff, forced))
        self._read = (version.number, checked)
        return version

    async def _commit(self, change: _Change) -> Version:
        """Add the next version, its audit entry and its notification: all or nothing."""
        # Server time, not ours: nodes skew, and times would not follow the numbers.
        on_server = self._database.is_postgresql
        now: Any = func.clock_timestamp() if on_server else datetime.now(UTC)
        async with self._database.writing() as connection:
            newest = await _newest(connection)
            if newest != change.base:
                raise VersionConflict(change.base, newest)
            asked = change.asked
            told = {"author": asked.author, "reason": asked.reason, "kind": asked.kind}
            row = (
                await connection.execute(
                    insert(versions)
                    .values(
                        number=newest + 1,
                        created_at=now,
                        base=change.base or None,
                        text=change.text,
                        **told,
                    )
                    .returning(versions.c.number, versions.c.created_at)
                )
            ).one()
            kept = {"version": row.number, "created_at": row.created_at, **told}
            await connection.execute(
                insert(audit).values(diff=change.diff, forced=change.forced, **kept)
            )
            if on_server:
                await connection.execute(_NOTIFY, {"channel": CHANNEL, "number": str(row.number)})
        return Version(
            number=row.number,
            created_at=row.created_at,
            text=change.text,
            base=change.base or None,
            **told,
        )


_NUMBER: Final = select(func.coalesce(func.max(versions.c.number), 0))
_NOTIFY: Final = text("SELECT pg_notify(:channel, :number)")


async def _newest(connection: AsyncConnection) -> int:
    number: int = (await connection.execute(_NUMBER)).scalar_one()
    return number


def _page(query: Any, number: Any, limit: int, before: int | None) -> Any:
    check_rows(limit)
    if before is not None:
        check_number(before)
        query = query.where(number < before)
    return query.order_by(number.desc()).limit(limit)


def _refuse_conflict(expected: int, current: Version | None) -> None:
    number = current.number if current else 0
    if number != expected:
        raise VersionConflict(expected, number)


def _canonical(document: Document) -> tuple[str, Document]:
    """The text to keep, and what it says. Raises DocumentError for what no node could read."""
    written = to_yaml(document)
    checked = read(written, "<document>")
    # Made by hand, it may have said the same in other words: a time of another zone, for example.
    return (written if checked == document else to_yaml(checked)), checked


def _diff(current: Version | None, written: str) -> str:
    number = current.number if current else 0
    names = f"version {number}", f"version {number + 1}"
    return unified_diff(current.text if current else "", written, *names)
