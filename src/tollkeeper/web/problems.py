"""Problem JSON (RFC 9457): what a refusal says in its body, for people and for programs.

A body has the members of the standard (`type`, `title`, `status`, `detail`) and one of our own,
`error`, with a code that does not change, a message and details in numbers. `detail` is a sentence
that its reader can act on. Everything is ASCII on the wire, whatever a rule or a key is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import CapacityError, ConfigError, show
from tollkeeper.core.model import Limit

Code = Literal[
    "RATE_LIMIT_EXCEEDED",
    "BLOCKED",
    "LIMITER_UNAVAILABLE",
    "COST_EXCEEDS_CAPACITY",
    "INVALID_REQUEST",
]

CONTENT_TYPE: Final = "application/problem+json"
# The types that the draft of the RateLimit header fields registers, and the one for all others.
QUOTA_EXCEEDED: Final = "https://iana.org/assignments/http-problem-types#quota-exceeded"
REDUCED_CAPACITY: Final = (
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)
BLANK: Final = "about:blank"

DETAIL_LENGTH_MAX: Final = 1_000
# Beyond, a reader whose numbers are doubles would take it for another number.
_NUMBER_MAX: Final = 2**53


class Answer(NamedTuple):
    """A whole response. Content-Length is for the server to add, which knows what it sends."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    kind: str = BLANK,
    title: str = "",
    details: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The members of a problem, in the order in which a person wants to read them.

    `kind` is its `type`; one that is about:blank has the status's own words for a title.

    >>> problem(404, "NOT_FOUND", "there is no /v2; try /v1")["title"]
    'Not Found'
    """
    text = _clean(detail)
    return {
        "type": kind,
        "title": title or HTTPStatus(status).phrase,
        "status": status,
        "detail": text,
        "error": {"code": code, "message": text, "details": dict(details or {})},
    }


def problem_answer(members: Mapping[str, object], headers: list[tuple[str, str]]) -> Answer:
    """The response that a problem is, with `headers` before those that each one has."""
    body = json.dumps(members, separators=(",", ":")).encode("ascii")
    status = members["status"]
    assert isinstance(status, int), "problem() puts it there"  # noqa: S101 - our own bug
    return Answer(
        status,
        [*headers, ("Content-Type", CONTENT_TYPE), ("Cache-Control", "no-store")],
        body,
    )


def capacity_refusal_of(error: CapacityError) -> Answer:
    """422: the request costs more than its limit can ever hold. No Retry-After: no wait helps."""
    limit = error.limit
    details = {"limit": limit.capacity, "window_seconds": window_seconds_of(limit)}
    if isinstance(error.cost, int) and abs(error.cost) <= _NUMBER_MAX:
        details["cost"] = error.cost
    detail = (
        f"This request costs {show(error.cost)} and its limit holds {limit.capacity} at most, so "
        f"no wait would help; split it into requests that cost at most {limit.capacity} each."
    )
    return problem_answer(problem(422, "COST_EXCEEDS_CAPACITY", detail, details=details), [])


def bad_request_of(error: ConfigError) -> Answer:
    """400: what the client sent cannot be counted, and why."""
    return problem_answer(problem(400, "INVALID_REQUEST", str(error)), [])


def window_seconds_of(limit: Limit) -> float:
    """The window in seconds, whole where it is."""
    whole, rest = divmod(limit.window_ns, NS_PER_SECOND)
    return limit.window_ns / NS_PER_SECOND if rest else whole


def _clean(text: str) -> str:
    """Text that every reader of JSON takes: half a surrogate pair is none, and is written out."""
    if len(text) > DETAIL_LENGTH_MAX:
        text = f"{text[: DETAIL_LENGTH_MAX - 1]}…"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
