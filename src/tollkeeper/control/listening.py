"""Hearing of new versions from PostgreSQL, on a connection that does nothing else.

NOTIFY is part of the transaction that adds a version, so it is heard when the version is there,
and not at all if it was rolled back. Every user of the database may say anything on the channel, so
what is heard only means that it is time to look: the number is asked for, and told if it is newer.
Of several that come at a time, only the newest is told: who follows the rules wants no other.

A connection may die without a word (a cable, a firewall). So when nothing was heard for a while,
the number is asked for as well: that finds out, and it also finds what was missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tollkeeper.control.database import CONNECT_SECONDS_MAX, Database
from tollkeeper.core.errors import StoreUnavailable

if TYPE_CHECKING:
    import asyncpg

CHANNEL: Final = "tollkeeper_rules"
QUIET_SECONDS_MAX: Final = 5.0

_NUMBER: Final = "SELECT coalesce(max(number), 0) FROM tollkeeper_versions"


class _Ear:
    """Whether something was heard, and whether the connection is still there."""

    def __init__(self) -> None:
        self.is_lost = False
        self.news = asyncio.Event()

    def hear(self, *_notification: object) -> None:
        """A notification."""
        self.news.set()

    def lose(self, _connection: object) -> None:
        """The connection is gone."""
        self.is_lost = True
        self.news.set()


async def listen(database: Database) -> AsyncGenerator[int, None]:
    """The current number at once, then each that is newer. Raises StoreUnavailable at the end."""
    with database.errors():
        connection = await database.connect_asyncpg()
    ear = _Ear()
    try:
        with database.errors():
            connection.add_termination_listener(ear.lose)
            await connection.add_listener(CHANNEL, ear.hear)
            told = await _number(connection)
        yield told
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(ear.news.wait(), QUIET_SECONDS_MAX)
            ear.news.clear()
            if ear.is_lost:
                raise StoreUnavailable(
                    f"{database.name} has closed the connection that listens; listen again"
                )
            with database.errors():
                number = await _number(connection)
            if number > told:
                told = number
                yield told
    finally:
        await _close(connection, ear)


async def _number(connection: asyncpg.Connection) -> int:
    number: int = await connection.fetchval(_NUMBER, timeout=CONNECT_SECONDS_MAX)
    return number


async def _close(connection: asyncpg.Connection, ear: _Ear) -> None:
    connection.remove_termination_listener(ear.lose)
    try:
        await connection.close(timeout=CONNECT_SECONDS_MAX)
    except Exception:  # it was dead anyway
        connection.terminate()
