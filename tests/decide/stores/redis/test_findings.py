"""From facts about servers to findings: each fault is found once and has a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ratekeeper.decide.stores.redis.config import RedisConfig, parse
from ratekeeper.decide.stores.redis.findings import (
    FORBIDDEN,
    HealthFinding,
    ServerHealth,
    evaluate,
    merge_findings,
)

ONE = parse("redis://app:secret@h")
SENTINEL = parse("redis+sentinel://s1/main")
CLUSTER = parse("redis+cluster://h")

WELL = ServerHealth(
    "h:6379",
    reachable=True,
    role="primary",
    server="redis",
    version="7.0.15",
    loading=False,
    latency_ms=1.0,
    clock_offset_ms=0.0,
    used_memory_bytes=10,
    maxmemory_bytes=100,
    maxmemory_policy="noeviction",
    evicted_keys=0,
    aof_enabled=True,
    aof_fsync="everysec",
    aof_last_write_ok=True,
    rdb_last_save_ok=True,
    replicas_connected=1,
    replication_lag_bytes=0,
    cluster_state="ok",
    cluster_slots_ok=16_384,
)
REPLICA: dict[str, Any] = {"role": "replica", "replicas_connected": None, "link_up": True}


def found(node: ServerHealth, config: RedisConfig = ONE) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in evaluate([node], config)]


@pytest.mark.parametrize("config", [ONE, SENTINEL, CLUSTER])
def test_a_healthy_server_has_no_findings(config: RedisConfig) -> None:
    """A false alarm would teach operators to ignore findings."""
    assert found(WELL, config) == []


def test_unknown_facts_give_no_findings() -> None:
    """A server that answers, but returns no facts, has no findings."""
    assert found(ServerHealth("h:6379", reachable=True)) == []


@pytest.mark.parametrize(
    ("changes", "check", "level", "text"),
    [
        (
            {"aof_enabled": False},
            "persistence",
            "warning",
            "a restart loses all counts",
        ),
        ({"aof_last_write_ok": False}, "persistence", "problem", "AOF cannot be written"),
        ({"rdb_last_save_ok": False}, "persistence", "problem", "last snapshot failed"),
        (
            {"maxmemory_policy": "allkeys-lru"},
            "eviction",
            "problem",
            "may evict a subject's counts",
        ),
        (
            {"maxmemory_policy": "volatile-lru"},
            "eviction",
            "problem",
            "may evict a subject's counts",
        ),
        (
            {"maxmemory_policy": "allkeys-random"},
            "eviction",
            "problem",
            "may evict a subject's counts",
        ),
        ({"evicted_keys": 12_345}, "eviction", "warning", "12,345 keys were evicted"),
        ({"used_memory_bytes": 80}, "memory", "warning", "80% of maxmemory"),
        ({"used_memory_bytes": 95}, "memory", "problem", "95% of maxmemory"),
        ({"version": "6.2.14"}, "version", "warning", "6.2.14 is older than the tested versions"),
        ({"version": "6.0.16"}, "version", "problem", "6.0.16 is too old"),
        ({"version": "5.0"}, "version", "problem", "5.0 is too old"),
        ({"loading": True}, "connection", "warning", "is loading its data"),
        ({"unanswered": ("INFO",)}, "permissions", "warning", "INFO not answered"),
        ({"latency_ms": 25.1}, "round trip", "problem", "take 25.1 ms or more"),
        ({"replicas_connected": 0}, "replication", "warning", "no replica is in sync"),
        ({"replication_lag_bytes": 2**27}, "replication", "warning", "134,217,728 bytes behind"),
        (REPLICA, "replication", "problem", "refuses every check"),
        ({"cluster_enabled": True}, "cluster", "problem", "a node of a cluster"),
        ({"cluster_state": "fail"}, "cluster", "problem", "the cluster's state is fail"),
        ({"cluster_slots_ok": 16_383}, "cluster", "problem", "16,383 of 16,384 slots"),
    ],
)
def test_each_fault_is_found(changes: dict[str, Any], check: str, level: str, text: str) -> None:
    """Each gives one finding with the problem, the server and the remedy."""
    (finding,) = evaluate([replace(WELL, **changes)], ONE)
    assert (finding.check, finding.level) == (check, level)
    assert text in finding.found
    assert finding.remedy
    assert finding.nodes == ("h:6379",)


@pytest.mark.parametrize(
    "changes",
    [
        {"maxmemory_policy": "volatile-ttl"},
        {"server": "valkey", "version": "1.0"},
        {"version": "10.0.0"},
        {"latency_ms": 25.0},
        {"used_memory_bytes": 79},
        {"used_memory_bytes": 10**12, "maxmemory_bytes": 0},
        {"evicted_keys": None},
    ],
)
def test_safe_values_give_no_findings(changes: dict[str, Any]) -> None:
    """Each is on the safe side of a threshold."""
    assert found(replace(WELL, **changes)) == []


def test_an_unsafe_policy_is_a_problem_even_without_maxmemory() -> None:
    """The finding says that nothing is evicted yet."""
    (finding,) = evaluate([replace(WELL, maxmemory_policy="allkeys-lfu", maxmemory_bytes=0)], ONE)
    assert finding.level == "problem"
    assert "maxmemory is not set, so not yet" in finding.found


def test_a_replica_is_healthy_with_sentinel_and_in_a_cluster() -> None:
    """A replica that has lost its primary is a finding."""
    replica = replace(WELL, **REPLICA)
    for config in (SENTINEL, CLUSTER):
        assert found(replica, config) == []
        assert found(replace(replica, link_up=False), config) == [("replication", "warning")]


def test_missing_permissions_name_the_acl_rules_to_add() -> None:
    """The remedy is one command, with the user's name."""
    node = replace(WELL, unanswered=("TIME", "CONFIG GET", "CLUSTER INFO"))
    (finding,) = evaluate([node], ONE)
    assert finding.remedy == "ACL SETUSER app +time +config|get +cluster|info"
    (finding,) = evaluate([node], CLUSTER)
    assert finding.remedy.startswith("ACL SETUSER default ")


