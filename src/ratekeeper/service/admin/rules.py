"""The rule document over HTTP, whole or one rule at a time, and its versions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import Field

from ratekeeper.control import edits
from ratekeeper.control.audit import AuditCursor, AuditFilter
from ratekeeper.control.edits import DocumentText, document_diff, kept_text, unified_diff
from ratekeeper.control.schema import AUTHOR_LENGTH_MAX, KIND_LENGTH_MAX
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.rules.document.grammar import to_data
from ratekeeper.rules.document.model import Document, Rule
from ratekeeper.rules.document.reading import (
    DocumentError,
    DocumentPositions,
    from_data,
    read_received,
)
from ratekeeper.rules.document.safety import advice, new_findings
from ratekeeper.rules.document.tree import DocumentProblem
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.rules.entries import KEY_BYTES_MAX
from ratekeeper.service.admin.control import CurrentRules, etag_of
from ratekeeper.service.admin.operations import (
    ANY_CONTENT,
    DIFF_LENGTH_MAX,
    MERGE_PATCH,
    NUMBER_MAX,
    READ,
    ROLE,
    ROWS,
    RULES,
    AdminRoute,
    Before,
    Change,
    Control,
    Editor,
    IfNoneMatch,
    NextBefore,
    Reason,
    Rows,
    RuleBody,
    RuleData,
    RulePatch,
    VersionOut,
    change_responses,
    check_modified,
    error_responses,
    if_newer,
    link_next,
    page_responses,
    rules_responses,
    text_of,
    version_out,
    version_reply,
    wants_yaml,
)
from ratekeeper.service.admin.problems import (
    LISTED_MAX,
    ApiInput,
    ApiOutput,
    FindingOut,
    PlaceOut,
    finding_data,
    problem_data,
)
from ratekeeper.service.admin.records import moment

router = APIRouter(tags=["rules"], route_class=AdminRoute)
versions_router = APIRouter(tags=["versions"], route_class=AdminRoute)

YAML: Final = "application/yaml"
_EXAMPLE: Final = {
    "version": 1,
    "tiers": {"free": ["100/minute"]},
    "rules": [{"id": "orders", "by": ["api_key"], "limits": ["10/second"]}],
}
_CONTENT: Final = {
    "application/json": {"schema": {RULES: "document"}, "example": _EXAMPLE},
    # A string, and not the schema of a document: YAML has structure only after it is parsed.
    YAML: {"schema": {"type": "string"}, "example": to_yaml(from_data(_EXAMPLE))},
}
DOCUMENT_BODY: Final = {"requestBody": {"required": True, "content": _CONTENT}, ANY_CONTENT: True}

_PATCH: Final = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": {"type": "object"}, "example": {"limits": ["20/second"]}}
            for kind in (MERGE_PATCH, "application/json")
        },
    }
}

RuleId = Annotated[
    str, Path(description="The ID of the rule.", examples=["orders"], max_length=128)
]


class ValidationOut(ApiOutput):
    """The result of validating a document."""

    valid: bool = Field(description="True if the document can be used.")
    safe: bool = Field(description="True if it would be applied without `force`.")
    problems: list[PlaceOut] = Field(description="Why it cannot be used.")
    findings: list[FindingOut] = Field(description="Why it would need `force`, and advice.")
    diff: str = Field(description="The changes to the rules in force, as a unified diff.")


class ReasonIn(ApiInput):
    """The reason of a rollback, or of a promotion or its reversal; the body may be left out."""

    reason: Reason


class VersionTextOut(VersionOut):
    """One version of the rules, with its document."""

    text: str = Field(description="The document, as YAML.")


class DiffOut(ApiOutput):
    """The changes between two versions."""

    before: int = Field(description="The older version; 0: none.")
    after: int
    diff: str = Field(description="A unified diff; empty if nothing changed.")


class AuditLogOut(ApiOutput):
    """One change: its author, time, reason, and what it changed."""

    created_at: datetime
    author: str = Field(description="The name of the token.", examples=["ann"])
    reason: str
    kind: str = Field(description="The kind of change.", examples=["put-rule", "assign", "grant"])
    version: int | None = Field(
        description="The version of the rule document; null if the document did not change."
    )
    change: int | None = Field(description="The number of the change, if it made no version.")
    key: str = Field(
        description="What was changed, unless it is the document.", examples=["user:42"]
    )
    before: str | None = Field(description="Its data before; null if it did not exist.")
    after: str | None = Field(
        description=f"Its data after, or the operation on its counts; as `before`, at most "
        f"{DIFF_LENGTH_MAX:,} characters."
    )
    count: int = Field(description="How many entries have changed.")
    diff: str = Field(
        description=f"The changes of the document, at most {DIFF_LENGTH_MAX:,} characters. "
        f"`versions/{{number}}/diff` has the whole diff."
    )
    forced: str = Field(description="The findings that `force` overruled.")


class VersionPage(ApiOutput):
    """Versions, the newest first."""

    items: list[VersionOut]
    next: NextBefore


class AuditLogPage(ApiOutput):
    """Entries of the audit log, the newest first."""

    items: list[AuditLogOut]
    next: str | None = Field(
        description="`before` for the next page; null if this is the last one."
    )


def _document_responses() -> dict[int | str, dict[str, Any]]:
    found = rules_responses(429)
    found[200] = {"description": "The document.", "content": _CONTENT, **found[200]}
    return found


@router.get(
    "/rules",
    operation_id="get_rules",
    summary="The rule document",
    response_class=Response,
    responses=_document_responses(),
)
async def get_rules(
    request: Request,
    control: Control,
    if_none_match: IfNoneMatch = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Return the newest rules: JSON, or YAML if `Accept` asks for it."""
    if if_none_match is not None and (number := await control.number()) is not None:
        check_modified(etag_of(number), if_none_match)  # before a document of megabytes is read
    found = if_newer(await control.current(), if_none_match)
    headers = {"ETag": found.etag, "Vary": "Accept"}
    as_yaml = wants_yaml(accept)
    if as_yaml and found.text is not None:
        return Response(found.text, 200, headers, YAML)
    async with control.heavy.turn(request.state.token, found.document):
        text = await asyncio.to_thread(found.yaml if as_yaml else partial(_json, found))
    return Response(text, 200, headers, YAML if as_yaml else "application/json")


