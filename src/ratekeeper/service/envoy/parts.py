"""The part of a limit that one bucket of one Envoy has, with its calls to the store.

A part lives as long as its bucket has the same limits of the same rules. It decides at each report,
and in between while its bucket waits for more:

    part.note(allowed, denied, now_ns)       the counts of a report
    action = await part.decide()             the action to send, or None; calls the store
    part.sending()                           before it is sent
    part.sent(now_ns)                        after
    await part.end(abandoned=…)              the stream has ended, or the bucket is abandoned

The decisions are in `shares.py` and `grants.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.model import UNITS_MAX, Request
from ratekeeper.core.steps import run_async
from ratekeeper.decide.store import Cells
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.rules.compiled import RuleCheck
from ratekeeper.service.envoy.buckets import Assigned, Strategies, blanket, finite, token_bucket
from ratekeeper.service.envoy.grants import (
    NO_UNITS,
    Grant,
    GrantLedger,
    Refund,
    charging,
    grant_of,
)
from ratekeeper.service.envoy.shares import (
    HOLDER_BYTES,
    SEND_NS_MAX,
    TTL_S,
    Assignment,
    Holding,
    losing,
    name_of,
    pool_of,
    reporting,
)

# An idle bucket is abandoned when at most so many of its units can be lost.
IDLE_UNITS_MAX: Final = 2


class Action(NamedTuple):
    """A message to send for a bucket."""

    kind: str
    """For the counts: `rate`, `grant` or `renewal`."""
    strategies: Strategies
    ttl_s: int
    """The time to live of the assignment."""
    send_by_ns: int
    """The time after which it must not be sent any more; then decide again."""
    changes: bool
    """False if it only renews the assignment that Envoy has."""
    others: frozenset[bytes] = frozenset()
    """Other holders of the limit whose parts should change at once; see `Part.holder`."""


class Part(Protocol):
    """See the module."""

    cell: str
    """The name of the limit that is divided; equal for all parts of one rule and subject."""
    holder: bytes
    """Names the part among those of one cell."""
    until_ns: int
    """When Envoy's assignment expires; 0 if it has none."""

    @property
    def waits(self) -> bool:
        """True if the bucket wants more than it has."""
        ...

    def use(self, target: Assigned) -> bool:
        """Continue with the current limits of the rules; return False if a new part is needed."""
        ...

    def note(self, allowed: int, denied: int, now_ns: int) -> None:
        """Take note of the counts of a report."""
        ...

    def may_abandon(self) -> bool:
        """Return True if an idle bucket can be abandoned; False: it must first return units."""
        ...

    async def decide(self) -> Action | None:
        """Return the action to send, or None. Raises StoreError, TableFull, UnreadableTable."""
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
        """Return the assignment of the bucket, in a few words."""
        ...


class RatePart:
    """A share of a rate: a token bucket."""

    def __init__(
        self, cells: Cells, check: RuleCheck, name: str, now_ns: Callable[[], int]
    ) -> None:
        """`name` is that of the bucket in its Envoy; empty if it takes no earlier share over."""
        self.waits = False
        self.until_ns = 0
        self.cells = cells
        self.cell = f"envoy:{check.rule.id}\x1f{check.subject}"
        self._pool = pool_of(check.prepared.limits[0])
        self.holder = os.urandom(HOLDER_BYTES)
        self._holding = Holding(self.holder, name_of(name))
        self._now_ns = now_ns
        self._deciding: Assignment | None = None
        self._assigned: Assignment | None = None
        self._key = check.rule.id, check.subject

    def use(self, target: Assigned) -> bool:
        """See Part. Other limits of the same rule divide the same table."""
        check = target.checks[0]
        if target.quota != "rate" or (check.rule.id, check.subject) != self._key:
            return False
        self._pool = pool_of(check.prepared.limits[0])
        return True

    def note(self, allowed: int, denied: int, now_ns: int) -> None:
        """See Part."""
        self.waits = denied > 0
        self._holding.reported(allowed + denied, now_ns)

    def may_abandon(self) -> bool:
        """See Part. Its share expires."""
        return True

    async def decide(self) -> Action:
        """See Part. Two round trips."""
        found = await run_async(
            reporting(self.cells, self.cell, self._pool, self._holding, self._now_ns)
        )
        share = found.share
        # At its target there is nothing to wait for, although requests are denied.
        self.waits = found.is_short and (self.waits or not share.rate)
        if share.rate:
            send = token_bucket(share.burst, share.rate, found.fill_s, afresh=found.is_new)
        else:
            send = blanket(allow=False)
        before, self._deciding = self._assigned, found
        is_new = found.is_new and share.rate > 0
        changes = is_new or before is None or before.share != share
        kind = "rate" if changes else "renewal"
        return Action(kind, send, TTL_S, found.send_by_ns, changes, found.others)

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


