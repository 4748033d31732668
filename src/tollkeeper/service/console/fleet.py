"""The page Fleet and regions: the nodes, their leases, and the links between regions."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from tollkeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/fleet", show)]


async def show(page: Page) -> Response:
    """Show the page."""
    return page.render("fleet.html")
