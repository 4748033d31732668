"""What Alembic runs to migrate: on the connection, and in the transaction, that it is given."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from tollkeeper.control.tables import SCHEMA_TABLE, metadata


def migrate(connection: Connection) -> None:
    """Run the revisions that Alembic was asked for."""
    context.configure(connection=connection, target_metadata=metadata, version_table=SCHEMA_TABLE)
    with context.begin_transaction():
        context.run_migrations()


# There is a `config` only while Alembic runs this; whoever merely imports it changes nothing.
if (config := getattr(context, "config", None)) is not None:
    migrate(config.attributes["connection"])
