"""Loads that are pushed to one worker and reach the others, through a file and the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ratekeeper import AsyncLimiter, ConfigError, StoreUnavailable
from ratekeeper.decide.store import Store
from ratekeeper.rules.load import LoadReading
from ratekeeper.service.http import loads
from ratekeeper.service.http.loads import SharedLoads
from ratekeeper.testing import ManualClock
from tests.shared_memory import SharedMemory

SCALE = {"source": "jobs", "low": 100, "high": 500, "smoothing": 0}
RULES: dict[str, Any] = {
    "version": 1,
    "rules": [{"id": "api", "by": "user", "limits": "10/minute", "scale": SCALE}],
}


def worker(
    folder: Path | None, rules: dict[str, Any] = RULES, store: str | Store = "memory://"
) -> tuple[AsyncLimiter, SharedLoads]:
    """Return the limiter of a worker, and its loads."""
    limiter = AsyncLimiter.from_rules(rules, store=store)
    return limiter, SharedLoads(limiter, folder)


def jobs(limiter: AsyncLimiter) -> float | None:
    reading = limiter.loads.reading("jobs")
    return reading and reading.load


async def test_a_push_reaches_the_other_workers(tmp_path: Path) -> None:
    """With its age and its validity; another push replaces it."""
    (one, pushing), (other, reading) = worker(tmp_path), worker(tmp_path)
    assert pushing.push("jobs", 340, 60.0) is False, "the store carries no messages"
    reading.refresh()
    assert (jobs(one), jobs(other)) == (340, 340)
    reading.refresh()
    found = other.loads.reading("jobs")
    assert isinstance(found, LoadReading)
    assert found.valid_s == 60.0
    assert abs(found.at_ns - other.clock.now_ns()) < 10e9
    assert other.factors() == one.factors()
    pushing.push("jobs", 20)
    reading.refresh()
    assert jobs(other) == 20


async def test_an_old_load_stays_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts later knows when a load was pushed, and uses no stale one."""
    (_, pushing), (late, reading) = worker(tmp_path), worker(tmp_path)
    pushing.push("jobs", 500)
    boot_ns = loads.boot_ns()
    monkeypatch.setattr(loads, "boot_ns", lambda: boot_ns + 31 * 10**9)
    reading.refresh()
    [(_, age_s)] = late.loads.all().values()
    assert age_s == pytest.approx(31, abs=1)
    assert late.factors() == {"api": 1.0}


async def test_a_newer_load_from_elsewhere_is_not_replaced_by_the_file(tmp_path: Path) -> None:
    """The load of a message is newer than that of the file."""
    (_, pushing), (other, reading) = worker(tmp_path), worker(tmp_path)
    pushing.push("jobs", 340)
    reading._take_message('{"name":"jobs","load":100}')
    reading.refresh()
    assert jobs(other) == 100


async def test_a_load_waits_for_rules_that_follow_it(tmp_path: Path) -> None:
    """The worker that was pushed to may have newer rules."""
    (_, pushing), (other, reading) = worker(tmp_path), worker(tmp_path, {"version": 1})
    pushing.push("jobs", 340)
    reading.refresh()
    assert other.loads.all() == {}
    other.use(RULES)
    reading.refresh()
    assert jobs(other) == 340


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"jobs": 3}', b'{"jobs":{"load":"3"}}'])
async def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path, text: bytes) -> None:
    """No load is known until the next push."""
    (_, pushing), (other, reading) = worker(tmp_path), worker(tmp_path)
    (tmp_path / "loads.shared").write_bytes(text)
    reading.refresh()
    assert jobs(other) is None
    pushing.push("jobs", 340)
    reading.refresh()
    assert jobs(other) == 340


@pytest.mark.parametrize(
    "text", ["", "[]", '{"name":"cpu","load":1}', '{"name":"jobs","load":-1}', '{"load":1e999}']
)
async def test_an_invalid_message_changes_nothing(text: str) -> None:
    """Any user of the store can publish one."""
    limiter, shared = worker(None)
    shared._take_message(text)
    assert jobs(limiter) is None


async def test_an_invalid_push_is_rejected_and_not_shared(tmp_path: Path) -> None:
    """Neither a name that no rule follows nor a wrong number."""
    _, shared = worker(tmp_path)
    for name, load in (("job", 1.0), ("jobs", float("nan")), ("cpu", 0.5)):
        with pytest.raises(ConfigError):
            shared.push(name, load)
    assert shared._read(tmp_path / "loads.shared") == {}


async def test_the_file_has_only_loads_that_rules_follow(tmp_path: Path) -> None:
    """So its size is bounded, however the rules change."""
    limiter, shared = worker(tmp_path)
    shared.push("jobs", 1)
    limiter.use({"version": 1})
    shared.push("pushed", 0.5)
    assert list(msgspec.json.decode((tmp_path / "loads.shared").read_bytes())) == ["pushed"]


class FakeChannel:
    """Delivers messages to all subscribers, and fails while it is told to."""

    def __init__(self) -> None:
        self.queues: list[list[str]] = []
        self.error: Exception | None = None
        self.errors = 0

    def publish(self, topic: str, text: str) -> None:
        assert topic == loads.TOPIC
        if self.error:
            raise self.error
        for queue in self.queues:
            queue.append(text)

    def subscribe(self, topic: str) -> FakeSubscription:
        assert topic == loads.TOPIC
        if self.error:
            self.errors += 1
            raise self.error
        self.queues.append([])
        return FakeSubscription(self.queues[-1])


class FakeSubscription:
    """Has the messages of a list."""

    def __init__(self, queue: list[str]) -> None:
        self._queue = queue

    def wait(self, seconds: float) -> str | None:
        return self._queue.pop(0) if self._queue else None

    def close(self) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a thread makes it true
            await asyncio.sleep(0.01)


async def test_a_push_reaches_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker subscribes once its rules follow a pushed load, and again after an error."""
    monkeypatch.setattr(loads, "IDLE_SECONDS", 0.01)
    store, channel = SharedMemory(ManualClock()), FakeChannel()
    store.channel = channel
    (_, pushing), (other, following) = (
        worker(None, rules, store) for rules in (RULES, {"version": 1})
    )
    channel.error = StoreUnavailable("gone")
    assert pushing.push("jobs", 340) is False
    task = asyncio.create_task(following.keep_following())
    other.use(RULES)
    await until(lambda: channel.errors > 0)
    channel.error = None
    await until(lambda: bool(channel.queues))
    assert pushing.push("jobs", 340) is True
    await until(lambda: jobs(other) == 340)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
