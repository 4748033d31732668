"""What the doctor finds on real servers: every check, each with its remedy, and no password."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import cast

import pytest

from tests.redis_servers import Cluster, Sentinels, Single, Tls, User, running, until
from tollkeeper import Limiter
from tollkeeper.cli.doctor import CHECKS, SCRIPT_COMMANDS, Report, examine
from tollkeeper.decide import kernel
from tollkeeper.decide.stores.redis.findings import HealthFinding

SETTLED_SECONDS_MAX = 20.0
REDIS_CHECKS = [
    *("uri", "connection", "authentication", "version", "permissions", "scripts", "persistence"),
    *("eviction", "memory", "clock", "replication", "round trip"),
]


def checks(report: Report) -> list[str]:
    return list(dict.fromkeys(finding.check for finding in report.findings))


def finding(report: Report, check: str) -> HealthFinding:
    (found,) = (each for each in report.findings if each.check == check)
    return found


def not_ok(report: Report) -> dict[str, str]:
    return {each.check: each.level for each in report.findings if each.level != "ok"}


def keys_left(server: Single) -> list[str]:
    return cast("list[str]", server.admin.keys("*"))


def test_one_server_is_looked_at_from_every_side() -> None:
    """All checks are told in order; two are only warnings, and nothing is left behind."""
    server = cast("Single", running("single"))
    server.flush()
    report = examine(server.uri)
    assert checks(report) == REDIS_CHECKS
    assert not_ok(report) == {"persistence": "warning", "replication": "warning"}
    assert (report.exit_code, report.usable) == (0, True)
    version = server.admin.info("server")["redis_version"]
    assert finding(report, "version").found == f"Redis {version}"
    assert finding(report, "uri").found == f"{server.uri}, prefix tk, deadline 50 ms"
    assert keys_left(server) == []


def test_whatever_is_not_ok_has_a_remedy() -> None:
    """And whatever is ok has none."""
    with Single(lines=["maxmemory-policy allkeys-lru"]) as server:
        report = examine(server.uri)
    assert {each.level for each in report.findings} == {"ok", "warning", "problem"}
    for each in report.findings:
        assert bool(each.remedy) == (each.level != "ok"), each


def test_with_aof_there_is_nothing_to_say_about_persistence() -> None:
    """How much a crash loses is in the line."""
    with Single(aof=True) as server:
        report = examine(server.uri)
        assert finding(report, "persistence") == HealthFinding(
            "persistence",
            "ok",
            "AOF is on, appendfsync always: whatever was answered survives a crash",
        )
        server.admin.config_set("appendfsync", "everysec")
        assert "up to two seconds" in finding(examine(server.uri), "persistence").found


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random"])
def test_a_policy_that_forgets_limited_keys_is_a_problem(policy: str) -> None:
    """The exit code says so too."""
    server = cast("Single", running("single"))
    server.admin.config_set("maxmemory-policy", policy)
    try:
        report = examine(server.uri)
    finally:
        server.admin.config_set("maxmemory-policy", "noeviction")
    assert finding(report, "eviction").level == "problem"
    assert finding(report, "eviction").remedy == "CONFIG SET maxmemory-policy noeviction"
    assert report.exit_code == 1


def test_volatile_ttl_is_safe_and_says_what_it_means() -> None:
    """It forgets what is about to be whole again anyway."""
    with Single(lines=["maxmemory 100mb", "maxmemory-policy volatile-ttl"]) as server:
        report = examine(server.uri)
    assert finding(report, "eviction").level == "ok"
    assert "expires soonest" in finding(report, "eviction").found
    assert re.fullmatch(r"\d+% of 100.0 MiB used", finding(report, "memory").found)


def test_who_may_not_ask_still_gets_what_can_be_found_out() -> None:
    """What is not known is a warning each, never an exception and never called fine."""
    user = User("app", "s3cret", "~tk:* +@all -info -config")
    with Single(password="root", users=[user]) as server:
        report = examine(server.uri)
    unknown = {"version", "persistence", "eviction", "memory", "replication"}
    assert not_ok(report) == dict.fromkeys({*unknown, "permissions"}, "warning")
    assert finding(report, "permissions").remedy == "ACL SETUSER app +info +config|get"
    assert finding(report, "authentication").found == "as app"
    assert report.exit_code == 0
    assert "s3cret" not in str(report)


NEEDED = "+eval +evalsha +script|load " + " ".join(f"+{name}" for name in SCRIPT_COMMANDS)


@pytest.mark.parametrize(
    "rules",
    [
        "~other:* +@all",
        "~tk:* +@all -evalsha -eval",
        *(f"~tk:* +@all -{name}" for name in SCRIPT_COMMANDS),
    ],
)
def test_who_may_not_check_is_told_the_rules_that_are_missing(rules: str) -> None:
    """Each single permission that a check needs is found missing, and the remedy works."""
    with Single(password="root", users=[User("app", "pw", rules)]) as server:
        report = examine(server.uri)
        problem = next(each for each in report.findings if each.level == "problem")
        assert problem.check == "permissions"
        assert problem.remedy == f"ACL SETUSER app ~tk:* {NEEDED}"
        assert (report.exit_code, "scripts" in checks(report)) == (1, False)
        server.admin.execute_command(*problem.remedy.split())
        assert "problem" not in not_ok(examine(server.uri)).values()


def test_the_commands_that_scripts_need_are_those_in_the_scripts() -> None:
    """A command that is added to a script is added to the remedy."""
    folder = files("tollkeeper.decide.stores.redis").joinpath("lua")
    texts = [
        path.read_text() for path in folder.iterdir() if path.name not in {"count.lua", "README.md"}
    ]
    called = {name.lower() for text in texts for name in re.findall(r"call\('([A-Z]+)'", text)}
    assert called == set(SCRIPT_COMMANDS)


@pytest.mark.parametrize("who", [":s3cret@", "app:s3cret@", ""])
def test_a_wrong_login_is_told_and_the_password_is_not(who: str) -> None:
    """There is no connection to be had, which is exit code 2."""
    with Single(password="root") as server:
        report = examine(f"redis://{who}127.0.0.1:{server.port}")
    assert not_ok(report) == {"authentication": "problem"}
    assert report.exit_code == 2
    assert "s3cret" not in str(report)


def test_a_password_in_the_uri_is_never_repeated() -> None:
    """Whatever is wrong with the URI."""
    for uri in (
        "redis:app:s3cret@host",
        "redis://app:s3cret@host:99999",
        "redis://app:s3cret/@host",
        "nonsense://app:s3cret@host",
        "app:s3cret@host://",
        "redis://app:s3cret@host?colour=red",
    ):
        report = examine(uri)
        assert not_ok(report) == {"uri": "problem"}
        assert report.exit_code == 2
        assert "s3cret" not in str(report), uri


def test_a_server_that_is_gone_and_one_that_is_silent() -> None:
    """Both are told soon, with exit code 2."""
    with Single() as server:
        server.pause()
        report = examine(server.uri, connect_ms=200)
        assert finding(report, "connection").found == "no connection: no answer in time"
        assert report.exit_code == 2
        server.resume()
        server.kill()
        report = examine(server.uri)
        assert finding(report, "connection").found == "no connection: Connection refused"
        assert report.exit_code == 2


def test_tls_and_what_is_wrong_with_it() -> None:
    """With its authority it is fine; without, or without TLS, the remedy says what is missing."""
    server = cast("Tls", running("tls"))
    server.flush()
    assert examine(server.uri).exit_code == 0
    bare = server.uri.partition("?")[0]
    assert "tls_ca=" in finding(examine(bare), "connection").remedy
    assert "rediss://" in finding(examine(bare.replace("rediss", "redis")), "connection").remedy
    report = examine(f"{bare}?tls_ca=/nowhere/ca.pem")
    assert not_ok(report) == {"uri": "problem"}
    assert "cannot be read" in finding(report, "uri").found


def test_a_replica_is_no_place_for_checks() -> None:
    """Nor does the doctor take its own refused check for a fine script."""
    with Sentinels() as servers:
        (replica,) = (one for one in servers.servers if one.address != servers.primary)
        report = examine(f"redis://127.0.0.1:{replica.port}")
    assert not_ok(report)["replication"] == "problem"
    assert not_ok(report)["scripts"] == "problem"
    assert report.exit_code == 1


def test_a_server_that_refuses_writes_fails_the_scripts() -> None:
    """Its snapshots fail, which it says itself; the check that fails is the proof."""
    with Single(lines=["save 3600 1"]) as server:
        shutil.rmtree(server.folder)
        server.admin.bgsave()
        until(
            lambda: server.admin.info("persistence")["rdb_last_bgsave_status"] == "err",
            "the snapshot has failed",
            SETTLED_SECONDS_MAX,
        )
        report = examine(server.uri)
    assert not_ok(report)["persistence"] == "problem"
    assert "MISCONF" in finding(report, "scripts").found


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels() as started:
        yield started


def test_sentinels_are_asked_whether_they_could_agree(sentinels: Sentinels) -> None:
    """With all of them well there is a line that says so; with two dead there is a problem."""
    report = examine(sentinels.uri)
    assert checks(report) == [*REDIS_CHECKS[:-1], "sentinel", "round trip"]
    assert not_ok(report) == {"persistence": "warning"}
    assert "can agree on a fail-over" in finding(report, "sentinel").found
    assert "min-replicas-to-write" in finding(report, "replication").found
    for dead in sentinels.sentinels[:2]:
        dead.kill()
    until(
        lambda: ("sentinel", "problem") in not_ok(examine(sentinels.uri)).items(),
        "the third has noticed",
        SETTLED_SECONDS_MAX,
    )
    sentinels.sentinels[2].kill()
    report = examine(sentinels.uri)
    assert not_ok(report) == {"connection": "problem"}
    assert report.exit_code == 2


def test_a_cluster_is_looked_at_node_by_node() -> None:
    """The scripts run on every primary, and leave nothing on any."""
    cluster = cast("Cluster", running("cluster"))
    cluster.flush()
    report = examine(cluster.uri)
    assert checks(report) == [*REDIS_CHECKS[:-1], "cluster", "round trip"]
    assert not_ok(report) == {"persistence": "warning"}
    assert finding(report, "cluster").found == "state ok, 16,384 slots served"
    assert not any(node.admin.dbsize() for node in cluster.primaries())


def test_one_primary_of_a_cluster_may_differ() -> None:
    """Users are not copied between nodes: who may check on two of three is found out."""
    cluster = cast("Cluster", running("cluster"))
    odd = cluster.node_of(0)
    for node in cluster.nodes:
        commands = ["-hset"] if node is odd else []
        node.admin.acl_setuser(
            "app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", *commands]
        )
    try:
        report = examine(cluster.uri.replace("://", "://app:pw@"))
    finally:
        for node in cluster.nodes:
            node.admin.acl_deluser("app")
    permissions = finding(report, "permissions")
    assert (permissions.level, permissions.nodes) == ("problem", (f"127.0.0.1:{odd.port}",))


def test_a_cluster_node_is_no_single_server() -> None:
    """What is wrong is the scheme, and that is said."""
    cluster = cast("Cluster", running("cluster"))
    report = examine(f"redis://127.0.0.1:{cluster.nodes[0].port}")
    assert not_ok(report)["cluster"] == "problem"
    assert "redis+cluster://" in finding(report, "cluster").remedy
    assert report.exit_code == 1


def test_memory_has_nothing_to_connect_to() -> None:
    """It says so, and how much room there is."""
    report = examine("memory://?capacity=50000")
    assert checks(report) == ["uri", "kernel", "capacity"]
    assert (not_ok(report), report.exit_code) == ({}, 0)
    assert "nothing to connect to" in finding(report, "uri").found
    report = examine("memory://?capacity=many")
    assert (not_ok(report), report.exit_code) == ({"uri": "problem"}, 2)
    assert examine("memory://", prefix="tk").exit_code == 2


def test_without_the_kernel_memory_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler is a warning, with what to install."""
    monkeypatch.setattr(kernel, "BUILT", False)
    assert not_ok(examine("memory://")) == {"kernel": "warning"}


