"""Records over HTTP: usage, decisions, the busiest subjects, and penalties.

None of this is on the path of a request. A `read` token sees everything. A token with a scope sees
the subjects that have all parts of the scope, so it can be given to the customer that it names.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, NamedTuple, cast
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, WithJsonSchema
from starlette.responses import StreamingResponse

from tollkeeper.core.errors import show
from tollkeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR
from tollkeeper.history.events import (
    REQUEST_ID_LENGTH_MAX,
    SubjectMode,
    recorded_subject,
    scope_parts,
)
from tollkeeper.history.live import COUNTERS_MAX, SECONDS_COUNTED, ActivePenalty
from tollkeeper.history.reading import (
    DecisionCursor,
    DecisionRow,
    Outcome,
    RecordFilter,
    Records,
    UsageRow,
    UsageStep,
)
from tollkeeper.history.recorder import Recorder, TopBy
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.service.admin.operations import (
    PREFIX,
    READ,
    ROLE,
    AdminRoute,
    Control,
    control_of,
    error_responses,
    page_responses,
)
from tollkeeper.service.admin.problems import AdminError, ApiOutput, token_error
from tollkeeper.service.http.tokens import Token, TokenRejection

USAGE_ROWS: Final = 1_000
USAGE_ROWS_MAX: Final = 10_000
DECISIONS: Final = 100
DECISIONS_MAX: Final = 1_000
TOP: Final = 20
CURSOR_LENGTH_MAX: Final = 4_000
# Concurrent look-ups of penalties, so that the store answers each one in time.
_LOOKUPS_MAX: Final = 100

_COLUMNS: Final = (
    *("start", "seconds", "subject", "rule", "allowed", "denied", "units"),
    *("shadow_denied", "denied_indirectly", "region"),
)

# ── Values ───────────────────────────────────────────────────────────────────────────────────────

Subject = Annotated[
    list[str],
    Field(
        description="The parts of the subject; empty if subjects are not recorded.",
        examples=[["user:42"]],
    ),
]
From = Annotated[datetime, Field(alias="from", description="The beginning of the period.")]
To = Annotated[datetime, Field(description="The end of the period, exclusive.")]
Next = Annotated[str | None, Field(description="For the next page; null if this is the last one.")]


class UsageOut(ApiOutput):
    """The usage of a subject under a rule in one step of time."""

    start: datetime
    seconds: int = Field(description="The length of the step.", examples=[3600])
    subject: Subject
    rule: str = Field(
        description="The ID of the rule; `(allow)` and `(deny)` are the lists.", examples=["orders"]
    )
    allowed: int = Field(description="Requests that passed.")
    denied: int = Field(description="Requests that the rule denied.")
    units: int = Field(description="Units spent.")
    shadow_denied: int = Field(
        description="Requests that the rule would have denied if it were not in shadow mode."
    )
    denied_indirectly: int = Field(
        description="Requests of this subject that the rule denied although it counts something "
        "else, for example all requests together. They are in `denied` of that subject."
    )
    region: str | None = Field(description="The region of the nodes; null if they have none.")


class UsagePage(ApiOutput):
    """Usage, in the order of time."""

    items: list[UsageOut]
    from_: From
    to: To
    next: Next


class IdentityOut(ApiOutput):
    """Who made a request, as far as it is recorded."""

    user: str | None
    tenant: str | None
    api_key: str | None = Field(description="A digest.")
    ip: str | None


class DecisionLogOut(ApiOutput):
    """One decision."""

    time: datetime
    node: str
    region: str | None = Field(description="The region of the node; null if it has none.")
    request_id: str | None = Field(description="`X-Request-Id` of the reply.")
    rule: str = Field(description="The rule that decided.")
    subject: Subject
    identity: IdentityOut
    rules: dict[str, str] = Field(
        description="The outcome of every rule that applied: `allowed`, `denied`, `shadow_denied`, "
        "or `not_checked` after a denial by a penalty.",
        examples=[{"orders": "denied", "trial": "shadow_denied"}],
    )
    endpoint: str
    method: str
    outcome: Literal["allowed", "denied", "excess"] = Field(
        description="`excess`: no decision; regions together were above an eventual limit, by "
        "`cost` units."
    )
    kind: str = Field(
        description="Whether limits or a penalty decided, or why they did not.",
        examples=["limited", "cooldown", "block", "blocked"],
    )
    cost: int
    limit: int | None = Field(description="The limit that decided; null if none did.")
    window: float | None = Field(description="The window of the limit, in seconds.")
    count: int | None = Field(
        description="The units of the limit that were in use after the decision; null if unknown."
    )
    retry_after: float = Field(description="Seconds until the same cost would have passed.")
    degraded: bool = Field(description="True if the store was unavailable.")
    shadow_denied: list[str] = Field(description="Rules in shadow mode that would have denied it.")


class DecisionLogPage(ApiOutput):
    """Decisions, the newest first."""

    items: list[DecisionLogOut]
    from_: From
    to: To
    next: Next


class TalkerOut(ApiOutput):
    """One of the busiest subjects."""

    subject: Subject
    rule: str
    count: float = Field(
        description="Requests, halved every minute, an upper bound; with `from`, of the period."
    )
    error: float = Field(description="The count may be too high by this much.")
    per_second: float = Field(description="The rate that leads to this count.")


class TopOut(ApiOutput):
    """The busiest subjects."""

    by: Literal["checks", "denied", "shadow_denied"]
    items: list[TalkerOut]
    per_second: float | None = Field(
        description="Of all subjects; null with `rule` or `from`, and for a token with a scope."
    )


class PenaltyOut(ApiOutput):
    """A cool-down or a block that has not ended."""

    rule: str
    subject: Subject
    kind: Literal["cooldown", "block"]
    level: int = Field(description="1 for the first one, and so on.")
    seconds: int = Field(description="Its length.")
    until: datetime


class PenaltiesOut(ApiOutput):
    """The penalties that have not ended."""

    items: list[PenaltyOut]


# ── Filters ──────────────────────────────────────────────────────────────────────────────────────

# The period if the query names none.
LAST: Final = timedelta(days=1)
CSV: Final = "text/csv"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# RFC 3339. A plus sign that was not escaped in a URL arrives as a space.
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)(Z|[+\- ]\d\d:\d\d)", re.IGNORECASE
)

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ScopedRoute(AdminRoute):
    """A route for `read` tokens, also those with a scope, which see only their own records."""

    def get_route_handler(self) -> _Handler:
        """Return the handler, which accepts tokens with a scope."""
        shown = self.openapi_extra
        # The permission `quota` accepts a scope; `_viewer` rejects tokens that may only check.
        self.openapi_extra = {**(shown or {}), ROLE: "quota"}
        try:
            return super().get_route_handler()
        finally:
            self.openapi_extra = shown


def _viewer(request: Request) -> Token:
    """Return the caller's token. A token that may only check may not read records."""
    token: Token = request.state.token
    if token.role in {"check", "limit"}:
        tokens = control_of(request).context.tokens
        refused = tokens.permitted(request.headers.get("authorization"), "read")
        if isinstance(refused, TokenRejection):
            raise token_error(refused)
    return token


