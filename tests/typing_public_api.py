"""Correct uses of the public names. mypy --strict must agree with every assert_type.

`make lint` checks this module against the source, and `tests/test_packages.py` against an installed
wheel. `tests/test_public_api.py` checks that every public name is used here. The module has no
tests to run. Importing it must work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, assert_type

import httpx
from fastapi import FastAPI
from flask import Blueprint, Flask
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse

import ratekeeper.asgi
import ratekeeper.django
import ratekeeper.fastapi
import ratekeeper.flask
import ratekeeper.httpx
import ratekeeper.wsgi
from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    Decision,
    Fleet,
    InvalidCost,
    InvalidKey,
    InvalidOption,
    Limit,
    Limiter,
    LimitExceeded,
    LocalFallback,
    RatekeeperError,
    RateSyntaxError,
    Regions,
    Request,
    Reservation,
    SlotLost,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    __version__,
    open_store,
    parse_limit,
    parse_limits,
)
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.decide.store import Store, StoreStats
from ratekeeper.limits import AsyncRatekeeperStorage, RatekeeperStorage, open_storage
from ratekeeper.testing import ManualClock, forget_counts, limiting_off, use_clock


def values() -> None:
    """Limits, requests and decisions."""
    assert_type(__version__, str)
    assert_type(parse_limit("5/s", algorithm="fixed_window"), Limit)
    assert_type(parse_limits("5/s; 6/m"), tuple[Limit, ...])
    limit = Limit(5, per=timedelta(minutes=1), algorithm="leaky_bucket", burst=2, name="n")
    assert_type(limit.limit, int)
    assert_type(limit.capacity, int)
    assert_type(limit.window, float)
    assert_type(limit.identity, str)
    assert_type(Request(user="42", attributes={"region": "eu"}).user, str | None)


def decisions(decision: Decision) -> None:
    """Every field has one plain type."""
    assert_type(decision.allowed, bool)
    assert_type(bool(decision), bool)
    assert_type(decision.policy, Limit)
    assert_type(decision.limit, int)
    assert_type(decision.remaining, int)
    assert_type(decision.retry_after, float)
    assert_type(decision.retry_after_ns, int)
    assert_type(decision.reset_after, float)
    assert_type(decision.reset_after_ns, int)
    assert_type(decision.delay, float)
    assert_type(decision.delay_ns, int)
    assert_type(decision.rule, str)
    assert_type(decision.degraded, bool)


def errors(capacity: CapacityError, exceeded: LimitExceeded, syntax: RateSyntaxError) -> None:
    """The fields of errors."""
    assert_type(capacity.cost, int)
    assert_type(capacity.limit, Limit)
    assert_type(exceeded.decision, Decision)
    assert_type(syntax.position, int)
    assert_type(syntax.text, str)


def error_tree() -> None:
    """All errors have one root; errors of input and of stores have a branch each."""
    inputs: list[type[ConfigError]] = [RateSyntaxError, InvalidOption]
    stores: list[type[StoreError]] = [StoreFull, StoreTimeout, StoreUnavailable]
    roots: list[type[RatekeeperError]] = [*inputs, *stores, CapacityError, SlotLost]
    roots += [InvalidCost, InvalidKey]
    roots.append(LimitExceeded)


def fleets() -> None:
    """The settings of nodes, regions and the time without a store."""
    fleet = Fleet(store="shared:///run/api.fleet", nodes=20, gossip="127.0.0.1:7946")
    regions = Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"})
    fallback = LocalFallback(nodes=20, ceiling="5000/second", emergency="60/minute")
    assert_type(fleet.lease_seconds, float)
    assert_type(regions.region, str)
    Limiter(
        "5/s",
        store="redis://localhost",
        consistency="leased",
        fleet=fleet,
        on_failure="local",
        local_fallback=fallback,
    )
    Limiter("5/s", regions=regions, scope="global", across_regions="exact")


def constructors(store: Store, clock: Clock) -> None:
    """All arguments of a limiter."""
    Limiter("5/s")
    Limiter(Limit(5, per=1))
    Limiter(["5/s", Limit(5, per=60.5)])
    Limiter(("5/s", "6/m"), store="memory://", name="n", by=("tenant", "user"))
    Limiter("5/s", store=store, clock=clock, by=["user"], on_failure="closed")
    Limiter("5/s", clock=SystemClock())
    AsyncLimiter("5/s", store=Limiter("5/s").store, clock=ManualClock(start=1.5))
    assert_type(open_store("redis://localhost", clock, password="secret", deadline_ms=5), Store)


def wrong_constructors() -> None:
    """Mistakes that a type checker finds; an unnecessary ignore is an error itself."""
    Limiter(5)  # type: ignore[arg-type]  # not limits
    Limiter("5/s", on_failure="maybe")  # type: ignore[arg-type]  # not a policy
    Limiter("5/s", nmae="n")  # type: ignore[call-arg]  # not a parameter
    AsyncLimiter("5/s", clock=5)  # type: ignore[arg-type]  # not a clock
    Limit(5, per=60, algorithm="gcra")  # type: ignore[arg-type]  # not an algorithm


def verbs(limiter: Limiter) -> None:
    """Each method with each kind of key."""
    assert_type(limiter.check("k"), Decision)
    assert_type(limiter.check(("tenant", "user"), cost=3), Decision)
    assert_type(limiter.check(Request(user="42")), Decision)
    assert_type(limiter.peek("k", 2), Decision)
    assert_type(limiter.wait("k", timeout=5), Decision)
    assert_type(limiter.wait("k", 2, timeout=0.5), Decision)
    assert_type(limiter.wait("k", timeout=timedelta(seconds=5)), Decision)
    limiter.refund("k", 2)
    limiter.grant("k", 5, ttl=60)
    limiter.grant("k", 5, ttl=timedelta(hours=1))
    limiter.reset("k")
    assert_type(limiter.limits, tuple[Limit, ...])
    assert_type(limiter.store, Store)
    assert_type(limiter.stats(), StoreStats)
    with limiter.reserve("k", 2, wait=1.5) as reservation:
        assert_type(reservation, Reservation)
        assert_type(reservation.decision, Decision)
        assert_type(reservation.use(1), bool)
    with limiter.reserve("k", costs={"tokens": 9}) as reservation:
        assert_type(reservation.use(costs={"tokens": 1}), bool)
    limiter.settle("k", {"tokens": 9}, {"tokens": 1})
    limiter.settle("k", 9, 1)
    with Limiter("5/s") as own:
        assert_type(own, Limiter)


async def async_verbs(limiter: AsyncLimiter) -> None:
    """The same methods, awaited."""
    assert_type(await limiter.check("k"), Decision)
    assert_type(await limiter.peek(("a", "b"), 2), Decision)
    assert_type(await limiter.wait(Request(user="42"), timeout=5), Decision)
    await limiter.refund("k")
    await limiter.grant("k", 5)
    await limiter.reset("k")
    async with limiter.reserve("k", wait=1) as reservation:
        assert_type(reservation, Reservation)
    async with AsyncLimiter("5/s") as own:
        assert_type(own, AsyncLimiter)
    await limiter.close()


def decorated(limiter: Limiter) -> None:
    """A decorated function keeps its parameters and its result."""

    @limiter.limit(key=lambda user, size: f"user:{user}", cost=lambda user, size: size)
    def upload(user: str, size: int) -> bytes:
        return user.encode() * size

    @limiter.limit()
    def numbers() -> Iterator[int]:
        yield 1

    assert_type(upload("me", size=2), bytes)
    assert_type(numbers(), Iterator[int])


async def async_decorated(limiter: AsyncLimiter) -> None:
    """An async function does, too."""

    @limiter.limit(key="k", cost=2, wait=1)
    async def fetch(url: str) -> bytes:
        return url.encode()

    assert_type(await fetch(url="https://example.com"), bytes)
    # A task needs a coroutine, not only something to await.
    made = assert_type(fetch("a"), Coroutine[Any, Any, bytes])
    assert_type(await asyncio.create_task(made), bytes)


def switches() -> None:
    """The functions of `ratekeeper.testing`."""
    with use_clock(ManualClock()) as clock, limiting_off():
        assert_type(clock, ManualClock)
        forget_counts()
        clock.advance(1.5)
        assert_type(clock.now_ns(), int)


# ── Frameworks ─────────────────────────────────────────────────────────────────────────────────


def charges(charge: ratekeeper.fastapi.Charge) -> None:
    """A charge is the same class in every integration."""
    assert_type(charge.decision, Decision)
    assert_type(charge.units, int | Mapping[str, int])
    charge.settle(37)
    charge.settle(costs={"tokens": 37})
    charge.refund()
    same: list[
        type[ratekeeper.asgi.Charge | ratekeeper.flask.Charge | ratekeeper.django.Charge]
    ] = [ratekeeper.fastapi.Charge]
    same.append(ratekeeper.wsgi.Charge)


def denials(denial: ratekeeper.fastapi.Denial) -> None:
    """A denial is the same class in every integration."""
    assert_type(denial.status, int)
    assert_type(denial.retry_after, int)
    assert_type(denial.rule, str)
    assert_type(denial.message, str)
    assert_type(denial.decision, Decision)
    same: list[
        type[ratekeeper.asgi.Denial | ratekeeper.flask.Denial | ratekeeper.django.Denial]
    ] = [ratekeeper.fastapi.Denial]
    same.append(ratekeeper.wsgi.Denial)


def handled(
    fastapi: ratekeeper.fastapi.RateLimitExceeded | ratekeeper.fastapi.LimiterUnavailable,
    asgi: ratekeeper.asgi.RateLimitExceeded | ratekeeper.asgi.LimiterUnavailable,
    flask: ratekeeper.flask.RateLimitExceeded | ratekeeper.flask.LimiterUnavailable,
    django: ratekeeper.django.RateLimitExceeded | ratekeeper.django.LimiterUnavailable,
) -> None:
    """The exceptions of denied requests, which the handlers of an application get."""
    for error in (fastapi, asgi, flask, django):
        assert_type(error.denial, ratekeeper.fastapi.Denial)


def hooks(request: ratekeeper.fastapi.WebRequest) -> None:
    """The request that functions take is the same class in every integration."""
    assert_type(request.method, str)
    assert_type(request.header("X-Tenant"), str | None)
    same: list[type[ratekeeper.asgi.WebRequest | ratekeeper.flask.WebRequest]] = [type(request)]
    same.append(ratekeeper.django.WebRequest)
    same.append(ratekeeper.wsgi.WebRequest)


def on_fastapi() -> None:
    """A middleware, a dependency, and the charge as an argument."""
    app = FastAPI()
    limit = ratekeeper.fastapi.RateLimit(
        app, ["100/minute", Limit(5, per=1)], store="shared:///run/api.limits", on_failure="closed"
    )

    @app.get("/search", dependencies=[limit("5/second")])
    def search() -> str:
        return "found"

    @app.post("/complete")
    async def complete(
        charge: Annotated[ratekeeper.fastapi.Charge, limit("9/minute", cost=3, name="tokens")],
    ) -> None:
        charge.settle(1)

    assert_type(search(), str)
    ratekeeper.fastapi.RateLimit(app, rules="limits.yaml", trusted_proxies=["10.0.0.0/8"])
    ratekeeper.fastapi.RateLimit(app, "5/s", sotre="memory://")  # type: ignore[call-arg]  # a typo
    limit("5/s", on_failure="maybe")  # type: ignore[arg-type]  # not a policy


async def on_asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The middleware of any ASGI application, and a decorator for Starlette."""

    @ratekeeper.asgi.limited("5/second", key="address")
    async def search(request: StarletteRequest) -> PlainTextResponse:
        return PlainTextResponse("found")

    app = Starlette()
    app.add_middleware(ratekeeper.asgi.RateLimit, limits="100/minute")
    limited = ratekeeper.asgi.RateLimit(app, "100/minute", key=lambda request: request.path)
    assert_type(await limited(scope, receive, send), None)
    assert_type(await search(StarletteRequest(scope)), PlainTextResponse)
    charge: ratekeeper.asgi.Charge = scope[ratekeeper.asgi.CHARGE]
    charge.settle(2)


