"""The printed report of Redis: the server, the method, tables, and a comparison with the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Final

from tests.redis_servers import Single

from bench.redis_bytes import MANY, Bytes
from bench.redis_measure import RedisEffort, RedisRow
from bench.redis_packed import PackedRow
from bench.redis_placement import Placement
from bench.redis_scripts import ScriptTime

_WIDTHS: Final = (20, 34, 10, 9, 9, 8, 11)
_HEADINGS: Final = ("work", "engine", "checks/s", "p50 µs", "p99 µs", "ratio", "connections")
# Bytes per state, with ten million states.
_BYTES_GOALS: Final = {("one limit", MANY): 45, ("ten limits", MANY // 10): 30}
_BYTES_WIDTHS: Final = (20, 34, 10, 11, 11, 11)
_BYTES_HEADINGS: Final = ("work", "engine", "states", "bytes/state", "10 M states", "10 M keys")


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of the design, and the measured number."""

    what: str
    found: float
    floor: float
    goal: float
    less_is_better: bool = False

    def __str__(self) -> str:
        sign = -1 if self.less_is_better else 1
        if sign * self.found >= sign * self.goal:
            verdict = "goal met"
        elif sign * self.found >= sign * self.floor:
            verdict = "between floor and goal"
        else:
            verdict = "MISSES THE FLOOR"
        numbers = f"{self.found:7.2f}   floor {self.floor:g}, goal {self.goal:g}: {verdict}"
        return f"  {self.what:74}  {numbers}"


@dataclass(slots=True)
class RedisWork:
    """One benchmark in a table, with one row per engine. The first row is ratekeeper."""

    kind: str
    """async, sync, rules or cluster."""
    placement: str
    name: str
    rows: Sequence[RedisRow]

    def ratio(self, row: RedisRow) -> float:
        """Return the ratio to the first row: of p50 with one caller, else of checks per second."""
        first = self.rows[0]
        return row.slower(first) if self.kind == "sync" else row.behind(first)


@dataclass(slots=True)
class RedisResults:
    """All measured numbers."""

    works: list[RedisWork] = field(default_factory=list)
    sizes: list[Bytes] = field(default_factory=list)
    packed: list[PackedRow] = field(default_factory=list)
    scripts: list[ScriptTime] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)


def server_facts(server: Single) -> dict[str, Any]:
    """Return the versions and settings that the server reports."""
    facts = server.admin.info()
    settings = server.admin.config_get("save", "appendonly", "io-threads")
    return {
        "redis": facts["redis_version"],
        "allocator": facts["mem_allocator"],
        "save": settings["save"],
        "appendonly": settings["appendonly"],
        "io-threads": settings["io-threads"],
        "redis-py": version("redis"),
        "hiredis": version("hiredis"),
    }


def redis_header(facts: dict[str, Any], effort: RedisEffort) -> str:
    """Return a few lines about the server and the method."""
    persistent = facts["save"] or facts["appendonly"] != "no"
    return (
        f"\nredis {facts['redis']} over TCP on loopback, allocator {facts['allocator']}, "
        f"persistence {'ON' if persistent else 'off (no snapshots, no AOF)'}, "
        f"io-threads {facts['io-threads']}"
        f"\npeers on redis-py {facts['redis-py']} with hiredis {facts['hiredis']}, a connection "
        f"per task; ratekeeper on one connection; all on asyncio's event loop\n"
        f"{effort.rounds} rounds, engines take turns; a run: each caller checks its own key in a "
        f"closed loop, for {effort.run_seconds:g} s on an empty database\n"
        f"p50, p99: of all calls of a run, timed one by one; a check of four limits is four calls "
        f"with a peer and one with ratekeeper\n"
        f"server and callers are pinned, the same for every engine: on a processor each, and both "
        f"on one; the placement decides the numbers"
    )


def rows_heading(kind: str, placement: Placement) -> str:
    """Return the lines above a table."""
    rates = "ratio: checks/s of the first row / this row's"
    what, ratio = {
        "async": ("redis, asyncio", rates),
        "rules": ("redis, asyncio, limiters with rules", rates),
        "cluster": ("redis cluster of three primaries and three replicas, asyncio", rates),
        "sync": ("redis, one blocking caller", "ratio: this row's p50 / the first row's"),
    }[kind]
    return f"\n{what}; {placement.text}; {ratio}\n{_rule(_HEADINGS, _WIDTHS)}"


def rows_table(work: RedisWork) -> str:
    """Return the lines of one benchmark."""
    return "\n".join(
        _line(
            (
                work.name,
                row.name,
                f"{row.checks_per_second:,.0f}",
                f"{row.p50_us:,.0f}",
                f"{row.p99_us:,.0f}",
                f"{work.ratio(row):.2f}",
                str(row.connections or ""),
            ),
            _WIDTHS,
        )
        for row in work.rows
    )


