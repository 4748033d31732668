"""Rate limits for FastAPI: for the whole application, and for single routes as a dependency.

    app = FastAPI()
    limit = RateLimit(app, "100/minute", store="shared:///run/api.limits")

    @app.get("/search", dependencies=[limit("5/second")])
    def search(): ...

    @app.post("/complete")
    async def complete(charge: Annotated[Charge, limit("1000/minute", cost=100)]):
        charge.settle(37)

`RateLimit` installs the ASGI middleware, which sends the headers and answers denied requests. A
dependency adds its charge to the request's charges (`web/charges.py`). So an endpoint needs no
`request` argument, and a Response that it returns itself gets the headers too. The application's
exception handlers may answer denied requests (`web/handlers.py`).

Each route has its own count, named after its methods and template: "GET /search". Limits with the
same `name` share one count. All counts are in one store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, Unpack

from ratekeeper import asgi
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import check_name
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.limiter.arguments import explains
from ratekeeper.web.answers import Denial
from ratekeeper.web.charges import charges_of, enforcer_of_route
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.handlers import LimiterUnavailable, RateLimitExceeded
from ratekeeper.web.options import (
    LimitsSource,
    OptionArguments,
    RouteArguments,
    options_of,
    route_options_of,
)
from ratekeeper.web.requests import AsgiRequest, WebRequest

try:
    from fastapi import FastAPI, params, routing
    from starlette.requests import HTTPConnection
except ImportError as error:
    raise ConfigError(
        "ratekeeper.fastapi needs FastAPI: pip install 'ratekeeper[fastapi]'"
    ) from error

__all__ = ["Charge", "Denial", "LimiterUnavailable", "RateLimit", "RateLimitExceeded", "WebRequest"]

_TOO_MANY: Final = {
    "description": "Too many requests",
    "headers": {
        "Retry-After": {
            "description": "Seconds until the same request would be allowed.",
            "schema": {"type": "integer", "minimum": 1},
        }
    },
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail"],
                "properties": {
                    "type": {"type": "string", "format": "uri"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                },
            }
        }
    },
}

_USE: Final = (
    'write @app.get("/search", dependencies=[limit("5/second")]), for a router '
    'APIRouter(dependencies=[limit("5/second")]), or as an argument of the endpoint '
    'charge: Annotated[Charge, limit("5/second")]'
)


class _Mistake:
    """An attribute that is only read when an object is used in a wrong way: raises an error.

    The class itself does not have the attribute, so `inspect.signature(RateLimit)` works.
    """

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __get__(self, instance: object, owner: type) -> NoReturn:
        if instance is None:
            raise AttributeError
        raise ConfigError(f"{self._problem}; {_USE}")


class _LimitDependency(params.Depends):
    """What `limit(…)` returns. Any other use raises an error when the module is imported.

    It does not work as a decorator, because one above `@app.get(…)` would silently limit nothing.
    """

    __call__ = _Mistake("limit(…) returns a dependency: it is no decorator and needs no Depends(…)")
    __signature__ = __call__  # FastAPI reads it for Depends(limit(…))

    def __iter__(self) -> NoReturn:
        """Explain dependencies=limit(…), which needs a list."""
        raise ConfigError(f"dependencies= takes a list; {_USE}")


class RateLimit:
    """The limits of a FastAPI application.

    Takes `app`, the limits of all its routes (or `rules`, or none), and the options of
    `EnforcerOptions` by name. Add it before other middleware: middleware that is added later wraps
    it, and sees the denials too.
    """

    # FastAPI reads these for dependencies=[limit] and for Depends(limit).
    dependency = _Mistake("a RateLimit is not a dependency before it is called with limits")
    __signature__ = dependency

    @explains("RateLimit(…)", 'RateLimit(app, "100/minute", store="redis://localhost")')
    def __init__(
        self, app: FastAPI, limits: LimitsSource | None = None, **options: Unpack[OptionArguments]
    ) -> None:
        if not isinstance(app, FastAPI):
            raise ConfigError(
                f"{show(app)} is not a FastAPI application; write RateLimit(app, …). "
                f"For app.add_middleware(RateLimit, …) use ratekeeper.asgi.RateLimit"
            )
        given = options_of("RateLimit(…)", {"limits": limits, **options})
        self.enforcer = Enforcer(given, AsyncLimiter)
        self._dependencies: set[Callable[..., Any]] = set()
        app.add_middleware(asgi.RateLimit, enforcer=self.enforcer)
        self._describe_in(app)

    @explains("limit(…)", 'limit("5 in any minute", key="address")')
    def __call__(
        self, limits: LimitsSource, *, name: str = "", **options: Unpack[RouteArguments]
    ) -> Any:
        """Return a dependency that charges the request by further limits; its value is the Charge.

        Use it in `dependencies=[…]` of a route, a router or the application, or as
        `Annotated[Charge, limit(…)]` of an argument. `key`, `on_limit`, `on_unavailable`
        and `on_failure` default to those of the application.
        """
        check_name("name", name)
        route_options = route_options_of("limit(…)", "RateLimit(app, {}=…)", limits, options)
        outer = self.enforcer

        async def charged(connection: HTTPConnection) -> Charge:
            charges = charges_of(connection.scope)
            request = AsgiRequest(connection.scope, connection)

            def count_name() -> str:
                return name or charges.name_for(_route_name(request))

            enforcer = enforcer_of_route(outer, (route_options, name), request, count_name)
            return await charges.charge(enforcer, request)

        self._dependencies.add(charged)
        return _LimitDependency(charged)

    # ── OpenAPI ────────────────────────────────────────────────────────────────────────────────

    def _describe_in(self, app: FastAPI) -> None:
        """Add a 429 to every limited operation of the application's OpenAPI document."""
        described = app.openapi

        def openapi() -> dict[str, Any]:
            document = described()
            for path, method in self._limited(app):
                operation = document.get("paths", {}).get(path, {}).get(method)
                if operation is not None:
                    operation.setdefault("responses", {}).setdefault("429", _TOO_MANY)
            return document

        app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this

    def _limited(self, app: FastAPI) -> Iterator[tuple[str, str]]:
        """Yield the path and the method of every limited operation."""
        everywhere = self.enforcer.options.has_limits
        # Recent versions of FastAPI keep included routers whole, and list all routes with this.
        listed: Callable[..., Iterator[Any]] = getattr(routing, "iter_route_contexts", iter)
        for route in listed(app.routes):
            dependant = getattr(route, "dependant", None)
            if dependant is None:
                continue
            if everywhere or not self._dependencies.isdisjoint(_calls_of(dependant)):
                for method in getattr(route, "methods", None) or ():
                    yield route.path_format, method.lower()


def _calls_of(dependant: Any) -> Iterator[Any]:
    """Yield the functions that a dependant of FastAPI calls, itself and further in."""
    yield dependant.call
    for each in dependant.dependencies:
        yield from _calls_of(each)


def _route_name(request: AsgiRequest) -> str:
    """Return the name of a route's count: "GET /users/{id}"."""
    methods = getattr(request.scope.get("route"), "methods", None) or ()
    path = request.route or request.path
    return f"{','.join(sorted(methods))} {path}" if methods else path
