"""Routes whose limits replace the default limits of their application: `override_defaults=True`.

A middleware charges the default limits before the framework runs the route. So it first asks which
route will serve the request, and whether that route has a limit that replaces the defaults. If it
has, the defaults are *deferred*: they are not charged yet.

**No route is unlimited by accident.** The middleware can be wrong: code between it and the router
may rewrite the path, and code before the limit may answer the request, for example a dependency
that checks a password. The limit itself may not count the request either: its `methods`, its
`exempt_when`, or a function that returns None as limits. So deferred defaults are charged after all
unless a limit of the route has counted the request: as soon as all such limits of the route have
let it pass uncounted, otherwise when the response starts. A request that they deny then gets a 429
in place of the response. A client gains nothing by making the middleware expect another route.

A function is marked with the owners of the defaults that it replaces, once for each of its limits.
`functools.wraps` copies the marks to decorators around the function. The marks are counted: a view
may have one limit for GET and one for POST, and one of them counts the request.

An application without such a route pays nothing: its enforcer has no RouteOverrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from ratekeeper.web.options import METHODS

# The attribute of a marked function.
_MARK: Final = "__ratekeeper_overrides__"
# Routes whose dependencies are cached: more than any application has.
ROUTES_MAX: Final = 10_000


def mark_override(function: Callable[..., Any], owner: object) -> None:
    """Mark a view whose limits replace the defaults of `owner`."""
    setattr(function, _MARK, (*getattr(function, _MARK, ()), owner))


def override_count(view: object, owner: object, method: str) -> int:
    """Return the number of limits of a view, or of a class's method, that replace defaults."""
    found = _marks(view, owner)
    # Flask and Django make a function from a class and keep the class; Starlette has the class.
    kind = view if isinstance(view, type) else getattr(view, "view_class", None)
    if kind is None:
        return found
    # The method of a plain View of Flask. Django copies the marks of `dispatch` to the function.
    found += _marks(getattr(kind, "dispatch_request", None), owner)
    if method not in METHODS:
        return found
    handler = getattr(kind, method.lower(), None)
    if handler is None and method == "HEAD":
        handler = getattr(kind, "get", None)
    return found + _marks(handler, owner)


def _marks(view: object, owner: object) -> int:
    return sum(each is owner for each in getattr(view, _MARK, ()))


class RouteOverrides:
    """The routes of one ASGI application whose limits replace its defaults."""

    def __init__(self) -> None:
        self._dependencies: set[Callable[..., Any]] = set()
        # By the id of a route, which is kept alive so that no id is reused.
        self._known: dict[int, tuple[object, int]] = {}

    def add(self, dependency: Callable[..., Any]) -> None:
        """Add a dependency of FastAPI: the limits of its routes replace the defaults."""
        self._dependencies.add(dependency)
        self._known.clear()

    def count(self, route: Any, method: str, owner: object) -> int:
        """Return the number of a route's limits that replace the defaults.

        Endpoints of Starlette count if they are marked with `owner`.
        """
        endpoint = getattr(route, "endpoint", None)
        return override_count(endpoint, owner, method) + self._dependency_count(route)

    def _dependency_count(self, route: Any) -> int:
        found = self._known.get(id(route))
        if found is None:
            if len(self._known) >= ROUTES_MAX:
                self._known.clear()
            dependant = getattr(route, "dependant", None)
            # Different ones: FastAPI calls each once for a request.
            called = set() if dependant is None else self._dependencies & set(calls_of(dependant))
            found = self._known[id(route)] = route, len(called)
        return found[1]


def calls_of(dependant: Any) -> Iterator[Any]:
    """Yield the functions that a dependant of FastAPI calls, itself and further in."""
    yield dependant.call
    for each in dependant.dependencies:
        yield from calls_of(each)
