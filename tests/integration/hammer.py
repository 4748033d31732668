"""Worker processes that hammer one shared file. It runs as a program, so that it can fork safely.

    python -m tests.integration.hammer exact FILE ALGORITHM PROCESSES KEYS LIMIT
    python -m tests.integration.hammer reopening FILE ALGORITHM PROCESSES KEYS LIMIT
    python -m tests.integration.hammer killed FILE ALGORITHM PROCESSES KEYS LIMIT KILLS SEED
    python -m tests.integration.hammer together FILE ALGORITHM PROCESSES KEYS LIMIT KILLS SEED

Each prints one JSON object. All limits are per year, so no units are refilled during a run.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from random import Random

from ratekeeper import Limit, Limiter

YEAR = 365 * 86_400
ROOM = f"capacity=1000&log_bytes={1 << 23}"
# Some 20 segments of the table, so that a call of several keys takes several locks.
LARGE_ROOM = f"capacity=30000&log_bytes={1 << 23}"
TOGETHER_MAX = 6


def open_limiter(path: str, algorithm: str, limit: int, room: str = ROOM) -> Limiter:
    limits = [Limit(limit, per=YEAR, algorithm=algorithm)]  # type: ignore[arg-type]  # from argv
    if algorithm != "fixed_window":  # a second limit that never denies tests all-or-nothing
        limits.append(Limit(10 * limit, per=YEAR, algorithm="fixed_window"))
    return Limiter(limits, store=f"shared://{path}?{room}", on_failure="raise")


class Counts:
    """One counter per worker in memory shared with the parent, which survives the worker.

    A memoryview stores all 8 bytes at once. `struct.pack_into` would write zeros first, and a
    worker killed at that moment would lose its whole count.
    """

    def __init__(self, workers: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * workers)).cast("q")

    def add(self, worker: int, units: int = 1) -> None:
        self._counts[worker] += units

    def total(self) -> int:
        return sum(self._counts)


def start(work: Callable[[], None]) -> int:
    """Fork a worker and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:  # the parent sees only the exit status
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def wait_for(children: list[int]) -> list[int]:
    """Wait for all workers and return their exit statuses."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def exact(path: str, algorithm: str, processes: int, keys: int, limit: int) -> dict[str, object]:
    """Let all workers check every key until it is denied, and count the admitted checks."""
    counts = Counts(processes * keys)
    # Half of the workers inherit this limiter through fork; the others open the file themselves.
    inherited = open_limiter(path, algorithm, limit)

    def work(worker: int) -> None:
        limiter = inherited if worker % 2 else open_limiter(path, algorithm, limit)
        for key in range(keys):
            while limiter.check(f"key-{key}"):
                counts.add(worker * keys + key)

    statuses = wait_for([start(lambda worker=w: work(worker)) for w in range(processes)])
    return {"admitted": counts.total(), "statuses": statuses}


def reopening(
    path: str, algorithm: str, processes: int, keys: int, limit: int
) -> dict[str, object]:
    """Run `exact`, but each worker opens and closes the file every seven checks."""
    counts = Counts(processes)

    def work(worker: int) -> None:
        for key in range(keys):
            spent = False
            while not spent:
                with open_limiter(path, algorithm, limit) as limiter:
                    spent = not all(_spend(limiter, f"key-{key}", counts, worker) for _ in range(7))

    statuses = wait_for([start(lambda worker=w: work(worker)) for w in range(processes)])
    return {"admitted": counts.total(), "statuses": statuses}


def killed(
    path: str, algorithm: str, processes: int, keys: int, limit: int, kills: int, seed: int
) -> dict[str, object]:
    """Run `exact` while random workers are killed and replaced; then read the remaining units."""
    random = Random(seed)
    starts = 0
    over, hold = os.pipe()
    counts = Counts(10_000)
    limiter = open_limiter(path, algorithm, limit)

    def linger() -> None:
        os.close(hold)
        os.read(over, 1)  # returns when all writers have exited

    def work(worker: int) -> None:
        own = open_limiter(path, algorithm, limit) if worker % 2 else limiter
        if worker % 3 == 0:  # its surviving child must not keep its locks
            start(linger)
        os.close(hold)
        names = [f"key-{key}" for key in range(keys)]
        left = True
        while left:
            left = False
            for name in names:
                left = _spend(own, name, counts, worker) or left
        while True:  # the quota is spent; keep competing for the locks
            own.check(names[0])

    children = []
    for _ in range(kills):
        while len(children) < processes:
            children.append(start(lambda worker=starts: work(worker)))
            starts += 1
        time.sleep(random.uniform(0.001, 0.02))  # the interval between kills
        victim = children.pop(random.randrange(len(children)))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
    for child in children:
        os.kill(child, signal.SIGKILL)
    wait_for(children)
    left = [limiter.peek(f"key-{key}").remaining for key in range(keys)]
    os.close(hold)
    return {"admitted": counts.total(), "left": sum(left), "kills": starts}


def together(
    path: str, algorithm: str, processes: int, keys: int, limit: int, kills: int, seed: int
) -> dict[str, object]:
    """Let workers check random keys together, in any order, until most are spent.

    The first `kills` workers are killed while they do, one after the other.
    """
    names = [f"key-{key}" for key in range(keys)]
    counts = Counts(processes + kills)

    def work(worker: int) -> None:
        random = Random(seed + worker)
        own = open_limiter(path, algorithm, limit, LARGE_ROOM)
        denied = 0
        while denied < 50 or worker < kills:
            chosen = random.sample(names, random.randint(2, TOGETHER_MAX))
            if all(result.decision for result in own.evaluate_all([(name, 1) for name in chosen])):
                counts.add(worker, len(chosen))
                denied = 0
            else:
                denied += 1

    children = [start(lambda worker=w: work(worker)) for w in range(processes)]
    for victim in range(kills):
        time.sleep(Random(seed + victim).uniform(0.001, 0.02))  # the interval between kills
        os.kill(children[victim], signal.SIGKILL)
        children.append(start(lambda worker=processes + victim: work(worker)))
    statuses = wait_for(children)
    limiter = open_limiter(path, algorithm, limit, LARGE_ROOM)
    left = [limiter.peek(name).remaining for name in names]
    return {"admitted": counts.total(), "left": left, "statuses": statuses[kills:]}


def _spend(limiter: Limiter, name: str, counts: Counts, worker: int) -> bool:
    decision = limiter.check(name)
    if decision:
        counts.add(worker)
    return bool(decision)


if __name__ == "__main__":
    verb, path, algorithm, *numbers = sys.argv[1:]
    processes, keys, limit = map(int, numbers[:3])
    if verb == "exact":
        result = exact(path, algorithm, processes, keys, limit)
    elif verb == "reopening":
        result = reopening(path, algorithm, processes, keys, limit)
    elif verb == "together":
        result = together(path, algorithm, processes, keys, limit, int(numbers[3]), int(numbers[4]))
    else:
        result = killed(path, algorithm, processes, keys, limit, int(numbers[3]), int(numbers[4]))
    print(json.dumps(result))
