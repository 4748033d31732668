"""The ASGI middleware: charges before, headers on what starts, and nothing else touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.websockets import WebSocket

from tests.edge.asgi_driver import Message, ask, ask_scope, run_lifespan, scope_of
from tollkeeper import AsyncLimiter, ConfigError, Limit
from tollkeeper.edge.answers import Answer, Style
from tollkeeper.edge.asgi import RateLimit
from tollkeeper.testing import ManualClock

HEADERS = {
    "x-ratelimit-limit": "2",
    "x-ratelimit-remaining": "1",
    "x-ratelimit-reset": "1030",
    "ratelimit": '"default";r=1;t=30',
    "ratelimit-policy": '"default";q=2;w=60',
}


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everything the same way."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """A WebSocket that says what it is told until the client goes."""
    websocket = WebSocket(scope, receive, send)
    await websocket.accept(headers=[(b"x-mine", b"1")])
    async for text in websocket.iter_text():
        await websocket.send_text(text)


def limited(app: Any = hello, limits: Any = "2/minute", **options: Any) -> RateLimit:
    """`app` behind the middleware, at a time that stands still."""
    return RateLimit(app, limits=limits, clock=ManualClock(1_000), **options)


def _remaining(app: RateLimit) -> int:
    """How much the address of the test's client has left."""
    return int(app.guard._limiter.peek("address:192.0.2.1").remaining)


# ── Answers ────────────────────────────────────────────────────────────────────────────────────


async def test_an_allowed_response_has_the_headers_and_is_otherwise_untouched() -> None:
    """Status, the application's headers and the body are as they were."""
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

    guarded = limited(app)
    for _ in range(3):
        seen = await ask(guarded)
    assert len(ran) == 2
    assert seen.status == 429
    assert seen.headers["content-type"] == "application/problem+json"
    assert seen.headers["retry-after"] == "30"
    assert seen.headers["x-ratelimit-remaining"] == "0"
    assert int(seen.headers["content-length"]) == len(seen.body)
    assert json.loads(seen.body)["status"] == 429


async def test_a_denied_head_request_has_no_body() -> None:
    """HEAD is counted like others, and answered with the headers alone."""
    guarded = limited(limits="1/minute")
    await ask(guarded)
    seen = await ask(guarded, method="HEAD")
    assert (seen.status, seen.body) == (429, b"")
    assert int(seen.headers["content-length"]) > 0


async def test_retry_after_once_waited_for_succeeds() -> None:
    """By the header alone, in whole seconds, a client gets through."""
    guarded = limited(limits="3/minute")
    for _ in range(4):
        seen = await ask(guarded)
    clock = guarded.guard.terms.clock
    assert isinstance(clock, ManualClock)
    clock.advance(int(seen.headers["retry-after"]))
    assert (await ask(guarded)).status == 200


