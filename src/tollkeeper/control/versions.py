"""What the repository keeps, as values, and what may be in them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from tollkeeper.control.tables import AUTHOR_LENGTH_MAX, REASON_LENGTH_MAX
from tollkeeper.core.errors import ConfigError, show

Kind = Literal[
    "apply",
    "rollback",
    "put-rule",
    "remove-rule",
    "set-tier",
    "remove-tier",
    "assign",
    "unassign",
    "override",
    "remove-override",
    "list",
    "unlist",
]

ROWS_MAX: Final = 1_000
"""Of the history or the audit in one answer."""
_NUMBER_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the rules."""

    number: int
    author: str
    reason: str
    created_at: datetime
    """In UTC; by the clock of the database's server."""
    text: str
    """The document, in canonical form."""
    base: int | None
    """The version it is a change of; None for the first."""
    kind: str
    """How it came about: apply, rollback, assign and so on."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who changed what, when and why. There is one for each version."""

    version: int
    author: str
    reason: str
    created_at: datetime
    kind: str
    diff: str
    """From the version before; of the first, all of it."""
    forced: str
    """What was found unsafe and forced all the same; empty if nothing was."""


def check_rows(limit: int) -> None:
    """Raises ConfigError if so many rows are not given at once."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= ROWS_MAX:
        raise ConfigError(f"limit={show(limit)} is not from 1 to {ROWS_MAX:,}; try limit=50")


def check_number(number: int) -> None:
    """Raises ConfigError for what cannot be the number of a version."""
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or not 1 <= number <= _NUMBER_MAX:
        raise ConfigError(f"{show(number)} is not the number of a version; those are 1, 2, 3 …")


def check_expected(expected: int | None) -> None:
    """Raises ConfigError for what is neither a number nor 0 or None, which mean that none is."""
    if expected is not None and expected != 0:
        check_number(expected)


def check_who_and_why(author: str, reason: str) -> None:
    """Raises ConfigError unless somebody signs, and both can be kept and shown."""
    fits = isinstance(author, str) and 1 <= len(author) <= AUTHOR_LENGTH_MAX
    if not fits or not author.isprintable() or not author.strip():
        raise ConfigError(
            f"author={show(author)} does not say who this is: printable text of at most "
            f'{AUTHOR_LENGTH_MAX} characters; for example author="ann@example.com"'
        )
    if (
        not isinstance(reason, str)
        or len(reason) > REASON_LENGTH_MAX
        or not all(line.isprintable() for line in reason.splitlines())
    ):
        raise ConfigError(
            f"reason={show(reason)} is not printable text of at most {REASON_LENGTH_MAX:,} "
            f'characters; for example reason="launch day"'
        )
