"""`ratekeeper doctor` on real servers: every check and remedy, and no password."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from ratekeeper import Limit, Limiter
from ratekeeper.cli.doctor import (
    CHECKS,
    SCRIPT_COMMANDS,
    DoctorReport,
    examine,
    examine_gossip,
    examine_grpc,
)
from ratekeeper.cli.main import app
from ratekeeper.decide import kernel
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.findings import HealthFinding
from tests.redis_servers import Cluster, Sentinels, Single, Tls, User, running, until

SETTLED_SECONDS_MAX = 20.0
REDIS_CHECKS = [
    *("uri", "connection", "authentication", "version", "permissions", "scripts", "persistence"),
    *("eviction", "memory", "clock", "replication", "round trip"),
]


def checks(report: DoctorReport) -> list[str]:
    return list(dict.fromkeys(finding.check for finding in report.findings))


def finding(report: DoctorReport, check: str) -> HealthFinding:
    (found,) = (each for each in report.findings if each.check == check)
    return found


def not_ok(report: DoctorReport) -> dict[str, str]:
    return {each.check: each.level for each in report.findings if each.level != "ok"}


def keys_left(server: Single) -> list[str]:
    return cast("list[str]", server.admin.keys("*"))


def test_one_server() -> None:
    """All checks are printed in order; two are warnings; nothing is left behind."""
    server = cast("Single", running("single"))
    server.flush()
    report = examine(server.uri)
    assert checks(report) == REDIS_CHECKS
    assert not_ok(report) == {"persistence": "warning", "replication": "warning"}
    assert (report.exit_code, report.usable) == (0, True)
    version = server.admin.info("server")["redis_version"]
    assert finding(report, "version").found == f"Redis {version}"
    assert finding(report, "uri").found == f"{server.uri}, prefix rk, deadline 50 ms"
    assert keys_left(server) == []


def test_findings_that_are_not_ok_have_a_remedy() -> None:
    """Findings that are ok have none."""
    with Single(lines=["maxmemory-policy allkeys-lru"]) as server:
        report = examine(server.uri)
    assert {each.level for each in report.findings} == {"ok", "warning", "problem"}
    for each in report.findings:
        assert bool(each.remedy) == (each.level != "ok"), each


def test_aof_is_ok() -> None:
    """The line says how much a crash loses."""
    with Single(aof=True) as server:
        report = examine(server.uri)
        assert finding(report, "persistence") == HealthFinding(
            "persistence",
            "ok",
            "AOF is on, appendfsync always: a crash loses nothing that was answered",
        )
        server.admin.config_set("appendfsync", "everysec")
        assert "up to two seconds" in finding(examine(server.uri), "persistence").found


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random"])
def test_policy_that_evicts_limited_keys_is_a_problem(policy: str) -> None:
    """The command reports a problem, and its exit code is 1."""
    server = cast("Single", running("single"))
    server.admin.config_set("maxmemory-policy", policy)
    try:
        report = examine(server.uri)
    finally:
        server.admin.config_set("maxmemory-policy", "noeviction")
    assert finding(report, "eviction").level == "problem"
    assert finding(report, "eviction").remedy == "CONFIG SET maxmemory-policy noeviction"
    assert report.exit_code == 1


def test_volatile_ttl_is_ok() -> None:
    """It evicts states that are about to expire anyway."""
    with Single(lines=["maxmemory 100mb", "maxmemory-policy volatile-ttl"]) as server:
        report = examine(server.uri)
    assert finding(report, "eviction").level == "ok"
    assert "expire soonest" in finding(report, "eviction").found
    assert re.fullmatch(r"\d+% of 100.0 MiB used", finding(report, "memory").found)


def test_user_without_admin_permissions() -> None:
    """Each check that is not possible is a warning, not an exception and not ok."""
    user = User("app", "s3cret", "~rk:* +@all -info -config")
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
        "~rk:* +@all -evalsha -eval",
        *(f"~rk:* +@all -{name}" for name in SCRIPT_COMMANDS),
    ],
)
def test_missing_permissions_are_named(rules: str) -> None:
    """Each permission that a check needs is found missing, and the remedy works."""
    with Single(password="root", users=[User("app", "pw", rules)]) as server:
        report = examine(server.uri)
        problem = next(each for each in report.findings if each.level == "problem")
        assert problem.check == "permissions"
        assert problem.remedy == f"ACL SETUSER app ~rk:* {NEEDED}"
        assert (report.exit_code, "scripts" in checks(report)) == (1, False)
        server.admin.execute_command(*problem.remedy.split())
        assert "problem" not in not_ok(examine(server.uri)).values()


def test_script_commands_are_those_of_the_scripts() -> None:
    """A command that is added to a script must be added to the remedy."""
    folder = files("ratekeeper.decide.stores.redis").joinpath("lua")
    # Not those of global limits, of cells and of requests in flight, whose slots are sorted sets:
    # most users need no permission for them.
    others = {"count.lua", "cell.lua", "README.md"}
    texts = [
        path.read_text()
        for path in folder.iterdir()
        if path.name not in others and not path.name.startswith("regional")
    ]
    called = {name.lower() for text in texts for name in re.findall(r"call\('([A-Y][A-Z]+)'", text)}
    assert called == set(SCRIPT_COMMANDS)


def test_what_grpc_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On grpcio the service is slow: the remedy says what to install."""
    assert [each.level for each in examine_grpc()] == ["ok"]
    monkeypatch.setattr("ratekeeper.service.grpc.server.BUILT", False)
    [found] = examine_grpc()
    assert (found.level, "libnghttp2-dev" in found.remedy) == ("warning", True)
    monkeypatch.setattr("ratekeeper.cli.doctor.find_spec", lambda _: None)
    assert examine_grpc() == []


