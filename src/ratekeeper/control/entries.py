"""The entries of a fleet as rows of the database: a change of one writes one small row.

    await repository.entries.put(assignment("user:42", "pro"), author="ann", reason="paid")
    await repository.entries.remove("assignment", "user:42", author="ann", reason="cancelled")
    await repository.entries.write(million, author="ann", reason="import", progress=print)

**The feed.** Every row has the number of the change that wrote it (`seq`). Numbers are given out
under the writers' lock, so they become visible in order. A node that knows all changes up to a
number reads the rows with higher numbers (`changes_since`). A removed entry stays as a row that
says so, and is deleted after RETENTION. A node that was away for longer reads all entries again.

**Expired overrides** are deleted after the same time, without a change: each node ignores an
expired override by itself. Every change deletes at most PURGE_MAX rows that are due.

**The document.** A change of an entry reads no document unless it has to: the ids and tiers of the
newest version are cached. Applying or rolling back a document leaves the entries alone.

**The audit** has one row for each change: author, time, reason, key, and the data before and after.
An import is one change, with the number of its entries.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratekeeper.control.database import CHANNEL, Database
from ratekeeper.control.edits import NotFound
from ratekeeper.control.schema import (
    AUTHOR_LENGTH_MAX,
    REASON_LENGTH_MAX,
    entry_audit,
    feed,
)
from ratekeeper.control.schema import entries as rows
from ratekeeper.core.errors import (
    ChangeRefused,
    ConfigError,
    SafetyFinding,
    UnsafeChange,
    show,
)
from ratekeeper.core.subjects import beyond
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import DocumentError, from_data
from ratekeeper.rules.document.safety import entry_findings
from ratekeeper.rules.entries import (
    Entry,
    EntryKind,
    ListName,
    RowFields,
    list_entry,
    override_of,
    owner_prefix,
    parse_override,
)
from ratekeeper.rules.matching.lists import IRREGULAR_GLOBS_MAX, is_irregular

__all__ = ["DuplicateId", "EntryChange", "EntryRows", "FeedPage", "FeedPosition", "InvalidEntry"]

RETENTION: Final = timedelta(days=7)
"""How long a removed or expired entry stays in the database."""
PURGE_MAX: Final = 1_000
# SQLite has a maximum of parameters of a statement.
PARAMETERS_MAX: Final = 500
BATCH_ROWS: Final = 10_000
# A page of the feed; its rows take about 20 MB while they are applied.
PAGE_ROWS: Final = 50_000
ROWS_MAX: Final = 1_000
"""The largest page of entries."""
IMPORT_ENTRIES_MAX: Final = 10_000_000
# The import of ten million entries; other writers wait meanwhile.
IMPORT_SECONDS_MAX: Final = 900.0

RemoveKind = Literal["unassign", "remove-override", "unlist"]
ChangeKind = Literal["assign", "override", "list", "import", RemoveKind]
_PUT: Final[dict[EntryKind, ChangeKind]] = {
    "assignment": "assign",
    "override": "override",
    "allow": "list",
    "deny": "list",
}
REMOVE_KINDS: Final[dict[EntryKind, RemoveKind]] = {
    "assignment": "unassign",
    "override": "remove-override",
    "allow": "unlist",
    "deny": "unlist",
}
_UPSERT: Final = """
ON CONFLICT (kind, key) DO UPDATE SET data = excluded.data, seq = excluded.seq,
removed = excluded.removed, purge_at = excluded.purge_at
WHERE ratekeeper_entries.removed <> excluded.removed OR ratekeeper_entries.data <> excluded.data
"""
_COLUMNS: Final = "INSERT INTO ratekeeper_entries (kind, key, data, seq, removed, purge_at)"
_SQLITE_WRITE: Final = text(
    f"{_COLUMNS} VALUES (:kind, :key, :data, :seq, FALSE, :purge_at) {_UPSERT}"
)
# One statement for a whole batch: the driver would send a million statements one by one.
_POSTGRESQL_WRITE: Final = text(
    f"""{_COLUMNS}
    SELECT kind, key, data, seq, FALSE, purge_at FROM unnest(
        CAST(:kind AS text[]), CAST(:key AS text[]), CAST(:data AS text[]),
        CAST(:seq AS bigint[]), CAST(:purge_at AS bigint[])
    ) AS given (kind, key, data, seq, purge_at) {_UPSERT}"""  # noqa: S608 - constants
)

_GLOB: Final = re.compile(r"[?\[]|\*.")
_PLAN_ANEW: Final = text("SET LOCAL plan_cache_mode = force_custom_plan")
_FEED: Final = """
SELECT kind, key, data, seq, removed FROM ratekeeper_entries
WHERE seq > $1 ORDER BY seq LIMIT $2
"""
_WHOLE_FEED: Final = _FEED.replace("$1", "$1 AND NOT removed")

# The subject of an override as one text: `user:42`. An index has the same expression. Subjects are
# compared by their code points, as Python does: a collation of PostgreSQL may have another order.
_OWNERS_SQL: Final = {
    True: "coalesce('user:' || (CAST(data AS jsonb) #>> '{for,user}'), "
    "'api_key:' || (CAST(data AS jsonb) #>> '{for,api_key}'), "
    "'tenant:' || (CAST(data AS jsonb) #>> '{for,tenant}'), "
    "'ip:' || (CAST(data AS jsonb) #>> '{for,ip}')) COLLATE \"C\"",
    False: "coalesce('user:' || json_extract(data, '$.for.user'), "
    "'api_key:' || json_extract(data, '$.for.api_key'), "
    "'tenant:' || json_extract(data, '$.for.tenant'), "
    "'ip:' || json_extract(data, '$.for.ip'))",
}
_KEYS_SQL: Final = {True: 'key COLLATE "C"', False: "key"}
_SUBJECTS: Final = """
SELECT {subject}, kind, key, data FROM ratekeeper_entries
WHERE kind = {kind} AND NOT removed AND {subject} {start} {end}
AND (purge_at IS NULL OR purge_at > :now) ORDER BY {subject} LIMIT :limit
"""


class DuplicateId(ChangeRefused):
    """Another override has this id."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is an override {show(name)} already; choose another id, or remove that one"
        )


