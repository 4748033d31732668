"""Databases that are away, stuck, full of something else or forgotten by their writer."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import ssl
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.integration.rule_databases import document
from tests.postgres_server import PASSWORD, Postgres, running_postgres
from tollkeeper.control import database as database_module
from tollkeeper.control.repository import Repository
from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from tollkeeper.rules.document.model import Override

# Nothing that is asked of a database that is away or stuck may take longer; what is patched here
# is shorter by far.
HANGS_AFTER_SECONDS = 20.0

CALLS: dict[str, Callable[[Repository], Any]] = {
    "number": lambda it: it.number(),
    "current": lambda it: it.current(),
    "version": lambda it: it.version(1),
    "history": lambda it: it.history(),
    "audit": lambda it: it.audit(),
    "diff": lambda it: it.diff(1, 1),
    "apply": lambda it: it.apply(document("7/second"), author="ann", expected=1),
    "rollback": lambda it: it.rollback(1, author="ann", expected=1),
    "assign": lambda it: it.assign("user:1", "pro", author="ann"),
    "unassign": lambda it: it.unassign("user:1", author="ann"),
    "add_override": lambda it: it.add_override(Override("user", "1", multiply=2.0), author="ann"),
    "remove_override": lambda it: it.remove_override("user", "1", author="ann"),
    "set_tier": lambda it: it.set_tier("pro", (), author="ann"),
    "listen": lambda it: anext(it.listen()),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """One for the tests that end it."""
    with Postgres() as started:
        yield started


@pytest.fixture
async def repository(server: Postgres) -> AsyncIterator[Repository]:
    """On the server that may be ended; with one version."""
    async with await Repository.open(server.new_database()) as opened:
        await opened.apply(document(), author="ann", expected=0)
        yield opened


async def failure(call: Any) -> StoreError:
    """What it raises, which has no password in it, nor has anything behind it."""
    with pytest.raises(StoreError) as error:
        await asyncio.wait_for(call, HANGS_AFTER_SECONDS)
    assert PASSWORD not in "".join(traceback.format_exception(error.value))
    assert "127.0.0.1" in str(error.value) or "sqlite:///" in str(error.value)
    return error.value


@pytest.mark.parametrize("end", ["shut_down", "kill"])
async def test_a_server_that_is_away_and_comes_back(
    repository: Repository, server: Postgres, end: str
) -> None:
    """Each call says StoreUnavailable while it is away, with the driver's error as the cause; and
    all is as before when it is back, without a restart of ours."""
    before = await repository.current()
    getattr(server, end)()
    for name, call in CALLS.items():
        error = await failure(call(repository))
        assert type(error) is StoreUnavailable, name
        assert error.__cause__ is not None, name
    assert type(await failure(Repository.open(server.url("rules_1")))) is StoreUnavailable
    server.start()
    assert await repository.current() == before
    assert (await repository.assign("user:1", "pro", author="ann")).number == 2


async def test_a_server_that_falls_silent(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections stay open and nobody answers: each call ends in time, as StoreTimeout."""
    monkeypatch.setattr(database_module, "TRANSACTION_SECONDS_MAX", 0.3)
    monkeypatch.setattr(database_module, "CONNECT_SECONDS_MAX", 0.3)
    server.pause()
    try:
        for name, call in CALLS.items():
            assert type(await failure(call(repository))) is StoreTimeout, name
    finally:
        server.resume()
    monkeypatch.undo()
    assert await repository.number() == 1


