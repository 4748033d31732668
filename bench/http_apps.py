"""The applications that are served: one route that answers `ok`, bare and under each limiter.

Each is made by a function, because granian's worker imports this module for one of them and should
not load the others' libraries. A limit is there to be counted under, not to be reached. All of
them count by the client's address and put their headers on every answer.
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
# Where the shared store's file is to be.
SHARED: Final = "BENCH_SHARED"


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """The least that can answer: takes the body as it comes first, which is all of it, says ok."""
    if scope["type"] != "http":
        return
    await receive()
    await _say_ok(send)


async def bare_to_the_end(scope: Any, receive: Any, send: Any) -> None:
    """The same as an application does it that knows no length: reads until nothing more comes."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await _say_ok(send)


# What `tollkeeper serve` answers to a check, as long as it is and with as many headers.
_CHECK_HEADERS: Final = (
    (b"x-ratelimit-limit", b"1000000"),
    (b"x-ratelimit-remaining", b"999999"),
    (b"x-ratelimit-reset", b"1794837002"),
    (b"ratelimit", b'"users";r=999999;t=1'),
    (b"ratelimit-policy", b'"users";q=1000000;w=1'),
    (b"content-type", b"application/json"),
    (b"x-tollkeeper-node", b"bench"),
    (b"x-request-id", b"0123456789ab-12345"),
    (b"content-length", b"173"),
)
_CHECK_BODY: Final = (
    b'{"allowed":true,"kind":"limited","rule":"users","limit":1000000,"remaining":999999,'
    b'"retry_after":0.0,"reset_after":1e-6,"delay":0.0,"degraded":false,"shadow_denied":[]}'
).ljust(173)


async def bare_check(scope: Any, receive: Any, send: Any) -> None:
    """What a check's answer takes to send: always the same one, and nothing is decided."""
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


async def _ok(request: Request) -> Response:  # noqa: ARG001 - Starlette and slowapi give it
    return PlainTextResponse("ok")


def starlette_bare() -> Any:
    """Starlette alone."""
    return Starlette(routes=[Route("/", _ok)])


class _FixedHeaders:
    """As many headers as ours has, always the same, and nothing else."""

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
    """What the headers alone take: the server copies each of them for every answer."""
    return Starlette(routes=[Route("/", _ok)], middleware=[Middleware(_FixedHeaders)])


def starlette_ours() -> Any:
    """Our middleware on Starlette, counting in the process."""
    from tollkeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    return Starlette(routes=[Route("/", _ok)], middleware=[Middleware(RateLimit, limits=LIMIT)])


def starlette_ours_shared() -> Any:
    """The same, counting in the shared file."""
    from tollkeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    middleware = [Middleware(RateLimit, limits=LIMIT, store=f"shared://{os.environ[SHARED]}")]
    return Starlette(routes=[Route("/", _ok)], middleware=middleware)


def _slowapi(**settings: Any) -> Any:
    from slowapi import Limiter  # noqa: PLC0415 - see the module
    from slowapi.util import get_remote_address  # noqa: PLC0415 - see the module

    return Limiter(key_func=get_remote_address, headers_enabled=True, **settings)


def starlette_slowapi() -> Any:
    """slowapi's middleware on Starlette."""
    from slowapi.middleware import SlowAPIMiddleware  # noqa: PLC0415 - see the module

    app = Starlette(routes=[Route("/", _ok)], middleware=[Middleware(SlowAPIMiddleware)])
    app.state.limiter = _slowapi(default_limits=[LIMIT])
    return app


def starlette_slowapi_asgi() -> Any:
    """slowapi's other middleware, which is pure ASGI."""
    from slowapi.middleware import SlowAPIASGIMiddleware  # noqa: PLC0415 - see the module

    app = Starlette(routes=[Route("/", _ok)], middleware=[Middleware(SlowAPIASGIMiddleware)])
    app.state.limiter = _slowapi(default_limits=[LIMIT])
    return app


def starlette_slowapi_decorator() -> Any:
    """slowapi's decorator on the route, without a middleware."""
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
    """FastAPI alone."""
    app = _fastapi()
    app.get("/")(_ok_json)
    return app


def fastapi_headers() -> Any:
    """What the headers alone take, as on Starlette."""
    app = fastapi_bare()
    app.add_middleware(_FixedHeaders)
    return app


async def _nothing() -> None:
    """A dependency's least."""


def fastapi_dependency() -> Any:
    """What FastAPI itself takes for a dependency."""
    from fastapi import Depends  # noqa: PLC0415 - see the module

    app = _fastapi()
    app.get("/", dependencies=[Depends(_nothing)])(_ok_json)
    return app


def fastapi_ours() -> Any:
    """Our middleware on FastAPI, counting in the process."""
    from tollkeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    app = fastapi_bare()
    app.add_middleware(RateLimit, limits=LIMIT)
    return app


def fastapi_ours_shared() -> Any:
    """The same, counting in the shared file."""
    from tollkeeper.asgi import RateLimit  # noqa: PLC0415 - see the module

    app = fastapi_bare()
    app.add_middleware(RateLimit, limits=LIMIT, store=f"shared://{os.environ[SHARED]}")
    return app


def fastapi_ours_dependency() -> Any:
    """A limit of the route's own, as a dependency."""
    from tollkeeper.fastapi import RateLimit  # noqa: PLC0415 - see the module

    app = _fastapi()
    limit = RateLimit(app)
    app.get("/", dependencies=[limit(LIMIT)])(_ok_json)
    return app


def fastapi_slowapi() -> Any:
    """slowapi's middleware on FastAPI."""
    from slowapi.middleware import SlowAPIMiddleware  # noqa: PLC0415 - see the module

    app = fastapi_bare()
    app.state.limiter = _slowapi(default_limits=[LIMIT])
    app.add_middleware(SlowAPIMiddleware)
    return app


def fastapi_slowapi_decorator() -> Any:
    """slowapi's decorator, for which the endpoint takes the request and the response."""
    app = _fastapi()
    app.state.limiter = limiter = _slowapi()

    async def ok(request: Request, response: Response) -> dict[str, bool]:  # noqa: ARG001 - its own
        return {"ok": True}

    # As text they would have to be names of the module.
    ok.__annotations__ = {"request": Request, "response": Response, "return": dict[str, bool]}
    app.get("/")(limiter.limit(LIMIT)(ok))
    return app
