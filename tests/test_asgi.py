"""The ASGI middleware, and the decorator of endpoints."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator
from hashlib import blake2b
from socket import gethostname
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from ratekeeper import ConfigError, Limit
from ratekeeper.asgi import RateLimit
from ratekeeper.asgi import limited as limited_to
from ratekeeper.testing import ManualClock, limiting_off
from ratekeeper.web.answers import Style
from ratekeeper.web.options import default_node
from tests.web.asgi_driver import (
    Message,
    ask,
    ask_scope,
    echo,
    hello,
    limited,
    run_lifespan,
    scope_of,
)

HEADERS = {
    "x-ratelimit-limit": "2",
    "x-ratelimit-remaining": "1",
    "x-ratelimit-reset": "1030",
    "ratelimit": '"default";r=1;t=30',
    "ratelimit-policy": '"default";q=2;w=60',
    "x-ratekeeper-node": default_node(),
}


# ── Answers ────────────────────────────────────────────────────────────────────────────────────


async def test_an_allowed_response_gets_headers_and_nothing_else() -> None:
    """Status, the application's headers and the body are unchanged."""
    seen = await ask(limited())
    assert seen.status == 200
    assert seen.headers == {"x-mine": "1", **HEADERS}
    assert seen.body == b"hello"


async def test_a_denied_request_is_answered_without_the_application() -> None:
    """A 429 with problem JSON, Retry-After and the headers; the application never runs."""
    ran = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(scope["path"])
        await hello(scope, receive, send)

    limited_app = limited(app)
    for _ in range(3):
        seen = await ask(limited_app)
    assert len(ran) == 2
    assert seen.status == 429
    assert seen.headers["content-type"] == "application/problem+json"
    assert seen.headers["retry-after"] == "30"
    assert seen.headers["x-ratelimit-remaining"] == "0"
    assert int(seen.headers["content-length"]) == len(seen.body)
    assert json.loads(seen.body)["status"] == 429


async def test_a_denied_head_request_has_no_body() -> None:
    """HEAD is counted like other methods, and answered with headers only."""
    limited_app = limited(limits="1/minute")
    await ask(limited_app)
    seen = await ask(limited_app, method="HEAD")
    assert (seen.status, seen.body) == (429, b"")
    assert int(seen.headers["content-length"]) > 0


async def test_a_request_after_retry_after_is_allowed() -> None:
    """A client that reads only this header, in whole seconds, gets through."""
    limited_app = limited(limits="3/minute")
    for _ in range(4):
        seen = await ask(limited_app)
    clock = limited_app.enforcer.options.clock
    assert isinstance(clock, ManualClock)
    clock.advance(int(seen.headers["retry-after"]))
    assert (await ask(limited_app)).status == 200


async def test_a_slow_application_does_not_delay_the_reset_time() -> None:
    """The window of a decision ends when it ends, even if the response comes seconds later."""
    clock = ManualClock(1_000.5)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        clock.advance(3)
        await hello(scope, receive, send)

    window = Limit(5, per=60, algorithm="fixed_window")
    app = RateLimit(slow, window, clock=clock)
    for _ in range(3):
        assert (await ask(app)).headers["x-ratelimit-reset"] == "1020"


