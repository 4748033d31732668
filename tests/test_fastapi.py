"""FastAPI: limits of routes as dependencies, with no `request` argument and one answer."""

import asyncio
import json
from contextlib import suppress
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, WebSocket
from fastapi.exceptions import FastAPIError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware

from ratekeeper import ConfigError, RatekeeperError
from ratekeeper.asgi import RateLimit as AsgiRateLimit
from ratekeeper.fastapi import Charge, RateLimit
from ratekeeper.testing import ManualClock
from ratekeeper.web import enforcer
from tests.web.asgi_driver import ask, ask_scope, run_lifespan, scope_of


def _limited(limits: Any = None, **options: Any) -> tuple[FastAPI, RateLimit]:
    app = FastAPI()
    return app, RateLimit(app, limits, clock=ManualClock(1_000), **options)


async def _statuses(app: FastAPI, *paths: str, **request: Any) -> list[int]:
    return [(await ask(app, path, **request)).status for path in paths]


async def _answer(app: Any, method: str, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, "/", **request)


async def test_a_route_is_limited_without_a_request_argument() -> None:
    """This holds for async and sync endpoints, each with its own count."""
    app, limit = _limited()

    @app.get("/search", dependencies=[limit("2/minute")])
    async def search() -> str:
        return "found"

    @app.get("/sync", dependencies=[limit("2/minute")])
    def sync() -> str:
        return "found"

    @app.get("/free")
    async def free() -> str:
        return "free"

    assert await _statuses(app, *["/search"] * 3) == [200, 200, 429]
    assert await _statuses(app, *["/sync"] * 3) == [200, 200, 429]
    assert await _statuses(app, *["/free"] * 3) == [200] * 3


async def test_a_routes_response_has_its_headers() -> None:
    """Returned values, responses that the endpoint creates, and the 429 have them."""
    app, limit = _limited()
    once = limit("3/minute", name="shared")

    @app.get("/value", dependencies=[once])
    async def value() -> str:
        return "v"

    @app.get("/response", dependencies=[once])
    async def response() -> JSONResponse:
        return JSONResponse({"x": 1}, 201)

    @app.get("/stream", dependencies=[once])
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter([b"a", b"b"]))

    for path, remaining in (("/value", "2"), ("/response", "1"), ("/stream", "0")):
        headers = (await ask(app, path)).headers
        assert headers["x-ratelimit-remaining"] == remaining
        assert headers["ratelimit-policy"] == '"shared";q=3;w=60'
    denied = await ask(app, "/value")
    assert denied.status == 429
    assert denied.headers["retry-after"] == "20"
    assert denied.headers["content-type"] == "application/problem+json"
    assert json.loads(denied.body)["violated-policies"] == ["shared"]


async def test_path_parameters_do_not_escape_a_routes_limit() -> None:
    """The count is named after the methods and the template."""
    app, limit = _limited()

    @app.get("/users/{user}", dependencies=[limit("2/minute")])
    async def user(user: str) -> str:
        return user

    @app.delete("/users/{user}", dependencies=[limit("1/minute")])
    async def delete(user: str) -> str:
        return user

    assert await _statuses(app, "/users/1", "/users/2", "/users/3") == [200, 200, 429]
    seen = await ask(app, "/users/1", method="DELETE")
    assert seen.status == 200
    assert seen.headers["ratelimit-policy"] == '"DELETE /users/{user}";q=1;w=60'


async def test_routers_and_the_application_may_have_limits() -> None:
    """Each level has its own count, even with the same numbers, and all must pass."""
    app = FastAPI()
    limit = RateLimit(app, clock=ManualClock(1_000))
    router = APIRouter(prefix="/api", dependencies=[limit("5/minute")])

    @router.get("/items/{item}", dependencies=[limit("2/minute")])
    async def item(item: str) -> str:
        return item

    @router.get("/other")
    async def other() -> str:
        return "other"

    app.include_router(router, prefix="/v1", dependencies=[limit("9/minute")])
    seen = await ask(app, "/v1/api/items/1")
    assert seen.headers["ratelimit-policy"] == (
        '"GET /v1/api/items/{item}";q=9;w=60, "GET /v1/api/items/{item}#2";q=5;w=60, '
        '"GET /v1/api/items/{item}#3";q=2;w=60'
    )
    assert seen.headers["x-ratelimit-remaining"] == "1"
    assert await _statuses(app, "/v1/api/items/2", "/v1/api/items/3") == [200, 429]
    assert await _statuses(app, *["/v1/api/other"] * 6) == [200] * 5 + [429]


