"""Import and export of assignments, overrides and list entries over HTTP.

An import is all or nothing. Its body is written to a temporary file while it arrives, so its size
is bounded by the disk and not by memory. A thread then reads all lines, and only if all are right,
one transaction writes them. A worker makes one import at a time; further ones wait before their
bodies are read.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import IO, Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import StreamingResponse

from ratekeeper.control.entries import EntryChange
from ratekeeper.control.entry_files import (
    FileForm,
    file_head,
    file_tail,
    read_entries,
    write_entries,
    write_file,
)
from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.entries import EntryKind
from ratekeeper.service.admin.operations import (
    ANY_CONTENT,
    READ,
    WRITE,
    AdminRoute,
    Change,
    Control,
    error_responses,
)
from ratekeeper.service.admin.problems import ApiOutput, body_error
from ratekeeper.service.http.bodies import BodyRejected, too_slow
from ratekeeper.service.http.incoming import FILE_BYTES, parts_of

router = APIRouter(tags=["entries"], route_class=AdminRoute)

FILE_ENTRIES_MAX: Final = 2_000_000
FILE_SECONDS_MAX: Final = 600.0
_TYPES: Final[dict[FileForm, str]] = {
    "csv": "text/csv",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
}
_CONTENT: Final = {
    _TYPES["csv"]: {"schema": {"type": "string"}},
    _TYPES["json"]: {"schema": {"type": "array", "items": {"type": "object"}}},
    _TYPES["jsonl"]: {"schema": {"type": "string"}},
}

Form = Annotated[FileForm, Query(alias="format", description="The format of the file.")]


class ImportOut(ApiOutput):
    """A file that was imported."""

    seq: int = Field(description="The number of the change.", examples=[17])
    entries: int = Field(description="The entries in the file.", examples=[1000])
    changed: int = Field(description="The entries that were new or different.", examples=[3])


@router.post(
    "/entries/import",
    operation_id="import_entries",
    summary="Import entries from a file",
    responses=error_responses(*(set(WRITE) - {412, 415})),
    openapi_extra={"requestBody": {"required": True, "content": _CONTENT}, ANY_CONTENT: True},
)
async def import_entries(
    request: Request,
    control: Control,
    change: Change,
    form: Form = "csv",
    replace: Annotated[
        bool, Query(description="An override replaces the one with the same id.")
    ] = False,
) -> ImportOut:
    """Write all entries of a CSV, JSON or JSON lines file, or none of them.

    The lines with mistakes are in `problems`, up to 100 of them. The reason is the header
    `X-Reason`.
    """
    repository = await control.repository()
    if change.force or change.condition is not None:
        raise ConfigError("an import takes no force, If-Match or If-None-Match; leave them out")
    async with control.importing:
        with tempfile.TemporaryFile(prefix="ratekeeper-import-") as file:
            await _receive(request, file)
            file.seek(0)
            made, count = await _import(repository, file, form, change, replace=replace)
    await control.announce(made.seq)
    return ImportOut(seq=made.seq, entries=count, changed=made.count)


async def _receive(request: Request, file: IO[bytes]) -> None:
    """Write the body to a file. Raises AdminError."""
    headers = dict(request.scope["headers"])
    try:
        async with asyncio.timeout(FILE_SECONDS_MAX):
            async for part in parts_of(request.receive, headers, FILE_BYTES):
                file.write(part)
    except TimeoutError:
        raise body_error(too_slow()) from None
    except BodyRejected as error:
        raise body_error(error) from None


async def _import(
    repository: Repository, file: IO[bytes], form: FileForm, change: Change, *, replace: bool
) -> tuple[EntryChange, int]:
    now = datetime.now(UTC)
    found = await asyncio.to_thread(read_entries, file, form, now, entries_max=FILE_ENTRIES_MAX)
    made = await write_file(
        repository.entries, found, author=change.author, reason=change.reason, replace=replace
    )
    return made, len(found.entries)


@router.get(
    "/entries/export",
    operation_id="export_entries",
    summary="Export entries as a file",
    response_class=StreamingResponse,
    responses={
        200: {"description": "The file.", "content": _CONTENT},
        **error_responses(*READ, 409),
    },
)
async def export_entries(
    control: Control,
    form: Form = "csv",
    kind: Annotated[EntryKind | None, Query(description="Only entries of this kind.")] = None,
) -> Any:
    """Return all assignments, overrides and list entries, in a format that can be imported."""
    repository = await control.repository()
    headers = {"Content-Disposition": f'attachment; filename="entries.{form}"'}
    return StreamingResponse(
        _exported(repository, form, kind), media_type=_TYPES[form], headers=headers
    )


async def _exported(
    repository: Repository, form: FileForm, kind: EntryKind | None
) -> AsyncIterator[str]:
    yield file_head(form)
    first = True
    async with aclosing(repository.entries.stream([kind] if kind else None)) as batches:
        async for batch in batches:
            yield await asyncio.to_thread(write_entries, batch, form, first=first)
            first = False
    yield file_tail(form)
