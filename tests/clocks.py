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


class SteppedClock(ManualClock):
    """A clock that shows whole steps only, as the clock of a store may.

    What it was advanced by is kept exactly, so that `advance_ns(wait_ns - 1)` shows the step before
    the end of a wait of whole steps, and `advance_ns(1)` after it shows the end.
    """

    __slots__ = ("_step_ns",)

    def __init__(self, start: float = 0) -> None:
        super().__init__(start)
        self._step_ns = 1

    @property
    def step_ns(self) -> int:
        """How far one shown time is from the next. Setting it moves the clock back to a step."""
        return self._step_ns

    @step_ns.setter
    def step_ns(self, step_ns: int) -> None:
        self._step_ns = step_ns
        self.advance_ns(-(self._now_ns % step_ns))

    def now_ns(self) -> int:
        now_ns = super().now_ns()
        return now_ns - now_ns % self._step_ns

    def steps_up_ns(self, nanoseconds: int) -> int:
        """A length of time in whole steps, rounded up."""
        return -(-nanoseconds // self._step_ns) * self._step_ns
