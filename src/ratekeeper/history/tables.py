"""The tables of the records, in SQLite and PostgreSQL: how they are created, and how they shrink.

    ratekeeper_decisions        denials, and a share of the allowed requests; one row each
    ratekeeper_usage            usage by subject and rule, per minute or per hour
    ratekeeper_record_writers   the last batch of each writer, so that no batch is added twice
    ratekeeper_record_state     one row: the version of these tables, when they were trimmed, and
                                how much each writer may add

The first worker creates the tables that are missing (CREATE … IF NOT EXISTS), and adds the columns
that an earlier version did not have. The row in `ratekeeper_record_state` has the version. Tables
of an unknown version are rejected.

Times are integers since the epoch, in UTC, with their unit in the column's name, so they compare
and add up alike in both databases.

In PostgreSQL, `ratekeeper_decisions` is partitioned by day. Dropping a day is one quick statement
and leaves no holes. A partition is created before its first row, and before its day begins. SQLite
has one table, which is trimmed in small steps.

**Trimming** removes old rows in small steps, so that no other writer waits for long:

- Minutes of usage become hours when they are a day old: the sums stay, with a sixtieth of the rows.
- Usage is kept for some days, and decisions for fewer.

One worker of the fleet trims every TRIM_SECONDS: the one that first updates the time in
`ratekeeper_record_state`. Each step is a transaction. Its worker writes no records meanwhile, so it
stops after STEPS_MAX steps of each kind, some hundred milliseconds, and continues after its next
batch: thousands of rows a second, more than a worker ever writes. If that is not enough, another
worker helps a minute later.

**The bound.** The records have a maximum of rows (of each table) and of bytes (of both). The worker
that trims also counts rows and bytes, and publishes the *room* of each writer: a share of the space
left until FULL. So does a worker that starts. A writer that has used its room adds no row until the
next count, which it may ask for at once (`sink.py`). So the bound holds for any number of workers,
and after one was killed.

Above HIGH, the trimmer thins the *fullest hour* of the table, so that a flood of requests removes
records of its own hour, and not those of quiet days:

- Usage: minutes become hours early. Then the subjects with the fewest requests in that hour are
  added to OTHERS, those without usage in another hour first. The sums stay right. A client that
  sends random keys has one request under each, so real subjects stay.
- Decisions: the sample of allowed requests goes first, then a random part of the rest.

SQLite reuses freed pages, and returns them to the disk while the file is larger than HIGH.
PostgreSQL reuses the space of rows after VACUUM, which the trimmer runs. Its size is computed from
the rows, because freed space in a table is not visible without an extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import text

from ratekeeper.control.database import lock
from ratekeeper.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratekeeper.control.database import Database

VERSION: Final = 4
# Versions whose tables `create` extends.
_EARLIER: Final = frozenset({1, 2, 3})
# Partitions are created this many days ahead: enough for a database that fails over a weekend.
DAYS_AHEAD: Final = 3
DAY_US: Final = 86_400 * 10**6

# "raterecs" as a number: the lock for creating and dropping tables.
ADVISORY_LOCK: Final = 0x7261746572656373

_DECISIONS: Final = """
CREATE TABLE IF NOT EXISTS ratekeeper_decisions (
    id {serial},
    at_us BIGINT NOT NULL,
    node TEXT NOT NULL,
    rule TEXT NOT NULL,
    subject TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    method TEXT NOT NULL,
    outcome TEXT NOT NULL,
    kind TEXT NOT NULL,
    cost BIGINT NOT NULL,
    retry_after_ms BIGINT NOT NULL,
    degraded INTEGER NOT NULL,
    shadow_denied TEXT NOT NULL
) {partitioned}
"""
# Added after the tables were created: earlier versions did not have these columns.
_ADDED: Final = (
    ("ratekeeper_decisions", "limit_units BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_decisions", "window_ms BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_decisions", "used_units BIGINT NOT NULL DEFAULT -1"),
    ("ratekeeper_decisions", "region TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_decisions", "user_id TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_decisions", "tenant TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_decisions", "api_key TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_decisions", "ip TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_decisions", "request_id TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_decisions", "rules TEXT NOT NULL DEFAULT '{}'"),
    ("ratekeeper_usage", "shadow_denied BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_usage", "denied_indirectly BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_usage", "region TEXT NOT NULL DEFAULT ''"),
    ("ratekeeper_record_state", "measured BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_record_state", "decision_rows BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_record_state", "decision_bytes BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_record_state", "usage_rows BIGINT NOT NULL DEFAULT 0"),
    ("ratekeeper_record_state", "usage_bytes BIGINT NOT NULL DEFAULT 0"),
)
_TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS ratekeeper_usage (
    subject TEXT NOT NULL,
    rule TEXT NOT NULL,
    step_s INTEGER NOT NULL,
    start_s BIGINT NOT NULL,
    allowed BIGINT NOT NULL,
    denied BIGINT NOT NULL,
    units NUMERIC NOT NULL
)""",
    """
CREATE TABLE IF NOT EXISTS ratekeeper_record_writers (
    writer TEXT NOT NULL PRIMARY KEY,
    batch BIGINT NOT NULL,
    at_s BIGINT NOT NULL
)""",
    """
CREATE TABLE IF NOT EXISTS ratekeeper_record_state (
    id INTEGER NOT NULL PRIMARY KEY,
    version INTEGER NOT NULL,
    tended_s BIGINT NOT NULL
)""",
)
# The name, the table, the columns, and the condition of a partial index.
_INDEXES: Final = (
    ("ratekeeper_decisions_at", "ratekeeper_decisions (at_us, id)"),
    ("ratekeeper_decisions_of", "ratekeeper_decisions (subject, at_us, id)"),
    ("ratekeeper_decisions_by", "ratekeeper_decisions (rule, at_us, id)"),
    ("ratekeeper_decisions_user", "ratekeeper_decisions (user_id, at_us, id) WHERE user_id <> ''"),
    ("ratekeeper_decisions_tenant", "ratekeeper_decisions (tenant, at_us, id) WHERE tenant <> ''"),
    (
        "ratekeeper_decisions_request",
        "ratekeeper_decisions (request_id, at_us, id) WHERE request_id <> ''",
    ),
    (
        "ratekeeper_decisions_shadow",
        "ratekeeper_decisions (at_us, id) WHERE shadow_denied <> '[]'",
    ),
    ("ratekeeper_usage_at", "ratekeeper_usage (start_s)"),
)
# Subjects are searched in the order of their code points, which is that of SQLite's indexes.
_SUBJECTS_POSTGRESQL: Final = (
    'CREATE INDEX IF NOT EXISTS ratekeeper_usage_subject ON ratekeeper_usage (subject COLLATE "C")'
)
# All writers of a region add to the same row.
_USAGE_KEY: Final = (
    "CREATE UNIQUE INDEX IF NOT EXISTS ratekeeper_usage_key "
    "ON ratekeeper_usage (subject, rule, start_s, step_s, region)"
)
_VERSION_ROW: Final = f"""
INSERT INTO ratekeeper_record_state (id, version, tended_s) VALUES (1, {VERSION}, 0)
ON CONFLICT (id) DO UPDATE SET version = excluded.version
"""  # noqa: S608 - our own number
_STATE: Final = "ratekeeper_record_state"
_NAMES: Final = ("ratekeeper_decisions", "ratekeeper_usage", "ratekeeper_record_writers", _STATE)
_QUOTED: Final = ", ".join(f"'{name}'" for name in _NAMES)
_THERE: Final = {
    True: f"SELECT name FROM unnest(ARRAY[{_QUOTED}]) AS name "  # noqa: S608 - our own names
    "WHERE to_regclass(name) IS NOT NULL",
    False: f"SELECT name FROM sqlite_master WHERE name IN ({_QUOTED})",  # noqa: S608 - same
}


