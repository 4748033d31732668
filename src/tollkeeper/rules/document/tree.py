"""From YAML, JSON or plain data to one tree, each node of which knows where it stands.

A document comes from people, and over an API from anyone, so reading has bounds. YAML is taken
event by event and not composed by the library: a reader that stops at a depth or a number of nodes
stops in the middle of a hostile document, not after it. An alias counts as all that it stands for,
so that ten lines of aliases to aliases (a "billion laughs") are a billion nodes and refused at the
alias that passes the bound. Nothing is ever constructed from a tag.

JSON is YAML here, as the standard has it. What YAML reads as something else than text (`off`, `42`,
`2026-01-01`) keeps its spelling, for the message that says to quote it.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import islice
from typing import Any, Final, Literal, TypeVar

from tollkeeper.core.errors import ConfigError, quoted, show

BYTES_MAX: Final = 16 * 2**20
TOO_LONG: Final = f"this is longer than {BYTES_MAX // 2**20} MiB; is it a rule document?"
NODES_MAX: Final = 2_500_000  # a million entries of a list, and 20,000 rules beside them
DEPTH_MAX: Final = 16
# Beyond these nobody reads on, and a broken list of a million entries would be a million objects.
PROBLEMS_MAX: Final = 1_000

Kind = Literal["mapping", "list", "text", "number", "boolean", "nothing", "time", "merge", "other"]

_TAG: Final = "tag:yaml.org,2002:"
_SCALAR_KINDS: Final[dict[str, Kind]] = {
    _TAG + "str": "text",
    "!": "text",
    _TAG + "int": "number",
    _TAG + "float": "number",
    _TAG + "bool": "boolean",
    _TAG + "null": "nothing",
    _TAG + "timestamp": "time",
    _TAG + "merge": "merge",
}
# YAML has characters that it may not hold even in quotes, where escapes stand for them.
_NOT_YAML: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A number in JSON and in newer YAML; the YAML that the library knows asks for a dot and a sign.
EXPONENT: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]+")
_WHOLE: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,99})")
_DECIMAL: Final = re.compile(r"-?[0-9]*\.[0-9]+|-?[0-9]+\.|-?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")
# The parser takes time by the square of their number, and no document needs one.
_TAG_DIRECTIVE: Final = re.compile("^%TAG", re.MULTILINE)
# JSON writes a character beyond U+FFFF as two escapes, which YAML does not know.
_JSON_PAIR: Final = re.compile(
    r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    """One thing that is wrong with a document, and what would be right."""

    source: str
    line: int
    """From 1; 0 where there are no lines, as in plain data."""
    column: int
    where: str
    """The path in the document, such as `rules[2].limits[0]`; empty for the whole."""
    message: str

    def __str__(self) -> str:
        position = f":{self.line}:{self.column}" if self.line else ""
        where = f"{self.where}: " if self.where else ""
        return f"{self.source}{position}: {where}{self.message}"


class TooManyProblems(Exception):
    """PROBLEMS_MAX were found; there is no point in looking for more."""


class ProblemList:
    """What was found wrong so far in one document."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[DocumentProblem] = []

    def add(self, line: int, column: int, where: str, message: str) -> None:
        """Note one. Raises TooManyProblems when enough are known."""
        self.found.append(DocumentProblem(self.source, line, column, where, message))
        if len(self.found) >= PROBLEMS_MAX:
            raise TooManyProblems


@dataclass(slots=True)
class DocumentNode:
    """A value of the document and where it stands."""

    kind: Kind
    value: Any
    """list: nodes; mapping: pairs of nodes; number: None if it is not a plain decimal one."""
    text: str = ""
    """How a scalar was written."""
    line: int = 0
    column: int = 0


# ------------------------------------------------------------------------------------------ YAML


