"""The repository's tables, and how a database gets them: once, however many nodes start together.

    ratekeeper_versions     each version of the rules, whole, as canonical text; number 1, 2, 3 …
    ratekeeper_audit        the author, time and reason of each version
    ratekeeper_entries      one row for each assignment, override and list entry (`entries.py`)
    ratekeeper_entry_audit  the author, time and reason of each change of an entry
    ratekeeper_feed         one row: the number of the newest change of an entry
    ratekeeper_schema       the revision of the schema (Alembic's table)

Rows of versions and of both audits are only ever added. Triggers reject every UPDATE and DELETE,
and every number that is not the next one.

A node that finds an old schema takes the writers' lock, looks again, and runs the missing revisions
in that one transaction. Other nodes wait, and then find it done. A current schema is only read, so
a node needs no permission to create tables.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    column,
    inspect,
    select,
    table,
    text,
)
from sqlalchemy.types import TypeDecorator

from ratekeeper.control.database import Database
from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.entries import KEY_BYTES_MAX

SCHEMA_TABLE: Final = "ratekeeper_schema"
MIGRATIONS: Final = Path(__file__).with_name("migrations")
REVISIONS: Final = ("0001", "0002", "0003")
"""The revisions in `migrations/versions`, the newest last."""

AUTHOR_LENGTH_MAX: Final = 200
REASON_LENGTH_MAX: Final = 1_000
KIND_LENGTH_MAX: Final = 40

# Alembic keeps its context in module globals, so a process runs one migration at a time.
_alembic: Final = Lock()


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC. SQLite stores no zone, so it is added when a row is read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(
        self,
        value: datetime | None,
        dialect: Dialect,  # noqa: ARG002 - SQLAlchemy's signature
    ) -> datetime | None:
        """Convert a value for the database."""
        return value and value.astimezone(UTC)

    def process_result_value(
        self,
        value: datetime | None,
        dialect: Dialect,  # noqa: ARG002 - SQLAlchemy's signature
    ) -> datetime | None:
        """Convert a value from the database."""
        if value is None or value.tzinfo is not None:
            return value and value.astimezone(UTC)
        return value.replace(tzinfo=UTC)


metadata = MetaData()

versions = Table(
    "ratekeeper_versions",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("created_at", UtcTime, nullable=False),
    Column("author", String(AUTHOR_LENGTH_MAX), nullable=False),
    Column("reason", String(REASON_LENGTH_MAX), nullable=False),
    Column("kind", String(KIND_LENGTH_MAX), nullable=False),
    Column("base", Integer),
    Column("text", Text, nullable=False),
)

audit = Table(
    "ratekeeper_audit",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("created_at", UtcTime, nullable=False),
    Column("author", String(AUTHOR_LENGTH_MAX), nullable=False),
    Column("reason", String(REASON_LENGTH_MAX), nullable=False),
    Column("kind", String(KIND_LENGTH_MAX), nullable=False),
    Column("diff", Text, nullable=False),
    Column("forced", Text, nullable=False),
)

_PURGED: Final = text("purge_at IS NOT NULL")

entries = Table(
    "ratekeeper_entries",
    metadata,
    Column("kind", String(10), primary_key=True),
    Column("key", String(KEY_BYTES_MAX), primary_key=True),
    Column("data", Text, nullable=False),
    # The number of the change that wrote the row. Numbers are given out under the writers' lock,
    # so a reader that has seen a number has seen all lower ones.
    Column("seq", BigInteger, nullable=False),
    Column("removed", Boolean, nullable=False),
    # Milliseconds since the epoch: when a removed or expired entry is deleted.
    Column("purge_at", BigInteger),
    Index("ratekeeper_entries_seq", "seq", unique=True),
    Index(
        "ratekeeper_entries_purge_at", "purge_at", sqlite_where=_PURGED, postgresql_where=_PURGED
    ),
)

entry_audit = Table(
    "ratekeeper_entry_audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("created_at", UtcTime, nullable=False),
    Column("author", String(AUTHOR_LENGTH_MAX), nullable=False),
    Column("reason", String(REASON_LENGTH_MAX), nullable=False),
    Column("kind", String(KIND_LENGTH_MAX), nullable=False),
    Column("key", String(KEY_BYTES_MAX), nullable=False),
    Column("before", Text),
    Column("after", Text),
    Column("count", Integer, nullable=False),
)

feed = Table(
    "ratekeeper_feed",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    # Removed entries up to this number may have been deleted: a reader that knows less reads all.
    Column("horizon", BigInteger, nullable=False),
)


async def bring_up_to_date(database: Database) -> None:
    """Create or migrate the tables. Raises ConfigError if the schema is newer than this code."""
    await database.reach()
    async with database.reading() as connection:
        revision = await connection.run_sync(_revision)
    newest = REVISIONS[-1]
    if revision == newest:
        return
    if revision is not None and revision not in REVISIONS:
        raise ConfigError(
            f"{database.name} has a schema of revision {revision}, which this version of "
            f"Ratekeeper does not know ({newest} is its newest); use a newer Ratekeeper"
        )
    # In a thread with its own event loop: on this loop, other tasks would run in the middle of a
    # migration and use Alembic's globals.
    await asyncio.to_thread(_migrate, database)


def _migrate(database: Database) -> None:
    with _alembic:
        asyncio.run(_migrate_alone(database.again()))


async def _migrate_alone(database: Database) -> None:
    try:
        async with database.writing() as connection:
            # Alembic skips the revisions that another node ran while this one waited for the lock.
            await connection.run_sync(_upgrade)
    finally:
        await database.close()


def _upgrade(connection: Connection) -> None:
    # Imported here: its libraries take a third of a second, and few processes migrate a schema.
    from alembic import command  # noqa: PLC0415 - see above
    from alembic.config import Config  # noqa: PLC0415 - see above

    config = Config()
    # The parser of the configuration treats % as the start of a variable.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    """Return the revision of a database's schema; None if it has none yet."""
    if not inspect(connection).has_table(SCHEMA_TABLE):
        return None
    return connection.execute(
        select(column("version_num")).select_from(table(SCHEMA_TABLE))
    ).scalar()
