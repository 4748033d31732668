"""Eight threads, one key: exactly the limit is admitted, however they interleave."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from ratekeeper import Limiter

THREADS = 8
CALLS_PER_THREAD = 1_000

# One unit comes back every 36 s, so nothing refills while this runs.
limiter = Limiter("100/hour")


def hammer(_: int) -> int:
    return sum(bool(limiter.check("user:42")) for _ in range(CALLS_PER_THREAD))


with ThreadPoolExecutor(THREADS) as pool:
    admitted = sum(pool.map(hammer, range(THREADS)))

print(f"{THREADS * CALLS_PER_THREAD} checks from {THREADS} threads: {admitted} admitted")
sys.exit(0 if admitted == 100 else "the limit is 100")
