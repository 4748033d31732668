"""Workers of a real service are killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.faults.load import CASES, Key, Record, document, now_ns
from tests.faults.reporting import verify
from tests.faults.service_load import service_load
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess

WORKERS = 4
KEYS = tuple(Key("closed", case) for case in CASES)
KILLS = 4
REPLACED_S_MAX = 30.0


def _started(pid: int) -> int:
    """Return the start time of a process in ticks since boot, or 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _all_there(service: ServiceProcess, killed: int) -> bool:
    alive = service.worker_pids()
    return len(alive) == WORKERS and killed not in alive and service.is_listening()


async def test_workers_are_killed() -> None:
    """With a shared file, SIGKILL of a worker at any moment loses no counts."""
    record = Record()
    with ServiceProcess(document(), workers=WORKERS) as service:
        async with service_load(service, record, KEYS):
            for _ in range(KILLS):
                await asyncio.sleep(0.8)
                alive = service.worker_pids()
                assert alive, service.log_end()
                # Kill the youngest, which replaced the worker killed before.
                killed = max(alive, key=_started)
                os.kill(killed, signal.SIGKILL)
            healed_ns = now_ns()
            await asyncio.to_thread(
                until,
                lambda: _all_there(service, killed),
                "all workers are there again",
                REPLACED_S_MAX,
                service.log_end,
            )
            back_s = (now_ns() - healed_ns) / 1e9
            await asyncio.sleep(0.7)
    verify(
        record,
        f"workers killed {KILLS} times of {WORKERS}: {record.lost} requests cut, all there "
        f"again after {back_s:.1f} s",
    )
    late = [each for each in record.noted if each.sent_ns > healed_ns and each.allowed]
    assert late, "no request was admitted afterwards"
