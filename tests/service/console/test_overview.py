"""The page of `console/overview.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.service.console.findings import findings
from ratekeeper.service.console.live import status_of
from ratekeeper.service.http.activity import Step
from tests.service.console.client import ConsoleClient, console_of
from tests.stub_fleet import store_with_fleet
from tests.stub_regions import store_with_regions

RUNBOOKS = Path(__file__).parents[3] / "docs/runbooks.md"
# The state of a node without findings.
WELL: dict[str, Any] = {
    "store": {"name": "redis://cache", "healthy": True, "error": ""},
    "breakers": [{"server": "10.0.0.7:6379", "state": "closed"}],
    "degraded_share": 0.0,
    "dropped_records": 0,
    "ended_workers": 0,
    "clock_offsets": {},
    "states_share": 0.8,
    "logs_share": 0.7,
    "rules": {"version": "1", "error": "", "age_seconds": 60.0},
    "fleet": {"dead": 1, "suspected": 0, "gossip": False, "live_nodes": 1},
    "workers": 1,
    "software": "0",
    "started_at": "2026-01-01T00:00:00Z",
    "regions": None,
}


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


@pytest.mark.parametrize(
    ("change", "about", "text"),
    [
        ({"store": {"healthy": False, "error": "gone"}}, "store", "does not decide: gone"),
        (
            {"breakers": [{"server": f"h{n}", "state": "half_open"} for n in range(5)]},
            "breakers",
            "not closed: h0, h1, h2 and 2 more.",
        ),
        ({"degraded_share": 0.001}, "degraded checks", "did not decide 0.1% of the checks"),
        ({"clock_offsets": {"h1": -0.7}}, "clocks", "this node: h1 by -0.7 s."),
        ({"states_share": 0.81, "logs_share": 0.9}, "full store", "81% of its states and 90% of"),
        ({"rules": {"error": "line 3", "age_seconds": 1.0}}, "rules", "out of date: line 3"),
        ({"rules": {"error": "", "age_seconds": 61.0}}, "rules", "not answered for 61 s"),
        ({"dropped_records": 3_000}, "records", "3,000 records of decisions were dropped"),
        ({"ended_workers": 2}, "workers", "2 workers ended in the last minute"),
    ],
)
def test_each_finding(change: dict[str, Any], about: str, text: str) -> None:
    """Each has a sentence and a section of the runbooks; a healthy node has none."""
    assert findings(WELL) == []
    assert findings(WELL | {"rules": {"error": "", "age_seconds": None}}) == []
    (found,) = findings(WELL | change)
    assert found.about == about
    assert text in found.text
    assert f"## {found.runbook}\n" in RUNBOOKS.read_text(encoding="utf-8")


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
