"""What happens in a fork: a gate for process-wide locks, free locks, and actions in the child.

A lock that a thread holds during a fork stays locked in the child, where that thread does not
exist: the first thread that needs it there waits for ever. Python's import locks and the locks
inside SQLite (around its malloc) are such locks. A server that loads an application and then forks
its workers may fork while one of our threads holds such a lock.

    with forks.gate:
        connection.execute(…)

A fork waits until no thread is inside the gate, for WAIT_S_MAX at most. A thread that arrives
meanwhile waits for the fork. Threads do not wait for each other.

The locks of our own objects are made with `fork_safe(threading.Lock())`, which costs nothing when
they are taken. A fork takes all of them first, so no other thread is between two steps of a change,
and each is free in the child. If a thread holds one for longer than WAIT_S_MAX, the fork goes on
without it: then the child may find half of that change, but it does not hang.

An object that must begin anew in a child, because its threads or connections are the parent's,
calls `after_fork(self.forked)`. The actions run when all locks are free, in the order in which they
were registered, so an object comes after those that it was made from.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable
from inspect import ismethod
from itertools import count
from typing import Any, Final, TypeVar

# A query that waits for another process may take longer, but holds no process-wide lock meanwhile.
WAIT_S_MAX: Final = 1.0

log: Final = logging.getLogger("ratekeeper.forks")


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


L = TypeVar("L", bound=Any)
_RETRY_S: Final = 0.001


class _ForkSafeLocks:
    """The locks that are free in a forked child."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = count()
        self._held = threading.local()

    def add(self, lock: Any) -> None:
        self._locks[next(self._numbers)] = lock

    def before(self) -> None:
        """Take all locks, or none: two forks, or a thread that takes two locks, cannot deadlock."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        self._held.locks = ()
        while True:
            held: list[Any] = []
            for lock in self._all():
                if not lock.acquire(blocking=False):
                    break
                held.append(lock)
            else:
                self._held.locks = held
                return
            for lock in held:
                lock.release()
            if time.monotonic() >= deadline_s:
                return
            time.sleep(_RETRY_S)

    def in_parent(self) -> None:
        """Release the locks."""
        for lock in self._held.locks:
            lock.release()
        self._held.locks = ()

    def in_child(self) -> None:
        """Free all locks, also those that another thread of the parent held."""
        self._held = threading.local()
        for lock in self._all():
            lock._at_fork_reinit()  # noqa: SLF001 - as the standard library frees its own locks

    def _all(self) -> list[Any]:
        return [lock for each in self._locks.valuerefs() if (lock := each()) is not None]


_locks: Final = _ForkSafeLocks()


def fork_safe(lock: L) -> L:
    """Return the Lock or RLock itself; from now on it is free in a forked child."""
    _locks.add(lock)
    return lock


gate: Final = ForkGate()

# In order: what to do in a child, by the object that it is done to. Objects are held weakly.
_actions: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], object]]] = (
    weakref.WeakKeyDictionary()
)


def after_fork(action: Callable[[], object]) -> None:
    """Call a method in each forked child, as long as its object exists; or a module's function.

    An object has one such method.
    """
    owner, function = (
        (action.__self__, action.__func__) if ismethod(action) else (action, operator.call)
    )
    _actions[owner] = function


def _before() -> None:
    gate.before()  # first: the threads that leave it may take locks
    _locks.before()


def _in_parent() -> None:
    _locks.in_parent()
    gate.in_parent()


def _in_child() -> None:
    _locks.in_child()
    gate.in_child()
    for owner, function in list(_actions.items()):
        try:
            function(owner)
        except Exception:  # the other objects still need theirs
            log.exception("fork: %s failed in the child", owner)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
