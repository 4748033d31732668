"""The admin API, put together: FastAPI over the control plane, and the service's description.

`/openapi.json` describes the whole service, the raw endpoints too; `/docs` shows it as a page that
loads nothing from anywhere. Both need no token: they hold nothing that the source does not say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tollkeeper.core.version import __version__
from tollkeeper.service.admin import page, problems, quotas, records, rules, subjects, versions
from tollkeeper.service.admin.answering import PREFIX
from tollkeeper.service.admin.draining import Draining
from tollkeeper.service.admin.plane import AdminNode, Plane
from tollkeeper.service.http import openapi

# Nothing of what is answered may run in a browser, or be shown inside another page.
SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_LOCKED: Final = b"default-src 'none'; frame-ancestors 'none'"


def admin_app(node: AdminNode) -> FastAPI:
    """The admin API of a node: what is under /v1/admin, /openapi.json and /docs.

    It opens the database at the first request that needs it. Its lifespan closes that; whoever runs
    no lifespan calls `await app.state.plane.close()` when the node stops.
    """
    app = FastAPI(
        title="Tollkeeper",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A slash too many is another URL: to redirect would drop the body's method on some clients.
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=[Middleware(Draining), Middleware(_Headers)],
    )
    app.state.plane = Plane(node)
    routers = [module.router for module in (rules, subjects, versions, quotas, records)]
    for router in routers:
        app.include_router(router, prefix=PREFIX)
    problems.install(app, PREFIX, [route for router in routers for route in router.routes])
    _describe(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.plane.close()


def _describe(app: FastAPI) -> None:
    """Add the description of the service, made when it is first asked for."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi.document(app)
        return app.openapi_schema

    # In threads: it takes a while, in which checks are to be answered.
    async def openapi_json(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(described))

    async def docs(_: Request) -> Response:
        text = page.of(await asyncio.to_thread(described))
        return HTMLResponse(text, headers={"Content-Security-Policy": page.POLICY})

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's way to do this
    app.add_route("/openapi.json", openapi_json, methods=["GET"], include_in_schema=False)
    app.add_route("/docs", docs, methods=["GET"], include_in_schema=False)


class _Headers:
    """Adds the headers that keep browsers from trusting what they get."""

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
