"""The migration guides: both programs of each answer alike, and every difference is as they say.

`examples/migrate/LIBRARY/before.py` runs on the library that the guide leaves, `after.py` on
Ratekeeper. The same requests go to both. The tests below that show the differences which the guides
state in numbers, each on the real library and on Ratekeeper.

Time stands still, or moves with `clocks.advance`: `time.time`, which the libraries read, and
Ratekeeper's clock move together. So no window ends between two requests of a test.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import flask_limiter
import httpx
import limits
import pyrate_limiter
import pytest
import slowapi
import slowapi.errors
import slowapi.middleware
import slowapi.util
import throttled
import throttled.contrib.flask as throttled_flask
from django.core.cache import cache
from django.core.cache.backends.locmem import LocMemCache
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django_ratelimit.core import get_usage
from django_ratelimit.decorators import ratelimit
from fastapi import Depends, FastAPI, Request, Response
from fastapi_limiter.depends import RateLimiter as FastApiLimiter
from flask import Blueprint, Flask
from flask import request as flask_request
from flask_limiter.util import get_remote_address

import ratekeeper.fastapi as fastapi_ours
import ratekeeper.flask as flask_ours
from ratekeeper import CapacityError, ConfigError, Limiter, StoreUnavailable, parse_limits
from ratekeeper.django import rate_limit
from ratekeeper.testing import ManualClock, use_clock
from ratekeeper.web.answers import Style
from tests.web import django_site  # noqa: F401 - it configures Django for all tests of a process
from tests.web.asgi_driver import scope_of

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "migrate"
NOON = 1_767_268_800  # 2026-01-01T12:00:00Z: a whole minute, hour and half a day
CLIENT = "192.0.2.1"
OTHER = "192.0.2.2"


class Clocks:
    """The wall clock that the other libraries read, and the clock of Ratekeeper."""

    def __init__(self) -> None:
        self.ours = ManualClock(start=NOON)

    def wall_time(self) -> float:
        return self.ours.now_ns() / 10**9

    def advance(self, seconds: float) -> None:
        self.ours.advance(seconds)


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    """Stop both clocks at noon; a test may advance them."""
    both = Clocks()
    monkeypatch.setattr(time, "time", both.wall_time)
    with use_clock(both.ours):
        yield both


@dataclass(frozen=True)
class Ask:
    """One request of a client."""

    path: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    address: str = CLIENT


@dataclass(frozen=True)
class Answer:
    """The parts of a response that all frameworks have."""

    status: int
    body: bytes
    headers: Mapping[str, str]


Send = Callable[[Ask], Answer]


def flask_sender(app: Any) -> Send:
    """Return a function that sends requests to a Flask application."""

    def send(ask: Ask) -> Answer:
        response = app.test_client().open(
            ask.path,
            method=ask.method,
            headers=ask.headers,
            data=ask.form or None,
            environ_base={"REMOTE_ADDR": ask.address},
        )
        return Answer(response.status_code, response.data, dict(response.headers))

    return send


def asgi_sender(app: Any) -> Send:
    """Return a function that sends requests to an ASGI application."""

    async def respond(ask: Ask) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(ask.address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            return await client.request(ask.method, ask.path, headers=ask.headers)

    def send(ask: Ask) -> Answer:
        response = asyncio.run(respond(ask))
        return Answer(response.status_code, response.content, dict(response.headers))

    return send


def django_sender() -> Send:
    """Return a function that sends requests to the Django site of the current settings."""
    client = Client(raise_request_exception=False)

    def send(ask: Ask) -> Answer:
        call = getattr(client, ask.method.lower())
        more = {"data": ask.form} if ask.form else {}
        response = call(ask.path, headers=ask.headers, REMOTE_ADDR=ask.address, **more)
        return Answer(response.status_code, response.content, dict(response.headers))

    return send


def statuses(send: Send, asks: Sequence[Ask]) -> list[int]:
    return [send(ask).status for ask in asks]


def admitted(send: Send, path: str, times: int = 4, **more: Any) -> int:
    """Return how many of some equal requests were not denied."""
    return sum(send(Ask(path, **more)).status not in {403, 429} for _ in range(times))


def load(library: str, which: str) -> ModuleType:
    """Return a fresh copy of a program."""
    name = f"migrate_{library}_{which}"
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / library / f"{which}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Django imports it by name
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------ the programs

# Each route of a program: the requests to it, and the statuses that both programs answer.
Scenario = tuple[list[Ask], list[int]]

PRO = {"X-Plan": "pro", "X-API-Key": "pro-1"}
FREE = {"X-Plan": "free", "X-API-Key": "sk-2"}
INTERNAL = {"X-Internal": "yes"}

HOME: Scenario = (
    [Ask("/")] * 5 + [Ask("/", address=OTHER)] * 5,
    [200, 200, 200, 200, 429] * 2,
)
ORDERS: Scenario = ([Ask(f"/orders/{number}") for number in range(5)], [200] * 4 + [429])
SEARCH: Scenario = ([Ask("/search")] * 7, [200] * 6 + [429])
SUGGEST: Scenario = ([Ask("/suggest")] * 6, [200] * 4 + [429] * 2)
MESSAGES: Scenario = (
    [Ask(path, "POST") for path in ("/mail", "/sms", "/mail", "/sms", "/mail")]
    + [Ask("/sms", "POST", address=OTHER)],
    [200, 200, 200, 429, 429, 200],
)
TOOLS: Scenario = (
    [Ask("/tools")] * 2 + [Ask("/tools", headers=INTERNAL)] * 6,
    [200, 429] + [200] * 6,
)
EXPORT: Scenario = ([Ask("/export")] * 3, [200, 200, 429])
HEALTH: Scenario = ([Ask("/health")] * 6, [200] * 6)
NOTES_POST = [Ask("/notes", "POST")] * 3

FLASK: dict[str, Scenario] = {
    "a default limit": HOME,
    "a path parameter": ORDERS,
    "a route's limit replaces the default": SEARCH,
    "a route's limit adds to the default": SUGGEST,
    "methods": (NOTES_POST + [Ask("/notes")] * 5, [200, 200, 429] + [200] * 4 + [429]),
    "dynamic limits, by key": (
        [Ask("/report", headers=PRO)] * 4 + [Ask("/report", headers=FREE)] * 2,
        [200, 200, 200, 429, 200, 429],
    ),
    "a shared limit": MESSAGES,
    "exempt_when": TOOLS,
    "only failures count": (
        [Ask("/login", "POST", form={"password": word}) for word in ("horse", "a", "horse", "b")]
        + [Ask("/login", "POST", form={"password": "horse"})],
        [200, 401, 200, 401, 429],
    ),
    "a cost": EXPORT,
    "an exempt route": HEALTH,
    "a blueprint": ([Ask("/admin/users")] * 3, [200, 200, 429]),
}
SLOWAPI: dict[str, Scenario] = {
    "a default limit": HOME,
    "a path parameter": ORDERS,
    "a route's limit replaces the default": SEARCH,
    "a route's limit adds to the default": SUGGEST,
    "methods": (NOTES_POST + [Ask("/notes")] * 4, [200, 200, 429] + [200] * 4),
    "dynamic limits, by key": (
        [Ask("/report", headers=PRO)] * 4 + [Ask("/report", headers=FREE, address=OTHER)] * 2,
        [200, 200, 200, 429, 200, 429],
    ),
    "a shared limit": MESSAGES,
    "exempt_when": (
        [Ask("/tools")] * 2 + [Ask("/tools", headers=INTERNAL)] * 4,
        [200, 429] + [200] * 4,
    ),
    "a cost": EXPORT,
    "an exempt route": HEALTH,
}
FASTAPI_LIMITER: dict[str, Scenario] = {
    "a route without a limit": ([Ask("/")] * 5, [200] * 5),
    "a route's limit": (
        [Ask("/search")] * 5 + [Ask("/search", address=OTHER)] * 5,
        [200, 200, 200, 200, 429] * 2,
    ),
    "a path parameter": ([Ask(f"/orders/{number}") for number in range(3)], [200, 200, 429]),
    "a limit for all clients": (
        [Ask("/everyone")] * 2 + [Ask("/everyone", address=OTHER)] * 2,
        [200, 200, 200, 429],
    ),
    "by key": (
        [Ask("/report", headers=PRO)] * 2 + [Ask("/report", headers=FREE)] * 2,
        [200, 429, 200, 429],
    ),
    "two limits": ([Ask("/both")] * 3, [200, 200, 429]),
    "a callback": ([Ask("/mail", "POST")] * 2, [200, 429]),
    "a skipped route": HEALTH,
}
DJANGO: dict[str, Scenario] = {
    "a view without a limit": ([Ask("/")] * 5, [200] * 5),
    "a path parameter": ORDERS,
    "methods": (NOTES_POST + [Ask("/notes")] * 5, [200, 200, 429] + [200] * 5),
    "dynamic limits, by key": (
        [Ask("/report", headers=PRO)] * 4
        + [Ask("/report", headers=FREE)] * 2
        + [Ask("/report", headers={"X-Plan": "unlimited"})] * 5,
        [200, 200, 200, 429, 200, 429] + [200] * 5,
    ),
    "a group": MESSAGES,
    "two limits": (
        [Ask("/login", "POST", form={"user": user}) for user in ("ada", "ada", "ada", "bob")],
        [200, 200, 429, 200],
    ),
    "without blocking": ([Ask("/news")] * 3, [200, 200, 203]),
    "a class": ([Ask("/yearly")] * 3, [200, 200, 429]),
}
THROTTLED: dict[str, Scenario] = {
    "a default limit, by key": (
        [Ask("/search", headers=PRO)] * 5 + [Ask("/search", headers=FREE)] * 5,
        [200, 200, 200, 200, 429] * 2,
    ),
    "a path parameter": (
        [Ask(f"/orders/{number}", headers=PRO) for number in range(3)],
        [200, 200, 429],
    ),
    "a view without a limit": HEALTH,
}
SCENARIOS = {
    "flask_limiter": FLASK,
    "slowapi": SLOWAPI,
    "fastapi_limiter": FASTAPI_LIMITER,
    "django_ratelimit": DJANGO,
    "throttled_py": THROTTLED,
}
SLOW_DOWN = {
    "flask_limiter": Ask("/search"),
    "slowapi": Ask("/search"),
    "fastapi_limiter": Ask("/mail", "POST"),
    "django_ratelimit": Ask("/yearly"),
    "throttled_py": Ask("/search", headers=PRO),
}


@pytest.fixture(params=sorted(SCENARIOS))
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["before", "after"])
def send(request: pytest.FixtureRequest, library: str) -> Iterator[Send]:
    """Return a function that sends requests to a fresh copy of a program."""
    program = load(library, request.param)
    if library == "django_ratelimit":
        cache.clear()
        with override_settings(**{"MIDDLEWARE": [], **program.SETTINGS}):
            yield django_sender()
    elif hasattr(program.app, "wsgi_app"):
        yield flask_sender(program.app)
    else:
        yield asgi_sender(program.app)


def test_both_programs_answer_alike(send: Send, library: str) -> None:
    """The same requests to every route get the same statuses before and after."""
    expected = {name: found for name, (_, found) in SCENARIOS[library].items()}
    assert {
        name: statuses(send, asks) for name, (asks, _) in SCENARIOS[library].items()
    } == expected


def test_both_programs_answer_a_denial_by_their_own_handler(send: Send, library: str) -> None:
    """The error handler, exception handler or callback makes the same 429 before and after."""
    denied = [answer for answer in map(send, [SLOW_DOWN[library]] * 7) if answer.status == 429]
    assert b"slow down" in denied[0].body
    assert len({answer.body for answer in denied}) == 1


@pytest.mark.parametrize("which", ["before", "after"])
def test_functions_behave_alike(which: str) -> None:
    """Checks with a cost, a peek, a decorator, a block and async code, before and after."""
    program = load("throttled_py", which)
    assert [program.sign_up("ada@shop.test") for _ in range(4)] == [True, True, True, False]
    exported = [program.export("ada", rows) for rows in (4, 4, 4, 2)]
    assert exported == [(True, 6), (True, 2), (False, 2), (True, 0)]
    assert (program.rows_left("ada"), program.rows_left("bob")) == (0, 10)
    assert [program.send_newsletter() for _ in range(3)] == ["sent", "sent", "later"]
    assert [program.charge_card("ada") for _ in range(2)] == ["charged", "declined"]

    async def fetched() -> list[bool]:
        return [await program.fetch("shop.test") for _ in range(3)]

    assert asyncio.run(fetched()) == [True, True, False]


@pytest.mark.parametrize("which", ["before", "after"])
def test_messages_of_a_websocket_are_limited_alike(which: str) -> None:
    """The third message over one connection gets the answer of a client that is too fast."""
    program = load("fastapi_limiter", which)
    incoming: list[dict[str, Any]] = [{"type": "websocket.connect"}]
    incoming += [{"type": "websocket.receive", "text": text} for text in "abc"]
    incoming.append({"type": "websocket.disconnect", "code": 1000})
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message.get("text"))

    scope = scope_of("/chat", kind="websocket", subprotocols=[])
    asyncio.run(program.app(scope, receive, send))
    assert sent == [None, "A", "B", "slow down"]


GUIDES = {library: ROOT / f"docs/migrate/{library.replace('_', '-')}.md" for library in SCENARIOS}
RATE = re.compile(r'"(\d+(?:/| per )[^"]*)"')


def test_a_guide_leads_to_both_programs(library: str) -> None:
    """The guide of each library links to its programs, and the index links to the guide."""
    text = GUIDES[library].read_text(encoding="utf-8")
    for which in ("before", "after"):
        assert f"[{which}.py](../../examples/migrate/{library}/{which}.py)" in text
    index = GUIDES[library].with_name("index.md").read_text(encoding="utf-8")
    assert f"]({GUIDES[library].name})" in index


def test_the_rates_that_a_guide_proposes_are_rates(library: str) -> None:
    """Every rate in the last column of the concepts can be parsed."""
    text = GUIDES[library].read_text(encoding="utf-8")
    ours = [line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| ")]
    rates = [rate for cell in ours for rate in RATE.findall(cell)]
    assert len(rates) >= 4
    for rate in rates:
        parse_limits(rate)


# ---------------------------------------------------------------- differences: Flask-Limiter

FLASK_CLIENTS = ("/first", "/second", "/third")


def theirs_on_flask(**options: Any) -> tuple[Flask, flask_limiter.Limiter]:
    """Return an application with Flask-Limiter, which counts by address in memory."""
    app = Flask(__name__)
    options = {"storage_uri": "memory://", **options}
    return app, flask_limiter.Limiter(get_remote_address, app=app, **options)


def ours_on_flask(limits: Any = None, **options: Any) -> tuple[Flask, flask_ours.RateLimit]:
    """Return an application with Ratekeeper."""
    app = Flask(__name__)
    return app, flask_ours.RateLimit(app, limits, **options)


def with_views(app: Flask, **limited: Any) -> Send:
    """Add a view for each name, below its decorator if it has one; return the sender."""
    for name, decorate in limited.items():

        def view(name: str = name) -> str:
            return name

        view.__name__ = view.__qualname__ = name
        app.get(f"/{name}")(decorate(view) if decorate else view)
    return flask_sender(app)


def test_flask_limiter_counts_defaults_by_view_and_a_view_replaces_them() -> None:
    """With default 2 and a view at 5, it admits 4, 2, 2 of 4; Ratekeeper's defaults 2, 0, 0."""
    app, limiter = theirs_on_flask(default_limits=["2/day"])
    send = with_views(app, first=limiter.limit("5/day"), second=None, third=None)
    assert [admitted(send, path) for path in FLASK_CLIENTS] == [4, 2, 2]

    app, limit = ours_on_flask("2/day")
    send = with_views(app, first=limit("5/day"), second=None, third=None)
    assert [admitted(send, path) for path in FLASK_CLIENTS] == [2, 0, 0]

    app, limit = ours_on_flask("2/day", per_route=True)
    replaced = lambda view: limit.exempt(limit("5/day")(view))  # noqa: E731 - short
    send = with_views(app, first=replaced, second=None, third=None)
    assert [admitted(send, path) for path in FLASK_CLIENTS] == [4, 2, 2]


