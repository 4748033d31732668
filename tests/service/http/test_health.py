"""/healthz, /readyz and /metrics."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.decide.decider import lost
from ratekeeper.decide.store import StoreStats
from ratekeeper.metrics.counters import FAMILIES, MetricsSnapshot
from ratekeeper.metrics.tally import RATE_SECONDS
from ratekeeper.service.http import health
from ratekeeper.service.http.context import encode
from ratekeeper.service.http.health import WorkerCounts, fold_dead
from ratekeeper.service.http.tokens import ROLES, create_token
from ratekeeper.testing import ManualClock
from tests.failing_store import PartlyFailing
from tests.redis_servers.ports import free_port
from tests.service.http.client import RULES, http_service


async def test_readiness_shows_rules_and_store() -> None:
    """The reply has the version in force, and whether the store answers."""
    async with http_service() as http:
        http.context.limiter.use({"version": 1, "rules": []}, "7")
        found = (await http("GET", "/readyz")).data
        assert found["status"] == "ready"
        assert found["node"] == "test-1"
        assert found["rules"]["version"] == "7"
        assert found["rules"]["error"] == ""
        assert found["store"] == {"healthy": True, "error": ""}
        assert found["workers"] == 1


async def test_a_probe_spends_nothing_and_is_not_cached() -> None:
    """It leaves no state in the store and no copy in a cache."""
    async with http_service() as http:
        before = http.context.limiter.stats().states
        for _ in range(3):
            answer = await http("GET", "/readyz")
        assert answer.headers["cache-control"] == "no-store"
        assert http.context.limiter.stats().states == before


async def test_a_store_that_fails_for_some_rules_is_not_healthy() -> None:
    """It answers the probe, but has not decided what clients asked for in the last ten seconds."""
    clock = ManualClock()
    store = PartlyFailing(clock, 100)
    async with http_service(store=store) as http:
        activity = http.context.activity

        async def healthy(user_checks: int, failing: str) -> bool:
            store.failing = frozenset({failing})
            activity.advance()
            for number in range(user_checks):
                await http.check(user=f"{number}")
            activity.advance()
            found = (await http("GET", "/readyz")).data["store"]
            assert ("did not decide" in found["error"]) is not found["healthy"]
            return bool(found["healthy"])

        assert await healthy(19, "orders")
        assert await healthy(2, "users")  # 2 of 21
        assert not await healthy(1, "users")  # 3 of 22
        http.clock.advance(11)
        assert (await http("GET", "/readyz")).data["store"]["healthy"]


async def test_errors_are_shown_only_with_a_token(tmp_path: Path) -> None:
    """Errors name hosts; without a token, the caller learns only that there is one."""
    path = tmp_path / "tokens.json"
    store = f"redis://127.0.0.1:{free_port()}"
    for roles in ((), ROLES):
        secrets = [create_token(path, role, role) for role in roles]
        async with http_service(path, store=store) as http:
            for secret in secrets or [""]:
                headers = {"Authorization": f"Bearer {secret}"}
                found = (await http("GET", "/readyz", b"", headers)).data["store"]
                assert not found["healthy"]
                assert "127.0.0.1" in found["error"]
            if secrets:
                answer = await http("GET", "/readyz")
                assert answer.status == 200
                assert not answer.data["store"]["healthy"]
                assert answer.data["store"]["error"]
                assert b"127.0.0.1" not in answer.body
                assert answer.data["rules"]["error"] == ""


# ── Metrics ────────────────────────────────────────────────────────────────────────────────────


def samples(text: bytes) -> dict[str, float]:
    """Return the samples by name and label values, as Prometheus reads them."""
    return {
        f"{sample.name}{[value for _, value in sorted(sample.labels.items())]}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


ALLOWED = "ratekeeper_checks_total['allowed']"
RULE = "ratekeeper_rule_decisions_total"
# Above any process ID that Linux uses.
DEAD, BROKEN = 99_999_998, 99_999_999


async def test_requests_and_checks_are_counted() -> None:
    """By route and status, by rule, outcome and source; unknown routes share one label."""
    async with http_service() as http:
        for _ in range(4):
            await http.check(user="1")
        await http.check(tenant="t", endpoint="/trial")
        await http.check(tenant="t", endpoint="/trial")
        await http.check(api_key="sk_revoked_1")
        await http.check(api_key="sk_internal_1")
        for n in range(5):
            await http("GET", f"/nowhere/{n}")
        answer = await http("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(answer.body)
        assert found["ratekeeper_requests_total['/v1/check', '200']"] == 6
        assert found["ratekeeper_requests_total['/v1/check', '429']"] == 1
        assert found["ratekeeper_requests_total['(none)', '404']"] == 5
        assert found[ALLOWED] == 3
        assert found["ratekeeper_checks_total['denied']"] == 1
        assert found["ratekeeper_checks_total['blocked']"] == 1
        assert found["ratekeeper_checks_total['exempt']"] == 1
        assert found["ratekeeper_checks_total['unlimited']"] == 2
        assert found[f"{RULE}['token_bucket', '*', 'denied', 'users', 'store']"] == 1
        assert found[f"{RULE}['token_bucket', '/trial', 'shadow_denied', 'trial', 'store']"] == 1
        assert found["ratekeeper_workers[]"] == 1
        assert found["ratekeeper_worker_starts_total[]"] == 1
        assert found["ratekeeper_store_states[]"] > 0
        assert "ratekeeper_start_time_seconds[]" in found


async def test_every_kind_of_check_is_timed() -> None:
    """A check, the checks of a batch, an atomic batch, and a gateway request."""
    async with http_service() as http:
        await http.check(user="1")
        await http("POST", "/v1/check/batch", {"checks": [{"user": "1"}, {"user": "2"}]})
        await http("POST", "/v1/check/batch", {"checks": [{"user": "1"}] * 2, "atomic": True})
        await http("GET", "/v1/authorize", headers={"X-Original-URI": "/"})
        found = samples(http.app.metrics.text())
        assert found["ratekeeper_decision_seconds_count[]"] == 5
        assert found["ratekeeper_decision_seconds_bucket['+Inf']"] == 5
        assert found["ratekeeper_decision_seconds_sum[]"] > 0


async def test_every_metric_is_reported() -> None:
    """Counters without labels are there from the first scrape: a rate starts at zero."""
    async with http_service() as http:
        text = (await http("GET", "/metrics")).body.decode()
    for family in FAMILIES:
        assert f"# HELP ratekeeper_{family.name}" in text
        if not family.labels and family.kind != "gauge":
            assert f"\nratekeeper_{family.name}" in text


async def test_lost_charges_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units of denied requests that may stay charged, by reason."""
    monkeypatch.setattr(lost, "unknown", 3)
    async with http_service() as http:
        found = samples((await http("GET", "/metrics")).body)
    assert found["ratekeeper_lost_charges_total['unknown']"] == 3
    assert "ratekeeper_lost_charges_total['return']" in found


