"""Files of entries, for import and export: CSV, JSON and JSON lines.

    kind,subject,tier,id,rule,limits,multiply,until,reason,author
    assignment,user:42,pro,,,,,,,
    override,tenant:acme,,launch,api,,5,2030-01-01T00:00:00Z,launch week,ann
    deny,203.0.113.0/24,,,,,,,,

A CSV file starts with the names of its columns, in any order. Columns that no row needs may be left
out, and without `kind` every row is an assignment. JSON is a list of objects with these fields, and
JSON lines are one object a line.

A file is read to its end: every bad line is a problem with its number, up to PROBLEMS_MAX. The file
is never in memory as a whole. A million assignments take about 140 MB of entries.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import IO, Any, Final, Literal, get_args

from ratekeeper.control.entries import EntryChange, EntryRows, InvalidEntry
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.document.tree import DocumentProblem
from ratekeeper.rules.entries import (
    ENTRY_KINDS,
    Entry,
    EntryKind,
    assignment,
    list_entry,
    override_entry,
    parse_override,
)

FileForm = Literal["csv", "json", "jsonl"]
FORMS: Final[tuple[FileForm, ...]] = get_args(FileForm)
PROBLEMS_MAX: Final = 100
ENTRY_CHARACTERS_MAX: Final = 65_536
_CHUNK_CHARACTERS: Final = 262_144

_OVERRIDE: Final = ("id", "rule", "limits", "multiply", "until", "reason", "author")
COLUMNS: Final = ("kind", "subject", "tier", *_OVERRIDE)
_FIELDS: Final[dict[EntryKind, frozenset[str]]] = {
    "assignment": frozenset({"kind", "subject", "tier"}),
    "override": frozenset({"kind", "subject", *_OVERRIDE}),
    "allow": frozenset({"kind", "subject"}),
    "deny": frozenset({"kind", "subject"}),
}
# Text between the parts of a JSON list: before it, between its objects, after it.
_SPACE: Final = {
    "before": re.compile(r"\s*"),
    "inside": re.compile(r"[\s,]*"),
    "after": re.compile(r"\s*"),
}
_EXAMPLE: Final = '{"kind": "assignment", "subject": "user:42", "tier": "pro"}'


@dataclass(slots=True)
class EntryFile:
    """The entries of a file, each with the number of its line."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    lines: array[int] = field(default_factory=lambda: array("L"))

    problems: list[DocumentProblem] = field(default_factory=list)
    """The lines that are not valid entries."""

    def reject(self, line: int, message: str) -> None:
        """Note that a line has a mistake."""
        self.problems.append(DocumentProblem(self.name, line, 1, "", message))

    def check(self, wrong: Iterable[tuple[int, str]]) -> None:
        """Raise DocumentError if a line has a mistake; `wrong` has further ones, by position."""
        for at, message in wrong:
            self.reject(self.lines[at], message)
        if self.problems:
            found = sorted(self.problems, key=lambda problem: problem.line)
            raise DocumentError(tuple(found[:PROBLEMS_MAX]))


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────


def read_entries(
    file: IO[bytes],
    form: FileForm,
    now: datetime,
    *,
    name: str = "<body>",
    entries_max: int,
    progress: Callable[[int], None] | None = None,
) -> EntryFile:
    """Return all entries of a file, and the lines with mistakes, up to PROBLEMS_MAX.

    `name`      the name of the file in problems
    `now`       the time by which an override must not have ended
    `progress`  called with the number of lines read, now and then
    """
    # Bytes that are not UTF-8 become characters that no field accepts, with the line's number.
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    found = EntryFile(name)
    try:
        for line, row in _READERS[form](text):
            try:
                if isinstance(row, ConfigError):
                    raise row
                entry = _entry_of(row, now)
            except ConfigError as error:
                found.reject(line, _message(error))
                if len(found.problems) == PROBLEMS_MAX:
                    break
                continue
            if len(found.entries) == entries_max:
                found.reject(line, f"there are more than {entries_max:,} entries; split the file")
                break
            found.entries.append(entry)
            found.lines.append(line)
            if progress is not None and len(found.entries) % 10_000 == 0:
                progress(len(found.entries))
    finally:
        text.detach()
    if not found.entries and not found.problems:
        found.reject(1, "the file has no entries")
    return found


