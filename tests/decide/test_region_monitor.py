"""The seam to what an operator sees of regions."""

from __future__ import annotations

from tollkeeper.decide.region_monitor import PeerCounts, RegionStatus


def test_counts_start_empty_and_share_nothing() -> None:
    """Two sets of counts never have the same histogram."""
    one, other = PeerCounts(), PeerCounts()
    one.seconds[0] += 1
    assert not any(other.seconds)


def test_a_region_that_could_not_be_read_claims_nothing() -> None:
    """Its status has a name and a problem, and no leader, age or share."""
    status = RegionStatus("us", problem="no answer within 2 s")
    assert (status.leader, status.age_s, status.share, status.links) == ("", None, 0, ())
