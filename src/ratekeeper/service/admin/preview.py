"""The preview of a draft of the rules: it replays the last recorded decisions.

The replay (`history/replay.py`) runs in a thread. It works in portions of PORTION_SECONDS with a
pause after each, because the worker cannot answer checks while the thread holds Python's lock. The
records are read in small pages for the same reason. A worker makes one preview at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Query, Request
from pydantic import Field

from ratekeeper.history.reading import DecisionCursor, RecordedRequest, RequestFields
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.replay import (
    Change,
    Example,
    Replay,
    ReplayOutcome,
    ReplayReport,
    sampled_weight,
)
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import read_received
from ratekeeper.service.admin.operations import (
    READ,
    ROLE,
    AdminRoute,
    Control,
    error_responses,
    text_of,
)
from ratekeeper.service.admin.problems import AdminError, ApiOutput
from ratekeeper.service.admin.records import EPOCH, IdentityOut, Subject, moment, parts_of
from ratekeeper.service.admin.rules import DOCUMENT_BODY

DECISIONS_MAX: Final = 20_000
# The requests that the decisions stand for, if only a share of them is recorded.
REQUESTS_MAX: Final = 100_000
LAST: Final = timedelta(hours=1)
# Each page takes about a millisecond of the event loop.
PAGE_ROWS: Final = 500
# After this time the reply covers the part that was replayed.
SECONDS_MAX: Final = 10.0
# Below this share, the reply says why so many recorded decisions have another outcome.
AGREEMENT_MIN: Final = 0.95
PORTION_SECONDS: Final = 0.000_5
PAUSE_SECONDS: Final = 0.000_5

_NOTHING: Final = (
    "No decision was recorded in this period; choose an earlier `from`, or preview again after "
    "some requests."
)

router = APIRouter(tags=["rules"], route_class=AdminRoute)

# ── Values ───────────────────────────────────────────────────────────────────────────────────────


class ChangeOut(ApiOutput):
    """Denied requests in both replays."""

    denied_before: int = Field(description="Under the rules in force.")
    denied_after: int = Field(description="Under the draft.")
    newly_denied: int = Field(description="Requests that only the draft denies.")
    newly_allowed: int = Field(description="Requests that only the rules in force deny.")


class RuleChangeOut(ChangeOut):
    """Requests that a rule denies in both replays."""

    rule: str = Field(description="`(deny)` is the deny list.", examples=["orders"])
    shadow_denied_before: int = Field(
        description="Requests that the rule would have denied if it were not in shadow mode."
    )
    shadow_denied_after: int


class SubjectChangeOut(ChangeOut):
    """Denied requests of a subject of the rule that denies them."""

    subject: Subject


class EndpointChangeOut(ChangeOut):
    """Denied requests of an endpoint."""

    endpoint: str


class OutcomeOut(ApiOutput):
    """The decision on a request in one of the replays."""

    allowed: bool
    rule: str | None = Field(description="The rule that denies it.")
    retry_after: float = Field(description="Seconds.")
    shadow_denied: list[str]


class ExampleOut(ApiOutput):
    """A recorded request whose decision differs."""

    time: datetime
    request_id: str | None
    subject: Subject
    identity: IdentityOut
    endpoint: str
    method: str
    cost: int
    before: OutcomeOut
    after: OutcomeOut


class NotReplayedOut(ApiOutput):
    """A rule that cannot be replayed from the records. It is left out of both replays."""

    rule: str
    reason: str
    decisions: int = Field(description="Recorded decisions that it took part in.")


class PreviewOut(ApiOutput):
    """The effect that the draft would have had."""

    from_: Annotated[datetime, Field(alias="from", description="The period that was selected.")]
    to: datetime
    first: datetime | None = Field(description="The first decision that was replayed.")
    last: datetime | None
    decisions: int = Field(description="Recorded decisions that were replayed.")
    requests: int = Field(
        description="Requests that they stand for; more than `decisions` if a share is recorded."
    )
    sample: float = Field(description="The share of the allowed requests that is recorded.")
    estimate: bool = Field(description="True if `sample` is below 1; `notes` says what it means.")
    complete: bool = Field(
        description="False if the period has more decisions, or the time was not sufficient."
    )
    agreement: float | None = Field(
        description="The share of the recorded decisions that have the same outcome in the replay "
        "of the rules in force: how far to trust the preview. Null without decisions."
    )
    recorded_denied: int = Field(description="Denials among the recorded decisions.")
    total: ChangeOut
    rules: list[RuleChangeOut] = Field(description="The largest differences first, at most 100.")
    subjects: list[SubjectChangeOut] = Field(description="The same, at most 50.")
    endpoints: list[EndpointChangeOut] = Field(description="The same, at most 20.")
    examples: list[ExampleOut] = Field(description="At most 20, of different subjects.")
    not_replayed: list[NotReplayedOut]
    notes: list[str] = Field(description="The facts that the replay cannot know, in sentences.")


# ── The operation ────────────────────────────────────────────────────────────────────────────────


@router.post(
    "/rules/preview",
    operation_id="preview_rules",
    summary="Replay decisions under a draft",
    responses=error_responses(*READ, 408, 409, 413, 415, 422, 429),
    openapi_extra={**DOCUMENT_BODY, ROLE: "read"},
)
async def preview_rules(
    request: Request,
    control: Control,
    from_: Annotated[
        str | None,
        Query(
            alias="from",
            description="From this time with its zone, or this date (UTC); by default the hour "
            "before `to`.",
            examples=["2026-11-15T00:00:00Z"],
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
    to: Annotated[
        str | None,
        Query(
            description="Before this time, or this date (UTC); by default now.",
            examples=["2026-11-16T00:00:00Z"],
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=DECISIONS_MAX, description="The newest decisions of the period.")
    ] = DECISIONS_MAX,
) -> PreviewOut:
    """Replay the last recorded decisions under the rules in force and under a draft.

    Both replays get the same requests at the same times and begin with unused limits. The reply has
    the differences between them. It applies nothing.
    """
    text = await text_of(request)
    recorder = control.context.recorder
    if recorder is None:
        raise AdminError(
            409,
            "NOT_RECORDED",
            "this service records no decisions, so there is nothing to replay; start it without "
            "--record off, or with --record URL, and preview again after some requests",
        )
    period = _period(from_, to)
    limiter = control.context.limiter
    if control.previewing.locked():
        raise AdminError(
            429,
            "PREVIEW_RUNNING",
            f"this worker is making another preview; repeat the request after at most "
            f"{SECONDS_MAX:g} s",
            {"Retry-After": "1"},
        )
    async with control.previewing:
        async with control.heavy.turn(request.state.token, text):
            draft = await asyncio.to_thread(_draft, text, limiter)
        deadline_s = time.monotonic() + SECONDS_MAX
        rows, all_read = await _read(recorder, period, limit, deadline_s)
        report, all_replayed = await asyncio.to_thread(
            _replayed, rows, draft, limiter, recorder, deadline_s
        )
    complete = all_read and all_replayed
    report.notes.extend(_other_rules(report, limiter))
    return _reply(period, report, recorder.share, complete=complete)


def _other_rules(report: ReplayReport, limiter: AsyncLimiter) -> Iterator[str]:
    """Yield the reason why many recorded decisions differ, if other rules may have made them."""
    since = limiter.rules_status().since
    if since is None or report.agreed >= AGREEMENT_MIN * report.decisions:
        return
    if _time(report.first_us) < since:
        yield (
            f"The rules in force are those of this worker since {since.isoformat()}. Other rules "
            f"may have made the decisions before; choose a later `from` to leave them out."
        )


class _Period(NamedTuple):
    from_: datetime
    to: datetime


def _period(from_: str | None, to: str | None) -> _Period:
    until = datetime.now(UTC) if to is None else moment(to, "to")
    earliest = datetime.min.replace(tzinfo=UTC)
    since = until - min(LAST, until - earliest) if from_ is None else moment(from_, "from")
    if since >= until:
        raise AdminError(
            400,
            "INVALID_TIME",
            f"from ({since.isoformat()}) is not before to ({until.isoformat()})",
        )
    return _Period(since, until)


def _draft(text: str, limiter: AsyncLimiter) -> Document:
    document = read_received(text)
    limiter.require_usable(document)
    return document


async def _read(
    recorder: Recorder, period: _Period, limit: int, deadline_s: float
) -> tuple[list[RequestFields], bool]:
    """Return the newest decisions of a period, the oldest first, and whether these are all."""
    microsecond = timedelta(microseconds=1)
    from_us, to_us = ((each - EPOCH) // microsecond for each in period)
    rows: list[RequestFields] = []
    weight = 0.0
    before = DecisionCursor(to_us, 0)
    while len(rows) < limit and weight < REQUESTS_MAX and time.monotonic() < deadline_s:
        count = min(PAGE_ROWS, limit - len(rows))
        page = await recorder.records.requests(from_us, before, count)
        found = map(RecordedRequest._make, page)
        weight += sum(sampled_weight(row, recorder.share) for row in found)
        rows += page
        if len(page) < count:
            return rows[::-1], True
        before = DecisionCursor(page[-1][0], page[-1][1])
    return rows[::-1], False


def _replayed(
    rows: list[RequestFields],
    draft: Document,
    limiter: AsyncLimiter,
    recorder: Recorder,
    deadline_s: float,
) -> tuple[ReplayReport, bool]:
    """Replay in this thread until a time; return the report, and whether all were replayed."""
    in_force = limiter.compiled_rules
    replay = Replay(
        rows,
        in_force.document,
        draft,
        entries=in_force.entries,
        share=recorder.share,
        subjects=recorder.subjects,
        on_failure=limiter.on_failure,
    )
    steps = replay.steps()
    try:
        done = in_portions(steps, deadline_s)
    finally:
        steps.close()
    return replay.report(), done


def in_portions(steps: Iterator[None], deadline_s: float) -> bool:
    """Take steps with pauses, in which other threads run; return False if there are more.

    `deadline_s` is a time of the monotonic clock.
    """
    pause_at_s = time.monotonic() + PORTION_SECONDS
    for _ in steps:
        now_s = time.monotonic()
        if now_s >= pause_at_s:
            if now_s >= deadline_s:
                return False
            time.sleep(PAUSE_SECONDS)
            pause_at_s = time.monotonic() + PORTION_SECONDS
    return True


# ── The reply ────────────────────────────────────────────────────────────────────────────────────


def _reply(period: _Period, report: ReplayReport, share: float, *, complete: bool) -> PreviewOut:
    found = report.decisions
    notes = report.notes
    if not found:
        notes = [_NOTHING, *notes]
    return PreviewOut(
        from_=period.from_,
        to=period.to,
        first=_time(report.first_us) if found else None,
        last=_time(report.last_us) if found else None,
        decisions=found,
        requests=report.requests,
        sample=share,
        estimate=share < 1,
        complete=complete,
        agreement=round(report.agreed / found, 4) if found else None,
        recorded_denied=report.recorded_denied,
        total=ChangeOut(**_counts(report.total)),
        rules=[
            RuleChangeOut(
                rule=rule,
                shadow_denied_before=each.shadow_before,
                shadow_denied_after=each.shadow_after,
                **_counts(each),
            )
            for rule, each in report.rules
        ],
        subjects=[
            SubjectChangeOut(subject=parts_of(subject), **_counts(each))
            for subject, each in report.subjects
        ],
        endpoints=[
            EndpointChangeOut(endpoint=endpoint, **_counts(each))
            for endpoint, each in report.endpoints
        ],
        examples=[_example(each) for each in report.examples],
        not_replayed=[
            NotReplayedOut(rule=each.rule, reason=each.why, decisions=each.decisions)
            for each in report.left_out
        ],
        notes=notes,
    )


def _time(at_us: int) -> datetime:
    return EPOCH + timedelta(microseconds=at_us)


def _counts(change: Change) -> dict[str, int]:
    return {
        "denied_before": change.before,
        "denied_after": change.after,
        "newly_denied": change.newly_denied,
        "newly_allowed": change.newly_allowed,
    }


def _outcome(outcome: ReplayOutcome) -> OutcomeOut:
    return OutcomeOut(
        allowed=not outcome.denied,
        rule=outcome.rule or None,
        retry_after=outcome.retry_after_ns / 1e9,
        shadow_denied=list(outcome.shadows),
    )


def _example(example: Example) -> ExampleOut:
    row, before, after = example
    return ExampleOut(
        time=_time(row.at_us),
        request_id=row.request_id or None,
        subject=parts_of(before.subject or after.subject),
        identity=IdentityOut(
            user=row.user_id or None,
            tenant=row.tenant or None,
            api_key=row.api_key or None,
            ip=row.ip or None,
        ),
        endpoint=row.endpoint,
        method=row.method,
        cost=row.cost,
        before=_outcome(before),
        after=_outcome(after),
    )
