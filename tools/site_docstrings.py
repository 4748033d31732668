"""An extension of griffe: docstrings of this project as Markdown, for the reference of the site.

Docstrings are written for readers of the code. Some of their forms are not good Markdown:

    >>> 1 + 1              an example that the tests run
    2
    `name`    text         an argument or a field, aligned in columns,
              more text    over several lines

The first and other indented code become blocks of code, the second a list. Names of the reference
in backticks become links to their descriptions. `mkdocs.yml` names this module, and
`tests/test_site.py` tests it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import griffe

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"

# `a`, `b`   text: names in backticks, and at least two spaces before the text.
ENTRY: Final = re.compile(r"((?:`[^`]+`,? (?:and )?)*`[^`]+`) {2,}(\S.*)")
DIRECTIVE: Final = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
# A class in backticks, or a method of the limiter: `Limit`, Limiter.check.
REFERRED: Final = re.compile(r"`([A-Z]\w+)`|(?<![\w`.\[])(Limiter\.[a-z_]+)\b")


@cache
def described() -> dict[str, str]:
    """Return the path of each name that a page of the reference describes.

    A name that several modules have, such as RateLimit, is left out: any of them may be meant.
    """
    paths: dict[str, set[str]] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for path in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            paths.setdefault(path.rpartition(".")[2], set()).add(path)
    return {name: next(iter(found)) for name, found in paths.items() if len(found) == 1}


def as_markdown(docstring: str, links: dict[str, str]) -> str:
    """Return a docstring as Markdown. `links` has the path of each name that becomes a link."""
    lines: list[str] = []
    for block in re.split(r"\n{2,}", docstring):
        if block.startswith(">>> "):
            lines += ["```pycon", *block.splitlines(), "```", ""]
        elif block.startswith("    "):
            lines += ["```python", *dedent(block).splitlines(), "```", ""]
        else:
            lines += [*_with_lists(_linked(block, links).splitlines()), ""]
    return "\n".join(lines).rstrip()


def _with_lists(lines: Iterable[str]) -> list[str]:
    """Return lines with a list in place of each group of aligned entries."""
    found: list[str] = []
    in_list = False
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if entry is not None:
            found += [] if in_list or not found else [""]
            found.append(f"- {entry[1]}: {entry[2]}")
            in_list = True
        elif in_list and line.startswith("  "):
            found.append(f"  {line.strip()}")
        else:
            found += [""] if in_list and line else []
            found.append(line)
            in_list = False
    return found


def _linked(text: str, links: dict[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        if match[2]:
            return f"[`{match[2]}`][ratekeeper.{match[2]}]"
        return f"[{match[0]}][{links[match[1]]}]" if match[1] in links else match[0]

    return REFERRED.sub(link, text)


class HouseDocstrings(griffe.Extension):
    """Turns each docstring into Markdown when griffe has read it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            # A description does not link to itself.
            links = {name: path for name, path in described().items() if name != obj.name}
            obj.docstring.value = as_markdown(obj.docstring.value, links)
