"""The tables of the records, in SQLite and PostgreSQL: how they are created, and how they shrink.

    tollkeeper_decisions        denials, and a share of the allowed requests; one row each
    tollkeeper_usage            usage by subject and rule, per minute or per hour
    tollkeeper_record_writers   the last batch of each writer, so that no batch is added twice
    tollkeeper_record_state     one row: the version of these tables, and when they were trimmed

The first worker creates the tables that are missing (CREATE … IF NOT EXISTS). The row in
`tollkeeper_record_state` has their version. There are no migrations, because all records may be
dropped. Tables of an unknown version are rejected.

Times are integers since the epoch, in UTC, with their unit in the column's name, so they compare
and add up alike in both databases.

In PostgreSQL, `tollkeeper_decisions` is partitioned by day. Dropping a day is one quick statement
and leaves no holes. A partition is created before its first row, and before its day begins. SQLite
has one table, which is trimmed in small steps.

**Trimming** removes old rows in small steps, so that no other writer waits for long:

- Minutes of usage become hours when they are a day old: the sums stay, with a sixtieth of the rows.
- Usage is kept for some days, and decisions for fewer.

One worker of the fleet trims every TRIM_SECONDS: the one that first updates the time in
`tollkeeper_record_state`. Each step is a transaction. Its worker writes no records meanwhile, so it
stops after STEPS_MAX steps of each kind, some hundred milliseconds, and continues after its next
batch: thousands of rows a second, more than a worker ever writes. If that is not enough, another
worker helps a minute later.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from tollkeeper.control.database import lock
from tollkeeper.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.ext.asyncio import AsyncConnection

    from tollkeeper.control.database import Database

VERSION: Final = 1
# Partitions are created this many days ahead: enough for a database that fails over a weekend.
DAYS_AHEAD: Final = 3
DAY_US: Final = 86_400 * 10**6

# "tollrecs" as a number: the lock for creating and dropping tables.
ADVISORY_LOCK: Final = 0x746F6C6C72656373

_DECISIONS: Final = """
CREATE TABLE IF NOT EXISTS tollkeeper_decisions (
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
_OTHERS: Final = (
    "CREATE INDEX IF NOT EXISTS tollkeeper_decisions_at ON tollkeeper_decisions (at_us, id)",
    """
CREATE INDEX IF NOT EXISTS tollkeeper_decisions_of ON tollkeeper_decisions (subject, at_us, id)
""",
    """
CREATE TABLE IF NOT EXISTS tollkeeper_usage (
    subject TEXT NOT NULL,
    rule TEXT NOT NULL,
    step_s INTEGER NOT NULL,
    start_s BIGINT NOT NULL,
    allowed BIGINT NOT NULL,
    denied BIGINT NOT NULL,
    units NUMERIC NOT NULL,
    PRIMARY KEY (subject, rule, start_s, step_s)
)""",
    "CREATE INDEX IF NOT EXISTS tollkeeper_usage_at ON tollkeeper_usage (start_s)",
    """
CREATE TABLE IF NOT EXISTS tollkeeper_record_writers (
    writer TEXT NOT NULL PRIMARY KEY,
    batch BIGINT NOT NULL,
    at_s BIGINT NOT NULL
)""",
    """
CREATE TABLE IF NOT EXISTS tollkeeper_record_state (
    id INTEGER NOT NULL PRIMARY KEY,
    version INTEGER NOT NULL,
    tended_s BIGINT NOT NULL
)""",
    f"""
INSERT INTO tollkeeper_record_state (id, version, tended_s) VALUES (1, {VERSION}, 0)
ON CONFLICT (id) DO NOTHING
""",  # noqa: S608 - our own number
)
_STATE: Final = "tollkeeper_record_state"
_NAMES: Final = ("tollkeeper_decisions", "tollkeeper_usage", "tollkeeper_record_writers", _STATE)
_QUOTED: Final = ", ".join(f"'{name}'" for name in _NAMES)
_THERE: Final = {
    True: f"SELECT name FROM unnest(ARRAY[{_QUOTED}]) AS name "  # noqa: S608 - our own names
    "WHERE to_regclass(name) IS NOT NULL",
    False: f"SELECT name FROM sqlite_master WHERE name IN ({_QUOTED})",  # noqa: S608 - same
}


async def version(connection: AsyncConnection, *, is_postgresql: bool) -> int | None:
    """Return the version of the tables; None if some are missing and may be created."""
    found = await connection.execute(text(_THERE[is_postgresql]))
    there = set(found.scalars())
    if _STATE not in there:
        return None
    row = await connection.execute(text(f"SELECT version FROM {_STATE}"))  # noqa: S608 - our own
    number: int | None = row.scalar_one_or_none()
    return None if number == VERSION and len(there) < len(_NAMES) else number


def check_version(found: int | None, name: str) -> None:
    """Raise ConfigError for tables of another version."""
    if found not in {None, VERSION}:
        raise ConfigError(
            f"the records in {name} have version {found}, and this Tollkeeper supports version "
            f"{VERSION}; use a newer Tollkeeper, or name another database with --record"
        )


async def create(connection: AsyncConnection, *, is_postgresql: bool) -> None:
    """Create the missing tables, in a transaction that waits for others that do the same."""
    if is_postgresql:
        await lock(connection, ADVISORY_LOCK)
    serial = "BIGSERIAL NOT NULL" if is_postgresql else "INTEGER PRIMARY KEY AUTOINCREMENT"
    partitioned = "PARTITION BY RANGE (at_us)" if is_postgresql else ""
    await connection.execute(text(_DECISIONS.format(serial=serial, partitioned=partitioned)))
    for statement in _OTHERS:
        await connection.execute(text(statement))


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
    'tollkeeper_decisions_20261105'
    """
    return f"tollkeeper_decisions_{day:%Y%m%d}"


async def days(connection: AsyncConnection) -> list[date]:
    """Return the days that have a partition, the oldest first."""
    found = await connection.execute(
        text(
            "SELECT child.relname FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid "
            "WHERE inhparent = to_regclass('tollkeeper_decisions')"
        )
    )
    start = len("tollkeeper_decisions_")
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
                f"CREATE TABLE IF NOT EXISTS {table_of(day)} PARTITION OF tollkeeper_decisions "
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

# PostgreSQL removes and adds the same rows in one statement, whatever other writers add meanwhile.
_ROLL_UP: Final = """
WITH gone AS (
    DELETE FROM tollkeeper_usage WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM tollkeeper_usage WHERE step_s = 60 AND start_s < :before
        ORDER BY start_s LIMIT :limit FOR UPDATE SKIP LOCKED))
    RETURNING subject, rule, start_s, allowed, denied, units
), hours AS (
    SELECT subject, rule, start_s / 3600 * 3600 AS hour_s, sum(allowed)::bigint AS allowed,
           sum(denied)::bigint AS denied, sum(units) AS units
    FROM gone GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
), added AS (
    INSERT INTO tollkeeper_usage AS kept
        (subject, rule, step_s, start_s, allowed, denied, units)
    SELECT subject, rule, 3600, hour_s, allowed, denied, units FROM hours
    ON CONFLICT (subject, rule, start_s, step_s) DO UPDATE SET
        allowed = kept.allowed + excluded.allowed,
        denied = kept.denied + excluded.denied,
        units = kept.units + excluded.units
)
SELECT count(*) FROM gone
"""
# SQLite has one writer at a time, so two statements find the same rows.
_OLD_MINUTES: Final = (
    "SELECT rowid FROM tollkeeper_usage WHERE step_s = 60 AND start_s < :before "
    "ORDER BY start_s, rowid LIMIT :limit"
)
_ADD_HOURS: Final = f"""
INSERT INTO tollkeeper_usage (subject, rule, step_s, start_s, allowed, denied, units)
SELECT subject, rule, 3600, start_s / 3600 * 3600 AS hour_s, sum(allowed), sum(denied), sum(units)
FROM tollkeeper_usage WHERE rowid IN ({_OLD_MINUTES}) GROUP BY subject, rule, hour_s
ON CONFLICT (subject, rule, start_s, step_s) DO UPDATE SET
    allowed = allowed + excluded.allowed,
    denied = denied + excluded.denied,
    units = units + excluded.units
