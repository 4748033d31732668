"""Entries on SQLite: wrong arguments change nothing.

`tests/integration/test_repository_entries.py` runs them on both engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.entries import Entry, assignment
from tests.integration.rule_documents import document


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[Repository]:
    async with await Repository.open(f"sqlite:///{tmp_path / 'rules.db'}") as opened:
        await opened.apply(document(), author="ann", expected=0)
        yield opened


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"author": ""}, "author=''"),
        ({"reason": "\0"}, "reason="),
        ({"reason": "x" * 1_001}, "at most 1,000"),
    ],
)
async def test_unsigned_changes_are_rejected(
    repository: Repository, given: dict[str, Any], words: str
) -> None:
    """Each way of changing entries checks the author and the reason."""
    signed = {"author": "ann", "reason": "", **given}
    entry = assignment("user:42", "pro")
    for change in (
        repository.entries.put(entry, **signed),
        repository.entries.write([entry], **signed),
        repository.entries.remove("assignment", "user:42", **signed),
    ):
        with pytest.raises(ConfigError) as error:
            await change
        assert words in str(error.value)
    assert (await repository.entries.position()).seq == 0


async def test_pages_are_bounded(repository: Repository) -> None:
    """A page has from 1 to 1,000 entries."""
    for limit in (0, 1_001, True):
        with pytest.raises(ConfigError, match="is not from 1 to 1,000"):
            await repository.entries.page("assignment", limit=limit)


async def test_a_batch_of_nothing_is_one_change_without_entries(repository: Repository) -> None:
    """An empty import is audited, too."""
    change = await repository.entries.write([], author="ann")
    assert (change.seq, change.kind, change.count) == (1, "import", 0)
    empty: list[list[Entry]] = [batch async for batch in repository.entries.stream()]
    assert empty == []
