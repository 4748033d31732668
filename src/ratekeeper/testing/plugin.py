"""The pytest plugin: three fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratekeeper.core.clock import ManualClock
from ratekeeper.testing import forget_counts, limiting_off, use_clock


@pytest.fixture
def ratekeeper_fresh() -> Iterator[None]:
    """Forget the counts of every `memory://` store, before the test and after it."""
    forget_counts()
    yield
    forget_counts()


@pytest.fixture
def ratekeeper_clock(ratekeeper_fresh: None) -> Iterator[ManualClock]:  # noqa: ARG001 - a fixture
    """Replace the system clock by a ManualClock, with fresh counts in every `memory://` store.

    It applies to every limiter created without `clock=`.
    """
    with use_clock(ManualClock()) as clock:
        yield clock


@pytest.fixture
def ratekeeper_off() -> Iterator[None]:
    """Turn limiting off: every check is allowed, and nothing is counted."""
    with limiting_off():
        yield
