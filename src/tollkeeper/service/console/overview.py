"""The page Overview: what this node decides now, and whether it is healthy."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from tollkeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("", show)]


async def show(page: Page) -> Response:
    """Show the page."""
    return page.render("overview.html")
