"""Health reports and statistics with Sentinel and with a cluster, healthy and with dead nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest
from redis.crc import key_slot

from ratekeeper import Limiter
from ratekeeper.core.errors import StoreError
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.findings import HealthFinding
from ratekeeper.decide.stores.redis.health import RedisHealth
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.redis_servers import Cluster, Sentinels, until

SETTLED_SECONDS_MAX = 20.0
SUBJECTS = 30


def opened(uri: str) -> closing[RedisStore]:
    # A busy test machine may pause for longer than the default deadline.
    return closing(cast("RedisStore", open_store(uri, deadline_ms=10_000)))


def findings(store: RedisStore, check: str) -> list[HealthFinding]:
    return [finding for finding in store.health().findings if finding.check == check]


def states(store: RedisStore) -> int:
    """Return the number of states, or -1 while the store fails."""
    try:
        return store.stats().states
    except StoreError:
        return -1


@pytest.fixture(scope="module")
def started_sentinels() -> Iterator[Sentinels]:
    with Sentinels() as started:
        yield started


@pytest.fixture
def sentinels(started_sentinels: Sentinels) -> Sentinels:
    """Return the servers of this file, without keys."""
    started_sentinels.flush()
    return started_sentinels


@pytest.fixture(scope="module")
def started_cluster() -> Iterator[Cluster]:
    with Cluster(full_coverage=False) as started:
        yield started


@pytest.fixture
def cluster(started_cluster: Cluster) -> Cluster:
    """Return the cluster of this file, without keys."""
    started_cluster.flush()
    return started_cluster


def test_health_covers_the_replica_under_sentinel(sentinels: Sentinels) -> None:
    """The report holds the primary, the replica and the lag between them, and finds a quorum."""
    with opened(sentinels.uri) as store:
        Limiter("5/minute", store=store).check("a")
        health = store.health()
        assert store.stats().states == 1
    assert health.mode == "sentinel"
    primary, replica = sorted(health.nodes, key=lambda node: str(node.role))
    assert (primary.role, primary.replicas_connected, primary.link_up) == ("primary", 1, None)
    assert (replica.role, replica.replicas_connected, replica.link_up) == ("replica", None, True)
    assert primary.replication_lag_bytes is not None
    assert primary.replication_lag_bytes >= 0
    assert {finding.check for finding in health.findings} == {"persistence"}


def test_a_dead_replica_is_a_problem(sentinels: Sentinels) -> None:
    """The store works, and the report says that no replica could take over."""
    with opened(sentinels.uri) as store:
        store.health()
        (replica,) = (one for one in sentinels.servers if one.address != sentinels.primary)
        replica.kill()
        until(
            lambda: findings(store, "replication"),
            "the primary has noticed",
            SETTLED_SECONDS_MAX,
        )
        health = store.health()
        assert {node.address: node.reachable for node in health.nodes} == {
            "{}:{}".format(*sentinels.primary): True,
            f"127.0.0.1:{replica.port}": False,
        }
        (connection,) = findings(store, "connection")
        assert (connection.level, connection.nodes) == ("problem", (f"127.0.0.1:{replica.port}",))
        sentinels.revive()
        assert not findings(store, "replication")


def test_stats_follow_a_fail_over(sentinels: Sentinels) -> None:
    """`stats` finds the new primary by itself, without a check before it."""
    with opened(sentinels.uri) as store:
        Limiter("5/hour", store=store).check("a")
        (first,) = (one for one in sentinels.servers if one.address == sentinels.primary)
        assert first.admin.wait(1, 5_000) == 1
        assert store.stats().states == 1
        first.kill()
        sentinels.wait_promoted()
        until(lambda: states(store) == 1, "the count uses the new primary", SETTLED_SECONDS_MAX)
    sentinels.revive()


def test_sentinels_that_cannot_agree_are_a_problem(sentinels: Sentinels) -> None:
    """With two of three Sentinels dead, the third one reports that there is no quorum."""
    for dead in sentinels.sentinels[:2]:
        dead.kill()
    with opened(sentinels.uri) as store:
        problems = until(
            lambda: [each for each in findings(store, "sentinel") if each.level == "problem"],
            "the third Sentinel has noticed",
            SETTLED_SECONDS_MAX,
        )
        assert "NOQUORUM" in problems[0].found
        (silent,) = (each for each in findings(store, "sentinel") if each.level == "warning")
        assert len(silent.nodes) == 2
    sentinels.revive()


def test_health_covers_every_node_of_a_cluster(cluster: Cluster) -> None:
    """The report holds three primaries, three replicas and all slots; `stats` counts on all."""
    with opened(cluster.uri) as store:
        limiter = Limiter("5/hour; 100/day", store=store)
        for number in range(SUBJECTS):
            limiter.check(f"user:{number}")
        assert store.stats().states == 2 * SUBJECTS

        def complete() -> RedisHealth | None:
            """Return the report, once the node that it came from lists every replica.

            A node lists a replica only after the replica has received data from its primary.
            """
            report = store.health()
            return report if len(report.nodes) == 6 else None

        health = until(complete, "health has six nodes", SETTLED_SECONDS_MAX)
    assert (health.mode, health.cluster_state, health.slots_covered) == ("cluster", "ok", 16_384)
    assert sorted(str(node.role) for node in health.nodes) == ["primary"] * 3 + ["replica"] * 3
    assert {finding.check for finding in health.findings} == {"persistence"}
    (persistence,) = health.findings
    assert len(persistence.nodes) == 6


def test_stats_follow_slots_that_move(cluster: Cluster) -> None:
    """After a slot has moved, `stats` counts its states on the new node."""
    with opened(cluster.uri) as store:
        Limiter("5/hour", store=store).check("a")
        assert store.stats().states == 1
        slot = key_slot(b"a")
        source = cluster.node_of(slot)
        target = next(node for node in cluster.primaries() if node is not source)
        cluster.move_slot(slot, target.port)
        assert store.stats().states == 1
        cluster.move_slot(slot, source.port)


def test_stats_follow_a_promotion_in_a_cluster(cluster: Cluster) -> None:
    """`stats` counts the promoted replica, and counts no state twice."""
    with opened(cluster.uri) as store:
        limiter = Limiter("5/hour", store=store)
        for number in range(SUBJECTS):
            limiter.check(f"user:{number}")
        for node in cluster.primaries():
            assert node.admin.wait(1, 5_000) == 1
        assert store.stats().states == SUBJECTS
        cluster.kill_primary(0)
        cluster.wait_promoted(0)
        until(lambda: states(store) == SUBJECTS, "all states are counted", SETTLED_SECONDS_MAX)
        cluster.revive()
        until(lambda: states(store) == SUBJECTS, "all are counted again", SETTLED_SECONDS_MAX)


def test_slots_without_a_node_are_a_problem(cluster: Cluster) -> None:
    """With a primary and its replica dead, the report says how many slots are left."""
    dead = cluster.node_of(0)
    replica_port = int(dead.admin.info("replication")["slave0"]["port"])
    with opened(cluster.uri) as store:
        store.health()
        for node in cluster.nodes:
            if node.port in {dead.port, replica_port}:
                node.kill()
        reported = until(lambda: findings(store, "cluster"), "a finding", SETTLED_SECONDS_MAX)
        assert reported[0].level == "problem"
        assert "of 16,384 slots are served" in reported[0].found
        health = store.health()
        assert health.slots_covered is not None
        assert health.slots_covered < 16_384
        assert not all(node.reachable for node in health.nodes)
    cluster.revive()
