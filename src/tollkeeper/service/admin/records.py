"""What was recorded, over HTTP: usage, decisions, who asks most, and penalties.

Nothing here is on anybody's path. A `read` token sees everything; one that is confined to a scope
sees the subjects that have all of its parts, and can be given to the customer whom it is about.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from tollkeeper.core.subjects import SEPARATOR
from tollkeeper.history.events import SubjectMode, recorded_subject
from tollkeeper.history.live import COUNTERS_MAX, SECONDS_COUNTED, ActivePenalty
from tollkeeper.history.reading import (
    DecisionCursor,
    DecisionRow,
    RecordFilter,
    Records,
    UsageRow,
    UsageStep,
)
from tollkeeper.history.recorder import Recorder
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.service.admin.answering import READ, paged, refusals
from tollkeeper.service.admin.asking import PlaneOf
from tollkeeper.service.admin.record_asking import (
    CSV,
    EPOCH,
    AskedFor,
    Outcome,
    OwnRoute,
    RecorderOf,
    ViewerOf,
    cursor_of,
    link_on,
    row_of,
    wants_csv,
    within,
)
from tollkeeper.service.admin.record_models import (
    DecisionLogOut,
    DecisionLogPage,
    PenaltiesOut,
    PenaltyOut,
    TalkerOut,
    TopOut,
    UsageOut,
    UsagePage,
)

USAGE_ROWS: Final = 1_000
USAGE_ROWS_MAX: Final = 10_000
DECISIONS: Final = 100
DECISIONS_MAX: Final = 1_000
TOP: Final = 20
CURSOR_LENGTH_MAX: Final = 4_000
# Of the store, about penalties, so that it answers each in time.
_ASKED_TOGETHER: Final = 100

_COLUMNS: Final = ("start", "seconds", "subject", "rule", "allowed", "denied", "units")

router = APIRouter(tags=["records"], route_class=OwnRoute)


def _time(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def _parts(subject: str) -> list[str]:
    return subject.split(SEPARATOR) if subject else []


# ---------------------------------------------------------------------------------------- usage


@router.get(
    "/usage",
    operation_id="list_usage",
    summary="Who used how much",
    response_model=UsagePage,
    responses={
        **paged(404),
        200: {
            **paged()[200],
            "content": {
                CSV: {"schema": {"type": "string"}, "example": ",".join(_COLUMNS) + "\r\n"}
            },
        },
    },
)
async def list_usage(
    request: Request,
    response: Response,
    recorder: RecorderOf,
    asked: AskedFor,
    step: Annotated[
        UsageStep, Query(description="By minute for a day, by hour after that.")
    ] = "hour",
    limit: Annotated[int, Query(ge=1, le=USAGE_ROWS_MAX, description="Of JSON.")] = USAGE_ROWS,
    after: Annotated[
        str | None,
        Query(description="`next` of the page before.", max_length=CURSOR_LENGTH_MAX),
    ] = None,
    format: Annotated[  # noqa: A002 - what it is called in the query
        Literal["json", "csv"] | None, Query(description="Without it, what `Accept` says.")
    ] = None,
) -> Any:
    """Requests that passed and that were denied, and units spent, by subject, rule and time.

    As CSV all of it is sent, however long it is.
    """
    records = recorder.records
    if format == "csv" or (format is None and wants_csv(request.headers.get("accept", ""))):
        return await _csv(records, asked.wanted, step)
    rows = await records.usage(asked.wanted, step, limit + 1, row_of(after))
    following = cursor_of(rows[limit - 1]) if len(rows) > limit else None
    if following is not None:
        link_on(request, response, "/usage", asked, after=following)
    items = [
        UsageOut(
            start=_time(row.start_s),
            seconds=row.step_s,
            subject=_parts(row.subject),
            rule=row.rule,
            allowed=row.allowed,
            denied=row.denied,
            units=row.units,
        )
        for row in rows[:limit]
    ]
    return UsagePage(items=items, from_=asked.from_, to=asked.to, next=following)


async def _csv(records: Records, wanted: RecordFilter, step: UsageStep) -> Response:
    pages = records.all_usage(wanted, step)
    # The first page is read before anything is sent: what goes wrong is then still an answer.
    nothing: list[UsageRow] = []
    first = await anext(pages, nothing)

    async def text() -> AsyncIterator[str]:
        yield _lines([_COLUMNS])
        yield _lines(map(_cells, first))
        async for page in pages:
            yield _lines(map(_cells, page))
            await asyncio.sleep(0)  # others are answered in between

    headers = {"Content-Disposition": 'attachment; filename="usage.csv"', "Vary": "Accept"}
    return StreamingResponse(text(), media_type=CSV, headers=headers)


def _cells(row: UsageRow) -> tuple[Any, ...]:
    start = _time(row.start_s).isoformat().replace("+00:00", "Z")
    subject = ", ".join(_parts(row.subject))
    return (start, row.step_s, subject, row.rule, row.allowed, row.denied, row.units)


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


# ------------------------------------------------------------------------------------ decisions


@router.get(
    "/decisions",
    operation_id="list_decisions",
    summary="Who was denied, when and why",
    responses=paged(404),
)
async def list_decisions(
    request: Request,
    response: Response,
    recorder: RecorderOf,
    asked: AskedFor,
    outcome: Outcome = None,
    limit: Annotated[int, Query(ge=1, le=DECISIONS_MAX)] = DECISIONS,
    before: Annotated[
        str | None,
        Query(description="`next` of the page before.", pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$"),
    ] = None,
) -> DecisionLogPage:
    """Every denial, and a sample of what was allowed; the newest first."""
    wanted = replace(asked.wanted, outcome=outcome)
    cursor = None if before is None else DecisionCursor(*map(int, before.split(".")))
    rows = await recorder.records.decisions(wanted, limit + 1, cursor)
    following = None
    if len(rows) > limit:
        last = rows[limit - 1]
        following = f"{last.event.at_us}.{last.id}"
        link_on(request, response, "/decisions", asked, before=following)
    items = [_decision(row) for row in rows[:limit]]
    return DecisionLogPage(items=items, from_=asked.from_, to=asked.to, next=following)


def _decision(row: DecisionRow) -> DecisionLogOut:
    event = row.event
    return DecisionLogOut(
        time=EPOCH + timedelta(microseconds=event.at_us),
        node=event.node,
        rule=event.rule,
        subject=_parts(event.subject),
        endpoint=event.endpoint,
        method=event.method,
        outcome="allowed" if event.outcome == "allowed" else "denied",
        kind=event.kind,
        cost=event.cost,
        retry_after=event.retry_after_ms / 1_000,
        degraded=bool(event.degraded),
        shadow_denied=row.shadow_denied,
    )


# ------------------------------------------------------------------------------ top, penalties


@router.get(
    "/top", operation_id="top", summary="Who asks most, now", responses=refusals(*READ, 404)
)
async def top(
    recorder: RecorderOf,
    viewer: ViewerOf,
    by: Annotated[
        Literal["checks", "denied"], Query(description="Who asks most, or is denied most.")
    ] = "checks",
    limit: Annotated[int, Query(ge=1, le=COUNTERS_MAX)] = TOP,
) -> TopOut:
    """Of the last minutes, on all workers of this machine: counts fade by half every minute.

    A count is at most so much as it says, and at least that less its error.
    """
    found, total = recorder.top(by, COUNTERS_MAX if viewer.scope else limit)
    seen = [each for each in found if within(each.item[0], viewer.scope, recorder.subjects)]
    items = [
        TalkerOut(
            subject=_parts(each.item[0]),
            rule=each.item[1],
            count=round(each.count, 3),
            error=round(each.error, 3),
            per_second=round(each.count / SECONDS_COUNTED, 3),
        )
        for each in seen[:limit]
    ]
    per_second = None if viewer.scope else round(total / SECONDS_COUNTED, 3)
    return TopOut(by=by, items=items, per_second=per_second)


@router.get(
    "/penalties",
    operation_id="list_penalties",
    summary="Who has to wait longer",
    responses=refusals(*READ),
)
async def list_penalties(plane: PlaneOf, viewer: ViewerOf) -> PenaltiesOut:
    """The cool-downs and blocks that this machine has given and that are not over.

    `DELETE /v1/quota` of such a request ends them.
    """
    recorder: Recorder | None = getattr(plane.node, "recorder", None)
    standing: Iterable[Any] = plane.node.limiter.penalties()
    how: SubjectMode = "plain"
    if recorder is not None:
        standing, how = recorder.penalties(), recorder.subjects
    seen = [each for each in standing if within(each.subject, viewer.scope, "plain")]
    items = [_penalty(each, how) for each in await _still(plane.node.limiter, seen)]
    return PenaltiesOut(items=items)


async def _still(limiter: AsyncLimiter, standing: Sequence[ActivePenalty]) -> list[ActivePenalty]:
    """Those that the store knows too: who gave one need not have heard that it was ended."""
    found: list[ActivePenalty] = []
    for start in range(0, len(standing), _ASKED_TOGETHER):
        some = standing[start : start + _ASKED_TOGETHER]
        barred = await asyncio.gather(
            *(limiter.is_barred(each.rule, each.subject) for each in some)
        )
        found += [each for each, is_barred in zip(some, barred, strict=True) if is_barred]
    return found


def _penalty(each: ActivePenalty, how: SubjectMode) -> PenaltyOut:
    return PenaltyOut(
        rule=each.rule,
        subject=_parts(recorded_subject(each.subject, how)),
        kind="block" if each.blocked else "cooldown",
        level=each.level,
        seconds=each.seconds,
        until=_time(each.until_ns / 1e9),
    )
