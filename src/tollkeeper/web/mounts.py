"""Where an application is mounted, as its routes say it: /tenants/{tenant}, whoever that is.

A mount of Starlette's may have parameters, and what it leaves in the scope is the path that the
client wrote. Counted by that, /tenants/1/search and /tenants/2/search would be two endpoints, and
each number that a client makes up a fresh quota. The scope also names the outermost router, so this
asks that one again, mount by mount, as far as the mounts have matched. Nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

# The values of Starlette's Match; by number, because it need not be installed.
NONE: Final = 0
FULL: Final = 2
# Of mounts in one another, and of middleware around an application; more is a loop.
DEPTH_MAX: Final = 32


def mounted_path_of(scope: Mapping[str, Any]) -> str:
    """The part of the path that mounts have matched, as the client wrote it."""
    before, now = scope.get("app_root_path"), scope.get("root_path")
    return now.removeprefix(before) if isinstance(before, str) and isinstance(now, str) else ""


def mount_template_of(scope: Mapping[str, Any]) -> str | None:
    """The templates of those mounts, joined; None where no router knows them. Never raises."""
    routes = getattr(scope.get("router"), "routes", None)
    if not isinstance(routes, list):
        return None
    try:
        outside = {**scope, "root_path": scope["app_root_path"], "path_params": {}}
        return _matched(routes, outside, scope["root_path"], DEPTH_MAX)
    except Exception:  # a route may be anything; then the path is what is known
        return None


def _matched(
    routes: Iterable[Any], scope: Mapping[str, Any], root_path: str, depth: int
) -> str | None:
    for route in flat(routes, depth):
        match, child = route.matches(scope)
        if match.value != FULL:
            continue
        path: str = getattr(route, "path", "")  # a host has none
        inside = {**scope, **child}
        if inside["root_path"] == root_path:
            return path
        inner = _matched(routes_below(route), inside, root_path, depth - 1) if depth else None
        return None if inner is None else f"{path}{inner}"
    return None


def routes_in(app: Any) -> list[Any] | None:
    """The routes of an application, through any middleware around it; None where it has none."""
    for _ in range(DEPTH_MAX):
        # What a router's own middleware is around is a method of the router.
        app = getattr(app, "__self__", app)
        routes = getattr(app, "routes", None)
        if isinstance(routes, list):
            return routes
        app = getattr(app, "app", None)
    return None


def routes_below(mount: Any) -> list[Any]:
    """The routes of what is mounted there."""
    return mount.routes or routes_in(getattr(mount, "app", None)) or []


def flat(routes: Iterable[Any], depth: int) -> Iterable[Any]:
    """The routes themselves: FastAPI keeps those of an included router behind one of its own."""
    for route in routes:
        included = getattr(route, "effective_candidates", None)
        if included is None:
            # A route that was included from plain Starlette is kept beside its whole path.
            yield getattr(route, "starlette_route", None) or route
        elif depth:
            yield from flat(included(), depth - 1)
