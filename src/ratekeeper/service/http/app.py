"""The service as an ASGI application: routing, tokens, bodies and the headers of every reply.

    HttpService(context)     # any ASGI server runs it; `ratekeeper serve` uses granian

It is raw ASGI, because routing and reading a body with a framework takes ten times as long as a
check. The admin API is not on the path of any request, so it is a FastAPI application, which is
imported at the first call.

**Bodies that do not arrive.** A client that sends half a body must not occupy the worker for ever.
A timer for each request would cost a tenth of a check, and almost no request needs it. Instead each
request that waits for its body is an entry in a dict, which a task examines once a second. A
request that has waited too long is cancelled and answers 408. When many requests wait for bodies,
the timeout is much shorter. Bodies that arrive in parts share a bounded number of bytes: a request
whose next part does not fit answers 503. A body that arrives in one part is never affected.
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
    check_json_type,
    incomplete,
    problem_at,
    too_large,
    too_many_parts,
    too_slow,
    unknown_field,
)
from ratekeeper.service.http.browsers import BrowserGuard
from ratekeeper.service.http.context import (
    BODY_SECONDS_MAX,
    CLOSE,
    REQUEST_ID,
    EarlyReply,
    Message,
    Receive,
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
# Pages of the admin application that never change; no token is needed to read them.
_PAGES: Final = ("/docs", "/openapi.json")
_ADMIN: Final = ("/v1/admin", *_PAGES)
_CONSOLE: Final = "/console"
# The routes of an unknown path.
_NO_ROUTES: Final[dict[str, ServiceRoute]] = {}
# A body that is too large is still read and dropped, if it is not much too large: many clients read
# no answer before they have written the whole body.
_DROPPED_BYTES_MAX: Final = 8 * 1024 * 1024
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
        self._timeouts = BodyTimeouts(context.settings.body_seconds_max)
        self._waiting = self._timeouts.waiting
        self._routes: Routes = {
            **checks.routes(context),
            **call_limits.routes(context),
            **quotas.routes(context),
            **authorize.routes(context),
            **health.routes(context, self.metrics),
        }
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
        if b"origin" in headers or headers.get(b"host") not in self._accepted_hosts:
            token = self._browsers.rejection(path, headers, scope.get("scheme", "http")) or OPEN
        methods = self._routes.get(path, _NO_ROUTES)
        if methods is _NO_ROUTES and token is OPEN and _is_admin(path):
            await self._call_admin(scope, request_id, receive, send)
            return
        try:
            handle, permission, bytes_max = methods.get(scope["method"]) or _any_method(
                scope, methods, token
            )
            if permission is not None and permission not in self._open_permissions:
                given = headers.get(b"authorization")
                authorization = None if given is None else given.decode("latin-1")
                # A rejected web page stays rejected: it has no token.
                token = token if token is not OPEN else self._permitted(authorization, permission)
            if isinstance(token, TokenRejection):
                _reject(token)
            body = b""
            if bytes_max:
                if scope["query_string"]:
                    _reject_query(scope)
                task = current_task()
                self._waiting[task] = self._timeouts.now_s
                try:
                    message = await receive()
                    body = message.get("body", b"")
                    # A server may say `more_body` although only an empty message follows.
                    if headers.get(b"content-length") != b"%d" % len(body) or len(body) > bytes_max:
                        body = await _rest_of_body(
                            receive, message, headers, bytes_max, self._timeouts
                        )
                finally:
                    self._waiting.pop(task, None)
                if headers.get(b"content-type") not in KNOWN_JSON_TYPES:
                    check_json_type(headers[b"content-type"])
            status, sent, body = await handle(
                _new_tuple(ServiceRequest, (scope, headers, body, token, request_id))
            )
        except CancelledError:
            if not self._timeouts.expired():
                raise
            status, sent, body = body_reply(too_slow())
        except Exception as error:
            status, sent, body = error_reply(error) or _defect(self._defects, error, scope)
        requests, counted = self._requests, (path if methods else "(none)", status)
        requests[counted] = requests.get(counted, 0) + 1
        sent += (self._node_header, (b"x-request-id", request_id))
        if (self.context.stopping or self.context.closing) and scope["http_version"] < "2":
            # A client that keeps connections open finds another one before this one is closed.
            sent.append(CLOSE)
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})

    async def _call_admin(
        self, scope: Scope, request_id: bytes, receive: Receive, send: Send
    ) -> None:
        await self.open_admin()
        context = self.context

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
        await app(scope, receive, send_with_headers)

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
            asyncio.create_task(self._timeouts.keep_checking()),
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


def _admin_apps(context: ServiceContext) -> tuple[Any, Any]:
    """Return the applications of the admin API and of the console, which calls it."""
    # Imported here: a worker that never serves the admin API needs no framework.
    from ratekeeper.service.admin.api import admin_app  # noqa: PLC0415 - see above
    from ratekeeper.service.console.app import console_app  # noqa: PLC0415 - see above

    console_files()  # reads them now, in this thread
    admin = admin_app(context)
    return admin, console_app(context, admin)


def _reject(rejection: TokenRejection) -> NoReturn:
    raise EarlyReply(token_reply(rejection))


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


# ── Bodies ─────────────────────────────────────────────────────────────────────────────────────

CHECK_SECONDS: Final = 1.0
# When more requests wait than this, they get less time.
CROWD: Final = 256
CROWDED_SECONDS_MAX: Final = 1.0
# The bytes of all bodies of a worker that have arrived in part.
PARTIAL_BYTES_MAX: Final = 64 * 1024 * 1024

_Task = asyncio.Task[Any]


class BodyTimeouts:
    """Cancels requests whose bodies do not arrive in time. For one event loop."""

    def __init__(self, seconds_max: float = BODY_SECONDS_MAX) -> None:
        self.waiting: dict[_Task | None, float] = {}
        """The tasks that wait for a body, and since when, on the clock `now_s`."""
        self.now_s = 0.0
        """Seconds since `keep_checking` started; it advances in steps."""
        self.partial_bytes = 0
        """The bytes of bodies that have arrived in part."""
        self._seconds_max = seconds_max
        self._cancelled: set[_Task] = set()

    async def keep_checking(self, pause_s: float = CHECK_SECONDS) -> None:
        """Cancel requests that have waited too long, until this task is cancelled."""
        while True:
            await asyncio.sleep(pause_s)
            self.advance(pause_s)

    def advance(self, passed_s: float) -> None:
        """Advance the clock, and cancel every request that has now waited too long."""
        self.now_s += passed_s
        seconds_max = self._seconds_max
        if len(self.waiting) > CROWD:
            seconds_max = min(seconds_max, CROWDED_SECONDS_MAX)
        for task, since_s in list(self.waiting.items()):
            if task is not None and self.now_s - since_s > seconds_max:
                del self.waiting[task]
                self._cancelled.add(task)
                task.cancel()

    def expired(self) -> bool:
        """Return True, once, if the current task was cancelled by this object."""
        task = asyncio.current_task()
        if task is None or task not in self._cancelled:
            return False
        self._cancelled.discard(task)
        task.uncancel()
        return True


async def _rest_of_body(
    receive: Receive,
    message: Message,
    headers: Mapping[bytes, bytes],
    bytes_max: int,
    timeouts: BodyTimeouts,
) -> bytes:
    """Return the whole body, given its first message. Raises BodyRejected."""
    length = headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() and len(length) < 19 else -1
    chunks: list[bytes] = [message.get("body", b"")]
    size = kept = len(chunks[0])
    timeouts.partial_bytes += kept
    try:
        while message.get("more_body") and max(size, declared) <= _DROPPED_BYTES_MAX:
            message = await receive()
            chunk = message.get("body", b"")
            size += len(chunk)
            if max(size, declared) <= bytes_max:
                if timeouts.partial_bytes + len(chunk) > PARTIAL_BYTES_MAX:
                    raise too_many_parts()
                chunks.append(chunk)
                kept += len(chunk)
                timeouts.partial_bytes += len(chunk)
    finally:
        timeouts.partial_bytes -= kept
    if message["type"] == "http.disconnect":
        raise incomplete()
    if max(size, declared) > bytes_max:
        raise too_large(bytes_max)
    return b"".join(chunks)
