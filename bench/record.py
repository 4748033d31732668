"""The cost of recording: checks of the service with records off, on, and blocked, side by side.

record   POST /v1/check on `ratekeeper serve`, one worker, memory store; with its p50 and p99

- off: nothing is recorded; the other rows are compared with this one;
- the default: all usage and one decision in a hundred, in an SQLite file;
- every decision: more than ten thousand rows a second, more than can be written;
- every decision, with a locked file: another process holds the lock all the time, so records wait
  in memory and are then dropped.

The p99 matters: writing records must not delay answers.

Before that, the processor time of one call of `note`, which is all that a check pays.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from bench.http_check import ONE_RULE, USERS
from bench.http_load import wrk_path
from bench.http_measure import Contender, HttpEffort, Progress, measure
from bench.http_report import http_facts, http_header, http_json, work_table
from bench.http_servers import post, ratekeeper_serve
from bench.redis_placement import placements
from ratekeeper import Limiter, Request
from ratekeeper.core.model import CheckResult
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.sink import Sink

WORKS: Final = ("record",)
ROUNDS: Final = 15
# Far below the capacity of a server, so that only writing records can delay a request.
LOAD_PER_SECOND: Final = 2_000.0
# Fewer than one hand-over, because there is no thread here to take it.
CALLS: Final = 900
NOTE_RULES: Final = """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 1000000/second}
  - {id: tenants, match: {tenant: "*"}, by: tenant, limits: 1000000/second}
  - {id: orders, match: {api_key: "*"}, by: api_key, limits: 1/hour}
"""
_NO_RECORDS: Any = None
FULL: Final = HttpEffort(sets=2, rounds=2, run_seconds=1, paced_rounds=4, paced_seconds=1.0)
QUICK: Final = HttpEffort(sets=1, rounds=1, run_seconds=1, paced_rounds=2, paced_seconds=1.0)


def run_record(
    wanted: Callable[[str], bool], effort: HttpEffort, progress: Progress
) -> dict[str, Any] | None:
    """Measure and print it if it is selected; return all numbers, or None."""
    if not wanted(WORKS[0]):
        return None
    wrk_path()
    facts = http_facts()
    placement = placements()[0]
    noted_ns = note_ns()
    times = ", ".join(f"{name} {ns:,.0f} ns" for name, ns in noted_ns.items())
    print(f"\nRecorder.note, processor time of a call, the best of {ROUNDS}: {times}", flush=True)
    print(http_header(facts, effort, placement), flush=True)
    print(f"but p50, p99: at {LOAD_PER_SECOND:,.0f} requests/s, so that no request queues")
    with tempfile.TemporaryDirectory(prefix="ratekeeper-bench-") as folder:
        path = Path(folder)
        stuck = path / "stuck.db"
        with closing(sqlite3.connect(stuck, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            contenders = _contenders(path, stuck)
            work = measure("record", contenders, placement, effort, progress, LOAD_PER_SECOND)
    progress("")
    print(work_table(work), flush=True)
    return {**http_json([work], [], facts, effort), "note_ns": noted_ns}


def note_ns() -> dict[str, float]:
    """Return the time of a call by kind of decision. The recorder is not started."""
    limiter = Limiter.from_rules(NOTE_RULES)
    requests = {
        "allowed": Request(user="1"),
        "allowed by two rules": Request(user="1", tenant="1"),
        "denied": Request(api_key="1"),
    }
    limiter.evaluate(requests["denied"])
    found = {}
    for name, request in requests.items():
        result = limiter.evaluate(request)
        recorders = [Recorder(_no_sink, _NO_RECORDS) for _ in range(ROUNDS)]
        found[name] = min(_timed_ns(each, request, result) for each in recorders)
    limiter.close()
    return found


def _timed_ns(recorder: Recorder, request: Request, result: CheckResult) -> float:
    note, now_ns = recorder.note, time.time_ns()
    began_ns = time.thread_time_ns()
    for _ in range(CALLS):
        note(request, result, 1, now_ns)
    return (time.thread_time_ns() - began_ns) / CALLS


def _no_sink(_: object) -> Sink:
    raise AssertionError("it is not started")


def _contenders(folder: Path, stuck: Path) -> Sequence[Contender]:
    rules = folder / "rules.yaml"
    rules.write_text(ONE_RULE)
    requests = [
        post("/v1/check", json.dumps({"user": f"u{number}"}).encode()) for number in range(USERS)
    ]

    def ours(name: str, *more: str) -> Contender:
        command = ratekeeper_serve(rules, "--store", "memory://", "--no-grpc", *more)
        return Contender(name, command, requests, ours=True, timed=True)

    return (
        ours("records off", "--record", "off"),
        ours("usage, and 1 decision in 100"),
        ours("every decision", "--sample", "1"),
        ours("every decision, file locked", "--sample", "1", "--record", f"sqlite:///{stuck}"),
    )
