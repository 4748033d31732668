"""One application in every framework, for tests whose claim holds in all integrations.

A `RouteSite` has an application with default limits and a few routes with limits of their own. It
is written once, as a table of routes, and built with FastAPI, Starlette, Flask and Django.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

from asgiref.sync import async_to_sync
from django.http import HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path as django_path
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ratekeeper import asgi, django, fastapi, flask
from ratekeeper.testing import ManualClock
from tests.web import django_site
from tests.web.asgi_driver import ask

NOW_S = 1_767_225_600
ALL_METHODS = ["GET", "POST", "PUT", "DELETE"]
FRAMEWORKS = ("fastapi", "starlette", "flask", "django wsgi", "django asgi")


class Answer(NamedTuple):
    """A response: its status, its headers by lower-case name, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes


class Limited(NamedTuple):
    """The limits of a route, and their options."""

    limits: Any
    options: dict[str, Any]


def limit(limits: Any, **options: Any) -> Limited:
    """Return the limits of a route, as the framework's function takes them."""
    return Limited(limits, options)


Routes = Mapping[str, Limited | None]


class RouteSite:
    """An application with routes, built with one framework."""

    def __init__(self, framework: str, routes: Routes, limits: Any = None, **options: Any) -> None:
        self.clock = ManualClock(NOW_S)
        self.served: list[str] = []
        """The paths whose views have run."""
        self.errors: dict[str, Exception] = {}
        """The errors that the views of paths raise."""
        self._stack = ExitStack()
        options = {"clock": self.clock, **options}
        build = getattr(self, f"_{framework.replace(' ', '_')}")
        self._ask: Callable[[str, str, dict[str, str]], Answer] = build(routes, limits, options)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send a request."""
        return self._ask(path, method, headers)

    def statuses(self, *paths: str, method: str = "GET") -> list[int]:
        """Send a request to each path; return the statuses."""
        return [self.ask(path, method).status for path in paths]

    def close(self) -> None:
        """Restore the settings of Django."""
        self._stack.close()

    # ── Frameworks ─────────────────────────────────────────────────────────────────────────────

    def _fastapi(self, routes: Routes, limits: Any, options: dict[str, Any]) -> Any:
        self.app = app = FastAPI()
        self.limit = limit = fastapi.RateLimit(app, limits, **options)
        for path, own in routes.items():
            depends = [] if own is None else [limit(own.limits, **own.options)]
            view = self._plain(path)
            app.add_api_route(path, view, methods=ALL_METHODS, dependencies=depends)
        return self._asgi_asking(app)

    def _starlette(self, routes: Routes, limits: Any, options: dict[str, Any]) -> Any:
        def view(path: str, own: Limited | None) -> Any:
            async def serve(request: Any) -> PlainTextResponse:
                return PlainTextResponse(self._served(path))

            return serve if own is None else asgi.limited(own.limits, **own.options)(_named(serve))

        listed = [Route(path, view(path, own), methods=ALL_METHODS) for path, own in routes.items()]
        self.app = app = Starlette(routes=listed)
        if limits is None and not {"rules", "limiter"} & set(options):
            limits = "1000000/second"  # a middleware without limits is rejected
        app.add_middleware(asgi.RateLimit, limits=limits, **options)
        return self._asgi_asking(app)

    def _flask(self, routes: Routes, limits: Any, options: dict[str, Any]) -> Any:
        self.app = app = Flask("shop")
        self.limit = limit = flask.RateLimit(app, limits, **options)
        for path, own in routes.items():
            view: Any = self._plain(path)
            if own is not None:
                view = limit(own.limits, **own.options)(view)
            app.add_url_rule(path, path.strip("/"), view, methods=ALL_METHODS)
        client = app.test_client()

        def asking(path: str, method: str, headers: dict[str, str]) -> Answer:
            response = client.open(path, method=method, headers=headers)
            found = {name.lower(): value for name, value in response.headers}
            return Answer(response.status_code, found, response.data)

        return asking

    def _django(self, routes: Routes, limits: Any, options: dict[str, Any]) -> None:
        def view(path: str, own: Limited | None) -> Any:
            def serve(request: Any) -> HttpResponse:
                return HttpResponse(self._served(path))

            return serve if own is None else django.rate_limit(own.limits, **own.options)(serve)

        urls = types.ModuleType(f"urls_{next(_numbers)}")
        urls.urlpatterns = [  # type: ignore[attr-defined]  # a module of this test
            django_path(path.lstrip("/"), view(path, own)) for path, own in routes.items()
        ]
        setting = {"limits": limits, **options} if limits is not None else options
        self._stack.enter_context(
            override_settings(RATEKEEPER=setting, MIDDLEWARE=[django_site.OURS], ROOT_URLCONF=urls)
        )

    def _django_wsgi(self, *arguments: Any) -> Any:
        self._django(*arguments)
        return self._django_asking(Client(raise_request_exception=False).generic)

    def _django_asgi(self, *arguments: Any) -> Any:
        self._django(*arguments)
        client = AsyncClient(raise_request_exception=False)

        async def generic(*request: Any, **more: Any) -> Any:
            return await client.generic(*request, **more)

        return self._django_asking(async_to_sync(generic))

    # ── Shared ─────────────────────────────────────────────────────────────────────────────────

    def _django_asking(self, generic: Callable[..., Any]) -> Any:
        def asking(path: str, method: str, headers: dict[str, str]) -> Answer:
            response = generic(method, path, headers=headers)
            found = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status_code, found, response.content)

        return asking

    def _asgi_asking(self, app: Any) -> Any:
        def asking(path: str, method: str, headers: dict[str, str]) -> Answer:
            seen = asyncio.run(ask(app, path, method=method, headers=[*headers.items()]))
            return Answer(seen.status, seen.headers, seen.body)

        return asking

    def _plain(self, path: str) -> Callable[[], str]:
        return lambda: self._served(path)

    def _served(self, path: str) -> str:
        self.served.append(path)
        if path in self.errors:
            raise self.errors[path]
        return path


_numbers = count()


def _named(view: Any) -> Any:
    """Give a view a name of its own: Starlette's counts are named after the function."""
    view.__qualname__ = f"view_{next(_numbers)}"
    return view
