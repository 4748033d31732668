"""Clocks that misbehave in the ways real ones do."""

from __future__ import annotations

from tollkeeper.testing import ManualClock


class TickingClock(ManualClock):
    """Time passes between two readings: a microsecond for each."""

    def now_ns(self) -> int:
        self.advance_ns(1_000)
        return super().now_ns()


class LateClock(ManualClock):
    """Every sleep ends a millisecond late."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds + 0.001)

    async def sleep_async(self, seconds: float) -> None:
        await super().sleep_async(seconds + 0.001)


class ShortClock(ManualClock):
    """Sleeps longer than a second end halfway."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds / 2 if seconds > 1 else seconds)

    async def sleep_async(self, seconds: float) -> None:
        await super().sleep_async(seconds / 2 if seconds > 1 else seconds)
