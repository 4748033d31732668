"""The admin application: public paths, browser headers, and concurrent requests."""

from __future__ import annotations

import asyncio

from tests.service.admin.client import Admin, admin, template

__all__ = ["admin", "template"]  # fixtures, found by name


async def test_the_openapi_document_needs_no_token(admin: Admin) -> None:
    """/openapi.json and /docs show only what the source shows."""
    admin.client.headers.pop("Authorization")
    for path, kind in (("/openapi.json", "application/json"), ("/docs", "text/html")):
        answer = await admin.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)


async def test_no_reply_may_run_in_a_browser(admin: Admin) -> None:
    """Errors too. The page /docs has its own scripts and styles and nothing else."""
    for path in ("/v1/admin/rules", "/v1/admin/nope", "/openapi.json"):
        answer = await admin.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
    policy = (await admin.client.get("/docs")).headers.get_list("content-security-policy")
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy[0]


async def test_caches_must_revalidate(admin: Admin) -> None:
    """Each use sends the ETag again."""
    assert (await admin.call("GET", "/rules")).headers["cache-control"] == "no-cache"


async def test_concurrent_changes_are_all_made(admin: Admin) -> None:
    """Twenty changes of entries have twenty numbers."""
    bodies = [{"entry": f"user:{number}"} for number in range(20)]
    made = await asyncio.gather(*(admin.call("POST", "/lists/deny", json=body) for body in bodies))
    assert sorted(each.json()["change"] for each in made) == list(range(1, 21))
    entries = (await admin.call("GET", "/lists/deny?limit=200")).json()["items"]
    assert sorted(entries) == sorted(body["entry"] for body in bodies)


async def test_one_of_several_conditional_changes_is_made(admin: Admin) -> None:
    """The others get the newest version."""
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
