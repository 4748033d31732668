"""A node in a separate process, which sends checks steadily and writes their answers to a file.

    python -m tests.faults.nodes '{"name": "late", "uri": "redis://…", "rules": "…", "keys": […]}'

It prints how far its wall clock is ahead, and sends checks until it reads a line. Each answer is
in the file before the next check, so a node that is killed has lost none. With `fleet`, the
settings of a fleet, it also writes how many live nodes it knows, whenever that changes. With
`regions`, the settings of a region, the store is that of the region.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ratekeeper import AsyncLimiter, Fleet, Regions
from ratekeeper.decide.failure import LocalFallback
from tests.faults.load import (
    EPOCH_NS,
    EPOCH_VARIABLE,
    RULES_TEXT,
    Key,
    Noted,
    Record,
    ask_in_tasks,
    now_ns,
    watch_lag,
)
from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import Startable
from tests.redis_servers.waiting import until

ENDS_S_MAX = 30.0
_LOOK_S = 0.02


class NodeProcess(Startable):
    """One node, for the length of a `with` block.

    `fleet`    the settings of a fleet, if the rules have a consistency
    `regions`  the settings of a region, if the rules are global
    `env`      further environment variables, for example of a wrong clock
    """

    def __init__(
        self,
        name: str,
        uri: str,
        keys: Sequence[Key],
        *,
        rules: str = RULES_TEXT,
        nodes: int = 1,
        fleet: Mapping[str, Any] | None = None,
        regions: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._answers = scratch().new_folder("node") / "answers"
        self._answers.touch()
        self._options = {
            "name": name,
            "uri": uri,
            "keys": keys,
            "rules": rules,
            "nodes": nodes,
            "fleet": fleet,
            "regions": regions,
            "answers": str(self._answers),
        }
        self._env = {**os.environ, EPOCH_VARIABLE: str(EPOCH_NS), **(env or {})}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the node without waiting, so that several can start at the same time."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nodes", json.dumps(self._options)],
            env=self._env,
            process_group=scratch().process_group,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """The ID of the process."""
        assert self._process is not None
        return self._process.pid

    def ready(self) -> float:
        """Wait until the node sends checks; return how many seconds its clock is ahead of ours."""
        assert self._process is not None
        assert self._process.stdout is not None
        return float(json.loads(self._process.stdout.readline())["ahead_s"])

    def finish(self, record: Record) -> dict[str, Any]:
        """End the node, add its answers to `record`, and return what it counted itself."""
        assert self._process is not None
        printed, _ = self._process.communicate("\n", timeout=ENDS_S_MAX)
        assert self._process.returncode == 0, printed
        result: dict[str, Any] = json.loads(printed)
        record.lag_ns = max(record.lag_ns, result["lag_ns"])
        self.add_to(record)
        return result

    def add_to(self, record: Record) -> None:
        """Add the answers so far to `record`, also of a node that was killed."""
        record.noted += [Noted(Key(*key), *rest) for key, *rest in self._lines() if rest]

    def _lines(self) -> list[Any]:
        # The last line of a node that was killed may be cut.
        return [json.loads(line) for line in self._answers.read_bytes().split(b"\n")[:-1]]

    def await_live(self, count: int, seconds_max: float) -> None:
        """Wait until the node counts this many live nodes."""
        until(
            lambda: [each[0] for each in self._lines() if len(each) == 1][-1:] == [count],
            f"{self._options['name']} knows {count} live nodes",
            seconds_max,
            lambda: [each for each in self._lines() if len(each) == 1],
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; SIGKILL, SIGSTOP and SIGCONT are the interesting ones."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(ENDS_S_MAX)

    def stop(self) -> None:
        """Kill the node, if it still runs."""
        if self._process is not None:
            with self._process as process:  # closes its pipes and waits for it
                process.kill()


@dataclass(slots=True)
class WrittenRecord(Record):
    """A record that is also in a file."""

    file: IO[bytes] | None = None

    def put(self, *given: Any) -> None:
        """Record one answer."""
        Record.put(self, *given)
        self.write(self.noted[-1])

    def write(self, line: Sequence[Any]) -> None:
        """Write a line at once."""
        assert self.file is not None
        self.file.write(json.dumps(line).encode() + b"\n")


async def _watch_fleet(limiter: AsyncLimiter, record: WrittenRecord) -> None:
    """Write the number of live nodes whenever it changes."""
    last = 0
    while limiter.fleet is not None:
        live = limiter.fleet.live_nodes()
        if live != last:
            last = live
            record.write([live])
        await asyncio.sleep(_LOOK_S)


def _answered(limiter: AsyncLimiter) -> dict[str, int]:
    """Return how many checks the node answered, and how many the authority."""
    found = list(limiter.fleet.answers().values()) if limiter.fleet else []
    own = sum(each.allowed + each.denied for each in found)
    return {"own": own, "asked": sum(each.asked for each in found)}


async def _run(options: Mapping[str, Any], record: WrittenRecord) -> dict[str, int]:
    keys = [Key(*each) for each in options["keys"]]
    fleet, regions = options["fleet"], options["regions"]
    async with AsyncLimiter.from_rules(
        options["rules"],
        store=options["uri"],
        local_fallback=LocalFallback(nodes=options["nodes"]),
        fleet=None if fleet is None else Fleet(**fleet),
        regions=None if regions is None else Regions(**regions),
    ) as limiter:
        tasks = [
            asyncio.create_task(ask_in_tasks(limiter, record, keys, options["name"])),
            asyncio.create_task(watch_lag(record)),
        ]
        watching = asyncio.create_task(_watch_fleet(limiter, record))
        print(json.dumps({"ahead_s": (time.time_ns() - now_ns()) / 1e9}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        watching.cancel()
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, watching, return_exceptions=True)
        return _answered(limiter)


def main() -> None:
    """Run a node until its input has a line."""
    # Changes of the rules are not interesting here.
    logging.getLogger("ratekeeper").setLevel(logging.ERROR)
    options = json.loads(sys.argv[1])
    with Path(options["answers"]).open("ab", buffering=0) as file:
        record = WrittenRecord(file=file)
        answered = asyncio.run(_run(options, record))
    print(json.dumps({"lag_ns": record.lag_ns, **answered}))


if __name__ == "__main__":
    main()
