"""The decorator of Starlette's endpoints: a limit of its own for each, with the middleware's."""

from __future__ import annotations

import threading

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tests.web.asgi_driver import ask, ask_scope, scope_of
from tollkeeper import ConfigError
from tollkeeper.asgi import RateLimit, limited
from tollkeeper.testing import ManualClock


@limited("1/minute")
async def search(request: Request) -> Response:
    """An endpoint that has a limit of its own."""
    return PlainTextResponse("found")


class Listing(HTTPEndpoint):
    """Methods are endpoints too."""

    @limited("2/minute", name="listing", count=lambda status: status == 200)
    async def get(self, request: Request) -> Response:
        return PlainTextResponse("all", 404 if "missing" in request.query_params else 200)

    @limited("2/minute", key=lambda call: call.native.headers["x-user"])
    async def post(self, request: Request) -> Response:
        return PlainTextResponse("added")


@limited("9/minute")
@limited("2/minute", count=lambda status: status == 401)
async def login(request: Request) -> Response:
    """An endpoint with two limits of one window."""
    return PlainTextResponse("no", 401)


@limited("1/minute")
async def feed(websocket: WebSocket) -> None:
    """A WebSocket that has a limit of its own."""
    await websocket.accept()


def _endpoints() -> Starlette:
    return Starlette(
        routes=[
            Route("/search", search),
            Route("/listing", Listing),
            Route("/login", login),
            WebSocketRoute("/feed", feed),
        ],
        middleware=[Middleware(RateLimit, limits="9/minute", clock=ManualClock(1_000))],
    )


async def test_an_endpoint_has_limits_of_its_own() -> None:
    """Beside those of the application, with one answer for both."""
    app = _endpoints()
    seen = await ask(app, "/search")
    assert seen.headers["ratelimit-policy"] == (
        '"default";q=9;w=60, "tests.test_asgi_endpoints.search";q=1;w=60'
    )
    assert (await ask(app, "/search")).status == 429
    missing = [await ask(app, "/listing", query_string=b"missing=1") for _ in range(3)]
    assert [seen.status for seen in missing] == [404] * 3
    listed = [await ask(app, "/listing") for _ in range(3)]
    assert [seen.status for seen in listed] == [200, 200, 429]
    feeds = [await ask_scope(app, scope_of("/feed", kind="websocket")) for _ in range(2)]
    assert [seen.types for seen in feeds] == [["websocket.accept"], ["websocket.close"]]


async def test_two_limits_of_one_endpoint_count_apart() -> None:
    """Even with the same window, and the same key."""
    app = _endpoints()
    seen = [await ask(app, "/login") for _ in range(3)]
    assert [each.status for each in seen] == [401, 401, 429]
    name = "tests.test_asgi_endpoints.login"
    assert seen[0].headers["ratelimit-policy"] == (
        f'"default";q=9;w=60, "{name}";q=9;w=60, "{name} #2";q=2;w=60'
    )


async def test_an_endpoint_that_is_not_async() -> None:
    """It runs in a thread, as Starlette has it without a limit; methods too."""
    threads: list[int] = []

    @limited("2/minute")
    def blocking(request: Request) -> Response:
        threads.append(threading.get_ident())
        return PlainTextResponse(request.path_params["word"])

    class Blocking(HTTPEndpoint):
        @limited("1/minute")
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
    """And not the object whose method it is, which has a scope too."""
    app = _endpoints()
    users = ["ada", "ada", "ada", "bob"]
    seen = [await ask(app, "/listing", method="POST", headers=[("x-user", u)]) for u in users]
    assert [each.status for each in seen] == [200, 200, 429, 200]


async def test_an_endpoint_that_cannot_be_limited_is_a_mistake() -> None:
    """The developer is told: a class, no request, no middleware."""
    with pytest.raises(ConfigError, match="decorate a class's methods"):
        limited("1/s")(Listing)

    @limited("1/s")
    async def bare() -> None: ...

    with pytest.raises(ConfigError, match="takes the request"):
        await bare()
    with pytest.raises(ConfigError, match="no RateLimit is installed"):
        await search(Request(scope_of()))
