"""Search over all subjects that the service knows, in pages of bounded cost.

A subject is known if it has an assignment, an override, an exact entry on a list, or recorded
usage. Each of these is a *source* that an index reads in the order of subjects, from the beginning
that is searched. A page merges one page of each source, so its cost is the number of sources times
the length of the page, whatever the number of subjects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from ratekeeper.control.entries import EntryRows
from ratekeeper.core.subjects import SEPARATOR, beyond
from ratekeeper.history.reading import Records
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.entries import ListName, list_entry
from ratekeeper.service.admin.operations import (
    ROWS,
    AdminRoute,
    Control,
    Rows,
    link_next,
    page_responses,
)
from ratekeeper.service.admin.problems import ApiOutput

router = APIRouter(route_class=AdminRoute)

QUERY_LENGTH_MAX: Final = 600
# A bare text is searched as each of these, in the order of subjects.
_ATTRIBUTES: Final = ("api_key", "ip", "tenant", "user")
_LISTS: Final[tuple[ListName, ...]] = ("allow", "deny")
_PATTERN: Final = frozenset("*?[")


class SubjectOut(ApiOutput):
    """A subject, and where it is known from."""

    subject: list[str] = Field(description="Its parts.", examples=[["user:42"]])
    tier: str | None = Field(description="The tier that it is assigned to.", examples=["pro"])
    overrides: int = Field(description="The number of its overrides.")
    lists: list[ListName] = Field(description="The lists that name it.")
    recorded: bool = Field(description="True if it has recorded usage.")


class SubjectPage(ApiOutput):
    """Subjects, in the order of their code points."""

    items: list[SubjectOut]
    next: str | None = Field(description="`after` for the next page; null if this is the last one.")


@dataclass(slots=True)
class _KnownSubject:
    """The data of all sources about one subject."""

    tier: str | None = None
    overrides: int = 0
    lists: set[ListName] = field(default_factory=set)
    recorded: bool = False


class _Merged:
    """The subjects of several sources, as far as all sources have been read."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, _KnownSubject] = {}
        self._read_to: list[str] = []

    def of(self, subject: str) -> _KnownSubject:
        """Return the data about a subject; empty data if it is new."""
        return self._known.setdefault(subject, _KnownSubject())

    def end(self, subjects: Sequence[str]) -> None:
        """Note how far a source was read: to the last of its subjects, if its page was full."""
        if len(subjects) > self._limit:
            self._read_to.append(subjects[-1])

    def page(self) -> tuple[list[tuple[str, _KnownSubject]], str | None]:
        """Return the page, and its last subject if more follow."""
        read_to = min(self._read_to, default=None)
        found = sorted(
            pair for pair in self._known.items() if read_to is None or pair[0] <= read_to
        )
        items = found[: self._limit]
        more = len(found) > len(items) or read_to is not None
        return items, items[-1][0] if more and items else None


@router.get(
    "/subjects",
    tags=["subjects"],
    operation_id="search_subjects",
    summary="Search subjects",
    responses=page_responses(429),
)
async def search_subjects(
    request: Request,
    response: Response,
    control: Control,
    q: Annotated[
        str,
        Query(
            description="The beginning of a subject (`user:4`), or of its value (`4`): a user, an "
            "API key, a tenant or an address. Empty: all subjects.",
            max_length=QUERY_LENGTH_MAX,
        ),
    ] = "",
    limit: Rows = ROWS,
    after: Annotated[
        str, Query(description="`next` of the previous page.", max_length=QUERY_LENGTH_MAX)
    ] = "",
) -> SubjectPage:
    """Return the subjects with an assignment, an override, an exact list entry or recorded usage.

    Patterns on lists and networks are not subjects.
    """
    merged = _Merged(limit)
    document = (await control.current()).document
    rows = await control.entries()
    recorder = control.context.recorder
    wanted = [begin for begin in beginnings(q) if (end := beyond(begin)) is None or end > after]
    async with control.heavy.turn(request.state.token, document):
        await asyncio.to_thread(_add_document, merged, document, wanted, after)
    for begin in wanted:
        if rows is not None:
            await _add_entries(merged, rows, begin, after, limit + 1)
        if recorder is not None:
            await _add_records(merged, recorder.records, begin, after, limit + 1)
    found, following = merged.page()
    if following is not None:
        link_next(response, "/subjects", q=q or None, limit=limit, after=following)
    items = [
        SubjectOut(
            subject=subject.split(SEPARATOR),
            tier=known.tier,
            overrides=known.overrides,
            lists=sorted(known.lists),
            recorded=known.recorded,
        )
        for subject, known in found
    ]
    return SubjectPage(items=items, next=following)


def beginnings(text: str) -> list[str]:
    """Return the beginnings of subjects that a text may stand for.

    >>> beginnings("user:42"), beginnings("42"), beginnings("")
    (['user:42'], ['api_key:42', 'ip:42', 'tenant:42', 'user:42'], [''])
    """
    name, colon, _ = text.partition(":")
    if not text or (colon and name in _ATTRIBUTES):
        return [text]
    found = [f"{attribute}:{text}" for attribute in _ATTRIBUTES]
    # An attribute of its own, such as region:eu; but 2001:db8:: is an address.
    return sorted([*found, text]) if colon and name.isidentifier() else found


def _add_document(merged: _Merged, document: Document, wanted: Sequence[str], after: str) -> None:
    """Add the subjects of the document with one of these beginnings. It may have a million."""
    begin = tuple(wanted)
    for subject, tier in document.assign.items():
        if subject.startswith(begin) and subject > after:
            merged.of(subject).tier = tier
    for override in document.overrides:
        subject = f"{override.attribute}:{override.value}"
        if subject.startswith(begin) and subject > after:
            merged.of(subject).overrides += 1
    for name in _LISTS:
        for text in document.allow if name == "allow" else document.deny:
            key = list_entry(name, text).key
            if _is_exact(key) and key.startswith(begin) and key > after:
                merged.of(key).lists.add(name)


def _is_exact(key: str) -> bool:
    """Return True if an entry of a list names one client: no pattern and no network."""
    return _PATTERN.isdisjoint(key) and not (key.startswith("ip:") and "/" in key)


async def _add_entries(
    merged: _Merged, rows: EntryRows, begin: str, after: str, limit: int
) -> None:
    assigned = await rows.by_subject("assignment", begin, after, limit)
    merged.end([subject for subject, _ in assigned])
    for subject, entry in assigned:
        merged.of(subject).tier = entry.data
    overridden = await rows.by_subject("override", begin, after, limit)
    merged.end([subject for subject, _ in overridden])
    for subject, _ in overridden:
        merged.of(subject).overrides += 1
    for name in _LISTS:
        listed = await rows.by_subject(name, begin, after, limit)
        merged.end([subject for subject, _ in listed])
        for key, _ in listed:
            if _is_exact(key):
                merged.of(key).lists.add(name)


async def _add_records(
    merged: _Merged, records: Records, begin: str, after: str, limit: int
) -> None:
    found = await records.subjects(begin, after, limit)
    merged.end(found)
    for subject in found:
        # All requests together, the rest of a full table, and subjects that are not recorded.
        if ":" in subject:
            merged.of(subject).recorded = True