async def test_a_denied_request_costs_nothing_in_the_other_limits() -> None:
    """The application's charge is refunded when a route's limit denies."""
    app, limit = _limited("10/minute")

    @app.get("/search", dependencies=[limit("1/minute")])
    async def search() -> str:
        return "found"

    seen = await ask(app, "/search")
    assert seen.headers["ratelimit-policy"] == '"default";q=10;w=60, "GET /search";q=1;w=60'
    assert seen.headers["x-ratelimit-limit"] == "1"
    assert await _statuses(app, *["/search"] * 5) == [429] * 5
    assert (await ask(app, "/nowhere")).headers["x-ratelimit-remaining"] == "8"


async def test_an_endpoint_settles_its_charge() -> None:
    """The charge is an annotated argument, in async and sync endpoints."""
    app, limit = _limited()

    @app.post("/complete")
    async def complete(charge: Annotated[Charge, limit("1000/minute", cost=100)]) -> int:
        charge.settle(37)
        return charge.decision.remaining

    @app.post("/sync")
    def sync(charge: Annotated[Charge, limit("1000/minute", cost=100)]) -> int:
        charge.refund()
        return charge.decision.remaining

    found = [json.loads((await ask(app, "/complete", method="POST")).body) for _ in range(3)]
    assert found == [900, 863, 826]
    found = [json.loads((await ask(app, "/sync", method="POST")).body) for _ in range(2)]
    assert found == [900, 900]


async def test_only_failed_logins_count() -> None:
    """The status decides, also if the endpoint raises an exception with it."""
    app, limit = _limited()

    @app.get("/login", dependencies=[limit("2/minute", count=lambda status: status == 401)])
    async def login(good: bool = False) -> str:
        if not good:
            raise HTTPException(401)
        return "in"

    good = {"query_string": b"good=1"}
    assert await _statuses(app, *["/login"] * 5, **good) == [200] * 5
    assert await _statuses(app, *["/login"] * 3) == [401, 401, 429]
    assert await _statuses(app, "/login", **good) == [429]


async def test_a_route_may_have_its_own_key() -> None:
    """By default it uses the application's key."""
    app, limit = _limited(key="header:X-API-Key")

    @app.get("/a", dependencies=[limit("1/minute")])
    async def a() -> None: ...

    @app.get("/b", dependencies=[limit("1/minute", key="address")])
    async def b() -> None: ...

    one, two = {"headers": [("x-api-key", "1")]}, {"headers": [("x-api-key", "2")]}
    assert await _statuses(app, "/a", **one) == [200]
    assert await _statuses(app, "/a", **two) == [200]
    assert await _statuses(app, "/a", **one) == [429]
    assert await _statuses(app, "/b", **one) == [200]
    assert await _statuses(app, "/b", **two) == [429]


async def test_a_key_that_uses_the_frameworks_request() -> None:
    """A route's hook gets FastAPI's connection, with path parameters."""
    app, limit = _limited()
    by_tenant = limit("1/minute", key=lambda request: request.native.path_params["tenant"])

    @app.get("/{tenant}", dependencies=[by_tenant])
    async def get(tenant: str) -> None: ...

    assert await _statuses(app, "/a", "/b", "/a") == [200, 200, 429]


@pytest.mark.parametrize("caught", [Exception, RatekeeperError, HTTPException])
async def test_exception_handlers_are_not_involved(caught: Any) -> None:
    """A denial is answered by the middleware."""
    app, limit = _limited()

    @app.exception_handler(caught)
    async def handle(request: Any, error: Any) -> PlainTextResponse:
        return PlainTextResponse("mine", 418)

    @app.get("/search", dependencies=[limit("1/minute")])
    async def search() -> None: ...

    assert await _statuses(app, "/search", "/search") == [200, 429]


async def test_a_mounted_applications_routes_are_limited_too() -> None:
    """Its own error handling does not answer the denial."""
    app, limit = _limited("5/minute")
    below = FastAPI()

    @below.get("/x/{y}", dependencies=[limit("1/minute")])
    async def x(y: str) -> None: ...

    app.mount("/below", below)
    assert await _statuses(app, "/below/x/1", "/below/x/2") == [200, 429]
    seen = await ask(app, "/below/x/3")
    assert '"GET /below/x/{y}";q=1;w=60' in seen.headers["ratelimit-policy"]


