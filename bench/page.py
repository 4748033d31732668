"""The page of the documentation with the tables that `python -m bench` printed.

    python -m bench --markdown docs/benchmarks.md

The benchmark prints sections with a blank line between them. A section has some lines of text and a
table, whose columns are marked by a line of dashes, or text only. Nothing on the page is
computed again, so it has the numbers that were printed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

_DASHES: Final = re.compile(r"-+(?:  -+)+")
_NUMBER: Final = re.compile(r"[+-]?[\d,.]+%?")
# The spaces between two columns.
_GAP: Final = 2
TITLE_LENGTH_MAX: Final = 60

_INTRODUCTION: Final = """\
# Benchmarks

This page shows the tables of one benchmark run. They compare Ratekeeper with other libraries on the
same machine and with the same work. Run `make bench` on your own machine: the times depend on the
machine, the ratios less so. This command generated the page:

```text
{command}
```
"""
_QUICK: Final = """
!!! warning "A quick run"

    This run had few rounds, or left out some benchmarks. Its numbers are approximate.
"""


def page(printed: str, machine: dict[str, Any], now: datetime, command: Sequence[str]) -> str:
    """Return the page. `command` has the arguments of `python -m bench`."""
    method, *sections = re.split(r"\n{2,}", printed.strip())
    parts = [_INTRODUCTION.format(command=shlex.join(["python", "-m", "bench", *command]))]
    if {"--quick", "--only"} & set(command):
        parts.append(_QUICK)
    facts = {"date": f"{now:%Y-%m-%d}", **machine}
    parts.append("\n## The machine and the versions\n\n| fact | value |\n|---|---|\n")
    parts += [f"| {name} | {value} |\n" for name, value in facts.items()]
    # The first line of the method has the facts again.
    parts += ["\n", *(f"{line}\n" for line in _bullets(method.splitlines()[1:]))]
    for section in sections:
        parts += ["\n", *(f"{line}\n" for line in _section(section.splitlines()))]
    return "".join(parts)


def _section(lines: Sequence[str]) -> Iterator[str]:
    dashes = next((n for n, line in enumerate(lines) if _DASHES.fullmatch(line)), None)
    title, rest = _title(" ".join(lines[:1] if dashes is None else lines[: dashes - 1]))
    yield f"## {title}"
    yield ""
    if rest:
        yield from (f"{_capitalised(rest)}.", "")
    if dashes is not None:
        yield from _table(lines[dashes - 1 :])
    elif lines[1:] and all(line.startswith("  ") for line in lines[1:]):
        yield from ("```text", *(line.removeprefix("  ") for line in lines[1:]), "```")
    else:
        yield from _bullets(lines[1:])


def _table(lines: Sequence[str]) -> Iterator[str]:
    """Yield the table of a heading, a line of dashes, rows and notes; then the notes."""
    columns = [match.span() for match in re.finditer("-+", lines[1])]
    rows = [line for line in lines[2:] if _is_row(line, columns)]
    notes = [line for line in lines[2:] if not _is_row(line, columns)]
    start, end = columns[-1]
    if any(line[end : end + _GAP].strip() for line in rows):
        columns[-1] = start, max(map(len, rows))  # text that is wider than its heading
    elif any(line[end:].strip() for line in rows):
        columns.append((end, max(map(len, rows))))  # a remark behind the last column
    table = [[line[start:end].strip() for start, end in columns] for line in (lines[0], *rows)]
    numeric = [
        all(_NUMBER.fullmatch(cell) for cell in each[1:] if cell)
        for each in zip(*table, strict=True)
    ]
    yield _row(table[0])
    yield "|" + "|".join("--:" if each else "---" for each in numeric) + "|"
    yield from map(_row, table[1:])
    if notes:
        yield from ("", *_bullets(notes))


def _is_row(line: str, columns: Sequence[tuple[int, int]]) -> bool:
    """Return True if nothing stands between the columns. The last one may be wider than marked."""
    return not any(line[end : end + _GAP].strip() for _, end in columns[:-1])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _title(text: str) -> tuple[str, str]:
    """Return the heading of a section, and the text below it."""
    title, _, rest = text.partition("; ")
    if len(title) > TITLE_LENGTH_MAX:
        title, _, more = title.partition(", ")
        rest = "; ".join(filter(None, (more, rest)))
    return f"`{title}`" if "_" in title else _capitalised(title), rest


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {_capitalised(line.strip().rstrip(';'))}." for line in lines]


def _capitalised(text: str) -> str:
    return re.sub("^http", "HTTP", text[:1].upper() + text[1:], flags=re.IGNORECASE)
