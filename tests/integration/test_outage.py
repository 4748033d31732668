"""Three nodes of real processes share a limit by gossip while Redis is away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.conformance.stores import PATIENT
from tests.redis_servers import Single, until
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.scratch import scratch

WAIT_S = 30
LIMIT = 60


class Process:
    """One process of a node."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.outage_node", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.admitted = 0

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def check(self, key: str, times: int = 5) -> int:
        """Check a key; count and return what was admitted. Redis must be away."""
        admitted, degraded = self.ask("check", key, times)
        assert degraded == times
        self.admitted += admitted
        return int(admitted)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def three_nodes(redis: Single) -> Iterator[list[Process]]:
    """Yield four processes of three nodes that know each other: the first node has two."""
    folder = scratch().new_folder("nodes")  # a short path: the node has a socket there
    addresses = [f"{HOST}:{free_port()}" for _ in range(3)]
    tables = [f"shared://{folder / 'node'}", "memory://", "memory://"]
    with ExitStack() as stack:
        processes = []
        for number in (0, 0, 1, 2):
            processes.append(
                Process(
                    limits=f"{LIMIT}/day",
                    store=f"{redis.uri}?{PATIENT}",
                    table=tables[number],
                    gossip=addresses[number],
                    peers=addresses,
                )
            )
            stack.callback(processes[-1].close)
            assert processes[-1].answer() == "ready"
        for process in processes:
            until(lambda process=process: process.ask("nodes") == 3, "all nodes are known", WAIT_S)
        yield processes


def test_three_nodes_share_a_limit_while_redis_is_away() -> None:
    """Never over; a busy node gets more than its share; Redis is charged when it is back."""
    with Single() as redis, three_nodes(redis) as processes:
        first, second, third, fourth = processes
        assert first.ask("check", "ann", 1) == [1, 0]
        redis.kill()
        for each in processes:
            until(lambda each=each: each.ask("check", "eve", 1)[1], "Redis is away", WAIT_S)

        # Only one node has requests: more than a third of the limit, at most two thirds. Both of
        # its processes spend from the same counts.
        until(lambda: _busy(first, second, "ann") >= 36, "a busy node gets more", WAIT_S)
        busy = first.admitted + second.admitted
        assert first.admitted > 0
        assert busy <= LIMIT * 2 // 3 + 1

        # Now the others have requests as well.
        for _ in range(10):
            third.check("ann")
            fourth.check("ann")
        total = sum(each.admitted for each in processes)
        assert total <= LIMIT + 1

        # All nodes at the same time, of another key.
        for each in processes:
            each.admitted = 0
        until(lambda: _spent(processes, "bob") >= LIMIT // 2, "each node has its share", WAIT_S)
        for _ in range(10):
            together = _spent(processes, "bob")
        assert together <= LIMIT + 1

        redis.start()
        # A unit is refilled every 24 minutes. Nothing was kept of the time before.
        for key, spent in (("ann", total), ("bob", together)):
            until(
                lambda key=key, spent=spent: (
                    _left(third, key) in (LIMIT - spent, LIMIT - spent + 1)
                ),
                f"Redis has the charges of {key}",
                WAIT_S,
                lambda key=key, spent=spent: f"{_left(third, key)} left after {spent}",
            )


def _spent(processes: Sequence[Process], key: str) -> int:
    for each in processes:
        each.check(key)
    return sum(each.admitted for each in processes)


def _busy(first: Process, second: Process, key: str) -> int:
    first.check(key, 1)
    second.check(key, 1)
    return first.admitted + second.admitted


def _left(process: Process, key: str) -> int | None:
    found: int | None = process.ask("remaining", key)
    return found