async def test_paths_that_clients_choose_do_not_renew_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More mounted paths than are cached do not drop the counts of an outage. Nor do long paths
    fill the memory."""
    monkeypatch.setattr(enforcer, "ROUTES_MAX", 3)
    app, limit = _limited(store="redis://127.0.0.1:1", on_failure="local")
    below = FastAPI()

    @below.get("/x", dependencies=[limit("2/minute")])
    async def x() -> None: ...

    app.mount("/{tenant}", below)
    statuses = await _statuses(app, *[f"/{number}/x" for number in range(9)])
    assert statuses == [200] * 2 + [429] * 7
    assert await _statuses(app, f"/{'t' * 1_000}/x") == [429]
    assert "ttt" not in repr([*limit.enforcer._places])


async def test_other_middleware_may_wrap_the_limits() -> None:
    """Denials get the headers of outer middleware. Task groups may wrap the exception."""
    app = FastAPI()
    limit = RateLimit(app, clock=ManualClock(1_000))
    app.add_middleware(CORSMiddleware, allow_origins=["*"])

    async def dispatch(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-inside"] = "1"
        return response

    inside = FastAPI()
    inside.add_middleware(BaseHTTPMiddleware, dispatch=dispatch)

    @inside.get("/x", dependencies=[limit("1/minute")])
    async def x() -> None: ...

    app.mount("/inside", inside)
    origin = {"headers": [("origin", "https://example.org")]}
    allowed, denied = await ask(app, "/inside/x", **origin), await ask(app, "/inside/x", **origin)
    assert (allowed.status, allowed.headers["x-inside"]) == (200, "1")
    assert (denied.status, denied.headers["access-control-allow-origin"]) == (429, "*")


async def test_dependencies_that_yield_are_unwound() -> None:
    """They are closed after a denial."""
    app, limit = _limited()
    events: list[str] = []

    async def session() -> Any:
        events.append("opened")
        try:
            yield
        finally:
            events.append("closed")

    @app.get("/x", dependencies=[Depends(session), limit("1/minute")])
    async def x() -> None: ...

    assert await _statuses(app, "/x", "/x") == [200, 429]
    assert events == ["opened", "closed"] * 2


async def test_a_key_may_come_from_the_body() -> None:
    """The endpoint can read the body again."""
    app, limit = _limited()

    async def by_user(request: Any) -> str:
        return str((await request.native.json())["user"])

    @app.post("/login", dependencies=[limit("1/minute", key=by_user)])
    async def login(user: Annotated[str, Body(embed=True)]) -> str:
        return user

    async def logged_in(user: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            return await client.post("/login", json={"user": user})

    answers = [await logged_in(user) for user in ("ada", "ada", "bob")]
    assert [each.status_code for each in answers] == [200, 429, 200]
    assert answers[2].json() == "bob"


async def _converting() -> Any:
    try:
        yield
    except Exception as error:
        raise LookupError("the session is gone") from error


async def _swallowing() -> Any:
    with suppress(Exception):
        yield


@pytest.mark.parametrize("session", [_converting, _swallowing])
async def test_a_dependency_may_raise_another_error_after_a_denial(session: Any) -> None:
    """The client gets its 429 without a charge, and the application gets its error."""
    app, limit = _limited("9/minute")

    @app.get("/x", dependencies=[Depends(session), limit("1/minute")])
    async def x() -> None: ...

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    assert await _statuses(app, "/x") == [200]
    error = LookupError if session is _converting else FastAPIError
    with pytest.raises(error):
        await app(scope_of("/x"), None, send)  # type: ignore[arg-type]  # nothing is received
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 429
    assert (await ask(app, "/missing")).headers["x-ratelimit-remaining"] == "7"


async def test_a_route_may_have_its_own_on_limit() -> None:
    """It returns a response of the framework, which gets the headers."""
    app, limit = _limited()
    mine = limit("1/minute", on_limit=lambda request, result: PlainTextResponse("wait", 420))

    @app.get("/x", dependencies=[mine])
    async def x() -> None: ...

    await ask(app, "/x")
    seen = await ask(app, "/x")
    assert (seen.status, seen.body, seen.headers["retry-after"]) == (420, b"wait", "60")


async def test_a_route_may_fail_closed() -> None:
    """While the store is away, a login is refused with 503 and the other routes are served."""
    app, limit = _limited(
        "9/minute",
        store="redis://127.0.0.1:1",
        on_limit=lambda request, denial: PlainTextResponse("wait", 429),
    )

    @app.post("/login", dependencies=[limit("5/minute", on_failure="closed")])
    async def login() -> None: ...

    @app.get("/search", dependencies=[limit("5/minute")])
    async def search() -> None: ...

    seen = await ask(app, "/login", method="POST")
    assert (seen.status, seen.headers["retry-after"]) == (503, "1")
    assert json.loads(seen.body)["error"]["code"] == "LIMITER_UNAVAILABLE"
    assert (await ask(app, "/search")).status == 200
    await limit.enforcer.aclose()


async def test_a_cost_that_never_fits_is_a_422() -> None:
    """A dependency raises it, and earlier charges are refunded."""
    app, limit = _limited("10/minute")

    @app.get("/x", dependencies=[limit("5/minute", cost=lambda request: 6)])
    async def x() -> None: ...

    assert await _statuses(app, *["/x"] * 11) == [422] * 11
    assert (await ask(app, "/nowhere")).headers["x-ratelimit-remaining"] == "9"


async def test_a_body_that_fastapi_rejects_has_the_headers() -> None:
    """Of all limits that counted it: FastAPI reads JSON before any dependency, so one that is not
    JSON is counted by the limits of the application only."""
    app, limit = _limited("7/minute")

    @app.post("/", dependencies=[limit("5/minute", name="own")])
    async def post(item: Annotated[dict[str, int], Body()]) -> None: ...

    wrong = await _answer(app, "POST", json={"a": "x"})
    assert (wrong.status_code, wrong.headers["ratelimit"]) == (422, '"own";r=4;t=12')
    broken = await _answer(app, "POST", content=b"{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.headers["ratelimit"]) == (422, '"default";r=5;t=18')


async def test_an_unhandled_error_has_the_headers_of_limits_around_the_application() -> None:
    """Starlette answers a 500 outside of its middleware, whose headers it cannot have."""
    app, limit = _limited("7/minute")

    @app.get("/", dependencies=[limit("5/minute", name="own")])
    async def fail() -> None:
        raise RuntimeError("unhandled")

    inside = await _answer(app, "GET")
    assert (inside.status_code, "ratelimit" in inside.headers) == (500, False)
    limited = AsgiRateLimit(app, "7/minute", name="around", clock=ManualClock(1_000))
    around = await _answer(limited, "GET")
    assert (around.status_code, around.headers["ratelimit"]) == (500, '"own";r=3;t=24')


async def test_websockets_have_dependencies_too() -> None:
    """A denied WebSocket is closed before it is accepted."""
    app, limit = _limited()
    router = APIRouter(prefix="/ws")

    @router.websocket("/{room}", dependencies=[limit("1/minute")])
    async def room(websocket: WebSocket, room: str) -> None:
        await websocket.accept()

    app.include_router(router)
    seen = await ask_scope(app, scope_of("/ws/1", kind="websocket"))
    assert seen.types == ["websocket.accept"]
    assert seen.headers["ratelimit-policy"] == '"/ws/{room}";q=1;w=60'
    seen = await ask_scope(app, scope_of("/ws/2", kind="websocket"))
    assert seen.types == ["websocket.close"]


async def test_long_templates_have_different_names() -> None:
    """Two long templates with the same start have two counts."""
    app, limit = _limited()
    for end in "ab":
        app.add_api_route("/" + "x" * 300 + end, lambda: None, dependencies=[limit("1/minute")])
    paths = ["/" + "x" * 300 + end for end in "aabb"]
    assert await _statuses(app, *paths) == [200, 429, 200, 429]


async def test_an_application_can_be_started_twice() -> None:
    """Tests enter the lifespan several times, and the limits work each time."""
    app, limit = _limited("9/minute")

    @app.get("/x", dependencies=[limit("1/minute")])
    async def x() -> None: ...

    for _ in range(2):
        assert await _statuses(app, "/x", "/x") == [200, 429]
        await run_lifespan(app)


async def test_a_request_during_closing_opens_the_limits_again() -> None:
    """They stay open after closing has finished."""
    rule = {"id": "all", "by": ["ip"], "limits": ["9/minute"]}
    app, limit = _limited(rules={"version": 1, "rules": [rule]})
    closing = asyncio.create_task(limit.enforcer.aclose())
    await asyncio.sleep(0)  # closing has started
    assert not limit.enforcer._is_open
    await ask(app)
    await closing
    seen = await ask(app)
    assert seen.headers["x-ratelimit-remaining"] == "7"
    await limit.enforcer.aclose()


def test_openapi_lists_a_429_for_limited_operations() -> None:
    """Other operations have none, and the application's own description is kept."""
    app, limit = _limited()
    router = APIRouter(prefix="/api", dependencies=[limit("1/s")])

    @router.get("/a")
    async def a() -> None: ...

    @app.get("/b", responses={429: {"description": "mine"}}, dependencies=[limit("1/s")])
    async def b(charge: Annotated[Charge, limit("1/s")]) -> None: ...

    @app.get("/c")
    async def c() -> None: ...

    app.include_router(router)
    paths = app.openapi()["paths"]
    assert "Retry-After" in paths["/api/a"]["get"]["responses"]["429"]["headers"]
    assert paths["/b"]["get"]["responses"]["429"]["description"] == "mine"
    assert "429" not in paths["/c"]["get"]["responses"]


