"""`python -m bench`: tollkeeper and its peers side by side, ratios from one run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.engines import OURS, Engine
from bench.measure import FULL, QUICK, SCENES, Effort, Scene, measure
from bench.report import Result, as_json, header, heading, machine, summary, table
from tollkeeper.model import ALGORITHM_NAMES, AlgorithmName

try:
    from bench.memory import bytes_per_key
    from bench.peers import PEERS
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed; `make bench` does that, or: pip install '.[bench]'")


def main() -> None:
    """Measure what was asked for, print as it comes, and write it down."""
    options = _options()
    effort = QUICK if options.quick else FULL
    found = machine()
    print(header(effort, found), flush=True)
    results: list[Result] = []
    for algorithm in ALGORITHM_NAMES:
        wanted = [scene for scene in SCENES if _wanted(options.only, algorithm, scene)]
        if wanted:
            print(heading(algorithm), flush=True)
        for scene in wanted:
            _progress(f"measuring {algorithm}, {scene.name} …")
            result = _result(scene, algorithm, effort, memory=not options.no_memory)
            _progress("")
            print(table(result), flush=True)
            results.append(result)
    if not results:
        sys.exit(f"nothing is called {' '.join(options.only)}; see --help")
    print(summary(results))
    if options.json:
        options.json.write_text(json.dumps(as_json(results, effort, found), indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Tollkeeper beside limits and throttled-py, in process, on the same work.",
        epilog=f"algorithms: {', '.join(ALGORITHM_NAMES)}; "
        f"works: {', '.join(repr(scene.name) for scene in SCENES)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a number")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only algorithms and works whose names hold all of these words",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure bytes a key")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there too")
    return parser.parse_args()


def _wanted(words: Sequence[str], algorithm: str, scene: Scene) -> bool:
    name = f"{algorithm} {scene.name}"
    return all(word in name for word in words)


def _result(scene: Scene, algorithm: AlgorithmName, effort: Effort, *, memory: bool) -> Result:
    engines: list[Engine] = [engine for engine in (*OURS, *PEERS) if algorithm in engine.algorithms]
    rows = measure(scene, algorithm, engines, effort)
    for row in rows:
        # One key tells nothing, and a peer keeps the same whether its answer is read or not.
        if memory and scene.keys > 1 and row.engine.full_answer:
            row.bytes_per_key = bytes_per_key(row.engine, scene, algorithm)
    return Result(algorithm, scene, rows)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
