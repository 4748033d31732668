"""Every error Tollkeeper raises, in one tree.

    TollkeeperError
    ├── ConfigError            fix the input; also a ValueError
    │   ├── RateSyntaxError    a rate string; points at the character
    │   ├── InvalidKey         a key that cannot name a subject
    │   └── InvalidCost        a cost that is not a whole number in range
    ├── CapacityError          give up: this cost can never fit this limit
    ├── ChangeRefused          the rules stay as they are; look at them again, then decide
    │   ├── VersionConflict    somebody changed the rules meanwhile
    │   └── UnsafeChange       most likely not what anyone wants; force it if it is
    ├── StoreError             apply the failure policy
    │   ├── StoreFull          no room for another key that is still limited
    │   ├── StoreTimeout       the deadline passed before the store answered
    │   └── StoreUnavailable   the store cannot be opened or reached
    └── LimitExceeded          a denial, where the caller asked for an exception

The branches follow what the caller does about it. Denial is a Decision, not an error: only the
forms that have no Decision to return (the decorator, the context manager) raise LimitExceeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tollkeeper.core.model import Decision, Limit


FindingCode = Literal[
    "denies-all",
    "allows-all",
    "never-fits",
    "nothing-enforced",
    "orphaned-tier",
    "no-limits",
    "unreachable",
]

_SHOWN_CHARACTERS_MAX = 100
_SHOWN_FINDINGS_MAX = 20


def show(value: object) -> str:
    """`value` for an error message: short, on one line, and whatever it is.

    >>> show("a\\nb")
    "'a\\\\nb'"
    >>> len(show("x" * 1000))
    99
    """
    try:
        text = repr(value)
    except Exception:  # a caller's object may raise anything, and so does a long int
        return f"<a {type(value).__name__} that cannot be shown>"
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return text
    half = _SHOWN_CHARACTERS_MAX // 2 - 1
    return f"{text[:half]}…{text[-half:]}"


def quoted(text: str) -> str:
    """`text` as it would stand in a document, short and on one line, for a message.

    >>> print(quoted("10/fortnight"))
    "10/fortnight"
    """
    shown = show(text)
    return shown if '"' in shown else f'"{shown[1:-1]}"'


@dataclass(frozen=True, slots=True)
class SafetyFinding:
    """Something in a rule document that is rejected unless the author forces it."""

    code: FindingCode
    where: str
    """The path in the document, such as `rules[2].limits`."""
    what: str
    why: str
    remedy: str
    rule: str = ""
    """The id of the rule; empty where it is about none."""

    def __str__(self) -> str:
        rule = f" (rule {quoted(self.rule)})" if self.rule else ""
        return f"{self.where}{rule}: {self.what}: {self.why}; {self.remedy}, or force it"


class TollkeeperError(Exception):
    """The root: `except TollkeeperError` catches everything this package raises on purpose."""


class ConfigError(TollkeeperError, ValueError):
    """An argument, rate string or document is wrong. The message shows a right one."""


class RateSyntaxError(ConfigError):
    """A rate string that cannot be read.

    `text` is the whole string and `position` the offset of the first character that is wrong.
    """

    def __init__(self, text: str, position: int, problem: str, example: str) -> None:
        self.text = text
        self.position = position
        self.problem = problem
        self.example = example
        super().__init__(
            f"{problem} at character {position + 1}\n"
            f"    {text}\n"
            f"    {' ' * position}^\n"
            f"write it like this: {example}"
        )

    def __reduce__(self) -> tuple[type[RateSyntaxError], tuple[str, int, str, str]]:
        return type(self), (self.text, self.position, self.problem, self.example)


class InvalidKey(ConfigError):
    """A key that cannot name a subject: empty, too long, or not text."""


class InvalidCost(ConfigError):
    """A cost that is not a whole number of units from 0 up."""


class CapacityError(TollkeeperError):
    """The cost is more than the limit can ever hold, so no wait would help."""

    def __init__(self, cost: int, limit: Limit) -> None:
        self.cost = cost
        self.limit = limit
        super().__init__(
            f"a cost of {show(cost)} can never fit {limit}, which holds {limit.capacity} at most; "
            f"split the work, or raise the limit's capacity to at least that"
        )

    def __reduce__(self) -> tuple[type[CapacityError], tuple[int, Limit]]:
        return type(self), (self.cost, self.limit)


class ChangeRefused(TollkeeperError):
    """A change of the rules was refused, and nothing has changed."""


class VersionConflict(ChangeRefused):
    """The rules were changed by somebody else since the caller looked at them.

    `expected` is the number of the version that the caller knew and `current` that of the one in
    force; 0 is none.
    """

    def __init__(self, expected: int, current: int) -> None:
        self.expected = expected
        self.current = current
        super().__init__(
            f"this is a change of {_version(expected)}, but now there is {_version(current)}; "
            f"look at what has changed, then make the change on that"
        )

    def __reduce__(self) -> tuple[type[VersionConflict], tuple[int, int]]:
        return type(self), (self.expected, self.current)


def _version(number: int) -> str:
    return f"version {number}" if number else "no version yet"


class UnsafeChange(ChangeRefused):
    """The rules can be used, but most likely nobody wants them. `findings` says what and why."""

    def __init__(self, findings: tuple[SafetyFinding, ...]) -> None:
        self.findings = findings
        lines = [str(finding) for finding in findings[:_SHOWN_FINDINGS_MAX]]
        if len(findings) > _SHOWN_FINDINGS_MAX:
            lines.append(f"… and {len(findings) - _SHOWN_FINDINGS_MAX} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[UnsafeChange], tuple[tuple[SafetyFinding, ...]]]:
        return type(self), (self.findings,)


class StoreError(TollkeeperError):
    """The store could not decide. `Limiter(on_failure=…)` says what happens then."""


class StoreFull(StoreError):
    """Every place in the store holds a key that is still limited."""


class StoreTimeout(StoreError):
    """The store did not answer before the deadline."""


class StoreUnavailable(StoreError):
    """The store cannot be opened or reached."""


class LimitExceeded(TollkeeperError):
    """Raised by the decorator and the context manager; `decision` says when to come back."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        super().__init__(f"limit exceeded; retry after {decision.retry_after:.3f} s")

    def __reduce__(self) -> tuple[type[LimitExceeded], tuple[Decision]]:
        return type(self), (self.decision,)