@pytest.mark.parametrize("who", [":s3cret@", "app:s3cret@", ""])
def test_wrong_login(who: str) -> None:
    """Exit code 2, without the password."""
    with Single(password="root") as server:
        report = examine(f"redis://{who}127.0.0.1:{server.port}")
    assert not_ok(report) == {"authentication": "problem"}
    assert report.exit_code == 2
    assert "s3cret" not in str(report)


def test_password_in_the_uri_is_never_repeated() -> None:
    """No error message about a URI contains its password."""
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


def test_unreachable_and_silent_servers() -> None:
    """Both are exit code 2, within seconds."""
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


def test_tls() -> None:
    """With the CA it is ok; without it, or without TLS, the remedy says what is missing."""
    server = cast("Tls", running("tls"))
    server.flush()
    assert examine(server.uri).exit_code == 0
    bare = server.uri.partition("?")[0]
    assert "tls_ca=" in finding(examine(bare), "connection").remedy
    assert "rediss://" in finding(examine(bare.replace("rediss", "redis")), "connection").remedy
    report = examine(f"{bare}?tls_ca=/nowhere/ca.pem")
    assert not_ok(report) == {"uri": "problem"}
    assert "cannot be read" in finding(report, "uri").found


def test_replica_is_a_problem() -> None:
    """A rejected check is not reported as a working script."""
    with Sentinels() as servers:
        (replica,) = (one for one in servers.servers if one.address != servers.primary)
        report = examine(f"redis://127.0.0.1:{replica.port}")
    assert not_ok(report)["replication"] == "problem"
    assert not_ok(report)["scripts"] == "problem"
    assert report.exit_code == 1


def test_server_that_rejects_writes() -> None:
    """The check fails, and the finding has the error of the server."""
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


def test_sentinel_quorum(sentinels: Sentinels) -> None:
    """It is ok with all Sentinels, and a problem with two of them dead."""
    report = examine(sentinels.uri)
    assert checks(report) == [*REDIS_CHECKS[:-1], "sentinel", "round trip"]
    assert not_ok(report) == {"persistence": "warning"}
    assert "can agree on a fail-over" in finding(report, "sentinel").found
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


def test_cluster() -> None:
    """The scripts run on every primary and leave nothing behind."""
    cluster = cast("Cluster", running("cluster"))
    cluster.flush()
    report = examine(cluster.uri)
    assert checks(report) == [*REDIS_CHECKS[:-1], "cluster", "round trip"]
    assert not_ok(report) == {"persistence": "warning"}
    assert finding(report, "cluster").found == "state ok, 16,384 slots served"
    assert not any(node.admin.dbsize() for node in cluster.primaries())


def test_permissions_of_each_cluster_node() -> None:
    """Users are not copied between nodes; a missing permission on one is found."""
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


def test_cluster_with_the_wrong_scheme() -> None:
    """The remedy has the right one."""
    cluster = cast("Cluster", running("cluster"))
    report = examine(f"redis://127.0.0.1:{cluster.nodes[0].port}")
    assert not_ok(report)["cluster"] == "problem"
    assert "redis+cluster://" in finding(report, "cluster").remedy
    assert report.exit_code == 1


