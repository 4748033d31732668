"""The statistics of a store."""

from __future__ import annotations

import pytest

from tollkeeper.decide.store import StoreStats


@pytest.mark.parametrize(("states", "fullness"), [(0, 0.0), (1, 0.25), (4, 1.0)])
def test_fullness_is_a_fraction(states: int, fullness: float) -> None:
    """From 0.0 (empty) to 1.0 (full)."""
    stats = StoreStats(states=states, states_max=4, bytes=0, expired=0, refused=0)
    assert stats.fullness == fullness
