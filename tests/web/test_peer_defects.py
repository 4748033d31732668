"""Defects of well-known limiters for web applications, each shown to be absent here.

Other defects of that list are tested elsewhere: path parameters in test_requests, test_flask and
test_django; streams in test_asgi, test_wsgi and test_django; Retry-After in test_answers; colliding
keys in test_identity; a fallback that multiplies the limit in test_enforcer.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI
from flask import Flask

from ratekeeper import asgi, fastapi, flask
from ratekeeper.web.requests import AsgiRequest
from tests.web.asgi_driver import App, ask, hello, limited
from tests.web.enforcers import in_thread

THREADS = 16


def _middleware(store: str) -> App:
    return asgi.RateLimit(hello, "5/minute", store=store)


def _dependency(store: str) -> App:
    app = FastAPI()
    limit = fastapi.RateLimit(app, store=store)
    app.add_api_route("/", lambda: "hello", dependencies=[limit("5/minute")])
    return app


@pytest.mark.parametrize("make", [_middleware, _dependency])
async def test_an_event_loop_blocked_by_a_store(make: Any) -> None:
    """Defect: a synchronous driver that waits for the store blocks an async framework.

    The store is a server in the same event loop, so it receives nothing if the loop is blocked.
    """
    heard, over = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        heard.set()
        await over.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        asking = asyncio.create_task(ask(make(f"redis://127.0.0.1:{port}")))
        try:
            async with asyncio.timeout(30):
                await heard.wait()
            assert not asking.done(), "the store has not answered yet"
        finally:
            over.set()
        seen = await asking
    assert seen.status == 200
    assert seen.headers["x-ratelimit-policy"] == "degraded"


async def test_concurrent_guesses_do_not_pass_a_limit_on_outcomes() -> None:
    """Defect: failures are counted only afterwards, so concurrent guesses all pass."""
    tried, answer = [], asyncio.Event()

    async def login(scope: Any, receive: Any, send: Any) -> None:
        tried.append(1)
        await answer.wait()
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    app = limited(login, limits="3/minute", count=lambda status: status == 401)
    guesses = [asyncio.create_task(ask(app)) for _ in range(50)]
    done = asyncio.as_completed(guesses)
    assert [(await next(done)).status for _ in range(47)] == [429] * 47
    answer.set()
    assert [(await next(done)).status for _ in range(3)] == [401] * 3
    assert len(tried) == 3


@pytest.mark.parametrize("hook", ["skip", "count"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_hook_that_is_not_awaited_is_an_error(hook: str) -> None:
    """Defect: a coroutine that a thread does not await is true, so every request passes."""

    async def asked() -> bool:
        return False

    hooks: dict[str, Any] = {hook: lambda _: asked()}
    enforcer = in_thread(limits="1/minute", **hooks)
    with pytest.raises(TypeError, match=f"{hook} returned <coroutine .* return a plain value"):
        enforcer.leave(enforcer.enter(AsgiRequest({"type": "http"})), 200)


def test_threads_that_use_a_route_first_share_its_count() -> None:
    """Defect: a limiter that is made on first use is made twice, and each has its own count."""
    app = Flask("shop")
    limit = flask.RateLimit(app)
    app.add_url_rule("/", "index", limit("10/hour")(lambda: "hello"))
    together = threading.Barrier(THREADS)

    def asked(_: int) -> int:
        client = app.test_client()
        together.wait(30)
        return client.get("/").status_code

    with ThreadPoolExecutor(THREADS) as pool:
        statuses = list(pool.map(asked, range(THREADS)))
    assert sorted(statuses) == [200] * 10 + [429] * (THREADS - 10)
