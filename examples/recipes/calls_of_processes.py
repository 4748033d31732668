"""Share the limits of a partner's API between all processes of a machine.

Every process opens the same `shared://` file, and `wait` sleeps until it is the caller's turn. No
server is needed, and a process that is killed leaves nothing behind that blocks the others.

The trap is a limiter in `memory://`: each worker process then has the whole quota for itself.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time

from ratekeeper import Limiter

PROCESSES = 3
LIMITS = "50/second capacity 5; 20/day"  # the pace, and the contract


def work(uri: str) -> list[float]:
    """Call the partner until the day's quota is used up. Return the times of the calls."""
    calls: list[float] = []
    with Limiter(LIMITS, store=uri) as limiter:
        # A wait for the pace takes milliseconds. One for tomorrow's quota is denied at once.
        while limiter.wait("partner", timeout=10):
            calls.append(time.monotonic())  # call the partner here
    return calls


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, spawn.Pool(PROCESSES) as pool:
        # In production a folder of the service's own: shared:///run/myservice/partner.limits
        uri = f"shared://{folder}/partner.limits?capacity=1000"
        started = time.monotonic()
        calls = pool.map(work, [uri] * PROCESSES, chunksize=1)
        naive = pool.map(work, ["memory://"] * PROCESSES, chunksize=1)

    print(f"shared://: {[len(each) for each in calls]}, {sum(map(len, calls))} calls in all")
    assert sum(map(len, calls)) == 20
    # Five calls at once, then one every 20 ms, whichever process makes it.
    times = sorted(at - started for each in calls for at in each)
    assert all(at >= number * 0.020 for number, at in enumerate(times[5:], 1))

    print(f"memory://: {[len(each) for each in naive]}, {sum(map(len, naive))} calls in all")
    assert sum(map(len, naive)) == 20 * PROCESSES


if __name__ == "__main__":
    main()
