"""The results of a run, as numbers and as a table."""

from __future__ import annotations

from dataclasses import replace

from tests.simulator.fleet import simulate
from tests.simulator.summary import rows_of, summary_of
from tests.simulator.test_fleet import PLAN


def test_the_numbers_add_up() -> None:
    """Every request is admitted, denied or failed, and the table has them."""
    summary = summary_of(simulate(replace(PLAN, consistency="strict")))
    assert summary.requests == summary.admitted + summary.denied + summary.failed
    assert (summary.calls_per_request, summary.in_node_share) == (1.0, 0.0)
    assert summary.problems == ()
    rows = dict(rows_of(summary))
    assert rows["requests"] == f"{summary.requests:,}"


def test_a_fleet_without_traffic_can_be_shown() -> None:
    """Nothing is divided by zero."""
    assert summary_of(simulate(replace(PLAN, traffic=()))).in_node_share == 0.0