"""  # noqa: S608 - our own text
_REMOVE_MINUTES: Final = f"""
DELETE FROM tollkeeper_usage WHERE rowid IN ({_OLD_MINUTES})
"""  # noqa: S608 - same
_REMOVE_USAGE: Final = (
    "DELETE FROM tollkeeper_usage WHERE {row} IN (SELECT {row} FROM tollkeeper_usage "
    "WHERE start_s < :before ORDER BY start_s LIMIT :limit)"
)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long records are kept."""

    decisions_days: int = 7
    usage_days: int = 90


class Trimmer:
    """Trims the tables of one database."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention
        self.is_behind = False
        """True if there is more to trim at once."""

    async def trim(self, now_s: int) -> bool:
        """Trim the due rows if it is this worker's turn. Raises StoreError."""
        if not self.is_behind and not await self._is_our_turn(now_s):
            return False
        self.is_behind = False
        if self._database.is_postgresql:
            await self._drop_days(now_s)
        else:
            before_us = (now_s - self._retention.decisions_days * DAY_SECONDS) * 1_000_000
            await self._in_steps(
                "DELETE FROM tollkeeper_decisions WHERE id IN (SELECT id FROM tollkeeper_decisions "
                "WHERE at_us < :before ORDER BY at_us LIMIT :limit)",
                before_us,
            )
        # Whole hours: the last one stays in minutes until all of it is old enough.
        hours_before_s = (now_s - MINUTES_KEPT_SECONDS) // HOUR_SECONDS * HOUR_SECONDS
        if self._database.is_postgresql:
            await self._in_steps(_ROLL_UP, hours_before_s)
        else:
            await self._in_steps(_REMOVE_MINUTES, hours_before_s, first=_ADD_HOURS)
        await self._in_steps(
            _REMOVE_USAGE.format(row="ctid" if self._database.is_postgresql else "rowid"),
            now_s - self._retention.usage_days * DAY_SECONDS,
        )
        return True

    async def _is_our_turn(self, now_s: int) -> bool:
        async with self._database.writing_shared() as connection:
            found = await connection.execute(
                text(
                    "UPDATE tollkeeper_record_state SET tended_s = :now "
                    "WHERE tended_s <= :due OR tended_s > :wrong"
                ),
                # A time that is far ahead was set by a wrong clock.
                {"now": now_s, "due": now_s - TRIM_SECONDS, "wrong": now_s + TRIM_SECONDS},
            )
            if not found.rowcount:
                return False
            await connection.execute(
                text("DELETE FROM tollkeeper_record_writers WHERE at_s < :before"),
                {"before": now_s - WRITER_SECONDS},
            )
            return True

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
