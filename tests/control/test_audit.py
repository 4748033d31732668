"""The audit, on SQLite and PostgreSQL: every kind of change in one list, filters and pages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from ratekeeper.control.audit import AuditCursor, AuditFilter
from ratekeeper.control.repository import Repository
from ratekeeper.control.schema import entry_audit
from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.document.model import Override
from ratekeeper.rules.entries import assignment, list_entry, override_entry
from tests.integration.rule_databases import repository, url
from tests.integration.rule_documents import document

__all__ = ["repository", "url"]  # fixtures, found by name

pytestmark = pytest.mark.server


async def changed(repository: Repository) -> None:
    """Make a change of each kind; the newest is the rollback."""
    now = datetime.now(UTC)
    until = now + timedelta(hours=2)
    override = Override("user", "42", None, multiply=2.0, until=until, reason="launch", id="big")
    await repository.apply(document(), author="ann", reason="first", expected=0)
    await repository.entries.put(assignment("user:42", "pro"), author="ann", reason="paid")
    await repository.entries.put(override_entry(override, now), author="bob", reason="launch")
    await repository.entries.put(list_entry("deny", "10.0.0.0/8"), author="bob", reason="attack")
    await repository.entries.write([assignment("user:7", "pro")], author="bob", reason="import")
    await repository.apply(document("9/second"), author="ann", reason="less", expected=1)
    add = repository.audit_log.add
    await add("grant", "tenant:acme user:42", '{"units": 5}', author="ops", reason="case 7")
    await repository.rollback(1, author="ops", reason="too strict", expected=2)


KINDS = ["rollback", "grant", "apply", "import", "list", "override", "assign", "apply"]


async def found(repository: Repository, **wanted: Any) -> list[str]:
    """Return the kinds of the changes that match a filter."""
    page = await repository.audit_log.page(AuditFilter(**wanted))
    assert page.next is None
    return [each.kind for each in page.items]


async def test_every_change_is_in_one_list(repository: Repository) -> None:
    """Who, when, what and why, the newest first."""
    start = datetime.now(UTC) - timedelta(minutes=1)
    await changed(repository)
    page = await repository.audit_log.page()
    assert [each.kind for each in page.items] == KINDS
    assert [each.version for each in page.items] == [3, None, 2, None, None, None, None, 1]
    assert all(start < each.created_at < start + timedelta(minutes=10) for each in page.items)
    grant, assign = page.items[1], page.items[6]
    assert (grant.author, grant.reason, grant.key) == ("ops", "case 7", "tenant:acme user:42")
    assert (grant.before, grant.after) == (None, '{"units": 5}')
    assert (assign.author, assign.reason, assign.after) == ("ann", "paid", "pro")
    assert "9/second" in page.items[0].diff
    cut = await repository.audit_log.page(length_max=5)
    assert cut.items[0].diff == page.items[0].diff[:5]
    assert cut.items[1].after == '{"uni'


async def test_filters(repository: Repository) -> None:
    """By author, kind, time, and subject: also the overrides of the subject."""
    await changed(repository)
    assert await found(repository, author="ops") == ["rollback", "grant"]
    assert await found(repository, author="OPS") == []
    assert await found(repository, kind="apply", author="ann") == ["apply", "apply"]
    assert await found(repository, key="user:42") == ["grant", "override", "assign"]
    assert await found(repository, key="USER:42") == []
    assert await found(repository, key="user:4") == []
    assert await found(repository, key="tenant:acme") == ["grant"]
    assert await found(repository, key="big") == ["override"]
    assert await found(repository, key="10.0.0.0/8") == ["list"]
    assert await found(repository, key="orders") == ["rollback", "apply", "apply"]
    assert await found(repository, key="%") == []
    everything = (await repository.audit_log.page()).items
    middle = everything[3].created_at
    assert await found(repository, since=middle) == KINDS[:4]
    assert await found(repository, until=middle) == KINDS[4:]
    assert await found(repository, since=middle, until=middle) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
async def test_pages_have_each_change_once(repository: Repository, limit: int) -> None:
    """A change between two pages does not shift them."""
    await changed(repository)
    kinds: list[str] = []
    cursor: AuditCursor | None = None
    while True:
        page = await repository.audit_log.page(limit=limit, before=cursor)
        kinds += [each.kind for each in page.items]
        await repository.audit_log.add("reset", "user:1", "{}", author="ops")
        if page.next is None:
            break
        cursor = AuditCursor.read(str(page.next))
    assert kinds == KINDS


async def test_a_clock_that_steps_back_hides_no_change(repository: Repository) -> None:
    """Numbers, and not times, separate the pages."""
    await changed(repository)
    past = datetime.now(UTC) - timedelta(days=9)
    row = {"author": "ann", "reason": "", "kind": "reset", "key": "", "count": 1}
    async with repository._database.writing() as connection:
        values = {**row, "seq": 1_000, "created_at": past, "after": "{}"}
        await connection.execute(insert(entry_audit).values(**values))
    kinds: list[str] = []
    cursor: AuditCursor | None = None
    for _ in range(len(KINDS) + 1):
        page = await repository.audit_log.page(limit=1, before=cursor)
        kinds += [each.kind for each in page.items]
        cursor = page.next
    assert cursor is None
    assert sorted(kinds) == sorted([*KINDS, "reset"])


async def test_an_operation_takes_a_number_of_the_feed(repository: Repository) -> None:
    """So a later change of an entry has a higher number, and a follower sees nothing wrong."""
    await changed(repository)
    seq = (await repository.entries.position()).seq
    await repository.audit_log.add("grant", "a\0" + "x" * 5_000, "{}", author="ops")
    assert (await repository.entries.position()).seq == seq + 1
    pages = [page async for page in repository.entries.changes_since(seq)]
    assert [(page.rows, page.seq, page.whole) for page in pages] == [([], seq + 1, False)]
    change = await repository.entries.put(assignment("user:9", "pro"), author="ann")
    assert change.seq == seq + 2


async def test_wrong_arguments_are_rejected(repository: Repository) -> None:
    """The size of a page, a cursor, an author and a reason."""
    for limit in (0, 1_001, True):
        with pytest.raises(ConfigError, match="is not from 1 to 1,000"):
            await repository.audit_log.page(limit=limit)
    for name in ("author", "kind", "key"):
        with pytest.raises(ConfigError, match="NUL"):
            await repository.audit_log.page(AuditFilter(**{name: "a\0"}))
    for text in ("", "1", "1.", "a.b", "99999999999.1", "1.99999999999999999999", "٣.٣"):
        with pytest.raises(ConfigError, match="is not the `next` of a page"):
            AuditCursor.read(text)
    with pytest.raises(ConfigError, match="author="):
        await repository.audit_log.add("grant", "", "{}", author="\n")
    with pytest.raises(ConfigError, match="reason="):
        await repository.audit_log.add("grant", "", "{}", author="ann", reason="\x1b[2J")
    assert (await repository.audit_log.page()).items == []
