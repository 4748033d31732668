"""`python -m bench`: measure ratekeeper and its peers in one run, and compare them."""

from __future__ import annotations

import argparse
import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from bench.engines import OURS
from bench.measure import FULL, QUICK, SCENES, Effort, Scene, measure
from bench.page import page
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide import kernel

try:
    from bench.fleet import WORKS as FLEET_WORKS
    from bench.fleet import run_fleet
    from bench.http_load import wrk_path
    from bench.http_measure import FULL as HTTP_FULL
    from bench.http_measure import QUICK as HTTP_QUICK
    from bench.http_run import WORKS as HTTP_WORKS
    from bench.http_run import run_http
    from bench.limits_storages import WORKS as LIMITS_WORKS
    from bench.limits_storages import run_limits_storages
    from bench.memory import bytes_per_key
    from bench.peers import PEERS
    from bench.processes import Throughput, measure_processes
    from bench.record import FULL as RECORD_FULL
    from bench.record import QUICK as RECORD_QUICK
    from bench.record import WORKS as RECORD_WORKS
    from bench.record import run_record
    from bench.redis_measure import FULL as REDIS_FULL
    from bench.redis_measure import QUICK as REDIS_QUICK
    from bench.redis_measure import RedisEffort
    from bench.redis_run import WORKS as REDIS_WORKS
    from bench.redis_run import run_redis
    from bench.report import (
        Result,
        as_json,
        header,
        heading,
        machine,
        summary,
        table,
        throughput_table,
    )
    from bench.rules import WORKS as RULES_WORKS
    from bench.rules import run_rules
    from bench.settle import WORKS as SETTLE_WORKS
    from bench.settle import run_settle
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed; `make bench` does that, or: pip install '.[bench]'")

PROCESSES = "processes"
REDIS_ALGORITHM: AlgorithmName = "token_bucket"


class _Printed(io.StringIO):
    """Standard output that is also kept."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal

    def write(self, text: str) -> int:
        self._terminal.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._terminal.flush()


def main() -> None:
    """Measure the selected works, print results as they arrive, and save them."""
    options = _options()
    if any(_wanted(options, "", work) for work in HTTP_WORKS):
        wrk_path()  # fail before the long run, not after it
    found, now = machine(), datetime.now(UTC)
    with redirect_stdout(_Printed(sys.stdout)) as printed:
        _run(options, found)
    if options.markdown:
        text = page(printed.getvalue(), found, now, sys.argv[1:])
        options.markdown.write_text(text, encoding="utf-8")


def _run(options: argparse.Namespace, found: dict[str, Any]) -> None:
    effort = QUICK if options.quick else FULL
    print(header(effort, found), flush=True)
    results = _run_scenes(options, effort)
    throughputs = _run_processes(options, effort) if kernel.BUILT else []
    if throughputs:
        print(throughput_table(throughputs, results))
    if results:
        print(summary(results))
    storages = run_limits_storages(lambda work: _wanted(options, "", work), effort, _progress)
    fleet = run_fleet(lambda work: _wanted(options, "token_bucket", work), effort)
    rules = run_rules(lambda work: _wanted(options, "", work), effort, _progress)
    settle = run_settle(lambda work: _wanted(options, "", work), effort, _progress)
    redis = run_redis(
        lambda work: _wanted(options, REDIS_ALGORITHM, work),
        _redis_effort(options),
        _progress,
    )
    http = run_http(
        lambda work: _wanted(options, "", work),
        HTTP_QUICK if options.quick else HTTP_FULL,
        _progress,
    )
    record = run_record(
        lambda work: _wanted(options, "", work),
        RECORD_QUICK if options.quick else RECORD_FULL,
        _progress,
    )
    measured = (results, throughputs, storages, fleet, rules, settle, redis, http, record)
    if not any(measured):
        sys.exit(f"nothing is called {' '.join(options.only)}; see --help")
    if options.json:
        written = as_json(results, throughputs, effort, found)
        written["limits"] = as_json(storages, [], effort, found)["rows"]
        written["fleet"] = as_json(fleet, [], effort, found)["rows"]
        written["rules"] = rules
        written["settle"] = settle
        written["redis"] = redis
        written["http"] = http
        written["record"] = record
        options.json.write_text(json.dumps(written, indent=2) + "\n")


def _redis_effort(options: argparse.Namespace) -> RedisEffort:
    effort = REDIS_QUICK if options.quick else REDIS_FULL
    return replace(effort, packed_states=options.subjects) if options.subjects else effort


def _options() -> argparse.Namespace:
    works = [*(scene.name for scene in SCENES), PROCESSES, *RULES_WORKS, *REDIS_WORKS, *HTTP_WORKS]
    works += [*RECORD_WORKS, *FLEET_WORKS, *LIMITS_WORKS, *SETTLE_WORKS]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Ratekeeper beside limits and throttled-py, on the same work: in process; its "
        "shared store from several processes; as a storage of limits; in a node of a fleet; its "
        "rules; on real Redis servers, started here; and its service and middleware over HTTP, "
        "beside slowapi and a real Envoy.",
        epilog=f"algorithms: {', '.join(UNIT_ALGORITHMS)}; works: {', '.join(map(repr, works))}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a number")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only algorithms and works whose names hold all of these words",
    )
    parser.add_argument(
        "--subjects",
        type=int,
        metavar="N",
        help="load up to N subjects for 'redis packed'; 10000000 takes 4 GB and some minutes",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure bytes a key")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there too")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write a page with all tables there too"
    )
    return parser.parse_args()


def _run_scenes(options: argparse.Namespace, effort: Effort) -> list[Result]:
    results: list[Result] = []
    for algorithm in UNIT_ALGORITHMS:
        wanted = [scene for scene in SCENES if _wanted(options, algorithm, scene.name)]
        if wanted:
            print(heading(algorithm), flush=True)
        for scene in wanted:
            _progress(f"measuring {algorithm}, {scene.name} …")
            result = _result(scene, algorithm, effort, memory=not options.no_memory)
            _progress("")
            print(table(result), flush=True)
            results.append(result)
    return results


def _run_processes(options: argparse.Namespace, effort: Effort) -> list[Throughput]:
    throughputs: list[Throughput] = []
    for algorithm in UNIT_ALGORITHMS:
        if _wanted(options, algorithm, PROCESSES):
            _progress(f"measuring {algorithm}, several processes …")
            throughputs += measure_processes(algorithm, effort)
            _progress("")
    return throughputs


def _wanted(options: argparse.Namespace, algorithm: str, work: str) -> bool:
    name = f"{algorithm} {work}"
    return all(word in name for word in options.only)


def _result(scene: Scene, algorithm: AlgorithmName, effort: Effort, *, memory: bool) -> Result:
    engines = [
        engine
        for engine in (*OURS, *PEERS)
        if algorithm in engine.algorithms and scene.keys <= engine.keys_most
    ]
    rows = measure(scene, algorithm, engines, effort)
    for row in rows:
        # Not for one key, which says nothing; not for a peer's row without the full answer, which
        # stores the same; and not for a peer with more than 100,000 keys, which adds nothing new.
        is_useful = row.engine.ours or scene.keys <= 100_000
        if memory and scene.keys > 1 and row.engine.full_answer and is_useful:
            row.bytes_per_key = bytes_per_key(row.engine, scene, algorithm)
    return Result(algorithm, scene, rows)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
