"""The admin application: public paths, browser headers, and concurrent requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ratekeeper.service.admin import api
from ratekeeper.service.admin.api import DROPPED_BYTES_MAX, BodyDrain
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


# ── Bodies of rejected requests ────────────────────────────────────────────────────────────────

MIB = b"x" * 2**20


class Exchange:
    """A client that sends chunks, and the order of events that it saw."""

    def __init__(self, chunks: int, headers: dict[str, str]) -> None:
        self.left = chunks
        self.seen: list[str] = []
        self.scope = {
            "type": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

    async def receive(self) -> dict[str, Any]:
        """Return the next chunk; after the last one, wait for ever."""
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        self.seen.append("chunk")
        return {"type": "http.request", "body": MIB, "more_body": self.left > 0}

    async def send(self, message: dict[str, Any]) -> None:
        """Record the message."""
        self.seen.append(message["type"].rpartition(".")[2])

    async def run(self, reads: int) -> list[str]:
        """Run an application that reads some chunks and replies."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(reads):
                await receive()
            await send({"type": "http.response.start", "status": 413})
            await send({"type": "http.response.body"})

        await BodyDrain(app)(self.scope, self.receive, self.send)  # type: ignore[arg-type]  # loose
        return self.seen


@pytest.mark.parametrize("reads", [0, 1, 3])
async def test_the_rest_of_a_body_is_read_before_the_reply(reads: int) -> None:
    """Whether the application has read nothing, a part or all of it."""
    seen = await Exchange(3, {"content-length": str(3 * len(MIB))}).run(reads)
    assert seen == ["chunk", "chunk", "chunk", "start", "body"]


async def test_a_body_without_a_length_is_read_too() -> None:
    """To its end, or to the maximum."""
    seen = await Exchange(4, {"transfer-encoding": "chunked"}).run(0)
    assert seen == [*["chunk"] * 4, "start", "body"]
    seen = await Exchange(1_000, {"transfer-encoding": "chunked"}).run(0)
    assert seen.count("chunk") == DROPPED_BYTES_MAX // len(MIB) + 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-length": "0"},
        {"content-length": str(DROPPED_BYTES_MAX + 1)},
        {"content-length": "9" * 30},
        {"content-length": "x"},
        {"content-length": "100", "expect": "100-continue"},
    ],
)
async def test_some_bodies_are_not_read(headers: dict[str, str]) -> None:
    """No body, one that is too long, and one that is sent only on request."""
    assert await Exchange(1, headers).run(0) == ["start", "body"]


async def test_a_client_that_stops_in_the_middle_gets_its_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a timeout."""
    monkeypatch.setattr(api, "DROPPING_SECONDS_MAX", 0.01)
    exchange = Exchange(1, {"transfer-encoding": "chunked"})
    exchange.left = 0
    assert await exchange.run(0) == ["start", "body"]


async def test_only_some_requests_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never end their bodies cannot occupy the worker."""
    monkeypatch.setattr(api, "DROPPING_MAX", 2)

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401})

    around = BodyDrain(app)
    endless = [Exchange(0, {"content-length": "10"}) for _ in range(3)]

    def started(each: Exchange) -> asyncio.Task[None]:
        scope: Any = each.scope
        receive: Any = each.receive
        send: Any = each.send
        return asyncio.create_task(around(scope, receive, send))

    waiting = [started(each) for each in endless]
    await asyncio.wait(waiting[2:], timeout=30)
    assert [each.seen for each in endless] == [[], [], ["start"]]
    for task in waiting[:2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert around._dropping == 0, "a place is free again"
