"""All operations: tokens before bodies, sizes, types and conditions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from ratekeeper.service.admin.control import VersionCondition
from ratekeeper.service.admin.operations import condition_of, tags_of, wants_yaml
from ratekeeper.service.admin.problems import AdminError
from ratekeeper.service.http import incoming
from ratekeeper.service.http.incoming import CALL_BYTES
from tests.service.admin.client import Admin, admin, template

__all__ = ["admin", "template"]  # fixtures, found by name

JSON = {"Content-Type": "application/json"}


# ── Conditions ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("header", "tags"),
    [
        ("*", None),
        (' "v1" ', ["v1"]),
        ('"v1","v2" , "x"', ["v1", "v2", "x"]),
        ('W/"v1", "v2"', ["v2"]),
        ('"a,b"', ["a,b"]),
        ('""', [""]),
    ],
)
def test_entity_tags_are_parsed(header: str, tags: list[str] | None) -> None:
    """Weak tags never match a change."""
    assert tags_of(header) == tags


@pytest.mark.parametrize(
    "header", ["", " ", "v1", '"v1', '"v1" "v2"', "*,*", '"v1";', '"a",' * 500]
)
def test_a_malformed_condition_is_rejected(header: str) -> None:
    """If it merely did not match, the caller would look for a concurrent change."""
    with pytest.raises(AdminError, match="is not a list of ETags"):
        tags_of(header)


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "condition"),
    [
        (None, None, None),
        ('"v3"', None, VersionCondition(frozenset({3}))),
        ('"v9999999999"', None, VersionCondition(frozenset())),
        ('"v3", "v4", "other", "v05"', None, VersionCondition(frozenset({3, 4}))),
        ('W/"v3"', None, VersionCondition(frozenset())),
        ("*", None, VersionCondition(any_version=True)),
        (None, "*", VersionCondition(frozenset({0}))),
    ],
)
def test_the_condition_of_a_change(
    if_match: str | None, if_none_match: str | None, condition: VersionCondition | None
) -> None:
    """Foreign tags match no version."""
    assert condition_of(if_match, if_none_match) == condition


def test_contradictory_conditions_are_rejected() -> None:
    """On a change, `If-None-Match` has one meaning: there is no version yet."""
    for given_ in (("*", "*"), (None, '"v1"')):
        with pytest.raises(AdminError, match="a change takes If-Match"):
            condition_of(*given_)


@pytest.mark.parametrize(
    ("accept", "yaml"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/yaml", True),
        ("text/yaml, application/json", True),
        ("text/yaml;q=0.5, application/json;q=0.9", False),
        ("application/x-yaml;q=0", False),
        ("application/yaml;q=oops", False),
        ("text/html, application/yaml;q=0.9, */*;q=0.8", True),
    ],
)
def test_yaml_is_sent_if_accept_prefers_it(accept: str, yaml: bool) -> None:
    """By the weights; among equals, YAML wins because it is named."""
    assert wants_yaml(accept) is yaml


# ── Tokens ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/rules", "read"),
        ("PUT", "/rules", "admin"),
        ("POST", "/rules/validate", "read"),
        ("POST", "/rules/preview", "read"),
        ("DELETE", "/rules/orders", "admin"),
        ("GET", "/quota?user=1", "read"),
        ("POST", "/quota/reset", "admin"),
        ("POST", "/quota/grant", "admin"),
        ("POST", "/explain", "read"),
        ("POST", "/versions/1/rollback", "admin"),
        ("GET", "/node", "read"),
    ],
)
async def test_each_operation_requires_its_role(
    admin: Admin, method: str, path: str, role: str
) -> None:
    """401 without a token, with how to make one; 403 with a smaller role."""
    admin.client.headers.pop("Authorization")
    unknown = await admin.call(method, path, 401)
    assert unknown.headers["www-authenticate"] == 'Bearer realm="ratekeeper"'
    assert f"ratekeeper token create NAME --role {role}" in unknown.json()["detail"]
    less = {"read": ["check"], "admin": ["check", "read"]}[role]
    for each in less:
        headers = {"Authorization": f"Bearer {admin.secrets[each]}"}
        found = await admin.rejected(method, path, 403, headers=headers)
        assert found["error"]["code"] == "PERMISSION_DENIED"
    enough = {"read": ["read", "admin"], "admin": ["admin"]}[role]
    for each in enough:
        headers = {"Authorization": f"Bearer {admin.secrets[each]}"}
        answer = await admin.client.request(method, f"/v1/admin{path}", headers=headers)
        assert answer.status_code not in {401, 403}


async def test_the_body_of_an_unauthorized_request_is_not_read(admin: Admin) -> None:
    """Without a token, a client cannot fill the memory."""
    read: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1_000):
            read.append(number)
            yield b"x" * 100_000

    headers = {"Authorization": "Bearer rk_wrong", "Content-Length": str(1_000 * 100_000)}
    await admin.rejected("PUT", "/rules", 401, content=endless(), headers=headers)
    assert not read


async def test_a_body_has_a_maximum_size(admin: Admin) -> None:
    """By its declared and by its real size; one byte less is read."""
    read: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1_000):
            read.append(number)
            yield b"x" * 100_000

    found = await admin.rejected("PUT", "/rules", 413, content=endless())
    assert found["detail"] == "a body may have at most 5,242,880 bytes here; send less"
    assert len(read) < 60, "5 MiB are read"
    too_long = b" " * (CALL_BYTES + 1)
    await admin.rejected("POST", "/explain", 413, content=too_long, headers=JSON)
    whole = b'{"user": "7"}'.ljust(CALL_BYTES)
    await admin.call("POST", "/explain", 200, content=whole, headers=JSON)


async def sent_in_part(admin: Admin, rest: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """Send half of a body, then call `rest`; return the reply."""
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]
    said: list[Any] = []

    async def receive() -> Any:
        return pieces.pop() if pieces else await rest()

    async def send(message: Any) -> None:
        said.append(message)

    token = f"Bearer {admin.secrets['admin']}".encode()
    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v1/admin/rules",
        "query_string": b"",
        "headers": [(b"authorization", token), (b"content-type", b"application/json")],
    }
    await admin.app(scope, receive, send)
    return said[0]["status"], json.loads(said[1]["body"])["error"]["code"]


async def test_an_incomplete_body_is_rejected(admin: Admin) -> None:
    """It is a 400 and not a defect with a traceback."""

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    assert await sent_in_part(admin, gone) == (400, "BODY_INCOMPLETE")


async def test_a_body_that_does_not_arrive_is_408(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client with any token could occupy the worker."""
    monkeypatch.setattr(incoming, "LARGE_SECONDS_MAX", 0.0)
    never = asyncio.Event()
    assert await sent_in_part(admin, never.wait) == (408, "BODY_TOO_SLOW")


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/xml"])
async def test_a_body_of_another_type_is_rejected(admin: Admin, kind: str) -> None:
    """415, with the type that is supported."""
    headers = {"Content-Type": kind}
    found = await admin.rejected("POST", "/explain", 415, content=b"{}", headers=headers)
    assert "Content-Type: application/json" in found["detail"]
    found = await admin.rejected("PUT", "/rules", 415, content=b"version: 1", headers=headers)
    assert "application/yaml or application/json" in found["detail"]


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded"])
async def test_curl_needs_no_type(admin: Admin, kind: str) -> None:
    """`curl -d` sends the type of a form; the body is read as JSON, or as a document."""
    headers = {"Content-Type": kind}
    found = await admin.call("POST", "/explain", content=b'{"user": "7"}', headers=headers)
    assert found.json()["verdict"] == "allowed"
    document = b"version: 1\nrules: [{id: a, by: user, limits: 5/s}]"
    await admin.call("PUT", "/rules?force=true", content=document, headers=headers)


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/explain", {"usr": "42"}, "body.usr"),
        ("/explain", {"user": 42}, "body.user"),
        ("/explain", {"cost": True}, "body.cost"),
        ("/explain", {"cost": -1}, "body.cost"),
        ("/explain", {"attributes": {"a": 1}}, "body.attributes.a"),
        ("/explain", [], "body"),
        ("/explain", "x", "body"),
        ("/quota/grant", {"user": "1"}, "body.units"),
        ("/quota/grant", {"user": "1", "units": 1, "ttl_seconds": 0}, "body.ttl_seconds"),
        ("/lists/deny", {"entry": ""}, "body.entry"),
        ("/lists/nope", {"entry": "x"}, "path.list_name"),
    ],
)
async def test_an_invalid_field_is_400_with_its_place(
    admin: Admin, path: str, body: Any, where: str
) -> None:
    """The reply does not repeat the input."""
    found = await admin.rejected("POST", path, 400, json=body)
    assert where in [each["where"] for each in found["problems"]]


