"""Worker processes that take and free slots of requests in flight. It runs as a program, to fork.

    python -m tests.integration.slot_hammer held URI PROCESSES ROUNDS
    python -m tests.integration.slot_hammer killed URI PROCESSES KILLS SEED

Each prints one JSON object.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from ratekeeper import Decision, Limiter
from tests.integration.hammer import start, wait_for

SUBJECTS = ("a", "b", "c")
SLOTS = 3
# Longer than a slot is held by a worker that runs, also on a busy machine.
HELD_S = 60
# Of killed workers: the tests wait for it once.
KILLED_S = 1


def limiter_of(uri: str, longest_s: float) -> Limiter:
    return Limiter(f"{SLOTS} at once for {longest_s}s; 1000000/day", store=uri, on_failure="raise")


class Held:
    """How many workers have a slot, and the most that had one at the same time."""

    def __init__(self) -> None:
        self._counts = memoryview(mmap.mmap(-1, 16)).cast("q")
        self._lock = Path(tempfile.mkstemp()[1])

    def add(self, change: int) -> None:
        with self._lock.open("rb") as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            self._counts[0] += change
            self._counts[1] = max(self._counts)

    def close(self) -> int:
        """Return the most."""
        self._lock.unlink()
        return self._counts[1]


def held(uri: str, processes: int, rounds: int) -> dict[str, object]:
    """Let workers take the slots of one subject until they are denied, and free all that they have.

    Each slot is freed twice, which frees nobody else's.
    """
    count = Held()

    def work() -> None:
        limiter = limiter_of(uri, HELD_S)
        own: list[Decision] = []
        for _ in range(rounds):
            decision = limiter.check("one")
            if decision:
                own.append(decision)
                count.add(1)
            while own and not decision:
                count.add(-1)
                freed = own.pop()
                limiter.release(freed)
                limiter.release(freed)
        for each in own:
            count.add(-1)
            limiter.release(each)

    statuses = wait_for([start(work) for _ in range(processes)])
    left = limiter_of(uri, HELD_S).peek("one").remaining
    return {"most": count.close(), "left": left, "statuses": statuses}


def killed(uri: str, processes: int, kills: int, seed: int) -> dict[str, object]:
    """Kill workers that take and free slots, many at once; then wait until no slot is taken."""
    random = Random(seed)
    limiter = limiter_of(uri, KILLED_S)

    def work(own_seed: int) -> None:
        own, taker = Random(own_seed), limiter_of(uri, KILLED_S)
        while True:
            decision = taker.check(own.choice(SUBJECTS))
            if decision and own.random() < 0.5:
                taker.release(decision)
            time.sleep(own.uniform(0, 0.002))  # so that all of them run

    for _ in range(kills // processes):
        seeds = [random.getrandbits(32) for _ in range(processes)]
        children = [start(lambda own=each: work(own)) for each in seeds]
        time.sleep(random.uniform(0.001, 0.1))  # until they are killed
        for child in children:
            os.kill(child, signal.SIGKILL)
        wait_for(children)
    found = [limiter.peek(subject) for subject in SUBJECTS]
    while not all(limiter.peek(subject).remaining == SLOTS for subject in SUBJECTS):
        time.sleep(0.02)  # until the slots have ended
    return {
        "taken": sum(SLOTS - each.remaining for each in found),
        "longest": max(each.reset_after for each in found),
    }


if __name__ == "__main__":
    verb, uri, *numbers = sys.argv[1:]
    run = {"held": held, "killed": killed}[verb]
    print(json.dumps(run(uri, *map(int, numbers))))
