"""The schema: created once, migrated, equal on both engines, and protected against changes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, exc, text

from ratekeeper.control import schema
from ratekeeper.control.database import Database
from ratekeeper.control.repository import Repository
from ratekeeper.control.schema import SCHEMA_TABLE, metadata
from ratekeeper.core.errors import ConfigError, StoreUnavailable
from tests.integration.rule_databases import repository, url
from tests.integration.rule_documents import assign, document
from tests.integration.rule_editors import results
from tests.postgres_server import running_postgres

__all__ = ["repository", "url"]  # fixtures, found by name

TABLES = ("ratekeeper_versions", "ratekeeper_audit")
NEWEST = "0003"


async def run(url: str, *statements: str) -> None:
    """Run SQL without the repository, as anyone with the password could."""
    database = Database(url)
    try:
        async with database.engine.begin() as connection:
            for each in statements:
                await connection.execute(text(each))
    finally:
        await database.close()


async def test_ten_tasks_create_the_schema_once(url: str) -> None:
    """All tasks of a process succeed."""
    opened = await asyncio.gather(*(Repository.open(url) for _ in range(10)))
    assert [await each.number() for each in opened] == [0] * 10
    await opened[0].apply(document(), author="ann", expected=0)
    assert [await each.number() for each in opened] == [1] * 10
    await asyncio.gather(*(each.close() for each in opened))


async def test_two_processes_create_the_schema_once(url: str) -> None:
    """Nodes that start at the same time do this."""
    assert await asyncio.to_thread(results, *[("open", url)] * 2) == [0] * 2


async def test_several_databases_may_be_opened_at_once(tmp_path: Path) -> None:
    """One process may open them, although Alembic runs one migration at a time."""
    urls = [running_postgres().new_database(), running_postgres().new_database()]
    urls += [f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db")]
    opened = await asyncio.gather(*map(Repository.open, urls))
    assert [await each.number() for each in opened] == [0] * 4
    await asyncio.gather(*(each.close() for each in opened))


async def test_opening_again_changes_nothing(url: str) -> None:
    """The versions are still there."""
    async with await Repository.open(url) as repository:
        version = await repository.apply(document(), author="ann", expected=0)
    async with await Repository.open(url) as repository:
        assert await repository.history() == [version]


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
async def test_the_revisions_create_the_tables_in_use(repository: Repository, url: str) -> None:
    """Alembic finds no difference in columns, types and keys."""

    def is_compared(_: object, name: str | None, kind: str, *__: object) -> bool:
        # SQLAlchemy has no form of these that both databases understand.
        return kind != "index" or name not in {
            "ratekeeper_entries_owner",
            "ratekeeper_entries_subject",
        }

    def differences(connection: Connection) -> list[object]:
        options = {
            "version_table": SCHEMA_TABLE,
            "compare_type": True,
            "include_object": is_compared,
        }
        found: list[object] = compare_metadata(
            MigrationContext.configure(connection, opts=options), metadata
        )
        return found

    async with repository._database.reading() as connection:
        assert await connection.run_sync(differences) == []
        revision = await connection.scalar(text(f"SELECT version_num FROM {SCHEMA_TABLE}"))
    assert revision == NEWEST


async def test_other_tables_are_left_alone(url: str) -> None:
    """Tables of another application stay in the same database."""
    await run(url, "CREATE TABLE versions (mine integer)", "INSERT INTO versions VALUES (7)")
    async with await Repository.open(url) as repository:
        await repository.apply(document(), author="ann", expected=0)
        async with repository._database.reading() as connection:
            assert await connection.scalar(text("SELECT mine FROM versions")) == 7


async def test_a_newer_schema_is_rejected(url: str) -> None:
    """The error names its revision; an older Ratekeeper does not guess."""
    async with await Repository.open(url):
        pass
    await run(url, f"UPDATE {SCHEMA_TABLE} SET version_num = '9999'")
    with pytest.raises(ConfigError, match=r"revision 9999, .* \(0003 is its newest\); use a newer"):
        await Repository.open(url)


NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0004", "0003", None, None


def upgrade():
    op.add_column("ratekeeper_audit", sa.Column("later", sa.Integer))
"""


