"""Create the indexes that find entries by the beginning of their subject."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# `control/entries.py` has both expressions in its queries.
_POSTGRESQL = """
CREATE INDEX ratekeeper_entries_owner ON ratekeeper_entries (
    (coalesce('user:' || (CAST(data AS jsonb) #>> '{for,user}'),
     'api_key:' || (CAST(data AS jsonb) #>> '{for,api_key}'),
     'tenant:' || (CAST(data AS jsonb) #>> '{for,tenant}'),
     'ip:' || (CAST(data AS jsonb) #>> '{for,ip}')) COLLATE "C")
) WHERE kind = 'override' AND NOT removed
"""
# With the kind, though all have the same: otherwise the planner prefers the primary key.
_SQLITE = """
CREATE INDEX ratekeeper_entries_owner ON ratekeeper_entries (
    kind, coalesce('user:' || json_extract(data, '$.for.user'),
    'api_key:' || json_extract(data, '$.for.api_key'),
    'tenant:' || json_extract(data, '$.for.tenant'),
    'ip:' || json_extract(data, '$.for.ip'))
) WHERE kind = 'override' AND NOT removed
"""


def upgrade() -> None:
    """Create the indexes. The primary key of SQLite finds the subjects of other entries."""
    if op.get_bind().dialect.name != "postgresql":
        op.execute(_SQLITE)
        return
    op.execute(_POSTGRESQL)
    op.execute(
        "CREATE INDEX ratekeeper_entries_subject ON ratekeeper_entries "
        '(kind, key COLLATE "C") WHERE NOT removed'
    )
