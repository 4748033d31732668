"""What every request to the service has in common: routes, sizes, ids, errors."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.service.http.asking import asking
from tollkeeper.service.admin import api
from tollkeeper.service.http import token_file
from tollkeeper.service.http.node import BATCH_BYTES_MAX, BODY_BYTES_MAX

PROBLEM = "application/problem+json"


async def test_there_is_what_the_documents_say() -> None:
    """Each path and method answers; nothing else does, and says so as a problem."""
    async with asking() as ask:
        assert (await ask("GET", "/healthz")).data["status"] == "ok"
        assert (await ask("GET", "/readyz")).status == 200
        assert (await ask("HEAD", "/readyz")).status == 200
        assert (await ask("GET", "/metrics")).status == 200
        for url in ("/", "/v1", "/v1/check/", "/V1/check", "/v1/administrate", "/docsx"):
            answer = await ask("GET", url)
            assert answer.status == 404, url
            assert answer.headers["content-type"] == PROBLEM
            assert answer.data["error"]["code"] == "NOT_FOUND"


METHODS = [
    ("GET", "/v1/check", "POST"),
    ("PUT", "/v1/check/batch", "POST"),
    ("POST", "/v1/quota", "GET, HEAD, DELETE"),
    ("BREW", "/v1/settle", "POST"),
    ("POST", "/healthz", "GET, HEAD"),
]


@pytest.mark.parametrize(("method", "path", "allowed"), METHODS)
async def test_a_wrong_method_is_405_with_the_right_ones(
    method: str, path: str, allowed: str
) -> None:
    """As HTTP asks."""
    async with asking() as ask:
        answer = await ask(method, path)
        assert answer.status == 405
        assert answer.headers["allow"] == allowed
        assert answer.data["status"] == 405


@pytest.mark.parametrize(
    ("path", "most"), [("/v1/check", BODY_BYTES_MAX), ("/v1/check/batch", BATCH_BYTES_MAX)]
)
@pytest.mark.parametrize("declare", [True, False])
async def test_a_body_has_a_bound(path: str, most: int, declare: bool) -> None:
    """One byte too many is 413, whether it was declared or not; just enough is read."""
    async with asking() as ask:
        filled = b"{}" + b" " * (most - 2)
        pieces = [filled[:1000], filled[1000:]]
        answer = await ask("POST", path, filled, chunks=pieces, declare=declare)
        assert answer.status in {200, 400}
        answer = await ask("POST", path, filled + b" ", chunks=[*pieces, b" "], declare=declare)
        assert answer.status == 413
        assert f"{most:,} bytes" in answer.data["detail"]


async def test_a_declared_size_is_not_believed_when_it_is_less() -> None:
    """What arrives counts: a length that lies makes no room."""
    async with asking() as ask:
        body = b" " * (BODY_BYTES_MAX + 1)
        answer = await ask("POST", "/v1/check", body, {"content-length": "2"})
        assert answer.status == 413


async def test_a_body_in_pieces_is_one_body() -> None:
    """However the server cuts it."""
    async with asking() as ask:
        pieces = [b'{"us', b'er":', b'"4', b'2"}', b""]
        answer = await ask("POST", "/v1/check", b"".join(pieces), chunks=pieces)
        assert answer.status == 200
        assert answer.data["rule"] == "users"


async def test_whoever_hangs_up_is_not_charged() -> None:
    """A body that never ends is no request; who closed only his side still reads the answer."""
    async with asking() as ask:
        answer = await ask("POST", "/v1/check", b'{"user":"42"}', chunks=[], declare=True)
        assert answer.status == 400
        assert answer.data["error"]["code"] == "BODY_INCOMPLETE"
        assert answer.headers["connection"] == "close"
        assert (await ask.check(user="42")).data["remaining"] == 2


IDS = [
    ("abc-123", "abc-123"),
    ("a" * 128, "a" * 128),
    ("a" * 129, None),
    ("", None),
    ("a b", None),
    ("x\r\nset-cookie: a", None),
    ("é", None),
]


@pytest.mark.parametrize(("given", "expected"), IDS)
async def test_a_request_keeps_its_name_if_it_is_one(given: str, expected: str | None) -> None:
    """What is too long or not plain gets a name of ours; every answer has the node's."""
    async with asking() as ask:
        answer = await ask("GET", "/healthz", b"", {"X-Request-Id": given})
        found = answer.headers["x-request-id"]
        assert found == expected if expected else found not in {given, ""}
        assert answer.headers["x-tollkeeper-node"] == "test-1"


async def test_names_of_ours_are_all_different() -> None:
    """Also on errors."""
    async with asking() as ask:
        urls = ["/healthz", "/nowhere", "/v1/check", "/healthz"]
        names = {(await ask("GET", url)).headers["x-request-id"] for url in urls}
        assert len(names) == len(urls)


async def test_a_node_that_ends_says_so() -> None:
    """/readyz is 503, connections are closed, and checks are still answered."""
    async with asking() as ask:
        assert "connection" not in (await ask.check(user="1")).headers
        ask.node.stopping = True
        ready = await ask("GET", "/readyz")
        assert (ready.status, ready.data["status"]) == (503, "stopping")
        answer = await ask.check(user="1")
        assert answer.status == 200
        assert answer.headers["connection"] == "close"