def counts(allowed: int) -> bytes:
    counted = MetricsSnapshot()
    counted.put("checks", allowed, "allowed")
    counted.put("rules_age_seconds", 1000)
    return encode(WorkerCounts(counted))


async def test_a_scrape_reports_all_workers(tmp_path: Path) -> None:
    """Its own counters, those of other workers, and those of dead workers."""
    alive = os.getppid()
    (tmp_path / f"{alive}.json").write_bytes(counts(10))
    (tmp_path / f"{DEAD}.json").write_bytes(counts(100))
    (tmp_path / f"{BROKEN}.json").write_bytes(b"{ not finished")
    async with http_service(counters=tmp_path) as http:
        await http.check(user="1")
        http.app.metrics.write()
        found = samples(http.app.metrics.text())
        assert found[ALLOWED] == 111
        assert found["ratekeeper_workers[]"] == 2
        for _ in range(2):
            fold_dead(tmp_path)
            assert samples(http.app.metrics.text())[ALLOWED] == 111
        names = {each.name for each in tmp_path.glob("*.json")}  # noqa: ASYNC240 - a test
        assert names == {f"{alive}.json", f"{os.getpid()}.json", "gone.json"}


async def test_the_rates_of_a_subject_in_several_workers_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's requests are spread over the workers. No file and no metric has its key."""
    now_s = [0.0]
    monkeypatch.setattr("ratekeeper.metrics.counters.monotonic", lambda: now_s[0])
    async with http_service(counters=tmp_path) as http:
        metrics = http.app.metrics
        metrics.write()
        for _ in range(600):
            await http.check(user="secret-key")
        now_s[0] = RATE_SECONDS
        own = samples(metrics.text())["ratekeeper_busiest_subject_rate[]"]
        assert own == pytest.approx(20, rel=0.3)
        written = (tmp_path / f"{os.getpid()}.json").read_bytes()
        assert b"secret-key" not in written + metrics.text()
        left = health._read(tmp_path / f"{os.getpid()}.json")
        assert left is not None
        other = encode(WorkerCounts(subjects={**left.subjects, "0" * 16: 1.0}))
        (tmp_path / f"{os.getppid()}.json").write_bytes(other)
        (tmp_path / f"{DEAD}.json").write_bytes(other)
        both = samples(metrics.text())["ratekeeper_busiest_subject_rate[]"]
        assert both == pytest.approx(2 * own, rel=0.01)


