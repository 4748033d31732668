"""Slots and addresses, from memory. With servers: tests/integration/test_redis_topology.py."""

from __future__ import annotations

import pytest

from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.decide.stores.redis.config import Address, parse
from ratekeeper.decide.stores.redis.topology import SLOTS, Topology, slot_of


@pytest.mark.parametrize(
    ("key", "slot"),
    [(b"foo", 12182), (b"{foo}bar", 12182), (b"{}foo", 9500), (b"123456789", 12739)],
)
def test_a_slot_is_the_one_of_the_cluster_specification(key: bytes, slot: int) -> None:
    """The tag in braces decides, unless it is empty."""
    assert slot_of(key) == slot


def test_one_server_has_every_slot() -> None:
    """A refresh has nothing to look up."""
    topology = Topology(parse("redis://h:7"))
    topology.refresh()
    assert topology.slots == [Address("h", 7)] * SLOTS
    assert topology.primaries() == topology.nodes() == [Address("h", 7)]


def test_a_moved_slot_changes_alone() -> None:
    """The other slots keep their servers."""
    topology = Topology(parse("redis+cluster://h1,h2"))
    assert topology.known() == set()
    topology.moved(5, Address("h3", 1))
    assert topology.slots[4:7] == [None, Address("h3", 1), None]
    assert topology.known() == {Address("h3", 1)}


def test_a_refresh_without_servers_names_each_of_them() -> None:
    """The error contains every address and no secret."""
    topology = Topology(parse("redis+cluster://:s3cret@127.0.0.1:1,127.0.0.1:2"))
    with pytest.raises(StoreError, match="no server could name the cluster's slots") as caught:
        topology.refresh()
    assert all(address in str(caught.value) for address in ("127.0.0.1:1", "127.0.0.1:2"))
    assert "s3cret" not in str(caught.value)


def test_a_closed_topology_makes_no_clients() -> None:
    """Its known slots stay."""
    topology = Topology(parse("redis://h"))
    topology.close()
    with pytest.raises(StoreUnavailable, match="has been closed"):
        topology.client(Address("h", 6379))
    assert topology.known() == {Address("h", 6379)}
