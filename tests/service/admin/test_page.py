"""The page at /docs: it shows all operations and loads nothing."""

from __future__ import annotations

import re
from base64 import b64decode
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

from tests.service.admin.client import Admin, admin, template
from tollkeeper.service.admin import page

__all__ = ["admin", "template"]  # fixtures, found by name


class Seen(HTMLParser):
    """The tags of a page, and their references."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a tag and its references."""
        self.tags.add(tag)
        self.references += [str(value) for name, value in attrs if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that this is the tag that was opened last."""
        assert self.open.pop() == tag


async def test_the_page_shows_every_operation_and_loads_nothing(admin: Admin) -> None:
    """No script, no image, no style sheet: one link, to the OpenAPI document."""
    document: dict[str, Any] = (await admin.client.get("/openapi.json")).json()
    text = (await admin.client.get("/docs")).text
    seen = Seen()
    seen.feed(text)
    assert not seen.open
    assert seen.references == ["/openapi.json"]
    assert not seen.tags & {"script", "link", "img", "iframe", "object", "form"}
    for _, path, operation in page.operations(document):
        assert f"<code>{path}</code>" in text
        assert operation["summary"] in text.replace("&#x27;", "'")


async def test_the_policy_allows_the_style_of_the_page(admin: Admin) -> None:
    """By its hash."""
    text = (await admin.client.get("/docs")).text
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)
    allowed = re.search("'sha256-([^']*)'", page.POLICY)
    assert style
    assert allowed
    assert sha256(style[1].encode()).digest() == b64decode(allowed[1])


def test_descriptions_are_escaped() -> None:
    """No description becomes markup."""
    operation = {
        "tags": ["x"],
        "summary": "<script>",
        "description": "a & b",
        "parameters": [{"name": "<b>", "in": "query", "description": "<i>"}],
        "responses": {"200": {"description": "<u>"}},
    }
    document = {
        "info": {"title": "<t>", "version": "1"},
        "tags": [{"name": "x"}],
        "paths": {"/<p>": {"get": operation}},
    }
    seen = Seen()
    seen.feed(page.of(document))
    assert not seen.tags & {"script", "i", "u", "t", "p>"}
