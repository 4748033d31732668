"""From facts about servers to findings: each fault is found, has a remedy, and is told once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tollkeeper.decide.stores.redis.config import RedisConfig, parse
from tollkeeper.decide.stores.redis.findings import (
    FORBIDDEN,
    Finding,
    NodeHealth,
    evaluate,
    merged,
)

ONE = parse("redis://app:secret@h")
SENTINEL = parse("redis+sentinel://s1/main")
CLUSTER = parse("redis+cluster://h")

WELL = NodeHealth(
    "h:6379",
    reachable=True,
    role="primary",
    server="redis",
    version="7.0.15",
    loading=False,
    latency_ms=1.0,
    latency_max_ms=2.0,
    clock_offset_ms=0.0,
    used_memory_bytes=10,
    maxmemory_bytes=100,
    maxmemory_policy="noeviction",
    evicted_keys=0,
    aof_enabled=True,
    aof_fsync="everysec",
    aof_last_write_ok=True,
    rdb_save_points="",
    rdb_last_save_ok=True,
    replicas_connected=1,
    replication_lag_bytes=0,
    min_replicas_to_write=0,
    cluster_state="ok",
    cluster_slots_ok=16_384,
    cluster_full_coverage=True,
)
REPLICA: dict[str, Any] = {"role": "replica", "replicas_connected": None, "link_up": True}


def found(node: NodeHealth, config: RedisConfig = ONE) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in evaluate([node], config)]


@pytest.mark.parametrize("config", [ONE, SENTINEL, CLUSTER])
def test_a_server_that_is_well_gives_no_findings(config: RedisConfig) -> None:
    """Nobody learns to ignore what is not wrong."""
    assert found(WELL, config) == []


def test_what_is_not_known_is_not_judged() -> None:
    """A server that tells nothing but that it is there is not accused of anything."""
    assert found(NodeHealth("h:6379", reachable=True)) == []


@pytest.mark.parametrize(
    ("changes", "check", "level", "text"),
    [
        ({"aof_enabled": False}, "persistence", "warning", "quota would not survive a restart"),
        (
            {"aof_enabled": False, "rdb_save_points": "3600 1"},
            "persistence",
            "warning",
            "quota would be that of the last snapshot after a restart",
        ),
        ({"aof_last_write_ok": False}, "persistence", "problem", "AOF cannot be written"),
        ({"rdb_last_save_ok": False}, "persistence", "problem", "last snapshot failed"),
        ({"maxmemory_policy": "allkeys-lru"}, "eviction", "problem", "may evict a key"),
        ({"maxmemory_policy": "volatile-lru"}, "eviction", "problem", "may evict a key"),
        ({"maxmemory_policy": "allkeys-random"}, "eviction", "problem", "may evict a key"),
        ({"evicted_keys": 12_345}, "eviction", "warning", "12,345 keys were evicted"),
        ({"used_memory_bytes": 80}, "memory", "warning", "80% of maxmemory"),
        ({"used_memory_bytes": 95}, "memory", "problem", "95% of maxmemory"),
        ({"version": "6.2.14"}, "version", "warning", "6.2.14 is older than what is tested"),
        ({"version": "6.0.16"}, "version", "problem", "6.0.16 is too old"),
        ({"version": "5.0"}, "version", "problem", "5.0 is too old"),
        ({"loading": True}, "connection", "warning", "is loading its data"),
        ({"unanswered": ("INFO",)}, "permissions", "warning", "INFO not answered"),
        ({"latency_ms": 25.1}, "round trip", "problem", "take 25.1 ms or more"),
        ({"replicas_connected": 0}, "replication", "warning", "no replica is in sync"),
        ({"replication_lag_bytes": 2**27}, "replication", "warning", "134,217,728 bytes behind"),
        (REPLICA, "replication", "problem", "refuses every check"),
        ({"cluster_enabled": True}, "cluster", "problem", "a node of a cluster"),
        ({"cluster_state": "fail"}, "cluster", "problem", "called fail"),
        ({"cluster_slots_ok": 16_383}, "cluster", "problem", "16,383 of 16,384 slots"),
    ],
)
def test_each_fault_is_found(changes: dict[str, Any], check: str, level: str, text: str) -> None:
    """Each gives one finding, which says what is wrong, where, and what to do."""
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
def test_what_is_safe_is_left_alone(changes: dict[str, Any]) -> None:
    """Each is at the right side of a line."""
    assert found(replace(WELL, **changes)) == []


def test_an_unsafe_policy_is_a_problem_even_before_there_is_a_maxmemory() -> None:
    """The day that it is set is too late; the finding says that nothing is evicted yet."""
    (finding,) = evaluate([replace(WELL, maxmemory_policy="allkeys-lfu", maxmemory_bytes=0)], ONE)
    assert finding.level == "problem"
    assert "once maxmemory is set; it is not" in finding.found


def test_a_replica_is_well_where_somebody_else_is_primary() -> None:
    """With Sentinel and on a cluster replicas are wanted; one that lost its primary is told."""
    replica = replace(WELL, **REPLICA)
    for config in (SENTINEL, CLUSTER):
        assert found(replica, config) == []
        assert found(replace(replica, link_up=False), config) == [("replication", "warning")]


def test_who_may_not_ask_is_told_the_rules_to_add() -> None:
    """The remedy is one command, with the user's name."""
    node = replace(WELL, unanswered=("TIME", "CONFIG GET", "CLUSTER INFO"))
    (finding,) = evaluate([node], ONE)
    assert finding.remedy == "ACL SETUSER app +time +config|get +cluster|info"
    (finding,) = evaluate([node], CLUSTER)
    assert finding.remedy.startswith("ACL SETUSER default ")