def test_limits_of_the_application_and_defaults_work_together() -> None:
    """5/day in all, a default of 2/day and a view at 4/day admit 4, 1, 0 of 4 in both."""
    app, limiter = theirs_on_flask(application_limits=["5/day"], default_limits=["2/day"])
    send = with_views(app, first=limiter.limit("4/day"), second=None, third=None)
    assert [admitted(send, path) for path in FLASK_CLIENTS] == [4, 1, 0]

    app, _ = ours_on_flask("5/day")
    limit = flask_ours.RateLimit(app, "2/day", per_route=True, name="each")
    replaced = lambda view: limit.exempt(limit("4/day")(view))  # noqa: E731 - short
    send = with_views(app, first=replaced, second=None, third=None)
    assert [admitted(send, path) for path in FLASK_CLIENTS] == [4, 1, 0]


def test_a_key_with_the_method_is_per_method() -> None:
    """GET and POST of one view at 2/day admit 2 and 2 of 4 in both."""

    def both(app: Flask, decorate: Any) -> list[int]:
        def page() -> str:
            return "page"

        app.route("/page", methods=["GET", "POST"])(decorate(page))
        return [admitted(flask_sender(app), "/page", method=method) for method in ("GET", "POST")]

    app, limiter = theirs_on_flask()
    assert both(app, limiter.limit("2/day", per_method=True)) == [2, 2]
    app, limit = ours_on_flask()
    by_method = limit("2/day", key=lambda request: (request.address or "", request.method))
    assert both(app, by_method) == [2, 2]


