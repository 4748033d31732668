"""Databases and documents for the tests of the repository."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.postgres_server import running_postgres
from tollkeeper.control import edits
from tollkeeper.control.repository import Repository, Version
from tollkeeper.core.model import Limit
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import read

ENGINES = ("sqlite", "postgresql")


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database, on each engine."""
    if request.param == "postgresql":
        return running_postgres().new_database()
    return f"sqlite:///{tmp_path / 'rules.db'}"


@pytest.fixture
async def repository(url: str) -> AsyncIterator[Repository]:
    """A repository in an empty database."""
    async with await Repository.open(url) as opened:
        yield opened


def document(limits: str = "10/second", more: str = "") -> Document:
    """Return a safe document with tiers."""
    return read(f"""
        version: 1
        tiers: {{free: 5/second, pro: 50/second}}
        rules: [{{id: orders, by: user, limits: {limits}}}]
        {more}
    """)


UNSAFE = read("{version: 1, rules: [{id: orders, by: user, limits: 10/second}], deny: ['*']}")


async def assign(repository: Repository, subject: str, tier: str, *, author: str) -> Version:
    """Make a version by an edit of the document that puts a subject in a tier."""

    def assigned(document: Document) -> Document:
        return replace(document, assign={**document.assign, subject: tier})

    return await repository.edit(assigned, kind="assign", author=author)


async def set_tier(
    repository: Repository, name: str, limits: tuple[Limit, ...], *, author: str
) -> Version:
    """Make a version by an edit of the document that gives a tier these limits."""
    return await repository.edit(
        lambda document: edits.set_tier(document, name, limits), kind="set-tier", author=author
    )
