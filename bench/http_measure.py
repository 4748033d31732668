"""How it is measured over HTTP: servers side by side, taking turns.

All servers of a table are there at once, and stand still until it is their turn. A run is wrk for a
while; it gives requests a second, and the processor time that the server took for each. In every
round each server has one run, in an order that rotates; over rounds, medians; a ratio is the median
of the rounds' own ratios. Processor time says the same as requests a second where the server has a
processor to itself, and more where it has not: time that others took is not in it, only what they
pushed out of the caches.

Two processes of the same program differ by up to a tenth, for as long as they live, by where things
happen to lie in memory. So there are several sets of rounds, each with servers that start anew.

In each set, then the same with a load of half of what the slowest of them takes, the same for all,
for p50 and p99 (see `http_load.py`); what a server adds is the difference to the first one in the
same round.
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
    """How much of it: so many sets of so many rounds. wrk takes whole seconds."""

    sets: int
    rounds: int
    run_seconds: int
    paced_rounds: int
    paced_seconds: float


FULL: Final = HttpEffort(sets=3, rounds=3, run_seconds=1, paced_rounds=1, paced_seconds=1.0)
QUICK: Final = HttpEffort(sets=1, rounds=3, run_seconds=1, paced_rounds=1, paced_seconds=0.5)


@dataclass(frozen=True, slots=True)
class Contender:
    """One server: how to start it, and what to ask it."""

    name: str
    command: Sequence[str]
    requests: Sequence[bytes]
    ours: bool = False
    timed: bool = False
    """Is it asked at half load, too? The first and ours are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: Sequence[Serving] = ()
    """Servers that it asks for each request: their processor time counts as well."""


@dataclass(slots=True)
class HttpRow:
    """One server on one work, with a number for each round."""

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
        """The part of the first row's requests a second that this one does."""
        return median(mine / its for mine, its in zip(self.rates, first.rates, strict=True))

    def kept_of_cpu(self, first: HttpRow) -> float:
        """The same by processor time: what would be kept if nobody else were at work."""
        return median(its / mine for mine, its in zip(self.cpu_us, first.cpu_us, strict=True))

    def added_us(self, first: HttpRow) -> tuple[float, float]:
        """What it adds to the first row's p50 and p99 at half load."""
        pairs = list(zip(self.paced, first.paced, strict=True))
        return (
            median(mine.p50_us - its.p50_us for mine, its in pairs),
            median(mine.p99_us - its.p99_us for mine, its in pairs),
        )


@dataclass(slots=True)
class HttpWork:
    """One table: every server's row. Ratios are against the first."""

    name: str
    placement: str
    rows: Sequence[HttpRow]
    half_load: float = 0.0
    """Requests a second of the paced runs."""


Turn = tuple[HttpRow, Contender, Serving]


def measure(
    name: str,
    contenders: Sequence[Contender],
    placement: Placement,
    effort: HttpEffort,
    progress: Progress,
    load: float | None = None,
) -> HttpWork:
    """Start them, measure them side by side, and stop them.

    `load` is how many requests a second come in the paced runs, if not half of what they take.
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
            wrk(server.port, contender.requests, WARM_UP_SECONDS)
    for number in range(effort.rounds):
        for row, contender, server in _rotated(turns, number):
            progress(f"{title}: round {number + 1}, {row.name} …")
            _run(row, contender, server, effort.run_seconds)


def _measure_times(
    title: str, turns: Sequence[Turn], load: float, effort: HttpEffort, progress: Progress
) -> None:
    timed = [turn for turn in turns if turn[1].timed]
    for number in range(effort.paced_rounds):
        for row, contender, server in _rotated(timed, number):
            progress(f"{title}: half load, round {number + 1}, {row.name} …")
            with server.turn():
                found = paced(server.port, contender.requests, load, effort.paced_seconds)
            row.paced.append(found)


def _rotated(turns: Sequence[Turn], number: int) -> Sequence[Turn]:
    first = number % len(turns) if turns else 0
    return [*turns[first:], *turns[:first]]


def _run(row: HttpRow, contender: Contender, server: Serving, seconds: int) -> None:
    sessions = {server.session, *(each.session for each in contender.beside)}
    before_us = _processor_us(sessions)
    with server.turn():
        rate = wrk(server.port, contender.requests, seconds)
    row.rates.append(rate)
    row.cpu_us.append((_processor_us(sessions) - before_us) / (rate * seconds))


def _half_load(turns: Iterable[Turn]) -> float:
    rates = [row.requests_per_second for row, contender, _ in turns if contender.timed]
    return min(rates, default=0.0) / 2


def _processor_us(sessions: set[int]) -> float:
    """Processor time that the processes of these sessions have taken so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the name, in parentheses, with anything in it.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) in sessions:
            ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e6 / _TICKS_PER_SECOND
