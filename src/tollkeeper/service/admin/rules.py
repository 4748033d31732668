"""The rule document over HTTP: whole, or one rule at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Path, Query, Request, Response

from tollkeeper.control import edits
from tollkeeper.control.edits import unified_diff
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.rules.document.model import Document, Rule
from tollkeeper.rules.document.reading import DocumentError, from_data, read
from tollkeeper.rules.document.safety import new_findings
from tollkeeper.rules.document.tree import DocumentProblem
from tollkeeper.rules.document.writing import to_data, to_yaml
from tollkeeper.service.admin.answering import made, versioned, written
from tollkeeper.service.admin.answering import refusals as refusals_of
from tollkeeper.service.admin.asking import (
    ANY_CONTENT,
    ROLE,
    AdminRoute,
    AskedOf,
    IfNoneMatch,
    PlaneOf,
    newer,
    refuse_known,
    text_of,
    wants_yaml,
)
from tollkeeper.service.admin.models import (
    RULES,
    FindingOut,
    PlaceOut,
    RuleBody,
    RuleData,
    ValidationOut,
    VersionOut,
)
from tollkeeper.service.admin.plane import InForce, etag_of
from tollkeeper.service.admin.problems import LISTED_MAX, finding_data, problem_data

router = APIRouter(tags=["rules"], route_class=AdminRoute)

YAML: Final = "application/yaml"
_EXAMPLE: Final = {
    "version": 1,
    "tiers": {"free": ["100/minute"]},
    "rules": [{"id": "orders", "by": ["api_key"], "limits": ["10/second"]}],
}
_CONTENT: Final = {
    "application/json": {"schema": {RULES: "document"}, "example": _EXAMPLE},
    # Text, and not the document's schema: what YAML says is known when it is read.
    YAML: {"schema": {"type": "string"}, "example": to_yaml(from_data(_EXAMPLE))},
}
_BODY: Final = {"requestBody": {"required": True, "content": _CONTENT}, ANY_CONTENT: True}

RuleId = Annotated[str, Path(description="The rule's id.", examples=["orders"], max_length=128)]


def _document_responses() -> dict[int | str, dict[str, Any]]:
    found = versioned()
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
    plane: PlaneOf,
    if_none_match: IfNoneMatch = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """The newest rules: JSON, or YAML where `Accept` asks for it."""
    if if_none_match is not None and (number := await plane.number()) is not None:
        refuse_known(etag_of(number), if_none_match)  # without reading a document of megabytes
    found = newer(await plane.in_force(), if_none_match)
    headers = {"ETag": found.etag, "Vary": "Accept"}
    if wants_yaml(accept):
        return Response(await asyncio.to_thread(found.yaml), 200, headers, YAML)
    text = await asyncio.to_thread(_json, found)
    return Response(text, 200, headers, "application/json")


def _json(found: InForce) -> str:
    return json.dumps(to_data(found.document), ensure_ascii=False)


@router.put(
    "/rules",
    operation_id="put_rules",
    summary="Put a document in force",
    responses=written(),
    openapi_extra=_BODY,
)
async def put_rules(
    request: Request, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Replace all rules, as the next version. A document that is in force already changes nothing.

    Send the ETag that you read as `If-Match`, or what somebody else changed meanwhile is lost.
    """
    await plane.repository()  # where there is none, nobody needs to be told of other problems
    document = await asyncio.to_thread(read, await text_of(request), "<body>")
    return made(response, await plane.apply(asked, document))


@router.post(
    "/rules/validate",
    operation_id="validate_rules",
    summary="What a document would meet",
    responses=refusals_of(400, 401, 403, 408, 413, 415, 422, 503),
    openapi_extra={**_BODY, ROLE: "read"},
)
async def validate_rules(request: Request, plane: PlaneOf) -> ValidationOut:
    """Says what is wrong with a document or unsafe in it, and what it changes. Applies nothing."""
    text = await text_of(request)
    found = await plane.in_force()
    return await asyncio.to_thread(_validated, text, found)


