"""The service as an ASGI application: routing, tokens, bodies and the headers of every reply.

    HttpService(context)     # any ASGI server runs it; `ratekeeper serve` uses granian

It is raw ASGI, because routing and reading a body with a framework takes ten times as long as a
check. The admin API is not on the path of any request, so it is a FastAPI application, which is
imported at the first call.

`incoming.py` has the bounds of bodies, and reads them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from asyncio import CancelledError, current_task
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from ratekeeper.core.errors import ConfigError, StoreError, show
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.decide.store import probe
from ratekeeper.service.http import authorize, call_limits, checks, health, quotas
from ratekeeper.service.http.bodies import (
    KNOWN_JSON_TYPES,
    BodyRejected,
    check_json_type,
    problem_at,
    too_slow,
    unknown_field,
)
from ratekeeper.service.http.browsers import BrowserGuard
from ratekeeper.service.http.context import (
    CLOSE,
    REQUEST_ID,
    EarlyReply,
    Routes,
    Scope,
    Send,
    ServiceContext,
    ServiceReply,
    ServiceRequest,
    ServiceRoute,
    body_reply,
    error_reply,
    no_method_detail,
    no_path_detail,
    problem_reply,
    token_reply,
)
from ratekeeper.service.http.health import WorkerMetrics
from ratekeeper.service.http.incoming import Message, Receive, body_bytes_max, check_declared
from ratekeeper.service.http.static_files import PREFIX as STATIC
from ratekeeper.service.http.static_files import (
    REVALIDATED,
    StaticFile,
    console_files,
    send_reply,
)
from ratekeeper.service.http.tokens import OPEN, Token, TokenRejection

# The form of a request ID that a client may choose; any other value is replaced.
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
# Headers that decide who calls, or what is checked. A proxy in front of the service may read the
# first of several lines and the service the last, so a request with several is rejected.
_SINGLE_HEADERS: Final = frozenset(
    {
        b"authorization",
        b"content-type",
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"x-csrf-token",
        b"x-forwarded-method",
        b"x-forwarded-uri",
        b"x-original-method",
        b"x-original-uri",
        b"x-ratekeeper-token",
    }
)
# A Content-Length with more digits may be too large for a check, so it is looked at.
_DIGITS: Final = 4
# Pages of the admin application that never change; no token is needed to read them.
_PAGES: Final = ("/docs", "/openapi.json")
_ADMIN: Final = ("/v1/admin", *_PAGES)
_CONSOLE: Final = "/console"
# The routes of an unknown path.
_NO_ROUTES: Final[dict[str, ServiceRoute]] = {}
# Three times as fast as calling the class, which does the same in Python.
_new_tuple: Final = tuple.__new__

log = logging.getLogger("ratekeeper.service")


class HttpService:
    """The ASGI application of one worker."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.metrics = WorkerMetrics(context)
        context.totals = self.metrics.total
        context.activity.totals = self.metrics.recent_total
        self._requests = context.counters.requests
        self._permitted = context.tokens.permitted
        self._open_permissions = context.tokens.open_permissions
        self._browsers = BrowserGuard(context.tokens, loopback=context.settings.loopback)
        self._accepted_hosts = self._browsers.accepted
        self._bodies = context.bodies
        self._waiting = self._bodies.waiting
        self._routes = _with_bounds(
            {
                **checks.routes(context),
                **call_limits.routes(context),
                **quotas.routes(context),
                **authorize.routes(context),
                **health.routes(context, self.metrics),
            }
        )
        self._node_header = (b"x-ratekeeper-node", context.node_header.encode("ascii"))
        self._id_prefix = secrets.token_hex(6).encode("ascii")
        self._ids = count(1)
        self._defects = SeldomLog(log, logging.ERROR)
        self._admin: Any = None
        self._console: Any = None
        self._pages: dict[str, _StaticPage] = {}
        self._opening_admin = asyncio.Lock()

    async def __call__(  # noqa: PLR0912, PLR0915 - see the docstring
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request, or run the lifespan.

        It is long because every function that it called would cost a tenth of a check.
        """
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        path = scope["path"]
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id")
        if request_id is None or not _REQUEST_ID.fullmatch(request_id):
            request_id = b"%b-%x" % (self._id_prefix, next(self._ids))
        token: Token | TokenRejection = OPEN
        is_plain = b"origin" not in headers and len(headers) == len(scope["headers"])
        if not is_plain or headers.get(b"host") not in self._accepted_hosts:
            token = self._rejected_head(scope, headers) or OPEN
        methods = self._routes.get(path, _NO_ROUTES)
        if methods is _NO_ROUTES and token is OPEN and _is_admin(path):
            await self._call_admin(scope, request_id, receive, send)
            return
        is_too_large = False
        try:
            handle, permission, bytes_max = methods.get(scope["method"]) or _any_method(
                scope, methods, token
            )
            if permission is not None and permission not in self._open_permissions:
                authorization = headers.get(b"authorization", b"").decode("latin-1") or None
                # A rejected web page stays rejected: it has no token.
                token = token if token is not OPEN else self._permitted(authorization, permission)
            if isinstance(token, TokenRejection):
                _reject(token)
            body = b""
            if bytes_max:
                if scope["query_string"] or len(headers.get(b"content-length", b"")) > _DIGITS:
                    _check_unread(scope, headers, bytes_max)
                task = current_task()
                self._waiting[task] = self._bodies.now_s
                try:
                    message = await receive()
                    body = message.get("body", b"")
                    # A server may say `more_body` although only an empty message follows.
                    if headers.get(b"content-length") != b"%d" % len(body) or len(body) > bytes_max:
                        body = await self._bodies.read(receive, headers, bytes_max, message)
                finally:
                    self._waiting.pop(task, None)
                if headers.get(b"content-type") not in KNOWN_JSON_TYPES:
                    check_json_type(headers[b"content-type"])
            status, sent, body = await handle(
                _new_tuple(ServiceRequest, (scope, headers, body, token, request_id))
            )
        except CancelledError:
            if not self._bodies.expired():
                raise
            status, sent, body = body_reply(too_slow())
        except Exception as error:
            status, sent, body = error_reply(error) or _defect(self._defects, error, scope)
            is_too_large = isinstance(error, BodyRejected) and status == 413
        requests, counted = self._requests, (path if methods else "(none)", status)
        requests[counted] = requests.get(counted, 0) + 1
        sent += (self._node_header, (b"x-request-id", request_id))
        if (self.context.stopping or self.context.closing) and scope["http_version"] < "2":
            # A client that keeps connections open finds another one before this one is closed.
            sent.append(CLOSE)
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})
        if is_too_large:
            await self._bodies.drop_rest(receive, headers)

    def _rejected_head(self, scope: Scope, headers: Mapping[bytes, bytes]) -> TokenRejection | None:
        """Return why a request is rejected because of its head; None if it is not."""
        scheme = scope.get("scheme", "http")
        wrong = _wrong_head(scope, headers)
        return wrong or self._browsers.rejection(scope["path"], headers, scheme)

    async def _call_admin(
        self, scope: Scope, request_id: bytes, receive: Receive, send: Send
    ) -> None:
        await self.open_admin()
        context = self.context
        has_ended = False

        async def received() -> Message:
            nonlocal has_ended
            message = await receive()
            has_ended = not message.get("more_body", False)
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                counted = ("(admin)", message["status"])
                self._requests[counted] = self._requests.get(counted, 0) + 1
                own = (self._node_header, (b"x-request-id", request_id))
                headers = [*message.get("headers", ()), *own]
                if (context.stopping or context.closing) and scope["http_version"] < "2":
                    headers.append(CLOSE)
                message["headers"] = headers
            await send(message)

        app = self._pages.get(scope["path"], self._admin)
        if _is_console(scope["path"]):
            app = console_files() if scope["path"].startswith(f"{STATIC}/") else self._console
            scope[REQUEST_ID] = request_id.decode("ascii")
        await app(scope, received, send_with_headers)
        if not has_ended:
            await self._bodies.drop_rest(received, dict(scope["headers"]))

    async def open_admin(self) -> None:
        """Import the admin API and the console. Otherwise their first request imports them."""
        async with self._opening_admin:
            if self._admin is None:
                # In a thread: the import takes a second or two, and checks must not wait for it.
                self._admin, self._console = await asyncio.to_thread(_admin_apps, self.context)
                self._pages = {path: _StaticPage(self._admin) for path in _PAGES}

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "lifespan":
            await receive()
            await self.start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self.stop()
            await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Connect to the store, if it answers, and start the background tasks.

        The creator of the context closes the limiter.
        """
        with suppress(StoreError):
            await probe(self.context.limiter.store)
        self._tasks = [
            asyncio.create_task(self.metrics.keep_writing()),
            asyncio.create_task(self._bodies.keep_checking()),
            asyncio.create_task(self.context.loads.keep_following()),
            asyncio.create_task(self.context.activity.keep_counting()),
        ]

    async def stop(self) -> None:
        """Stop the background tasks and write the last counters. No request may follow."""
        if self.context.control is not None:
            await self.context.control.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.metrics.close()


class _StaticPage:
    """Repeats the first answer to a GET: writing 200 kB of JSON takes as long as 100 checks."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._file: StaticFile | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        if self._file is None:
            sent: list[Message] = []

            async def keep(message: Message) -> None:
                sent.append(message)

            await self._app(scope, receive, keep)
            if sent[0]["status"] != 200:
                for message in sent:
                    await send(message)
                return
            headers = [each for each in sent[0]["headers"] if each[0] != b"content-length"]
            self._file = StaticFile(b"".join(each["body"] for each in sent[1:]), headers)
        await send_reply(await self._file.reply(dict(scope["headers"]), REVALIDATED), scope, send)


def _with_bounds(routes: Routes) -> Routes:
    """Return the routes with the bounds of their bodies."""
    return {
        path: {
            method: route._replace(body_bytes_max=body_bytes_max(method, path))
            for method, route in methods.items()
        }
        for path, methods in routes.items()
    }


def _admin_apps(context: ServiceContext) -> tuple[Any, Any]:
    """Return the applications of the admin API and of the console, which calls it."""
    # Imported here: a worker that never serves the admin API needs no framework.
    from ratekeeper.service.admin.api import admin_app  # noqa: PLC0415 - see above
    from ratekeeper.service.console.app import console_app  # noqa: PLC0415 - see above

    console_files()  # reads them now, in this thread
    admin = admin_app(context)
    return admin, console_app(context, admin)


def _wrong_head(scope: Scope, headers: Mapping[bytes, bytes]) -> TokenRejection | None:
    """Return why a request is rejected whose head two programs could understand differently."""
    names = [name for name, _ in scope["headers"] if name in _SINGLE_HEADERS]
    for name in names:
        if names.count(name) > 1:
            given = name.decode("ascii")
            detail = f"the header {given} is given {names.count(name)} times; send it once"
            return TokenRejection(400, detail)
    # granian writes an empty Host if the client sends none.
    if not headers.get(b"host") and scope["http_version"] == "1.1":
        detail = "the header Host is missing, which HTTP/1.1 requires; send it"
        return TokenRejection(400, detail)
    return None


def _reject(rejection: TokenRejection) -> NoReturn:
    raise EarlyReply(token_reply(rejection))


def _check_unread(scope: Scope, headers: Mapping[bytes, bytes], bytes_max: int) -> None:
    """Reject a body that is declared too large, and a query beside a body."""
    check_declared(headers, bytes_max)
    if scope["query_string"]:
        _reject_query(scope)


def _reject_query(scope: Scope) -> NoReturn:
    """Reject the query of an operation whose parameters are all in its body."""
    name = scope["query_string"].decode("latin-1").partition("&")[0].partition("=")[0]
    detail = f"{unknown_field(unquote(name), ())}: {show(scope['path'])} takes its fields in a body"
    raise ConfigError(problem_at("the query", "", detail))


def _is_admin(path: str) -> bool:
    return path in _ADMIN or path.startswith(f"{_ADMIN[0]}/") or _is_console(path)


def _is_console(path: str) -> bool:
    return path == _CONSOLE or path.startswith(f"{_CONSOLE}/")


def _any_method(
    scope: Scope, methods: dict[str, ServiceRoute], token: Token | TokenRejection
) -> ServiceRoute:
    """Return the route for every method, if the path has one. Raises EarlyReply."""
    if isinstance(token, TokenRejection):
        _reject(token)
    route = methods.get("*")
    if route is not None:
        return route
    if not methods:
        raise EarlyReply(problem_reply(404, "NOT_FOUND", no_path_detail(scope["path"])))
    allowed = ", ".join(methods)
    detail = no_method_detail(scope["method"], allowed)
    headers = [(b"allow", allowed.encode("ascii"))]
    raise EarlyReply(problem_reply(405, "METHOD_NOT_ALLOWED", detail, headers))


def _defect(defects: SeldomLog, error: Exception, scope: Scope) -> ServiceReply:
    """Log a defect and return the reply to the client: one in checks occurs at every check."""
    defects.note("a defect at %s %s", scope["method"], show(scope["path"]), error=error)
    return problem_reply(500, "INTERNAL", "a defect of the service; its log has the details")
