"""Web integrations log each denial once, with the limit and the client that it counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask

from ratekeeper import fastapi, flask
from ratekeeper.testing import ManualClock, forget_counts, use_clock

RULES = """
version: 1
rules:
  - {id: keys, match: {api_key: "*"}, by: api_key, limits: 100/minute}
  - {id: orders, match: {endpoint: /orders}, by: [user], limits: 1/minute}
deny: ["ip:192.0.2.9"]
"""
IDENTIFY: Any = {"user": "header:X-User", "api_key": "header:X-Key"}


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG, "ratekeeper.denied")
    forget_counts()
    with use_clock(ManualClock(start=1_000)):
        yield
    forget_counts()


async def ask(app: FastAPI, *headers: dict[str, str], peer: str = "203.0.113.7") -> list[int]:
    """Send a request with each of the headers; return the statuses."""
    transport = httpx.ASGITransport(app, client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        return [(await client.get("/orders", headers=each)).status_code for each in headers]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged lines, without the part that all have."""
    assert {record.name for record in caplog.records} == {"ratekeeper.denied"}
    return [line.removesuffix(" reason=limit denials=1 since=0s") for line in caplog.messages]


async def orders() -> str:
    """Answer a request."""
    return "orders"


async def test_a_middleware_with_limits(caplog: pytest.LogCaptureFixture) -> None:
    """Denials of one client in a minute have one line, also if a hook answers them."""
    app = FastAPI()
    app.get("/orders")(orders)
    fastapi.RateLimit(app, "2/minute", on_limit=lambda request, denial: None)
    assert await ask(app, *[{}] * 5) == [200, 200, 429, 429, 429]
    assert lines(caplog) == ['denied rule="" limit="2/minute" subject="address:203.0.113.7"']


async def test_a_route_with_limits_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """The line names the route's limit, which denied the request, and its subject."""
    app = FastAPI()
    limit = fastapi.RateLimit(app, "100/minute")
    app.get("/orders", dependencies=[limit("1/minute", key="header:X-User", name="orders")])(orders)
    assert await ask(app, {"X-User": "bob7"}, {"X-User": "bob7"}) == [200, 429]
    [line] = lines(caplog)
    assert line.startswith('denied rule="orders" limit="1/minute" subject="header:x-user:#')


async def test_rules(caplog: pytest.LogCaptureFixture) -> None:
    """The line names the rule, and what that rule counts by; a deny list has no limit."""
    app = FastAPI()
    app.get("/orders")(orders)
    fastapi.RateLimit(app, rules=RULES, identify=IDENTIFY)
    headers = {"X-User": "bob7", "X-Key": "sk_secret"}
    assert await ask(app, headers, headers) == [200, 429]
    assert await ask(app, {}, peer="192.0.2.9") == [403]
    assert lines(caplog) == [
        'denied rule="orders" limit="1/minute" subject="user:bob7"',
        'denied rule="(deny)" limit="" subject="ip:192.0.2.9" reason=deny_list denials=1 since=0s',
    ]


def test_wsgi_frameworks(caplog: pytest.LogCaptureFixture) -> None:
    """They charge a request by the same steps."""
    app = Flask("shop")
    limit = flask.RateLimit(app, "100/minute")
    app.add_url_rule("/orders", view_func=limit("1/minute", name="orders")(lambda: "orders"))
    client = app.test_client()
    assert [client.get("/orders").status_code for _ in range(3)] == [200, 429, 429]
    assert lines(caplog) == ['denied rule="orders" limit="1/minute" subject="address:127.0.0.1"']
