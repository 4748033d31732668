"""Handlers of the application answer denials: those of FastAPI, Starlette, Flask and Django."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types
from typing import Annotated, Any

import pytest
from django.http import Http404, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path as django_path
from django.utils.decorators import method_decorator
from django.views import View
from fastapi import Body, FastAPI
from flask import Blueprint, Flask, request
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route
from werkzeug.exceptions import HTTPException as FlaskHTTPException
from werkzeug.exceptions import ServiceUnavailable, TooManyRequests

from ratekeeper import RatekeeperError, asgi, django, fastapi, flask
from ratekeeper.django import rate_limit
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import Denial
from tests.web.asgi_driver import Seen, ask, ask_scope, scope_of
from tests.web.django_site import OURS
from tests.web.flask_app import app_with

AWAY = "redis://127.0.0.1:1"


async def answer() -> str:
    return "found"


def fastapi_with(
    limits: Any = None, own: Any = "1/minute", **options: Any
) -> tuple[FastAPI, fastapi.RateLimit]:
    app = FastAPI()
    limit = fastapi.RateLimit(app, limits, clock=ManualClock(1_000), **options)
    app.add_api_route("/", answer, dependencies=[] if own is None else [limit(own)])
    return app, limit


async def second(app: Any, path: str = "/") -> Seen:
    """Return the answer to the second request, which is denied."""
    await ask(app, path)
    return await ask(app, path)


# ── FastAPI and Starlette ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("on", ["route", "application"])
@pytest.mark.parametrize("kind", [fastapi.RateLimitExceeded, 429, HTTPException])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_answers_denials(on: str, kind: Any, is_async: bool) -> None:
    """By the exception, the status, or a class of the exception; of a route and of the middleware.

    Its response gets the headers.
    """
    app, _ = fastapi_with(own="1/minute") if on == "route" else fastapi_with("1/minute", None)

    def too_many(request: Any, error: Any) -> JSONResponse:
        assert isinstance(error, fastapi.RateLimitExceeded)
        assert (error.status_code, error.headers) == (429, {"Retry-After": "60"})
        found = {"wait": error.denial.retry_after, "said": error.detail, "path": request.url.path}
        return JSONResponse(found, 420)

    async def too_many_async(request: Any, error: Any) -> JSONResponse:
        return too_many(request, error)

    app.add_exception_handler(kind, too_many_async if is_async else too_many)
    seen = await second(app)
    said = "The limit of 1 per 60 seconds has no room for this request; try again in 60 seconds."
    assert (seen.status, json.loads(seen.body)) == (420, {"wait": 60, "said": said, "path": "/"})
    assert (seen.headers["retry-after"], seen.headers["x-ratelimit-remaining"]) == ("60", "0")


@pytest.mark.parametrize("whole", [None, "5/minute"])
@pytest.mark.parametrize("hook", ["handler", "on_limit"])
async def test_the_headers_are_those_of_the_limit_that_denied(whole: str | None, hook: str) -> None:
    """Also if the limit of the application has allowed the request before the route denied it."""
    made = lambda request, denial: PlainTextResponse("wait", 429)  # noqa: E731 - of both hooks
    options = {"on_limit": made} if hook == "on_limit" else {}
    app, _ = fastapi_with(whole, own="1/minute", **options)
    if hook == "handler":
        app.add_exception_handler(429, made)
    seen = await second(app)
    assert (seen.status, seen.body) == (429, b"wait")
    assert (seen.headers["retry-after"], seen.headers["x-ratelimit-limit"]) == ("60", "1")
    assert seen.headers["ratelimit"] == '"GET /";r=0;t=60'


@pytest.mark.parametrize("on", ["route", "application"])
async def test_the_answer_is_unchanged_without_a_handler(on: str) -> None:
    """FastAPI's own handler of HTTPException is not one of the application's, nor is one for 500.

    A handler for Exception answers server errors only.
    """
    plain, _ = fastapi_with(own="1/minute") if on == "route" else fastapi_with("1/minute", None)
    expected = await second(plain)
    app, _ = fastapi_with(own="1/minute") if on == "route" else fastapi_with("1/minute", None)
    for kind in (Exception, 500, 404, fastapi.LimiterUnavailable):
        app.add_exception_handler(kind, lambda request, error: PlainTextResponse("wrong", 500))
    seen = await second(app)
    assert (seen.status, seen.body) == (429, expected.body)
    assert seen.headers == expected.headers
    assert seen.headers["content-type"] == "application/problem+json"


async def test_a_handler_sets_its_own_headers() -> None:
    """Ours are added beside them."""
    app, _ = fastapi_with()
    wait = {"Retry-After": "7"}
    app.add_exception_handler(429, lambda request, error: PlainTextResponse("wait", 429, wait))
    seen = await second(app)
    assert (seen.headers["retry-after"], seen.headers["x-ratelimit-limit"]) == ("7", "1")


async def test_a_handler_may_read_the_body() -> None:
    """Defect: FastAPI had read it for the endpoint, and the handler waited for it forever."""
    app, limit = fastapi_with(own=None)

    @app.exception_handler(429)
    async def echo(request: Any, _: Exception) -> JSONResponse:
        return JSONResponse(len(await request.body()), 429)

    async def order(items: Annotated[list[str] | None, Body()] = None) -> str:
        return "ordered"

    app.add_api_route("/order", order, dependencies=[limit("1/minute")])
    async with asyncio.timeout(5):
        seen = await second(app, "/order")
    assert (seen.status, seen.body) == (429, b"0")


async def test_a_503_has_a_handler_of_its_own() -> None:
    """Handlers for 503 and LimiterUnavailable answer requests that failed closed."""
    for kind in (503, fastapi.LimiterUnavailable):
        app, _ = fastapi_with(store=AWAY, on_failure="closed")
        app.add_exception_handler(429, lambda request, error: PlainTextResponse("wrong"))
        app.add_exception_handler(
            kind, lambda request, error: PlainTextResponse(type(error).__name__, 503)
        )
        seen = await ask(app)
        assert (seen.status, seen.body) == (503, b"LimiterUnavailable")
        assert seen.headers["retry-after"] == "1"


async def test_on_limit_takes_precedence_over_handlers() -> None:
    """A handler answers the requests for which `on_limit` returns None."""
    app, _ = fastapi_with(
        on_limit=lambda request, denial: (
            PlainTextResponse("hook", 429) if request.query("hook") else None
        )
    )
    app.add_exception_handler(429, lambda request, error: PlainTextResponse("handler", 429))
    await ask(app)
    assert (await ask(app, query_string=b"hook=1")).body == b"hook"
    assert (await ask(app)).body == b"handler"


async def test_a_handler_that_returns_none_leaves_the_default() -> None:
    """And one that raises is an error of the application."""
    app, _ = fastapi_with()
    app.add_exception_handler(429, lambda request, error: None)
    assert (await second(app)).headers["content-type"] == "application/problem+json"

    def broken(request: Any, error: Exception) -> Any:
        raise ZeroDivisionError

    app, _ = fastapi_with()
    app.add_exception_handler(429, broken)
    with pytest.raises(ZeroDivisionError):
        await second(app)


async def test_the_handlers_of_starlette_are_found_wherever_the_middleware_is() -> None:
    """In the application, around it, and in an application that is mounted in another."""

    def handlers(text: str) -> dict[Any, Any]:
        return {429: lambda request, error: PlainTextResponse(text, 429)}

    clock = ManualClock(1_000)
    limited = Middleware(asgi.RateLimit, limits="1/minute", clock=clock)
    routes = [Route("/", lambda request: PlainTextResponse("found"))]
    inside = Starlette(routes=routes, middleware=[limited], exception_handlers=handlers("inside"))
    assert (await second(inside)).body == b"inside"
    plain = Starlette(routes=routes, exception_handlers=handlers("around"))
    around = asgi.RateLimit(plain, "1/minute", clock=ManualClock(1_000))
    assert (await second(around)).body == b"around"
    # The limit of the mounted application, and its handler.
    mounted = Starlette(routes=[Mount("/in", inside)], exception_handlers=handlers("outside"))
    clock.advance(60)
    assert (await second(mounted, "/in/")).body == b"inside"


async def test_other_frameworks_and_websockets_have_no_handlers() -> None:
    """Their `exception_handlers` may have another form; a WebSocket is not a request."""

    class Other:
        exception_handlers = {429: "not a function"}  # noqa: RUF012 - as such a framework has it

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("denied")

    class Naming:
        """A framework that names itself in the scope."""

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app({**scope, "app": Other()}, receive, send)

    limited = asgi.RateLimit(Other(), "1/minute")
    with pytest.raises(AssertionError, match="denied"):
        await ask(limited)
    assert (await ask(limited)).status == 429
    assert (await ask(Naming(limited))).status == 429
    app, _ = fastapi_with("1/minute", None)
    app.add_exception_handler(429, lambda request, error: PlainTextResponse("wrong", 429))
    await ask(app)
    seen = await ask_scope(app, scope_of(kind="websocket"))
    assert seen.types == ["websocket.close"]


def test_asgi_needs_no_starlette() -> None:
    """The exceptions then have a base of their own with the same attributes."""
    program = (
        "import sys\n"
        "sys.modules['starlette'] = sys.modules['starlette.exceptions'] = None\n"
        "from ratekeeper import Limiter\n"
        "from ratekeeper.asgi import Denial, RateLimitExceeded\n"
        "limiter = Limiter('1/minute')\n"
        "result = [limiter.evaluate('k') for _ in range(2)][1]\n"
        "error = RateLimitExceeded(Denial(result, 0))\n"
        "print(error.status_code, error.headers, error.denial.status)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "429 {'Retry-After': '60'} 429\n"


# ── Flask ──────────────────────────────────────────────────────────────────────────────────────


def denied_flask(on: str, **options: Any) -> tuple[Flask, Any]:
    """Return an application whose route /own may be called once."""
    whole = "1/minute" if on == "application" else None
    app, limit, _, client = app_with(whole, **options)
    view: Any = lambda: "own"  # noqa: E731 - a view of each application
    if on == "blueprint":
        shop = Blueprint("shop", __name__)
        shop.add_url_rule("/own", "own", view)
        limit("1/minute")(shop)
        app.register_blueprint(shop)
    else:
        app.add_url_rule("/own", "own", limit("1/minute")(view) if on == "view" else view)
    return app, client


@pytest.mark.parametrize("on", ["application", "blueprint", "view"])
@pytest.mark.parametrize(
    "kind", [429, flask.RateLimitExceeded, TooManyRequests, FlaskHTTPException]
)
def test_an_errorhandler_of_flask_answers_denials(on: str, kind: Any) -> None:
    """By the status or a class of the exception. Its response gets the headers."""
    app, client = denied_flask(on)

    def too_many(error: Any) -> Any:
        assert isinstance(error, flask.RateLimitExceeded)
        return {"wait": error.denial.retry_after, "said": error.description}, 420

    app.register_error_handler(kind, too_many)
    client.get("/own")
    response = client.get("/own")
    assert (response.status_code, response.json["wait"]) == (420, 60)
    assert response.json["said"].startswith("The limit of 1 per 60 seconds has no room")
    headers = response.headers
    assert (headers["Retry-After"], headers["X-RateLimit-Remaining"]) == ("60", "0")


@pytest.mark.parametrize("on", ["application", "blueprint", "view"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_flask_sends_the_default_without_an_errorhandler(on: str, method: str) -> None:
    """Status, headers and body are those of the denial; another status's handler is not called."""
    denials: list[Denial] = []

    def noted(web_request: Any, denial: Denial) -> Any:
        denials.append(denial)

    app, client = denied_flask(on, on_limit=noted)
    app.register_error_handler(404, lambda error: ("wrong", 404))
    seen = []
    app.after_request(lambda response: seen.append(response.status_code) or response)
    client.get("/own")
    response = client.open("/own", method=method)
    expected = denials[0].answer
    assert response.status_code == expected.status == 429
    assert response.data == (expected.body if method == "GET" else b"")
    length = {"Content-Length": str(len(expected.body))}
    assert dict(response.headers) == {**dict(expected.headers), **length}
    assert seen == [200, 429]