def _json(found: CurrentRules) -> str:
    return json.dumps(to_data(found.document), ensure_ascii=False)


@router.put(
    "/rules",
    operation_id="put_rules",
    summary="Apply a document",
    responses=change_responses(),
    openapi_extra=DOCUMENT_BODY,
)
async def put_rules(
    request: Request, response: Response, control: Control, change: Change
) -> VersionOut:
    """Replace all rules by a new version. A document that is already in force changes nothing.

    A document in YAML is kept as it is written, with its comments, until another operation changes
    a part of it.
    Send the ETag that you read as `If-Match`; otherwise the change overwrites concurrent changes.
    """
    await control.repository()  # without a database, no other problem matters
    text = await text_of(request)
    document = await asyncio.to_thread(read_received, text)
    return version_reply(response, await control.apply(change, document, text))


@router.post(
    "/rules/validate",
    operation_id="validate_rules",
    summary="Validate a document",
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 503),
    openapi_extra={**DOCUMENT_BODY, ROLE: "read"},
)
async def validate_rules(request: Request, control: Control) -> ValidationOut:
    """Report the problems of a document, its findings and its changes. Applies nothing."""
    text = await text_of(request)
    found = await control.current()
    async with control.heavy.turn(request.state.token, text):
        return await asyncio.to_thread(_validated, text, found, control.context.limiter)