async def test_an_older_schema_is_migrated(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of five repositories runs the new revision, and the old Ratekeeper then rejects it."""
    async with await Repository.open(url) as repository:
        version = await repository.apply(document(), author="ann", expected=0)
    later = tmp_path / "migrations 100%"
    shutil.copytree(schema.MIGRATIONS, later)
    (later / "versions" / "r0004_later.py").write_text(NEXT, encoding="utf-8")
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", later)
        newer.setattr(schema, "REVISIONS", (*schema.REVISIONS, "0004"))
        opened = await asyncio.gather(*(Repository.open(url) for _ in range(5)))
        assert [await each.current() for each in opened] == [version] * 5
        await asyncio.gather(*(each.close() for each in opened))
        await run(url, "SELECT later FROM ratekeeper_audit")
    with pytest.raises(ConfigError, match="revision 0004"):
        await Repository.open(url)


async def test_a_failed_migration_changes_nothing(url: str) -> None:
    """A table is in the way; after its removal, the migration succeeds."""
    await run(url, "CREATE TABLE ratekeeper_audit (mine integer)")
    with pytest.raises(StoreUnavailable, match=r"ratekeeper_audit.* already exists"):
        await Repository.open(url)
    await run(url, "DROP TABLE ratekeeper_audit")
    async with await Repository.open(url) as repository:
        assert await repository.number() == 0


async def test_a_node_needs_no_permission_to_create_tables() -> None:
    """A PostgreSQL user that may only read opens a current schema."""
    server = running_postgres()
    url = server.new_database()
    name = url.rpartition("/")[2]
    async with await Repository.open(url) as repository:
        await repository.apply(document(), author="ann", expected=0)
    server.run(
        f"CREATE ROLE reader LOGIN PASSWORD 'reader'; "
        f"GRANT SELECT ON {', '.join(TABLES)}, {SCHEMA_TABLE} TO reader",
        name,
    )
    reader = f"postgresql://reader:reader@{url.partition('@')[2]}"
    async with await Repository.open(reader) as repository:
        assert await repository.number() == 1
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await assign(repository, "user:42", "pro", author="mallory")


SAME = "author = author"
TAMPERING: dict[str, Callable[[str, str], str]] = {
    "update": lambda table, number: f"UPDATE {table} SET author = 'nobody'",
    "update of one": lambda table, number: f"UPDATE {table} SET {SAME} WHERE {number} = 1",
    "delete": lambda table, number: f"DELETE FROM {table}",
    "delete of one": lambda table, number: f"DELETE FROM {table} WHERE {number} = 2",
    "gap": lambda table, number: _inserted("INSERT INTO", table, number, "number + 7"),
    "past": lambda table, number: _inserted("INSERT INTO", table, number, "number - 9"),
    "upsert": lambda table, number: (
        _inserted("INSERT INTO", table, number, "number")
        + f" ON CONFLICT ({number}) DO UPDATE SET author = 'nobody'"
    ),
}
ON_SQLITE = {
    "replace": lambda table, number: _inserted("INSERT OR REPLACE INTO", table, number, "number"),
    "ignore": lambda table, number: f"UPDATE OR IGNORE {table} SET author = 'nobody'",
    "no number": lambda table, number: _inserted("INSERT INTO", table, number, "NULL"),
}
ON_POSTGRESQL = {
    "truncate": lambda table, number: f"TRUNCATE {table}",
    "truncate both": lambda table, number: f"TRUNCATE {', '.join(TABLES)} CASCADE",
}


def _inserted(verb: str, table: str, number: str, value: str) -> str:
    """Return a statement that copies the newest row with another number."""
    rest = [column.name for column in metadata.tables[table].columns if column.name != number]
    columns = ", ".join(rest)
    return (
        f"{verb} {table} ({number}, {columns}) "
        f"SELECT {value.replace('number', number)}, {columns} FROM {table} WHERE {number} = 2"
    )


@pytest.mark.parametrize("table", TABLES)
async def test_rows_cannot_be_changed_by_sql(repository: Repository, url: str, table: str) -> None:
    """Every statement short of dropping the triggers is rejected, and nothing changes."""
    await repository.apply(document("1/second"), author="ann", expected=0)
    await repository.apply(document("2/second"), author="bob", expected=1)
    before = await repository.history(), (await repository.audit_log.page()).items
    number = "number" if table == "ratekeeper_versions" else "version"
    ways = TAMPERING | (ON_SQLITE if url.startswith("sqlite") else ON_POSTGRESQL)
    for name, statement in ways.items():
        with pytest.raises(exc.DBAPIError) as error:
            await run(url, statement(table, number))
        message = str(error.value.orig)
        assert "never changed" in message or "next number" in message, name
        assert (await repository.history(), (await repository.audit_log.page()).items) == before, (
            name
        )
    # The repository still works.
    assert (await assign(repository, "user:1", "pro", author="ann")).number == 3
