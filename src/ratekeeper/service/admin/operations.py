"""The code that all operations of the admin API use: authentication, bodies, conditions and pages.

A request passes these steps in order, each before the next one costs anything. The token is
checked before the body is read. `http/incoming.py` bounds and reads the body. Types and JSON are
those of the check API (`http/bodies.py`).

Conditions are those of HTTP. `If-Match: "v12"` makes a change only if version 12 is the newest,
`If-None-Match: *` only if there is no version yet. `If-None-Match: "v12"` on a GET asks for a newer
version.

A rule document has its own JSON schema. `RULES` marks the places where the OpenAPI document refers
to it: a rule, an override, limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes, urlencode

from fastapi import Depends, Header, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.types import Scope

from ratekeeper.control.entries import EntryChange, check_signature
from ratekeeper.control.repository import Kind, Version
from ratekeeper.control.schema import REASON_LENGTH_MAX
from ratekeeper.core.errors import ConfigError, quoted, show
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.entries import Entry, EntryKind
from ratekeeper.service.admin.control import (
    ChangeRequest,
    ControlPlane,
    CurrentRules,
    VersionCondition,
    etag_of,
)
from ratekeeper.service.admin.problems import (
    MEDIA_TYPE,
    AdminError,
    ApiOutput,
    NotModified,
    body_error,
    token_error,
)
from ratekeeper.service.http.bodies import (
    YAML_TYPES,
    BodyRejected,
    check_json_type,
    is_json,
    media_type,
    problem_at,
    strict_json,
    unknown_field,
    unsupported,
    utf8_text,
)
from ratekeeper.service.http.incoming import body_bytes_max, declared_bytes
from ratekeeper.service.http.quotas import reason_text
from ratekeeper.service.http.tokens import CALLER, Permission, Token, TokenRejection

# ── Values ───────────────────────────────────────────────────────────────────────────────────────

# A member of a schema; its value is a name in the schema of a rule document.
RULES: Final = "x-rules"

PAGE_ROWS: Final = 50
PAGE_ROWS_MAX: Final = 200
# In a list; the diff of the first version is its whole document.
DIFF_LENGTH_MAX: Final = 10_000
NUMBER_MAX: Final = 2**31 - 1
TEXT_LENGTH_MAX: Final = 2_000
ATTRIBUTES_MAX: Final = 64
# No window is longer.
TTL_SECONDS_MAX: Final = 366 * 86_400

LimitsData = Annotated[Any, WithJsonSchema({RULES: "limits"})]
LimitData = Annotated[Any, WithJsonSchema({RULES: "oneLimit"})]
RuleData = Annotated[dict[str, Any], WithJsonSchema({RULES: "rule"})]
RuleBody = Annotated[dict[str, Any], WithJsonSchema({RULES: "ruleBody"})]
RulePatch = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
OverrideData = Annotated[dict[str, Any], WithJsonSchema({RULES: "override"})]


def _unsigned(override: dict[str, Any]) -> dict[str, Any]:
    """Reject an author in a body: it would be shown as the author of the override."""
    if "author" in override:
        raise PydanticCustomError("author", "`author` is the name of the token; leave it out")
    return override


OverrideBody = Annotated[
    dict[str, Any], AfterValidator(_unsigned), WithJsonSchema({RULES: "override"})
]

Text = Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]
Reason = Annotated[
    str | None, Field(default=None, description="Why, for the audit log.", max_length=1_000)
]
NextBefore = Annotated[
    int | None, Field(description="`before` for the next page; null if this is the last one.")
]
NextOffset = Annotated[
    int | None, Field(description="`offset` for the next page; null if this is the last one.")
]
Total = Annotated[int, Field(description="The number of entries on all pages.")]


class VersionOut(ApiOutput):
    """One version of the rules."""

    number: int = Field(examples=[12])
    author: str = Field(examples=["ann"])
    reason: str
    created_at: datetime
    kind: str = Field(description="The kind of change.", examples=["put-rule"])
    base: int | None = Field(description="The version that it changes; null for the first one.")
    change: int | None = Field(
        default=None, description="The number of the change, if it changed an entry and no rule."
    )
    key: str | None = Field(
        default=None,
        description="The entry that it changed: a subject, or the id of an override.",
        examples=["ov_5f2c91d07b3a"],
    )


CONDITION_LENGTH_MAX: Final = 1_000
# The member of an operation in the OpenAPI document that names the role.
ROLE: Final = "x-role"
# Set for operations that accept more than JSON and check the type themselves.
ANY_CONTENT: Final = "x-any-content"
# The type of a patch of one rule.
MERGE_PATCH: Final = "application/merge-patch+json"
# The beginning of names in a query that the operation reads itself.
QUERY_PREFIX: Final = "x-query-prefix"
_NO_BODY: Final = (
    "the body: this operation has none; leave it out, and send a reason as the header X-Reason"
)

# The pattern of a condition, for the OpenAPI document.
_ETAGS: Final = r'^(\*|(W/)?"[^"]*"(, *(W/)?"[^"]*")*)$'
_FIRST: Final = "(`If-None-Match: *`: only if there is no version yet.)"
# A character has up to four bytes in UTF-8, and each arrives as a character of Latin-1.
REASON_BYTES_MAX: Final = 4 * REASON_LENGTH_MAX
_ETAG: Final = re.compile(r'\s*(W/)?"([^"]*)"\s*')
_OURS: Final = re.compile(r"v(0|[1-9][0-9]{0,9})(?:-[0-9]{1,19})?")

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class AdminRoute(APIRoute):
    """A route that requires a token."""

    def get_route_handler(self) -> _Handler:
        """Return FastAPI's handler, behind the check of the token."""
        handle = super().get_route_handler()
        extra = self.openapi_extra or {}
        needed: Permission = extra.get(ROLE, "read" if self.methods == {"GET"} else "admin")
        parameters = QueryNames.of(self.dependant, extra.get(QUERY_PREFIX))
        any_content = extra.get(ANY_CONTENT, False)
        wants_json = self.body_field is not None and not any_content
        optional = self.body_field is not None and not self.body_field.field_info.is_required()
        patches = self.methods == {"PATCH"}
        method = next(iter(self.methods or ()))
        bytes_max = body_bytes_max(method, f"{PREFIX}{self.path.removeprefix(PREFIX)}")

        async def authorized(request: Request) -> Response:
            tokens = control_of(request).context.tokens
            caller: Token | None = request.scope.get(CALLER)
            if caller is None:
                found = tokens.permitted(request.headers.get("authorization"), needed)
            else:
                found = tokens.with_permission(caller, needed)
            if isinstance(found, TokenRejection):
                raise token_error(found)
            request.state.token = found
            _check_url(request)
            parameters.check(request)
            scope = _as_json(request, patch=patches) if wants_json else request.scope
            limited = _LimitedRequest(request, scope, bytes_max)
            if wants_json and not optional and not await limited.body():
                await limited.json()  # raises: FastAPI would report a missing field
            if not wants_json and not any_content and await _has_body(request):
                raise ConfigError(_NO_BODY)
            response = await handle(limited)
            response.headers.setdefault("Cache-Control", "no-cache")
            return response

        return authorized


