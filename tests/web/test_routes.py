"""Options of routes, in every integration."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from django.core.exceptions import BadRequest as DjangoBadRequest
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from werkzeug.exceptions import BadRequest as FlaskBadRequest

from ratekeeper import ConfigError, Limit
from ratekeeper.testing import ManualClock
from ratekeeper.web.claims import Claim
from ratekeeper.web.enforcer import RESULTS_MAX
from ratekeeper.web.options import with_request
from ratekeeper.web.requests import AsgiRequest
from tests.web.enforcers import in_thread
from tests.web.route_sites import FRAMEWORKS, RouteSite, limit

ASYNC = ("fastapi", "starlette", "django wsgi", "django asgi")


class Sites:
    """Builds sites of one framework, and closes them."""

    def __init__(self, framework: str, stack: ExitStack) -> None:
        self.framework = framework
        self._stack = stack

    def __call__(self, routes: Any, limits: Any = None, **options: Any) -> RouteSite:
        site = RouteSite(self.framework, routes, limits, **options)
        return self._stack.enter_context(closing(site))


@pytest.fixture(params=FRAMEWORKS)
def sites(request: pytest.FixtureRequest) -> Iterator[Sites]:
    """Run each test in every framework."""
    with ExitStack() as stack:
        yield Sites(request.param, stack)


# ── Methods ────────────────────────────────────────────────────────────────────────────────────


def test_a_limit_applies_to_its_methods_only(sites: Sites) -> None:
    """Other methods pass uncounted, and their responses have no headers of the limit."""
    site = sites({"/item": limit("2/minute", methods=["post", "PUT"], name="writes")})
    for _ in range(3):
        answer = site.ask("/item")
        assert answer.status == 200
        assert "writes" not in answer.headers.get("ratelimit-policy", "")
    assert [site.ask("/item", method).status for method in ("POST", "PUT")] == [200, 200]
    assert '"writes";q=2;w=60' in site.ask("/item", "POST").headers["ratelimit-policy"]
    assert [site.ask("/item", method).status for method in ("POST", "PUT", "GET", "DELETE")] == [
        *(429, 429, 200, 200)
    ]


def test_a_head_counts_as_a_get(sites: Sites) -> None:
    """Frameworks serve a HEAD by the view of the GET, so it must not pass the limit of the GET."""
    site = sites({"/item": limit("2/minute", methods=["GET"])})
    if sites.framework == "fastapi":
        assert site.statuses("/item", "/item", "/item") == [200, 200, 429]
        return  # it serves no HEAD
    assert site.statuses("/item", "/item", method="HEAD") == [200, 200]
    assert site.statuses("/item") == [429]
    only = sites({"/item": limit("1/minute", methods="HEAD")})
    assert only.statuses("/item", "/item", "/item") == [200] * 3
    assert only.statuses("/item", "/item", method="HEAD") == [200, 429]


def test_a_method_in_lower_case_does_not_pass() -> None:
    """Flask, Django and class-based endpoints serve a "post" by the code of the POST."""
    enforcer = in_thread(limits="1/minute", methods=["POST"])
    for method, is_counted in (("post", True), ("Post", True), ("POST", True), ("GET", False)):
        charge = enforcer.enter(AsgiRequest({"type": "http", "method": method}))
        assert (charge.result.kind == "limited") == is_counted, method


# ── skip ───────────────────────────────────────────────────────────────────────────────────────


def test_skipped_requests_are_not_counted(sites: Sites) -> None:
    """On routes and on the application, by a function of the request or without a parameter."""
    off = [False]

    def is_internal(request: Any) -> bool:
        return request.header("x-internal") == "yes"

    site = sites(
        {
            "/by-request": limit("1/minute", skip=is_internal, name="r"),
            "/by-state": limit("1/minute", skip=lambda: off[0], name="s"),
        }
    )
    for _ in range(2):
        answer = site.ask("/by-request", **{"X-Internal": "yes"})
        assert (answer.status, '"r"' in answer.headers.get("ratelimit-policy", "")) == (200, False)
    assert site.statuses("/by-request", "/by-request") == [200, 429]
    assert site.statuses("/by-state", "/by-state") == [200, 429]
    off[0] = True
    assert site.statuses("/by-state", "/by-state") == [200, 200]

    whole = sites({"/": None}, "1/minute", skip=is_internal)
    assert [whole.ask("/", **{"X-Internal": "yes"}).status for _ in range(2)] == [200, 200]
    assert whole.statuses("/", "/") == [200, 429]


def test_keys_and_costs_may_be_functions_without_a_parameter(sites: Sites) -> None:
    """As those of Flask-Limiter are: `get_remote_address` reads the request of the context."""
    site = sites(
        {
            "/key": limit("1/minute", key=lambda: "all", name="k"),
            "/cost": limit("4/minute", cost=lambda: 2, name="c"),
        }
    )
    assert site.statuses("/key", "/key") == [200, 429]
    assert site.statuses("/cost", "/cost", "/cost") == [200, 200, 429]


@pytest.mark.parametrize("sites", ASYNC, indirect=True)
def test_skip_may_be_async(sites: Sites) -> None:
    """It is awaited, also without a parameter, as other functions are."""
    off = [True]

    async def is_off() -> bool:
        return off[0]

    site = sites({"/": limit("1/minute", skip=is_off)})
    assert site.statuses("/", "/") == [200, 200]
    off[0] = False
    assert site.statuses("/", "/") == [200, 429]


@pytest.mark.parametrize(
    ("function", "gets"),
    [
        (lambda: "none", "none"),
        (lambda request: request, "it"),
        (lambda request=None: request, "it"),
        (lambda *args: args[0], "it"),
        (lambda *, other=1: "none", "none"),
        (lambda **others: "none", "none"),
        ({}.setdefault, None),
    ],
)
def test_a_function_gets_the_request_if_it_takes_one(function: Any, gets: Any) -> None:
    """A function without positional parameters is called without it; adapting twice is harmless."""
    assert with_request(with_request(function))("it") == gets


# ── Limits from a function ─────────────────────────────────────────────────────────────────────


def by_plan(request: Any) -> Any:
    """Return the limits of the plan that a header names."""
    return {
        "free": "2/minute",
        "pro": ["4/minute"],
        "staff": None,
        "wrong": "often",
        "odd": {"not": "limits"},
        "object": Limit(3, per=60),
    }[request.header("x-plan") or "free"]


def test_limits_may_come_from_a_function(sites: Sites) -> None:
    """It returns everything that `limits` takes; None is no limit for this request."""
    site = sites({"/": limit(by_plan, name="plan")})

    def ask(plan: str) -> tuple[int, str | None]:
        answer = site.ask("/", **{"X-Plan": plan})
        return answer.status, answer.headers.get("x-ratelimit-limit")

    assert [ask("free"), ask("free")] == [(200, "2"), (200, "2")]
    # The same count, by other numbers: two of four are spent.
    assert [ask("pro")[0] for _ in range(3)] == [200, 200, 429]
    assert [ask("free")[0], ask("object")[0]] == [429, 429]
    answer = site.ask("/", **{"X-Plan": "staff"})
    assert (answer.status, "plan" in answer.headers.get("ratelimit-policy", "")) == (200, False)
    site.clock.advance(60)
    assert [ask("object") for _ in range(3)] == [(200, "3")] * 3
    assert ask("object")[0] == 429


def test_an_application_may_have_limits_from_a_function(sites: Sites) -> None:
    """Also with `per_route`, and a function without a parameter."""
    most = [1]
    site = sites({"/a": None, "/b": None}, lambda: f"{most[0]}/minute", per_route=True)
    assert site.statuses("/a", "/a", "/b", "/b") == [200, 429, 200, 429]
    most[0] = 3
    assert site.statuses("/a", "/a", "/a") == [200, 200, 429]
    plans = sites({"/a": None}, by_plan)
    assert plans.statuses("/a", "/a", "/a") == [200, 200, 429]


@pytest.mark.parametrize("sites", ASYNC, indirect=True)
def test_a_function_of_limits_may_be_async(sites: Sites) -> None:
    """It is awaited, on a route and for the application."""

    async def found(request: Any) -> str:
        return str(by_plan(request))

    assert sites({"/": limit(found)}).statuses("/", "/", "/") == [200, 200, 429]
    assert sites({"/": None}, found).statuses("/", "/", "/") == [200, 200, 429]


@pytest.mark.parametrize("plan", ["wrong", "odd"])
def test_a_wrong_limit_is_an_error_of_the_application(sites: Sites, plan: str) -> None:
    """The view does not run. The error names the function and the value."""
    site = sites({"/": limit(by_plan)})
    if sites.framework in ("fastapi", "starlette"):
        value = {"wrong": "'often'", "odd": "{'not': 'limits'}"}[plan]
        said = f"the function tests.web.test_routes.by_plan returned {value} as limits; return a"
        with pytest.raises(ConfigError, match=re.escape(said)):
            site.ask("/", **{"X-Plan": plan})
    else:
        assert site.ask("/", **{"X-Plan": plan}).status == 500
    assert site.served == []


def test_the_functions_of_a_request_are_called_once(sites: Sites) -> None:
    """Also if both `limits` and `skip` are functions."""
    called: list[str] = []

    def skip(request: Any) -> bool:
        called.append("skip")
        return False

    def found() -> str:
        called.append("limits")
        return "5/minute"

    site = sites({"/": limit(found, skip=skip)})
    assert site.statuses("/", "/") == [200, 200]
    assert called == ["skip", "limits"] * 2


def test_a_cost_that_never_fits_the_returned_limit_is_a_422(sites: Sites) -> None:
    """A fixed cost as well: at the start, the limits are not known."""
    site = sites({"/": limit(by_plan, cost=3)})
    assert site.statuses("/") == [422]
    assert site.ask("/", **{"X-Plan": "pro"}).status == 200


def test_the_results_of_a_function_are_cached_and_bounded() -> None:
    """A result that repeats is parsed once; the cache is emptied when it is full."""
    number = [0]
    enforcer = in_thread(limits=lambda: f"{number[0] or 5}/minute")
    request = AsgiRequest({"type": "http", "client": ("192.0.2.1", 1)})
    first, again = enforcer.enter(request), enforcer.enter(request)
    assert first.limiters is again.limiters
    for number[0] in range(10, 10 + RESULTS_MAX):
        enforcer.enter(request)
    assert len(enforcer.enforcer._limiters) <= RESULTS_MAX
    number[0] = 0
    charge = enforcer.enter(request)
    assert charge.decision.allowed is False, "the consumption is kept"
    first.refund()
    enforcer.leave(first)  # its limiters are no longer cached


def test_a_client_whose_limits_change_keeps_its_consumption_in_an_outage() -> None:
    """While the store is unavailable, all results of the function count on this machine as one."""
    most = [3]
    enforcer = in_thread(
        limits=lambda: f"{most[0]}/minute",
        store="redis://127.0.0.1:1",
        on_failure="local",
        clock=ManualClock(1_000),
    )
    request = AsgiRequest({"type": "http", "client": ("192.0.2.1", 1)})
    assert [enforcer.enter(request).decision.allowed for _ in range(3)] == [True] * 3
    most[0] = 4
    assert [enforcer.enter(request).decision.allowed for _ in range(2)] == [True, False]
    enforcer.close()


# ── Limits of the application and of a route ───────────────────────────────────────────────────


def test_a_routes_limits_add_to_those_of_the_application(sites: Sites) -> None:
    """Both count, the tighter one denies, and a request that one denies costs nothing in the other.
    With `per_route`, each route has a count of the application's limits."""
    routes = {"/a": limit("1/minute", name="own"), "/b": None}
    site = sites(routes, "3/minute", name="all")
    assert site.ask("/a").headers["ratelimit-policy"] == '"all";q=3;w=60, "own";q=1;w=60'
    assert site.statuses("/a", "/a", "/b", "/b", "/b") == [429, 429, 200, 200, 429]
    site = sites(routes, "2/minute", per_route=True)
    assert [site.statuses(*[path] * 4).count(200) for path in routes] == [1, 2]


