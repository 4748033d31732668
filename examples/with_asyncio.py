"""Thirty tasks call an API that accepts fifty calls per second: each waits for its turn."""

from __future__ import annotations

import asyncio
import sys
import time

from ratekeeper import AsyncLimiter

CALLS = 30

# Ten calls at once, and then one every 20 ms.
limiter = AsyncLimiter("50/second capacity 10")


async def call(started: float) -> float:
    await limiter.wait("upstream")
    return time.monotonic() - started  # the call itself would be here


async def main() -> list[float]:
    started = time.monotonic()
    return sorted(await asyncio.gather(*(call(started) for _ in range(CALLS))))


times = asyncio.run(main())
print(f"calls 1 to 10 by {times[9] * 1000:.0f} ms, call {CALLS} at {times[-1] * 1000:.0f} ms")
# Call number 10 + n cannot go before n × 20 ms; how much later depends on the machine.
too_early = [n for n in range(1, CALLS - 9) if times[9 + n] < n * 0.020]
sys.exit(f"too early: {too_early}" if too_early else 0)
