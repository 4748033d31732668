"""Units that are settled above a reservation count for the next check, through every entry point.

Each entry point serves ten units a request, of which it reserves one, from a rule with a log and
another limit. The limits are on Redis, where both have a key of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter, Request
from ratekeeper.asgi import RateLimit
from tests.history.databases import until_async
from tests.redis_servers import running
from tests.service.http.client import http_service
from tests.web.asgi_driver import ask, hello

LIMITS = [
    Limit(100, per=366 * 86_400, algorithm="fixed_window"),
    Limit(1_000, per=3_600, algorithm="sliding_window_log"),
]
RULES = {
    "version": 1,
    "rules": [
        {
            "id": "units",
            "match": {"user": "*"},
            "by": ["user"],
            "limits": [
                {"limit": 100, "per": "366d", "algorithm": "fixed_window"},
                {"limit": 1_000, "per": "1h", "algorithm": "sliding_window_log"},
            ],
        }
    ],
}

# Serves requests until one is denied; yields after each request that was allowed.
Door = Callable[[str], AsyncIterator[None]]


async def by_limits(uri: str) -> AsyncIterator[None]:
    """A limiter for threads, with limits of its own."""
    with Limiter(LIMITS, store=uri) as limiter:
        while limiter.check("k"):
            assert limiter.settle("k", 1, 10).charged == 10
            yield


async def by_rules(uri: str) -> AsyncIterator[None]:
    """A limiter for threads, with a rule."""
    with Limiter.from_rules(RULES, store=uri) as limiter:
        while decision := limiter.check(Request(user="k")):
            assert limiter.settle(Request(user="k"), 1, 10, decision).charged == 10
            yield


async def by_asyncio(uri: str) -> AsyncIterator[None]:
    """A limiter for asyncio."""
    async with AsyncLimiter(LIMITS, store=uri) as limiter:
        while await limiter.check("k"):
            assert (await limiter.settle("k", 1, 10)).charged == 10
            yield


async def by_asgi(uri: str) -> AsyncIterator[None]:
    """The ASGI middleware, whose application reports the cost."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["ratekeeper.charge"].settle(10)
        await hello(scope, receive, send)

    site = RateLimit(app, LIMITS, store=uri)
    while (await ask(site)).status == 200:
        yield
    await site.enforcer.aclose()


async def by_service(uri: str) -> AsyncIterator[None]:
    """POST /v1/settle; GET /v1/quota shows what the checks see."""
    async with http_service(rules=RULES, store=uri) as http:
        used = 0
        while (await http.check(user="k")).data["allowed"]:
            body = {"user": "k", "reserved": 1, "actual": 10}
            settled = await http("POST", "/v1/settle", body)
            assert settled.status == 200
            used += 10
            [rule] = (await http("GET", "/v1/quota?user=k")).data["rules"]
            assert [each["remaining"] for each in rule["limits"]] == [100 - used, 1_000 - used]
            yield


@pytest.mark.parametrize("door", [by_limits, by_rules, by_asyncio, by_asgi, by_service])
async def test_settled_units_are_seen_by_the_next_check(door: Door) -> None:
    """Ten requests of ten units are served of a limit of 100."""
    server = running("single")
    server.flush()
    served = 0
    async for _ in door(f"{server.uri}?deadline_ms=10000&connect_ms=10000"):
        served += 10
        assert served <= 100
    assert served == 100


async def test_a_cancelled_settlement_with_a_name_is_made() -> None:
    """Its name may be known to the store already: a second attempt would change nothing."""
    server = running("single")
    server.flush()
    uri = f"{server.uri}?deadline_ms=10000&connect_ms=10000"
    async with AsyncLimiter(LIMITS, store=uri) as limiter:
        await limiter.check("k")
        task = asyncio.create_task(limiter.settle("k", 1, 31, reservation="request-1"))
        await asyncio.sleep(0)  # it has sent the name
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await limiter.settle("k", 1, 31, reservation="request-1")).repeated
        with Limiter(LIMITS, store=uri) as other:
            await until_async(lambda: other.peek("k", 0).remaining == 69, "the units are charged")
