"""The database behind the repository and the records: its URL, connections, timeouts and errors.

    sqlite:///rules.db                           a file in the working directory; its folder exists
    sqlite:////var/lib/ratekeeper/rules.db       the same with an absolute path
    postgresql://user:password@host:5432/name    any URL that libpq accepts, with ?sslmode= etc.

**Writers of the rules take turns.** SQLite uses BEGIN IMMEDIATE. PostgreSQL uses an advisory lock
that ends with the transaction. A writer waits for its turn, so two writers never see the same
newest version. Readers never wait. Records are written beside each other (`writing_shared`).

**Everything has a timeout.** The client gives up a statement that takes too long. PostgreSQL ends
a transaction whose client no longer sends anything (a stopped process), because its lock would
block all other writers. Driver errors become StoreTimeout or StoreUnavailable, with the driver's
error as the cause. No message contains a password, because no message contains a whole URL.

**A replaced SQLite file is reopened.** A connection keeps the file that it opened, even after that
file was removed or replaced by a backup, and writes to such a file are lost. So a transaction gets
a new connection if the path has another file by then. Transactions in progress end on the old one.

**Every connection to SQLite ends.** Each has a thread of the driver, which reports every result to
the event loop and prints a traceback if the loop has ended by then. The pool closes no connection
that is in use while it is disposed of, and does not wait for a cancelled statement. So `close`
stops all connections that were opened, and waits for their threads.

**SQLite and forks.** SQLite has process-wide locks. If one of our threads held such a lock
while the application forks, SQLite would wait for ever in the child, and the child would follow no
rules any more. So calls to SQLite and forks wait for each other (`core/forks.py`).

**Notifications.** `listen` waits on its own PostgreSQL connection for new versions. NOTIFY is part
of the transaction that adds a version, so it arrives after the commit and never after a rollback.
Any user of the database can send anything on the channel, so a notification is only a reason to
query the newest number. Several notifications may become one. A connection can die silently (a
cable, a firewall), so `listen` also queries the number after QUIET_SECONDS_MAX without one: that
detects a dead connection and finds a missed version.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from sqlalchemy import URL, Connection, event, exc, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from ratekeeper.core import forks
from ratekeeper.core.errors import ConfigError, StoreError, StoreTimeout, StoreUnavailable, show

if TYPE_CHECKING:
    from threading import Thread

    import aiosqlite
    import asyncpg
    from sqlalchemy.pool import PoolProxiedConnection

P = ParamSpec("P")
R = TypeVar("R")

POOL_SIZE: Final = 4
CONNECT_SECONDS_MAX: Final = 5.0
# Waiting for a connection of the pool, or for another writer.
WAIT_SECONDS_MAX: Final = 10.0
# One transaction with all its waiting; writing a version of 16 MiB takes a second.
TRANSACTION_SECONDS_MAX: Final = 30.0
# PostgreSQL ends a transaction whose client was silent for this long.
IDLE_SECONDS_MAX: Final = 10.0
# The same bounds for a transaction beside other writers.
SHARED_WAIT_SECONDS_MAX: Final = 5.0
SHARED_SECONDS_MAX: Final = 10.0
# Closing connections to PostgreSQL.
CLOSE_SECONDS_MAX: Final = 1.0

# "ratekeep" as a number: the lock with which writers of the rules take turns.
ADVISORY_LOCK: Final = 0x726174656B656570

CHANNEL: Final = "ratekeeper_rules"
QUIET_SECONDS_MAX: Final = 5.0

# SQLite's write-ahead log is emptied above this size, and pages of a file that shrinks at a time.
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
SHRINK_PAGES: Final = 2_000

EXAMPLES: Final = '"sqlite:///rules.db" or "postgresql://user:password@host/rules"'

# SQLSTATE: canceled by our timeout, lock not granted in time, idle in a transaction for too long.
_TIMEOUT_STATES: Final = {"57014", "55P03", "25P03"}
_PERMISSION_DENIED: Final = "42501"
_SQLITE_BUSY: Final = ("database is locked", "database table is locked", "database is busy")
_NUMBERED: Final = re.compile(r"\$[0-9]+")
_NEWEST: Final = """
SELECT coalesce(max(number), 0), (SELECT seq FROM ratekeeper_feed) FROM ratekeeper_versions
"""


@dataclass(slots=True)
class _Opened:
    """A connection to SQLite: the driver's thread, its opening, and the identity of the file."""

    thread: Thread
    opening: asyncio.Task[None]
    file: tuple[int, int] | None


