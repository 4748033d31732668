"""A node that follows its rules, run as a program: it prints the limit in force, and its time.

    python -m tests.integration.rules_node '{"rules": URL, "store": URI, "poll": 30, …}'

Each line is a JSON object, printed when the limit of a request changes: `limit`, `at_ns` (by the
clock of the machine) and the fields of `rules_status`. With `threads`, that many threads check in a
loop meanwhile. An empty line on its input makes it print what they saw, and end. With `fork`, a
worker that was forked after loading the rules does all of this.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import sys
import time
from collections import Counter
from threading import Event, Thread
from typing import Any

from ratekeeper import Limiter, Request

PAUSE_SECONDS = 0.003
REQUEST = Request(user="42", ip="10.0.0.1")


def say(**facts: Any) -> None:
    """Print one line."""
    print(json.dumps(facts, default=str), flush=True)


class Load:
    """Threads that check without a pause, and count the limits that they met."""

    def __init__(self, limiter: Limiter, threads: int) -> None:
        self._limiter = limiter
        self._stopped = Event()
        # One per thread, so that no count is lost.
        self._counts: list[tuple[Counter[int], list[str]]] = []
        self._threads = [Thread(target=self._hammer, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _hammer(self) -> None:
        limits: Counter[int] = Counter()
        failures: list[str] = []
        self._counts.append((limits, failures))
        while not self._stopped.is_set():
            try:
                decision = self._limiter.check(REQUEST)
                limits[decision.limit] += 1
                # Each rule is named after its limit, so a decision shows its version.
                if decision.rule != f"limit-{decision.limit}" or not decision.allowed:
                    failures.append(repr(decision))
            except Exception as error:
                failures.append(repr(error))

    def stop(self) -> dict[str, Any]:
        """Stop the threads, and return the number of checks, the limits and the failures."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        limits: Counter[int] = sum((each for each, _ in self._counts), Counter())
        failures = [each for _, some in self._counts for each in some]
        return {"checks": limits.total(), "limits": sorted(limits), "failures": failures[:10]}


def main() -> None:
    """Run until a line arrives on the input."""
    options = json.loads(sys.argv[1])
    threads = options.pop("threads", 0)
    rules = options.pop("rules")
    fork = options.pop("fork", False)
    limiter = Limiter.from_rules(rules, **options)
    if fork and (worker := os.fork()):
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
    load = Load(limiter, threads)
    last = None
    while True:
        limit = limiter.check(REQUEST).limit
        status = limiter.rules_status()
        seen = (limit, status.origin, status.error, status.push_error)
        if seen != last:
            last = seen
            say(limit=limit, at_ns=time.time_ns(), **dataclasses.asdict(status))
        if select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            break
    say(**load.stop())
    limiter.close()


if __name__ == "__main__":
    main()
