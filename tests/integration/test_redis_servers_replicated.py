"""Tests of the harness itself, for servers that replace each other: Cluster and Sentinel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import pytest
import redis
from redis.cluster import RedisCluster
from redis.crc import key_slot
from redis.sentinel import Sentinel

from tests.redis_servers import Cluster, Sentinels, Server, ServerFailed, until

NOTICED_SECONDS_MAX = 10


def assert_gone(pids: Sequence[int | None], servers: Sequence[Server]) -> None:
    for pid in pids:
        assert pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not any(server.folder.exists() for server in servers)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(full_coverage=False) as started:
        yield started


def cluster_client(cluster: Cluster) -> RedisCluster:
    return RedisCluster("127.0.0.1", cluster.nodes[0].port, decode_responses=True)


def test_a_cluster_serves_every_slot_from_three_primaries(cluster: Cluster) -> None:
    """Each key is on the node that has its slot, and `flush` removes the keys of all nodes."""
    addresses = [f"127.0.0.1:{node.port}" for node in cluster.nodes[:3]]
    assert cluster.uri == f"redis+cluster://{','.join(addresses)}"
    assert len(cluster.primaries()) == 3
    keys = [f"key-{number}" for number in range(60)]
    with cluster_client(cluster) as client:
        for key in keys:
            client.set(key, key)
        for key in keys:
            with cluster.node_of(key_slot(key.encode())).client() as node:
                assert node.get(key) == key.encode()
    assert all(node.admin.dbsize() for node in cluster.primaries())
    cluster.flush()
    assert not any(node.admin.dbsize() for node in cluster.primaries())


def test_a_replica_takes_over_from_a_killed_primary(cluster: Cluster) -> None:
    """Replicated keys survive, and the killed primary returns as a replica in sync."""
    slot = key_slot(b"key")
    first = cluster.node_of(slot)
    first.admin.set("key", "value")
    assert first.admin.wait(1, 5_000) == 1
    killed_at = time.monotonic()
    assert cluster.kill_primary(slot) == first.address
    with pytest.raises(ServerFailed, match=f"no node that answers has slot {slot}"):
        cluster.node_of(slot)
    promotion = cluster.wait_promoted(slot)
    assert killed_at < promotion.seen_at_seconds <= time.monotonic()
    second = cluster.node_of(slot)
    assert second.address == promotion.address != first.address
    assert second.admin.get("key") == "value"
    cluster.revive()
    assert first.admin.role()[:3] == ["slave", *second.address[:1], second.port]
    assert first.admin.info("replication")["master_link_status"] == "up"
    assert cluster.node_of(slot) is second
    cluster.flush()


def test_a_cluster_replaces_a_paused_primary(cluster: Cluster) -> None:
    """A silent primary is replaced, and becomes a replica when it is resumed."""
    slot = 0
    first = cluster.node_of(slot)
    first.pause()
    assert cluster.wait_promoted(slot).address != first.address
    cluster.revive()
    assert first.admin.role()[0] == "slave"


def test_the_other_slots_work_without_full_coverage(cluster: Cluster) -> None:
    """A dead primary and a dead replica stop only their own slots, until they are revived."""
    dead_slot, live_slot = 0, 16_383
    dead = cluster.node_of(dead_slot)
    replica_port = int(dead.admin.info("replication")["slave0"]["port"])
    for node in cluster.nodes:
        if node.port in {dead.port, replica_port}:
            node.kill()
    live = cluster.node_of(live_slot)
    until(
        lambda: "slots_fail:0" not in live.admin.execute_command("CLUSTER", "INFO"),
        "a live node notices the death",
        NOTICED_SECONDS_MAX,
    )
    assert key_slot(b"apX") == live_slot
    assert live.admin.set("apX", "value")
    cluster.revive()
    assert cluster.node_of(dead_slot).pid


def test_a_move_can_stop_halfway(cluster: Cluster) -> None:
    """Halfway, the old primary serves the keys it still has and answers ASK for the others."""
    slot = key_slot(b"{tag}")
    source = cluster.node_of(slot)
    target = next(node for node in cluster.primaries() if node is not source)
    keys = [f"{{tag}}{number}" for number in range(250)]
    for key in keys:
        source.admin.set(key, key)
    cluster.begin_move(slot, target.port)
    assert cluster.move_keys(slot, target.port, keys_max=130) == 130
    assert source.admin.dbsize() == 120
    answers = [_answer(source, key) for key in keys]
    assert answers.count(f"ASK {slot} 127.0.0.1:{target.port}") == 130
    assert sum(answer == key for answer, key in zip(answers, keys, strict=True)) == 120
    assert cluster.node_of(slot) is source
    assert cluster.move_keys(slot, target.port) == 120
    cluster.end_move(slot, target.port)
    assert cluster.node_of(slot) is target
    assert {_answer(source, key) for key in keys} == {f"MOVED {slot} 127.0.0.1:{target.port}"}
    assert [_answer(target, key) for key in keys] == keys
    cluster.flush()


def _answer(node: Server, key: str) -> str:
    """Return the value, or the server's redirection as text."""
    try:
        value = node.admin.get(key)
    except redis.ResponseError as error:
        return f"{type(error).__name__.removesuffix('Error').upper()} {error}"
    return str(value)


