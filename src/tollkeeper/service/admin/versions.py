"""The versions of the rules over HTTP: history, differences, going back, and the audit."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Response

from tollkeeper.control.edits import unified_diff
from tollkeeper.service.admin.answering import (
    READ,
    ROWS,
    Before,
    Rows,
    link_next,
    made,
    paged,
    refusals,
    version_out,
    written,
)
from tollkeeper.service.admin.asking import AdminRoute, AskedOf, PlaneOf
from tollkeeper.service.admin.models import (
    DIFF_LENGTH_MAX,
    NUMBER_MAX,
    AuditOut,
    AuditPage,
    DiffOut,
    VersionOut,
    VersionPage,
    VersionTextOut,
)

router = APIRouter(tags=["versions"], route_class=AdminRoute)

# What a node with rules from a file says: it has no versions.
_FROM_FILE: Final = 409

Number = Annotated[int, Path(description="The version's number.", ge=1, le=NUMBER_MAX)]


@router.get(
    "/versions",
    operation_id="list_versions",
    summary="The history",
    responses=paged(_FROM_FILE),
)
async def list_versions(
    response: Response, plane: PlaneOf, limit: Rows = ROWS, before: Before = None
) -> VersionPage:
    """Versions without their texts, the newest first."""
    repository = await plane.repository()
    # One more than is shown tells whether there is a next page.
    found = await repository.history(limit + 1, before, texts=False)
    items = [version_out(each) for each in found[:limit]]
    following = items[-1].number if len(found) > limit else None
    if following is not None:
        link_next(response, "/versions", limit=limit, before=following)
    return VersionPage(items=items, next=following)


@router.get(
    "/versions/{number}",
    operation_id="get_version",
    summary="One version",
    responses=refusals(*READ, 404, _FROM_FILE),
)
async def get_version(number: Number, plane: PlaneOf) -> VersionTextOut:
    """A version with its document, as YAML."""
    version = await (await plane.repository()).version(number)
    return VersionTextOut(**version_out(version).model_dump(), text=version.text)


@router.get(
    "/versions/{number}/diff",
    operation_id="diff_versions",
    summary="What changed",
    responses=refusals(*READ, 404, _FROM_FILE),
)
async def diff_versions(
    number: Number,
    plane: PlaneOf,
    against: Annotated[
        int | None,
        Query(
            description="The version to compare with; without it, the one before.",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = None,
) -> DiffOut:
    """What changed from another version to this one, as a unified diff."""
    repository = await plane.repository()
    before = number - 1 if against is None else against
    if before:
        diff = await repository.diff(before, number)
    else:
        text = (await repository.version(number)).text
        names = "no version", f"version {number}"
        diff = await asyncio.to_thread(unified_diff, "", text, *names)
    return DiffOut(before=before, after=number, diff=diff)


@router.post(
    "/versions/{number}/rollback",
    operation_id="rollback",
    summary="Go back",
    responses=written(404),
)
async def rollback(
    number: Number, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Make a new version with the rules of an old one. It was accepted once, so it is again."""
    return made(response, await plane.rollback(asked, number))


@router.get(
    "/audit",
    operation_id="list_audit",
    summary="Who changed what, and why",
    responses=paged(_FROM_FILE),
)
async def list_audit(
    response: Response, plane: PlaneOf, limit: Rows = ROWS, before: Before = None
) -> AuditPage:
    """One entry for each version, the newest first."""
    repository = await plane.repository()
    found = await repository.audit(limit + 1, before, diff_length_max=DIFF_LENGTH_MAX)
    items = [
        AuditOut(
            version=each.version,
            author=each.author,
            reason=each.reason,
            created_at=each.created_at,
            kind=each.kind,
            diff=each.diff,
            forced=each.forced,
        )
        for each in found[:limit]
    ]
    following = items[-1].version if len(found) > limit else None
    if following is not None:
        link_next(response, "/audit", limit=limit, before=following)
    return AuditPage(items=items, next=following)
