"""The pytest plugin: two fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tollkeeper.core.clock import ManualClock
from tollkeeper.testing import limiting_off, use_clock


@pytest.fixture
def tollkeeper_clock() -> Iterator[ManualClock]:
    """A ManualClock in place of the system clock, for every limiter made without `clock=`."""
    with use_clock(ManualClock()) as clock:
        yield clock


@pytest.fixture
def tollkeeper_off() -> Iterator[None]:
    """Limiting switched off: every check is allowed and nothing is counted."""
    with limiting_off():
        yield
