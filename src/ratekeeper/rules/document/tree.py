"""Turn YAML, JSON or plain data into a tree of nodes that know their line and column.

Rule documents come from people and, over the admin API, from any client. Reading is therefore
bounded. The reader takes YAML event by event instead of letting the library compose it. So it stops
as soon as a document exceeds the depth, the number of nodes or that of lists and mappings, and
never builds the rest. An alias
counts as all the nodes that it expands to: ten lines of aliases to aliases (a "billion laughs")
are rejected at the alias that exceeds the bound. Tags never construct objects.

JSON is read as YAML, of which it is a subset. A value that YAML does not read as text (`off`, `42`,
`2026-01-01`) keeps its spelling, so that an error message can show how to quote it.

The grammar reads the tree through a `DocumentPlace`: a node with its path in the document. A place
has one method for each kind of value ("text", "a whole number from 0 to 100"). If the node holds
something else, the method records a problem and returns a harmless value of the right type. The
grammar then goes on, and one run reports every problem of the document.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import islice
from typing import Any, Final, Literal

from ratekeeper.core.errors import ConfigError, quoted, show

BYTES_MAX: Final = 16 * 2**20
TOO_LONG: Final = f"larger than {BYTES_MAX // 2**20} MiB; is this a rule document?"
NODES_MAX: Final = 2_500_000  # enough for a list of a million entries and 20,000 rules
# Of a document that arrives in a request, which has at most a third of the bytes of a file.
RECEIVED_NODES_MAX: Final = 800_000
# Lists and mappings: fifteen for each of 20,000 rules. Each takes more memory and time than a text.
COLLECTIONS_MAX: Final = 300_000
DEPTH_MAX: Final = 16
# More would not help a reader, and a broken list of a million entries has a million problems.
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
# Characters that YAML forbids even in quotes; they can only be written as escapes.
_NOT_YAML: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A number in JSON and in YAML 1.2. PyYAML implements YAML 1.1, which requires a dot and a sign.
EXPONENT: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]+")
_WHOLE: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,99})")
_DECIMAL: Final = re.compile(r"-?[0-9]*\.[0-9]+|-?[0-9]+\.|-?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")
# The parser's time grows with the square of the number of %TAG directives. No document needs one.
# A line of YAML also ends at CR, NEL, LS and PS.
_TAG_DIRECTIVE: Final = re.compile("(?:\\A|(?<=[\n\r\x85\u2028\u2029]))%TAG")
# JSON writes a character above U+FFFF as two escapes, which YAML does not combine.
_JSON_PAIR: Final = re.compile(
    r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    """One mistake in a document: its place, the mistake and a correct value."""

    source: str
    line: int
    """Counted from 1; 0 if the document has no lines, as in plain data."""
    column: int
    where: str
    """The path in the document, such as `rules[2].limits[0]`; empty for the whole document."""
    message: str

    def __str__(self) -> str:
        position = f":{self.line}:{self.column}" if self.line else ""
        where = f"{self.where}: " if self.where else ""
        return f"{self.source}{position}: {where}{self.message}"


class TooManyProblems(Exception):
    """Raised when PROBLEMS_MAX problems were found, to stop reading."""


class ProblemList:
    """The problems found so far in one document."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[DocumentProblem] = []

    def add(self, line: int, column: int, where: str, message: str) -> None:
        """Add a problem. Raises TooManyProblems when the list is full."""
        self.found.append(DocumentProblem(self.source, line, column, where, message))
        if len(self.found) >= PROBLEMS_MAX:
            raise TooManyProblems


@dataclass(slots=True)
class DocumentNode:
    """A value of the document, with its line and column."""

    kind: Kind
    value: Any
    """list: nodes; mapping: pairs of nodes; number: None unless it is a plain decimal number."""
    text: str = ""
    """The spelling of a scalar in the document."""
    line: int = 0
    column: int = 0


# ------------------------------------------------------------------------------------------ YAML


def tree_of_yaml(
    text: str, problems: ProblemList, nodes_max: int | None = None
) -> DocumentNode | None:
    """Return the tree of a YAML or JSON text; after a problem, None.

    `nodes_max` is NODES_MAX unless given.
    """
    try:
        import yaml  # noqa: PLC0415 - an extra that plain data does not need
    except ImportError:
        raise ConfigError(
            "rule documents in YAML need PyYAML, which is not installed; "
            "install it with: pip install 'ratekeeper[rules]'"
        ) from None
    text = text.removeprefix("\ufeff")
    if not _is_readable(text, problems):
        return None
    if text.lstrip().startswith("{"):
        text = _JSON_PAIR.sub(_one_escape, text)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    builder = _Builder(loader, NODES_MAX if nodes_max is None else nodes_max)
    try:
        root = builder.build()
    except _Rejected as rejected:
        problems.add(rejected.line, rejected.column, "", str(rejected))
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        parts = (getattr(error, "problem", None), getattr(error, "context", None))
        reason = ", ".join(part for part in parts if part) or str(error)
        problems.add(line, column, "", f"invalid YAML: {reason}")
        return None
    finally:
        loader.dispose()
    if root is None:
        problems.add(1, 1, "", "the document is empty; start it with version: 1")
    return root


