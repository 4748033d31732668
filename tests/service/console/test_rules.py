"""The page of `console/rules.py`."""

from __future__ import annotations

from tests.service.console.client import ConsoleClient


async def test_the_page_is_shown(console: ConsoleClient) -> None:
    """It answers an operator."""
    assert "<h1>" in await console.get("/rules")
