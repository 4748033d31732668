"""Limits that replace the defaults: which routes do, and that no request is unlimited by accident.

tests/web/test_routes.py has the claims that hold in every integration.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import AsyncRequestFactory, Client, override_settings
from django.urls import path as django_path
from django.utils.decorators import method_decorator
from django.views import View
from fastapi import APIRouter, Depends, FastAPI, HTTPException, WebSocket
from flask import Blueprint
from flask.views import MethodView
from flask.views import View as FlaskView
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from ratekeeper import asgi
from ratekeeper.django import RateLimitMiddleware, rate_limit
from ratekeeper.fastapi import RateLimit
from ratekeeper.testing import ManualClock
from ratekeeper.web import overrides
from ratekeeper.web.charges import AsgiCharges
from ratekeeper.web.enforcer import AsyncEnforcer
from ratekeeper.web.options import EnforcerOptions
from ratekeeper.web.overrides import RouteOverrides, mark_override, override_count
from ratekeeper.web.requests import RoutedAsgiRequest
from tests.web.asgi_driver import ask, ask_scope, scope_of
from tests.web.django_site import OURS
from tests.web.flask_app import app_with, statuses

OWN = {"override_defaults": True}


async def asked(app: Any, *paths: str, method: str = "GET") -> list[int]:
    return [(await ask(app, path, method=method)).status for path in paths]


def fastapi_with(limits: str = "1/minute", **options: Any) -> tuple[FastAPI, RateLimit]:
    app = FastAPI()
    return app, RateLimit(app, limits, clock=ManualClock(1_000), **options)


def starlette_with(*routes: Any, limits: str = "1/minute") -> Starlette:
    clock = ManualClock(1_000)
    limited = Middleware(asgi.RateLimit, limits=limits, clock=clock)
    return Starlette(routes=list(routes), middleware=[limited])


def found(*_: Any) -> PlainTextResponse:
    return PlainTextResponse("found")


async def answer() -> str:
    return "found"


# ── FastAPI ────────────────────────────────────────────────────────────────────────────────────


async def test_dependencies_override_wherever_they_are() -> None:
    """Of a route, a router, an included router, another dependency, or an argument."""
    app, limit = fastapi_with()

    within, as_argument = limit("2/minute", **OWN), limit("2/minute", **OWN)

    def inner(charge: Any = within) -> Any:
        return charge

    async def argument(charge: Any = as_argument) -> str:
        return str(charge.decision.remaining)

    own = APIRouter(prefix="/own", dependencies=[limit("2/minute", **OWN)])
    own.add_api_route("/item/{id}", answer)
    plain = APIRouter(prefix="/plain")
    plain.add_api_route("/item", answer)
    plain.add_api_route("/inner", answer, dependencies=[Depends(inner)])
    app.include_router(own)
    app.include_router(plain)
    app.include_router(plain, prefix="/v2", dependencies=[limit("2/minute", **OWN)])
    app.add_api_route("/argument", argument)
    for path in ("/own/item/1", "/plain/inner", "/v2/plain/item", "/argument"):
        assert await asked(app, *[path] * 3) == [200, 200, 429], path
    assert await asked(app, "/plain/item", "/plain/item") == [200, 429]


async def test_a_websocket_may_override() -> None:
    """Its limits count in place of the defaults, and the defaults count if they do not."""
    app, limit = fastapi_with()

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    router = APIRouter()
    router.add_api_websocket_route("/own", talk, dependencies=[limit("2/minute", **OWN)])
    router.add_api_websocket_route(
        "/none", talk, dependencies=[limit("2/minute", methods=["POST"], **OWN)]
    )
    app.include_router(router)

    async def talked(path: str) -> str:
        return (await ask_scope(app, scope_of(path, kind="websocket"))).types[0]

    assert [await talked("/own") for _ in range(3)] == [
        *("websocket.accept", "websocket.accept", "websocket.close")
    ]
    assert [await talked("/none") for _ in range(2)] == ["websocket.accept", "websocket.close"]


async def test_the_defaults_count_if_the_limit_is_not_reached() -> None:
    """Defect: a dependency that rejects passwords first could be asked without a limit."""
    guesses = []

    def log_in() -> None:
        guesses.append(1)
        raise HTTPException(401)

    app, limit = fastapi_with("2/minute")
    depends = [Depends(log_in), limit("5/minute", **OWN)]
    app.add_api_route("/login", answer, dependencies=depends)
    assert await asked(app, *["/login"] * 4) == [401, 401, 429, 429]
    seen = await ask(app, "/login")
    assert seen.headers["ratelimit-policy"] == '"default";q=2;w=60'
    assert b"Quota exceeded" in seen.body


async def test_the_defaults_count_a_request_that_fails_before_the_limit() -> None:
    """The error reaches the server; a request over the limit gets a 429 as well."""

    def broken() -> None:
        raise ZeroDivisionError

    app, limit = fastapi_with("1/minute")
    app.add_api_route("/", answer, dependencies=[Depends(broken), limit("5/minute", **OWN)])
    app.add_api_route("/plain", answer)
    with pytest.raises(ZeroDivisionError):
        await ask(app, "/")
    assert await asked(app, "/plain") == [429]


async def test_the_defaults_count_a_request_that_is_cancelled_before_the_limit() -> None:
    """Defect: a client could avoid them by closing the connection, if the server cancels then."""
    app, limit = fastapi_with("2/minute")

    async def check_password() -> None:
        await asyncio.Event().wait()

    own = [Depends(check_password), limit("9/minute", **OWN)]
    app.add_api_route("/own", answer, dependencies=own)
    app.add_api_route("/hello", answer)
    for _ in range(2):
        task = asyncio.ensure_future(ask(app, "/own"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asked(app, "/hello") == [429]


async def test_middleware_that_rewrites_the_path_cannot_avoid_the_defaults() -> None:
    """Defect: the request seems to be for an overriding route, and another route serves it."""

    class Rewrite:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if dict(scope.get("headers", ())).get(b"x-rewrite"):
                scope["path"], scope["raw_path"] = "/plain", b"/plain"
            await self.app(scope, receive, send)

    app = FastAPI()
    app.add_middleware(Rewrite)
    limit = RateLimit(app, "1/minute", clock=ManualClock(1_000))
    app.add_api_route("/own", answer, dependencies=[limit("5/minute", **OWN)])
    app.add_api_route("/plain", answer)
    sent = [(await ask(app, "/own", headers=[("X-Rewrite", "1")])).status for _ in range(2)]
    assert sent == [200, 429]
    assert await asked(app, "/own", "/own") == [200, 200]


async def test_a_method_that_the_route_does_not_have_is_counted_by_the_defaults() -> None:
    """Only a full match serves the request."""
    app, limit = fastapi_with()
    app.add_api_route("/own", answer, dependencies=[limit("5/minute", **OWN)])
    assert await asked(app, "/own", "/own", method="DELETE") == [405, 429]


def test_a_route_that_does_not_have_the_method_does_not_serve_the_request() -> None:
    """So it is not asked for limits that replace the defaults."""
    routes = [Route("/item", found, methods=["POST"]), Mount("/m", routes=[Route("/x", found)])]
    app = Starlette(routes=routes)

    def serving(path: str, method: str) -> Any:
        return RoutedAsgiRequest(scope_of(path, method=method), app).serving_route()

    assert serving("/item", "POST") is routes[0]
    assert serving("/item", "GET") is None
    assert serving("/m/x", "GET").path == "/x"
    assert serving("/m/x", "POST") is None
    assert serving("/missing", "GET") is None


async def test_a_scope_that_is_used_again_keeps_the_deferred_limits_apart() -> None:
    """Those of an earlier application are not charged by a later one."""
    enforcer = AsyncEnforcer(EnforcerOptions(limits="1/minute"))
    scope = scope_of()

    async def send(_: Any) -> None:
        raise AssertionError("nothing is sent")

    first, later = AsgiCharges(enforcer, send), AsgiCharges(enforcer, send)
    first.defer(enforcer, RoutedAsgiRequest(scope), first.send, 1)
    await later.charge_deferred(scope)
    assert later.made == []
    await first.charge_deferred(scope)
    assert len(first.made) == 1


async def test_a_mounted_application_overrides_its_own_defaults_only() -> None:
    """A RateLimit further out belongs to another application."""
    inner, limit = fastapi_with("1/minute", name="inner")
    inner.add_api_route("/own", answer, dependencies=[limit("5/minute", **OWN)])
    outer = asgi.RateLimit(inner, "2/minute", clock=ManualClock(1_000), name="outer")
    seen = await ask(outer, "/own")
    assert seen.headers["ratelimit-policy"] == '"outer";q=2;w=60, "GET /own";q=5;w=60'
    assert await asked(outer, "/own", "/own") == [200, 429]


async def test_an_application_without_an_overriding_route_keeps_the_fast_path() -> None:
    """The peer alone decides until the first overriding route is added."""
    app, limit = fastapi_with()
    limit("5/minute")
    assert limit.enforcer.keys_by_peer is not None
    limit("5/minute", **OWN)
    assert limit.enforcer.keys_by_peer is None
    await limit.enforcer.close()
    app.add_api_route("/", answer)
    assert await asked(app, "/", "/") == [200, 429]
    assert limit.enforcer.keys_by_peer is None


# ── Starlette ──────────────────────────────────────────────────────────────────────────────────


def passing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as applications write it."""

    @wraps(function)
    async def passed(*args: Any) -> Any:
        return await function(*args)

    return passed


