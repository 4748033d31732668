"""Clocks that misbehave like real ones."""

from __future__ import annotations

from ratekeeper.testing import ManualClock


class TickingClock(ManualClock):
    """A clock that advances by a microsecond at each reading."""

    def now_ns(self) -> int:
        self.advance_ns(1_000)
        return super().now_ns()


class LateClock(ManualClock):
    """A clock whose sleeps end a millisecond late."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds + 0.001)

    async def sleep_async(self, seconds: float) -> None:
        await super().sleep_async(seconds + 0.001)


class ShortClock(ManualClock):
    """A clock whose sleeps end halfway if they are longer than a second."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds / 2 if seconds > 1 else seconds)

    async def sleep_async(self, seconds: float) -> None:
        await super().sleep_async(seconds / 2 if seconds > 1 else seconds)


class SteppedClock(ManualClock):
    """A clock that returns only whole steps, as the clock of a store may.

    It keeps its exact time, so that after `advance_ns(wait_ns - 1)` it returns the step before
    the end of a wait of whole steps, and after a further `advance_ns(1)` the end.
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
        """Return a length of time rounded up to whole steps."""
        return -(-nanoseconds // self._step_ns) * self._step_ns
