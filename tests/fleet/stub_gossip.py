"""A stub of gossip for tests of the agent: it records calls and has fixed members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ratekeeper import ConfigError, Fleet
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.histogram import LENGTH
from ratekeeper.decide.allowances import PythonAllowances
from ratekeeper.fleet.agent import NodeAgent
from ratekeeper.fleet.datagrams import NodeStatus
from ratekeeper.fleet.gossip import Member
from ratekeeper.fleet.node import Node


class StubGossip:
    """Stands in for a GossipTransport."""

    def __init__(self, bind: str, **given: Any) -> None:
        self.bind = bind
        self.given = given
        self.told: list[tuple[Any, ...]] = []
        self.status: NodeStatus = given["status"]
        self.live = 3
        self.is_running = False

    def start(self) -> None:
        """See GossipTransport."""
        self.is_running = True

    def stop(self) -> None:
        """See GossipTransport."""
        self.is_running = False

    def abandon(self) -> None:
        """See GossipTransport."""

    def set_status(self, status: NodeStatus) -> None:
        """See GossipTransport."""
        self.status = status

    def warm(self, gate: int, subject: str) -> None:
        """See GossipTransport."""
        self.told.append(("warm", gate, subject))

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """See GossipTransport."""
        self.told.append(("denied", gate, subject, cost, lasts_ns))

    def publish(self, payload: bytes) -> int:
        """See GossipTransport."""
        self.told.append(("payload", payload))
        return 1

    @property
    def node(self) -> int:
        """See GossipTransport."""
        return 1

    def live_nodes(self) -> int:
        """See GossipTransport."""
        return self.live

    def members(self) -> list[Member]:
        """See GossipTransport."""
        other = NodeStatus("1.0", "v11", 3, 4, "eu")
        return [
            Member(1, ("10.0.0.1", 7946), "alive", self.status, 0, 0),
            Member(2, ("10.0.0.2", 7946), "suspected", other, 6_500_000_000, 0),
            Member(3, ("::1", 7946), "dead", other, 20_000_000_000, 0),
            Member(4, ("10.0.0.4", 7946), "left", other, 0, 0),
        ]

    def counters(self) -> dict[str, int]:
        """See GossipTransport."""
        return {"sent": 5, "received": 7, "sent_bytes": 9, "hints": 1, "dropped_forged": 2}

    def lag(self) -> list[int]:
        """See GossipTransport."""
        return [1] * LENGTH


class GossipOpener:
    """Opens stubs, and keeps them; raises ConfigError while `fails`."""

    def __init__(self) -> None:
        self.opened: list[StubGossip] = []
        self.fails = False
        self.live = 3

    def __call__(self, bind: str, **given: Any) -> Any:
        """Open one."""
        if self.fails:
            raise ConfigError("the port is in use")
        self.opened.append(StubGossip(bind, **given))
        self.opened[-1].live = self.live
        return self.opened[-1]


def node_of(fleet: Fleet) -> Node:
    """Return a node with a table in memory and no authority."""
    clock = SystemClock()
    authority: Any = None
    return Node(fleet, clock, PythonAllowances(clock), authority)


@contextmanager
def agents(*stores: str, nodes: int = 1) -> Iterator[list[tuple[NodeAgent, GossipOpener]]]:
    """Yield a started agent for each store, with its opener; close them at the end."""
    found: list[tuple[NodeAgent, GossipOpener]] = []
    try:
        for store in stores:
            opened = GossipOpener()
            fleet = Fleet(store=store, gossip="127.0.0.1:7946", nodes=nodes)
            agent = NodeAgent(node_of(fleet), name="here", open_gossip=opened)
            found.append((agent, opened))
            agent.start()
        yield found
    finally:
        for agent, _ in found:
            agent.close()
