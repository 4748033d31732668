"""Records over HTTP: usage, decisions, denials in groups, the busiest subjects, and penalties.

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
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, cast
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, WithJsonSchema
from starlette.responses import StreamingResponse

from ratekeeper.core.errors import show
from ratekeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR
from ratekeeper.history.events import (
    ENDPOINT_LENGTH_MAX,
    REQUEST_ID_LENGTH_MAX,
    SubjectMode,
    recorded_subject,
    scope_parts,
)
from ratekeeper.history.live import COUNTERS_MAX, SECONDS_COUNTED, ActivePenalty
from ratekeeper.history.reading import (
    DecisionCursor,
    DecisionRow,
    GroupBy,
    GroupRow,
    MostRow,
    Outcome,
    RecordFilter,
    UsageRow,
    UsageStep,
)
from ratekeeper.history.recorder import Recorder, TopBy
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.service.admin.operations import (
    PREFIX,
    READ,
    ROLE,
    AdminRoute,
    Control,
    control_of,
    error_responses,
    page_responses,
)
from ratekeeper.service.admin.problems import AdminError, ApiOutput, token_error
from ratekeeper.service.http.tokens import Token, TokenRejection

USAGE_ROWS: Final = 1_000
USAGE_ROWS_MAX: Final = 10_000
DECISIONS: Final = 100
DECISIONS_MAX: Final = 1_000
GROUPS: Final = 20
GROUPS_MAX: Final = 1_000
# Steps of time that people read easily, in seconds. The first is used that makes at most STEPS_MAX.
STEPS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800),
    *(3_600, 7_200, 10_800, 21_600, 43_200, 86_400, 7 * 86_400),
)
STEPS_MAX: Final = 120
TOP: Final = 20
CURSOR_LENGTH_MAX: Final = 4_000
# Concurrent look-ups of penalties, so that the store answers each one in time.
_LOOKUPS_MAX: Final = 100

_COLUMNS: Final = (
    *("start", "seconds", "subject", "rule", "allowed", "denied", "units"),
    *("shadow_denied", "denied_indirectly", "region"),
)
_DECISION_COLUMNS: Final = (
    *("time", "node", "region", "request_id", "rule", "subject"),
    *("user", "tenant", "api_key", "ip", "endpoint", "method", "outcome", "kind", "cost"),
    *("limit", "window", "count", "retry_after", "degraded", "shadow_denied", "rules"),
)
# A spreadsheet runs a cell that begins with one of these as a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")

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
    """The client of a request, as far as it is recorded."""

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


class DenialGroupOut(ApiOutput):
    """The requests of one rule, subject, tenant, user or endpoint, or of one step of time."""

    value: str | None = Field(
        description="The rule, tenant, user or endpoint; null if the requests have none, or if it "
        "is not recorded, and for subjects and times.",
        examples=["orders"],
    )
    subject: Subject | None = Field(description="The parts of the subject, with `by=subject`.")
    start: datetime | None = Field(description="The beginning of the step, with `by=time`.")
    requests: int = Field(description="The number of requests.", examples=[120])
    last: datetime | None = Field(description="The time of the last one; null with `by=time`.")


class DenialsOut(ApiOutput):
    """Denials in groups, the largest group first; steps of time in their order."""

    by: Literal["rule", "subject", "tenant", "user", "endpoint", "time"]
    outcome: Literal["allowed", "denied", "shadow_denied", "excess"]
    items: list[DenialGroupOut]
    total: int = Field(description="The requests of all groups, on all pages.")
    groups: int = Field(description="The number of groups, on all pages.")
    seconds: int | None = Field(description="The length of a step, with `by=time`.")
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

_Row = TypeVar("_Row")
_Other = TypeVar("_Other")
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


def _asked_of_decisions(
    selection: Selection,
    user: Annotated[_Text | None, Query(description="The user of the request.")] = None,
    tenant: Annotated[_Text | None, Query(description="The tenant of the request.")] = None,
    endpoint: Annotated[
        str | None,
        Query(description="The endpoint of the request.", max_length=ENDPOINT_LENGTH_MAX),
    ] = None,
    request_id: Annotated[
        str | None,
        Query(
            description="`X-Request-Id` that the caller was given.",
            max_length=REQUEST_ID_LENGTH_MAX,
        ),
    ] = None,
) -> RecordSelection:
    wanted = replace(
        selection.wanted, user=user, tenant=tenant, endpoint=endpoint, request_id=request_id
    )
    return selection._replace(wanted=wanted)


DecisionSelection = Annotated[RecordSelection, Depends(_asked_of_decisions)]
_Format = Annotated[
    Literal["json", "csv"] | None, Query(description="By default the type in `Accept`.")
]
_After = Annotated[
    str | None, Query(description="`next` of the previous page.", max_length=CURSOR_LENGTH_MAX)
]


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


def cursor_of(*key: int | str) -> str:
    """Return a cursor for the row with this key, so that a page can start after it."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def key_of(cursor: str, *kinds: type[int | str]) -> list[Any]:
    """Return the key that a cursor names. Raises AdminError if it has other types.

    >>> key_of(cursor_of(7, "user:42"), int, str)
    [7, 'user:42']
    """
    with suppress(ValueError, TypeError, RecursionError):
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, b"-_", validate=True))
        right = [type(each) is kind for each, kind in zip(found, kinds, strict=True)]
        texts = "".join(each for each in found if isinstance(each, str))
        texts.encode()  # half of a surrogate pair is not valid text
        numbers = [each for each in found if isinstance(each, int)]
        if all(right) and "\0" not in texts and all(0 <= each < 2**63 for each in numbers):
            return list(found)
    raise AdminError(
        400, "INVALID_CURSOR", "after is not the `next` of the previous page; leave it out"
    )