def _validated(text: str, found: InForce) -> ValidationOut:
    try:
        document = read(text, "<body>")
    except DocumentError as error:
        problems = [PlaceOut(**problem_data(each)) for each in error.problems[:LISTED_MAX]]
        return ValidationOut(valid=False, safe=False, problems=problems, findings=[], diff="")
    before = None if found.number == 0 else found.document
    unsafe = new_findings(document, before)
    names = found.etag.strip('"') if before else "no version", "<body>"
    return ValidationOut(
        valid=True,
        safe=not unsafe,
        problems=[],
        findings=[FindingOut(**finding_data(each)) for each in unsafe[:LISTED_MAX]],
        diff=unified_diff(found.yaml() if before else "", to_yaml(document), *names),
    )


# ------------------------------------------------------------------------------------- one rule


@router.get(
    "/rules/{id:path}",
    operation_id="get_rule",
    summary="One rule",
    responses=versioned(404),
    response_model=RuleData,
)
async def get_rule(
    id: RuleId,  # noqa: A002 - the name in the path is the one in the document
    response: Response,
    plane: PlaneOf,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """One rule of the newest rules."""
    found = newer(await plane.in_force(), if_none_match)
    rule = _find(found.document, id)
    response.headers["ETag"] = found.etag
    return to_data(Document(rules=(rule,)))["rules"][0]


def _find(document: Document, rule_id: str) -> Rule:
    for rule in document.rules:
        if rule.id == rule_id:
            return rule
    raise edits.NotFound(f"there is no rule {show(rule_id)} in the rules in force")


@router.put(
    "/rules/{id:path}", operation_id="put_rule", summary="Put a rule", responses=written(404)
)
async def put_rule(
    id: RuleId,  # noqa: A002 - same
    rule: RuleBody,
    response: Response,
    plane: PlaneOf,
    asked: AskedOf,
    before: Annotated[
        str | None,
        Query(description="Put it before the rule with this id.", max_length=128),
    ] = None,
) -> VersionOut:
    """Put a rule in the place of the one with this id; a new one goes after all others.

    The first rule that matches applies, so `before` moves it. The body is the rule as it stands in
    the document; its `id` may be left out.
    """
    await plane.repository()  # same
    found = await plane.in_force()
    # A rule may name tiers; whether those are still there is found when it is applied.
    tiers = to_data(Document(tiers=found.document.tiers)).get("tiers", {})
    parsed = await asyncio.to_thread(_parsed, id, rule, tiers)
    version = await plane.change(
        asked, "put-rule", lambda document: edits.put_rule(document, parsed, before)
    )
    return made(response, version)


def _parsed(rule_id: str, rule: Mapping[str, Any], tiers: Mapping[str, Any]) -> Rule:
    if rule.get("id", rule_id) != rule_id:
        raise ConfigError(
            f"the body is rule {show(rule['id'])}, and the URL names {show(rule_id)}; "
            f"to rename a rule, put the new one and delete the old"
        )
    data = {"version": 1, "tiers": tiers, "rules": [{"id": rule_id, **rule}]}
    return placed(lambda: from_data(data, "<body>"), "rules[0]", "rule").rules[0]


def placed(parse: Callable[[], Document], path: str, name: str) -> Document:
    """A document made of a part; problems are told by their place in the part. DocumentError."""
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
    "/rules/{id:path}", operation_id="delete_rule", summary="Remove a rule", responses=written(404)
)
async def delete_rule(
    id: RuleId,  # noqa: A002 - same
    response: Response,
    plane: PlaneOf,
    asked: AskedOf,
) -> VersionOut:
    """Take a rule out. An override that is about it must go first."""
    version = await plane.change(
        asked, "remove-rule", lambda document: edits.remove_rule(document, id)
    )
    return made(response, version)
