"""/metrics: what all workers have counted, and never less than before."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.http.asking import RULES, asking
from tollkeeper.core.errors import StoreUnavailable
from tollkeeper.decide.store import StoreStats
from tollkeeper.metrics.counters import FAMILIES, Snapshot
from tollkeeper.service.http import metrics
from tollkeeper.service.http.metrics import Left, _encode, fold_dead
from tollkeeper.service.http.node import Node


def samples(text: bytes) -> dict[str, float]:
    """By name and labels' values, in the order of the labels' names, as Prometheus reads them."""
    return {
        f"{sample.name}{[value for _, value in sorted(sample.labels.items())]}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


ALLOWED = "tollkeeper_checks_total['allowed', 'users', 'store']"
# Above what Linux gives to any process.
DEAD, BROKEN = 99_999_998, 99_999_999


async def test_requests_and_checks_are_counted() -> None:
    """By route and status, by rule, outcome and source; routes that do not exist are one."""
    async with asking() as ask:
        for _ in range(4):
            await ask.check(user="1")
        await ask.check(tenant="t", endpoint="/trial")
        await ask.check(tenant="t", endpoint="/trial")
        await ask.check(api_key="sk_revoked_1")
        await ask.check(api_key="sk_internal_1")
        for n in range(5):
            await ask("GET", f"/nowhere/{n}")
        answer = await ask("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(answer.body)
        assert found["tollkeeper_requests_total['/v1/check', '200']"] == 6
        assert found["tollkeeper_requests_total['/v1/check', '429']"] == 1
        assert found["tollkeeper_requests_total['(none)', '404']"] == 5
        assert found[ALLOWED] == 3
        assert found["tollkeeper_checks_total['denied', 'users', 'store']"] == 1
        assert found["tollkeeper_checks_total['shadow_denied', 'trial', 'store']"] == 1
        assert found["tollkeeper_checks_total['blocked', '(none)', 'none']"] == 1
        assert found["tollkeeper_checks_total['exempt', '(none)', 'none']"] == 1
        assert found["tollkeeper_checks_total['unlimited', '(none)', 'none']"] == 2
        assert found["tollkeeper_workers[]"] == 1
        assert found["tollkeeper_worker_starts_total[]"] == 1
        assert found["tollkeeper_store_states[]"] > 0
        assert "tollkeeper_start_time_seconds[]" in found


async def test_every_way_to_check_is_timed() -> None:
    """A check, those of a batch, a batch that is one, and what a gateway asks."""
    async with asking() as ask:
        await ask.check(user="1")
        await ask("POST", "/v1/check/batch", {"checks": [{"user": "1"}, {"user": "2"}]})
        await ask("POST", "/v1/check/batch", {"checks": [{"user": "1"}] * 2, "atomic": True})
        await ask("GET", "/v1/authorize", headers={"X-Original-URI": "/"})
        found = samples(ask.service.metrics.text())
        assert found["tollkeeper_decision_seconds_count[]"] == 5
        assert found["tollkeeper_decision_seconds_bucket['+Inf']"] == 5
        assert found["tollkeeper_decision_seconds_sum[]"] > 0


async def test_every_family_is_told() -> None:
    """Those without labels from the first scrape on: a rate needs a zero to begin with."""
    async with asking() as ask:
        text = (await ask("GET", "/metrics")).body.decode()
    for family in FAMILIES:
        assert f"# HELP tollkeeper_{family.name}" in text
        if not family.labels and family.kind != "gauge":
            assert f"\ntollkeeper_{family.name}" in text


def _left(**allowed: int) -> bytes:
    counted = Snapshot()
    for rule, count in allowed.items():
        counted.put("checks", count, rule, "allowed", "store")
    counted.put("rules_age_seconds", 1000)
    return _encode(Left(counted))


async def test_whoever_is_scraped_tells_of_all(tmp_path: Path) -> None:
    """Its own counts, its siblings', and those of workers that have died."""
    alive = os.getppid()
    (tmp_path / f"{alive}.json").write_bytes(_left(users=10))
    (tmp_path / f"{DEAD}.json").write_bytes(_left(users=100))
    (tmp_path / f"{BROKEN}.json").write_bytes(b"{ not finished")
    async with asking(counters=tmp_path) as ask:
        await ask.check(user="1")
        ask.service.metrics.write()
        found = samples(ask.service.metrics.text())
        assert found[ALLOWED] == 111
        assert found["tollkeeper_workers[]"] == 2
        for _ in range(2):
            fold_dead(tmp_path)
            assert samples(ask.service.metrics.text())[ALLOWED] == 111
        names = {each.name for each in tmp_path.glob("*.json")}  # noqa: ASYNC240 - a test
        assert names == {f"{alive}.json", f"{os.getpid()}.json", "gone.json"}


