"""The rule document: from YAML, JSON or plain data to a `Document`, or to all that is wrong in it.

    version: 1
    tiers: {free: 100/minute, pro: 1000/minute burst 200}
    rules:
      - id: orders
        match: {endpoint: "/v1/orders/*", method: [POST]}
        by: [api_key]
        limits: [10/second, 100/minute burst 50]

`rules.py` says what each value means; `rules.schema.json` (`schema()`) says the same to editors.
`reading.py` makes a tree of it, `grammar.py` reads the tree. All problems are told at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.rules.document.grammar import document_at
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.tree import (
    BYTES_MAX,
    TOO_LONG,
    DocumentNode,
    DocumentPlace,
    DocumentProblem,
    ProblemList,
    TooManyProblems,
    tree_of_data,
    tree_of_yaml,
)

SHOWN_MAX: Final = 20


class DocumentError(ConfigError):
    """A rule document that cannot be used. `problems` has all that is wrong with it."""

    def __init__(self, problems: tuple[DocumentProblem, ...]) -> None:
        self.problems = problems
        lines = [str(problem) for problem in problems[:SHOWN_MAX]]
        if len(problems) > SHOWN_MAX:
            lines.append(f"… and {len(problems) - SHOWN_MAX} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[DocumentError], tuple[tuple[DocumentProblem, ...]]]:
        return type(self), (self.problems,)


def read(text: str, source: str = "<text>") -> Document:
    """The document that a YAML or JSON text holds.

    >>> read("{version: 1, rules: [{id: all, by: user, limits: 10/second}]}").rules[0].limits
    (Limit(10, per=1),)

    Raises DocumentError, whose problems name `source`, the line and the column.
    """
    if not isinstance(text, str):
        _refuse(source, f"a document is text, not {show(text)}; to read a file, use read_file()")
    return _read(source, lambda problems: tree_of_yaml(text, problems))


def read_file(path: str | Path) -> Document:
    """The document in a file. Raises DocumentError, also where the file cannot be read."""
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            found = file.read(BYTES_MAX + 1)
        if len(found) > BYTES_MAX:
            _refuse(source, TOO_LONG)
        text = found.decode()
    except UnicodeDecodeError as error:
        _refuse(source, f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
    except OSError as error:
        _refuse(source, f"it cannot be read: {error.strerror}")
    except ValueError as error:  # the path is not one that a system can know
        _refuse(source, f"it cannot be read: {error}")
    return read(text, source)


def from_data(data: Mapping[str, Any], source: str = "<data>") -> Document:
    """The document that plain data stands for, such as `json.loads` gives. Raises DocumentError.

    >>> from_data({"version": 1, "deny": ["sk_revoked_*"]}).deny
    ('sk_revoked_*',)
    """
    return _read(source, lambda problems: tree_of_data(data, problems))


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a rule document."""
    text = resources.files(__package__).joinpath("rules.schema.json").read_text("utf-8")
    return cast("dict[str, Any]", json.loads(text))


def _refuse(source: str, message: str) -> NoReturn:
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
        raise DocumentError(tuple(sorted(problems.found, key=lambda it: (it.line, it.column))))
    return document


# How callers give rules: a path, the text of a document, plain data, or a Document.
Rules = str | PathLike[str] | Mapping[str, Any] | Document


def is_document_text(rules: str) -> bool:
    """Whether it is a document itself, and no path or URL of one: several lines, or JSON.

    >>> is_document_text('{"version": 1}'), is_document_text("limits.yaml")
    (True, False)
    """
    return "\n" in rules or rules.lstrip().startswith("{")


def document_of(rules: Rules) -> Document:
    """The document that a path, a text or a mapping stands for."""
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
