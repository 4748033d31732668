"""The charges of one request: one set of headers, and a denied request costs nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from ratekeeper import AsyncLimiter, ConfigError, Limit
from ratekeeper.asgi import RateLimit
from ratekeeper.core.model import NAME_LENGTH_MAX
from ratekeeper.core.steps import run
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import HttpAnswer
from ratekeeper.web.charges import RequestCharges
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.options import HOOKS, EnforcerOptions
from ratekeeper.web.requests import WsgiRequest
from tests.web.asgi_driver import (
    Message,
    ask,
    ask_scope,
    echo,
    hello,
    limited,
    scope_of,
)

CALL = WsgiRequest({"REMOTE_ADDR": "203.0.113.9"})


def enforcer(limits: str, name: str = "", **more: Any) -> Enforcer:
    return Enforcer(
        EnforcerOptions(limits=limits, name=name, clock=ManualClock(1_767_225_600), **more)
    )


def remaining(one: Enforcer) -> int:
    return int(one._fixed.any.peek(one._keys.of(CALL)).remaining)


@pytest.mark.parametrize("name", HOOKS)
def test_async_hooks_are_rejected_in_threads(name: str) -> None:
    """A coroutine is true, so an async `skip` would let every request through."""

    async def hook(*args: object) -> bool:
        return False

    hooks: dict[str, Any] = {"limits": "1/minute", name: hook}
    with pytest.raises(ConfigError, match=f"{name}=.*hook is async"):
        EnforcerOptions(**hooks).require_plain_hooks()
    hooks[name] = lambda *args: False
    options = EnforcerOptions(**hooks)
    assert options.require_plain_hooks() is options


def test_a_denied_request_costs_nothing_in_other_limits() -> None:
    """The first limit was charged and is refunded as soon as the second denies."""
    wide, narrow = enforcer("5/minute", "wide"), enforcer("1/minute", "narrow")
    for expected in (None, 429):
        charges = RequestCharges(wide)
        assert run(charges.charging(wide, CALL)) is None
        refusal = run(charges.charging(narrow, CALL))
        assert (refusal and refusal.status) == expected
    assert (remaining(wide), remaining(narrow)) == (4, 0)


def test_headers_describe_all_charges() -> None:
    """The numbers are those of the tightest limit, and all policies are listed."""
    wide, narrow = enforcer("5/minute", "wide"), enforcer("1/minute", "narrow")
    charges = RequestCharges(wide)
    assert [run(charges.charging(each, CALL)) for each in (wide, narrow)] == [None, None]
    headers = dict(charges.headers_beside(["Content-Type"]))
    assert headers["RateLimit"] == '"narrow";r=0;t=60'
    assert headers["RateLimit-Policy"] == '"wide";q=5;w=60, "narrow";q=1;w=60'
    assert charges.last.decision.limit == 1


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError(), 500), (KeyboardInterrupt(), None), (SystemExit(), None)]
)
def test_the_status_of_a_failure(error: BaseException, status: int | None) -> None:
    """An exception is a 500; a cancelled request has no status."""
    charges = RequestCharges(enforcer("5/minute"))
    charges.fail(error)
    assert charges.status == status


@pytest.mark.parametrize(("status", "left"), [(401, 4), (200, 5), (None, 4)])
def test_outcomes_are_settled_by_status(status: int | None, left: int) -> None:
    """A request without a status counts, or a client could guess and close the connection."""
    one = enforcer("5/minute", count=lambda status: status == 401)
    charges = RequestCharges(one)
    run(charges.charging(one, CALL))
    charges.status = status
    charges.settle()
    charges.settle()
    assert remaining(one) == left


def test_names_of_one_request_are_unique_and_fit() -> None:
    """A name that is taken gets a number; a long or unprintable name is replaced by a digest."""
    charges = RequestCharges(enforcer("5/minute"))

    def named(name: str) -> str:
        found = charges.name_for(name)
        charges.add(Charge(enforcer=enforcer("5/minute", found)))
        return found

    assert [named("a"), named("a"), named("b")] == ["a", "a#2", "b"]
    names = {named(name) for name in ("x" * 500, "x" * 500, "x" * 501, "a\nb", "\ud800")}
    assert len(names) == 5
    assert all(len(name) <= NAME_LENGTH_MAX and name.isprintable() for name in names)


def test_a_request_without_charges_has_no_headers() -> None:
    """No limit applies, so nothing is reported."""
    charges = RequestCharges(enforcer("5/minute"))
    assert charges.last.decision.allowed
    assert charges.headers_beside([]) == []


def _remaining(app: RateLimit) -> int:
    """Return the remaining units of the test client's address."""
    return int(app.enforcer._fixed.any.peek("address:192.0.2.1").remaining)


