"""The sink on SQLite: it writes in batches, each exactly once, and retries after a failure."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from ratekeeper.control.database import Database
from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.history import sink as sinks
from ratekeeper.history.reading import RecordFilter, Records
from ratekeeper.history.sink import BATCH_EVENTS_MAX, EVENTS_MAX, Sink, WritePace
from ratekeeper.history.tables import Retention
from tests.history.databases import event, rows, until_async

QUICK = WritePace(write_seconds=0.01, usage_seconds=0.01, batch_seconds=0)
COUNTS = "SELECT count(*), coalesce(sum(allowed), 0), coalesce(sum(units), 0) FROM ratekeeper_usage"
DECISIONS = "SELECT count(*) FROM ratekeeper_decisions"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'records.db'}"


async def test_everything_is_written_once(url: str) -> None:
    """More than one batch of decisions and of usage."""
    sink = Sink(Database(url))
    events = [event(number, subject=f"user:{number}") for number in range(BATCH_EVENTS_MAX + 500)]
    sink.offer(events)
    for number in range(sinks.BATCH_BUCKETS_MAX + 10):
        sink.usage.add((f"user:{number}", "orders", 1), [1, 0, 2])
    await sink.finish()
    await sink.finish()
    await sink.close()
    assert await rows(url, DECISIONS) == [(len(events),)]
    count = sinks.BATCH_BUCKETS_MAX + 10
    assert await rows(url, COUNTS) == [(count, count, 2 * count)]
    assert (sink.written, sink.dropped()) == (len(events), 0)


async def test_counts_of_several_writers_add_up(url: str) -> None:
    """Several sinks write to the same buckets at the same time, repeatedly."""

    async def write() -> None:
        sink = Sink(Database(url))
        for _ in range(5):
            for number in range(50):
                sink.usage.add((f"user:{number}", "orders", 7), [1, 2, 3])
            await sink.finish()
        await sink.close()

    await asyncio.gather(*(write() for _ in range(4)))
    found = "SELECT count(*), min(allowed), max(allowed), max(units) FROM ratekeeper_usage"
    assert await rows(url, found) == [(50, 20, 20, 60)]


async def test_a_committed_batch_is_not_added_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its commit is lost; the retry finds its number."""
    sink = Sink(Database(url))
    sink.offer([event(1)])
    sink.usage.add(("user:1", "orders", 1), [1, 0, 1])
    add = sink._add

    async def add_and_lose_the_answer(batch: sinks.RecordBatch) -> None:
        await add(batch)
        raise StoreError("no answer")

    await sink._prepare()
    monkeypatch.setattr(sink, "_add", add_and_lose_the_answer)
    with pytest.raises(StoreError):
        await sink.write()
    monkeypatch.undo()
    sink.offer([event(2)])
    await sink.finish()
    await sink.close()
    assert await rows(url, DECISIONS) == [(2,)]
    assert await rows(url, COUNTS) == [(1, 1, 1)]


async def test_decisions_that_do_not_fit_are_dropped_and_counted(url: str) -> None:
    """The oldest records stay."""
    sink = Sink(Database(url))
    sink.offer([event(number) for number in range(EVENTS_MAX - 1)])
    sink.offer([event(number) for number in range(EVENTS_MAX, EVENTS_MAX + 5)])
    assert sink.dropped() == 4
    sink.offer([event(0)])
    assert sink.dropped() == 5
    await sink.close()


