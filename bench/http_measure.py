"""The method of the HTTP benchmarks: all servers run side by side and take turns.

All servers of a table are started together, and each is paused until its turn. A run is some
seconds of wrk; it yields requests per second and the processor time of the server per request. In
every round each server has one run, in a rotating order. Results are medians over the rounds, and a
ratio is the median of the ratios of each round. If a server has a processor of its own, processor
time says the same as requests per second. Otherwise it says more: it excludes the time of other
processes, except for their effect on the caches.

Two processes of the same program differ by up to a tenth, because of their memory layout. So there
are several sets of rounds, each with newly started servers.

Each set also has paced runs, with half the load that the slowest server can handle, for p50 and p99
(see `http_load.py`). The latency that a server adds is the difference to the first one in the same
round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench.http_load import Paced, paced, wrk
from bench.http_servers import Serving, on_processors
from bench.redis_placement import Placement

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
WARM_UP_SECONDS: Final = 1

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HttpEffort:
    """The number of sets and rounds, and their seconds. wrk takes whole seconds."""

    sets: int
    rounds: int
    run_seconds: int
    paced_rounds: int
    paced_seconds: float


FULL: Final = HttpEffort(sets=3, rounds=3, run_seconds=1, paced_rounds=1, paced_seconds=1.0)
QUICK: Final = HttpEffort(sets=1, rounds=3, run_seconds=1, paced_rounds=1, paced_seconds=0.5)


@dataclass(frozen=True, slots=True)
class Contender:
    """One server: its command, and the requests to send."""

    name: str
    command: Sequence[str]
    requests: Sequence[bytes]
    ours: bool = False
    timed: bool = False
    """True if it has paced runs, too, as the first server and ours have."""
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: Sequence[Serving] = ()
    """Servers that it calls for each request: their processor time counts, too."""
    runs_on: bool = False
    """True if the server is not paused between its turns, because it has to talk to others."""
    rate: Callable[[int], float] | None = None
    """Returns the requests per second of some seconds of another load than wrk's."""
    pace: Callable[[float, float], Paced] | None = None
    """The paced run of that load, with the requests per second and the seconds."""

    def load(self, port: int, seconds: int) -> float:
        """Return the requests per second that the server on `port` answers."""
        return self.rate(seconds) if self.rate else wrk(port, self.requests, seconds)

    def paced(self, port: int, per_second: float, seconds: float) -> Paced:
        """Return the result of a load with a fixed rate."""
        if self.pace:
            return self.pace(per_second, seconds)
        return paced(port, self.requests, per_second, seconds)


@dataclass(slots=True)
class HttpRow:
    """The results of one server, with one number per round."""

    name: str
    ours: bool
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    paced: list[Paced] = field(default_factory=list)

    @property
    def requests_per_second(self) -> float:
        return median(self.rates)

    @property
    def cpu(self) -> float:
        return median(self.cpu_us)

    def kept(self, first: HttpRow) -> float:
        """Return the requests per second, relative to the first row."""
        return median(mine / its for mine, its in zip(self.rates, first.rates, strict=True))

    def kept_of_cpu(self, first: HttpRow) -> float:
        """Return the same by processor time, which excludes other processes."""
        return median(its / mine for mine, its in zip(self.cpu_us, first.cpu_us, strict=True))

    def added_us(self, first: HttpRow) -> tuple[float, float]:
        """Return the latency added to the first row's p50 and p99 at half load."""
        pairs = list(zip(self.paced, first.paced, strict=True))
        return (
            median(mine.p50_us - its.p50_us for mine, its in pairs),
            median(mine.p99_us - its.p99_us for mine, its in pairs),
        )


@dataclass(slots=True)
class HttpWork:
    """One table with a row per server. Ratios are relative to the first."""

    name: str
    placement: str
    rows: Sequence[HttpRow]
    half_load: float = 0.0
    """Requests per second of the paced runs."""
    notes: list[str] = field(default_factory=list)
    """Lines to print below the table."""


Turn = tuple[HttpRow, Contender, Serving]


def measure(
    name: str,
    contenders: Sequence[Contender],
    placement: Placement,
    effort: HttpEffort,
    progress: Progress,
    load: float | None = None,
) -> HttpWork:
    """Start the servers, measure them side by side, and stop them.

    `load` is the number of requests per second of the paced runs; by default half the capacity.
    """
    work = HttpWork(name, placement.name, [HttpRow(each.name, each.ours) for each in contenders])
    for number in range(effort.sets):
        title = f"{name}, set {number + 1}"
        with ExitStack() as stack:
            servers = []
            for each in contenders:
                progress(f"{title}: starting {each.name} …")
                server = Serving(
                    each.name, each.command, each.requests[0], placement.server, each.environment
                )
                server.runs_on = each.runs_on
                servers.append(stack.enter_context(server))
                server.pause()
            turns = list(zip(work.rows, contenders, servers, strict=True))
            with on_processors(placement.callers):
                _measure_rates(title, turns, effort, progress)
                work.half_load = work.half_load or load or _half_load(turns)
                _measure_times(title, turns, work.half_load, effort, progress)
    return work


def _measure_rates(
    title: str, turns: Sequence[Turn], effort: HttpEffort, progress: Progress
) -> None:
    for _, contender, server in turns:
        with server.turn():
            contender.load(server.port, WARM_UP_SECONDS)
    for number in range(effort.rounds):
        for row, contender, server in _rotated(turns, number):
            progress(f"{title}: round {number + 1}, {row.name} …")
            run(row, contender, server, effort.run_seconds)


def _measure_times(
    title: str, turns: Sequence[Turn], load: float, effort: HttpEffort, progress: Progress
) -> None:
    timed = [turn for turn in turns if turn[1].timed]
    for number in range(effort.paced_rounds):
        for row, contender, server in _rotated(timed, number):
            progress(f"{title}: half load, round {number + 1}, {row.name} …")
            with server.turn():
                found = contender.paced(server.port, load, effort.paced_seconds)
            row.paced.append(found)


def _rotated(turns: Sequence[Turn], number: int) -> Sequence[Turn]:
    first = number % len(turns) if turns else 0
    return [*turns[first:], *turns[:first]]


def run(row: HttpRow, contender: Contender, server: Serving, seconds: int) -> None:
    """Load a server for some seconds, and note its rate and its processor time per request."""
    sessions = {server.session, *(each.session for each in contender.beside)}
    with server.turn():
        before_us = _processor_us(sessions)
        rate = contender.load(server.port, seconds)
    row.rates.append(rate)
    row.cpu_us.append((_processor_us(sessions) - before_us) / (rate * seconds))


def _half_load(turns: Iterable[Turn]) -> float:
    rates = [row.requests_per_second for row, contender, _ in turns if contender.timed]
    return min(rates, default=0.0) / 2


def _processor_us(sessions: set[int]) -> float:
    """Return the processor time that the processes of these sessions have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the name, in parentheses, with anything in it.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[3]) in sessions:
            ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e6 / _TICKS_PER_SECOND
