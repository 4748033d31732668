"""Whatever a client sends, the service replies, and never with a 5xx."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratekeeper.service.http.tokens import create_token
from tests.service.http.client import http_service

PATHS = [
    "/v1/check",
    "/v1/check/batch",
    "/v1/settle",
    "/v1/quota",
    "/v1/quota/grant",
    "/v1/authorize",
    "/healthz",
    "/nowhere",
]
NAMES = ["user", "api_key", "ip", "tenant", "tier", "endpoint", "method", "attributes", "cost"]
MORE = ["reserved", "actual", "units", "ttl_seconds", "checks", "atomic", "else"]
HEADERS = [
    b"authorization",
    b"x-request-id",
    b"content-length",
    b"x-original-uri",
    b"x-forwarded-uri",
    b"x-original-method",
    b"x-forwarded-for",
    b"x-api-key",
    b"x-ratekeeper-token",
    b"forwarded",
    b"cookie",
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.just("x" * 600),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*NAMES, *MORE, "a"]), inner, max_size=4)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(NAMES + MORE), json_values, max_size=5)
bodies = st.one_of(
    st.binary(max_size=60),
    objects.map(lambda each: json.dumps(each).encode()),
    st.lists(objects, max_size=3).map(lambda each: json.dumps({"checks": each}).encode()),
)
values = st.binary(max_size=40) | st.sampled_from([b"/slow", b"/orders?a=%ff&b", b"Bearer x", b"9"])


@settings(
    max_examples=settings().max_examples * 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "X"]),
    path=st.sampled_from(PATHS),
    query=st.binary(max_size=40) | st.sampled_from([b"user=1", b"denied=403", b"ip=::1&tier=x"]),
    headers=st.lists(st.tuples(st.sampled_from(HEADERS), values), max_size=4),
    body=bodies,
    admin=st.booleans(),
)
def test_no_request_causes_a_5xx(
    method: str,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    admin: bool,
    tmp_path: Path,
) -> None:
    """Each reply is complete, names the request and the node, and is JSON if it says so."""
    tokens = tmp_path / "tokens.json"
    secret = (tmp_path / "secret").read_text() if tokens.exists() else ""
    if not secret:
        secret = create_token(tokens, "a", "admin")
        (tmp_path / "secret").write_text(secret)
    if admin:
        headers = [*headers, (b"authorization", b"Bearer " + secret.encode())]
    asyncio.run(_ask(tokens, method, path, query, headers, body))


async def _ask(
    tokens: Path,
    method: str,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    said: list[Any] = []
    pieces = [body]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop() if pieces else b"", "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    async with http_service(tokens) as http:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": headers,
            "client": ("127.0.0.1", 1),
        }
        await http.app(scope, receive, send)
    start, end = said
    assert start["status"] < 500, end["body"]
    found = dict(start["headers"])
    assert found[b"x-ratekeeper-node"] == b"test-1"
    assert found[b"x-request-id"]
    assert not any(b"\r" in value or b"\n" in value for _, value in start["headers"])
    if b"json" in found.get(b"content-type", b""):
        assert json.loads(end["body"])