async def test_the_applications_own_headers_win() -> None:
    """Two headers of one kind would contradict each other."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"X-RateLimit-Limit", b"7")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    seen = await ask(limited(app))
    assert seen.start["headers"] == [(b"X-RateLimit-Limit", b"7")]


async def test_a_message_that_the_application_keeps_is_not_changed() -> None:
    """An application may send the same start message to every client."""
    start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body"})

    limited_app = limited(app)
    await ask(limited_app)
    assert (await ask(limited_app)).headers["x-ratelimit-remaining"] == "0"
    assert start["headers"] == [(b"a", b"b")]


async def test_the_style_of_the_headers_is_a_setting() -> None:
    """Only the selected headers are sent."""
    seen = await ask(limited(style=Style(draft=None, legacy=False, node="")))
    assert seen.headers == {"x-mine": "1"}


async def test_the_node_that_decided_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On allowed requests and denials, by the fast path and by rules; the host name is secret."""
    rules = {
        "version": 1,
        "rules": [{"id": "a", "by": ["ip"], "limits": ["1/minute"], "match": {"endpoint": "/a"}}],
        "deny": ["ip:192.0.2.9"],
    }
    monkeypatch.setenv("RATEKEEPER_NODE_ID", "eu-1")
    for app in (limited(limits="1/minute"), RateLimit(hello, rules=rules)):
        seen = [await ask(app, "/a", peer=peer) for peer in ("192.0.2.1", "192.0.2.1", "192.0.2.9")]
        assert [each.headers["x-ratekeeper-node"] for each in seen] == ["eu-1"] * 3
        assert [each.status for each in seen][:2] == [200, 429]
    assert "x-ratekeeper-node" not in (await ask(app, "/unlimited")).headers
    monkeypatch.delenv("RATEKEEPER_NODE_ID")
    default = (await ask(limited())).headers["x-ratekeeper-node"]
    assert default == default_node()
    guessed = blake2b(gethostname().encode(), digest_size=len(default) // 2).hexdigest()
    assert default not in (gethostname(), guessed)  # a client could try likely names
    named = limited(style=Style(node="us-2"))
    assert (await ask(named)).headers["x-ratekeeper-node"] == "us-2"


async def test_every_other_message_passes_unchanged() -> None:
    """This holds for parts of bodies, trailers, files and unknown messages."""
    messages: list[Message] = [
        {"type": "http.response.start", "status": 200, "trailers": True},
        {"type": "http.response.debug", "info": {}},
        {"type": "http.response.body", "body": b"1", "more_body": True},
        {"type": "http.response.body", "body": b"2", "more_body": False},
        {"type": "http.response.trailers", "headers": [(b"x", b"y")]},
        {"type": "http.response.pathsend", "path": "/f"},
        {"type": "http.response.early_hint", "links": []},
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    seen = await ask(limited(app))
    assert all(sent is own for sent, own in zip(seen.messages[1:], messages[1:], strict=True))
    assert seen.start["trailers"] is True


async def test_a_stream_is_sent_part_by_part() -> None:
    """Each part is sent before the next is created, and none is kept."""
    order: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(3):
            order.append(f"made {number}")
            yield b"%d" % number

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await StreamingResponse(pieces())(scope, receive, send)

    async def send(message: Message) -> None:
        if message.get("body"):
            order.append(f"sent {message['body'].decode()}")

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    await limited(app)(scope_of(), receive, send)
    assert order == ["made 0", "sent 0", "made 1", "sent 1", "made 2", "sent 2"]


# ── WebSockets ─────────────────────────────────────────────────────────────────────────────────


async def test_a_websocket_passes_with_headers_on_its_acceptance() -> None:
    """It is counted once, when it opens; its messages are not counted."""
    seen = await ask_scope(limited(echo), scope_of(kind="websocket"))
    assert seen.types == ["websocket.accept", "websocket.send"]
    assert seen.headers == {"x-mine": "1", **HEADERS}
    assert seen.messages[1]["text"] == "hi"


async def test_a_denied_websocket_is_answered_if_the_server_can() -> None:
    """With the extension the client sees the same 429 as over HTTP."""
    limited_app = limited(echo, limits="1/minute")
    scope = scope_of(kind="websocket", extensions={"websocket.http.response": {}})
    await ask_scope(limited_app, dict(scope))
    seen = await ask_scope(limited_app, dict(scope))
    assert seen.types == ["websocket.http.response.start", "websocket.http.response.body"]
    assert seen.status == 429
    assert seen.headers["retry-after"] == "60"
    assert json.loads(seen.body)["status"] == 429


async def test_a_denied_websocket_is_closed_if_the_server_cannot_answer() -> None:
    """It is closed before it is accepted, with the code for a policy violation."""
    limited_app = limited(echo, limits="1/minute")
    await ask_scope(limited_app, scope_of(kind="websocket"))
    seen = await ask_scope(limited_app, scope_of(kind="websocket"))
    assert seen.types == ["websocket.close"]
    assert seen.messages[0]["code"] == 1008


# ── In frameworks ──────────────────────────────────────────────────────────────────────────────


def _starlette(**options: Any) -> Starlette:
    async def user(request: Any) -> Any:
        return PlainTextResponse(request.path_params["id"])

    routes = [Route("/users/{id}", user), Mount("/v2", routes=[Route("/users/{id}", user)])]
    options.setdefault("clock", ManualClock(1_000))
    return Starlette(routes=routes, middleware=[Middleware(RateLimit, **options)])


async def test_path_parameters_do_not_escape_a_routes_limit() -> None:
    """/users/1 and /users/2 are one endpoint, and another route is another one."""
    app = _starlette(limits="2/minute", per_route=True)
    paths = ["/users/1", "/users/2", "/users/3", "/v2/users/1", "/v2/users/2", "/v2/users/3"]
    found = [(await ask(app, path)).status for path in paths]
    assert found == [200, 200, 429] * 2


async def test_rules_see_the_routes_template() -> None:
    """A rule on a template, counted by endpoint, applies to every number in the path."""
    rules = """
version: 1
rules:
  - id: users
    match: {endpoint: "/users/{id}"}
    by: [endpoint]
    limits: ["2/minute"]
"""
    app = _starlette(rules=rules)
    found = [(await ask(app, f"/users/{number}")).status for number in range(3)]
    assert found == [200, 200, 429]
    assert (await ask(app, "/v2/users/1")).status == 200


@pytest.mark.parametrize("served", ["/search/1", "/x"])
@pytest.mark.parametrize(
    "raw", ["/search/foo/../../x", "/search/foo/%2e%2e/.%2E/x", "/search/%2e%2e%2fx"]
)
async def test_dot_segments_do_not_escape_a_rule_if_routes_are_unknown(
    raw: str, served: str
) -> None:
    """An application may serve such a path under /search, or resolve it to /x: both are limited."""
    rules = """
version: 1
rules:
  - {id: search, match: {endpoint: "/search/*"}, by: ip, limits: 1/minute}
  - {id: x, match: {endpoint: /x}, by: ip, limits: 1/minute}
"""
    app = RateLimit(hello, rules=rules)
    assert (await ask(app, served)).status == 200
    dotted = scope_of(unquote(raw), raw_path=raw.encode())
    assert (await ask_scope(app, dotted)).status == 429


async def test_the_lifespan_passes_and_closes_the_store() -> None:
    """A second startup opens it again."""
    started: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await hello(scope, receive, send)
            return
        for word in ("startup", "shutdown"):
            started.append((await receive())["type"])
            await send({"type": f"lifespan.{word}.complete"})

    limited_app = limited(app)
    for _ in range(2):
        assert (await ask(limited_app)).headers["x-ratelimit-remaining"] == "1"
        sent = await run_lifespan(limited_app)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert not limited_app.enforcer._is_open
    assert started == ["lifespan.startup", "lifespan.shutdown"] * 2


async def test_an_application_without_a_lifespan_keeps_its_limits() -> None:
    """Servers ignore the application's error, and so does the limiter."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await hello(scope, receive, send)

    limited_app = limited(app, limits="1/minute")
    await ask(limited_app)
    with pytest.raises(AssertionError):
        await run_lifespan(limited_app)
    assert (await ask(limited_app)).status == 429


async def test_nothing_is_left_for_the_garbage_collector() -> None:
    """No cycle of references keeps the scope of a finished request."""
    limited_app = limited(limits="2/minute")

    class Scope(dict[str, Any]):
        """A scope that can be referred to weakly."""

    gc.disable()
    try:
        for _ in range(3):
            scope = Scope(scope_of())
            forgotten = weakref.ref(scope)
            await ask_scope(limited_app, scope)
            del scope
            assert forgotten() is None
    finally:
        gc.enable()


async def test_other_kinds_of_scope_pass() -> None:
    """Unknown types of ASGI scopes reach the application unchanged."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    scope = {"type": "webtransport"}
    await limited(app)(scope, "r", "s")  # type: ignore[arg-type]  # passed as they are
    assert seen == [(scope, "r", "s")]


def test_a_middleware_without_limits_is_rejected() -> None:
    """It would silently limit nothing."""
    with pytest.raises(ConfigError, match="RateLimit needs"):
        RateLimit(hello, store="memory://")


# ── Any request ────────────────────────────────────────────────────────────────────────────────


async def search(request: Request) -> Response:
    """An endpoint whose path has parameters."""
    return PlainTextResponse("found")


RULES = """
version: 1
rules:
  - {id: keys, by: [api_key, user], limits: ["1000000/s"]}
  - {id: places, match: {endpoint: "/a/*"}, by: [endpoint, ip, method], limits: ["1000000/s"]}
"""

SOURCES = [
    "header:x",
    "bearer",
    "unverified_claim:sub",
    "query:q",
    "cookie:c",
    "session:s",
    "address",
]
FUZZED = [
    limited(limits="1000000/s", key=SOURCES, per_route=True),
    limited(limits=None, rules=RULES, identify={"api_key": SOURCES, "user": SOURCES[::-1]}),
    limited(Starlette(routes=[Route("/{a}/{b:int}", search)]), "1000000/s", per_route=True),
]

_bytes = st.one_of(st.binary(max_size=64), st.just(b"x" * 70_000), st.just(b"a" * 600))
_name = st.sampled_from([b"x", b"authorization", b"cookie", b"forwarded", b"x-forwarded-for"])
_value = st.one_of(
    _bytes,
    _bytes.map(lambda raw: b"Bearer " + raw),
    _bytes.map(lambda raw: b"c=" + raw),
    _bytes.map(lambda raw: b"for=" + raw),
)


@given(
    app=st.sampled_from(FUZZED),
    raw_path=st.one_of(st.none(), _bytes, _bytes.map(lambda raw: b"/a/" + raw)),
    query=_bytes,
    headers=st.lists(st.tuples(_name, _value), max_size=6),
    client=st.one_of(
        st.none(), st.tuples(st.text(max_size=40), st.just(1)), st.just(("::1%eth0", 1))
    ),
    method=st.one_of(st.text(max_size=40), st.just("GET")),
    session=st.one_of(st.none(), st.just({"s": object()}), st.just({"s": 5})),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_request_makes_the_middleware_fail(
    app: Any,
    raw_path: bytes | None,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    client: Any,
    method: str,
    session: Any,
) -> None:
    """For any request of a client or a server, the application's own answer is returned."""
    path = (raw_path or b"/").decode("utf-8", "replace")
    scope = scope_of(path, method, raw_path=raw_path, query_string=query, client=client)
    scope |= {"headers": headers, "session": session}
    if raw_path is None:
        del scope["raw_path"]
    seen = asyncio.run(ask_scope(app, scope))
    assert seen.status in {200, 307, 404, 405}
    assert seen.headers["x-ratelimit-limit"] == "1000000"


async def test_limiting_off_applies_to_the_fast_path() -> None:
    """While limiting is off, requests are not counted and get no headers."""
    limited_app = limited(limits="1/minute")
    assert (await ask(limited_app)).status == 200
    with limiting_off():
        for _ in range(3):
            seen = await ask(limited_app)
            assert (seen.status, seen.headers) == (200, {"x-mine": "1"})
    assert (await ask(limited_app)).status == 429


async def test_the_fast_path_gives_the_same_answers() -> None:
    """The first request of an address takes the full path, the next ones the fast path."""
    short, long = limited(limits="3/minute"), limited(limits="3/minute", skip=lambda request: False)
    for _ in range(5):
        one, other = await ask(short), await ask(long)
        assert (one.status, one.headers, one.body) == (other.status, other.headers, other.body)


@limited_to("1/minute")
async def limited_search(request: Request) -> Response:
    """An endpoint with its own limit."""
    return PlainTextResponse("found")


class Listing(HTTPEndpoint):
    """Methods are endpoints too."""

    @limited_to("2/minute", name="listing", count=lambda status: status == 200)
    async def get(self, request: Request) -> Response:
        return PlainTextResponse("all", 404 if "missing" in request.query_params else 200)

    @limited_to("2/minute", key=lambda request: request.native.headers["x-user"])
    async def post(self, request: Request) -> Response:
        return PlainTextResponse("added")


@limited_to("9/minute")
@limited_to("2/minute", count=lambda status: status == 401)
async def login(request: Request) -> Response:
    """An endpoint with two limits of one window."""
    return PlainTextResponse("no", 401)


@limited_to("1/minute")
async def feed(websocket: WebSocket) -> None:
    """A WebSocket with its own limit."""
    await websocket.accept()


def _endpoints() -> Starlette:
    return Starlette(
        routes=[
            Route("/search", limited_search),
            Route("/listing", Listing),
            Route("/login", login),
            WebSocketRoute("/feed", feed),
        ],
        middleware=[Middleware(RateLimit, limits="9/minute", clock=ManualClock(1_000))],
    )


async def test_an_endpoint_has_its_own_limits() -> None:
    """They apply in addition to the application's, with one answer for both."""
    app = _endpoints()
    seen = await ask(app, "/search")
    assert seen.headers["ratelimit-policy"] == (
        '"default";q=9;w=60, "tests.test_asgi.limited_search";q=1;w=60'
    )
    assert (await ask(app, "/search")).status == 429
    missing = [await ask(app, "/listing", query_string=b"missing=1") for _ in range(3)]
    assert [seen.status for seen in missing] == [404] * 3
    listed = [await ask(app, "/listing") for _ in range(3)]
    assert [seen.status for seen in listed] == [200, 200, 429]
    feeds = [await ask_scope(app, scope_of("/feed", kind="websocket")) for _ in range(2)]
    assert [seen.types for seen in feeds] == [["websocket.accept"], ["websocket.close"]]


async def test_two_limits_of_one_endpoint_have_two_counts() -> None:
    """This holds even with the same window and the same key."""
    app = _endpoints()
    seen = [await ask(app, "/login") for _ in range(3)]
    assert [each.status for each in seen] == [401, 401, 429]
    name = "tests.test_asgi.login"
    assert seen[0].headers["ratelimit-policy"] == (
        f'"default";q=9;w=60, "{name}";q=9;w=60, "{name}#2";q=2;w=60'
    )


async def test_a_sync_endpoint_runs_in_a_thread() -> None:
    """Starlette does the same without a limit. It holds for methods, too."""
    threads: list[int] = []

    @limited_to("2/minute")
    def blocking(request: Request) -> Response:
        threads.append(threading.get_ident())
        return PlainTextResponse(request.path_params["word"])

    class Blocking(HTTPEndpoint):
        @limited_to("1/minute")
        def get(self, request: Request) -> Response:
            return PlainTextResponse("class")

    app = Starlette(
        routes=[Route("/function/{word}", blocking), Route("/class", Blocking)],
        middleware=[Middleware(RateLimit, limits="9/minute", clock=ManualClock(1_000))],
    )
    seen = [await ask(app, f"/function/{word}") for word in "abc"]
    assert [each.status for each in seen] == [200, 200, 429]
    assert seen[1].body == b"b"
    assert threading.get_ident() not in threads
    assert [(await ask(app, "/class")).status for _ in range(2)] == [200, 429]


async def test_hooks_of_a_method_see_the_request() -> None:
    """They do not see the endpoint object, which has a scope too."""
    app = _endpoints()
    users = ["ada", "ada", "ada", "bob"]
    seen = [await ask(app, "/listing", method="POST", headers=[("x-user", u)]) for u in users]
    assert [each.status for each in seen] == [200, 200, 429, 200]


async def test_an_endpoint_that_cannot_be_limited_is_an_error() -> None:
    """Examples are a class, a function without a request, and an application without RateLimit."""
    with pytest.raises(ConfigError, match="decorate a class's methods"):
        limited_to("1/s")(Listing)

    @limited_to("1/s")
    async def bare() -> None: ...

    with pytest.raises(ConfigError, match="must take the request"):
        await bare()
    with pytest.raises(ConfigError, match="no RateLimit is installed"):
        await limited_search(Request(scope_of()))


async def test_an_endpoint_may_fail_closed() -> None:
    """While the store is away, a login is refused with 503 and the other endpoints are served."""

    @limited_to("5/minute", on_failure="closed")
    async def login(request: Request) -> Response:
        return PlainTextResponse("in")

    @limited_to("5/minute")
    async def search(request: Request) -> Response:
        return PlainTextResponse("found")

    app = Starlette(routes=[Route("/login", login), Route("/search", search)])
    limited_app = RateLimit(
        app,
        "9/minute",
        store="redis://127.0.0.1:1",
        on_limit=lambda request, denial: PlainTextResponse("wait", 429),
    )
    seen = await ask(limited_app, "/login")
    assert (seen.status, seen.headers["x-ratelimit-policy"]) == (503, "degraded")
    assert (await ask(limited_app, "/search")).status == 200
    await limited_app.enforcer.aclose()
