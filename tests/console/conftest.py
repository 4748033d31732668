"""A service, a browser and an operator for the tests of the console."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.console.operators import PHONE, ConsoleService, Operator, chromium


@pytest.fixture(scope="module")
def service() -> Iterator[ConsoleService]:
    """Run one service for the tests of a module; a module may define its own."""
    with ConsoleService() as running:
        yield running


# Not for the whole run: the event loop of Playwright would be in the way of asynchronous tests.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Run one browser for the tests of this folder. Each window has its own cookies and cache."""
    with chromium() as running:
        yield running


@pytest.fixture
def operator(browser: Browser, service: ConsoleService) -> Iterator[Operator]:
    """Return a new window."""
    found = Operator(browser, service)
    yield found
    found.close()


@pytest.fixture
def phone(browser: Browser, service: ConsoleService) -> Iterator[Operator]:
    """Return a new window of the width of a phone, with dark colours."""
    found = Operator(browser, service, viewport=PHONE, color_scheme="dark")
    yield found
    found.close()
