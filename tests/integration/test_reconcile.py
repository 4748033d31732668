"""`ratekeeper reconcile` on a real Redis: the tests create defects, and it finds and repairs them.

Healthy states are compared before and after, byte by byte: none of them may change.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from ratekeeper import Limit, Limiter
from ratekeeper.cli import reconcile as reconciling
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.decide.leasing import LeaseCheck, LeaseTerms
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.audit import (
    PAGE_KEYS,
    AuditedServer,
    audit,
    remove,
    set_expiry,
)
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.topology import Topology
from tests.answering import AnsweringStore
from tests.integration.reconciling import document, found, patient, reconciled, spend, wrong
from tests.integration.redis_wires import key_of
from tests.redis_servers import Single, User, running
from tests.service_process import run_to_end

ALGORITHMS: tuple[Any, ...] = (
    *("token_bucket", "leaky_bucket", "fixed_window"),
    *("sliding_window_counter", "sliding_window_log"),
)
SECONDS_MAX = 30.0


@pytest.fixture
def single() -> Iterator[Single]:
    """Return the shared server, empty."""
    server = running("single")
    assert isinstance(server, Single)
    server.flush()
    yield server
    server.flush()


def dumped(server: Single) -> dict[str, Any]:
    """Return every key with its bytes, and whether it expires."""
    keys = sorted(server.admin.keys("*"))
    return {key: (server.admin.dump(key), server.admin.pttl(key) > 0) for key in keys}


# ------------------------------------------------------------------------------------ healthy


def test_healthy_states_have_no_defect(single: Single) -> None:
    """All algorithms, long rules, long logs, grants, refunds and resets; all are counted."""
    for algorithm in ALGORITHMS:
        limits = [
            Limit(60, per=60, algorithm=algorithm),
            Limit(3_000, per=3_600, algorithm=algorithm),
        ]
        for rule in ("short", f"a-rule-whose-name-is-a-digest-{algorithm}"):
            with Limiter(limits, store=patient(single.uri), name=rule) as limiter:
                for number in range(10):
                    limiter.check(f"user:{number}", cost=40)
                    limiter.check(f"user:{number}", cost=40)
                    limiter.refund(f"user:{number}", 5)
                    if number % 2:
                        limiter.grant(f"user:{number}", 7, ttl=100_000)
                    if number % 3 == 0:
                        limiter.reset(f"user:{number}")
    many = [Limit(1_000 + number, per=60 + number) for number in range(12)]
    with Limiter(many, store=patient(single.uri), name="many") as limiter:
        limiter.check("user:1")
    logs = [Limit(4_000, per=per, algorithm="sliding_window_log") for per in (50, 60, 70)]
    with Limiter(logs, store=patient(single.uri), name="logs") as limiter:
        limiter.check("user:2", cost=4_000)
        counted = limiter.stats()
    report = reconciled(single.uri, document=document("100/hour"))
    assert wrong(report) == {}
    assert report.exit_code == 0

    assert 0 < report.counted["states"] <= counted.states
    assert report.counted["keys"] == single.admin.dbsize()
    assert 0 < report.counted["bytes a state"] < 20_000


def test_leased_units_are_no_defect(single: Single) -> None:
    """Of all algorithms, also if the leased units are all that a limit has counted."""
    with closing(AnsweringStore(open_store(patient(single.uri)))) as store:
        authority = store.authority
        assert authority is not None
        for algorithm in ALGORITHMS:
            counter = store.counter([Limit(60, per=60, algorithm=algorithm)], f"of-{algorithm}")
            for number in range(4):
                terms = LeaseTerms(5, 1, 10**9)
                for _ in range(1 + number % 3):
                    authority.lease([LeaseCheck(counter, f"user:{number}", 1, terms)])
                if number == 3:
                    counter.refund(f"user:{number}", 1, None)
        counted = store.stats()
    assert counted.states >= 3 * len(ALGORITHMS)
    report = reconciled(single.uri, document=document("100/hour"))
    assert wrong(report) == {}
    assert 0 < report.counted["states"] <= counted.states


def test_memory_per_state(single: Single) -> None:
    """It is the memory that the server reports."""
    keys = spend(single.uri, 50)
    counted = reconciled(single.uri).counted
    held = sum(single.admin.memory_usage(key) for key in keys)
    assert counted["bytes"] == held
    assert counted["bytes a state"] == held // 50


# ------------------------------------------------------------------------------------ defects

Make = Callable[[Any, bytes], object]
DEFECTS: dict[str, tuple[str, Make]] = {
    "persist": ("no expiry", lambda server, key: server.persist(key)),
    "a list": ("wrong type", lambda server, key: (server.delete(key), server.rpush(key, "1"))),
    "a text": ("wrong type", lambda server, key: server.set(key, "1", ex=900)),
    "garbage": ("unreadable", lambda server, key: server.hset(key, "orders", "{'v': 2}")),
    "cut off": ("unreadable", lambda server, key: server.hset(key, "orders", b"\x95\xcf\x00")),
    "a map": ("unreadable", lambda server, key: server.hset(key, "orders", b"\0" * 11 + b"\x81")),
    "a piece": ("unreadable", lambda server, key: server.hset(key, b"\x021:gone done", b"12")),
    "no piece": ("unreadable", lambda server, key: server.hset(key, b"\x02what is it", b"12")),
    "a tag": ("not ours", lambda server, key: server.set(b"rk:{%b}" % key, "1", ex=900)),
    "a name": ("not ours", lambda server, key: server.set(b"rk:{old}:%b" % key, "1", ex=900)),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_found_and_nothing_changes(defect: str, single: Single) -> None:
    """It is the only finding and names the key; without --repair, nothing changes."""
    kind, make = DEFECTS[defect]
    keys = spend(single.uri)
    make(single.admin, keys[7])
    before = dumped(single)
    report = reconciled(single.uri, document=document())
    assert set(wrong(report)) == {kind}
    (finding,) = found(report, kind)
    assert report.exit_code == 1
    assert keys[7].decode() in finding.where[0]
    assert finding.remedy
    assert (report.repairs, dumped(single)) == ((), before)


@pytest.mark.parametrize("repair", ["expiry", "all"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_repair(defect: str, repair: str, single: Single) -> None:
    """Both modes set expiries, one removes states; healthy states stay as they are."""
    kind, make = DEFECTS[defect]
    keys = spend(single.uri)
    spend(single.uri, rule="other")
    single.admin.set("else:{user:7}", "of another program")
    make(single.admin, keys[7])
    before = dumped(single)
    repairable = {"no expiry"} if repair == "expiry" else {"no expiry", "wrong type", "unreadable"}
    report = reconciled(single.uri, document=document(), repair=repair)
    assert [each.done for each in report.repairs] == ([True] if kind in repairable else [])
    after = dumped(single)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed == ({keys[7].decode()} if kind in repairable else set())
    again = reconciled(single.uri, document=document())
    assert wrong(again) == ({} if kind in repairable else wrong(report))
    if kind == "unreadable" and repair == "all":
        assert single.admin.hlen(keys[7]) == 2
        assert single.admin.pttl(keys[7]) > 0


def test_repaired_expiry_is_as_long_as_limits_need(single: Single) -> None:
    """By the rules or, without them, by the states themselves."""
    keys = spend(single.uri)
    lives_ms = single.admin.pttl(keys[0])
    for key in keys[:2]:
        single.admin.persist(key)
    reconciled(single.uri, repair="expiry")
    assert lives_ms - SECONDS_MAX * 1_000 < single.admin.pttl(keys[0]) <= max(lives_ms, 60_000)
    single.admin.persist(keys[1])
    reconciled(single.uri, document=document("10/day"), repair="expiry")
    assert 86_400_000 <= single.admin.pttl(keys[1]) <= 1.2 * 86_400_000


def test_unknown_expiry_needs_the_rules(single: Single) -> None:
    """An unreadable key without an expiry is not repaired without the rules."""
    key = key_of("user:1")
    single.admin.hset(key, "orders", "garbage")
    left = reconciled(single.uri, repair="expiry")
    assert [(each.done, "--rules" in each.what) for each in left.repairs] == [(False, True)]
    assert single.admin.pttl(key) == -1
    repaired = reconciled(single.uri, repair="expiry", document=document())
    assert [each.done for each in repaired.repairs] == [True]


def test_repaired_subject_is_limited_again(single: Single) -> None:
    """Its checks failed before the repair and count after it."""
    with Limiter(
        "100/hour", store=patient(single.uri), name="orders", on_failure="closed"
    ) as limiter:
        limiter.check("user:3")
        with single.client() as raw:
            [field] = raw.hkeys(key_of("user:3"))
            raw.hset(key_of("user:3"), field, "garbage")
        assert limiter.check("user:3").degraded
        reconciled(single.uri, repair="all")
        decision = limiter.check("user:3")
        assert (decision.allowed, decision.degraded, decision.remaining) == (True, False, 99)


def test_key_that_changed_since_the_scan_is_not_repaired(single: Single) -> None:
    """A key may have become healthy between the scan and the repair."""
    keys = spend(single.uri)
    values = {key: single.admin.dump(key) for key in keys}
    single.admin.hset(keys[1], "orders", "garbage")
    single.admin.persist(keys[2])
    single.admin.set(keys[3], "text")
    with_topology = Topology(parse(single.uri))
    try:
        (scanned,) = audit(with_topology, "rk", pause_seconds=0)
        for key in keys[1:4]:
            single.admin.restore(key, 100_000, values[key], replace=True)
        before = dumped(single)
        assert {defect.kind for defect in scanned.defects} >= {"unreadable", "no expiry"}
        for defect in scanned.defects:
            assert not remove(with_topology, scanned.address, defect)
            assert not set_expiry(with_topology, scanned.address, defect.key, 1)
        assert dumped(single) == before
    finally:
        with_topology.close()


def test_other_prefixes_are_ignored(single: Single) -> None:
    """Only keys with the given prefix are checked."""
    spend(single.uri)
    single.admin.hset("app:{%AAA}", "orders", "garbage")
    assert wrong(reconciled(single.uri)) == {}
    assert wrong(reconciled(single.uri, options={"prefix": "app"})).keys() == {
        "no expiry",
        "unreadable",
    }


# --------------------------------------------------------------------------------- the scan


def test_keys_are_scanned_page_by_page_with_pauses(single: Single) -> None:
    """Each key is counted once, up to --limit-keys."""
    keys = 3 * PAGE_KEYS
    pipeline = single.admin.pipeline()
    for number in range(keys):
        pipeline.set(f"rk:{{%AAA}}log:{number:016}", "a log", ex=900)
    pipeline.execute()
    pauses: list[float] = []
    topology = Topology(parse(single.uri))
    try:
        (scanned,) = audit(topology, "rk", 0, 0.25, sleep=pauses.append)
        assert (scanned.keys, scanned.states, scanned.complete) == (keys, keys, True)
        assert scanned.defects == []
        assert len(pauses) >= 2
        assert set(pauses) == {0.25}
        assert len(scanned.sample) == 200
        (some,) = audit(topology, "rk", keys_max=700, pause_seconds=0)
        assert (some.keys, some.complete) == (700, False)
    finally:
        topology.close()
    (finding,) = found(reconciled(single.uri, keys_max=700), "keys")
    assert "not all" in finding.what
    assert "--limit-keys" in finding.remedy


def test_permissions() -> None:
    """Missing permissions are named; a read-only user can check everything and change nothing."""
    needed = "+scan +type +pttl +hlen +hgetall +getrange +time +dbsize +info +memory|usage"
    mending = "+eval +pexpire +hget +hdel +del"
    users = [
        User("none", "a", "~* +ping"),
        User("some", "b", f"~rk:* {needed} +ping"),
        User("more", "c", f"~rk:* {needed} +ping {mending}"),
    ]
    with Single(users=users) as server:
        server.admin.hset(key_of("user:1"), "a", "garbage")
        with pytest.raises(StoreUnavailable, match=r"an audit needs \+scan \+type"):
            reconciled(server.uri)
        looking, changing = (server.uri.replace("none:a@", each) for each in ("some:b@", "more:c@"))
        assert wrong(reconciled(looking)).keys() == {"no expiry", "unreadable"}
        (left,) = reconciled(looking, repair="all").repairs
        assert (left.done, "repairs need +eval +pexpire" in left.what) == (False, True)
        assert any(each.done for each in reconciled(changing, repair="all").repairs)
        assert server.admin.dbsize() == 0


# ------------------------------------------------------------------------------------ the command


def test_command_prints_each_repair(single: Single) -> None:
    """As lines and as JSON; `--repair` alone is for expiries."""
    keys = spend(single.uri)
    single.admin.persist(keys[0])
    single.admin.set(keys[1], "text")
    done = run_to_end(["reconcile", "--store", single.uri, "--repair", "--pause", "0"])
    assert (done.returncode, done.stderr) == (1, "")
    repaired = [line for line in done.stdout.splitlines() if line.startswith("repaired")]
    assert len(repaired) == 1
    assert f"{keys[0].decode()} on 127.0.0.1:{single.port}: expires in " in repaired[0]
    assert single.admin.type(keys[1]) == "string"
    as_json = run_to_end(["reconcile", "--store", single.uri, "--repair=all", "--json"])
    data = json.loads(as_json.stdout)
    assert [(each["key"], each["done"]) for each in data["repairs"]] == [(keys[1].decode(), True)]
    clean = run_to_end(["reconcile", "--store", single.uri])
    assert clean.returncode == 0, clean.stdout


def test_job_prints_a_line_per_run() -> None:
    """Also while the store is unavailable; SIGTERM ends it with exit code 0."""
    with Single() as server:
        spend(server.uri)
        command = [sys.executable, "-m", "ratekeeper", "reconcile", "--store", server.uri]
        with subprocess.Popen([*command, "--every", "1s"], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                first = json.loads(process.stdout.readline())
                assert (first["exit_code"], first["counted"]["keys"]) == (0, 20)
                server.kill()
                while (line := json.loads(process.stdout.readline()))["exit_code"] == 0:
                    pass
                assert (line["exit_code"], "error" in line) == (2, True)
                process.send_signal(signal.SIGTERM)
                assert process.wait(SECONDS_MAX) == 0
            finally:
                process.kill()


def test_defects_are_counted_and_some_are_named(
    single: Single, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run repairs at most REPAIRS_MAX."""
    keys = spend(single.uri)
    for key in keys:
        single.admin.persist(key)
    monkeypatch.setattr(reconciling, "REPAIRS_MAX", 8)
    report = reconciled(single.uri, repair="expiry")
    (finding,) = found(report, "no expiry")
    assert finding.what.endswith("stay forever: 20")
    assert finding.where[-1] == "and 15 more"
    assert sum(each.done for each in report.repairs) == 8
    assert isinstance(audited(single), AuditedServer)
    assert audited(single).counts["no expiry"] == 12


def audited(server: Single) -> AuditedServer:
    topology = Topology(parse(server.uri))
    try:
        return audit(topology, "rk", pause_seconds=0)[0]
    finally:
        topology.close()
