"""What a Django site's settings say of its limits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.test import Client, override_settings

from tests.web import django_site as views
from tollkeeper import AsyncLimiter, ConfigError, Limiter
from tollkeeper.django import RateLimitMiddleware
from tollkeeper.web.django_site import desk, terms_of


def test_a_store_that_is_a_trip_away_is_awaited() -> None:
    """The two guards on one Redis, which is not asked here."""
    with override_settings(TOLLKEEPER={"limits": "9/minute", "store": "redis://127.0.0.1:1"}):
        site = desk()
        assert type(site.guard._limiter) is Limiter
        assert type(site.async_guard._limiter) is AsyncLimiter
        assert site.guard.store is site.async_guard.store


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("100/minute", r"settings\.TOLLKEEPER='100/minute' is not a dict; for example "),
        ({"limit": "1/minute"}, r"has limit; it can have limits, rules, store"),
        ({"limits": "1/fortnight"}, r"settings\.TOLLKEEPER: expected a unit"),
        ({"limiter": None}, "has limiter"),
        ({"skip": "no.such.function"}, "skip='no.such.function' cannot be imported"),
        ({"limits": "1/minute", "store": "carrier-pigeon://"}, "store"),
        ({"limits": "1/minute", "key": "pigeon:7"}, "not a source"),
    ],
)
def test_wrong_settings_stop_the_start(setting: Any, words: str) -> None:
    """With the setting's name and what would be right, before any request."""
    with override_settings(TOLLKEEPER=setting), pytest.raises(ConfigError, match=words):
        RateLimitMiddleware(views.hello)


def test_a_site_without_the_setting_has_no_limits_of_its_own() -> None:
    """The decorators still work."""
    assert not terms_of({}).says_limits


def test_an_overridden_setting_is_read_again_and_closes_what_was_open() -> None:
    """So that a site's own tests can change it."""
    with override_settings(TOLLKEEPER={"limits": "1/minute"}):
        client = Client()
        assert [client.get("/hello").status_code for _ in range(2)] == [200, 429]
        with override_settings(TOLLKEEPER={"limits": "2/minute"}):
            assert [client.get("/hello").status_code for _ in range(3)] == [200, 200, 429]
        assert client.get("/hello").status_code == 200


def test_threads_open_the_limits_once() -> None:
    """However many ask first."""
    with override_settings(TOLLKEEPER={"limits": "1/minute"}):
        found: list[Any] = []
        barrier = threading.Barrier(8)

        def ask() -> None:
            barrier.wait()
            found.append(desk().guard)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1
