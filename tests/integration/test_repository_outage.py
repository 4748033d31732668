"""Databases that are unavailable, stuck, not a database, or held by an idle writer."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sqlite3
import ssl
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from ratekeeper import Request
from ratekeeper.control import database as database_module
from ratekeeper.control import entries as entries_module
from ratekeeper.control.entries import FeedPage
from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.entries import assignment
from tests.integration.rule_documents import assign, document, set_tier
from tests.postgres_server import PASSWORD, Postgres, running_postgres
from tests.service.admin.client import admin_of, filled

# No call to an unavailable or stuck database may take longer; the patched timeouts are far shorter.
HANGS_AFTER_SECONDS = 20.0

CALLS: dict[str, Callable[[Repository], Any]] = {
    "number": lambda it: it.number(),
    "current": lambda it: it.current(),
    "version": lambda it: it.version(1),
    "history": lambda it: it.history(),
    "audit_log.page": lambda it: it.audit_log.page(),
    "audit_log.add": lambda it: it.audit_log.add("grant", "", "{}", author="ann"),
    "diff": lambda it: it.diff(1, 1),
    "apply": lambda it: it.apply(document("7/second"), author="ann", expected=1),
    "rollback": lambda it: it.rollback(1, author="ann", expected=1),
    "assign": lambda it: assign(it, "user:1", "pro", author="ann"),
    "set_tier": lambda it: set_tier(it, "pro", (), author="ann"),
    "listen": lambda it: anext(it.listen()),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Run a separate server, for tests that stop it."""
    with Postgres() as started:
        yield started


@pytest.fixture
async def repository(server: Postgres) -> AsyncIterator[Repository]:
    """A repository with one version, on the server that tests stop."""
    async with await Repository.open(server.new_database()) as opened:
        await opened.apply(document(), author="ann", expected=0)
        yield opened


async def failure(call: Any) -> StoreError:
    """Return the error of a call; no password is in it or in its causes."""
    with pytest.raises(StoreError) as error:
        await asyncio.wait_for(call, HANGS_AFTER_SECONDS)
    assert PASSWORD not in "".join(traceback.format_exception(error.value))
    assert "127.0.0.1" in str(error.value) or "sqlite:///" in str(error.value)
    return error.value


@pytest.mark.parametrize("end", ["shut_down", "kill"])
async def test_a_stopped_server_is_unavailable_until_it_returns(
    repository: Repository, server: Postgres, end: str
) -> None:
    """Each call raises StoreUnavailable, caused by the driver's error; then all works again."""
    before = await repository.current()
    getattr(server, end)()
    for name, call in CALLS.items():
        error = await failure(call(repository))
        assert type(error) is StoreUnavailable, name
        assert error.__cause__ is not None, name
    assert type(await failure(Repository.open(server.url("rules_1")))) is StoreUnavailable
    server.start()
    assert await repository.current() == before
    assert (await assign(repository, "user:1", "pro", author="ann")).number == 2


async def test_a_grant_whose_audit_cannot_be_written_is_not_made(
    server: Postgres, tmp_path: Path
) -> None:
    """503, and the counts are as before; when the server is back, the same grant succeeds."""
    url = server.new_database()
    await filled(url)
    rules = read("{version: 1, rules: [{id: orders, by: user, limits: 10/hour}]}")
    async with admin_of(tmp_path, rules, url) as admin:
        limiter = admin.context.limiter
        await limiter.check(Request(user="42"), 4)
        server.kill()
        for path, more in (("grant", {"units": 5}), ("reset", {})):
            body = {"user": "42", **more}
            found = await admin.rejected("POST", f"/quota/{path}", 503, json=body)
            assert "nothing was changed, because the audit entry cannot" in found["detail"]
            quota = (await admin.call("GET", "/quota?user=42")).json()["rules"][0]["decision"]
            assert (quota["limit"], quota["remaining"]) == (10, 6)
        server.start()
        granted = await admin.call("POST", "/quota/grant", json={"user": "42", "units": 5})
        assert granted.json()["rules"][0]["decision"]["limit"] == 15
        (entry,) = (await admin.call("GET", "/audit?kind=grant")).json()["items"]
        assert (entry["kind"], entry["author"]) == ("grant", "admin-token")


async def test_a_server_killed_during_changes_of_entries_loses_no_answered_change(
    repository: Repository, server: Postgres
) -> None:
    """Each change is whole, with its audit row and its number, or was not made."""
    answered: dict[str, int] = {}

    async def change(writer: int) -> None:
        for number in range(1_000):
            name = f"user:{writer}-{number}"
            made = await repository.entries.put(assignment(name, "pro"), author="ann")
            answered[name] = made.seq
            if len(answered) == 20:
                await asyncio.to_thread(server.kill)

    found = await asyncio.gather(*(change(writer) for writer in range(3)), return_exceptions=True)
    assert all(isinstance(error, StoreError) for error in found)
    server.start()
    assert 20 <= len(answered) < 1_000
    rows = {row[1]: row[3] for page in await pages_of(repository) for row in page.rows}
    assert answered.items() <= rows.items()
    position = await repository.entries.position()
    assert sorted(rows.values()) == list(range(1, position.seq + 1))
    audit = (await repository.audit_log.page(limit=1_000)).items
    assert {each.key for each in audit if each.kind == "assign"} == set(rows)


