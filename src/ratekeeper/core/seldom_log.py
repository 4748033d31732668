"""A log whose messages clients can cause: each is logged at most once in an interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

# Keys whose last message is remembered; when there are more, all are forgotten.
KEYS_MAX: Final = 1_024


class SeldomLog:
    """Logs a message at most once in `every_s` seconds for each key, and how many it omitted.

    Threads can share it; two that log at the same instant may both succeed.
    """

    def __init__(
        self,
        log: logging.Logger,
        level: int,
        every_s: float = 1.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._level = level
        self._every_s = every_s
        self._now_s = now_s
        self._next_s: dict[str, float] = {}
        self._omitted: dict[str, int] = {}

    def is_due(self, key: str = "") -> bool:
        """Return True if a message would be logged now; otherwise count it as omitted."""
        if self._now_s() >= self._next_s.get(key, 0.0):
            return True
        self._omitted[key] = self._omitted.get(key, 0) + 1
        return False

    def note(
        self, message: str, *values: object, key: str = "", error: BaseException | None = None
    ) -> None:
        """Log a message, unless one with the same key was logged too lately."""
        if not self.is_due(key):
            return
        if len(self._next_s) >= KEYS_MAX:
            self._next_s.clear()
            self._omitted.clear()
        self._next_s[key] = self._now_s() + self._every_s
        if omitted := self._omitted.pop(key, 0):
            message, values = f"{message} (%d more were not logged)", (*values, omitted)
        self._log.log(self._level, message, *values, exc_info=error, stacklevel=2)
