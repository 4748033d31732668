"""Options: wrong ones are rejected where they are written, and type checkers know all names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI
from flask import Flask
from werkzeug.test import Client

from ratekeeper import ConfigError, Fleet, Limiter, Regions, asgi, django, fastapi, flask, wsgi
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.testing import ManualClock
from ratekeeper.web.identity import Identity
from ratekeeper.web.options import (
    EnforcerOptions,
    OptionArguments,
    RouteArguments,
)
from tests.fleet.nodes import SharedStore
from tests.regions.stores import two_regions
from tests.web.asgi_driver import ask

RULES = """
version: 1
rules:
  - {id: all, by: [ip], limits: ["2/minute"]}
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limits": "1/s", "rules": RULES}, "limits and rules both"),
        ({"limits": "1/s", "limiter": Limiter("1/s")}, "limits and limiter both"),
        ({"limits": "one"}, "write it like this"),
        ({"limits": "1/s", "skip": "/healthz"}, "skip='/healthz' is not a function"),
        ({"limits": "1/s", "count": 401}, "count=401 is not a function"),
        ({"limits": "1/s", "methods": []}, r"methods=\[\] is not a list of HTTP methods"),
        ({"limits": "1/s", "methods": {"GET": 1}}, "is not a list of HTTP methods"),
        ({"limits": "1/s", "methods": 5}, "methods=5 is not a list of HTTP methods"),
        ({"limits": "1/s", "methods": ["FETCH"]}, "'FETCH' is not an HTTP method; the methods are"),
        ({"limits": "1/s", "methods": "GET,POST"}, "'GET,POST' is not an HTTP method"),
        ({"limits": "1/s", "methods": ["GET", None]}, "None is not an HTTP method"),
        ({"limits": Limiter}, "is a class; give a rate such as"),
        ({"limits": "1/s", "per_route": "false"}, "per_route='false' is not True or False"),
        ({"limits": "1/s", "on_limit": True}, "on_limit=True is not a function"),
        # Left over from other libraries: the functions have other parameters there.
        (
            {"limits": "1/s", "on_limit": lambda limit: None},
            r"is called with \(request, denial\), but its parameters are \(limit\): too many",
        ),
        ({"limits": lambda group, request: "1/s"}, r"called with \(request\).*group, request"),
        ({"limits": "1/s", "skip": lambda a, b: True}, r"called with \(request\).*a, b"),
        ({"limits": "1/s", "key": lambda a, b: a}, "for example key=lambda request:"),
        ({"limits": "1/s", "cost": lambda a, b: 1}, "for example cost=lambda request: 2"),
        ({"limits": "1/s", "count": lambda: True}, r"is called with \(status\)"),
        ({"limits": "1/s", "cost": -1}, "cost"),
        ({"limits": "10/s; 5/minute", "cost": 6}, "cost=6 never fits"),
        ({"limits": "1/s", "style": "draft-7"}, "is not a Style"),
        ({"limits": "1/s", "on_failure": "perhaps"}, "on_failure"),
        ({"limits": "1/s", "name": "a\nb"}, "name="),
        ({"rules": RULES, "name": "x"}, "name='x' applies to limits only; .* named by its id"),
        ({"rules": RULES, "per_route": True}, "per_route=True applies to limits only; with rules"),
        ({"limiter": Limiter("1/s"), "name": "x"}, "has its own name; set it there"),
        (
            {"name": "x", "per_route": True},
            'give name and per_route only together with limits; for example limits="100/minute"',
        ),
        ({"limits": "1/s", "on_unavailable": 503}, "on_unavailable=503 is not a function"),
        ({"rules": RULES, "key": "header:X"}, "each rule's `by`"),
        ({"limiter": Limiter("1/s"), "store": "redis://x"}, "has its own store; set it there"),
        ({"limiter": Limiter("1/s"), "on_failure": "closed"}, "its own on_failure"),
        ({"limiter": Limiter("1/s"), "clock": ManualClock()}, "its own clock"),
        ({"limiter": Limiter("1/s"), "local_fallback": LocalFallback()}, "its own local_fallback"),
        ({"limiter": Limiter("1/s"), "consistency": "leased"}, "its own consistency"),
        ({"limiter": Limiter("1/s"), "fleet": Fleet()}, "its own fleet"),
        ({"limits": "1/s", "consistency": "often"}, "consistency='often' is not known"),
        ({"limits": "1/s", "fleet": 20}, "fleet=20 is not a Fleet"),
        ({"rules": RULES, "consistency": "leased"}, "each rule has its own"),
        ({"rules": RULES, "scope": "global"}, "scope='global' applies to limits only"),
        ({"limits": "1/s", "regions": "eu"}, "regions='eu' is not a Regions"),
        ({"limits": "1/s", "scope": "world"}, "scope='world' is not known"),
        ({"limits": "1/s", "across_regions": "exact"}, "no effect on a limit of one region"),
        (
            {"limits": "1/s", "scope": "global", "consistency": "leased"},
            "'leased' does not work with scope",
        ),
        ({"limiter": Limiter("1/s"), "scope": "global"}, "its own scope"),
        ({"limiter": Limiter("1/s"), "regions": Regions("eu", {"eu": "redis://h"})}, "regions"),
        ({"identify": Identity(), "trusted_proxies": ["10.0.0.0/8"]}, "to the Identity"),
    ],
)
def test_wrong_options_are_rejected_at_once(options: dict[str, Any], said: str) -> None:
    """The error comes where the application is written and suggests a correct option."""
    with pytest.raises(ConfigError, match=said):
        EnforcerOptions(**options)


