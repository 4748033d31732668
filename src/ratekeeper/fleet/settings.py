"""The settings of a node that shares limits with others.

A limiter with `consistency="leased"` or `"eventual"`, or with such rules, is a node of a fleet. The
defaults suit one process beside a Redis on the same network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND, duration_ns
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.decide.algorithms.holds import LEASE_NS_MAX
from ratekeeper.decide.allowances import BUDGET_NS_MAX
from ratekeeper.decide.failure import NODES_MAX
from ratekeeper.decide.leasing import LEASE_NS_MIN

_LEASE_S_MAX: Final = LEASE_NS_MAX // NS_PER_SECOND
_FLUSH_S_MAX: Final = BUDGET_NS_MAX // (2 * NS_PER_SECOND)
_FLUSH_NS_MIN: Final = NS_PER_SECOND // 100
# Gossip can express ages of up to 65 s.
_DEAD_S_MAX: Final = 60
PEERS_MAX: Final = 1_000
_PORT_MAX: Final = 65_535
# A name, an IPv4 address or an IPv6 address in brackets, with a port.
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]{2,60}\]|[^:\[\]\s]{1,253}):([0-9]{1,5})")
# The processes of a node have sockets beside its table: TABLE.gossip.NAME. The kernel bounds paths.
SOCKET_NAME_BYTES: Final = 16
_SOCKET_PATH_BYTES_MAX: Final = 107
FLEET_NAME: Final = "ratekeeper"
_FLEET_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """How a node answers checks itself, for limits that are `leased` or `eventual`.

    >>> Fleet(store="shared:///run/api.fleet", nodes=20).lease_seconds
    1.0

    `store`          the node's table of leases and pending charges: `shared:///run/api.fleet` for
                     all processes of a machine together, or `memory://`: each process is a node.
    `lease_seconds`  how long a lease lasts, at most; up to 2. A quota change on another node, and a
                     lower limit, take effect after this time.
    `flush_seconds`  pending charges are reported to the authority after this time.
    `warm`           the share of a limit from which the authority decides every check of an
                     `eventual` subject.
    `nodes`          how many nodes share the limits, at least.
    `gossip`         "HOST:PORT" at which this node exchanges hints with others; by default no
                     gossip. HOST is a numeric address of this machine, or `localhost`.
    `key_file`       the file with the keys that authenticate gossip. Required unless HOST is a
                     loopback address.
    `peers`          "HOST:PORT" of other nodes, or a name that resolves to all of them; by default
                     nodes find each other through the authority.
    `advertise`      the numeric "HOST:PORT" at which other nodes reach this one, if `gossip` has
                     another: for example that of the host on which a container runs.
    `name`           the name of the fleet. Nodes ignore gossip of other names: this separates two
                     fleets with one key.
    `dead_seconds`   a node without a sign of life for this time is dead; for half of it, suspected.
    """

    store: str = "memory://"
    lease_seconds: float = 1.0
    flush_seconds: float = 0.2
    warm: float = 0.5
    nodes: int = 1
    gossip: str | None = None
    key_file: str | None = None
    peers: tuple[str, ...] = ()
    dead_seconds: float = 15.0
    advertise: str | None = None
    name: str = FLEET_NAME
    lease_ns: int = field(init=False, default=0, compare=False)
    flush_ns: int = field(init=False, default=0, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.store, str) or not self.store.startswith(("memory://", "shared://")):
            raise ConfigError(
                f"store={show(self.store)} is not on this machine; "
                f'for example Fleet(store="shared:///run/api.fleet") or "memory://"'
            )
        nodes = self.nodes
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= NODES_MAX:
            raise ConfigError(
                f"nodes={show(nodes)} is not a whole number from 1 to {NODES_MAX:,}; "
                f"for example Fleet(nodes=20) where twenty nodes share the limits"
            )
        warm = self.warm
        if not isinstance(warm, int | float) or isinstance(warm, bool) or not 0 <= warm <= 1:
            raise ConfigError(
                f"warm={show(warm)} is not a share from 0 to 1; for example Fleet(warm=0.5)"
            )
        lease_ns = _duration_ns("lease_seconds", self.lease_seconds, LEASE_NS_MIN, _LEASE_S_MAX, 1)
        flush_ns = _duration_ns(
            "flush_seconds", self.flush_seconds, _FLUSH_NS_MIN, _FLUSH_S_MAX, 0.2
        )
        _duration_ns("dead_seconds", self.dead_seconds, NS_PER_SECOND, _DEAD_S_MAX, 15)
        object.__setattr__(self, "lease_ns", lease_ns)
        object.__setattr__(self, "flush_ns", flush_ns)
        self._check_gossip()

    def _check_gossip(self) -> None:
        if not isinstance(self.peers, tuple | list):
            raise ConfigError(
                f"peers={show(self.peers)} is not a tuple of addresses; "
                f'for example Fleet(peers=("10.0.0.2:7946",))'
            )
        object.__setattr__(self, "peers", tuple(self.peers))
        if len(self.peers) > PEERS_MAX:
            raise ConfigError(
                f"peers has {len(self.peers):,} addresses, and {PEERS_MAX:,} are the most; "
                f"a name that resolves to all nodes is enough"
            )
        for peer in self.peers:
            _check_address("peers", peer)
        if not isinstance(self.name, str) or not _FLEET_NAME.fullmatch(self.name):
            raise ConfigError(
                f"name={show(self.name)} is not a name of up to 64 letters, digits, dots, dashes "
                f'and underscores; for example Fleet(name="api-eu")'
            )
        if self.gossip is not None:
            _check_address("gossip", self.gossip)
            if self.advertise is not None:
                _check_address("advertise", self.advertise)
        elif without := [name for name in _OF_GOSSIP if getattr(self, name)]:
            raise ConfigError(
                f"{without[0]} has no effect without gossip; "
                f'for example Fleet(gossip="10.0.0.1:7946", key_file="/etc/ratekeeper/gossip.key")'
            )
        if self.key_file is not None and (not isinstance(self.key_file, str) or not self.key_file):
            raise ConfigError(
                f"key_file={show(self.key_file)} is not a path; "
                f'for example Fleet(key_file="/etc/ratekeeper/gossip.key", …)'
            )


def _duration_ns(what: str, seconds: object, least_ns: int, most_s: int, usual_s: float) -> int:
    found_ns = duration_ns(what, seconds, most_s * NS_PER_SECOND + 1, f"{what}={usual_s:g}")
    if not least_ns <= found_ns <= most_s * NS_PER_SECOND:
        raise ConfigError(
            f"{what}={show(seconds)} is not from {least_ns / NS_PER_SECOND:g} to {most_s} seconds; "
            f"for example Fleet({what}={usual_s:g})"
        )
    return found_ns


# Settings that have no effect without gossip.
_OF_GOSSIP: Final = ("peers", "key_file", "advertise")


def _check_address(what: str, address: object) -> None:
    if not split_address(what, address)[1]:
        raise ConfigError(
            f'{what}: {show(address)} has port 0, which is not valid; for example "10.0.0.1:7946"'
        )


def split_address(what: str, text: object) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT". `what` names the setting in a ConfigError.

    >>> split_address("gossip", "127.0.0.1:7946"), split_address("grpc", "[::1]:0")
    (('127.0.0.1', 7946), ('::1', 0))
    """
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if found is None or int(found[2]) > _PORT_MAX:
        raise ConfigError(
            f"{what}: {show(text)} is not HOST:PORT; for example 10.0.0.1:7946, [::1]:7946 or "
            f"name.internal:7946"
        )
    return found[1].strip("[]"), int(found[2])


def joined_address(host: str, port: int) -> str:
    """Return "HOST:PORT".

    >>> joined_address("127.0.0.1", 7946), joined_address("::1", 7946)
    ('127.0.0.1:7946', '[::1]:7946')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def topic_of(topic: str, fleet: str) -> str:
    """Return the topic in which the nodes of one fleet register: two fleets may share a Redis."""
    return topic if fleet == FLEET_NAME else f"{topic}.{fleet}"


def check_socket_path(table: Path, setting: str) -> None:
    """Raise ConfigError if the sockets beside a node's table would have too long a path."""
    longest = f"{table}.gossip.{'0' * SOCKET_NAME_BYTES}"
    if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"gossip needs Unix sockets beside {table}, whose paths would be longer than "
            f"{_SOCKET_PATH_BYTES_MAX} bytes; use a shorter path for {setting}"
        )


def fleet_of(fleet: object) -> Fleet:
    """Return the argument of a limiter; by default a fleet of one node."""
    if fleet is None:
        return Fleet()
    if isinstance(fleet, Fleet):
        return fleet
    raise ConfigError(f"fleet={show(fleet)} is not a Fleet; for example fleet=Fleet(nodes=20)")
