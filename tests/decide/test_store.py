"""The statistics of a store."""

from __future__ import annotations

import pytest

from tollkeeper.decide.store import StoreStats


@pytest.mark.parametrize(("states", "fullness"), [(0, 0.0), (1, 0.25), (4, 1.0)])
def test_fullness_is_a_fraction(states: int, fullness: float) -> None:
    """From 0.0 (empty) to 1.0 (full)."""
    stats = StoreStats(states=states, states_max=4, bytes=0, expired=0, refused=0)
    assert stats.fullness == fullness


@pytest.mark.parametrize(("used", "room", "fullness"), [(0, 0, 0.0), (0, 64, 0.0), (48, 64, 0.75)])
def test_log_fullness_is_a_fraction(used: int, room: int, fullness: float) -> None:
    """It is 0.0 for a store without separate memory for logs."""
    stats = StoreStats(0, 4, 0, 0, 0, log_bytes=used, log_bytes_max=room)
    assert stats.log_fullness == fullness
