"""Processes of one node that fork from each other: each prints a line when it is the agent.

python -m tests.fleet.agent_process TABLE PROCESSES ADDRESS
"""

from __future__ import annotations

import os
import sys
from threading import Event

from ratekeeper import Fleet
from ratekeeper.fleet.agent import NodeAgent
from tests.fleet.stub_gossip import node_of


def main() -> None:
    """Fork the processes, and report the role of each."""
    table, processes, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # The configured number of nodes shows that a process has not heard of the agent yet.
    agent = NodeAgent(node_of(Fleet(store=f"shared://{table}", gossip=address, nodes=9)))
    agent.start()
    for _ in range(processes - 1):
        if not os.fork():
            break
    # A child whose parent was killed goes on, as a worker of a web server would.
    leads, live, pause = False, 0, Event()
    while True:
        if (agent.gossip() is not None, agent.live_nodes()) != (leads, live):
            leads, live = agent.gossip() is not None, agent.live_nodes()
            # One write: the processes share the file.
            os.write(1, f"{os.getpid()} {'agent' if leads else 'process'} {live}\n".encode())
        pause.wait(0.02)


if __name__ == "__main__":
    main()
