"""The seam to what an operator sees of a fleet."""

from __future__ import annotations

import pytest

from ratekeeper import Limiter
from ratekeeper.decide.fleet_monitor import FleetMonitor, GossipCounts, ReportCounts
from tests.stub_fleet import StubFleet


def test_a_store_on_one_machine_is_no_fleet() -> None:
    """Then nothing is reported of nodes."""
    assert Limiter("2/minute").fleet is None


def test_counts_start_empty_and_share_nothing() -> None:
    """Two sets of counts never have the same histogram."""
    one, other = ReportCounts(), ReportCounts()
    one.flush_seconds.note(1)
    assert not any(other.flush_seconds.data())
    assert not any(GossipCounts().hint_seconds)


@pytest.mark.parametrize("name", [name for name in vars(FleetMonitor) if not name.startswith("_")])
def test_the_stub_has_the_whole_seam(name: str) -> None:
    """Tests of metrics, API and command line use it instead of a real fleet."""
    assert callable(vars(StubFleet)[name])
