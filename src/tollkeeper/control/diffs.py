"""What differs between two texts, as a unified diff, also where they have 100,000 lines.

Two versions of a document mostly have all lines in common but a few that stand together. Those that
both begin and end with are set aside before difflib looks, which takes seconds for 100,000 lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Final

CONTEXT_LINES: Final = 3


def unified_diff(before: str, after: str, before_name: str, after_name: str) -> str:
    """The diff as text; empty if there is none.

    >>> print(unified_diff("a\\nb\\n", "a\\nc\\n", "version 1", "version 2"))
    --- version 1
    +++ version 2
    @@ -1,2 +1,2 @@
     a
    -b
    +c
    """
    if before == after:
        return ""
    old, new = before.splitlines(), after.splitlines()
    head = _same_lines(old, new)
    tail = _same_lines(old[head:][::-1], new[head:][::-1])
    # What is set aside comes back as far as it is shown around a change.
    head = max(0, head - CONTEXT_LINES)
    tail = max(0, tail - CONTEXT_LINES)
    matcher = SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail])
    lines = [f"--- {before_name}", f"+++ {after_name}"]
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        lines += _hunk(group, old, new, head)
    return "\n".join(lines)


def _same_lines(old: Sequence[str], new: Sequence[str]) -> int:
    """How many lines both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


Opcode = tuple[str, int, int, int, int]


def _hunk(group: list[Opcode], old: list[str], new: list[str], head: int) -> Iterator[str]:
    places = [
        (kind, head + old_from, head + old_to, head + new_from, head + new_to)
        for kind, old_from, old_to, new_from, new_to in group
    ]
    _, old_start, _, new_start, _ = places[0]
    _, _, old_end, _, new_end = places[-1]
    yield f"@@ -{_range(old_start, old_end)} +{_range(new_start, new_end)} @@"
    for kind, old_from, old_to, new_from, new_to in places:
        if kind == "equal":
            yield from (f" {line}" for line in old[old_from:old_to])
            continue
        yield from (f"-{line}" for line in old[old_from:old_to])
        yield from (f"+{line}" for line in new[new_from:new_to])


def _range(start: int, end: int) -> str:
    """Lines from 1; an empty range is told by the line before it."""
    count = end - start
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"
