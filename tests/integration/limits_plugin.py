"""A pytest plugin that runs the tests of `limits` against our storages, without waiting.

`test_limits_suite.py` starts pytest in the unpacked source distribution of `limits` with it. The
tests there are parametrised by storages. The plugin replaces these by ours, before the modules of
the tests are imported. Time is a ManualClock for the tests, for `limits` and for our stores: a
sleep advances it.

`LIMITS_STORAGES` names our storages: a JSON object of name and URI. The outcome of each test is
written to the file `LIMITS_OUTCOMES`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits.storage import storage_from_string

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.limits import AsyncRatekeeperStorage, RatekeeperStorage
from ratekeeper.testing import ManualClock, use_clock

DAY = 86_400
# A server on a busy machine may take longer than the default of 50 ms.
OPTIONS = {"redis": {"deadline_ms": 10_000, "breaker": "off"}}

_storages: dict[str, str] = json.loads(os.environ["LIMITS_STORAGES"])
_outcomes: dict[str, str] = {}
_clock = ManualClock(start=20_000 * DAY)
_asleep = asyncio.sleep


async def _sleep_async(seconds: float) -> None:
    _clock.advance(max(seconds, 0))
    await _asleep(0)


def _parameters(*, is_async: bool, with_class: bool) -> list[Any]:
    found = []
    for name, uri in _storages.items():
        options = next((value for key, value in OPTIONS.items() if key in name), {})
        values: list[Any] = [f"async+{uri}" if is_async else uri, options, None]
        if with_class:
            values.insert(2, AsyncRatekeeperStorage if is_async else RatekeeperStorage)
        found.append(pytest.param(*values, id=name))
    return found


def pytest_configure() -> None:
    """Give the tests our storages and our clock."""
    utils = importlib.import_module("tests.utils")  # of the source distribution
    for name, is_async in (("ALL_STORAGES", False), ("ALL_STORAGES_ASYNC", True)):
        storages = getattr(utils, name)
        storages.clear()
        parameters = _parameters(is_async=is_async, with_class=False)
        storages.update(zip(_storages, parameters, strict=True))
        mark = pytest.mark.parametrize(("uri", "args", "fixture"), parameters)
        for kind in ("all", "moving_window", "sliding_window_counter"):
            setattr(utils, f"{'async_' if is_async else ''}{kind}_storage", mark)
    time.time = lambda: _clock.now_ns() / NS_PER_SECOND
    time.sleep = _clock.advance
    asyncio.sleep = _sleep_async


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Replace the storages that a class lists itself."""
    for marker in metafunc.definition.iter_markers("parametrize"):
        if marker.args[0] == "uri, args, expected_instance, fixture":
            is_async = metafunc.module.__name__.startswith("tests.aio")
            marker.args[1][:] = _parameters(is_async=is_async, with_class=True)


@pytest.fixture(autouse=True)
def _empty_storage_and_another_day(request: pytest.FixtureRequest) -> Iterator[None]:
    now_ns = _clock.now_ns()
    _clock.advance_ns(-now_ns % (DAY * NS_PER_SECOND) + 10 * NS_PER_SECOND + 250_000_000)
    given = getattr(request.node, "callspec", None)
    with use_clock(_clock):
        if given is not None and given.id in _storages:
            uri, options = given.params["uri"], given.params["args"]
            storage_from_string(uri.removeprefix("async+"), **options).reset()
        yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst outcome of a test's phases."""
    counts = report.outcome != "passed" or report.when == "call"
    if counts and _outcomes.get(report.nodeid) != "failed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["LIMITS_OUTCOMES"]).write_text(json.dumps(_outcomes))