def test_the_application_may_leave_routes_to_their_own_limits(sites: Sites) -> None:
    """`skip` names them: then the limits of the application neither count nor show there. A path
    that matches no such route is counted."""
    names = {"flask": "own", "starlette": "?"}
    site = sites(
        {"/own": limit("3/minute"), "/plain": None},
        "2/minute",
        name=names.get(sites.framework, "/own"),  # a count is never shared by accident
        skip=lambda request: request.route == "/own",
    )
    answer = site.ask("/own")
    assert answer.headers["x-ratelimit-limit"] == "3"
    assert ";q=2" not in answer.headers["ratelimit-policy"]
    assert site.statuses(*["/own"] * 3) == [200, 200, 429]
    assert site.statuses("/plain", "/missing", "/plain") == [200, 404, 429]


def test_no_request_to_a_route_is_unlimited_by_accident(sites: Sites) -> None:
    """The limits of the application count what a route's limit does not: other methods, skipped
    requests, and a function that returns None. So they count a method that the route lacks."""
    routes = {
        "/methods": limit("9/minute", methods=["POST"]),
        "/skipped": limit("9/minute", skip=lambda: True),
        "/none": limit(lambda: None),
    }
    site = sites(routes, "1/minute", per_route=True, name="all")
    for path in routes:
        assert site.statuses(path, path) == [200, 429]
        assert site.served.count(path) == 1, "a denied request does not reach the view"
        assert site.ask(path).headers["ratelimit-policy"] == '"all";q=1;w=60'
    whole = sites({"/own": limit("9/minute")}, "1/minute")
    missing = whole.statuses("/own", "/own", method="PATCH")
    assert missing == ([200, 429] if sites.framework.startswith("django") else [405, 429])


