"""Regions in one process, in virtual time: stores in memory, and links that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from fractions import Fraction
from typing import Any, TypeVar, cast

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import Limit
from ratekeeper.decide.regional import (
    AcrossRegions,
    MemoryRegional,
    MemoryRegionalCounter,
    RegionalCounts,
)
from ratekeeper.regions.exchange import Exchange
from ratekeeper.regions.table import ShareTable, share_table

T = TypeVar("T")
START_NS = 1_800_000_000 * NS_PER_SECOND


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing is left to do."""

    def __init__(self) -> None:
        self._virtual_s = 1_000.0
        super().__init__()

    def time(self) -> float:
        """Return the virtual time."""
        return self._virtual_s

    def _run_once(self) -> None:
        loop = cast("Any", self)
        if not loop._ready and loop._scheduled:
            self._virtual_s = max(self._virtual_s, loop._scheduled[0]._when)
        cast("Any", super())._run_once()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class LoopClock:
    """A store's clock: the virtual time, and how far it is ahead."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.ahead_ns = ahead_ns

    def now_ns(self) -> int:
        """Return the time."""
        return START_NS + self.ahead_ns + round(asyncio.get_running_loop().time() * NS_PER_SECOND)


class Remote:
    """A store at the other end of a network, as one process reaches it."""

    def __init__(self, store: MemoryRegional, delay_s: float, is_cut: Callable[[], bool]) -> None:
        self._store = store
        self._delay_s = delay_s
        self._is_cut = is_cut
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "traffic":
            return self._store.traffic

        async def call(*args: Any) -> Any:
            self.calls.append(name)
            await self._travel()
            result = await cast("Awaitable[Any]", getattr(self._store, name)(*args))
            await self._travel()
            return result

        return call

    async def _travel(self) -> None:
        await asyncio.sleep(self._delay_s)
        if self._is_cut():
            await asyncio.Event().wait()  # no answer, ever


class Process:
    """One candidate. `stopped` is a process that is killed, stopped or cut off from all stores."""

    def __init__(self, world: World, region: str, name: str) -> None:
        self.stopped = False
        self.region = region
        self.stores = {peer: world.remote(self, peer) for peer in world.stores}
        seen = cast("dict[str, RegionalCounts]", self.stores)
        self.exchange = Exchange(region, world.table, seen, name)
        self.task = asyncio.get_running_loop().create_task(self.exchange.run())


class World:
    """Several regions."""

    def __init__(self, *names: str, delay_s: float = 0.05, table: ShareTable | None = None) -> None:
        self.clocks = {name: LoopClock() for name in names}
        self.stores = {name: MemoryRegional(self.clocks[name]) for name in names}
        self.table = table or share_table(1, {name: Fraction(1, len(names)) for name in names})
        self.delay_s = delay_s
        self.cuts: set[tuple[str, str]] = set()
        """Pairs of regions: the first one cannot call the store of the second."""

    def remote(self, process: Process, peer: str) -> Remote:
        """Return the store of a region as a process sees it."""
        region = process.region
        delay_s = 0.0005 if peer == region else self.delay_s
        return Remote(
            self.stores[peer], delay_s, lambda: process.stopped or (region, peer) in self.cuts
        )

    def start(self, region: str, name: str = "") -> Process:
        """Start a candidate."""
        return Process(self, region, name or f"{region}-1")

    async def started(self) -> list[Process]:
        """Start a candidate in each region, and wait until all have shares and know each other."""
        processes = [self.start(region) for region in self.stores]
        await until(lambda: all(len(usable(each)) == len(self.stores) - 1 for each in processes))
        return processes

    def cut(self, one: str, other: str) -> None:
        """Cut two regions off from each other."""
        self.cuts |= {(one, other), (other, one)}

    def counter(
        self, region: str, limit: int = 100, across: AcrossRegions = "exact"
    ) -> MemoryRegionalCounter:
        """Return a rule's limits in a region: so many units an hour."""
        return self.stores[region].global_counter((Limit(limit, per=3_600),), "api", across)

    async def used(self, region: str, limit: int = 100) -> int:
        """Return what a region knows of the usage of ann."""
        usage = await self.stores[region].usage((Limit(limit, per=3_600),), "api", "ann")
        return usage.used[0]

    async def share(self, region: str) -> Fraction:
        """Return the share in use in a region."""
        shares = await self.stores[region].shares()
        return Fraction(0) if shares is None else shares.share


def usable(process: Process) -> tuple[str, ...]:
    """Return the regions with which a process exchanges totals."""
    term = process.exchange.term
    return () if term is None or term.shares is None else term.usable()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait for a condition; return how long it took. Fails after `seconds` of virtual time."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while not condition():
        assert loop.time() - started_s < seconds, "the condition is never true"
        await asyncio.sleep(0.01)
    return loop.time() - started_s
