"""A Django site: its settings, its requests, and charges in threads and in the event loop."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.test import Client, RequestFactory, override_settings

from ratekeeper import AsyncLimiter, ConfigError, Fleet, Limiter
from ratekeeper.core.rates import limits_of
from ratekeeper.core.steps import run, run_async
from ratekeeper.django import RateLimitMiddleware
from ratekeeper.testing import ManualClock
from ratekeeper.web.django_site import (
    DjangoCharges,
    DjangoWebRequest,
    options_of,
    site_enforcer,
    template_of,
)
from tests.fleet.nodes import SharedStore
from tests.web import django_site as views


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("100/minute", r"settings\.RATEKEEPER='100/minute' is not a dict; for example "),
        (
            {"limit": "1/minute"},
            r"has no option limit \(did you mean limits\?\); the options are limits, key, cost",
        ),
        ({"limits": "1/fortnight"}, r"settings\.RATEKEEPER: expected a unit"),
        ({"limiter": None}, r"settings\.RATEKEEPER has no option limiter"),
        ({"skip": "no.such.function"}, "skip='no.such.function' cannot be imported"),
        ({"limits": "1/minute", "store": "carrier-pigeon://"}, "store"),
        ({"limits": "1/minute", "key": "pigeon:7"}, "not a source"),
    ],
)
def test_wrong_settings_stop_the_start(setting: Any, words: str) -> None:
    """The message has the setting's name and suggests a correct value."""
    with override_settings(RATEKEEPER=setting), pytest.raises(ConfigError, match=words):
        RateLimitMiddleware(views.hello)


def test_both_limiters_of_a_django_site_are_one_node() -> None:
    """Views in threads and in the event loop spend from the same leases."""
    clock = ManualClock(1_000)
    store = SharedStore(clock)
    setting = {
        "limits": "100000/hour",
        "store": store,
        "clock": clock,
        "consistency": "leased",
        "fleet": Fleet(nodes=2),
    }
    with override_settings(RATEKEEPER=setting):
        limiters = site_enforcer()._fixed
        assert limiters is not None
        for _ in range(40):
            assert limiters.of(Limiter).check("a").allowed
        leases = store.controlled.leases
        assert 0 < leases <= 10
        assert limiters.of(Limiter).store is limiters.of(AsyncLimiter).store
        assert asyncio.run(limiters.of(AsyncLimiter).check("a")).allowed
        assert store.controlled.leases <= leases + 1


def test_a_site_without_the_setting_has_no_limits() -> None:
    """The decorators still work."""
    assert not options_of({}).has_limits


def test_an_overridden_setting_is_read_again() -> None:
    """The previous limits are closed, so a site's tests can change the setting."""
    with override_settings(RATEKEEPER={"limits": "1/minute"}):
        client = Client()
        assert [client.get("/hello").status_code for _ in range(2)] == [200, 429]
        with override_settings(RATEKEEPER={"limits": "2/minute"}):
            assert [client.get("/hello").status_code for _ in range(3)] == [200, 200, 429]
        assert client.get("/hello").status_code == 200


def test_threads_open_the_limits_once() -> None:
    """This holds even if several threads use them first at the same time."""
    with override_settings(RATEKEEPER={"limits": "1/minute"}):
        found: list[Any] = []
        barrier = threading.Barrier(8)

        def ask() -> None:
            barrier.wait()
            found.append(site_enforcer())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1


assert views  # Django is configured by it


def test_paths_stay_encoded() -> None:
    """An encoded question mark is part of the path, for rules as for Django."""
    factory = RequestFactory()
    scope = {"type": "http", "method": "GET", "headers": [], "path": "/caf\u00e9?x"}
    for native in (factory.get("/caf%C3%A9%3Fx?y=1"), ASGIRequest(scope, io.BytesIO())):
        request = DjangoWebRequest(native)
        assert (request.path, request.route) == ("/caf%C3%A9%3Fx", None)


@pytest.mark.parametrize(
    ("route", "template"),
    [
        ("", "/"),
        ("users/<int:id>/", "/users/<int:id>/"),
        ("^users/(?P<id>[0-9]+)/$", "/users/<id>/"),
        ("api/^users/([0-9]+)/$", "/api/users/<var>/"),
        (r"^a\.b/(?P<path>(x|y)+)$", "/a\\.b/<path>"),
    ],
)
def test_routes_have_the_form_that_rules_use(route: str, template: str) -> None:
    """Expressions are left out, so that /users/<id>/ is one endpoint."""
    assert template_of(route) == template


async def test_charges_are_settled_from_threads_and_from_the_loop() -> None:
    """Whichever has made them: a thread waits for what the loop awaits."""

    async def key(request: Any) -> str:
        return "client"

    setting = {"limits": "5/minute", "clock": ManualClock(1_000), "key": key}
    request = DjangoWebRequest(RequestFactory().get("/"))
    with override_settings(RATEKEEPER=setting):
        enforcer = site_enforcer()
        for charging, settling in ((run_async, in_a_thread), (in_a_thread, run_async)):
            charges = DjangoCharges(enforcer)
            assert await charging(charges.charging(enforcer, request)) is None
            charges.refund()
            await settling(charges.settling())
            assert enforcer._fixed is not None
            assert enforcer._fixed.any.peek("client").remaining == 5


async def in_a_thread(steps: Any) -> Any:
    return await sync_to_async(run)(steps)


def by_path(request: Any) -> str:
    """Return the limits of a request, for a setting that names this function."""
    return "1/minute" if request.path == "/hello" else "2/minute"


async def test_limits_may_be_a_function_by_its_dotted_path() -> None:
    """A rate with a point in it is a rate."""
    for kind in ("wsgi", "asgi"):
        site = views.Site(kind)
        with site.having(limits=f"{__name__}.by_path", per_route=True):
            assert await site.statuses("/hello", "/hello", "/ahello", "/ahello") == [
                *(200, 429, 200, 200)
            ]
    (limit,) = limits_of(options_of({"limits": "5/1.5s"}).limits)  # type: ignore[arg-type]  # text
    assert limit.window == 1.5
    with pytest.raises(ConfigError, match=r"limits='shop\.limits\.by_plan' cannot be imported"):
        options_of({"limits": "shop.limits.by_plan"})
