"""The ASGI middleware on a remote store: awaited, settled, and with a failure policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from ratekeeper import Limiter
from ratekeeper.asgi import RateLimit
from ratekeeper.fastapi import RateLimit as FastRateLimit
from ratekeeper.web.enforcer import Enforcer
from tests.integration.asgi_servers import free_port
from tests.integration.tcp_proxy import Mode, Proxy
from tests.redis_servers import Single, running
from tests.web.asgi_driver import ask, hello, run_lifespan


@pytest.fixture
def uri() -> str:
    """Return the URI of an empty Redis, with a timeout that suits a busy machine."""
    server = running("single")
    server.flush()
    return f"{server.uri}?deadline_ms=10000"


async def test_concurrent_requests_are_allowed_up_to_the_limit_exactly(uri: str) -> None:
    """100 requests are in flight in two middlewares, as in two processes: 40 are allowed."""
    apps = [RateLimit(hello, "40/day", store=uri) for _ in range(2)]
    answers = await asyncio.gather(*(ask(apps[number % 2]) for number in range(100)))
    assert Counter(each.status for each in answers) == {200: 40, 429: 60}
    for app in apps:
        await app.enforcer.aclose()


async def test_a_node_answers_most_requests_of_a_leased_limit(uri: str) -> None:
    """The limit of FastAPI's middleware and that of a route are leased, by one node."""
    app = FastAPI()
    limit = FastRateLimit(app, "10000/day", store=uri, consistency="leased")
    app.get("/hello", dependencies=[limit("9000/day")])(lambda: "hello")
    answers = [await ask(app, "/hello") for _ in range(60)]
    assert {each.status for each in answers} == {200}
    fleet = limit.enforcer.store.fleet
    assert fleet is not None
    counts = fleet.answers()
    assert len(counts) == 2
    for each in counts.values():
        assert each.allowed + each.asked == 60
        assert each.allowed >= 30
    await limit.enforcer.aclose()
    strict = Limiter("10000/day", store=uri)
    assert strict.peek("address:192.0.2.1").remaining == 10_000 - 60
    strict.close()


async def test_costs_and_outcomes_are_settled_before_the_response_ends(uri: str) -> None:
    """Another process sees the refund with the next request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["ratekeeper.charge"].settle(4)
        await hello(scope, receive, send)

    one, two = (RateLimit(app, "500/day", store=uri, cost=100) for _ in range(2))
    left = [(await ask(each)).headers["x-ratelimit-remaining"] for each in (one, two) * 3]
    assert left == [str(400 - 4 * number) for number in range(6)]
    await one.enforcer.aclose()
    await two.enforcer.aclose()


async def test_a_cancelled_request_is_settled(uri: str) -> None:
    """The refund is sent although its task is being cancelled."""
    running_now = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["ratekeeper.charge"].refund()
        running_now.set()
        await asyncio.Event().wait()

    limited_app = RateLimit(app, "10/day", store=uri)
    task = asyncio.create_task(ask(limited_app))
    await running_now.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = await limited_app.enforcer._fixed.any.peek("address:192.0.2.1")
    assert left.remaining == 10
    await limited_app.enforcer.aclose()


@pytest.mark.parametrize(("cost", "used", "left"), [(1, 7, 3), (7, 1, 9)])
async def test_a_request_that_is_cancelled_while_it_is_settled_is_charged(
    uri: str, cost: int, used: int, left: int
) -> None:
    """It is cancelled while the last part is sent: settling more units takes several calls."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["ratekeeper.charge"].settle(used)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await send({"type": "http.response.body", "body": b"all"})

    limited_app = RateLimit(app, "10/day", store=uri, cost=cost)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(ask(limited_app))

    async def remaining() -> int:
        return int((await limited_app.enforcer._fixed.any.peek("address:192.0.2.1")).remaining)

    async with asyncio.timeout(30):
        while await remaining() != left:  # noqa: ASYNC110 - the server signals no event
            await asyncio.sleep(0.01)
    await limited_app.enforcer.aclose()