def test_an_integration_may_require_limits() -> None:
    """A middleware without limits would silently limit nothing."""
    with pytest.raises(ConfigError, match='RateLimit needs limits="100/minute"'):
        EnforcerOptions().require_limits("RateLimit")
    assert EnforcerOptions(limits="1/s").require_limits("RateLimit").has_limits


@pytest.mark.parametrize("integration", [asgi, fastapi, flask, wsgi])
def test_an_object_that_is_not_an_application_is_rejected(integration: Any) -> None:
    """The message asks for the application."""
    with pytest.raises(ConfigError, match=r"'100/minute' is not an? .*application; write"):
        integration.RateLimit("100/minute")


def test_the_typed_arguments_are_the_options() -> None:
    """Type checkers know exactly the options that exist."""
    typed = {"limits", *get_type_hints(OptionArguments), *get_type_hints(RouteArguments)}
    assert typed == set(get_type_hints(EnforcerOptions))


# The functions that limit a route, with the name and the place that their errors name.
ROUTES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "fastapi": (fastapi.RateLimit(FastAPI()), "limit(…)", "RateLimit(app, {}=…)"),
    "flask": (flask.RateLimit(Flask("shop")), "limit(…)", "RateLimit(app, {}=…)"),
    "starlette": (asgi.limited, "limited(…)", "RateLimit(app, {}=…)"),
    "django": (django.rate_limit, "rate_limit(…)", 'settings.RATEKEEPER = {{"{}": …}}'),
}
HERE = dict.fromkeys(get_type_hints(RouteArguments)) | {"cost": 1, "name": "login"}
ELSEWHERE = sorted({*get_type_hints(OptionArguments)} - {*HERE})


@pytest.mark.parametrize("framework", ROUTES)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_route_rejects_an_option_of_the_application(framework: str, name: str) -> None:
    """No option is accepted and then ignored. The error says where the option belongs."""
    limit, function, place = ROUTES[framework]
    with pytest.raises(ConfigError) as caught:
        limit("5/minute", **{name: "redis://localhost"})
    assert str(caught.value).startswith(f"{function} does not take {name}: ")
    assert f"give it to {place.format(name)}. " in str(caught.value)


@pytest.mark.parametrize("framework", ROUTES)
def test_a_route_names_its_options(framework: str) -> None:
    """An option that no integration has is rejected too, and so is a route without limits."""
    limit, function, _ = ROUTES[framework]
    limit("5/minute", **HERE)
    with pytest.raises(ConfigError) as caught:
        limit("5/minute", on_faliure="closed")
    assert str(caught.value).startswith(
        f"{function} has no option on_faliure (did you mean on_failure?); "
        f"the options are key, cost, methods, "
    )
    with pytest.raises(ConfigError) as caught:
        limit(None)
    assert str(caught.value).startswith(f"{function} needs limits")
    with pytest.raises(ConfigError, match="on_failure='never' is not known"):
        limit("5/minute", on_failure="never")


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: fastapi.RateLimit(FastAPI(), "5/minute", **options),
        lambda **options: flask.RateLimit(Flask("shop"), "5/minute", **options),
        lambda **options: asgi.RateLimit(FastAPI(), "5/minute", **options),
        lambda **options: wsgi.RateLimit(Flask("shop"), "5/minute", **options),
    ],
)
def test_an_unknown_option_of_the_application_is_named(make: Callable[..., Any]) -> None:
    """The error names the public class, not one of ours."""
    said = r"^RateLimit\(…\) has no option stroe \(did you mean store\?\); the options are"
    with pytest.raises(ConfigError, match=said):
        make(stroe="memory://")
    with pytest.raises(TypeError, match=r"^RateLimit\(…\) has no option x, y; the options are"):
        make(x=1, y=2)


