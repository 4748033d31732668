"""Renewal of slots: a request that takes long keeps its slot of a limit of requests in flight.

A slot ends by itself after the limit's longest time, so that a process that died holds none. A
living request renews its slots each time a third of that has passed: on an event loop by a timer,
and for threads by one thread of the process, which starts with the first renewal. A request that
takes less than a third of the longest time costs a timer, or a place in a heap.

If a renewal fails, it is tried again after another third. A slot that is lost is logged and counted
(`RuleCounts.renewals_failed`); the request goes on. `Limiter.renew` raises SlotLost instead.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from ratekeeper.core.errors import RatekeeperError, SlotLost
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import IN_FLIGHT, Decision
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.core.steps import Steps, run, run_async
from ratekeeper.limiter.charges import slots_in

RENEWALS_IN_TIME: Final = 3
_failures: Final = SeldomLog(logging.getLogger("ratekeeper"), logging.WARNING, 60.0)

Renew = Callable[[Decision], Steps[None]]


class Renewal:
    """The renewal of the slots of one decision, until it is stopped."""

    __slots__ = ("_decision", "_renew", "interval_s", "stopped")

    def __init__(self, renew: Renew, decision: Decision) -> None:
        """`decision` has slots; `renew` returns the steps that renew them."""
        self._renew = renew
        self._decision = decision
        windows = [
            limit.window
            for check in slots_in(decision)
            for limit in check.counter.limits
            if limit.algorithm == IN_FLIGHT
        ]
        self.interval_s = min(windows) / RENEWALS_IN_TIME
        self.stopped = False

    def stop(self) -> None:
        """Renew no more."""
        self.stopped = True

    def renewing(self) -> Steps[bool]:
        """Renew once. Return True if the renewal goes on."""
        try:
            yield from self._renew(self._decision)
        except RatekeeperError as error:
            if not self.stopped:
                _failures.note("a slot was not renewed: %s", error, key=type(error).__name__)
                self.stopped = isinstance(error, SlotLost)
        return not self.stopped


class LoopRenewal(Renewal):
    """A renewal by the timers of the running event loop."""

    __slots__ = ("_loop", "_task", "_timer")

    def __init__(self, renew: Renew, decision: Decision) -> None:
        super().__init__(renew, decision)
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(self.interval_s, self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        if await run_async(self.renewing()):
            self._timer = self._loop.call_later(self.interval_s, self._start)

    def stop(self) -> None:
        super().stop()
        self._timer.cancel()


class _Thread:
    """The thread that renews for the other threads of the process."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Renewal]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition(fork_safe(threading.Lock()))
        self._thread: threading.Thread | None = None

    def add(self, renewal: Renewal) -> None:
        """Renew for the first time when a third of the time has passed."""
        with self._changed:
            self._push(renewal)
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._thread = threading.Thread(
                    target=self._run, name="ratekeeper renewal", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _push(self, renewal: Renewal) -> None:
        due_s = time.monotonic() + renewal.interval_s
        heapq.heappush(self._due, (due_s, next(self._numbers), renewal))

    def _run(self) -> None:
        while True:
            renewal = self._next()
            if not renewal.stopped and run(renewal.renewing()):
                with self._changed:
                    self._push(renewal)

    def _next(self) -> Renewal:
        with self._changed:
            while True:
                while self._due and self._due[0][2].stopped:
                    heapq.heappop(self._due)
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)


_thread: Final = _Thread()


def renewed_in_thread(renew: Renew, decision: Decision) -> Renewal | None:
    """Renew the slots of a decision in the background; None if it has none."""
    if not slots_in(decision):
        return None
    renewal = Renewal(renew, decision)
    _thread.add(renewal)
    return renewal


def renewed_on_loop(renew: Renew, decision: Decision) -> Renewal | None:
    """Renew the slots of a decision on the running event loop; None if it has none."""
    return LoopRenewal(renew, decision) if slots_in(decision) else None