class QueryNames(NamedTuple):
    """The names that the query of an operation may have. Others are rejected, as are doubles.

    FastAPI ignores a name that it does not know. Then `?forced=true` would not force a change, and
    `?tier=a&tiers=b` would list the wrong subjects.
    """

    single: frozenset[str]
    several: frozenset[str]
    """Names that may be given more than once."""
    prefix: str | None
    """Every name that begins with this is known."""

    @classmethod
    def of(cls, dependant: Dependant, prefix: str | None = None) -> QueryNames:
        """Return the names of an operation and its dependencies."""
        single: set[str] = set()
        several: set[str] = set()
        found = [dependant]
        for each in found:
            found += each.dependencies
            for field in each.query_params:
                is_list = "list[" in str(field.field_info.annotation)
                (several if is_list else single).add(field.alias)
        return cls(frozenset(single), frozenset(several), prefix)

    def check(self, request: Request) -> None:
        """Raise ConfigError for a name that is unknown or given twice."""
        seen: set[str] = set()
        for name, _ in request.query_params.multi_items():
            if name in seen and name not in self.several:
                message = f"{quoted(name)} is given twice; give it once"
                raise ConfigError(problem_at("the query", "", message))
            seen.add(name)
            if name in self.single or name in self.several:
                continue
            if self.prefix and name.startswith(self.prefix) and name != self.prefix:
                continue
            known = sorted(self.single | self.several)
            shown = [*known, f"{self.prefix}…"] if self.prefix else known
            raise ConfigError(problem_at("the query", "", unknown_field(name, shown)))


