"""Who gets what, over HTTP: tiers, who is in them, overrides, and the allow and deny lists."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Response

from tollkeeper.control import edits
from tollkeeper.control.edits import ListName
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import Limits
from tollkeeper.rules.document.model import Document, Override
from tollkeeper.rules.document.reading import from_data
from tollkeeper.rules.document.writing import limit_data, to_data
from tollkeeper.rules.matching.lists import check_entry
from tollkeeper.service.admin.answering import (
    ROWS,
    Offset,
    Rows,
    made,
    page_of,
    versioned,
    written,
)
from tollkeeper.service.admin.asking import AdminRoute, AskedOf, IfNoneMatch, PlaneOf, newer
from tollkeeper.service.admin.models import (
    AssignmentIn,
    AssignmentOut,
    AssignmentPage,
    EntryIn,
    EntryPage,
    OverrideData,
    OverridePage,
    TierIn,
    TierOut,
    TierPage,
    VersionOut,
)
from tollkeeper.service.admin.rules import placed

router = APIRouter(route_class=AdminRoute)

_NAME_MAX: Final = 128
_SUBJECT_MAX: Final = 600
_ENTRY_MAX: Final = 1_100
_OWNERS: Final = ("user", "api_key", "tenant")

TierName = Annotated[str, Path(description="The tier's name.", examples=["pro"], max_length=128)]
Subject = Annotated[
    str,
    Path(description="`user:…`, `api_key:…` or `tenant:…`.", examples=["user:42"], max_length=600),
]
Which = Annotated[ListName, Path(description="Which list.")]


# ---------------------------------------------------------------------------------------- tiers


@router.get(
    "/tiers", tags=["tiers"], operation_id="list_tiers", summary="All tiers", responses=versioned()
)
async def list_tiers(
    response: Response,
    plane: PlaneOf,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> TierPage:
    """The tiers of the newest rules, in their order."""
    found = newer(await plane.in_force(), if_none_match)
    response.headers["ETag"] = found.etag
    rows = list(found.document.tiers.items())
    page = page_of(response, "/tiers", rows, limit, offset)
    items = [_tier(name, limits) for name, limits in page.items]
    return TierPage(items=items, total=page.total, next=page.next)


def _tier(name: str, limits: Limits) -> TierOut:
    return TierOut(name=name, limits=[limit_data(each) for each in limits])


@router.get(
    "/tiers/{name:path}",
    tags=["tiers"],
    operation_id="get_tier",
    summary="One tier",
    responses=versioned(404),
)
async def get_tier(
    name: TierName, response: Response, plane: PlaneOf, if_none_match: IfNoneMatch = None
) -> TierOut:
    """The limits of one tier."""
    found = newer(await plane.in_force(), if_none_match)
    if name not in found.document.tiers:
        raise edits.NotFound(f"there is no tier {show(name)} in the rules in force")
    response.headers["ETag"] = found.etag
    return _tier(name, found.document.tiers[name])


@router.put(
    "/tiers/{name:path}",
    tags=["tiers"],
    operation_id="put_tier",
    summary="Set a tier",
    responses=written(),
)
async def put_tier(
    name: TierName, tier: TierIn, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Give a tier these limits; a new name makes a new tier."""
    data = {"version": 1, "tiers": {name: tier.limits}}
    limits = placed(lambda: from_data(data, "<body>"), f"tiers.{name}", "limits").tiers[name]
    version = await plane.change(
        asked.because(tier.reason),
        "set-tier",
        lambda document: edits.set_tier(document, name, limits),
    )
    return made(response, version)


