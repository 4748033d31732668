"""Requests in flight: a request has its slot until its response has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.websockets import WebSocket

from ratekeeper.asgi import RateLimit
from ratekeeper.wsgi import RateLimit as WsgiRateLimit
from tests.web.asgi_driver import ask, scope_of

LIMIT = "1 at once for 60s"


class Streaming:
    """An ASGI application that sends a part of its body, and waits."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
            self.started.set()
            await self.goes_on.wait()
        if scope["path"] == "/error":
            raise ZeroDivisionError
        await send({"type": "http.response.body", "body": b"2"})


async def test_a_stream_has_a_slot_until_it_ends() -> None:
    """The next request passes when the last part is sent."""
    app = Streaming()
    limit = RateLimit(app, LIMIT)
    task = asyncio.create_task(ask(limit, "/stream"))
    await app.started.wait()
    assert (await ask(limit)).status == 429
    app.goes_on.set()
    assert (await task).body == b"12"
    assert [(await ask(limit)).status for _ in range(3)] == [200] * 3


async def test_an_error_or_a_client_that_leaves_ends_a_request() -> None:
    """A server cancels the task of a client that has gone, or `send` raises."""
    app = Streaming()
    limit = RateLimit(app, LIMIT)
    with pytest.raises(ZeroDivisionError):
        await ask(limit, "/error")
    task = asyncio.create_task(ask(limit, "/stream"))
    await app.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def gone(message: Any) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await limit(scope_of("/"), None, gone)  # type: ignore[arg-type]  # it receives nothing
    assert (await ask(limit)).status == 200


async def test_a_denied_request_frees_the_slots_of_the_limits_around_it() -> None:
    """A limit further in denies it."""
    app = Streaming()
    limit = RateLimit(RateLimit(app, "1/minute"), LIMIT)
    assert [(await ask(limit)).status for _ in range(3)] == [200, 429, 429]
    assert limit.enforcer.store.stats().states <= 1


async def test_a_websocket_has_a_slot_until_it_is_closed() -> None:
    """However many messages it has."""
    opened, closes = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Streaming()(scope, receive, send)
            return
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await websocket.send_text("1")
        opened.set()
        await closes.wait()
        await websocket.close()

    limit = RateLimit(app, LIMIT)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        """Take a message."""

    task = asyncio.create_task(limit(scope_of(kind="websocket"), receive, send))
    await opened.wait()
    assert (await ask(limit)).status == 429
    closes.set()
    await task
    assert (await ask(limit)).status == 200


def wsgi_status(app: WsgiRateLimit, path: str = "/") -> tuple[int, Iterable[bytes]]:
    """Call a WSGI application; return the status and the body, which was not read."""
    statuses: list[int] = []

    def start(status: str, headers: object, exc_info: object = None) -> Any:
        statuses.append(int(status[:3]))

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": "192.0.2.1"}
    body = app(environ, start)
    return statuses[0], body


def test_a_wsgi_body_has_a_slot_until_it_is_closed() -> None:
    """A list is complete at once; a generator is not, whatever part of it was sent."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/error":
            raise ZeroDivisionError
        start_response("200 OK", [])
        return iter([b"1", b"2"]) if environ["PATH_INFO"] == "/stream" else [b"1"]

    limit = WsgiRateLimit(app, LIMIT)
    assert [wsgi_status(limit)[0] for _ in range(3)] == [200] * 3
    status, body = wsgi_status(limit, "/stream")
    assert (status, next(iter(body))) == (200, b"1")
    assert wsgi_status(limit)[0] == 429
    body.close()  # type: ignore[attr-defined]  # as WSGI defines it
    with pytest.raises(ZeroDivisionError):
        wsgi_status(limit, "/error")
    assert wsgi_status(limit)[0] == 200
