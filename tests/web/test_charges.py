"""The charges of one request: one set of headers, and a denied request costs nothing."""

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
from tollkeeper.core.model import NAME_LENGTH_MAX
from tollkeeper.testing import ManualClock
from tollkeeper.web.answers import HttpAnswer
from tollkeeper.web.charges import RequestCharges
from tollkeeper.web.enforcer import Charge, Enforcer
from tollkeeper.web.options import HOOKS, EnforcerOptions
from tollkeeper.web.requests import WsgiRequest

CALL = WsgiRequest({"REMOTE_ADDR": "203.0.113.9"})


def enforcer(limits: str, name: str = "", **more: Any) -> Enforcer:
    return Enforcer(
        EnforcerOptions(limits=limits, name=name, clock=ManualClock(1_767_225_600), **more)
    )


def remaining(one: Enforcer) -> int:
    return int(one._limiter.peek(one._keys.of(CALL)).remaining)


@pytest.mark.parametrize("name", HOOKS)
def test_async_hooks_are_refused_where_nobody_awaits(name: str) -> None:
    """What they return is true: a `skip` would let everybody through."""

    async def hook(*args: object) -> bool:
        return False

    hooks: dict[str, Any] = {name: hook}
    with pytest.raises(ConfigError, match=f"{name}=.*hook is async"):
        EnforcerOptions(limits="1/minute", **hooks).require_plain_hooks()
    hooks[name] = lambda *args: False
    options = EnforcerOptions(limits="1/minute", **hooks)
    assert options.require_plain_hooks() is options


def test_what_one_denies_costs_nothing_in_the_others() -> None:
    """The first was charged when the second denied: it is given back at once."""
    wide, narrow = enforcer("5/minute", "wide"), enforcer("1/minute", "narrow")
    for expected in (None, 429):
        charges = RequestCharges(wide)
        assert charges.denial(wide, CALL) is None
        refusal = charges.denial(narrow, CALL)
        assert (refusal and refusal.status) == expected
    assert (remaining(wide), remaining(narrow)) == (4, 0)


def test_headers_speak_of_all_charges() -> None:
    """The tightest in most, every policy in one; on a refusal as well."""
    wide, narrow = enforcer("5/minute", "wide"), enforcer("1/minute", "narrow")
    charges = RequestCharges(wide)
    assert [charges.denial(each, CALL) for each in (wide, narrow)] == [None, None]
    headers = dict(charges.headers_beside(["Content-Type"]))
    assert headers["RateLimit"] == '"narrow";r=0;t=60'
    assert headers["RateLimit-Policy"] == '"wide";q=5;w=60, "narrow";q=1;w=60'
    assert charges.last.decision.limit == 1


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError(), 500), (KeyboardInterrupt(), None), (SystemExit(), None)]
)
def test_how_a_failure_counts(error: BaseException, status: int | None) -> None:
    """An exception is a 500; being ended from outside is no outcome."""
    charges = RequestCharges(enforcer("5/minute"))
    charges.fail(error)
    assert charges.status == status


@pytest.mark.parametrize(("status", "left"), [(401, 4), (200, 5), (None, 4)])
def test_outcomes_are_settled_by_status(status: int | None, left: int) -> None:
    """Given back where it does not count; where there was none, it does: guessers could hang up."""
    one = enforcer("5/minute", count=lambda status: status == 401)
    charges = RequestCharges(one)
    charges.denial(one, CALL)
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


def test_an_empty_bill_says_nothing() -> None:
    """A request that nobody limits has no headers."""
    charges = RequestCharges(enforcer("5/minute"))
    assert charges.last.decision.allowed
    assert charges.headers_beside([]) == []


def _remaining(app: RateLimit) -> int:
    """How much the address of the test's client has left."""
    return int(app.enforcer._limiter.peek("address:192.0.2.1").remaining)


# ── Hooks ──────────────────────────────────────────────────────────────────────────────────────


async def test_on_limit_may_answer_with_a_response_of_the_framework() -> None:
    """It gets our headers, Retry-After among them, and a None leaves the answer to us."""
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


async def test_on_limit_may_say_retry_after_itself() -> None:
    """Then its own is sent, and ours is not beside it."""

    async def on_limit(request: Any, result: Any) -> Any:
        return PlainTextResponse("later", 503, headers={"Retry-After": "7"})

    limited_app = limited(limits="1/minute", on_limit=on_limit)
    await ask(limited_app)
    seen = await ask(limited_app)
    assert seen.headers["retry-after"] == "7"
    assert seen.headers["x-ratelimit-limit"] == "1"


async def test_on_limit_may_answer_with_an_answer_or_an_error() -> None:
    """An Answer gets our headers too; what is no response is told to the developer."""
    found: list[Any] = [HttpAnswer(200, [("X-Mine", "1")], b"ok"), "nonsense"]
    limited_app = limited(limits="1/minute", on_limit=lambda request, result: found.pop(0))
    await ask(limited_app)
    seen = await ask(limited_app)
    assert (seen.status, seen.body, seen.headers["x-mine"]) == (200, b"ok", "1")
    assert (seen.headers["retry-after"], seen.headers["x-ratelimit-limit"]) == ("60", "1")
    with pytest.raises(ConfigError, match="on_limit returned 'nonsense'"):
        await ask(limited_app)


