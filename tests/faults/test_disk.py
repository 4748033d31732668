"""The disk of the records becomes full under load."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ratekeeper.history.sink import EVENTS_MAX
from ratekeeper.service.http.checks import BATCH_CHECKS_MAX
from tests.faults.conditions import fill, small_disk
from tests.faults.load import CASES, Key, Record, document, now_ns
from tests.faults.reporting import verify
from tests.faults.service_load import service_load
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess

DISK_KILOBYTES = 8_192
KEYS = tuple(Key("closed", case) for case in CASES)
NOTICED_S_MAX = 20.0
WRITTEN_S_MAX = 60.0
# Far more checks than the buffer holds: the service drops records of one greedy user's denials.
BATCHES = EVENTS_MAX * 3 // 2 // BATCH_CHECKS_MAX


def logged(service: ServiceProcess, words: str) -> bool:
    """Return True if the service has logged these words."""
    return any(words in str(each.get("message")) for each in service.events())


def dropped(service: ServiceProcess) -> float:
    """Return the number of dropped records, from the service's metrics."""
    families = text_string_to_metric_families(service.ask("GET", "/metrics").body.decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "ratekeeper_records_dropped_total"
    )


def ask_too_much(service: ServiceProcess) -> int:
    """Send enough checks to fill the buffer of records; return their number."""
    one = {"user": "greedy", "endpoint": KEYS[0].request.endpoint}
    for _ in range(BATCHES):
        answer = service.ask("POST", "/v1/check/batch", {"checks": [one] * BATCH_CHECKS_MAX})
        assert answer.status == 200, answer
    return BATCHES * BATCH_CHECKS_MAX


def used(path: Path) -> int:
    """Return the number of checks in the usage records."""
    with sqlite3.connect(path) as database:
        [(count,)] = database.execute("SELECT sum(allowed + denied) FROM ratekeeper_usage")
    database.close()
    return int(count)


async def test_the_disk_of_the_records_is_full() -> None:
    """Decisions stay exact and quick; the service drops and counts records without room.

    When there is room again, the service writes all usage, to the last unit.
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
                calls = await asyncio.to_thread(ask_too_much, service)
                await asyncio.to_thread(
                    until,
                    lambda: logged(service, "records are not written") and dropped(service) > 0,
                    "the service logs the full disk and counts dropped records",
                    NOTICED_S_MAX,
                    service.log_end,
                )
                filler.unlink()
                healed_ns = now_ns()
                await asyncio.to_thread(
                    until,
                    lambda: logged(service, "records are written again"),
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
        answered = len(record.noted) + calls
        # A request whose connection was cut may have been decided or not.
        assert answered <= used(path) <= answered + record.lost
