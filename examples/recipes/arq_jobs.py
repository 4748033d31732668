"""Limit arq jobs, and run them again when there is room.

A job that is denied raises `Retry(defer=…)`: arq puts it back into its queue in Redis, and the
worker goes on with other jobs. Waiting inside of the job would occupy one of the worker's slots.

The trap is `max_tries`: arq counts a deferred job as tried, and drops it for good after the fifth
time. So give limited jobs a `max_tries` that a queue of them does not reach.

The limiter counts in the Redis that arq needs anyway, so all workers of all machines share it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import uuid
from typing import Any

from arq import Retry, create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

from ratekeeper import AsyncLimiter, ConfigError, StoreError

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379")
QUEUE = f"recipe:{uuid.uuid4().hex}"  # so that each run has jobs of its own
JOBS = 8
sent: list[int] = []


async def send(context: dict[str, Any], number: int) -> None:
    decision = await context["limiter"].check(("partner", QUEUE))
    if not decision:
        # A random part, because all jobs that are denied now would come back at the same time.
        raise Retry(defer=decision.retry_after * random.uniform(1, 1.5))
    sent.append(number)  # call the partner here


async def work(limits: str, max_tries: int) -> int:
    """Enqueue the jobs and serve them until the queue is empty. Return how many were done."""
    sent.clear()
    async with AsyncLimiter(limits, store=REDIS_URL, name="arq") as limiter:
        await limiter.reset(("partner", QUEUE))  # raises StoreError if Redis is away
        settings = RedisSettings.from_dsn(REDIS_URL)
        pool = await create_pool(settings, default_queue_name=QUEUE)
        for number in range(JOBS):
            await pool.enqueue_job("send", number)
        job: Any = send
        limited = func(job, max_tries=max_tries)
        worker = Worker(
            [limited],
            queue_name=QUEUE,
            redis_settings=settings,
            ctx={"limiter": limiter},
            burst=True,
            poll_delay=0.01,
            handle_signals=False,
        )
        await worker.main()
        await worker.close()
        await pool.aclose()
    return len(sent)


async def main() -> None:
    logging.getLogger("arq").setLevel(logging.CRITICAL)
    done = await work("20/second capacity 1", max_tries=1000)
    print(f"{done} of {JOBS} jobs were done")
    assert sorted(sent) == list(range(JOBS))

    done = await work("1/second", max_tries=1)
    print(f"with max_tries=1: {done} of {JOBS}")
    assert done < JOBS


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ConfigError as error:
        sys.exit(f"REDIS_URL={REDIS_URL} is not valid: {error}")
    except StoreError as error:
        sys.exit(
            f"no Redis at {REDIS_URL}: {error}\n"
            "Start one (docker run -p 6379:6379 redis:8), or set REDIS_URL."
        )
