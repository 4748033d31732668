"""Alembic runs this module to migrate, on the connection and in the transaction of its caller."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from ratekeeper.control.schema import SCHEMA_TABLE, metadata


def migrate(connection: Connection) -> None:
    """Run the revisions that Alembic selected."""
    context.configure(connection=connection, target_metadata=metadata, version_table=SCHEMA_TABLE)
    with context.begin_transaction():
        context.run_migrations()


# `config` exists only while Alembic runs this module, so importing it changes nothing.
if (config := getattr(context, "config", None)) is not None:
    migrate(config.attributes["connection"])