async def test_endpoints_override_also_inside_decorators_and_mounts() -> None:
    """`functools.wraps` copies the mark; a class has one for each method."""

    class Item(HTTPEndpoint):
        @asgi.limited("2/minute", name="item", **OWN)
        async def get(self, request: Request) -> PlainTextResponse:
            return found()

        async def post(self, request: Request) -> PlainTextResponse:
            return found()

    own = passing(asgi.limited("2/minute", name="own", **OWN)(found))
    app = starlette_with(Mount("/m/{id}", routes=[Route("/own", own)]), Route("/item", Item))
    assert await asked(app, "/m/1/own", "/m/2/own", "/m/3/own") == [200, 200, 429]
    assert await asked(app, "/item", "/item") == [200, 200]
    assert await asked(app, "/item", method="HEAD") == [429]
    assert await asked(app, "/item", "/item", method="POST") == [200, 429]


async def test_endpoints_override_the_outermost_rate_limit() -> None:
    """That is the one on whose store they count."""
    own = asgi.limited("5/minute", name="own", **OWN)(found)
    inner = asgi.RateLimit(
        Starlette(routes=[Route("/", own)]), "2/minute", clock=ManualClock(1_000), name="inner"
    )
    outer = asgi.RateLimit(inner, "1/minute", clock=ManualClock(1_000), name="outer")
    seen = await ask(outer, "/")
    assert seen.headers["ratelimit-policy"] == '"inner";q=2;w=60, "own";q=5;w=60'
    assert await asked(outer, "/", "/") == [200, 429]


