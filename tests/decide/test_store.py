"""The statistics of a store, and what a store refuses."""

from __future__ import annotations

import pytest

from ratekeeper import ConfigError, Fleet, Limit, open_store
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.store import Store, StoreStats
from ratekeeper.fleet.store import FleetStore

LIMITS = (Limit(10, per=60),)


@pytest.fixture(params=["memory://", "redis://localhost:1", "a node"])
def store(request: pytest.FixtureRequest) -> Store:
    """A store that knows no regions; none of them connects to a server."""
    if request.param == "a node":
        return FleetStore(open_store("redis://localhost:1"), Fleet(), SystemClock())
    return open_store(request.param)


def test_a_store_without_regions_refuses_global_limits(store: Store) -> None:
    """The error says what is missing, with an example."""
    says = r'scope="global" does not work without regions: .*own Redis.*regions=Regions\("eu"'
    with pytest.raises(ConfigError, match=says):
        store.counter(LIMITS, "api", across="exact")


def test_a_global_limit_is_strict() -> None:
    """No node answers for a global limit itself."""
    store = FleetStore(open_store("redis://localhost:1"), Fleet(), SystemClock())
    says = r"'leased' does not work with scope=\"global\": the Redis of the region decides"
    with pytest.raises(ConfigError, match=says):
        store.counter(LIMITS, "api", "leased", "exact")


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
