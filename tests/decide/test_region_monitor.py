"""The seam to what an operator sees of regions."""

from __future__ import annotations

import pytest

from ratekeeper import Limiter
from ratekeeper.decide.region_monitor import PeerCounts, RegionMonitor, RegionStatus
from tests.stub_regions import StubRegions


def test_counts_start_empty_and_share_nothing() -> None:
    """Two sets of counts never have the same histogram."""
    one, other = PeerCounts(), PeerCounts()
    one.seconds[0] += 1
    assert not any(other.seconds)


def test_a_region_that_could_not_be_read_claims_nothing() -> None:
    """Its status has a name and a problem, and no leader, age or share."""
    status = RegionStatus("us", problem="no answer within 2 s")
    assert (status.leader, status.age_s, status.share, status.links) == ("", None, 0, ())


def test_a_limiter_without_regions_has_none() -> None:
    """Then nothing is reported of regions."""
    assert Limiter("2/minute").regions is None


@pytest.mark.parametrize("name", [name for name in vars(RegionMonitor) if not name.startswith("_")])
def test_the_stub_has_the_whole_seam(name: str) -> None:
    """Tests of metrics, API and command line use it instead of real regions."""
    assert getattr(StubRegions(), name) is not None