async def test_a_server_killed_during_an_import_imports_nothing(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes before it are there, and the same import succeeds afterwards."""
    monkeypatch.setattr(entries_module, "BATCH_ROWS", 50)
    first = await repository.entries.put(assignment("user:first", "pro"), author="ann")
    many = [assignment(f"user:{number}", "pro") for number in range(150)]

    def kill(done: int) -> None:
        if done == 100:
            server.kill()

    await failure(repository.entries.write(many, author="ann", progress=kill))
    server.start()
    assert (await repository.entries.position()).seq == first.seq
    assert await repository.entries.page("assignment") == ([assignment("user:first", "pro")], 1)
    assert (await repository.entries.write(many, author="ann")).count == 150


IMPORTER = """
import asyncio, os, signal, sys
from ratekeeper.control import entries
from ratekeeper.control.repository import Repository
from ratekeeper.rules.entries import assignment

def kill(done):
    if done == 100:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    entries.BATCH_ROWS = 50
    repository = await Repository.open(sys.argv[1])
    many = [assignment(f"user:{number}", "pro") for number in range(150)]
    await repository.entries.write(many, author="bob", progress=kill)

asyncio.run(main())
"""


async def test_a_process_killed_during_an_import_to_sqlite_imports_nothing(tmp_path: Path) -> None:
    """Other writers go on at once."""
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    async with await Repository.open(url) as opened:
        await opened.apply(document(), author="ann", expected=0)
        first = await opened.entries.put(assignment("user:first", "pro"), author="ann")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", IMPORTER, url)
        assert await process.wait() == -signal.SIGKILL
        assert (await opened.entries.position()).seq == first.seq
        assert await opened.entries.page("assignment") == ([assignment("user:first", "pro")], 1)
        assert (await opened.entries.put(assignment("user:2", "pro"), author="ann")).seq == 2


async def pages_of(repository: Repository) -> list[FeedPage]:
    return [page async for page in repository.entries.changes_since(0)]


async def test_a_paused_server_is_a_timeout(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections stay open without an answer: each call raises StoreTimeout in time."""
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


async def test_a_stuck_writer_is_a_timeout_for_other_writers(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL waits for the lock with a timeout; readers do not wait."""
    monkeypatch.setattr(database_module, "WAIT_SECONDS_MAX", 0.2)
    async with repository._database.writing():
        error = await failure(assign(repository, "user:1", "pro", author="ann"))
        assert type(error) is StoreTimeout
        assert await repository.number() == 1
    assert (await assign(repository, "user:1", "pro", author="ann")).number == 2


async def test_an_idle_transaction_is_ended(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process holds the lock no longer than the server allows."""
    monkeypatch.setattr(database_module, "IDLE_SECONDS_MAX", 0.2)

    async def forget() -> None:
        async with repository._database.writing():
            monkeypatch.undo()
            version = await assign(repository, "user:1", "pro", author="ann")
            assert version.number == 2

    # The writer gets an error when it continues.
    assert type(await failure(forget())) in {StoreTimeout, StoreUnavailable}
    assert await repository.number() == 2


async def test_the_pool_is_bounded(
    repository: Repository, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred calls use four connections; waiting too long for one is a timeout."""
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
async def test_an_unusable_database_is_unavailable(
    change: Callable[[str], str], words: str
) -> None:
    """The error has the server's message and a remedy."""
    error = await failure(Repository.open(change(running_postgres().url())))
    assert type(error) is StoreUnavailable
    assert words in str(error)
    assert "do user, password and database exist?" in str(error)


async def test_every_driver_error_is_wrapped(repository: Repository) -> None:
    """No exception class of asyncpg or of the network reaches the caller."""
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
    """Return the threads of SQLite connections."""
    return {thread for thread in threading.enumerate() if "connection_worker" in thread.name}


async def await_no_connection(before: set[threading.Thread]) -> None:
    """Wait until all new connections are closed; their threads end shortly after."""
    async with asyncio.timeout(HANGS_AFTER_SECONDS):
        while connection_threads() - before:  # noqa: ASYNC110 - threads set no event at their end
            await asyncio.sleep(0.01)


async def test_a_file_in_a_missing_folder_is_unavailable(tmp_path: Path) -> None:
    """The error has a remedy, and no connection is left."""
    before = connection_threads()
    error = await failure(Repository.open(f"sqlite:///{tmp_path / 'no' / 'rules.db'}"))
    assert type(error) is StoreUnavailable
    assert "in a folder that exists, and may this process write there?" in str(error)
    await await_no_connection(before)


async def test_a_file_that_is_not_a_database_is_unavailable(tmp_path: Path) -> None:
    """The file is unchanged, and no connection is left."""
    before = connection_threads()
    path = tmp_path / "rules.db"
    path.write_text("version: 1\n" * 100)
    error = await failure(Repository.open(f"sqlite:///{path}"))
    assert type(error) is StoreUnavailable
    assert "not a database" in str(error)
    assert path.read_text() == "version: 1\n" * 100
    await await_no_connection(before)


async def test_a_locked_file_is_a_timeout_for_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers do not wait; after the lock, writers succeed."""
    monkeypatch.setattr(database_module, "WAIT_SECONDS_MAX", 0.2)
    path = tmp_path / "rules.db"
    async with await Repository.open(f"sqlite:///{path}") as repository:
        await repository.apply(document(), author="ann", expected=0)
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        error = await failure(assign(repository, "user:1", "pro", author="ann"))
        assert type(error) is StoreTimeout
        assert await repository.number() == 1
        writer.close()
        assert (await assign(repository, "user:1", "pro", author="ann")).number == 2
