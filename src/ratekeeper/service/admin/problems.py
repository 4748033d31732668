"""Errors of the admin API as problem JSON (RFC 9457).

Every error has the same members: `type`, `title`, `status`, `detail`, and `error` with a code for
programs. An invalid document lists its `problems` with their places, an unsafe change its
`findings`, and a failed condition the `current` version, which is also the ETag.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette import exceptions as starlette
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ratekeeper.control.edits import NotFound
from ratekeeper.control.entries import DuplicateId
from ratekeeper.core.errors import (
    ChangeRefused,
    RatekeeperError,
    SafetyFinding,
    UnsafeChange,
    VersionConflict,
    show,
)
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.document.tree import DocumentProblem, below
from ratekeeper.service.admin.control import Busy, NoDatabase, NoRegions, UnusableRules, etag_of
from ratekeeper.service.http.bodies import (
    BodyRejected,
    json_kind,
    missing_field,
    out_of_range,
    problem_at,
    unknown_field,
    wrong_type,
)
from ratekeeper.service.http.context import no_method_detail, no_path_detail
from ratekeeper.service.http.tokens import TokenRejection
from ratekeeper.web import answers

MEDIA_TYPE: Final = answers.PROBLEM_CONTENT_TYPE
# Listed problems or findings of a document; `detail` says how many there are.
LISTED_MAX: Final = 100

log = logging.getLogger("ratekeeper.admin")


class ApiInput(BaseModel):
    """The body of a request: no unknown members, and no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ApiOutput(BaseModel):
    """The body of a reply."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class ErrorOut(ApiOutput):
    """The error, for programs."""

    code: str = Field(examples=["VERSION_CONFLICT"])
    message: str
    details: dict[str, Any] = Field(description="Numbers that belong to the error.")


class PlaceOut(ApiOutput):
    """One problem and its place."""

    where: str = Field(description="A path in the document or the request.", examples=["rules[0]"])
    line: int = Field(description="From 1; 0 if the place has no line.")
    column: int
    message: str


class FindingOut(ApiOutput):
    """A valid part of a document that is most likely a mistake."""

    code: str = Field(examples=["denies-all"])
    where: str = Field(examples=["deny[0]"])
    line: int = Field(0, description="From 1; 0 if the place has no line.")
    column: int = 0
    rule: str = Field(description="The ID of the rule; empty if it concerns no rule.")
    what: str
    why: str
    remedy: str
    is_advice: bool = Field(description="True if the change does not need `force`.")


class ProblemOut(ApiOutput):
    """An error, as in RFC 9457."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Precondition Failed"])
    status: int = Field(examples=[412])
    detail: str
    error: ErrorOut
    problems: list[PlaceOut] | None = Field(None, description="The problems and their places.")
    findings: list[FindingOut] | None = Field(None, description="Why the change is unsafe.")
    current: int | None = Field(
        None, description="The newest version, if another one was expected."
    )


