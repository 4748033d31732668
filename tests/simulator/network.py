"""A virtual clock, an event loop, and a network that loses, repeats, delays and cuts.

Time is whole nanoseconds, as everywhere. It advances only when the loop takes the next event from
its queue, so a simulated minute takes as long as its events. All random choices come from one
seeded generator: the same seed gives the same run.

**Clocks.** A process reads the wall clock once, when it starts, and continues it with the clock
that counts from boot (`core/clock.py`). So a running process does not see a step of the wall clock.
The next process of that node sees it. `NodeClock` does the same. Its rate is also off by some parts
per million, like that of a real oscillator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, NoReturn

from ratekeeper.core.clock import NS_PER_SECOND

# The start time of a simulation: any time that is not at the edge of a usual window.
START_NS: Final = 1_800_000_007 * NS_PER_SECOND
NS_PER_MS: Final = NS_PER_SECOND // 1_000

Event = tuple[int, int, Callable[..., None], tuple[Any, ...]]


def seeded(seed: float) -> Random:
    """Return a random generator that gives the same numbers for the same seed."""
    return Random(seed)


class EventLoop:
    """Calls functions at virtual times: in order of time, then in order of scheduling."""

    __slots__ = ("_events", "_order", "now")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._order = 0
        self.now = START_NS
        """The virtual time in nanoseconds."""

    def at(self, time_ns: int, function: Callable[..., None], *args: Any) -> None:
        """Call `function` at a time; at once if that time has passed."""
        self._order += 1
        heappush(self._events, (max(time_ns, self.now), self._order, function, args))

    def after(self, delay_ns: int, function: Callable[..., None], *args: Any) -> None:
        """Call `function` after some time."""
        self._order += 1
        heappush(self._events, (self.now + delay_ns, self._order, function, args))

    def run_until(self, end_ns: int) -> None:
        """Run all events up to a time, then set the clock to it."""
        events = self._events
        while events and events[0][0] <= end_ns:
            self.now, _, function, args = heappop(events)
            function(*args)
        self.now = end_ns

    # The loop is also the authority's clock: its time is the true time.

    def now_ns(self) -> int:
        """Return the true time."""
        return self.now

    def sleep(self, seconds: float) -> NoReturn:
        """Fail: code that waits cannot be simulated."""
        raise NotImplementedError("simulated code schedules an event instead of waiting")

    async def sleep_async(self, seconds: float) -> NoReturn:
        """Fail: see `sleep`."""
        self.sleep(seconds)


class NodeClock:
    """The clock of one process: the wall clock as it was at the start, continued at its own rate.

    `wall_offset_ns` is the node's wall clock minus the true time, when the process starts.
    """

    __slots__ = ("_base_ns", "_loop", "_ppm", "_started_ns")

    def __init__(self, loop: EventLoop, wall_offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self._loop = loop
        self._started_ns = loop.now
        self._base_ns = loop.now + wall_offset_ns
        self._ppm = 1_000_000 + drift_ppm

    def now_ns(self) -> int:
        """Return the node's time; it never steps."""
        return self._base_ns + (self._loop.now - self._started_ns) * self._ppm // 1_000_000

    def sleep(self, seconds: float) -> NoReturn:
        """Fail: see `EventLoop.sleep`."""
        self._loop.sleep(seconds)

    async def sleep_async(self, seconds: float) -> NoReturn:
        """Fail: see `EventLoop.sleep`."""
        self._loop.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Quality:
    """How messages travel. The delays are exponential above the minimum, so messages overtake."""

    delay_ns_min: int = 150_000
    delay_ns_mean: int = 350_000
    loss: float = 0.0
    """The share of messages that are lost."""
    duplication: float = 0.0
    """The share of messages that arrive twice."""


@dataclass(slots=True, eq=False)
class Cut:
    """A partition: no message of a source reaches a target."""

    sources: frozenset[int]
    targets: frozenset[int]
    both_ways: bool = True

    def stops(self, source: int, target: int) -> bool:
        """Return True if a message from `source` to `target` is lost."""
        if source in self.sources and target in self.targets:
            return True
        return self.both_ways and source in self.targets and target in self.sources


@dataclass(slots=True)
class VirtualNetwork:
    """Carries messages between addresses. An address is the number of a node."""

    loop: EventLoop
    random: Random
    quality: Quality = field(default_factory=Quality)
    cuts: list[Cut] = field(default_factory=list)
    lost: int = 0
    """Messages that were lost, cuts included."""

    def is_cut(self, source: int, target: int) -> bool:
        """Return True if a partition separates the two, in this direction."""
        return bool(self.cuts) and any(cut.stops(source, target) for cut in self.cuts)

    def send(self, source: int, target: int, deliver: Callable[..., None], *args: Any) -> None:
        """Call `deliver` when the message arrives: never, once, or twice."""
        quality = self.quality
        random = self.random.random
        if self.is_cut(source, target) or (quality.loss and random() < quality.loss):
            self.lost += 1
            return
        self.loop.after(self.delay_ns(), deliver, *args)
        if quality.duplication and random() < quality.duplication:
            self.loop.after(self.delay_ns(), deliver, *args)

    def delay_ns(self) -> int:
        """Return how long the next message travels."""
        quality = self.quality
        extra_ns = quality.delay_ns_mean - quality.delay_ns_min
        return quality.delay_ns_min + int(self.random.expovariate(1.0) * extra_ns)

    def cut_for(self, cut: Cut, lasts_ns: int) -> None:
        """Apply a partition for some time."""
        self.cuts.append(cut)
        self.loop.after(lasts_ns, self.cuts.remove, cut)