async def test_an_outcome_is_asked_for_once() -> None:
    """It is applied before the response ends, and not again when the application returns."""
    asked: list[int] = []
    limited_app = limited(limits="9/minute", count=asked.append)
    await ask(limited_app)
    assert (asked, _remaining(limited_app)) == ([200], 9)


# ── Hooks ──────────────────────────────────────────────────────────────────────────────────────


async def test_on_limit_may_answer_with_a_response_of_the_framework() -> None:
    """It gets our headers with Retry-After; None selects the default answer."""
    limited_app = limited(
        limits="1/minute",
        on_limit=lambda request, result: (
            JSONResponse({"slow": "down"}, 420) if request.path == "/mine" else None
        ),
    )
    await ask(limited_app)
    seen = await ask(limited_app, "/mine")
    assert (seen.status, seen.body) == (420, b'{"slow":"down"}')
    assert seen.headers["retry-after"] == "60"
    assert seen.headers["x-ratelimit-remaining"] == "0"
    assert (await ask(limited_app, "/other")).status == 429


async def test_on_limit_may_set_retry_after_itself() -> None:
    """Its value is sent, and ours is not added."""

    async def on_limit(request: Any, result: Any) -> Any:
        return PlainTextResponse("later", 503, headers={"Retry-After": "7"})

    limited_app = limited(limits="1/minute", on_limit=on_limit)
    await ask(limited_app)
    seen = await ask(limited_app)
    assert seen.headers["retry-after"] == "7"
    assert seen.headers["x-ratelimit-limit"] == "1"


async def test_on_limit_may_return_an_http_answer() -> None:
    """It gets our headers too. Any other object is reported to the developer."""
    found: list[Any] = [HttpAnswer(200, [("X-Mine", "1")], b"ok"), "nonsense"]
    limited_app = limited(limits="1/minute", on_limit=lambda request, result: found.pop(0))
    await ask(limited_app)
    seen = await ask(limited_app)
    assert (seen.status, seen.body, seen.headers["x-mine"]) == (200, b"ok", "1")
    assert (seen.headers["retry-after"], seen.headers["x-ratelimit-limit"]) == ("60", "1")
    with pytest.raises(ConfigError, match="or an exception handler returned 'nonsense'"):
        await ask(limited_app)


async def test_on_limit_answers_websockets_if_the_server_can() -> None:
    """If the server cannot send a response, the WebSocket is closed."""
    limited_app = limited(
        echo, limits="1/minute", on_limit=lambda request, result: PlainTextResponse("no", 420)
    )
    extended = scope_of(kind="websocket", extensions={"websocket.http.response": {}})
    await ask_scope(limited_app, scope_of(kind="websocket"))
    assert (await ask_scope(limited_app, extended)).status == 420
    assert (await ask_scope(limited_app, scope_of(kind="websocket"))).types == ["websocket.close"]


async def test_a_hook_that_raises_is_the_applications_error() -> None:
    """The error reaches the server, like an error of the application."""

    def key(request: Any) -> str:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await ask(limited(key=key))


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"cost": lambda request: 3}, 422),
        ({"cost": lambda request: -1}, 400),
    ],
)
async def test_an_invalid_cost_is_never_a_500(options: dict[str, Any], status: int) -> None:
    """A cost that never fits is a 422, and an invalid one a 400."""
    seen = await ask(limited(**options))
    assert seen.status == status
    assert json.loads(seen.body)["status"] == status
    assert "retry-after" not in seen.headers


# ── Settling ───────────────────────────────────────────────────────────────────────────────────


