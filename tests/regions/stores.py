"""Stores of regions for tests, in memory: the reference counts, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from fractions import Fraction
from typing import Any

from ratekeeper import Limit, Regions
from ratekeeper.core.model import Consistency, Limits
from ratekeeper.decide.regional import AcrossRegions, MemoryRegional, Shares
from ratekeeper.decide.store import Answer, AsyncGateCheck
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.regions.store import RegionStore
from ratekeeper.testing import ManualClock

LIVE = Shares(1, Fraction(1, 2), Fraction(1, 2), 0, ("us",))


class AwaitedGate:
    """A gate in memory whose calls are awaited. Each of them lets other tasks run first."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate
        self.limits = gate.limits

    def __getattr__(self, verb: str) -> Any:
        async def call(*args: Any) -> Any:
            await asyncio.sleep(0)
            return getattr(self.gate, verb)(*args)

        return call


class AwaitedRegional(MemoryRegional):
    """The reference, also for asyncio."""

    def global_async_gate(self, limits: Limits, rule: str, across: AcrossRegions) -> Any:
        """See RegionalCounts."""
        return AwaitedGate(self.global_gate(limits, rule, across))


class RegionalStore(PythonMemoryStore):
    """A store in memory that counts global limits, as if it were on another machine."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.is_private = False
        self.counts = self.regional = AwaitedRegional(clock)
        self.counts._shares = LIVE
        self.as_async = self

    def async_gate(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> AwaitedGate:
        """See AsyncStore."""
        return AwaitedGate(self.gate(limits, rule, consistency, across))

    async def check_together_async(
        self, checks: Sequence[AsyncGateCheck], optional: Container[int] = ()
    ) -> list[Answer]:
        """See AsyncStore."""
        plain: Any = [(gate.gate, *rest) for gate, *rest in checks]  # type: ignore[attr-defined]  # ours
        return self.check_together(plain, optional)

    async def mark_async(self, subject: str, name: int, lasts_ns: int) -> bool:
        """See AsyncStore."""
        return self.mark(subject, name, lasts_ns)

    async def aclose(self) -> None:
        """See AsyncStore."""
        self.close()


def two_regions(clock: ManualClock) -> tuple[RegionStore, RegionalStore, RegionalStore]:
    """Return the store of a node in eu, and the stores of eu and us that it uses."""
    eu, us = RegionalStore(clock), RegionalStore(clock)
    regions = Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"}, sync=False)
    store = RegionStore(eu, regions, clock, links={"eu": eu, "us": us})
    return store, eu, us
