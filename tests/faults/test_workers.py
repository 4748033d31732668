"""Workers of a real service are killed under load."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.faults.load import Key, Record, document, now_ns
from tests.faults.service_load import ServiceAskers
from tests.faults.telling import verify
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess
from tollkeeper.model import ALGORITHM_NAMES

WORKERS = 4
KEYS = tuple(Key("closed", algorithm) for algorithm in ALGORITHM_NAMES)
REPLACED_S_MAX = 30.0


async def test_workers_are_killed() -> None:
    """On a file that all share, SIGKILL at any moment loses nothing that was counted."""
    record = Record()
    with ServiceProcess(document(), workers=WORKERS) as service:
        askers = ServiceAskers(service, record, KEYS)
        try:
            for _ in range(3):
                await asyncio.sleep(0.7)
                assert service.worker_pids(), service.log_end()
                os.kill(service.worker_pids()[0], signal.SIGKILL)
            healed_ns = now_ns()
            await asyncio.to_thread(
                until,
                lambda: len(service.worker_pids()) == WORKERS and service.is_listening(),
                "all workers are there again",
                REPLACED_S_MAX,
                service.log_end,
            )
            back_s = (now_ns() - healed_ns) / 1e9
            await asyncio.sleep(0.7)
        finally:
            await asyncio.to_thread(askers.stop)
    verify(
        record,
        f"3 of {WORKERS} workers killed: {record.lost} requests cut, all there again after "
        f"{back_s:.1f} s",
    )
    late = [each for each in record.noted if each.sent_ns > healed_ns and each.allowed]
    assert late, "nobody was admitted afterwards"
