"""What went wrong, as problem JSON (RFC 9457): what, where, and what would be right.

Every refusal has the same members: `type`, `title`, `status`, `detail`, and `error` with a code for
programs. A document that is wrong lists its `problems` with their places, a change that is unsafe
its `findings`, a condition that failed the `current` version, which the ETag names too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette import exceptions as starlette
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tollkeeper.control.edits import NotFound
from tollkeeper.core.errors import (
    CapacityError,
    ConfigError,
    SafetyFinding,
    StoreError,
    StoreTimeout,
    TollkeeperError,
    UnsafeChange,
    VersionConflict,
    show,
)
from tollkeeper.rules.document.reading import DocumentError
from tollkeeper.rules.document.tree import DocumentProblem
from tollkeeper.service.admin.plane import NoDatabase, etag_of
from tollkeeper.service.http.tokens import TokenRejection
from tollkeeper.web import answers

MEDIA_TYPE: Final = answers.PROBLEM_CONTENT_TYPE
# Of what is wrong with a document, or unsafe in it; `detail` says how many there are.
LISTED_MAX: Final = 100
RETRY_AFTER_S: Final = 1

log = logging.getLogger("tollkeeper.admin")


class Refusal(HTTPException):
    """A request that is answered with a problem, whatever it asked for."""

    def __init__(
        self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        # FastAPI lets its own kind of error pass where it reads a body, and hides all others.
        super().__init__(status, detail, dict(headers or {}))
        self.code = code


class NotModified(Exception):
    """There is nothing newer than what the one who asks has: no problem, but an end."""

    def __init__(self, etag: str) -> None:
        self.etag = etag
        super().__init__(etag)


def refusal_of(refused: TokenRejection) -> Refusal:
    """Of a token that may not, or of none."""
    headers = {"WWW-Authenticate": refused.challenge} if refused.status == 401 else {}
    return Refusal(refused.status, refused.code, refused.detail, headers)


def problem(
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    """A problem as a response."""
    members = {**answers.problem(status, code, detail), **more}
    answer = answers.problem_answer(members, list((headers or {}).items()))
    return Response(answer.body, answer.status, dict(answer.headers))


def problem_data(each: DocumentProblem) -> dict[str, Any]:
    """One thing that is wrong with a document."""
    return {
        "where": each.where,
        "line": each.line,
        "column": each.column,
        "message": each.message,
    }


def finding_data(each: SafetyFinding) -> dict[str, Any]:
    """One thing that is unsafe in a document."""
    return {
        "code": each.code,
        "where": each.where,
        "rule": each.rule,
        "what": each.what,
        "why": each.why,
        "remedy": each.remedy,
    }


def of_error(error: TollkeeperError, *, conditional: bool) -> Response:
    """What an error of ours means to the one who asked."""
    said = str(error)
    if isinstance(error, DocumentError):
        listed = [problem_data(each) for each in error.problems[:LISTED_MAX]]
        return problem(422, "INVALID_DOCUMENT", said, problems=listed)
    if isinstance(error, NotFound):
        return problem(404, "NOT_FOUND", said)
    if isinstance(error, CapacityError):
        return problem(422, "COST_EXCEEDS_CAPACITY", said)
    if isinstance(error, ConfigError):
        return problem(422, "INVALID_REQUEST", said)
    if isinstance(error, VersionConflict):
        status = 412 if conditional else 409
        headers = {"ETag": etag_of(error.current)}
        return problem(status, "VERSION_CONFLICT", said, headers, current=error.current)
    if isinstance(error, UnsafeChange):
        found = [finding_data(each) for each in error.findings[:LISTED_MAX]]
        detail = f"{said}\nTo make the change all the same, ask again with ?force=true"
        return problem(409, "UNSAFE_CHANGE", detail, findings=found)
    if isinstance(error, NoDatabase):
        return problem(409, "RULES_FROM_FILE", said)
    if isinstance(error, StoreError):
        code = "STORE_TIMEOUT" if isinstance(error, StoreTimeout) else "STORE_UNAVAILABLE"
        return problem(503, code, said, {"Retry-After": str(RETRY_AFTER_S)})
    log.error("an error that has no answer of its own: %s", said)
    return problem(500, "INTERNAL", said)


_CONDITIONS: Final = ("if-match", "if-none-match")


def install(app: FastAPI, prefix: str, routes: Sequence[BaseRoute]) -> None:
    """Have an application answer all that is raised in it with problems.

    `routes` are those under `prefix`, so that who asks with another method is told which there are.
    """

    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)  # noqa: S101 - what it is installed for
        return problem(error.status_code, error.code, str(error.detail), error.headers)

    async def on_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, NotModified)  # noqa: S101 - what it is installed for
        return Response(None, 304, {"ETag": error.etag, "Vary": "Accept"})

    async def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TollkeeperError)  # noqa: S101 - what it is installed for
        conditional = any(name in request.headers for name in _CONDITIONS)
        return of_error(error, conditional=conditional)

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - what it is installed for
        return _of_validation(error.errors())

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, starlette.HTTPException)  # noqa: S101 - same
        return _of_http(error, _methods(request.url.path.removeprefix(prefix), routes))

    async def on_defect(request: Request, _: Exception) -> Response:
        # The server logs the traceback: it is raised again after this.
        log.error("a defect at %s %s", request.method, show(request.url.path))
        return problem(500, "INTERNAL", "a defect of the service; its log says more")

    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(NotModified, on_known)
    app.add_exception_handler(TollkeeperError, on_ours)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(starlette.HTTPException, on_http)
    app.add_exception_handler(Exception, on_defect)


def _of_validation(errors: Sequence[Any]) -> Response:
    """What pydantic found. Not what it was given: that may be a secret, or a megabyte."""
    listed = [
        {"where": _where(each["loc"]), "line": 0, "column": 0, "message": str(each["msg"])}
        for each in errors[:LISTED_MAX]
    ]
    said = "; ".join(f"{each['where']}: {each['message']}" for each in listed[:5])
    return problem(422, "INVALID_REQUEST", said, problems=listed)


def _where(place: Sequence[str | int]) -> str:
    """`body.attributes.region`; a name that is long is cut."""
    return ".".join(str(part)[:100] for part in place)


def _of_http(error: starlette.HTTPException, methods: Sequence[str]) -> Response:
    known = {
        404: ("NOT_FOUND", "there is no such resource; /docs lists what there is"),
        405: ("METHOD_NOT_ALLOWED", "the resource is there, but not this method; see Allow"),
    }
    code, detail = known.get(error.status_code, ("INVALID_REQUEST", str(error.detail)))
    headers = dict(error.headers or {})
    if error.status_code == 405 and methods:
        headers["Allow"] = ", ".join(methods)
    return problem(error.status_code, code, detail, headers)


def _methods(path: str, routes: Sequence[BaseRoute]) -> list[str]:
    """The methods of a path. Starlette tells those of the first route that has it, alone."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            found |= route.methods or set()
    return sorted(found)
