"""Several processes and one hot key on the shared store. No peer has such a store.

Each process opens the same file, waits for a barrier, and then checks the same key for a while. The
benchmark verifies that the processes overlapped. The result is the sum of their rates. With two
processes, rounds differed by up to a factor of three on the development machine. The reason is
unknown, so the minimum and the maximum are printed, too.

The result is compared with the in-process stores of the peers in one process. That is their best
throughput here, because a second process would have its own quota.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from statistics import median
from time import perf_counter_ns
from typing import Final

from bench.engines import Rate, shared_folder, shared_uri
from bench.measure import DAY, Effort
from ratekeeper import Limiter
from ratekeeper.core.model import AlgorithmName

SECONDS: Final = 0.2
BATCH: Final = 1_000
OVERLAP_MIN: Final = 0.8
# Another program may delay one of the processes. Such a round is repeated.
ATTEMPTS_MAX: Final = 10
LIMIT: Final = 1_000_000_000
# The largest limit of a log. A process stops when it has spent its share.
LOG_LIMIT: Final = 1_000_000

# The calls of one process, and when it began and ended.
Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput of several processes on one key."""

    algorithm: AlgorithmName
    processes: int
    rounds: tuple[float, ...]
    """Checks per second of all processes, for each round."""

    @property
    def checks_per_second(self) -> float:
        return median(self.rounds)


def measure_processes(algorithm: AlgorithmName, effort: Effort) -> list[Throughput]:
    """Measure one process, and one process per processor (at least 2)."""
    return [
        Throughput(algorithm, count, tuple(_run(algorithm, count) for _ in range(effort.rounds)))
        for count in (1, max(2, os.cpu_count() or 2))
    ]


def _run(algorithm: AlgorithmName, processes: int) -> float:
    """Return the checks per second of a round in which the processes ran at the same time."""
    for _ in range(ATTEMPTS_MAX):
        spans = _round(algorithm, processes)
        if _overlap(spans) >= OVERLAP_MIN:
            return sum(calls * 1e9 / (end - begin) for calls, begin, end in spans)
    raise RuntimeError(
        f"in {ATTEMPTS_MAX} rounds, {processes} processes did not run at the same time; "
        f"stop the other programs on this machine"
    )


def _round(algorithm: AlgorithmName, processes: int) -> list[Span]:
    context = multiprocessing.get_context("spawn")
    limit = LOG_LIMIT if algorithm == "sliding_window_log" else LIMIT
    rate = Rate(algorithm, limit, DAY, keys_max=1_000)
    with shared_folder() as folder:
        # The parent keeps the file open, so that it exists before and after the workers.
        limiter = Limiter(rate.limit_value, store=shared_uri(folder, rate), on_failure="raise")
        start = context.Barrier(processes)
        workers = []
        for _ in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            share = limit // processes
            worker = context.Process(target=_hammer, args=(folder, rate, share, start, sender))
            worker.start()
            sender.close()
            workers.append((worker, receiver))
        spans = [receiver.recv() for _, receiver in workers]
        for worker, _ in workers:
            worker.join()
        _expect_all_counted(limiter, sum(calls for calls, _, _ in spans))
        limiter.close()
    return spans


def _hammer(folder: str, rate: Rate, share: int, start: Barrier, sender: Connection) -> None:
    limiter = Limiter(rate.limit_value, store=shared_uri(folder, rate), on_failure="raise")
    check = limiter.check
    calls = 0
    start.wait()
    begin_ns = end_ns = perf_counter_ns()
    until_ns = begin_ns + int(SECONDS * 1e9)
    while end_ns < until_ns and calls + BATCH <= share:
        for _ in range(BATCH):
            check("user:0")
        calls += BATCH
        end_ns = perf_counter_ns()
    sender.send((calls, begin_ns, end_ns))
    limiter.close()


def _expect_all_counted(limiter: Limiter, calls: int) -> None:
    """Verify that every check was counted, except for units that a bucket refilled."""
    spent = limiter.limits[0].capacity - limiter.peek("user:0").remaining
    if not 0.98 * calls <= spent <= calls:
        raise RuntimeError(f"{calls} checks spent {spent} units")


def _overlap(spans: list[Span]) -> float:
    """Return the part of the round in which all ran. All use the clock of perf_counter_ns."""
    together = min(end for _, _, end in spans) - max(begin for _, begin, _ in spans)
    return together / max(end - begin for _, begin, end in spans)
