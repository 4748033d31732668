"""Gossip on the wire: messages between nodes, and their form as datagrams."""

from __future__ import annotations

from typing import Literal, NamedTuple

# A numeric host and a port, as a socket has it: ("10.0.0.7", 7946) or ("2001:db8::7", 7946).
Address = tuple[str, int]

HintKind = Literal["warm", "denied"]


class NodeStatus(NamedTuple):
    """What a node says of itself. It spreads with its heartbeats."""

    version: str = ""
    """Of Tollkeeper; at most 32 bytes, as every text here."""
    rules_version: str = ""
    leases: int = 0
    """Units of leases that the node has not spent."""
    pending: int = 0
    """Units that the node has admitted and not reported."""
    region: str = ""
