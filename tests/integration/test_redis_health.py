"""Health reports and statistics of real servers: counted states, facts of nodes, findings."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, cast

import pytest

from ratekeeper import Limit, Limiter
from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis import health as health_module
from ratekeeper.decide.stores.redis.codec import bucket_name
from ratekeeper.decide.stores.redis.health import RedisHealth, count_states
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.decide.stores.redis.topology import Topology
from tests.answering import answer
from tests.integration.redis_wires import key_of
from tests.redis_servers import Server, Single, User, running, until

SETTLED_SECONDS_MAX = 20.0
LONG_NAME = "a rule whose name is longer than a field"


@pytest.fixture
def single() -> Single:
    server = running("single")
    server.flush()
    return cast("Single", server)


@contextmanager
def opened(uri: str, **options: object) -> Iterator[RedisStore]:
    # A busy test machine may pause for longer than the default deadline.
    patient = {"deadline_ms": 10_000, **options}
    with closing(cast("RedisStore", open_store(uri, None, **patient))) as store:
        yield store


def log_limit(limit: int) -> Limit:
    return Limit(limit, per=3_600, algorithm="sliding_window_log")


def levels(health: RedisHealth) -> dict[str, str]:
    return {finding.check: finding.level for finding in health.findings}


def admin_pipeline(server: Server) -> Any:
    return server.admin.pipeline(transaction=False)


def scans_seen(server: Server) -> int:
    return int(server.admin.info("commandstats").get("cmdstat_scan", {"calls": 0})["calls"])


def test_a_subject_has_one_state_for_each_limit(single: Single) -> None:
    """A check adds one state for each limit of its rule; a reset removes them."""
    with opened(single.uri) as store:
        assert store.stats().states == 0
        one = Limiter("5/minute; 100/hour", store=store)
        other = Limiter("7/minute", store=store, name=LONG_NAME)
        one.check("a")
        assert store.stats().states == 2
        one.check("a")
        other.check("a")
        other.check("b")
        assert store.stats().states == 4
        one.reset("a")
        assert store.stats().states == 2
        other.reset("a")
        other.reset("b")
        assert store.stats().states == 0


def test_a_grant_adds_no_second_state(single: Single) -> None:
    """A grant and the spent units of one limit count as one state."""
    with opened(single.uri) as store:
        limiter = Limiter("5/minute; 100/hour", store=store)
        limiter.grant("a", 10)
        assert store.stats().states == 2
        limiter.check("a", 5)
        assert store.stats().states == 2


@pytest.mark.parametrize("name", ["", "log", LONG_NAME])
@pytest.mark.parametrize("limit", [5, 3_000, 100_000])
def test_a_log_of_many_chunks_is_one_state(single: Single, name: str, limit: int) -> None:
    """The chunks of a log count as one state, for every length of the rule's name."""
    with opened(single.uri) as store:
        limiter = Limiter([log_limit(limit)], store=store, name=name)
        limiter.check("a", limit)
        assert store.stats().states == 1


def test_all_states_of_a_rule_with_many_limits_are_counted(single: Single) -> None:
    """Fifteen limits fill several fields of the hash, and every state counts."""
    with opened(single.uri) as store:
        limits = [
            Limit(1_000 + number, per=60 + number, algorithm=algorithm)
            for number in range(5)
            for algorithm in ("token_bucket", "sliding_window_counter", "fixed_window")
        ]
        Limiter(limits, store=store).check("a", 3)
        assert store.stats().states == 15


def test_rules_stored_by_digest_are_counted(single: Single) -> None:
    """A hundred rules with long names, stored as digests of any bytes, are a hundred states."""
    with opened(single.uri) as store:
        for number in range(100):
            Limiter("5/minute", store=store, name=f"{LONG_NAME} {number}").check("a")
        assert store.stats().states == 100


def test_other_prefixes_and_other_keys_are_not_counted(single: Single) -> None:
    """Two stores on one server count apart, even if one prefix starts with the other."""
    single.admin.set("rk:not-ours", "value")
    single.admin.set("rkx:{a}", "value")
    with opened(single.uri) as store, opened(single.uri, prefix="rkx2") as other:
        Limiter("5/minute", store=store).check("a")
        for subject in "abc":
            Limiter("5/minute", store=other).check(subject)
        assert (store.stats().states, other.stats().states) == (1, 3)


