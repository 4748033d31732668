"""The disk that records are kept on is full, under load."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.faults.conditions import fill, small_disk
from tests.faults.load import CASES, Key, Record, document, now_ns
from tests.faults.service_load import service_load
from tests.faults.telling import verify
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess
from tollkeeper.history.sink import EVENTS_MAX
from tollkeeper.service.http.checks import BATCH_CHECKS_MAX

DISK_KILOBYTES = 8_192
KEYS = tuple(Key("closed", case) for case in CASES)
NOTICED_S_MAX = 20.0
WRITTEN_S_MAX = 60.0
# One more than there is room for, by far: what cannot be kept is denials of one who asks too much.
BATCHES = EVENTS_MAX * 3 // 2 // BATCH_CHECKS_MAX


def said(service: ServiceProcess, words: str) -> bool:
    """Has it logged that?"""
    return any(words in str(each.get("message")) for each in service.events())


def dropped(service: ServiceProcess) -> float:
    """Records that were lost, as its metrics tell."""
    families = text_string_to_metric_families(service.ask("GET", "/metrics").body.decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tollkeeper_records_dropped_total"
    )


def ask_too_much(service: ServiceProcess) -> int:
    """Checks at once, as many as it takes to fill the room for records; how many there were."""
    one = {"user": "greedy", "endpoint": KEYS[0].request.endpoint}
    for _ in range(BATCHES):
        answer = service.ask("POST", "/v1/check/batch", {"checks": [one] * BATCH_CHECKS_MAX})
        assert answer.status == 200, answer
    return BATCHES * BATCH_CHECKS_MAX


def used(path: Path) -> int:
    """All checks that the records tell of."""
    with sqlite3.connect(path) as database:
        [(count,)] = database.execute("SELECT sum(allowed + denied) FROM tollkeeper_usage")
    database.close()
    return int(count)


async def test_the_disk_of_the_records_is_full() -> None:
    """Decisions are as exact and as quick as ever; what does not fit is dropped and counted.

    When there is room again all usage is written, to the last unit.
    """
    record = Record()
    with small_disk(DISK_KILOBYTES) as disk:
        path = disk / "records.db"
        options = ("--record", f"sqlite:///{path}", "--sample", "1")
        with ServiceProcess(document(), *options) as service:
            async with service_load(service, record, KEYS, threads=2):
                await asyncio.to_thread(until, path.exists, "records are kept", NOTICED_S_MAX)
                await asyncio.sleep(1.5)
                filler = await asyncio.to_thread(fill, disk)
                asked = await asyncio.to_thread(ask_too_much, service)
                await asyncio.to_thread(
                    until,
                    lambda: said(service, "records are not written") and dropped(service) > 0,
                    "it is noticed, and drops are counted",
                    NOTICED_S_MAX,
                    service.log_end,
                )
                filler.unlink()
                healed_ns = now_ns()
                await asyncio.to_thread(
                    until,
                    lambda: said(service, "records are written again"),
                    "records are written",
                    WRITTEN_S_MAX,
                    service.log_end,
                )
                back_s = (now_ns() - healed_ns) / 1e9
            lost = dropped(service)
            service.end()
        found = verify(
            record,
            f"disk of the records full: {lost:.0f} records dropped and counted, written again "
            f"{back_s:.1f} s after there was room",
        )
        assert found["closed"].degraded == 0
        answered = len(record.noted) + asked
        # Of a request that was cut nobody knows whether it was decided.
        assert answered <= used(path) <= answered + record.lost
