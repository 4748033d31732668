"""The client that calls the admin API for an operator."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ratekeeper.service.admin.api import admin_app
from ratekeeper.service.console.client import AdminClient, ApiProblem, header_text
from ratekeeper.service.http.tokens import CALLER, Token
from tests.service.console.client import ConsoleClient


async def test_it_has_the_rights_of_the_token(console: ConsoleClient) -> None:
    """A reader reads, and cannot change; the problem is the admin API's."""
    admin = admin_app(console.context)
    reader = AdminClient(admin, Token("ann", "read"))
    assert (await reader.get("/node"))["node_id"] == "node-1"
    with pytest.raises(ApiProblem) as caught:
        await reader.call("PUT", "/assignments/user%3A1", data={"tier": "pro"})
    assert (caught.value.status, caught.value.code) == (403, "PERMISSION_DENIED")
    assert "ann" in caught.value.detail
    changed = await AdminClient(admin, Token("bob", "admin")).call(
        "PUT", "/assignments/user%3A1", data={"tier": "pro"}, headers={"X-Reason": "a trial"}
    )
    assert changed.json()["author"] == "bob"
    await admin.state.control.close()


async def test_parameters(console: ConsoleClient) -> None:
    """Empty ones are left out, and an underscore at the end of a name is dropped."""
    admin = admin_app(console.context)
    reader = AdminClient(admin, Token("ann", "read"))
    found = await reader.get("/audit", author="setup", key="", to=None, from_="2020-01-01")
    assert [each["author"] for each in found["items"]] == ["setup"]
    with pytest.raises(ApiProblem, match="unknown field"):
        await reader.get("/audit", person="ann")
    await admin.state.control.close()


def test_a_reason_is_one_line() -> None:
    """A header has no line break."""
    assert header_text("größer\r\nX-Other: 1") == "größer X-Other: 1".encode()


async def test_a_file_is_passed_on_while_it_is_made() -> None:
    """With the caller's token and the query; the browser does not wait for the end."""
    seen: list[Scope] = []

    async def admin(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            assert len(sent) == number + 1
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    async def nothing() -> Message:
        return {"type": "http.request", "body": b""}

    client = AdminClient(admin, Token("ann", "read"))
    query = {"subject": ["a", "b"], "from_": "2020", "rule": ""}
    file = client.file("/usage", query, lambda error: Response(str(error), error.status))
    await file({"type": "http", "method": "GET", "headers": [(b"cookie", b"x")]}, nothing, keep)
    assert b"".join(each.get("body", b"") for each in sent) == b"012"
    scope = seen[0]
    assert (scope["path"], scope["query_string"]) == (
        *("/v1/admin/usage", b"subject=a&subject=b&from=2020"),
    )
    assert (scope[CALLER].name, scope["headers"]) == ("ann", [])


async def test_a_file_that_is_rejected(console: ConsoleClient) -> None:
    """The caller makes the reply of the problem, and nothing of the file was sent."""
    admin = admin_app(console.context)
    client = AdminClient(admin, Token("ann", "read"))
    file = client.file("/usage", {"step": "week"}, lambda error: Response(error.code, error.status))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(file), base_url="http://test"
    ) as browser:
        answer = await browser.get("/")
    assert (answer.status_code, answer.text) == (400, "INVALID_REQUEST")
    await admin.state.control.close()
