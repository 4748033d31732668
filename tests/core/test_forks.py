"""A fork waits for threads inside of the gate and for locks; neither hangs a child."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from ratekeeper.core import forks
from ratekeeper.core.forks import ForkGate, after_fork, fork_safe
from tests.redis_servers.waiting import until


def test_a_fork_waits_for_the_threads_inside() -> None:
    """It begins after the last of them has left, also if they are inside several times."""
    gate, events, leave = ForkGate(), list[str](), threading.Event()
    entered = threading.Barrier(3)

    def work() -> None:
        with gate, gate:
            entered.wait(60)
            leave.wait(60)
            events.append("left")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait(60)
    fork = threading.Thread(target=lambda: (gate.before(), events.append("forks")))
    fork.start()
    until(lambda: gate._is_forking, "the fork waits", 60)
    leave.set()
    for thread in (*threads, fork):
        thread.join(60)
    assert events == ["left", "left", "forks"]


def test_a_thread_waits_for_a_fork() -> None:
    """It enters when the fork is over, in the parent. A fork that follows finds it outside."""
    gate, events, arrived = ForkGate(), list[str](), threading.Event()
    gate.before()

    def work() -> None:
        arrived.set()
        with gate:
            events.append("entered")

    thread = threading.Thread(target=work)
    thread.start()
    assert arrived.wait(60)
    events.append("forked")
    gate.in_parent()
    thread.join(60)
    assert events == ["forked", "entered"]
    gate.before()
    gate.in_parent()


def test_a_child_has_no_threads_inside() -> None:
    """The counts of the parent mean nothing there, also if the thread that forks was inside."""
    gate = ForkGate()
    with gate:
        gate.before()
        gate.in_child()
    with gate:
        assert gate._inside == 1
    assert gate._inside == 0


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the thread does not release it in time; in the parent it stays locked."""
    monkeypatch.setattr(forks, "WAIT_S_MAX", 0.0)
    lock, taken, leave = fork_safe(kind()), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not lock.acquire(blocking=False)
    leave.set()
    holder.join(60)
    assert lock.acquire(blocking=False)


def test_a_fork_waits_for_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the child never finds half of a change."""
    monkeypatch.setattr(forks, "WAIT_S_MAX", 60.0)
    lock, events = fork_safe(threading.Lock()), list[str]()
    taken, leave = threading.Event(), threading.Event()

    def change() -> None:
        with lock:
            taken.set()
            leave.wait(60)
            events.append("changed")

    def fork() -> None:
        forks._locks.before()
        events.append("forked")
        forks._locks.in_parent()

    changing, forking = threading.Thread(target=change), threading.Thread(target=fork)
    changing.start()
    assert taken.wait(60)
    forking.start()
    leave.set()
    changing.join(60)
    forking.join(60)
    assert events == ["changed", "forked"]


class Forked:
    """An object that says so when its process is a forked child."""

    def __init__(self, name: str, said: list[str], lock: threading.Lock) -> None:
        self._name, self._said, self._lock = name, said, lock
        after_fork(self.forked)

    def forked(self) -> None:
        """Say that this is a child, if the lock is free."""
        with self._lock:
            self._said.append(self._name)
        if self._name == "failing":
            raise ValueError("a defect")


def test_objects_begin_anew_in_a_child(caplog: pytest.LogCaptureFixture) -> None:
    """In order, with free locks. One that fails stops no other; one that is gone is not kept."""
    caplog.set_level(logging.CRITICAL, "ratekeeper.forks")
    lock, said = fork_safe(threading.Lock()), list[str]()
    kept = [Forked(name, said, lock) for name in ("first", "failing", "last")]
    Forked("gone", said, lock)
    child = os.fork()
    if not child:
        os._exit(0 if said == ["first", "failing", "last"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert said == []
    assert kept
