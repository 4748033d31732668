"""Renewal of slots: a request that takes long keeps its slot."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ratekeeper import AsyncLimiter, Decision, Limiter


async def test_a_long_block_renews_its_slot() -> None:
    """For longer than the limit's longest time, in threads and on asyncio."""
    limiter = AsyncLimiter("1 at once for 60ms")
    renewed = asyncio.Event()
    thread_renewed, end = threading.Event(), threading.Event()

    class Watched(AsyncLimiter):
        """Counts renewals."""

        def _renew(self, decision: Decision) -> Any:
            yield from super()._renew(decision)
            renewed.set()

    class WatchedInThread(Limiter):
        """Counts renewals."""

        def _renew(self, decision: Decision) -> Any:
            yield from super()._renew(decision)
            thread_renewed.set()

    async with Watched("1 at once for 60ms", store=limiter.store).reserve("f"):
        for _ in range(5):
            renewed.clear()
            await renewed.wait()
            assert (await limiter.peek("f")).remaining == 0
    assert (await limiter.peek("f")).remaining == 1

    def block() -> None:
        with WatchedInThread("1 at once for 60ms", store=limiter.store).reserve("f"):
            end.wait()

    thread = threading.Thread(target=block)
    thread.start()
    for _ in range(5):
        thread_renewed.clear()
        assert await asyncio.to_thread(thread_renewed.wait, 60)
    end.set()
    await asyncio.to_thread(thread.join)
    assert (await limiter.peek("f")).remaining == 1