def _validated(text: str, found: CurrentRules, limiter: AsyncLimiter) -> ValidationOut:
    try:
        document = read_received(text)
        limiter.require_usable(document)
    except DocumentError as error:
        problems = [PlaceOut(**problem_data(each)) for each in error.problems[:LISTED_MAX]]
        return ValidationOut(valid=False, safe=False, problems=problems, findings=[], diff="")
    except ConfigError as error:  # the service cannot use it
        unusable = PlaceOut(where="", line=0, column=0, message=str(error))
        return ValidationOut(valid=False, safe=False, problems=[unusable], findings=[], diff="")
    before = None if found.number == 0 else found.document
    unsafe = new_findings(document, before)
    shown = [*unsafe, *advice(document)][:LISTED_MAX]
    positions = DocumentPositions(text if shown else "")
    names = found.etag.strip('"') if before else "no version", "<body>"
    old = DocumentText(found.yaml(), to_yaml(found.document)) if before else DocumentText("", "")
    new = DocumentText(kept_text(text) or old.kept, to_yaml(document))
    return ValidationOut(
        valid=True,
        safe=not unsafe,
        problems=[],
        findings=[FindingOut(**finding_data(each, *positions.of(each.where))) for each in shown],
        diff=document_diff(old, new, *names),
    )