async def version(connection: AsyncConnection, *, is_postgresql: bool) -> int | None:
    """Return the version of the tables; None if `create` has something to create or to extend."""
    found = await connection.execute(text(_THERE[is_postgresql]))
    there = set(found.scalars())
    if _STATE not in there:
        return None
    row = await connection.execute(text(f"SELECT version FROM {_STATE}"))  # noqa: S608 - our own
    number: int | None = row.scalar_one_or_none()
    is_incomplete = number == VERSION and len(there) < len(_NAMES)
    return None if is_incomplete or number in _EARLIER else number


def check_version(found: int | None, name: str) -> None:
    """Raise ConfigError for tables of another version."""
    if found not in {None, VERSION}:
        raise ConfigError(
            f"the records in {name} have version {found}, and this Ratekeeper supports version "
            f"{VERSION}; use a newer Ratekeeper, or name another database with --record"
        )


async def create(connection: AsyncConnection, *, is_postgresql: bool) -> None:
    """Create the missing tables and columns, in a transaction that waits for others that do it."""
    if is_postgresql:
        await lock(connection, ADVISORY_LOCK)
    serial = "BIGSERIAL NOT NULL" if is_postgresql else "INTEGER PRIMARY KEY AUTOINCREMENT"
    partitioned = "PARTITION BY RANGE (at_us)" if is_postgresql else ""
    await connection.execute(text(_DECISIONS.format(serial=serial, partitioned=partitioned)))
    for statement in _TABLES:
        await connection.execute(text(statement))
    for table, column in _ADDED:
        if is_postgresql:
            await connection.execute(text(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column}"))
        elif column.split()[0] not in await _columns(connection, table):
            await connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {column}"))
    await _drop_usage_key(connection, is_postgresql=is_postgresql)
    await connection.execute(text(_USAGE_KEY))
    for name, columns in _INDEXES:
        await connection.execute(text(f"CREATE INDEX IF NOT EXISTS {name} ON {columns}"))
    if is_postgresql:
        await connection.execute(text(_SUBJECTS_POSTGRESQL))
    await connection.execute(text(_VERSION_ROW))


async def _drop_usage_key(connection: AsyncConnection, *, is_postgresql: bool) -> None:
    """Drop the key of the usage that earlier versions had: it is without the region."""
    if is_postgresql:
        await connection.execute(
            text("ALTER TABLE ratekeeper_usage DROP CONSTRAINT IF EXISTS ratekeeper_usage_pkey")
        )
        return
    found = await connection.execute(text("PRAGMA table_info(ratekeeper_usage)"))
    columns = [tuple(row) for row in found]
    if not any(is_key for *_, is_key in columns):
        return
    # SQLite cannot drop the key of a table, so the rows move to a table without one.
    names = ", ".join(str(column[1]) for column in columns)
    kinds = ", ".join(
        f"{name} {kind} NOT NULL{'' if default is None else f' DEFAULT {default}'}"
        for _, name, kind, _, default, _ in columns
    )
    for statement in (
        "ALTER TABLE ratekeeper_usage RENAME TO ratekeeper_usage_before",
        f"CREATE TABLE ratekeeper_usage ({kinds})",
        f"INSERT INTO ratekeeper_usage ({names}) SELECT {names} FROM ratekeeper_usage_before",  # noqa: S608 - our own names
        "DROP TABLE ratekeeper_usage_before",
    ):
        await connection.execute(text(statement))


async def _columns(connection: AsyncConnection, table: str) -> set[str]:
    """Return the names of the columns of a table in SQLite."""
    found = await connection.execute(text(f"PRAGMA table_info({table})"))
    return {str(row[1]) for row in found}


# ── Partitions of PostgreSQL ───────────────────────────────────────────────────────────────────


def day_of(at_us: int) -> date:
    """Return the day of a time, in UTC.

    >>> day_of(1_763_164_800_000_000)
    datetime.date(2025, 11, 15)
    """
    return date(1970, 1, 1) + timedelta(days=at_us // DAY_US)


def days_ahead(now_us: int) -> list[date]:
    """Return today and the following days that get a partition."""
    return [day_of(now_us) + timedelta(days=each) for each in range(DAYS_AHEAD + 1)]


def table_of(day: date) -> str:
    """Return the name of a day's partition.

    >>> table_of(date(2026, 11, 5))
    'ratekeeper_decisions_20261105'
    """
    return f"ratekeeper_decisions_{day:%Y%m%d}"


async def days(connection: AsyncConnection) -> list[date]:
    """Return the days that have a partition, the oldest first."""
    found = await connection.execute(
        text(
            "SELECT child.relname FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid "
            "WHERE inhparent = to_regclass('ratekeeper_decisions')"
        )
    )
    start = len("ratekeeper_decisions_")
    names = [str(name)[start:] for name in found.scalars()]
    return sorted(
        datetime.strptime(name, "%Y%m%d").replace(tzinfo=UTC).date()
        for name in names
        if len(name) == 8 and name.isdigit()
    )


async def create_days(connection: AsyncConnection, wanted: Iterable[date]) -> None:
    """Create the missing partitions of these days."""
    await lock(connection, ADVISORY_LOCK)
    there = set(await days(connection))
    for day in sorted(set(wanted) - there):
        start_us = (day - date(1970, 1, 1)).days * DAY_US
        await connection.execute(
            text(
                f"CREATE TABLE IF NOT EXISTS {table_of(day)} PARTITION OF ratekeeper_decisions "
                f"FOR VALUES FROM ({start_us}) TO ({start_us + DAY_US})"
            )
        )


async def drop_days(connection: AsyncConnection, before: date) -> list[date]:
    """Drop the partitions of the days before this one, and return those days."""
    await lock(connection, ADVISORY_LOCK)
    gone = [day for day in await days(connection) if day < before]
    for day in gone:
        await connection.execute(text(f"DROP TABLE IF EXISTS {table_of(day)}"))
    return gone


# ── Trimming ───────────────────────────────────────────────────────────────────────────────────

TRIM_SECONDS: Final = 60
STEP_ROWS: Final = 2_000
STEPS_MAX: Final = 5
MINUTES_KEPT_SECONDS: Final = 86_400
HOUR_SECONDS: Final = 3_600
DAY_SECONDS: Final = 86_400
# A writer that was silent for this long does not repeat a batch.
WRITER_SECONDS: Final = 7 * DAY_SECONDS

_COUNTS: Final = ("allowed", "denied", "units", "shadow_denied", "denied_indirectly")
ADD_COUNTS: Final = (
    "ON CONFLICT (subject, rule, start_s, step_s, region) DO UPDATE SET "
    + ", ".join(f"{each} = kept.{each} + excluded.{each}" for each in _COUNTS)
)
_COUNTED: Final = {
    "counts": ", ".join(_COUNTS),
    "sums": ", ".join(f"sum({each}) AS {each}" for each in _COUNTS),
    "added": ADD_COUNTS,
}
# PostgreSQL removes and adds the same rows in one statement, whatever other writers add meanwhile.
_ROLL_UP: Final = """
WITH gone AS (
    DELETE FROM ratekeeper_usage WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM ratekeeper_usage WHERE step_s = 60 AND start_s < :before
        ORDER BY start_s LIMIT :limit FOR UPDATE SKIP LOCKED))
    RETURNING *
), hours AS (
    SELECT subject, rule, start_s / 3600 * 3600 AS hour_s, region, {sums}
    FROM gone GROUP BY 1, 2, 3, 4 ORDER BY subject = '(others)', 1, 2, 3, 4
), added AS (
    INSERT INTO ratekeeper_usage AS kept (subject, rule, step_s, start_s, region, {counts})
    SELECT subject, rule, 3600, hour_s, region, {counts} FROM hours {added}
)
SELECT count(*) FROM gone
""".format(**_COUNTED)  # noqa: S608 - our own text
# SQLite has one writer at a time, so two statements find the same rows.
_OLD_MINUTES: Final = (
    "SELECT rowid FROM ratekeeper_usage WHERE step_s = 60 AND start_s < :before "
    "ORDER BY start_s, rowid LIMIT :limit"
)
_ADD_HOURS: Final = """
INSERT INTO ratekeeper_usage AS kept (subject, rule, step_s, start_s, region, {counts})
SELECT subject, rule, 3600, start_s / 3600 * 3600 AS hour_s, region, {sums}
FROM ratekeeper_usage WHERE rowid IN ({old}) GROUP BY subject, rule, hour_s, region {added}
""".format(old=_OLD_MINUTES, **_COUNTED)
_REMOVE_MINUTES: Final = f"""
DELETE FROM ratekeeper_usage WHERE rowid IN ({_OLD_MINUTES})
"""  # noqa: S608 - same
_REMOVE_USAGE: Final = (
    "DELETE FROM ratekeeper_usage WHERE {row} IN (SELECT {row} FROM ratekeeper_usage "
    "WHERE start_s < :before ORDER BY start_s LIMIT :limit)"
)


_ROOM: Final = (
    "SELECT measured, decision_rows, decision_bytes, usage_rows, usage_bytes "
    "FROM ratekeeper_record_state"
)
_SIZES_SQLITE: Final = """
SELECT (SELECT count(*) FROM ratekeeper_decisions), (SELECT count(*) FROM ratekeeper_usage),
    (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)
    - (SELECT freelist_count FROM pragma_freelist_count)
    * (SELECT page_size FROM pragma_page_size)
"""
_SIZES_POSTGRESQL: Final = """
SELECT decisions, decision_text, usage, usage_text FROM (
    SELECT count(*) AS decisions, coalesce(sum(pg_column_size(kept.*)), 0) AS decision_text
    FROM ratekeeper_decisions AS kept) AS one, (
    SELECT count(*) AS usage, coalesce(sum(pg_column_size(kept.*)), 0) AS usage_text
    FROM ratekeeper_usage AS kept) AS two
"""
# The hour with the most rows; the oldest one of several.
_FULLEST: Final = (
    "SELECT {at} / {hour} AS hour, count(*) FROM {table} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 1"
)
_PAIRS: Final = """
SELECT count(*) FROM (
    SELECT 1 FROM ratekeeper_usage
    WHERE start_s >= :from_s AND start_s < :to_s AND subject <> '(others)' GROUP BY subject, rule
) AS pairs
"""
_LEAST_BUSY: Final = """
SELECT subject, rule FROM (
    SELECT subject, rule, sum(allowed + denied + shadow_denied + denied_indirectly) AS requests
    FROM ratekeeper_usage WHERE start_s >= :from_s AND start_s < :to_s AND subject <> '(others)'
    GROUP BY subject, rule
) AS used ORDER BY EXISTS (
    SELECT 1 FROM ratekeeper_usage AS other
    WHERE other.subject = used.subject AND other.rule = used.rule
    AND (other.start_s < :from_s OR other.start_s >= :to_s)
), requests, subject, rule LIMIT :limit
"""
_THIS_SUBJECT: Final = (
    "WHERE subject = :subject AND rule = :rule AND start_s >= :from_s AND start_s < :to_s"
)
# SQLite: two statements for each subject.
_FOLD: Final = """
INSERT INTO ratekeeper_usage AS kept (subject, rule, step_s, start_s, {counts})
SELECT '(others)', rule, step_s, start_s, {sums}
FROM ratekeeper_usage {where} GROUP BY rule, step_s, start_s {added}
""".format(where=_THIS_SUBJECT, **_COUNTED)
_FOLDED: Final = f"DELETE FROM ratekeeper_usage {_THIS_SUBJECT}"  # noqa: S608 - our own text
# PostgreSQL: one statement. It waits for no row but those of OTHERS, which all writers lock last.
_FOLD_ALL: Final = """
WITH gone AS (
    DELETE FROM ratekeeper_usage WHERE ctid = ANY (ARRAY(
        SELECT kept.ctid FROM ratekeeper_usage AS kept
        JOIN unnest(CAST(:subjects AS text[]), CAST(:rules AS text[])) AS least (subject, rule)
            USING (subject, rule)
        WHERE kept.start_s >= :from_s AND kept.start_s < :to_s FOR UPDATE OF kept SKIP LOCKED))
    RETURNING *
), sums AS (
    SELECT rule, step_s, start_s, {sums} FROM gone GROUP BY 1, 2, 3 ORDER BY 1, 3, 2
), added AS (
    INSERT INTO ratekeeper_usage AS kept (subject, rule, step_s, start_s, {counts})
    SELECT '(others)', rule, step_s, start_s, {counts} FROM sums {added}
)
SELECT count(*) FROM gone
""".format(**_COUNTED)  # noqa: S608 - our own text
_DISPENSABLE: Final = """
SELECT at_us, id FROM ratekeeper_decisions WHERE at_us >= :from_us AND at_us < :to_us
ORDER BY outcome <> 'allowed' OR shadow_denied <> '[]', random() LIMIT :limit
"""
_FORGET: Final = "DELETE FROM ratekeeper_decisions WHERE at_us = :at_us AND id = :id"

# Parts of the bound: thinning begins, thinning ends, and no writer adds a row.
HIGH: Final = 0.8
LOW: Final = 0.7
FULL: Final = 0.9
# Subjects or decisions that are removed in one turn, and in one transaction.
THIN_MAX: Final = 5_000
THIN_STEP: Final = 1_000
# A measurement gives away this part of the space left: writers that have not read it yet still use
# the room of the last one.
ROOM_PARTS: Final = 4
# A writer that was silent for this long has ended, or has nothing to write.
WRITING_SECONDS: Final = 120
# The part of a row that is not text: numbers, headers, and the entries of its indexes.
DECISION_BYTES: Final = 400
USAGE_BYTES: Final = 150
# Every text is in the table, and most are also in an index.
TEXT_COPIES: Final = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """How long records are kept, and how many."""

    decisions_days: int = 7
    usage_days: int = 90
    rows_max: int = 500_000
    """Of decisions, and of usage."""
    bytes_max: int = 512_000_000
    """Of both together."""


class Room(NamedTuple):
    """How much a writer may add until the next measurement."""

    measured: int
    """The number of the measurement."""
    decision_rows: int
    decision_bytes: int
    usage_rows: int
    usage_bytes: int


class Sizes(NamedTuple):
    """The size of the tables. In SQLite, the bytes of each table are estimated."""

    decision_rows: int
    decision_bytes: int
    usage_rows: int
    usage_bytes: int


class Trimmer:
    """Trims the tables of one database."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention
        self.is_behind = False
        """True if there is more to trim at once."""

    async def join(self, writer: str, now_s: int) -> Room:
        """Add a writer, and return its room. Raises StoreError."""
        async with self._database.writing_shared() as connection:
            await connection.execute(
                text(
                    "INSERT INTO ratekeeper_record_writers (writer, batch, at_s) "
                    "VALUES (:writer, 0, :at_s) ON CONFLICT (writer) DO NOTHING"
                ),
                {"writer": writer, "at_s": now_s},
            )
        await self._publish_room(await self.sizes(), now_s)
        return await self.room()

    async def room(self) -> Room:
        """Return the room of each writer, as it was last measured. Raises StoreError."""
        async with self._database.reading() as connection:
            found = await connection.execute(text(_ROOM))
            return Room(*map(int, found.one()))

    async def trim(self, now_s: int, *, urgent: bool = False) -> bool:
        """Trim the due rows if it is this worker's turn. Raises StoreError.

        With `urgent`, a turn is due a second after the last one: a writer needs room.
        """
        if not self.is_behind and not await self._is_our_turn(now_s, 1 if urgent else TRIM_SECONDS):
            return False
        self.is_behind = False
        if self._database.is_postgresql:
            await self._drop_days(now_s)
        else:
            before_us = (now_s - self._retention.decisions_days * DAY_SECONDS) * 1_000_000
            await self._in_steps(
                "DELETE FROM ratekeeper_decisions WHERE id IN (SELECT id FROM ratekeeper_decisions "
                "WHERE at_us < :before ORDER BY at_us LIMIT :limit)",
                before_us,
            )
        # Whole hours: the last one stays in minutes until all of it is old enough.
        await self._roll_up((now_s - MINUTES_KEPT_SECONDS) // HOUR_SECONDS * HOUR_SECONDS)
        await self._in_steps(
            _REMOVE_USAGE.format(row="ctid" if self._database.is_postgresql else "rowid"),
            now_s - self._retention.usage_days * DAY_SECONDS,
        )
        await self._enforce_bound(now_s)
        return True

    async def _is_our_turn(self, now_s: int, every_s: int) -> bool:
        async with self._database.writing_shared() as connection:
            found = await connection.execute(
                text(
                    "UPDATE ratekeeper_record_state SET tended_s = :now "
                    "WHERE tended_s <= :due OR tended_s > :wrong"
                ),
                # A time that is far ahead was set by a wrong clock.
                {"now": now_s, "due": now_s - every_s, "wrong": now_s + TRIM_SECONDS},
            )
            if not found.rowcount:
                return False
            await connection.execute(
                text("DELETE FROM ratekeeper_record_writers WHERE at_s < :before"),
                {"before": now_s - WRITER_SECONDS},
            )
            return True

    async def _roll_up(self, before_s: int) -> None:
        """Add up the minutes before this time by the hour."""
        if self._database.is_postgresql:
            await self._in_steps(_ROLL_UP, before_s)
        else:
            await self._in_steps(_REMOVE_MINUTES, before_s, first=_ADD_HOURS)

    async def _drop_days(self, now_s: int) -> None:
        now_us = now_s * 1_000_000
        async with self._database.writing_shared() as connection:
            await create_days(connection, days_ahead(now_us))
        async with self._database.writing_shared() as connection:
            oldest = day_of(now_us) - timedelta(days=self._retention.decisions_days)
            await drop_days(connection, oldest)

    async def _in_steps(self, statement: str, before: int, first: str = "") -> None:
        """Run a statement (after `first`) on STEP_ROWS rows at a time, STEPS_MAX times at most."""
        given: dict[str, Any] = {"before": before, "limit": STEP_ROWS}
        for _ in range(STEPS_MAX):
            async with self._database.writing_shared() as connection:
                if first:
                    await connection.execute(text(first), given)
                done = await connection.execute(text(statement), given)
                count = done.scalar_one() if done.returns_rows else done.rowcount
            if count < STEP_ROWS:
                return
        self.is_behind = True

    # ── The bound ────────────────────────────────────────────────────────────────────────────

    async def sizes(self) -> Sizes:
        """Count the rows and bytes of both tables. Raises StoreError."""
        async with self._database.reading() as connection:
            if self._database.is_postgresql:
                counted = await connection.execute(text(_SIZES_POSTGRESQL))
                decisions, decision_text, usage, usage_text = map(int, counted.one())
                return Sizes(
                    decisions,
                    decisions * DECISION_BYTES + decision_text * TEXT_COPIES,
                    usage,
                    usage * USAGE_BYTES + usage_text * TEXT_COPIES,
                )
            counted = await connection.execute(text(_SIZES_SQLITE))
            decisions, usage, used = map(int, counted.one())
        # Decisions have three times the bytes of usage. SQLite may be built without dbstat, which
        # would know.
        shares = max(3 * decisions + usage, 1)
        of_decisions = used * 3 * decisions // shares
        return Sizes(decisions, of_decisions, usage, used - of_decisions)

    async def _enforce_bound(self, now_s: int) -> None:
        """Thin the tables that are too large, and publish the room of each writer."""
        keep, sizes = self._retention, await self.sizes()
        all_bytes = sizes.decision_bytes + sizes.usage_bytes
        too_many_bytes = all_bytes > HIGH * keep.bytes_max
        removed = 0
        usage_goes = too_many_bytes and sizes.usage_bytes >= sizes.decision_bytes
        if sizes.usage_rows > HIGH * keep.rows_max or usage_goes:
            await self._roll_up(now_s // HOUR_SECONDS * HOUR_SECONDS)
            part = _excess(sizes.usage_rows, sizes.usage_bytes, all_bytes, keep)
            removed += await self._thin_usage(part)
        decisions_go = too_many_bytes and not usage_goes
        if sizes.decision_rows > HIGH * keep.rows_max or decisions_go:
            part = _excess(sizes.decision_rows, sizes.decision_bytes, all_bytes, keep)
            removed += await self._thin_decisions(part)
        if removed:
            self.is_behind = self.is_behind or removed >= THIN_MAX
            await self._database.free_space("ratekeeper_usage", "ratekeeper_decisions")
            sizes = await self.sizes()
        await self._database.shrink(int(HIGH * keep.bytes_max))
        await self._publish_room(sizes, now_s)

    async def _publish_room(self, sizes: Sizes, now_s: int) -> None:
        keep = self._retention
        log_bytes = self._database.log_bytes()
        left_bytes = FULL * keep.bytes_max - sizes.decision_bytes - sizes.usage_bytes - log_bytes
        async with self._database.writing_shared() as connection:
            found = await connection.execute(
                text("SELECT count(*) FROM ratekeeper_record_writers WHERE at_s > :since"),
                {"since": now_s - WRITING_SECONDS},
            )
            writers = max(int(found.scalar_one()), 1) * ROOM_PARTS
            bytes_each = max(int(left_bytes), 0) // 2 // writers
            await connection.execute(
                text(
                    "UPDATE ratekeeper_record_state SET measured = measured + 1, "
                    "decision_rows = :decisions, decision_bytes = :bytes, "
                    "usage_rows = :usage, usage_bytes = :bytes"
                ),
                {
                    "bytes": bytes_each,
                    "decisions": max(int(FULL * keep.rows_max) - sizes.decision_rows, 0) // writers,
                    "usage": max(int(FULL * keep.rows_max) - sizes.usage_rows, 0) // writers,
                },
            )

    async def _thin_usage(self, count: int) -> int:
        """Count the least busy subjects of the fullest hour under OTHERS; return their number."""
        hour_s = await self._fullest("ratekeeper_usage", "start_s", HOUR_SECONDS)
        between = {"from_s": hour_s, "to_s": hour_s + HOUR_SECONDS}
        async with self._database.reading() as connection:
            pairs = (await connection.execute(text(_PAIRS), between)).scalar_one()
            # The busier half of an hour stays, however few subjects it has.
            limit = min(count, -(-pairs // 2))
            found = await connection.execute(text(_LEAST_BUSY), {**between, "limit": limit})
            least = sorted((str(subject), str(rule)) for subject, rule in found)
        for some in _parts(least):
            async with self._database.writing_shared() as connection:
                if self._database.is_postgresql:
                    subjects, rules = map(list, zip(*some, strict=True))
                    given = {**between, "subjects": subjects, "rules": rules}
                    await connection.execute(text(_FOLD_ALL), given)
                    continue
                each = [{**between, "subject": subject, "rule": rule} for subject, rule in some]
                await connection.execute(text(_FOLD), each)
                await connection.execute(text(_FOLDED), each)
        return len(least)

    async def _thin_decisions(self, count: int) -> int:
        """Remove decisions of the fullest hour; return their number."""
        hour_us = await self._fullest("ratekeeper_decisions", "at_us", HOUR_SECONDS * 10**6)
        given = {"from_us": hour_us, "to_us": hour_us + HOUR_SECONDS * 10**6, "limit": count}
        async with self._database.reading() as connection:
            found = await connection.execute(text(_DISPENSABLE), given)
            gone = sorted((int(at_us), int(number)) for at_us, number in found)
        for some in _parts(gone):
            async with self._database.writing_shared() as connection:
                each = [{"at_us": at_us, "id": number} for at_us, number in some]
                await connection.execute(text(_FORGET), each)
        return len(gone)

    async def _fullest(self, table: str, at: str, hour: int) -> int:
        """Return the beginning of the hour with the most rows, in the unit of `hour`."""
        async with self._database.reading() as connection:
            found = await connection.execute(text(_FULLEST.format(table=table, at=at, hour=hour)))
            row = found.one_or_none()
        return 0 if row is None else int(row[0]) * hour


def _excess(rows: int, table_bytes: int, all_bytes: int, keep: Retention) -> int:
    """Return how many rows of a table to remove now."""
    bytes_each = max(table_bytes // max(rows, 1), 1)
    over = max(rows - LOW * keep.rows_max, (all_bytes - LOW * keep.bytes_max) / bytes_each)
    return min(max(int(over), 0), THIN_MAX)


def _parts(rows: Sequence[tuple[Any, Any]]) -> Iterator[Sequence[tuple[Any, Any]]]:
    for start in range(0, len(rows), THIN_STEP):
        yield rows[start : start + THIN_STEP]