def _recorder(control: Control) -> Recorder:
    recorder = control.context.recorder
    if recorder is None:
        raise AdminError(
            404,
            "NOT_RECORDED",
            "this service keeps no records; start it without --record off, or with --record URL",
        )
    return recorder


ViewerOf = Annotated[Token, Depends(_viewer)]
RecorderOf = Annotated[Recorder, Depends(_recorder)]
_Text = Annotated[str, Query(max_length=KEY_LENGTH_MAX)]
_TEXT_SCHEMA: Final = {"type": "string", "maxLength": KEY_LENGTH_MAX}
_LIST_SCHEMA: Final = {"type": "array", "maxItems": PARTS_MAX}
_Subject = Annotated[
    list[_Text] | None,
    Query(
        description="The subject: `user:42`. If it has several parts, each of them: "
        "`subject=tenant:acme&subject=user:42`.",
        max_length=PARTS_MAX,
        examples=["user:42"],
    ),
    # In a query, a single text is a list with one element.
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {**_LIST_SCHEMA, "items": _TEXT_SCHEMA}]}),
]
_Rule = Annotated[_Text | None, Query(description="The ID of the rule.")]
OutcomeOf = Annotated[
    Outcome | None,
    Query(
        description="`shadow_denied`: a rule in shadow mode would have denied the request; `rule` "
        "is then that rule. `excess`: regions together were above an eventual limit."
    ),
]
_Region = Annotated[
    str | None, Query(max_length=32, description="The region of the nodes.", examples=["eu"])
]
_When = Annotated[
    str | None,
    Query(
        alias="from",
        description="From this time with its zone, or this date (UTC); by default the last day.",
        examples=["2026-11-15T00:00:00Z"],
        json_schema_extra={"format": "date-time"},
    ),
]
_Until = Annotated[
    str | None,
    Query(
        alias="to",
        description="Before this time, or this date (UTC); by default now.",
        examples=["2026-11-16T00:00:00Z"],
        json_schema_extra={"format": "date-time"},
    ),
]


