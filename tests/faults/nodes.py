"""A node in a separate process, which sends checks steadily and prints their answers at its end.

    python -m tests.faults.nodes '{"name": "late", "uri": "redis://…", "rules": "…", "keys": […]}'

It prints how far its wall clock is ahead, sends checks until it reads a line, then prints a record.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

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
from tollkeeper import AsyncLimiter
from tollkeeper.decide.failure import LocalFallback

ENDS_S_MAX = 30.0


class NodeProcess(Startable):
    """One node, for the length of a `with` block.

    `env`  further environment variables, for example of a wrong clock
    """

    def __init__(
        self,
        name: str,
        uri: str,
        keys: Sequence[Key],
        *,
        rules: str = RULES_TEXT,
        nodes: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._options = {"name": name, "uri": uri, "keys": keys, "rules": rules, "nodes": nodes}
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

    def ready(self) -> float:
        """Wait until the node sends checks; return how many seconds its clock is ahead of ours."""
        assert self._process is not None
        assert self._process.stdout is not None
        return float(json.loads(self._process.stdout.readline())["ahead_s"])

    def finish(self, record: Record) -> None:
        """End the node and add its answers to `record`."""
        assert self._process is not None
        printed, _ = self._process.communicate("\n", timeout=ENDS_S_MAX)
        assert self._process.returncode == 0, printed
        result = json.loads(printed)
        record.lag_ns = max(record.lag_ns, result["lag_ns"])
        record.noted += [Noted(Key(*key), *rest) for key, *rest in result["noted"]]

    def stop(self) -> None:
        """Kill the node, if it still runs."""
        if self._process is not None:
            with self._process as process:  # closes its pipes and waits for it
                process.kill()


async def _run(options: Mapping[str, Any]) -> Record:
    record = Record()
    keys = [Key(*each) for each in options["keys"]]
    async with AsyncLimiter.from_rules(
        options["rules"], store=options["uri"], local_fallback=LocalFallback(nodes=options["nodes"])
    ) as limiter:
        tasks = [
            asyncio.create_task(ask_in_tasks(limiter, record, keys, options["name"])),
            asyncio.create_task(watch_lag(record)),
        ]
        print(json.dumps({"ahead_s": (time.time_ns() - now_ns()) / 1e9}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return record


def main() -> None:
    """Run a node until its input has a line."""
    # Changes of the rules are not interesting here.
    logging.getLogger("tollkeeper").setLevel(logging.ERROR)
    record = asyncio.run(_run(json.loads(sys.argv[1])))
    print(json.dumps({"lag_ns": record.lag_ns, "noted": record.noted}))


if __name__ == "__main__":
    main()
