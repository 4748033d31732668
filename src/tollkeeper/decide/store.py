"""The seam between the limiter and where quotas are kept.

A store is opened once. A *gate* is one rule's limits prepared on one store, so that a check has
nothing left to look up: it is one call, with a subject and a cost. Every store passes the same
conformance suite (`tests/conformance/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tollkeeper.core.model import Decision, Limit


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. A *state* is one limit's count of one subject."""

    states: int
    """States held now. Some may have expired and wait to be reused. A large Redis estimates."""
    states_max: int
    """How many fit; 0: the store has no bound of its own."""
    bytes: int
    """Memory in use for them; an estimate where the store cannot know."""
    expired: int
    """States reclaimed so far, because they had become as good as new."""
    refused: int
    """Times a new state found no room: each raised StoreFull."""

    @property
    def fullness(self) -> float:
        """From 0.0 to 1.0; always 0.0 where there is no bound."""
        return self.states / self.states_max if self.states_max else 0.0


class Gate(Protocol):
    """One rule's limits on one store. All limits pass together or none is charged."""

    @property
    def limits(self) -> Sequence[Limit]: ...

    def check(self, subject: str, cost: int, /) -> Decision:
        """Spend `cost` units if every limit has room. Raises CapacityError, StoreError."""
        ...

    def peek(self, subject: str, cost: int, /) -> Decision:
        """What `check` would answer, with the remaining quota as it is now. Spends nothing."""
        ...

    def refund(self, subject: str, units: int, /) -> None:
        """Give units back to every limit, never beyond an untouched quota."""
        ...

    def grant(self, subject: str, units: int, ttl_ns: int | None, /) -> None:
        """Give extra units on top of every limit; gone after `ttl_ns` (None: one window)."""
        ...

    def reset(self, subject: str, /) -> None:
        """Forget what the subject spent, and what it was granted."""
        ...


class AsyncGate(Protocol):
    """A gate whose verbs are awaited: for a store that is a trip away.

    A store that has these offers `async_gate(limits, rule)` beside `gate`, and `aclose()`.
    """

    @property
    def limits(self) -> Sequence[Limit]: ...

    async def check(self, subject: str, cost: int, /) -> Decision: ...

    async def peek(self, subject: str, cost: int, /) -> Decision: ...

    async def refund(self, subject: str, units: int, /) -> None: ...

    async def grant(self, subject: str, units: int, ttl_ns: int | None, /) -> None: ...

    async def reset(self, subject: str, /) -> None: ...


class Store(Protocol):
    """Where quotas are kept."""

    def gate(self, limits: Sequence[Limit], rule: str) -> Gate:
        """Prepare a rule's limits. The same rule and limits share their counts."""
        ...

    def sweep(self) -> int:
        """Drop every state that has become as good as new; how many those were."""
        ...

    def stats(self) -> StoreStats: ...

    def busiest(self, count: int) -> list[tuple[str, int]]:
        """The subjects checked most lately, and about how often; up to 128 are known."""
        ...

    def close(self) -> None: ...
