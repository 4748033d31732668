"""The pages of the runbooks of the alerts, which the admin API returns.

A runbook is Markdown. `parsed` reads the few forms that runbooks use: paragraphs, lists, code,
emphasis and links. Everything else is text, and the template escapes it: no HTML passes through.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from starlette.responses import Response
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import segment
from ratekeeper.service.console.views import Page, view

_ITEM: Final = re.compile(r"(?:\d{1,3}\.|[-*]) +(.*)")
_SPAN: Final = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<em>[^*\s][^*]*)\*"
    r"|\[(?P<label>[^\]]+)\]\((?P<target>[^)\s]+)\)|(?P<alert>\bRatekeeper[A-Z]\w+)"
)


class Span(NamedTuple):
    """A part of a line."""

    kind: str
    """`text`, `code`, `strong`, `em` or `alert`, which is the name of another alert."""
    text: str


class Block(NamedTuple):
    """A paragraph, or a list."""

    kind: str
    """`p`, `ol`, `ul` or `pre`."""
    items: list[list[Span]]
    """A paragraph has one; a list has one for each entry."""


def routes() -> list[BaseRoute]:
    """Return the routes of the pages."""
    return [view("/runbooks", show_all), view("/runbooks/{alert}", show)]


async def show_all(page: Page) -> Response:
    """Show the active alerts, and the runbooks of all."""
    return page.render("runbooks.html", alerts=await page.api.get("/alerts"))


async def show(page: Page) -> Response:
    """Show one runbook."""
    found = await page.api.get(f"/runbooks/{segment(page.request.path_params['alert'])}")
    alerts = await page.api.get("/alerts")
    active = [each for each in alerts["active"] if each["alert"] == found["alert"]]
    return page.render(
        "runbook.html", runbook=found, blocks=parsed(found["text"]), alerts=active, listed_max=10
    )


def parsed(text: str) -> list[Block]:
    """Return the blocks of a Markdown text.

    >>> for block in parsed("*Slow.* See `a < b`.\\n\\n1. First\\n   and more.\\n2. Second."):
    ...     print(block.kind, [[tuple(span) for span in item] for item in block.items])
    p [[('em', 'Slow.'), ('text', ' See '), ('code', 'a < b'), ('text', '.')]]
    ol [[('text', 'First and more.')], [('text', 'Second.')]]
    """
    blocks = []
    parts = re.split(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    for place, part in enumerate(parts):
        if place % 2:
            blocks.append(Block("pre", [[Span("text", part.rstrip("\n"))]]))
        else:
            blocks += _blocks(part)
    return blocks


def _blocks(text: str) -> list[Block]:
    """Return the blocks of a text without code blocks."""
    found: list[tuple[str, list[str]]] = []
    is_new = True
    for line in (each.strip() for each in text.splitlines()):
        item = _ITEM.fullmatch(line)
        kind = "p" if item is None else "ol" if line[0].isdigit() else "ul"
        if not line:
            is_new = True
        elif item is not None and found and found[-1][0] == kind:
            found[-1][1].append(item[1])
        elif item is not None or is_new or not found:
            found.append((kind, [line if item is None else item[1]]))
        else:
            found[-1][1][-1] += f" {line}"
        is_new = is_new and not line
    return [Block(kind, [spans(each) for each in items]) for kind, items in found]


def spans(text: str) -> list[Span]:
    """Return the parts of a line. A link to a page of the documentation is its name.

    >>> [tuple(each) for each in spans("See [regions](regions.md#x), <b>.")]
    [('text', 'See '), ('text', 'regions (docs/regions.md)'), ('text', ', <b>.')]
    """
    found, end = [], 0
    for match in _SPAN.finditer(text):
        if match.start() > end:
            found.append(Span("text", text[end : match.start()]))
        end = match.end()
        kind = match.lastgroup or "text"
        if kind == "target":
            page = match["target"].partition("#")[0]
            label = match["label"]
            shown = f"docs/{page}" if label == page else f"{label} (docs/{page})"
            found.append(Span("text", shown))
        elif kind in {"em", "strong"}:
            parts = enumerate(match[kind].split("`"))
            found += [Span("code" if i % 2 else kind, part) for i, part in parts if part]
        else:
            found.append(Span(kind, match[kind]))
    if end < len(text):
        found.append(Span("text", text[end:]))
    return found
