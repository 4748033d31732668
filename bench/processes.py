"""Several processes, one hot key: the shared store, which peers have no like of.

Each process opens the same file and, at a signal, checks the same key for a while: long enough that
waking up at the signal is a small part of it, and that they overlapped is checked. What they got
together is the sum of their rates. The rounds of two processes differ by up to three times on the
machine this was written on, for a reason not found, so the least and the greatest are shown too.

Beside it stand the peers' in-process stores in one process, whose throughput is the best they can
give this work: a second process would have a quota of its own.
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
from tollkeeper.core.model import AlgorithmName

SECONDS: Final = 0.2
BATCH: Final = 1_000
OVERLAP_MIN: Final = 0.8
LIMIT: Final = 1_000_000_000
# A log can hold no more; processes stop when they have spent their share of it.
LOG_LIMIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Throughput:
    """What so many processes got out of one key together."""

    algorithm: AlgorithmName
    processes: int
    rounds: tuple[float, ...]
    """Checks a second in all, in each round."""

    @property
    def checks_per_second(self) -> float:
        return median(self.rounds)


def measure_processes(algorithm: AlgorithmName, effort: Effort) -> list[Throughput]:
    """One process, and as many as there are processors (2 at least)."""
    return [
        Throughput(algorithm, count, tuple(_run(algorithm, count) for _ in range(effort.rounds)))
        for count in (1, max(2, os.cpu_count() or 2))
    ]


def _run(algorithm: AlgorithmName, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    limit = LOG_LIMIT if algorithm == "sliding_window_log" else LIMIT
    rate = Rate(algorithm, limit, DAY, keys_max=1_000)
    with shared_folder() as folder:
        # Held open here, so that it is there before the first process and after the last.
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
    _expect_overlap(spans)
    return sum(calls * 1e9 / (end - begin) for calls, begin, end in spans)


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
    """Every check of every process was counted, but for what a bucket refilled meanwhile."""
    spent = limiter.limits[0].capacity - limiter.peek("user:0").remaining
    if not 0.98 * calls <= spent <= calls:
        raise RuntimeError(f"{calls} checks, but {spent} units spent")


def _expect_overlap(spans: list[tuple[int, int, int]]) -> None:
    """The processes were at it at the same time: perf_counter_ns is one clock for all of them."""
    together = min(end for _, _, end in spans) - max(begin for _, begin, _ in spans)
    longest = max(end - begin for _, begin, end in spans)
    if together < OVERLAP_MIN * longest:
        raise RuntimeError(f"processes ran together for {together / longest:.0%} of the time only")
