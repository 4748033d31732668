"""A large request beside small ones of other processes, on a real Redis."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from ratekeeper import AsyncLimiter, Limiter
from tests.redis_servers import running

LIMIT = "40/second"
# Longer than any of these waits takes on a busy machine: the small requests go on all the time.
STARVED_S = 60


def wait_again(uri: str, key: str, stopped: Event) -> None:
    """Run twelve tasks of a process, each of which waits for one unit again and again."""

    async def task(limiter: AsyncLimiter) -> None:
        while not stopped.is_set():
            await limiter.wait(key, timeout=STARVED_S)

    async def main() -> None:
        async with AsyncLimiter(LIMIT, store=uri) as limiter:
            await asyncio.gather(*[task(limiter) for _ in range(12)])

    asyncio.run(main())


@pytest.fixture
def others(key: str) -> Iterator[Limiter]:
    """Start three processes of small requests; return a limiter of this process.

    The bucket is empty when the test begins.
    """
    # A test machine may pause for longer than the default deadline.
    uri = f"{running('single').uri}?deadline_ms=10000&connect_ms=10000"
    context = multiprocessing.get_context("spawn")
    stopped = context.Event()
    processes = [
        context.Process(target=wait_again, args=(uri, key, stopped), daemon=True) for _ in range(3)
    ]
    with Limiter(LIMIT, store=uri) as limiter:
        for process in processes:
            process.start()
        while limiter.peek(key, 2):  # until they have spent the burst
            limiter.clock.sleep(0.01)
        yield limiter
        stopped.set()
        for process in processes:
            process.join()


def test_a_large_request_is_served_beside_small_ones(others: Limiter, key: str) -> None:
    """36 small requests of other processes take each unit; it needs 10 at the same time."""
    assert others.wait(key, 10, timeout=STARVED_S)