async def test_a_defect_is_500_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns that it is ours, and nothing of the inside."""
    async with asking() as ask:

        def broken() -> Any:
            raise RuntimeError("the inside")

        monkeypatch.setattr(ask.node.limiter, "rules_status", broken)
        answer = await ask("GET", "/readyz")
        assert answer.status == 500
        assert b"inside" not in answer.body
        assert "the inside" in caplog.text
        for _ in range(50):
            assert (await ask("GET", "/readyz")).status == 500
        assert caplog.text.count("a defect at") == 1, "a defect may not fill the disk"


async def test_a_websocket_is_closed() -> None:
    """There is nothing to talk about."""
    async with asking() as ask:
        said = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            said.append(message)

        await ask.service({"type": "websocket", "path": "/v1/check"}, receive, send)
        assert said == [{"type": "websocket.close", "code": 1008}]


async def test_the_server_starts_and_ends_it(tmp_path: Path) -> None:
    """The counts are written at the end."""
    async with asking(counters=tmp_path) as ask:
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        said = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any) -> None:
            said.append(message["type"])

        await ask.service({"type": "lifespan"}, receive, send)
        assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert (tmp_path / f"{os.getpid()}.json").read_bytes()


NEEDS = [
    ("POST", "/v1/check", {"user": "1"}, {"check": 200, "read": 403, "admin": 200}),
    ("POST", "/v1/check/batch", {"checks": [{}]}, {"check": 200, "read": 403, "admin": 200}),
    ("POST", "/v1/settle", {"reserved": 1, "actual": 1}, {"check": 200, "read": 403, "admin": 200}),
    ("GET", "/v1/quota?user=1", b"", {"check": 200, "read": 200, "admin": 200}),
    ("DELETE", "/v1/quota?user=1", b"", {"check": 403, "read": 403, "admin": 204}),
    ("POST", "/v1/quota/grant", {"units": 1}, {"check": 403, "read": 403, "admin": 204}),
    ("GET", "/healthz", b"", {"check": 200, "read": 200, "admin": 200}),
]


@pytest.mark.parametrize(("method", "url", "body", "expected"), NEEDS)
async def test_who_may_what(
    method: str, url: str, body: Any, expected: dict[Any, int], tmp_path: Path
) -> None:
    """Each role at each endpoint; without a token, 401 and how to get one."""
    path = tmp_path / "tokens.json"
    secrets = {role: token_file.create(path, role, role) for role in expected}
    async with asking(path) as ask:
        for role, status in expected.items():
            answer = await ask(method, url, body, {"Authorization": f"Bearer {secrets[role]}"})
            assert answer.status == status, role
        answer = await ask(method, url, body)
        if url != "/healthz":
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert "tollkeeper token create" in answer.data["detail"]


async def test_admin_endpoints_want_a_token_even_where_checks_do_not() -> None:
    """Open on loopback is open for checks."""
    async with asking() as ask:
        assert (await ask.check(user="1")).status == 200
        assert (await ask("GET", "/v1/quota?user=1")).status == 200
        assert (await ask("DELETE", "/v1/quota?user=1")).status == 401
        answer = await ask("POST", "/v1/quota/grant", {"user": "1", "units": 1})
        assert answer.status == 401
        assert "--role admin" in answer.data["detail"]
        assert (await ask("GET", "/v1/admin/rules")).status == 401


PAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/check", {"user": "1"}),
    ("POST", "/v1/check/batch", {"checks": [{"user": "1"}]}),
    ("POST", "/v1/settle", {"user": "1", "reserved": 3, "actual": 0}),
]


@pytest.mark.parametrize(("method", "path", "body"), PAGES)
async def test_a_page_in_a_browser_cannot_spend_without_a_token(
    method: str, path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """Any page may send such a request to this machine; with a token, somebody let it."""
    origin = {"Origin": "https://shop.example"}
    async with asking() as ask:
        answer = await ask(method, path, body, origin)
        assert answer.status == 403
        assert "Origin" in answer.data["detail"]
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert (await ask.check(user="1")).data["remaining"] == 2
        gateway = {**origin, "X-Original-URI": "/", "X-API-Key": "k"}
        assert (await ask("GET", "/v1/authorize", b"", gateway)).status == 200
    secret = token_file.create(tmp_path / "tokens.json", "t", "check")
    async with asking(tmp_path / "tokens.json") as ask:
        headers = {**origin, "Authorization": f"Bearer {secret}"}
        assert (await ask(method, path, body, headers)).status == 200


async def test_the_admin_api_is_made_once_and_beside_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it needs takes seconds to import: who checks meanwhile does not wait for that."""
    made: list[threading.Thread] = []

    def admin_app(node: Any) -> Any:
        made.append(threading.current_thread())
        return real(node)

    real = api.admin_app
    monkeypatch.setattr(api, "admin_app", admin_app)
    async with asking() as ask:
        answers = await asyncio.gather(*(ask("GET", "/docs") for _ in range(3)))
    assert [each.status for each in answers] == [200, 200, 200]
    assert len(made) == 1
    assert made[0] is not threading.current_thread()
