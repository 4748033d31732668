"""The page Rules: the document, a draft and what it would change, and the versions."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from tollkeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/rules", show)]


async def show(page: Page) -> Response:
    """Show the page."""
    return page.render("rules.html")
