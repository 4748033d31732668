"""Versions with conditions, and a database that is sometimes unavailable."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from ratekeeper.core.errors import VersionConflict
from ratekeeper.rules.document.reading import read
from ratekeeper.service.admin.control import VersionCondition
from tests.service.admin.client import RULES, Admin, admin, admin_of, template

__all__ = ["admin", "template"]  # fixtures, found by name

ANY = VersionCondition(any_version=True)
TWO = VersionCondition(frozenset({2}))
SEVERAL = VersionCondition(frozenset({2, 3}))
NONE_YET = VersionCondition(frozenset({0}))
NO_SUCH = VersionCondition(frozenset())


@pytest.mark.parametrize(
    ("condition", "current", "expected"),
    [
        (VersionCondition(), 5, None),
        (ANY, 5, None),
        (TWO, 2, 2),
        (SEVERAL, 3, 3),
        (NONE_YET, 0, 0),
    ],
)
def test_a_condition_that_holds(
    condition: VersionCondition, current: int, expected: int | None
) -> None:
    """The expected version; None if any version will do, so that the change is retried."""
    assert condition.expected(current) == expected


@pytest.mark.parametrize(
    ("condition", "current"), [(ANY, 0), (TWO, 3), (SEVERAL, 4), (NONE_YET, 1), (NO_SUCH, 0)]
)
def test_a_condition_that_does_not_hold(condition: VersionCondition, current: int) -> None:
    """The error names the newest version."""
    with pytest.raises(VersionConflict) as error:
        condition.expected(current)
    assert error.value.current == current


async def test_an_empty_database_has_version_0(tmp_path: Path) -> None:
    """The document is empty; the first change can require that."""
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    async with admin_of(tmp_path, read(RULES), url) as admin:
        answer = await admin.call("GET", "/rules")
        assert (answer.json(), answer.headers["etag"]) == ({"version": 1}, '"v0"')
        for header in ("*", '"other"', '"v1"'):
            await admin.rejected("PUT", "/rules", 412, content=RULES, headers={"If-Match": header})
        headers = {"If-None-Match": "*"}
        made = await admin.call("PUT", "/rules", content=RULES, headers=headers)
        assert (made.json()["number"], made.json()["base"]) == (1, None)
        await admin.rejected("PUT", "/tiers/x", 412, json={"limits": "1/s"}, headers=headers)


async def test_an_unavailable_database_is_503(tmp_path: Path) -> None:
    """With its place and Retry-After; other operations still work."""
    url = f"sqlite:///{tmp_path / 'nowhere' / 'rules.db'}"
    async with admin_of(tmp_path, read(RULES), url) as admin:
        for method, path in (("GET", "/rules"), ("DELETE", "/rules/x"), ("GET", "/audit")):
            answer = await admin.call(method, path, 503)
            assert answer.headers["retry-after"] == "1"
            assert "nowhere" in answer.json()["detail"]
        await admin.call("GET", "/node")
        await admin.call("GET", "/quota?user=1")
        (tmp_path / "nowhere").mkdir()
        await admin.call("GET", "/rules")


async def test_rules_that_this_node_cannot_read_are_503(admin: Admin, tmp_path: Path) -> None:
    """No request is at fault; a rollback helps."""
    await admin.call("GET", "/rules")
    with sqlite3.connect(tmp_path / "rules.db") as database:
        database.execute(
            "INSERT INTO ratekeeper_versions (number, created_at, author, reason, kind, base, text)"
            " SELECT 2, created_at, author, reason, kind, 1, 'version: 99' FROM ratekeeper_versions"
        )
        database.execute(
            "INSERT INTO ratekeeper_audit (version, created_at, author, reason, kind, diff, forced)"
            " SELECT 2, created_at, author, reason, kind, diff, forced FROM ratekeeper_audit"
        )
    database.close()
    found = await admin.rejected("GET", "/rules", 503)
    assert "the newest rules cannot be read by this node" in found["detail"]
    assert (await admin.call("GET", "/versions/2")).json()["text"] == "version: 99"
    await admin.call("POST", "/versions/1/rollback")
    await admin.call("GET", "/rules")


async def test_a_rollback_is_retried_after_a_concurrent_change(admin: Admin) -> None:
    """Without a condition it applies to the newest version."""
    others = [admin.call("POST", "/lists/deny", json={"entry": f"user:{n}"}) for n in range(10)]
    back = [admin.call("POST", "/versions/1/rollback") for _ in range(3)]
    await asyncio.gather(*others, *back)


async def test_a_closed_control_plane_opens_again(admin: Admin) -> None:
    """Closing only releases the connections."""
    await admin.call("GET", "/versions")
    await admin.app.state.control.close()
    await admin.app.state.control.close()
    await admin.call("GET", "/versions")


async def test_the_lifespan_closes_the_database(admin: Admin) -> None:
    """If the server runs the lifespan."""
    async with admin.app.router.lifespan_context(admin.app):
        await admin.call("GET", "/versions")
        assert admin.app.state.control._repository is not None
    assert admin.app.state.control._repository is None
