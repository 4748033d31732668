"""URLs of databases: which there are, what is wrong with the others, and never a password."""

from __future__ import annotations

import sqlite3
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
def test_urls_that_name_a_database(url: str, name: str) -> None:
    """Its name for messages has the place, and neither user nor password."""
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
        (f"mysql://ann:{SECRET}@db/rules", "no rules in 'mysql'"),
        (f"postgresql+psycopg://ann:{SECRET}@db/rules", "no rules in 'postgresql+psycopg'"),
        (f"postgresql://ann:{SECRET}@db", "names no database on 'db'"),
        ("sqlite://", "in memory is gone with its connection"),
        ("sqlite:///:memory:", "in memory is gone with its connection"),
        ("sqlite://rules.db", "in memory"),
        ("sqlite://folder/rules.db", "three slashes"),
        (f"sqlite:///rules.db?key={SECRET}", "three slashes and no options"),
    ],
)
def test_urls_that_name_none(url: str, words: str) -> None:
    """What is wrong and a right one; the password is not in the message, nor in the traceback."""
    with pytest.raises(ConfigError) as error:
        Database(url)
    assert words in str(error.value)
    assert "sqlite:///rules.db" in str(error.value)
    assert SECRET not in "".join(traceback.format_exception(error.value, limit=0))


async def test_a_file_that_was_replaced_is_read(tmp_path: Path) -> None:
    """A backup that is put in its place is what is there from then on, without a restart."""

    def filled(name: str) -> Path:
        with closing(sqlite3.connect(tmp_path / name)) as file, file:
            file.execute("CREATE TABLE told (name TEXT)")
            file.execute("INSERT INTO told VALUES (?)", (name,))
        return tmp_path / name

    database = Database(f"sqlite:///{filled('rules.db')}")

    async def told() -> str:
        async with database.reading() as connection:
            found = await connection.execute(text("SELECT name FROM told"))
            return str(found.scalar_one())

    assert [await told(), await told()] == ["rules.db", "rules.db"]
    filled("backup.db").replace(tmp_path / "rules.db")
    assert [await told(), await told()] == ["backup.db", "backup.db"]
    await database.close()