def row_of(cursor: str | None) -> UsageRow | None:
    """Return the row of usage that a cursor names. Raises AdminError."""
    if cursor is None:
        return None
    start_s, step_s, subject, rule, region = key_of(cursor, int, int, str, str, str)
    # Larger numbers are in no row, and not all databases accept them.
    start_s, step_s = min(start_s, 2**40), min(step_s, 2**31 - 1)
    return UsageRow(start_s, step_s, subject, rule, 0, 0, 0, region=region)


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


def _table_responses(columns: Iterable[str]) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation that returns pages, or everything as CSV."""
    table = {CSV: {"schema": {"type": "string"}, "example": ",".join(columns) + "\r\n"}}
    return {**page_responses(404), 200: {**page_responses()[200], "content": table}}


@router.get(
    "/usage",
    operation_id="list_usage",
    summary="Usage",
    response_model=UsagePage,
    responses=_table_responses(_COLUMNS),
)
async def list_usage(
    request: Request,
    response: Response,
    recorder: RecorderOf,
    selection: Selection,
    step: Annotated[
        UsageStep | Literal["period"],
        Query(
            description="Minutes are kept for one day. `period`: the sums of the whole period, the "
            "busiest subjects first, by the count that `outcome` names, of all regions together."
        ),
    ] = "hour",
    limit: Annotated[
        int, Query(ge=1, le=USAGE_ROWS_MAX, description="Rows per page of JSON.")
    ] = USAGE_ROWS,
    after: _After = None,
    format: _Format = None,  # noqa: A002 - the name in the query
) -> Any:
    """Return allowed and denied requests and spent units, by subject, rule and time.

    CSV has no pages: the whole period is sent.
    """
    records, wanted = recorder.records, selection.wanted
    by = wanted.outcome or "requests"
    if is_csv(request, format):
        if step == "period":
            sums = _mapped(records.all_most(wanted, by), lambda row: _sum(row, selection))
            return await _csv("usage", _COLUMNS, sums, _cells)
        return await _csv("usage", _COLUMNS, records.all_usage(wanted, step), _cells)
    following = None
    if step == "period":
        most = await records.most(wanted, by, limit + 1, _most_of(after))
        if len(most) > limit:
            last = most[limit - 1]
            following = cursor_of(last.most, last.subject, last.rule)
        rows = [_sum(row, selection) for row in most]
    else:
        rows = await records.usage(wanted, step, limit + 1, row_of(after))
        if len(rows) > limit:
            at = rows[limit - 1]
            following = cursor_of(at.start_s, at.step_s, at.subject, at.rule, at.region)
    if following is not None:
        link_on(request, response, "/usage", selection, after=following)
    items = [_usage(row) for row in rows[:limit]]
    return UsagePage(items=items, from_=selection.from_, to=selection.to, next=following)


def _usage(row: UsageRow) -> UsageOut:
    return UsageOut(
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


def _most_of(cursor: str | None) -> MostRow | None:
    if cursor is None:
        return None
    most, subject, rule = key_of(cursor, int, str, str)
    return MostRow(subject, rule, most, 0, 0, 0, 0, 0)


def _sum(row: MostRow, selection: RecordSelection) -> UsageRow:
    """Return the sums of a period as usage in one step, which is the period."""
    from_s, to_s = selection.wanted.from_us // 10**6, -(-selection.wanted.to_us // 10**6)
    return UsageRow(
        from_s,
        to_s - from_s,
        *(row.subject, row.rule),
        *(row.allowed, row.denied, row.units, row.shadow_denied, row.denied_indirectly),
        region=selection.wanted.region or "",
    )


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────────


def is_csv(request: Request, asked: Literal["json", "csv"] | None) -> bool:
    """Return True if a request wants CSV: by `format`, or else by its Accept header."""
    return asked == "csv" or (asked is None and wants_csv(request.headers.get("accept", "")))


async def _mapped(
    pages: AsyncIterator[list[_Row]], change: Callable[[_Row], _Other]
) -> AsyncIterator[list[_Other]]:
    async for page in pages:
        yield [change(row) for row in page]


async def _csv(
    name: str,
    columns: Sequence[str],
    pages: AsyncIterator[list[_Row]],
    cells: Callable[[_Row], Iterable[Any]],
) -> Response:
    """Return a whole list as a file, which is read and sent piece by piece."""
    # The first page is read before the reply starts, so that an error can still be reported.
    nothing: list[_Row] = []
    first = await anext(pages, nothing)

    async def text() -> AsyncIterator[str]:
        yield _lines([columns])
        yield _lines(map(cells, first))
        async for page in pages:
            yield _lines(map(cells, page))
            await asyncio.sleep(0)  # other requests get their turn

    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"', "Vary": "Accept"}
    return StreamingResponse(text(), media_type=CSV, headers=headers)


def _cells(row: UsageRow) -> tuple[Any, ...]:
    subject = ", ".join(parts_of(row.subject))
    return (_utc(_time(row.start_s)), row.step_s, subject, *row[3:])


def _utc(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(map(_harmless, row) for row in rows)
    return text.getvalue()


def _harmless(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula: callers choose these texts.

    >>> _harmless("=1+1"), _harmless("user:42"), _harmless(-5)
    ("'=1+1", 'user:42', -5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


# ── Decisions ────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/decisions",
    operation_id="list_decisions",
    summary="Decisions",
    response_model=DecisionLogPage,
    responses=_table_responses(_DECISION_COLUMNS),
)
async def list_decisions(
    request: Request,
    response: Response,
    recorder: RecorderOf,
    selection: DecisionSelection,
    limit: Annotated[int, Query(ge=1, le=DECISIONS_MAX)] = DECISIONS,
    before: Annotated[
        str | None,
        Query(description="`next` of the previous page.", pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$"),
    ] = None,
    format: _Format = None,  # noqa: A002 - the name in the query
) -> Any:
    """Return every denial and a sample of the allowed requests, the newest first.

    CSV has no pages: the whole period is sent.
    """
    records = recorder.records
    if is_csv(request, format):
        pages = records.all_decisions(selection.wanted)
        return await _csv("decisions", _DECISION_COLUMNS, pages, _decision_cells)
    cursor = None if before is None else DecisionCursor(*map(int, before.split(".")))
    rows = await records.decisions(selection.wanted, limit + 1, cursor)
    following = None
    if len(rows) > limit:
        last = rows[limit - 1].cursor
        following = f"{last.at_us}.{last.id}"
        link_on(request, response, "/decisions", selection, before=following)
    items = [_decision(row) for row in rows[:limit]]
    return DecisionLogPage(items=items, from_=selection.from_, to=selection.to, next=following)


def _decision_cells(row: DecisionRow) -> Iterable[Any]:
    found = _decision(row)
    who = found.identity
    return (
        *(_utc(found.time), found.node, found.region, found.request_id, found.rule),
        *(", ".join(found.subject), who.user, who.tenant, who.api_key, who.ip),
        *(found.endpoint, found.method, found.outcome, found.kind, found.cost),
        *(found.limit, found.window, found.count, found.retry_after, found.degraded),
        *(", ".join(found.shadow_denied), json.dumps(found.rules, ensure_ascii=False)),
    )


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


# ── Denials in groups ────────────────────────────────────────────────────────────────────────────


@router.get(
    "/denials",
    operation_id="group_denials",
    summary="Denials in groups",
    response_model=DenialsOut,
    responses=_table_responses(("rule", "requests", "last")),
)
async def group_denials(
    request: Request,
    response: Response,
    recorder: RecorderOf,
    selection: DecisionSelection,
    by: Annotated[
        GroupBy | Literal["time"],
        Query(description="The value that the requests of a group share. `time`: steps of time."),
    ] = "rule",
    limit: Annotated[
        int, Query(ge=1, le=GROUPS_MAX, description="Groups per page of JSON; not of times.")
    ] = GROUPS,
    after: _After = None,
    format: _Format = None,  # noqa: A002 - the name in the query
) -> Any:
    """Return how many requests were denied, by rule, subject, tenant, user, endpoint or time.

    It counts the decision log, which has every denial unless more are made than it can keep.
    `outcome` counts other decisions: those that a rule in shadow mode would have denied, or the
    sample of allowed requests. CSV has no pages: all groups are sent.
    """
    records, outcome = recorder.records, selection.wanted.outcome or "denied"
    wanted = replace(selection.wanted, outcome=outcome)
    step_s = step_of((selection.to - selection.from_).total_seconds()) if by == "time" else None
    if by == "time":
        steps = await records.timeline(wanted, step_s or 1)
        total = sum(count for _, count in steps)
        rows = [GroupRow("", count, at_us, total, len(steps)) for at_us, count in steps]
        if is_csv(request, format):
            return await _csv("denials", ("time", "requests"), _once(rows), _step_cells)
    elif is_csv(request, format):
        pages = records.all_groups(wanted, by)
        return await _csv("denials", (by, "requests", "last"), pages, _group_cells)
    else:
        rows = await records.groups(wanted, by, limit + 1, _group_of(after))
    following = None
    if by != "time" and len(rows) > limit:
        following = cursor_of(rows[limit - 1].requests, rows[limit - 1].name)
        link_on(request, response, "/denials", selection, after=following)
        rows = rows[:limit]
    return DenialsOut(
        by=by,
        outcome=outcome,
        items=[_group(row, by) for row in rows],
        total=rows[0].total if rows else 0,
        groups=rows[0].names if rows else 0,
        seconds=step_s,
        from_=selection.from_,
        to=selection.to,
        next=following,
    )


def step_of(seconds: float) -> int:
    """Return the step of time that divides a period into at most STEPS_MAX parts, in seconds.

    >>> step_of(900), step_of(3_600), step_of(86_400), step_of(7 * 86_400)
    (10, 30, 900, 7200)
    """
    for step in STEPS:
        if seconds <= step * STEPS_MAX:
            return step
    return -(-int(seconds) // (STEPS_MAX * STEPS[-1])) * STEPS[-1]


def _group_of(cursor: str | None) -> GroupRow | None:
    if cursor is None:
        return None
    requests, name = key_of(cursor, int, str)
    return GroupRow(name, requests, 0, 0, 0)


def _group(row: GroupRow, by: GroupBy | Literal["time"]) -> DenialGroupOut:
    time = EPOCH + timedelta(microseconds=row.last_us)
    return DenialGroupOut(
        value=None if by in {"subject", "time"} else row.name or None,
        subject=parts_of(row.name) if by == "subject" else None,
        start=time if by == "time" else None,
        requests=row.requests,
        last=None if by == "time" else time,
    )


def _group_cells(row: GroupRow) -> tuple[Any, ...]:
    last = _utc(EPOCH + timedelta(microseconds=row.last_us))
    return (", ".join(parts_of(row.name)), row.requests, last)


def _step_cells(row: GroupRow) -> tuple[Any, ...]:
    return (_utc(EPOCH + timedelta(microseconds=row.last_us)), row.requests)


async def _once(rows: list[GroupRow]) -> AsyncIterator[list[GroupRow]]:
    yield rows


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
            count=row.most,
            error=0,
            per_second=round(row.most / seconds, 6),
        )
        for row in await recorder.records.most(selection.wanted, by, limit, others=False)
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
    """Return the penalties that the store has too: another process may have ended some."""
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