@router.delete(
    "/tiers/{name:path}",
    tags=["tiers"],
    operation_id="delete_tier",
    summary="Remove a tier",
    responses=written(404),
)
async def delete_tier(
    name: TierName, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Take a tier out. Nobody may be in it, and no rule may name it."""
    version = await plane.change(
        asked, "remove-tier", lambda document: edits.remove_tier(document, name)
    )
    return made(response, version)


# ---------------------------------------------------------------------------------- assignments


@router.get(
    "/assignments",
    tags=["assignments"],
    operation_id="list_assignments",
    summary="Who is in which tier",
    responses=versioned(paged=True),
)
async def list_assignments(
    response: Response,
    plane: PlaneOf,
    tier: Annotated[
        str | None, Query(description="Only those in this tier.", max_length=_NAME_MAX)
    ] = None,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> AssignmentPage:
    """The subjects that were put in tiers, in the order they were."""
    found = newer(await plane.in_force(), if_none_match)
    response.headers["ETag"] = found.etag
    rows = [pair for pair in found.document.assign.items() if tier in {None, pair[1]}]
    page = page_of(response, "/assignments", rows, limit, offset, tier=tier)
    items = [AssignmentOut(subject=subject, tier=name) for subject, name in page.items]
    return AssignmentPage(items=items, total=page.total, next=page.next)


@router.get(
    "/assignments/{subject:path}",
    tags=["assignments"],
    operation_id="get_assignment",
    summary="Somebody's tier",
    responses=versioned(404),
)
async def get_assignment(
    subject: Subject, response: Response, plane: PlaneOf, if_none_match: IfNoneMatch = None
) -> AssignmentOut:
    """The tier that a subject was put in."""
    found = newer(await plane.in_force(), if_none_match)
    tier = found.document.assign.get(subject)
    if tier is None:
        raise edits.NotFound(f"{show(subject)} is assigned to no tier")
    response.headers["ETag"] = found.etag
    return AssignmentOut(subject=subject, tier=tier)


@router.put(
    "/assignments/{subject:path}",
    tags=["assignments"],
    operation_id="put_assignment",
    summary="Put somebody in a tier",
    responses=written(),
)
async def put_assignment(
    subject: Subject,
    assignment: AssignmentIn,
    response: Response,
    plane: PlaneOf,
    asked: AskedOf,
) -> VersionOut:
    """Put a subject in a tier, in place of the one it had."""
    version = await plane.change(
        asked.because(assignment.reason),
        "assign",
        lambda document: edits.assign(document, subject, assignment.tier),
    )
    return made(response, version)


@router.delete(
    "/assignments/{subject:path}",
    tags=["assignments"],
    operation_id="delete_assignment",
    summary="Take somebody out of his tier",
    responses=written(404),
)
async def delete_assignment(
    subject: Subject, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Take a subject out of its tier."""
    version = await plane.change(
        asked, "unassign", lambda document: edits.unassign(document, subject)
    )
    return made(response, version)


# ------------------------------------------------------------------------------------ overrides


@router.get(
    "/overrides",
    tags=["overrides"],
    operation_id="list_overrides",
    summary="All overrides",
    responses=versioned(paged=True),
)
async def list_overrides(
    response: Response,
    plane: PlaneOf,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> OverridePage:
    """The overrides of the newest rules, those that have ended too. The first that fits counts."""
    found = newer(await plane.in_force(), if_none_match)
    response.headers["ETag"] = found.etag
    page = page_of(response, "/overrides", found.document.overrides, limit, offset)
    items = to_data(Document(overrides=tuple(page.items))).get("overrides", [])
    return OverridePage(items=items, total=page.total, next=page.next)


@router.post(
    "/overrides",
    tags=["overrides"],
    operation_id="add_override",
    summary="Add an override",
    responses=written(),
)
async def add_override(
    override: OverrideData, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Other limits for one user, key or tenant, in place of those it had for the same rule.

    Where the override names no author or reason, it gets those of the change.
    """
    await plane.repository()
    found = await plane.in_force()
    parsed = await asyncio.to_thread(_parsed, override, found.document)
    asked = asked.because(asked.reason or parsed.reason)
    signed = replace(
        parsed, author=parsed.author or asked.author, reason=parsed.reason or asked.reason
    )
    version = await plane.change(
        asked, "override", lambda document: edits.add_override(document, signed)
    )
    return made(response, version)


def _parsed(override: Mapping[str, Any], document: Document) -> Override:
    rules: list[dict[str, Any]] = []
    if "rule" in override:  # it must be one that there is; what it says does not matter
        rules = [{"id": each.id, "by": [], "limits": "1/s"} for each in document.rules]
    data = {"version": 1, "rules": rules, "overrides": [override]}
    return placed(lambda: from_data(data, "<body>"), "overrides[0]", "override").overrides[0]


@router.delete(
    "/overrides/{subject:path}",
    tags=["overrides"],
    operation_id="delete_override",
    summary="Remove an override",
    responses=written(404),
)
async def delete_override(
    subject: Subject,
    response: Response,
    plane: PlaneOf,
    asked: AskedOf,
    rule: Annotated[
        str | None,
        Query(
            description="The one for this rule; without it, that for every rule.", max_length=128
        ),
    ] = None,
) -> VersionOut:
    """Take out a subject's override for a rule."""
    attribute, _, value = subject.partition(":")
    if attribute not in _OWNERS or not value:
        raise ConfigError(
            f"{show(subject)} does not say who is meant; write user:42, api_key:sk_1 or tenant:acme"
        )
    version = await plane.change(
        asked,
        "remove-override",
        lambda document: edits.remove_override(document, attribute, value, rule),
    )
    return made(response, version)


# ---------------------------------------------------------------------------------------- lists


@router.get(
    "/lists/{list_name}",
    tags=["lists"],
    operation_id="get_list",
    summary="The entries of a list",
    responses=versioned(paged=True),
)
async def get_list(
    list_name: Which,
    response: Response,
    plane: PlaneOf,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> EntryPage:
    """Who is never limited (`allow`), or always denied (`deny`, which goes first)."""
    found = newer(await plane.in_force(), if_none_match)
    response.headers["ETag"] = found.etag
    entries: tuple[str, ...] = getattr(found.document, list_name)
    page = page_of(response, f"/lists/{list_name}", entries, limit, offset)
    return EntryPage(items=page.items, total=page.total, next=page.next)


@router.post(
    "/lists/{list_name}",
    tags=["lists"],
    operation_id="add_entry",
    summary="Add an entry to a list",
    responses=written(),
)
async def add_entry(
    list_name: Which, entry: EntryIn, response: Response, plane: PlaneOf, asked: AskedOf
) -> VersionOut:
    """Put an entry at the end of a list; one that is on it changes nothing."""
    check_entry(entry.entry)
    version = await plane.change(
        asked.because(entry.reason),
        "list",
        lambda document: edits.add_entry(document, list_name, entry.entry),
    )
    return made(response, version)


@router.delete(
    "/lists/{list_name}",
    tags=["lists"],
    operation_id="delete_entry",
    summary="Take an entry off a list",
    responses=written(404),
)
async def delete_entry(
    list_name: Which,
    response: Response,
    plane: PlaneOf,
    asked: AskedOf,
    entry: Annotated[
        str,
        Query(
            description="As it stands on the list.",
            examples=["10.0.0.0/8"],
            min_length=1,
            max_length=_ENTRY_MAX,
        ),
    ],
) -> VersionOut:
    """Take an entry off. It is named in the query, for many hold slashes."""
    version = await plane.change(
        asked, "unlist", lambda document: edits.remove_entry(document, list_name, entry)
    )
    return made(response, version)
