"""Records in SQLite and PostgreSQL: the same rows, daily partitions, concurrent writers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from ratekeeper.control.database import Database
from ratekeeper.core.errors import StoreError
from ratekeeper.history import sink as sinks
from ratekeeper.history import tables
from ratekeeper.history.events import NUMBER_MAX, PART
from ratekeeper.history.reading import (
    DecisionCursor,
    GroupRow,
    MostRow,
    RecordFilter,
    Records,
    UsageRow,
    UsageStep,
)
from ratekeeper.history.sink import EVENTS_MAX, Sink, WritePace
from ratekeeper.history.tables import Retention, Trimmer
from ratekeeper.testing import ManualClock
from tests.history.databases import event, rows, until_async
from tests.postgres_server import Postgres, running_postgres

# 2027-01-15T08:00:00Z.
NOW_S = 1_800_000_000
NOW_US = NOW_S * 10**6
TODAY = date(2027, 1, 15)
DAY_S = 86_400
ALL = RecordFilter(NOW_US - 10 * DAY_S * 10**6, NOW_US + DAY_S * 10**6)
TABLES = (
    *("ratekeeper_usage", "ratekeeper_decisions"),
    *("ratekeeper_record_writers", "ratekeeper_record_state"),
)
SUMS = "SELECT count(*), sum(allowed), sum(denied), sum(units) FROM ratekeeper_usage"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'records.db'}"
    return running_postgres().new_database()


@pytest.fixture
async def sink(url: str) -> AsyncIterator[Sink]:
    """A sink for the database, with a clock that stands still."""
    made = Sink(Database(url), now_ns=lambda: NOW_S * 10**9)
    yield made
    await made.close()


@pytest.fixture
async def records(url: str) -> AsyncIterator[Records]:
    """Return a reader of the database."""
    made = Records(Database(url))
    yield made
    await made.close()


async def test_units_above_the_largest_integer_are_written_as_the_largest(
    sink: Sink, records: Records
) -> None:
    """The rest of the batch is written, too."""
    sink.usage.add(("user:1", "(allow)", NOW_S // 60), [1, 0, 10**30])
    await sink.finish()
    (found,) = await records.usage(ALL, "hour", 10)
    assert (found.allowed, found.units, sink.dropped()) == (1, NUMBER_MAX, 0)


async def test_every_field_is_read_as_it_was_written(sink: Sink, records: Records) -> None:
    """Every text that a request may contain is read back unchanged."""
    strange = event(
        NOW_US,
        subject=f"tenant:größe{PART}user:🦊'%_\\",
        endpoint="/a'b\"c\n",
        cost=1_000_000_000,
        retry_after_ms=366 * DAY_S * 1_000,
        degraded=1,
        shadow_denied='["a", "b"]',
    )
    sink.offer([strange])
    await sink.finish()
    found = await records.decisions(ALL, 10)
    assert [row.event for row in found] == [strange]
    assert found[0].shadow_denied == ["a", "b"]
    assert (
        len(await records.decisions(RecordFilter(0, 2 * NOW_US, subject=strange.subject), 10)) == 1
    )


async def test_pages_hold_every_row_once(sink: Sink, records: Records) -> None:
    """This includes decisions with the same time, and usage across the boundaries of steps."""
    sink.offer([event(NOW_US - number // 3) for number in range(50)])
    for number in range(400):
        sink.usage.add((f"user:{number % 7}", f"r{number % 2}", NOW_S // 60 - number), [1, 2, 3])
    await sink.finish()
    seen: list[int] = []
    cursor = None
    while page := await records.decisions(ALL, 7, cursor):
        seen += [row.id for row in page]
        cursor = DecisionCursor(page[-1].event.at_us, page[-1].id)
    assert len(seen) == len(set(seen)) == 50
    steps: tuple[UsageStep, ...] = ("minute", "hour", "day")
    for step in steps:
        found = []
        last = None
        while usage := await records.usage(ALL, step, 11, last):
            found += usage
            last = usage[-1]
        assert len(found) == len({each[:4] for each in found})
        assert sum(each.allowed for each in found) == 400
        assert sum(each.units for each in found) == 1_200
        assert [each[:1] for each in found] == sorted(each[:1] for each in found)


async def test_sums_of_a_period_hold_every_row_once(sink: Sink, records: Records) -> None:
    """Decisions in groups and usage by subject and rule, page by page, the largest first."""
    shadows = ("[]", '["trial"]', json.dumps(["trial", "größe"]))
    sink.offer(
        [
            event(
                NOW_US + number,
                subject=f"user:{number % 7}",
                tenant="" if number % 2 else "acme",
                endpoint=f"/a'{number % 3}",
                shadow_denied=shadows[number % 3],
            )
            for number in range(60)
        ]
    )
    for number in range(90):
        sink.usage.add((f"user:{number % 7}", f"r{number % 2}", NOW_S // 60 + number), [1, 2, 3])
    await sink.finish()
    denied = replace(ALL, outcome="denied")
    found: list[GroupRow] = []
    last = None
    while page := await records.groups(denied, "subject", 3, last):
        found, last = found + page, page[-1]
    assert [(row.name, row.requests) for row in found] == [
        *((f"user:{number}", 9) for number in range(4)),
        *((f"user:{number}", 8) for number in range(4, 7)),
    ]
    assert {(row.total, row.names) for row in found} == {(60, 7)}
    assert [row[:2] for row in await records.groups(denied, "tenant", 9)] == [
        ("", 30),
        ("acme", 30),
    ]
    one = replace(denied, endpoint="/a'1", tenant="acme")
    assert [row[:2] for row in await records.groups(one, "endpoint", 9)] == [("/a'1", 10)]
    shadow = replace(ALL, outcome="shadow_denied")
    assert [row[:2] for row in await records.groups(shadow, "rule", 9)] == [
        *(("trial", 40), ("größe", 20)),
    ]
    of_rule = replace(shadow, rule="größe")
    assert [row[:2] for row in await records.groups(of_rule, "rule", 9)] == [("größe", 20)]
    assert await records.timeline(denied, 60) == [(NOW_US, 60)]
    sums: list[MostRow] = []
    at = None
    while usage := await records.most(ALL, "requests", 4, at):
        sums, at = sums + usage, usage[-1]
    assert len(sums) == len({row[:2] for row in sums}) == 14
    assert [row.most for row in sums] == sorted((row.most for row in sums), reverse=True)
    assert sum(row.allowed for row in sums) == 90
    assert sum(row.units for row in sums) == 270


async def test_a_page_reads_little_more_than_it_returns(
    sink: Sink, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a long list takes quadratic time; empty times are skipped in large windows."""
    first_s = NOW_S - 600 * 60
    for minute in range(600):
        sink.usage.add(("user:1", "orders", first_s // 60 + minute), [1, 0, 1])
    await sink.finish()
    spans: list[tuple[int, int]] = []
    find = records._rows

    async def spied(statement: str, given: Mapping[str, Any]) -> list[Any]:
        spans.append((given["from_s"], given["to_s"]))
        return await find(statement, given)

    monkeypatch.setattr(records, "_rows", spied)
    found = await records.usage(RecordFilter(first_s * 10**6, ALL.to_us), "minute", 100)
    assert [row.start_s for row in found] == [first_s + 60 * each for each in range(100)]
    assert spans[-1][1] - first_s <= 200 * 60
    spans.clear()
    again = await records.usage(RecordFilter(first_s * 10**6, ALL.to_us), "minute", 1, found[-1])
    assert [row.start_s for row in again] == [first_s + 60 * 100]
    assert spans[-1][1] - spans[0][0] <= 5 * 60
    spans.clear()
    of_all = await records.usage(RecordFilter(-(10**17), 10**17), "minute", 1_000)
    assert len(of_all) == 600
    assert len(spans) < 40


async def test_an_old_cursor_hides_nothing(sink: Sink, records: Records) -> None:
    """A cursor before the requested time returns all of it."""
    for subject in ("user:1", "user:9"):
        sink.usage.add((subject, "orders", NOW_S // 60), [1, 0, 1])
    await sink.finish()
    before = UsageRow(NOW_S - 3_600, 3_600, "user:5", "orders", 0, 0, 0)
    wanted = RecordFilter(NOW_US, NOW_US + 10**6)
    assert len(await records.usage(wanted, "hour", 10, before)) == 2


async def test_scopes_match_whole_parts(sink: Sink, records: Records) -> None:
    """A scope matches a part at any position, and every part of a scope must match."""
    subjects = [
        "tenant:acme",
        f"tenant:acme{PART}user:1",
        f"user:1{PART}tenant:acme",
        "tenant:acme-2",
        f"tenant:ac{PART}user:1",
        "user:tenant:acme",
    ]
    for subject in subjects:
        sink.usage.add((subject, "orders", NOW_S // 60), [1, 0, 1])
    await sink.finish()

    async def seen(scope: dict[str, str]) -> list[str]:
        wanted = RecordFilter(ALL.from_us, ALL.to_us, scope=scope)
        return sorted(row.subject for row in await records.usage(wanted, "hour", 100))

    assert await seen({"tenant": "acme"}) == sorted(subjects[:3])
    assert await seen({"tenant": "acme", "user": "1"}) == sorted(subjects[1:3])
    assert await seen({"tenant": "nobody"}) == []
    assert await seen({}) == sorted(subjects)


async def test_counts_of_concurrent_writers_add_up(url: str) -> None:
    """Eight writers change the same rows in different orders; the tables are created once."""

    async def write(number: int) -> None:
        sink = Sink(Database(url), now_ns=lambda: NOW_S * 10**9)
        for turn in range(5):
            for bucket in range(100):
                who = f"user:{(bucket * (number + 3)) % 101}"
                sink.usage.add((who, "orders", NOW_S // 60), [1, 0, 2])
            sink.offer([event(NOW_US - turn, node=f"n{number}")] * 20)
            await sink.finish()
        await sink.close()

    await asyncio.gather(*(write(number) for number in range(8)))
    found = await rows(url, SUMS)
    assert [int(each) for each in found[0][1:]] == [4_000, 0, 8_000]
    assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(800,)]


async def test_minutes_become_hours_while_others_write(
    url: str, sink: Sink, records: Records
) -> None:
    """The sums stay exact."""
    trimmer = Trimmer(sink._database, Retention())
    await sink.finish()
    other = Sink(Database(url), now_ns=lambda: NOW_S * 10**9)

    async def add() -> None:
        for number in range(200):
            for minutes in (3_000, 3_001, 3_100):
                other.usage.add((f"user:{number % 9}", "orders", NOW_S // 60 - minutes), [1, 1, 1])
            if number % 10 == 0:
                await other.finish()
        await other.finish()

    async def tend() -> None:
        for turn in range(10):
            await trimmer.trim(NOW_S + 60 * turn)

    await asyncio.gather(add(), tend())
    await trimmer.trim(NOW_S + 6_000)
    await other.close()
    found = await rows(url, f"{SUMS} WHERE step_s = 3600")
    assert [int(each) for each in found[0][1:]] == [600, 600, 600]
    assert await rows(url, "SELECT count(*) FROM ratekeeper_usage WHERE step_s = 60") == [(0,)]
    by_minute = await records.usage(ALL, "minute", 1_000)
    assert {row.step_s for row in by_minute} == {3600}, "older usage exists only by the hour"


@pytest.mark.parametrize("gone", [TABLES, TABLES[:1], TABLES[2:]])
async def test_dropped_tables_are_created_again(url: str, gone: tuple[str, ...]) -> None:
    """The running sink creates them, without a restart."""
    quick = WritePace(write_seconds=0.02, usage_seconds=0.02, batch_seconds=0)
    sink = Sink(Database(url), pace=quick, now_ns=lambda: NOW_S * 10**9)
    sink.offer([event(NOW_US)])
    await sink.finish()
    async with sink._database.writing_shared() as connection:
        for name in gone:
            await connection.execute(text(f"DROP TABLE {name}"))
    running = asyncio.create_task(sink.run())
    sink.offer([event(NOW_US + 1)])
    sink.usage.add(("user:1", "orders", NOW_S // 60), [1, 1, 1])
    await until_async(lambda: sink.written == 2, "the second is written")
    sink.stop()
    await running
    await sink.finish()
    await sink.close()
    assert [int(each) for each in (await rows(url, SUMS))[0]] == [1, 1, 1, 1]
    found = await rows(url, "SELECT max(at_us) FROM ratekeeper_decisions")
    assert found == [(NOW_US + 1,)]


# ----------------------------------------------------------------------------- the bound


async def bytes_of(url: str) -> int:
    """Return the size of the records on disk."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        return sum(each.stat().st_size for each in path.parent.glob("records.db*"))
    found = await rows(
        url,
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' "
        "AND relname LIKE 'ratekeeper%'",
    )
    return int(found[0][0])


async def test_a_flood_of_random_keys_stays_below_the_bound(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers write random subjects; one is killed; a known client keeps its own usage."""
    monkeypatch.setattr(sinks, "URGENT_SECONDS", 0.0)
    keep = Retention(rows_max=2_000, bytes_max=12_000_000)
    clock = ManualClock(start=NOW_S)

    def worker() -> Sink:
        return Sink(Database(url), keep, now_ns=clock.now_ns)

    async def write(sink: Sink, minute: int, number: int) -> None:
        for each in range(150):
            subject = f"user:{minute}-{number}-{each}".ljust(500, "x")
            sink.usage.add((subject, "orders", NOW_S // 60 + minute), [1, 0, 1])
            sink.offer([event(NOW_US + minute * 60_000_000 + each, subject=subject)])
        sink.usage.add(("user:ann", "orders", NOW_S // 60 + minute), [1, 0, 1])
        await sink.finish()

    workers = [worker() for _ in range(4)]
    workers[0].usage.add(("user:ann", "orders", NOW_S // 60), [1, 0, 1])
    await workers[0].finish()
    for minute in range(12):
        await asyncio.gather(*(write(each, minute, at) for at, each in enumerate(workers)))
        if minute == 6:
            await workers[0].close()
            workers[0] = worker()
        clock.advance(60)
        [(decisions,)] = await rows(url, "SELECT count(*) FROM ratekeeper_decisions")
        [(used, total)] = await rows(url, "SELECT count(*), sum(allowed) FROM ratekeeper_usage")
        assert decisions <= keep.rows_max
        assert used <= keep.rows_max + 12
        assert int(total) == 1 + (minute + 1) * 4 * 151, "usage is never dropped"
        assert await bytes_of(url) < keep.bytes_max
    ann = "SELECT sum(allowed) FROM ratekeeper_usage WHERE subject = 'user:ann'"
    assert [int(each[0]) for each in await rows(url, ann)] == [49]
    for each in workers:
        await each.close()


# The usage of versions 1 and 2 had this key, without the region.
KEY = "units NUMERIC NOT NULL, PRIMARY KEY (subject, rule, start_s, step_s)"


async def test_records_of_the_first_version_are_kept(url: str, records: Records) -> None:
    """Columns are added; old rows are read with the values that are not known."""
    is_postgresql = url.startswith("postgresql")
    serial = "BIGSERIAL NOT NULL" if is_postgresql else "INTEGER PRIMARY KEY AUTOINCREMENT"
    database = Database(url)
    async with database.writing_shared() as connection:
        partitioned = "PARTITION BY RANGE (at_us)" if is_postgresql else ""
        await connection.execute(
            text(tables._DECISIONS.format(serial=serial, partitioned=partitioned))
        )
        for statement in tables._TABLES:
            await connection.execute(text(statement.replace("units NUMERIC NOT NULL", KEY)))
        if is_postgresql:
            await tables.create_days(connection, [TODAY])
        for statement in (
            "INSERT INTO ratekeeper_record_state (id, version, tended_s) VALUES (1, 1, 0)",
            f"INSERT INTO ratekeeper_usage VALUES ('user:1', 'orders', 60, {NOW_S}, 1, 2, 3)",
        ):
            await connection.execute(text(statement))
        old = event(NOW_US)._asdict()
        columns = list(old)[:12]
        await connection.execute(
            text(
                f"INSERT INTO ratekeeper_decisions ({', '.join(columns)}) "
                f"VALUES ({', '.join(f':{name}' for name in columns)})"
            ),
            {name: old[name] for name in columns},
        )
    await database.close()
    first, second = (Sink(Database(url), now_ns=lambda: NOW_S * 10**9) for _ in range(2))
    first.offer([event(NOW_US + 1, request_id="req-1")])
    second.usage.add(("user:1", "orders", NOW_S // 60), [1, 0, 1, 4, 5])
    await asyncio.gather(first.finish(), second.finish())
    new, old = await records.decisions(ALL, 10)
    assert (new.event.request_id, old.event.request_id) == ("req-1", "")
    assert (old.event.limit_units, old.event.used_units, old.rules) == (0, -1, {})
    [usage] = await records.usage(ALL, "minute", 10)
    assert usage[4:] == (2, 2, 4, 4, 5, "")
    third = Sink(Database(url), now_ns=lambda: NOW_S * 10**9, region="eu")
    third.usage.add(("user:1", "orders", NOW_S // 60), [7, 0, 7, 0, 0])
    await third.finish()
    await third.close()
    in_regions = await records.usage(ALL, "minute", 10)
    assert [(each.region, each.allowed) for each in in_regions] == [("", 2), ("eu", 7)]
    assert await records.usage(replace(ALL, region="eu"), "minute", 10) == in_regions[1:]
    assert await records.usage(ALL, "minute", 10, in_regions[0]) == in_regions[1:]
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ({"user": "1"}, "user"),
        ({"tenant": "acme"}, "tenant"),
        ({"request_id": "req-1"}, "request"),
        ({"rule": "orders", "outcome": "denied"}, "by"),
        ({"rule": "trial", "outcome": "shadow_denied"}, "shadow"),
    ],
)
async def test_each_filter_of_decisions_has_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], index: str
) -> None:
    """A query reads the decisions that it returns, and not the whole log."""
    url = f"sqlite:///{tmp_path / 'records.db'}"
    sink, records = Sink(Database(url)), Records(Database(url))
    await sink.finish()
    asked: list[tuple[str, Mapping[str, Any]]] = []

    async def noted(statement: str, given: Mapping[str, Any]) -> list[Any]:
        asked.append((statement, given))
        return []

    monkeypatch.setattr(records, "_rows", noted)
    await records.decisions(RecordFilter(0, 2 * NOW_US, **wanted), 10)
    async with sink._database.reading() as connection:
        [(statement, given)] = asked
        plan = await connection.execute(text(f"EXPLAIN QUERY PLAN {statement}"), dict(given))
        shown = " ".join(str(row[3]) for row in plan)
    assert f"ratekeeper_decisions_{index}" in shown
    assert "TEMP B-TREE" not in shown, "the index is in the order of the page"
    await sink.close()
    await records.close()


# ----------------------------------------------------------------------------- PostgreSQL's days


async def days_of(url: str) -> list[date]:
    """Return the days that have a partition."""
    database = Database(url)
    async with database.reading() as connection:
        found = await tables.days(connection)
    await database.close()
    return found


async def test_partitions_are_created_ahead_and_dropped_by_age() -> None:
    """Each day has a partition; a decision is removed with its day."""
    url = running_postgres().new_database()
    clock = ManualClock(start=NOW_S)
    sink = Sink(Database(url), Retention(decisions_days=7), now_ns=clock.now_ns)
    trimmer = Trimmer(sink._database, Retention(decisions_days=7))
    for day in range(20):
        sink.offer([event(clock.now_ns() // 1_000)])
        await sink.finish()
        await trimmer.trim(clock.now_ns() // 10**9)
        today = TODAY + timedelta(days=day)
        first = max(TODAY, today - timedelta(days=7))
        ahead = today + timedelta(days=tables.DAYS_AHEAD)
        assert await days_of(url) == [
            first + timedelta(days=each) for each in range((ahead - first).days + 1)
        ]
        clock.advance(DAY_S)
    assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(8,)]
    assert sink.dropped() == 0
    await sink.close()


async def test_decisions_without_a_partition_are_dropped_and_counted() -> None:
    """Their clock is wrong by months; the other decisions of the batch are written."""
    url = running_postgres().new_database()
    sink = Sink(Database(url), now_ns=lambda: NOW_S * 10**9)
    month_us = 31 * DAY_S * 10**6
    sink.offer([event(at_us) for at_us in (NOW_US - month_us, NOW_US, NOW_US + month_us)])
    await sink.finish()
    assert sink.dropped() == 2
    assert await rows(url, "SELECT at_us FROM ratekeeper_decisions") == [(NOW_US,)]
    await sink.close()


async def test_drops_are_counted_once_in_spite_of_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch with drops that fails for another reason is retried, and counts its drops once."""
    url = running_postgres().new_database()
    sink = Sink(Database(url), now_ns=lambda: NOW_S * 10**9)
    sink.offer([event(at_us) for at_us in (0, NOW_US)])
    await sink._prepare()

    async def fail(_: sinks.RecordBatch) -> None:
        raise StoreError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(sink, "_add", fail)
        for _ in range(3):
            with pytest.raises(StoreError):
                await sink.write()
    await sink.finish()
    await sink.close()
    assert (sink.written, sink.dropped()) == (1, 1)


async def test_a_dropped_partition_is_created_again() -> None:
    """No decision and no usage is lost."""
    url = running_postgres().new_database()
    quick = WritePace(write_seconds=0.02, usage_seconds=0.02, batch_seconds=0)
    sink = Sink(Database(url), pace=quick, now_ns=lambda: NOW_S * 10**9)
    sink.offer([event(NOW_US)])
    await sink.finish()
    assert TODAY in sink._days
    async with sink._database.writing_shared() as connection:
        await tables.drop_days(connection, TODAY + timedelta(days=1))
    sink.offer([event(NOW_US)])
    sink.usage.add(("user:1", "orders", NOW_S // 60), [1, 1, 1])
    running = asyncio.create_task(sink.run())
    await until_async(lambda: sink.written == 2, "the second is written")
    sink.stop()
    await running
    await sink.finish()
    await sink.close()
    assert sink.dropped() == 0
    assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(1,)]
    assert [int(each) for each in (await rows(url, SUMS))[0]] == [1, 1, 1, 1]


async def test_a_node_whose_clock_is_ahead_trims_nothing() -> None:
    """The age of a record is measured by the clock of the database."""
    url = running_postgres().new_database()
    right = Sink(Database(url))
    right.offer([event(time.time_ns() // 1_000)])
    right.usage.add(("user:1", "orders", time.time_ns() // (60 * 10**9)), [1, 1, 1])
    await right.finish()
    wrong = Sink(Database(url), now_ns=lambda: time.time_ns() + 200 * DAY_S * 10**9)
    await wrong._trim()
    assert (await rows(url, "SELECT tended_s FROM ratekeeper_record_state"))[0][0] > 0
    assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(1,)]
    assert [int(each) for each in (await rows(url, SUMS))[0]] == [1, 1, 1, 1]
    await right.close()
    await wrong.close()


async def await_failure(sink: Sink) -> None:
    """Wait until one more attempt has failed."""
    failures = sink._failures
    await until_async(lambda: sink._failures > failures, "it fails again")


async def test_a_paused_server_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are kept while they fit; then each is written once."""
    monkeypatch.setattr("ratekeeper.control.database.TRANSACTION_SECONDS_MAX", 0.5)
    monkeypatch.setattr("ratekeeper.control.database.CONNECT_SECONDS_MAX", 0.5)
    monkeypatch.setattr(sinks, "RETRY_SECONDS_MIN", 0.05)
    monkeypatch.setattr(sinks, "RETRY_SECONDS_MAX", 0.2)
    with Postgres() as server:
        url = server.new_database()
        quick = WritePace(write_seconds=0.02, usage_seconds=0.02, batch_seconds=0)
        sink = Sink(Database(url), pace=quick, now_ns=lambda: NOW_S * 10**9)
        running = asyncio.create_task(sink.run())
        sink.offer([event(NOW_US)])
        await until_async(lambda: sink.written == 1, "the first is written")
        server.pause()
        try:
            for _ in range(3):
                sink.offer([event(NOW_US)] * EVENTS_MAX)
                sink.usage.add(("user:1", "orders", NOW_S // 60), [1, 1, 1])
                await await_failure(sink)
            assert len(sink._events) <= EVENTS_MAX
            assert sink.dropped() >= EVENTS_MAX
        finally:
            server.resume()
        monkeypatch.undo()  # on a busy machine, a large batch takes longer than half a second
        kept = 1 + 3 * EVENTS_MAX - sink.dropped()
        await until_async(lambda: sink.written == kept, "every kept record is written")
        sink.stop()
        await running
        await sink.finish()
        await sink.close()
        assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(kept,)]
        assert [int(each) for each in (await rows(url, SUMS))[0]] == [1, 3, 3, 3]


async def test_a_missing_permission_raises() -> None:
    """The error has the server's message."""
    server = running_postgres()
    url = server.new_database()
    name = url.rpartition("/")[2]
    server.run(
        f"CREATE ROLE r_{name} LOGIN PASSWORD 'x'; REVOKE CREATE ON SCHEMA public FROM PUBLIC", name
    )
    other = url.replace(url.partition("://")[2].partition("@")[0], f"r_{name}:x")
    sink = Sink(Database(other), now_ns=lambda: NOW_S * 10**9)
    sink.offer([event(NOW_US)])
    with pytest.raises(StoreError, match="permission denied"):
        await sink.finish()
    await sink.close()
