"""A program that checks keys on a Redis, many at once. Tests run several of it as processes.

    python -m tests.integration.redis_hammer 60

Its wall clock is wrong by this number of seconds. It reads one job a line, as JSON. For each job it
connects, prints "ready", waits for a line, and checks each key until it is denied. Then it prints
one JSON object: the requests admitted for each key, or with `record` that many decisions on each.

A `Crew` is several such processes, which do one job after the other: to start a process takes
longer than most jobs.
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
from threading import Timer
from typing import Any

# Longer than any job takes: a process that reaches it hangs, and is killed.
HANGS_AFTER_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one process. `limits` are the arguments of Limit, by name."""

    uri: str
    limits: Sequence[dict[str, Any]]
    keys: Sequence[str] = ("k",)
    cost: int = 1
    wire: str = "threads"
    at_once: int = 4
    record: int = 0


class Crew:
    """Processes that wait for jobs."""

    def __init__(self, size: int, clock_off_seconds: int = 0) -> None:
        program = (sys.executable, "-m", "tests.integration.redis_hammer", str(clock_off_seconds))
        self._processes = [
            subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(size)
        ]

    def hammer(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Run the jobs at once, each in its own process; return the printed result of each."""
        crew = self._processes[: len(jobs)]
        assert len(crew) == len(jobs)
        hangs = Timer(HANGS_AFTER_SECONDS, self._kill)
        hangs.start()
        try:
            for process, job in zip(crew, jobs, strict=True):
                _tell(process, json.dumps(asdict(job)))
            for process in crew:
                # The line is empty if the process failed; the test shows its stderr.
                assert process.stdout.readline() == "ready\n"
            for process in crew:
                _tell(process, "go")
            return [json.loads(process.stdout.readline()) for process in crew]
        finally:
            hangs.cancel()

    def close(self) -> None:
        """End the processes."""
        self._kill()
        for process in self._processes:
            with process:  # closes its pipes and waits for it
                pass

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def admitted(results: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the requests admitted for each key, by all processes together."""
    return sum((Counter(result) for result in results), Counter())


def set_clock_off(seconds: int) -> None:
    """Make the wall clock of this process wrong."""
    time_ns = time.time_ns
    time.time_ns = lambda: time_ns() + seconds * 10**9
    time.time = lambda: time.time_ns() / 10**9


def work(job: Job) -> dict[str, Any]:
    """Do the job after the start signal."""
    # Imported after the clock was set, because they read it at import.
    from ratekeeper import AsyncLimiter, Limit, Limiter  # noqa: PLC0415 - see above
    from ratekeeper.core.clock import SystemClock  # noqa: PLC0415 - see above
    from ratekeeper.decide.stores import open_store  # noqa: PLC0415 - see above

    # A test machine may pause for longer than the default deadline.
    store = open_store(job.uri, deadline_ms=10_000, connect_ms=10_000)
    limits = [Limit(**each) for each in job.limits]
    if job.wire == "asyncio":
        async_limiter = AsyncLimiter(limits, store=store, on_failure="raise")
        return asyncio.run(spend_in_tasks(job, async_limiter))
    with Limiter(limits, store=store, on_failure="raise") as limiter:
        limiter.peek("anyone")  # connect first, so that all processes begin at once
        wait_for_go()
        if job.record:
            return record(job, limiter, SystemClock().now_ns())
        with ThreadPoolExecutor(job.at_once) as pool:
            spent = pool.map(lambda number: spend(job, limiter, number), range(job.at_once))
            return sum(spent, Counter())


def wait_for_go() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def keys_from(job: Job, number: int) -> list[str]:
    """Return the keys; each worker begins with another one."""
    start = number % len(job.keys)
    return [*job.keys[start:], *job.keys[:start]]


def spend(job: Job, limiter: Any, number: int) -> Counter[str]:
    """Check every key until it is denied, in one thread."""
    counts: Counter[str] = Counter()
    for key in keys_from(job, number):
        while limiter.check(key, job.cost):
            counts[key] += 1
    return counts


async def spend_in_tasks(job: Job, limiter: Any) -> Counter[str]:
    """Check every key until it is denied, in several tasks."""

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


def record(job: Job, limiter: Any, now_ns: int) -> dict[str, Any]:
    """Return the decisions on several checks of each key, and the time of this process's clock."""
    decisions = {
        key: [
            (each.allowed, each.limit, each.remaining, each.retry_after, each.reset_after)
            for each in (limiter.check(key, job.cost) for _ in range(job.record))
        ]
        for key in job.keys
    }
    return {"decisions": decisions, "now_ns": now_ns}


if __name__ == "__main__":
    set_clock_off(int(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(work(Job(**json.loads(line)))), flush=True)