async def write_file(
    rows: EntryRows,
    found: EntryFile,
    *,
    author: str,
    reason: str,
    replace: bool,
    progress: Callable[[int], None] | None = None,
) -> EntryChange:
    """Write all entries of a file, or none. Raises DocumentError, with the numbers of bad lines."""
    found.check(await rows.problems(found.entries, PROBLEMS_MAX))
    try:
        return await rows.write(
            found.entries, author=author, reason=reason, replace=replace, progress=progress
        )
    except InvalidEntry as error:
        found.check([(error.position, str(error))])
        raise


# A row of a file, or the reason why it has none.
_Row = dict[str, Any] | ConfigError


def _csv_rows(text: io.TextIOWrapper) -> Iterator[tuple[int, _Row]]:
    reader = csv.reader(text, strict=True)
    line = 1
    names: list[str] | None = None
    try:
        for cells in reader:
            if names is None:
                names = [name.strip() for name in cells]
                _check_columns(names)
            elif cells:
                yield line, _row_of(names, cells)
            line = reader.line_num + 1
    except csv.Error as error:
        yield line, ConfigError(f"it is not CSV: {error}")
    except ConfigError as error:
        yield line, error


def _check_columns(names: list[str]) -> None:
    known = ", ".join(COLUMNS)
    for name in names:
        if name not in COLUMNS:
            raise ConfigError(f"unknown column {show(name)}; known: {known}")
    if len(set(names)) < len(names):
        raise ConfigError("a column is named twice")
    if "subject" not in names:
        raise ConfigError("the first line has no column subject; for example subject,tier")


def _row_of(names: list[str], cells: list[str]) -> _Row:
    if len(cells) != len(names):
        return ConfigError(f"it has {len(cells)} fields, and the first line has {len(names)}")
    row: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
    try:
        if "multiply" in row:
            row["multiply"] = float(row["multiply"])
        if row.get("limits", "").startswith(("[", "{")):
            row["limits"] = _strict_json(row["limits"])
    except (ValueError, RecursionError) as error:
        return ConfigError(f"multiply or limits: {error}")
    return row


def _json_lines(text: io.TextIOWrapper) -> Iterator[tuple[int, _Row]]:
    line = 0
    while written := text.readline(ENTRY_CHARACTERS_MAX):
        line += 1
        if len(written) == ENTRY_CHARACTERS_MAX:
            yield line, ConfigError(f"it has more than {ENTRY_CHARACTERS_MAX:,} characters")
            return
        if written.strip():
            yield line, _object(written)


def _json_list(text: io.TextIOWrapper) -> Iterator[tuple[int, _Row]]:
    """Yield the objects of a JSON list, without the whole text in memory."""
    decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_no_constant)
    buffer, at, line, depth = "", 0, 1, "before"
    while True:
        skipped = _SPACE[depth].match(buffer, at)
        line += buffer.count("\n", at, skipped.end() if skipped else at)
        at = skipped.end() if skipped else at
        problem = "the list does not end"
        if depth == "after":
            if at < len(buffer):
                yield line, ConfigError("there is more text after the end of the list")
                return
        elif depth == "before" and at < len(buffer):
            if buffer[at] != "[":
                yield line, ConfigError(f"it is not a JSON list; for example [{_EXAMPLE}]")
                return
            depth, at = "inside", at + 1
            continue
        elif buffer.startswith("]", at):
            depth, at = "after", at + 1
            continue
        elif at < len(buffer):
            try:
                row, end = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError) as error:
                problem = str(error)
            else:
                is_row = isinstance(row, dict)
                yield line, row if is_row else ConfigError(f"it is not an object: {_EXAMPLE}")
                line += buffer.count("\n", at, end)
                at = end
                continue
        buffer, at = buffer[at:], 0
        chunk = text.read(_CHUNK_CHARACTERS) if len(buffer) < ENTRY_CHARACTERS_MAX else ""
        if not chunk:
            if depth != "after":
                yield line, ConfigError(f"it is not a JSON list of entries: {problem}")
            return
        buffer += chunk


