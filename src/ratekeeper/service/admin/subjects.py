"""Subjects over HTTP: tiers and their members, overrides, and the allow and deny lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from ratekeeper.control import edits
from ratekeeper.control.edits import ListName
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.rules import entries
from ratekeeper.rules.document.grammar import limit_data, to_data
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import from_data
from ratekeeper.rules.document.tree import below
from ratekeeper.rules.entries import Entry, EntryKind
from ratekeeper.rules.matching.patterns import compile_network
from ratekeeper.service.admin.control import ControlPlane, CurrentRules, etag_of
from ratekeeper.service.admin.operations import (
    READ,
    ROWS,
    AdminRoute,
    Change,
    Control,
    Editor,
    IfNoneMatch,
    LimitData,
    LimitsData,
    NextOffset,
    Offset,
    OverrideBody,
    OverrideData,
    PageRows,
    Reason,
    Rows,
    Total,
    VersionOut,
    change_reply,
    change_responses,
    good_responses,
    if_newer,
    link_next,
    page_of,
    rules_responses,
)
from ratekeeper.service.admin.problems import ApiInput, ApiOutput
from ratekeeper.service.admin.rules import placed

router = APIRouter(route_class=AdminRoute)

_NAME_MAX: Final = 128
_SUBJECT_MAX: Final = 600
_ENTRY_MAX: Final = 1_100
_OWNERS: Final = ("user", "api_key", "tenant", "ip")

TierName = Annotated[
    str, Path(description="The name of the tier.", examples=["pro"], max_length=128)
]
Subject = Annotated[
    str,
    Path(description="`user:…`, `api_key:…` or `tenant:…`.", examples=["user:42"], max_length=600),
]
OverrideId = Annotated[
    str, Path(description="The id of the override.", examples=["ov_5f2c91d07b3a"], max_length=600)
]
Which = Annotated[ListName, Path(description="Which list.")]


class TierOut(ApiOutput):
    """A tier and its limits."""

    name: str = Field(examples=["pro"])
    limits: list[LimitData] = Field(examples=[["1000/minute burst 200"]])
    consistency: str | None = Field(
        description="The tier's own consistency; null: that of each rule.", examples=["strict"]
    )


class TierPage(ApiOutput):
    """Tiers, in the order of the document."""

    items: list[TierOut]
    total: Total
    next: NextOffset


class TierIn(ApiInput):
    """The limits of a tier."""

    limits: LimitsData = Field(examples=[["1000/minute burst 200"]])
    consistency: str | None = Field(
        default=None,
        description="`strict`, `leased` or `eventual`. Without it, that of each rule applies.",
        examples=["strict"],
        max_length=32,
    )
    reason: Reason


class AssignmentOut(ApiOutput):
    """The tier of a subject."""

    subject: str = Field(examples=["user:42"])
    tier: str = Field(examples=["pro"])


class AssignmentPage(ApiOutput):
    """Assignments: those beside the document by subject, then those in it."""

    items: list[AssignmentOut]
    total: Total
    next: NextOffset


class AssignmentIn(ApiInput):
    """The new tier of a subject."""

    tier: str = Field(examples=["pro"], min_length=1, max_length=128)
    reason: Reason


class OverridePage(ApiOutput):
    """Overrides: those beside the document by id, then those in it."""

    items: list[OverrideData]
    total: Total
    next: NextOffset


class EntryPage(ApiOutput):
    """The entries of a list."""

    items: list[str]
    total: Total
    next: NextOffset


class EntryIn(ApiInput):
    """An entry of a list: a key or user (exact or with * ? [abc]), an address or a network."""

    entry: str = Field(
        examples=["api_key:sk_internal_*", "10.0.0.0/8"], min_length=1, max_length=1_100
    )
    reason: Reason


# ── Tiers ────────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/tiers",
    tags=["tiers"],
    operation_id="list_tiers",
    summary="All tiers",
    responses=rules_responses(),
)
async def list_tiers(
    response: Response,
    control: Control,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> TierPage:
    """Return the tiers of the newest rules, in their order."""
    found = if_newer(await control.current(), if_none_match)
    response.headers["ETag"] = found.etag
    rows = list(found.document.tiers.items())
    page = page_of(response, "/tiers", rows, limit, offset)
    items = [_tier(name, found.document) for name, _ in page.items]
    return TierPage(items=items, total=page.total, next=page.next)


def _tier(name: str, document: Document) -> TierOut:
    one = document.tiers[name]
    limits = [limit_data(each) for each in one.limits]
    return TierOut(name=name, limits=limits, consistency=one.consistency)


@router.get(
    "/tiers/{name:path}",
    tags=["tiers"],
    operation_id="get_tier",
    summary="One tier",
    responses=rules_responses(404),
)
async def get_tier(
    name: TierName, response: Response, control: Control, if_none_match: IfNoneMatch = None
) -> TierOut:
    """Return the limits of one tier."""
    found = if_newer(await control.current(), if_none_match)
    if name not in found.document.tiers:
        raise edits.NotFound(f"there is no tier {show(name)} in the rules in force")
    response.headers["ETag"] = found.etag
    return _tier(name, found.document)


@router.put(
    "/tiers/{name:path}",
    tags=["tiers"],
    operation_id="put_tier",
    summary="Set a tier",
    responses=change_responses(),
)
async def put_tier(name: TierName, tier: TierIn, editor: Editor) -> VersionOut:
    """Set the limits of a tier, or make a new tier."""
    fields: dict[str, Any] = {"limits": tier.limits}
    if tier.consistency is not None:
        fields["consistency"] = tier.consistency
    data = {"version": 1, "tiers": {name: fields}}
    parsed = placed(lambda: from_data(data, "<body>"), f"{below('tiers', name)}.", "")
    one = parsed.tiers[name]
    return await editor.edit(
        "set-tier",
        lambda document: edits.set_tier(document, name, one.limits, one.consistency),
        tier.reason,
    )


@router.delete(
    "/tiers/{name:path}",
    tags=["tiers"],
    operation_id="delete_tier",
    summary="Remove a tier",
    responses=change_responses(404),
)
async def delete_tier(name: TierName, editor: Editor) -> VersionOut:
    """Remove a tier. It must have no members, and no rule may name it."""
    return await editor.edit("remove-tier", lambda document: edits.remove_tier(document, name))


# ── Assignments ──────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/assignments",
    tags=["assignments"],
    operation_id="list_assignments",
    summary="All assignments",
    responses=rules_responses(429, paged=True),
)
async def list_assignments(
    request: Request,
    response: Response,
    control: Control,
    tier: Annotated[
        str | None, Query(description="Only the members of this tier.", max_length=_NAME_MAX)
    ] = None,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> AssignmentPage:
    """Return the subjects and their tiers: entries by subject, then those of the document."""
    found = await _current(response, control, if_none_match)
    async with control.heavy.turn(request.state.token, found.document):
        in_document = await asyncio.to_thread(_assignments_of, found.document, tier)
    page = await _page(control, "assignment", in_document, limit, offset, tier)
    items = [AssignmentOut(subject=entry.key, tier=entry.data) for entry in page.items]
    _link(response, "/assignments", page.next, limit, tier=tier)
    return AssignmentPage(items=items, total=page.total, next=page.next)


def _assignments_of(document: Document, tier: str | None) -> list[Entry]:
    """Return the assignments of a document, which may have a million."""
    found = (Entry("assignment", *pair) for pair in document.assign.items())
    return [entry for entry in found if tier in {None, entry.data}]


async def _current(
    response: Response, control: ControlPlane, if_none_match: str | None
) -> CurrentRules:
    """Return the newest rules, with an ETag that also changes with the entries beside them."""
    found = await control.current()
    rows = await control.entries()
    if rows is not None and found.number is not None:
        position = await rows.position()
        found = found._replace(etag=etag_of(found.number, position.seq))
    response.headers["ETag"] = if_newer(found, if_none_match).etag
    return found


async def _page(
    control: ControlPlane,
    kind: EntryKind,
    in_document: Sequence[Entry],
    limit: int,
    offset: int,
    data: str | None = None,
) -> PageRows[Entry]:
    """Return a page of the entries beside the document, and then of those in it."""
    rows = await control.entries()
    found: list[Entry] = []
    total = 0
    if rows is not None:
        found, total = await rows.page(kind, limit=limit, offset=offset, data=data)
        known = await rows.known(kind, [entry.key for entry in in_document])
        in_document = [entry for entry in in_document if entry.key not in known]
    start = max(0, offset - total)
    found += in_document[start : start + limit - len(found)]
    total += len(in_document)
    return PageRows(found, total, offset + limit if offset + limit < total else None)


def _link(
    response: Response, path: str, following: int | None, limit: int, **query: str | None
) -> None:
    if following is not None:
        link_next(response, path, limit=limit, offset=following, **query)


@router.get(
    "/assignments/{subject:path}",
    tags=["assignments"],
    operation_id="get_assignment",
    summary="One assignment",
    responses=rules_responses(404),
)
async def get_assignment(
    subject: Subject, response: Response, control: Control, if_none_match: IfNoneMatch = None
) -> AssignmentOut:
    """Return the tier of a subject."""
    found = await _current(response, control, if_none_match)
    rows = await control.entries()
    entry = None if rows is None else await rows.get("assignment", subject)
    tier = found.document.assign.get(subject) if entry is None else entry.data
    if tier is None:
        raise edits.NotFound(f"{show(subject)} is assigned to no tier")
    return AssignmentOut(subject=subject, tier=tier)


@router.put(
    "/assignments/{subject:path}",
    tags=["assignments"],
    operation_id="put_assignment",
    summary="Assign a tier",
    responses=change_responses(),
)
async def put_assignment(
    subject: Subject,
    assignment: AssignmentIn,
    editor: Editor,
) -> VersionOut:
    """Assign a subject to a tier, in place of its former tier."""
    data = {"version": 1, "tiers": {assignment.tier: "1/s"}, "assign": {subject: assignment.tier}}
    from_data(data, "<body>")  # raises an error that names the place
    return await editor.put(entries.assignment(subject, assignment.tier), assignment.reason)


@router.delete(
    "/assignments/{subject:path}",
    tags=["assignments"],
    operation_id="delete_assignment",
    summary="Remove an assignment",
    responses=change_responses(404),
)
async def delete_assignment(subject: Subject, editor: Editor) -> VersionOut:
    """Remove a subject from its tier."""
    return await editor.remove(
        "assignment", [subject], lambda document: edits.unassign(document, subject)
    )


# ── Overrides ────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/overrides",
    tags=["overrides"],
    operation_id="list_overrides",
    summary="All overrides",
    responses=rules_responses(paged=True),
)
async def list_overrides(
    response: Response,
    control: Control,
    subject: Annotated[
        str | None,
        Query(
            description="Only those of this user, key, tenant or address; one page has all of them "
            "up to the limit.",
            examples=["user:42"],
            max_length=_SUBJECT_MAX,
        ),
    ] = None,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> OverridePage:
    """Return the overrides: entries that are in force by id, then those of the document."""
    found = await _current(response, control, if_none_match)
    if subject is not None:
        return await _overrides_of(control, found.document, subject, limit)
    data = to_data(Document(overrides=found.document.overrides)).get("overrides", [])
    in_document = [Entry("override", each.get("id", ""), json.dumps(each)) for each in data]
    page = await _page(control, "override", in_document, limit, offset)
    _link(response, "/overrides", page.next, limit)
    items = [
        {**({"id": entry.key} if entry.key else {}), **json.loads(entry.data)}
        for entry in page.items
    ]
    return OverridePage(items=items, total=page.total, next=page.next)


async def _overrides_of(
    control: ControlPlane, document: Document, subject: str, limit: int
) -> OverridePage:
    rows = await control.entries()
    beside = [] if rows is None else await rows.by_subject("override", subject, "", limit + 1)
    # Those of this very subject come first.
    items = [
        {"id": entry.key, **json.loads(entry.data)} for owner, entry in beside if owner == subject
    ]
    own = tuple(each for each in document.overrides if f"{each.attribute}:{each.value}" == subject)
    items += to_data(Document(overrides=own)).get("overrides", [])
    return OverridePage(items=items[:limit], total=len(items), next=None)


@router.post(
    "/overrides",
    tags=["overrides"],
    operation_id="add_override",
    summary="Add an override",
    responses=change_responses(),
)
async def add_override(
    override: OverrideBody, response: Response, control: Control, change: Change
) -> VersionOut:
    """Add other limits for one user, key, tenant or address, until a time.

    It needs a reason (here or in the header) and an end: `until` is a time with its zone, or a
    duration such as `2h`. Without an id it gets one. The newest override of a subject applies.
    """
    document = await (await control.repository()).newest_document()
    now = datetime.now(UTC)
    rules = [rule.id for rule in document.rules]
    parsed = await asyncio.to_thread(
        lambda: placed(
            lambda: entries.parse_override(override, rules, now), "overrides[0]", "override"
        )
    )
    change = change.because(change.reason or parsed.reason)
    signed = replace(
        parsed, author=parsed.author or change.author, reason=parsed.reason or change.reason
    )
    made = await control.put_entry(change, entries.override_entry(signed, now))
    return await change_reply(response, control, made)


@router.get(
    "/overrides/{subject:path}",
    tags=["overrides"],
    operation_id="get_override",
    summary="One override",
    responses=good_responses(*READ, 404),
    response_model=OverrideData,
)
async def get_override(subject: OverrideId, control: Control) -> Any:
    """Return one override by its id: an entry that is in force, or one of the document."""
    rows = await control.entries()
    entry = None if rows is None else await rows.get("override", subject)
    if entry is not None:
        return {"id": entry.key, **json.loads(entry.data)}
    document = (await control.current()).document
    found = tuple(each for each in document.overrides if each.id == subject)
    if not found:
        raise edits.NotFound(f"there is no override {show(subject)}; it has perhaps ended")
    return to_data(Document(overrides=found))["overrides"][0]


@router.delete(
    "/overrides/{subject:path}",
    tags=["overrides"],
    operation_id="delete_override",
    summary="Remove an override",
    responses=change_responses(404),
)
async def delete_override(
    subject: Subject,
    editor: Editor,
    rule: Annotated[
        str | None,
        Query(
            description="The override for this rule; by default the one that names no rule.",
            max_length=128,
        ),
    ] = None,
) -> VersionOut:
    """Remove one override by its id, or a subject's overrides for a rule."""
    if ":" not in subject:
        return await editor.remove(
            "override", [subject], lambda document: edits.remove_override_id(document, subject)
        )
    attribute, _, value = subject.partition(":")
    if attribute not in _OWNERS or not value:
        raise ConfigError(
            f"{show(subject)} is not the id of an override or a subject; "
            f"write user:42, api_key:sk_1, tenant:acme or ip:192.0.2.7"
        )
    if attribute == "ip":
        value = str(compile_network(value))
    rows = (await editor.control.repository()).entries
    keys = [entry.key for entry in await rows.overrides_of(attribute, value, rule)]
    return await editor.remove(
        "override",
        keys,
        lambda document: edits.remove_override(document, attribute, value, rule),
    )


