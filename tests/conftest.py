"""Settings for the whole suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_servers import running
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.testing import ManualClock

# The plugin that runs pytest inside pytest, for the tests of our own fixtures.
pytest_plugins = ["pytester"]

# No property may fail because the machine was busy: a deadline is a timing assertion.
settings.register_profile(
    "tollkeeper", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("tollkeeper")


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves when it is told to."""
    return ManualClock(start=1_800_000_000)


@pytest.fixture(params=["memory", "shared", "redis"])
def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Iterator[Store]:
    """Each kind of store, empty, that decides by `clock`."""
    uri = "memory://"
    options: dict[str, object] = {}
    if request.param == "shared":
        uri = f"shared://{tmp_path}/api.limits"
    if request.param == "redis":
        server = running("single")
        server.flush()
        # A machine that tests may pause for longer than a production's deadline.
        uri, options = server.uri, {"deadline_ms": 10_000}
    opened = open_store(uri, clock, **options)
    yield opened
    opened.close()
