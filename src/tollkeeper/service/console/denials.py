"""The page Denials and usage: who is denied most, and who uses what."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from tollkeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/denials", show)]


async def show(page: Page) -> Response:
    """Show the page."""
    return page.render("denials.html")