def test_a_failed_connection_and_a_rejected_login_are_distinguished() -> None:
    """There is no other finding about such a server."""
    gone = ServerHealth("h:6379", reachable=False, reason="Connection refused")
    assert found(gone) == [("connection", "problem")]
    refused = replace(gone, reason="WRONGPASS", login_refused=True)
    assert found(refused) == [("authentication", "problem")]
    (untrusted,) = evaluate([replace(gone, reason="CERTIFICATE_VERIFY_FAILED")], ONE)
    assert "tls_ca=" in untrusted.remedy


@pytest.mark.parametrize(("offset_ms", "reported"), [(1_000.0, False), (1_000.1, True)])
def test_clocks_that_differ_are_found(offset_ms: float, reported: bool) -> None:
    """More than a second between servers is a jump at a fail-over; our clock does not count."""
    nodes = [replace(WELL, clock_offset_ms=90_000.0)]
    assert not list(evaluate(nodes, ONE))
    nodes.append(replace(WELL, address="i:6379", clock_offset_ms=90_000.0 + offset_ms))
    nodes.append(replace(WELL, address="j:6379", clock_offset_ms=None))
    findings = list(evaluate(nodes, ONE))
    assert [finding.check for finding in findings] == ["clock"] * reported
    assert all(finding.nodes == ("h:6379", "i:6379") for finding in findings)


def test_equal_findings_about_several_servers_are_merged() -> None:
    """Six nodes without AOF are one finding, which names all six."""
    nodes = [replace(WELL, address=f"h:{port}", aof_enabled=False) for port in range(6)]
    (finding,) = merge_findings(evaluate(nodes, CLUSTER))
    assert finding.nodes == ("h:0", "h:1", "h:2", "h:3", "h:4", "h:5")
    assert str(finding) == (
        "AOF is off: a restart loses all counts since the last snapshot, if there is one "
        "(h:0, h:1, h:2, h:3, h:4, h:5): CONFIG SET appendonly yes, then CONFIG REWRITE"
    )


def test_a_finding_without_servers_and_remedy_is_its_text() -> None:
    """The text has no empty brackets, and no colon at its end."""
    assert str(HealthFinding("uri", "ok", "understood")) == "understood"


@pytest.mark.parametrize(
    "text",
    [
        "NOPERM this user has no permissions to run the 'eval' command",
        "ERR The user executing the script can't run this command or subcommand script: 1",
        "ERR ACL failure in script: User app has no permissions to run the 'time' command",
    ],
)
def test_errors_about_permissions_are_recognised(text: str) -> None:
    """Redis words them differently before 7.0.6, after it, and outside scripts."""
    assert FORBIDDEN.search(text)
