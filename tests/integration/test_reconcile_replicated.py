"""`ratekeeper reconcile` with replicas: a cluster, Sentinels, and a pair that differs."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest

from ratekeeper import Limiter
from ratekeeper.decide.stores.redis.topology import slot_of
from tests.integration.reconciling import found, patient, reconciled, spend, wrong
from tests.integration.redis_wires import key_of
from tests.redis_servers import Cluster, Single, running, until

SECONDS_MAX = 30.0
# Writes on the primary that are not replicated.
UNREPLICATED = "redis.set_repl(redis.REPL_NONE) return redis.call(unpack(ARGV))"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Return three primaries with a replica each, empty."""
    servers = running("cluster")
    assert isinstance(servers, Cluster)
    servers.flush()
    yield servers
    servers.flush()


# ------------------------------------------------------------------------------------ cluster


def test_every_primary_of_a_cluster_is_scanned(cluster: Cluster) -> None:
    """A defect on each primary is found and repaired there; the replicas are equal."""
    keys = spend(cluster.uri, 60)
    broken = {cluster.node_of(slot_of(key)).port: key for key in keys}
    assert len(broken) == 3
    for port, key in broken.items():
        server = next(node for node in cluster.nodes if node.port == port)
        server.admin.persist(key)
        server.admin.hset(key, "new", "garbage")
    report = reconciled(cluster.uri)
    assert wrong(report).keys() == {"no expiry", "unreadable"}
    for check in ("no expiry", "unreadable"):
        (finding,) = found(report, check)
        for port, key in broken.items():
            assert any(f"{key.decode()} on 127.0.0.1:{port}" in each for each in finding.where)
    assert (report.counted["keys"], report.counted["primaries"]) == (60, 3)
    repaired = reconciled(cluster.uri, repair="all")
    assert sum(each.done for each in repaired.repairs) == 6
    after = reconciled(cluster.uri)
    assert wrong(after) == {}
    assert after.counted["states"] == 60
    (drift,) = found(after, "drift")
    assert drift.what.endswith("are equal; replicas: 3")


def test_write_that_was_not_replicated_is_drift(cluster: Cluster) -> None:
    """The finding names the one primary of three whose replica differs."""
    keys = spend(cluster.uri, 60)
    node = cluster.node_of(slot_of(keys[0]))
    node.admin.eval(UNREPLICATED, 1, keys[0], "HSET", keys[0], "secret", "1")
    report = reconciled(cluster.uri)
    drift = [each for each in found(report, "drift") if each.level == "problem"]
    assert len(drift) == 1
    assert f"of 127.0.0.1:{node.port}" in drift[0].where[0]
    assert drift[0].where[1] == f"{keys[0].decode()}: its contents differ"
    cluster.flush()


def test_clocks_that_differ(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `doctor`. These servers share one clock, so here any difference counts."""
    spend(cluster.uri)
    (fine,) = found(reconciled(cluster.uri), "clock")
    assert (fine.level, "servers agree" in fine.what) == ("ok", True)
    monkeypatch.setattr("ratekeeper.decide.stores.redis.findings.CLOCK_SPREAD_MS_MAX", -1.0)
    (apart,) = found(reconciled(cluster.uri), "clock")
    assert apart.level == "warning"
    assert "NTP" in apart.remedy
    assert len(apart.where) == 2


# -------------------------------------------------------------------------------- replication


def test_sentinel() -> None:
    """The current primary is scanned, and its replicas are compared."""
    servers = running("sentinel")
    servers.flush()
    spend(servers.uri)
    report = reconciled(servers.uri)
    assert wrong(report).keys() <= {"connection"}
    assert (report.counted["keys"], report.counted["primaries"]) == (20, 1)
    (drift,) = found(report, "drift")
    assert (drift.level, "were compared and are equal; replicas: " in drift.what) == ("ok", True)
    servers.flush()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Single, Single]]:
    """Start a primary and a replica."""
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
        ("field", "its contents differ"),
        ("missing", "it does not exist"),
        ("extra", "it exists, but not on the primary"),
        ("expiry", "only one of the two has an expiry"),
        ("later", "the expiries differ by "),
    ],
)
def test_replica_that_differs(how: str, words: str, pair: tuple[Single, Single]) -> None:
    """The finding names the key and the difference."""
    primary, replica = pair
    primary.flush()
    spend(primary.uri)
    in_sync(primary)
    key = key_of("user:5")
    match how:
        case "field":
            replica.admin.hset(key, "orders", "other")
        case "missing":
            replica.admin.delete(key)
        case "extra":
            key = key_of("user:more")
            replica.admin.hset(key, "orders", "1")
        case "expiry":
            replica.admin.persist(key)
        case _:
            replica.admin.expire(key, 90_000)
    report = reconciled(primary.uri)
    (finding,) = [each for each in found(report, "drift") if each.level == "problem"]
    assert finding.where[0] == f"127.0.0.1:{replica.port} of 127.0.0.1:{primary.port}"
    assert finding.where[1].startswith(key)
    assert words in finding.where[1]
    assert finding.what.startswith("1 of ")
    assert "keys differ from the primary" in finding.what
    replica.admin.delete(key)


def test_replication_lag_is_no_drift(pair: tuple[Single, Single]) -> None:
    """Busy keys differ for a moment, and that is no finding."""
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
            drifts = found(reconciled(primary.uri), "drift")
            assert [each for each in drifts if each.level == "problem"] == []
    finally:
        done.set()
        thread.join()


def test_replica_that_does_not_answer(pair: tuple[Single, Single]) -> None:
    """It is not compared; the rest is checked anyway."""
    primary, replica = pair
    primary.flush()
    spend(primary.uri)
    in_sync(primary)
    replica.pause()
    try:
        report = reconciled(primary.uri, options={"connect_ms": 300})
    finally:
        replica.resume()
    drifts = [each for each in found(report, "drift") if each.level == "warning"]
    assert [each.what for each in drifts] == [
        f"not compared: 127.0.0.1:{replica.port}: no answer in time"
    ]
    assert report.counted["keys"] == 20