async def test_the_application_settles_the_cost() -> None:
    """The charge is in the scope, and the last reported cost is spent."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["ratekeeper.charge"].settle(50)
        await hello(scope, receive, send)
        scope["ratekeeper.charge"].settle(37)

    limited_app = limited(app, limits="1000/minute", cost=100)
    await ask(limited_app)
    assert _remaining(limited_app) == 1000 - 37


async def test_a_request_is_settled_before_its_response_ends() -> None:
    """The cost is applied before the last part is sent, so the next request sees it."""
    found: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        scope["ratekeeper.charge"].settle(10)
        await send({"type": "http.response.body", "body": b"2", "more_body": False})

    limited_app = limited(app, limits="1000/minute", cost=100)

    async def send(message: Message) -> None:
        found.append(_remaining(limited_app))

    await limited_app(scope_of(), None, send)  # type: ignore[arg-type]  # nothing is received
    assert found == [900, 900, 990]


@pytest.mark.parametrize(("status", "left"), [(401, 1), (200, 2)])
async def test_only_outcomes_that_count_are_spent(status: int, left: int) -> None:
    """The status of the response decides, and the request is settled at its end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("", status)(scope, receive, send)

    limited_app = limited(app, count=lambda status: status == 401)
    await ask(limited_app)
    assert _remaining(limited_app) == left


async def test_a_handler_that_raises_counts_as_500_and_still_settles() -> None:
    """The error reaches the server, and the reported cost is applied."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["ratekeeper.charge"].settle(0)
        raise ZeroDivisionError("mine")

    seen: list[int] = []
    limited_app = limited(app, count=lambda status: bool(seen.append(status)) or True)
    with pytest.raises(ZeroDivisionError):
        await ask(limited_app)
    assert seen == [500]
    assert _remaining(limited_app) == 2


@pytest.mark.parametrize("gone_at", ["http.response.start", "http.response.body"])
async def test_a_guess_counts_if_the_client_closes_the_connection(gone_at: str) -> None:
    """`send` may raise then. The outcome is the status that was sent."""

    async def login(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def send(message: Any) -> None:
        if message["type"] == gone_at:
            raise OSError("the client is gone")

    limited_app = limited(login, count=lambda status: status == 401)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            await limited_app(scope_of(), None, send)  # type: ignore[arg-type]  # nothing is received
    assert _remaining(limited_app) == 0
    assert (await ask(limited_app)).status == 429


async def test_a_failure_after_the_response_keeps_the_outcome() -> None:
    """A background task that raises does not turn the response into a 500."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        raise ZeroDivisionError("in the background")

    limited_app = limited(app, count=lambda status: status < 500)
    with pytest.raises(ZeroDivisionError):
        await ask(limited_app)
    assert _remaining(limited_app) == 1


@pytest.mark.parametrize(("said", "left"), [(None, 1), (0, 2)])
async def test_a_cancelled_request_is_settled(said: int | None, left: int) -> None:
    """It counts, unless the application reported otherwise."""
    running = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if said is not None:
            scope["ratekeeper.charge"].settle(said)
        running.set()
        await asyncio.Event().wait()

    limited_app = limited(app, count=lambda status: status == 401)
    task = asyncio.create_task(ask(limited_app))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _remaining(limited_app) == left


async def test_a_leaky_bucket_delays_a_request_before_the_application() -> None:
    """The application runs at the time at which the request is due."""
    times: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        times.append(limited_app.enforcer.clock.now_ns() // 10**9)
        await hello(scope, receive, send)

    limit = Limit(1, per=1, algorithm="leaky_bucket", capacity=3)
    limited_app = limited(app, limits=limit)
    for _ in range(3):
        assert (await ask(limited_app)).status == 200
    assert times == [1000, 1001, 1002]


# ── Several limits ────────────────────────────────────────────────────────────────────────


async def test_several_middlewares_give_one_answer() -> None:
    """The numbers are the tightest, all policies are listed, and a denial costs nothing."""
    clock = ManualClock(1_000)
    outer, inner = AsyncLimiter("9/minute", clock=clock), AsyncLimiter("1/s", clock=clock)
    limited_app = RateLimit(RateLimit(hello, limiter=inner), limiter=outer)
    seen = await ask(limited_app)
    assert seen.headers["x-ratelimit-limit"] == "1"
    assert seen.headers["ratelimit-policy"] == '"default";q=9;w=60, "default.1s";q=1;w=1'
    assert (await ask(limited_app)).status == 429
    assert (await outer.peek("address:192.0.2.1")).remaining == 8


async def test_a_reused_scope_is_another_request() -> None:
    """Each application that is tried with the scope has its own headers and denials."""
    first, second = limited(limits="2/minute"), limited(limits="1/minute")
    scope = scope_of()
    seen = [await ask_scope(app, scope) for app in (first, second, second, first, first)]
    assert [each.status for each in seen] == [200, 200, 429, 200, 429]
    assert [each.headers["x-ratelimit-limit"] for each in seen] == ["2", "1", "1", "2", "2"]
