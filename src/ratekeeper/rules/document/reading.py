"""Read a rule document: turn YAML, JSON or plain data into a `Document`, or report all problems.

    version: 1
    tiers: {free: 100/minute, pro: 1000/minute burst 200}
    rules:
      - id: orders
        match: {endpoint: "/v1/orders/*", method: [POST]}
        by: [api_key]
        limits: [10/second, 100/minute burst 50]

`tree.py` turns the text into a tree and `grammar.py` the tree into a `Document`. `model.py`
explains the values. The writer is `writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.rules.document.grammar import document_at
from ratekeeper.rules.document.model import Document, Rules
from ratekeeper.rules.document.tree import (
    BYTES_MAX,
    RECEIVED_NODES_MAX,
    TOO_LONG,
    DocumentNode,
    DocumentPlace,
    DocumentProblem,
    ProblemList,
    TooManyProblems,
    below,
    tree_of_data,
    tree_of_yaml,
)

SHOWN_MAX: Final = 20


class DocumentError(ConfigError):
    """A rule document has mistakes. `problems` lists all of them, in the document's order."""

    def __init__(self, problems: tuple[DocumentProblem, ...]) -> None:
        self.problems = problems
        lines = [str(problem) for problem in problems[:SHOWN_MAX]]
        if len(problems) > SHOWN_MAX:
            lines.append(f"… and {len(problems) - SHOWN_MAX} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[DocumentError], tuple[tuple[DocumentProblem, ...]]]:
        return type(self), (self.problems,)


def read(text: str, source: str = "<text>") -> Document:
    """Return the document in a YAML or JSON text.

    >>> read("{version: 1, rules: [{id: all, by: user, limits: 10/second}]}").rules[0].limits
    (Limit(10, per=1),)

    Raises DocumentError. Each problem names `source`, the line and the column.
    """
    if not isinstance(text, str):
        _reject(source, f"a document is text, not {show(text)}; to read a file, use read_file()")
    return _read(source, lambda problems: tree_of_yaml(text, problems))


def read_received(text: str) -> Document:
    """Return the document in the body of a request, which may have fewer values than a file."""
    return _read("<body>", lambda problems: tree_of_yaml(text, problems, RECEIVED_NODES_MAX))


def read_file(path: str | Path) -> Document:
    """Return the document in a file. Raises DocumentError, also if the file cannot be read."""
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            found = file.read(BYTES_MAX + 1)
        if len(found) > BYTES_MAX:
            _reject(source, TOO_LONG)
        text = found.decode()
    except UnicodeDecodeError as error:
        _reject(source, f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
    except OSError as error:
        _reject(source, f"cannot be read: {error.strerror}")
    except ValueError as error:  # the path contains a null character
        _reject(source, f"cannot be read: {error}")
    return read(text, source)


def from_data(data: Mapping[str, Any], source: str = "<data>") -> Document:
    """Return the document in plain data, such as `json.loads` returns. Raises DocumentError.

    >>> from_data({"version": 1, "deny": ["api_key:sk_revoked_*"]}).deny
    ('api_key:sk_revoked_*',)
    """
    return _read(source, lambda problems: tree_of_data(data, problems))


def _reject(source: str, message: str) -> NoReturn:
    raise DocumentError((DocumentProblem(source, 0, 0, "", message),))


def _read(source: str, tree_of: Callable[[ProblemList], DocumentNode | None]) -> Document:
    problems = ProblemList(source)
    document = Document()
    try:
        tree = tree_of(problems)
        if tree is not None:
            document = document_at(DocumentPlace(tree, problems))
    except TooManyProblems:
        pass
    if problems.found:
        found = sorted(problems.found, key=lambda problem: (problem.line, problem.column))
        raise DocumentError(tuple(found))
    return document


class TextPosition(NamedTuple):
    """A position in a text. Line and column start at 1."""

    line: int
    column: int


class DocumentPositions:
    """The positions of the parts of a valid document in its text, by path, such as `rules[2].by`.

    >>> text = "version: 1\\nrules:\\n  - {id: a, by: user, limits: 10/second}\\n"
    >>> DocumentPositions(text).of("rules[0].limits[0]").line
    3
    """

    def __init__(self, text: str) -> None:
        self._by_path: dict[str, TextPosition] = {"": TextPosition(1, 1)}
        tree = tree_of_yaml(text, ProblemList(""))
        if tree is not None:
            self._walk("", tree)

    def of(self, path: str) -> TextPosition:
        """Return the position of a part or, if it has none, of the part that contains it."""
        while path not in self._by_path:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._by_path[path]

    def _walk(self, path: str, node: DocumentNode) -> None:
        self._by_path.setdefault(path, TextPosition(node.line, node.column))
        if node.kind == "list":
            for index, child in enumerate(node.value):
                self._walk(below(path, index), child)
        elif node.kind == "mapping":
            for key, child in node.value:
                self._walk(below(path, key.text), child)


def is_document_text(rules: str) -> bool:
    """Return whether `rules` is a document's text (several lines, or JSON) and not a path or URL.

    >>> is_document_text('{"version": 1}'), is_document_text("limits.yaml")
    (True, False)
    """
    return "\n" in rules or rules.lstrip().startswith("{")


def document_of(rules: Rules) -> Document:
    """Return the document that is given as a path, a text or plain data."""
    if isinstance(rules, Document):
        return rules
    if isinstance(rules, Mapping):
        return from_data(rules)
    if isinstance(rules, str) and is_document_text(rules):
        return read(rules)
    if isinstance(rules, str | PathLike):
        return read_file(Path(rules))
    raise ConfigError(
        f"rules={show(rules)} is not a document, its path or its text; "
        f'for example Limiter.from_rules("limits.yaml")'
    )