def test_slots_move_there_and_back(cluster: Cluster) -> None:
    """Slots move with all their keys; a move to a port outside the cluster is an error."""
    source, target = cluster.node_of(0), cluster.node_of(16_383)
    with cluster_client(cluster) as client:
        for number in range(500):
            client.set(f"key-{number}", number)
        for owner in (target, source):
            cluster.move_slots(range(30), owner.port)
            assert {cluster.node_of(slot).port for slot in range(30)} == {owner.port}
            assert [client.get(f"key-{number}") for number in range(500)] == [
                str(number) for number in range(500)
            ]
    with pytest.raises(ValueError, match="no node of this cluster is on port 1; there are "):
        cluster.move_slot(0, 1)
    cluster.flush()


def test_a_cluster_leaves_nothing() -> None:
    """After the block all six processes and folders are gone, even of killed and paused nodes."""
    with Cluster() as started:
        assert started.primaries() == list(started.nodes[:3])
        pids = [node.pid for node in started.nodes]
        started.kill_primary(0)
        started.node_of(16_383).pause()
    assert_gone(pids, started.nodes)


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels() as started:
        yield started


def sentinel_client(sentinels: Sentinels) -> Sentinel:
    addresses = [sentinel.address for sentinel in sentinels.sentinels]
    return Sentinel(addresses, decode_responses=True)


def test_sentinels_name_the_primary_and_its_replica(sentinels: Sentinels) -> None:
    """The Sentinels name both servers of the service, and `flush` empties both."""
    ports = [f"127.0.0.1:{sentinel.port}" for sentinel in sentinels.sentinels]
    assert len(ports) == 3
    assert sentinels.uri == f"redis+sentinel://{','.join(ports)}/main/0"
    client = sentinel_client(sentinels)
    assert client.discover_master("main") == sentinels.primary
    (replica,) = client.discover_slaves("main")
    assert {replica, sentinels.primary} == {server.address for server in sentinels.servers}
    with client.master_for("main") as primary, client.slave_for("main") as second:
        primary.set("key", "value")
        until(lambda: second.get("key") == "value", "the replica has the key", 20)
        sentinels.flush()
        assert primary.get("key") is None
        until(lambda: second.get("key") is None, "the replica has lost the key", 20)


def test_sentinels_promote_the_replica_of_a_killed_primary(sentinels: Sentinels) -> None:
    """In two promotions, there and back, replicated keys survive and the killed server returns."""
    for value in ("first", "second"):
        old = sentinels.primary
        with sentinel_client(sentinels).master_for("main") as primary:
            primary.set("key", value)
            assert primary.wait(1, 5_000) == 1
        killed_at = time.monotonic()
        assert sentinels.kill_primary() == old
        promotion = sentinels.wait_promoted()
        assert killed_at < promotion.seen_at_seconds <= time.monotonic()
        assert promotion.address != old
        sentinels.revive()
        assert sentinels.primary == promotion.address
        killed = next(server for server in sentinels.servers if server.address == old)
        assert killed.admin.role()[0] == "slave"
        assert killed.admin.get("key") == value
    sentinels.flush()


def test_sentinels_replace_a_paused_primary(sentinels: Sentinels) -> None:
    """A silent primary is replaced, and becomes a replica when it is resumed."""
    old = next(server for server in sentinels.servers if server.address == sentinels.primary)
    old.pause()
    assert sentinels.wait_promoted().address != old.address
    sentinels.revive()
    assert old.admin.role()[0] == "slave"


def test_two_sentinels_are_a_quorum(sentinels: Sentinels) -> None:
    """Two Sentinels promote a replica without the third, which finds them again afterwards."""
    sentinels.sentinels[0].kill()
    old = sentinels.kill_primary()
    assert sentinels.wait_promoted().address != old
    sentinels.revive()
    with sentinels.sentinels[0].client() as client:
        assert client.execute_command("SENTINEL", "CKQUORUM", "main")


def test_without_a_sentinel_the_primary_is_unknown() -> None:
    """With all Sentinels dead the harness raises an error; after the block nothing is left."""
    with Sentinels() as started:
        everyone = [*started.servers, *started.sentinels]
        pids = [server.pid for server in everyone]
        for sentinel in started.sentinels:
            sentinel.kill()
        with pytest.raises(ServerFailed, match="no Sentinel runs"):
            started.kill_primary()
    assert len(pids) == 5
    assert_gone(pids, everyone)
