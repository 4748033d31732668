"""The client that calls the admin API for an operator."""

from __future__ import annotations

import pytest

from tests.service.console.client import ConsoleClient
from tollkeeper.service.admin.api import admin_app
from tollkeeper.service.console.client import AdminClient, ApiProblem, header_text
from tollkeeper.service.http.tokens import Token


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
