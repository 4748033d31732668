"""A Django site: its settings, its requests, and charges in threads and in the event loop."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIRequest
from django.test import Client, RequestFactory, override_settings

from ratekeeper import AsyncLimiter, ConfigError, Fleet, Limiter
from ratekeeper.core.rates import limits_of
from ratekeeper.django import RateLimitMiddleware
from ratekeeper.testing import ManualClock
from ratekeeper.web import django_site
from ratekeeper.web.django_site import (
    DjangoCharges,
    DjangoWebRequest,
    options_of,
    run_in_loop,
    settling,
    site_limits,
    template_of,
)
from ratekeeper.web.enforcer import AsyncEnforcer, Enforcer
from ratekeeper.web.options import EnforcerOptions
from tests.fleet.nodes import SharedStore
from tests.web import django_site as views


def test_a_remote_store_is_awaited() -> None:
    """The two enforcers share one Redis, which is not called here."""
    with override_settings(RATEKEEPER={"limits": "9/minute", "store": "redis://127.0.0.1:1"}):
        site = site_limits()
        assert type(site.enforcer._limiter) is Limiter
        assert type(site.async_enforcer._limiter) is AsyncLimiter
        assert site.enforcer.store is site.async_enforcer.store


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("100/minute", r"settings\.RATEKEEPER='100/minute' is not a dict; for example "),
        (
            {"limit": "1/minute"},
            r"has no option limit \(did you mean limits\?\); the options are limits, rules, store",
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
    with override_settings(RATEKEEPER=setting):
        site = site_limits()
        for _ in range(40):
            assert site.enforcer._limiter.check("a").allowed
        leases = store.controlled.leases
        assert 0 < leases <= 10
        assert site.async_enforcer.store is site.enforcer.store
        assert asyncio.run(site.async_enforcer._limiter.check("a")).allowed
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


URLS = """
from django.http import HttpResponse
from django.urls import path
from ratekeeper.django import rate_limit


@rate_limit("9/minute", override_defaults=True)
def own(request):
    return HttpResponse("own")


urlpatterns = [path("own", own)]
"""


def test_the_first_request_knows_the_views_that_override_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django loads the views of a site with its first request, after the middleware has run."""
    (tmp_path / "urls_of_a_first_request.py").write_text(URLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(django_site, "_overriding", set())
    setting = {"limits": "1/minute", "clock": ManualClock(1_000), "name": "all"}
    with override_settings(
        RATEKEEPER=setting, ROOT_URLCONF="urls_of_a_first_request", MIDDLEWARE=[views.OURS]
    ):
        policies = Client().get("/own").headers["RateLimit-Policy"]
    assert policies == '"/own";q=9;w=60'


CLASS_URLS = """
from django.http import HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from ratekeeper.django import rate_limit


@method_decorator(rate_limit("3/minute", override_defaults=True), name="dispatch")
class Own(View):
    def get(self, request):
        return HttpResponse("own")


urlpatterns = [path("own", Own.as_view())]
"""


def test_every_request_knows_a_class_that_overrides_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: `method_decorator` drops the function that was decorated, and its mark was lost."""
    (tmp_path / "urls_of_one_class.py").write_text(CLASS_URLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(django_site, "_overriding", set())
    setting = {"limits": "1/minute", "clock": ManualClock(1_000)}
    with override_settings(
        RATEKEEPER=setting, ROOT_URLCONF="urls_of_one_class", MIDDLEWARE=[views.OURS]
    ):
        client = Client()
        assert [client.get("/own").status_code for _ in range(4)] == [200, 200, 200, 429]


CONVERTER_URLS = """
from django.http import HttpResponse
from django.urls import path, register_converter
from ratekeeper.django import rate_limit


class Failing:
    regex = "[0-9]+"

    def to_python(self, value):
        raise OverflowError


register_converter(Failing, "failing")


@rate_limit("9/minute", override_defaults=True)
def own(request, number):
    return HttpResponse("own")


urlpatterns = [path("own/<failing:number>", own)]
"""


def test_a_path_that_cannot_be_resolved_is_counted_by_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: an error of a path converter, which Django answers with a 500, went uncounted."""
    (tmp_path / "urls_of_a_converter.py").write_text(CONVERTER_URLS)
    monkeypatch.syspath_prepend(tmp_path)
    setting = {"limits": "1/minute", "clock": ManualClock(1_000)}
    with override_settings(
        RATEKEEPER=setting, ROOT_URLCONF="urls_of_a_converter", MIDDLEWARE=[views.OURS]
    ):
        client = Client(raise_request_exception=False)
        assert [client.get("/own/7").status_code for _ in range(2)] == [500, 429]
