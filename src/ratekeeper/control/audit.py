"""The audit of a fleet: every change with its author, time and reason, in one list.

    await repository.audit_log.add("grant", "user:42", data, author="ann", reason="support case")
    page = await repository.audit_log.page(AuditFilter(author="ann"), limit=50)

Changes of the rule document are in one table, with their diffs. Changes of entries, and operations
on counts (a grant, a reset), are in the other, with the data before and after. Operations change
counts in the store and not in this database. They take a number of the feed of entries, so that all
rows of the second table have numbers in the order of time.

A page merges both tables by time. A cursor has the lowest number of each table that was returned,
so a clock that steps back hides no change, and new changes do not shift the pages.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Self

from sqlalchemy import Select, Text, func, insert, literal, or_, select, update

from ratekeeper.control.database import Database
from ratekeeper.control.entries import ROWS_MAX, check_signature
from ratekeeper.control.schema import audit, entry_audit, feed
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.rules.entries import KEY_BYTES_MAX, owner_prefix

__all__ = ["AuditCursor", "AuditFilter", "AuditLog", "AuditPage", "AuditedChange"]

_CURSOR: Final = re.compile(r"([0-9]{1,10})\.([0-9]{1,19})")


class AuditCursor(NamedTuple):
    """Where a page starts: below these numbers of a version and of another change."""

    version: int
    change: int

    def __str__(self) -> str:
        return f"{self.version}.{self.change}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the cursor in a text. Raises ConfigError.

        >>> str(AuditCursor.read("12.345"))
        '12.345'
        """
        found = _CURSOR.fullmatch(text)
        if found is None or int(found[1]) >= 2**31 or int(found[2]) >= 2**63:
            raise ConfigError(f"before={show(text)} is not the `next` of a page, such as 12.345")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """The changes that a caller wants; None: any."""

    author: str | None = None
    kind: str | None = None
    key: str | None = None
    """A subject, the id of an override or of a rule, or an entry of a list."""
    since: datetime | None = None
    until: datetime | None = None
    """The end of the period, exclusive."""


@dataclass(frozen=True, slots=True)
class AuditedChange:
    """One change: a version of the rule document, a change of entries, or an operation."""

    created_at: datetime
    """In UTC, by the clock of the database server."""
    author: str
    reason: str
    kind: str
    """The kind of change: apply, rollback, put-rule, assign, import, grant, reset and so on."""
    version: int | None = None
    """The number of the version; None if the document did not change."""
    change: int | None = None
    """The number of the change, if it made no version."""
    key: str = ""
    """The entry that was changed: `user:42`, the id of an override, `deny ip:10.0.0.0/8`."""
    before: str | None = None
    after: str | None = None
    count: int = 1
    """How many entries have changed."""
    diff: str = ""
    """The changes of the rule document."""
    forced: str = ""
    """The safety findings that were overruled."""


_ANY: Final = AuditFilter()
_LISTS: Final = ("list", "unlist")
_OVERRIDES: Final = ("override", "remove-override")


class AuditPage(NamedTuple):
    """Changes, the newest first."""

    items: list[AuditedChange]
    next: AuditCursor | None
    """Where the next page starts; None if this is the last one."""


