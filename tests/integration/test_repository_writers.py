"""Concurrent changes of the rules: none is lost, and a killed writer leaves no half version."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from ratekeeper.control import repository as repository_module
from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import VersionConflict
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import read
from tests.integration.rule_databases import repository, url
from tests.integration.rule_documents import assign, document
from tests.integration.rule_editors import results, started

__all__ = ["repository", "url"]  # fixtures, found by name

PROCESSES = 2
TASKS = 5
EDITS = 3
KILLS = 2


async def checked_document(repository: Repository) -> Document:
    """Return the current document, after checking that all versions are gapless and audited."""
    versions = await repository.history(limit=1_000)
    numbers = [each.number for each in versions]
    assert numbers == list(range(len(versions), 0, -1))
    assert [each.base for each in versions] == [*numbers[1:], None]
    assert [
        each.version for each in (await repository.audit_log.page(limit=1_000)).items
    ] == numbers
    assert await repository.number() == numbers[0]
    documents = [read(each.text) for each in versions]
    return documents[0]


async def test_ten_editors_in_two_processes_lose_no_edit(repository: Repository, url: str) -> None:
    """Every edit is in the last document, and each editor got its own number."""
    await repository.apply(document(), author="ann", expected=0)
    found = await asyncio.to_thread(
        results, *(("assign", url, f"p{process}", TASKS, EDITS) for process in range(PROCESSES))
    )
    total = PROCESSES * TASKS * EDITS
    numbers = sorted(number for each in found for number in each)
    assert numbers == list(range(2, total + 2))
    assert set((await checked_document(repository)).assign) == {
        f"user:p{process}-{task}-{edit}"
        for process in range(PROCESSES)
        for task in range(TASKS)
        for edit in range(EDITS)
    }


async def test_one_of_several_changes_of_the_same_version_wins(
    repository: Repository, url: str
) -> None:
    """Of 20 tasks and of two processes, one change is applied, and the others are conflicts."""
    await repository.apply(document(), author="ann", expected=0)
    others = asyncio.to_thread(results, *(("apply", url, f"p{n}", 1) for n in range(PROCESSES)))
    found = sorted(await others)
    assert found == ["applied 2", *["conflict 1 2"] * (PROCESSES - 1)]

    documents = [document(more=f"assign: {{'user:{task}': pro}}") for task in range(20)]
    tasks = [repository.apply(each, author="ann", expected=2) for each in documents]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    conflicts = [each for each in answers if isinstance(each, VersionConflict)]
    assert {(each.expected, each.current) for each in conflicts} == {(2, 3)}
    assert len(conflicts) == 19
    assert len((await checked_document(repository)).assign) == 1


async def test_edits_of_one_process_take_turns(repository: Repository) -> None:
    """50 tasks on one repository all succeed, although only a few could by luck."""
    await repository.apply(document(), author="ann", expected=0)
    await asyncio.gather(
        *(assign(repository, f"user:{task}", "pro", author="ann") for task in range(50))
    )
    assert len((await checked_document(repository)).assign) == 50


async def test_an_edit_that_is_always_too_late_gives_up(
    repository: Repository, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VersionConflict after EDIT_ATTEMPTS_MAX attempts, not an endless loop."""
    await repository.apply(document(), author="ann", expected=0)
    monkeypatch.setattr(repository_module, "EDIT_ATTEMPTS_MAX", 3)
    commit = repository._commit
    attempts = 0
    async with await Repository.open(url) as other:

        async def too_late(change: object) -> object:
            nonlocal attempts
            attempts += 1
            await assign(other, f"user:{attempts}", "pro", author="quick")
            return await commit(change)  # type: ignore[arg-type]  # handed on

        monkeypatch.setattr(repository, "_commit", too_late)
        with pytest.raises(VersionConflict):
            await assign(repository, "user:slow", "pro", author="slow")
    assert attempts == 3
    assert set((await checked_document(repository)).assign) == {"user:1", "user:2", "user:3"}


async def test_a_killed_process_leaves_complete_versions(repository: Repository, url: str) -> None:
    """Killed twice during edits: every confirmed version is there, and others continue."""
    await repository.apply(document(), author="ann", expected=0)
    confirmed = 1
    for kill in range(KILLS):
        (process,) = started([("forever", url, f"k{kill}")])
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            # Each kill hits another point of its work; the next line may arrive at any moment.
            for _ in range(5 + kill):
                confirmed = int(process.stdout.readline())
            process.kill()
            rest = process.stdout.read().split()
            confirmed = max([confirmed, *map(int, rest[:-1])])
        async with repository._database.writing():
            pass  # wait for a commit that PostgreSQL received before the kill
        kept = await checked_document(repository)
        number = await repository.number()
        assert (
            confirmed <= number <= confirmed + 2
        )  # the last confirmation may be lost, and one commit in flight
        assert len(kept.assign) == number - 1
        await assign(repository, f"user:after-{kill}", "pro", author="ann")
    assert len((await checked_document(repository)).assign) > 5 * KILLS


async def test_a_failed_transaction_leaves_nothing(repository: Repository) -> None:
    """An error between the two rows of a version: neither is there, and the number is free."""
    await repository.apply(document(), author="ann", expected=0)

    async def write_half() -> None:
        async with repository._database.writing() as connection:
            await connection.exec_driver_sql(
                "INSERT INTO ratekeeper_versions VALUES "
                "(2, '2026-01-01 00:00:00', 'x', '', 'apply', 1, 'half')"
            )
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write_half()
    assert await repository.number() == 1
    assert (await assign(repository, "user:1", "pro", author="ann")).number == 2


async def test_readers_of_a_file_do_not_wait_for_its_writer(tmp_path: Path) -> None:
    """With a write-ahead log, SQLite answers while another process holds the writers' lock."""
    path = tmp_path / "rules.db"
    async with await Repository.open(f"sqlite:///{path}") as repository:
        await repository.apply(document(), author="ann", expected=0)
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        assert await asyncio.wait_for(repository.number(), 5) == 1
        writer.close()
