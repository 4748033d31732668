"""Clocks. Time is a whole number of nanoseconds since the Unix epoch, and it never steps.

The system clock adds the time since boot to the wall clock's value at the start of the process.
Reading the wall clock each time would be simpler and wrong. When an operator or NTP sets it back by
an hour, every key used before would stay frozen for that hour, because a limiter must never let
time rewind. The clock since boot cannot step. It still follows the wall clock's rate (the kernel
disciplines both), so windows stay aligned.
"""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from math import isfinite
from typing import Protocol, cast

from ratekeeper.core import switches
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.forks import fork_safe

NS_PER_SECOND = 1_000_000_000

# On Linux, a clock that includes the time in suspend; elsewhere the monotonic clock.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_boot_ns = time.clock_gettime_ns
EPOCH_OFFSET_NS = time.time_ns() - _boot_ns(_BOOT_CLOCK)


def boot_ns() -> int:
    """Return the nanoseconds since boot, on the clock that all processes of a machine share."""
    return _boot_ns(_BOOT_CLOCK)


class Clock(Protocol):
    """A source of time for a limiter: read it, and wait."""

    def now_ns(self) -> int:
        """Return the nanoseconds since the epoch; never less than an earlier result."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread for some seconds."""
        ...

    async def sleep_async(self, seconds: float) -> None:
        """Wait for some seconds without blocking the event loop."""
        ...


class SystemClock:
    """Real time, unless a test replaced it by another clock (`testing.use_clock`)."""

    __slots__ = ()

    def now_ns(self) -> int:
        if switches.clock is not None:
            return switches.clock.now_ns()
        return _boot_ns(_BOOT_CLOCK) + EPOCH_OFFSET_NS

    def sleep(self, seconds: float) -> None:
        (time if switches.clock is None else switches.clock).sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        if switches.clock is not None:
            await switches.clock.sleep_async(seconds)
        else:
            await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when a test advances it, so that tests of waiting are instant.

    >>> clock = ManualClock()
    >>> clock.advance(1.5)
    >>> clock.now_ns()
    1500000000

    `sleep` advances the clock instead of waiting. The clock starts at `start` seconds, by default
    0. `advance` also takes negative seconds, for tests of a clock that steps back.
    """

    __slots__ = ("_lock", "_now_ns")

    def __init__(self, start: float = 0) -> None:
        self._now_ns = _moment_ns("start", start)
        self._lock = fork_safe(threading.Lock())

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move by `seconds`, to the nearest nanosecond.

        If a clock moves ahead and back again, states that expired in between are gone, with the
        units spent in them. SystemClock never steps, so this cannot happen with it.
        """
        self.advance_ns(_moment_ns("seconds", seconds))

    def advance_ns(self, nanoseconds: int) -> None:
        """Move by some nanoseconds."""
        with self._lock:
            self._now_ns += nanoseconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


def _moment_ns(what: str, seconds: object) -> int:
    """Return any number of seconds, also negative, in nanoseconds."""
    # An int is always finite, and isfinite raises for one of 400 digits.
    number = isinstance(seconds, int) or (isinstance(seconds, float) and isfinite(seconds))
    if isinstance(seconds, bool) or not number:
        raise ConfigError(f"{what}={show(seconds)} is not a number of seconds; try {what}=1.5")
    return ns_from_seconds(cast("float", seconds))


def ns_from_seconds(seconds: float) -> int:
    """Return seconds in nanoseconds, rounded to the nearest.

    >>> ns_from_seconds(1_700_000_000.25)
    1700000000250000000
    """
    # Whole seconds are multiplied as an int: as a float they would lose their last digits.
    whole = int(seconds)
    return whole * NS_PER_SECOND + round((seconds - whole) * NS_PER_SECOND)


def duration_ns(what: str, value: object, ns_max: int, example: str) -> int:
    """Return a caller's length of time in nanoseconds; one above `ns_max` counts as `ns_max`.

    Raises ConfigError if `value` is negative, or neither a number of seconds nor a timedelta.
    """
    ns = -1
    if isinstance(value, timedelta):
        ns = (value // timedelta(microseconds=1)) * 1_000
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value > ns_max // NS_PER_SECOND:
            ns = ns_max
        elif value >= 0:  # NaN is neither
            ns = ns_from_seconds(value)
    if ns < 0:
        raise ConfigError(f"{what}={show(value)} is not a length of time; for example {example}")
    return min(ns, ns_max)


def seconds_from_ns(nanoseconds: int) -> float:
    """Return seconds that `ns_from_seconds` turns back into at least `nanoseconds`.

    A float has 53 bits, so above some 26 days a plain division may be a few nanoseconds short, and
    a caller who waited that long would be denied again. Rounds up, never down.
    """
    seconds = nanoseconds / NS_PER_SECOND
    while ns_from_seconds(seconds) < nanoseconds:
        seconds += abs(seconds) * 2.0**-52
    return seconds


def clock_of(clock: Clock | None) -> Clock:
    """Return the clock to use; raise ConfigError if it has no `now_ns`."""
    if clock is None:
        return SystemClock()
    if not callable(getattr(clock, "now_ns", None)):
        raise ConfigError(
            f"clock={show(clock)} has no now_ns(); "
            f"for example clock=ratekeeper.testing.ManualClock()"
        )
    return clock