def test_memory_store() -> None:
    """There is nothing to connect to; the capacity is printed."""
    report = examine("memory://?capacity=50000")
    assert checks(report) == ["uri", "kernel", "capacity"]
    assert (not_ok(report), report.exit_code) == ({}, 0)
    assert "nothing to connect to" in finding(report, "uri").found
    report = examine("memory://?capacity=many")
    assert (not_ok(report), report.exit_code) == ({"uri": "problem"}, 2)
    assert examine("memory://", prefix="rk").exit_code == 2


def test_missing_kernel_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy says what to install."""
    monkeypatch.setattr(kernel, "BUILT", False)
    assert not_ok(examine("memory://")) == {"kernel": "warning"}


def test_shared_file(tmp_path: Path) -> None:
    """The finding has the occupancy; the remedy for a full file is a larger one."""
    path = tmp_path / "api.limits"
    uri = f"shared://{path}?capacity=1"
    with Limiter("5/hour", store=uri, on_failure="closed") as limiter:
        report = examine(uri)
        assert checks(report) == ["file", "kernel", "capacity", "logs"]
        assert (not_ok(report), report.exit_code) == ({}, 0)
        limiter.check("a")
        assert finding(examine(uri), "capacity").found.startswith("1 of ")
        number = 0
        while limiter.check(f"user:{number}"):
            number += 1
        report = examine(uri)
        assert not_ok(report) == {"capacity": "warning"}
        assert f"shared://{path}?capacity=" in finding(report, "capacity").remedy


def test_shared_file_without_room_for_logs(tmp_path: Path) -> None:
    """The finding is about the logs and not about the capacity, of which enough is left."""
    path = tmp_path / "api.limits"
    uri = f"shared://{path}?log_bytes=4096"
    log = Limit(5, per=3600, algorithm="sliding_window_log")
    with Limiter(log, store=uri, on_failure="closed") as limiter:
        while not limiter.check(f"user:{limiter.stats().states}").degraded:
            pass
        report = examine(uri)
        assert not_ok(report) == {"logs": "warning"}
        assert finding(report, "logs").found.startswith("3,328 of 4,096 bytes")
        assert f"shared://{path}?log_bytes=8192" in finding(report, "logs").remedy


def test_shared_file_with_too_many_limits_of_one_name(tmp_path: Path) -> None:
    """The finding is not about the capacity, and the remedy is another name."""
    uri = f"shared://{tmp_path}/api.limits?capacity=10000"
    with closing(open_store(uri)) as store:
        for seconds in range(1, 2_000):
            Limiter(Limit(5, per=seconds), store=store).check("ann", 5)
        crowded = store.stats().crowded
        assert crowded
    report = examine(uri)
    assert not_ok(report) == {"capacity": "warning"}
    assert f"; {crowded:,} of keys with too many limits of" in finding(report, "capacity").found
    assert "different names" in finding(report, "capacity").remedy


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (lambda intact: b"\0" * 4_096 + intact[4_096:], "had a damaged header"),
        (lambda intact: intact[:-1_000], "bytes instead of"),
        (lambda intact: intact[:-16] + b"\0" * 16, "truncated and extended again"),
        (lambda intact: b"", "is empty"),
        (lambda intact: b"RK-MAKE\0" + intact[8:], "the process that created it was killed"),
    ],
    ids=["header", "short", "extended", "empty", "unfinished"],
)
def test_damaged_shared_file_is_not_changed(
    content: Callable[[bytes], bytes], found: str, tmp_path: Path
) -> None:
    """The damage is a problem; the bytes, the time and the folder stay as they are."""
    path = tmp_path / "api.limits"
    with Limiter("5/hour", store=f"shared://{path}?capacity=100") as limiter:
        limiter.check("ann")
    path.write_bytes(content(path.read_bytes()))
    os.utime(path, ns=(1, 1))
    before = path.stat(), path.read_bytes()
    report = examine(f"shared://{path}")
    assert (not_ok(report), report.exit_code) == ({"file": "problem"}, 1)
    assert found in finding(report, "file").found
    assert "replaces it by a new one" in finding(report, "file").remedy
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, path.read_bytes()) == (before[0].st_ino, 1, before[1])
    assert list(tmp_path.iterdir()) == [path]


def test_intact_shared_file_is_not_changed(tmp_path: Path) -> None:
    """Also after a reboot, when the next process that opens it would give it a new clock."""
    path = tmp_path / "api.limits"
    with Limiter("5/hour", store=f"shared://{path}?capacity=100") as limiter:
        limiter.check("ann")
    content = path.read_bytes()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    content = content.replace(boot_id, b"00000000-0000-0000-0000-000000000000")
    path.write_bytes(content)
    report = examine(f"shared://{path}")
    assert (not_ok(report), report.exit_code) == ({}, 0)
    assert finding(report, "capacity").found == "1 of 100 states"
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_missing_shared_file_is_not_created(tmp_path: Path) -> None:
    """The service creates it, with its own user as the owner."""
    path = tmp_path / "api.limits"
    report = examine(f"shared://{path}")
    assert (not_ok(report), report.exit_code) == ({"file": "warning"}, 0)
    assert not path.exists()
    report = examine(f"shared://{tmp_path}/no/such/folder/api.limits")
    assert (not_ok(report), report.exit_code) == ({"file": "problem"}, 2)
    assert f"mkdir -p {tmp_path}/no/such/folder" in finding(report, "file").remedy


def test_other_file_is_not_changed(tmp_path: Path) -> None:
    """It is a problem, and its bytes stay the same."""
    path = tmp_path / "notes.txt"
    path.write_text("to do", encoding="utf-8")
    report = examine(f"shared://{path}")
    assert (not_ok(report), report.exit_code) == ({"file": "problem"}, 2)
    assert path.read_text(encoding="utf-8") == "to do"
    assert examine("shared://relative").exit_code == 2


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """No process writes into it. The file is a problem, at once."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    report = examine(f"shared://{tmp_path}/pipe")
    assert (not_ok(report), report.exit_code) == ({"file": "problem"}, 2)


