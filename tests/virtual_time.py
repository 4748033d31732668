"""An event loop whose time passes only while every task waits, so that tests of waiting are exact.

Nothing sleeps: when no task can go on, the time moves to the next timer. If there is no timer
either, nobody can ever go on, and the loop raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from ratekeeper.core.clock import NS_PER_SECOND, seconds_from_ns

T = TypeVar("T")


class Stuck(AssertionError):
    """All tasks wait for one another."""


class _Selector(selectors.DefaultSelector):
    """Moves the time of its loop instead of blocking."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Stuck("no task can go on, and no timer is set")
            self.loop.pass_time(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a time of its own, which begins at 0."""

    def __init__(self) -> None:
        self.now_ns = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_ns / NS_PER_SECOND

    def pass_time(self, seconds: float) -> None:
        """Move the time, to the nearest nanosecond."""
        self.now_ns += round(seconds * NS_PER_SECOND)


class VirtualClock:
    """The clock of a limiter whose tasks run in a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return self._loop.now_ns

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError("tasks do not block")

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_in(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, and close the loop."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def sleep_until(loop: VirtualLoop, at_ns: int) -> None:
    """Sleep until a time of the loop."""
    await asyncio.sleep(seconds_from_ns(max(at_ns - loop.now_ns, 0)))
