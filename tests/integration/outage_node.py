"""A process of a node that checks on demand, run as a program.

    python -m tests.integration.outage_node '{"store": URI, "table": URI, "gossip": "host:port", …}'

Each line of its input is a command with arguments, in JSON. It answers each with a line:

    ["check", KEY, TIMES]   check a key so many times: how many were admitted, and how many degraded
    ["nodes"]               how many nodes are live
    ["remaining", KEY]      what the authority has left; null if it is away
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tollkeeper import Fleet, Limiter


def main() -> None:
    """Answer commands until the input ends."""
    options = json.loads(sys.argv[1])
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
        fleet = limiter.store.fleet
        return 0 if fleet is None else sum(each.state == "alive" for each in fleet.nodes())
    look = limiter.peek(*args)
    return None if look.degraded else look.remaining


if __name__ == "__main__":
    main()
