"""From memory to the database, in batches: later, at its own pace, and only once.

What is offered waits here, EVENTS_MAX decisions and BUCKETS_MAX of usage at most: of decisions that
are too many the newest are dropped, and counted. A batch is one transaction. If it fails, the same
batch is tried again after a pause that doubles up to RETRY_SECONDS_MAX, while what comes waits and,
if it is too much, is dropped.

Whether a transaction was committed whose answer never came, nobody can know. So each batch has a
number, and the writer's last one is written with it: a batch that is already there is not added
again. Sums are exact, whatever happens to connections.

All of this runs in an event loop of its own, in a thread of its own (`recorder.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import text

from tollkeeper.core.errors import ConfigError, StoreError
from tollkeeper.history import tables
from tollkeeper.history.events import NUMBER_MAX, Event
from tollkeeper.history.trimming import TEND_SECONDS, Keep, Trimmer
from tollkeeper.history.usage import MINUTE_SECONDS, Usage, Used

if TYPE_CHECKING:
    from datetime import date

    from sqlalchemy.ext.asyncio import AsyncConnection

    from tollkeeper.control.database import Database

EVENTS_MAX: Final = 10_000
BATCH_EVENTS_MAX: Final = 1_000
BATCH_BUCKETS_MAX: Final = 5_000
# So many rows are bound at a time: Python's lock is let go of between, for whoever answers.
STATEMENT_ROWS: Final = 100
RETRY_SECONDS_MIN: Final = 0.5
RETRY_SECONDS_MAX: Final = 30.0
_PAUSE_SECONDS: Final = 0.000_5
# One transaction, in PostgreSQL, with all its waiting: for other writers, and for an answer.
WRITE_SECONDS_MAX: Final = 10.0
_LOCK_MS: Final = 5_000
_STATEMENT_MS: Final = 10_000

_NOW: Final = text("SELECT floor(extract(epoch FROM clock_timestamp()))::bigint")
_IS_FIRST: Final = text(
    "INSERT INTO tollkeeper_record_writers AS kept (writer, batch, at_s) "
    "VALUES (:writer, :batch, :at_s) ON CONFLICT (writer) DO UPDATE "
    "SET batch = excluded.batch, at_s = excluded.at_s WHERE kept.batch < excluded.batch"
)
# Rows go to the driver as they are, a quarter of the time that names in place of `places` take:
# meanwhile Python's lock is held, and nobody is answered.
_ADD_EVENT: Final = (
    f"INSERT INTO tollkeeper_decisions ({', '.join(Event._fields)}) "  # noqa: S608 - our own names
    "VALUES ({places})"
)
_ADD_USAGE: Final = (
    "INSERT INTO tollkeeper_usage AS kept "  # noqa: S608 - our own names
    f"({', '.join(Used._fields)}, step_s) "
    f"VALUES ({{places}}, {MINUTE_SECONDS}) "
    "ON CONFLICT (subject, rule, start_s, step_s) DO UPDATE SET "
    "allowed = kept.allowed + excluded.allowed, denied = kept.denied + excluded.denied, "
    "units = kept.units + excluded.units"
)
# What is wrong with a value, and not with the database: SQLSTATE's class, and what drivers raise.
_DATA_CLASSES: Final = ("22", "23")
# A day's partition that was there and is gone: it is made anew, and then there is nothing wrong.
_NO_PARTITION: Final = "23514"
_DATA_ERRORS: Final = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError)

log = logging.getLogger("tollkeeper.history")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Pace:
    """How often what is written."""

    write_seconds: float = 1.0
    usage_seconds: float = 5.0
    """A bucket that is added to every second is written every so many."""
    batch_seconds: float = 0.5
    """Between full batches: 2,000 decisions a second. Each takes 20 µs of the worker's time, and
    whoever is denied a hundred thousand times must not cost those who are answered."""


class Batch(NamedTuple):
    """What is written in one transaction."""

    number: int
    events: list[Event]
    usage: list[Used]


class Sink:
    """Writes records to one database. For one event loop but for `dropped`."""

    def __init__(
        self,
        database: Database,
        keep: Keep | None = None,
        pace: Pace | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        row_of: Callable[[Any], Event] | None = None,
    ) -> None:
        """Nothing is asked of the database yet.

        `row_of` makes a row of what is offered, when its turn comes; None: it is one.
        """
        self._database = database
        self._row_of = row_of
        self._pace = pace or Pace()
        self._now_ns = now_ns
        self._keep = keep or Keep()
        self._trimmer = Trimmer(self.transaction, self._keep, is_postgresql=database.is_postgresql)
        self._events: deque[Any] = deque()
        self._usage = Usage()
        self._usage_due_s = 0.0
        self._numbers = 0
        self._writer = secrets.token_hex(8)
        self._pending: Batch | None = None
        self._days: set[date] = set()
        self._add_event = _placed(_ADD_EVENT, len(Event._fields), database)
        self._add_usage = _placed(_ADD_USAGE, len(Used._fields), database)
        self._is_made = False
        self._tend_at_s = 0.0
        self._failures = 0
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._dropped = 0
        self.written = 0
        """Decisions that are in the database."""

    def dropped(self) -> int:
        """Decisions and counts that are lost."""
        return self._dropped + self._usage.dropped

    @property
    def room(self) -> int:
        """How many more decisions fit."""
        return max(EVENTS_MAX - len(self._events), 0)

    def offer(self, events: Sequence[Any]) -> None:
        """Decisions to write; those that there is no room for are dropped."""
        room = self.room
        self._events.extend(events[:room])
        self.drop(max(len(events) - room, 0))
        if len(self._events) >= BATCH_EVENTS_MAX:
            self._wake.set()

    def drop(self, count: int) -> None:
        """Count so many that are lost."""
        self._dropped += count

    @property
    def usage(self) -> Usage:
        """What usage is added to."""
        return self._usage

    # ── The loop ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Write until `stop`; what cannot be written is tried again."""
        while not self._stopping.is_set():
            pause_s = await self._round()
            # While it fails, a full queue is no reason to ask sooner.
            waking = self._stopping if self._failures else self._wake
            with suppress(TimeoutError):
                await asyncio.wait_for(waking.wait(), pause_s)
            self._wake.clear()

    def stop(self) -> None:
        """Have `run` return when what it writes now is written. See `finish` for the rest."""
        self._stopping.set()
        self._wake.set()

    async def _round(self) -> float:
        """Write what is due; how long to wait then."""
        try:
            await self._prepare()
            while await self.write() and not self._stopping.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._pace.batch_seconds)
            await self._tend()
        except StoreError as error:
            self._failures += 1
            # Somebody may have dropped a table, or a day of it.
            self._is_made, self._days = False, set()
            if self._failures == 1:
                log.warning("records are not written, and kept as far as they fit: %s", error)
            most = min(RETRY_SECONDS_MIN * 2.0 ** (self._failures - 1), RETRY_SECONDS_MAX)
            return most * random.uniform(0.5, 1.0)  # noqa: S311 - so that not all come at once
        except ConfigError as error:
            # Tables of another version: nothing that waiting for a second would change.
            self._failures += 1
            log.error("records are not written: %s", error)  # noqa: TRY400 - it says it all
            return RETRY_SECONDS_MAX
        except Exception:
            self._failures += 1
            log.exception("records are not written, because of a defect")
            return RETRY_SECONDS_MAX
        if self._failures:
            log.info("records are written again; %d are lost until now", self.dropped())
            self._failures = 0
        return self._pace.write_seconds

    async def finish(self) -> None:
        """Write all that is there, once. Raises StoreError."""
        await self._prepare()
        while self._pending or self._events or len(self._usage):
            self._usage_due_s = 0.0
            await self.write()

    async def close(self) -> None:
        """Close the database."""
        await self._database.close()

    # ── Writing ──────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """One that may write. Not the rules' `writing` in PostgreSQL: its writers take turns."""
        if not self._database.is_postgresql:
            async with self._database.writing() as connection:
                yield connection
            return
        bounds_ms = {
            "lock_timeout": _LOCK_MS,
            "statement_timeout": _STATEMENT_MS,
            "idle_in_transaction_session_timeout": _STATEMENT_MS,
        }
        calls = ", ".join(f"set_config('{name}', '{ms}', true)" for name, ms in bounds_ms.items())
        with self._database.errors():
            async with (
                asyncio.timeout(WRITE_SECONDS_MAX),
                self._database.reading() as connection,
            ):
                await connection.execute(text(f"SELECT {calls}"))
                yield connection

    async def _prepare(self) -> None:
        """Tables, and the partitions of these days."""
        if self._is_made:
            return
        is_postgresql = self._database.is_postgresql
        await self._database.reach()
        async with self._database.reading() as connection:
            found = await tables.version(connection, is_postgresql=is_postgresql)
        tables.check_version(found, self._database.name)
        if found is None:
            async with self.transaction() as connection:
                await tables.make(connection, is_postgresql=is_postgresql)
        self._is_made = True

    async def write(self) -> bool:
        """Write one batch; is there another one to be written now? Raises StoreError."""
        batch = self._pending or await self._next()
        if batch is None:
            return False
        self._pending = batch = self._of_days_kept(batch)
        try:
            await self._add(batch)
        except StoreError as error:
            if not _is_about_data(error):
                raise
            self._lose(batch, error)
        except (ValueError, OverflowError, TypeError) as error:  # what a driver cannot encode
            self._lose(batch, error)
        self._pending = None
        self.written += len(batch.events)
        return len(self._events) >= BATCH_EVENTS_MAX or self._is_usage_due()

    async def _next(self) -> Batch | None:
        count = min(len(self._events), BATCH_EVENTS_MAX)
        events = await self._made([self._events.popleft() for _ in range(count)])
        usage: list[Used] = []
        if self._is_usage_due():
            usage = self._usage.take(BATCH_BUCKETS_MAX)
            if not len(self._usage):
                self._usage_due_s = time.monotonic() + self._pace.usage_seconds
        if not events and not usage:
            return None
        self._numbers += 1
        return Batch(self._numbers, events, usage)

    async def _made(self, offered: list[Any]) -> list[Event]:
        """The rows, made a few at a time: while one is made, nobody is answered."""
        if self._row_of is None:
            return offered
        rows: list[Event] = []
        for some in _chunks(offered):
            rows += map(self._row_of, some)
            await asyncio.sleep(_PAUSE_SECONDS)
        return rows

    def _is_usage_due(self) -> bool:
        return len(self._usage) > 0 and time.monotonic() >= self._usage_due_s

    async def _add(self, batch: Batch) -> None:
        events = batch.events
        if self._database.is_postgresql and events:
            await self._make_partitions(events)
        async with self.transaction() as connection:
            written = {
                "writer": self._writer,
                "batch": batch.number,
                "at_s": self._now_ns() // 10**9,
            }
            first = await connection.execute(_IS_FIRST, written)
            if not first.rowcount:
                return  # the last attempt was committed, and we did not hear of it
            for rows in _chunks(events):
                await connection.exec_driver_sql(self._add_event, [tuple(row) for row in rows])
            for used in _chunks(batch.usage):
                await connection.exec_driver_sql(self._add_usage, [_fitting(row) for row in used])

    def _of_days_kept(self, batch: Batch) -> Batch:
        """Without decisions of days that get no partition: long gone, or far ahead."""
        if not self._database.is_postgresql:
            return batch
        now_us = self._now_ns() // 1_000
        last = tables.days_ahead(now_us)[-1]
        oldest = tables.day_of(now_us - self._keep.decisions_days * tables.DAY_US)
        kept = [each for each in batch.events if oldest <= tables.day_of(each.at_us) <= last]
        self._dropped += len(batch.events) - len(kept)
        return batch._replace(events=kept)

    async def _make_partitions(self, events: Sequence[Event]) -> None:
        ahead = tables.days_ahead(self._now_ns() // 1_000)
        wanted = {tables.day_of(each.at_us) for each in events}
        if not wanted <= self._days:
            async with self.transaction() as connection:
                await tables.make_days(connection, {*ahead, *wanted})
            # Not for good: they are dropped when they are old.
            self._days = {*ahead, *wanted}

    def _lose(self, batch: Batch, error: Exception) -> None:
        log.error("a batch of records is lost: %s", error)
        self._dropped += len(batch.events) + sum(each.allowed + each.denied for each in batch.usage)

    async def _tend(self) -> None:
        if time.monotonic() < self._tend_at_s and not self._trimmer.is_behind:
            return
        # Not all at the same moment: the first who comes does it for all.
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - same
        self._tend_at_s = time.monotonic() + TEND_SECONDS * spread
        if await self._trimmer.tend(await self._tended_at_s()):
            self._days = set()

    async def _tended_at_s(self) -> int:
        """The time that what is old is told by: the database's own, where it has one.

        A node whose clock is ahead by weeks must not drop what all others keep.
        """
        if not self._database.is_postgresql:
            return self._now_ns() // 10**9
        async with self._database.reading() as connection:
            found = await connection.execute(_NOW)
            return int(found.scalar_one())


def _placed(statement: str, count: int, database: Database) -> str:
    """With the marks that the database's driver knows values by."""
    places = [f"${place + 1}" if database.is_postgresql else "?" for place in range(count)]
    return statement.format(places=", ".join(places))


def _fitting(used: Used) -> tuple[Any, ...]:
    """With units that are a number to both databases."""
    *others, units = used
    return (*others, min(units, NUMBER_MAX))


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), STATEMENT_ROWS):
        yield rows[start : start + STATEMENT_ROWS]


def _is_about_data(error: StoreError) -> bool:
    """Would the same batch fail again, whatever the state of the database?"""
    found: BaseException | None = error
    for _ in range(5):
        if found is None:
            return False
        state = str(getattr(found, "sqlstate", "") or "")
        if state.startswith(_DATA_CLASSES):
            return state != _NO_PARTITION
        if isinstance(found, _DATA_ERRORS) or "binding parameter" in str(found):
            return True
        found = getattr(found, "orig", None) or found.__cause__
    return False
