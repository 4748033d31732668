"""The page Subjects: the quotas of a user, key, tenant or address, and changes of them."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from tollkeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/subjects", show)]


async def show(page: Page) -> Response:
    """Show the page."""
    return page.render("subjects.html")