@pytest.mark.parametrize("path", ["/rules/%ff", "/quota?user=%ff", "/tiers/a%c3"])
async def test_a_url_that_is_not_utf8_is_rejected(admin: Admin, path: str) -> None:
    """A replacement character would make it another name."""
    found = await admin.rejected("GET", path, 400)
    assert found["error"]["code"] == "NOT_UTF8"


async def test_a_reason_may_be_in_any_script(admin: Admin) -> None:
    """In a header as UTF-8 bytes, or in the body."""
    reason = "größere Kunden 🦊"
    headers = {"X-Reason": reason.encode()}
    answer = await admin.call(
        "PUT",
        "/tiers/max",
        json={"limits": "90/second"},
        headers=headers,  # type: ignore[arg-type]  # bytes
    )
    assert answer.json()["reason"] == reason
    body = {"limits": "91/second", "reason": reason}
    answer = await admin.call("PUT", "/tiers/max", json=body, headers={"X-Reason": "other"})
    assert answer.json()["reason"] == reason


@pytest.mark.parametrize("reason", ["x" * 1_001, "\x1b[2J", "é" * 1_001])
async def test_a_wrong_reason_in_the_header_is_rejected(admin: Admin, reason: str) -> None:
    """Also if the body has another reason, which would replace it."""
    headers = {"X-Reason": reason.encode()}
    body = {"tier": "pro", "reason": "fine"}
    found = await admin.rejected("PUT", "/assignments/user:1", 400, json=body, headers=headers)
    assert "reason=" in found["detail"]


