"""A gate that keeps the process from forking while a thread may hold a process-wide lock.

A lock that a thread holds during a fork stays locked in the child, where that thread does not
exist: the first thread that needs it there waits for ever. Python's import locks and the locks
inside SQLite (around its malloc) are such locks. A server that loads an application and then forks
its workers may fork while one of our threads holds such a lock.

    with forks.gate:
        connection.execute(…)

A fork waits until no thread is inside the gate, for WAIT_S_MAX at most. A thread that arrives
meanwhile waits for the fork. Threads do not wait for each other.
"""

from __future__ import annotations

import os
import threading
from typing import Final

# A query that waits for another process may take longer, but holds no process-wide lock meanwhile.
WAIT_S_MAX: Final = 1.0


class ForkGate:
    """Counts the threads inside, and makes a fork wait for them."""

    def __init__(self) -> None:
        self.in_child()

    def in_child(self) -> None:
        """Forget the threads, which do not exist in a child, and the lock that one may hold."""
        self._changed = threading.Condition()
        self._inside = 0
        self._is_forking = False
        self._depth = threading.local()

    def __enter__(self) -> None:
        depth: int = getattr(self._depth, "value", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_forking)
                self._inside += 1
        self._depth.value = depth + 1

    def __exit__(self, *_: object) -> None:
        depth: int = getattr(self._depth, "value", 0)
        if not depth:
            return  # this process was forked inside the gate
        self._depth.value = depth - 1
        if depth == 1:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def before(self) -> None:
        """Let no thread enter, and wait until all have left."""
        with self._changed:
            self._is_forking = True
            own = 1 if getattr(self._depth, "value", 0) else 0
            self._changed.wait_for(lambda: self._inside <= own, WAIT_S_MAX)

    def in_parent(self) -> None:
        """Let threads enter again."""
        with self._changed:
            self._is_forking = False
            self._changed.notify_all()


gate: Final = ForkGate()
os.register_at_fork(
    before=gate.before, after_in_parent=gate.in_parent, after_in_child=gate.in_child
)