def test_a_shared_file_tells_its_room(tmp_path: Path) -> None:
    """How full it is, and that a full one must be made anew."""
    path = tmp_path / "api.limits"
    uri = f"shared://{path}?capacity=1"
    with Limiter("5/hour", store=uri, on_failure="closed") as limiter:
        report = examine(uri)
        assert checks(report) == ["file", "kernel", "capacity"]
        assert (not_ok(report), report.exit_code) == ({}, 0)
        limiter.check("a")
        assert finding(examine(uri), "capacity").found.startswith("1 of ")
        number = 0
        while limiter.check(f"user:{number}"):
            number += 1
        report = examine(uri)
        assert not_ok(report) == {"capacity": "warning"}
        assert f"shared://{path}?capacity=" in finding(report, "capacity").remedy


def test_a_shared_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """To look is not to open: the service's first process makes it, as its own user."""
    path = tmp_path / "api.limits"
    report = examine(f"shared://{path}")
    assert (not_ok(report), report.exit_code) == ({"file": "warning"}, 0)
    assert not path.exists()
    report = examine(f"shared://{tmp_path}/no/such/folder/api.limits")
    assert (not_ok(report), report.exit_code) == ({"file": "problem"}, 2)
    assert f"mkdir -p {tmp_path}/no/such/folder" in finding(report, "file").remedy


def test_a_file_that_is_no_table_is_left_alone(tmp_path: Path) -> None:
    """It is a problem, and its bytes are what they were."""
    path = tmp_path / "notes.txt"
    path.write_text("to do", encoding="utf-8")
    report = examine(f"shared://{path}")
    assert (not_ok(report), report.exit_code) == ({"file": "problem"}, 2)
    assert path.read_text(encoding="utf-8") == "to do"
    assert examine("shared://relative").exit_code == 2


def test_every_check_has_its_place_in_the_order() -> None:
    """No check is told of twice, and those of Redis stand as they are told."""
    assert len(set(CHECKS)) == len(CHECKS)
    assert [check for check in CHECKS if check in REDIS_CHECKS] == REDIS_CHECKS
