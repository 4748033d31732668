"""Wait for a condition of a real server, with a timeout and a clear error."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

Found = TypeVar("Found")

# Short compared with every wait here: a start takes 20 ms, a promotion seconds. A condition that
# asks a service costs both processes time, so the pauses grow with the time waited so far.
_PAUSE_SECONDS = 0.003
_PAUSE_SECONDS_MAX = 0.03
_PAUSES_PER_WAIT = 30
_STOPPED_SECONDS_MAX = 20.0
# This event is never set. Waiting for it is the pause, which a signal still interrupts.
_NEVER = Event()


class NotInTime(AssertionError):
    """A condition did not become true in time; the message names it and the state seen instead."""


def await_stopped(pid: int) -> None:
    """Wait until a process that got SIGSTOP has stopped or is gone; it may run on for a moment."""

    def stands_still() -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in "TtZX"

    until(stands_still, f"process {pid} stands still", _STOPPED_SECONDS_MAX)


def until(
    condition: Callable[[], Found | None],
    what: str,
    timeout_seconds: float,
    seen: Callable[[], object] = lambda: "",
) -> Found:
    """Call `condition` until it returns something true; return that. It runs at least once.

    `what` describes the condition and `seen` returns the state seen instead, both for the error.
    """
    began = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - began
        if waited >= timeout_seconds:
            raise NotInTime(f"waited {timeout_seconds:g} s for this: {what}. {seen()}".rstrip())
        _NEVER.wait(min(max(waited / _PAUSES_PER_WAIT, _PAUSE_SECONDS), _PAUSE_SECONDS_MAX))
    return found
