"""Reservations on a real Redis: top-ups in the background, and the end of a cancelled task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ratekeeper import AsyncLimiter, Limiter, LimitExceeded, Request
from tests.history.databases import until_async
from tests.redis_servers import running

ANN = Request(user="ann", tenant="acme")
RULES = """
version: 1
rules:
  - {id: requests, by: user, limits: 1000/day}
  - {id: tokens, by: user, unit: tokens, limits: 1000/day}
  - {id: money, by: tenant, unit: micro_dollars, limits: 90000/day}
"""


@pytest.fixture
def uri() -> str:
    """Return the URI of an empty Redis."""
    server = running("single")
    server.flush()
    return f"{server.uri}?deadline_ms=10000&connect_ms=10000"


@pytest.fixture
async def limiter(uri: str) -> AsyncIterator[AsyncLimiter]:
    """Yield a limiter by the rules."""
    async with AsyncLimiter.from_rules(RULES, store=uri) as found:
        yield found


async def left_of(limiter: AsyncLimiter) -> dict[str, int]:
    explained = await limiter.explain(ANN)
    return {
        each.id: each.decision.remaining for each in explained.rules if each.decision is not None
    }


def tokens_left(limiter: Limiter) -> int:
    (found,) = [each for each in limiter.explain(ANN).rules if each.id == "tokens"]
    return -1 if found.decision is None else found.decision.remaining


async def test_streams_are_topped_up_and_settled(limiter: AsyncLimiter) -> None:
    """Ten streams at once, of which each uses five times what it has reserved."""

    async def stream() -> None:
        costs = {"tokens": 10, "micro_dollars": 100}
        async with limiter.reserve(ANN, costs=costs) as reservation:
            for _ in range(50):
                assert reservation.use(costs={"tokens": 1, "micro_dollars": 30})
                await asyncio.sleep(0)

    await asyncio.gather(*[stream() for _ in range(10)])
    assert await left_of(limiter) == {"requests": 990, "tokens": 500, "money": 75_000}


async def test_use_learns_in_the_background_that_there_is_no_room(limiter: AsyncLimiter) -> None:
    """`use` does not wait: it answers by the last top-up."""
    await limiter.check(ANN, costs={"tokens": 900})
    async with limiter.reserve(ANN, costs={"tokens": 50}) as reservation:
        used = 0
        while reservation.use(1):
            used += 1
            await asyncio.sleep(0)
    assert used >= 100
    assert (await left_of(limiter))["tokens"] == 0


@pytest.mark.parametrize(("used", "left"), [(0, 1_000), (30, 970), (80, 920)])
async def test_a_cancelled_stream_is_settled(
    limiter: AsyncLimiter, uri: str, used: int, left: int
) -> None:
    """Also if it is cancelled while a top-up is under way, and again at its end."""
    began = asyncio.Event()

    async def stream() -> None:
        async with limiter.reserve(ANN, costs={"tokens": 50}) as reservation:
            reservation.use(used)
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stream())
    await began.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with Limiter.from_rules(RULES, store=uri) as other:  # the end goes on in the background
        await until_async(lambda: tokens_left(other) == left, "the stream is settled")


def test_a_reservation_that_is_denied_costs_nothing(uri: str) -> None:
    """All units and subjects are charged, or none."""
    with Limiter.from_rules(RULES, store=uri) as limiter:
        costs = {"tokens": 100, "micro_dollars": 8_000}
        for _ in range(10):
            with limiter.reserve(ANN, costs=costs):
                pass
        with pytest.raises(LimitExceeded, match="retry after"), limiter.reserve(ANN, costs=costs):
            pytest.fail("the block ran")
        explained = limiter.explain(ANN).rules
        left = {each.id: each.decision.remaining for each in explained if each.decision is not None}
        assert left == {"requests": 990, "tokens": 0, "money": 10_000}
