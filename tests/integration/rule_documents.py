"""Documents and edits for the tests of the repository.

The processes that tests start import this module, so it imports neither pytest nor the servers.
"""

from __future__ import annotations

from dataclasses import replace

from ratekeeper.control import edits
from ratekeeper.control.repository import Repository, Version
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import read


def document(limits: str = "10/second", more: str = "") -> Document:
    """Return a safe document with tiers."""
    return read(f"""
        version: 1
        tiers: {{free: 5/second, pro: 50/second}}
        rules: [{{id: orders, by: user, limits: {limits}}}]
        {more}
    """)


UNSAFE = read("{version: 1, rules: [{id: orders, by: user, limits: 10/second}], deny: ['user:*']}")


async def assign(repository: Repository, subject: str, tier: str, *, author: str) -> Version:
    """Make a version by an edit of the document that puts a subject in a tier."""

    def assigned(document: Document) -> Document:
        return replace(document, assign={**document.assign, subject: tier})

    return await repository.edit(assigned, kind="assign", author=author)


async def set_tier(
    repository: Repository, name: str, limits: tuple[Limit, ...], *, author: str
) -> Version:
    """Make a version by an edit of the document that gives a tier these limits."""
    return await repository.edit(
        lambda document: edits.set_tier(document, name, limits), kind="set-tier", author=author
    )