def test_a_503_of_flask_has_an_errorhandler_of_its_own() -> None:
    """A view that failed closed raises a ServiceUnavailable."""
    for kind in (503, flask.LimiterUnavailable, ServiceUnavailable):
        app, limit, _, client = app_with(store=AWAY)
        app.add_url_rule("/own", "own", limit("1/minute", on_failure="closed")(lambda: "own"))
        app.register_error_handler(429, lambda error: ("wrong", 429))
        app.register_error_handler(kind, lambda error: (type(error).__name__, 503))
        response = client.get("/own")
        assert (response.status_code, response.text) == (503, "LimiterUnavailable")
        assert response.headers["Retry-After"] == "1"
        limit.close(app)
    app, limit, _, client = app_with("1/minute", store=AWAY, on_failure="closed")
    assert client.get("/hello").json["error"]["code"] == "LIMITER_UNAVAILABLE"
    limit.close(app)


def test_on_limit_takes_precedence_over_an_errorhandler() -> None:
    """An errorhandler answers the requests for which `on_limit` returns None."""
    app, client = denied_flask(
        "view",
        on_limit=lambda web_request, denial: ("hook", 429) if "hook" in request.args else None,
    )
    app.register_error_handler(429, lambda error: ("handler", 429))
    client.get("/own")
    assert client.get("/own?hook").text == "hook"
    assert client.get("/own").text == "handler"