class AdminError(HTTPException):
    """Ends a request with a problem."""

    def __init__(
        self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        # FastAPI hides every other kind of error that is raised while it reads a body.
        super().__init__(status, detail, dict(headers or {}))
        self.code = code


class NotModified(Exception):
    """The caller has the newest version: ends the request with 304."""

    def __init__(self, etag: str) -> None:
        self.etag = etag
        super().__init__(etag)


def token_error(rejection: TokenRejection) -> AdminError:
    """Return the error for a rejected token."""
    headers = {"WWW-Authenticate": rejection.challenge} if rejection.status == 401 else {}
    return AdminError(rejection.status, rejection.code, rejection.detail, headers)


def body_error(rejected: BodyRejected) -> AdminError:
    """Return the error for a request with an invalid body."""
    headers = {"Connection": "close"} if rejected.close else {}
    return AdminError(rejected.status, rejected.code, rejected.detail, headers)


def problem(
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    """Return a problem as a response."""
    members = {**answers.problem(status, code, detail), **more}
    return _response(answers.problem_answer(members, list((headers or {}).items())))


def _response(answer: answers.HttpAnswer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers))


def problem_data(each: DocumentProblem) -> dict[str, Any]:
    """Return the members of a PlaceOut."""
    return {
        "where": each.where,
        "line": each.line,
        "column": each.column,
        "message": each.message,
    }


def finding_data(each: SafetyFinding, line: int = 0, column: int = 0) -> dict[str, Any]:
    """Return the members of a FindingOut."""
    return {
        "code": each.code,
        "where": each.where,
        "line": line,
        "column": column,
        "rule": each.rule,
        "what": each.what,
        "why": each.why,
        "remedy": each.remedy,
        "is_advice": each.is_advice,
    }


def error_response(error: RatekeeperError, *, conditional: bool) -> Response:
    """Return the response to a request that raised an error of Ratekeeper."""
    message = str(error)
    if isinstance(error, DocumentError):
        listed = [problem_data(each) for each in error.problems[:LISTED_MAX]]
        return problem(422, "INVALID_DOCUMENT", message, problems=listed)
    if isinstance(error, NotFound):
        return problem(404, "NOT_FOUND", message)
    if isinstance(error, VersionConflict):
        status = 412 if conditional else 409
        headers = {"ETag": etag_of(error.current)}
        return problem(status, "VERSION_CONFLICT", message, headers, current=error.current)
    if isinstance(error, UnsafeChange):
        found = [finding_data(each) for each in error.findings[:LISTED_MAX]]
        detail = f"{message}\nTo make the change anyway, repeat the request with ?force=true"
        return problem(409, "UNSAFE_CHANGE", detail, findings=found)
    if isinstance(error, DuplicateId):
        return problem(409, "DUPLICATE_ID", message)
    if isinstance(error, Busy):
        return problem(429, "BUSY", message, {"Retry-After": "1"})
    if isinstance(error, NoDatabase):
        return problem(409, "RULES_FROM_FILE", message)
    if isinstance(error, NoRegions):
        return problem(409, "NO_REGIONS", message)
    if isinstance(error, UnusableRules):
        return problem(409, "UNUSABLE_RULES", message)
    if isinstance(error, ChangeRefused):
        return problem(409, "CHANGE_REFUSED", message)
    answer = answers.error_answer(error)
    if answer is not None:
        return _response(answer)
    log.error("an error without a status of its own: %s", message)
    return problem(500, "INTERNAL", message)


_CONDITIONS: Final = ("if-match", "if-none-match")


def install(app: FastAPI, prefix: str, routes: Sequence[BaseRoute]) -> None:
    """Turn every exception of an application into a problem.

    `routes` are the routes under `prefix`: a 405 lists the methods of its path.
    """

    async def on_admin_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, AdminError)  # noqa: S101 - the handler is registered for it
        return problem(error.status_code, error.code, str(error.detail), error.headers)

    async def on_not_modified(_: Request, error: Exception) -> Response:
        assert isinstance(error, NotModified)  # noqa: S101 - the handler is registered for it
        return Response(None, 304, {"ETag": error.etag, "Vary": "Accept"})

    async def on_ratekeeper_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RatekeeperError)  # noqa: S101 - the handler is registered for it
        conditional = any(name in request.headers for name in _CONDITIONS)
        return error_response(error, conditional=conditional)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - the handler is registered for it
        body = request.scope["route"].body_field
        return _of_validation(error.errors(), body and body.field_info.annotation)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, starlette.HTTPException)  # noqa: S101 - same
        return _of_http(request, error, _methods(request.url.path.removeprefix(prefix), routes))

    async def on_defect(request: Request, _: Exception) -> Response:
        # The server logs the traceback: it is raised again after this.
        log.error("a defect at %s %s", request.method, show(request.url.path))
        return problem(500, "INTERNAL", "a defect of the service; its log has the details")

    app.add_exception_handler(AdminError, on_admin_error)
    app.add_exception_handler(NotModified, on_not_modified)
    app.add_exception_handler(RatekeeperError, on_ratekeeper_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(starlette.HTTPException, on_http)
    app.add_exception_handler(Exception, on_defect)


# ── Wrong fields ─────────────────────────────────────────────────────────────────────────────────

# pydantic's names of errors, and the types of JSON that they expect.
_TYPES: Final = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "int"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "float"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "bool"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "object"),
    "string_type": "str",
    "list_type": "array",
}
# Its names of bounds, and their signs.
_BOUNDS: Final = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_LENGTHS: Final = {"min_length": ">=", "max_length": "<="}


