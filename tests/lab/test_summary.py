"""The results of a run, as numbers and as plots."""

from __future__ import annotations

from dataclasses import replace

from ratekeeper.lab.fleet import SimulatedFleet, simulate
from ratekeeper.lab.summary import chart_of, rows_of, summary_of, svg_of
from tests.lab.test_fleet import PLAN


def test_the_numbers_add_up() -> None:
    """Every request is admitted, denied or failed, and the table has them."""
    summary = summary_of(simulate(replace(PLAN, consistency="strict")))
    assert summary.requests == summary.admitted + summary.denied + summary.failed
    assert (summary.calls_per_request, summary.in_node_share) == (1.0, 0.0)
    assert summary.problems == ()
    rows = dict(rows_of(summary))
    assert rows["requests"] == f"{summary.requests:,}"


def test_the_chart_has_a_column_for_each_second() -> None:
    """Long runs are summed up, so that a line fits a terminal."""
    assert all(len(line) == 11 + 10 for line in chart_of(simulate(PLAN))[:8])
    long = chart_of(simulate(replace(PLAN, seconds=200, traffic=PLAN.traffic[:1])))
    assert max(map(len, long)) <= 11 + 90
    assert "a column is 3 s" in long[-1]


def test_a_fleet_without_traffic_can_be_shown() -> None:
    """Nothing is divided by zero."""
    idle = simulate(replace(PLAN, traffic=()))
    assert summary_of(idle).in_node_share == 0.0
    assert chart_of(idle)
    assert chart_of(SimulatedFleet(PLAN))
    assert "polyline" in svg_of(SimulatedFleet(PLAN))
