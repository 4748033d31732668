"""The Redis part of a run: real servers started on loopback, measured, and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.redis_servers import Cluster, Single

from bench.redis_benchmark import RedisBenchmark
from bench.redis_bytes import fillings, measure_bytes
from bench.redis_engines import (
    CONNECTIONS_MAX,
    ENGINES,
    FOUR_LIMITS,
    LIMITS_FIXED,
    ONE_LIMIT,
    OURS,
    RULES,
)
from bench.redis_measure import RedisEffort, measure_async, measure_sync
from bench.redis_packed import measure_packed, packed_heading, packed_line
from bench.redis_placement import FREE, Placement, placed, placements
from bench.redis_report import (
    RedisResults,
    RedisWork,
    bytes_heading,
    bytes_line,
    bytes_proof,
    goals_of,
    goals_table,
    redis_header,
    redis_json,
    rows_heading,
    rows_table,
    server_facts,
)
from bench.redis_scripts import SCRIPTS_HEADING, measure_scripts, scripts_line

WORKS: Final = (
    *("redis async", "redis sync", "redis rules", "redis cluster"),
    *("redis bytes", "redis packed", "redis scripts"),
)
TASKS: Final = (1, 64, CONNECTIONS_MAX)
_LIMITS: Final = (("1 limit", ONE_LIMIT), ("4 limits", FOUR_LIMITS))

Progress = Callable[[str], None]


def run_redis(
    wanted: Callable[[str], bool], effort: RedisEffort, progress: Progress
) -> dict[str, Any] | None:
    """Run the selected benchmarks and print results as they arrive. Return all numbers, or None."""
    works = [work for work in WORKS if wanted(work)]
    if not works:
        return None
    results = RedisResults()
    with Single() as server:
        facts = server_facts(server)
        print(redis_header(facts, effort), flush=True)
        for number, placement in enumerate(placements()):
            with placed(placement, server):
                if "redis async" in works:
                    # All benchmarks for the first placement; for others, only those with a goal.
                    tasks = TASKS if number == 0 else TASKS[-1:]
                    _run_async(server, tasks, placement, effort, results, progress)
                if "redis sync" in works:
                    _run_sync(server, placement, effort, results, progress)
                if "redis rules" in works:
                    _run_rules(server, placement, effort, results, progress)
    if "redis cluster" in works:
        _run_cluster(effort, results, progress)
    if "redis bytes" in works:
        _run_bytes(effort, results, progress)
    if "redis packed" in works:
        _run_packed(effort, results, progress)
    if "redis scripts" in works:
        _run_scripts(effort, results, progress)
    results.goals = goals_of(results)
    if results.goals:
        print(goals_table(results.goals), flush=True)
    return redis_json(results, facts, effort)


def _show(work: RedisWork, results: RedisResults, progress: Progress) -> None:
    results.works.append(work)
    progress("")
    print(rows_table(work), flush=True)


def _run_async(
    server: Single,
    counts: Sequence[int],
    placement: Placement,
    effort: RedisEffort,
    results: RedisResults,
    progress: Progress,
) -> None:
    print(rows_heading("async", placement), flush=True)
    # All on one event loop: a peer's pool stays on the loop that first used it.
    with asyncio.Runner() as runner:
        for limits, rates in _LIMITS:
            for tasks in counts:
                name = f"{tasks} {'task' if tasks == 1 else 'tasks'}, {limits}"
                progress(f"measuring redis async, {name} …")
                tools = []
                if tasks == CONNECTIONS_MAX:
                    tools.append(RedisBenchmark(server, rates, tasks, effort.tool_requests))
                rows = runner.run(measure_async(server, ENGINES, rates, tasks, effort, tools))
                _show(RedisWork("async", placement.name, name, rows), results, progress)


def _run_sync(
    server: Single,
    placement: Placement,
    effort: RedisEffort,
    results: RedisResults,
    progress: Progress,
) -> None:
    print(rows_heading("sync", placement), flush=True)
    for limits, rates in _LIMITS:
        progress(f"measuring redis sync, {limits} …")
        rows = measure_sync(server, ENGINES, rates, effort)
        _show(RedisWork("sync", placement.name, limits, rows), results, progress)


def _run_rules(
    server: Single,
    placement: Placement,
    effort: RedisEffort,
    results: RedisResults,
    progress: Progress,
) -> None:
    print(rows_heading("rules", placement), flush=True)
    progress("measuring redis rules …")
    with asyncio.Runner() as runner:
        rows = runner.run(measure_async(server, RULES, ONE_LIMIT, CONNECTIONS_MAX, effort))
    name = f"{CONNECTIONS_MAX} tasks, rules"
    _show(RedisWork("rules", placement.name, name, rows), results, progress)


def _run_cluster(effort: RedisEffort, results: RedisResults, progress: Progress) -> None:
    print(rows_heading("cluster", FREE), flush=True)
    progress("measuring redis cluster …")
    # A node of a busy machine must not be taken for a dead one.
    with Cluster(node_timeout_ms=5_000) as cluster, asyncio.Runner() as runner:
        rows = runner.run(
            measure_async(cluster, (OURS, LIMITS_FIXED), ONE_LIMIT, CONNECTIONS_MAX, effort)
        )
    name = f"{CONNECTIONS_MAX} tasks, 1 limit"
    _show(RedisWork("cluster", FREE.name, name, rows), results, progress)


def _run_bytes(effort: RedisEffort, results: RedisResults, progress: Progress) -> None:
    print(bytes_heading(), flush=True)
    for filling in fillings(effort):
        progress(f"filling redis, {filling.work}, {filling.engine.name} …")
        found = measure_bytes(filling)
        progress("")
        results.sizes.append(found)
        print(bytes_line(found), flush=True)
    print(bytes_proof(results.sizes), flush=True)


def _run_packed(effort: RedisEffort, results: RedisResults, progress: Progress) -> None:
    print(packed_heading(), flush=True)
    progress("filling redis, packed …")
    for row in measure_packed(effort):
        progress("")
        results.packed.append(row)
        print(packed_line(row), flush=True)


def _run_scripts(effort: RedisEffort, results: RedisResults, progress: Progress) -> None:
    print(SCRIPTS_HEADING, flush=True)
    progress("measuring the scripts of redis …")
    for row in measure_scripts(effort):
        progress("")
        results.scripts.append(row)
        print(scripts_line(row), flush=True)
