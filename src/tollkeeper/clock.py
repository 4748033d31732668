"""Clocks. Time is a whole number of nanoseconds since the Unix epoch, and it never steps.

The system clock is the wall clock as it stood when the process started, carried on by a clock
that counts from boot. Reading the wall clock each time would be simpler and wrong: when an
operator or NTP sets it back by an hour, every key touched before would stay frozen for that
hour, because a limiter must never let time rewind. A clock that cannot step has no such hour.
It still follows the wall clock's rate (the kernel disciplines both), so windows stay aligned.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Protocol

from tollkeeper import override

NS_PER_SECOND = 1_000_000_000

# Counts through a suspend where the platform can (Linux); elsewhere the monotonic clock.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_boot_ns = time.clock_gettime_ns
EPOCH_OFFSET_NS = time.time_ns() - _boot_ns(_BOOT_CLOCK)


class Clock(Protocol):
    """What a limiter needs of time: to read it, and to wait."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch; never less than an earlier answer."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait, blocking this thread."""
        ...

    async def sleep_async(self, seconds: float) -> None:
        """Wait, leaving the event loop free."""
        ...


class SystemClock:
    """Real time, unless a test has put another clock in its place (`testing.use_clock`)."""

    __slots__ = ()

    def now_ns(self) -> int:
        if override.clock is not None:
            return override.clock.now_ns()
        return _boot_ns(_BOOT_CLOCK) + EPOCH_OFFSET_NS

    def sleep(self, seconds: float) -> None:
        (time if override.clock is None else override.clock).sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        if override.clock is not None:
            await override.clock.sleep_async(seconds)
        else:
            await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to, so that tests of waiting are instant.

    >>> clock = ManualClock()
    >>> clock.advance(1.5)
    >>> clock.now_ns()
    1500000000

    `sleep` advances the clock instead of waiting. Starts at 0 unless `start` (seconds) says
    otherwise. `advance` takes negative seconds too: a test may want a clock that steps back.
    """

    __slots__ = ("_lock", "_now_ns")

    def __init__(self, start: float = 0) -> None:
        self._now_ns = ns_from_seconds(start)
        self._lock = threading.Lock()

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move by `seconds`, to the nearest nanosecond."""
        self.advance_ns(ns_from_seconds(seconds))

    def advance_ns(self, nanoseconds: int) -> None:
        """Move by a whole number of nanoseconds."""
        with self._lock:
            self._now_ns += nanoseconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


def ns_from_seconds(seconds: float) -> int:
    """The nearest whole nanosecond."""
    if isinstance(seconds, int):  # exact at any size; a float product is not
        return seconds * NS_PER_SECOND
    return round(seconds * NS_PER_SECOND)


def seconds_from_ns(nanoseconds: int) -> float:
    """Seconds that `ns_from_seconds` turns back into at least `nanoseconds`.

    A float has 53 bits, so beyond some 26 days a plain division may land a few nanoseconds
    short, and a caller who waited that long would be denied again. Rounds up, never down.
    """
    seconds = nanoseconds / NS_PER_SECOND
    while round(seconds * NS_PER_SECOND) < nanoseconds:
        seconds += abs(seconds) * 2.0**-52
    return seconds