# ── One rule ─────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/rules/{id:path}",
    operation_id="get_rule",
    summary="One rule",
    responses=rules_responses(404),
    response_model=RuleData,
)
async def get_rule(
    id: RuleId,  # noqa: A002 - the path has the name that the document uses
    response: Response,
    control: Control,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Return one rule of the newest rules."""
    found = if_newer(await control.current(), if_none_match)
    rule = _find(found.document, id)
    response.headers["ETag"] = found.etag
    return to_data(Document(rules=(rule,)))["rules"][0]


def _find(document: Document, rule_id: str) -> Rule:
    for rule in document.rules:
        if rule.id == rule_id:
            return rule
    raise edits.NotFound(f"there is no rule {show(rule_id)} in the rules in force")


@router.put(
    "/rules/{id:path}",
    operation_id="put_rule",
    summary="Put a rule",
    responses=change_responses(404),
)
async def put_rule(
    id: RuleId,  # noqa: A002 - same
    rule: RuleBody,
    response: Response,
    control: Control,
    change: Change,
    before: Annotated[
        str | None,
        Query(description="Put it before the rule with this ID.", max_length=128),
    ] = None,
) -> VersionOut:
    """Replace the rule with this ID, or add a new rule at the end.

    The first matching rule applies; `before` puts the rule in another place. The body is the rule
    as in the document; its `id` may be left out.
    """
    await control.repository()  # same
    found = await control.current()
    # A rule may name tiers. Whether they still exist is checked when the change is applied.
    tiers = to_data(Document(tiers=found.document.tiers)).get("tiers", {})
    parsed = await asyncio.to_thread(_parsed, id, rule, tiers)
    version = await control.edit(
        change, "put-rule", lambda document: edits.put_rule(document, parsed, before)
    )
    return version_reply(response, version)


@router.patch(
    "/rules/{id:path}",
    operation_id="patch_rule",
    summary="Change a rule",
    responses=change_responses(404),
    openapi_extra=_PATCH,
)
async def patch_rule(
    id: RuleId,  # noqa: A002 - same
    patch: RulePatch,
    editor: Editor,
) -> VersionOut:
    """Change fields of a rule by a merge patch (RFC 7396), and leave the others unchanged.

    A field with a value replaces that field, an object changes the fields in it, and null removes a
    field. The rule keeps its place.
    """

    def edit(document: Document) -> Document:
        data = to_data(Document(tiers=document.tiers, rules=(_find(document, id),)))
        rule = merged(data["rules"][0], patch)
        return edits.put_rule(document, _parsed(id, rule, data.get("tiers", {})))

    return await editor.edit("patch-rule", edit)


def merged(value: Any, patch: Any) -> Any:
    """Return a JSON value changed by a merge patch (RFC 7396).

    >>> merged({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"d": 4}})
    {'b': {'c': 2, 'd': 4}}
    """
    if not isinstance(patch, dict):
        return patch
    found = dict(value) if isinstance(value, dict) else {}
    for name, each in patch.items():
        if each is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), each)
    return found


def _parsed(rule_id: str, rule: Mapping[str, Any], tiers: Mapping[str, Any]) -> Rule:
    if rule.get("id", rule_id) != rule_id:
        raise ConfigError(
            f"the body is rule {show(rule['id'])}, and the URL names {show(rule_id)}; "
            f"to rename a rule, put the new one and delete the old"
        )
    rules: list[dict[str, Any]] = [{"id": rule_id, **rule}]
    if isinstance(replaced := rule.get("replaces"), str):  # it must exist; see above
        rules.append({"id": replaced, "by": rule.get("by", []), "limits": "1/s"})
    data = {"version": 1, "tiers": tiers, "rules": rules}
    return placed(lambda: from_data(data, "<body>"), "rules[0]", "rule").rules[0]


_Parsed = TypeVar("_Parsed")


def placed(parse: Callable[[], _Parsed], path: str, name: str) -> _Parsed:
    """Parse a document made of one part. Raises DocumentError with places in the part."""
    try:
        return parse()
    except DocumentError as error:
        raise DocumentError(
            tuple(
                DocumentProblem(
                    each.source,
                    each.line,
                    each.column,
                    each.where.replace(path, name, 1)
                    if each.where.startswith(path)
                    else each.where,
                    each.message,
                )
                for each in error.problems
            )
        ) from None


@router.delete(
    "/rules/{id:path}",
    operation_id="delete_rule",
    summary="Remove a rule",
    responses=change_responses(404),
)
async def delete_rule(
    id: RuleId,  # noqa: A002 - same
    editor: Editor,
) -> VersionOut:
    """Remove a rule. Its overrides must be removed first."""
    return await editor.edit("remove-rule", lambda document: edits.remove_rule(document, id))


@router.post(
    "/rules/{id:path}/promote",
    operation_id="promote_rule",
    summary="Enforce a shadow rule",
    responses=change_responses(404),
)
async def promote_rule(
    id: RuleId,  # noqa: A002 - same
    editor: Editor,
    body: ReasonIn | None = None,
) -> VersionOut:
    """Enforce a rule that is in shadow mode, with the counts that it has.

    With `replaces`, it takes the place of that rule, which then applies only to the requests that
    the promoted rule does not match or whose subjects its rollout does not reach.
    """
    reason = body.reason if body else None
    return await editor.edit("promote", lambda document: edits.promote(document, id), reason)


@router.post(
    "/rules/{id:path}/demote",
    operation_id="demote_rule",
    summary="Reverse a promotion",
    responses=change_responses(404),
)
async def demote_rule(
    id: RuleId,  # noqa: A002 - same
    editor: Editor,
    body: ReasonIn | None = None,
) -> VersionOut:
    """Put a rule that replaces another back into shadow mode: the other applies again."""
    reason = body.reason if body else None
    return await editor.edit("demote", lambda document: edits.demote(document, id), reason)


# ── Versions ─────────────────────────────────────────────────────────────────────────────────────


# The status of a node with rules from a file, which have no versions.
_FROM_FILE: Final = 409

Number = Annotated[int, Path(description="The number of the version.", ge=1, le=NUMBER_MAX)]


@versions_router.get(
    "/versions",
    operation_id="list_versions",
    summary="All versions",
    responses=page_responses(_FROM_FILE),
)
async def list_versions(
    response: Response, control: Control, limit: Rows = ROWS, before: Before = None
) -> VersionPage:
    """Return versions without their texts, the newest first."""
    repository = await control.repository()
    # One more row than the page holds shows whether there is a next page.
    found = await repository.history(limit + 1, before, texts=False)
    items = [version_out(each) for each in found[:limit]]
    following = items[-1].number if len(found) > limit else None
    if following is not None:
        link_next(response, "/versions", limit=limit, before=following)
    return VersionPage(items=items, next=following)


@versions_router.get(
    "/versions/{number}",
    operation_id="get_version",
    summary="One version",
    responses=error_responses(*READ, 404, _FROM_FILE),
)
async def get_version(number: Number, control: Control) -> VersionTextOut:
    """Return a version with its document, as YAML."""
    version = await (await control.repository()).version(number)
    return VersionTextOut(**version_out(version).model_dump(), text=version.text)


@versions_router.get(
    "/versions/{number}/diff",
    operation_id="diff_versions",
    summary="Compare versions",
    responses=error_responses(*READ, 404, 429, _FROM_FILE),
)
async def diff_versions(
    request: Request,
    number: Number,
    control: Control,
    against: Annotated[
        int | None,
        Query(
            description="The version to compare with; by default the previous one.",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = None,
) -> DiffOut:
    """Return the changes from another version to this one, as a unified diff."""
    repository = await control.repository()
    before = number - 1 if against is None else against
    async with control.heavy.turn(request.state.token):
        if before:
            diff = await repository.diff(before, number)
        else:
            text = (await repository.version(number)).text
            names = "no version", f"version {number}"
            diff = await asyncio.to_thread(unified_diff, "", text, *names)
    return DiffOut(before=before, after=number, diff=diff)


@versions_router.post(
    "/versions/{number}/rollback",
    operation_id="rollback",
    summary="Roll back",
    responses=change_responses(404),
)
async def rollback(
    number: Number,
    response: Response,
    control: Control,
    change: Change,
    body: ReasonIn | None = None,
) -> VersionOut:
    """Make a new version with the rules of an old one. It was accepted before: no `force`."""
    reason = None if body is None else body.reason
    return version_reply(response, await control.rollback(change.because(reason), number))


def _audit_filter(
    author: Annotated[
        str | None, Query(description="By the token of this name.", max_length=AUTHOR_LENGTH_MAX)
    ] = None,
    kind: Annotated[
        str | None,
        Query(description="Changes of this kind.", examples=["grant"], max_length=KIND_LENGTH_MAX),
    ] = None,
    key: Annotated[
        str | None,
        Query(
            description="Of this subject, override, list entry or rule. A version of the document "
            "is found by the text of its diff.",
            examples=["user:42"],
            min_length=1,
            max_length=KEY_BYTES_MAX,
        ),
    ] = None,
    from_: Annotated[
        str | None,
        Query(
            alias="from",
            description="From this time with its zone, or this date (UTC).",
            examples=["2026-11-15T00:00:00Z"],
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
    to: Annotated[
        str | None,
        Query(
            description="Before this time, or this date (UTC).",
            examples=["2026-11-16T00:00:00Z"],
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
) -> AuditFilter:
    since = None if from_ is None else moment(from_, "from")
    until = None if to is None else moment(to, "to")
    return AuditFilter(author, kind, key, since, until)


AuditQuery = Annotated[AuditFilter, Depends(_audit_filter)]


@versions_router.get(
    "/audit",
    operation_id="list_audit",
    summary="The audit log",
    responses=page_responses(_FROM_FILE),
)
async def list_audit(
    request: Request,
    response: Response,
    control: Control,
    wanted: AuditQuery,
    limit: Rows = ROWS,
    before: Annotated[
        str | None,
        Query(
            description="`next` of the previous page.",
            pattern=r"^[0-9]{1,10}\.[0-9]{1,19}$",
            examples=["12.345"],
        ),
    ] = None,
) -> AuditLogPage:
    """Return every change of the document, of entries and of counts, the newest first."""
    audit_log = (await control.repository()).audit_log
    cursor = None if before is None else AuditCursor.read(before)
    page = await audit_log.page(wanted, limit, cursor, length_max=DIFF_LENGTH_MAX)
    items = [AuditLogOut(**asdict(each)) for each in page.items]
    following = None if page.next is None else str(page.next)
    if following is not None:
        query = {**request.query_params, "limit": limit, "before": following}
        link_next(response, "/audit", **query)
    return AuditLogPage(items=items, next=following)