def test_no_connection_and_no_login_are_told_apart() -> None:
    """And nothing else is said of such a node."""
    gone = NodeHealth("h:6379", reachable=False, reason="Connection refused")
    assert found(gone) == [("connection", "problem")]
    refused = replace(gone, reason="WRONGPASS", login_refused=True)
    assert found(refused) == [("authentication", "problem")]
    (untrusted,) = evaluate([replace(gone, reason="CERTIFICATE_VERIFY_FAILED")], ONE)
    assert "tls_ca=" in untrusted.remedy


@pytest.mark.parametrize(("offset_ms", "told"), [(1_000.0, False), (1_000.1, True)])
def test_clocks_that_differ_are_told(offset_ms: float, told: bool) -> None:
    """More than a second between servers is a jump at a fail-over; ours does not count."""
    nodes = [replace(WELL, clock_offset_ms=90_000.0)]
    assert not list(evaluate(nodes, ONE))
    nodes.append(replace(WELL, address="i:6379", clock_offset_ms=90_000.0 + offset_ms))
    nodes.append(replace(WELL, address="j:6379", clock_offset_ms=None))
    findings = list(evaluate(nodes, ONE))
    assert [finding.check for finding in findings] == ["clock"] * told
    assert all(finding.nodes == ("h:6379", "i:6379") for finding in findings)


def test_the_same_of_several_nodes_is_said_once() -> None:
    """Six nodes without AOF are one finding, which names all six."""
    nodes = [replace(WELL, address=f"h:{port}", aof_enabled=False) for port in range(6)]
    (finding,) = merged(evaluate(nodes, CLUSTER))
    assert finding.nodes == ("h:0", "h:1", "h:2", "h:3", "h:4", "h:5")
    assert str(finding) == (
        "AOF is off: quota would not survive a restart (h:0, h:1, h:2, h:3, h:4, h:5): "
        "CONFIG SET appendonly yes, then CONFIG REWRITE"
    )


def test_a_finding_without_more_to_say_is_its_text() -> None:
    """No empty brackets, and no colon before nothing."""
    assert str(Finding("uri", "ok", "understood")) == "understood"


@pytest.mark.parametrize(
    "text",
    [
        "NOPERM this user has no permissions to run the 'eval' command",
        "ERR The user executing the script can't run this command or subcommand script: 1",
        "ERR ACL failure in script: User app has no permissions to run the 'time' command",
    ],
)
def test_what_servers_say_when_something_is_forbidden(text: str) -> None:
    """Redis before 7.0.6, after it, and outside of scripts."""
    assert FORBIDDEN.search(text)
