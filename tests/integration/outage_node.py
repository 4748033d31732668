"""A process of a node that checks on demand, run as a program.

    python -m tests.integration.outage_node '{"store": URI, "table": URI, "gossip": "host:port", …}'

Each line of its input is a command with arguments, in JSON. It answers each with a line:

    ["check", KEY, TIMES]   check a key so many times: how many were admitted, and how many degraded
    ["nodes"]               how many nodes are live; 0 while they have not agreed on their shares
    ["remaining", KEY]      what the authority has left; null if it is away
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ratekeeper import Fleet, Limiter
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.fleet import agent, outage
from ratekeeper.fleet.outage import NodeTotals
from ratekeeper.fleet.store import shared_counts_of


def main() -> None:
    """Answer commands until the input ends."""
    options = json.loads(sys.argv[1])
    # A process whose agent is slow uses its fixed share, and then the limit may be exceeded: see
    # docs/fleet.md. On a busy machine every agent is slow.
    agent.ANSWER_S, outage.SLOW_NS = 60.0, 60 * NS_PER_SECOND  # type: ignore[misc]  # constants
    fleet = Fleet(store=options["table"], gossip=options["gossip"], peers=tuple(options["peers"]))
    with Limiter(
        options["limits"], store=options["store"], name="api", on_failure="local", fleet=fleet
    ) as limiter:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(limiter, *json.loads(line))), flush=True)


def answer(limiter: Limiter, command: str, *args: Any) -> Any:
    """Carry out a command."""
    if command == "check":
        key, times = args
        found = [limiter.check(key) for _ in range(times)]
        return sum(map(bool, found)), sum(each.degraded for each in found)
    if command == "nodes":
        return settled_nodes(limiter)
    look = limiter.peek(*args)
    return None if look.degraded else look.remaining


def settled_nodes(limiter: Limiter) -> int:
    """Return how many nodes are live, once all of them use their shares.

    A node whose first share comes later, when others have admitted units, has to count it as spent.
    """
    fleet, shared = limiter.fleet, shared_counts_of(limiter.store)
    assert fleet is not None
    assert isinstance(shared, NodeTotals)
    totals = shared._totals  # None in a process that is not the agent of its node
    if totals is not None and not totals.settled:
        return 0
    return sum(each.state == "alive" for each in fleet.nodes())


if __name__ == "__main__":
    main()
