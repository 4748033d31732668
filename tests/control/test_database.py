"""Databases: their URLs, no password in any message, and connections to SQLite that all end."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import subprocess
import sys
import threading
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from ratekeeper.control.database import Database, _SqliteConnection, _SqliteCursor
from ratekeeper.core.errors import ConfigError, StoreUnavailable

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
    assert not threads_of_the_driver()


@pytest.mark.parametrize(
    ("owner", "method", "nth"),
    [
        (_SqliteConnection, "__init__", 1),
        (_SqliteConnection, "create_function", 1),
        (_SqliteConnection, "create_function", 2),
        (_SqliteCursor, "execute", 1),  # the write-ahead log
        (_SqliteCursor, "execute", 2),
        (_SqliteCursor, "execute", 3),
        (_SqliteConnection, "commit", 1),
    ],
)
async def test_a_cancelled_task_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, nth: int
) -> None:
    """The pool loses a connection whose set-up is cancelled; closing the database ends it."""
    database = Database(f"sqlite:///{tmp_path / 'rules.db'}")
    original = getattr(owner, method)
    calls = 0

    def cancelling(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            loop.call_soon_threadsafe(selecting.cancel)
        return original(*args, **kwargs)

    async def select() -> None:
        for _ in range(2):
            async with database.reading() as connection:
                await connection.execute(text("SELECT 1"))

    monkeypatch.setattr(owner, method, cancelling)
    loop, selecting = asyncio.get_running_loop(), asyncio.create_task(select())
    await asyncio.wait([selecting])
    await database.close()
    assert calls >= nth
    assert not threads_of_the_driver()
    gc.collect()  # an open connection would warn, and fail this test


async def test_a_file_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    """Also if the database is not closed: the thread would report to an event loop that ended."""
    database = Database(f"sqlite:///{tmp_path / 'missing' / 'rules.db'}")
    with pytest.raises(StoreUnavailable):
        await database.rows("SELECT 1")
    assert not threads_of_the_driver()


async def test_closing_ends_connections_in_use(tmp_path: Path) -> None:
    """Their next statement raises, and no thread waits for one."""
    database = Database(f"sqlite:///{tmp_path / 'rules.db'}")

    async def select() -> None:
        async with database.reading() as connection:
            await database.close()
            assert not threads_of_the_driver()
            await connection.execute(text("SELECT 1"))

    with pytest.raises(StoreUnavailable, match="no active connection"):
        await select()
    assert await database.rows("SELECT 1") == [(1,)]
    await database.close()


async def test_a_file_is_replaced_while_its_connection_is_in_use(tmp_path: Path) -> None:
    """The transaction ends on the old file; others use the new one, and all connections end."""
    path, other = tmp_path / "rules.db", tmp_path / "other.db"
    for file, name in ((path, "old"), (other, "new")):
        with closing(sqlite3.connect(file)) as made, made:
            made.execute("CREATE TABLE names AS SELECT ? AS name", (name,))
    database = Database(f"sqlite:///{path}")
    async with database.reading() as connection:
        other.replace(path)
        assert await database.rows("SELECT name FROM names") == [("new",)]
        assert (await connection.execute(text("SELECT name FROM names"))).scalar_one() == "old"
    for _ in range(2):
        assert await database.rows("SELECT name FROM names") == [("new",)]
    await database.close()
    assert not threads_of_the_driver()


def threads_of_the_driver() -> list[threading.Thread]:
    """Return the threads of connections to SQLite."""
    return [each for each in threading.enumerate() if "_connection_worker" in each.name]


_FORKING = """
import os, signal, sqlite3, sys, threading, warnings
from ratekeeper.control.database import _SqliteConnection

# Python 3.12 and later warn about a fork while a thread runs, which is the point here.
warnings.simplefilter("ignore", DeprecationWarning)

def query():
    connection = sqlite3.connect(sys.argv[1], factory=_SqliteConnection)
    connection.cursor().execute("SELECT 1").fetchall()
    connection.close()

def work():
    while True:
        query()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(50):
    child = os.fork()
    if not child:
        signal.alarm(60)
        query()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child hangs"
"""


def test_a_fork_leaves_no_lock_of_sqlite_behind(tmp_path: Path) -> None:
    """While threads use SQLite, children of the process can use it, too."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, str(tmp_path / "a.db")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
