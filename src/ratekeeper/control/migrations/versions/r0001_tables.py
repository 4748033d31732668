"""Create the tables of versions and audit, whose rows are added in order and never changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Each table with its column of consecutive numbers.
_NUMBERED = (("ratekeeper_versions", "number"), ("ratekeeper_audit", "version"))

_REJECTED = "rows of {table} are never changed; apply a new version instead"

_CHECK_NEXT = """
CREATE FUNCTION {table}_check_next() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE next integer;
BEGIN
    EXECUTE format('SELECT coalesce(max({number}), 0) + 1 FROM %I.%I',
        TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO next;
    IF NEW.{number} IS DISTINCT FROM next THEN
        RAISE EXCEPTION 'a new row of {table} has the next number after the last one';
    END IF;
    RETURN NEW;
END $$
"""

_SQLITE_NEXT = """
CREATE TRIGGER {table}_next BEFORE INSERT ON {table}
WHEN NEW.{number} IS NOT (SELECT coalesce(max({number}), 0) + 1 FROM {table})
BEGIN
    SELECT RAISE(ABORT, 'a new row of {table} has the next number after the last one');
END
"""


def upgrade() -> None:
    """Create the tables and the triggers that protect them."""
    op.create_table(
        "ratekeeper_versions",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        *_change_columns(),
        sa.Column("base", sa.Integer),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_table(
        "ratekeeper_audit",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        *_change_columns(),
        sa.Column("diff", sa.Text, nullable=False),
        sa.Column("forced", sa.Text, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        _protect_postgresql()
    else:
        _protect_sqlite()


def _change_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("reason", sa.String(1_000), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
    ]


def _protect_postgresql() -> None:
    op.execute(
        """
        CREATE FUNCTION ratekeeper_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION
                'rows of % are never changed; apply a new version instead', TG_TABLE_NAME;
        END $$
        """
    )
    for table, number in _NUMBERED:
        op.execute(
            f"CREATE TRIGGER {table}_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION ratekeeper_refuse()"
        )
        op.execute(_CHECK_NEXT.format(table=table, number=number))
        op.execute(
            f"CREATE TRIGGER {table}_next BEFORE INSERT ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION {table}_check_next()"
        )


def _protect_sqlite() -> None:
    for table, number in _NUMBERED:
        rejected = f"SELECT RAISE(ABORT, '{_REJECTED.format(table=table)}');"
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN {rejected} END"
            )
        # INSERT OR REPLACE deletes rows without firing DELETE triggers, but it fires this one.
        op.execute(_SQLITE_NEXT.format(table=table, number=number))
