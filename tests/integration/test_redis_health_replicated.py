"""What an operator sees of Sentinel and of a cluster, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest
from redis.crc import key_slot

from tests.redis_servers import Cluster, Sentinels, until
from tollkeeper import Limiter
from tollkeeper.core.errors import StoreError
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.findings import HealthFinding
from tollkeeper.decide.stores.redis.store import RedisStore

SETTLED_SECONDS_MAX = 20.0
SUBJECTS = 30


def opened(uri: str) -> closing[RedisStore]:
    # A machine that tests may pause for longer than a production's deadline.
    return closing(cast("RedisStore", open_store(uri, deadline_ms=10_000)))


def findings(store: RedisStore, check: str) -> list[HealthFinding]:
    return [finding for finding in store.health().findings if finding.check == check]


def states(store: RedisStore) -> int:
    """-1 while nobody can say."""
    try:
        return store.stats().states
    except StoreError:
        return -1


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels() as started:
        yield started


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(full_coverage=False) as started:
        yield started


def test_with_sentinel_the_replica_is_asked_too(sentinels: Sentinels) -> None:
    """One primary, one replica, what is between them, and Sentinels that could agree."""
    with opened(sentinels.uri) as store:
        Limiter("5/minute", store=store).check("a")
        found = store.health()
        assert store.stats().states == 1
    assert found.mode == "sentinel"
    primary, replica = sorted(found.nodes, key=lambda node: str(node.role))
    assert (primary.role, primary.replicas_connected, primary.link_up) == ("primary", 1, None)
    assert (replica.role, replica.replicas_connected, replica.link_up) == ("replica", None, True)
    assert primary.replication_lag_bytes is not None
    assert primary.replication_lag_bytes >= 0
    assert {finding.check for finding in found.findings} == {"persistence"}
    sentinels.flush()


def test_a_dead_replica_is_a_node_that_does_not_answer(sentinels: Sentinels) -> None:
    """The store works, and the operator is told that nobody would take over."""
    with opened(sentinels.uri) as store:
        store.health()
        (replica,) = (one for one in sentinels.servers if one.address != sentinels.primary)
        replica.kill()
        until(
            lambda: findings(store, "replication"),
            "the primary has noticed",
            SETTLED_SECONDS_MAX,
        )
        found = store.health()
        assert {node.address: node.reachable for node in found.nodes} == {
            "{}:{}".format(*sentinels.primary): True,
            f"127.0.0.1:{replica.port}": False,
        }
        (connection,) = findings(store, "connection")
        assert (connection.level, connection.nodes) == ("problem", (f"127.0.0.1:{replica.port}",))
        sentinels.revive()
        assert not findings(store, "replication")


def test_stats_follow_a_fail_over(sentinels: Sentinels) -> None:
    """Whoever only counts, and never checks, finds the new primary as well."""
    with opened(sentinels.uri) as store:
        Limiter("5/hour", store=store).check("a")
        (first,) = (one for one in sentinels.servers if one.address == sentinels.primary)
        assert first.admin.wait(1, 5_000) == 1
        assert store.stats().states == 1
        first.kill()
        sentinels.wait_promoted()
        until(lambda: states(store) == 1, "the new primary is counted", SETTLED_SECONDS_MAX)
    sentinels.revive()
    sentinels.flush()


def test_sentinels_that_cannot_agree_are_a_problem(sentinels: Sentinels) -> None:
    """Two of three are dead: the third says that there is no quorum."""
    for dead in sentinels.sentinels[:2]:
        dead.kill()
    with opened(sentinels.uri) as store:
        found = until(
            lambda: [each for each in findings(store, "sentinel") if each.level == "problem"],
            "the third has noticed",
            SETTLED_SECONDS_MAX,
        )
        assert "NOQUORUM" in found[0].found
        (silent,) = (each for each in findings(store, "sentinel") if each.level == "warning")
        assert len(silent.nodes) == 2
    sentinels.revive()


def test_every_node_of_a_cluster_is_asked(cluster: Cluster) -> None:
    """Three primaries with a replica each, all slots, and states counted on all of them."""
    with opened(cluster.uri) as store:
        limiter = Limiter("5/hour; 100/day", store=store)
        for number in range(SUBJECTS):
            limiter.check(f"user:{number}")
        assert store.stats().states == 2 * SUBJECTS
        # A replica is named by the others once it has heard anything from its primary.
        until(lambda: len(store.health().nodes) == 6, "all six are named", SETTLED_SECONDS_MAX)
        found = store.health()
    assert (found.mode, found.cluster_state, found.slots_covered) == ("cluster", "ok", 16_384)
    assert sorted(str(node.role) for node in found.nodes) == ["primary"] * 3 + ["replica"] * 3
    assert all(node.cluster_full_coverage is False for node in found.nodes)
    assert {finding.check for finding in found.findings} == {"persistence"}
    (persistence,) = found.findings
    assert len(persistence.nodes) == 6
    cluster.flush()


def test_stats_follow_slots_that_move(cluster: Cluster) -> None:
    """A node that had the key when we last heard says who has it now."""
    with opened(cluster.uri) as store:
        Limiter("5/hour", store=store).check("a")
        assert store.stats().states == 1
        slot = key_slot(b"a")
        source = cluster.node_of(slot)
        target = next(node for node in cluster.primaries() if node is not source)
        cluster.move_slot(slot, target.port)
        assert store.stats().states == 1
        cluster.move_slot(slot, source.port)
    cluster.flush()


def test_stats_follow_a_promotion_in_a_cluster(cluster: Cluster) -> None:
    """The replica that took over is counted, with nothing counted twice."""
    with opened(cluster.uri) as store:
        limiter = Limiter("5/hour", store=store)
        for number in range(SUBJECTS):
            limiter.check(f"user:{number}")
        for node in cluster.primaries():
            assert node.admin.wait(1, 5_000) == 1
        assert store.stats().states == SUBJECTS
        cluster.kill_primary(0)
        cluster.wait_promoted(0)
        until(lambda: states(store) == SUBJECTS, "all are counted again", SETTLED_SECONDS_MAX)
        cluster.revive()
        until(lambda: states(store) == SUBJECTS, "and again", SETTLED_SECONDS_MAX)
    cluster.flush()


def test_slots_that_nobody_serves_are_a_problem(cluster: Cluster) -> None:
    """With a primary and its replica dead, the cluster says how much is left."""
    dead = cluster.node_of(0)
    replica_port = int(dead.admin.info("replication")["slave0"]["port"])
    with opened(cluster.uri) as store:
        store.health()
        for node in cluster.nodes:
            if node.port in {dead.port, replica_port}:
                node.kill()
        found = until(lambda: findings(store, "cluster"), "it is noticed", SETTLED_SECONDS_MAX)
        assert found[0].level == "problem"
        assert "of 16,384 slots are served" in found[0].found
        health = store.health()
        assert health.slots_covered is not None
        assert health.slots_covered < 16_384
        assert not all(node.reachable for node in health.nodes)
    cluster.revive()
