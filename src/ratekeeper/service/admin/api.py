"""The application of the admin API: its routers, the OpenAPI document and the page /docs.

`/openapi.json` describes the whole service, including the raw endpoints. `/docs` shows it as a page
that can send requests to this service, with the token that the reader gives it. The page loads
nothing from other servers. Neither needs a token: they contain nothing beyond the public source.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ratekeeper.core.version import __version__
from ratekeeper.service.admin import (
    activity,
    blocklist,
    entry_files,
    fleet,
    load,
    page,
    preview,
    problems,
    quotas,
    records,
    regions,
    rules,
    search,
    subjects,
)
from ratekeeper.service.admin.control import AdminContext, control_plane
from ratekeeper.service.admin.operations import PREFIX
from ratekeeper.service.http import openapi

# No reply may run in a browser or be shown inside another page.
SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_LOCKED: Final = b"default-src 'none'; frame-ancestors 'none'"

_ROUTERS: Final = (
    preview.router,
    rules.router,
    subjects.router,
    search.router,
    entry_files.router,
    rules.versions_router,
    quotas.router,
    records.router,
    activity.router,
    load.router,
    fleet.router,
    regions.router,
    blocklist.router,
)


def admin_app(context: AdminContext) -> FastAPI:
    """Return the application for /v1/admin, /openapi.json and /docs.

    It opens the database at the first request that needs it, and closes it at the end of its
    lifespan. A caller that runs no lifespan calls `await app.state.control.close()` at shutdown.
    """
    app = FastAPI(
        title="Ratekeeper",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A trailing slash is another URL: on a redirect, some clients change the method.
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=[Middleware(_Headers)],
    )
    app.state.control = control_plane(context)
    app.router.routes += _operations().routes
    problems.install(app, PREFIX, [route for router in _ROUTERS for route in router.routes])
    _describe(app)
    return app


@cache
def _operations() -> APIRouter:
    """Return the operations, which all applications of a process share: FastAPI prepares each
    operation at its first request, and that takes a tenth of a second for all."""
    found = APIRouter()
    for router in _ROUTERS:
        found.include_router(router, prefix=PREFIX)
    return found


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.control.close()


def _describe(app: FastAPI) -> None:
    """Add the OpenAPI document, which is made at the first request, and its page."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi.document(app)
        return app.openapi_schema

    # In a thread: it takes a while, and checks must not wait for it.
    async def openapi_json(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(described))

    async def docs(_: Request) -> Response:
        return HTMLResponse(page.page(), headers={"Content-Security-Policy": page.POLICY})

    app.openapi = described  # type: ignore[method-assign]  # as FastAPI's documentation recommends
    app.add_route("/openapi.json", openapi_json, methods=["GET"], include_in_schema=False)
    app.add_route("/docs", docs, methods=["GET"], include_in_schema=False)


class _Headers:
    """Adds headers that restrict how a browser uses a reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                headers.extend(SECURITY_HEADERS)
                if not any(name == b"content-security-policy" for name, _ in headers):
                    headers.append((b"content-security-policy", _LOCKED))
            await send(message)

        await self._app(scope, receive, send_with_headers)
