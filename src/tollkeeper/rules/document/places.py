"""A place in a document: a node, the path that leads to it, and what may stand there.

The grammar asks a place for what it wants ("the text here", "a whole number from 0 to 100"). Where
something else stands, the place notes a problem and gives a harmless value of the right type, so
that the grammar reads on and one reading finds everything that is wrong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from tollkeeper.core.errors import quoted, show
from tollkeeper.rules.document.reading import Kind, Node, Problems

# Comparing words for likeness takes time by the square of their length.
_WORD_LENGTH_MAX: Final = 64
_WORDS_MAX: Final = 200
_SHOWN_MAX: Final = 12
# YAML itself takes no longer ones.
_NAME_LENGTH_MAX: Final = 1_024
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_KIND_NAMES: Final[dict[Kind, str]] = {
    "mapping": "a mapping",
    "list": "a list",
    "text": "text",
    "number": "a number",
    "boolean": "true or false",
    "nothing": "nothing",
    "time": "a time",
    "merge": "a merge",
    "other": "no plain text",
}
_Word = TypeVar("_Word", bound=str)


def suggestion(word: str, known: Collection[str]) -> str:
    """The known word that is most like `word`, or all of them if they are few.

    >>> suggestion("limit", ["id", "limits"])
    'did you mean "limits"?'
    >>> suggestion("colour", ["id", "limits"])
    'known: "id", "limits"'
    """
    if not known:
        return "there are none"
    compared = list(islice(known, _WORDS_MAX))
    if len(word) <= _WORD_LENGTH_MAX and (near := difflib.get_close_matches(word, compared, n=1)):
        return f"did you mean {quoted(near[0])}?"
    names = [quoted(name) for name in compared[:_SHOWN_MAX]]
    if len(known) > _SHOWN_MAX:
        names.append(f"{len(known) - _SHOWN_MAX:,} more")
    return f"known: {', '.join(names)}"


def below(path: str, name: str | int) -> str:
    """The path of what stands under a name, or at a place of a list.

    >>> below("rules[2].tiers", "pro")
    'rules[2].tiers.pro'
    """
    if isinstance(name, int):
        return f"{path}[{name}]"
    if not _PLAIN_NAME.fullmatch(name):
        return f"{path}[{quoted(name)}]"
    return f"{path}.{name}" if path else name


class Place:
    """A node of the document, with its path and the list of problems."""

    __slots__ = ("_above", "_key", "_name", "_problems", "node")

    def __init__(
        self,
        node: Node,
        problems: Problems,
        above: Place | None = None,
        name: str | int = "",
        key: Node | None = None,
    ) -> None:
        self.node = node
        self._problems = problems
        self._above = above
        self._name = name
        self._key = key

    @property
    def where(self) -> str:
        """The path, such as `rules[2].limits[0]`; empty for the whole document."""
        return "" if self._above is None else below(self._above.where, self._name)

    @property
    def shown(self) -> str:
        """What stands here, for a message."""
        node = self.node
        if node.kind in {"mapping", "list"} or not node.text:
            return _KIND_NAMES[node.kind]
        return quoted(node.text) if node.kind == "text" else _cut(node.text)

    @property
    def problem_count(self) -> int:
        """How many problems the whole document has so far."""
        return len(self._problems.found)

    def fail(self, message: str) -> None:
        """Note a problem with what stands here."""
        self._problems.add(self.node.line, self.node.column, self.where, message)

    def fail_name(self, message: str) -> None:
        """Note a problem with the name under which it stands in a mapping."""
        key = self._key or self.node
        self._problems.add(key.line, key.column, self._above.where if self._above else "", message)

    def _wrong_kind(self, wanted: str, example: str) -> None:
        found = self.node
        if found.kind == "nothing":
            self.fail(f"a value is missing; {wanted} is wanted here, for example {example}")
        elif found.kind in {"mapping", "list"}:
            self.fail(f"{wanted} is wanted here, not {self.shown}; for example {example}")
        else:
            self.fail(f"{self.shown} is not {wanted}; for example {example}")

    # ------------------------------------------------------------------------------ one value

    def text(self, example: str, length_max: int) -> str:
        """The text here: 1 to `length_max` characters; "" after a problem."""
        node = self.node
        if node.kind != "text":
            if node.kind in {"mapping", "list", "nothing"}:
                self._wrong_kind("text", example)
            else:
                self.fail(
                    f"{self.shown} is read as {_KIND_NAMES[node.kind]}, and text is wanted "
                    f"here; quote it: {quoted(node.text)}"
                )
            return ""
        text: str = node.value
        if not 1 <= len(text) <= length_max:
            size = "is empty" if not text else f"has {len(text):,}"
            self.fail(
                f"text of 1 to {length_max:,} characters is wanted here, and this {size}; "
                f"for example {example}"
            )
            return ""
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            self.fail(f"{quoted(text)} holds half of a surrogate pair, which is not text")
            return ""
        return text

    def line(self, example: str, length_max: int) -> str:
        """The text here, all of it printable."""
        text = self.text(example, length_max)
        if not text.isprintable():
            self.fail(f"{quoted(text)} has characters that cannot be printed; write {example}")
            return ""
        return text

    def choice(self, words: Sequence[_Word]) -> _Word:
        """One of these words; the first after a problem."""
        node = self.node
        # `off` is false to YAML, but where it is one of the words nobody means that.
        text = node.text if node.kind in {"text", "boolean"} else ""
        for word in words:
            if word == text:
                return word
        if node.kind == "text":
            self.fail(f"{quoted(text)} is not known here; {suggestion(text, words)}")
        else:
            self._wrong_kind(f"one of {', '.join(words)}", words[0])
        return words[0]

    def whole(self, low: int, high: int, example: str) -> int:
        """A whole number in these bounds; `low` after a problem."""
        value = self.node.value
        if self.node.kind == "number" and isinstance(value, int) and low <= value <= high:
            return int(value)
        self._wrong_kind(f"a whole number from {low:,} to {high:,}", example)
        return low

    def number(self, low: float, high: float, example: str) -> float:
        """A number in these bounds; `high` after a problem."""
        value = self.node.value
        is_number = self.node.kind == "number" and isinstance(value, int | float)
        if is_number and low <= value <= high:  # and so neither infinite nor NaN
            return float(value)
        self._wrong_kind(f"a number from {low:g} to {high:g}", example)
        return high

    # --------------------------------------------------------------------------- many values

    def items(self, example: str, *, single: bool = True) -> list[Place]:
        """The places of a list. Unless `single` is False, one value counts as a list of one."""
        if self.node.kind == "list":
            return [
                Place(item, self._problems, self, index)
                for index, item in enumerate(self.node.value)
            ]
        if self.node.kind == "nothing" or not single:
            self._wrong_kind("a list", example)
            return []
        return [self]

    def entries(self, example: str) -> dict[str, Place]:
        """The places of a mapping by their names, which are text and all different."""
        if self.node.kind != "mapping":
            self._wrong_kind("a mapping", example)
            return {}
        found: dict[str, Place] = {}
        for key, value in self.node.value:
            name = Place(key, self._problems, self, key.text).text(example, _NAME_LENGTH_MAX)
            place = Place(value, self._problems, self, name, key)
            if name in found:
                place.fail_name(f"{quoted(name)} is given twice; remove one")
            elif name:
                found[name] = place
        return found

    def fields(self, known: Sequence[str], example: str) -> dict[str, Place]:
        """The places of a mapping that has these names and no other."""
        found = self.entries(example)
        for name in [name for name in found if name not in known]:
            found.pop(name).fail_name(
                f"{quoted(name)} is not a name that is known here; {suggestion(name, known)}"
            )
        return found

    def require(self, found: dict[str, Place], *examples: tuple[str, str]) -> bool:
        """Note each of these names that a mapping does not have; are all there?"""
        missing = [(name, example) for name, example in examples if name not in found]
        # A value that is no mapping has been told of already.
        if self.node.kind == "mapping":
            for name, example in missing:
                self.fail(f"{quoted(name)} is missing; for example {name}: {example}")
        return not missing

    def each_text(self, example: str, length_max: int) -> Iterator[tuple[Place, str]]:
        """The texts of a list, or of a single value, that are texts indeed."""
        for item in self.items(example):
            if text := item.text(example, length_max):
                yield item, text


def _cut(text: str) -> str:
    """What was written, short and on one line."""
    return show(text)[1:-1]
