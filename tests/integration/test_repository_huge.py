"""10,000 rules are applied, loaded and edited in seconds, without blocking the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import from_data, read
from ratekeeper.rules.document.writing import to_yaml
from tests.integration.rule_databases import repository, url
from tests.integration.rule_documents import assign

__all__ = ["repository", "url"]  # fixtures, found by name

RULES = 10_000
# Each takes a fifth of this. Processor time does not depend on the load of the machine.
APPLY_CPU_SECONDS_MAX = 60.0
LOAD_CPU_SECONDS_MAX = 5.0


@pytest.fixture(scope="module")
def huge() -> Document:
    """Return a document with the maximum of rules, each with tiers and two limits."""
    rules = [
        {
            "id": f"rule-{number}",
            "match": {"endpoint": f"/v1/endpoint-{number}/*", "method": ["POST"]},
            "by": ["api_key"],
            "limits": ["10/second", "100/minute burst 50"],
            "tiers": {"pro": ["50/second"]},
        }
        for number in range(RULES)
    ]
    tiers = {"free": ["100/minute"], "pro": ["1000/minute"]}
    return from_data({"version": 1, "tiers": tiers, "rules": rules})


async def longest_wait(work: asyncio.Task[object]) -> float:
    """Return the longest time that the event loop was blocked during this task."""
    longest = 0.0
    while not work.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
    return longest


async def test_a_huge_document_is_applied_loaded_and_edited(
    repository: Repository, huge: Document
) -> None:
    """It is read unchanged, an edit has a diff of a few lines, and reading the number is quick."""
    began, began_cpu = time.monotonic(), time.process_time()
    work: asyncio.Task[object] = asyncio.create_task(
        repository.apply(huge, author="ann", expected=0)
    )
    # PyYAML writes the text in one C call that holds the GIL; all other steps release it.
    longest = await longest_wait(work)
    await work
    assert time.process_time() - began_cpu < APPLY_CPU_SECONDS_MAX
    assert longest < (time.monotonic() - began) / 2
    began_cpu = time.process_time()
    current = await repository.current()
    assert time.process_time() - began_cpu < LOAD_CPU_SECONDS_MAX
    assert current is not None
    if repository._database.is_postgresql:  # the rest does not depend on the database
        assert current.text == await asyncio.to_thread(to_yaml, huge)
        return
    assert await asyncio.to_thread(read, current.text) == huge
    await assign(repository, "user:42", "pro", author="ann")
    (entry,) = (await repository.audit_log.page(limit=1)).items
    assert len(entry.diff.splitlines()) < 10
