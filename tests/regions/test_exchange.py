"""The leader of a region."""

from __future__ import annotations

from tollkeeper.decide.region_monitor import RegionMonitor
from tollkeeper.regions.exchange import RegionSync


def test_it_is_what_operators_read() -> None:
    """RegionSync has all that a RegionMonitor has."""
    names = {name for name in vars(RegionMonitor) if not name.startswith("_")}
    assert names <= set(dir(RegionSync))
