"""What the overview says about the present state of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratekeeper.service.console.findings import findings

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
