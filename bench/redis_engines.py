"""The engines on Redis: ratekeeper, `limits` and throttled-py, each opened as its users open it.

A check has one limit or several. Ratekeeper checks several in one call. The peers cannot: they make
one call per limit, one after another, as their users do. If a later limit denies, the earlier ones
stay charged.

`limits` uses redis-py for asyncio and not coredis, because redis-py was faster: at best 12,900
against 11,500 checks/s with 256 tasks for the fixed window, and 10,900 against 8,300 for the moving
window. Each task has a connection: pools of 1 to 50 connections were slower by 10 to 50 %. `hit()`
returns only yes or no. The rows without "hit() alone" also fetch the remaining units. throttled-py
and ratekeeper return them with each check. Ratekeeper uses one connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import limits.aio.strategies
import limits.strategies
import throttled.asyncio
from limits import RateLimitItemPerSecond
from limits.storage import storage_from_string

from bench.engines import Session
from ratekeeper import AsyncLimiter, Decision, Limit, Limiter, Request

HOUR: Final = 3_600
DAY: Final = 86_400
# Limits in a form for all engines: units, and the seconds of their window.
Rates = Sequence[tuple[int, int]]
# Far more units than a run spends, in windows so long that nothing expires during it.
ONE_LIMIT: Final = ((1_000_000, DAY),)
FOUR_LIMITS: Final = tuple((1_000_000, seconds) for seconds in (HOUR, 6 * HOUR, DAY, 7 * DAY))
# The largest number of tasks. Peers use one connection per task.
CONNECTIONS_MAX: Final = 256
# A pause of the machine must not fail a check, so the deadline is longer than in production.
_DEADLINE: Final = "deadline_ms=10000"


@dataclass(frozen=True, slots=True)
class AsyncSession:
    """An open engine for asyncio."""

    check: Callable[..., Awaitable[Any]]
    """One check of one key with a cost, 1 by default. This call is timed."""
    allowed: Callable[[Any], bool]
    """Return True if the check was allowed. Not timed."""
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RedisEngine:
    """One row of the tables, opened with a URI and the limits of every check."""

    name: str
    open_async: Callable[[str, Rates], AsyncSession]
    open: Callable[[str, Rates], Session]
    ours: bool = False


def our_limits(rates: Rates) -> list[Limit]:
    """Return the limits as ratekeeper has them."""
    return [Limit(units, per=seconds) for units, seconds in rates]


def _patient(uri: str) -> str:
    return f"{uri}{'&' if '?' in uri else '?'}{_DEADLINE}"


def _ours_async(uri: str, rates: Rates) -> AsyncSession:
    limiter = AsyncLimiter(our_limits(rates), store=_patient(uri), on_failure="raise")
    return AsyncSession(limiter.check, allowed=bool, close=limiter.close)


def _ours(uri: str, rates: Rates) -> Session:
    limiter = Limiter(our_limits(rates), store=_patient(uri), on_failure="raise")
    return Session(limiter.check, allowed=bool, close=limiter.close)


def _rules_async(uri: str, rates: Rates, *, names: Sequence[str]) -> AsyncSession:
    """Open a limiter with a rule for each of these attributes of a request."""
    document = {
        "version": 1,
        "rules": [
            {"id": name, "by": [name], "limits": [str(limit) for limit in our_limits(rates)]}
            for name in names
        ],
    }
    limiter = AsyncLimiter.from_rules(document, store=_patient(uri), on_failure="raise")

    async def check(key: str) -> Decision:
        # Sixteen users share a tenant.
        return await limiter.check(Request(user=key, tenant=key[:-1]))

    return AsyncSession(check, allowed=bool, close=limiter.close)


def _items(rates: Rates) -> list[RateLimitItemPerSecond]:
    return [RateLimitItemPerSecond(units, seconds) for units, seconds in rates]


def _limits_async(uri: str, rates: Rates, *, strategy: str, full_answer: bool) -> AsyncSession:
    storage: Any = storage_from_string(
        f"async+{uri}", implementation="redispy", max_connections=CONNECTIONS_MAX
    )
    limiter = getattr(limits.aio.strategies, strategy)(storage)
    hit, window_stats = limiter.hit, limiter.get_window_stats
    items = _items(rates)

    async def check(key: str, cost: int = 1) -> bool:
        for item in items:
            if not await hit(item, key, cost=cost):
                return False
            if full_answer:
                await window_stats(item, key)
        return True

    return AsyncSession(check, allowed=bool, close=storage.bridge.storage.aclose)


def _limits(uri: str, rates: Rates, *, strategy: str, full_answer: bool) -> Session:
    storage: Any = storage_from_string(uri)
    limiter = getattr(limits.strategies, strategy)(storage)
    hit, window_stats = limiter.hit, limiter.get_window_stats
    items = _items(rates)

    def check(key: str) -> bool:
        for item in items:
            if not hit(item, key):
                return False
            if full_answer:
                window_stats(item, key)
        return True

    return Session(check, allowed=bool, close=storage.storage.close)


def _quotas(rates: Rates) -> list[dict[str, Any]]:
    """Return arguments of Throttled. Without prefixes, two quotas of a user would share a key."""
    return [
        {
            "using": throttled.RateLimiterType.TOKEN_BUCKET.value,
            "quota": throttled.per_duration(timedelta(seconds=seconds), units, burst=units),
            "key_prefix": f"throttled{seconds}",
        }
        for units, seconds in rates
    ]


def _throttled_async(uri: str, rates: Rates) -> AsyncSession:
    many = {"max_connections": CONNECTIONS_MAX}
    where = "REDIS_CLIENT_KWARGS" if "cluster" in uri else "CONNECTION_POOL_KWARGS"
    store = throttled.asyncio.RedisStore(uri, {where: many})
    limiters = [throttled.asyncio.Throttled(store=store, **each) for each in _quotas(rates)]

    async def check(key: str, cost: int = 1) -> bool:
        for limiter in limiters:
            result = await limiter.limit(key, cost)
            _ = result.state
            if result.limited:
                return False
        return True

    async def close() -> None:
        client = _client(store)
        await client.aclose()
        if pool := getattr(client, "connection_pool", None):
            await pool.disconnect()

    return AsyncSession(check, allowed=bool, close=close)


def _throttled(uri: str, rates: Rates) -> Session:
    store = throttled.RedisStore(uri)
    limiters = [throttled.Throttled(store=store, **each) for each in _quotas(rates)]

    def check(key: str) -> bool:
        for limiter in limiters:
            result = limiter.limit(key)
            _ = result.state
            if result.limited:
                return False
        return True

    return Session(check, allowed=bool, close=_client(store).connection_pool.disconnect)


def _client(store: Any) -> Any:
    return store._backend.get_client()  # noqa: SLF001 - it has no way to close its connections


def _limits_engine(name: str, strategy: str, *, full_answer: bool) -> RedisEngine:
    options: dict[str, Any] = {"strategy": f"{strategy}RateLimiter", "full_answer": full_answer}
    return RedisEngine(name, partial(_limits_async, **options), partial(_limits, **options))


OURS: Final = RedisEngine("ratekeeper token bucket", _ours_async, _ours, ours=True)
# A check with one rule, and with two: of the user and of the tenant.
RULES: Final = tuple(
    RedisEngine(name, partial(_rules_async, names=names), _ours, ours=True)
    for name, names in (("one rule", ["user"]), ("two rules", ["user", "tenant"]))
)
LIMITS_FIXED: Final = _limits_engine(
    "limits fixed window (hit() alone)", "FixedWindow", full_answer=False
)
THROTTLED: Final = RedisEngine("throttled-py token bucket", _throttled_async, _throttled)
ENGINES: Final = (
    OURS,
    LIMITS_FIXED,
    _limits_engine("limits moving window (hit() alone)", "MovingWindow", full_answer=False),
    _limits_engine("limits fixed window", "FixedWindow", full_answer=True),
    THROTTLED,
)
