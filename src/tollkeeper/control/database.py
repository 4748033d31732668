"""The database behind the repository: where it is, how it is reached, and what its errors mean.

    sqlite:///rules.db                           a file beside the process; its folder must exist
    sqlite:////var/lib/tollkeeper/rules.db       the same by its full path
    postgresql://user:password@host:5432/name    what libpq takes, with its ?sslmode= and so on

One writer at a time: SQLite by BEGIN IMMEDIATE, PostgreSQL by an advisory lock that ends with the
transaction. Writers wait for it, so two never see the same newest version; readers never wait.

Everything is bounded in time. A statement that takes too long is given up by us, and a transaction
that its client has forgotten (a process that was stopped) is ended by PostgreSQL, or it would keep
all other writers out. What a driver raises becomes StoreTimeout or StoreUnavailable here, with the
driver's error as the cause; a password is in no message, for no URL is ever shown whole.

An SQLite file that was removed, or replaced by another (a backup, say), is opened anew: connections
hold on to the file that they opened, and what is written to one without a name is gone.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Connection, event, exc, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tollkeeper.core.errors import ConfigError, StoreError, StoreTimeout, StoreUnavailable, show

if TYPE_CHECKING:
    import asyncpg

POOL_SIZE: Final = 4
CONNECT_SECONDS_MAX: Final = 5.0
# For one of a pool's connections, and for the writer before us.
WAIT_SECONDS_MAX: Final = 10.0
# One transaction, with all its waiting; a version of 16 MiB takes a second.
TRANSACTION_SECONDS_MAX: Final = 30.0
# How long PostgreSQL lets a transaction sit there without a word from its client.
FORGOTTEN_SECONDS_MAX: Final = 10.0

# "tollkeep" as a number: the lock that writers of the rules take turns with.
ADVISORY_LOCK: Final = 0x746F6C6C6B656570

EXAMPLES: Final = '"sqlite:///rules.db" or "postgresql://user:password@host/rules"'

# SQLSTATE: canceled by a timeout of ours, a lock not had in time, and forgotten in a transaction.
_TIMEOUT_STATES: Final = {"57014", "55P03", "25P03"}
_NO_RIGHT: Final = "42501"
_SQLITE_BUSY: Final = ("database is locked", "database table is locked", "database is busy")


class Database:
    """One database, not connected to before it is first asked."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that names none."""
        self._given = url
        self._url = _parsed(url)
        self.is_postgresql = self._url.drivername == "postgresql"
        self._dsn = ""
        self._file: tuple[int, int] | None = None
        if self.is_postgresql:
            _require_asyncpg()
            self._dsn = self._url.render_as_string(hide_password=False)
        self.engine = self._postgresql() if self.is_postgresql else self._sqlite()

    @property
    def name(self) -> str:
        """Where it is, for messages: nothing that anyone would keep to himself."""
        if not self.is_postgresql:
            return f"sqlite:///{self._url.database}"
        port = f":{self._url.port}" if self._url.port else ""
        return f"postgresql://{self._url.host or ''}{port}/{self._url.database or ''}"

    def again(self) -> Database:
        """The same one, for another event loop: a connection belongs to the one it was made in."""
        return Database(self._given)

    async def reach(self) -> None:
        """Raises StoreUnavailable where no SQLite file can be opened or made; asks no server.

        The driver would find out too. But its thread outlives a connection that was not made, and
        prints a traceback if the event loop has ended by then.
        """
        if not self.is_postgresql:
            with self.errors():
                await asyncio.to_thread(_open_and_close, self._url.database or "")

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state, and waits for nobody."""
        with self.errors():
            await self._follow_file()
            async with asyncio.timeout(TRANSACTION_SECONDS_MAX), self.engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that nobody else writes beside; committed at the end, or gone."""
        with self.errors():
            await self._follow_file()
            async with (
                asyncio.timeout(TRANSACTION_SECONDS_MAX),
                self.engine.execution_options(writes=True).begin() as connection,
            ):
                await self._take_turn(connection)
                yield connection

    async def _follow_file(self) -> None:
        """Let go of connections to a file that is no longer the one of this name."""
        if self.is_postgresql:
            return
        file: tuple[int, int] | None = None
        with suppress(OSError):
            found = os.stat(self._url.database or "")  # noqa: PTH116 - quick, and no path is made
            file = found.st_dev, found.st_ino
        if self._file not in {None, file}:
            await self.engine.dispose()
        self._file = file

    async def _take_turn(self, connection: AsyncConnection) -> None:
        """SQLite has the lock since BEGIN IMMEDIATE."""
        if not self.is_postgresql:
            return
        bounds_ms = {
            "lock_timeout": round(WAIT_SECONDS_MAX * 1_000),
            "statement_timeout": round(TRANSACTION_SECONDS_MAX * 1_000),
            "idle_in_transaction_session_timeout": round(FORGOTTEN_SECONDS_MAX * 1_000),
        }
        calls = ", ".join(f"set_config('{name}', '{ms}', true)" for name, ms in bounds_ms.items())
        await connection.execute(text(f"SELECT {calls}"))
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))

    async def connect_asyncpg(self) -> asyncpg.Connection:
        """A connection of its own, past the pool. Raises what the driver does."""
        import asyncpg  # noqa: PLC0415 - an extra: SQLite works without it

        return await asyncpg.connect(
            self._dsn,
            timeout=CONNECT_SECONDS_MAX,
            command_timeout=TRANSACTION_SECONDS_MAX,
            server_settings={"application_name": "tollkeeper"},
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What a driver raises in this block, in our words."""
        try:
            yield
        except StoreError:
            raise
        except (TimeoutError, exc.TimeoutError) as error:
            raise StoreTimeout(
                f"{self.name} did not answer in time; try again, and if that does not help, "
                f"look for a writer that is stuck"
            ) from error
        except exc.DBAPIError as error:
            original = error.orig or error
            # SQLAlchemy's own error of the driver has the name of a class before the words.
            raise self._store_error(original.__cause__ or original) from error
        except _raw_errors() as error:
            raise self._store_error(error) from error

    def _store_error(self, error: BaseException) -> StoreError:
        said = str(error) or type(error).__name__
        state = getattr(error, "sqlstate", None)
        busy = not self.is_postgresql and any(words in said for words in _SQLITE_BUSY)
        if busy or state in _TIMEOUT_STATES:
            return StoreTimeout(f"{self.name} is busy: {said}; try again")
        if not self.is_postgresql:
            remedy = "is it a file in a folder that exists, and may this process write there?"
        elif state == _NO_RIGHT:
            remedy = "grant that to the user in the URL"
        else:
            remedy = "does the server run, and do user, password and database exist?"
        return StoreUnavailable(f"{self.name} cannot be used: {said}; {remedy}")

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()

    def _postgresql(self) -> AsyncEngine:
        return create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self.connect_asyncpg,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=WAIT_SECONDS_MAX,
            # Connections that a restart of the server has cut are replaced before they are used.
            pool_pre_ping=True,
            # Rules have keys of customers in them.
            hide_parameters=True,
        )

    def _sqlite(self) -> AsyncEngine:
        engine = create_async_engine(
            self._url.set(drivername="sqlite+aiosqlite"),
            connect_args={"timeout": WAIT_SECONDS_MAX},
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=WAIT_SECONDS_MAX,
            hide_parameters=True,
        )
        event.listen(engine.sync_engine, "connect", _on_connect)
        event.listen(engine.sync_engine, "begin", _begin)
        return engine


def _open_and_close(path: str) -> None:
    sqlite3.connect(path, timeout=WAIT_SECONDS_MAX).close()


def _on_connect(connection: Any, _record: object) -> None:
    # The driver would begin before the first write only, and never IMMEDIATE.
    connection.isolation_level = None
    cursor = connection.cursor()
    # With a write-ahead log, readers and the writer are not in each other's way. It is a property
    # of the file: where somebody else is just switching it, there is nothing left to do. What else
    # may be wrong (no database at all) the first statement says; said here, nobody would close it.
    with suppress(sqlite3.DatabaseError):
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    # IMMEDIATE: a transaction that begins as a reader and then writes fails when somebody else
    # wrote meanwhile, without waiting.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _parsed(url: str) -> URL:
    if not isinstance(url, str):
        raise ConfigError(f"the database {show(url)} is not a URL; try {EXAMPLES}")
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        # Not shown, and no cause: there may be a password in it.
        raise ConfigError(f"the database's URL cannot be read; try {EXAMPLES}") from None
    if parsed.drivername == "postgres":  # as many write it
        parsed = parsed.set(drivername="postgresql")
    if parsed.drivername not in {"sqlite", "postgresql"}:
        raise ConfigError(f"there are no rules in {show(parsed.drivername)}; try {EXAMPLES}")
    if parsed.drivername == "sqlite" and (parsed.database or ":memory:") == ":memory:":
        raise ConfigError(
            'a database in memory is gone with its connection; name a file: "sqlite:///rules.db"'
        )
    if parsed.drivername == "sqlite" and (parsed.host or parsed.query):
        raise ConfigError(
            "the URL of an SQLite file has three slashes and no options, four if the path is a "
            'full one: "sqlite:///rules.db", "sqlite:////var/lib/tollkeeper/rules.db"'
        )
    if parsed.drivername == "postgresql" and not parsed.database:
        raise ConfigError(f"the URL names no database on {show(parsed.host)}; try {EXAMPLES}")
    return parsed


def _require_asyncpg() -> None:
    try:
        import asyncpg  # noqa: F401, PLC0415 - an extra: SQLite works without it
    except ImportError:
        raise ConfigError(
            "rules in PostgreSQL need a package that is not installed; "
            "install it with: pip install 'tollkeeper[postgres]'"
        ) from None


def _raw_errors() -> tuple[type[Exception], ...]:
    """What comes where SQLAlchemy does not stand between: while connecting, and while listening."""
    try:
        import asyncpg  # noqa: PLC0415 - an extra: SQLite works without it
    except ImportError:
        return OSError, sqlite3.Error
    return (
        OSError,
        sqlite3.Error,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
    )