def tree_of_yaml(text: str, problems: ProblemList) -> DocumentNode | None:
    """The tree of a YAML or JSON text, or None and a problem that says why there is none."""
    try:
        import yaml  # noqa: PLC0415 - an extra: plain data is read without it
    except ImportError:
        raise ConfigError(
            "rule documents in YAML need a package that is not installed; "
            "install it with: pip install 'tollkeeper[rules]'"
        ) from None
    text = text.removeprefix("\ufeff")
    if not _is_readable(text, problems):
        return None
    if text.lstrip().startswith("{"):
        text = _JSON_PAIR.sub(_one_escape, text)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    builder = _Builder(loader)
    try:
        root = builder.build()
    except _Refused as refused:
        problems.add(refused.line, refused.column, "", str(refused))
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        parts = (getattr(error, "problem", None), getattr(error, "context", None))
        said = ", ".join(part for part in parts if part) or str(error)
        problems.add(line, column, "", f"this is not YAML: {said}")
        return None
    finally:
        loader.dispose()
    if root is None:
        problems.add(1, 1, "", "the document is empty; it starts with version: 1")
    return root


def _is_readable(text: str, problems: ProblemList) -> bool:
    """Is the text short enough, and without what YAML may not hold? If not, a problem says so."""
    wrong = _NOT_YAML.search(text)
    if wrong:
        line, column = _position(text, wrong.start())
        code = f"U+{ord(wrong.group()):04X}"
        problems.add(line, column, "", f"the character {code} may not stand in YAML; remove it")
    elif len(text) > BYTES_MAX or len(text.encode()) > BYTES_MAX:
        problems.add(0, 0, "", TOO_LONG)
    elif directive := _TAG_DIRECTIVE.search(text):
        line, column = _position(text, directive.start())
        problems.add(line, column, "", "%TAG has no meaning here; remove the line")
    else:
        return True
    return False