_READERS: Final[dict[FileForm, Callable[[io.TextIOWrapper], Iterator[tuple[int, _Row]]]]] = {
    "csv": _csv_rows,
    "json": _json_list,
    "jsonl": _json_lines,
}


def _object(written: str) -> _Row:
    try:
        row = _strict_json(written)
    except (ValueError, RecursionError) as error:
        return ConfigError(f"it is not JSON: {error}; for example {_EXAMPLE}")
    return row if isinstance(row, dict) else ConfigError(f"it is not an object such as {_EXAMPLE}")


def _strict_json(written: str) -> Any:
    return json.loads(written, object_pairs_hook=_pairs, parse_constant=_no_constant)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _entry_of(row: Mapping[str, Any], now: datetime) -> Entry:
    kind = row.get("kind", "assignment")
    if kind not in ENTRY_KINDS:
        raise ConfigError(f"kind={show(kind)} is none of {', '.join(ENTRY_KINDS)}")
    if unknown := row.keys() - _FIELDS[kind]:
        known = ", ".join(name for name in COLUMNS if name in _FIELDS[kind])
        raise ConfigError(f"{kind} has no field {show(min(unknown))}; it has {known}")
    subject = row.get("subject")
    if not isinstance(subject, str) or not subject:
        raise ConfigError("subject is missing; for example user:42")
    if kind == "assignment":
        tier = row.get("tier", "")
        return assignment(subject, sys.intern(tier) if isinstance(tier, str) else tier)
    if kind in {"allow", "deny"}:
        return list_entry(kind, subject)
    attribute, _, value = subject.partition(":")
    data = {name: row[name] for name in _OVERRIDE if name in row}
    return override_entry(parse_override({"for": {attribute: value}, **data}, None, now), now)


def _message(error: ConfigError) -> str:
    """Return the message on one line, without the place in a document that the file is not."""
    if isinstance(error, DocumentError):
        first = error.problems[0]
        name = first.where.removeprefix("overrides[0]").lstrip(".")
        return f"{name}: {first.message}" if name else first.message
    return " ".join(str(error).split())


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────


def file_head(form: FileForm) -> str:
    """Return the text before the first entry."""
    return {"csv": ",".join(COLUMNS) + "\r\n", "json": "[", "jsonl": ""}[form]


def file_tail(form: FileForm) -> str:
    """Return the text after the last entry."""
    return "\n]\n" if form == "json" else ""


def write_entries(entries: Iterable[Entry], form: FileForm, *, first: bool) -> str:
    """Return the text of some entries; `first` if no entry was written before them."""
    if form == "csv":
        target = io.StringIO()
        writer = csv.writer(target)
        for entry in entries:
            row = _data_of(entry)
            if isinstance(limits := row.get("limits"), list):
                plain = all(isinstance(limit, str) for limit in limits)
                row["limits"] = "; ".join(limits) if plain else json.dumps(limits)
            writer.writerow([row.get(name, "") for name in COLUMNS])
        return target.getvalue()
    lines = [json.dumps(_data_of(entry), ensure_ascii=False) for entry in entries]
    if form == "jsonl":
        return "".join(f"{line}\n" for line in lines)
    separator = ",\n"
    return ("\n" if first else separator) + separator.join(lines) if lines else ""


def _data_of(entry: Entry) -> dict[str, Any]:
    if entry.kind == "assignment":
        return {"kind": entry.kind, "subject": entry.key, "tier": entry.data}
    if entry.kind in {"allow", "deny"}:
        return {"kind": entry.kind, "subject": entry.data}
    data = json.loads(entry.data)
    ((attribute, value),) = data.pop("for").items()
    return {"kind": "override", "subject": f"{attribute}:{value}", "id": entry.key, **data}
