"""Notifications of PostgreSQL arrive at once and never for a rollback; losses are detected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import pytest

from ratekeeper.control import database as database_module
from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import ConfigError, StoreTimeout, StoreUnavailable
from tests.integration.rule_documents import assign, document
from tests.postgres_server import Postgres, running_postgres

Answer = TypeVar("Answer")

# The time for a step that takes milliseconds, on a busy machine.
PATIENCE_SECONDS = 20.0


@pytest.fixture
async def repository() -> AsyncIterator[Repository]:
    """A repository with one version."""
    async with await Repository.open(running_postgres().new_database()) as opened:
        await opened.apply(document(), author="ann", expected=0)
        yield opened


async def soon(answer: Awaitable[Answer]) -> Answer:
    return await asyncio.wait_for(answer, PATIENCE_SECONDS)


async def test_numbers_arrive_as_they_are_committed(repository: Repository) -> None:
    """A listener gets the current number at once, then each newer one."""
    async with aclosing(repository.listen()) as numbers:
        assert await soon(anext(numbers)) == 1
        for number in range(2, 6):
            await assign(repository, f"user:{number}", "pro", author="ann")
            assert await soon(anext(numbers)) == number


async def test_a_slow_listener_gets_the_newest_number(repository: Repository) -> None:
    """Of ten versions in between, it gets the last, so nothing accumulates."""
    async with aclosing(repository.listen()) as numbers:
        await soon(anext(numbers))
        for user in range(10):
            await assign(repository, f"user:{user}", "pro", author="ann")
        seen = [1]
        while seen[-1] < 11:
            seen.append(await soon(anext(numbers)))
        assert seen == sorted(set(seen))
        assert len(seen) < 11


async def test_a_rolled_back_notification_is_not_received(repository: Repository) -> None:
    """NOTIFY is part of the transaction."""

    async def write_half() -> None:
        async with repository._database.writing() as connection:
            await connection.exec_driver_sql("SELECT pg_notify('ratekeeper_rules', '99')")
            raise ZeroDivisionError

    async with aclosing(repository.listen()) as numbers:
        await soon(anext(numbers))
        with pytest.raises(ZeroDivisionError):
            await write_half()
        await assign(repository, "user:1", "pro", author="ann")
        assert await soon(anext(numbers)) == 2


async def test_other_messages_on_the_channel_are_harmless(repository: Repository) -> None:
    """Neither words nor unknown numbers affect later versions."""
    async with aclosing(repository.listen()) as numbers:
        await soon(anext(numbers))
        async with repository._database.engine.begin() as connection:
            for words in ("hello", "", "99", "-1"):
                await connection.exec_driver_sql(f"SELECT pg_notify('ratekeeper_rules', '{words}')")
        await assign(repository, "user:1", "pro", author="ann")
        assert await soon(anext(numbers)) == 2


async def test_a_missed_version_is_found_after_a_quiet_time(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is queried on a quiet connection."""
    monkeypatch.setattr(database_module, "QUIET_SECONDS_MAX", 0.05)
    monkeypatch.setattr("ratekeeper.control.repository.CHANNEL", "somewhere_else")
    async with aclosing(repository.listen()) as numbers:
        await soon(anext(numbers))
        await assign(repository, "user:1", "pro", author="ann")
        assert await soon(anext(numbers)) == 2


async def test_a_lost_connection_raises_and_listening_again_works(repository: Repository) -> None:
    """The next listener gets the current number at once, so no version is missed."""
    async with aclosing(repository.listen()) as numbers:
        await soon(anext(numbers))
        async with repository._database.engine.begin() as connection:
            await connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        with pytest.raises(StoreUnavailable, match="listen again"):
            await soon(anext(numbers))
    await assign(repository, "user:1", "pro", author="ann")
    async with aclosing(repository.listen()) as numbers:
        assert await soon(anext(numbers)) == 2


async def test_a_paused_server_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query after a quiet time has a timeout."""
    monkeypatch.setattr(database_module, "QUIET_SECONDS_MAX", 0.05)
    with Postgres() as server:
        async with (
            await Repository.open(server.new_database()) as repository,
            aclosing(repository.listen()) as numbers,
        ):
            await soon(anext(numbers))
            server.pause()
            # Only now: a busy machine may need longer to connect.
            monkeypatch.setattr(database_module, "CONNECT_SECONDS_MAX", 0.2)
            try:
                with pytest.raises(StoreTimeout):
                    await soon(anext(numbers))
            finally:
                server.resume()


async def test_listening_leaves_no_connection(repository: Repository) -> None:
    """Closing the generator closes its connection."""
    async with aclosing(repository.listen()) as numbers:
        await soon(anext(numbers))
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    async with repository._database.reading() as connection, asyncio.timeout(PATIENCE_SECONDS):
        while (await connection.exec_driver_sql(query)).scalar_one():
            # The server caches these statistics for the transaction.
            await connection.exec_driver_sql("SELECT pg_stat_clear_snapshot()")
            await asyncio.sleep(0.01)


async def test_sqlite_has_no_push(tmp_path: Path) -> None:
    """The error names the alternative."""
    async with await Repository.open(f"sqlite:///{tmp_path / 'rules.db'}") as repository:
        with pytest.raises(ConfigError, match=r"SQLite has no push; call number\(\)"):
            await anext(repository.listen())
