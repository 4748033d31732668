"""Recorded decisions of a real limiter, for replays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from tollkeeper import Limiter, Request
from tollkeeper.history.events import SubjectMode, caller_of, event_of, identity_of
from tollkeeper.history.reading import DecisionRow
from tollkeeper.history.replay import Replay, ReplayReport
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import read
from tollkeeper.rules.entry_table import EntryTable
from tollkeeper.testing import ManualClock

START_S = 1_800_000_000


class Asked(NamedTuple):
    """A request, and the seconds after the start at which it was made."""

    at_s: float
    request: Request
    cost: int = 1


def decided(
    rules: str | Document,
    asked: Iterable[Asked],
    *,
    mode: SubjectMode = "plain",
    entries: EntryTable | None = None,
) -> list[DecisionRow]:
    """Return the rows of requests that a real limiter decided, at these times."""
    clock = ManualClock(START_S)
    rows: list[DecisionRow] = []
    with Limiter.from_rules(read(rules) if isinstance(rules, str) else rules, clock=clock) as real:
        engine = real._engine
        assert engine is not None
        if entries is not None:
            engine.use_entries(entries)
        for number, (at_s, request, cost) in enumerate(asked):
            clock.advance_ns(START_S * 10**9 + round(at_s * 10**6) * 1_000 - clock.now_ns())
            result = engine.evaluate(request, cost)
            noted: Any = (
                clock.now_ns(),
                result,
                cost,
                "" if result.counted else caller_of(request),
                request.endpoint,
                request.method,
                identity_of(request),
                f"req-{number}",
            )
            event = event_of(noted, "eu-1", mode)
            rows.append(
                DecisionRow(number, event, json.loads(event.shadow_denied), json.loads(event.rules))
            )
    return rows


def replayed(rows: list[DecisionRow], in_force: str, draft: str, **more: Any) -> ReplayReport:
    """Return the report of a whole replay."""
    replay = Replay(rows, read(in_force), read(draft), **more)
    for _ in replay.steps():
        pass
    return replay.report()