class Between:
    """A middleware between the limits of the application and the router."""

    def __init__(self, app: Any, path: str | None) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Rewrite the path; without one, fail as if the client closed the connection."""
        if self._path is None:
            raise asyncio.CancelledError
        await self._app({**scope, "path": self._path}, receive, send)


@pytest.mark.parametrize("sites", ["fastapi", "starlette"], indirect=True)
def test_a_request_is_limited_wherever_it_is_sent_or_ends(sites: Sites) -> None:
    """The route that serves a rewritten path charges it; an aborted request stays charged."""
    rewritten = sites({"/own": limit("2/minute"), "/open": None}, "9/minute")
    rewritten.app.user_middleware.append(Middleware(Between, "/own"))
    assert rewritten.statuses(*["/open"] * 3) == [200, 200, 429]
    aborted = sites({"/own": limit("9/minute")}, "1/minute")
    aborted.app.user_middleware.append(Middleware(Between, None))
    with pytest.raises(asyncio.CancelledError):
        aborted.ask("/own")
    assert aborted.statuses("/own") == [429]


# ── Keys ───────────────────────────────────────────────────────────────────────────────────────


def test_a_login_that_counts_by_address_is_limited(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that invents an API key for each guess gets no further than the limit."""
    login = limit("5 in any minute", key="address", on_failure="closed")
    site = sites({"/login": login}, "100/minute", key=["header:X-API-Key", "address"])
    guesses = [site.ask("/login", "POST", **{"X-API-Key": f"sk_{n}"}).status for n in range(20)]
    assert guesses == [200] * 5 + [429] * 15
    assert "key of the application" not in caplog.text


