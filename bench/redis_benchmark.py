"""redis-benchmark runs the script of a check: the throughput of Redis with a client written in C.

It sends the arguments of a check for random keys out of the same set, each a bucket with one state.
redis-benchmark cuts an
argument at a zero byte, and most encoded gates contain one. Therefore, one line is added to the
script, which sets the gate from a literal. The argument has other bytes instead of the zeros, so
the number of bytes sent and parsed is the same. The line has no measurable cost: with a gate
without zeros, the medians of 15 runs differed by 0.4 %.

256 checks in flight on two connections were the best of eleven settings between 1 × 16 and
256 × 1, by 1 to 25 %. Without pipelining, it reaches less than half. It uses one thread by default.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tests.redis_servers import Single
from tests.redis_servers.server import program_path

from bench.redis_engines import Rates, our_limits
from bench.redis_measure import Sample
from ratekeeper.decide.stores.redis.codec import BucketPlaces
from ratekeeper.decide.stores.redis.scripts import COUNTS

CLIENTS: Final = 2
PIPELINE: Final = 128


class RedisBenchmark:
    """redis-benchmark as one of the engines, with a check of these limits."""

    name = f"redis-benchmark -c {CLIENTS} -P {PIPELINE}"
    connections = CLIENTS

    def __init__(self, server: Single, rates: Rates, keys: int, requests: int) -> None:
        _, gate = BucketPlaces(our_limits(rates), rule="", prefix="rk", hash_key="").of("user")
        literal = "".join(f"\\{byte:03}" for byte in gate)
        sha = server.admin.script_load(f"ARGV[1] = '{literal}'\n{COUNTS.text.decode()}")
        self._command: list[str | bytes] = [
            program_path("redis-benchmark", "redis-tools"),
            *("-h", server.address[0], "-p", str(server.port)),
            *("-c", str(CLIENTS), "-P", str(PIPELINE)),
            *("-n", str(requests), "-r", str(keys), "--csv"),
            *("EVALSHA", sha, "1", "rk:{%__rand_int__}", gate.replace(b"\0", b"\1"), "1"),
        ]

    async def run(self) -> Sample:
        """Run it once and return the numbers that it reports."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await process.communicate()
        if process.returncode or errors:
            raise RuntimeError(f"redis-benchmark failed: {errors.decode(errors='replace')}")
        # Columns: test, rps, avg, min, p50, p95, p99, max. The test is the command with the bytes
        # of the gate. Some of these may be newlines, so columns are counted from the end.
        columns = output.decode("ascii", errors="replace").rstrip('"\n').split('","')
        rate, _, _, p50_ms, _, p99_ms, _ = map(float, columns[-7:])
        return Sample(rate, p50_us=1e3 * p50_ms, p99_us=1e3 * p99_ms)
