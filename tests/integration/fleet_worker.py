"""A worker of a node: it checks several leased limits on a Redis, and prints its admissions.

    python -m tests.integration.fleet_worker '{"uri": "redis://…", "table": "shared:///…", …}'

Each line has the number of the limit, when a check was sent and when it was answered, in
nanoseconds of a clock that all processes share, and its cost. It runs until it is killed, or until
its input ends. Then it closes its store and prints how many checks the node admitted.
"""

from __future__ import annotations

import json
import os
import sys
from random import Random
from threading import Event, Thread
from typing import Any

from ratekeeper import Fleet, Limit, Limiter
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.stores import open_store
from ratekeeper.fleet import agent
from ratekeeper.fleet.store import FleetStore
from tests.conformance.stores import PATIENCE

# Enough to spend leases quickly, and to leave the processor to the others.
PAUSE_S = 0.002


def main(options: dict[str, Any]) -> None:
    """Check until the input ends."""
    agent.NODES_ASSUMED = 2  # the worker does not live long enough to count them
    random, ended = Random(options["seed"]), Event()
    store = open_store(options["uri"], **PATIENCE)
    settings = Fleet(store=options["table"], nodes=2)
    fleet = FleetStore(store, settings, SystemClock())
    limiters = [
        Limiter(Limit(**each), store=fleet, consistency="leased", on_failure="closed")
        for each in options["limits"]
    ]
    clock = SystemClock()
    Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(PAUSE_S * random.random()):
        at, cost = random.randrange(len(limiters)), random.choice((1, 1, 1, 2))
        sent_ns = clock.now_ns()
        if limiters[at].check("shared", cost).allowed:
            line = f"{at} {sent_ns} {clock.now_ns()} {cost}\n"
            os.write(1, line.encode())  # in one piece, and at once
    fleet.close()
    assert fleet.node is not None
    os.write(
        1, f"answered {sum(each.allowed for each in fleet.node.answers().values())}\n".encode()
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