def test_order_of_checks() -> None:
    """Each check occurs once, in the order of the output."""
    assert len(set(CHECKS)) == len(CHECKS)
    assert [check for check in CHECKS if check in REDIS_CHECKS] == REDIS_CHECKS


def gossip_found(**given: str | None) -> dict[str, tuple[str, str]]:
    """Return the level and the words of each finding about gossip, by check."""
    options: dict[str, str | None] = {"gossip": None, "gossip_key": None, "peers": None, **given}
    found = examine_gossip("redis://h", options["gossip"], options["gossip_key"], options["peers"])
    assert [each.check for each in found] == [each for each in CHECKS if each in _by_check(found)]
    assert all(each.remedy for each in found if each.level != "ok")
    return _by_check(found)


def _by_check(found: tuple[HealthFinding, ...]) -> dict[str, tuple[str, str]]:
    return {each.check: (each.level, each.found) for each in found}


def test_gossip_of_this_machine(tmp_path: Path) -> None:
    """The address can be bound, the key file is private, and the peers can be resolved."""
    key = tmp_path / "gossip.key"
    key.write_text("0f" * 32 + "\n" + "1e" * 32 + "\n")
    key.chmod(0o600)
    peers = "localhost:7946,127.0.0.1:7947"
    found = gossip_found(gossip="127.0.0.1:0", gossip_key=str(key), peers=peers)
    assert {check: level for check, (level, _) in found.items()} == {
        "gossip": "ok",
        "gossip key": "ok",
        "peers": "ok",
    }
    assert "all 2 are accepted" in found["gossip key"][1]
    assert found["peers"][1].startswith("2 given, ")
    assert gossip_found(gossip="127.0.0.1:0")["peers"] == (
        "ok",
        "nodes find each other through the store",
    )


def test_gossip_that_cannot_work(tmp_path: Path) -> None:
    """Each problem has its remedy. A port in use is one only if another program has it."""
    key = tmp_path / "gossip.key"
    key.write_text("0f" * 32)
    key.chmod(0o644)
    assert gossip_found(peers="a:1")["gossip"][0] == "problem"
    assert gossip_found(gossip="10.0.0.5:7946")["gossip"][0] == "problem"
    found = gossip_found(
        gossip="198.51.100.7:7946", gossip_key=str(key), peers="dns:no.such.invalid:7946"
    )
    assert {check: level for check, (level, _) in found.items()} == {
        "gossip": "problem",
        "gossip key": "problem",
        "peers": "problem",
    }
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert gossip_found(gossip=address)["gossip"][0] == "warning"


def test_the_command_prints_findings_about_gossip() -> None:
    """They decide the exit code, as those about the store do."""
    ran = CliRunner().invoke(app, ["doctor", "--store", "memory://", "--gossip", "127.0.0.1:0"])
    assert ran.exit_code == 1
    assert "--gossip is for machines that share a store" in ran.output
