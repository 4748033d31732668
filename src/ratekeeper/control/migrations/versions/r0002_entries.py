"""Create the tables of entries, of their audit, and of the position of their feed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_AUDIT = "ratekeeper_entry_audit"
_IN_ORDER = f"a new row of {_AUDIT} has a higher number than the last one"

_CHECK_ORDER = f"""
CREATE FUNCTION {_AUDIT}_check_order() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE newest bigint;
BEGIN
    EXECUTE format('SELECT coalesce(max(seq), 0) FROM %I.%I',
        TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO newest;
    IF NEW.seq IS NULL OR NEW.seq <= newest THEN
        RAISE EXCEPTION '{_IN_ORDER}';
    END IF;
    RETURN NEW;
END $$
"""  # noqa: S608 - the name is a constant

_SQLITE_ORDER = f"""
CREATE TRIGGER {_AUDIT}_order BEFORE INSERT ON {_AUDIT}
WHEN NEW.seq IS NULL OR NEW.seq <= (SELECT coalesce(max(seq), 0) FROM {_AUDIT})
BEGIN
    SELECT RAISE(ABORT, '{_IN_ORDER}');
END
"""  # noqa: S608 - the name is a constant


def upgrade() -> None:
    """Create the tables, and the triggers that protect the audit."""
    op.create_table(
        "ratekeeper_entries",
        sa.Column("kind", sa.String(10), primary_key=True),
        sa.Column("key", sa.String(2_000), primary_key=True),
        sa.Column("data", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("removed", sa.Boolean, nullable=False),
        sa.Column("purge_at", sa.BigInteger),
    )
    op.create_index("ratekeeper_entries_seq", "ratekeeper_entries", ["seq"], unique=True)
    purged = sa.text("purge_at IS NOT NULL")
    op.create_index(
        "ratekeeper_entries_purge_at",
        "ratekeeper_entries",
        ["purge_at"],
        sqlite_where=purged,
        postgresql_where=purged,
    )
    op.create_table(
        _AUDIT,
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("reason", sa.String(1_000), nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("key", sa.String(2_000), nullable=False),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
        sa.Column("count", sa.Integer, nullable=False),
    )
    op.create_table(
        "ratekeeper_feed",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("horizon", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO ratekeeper_feed (id, seq, horizon) VALUES (1, 0, 0)")
    if op.get_bind().dialect.name == "postgresql":
        _protect_postgresql()
    else:
        _protect_sqlite()


def _protect_postgresql() -> None:
    op.execute(
        f"CREATE TRIGGER {_AUDIT}_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON {_AUDIT} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION ratekeeper_refuse()"
    )
    op.execute(_CHECK_ORDER)
    op.execute(
        f"CREATE TRIGGER {_AUDIT}_order BEFORE INSERT ON {_AUDIT} "
        f"FOR EACH ROW EXECUTE FUNCTION {_AUDIT}_check_order()"
    )


def _protect_sqlite() -> None:
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {_AUDIT}_no_{verb.lower()} BEFORE {verb} ON {_AUDIT} "
            f"BEGIN SELECT RAISE(ABORT, 'rows of {_AUDIT} are never changed'); END"
        )
    op.execute(_SQLITE_ORDER)
