"""What every request has in common: routes, sizes, request IDs, errors, timeouts."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.service.admin import api
from ratekeeper.service.http import incoming
from ratekeeper.service.http.incoming import BATCH_BYTES, CALL_BYTES
from ratekeeper.service.http.tokens import create_token
from tests.service.http.client import HttpClient, http_service

PROBLEM = "application/problem+json"


async def test_every_documented_path_replies() -> None:
    """Each documented path and method replies; any other path is a 404 problem."""
    async with http_service() as http:
        assert (await http("GET", "/healthz")).data["status"] == "ok"
        assert (await http("GET", "/readyz")).status == 200
        assert (await http("HEAD", "/readyz")).status == 200
        assert (await http("GET", "/metrics")).status == 200
        for url in ("/", "/v1", "/v1/check/", "/V1/check", "/v1/administrate", "/docsx"):
            answer = await http("GET", url)
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
    """A 405 lists the allowed methods in Allow."""
    async with http_service() as http:
        answer = await http(method, path)
        assert answer.status == 405
        assert answer.headers["allow"] == allowed
        assert answer.data["status"] == 405


@pytest.mark.parametrize(
    ("path", "most"), [("/v1/check", CALL_BYTES), ("/v1/check/batch", BATCH_BYTES)]
)
@pytest.mark.parametrize("declare", [True, False])
async def test_a_body_has_a_maximum_size(path: str, most: int, declare: bool) -> None:
    """One byte too many is 413, declared or not; a body of the maximum size is read."""
    async with http_service() as http:
        filled = b"{}" + b" " * (most - 2)
        pieces = [filled[:1000], filled[1000:]]
        answer = await http("POST", path, filled, chunks=pieces, declare=declare)
        assert answer.status in {200, 400}
        answer = await http("POST", path, filled + b" ", chunks=[*pieces, b" "], declare=declare)
        assert answer.status == 413
        assert f"{most:,} bytes" in answer.data["detail"]


async def test_a_body_that_is_declared_too_large_is_not_awaited() -> None:
    """It is 413 before any of it arrives: a client cannot make the service wait for it."""
    async with http_service() as http:
        answer = await http(
            "POST", "/v1/check", b"", {"content-length": f"{CALL_BYTES + 1}"}, chunks=[]
        )
        assert answer.status == 413


async def test_a_declared_size_that_is_too_small_is_not_believed() -> None:
    """The bytes that arrive count, not the Content-Length."""
    async with http_service() as http:
        body = b" " * (CALL_BYTES + 1)
        answer = await http("POST", "/v1/check", body, {"content-length": "2"})
        assert answer.status == 413


async def test_a_body_in_several_messages_is_one_body() -> None:
    """The handler gets the whole body, however the server cuts it."""
    async with http_service() as http:
        pieces = [b'{"us', b'er":', b'"4', b'2"}', b""]
        answer = await http("POST", "/v1/check", b"".join(pieces), chunks=pieces)
        assert answer.status == 200
        assert answer.data["rule"] == "users"


async def test_bodies_in_parts_share_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of connections could each send a part of a long body. Whole bodies always pass."""
    monkeypatch.setattr(incoming, "PARTIAL_BYTES_MAX", 10)
    pieces = [b'{"us', b'er": "4', b'2"}']
    async with http_service() as http:
        answer = await http("POST", "/v1/check", b"".join(pieces), chunks=pieces)
        assert answer.status == 503
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert (await http.check(user="42")).data["remaining"] == 2
        assert http.context.bodies.partial_bytes == 0
        monkeypatch.setattr(incoming, "PARTIAL_BYTES_MAX", 16)
        assert (await http("POST", "/v1/check", b"".join(pieces), chunks=pieces)).status == 200
        assert http.context.bodies.partial_bytes == 0


async def test_a_client_that_disconnects_is_not_charged() -> None:
    """An incomplete body is 400; a client that closed only its sending side reads the reply."""
    async with http_service() as http:
        answer = await http("POST", "/v1/check", b'{"user":"42"}', chunks=[], declare=True)
        assert answer.status == 400
        assert answer.data["error"]["code"] == "BODY_INCOMPLETE"
        assert answer.headers["connection"] == "close"
        assert (await http.check(user="42")).data["remaining"] == 2


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
async def test_a_valid_request_id_is_kept(given: str, expected: str | None) -> None:
    """An ID that is too long or not plain is replaced; every reply names the node."""
    async with http_service() as http:
        answer = await http("GET", "/healthz", b"", {"X-Request-Id": given})
        found = answer.headers["x-request-id"]
        assert found == expected if expected else found not in {given, ""}
        assert answer.headers["x-ratekeeper-node"] == "test-1"