# ── Lists ────────────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/lists/{list_name}",
    tags=["lists"],
    operation_id="get_list",
    summary="The entries of a list",
    responses=rules_responses(429, paged=True),
)
async def get_list(
    request: Request,
    list_name: Which,
    response: Response,
    control: Control,
    entry: Annotated[
        str | None,
        Query(
            description="Only this entry, if the list has it.",
            examples=["user:42"],
            min_length=1,
            max_length=_ENTRY_MAX,
        ),
    ] = None,
    limit: Rows = ROWS,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> EntryPage:
    """Return the entries of `allow` (never limited) or `deny` (always denied; it has priority)."""
    found = await _current(response, control, if_none_match)
    listed = getattr(found.document, list_name)
    async with control.heavy.turn(request.state.token, found.document):
        in_document = await asyncio.to_thread(
            lambda: [entries.list_entry(list_name, each) for each in listed]
        )
    if entry is not None:
        return await _listed(control, in_document, entries.list_entry(list_name, entry))
    page = await _page(control, list_name, in_document, limit, offset)
    _link(response, f"/lists/{list_name}", page.next, limit)
    return EntryPage(items=[entry.data for entry in page.items], total=page.total, next=page.next)


async def _listed(control: ControlPlane, in_document: Sequence[Entry], wanted: Entry) -> EntryPage:
    rows = await control.entries()
    beside = None if rows is None else await rows.get(wanted.kind, wanted.key)
    known = beside is not None or any(each.key == wanted.key for each in in_document)
    return EntryPage(items=[wanted.key] if known else [], total=int(known), next=None)


@router.post(
    "/lists/{list_name}",
    tags=["lists"],
    operation_id="add_entry",
    summary="Add an entry to a list",
    responses=change_responses(),
)
async def add_entry(list_name: Which, entry: EntryIn, editor: Editor) -> VersionOut:
    """Add an entry to a list."""
    return await editor.put(entries.list_entry(list_name, entry.entry), entry.reason)


@router.delete(
    "/lists/{list_name}",
    tags=["lists"],
    operation_id="delete_entry",
    summary="Remove an entry from a list",
    responses=change_responses(404),
)
async def delete_entry(
    list_name: Which,
    editor: Editor,
    entry: Annotated[
        str,
        Query(
            description="The entry as the list has it.",
            examples=["10.0.0.0/8"],
            min_length=1,
            max_length=_ENTRY_MAX,
        ),
    ],
) -> VersionOut:
    """Remove an entry. It is in the query, because many entries contain slashes."""
    return await editor.remove(
        list_name, [entry], lambda document: edits.remove_entry(document, list_name, entry)
    )
