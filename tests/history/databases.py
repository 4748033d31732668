"""Databases with records, and rows to write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import text

from ratekeeper.control.database import Database
from ratekeeper.history.events import DecisionEvent
from ratekeeper.history.sink import Sink

SECONDS_MAX = 20.0
_PAUSE_SECONDS = 0.01

# A subject, a rule, a minute and the counts.
UsageCounts = tuple[str, str, int, list[int]]


def event(at_us: int, **other: Any) -> DecisionEvent:
    """Return the row of a denial, with other values for some columns."""
    usual = DecisionEvent(
        *(at_us, "eu-1", "orders", "user:42", "/orders", "POST", "denied"),
        *("limited", 1, 2_500, 0, "[]"),
    )
    return usual._replace(**other)


async def rows(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows that a query finds."""
    database = Database(url)
    try:
        async with database.reading() as connection:
            return [tuple(row) for row in await connection.execute(text(statement))]
    finally:
        await database.close()


async def filled(
    url: str, events: Sequence[DecisionEvent] = (), usage: Sequence[UsageCounts] = ()
) -> None:
    """Write these records."""
    sink = Sink(Database(url))
    sink.offer(events)
    for subject, rule, minute, counts in usage:
        sink.usage.add((subject, rule, minute), counts)
    try:
        await sink.finish()
    finally:
        await sink.close()


async def until_async(condition: Callable[[], Any], what: str) -> Any:
    """Wait until `condition` returns something true, and return that; the event loop runs on."""
    deadline_s = time.monotonic() + SECONDS_MAX
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"waited {SECONDS_MAX:g} s for this: {what}"
        await asyncio.sleep(_PAUSE_SECONDS)
    return found
