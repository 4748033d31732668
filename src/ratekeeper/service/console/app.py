"""The application of the console: its routes, logging in and out, and the headers of every page.

A page is a function in the module of its name (`overview.py`, `rules.py`, …). `views.py` has the
code that they share.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.console import (
    attempts,
    audit,
    denials,
    fleet,
    overview,
    rules,
    subjects,
)
from ratekeeper.service.console.live import LiveFeed
from ratekeeper.service.console.sessions import SESSION_SECONDS, Session, Sessions
from ratekeeper.service.console.views import (
    COOKIE,
    ROOT,
    Console,
    FormRejected,
    Page,
    form_of,
    is_own_origin,
    session_of,
    view,
)
from ratekeeper.service.http.context import ServiceContext
from ratekeeper.service.http.tokens import OPEN, Token, TokenRejection

# A page and its answers belong to one operator: no cache keeps them.
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)

log = logging.getLogger("ratekeeper.console")


def console_app(context: ServiceContext, admin: Starlette) -> Starlette:
    """Return the application for /console. `admin` is the application of the admin API."""
    folder = context.settings.sessions
    if folder is None:
        return Starlette(routes=[], exception_handlers={HTTPException: _no_console})
    pages = (overview, rules, attempts, subjects, denials, fleet, audit)
    routes: list[BaseRoute] = [
        Route(f"{ROOT}/login", _login_page, methods=["GET"]),
        Route(f"{ROOT}/login", _log_in, methods=["POST"]),
        _get_only(Route(f"{ROOT}/link/{{code}}", _use_link, methods=["GET"])),
        view("/logout", _log_out, "POST", changes=False),
        view("/sessions", _show_sessions),
        view("/sessions/end", _end_sessions, "POST", changes=False),
        *(route for page in pages for route in page.routes()),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_PageHeaders)],
        exception_handlers={HTTPException: _failed, Exception: _defect},
    )
    # A trailing slash is another URL.
    app.router.redirect_slashes = False
    app.state.console = Console(context, admin, Sessions(folder), admin.state.control.heavy)
    app.state.live = LiveFeed(app.state.console)
    return app


def _get_only(route: Route) -> Route:
    """Return a route without HEAD, which Starlette adds: a preview must not use up a link."""
    route.methods = {"GET"}
    return route


def _no_console(_: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's interface
    detail = "this service has no data folder for sessions, so it has no console"
    return Response(detail, 404, media_type="text/plain")


async def _failed(request: Request, error: Exception) -> Response:
    """Return the error page for a path or method that does not exist."""
    console: Console = request.app.state.console
    page = console.page(request, await session_of(request))
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {
        404: "There is no such page. The navigation lists all pages.",
        405: "This page does not accept that method.",
    }
    return page.failed(status, text.get(status, "The page cannot be shown."))


async def _defect(request: Request, _: Exception) -> Response:
    """Return the error page for a defect, which Starlette's server logs after this."""
    log.exception("a defect at %s %s", request.method, request.scope["path"])
    console: Console = request.app.state.console
    page = console.page(request, None)
    return page.failed(500, "A defect of the console. The service's log has the details.")


class _PageHeaders:
    """Adds the headers that every page has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] += [pair for pair in _HEADERS if pair[0] not in given]
            await send(message)

        await self._app(scope, receive, send_with_headers)


# ── Logging in and out ─────────────────────────────────────────────────────────────────────────


async def _login_page(request: Request) -> Response:
    console: Console = request.app.state.console
    if await session_of(request) is not None:
        return RedirectResponse(_after_login(request.query_params.get("next", "")), 303)
    return console.page(request, None).render(
        "login.html", following=request.query_params.get("next", "")
    )


def _after_login(asked: str) -> str:
    """Return the URL to open after the login, which is always a page of the console."""
    path = unquote(asked.partition("?")[0])
    inside = path == ROOT or (path.startswith(f"{ROOT}/") and ".." not in path)
    return asked if inside and not path.startswith(f"{ROOT}/log") else ROOT


async def _log_in(request: Request) -> Response:
    console: Console = request.app.state.console
    page = console.page(request, None)
    try:
        form = await form_of(request, f"{ROOT}/login", OPEN)
    except FormRejected as error:
        return page.failed(error.status, str(error))
    following = form.get("next", "")
    if not is_own_origin(request):
        return page.failed(403, "The form comes from another site. Open the console itself.")
    found = console.context.tokens.permitted(f"Bearer {form.get('token', '').strip()}", "read")
    if isinstance(found, TokenRejection):
        log.info("a log-in to the console was rejected with %d", found.status)
        detail = "This token is unknown." if found.status == 401 else _not_permitted(found)
        return page.render(
            "login.html", found.status, problem=page.problem(detail), following=following
        )
    return await _begin(page, found, _after_login(following))


def _not_permitted(found: TokenRejection) -> str:
    reason = found.detail.partition(";")[0]
    return f"{reason}. The console needs a token with the role read or admin, without a scope."


async def _use_link(request: Request) -> Response:
    console: Console = request.app.state.console
    page = console.page(request, None)
    token = await asyncio.to_thread(console.sessions.use_link, request.path_params["code"])
    if token is None:
        detail = (
            "This link was used before, or is older than 15 minutes. Make a new one with "
            "`ratekeeper console link`, or log in with a token."
        )
        return page.render("login.html", 403, problem=page.problem(detail), following="")
    return await _begin(page, token, ROOT)


async def _begin(page: Page, token: Token, following: str) -> Response:
    try:
        secret = await asyncio.to_thread(page.console.sessions.begin, token)
    except ConfigError as error:
        return page.failed(503, f"{error}")
    log.info("%s logged in to the console with the role %s", token.name, token.role)
    response = RedirectResponse(following, 303)
    page.set_secret(response, COOKIE, secret, seconds=SESSION_SECONDS, path=ROOT)
    return response


async def _log_out(page: Page) -> Response:
    sessions = page.console.sessions
    await asyncio.to_thread(sessions.end, page.session.key)
    response = RedirectResponse(f"{ROOT}/login", 303)
    response.delete_cookie(COOKIE, path=ROOT)
    response.delete_cookie(subjects.KEY_COOKIE, path=subjects.PATH)
    return response


async def _show_sessions(page: Page) -> Response:
    return page.render("sessions.html", sessions=await _own_sessions(page))


async def _end_sessions(page: Page) -> Response:
    """End the operator's other sessions: a log-out everywhere else."""
    sessions = page.console.sessions
    for each in await _own_sessions(page):
        if each.key != page.session.key:
            await asyncio.to_thread(sessions.end, each.key)
    return page.redirect(f"{ROOT}/sessions", "sessions-ended")


async def _own_sessions(page: Page) -> list[Session]:
    """Return the sessions of the same token; after a link, those of links with the same name."""
    console = page.console
    found = await asyncio.to_thread(console.sessions.all, console.context.tokens)
    own = page.session.token
    return [e for e in found if (e.token.name, e.token.sha256) == (own.name, own.sha256)]
