"""The page Overview: the decisions of this node, live, and whether it is healthy.

The page has the state, and the live stream brings the charts: the steps of the last 15 minutes at
first, then each new one. `live.py` is the stream, and `static/overview.js` draws the charts.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from ratekeeper.service.console import live
from ratekeeper.service.console.findings import findings
from ratekeeper.service.console.views import Page, view


def routes() -> list[BaseRoute]:
    """Return the routes of the page and of its stream."""
    return [view("", show), *live.routes()]


async def show(page: Page) -> Response:
    """Show the page."""
    found = await page.api.get("/activity")
    return page.render(
        "overview.html",
        now=found["now"],
        findings=findings(found["now"]),
        service=f"{page.request.url.scheme}://{page.request.url.netloc}",
        has_tokens=not page.console.context.tokens.open_permissions,
    )
