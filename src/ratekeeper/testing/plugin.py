"""The pytest plugin: two fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratekeeper.core.clock import ManualClock
from ratekeeper.testing import limiting_off, use_clock


@pytest.fixture
def ratekeeper_clock() -> Iterator[ManualClock]:
    """Replace the system clock by a ManualClock, for every limiter created without `clock=`."""
    with use_clock(ManualClock()) as clock:
        yield clock


@pytest.fixture
def ratekeeper_off() -> Iterator[None]:
    """Turn limiting off: every check is allowed, and nothing is counted."""
    with limiting_off():
        yield
