"""Bringing the database's schema up to date, once, however many nodes start at the same time.

Whoever finds it behind takes the writers' lock, looks again, and runs what is missing in that one
transaction: the others wait, and find it done. A schema that is current is only looked at, so a
node needs no right to make tables.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from tollkeeper.control.database import Database
from tollkeeper.control.tables import SCHEMA_TABLE
from tollkeeper.core.errors import ConfigError

MIGRATIONS: Final = Path(__file__).with_name("migrations")

# Alembic keeps what it works on in its modules, so it can do one thing at a time in a process.
_alembic: Final = Lock()


async def bring_up_to_date(database: Database) -> None:
    """Raises ConfigError if the schema is newer than this code."""
    await database.reach()
    async with database.reading() as connection:
        revision = await connection.run_sync(_revision)
    if revision == _newest():
        return
    if revision is not None and revision not in _known():
        raise ConfigError(
            f"{database.name} has a schema of revision {revision}, which this version of "
            f"Tollkeeper does not know ({_newest()} is its newest); use a newer Tollkeeper"
        )
    # On a connection through the event loop, Alembic would be interrupted by other tasks that use
    # it. In a thread, with a loop of its own, it can be waited for.
    await asyncio.to_thread(_migrate, database)


def _migrate(database: Database) -> None:
    with _alembic:
        asyncio.run(_migrate_by_itself(database.again()))


async def _migrate_by_itself(database: Database) -> None:
    try:
        async with database.writing() as connection:
            # What somebody else did while we waited for the lock is found done.
            await connection.run_sync(_upgrade)
    finally:
        await database.close()


def _upgrade(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": SCHEMA_TABLE})
    return context.get_current_revision()


def _config() -> Config:
    config = Config()
    # It is read with % as the sign of a variable.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


@cache
def _known() -> tuple[str, ...]:
    """The revisions that this code has, the newest first."""
    scripts = ScriptDirectory.from_config(_config())
    return tuple(script.revision for script in scripts.walk_revisions())


def _newest() -> str:
    return _known()[0]
