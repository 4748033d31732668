"""One worker of a service. `tests/integration/test_service_running.py` runs real ones."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from granian import _signals as granian_signals

from ratekeeper import AsyncLimiter
from ratekeeper.core.errors import ConfigError
from ratekeeper.service.process import worker
from ratekeeper.service.process.settings import ServiceSettings
from ratekeeper.service.process.worker import SignalsOnce, WorkerShutdown
from tests.history.databases import rows
from tests.stub_regions import StubRegions, store_with_regions

RULES = "version: 1\nrules:\n  - {id: a, by: [user], limits: [5/minute]}\n"


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    """Return the settings of a service with a rule document, in memory and without records."""
    (tmp_path / "limits.yaml").write_text(RULES)
    given = {"rules": str(tmp_path / "limits.yaml"), "store": "memory://", "record": "off"}
    return ServiceSettings.gather({"data": str(tmp_path / "data"), **given})


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the signals that the worker sends to itself."""
    sent: list[int] = []
    monkeypatch.setattr(worker.os, "kill", lambda _, number: sent.append(number))
    return sent


async def test_shutdown_drains_first(settings: ServiceSettings, signals: list[int]) -> None:
    """SIGUSR1 starts the drain; SIGTERM during the drain stops the worker at its end."""
    context = worker.open_context(settings, None)
    drained = asyncio.Event()

    async def drain() -> None:
        drained.set()

    shutdown = WorkerShutdown(context, [drain], drain_s=0.05)
    shutdown.drain_service()
    shutdown.drain_service()
    assert (context.stopping, context.closing) == (True, True)
    await asyncio.wait_for(drained.wait(), 10)
    shutdown.stop_worker()
    assert signals == []
    async with asyncio.timeout(10):
        while not signals:  # noqa: ASYNC110 - a signal handler sets no event
            await asyncio.sleep(0.01)
    assert signals == [signal.SIGINT]
    await context.limiter.close()


def test_only_the_first_signal_reaches_granian(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second stop can deadlock granian, whose own function adds the handlers."""
    stops: list[str] = []
    handlers: dict[int, Callable[[], None]] = {}

    class Signal:
        def set(self) -> None:
            stops.append("stop")

    class Loop:
        def add_signal_handler(self, number: int, handle: Callable[[], None]) -> None:
            handlers[number] = handle

    monkeypatch.setattr(granian_signals, "WorkerSignal", Signal)
    monkeypatch.setattr(granian_signals, "set_loop_signals", granian_signals.set_loop_signals)
    SignalsOnce.use()
    granian_signals.set_loop_signals(Loop())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        handlers[number]()
    assert stops == ["stop"]


async def test_replaced_worker_does_not_end_the_service(
    settings: ServiceSettings, signals: list[int]
) -> None:
    """SIGTERM alone: this worker closes its connections, but the service stays ready."""
    context = worker.open_context(settings, None)
    shutdown = WorkerShutdown(context, [], drain_s=60)
    shutdown.stop_worker()
    assert (context.stopping, context.closing) == (False, True)
    assert signals == []
    await context.limiter.close()


def test_records_need_a_database(settings: ServiceSettings, tmp_path: Path) -> None:
    """A URL that no database has is rejected at startup; `off` needs none."""
    worker.check_record(settings)
    wrong = ServiceSettings.gather({"data": str(tmp_path), "record": "mysql://db/records"})
    with pytest.raises(ConfigError):
        worker.check_record(wrong)


def test_records_and_rules_need_files_of_their_own(tmp_path: Path) -> None:
    """Records never take the space of the rules; two spellings of a path are one file."""
    data = str(tmp_path)
    settings = ServiceSettings.gather(
        {
            "data": data,
            "rules": f"sqlite:///{tmp_path}/rules.db",
            "record": f"sqlite:///{tmp_path}/../{tmp_path.name}/rules.db",
        }
    )
    with pytest.raises(ConfigError, match="records need a file of their own"):
        worker.check_record(settings)
    worker.check_record(ServiceSettings.gather({"data": data}))


@pytest.mark.parametrize(("given", "expected"), [("10", 10), ("7", 7), ("none", None)])
def test_header_style(given: str, expected: int | None, tmp_path: Path) -> None:
    """The settings choose the headers."""
    chosen = {"draft": given, "legacy_headers": False}
    style = worker.style_of(ServiceSettings.gather({"data": str(tmp_path), **chosen}))
    assert (style.draft, style.legacy) == (expected, False)


def test_a_worker_without_records_does_not_import_sqlalchemy() -> None:
    """It would take half of the time of a start, and 20 MB in every worker."""
    program = (
        "import sys; sys.modules['sqlalchemy'] = None; import ratekeeper.service.process.worker"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_the_recorder_of_a_region(tmp_path: Path, settings: ServiceSettings) -> None:
    """Its records have the region, and it records every excess that the sync reports."""
    store = store_with_regions()
    async with AsyncLimiter("5/minute", store=store) as limiter:
        given = replace(settings, record=f"sqlite:///{tmp_path / 'records.db'}")
        recorder = worker.recorder_of(given, limiter, None)
    assert recorder is not None
    await recorder.start()
    [listener] = cast("StubRegions", store.regions).listeners
    listener("plan", "user:42", "us", 40)
    await recorder.stop()
    found = await rows(given.record, "SELECT outcome, region, cost FROM ratekeeper_decisions")
    assert found == [("excess", "eu", 40)]
