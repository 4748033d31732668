"""Write records from memory to the database, in batches, and each batch exactly once.

Records wait here: at most EVENTS_MAX decisions and BUCKETS_MAX buckets of usage. When decisions do
not fit, the newest are dropped, and the drops are counted. A batch is one transaction. A batch that
fails is retried after a pause that doubles up to RETRY_SECONDS_MAX.

If the connection breaks during a commit, the client cannot know whether the batch was committed.
So each batch has a number, and the transaction stores the last number of its writer: a batch that
is already there is not added again. The sums are exact, whatever happens to connections.

**Room.** The tables are bounded (`tables.py`). A writer adds rows while it has *room*. It asks for
a new measurement when half of it is used, and drops decisions when none is left. Usage is never
dropped: rows that are not admitted are added to those of OTHERS.

**New subjects.** A client may send a random key with every request. A writer adds at most
NEW_SUBJECTS_MAX subjects a minute that the database does not know, the busiest of each batch first.
Subjects that have usage in the database are admitted while there is room. It remembers KNOWN_MAX
of them, and looks up others when it has no more room for new ones. So a flood of random keys does
not hide the usage of known clients, neither on disk nor in memory: half of the buckets are only for
known subjects.

All of this runs in an event loop of its own, in a thread of its own (`recorder.py`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import text

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.history import tables
from ratekeeper.history.events import (
    MINUTE_NS,
    MINUTE_SECONDS,
    NUMBER_MAX,
    OTHERS,
    Bucket,
    Counts,
    DecisionEvent,
    UsageBuckets,
    UsageIncrement,
)
from ratekeeper.history.tables import (
    DECISION_BYTES,
    TRIM_SECONDS,
    USAGE_BYTES,
    Retention,
    Room,
    Trimmer,
)

if TYPE_CHECKING:
    from datetime import date

    from ratekeeper.control.database import Database

# Not the shared generator: an application that seeds it gets the same numbers, whatever our
# background threads draw meanwhile.

EVENTS_MAX: Final = 10_000
BATCH_EVENTS_MAX: Final = 1_000
BATCH_BUCKETS_MAX: Final = 5_000
# Rows bound at a time: between them, the worker's event loop gets Python's lock and answers.
STATEMENT_ROWS: Final = 100
NEW_SUBJECTS_MAX: Final = 10_000
# Subjects that a writer remembers, and how many others it looks up for a batch, the busiest first.
KNOWN_MAX: Final = 100_000
LOOKUPS_MAX: Final = 1_000
# A writer that has used half of its room asks for more this often.
URGENT_SECONDS: Final = 1.0
RETRY_SECONDS_MIN: Final = 0.5
RETRY_SECONDS_MAX: Final = 30.0
_PAUSE_SECONDS: Final = 0.000_5
# Positions in the room that is left: rows, followed by bytes.
_DECISIONS, _USAGE = 0, 2

_NOW: Final = text("SELECT floor(extract(epoch FROM clock_timestamp()))::bigint")
_CLAIM_BATCH: Final = text(
    "INSERT INTO ratekeeper_record_writers AS kept (writer, batch, at_s) "
    "VALUES (:writer, :batch, :at_s) ON CONFLICT (writer) DO UPDATE "
    "SET batch = excluded.batch, at_s = excluded.at_s WHERE kept.batch < excluded.batch"
)
# Rows go to the driver as plain tuples. Named parameters would take four times as long, while
# Python's lock is held.
_ADD_EVENT: Final = (
    f"INSERT INTO ratekeeper_decisions ({', '.join(DecisionEvent._fields)}) "  # noqa: S608 - our own names
    "VALUES ({places})"
)
_ADD_USAGE: Final = (
    "INSERT INTO ratekeeper_usage AS kept "  # noqa: S608 - our own names
    f"({', '.join(UsageIncrement._fields)}, region, step_s) "
    f"VALUES ({{places}}, {MINUTE_SECONDS}) {tables.ADD_COUNTS}"
)
# Which of these subjects and rules have usage.
_KNOWN: Final = (
    "WITH asked (subject, rule) AS (VALUES {places}) SELECT subject, rule FROM asked "
    "WHERE EXISTS (SELECT 1 FROM ratekeeper_usage AS kept "
    "WHERE kept.subject = asked.subject AND kept.rule = asked.rule)"
)
# Errors of a value, not of the database: classes of SQLSTATE, and errors that drivers raise.
_DATA_CLASSES: Final = ("22", "23")
# A partition is missing: it is created again, and the batch is retried.
_NO_PARTITION: Final = "23514"
_DATA_ERRORS: Final = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError)

log = logging.getLogger("ratekeeper.history")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class WritePace:
    """How often the sink writes."""

    write_seconds: float = 1.0
    usage_seconds: float = 5.0
    """Seconds between two writes of usage."""
    batch_seconds: float = 0.5
    """Seconds between full batches: 2,000 decisions a second. Each row takes 20 µs of the worker's
    time, and a client that is denied 100,000 times must not slow down the others."""


class RecordBatch(NamedTuple):
    """The records of one transaction."""

    number: int
    events: list[DecisionEvent]
    usage: list[UsageIncrement]


class Sink:
    """Writes records to one database. For one event loop, except `dropped`."""

    def __init__(
        self,
        database: Database,
        retention: Retention | None = None,
        pace: WritePace | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        row_of: Callable[[Any], DecisionEvent] | None = None,
        region: str = "",
    ) -> None:
        """Connect later, when `run` writes.

        `row_of` makes a row of an offered decision when it is written; None: it is a row already.
        `region` is that of the node, for the usage.
        """
        self._region = region
        self._database = database
        self._row_of = row_of
        self._pace = pace or WritePace()
        self._now_ns = now_ns
        self._retention = retention or Retention()
        self._trimmer = Trimmer(database, self._retention)
        self._events: deque[Any] = deque()
        self._subjects = _Subjects()
        self.usage = UsageBuckets(is_known=self._subjects.is_known)
        """Usage to write; callers add to it."""
        self._usage_due_s = 0.0
        self._numbers = 0
        self._writer = secrets.token_hex(8)
        self._pending: RecordBatch | None = None
        self._days: set[date] = set()
        self._add_event = _with_placeholders(_ADD_EVENT, len(DecisionEvent._fields), database)
        self._add_usage = _with_placeholders(_ADD_USAGE, len(UsageIncrement._fields) + 1, database)
        self._has_tables = False
        self._room: Room | None = None
        self._room_left: list[int] = []
        self._trim_at_s = 0.0
        self._urgent_at_s = 0.0
        self._failures = 0
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._dropped = 0
        self.written = 0
        """The number of decisions that are in the database."""

    def dropped(self) -> int:
        """Return the number of decisions and requests that were dropped."""
        return self._dropped + self.usage.dropped

    def offer(self, events: Sequence[Any]) -> None:
        """Queue decisions; those that do not fit are dropped."""
        room = max(EVENTS_MAX - len(self._events), 0)
        self._events.extend(events[:room])
        self._dropped += max(len(events) - room, 0)
        if len(self._events) >= BATCH_EVENTS_MAX:
            self._wake.set()

    # ── The loop ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Write until `stop`; retry a batch that fails."""
        while not self._stopping.is_set():
            pause_s = await self._round()
            # After a failure, a full queue does not shorten the pause.
            waking = self._stopping if self._failures else self._wake
            with suppress(TimeoutError):
                await asyncio.wait_for(waking.wait(), pause_s)
            self._wake.clear()

    def stop(self) -> None:
        """Make `run` return after the present batch. `finish` writes the rest."""
        self._stopping.set()
        self._wake.set()

    async def _round(self) -> float:
        """Write the due records, and return the seconds to wait."""
        try:
            await self._prepare()
            while await self.write() and not self._stopping.is_set():
                await self._trim()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._pace.batch_seconds)
            await self._trim()
        except StoreError as error:
            self._failures += 1
            # A table or a partition may have been dropped.
            self._has_tables, self._days = False, set()
            if self._failures == 1:
                log.warning("records are not written, only kept while they fit: %s", error)
            most = min(RETRY_SECONDS_MIN * 2.0 ** (self._failures - 1), RETRY_SECONDS_MAX)
            return most * RANDOM.uniform(0.5, 1.0)
        except ConfigError as error:
            # Tables of another version: a short pause would not help.
            self._failures += 1
            log.error("records are not written: %s", error)  # noqa: TRY400 - the message is enough
            return RETRY_SECONDS_MAX
        except Exception:
            self._failures += 1
            log.exception("records are not written, because of a bug")
            return RETRY_SECONDS_MAX
        if self._failures:
            log.info("records are written again; %d were dropped so far", self.dropped())
            self._failures = 0
        return self._pace.write_seconds

    async def finish(self) -> None:
        """Write everything that is queued, without retrying. Raises StoreError."""
        await self._prepare()
        while self._pending or self._events or len(self.usage):
            self._usage_due_s = 0.0
            await self.write()

    async def close(self) -> None:
        """Close the database."""
        await self._database.close()

    # ── Writing ──────────────────────────────────────────────────────────────────────────────

    async def _prepare(self) -> None:
        """Create the tables if they are missing."""
        if self._has_tables:
            return
        is_postgresql = self._database.is_postgresql
        await self._database.reach()
        async with self._database.reading() as connection:
            found = await tables.version(connection, is_postgresql=is_postgresql)
        tables.check_version(found, self._database.name)
        if found is None:
            async with self._database.writing_shared() as connection:
                await tables.create(connection, is_postgresql=is_postgresql)
        self._use_room(await self._trimmer.join(self._writer, self._now_ns() // 10**9))
        self._has_tables = True

    async def write(self) -> bool:
        """Write one batch; return True if another one is due. Raises StoreError."""
        batch = self._pending or await self._next()
        if batch is None:
            return False
        self._pending = batch = self._without_other_days(batch)
        try:
            await self._add(batch)
        except StoreError as error:
            if not _is_about_data(error):
                raise
            self._drop(batch, error)
        except (ValueError, OverflowError, TypeError) as error:  # the driver cannot encode a value
            self._drop(batch, error)
        self._pending = None
        await self._database.cut_log()
        self.written += len(batch.events)
        return len(self._events) >= BATCH_EVENTS_MAX or self._is_usage_due()

    async def _next(self) -> RecordBatch | None:
        if self._is_room_used():
            await self._trim()
        usage: list[UsageIncrement] = []
        if self._is_usage_due():
            usage = await self._admitted(self.usage.take(BATCH_BUCKETS_MAX))
            if not len(self.usage):
                self._usage_due_s = time.monotonic() + self._pace.usage_seconds
        # After the usage, whose look-up may fail: these would be lost then.
        count = min(len(self._events), BATCH_EVENTS_MAX)
        events = self._with_room(await self._rows([self._events.popleft() for _ in range(count)]))
        if not events and not usage:
            return None
        self._numbers += 1
        return RecordBatch(self._numbers, events, usage)

    async def _rows(self, offered: list[Any]) -> list[DecisionEvent]:
        """Make the rows, a few at a time, because the worker cannot answer meanwhile."""
        if self._row_of is None:
            return offered
        rows: list[DecisionEvent] = []
        for some in _chunks(offered):
            rows += map(self._row_of, some)
            await asyncio.sleep(_PAUSE_SECONDS)
        return rows

    # ── Room ─────────────────────────────────────────────────────────────────────────────────

    def _use_room(self, room: Room) -> None:
        if self._room is None or room.measured != self._room.measured:
            self._room, self._room_left = room, list(room[1:])

    def _is_room_used(self) -> bool:
        """Return True if half of the room for decisions or for usage is used."""
        return self._is_half_used(_DECISIONS) or self._is_half_used(_USAGE)

    def _is_half_used(self, at: int) -> bool:
        given = self._room
        return given is not None and (
            self._half_left(at) <= 0 or self._room_left[at + 1] <= given[at + 2] // 2
        )

    def _half_left(self, at: int) -> int:
        """Return the rows until half of the room is used."""
        return 0 if self._room is None else self._room_left[at] - self._room[at + 1] // 2

    def _has_room(self, at: int, row_bytes: int) -> bool:
        """Take room for a row; return False if there is none."""
        left = self._room_left
        if left[at] < 1 or left[at + 1] < row_bytes:
            return False
        left[at] -= 1
        left[at + 1] -= row_bytes
        return True

    def _with_room(self, events: list[DecisionEvent]) -> list[DecisionEvent]:
        """Return the decisions that there is room for; the others are dropped."""
        for at, each in enumerate(events):
            if not self._has_room(_DECISIONS, _row_bytes(each, DECISION_BYTES)):
                self._dropped += len(events) - at
                return events[:at]
        return events

    async def _admitted(self, usage: list[UsageIncrement]) -> list[UsageIncrement]:
        """Return the usage to write, with the subjects that are not admitted under OTHERS.

        The rows are sorted, OTHERS last: all writers lock rows in this order.
        """
        subjects = self._subjects
        subjects.begin(self._now_ns() // MINUTE_NS)
        usage.sort(key=attrgetter("requests"), reverse=True)
        unknown = [
            each for each in usage if each.subject != OTHERS and not subjects.is_known(each[:2])
        ]
        if len(unknown) > min(subjects.new_left, self._half_left(_USAGE)):
            try:
                await self._look_up(unknown[:LOOKUPS_MAX])
            except BaseException:
                self.usage.put_back(usage)
                raise
        admitted: list[UsageIncrement] = []
        folded: dict[Bucket, Counts] = {}
        # The known subjects take their room first.
        for each in sorted(usage, key=lambda each: not subjects.is_known(each[:2])):
            if self._is_admitted(each):
                admitted.append(each)
            else:
                counts = folded.setdefault((OTHERS, each.rule, each.start_s), [0] * 5)
                for at, count in enumerate(each[3:]):
                    counts[at] += count
        admitted.sort()
        return admitted + [UsageIncrement(*key, *counts) for key, counts in sorted(folded.items())]

    def _is_admitted(self, used: UsageIncrement) -> bool:
        """Return True if the usage of a subject gets a row of its own, and take its room."""
        subjects = self._subjects
        if used.subject == OTHERS:
            return False
        if subjects.has_row(used[:3]):
            return True
        is_known = subjects.is_known(used[:2])
        # Half of the room is for known subjects only.
        if not is_known and (not subjects.new_left or self._is_half_used(_USAGE)):
            return False
        if not self._has_room(_USAGE, _row_bytes(used, USAGE_BYTES)):
            return False
        subjects.new_left -= not is_known
        subjects.add_row(used[:3])
        return True

    async def _look_up(self, usage: Sequence[UsageIncrement]) -> None:
        """Note the subjects that have usage in the database as known."""
        for some in _chunks(usage):
            # Each pair once: a batch may have several minutes of a subject.
            pairs = list(dict.fromkeys((each.subject, each.rule) for each in some))
            places = _places(2 * len(pairs), self._database)
            asked = ", ".join(map("({}, {})".format, places[::2], places[1::2]))
            given = tuple(value for pair in pairs for value in pair)
            async with self._database.reading() as connection:
                found = await connection.exec_driver_sql(_KNOWN.format(places=asked), given)
                for row in found:
                    self._subjects.add(tuple(row))
            await asyncio.sleep(_PAUSE_SECONDS)

    def _is_usage_due(self) -> bool:
        return len(self.usage) > 0 and time.monotonic() >= self._usage_due_s

    async def _add(self, batch: RecordBatch) -> None:
        events = batch.events
        if self._database.is_postgresql and events:
            await self._create_partitions(events)
        async with self._database.writing_shared() as connection:
            written = {
                "writer": self._writer,
                "batch": batch.number,
                "at_s": self._now_ns() // 10**9,
            }
            first = await connection.execute(_CLAIM_BATCH, written)
            if not first.rowcount:
                return  # the last attempt was committed, but its answer was lost
            for rows in _chunks(events):
                await connection.exec_driver_sql(self._add_event, [tuple(row) for row in rows])
            for used in _chunks(batch.usage):
                given = [(*_fitting(row), self._region) for row in used]
                await connection.exec_driver_sql(self._add_usage, given)

    def _without_other_days(self, batch: RecordBatch) -> RecordBatch:
        """Drop the decisions of days without a partition: too old, or far ahead."""
        if not self._database.is_postgresql:
            return batch
        now_us = self._now_ns() // 1_000
        last = tables.days_ahead(now_us)[-1]
        oldest = tables.day_of(now_us - self._retention.decisions_days * tables.DAY_US)
        kept = [each for each in batch.events if oldest <= tables.day_of(each.at_us) <= last]
        self._dropped += len(batch.events) - len(kept)
        return batch._replace(events=kept)

    async def _create_partitions(self, events: Sequence[DecisionEvent]) -> None:
        ahead = tables.days_ahead(self._now_ns() // 1_000)
        wanted = {tables.day_of(each.at_us) for each in events}
        if not wanted <= self._days:
            async with self._database.writing_shared() as connection:
                await tables.create_days(connection, {*ahead, *wanted})
            # Replaced, not extended: old partitions are dropped.
            self._days = {*ahead, *wanted}

    def _drop(self, batch: RecordBatch, error: Exception) -> None:
        log.error("a batch of records is dropped: %s", error)
        self._dropped += len(batch.events) + sum(each.requests for each in batch.usage)

    async def _trim(self) -> None:
        now_s = time.monotonic()
        urgent = self._is_room_used() and now_s >= self._urgent_at_s
        if now_s < self._trim_at_s and not self._trimmer.is_behind and not urgent:
            return
        self._urgent_at_s = now_s + URGENT_SECONDS
        if now_s >= self._trim_at_s:
            # Workers try at different moments, and the first one trims for all.
            self._trim_at_s = now_s + TRIM_SECONDS * RANDOM.uniform(0.5, 1.0)
        database_s = await self._database_time_s()
        if await self._trimmer.trim(database_s, urgent=urgent):
            self._days = set()
        self._use_room(await self._trimmer.room())

    async def _database_time_s(self) -> int:
        """Return the time of PostgreSQL's clock; for SQLite, this machine's.

        A node whose clock is weeks ahead must not drop the records of the others.
        """
        if not self._database.is_postgresql:
            return self._now_ns() // 10**9
        async with self._database.reading() as connection:
            found = await connection.execute(_NOW)
            return int(found.scalar_one())


def _with_placeholders(statement: str, count: int, database: Database) -> str:
    """Return the statement with the placeholders of the database's driver."""
    return statement.format(places=", ".join(_places(count, database)))


def _places(count: int, database: Database) -> list[str]:
    return [f"${place + 1}" if database.is_postgresql else "?" for place in range(count)]


class _Subjects:
    """The subjects that one writer knows, and the rows that it has written in this minute.

    Both are kept as hashes of the subject, the rule (and the minute), in a bounded number. When
    KNOWN_MAX subjects are known, the older half is forgotten.
    """

    __slots__ = ("_known", "_minute", "_older", "_rows", "new_left")

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._older: set[int] = set()
        self._rows: set[int] = set()
        self._minute = 0
        self.new_left = NEW_SUBJECTS_MAX
        """How many subjects that are not known may still be added in this minute."""

    def begin(self, minute: int) -> None:
        """Start counting again if another minute has begun."""
        if minute != self._minute:
            self._minute, self._rows, self.new_left = minute, set(), NEW_SUBJECTS_MAX

    def is_known(self, pair: tuple[Any, ...]) -> bool:
        """Return True if this subject has usage under this rule in the database."""
        key = hash(pair)
        return key in self._known or key in self._older

    def add(self, pair: tuple[Any, ...]) -> None:
        """Note that a subject has usage under a rule."""
        if len(self._known) >= KNOWN_MAX // 2:
            self._known, self._older = set(), self._known
        self._known.add(hash(pair))

    def has_row(self, row: tuple[Any, ...]) -> bool:
        """Return True if this writer has written the row: to add to it takes no room."""
        return hash(row) in self._rows

    def add_row(self, row: tuple[Any, ...]) -> None:
        """Note that a row is written."""
        self.add(row[:2])
        if len(self._rows) < KNOWN_MAX:
            self._rows.add(hash(row))


def _row_bytes(row: tuple[Any, ...], bytes_each: int) -> int:
    """Return the bytes that a row takes at most, with its indexes."""
    return bytes_each + tables.TEXT_COPIES * sum(
        len(each) if each.isascii() else len(each.encode("utf-8", "replace"))
        for each in row
        if isinstance(each, str)
    )


def _fitting(used: UsageIncrement) -> tuple[Any, ...]:
    """Return the row with units that both databases can store."""
    return tuple(used._replace(units=min(used.units, NUMBER_MAX)))


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), STATEMENT_ROWS):
        yield rows[start : start + STATEMENT_ROWS]


def _is_about_data(error: StoreError) -> bool:
    """Return True if the same batch would always fail, whatever the state of the database."""
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