def test_flask_limiter_does_not_apply_the_default_if_a_limit_is_exempt() -> None:
    """With default 2/day, 6 of 6 exempt requests pass there; here 2, or 6 if the view is exempt."""

    def always() -> bool:
        return True

    app, limiter = theirs_on_flask(default_limits=["2/day"])
    send = with_views(app, home=limiter.limit("1/day", exempt_when=always))
    assert admitted(send, "/home", 6) == 6
    app, limit = ours_on_flask("2/day", per_route=True)
    kept = limit("1/day", skip=always)
    send = with_views(app, home=kept, exempt=lambda view: limit.exempt(kept(view)))
    assert [admitted(send, "/home", 6), admitted(send, "/exempt", 6)] == [2, 6]


def test_flask_limiter_starts_a_window_with_its_first_request(clocks: Clocks) -> None:
    """2/minute, used up at 12:00:50, has room at 12:01:50; ours at 12:01:00 or at 12:01:20."""
    senders = {}
    for name, rate in {"fixed": "2/minute fixed_window", "bucket": "2/minute"}.items():
        app, limit = ours_on_flask()
        senders[name] = with_views(app, home=limit(rate))
    app, limiter = theirs_on_flask()
    senders["theirs"] = with_views(app, home=limiter.limit("2/minute"))
    clocks.advance(50)
    for send in senders.values():
        assert statuses(send, [Ask("/home")] * 3) == [200, 200, 429]
    found = {}
    for second in range(60, 115):
        clocks.advance(10 if second == 60 else 1)
        for name, send in senders.items():
            if name not in found and send(Ask("/home")).status == 200:
                found[name] = second
    assert found == {"fixed": 60, "bucket": 80, "theirs": 110}


def test_flask_limiter_spends_the_other_limits_of_a_denied_request() -> None:
    """Three requests that one limit denies use up another; Ratekeeper charges all or none."""
    app, limiter = theirs_on_flask()
    both = limiter.shared_limit("4/hour", scope="api")
    send = with_views(app, first=lambda view: both(limiter.limit("1/day")(view)), second=both)
    assert [admitted(send, "/first"), admitted(send, "/second")] == [1, 0]

    app, limit = ours_on_flask()
    shared = limit("4/hour", name="api")
    send = with_views(app, first=lambda view: shared(limit("1/day")(view)), second=shared)
    assert [admitted(send, "/first"), admitted(send, "/second")] == [1, 3]


def test_flask_limiter_deducts_after_the_response() -> None:
    """Of two guesses at the same time, 1/day with deduct_when admits both; `count` admits one."""

    def nested(app: Flask, decorate: Any) -> list[int]:
        found: list[int] = []

        @app.post("/login")
        @decorate
        def login() -> tuple[str, int]:
            # The second request arrives while the first is served.
            if not flask_request.headers.get("X-Second"):
                second = Ask("/login", "POST", headers={"X-Second": "yes"})
                found.append(flask_sender(app)(second).status)
            return "wrong", 401

        found.append(flask_sender(app)(Ask("/login", "POST")).status)
        return found

    app, limiter = theirs_on_flask()
    decorate = limiter.limit("1/day", deduct_when=lambda response: response.status_code == 401)
    assert nested(app, decorate) == [401, 401]
    app, limit = ours_on_flask()
    assert nested(app, limit("1/day", count=lambda status: status == 401)) == [429, 401]


