"""The fixtures of the tests of the console."""

import pytest

from tests.service.admin.client import template
from tests.service.console.client import console
from tollkeeper.history import recorder

__all__ = ["console", "patience", "template"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the database of the records to close, however busy the machine is.

    A service that ends gives up after a second and leaves the connection to the operating system.
    """
    monkeypatch.setattr(recorder, "CLOSE_SECONDS_MAX", 60.0)