async def test_a_writer_that_is_stuck_keeps_others_waiting_for_a_while_only(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL: the lock is waited for so long, then StoreTimeout; readers are not kept."""
    monkeypatch.setattr(database_module, "WAIT_SECONDS_MAX", 0.2)
    async with repository._database.writing():
        error = await failure(repository.assign("user:1", "pro", author="ann"))
        assert type(error) is StoreTimeout
        assert await repository.number() == 1
    assert (await repository.assign("user:1", "pro", author="ann")).number == 2


async def test_a_writer_that_forgets_its_transaction_is_ended(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped in the middle holds the lock no longer than the server allows."""
    monkeypatch.setattr(database_module, "IDLE_SECONDS_MAX", 0.2)

    async def forget() -> None:
        async with repository._database.writing():
            monkeypatch.undo()
            version = await repository.assign("user:1", "pro", author="ann")
            assert version.number == 2

    # Who forgot it finds out when he goes on.
    assert type(await failure(forget())) in {StoreTimeout, StoreUnavailable}
    assert await repository.number() == 2


async def test_the_pool_is_bounded(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred at a time use four connections; who waits too long for one is told."""
    assert await asyncio.gather(*(repository.number() for _ in range(100))) == [1] * 100
    name = repository._database.name.rpartition("/")[2]
    query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"
    assert await asyncio.to_thread(server.run, query) == str(database_module.POOL_SIZE)
    pool: Any = repository._database.engine.pool
    monkeypatch.setattr(pool, "_timeout", 0.1)
    held = [await repository._database.engine.connect() for _ in range(database_module.POOL_SIZE)]
    assert type(await failure(repository.number())) is StoreTimeout
    for connection in held:
        await connection.close()
    assert await repository.number() == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda url: url.replace("s3%3A", "other"), "password authentication failed"),
        (lambda url: url + "_not_there", "does not exist"),
        (lambda url: url + "?sslmode=require", "SSL"),
    ],
    ids=["password", "database", "TLS"],
)
async def test_a_database_that_cannot_be_used(change: Callable[[str], str], words: str) -> None:
    """StoreUnavailable with what the server said and what to look at."""
    error = await failure(Repository.open(change(running_postgres().url())))
    assert type(error) is StoreUnavailable
    assert words in str(error)
    assert "do user, password and database exist?" in str(error)


async def test_every_error_of_the_driver_is_ours(repository: Repository) -> None:
    """Whatever asyncpg raises: none of its classes gets through, nor does one of the network."""
    kinds = [
        kind
        for kind in vars(asyncpg.exceptions).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and not issubclass(kind, Warning)
    ]
    assert len(kinds) > 200

    def fail(kind: type[Exception]) -> None:
        with repository._database.errors():
            raise kind("127.0.0.1")

    for kind in (*kinds, ConnectionResetError, BrokenPipeError, ssl.SSLError):
        with pytest.raises(StoreError) as error:
            fail(kind)
        assert type(error.value.__cause__) is kind
    with pytest.raises(StoreTimeout):
        fail(TimeoutError)


# ---------------------------------------------------------------------------------------- SQLite


def connection_threads() -> set[threading.Thread]:
    """Each connection to a file has one."""
    return {thread for thread in threading.enumerate() if "connection_worker" in thread.name}


async def no_connection_is_left(before: set[threading.Thread]) -> None:
    """A thread ends shortly after its connection was closed, and not at all if it was not."""
    async with asyncio.timeout(HANGS_AFTER_SECONDS):
        while connection_threads() - before:  # noqa: ASYNC110 - threads set no event at their end
            await asyncio.sleep(0.01)


async def test_a_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """StoreUnavailable, and what to look at; no connection is left."""
    before = connection_threads()
    error = await failure(Repository.open(f"sqlite:///{tmp_path / 'no' / 'rules.db'}"))
    assert type(error) is StoreUnavailable
    assert "in a folder that exists, and may this process write there?" in str(error)
    await no_connection_is_left(before)


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """StoreUnavailable; the file stays as it is, and no connection is left."""
    before = connection_threads()
    path = tmp_path / "rules.db"
    path.write_text("version: 1\n" * 100)
    error = await failure(Repository.open(f"sqlite:///{path}"))
    assert type(error) is StoreUnavailable
    assert "not a database" in str(error)
    assert path.read_text() == "version: 1\n" * 100
    await no_connection_is_left(before)


async def test_a_file_that_somebody_keeps_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers wait for a while, then StoreTimeout; readers do not wait; then all is well again."""
    monkeypatch.setattr(database_module, "WAIT_SECONDS_MAX", 0.2)
    path = tmp_path / "rules.db"
    async with await Repository.open(f"sqlite:///{path}") as repository:
        await repository.apply(document(), author="ann", expected=0)
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        error = await failure(repository.assign("user:1", "pro", author="ann"))
        assert type(error) is StoreTimeout
        assert await repository.number() == 1
        writer.close()
        assert (await repository.assign("user:1", "pro", author="ann")).number == 2
