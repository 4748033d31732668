"""Tiers, assignments, overrides and lists over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.service.admin.client import Admin, admin, admin_of, template

__all__ = ["admin", "template"]  # fixtures, found by name

TWICE = {"multiply": 2, "until": "2h", "reason": "launch"}


async def items(admin: Admin, path: str) -> list[Any]:
    """Return the items of a page."""
    found: list[Any] = (await admin.call("GET", path)).json()["items"]
    return found


async def test_tiers_are_read_set_and_removed(admin: Admin) -> None:
    """A new name makes a new tier; the reason is in the history."""
    pro = {"name": "pro", "limits": ["50/second"], "consistency": None}
    free = {"name": "free", "limits": ["5/second"], "consistency": None}
    assert await items(admin, "/tiers") == [free, pro]
    chosen: dict[str, Any] = {"limits": ["7/second", "90/minute burst 5"], "consistency": "strict"}
    body = {**chosen, "reason": "a new one"}
    made = (await admin.call("PUT", "/tiers/max", json=body)).json()
    assert (made["kind"], made["reason"]) == ("set-tier", "a new one")
    tier = await admin.call("GET", "/tiers/max")
    assert tier.json() == {"name": "max", **chosen}
    assert tier.headers["etag"] == '"v2"'
    await admin.call("PUT", "/tiers/max", json={"limits": chosen["limits"]})
    assert (await admin.call("GET", "/tiers/max")).json() == {
        "name": "max",
        **chosen,
        "consistency": None,
    }
    found = await admin.rejected("PUT", "/tiers/max", 422, json={**chosen, "consistency": "strong"})
    assert found["problems"][0]["where"] == "consistency"
    assert 'unknown value "strong"; known: "strict", "leased"' in found["problems"][0]["message"]
    assert (await admin.call("DELETE", "/tiers/max")).json()["kind"] == "remove-tier"
    await admin.rejected("GET", "/tiers/max", 404)
    await admin.rejected("DELETE", "/tiers/max", 404)


@pytest.mark.parametrize("limits", ["5/x", [], [{"limit": 0, "per": 1}], {}, 5, None, [[]]])
async def test_invalid_limits_are_rejected(admin: Admin, limits: Any) -> None:
    """The problem has the place in the body."""
    found = await admin.rejected("PUT", "/tiers/max", 422, json={"limits": limits})
    assert found["problems"][0]["where"].startswith("limits")


async def test_a_tier_in_use_cannot_be_removed(admin: Admin) -> None:
    """The error names the rule or the members."""
    found = await admin.rejected("DELETE", "/tiers/pro", 422)
    places = [each["where"] for each in found["problems"]]
    assert places == ["rules[0].tiers", 'assign["user:42"]']


async def test_assignments_are_read_made_and_removed(admin: Admin) -> None:
    """All of them, those of a tier, or one."""
    acme = {"subject": "tenant:acme", "tier": "free"}
    assert await items(admin, "/assignments?tier=free") == [acme]
    assert (await admin.call("GET", "/assignments/tenant:acme")).json() == acme
    await admin.call("PUT", "/assignments/user:a%2Fb", json={"tier": "pro", "reason": "paid"})
    assert (await admin.call("GET", "/assignments/user:a%2Fb")).json()["tier"] == "pro"
    await admin.call("DELETE", "/assignments/user:a%2Fb")
    await admin.rejected("GET", "/assignments/user:a%2Fb", 404)
    await admin.rejected("DELETE", "/assignments/user:a%2Fb", 404)


@pytest.mark.parametrize(
    ("subject", "tier", "words"),
    [
        ("user:1", "gold", "there is no tier"),
        ("somebody", "pro", "does not name a user, API key or tenant"),
        ("ip:10.0.0.1", "pro", "does not name a user, API key or tenant"),
    ],
)
async def test_invalid_assignments_are_rejected(
    admin: Admin, subject: str, tier: str, words: str
) -> None:
    """422 with a valid example."""
    found = await admin.rejected("PUT", f"/assignments/{subject}", 422, json={"tier": tier})
    assert words in found["detail"]


async def test_overrides_are_added_and_removed(admin: Admin) -> None:
    """By id or by subject; beside the document and in it. They make no version."""
    body = {"for": {"user": "7"}, "rule": "orders", "limits": ["99/second"], "until": "2h"}
    made = (
        await admin.call("POST", "/overrides", json=body, headers={"X-Reason": "launch"})
    ).json()
    assert (made["number"], made["change"], made["kind"]) == (1, 1, "override")
    first, second = await items(admin, "/overrides")
    assert (first["id"], first["author"], first["reason"]) == (made["key"], "admin-token", "launch")
    left = datetime.fromisoformat(first["until"]) - datetime.now(UTC)
    assert timedelta(hours=1) < left <= timedelta(hours=2)
    assert second == {"for": {"user": "7"}, "multiply": 2}
    until = (datetime.now(UTC) + timedelta(days=1)).isoformat().replace("+00:00", "Z")
    own = {
        "id": "mine",
        "for": {"ip": "192.0.2.7"},
        "multiply": 3,
        "until": until,
        "reason": "mine",
    }
    version = (await admin.call("POST", "/overrides", json=own)).json()
    assert (version["reason"], version["key"]) == ("mine", "mine")
    assert (await items(admin, "/overrides"))[0] == {**own, "author": "admin-token"}
    assert (await admin.call("GET", "/overrides/mine")).json() == {**own, "author": "admin-token"}
    assert (await admin.call("GET", f"/overrides/{made['key']}")).json() == first
    found = await admin.rejected("GET", "/overrides/gone", 404)
    assert "there is no override 'gone'" in found["detail"]
    found = await admin.rejected("POST", "/overrides", 409, json=own)
    assert "there is an override 'mine' already" in found["detail"]
    await admin.call("DELETE", "/overrides/user:7?rule=orders")
    assert (await admin.call("DELETE", "/overrides/user:7")).json()["number"] == 2
    await admin.rejected("DELETE", "/overrides/user:7", 404)
    await admin.call("DELETE", "/overrides/mine")
    await admin.rejected("DELETE", "/overrides/mine", 404)
    assert await items(admin, "/overrides") == []


async def test_an_override_of_the_document_is_found_by_its_id(tmp_path: Path) -> None:
    """Also if the rules come from a file, where there are no other overrides."""
    rules = "{version: 1, overrides: [{id: old, for: {user: '7'}, multiply: 2}]}"
    path = tmp_path / "limits.yaml"
    path.write_text(rules, encoding="utf-8")
    async with admin_of(tmp_path, str(path), None) as admin:
        found = (await admin.call("GET", "/overrides/old")).json()
        assert found == {"id": "old", "for": {"user": "7"}, "multiply": 2}
        await admin.rejected("GET", "/overrides/gone", 404)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"until": None}, "the override has no end; write until: 2h"),
        ({"until": "2020-01-01T00:00:00Z"}, "is in the past"),
        ({"reason": None}, "the override has no reason; say why"),
    ],
)
async def test_an_override_needs_a_reason_and_an_end(
    admin: Admin, changed: dict[str, Any], words: str
) -> None:
    """In the future; the error says what is missing."""
    body = {"for": {"user": "7"}, "multiply": 2, "until": "2h", "reason": "launch", **changed}
    body = {name: value for name, value in body.items() if value is not None}
    found = await admin.rejected("POST", "/overrides", 400, json=body)
    assert words in found["detail"]


async def test_a_rollback_leaves_entries_alone(admin: Admin) -> None:
    """Tiers, overrides and list entries that were made since stay in force."""
    await admin.call("PUT", "/tiers/max", json={"limits": "5/s"})
    await admin.call("PUT", "/assignments/user:1", json={"tier": "pro"})
    await admin.call("POST", "/lists/deny", json={"entry": "user:evil"})
    await admin.call("POST", "/versions/1/rollback")
    assert (await admin.call("GET", "/assignments/user:1")).json()["tier"] == "pro"
    assert await items(admin, "/lists/deny") == ["user:evil"]


async def test_a_tier_with_members_beside_the_document_is_not_removed(admin: Admin) -> None:
    """Its members would fall back to other limits."""
    await admin.call("PUT", "/tiers/max", json={"limits": "5/s"})
    await admin.call("PUT", "/assignments/user:1", json={"tier": "max"})
    found = await admin.rejected("DELETE", "/tiers/max", 409)
    assert "'user:1' is assigned to it beside the document" in str(found)
    await admin.call("DELETE", "/assignments/user:1")
    await admin.call("DELETE", "/tiers/max")


async def test_the_etag_of_a_list_changes_with_its_entries(admin: Admin) -> None:
    """A client that asks for news sees a change that made no version."""
    before = (await admin.call("GET", "/assignments")).headers["etag"]
    await admin.call("GET", "/assignments", 304, headers={"If-None-Match": before})
    made = await admin.call("PUT", "/assignments/user:1", json={"tier": "pro"})
    found = await admin.call("GET", "/assignments", headers={"If-None-Match": before})
    assert found.headers["etag"] == made.headers["etag"] == '"v1-1"'
    await admin.call("PUT", "/tiers/max", json={"limits": "5/s"}, headers={"If-Match": '"v1-1"'})


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"for": {"user": "7"}}, "override"),
        ({"multiply": 2}, "override"),
        ({"for": {"user": "7"}, "multiply": 0}, "override.multiply"),
        ({"for": {"user": "7"}, "multiply": 2, "rule": "nope"}, "override.rule"),
        ({"for": {"ip": "7"}, "multiply": 2}, "override.for.ip"),
        ({"for": {"user": "7"}, "multiply": 2, "until": "tomorrow"}, "override.until"),
    ],
)
async def test_invalid_overrides_are_rejected(admin: Admin, body: Any, where: str) -> None:
    """The problem has the place in the body."""
    found = await admin.rejected("POST", "/overrides", 422, json=body)
    assert any(each["where"].startswith(where) for each in found["problems"]), found["problems"]


@pytest.mark.parametrize(
    ("subject", "words"),
    [("tier:7", "or a subject"), ("ip:7", "is not an address"), ("user:", "or a subject")],
)
async def test_an_override_needs_a_subject(admin: Admin, subject: str, words: str) -> None:
    """A user, key, tenant or address."""
    found = await admin.rejected("DELETE", f"/overrides/{subject}", 400)
    assert words in found["detail"]


async def test_list_entries_are_read_added_and_removed(admin: Admin) -> None:
    """Each list has its own entries; those of the document are removed by a version."""
    assert await items(admin, "/lists/allow") == ["api_key:sk_internal_*", "10.0.0.0/8"]
    for change in (1, 2):
        made = (await admin.call("POST", "/lists/deny", json={"entry": "user:1"})).json()
        assert (made["number"], made["change"], made["key"]) == (1, change, "deny user:1")
    assert await items(admin, "/lists/deny") == ["user:1"]
    await admin.call("DELETE", "/lists/deny?entry=user:1")
    assert await items(admin, "/lists/deny") == []
    removed = await admin.call("DELETE", "/lists/allow?entry=10.0.0.0/8")
    assert removed.json()["number"] == 2
    assert await items(admin, "/lists/allow") == ["api_key:sk_internal_*"]
    await admin.rejected("DELETE", "/lists/allow?entry=10.0.0.0/8", 404)
    found = await admin.rejected("POST", "/lists/deny", 400, json={"entry": "ip:nope"})
    assert "entry 'ip:nope'" in found["detail"]
    await admin.rejected("POST", "/lists/allow", 409, json={"entry": "0.0.0.0/0"})


async def test_long_lists_have_pages(admin: Admin) -> None:
    """Following the links gives each entry once."""
    for number in range(5):
        await admin.call("PUT", f"/assignments/user:n{number}", json={"tier": "pro"})
    seen: list[str] = []
    url: str | None = "/v1/admin/assignments?tier=pro&limit=2"
    pages = 0
    while url is not None:
        page = await admin.client.get(url)
        seen += [each["subject"] for each in page.json()["items"]]
        assert page.json()["total"] == 6
        link = page.links.get("next")
        assert (link is None) == (page.json()["next"] is None)
        url = link["url"] if link else None
        pages += 1
    assert pages == 3
    assert seen == [*(f"user:n{number}" for number in range(5)), "user:42"]
    assert await items(admin, "/assignments?offset=100") == []


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=x", "offset=-1", "offset=1e9"])
@pytest.mark.parametrize("path", ["/tiers", "/assignments", "/overrides", "/lists/allow"])
async def test_a_page_has_1_to_200_rows(admin: Admin, path: str, query: str) -> None:
    """Other sizes are rejected."""
    found = await admin.rejected("GET", f"{path}?{query}", 400)
    assert found["problems"][0]["where"] == f"query.{query.partition('=')[0]}"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/tiers/max", {"limits": "5/s"}),
        ("PUT", "/assignments/user:1", {"tier": "pro"}),
        ("DELETE", "/assignments/user:42", None),
        ("POST", "/overrides", {**TWICE, "for": {"user": "1"}}),
        ("DELETE", "/overrides/user:7", None),
        ("POST", "/lists/deny", {"entry": "user:1"}),
        ("DELETE", "/lists/allow?entry=10.0.0.0/8", None),
        ("PUT", "/rules/new", {"by": "tenant", "limits": "5/s"}),
        ("DELETE", "/rules/login", None),
        ("POST", "/versions/1/rollback", None),
    ],
)
async def test_every_change_may_have_a_condition(
    admin: Admin, method: str, path: str, body: Any
) -> None:
    """412 if the version is not the newest, and nothing has changed."""
    await admin.call("PUT", "/tiers/other", json={"limits": "1/s"})
    stale = await admin.call(method, path, 412, json=body, headers={"If-Match": '"v1"'})
    assert stale.headers["etag"] == '"v2"'
    made = await admin.call(method, path, json=body, headers={"If-Match": '"v2"'})
    is_entry = made.json()["change"] is not None
    assert made.headers["etag"] == ('"v2-1"' if is_entry else '"v3"')
