"""Databases for the tests of the repository."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ratekeeper.control.repository import Repository
from tests.postgres_server import running_postgres

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