async def test_a_websocket_that_is_rejected_before_the_limit_is_counted_by_the_defaults() -> None:
    """The defaults are charged when the application closes the connection."""

    @passing
    async def reject(websocket: WebSocket) -> None:
        await websocket.close()

    mark_override(reject, asgi.LIMITED)
    app = starlette_with(WebSocketRoute("/", reject), Route("/plain", found))
    app.middleware_stack = app.build_middleware_stack()
    app.middleware_stack.app.enforcer.expect_overrides()
    scope = scope_of("/", kind="websocket", extensions={"websocket.http.response": {}})
    assert (await ask_scope(app, scope)).types == ["websocket.close"]
    assert await asked(app, "/plain") == [429]


# ── Flask ──────────────────────────────────────────────────────────────────────────────────────


def test_blueprints_and_class_views_override() -> None:
    """A blueprint for all its views; a class for all methods, or one method of it."""
    app, limit, _, _ = app_with("1/minute", per_route=True)
    shop = Blueprint("shop", __name__)
    shop.get("/a")(lambda: "a")
    limit("2/minute", **OWN)(shop)
    app.register_blueprint(shop, url_prefix="/shop")

    class Item(MethodView):
        decorators = [limit("2/minute", **OWN)]  # noqa: RUF012 - as Flask documents it

        def get(self) -> str:
            return "item"

    class Parts(MethodView):
        @limit("2/minute", **OWN)
        def get(self) -> str:
            return "get"

        def post(self) -> str:
            return "post"

    class Whole(FlaskView):
        @limit("2/minute", **OWN)
        def dispatch_request(self) -> str:
            return "whole"

    app.add_url_rule("/whole", view_func=Whole.as_view("whole"))
    app.add_url_rule("/item", view_func=Item.as_view("item"))
    app.add_url_rule("/parts", view_func=Parts.as_view("parts"))
    client = app.test_client()
    for path in ("/shop/a", "/item", "/parts", "/whole"):
        assert statuses(client, path, path, path) == [200, 200, 429]
    assert [client.post("/parts").status_code for _ in range(2)] == [200, 429]
    assert statuses(client, "/hello", "/hello") == [200, 429]


