"""Settings and fixtures of the whole suite, and the mark of the tests that need a server."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, Phase, settings

from ratekeeper.decide.store import Store
from ratekeeper.decide.stores import open_store
from ratekeeper.testing import ManualClock
from tests.redis_servers import running, scratch
from tests.redis_servers.server import Startable

# The plugin that runs pytest inside pytest, for the tests of our own fixtures.
pytest_plugins = ["pytester"]

# A deadline is an assertion about time: no property may fail because the machine was busy. Two
# random rule documents are large at times, and whether too many of them are is a matter of chance.
settings.register_profile(
    "ratekeeper",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
    max_examples=50,
)
settings.load_profile("ratekeeper")
# `make check` tries fewer random examples of each property, because people wait for it.
settings.register_profile("quick", settings.get_profile("ratekeeper"), max_examples=12)
# `make mutants` only asks whether a property fails: the same each time, without a simplest example.
settings.register_profile(
    "mutants",
    settings.get_profile("ratekeeper"),
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
)
# `pytest --hypothesis-profile=thorough` takes an hour.
settings.register_profile("thorough", settings.get_profile("ratekeeper"), max_examples=2_000)

# Hundreds of tests start a Python process. Without cached bytecode, each would compile the package,
# and each worker of xdist would compile all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The modules and the tests live until the end: nothing is garbage before the first test runs.
gc.disable()

# On a busy machine, an answer may take longer than the five seconds that a command waits for it.
os.environ["RATEKEEPER_TIMEOUT"] = "60"

# A shell starts a background command with SIGINT ignored. The processes that tests start would
# inherit that, and a test that interrupts one would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every test in these folders runs against a server, a gateway or several processes.
_SERVER_FOLDERS = ("tests/integration/", "tests/faults/", "tests/examples/", "tests/console/")
# The tests that take longest run first, so that no worker starts one when the others are done: a
# group for each of the four workers of `make test`. Each takes some five minutes. The tests of the
# console share a browser.
_LONGEST = (
    ("tests/console/",),
    (
        "tests/faults/",
        "tests/integration/test_propagation.py",
        "tests/integration/test_records_service.py",
        "tests/integration/test_service_guarded.py",
        "tests/integration/test_service_running.py",
    ),
    (
        "tests/integration/test_documented_commands.py",
        "tests/integration/test_envoy_quotas.py",
        "tests/integration/test_redis_breaker.py",
        "tests/integration/test_redis_network.py",
        "tests/integration/test_redis_servers_replicated.py",
        "tests/integration/test_top.py",
    ),
    (
        "tests/examples/",
        "tests/integration/test_repository_huge.py",
        "tests/integration/test_schemathesis.py",
        "tests/kernel/test_drivers.py",
        "tests/simulator/",
        "tests/test_deploy.py",
        "tests/test_packages.py",
        "tests/test_site.py",
        "tests/test_tutorial.py",
    ),
)
# The long suites that need no server: thousands of random traces, sanitizers, shells.
_LONG_SUITES = (
    "tests/kernel/",
    "tests/parity/",
    "tests/promises/",
    "tests/test_fuzz_entries.py",
    "tests/cli/test_completion.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the docstrings of src/ only: in tests/, that takes two seconds."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that needs a server or is in a long suite; `make check` runs the others.

    Each worker runs some of the longest tests first.

    A test needs a server if it is in one of `_SERVER_FOLDERS`, or if the test, one of its fixtures
    or a helper refers to the harness that starts servers. A parametrised fixture marks those of its
    parameters that need one. A test that starts a server without the mark fails.
    """
    items[:] = _longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    found: dict[object, bool] = {}
    for item in items:
        if item.nodeid.startswith(_SERVER_FOLDERS) or any(
            _starts_a_server(each, found) for each in _functions(item)
        ):
            item.add_marker(pytest.mark.server)
        if item.nodeid.startswith(_LONG_SUITES):
            item.add_marker(pytest.mark.long)


def _longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests so that the part of each worker begins with a group of the longest.

    xdist gives each worker an equal run of neighbours, and moves the last of them to idle workers.
    """
    long: list[list[pytest.Item]] = [[] for _ in range(workers)]
    rest = []
    for item in items:
        groups = (n for n, prefixes in enumerate(_LONGEST) if item.nodeid.startswith(prefixes))
        group = next(groups, None)
        (rest if group is None else long[group % workers]).append(item)
    found: list[pytest.Item] = []
    for number, first in enumerate(long):
        size = (len(items) - len(found)) // (workers - number)
        filling = max(size - len(first), 0)
        found += [*first, *rest[:filling]]
        del rest[:filling]
    return found + rest


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from the tests themselves: 12,000 objects with their parts.

    A collection that scanned them all, and so often, would take a tenth of the processor time.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let only the marked tests start servers."""
    scratch.forbidden = "" if item.get_closest_marker("server") else item.nodeid


def _functions(item: pytest.Item) -> Iterator[object]:
    """Yield the test function and the functions of its fixtures."""
    yield getattr(item, "function", None)
    fixtures = getattr(item, "_fixtureinfo", None)
    for definitions in fixtures.name2fixturedefs.values() if fixtures else ():
        if definitions[-1].params is None:
            yield definitions[-1].func


def _starts_a_server(value: Any, found: dict[object, bool]) -> bool:
    """Return True if a function or class of the tests refers to the harness, directly or not."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    if value not in found:
        found[value] = value is running or (inspect.isclass(value) and issubclass(value, Startable))
        found[value] = found[value] or any(
            _starts_a_server(each, found) for each in _used_by(value)
        )
    return found[value]


def _used_by(value: Any) -> Iterator[object]:
    """Yield the methods of a class of the tests, or the globals that a function of them uses."""
    property_test = getattr(value, "hypothesis", None)
    value = property_test.inner_test if property_test else inspect.unwrap(value)
    if not (getattr(value, "__module__", None) or "").startswith("tests."):
        return
    if inspect.isclass(value):
        yield from vars(value).values()
    elif isinstance(value, FunctionType):
        known = value.__globals__
        yield from (known[name] for name in _names(value.__code__) if name in known)


def _names(code: CodeType) -> set[str]:
    """Return the global names that a function uses, nested functions included."""
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, nested))


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that only moves when the test advances it."""
    return ManualClock(start=1_800_000_000)


@pytest.fixture(params=["memory", "shared", pytest.param("redis", marks=pytest.mark.server)])
def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Iterator[Store]:
    """Open an empty store of each kind that uses `clock`."""
    uri = "memory://"
    options: dict[str, object] = {}
    if request.param == "shared":
        uri = f"shared://{tmp_path}/api.limits?capacity=10000"  # by default it takes 90 MB
    if request.param == "redis":
        server = running("single")
        server.flush()
        # A busy machine may stall a test for longer than the deadline of production.
        uri, options = server.uri, {"deadline_ms": 10_000, "connect_ms": 10_000}
    opened = open_store(uri, clock, **options)
    yield opened
    opened.close()
