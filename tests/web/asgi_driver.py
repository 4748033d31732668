"""A minimal ASGI server: it calls an application and keeps every message that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.websockets import WebSocket

from ratekeeper.asgi import RateLimit
from ratekeeper.testing import ManualClock

App = Callable[[Any, Any, Any], Awaitable[None]]
Message = MutableMapping[str, Any]


class Seen:
    """The messages that an application sent in response to one request."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    @property
    def types(self) -> list[str]:
        return [message["type"] for message in self.messages]

    @property
    def start(self) -> Message:
        starts = [each for each in self.messages if each["type"].endswith((".start", ".accept"))]
        assert len(starts) == 1, f"a response must start once: {self.types}"
        return starts[0]

    @property
    def status(self) -> int:
        return int(self.start["status"])

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.messages)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers by name; a repeated name is an error."""
        pairs = [(name.decode(), value.decode()) for name, value in self.start["headers"]]
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), f"a header was sent twice: {names}"
        assert all(name == name.lower() for name in names), (
            f"ASGI requires lower-case names: {names}"
        )
        return dict(pairs)


def scope_of(
    path: str = "/",
    method: str = "GET",
    headers: Sequence[tuple[str, str]] = (),
    peer: str = "192.0.2.1",
    kind: str = "http",
    **more: Any,
) -> dict[str, Any]:
    """Return the scope of a request, as a server creates it."""
    scope = {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http" if kind == "http" else "ws",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
        "client": (peer, 40_000),
        "server": ("127.0.0.1", 80),
        "extensions": {},
        **more,
    }
    if kind == "http":
        scope["method"] = method
    return scope


async def ask(app: App, path: str = "/", **request: Any) -> Seen:
    """Send one HTTP request without a body; return every message of `app`."""
    return await ask_scope(app, scope_of(path, **request))


async def ask_scope(app: App, scope: dict[str, Any]) -> Seen:
    """Call `app` with a scope; return every message. The client stays connected to the end."""
    seen = Seen()
    asked = iter([{"type": "http.request", "body": b"", "more_body": False}])
    if scope["type"] == "websocket":
        asked = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hi"}])

    async def receive() -> Message:
        for message in asked:
            return message
        if scope["type"] == "websocket":
            return {"type": "websocket.disconnect", "code": 1000}
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    async def send(message: Message) -> None:
        seen.messages.append(message)

    await app(scope, receive, send)
    return seen


async def run_lifespan(app: App) -> list[str]:
    """Start an application and shut it down; return the types of its messages."""
    sent: list[str] = []
    asked = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Message:
        return {"type": next(asked)}

    async def send(message: Message) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    return sent


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everything the same way."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """A WebSocket that echoes messages until the client disconnects."""
    websocket = WebSocket(scope, receive, send)
    await websocket.accept(headers=[(b"x-mine", b"1")])
    async for text in websocket.iter_text():
        await websocket.send_text(text)


def limited(app: Any = hello, limits: Any = "2/minute", **options: Any) -> RateLimit:
    """Return `app` behind the middleware, with a manual clock."""
    return RateLimit(app, limits=limits, clock=ManualClock(1_000), **options)
