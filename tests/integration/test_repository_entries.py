"""Entries as rows, on SQLite and PostgreSQL: changes, the feed, imports and the audit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ratekeeper.control import entries as module
from ratekeeper.control.audit import AuditedChange
from ratekeeper.control.edits import NotFound
from ratekeeper.control.entries import DuplicateId, FeedPage, InvalidEntry
from ratekeeper.control.repository import Repository
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.model import Override
from ratekeeper.rules.document.reading import DocumentError, read
from ratekeeper.rules.entries import (
    Entry,
    EntryRow,
    assignment,
    list_entry,
    override_entry,
    override_of,
)
from tests.integration.rule_databases import repository, url
from tests.integration.rule_documents import document

__all__ = ["repository", "url"]  # fixtures, found by name

ANN = {"author": "ann", "reason": "paid"}


def override(
    name: str = "launch", *, hours: float = 2, rule: str | None = None, value: str = "acme"
) -> Entry:
    now = datetime.now(UTC)
    until = now + timedelta(hours=hours)
    made = Override("user", value, rule, multiply=2.0, until=until, reason="launch", id=name)
    return override_entry(made, now)


async def ready(repository: Repository) -> Repository:
    await repository.apply(document(), author="ann", expected=0)
    return repository


async def audited(repository: Repository) -> list[AuditedChange]:
    """Return the changes that made no version, the newest first."""
    found = (await repository.audit_log.page()).items
    return [change for change in found if change.version is None]


async def feed(repository: Repository, seq: int = 0) -> list[FeedPage]:
    pages = repository.entries.changes_since(seq)
    return [page._replace(rows=[EntryRow(*row) for row in page.rows]) async for page in pages]


async def test_a_change_is_one_row_one_audit_row_and_no_version(repository: Repository) -> None:
    """The document stays as it is, and the audit says who, when, what and why."""
    entries = (await ready(repository)).entries
    await entries.put(assignment("user:42", "free"), **ANN)
    change = await entries.put(assignment("user:42", "pro"), **ANN)
    assert (change.seq, change.kind, change.key) == (2, "assign", "user:42")
    assert (change.before, change.after, change.count) == ("free", "pro", 1)
    assert abs(datetime.now(UTC) - change.created_at) < timedelta(minutes=1)
    removed = await entries.remove("assignment", "user:42", author="bob", reason="cancelled")
    assert (removed.kind, removed.before, removed.after) == ("unassign", "pro", None)
    audit = await audited(repository)
    assert [each.change for each in audit] == [3, 2, 1]
    assert (audit[1].author, audit[1].reason) == ("ann", "paid")
    assert (audit[1].key, audit[1].before, audit[1].after) == ("user:42", "free", "pro")
    assert await repository.number() == 1
    assert await entries.get("assignment", "user:42") is None
    with pytest.raises(NotFound, match="is assigned to no tier"):
        await entries.remove("assignment", "user:42", **ANN)


async def test_the_feed_has_each_entry_once_in_order(repository: Repository) -> None:
    """Changes since a number, or all entries for a reader that knows nothing."""
    entries = (await ready(repository)).entries
    await entries.put(assignment("user:1", "free"), **ANN)
    await entries.put(list_entry("deny", "10.0.0.0/8"), **ANN)
    await entries.put(assignment("user:1", "pro"), **ANN)
    [page] = await feed(repository, 1)
    assert page.rows == [
        EntryRow("deny", "ip:10.0.0.0/8", "10.0.0.0/8", 2, False),
        EntryRow("assignment", "user:1", "pro", 3, False),
    ]
    assert (page.seq, page.whole) == (3, False)
    assert await feed(repository, 3) == []
    await entries.remove("deny", "ip:10.0.0.0/8", **ANN)
    [page] = await feed(repository, 3)
    assert page.rows == [EntryRow("deny", "ip:10.0.0.0/8", "10.0.0.0/8", 4, True)]
    [page] = await feed(repository)
    assert ([row.key for row in page.rows], page.seq, page.whole) == (["user:1"], 4, True)
    # A restored database has not reached this number.
    assert [page.whole for page in await feed(repository, 99)] == [True]


async def test_overrides_have_unique_ids(repository: Repository) -> None:
    """Also among those of the document; an id is free again after its override has ended."""
    entries = (await ready(repository)).entries
    await entries.put(override(), **ANN)
    with pytest.raises(DuplicateId, match="there is an override 'launch' already"):
        await entries.put(override(), **ANN)
    with pytest.raises(InvalidEntry, match="there is an override 'launch' already") as error:
        await entries.write([assignment("user:1", "pro"), override(hours=3)], **ANN)
    assert error.value.position == 1
    assert await entries.get("assignment", "user:1") is None
    await entries.write([override(hours=3)], **ANN, replace=True)
    await entries.remove("override", "launch", **ANN)
    await entries.put(override(), **ANN)
    in_document = document(more="overrides: [{id: old, for: {user: '1'}, multiply: 2}]")
    await repository.apply(in_document, author="ann", expected=1)
    with pytest.raises(DuplicateId):
        await entries.put(override("old"), **ANN)


async def test_a_removal_during_a_whole_read_is_not_missed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of the first page is removed, and another is added, before the last page."""
    entries = (await ready(repository)).entries
    monkeypatch.setattr(module, "PAGE_ROWS", 2)
    for number in range(3):
        await entries.put(assignment(f"user:{number}", "pro"), **ANN)
    known: set[str] = set()
    seq = 0
    async for page in entries.changes_since(0):
        known |= {row[1] for row in page.rows}
        if not seq:
            await entries.remove("assignment", "user:0", **ANN)
            await entries.put(assignment("user:9", "pro"), **ANN)
        seq = page.seq
    assert known >= {"user:0", "user:9"}
    later = [row for page in await feed(repository, seq) for row in page.rows]
    assert "user:0" in {row.key for row in later if row.removed}