def test_an_unknown_scope_names_what_shares_a_count() -> None:
    """In other libraries, a scope is a count that several routes share."""
    with pytest.raises(ConfigError, match=r"scope='mail' is not known; .* the same name"):
        asgi.limited("5/minute", scope="mail")


@pytest.mark.parametrize("framework", ROUTES)
def test_wrong_positional_arguments_name_the_public_function(framework: str) -> None:
    """Python's own message would name a method."""
    limit, function, _ = ROUTES[framework]
    for arguments in ((), ("5/minute", "10/hour")):
        with pytest.raises(ConfigError) as caught:
            limit(*arguments)
        assert str(caught.value).startswith(f"{function}: ")
        assert "; for example " in str(caught.value)
    for integration in (asgi, fastapi, flask, wsgi):
        with pytest.raises(TypeError, match=r"^RateLimit\(…\): too many positional arguments; for"):
            integration.RateLimit(FastAPI(), "5/minute", "redis://localhost")


# ── A store that several machines share ────────────────────────────────────────────────────────


def _fastapi_asking(**options: Any) -> Callable[[], int]:
    app = FastAPI()
    limit = fastapi.RateLimit(app, **options)
    app.get("/hello", dependencies=[limit("90000/hour")])(lambda: "hello")
    return lambda: asyncio.run(ask(app, "/hello")).status


def _flask_asking(**options: Any) -> Callable[[], int]:
    app = Flask("shop")
    limit = flask.RateLimit(app, **options)
    app.get("/hello")(limit("90000/hour")(lambda: "hello"))
    client = app.test_client()
    return lambda: client.get("/hello").status_code


def _asgi_asking(**options: Any) -> Callable[[], int]:
    app = asgi.RateLimit(FastAPI(), **options)
    return lambda: asyncio.run(ask(app, "/hello")).status


def _wsgi_asking(**options: Any) -> Callable[[], int]:
    client = Client(wsgi.RateLimit(Flask("shop"), **options))
    return lambda: client.get("/hello").status_code


ASKING: dict[str, Callable[..., Callable[[], int]]] = {
    "fastapi": _fastapi_asking,
    "flask": _flask_asking,
    "asgi": _asgi_asking,
    "wsgi": _wsgi_asking,
}


@pytest.mark.parametrize("framework", ASKING)
def test_a_node_answers_most_requests_itself(framework: str) -> None:
    """An application and its routes share one node: `consistency` and `fleet` as for Limiter."""
    clock = ManualClock(1_000)
    store = SharedStore(clock)
    asking = ASKING[framework](
        limits="100000/hour", store=store, clock=clock, consistency="leased", fleet=Fleet(nodes=2)
    )
    assert {asking() for _ in range(40)} <= {200, 404}
    assert 0 < store.controlled.leases <= 20
    # Two rules of one node, in one table.
    assert len(store._tables) == (2 if framework in {"fastapi", "flask"} else 1)


@pytest.mark.parametrize("framework", ASKING)
def test_the_limits_of_an_application_can_be_global(framework: str) -> None:
    """`scope` and `across_regions` as for Limiter: half of an exact limit is for this region."""
    clock = ManualClock(6_000)
    store, eu, _ = two_regions(clock)
    asking = ASKING[framework](
        limits="10/minute", store=store, clock=clock, scope="global", across_regions="exact"
    )
    assert [asking() for _ in range(6)].count(429) == 1
    assert eu.counts._subjects
    store.close()


def test_a_route_has_a_scope_of_its_own() -> None:
    """A global route of an application that leases is strict; a regional one is possible too."""
    clock = ManualClock(6_000)
    store, eu, _ = two_regions(clock)
    app = FastAPI()
    limit = fastapi.RateLimit(app, store=store, clock=clock, consistency="leased")
    app.get("/all", dependencies=[limit("9/minute", scope="global")])(lambda: "in")
    app.get("/here", dependencies=[limit("9/minute")])(lambda: "in")
    assert {asyncio.run(ask(app, path)).status for path in ("/all", "/here")} == {200}
    assert len(eu.counts._subjects) == 1
    store.close()


def test_a_route_can_be_strict_in_an_application_that_leases() -> None:
    """For a login: each of its checks is the authority's."""
    clock = ManualClock(1_000)
    store = SharedStore(clock)
    app = FastAPI()
    limit = fastapi.RateLimit(app, store=store, clock=clock, consistency="leased")
    app.get("/login", dependencies=[limit("1000/hour", consistency="strict")])(lambda: "in")
    assert {asyncio.run(ask(app, "/login")).status for _ in range(9)} == {200}
    assert store.controlled.leases == 0