async def test_denials_are_recorded_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log `ratekeeper.denied` is for applications that use the library."""
    caplog.set_level(logging.DEBUG, "ratekeeper.denied")
    async with http_service() as http:
        statuses = [(await http.check(user="logged")).status for _ in range(20)]
    assert 429 in statuses
    assert not caplog.records


async def test_generated_request_ids_differ() -> None:
    """Errors have a request ID of their own, too."""
    async with http_service() as http:
        urls = ["/healthz", "/nowhere", "/v1/check", "/healthz"]
        names = {(await http("GET", url)).headers["x-request-id"] for url in urls}
        assert len(names) == len(urls)


async def test_a_worker_that_shuts_down_says_so() -> None:
    """/readyz is 503, connections are closed, and checks still get a reply."""
    async with http_service() as http:
        assert "connection" not in (await http.check(user="1")).headers
        http.context.stopping = True
        ready = await http("GET", "/readyz")
        assert (ready.status, ready.data["status"]) == (503, "stopping")
        answer = await http.check(user="1")
        assert answer.status == 200
        assert answer.headers["connection"] == "close"


async def test_a_defect_is_500_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns that the service is at fault, and no details."""
    async with http_service() as http:

        def broken() -> Any:
            raise RuntimeError("the inside")

        monkeypatch.setattr(http.context.limiter, "rules_status", broken)
        answer = await http("GET", "/readyz")
        assert answer.status == 500
        assert b"inside" not in answer.body
        assert "the inside" in caplog.text
        for _ in range(50):
            assert (await http("GET", "/readyz")).status == 500
        assert caplog.text.count("a defect at") == 1, "a defect must not fill the disk"


async def test_a_websocket_is_closed() -> None:
    """The service has no WebSocket endpoint."""
    async with http_service() as http:
        said = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            said.append(message)

        await http.app({"type": "websocket", "path": "/v1/check"}, receive, send)
        assert said == [{"type": "websocket.close", "code": 1008}]


async def test_the_lifespan_starts_and_stops_the_service(tmp_path: Path) -> None:
    """The counters are written at shutdown."""
    async with http_service(counters=tmp_path) as http:
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        said = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any) -> None:
            said.append(message["type"])

        await http.app({"type": "lifespan"}, receive, send)
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
async def test_each_role_has_its_endpoints(
    method: str, url: str, body: Any, expected: dict[Any, int], tmp_path: Path
) -> None:
    """Each role at each endpoint; without a token, 401 and how to get one."""
    path = tmp_path / "tokens.json"
    secrets = {role: create_token(path, role, role) for role in expected}
    async with http_service(path) as http:
        for role, status in expected.items():
            answer = await http(method, url, body, {"Authorization": f"Bearer {secrets[role]}"})
            assert answer.status == status, role
        answer = await http(method, url, body)
        if url != "/healthz":
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert "ratekeeper token create" in answer.data["detail"]


async def test_admin_endpoints_always_need_a_token() -> None:
    """A service without tokens is open for checks only."""
    async with http_service() as http:
        assert (await http.check(user="1")).status == 200
        assert (await http("GET", "/v1/quota?user=1")).status == 200
        assert (await http("DELETE", "/v1/quota?user=1")).status == 401
        answer = await http("POST", "/v1/quota/grant", {"user": "1", "units": 1})
        assert answer.status == 401
        assert "--role admin" in answer.data["detail"]
        assert (await http("GET", "/v1/admin/rules")).status == 401


