"""Waiting for a condition of a real server: bounded, and clear about what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

Found = TypeVar("Found")

# Short beside anything that is waited for here: a start takes 20 ms, a promotion seconds.
_PAUSE_SECONDS = 0.003
_STOPPED_SECONDS_MAX = 20.0
# Nobody sets it: waiting for it is the pause, and a signal still interrupts it.
_NEVER = Event()


class NotInTime(AssertionError):
    """A condition did not come true; the message says which, and what was seen instead."""


def await_stopped(pid: int) -> None:
    """Wait until a process that was sent SIGSTOP stands still, or is gone: it may still run."""

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
    """What `condition` returns once that is true. It is asked at least once.

    `what` is what is waited for and `seen` tells what there was instead, both for the error.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (found := condition()):
        if time.monotonic() >= deadline:
            raise NotInTime(f"waited {timeout_seconds:g} s for this: {what}. {seen()}".rstrip())
        _NEVER.wait(_PAUSE_SECONDS)
    return found
