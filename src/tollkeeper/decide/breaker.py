"""The breaker: a server that keeps failing is left alone, and probed now and then.

Waiting for a server that does not answer costs every request its deadline, and the server, when it
comes back, all of them at once. So after enough failures the breaker opens: calls fail at once,
and cost nothing. It closes by probes, which are calls that nobody waits for.

    closed      calls go through. Failures, and from the first of them on successes too, are
                counted over a window. Enough failures, which are a large enough share: open
    open        calls fail at once. After a while a probe. It fails: open for twice as long
    half open   a probe succeeded. Calls still fail at once; enough probes in a row: closed

Calls that fail together are one moment: a pause of the server, a slow start, one lost connection
fails a thousand of them at once and says no more than a single one. It takes failures at several
moments to open. The next moment is when a call fails that began after this one was first seen.

A success before the first failure is not counted, so a healthy server costs a test of `stirred`
and nothing else. It also means that a server that dies opens the breaker just as soon after a
million successes as after none.

Pure: every method is told the time, of any clock that does not go back, and nothing is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import random
from typing import Final, Literal

State = Literal["closed", "open", "half_open"]

# The window is counted in so many parts, and moves on by one of them.
PARTS: Final = 10
# Fewer moments than this never open it, however many calls failed in them.
MOMENTS_MIN: Final = 3
# How long it stays open is this much longer or shorter, so that a fleet does not probe in step.
JITTER: Final = 0.2
# After a probe that succeeded the next follows in this part of the first open time.
GAP_PARTS: Final = 10


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When it opens, for how long, and what closes it."""

    window_ns: int = 10_000_000_000
    failures: int = 5
    share: float = 0.5
    """Of the calls in the window, those that must have failed."""
    open_ns: int = 1_000_000_000
    open_max_ns: int = 15_000_000_000
    probes: int = 2
    """So many must succeed in a row to close it."""


@dataclass(frozen=True, slots=True)
class BreakerState:
    """How one server's breaker is."""

    address: str
    state: State
    since_s: float
    """Seconds since it has been so."""
    failures: int
    """Counted in the window; when it is open, those that opened it."""
    opened_times: int
    next_probe_s: float | None
    """Seconds until the next probe; None while it is closed."""
    reason: str
    """What failed last; empty if nothing has."""
    failed_calls: int = 0
    """All calls that failed so far, probes not counted."""


@dataclass(slots=True)
class _Part:
    """What happened in one part of the window."""

    number: int
    failures: int = 0
    successes: int = 0
    moments: int = 0


class Breaker:
    """One server's. Not locked: whoever shares it does that."""

    __slots__ = (
        "_moment_ns",
        "_open_ns",
        "_parts",
        "_probed",
        "_random",
        "_settings",
        "failures",
        "opened_times",
        "probe_ns",
        "since_ns",
        "state",
        "stirred",
    )

    def __init__(
        self, settings: BreakerSettings, now_ns: int = 0, random: Callable[[], float] = random
    ) -> None:
        self._settings = settings
        self._random = random
        self.opened_times = 0
        self.probe_ns = 0
        """When to probe, while it is not closed."""
        self._close(now_ns)

    def _close(self, now_ns: int) -> None:
        self.state: State = "closed"
        self.since_ns = now_ns
        self.failures = 0
        # Is there anything to count? False while it is closed and nothing has failed.
        self.stirred = False
        self._parts: deque[_Part] = deque(maxlen=PARTS + 1)
        self._moment_ns = -1
        self._open_ns = self._settings.open_ns
        self._probed = 0

    def failed(self, began_ns: int, now_ns: int, count: int = 1) -> bool:
        """So many calls failed now, the last of which began then. Did that open it?"""
        if self.state != "closed" or count <= 0:
            return False
        self.stirred = True
        part = self._part(now_ns)
        part.failures += count
        if began_ns > self._moment_ns:
            self._moment_ns = now_ns
            part.moments += 1
        settings = self._settings
        self.failures = sum(each.failures for each in self._parts)
        calls = self.failures + sum(each.successes for each in self._parts)
        moments = sum(each.moments for each in self._parts)
        if (
            self.failures < settings.failures
            or moments < min(MOMENTS_MIN, settings.failures)
            or self.failures < settings.share * calls
        ):
            return False
        self.state = "open"
        self.since_ns = now_ns
        self.opened_times += 1
        self._probe_after(self._open_ns, now_ns)
        return True

    def succeeded(self, now_ns: int, count: int = 1) -> None:
        """So many calls succeeded. Need not be called while it is not `stirred`."""
        if self.state != "closed" or not self.stirred:
            return
        self._part(now_ns).successes += count
        self.failures = sum(each.failures for each in self._parts)
        if not self.failures:
            self.stirred = False
            self._parts.clear()

    def probe_failed(self, now_ns: int) -> None:
        """Still down: open for twice as long."""
        if self.state == "closed":
            return
        if self.state == "half_open":
            self.state = "open"
            self.since_ns = now_ns
        self._probed = 0
        self._open_ns = min(2 * self._open_ns, self._settings.open_max_ns)
        self._probe_after(self._open_ns, now_ns)

    def probe_succeeded(self, now_ns: int) -> None:
        """It answered. Closed, if that was often enough in a row."""
        if self.state == "closed":
            return
        self._probed += 1
        if self._probed >= self._settings.probes:
            self._close(now_ns)
            return
        if self.state == "open":
            self.state = "half_open"
            self.since_ns = now_ns
        self._probe_after(self._settings.open_ns // GAP_PARTS, now_ns)

    def forget(self, now_ns: int) -> None:
        """Closed, as if nothing had happened: the server is not asked any more, or is another."""
        if self.state != "closed" or self.stirred:
            self._close(now_ns)

    def _probe_after(self, pause_ns: int, now_ns: int) -> None:
        share = 1 - JITTER + 2 * JITTER * self._random()
        self.probe_ns = now_ns + int(pause_ns * share)

    def _part(self, now_ns: int) -> _Part:
        """The part of the window that is now, without those that have left it."""
        parts = self._parts
        number = now_ns * PARTS // self._settings.window_ns
        while parts and parts[0].number <= number - PARTS:
            parts.popleft()
        if not parts or parts[-1].number < number:
            parts.append(_Part(number))
        return parts[-1]