async def test_a_worker_that_dies_while_it_folds_counts_nothing_twice(tmp_path: Path) -> None:
    """Counters in the file of dead workers and in the worker's file count once."""
    gone = MetricsSnapshot()
    gone.put("checks", 100, "allowed")
    (tmp_path / f"{DEAD}.json").write_bytes(counts(100))
    (tmp_path / "gone.json").write_bytes(encode(WorkerCounts(gone, folded=[DEAD])))
    async with http_service(counters=tmp_path) as http:
        assert samples(http.app.metrics.text())[ALLOWED] == 100
        fold_dead(tmp_path)
        assert samples(http.app.metrics.text())[ALLOWED] == 100
        assert not (tmp_path / f"{DEAD}.json").exists()


async def test_a_worker_that_gets_the_number_of_a_dead_one_is_counted(tmp_path: Path) -> None:
    """Also if the worker that folded the dead one was killed in the middle."""
    gone = MetricsSnapshot()
    gone.put("checks", 100, "allowed")
    (tmp_path / "gone.json").write_bytes(encode(WorkerCounts(gone, folded=[DEAD])))
    fold_dead(tmp_path)
    (tmp_path / f"{DEAD}.json").write_bytes(counts(7))
    async with http_service(counters=tmp_path) as http:
        assert samples(http.app.metrics.text())[ALLOWED] == 107
        fold_dead(tmp_path)
        assert samples(http.app.metrics.text())[ALLOWED] == 107


async def test_reported_counters_are_on_disk(tmp_path: Path) -> None:
    """A worker that is killed after a scrape loses nothing."""
    async with http_service(counters=tmp_path) as http:
        await http.check(user="1")
        await http("GET", "/metrics")
        left = health._read(tmp_path / f"{os.getpid()}.json")
        assert left is not None
        assert left.counted.values["checks"]["allowed"] == 1


async def test_gauges_of_dead_workers_are_not_reported(tmp_path: Path) -> None:
    """The age of their rules means nothing."""
    (tmp_path / f"{DEAD}.json").write_bytes(counts(1))
    async with http_service(counters=tmp_path) as http:
        text = http.app.metrics.text()
        assert b"1000" not in text