async def test_a_worker_that_dies_while_it_folds_counts_nothing_twice(tmp_path: Path) -> None:
    """What is in the file of the gone, and still in its own, is one."""
    gone = Snapshot()
    gone.put("checks", 100, "users", "allowed", "store")
    (tmp_path / f"{DEAD}.json").write_bytes(_left(users=100))
    (tmp_path / "gone.json").write_bytes(_encode(Left(gone, folded=[DEAD])))
    async with asking(counters=tmp_path) as ask:
        assert samples(ask.service.metrics.text())[ALLOWED] == 100
        fold_dead(tmp_path)
        assert samples(ask.service.metrics.text())[ALLOWED] == 100
        assert not (tmp_path / f"{DEAD}.json").exists()


async def test_a_worker_that_gets_the_number_of_a_dead_one_is_counted(tmp_path: Path) -> None:
    """Also where whoever folded the dead one died in the middle of it."""
    gone = Snapshot()
    gone.put("checks", 100, "users", "allowed", "store")
    (tmp_path / "gone.json").write_bytes(_encode(Left(gone, folded=[DEAD])))
    fold_dead(tmp_path)
    (tmp_path / f"{DEAD}.json").write_bytes(_left(users=7))
    async with asking(counters=tmp_path) as ask:
        assert samples(ask.service.metrics.text())[ALLOWED] == 107
        fold_dead(tmp_path)
        assert samples(ask.service.metrics.text())[ALLOWED] == 107


async def test_what_was_told_is_on_file(tmp_path: Path) -> None:
    """A worker that is killed after a scrape takes nothing along."""
    async with asking(counters=tmp_path) as ask:
        await ask.check(user="1")
        await ask("GET", "/metrics")
        left = metrics._read(tmp_path / f"{os.getpid()}.json")
        assert left is not None
        assert list(left.counted.values["checks"].values()) == [1]


async def test_of_dead_workers_no_gauge_is_told(tmp_path: Path) -> None:
    """Their rules are old, and of no interest."""
    (tmp_path / f"{DEAD}.json").write_bytes(_left(users=1))
    async with asking(counters=tmp_path) as ask:
        text = ask.service.metrics.text()
        assert b"1000" not in text


async def test_a_rule_that_is_gone_does_not_take_its_counts_along() -> None:
    """A counter that went down would look like a restart."""
    async with asking() as ask:
        await ask.check(user="1")
        assert samples(ask.service.metrics.text())[ALLOWED] == 1
        ask.node.limiter.use({**RULES, "rules": RULES["rules"][1:]})
        assert samples(ask.service.metrics.text())[ALLOWED] == 1
        ask.node.limiter.use(RULES)
        await ask.check(user="1")
        assert samples(ask.service.metrics.text())[ALLOWED] == 2


async def test_the_store_is_asked_seldom_and_never_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that takes its time holds up one scrape, for a moment, and no other request."""
    monkeypatch.setattr(metrics, "STATS_WAIT_SECONDS", 0.01)
    answering = threading.Event()
    calls: list[None] = []

    def stats() -> StoreStats:
        calls.append(None)
        assert answering.wait(10)
        return StoreStats(7, 10, 320, 0, 0)

    async with asking() as ask:
        monkeypatch.setattr(ask.node.limiter, "stats", stats)
        assert b"tollkeeper_store_states 7" not in (await ask("GET", "/metrics")).body
        await ask("GET", "/metrics")
        answering.set()
        asked: Any = ask.service.metrics._asking
        if asked is not None:
            await asyncio.wait({asked})
        found = samples((await ask("GET", "/metrics")).body)
        assert found["tollkeeper_store_states[]"] == 7
        assert found["tollkeeper_store_states_max[]"] == 10
        assert len(calls) == 1


async def test_a_store_that_is_away_holds_nothing_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the scrape goes on."""

    def stats() -> StoreStats:
        raise StoreUnavailable("away")

    async with asking() as ask:
        monkeypatch.setattr(ask.node.limiter, "stats", stats)
        answer = await ask("GET", "/metrics")
        assert answer.status == 200
        assert b"\ntollkeeper_store_states " not in answer.body


async def test_a_folder_that_is_gone_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The log says it, once."""
    async with asking(counters=Path("/nonexistent/run")) as ask:
        for _ in range(3):
            ask.service.metrics.write()
        assert caplog.text.count("not written") == 1
        assert (await ask("GET", "/metrics")).status == 200


async def test_what_records_had_no_room_for_is_told() -> None:
    """By whoever keeps records, if anybody does."""

    async with asking() as ask:
        assert metrics._dropped(ask.node) == 0
    assert metrics._dropped(cast("Node", SimpleNamespace(recorder=SimpleNamespace(dropped=5)))) == 5