def on_flask(blueprint: Blueprint) -> None:
    """Decorated views keep their types; a blueprint is limited as a whole."""
    app = Flask(__name__)
    limit = ratekeeper.flask.RateLimit(app, "100/minute")
    later = ratekeeper.flask.RateLimit(limits="100/minute", per_route=True)
    later.init_app(app)

    @app.get("/search")
    @limit("5/second", cost=2)
    def search(text: str = "") -> str:
        ratekeeper.flask.charge.settle(1)
        return text

    @limit.exempt
    def health() -> Literal["ok"]:
        return "ok"

    assert_type(search("found"), str)
    assert_type(health(), Literal["ok"])
    assert_type(limit("5/minute")(blueprint), Blueprint)
    assert_type(ratekeeper.flask.charge, ratekeeper.flask.Charge)
    limit.close(app)


def on_django(request: Any) -> None:
    """A decorated view, and the middleware. Django ships no types, so neither has a request."""

    @ratekeeper.django.rate_limit("5/hour", name="export", on_failure="closed")
    def export(request: Any) -> Any:
        return request

    export(request)
    ratekeeper.django.RateLimitMiddleware(export)(request)


def on_wsgi() -> None:
    """The middleware of any WSGI application."""

    def hello(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [b"hello"]

    limited = ratekeeper.wsgi.RateLimit(hello, "100/minute", skip=lambda request: False)
    assert_type(limited({}, lambda *_: lambda _: None), Iterable[bytes])
    limited.close()


# ── Clients ────────────────────────────────────────────────────────────────────────────────────


def on_httpx(response: httpx.Response) -> None:
    """The transports and their settings."""
    settings: ratekeeper.httpx.RetrySettings = {"wait_max": 30, "budget": "9/s", "pace": False}
    httpx.Client(transport=ratekeeper.httpx.RetryTransport(**settings))
    httpx.AsyncClient(transport=ratekeeper.httpx.AsyncRetryTransport(attempts_max=3))
    advice = ratekeeper.httpx.retry_advice_of(response.headers, now_ns=0)
    assert_type(advice, ratekeeper.httpx.RetryAdvice)
    assert_type(advice.wait_ns, int)
    ratekeeper.httpx.RetryTransport(pace="off")  # type: ignore[arg-type]  # not a pace


def outgoing(error: ratekeeper.httpx.LimitTimeout) -> None:
    """The transports that keep limits before they send."""
    settings: ratekeeper.httpx.LimitSettings = {"store": "shared:///run/app", "arrives_within": 1}
    with httpx.Client(transport=ratekeeper.httpx.LimitTransport("10/s", **settings)):
        pass
    by_host = ratekeeper.httpx.AsyncLimitTransport("10/s", key=lambda request: request.url.host)
    ratekeeper.httpx.LimitTransport(Limiter("1000/day"), cost=lambda request: 2)
    assert_type(by_host.limiter, AsyncLimiter)
    assert_type(error.retry_after, float)
    assert_type(error.decision, Decision)
    assert_type(error.request, httpx.Request)


def storages(storage: RatekeeperStorage) -> None:
    """The storages for `limits`."""
    opened = open_storage("ratekeeper+memory://", capacity=1_000, wrap_exceptions=True)
    assert_type(opened, RatekeeperStorage | AsyncRatekeeperStorage)
    assert_type(storage.store, Store)
    assert_type(storage.incr("k", 60), int)
    assert_type(storage.get_expiry("k"), float)
    assert_type(storage.acquire_entry("k", 5, 60, amount=2), bool)
    assert_type(storage.get_sliding_window("k", 60), tuple[int, float, int, float])


async def async_storages(storage: AsyncRatekeeperStorage) -> None:
    """The same, awaited."""
    assert_type(await storage.incr("k", 60), int)
    assert_type(await storage.get_moving_window("k", 5, 60), tuple[float, int])
    assert_type(await storage.check(), bool)
