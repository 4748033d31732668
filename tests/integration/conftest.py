"""Fixtures that several tests against real servers share."""

from __future__ import annotations

from itertools import count

import pytest

from tests.cli.conftest import built_once

__all__ = ["built_once", "key"]

_numbers = count()


@pytest.fixture
def key() -> str:
    """Return a key that no other test of this process uses."""
    return f"key {next(_numbers)}"