class GrantPart:
    """Finite grants: units that are charged to the rules before Envoy gets them."""

    def __init__(
        self,
        limiter: AsyncLimiter,
        request: Request,
        checks: tuple[RuleCheck, ...],
        envoys: Callable[[str], int],
        now_ns: Callable[[], int],
    ) -> None:
        """`envoys` returns how many buckets share a cell."""
        first = checks[0]
        self.cell = f"envoy:{first.rule.id}\x1f{first.subject}"
        self.holder = b""  # no other part waits for it
        self.until_ns = 0
        self._limiter = limiter
        self._request = request
        self._checks = checks
        self._limits = [limit for check in checks for limit in check.prepared.limits]
        self._envoys = envoys
        self._now_ns = now_ns
        self._ledger = GrantLedger(now_ns())
        self._refunds: list[Refund] = []
        self._granting: Grant | None = None
        self._is_idle = False

    @property
    def waits(self) -> bool:
        """See Part."""
        return self._ledger.is_due(self._now_ns())

    def use(self, target: Assigned) -> bool:
        """See Part. Grants of other limits count as spent."""
        return target.same(Assigned("grants", self._checks))

    def note(self, allowed: int, denied: int, now_ns: int) -> None:
        """See Part."""
        self._refunds += self._ledger.reported(allowed, denied, now_ns)
        self._is_idle = self._is_idle and not allowed + denied

    def may_abandon(self) -> bool:
        """See Part. The next grant has one unit; unspent units of the others are refunded first.

        Envoy does not report a bucket that it has forgotten, so all of its units would be lost.
        """
        self._is_idle = True
        return self._ledger.outstanding <= IDLE_UNITS_MAX

    async def decide(self) -> Action | None:
        """See Part. Two round trips or more if a grant is due, and one for each refund."""
        await self._refund_all()
        started_ns = self._now_ns()
        current = self._ledger.current
        replaces = self._is_idle and current is not None and current.units > 1
        if not replaces and not self._ledger.is_due(started_ns):
            return None
        grant = await self._charged()
        if grant is None:
            if not self._ledger.denied(self._now_ns()) and not replaces:
                return None
            grant = NO_UNITS
        self._granting = grant
        send_by_ns = started_ns + SEND_NS_MAX
        return Action("grant", finite(grant.units), grant.ttl_s, send_by_ns, changes=True)

    async def _charged(self) -> Grant | None:
        """Charge a grant and return it; None if there is no room."""
        envoys = UNITS_MAX if self._is_idle else self._envoys(self.cell)
        steps = charging(self._room, self._charge, self._ledger.wanted, envoys)
        units, charged_ns = await run_async(steps)
        if not units:
            return None
        grant = grant_of(self._limits, units, charged_ns)
        if grant is None:
            await self._refund(Refund(units, charged_ns))
        return grant

    async def _room(self) -> int:
        found = await self._limiter.peek(self._request, 0)
        if found.degraded:
            raise StoreUnavailable("the store could not be read")
        return found.remaining

    async def _charge(self, units: int) -> int | None:
        """Charge units to all rules; return the time of the charge, or None for a denial."""
        found = await self._limiter.check(self._request, units)
        if found.degraded:
            raise StoreUnavailable("the store could not be charged")
        return found.charged_ns if found.allowed else None

    async def _refund_all(self) -> None:
        """Refund the units that no grant can spend any more."""
        refunds, self._refunds = self._refunds, []
        if self._granting is not None and self._granting.units:  # it was not sent in time
            refunds.append(Refund(self._granting.units, self._granting.charged_ns))
        self._granting = None
        for each in refunds:
            await self._refund(each)

    async def _refund(self, refund: Refund) -> None:
        """Give units back. If the store fails, they stay spent."""
        charges = [(check.at(refund.units), refund.charged_ns) for check in self._checks]
        with suppress(StoreError):
            await asyncio.shield(self._limiter.settle_charges(charges, [], 0))

    def sending(self) -> None:
        """See Part."""
        if self._granting is not None:
            self._ledger.sending(self._granting)
            self._granting = None

    def sent(self, now_ns: int) -> None:
        """See Part."""
        self._ledger.sent(now_ns)
        if (grant := self._ledger.current) is not None:
            self.until_ns = now_ns + grant.ttl_s * NS_PER_SECOND

    async def end(self, *, abandoned: bool) -> None:  # noqa: ARG002 - both lose the same
        """See Part. Units of grants that are not settled count as spent."""
        await self._refund_all()

    def shown(self) -> str:
        """See Part."""
        found = self._ledger.current
        return "nothing yet" if found is None else f"{found.units} granted last"
