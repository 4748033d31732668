"""The applications of the HTTP benchmarks: one route that answers `ok`, with and without limiters.

A function creates each application, because a granian worker imports this module for one of them
and should not load the libraries of the others. No limit is ever reached. Every limiter counts by
the address of the client and sets its headers on every response.
"""

from __future__ import annotations

import os
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

LIMIT: Final = "1000000000/day"
# The path of the shared store's file.
SHARED: Final = "BENCH_SHARED"


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Answer `ok` after one call of `receive`, which is the minimum for an application."""
    if scope["type"] != "http":
        return
    await receive()
    await _say_ok(send)


async def bare_to_the_end(scope: Any, receive: Any, send: Any) -> None:
    """Answer `ok` after reading the body to its end."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await _say_ok(send)


# A response with the length and the headers of `ratekeeper serve`'s response to a check.
_CHECK_HEADERS: Final = (
    (b"x-ratelimit-limit", b"1000000"),
    (b"x-ratelimit-remaining", b"999999"),
    (b"x-ratelimit-reset", b"1794837002"),
    (b"ratelimit", b'"users";r=999999;t=1'),
    (b"ratelimit-policy", b'"users";q=1000000;w=1'),
    (b"content-type", b"application/json"),
    (b"x-ratekeeper-node", b"bench"),
    (b"x-request-id", b"0123456789ab-12345"),
    (b"content-length", b"173"),
)
_CHECK_BODY: Final = (
    b'{"allowed":true,"kind":"limited","rule":"users","limit":1000000,"remaining":999999,'
    b'"retry_after":0.0,"reset_after":1e-6,"delay":0.0,"degraded":false,"shadow_denied":[]}'
).ljust(173)


async def bare_check(scope: Any, receive: Any, send: Any) -> None:
    """Send a constant response like that of a check, without deciding anything."""
    if scope["type"] != "http":
        return
    await receive()
    headers = list(_CHECK_HEADERS)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _CHECK_BODY})


async def _say_ok(send: Any) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def _ok(request: Request) -> Response:  # noqa: ARG001 - Starlette and slowapi pass it
    return PlainTextResponse("ok")


def starlette_bare() -> Any:
    """Return an application on Starlette without a limiter."""
    return Starlette(routes=[Route("/", _ok)])


class _FixedHeaders:
    """A middleware that only sets constant headers, as many as ours."""

    _HEADERS: Final = (
        (b"x-ratelimit-limit", b"1000000000"),
        (b"x-ratelimit-remaining", b"999999999"),
        (b"x-ratelimit-reset", b"1794837002"),
        (b"ratelimit-policy", b'"default";q=1000000000;w=86400'),
        (b"ratelimit", b'"default";r=999999999;t=1'),
    )

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += self._HEADERS
            await send(message)

        await self.app(scope, receive, with_headers)


def starlette_headers() -> Any:
    """Return an application that measures the cost of the headers, which the server copies."""
    return Starlette(routes=[Route("/", _ok)], middleware=[Middleware(_FixedHeaders)])


def starlette_ours() -> Any:
    """Return our middleware on Starlette, with a store in memory."""
    from ratekeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    return Starlette(routes=[Route("/", _ok)], middleware=[Middleware(RateLimit, limits=LIMIT)])


def starlette_ours_shared() -> Any:
    """Return the same with the shared store."""
    from ratekeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    middleware = [Middleware(RateLimit, limits=LIMIT, store=f"shared://{os.environ[SHARED]}")]
    return Starlette(routes=[Route("/", _ok)], middleware=middleware)


def _slowapi(**settings: Any) -> Any:
    from slowapi import Limiter  # noqa: PLC0415 - see the module
    from slowapi.util import get_remote_address  # noqa: PLC0415 - see the module

    return Limiter(key_func=get_remote_address, headers_enabled=True, **settings)


def starlette_slowapi() -> Any:
    """Return slowapi's middleware on Starlette."""
    from slowapi.middleware import SlowAPIMiddleware  # noqa: PLC0415 - see the module

    app = Starlette(routes=[Route("/", _ok)], middleware=[Middleware(SlowAPIMiddleware)])
    app.state.limiter = _slowapi(default_limits=[LIMIT])
    return app


def starlette_slowapi_asgi() -> Any:
    """Return slowapi's pure ASGI middleware on Starlette."""
    from slowapi.middleware import SlowAPIASGIMiddleware  # noqa: PLC0415 - see the module

    app = Starlette(routes=[Route("/", _ok)], middleware=[Middleware(SlowAPIASGIMiddleware)])
    app.state.limiter = _slowapi(default_limits=[LIMIT])
    return app


def starlette_slowapi_decorator() -> Any:
    """Return slowapi's decorator on the route, without a middleware."""
    limiter = _slowapi()
    app = Starlette(routes=[Route("/", limiter.limit(LIMIT)(_ok))])
    app.state.limiter = limiter
    return app


def _fastapi(**settings: Any) -> Any:
    from fastapi import FastAPI  # noqa: PLC0415 - see the module

    return FastAPI(**settings)


async def _ok_json() -> dict[str, bool]:
    return {"ok": True}


def fastapi_bare() -> Any:
    """Return an application on FastAPI without a limiter."""
    app = _fastapi()
    app.get("/")(_ok_json)
    return app


def fastapi_headers() -> Any:
    """Return an application that measures the cost of the headers."""
    app = fastapi_bare()
    app.add_middleware(_FixedHeaders)
    return app


async def _nothing() -> None:
    """Do nothing: the smallest dependency."""


def fastapi_dependency() -> Any:
    """Return an application that measures FastAPI's own cost of a dependency."""
    from fastapi import Depends  # noqa: PLC0415 - see the module

    app = _fastapi()
    app.get("/", dependencies=[Depends(_nothing)])(_ok_json)
    return app


def fastapi_ours() -> Any:
    """Return our middleware on FastAPI, with a store in memory."""
    from ratekeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    app = fastapi_bare()
    app.add_middleware(RateLimit, limits=LIMIT)
    return app


def fastapi_ours_shared() -> Any:
    """Return the same with the shared store."""
    from ratekeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    app = fastapi_bare()
    app.add_middleware(RateLimit, limits=LIMIT, store=f"shared://{os.environ[SHARED]}")
    return app


def fastapi_ours_dependency() -> Any:
    """Return our dependency on the route of FastAPI."""
    from ratekeeper.fastapi import RateLimit  # noqa: PLC0415 - see the module

    app = _fastapi()
    limit = RateLimit(app)
    app.get("/", dependencies=[limit(LIMIT)])(_ok_json)
    return app


def fastapi_slowapi() -> Any:
    """Return slowapi's middleware on FastAPI."""
    from slowapi.middleware import SlowAPIMiddleware  # noqa: PLC0415 - see the module

    app = fastapi_bare()
    app.state.limiter = _slowapi(default_limits=[LIMIT])
    app.add_middleware(SlowAPIMiddleware)
    return app


def fastapi_slowapi_decorator() -> Any:
    """Return slowapi's decorator, whose endpoint must take the request and the response."""
    app = _fastapi()
    app.state.limiter = limiter = _slowapi()

    async def ok(request: Request, response: Response) -> dict[str, bool]:  # noqa: ARG001 - slowapi
        return {"ok": True}

    # Annotations in text form would have to be names of this module.
    ok.__annotations__ = {"request": Request, "response": Response, "return": dict[str, bool]}
    app.get("/")(limiter.limit(LIMIT)(ok))
    return app
