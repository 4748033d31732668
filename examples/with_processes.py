"""Four processes, one file, one key: exactly the limit is admitted by all of them together."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time

from ratekeeper import Limiter, StoreUnavailable

PROCESSES = 4
CALLS_PER_PROCESS = 2_000
# One unit comes back every 86 s, so nothing refills while this runs.
RATE = "1000/day"


def hammer(uri: str) -> int:
    admitted = 0
    with Limiter(RATE, store=uri) as limiter:
        for _ in range(CALLS_PER_PROCESS):
            admitted += bool(limiter.check("user:42"))
            time.sleep(0.000_1)  # so that the first process does not take it all
    return admitted


def main() -> int | str:
    # In production a folder of the service's own, such as /run/myservice.
    with tempfile.TemporaryDirectory() as folder:
        uri = f"shared://{folder}/api.limits?capacity=1000"
        try:
            Limiter(RATE, store=uri).close()
        except StoreUnavailable as error:
            print(error)  # installed without a C compiler
            return 0
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            admitted = pool.map(hammer, [uri] * PROCESSES)
    checks = PROCESSES * CALLS_PER_PROCESS
    print(
        f"{checks} checks from {PROCESSES} processes: {admitted} admitted, {sum(admitted)} in all"
    )
    return 0 if sum(admitted) == 1_000 else "the limit is 1000"


if __name__ == "__main__":
    sys.exit(main())
