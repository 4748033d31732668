"""Walks: which functions of Ratekeeper a request crosses, and in which order.

`docs/architecture.md` follows requests through the code. A section names the functions of a walk as
`module:function`, with the module's path below `ratekeeper`. The tests record the same request and
compare: the document cannot go stale.

A function counts once, when it is first called. A property counts as an attribute, and a
comprehension or a constructor as part of its caller. C functions are not recorded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ratekeeper

SOURCE = Path(ratekeeper.__file__).parent
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"

# Calls that are recorded.
_RECORDED = 10

# Comprehensions and constructors count as part of the function that contains or calls them.
_PART_OF_CALLER = {
    "<listcomp>",
    "<dictcomp>",
    "<setcomp>",
    "<genexpr>",
    "<lambda>",
    "<module>",
    "__init__",
    "__new__",
}

_STEP = re.compile(r"`([a-z0-9_./]+):([A-Za-z0-9_.<>]+)`")


class Walk:
    """The functions that were called, in the order of their first calls."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; a profile function for `sys.setprofile`."""
        if event == "call":
            self._codes.setdefault(frame.f_code)

    @property
    def steps(self) -> list[str]:
        """The functions of Ratekeeper, as `module:function`."""
        found = []
        for code in self._codes:
            path = Path(code.co_filename)
            if not path.is_relative_to(SOURCE):
                continue
            module = path.relative_to(SOURCE).with_suffix("").as_posix()
            name = code.co_qualname
            last = name.rpartition(".")[2]
            if last in _PART_OF_CALLER:
                continue
            if not isinstance(resolved(module, name), property):
                found.append(f"{module}:{name}")
        return found


@contextmanager
def recorded() -> Any:
    """Record every call in this thread."""
    walk = Walk()
    sys.setprofile(walk.note)
    try:
        yield walk
    finally:
        sys.setprofile(None)


async def walk_of(call: Callable[[int], Awaitable[Any]]) -> Walk:
    """Record an awaited call, which gets a number for its subject; return the shortest walk.

    The first call only opens connections and fills caches. Of the others, the shortest one counts:
    now and then a call does rare work as well, such as sampling.
    """
    await call(0)
    walks: list[Walk] = []
    for number in range(1, _RECORDED + 1):
        with recorded() as walk:
            await call(number)
        walks.append(walk)
    return min(walks, key=lambda walk: len(walk.steps))


def resolved(module: str, name: str) -> Any:
    """Return the object that a step names; None if it is a local function or does not exist."""
    found: Any = import_module(f"ratekeeper.{module.replace('/', '.')}")
    for part in name.split("."):
        if part == "<locals>":
            return None
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
    return found


def section(heading: str) -> str:
    """Return the text of a section of the architecture document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    _, _, rest = text.partition(f"# {heading}\n")
    assert rest, f"{DOCUMENT.name} has no section {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def documented(heading: str) -> list[str]:
    """Return the steps that a section of the architecture document names."""
    return [f"{module}:{name}" for module, name in _STEP.findall(section(heading))]


def files(steps: list[str]) -> list[str]:
    """Return the modules of a walk, each once."""
    return list(dict.fromkeys(step.partition(":")[0] for step in steps))


def folders(steps: list[str]) -> list[str]:
    """Return the folders of a walk in order; one that the walk returns to is listed again."""
    found: list[str] = []
    for step in steps:
        folder = step.partition(":")[0].rpartition("/")[0]
        if found[-1:] != [folder]:
            found.append(folder)
    return found


def coroutine_folders(steps: list[str]) -> set[str]:
    """Return the folders of the functions that are awaited."""
    awaited = set()
    for step in steps:
        module, _, name = step.partition(":")
        if "<locals>" in name or iscoroutinefunction(resolved(module, name)):
            awaited.add(module.rpartition("/")[0])
    return awaited
