"""A manual clock, and a store that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, factory, open_store

__all__ = ["clock", "factory", "open_store", "store"]


@pytest.fixture
def clock() -> SteppedClock:
    """A clock at a time that begins a window of every length in the suite."""
    return SteppedClock(start=1_700_000_000)


@pytest.fixture
def store(open_store: OpenStore, clock: SteppedClock) -> Iterator[LocalStore]:
    """An empty store with plenty of room."""
    with open_store(clock) as opened:
        yield opened
