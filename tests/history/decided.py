"""Recorded decisions of a real limiter, for replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ratekeeper import Limiter, Request
from ratekeeper.history.events import DecisionEvent, SubjectMode, caller_of, event_of, identity_of
from ratekeeper.history.reading import RecordedRequest
from ratekeeper.history.replay import Replay, ReplayReport
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.testing import ManualClock

_FIELDS = RecordedRequest._fields
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
) -> list[RecordedRequest]:
    """Return the records of requests that a real limiter decided, at these times."""
    events = decided_events(rules, asked, mode=mode, entries=entries)
    values = [{"id": number, **event._asdict()} for number, event in enumerate(events)]
    return [RecordedRequest._make([each[name] for name in _FIELDS]) for each in values]


def decided_events(
    rules: str | Document,
    asked: Iterable[Asked],
    *,
    mode: SubjectMode = "plain",
    entries: EntryTable | None = None,
) -> list[DecisionEvent]:
    """Return the same as rows to write."""
    clock = ManualClock(START_S)
    events: list[DecisionEvent] = []
    with Limiter.from_rules(read(rules) if isinstance(rules, str) else rules, clock=clock) as real:
        if entries is not None:
            real.use_entries(entries)
        for number, (at_s, request, cost) in enumerate(asked):
            clock.advance_ns(START_S * 10**9 + round(at_s * 10**6) * 1_000 - clock.now_ns())
            result = real.evaluate(request, cost)
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
            events.append(event_of(noted, "eu-1", mode))
    return events


def replayed(
    rows: Sequence[RecordedRequest], in_force: str, draft: str, **more: Any
) -> ReplayReport:
    """Return the report of a whole replay."""
    replay = Replay(rows, read(in_force), read(draft), **more)
    for _ in replay.steps():
        pass
    return replay.report()
