"""A process that checks keys on a Redis, many at once: a program, so that there can be several.

    python -m tests.integration.redis_hammer '{"uri": "redis://localhost", "limits": ...}'

It says "ready", waits for a line, and checks each key until it is denied. What it prints then is
one JSON object: the requests admitted for each key, or with `tell` the decisions on each. `hammer`
starts several of them together.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

# Longer than anything here takes: reaching it means that somebody hangs.
HANGS_AFTER_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does. `limits` are the arguments of Limit, by name."""

    uri: str
    limits: Sequence[dict[str, Any]]
    keys: Sequence[str] = ("k",)
    cost: int = 1
    wire: str = "threads"
    at_once: int = 4
    clock_off_seconds: int = 0
    tell: int = 0


def hammer(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run the jobs at once, each in a process of its own; what each printed."""
    program = (sys.executable, "-m", "tests.integration.redis_hammer")
    processes = [
        subprocess.Popen(
            [*program, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    try:
        for process in processes:
            process.stdout.readline()  # ready, or over
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        results = []
        for process in processes:
            printed, errors = process.communicate(timeout=HANGS_AFTER_SECONDS)
            assert process.returncode == 0, errors
            results.append(json.loads(printed))
        return results
    finally:
        for process in processes:
            with process:  # which closes its pipes and waits for it
                process.kill()


def admitted(results: Sequence[dict[str, Any]]) -> Counter[str]:
    """The requests admitted for each key, by all together."""
    return sum((Counter(result) for result in results), Counter())


def set_clock_off(seconds: int) -> None:
    """Make this process's wall clock wrong, for whoever reads it from here on."""
    time_ns = time.time_ns
    time.time_ns = lambda: time_ns() + seconds * 10**9
    time.time = lambda: time.time_ns() / 10**9


def work(job: Job) -> dict[str, Any]:
    """Do the job when told to."""
    # After the clock was set: they read it when they are imported.
    from tollkeeper import AsyncLimiter, Limit, Limiter  # noqa: PLC0415 - see above
    from tollkeeper.core.clock import SystemClock  # noqa: PLC0415 - see above
    from tollkeeper.decide.stores import open_store  # noqa: PLC0415 - see above

    # A machine that tests may pause for longer than a production's deadlines.
    store = open_store(job.uri, deadline_ms=10_000, connect_ms=10_000)
    limits = [Limit(**each) for each in job.limits]
    if job.wire == "asyncio":
        waiting = AsyncLimiter(limits, store=store, on_failure="raise")
        return asyncio.run(spend_in_tasks(job, waiting))
    limiter = Limiter(limits, store=store, on_failure="raise")
    limiter.peek("anyone")  # connected, so that all begin at once
    wait_for_go()
    if job.tell:
        return tell(job, limiter, SystemClock().now_ns())
    with ThreadPoolExecutor(job.at_once) as pool:
        spent = pool.map(lambda number: spend(job, limiter, number), range(job.at_once))
        return sum(spent, Counter())


def wait_for_go() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def keys_from(job: Job, number: int) -> list[str]:
    """The keys, each worker beginning with another one."""
    start = number % len(job.keys)
    return [*job.keys[start:], *job.keys[:start]]


def spend(job: Job, limiter: Any, number: int) -> Counter[str]:
    """One thread: check every key until it is denied."""
    counts: Counter[str] = Counter()
    for key in keys_from(job, number):
        while limiter.check(key, job.cost):
            counts[key] += 1
    return counts


async def spend_in_tasks(job: Job, limiter: Any) -> Counter[str]:
    """As `spend`, in so many tasks."""

    async def spend(number: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        for key in keys_from(job, number):
            while await limiter.check(key, job.cost):
                counts[key] += 1
        return counts

    await limiter.peek("anyone")
    wait_for_go()
    spent = await asyncio.gather(*(spend(number) for number in range(job.at_once)))
    await limiter.store.aclose()
    return sum(spent, Counter())


def tell(job: Job, limiter: Any, now_ns: int) -> dict[str, Any]:
    """The decisions on so many checks of each key, and the time by this process's clock."""
    told = {
        key: [
            (found.allowed, found.limit, found.remaining, found.retry_after, found.reset_after)
            for found in (limiter.check(key, job.cost) for _ in range(job.tell))
        ]
        for key in job.keys
    }
    return {"told": told, "now_ns": now_ns}


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    set_clock_off(asked.clock_off_seconds)
    print(json.dumps(work(asked)))