async def test_a_removed_rule_keeps_its_counters() -> None:
    """A counter that went down would look like a restart."""
    async with http_service() as http:
        await http.check(user="1")
        assert samples(http.app.metrics.text())[ALLOWED] == 1
        http.context.limiter.use({**RULES, "rules": RULES["rules"][1:]})
        assert samples(http.app.metrics.text())[ALLOWED] == 1
        http.context.limiter.use(RULES)
        await http.check(user="1")
        assert samples(http.app.metrics.text())[ALLOWED] == 2


async def test_a_slow_store_delays_a_scrape_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size of the store is read rarely, and no other request waits for it."""
    monkeypatch.setattr(health, "STATS_WAIT_SECONDS", 0.01)
    answering = threading.Event()
    calls: list[None] = []

    def stats() -> StoreStats:
        calls.append(None)
        assert answering.wait(10)
        return StoreStats(7, 10, 320, 0, 0, log_bytes=64, log_bytes_max=128)

    async with http_service() as http:
        monkeypatch.setattr(http.context.limiter, "stats", stats)
        assert b"ratekeeper_store_states 7" not in (await http("GET", "/metrics")).body
        await http("GET", "/metrics")
        answering.set()
        asked: Any = http.app.metrics._reading_stats
        if asked is not None:
            await asyncio.wait({asked})
        found = samples((await http("GET", "/metrics")).body)
        assert found["ratekeeper_store_states[]"] == 7
        assert found["ratekeeper_store_states_max[]"] == 10
        assert found["ratekeeper_store_log_bytes[]"] == 64
        assert found["ratekeeper_store_log_bytes_max[]"] == 128
        assert len(calls) == 1


async def test_the_size_of_an_unavailable_store_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scrape succeeds without it."""

    def stats() -> StoreStats:
        raise StoreUnavailable("away")

    async with http_service() as http:
        monkeypatch.setattr(http.context.limiter, "stats", stats)
        answer = await http("GET", "/metrics")
        assert answer.status == 200
        assert b"\nratekeeper_store_states " not in answer.body


async def test_a_missing_folder_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Scrapes still succeed."""
    async with http_service(counters=Path("/nonexistent/run")) as http:
        for _ in range(3):
            http.app.metrics.write()
        assert caplog.text.count("cannot be written") == 1
        assert (await http("GET", "/metrics")).status == 200


async def test_dropped_records_are_reported() -> None:
    """The recorder counts them; without a recorder there are none."""

    async with http_service() as http:
        assert http.app.metrics.snapshot().values["records_dropped"] == {"": 0}
        http.context.recorder = SimpleNamespace(dropped=lambda: 5)
        assert http.app.metrics.snapshot().values["records_dropped"] == {"": 5}


async def test_the_recent_sum_takes_the_counters_as_they_were_written(tmp_path: Path) -> None:
    """The history adds them up every two seconds: it must not read all rules again."""
    async with http_service(counters=tmp_path) as http:
        metrics = http.app.metrics
        await http.check(user="1")
        assert metrics.recent_total().values["checks"]["allowed"] == 1
        await http.check(user="1")
        assert metrics.recent_total().values["checks"]["allowed"] == 1
        assert metrics.total().values["checks"]["allowed"] == 2
        assert metrics.recent_total().values["checks"]["allowed"] == 2
        await metrics.close()
        assert metrics.recent_total().values["store_states"][""] >= 1


async def test_a_busy_machine_does_not_delay_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that waited for a processor is followed by the usual pause: charts have no gap."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    async with http_service(counters=tmp_path) as http:
        clock = itertools.count(1_000.0, 10.0)
        busy = SimpleNamespace(monotonic=lambda: next(clock), thread_time=lambda: 5.0)
        monkeypatch.setattr(health, "time", busy)
        monkeypatch.setattr(health, "asyncio", SimpleNamespace(sleep=sleep))
        with pytest.raises(asyncio.CancelledError):
            await http.app.metrics.keep_writing()
        monkeypatch.undo()
    assert pauses == [health.WRITE_SECONDS]
