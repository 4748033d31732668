"""Gossip over UDP: one thread and one socket around the state machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from tollkeeper.fleet.datagrams import Address, NodeStatus
from tollkeeper.fleet.gossip import (
    GossipSettings,
    Hint,
    Member,
    MemberChange,
    ReceivedPayload,
)

PORT: Final = 7946


class Registry(Protocol):
    """Where nodes find each other: the authority of a fleet."""

    def register(self, name: str, value: str, ttl_ns: int) -> Sequence[str]:
        """Keep a value for a time; return those that all names have now. Blocks. StoreError."""
        ...

    def unregister(self, name: str) -> None:
        """Forget the value of a name. Blocks. Raises StoreError."""
        ...


class GossipTransport:
    """Runs gossip in a thread. All methods may be called from any thread, and none blocks.

    `bind` is "host:port"; the host must be a loopback address unless there is a `key_file`.
    `peers` are addresses "host:port"; a name that resolves to several addresses is all of them.
    The callbacks run in the gossip thread and must not block.
    """

    def __init__(
        self,
        bind: str,
        *,
        key_file: Path | None = None,
        peers: Sequence[str] = (),
        registry: Registry | None = None,
        advertise: str | None = None,
        fleet: str = "tollkeeper",
        settings: GossipSettings | None = None,
        status: NodeStatus | None = None,
        on_hints: Callable[[list[Hint]], None] | None = None,
        on_payloads: Callable[[list[ReceivedPayload]], None] | None = None,
        on_changes: Callable[[list[MemberChange]], None] | None = None,
    ) -> None:
        """Bind the socket. Raises ConfigError, also if the configuration cannot work."""
        raise NotImplementedError

    @property
    def address(self) -> Address:
        """The address that other nodes send to; with port 0, the port that the system chose."""
        raise NotImplementedError

    @property
    def node(self) -> int:
        """This node's id, chosen at random."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        raise NotImplementedError

    def stop(self) -> None:
        """Tell the other nodes that this one leaves, and end the thread."""
        raise NotImplementedError

    def set_status(self, status: NodeStatus) -> None:
        """See `Gossip.set_status`."""
        raise NotImplementedError

    def warm(self, gate: int, subject: str) -> None:
        """See `Gossip.warm`."""
        raise NotImplementedError

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """See `Gossip.denied`."""
        raise NotImplementedError

    def publish(self, payload: bytes) -> int | None:
        """See `Gossip.publish`."""
        raise NotImplementedError

    def acknowledged(self) -> int:
        """See `Gossip.acknowledged`."""
        raise NotImplementedError

    def live_nodes(self) -> int:
        """See `Gossip.live_nodes`."""
        raise NotImplementedError

    def members(self) -> list[Member]:
        """See `Gossip.members`."""
        raise NotImplementedError

    def counters(self) -> dict[str, int]:
        """See `Gossip.counters`; with the datagrams that could not be read, by reason."""
        raise NotImplementedError

    def lag(self) -> list[int]:
        """See `Gossip.lag`."""
        raise NotImplementedError
