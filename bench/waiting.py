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
# A busy machine may pause a process for longer than the default deadline.
PATIENT = "deadline_ms=10000&connect_ms=10000"
FAIR_S = (SMALL + LARGE * LARGE_COST) / RATE
"""How long a single queue takes to serve every waiter once."""


class Waits(NamedTuple):
    """The waits of one process in seconds, and when it ran, by the clock of the machine."""

    small: list[float]
    large: list[float]
    began_s: float
    ended_s: float


async def wait_again(limiter: AsyncLimiter, cost: int, until_s: float, into: list[float]) -> None:
    """Wait for room, again and again; the last wait may end later."""
    while (start := time.monotonic()) < until_s:
        assert await limiter.wait("all", cost)
        into.append(time.monotonic() - start)


async def work(uri: str, small: int, large: int, seconds: float) -> Waits:
    """Run the waiters of one process."""
    found: tuple[list[float], list[float]] = ([], [])
    async with AsyncLimiter(LIMIT, store=uri, on_failure="raise") as limiter:
        await limiter.peek("all")
        start = time.monotonic()
        waits = [(LARGE_COST, found[1])] * large + [(1, found[0])] * small
        await asyncio.gather(
            *[wait_again(limiter, cost, start + seconds, to) for cost, to in waits]
        )
        return Waits(*found, start, time.monotonic())


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
    units = len(small) + LARGE_COST * len(large)
    seconds = max(each.ended_s for each in found) - min(each.began_s for each in found)
    return (
        f"{units} units; {LIMIT} admits {int(RATE + RATE * seconds)} in {seconds:.1f} s\n"
        f"a single queue serves every waiter once in {FAIR_S:.2f} s\n"
        f"small: {len(small)} served, longest wait {max(small):.2f} s\n"
        f"large: {len(large)} served, longest wait {max(large):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    with Single() as server:
        print(report(measure(f"{server.uri}?{PATIENT}", seconds)))


if __name__ == "__main__":
    main()