class AuditLog:
    """The audit in one database. `Repository.audit_log` is one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, kind: str, key: str, data: str, *, author: str, reason: str = "") -> None:
        """Add an operation that changes nothing in this database. Raises ConfigError, StoreError.

        Call it before the operation: an operation that the audit cannot hold must not be done.
        """
        check_signature(author, reason)
        row = {
            "kind": kind,
            # PostgreSQL stores no NUL.
            "key": key.replace("\0", "\ufffd")[:KEY_BYTES_MAX],
            "before": None,
            "after": data,
            "count": 1,
            "author": author,
            "reason": reason,
        }
        # Server time, not ours: nodes skew, and times would not follow the numbers.
        now: Any = func.clock_timestamp() if self._database.is_postgresql else datetime.now(UTC)
        async with self._database.writing() as connection:
            seq = (await connection.execute(select(feed.c.seq))).scalar_one() + 1
            await connection.execute(insert(entry_audit).values(seq=seq, created_at=now, **row))
            await connection.execute(update(feed).values(seq=seq))

    async def page(
        self,
        wanted: AuditFilter = _ANY,
        limit: int = 50,
        before: AuditCursor | None = None,
        *,
        length_max: int | None = None,
    ) -> AuditPage:
        """Return changes, the newest first, that match the filter.

        With `length_max`, longer diffs and data are cut there.
        """
        if any("\0" in each for each in (wanted.author, wanted.kind, wanted.key) if each):
            raise ConfigError("a filter of the audit has a NUL character; no entry has one")
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= ROWS_MAX:
            raise ConfigError(f"limit={show(limit)} is not from 1 to {ROWS_MAX:,}; try limit=50")
        versions = self._versions(wanted, length_max)
        changes = self._changes(wanted, length_max)
        if before is not None:
            versions = versions.where(audit.c.version < before.version)
            changes = changes.where(entry_audit.c.seq < before.change)
        async with self._database.reading() as connection:
            # One more row than the page holds shows whether there is a next page.
            found = await connection.execute(
                versions.order_by(audit.c.version.desc()).limit(limit + 1)
            )
            of_versions = [AuditedChange(**row) for row in found.mappings()]
            found = await connection.execute(
                changes.order_by(entry_audit.c.seq.desc()).limit(limit + 1)
            )
            of_entries = [AuditedChange(**row) for row in found.mappings()]
        merged = heapq.merge(
            of_versions, of_entries, key=lambda each: each.created_at, reverse=True
        )
        rows = list(merged)
        items = rows[:limit]
        if len(rows) <= limit:
            return AuditPage(items, None)
        numbers = [[each.version for each in of_versions], [each.change for each in of_entries]]
        taken = {each.version for each in items}, {each.change for each in items}
        return AuditPage(items, AuditCursor(*map(_lowest, numbers, taken)))

    def _versions(self, wanted: AuditFilter, length_max: int | None) -> Select[Any]:
        columns = [_cut(each, length_max) for each in audit.c]
        query = _matching(select(*columns), audit, wanted)
        if wanted.key is not None:
            query = query.where(self._position(audit.c.diff, wanted.key) > 0)
        return query

    def _changes(self, wanted: AuditFilter, length_max: int | None) -> Select[Any]:
        columns = [_cut(each, length_max) for each in entry_audit.c if each.name != "seq"]
        columns.append(entry_audit.c.seq.label("change"))
        query = _matching(select(*columns), entry_audit, wanted)
        if wanted.key is None:
            return query
        # A key may have several parts: `deny ip:10.0.0.0/8`, `tenant:acme user:42`.
        words = literal(" ") + entry_audit.c.key + " "
        conditions = [self._position(words, f" {wanted.key} ") > 0]
        attribute, _, value = wanted.key.partition(":")
        kind = entry_audit.c.kind
        for data in (entry_audit.c.before, entry_audit.c.after):
            # The data of a list entry are the entry as it was written.
            conditions.append(kind.in_(_LISTS) & (data == wanted.key))
            if value:  # the key of an override is its id, and its data begin with its subject
                begins = self._position(data, owner_prefix(attribute, value)) == 1
                conditions.append(kind.in_(_OVERRIDES) & begins)
        return query.where(or_(*conditions))

    @property
    def _position(self) -> Callable[..., Any]:
        """The function that finds a text in another: LIKE ignores the case on SQLite."""
        return func.strpos if self._database.is_postgresql else func.instr


def _cut(column: Any, length_max: int | None) -> Any:
    """Return a column without the end of a long text."""
    if length_max is None or not isinstance(column.type, Text):
        return column
    return func.substr(column, 1, length_max).label(column.name)


def _matching(query: Select[Any], table: Any, wanted: AuditFilter) -> Select[Any]:
    if wanted.author is not None:
        query = query.where(table.c.author == wanted.author)
    if wanted.kind is not None:
        query = query.where(table.c.kind == wanted.kind)
    if wanted.since is not None:
        query = query.where(table.c.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(table.c.created_at < wanted.until)
    return query


def _lowest(numbers: list[int | None], taken: set[int | None]) -> int:
    """Return the number below which the next page starts, given those that were found.

    Without any that were taken, it starts with the first one that was found: a change that is made
    meanwhile must not shift the pages.
    """
    found = [each for each in numbers if each is not None]
    return min((each for each in found if each in taken), default=max(found, default=0) + 1)
