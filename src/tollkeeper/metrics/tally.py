"""What rules in force count as they decide: fields and dictionaries that grow by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tollkeeper.core.errors import StoreError, StoreFull, StoreTimeout
from tollkeeper.metrics.counters import Histogram

_ERRORS: Final = {StoreTimeout: "timeout", StoreFull: "full"}


@dataclass(slots=True)
class RuleCounts:
    """What a rule decided in this process so far. Counted without a lock: about right."""

    allowed: int = 0
    denied: int = 0
    shadow_denied: int = 0
    failed: int = 0
    """Times that the store could not decide; and what was answered then:"""
    local_allowed: int = 0
    local_denied: int = 0
    """By counts of this machine."""
    policy_allowed: int = 0
    policy_denied: int = 0
    """Because the rule is open, or closed."""
    raised: int = 0
    """Nothing: the caller got the error."""
    cooldowns: int = 0
    blocks: int = 0
    """Penalties that were given."""


@dataclass(slots=True)
class Tally:
    """What is counted beside the rules, in this process so far."""

    unruled: dict[str, int] = field(default_factory=dict)
    """Checks that no limit had a say in, by why."""
    errors: dict[str, int] = field(default_factory=dict)
    """Checks that the store failed: timeout, unavailable or full."""
    store_seconds: Histogram = field(default_factory=Histogram)
    """How long checks waited for a store that is a trip away."""

    def failed(self, error: StoreError) -> None:
        """Count an error."""
        kind = next((name for of, name in _ERRORS.items() if isinstance(error, of)), "unavailable")
        self.errors[kind] = self.errors.get(kind, 0) + 1
