"""How long a large request waits beside small ones: 50 waiters of four processes on one Redis.

    python -m bench.waiting [--seconds 10]

All wait for one limit. 48 of them ask for one unit, again and again. The other two ask for half of
the limit, in two of the processes. A single queue for all would serve each in its turn: then a
large request waits until every other waiter was served once. The processes have no common queue.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from tests.redis_servers import Single

from ratekeeper import AsyncLimiter

PROCESSES = 4
SMALL = 48
LARGE = 2
RATE = 40
LARGE_COST = 20
LIMIT = f"{RATE}/second"
# A large request that waits for this many turns of a single queue has starved.
TURNS_MAX = 4
FAIR_S = (SMALL + LARGE * LARGE_COST) / RATE
"""How long a single queue takes to serve every waiter once."""


class Waits(NamedTuple):
    """The waits of one process, in seconds. `unserved` are those that the end cut off."""

    small: list[float]
    large: list[float]
    unserved: list[float]


async def wait_again(limiter: AsyncLimiter, cost: int, until_s: float, into: Waits) -> None:
    """Wait for room, again and again."""
    waits = into.small if cost == 1 else into.large
    while (start := time.monotonic()) < until_s:
        decision = await limiter.wait("all", cost, timeout=max(until_s - start, 0.0) + 60)
        waits.append(time.monotonic() - start)
        assert decision.allowed


async def work(uri: str, small: int, large: int, seconds: float) -> Waits:
    """Run the waiters of one process."""
    found = Waits([], [], [])
    async with AsyncLimiter(LIMIT, store=uri, on_failure="raise") as limiter:
        await limiter.peek("all")
        until_s = time.monotonic() + seconds
        costs = [LARGE_COST] * large + [1] * small
        tasks = {
            asyncio.create_task(wait_again(limiter, cost, until_s, found)): cost for cost in costs
        }
        start = time.monotonic()
        _, unserved = await asyncio.wait(tasks, timeout=seconds + FAIR_S)
        for task in unserved:
            found.unserved.append(time.monotonic() - start)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def process(uri: str, small: int, large: int, seconds: float, pipe: Connection) -> None:
    """Run the waiters of one process, and send their waits."""
    pipe.send(asyncio.run(work(uri, small, large, seconds)))


def measure(uri: str, seconds: float) -> list[Waits]:
    """Run the processes at the same time."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(PROCESSES):
        ours, theirs = context.Pipe()
        arguments = (uri, SMALL // PROCESSES, number < LARGE, seconds, theirs)
        processes.append(context.Process(target=process, args=arguments))
        processes[-1].start()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for each in processes:
        each.join()
    return found


def report(found: Sequence[Waits]) -> str:
    """Return the figures as text."""
    small = [wait for each in found for wait in each.small]
    large = [wait for each in found for wait in each.large]
    cut = [wait for each in found for wait in each.unserved]
    units = len(small) + LARGE_COST * len(large)
    return (
        f"{units} units admitted; one round of a single queue takes {FAIR_S:.2f} s\n"
        f"small: {len(small)} served, longest wait {max(small, default=0):.2f} s\n"
        f"large: {len(large)} served, longest wait {max(large, default=0):.2f} s\n"
        f"not served before the end: {len(cut)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    with Single() as server:
        print(report(measure(server.uri, seconds)))


if __name__ == "__main__":
    main()