class Database:
    """One database. The first query connects to it."""

    def __init__(self, url: str) -> None:
        """Raise ConfigError if the URL does not name a database."""
        self._given = url
        self._url = _parsed(url)
        self.is_postgresql = self._url.drivername == "postgresql"
        self._dsn = ""
        self._opened: dict[aiosqlite.Connection, _Opened] = {}
        if self.is_postgresql:
            _require_asyncpg()
            self._dsn = self._url.render_as_string(hide_password=False)
        self.engine = self._postgresql() if self.is_postgresql else self._sqlite()

    @property
    def name(self) -> str:
        """Return the URL for messages, without user, password and options."""
        if not self.is_postgresql:
            return f"sqlite:///{self._url.database}"
        port = f":{self._url.port}" if self._url.port else ""
        return f"postgresql://{self._url.host or ''}{port}/{self._url.database or ''}"

    @property
    def path(self) -> Path | None:
        """Return the SQLite file; None for PostgreSQL."""
        return None if self.is_postgresql else Path(self._url.database or "").resolve()

    def again(self) -> Database:
        """Return the same database for another event loop: a connection belongs to its loop."""
        return Database(self._given)

    async def reach(self) -> None:
        """Raise StoreUnavailable if the SQLite file cannot be opened or created.

        It does nothing for PostgreSQL. A file that it creates can shrink later.
        """
        if not self.is_postgresql:
            with self.errors():
                await asyncio.to_thread(_open_and_close, self._url.database or "")

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that sees one state and waits for no writer."""
        with self.errors():
            async with asyncio.timeout(TRANSACTION_SECONDS_MAX), self.engine.begin() as connection:
                yield connection

    async def rows(self, statement: str, *parameters: object) -> list[Any]:
        """Return the rows of a query, whose parameters are written $1, $2 and so on, in order.

        The driver runs it: for a million rows, SQLAlchemy takes seconds more. A boolean of SQLite
        is 0 or 1.
        """
        async with self.reading() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            if self.is_postgresql:
                return [tuple(row) for row in await driver.fetch(statement, *parameters)]
            plain = _NUMBERED.sub("?", statement)
            return list(await driver.execute_fetchall(plain, parameters))

    @asynccontextmanager
    async def writing(
        self, seconds_max: float = TRANSACTION_SECONDS_MAX
    ) -> AsyncIterator[AsyncConnection]:
        """Open a transaction with no other writer of the rules; it commits, or changes nothing."""
        with self.errors():
            async with (
                asyncio.timeout(seconds_max),
                self.engine.execution_options(writes=True).begin() as connection,
            ):
                if self.is_postgresql:  # SQLite holds the lock since BEGIN IMMEDIATE
                    await _set_timeouts(connection, WAIT_SECONDS_MAX, seconds_max)
                    await lock(connection, ADVISORY_LOCK)
                yield connection

    @asynccontextmanager
    async def writing_shared(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that writes beside others; in SQLite, writers always take turns."""
        if not self.is_postgresql:
            async with self.writing() as connection:
                yield connection
            return
        with self.errors():
            async with asyncio.timeout(SHARED_SECONDS_MAX), self.reading() as connection:
                await _set_timeouts(connection, SHARED_WAIT_SECONDS_MAX, SHARED_SECONDS_MAX)
                yield connection

    async def connect_asyncpg(self) -> asyncpg.Connection:
        """Open a connection outside the pool. Raises the driver's errors."""
        import asyncpg  # noqa: PLC0415 - an extra: SQLite works without it

        return await asyncpg.connect(
            self._dsn,
            timeout=CONNECT_SECONDS_MAX,
            command_timeout=TRANSACTION_SECONDS_MAX,
            server_settings={"application_name": "ratekeeper"},
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the driver errors of this block into StoreTimeout and StoreUnavailable."""
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
            # SQLAlchemy's wrapper puts a class name before the driver's message.
            raise self._store_error(original.__cause__ or original) from error
        except _raw_errors() as error:
            raise self._store_error(error) from error

    def _store_error(self, error: BaseException) -> StoreError:
        message = str(error) or type(error).__name__
        state = getattr(error, "sqlstate", None)
        busy = not self.is_postgresql and any(words in message for words in _SQLITE_BUSY)
        if busy or state in _TIMEOUT_STATES:
            return StoreTimeout(f"{self.name} is busy: {message}; try again")
        if not self.is_postgresql:
            remedy = "is it a file in a folder that exists, and may this process write there?"
        elif state == _PERMISSION_DENIED:
            remedy = "grant that to the user in the URL"
        else:
            remedy = "does the server run, and do user, password and database exist?"
        return StoreUnavailable(f"{self.name} cannot be used: {message}; {remedy}")

    # ── The size of the tables ───────────────────────────────────────────────────────────────

    def log_bytes(self) -> int:
        """Return the size of SQLite's write-ahead log; 0 for PostgreSQL, whose log is not ours."""
        with suppress(OSError):
            if not self.is_postgresql:
                return os.stat(f"{self._url.database}-wal").st_size  # noqa: PTH116 - as above
        return 0

    async def free_space(self, *tables: str) -> None:
        """Let PostgreSQL reuse the space of deleted rows now; SQLite always does."""
        if self.is_postgresql:
            await self._outside_transaction(f"VACUUM {', '.join(tables)}")

    async def shrink(self, bytes_max: int) -> None:
        """Return free pages of an SQLite file to the disk while it is larger than this.

        Only a file that `reach` has created can shrink.
        """
        if self.is_postgresql:
            return
        with suppress(OSError):
            path = self._url.database or ""
            if os.stat(path).st_size > bytes_max:  # noqa: PTH116 - as above
                await self._outside_transaction(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")

    async def cut_log(self) -> None:
        """Empty SQLite's write-ahead log if it is large: readers may have prevented its reuse."""
        if self.log_bytes() > LOG_BYTES_MAX:
            await self._outside_transaction("PRAGMA wal_checkpoint(TRUNCATE)")

    async def _outside_transaction(self, statement: str) -> None:
        """Run a statement that no transaction may contain. Errors are ignored: it can wait."""
        with suppress(StoreError), self.errors():
            async with (
                asyncio.timeout(TRANSACTION_SECONDS_MAX),
                self.engine.connect() as connection,
            ):
                raw = await connection.get_raw_connection()
                driver = raw.driver_connection
                if driver is None:
                    return
                if self.is_postgresql:
                    await driver.execute(statement)
                else:
                    # Unlike `execute`, it runs a statement that returns no rows to its end.
                    await driver.executescript(statement)

    async def close(self) -> None:
        """Close every connection; the next query opens one.

        It does not wait for a PostgreSQL server that does not answer. With SQLite, it waits for
        the statements in progress, also for those that were cancelled.
        """
        if self.is_postgresql:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS_MAX):
                    await self.engine.dispose()
            return
        await self.engine.dispose()
        for connection, opened in tuple(self._opened.items()):
            if not opened.opening.done():
                await asyncio.wait([opened.opening])
            if opened.thread.is_alive():
                connection.stop()
                await asyncio.to_thread(opened.thread.join, TRANSACTION_SECONDS_MAX)
        self._forget_closed()

    def _postgresql(self) -> AsyncEngine:
        return create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self.connect_asyncpg,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=WAIT_SECONDS_MAX,
            # Connections that a restart of the server has closed are replaced before use.
            pool_pre_ping=True,
            # Rules contain keys of customers.
            hide_parameters=True,
        )

    def _sqlite(self) -> AsyncEngine:
        engine = create_async_engine(
            self._url.set(drivername="sqlite+aiosqlite"),
            connect_args={"timeout": WAIT_SECONDS_MAX, "async_creator_fn": self._open_sqlite},
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=WAIT_SECONDS_MAX,
            hide_parameters=True,
        )
        event.listen(engine.sync_engine, "checkout", self._on_checkout)
        event.listen(engine.sync_engine, "begin", _begin)
        return engine

    async def _open_sqlite(self, *arguments: Any, **options: Any) -> aiosqlite.Connection:
        """Open a connection. If that fails, its thread has ended."""
        import aiosqlite  # noqa: PLC0415 - slow to import, and PostgreSQL works without it

        self._forget_closed()
        file = self._file()
        connection = aiosqlite.connect(
            *arguments,
            factory=_SqliteConnection,
            # By default, the driver begins a transaction before the first write only, and never
            # IMMEDIATE.
            isolation_level=None,
            **options,
        )
        thread = connection._thread  # noqa: SLF001 - the driver has no other way to wait for it
        thread.daemon = True
        opening = asyncio.create_task(_open(connection))
        self._opened[connection] = opened = _Opened(thread, opening, file)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The opening goes on: its result, a connection that is open, would be lost.
            opening.add_done_callback(lambda _: connection.stop())
            raise
        except BaseException:
            connection.stop()
            await asyncio.to_thread(thread.join, TRANSACTION_SECONDS_MAX)
            raise
        opened.file = file or self._file()  # it may have been created
        return connection

    def _forget_closed(self) -> None:
        self._opened = {
            connection: opened
            for connection, opened in self._opened.items()
            if opened.thread.is_alive() or not opened.opening.done()  # not started yet
        }

    def _on_checkout(
        self, _connection: object, _record: object, proxy: PoolProxiedConnection
    ) -> None:
        """Have the pool replace a connection to a file that is no longer at the path."""
        opened = self._opened.get(cast("aiosqlite.Connection", proxy.driver_connection))
        if opened is None or opened.file != self._file():
            raise exc.DisconnectionError(f"{self.name} is another file than before")

    def _file(self) -> tuple[int, int] | None:
        """Return the identity of the file at the path; None if there is none."""
        with suppress(OSError):
            found = os.stat(self._url.database or "")  # noqa: PTH116 - quick, and no path is made
            return found.st_dev, found.st_ino
        return None