def test_flask_limiter_does_not_limit_an_empty_key() -> None:
    """Without the header all 4 requests at 2/day pass; Ratekeeper counts them as one client."""
    app, limiter = theirs_on_flask()
    by_key = limiter.limit("2/day", key_func=lambda: flask_request.headers.get("X-API-Key", ""))
    assert admitted(with_views(app, home=by_key), "/home") == 4
    app, limit = ours_on_flask()
    assert admitted(with_views(app, home=limit("2/day", key="header:X-API-Key")), "/home") == 2


def test_an_ipv6_network_is_one_client_for_ratekeeper_only() -> None:
    """At 2/day, four addresses of one /64 get 8 of 8 from Flask-Limiter and 2 from Ratekeeper."""

    def from_one_network(send: Send) -> int:
        hosts = [f"2001:db8::{number}" for number in range(1, 5)]
        return sum(admitted(send, "/home", times=2, address=host) for host in hosts)

    app, limiter = theirs_on_flask()
    assert from_one_network(with_views(app, home=limiter.limit("2/day"))) == 8
    app, limit = ours_on_flask()
    assert from_one_network(with_views(app, home=limit("2/day"))) == 2


def test_flask_limiter_counts_each_view_of_a_blueprint() -> None:
    """2/day on a blueprint of two views admits 2 and 2 of 4; Ratekeeper 2 and 0 in all."""

    def blueprint_of(app: Flask, decorate: Any) -> list[int]:
        admin = Blueprint("admin", __name__)
        for name in ("users", "orders"):
            admin.get(f"/{name}", endpoint=name)(lambda: "seen")
        decorate(admin)
        app.register_blueprint(admin)
        return [admitted(flask_sender(app), path) for path in ("/users", "/orders")]

    app, limiter = theirs_on_flask()
    assert blueprint_of(app, limiter.limit("2/day")) == [2, 2]
    app, limit = ours_on_flask()
    assert blueprint_of(app, limit("2/day")) == [2, 0]


def test_flask_limiter_does_not_count_pages_that_do_not_exist() -> None:
    """Of 4 requests to an unknown path, limits of 2/day deny none there and 2 here."""
    for options in ({"default_limits": ["2/day"]}, {"application_limits": ["2/day"]}):
        app, _ = theirs_on_flask(**options)
        assert statuses(flask_sender(app), [Ask("/missing")] * 4) == [404] * 4
    app, _ = ours_on_flask("2/day")
    assert statuses(flask_sender(app), [Ask("/missing")] * 4) == [404, 404, 429, 429]
    app, _ = ours_on_flask("2/day", skip=lambda request: request.route is None)
    assert statuses(flask_sender(app), [Ask("/missing")] * 4) == [404] * 4


def test_flask_limiter_exempts_a_view_from_its_own_limit() -> None:
    """An exempt view at 1/day gets 4 of 4 there and 1 here, where its own limit remains."""
    app, limiter = theirs_on_flask(default_limits=["2/day"])
    send = with_views(app, home=lambda view: limiter.exempt(limiter.limit("1/day")(view)))
    assert admitted(send, "/home") == 4
    app, limit = ours_on_flask("2/day")
    send = with_views(app, home=lambda view: limit.exempt(limit("1/day")(view)))
    assert admitted(send, "/home") == 1


def test_flask_limiter_without_its_store_answers_500() -> None:
    """The same request passes with Ratekeeper, or is a 503 with on_failure="closed"."""
    app, limiter = theirs_on_flask(storage_uri="redis://127.0.0.1:1")
    assert with_views(app, home=limiter.limit("2/day"))(Ask("/home")).status == 500
    swallowing = {"storage_uri": "redis://127.0.0.1:1", "swallow_errors": True}
    app, limiter = theirs_on_flask(**swallowing)
    assert with_views(app, home=limiter.limit("2/day"))(Ask("/home")).status == 200
    app, limit = ours_on_flask(store="redis://127.0.0.1:1")
    send = with_views(app, home=limit("2/day"), login=limit("2/day", on_failure="closed"))
    assert (send(Ask("/home")).status, send(Ask("/login")).status) == (200, 503)


