"""What the admin API asks: versions under conditions, and a database that comes and goes."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from tests.service.admin.nodes import RULES, Admin, admin, admin_of, template
from tollkeeper.core.errors import VersionConflict
from tollkeeper.rules.document.reading import read
from tollkeeper.service.admin.plane import Condition

__all__ = ["admin", "template"]  # fixtures, found by name

ANY = Condition(any_version=True)
TWO = Condition(frozenset({2}))
SEVERAL = Condition(frozenset({2, 3}))
NONE_YET = Condition(frozenset({0}))
NO_SUCH = Condition(frozenset())


@pytest.mark.parametrize(
    ("condition", "current", "expected"),
    [
        (Condition(), 5, None),
        (ANY, 5, None),
        (TWO, 2, 2),
        (SEVERAL, 3, 3),
        (NONE_YET, 0, 0),
    ],
)
def test_a_condition_that_holds(condition: Condition, current: int, expected: int | None) -> None:
    """The version to expect; None where any will do, so that a lost race is run again."""
    assert condition.expected(current) == expected


@pytest.mark.parametrize(
    ("condition", "current"), [(ANY, 0), (TWO, 3), (SEVERAL, 4), (NONE_YET, 1), (NO_SUCH, 0)]
)
def test_a_condition_that_does_not_hold(condition: Condition, current: int) -> None:
    """The error names the version that there is."""
    with pytest.raises(VersionConflict) as error:
        condition.expected(current)
    assert error.value.current == current


async def test_an_empty_database_has_version_0(tmp_path: Path) -> None:
    """An empty document; the first change may say that it is the first."""
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    async with admin_of(tmp_path, read(RULES), url) as admin:
        answer = await admin.ask("GET", "/rules")
        assert (answer.json(), answer.headers["etag"]) == ({"version": 1}, '"v0"')
        for header in ("*", '"other"', '"v1"'):
            await admin.refused("PUT", "/rules", 412, content=RULES, headers={"If-Match": header})
        headers = {"If-None-Match": "*"}
        made = await admin.ask("PUT", "/rules", content=RULES, headers=headers)
        assert (made.json()["number"], made.json()["base"]) == (1, None)
        await admin.refused("PUT", "/tiers/x", 412, json={"limits": "1/s"}, headers=headers)


async def test_a_database_that_is_away(tmp_path: Path) -> None:
    """503 with its place and when to try again; what needs no database is answered."""
    url = f"sqlite:///{tmp_path / 'nowhere' / 'rules.db'}"
    async with admin_of(tmp_path, read(RULES), url) as admin:
        for method, path in (("GET", "/rules"), ("DELETE", "/rules/x"), ("GET", "/audit")):
            answer = await admin.ask(method, path, 503)
            assert answer.headers["retry-after"] == "1"
            assert "nowhere" in answer.json()["detail"]
        await admin.ask("GET", "/node")
        await admin.ask("GET", "/quota?user=1")
        (tmp_path / "nowhere").mkdir()
        await admin.ask("GET", "/rules")


async def test_rules_that_this_node_cannot_read(admin: Admin, tmp_path: Path) -> None:
    """503, for it is nobody's request that is wrong; going back to a version before helps."""
    await admin.ask("GET", "/rules")
    with sqlite3.connect(tmp_path / "rules.db") as database:
        database.execute(
            "INSERT INTO tollkeeper_versions (number, created_at, author, reason, kind, base, text)"
            " SELECT 2, created_at, author, reason, kind, 1, 'version: 99' FROM tollkeeper_versions"
        )
        database.execute(
            "INSERT INTO tollkeeper_audit (version, created_at, author, reason, kind, diff, forced)"
            " SELECT 2, created_at, author, reason, kind, diff, forced FROM tollkeeper_audit"
        )
    database.close()
    found = await admin.refused("GET", "/rules", 503)
    assert "the newest rules cannot be read by this node" in found["detail"]
    assert (await admin.ask("GET", "/versions/2")).json()["text"] == "version: 99"
    await admin.ask("POST", "/versions/1/rollback")
    await admin.ask("GET", "/rules")


async def test_going_back_wins_against_others_who_change(admin: Admin) -> None:
    """Without a condition it is tried again, on whatever is newest then."""
    others = [admin.ask("POST", "/lists/deny", json={"entry": f"user:{n}"}) for n in range(10)]
    back = [admin.ask("POST", "/versions/1/rollback") for _ in range(3)]
    await asyncio.gather(*others, *back)


async def test_a_closed_plane_opens_again(admin: Admin) -> None:
    """Closing lets go of connections, and is no end."""
    await admin.ask("GET", "/versions")
    await admin.app.state.plane.close()
    await admin.app.state.plane.close()
    await admin.ask("GET", "/versions")


async def test_the_lifespan_closes_the_database(admin: Admin) -> None:
    """Where a server runs one."""
    async with admin.app.router.lifespan_context(admin.app):
        await admin.ask("GET", "/versions")
        assert admin.app.state.plane._repository is not None
    assert admin.app.state.plane._repository is None