class _LimitedRequest(Request):
    """A request whose body has a maximum size, and whose JSON is parsed strictly."""

    def __init__(self, request: Request, scope: Scope, bytes_max: int) -> None:
        super().__init__(scope, request.receive)
        self._bodies = control_of(request).context.bodies
        self._bytes_max = bytes_max

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            headers = dict(self.scope["headers"])
            try:
                self._body = await self._bodies.read_in_time(self.receive, headers, self._bytes_max)
            except BodyRejected as error:
                raise body_error(error) from None
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        try:
            return strict_json(body)
        except BodyRejected as error:
            raise body_error(error) from None


async def _has_body(request: Request) -> bool:
    """Return True if a request has a body. Reads no more than the beginning."""
    length = declared_bytes(dict(request.scope["headers"]))
    if length >= 0 or "transfer-encoding" not in request.headers:
        return length > 0
    message = await request.receive()
    return bool(message.get("body") or message.get("more_body"))


def _check_url(request: Request) -> None:
    """Reject a URL that the framework would read as another one.

    It would replace bytes that are not UTF-8, and drop a line break at the end of a path: then
    `DELETE /rules/orders%0A` would remove the rule `orders`.
    """
    if "\n" in request.scope["path"]:
        raise ConfigError("the path: a line break (%0A) is in no name; leave it out")
    parts = (
        ("path", request.scope.get("raw_path") or b""),
        ("query", request.scope.get("query_string") or b""),
    )
    for name, raw in parts:
        try:
            # PostgreSQL stores no NUL, so no name has one.
            if "\0" in unquote_to_bytes(raw).decode():
                raise ConfigError(f"the {name}: a NUL character (%00) is in no name; leave it out")
        except UnicodeDecodeError as error:
            raise AdminError(
                400, "NOT_UTF8", f"the URL's {name} is not UTF-8 at byte {error.start + 1}"
            ) from None