async def test_a_denied_route_refunds_the_application_charge(uri: str) -> None:
    """A request passes several limits together or not at all, also if each is a separate call."""
    app = FastAPI()
    limit = FastRateLimit(app, "100/day", store=uri)

    @app.get("/x", dependencies=[limit("1/day")])
    async def x() -> None: ...

    statuses = [(await ask(app, "/x")).status for _ in range(5)]
    assert statuses == [200] + [429] * 4
    assert (await ask(app, "/nowhere")).headers["x-ratelimit-remaining"] == "98"
    await limit.enforcer.aclose()


@pytest.mark.parametrize(("on_failure", "status"), [("open", 200), ("closed", 503)])
async def test_an_unavailable_store_is_answered_by_the_failure_policy(
    on_failure: Any, status: int
) -> None:
    """Open allows the request, closed answers 503 with Retry-After; both are marked degraded."""
    limited_app = RateLimit(
        hello, "10/day", store=f"redis://127.0.0.1:{free_port()}", on_failure=on_failure
    )
    seen = await ask(limited_app)
    assert seen.status == status
    assert seen.headers["x-ratelimit-policy"] == "degraded"
    assert ("retry-after" in seen.headers) is (status == 503)
    await limited_app.enforcer.aclose()


async def test_a_login_route_fails_closed_when_redis_stops() -> None:
    """The login answers 503 from then on; the other routes are served without a limit."""
    app = FastAPI()
    with Single() as server:
        limit = FastRateLimit(app, "100/day", store=f"{server.uri}?deadline_ms=10000")

        @app.get("/login", dependencies=[limit("5/day", on_failure="closed")])
        async def login() -> None: ...

        @app.get("/search", dependencies=[limit("5/day")])
        async def search() -> None: ...

        before = [(await ask(app, path)).status for path in ("/login", "/search")]
        await asyncio.to_thread(server.stop)
        after = [(await ask(app, path)).status for path in ("/login", "/search")]
        await limit.enforcer.aclose()
    assert (before, after) == ([200, 200], [503, 200])


async def test_a_store_that_fails_before_the_response_ends_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client gets its response; the initial charge stays, and a log line says so."""
    with Single() as server:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["ratekeeper.charge"].refund()
            await asyncio.to_thread(server.stop)
            await hello(scope, receive, send)

        limited_app = RateLimit(app, "10/day", store=f"{server.uri}?deadline_ms=10000")
        assert (await ask(limited_app)).status == 200
        assert "could not be settled" in caplog.text
        await limited_app.enforcer.aclose()


async def test_the_store_is_connected_when_the_application_has_started(uri: str) -> None:
    """The first request does not wait for the connection. Without Redis it starts all the same."""
    port = urlsplit(uri).port
    assert port is not None
    connections: list[int] = []
    modes: tuple[Mode, ...] = ("pass", "cut")
    for mode in modes:
        with Proxy(port, mode) as proxy:

            async def note(message: Any, proxy: Proxy = proxy) -> None:
                assert message["type"] == "lifespan.startup.complete"
                connections.append(proxy.accepted)

            async def start(_: Any, __: Any, send: Any) -> None:
                await send({"type": "lifespan.startup.complete"})

            app = RateLimit(start, "10/day", store=f"{proxy.uri}?deadline_ms=10000")
            await app({"type": "lifespan"}, None, note)
            await app.enforcer.aclose()
    assert connections == [1, 1]


async def test_the_store_is_closed_with_the_application(uri: str) -> None:
    """After the lifespan no connection is left, and a second start opens a new one."""
    app = FastAPI()
    limit = FastRateLimit(app, "10/day", store=uri)
    assert isinstance(limit.enforcer, Enforcer)
    for number in range(2):
        assert (await ask(app)).headers["x-ratelimit-remaining"] == str(9 - number)
        await run_lifespan(app)
        assert not limit.enforcer._is_open
