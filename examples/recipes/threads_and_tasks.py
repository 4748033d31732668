"""Share one rate between the threads of a pool and the tasks of an event loop.

Create the limiter once: all threads may use it. Tasks use an `AsyncLimiter` on the same store and
with the same `name`, so that both count together and a waiting task does not block its event loop.

The trap is a limiter that each call or thread creates for itself: its counts start from zero.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from ratekeeper import AsyncLimiter, Limiter

CALLS = 12
LIMITS = "100/second capacity 4"
limiter = Limiter(LIMITS, name="upstream")
async_limiter = AsyncLimiter(LIMITS, name="upstream", store=limiter.store)


def call_in_thread(_: int) -> float:
    limiter.wait("api")
    return time.monotonic()  # call the upstream here


async def call_in_task() -> float:
    await async_limiter.wait("api")
    return time.monotonic()


def naive_call(_: int) -> bool:
    return bool(Limiter("4/hour").check("api"))


async def main() -> None:
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as pool:
        threads = [loop.run_in_executor(pool, call_in_thread, n) for n in range(CALLS)]
        tasks = [call_in_task() for _ in range(CALLS)]
        times = sorted(at - started for at in await asyncio.gather(*threads, *tasks))
        naive = list(pool.map(naive_call, range(CALLS)))
    print(f"{len(times)} calls of threads and tasks in {times[-1] * 1000:.0f} ms")
    # Four at once; from then on one every 10 ms, at the earliest.
    assert all(at >= number * 0.010 for number, at in enumerate(times[4:], 1))

    print(f"a limiter for each call: {sum(naive)} of {CALLS} pass, and the limit is 4")
    assert sum(naive) == CALLS


if __name__ == "__main__":
    asyncio.run(main())