def _as_json(request: Request, *, patch: bool) -> Scope:
    """Return the scope with the type of JSON. Raises AdminError if the body has another type.

    A `patch` is a merge patch (RFC 7396). Other kinds of patches, which are JSON too, are rejected.
    """
    try:
        check_json_type(_content_type(request))
        kind = media_type(_content_type(request))
        if patch and kind.endswith("+json") and kind != MERGE_PATCH:
            raise unsupported(kind, MERGE_PATCH)
    except BodyRejected as error:
        found = body_error(error)
        if patch and found.status_code == 415:
            found.headers = {**(found.headers or {}), "Accept-Patch": MERGE_PATCH}
        raise found from None
    # FastAPI parses a body only if it has this type.
    headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
    return {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _content_type(request: Request) -> bytes:
    return request.headers.get("content-type", "").encode("latin-1")


# ── Documents ────────────────────────────────────────────────────────────────────────────────────


async def text_of(request: Request) -> str:
    """Return the body as text: a document in YAML or JSON. Raises AdminError."""
    kind = media_type(_content_type(request))
    raw = await request.body()
    try:
        if kind not in YAML_TYPES and not is_json(kind):
            raise unsupported(kind, "application/yaml or application/json")
        if raw:
            return utf8_text(raw)
    except BodyRejected as error:
        raise body_error(error) from None
    raise AdminError(422, "INVALID_DOCUMENT", "the document is empty; send it as the body")


def wants_yaml(accept: str) -> bool:
    """Return True if the Accept header prefers YAML to JSON.

    >>> wants_yaml("application/yaml"), wants_yaml("*/*"), wants_yaml("text/yaml;q=0.1, */*")
    (True, False, False)
    """
    yaml, json_ = -1.0, -1.0
    for part in accept[:CONDITION_LENGTH_MAX].lower().split(","):
        kind, _, parameters = part.strip().partition(";")
        weight = _weight(parameters)
        if kind.strip() in YAML_TYPES:
            yaml = max(yaml, weight)
        elif kind.strip() in {"application/json", "application/*", "*/*"}:
            json_ = max(json_, weight)
    return yaml > 0 and yaml >= json_


def _weight(parameters: str) -> float:
    for each in parameters.split(";"):
        name, _, value = each.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


# ── Conditions ───────────────────────────────────────────────────────────────────────────────────


def tags_of(header: str, *, weak: bool = False) -> list[str] | None:
    """Return the entity tags of a condition, without quotes; None for `*`. Raises AdminError.

    Weak tags are left out unless `weak` is True.

    >>> tags_of('"v1", W/"v2", "v3"'), tags_of("*")
    (['v1', 'v3'], None)
    """
    if header.strip() == "*":
        return None
    found: list[str] = []
    position = 0
    while position < len(header) or not position:
        tag = _ETAG.match(header, position)
        end = tag.end() if tag else position
        if (
            tag is None
            or len(header) > CONDITION_LENGTH_MAX
            or header[end : end + 1] not in {"", ","}
        ):
            raise AdminError(
                400, "INVALID_CONDITION", f'{show(header)} is not a list of ETags such as "v12"'
            )
        if weak or not tag[1]:
            found.append(tag[2])
        position = end + 1
    return found


def condition_of(if_match: str | None, if_none_match: str | None) -> VersionCondition | None:
    """Return the condition of a change; None if it has none. Raises AdminError."""
    if if_none_match is not None:
        if if_match is not None or tags_of(if_none_match) is not None:
            raise AdminError(
                400,
                "INVALID_CONDITION",
                "a change takes If-Match, or If-None-Match: * if there must be no version yet",
            )
        return VersionCondition(frozenset({0}))
    if if_match is None:
        return None
    tags = tags_of(if_match)
    if tags is None:
        return VersionCondition(any_version=True)
    ours = (int(tag[1]) for tag in map(_OURS.fullmatch, tags) if tag)
    return VersionCondition(frozenset(number for number in ours if number <= NUMBER_MAX))


def check_modified(etag: str, if_none_match: str | None) -> None:
    """Raise NotModified if the caller already has this version.

    Weak tags match too, as HTTP requires for a GET.
    """
    if if_none_match is None:
        return
    tags = tags_of(if_none_match, weak=True)
    if tags is None or etag.strip('"') in tags:
        raise NotModified(etag)


def if_newer(found: CurrentRules, if_none_match: str | None) -> CurrentRules:
    """Return the rules if the caller has another version. Raises NotModified."""
    check_modified(found.etag, if_none_match)
    return found


# ── Dependencies ─────────────────────────────────────────────────────────────────────────────────


def control_of(request: Request) -> ControlPlane:
    """Return the control plane of the application."""
    control: ControlPlane = request.app.state.control
    return control


def _signed(
    request: Request,
    x_reason: Annotated[
        str | None,
        Header(
            description="The reason for the audit log, if the body has none; in UTF-8.",
            max_length=REASON_BYTES_MAX,
            json_schema_extra={"maxLength": REASON_LENGTH_MAX},
        ),
    ] = None,
) -> ChangeRequest:
    # Headers are decoded as Latin-1, and people type UTF-8.
    signed = ChangeRequest(
        request.state.token.name, reason_text((x_reason or "").encode("latin-1"))
    )
    # Also a reason that the body replaces.
    check_signature(signed.author, signed.reason)
    return signed


Signed = Annotated[ChangeRequest, Depends(_signed)]


def _asked(
    signed: Signed,
    force: Annotated[
        bool, Query(description="Make the change even if it is unsafe; the audit log shows it.")
    ] = False,
    if_match: Annotated[
        str | None,
        Header(
            description=f"Make the change only if this is the newest version. {_FIRST}",
            examples=['"v12"', "*"],
            json_schema_extra={"pattern": _ETAGS},
        ),
    ] = None,
    if_none_match: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> ChangeRequest:
    return signed._replace(force=force, condition=condition_of(if_match, if_none_match))


Control = Annotated[ControlPlane, Depends(control_of)]
Change = Annotated[ChangeRequest, Depends(_asked)]
IfNoneMatch = Annotated[
    str | None,
    Header(
        description="304 if this is still the newest version.",
        examples=['"v12"'],
        json_schema_extra={"pattern": _ETAGS},
    ),
]


# ── Replies ──────────────────────────────────────────────────────────────────────────────────────

PREFIX: Final = "/v1/admin"

Rows = Annotated[int, Query(ge=1, le=PAGE_ROWS_MAX, description="Entries per page.")]
Offset = Annotated[int, Query(ge=0, le=NUMBER_MAX, description="Number of entries to skip.")]
Before = Annotated[
    int | None, Query(ge=1, le=NUMBER_MAX, description="Only entries below this number.")
]
ROWS: Final = PAGE_ROWS

_MEANING: Final[dict[int, str]] = {
    304: "The caller has the newest version.",
    400: "The request is invalid; the detail says where.",
    401: "The token is missing or unknown.",
    403: "The token does not permit this.",
    404: "It does not exist.",
    408: "The body did not arrive in time.",
    409: "The change is unsafe (repeat it with `?force=true`), or the rules come from a file.",
    412: "The newest version is not the expected one; the ETag names it.",
    413: "The body is too large.",
    415: "The type of the body is not supported.",
    422: "A rule document is invalid (`problems` says where), or the cost can never fit.",
    429: "Another operation of this kind is running in this worker.",
    503: "The database or the store is unavailable.",
}
READ: Final = (400, 401, 403, 503)
WRITE: Final = (*READ, 408, 409, 412, 413, 415, 422)

_ETAG_HEADER: Final = {
    "ETag": {
        "description": "The newest version of the rules, for `If-Match`.",
        "schema": {"type": "string"},
        "example": '"v12"',
    }
}
_LINK_HEADER: Final = {
    "Link": {"description": "The next page, if there is one.", "schema": {"type": "string"}}
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of an operation."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted(set(statuses)):
        found[status] = {"description": _MEANING[status]}
        if status >= 400:
            found[status]["content"] = content
    if 412 in found:
        found[412]["headers"] = _ETAG_HEADER
    return found


def good_responses(
    *statuses: int, headers: Mapping[str, Any] | None = None, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation: the headers of the good one, and the errors."""
    return {status: {"headers": dict(headers or {})}, **error_responses(*statuses)}


def change_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation that makes a version."""
    return good_responses(*WRITE, *statuses, headers=_ETAG_HEADER)


def rules_responses(*statuses: int, paged: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation that reads the rules, with 304."""
    headers = {**_ETAG_HEADER, **(_LINK_HEADER if paged else {})}
    return good_responses(*READ, 304, *statuses, headers=headers)


def page_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation with pages."""
    return good_responses(*READ, *statuses, headers=_LINK_HEADER)


def version_out(version: Version) -> VersionOut:
    """Return a version without its text."""
    return VersionOut(
        number=version.number,
        author=version.author,
        reason=version.reason,
        created_at=version.created_at,
        kind=version.kind,
        base=version.base,
    )


def version_reply(response: Response, version: Version) -> VersionOut:
    """Return the reply to a change: the version that is now in force."""
    response.headers["ETag"] = etag_of(version.number)
    return version_out(version)


async def change_reply(
    response: Response, control: ControlPlane, made: Version | EntryChange
) -> VersionOut:
    """Return the reply to a change of the document or of an entry beside it."""
    if isinstance(made, Version):
        return version_reply(response, made)
    number = await control.number() or 0
    response.headers["ETag"] = etag_of(number, made.seq)
    return VersionOut(
        number=number,
        author=made.author,
        reason=made.reason,
        created_at=made.created_at,
        kind=made.kind,
        base=number or None,
        change=made.seq,
        key=made.key,
    )


class RuleEditor(NamedTuple):
    """Makes the change of a request, and replies with the new version."""

    response: Response
    control: ControlPlane
    change: ChangeRequest

    async def edit(
        self, kind: Kind, edit: Callable[[Document], Document], reason: str | None = None
    ) -> VersionOut:
        """Make a new version. `reason` is that of the body, if it has one."""
        version = await self.control.edit(self.change.because(reason), kind, edit)
        return version_reply(self.response, version)

    async def put(self, entry: Entry, reason: str | None = None) -> VersionOut:
        """Put an entry beside the document."""
        made = await self.control.put_entry(self.change.because(reason), entry)
        return await change_reply(self.response, self.control, made)

    async def remove(
        self, kind: EntryKind, keys: Sequence[str], edit: Callable[[Document], Document]
    ) -> VersionOut:
        """Remove entries, and with `edit` the one that stands in the document."""
        made = await self.control.remove_entries(self.change, kind, keys, edit)
        return await change_reply(self.response, self.control, made)


def _editor(response: Response, control: Control, change: Change) -> RuleEditor:
    return RuleEditor(response, control, change)


Editor = Annotated[RuleEditor, Depends(_editor)]

_Item = TypeVar("_Item")


class PageRows(NamedTuple, Generic[_Item]):
    """The rows of one page, the number of all rows, and the next offset."""

    items: list[_Item]
    total: int
    next: int | None


def page_of(
    response: Response, path: str, rows: Sequence[_Item], limit: int, offset: int, **query: Any
) -> PageRows[_Item]:
    """Return one page of the rows, and add the link to the next page."""
    following = offset + limit if offset + limit < len(rows) else None
    if following is not None:
        link_next(response, path, limit=limit, offset=following, **query)
    return PageRows(list(rows[offset : offset + limit]), len(rows), following)


def link_next(response: Response, path: str, **query: Any) -> None:
    """Add the link to the next page."""
    given = {name: value for name, value in query.items() if value is not None}
    response.headers["Link"] = f'<{PREFIX}{path}?{urlencode(given)}>; rel="next"'
