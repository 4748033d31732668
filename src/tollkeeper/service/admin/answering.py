"""What the operations of the admin API have in common: their refusals, pages and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

from fastapi import Query, Response

from tollkeeper.control.repository import Version
from tollkeeper.service.admin.models import NUMBER_MAX, PAGE_ROWS, PAGE_ROWS_MAX, VersionOut
from tollkeeper.service.admin.plane import etag_of
from tollkeeper.service.admin.problems import MEDIA_TYPE

PREFIX: Final = "/v1/admin"

Rows = Annotated[int, Query(ge=1, le=PAGE_ROWS_MAX, description="So many at a time.")]
Offset = Annotated[int, Query(ge=0, le=NUMBER_MAX, description="So many are passed over.")]
Before = Annotated[int | None, Query(ge=1, le=NUMBER_MAX, description="Only those below this.")]
ROWS: Final = PAGE_ROWS

_MEANING: Final[dict[int, str]] = {
    304: "It is still the version that the caller knows.",
    400: "The URL, the body or a condition cannot be read.",
    401: "No token, or one that is not known.",
    403: "The token may not do this.",
    404: "There is no such thing.",
    408: "The body does not arrive.",
    409: "It is unsafe (ask again with `?force=true`), or the rules come from a file.",
    412: "There is another version than the expected one; the ETag names it.",
    413: "The body is too large.",
    415: "The body is of a type that is not understood here.",
    422: "It can be read and is not right; `problems` says where.",
    503: "The database or the store cannot be asked.",
}
READ: Final = (400, 401, 403, 422, 503)
WRITE: Final = (*READ, 408, 409, 412, 413, 415)

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


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of an operation, described."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted(set(statuses)):
        found[status] = {"description": _MEANING[status]}
        if status >= 400:
            found[status]["content"] = content
    if 412 in found:
        found[412]["headers"] = _ETAG_HEADER
    return found


def described(
    *statuses: int, headers: Mapping[str, Any] | None = None, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """The responses of an operation: headers of the good one, and the refusals."""
    return {status: {"headers": dict(headers or {})}, **refusals(*statuses)}


def written(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of an operation that makes a version."""
    return described(*WRITE, *statuses, headers=_ETAG_HEADER)


def versioned(*statuses: int, paged: bool = False) -> dict[int | str, dict[str, Any]]:
    """The responses of an operation that reads the rules, and may say that they are the same."""
    headers = {**_ETAG_HEADER, **(_LINK_HEADER if paged else {})}
    return described(*READ, 304, *statuses, headers=headers)


def paged(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of an operation that gives pages of what never changes."""
    return described(*READ, *statuses, headers=_LINK_HEADER)


def version_out(version: Version) -> VersionOut:
    """A version without its text."""
    return VersionOut(
        number=version.number,
        author=version.author,
        reason=version.reason,
        created_at=version.created_at,
        kind=version.kind,
        base=version.base,
    )


def made(response: Response, version: Version) -> VersionOut:
    """What is answered to a change: the version that is in force now."""
    response.headers["ETag"] = etag_of(version.number)
    return version_out(version)


_Item = TypeVar("_Item")


class Shown(NamedTuple, Generic[_Item]):
    """The rows of one page."""

    items: list[_Item]
    total: int
    next: int | None


def page_of(
    response: Response, path: str, rows: Sequence[_Item], limit: int, offset: int, **query: Any
) -> Shown[_Item]:
    """One page of rows that are all at hand, and the link to the next."""
    following = offset + limit if offset + limit < len(rows) else None
    if following is not None:
        link_next(response, path, limit=limit, offset=following, **query)
    return Shown(list(rows[offset : offset + limit]), len(rows), following)


def link_next(response: Response, path: str, **query: Any) -> None:
    """Say where the next page is."""
    given = {name: value for name, value in query.items() if value is not None}
    response.headers["Link"] = f'<{PREFIX}{path}?{urlencode(given)}>; rel="next"'
