"""The first revision: on SQLite, its triggers reject every change of a row that exists.

`tests/integration/test_repository_schema.py` tries more ways, and PostgreSQL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import exc, text

from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.model import Document


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE ratekeeper_versions SET author = 'eve'", "never changed"),
        ("DELETE FROM ratekeeper_audit", "never changed"),
        (
            """INSERT INTO ratekeeper_versions
            SELECT 7, created_at, author, reason, kind, base, text FROM ratekeeper_versions""",
            "next number",
        ),
    ],
)
async def test_rows_are_only_added_in_order(tmp_path: Path, statement: str, words: str) -> None:
    """Plain SQL without the repository is rejected, too."""
    async with await Repository.open(f"sqlite:///{tmp_path / 'rules.db'}") as repository:
        await repository.apply(Document(), author="ann", expected=0)
        async with repository._database.engine.connect() as connection:
            with pytest.raises(exc.DBAPIError, match=words):
                await connection.execute(text(statement))
        assert await repository.number() == 1