def test_stats_hold_bytes_and_expired_keys_and_no_capacity(single: Single) -> None:
    """The server reports the bytes. A Redis store has no maximum of states, so it is never full."""
    with opened(single.uri) as store:
        before = store.stats()
        limiter = Limiter("5/second", store=store)
        for number in range(20):
            limiter.check(f"user:{number}")
        stats = store.stats()
        assert stats.states == 20
        assert 20 * 50 < stats.bytes < 20 * 500
        assert (stats.states_max, stats.fullness, stats.refused) == (0, 0.0, 0)
        until(
            lambda: store.stats().expired >= before.expired + 20,
            "all keys have expired",
            SETTLED_SECONDS_MAX,
        )
        assert store.stats().states == 0


def test_a_small_count_takes_two_round_trips_on_one_connection(single: Single) -> None:
    """Repeated `stats` calls reuse their connection and cost two round trips each."""
    with opened(single.uri) as store:
        Limiter("5/minute", store=store).check("a")
        store.stats()
        sent: list[int] = []
        client: Any = store._servers.topology.client(store.config.addresses[0])
        plain = client.connection_pool.get_connection
        client.connection_pool.get_connection = lambda: sent.append(1) or plain()
        before = single.admin.info("stats")["total_connections_received"]
        assert store.stats().states == 1
        assert len(sent) == 2
        assert single.admin.info("stats")["total_connections_received"] == before


def test_a_thousand_subjects_are_counted_exactly_and_more_estimated(single: Single) -> None:
    """Beyond 1,000 keys, the count is the mean of a sample times the number of keys."""
    with opened(single.uri) as store, closing(Topology(store.config)) as topology:
        two = Limiter("5/minute; 100/hour", store=store)
        for number in range(health_module.KEYS_COUNTED_MAX - 50):
            two.check(f"user:{number}")
        counted = count_states(topology, "rk")
        assert counted.states == 1_900
        for number in range(500):
            two.check(f"more:{number}")
        counted = count_states(topology, "rk")
        assert counted.states == pytest.approx(2_900, rel=0.02)


def test_a_large_database_is_estimated_from_a_part(single: Single) -> None:
    """The count reads about 10,000 of 40,000 keys, a quarter of them ours, and estimates well."""
    pipeline = admin_pipeline(single)
    for number in range(30_000):
        pipeline.set(f"other:{number}", 1)
    pipeline.execute()
    with (
        opened(single.uri) as store,
        closing(Topology(store.config)) as topology,
    ):
        Limiter("5/minute; 100/hour", store=store).check("a")
        bucket = single.admin.execute_command("DUMP", key_of("a"), NEVER_DECODE=True)
        for number in range(10_000):
            key = b"rk:{%%%b}" % bucket_name(number)
            pipeline.restore(key, 3_600_000, bucket, replace=True)
        pipeline.execute()
        before = scans_seen(single)
        counted = count_states(topology, "rk")
        assert counted.keys == pytest.approx(10_000, rel=0.15)
        assert counted.states == pytest.approx(20_000, rel=0.15)
        assert scans_seen(single) - before == 10
    single.flush()


def test_foreign_values_under_our_prefix_are_skipped(single: Single) -> None:
    """A string in the place of a hash makes the count inexact, but does not fail it."""
    with opened(single.uri) as store, closing(Topology(store.config)) as topology:
        Limiter("5/minute", store=store).check("a")
        single.admin.set("rk:{b}", "no hash")
        counted = count_states(topology, "rk")
        assert counted.keys == 2
        single.flush()
        single.admin.set(key_of("a"), "no hash")
        with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
            count_states(topology, "rk")
    single.flush()


def test_a_forbidden_count_names_the_missing_acl_rules() -> None:
    """For a user that may check but not count, `stats` raises an error instead of returning 0."""
    checks = "~rk:* +evalsha +eval +script|load +hget +hset +hdel +pttl +pexpire +time"
    users = [User("app", "pw", checks), User("scanner", "pw", f"{checks} +scan")]
    with Single(password="root", users=users) as server:
        for user in users:
            uri = server.uri.replace("app:", f"{user.name}:")
            with opened(uri) as store:
                Limiter("5/minute", store=store).check("a")
                with pytest.raises(StoreUnavailable, match=r"needs \+scan .*\+hkeys"):
                    store.stats()
        server.admin.acl_setuser("scanner", enabled=True, commands=["+hkeys"])
        with opened(uri) as store:
            # The user may call neither INFO nor MEMORY USAGE, so their numbers are 0.
            stats = store.stats()
            assert (stats.states, stats.bytes, stats.expired) == (1, 0, 0)


