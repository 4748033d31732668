"""How records are asked for: by whom, about whom, from when to when, and from where on."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response
from pydantic import WithJsonSchema

from tollkeeper.core.errors import show
from tollkeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR
from tollkeeper.history.events import SubjectMode, recorded_subject
from tollkeeper.history.reading import RecordFilter, UsageRow
from tollkeeper.history.recorder import Recorder
from tollkeeper.service.admin.answering import PREFIX
from tollkeeper.service.admin.asking import ROLE, AdminRoute, PlaneOf, plane_of
from tollkeeper.service.admin.problems import Refusal, refusal_of
from tollkeeper.service.http.tokens import Token, TokenRejection

# What is asked for where nothing is said.
LAST: Final = timedelta(days=1)
CSV: Final = "text/csv"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# RFC 3339. A plus that was not escaped in a URL is a space when it gets here.
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)(Z|[+\- ]\d\d:\d\d)", re.IGNORECASE
)

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OwnRoute(AdminRoute):
    """For everybody who may read, and for those with a scope, who see what is in it."""

    def get_route_handler(self) -> _Handler:
        """The handler behind the token, for scopes too."""
        shown = self.openapi_extra
        # A scope can be held to here, as where quotas are asked for; see `_viewer` for the rest.
        self.openapi_extra = {**(shown or {}), ROLE: "quota"}
        try:
            return super().get_route_handler()
        finally:
            self.openapi_extra = shown


def _viewer(request: Request) -> Token:
    """Who looks. A token that may check only, or none, may not look at what others did."""
    token: Token = request.state.token
    if token.role == "check":
        tokens = plane_of(request).node.tokens
        refused = tokens.permitted(request.headers.get("authorization"), "read")
        if isinstance(refused, TokenRejection):
            raise refusal_of(refused)
    return token


def _recorder(plane: PlaneOf) -> Recorder:
    recorder: Recorder | None = getattr(plane.node, "recorder", None)
    if recorder is None:
        raise Refusal(
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
        description="Who: `user:42`. Of one that is counted by several fields, each part: "
        "`subject=tenant:acme&subject=user:42`.",
        max_length=PARTS_MAX,
        examples=["user:42"],
    ),
    # In a query, a text is a list of one.
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {**_LIST_SCHEMA, "items": _TEXT_SCHEMA}]}),
]
_Rule = Annotated[_Text | None, Query(description="The rule's id.")]
Outcome = Annotated[Literal["allowed", "denied"] | None, Query()]
_When = Annotated[
    str | None,
    Query(
        alias="from",
        description="From this time, with its zone, or this date (UTC). Without it, the last day.",
        examples=["2026-11-15T00:00:00Z"],
        json_schema_extra={"format": "date-time"},
    ),
]
_Until = Annotated[
    str | None,
    Query(
        alias="to",
        description="Before this time, or this date (UTC); without it, now.",
        examples=["2026-11-16T00:00:00Z"],
        json_schema_extra={"format": "date-time"},
    ),
]


class Asked(NamedTuple):
    """Which records, of those that the viewer may see."""

    wanted: RecordFilter
    from_: datetime
    to: datetime


def _asked(
    viewer: ViewerOf,
    subject: _Subject = None,
    rule: _Rule = None,
    from_: _When = None,
    to: _Until = None,
) -> Asked:
    until = datetime.now(UTC) if to is None else moment(to, "to")
    since = _day_before(until) if from_ is None else moment(from_, "from")
    if since >= until:
        raise Refusal(
            422,
            "INVALID_TIME",
            f"from ({since.isoformat()}) is not before to ({until.isoformat()})",
        )
    wanted = RecordFilter(
        _microseconds(since),
        _microseconds(until),
        subject=None if subject is None else SEPARATOR.join(subject),
        rule=rule,
        scope=viewer.scope,
    )
    return Asked(wanted, since, until)


AskedFor = Annotated[Asked, Depends(_asked)]


def moment(text: str, name: str) -> datetime:
    """A moment of RFC 3339, with its zone; or a date, for its first moment in UTC. Raises Refusal.

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
        with suppress(ValueError, OverflowError):  # there is no 30th of February
            return datetime.fromisoformat(f"{found[1].upper()}{zone}").astimezone(UTC)
    raise Refusal(
        422,
        "INVALID_TIME",
        f"{name}={show(text)} is neither a date nor a date and time with a zone; for example "
        f"{name}=2026-11-15, 2026-11-15T14:30:00Z, or 2026-11-15T15:30:00%2B01:00",
    )


def _day_before(until: datetime) -> datetime:
    """A day before, but not before the first that there is a date for."""
    return until - min(LAST, until - datetime.min.replace(tzinfo=UTC))


def _microseconds(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def link_on(request: Request, response: Response, path: str, asked: Asked, **on: str) -> None:
    """Say where the next page is: the same question, about the same time, from there on."""
    given = {"from": asked.from_.isoformat(), "to": asked.to.isoformat(), **on}
    same = [pair for pair in request.query_params.multi_items() if pair[0] not in given]
    query = urlencode([*same, *given.items()])
    response.headers["Link"] = f'<{PREFIX}{path}?{query}>; rel="next"'


def wants_csv(accept: str) -> bool:
    """Is CSV asked for, and JSON not?

    >>> wants_csv("text/csv"), wants_csv("*/*"), wants_csv("application/json, text/csv;q=0.5")
    (True, False, False)
    """
    kinds = [each.partition(";")[0].strip().lower() for each in accept.split(",")]
    return CSV in kinds and "application/json" not in kinds


def cursor_of(row: UsageRow) -> str:
    """What names a row of usage, so that a page can begin after it."""
    key = [row.start_s, row.step_s, row.subject, row.rule]
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def row_of(cursor: str | None) -> UsageRow | None:
    """The row that a cursor names. Raises Refusal."""
    if cursor is None:
        return None
    with suppress(ValueError, TypeError, RecursionError):
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        start_s, step_s, subject, rule = json.loads(base64.b64decode(padded, b"-_", validate=True))
        f"{subject}{rule}".encode()  # half of a pair is no text
        numbers = all(type(each) is int and 0 <= each < 2**40 for each in (start_s, step_s))
        texts = all(isinstance(each, str) and "\0" not in each for each in (subject, rule))
        if numbers and texts and step_s < 2**31:
            return UsageRow(start_s, step_s, subject, rule, 0, 0, 0)
    raise Refusal(
        422, "INVALID_CURSOR", "after is not what `next` of the page before said; leave it out"
    )


def within(subject: str, scope: Mapping[str, str], how: SubjectMode) -> bool:
    """Has a subject all parts of a scope? `how` it is told decides what the parts look like.

    >>> within("tenant:acme\\x1fuser:42", {"tenant": "acme"}, "plain")
    True
    >>> within("tenant:acme-2", {"tenant": "acme"}, "plain")
    False
    """
    parts = subject.split(SEPARATOR)
    return all(recorded_subject(f"{name}:{value}", how) in parts for name, value in scope.items())
