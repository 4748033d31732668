"""The rule document: read, validated and written."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.rules.document.model import Document

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
    # Imported here: reading a document needs a library that limits alone do without.
    from tollkeeper.rules.document.documents import from_data, read, read_file  # noqa: PLC0415 - see above

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