async def test_the_applications_own_headers_win() -> None:
    """Who sends headers about limits speaks for itself; two of a kind would contradict."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"X-RateLimit-Limit", b"7")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    seen = await ask(limited(app))
    assert seen.start["headers"] == [(b"X-RateLimit-Limit", b"7")]


async def test_a_message_that_the_application_keeps_is_not_changed() -> None:
    """An application may send one and the same start to everybody."""
    start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body"})

    guarded = limited(app)
    await ask(guarded)
    assert (await ask(guarded)).headers["x-ratelimit-remaining"] == "0"
    assert start["headers"] == [(b"a", b"b")]


async def test_the_style_of_the_headers_is_a_setting() -> None:
    """Only what was asked for is sent."""
    seen = await ask(limited(style=Style(draft=None, legacy=False)))
    assert seen.headers == {"x-mine": "1"}


async def test_every_other_message_passes_as_it_is() -> None:
    """Pieces, trailers, files and what servers may add later are not looked at."""
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


async def test_a_stream_is_sent_piece_by_piece() -> None:
    """Each piece goes out before the next is made, and none is kept."""
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
    """It is counted once, as it opens; what is said in it is not."""
    seen = await ask_scope(limited(echo), scope_of(kind="websocket"))
    assert seen.types == ["websocket.accept", "websocket.send"]
    assert seen.headers == {"x-mine": "1", **HEADERS}
    assert seen.messages[1]["text"] == "hi"


async def test_a_denied_websocket_is_answered_where_the_server_can() -> None:
    """With the extension the client sees the same 429 as over HTTP."""
    guarded = limited(echo, limits="1/minute")
    scope = scope_of(kind="websocket", extensions={"websocket.http.response": {}})
    await ask_scope(guarded, dict(scope))
    seen = await ask_scope(guarded, dict(scope))
    assert seen.types == ["websocket.http.response.start", "websocket.http.response.body"]
    assert seen.status == 429
    assert seen.headers["retry-after"] == "60"
    assert json.loads(seen.body)["status"] == 429


async def test_a_denied_websocket_is_closed_where_the_server_cannot() -> None:
    """Before it is accepted, with the code for a policy."""
    guarded = limited(echo, limits="1/minute")
    await ask_scope(guarded, scope_of(kind="websocket"))
    seen = await ask_scope(guarded, scope_of(kind="websocket"))
    assert seen.types == ["websocket.close"]
    assert seen.messages[0]["code"] == 1008


# ── Hooks ──────────────────────────────────────────────────────────────────────────────────────


async def test_on_limit_may_answer_with_a_response_of_the_framework() -> None:
    """It gets our headers, Retry-After among them, and a None leaves the answer to us."""
    guarded = limited(
        limits="1/minute",
        on_limit=lambda call, ruling: (
            JSONResponse({"slow": "down"}, 420) if call.path == "/mine" else None
        ),
    )
    await ask(guarded)
    seen = await ask(guarded, "/mine")
    assert (seen.status, seen.body) == (420, b'{"slow":"down"}')
    assert seen.headers["retry-after"] == "60"
    assert seen.headers["x-ratelimit-remaining"] == "0"
    assert (await ask(guarded, "/other")).status == 429


async def test_on_limit_may_say_retry_after_itself() -> None:
    """Then its own is sent, and ours is not beside it."""

    async def on_limit(call: Any, ruling: Any) -> Any:
        return PlainTextResponse("later", 503, headers={"Retry-After": "7"})

    guarded = limited(limits="1/minute", on_limit=on_limit)
    await ask(guarded)
    seen = await ask(guarded)
    assert seen.headers["retry-after"] == "7"
    assert seen.headers["x-ratelimit-limit"] == "1"


async def test_on_limit_may_answer_with_an_answer_or_an_error() -> None:
    """An Answer is sent as it is; what is no response is told to the developer."""
    found: list[Any] = [Answer(200, [("X-Mine", "1")], b"ok"), "nonsense"]
    guarded = limited(limits="1/minute", on_limit=lambda call, ruling: found.pop(0))
    await ask(guarded)
    seen = await ask(guarded)
    assert (seen.status, seen.body, seen.headers["x-mine"]) == (200, b"ok", "1")
    with pytest.raises(ConfigError, match="on_limit returned 'nonsense'"):
        await ask(guarded)


async def test_on_limit_answers_websockets_too_where_the_server_can() -> None:
    """A response of Starlette's knows how; where the server cannot, it is closed."""
    guarded = limited(
        echo, limits="1/minute", on_limit=lambda call, ruling: PlainTextResponse("no", 420)
    )
    extended = scope_of(kind="websocket", extensions={"websocket.http.response": {}})
    await ask_scope(guarded, scope_of(kind="websocket"))
    assert (await ask_scope(guarded, extended)).status == 420
    assert (await ask_scope(guarded, scope_of(kind="websocket"))).types == ["websocket.close"]


async def test_a_hook_that_raises_is_the_applications_error() -> None:
    """It goes through to the server, as one in the application would."""

    def key(call: Any) -> str:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await ask(limited(key=key))


@pytest.mark.parametrize(
    ("options", "status"),
    [({"cost": 3}, 422), ({"key": lambda call: ""}, 400), ({"cost": lambda call: -1}, 400)],
)
async def test_what_cannot_be_counted_is_refused_and_never_a_500(
    options: dict[str, Any], status: int
) -> None:
    """A cost that never fits and a key that is none have answers of their own."""
    seen = await ask(limited(**options))
    assert seen.status == status
    assert json.loads(seen.body)["status"] == status
    assert "retry-after" not in seen.headers


# ── Settling ───────────────────────────────────────────────────────────────────────────────────


async def test_the_application_settles_what_its_request_cost() -> None:
    """The charge is in the scope; what is said of it last is what is spent."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["tollkeeper.charge"].settle(50)
        await hello(scope, receive, send)
        scope["tollkeeper.charge"].settle(37)

    guarded = limited(app, limits="1000/minute", cost=100)
    await ask(guarded)
    assert _remaining(guarded) == 1000 - 37


async def test_whoever_has_seen_the_end_of_a_response_finds_it_settled() -> None:
    """It is applied before the last piece goes out, so that the next request can rely on it."""
    found: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        scope["tollkeeper.charge"].settle(10)
        await send({"type": "http.response.body", "body": b"2", "more_body": False})

    guarded = limited(app, limits="1000/minute", cost=100)

    async def send(message: Message) -> None:
        found.append(_remaining(guarded))

    await guarded(scope_of(), None, send)  # type: ignore[arg-type]  # nobody receives
    assert found == [900, 900, 990]


@pytest.mark.parametrize(("status", "left"), [(401, 1), (200, 2)])
async def test_only_outcomes_that_count_are_spent(status: int, left: int) -> None:
    """By the status of the response, and settled when its end is seen."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("", status)(scope, receive, send)

    guarded = limited(app, count=lambda status: status == 401)
    await ask(guarded)
    assert _remaining(guarded) == left


