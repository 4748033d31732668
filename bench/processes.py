"""Several processes, one hot key: the shared store, which peers have no like of.

Each process opens the same file and, at a signal, checks the same key so many times. The work's
time is from the first start to the last end on one clock. Beside it stand the peers' in-process
stores in one process, whose throughput is the best they can give this work: a second process
would have a quota of its own.
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
from tollkeeper import Limiter
from tollkeeper.model import AlgorithmName

CALLS: Final = 100_000
# More than all processes spend together, and as many as a log may have.
LIMIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Throughput:
    """What so many processes got out of one key together."""

    algorithm: AlgorithmName
    processes: int
    checks_per_second: float


def measure_processes(algorithm: AlgorithmName, effort: Effort) -> list[Throughput]:
    """One process, and as many as there are processors (2 at least)."""
    counts = (1, min(max(2, os.cpu_count() or 2), LIMIT // CALLS - 1))
    return [
        Throughput(algorithm, count, median(_run(algorithm, count) for _ in range(effort.rounds)))
        for count in counts
    ]


def _run(algorithm: AlgorithmName, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    rate = Rate(algorithm, LIMIT, DAY, keys_max=1_000)
    with shared_folder() as folder:
        # Held open here, so that it is there before the first process and after the last.
        limiter = Limiter(rate.limit_value, store=shared_uri(folder, rate), on_failure="raise")
        start = context.Barrier(processes)
        workers = []
        for _ in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_hammer, args=(folder, rate, start, sender))
            worker.start()
            sender.close()
            workers.append((worker, receiver))
        spans = [receiver.recv() for _, receiver in workers]
        for worker, _ in workers:
            worker.join()
        _expect_all_counted(limiter, processes)
        limiter.close()
    took_ns = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return processes * CALLS * 1e9 / took_ns


def _hammer(folder: str, rate: Rate, start: Barrier, sender: Connection) -> None:
    limiter = Limiter(rate.limit_value, store=shared_uri(folder, rate), on_failure="raise")
    check = limiter.check
    start.wait()
    begin_ns = perf_counter_ns()
    for _ in range(CALLS):
        check("user:0")
    sender.send((begin_ns, perf_counter_ns()))
    limiter.close()


def _expect_all_counted(limiter: Limiter, processes: int) -> None:
    """Every check of every process was counted, but for what a bucket refilled meanwhile."""
    spent = limiter.limits[0].capacity - limiter.peek("user:0").remaining
    if not 0.99 * processes * CALLS <= spent <= processes * CALLS:
        raise RuntimeError(f"{processes} × {CALLS} checks, but {spent} units spent")