async def _open(connection: aiosqlite.Connection) -> None:
    await connection
    # With a write-ahead log, readers and the writer do not block each other. It is a property of
    # the file, so nothing is left to do if another process is just setting it. The first statement
    # raises any other error: the file is not a database.
    with suppress(sqlite3.DatabaseError):
        await connection.execute_fetchall("PRAGMA journal_mode=WAL")


def _gated(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method of SQLite that forks wait for."""

    @wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with forks.gate:
            return method(*args, **kwargs)

    return inside


class _SqliteCursor(sqlite3.Cursor):
    """A cursor whose calls forks wait for. The driver calls these methods in its threads."""

    execute = _gated(sqlite3.Cursor.execute)
    executemany = _gated(sqlite3.Cursor.executemany)
    executescript = _gated(sqlite3.Cursor.executescript)
    fetchone = _gated(sqlite3.Cursor.fetchone)
    fetchmany = _gated(sqlite3.Cursor.fetchmany)
    fetchall = _gated(sqlite3.Cursor.fetchall)
    close = _gated(sqlite3.Cursor.close)


class _SqliteConnection(sqlite3.Connection):
    """A connection whose calls forks wait for."""

    __init__ = _gated(sqlite3.Connection.__init__)
    commit = _gated(sqlite3.Connection.commit)
    rollback = _gated(sqlite3.Connection.rollback)
    create_function = _gated(sqlite3.Connection.create_function)
    close = _gated(sqlite3.Connection.close)

    def cursor(self, factory: Any = None) -> Any:
        """Return a cursor whose calls forks wait for, too."""
        return super().cursor(factory or _SqliteCursor)


async def lock(connection: AsyncConnection, number: int) -> None:
    """Wait for an advisory lock of PostgreSQL, which ends with the transaction."""
    await connection.execute(select(func.pg_advisory_xact_lock(number)))


async def _set_timeouts(connection: AsyncConnection, wait_s: float, total_s: float) -> None:
    """Set PostgreSQL's timeouts for this transaction."""
    seconds = {
        "lock_timeout": wait_s,
        "statement_timeout": total_s,
        "idle_in_transaction_session_timeout": IDLE_SECONDS_MAX,
    }
    settings = [
        func.set_config(name, f"{each * 1_000:.0f}", True) for name, each in seconds.items()
    ]
    await connection.execute(select(*settings))


def _open_and_close(path: str) -> None:
    with forks.gate, closing(sqlite3.connect(path, timeout=WAIT_SECONDS_MAX)) as connection:
        if os.path.getsize(path):  # noqa: PTH202 - as above
            return
        # A new file can shrink later. The second statement writes it. If another process is just
        # doing the same, nothing is left to do.
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    # IMMEDIATE: a transaction that begins as a reader and then writes fails at once if another
    # writer has committed in between.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _parsed(url: str) -> URL:
    if not isinstance(url, str):
        raise ConfigError(f"the database {show(url)} is not a URL; try {EXAMPLES}")
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        # Neither shown nor given as the cause: it may contain a password.
        raise ConfigError(f"the database's URL cannot be read; try {EXAMPLES}") from None
    if parsed.drivername == "postgres":  # a common spelling
        parsed = parsed.set(drivername="postgresql")
    if parsed.drivername not in {"sqlite", "postgresql"}:
        raise ConfigError(f"{show(parsed.drivername)} is not supported; try {EXAMPLES}")
    if parsed.drivername == "sqlite" and (parsed.database or ":memory:") == ":memory:":
        raise ConfigError(
            'a database in memory is lost with its connection; name a file: "sqlite:///rules.db"'
        )
    if parsed.drivername == "sqlite" and (parsed.host or parsed.query):
        raise ConfigError(
            "the URL of an SQLite file has three slashes, or four before an absolute path, and no "
            'options: "sqlite:///rules.db", "sqlite:////var/lib/ratekeeper/rules.db"'
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
            "install it with: pip install 'ratekeeper[postgres]'"
        ) from None


def _raw_errors() -> tuple[type[Exception], ...]:
    """Return the errors that SQLAlchemy does not wrap: while connecting, and while listening."""
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


# ── Notifications of PostgreSQL ────────────────────────────────────────────────────────────────


class _Listener:
    """Callbacks of a connection: `news` is set by a notification and by the connection's end."""

    def __init__(self) -> None:
        self.is_lost = False
        self.news = asyncio.Event()

    def on_notification(self, *_notification: object) -> None:
        self.news.set()

    def on_end(self, _connection: object) -> None:
        self.is_lost = True
        self.news.set()


async def listen(database: Database) -> AsyncGenerator[int, None]:
    """Yield the newest version's number at once, and after each change. It ends by raising.

    A change of an entry yields the same number again. Raises StoreUnavailable when the connection
    is lost.
    """
    with database.errors():
        connection = await database.connect_asyncpg()
    listener = _Listener()
    try:
        with database.errors():
            connection.add_termination_listener(listener.on_end)
            await connection.add_listener(CHANNEL, listener.on_notification)
            newest = await _newest(connection)
        yield newest[0]
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(listener.news.wait(), QUIET_SECONDS_MAX)
            listener.news.clear()
            if listener.is_lost:
                raise StoreUnavailable(
                    f"{database.name} has closed the connection that listens; listen again"
                )
            with database.errors():
                found = await _newest(connection)
            if found != newest:
                newest = found
                yield newest[0]
    finally:
        connection.remove_termination_listener(listener.on_end)
        try:
            await connection.close(timeout=CONNECT_SECONDS_MAX)
        except Exception:  # the connection was dead already
            connection.terminate()


async def _newest(connection: asyncpg.Connection) -> tuple[int, int]:
    """Return the numbers of the newest version and of the newest change of an entry."""
    row = await connection.fetchrow(_NEWEST, timeout=CONNECT_SECONDS_MAX)
    return row[0], row[1]