class RecordSelection(NamedTuple):
    """The records that a request selects, among those that the caller may see."""

    wanted: RecordFilter
    from_: datetime
    to: datetime


def _asked(
    viewer: ViewerOf,
    subject: _Subject = None,
    rule: _Rule = None,
    from_: _When = None,
    to: _Until = None,
    outcome: OutcomeOf = None,
    region: _Region = None,
) -> RecordSelection:
    until = datetime.now(UTC) if to is None else moment(to, "to")
    since = _day_before(until) if from_ is None else moment(from_, "from")
    if since >= until:
        raise AdminError(
            400,
            "INVALID_TIME",
            f"from ({since.isoformat()}) is not before to ({until.isoformat()})",
        )
    wanted = RecordFilter(
        _microseconds(since),
        _microseconds(until),
        subject=None if subject is None else SEPARATOR.join(subject),
        rule=rule,
        outcome=outcome,
        region=region,
        scope=viewer.scope,
    )
    return RecordSelection(wanted, since, until)


Selection = Annotated[RecordSelection, Depends(_asked)]


def moment(text: str, name: str) -> datetime:
    """Return a time of RFC 3339, or the beginning of a date (UTC). Raises AdminError.

    >>> moment("2026-11-15T01:00:00+01:00", "from").isoformat()
    '2026-11-15T00:00:00+00:00'
    >>> moment("2026-11-15", "from").isoformat()
    '2026-11-15T00:00:00+00:00'
    """
    if _DATE.fullmatch(text):
        text = f"{text}T00:00:00Z"
    found = _TIME.fullmatch(text)
    if found is not None:
        zone = found[2].upper().replace(" ", "+")
        with suppress(ValueError, OverflowError):  # such as the 30th of February
            return datetime.fromisoformat(f"{found[1].upper()}{zone}").astimezone(UTC)
    raise AdminError(
        400,
        "INVALID_TIME",
        f"{name}={show(text)} is neither a date nor a date and time with a zone; for example "
        f"{name}=2026-11-15, 2026-11-15T14:30:00Z, or 2026-11-15T15:30:00%2B01:00",
    )


def _day_before(until: datetime) -> datetime:
    """Return the time one day earlier, but not before the first representable date."""
    return until - min(LAST, until - datetime.min.replace(tzinfo=UTC))


