"""The command line is built once for all tests: typer builds all commands anew for each call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import typer.main


@pytest.fixture(autouse=True, scope="session")
def built_once() -> Iterator[None]:
    """Let typer's runner keep the commands that it builds, which takes 30 ms of the processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(typer.main.get_command))
        yield