def _position(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _one_escape(pair: re.Match[str]) -> str:
    high, low = int(pair[2], 16), int(pair[3], 16)
    return f"{pair[1]}\\U{0x10000 + ((high & 0x3FF) << 10 | low & 0x3FF):08X}"


class _Refused(Exception):
    """A bound was passed, or a part of YAML is used that has no meaning here."""

    def __init__(self, mark: Any, message: str) -> None:
        self.line: int = mark.line + 1
        self.column: int = mark.column + 1
        super().__init__(message)


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end is not read yet."""

    node: DocumentNode
    anchor: str | None
    nodes_before: int
    depth: int = 1
    """Of the deepest node inside, from this one."""
    children: list[DocumentNode] = field(default_factory=list)


class _Builder:
    """Makes the tree from events, with a stack of its own, so that depth costs no recursion."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[DocumentNode, int, int]] = {}
        self._nodes = 0
        self._root: DocumentNode | None = None

    def build(self) -> DocumentNode | None:
        """The root of the one document in the text; None if the text holds none."""
        takers = {
            "ScalarEvent": self._scalar,
            "SequenceStartEvent": self._start,
            "MappingStartEvent": self._start,
            "SequenceEndEvent": self._end,
            "MappingEndEvent": self._end,
            "AliasEvent": self._alias,
            "DocumentStartEvent": self._document,
        }
        next_event = self._loader.get_event
        while (name := type(event := next_event()).__name__) != "StreamEndEvent":
            if taker := takers.get(name):
                taker(event)
        return self._root

    def _document(self, event: Any) -> None:
        if self._root is not None:
            message = "a second document starts here; remove --- or put it in a file of its own"
            raise _Refused(event.start_mark, message)

    def _scalar(self, event: Any) -> None:
        text, mark = event.value, event.start_mark
        tag = self._resolved(text, event.implicit) if event.tag is None else event.tag
        kind = _SCALAR_KINDS.get(tag, "other")
        value = _number(text) if kind == "number" else text
        self._put(DocumentNode(kind, value, text, mark.line + 1, mark.column + 1), event)

    def _resolved(self, text: str, implicit: tuple[bool, bool]) -> str:
        """What a scalar without a tag is: by YAML's own rules if plain, and text if quoted."""
        if implicit[0]:
            for tag, pattern in self._loader.yaml_implicit_resolvers.get(text[:1], ()):
                if pattern.match(text):
                    return str(tag)
            if EXPONENT.fullmatch(text):
                return _TAG + "float"
        return _TAG + "str"

    def _start(self, event: Any) -> None:
        if len(self._open) >= DEPTH_MAX:
            raise _Refused(event.start_mark, f"this is nested more than {DEPTH_MAX} deep")
        mark = event.start_mark
        kind: Kind = "list" if type(event).__name__ == "SequenceStartEvent" else "mapping"
        wanted = "seq" if kind == "list" else "map"
        if event.tag not in {None, "!", _TAG + wanted}:
            kind = "other"
        node = DocumentNode(kind, [], "", mark.line + 1, mark.column + 1)
        self._count(1, event)
        self._open.append(_Open(node, event.anchor, self._nodes - 1))

    def _end(self, event: Any) -> None:
        closed = self._open.pop()
        node, children = closed.node, closed.children
        if type(event).__name__ == "SequenceEndEvent":
            node.value = children
        else:
            node.value = _merged(list(zip(children[::2], children[1::2], strict=True)), event)
        if closed.anchor is not None:
            size = self._nodes - closed.nodes_before
            self._anchors[closed.anchor] = (node, size, closed.depth)
        self._add(node, closed.depth)

    def _alias(self, event: Any) -> None:
        if event.anchor not in self._anchors:
            message = f"*{event.anchor} stands for nothing yet: an anchor (&) goes before its use"
            raise _Refused(event.start_mark, message)
        node, size, depth = self._anchors[event.anchor]
        if len(self._open) + depth > DEPTH_MAX:
            raise _Refused(event.start_mark, f"this is nested more than {DEPTH_MAX} deep")
        self._count(size, event)
        self._add(node, depth)

    def _put(self, node: DocumentNode, event: Any) -> None:
        self._count(1, event)
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, 1, 0)
        self._add(node, 0)

    def _add(self, node: DocumentNode, depth: int) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        parent.children.append(node)
        parent.depth = max(parent.depth, depth + 1)

    def _count(self, nodes: int, event: Any) -> None:
        self._nodes += nodes
        if self._nodes > NODES_MAX:
            message = (
                f"with its aliases, the document has more than {NODES_MAX:,} values; "
                f"split it, or write fewer aliases"
            )
            raise _Refused(event.start_mark, message)


def _merged(
    pairs: list[tuple[DocumentNode, DocumentNode]], event: Any
) -> list[tuple[DocumentNode, DocumentNode]]:
    """`<<: *anchor` as the pairs that it stands for; those written out come first and win."""
    if not any(key.kind == "merge" for key, _ in pairs):
        return pairs
    merged = [pair for pair in pairs if pair[0].kind != "merge"]
    taken = {key.text for key, _ in merged}
    for _, value in (pair for pair in pairs if pair[0].kind == "merge"):
        for source in value.value if value.kind == "list" else [value]:
            if source.kind != "mapping":
                message = "<< takes a mapping, or a list of them; for example <<: *defaults"
                raise _Refused(event.start_mark, message)
            new = [pair for pair in source.value if pair[0].text not in taken]
            merged += new
            taken.update(key.text for key, _ in new)
    return merged


def _number(text: str) -> float | None:
    """A decimal number. YAML's others (017, 0x1F, 12:30, .inf) are mistakes more often than not."""
    plain = text.replace("_", "").removeprefix("+")
    if _WHOLE.fullmatch(plain):
        return int(plain)
    return float(plain) if _DECIMAL.fullmatch(plain) else None


# ------------------------------------------------------------------------------------ plain data