async def test_a_handler_that_raises_counts_as_500_and_still_settles() -> None:
    """The error goes on to the server, and what was said of the cost holds."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["tollkeeper.charge"].settle(0)
        raise ZeroDivisionError("mine")

    seen: list[int] = []
    guarded = limited(app, count=lambda status: bool(seen.append(status)) or True)
    with pytest.raises(ZeroDivisionError):
        await ask(guarded)
    assert seen == [500]
    assert _remaining(guarded) == 2


@pytest.mark.parametrize(("said", "left"), [(None, 1), (0, 2)])
async def test_a_request_that_is_cancelled_still_settles(said: int | None, left: int) -> None:
    """A client that hangs up has its outcome counted, unless the application said otherwise."""
    running = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if said is not None:
            scope["tollkeeper.charge"].settle(said)
        running.set()
        await asyncio.Event().wait()

    guarded = limited(app, count=lambda status: status == 401)
    task = asyncio.create_task(ask(guarded))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _remaining(guarded) == left


async def test_a_leaky_bucket_holds_a_request_before_the_application_runs() -> None:
    """The application sees the time at which the request is to be served."""
    times: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        times.append(guarded.guard.clock.now_ns() // 10**9)
        await hello(scope, receive, send)

    limit = Limit(1, per=1, algorithm="leaky_bucket", capacity=3)
    guarded = limited(app, limits=limit)
    for _ in range(3):
        assert (await ask(guarded)).status == 200
    assert times == [1000, 1001, 1002]


# ── In frameworks ──────────────────────────────────────────────────────────────────────────────


def _starlette(**options: Any) -> Starlette:
    async def user(request: Any) -> Any:
        return PlainTextResponse(request.path_params["id"])

    routes = [Route("/users/{id}", user), Mount("/v2", routes=[Route("/users/{id}", user)])]
    options.setdefault("clock", ManualClock(1_000))
    return Starlette(routes=routes, middleware=[Middleware(RateLimit, **options)])


async def test_path_parameters_do_not_slip_past_a_routes_limit() -> None:
    """/users/1 and /users/2 are one endpoint, and another route is another."""
    app = _starlette(limits="2/minute", per_route=True)
    paths = ["/users/1", "/users/2", "/users/3", "/v2/users/1", "/v2/users/2", "/v2/users/3"]
    found = [(await ask(app, path)).status for path in paths]
    assert found == [200, 200, 429] * 2


async def test_rules_see_the_routes_template() -> None:
    """A rule on a template, counted by endpoint, holds for every number in the path."""
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


async def test_several_middlewares_are_one_answer() -> None:
    """The headers are of the tightest, all policies are listed, and who is denied costs nothing."""
    clock = ManualClock(1_000)
    outer, inner = AsyncLimiter("9/minute", clock=clock), AsyncLimiter("1/s", clock=clock)
    guarded = RateLimit(RateLimit(hello, limiter=inner), limiter=outer)
    seen = await ask(guarded)
    assert seen.headers["x-ratelimit-limit"] == "1"
    assert seen.headers["ratelimit-policy"] == '"default";q=9;w=60, "default.1s";q=1;w=1'
    assert (await ask(guarded)).status == 429
    assert (await outer.peek("address:192.0.2.1")).remaining == 8


async def test_the_lifespan_passes_and_closes_what_was_opened() -> None:
    """At shutdown the store is closed; a second start opens it again."""
    started: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await hello(scope, receive, send)
            return
        for word in ("startup", "shutdown"):
            started.append((await receive())["type"])
            await send({"type": f"lifespan.{word}.complete"})

    guarded = limited(app)
    for _ in range(2):
        assert (await ask(guarded)).headers["x-ratelimit-remaining"] == "1"
        sent = await run_lifespan(guarded)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert not guarded.guard._opened
    assert started == ["lifespan.startup", "lifespan.shutdown"] * 2


async def test_an_application_without_a_lifespan_keeps_its_limits() -> None:
    """Servers take its error for a no and go on; so does the limiter."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await hello(scope, receive, send)

    guarded = limited(app, limits="1/minute")
    await ask(guarded)
    with pytest.raises(AssertionError):
        await run_lifespan(guarded)
    assert (await ask(guarded)).status == 429


async def test_other_kinds_of_scope_pass() -> None:
    """What ASGI may add one day is none of ours."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    scope = {"type": "webtransport"}
    await limited(app)(scope, "r", "s")  # type: ignore[arg-type]  # passed as they are
    assert seen == [(scope, "r", "s")]


def test_a_middleware_without_limits_is_a_mistake() -> None:
    """It would limit nothing, and nobody would notice."""
    with pytest.raises(ConfigError, match="RateLimit needs"):
        RateLimit(hello, store="memory://")
