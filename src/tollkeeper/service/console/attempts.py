"""The page Try a request: which rules match a request, and why."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from tollkeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/try", show)]


async def show(page: Page) -> Response:
    """Show the page."""
    return page.render("attempts.html")
