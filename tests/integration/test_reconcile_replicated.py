"""Servers with replicas, looked over: a cluster, Sentinels, and a pair that drifts apart."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest

from tests.integration.reconciling import found, looked, patient, spend, wrong
from tests.redis_servers import Cluster, Single, running, until
from tollkeeper import Limiter
from tollkeeper.decide.stores.redis.topology import slot_of

SECONDS_MAX = 30.0
# Done on the primary, and told to no replica.
UNREPLICATED = "redis.set_repl(redis.REPL_NONE) return redis.call(unpack(ARGV))"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three primaries with a replica each, empty."""
    servers = running("cluster")
    assert isinstance(servers, Cluster)
    servers.flush()
    yield servers
    servers.flush()


# ------------------------------------------------------------------------------------ cluster


def test_a_cluster_is_looked_at_node_by_node(cluster: Cluster) -> None:
    """A defect on each primary is found there, and mended there; the replicas are alike."""
    keys = spend(cluster.uri, 60)
    broken = {cluster.node_of(slot_of(key)).port: key for key in keys}
    assert len(broken) == 3
    for port, key in broken.items():
        server = next(node for node in cluster.nodes if node.port == port)
        server.admin.persist(key)
        server.admin.hset(key, "new", "garbage")
    report = looked(cluster.uri)
    assert wrong(report).keys() == {"no expiry", "unreadable"}
    for check in ("no expiry", "unreadable"):
        (finding,) = found(report, check)
        for port, key in broken.items():
            assert any(f"{key.decode()} on 127.0.0.1:{port}" in each for each in finding.where)
    assert (report.counted["keys"], report.counted["primaries"]) == (60, 3)
    mended = looked(cluster.uri, repair="all")
    assert sum(each.done for each in mended.repairs) == 6
    after = looked(cluster.uri)
    assert wrong(after) == {}
    assert after.counted["states"] == 60
    (drift,) = found(after, "drift")
    assert drift.what.endswith("are alike; replicas: 3")


def test_what_only_the_primary_has_is_drift(cluster: Cluster) -> None:
    """A write that no replica was told of, on one of three."""
    keys = spend(cluster.uri, 60)
    node = cluster.node_of(slot_of(keys[0]))
    node.admin.eval(UNREPLICATED, 1, keys[0], "HSET", keys[0], "secret", "1")
    report = looked(cluster.uri)
    drift = [each for each in found(report, "drift") if each.level == "problem"]
    assert len(drift) == 1
    assert f"of 127.0.0.1:{node.port}" in drift[0].where[0]
    assert drift[0].where[1] == "tk:{user:0}: its fields differ"
    cluster.flush()


def test_clocks_that_are_apart_are_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `doctor` tells it; these servers share one, so here any distance at all counts as one."""
    spend(cluster.uri)
    (fine,) = found(looked(cluster.uri), "clock")
    assert (fine.level, "servers are together" in fine.what) == ("ok", True)
    monkeypatch.setattr("tollkeeper.decide.stores.redis.findings.CLOCK_SPREAD_MS_MAX", -1.0)
    (apart,) = found(looked(cluster.uri), "clock")
    assert apart.level == "warning"
    assert "NTP" in apart.remedy
    assert len(apart.where) == 2


# -------------------------------------------------------------------------------- replication


def test_behind_sentinels_the_primary_is_walked_and_its_replicas_compared() -> None:
    """Wherever it is now."""
    servers = running("sentinel")
    servers.flush()
    spend(servers.uri)
    report = looked(servers.uri)
    assert wrong(report).keys() <= {"connection"}
    assert (report.counted["keys"], report.counted["primaries"]) == (20, 1)
    (drift,) = found(report, "drift")
    assert (drift.level, "were compared and are alike; replicas: " in drift.what) == ("ok", True)
    servers.flush()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Single, Single]]:
    """A primary, and a replica of it."""
    with Single(lines=["repl-diskless-sync-delay 0"]) as primary:
        lines = [f"replicaof 127.0.0.1 {primary.port}", "replica-read-only no"]
        with Single(lines=lines) as replica:
            until(
                lambda: (
                    primary.admin.info("replication").get("slave0", {}).get("state") == "online"
                ),
                "the replica is in sync",
                SECONDS_MAX,
            )
            yield primary, replica


def in_sync(primary: Single) -> None:
    primary.admin.wait(1, 10_000)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("field", "its fields differ"),
        ("missing", "it does not exist"),
        ("extra", "it exists, but not on the primary"),
        ("expiry", "only one of the two has an expiry"),
        ("later", "the expiries differ by "),
    ],
)
def test_a_replica_that_differs_is_told(how: str, words: str, pair: tuple[Single, Single]) -> None:
    """Which key, and how; that of the others is alike is counted."""
    primary, replica = pair
    primary.flush()
    spend(primary.uri)
    in_sync(primary)
    key = "tk:{user:5}"
    match how:
        case "field":
            replica.admin.hset(key, "orders", "other")
        case "missing":
            replica.admin.delete(key)
        case "extra":
            key = "tk:{user:more}"
            replica.admin.hset(key, "orders", "1")
        case "expiry":
            replica.admin.persist(key)
        case _:
            replica.admin.expire(key, 90_000)
    report = looked(primary.uri)
    (finding,) = [each for each in found(report, "drift") if each.level == "problem"]
    assert finding.where[0] == f"127.0.0.1:{replica.port} of 127.0.0.1:{primary.port}"
    assert finding.where[1].startswith(key)
    assert words in finding.where[1]
    assert ", 1 differ from the primary's" in finding.what
    replica.admin.delete(key)


def test_what_is_on_the_way_is_no_drift(pair: tuple[Single, Single]) -> None:
    """Keys that are spent on all the time differ now and then, and have not drifted apart."""
    primary, _ = pair
    primary.flush()
    done = Event()

    def ask() -> None:
        with Limiter("1000000/hour", store=patient(primary.uri), name="orders") as limiter:
            number = 0
            while not done.is_set():
                number += 1
                limiter.check(f"user:{number % 50}")

    thread = Thread(target=ask)
    thread.start()
    try:
        until(lambda: primary.admin.dbsize() == 50, "all have been there", SECONDS_MAX)
        for _ in range(20):
            told = found(looked(primary.uri), "drift")
            assert [each for each in told if each.level == "problem"] == []
    finally:
        done.set()
        thread.join()


def test_a_replica_that_does_not_answer_is_told(pair: tuple[Single, Single]) -> None:
    """It is not compared, and the rest is looked at all the same."""
    primary, replica = pair
    primary.flush()
    spend(primary.uri)
    in_sync(primary)
    replica.pause()
    try:
        report = looked(primary.uri, options={"connect_ms": 300})
    finally:
        replica.resume()
    told = [each for each in found(report, "drift") if each.level == "warning"]
    assert [each.what for each in told] == [
        f"not compared: 127.0.0.1:{replica.port}: no answer in time"
    ]
    assert report.counted["keys"] == 20