async def test_overrides_of_names_that_differ_in_case_are_apart(repository: Repository) -> None:
    """SQLite's LIKE ignores the case."""
    entries = (await ready(repository)).entries
    await entries.put(override("one", value="Bob"), **ANN)
    await entries.put(override("two", value="bob"), **ANN)
    assert [each.key for each in await entries.overrides_of("user", "Bob")] == ["one"]


async def test_overrides_are_found_by_their_subject(repository: Repository) -> None:
    """The value may contain characters that mean something in SQL."""
    entries = (await ready(repository)).entries
    for name, value in (("a", "50%"), ("b", "50x"), ("c", '"50%"')):
        await entries.put(override(name, value=value), **ANN)
    await entries.put(override("d", value="50%", rule="orders"), **ANN)
    assert [each.key for each in await entries.overrides_of("user", "50%")] == ["a"]
    assert [each.key for each in await entries.overrides_of("user", "50%", "orders")] == ["d"]
    assert await entries.overrides_of("tenant", "50%") == []


async def test_tiers_and_rules_must_exist(repository: Repository) -> None:
    """The error names those that do."""
    entries = (await ready(repository)).entries
    with pytest.raises(DocumentError, match='there is no tier "pr" in this document'):
        await entries.put(assignment("user:1", "pr"), **ANN)
    with pytest.raises(DocumentError, match='there is no rule "order" in this document'):
        await entries.put(override(rule="order"), **ANN)
    with pytest.raises(InvalidEntry, match="there is no tier") as error:
        await entries.write([assignment("user:1", "pro"), assignment("user:2", "x")], **ANN)
    assert error.value.position == 1
    with pytest.raises(InvalidEntry, match="assignment 'user:1' is given twice"):
        await entries.write([assignment("user:1", "pro"), assignment("user:1", "pro")], **ANN)
    assert (await entries.position()).seq == 0


