"""The tables of the repository, as the newest revision in `migrations` leaves them.

    tollkeeper_versions   each version of the rules, whole, as canonical text; number 1, 2, 3 …
    tollkeeper_audit      who changed what, when and why: one entry for each version
    tollkeeper_schema     which revision the schema is at (Alembic's)

Rows are only ever added. Triggers refuse UPDATE and DELETE, and a number that is not the next one,
whoever asks for it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Column, DateTime, Dialect, Integer, MetaData, String, Table, Text
from sqlalchemy.types import TypeDecorator

SCHEMA_TABLE: Final = "tollkeeper_schema"

AUTHOR_LENGTH_MAX: Final = 200
REASON_LENGTH_MAX: Final = 1_000
KIND_LENGTH_MAX: Final = 40


class UtcTime(TypeDecorator[datetime]):
    """A moment. SQLite keeps no zone, so there it is written and read as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(
        self,
        value: datetime | None,
        dialect: Dialect,  # noqa: ARG002 - SQLAlchemy's signature
    ) -> datetime | None:
        """On the way in."""
        return value and value.astimezone(UTC)

    def process_result_value(
        self,
        value: datetime | None,
        dialect: Dialect,  # noqa: ARG002 - SQLAlchemy's signature
    ) -> datetime | None:
        """On the way out."""
        if value is None or value.tzinfo is not None:
            return value and value.astimezone(UTC)
        return value.replace(tzinfo=UTC)


metadata = MetaData()

versions = Table(
    "tollkeeper_versions",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("created_at", UtcTime, nullable=False),
    Column("author", String(AUTHOR_LENGTH_MAX), nullable=False),
    Column("reason", String(REASON_LENGTH_MAX), nullable=False),
    Column("kind", String(KIND_LENGTH_MAX), nullable=False),
    Column("base", Integer),
    Column("text", Text, nullable=False),
)

audit = Table(
    "tollkeeper_audit",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("created_at", UtcTime, nullable=False),
    Column("author", String(AUTHOR_LENGTH_MAX), nullable=False),
    Column("reason", String(REASON_LENGTH_MAX), nullable=False),
    Column("kind", String(KIND_LENGTH_MAX), nullable=False),
    Column("diff", Text, nullable=False),
    Column("forced", Text, nullable=False),
)
