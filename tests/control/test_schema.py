"""The schema on SQLite: created once, equal to the tables in use, and never read if it is newer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.dialects import sqlite

from ratekeeper.control.database import Database
from ratekeeper.control.schema import (
    MIGRATIONS,
    REVISIONS,
    SCHEMA_TABLE,
    UtcTime,
    bring_up_to_date,
    metadata,
)
from ratekeeper.core.errors import ConfigError


def differences(connection: Connection) -> list[object]:
    """Compare the tables in the database with those in the code."""
    options = {"version_table": SCHEMA_TABLE, "compare_type": True}
    found: list[object] = compare_metadata(
        MigrationContext.configure(connection, opts=options), metadata
    )
    return found


# SQLAlchemy cannot read the index of overrides by their subject.
@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
async def test_the_revisions_create_the_tables_in_use(tmp_path: Path) -> None:
    """Running them twice changes nothing."""
    database = Database(f"sqlite:///{tmp_path / 'rules.db'}")
    for _ in range(2):
        await bring_up_to_date(database)
        async with database.reading() as connection:
            assert await connection.run_sync(differences) == []
    await database.close()


def test_the_revisions_are_those_of_the_scripts() -> None:
    """The code repeats their names, so that it recognises a current schema without Alembic."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config).walk_revisions()
    assert tuple(script.revision for script in scripts) == REVISIONS[::-1]


async def test_a_newer_schema_is_rejected(tmp_path: Path) -> None:
    """The error names its revision."""
    database = Database(f"sqlite:///{tmp_path / 'rules.db'}")
    await bring_up_to_date(database)
    async with database.writing() as connection:
        await connection.execute(text(f"UPDATE {SCHEMA_TABLE} SET version_num = '9999'"))
    with pytest.raises(ConfigError, match=r"revision 9999, .* \(0003 is its newest\)"):
        await bring_up_to_date(database)
    await database.close()


def test_times_are_read_and_written_in_utc() -> None:
    """A time without a zone, as SQLite returns it, is in UTC."""
    kind, dialect = UtcTime(), sqlite.dialect()
    two = datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    midnight = datetime(2030, 1, 1, tzinfo=UTC)
    assert kind.process_bind_param(two, dialect) == midnight
    assert kind.process_result_value(datetime(2030, 1, 1), dialect) == midnight  # noqa: DTZ001 - as read
    assert kind.process_result_value(two, dialect) == midnight
    assert kind.process_result_value(None, dialect) is None
