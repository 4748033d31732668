"""History, differences, going back and the audit over HTTP."""

from __future__ import annotations

import pytest

from tests.service.admin.nodes import AUTHOR, RULES, Admin, admin, template
from tollkeeper.rules.document.reading import read
from tollkeeper.rules.document.writing import to_yaml

__all__ = ["admin", "template"]  # fixtures, found by name


async def changed(admin: Admin, count: int) -> None:
    """So many more versions, each with another limit of one tier."""
    for number in range(2, count + 2):
        body = {"limits": f"{number}/second", "reason": f"no. {number}"}
        await admin.ask("PUT", "/tiers/max", json=body)


@pytest.mark.parametrize(("path", "name"), [("/versions", "number"), ("/audit", "version")])
async def test_history_and_audit_come_in_pages(admin: Admin, path: str, name: str) -> None:
    """The newest first; the links lead to the end, and each is seen once."""
    await changed(admin, 4)
    seen: list[int] = []
    url: str | None = f"/v1/admin{path}?limit=2"
    while url is not None:
        page = await admin.client.get(url)
        seen += [each[name] for each in page.json()["items"]]
        link = page.links.get("next")
        assert (link is None) == (page.json()["next"] is None)
        url = link["url"] if link else None
    assert seen == [5, 4, 3, 2, 1]
    whole = await admin.ask("GET", f"{path}?limit=5")
    assert (len(whole.json()["items"]), whole.json()["next"]) == (5, None)
    for query in ("limit=0", "limit=201", "before=0", "before=x"):
        await admin.refused("GET", f"{path}?{query}", 422)


async def test_a_version_is_read_with_its_text(admin: Admin) -> None:
    """As it was put in; of a number that was never given, 404."""
    first = (await admin.ask("GET", "/versions/1")).json()
    assert (first["number"], first["author"], first["kind"]) == (1, AUTHOR, "apply")
    assert first["text"] == to_yaml(read(RULES))
    found = await admin.refused("GET", "/versions/9", 404)
    assert found["detail"] == "there is no version 9; there are 1 to 1"
    for number in ("0", "-1", "x", str(2**31)):
        await admin.refused("GET", f"/versions/{number}", 422)


async def test_the_difference_between_any_two(admin: Admin) -> None:
    """By default to the one before; of the first, to nothing."""
    await changed(admin, 2)
    step = (await admin.ask("GET", "/versions/3/diff")).json()
    assert (step["before"], step["after"]) == (2, 3)
    assert "-  max: [2/second]\n+  max: [3/second]" in step["diff"]
    back = (await admin.ask("GET", "/versions/2/diff?against=3")).json()["diff"]
    assert "-  max: [3/second]\n+  max: [2/second]" in back
    assert (await admin.ask("GET", "/versions/2/diff?against=2")).json()["diff"] == ""
    for query in ("", "?against=0"):
        first = (await admin.ask("GET", f"/versions/1/diff{query}")).json()
        assert first["diff"].startswith("--- no version\n+++ version 1\n")
    await admin.refused("GET", "/versions/2/diff?against=9", 404)
    await admin.refused("GET", "/versions/9/diff", 404)


async def test_going_back_makes_a_new_version(admin: Admin) -> None:
    """With the old text, the reason, and no need to force what was accepted once."""
    unsafe = RULES + "deny: ['*']\n"
    await admin.ask("PUT", "/rules?force=true", content=unsafe)
    await admin.ask("POST", "/versions/1/rollback")
    headers = {"X-Reason": "on purpose", "If-Match": '"v3"'}
    made = await admin.ask("POST", "/versions/2/rollback", headers=headers)
    version = made.json()
    assert (version["number"], version["kind"], version["base"]) == (4, "rollback", 3)
    assert (version["author"], version["reason"]) == ("admin-token", "on purpose")
    texts = [(await admin.ask("GET", f"/versions/{n}")).json()["text"] for n in (2, 4)]
    assert texts[0] == texts[1]
    await admin.refused("POST", "/versions/9/rollback", 404)


async def test_a_long_difference_is_cut_in_the_list(admin: Admin) -> None:
    """It is whole where one version is asked for."""
    rules = [{"id": f"r{n}", "by": ["user"], "limits": ["5/s"]} for n in range(1_000)]
    await admin.ask("PUT", "/rules?force=true", json={"version": 1, "rules": rules})
    entry = (await admin.ask("GET", "/audit?limit=1")).json()["items"][0]
    whole = (await admin.ask("GET", "/versions/2/diff")).json()["diff"]
    assert len(entry["diff"]) == 10_000
    assert whole.startswith(entry["diff"])
    assert len(whole) > 20_000


async def test_the_audit_says_who_changed_what(admin: Admin) -> None:
    """With the difference."""
    await changed(admin, 1)
    entry = (await admin.ask("GET", "/audit?limit=1")).json()["items"][0]
    assert (entry["version"], entry["author"], entry["reason"]) == (2, "admin-token", "no. 2")
    assert (entry["kind"], entry["forced"]) == ("set-tier", "")
    assert "+  max: [2/second]" in entry["diff"]
