"""Correct uses of the public names. mypy --strict must agree with every assert_type.

`make lint` checks this module; it has no tests to run. Importing it must work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from typing import Any, assert_type

from tollkeeper import (
    AsyncLimiter,
    CapacityError,
    Decision,
    Limit,
    Limiter,
    LimitExceeded,
    RateSyntaxError,
    Request,
    __version__,
    open_store,
    parse_limit,
    parse_limits,
)
from tollkeeper.core.clock import Clock, SystemClock
from tollkeeper.decide.store import Store, StoreStats
from tollkeeper.testing import ManualClock, limiting_off, use_clock


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
    with limiter.hold("k", 2, wait=1.5, refund_on_error=True) as decision:
        assert_type(decision, Decision)
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
    async with limiter.hold("k", wait=1) as decision:
        assert_type(decision, Decision)
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
    """The functions of `tollkeeper.testing`."""
    with use_clock(ManualClock()) as clock, limiting_off():
        assert_type(clock, ManualClock)
        clock.advance(1.5)
        assert_type(clock.now_ns(), int)