def _microseconds(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def link_on(
    request: Request, response: Response, path: str, selection: RecordSelection, **on: str
) -> None:
    """Add the link to the next page: the same query and the same period."""
    given = {"from": selection.from_.isoformat(), "to": selection.to.isoformat(), **on}
    same = [pair for pair in request.query_params.multi_items() if pair[0] not in given]
    query = urlencode([*same, *given.items()])
    response.headers["Link"] = f'<{PREFIX}{path}?{query}>; rel="next"'


def wants_csv(accept: str) -> bool:
    """Return True if the Accept header names CSV and not JSON.

    >>> wants_csv("text/csv"), wants_csv("*/*"), wants_csv("application/json, text/csv;q=0.5")
    (True, False, False)
    """
    kinds = [each.partition(";")[0].strip().lower() for each in accept.split(",")]
    return CSV in kinds and "application/json" not in kinds


def cursor_of(row: UsageRow) -> str:
    """Return a cursor for a row of usage, so that a page can start after it."""
    key = [row.start_s, row.step_s, row.subject, row.rule, row.region]
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def row_of(cursor: str | None) -> UsageRow | None:
    """Return the row that a cursor names. Raises AdminError."""
    if cursor is None:
        return None
    with suppress(ValueError, TypeError, RecursionError):
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, b"-_", validate=True))
        start_s, step_s, subject, rule, region = found
        f"{subject}{rule}{region}".encode()  # half of a surrogate pair is not valid text
        numbers = all(type(each) is int and 0 <= each < 2**40 for each in (start_s, step_s))
        texts = all(isinstance(each, str) and "\0" not in each for each in (subject, rule, region))
        if numbers and texts and step_s < 2**31:
            return UsageRow(start_s, step_s, subject, rule, 0, 0, 0, region=region)
    raise AdminError(
        400, "INVALID_CURSOR", "after is not the `next` of the previous page; leave it out"
    )


def within(subject: str, scope: Mapping[str, str], how: SubjectMode) -> bool:
    """Return True if a subject has all parts of a scope. `how` is the form of recorded subjects.

    >>> within("tenant:acme\\x1fuser:42", {"tenant": "acme"}, "plain")
    True
    >>> within("tenant:acme-2", {"tenant": "acme"}, "plain")
    False
    >>> within("", {"tenant": "acme"}, "none")
    False
    """
    parts = subject.split(SEPARATOR)
    return all(part in parts for part in scope_parts(scope, how))


router = APIRouter(tags=["records"], route_class=ScopedRoute)


