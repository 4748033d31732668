"""How often a server that cannot be reached is tried again.

While it is down, a call must cost next to nothing: it fails at once, and only now and then one of
them tries to connect.
"""

from __future__ import annotations

from random import random
from typing import Final

FIRST_NS: Final = 10_000_000
LONGEST_NS: Final = 1_000_000_000


class Backoff:
    """After a failure nobody connects for a while, twice as long each time; then one does.

    Not locked: the wire that owns it does that. Times are of a monotonic clock.
    """

    __slots__ = ("_failed_ns", "_pause_ns", "_until_ns", "reason")

    def __init__(self) -> None:
        self._failed_ns = 0
        self._pause_ns = 0
        self._until_ns = 0
        self.reason = ""

    def may_try(self, now_ns: int) -> bool:
        """Is it time to connect? After a failure this says yes to one, and no to the others."""
        if not self._pause_ns:
            return True
        if now_ns < self._until_ns:
            return False
        self._until_ns = now_ns + self._pause_ns
        return True

    def failed_since(self, began_ns: int) -> bool:
        """Has another one failed since this one was let try?"""
        return bool(self._pause_ns) and self._failed_ns >= began_ns

    def failed(self, began_ns: int, now_ns: int, reason: str) -> None:
        """It did not work. A random part keeps a fleet from knocking all at once.

        A hundred threads that find a server dead together are one failure, not a hundred: else
        they would wait for the longest pause after an outage of a moment.
        """
        if self.failed_since(began_ns):
            return
        self.reason = reason
        self._failed_ns = now_ns
        self._pause_ns = min(max(2 * self._pause_ns, FIRST_NS), LONGEST_NS)
        share = 0.5 + random() / 2  # noqa: S311 - no secret hangs on it
        self._until_ns = now_ns + int(self._pause_ns * share)

    def succeeded(self) -> None:
        """It is back."""
        self._pause_ns = 0
