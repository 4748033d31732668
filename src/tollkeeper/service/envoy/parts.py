"""The part of a limit that one bucket of one Envoy has, with its calls to the store.

A part lives as long as its bucket has the same limits of the same rules. It decides at each report,
and in between while its bucket waits for more:

    part.note(allowed, denied, now_ns)       the counts of a report
    action = await part.decide()             what to send; calls the store
    part.sending()                           before it is sent
    part.sent(now_ns)                        after
    await part.end(abandoned=…)              the stream has ended, or the bucket is abandoned

The decisions are in `shares.py` and `grants.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.steps import run_async
from tollkeeper.decide.store import Cells
from tollkeeper.rules.compiled import RuleCheck
from tollkeeper.service.envoy.buckets import Strategies, blanket, token_bucket
from tollkeeper.service.envoy.shares import (
    HOLDER_BYTES,
    TTL_S,
    Assignment,
    Holding,
    losing,
    name_of,
    pool_of,
    reporting,
)


class Action(NamedTuple):
    """What to send for a bucket."""

    kind: str
    """For the counts: `rate`, `grant` or `renewal`."""
    strategies: Strategies
    send_by_ns: int
    """The time after which it must not be sent any more; then decide again."""
    changes: bool
    """False if it only renews what Envoy has."""


class Part(Protocol):
    """See the module."""

    cell: str
    """Names what it is a part of; equal for all parts of one rule and subject."""
    waits: bool
    """True if the bucket wants more than it has."""
    until_ns: int
    """When Envoy's assignment expires; 0 if it has none."""

    def note(self, allowed: int, denied: int, now_ns: int) -> None:
        """Take note of the counts of a report."""
        ...

    async def decide(self) -> Action:
        """Return what to send. Raises StoreError, TableFull and UnreadableTable."""
        ...

    def sending(self) -> None:
        """Take note that the last action is being sent."""
        ...

    def sent(self, now_ns: int) -> None:
        """Take note that it was sent."""
        ...

    async def end(self, *, abandoned: bool) -> None:
        """Release the part as far as that is safe. Raises StoreError."""
        ...

    def shown(self) -> str:
        """Return what the bucket has, in a few words."""
        ...


class RatePart:
    """A share of a rate: a token bucket."""

    def __init__(
        self, cells: Cells, check: RuleCheck, node: str, now_ns: Callable[[], int]
    ) -> None:
        """`node` is the name of the Envoy; empty if it must not take an earlier share over."""
        self.waits = False
        self.until_ns = 0
        self.cells = cells
        self.cell = f"envoy:{check.rule.id}\x1f{check.subject}"
        self._pool = pool_of(check.prepared.limits[0])
        self._holding = Holding(os.urandom(HOLDER_BYTES), name_of(node))
        self._now_ns = now_ns
        self._deciding: Assignment | None = None
        self._assigned: Assignment | None = None

    def note(self, allowed: int, denied: int, now_ns: int) -> None:
        """See Part."""
        self.waits = denied > 0
        self._holding.reported(allowed + denied, now_ns, self._pool)

    async def decide(self) -> Action:
        """See Part. Two round trips."""
        found = await run_async(
            reporting(self.cells, self.cell, self._pool, self._holding, self._now_ns)
        )
        share = found.share
        if share.rate:
            send = token_bucket(share.burst, share.rate, found.fill_s, afresh=found.is_new)
        else:
            send = blanket(allow=False)
        before, self._deciding = self._assigned, found
        is_new = found.is_new and share.rate > 0
        changes = is_new or before is None or before.share != share
        return Action("rate" if changes else "renewal", send, found.send_by_ns, changes)

    def sending(self) -> None:
        """See Part."""
        if self._deciding is not None:
            self._holding.sending(self._deciding)
            self._assigned = self._deciding

    def sent(self, now_ns: int) -> None:
        """See Part."""
        self._holding.sent(now_ns)
        self.until_ns = now_ns + TTL_S * NS_PER_SECOND

    async def end(self, *, abandoned: bool) -> None:
        """See Part. Two round trips. The share stays reserved until it has expired."""
        steps = losing(
            self.cells,
            self.cell,
            self._pool,
            self._holding,
            self._now_ns,
            abandoned=abandoned,
        )
        await run_async(steps)

    def shown(self) -> str:
        """See Part."""
        if self._assigned is None:
            return "nothing yet"
        share, fill_s, *_ = self._assigned
        return f"{share.rate / fill_s:g}/s of {self._pool.rate / fill_s:g}/s, burst {share.burst}"
