"""The repository on SQLite and PostgreSQL: versions, edits, rollback, history, audit, safety."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from ratekeeper.control import edits
from ratekeeper.control.audit import AuditCursor
from ratekeeper.control.repository import Repository, Version
from ratekeeper.core.errors import ConfigError, UnsafeChange, VersionConflict
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.model import Document, LimitsOfOne, Override
from ratekeeper.rules.document.reading import DocumentError, read
from ratekeeper.rules.document.writing import to_yaml
from tests.integration.rule_databases import repository, url
from tests.integration.rule_documents import UNSAFE, assign, document, set_tier

__all__ = ["repository", "url"]  # fixtures, found by name

PRO = (Limit(50, per=1),)
TEN, TWENTY = document("10/second"), document("20/second")


async def with_versions(repository: Repository, count: int) -> list[Version]:
    """Apply this many versions, each with another limit."""
    return [
        await repository.apply(
            document(f"{number}/second"), author="ann", reason=f"no. {number}", expected=number - 1
        )
        for number in range(1, count + 1)
    ]


async def test_an_empty_repository_has_no_version(repository: Repository) -> None:
    """It returns None, 0 and empty lists; an unknown number raises NotFound."""
    assert await repository.current() is None
    assert await repository.number() == 0
    assert await repository.history() == []
    assert (await repository.audit_log.page()).items == []
    with pytest.raises(edits.NotFound, match="there is no version 1; there is none yet"):
        await repository.version(1)


async def test_a_version_is_stored_unchanged(repository: Repository, url: str) -> None:
    """Another repository on the same database returns all its fields."""
    before = datetime.now(UTC)
    applied = await repository.apply(TEN, author="Änn 🦊", reason="line 1\nline 2", expected=None)
    assert applied == Version(
        number=1,
        author="Änn 🦊",
        reason="line 1\nline 2",
        created_at=applied.created_at,
        text=to_yaml(TEN),
        base=None,
        kind="apply",
    )
    assert applied.created_at.utcoffset() == timedelta(0)
    assert abs(applied.created_at - before) < timedelta(minutes=1)
    async with await Repository.open(url) as other:
        assert await other.current() == await other.version(1) == applied
        assert await other.number() == 1
        assert read(applied.text) == TEN


async def test_versions_are_numbered_without_gaps(repository: Repository) -> None:
    """They are 1, 2, 3, each based on the one before; their times are in the same order."""
    applied = await with_versions(repository, 5)
    assert [(each.number, each.base) for each in applied] == [
        *((1, None), (2, 1), (3, 2), (4, 3), (5, 4))
    ]
    times = [each.created_at for each in applied]
    assert times == sorted(times)


@pytest.mark.parametrize("expected", [None, 0, 1, 3])
async def test_a_change_of_an_old_version_is_rejected(
    repository: Repository, expected: int | None
) -> None:
    """The error has both numbers, and nothing changes. None means 0."""
    await with_versions(repository, 2)
    with pytest.raises(VersionConflict) as error:
        await repository.apply(document("7/second"), author="bob", expected=expected)
    assert (error.value.expected, error.value.current) == (expected or 0, 2)
    with pytest.raises(VersionConflict):
        await repository.rollback(1, author="bob", expected=expected)
    assert await repository.number() == 2
    assert len((await repository.audit_log.page()).items) == 2


async def test_a_change_without_effect_adds_no_version(repository: Repository) -> None:
    """The current version is returned, also to a retry after a lost response."""
    first = await repository.apply(TEN, author="ann", expected=0)
    assert await repository.apply(TEN, author="bob", expected=1) == first
    assert await repository.apply(TEN, author="ann", expected=0) == first
    assert await repository.rollback(1, author="bob", expected=1) == first
    await assign(repository, "user:42", "pro", author="ann")
    assert (await assign(repository, "user:42", "pro", author="ann")).number == 2
    assert await repository.number() == 2


async def test_a_rollback_adds_a_version_with_the_old_text(repository: Repository) -> None:
    """The history only grows."""
    versions = await with_versions(repository, 3)
    again = await repository.rollback(1, author="bob", reason="too much", expected=3)
    assert (again.number, again.base, again.kind) == (4, 3, "rollback")
    assert (again.author, again.reason) == ("bob", "too much")
    assert again.text == versions[0].text
    assert await repository.current() == again
    assert await repository.version(3) == versions[2]
    with pytest.raises(ConfigError, match="there is no version 9; there are 1 to 4"):
        await repository.rollback(9, author="bob", expected=4)


async def test_history_and_audit_come_in_pages(repository: Repository) -> None:
    """The newest entries come first; `before` continues where the last page ended."""
    versions = (await with_versions(repository, 5))[::-1]
    assert await repository.history() == versions
    assert await repository.history(limit=2) == versions[:2]
    assert await repository.history(limit=2, before=4) == versions[2:4]
    assert await repository.history(before=1) == []
    assert [
        each.version
        for each in (await repository.audit_log.page(limit=2, before=AuditCursor(4, 1))).items
    ] == [3, 2]


async def test_lists_may_leave_out_texts_and_cut_diffs(repository: Repository) -> None:
    """All other fields are the same."""
    versions = (await with_versions(repository, 3))[::-1]
    brief = await repository.history(texts=False)
    assert brief == [replace(each, text="") for each in versions]
    whole, cut = (
        (await repository.audit_log.page()).items,
        (await repository.audit_log.page(length_max=20)).items,
    )
    assert cut == [replace(each, diff=each.diff[:20]) for each in whole]
    assert len(whole[0].diff) > 20


async def test_the_audit_has_author_reason_and_diff(repository: Repository) -> None:
    """The diff of the first version is its whole text."""
    await repository.apply(TEN, author="ann", reason="first", expected=0)
    second = await repository.apply(TWENTY, author="bob", reason="more", expected=1)
    newest, first = (await repository.audit_log.page()).items
    assert (newest.version, newest.author, newest.reason, newest.kind, newest.forced) == (
        *(2, "bob", "more", "apply", ""),
    )
    assert newest.created_at == second.created_at
    assert newest.diff == await repository.diff(1, 2)
    assert "\n-  limits: [10/second]\n+  limits: [20/second]" in newest.diff
    added = [line[1:] for line in first.diff.splitlines()[3:]]
    assert "\n".join([*added, ""]) == to_yaml(TEN)


async def test_the_diff_of_any_two_versions(repository: Repository) -> None:
    """A diff works in both directions and names both numbers; that of one version is empty."""
    await with_versions(repository, 3)
    assert (await repository.diff(1, 3)).splitlines()[:2] == ["--- version 1", "+++ version 3"]
    assert "+  limits: [1/second]" in await repository.diff(3, 1)
    assert await repository.diff(2, 2) == ""
    with pytest.raises(ConfigError, match="no version 7"):
        await repository.diff(1, 7)


async def test_an_unsafe_change_must_be_forced(repository: Repository) -> None:
    """The error lists the findings; a forced change is applied, and the audit keeps them."""
    await repository.apply(TEN, author="ann", expected=0)
    with pytest.raises(UnsafeChange) as error:
        await repository.apply(UNSAFE, author="ann", expected=1)
    assert [finding.code for finding in error.value.findings] == ["denies-all"]
    assert await repository.number() == 1
    forced = await repository.apply(UNSAFE, author="ann", expected=1, force=True)
    assert forced.number == 2
    assert (await repository.audit_log.page(limit=1)).items[0].forced == str(error.value)


async def test_a_forced_finding_does_not_block_later_edits(repository: Repository) -> None:
    """Only new findings block an edit."""
    await repository.apply(UNSAFE, author="ann", expected=0, force=True)
    await set_tier(repository, "pro", PRO, author="ann")
    assert (await repository.audit_log.page(limit=1)).items[0].forced == ""
    wider = replace(UNSAFE, allow=("user:*",))
    with pytest.raises(UnsafeChange) as error:
        await repository.apply(wider, author="ann", expected=2)
    assert [finding.code for finding in error.value.findings] == ["allows-all"]


async def test_a_rollback_to_an_unsafe_version_needs_no_force(repository: Repository) -> None:
    """It was accepted once, and a rollback is urgent."""
    await repository.apply(UNSAFE, author="ann", expected=0, force=True)
    await repository.apply(TEN, author="ann", expected=1)
    assert (await repository.rollback(1, author="ann", expected=2)).number == 3


async def test_an_invalid_document_is_rejected(repository: Repository) -> None:
    """It would stop every node that reads it."""
    wrong = replace(TEN, assign={"user:42": "gold"})
    with pytest.raises(DocumentError, match="there is no tier"):
        await repository.apply(wrong, author="ann", expected=0)
    with pytest.raises(DocumentError, match="there is no tier"):
        await assign(repository, "user:42", "gold", author="ann")
    assert await repository.number() == 0


async def test_a_document_is_stored_in_canonical_form(repository: Repository) -> None:
    """Reading it and applying it again changes nothing, whatever its time zones and spaces."""
    until = datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    by_hand = Override("user", "7", multiply=2.0, until=until, reason=" two\nlines ")
    version = await repository.apply(replace(TEN, overrides=(by_hand,)), author="a", expected=0)
    kept = read(version.text)
    assert kept.overrides[0].until == until
    assert kept.overrides[0].reason == "two\nlines"
    assert await repository.apply(kept, author="bob", expected=1) == version


COMMENTED = """# Limits of the shop. Ask ann before you change them.
version: 1
rules:
  - id: orders      # the public API
    by: user
    limits: [10/second]