async def test_on_limit_answers_websockets_too_where_the_server_can() -> None:
    """A response of Starlette's knows how; where the server cannot, it is closed."""
    limited_app = limited(
        echo, limits="1/minute", on_limit=lambda request, result: PlainTextResponse("no", 420)
    )
    extended = scope_of(kind="websocket", extensions={"websocket.http.response": {}})
    await ask_scope(limited_app, scope_of(kind="websocket"))
    assert (await ask_scope(limited_app, extended)).status == 420
    assert (await ask_scope(limited_app, scope_of(kind="websocket"))).types == ["websocket.close"]


async def test_a_hook_that_raises_is_the_applications_error() -> None:
    """It goes through to the server, as one in the application would."""

    def key(request: Any) -> str:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await ask(limited(key=key))


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"cost": lambda request: 3}, 422),
        ({"key": lambda request: ""}, 400),
        ({"cost": lambda request: -1}, 400),
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

    limited_app = limited(app, limits="1000/minute", cost=100)
    await ask(limited_app)
    assert _remaining(limited_app) == 1000 - 37


async def test_whoever_has_seen_the_end_of_a_response_finds_it_settled() -> None:
    """It is applied before the last piece goes out, so that the next request can rely on it."""
    found: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        scope["tollkeeper.charge"].settle(10)
        await send({"type": "http.response.body", "body": b"2", "more_body": False})

    limited_app = limited(app, limits="1000/minute", cost=100)

    async def send(message: Message) -> None:
        found.append(_remaining(limited_app))

    await limited_app(scope_of(), None, send)  # type: ignore[arg-type]  # nobody receives
    assert found == [900, 900, 990]


@pytest.mark.parametrize(("status", "left"), [(401, 1), (200, 2)])
async def test_only_outcomes_that_count_are_spent(status: int, left: int) -> None:
    """By the status of the response, and settled when its end is seen."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("", status)(scope, receive, send)

    limited_app = limited(app, count=lambda status: status == 401)
    await ask(limited_app)
    assert _remaining(limited_app) == left


async def test_a_handler_that_raises_counts_as_500_and_still_settles() -> None:
    """The error goes on to the server, and what was said of the cost holds."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["tollkeeper.charge"].settle(0)
        raise ZeroDivisionError("mine")

    seen: list[int] = []
    limited_app = limited(app, count=lambda status: bool(seen.append(status)) or True)
    with pytest.raises(ZeroDivisionError):
        await ask(limited_app)
    assert seen == [500]
    assert _remaining(limited_app) == 2


@pytest.mark.parametrize("gone_at", ["http.response.start", "http.response.body"])
async def test_a_guess_whose_client_hangs_up_counts(gone_at: str) -> None:
    """A server may raise where the other end is gone: the outcome is what was answered."""

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


async def test_what_fails_after_the_response_does_not_change_its_outcome() -> None:
    """A background task that raises makes no 500 of what the client has seen."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        raise ZeroDivisionError("in the background")

    limited_app = limited(app, count=lambda status: status < 500)
    with pytest.raises(ZeroDivisionError):
        await ask(limited_app)
    assert _remaining(limited_app) == 1


@pytest.mark.parametrize(("said", "left"), [(None, 1), (0, 2)])
async def test_a_request_that_is_cancelled_still_settles(said: int | None, left: int) -> None:
    """A client that hangs up has its outcome counted, unless the application said otherwise."""
    running = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if said is not None:
            scope["tollkeeper.charge"].settle(said)
        running.set()
        await asyncio.Event().wait()

    limited_app = limited(app, count=lambda status: status == 401)
    task = asyncio.create_task(ask(limited_app))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _remaining(limited_app) == left


async def test_a_leaky_bucket_holds_a_request_before_the_application_runs() -> None:
    """The application sees the time at which the request is to be served."""
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


async def test_several_middlewares_are_one_answer() -> None:
    """The headers are of the tightest, all policies are listed, and who is denied costs nothing."""
    clock = ManualClock(1_000)
    outer, inner = AsyncLimiter("9/minute", clock=clock), AsyncLimiter("1/s", clock=clock)
    limited_app = RateLimit(RateLimit(hello, limiter=inner), limiter=outer)
    seen = await ask(limited_app)
    assert seen.headers["x-ratelimit-limit"] == "1"
    assert seen.headers["ratelimit-policy"] == '"default";q=9;w=60, "default.1s";q=1;w=1'
    assert (await ask(limited_app)).status == 429
    assert (await outer.peek("address:192.0.2.1")).remaining == 8


async def test_a_scope_that_is_used_again_is_another_request() -> None:
    """As by who asks one application after another: each has its headers, and its own refusal."""
    first, second = limited(limits="2/minute"), limited(limits="1/minute")
    scope = scope_of()
    seen = [await ask_scope(app, scope) for app in (first, second, second, first, first)]
    assert [each.status for each in seen] == [200, 200, 429, 200, 429]
    assert [each.headers["x-ratelimit-limit"] for each in seen] == ["2", "1", "1", "2", "2"]
