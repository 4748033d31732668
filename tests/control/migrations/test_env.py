"""The module that Alembic runs: outside of a migration, importing it changes nothing."""

from __future__ import annotations

import importlib

from ratekeeper.control.migrations import env


def test_importing_it_runs_no_migration() -> None:
    """There is no connection, so a migration would raise."""
    assert importlib.reload(env).migrate is not None
