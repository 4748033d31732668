"""Options of routes that users of other libraries know, in every integration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from django.core.exceptions import BadRequest as DjangoBadRequest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from werkzeug.exceptions import BadRequest as FlaskBadRequest

from ratekeeper import ConfigError, Limit
from ratekeeper.testing import ManualClock
from ratekeeper.web.claims import Claim
from ratekeeper.web.enforcer import RESULTS_MAX, Enforcer
from ratekeeper.web.options import EnforcerOptions, with_request
from ratekeeper.web.requests import AsgiRequest
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
    enforcer = Enforcer(EnforcerOptions(limits="1/minute", methods=["POST"]))
    for method, is_counted in (("post", True), ("Post", True), ("POST", True), ("GET", False)):
        charge = enforcer.enter(AsgiRequest({"type": "http", "method": method}))
        assert (charge.result.kind == "limited") == is_counted, method


# ── exempt_when ────────────────────────────────────────────────────────────────────────────────


def test_exempt_when_is_skip_by_another_name(sites: Sites) -> None:
    """On routes and on the application, as a function of the request or without a parameter."""
    exempt = [False]

    def is_internal(request: Any) -> bool:
        return request.header("x-internal") == "yes"

    site = sites(
        {
            "/by-request": limit("1/minute", exempt_when=is_internal, name="r"),
            "/by-state": limit("1/minute", exempt_when=lambda: exempt[0], name="s"),
        }
    )
    for _ in range(2):
        answer = site.ask("/by-request", **{"X-Internal": "yes"})
        assert (answer.status, '"r"' in answer.headers.get("ratelimit-policy", "")) == (200, False)
    assert site.statuses("/by-request", "/by-request") == [200, 429]
    assert site.statuses("/by-state", "/by-state") == [200, 429]
    exempt[0] = True
    assert site.statuses("/by-state", "/by-state") == [200, 200]

    whole = sites({"/": None}, "1/minute", exempt_when=is_internal)
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
def test_exempt_when_may_be_async(sites: Sites) -> None:
    """It is awaited, also without a parameter, as other functions are."""
    exempt = [True]

    async def is_exempt() -> bool:
        return exempt[0]

    site = sites({"/": limit("1/minute", exempt_when=is_exempt)})
    assert site.statuses("/", "/") == [200, 200]
    exempt[0] = False
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


@pytest.mark.parametrize("name", ["skip", "exempt_when"])
def test_the_functions_of_a_request_are_called_once(sites: Sites, name: str) -> None:
    """Also if both the limits and the exemption are functions."""
    called: list[str] = []

    def exempt(request: Any) -> bool:
        called.append("exempt")
        return False

    def found() -> str:
        called.append("limits")
        return "5/minute"

    site = sites({"/": limit(found, **{name: exempt})})
    assert site.statuses("/", "/") == [200, 200]
    assert called == ["exempt", "limits"] * 2


def test_a_cost_that_never_fits_the_returned_limit_is_a_422(sites: Sites) -> None:
    """A fixed cost as well: at the start, the limits are not known."""
    site = sites({"/": limit(by_plan, cost=3)})
    assert site.statuses("/") == [422]
    assert site.ask("/", **{"X-Plan": "pro"}).status == 200


def test_the_results_of_a_function_are_cached_and_bounded() -> None:
    """A result that repeats is parsed once; the cache is emptied when it is full."""
    number = [0]
    enforcer = Enforcer(EnforcerOptions(limits=lambda: f"{number[0] or 5}/minute"))
    request = AsgiRequest({"type": "http", "client": ("192.0.2.1", 1)})
    first, again = enforcer.enter(request), enforcer.enter(request)
    assert first.enforcer is again.enforcer
    for number[0] in range(10, 10 + RESULTS_MAX):
        enforcer.enter(request)
    assert len(enforcer._by_result) <= RESULTS_MAX
    number[0] = 0
    charge = enforcer.enter(request)
    assert charge.decision.allowed is False, "the consumption is kept"
    first.refund()
    first.enforcer.leave(first)  # its enforcer is no longer cached


def test_a_client_whose_limits_change_keeps_its_consumption_in_an_outage() -> None:
    """While the store is unavailable, all results of the function count on this machine as one."""
    most = [3]
    enforcer = Enforcer(
        EnforcerOptions(
            limits=lambda: f"{most[0]}/minute",
            store="redis://127.0.0.1:1",
            on_failure="local",
            clock=ManualClock(1_000),
        )
    )
    request = AsgiRequest({"type": "http", "client": ("192.0.2.1", 1)})
    assert [enforcer.enter(request).decision.allowed for _ in range(3)] == [True] * 3
    most[0] = 4
    assert [enforcer.enter(request).decision.allowed for _ in range(2)] == [True, False]
    enforcer.close()


# ── override_defaults ──────────────────────────────────────────────────────────────────────────


def test_a_routes_limits_add_to_the_defaults_unless_they_override_them(sites: Sites) -> None:
    """The defaults neither deny nor count on an overriding route, nor do the headers show them."""
    site = sites(
        {
            "/adds": limit("9/minute", name="adds"),
            "/own": limit("3/minute", override_defaults=True, name="own"),
            "/plain": None,
        },
        "2/minute",
        name="all",
    )
    answer = site.ask("/own")
    assert answer.headers["ratelimit-policy"] == '"own";q=3;w=60'
    assert answer.headers["x-ratelimit-remaining"] == "2"
    assert site.statuses("/own", "/own", "/own") == [200, 200, 429]
    assert "all" not in site.ask("/own").headers["ratelimit-policy"]
    answer = site.ask("/adds")
    assert answer.headers["ratelimit-policy"] == '"all";q=2;w=60, "adds";q=9;w=60'
    assert answer.headers["x-ratelimit-remaining"] == "1"
    assert site.statuses("/plain", "/plain", "/adds") == [200, 429, 429]
    site.clock.advance(20)
    assert site.statuses("/own") == [200]


@pytest.mark.parametrize(
    ("per_route", "overrides", "allowed"),
    [(True, True, [4, 2, 2]), (False, False, [2, 0, 0]), (False, True, [4, 2, 0])],
)
def test_defaults_count_as_in_flask_limiter(
    sites: Sites, per_route: bool, overrides: bool, allowed: list[int]
) -> None:
    """Four requests to each of three routes, 2/minute for all and 5/minute for the first."""
    routes = {"/a": limit("5/minute", override_defaults=overrides), "/b": None, "/c": None}
    site = sites(routes, "2/minute", per_route=per_route)
    assert [site.statuses(*[path] * 4).count(200) for path in routes] == allowed


def test_a_request_that_an_overriding_limit_does_not_count_is_counted_by_the_defaults(
    sites: Sites,
) -> None:
    """That holds for other methods, exempt requests, and a function that returns None."""
    site = sites(
        {
            "/methods": limit("9/minute", override_defaults=True, methods=["POST"]),
            "/exempt": limit("9/minute", override_defaults=True, exempt_when=lambda: True),
            "/none": limit(lambda: None, override_defaults=True),
        },
        "1/minute",
        per_route=True,
        name="all",
    )
    for path in ("/methods", "/exempt", "/none"):
        assert site.statuses(path, path) == [200, 429]
        assert site.served.count(path) == 1, "a denied request does not reach the view"
        assert site.ask(path).headers["ratelimit-policy"] == '"all";q=1;w=60'
    assert site.statuses(*["/methods"] * 3, method="POST") == [200] * 3


def test_a_route_overrides_neither_rules_nor_a_request_that_matches_no_route(sites: Sites) -> None:
    """Rules are the operator's; a route of the application does not lift them."""
    rule = {"id": "all", "by": ["ip"], "limits": ["1/minute"]}
    routes = {"/own": limit("9/minute", override_defaults=True)}
    site = sites(routes, rules={"version": 1, "rules": [rule]})
    assert site.statuses("/own", "/own") == [200, 429]
    site = sites(routes, "1/minute")
    assert site.statuses("/missing", "/missing", "/own") == [404, 429, 200]


def test_an_uncheckable_request_costs_the_defaults_nothing(sites: Sites) -> None:
    """As without `override_defaults`: a cost that never fits is a 422 and is not counted."""
    site = sites(
        {"/own": limit("2/minute", override_defaults=True, cost=lambda _: 3), "/plain": None},
        "1/minute",
    )
    assert site.statuses("/own", "/own", "/plain", "/plain") == [422, 422, 200, 429]


def test_an_overriding_limit_may_have_the_name_of_the_defaults(sites: Sites) -> None:
    """A count is never shared by accident, whatever the route is called."""
    names = {"fastapi": "DELETE,GET,POST,PUT /own", "flask": "own", "starlette": "?"}
    site = sites(
        {"/own": limit("3/minute", override_defaults=True), "/plain": None},
        "2/minute",
        name=names.get(sites.framework, "/own"),
    )
    assert site.statuses(*["/own"] * 4) == [200, 200, 200, 429]
    assert site.statuses(*["/plain"] * 3) == [200, 200, 429]


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
