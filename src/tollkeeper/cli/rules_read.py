"""Rule documents for the command line: from files, from standard input, and from a database.

Databases need libraries that files do without, so those are imported when one is asked for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tollkeeper.core.errors import ConfigError
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import DocumentError, read
from tollkeeper.rules.document.tree import (
    BYTES_MAX,
    TOO_LONG,
    DocumentNode,
    DocumentProblem,
    ProblemList,
    below,
    tree_of_yaml,
)
from tollkeeper.rules.document.writing import to_yaml

if TYPE_CHECKING:
    from tollkeeper.control.database import Database
    from tollkeeper.control.repository import Repository, Version

STDIN: Final = "-"
_SQLITE: Final = "sqlite:///"


class Unreadable(ConfigError):
    """A file that cannot be read at all, so that nobody knows whether the document is right."""


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a document, and what to call it in messages."""

    name: str
    text: str
    number: int | None = None
    """Of a version in a database, whose text is canonical; 0: there is none yet; None: a file."""

    def document(self) -> Document:
        """What the text says. Raises DocumentError."""
        return Document() if self.number == 0 else read(self.text, self.name)

    def canonical(self) -> str:
        """The text as Tollkeeper writes it."""
        return to_yaml(self.document()) if self.number is None else self.text


# ----------------------------------------------------------------------------------------- files


def from_file(name: str) -> Source:
    """What a file holds, or standard input where its name is `-`. Read once: it may be a pipe.

    Raises Unreadable, or DocumentError for what is no text or too much of it.
    """
    shown = "<stdin>" if name == STDIN else name
    if "://" in name:
        # Not repeated: there may be a password in it.
        raise Unreadable("a URL stands where a FILE is wanted; give it as --database URL")
    try:
        found = _bytes(name)
    except OSError as error:
        raise Unreadable(f"{shown}: it cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null character in the name, which no system knows
        raise Unreadable(f"{shown!r}: it cannot be read: {error}") from None
    if len(found) > BYTES_MAX:
        raise DocumentError((DocumentProblem(shown, 0, 0, "", TOO_LONG),))
    try:
        return Source(shown, found.decode())
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8; save the file as UTF-8"
        raise DocumentError((DocumentProblem(shown, 0, 0, "", message),)) from None


def _bytes(name: str) -> bytes:
    """The beginning of a file: what is longer than a document may be is not read to its end."""
    if name == STDIN:
        if sys.stdin is None:
            raise OSError("standard input is closed")
        return sys.stdin.buffer.read(BYTES_MAX + 1)
    with Path(name).open("rb") as file:
        return file.read(BYTES_MAX + 1)


class Position(NamedTuple):
    """Where something stands in a text; from 1."""

    line: int
    column: int


class Positions:
    """Where the parts of a document stand in its text, by their paths, such as `rules[2].by`."""

    def __init__(self, text: str) -> None:
        self._by_path: dict[str, Position] = {"": Position(1, 1)}
        tree = tree_of_yaml(text, ProblemList(""))
        if tree is not None:
            self._walk("", tree)

    def of(self, path: str) -> Position:
        """The position of a part, or of what holds it, where it has no place of its own."""
        while path not in self._by_path:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._by_path[path]

    def _walk(self, path: str, node: DocumentNode) -> None:
        self._by_path.setdefault(path, Position(node.line, node.column))
        if node.kind == "list":
            for place, child in enumerate(node.value):
                self._walk(below(path, place), child)
        elif node.kind == "mapping":
            for key, child in node.value:
                self._walk(below(path, key.text), child)


# ------------------------------------------------------------------------------------- databases


@asynccontextmanager
async def opened(url: str | None, *, makes: bool = False) -> AsyncIterator[Repository]:
    """The repository at a URL, closed at the end. Only where `makes` is set, a file is made for it.

    Raises ConfigError, StoreUnavailable.
    """
    if not url:
        raise ConfigError(
            "which database? Give --database URL, or set TOLLKEEPER_DATABASE; "
            "for example sqlite:///rules.db or postgresql://user@host/rules"
        )
    try:
        from tollkeeper.control.database import Database  # noqa: PLC0415 - see above
        from tollkeeper.control.repository import Repository  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tollkeeper":
            raise
        raise ConfigError(
            f"rules in a database need {error.name}, which is not installed; "
            f"install it with: pip install 'tollkeeper[control]'"
        ) from None
    if not makes:
        _refuse_missing(Database(url))
    async with await Repository.open(url) as repository:
        yield repository


def _refuse_missing(database: Database) -> None:
    file = Path(database.name.removeprefix(_SQLITE))
    if not database.is_postgresql and not file.exists():
        raise ConfigError(
            f"there is no file {file}; correct the URL, or make the first version: "
            f"tollkeeper rules apply FILE"
        )


def source_of(version: Version | None) -> Source:
    """A version as a source; None is that there is none yet."""
    if version is None:
        return Source("no version", "", 0)
    return Source(f"version {version.number}", version.text, version.number)


async def _of_database(url: str | None, number: int | None) -> Source:
    async with opened(url) as repository:
        if number is not None:
            return source_of(await repository.version(number))
        return source_of(await repository.current())


def from_database(url: str | None, number: int | None = None) -> Source:
    """A version in a database; without a number the current one. Raises ConfigError, StoreError."""
    return asyncio.run(_of_database(url, number))


def from_either(file: str | None, url: str | None, *, url_was_typed: bool) -> Source:
    """The document of a FILE or, where none is given, the current one of the database.

    A database in the environment is there for all commands, so it does not contradict a FILE.
    """
    if file is not None and url_was_typed:
        raise ConfigError("give a FILE or --database, not both")
    if file is not None:
        return from_file(file)
    if not url:
        raise ConfigError("give a FILE or --database URL (or set TOLLKEEPER_DATABASE)")
    return existing(from_database(url))


def existing(source: Source) -> Source:
    """The source, if there is a version at all."""
    if source.number == 0:
        raise ConfigError(
            "the database holds no rules yet; put some there: tollkeeper rules apply FILE"
        )
    return source
