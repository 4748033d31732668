"""The page of `console/overview.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ratekeeper.service.console.live import status_of
from ratekeeper.service.http.activity import Step
from tests.service.console.client import ConsoleClient, console_of
from tests.service.console.test_findings import WELL
from tests.stub_fleet import store_with_fleet
from tests.stub_regions import store_with_regions


async def test_the_page_has_the_state(console: ConsoleClient) -> None:
    """Before any script runs: the store, the rules and their age, the fleet, the regions."""
    text = await console.get("")
    assert re.search(r'<h2>Store <span class="tag good">healthy</span></h2>', text)
    assert re.search(r"<strong>1</strong></a>, since <time ", text)
    assert "confirmed less than a minute ago" in text
    assert "This node alone</a>, without gossip" in text
    assert 'id="status-regions"' in text


async def test_a_first_check_is_explained(console: ConsoleClient) -> None:
    """With the address of the service as the browser knows it, and a token if one is needed."""
    text = await console.get("", headers={"Host": "limits.example.com:8080"})
    assert "curl http://limits.example.com:8080/v1/check -H &#39;Authorization: Bearer TOKEN" in (
        text.replace("'", "&#39;")
    )


async def test_a_fleet_and_regions_at_a_glance(tmp_path: Path) -> None:
    """What is wrong is a word, not only a colour."""
    store = store_with_fleet(store_with_regions())
    async with console_of(tmp_path, None, store=store) as console:
        text = await (await console.log_in("read")).get("")
    assert '<span class="tag warn">1 suspected</span>' in text
    assert "3 live nodes" in text
    assert 'Region eu <span class="tag bad">not connected to all</span>' in text
    assert "1 link up</a>, 1 down, 0 refused" in text


async def test_trouble_is_named(console: ConsoleClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its card, and among the findings: a breaker that is open, degraded checks."""
    step = Step(1_000.0, 2.0, {"allowed": 3}, degraded=1, breakers={"10.0.0.7:6379": 2})
    monkeypatch.setattr(console.context.activity, "steps", lambda: [step])
    text = await console.get("")
    assert 'Breaker of 10.0.0.7:6379 <span class="tag bad">open</span>' in text
    assert "<h2>2 findings</h2>" in text
    assert "The store did not decide 33.3% of the checks of the last minute alone." in text
    assert "docs/runbooks.md, RatekeeperBreakerOpen" in text


async def test_texts_of_others_are_text(console: ConsoleClient) -> None:
    """An error of the store may have any characters."""
    await console.get("/audit")
    found = (await console.http.get("/console")).text
    assert "<script>alert" not in found
    now = {
        **WELL,
        "store": {"name": "<script>", "healthy": False, "error": "<script>alert(1)</script>"},
        "breakers": [{"server": "<em>", "state": "open"}],
        "clock_offsets": {"<tt>": 1.5},
        "rules": {
            "version": "<b>",
            "source": "<i>",
            "since": None,
            "age_seconds": 7_300,
            "origin": "snapshot",
            "error": "<u>",
            "push_error": "<s>",
        },
    }
    html = status_of(console.service._console.state.console, now)
    for tag in ("<script", "<b>", "<i>", "<u>", "<s>", "<em>", "<tt>"):
        assert tag not in html
    assert "confirmed 2 hours ago" in html
    assert "snapshot of an earlier run" in html
