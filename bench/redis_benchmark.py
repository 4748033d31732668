"""redis-benchmark on the script that a check runs: what the server gives to a client made of C.

It sends the arguments of a check, for the same keys at random. One thing it cannot: an argument
with a zero byte in it, as most gates have (the limits as the script reads them), is cut there. So
the script gets one line in front that puts the gate in its place, and the argument has other bytes
for the zeros: as much is sent and read, and the line's cost was not to be seen, 0.4 % between
medians of 15 runs with a gate that happens to have no zeros.

256 checks under way at a time on two connections were its best of eleven ways from 1 × 16 to
256 × 1, by 1 to 25 % (with no pipelining it reaches less than half). One thread, as the default.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tests.redis_servers import Single
from tests.redis_servers.server import program_path

from bench.redis_engines import Rates, our_limits
from bench.redis_measure import Sample
from tollkeeper.decide.stores.redis.codec import encode_limits
from tollkeeper.decide.stores.redis.scripts import CHECK

CLIENTS: Final = 2
PIPELINE: Final = 128


class RedisBenchmark:
    """Takes its turn among the engines, with a check under so many limits."""

    name = f"redis-benchmark -c {CLIENTS} -P {PIPELINE}"
    connections = CLIENTS

    def __init__(self, server: Single, rates: Rates, keys: int, requests: int) -> None:
        gate = encode_limits(our_limits(rates), rule="")
        literal = "".join(f"\\{byte:03}" for byte in gate)
        sha = server.admin.script_load(f"ARGV[1] = '{literal}'\n{CHECK.text.decode()}")
        self._command: list[str | bytes] = [
            program_path("redis-benchmark", "redis-tools"),
            *("-h", server.address[0], "-p", str(server.port)),
            *("-c", str(CLIENTS), "-P", str(PIPELINE)),
            *("-n", str(requests), "-r", str(keys), "--csv"),
            *("EVALSHA", sha, "1", "tk:{user:__rand_int__}", gate.replace(b"\0", b"\1"), "1"),
        ]

    async def run(self) -> Sample:
        """One run, by its own account: requests a second, and p50 and p99 of the requests."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await process.communicate()
        if process.returncode or errors:
            raise RuntimeError(f"redis-benchmark failed: {errors.decode(errors='replace')}")
        # Columns: test, rps, avg, min, p50, p95, p99, max. The test is the command, with the bytes
        # of the gate in it, of which some may be newlines: so the others are counted from the end.
        columns = output.decode("ascii", errors="replace").rstrip('"\n').split('","')
        rate, _, _, p50_ms, _, p99_ms, _ = map(float, columns[-7:])
        return Sample(rate, p50_us=1e3 * p50_ms, p99_us=1e3 * p99_ms)