def _of_validation(errors: Sequence[Any], body: object) -> Response:
    """Return pydantic's errors, without the input: it may be a secret, or a megabyte.

    `body` is the type of the body, if the operation has one.
    """
    found = [_problem_of(each, body) for each in errors[:LISTED_MAX]]
    listed = [
        {"where": _place(each["loc"]), "line": 0, "column": 0, "message": message}
        for each, (_, message) in zip(errors, found, strict=False)
    ]
    shown = zip(errors, found[:5], strict=False)
    detail = "; ".join(problem_at(f"the {error['loc'][0]}", *each) for error, each in shown)
    return problem(400, "INVALID_REQUEST", detail, problems=listed)


def _problem_of(error: Mapping[str, Any], body: object) -> tuple[str, str]:
    """Return the place of a problem in the body or the query, and its text."""
    root, *steps = error["loc"]
    if error["type"] in {"extra_forbidden", "missing"} and steps:
        *steps, name = steps
        known = fields_at(body, steps) if root == "body" else ()
        missing = error["type"] == "missing"
        text = missing_field(str(name)) if missing else unknown_field(str(name), known)
    else:
        text = _wrong_value(error, root)
    return _place(steps), text


def _place(steps: Sequence[str | int]) -> str:
    place = ""
    for step in steps:
        place = below(place, step)
    return place


def _wrong_value(error: Mapping[str, Any], root: str) -> str:
    """Return the text of an error of pydantic as the check API words it.

    >>> _wrong_value({"type": "int_type", "input": "x"}, "body")
    'expected a whole number, found text'
    >>> _wrong_value({"type": "greater_than_equal", "input": 0, "ctx": {"ge": 1}}, "query")
    'expected a whole number of at least 1'
    """
    wanted = _TYPES.get(error["type"])
    if wanted is not None:
        # Everything in a URL is text.
        return wrong_type(wanted, json_kind(error["input"]) if root == "body" else "other text")
    for name, bound in error.get("ctx", {}).items():
        if name in _BOUNDS:
            return out_of_range(json_kind(bound), _BOUNDS[name], bound)
        if name in _LENGTHS:
            return out_of_range(json_kind(error["input"]), _LENGTHS[name], bound)
        if name == "expected":
            return f"expected {bound}"
    return str(error["msg"])


def fields_at(kind: object, steps: Sequence[str | int]) -> tuple[str, ...]:
    """Return the names of the fields at a place of a body; none if the place is no model."""
    for step in steps:
        model = _model(kind)
        field = model.model_fields.get(str(step)) if model and isinstance(step, str) else None
        kind = kind if field is None else field.annotation
    model = _model(kind)
    return () if model is None else tuple(model.model_fields)


def _model(kind: object) -> type[BaseModel] | None:
    """Return the model in a type such as `list[Model] | None`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for each in get_args(kind) if (found := _model(each))), None)


def _of_http(request: Request, error: starlette.HTTPException, methods: Sequence[str]) -> Response:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return problem(404, "NOT_FOUND", no_path_detail(request.url.path), headers)
    if error.status_code == 405:
        headers["Allow"] = ", ".join(methods) or headers.get("Allow", "")
        detail = no_method_detail(request.method, headers["Allow"])
        return problem(405, "METHOD_NOT_ALLOWED", detail, headers)
    return problem(error.status_code, "INVALID_REQUEST", str(error.detail), headers)


def _methods(path: str, routes: Sequence[BaseRoute]) -> list[str]:
    """Return the methods of a path. Starlette reports only those of the first matching route."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            found |= route.methods or set()
    return sorted(found)