def test_flask_limiter_sends_no_headers_by_default() -> None:
    """Ratekeeper sends them on every response, and Retry-After on denials only."""
    names = {"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "Retry-After"}
    app, limiter = theirs_on_flask()
    send = with_views(app, home=limiter.limit("1/day"))
    served, denied = send(Ask("/home")), send(Ask("/home"))
    assert not names & (set(served.headers) | set(denied.headers))
    assert denied.headers["Content-Type"].startswith("text/html")
    assert b"1 per 1 day" in denied.body
    app, limiter = theirs_on_flask(headers_enabled=True)
    assert names <= set(with_views(app, home=limiter.limit("1/day"))(Ask("/home")).headers)

    app, limit = ours_on_flask()
    send = with_views(app, home=limit("1/day"))
    served, denied = send(Ask("/home")), send(Ask("/home"))
    assert names - set(served.headers) == {"Retry-After"}
    assert names <= set(denied.headers)
    assert denied.headers["Content-Type"] == "application/problem+json"

    app, limit = ours_on_flask(style=Style(draft=None, legacy=False, node=""))
    headers = with_views(app, home=limit("1/day"))(Ask("/home")).headers
    assert not [name for name in headers if "ratelimit" in name.lower()]


def test_flask_limiter_counts_a_view_and_ratekeeper_a_url_rule() -> None:
    """One view with two rules has one count of 2 there; with per_route each rule has its own."""

    def two_rules(app: Flask) -> list[int]:
        app.get("/old")(app.get("/new")(lambda: "page"))
        return [admitted(flask_sender(app), path) for path in ("/old", "/new")]

    app, _ = theirs_on_flask(default_limits=["2/day"])
    assert two_rules(app) == [2, 0]
    app, _ = ours_on_flask("2/day", per_route=True)
    assert two_rules(app) == [2, 2]


def test_flask_limiter_accepts_a_cost_that_never_fits() -> None:
    """A cost of 5 in 4/day is a 429 for ever there; here it is an error at the start, or a 422."""
    app, limiter = theirs_on_flask()
    assert admitted(with_views(app, home=limiter.limit("4/day", cost=5)), "/home") == 0
    app, limit = ours_on_flask()
    with pytest.raises(ConfigError, match="cost=5 never fits"):
        limit("4/day", cost=5)
    assert with_views(app, home=limit("4/day", cost=lambda request: 5))(Ask("/home")).status == 422


def test_a_year_of_limits_has_360_days() -> None:
    """In Ratekeeper it has 365; a month has 30 days in both, and a week exists only here."""
    years = [limits.parse("1/year").get_expiry(), limits.parse("1/month").get_expiry()]
    assert [seconds // 86_400 for seconds in years] == [360, 30]
    ours = parse_limits("1/year; 1/month; 1/week")
    assert [limit.window_ns // (86_400 * 10**9) for limit in ours] == [365, 30, 7]
    with pytest.raises(ValueError, match="week"):
        limits.parse("1/week")


# ---------------------------------------------------------------------- differences: slowapi


def theirs_on_fastapi(**options: Any) -> tuple[FastAPI, slowapi.Limiter]:
    """Return an application with slowapi and its middleware."""
    app = FastAPI()
    app.state.limiter = limiter = slowapi.Limiter(
        key_func=slowapi.util.get_remote_address, **options
    )
    app.add_exception_handler(
        slowapi.errors.RateLimitExceeded, cast("Any", slowapi._rate_limit_exceeded_handler)
    )
    app.add_middleware(slowapi.middleware.SlowAPIMiddleware)
    return app, limiter


def ours_on_fastapi(limits: Any = None, **options: Any) -> tuple[FastAPI, fastapi_ours.RateLimit]:
    """Return an application with Ratekeeper."""
    app = FastAPI()
    return app, fastapi_ours.RateLimit(app, limits, **options)


def test_slowapi_counts_each_path_of_a_route() -> None:
    """At 2/day, four orders pass there and two here; key_style="endpoint" does as Ratekeeper."""

    def orders(app: FastAPI, limiter: slowapi.Limiter) -> int:
        @app.get("/orders/{number}")
        @limiter.limit("2/day")
        async def order(request: Request, number: int) -> int:
            return number

        send = asgi_sender(app)
        return sum(admitted(send, f"/orders/{number}", times=1) for number in range(4))

    assert orders(*theirs_on_fastapi()) == 4
    assert orders(*theirs_on_fastapi(key_style="endpoint")) == 2
    app, limit = ours_on_fastapi()
    app.get("/orders/{number}", dependencies=[limit("2/day")])(lambda number: number)
    assert sum(admitted(asgi_sender(app), f"/orders/{number}", times=1) for number in range(4)) == 2


def test_slowapi_shares_a_count_between_methods_of_a_path() -> None:
    """GET and POST of /items at 2/day get 2 and 0 of 4 there; here 2 and 2."""
    app, limiter = theirs_on_fastapi()

    @app.get("/items")
    @limiter.limit("2/day")
    async def listed(request: Request) -> str:
        return "list"

    @app.post("/items")
    @limiter.limit("2/day")
    async def made(request: Request) -> str:
        return "made"

    send = asgi_sender(app)
    assert [admitted(send, "/items"), admitted(send, "/items", method="POST")] == [2, 0]

    app, limit = ours_on_fastapi()
    app.get("/items", dependencies=[limit("2/day")])(lambda: "list")
    app.post("/items", dependencies=[limit("2/day")])(lambda: "made")
    send = asgi_sender(app)
    assert [admitted(send, "/items"), admitted(send, "/items", method="POST")] == [2, 2]

    app, _ = ours_on_fastapi("2/day", per_route=True)
    app.get("/items")(lambda: "list")
    app.post("/items")(lambda: "made")
    send = asgi_sender(app)
    assert [admitted(send, "/items"), admitted(send, "/items", method="POST")] == [2, 0]


def test_slowapi_without_its_store_answers_500() -> None:
    """The same request passes with Ratekeeper, or is a 503 with on_failure="closed"."""
    app, limiter = theirs_on_fastapi(storage_uri="redis://127.0.0.1:1")

    @app.get("/home")
    @limiter.limit("2/day")
    async def home(request: Request) -> str:
        return "home"

    assert asgi_sender(app)(Ask("/home")).status == 500
    app, limit = ours_on_fastapi(store="redis://127.0.0.1:1")
    app.get("/home", dependencies=[limit("2/day")])(lambda: "home")
    app.get("/login", dependencies=[limit("2/day", on_failure="closed")])(lambda: "in")
    send = asgi_sender(app)
    assert [send(Ask("/home")).status, send(Ask("/login")).status] == [200, 503]


def test_slowapi_keeps_the_default_for_limits_from_a_function() -> None:
    """With default 2/day, a route at 4/day gets 4 of 4, and 2 if a function returns the 4/day."""
    found = []
    for limit_value in ("4/day", lambda: "4/day"):
        app, limiter = theirs_on_fastapi(default_limits=["2/day"])

        @app.get("/home")
        @limiter.limit(limit_value)
        async def home(request: Request) -> str:
            return "home"

        found.append(admitted(asgi_sender(app), "/home"))
    assert found == [4, 2]


def test_slowapi_does_not_apply_the_default_to_other_methods() -> None:
    """A GET of a route with a limit of POST gets 6 of 6 with default 2/day there, and 2 here."""
    app, limiter = theirs_on_fastapi(default_limits=["2/day"])

    @app.get("/home")
    @limiter.limit("1/day", methods=["POST"])
    async def home(request: Request) -> str:
        return "home"

    @app.get("/exempt")
    @limiter.limit("1/day", exempt_when=lambda: True)
    async def exempt(request: Request) -> str:
        return "exempt"

    send = asgi_sender(app)
    assert [admitted(send, "/home", 6), admitted(send, "/exempt", 6)] == [6, 6]

    app, limit = ours_on_fastapi("2/day", per_route=True)
    of_posts = limit("1/day", methods=["POST"])
    app.get("/home", dependencies=[of_posts])(lambda: "home")
    never = limit("1/day", skip=lambda: True)
    app.get("/exempt", dependencies=[never])(lambda: "exempt")
    send = asgi_sender(app)
    assert [admitted(send, "/home", 6), admitted(send, "/exempt", 6)] == [2, 2]


def test_slowapi_does_not_count_limited_routes_for_the_application() -> None:
    """application_limits of 3/day admit 4 of 4 on a route at 9/day; Ratekeeper's limits 3."""
    app, limiter = theirs_on_fastapi(application_limits=["3/day"])

    @app.get("/home")
    @limiter.limit("9/day")
    async def home(request: Request) -> str:
        return "home"

    app.get("/other")(lambda: "other")
    send = asgi_sender(app)
    assert [admitted(send, "/home"), admitted(send, "/other")] == [4, 3]

    app, limit = ours_on_fastapi("3/day")
    app.get("/home", dependencies=[limit("9/day")])(lambda: "home")
    app.get("/other")(lambda: "other")
    send = asgi_sender(app)
    assert [admitted(send, "/home"), admitted(send, "/other")] == [3, 0]


def test_slowapi_needs_an_argument_for_the_request_and_one_for_headers() -> None:
    """Without `request` it raises at the start; without `response`, headers_enabled is a 500."""
    app, limiter = theirs_on_fastapi(headers_enabled=True)

    async def without_request() -> str:
        return "home"

    with pytest.raises(Exception, match='No "request"'):
        limiter.limit("2/day")(without_request)

    @app.get("/home")
    @limiter.limit("2/day")
    async def home(request: Request) -> str:
        return "home"

    assert asgi_sender(app)(Ask("/home")).status == 500
    app, limit = ours_on_fastapi()
    app.get("/home", dependencies=[limit("2/day")])(without_request)
    assert asgi_sender(app)(Ask("/home")).headers["x-ratelimit-remaining"] == "1"


def test_slowapi_answers_a_denial_with_an_error_in_json() -> None:
    """Its handler names the limit; the body of Ratekeeper is a problem of RFC 9457."""
    app, _ = theirs_on_fastapi(default_limits=["1/day"])
    app.get("/home")(lambda: "home")
    send = asgi_sender(app)
    assert [send(Ask("/home")).status, send(Ask("/home")).body] == [
        200,
        b'{"error":"Rate limit exceeded: 1 per 1 day"}',
    ]
    app, _ = ours_on_fastapi("1/day")
    app.get("/home")(lambda: "home")
    send = asgi_sender(app)
    served, denied = send(Ask("/home")), send(Ask("/home"))
    assert (served.status, denied.status) == (200, 429)
    assert json.loads(denied.body)["error"]["code"] == "RATE_LIMIT_EXCEEDED"


def test_slowapi_does_not_call_an_async_handler_for_a_default() -> None:
    """Its middleware answers with its own body; Ratekeeper's error reaches an async handler."""

    async def handler(request: Request, error: Exception) -> Response:
        return Response("slow down", 429)

    app, _ = theirs_on_fastapi(default_limits=["1/day"])
    app.add_exception_handler(slowapi.errors.RateLimitExceeded, handler)
    app.get("/home")(lambda: "home")
    send = asgi_sender(app)
    assert b"Rate limit exceeded" in [send(Ask("/home")), send(Ask("/home"))][1].body

    app, _ = ours_on_fastapi("1/day")
    app.add_exception_handler(fastapi_ours.RateLimitExceeded, handler)
    app.get("/home")(lambda: "home")
    send = asgi_sender(app)
    assert [send(Ask("/home")), send(Ask("/home"))][1].body == b"slow down"


def test_slowapi_does_not_count_pages_that_do_not_exist() -> None:
    """Of 4 requests to an unknown path, limits of 2/day deny none there and 2 here."""
    app, _ = theirs_on_fastapi(default_limits=["2/day"], application_limits=["2/day"])
    assert statuses(asgi_sender(app), [Ask("/missing")] * 4) == [404] * 4
    app, _ = ours_on_fastapi("2/day")
    assert statuses(asgi_sender(app), [Ask("/missing")] * 4) == [404, 404, 429, 429]


# -------------------------------------------------------------- differences: fastapi-limiter


def per_client(*rates: pyrate_limiter.Rate) -> Any:
    """Return a dependency of fastapi-limiter with a bucket for each of its keys."""
    buckets = load("fastapi_limiter", "before").Buckets(*rates)
    return Depends(FastApiLimiter(limiter=pyrate_limiter.Limiter(buckets)))


def limited_route(dependencies: list[Any], path: str = "/home") -> Send:
    app = FastAPI()
    app.get(path, dependencies=dependencies)(lambda: "home")
    return asgi_sender(app)


def test_fastapi_limiter_counts_all_clients_together() -> None:
    """Limiter(Rate(2, …)) admits 2 and 0 of two clients, Ratekeeper 2 of each."""
    rate = pyrate_limiter.Rate(2, pyrate_limiter.Duration.DAY)
    send = limited_route([Depends(FastApiLimiter(limiter=pyrate_limiter.Limiter(rate)))])
    assert [admitted(send, "/home", address=host) for host in (CLIENT, OTHER)] == [2, 0]
    app, limit = ours_on_fastapi()
    app.get("/home", dependencies=[limit("2/day")])(lambda: "home")
    assert [admitted(asgi_sender(app), "/home", address=host) for host in (CLIENT, OTHER)] == [2, 2]


def test_fastapi_limiter_counts_each_path_of_a_route() -> None:
    """With a bucket for each client, four orders at 2/day pass there, and two here."""
    rate = pyrate_limiter.Rate(2, pyrate_limiter.Duration.DAY)
    send = limited_route([per_client(rate)], "/orders/{number}")
    assert sum(admitted(send, f"/orders/{number}", times=1) for number in range(4)) == 4
    app, limit = ours_on_fastapi()
    app.get("/orders/{number}", dependencies=[limit("2/day")])(lambda number: number)
    assert sum(admitted(asgi_sender(app), f"/orders/{number}", times=1) for number in range(4)) == 2


def test_fastapi_limiter_believes_every_forwarded_address() -> None:
    """A client that makes up X-Forwarded-For gets 4 of 4 at 2/day there, and 2 here."""

    def made_up(send: Send) -> int:
        return sum(
            admitted(send, "/home", times=1, headers={"X-Forwarded-For": f"203.0.113.{number}"})
            for number in range(4)
        )

    rate = pyrate_limiter.Rate(2, pyrate_limiter.Duration.DAY)
    assert made_up(limited_route([per_client(rate)])) == 4
    app, limit = ours_on_fastapi()
    app.get("/home", dependencies=[limit("2/day")])(lambda: "home")
    assert made_up(asgi_sender(app)) == 2
    app, limit = ours_on_fastapi(trusted_proxies=[CLIENT])
    app.get("/home", dependencies=[limit("2/day")])(lambda: "home")
    assert made_up(asgi_sender(app)) == 4


def test_fastapi_limiter_spends_the_first_of_two_limits_of_a_denied_request() -> None:
    """After one allowed and three denied requests, 4/hour has 0 left there, and 3 here."""
    hour = pyrate_limiter.InMemoryBucket([pyrate_limiter.Rate(4, pyrate_limiter.Duration.HOUR)])
    first = Depends(FastApiLimiter(limiter=pyrate_limiter.Limiter(hour)))
    send = limited_route([first, per_client(pyrate_limiter.Rate(1, pyrate_limiter.Duration.DAY))])
    assert admitted(send, "/home") == 1
    assert 4 - hour.count() == 0
    app, limit = ours_on_fastapi()
    shared = limit("4/hour", name="shared")
    app.get("/home", dependencies=[shared, limit("1/day")])(lambda: "home")
    app.get("/other", dependencies=[shared])(lambda: "other")
    send = asgi_sender(app)
    assert [admitted(send, "/home"), admitted(send, "/other")] == [1, 3]


def test_a_token_bucket_admits_more_in_a_minute_than_the_log_of_fastapi_limiter(
    clocks: Clocks,
) -> None:
    """A client that asks every second of a minute at 2/minute gets 3 and not 2."""
    bucket, log = Limiter("2/minute"), Limiter("2/minute sliding_window_log")
    found = [0, 0]
    for _ in range(60):
        found[0] += bucket.check("key").allowed
        found[1] += log.check("key").allowed
        clocks.advance(1)
    assert found == [3, 2]


def test_fastapi_limiter_sends_no_headers() -> None:
    """Its 429 has the detail "Too Many Requests" and no Retry-After."""
    send = limited_route([per_client(pyrate_limiter.Rate(1, pyrate_limiter.Duration.DAY))])
    served, denied = send(Ask("/home")), send(Ask("/home"))
    assert (denied.status, denied.body) == (429, b'{"detail":"Too Many Requests"}')
    for answer in (served, denied):
        assert set(answer.headers) == {"content-length", "content-type"}


# ------------------------------------------------------------- differences: django-ratelimit


@contextmanager
def site_of(*routes: Any, **settings: Any) -> Iterator[Send]:
    """Serve routes as a Django site."""
    urls = ModuleType("migrate_urls")
    urls.urlpatterns = list(routes)  # type: ignore[attr-defined]  # a module for this site
    cache.clear()
    with override_settings(**{"ROOT_URLCONF": urls, "MIDDLEWARE": [], **settings}):
        yield django_sender()


def page(request: Any, **found: Any) -> HttpResponse:
    return HttpResponse("page")


def theirs_on_django(rate: str = "2/d", **options: Any) -> Any:
    return ratelimit(**{"key": "ip", "rate": rate, **options})(page)


def test_django_ratelimit_answers_403() -> None:
    """Without a view for it, a denial is a 403 without headers; Ratekeeper's is a 429 with them."""
    with site_of(path("home", theirs_on_django("1/d"))) as send:
        served, denied = send(Ask("/home")), send(Ask("/home"))
        assert (served.status, denied.status) == (200, 403)
        assert not [name for name in denied.headers if name.startswith(("X-Rate", "Retry"))]
    with site_of(path("home", rate_limit("1/d")(page))) as send:
        served, denied = send(Ask("/home")), send(Ask("/home"))
        assert (served.status, denied.status) == (200, 429)
        assert denied.headers["Retry-After"] == "86400"


def test_django_ratelimit_counts_a_view_and_ratekeeper_a_route() -> None:
    """A view at two routes gets 2 and 0 of 4 there; 2 and 2 here, or 2 and 0 with a name."""
    view = theirs_on_django()
    with site_of(path("old", view), path("new", view)) as send:
        assert [admitted(send, "/old"), admitted(send, "/new")] == [2, 0]
    view = rate_limit("2/d")(page)
    with site_of(path("old", view), path("new", view)) as send:
        assert [admitted(send, "/old"), admitted(send, "/new")] == [2, 2]
    view = rate_limit("2/d", name="page")(page)
    with site_of(path("old", view), path("new", view)) as send:
        assert [admitted(send, "/old"), admitted(send, "/new")] == [2, 0]


def test_django_ratelimit_separates_the_rates_of_a_group() -> None:
    """3/d and 2/d in one group admit 3 and 2 of 4 there; with one name they share a count here."""
    views = [theirs_on_django(rate, group="messages") for rate in ("3/d", "2/d")]
    with site_of(path("old", views[0]), path("new", views[1])) as send:
        assert [admitted(send, "/old"), admitted(send, "/new")] == [3, 2]
    views = [rate_limit(rate, name="messages")(page) for rate in ("3/d", "2/d")]
    with site_of(path("old", views[0]), path("new", views[1])) as send:
        assert [admitted(send, "/old"), admitted(send, "/new")] == [3, 0]


def test_django_ratelimit_ends_the_window_of_each_client_at_another_second(
    clocks: Clocks,
) -> None:
    """1/m has room again at second 12 for one client and 18 for another; here at second 0."""

    def next_room(send: Send, address: str) -> int:
        assert [admitted(send, "/home", 2, address=address)] == [1]
        for second in range(1, 62):
            clocks.advance(1)
            if admitted(send, "/home", 1, address=address):
                return second % 60
        return -1

    edges = []
    for view in (theirs_on_django("1/m"), rate_limit("1/m fixed_window")(page)):
        with site_of(path("home", view)) as send:
            for address in (CLIENT, OTHER):
                edges.append(next_room(send, address))
                clocks.advance(60 - edges[-1])
    assert edges == [12, 18, 0, 0]


def test_django_ratelimit_fails_closed() -> None:
    """If its cache cannot count, it denies; Ratekeeper admits, or answers 503 if it is closed."""

    class Broken(LocMemCache):
        def add(self, *args: Any, **kwargs: Any) -> bool:
            return False

        def incr(self, *args: Any, **kwargs: Any) -> int:
            raise ValueError

    sys.modules["migrate_cache"] = module = ModuleType("migrate_cache")
    module.Broken = Broken  # type: ignore[attr-defined]  # Django imports it by name
    caches = {"default": {"BACKEND": "migrate_cache.Broken"}}
    with site_of(path("home", theirs_on_django()), CACHES=caches) as send:
        assert send(Ask("/home")).status == 403
    caches = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": "redis://127.0.0.1:1",
        }
    }
    with site_of(path("home", theirs_on_django()), CACHES=caches) as send:
        assert send(Ask("/home")).status == 500
    away = {"store": "redis://127.0.0.1:1"}
    closed = rate_limit("2/d", on_failure="closed")(page)
    routes = [path("home", rate_limit("2/d")(page)), path("login", closed)]
    with site_of(*routes, RATEKEEPER=away) as send:
        assert [send(Ask("/home")).status, send(Ask("/login")).status] == [200, 503]


def test_django_ratelimit_does_not_limit_async_views() -> None:
    """A decorated async view is a 500 there; here it is limited as any other."""

    async def async_page(request: Any) -> HttpResponse:
        return HttpResponse("page")

    made = []

    def kept(request: Any) -> Any:
        made.append(ratelimit(key="ip", rate="2/d")(async_page)(request))
        return made[-1]

    with site_of(path("home", kept)) as send:
        assert send(Ask("/home")).status == 500
    made[0].close()  # Django has not awaited it
    with site_of(path("home", rate_limit("2/d")(async_page))) as send:
        assert admitted(send, "/home") == 2


def test_django_ratelimit_counts_denied_requests() -> None:
    """After 4 requests at 3/d its usage is 4 of 3; a peek at Ratekeeper says 0 remaining."""
    request = RequestFactory().get("/", REMOTE_ADDR=CLIENT)
    usage = {"group": "mail", "key": "ip", "rate": "3/d"}
    cache.clear()
    for _ in range(4):
        get_usage(request, increment=True, **usage)
    assert get_usage(request, **usage)["count"] == 4
    limiter = Limiter("3/d")
    assert [bool(limiter.check(CLIENT)) for _ in range(4)] == [True, True, True, False]
    assert limiter.peek(CLIENT).remaining == 0


def test_django_ratelimit_spends_the_outer_of_two_limits_of_a_denied_request() -> None:
    """4 logins of one user, 2 of them denied, leave another user 0 of 4 there, and 2 of 4 here."""
    by_user: Any = ratelimit(key="post:user", rate="2/d")(page)
    with site_of(path("login", ratelimit(key="ip", rate="4/d")(by_user))) as send:
        asked = {"method": "POST", "form": {"user": "ada"}}
        assert admitted(send, "/login", **asked) == 2
        assert admitted(send, "/login", method="POST", form={"user": "bob"}) == 0
    by_user = rate_limit("2/d", key=lambda request: request.native.POST.get("user"))(page)
    with site_of(path("login", rate_limit("4/d")(by_user))) as send:
        assert admitted(send, "/login", **asked) == 2
        assert admitted(send, "/login", method="POST", form={"user": "bob"}) == 2


# ------------------------------------------------------------------ differences: throttled-py


def throttled_admits(limiter: throttled.Throttled, times: int = 20) -> int:
    return sum(not limiter.limit("key").limited for _ in range(times))


def ours_admits(limits: str, times: int = 20) -> int:
    limiter = Limiter(limits)
    return sum(bool(limiter.check("key")) for _ in range(times))


def test_a_burst_of_throttled_is_a_capacity() -> None:
    """ "5/day burst 10" admits 10 at once there and 15 here; "capacity 10" is the same."""
    store = throttled.MemoryStore()
    assert throttled_admits(throttled.Throttled(quota="5/day burst 10", store=store)) == 10
    assert [ours_admits("5/day burst 10"), ours_admits("5/day capacity 10")] == [15, 10]


def test_throttled_refills_in_whole_seconds(clocks: Clocks) -> None:
    """After its burst, a client that always asks gets 60 of 90 a minute there, and 90 here."""
    theirs = throttled.Throttled(quota="90/m", store=throttled.MemoryStore())
    ours = Limiter("90/m")
    assert [throttled_admits(theirs, 200), sum(bool(ours.check("key")) for _ in range(200))] == [
        90
    ] * 2
    found = [0, 0]
    for _ in range(600):
        clocks.advance(0.1)
        found[0] += not theirs.limit("key").limited
        found[1] += bool(ours.check("key"))
    assert found == [60, 90]


def test_throttled_forgets_a_client_when_1024_others_come() -> None:
    """Its memory evicts the least recently used key, also one that is at its limit."""
    theirs = throttled.Throttled(quota="1/day", store=throttled.MemoryStore())
    ours = Limiter("1/day")
    assert [not theirs.limit("ada").limited for _ in range(2)] == [True, False]
    assert [bool(ours.check("ada")) for _ in range(2)] == [True, False]
    for number in range(1_024):
        theirs.limit(f"other {number}")
        ours.check(f"other {number}")
    assert not theirs.limit("ada").limited
    assert not ours.check("ada")


def test_throttled_shares_a_count_between_quotas() -> None:
    """Two quotas of 2 and 3 a day on one store and key admit 3 in all there, and 2 + 3 here."""
    store = throttled.MemoryStore()
    quotas = [throttled.Throttled(quota=f"{limit}/day", store=store) for limit in (3, 2)]
    assert [throttled_admits(each) for each in quotas] == [3, 0]
    first = Limiter("3/day", name="first")
    second = Limiter("2/day", store=first.store, name="second")
    assert [sum(bool(each.check("key")) for _ in range(9)) for each in (first, second)] == [3, 2]


def test_a_leaking_bucket_of_throttled_does_not_delay() -> None:
    """It denies as a token bucket does; Ratekeeper's leaky_bucket says how long to hold each."""
    leaking = throttled.Throttled(
        using="leaking_bucket", quota=throttled.per_min(60, burst=2), store=throttled.MemoryStore()
    )
    assert throttled_admits(leaking) == 2
    assert ours_admits("60/minute capacity 2") == 2
    limiter = Limiter("60/minute capacity 2 leaky_bucket")
    assert [limiter.check("key").delay for _ in range(2)] == [0.0, 1.0]


def test_a_fixed_window_of_throttled_spends_denied_costs() -> None:
    """After a denied cost of 5 in 3/day, a cost of 1 is denied there, and allowed here."""
    theirs = throttled.Throttled(using="fixed_window", quota="3/day", store=throttled.MemoryStore())
    assert [theirs.limit("key", cost=cost).limited for cost in (2, 2, 1)] == [False, True, True]
    ours = Limiter("3/day fixed_window")
    assert [bool(ours.check("key", cost=cost)) for cost in (2, 2, 1)] == [True, False, True]


def test_a_cost_that_never_fits_is_an_error_of_ratekeeper() -> None:
    """throttled-py denies a cost of 5 in 3/day as any other; Ratekeeper raises CapacityError."""
    theirs = throttled.Throttled(quota="3/day", store=throttled.MemoryStore())
    assert theirs.limit("key", cost=5).limited
    with pytest.raises(CapacityError):
        Limiter("3/day").check("key", cost=5)


def test_throttled_takes_one_rate_in_a_string() -> None:
    """Two rates are an error there; here they are two limits."""
    with pytest.raises(throttled.exceptions.DataError, match="multiple quota rules"):
        throttled.Throttled(quota="1/s; 5/m")
    assert len(parse_limits("1/s; 5/m")) == 2


def test_throttled_raises_without_its_store() -> None:
    """Its Flask views answer 503; Ratekeeper admits, or raises with on_failure="raise"."""
    store = throttled.RedisStore(server="redis://127.0.0.1:1")
    theirs = throttled.Throttled(quota="3/day", store=store)
    with pytest.raises(throttled.exceptions.StoreUnavailableError):
        theirs.limit("key")
    app = Flask(__name__)
    limiter = throttled_flask.Limiter("2/day", app=app, store=store)
    assert with_views(app, home=limiter.limit())(Ask("/home")).status == 503
    assert Limiter("3/day", store="redis://127.0.0.1:1").check("key").degraded
    with pytest.raises(StoreUnavailable):
        Limiter("3/day", store="redis://127.0.0.1:1", on_failure="raise").check("key")


def test_a_flask_limiter_of_throttled_counts_all_clients_and_each_method() -> None:
    """Two clients of 2/day get 2 and 0 there, 2 and 2 here; GET and POST 2 and 2, here 2 and 0."""

    def both(app: Flask, decorate: Any) -> list[int]:
        app.route("/home", methods=["GET", "POST"])(decorate(lambda: "home"))
        asks = [{"address": CLIENT}, {"address": OTHER}, {"method": "POST"}]
        return [admitted(flask_sender(app), "/home", **ask) for ask in asks]

    app = Flask(__name__)
    assert both(app, throttled_flask.Limiter("2/day", app=app).limit()) == [2, 0, 2]
    app, limit = ours_on_flask()
    assert both(app, limit("2/day")) == [2, 2, 0]


def test_throttled_sends_the_headers_of_draft_6() -> None:
    """Style(draft=6) sends the same names; the default adds X-RateLimit and draft 10."""
    names = {"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"}
    app = Flask(__name__)
    limiter = throttled_flask.Limiter("2/day", app=app)
    theirs = with_views(app, home=limiter.limit())(Ask("/home")).headers
    assert names <= set(theirs)
    app, limit = ours_on_flask(style=Style(draft=6, legacy=False))
    ours = with_views(app, home=limit("2/day"))(Ask("/home")).headers
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
