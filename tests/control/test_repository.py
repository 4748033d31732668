"""The repository on SQLite: versions, conflicts and invalid arguments.

`tests/integration/test_repository*.py` run it on PostgreSQL, too, with many writers and failures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import ConfigError, VersionConflict
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import read

TEN = read("{version: 1, rules: [{id: orders, by: user, limits: 10/second}]}")


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[Repository]:
    async with await Repository.open(f"sqlite:///{tmp_path / 'rules.db'}") as opened:
        yield opened


async def test_versions_are_added_and_rolled_back(repository: Repository) -> None:
    """A rollback adds a version with the old text; the history keeps all of them."""
    first = await repository.apply(Document(), author="ann", expected=None)
    await repository.apply(TEN, author="ann", expected=1)
    third = await repository.rollback(1, author="bob", expected=2)
    assert (third.number, third.base, third.kind, third.text) == (3, 2, "rollback", first.text)
    assert [each.number for each in await repository.history()] == [3, 2, 1]
    assert [each.version for each in (await repository.audit_log.page()).items] == [3, 2, 1]


async def test_a_change_of_an_old_version_is_a_conflict(repository: Repository) -> None:
    """The error has both numbers, and nothing changes."""
    await repository.apply(TEN, author="ann", expected=0)
    with pytest.raises(VersionConflict) as error:
        await repository.apply(Document(), author="bob", expected=0)
    assert (error.value.expected, error.value.current) == (0, 1)
    assert await repository.number() == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"author": ""}, "author=''"),
        ({"author": " "}, "author=' '"),
        ({"author": "a\nb"}, "author='a"),
        ({"author": "x" * 201}, "at most 200"),
        ({"author": "\ud800"}, "author="),
        ({"reason": "\0"}, "reason="),
        ({"reason": "x" * 1_001}, "at most 1,000"),
        ({"expected": -1}, "-1 is not the number"),
        ({"expected": 2**31}, "is not the number"),
        ({"expected": "1"}, "'1' is not the number"),
        ({"expected": True}, "True is not the number"),
    ],
)
async def test_invalid_arguments_are_rejected(
    repository: Repository, given: dict[str, Any], words: str
) -> None:
    """The error has the argument's name, its value and a valid example; nothing changes."""
    arguments = {"author": "ann", "reason": "", "expected": 0, **given}
    with pytest.raises(ConfigError) as error:
        await repository.apply(TEN, **arguments)
    assert words in str(error.value)
    assert await repository.number() == 0


@pytest.mark.parametrize("limit", [0, -1, 1_001, True, "5"])
async def test_page_sizes_are_checked(repository: Repository, limit: Any) -> None:
    """A page has from 1 to 1,000 entries."""
    for page in (repository.history, repository.audit_log.page):
        with pytest.raises(ConfigError, match=r"is not from 1 to 1,000; try limit=50"):
            await page(limit=limit)
