"""Mounts: a parameter of one is a parameter, whatever a client writes for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, Router

from tests.web.asgi_driver import ask, hello
from tollkeeper import fastapi
from tollkeeper.asgi import RateLimit
from tollkeeper.testing import ManualClock
from tollkeeper.web.mounts import mount_template_of, mounted_path_of, routes_in


async def _found(request: Request) -> PlainTextResponse:
    return PlainTextResponse("found")


SEARCH = Route("/search/{word}", _found)
BROWSE = Route("/browse", _found)


def _options() -> dict[str, Any]:
    return {"limits": "2/minute", "per_route": True, "clock": ManualClock(1_000)}


def _dependency() -> FastAPI:
    app, below = FastAPI(), FastAPI()
    limit = fastapi.RateLimit(app, clock=ManualClock(1_000))
    router = APIRouter(prefix="/search", dependencies=[limit("2/minute")])
    router.add_api_route("/{word}", lambda: "found")
    below.include_router(router)
    below.add_api_route("/browse", lambda: "found")
    app.mount("/tenants/{tenant}", below)
    return app


def _middleware_of_the_mounted() -> FastAPI:
    app, below = FastAPI(), FastAPI(routes=[SEARCH, BROWSE])
    below.add_middleware(RateLimit, **_options())
    app.mount("/tenants/{tenant}", below)
    return app


def _middleware_of_the_mount() -> Starlette:
    inside = Mount("/{tenant}", routes=[SEARCH, BROWSE], middleware=[_middleware()])
    return Starlette(routes=[Mount("/tenants", routes=[inside])])


def _middleware() -> Middleware:
    return Middleware(RateLimit, **_options())


def _mounted_with_its_limits() -> Starlette:
    below = RateLimit(Starlette(routes=[SEARCH, BROWSE]), **_options())
    return Starlette(routes=[Route("/browse", _found), Mount("/tenants/{tenant}", app=below)])


def _around_all() -> Starlette:
    below = Starlette(routes=[SEARCH, BROWSE])
    return Starlette(routes=[Mount("/tenants/{tenant}", app=below)], middleware=[_middleware()])


def _middleware_of_the_router() -> Starlette:
    below = Router(routes=[SEARCH, BROWSE], middleware=[_middleware()])
    return Starlette(routes=[Mount("/tenants/{tenant}", app=below)])


def _around_other_middleware() -> RateLimit:
    below = GZipMiddleware(Starlette(routes=[SEARCH, BROWSE]))
    inside = Starlette(routes=[Mount("/tenants", routes=[Mount("/{tenant}", app=below)])])
    return RateLimit(GZipMiddleware(inside), **_options())


def _dependency_inside_other_middleware() -> FastAPI:
    app, inside, below = FastAPI(), FastAPI(), FastAPI()
    limit = fastapi.RateLimit(app, clock=ManualClock(1_000))
    below.add_api_route("/search/{word}", lambda: "found", dependencies=[limit("2/minute")])
    below.add_api_route("/browse", lambda: "found")
    inside.mount("/{tenant}", GZipMiddleware(below))
    app.mount("/tenants", GZipMiddleware(inside))
    return app


@pytest.mark.parametrize(
    "make",
    [
        _dependency,
        _dependency_inside_other_middleware,
        _middleware_of_the_router,
        _around_other_middleware,
        _middleware_of_the_mounted,
        _middleware_of_the_mount,
        _mounted_with_its_limits,
        _around_all,
    ],
)
async def test_a_mounts_parameter_does_not_slip_past_a_limit(make: Callable[[], Any]) -> None:
    """Whoever limits it: another tenant is the same endpoint, and another route is another."""
    app = make()
    paths = [f"/tenants/{number}/search/{number}" for number in range(3)]
    assert [(await ask(app, path)).status for path in paths] == [200, 200, 429]
    assert (await ask(app, "/tenants/1/browse")).status == 200


RULES = """
version: 1
rules:
  - {id: login, by: [ip], match: {endpoint: /tenants/*/login}, limits: ["2/minute"]}
"""


async def test_what_is_mounted_and_has_no_routes_goes_by_its_path() -> None:
    """Nobody knows its endpoints, but a rule may; and those around it are not asked for them."""
    below = RateLimit(GZipMiddleware(hello), rules=RULES, clock=ManualClock(1_000))
    outer = [Route("/login", _found), Mount("/tenants/{tenant}", app=below)]
    app = Starlette(routes=outer)
    paths = [f"/tenants/{number}/login" for number in range(3)]
    assert [(await ask(app, path)).status for path in paths] == [200, 200, 429]
    assert (await ask(app, "/tenants/1/other")).status == 200


def _scope(**more: Any) -> dict[str, Any]:
    app = Starlette(routes=[Mount("/a/{b}", routes=[Mount("/c/{d}", routes=[SEARCH])])])
    return {
        "type": "http",
        "method": "GET",
        "path": "/proxy/a/1/c/2/search/x",
        "headers": [],
        "app_root_path": "/proxy",
        "root_path": "/proxy/a/1/c/2",
        "router": app.router,
        **more,
    }


@pytest.mark.parametrize(
    ("more", "path", "template"),
    [
        ({}, "/a/1/c/2", "/a/{b}/c/{d}"),
        ({"root_path": "/proxy/a/1"}, "/a/1", "/a/{b}"),
        ({"root_path": "/proxy/a/9"}, "/a/9", None),
        ({"root_path": "/proxy"}, "", None),
        ({"router": None}, "/a/1/c/2", None),
        ({"router": Starlette(routes=[SEARCH]).router}, "/a/1/c/2", None),
    ],
)
def test_where_an_application_is_mounted(
    more: dict[str, Any], path: str, template: str | None
) -> None:
    """The path as the client wrote it, and the templates where the outermost router knows them."""
    assert mounted_path_of(_scope(**more)) == path
    assert mount_template_of(_scope(**more)) == template


def test_middleware_without_end_has_no_routes() -> None:
    """One that is around itself is asked for so long, and no longer."""

    class Around:
        app: Any = None

    around = Around()
    around.app = around
    assert routes_in(around) is None


@given(
    st.dictionaries(
        st.sampled_from(["path", "root_path", "app_root_path", "method", "headers"]),
        st.one_of(st.text(), st.none(), st.integers(), st.binary()),
    )
)
def test_no_scope_makes_it_raise(more: dict[str, Any]) -> None:
    """Whatever a server puts in a scope, there is a template or there is none."""
    assert isinstance(mounted_path_of(_scope(**more)), str)
    found = mount_template_of(_scope(**more))
    assert found is None or isinstance(found, str)
