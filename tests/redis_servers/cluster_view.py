"""A node's view of its cluster: the answer to CLUSTER NODES.

<id> 127.0.0.1:17001@27001 myself,master - 0 0 1 connected 0-5460 [93-<-<id>]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as it sees itself or as another node sees it."""

    node_id: str
    port: int
    flags: frozenset[str]
    primary_id: str
    config_epoch: int
    is_linked: bool
    slots: tuple[range, ...]

    @property
    def is_primary(self) -> bool:
        """Return True if the node is a primary with slots."""
        return "master" in self.flags and bool(self.slots)

    @property
    def is_well(self) -> bool:
        """Return True if the node is connected and neither failed nor joining."""
        return self.is_linked and not self.flags & {"fail", "fail?", "handshake", "noaddr"}

    def has(self, slot: int) -> bool:
        """Return True if the node has the slot."""
        return any(slot in some for some in self.slots)


def parse_nodes(text: str) -> list[NodeView]:
    """Return all nodes of the answer; the node that answered comes first."""
    views = [_parse_node(line.split()) for line in text.splitlines() if line]
    return sorted(views, key=lambda view: "myself" not in view.flags)


def _parse_node(words: Sequence[str]) -> NodeView:
    node_id, address, flags, primary_id, _, _, config_epoch, link, *slots = words
    return NodeView(
        node_id,
        int(address.partition("@")[0].rpartition(":")[2]),
        frozenset(flags.split(",")),
        primary_id,
        int(config_epoch),
        link == "connected",
        # Brackets mark slots in a move, which still have their old owner.
        tuple(_parse_slots(word) for word in slots if not word.startswith("[")),
    )


def _parse_slots(word: str) -> range:
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)