"""


async def test_a_text_is_kept_with_its_comments(repository: Repository) -> None:
    """Its order and style, too; other comments make a new version, another style makes none."""
    document = read(COMMENTED)
    dos = COMMENTED.replace("\n", "\r\n").removesuffix("\r\n")
    first = await repository.apply(document, author="ann", expected=0, text=dos)
    assert first.text == COMMENTED
    current = await repository.current()
    assert current is not None
    assert await repository.document_of(current) == document
    assert await repository.apply(document, author="bob", expected=1, text=COMMENTED) == first
    assert await repository.apply(document, author="bob", expected=1) == first
    other = COMMENTED.replace("Ask ann", "Ask bob")
    second = await repository.apply(document, author="bob", expected=1, text=other)
    assert (second.number, second.text) == (2, other)
    assert "+# Limits of the shop. Ask bob" in await repository.diff(1, 2)


async def test_a_diff_is_that_of_the_rules(repository: Repository) -> None:
    """An edit writes the document anew; the diff and the audit show what it changed alone."""
    await repository.apply(read(COMMENTED), author="ann", expected=0, text=COMMENTED)
    await repository.edit(
        lambda document: edits.set_tier(document, "pro", PRO), kind="set-tier", author="bob"
    )
    diff = await repository.diff(1, 2)
    assert not [line for line in diff.splitlines()[2:] if line.startswith("-")]
    assert "+tiers:" in diff
    assert (await repository.audit_log.page()).items[0].diff == diff
    back = await repository.rollback(1, author="ann", expected=2)
    assert back.text == COMMENTED
    edited = await repository.edit(lambda document: document, kind="put-rule", author="bob")
    assert edited == back


@pytest.mark.parametrize("text", ['{"version": 1, "rules": []}', "version: 1\nrules: [] # x"])
async def test_another_text_than_the_document_is_not_kept(
    repository: Repository, text: str
) -> None:
    """Nor is JSON: the canonical form is stored."""
    version = await repository.apply(TEN, author="ann", expected=0, text=text)
    assert read(version.text) == TEN
    assert version.text != text


async def test_edits_change_the_document(repository: Repository) -> None:
    """Each adds a version of its kind, with its author."""
    await repository.apply(TEN, author="ann", expected=0)
    await assign(repository, "user:42", "pro", author="bob")
    await set_tier(repository, "max", PRO, author="bob")
    current = await repository.current()
    assert current is not None
    assert read(current.text) == replace(
        TEN,
        assign={"user:42": "pro"},
        tiers={**TEN.tiers, "max": LimitsOfOne(PRO)},
    )
    await repository.edit(
        lambda document: edits.unassign(document, "user:42"), kind="unassign", author="bob"
    )
    current = await repository.current()
    assert current is not None
    assert read(current.text) == replace(TEN, tiers={**TEN.tiers, "max": LimitsOfOne(PRO)})
    assert [each.kind for each in await repository.history()] == [
        *("unassign", "set-tier", "assign", "apply"),
    ]


async def test_impossible_edits_raise(repository: Repository) -> None:
    """They add no version."""
    await repository.apply(TEN, author="ann", expected=0)
    with pytest.raises(ConfigError, match="assigned to no tier"):
        await repository.edit(
            lambda document: edits.unassign(document, "user:1"), kind="unassign", author="ann"
        )
    assert await repository.number() == 1


async def test_edit_applies_a_function(repository: Repository) -> None:
    """With `expected`, another current version is a conflict even if nothing changes."""

    def deny(document: Document) -> Document:
        return replace(document, deny=("user:7",))

    first = await repository.edit(deny, kind="list", author="ann", expected=0)
    assert (first.number, first.kind) == (1, "list")
    assert await repository.edit(deny, kind="list", author="ann", expected=1) == first
    assert await repository.edit(deny, kind="list", author="ann") == first
    with pytest.raises(VersionConflict) as error:
        await repository.edit(deny, kind="list", author="ann", expected=0)
    assert (error.value.expected, error.value.current) == (0, 1)


async def test_document_of_parses_any_version(repository: Repository) -> None:
    """It parses an old version and the newest, in any order."""
    for number, limits in enumerate(("1/second", "2/second")):
        await repository.apply(document(limits), author="ann", expected=number)
    for number in (2, 1, 2):
        found = await repository.document_of(await repository.version(number))
        assert found == document(f"{number}/second")


async def test_the_first_version_may_be_an_edit(repository: Repository) -> None:
    """It edits the empty document."""
    version = await set_tier(repository, "pro", PRO, author="ann")
    assert (version.number, version.base) == (1, None)
    assert read(version.text) == Document(tiers={"pro": LimitsOfOne(PRO)})


async def test_a_repository_is_closed_by_its_block(url: str) -> None:
    """`async with` closes every connection."""
    async with await Repository.open(url) as opened:
        await opened.number()
        assert opened._database.engine.pool.checkedin() == 1  # type: ignore[attr-defined]  # it has
    assert opened._database.engine.pool.checkedin() == 0  # type: ignore[attr-defined]  # it has