def test_a_dead_or_silent_server_is_a_store_error() -> None:
    """`stats` and `health` raise a StoreError soon, and work again once the server is back."""
    with Single() as server, opened(server.uri, connect_ms=200) as store:
        Limiter("5/minute", store=store).check("a")
        server.pause()
        started = time.monotonic()
        with pytest.raises(StoreTimeout, match="no answer in time"):
            store.stats()
        with pytest.raises(StoreUnavailable, match=r"no server answers: .* no answer in time"):
            store.health()
        assert time.monotonic() - started < 10
        server.resume()
        assert store.stats().states == 1
        server.kill()
        with pytest.raises(StoreUnavailable, match="Connection refused"):
            store.stats()
        with pytest.raises(StoreUnavailable, match=r"no server answers: .*: Connection refused"):
            store.health()
        server.start()
        assert store.stats().states == 0
        assert store.health().nodes[0].reachable


def test_health_holds_the_facts_of_one_server(single: Single) -> None:
    """Each fact in the report equals the server's INFO."""
    with opened(single.uri) as store:
        Limiter("5/minute", store=store).check("a")
        health = store.health()
        info = single.admin.info()
    assert (health.mode, health.cluster_state, health.slots_covered) == ("standalone", None, None)
    (node,) = health.nodes
    assert node.address == f"127.0.0.1:{single.port}"
    assert (node.reachable, node.role, node.loading, node.unanswered) == (
        True,
        "primary",
        False,
        (),
    )
    assert (node.server, node.version) == ("redis", info["redis_version"])
    assert (node.keys, node.evicted_keys, node.replicas_connected) == (1, 0, 0)
    assert (node.maxmemory_bytes, node.maxmemory_policy) == (0, "noeviction")
    assert (node.aof_enabled, node.rdb_last_save_ok) == (False, True)
    assert node.used_memory_bytes == pytest.approx(info["used_memory"], rel=0.5)
    assert node.latency_ms is not None
    assert 0 < node.latency_ms < 1_000
    assert node.clock_offset_ms == pytest.approx(0, abs=1_000)  # one machine, one clock


def test_a_snapshot_that_failed_is_a_problem() -> None:
    """Redis rejects writes after a failed snapshot, so the operator must see it in the report."""
    with Single(lines=["save 3600 1"]) as server, opened(server.uri) as store:
        shutil.rmtree(server.folder)
        server.admin.bgsave()
        until(
            lambda: store.health().nodes[0].rdb_last_save_ok is False,
            "the snapshot has failed",
            SETTLED_SECONDS_MAX,
        )
        assert levels(store.health())["persistence"] == "problem"


def test_forbidden_facts_are_unknown_and_no_error() -> None:
    """Facts that the user may not read are None, and one warning names the missing ACL rules."""
    users = [User("app", "pw", "~rk:* +@all -info -config"), User("poor", "pw", "~rk:* +eval")]
    with Single(password="root", users=users) as server:
        with opened(server.uri) as store:
            health = store.health()
            (node,) = health.nodes
            assert (node.reachable, node.keys, node.unanswered) == (True, 0, ("INFO", "CONFIG GET"))
            assert (node.role, node.version, node.aof_enabled, node.aof_fsync) == (None,) * 4
            assert node.clock_offset_ms is not None
            assert [each.split(": ")[1] for each in health.warnings] == [
                "ACL SETUSER app +info +config|get"
            ]
        with opened(server.uri.replace("app:", "poor:")) as store:
            (node,) = store.health().nodes
            assert node.unanswered == ("TIME", "INFO", "DBSIZE", "CONFIG GET")
            assert (node.reachable, node.keys, node.clock_offset_ms) == (True, None, None)
            assert node.latency_ms is not None  # an error reply takes as long


