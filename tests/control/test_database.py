"""Database URLs: the valid ones, the errors of the others, and no password in any message."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import traceback
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from tollkeeper.control.database import Database
from tollkeeper.core.errors import ConfigError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///rules.db", "sqlite:///rules.db"),
        ("sqlite:////var/lib/rules.db", "sqlite:////var/lib/rules.db"),
        (f"postgresql://ann:{SECRET}@db/rules", "postgresql://db/rules"),
        (f"postgres://ann:{SECRET}@db:5433/rules", "postgresql://db:5433/rules"),
        (f"postgresql:///rules?host=/run/pg&password={SECRET}", "postgresql:///rules"),
    ],
)
def test_valid_urls(url: str, name: str) -> None:
    """The name for messages contains the host and the database, and neither user nor password."""
    database = Database(url)
    assert database.name == name
    assert database.is_postgresql == (not url.startswith("sqlite"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "None is not a URL"),
        ("", "cannot be read"),
        ("rules.db", "cannot be read"),
        (f"postgresql://ann:{SECRET}@db:port/rules", "cannot be read"),
        (f"mysql://ann:{SECRET}@db/rules", "'mysql' is not supported"),
        (f"postgresql+psycopg://ann:{SECRET}@db/rules", "'postgresql+psycopg' is not supported"),
        (f"postgresql://ann:{SECRET}@db", "names no database on 'db'"),
        ("sqlite://", "in memory is lost with its connection"),
        ("sqlite:///:memory:", "in memory is lost with its connection"),
        ("sqlite://rules.db", "in memory"),
        ("sqlite://folder/rules.db", "three slashes"),
        (f"sqlite:///rules.db?key={SECRET}", "and no options"),
    ],
)
def test_invalid_urls(url: str, words: str) -> None:
    """The error has the cause and an example; neither it nor its traceback has the password."""
    with pytest.raises(ConfigError) as error:
        Database(url)
    assert words in str(error.value)
    assert "sqlite:///rules.db" in str(error.value)
    assert SECRET not in "".join(traceback.format_exception(error.value, limit=0))


async def test_a_replaced_file_is_reopened(tmp_path: Path) -> None:
    """A restored backup is used at once, without a restart."""

    def filled(name: str) -> Path:
        with closing(sqlite3.connect(tmp_path / name)) as file, file:
            file.execute("CREATE TABLE names (name TEXT)")
            file.execute("INSERT INTO names VALUES (?)", (name,))
        return tmp_path / name

    database = Database(f"sqlite:///{filled('rules.db')}")

    async def found_name() -> str:
        async with database.reading() as connection:
            found = await connection.execute(text("SELECT name FROM names"))
            return str(found.scalar_one())

    assert [await found_name(), await found_name()] == ["rules.db", "rules.db"]
    filled("backup.db").replace(tmp_path / "rules.db")
    assert [await found_name(), await found_name()] == ["backup.db", "backup.db"]
    await database.close()


async def test_closing_waits_for_cancelled_statements(tmp_path: Path) -> None:
    """A thread of the driver that outlived the event loop would print a traceback."""
    database = Database(f"sqlite:///{tmp_path / 'rules.db'}")
    started, release = threading.Event(), threading.Event()

    def hold() -> bool:
        started.set()
        return release.wait(60)

    async def select() -> None:
        async with database.reading() as connection:
            raw = await connection.get_raw_connection()
            assert raw.driver_connection is not None
            await raw.driver_connection.create_function("hold", 0, hold)
            await connection.execute(text("SELECT hold()"))

    selecting = asyncio.create_task(select())
    assert await asyncio.to_thread(started.wait, 60)
    while not selecting.done():  # cancelled twice, the driver leaves the statement to its thread
        selecting.cancel()
        await asyncio.sleep(0)
    closing_all = asyncio.create_task(database.close())
    for _ in range(100):
        await asyncio.sleep(0)
    waits = not closing_all.done()
    release.set()
    await closing_all
    assert waits
    assert not [each for each in threading.enumerate() if "_connection_worker" in each.name]
