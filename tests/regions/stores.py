"""Stores of regions for tests: the reference counts in memory, which answer with Asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from ratekeeper import Limit, Regions
from ratekeeper.core.model import Consistency, Limits
from ratekeeper.core.steps import Ask
from ratekeeper.decide.leasing import LeaseCheck
from ratekeeper.decide.regional import AcrossRegions, MemoryRegional, Shares
from ratekeeper.decide.store import Charge
from ratekeeper.regions.store import RegionStore
from ratekeeper.testing import ManualClock
from tests.shared_memory import SharedMemory

LIVE = Shares(1, Fraction(1, 2), Fraction(1, 2), 0, ("us",))


def asking(function: Callable[..., Any], *args: Any) -> Ask:
    """Return an Ask of a call in memory. On asyncio, it lets other tasks run first."""

    async def send(*args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    return Ask(function, send, *args)


class AskingCounter:
    """A counter in memory that answers with Asks."""

    def __init__(self, counter: Any) -> None:
        self.counter = counter
        self.limits = counter.limits

    def fast_check(self, fallback: Any) -> None:
        """See Counter."""

    def __getattr__(self, verb: str) -> Any:
        return partial(asking, getattr(self.counter, verb))


class AskingRegional(MemoryRegional):
    """The reference, whose counters answer with Asks."""

    def global_counter(self, limits: Limits, rule: str, across: AcrossRegions) -> Any:
        """See RegionalCounts."""
        return AskingCounter(super().global_counter(limits, rule, across))


class RegionalStore(SharedMemory):
    """The store of a region in memory, which answers with Asks."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.counts = self.regional = AskingRegional(clock)
        self.counts._shares = LIVE

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> Any:
        """See Store."""
        return AskingCounter(super().counter(limits, rule, consistency, across))

    def check_together(self, checks: Sequence[Charge], optional: Container[int] = ()) -> Any:
        """See Store."""
        return asking(super().check_together, [_inner(each) for each in checks], optional)

    def lease(self, checks: Sequence[LeaseCheck], optional: Container[int] = ()) -> Any:
        """See Authority."""
        return asking(super().lease, [LeaseCheck(*_inner(each)) for each in checks], optional)

    def mark(self, subject: str, name: int, lasts_ns: int) -> Any:
        """See Store."""
        return asking(super().mark, subject, name, lasts_ns)


def _inner(check: Any) -> Any:
    counter, *rest = check
    return (counter.counter, *rest)


def two_regions(clock: ManualClock) -> tuple[RegionStore, RegionalStore, RegionalStore]:
    """Return the store of a node in eu, and the stores of eu and us that it uses."""
    eu, us = RegionalStore(clock), RegionalStore(clock)
    regions = Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"}, sync=False)
    store = RegionStore(eu, regions, clock, links={"eu": eu, "us": us})
    return store, eu, us