def test_openapi_lists_a_429_for_all_operations() -> None:
    """This applies if the application itself has limits."""
    app, _ = _limited("1/s")

    @app.get("/c")
    async def c() -> None: ...

    assert "429" in app.openapi()["paths"]["/c"]["get"]["responses"]


async def test_a_limit_of_another_application_is_an_error() -> None:
    """The developer gets an error instead of a limit that has no effect."""
    _, limit = _limited()
    other = FastAPI()

    @other.get("/x", dependencies=[limit("1/s")])
    async def x() -> None: ...

    with pytest.raises(ConfigError, match="no RateLimit is installed"):
        await ask(other, "/x")


@pytest.mark.parametrize("wrong", [{"limits": "often"}, {"limits": "1/s", "cost": -1}])
def test_a_wrong_limit_is_rejected_where_it_is_written(wrong: dict[str, Any]) -> None:
    """`limit` raises the error, before the first request."""
    _, limit = _limited()
    with pytest.raises(ConfigError):
        limit(**wrong)


def _as_a_decorator(app: FastAPI, limit: Any) -> None:
    app.get("/x")(limit("1/minute")(lambda: "x"))


def _in_depends(app: FastAPI, limit: Any) -> None:
    app.get("/x", dependencies=[Depends(limit("1/minute"))])(lambda: "x")


