"""Gossip between the nodes of a fleet, as a state machine without sockets, clocks and threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.fleet.datagrams import Address, HintKind, NodeStatus

# The longest payload of `Gossip.publish`.
PAYLOAD_BYTES_MAX: Final = 1_000

MemberState = Literal["alive", "suspected", "dead", "left"]


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Timing and bounds. The defaults suit fleets of up to some 300 nodes."""

    round_ns: int = NS_PER_SECOND // 10
    """The mean time between two rounds; each takes ± 30 %."""
    fanout: int = 3
    heartbeat_ns: int = 5 * NS_PER_SECOND
    suspected_ns: int = 15 * NS_PER_SECOND // 2
    dead_ns: int = 15 * NS_PER_SECOND
    hint_ns_max: int = 5 * NS_PER_SECOND
    """Older hints are dropped."""
    urgent_ns: int = NS_PER_SECOND // 500
    """Hints that arise within this time share a datagram."""
    direct_peers_max: int = 250
    """With more peers, a hint is forwarded from node to node."""
    bytes_per_second: int = 50_000
    """What a node sends on average, IP and UDP headers included. It may save up one second."""


class Member(NamedTuple):
    """A node as another one sees it."""

    node: int
    """Chosen at random when the process started: a node that restarts is a new one."""
    address: Address
    state: MemberState
    status: NodeStatus
    age_ns: int
    """Since the node's last heartbeat was sent."""
    uptime_ns: int


class Hint(NamedTuple):
    """What another node has learned about a subject."""

    kind: HintKind
    """`warm`: stop spending a budget of it. `denied`: deny it."""
    gate: int
    """`AllowanceGate.number`."""
    subject: str
    cost: int
    """Checks of at least this cost are denied; 0 for `warm`."""
    lasts_ns: int
    """For how long from now; 0 for `warm`."""


class ReceivedPayload(NamedTuple):
    """What another node has published."""

    node: int
    sequence: int
    payload: bytes


class MemberChange(NamedTuple):
    """A node that is new, or that is no longer there."""

    node: int
    live: bool


class Gossip:
    """One node's part of the protocol.

    A caller passes received messages to `receive`, calls `tick` when `due_ns` has come, and sends
    what both return. Times are the caller's clock, which must not step. Not for several threads at
    once. All tables and queues are bounded.
    """

    def __init__(
        self,
        address: Address,
        random: Random,
        now_ns: int,
        settings: GossipSettings | None = None,
        status: NodeStatus | None = None,
    ) -> None:
        """`address` is the one that other nodes send to."""
        self.node = random.getrandbits(63) + 1
        self.settings = settings or GossipSettings()
        self._own = Member(self.node, address, "alive", status or NodeStatus(), 0, 0)
        self._started_ns = now_ns

    @property
    def due_ns(self) -> int:
        """When `tick` has to be called next. It may become earlier with every other call."""
        raise NotImplementedError

    def tick(self, now_ns: int) -> list[tuple[Address, Any]]:
        """Return the messages that are due, with the addresses to send them to."""
        raise NotImplementedError

    def receive(self, message: Any, source: Address, now_ns: int) -> list[tuple[Address, Any]]:
        """Take a message of another node; return messages to send at once."""
        raise NotImplementedError

    def join(self, addresses: Iterable[Address]) -> None:
        """Set the addresses of nodes to contact, this node's own among them or not.

        They are also contacted later, as long as no node is known there, so that a fleet that was
        partitioned for long heals.
        """
        raise NotImplementedError

    def leave(self, now_ns: int) -> list[tuple[Address, Any]]:
        """Return the messages that say that this node stops."""
        raise NotImplementedError

    def set_status(self, status: NodeStatus) -> None:
        """Set the status, which the next heartbeat carries."""
        raise NotImplementedError

    def warm(self, gate: int, subject: str, now_ns: int) -> None:
        """Tell all nodes that a subject is warm, urgently. Repeated within 100 ms, it is ignored.

        So is a hint that this node has just received from another.
        """
        raise NotImplementedError

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int, now_ns: int) -> None:
        """Tell all nodes that a subject is denied for a time, urgently.

        Ignored if the nodes know it already, for at least nine tenths of that time.
        """
        raise NotImplementedError

    def take_hints(self) -> list[Hint]:
        """Return the hints of other nodes that have arrived since the last call, each once."""
        raise NotImplementedError

    def count(self, name: str, units: int) -> None:
        """Add to this node's part of a counter that only grows."""
        raise NotImplementedError

    def counted(self, name: str) -> int:
        """Return the sum over all nodes, as far as it is known; it never decreases."""
        raise NotImplementedError

    def publish(self, payload: bytes) -> int | None:
        """Send a payload to all live peers, again and again until each has it or is dead.

        Return its sequence, from 1 up; None if too many are not acknowledged yet. A peer that
        becomes live later does not get it: see `take_changes`.
        """
        raise NotImplementedError

    def acknowledged(self) -> int:
        """Return the highest sequence up to which all live peers have every payload."""
        raise NotImplementedError

    def take_payloads(self) -> list[ReceivedPayload]:
        """Return the payloads that have arrived since the last call, each once, as they arrived."""
        raise NotImplementedError

    def take_changes(self) -> list[MemberChange]:
        """Return the peers that have become live, or are no longer, since the last call.

        What was published before a peer became live has to be published again for it.
        """
        raise NotImplementedError

    def live_nodes(self) -> int:
        """Return the number of live nodes, this one included; suspected nodes are live."""
        raise NotImplementedError

    def members(self, now_ns: int) -> list[Member]:
        """Return all known nodes, this one first; also those that died or left lately."""
        raise NotImplementedError

    def counters(self) -> Mapping[str, int]:
        """Return counters: `sent`, `received`, `sent_bytes`, `hints`, `dropped_…` by reason."""
        raise NotImplementedError

    def lag(self) -> list[int]:
        """Return the data of a histogram (`core.Histogram`): the age of hints when they arrived."""
        raise NotImplementedError