def _time(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def parts_of(subject: str) -> list[str]:
    """Return the parts of a recorded subject; none if it is empty."""
    return subject.split(SEPARATOR) if subject else []


# ── Usage ────────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/usage",
    operation_id="list_usage",
    summary="Usage",
    response_model=UsagePage,
    responses={
        **page_responses(404),
        200: {
            **page_responses()[200],
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
    selection: Selection,
    step: Annotated[UsageStep, Query(description="Minutes are kept for one day.")] = "hour",
    limit: Annotated[
        int, Query(ge=1, le=USAGE_ROWS_MAX, description="Rows per page of JSON.")
    ] = USAGE_ROWS,
    after: Annotated[
        str | None,
        Query(description="`next` of the previous page.", max_length=CURSOR_LENGTH_MAX),
    ] = None,
    format: Annotated[  # noqa: A002 - the name in the query
        Literal["json", "csv"] | None, Query(description="By default the type in `Accept`.")
    ] = None,
) -> Any:
    """Return allowed and denied requests and spent units, by subject, rule and time.

    CSV has no pages: the whole period is sent.
    """
    records = recorder.records
    if format == "csv" or (format is None and wants_csv(request.headers.get("accept", ""))):
        return await _csv(records, selection.wanted, step)
    rows = await records.usage(selection.wanted, step, limit + 1, row_of(after))
    following = cursor_of(rows[limit - 1]) if len(rows) > limit else None
    if following is not None:
        link_on(request, response, "/usage", selection, after=following)
    items = [
        UsageOut(
            start=_time(row.start_s),
            seconds=row.step_s,
            subject=parts_of(row.subject),
            rule=row.rule,
            allowed=row.allowed,
            denied=row.denied,
            units=row.units,
            shadow_denied=row.shadow_denied,
            denied_indirectly=row.denied_indirectly,
            region=row.region or None,
        )
        for row in rows[:limit]
    ]
    return UsagePage(items=items, from_=selection.from_, to=selection.to, next=following)


async def _csv(records: Records, wanted: RecordFilter, step: UsageStep) -> Response:
    pages = records.all_usage(wanted, step)
    # The first page is read before the reply starts, so that an error can still be reported.
    nothing: list[UsageRow] = []
    first = await anext(pages, nothing)

    async def text() -> AsyncIterator[str]:
        yield _lines([_COLUMNS])
        yield _lines(map(_cells, first))
        async for page in pages:
            yield _lines(map(_cells, page))
            await asyncio.sleep(0)  # other requests get their turn

    headers = {"Content-Disposition": 'attachment; filename="usage.csv"', "Vary": "Accept"}
    return StreamingResponse(text(), media_type=CSV, headers=headers)


def _cells(row: UsageRow) -> tuple[Any, ...]:
    start = _time(row.start_s).isoformat().replace("+00:00", "Z")
    subject = ", ".join(parts_of(row.subject))
    return (start, row.step_s, subject, *row[3:])


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


# ── Decisions ────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/decisions",
    operation_id="list_decisions",
    summary="Decisions",
    responses=page_responses(404),
)
async def list_decisions(
    request: Request,
    response: Response,
    recorder: RecorderOf,
    selection: Selection,
    user: Annotated[_Text | None, Query(description="The user of the request.")] = None,
    tenant: Annotated[_Text | None, Query(description="The tenant of the request.")] = None,
    request_id: Annotated[
        str | None,
        Query(
            description="`X-Request-Id` that the caller was given.",
            max_length=REQUEST_ID_LENGTH_MAX,
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=DECISIONS_MAX)] = DECISIONS,
    before: Annotated[
        str | None,
        Query(description="`next` of the previous page.", pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$"),
    ] = None,
) -> DecisionLogPage:
    """Return every denial and a sample of the allowed requests, the newest first."""
    wanted = replace(selection.wanted, user=user, tenant=tenant, request_id=request_id)
    cursor = None if before is None else DecisionCursor(*map(int, before.split(".")))
    rows = await recorder.records.decisions(wanted, limit + 1, cursor)
    following = None
    if len(rows) > limit:
        last = rows[limit - 1]
        following = f"{last.event.at_us}.{last.id}"
        link_on(request, response, "/decisions", selection, before=following)
    items = [_decision(row) for row in rows[:limit]]
    return DecisionLogPage(items=items, from_=selection.from_, to=selection.to, next=following)


def _decision(row: DecisionRow) -> DecisionLogOut:
    event = row.event
    return DecisionLogOut(
        time=EPOCH + timedelta(microseconds=event.at_us),
        node=event.node,
        region=event.region or None,
        request_id=event.request_id or None,
        rule=event.rule,
        subject=parts_of(event.subject),
        identity=IdentityOut(
            user=event.user_id or None,
            tenant=event.tenant or None,
            api_key=event.api_key or None,
            ip=event.ip or None,
        ),
        rules=row.rules,
        endpoint=event.endpoint,
        method=event.method,
        outcome=cast("Literal['allowed', 'denied', 'excess']", event.outcome),
        kind=event.kind,
        cost=event.cost,
        limit=event.limit_units or None,
        window=event.window_ms / 1_000 if event.window_ms else None,
        count=None if event.used_units < 0 else event.used_units,
        retry_after=event.retry_after_ms / 1_000,
        degraded=bool(event.degraded),
        shadow_denied=row.shadow_denied,
    )


# ── Top, penalties ───────────────────────────────────────────────────────────────────────────────


@router.get(
    "/top",
    operation_id="top",
    summary="The busiest subjects",
    responses=error_responses(*READ, 404),
)
async def top(
    recorder: RecorderOf,
    viewer: ViewerOf,
    by: Annotated[
        Literal["checks", "denied", "shadow_denied"],
        Query(
            description="By checks, by denials, or by requests that a rule in shadow mode would "
            "have denied."
        ),
    ] = "checks",
    rule: _Rule = None,
    from_: Annotated[
        str | None,
        Query(
            alias="from",
            description="Count the records from this time, or this date (UTC), instead of the "
            "last minutes.",
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
    to: _Until = None,
    limit: Annotated[int, Query(ge=1, le=COUNTERS_MAX)] = TOP,
) -> TopOut:
    """Return the busiest subjects: of the last minutes on this machine, or of the records.

    Of the last minutes, counts are halved every minute, and the true count is at most `count` and
    at least `count - error`. With `from`, counts are those of the recorded usage, of all nodes.
    """
    if from_ is not None or to is not None:
        return await _top_of_records(recorder, _asked(viewer, None, rule, from_, to), by, limit)
    found, total = recorder.top(by, COUNTERS_MAX if viewer.scope or rule else limit)
    seen = [
        each
        for each in found
        if rule in {None, each.item[1]} and within(each.item[0], viewer.scope, recorder.subjects)
    ]
    items = [
        TalkerOut(
            subject=parts_of(each.item[0]),
            rule=each.item[1],
            count=round(each.count, 3),
            error=round(each.error, 3),
            per_second=round(each.count / SECONDS_COUNTED, 3),
        )
        for each in seen[:limit]
    ]
    per_second = None if viewer.scope or rule else round(total / SECONDS_COUNTED, 3)
    return TopOut(by=by, items=items, per_second=per_second)


async def _top_of_records(
    recorder: Recorder, selection: RecordSelection, by: TopBy, limit: int
) -> TopOut:
    seconds = (selection.to - selection.from_).total_seconds()
    items = [
        TalkerOut(
            subject=parts_of(row.subject),
            rule=row.rule,
            count=row.requests,
            error=0,
            per_second=round(row.requests / seconds, 6),
        )
        for row in await recorder.records.most(selection.wanted, by, limit)
    ]
    return TopOut(by=by, items=items, per_second=None)


@router.get(
    "/penalties",
    operation_id="list_penalties",
    summary="Penalties",
    responses=error_responses(*READ),
)
async def list_penalties(control: Control, viewer: ViewerOf) -> PenaltiesOut:
    """Return the cool-downs and blocks of this machine that have not ended.

    `DELETE /v1/quota` for such a request ends them.
    """
    recorder = control.context.recorder
    standing: Iterable[Any] = control.context.limiter.penalties()
    how: SubjectMode = "plain"
    if recorder is not None:
        standing, how = recorder.penalties(), recorder.subjects
    seen = [each for each in standing if within(each.subject, viewer.scope, "plain")]
    items = [_penalty(each, how) for each in await _still(control.context.limiter, seen)]
    return PenaltiesOut(items=items)


async def _still(limiter: AsyncLimiter, standing: Sequence[ActivePenalty]) -> list[ActivePenalty]:
    """Return those that the store has too: this worker may not know that one was ended."""
    found: list[ActivePenalty] = []
    for start in range(0, len(standing), _LOOKUPS_MAX):
        some = standing[start : start + _LOOKUPS_MAX]
        barred = await asyncio.gather(
            *(limiter.is_barred(each.rule, each.subject) for each in some)
        )
        found += [each for each, is_barred in zip(some, barred, strict=True) if is_barred]
    return found


def _penalty(each: ActivePenalty, how: SubjectMode) -> PenaltyOut:
    return PenaltyOut(
        rule=each.rule,
        subject=parts_of(recorded_subject(each.subject, how)),
        kind="block" if each.blocked else "cooldown",
        level=each.level,
        seconds=each.seconds,
        until=_time(each.until_ns / 1e9),
    )
