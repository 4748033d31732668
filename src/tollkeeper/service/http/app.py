"""The service as an ASGI application: one look-up to route, one answer to send.

    service(node)            # any ASGI server runs it; `tollkeeper serve` uses granian

Raw ASGI, because a framework takes ten times as long to route and to read a body as a check takes.
What administrators do is not on anybody's path, so that is FastAPI's, and is imported when it is
first asked for.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from asyncio import CancelledError, current_task
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from tollkeeper.core.errors import show
from tollkeeper.service.http import authorize, checks, health, quotas
from tollkeeper.service.http.asked import (
    Asked,
    ClientGone,
    Endpoint,
    Message,
    Receive,
    Scope,
    Send,
    rest_of_body,
)
from tollkeeper.service.http.metrics import Metrics
from tollkeeper.service.http.node import Node
from tollkeeper.service.http.patience import Patience
from tollkeeper.service.http.replies import (
    Refusal,
    Reply,
    error_reply,
    problem_reply,
    refused_reply,
)
from tollkeeper.service.http.tokens import OPEN, Need, Refused, Token

# What a request may be called by those who send it; everything else is given a name of ours.
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_ADMIN: Final = ("/v1/admin", "/docs", "/openapi.json")
_CLOSE: Final = (b"connection", b"close")
# Only browsers send Origin. Where this machine may ask without a token, every page that is open in
# a browser on it could: it reads no answer, but it would spend.
_OF_A_PAGE: Final = (
    "a page in a browser asks, by its Origin header, and without tokens those are not let in; "
    "ask from a program, or make a token: tollkeeper token create NAME --role check"
)
# The methods of a path that there is not.
_NOWHERE: Final[dict[str, Endpoint]] = {}

_TELL_SECONDS: Final = 1.0
# Three times as fast as calling the class, which would do the same in Python.
_asked: Final = tuple.__new__

log = logging.getLogger("tollkeeper.service")


def service(node: Node) -> Service:
    """The application of one worker."""
    return Service(node)


class Service:
    """Answers every request to one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.metrics = Metrics(node)
        self._requests = node.counters.requests
        self._patience = Patience(node.settings.body_seconds_max)
        self._waiting = self._patience.waiting
        self._routes: dict[str, dict[str, Endpoint]] = {
            **checks.endpoints(node),
            **quotas.endpoints(node),
            **authorize.endpoints(node),
            **health.endpoints(node, self.metrics),
        }
        self._node_header = (b"x-tollkeeper-node", node.node_id.encode("latin-1", "replace"))
        self._id_start = secrets.token_hex(6).encode("ascii")
        self._ids = count(1)
        self._defects = _Defects()
        self._admin: Any = None
        self._opening_admin = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the beginning and end of everything.

        Long, because each function that it would call costs a tenth of what a check costs.
        """
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        path = scope["path"]
        headers = dict(scope["headers"])
        methods = self._routes.get(path, _NOWHERE)
        if methods is _NOWHERE and _is_administration(path):
            await self._administer(scope, headers, receive, send)
            return
        try:
            handle, need, bytes_max = methods.get(scope["method"]) or _any_method(scope, methods)
            token = OPEN if need is None else self._permitted(headers, need)
            body = b""
            if bytes_max:
                task = current_task()
                self._waiting[task] = self._patience.now_s
                try:
                    message = await receive()
                    body = message.get("body", b"")
                    # A server may say `more_body` because it has not seen the end, which is next.
                    if headers.get(b"content-length") != b"%d" % len(body) or len(body) > bytes_max:
                        body = await rest_of_body(receive, message, headers, bytes_max)
                finally:
                    self._waiting.pop(task, None)
            status, sent, body = await handle(_asked(Asked, (scope, headers, body, token)))
        except ClientGone:
            # Who closed only his side still reads; of who has gone, the server knows.
            status, sent, body = _cut_short()
        except CancelledError:
            if not self._patience.ended():
                raise
            status, sent, body = _too_slow()
        except Exception as error:
            status, sent, body = error_reply(error) or self._defects.reply(scope)
        requests, counted = self._requests, (path if methods else "(none)", status)
        requests[counted] = requests.get(counted, 0) + 1
        sent += self._of_every_reply(scope, headers)
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})

    def _permitted(self, headers: dict[bytes, bytes], need: Need) -> Token:
        given = headers.get(b"authorization")
        authorization = None if given is None else given.decode("latin-1")
        found = self.node.tokens.permitted(authorization, need)
        if isinstance(found, Refused):
            raise Refusal(refused_reply(found))
        if found is OPEN and b"origin" in headers:
            raise Refusal(refused_reply(Refused(403, _OF_A_PAGE)))
        return found

    def _of_every_reply(
        self, scope: Scope, headers: dict[bytes, bytes]
    ) -> tuple[tuple[bytes, bytes], ...]:
        name = headers.get(b"x-request-id")
        if name is None or not _REQUEST_ID.fullmatch(name):
            name = b"%b-%x" % (self._id_start, next(self._ids))
        node = self.node
        if (node.stopping or node.closing) and scope["http_version"] < "2":
            # Whoever reuses connections shall find another before this one is gone.
            return self._node_header, (b"x-request-id", name), _CLOSE
        return self._node_header, (b"x-request-id", name)

    async def _administer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        async with self._opening_admin:
            if self._admin is None:
                # It takes a second or two, in which others are to be answered.
                self._admin = await asyncio.to_thread(_administration, self.node)

        async def send_as_ours(message: Message) -> None:
            if message["type"] == "http.response.start":
                counted = ("(admin)", message["status"])
                self._requests[counted] = self._requests.get(counted, 0) + 1
                message["headers"] = [
                    *message.get("headers", ()),
                    *self._of_every_reply(scope, headers),
                ]
            await send(message)

        await self._admin(scope, receive, send_as_ours)

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "lifespan":
            await self._live(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the server's start to its end."""
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Begin to count for the others. Whoever made the node closes it."""
        self._tasks = [
            asyncio.create_task(self.metrics.keep_writing()),
            asyncio.create_task(self._patience.keep_looking()),
        ]

    async def stop(self) -> None:
        """What was counted last is written; nothing is answered after this."""
        if self._admin is not None:
            await self._admin.state.plane.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.metrics.write()


def _administration(node: Node) -> Any:
    # Imported here: a node that nobody administers needs no framework.
    from tollkeeper.service.admin.api import admin_app  # noqa: PLC0415 - see above

    return admin_app(node)


def _is_administration(path: str) -> bool:
    return path in _ADMIN or path.startswith(f"{_ADMIN[0]}/")


def _any_method(scope: Scope, methods: dict[str, Endpoint]) -> Endpoint:
    """What is for every method; without it, this one is not allowed. Raises Refusal."""
    endpoint = methods.get("*")
    if endpoint is not None:
        return endpoint
    if not methods:
        detail = f"there is no {show(scope['path'])}; /docs lists what there is"
        raise Refusal(problem_reply(404, "NOT_FOUND", detail))
    allowed = ", ".join(methods)
    detail = f"{show(scope['method'])} is not what this is for; use {allowed}"
    headers = [(b"allow", allowed.encode("ascii"))]
    raise Refusal(problem_reply(405, "METHOD_NOT_ALLOWED", detail, headers))


def _too_slow() -> Reply:
    detail = "the body did not arrive in time; send it in one piece"
    return problem_reply(408, "BODY_TOO_SLOW", detail, [_CLOSE])


def _cut_short() -> Reply:
    detail = "the body ended before its end; send all of it"
    return problem_reply(400, "BODY_INCOMPLETE", detail, [_CLOSE])


class _Defects:
    """What is told of defects: one a second, for a defect on the path of checks is one a check."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._tell_at_s = 0.0
        self._untold = 0

    def reply(self, scope: Scope) -> Reply:
        """In an exception's handler: what the client gets, and a line in the log."""
        now_s = self._monotonic_s()
        if now_s >= self._tell_at_s:
            what = scope["method"], show(scope["path"]), self._untold
            log.exception("a defect at %s %s (and %d untold before)", *what)
            self._tell_at_s, self._untold = now_s + _TELL_SECONDS, 0
        else:
            self._untold += 1
        return problem_reply(500, "INTERNAL", "a defect of the service; its log says more")
