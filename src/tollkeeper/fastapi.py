"""Rate limits for FastAPI: for all routes, and for each as a dependency.

    app = FastAPI()
    limit = RateLimit(app, "100/minute", store="shared:///run/api.limits")

    @app.get("/search", dependencies=[limit("5/second")])
    def search(): ...

    @app.post("/complete")
    async def complete(charge: Annotated[Charge, limit("1000/minute", cost=100)]):
        charge.settle(37)

`RateLimit` installs the ASGI middleware, which sends the headers and answers who is denied; a
dependency adds its charge to the request's passage (`passage.py`). So no endpoint needs a `request`
argument, a Response that it returns itself has the headers too, and the application's own exception
handlers have no part in it.

Each route counts by itself, under its methods and template: "GET /search". With a `name`, all that
have the same share one count. All are kept in one store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Unpack

from tollkeeper import asgi
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import NAME_LENGTH_MAX, check_name
from tollkeeper.core.rates import LimitsArgument
from tollkeeper.web.calls import AsgiCall, Call, digest_of
from tollkeeper.web.charges import Charge
from tollkeeper.web.guard import AsyncGuard
from tollkeeper.web.passage import passage_of
from tollkeeper.web.terms import Options, RouteOptions, Terms

try:
    from fastapi import Depends, FastAPI, routing
    from starlette.requests import HTTPConnection
except ImportError as error:
    raise ConfigError(
        "tollkeeper.fastapi needs FastAPI: pip install 'tollkeeper[fastapi]'"
    ) from error

__all__ = ["Charge", "RateLimit"]

# Room for the "#2" of a route's second limit.
_ROUTE_NAME_LENGTH_MAX: Final = NAME_LENGTH_MAX - 8

_TOO_MANY: Final = {
    "description": "Too many requests",
    "headers": {
        "Retry-After": {
            "description": "Seconds after which the same request would pass.",
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


class RateLimit:
    """The limits of a FastAPI application.

    `app`, the limits of all its routes (or `rules`, or none), and what `Terms` says, by name.
    Add it before other middleware: what is added later is around it, and sees the refusals too.
    """

    def __init__(
        self, app: FastAPI, limits: LimitsArgument | None = None, **options: Unpack[Options]
    ) -> None:
        if not isinstance(app, FastAPI):
            raise ConfigError(
                f"{show(app)} is not a FastAPI application; write RateLimit(app, …). "
                f"For app.add_middleware(RateLimit, …) there is tollkeeper.asgi.RateLimit"
            )
        self.guard = AsyncGuard(Terms(limits=limits, **options))
        self._charging: set[Callable[..., Any]] = set()
        app.add_middleware(asgi.RateLimit, guard=self.guard)
        self._describe_in(app)

    def __call__(
        self, limits: LimitsArgument, *, name: str = "", **options: Unpack[RouteOptions]
    ) -> Any:
        """A dependency that charges the request by further limits; its value is the Charge.

        In `dependencies=[…]` of a route, a router or the application, or as
        `Annotated[Charge, limit(…)]` of an argument. `key`, `skip` and `on_limit` are those of the
        application unless said here.
        """
        check_name("name", name)
        terms = Terms(limits=limits, **options)
        guard = self.guard

        async def charged(connection: HTTPConnection) -> Charge:
            scope = connection.scope
            passage = passage_of(scope)
            call = AsgiCall(scope, connection)
            route, context = scope.get("route"), _context_of(scope)
            # By number, since routes are no keys; they are kept, so that no other gets theirs.
            by = terms, id(route), id(context), scope.get("root_path")
            known = guard.remembered.get(by)
            if known is not None:
                return await passage.charge(known[0], call)
            known_as = name or passage.name_for(_route_name(route, call))
            found = guard.remember(by, guard.beside(terms, known_as), alive=(route, context))
            return await passage.charge(found, call)

        self._charging.add(charged)
        return Depends(charged)

    # ── OpenAPI ────────────────────────────────────────────────────────────────────────────────

    def _describe_in(self, app: FastAPI) -> None:
        """Have the application's description of itself say where a 429 may come from."""
        described = app.openapi

        def openapi() -> dict[str, Any]:
            document = described()
            for path, method in self._limited(app):
                operation = document.get("paths", {}).get(path, {}).get(method)
                if operation is not None:
                    operation.setdefault("responses", {}).setdefault("429", _TOO_MANY)
            return document

        app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it

    def _limited(self, app: FastAPI) -> Iterator[tuple[str, str]]:
        """The path and method of every operation that has a limit."""
        everywhere = self.guard.terms.says_limits
        # Since FastAPI has included routers as they are, this is how to see all routes.
        listed: Callable[..., Iterator[Any]] = getattr(routing, "iter_route_contexts", iter)
        for route in listed(app.routes):
            dependant = getattr(route, "dependant", None)
            if dependant is not None and (everywhere or self._charges(dependant)):
                for method in getattr(route, "methods", None) or ():
                    yield route.path_format, method.lower()

    def _charges(self, dependant: Any) -> bool:
        return dependant.call in self._charging or any(
            self._charges(each) for each in dependant.dependencies
        )


def _context_of(scope: Any) -> object:
    """Where a route is: since FastAPI has included routers as they are, it may be in several."""
    included = scope.get("fastapi")
    return included.get("effective_route_context") if isinstance(included, dict) else None


def _route_name(route: object, call: Call) -> str:
    """What a route's count is kept under: "GET /users/{id}"."""
    methods = getattr(route, "methods", None) or ()
    name = " ".join([*([",".join(sorted(methods))] if methods else []), call.route or call.path])
    if len(name) <= _ROUTE_NAME_LENGTH_MAX and name.isprintable():
        return name
    return digest_of(name)
