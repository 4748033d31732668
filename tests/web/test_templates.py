"""Templates: every spelling of a path parameter is one endpoint, before anybody has routed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Host, Mount, Route, WebSocketRoute

from tollkeeper.web.templates import RoutedCall, template_of


async def _served(_: object) -> None:
    """Stands for an endpoint; nothing is served here."""


async def _mounted(scope: object, receive: object, send: object) -> None:
    """Stands for an application that has no routes to ask."""


def _scope(path: str, method: str = "GET", kind: str = "http", **more: Any) -> dict[str, Any]:
    scope = {"type": kind, "path": path, "method": method, "headers": [], "root_path": "", **more}
    if kind == "websocket":
        del scope["method"]
    return scope


ROUTES: Sequence[BaseRoute] = [
    Route("/users/me", _served),
    Route("/users/{id}", _served, methods=["GET"]),
    Route("/users/{id}", _served, methods=["DELETE"]),
    Route("/files/{path:path}", _served),
    Route("/orders/{id:int}", _served, methods=["POST"]),
    WebSocketRoute("/rooms/{room}", _served),
    Mount("/admin/{tenant}", routes=[Route("/keys/{key}", _served)]),
    Mount("/static", app=_mounted),
    Host("api.example.org", app=Starlette(routes=[Route("/v1/{thing}", _served)])),
]


@pytest.mark.parametrize(
    ("scope", "template"),
    [
        (_scope("/users/1"), "/users/{id}"),
        (_scope("/users/2"), "/users/{id}"),
        (_scope("/users/2", "DELETE"), "/users/{id}"),
        (_scope("/users/2", "PATCH"), "/users/{id}"),
        (_scope("/users/me"), "/users/me"),
        (_scope("/files/a/b/c"), "/files/{path:path}"),
        (_scope("/orders/7"), "/orders/{id:int}"),
        (_scope("/orders/x"), None),
        (_scope("/rooms/9", kind="websocket"), "/rooms/{room}"),
        (_scope("/rooms/9"), None),
        (_scope("/admin/acme/keys/1"), "/admin/{tenant}/keys/{key}"),
        (_scope("/admin/acme/nothing"), None),
        (_scope("/static/a.css"), None),
        (_scope("/nowhere"), None),
        (_scope("/v1/x", headers=[(b"host", b"api.example.org")]), "/v1/{thing}"),
        (_scope("/proxied/users/1", root_path="/proxied"), "/users/{id}"),
        (_scope("/orders/" + "9" * 5000, "POST"), None),
    ],
)
def test_the_template_is_that_of_the_route_that_will_serve(
    scope: dict[str, Any], template: str | None
) -> None:
    """The first full match, else one but for the method; None where no route knows the path."""
    assert template_of(ROUTES, scope) == template


def _application() -> FastAPI:
    inner = APIRouter(prefix="/inner")
    inner.add_api_route("/{thing}", _served)
    outer = APIRouter(prefix="/outer/{tenant}")
    outer.include_router(inner)
    outer.add_api_route("/items/{item}", _served, methods=["PUT"])
    outer.add_api_websocket_route("/feed/{feed}", _served)
    outer.add_route("/plain/{x}", _served)  # type: ignore[arg-type]  # it is not served
    app = FastAPI()
    app.include_router(outer, prefix="/api")
    below = FastAPI()
    below.add_api_route("/deep/{x}", _served)
    app.mount("/below", below)
    app.add_api_route("/top/{x}", _served)
    return app


@pytest.mark.parametrize(
    ("scope", "template"),
    [
        (_scope("/top/1"), "/top/{x}"),
        (_scope("/api/outer/acme/items/1", "PUT"), "/api/outer/{tenant}/items/{item}"),
        (_scope("/api/outer/acme/items/2", "GET"), "/api/outer/{tenant}/items/{item}"),
        (_scope("/api/outer/acme/inner/3"), "/api/outer/{tenant}/inner/{thing}"),
        (_scope("/api/plain/3"), "/api/plain/{x}"),
        (_scope("/api/outer/a/feed/3", kind="websocket"), "/api/outer/{tenant}/feed/{feed}"),
        (_scope("/below/deep/3"), "/below/deep/{x}"),
        (_scope("/api/outer/acme"), None),
    ],
)
def test_included_routers_are_asked_too(scope: dict[str, Any], template: str | None) -> None:
    """FastAPI's routers, in one another and under prefixes, give the whole template."""
    app = _application()
    assert template_of(app.routes, scope) == template
    assert RoutedCall({**scope, "app": app}).route == template
    assert RoutedCall(scope, app).route == template


def test_an_application_that_is_mounted_tells_where() -> None:
    """A middleware of the mounted application sees the part of the path before it."""
    scope = _scope("/below/deep/3", root_path="/below", app_root_path="")
    below = FastAPI()
    below.add_api_route("/deep/{x}", _served)
    assert RoutedCall(scope, below).route == "/below/deep/{x}"


def test_no_routes_no_template() -> None:
    """Of an application that is not Starlette's nothing is known, and nothing goes wrong."""
    assert RoutedCall(_scope("/users/1"), _mounted).route is None
    assert template_of([object()], _scope("/users/1")) is None


@given(
    st.dictionaries(
        st.sampled_from(["type", "path", "root_path", "method", "headers", "app_root_path"]),
        st.one_of(st.text(), st.none(), st.integers(), st.binary()),
    )
)
def test_no_scope_makes_it_raise(scope: dict[str, Any]) -> None:
    """Whatever a client or a server puts in a scope, there is a template or there is none."""
    found = template_of(ROUTES, scope)
    assert found is None or isinstance(found, str)
