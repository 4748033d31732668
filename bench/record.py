"""What recording costs: checks of the service with records off, kept, and stuck, side by side.

record   POST /v1/check on `tollkeeper serve`, one worker, memory store; with its p50 and p99

- off: nothing is recorded, the row that the others are compared with;
- as it comes: usage of everybody, and one decision in a hundred, in an SQLite file;
- every decision: ten thousand rows a second and more, which is more than is ever kept up with;
- every decision, and nobody writes: the file is locked by somebody else from before the start to
  after the end. All that is recorded waits, and then is dropped.

What matters is p99: whoever writes must not be felt by those who are answered.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from bench.http_check import ONE_RULE, USERS
from bench.http_load import wrk_path
from bench.http_measure import Contender, HttpEffort, Progress, measure
from bench.http_report import http_facts, http_header, http_json, work_table
from bench.http_servers import post, tollkeeper_serve
from bench.redis_placement import placements

WORKS: Final = ("record",)
FULL: Final = HttpEffort(rounds=3, run_seconds=1, paced_rounds=5, paced_seconds=1.0)
QUICK: Final = HttpEffort(rounds=1, run_seconds=1, paced_rounds=2, paced_seconds=1.0)


def run_record(
    wanted: Callable[[str], bool], effort: HttpEffort, progress: Progress
) -> dict[str, Any] | None:
    """Measure and print it, if it is wanted; all numbers, or None."""
    if not wanted(WORKS[0]):
        return None
    wrk_path()
    facts = http_facts()
    placement = placements()[0]
    print(http_header(facts, effort, placement), flush=True)
    with tempfile.TemporaryDirectory(prefix="tollkeeper-bench-") as folder:
        path = Path(folder)
        stuck = path / "stuck.db"
        with closing(sqlite3.connect(stuck, isolation_level=None)) as somebody:
            somebody.execute("BEGIN EXCLUSIVE")
            work = measure("record", _contenders(path, stuck), placement, effort, progress)
    progress("")
    print(work_table(work), flush=True)
    return http_json([work], [], facts, effort)


def _contenders(folder: Path, stuck: Path) -> Sequence[Contender]:
    rules = folder / "rules.yaml"
    rules.write_text(ONE_RULE)
    requests = [
        post("/v1/check", json.dumps({"user": f"u{number}"}).encode()) for number in range(USERS)
    ]

    def ours(name: str, *more: str) -> Contender:
        command = tollkeeper_serve(rules, "--store", "memory://", "--no-grpc", *more)
        return Contender(name, command, requests, ours=True, timed=True)

    return (
        ours("records off", "--record", "off"),
        ours("usage, and 1 decision in 100"),
        ours("every decision", "--sample", "1"),
        ours("every decision, nobody writes", "--sample", "1", "--record", f"sqlite:///{stuck}"),
    )