# ── Django ─────────────────────────────────────────────────────────────────────────────────────


@rate_limit("1/minute")
def limited(request: Any) -> HttpResponse:
    return HttpResponse("in")


@rate_limit("1/minute")
async def alimited(request: Any) -> HttpResponse:
    return HttpResponse("in")


@rate_limit("1/minute", on_failure="closed")
def closed(request: Any) -> HttpResponse:
    return HttpResponse("in")


@rate_limit("5/minute")
@rate_limit("1/minute")
def twice(request: Any) -> HttpResponse:
    return HttpResponse("in")


class Rest(View):
    """A view class that handles the exceptions of its methods, as REST frameworks do."""

    @method_decorator(rate_limit("1/minute"))
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().dispatch(request, *args, **kwargs)
        except django.RateLimitExceeded as error:
            return JsonResponse({"wait": error.denial.retry_after}, status=error.status_code)


URLS: Any = types.ModuleType("urls_of_handlers")
URLS.urlpatterns = [
    django_path(each.__name__, each) for each in (limited, alimited, closed, twice)
] + [django_path("rest", Rest.as_view())]


class Handling:
    """A middleware that answers denied views."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self._get_response(request)

    def process_exception(self, request: Any, error: Exception) -> Any:
        if isinstance(error, django.RateLimitExceeded | django.LimiterUnavailable):
            found = {"wait": error.denial.retry_after, "said": str(error)}
            return JsonResponse(found, status=420 if error.status_code == 429 else 520)
        return None


def plain_handling(get_response: Any) -> Any:
    """Return the same, as a synchronous middleware."""
    made = Handling(get_response)

    def serve(request: Any) -> Any:
        return made(request)

    serve.process_exception = made.process_exception  # type: ignore[attr-defined]  # as Django asks
    return serve


def site(*middleware: str, **setting: Any) -> override_settings:
    setting = {"clock": ManualClock(1_000), **setting}
    return override_settings(RATEKEEPER=setting, ROOT_URLCONF=URLS, MIDDLEWARE=[*middleware])


@pytest.mark.parametrize("path", ["/limited", "/alimited", "/twice"])
async def test_process_exception_answers_denied_views(path: str) -> None:
    """It sees RateLimitExceeded; its response gets the headers."""
    with site(OURS, f"{__name__}.plain_handling"):
        client = AsyncClient()
        await client.get(path)
        response = await client.get(path)
        assert (response.status_code, response.json()["wait"]) == (420, 60)
        assert response.json()["said"].startswith("The limit of 1 per 60 seconds has no room")
        assert response.headers["Retry-After"] == "60"
        assert response.headers["X-RateLimit-Remaining"] == "0"


@pytest.mark.parametrize("middleware", [(OURS,), (), (f"{__name__}.plain_handling",)])
@pytest.mark.parametrize("path", ["/limited", "/alimited", "/twice"])
def test_django_sends_the_default_without_a_handler(path: str, middleware: Any) -> None:
    """Without our middleware a view is answered at once, whatever other middleware there is."""
    denials: list[Denial] = []

    def noted(request: Any, denial: Denial) -> Any:
        denials.append(denial)

    with site(*middleware, on_limit=noted):
        client = Client()
        client.get(path)
        response = client.get(path)
        expected = denials[0].answer
        assert (response.status_code, response.content) == (429, expected.body)
        assert response.headers.items() >= dict(expected.headers).items()
        assert set(response.headers) - set(dict(expected.headers)) <= {"Content-Length"}


def test_a_framework_may_handle_the_exception() -> None:
    """It is raised inside the view class; if it is not handled, the answer is the default."""
    with site(OURS):
        client = Client()
        assert client.get("/rest").status_code == 200
        response = client.get("/rest")
        assert (response.status_code, response.json()) == (429, {"wait": 60})
        assert response.headers["RateLimit-Policy"] == '"GET /rest";q=1;w=60'


def test_a_503_of_django_has_an_exception_of_its_own() -> None:
    """A view that failed closed raises LimiterUnavailable."""
    with site(OURS, f"{__name__}.plain_handling", store=AWAY):
        assert Client().get("/closed").status_code == 520
    with site(OURS, store=AWAY):
        assert Client().get("/closed").json()["error"]["code"] == "LIMITER_UNAVAILABLE"


def test_on_limit_takes_precedence_over_process_exception() -> None:
    """The exception is raised for the requests for which `on_limit` returns None."""

    def hook(request: Any, denial: Denial) -> Any:
        return HttpResponse("hook", status=429) if "hook" in request.native.GET else None

    with site(OURS, f"{__name__}.plain_handling", on_limit=hook):
        client = Client()
        client.get("/limited")
        assert client.get("/limited?hook").content == b"hook"
        assert client.get("/limited").status_code == 420


def test_the_middlewares_own_denial_is_answered_at_once() -> None:
    """Django calls `process_exception` for views only; `on_limit` answers these requests."""
    with site(OURS, f"{__name__}.plain_handling", limits="1/minute"):
        client = Client()
        assert [client.get("/missing").status_code for _ in range(2)] == [404, 429]


def missing(request: Any) -> HttpResponse:
    raise Http404


@rate_limit("1/minute", name="missing")
def not_found(request: Any, exception: Exception) -> HttpResponse:
    return HttpResponse("not found", status=404)


@pytest.mark.parametrize("path", ["/missing", "/no-such-path"])
def test_a_limited_handler404_answers_its_denials(path: str) -> None:
    """Defect: it raised an exception that Django passes to no middleware, and sent a 500."""
    urls: Any = types.ModuleType("urls_of_handler404")
    urls.urlpatterns = [django_path("missing", missing)]
    urls.handler404 = not_found
    with site(OURS), override_settings(ROOT_URLCONF=urls):
        client = Client()
        assert [client.get(path).status_code for _ in range(2)] == [404, 429]


def test_every_integration_exports_the_exceptions() -> None:
    """Under the same names, all of them errors of Ratekeeper."""
    for module in (asgi, fastapi, flask, django):
        assert {"RateLimitExceeded", "LimiterUnavailable", "Denial"} <= set(module.__all__)
        assert issubclass(module.RateLimitExceeded, RatekeeperError)
        assert issubclass(module.LimiterUnavailable, RatekeeperError)
    assert fastapi.RateLimitExceeded is asgi.RateLimitExceeded
