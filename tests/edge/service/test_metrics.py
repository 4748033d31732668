"""/metrics: what all workers have counted, and never less than before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.edge.service.asking import RULES, asking
from tollkeeper.edge.service import metrics
from tollkeeper.edge.service.metrics import Counts, _encode, fold_dead


def samples(text: bytes) -> dict[str, float]:
    """By name and labels, as Prometheus reads them."""
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


# Above what Linux gives to any process.
DEAD, BROKEN = 99_999_998, 99_999_999


async def test_requests_and_checks_are_counted() -> None:
    """By route and status, by rule and outcome; routes that do not exist are one."""
    async with asking() as ask:
        for _ in range(4):
            await ask.check(user="1")
        await ask.check(tenant="t", endpoint="/trial")
        await ask.check(tenant="t", endpoint="/trial")
        for n in range(5):
            await ask("GET", f"/nowhere/{n}")
        answer = await ask("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(answer.body)
        assert found["tollkeeper_requests_total['/v1/check', '200']"] == 5
        assert found["tollkeeper_requests_total['/v1/check', '429']"] == 1
        assert found["tollkeeper_requests_total['(none)', '404']"] == 5
        assert found["tollkeeper_checks_total['allowed', 'users']"] == 3
        assert found["tollkeeper_checks_total['denied', 'users']"] == 1
        assert found["tollkeeper_checks_total['shadow_denied', 'trial']"] == 1
        assert found["tollkeeper_workers[]"] == 1
        assert "tollkeeper_start_time_seconds[]" in found


async def test_whoever_is_scraped_tells_of_all(tmp_path: Path) -> None:
    """Its own counts, its siblings', and those of workers that have died."""
    alive = os.getppid()
    (tmp_path / f"{alive}.json").write_bytes(_counts(users=10))
    (tmp_path / f"{DEAD}.json").write_bytes(_counts(users=100))
    (tmp_path / f"{BROKEN}.json").write_bytes(b"{ not finished")
    async with asking(counters=tmp_path) as ask:
        await ask.check(user="1")
        ask.service.metrics.write()
        found = samples(ask.service.metrics.text())
        assert found["tollkeeper_checks_total['allowed', 'users']"] == 111
        assert found["tollkeeper_workers[]"] == 2
        fold_dead(tmp_path)
        fold_dead(tmp_path)
        found = samples(ask.service.metrics.text())
        assert found["tollkeeper_checks_total['allowed', 'users']"] == 111
        names = {each.name for each in tmp_path.glob("*.json")}  # noqa: ASYNC240 - a test
        assert names == {f"{alive}.json", f"{os.getpid()}.json", "gone.json"}


def _counts(**allowed: int) -> bytes:
    return _encode(Counts(checks={rule: {"allowed": n} for rule, n in allowed.items()}))


async def test_a_rule_that_is_gone_does_not_take_its_counts_along() -> None:
    """A counter that went down would look like a restart."""
    async with asking() as ask:
        await ask.check(user="1")
        ask.service.metrics.counts()
        ask.node.limiter.use({**RULES, "rules": RULES["rules"][1:]})
        assert ask.service.metrics.counts().checks["users"] == {"allowed": 1}
        ask.node.limiter.use(RULES)
        await ask.check(user="1")
        assert ask.service.metrics.counts().checks["users"] == {"allowed": 2}


async def test_the_busiest_rules_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told together, so that labels have a bound."""
    monkeypatch.setattr(metrics, "RULES_MAX", 2)
    found = metrics._busiest({"a": {"allowed": 1}, "b": {"allowed": 9}, "c": {"denied": 5}})
    assert found == [("b", {"allowed": 9}), ("c", {"denied": 5}), ("(others)", {"allowed": 1})]


async def test_a_folder_that_is_gone_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The log says it."""
    async with asking(counters=Path("/nonexistent/run")) as ask:
        ask.service.metrics.write()
        assert "not written" in caplog.text
        assert (await ask("GET", "/metrics")).status == 200
