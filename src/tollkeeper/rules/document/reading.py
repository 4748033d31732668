"""Read a rule document: turn YAML, JSON or plain data into a `Document`, or report all problems.

    version: 1
    tiers: {free: 100/minute, pro: 1000/minute burst 200}
    rules:
      - id: orders
        match: {endpoint: "/v1/orders/*", method: [POST]}
        by: [api_key]
        limits: [10/second, 100/minute burst 50]

`tree.py` turns the text into a tree and `grammar.py` the tree into a `Document`. `model.py` says
what each value means. Editors use the JSON Schema that `schema` returns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.rules.document.grammar import document_at
from tollkeeper.rules.document.model import Document, Rules
from tollkeeper.rules.document.tree import (
    BYTES_MAX,
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
_INDEX: Final = re.compile(r"\[([0-9]+)\]")


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

    >>> from_data({"version": 1, "deny": ["sk_revoked_*"]}).deny
    ('sk_revoked_*',)
    """
    return _read(source, lambda problems: tree_of_data(data, problems))


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a rule document."""
    text = resources.files(__package__).joinpath("rules.schema.json").read_text("utf-8")
    return cast("dict[str, Any]", json.loads(text))


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


def lines_of(text: str, paths: Iterable[str]) -> dict[str, int]:
    """Return the line of each path in a valid document, or of the closest path above it.

    >>> text = "version: 1\\nrules:\\n  - {id: a, by: user, limits: 10/second}\\n"
    >>> lines_of(text, ["rules[0].limits[0]", "rules"])
    {'rules[0].limits[0]': 3, 'rules': 3}
    """
    tree = tree_of_yaml(text, ProblemList("<text>"))
    return {path: 0 if tree is None else _line(tree, path) for path in paths}


def _line(node: DocumentNode, wanted: str) -> int:
    path = ""
    while (found := _child(node, path, wanted)) is not None:
        path, node = found
    return node.line


def _child(node: DocumentNode, path: str, wanted: str) -> tuple[str, DocumentNode] | None:
    """Return the part of a node that is, or contains, the path `wanted`."""
    if node.kind == "list":
        index = _INDEX.match(wanted, len(path))
        if index is None or int(index[1]) >= len(node.value):
            return None
        return wanted[: index.end()], node.value[int(index[1])]
    if node.kind == "mapping":
        for key, value in node.value:
            child = below(path, key.text)
            if wanted.startswith(child) and wanted[len(child) : len(child) + 1] in {"", ".", "["}:
                return child, value
    return None


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
