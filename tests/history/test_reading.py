"""Queries of the records on SQLite: filters and pages.

`tests/integration/test_records_databases.py` runs more of them, on PostgreSQL, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ratekeeper.control.database import Database
from ratekeeper.history.events import PART, recorded_subject, recorded_value
from ratekeeper.history.reading import DecisionCursor, RecordFilter, Records, all_pages
from tests.history.databases import event, filled

NOW_S = 1_800_000_000
NOW_US = NOW_S * 10**6
ALL = RecordFilter(0, 2 * NOW_US)


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[Records]:
    """Three denials and the usage of two subjects in two hours."""
    url = f"sqlite:///{tmp_path / 'records.db'}"
    events = [event(NOW_US + each, subject=f"user:{each}") for each in range(3)]
    minute = NOW_S // 60
    usage = [
        ("user:1", "orders", minute, [1, 2, 3]),
        ("user:1", "orders", minute + 1, [1, 2, 3]),
        (f"tenant:acme{PART}user:2", "login", minute + 60, [5, 0, 5]),
    ]
    await filled(url, events, usage)
    made = Records(Database(url))
    yield made
    await made.close()


async def test_decisions_come_in_pages_the_newest_first(records: Records) -> None:
    """The next page begins after the last row of the previous one."""
    first = await records.decisions(ALL, 2)
    assert [row.event.subject for row in first] == ["user:2", "user:1"]
    cursor = DecisionCursor(first[-1].event.at_us, first[-1].id)
    rest = await records.decisions(ALL, 2, cursor)
    assert [row.event.subject for row in rest] == ["user:0"]
    one = await records.decisions(RecordFilter(0, 2 * NOW_US, subject="user:1"), 10)
    assert [row.event.at_us for row in one] == [NOW_US + 1]
    assert await records.decisions(RecordFilter(0, 2 * NOW_US, outcome="allowed"), 10) == []


async def test_usage_is_added_up_by_step(records: Records) -> None:
    """Minutes of one hour are one row of it; pages and the whole list have the same rows."""
    rows = await records.usage(ALL, "hour", 10)
    assert [(row.subject, row.allowed, row.denied, row.units) for row in rows] == [
        ("user:1", 2, 4, 6),
        (f"tenant:acme{PART}user:2", 5, 0, 5),
    ]
    assert len(await records.usage(ALL, "minute", 10)) == 3
    assert await records.usage(ALL, "hour", 10, rows[0]) == rows[1:]
    assert [row async for piece in records.all_usage(ALL, "hour") for row in piece] == rows


async def test_a_scope_matches_whole_parts(records: Records) -> None:
    """`user:2` is a part of the second subject, `user:` is not."""
    for scope, count in (({"user": "2"}, 1), ({"user": ""}, 0), ({"tenant": "acme"}, 1), ({}, 2)):
        wanted = RecordFilter(0, 2 * NOW_US, scope=scope)
        assert len(await records.usage(wanted, "hour", 10)) == count


async def test_a_whole_list_is_queried_in_pages() -> None:
    """Each page begins after the last row of the previous one, and is returned in pieces."""
    asked: list[int | None] = []

    async def page_of(last: int | None) -> list[int]:
        asked.append(last)
        start = 0 if last is None else last + 1
        return list(range(start, min(start + 1_000, 2_300)))

    pieces = [piece async for piece in all_pages(page_of, 1_000)]
    assert asked == [None, 999, 1_999]
    assert [len(piece) for piece in pieces] == [500, 500, 500, 500, 300]
    assert [each for piece in pieces for each in piece] == list(range(2_300))


async def test_decisions_are_counted_in_groups(records: Records) -> None:
    """The subject with the last name comes last, because all have one denial."""
    found = await records.groups(ALL, "subject", 2)
    assert [(row.name, row.requests, row.total, row.names) for row in found] == [
        *(("user:0", 1, 3, 3), ("user:1", 1, 3, 3)),
    ]
    assert [row.name for row in await records.groups(ALL, "subject", 2, found[-1])] == ["user:2"]
    assert await records.timeline(ALL, 3_600) == [(NOW_US, 3)]


async def test_a_digest_is_found_by_itself_and_by_its_value(tmp_path: Path) -> None:
    """A reader of hashed records has no other name for a subject."""
    url = f"sqlite:///{tmp_path / 'hashed.db'}"
    subject = recorded_subject(f"tenant:acme{PART}user:7", "hashed")
    user = recorded_value("7", "hashed")
    usage = [(subject, "orders", NOW_S // 60, [1, 2, 3])]
    await filled(url, [event(NOW_US, subject=subject, user_id=user)], usage)
    records = Records(Database(url), "hashed")
    for asked in (subject, f"tenant:acme{PART}user:7", f"tenant:acme{PART}user:{user}"):
        assert len(await records.usage(replace(ALL, subject=asked), "hour", 9)) == 1
        assert len(await records.decisions(replace(ALL, subject=asked), 9)) == 1
    for name, count in ((user, 1), ("7", 1), ("8", 0), ("#7", 0)):
        assert len(await records.decisions(replace(ALL, user=name), 9)) == count
    # A scope is a value, and never a digest.
    assert await records.decisions(replace(ALL, scope={"user": user}), 9) == []
    await records.close()
