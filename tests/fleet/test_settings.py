"""The settings of a node: what is accepted, and errors that say what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper import ConfigError, Fleet
from ratekeeper.fleet.settings import fleet_of, joined_address, split_address


def test_the_defaults_need_no_other_node() -> None:
    """A Fleet without arguments is one process without gossip."""
    fleet = Fleet()
    assert (fleet.store, fleet.nodes, fleet.gossip, fleet.peers) == ("memory://", 1, None, ())
    assert (fleet.lease_ns, fleet.flush_ns, fleet.warm) == (1_000_000_000, 200_000_000, 0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"store": "redis://localhost"}, r"not on this machine.*shared:///"),
        ({"store": 7}, r"store=7 is not on this machine"),
        ({"lease_seconds": 0.001}, r"from 0.02 to 2 seconds.*lease_seconds=1"),
        ({"lease_seconds": 3}, r"lease_seconds=3 is not from"),
        ({"lease_seconds": "1"}, r"not a length of time"),
        ({"flush_seconds": 0}, r"flush_seconds=0 is not from 0.01 to 10 seconds"),
        ({"dead_seconds": 0.5}, r"dead_seconds=0.5 is not from 1 to 60 seconds"),
        ({"dead_seconds": 61}, r"dead_seconds=61 is not from 1 to 60 seconds"),
        ({"warm": 1.5}, r"warm=1.5 is not a share from 0 to 1"),
        ({"warm": True}, r"not a share"),
        ({"nodes": 0}, r"nodes=0 is not a whole number from 1 to 100,000"),
        ({"nodes": True}, r"whole number"),
        ({"gossip": "7946"}, r'"7946" is not HOST:PORT|not HOST:PORT'),
        ({"gossip": "host:0"}, r"'host:0' has port 0, which is not valid"),
        ({"gossip": "host:99999"}, r"not HOST:PORT.*10.0.0.1:7946"),
        ({"peers": "10.0.0.2:7946"}, r"not a tuple of addresses"),
        ({"peers": ("10.0.0.2:7946",)}, r"peers has no effect without gossip"),
        ({"gossip": "a:1", "peers": ("b",)}, r"peers: 'b' is not HOST:PORT"),
        ({"gossip": "a:1", "peers": ("b:1",) * 1_001}, r"1,001 addresses.*1,000 are the most"),
        ({"key_file": "/k"}, r"key_file has no effect without gossip"),
        ({"advertise": "10.0.0.1:7946"}, r"advertise has no effect without gossip"),
        ({"gossip": "a:1", "advertise": "b"}, r"advertise: 'b' is not HOST:PORT"),
        ({"name": "two words"}, r"name='two words' is not a name of up to 64 letters"),
        ({"name": ""}, r"name='' is not a name"),
        ({"gossip": "a:1", "key_file": ""}, r"key_file='' is not a path"),
    ],
)
def test_a_wrong_setting_is_refused(arguments: dict[str, Any], says: str) -> None:
    """The error names the setting, its value and a correct one."""
    with pytest.raises(ConfigError, match=says):
        Fleet(**arguments)


def test_peers_may_be_a_list() -> None:
    """A list from a configuration file becomes a tuple, so that a Fleet can be a key of a dict."""
    peers: Any = ["b:1", "[::1]:7946"]
    fleet = Fleet(gossip="10.0.0.1:7946", peers=peers)
    assert fleet.peers == ("b:1", "[::1]:7946")
    assert hash(fleet)


@pytest.mark.parametrize("host", ["2001:db8::1", "10.0.0.1", "name.internal", "localhost"])
def test_an_address_is_a_host_and_a_port(host: str) -> None:
    """IPv6 addresses are in brackets."""
    assert split_address("gossip", joined_address(host, 80)) == (host, 80)


@pytest.mark.parametrize(
    "wrong",
    [
        "8081",
        ":8081",
        "host:",
        "::1:80",
        "host:port",
        "a b:1",
        "h:65536",
        "h:٣",
        f"h:{'9' * 400}",
        7,
    ],
)
def test_a_text_that_is_no_address_is_refused(wrong: object) -> None:
    """The error names the option and the text."""
    with pytest.raises(ConfigError, match=r"^--grpc: .* is not HOST:PORT; for example 10\.0\.0\.1"):
        split_address("--grpc", wrong)


def test_a_limiter_takes_nothing_but_a_fleet() -> None:
    """`fleet=` is a Fleet, or None for the default."""
    assert fleet_of(None) == Fleet()
    assert fleet_of(Fleet(nodes=3)).nodes == 3
    with pytest.raises(ConfigError, match=r"fleet=20 is not a Fleet; for example"):
        fleet_of(20)