def bytes_heading() -> str:
    """Return the lines above the sizes."""
    return (
        "\nredis, bytes per state (one limit's count of one subject) of peers: used_memory of a "
        "fresh server; units spent: 1 to 10,000\non a logarithmic scale; the last two columns are "
        "computed for 10,000,000 states\nand for 10,000,000 keys in one server, with the same "
        "bytes per key and larger hash tables\n"
        f"{_rule(_BYTES_HEADINGS, _BYTES_WIDTHS)}"
    )


def bytes_line(found: Bytes) -> str:
    """Return the line of one server."""
    return _line(
        (
            found.work,
            found.engine,
            f"{found.states:,}",
            f"{found.per_state:.1f}",
            f"{found.per_state_of_many:.1f}",
            f"{found.per_state_of_many_keys:.1f}",
        ),
        _BYTES_WIDTHS,
    )


def bytes_proof(sizes: Sequence[Bytes]) -> str:
    """Compare computed and measured sizes, and return the memory of ten million states."""
    lines = []
    for small in sizes:
        for large in sizes:
            same = (small.work, small.engine) == (large.work, large.engine)
            if same and small.keys < large.keys:
                computed = small.per_state_with(large.keys)
                lines.append(
                    f"{large.work}, {large.states:,} states: {large.per_state:.2f} bytes each, "
                    f"{computed:.2f} computed from {small.states:,} states; the resident set "
                    f"grew by {large.resident_per_state:.2f}\n"
                    f"{MANY:,} such states would take {large.per_state_of_many * MANY / 1e9:.2f} GB"
                )
    return "\n".join(lines)


def goals_of(results: RedisResults) -> list[Goal]:
    """Return the goals of the design that were measured.

    `limits` is compared twice: its fastest yes or no, and its fastest check that also returns the
    remaining units, as ours does.
    """
    goals: list[Goal] = []
    for work in results.works:
        if work.kind == "sync":
            goals += _against_limits(work, floor=2, goal=3)
        elif work.kind == "async" and work.name.startswith("256"):
            goals += _against_limits(work, floor=5, goal=8)
            goals += [
                Goal(_against(work, row), work.ratio(row), floor=0.5, goal=0.8)
                for row in work.rows
                if row.name.startswith("redis-benchmark")
            ]
        elif work.kind == "rules":
            one, two = work.rows
            what = f"two rules against one, {work.placement}"
            goals += [
                Goal(f"{what}: checks per second", 1 / two.behind(one), floor=0.4, goal=0.7),
                Goal(
                    f"{what}: processor time of the client",
                    two.costlier(one),
                    floor=3,
                    goal=2,
                    less_is_better=True,
                ),
            ]
    for row in results.packed:
        goal = _BYTES_GOALS.get((row.work, row.subjects))
        if goal is not None:
            what = f"{row.work}, {row.subjects:,} subjects: bytes per state"
            goals.append(Goal(what, row.bytes_per_state, 50, goal, less_is_better=True))
    return goals


def _against_limits(work: RedisWork, floor: float, goal: float) -> list[Goal]:
    peers = [row for row in work.rows if row.name.startswith("limits")]
    goals = []
    for full_answer in (False, True):
        rows = [row for row in peers if ("alone" not in row.name) is full_answer]
        fastest = min(rows, key=work.ratio)
        goals.append(Goal(_against(work, fastest), work.ratio(fastest), floor, goal))
    return goals


def _against(work: RedisWork, row: RedisRow) -> str:
    return f"{work.kind}, {work.placement}, {work.name}: × {row.name}"


def goals_table(goals: Sequence[Goal]) -> str:
    """Return one line per goal."""
    return "\n".join(("\nredis against the goals", *map(str, goals)))


def redis_json(results: RedisResults, facts: dict[str, Any], effort: RedisEffort) -> dict[str, Any]:
    """Return all numbers, with those of each round."""
    return {
        "server": facts,
        "effort": asdict(effort),
        "rows": [
            {
                "kind": work.kind,
                "placement": work.placement,
                "work": work.name,
                **asdict(row),
                "ratio": work.ratio(row),
            }
            for work in results.works
            for row in work.rows
        ],
        "bytes": [
            {
                **asdict(each),
                "per_state": each.per_state,
                "per_state_of_10m_states": each.per_state_of_many,
                "per_state_of_10m_keys": each.per_state_of_many_keys,
            }
            for each in results.sizes
        ],
        "packed": [asdict(row) for row in results.packed],
        "scripts": [asdict(row) for row in results.scripts],
        "goals": [asdict(goal) for goal in results.goals],
    }


def _rule(headings: Sequence[str], widths: Sequence[int]) -> str:
    return f"{_line(headings, widths)}\n{_line(('-' * width for width in widths), widths)}"


def _line(cells: Iterable[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if number < 2 else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