def test_a_server_that_is_not_redis_is_unreachable() -> None:
    """A server that answers in HTTP is a node that does not answer, for `health` and `stats`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            # A client may close its connection early; the end of the test shuts the listener down.
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(ConnectionError):
                        connection.recv(1_000)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with opened(f"redis://127.0.0.1:{port}") as store:
                with pytest.raises(StoreUnavailable, match="no server answers"):
                    store.health()
                with pytest.raises(StoreUnavailable):
                    store.stats()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()


def test_a_server_that_loads_its_data_gets_a_warning() -> None:
    """A loading server answers only INFO; the report shows it as loading, not as failed."""
    slowly = ["key-load-delay 20000", "loading-process-events-interval-bytes 1024"]
    with Single(lines=[*slowly, "rdbcompression no"]) as server, opened(server.uri) as store:
        pipeline = admin_pipeline(server)
        for number in range(200):
            pipeline.set(f"key:{number}", "x" * 100)
        pipeline.save()
        pipeline.execute()
        server.kill()
        server.launch()
        health = until(lambda: health_or_none(store), "the server answers", SETTLED_SECONDS_MAX)
        (node,) = health.nodes
        assert (node.reachable, node.loading, node.role) == (True, True, "primary")
        assert levels(health)["connection"] == "warning"


def health_or_none(store: RedisStore) -> RedisHealth | None:
    try:
        return store.health()
    except StoreError:
        return None


# ── The status of servers, for metrics ─────────────────────────────────────────────────────────


def test_the_clock_of_a_server_is_compared(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes read the clock of this machine; then the node's is two seconds ahead."""
    with opened(single.uri) as store:
        (status,) = store.server_status()
        assert status.address in single.uri
        assert status.clock_offset_ns is not None
        assert abs(status.clock_offset_ns) < 500_000_000
        real = time.time_ns
        monkeypatch.setattr(health_module.time, "time_ns", lambda: real() + 2_000_000_000)
        (status,) = store.server_status()
        assert status.clock_offset_ns is not None
        assert -2_500_000_000 < status.clock_offset_ns < -1_500_000_000


def test_a_server_that_lost_its_keys_is_noticed() -> None:
    """By FLUSHALL and by a restart without persistence; every store sees the same time."""
    with Single() as server, opened(server.uri) as store, opened(server.uri) as other:
        (first,) = store.server_status()
        assert first.kept_since_s is not None
        assert abs(first.kept_since_s - time.time()) < 60
        answer(store.counter([Limit(5, per=60)], "r").check("user:1", 1))
        for each in (store, other):
            (again,) = each.server_status()
            assert again.kept_since_s == first.kept_since_s
        server.flush()
        (flushed,) = other.server_status()
        assert flushed.kept_since_s is not None
        assert flushed.kept_since_s > first.kept_since_s
        server.kill()
        assert store.server_status() == []
        server.start()
        until(store.server_status, "the server answers", SETTLED_SECONDS_MAX)
        (restarted,) = store.server_status()
        assert restarted.kept_since_s is not None
        assert restarted.kept_since_s > flushed.kept_since_s
        assert store.stats().states == 0  # the marker is no state


def test_evicted_keys_are_reported() -> None:
    """Redis counts them itself."""
    with Single() as server, opened(server.uri) as store:
        assert store.server_status()[0].evicted_keys == 0
        server.admin.config_set("maxmemory-policy", "allkeys-random")
        pipeline = admin_pipeline(server)
        for number in range(2_000):
            pipeline.set(f"other:{number}", "x" * 100)
        pipeline.execute()
        server.admin.config_set("maxmemory", "1mb")
        until(
            lambda: (store.server_status()[0].evicted_keys or 0) > 0,
            "keys are evicted",
            SETTLED_SECONDS_MAX,
        )


def test_each_primary_of_a_cluster_has_its_marker() -> None:
    """A server without slots would have none."""
    with opened(running("cluster").uri) as store:
        found = store.server_status()
        assert len({status.address for status in found}) == len(found) > 1
        assert all(status.kept_since_s is not None for status in found)


def test_a_user_with_few_permissions_reads_what_it_may() -> None:
    """What the server does not say is None, and no error."""
    with opened(running("password").uri) as store:
        (status,) = store.server_status()
        assert status.address
