"""The counters of a rule engine: plain fields and dictionaries.

A check and its rules are counted apart. A check that three rules apply to is one check (Tally) and
three decisions of rules (RuleCounts).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tollkeeper.core.errors import StoreError, StoreFull, StoreTimeout

_ERRORS: Final = {StoreTimeout: "timeout", StoreFull: "full"}


@dataclass(slots=True)
class RuleCounts:
    """The decisions of a rule in this process. Counted without a lock, so slightly inexact."""

    allowed: int = 0
    denied: int = 0
    """Denied by a limit."""
    penalty_denied: int = 0
    """Denied by a cool-down or a block."""
    shadow_denied: int = 0
    failed: int = 0
    """Checks that the store could not decide. The next fields say how they were answered."""
    local_allowed: int = 0
    local_denied: int = 0
    """Answered by the counts of this machine."""
    policy_allowed: int = 0
    policy_denied: int = 0
    """Answered because the rule's failure policy is open or closed."""
    raised: int = 0
    """Not answered: the error was raised to the caller."""
    cooldowns: int = 0
    blocks: int = 0
    """Penalties that this process gave."""


@dataclass(slots=True)
class Tally:
    """The checks of this process, each counted once. Counted without a lock, as RuleCounts are."""

    allowed: int = 0
    """Checks that limits allowed."""
    denied: int = 0
    """Checks that a limit or a penalty denied."""
    unavailable: int = 0
    """Checks that were denied because the store failed and a rule is `on_failure: closed`."""
    raised: int = 0
    """Checks without a decision: the error of the store was raised to the caller."""
    degraded: int = 0
    """Checks that the store did not decide alone: a failure policy took part, or raised."""
    unruled: dict[str, int] = field(default_factory=dict)
    """Checks without a limit, by reason: unlimited, exempt or blocked."""
    errors: dict[str, int] = field(default_factory=dict)
    """Checks that the store could not decide: timeout, unavailable or full."""

    def failed(self, error: StoreError) -> None:
        """Count an error of the store by its kind."""
        kind = next((name for of, name in _ERRORS.items() if isinstance(error, of)), "unavailable")
        self.errors[kind] = self.errors.get(kind, 0) + 1
