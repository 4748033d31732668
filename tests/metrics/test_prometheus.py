"""The counts of an application's limiters in a registry of `prometheus_client`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from flask import Flask
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ratekeeper import Limiter, asgi, fastapi, flask
from ratekeeper.metrics.prometheus import register
from tests.metrics.scraping import Decisions, decisions
from tests.web.asgi_driver import ask


def scraped(registry: CollectorRegistry, prefix: str) -> Decisions:
    """Return the decisions that a registry reports."""
    return decisions(generate_latest(registry).decode(), prefix)


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry with the limiters of this process."""
    made = CollectorRegistry()
    register(made)
    return made


def test_a_limiter_is_reported(registry: CollectorRegistry) -> None:
    """By its name, with its denials."""
    with Limiter("2/minute", name="prom-plain") as limiter:
        for _ in range(5):
            limiter.check("k")
        assert scraped(registry, "prom-plain") == {
            ("prom-plain", "*", "allowed"): 2,
            ("prom-plain", "*", "denied"): 3,
        }


def test_limiters_are_registered_once(registry: CollectorRegistry) -> None:
    """A registry rejects a second collector of the same metrics."""
    with pytest.raises(ValueError, match="Duplicated"):
        register(registry)


async def test_the_route_limits_of_fastapi_are_reported(registry: CollectorRegistry) -> None:
    """By template, never by path; routes that share a count are named together."""
    app = FastAPI()
    limit = fastapi.RateLimit(app, limits="100/minute", name="prom-app")
    shared = APIRouter(dependencies=[limit("10/minute", name="prom-shared")])

    @app.get("/prom/{number}", dependencies=[limit("2/minute")])
    async def one(number: int) -> int:
        return number

    @shared.get("/a/{number}")
    @shared.get("/b")
    async def two() -> int:
        return 2

    app.include_router(shared)
    statuses = [(await ask(app, f"/prom/{number}")).status for number in range(3)]
    await ask(app, "/a/1")
    await ask(app, "/b")
    assert statuses == [200, 200, 429]
    assert scraped(registry, "prom-app") == {("prom-app", "*", "allowed"): 5}
    assert scraped(registry, "GET /prom") == {
        ("GET /prom/{number}", "/prom/{number}", "allowed"): 2,
        ("GET /prom/{number}", "/prom/{number}", "denied"): 1,
    }
    found = scraped(registry, "prom-shared")
    assert sum(found.values()) == 2
    assert ("prom-shared", "/a/{number}, /b", "allowed") in found


async def test_the_route_limits_of_starlette_are_reported(registry: CollectorRegistry) -> None:
    """The decorator knows the template once the request is routed."""

    @asgi.limited("1/minute", name="prom-starlette")
    async def show(request: StarletteRequest) -> PlainTextResponse:
        return PlainTextResponse("")

    routed = Starlette(routes=[Route("/things/{id}", show)])
    app = asgi.RateLimit(routed, limits="100/minute")
    await ask(app, "/things/1")
    await ask(app, "/things/2")
    assert scraped(registry, "prom-starlette") == {
        ("prom-starlette", "/things/{id}", "allowed"): 1,
        ("prom-starlette", "/things/{id}", "denied"): 1,
    }


def test_the_route_limits_of_flask_are_reported(registry: CollectorRegistry) -> None:
    """With the rule of the route, as Flask writes it."""
    app = Flask(__name__)
    limit = flask.RateLimit(app)

    @app.get("/things/<int:number>")
    @limit("1/minute", name="prom-flask")
    def show(number: int) -> str:
        return str(number)

    client = app.test_client()
    client.get("/things/1")
    client.get("/things/2")
    assert scraped(registry, "prom-flask") == {
        ("prom-flask", "/things/<int:number>", "allowed"): 1,
        ("prom-flask", "/things/<int:number>", "denied"): 1,
    }


FORKED = """
import os
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from ratekeeper import Limiter
from ratekeeper.metrics.prometheus import register

register()
register()
limiter = Limiter("1/minute", name="forked")
limiter.check("before")
for _ in range(2):
    child = os.fork()
    if child == 0:
        limiter.check("k")
        limiter.check("k")
        raise SystemExit
    assert os.waitpid(child, 0)[1] == 0
limiter.check("after")
from ratekeeper.metrics import prometheus
prometheus._writer.write()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_forked_workers_write_their_own_counts(tmp_path: Path) -> None:
    """What was counted before a fork is counted once; a worker writes when it exits."""
    environment: dict[str, Any] = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", FORKED],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert decisions(ran.stdout, "forked") == {
        ("forked", "*", "allowed"): 4,
        ("forked", "*", "denied"): 2,
    }


def test_a_wrong_settlement_does_not_break_the_metrics(registry: CollectorRegistry) -> None:
    """A number of 400 digits would make a counter that no scrape could read again."""
    with Limiter("2/minute", name="prom-settled") as limiter:
        assert limiter.settle("k", 0, 10**400).forgiven > 10**399
        limiter.check("k")
        assert scraped(registry, "prom-settled") == {("prom-settled", "*", "denied"): 1}
