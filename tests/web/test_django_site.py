"""A Django site: its settings, its requests, and charges in threads and in the event loop."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIRequest
from django.test import Client, RequestFactory, override_settings

from tests.fleet.nodes import SharedStore
from tests.web import django_site as views
from tollkeeper import AsyncLimiter, ConfigError, Fleet, Limiter
from tollkeeper.django import RateLimitMiddleware
from tollkeeper.testing import ManualClock
from tollkeeper.web.django_site import (
    DjangoCharges,
    DjangoWebRequest,
    options_of,
    run_in_loop,
    settling,
    site_limits,
    template_of,
)
from tollkeeper.web.enforcer import AsyncEnforcer, Enforcer
from tollkeeper.web.options import EnforcerOptions


def test_a_remote_store_is_awaited() -> None:
    """The two enforcers share one Redis, which is not called here."""
    with override_settings(TOLLKEEPER={"limits": "9/minute", "store": "redis://127.0.0.1:1"}):
        site = site_limits()
        assert type(site.enforcer._limiter) is Limiter
        assert type(site.async_enforcer._limiter) is AsyncLimiter
        assert site.enforcer.store is site.async_enforcer.store


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("100/minute", r"settings\.TOLLKEEPER='100/minute' is not a dict; for example "),
        (
            {"limit": "1/minute"},
            r"has no option limit; the options are limits, rules, store",
        ),
        ({"limits": "1/fortnight"}, r"settings\.TOLLKEEPER: expected a unit"),
        ({"limiter": None}, r"settings\.TOLLKEEPER has no option limiter"),
        ({"skip": "no.such.function"}, "skip='no.such.function' cannot be imported"),
        ({"limits": "1/minute", "store": "carrier-pigeon://"}, "store"),
        ({"limits": "1/minute", "key": "pigeon:7"}, "not a source"),
    ],
)
def test_wrong_settings_stop_the_start(setting: Any, words: str) -> None:
    """The message has the setting's name and suggests a correct value."""
    with override_settings(TOLLKEEPER=setting), pytest.raises(ConfigError, match=words):
        RateLimitMiddleware(views.hello)


def test_both_enforcers_of_a_django_site_are_one_node() -> None:
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
    with override_settings(TOLLKEEPER=setting):
        site = site_limits()
        for _ in range(40):
            assert site.enforcer._limiter.check("a").allowed
        leases = store.controlled.leases
        assert 0 < leases <= 10
        assert site.async_enforcer.store is site.enforcer.store
        assert site.async_enforcer._limiter.check("a").allowed
        assert store.controlled.leases <= leases + 1


def test_a_site_without_the_setting_has_no_limits() -> None:
    """The decorators still work."""
    assert not options_of({}).has_limits


def test_an_overridden_setting_is_read_again() -> None:
    """The previous limits are closed, so a site's tests can change the setting."""
    with override_settings(TOLLKEEPER={"limits": "1/minute"}):
        client = Client()
        assert [client.get("/hello").status_code for _ in range(2)] == [200, 429]
        with override_settings(TOLLKEEPER={"limits": "2/minute"}):
            assert [client.get("/hello").status_code for _ in range(3)] == [200, 200, 429]
        assert client.get("/hello").status_code == 200


def test_threads_open_the_limits_once() -> None:
    """This holds even if several threads use them first at the same time."""
    with override_settings(TOLLKEEPER={"limits": "1/minute"}):
        found: list[Any] = []
        barrier = threading.Barrier(8)

        def ask() -> None:
            barrier.wait()
            found.append(site_limits().enforcer)

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


def enforcers() -> tuple[Enforcer, AsyncEnforcer]:
    enforcer = Enforcer(EnforcerOptions(limits="5/minute", name="threads"))
    return enforcer, AsyncEnforcer(
        EnforcerOptions(limits="5/minute", name="loop", store=enforcer.store)
    )


def left(enforcer: Any, request: DjangoWebRequest) -> int:
    return int(enforcer._limiter.peek(enforcer._keys.of(request)).remaining)


async def test_charges_are_settled_from_threads_and_from_the_loop() -> None:
    """Charges of both enforcers are settled in the loop and in a thread."""
    request = DjangoWebRequest(RequestFactory().get("/"))
    both = enforcers()
    for settle in ("in the loop", "in a thread"):
        charges = DjangoCharges(both[0])
        for enforcer in both:
            assert await charges.denial_async(enforcer, request) is None
        charges.refund()
        if settle == "in the loop":
            await charges.settle_async()
        else:
            await asyncio.to_thread(charges.settle)
        assert [left(enforcer, request) for enforcer in both] == [5, 5]


async def test_sync_code_in_the_loop_settles_in_a_task() -> None:
    """It neither blocks the loop nor loses the settlement."""
    done = []

    async def leave() -> None:
        done.append(True)

    run_in_loop(leave())
    assert not done
    await asyncio.gather(*settling)
    assert done
    assert not settling