def test_flask_counts_a_request_that_is_answered_before_the_view() -> None:
    """Defect: a `before_request` function that checks passwords could be asked without a limit."""
    app, limit, _, client = app_with("2/minute")
    shop = Blueprint("shop", __name__)
    shop.before_request(lambda: ("wrong", 401))
    shop.get("/own")(limit("9/minute", **OWN)(lambda: "own"))
    app.register_blueprint(shop)
    assert statuses(client, "/own", "/own", "/own") == [401, 401, 429]
    assert client.get("/own").headers["RateLimit-Policy"] == '"default";q=2;w=60'


def test_limits_that_do_not_override_leave_the_defaults_of_flask_due() -> None:
    """Defect: with a limit on the blueprint, the defaults did not count what it answered."""
    app, limit, _, client = app_with("2/minute")
    shop = Blueprint("shop", __name__)
    limit("5/minute")(shop)
    shop.before_request(lambda: ("wrong", 401))
    shop.get("/own")(limit("9/minute", **OWN)(lambda: "own"))
    app.register_blueprint(shop)
    assert statuses(client, "/own", "/own", "/own") == [401, 401, 429]


def test_a_limit_that_denies_before_the_view_costs_no_defaults() -> None:
    """A denied request is refunded everywhere, and the deferred defaults stay unspent."""
    app, limit, _, client = app_with("2/minute")
    shop = Blueprint("shop", __name__)
    limit("1/minute")(shop)
    shop.get("/own")(limit("9/minute", **OWN)(lambda: "own"))
    app.register_blueprint(shop)
    assert statuses(client, "/own", "/own", "/own") == [200, 429, 429]
    assert statuses(client, "/hello", "/hello", "/hello") == [200, 200, 429]


def test_flask_counts_a_request_whose_exception_is_propagated() -> None:
    """Defect: Flask calls no `after_request` function then, and the request went uncounted."""
    app, limit, _, client = app_with("1/minute")  # in tests, Flask propagates exceptions

    def failing(view: Any) -> Any:
        @wraps(view)
        def failed() -> None:
            raise ZeroDivisionError

        return failed

    app.add_url_rule("/own", "own", failing(limit("9/minute", **OWN)(lambda: "own")))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            client.get("/own")
    assert statuses(client, "/hello") == [429]


def test_a_view_overrides_the_defaults_of_its_own_rate_limit() -> None:
    """Two RateLimits of one application have defaults of their own."""
    app, limit, clock, client = app_with("2/minute")
    other = type(limit)(app, "5/minute", clock=clock, name="other")
    app.get("/own", endpoint="own")(limit("3/minute", **OWN)(lambda: "own"))
    policies = client.get("/own").headers["RateLimit-Policy"]
    assert policies == '"other";q=5;w=60, "own";q=3;w=60'
    other.close(app)


# ── Django ─────────────────────────────────────────────────────────────────────────────────────


@method_decorator(rate_limit("2/minute", **OWN), name="dispatch")
class Report(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("report")


class Parts(View):
    @method_decorator(rate_limit("2/minute", **OWN))
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("get")

    def post(self, request: Any) -> HttpResponse:
        return HttpResponse("post")


@rate_limit("9/minute", **OWN)
def guarded(request: Any) -> HttpResponse:
    return HttpResponse("in")


def refusing(view: Any) -> Any:
    @wraps(view)
    def refused(request: Any) -> HttpResponse:
        return HttpResponse(status=401)

    return refused


@rate_limit("5/minute")
@refusing
@rate_limit("9/minute", **OWN)
def refused(request: Any) -> HttpResponse:
    return HttpResponse("in")


def rejecting(get_response: Any) -> Any:
    """A middleware that answers some requests before their view."""

    def serve(request: Any) -> Any:
        return HttpResponse(status=401) if "guess" in request.GET else get_response(request)

    return serve


def test_class_views_of_django_override() -> None:
    """A class for all methods, or one method; a middleware's answer counts by the defaults."""
    urls: Any = types.ModuleType("urls_of_overrides")
    urls.urlpatterns = [
        django_path("report", Report.as_view()),
        django_path("parts", Parts.as_view()),
        django_path("guarded", guarded),
        django_path("refused", refused),
    ]
    site = {"limits": "1/minute", "per_route": True, "clock": ManualClock(1_000)}
    middleware = [OURS, f"{__name__}.rejecting"]
    with override_settings(RATEKEEPER=site, ROOT_URLCONF=urls, MIDDLEWARE=middleware):
        client = Client()
        for path in ("/report", "/parts"):
            assert [client.get(path).status_code for _ in range(3)] == [200, 200, 429]
        assert client.head("/parts").status_code == 429
        assert [client.post("/parts").status_code for _ in range(2)] == [200, 429]
        assert [client.get("/guarded?guess").status_code for _ in range(2)] == [401, 429]
        assert [client.get("/guarded").status_code for _ in range(2)] == [200, 200]
        # Another limit of the view counts it, but does not replace the defaults.
        assert [client.get("/refused").status_code for _ in range(2)] == [401, 429]


async def test_django_counts_a_request_that_is_cancelled_before_the_limit() -> None:
    """Django cancels the task of a request whose client closes the connection."""
    urls: Any = types.ModuleType("urls_of_the_cancelled")
    urls.urlpatterns = [django_path("guarded", guarded)]
    site = {"limits": "1/minute", "clock": ManualClock(1_000)}
    started = asyncio.Event()

    async def check_password(request: Any) -> HttpResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    with override_settings(RATEKEEPER=site, ROOT_URLCONF=urls):
        serve = RateLimitMiddleware(check_password)
        task = asyncio.ensure_future(serve(AsyncRequestFactory().get("/guarded")))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await serve(AsyncRequestFactory().get("/other"))).status_code == 429