async def test_the_admin_api_is_imported_once_and_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import takes seconds, and checks must not wait for it."""
    made: list[threading.Thread] = []

    def admin_app(node: Any) -> Any:
        made.append(threading.current_thread())
        return real(node)

    real = api.admin_app
    monkeypatch.setattr(api, "admin_app", admin_app)
    async with http_service() as http:
        answers = await asyncio.gather(*(http("GET", "/docs") for _ in range(3)))
    assert [each.status for each in answers] == [200, 200, 200]
    assert len(made) == 1
    assert made[0] is not threading.current_thread()


# ── Bodies that do not arrive ──────────────────────────────────────────────────────────────────

SECONDS_MAX = 10.0


async def half(http: HttpClient, said: list[Any]) -> None:
    """Send half of a body, and then nothing."""
    pieces = [b'{"user":']

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/check",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"100")],
    }
    await http.app(scope, receive, send)


async def settled() -> None:
    """Let every task run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_body_that_does_not_arrive_is_408() -> None:
    """Not before the timeout; the connection is closed, and no entry is left."""
    async with http_service() as http:
        said: list[Any] = []
        waiting = asyncio.create_task(half(http, said))
        await settled()
        timeouts = http.context.bodies
        timeouts.advance(SECONDS_MAX)
        await settled()
        assert not said
        timeouts.advance(1.0)
        await asyncio.wait_for(waiting, 30)
        assert said[0]["status"] == 408
        assert (b"connection", b"close") in said[0]["headers"]
        assert not timeouts.waiting
        assert not timeouts._cancelled


async def test_many_waiting_requests_get_a_shorter_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot occupy the whole worker with bodies that never arrive."""
    monkeypatch.setattr(incoming, "CROWD", 2)
    async with http_service() as http:
        said: list[Any] = []
        waiting = [asyncio.create_task(half(http, said)) for _ in range(2)]
        await settled()
        timeouts = http.context.bodies
        timeouts.advance(2.0)
        await settled()
        assert not said, "two are not many"
        waiting.append(asyncio.create_task(half(http, said)))
        await settled()
        timeouts.advance(0.5)
        await asyncio.wait(waiting[:2], timeout=30)
        assert [each["status"] for each in said if "status" in each] == [408, 408]
        assert not waiting[2].done(), "it has just started to wait"
        waiting[2].cancel()


async def test_a_cancellation_by_the_server_is_not_a_timeout() -> None:
    """A cancellation by the server passes through."""
    async with http_service() as http:
        said: list[Any] = []
        waiting = asyncio.create_task(half(http, said))
        await settled()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not said
        assert not http.context.bodies.waiting


async def test_a_finished_request_leaves_no_entry() -> None:
    """A request stops waiting as soon as its body has arrived."""
    async with http_service() as http:
        assert (await http.check(user="1")).status == 200
        assert not http.context.bodies.waiting


async def test_timeouts_are_checked_while_the_service_runs() -> None:
    """The clock advances by itself."""
    async with http_service() as http:
        timeouts = http.context.bodies
        checking = asyncio.create_task(timeouts.keep_checking(0.001))
        while timeouts.now_s < 0.003:  # noqa: ASYNC110 - it waits for time, not for an event
            await asyncio.sleep(0)
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_a_page_that_never_changes_is_made_once(path: str) -> None:
    """Writing it takes as long as a hundred checks; every reply has its own request ID."""
    async with http_service() as http:
        first = await http("GET", path)
        http.app._pages[path]._app = None  # a call of the application would raise
        again = await http("GET", path, b"", {"X-Request-Id": "mine"})
        assert (again.status, again.body) == (200, first.body)
        assert again.headers["x-request-id"] == "mine"
        assert first.headers["x-request-id"] != "mine"
        assert again.headers.keys() == first.headers.keys()
        packed = await http("GET", path, b"", {"Accept-Encoding": "gzip"})
        assert gzip.decompress(packed.body) == first.body
        assert len(packed.body) < len(first.body)
        known = await http("GET", path, b"", {"If-None-Match": first.headers["etag"]})
        assert (known.status, known.body) == (304, b"")


async def test_an_error_is_not_repeated() -> None:
    """The next request for the page makes it again."""
    async with http_service() as http:
        good = await http("GET", "/docs")
        page = http.app._pages["/docs"]
        page._file, made = None, page._app

        async def failing(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})

        page._app = failing
        failed = await http("GET", "/docs")
        assert (failed.status, failed.body) == (500, b"no")
        page._app = made
        assert (await http("GET", "/docs")).body == good.body


@pytest.mark.parametrize("path", ["/v1/check", "/v1/check/batch", "/v1/limit", "/v1/settle"])
async def test_a_query_is_rejected_where_the_fields_are_in_the_body(path: str) -> None:
    """`?cost=5` would be ignored, and the request would cost 1."""
    async with http_service() as http:
        answer = await http("POST", f"{path}?cost%31=5&x=1", b'{"user":"1"}')
        assert answer.status == 400
        assert answer.data["detail"].startswith('the query: unknown field "cost1"; leave it out')
