"""A fork waits for threads inside of the gate, and threads for a fork; neither for long."""

from __future__ import annotations

import threading

from ratekeeper.core.forks import ForkGate
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
