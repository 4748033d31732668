"""Django's limits in a real Redis: only the request that checks waits, not the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import AsyncRequestFactory, RequestFactory, override_settings

from ratekeeper.django import RateLimitMiddleware
from tests.conformance.stores import PATIENT
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Single
from tests.web import django_site as views

TICK_SECONDS = 0.01


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Run a Redis for these tests."""
    with Single() as started:
        yield started


async def ask() -> Any:
    return await RateLimitMiddleware(views.ahello)(AsyncRequestFactory().get("/"))


async def test_threads_and_the_loop_count_in_one_redis(server: Single) -> None:
    """Requests to one site under WSGI and under ASGI share the limit."""
    server.flush()
    store = f"{server.uri}?{PATIENT}"
    with override_settings(RATEKEEPER={"limits": "4/day", "store": store}):
        statuses = []
        for _ in range(3):
            statuses.append((await ask()).status_code)
            serve = RateLimitMiddleware(views.hello)
            answer = await asyncio.to_thread(serve, RequestFactory().get("/"))
            statuses.append(answer.status_code)
        assert statuses == [200, 200, 200, 200, 429, 429]


async def test_the_loop_runs_while_a_request_waits_for_redis(server: Single) -> None:
    """A Redis that accepts a command and never answers delays one request, and no other."""
    server.flush()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(TICK_SECONDS)
            ticks += 1

    with Proxy(server.port) as proxy:
        store = f"redis://127.0.0.1:{proxy.port}?deadline_ms=1000"
        setting = {"limits": "9/day", "store": store, "on_failure": "closed"}
        with override_settings(RATEKEEPER=setting):
            assert (await ask()).status_code == 200
            proxy.mode = "hold"
            ticking = asyncio.create_task(tick())
            answer = await ask()
            ticking.cancel()
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    # A hundred ticks fit into the second of waiting; a blocked loop has none.
    assert ticks > 5
