"""Search over subjects: every source, pages without gaps, and a bounded number of rows."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text

from ratekeeper.control.database import Database
from ratekeeper.control.entries import _OWNERS_SQL
from ratekeeper.control.repository import Repository
from ratekeeper.core.subjects import beyond
from ratekeeper.history.events import recorded_subject
from ratekeeper.history.reading import Records
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.sink import Sink
from ratekeeper.rules import entries
from ratekeeper.rules.document.reading import read
from tests.postgres_server import running_postgres
from tests.service.admin.client import Admin, admin, admin_of, filled, from_file, template

__all__ = ["admin", "from_file", "template"]  # fixtures, found by name

NOW_S = 1_800_000_000


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
async def known(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Admin]:
    """Yield an admin API with rules and records in one database of each kind."""
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    if request.param == "postgresql":
        url = running_postgres().new_database()
    await filled(url)
    async with admin_of(tmp_path, read("version: 1"), url) as found:
        found.context.recorder = Recorder(
            lambda row_of: Sink(Database(url), row_of=row_of), Records(Database(url))
        )
        await record(found)  # which creates the tables
        yield found
        await found.context.recorder.records.close()


async def record(admin: Admin, *subjects: str) -> None:
    """Record usage of subjects, in several minutes and under two rules."""
    sink = Sink(Database(admin.context.database or ""))
    for subject in subjects:
        for minute in range(3):
            for rule in ("orders", "login"):
                sink.usage.add((subject, rule, NOW_S // 60 + minute), [1, 0, 1])
    await sink.finish()
    await sink.close()


async def found(admin: Admin, q: str = "", limit: int = 200) -> list[str]:
    """Return all subjects of a search, page by page."""
    subjects: list[str] = []
    after = ""
    while True:
        params = {"q": q, "limit": limit, "after": after}
        page = (await admin.call("GET", "/subjects", params=params)).json()
        subjects += ["+".join(each["subject"]) for each in page["items"]]
        after = page["next"]
        if after is None:
            return subjects


async def test_every_source_is_found(known: Admin) -> None:
    """Assignments, overrides, lists and usage, of the database and of the document."""
    await known.call("PUT", "/assignments/user:421", json={"tier": "free"})
    override = {
        "for": {"tenant": "42-b"},
        "rule": "orders",
        "multiply": 2,
        "until": "2h",
        "reason": "x",
    }
    await known.call("POST", "/overrides", json=override)
    await known.call("POST", "/overrides", json={**override, "for": {"user": "421"}})
    for entry in ("ip:42.0.0.1", "user:42nd", "user:42*", "42.0.0.0/8", "api_key:420"):
        await known.call("POST", "/lists/deny", json={"entry": entry})
    await record(known, "user:42", "user:42\x1fendpoint:/orders", "region:42", "*", "(others)")
    assert await found(known, "42") == [
        *("api_key:420", "ip:42.0.0.1", "tenant:42-b", "user:42"),
        *("user:42+endpoint:/orders", "user:421", "user:42nd"),
    ]
    assert await found(known, "user:421") == ["user:421"]
    assert await found(known, "region:4") == ["region:42"]
    assert await found(known, "USER:42") == []
    page = (await known.call("GET", "/subjects?q=user:421")).json()
    assert page["items"] == [
        {"subject": ["user:421"], "tier": "free", "overrides": 1, "lists": [], "recorded": False}
    ]
    page = (await known.call("GET", "/subjects?q=user:42nd")).json()
    assert page["items"][0]["lists"] == ["deny"]


async def test_pages_have_no_gaps(known: Admin) -> None:
    """In any size, sources that overlap and hostile names included: the same list."""
    names = ["a", "a b", 'a"b', "a\\b", "a\tb", "ž", "a🦊", "A", "a!", "a" * 300, "a%", "a_"]
    for at, name in enumerate(names):
        if at % 3 != 1 and name.isprintable():
            await known.call("PUT", f"/assignments/user:{name.replace('%', '%25')}", json=TIER)
        if at % 3 != 0:
            body = {"for": {"user": name}, "multiply": 2, "until": "2h", "reason": "x"}
            for _ in range(2):
                await known.call("POST", "/overrides", json=body)
    await record(known, *(f"user:{name}" for name in names[::2]))
    everything = await found(known)
    assert everything == sorted(set(everything))
    assert {f"user:{name}" for name in names} <= set(everything)
    for limit in (1, 2, 5):
        assert await found(known, limit=limit) == everything
    assert await found(known, "user:a", 2) == [
        each for each in everything if each.startswith("user:a")
    ]


TIER = {"tier": "pro"}


async def test_removed_entries_are_not_found(known: Admin) -> None:
    """Nor is an override that has ended."""
    await known.call("PUT", "/assignments/user:gone", json=TIER)
    await known.call("DELETE", "/assignments/user:gone")
    async with await Repository.open(known.context.database or "") as repository:
        body = {"for": {"user": "ended"}, "multiply": 2, "until": "1s", "reason": "x"}
        past = datetime(2020, 1, 1, tzinfo=UTC)
        ended = entries.override_entry(entries.parse_override(body, None, past), past)
        await repository.entries.put(ended, author="ann")
    assert await found(known, "user:gone") == await found(known, "user:ended") == []


async def test_a_search_without_a_database_or_records(from_file: Admin) -> None:
    """It finds what the document names; the next page has a link."""
    assert await found(from_file, "4") == ["user:42"]
    assert await found(from_file, limit=1) == ["tenant:acme", "user:42", "user:7"]
    answer = await from_file.call("GET", "/subjects?limit=1")
    assert answer.headers["link"] == (
        '</v1/admin/subjects?limit=1&after=tenant%3Aacme>; rel="next"'
    )
    await from_file.rejected("GET", f"/subjects?q={'x' * 601}", 400)


async def test_digests_are_found_by_the_whole_subject(known: Admin) -> None:
    """If records have no plain subjects, a beginning finds none."""
    url = known.context.database or ""
    await record(known, "user:#0dc7a2c4c1ed1a5e8b5a4a92")
    for mode in ("hashed", "none"):
        records = Records(Database(url), mode)  # type: ignore[arg-type]  # both are modes
        assert await records.subjects("user:7", "", 10) == []
        await records.close()
    hashed = Records(Database(url), "hashed")
    await record(known, recorded_subject("user:7", "hashed"))
    assert await hashed.subjects("user:7", "", 10) == ["user:7"]
    assert await hashed.subjects("user:7", "user:7", 10) == []
    assert await hashed.subjects("user:", "", 10) == []
    await hashed.close()


async def test_overrides_and_list_entries_of_one_subject(admin: Admin) -> None:
    """The lists of overrides and entries can be asked for one subject."""
    body = {"for": {"user": "42"}, "multiply": 3, "until": "2h", "reason": "x"}
    await admin.call("POST", "/overrides", json=body)
    await admin.call("POST", "/overrides", json={**body, "for": {"user": "421"}})
    items = (await admin.call("GET", "/overrides?subject=user:42")).json()["items"]
    assert [(each["for"], each["multiply"]) for each in items] == [({"user": "42"}, 3)]
    items = (await admin.call("GET", "/overrides?subject=user:7")).json()["items"]
    assert [each["multiply"] for each in items] == [2]  # of the document
    await admin.call("POST", "/lists/deny", json={"entry": "192.0.2.7"})
    for entry, known in (("ip:192.0.2.7", 1), ("192.0.2.8", 0)):
        page = (await admin.call("GET", "/lists/deny", params={"entry": entry})).json()
        assert page["total"] == known
    page = (await admin.call("GET", "/lists/allow", params={"entry": "10.0.0.0/8"})).json()
    assert page["items"] == ["ip:10.0.0.0/8"]


@given(st.text(max_size=5), st.text(max_size=5))
def test_the_end_of_a_beginning(begin: str, rest: str) -> None:
    """All texts with the beginning are before it, and no other text from the beginning on."""
    end = beyond(begin)
    if end is not None:
        assert begin <= begin + rest < end
        if begin <= rest < end:
            assert rest.startswith(begin)


@pytest.mark.server
async def test_postgresql_searches_its_indexes(tmp_path: Path) -> None:
    """In the order of code points, whatever the collation of the database."""
    url = running_postgres().new_database()
    await filled(url)
    database = Database(url)
    sink = Sink(database)
    await sink.finish()
    async with database.writing() as connection:
        await connection.execute(text("SET LOCAL enable_seqscan = off"))
        for query, index in (
            (_SUBJECTS_OF.format(subject='key COLLATE "C"', kind="deny"), "entries_subject"),
            (_SUBJECTS_OF.format(subject=_OWNERS_SQL[True], kind="override"), "entries_owner"),
            (_USED, "usage_subject"),
        ):
            found = await connection.execute(text(f"EXPLAIN {query}"))
            plan = " ".join(str(row[0]) for row in found)
            assert f"using ratekeeper_{index}" in plan, plan
            assert "Sort" not in plan
    await sink.close()


_SUBJECTS_OF = (
    "SELECT key FROM ratekeeper_entries WHERE kind = '{kind}' AND NOT removed "
    "AND {subject} > 'user:1' AND {subject} < 'user:2' ORDER BY {subject} LIMIT 10"
)
_USED = (
    "SELECT subject FROM ratekeeper_usage WHERE subject COLLATE \"C\" > 'user:1' "
    'ORDER BY subject COLLATE "C" LIMIT 1'
)


# ── A million subjects ───────────────────────────────────────────────────────────────────────────

_SUBJECT_TABLES = re.compile(r"ratekeeper_(entries|usage)\s")
_MILLION = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 999999) "
_FILL = (
    "INSERT INTO ratekeeper_entries (kind, key, data, seq, removed) "
    + _MILLION
    + "SELECT 'assignment', printf('user:%07d', i), 'pro', i + 10, 0 FROM n",
    "INSERT INTO ratekeeper_entries (kind, key, data, seq, removed) "
    + _MILLION
    + "SELECT 'override', printf('ov_%07d', i), "
    """printf('{"for":{"user":"%07d"},"multiply":2}', i), i + 2000000, 0 FROM n WHERE i % 10 = 0""",
    "INSERT INTO ratekeeper_usage (subject, rule, step_s, start_s, allowed, denied, units) "
    + _MILLION
    + "SELECT printf('user:%07d', i), 'orders', 60, 0, 1, 0, 1 FROM n WHERE i % 10 = 0",
)


async def test_a_page_of_a_million_subjects_reads_few_rows(tmp_path: Path, template: Path) -> None:
    """Every query of a page searches an index, and no query sorts or scans a table."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    url = f"sqlite:///{path}"
    sink = Sink(Database(url))
    await sink.finish()
    await sink.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("PRAGMA synchronous = OFF")
        for statement in _FILL:
            file.execute(statement)
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _k: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    async with admin_of(tmp_path, read("version: 1"), url) as admin:
        records = Records(database := Database(url))
        admin.context.recorder = Recorder(
            lambda row_of: Sink(Database(url), row_of=row_of), records
        )
        repository = await admin.app.state.control.repository()
        for engine in (database.engine, repository.entries._database.engine):
            event.listen(engine.sync_engine, "before_cursor_execute", note)
        page = (await admin.call("GET", "/subjects?q=user:0499&limit=10")).json()
        assert page["items"][0]["subject"] == ["user:0499000"]
        assert (page["items"][0]["overrides"], page["items"][0]["recorded"]) == (1, True)
        assert page["next"] == "user:0499009"
        params = {"q": "user:0499", "after": "user:0499997", "limit": 10}
        page = (await admin.call("GET", "/subjects", params=params)).json()
        assert [each["subject"][0] for each in page["items"]] == ["user:0499998", "user:0499999"]
        await records.close()
    searches = [each for each in statements if _SUBJECT_TABLES.search(each[0])]
    assert len(searches) >= 10
    with closing(sqlite3.connect(path)) as file:
        for statement, parameters in searches:
            plan = [row[3] for row in file.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            reads = [each for each in plan if "ratekeeper_" in each]
            assert reads
            assert all(each.startswith("SEARCH ") and "INDEX" in each for each in reads), plan
            assert not any("TEMP B-TREE" in each for each in plan), plan
            steps = _Steps()
            file.set_progress_handler(steps.count, 100)
            file.execute(statement, parameters).fetchall()
            file.set_progress_handler(None, 100)
            # Of SQLite's virtual machine: a row takes about 30.
            assert steps.counted < 5_000, (steps.counted, statement, parameters)


class _Steps:
    """Counts the steps of SQLite's virtual machine."""

    counted = 0

    def count(self) -> int:
        self.counted += 100
        return 0
