"""Every error Ratekeeper raises, in one tree.

    RatekeeperError
    ├── ConfigError            fix the input; also a ValueError
    │   ├── RateSyntaxError    a rate string; points at the character
    │   ├── InvalidOption      an option that the function does not have; also a TypeError
    │   ├── InvalidKey         a key that cannot name a subject
    │   └── InvalidCost        a cost that is not a whole number in range
    ├── CapacityError          give up: this cost can never fit this limit
    ├── ChangeRefused          the rules did not change; read them again, then decide
    │   ├── VersionConflict    another change of the rules came first
    │   └── UnsafeChange       most likely a mistake; force it if it is intended
    ├── StoreError             apply the failure policy
    │   ├── StoreFull          no room for another key
    │   ├── StoreTimeout       the deadline passed before the store answered
    │   └── StoreUnavailable   the store cannot be opened or reached
    ├── SlotLost               a request in flight has outlived its slot, and others have taken it
    └── LimitExceeded          a denial, where the caller wants an exception

The branches follow what the caller does about the error. A denial is a Decision, not an error. Only
the forms that cannot return a Decision (the decorator, the context manager) raise LimitExceeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ratekeeper.core.model import Decision, Limit


FindingCode = Literal[
    "denies-all",
    "allows-all",
    "never-fits",
    "changes-no-rule",
    "nothing-enforced",
    "orphaned-tier",
    "no-limits",
    "no-default-tier",
    "slow-patterns",
    "absent-attribute",
    "unreachable",
]

_SHARE_OF_REGION = "in this region, which has a share of it"
_SHOWN_CHARACTERS_MAX = 100
_SHOWN_FINDINGS_MAX = 20


def show(value: object) -> str:
    """Return any value for an error message: shortened and on one line.

    >>> show("a\\nb")
    "'a\\\\nb'"
    >>> len(show("x" * 1000))
    99
    """
    try:
        text = repr(value)
    except Exception:  # repr of a caller's object may raise anything; a long int raises, too
        return f"<a {type(value).__name__} that cannot be shown>"
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return text
    half = _SHOWN_CHARACTERS_MAX // 2 - 1
    return f"{text[:half]}…{text[-half:]}"


def quoted(text: str) -> str:
    """Return text in double quotes for an error message: shortened and on one line.

    >>> print(quoted("10/fortnight"))
    "10/fortnight"
    """
    shown = show(text)
    return shown if '"' in shown else f'"{shown[1:-1]}"'


@dataclass(frozen=True, slots=True)
class SafetyFinding:
    """A valid part of a rule document that most likely is a mistake.

    The change is rejected unless its author forces it, or the finding is only advice.
    """

    code: FindingCode
    where: str
    """The path in the document, such as `rules[2].limits`."""
    what: str
    why: str
    remedy: str
    rule: str = ""
    """The id of the rule; empty if the finding is not about a rule."""

    @property
    def is_advice(self) -> bool:
        """True if the change is made without `force`."""
        return self.code == "absent-attribute"

    def __str__(self) -> str:
        rule = f" (rule {quoted(self.rule)})" if self.rule else ""
        force = "" if self.is_advice else ", or force it"
        return f"{self.where}{rule}: {self.what}: {self.why}; {self.remedy}{force}"


class RatekeeperError(Exception):
    """The root of all errors that this package raises on purpose."""


class ConfigError(RatekeeperError, ValueError):
    """An argument, rate string or document is wrong. The message shows a correct one."""


class RateSyntaxError(ConfigError):
    """A rate string is not valid.

    `text` is the whole string and `position` the offset of the first wrong character.
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


class InvalidOption(ConfigError, TypeError):
    """A function was called with an option that it does not have, or without one that it needs."""


class InvalidKey(ConfigError):
    """A key cannot name a subject: it is empty, too long, or not text."""


class InvalidCost(ConfigError):
    """A cost is not a whole number of units from 0 up."""


class CapacityError(RatekeeperError):
    """The cost is higher than the limit's capacity, so waiting does not help."""

    def __init__(
        self, cost: int, limit: Limit, most: int | None = None, share: str = _SHARE_OF_REGION
    ) -> None:
        self.cost: int = cost
        """The cost of the request."""
        self.limit: Limit = limit
        """The limit that it does not fit."""
        self.most: int = limit.capacity if most is None else most
        """The highest cost that fits: the capacity, or the share that the request may use."""
        self._share = share
        whose = "" if most is None else f" {share}"
        super().__init__(
            f"a cost of {show(cost)} can never fit {limit}, which holds {self.most} at most"
            f"{whose}; split the request, or raise the limit's capacity to at least that cost"
        )

    def __reduce__(self) -> tuple[type[CapacityError], tuple[int, Limit, int | None, str]]:
        most = None if self.most == self.limit.capacity else self.most
        return type(self), (self.cost, self.limit, most, self._share)


class ChangeRefused(RatekeeperError):
    """A change of the rules, or of the shares of regions, was rejected or is not in use."""


class VersionConflict(ChangeRefused):
    """Another change of the rules came first.

    `expected` is the number of the version that the caller changed and `current` that of the
    version in force; 0 means that there is no version.
    """

    def __init__(self, expected: int, current: int) -> None:
        self.expected = expected
        self.current = current
        super().__init__(
            f"the change is based on {_version(expected)}, but now {_version(current)} is in "
            f"force; look at the changes, then repeat the change on that version"
        )

    def __reduce__(self) -> tuple[type[VersionConflict], tuple[int, int]]:
        return type(self), (self.expected, self.current)


def _version(number: int) -> str:
    return f"version {number}" if number else "no version"


class UnsafeChange(ChangeRefused):
    """The rules are valid, but most likely a mistake. `findings` says what and why."""

    def __init__(self, findings: tuple[SafetyFinding, ...]) -> None:
        self.findings = findings
        lines = [str(finding) for finding in findings[:_SHOWN_FINDINGS_MAX]]
        if len(findings) > _SHOWN_FINDINGS_MAX:
            lines.append(f"… and {len(findings) - _SHOWN_FINDINGS_MAX} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[UnsafeChange], tuple[tuple[SafetyFinding, ...]]]:
        return type(self), (self.findings,)


class StoreError(RatekeeperError):
    """The store could not decide. `Limiter(on_failure=…)` sets what happens then."""


class StoreFull(StoreError):
    """The store has no room for another key: every slot holds a key that is still limited."""


class StoreTimeout(StoreError):
    """The store did not answer before the deadline."""


class StoreUnavailable(StoreError):
    """The store cannot be opened or reached."""


class SlotLost(RatekeeperError):
    """A request in flight was not renewed in time, and other requests have all the slots.

    The request goes on beyond the limit. It should end soon.
    """


class LimitExceeded(RatekeeperError):
    """Raised by the decorator and the context manager; `decision` says when to retry."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        super().__init__(f"limit exceeded; retry after {decision.retry_after:.3f} s")

    def __reduce__(self) -> tuple[type[LimitExceeded], tuple[Decision]]:
        return type(self), (self.decision,)