async def test_a_line_break_at_the_end_of_a_path_names_no_rule(admin: Admin) -> None:
    """The framework would drop it, and remove the rule without it."""
    for path in ("/rules/orders%0A", "/assignments/user:42%0A", "/tiers/pro%0A"):
        found = await admin.rejected("DELETE", path, 400)
        assert "line break" in found["detail"], path
    assert (await admin.call("GET", "/rules")).headers["etag"] == '"v1"'


@pytest.mark.parametrize("path", ["/assignments/user:%00", "/assignments?tier=%00"])
async def test_a_nul_in_a_url_is_rejected(admin: Admin, path: str) -> None:
    """PostgreSQL would reject the query, as if it were unavailable."""
    assert "NUL" in (await admin.rejected("GET", path, 400))["detail"]


@pytest.mark.parametrize("name", ["a/b", "€🦊", "a%2Fb", "../..", "validate", "x/promote", "#?&"])
async def test_a_rule_may_have_any_printable_name(admin: Admin, name: str) -> None:
    """Percent-encoded in the path, it can be put, read, changed and removed."""
    path = f"/rules/{quote(name, safe='')}"
    rule = {"match": {"endpoint": "/x"}, "by": ["tenant"], "limits": ["5/s"]}
    await admin.call("PUT", path, json=rule)
    assert (await admin.call("GET", path)).json()["id"] == name
    await admin.call("PATCH", path, json={"limits": "6/s"})
    assert (await admin.call("GET", path)).json()["limits"] == ["6/second"]
    await admin.call("DELETE", path)
    await admin.rejected("GET", path, 404)


async def test_the_author_of_an_override_is_the_name_of_the_token(admin: Admin) -> None:
    """A client cannot sign an override as somebody else."""
    body = {"for": {"user": "1"}, "multiply": 2, "until": "2h", "reason": "x"}
    found = await admin.rejected("POST", "/overrides", 400, json={**body, "author": "eve"})
    assert found["detail"] == "the body: `author` is the name of the token; leave it out"
    await admin.call("POST", "/overrides", json=body)
    (made,) = (
        each
        for each in (await admin.call("GET", "/overrides")).json()["items"]
        if each["for"] == {"user": "1"}
    )
    assert made["author"] == "admin-token"