def tree_of_data(data: object, problems: ProblemList) -> DocumentNode | None:
    """The tree of what `json.loads` or a program made, or None and a problem."""
    try:
        return _of_data(data, itertools.count(1), 0)
    except _TooMuch as refused:
        problems.add(0, 0, "", str(refused))
        return None


class _TooMuch(Exception):
    """The data passed a bound."""


def _of_data(data: object, count: Iterator[int], depth: int) -> DocumentNode:
    if next(count) > NODES_MAX:
        raise _TooMuch(f"the document has more than {NODES_MAX:,} values; split it")
    if depth > DEPTH_MAX:
        raise _TooMuch(f"the document is nested more than {DEPTH_MAX} deep")
    if isinstance(data, str):
        text = str.__str__(data)  # of a subclass too, such as a StrEnum's member
        return DocumentNode("text", text, text)
    if isinstance(data, Mapping):
        pairs = [
            (_of_data(key, count, depth + 1), _of_data(value, count, depth + 1))
            for key, value in data.items()
        ]
        return DocumentNode("mapping", pairs)
    if isinstance(data, list | tuple):
        return DocumentNode("list", [_of_data(item, count, depth + 1) for item in data])
    return DocumentNode(_kind_of(data), data, show(data))


def _kind_of(data: object) -> Kind:
    if data is None:
        return "nothing"
    if isinstance(data, bool):
        return "boolean"
    if isinstance(data, int | float):
        return "number"
    return "time" if isinstance(data, date | datetime) else "other"


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


class DocumentPlace:
    """A node of the document, with its path and the list of problems."""

    __slots__ = ("_above", "_key", "_name", "_problems", "node")

    def __init__(
        self,
        node: DocumentNode,
        problems: ProblemList,
        above: DocumentPlace | None = None,
        name: str | int = "",
        key: DocumentNode | None = None,
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

    def items(self, example: str, *, single: bool = True) -> list[DocumentPlace]:
        """The places of a list. Unless `single` is False, one value counts as a list of one."""
        if self.node.kind == "list":
            return [
                DocumentPlace(item, self._problems, self, index)
                for index, item in enumerate(self.node.value)
            ]
        if self.node.kind == "nothing" or not single:
            self._wrong_kind("a list", example)
            return []
        return [self]

    def entries(self, example: str) -> dict[str, DocumentPlace]:
        """The places of a mapping by their names, which are text and all different."""
        if self.node.kind != "mapping":
            self._wrong_kind("a mapping", example)
            return {}
        found: dict[str, DocumentPlace] = {}
        for key, value in self.node.value:
            name = DocumentPlace(key, self._problems, self, key.text).text(
                example, _NAME_LENGTH_MAX
            )
            place = DocumentPlace(value, self._problems, self, name, key)
            if name in found:
                place.fail_name(f"{quoted(name)} is given twice; remove one")
            elif name:
                found[name] = place
        return found

    def fields(self, known: Sequence[str], example: str) -> dict[str, DocumentPlace]:
        """The places of a mapping that has these names and no other."""
        found = self.entries(example)
        for name in [name for name in found if name not in known]:
            found.pop(name).fail_name(
                f"{quoted(name)} is not a name that is known here; {suggestion(name, known)}"
            )
        return found

    def require(self, found: dict[str, DocumentPlace], *examples: tuple[str, str]) -> bool:
        """Note each of these names that a mapping does not have; are all there?"""
        missing = [(name, example) for name, example in examples if name not in found]
        # A value that is no mapping has been told of already.
        if self.node.kind == "mapping":
            for name, example in missing:
                self.fail(f"{quoted(name)} is missing; for example {name}: {example}")
        return not missing

    def each_text(self, example: str, length_max: int) -> Iterator[tuple[DocumentPlace, str]]:
        """The texts of a list, or of a single value, that are texts indeed."""
        for item in self.items(example):
            if text := item.text(example, length_max):
                yield item, text


def _cut(text: str) -> str:
    """What was written, short and on one line."""
    return show(text)[1:-1]