def _in_depends_of_an_argument(app: FastAPI, limit: Any) -> None:
    async def x(charge: Annotated[Charge, Depends(limit("1/minute"))]) -> None: ...

    app.get("/x")(x)


def _of_a_websocket(app: FastAPI, limit: Any) -> None:
    @app.websocket("/x")
    @limit("1/minute")
    async def x(websocket: WebSocket) -> None: ...


def _around_a_router(app: FastAPI, limit: Any) -> None:
    app.include_router(limit("1/minute")(APIRouter()))


def _uncalled_as_a_decorator(app: FastAPI, limit: Any) -> None:
    app.get("/x")(limit(lambda: "x"))


@pytest.mark.parametrize(
    "use",
    [
        _as_a_decorator,
        _in_depends,
        _in_depends_of_an_argument,
        _of_a_websocket,
        _around_a_router,
        _uncalled_as_a_decorator,
    ],
)
def test_a_limit_that_is_not_used_as_a_dependency_is_explained(use: Any) -> None:
    """The error is raised where the limit is written, and it shows how to write it."""
    app, limit = _limited()
    with pytest.raises(ConfigError, match="it is no decorator and needs no Depends") as caught:
        use(app, limit)
    assert '@app.get("/search", dependencies=[limit("5/second")])' in str(caught.value)


def test_dependencies_without_a_list_are_explained() -> None:
    """The error shows the brackets that are missing."""
    app, limit = _limited()
    with pytest.raises(ConfigError, match=r'takes a list; write .*dependencies=\[limit\("5/sec'):
        app.get("/x", dependencies=limit("1/minute"))(lambda: "x")


@pytest.mark.parametrize("dependency", [lambda limit: limit, Depends], ids=["plain", "Depends"])
def test_a_rate_limit_that_is_not_called_is_explained(dependency: Any) -> None:
    """For a route, a router and a WebSocket, the error shows the call that is missing."""
    app, limit = _limited()
    with pytest.raises(ConfigError, match="not a dependency before it is called with limits"):
        app.get("/x", dependencies=[dependency(limit)])(lambda: "x")
    with pytest.raises(ConfigError, match=r'APIRouter\(dependencies=\[limit\("5/second"\)\]\)'):
        APIRouter(dependencies=[dependency(limit)]).get("/x")(lambda: "x")
    with pytest.raises(ConfigError, match="not a dependency before it is called with limits"):
        app.websocket("/x", dependencies=[dependency(limit)])(lambda websocket: None)