def _is_readable(text: str, problems: ProblemList) -> bool:
    """Return whether the text is short enough and has no forbidden parts; add a problem if not."""
    wrong = _NOT_YAML.search(text)
    if wrong:
        line, column = _position(text, wrong.start())
        code = f"U+{ord(wrong.group()):04X}"
        problems.add(line, column, "", f"YAML does not allow the character {code}; remove it")
    elif len(text) > BYTES_MAX or len(text.encode()) > BYTES_MAX:
        problems.add(0, 0, "", TOO_LONG)
    elif directive := _TAG_DIRECTIVE.search(text):
        line, column = _position(text, directive.start())
        problems.add(line, column, "", "%TAG is not supported; remove the line")
    else:
        return True
    return False


def _position(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _one_escape(pair: re.Match[str]) -> str:
    high, low = int(pair[2], 16), int(pair[3], 16)
    return f"{pair[1]}\\U{0x10000 + ((high & 0x3FF) << 10 | low & 0x3FF):08X}"


class _Rejected(Exception):
    """The document exceeds a bound, or uses a part of YAML that is not supported here."""

    def __init__(self, mark: Any, message: str) -> None:
        self.line: int = mark.line + 1
        self.column: int = mark.column + 1
        super().__init__(message)


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been read yet."""

    node: DocumentNode
    anchor: str | None
    nodes_before: int
    depth: int = 1
    """The number of levels below this node."""
    children: list[DocumentNode] = field(default_factory=list)


class _Builder:
    """Builds the tree from YAML events. It keeps its own stack, so nesting needs no recursion."""

    def __init__(self, loader: Any, nodes_max: int) -> None:
        self._loader = loader
        self._nodes_max = nodes_max
        self._collections = 0
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[DocumentNode, int, int]] = {}
        self._nodes = 0
        self._root: DocumentNode | None = None

    def build(self) -> DocumentNode | None:
        """Return the root of the only document in the text; None if the text has none."""
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
            message = "a second document starts here; remove --- or move it to another file"
            raise _Rejected(event.start_mark, message)

    def _scalar(self, event: Any) -> None:
        text, mark = event.value, event.start_mark
        tag = self._resolved(text, event.implicit) if event.tag is None else event.tag
        kind = _SCALAR_KINDS.get(tag, "other")
        value = _number(text) if kind == "number" else text
        self._put(DocumentNode(kind, value, text, mark.line + 1, mark.column + 1), event)

    def _resolved(self, text: str, implicit: tuple[bool, bool]) -> str:
        """Return the tag of a scalar that has none: YAML's rules if plain, text if quoted."""
        if implicit[0]:
            for tag, pattern in self._loader.yaml_implicit_resolvers.get(text[:1], ()):
                if pattern.match(text):
                    return str(tag)
            if EXPONENT.fullmatch(text):
                return _TAG + "float"
        return _TAG + "str"

    def _start(self, event: Any) -> None:
        if len(self._open) >= DEPTH_MAX:
            raise _Rejected(event.start_mark, f"more than {DEPTH_MAX} levels of nesting")
        mark = event.start_mark
        kind: Kind = "list" if type(event).__name__ == "SequenceStartEvent" else "mapping"
        wanted = "seq" if kind == "list" else "map"
        if event.tag not in {None, "!", _TAG + wanted}:
            kind = "other"
        node = DocumentNode(kind, [], "", mark.line + 1, mark.column + 1)
        self._count(1, event)
        self._collections += 1
        if self._collections > COLLECTIONS_MAX:
            message = f"the document has more than {COLLECTIONS_MAX:,} lists and mappings; split it"
            raise _Rejected(event.start_mark, message)
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
            message = f"unknown alias *{event.anchor}; define the anchor &{event.anchor} before it"
            raise _Rejected(event.start_mark, message)
        node, size, depth = self._anchors[event.anchor]
        if len(self._open) + depth > DEPTH_MAX:
            raise _Rejected(event.start_mark, f"more than {DEPTH_MAX} levels of nesting")
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
        if self._nodes > self._nodes_max:
            message = (
                f"with all aliases expanded, the document has more than {self._nodes_max:,} "
                f"values; split it, or use fewer aliases"
            )
            raise _Rejected(event.start_mark, message)


def _merged(
    pairs: list[tuple[DocumentNode, DocumentNode]], event: Any
) -> list[tuple[DocumentNode, DocumentNode]]:
    """Return the pairs with `<<: *anchor` expanded; the mapping's own keys take precedence."""
    if not any(key.kind == "merge" for key, _ in pairs):
        return pairs
    merged = [pair for pair in pairs if pair[0].kind != "merge"]
    taken = {key.text for key, _ in merged}
    for _, value in (pair for pair in pairs if pair[0].kind == "merge"):
        for source in value.value if value.kind == "list" else [value]:
            if source.kind != "mapping":
                message = "<< takes a mapping or a list of mappings; for example <<: *defaults"
                raise _Rejected(event.start_mark, message)
            new = [pair for pair in source.value if pair[0].text not in taken]
            merged += new
            taken.update(key.text for key, _ in new)
    return merged


def _number(text: str) -> float | None:
    """Return a decimal number. YAML's other forms (017, 0x1F, 12:30, .inf) are usually mistakes."""
    plain = text.replace("_", "").removeprefix("+")
    if _WHOLE.fullmatch(plain):
        return int(plain)
    return float(plain) if _DECIMAL.fullmatch(plain) else None


# ------------------------------------------------------------------------------------ plain data


def tree_of_data(data: object, problems: ProblemList) -> DocumentNode | None:
    """Return the tree of plain data, such as `json.loads` returns; after a problem, None."""
    try:
        return _of_data(data, itertools.count(1), 0)
    except _TooLarge as rejected:
        problems.add(0, 0, "", str(rejected))
        return None


class _TooLarge(Exception):
    """The data exceeds a bound."""


def _of_data(data: object, count: Iterator[int], depth: int) -> DocumentNode:
    if next(count) > NODES_MAX:
        raise _TooLarge(f"the document has more than {NODES_MAX:,} values; split it")
    if depth > DEPTH_MAX:
        raise _TooLarge(f"the document has more than {DEPTH_MAX} levels of nesting")
    if isinstance(data, str):
        text = str.__str__(data)  # data may be of a subclass, such as a member of a StrEnum
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


# ----------------------------------------------------------------------------------------- places

# The time to compare two words grows with the square of their length.
_WORD_LENGTH_MAX: Final = 64
_WORDS_MAX: Final = 200
_SHOWN_MAX: Final = 12
# YAML's own maximum for a key.
KEY_LENGTH_MAX: Final = 1_024
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_KIND_NAMES: Final[dict[Kind, str]] = {
    "mapping": "a mapping",
    "list": "a list",
    "text": "text",
    "number": "a number",
    "boolean": "a boolean",
    "nothing": "nothing",
    "time": "a time",
    "merge": "a merge key",
    "other": "not plain text",
}


def suggestion(word: str, known: Collection[str]) -> str:
    """Return a hint for an unknown word: the most similar known word, or some of the known words.

    >>> suggestion("limit", ["id", "limits"])
    'did you mean "limits"?'
    >>> suggestion("colour", ["id", "limits"])
    'known: "id", "limits"'
    """
    if not known:
        return "none are defined"
    compared = list(islice(known, _WORDS_MAX))
    if len(word) <= _WORD_LENGTH_MAX and (near := difflib.get_close_matches(word, compared, n=1)):
        return f"did you mean {quoted(near[0])}?"
    names = [quoted(name) for name in compared[:_SHOWN_MAX]]
    if len(known) > _SHOWN_MAX:
        names.append(f"{len(known) - _SHOWN_MAX:,} more")
    return f"known: {', '.join(names)}"


def below(path: str, name: str | int) -> str:
    """Return the path of a field of a mapping, or of an item of a list.

    >>> below("rules[2].tiers", "pro")
    'rules[2].tiers.pro'
    """
    if isinstance(name, int):
        return f"{path}[{name}]"
    if not _PLAIN_NAME.fullmatch(name):
        return f"{path}[{quoted(name)}]"
    return f"{path}.{name}" if path else name


class DocumentPlace:
    """A node of the document with its path, read by the kind of value that is expected there."""

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
        """The value, for an error message."""
        node = self.node
        if node.kind in {"mapping", "list"} or not node.text:
            return _KIND_NAMES[node.kind]
        return quoted(node.text) if node.kind == "text" else _cut(node.text)

    @property
    def problem_count(self) -> int:
        """The number of problems found in the whole document so far."""
        return len(self._problems.found)

    def fail(self, message: str) -> None:
        """Add a problem with the value."""
        self._problems.add(self.node.line, self.node.column, self.where, message)

    def fail_name(self, message: str) -> None:
        """Add a problem with the value's key in its mapping."""
        key = self._key or self.node
        self._problems.add(key.line, key.column, self._above.where if self._above else "", message)

    def fail_kind(self, wanted: str, example: str) -> None:
        """Add the problem that the value is of another kind, or outside of its bounds."""
        found = self.node
        if found.kind == "nothing":
            self.fail(f"the value is missing; expected {wanted}, for example {example}")
        elif found.kind in {"mapping", "list"}:
            self.fail(f"expected {wanted}, found {self.shown}; for example {example}")
        else:
            self.fail(f"{self.shown} is not {wanted}; for example {example}")

    def has(self, name: str) -> bool:
        """Return whether the value is a mapping with this key."""
        return self.node.kind == "mapping" and any(key.text == name for key, _ in self.node.value)

    def at(self, name: str | int) -> DocumentPlace:
        """Return the place of a key's value or of an item; this place if there is none."""
        if isinstance(name, int):
            return DocumentPlace(self.node.value[name], self._problems, self, name)
        return next((at for key, at in self.children() if key == name), self)

    def children(self) -> Iterator[tuple[str, DocumentPlace]]:
        """Yield the keys and values of a mapping as they are in the text; adds no problems."""
        for key, value in self.node.value if self.node.kind == "mapping" else ():
            yield key.text, DocumentPlace(value, self._problems, self, key.text, key)

    # ------------------------------------------------------------------------------ one value

    def text(self, example: str, length_max: int) -> str:
        """Return the text, of 1 to `length_max` characters; "" after a problem."""
        node = self.node
        if node.kind != "text":
            if node.kind in {"mapping", "list", "nothing"}:
                self.fail_kind("text", example)
            else:
                self.fail(
                    f"expected text, but {self.shown} is {_KIND_NAMES[node.kind]}; "
                    f"quote it: {quoted(node.text)}"
                )
            return ""
        text: str = node.value
        if not 1 <= len(text) <= length_max:
            size = f"{len(text):,}" if text else "none"
            self.fail(
                f"expected text of 1 to {length_max:,} characters, found {size}; "
                f"for example {example}"
            )
            return ""
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            self.fail(f"{quoted(text)} contains half of a surrogate pair, which is not valid text")
            return ""
        return text

    def whole(self, low: int, high: int, example: str) -> int:
        """Return a whole number from `low` to `high`; `low` after a problem."""
        value = self.node.value
        if self.node.kind == "number" and isinstance(value, int) and low <= value <= high:
            return int(value)
        self.fail_kind(f"a whole number from {low:,} to {high:,}", example)
        return low

    # --------------------------------------------------------------------------- many values

    def items(self, example: str, *, single: bool = True) -> list[DocumentPlace]:
        """Return the items of a list. If `single`, one value counts as a list of one."""
        if self.node.kind == "list":
            return [
                DocumentPlace(item, self._problems, self, index)
                for index, item in enumerate(self.node.value)
            ]
        if self.node.kind == "nothing" or not single:
            self.fail_kind("a list", example)
            return []
        return [self]

    def entries(self, example: str) -> dict[str, DocumentPlace]:
        """Return the values of a mapping by their keys, which must be text and unique."""
        if self.node.kind != "mapping":
            self.fail_kind("a mapping", example)
            return {}
        found: dict[str, DocumentPlace] = {}
        for key, value in self.node.value:
            name = DocumentPlace(key, self._problems, self, key.text).text(example, KEY_LENGTH_MAX)
            place = DocumentPlace(value, self._problems, self, name, key)
            if name in found:
                place.fail_name(f"{quoted(name)} occurs twice; remove one")
            elif name:
                found[name] = place
        return found

    def require(self, found: dict[str, DocumentPlace], *examples: tuple[str, str]) -> bool:
        """Return whether a mapping has all these fields; add a problem for each missing one."""
        missing = [(name, example) for name, example in examples if name not in found]
        # If the value is not a mapping, `entries` has already added a problem.
        if self.node.kind == "mapping":
            for name, example in missing:
                self.fail(f"{quoted(name)} is missing; for example {name}: {example}")
        return not missing


def _cut(text: str) -> str:
    """Return the spelling, shortened and on one line."""
    return show(text)[1:-1]
