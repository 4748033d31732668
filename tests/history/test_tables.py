"""The tables on SQLite: old rows are trimmed, and the sums stay.

`tests/integration/test_records_databases.py` runs them on PostgreSQL, too.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from ratekeeper.control.database import Database
from ratekeeper.history import tables
from ratekeeper.history.events import OTHERS
from ratekeeper.history.sink import Sink, WritePace
from ratekeeper.history.tables import ROOM_PARTS, Retention, Trimmer
from tests.history.databases import event, rows, until_async

# 2027-01-15T08:00:00Z.
NOW_S = 1_800_000_000
HOUR, DAY = 3_600, 86_400
USAGE = "SELECT step_s, start_s, allowed, denied, units FROM ratekeeper_usage ORDER BY start_s"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'records.db'}"


def sink_and_trimmer(url: str) -> tuple[Sink, Trimmer]:
    """Return both for one database, which keeps records for 7 and 90 days."""
    sink = Sink(Database(url))
    return sink, Trimmer(sink._database, Retention(7, 90))


async def test_minutes_become_hours_when_they_are_a_day_old(url: str) -> None:
    """Only whole hours are combined; late counts are added to the existing hour."""
    sink, trimmer = sink_and_trimmer(url)
    old_s = NOW_S - 2 * DAY
    for minute in range(90):
        sink.usage.add(("user:1", "orders", old_s // 60 + minute), [1, 2, 3])
    sink.usage.add(("user:1", "orders", NOW_S // 60), [1, 0, 1])
    await sink.finish()
    assert await trimmer.trim(NOW_S)
    found = await rows(url, USAGE)
    assert found == [
        (3600, old_s, 60, 120, 180),
        (3600, old_s + HOUR, 30, 60, 90),
        (60, NOW_S, 1, 0, 1),
    ]
    sink.usage.add(("user:1", "orders", old_s // 60), [5, 0, 5])
    await sink.finish()
    assert await trimmer.trim(NOW_S + 60)
    assert (await rows(url, USAGE))[0] == (3600, old_s, 65, 120, 185)
    await sink.close()


async def test_old_rows_are_removed(url: str) -> None:
    """Decisions are removed after 7 days, usage after 90."""
    sink, trimmer = sink_and_trimmer(url)
    for days in (6, 8):
        sink.offer([event((NOW_S - days * DAY) * 10**6)])
    for days in (89, 91):
        sink.usage.add(("user:1", "orders", (NOW_S - days * DAY) // 60), [1, 1, 1])
    await sink.finish()
    assert await trimmer.trim(NOW_S)
    found = await rows(url, "SELECT at_us FROM ratekeeper_decisions")
    assert found == [((NOW_S - 6 * DAY) * 10**6,)]
    assert [row[1] for row in await rows(url, USAGE)] == [NOW_S - 89 * DAY]
    await sink.close()


async def test_trimming_works_in_steps(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one step are removed, too."""
    monkeypatch.setattr(tables, "STEP_ROWS", 10)
    sink, trimmer = sink_and_trimmer(url)
    sink.offer([event(number) for number in range(95)])
    for number in range(95):
        sink.usage.add((f"user:{number % 5}", "orders", NOW_S // 60 - 3_000 - number), [1, 1, 1])
    await sink.finish()
    assert await trimmer.trim(NOW_S)
    while trimmer.is_behind:  # at once, instead of a minute later
        assert await trimmer.trim(NOW_S)
    assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(0,)]
    sums = "SELECT min(step_s), sum(allowed), sum(denied), sum(units) FROM ratekeeper_usage"
    assert await rows(url, sums) == [(3600, 95, 95, 95)]
    await sink.close()


async def test_trimming_continues_after_the_next_batch(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of old rows."""
    monkeypatch.setattr(tables, "STEP_ROWS", 10)
    quick = WritePace(write_seconds=0.01, usage_seconds=0.01, batch_seconds=0)
    sink = Sink(Database(url), pace=quick, now_ns=lambda: NOW_S * 10**9)
    sink.offer([event(number) for number in range(1_000)])
    for number in range(1_000):
        sink.usage.add((f"user:{number % 5}", "orders", NOW_S // 60 - 3_000 - number), [1, 1, 1])
    await sink.finish()
    running = asyncio.create_task(sink.run())
    sink.offer([event(NOW_S * 10**6)])
    left = (
        "SELECT (SELECT count(*) FROM ratekeeper_decisions), "
        "(SELECT count(*) FROM ratekeeper_usage WHERE step_s = 60)"
    )
    with closing(sqlite3.connect(tmp_path / "records.db")) as file:
        await until_async(lambda: file.execute(left).fetchall() == [(1, 0)], "all is trimmed")
    sink.stop()
    await running
    await sink.close()


async def test_one_of_several_workers_trims(url: str) -> None:
    """The first one, and again after a minute; a time far ahead is ignored as a wrong clock."""
    sink, trimmer = sink_and_trimmer(url)
    await sink.finish()
    another, other = sink_and_trimmer(url)
    assert await trimmer.trim(NOW_S)
    assert not await other.trim(NOW_S + 1)
    assert not await other.trim(NOW_S - 1)
    assert await other.trim(NOW_S + 60)
    assert await trimmer.trim(NOW_S - DAY)
    await sink.close()
    await another.close()


async def test_old_writers_are_removed(url: str) -> None:
    """A writer that has ended does not repeat a batch."""
    sink = Sink(Database(url), now_ns=lambda: NOW_S * 10**9)
    trimmer = Trimmer(sink._database, Retention())
    sink.offer([event(1)])
    await sink.finish()
    count = "SELECT count(*) FROM ratekeeper_record_writers"
    await trimmer.trim(NOW_S + DAY)
    assert await rows(url, count) == [(1,)]
    await trimmer.trim(NOW_S + 8 * DAY)
    assert await rows(url, count) == [(0,)]
    await sink.close()


# ── The bound ──────────────────────────────────────────────────────────────────────────────────


async def test_the_fullest_hour_is_thinned(url: str) -> None:
    """The least busy subjects of that hour become OTHERS; a quiet hour and the sums stay."""
    sink, _ = sink_and_trimmer(url)
    quiet, flood = NOW_S // 60 - 300, NOW_S // 60 - 120
    for number in range(40):
        sink.usage.add((f"user:{number}", "orders", quiet), [1, 0, 1])
    for number in range(100):
        sink.usage.add((f"random:{number:03}", "orders", flood), [1, 0, 1])
    sink.usage.add(("user:0", "orders", flood), [1, 0, 1])
    sink.usage.add(("new-and-busy", "orders", flood), [9, 1, 9])
    await sink.finish()
    await Trimmer(sink._database, Retention(7, 90, rows_max=140)).trim(NOW_S)
    kept = {row[0] for row in await rows(url, "SELECT subject FROM ratekeeper_usage")}
    assert {f"user:{number}" for number in range(40)} | {"new-and-busy", OTHERS} <= kept
    assert sum(subject.startswith("random") for subject in kept) == 56
    flooded = f"SELECT subject FROM ratekeeper_usage WHERE start_s = {flood // 60 * 3600}"
    assert ("user:0",) in await rows(url, flooded), "a subject that was there before stays"
    sums = "SELECT sum(allowed), sum(denied), sum(units) FROM ratekeeper_usage"
    assert await rows(url, sums) == [(150, 1, 150)]
    await sink.close()


async def test_decisions_of_the_fullest_hour_are_removed(url: str) -> None:
    """The sample of allowed requests goes first; an hour with few decisions stays."""
    sink, _ = sink_and_trimmer(url)
    quiet_us, flood_us = (NOW_S - 9 * HOUR) * 10**6, (NOW_S - HOUR) * 10**6
    sink.offer([event(quiet_us + each) for each in range(20)])
    sink.offer([event(flood_us + each, outcome="allowed") for each in range(10)])
    sink.offer([event(flood_us + each, subject=f"random:{each}") for each in range(70)])
    await sink.finish()
    await Trimmer(sink._database, Retention(7, 90, rows_max=100)).trim(NOW_S)
    counts = "SELECT at_us / 3600000000, outcome, count(*) FROM ratekeeper_decisions GROUP BY 1, 2"
    assert await rows(url, counts) == [
        (quiet_us // 10**6 // HOUR, "denied", 20),
        (flood_us // 10**6 // HOUR, "denied", 50),
    ]
    await sink.close()


async def test_the_room_is_shared_by_the_writers(url: str) -> None:
    """A worker that was killed after it took its turn does not keep the others from measuring."""
    sink, trimmer = sink_and_trimmer(url)
    await sink.finish()
    bounded = Trimmer(sink._database, Retention(7, 90, rows_max=1_000))
    await bounded.trim(NOW_S)
    alone = await bounded.room()
    assert (alone.decision_rows, alone.usage_rows) == (900 // ROOM_PARTS, 900 // ROOM_PARTS)
    async with sink._database.writing_shared() as connection:
        for number in range(9):
            await connection.execute(
                text("INSERT INTO ratekeeper_record_writers VALUES (:writer, 1, :at_s)"),
                {"writer": f"w{number}", "at_s": NOW_S},
            )
    assert await trimmer._is_our_turn(NOW_S + 60, 60), "this worker is killed now"
    assert await bounded.room() == alone
    assert not await bounded.trim(NOW_S + 60, urgent=True)
    assert await bounded.trim(NOW_S + 61, urgent=True)
    shared = await bounded.room()
    assert (shared.measured, shared.usage_rows) == (alone.measured + 1, 100 // ROOM_PARTS)
    await sink.close()


async def test_a_file_that_is_too_large_shrinks(url: str, tmp_path: Path) -> None:
    """Rows are removed, and their pages are returned to the disk."""
    sink, _ = sink_and_trimmer(url)
    for number in range(5_000):
        sink.usage.add((f"user:{number:0200}", "orders", NOW_S // 60), [1, 0, 1])
    await sink.finish()
    await sink.close()  # its last connection writes the log back
    before = (tmp_path / "records.db").stat().st_size
    bounded = Trimmer(sink._database, Retention(7, 90, bytes_max=before // 2))
    for turn in range(4):
        await bounded.trim(NOW_S + 60 * turn)
    await sink.close()
    assert (tmp_path / "records.db").stat().st_size < before // 2
    assert await rows(url, "SELECT sum(allowed) FROM ratekeeper_usage") == [(5_000,)]
