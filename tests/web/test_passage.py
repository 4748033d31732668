"""Passages: one answer for all limits that a request meets, and its cost settled once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from tests.web.asgi_driver import (
    Message,
    ask,
    ask_scope,
    echo,
    hello,
    limited,
    scope_of,
)
from tollkeeper import AsyncLimiter, ConfigError, Limit
from tollkeeper.asgi import RateLimit
from tollkeeper.testing import ManualClock
from tollkeeper.web.answers import Answer


def _remaining(app: RateLimit) -> int:
    """How much the address of the test's client has left."""
    return int(app.guard._limiter.peek("address:192.0.2.1").remaining)


# ── Hooks ──────────────────────────────────────────────────────────────────────────────────────


async def test_on_limit_may_answer_with_a_response_of_the_framework() -> None:
    """It gets our headers, Retry-After among them, and a None leaves the answer to us."""
    guarded = limited(
        limits="1/minute",
        on_limit=lambda call, ruling: (
            JSONResponse({"slow": "down"}, 420) if call.path == "/mine" else None
        ),
    )
    await ask(guarded)
    seen = await ask(guarded, "/mine")
    assert (seen.status, seen.body) == (420, b'{"slow":"down"}')
    assert seen.headers["retry-after"] == "60"
    assert seen.headers["x-ratelimit-remaining"] == "0"
    assert (await ask(guarded, "/other")).status == 429


async def test_on_limit_may_say_retry_after_itself() -> None:
    """Then its own is sent, and ours is not beside it."""

    async def on_limit(call: Any, ruling: Any) -> Any:
        return PlainTextResponse("later", 503, headers={"Retry-After": "7"})

    guarded = limited(limits="1/minute", on_limit=on_limit)
    await ask(guarded)
    seen = await ask(guarded)
    assert seen.headers["retry-after"] == "7"
    assert seen.headers["x-ratelimit-limit"] == "1"


async def test_on_limit_may_answer_with_an_answer_or_an_error() -> None:
    """An Answer gets our headers too; what is no response is told to the developer."""
    found: list[Any] = [Answer(200, [("X-Mine", "1")], b"ok"), "nonsense"]
    guarded = limited(limits="1/minute", on_limit=lambda call, ruling: found.pop(0))
    await ask(guarded)
    seen = await ask(guarded)
    assert (seen.status, seen.body, seen.headers["x-mine"]) == (200, b"ok", "1")
    assert (seen.headers["retry-after"], seen.headers["x-ratelimit-limit"]) == ("60", "1")
    with pytest.raises(ConfigError, match="on_limit returned 'nonsense'"):
        await ask(guarded)


async def test_on_limit_answers_websockets_too_where_the_server_can() -> None:
    """A response of Starlette's knows how; where the server cannot, it is closed."""
    guarded = limited(
        echo, limits="1/minute", on_limit=lambda call, ruling: PlainTextResponse("no", 420)
    )
    extended = scope_of(kind="websocket", extensions={"websocket.http.response": {}})
    await ask_scope(guarded, scope_of(kind="websocket"))
    assert (await ask_scope(guarded, extended)).status == 420
    assert (await ask_scope(guarded, scope_of(kind="websocket"))).types == ["websocket.close"]


async def test_a_hook_that_raises_is_the_applications_error() -> None:
    """It goes through to the server, as one in the application would."""

    def key(call: Any) -> str:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await ask(limited(key=key))


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"cost": lambda call: 3}, 422),
        ({"key": lambda call: ""}, 400),
        ({"cost": lambda call: -1}, 400),
    ],
)
async def test_what_cannot_be_counted_is_refused_and_never_a_500(
    options: dict[str, Any], status: int
) -> None:
    """A cost that never fits and a key that is none have answers of their own."""
    seen = await ask(limited(**options))
    assert seen.status == status
    assert json.loads(seen.body)["status"] == status
    assert "retry-after" not in seen.headers


# ── Settling ───────────────────────────────────────────────────────────────────────────────────


