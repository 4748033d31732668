"""The template of the route that will serve a request: /users/{id}, before anybody has routed it.

A middleware runs before the router, and knows /users/1 and /users/2 but not that both are one
endpoint: whoever writes another number would slip past a limit on it. Starlette and FastAPI can be
asked which of their routes a scope matches, so this asks them in the order in which they would
serve: the first full match, or else the first that matches but for the method. What is mounted is
asked likewise. Nothing is remembered: routes may be added at any time, and paths are without end.

Where nobody knows (no route matches, or what is mounted has no routes) there is no template, and
the path itself is the endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from tollkeeper.web.calls import AsgiCall, mounted_at
from tollkeeper.web.mounts import DEPTH_MAX, FULL, NONE, flat, routes_below, routes_in


class RoutedCall(AsgiCall):
    """A request as an ASGI scope, which finds its route's template before it is routed."""

    __slots__ = ("_app",)

    def __init__(self, scope: MutableMapping[str, Any], app: Any = None) -> None:
        """`app` is asked for the routes where the scope does not name the application."""
        self.scope = scope
        self._native = None
        self._app = app

    @property
    def route(self) -> str | None:
        """The template, from the framework if it has routed, or by asking its routes."""
        known = AsgiCall.route.fget(self)  # type: ignore[attr-defined]  # a property has one
        if known is not None:
            return str(known)
        # Nobody has routed, or no further than to a mount.
        routes = self._routes()
        return None if routes is None else template_of(routes, self.scope)

    def _routes(self) -> list[Any] | None:
        """Those that the request has yet to pass."""
        app, router = self.scope.get("app"), self.scope.get("router")
        # Who has routed already is not asked again: what it has mounted did not name itself.
        has_routed = router is not None and getattr(app, "router", None) is router
        if app is None or has_routed:
            app = self._app
        return routes_in(app)


def template_of(routes: Iterable[Any], scope: Mapping[str, Any]) -> str | None:
    """The template of the route among `routes` that would serve `scope`. Never raises."""
    try:
        found = _served(routes, scope, DEPTH_MAX)
    except Exception:  # a route may be anything; then the path is the endpoint
        return None
    return None if found is None else mounted_at(scope) + found


def _served(routes: Iterable[Any], scope: Mapping[str, Any], depth: int) -> str | None:
    partial: tuple[Any, Mapping[str, Any]] | None = None
    for route in flat(routes, depth):
        match, child = route.matches(scope)
        if match.value == FULL:
            return _path(route, {**scope, **child}, depth)
        if match.value != NONE and partial is None:
            partial = route, child
    return None if partial is None else _path(partial[0], {**scope, **partial[1]}, depth)


def _path(route: Any, scope: Mapping[str, Any], depth: int) -> str | None:
    path = getattr(route, "path", "")  # a host has none
    if not hasattr(route, "routes"):
        return path if isinstance(path, str) and path else None
    inner = _served(routes_below(route), scope, depth - 1) if depth else None
    return None if inner is None else f"{path}{inner}"
