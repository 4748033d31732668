"""The repository on SQLite and PostgreSQL: versions, edits, rollback, history, audit, safety."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tests.integration.rule_databases import UNSAFE, document, repository, url
from tollkeeper.control import edits
from tollkeeper.control.repository import Repository, Version
from tollkeeper.core.errors import ConfigError, UnsafeChange, VersionConflict
from tollkeeper.core.model import Limit
from tollkeeper.rules.document.model import Document, Override
from tollkeeper.rules.document.reading import DocumentError, read
from tollkeeper.rules.document.writing import to_yaml

__all__ = ["repository", "url"]  # fixtures, found by name

PRO = (Limit(50, per=1),)
TEN, TWENTY = document("10/second"), document("20/second")


async def filled(repository: Repository, count: int) -> list[Version]:
    """So many versions, each with another limit."""
    return [
        await repository.apply(
            document(f"{number}/second"), author="ann", reason=f"no. {number}", expected=number - 1
        )
        for number in range(1, count + 1)
    ]


async def test_an_empty_repository_has_no_version(repository: Repository) -> None:
    """None, 0 and empty lists; a number that was never given is missing."""
    assert await repository.current() is None
    assert await repository.number() == 0
    assert await repository.history() == []
    assert await repository.audit() == []
    with pytest.raises(edits.NotFound, match="there is no version 1; there is none yet"):
        await repository.version(1)


async def test_a_version_is_kept_as_it_was_applied(repository: Repository, url: str) -> None:
    """All fields come back, also through another repository on the same database."""
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
    """1, 2, 3, each a change of the one before; times follow the numbers."""
    applied = await filled(repository, 5)
    assert [(each.number, each.base) for each in applied] == [
        *((1, None), (2, 1), (3, 2), (4, 3), (5, 4))
    ]
    times = [each.created_at for each in applied]
    assert times == sorted(times)


@pytest.mark.parametrize("expected", [None, 0, 1, 3])
async def test_a_change_of_another_version_is_refused(
    repository: Repository, expected: int | None
) -> None:
    """Both numbers are in the error, and nothing has changed. None is 0: no version seen."""
    await filled(repository, 2)
    with pytest.raises(VersionConflict) as error:
        await repository.apply(document("7/second"), author="bob", expected=expected)
    assert (error.value.expected, error.value.current) == (expected or 0, 2)
    with pytest.raises(VersionConflict):
        await repository.rollback(1, author="bob", expected=expected)
    assert await repository.number() == 2
    assert len(await repository.audit()) == 2


async def test_what_changes_nothing_makes_no_version(repository: Repository) -> None:
    """The current one is returned, also to one who tries again after a lost answer."""
    first = await repository.apply(TEN, author="ann", expected=0)
    assert await repository.apply(TEN, author="bob", expected=1) == first
    assert await repository.apply(TEN, author="ann", expected=0) == first
    assert await repository.rollback(1, author="bob", expected=1) == first
    await repository.assign("user:42", "pro", author="ann")
    assert (await repository.assign("user:42", "pro", author="ann")).number == 2
    assert await repository.number() == 2


async def test_rolling_back_makes_a_new_version_like_the_old_one(repository: Repository) -> None:
    """History only grows: the number is new, the text is old."""
    versions = await filled(repository, 3)
    again = await repository.rollback(1, author="bob", reason="too much", expected=3)
    assert (again.number, again.base, again.kind) == (4, 3, "rollback")
    assert (again.author, again.reason) == ("bob", "too much")
    assert again.text == versions[0].text
    assert await repository.current() == again
    assert await repository.version(3) == versions[2]
    with pytest.raises(ConfigError, match="there is no version 9; there are 1 to 4"):
        await repository.rollback(9, author="bob", expected=4)


async def test_history_and_audit_come_in_pages(repository: Repository) -> None:
    """The newest first; `before` goes on where the last page ended."""
    versions = (await filled(repository, 5))[::-1]
    assert await repository.history() == versions
    assert await repository.history(limit=2) == versions[:2]
    assert await repository.history(limit=2, before=4) == versions[2:4]
    assert await repository.history(before=1) == []
    assert [each.version for each in await repository.audit(limit=2, before=4)] == [3, 2]


async def test_lists_of_large_documents_may_leave_the_texts_out(repository: Repository) -> None:
    """All else is the same; a difference is cut where it is asked to be."""
    versions = (await filled(repository, 3))[::-1]
    brief = await repository.history(texts=False)
    assert brief == [replace(each, text="") for each in versions]
    whole, cut = await repository.audit(), await repository.audit(diff_length_max=20)
    assert cut == [replace(each, diff=each.diff[:20]) for each in whole]
    assert len(whole[0].diff) > 20


async def test_the_audit_says_who_changed_what_and_why(repository: Repository) -> None:
    """With the diff; of the first version it is the whole text."""
    await repository.apply(TEN, author="ann", reason="first", expected=0)
    second = await repository.apply(TWENTY, author="bob", reason="more", expected=1)
    newest, first = await repository.audit()
    assert (newest.version, newest.author, newest.reason, newest.kind, newest.forced) == (
        *(2, "bob", "more", "apply", ""),
    )
    assert newest.created_at == second.created_at
    assert newest.diff == await repository.diff(1, 2)
    assert "\n-  limits: [10/second]\n+  limits: [20/second]" in newest.diff
    added = [line[1:] for line in first.diff.splitlines()[3:]]
    assert "\n".join([*added, ""]) == to_yaml(TEN)


async def test_the_diff_of_any_two_versions(repository: Repository) -> None:
    """In both directions, named by their numbers; none of a version with itself."""
    await filled(repository, 3)
    assert (await repository.diff(1, 3)).splitlines()[:2] == ["--- version 1", "+++ version 3"]
    assert "+  limits: [1/second]" in await repository.diff(3, 1)
    assert await repository.diff(2, 2) == ""
    with pytest.raises(ConfigError, match="no version 7"):
        await repository.diff(1, 7)


async def test_what_is_unsafe_must_be_forced(repository: Repository) -> None:
    """The error lists what was found; forced, it is applied, and the audit says what was."""
    await repository.apply(TEN, author="ann", expected=0)
    with pytest.raises(UnsafeChange) as error:
        await repository.apply(UNSAFE, author="ann", expected=1)
    assert [finding.code for finding in error.value.findings] == ["denies-all"]
    assert await repository.number() == 1
    forced = await repository.apply(UNSAFE, author="ann", expected=1, force=True)
    assert forced.number == 2
    assert (await repository.audit(limit=1))[0].forced == str(error.value)


async def test_what_was_forced_once_is_not_asked_again(repository: Repository) -> None:
    """Later edits are not refused for what is in force already; new findings are."""
    await repository.apply(UNSAFE, author="ann", expected=0, force=True)
    await repository.set_tier("pro", PRO, author="ann")
    assert (await repository.audit(limit=1))[0].forced == ""
    wider = replace(UNSAFE, allow=("*",))
    with pytest.raises(UnsafeChange) as error:
        await repository.apply(wider, author="ann", expected=2)
    assert [finding.code for finding in error.value.findings] == ["allows-all"]


async def test_going_back_to_what_was_unsafe_needs_no_force(repository: Repository) -> None:
    """It was accepted once, and whoever rolls back is in a hurry."""
    await repository.apply(UNSAFE, author="ann", expected=0, force=True)
    await repository.apply(TEN, author="ann", expected=1)
    assert (await repository.rollback(1, author="ann", expected=2)).number == 3


async def test_a_document_that_is_not_right_is_not_kept(repository: Repository) -> None:
    """Made of values that the grammar refuses, it would stop every node that reads it."""
    wrong = replace(TEN, assign={"user:42": "gold"})
    with pytest.raises(DocumentError, match="there is no tier"):
        await repository.apply(wrong, author="ann", expected=0)
    with pytest.raises(DocumentError, match="there is no tier"):
        await repository.assign("user:42", "gold", author="ann")
    assert await repository.number() == 0


async def test_a_document_made_by_hand_is_kept_in_canonical_form(repository: Repository) -> None:
    """A time of another zone and spaces around words: what is kept, read and applied again changes
    nothing."""
    until = datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    by_hand = Override("user", "7", multiply=2.0, until=until, reason=" two\nlines ")
    version = await repository.apply(replace(TEN, overrides=(by_hand,)), author="a", expected=0)
    kept = read(version.text)
    assert kept.overrides[0].until == until
    assert kept.overrides[0].reason == "two\nlines"
    assert await repository.apply(kept, author="bob", expected=1) == version


async def test_edits_change_what_they_say(repository: Repository) -> None:
    """Each is a version of its own kind, with its author; the document has all of them."""
    await repository.apply(TEN, author="ann", expected=0)
    twice = Override("user", "7", multiply=2.0)
    signed = replace(twice, author="bob", reason="launch")
    await repository.assign("user:42", "pro", author="bob", reason="paid")
    await repository.add_override(twice, author="bob", reason="launch")
    await repository.set_tier("max", PRO, author="bob")
    current = await repository.current()
    assert current is not None
    assert read(current.text) == replace(
        TEN,
        assign={"user:42": "pro"},
        overrides=(signed,),
        tiers={**TEN.tiers, "max": PRO},
    )
    await repository.remove_override("user", "7", author="bob")
    await repository.unassign("user:42", author="bob")
    current = await repository.current()
    assert current is not None
    assert read(current.text) == replace(TEN, tiers={**TEN.tiers, "max": PRO})
    assert [each.kind for each in await repository.history()] == [
        *("unassign", "remove-override", "set-tier", "override", "assign", "apply"),
    ]


async def test_edits_that_cannot_be_made(repository: Repository) -> None:
    """Nobody to take out, nothing to remove: an error, and no version."""
    await repository.apply(TEN, author="ann", expected=0)
    with pytest.raises(ConfigError, match="assigned to no tier"):
        await repository.unassign("user:1", author="ann")
    with pytest.raises(ConfigError, match="no override"):
        await repository.remove_override("user", "1", author="ann")
    assert await repository.number() == 1


async def test_any_edit_of_one_version_or_of_the_newest(repository: Repository) -> None:
    """Its kind is kept; with `expected`, another version is refused even for no change."""

    def deny(document: Document) -> Document:
        return edits.add_entry(document, "deny", "user:7")

    first = await repository.edit(deny, kind="list", author="ann", expected=0)
    assert (first.number, first.kind) == (1, "list")
    assert await repository.edit(deny, kind="list", author="ann", expected=1) == first
    assert await repository.edit(deny, kind="list", author="ann") == first
    with pytest.raises(VersionConflict) as error:
        await repository.edit(deny, kind="list", author="ann", expected=0)
    assert (error.value.expected, error.value.current) == (0, 1)


async def test_what_a_version_says_is_read_from_its_text(repository: Repository) -> None:
    """Of an old version and of the newest, in any order."""
    for number, limits in enumerate(("1/second", "2/second")):
        await repository.apply(document(limits), author="ann", expected=number)
    for number in (2, 1, 2):
        found = await repository.document_of(await repository.version(number))
        assert found == document(f"{number}/second")


async def test_the_first_version_may_be_an_edit(repository: Repository) -> None:
    """Of the empty document."""
    version = await repository.set_tier("pro", PRO, author="ann")
    assert (version.number, version.base) == (1, None)
    assert read(version.text) == Document(tiers={"pro": PRO})


async def test_a_repository_is_closed_by_its_block(url: str) -> None:
    """`async with` closes every connection."""
    async with await Repository.open(url) as opened:
        await opened.number()
        assert opened._database.engine.pool.checkedin() == 1  # type: ignore[attr-defined]  # it has
    assert opened._database.engine.pool.checkedin() == 0  # type: ignore[attr-defined]  # it has
