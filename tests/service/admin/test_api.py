"""The application as a whole: what is open, what browsers are told, and many at once."""

from __future__ import annotations

import asyncio

from tests.service.admin.nodes import Admin, admin, template

__all__ = ["admin", "template"]  # fixtures, found by name


async def test_the_description_needs_no_token(admin: Admin) -> None:
    """/openapi.json and /docs are what the source says."""
    admin.client.headers.pop("Authorization")
    for path, kind in (("/openapi.json", "application/json"), ("/docs", "text/html")):
        answer = await admin.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)


async def test_no_answer_may_run_in_a_browser(admin: Admin) -> None:
    """Refusals too. The page has its own style and nothing else."""
    for path in ("/v1/admin/rules", "/v1/admin/nope", "/openapi.json"):
        answer = await admin.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
    policy = (await admin.client.get("/docs")).headers.get_list("content-security-policy")
    assert len(policy) == 1
    assert "script-src" not in policy[0]
    assert "style-src 'sha256-" in policy[0]
    assert "unsafe" not in policy[0]


async def test_what_is_asked_for_is_not_kept_by_caches_unasked(admin: Admin) -> None:
    """Each use asks again, with the ETag."""
    assert (await admin.ask("GET", "/rules")).headers["cache-control"] == "no-cache"


async def test_changes_at_once_are_all_made(admin: Admin) -> None:
    """Twenty small edits without a condition: twenty versions, and none is lost."""
    bodies = [{"entry": f"user:{number}"} for number in range(20)]
    made = await asyncio.gather(*(admin.ask("POST", "/lists/deny", json=body) for body in bodies))
    assert sorted(each.json()["number"] for each in made) == list(range(2, 22))
    entries = (await admin.ask("GET", "/lists/deny?limit=200")).json()["items"]
    assert sorted(entries) == sorted(body["entry"] for body in bodies)


async def test_of_changes_of_one_version_one_is_made(admin: Admin) -> None:
    """The others are told that there is another version now."""
    answers = await asyncio.gather(
        *(
            admin.client.put(
                f"/v1/admin/tiers/t{number}",
                json={"limits": "5/second"},
                headers={"If-Match": '"v1"'},
            )
            for number in range(5)
        )
    )
    assert sorted(each.status_code for each in answers) == [200, 412, 412, 412, 412]