async def test_the_application_settles_what_its_request_cost() -> None:
    """The charge is in the scope; what is said of it last is what is spent."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["tollkeeper.charge"].settle(50)
        await hello(scope, receive, send)
        scope["tollkeeper.charge"].settle(37)

    guarded = limited(app, limits="1000/minute", cost=100)
    await ask(guarded)
    assert _remaining(guarded) == 1000 - 37


async def test_whoever_has_seen_the_end_of_a_response_finds_it_settled() -> None:
    """It is applied before the last piece goes out, so that the next request can rely on it."""
    found: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        scope["tollkeeper.charge"].settle(10)
        await send({"type": "http.response.body", "body": b"2", "more_body": False})

    guarded = limited(app, limits="1000/minute", cost=100)

    async def send(message: Message) -> None:
        found.append(_remaining(guarded))

    await guarded(scope_of(), None, send)  # type: ignore[arg-type]  # nobody receives
    assert found == [900, 900, 990]


@pytest.mark.parametrize(("status", "left"), [(401, 1), (200, 2)])
async def test_only_outcomes_that_count_are_spent(status: int, left: int) -> None:
    """By the status of the response, and settled when its end is seen."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("", status)(scope, receive, send)

    guarded = limited(app, count=lambda status: status == 401)
    await ask(guarded)
    assert _remaining(guarded) == left


async def test_a_handler_that_raises_counts_as_500_and_still_settles() -> None:
    """The error goes on to the server, and what was said of the cost holds."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["tollkeeper.charge"].settle(0)
        raise ZeroDivisionError("mine")

    seen: list[int] = []
    guarded = limited(app, count=lambda status: bool(seen.append(status)) or True)
    with pytest.raises(ZeroDivisionError):
        await ask(guarded)
    assert seen == [500]
    assert _remaining(guarded) == 2


@pytest.mark.parametrize("gone_at", ["http.response.start", "http.response.body"])
async def test_a_guess_whose_client_hangs_up_counts(gone_at: str) -> None:
    """A server may raise where the other end is gone: the outcome is what was answered."""

    async def login(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def send(message: Any) -> None:
        if message["type"] == gone_at:
            raise OSError("the client is gone")

    guarded = limited(login, count=lambda status: status == 401)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            await guarded(scope_of(), None, send)  # type: ignore[arg-type]  # nothing is received
    assert _remaining(guarded) == 0
    assert (await ask(guarded)).status == 429


async def test_what_fails_after_the_response_does_not_change_its_outcome() -> None:
    """A background task that raises makes no 500 of what the client has seen."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        raise ZeroDivisionError("in the background")

    guarded = limited(app, count=lambda status: status < 500)
    with pytest.raises(ZeroDivisionError):
        await ask(guarded)
    assert _remaining(guarded) == 1


@pytest.mark.parametrize(("said", "left"), [(None, 1), (0, 2)])
async def test_a_request_that_is_cancelled_still_settles(said: int | None, left: int) -> None:
    """A client that hangs up has its outcome counted, unless the application said otherwise."""
    running = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if said is not None:
            scope["tollkeeper.charge"].settle(said)
        running.set()
        await asyncio.Event().wait()

    guarded = limited(app, count=lambda status: status == 401)
    task = asyncio.create_task(ask(guarded))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _remaining(guarded) == left


async def test_a_leaky_bucket_holds_a_request_before_the_application_runs() -> None:
    """The application sees the time at which the request is to be served."""
    times: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        times.append(guarded.guard.clock.now_ns() // 10**9)
        await hello(scope, receive, send)

    limit = Limit(1, per=1, algorithm="leaky_bucket", capacity=3)
    guarded = limited(app, limits=limit)
    for _ in range(3):
        assert (await ask(guarded)).status == 200
    assert times == [1000, 1001, 1002]


# ── Several limits ────────────────────────────────────────────────────────────────────────


async def test_several_middlewares_are_one_answer() -> None:
    """The headers are of the tightest, all policies are listed, and who is denied costs nothing."""
    clock = ManualClock(1_000)
    outer, inner = AsyncLimiter("9/minute", clock=clock), AsyncLimiter("1/s", clock=clock)
    guarded = RateLimit(RateLimit(hello, limiter=inner), limiter=outer)
    seen = await ask(guarded)
    assert seen.headers["x-ratelimit-limit"] == "1"
    assert seen.headers["ratelimit-policy"] == '"default";q=9;w=60, "default.1s";q=1;w=1'
    assert (await ask(guarded)).status == 429
    assert (await outer.peek("address:192.0.2.1")).remaining == 8


async def test_a_scope_that_is_used_again_is_another_request() -> None:
    """As by who asks one application after another: each has its headers, and its own refusal."""
    first, second = limited(limits="2/minute"), limited(limits="1/minute")
    scope = scope_of()
    seen = [await ask_scope(app, scope) for app in (first, second, second, first, first)]
    assert [each.status for each in seen] == [200, 200, 429, 200, 429]
    assert [each.headers["x-ratelimit-limit"] for each in seen] == ["2", "1", "1", "2", "2"]
