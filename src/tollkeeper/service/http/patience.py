"""How long a body may take to arrive: who sends half of one must not keep a place for ever.

A timer for each request would cost a tenth of what a check costs, and nearly no request needs it.
Instead, whoever waits for a body is on a list, and the list is looked at once a second: two entries
in a dict are all that a request pays. Who has been on it for too long is interrupted, and answers
408 in place of what it waited for.

A worker answers only so many at a time. Where many wait, it may be that somebody takes all places
with bodies that never come; then there is far less patience, and the others have their turn soon.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

BODY_SECONDS_MAX: Final = 10.0
LOOK_SECONDS: Final = 1.0
# With more than this, the places of a worker (`BACKPRESSURE`) may soon be gone.
CROWD: Final = 256
CROWDED_SECONDS_MAX: Final = 1.0

_Task = asyncio.Task[Any]


class Patience:
    """Who waits for a body, and since when. For one event loop."""

    def __init__(self, seconds_max: float = BODY_SECONDS_MAX) -> None:
        self.waiting: dict[_Task | None, float] = {}
        """By task: the time on `now_s` when it began."""
        self.now_s = 0.0
        """Seconds since `keep_looking` began, in steps."""
        self._seconds_max = seconds_max
        self._interrupted: set[_Task] = set()

    async def keep_looking(self, pause_s: float = LOOK_SECONDS) -> None:
        """Interrupt those who have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(pause_s)
            self.look(pause_s)

    def look(self, passed_s: float) -> None:
        """So much time has passed: whose patience is at an end?"""
        self.now_s += passed_s
        seconds_max = self._seconds_max
        if len(self.waiting) > CROWD:
            seconds_max = min(seconds_max, CROWDED_SECONDS_MAX)
        for task, since_s in list(self.waiting.items()):
            if task is not None and self.now_s - since_s > seconds_max:
                del self.waiting[task]
                self._interrupted.add(task)
                task.cancel()

    def ended(self) -> bool:
        """Was the current task interrupted here, and not by somebody else? Asked once."""
        task = asyncio.current_task()
        if task is None or task not in self._interrupted:
            return False
        self._interrupted.discard(task)
        task.uncancel()
        return True