async def test_an_import_is_one_change(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, with progress; entries that exist already are left alone."""
    monkeypatch.setattr(module, "PAGE_ROWS", 40)
    monkeypatch.setattr(module, "BATCH_ROWS", 40)
    entries = (await ready(repository)).entries
    many = [assignment(f"user:{number}", "pro") for number in range(100)]
    done: list[int] = []
    change = await entries.write(many, **ANN, progress=done.append)
    assert (change.kind, change.count, change.seq, done) == ("import", 100, 100, [40, 80, 100])
    pages = await feed(repository)
    assert [(len(page.rows), page.seq) for page in pages] == [(40, 40), (40, 80), (20, 100)]
    again = await entries.write([*many[:7], assignment("user:7", "free"), *many[8:]], **ANN)
    assert again.count == 1
    page = (await feed(repository, 100))[-1]
    assert [(row.key, row.data) for row in page.rows] == [("user:7", "free")]
    assert len(await audited(repository)) == 2
    streamed = [entry async for batch in entries.stream({"assignment"}) for entry in batch]
    assert len(streamed) == 100
    assert streamed == sorted(streamed)
    found, total = await entries.page("assignment", limit=2, offset=1, data="pro")
    assert ([each.key for each in found], total) == (["user:1", "user:10"], 99)


async def test_a_failed_import_changes_nothing(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it fails: here between two batches."""
    monkeypatch.setattr(module, "PAGE_ROWS", 40)
    monkeypatch.setattr(module, "BATCH_ROWS", 40)
    entries = (await ready(repository)).entries

    def fail(done: int) -> None:
        if done == 80:
            raise RuntimeError("killed")

    many = [assignment(f"user:{number}", "pro") for number in range(100)]
    with pytest.raises(RuntimeError, match="killed"):
        await entries.write(many, **ANN, progress=fail)
    assert await feed(repository) == []
    assert await entries.page("assignment") == ([], 0)
    assert await audited(repository) == []


async def test_an_import_has_the_safety_rules_of_a_single_entry(repository: Repository) -> None:
    """Each unsafe entry is a problem at its position."""
    entries = (await ready(repository)).entries
    unsafe = [
        list_entry("deny", "user:*"),
        assignment("user:1", "pro"),
        list_entry("allow", "ip:0.0.0.0/0"),
        list_entry("deny", "192.0.2.0/24"),
        list_entry("deny", "api_key:sk_*"),
    ]
    found = await entries.problems(unsafe, 10)
    assert [at for at, _ in found] == [0, 2]
    assert "every request with user is denied" in found[0][1]
    with pytest.raises(InvalidEntry, match="every IPv4 address is never limited"):
        await entries.write(unsafe[1:3], **ANN)
    assert (await entries.position()).seq == 0
    assert (await entries.write([*unsafe[1:2], *unsafe[3:]], **ANN)).count == 3


async def test_an_import_rejects_overrides_that_no_request_fits(repository: Repository) -> None:
    """Those with equal terms are found, too."""
    rules = read("{version: 1, rules: [{id: all, by: user, cost: 5, limits: 10/s}]}")
    await repository.apply(rules, author="ann", expected=0)
    now = datetime.now(UTC)
    few, many = (Limit(1, per=1),), (Limit(9, per=1),)
    overrides = [
        override_entry(
            Override("user", str(at), limits=by, until=now + timedelta(hours=1), reason="x"), now
        )
        for at, by in enumerate([few, many, few])
    ]
    found = await repository.entries.problems(overrides, 10)
    assert [at for at, _ in found] == [0, 2]
    assert "so every request is denied" in found[1][1]


async def test_a_list_has_at_most_1000_irregular_globs(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes could not use more, so neither a change nor an import adds them."""
    monkeypatch.setattr(module, "IRREGULAR_GLOBS_MAX", 3)
    entries = (await ready(repository)).entries
    globs = [list_entry("deny", f"api_key:sk_*_{number}") for number in range(4)]
    with pytest.raises(InvalidEntry, match="more than 3 globs") as error:
        await entries.write([assignment("user:1", "pro"), *globs], **ANN)
    assert error.value.position == 4
    await entries.write([*globs[:3], list_entry("deny", "api_key:sk_*")], **ANN)
    with pytest.raises(InvalidEntry, match="more than 3 globs"):
        await entries.put(globs[3], **ANN)
    await entries.put(globs[2], **ANN)
    await entries.put(list_entry("allow", "api_key:sk_*_9"), **ANN)
    await entries.remove("deny", "api_key:sk_*_0", **ANN)
    await entries.put(globs[3], **ANN)


async def test_removed_and_expired_entries_are_deleted_later(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that was away for longer reads all entries again."""
    entries = (await ready(repository)).entries
    await entries.put(assignment("user:1", "pro"), **ANN)
    await entries.put(override(), **ANN)
    await entries.remove("assignment", "user:1", **ANN)
    later = datetime.now(UTC) + timedelta(hours=3)
    monkeypatch.setattr(module, "_now", lambda: later)
    assert await entries.get("override", "launch") is None
    assert await entries.page("override") == ([], 0)
    await entries.put(replace_id(override(hours=9)), **ANN)
    assert (await entries.position()).horizon == 0
    monkeypatch.setattr(module, "_now", lambda: later + module.RETENTION)
    await entries.put(assignment("user:2", "pro"), **ANN)
    assert await entries.position() == (5, 3)
    assert [page.whole for page in await feed(repository, 2)] == [True]
    [page] = await feed(repository, 3)
    assert ([row.key for row in page.rows], page.whole) == (["launch-2", "user:2"], False)
    [page] = await feed(repository)
    assert [row.key for row in page.rows] == ["launch-2", "user:2"]


def replace_id(entry: Entry) -> Entry:
    return override_entry(replace(override_of(entry), id="launch-2"), datetime.now(UTC))


async def test_concurrent_writers_get_numbers_in_order(url: str) -> None:
    """Of the same entry, too: the audit has every change, and the last one is in force."""
    opened = await asyncio.gather(*(Repository.open(url) for _ in range(4)))
    await ready(opened[0])
    tiers = ["free", "pro"]
    changes = await asyncio.gather(
        *(
            opened[at % 4].entries.put(assignment("user:1", tiers[at % 2]), **ANN)
            for at in range(12)
        )
    )
    assert sorted(change.seq for change in changes) == list(range(1, 13))
    newest = max(changes, key=lambda change: change.seq)
    [page] = await feed(opened[0])
    assert page.rows == [EntryRow("assignment", "user:1", newest.after or "", 12, False)]
    audit = (await audited(opened[0]))[::-1]
    assert [each.before for each in audit] == [None, *(each.after for each in audit[:-1])]
    await asyncio.gather(*(each.close() for each in opened))


async def test_a_rollback_leaves_the_entries(repository: Repository) -> None:
    """Assignments and list entries made since are still in force."""
    entries = (await ready(repository)).entries
    await repository.apply(document("20/second"), author="ann", expected=1)
    await entries.put(assignment("user:1", "pro"), **ANN)
    await repository.rollback(1, author="ann", expected=2)
    assert await entries.get("assignment", "user:1") == assignment("user:1", "pro")