# ── Several limits ─────────────────────────────────────────────────────────────────────────────

POST = {"methods": ["POST"], **OWN}
GET = {"methods": ["GET"], **OWN}


async def test_a_limit_for_each_method_overrides_in_fastapi() -> None:
    """Defect: the first limit, which did not count the method, had the defaults charged."""
    app, limit = fastapi_with("1/minute")
    both = [limit("9/minute", **POST), limit("2/minute", **GET)]
    app.add_api_route("/own", answer, dependencies=both, methods=["GET", "PUT"])
    assert await asked(app, *["/own"] * 3) == [200, 200, 429]
    assert await asked(app, *["/own"] * 2, method="PUT") == [200, 429]


async def test_a_limit_for_each_method_overrides_in_starlette() -> None:
    """The same for decorated endpoints."""
    own = asgi.limited("9/minute", **POST)(asgi.limited("2/minute", **GET)(found))
    app = starlette_with(Route("/own", own, methods=["GET", "PUT"]))
    assert await asked(app, *["/own"] * 3) == [200, 200, 429]
    assert await asked(app, *["/own"] * 2, method="PUT") == [200, 429]


def test_a_limit_for_each_method_overrides_in_flask() -> None:
    """The same for views, also inside a blueprint whose limits replace the defaults, too."""
    app, limit, _, client = app_with("1/minute")
    shop = Blueprint("shop", __name__)
    limit("9/minute", methods=["DELETE"], **OWN)(shop)
    own = limit("9/minute", **POST)(limit("2/minute", **GET)(lambda: "own"))
    shop.add_url_rule("/own", "own", own, methods=["GET", "PUT"])
    app.register_blueprint(shop)
    assert statuses(client, *["/own"] * 3) == [200, 200, 429]
    assert [client.put("/own").status_code for _ in range(2)] == [200, 429]


@rate_limit("9/minute", **POST)
@rate_limit("2/minute", **GET)
def one_for_each(request: Any) -> HttpResponse:
    return HttpResponse("in")


def test_a_limit_for_each_method_overrides_in_django() -> None:
    """The same for views of Django."""
    urls: Any = types.ModuleType("urls_of_methods")
    urls.urlpatterns = [django_path("own", one_for_each)]
    site = {"limits": "1/minute", "clock": ManualClock(1_000)}
    with override_settings(RATEKEEPER=site, ROOT_URLCONF=urls, MIDDLEWARE=[OURS]):
        client = Client()
        assert [client.get("/own").status_code for _ in range(3)] == [200, 200, 429]
        assert [client.put("/own").status_code for _ in range(2)] == [200, 429]


# ── Marks ──────────────────────────────────────────────────────────────────────────────────────


def test_only_methods_of_http_name_a_handler() -> None:
    """A client that sends the method DISPATCH does not choose another attribute of the class."""

    class Item:
        def dispatch(self) -> None: ...

        def get(self) -> None: ...

    mark_override(Item.dispatch, "owner")
    mark_override(Item.get, "owner")
    assert not override_count(Item, "owner", "DISPATCH")
    assert override_count(Item, "owner", "GET") == 1
    assert override_count(Item, "owner", "HEAD") == 1
    assert not override_count(Item, "other", "GET")
    assert not override_count(None, "owner", "GET")


def test_the_cached_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied when it is full."""
    monkeypatch.setattr(overrides, "ROUTES_MAX", 3)
    known = RouteOverrides()
    for number in range(10):
        assert not known.count(types.SimpleNamespace(number=number), "GET", "owner")
    assert len(known._known) <= 3