@pytest.mark.parametrize(
    "key",
    [
        ["header:X-API-Key", "address"],
        "query:key",
        ("session:user_id", "cookie:sid"),
        ["bearer", "address"],
        "unverified_claim:sub",
    ],
    ids=str,
)
def test_a_route_that_inherits_a_key_of_the_client_is_warned_about(
    sites: Sites, key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A client can invent the key, so one warning for each route names it and the remedy."""
    routes = {
        "/login": limit("5/minute", name="logins"),
        "/pay": limit("5/minute", name="payments"),
    }
    site = sites(routes, "100/minute", key=key)
    site.statuses("/login", "/pay", "/login", "/pay")
    warnings = [each for each in caplog.records if "key of the application" in each.message]
    assert [each.levelname for each in warnings] == ["WARNING"] * 2
    for each, name in zip(warnings, ("logins", "payments"), strict=True):
        assert f"the limit of {name} counts by the key of the application" in each.message
        assert 'Write key="address"' in each.message


@pytest.mark.parametrize(
    ("key", "own"),
    [
        (None, None),
        ("address", None),
        (["session:user_id", "address"], None),
        (Claim("sub", key="a shared secret of 32 bytes or so", algorithms=["HS256"]), None),
        (lambda request: request.header("X-API-Key"), None),
        ("header:X-API-Key", "header:X-API-Key"),
    ],
    ids=["none", "address", "session", "claim", "function", "of the route"],
)
def test_a_key_that_clients_cannot_invent_is_not_warned_about(
    sites: Sites, key: Any, own: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor about the address, a key function of the application, or a key that the route names."""
    site = sites({"/login": limit("5/minute", key=own)}, "100/minute", key=key)
    assert site.statuses("/login") == [200]
    assert "key of the application" not in caplog.text


# ── Headers ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("cost", "status"), [(9, 422), (-1, 400)])
def test_a_request_that_cannot_be_checked_shows_its_limits(
    sites: Sites, cost: int, status: int
) -> None:
    """The 422 of a cost that never fits, and the 400 of a wrong one, have the usual headers. They
    cost nothing, and have no Retry-After because waiting does not help."""
    own = limit("5/minute", name="own", cost=lambda request: int(request.header("X-Cost")))
    site = sites({"/own": own}, "7/minute")
    assert site.ask("/own", **{"X-Cost": "2"}).status == 200
    answer = site.ask("/own", **{"X-Cost": str(cost)})
    assert answer.status == status
    assert answer.headers["ratelimit-policy"] == '"default";q=7;w=60, "own";q=5;w=60'
    assert answer.headers["ratelimit"] == '"own";r=3;t=24'
    assert "retry-after" not in answer.headers
    assert site.ask("/own", **{"X-Cost": "3"}).headers["ratelimit"] == '"own";r=0;t=60'


BAD_REQUESTS: dict[str, Exception] = {
    "fastapi": HTTPException(400),
    "starlette": HTTPException(400),
    "flask": FlaskBadRequest(),
    "django wsgi": DjangoBadRequest(),
    "django asgi": DjangoBadRequest(),
}


def test_an_error_that_the_framework_answers_has_the_headers(sites: Sites) -> None:
    """So has the 404 of a path without a route, by the limits of the application."""
    site = sites({"/own": limit("5/minute", name="own")}, "7/minute")
    site.errors["/own"] = BAD_REQUESTS[sites.framework]
    answer = site.ask("/own")
    assert (answer.status, site.served) == (400, ["/own"])
    assert answer.headers["ratelimit-policy"] == '"default";q=7;w=60, "own";q=5;w=60'
    missing = site.ask("/missing")
    assert (missing.status, missing.headers["ratelimit"]) == (404, '"default";r=5;t=18')


def test_an_error_that_the_application_handles_has_the_headers(sites: Sites) -> None:
    """An exception handler makes a response like any other."""
    site = sites({"/own": limit("5/minute", name="own")}, "7/minute")
    site.errors["/own"] = LookupError("not here")
    if sites.framework == "flask":
        site.app.register_error_handler(LookupError, lambda error: ("handled", 409))
    elif not sites.framework.startswith("django"):
        site.app.add_exception_handler(
            LookupError, lambda request, error: PlainTextResponse("handled", 409)
        )
    answer = site.ask("/own")
    # Django has no exception handlers for a view: it answers a 500, inside of the middleware.
    assert answer.status == (500 if sites.framework.startswith("django") else 409)
    assert answer.headers["ratelimit"] == '"own";r=4;t=12'
