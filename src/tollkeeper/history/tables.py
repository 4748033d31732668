"""The tables that records are kept in, in SQLite and PostgreSQL, and how they come to be.

    tollkeeper_decisions        denials, and a share of what was allowed; one row each
    tollkeeper_usage            who used how much under which rule, by minute or by hour
    tollkeeper_record_writers   the last batch of each writer, so that none is added twice
    tollkeeper_record_state     one row: the version of these tables, and when they were last tended

They are made where they are missing (CREATE … IF NOT EXISTS), by whoever comes first, and the row
in `tollkeeper_record_state` says which version they are: no migrations, because all of it may be
dropped and begun anew. A version that this code does not know is refused.

Times are whole numbers since the epoch, in UTC and with their unit in their name: they compare and
add up the same in both databases.

In PostgreSQL, `tollkeeper_decisions` is partitioned by day: old days are dropped as a whole, which
costs nothing and leaves no holes. A day's partition is made before its first row, and before the
day itself begins. SQLite has one table, trimmed in small steps.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from tollkeeper.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.ext.asyncio import AsyncConnection

VERSION: Final = 1
# How many days ahead a partition is made: enough for a database that is away over a weekend.
DAYS_AHEAD: Final = 3
DAY_US: Final = 86_400 * 10**6

# "tollrecs" as a number: the lock of those who make tables, or drop them.
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
""",  # noqa: S608 - a number of ours
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
    """Of the tables that are there; None: some are missing, and may be made."""
    found = await connection.execute(text(_THERE[is_postgresql]))
    there = set(found.scalars())
    if _STATE not in there:
        return None
    told = await connection.execute(text(f"SELECT version FROM {_STATE}"))  # noqa: S608 - our own
    number: int | None = told.scalar_one_or_none()
    return None if number == VERSION and len(there) < len(_NAMES) else number


def check_version(found: int | None, name: str) -> None:
    """Raises ConfigError for tables of another version than ours."""
    if found not in {None, VERSION}:
        raise ConfigError(
            f"the records in {name} are of version {found}, and this Tollkeeper knows version "
            f"{VERSION}; use a newer one, or name another database with --record"
        )


async def make(connection: AsyncConnection, *, is_postgresql: bool) -> None:
    """Make what is missing; in a transaction, which waits for others who do the same."""
    if is_postgresql:
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))
    serial = "BIGSERIAL NOT NULL" if is_postgresql else "INTEGER PRIMARY KEY AUTOINCREMENT"
    partitioned = "PARTITION BY RANGE (at_us)" if is_postgresql else ""
    await connection.execute(text(_DECISIONS.format(serial=serial, partitioned=partitioned)))
    for statement in _OTHERS:
        await connection.execute(text(statement))


# ── Days, in PostgreSQL ────────────────────────────────────────────────────────────────────────


def day_of(at_us: int) -> date:
    """The day of a moment, in UTC.

    >>> day_of(1_763_164_800_000_000)
    datetime.date(2025, 11, 15)
    """
    return date(1970, 1, 1) + timedelta(days=at_us // DAY_US)


def days_ahead(now_us: int) -> list[date]:
    """Today, and those that partitions are made for ahead."""
    return [day_of(now_us) + timedelta(days=each) for each in range(DAYS_AHEAD + 1)]


def table_of(day: date) -> str:
    """The partition of a day.

    >>> table_of(date(2026, 11, 5))
    'tollkeeper_decisions_20261105'
    """
    return f"tollkeeper_decisions_{day:%Y%m%d}"


async def days(connection: AsyncConnection) -> list[date]:
    """The days that there are partitions for, the oldest first."""
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


async def make_days(connection: AsyncConnection, wanted: Iterable[date]) -> None:
    """Make the partitions of these days, where they are missing."""
    await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))
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
    """Drop the partitions of the days before this one; which they were."""
    await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))
    gone = [day for day in await days(connection) if day < before]
    for day in gone:
        await connection.execute(text(f"DROP TABLE IF EXISTS {table_of(day)}"))
    return gone
