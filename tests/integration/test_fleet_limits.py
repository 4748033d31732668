"""Leased and eventual limits on a real Redis: limiters, their verbs, and processes that are killed.

Two nodes share the limits, each with a table of its own that two processes share.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter, Request
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, Consistency
from ratekeeper.decide.stores import open_store
from ratekeeper.fleet.store import FleetStore
from tests.conformance.stores import PATIENCE, PATIENT
from tests.faults.checker import Admitted, excess
from tests.redis_servers import Cluster, Single
from tests.redis_servers.scratch import scratch
from tests.redis_servers.waiting import until

WORKERS = 4
KILLS = 2
CHECKS_MIN = 160
HANGS_S = 60.0

# Time returns no units of it.
A_YEAR = Limit(10_000, per=365 * 86_400, algorithm="fixed_window")

both = pytest.mark.parametrize("consistency", ["leased", "eventual"])


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Start a server that only these tests use."""
    with Single() as started:
        yield started


def share_answered(limiter: Limiter | AsyncLimiter) -> float:
    """Return the share of the checks that the node answered."""
    assert isinstance(limiter.store, FleetStore)
    assert limiter.store.node is not None
    answers = limiter.store.node.answers().values()
    here = sum(each.allowed + each.denied for each in answers)
    return here / (here + sum(each.asked for each in answers))


# ── The verbs ──────────────────────────────────────────────────────────────────────────────────


@both
def test_threads(server: Single, key: str, consistency: Consistency) -> None:
    """Most checks make no call, all are counted, and closing leaves nothing behind."""
    store = open_store(server.uri, **PATIENCE)
    with Limiter(A_YEAR, store=store, consistency=consistency) as limiter:
        for _ in range(300):
            assert limiter.check(key).allowed
        assert share_answered(limiter) > 0.85
        # Units of a lease that was replaced are on their way back.
        until(lambda: limiter.peek(key).remaining == 9_700, "all units are counted", HANGS_S)
        decision = limiter.check(key, 3)
        limiter.refund(key, 3, decision)
        assert limiter.settle(key, 0, 9_000).charged == 9_000
        limiter.grant(key, 5)
    strict = Limiter(A_YEAR, store=store)
    assert strict.peek(key).remaining == 705
    limiter = Limiter(A_YEAR, store=store, consistency=consistency)
    while limiter.check(key, 100).allowed:
        pass
    assert not limiter.check(key, 100).allowed
    limiter.reset(key)
    assert limiter.check(key, 100).allowed
    limiter.close()
    store.close()


@both
def test_asyncio(server: Single, key: str, consistency: Consistency) -> None:
    """The same, awaited; concurrent checks of one key neither lose nor double a unit."""

    async def main() -> None:
        limiter = AsyncLimiter(A_YEAR, store=f"{server.uri}?{PATIENT}", consistency=consistency)
        for _ in range(30):
            answers = await asyncio.gather(*(limiter.check(key) for _ in range(10)))
            assert all(answers)
        assert share_answered(limiter) > 0.6
        await limiter.close()

    asyncio.run(main())
    with Limiter(A_YEAR, store=f"{server.uri}?{PATIENT}") as strict:
        assert strict.peek(key).remaining == 9_700


RULES = """
version: 1
rules:
  - id: user
    by: user
    limits: [{limit: 10000, per: 365d, algorithm: fixed_window}]
    consistency: leased
  - id: tenant
    by: tenant
    limits: [{limit: 10000, per: 365d, algorithm: fixed_window}]
    consistency: eventual
  - {id: all, by: ip, limits: 100/hour}
"""


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_rules_of_different_consistency(kind: str, server: Single, key: str) -> None:
    """They pass together or cost nothing, on one server and on several."""
    request = Request(user=key, tenant=key, ip=f"192.0.2.{kind}")
    with Cluster() if kind == "cluster" else nullcontext(server) as started:
        limiter = Limiter.from_rules(RULES, store=f"{started.uri}?{PATIENT}")
        allowed = sum(limiter.check(request).allowed for _ in range(130))
        assert allowed == 100
        limiter.close()
        with Limiter.from_rules(RULES, store=f"{started.uri}?{PATIENT}") as after:
            left = [each.decision for each in after.explain(request).rules]
        assert [each.remaining for each in left if each is not None] == [9_900, 9_900, 0]


# ── Processes ──────────────────────────────────────────────────────────────────────────────────


class Workers:
    """Processes of two nodes. One that is killed is replaced by another."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._folder = scratch().new_folder("nodes")  # a short path: each node has a socket there
        self._options = options
        self._count = 0
        self._output: list[Path] = []
        self._running: list[subprocess.Popen[bytes]] = []
        for _ in range(WORKERS):
            self._start()

    def _start(self) -> None:
        number, self._count = self._count, self._count + 1
        output = self._folder / f"worker-{number}"
        table = f"shared://{self._folder}/node-{number % 2}"
        options = {**self._options, "table": table, "seed": number}
        program = [sys.executable, "-m", "tests.integration.fleet_worker", json.dumps(options)]
        with output.open("wb") as file:
            self._running.append(subprocess.Popen(program, stdin=subprocess.PIPE, stdout=file))
        self._output.append(output)

    def lines(self) -> list[str]:
        """Return the whole lines that all workers have written."""
        texts = [path.read_text(encoding="utf-8") for path in self._output]
        return [line for text in texts for line in text.rpartition("\n")[0].splitlines()]

    def kill_one(self, random: Random) -> None:
        """Kill a worker that has begun, and start another."""
        count = len(self.lines())
        until(lambda: len(self.lines()) >= count + CHECKS_MIN // KILLS, "workers go on", HANGS_S)
        worker = self._running.pop(random.randrange(len(self._running)))
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=HANGS_S)
        self._start()

    def end(self) -> None:
        """Let all workers close their limiters."""
        for worker in self._running:
            worker.communicate(timeout=HANGS_S)
            assert worker.returncode == 0

    def close(self) -> None:
        """Kill the workers that still run, because the test failed."""
        for worker in self._running:
            worker.kill()
            worker.communicate()


# Limits that the workers reach, whose leases last 100 ms.
LIMITS = [
    {"limit": 60, "per": 1, "algorithm": each, "name": each}
    | ({"capacity": 90} if each in BUCKETS else {})
    for each in UNIT_ALGORITHMS
]


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_killed_workers_never_admit_more_than_a_leased_limit(kind: str, server: Single) -> None:
    """In any interval, by the bound of each algorithm; and the node answers checks itself."""
    random = Random(kind)
    with (
        Cluster() if kind == "cluster" else nullcontext(server) as started,
        closing(Workers({"uri": started.uri, "limits": LIMITS})) as workers,
    ):
        for _ in range(KILLS):
            workers.kill_one(random)
        workers.end()
    words = [line.split() for line in workers.lines()]
    for at, limit in enumerate(LIMITS):
        found = [Admitted(*map(int, each[1:])) for each in words if each[0] == str(at)]
        assert found
        assert excess(Limit(**limit), found) == 0  # type: ignore[arg-type]  # of JSON
    assert sum(int(each[1]) for each in words if each[0] == "answered") > 0