class InvalidEntry(ConfigError):
    """One of several entries is invalid; none was written."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position
        """The position of the entry among those given, from 0."""


@dataclass(frozen=True, slots=True)
class EntryChange:
    """One change of an entry, or one import: a row of the audit."""

    seq: int
    """The number of the change."""
    author: str
    reason: str
    created_at: datetime
    """In UTC, by the clock of the database server."""
    kind: str
    """The kind of change: assign, override, list, import and so on."""
    key: str
    """`user:42`, the id of an override, or `deny ip:10.0.0.0/8`; empty for an import."""
    before: str | None
    """The data before; None if there was no entry."""
    after: str | None
    """The data after; None if the entry was removed."""
    count: int
    """The number of entries that changed."""


class FeedPosition(NamedTuple):
    """The newest change of an entry, and the oldest position from which changes can be read."""

    seq: int
    horizon: int


class FeedPage(NamedTuple):
    """Rows in the order of their changes."""

    rows: Sequence[RowFields]
    seq: int
    """A reader that has applied the rows knows all changes up to this number."""
    whole: bool
    """True if the pages hold all entries, and the reader forgets those that it had."""


class EntryRows:
    """The entries in one database. `Repository.entries` is one."""

    def __init__(self, database: Database, document: Callable[[], Awaitable[Document]]) -> None:
        """`document` returns the newest rule document, which defines tiers and rules."""
        self._database = database
        self._document = document

    # ── Reading ────────────────────────────────────────────────────────────────────────────────

    async def position(self) -> FeedPosition:
        """Return the newest change and the horizon. It reads one row."""
        async with self._database.reading() as connection:
            return await _position(connection)

    async def get(self, kind: EntryKind, key: str) -> Entry | None:
        """Return one entry; None if it does not exist."""
        query = select(rows.c.data).where(rows.c.kind == kind, rows.c.key == key, _live())
        async with self._database.reading() as connection:
            data = (await connection.execute(query)).scalar_one_or_none()
        return None if data is None else Entry(kind, key, data)

    async def page(
        self, kind: EntryKind, *, limit: int = 50, offset: int = 0, data: str | None = None
    ) -> tuple[list[Entry], int]:
        """Return entries of a kind in the order of their keys, and the number of all of them.

        With `data`, only those with this data: the members of a tier.
        """
        _check_page(limit)
        wanted = [rows.c.kind == kind, _live()]
        if data is not None:
            wanted.append(rows.c.data == data)
        query = select(rows.c.kind, rows.c.key, rows.c.data).where(*wanted)
        async with self._database.reading() as connection:
            total = await connection.scalar(select(func.count()).select_from(rows).where(*wanted))
            found = await connection.execute(query.order_by(rows.c.key).limit(limit).offset(offset))
            return [Entry(*row) for row in found], total or 0

    async def known(self, kind: EntryKind, keys: Sequence[str]) -> set[str]:
        """Return those of the keys that are entries of this kind."""
        found: set[str] = set()
        async with self._database.reading() as connection:
            for at in range(0, len(keys), PARAMETERS_MAX):
                some = rows.c.key.in_(keys[at : at + PARAMETERS_MAX])
                query = select(rows.c.key).where(rows.c.kind == kind, some, _live())
                found.update((await connection.execute(query)).scalars())
        return found

    async def members_of(self, tiers: Collection[str]) -> dict[str, str]:
        """Return one subject of each of these tiers that has any."""
        if not tiers:
            return {}
        query = (
            select(rows.c.data, func.min(rows.c.key))
            .where(rows.c.kind == "assignment", rows.c.data.in_(list(tiers)), _live())
            .group_by(rows.c.data)
        )
        async with self._database.reading() as connection:
            return {row[0]: row[1] for row in await connection.execute(query)}

    async def overrides_of(
        self, attribute: str, value: str, rule: str | None = None
    ) -> list[Entry]:
        """Return the overrides of one subject for a rule (None: those for every rule)."""
        begins = rows.c.data.startswith(owner_prefix(attribute, value), autoescape=True)
        query = select(rows.c.kind, rows.c.key, rows.c.data).where(
            rows.c.kind == "override", begins, _live()
        )
        async with self._database.reading() as connection:
            found = [Entry(*row) for row in await connection.execute(query)]
        wanted = attribute, value, rule
        # SQLite compares the beginning without regard to case.
        return [
            entry
            for entry in found
            if ((override := override_of(entry)).attribute, override.value, override.rule) == wanted
        ]

    async def by_subject(
        self, kind: EntryKind, begin: str, after: str, limit: int
    ) -> list[tuple[str, Entry]]:
        """Return the entries of a kind whose subject begins with a text, in order of subjects.

        `after`  only subjects after this one

        An index finds them: the number of rows that are read does not grow with the table.
        """
        is_override = kind == "override"
        subject = (_OWNERS_SQL if is_override else _KEYS_SQL)[self._database.is_postgresql]
        given: dict[str, Any] = {
            "start": max(begin, after),
            "now": _ms(_now() + RETENTION),
            "limit": limit,
        }
        end = beyond(begin)
        if end is not None:
            given["end"] = end
        if not is_override:
            given["kind"] = kind
        query = _SUBJECTS.format(
            subject=subject,
            # One bound: of two, SQLite would search the index for either, and read on from there.
            start="> :start" if after >= begin else ">= :start",
            # The index of overrides is partial, so the planner has to see the kind.
            kind="'override'" if is_override else ":kind",
            end="" if end is None else f"AND {subject} < :end",
        )
        async with self._database.reading() as connection:
            found = await connection.execute(text(query), given)
            return [(row[0], Entry(*row[1:])) for row in found]

    async def stream(
        self, kinds: Collection[EntryKind] | None = None
    ) -> AsyncGenerator[list[Entry], None]:
        """Yield all entries in batches, by kind and key. Expired overrides are left out."""
        at: tuple[str, str] = "", ""
        while True:
            query = select(rows.c.kind, rows.c.key, rows.c.data).where(
                _live(), tuple_(rows.c.kind, rows.c.key) > at
            )
            if kinds is not None:
                query = query.where(rows.c.kind.in_(list(kinds)))
            query = query.order_by(rows.c.kind, rows.c.key).limit(BATCH_ROWS)
            async with self._database.reading() as connection:
                found = [Entry(*row) for row in await connection.execute(query)]
            if found:
                yield found
            if len(found) < BATCH_ROWS:
                return
            at = found[-1].kind, found[-1].key

    async def changes_since(self, seq: int) -> AsyncGenerator[FeedPage, None]:
        """Yield the changes after a number, or all entries if the changes are not known.

        All entries are yielded for 0, for a number before the horizon, and for one that this
        database has not reached (it was restored from a backup).
        """
        position = await self.position()
        if seq == position.seq:
            return
        whole = seq == 0 or not position.horizon <= seq <= position.seq
        at = 0 if whole else seq
        query = _WHOLE_FEED if whole else _FEED
        while True:
            found: list[RowFields] = await self._database.rows(query, at, PAGE_ROWS)
            if found:
                at = found[-1][3]
            is_last = len(found) < PAGE_ROWS
            known = max(at, position.seq) if is_last else at
            # All entries leave removed ones out. An entry of an earlier page may have been removed
            # since the position was read, so the reader has to ask for later changes again.
            yield FeedPage(found, min(known, position.seq) if whole else known, whole)
            if is_last:
                return

    # ── Changing ───────────────────────────────────────────────────────────────────────────────

    async def put(
        self, entry: Entry, *, author: str, reason: str = "", force: bool = False
    ) -> EntryChange:
        """Add an entry, or replace the one with the same key.

        Raises DuplicateId for an override whose id is taken, DocumentError if the tier or the rule
        does not exist, and, unless `force` is True, UnsafeChange for a list entry that matches
        everyone or an override that no request fits.
        """
        check_signature(author, reason)
        document = await self._document()
        _check_references(entry, document)
        unsafe = () if force else await asyncio.to_thread(_unsafe, entry, document)
        if unsafe:
            raise UnsafeChange(unsafe)
        async with self._database.writing() as connection:
            before = await _data_of(connection, entry.kind, entry.key)
            if entry.kind == "override" and before is not None:
                raise DuplicateId(entry.key)
            await _check_ids(connection, [entry], 0)
            await _check_globs(connection, [entry])
            seq = (await _position(connection)).seq + 1
            await self._write_batch(connection, [entry], seq, always=True)
            change = _change(_PUT[entry.kind], entry, before, entry.data)
            return await self._finish(connection, seq, author, reason, change)

    async def remove(
        self, kind: EntryKind, key: str, *, author: str, reason: str = ""
    ) -> EntryChange:
        """Remove an entry. Raises NotFound if it does not exist."""
        check_signature(author, reason)
        if kind in {"allow", "deny"}:
            key = list_entry(kind, key).key
        async with self._database.writing() as connection:
            before = await _data_of(connection, kind, key)
            if before is None:
                raise NotFound(_not_found(kind, key))
            seq = (await _position(connection)).seq + 1
            row = {"seq": seq, "removed": True, "purge_at": _ms(_now() + RETENTION)}
            await connection.execute(
                update(rows).where(rows.c.kind == kind, rows.c.key == key).values(**row)
            )
            change = _change(REMOVE_KINDS[kind], Entry(kind, key, before), before, None)
            return await self._finish(connection, seq, author, reason, change)

    async def problems(self, entries: Sequence[Entry], limit: int) -> list[tuple[int, str]]:
        """Return the positions of entries that cannot be written, and why; at most `limit`."""
        document = await self._document()
        return await asyncio.to_thread(lambda: list(islice(_problems(entries, document), limit)))

    async def write(
        self,
        entries: Sequence[Entry],
        *,
        author: str,
        reason: str = "",
        replace: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> EntryChange:
        """Write many entries in one transaction: all of them, or none.

        `replace`   an override replaces the one with the same id, instead of raising InvalidEntry
        `progress`  called with the number of entries written so far

        All entries are checked before the first is written, by the rules of `put` without
        `force`. Raises InvalidEntry. Entries that exist already with the same data are left alone,
        and are not counted.
        """
        check_signature(author, reason)
        if len(entries) > IMPORT_ENTRIES_MAX:
            raise ConfigError(
                f"{len(entries):,} entries are more than {IMPORT_ENTRIES_MAX:,}; "
                f"write them in several parts"
            )
        for at, message in await self.problems(entries, 1):
            raise InvalidEntry(at, message)
        count = 0
        async with self._database.writing(IMPORT_SECONDS_MAX) as connection:
            before = seq = (await _position(connection)).seq
            if self._database.is_postgresql:
                # A plan that was made for an empty table reads the whole table for each batch.
                await connection.execute(_PLAN_ANEW)
            await _check_globs(connection, entries)
            for start in range(0, len(entries), BATCH_ROWS):
                batch = entries[start : start + BATCH_ROWS]
                await _check_ids(connection, batch, start, replace=replace)
                count += await self._write_batch(connection, batch, seq + 1)
                seq += len(batch)
                if progress is not None:
                    progress(start + len(batch))
            change = {"kind": "import", "key": "", "before": None, "after": None, "count": count}
            return await self._finish(connection, max(seq, before + 1), author, reason, change)

    async def _write_batch(
        self, connection: AsyncConnection, batch: Sequence[Entry], seq: int, *, always: bool = False
    ) -> int:
        """Write rows with numbers from `seq` on; return how many have changed.

        With `always`, a row that has the same data already gets the new number, too.
        """
        if always:
            for entry in batch:
                same = and_(rows.c.kind == entry.kind, rows.c.key == entry.key)
                await connection.execute(delete(rows).where(same))
        found = [
            (*entry, seq + at, _purge_at(entry) if entry.kind == "override" else None)
            for at, entry in enumerate(batch)
        ]
        names = "kind", "key", "data", "seq", "purge_at"
        if self._database.is_postgresql:
            columns = dict(zip(names, map(list, zip(*found, strict=True)), strict=True))
            return (await connection.execute(_POSTGRESQL_WRITE, columns)).rowcount
        given = [dict(zip(names, row, strict=True)) for row in found]
        return (await connection.execute(_SQLITE_WRITE, given)).rowcount

    async def _finish(
        self,
        connection: AsyncConnection,
        seq: int,
        author: str,
        reason: str,
        change: dict[str, Any],
    ) -> EntryChange:
        """Add the audit row, move the feed, purge, and notify."""
        # Server time, not ours: nodes skew, and times would not follow the numbers.
        now: Any = func.clock_timestamp() if self._database.is_postgresql else _now()
        row = {"seq": seq, "author": author, "reason": reason, **change}
        added = await connection.execute(
            insert(entry_audit).values(created_at=now, **row).returning(entry_audit.c.created_at)
        )
        horizon = await _purge(connection)
        await connection.execute(
            update(feed).values(
                seq=seq,
                horizon=func.max(feed.c.horizon, horizon)
                if not self._database.is_postgresql
                else func.greatest(feed.c.horizon, horizon),
            )
        )
        if self._database.is_postgresql:
            await connection.execute(select(func.pg_notify(CHANNEL, f"entries {seq}")))
        return EntryChange(created_at=added.scalar_one(), **row)


async def _position(connection: AsyncConnection) -> FeedPosition:
    found = (await connection.execute(select(feed.c.seq, feed.c.horizon))).one()
    return FeedPosition(*found)


async def _data_of(connection: AsyncConnection, kind: EntryKind, key: str) -> str | None:
    query = select(rows.c.data).where(rows.c.kind == kind, rows.c.key == key, _live())
    data: str | None = (await connection.execute(query)).scalar_one_or_none()
    return data


async def _purge(connection: AsyncConnection) -> int:
    """Delete rows that are due; return the highest number among them."""
    due = select(rows.c.kind, rows.c.key).where(rows.c.purge_at <= _ms(_now())).limit(PURGE_MAX)
    found = await connection.execute(
        delete(rows).where(tuple_(rows.c.kind, rows.c.key).in_(due)).returning(rows.c.seq)
    )
    return max(found.scalars(), default=0)


async def _check_ids(
    connection: AsyncConnection, batch: Sequence[Entry], start: int, *, replace: bool = False
) -> None:
    """Raise InvalidEntry if an override has the id of another one, or of another subject.

    Nodes find an override by its subject. An id that moves to another subject would leave the old
    one in the memory of a node that has not seen its removal, so a removed id keeps its subject
    for as long as its row is there.
    """
    given = {entry.key: at for at, entry in enumerate(batch) if entry.kind == "override"}
    keys = list(given)
    for at in range(0, len(keys), PARAMETERS_MAX):
        query = select(rows.c.key, rows.c.data, _live()).where(
            rows.c.kind == "override", rows.c.key.in_(keys[at : at + PARAMETERS_MAX])
        )
        for key, data, is_live in await connection.execute(query):
            new = batch[given[key]].data
            if json.loads(new)["for"] != json.loads(data)["for"]:
                message = (
                    f"{show(key)} was the id of an override of another subject; choose another"
                )
                raise InvalidEntry(start + given[key], message)
            if is_live and new != data and not replace:
                raise InvalidEntry(start + given[key], str(DuplicateId(key)))


async def _check_globs(connection: AsyncConnection, entries: Sequence[Entry]) -> None:
    """Raise InvalidEntry if a list would have more globs than nodes can try one by one."""
    for name in ("allow", "deny"):
        new = {
            entry.key: at
            for at, entry in enumerate(entries)
            if entry.kind == name and _GLOB.search(entry.key) and is_irregular(entry.key)
        }
        if not new:
            continue
        like = or_(*(rows.c.key.like(pattern) for pattern in ("%?%", "%[%", "%*_%")))
        query = select(rows.c.key).where(rows.c.kind == name, like, _live())
        known = {key for key in (await connection.execute(query)).scalars() if is_irregular(key)}
        added = [at for key, at in new.items() if key not in known]
        if added and len(known) + len(added) > IRREGULAR_GLOBS_MAX:
            first = entries[added[max(0, IRREGULAR_GLOBS_MAX - len(known))]]
            raise InvalidEntry(
                new[first.key],
                f"{show(first.key)}: the {name} list has more than {IRREGULAR_GLOBS_MAX:,} globs "
                f"that must be tried one by one; write it with one * at the end, like sk_live_*",
            )


def _problems(entries: Sequence[Entry], document: Document) -> Iterator[tuple[int, str]]:
    # Hashes of 64 bits: a million keys as text would take 200 MB more.
    seen: set[int] = set()
    safety = _ImportSafety(document)
    for at, entry in enumerate(entries):
        known = len(seen)
        seen.add(hash(entry[:2]))
        if len(seen) == known:
            yield at, f"{entry.kind} {show(entry.key)} is given twice; remove one"
            continue
        try:
            _check_references(entry, document)
        except DocumentError as error:
            yield at, error.problems[0].message
        except (ConfigError, DuplicateId) as error:
            yield at, str(error)
        else:
            if message := safety.problem(entry):
                yield at, message


def _check_references(entry: Entry, document: Document) -> None:
    """Raise DocumentError if the tier or rule does not exist; DuplicateId for a taken id."""
    if entry.kind == "assignment" and entry.data not in document.tiers:
        tiers = dict.fromkeys(document.tiers, "1/s")
        from_data({"version": 1, "tiers": tiers, "assign": {entry.key: entry.data}}, "<entry>")
    if entry.kind != "override":
        return
    data = json.loads(entry.data)
    if "rule" in data:
        parse_override(data, [rule.id for rule in document.rules])
    if any(override.id == entry.key for override in document.overrides):
        raise DuplicateId(entry.key)


def _unsafe(entry: Entry, document: Document) -> tuple[SafetyFinding, ...]:
    """Return the safety findings about one entry."""
    if entry.kind == "assignment":
        return ()
    if entry.kind == "override":
        alone = replace(document, allow=(), deny=(), overrides=(override_of(entry),))
        return tuple(entry_findings(alone))
    return _list_findings(entry.kind, [entry.data])


def _list_findings(name: ListName, entries: Sequence[str]) -> tuple[SafetyFinding, ...]:
    lists = {"allow": (), "deny": (), name: tuple(entries)}
    return tuple(entry_findings(Document(allow=lists["allow"], deny=lists["deny"])))


class _ImportSafety:
    """The safety findings about many entries, each in a few microseconds."""

    def __init__(self, document: Document) -> None:
        self._document = document
        # By the terms of an override, which many overrides share.
        self._by_terms: dict[tuple[str, ...], str] = {}

    def problem(self, entry: Entry) -> str:
        """Return why an entry is unsafe; empty if it is safe."""
        if entry.kind == "override":
            data = json.loads(entry.data)
            kind = next(iter(data["for"]))
            terms = kind, *(str(data.get(name)) for name in ("rule", "limits"))
            if terms not in self._by_terms and len(self._by_terms) < BATCH_ROWS:
                self._by_terms[terms] = _message(_unsafe(entry, self._document))
            found = self._by_terms.get(terms)
            return _message(_unsafe(entry, self._document)) if found is None else found
        if entry.kind == "assignment" or not ("*" in entry.data or "/" in entry.data):
            return ""
        return _message(_list_findings(entry.kind, [entry.data]))


def _message(unsafe: Sequence[SafetyFinding]) -> str:
    if not unsafe:
        return ""
    first = unsafe[0]
    # Overrides with equal terms share the message, so it does not name the subject.
    what = "" if first.code == "never-fits" else f"{first.what}: "
    return f"{what}{first.why}; {first.remedy}; an import cannot be forced"


def _change(
    kind: ChangeKind, entry: Entry, before: str | None, after: str | None
) -> dict[str, Any]:
    key = entry.key if entry.kind in {"assignment", "override"} else f"{entry.kind} {entry.key}"
    return {"kind": kind, "key": key, "before": before, "after": after, "count": 1}


def _live() -> ColumnElement[bool]:
    """Return the condition of rows that are neither removed nor expired."""
    # `purge_at` of an override is its end and RETENTION.
    ends = or_(rows.c.purge_at.is_(None), rows.c.purge_at > _ms(_now() + RETENTION))
    return and_(rows.c.removed.is_(False), ends)


def _purge_at(entry: Entry) -> int | None:
    until = json.loads(entry.data).get("until")
    return None if until is None else _ms(datetime.fromisoformat(until) + RETENTION)


def _not_found(kind: EntryKind, key: str) -> str:
    if kind == "assignment":
        return f"{show(key)} is assigned to no tier; subjects are written like user:42"
    if kind == "override":
        return f"there is no override {show(key)}; it has perhaps expired"
    return f"{show(key)} is not on the {kind} list"


def check_signature(author: str, reason: str) -> None:
    """Raise ConfigError unless the author is a name and the reason is printable text."""
    fits = isinstance(author, str) and 1 <= len(author) <= AUTHOR_LENGTH_MAX
    if not fits or not author.isprintable() or not author.strip():
        raise ConfigError(
            f"author={show(author)} is not a name: printable text of at most "
            f'{AUTHOR_LENGTH_MAX} characters; for example author="ann@example.com"'
        )
    if (
        not isinstance(reason, str)
        or len(reason) > REASON_LENGTH_MAX
        or not all(line.isprintable() for line in reason.splitlines())
    ):
        raise ConfigError(
            f"reason={show(reason)} is not printable text of at most {REASON_LENGTH_MAX:,} "
            f'characters; for example reason="launch day"'
        )


def _check_page(limit: int) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= ROWS_MAX:
        raise ConfigError(f"limit={show(limit)} is not from 1 to {ROWS_MAX:,}; try limit=50")


def _now() -> datetime:
    return datetime.now(UTC)


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1_000)
