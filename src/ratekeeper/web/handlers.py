"""Exception handlers of Starlette and FastAPI that answer denied requests.

    @app.exception_handler(RateLimitExceeded)       # or exception_handler(429), or HTTPException
    async def too_many(request, error):
        return JSONResponse({"wait": error.denial.retry_after}, status_code=429)

A middleware runs outside of Starlette's exception handling, and its answer to a denied request must
not depend on where the limit is: on a route or on the application. So no exception travels through
the application. The middleware looks the handler up itself, in the application's public
`exception_handlers`, in the order in which Starlette looks: by status, then by the classes of the
exception. The default handler of FastAPI is not the application's, and is not used.

Flask and Django have exceptions of their own, which are raised (`flask.py`, `django.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from ratekeeper.core.errors import RatekeeperError
from ratekeeper.limiter.arguments import kind_of
from ratekeeper.web.answers import Denial
from ratekeeper.web.requests import DEPTH_MAX, AsgiRequest

try:
    from starlette.exceptions import HTTPException
except ImportError:  # an ASGI application that does not use Starlette

    class HTTPException(Exception):  # type: ignore[no-redef]  # takes its place
        """Has the attributes of Starlette's HTTPException."""

        def __init__(self, status_code: int, detail: str, headers: dict[str, str]) -> None:
            self.status_code = status_code
            self.detail = detail
            self.headers = headers


_DEFAULT_HANDLERS: Final = "fastapi.exception_handlers"


class _StarletteDenial(HTTPException, RatekeeperError):
    def __init__(self, denial: Denial) -> None:
        retry_after = {"Retry-After": str(denial.retry_after)}
        super().__init__(denial.status, denial.message, retry_after)
        self.denial = denial
        """The denied request, as `on_limit` and `on_unavailable` get it."""


class RateLimitExceeded(_StarletteDenial):
    """A request was denied by a limit: the exception that a handler for a 429 gets."""


class LimiterUnavailable(_StarletteDenial):
    """A request failed closed, because the store could not decide: the exception of a 503."""


_EXCEPTIONS: Final = {429: RateLimitExceeded, 503: LimiterUnavailable}


async def handled(denial: Denial, request: AsgiRequest, app: Any, receive: Any) -> Any:
    """Return the response of the application's exception handler; None if it has no handler.

    `app` is used if the scope does not name the application. WebSockets have no handler: those of
    most applications expect a request.
    """
    kind = _EXCEPTIONS.get(denial.status)
    if kind is None or request.scope["type"] != "http":
        return None
    error = kind(denial)
    handler = _handler_of(_starlette_in(request.scope.get("app") or app), error)
    if handler is None:
        return None
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415 - only handlers need it
    from starlette.requests import Request  # noqa: PLC0415 - the same

    # The route's own request has kept the body that was read, as FastAPI does before dependencies.
    # A new one would wait for that body until the client closes the connection.
    native = request.native
    connection = native if isinstance(native, Request) else Request(request.scope, receive)
    if kind_of(handler) == "plain":
        return await run_in_threadpool(handler, connection, error)
    return await handler(connection, error)


def _handler_of(app: Any, error: HTTPException) -> Callable[..., Any] | None:
    handlers: dict[Any, Callable[..., Any]] = {} if app is None else app.exception_handlers
    found = handlers.get(error.status_code)
    for kind in type(error).__mro__:
        # A handler for Exception answers server errors, and no HTTPException reaches it. One for
        # RatekeeperError has seen the exception that unwinds the application (`RequestDenied`).
        if found is not None or kind is RatekeeperError:
            break
        found = handlers.get(kind)
    return None if found is None or found.__module__ == _DEFAULT_HANDLERS else found


def _starlette_in(app: Any) -> Any:
    """Return the application of Starlette inside any middleware; None if it is another one."""
    starlette = sys.modules.get("starlette.applications")
    for _ in range(DEPTH_MAX):
        if app is None or starlette is None:
            break
        if isinstance(app, starlette.Starlette):
            return app
        app = getattr(app, "app", None)
    return None