async def test_a_locked_file_is_retried(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions are kept while they fit, and written when the lock is released."""
    monkeypatch.setattr("ratekeeper.control.database.WAIT_SECONDS_MAX", 0.05)
    monkeypatch.setattr(sinks, "RETRY_SECONDS_MIN", 0.01)
    sink = Sink(Database(url), pace=QUICK)
    await sink.finish()
    with sqlite3.connect(tmp_path / "records.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        running = asyncio.create_task(sink.run())
        for _ in range(2 * EVENTS_MAX // BATCH_EVENTS_MAX):
            sink.offer([event(time.time_ns() // 1_000)] * BATCH_EVENTS_MAX)
            await asyncio.sleep(0)
        await until_async(lambda: sink._failures > 1, "the sink has retried")
        assert sink.written == 0
        assert sink.dropped() >= EVENTS_MAX - BATCH_EVENTS_MAX
        other.execute("ROLLBACK")
    kept = 2 * EVENTS_MAX - sink.dropped()
    await until_async(lambda: sink.written == kept, "all that was kept is written")
    sink.stop()
    await running
    await sink.close()
    assert await rows(url, DECISIONS) == [(kept,)]
    other.close()


def remove_files(folder: Path) -> None:
    """Remove all files of a folder."""
    for each in folder.iterdir():
        each.unlink()


async def test_a_removed_file_is_created_again(url: str, tmp_path: Path) -> None:
    """An operator may remove it, and later records are written to a new one."""
    sink = Sink(Database(url), pace=QUICK)
    records = Records(Database(url))
    now_us = time.time_ns() // 1_000
    wanted = RecordFilter(0, 2 * now_us)
    running = asyncio.create_task(sink.run())
    sink.offer([event(now_us)])
    await until_async(lambda: sink.written == 1, "the first is written")
    assert len(await records.decisions(wanted, 10)) == 1
    remove_files(tmp_path)
    sink.offer([event(now_us + 1)])
    await until_async(lambda: sink.written == 2, "the second is written")
    found = await records.decisions(wanted, 10)
    assert [row.event.at_us for row in found] == [now_us + 1]
    sink.stop()
    await running
    await sink.close()
    await records.close()
    assert await rows(url, DECISIONS) == [(1,)]


async def test_a_batch_that_cannot_be_encoded_is_dropped_and_counted(url: str) -> None:
    """It does not block the next batches."""
    sink = Sink(Database(url))
    sink.offer([event(1, node=object()), event(2)])
    await sink.finish()
    sink.offer([event(3)])
    await sink.finish()
    await sink.close()
    assert sink.dropped() == 2
    assert await rows(url, DECISIONS) == [(1,)]


async def test_tables_of_a_later_version_are_rejected(url: str) -> None:
    """An older Ratekeeper does not write to them."""
    first = Sink(Database(url))
    await first.finish()
    async with first._database.writing_shared() as connection:
        await connection.exec_driver_sql("UPDATE ratekeeper_record_state SET version = 99")
    await first.close()
    sink = Sink(Database(url))
    sink.offer([event(1)])
    with pytest.raises(ConfigError, match="have version 99"):
        await sink.finish()
    await sink.close()


async def test_the_loop_writes_due_records(url: str) -> None:
    """Many decisions are written at once, and usage when its interval has passed."""
    sink = Sink(Database(url), pace=QUICK)
    running = asyncio.create_task(sink.run())
    now_s = int(time.time())  # old rows would be trimmed
    sink.offer([event(now_s * 10**6)])
    sink.usage.add(("user:1", "orders", now_s // 60), [1, 0, 1])
    await until_async(lambda: sink.written == 1 and not len(sink.usage), "both are written")
    sink.stop()
    await running
    await sink.finish()
    await sink.close()
    assert await rows(url, COUNTS) == [(1, 1, 1)]


# ── Room ───────────────────────────────────────────────────────────────────────────────────────

BY_SUBJECT = "SELECT subject, sum(allowed) FROM ratekeeper_usage GROUP BY 1 ORDER BY 1"


async def test_new_subjects_are_bounded_per_minute(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busiest new ones get a row, known ones always do, and the others are counted together."""
    monkeypatch.setattr(sinks, "NEW_SUBJECTS_MAX", 3)
    minute = 30_000_000
    first = Sink(Database(url), now_ns=lambda: minute * 60 * 10**9)
    first.usage.add(("user:ann", "orders", minute - 60), [1, 0, 1])
    await first.finish()
    await first.close()
    sink = Sink(Database(url), now_ns=lambda: minute * 60 * 10**9)
    for number in range(50):
        sink.usage.add((f"random:{number}", "orders", minute), [1, 0, 1])
    for subject, count in (("user:ann", 1), ("user:bob", 2), ("user:eve", 3), ("user:joe", 4)):
        sink.usage.add((subject, "orders", minute), [count, 0, count])
    await sink.finish()
    assert await rows(url, BY_SUBJECT) == [
        *(("(others)", 50), ("user:ann", 2), ("user:bob", 2), ("user:eve", 3), ("user:joe", 4))
    ]
    sink.usage.add(("user:joe", "orders", minute), [1, 0, 1])
    sink.usage.add(("random:51", "orders", minute), [1, 0, 1])
    await sink.finish()
    assert (await rows(url, BY_SUBJECT))[0] == ("(others)", 51)
    assert (await rows(url, BY_SUBJECT))[-1] == ("user:joe", 5)
    await sink.close()


async def test_a_writer_without_room_drops_decisions_and_no_usage(url: str) -> None:
    """Each writer stays within its room, and asks for a new measurement."""
    sink = Sink(Database(url), Retention(rows_max=100), now_ns=lambda: 1_800_000_000 * 10**9)
    sink.offer([event(1_800_000_000 * 10**6 + number) for number in range(300)])
    for number in range(300):
        sink.usage.add((f"user:{number}", "orders", 30_000_000), [1, 0, 1])
    await sink.finish()
    [(decisions,)] = await rows(url, DECISIONS)
    assert 20 <= decisions <= 100
    assert decisions + sink.dropped() >= 300
    [(used, allowed, units)] = await rows(url, COUNTS)
    assert (allowed, units) == (300, 300)
    assert 10 <= used <= 100
    await sink.close()


async def test_a_failed_look_up_loses_no_usage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage that was taken is put back."""
    sink = Sink(Database(url))
    await sink.finish()
    monkeypatch.setattr(sinks, "NEW_SUBJECTS_MAX", 0)
    monkeypatch.setattr(sinks, "_KNOWN", "SELECT nonsense {places}")
    sink.usage.add(("user:ann", "orders", 1), [1, 0, 1])
    with pytest.raises(StoreError):
        await sink.finish()
    monkeypatch.undo()
    await sink.finish()
    assert await rows(url, COUNTS) == [(1, 1, 1)]
    await sink.close()
