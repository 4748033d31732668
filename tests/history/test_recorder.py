"""From rulings to rows: what is noted, sampled, bounded, handed over, and lost."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.history.databases import rows, until_async
from tollkeeper import AsyncLimiter, Request
from tollkeeper.control.database import Database
from tollkeeper.core.model import CheckResult
from tollkeeper.history import recorder as recorders
from tollkeeper.history.events import told
from tollkeeper.history.live import Live
from tollkeeper.history.reading import Records
from tollkeeper.history.recorder import Recorder
from tollkeeper.history.sink import EVENTS_MAX, Pace, Sink
from tollkeeper.history.usage import Usage
from tollkeeper.rules.document.reading import read
from tollkeeper.testing import ManualClock

RULES = read(
    """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 5/minute, cost: 2}
  - {id: tenants, match: {tenant: "*"}, by: tenant, limits: 3/hour}
  - {id: trial, match: {endpoint: /trial}, by: ip, limits: 1/hour, mode: shadow}
allow: ["user:root"]
deny: ["user:mallory"]
"""
)
QUICK = Pace(write_seconds=0.02, usage_seconds=0.02, batch_seconds=0)
USAGE = "SELECT subject, rule, allowed, denied, units FROM tollkeeper_usage ORDER BY subject, rule"
ANN = Request(user="ann")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a file that is not there yet."""
    return f"sqlite:///{tmp_path / 'records.db'}"


@pytest.fixture
async def limiter() -> AsyncIterator[AsyncLimiter]:
    """With RULES, and a clock that stands still."""
    async with AsyncLimiter.from_rules(RULES, clock=ManualClock(start=1_800_000_000)) as made:
        yield made


Make = Callable[..., Recorder]


@pytest.fixture
def make(url: str) -> Make:
    """Makes a recorder on the database, which keeps what is allowed only if that is asked for."""

    def made(**options: Any) -> Recorder:
        options.setdefault("share", 0.0)
        return Recorder(
            lambda row_of: Sink(Database(url), pace=QUICK, row_of=row_of),
            Records(Database(url)),
            node="eu-1",
            **options,
        )

    return made


async def noted(recorder: Recorder, limiter: AsyncLimiter, *requests: Request) -> list[CheckResult]:
    """Check these, one by one, and note each."""
    rulings = []
    for request in requests:
        rulings.append(await limiter.evaluate(request))
        recorder.note(request, rulings[-1], 1, time.time_ns())
    return rulings


async def test_usage_is_what_was_decided(make: Make, limiter: AsyncLimiter, url: str) -> None:
    """By the rule's own subjects and units; a denial is the rule's that spoke."""
    recorder = make(share=0.0)
    await recorder.start()
    both = Request(user="bob", tenant="acme")
    await noted(recorder, limiter, ANN, ANN, ANN, both, both, both)
    await noted(recorder, limiter, Request(user="root"), Request(user="mallory"), Request())
    await recorder.stop()
    assert await rows(url, USAGE) == [
        ("tenant:acme", "tenants", 2, 0, 2),
        ("user:ann", "users", 2, 1, 4),
        ("user:bob", "users", 2, 1, 4),
        ("user:mallory", "(deny)", 0, 1, 0),
        ("user:root", "(allow)", 1, 0, 1),
    ]
    found = "SELECT subject, rule, outcome, kind FROM tollkeeper_decisions ORDER BY subject"
    assert await rows(url, found) == [
        ("user:ann", "users", "denied", "limited"),
        ("user:bob", "users", "denied", "limited"),
        ("user:mallory", "(deny)", "denied", "blocked"),
    ]
    assert recorder.dropped() == 0


async def test_of_several_that_are_denied_together_nothing_was_spent(
    make: Make, limiter: AsyncLimiter, url: str
) -> None:
    """Those that would have passed alone are not usage."""
    recorder = make(share=1.0)
    await recorder.start()
    for _ in range(3):
        asked = [(ANN, 1), (Request(user="eve"), 1)]
        recorder.note_all(asked, await limiter.evaluate_all(asked), time.time_ns())
        asked = [(ANN, 1), (Request(user="bob"), 1)]
        recorder.note_all(asked, await limiter.evaluate_all(asked), time.time_ns())
    await recorder.stop()
    assert await rows(url, USAGE) == [
        ("user:ann", "users", 2, 4, 4),
        ("user:bob", "users", 1, 0, 2),
        ("user:eve", "users", 1, 0, 2),
    ]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (1.0, 5)])
async def test_a_share_of_what_is_allowed_is_kept(
    make: Make, limiter: AsyncLimiter, url: str, share: float, kept: int
) -> None:
    """None, or all; and what a rule in shadow mode would have denied, always."""
    recorder = make(share=share)
    await recorder.start()
    await noted(recorder, limiter, *(Request(ip=f"192.0.2.{number}") for number in range(5)))
    trial = Request(ip="192.0.2.1", endpoint="/trial", method="GET")
    first, second = await noted(recorder, limiter, trial, trial)
    assert (first.shadow_denied, second.shadow_denied) == ((), ("trial",))
    await recorder.stop()
    found = "SELECT count(*) FROM tollkeeper_decisions WHERE endpoint = ''"
    assert await rows(url, found) == [(kept,)]
    shadows = "SELECT shadow_denied FROM tollkeeper_decisions WHERE shadow_denied <> '[]'"
    assert await rows(url, shadows) == [('["trial"]',)]


async def test_a_sample_has_about_its_share(make: Make, limiter: AsyncLimiter) -> None:
    """A tenth of five thousand; six sigmas from it would be chance once in 10^9."""
    recorder = make(share=0.1)
    ruling = await limiter.evaluate(Request())
    for _ in range(5_000):
        recorder.note(Request(), ruling, 1, 0)
    assert 373 < len(recorder._noted) < 627
    await recorder.stop()


async def test_what_is_not_taken_is_bounded(make: Make, limiter: AsyncLimiter) -> None:
    """Nobody takes it: it is not started. Decisions are dropped, usage is counted together."""
    recorder = make()
    denied = (await noted(recorder, limiter, ANN, ANN, ANN))[-1]
    for _ in range(EVENTS_MAX + 10):
        recorder.note(ANN, denied, 1, 0)
    assert len(recorder._noted) == EVENTS_MAX
    assert recorder.dropped() >= 10
    for number in range(60_000):
        ruling = denied._replace(counted=((f"user:{number}", 1),))
        recorder.note(ANN, ruling, 1, 0)
    assert len(recorder._usage) <= 50_001
    await recorder.stop()


async def test_what_waits_is_bounded_in_bytes(make: Make, limiter: AsyncLimiter) -> None:
    """A request may be as long as a body; what is put aside of it is not."""
    recorder = make(share=1.0)
    await noted(recorder, limiter, Request(api_key="k" * 50_000, endpoint="/" * 50_000))
    await noted(recorder, limiter, Request(user="root", method="M" * 50_000))
    for _, _, _, known, endpoint, method in recorder._noted:
        assert len(known) + len(endpoint or "") + len(method or "") < 1_200
    assert all(len(subject) < 1_000 for subject, _, _ in recorder._usage.buckets)
    await recorder.stop()


async def test_subjects_are_told_as_wanted(
    make: Make, limiter: AsyncLimiter, url: str, tmp_path: Path
) -> None:
    """By digest everywhere: in usage, in decisions and among those who ask most."""
    recorder = make(subjects="hashed")
    await recorder.start()
    await noted(recorder, limiter, ANN, ANN, ANN)
    await until_async(lambda: recorder.top("denied", 5)[0], "it is counted")
    digest = told("user:ann", "hashed")
    assert [each.who for each in recorder.top("denied", 5)[0]] == [(digest, "users")]
    await recorder.stop()
    assert [row[0] for row in await rows(url, USAGE)] == [digest]
    assert await rows(url, "SELECT DISTINCT subject FROM tollkeeper_decisions") == [(digest,)]
    assert b"user:ann" not in (tmp_path / "records.db").read_bytes()


async def test_workers_tell_each_other_who_asks_most(
    make: Make, limiter: AsyncLimiter, tmp_path: Path
) -> None:
    """Whoever is asked adds up what the living have left."""
    one = make(live=Live(tmp_path, number=1))
    # Process 1 is always there.
    two = make(live=Live(tmp_path))
    await one.start()
    await two.start()
    await noted(one, limiter, ANN, ANN, ANN)
    await noted(two, limiter, ANN, Request(user="bob"))

    def both() -> bool:
        return two.top("checks", 5)[1] > 4

    await until_async(both, "the other's file is there")
    found, total = two.top("checks", 5)
    assert [each.who for each in found] == [("user:ann", "users"), ("user:bob", "users")]
    assert found[0].count == pytest.approx(4, rel=0.2)
    assert total == pytest.approx(5, rel=0.2)
    await one.stop()
    await two.stop()


async def test_what_is_dropped_never_goes_down(make: Make, limiter: AsyncLimiter) -> None:
    """Not even while it is handed over, and nobody has taken it yet."""
    recorder = make()
    recorder._usage = Usage(buckets_max=0, others_max=0)
    recorder._buckets = recorder._usage.buckets
    await noted(recorder, limiter, ANN, ANN)
    assert recorder.dropped() == 2
    handed: list[Any] = []
    waiting = SimpleNamespace(call_soon_threadsafe=lambda *given: handed.append(given))
    recorder._loop = cast("asyncio.AbstractEventLoop", waiting)
    recorder._hand_over()
    assert (len(handed), recorder.dropped()) == (1, 2)


def test_a_folder_that_is_gone_is_told_of_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And again when it was there in between; not every second."""
    recorder = make(live=Live(tmp_path / "run"))
    for _ in range(2):
        recorder._leave()
        recorder._leave()
        (tmp_path / "run").mkdir()
        recorder._leave()
        shutil.rmtree(tmp_path / "run")
    assert caplog.text.count("not told who asks most") == 2


async def test_a_clock_that_is_set_back_keeps_nobody_on_top(
    make: Make, limiter: AsyncLimiter
) -> None:
    """Counts fade by a clock that nobody sets."""
    wall_s, passed_s = 1_800_000_000.0, 0.0
    recorder = make(now_ns=lambda: int(wall_s * 1e9), monotonic_s=lambda: passed_s)
    await recorder.start()
    await noted(recorder, limiter, *[ANN] * 80)
    await until_async(lambda: recorder.top("checks", 1)[0], "the thread has counted")
    wall_s, passed_s = wall_s - 3_600, 120.0
    found, total = recorder.top("checks", 1)
    assert (found[0].count, total) == (20, 20)
    await recorder.stop()


async def test_a_database_that_is_away_costs_nothing(
    limiter: AsyncLimiter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks go on, who asks most is known, and the end does not wait for long."""
    monkeypatch.setattr(recorders, "STOP_SECONDS_MAX", 0.5)
    gone = f"sqlite:///{tmp_path / 'nowhere' / 'records.db'}"
    recorder = Recorder(
        lambda row_of: Sink(Database(gone), pace=QUICK, row_of=row_of), Records(Database(gone))
    )
    await recorder.start()
    for _ in range(3):
        await noted(recorder, limiter, ANN)
    await until_async(lambda: recorder.top("checks", 1)[0], "it is counted all the same")
    await asyncio.wait_for(recorder.stop(), 10)
    assert not recorder._thread.is_alive()


async def test_many_are_handed_over_before_their_time(
    make: Make, limiter: AsyncLimiter, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand decisions do not wait for the clock."""
    monkeypatch.setattr(recorders, "HAND_OVER_SECONDS", 3_600.0)
    recorder = make()
    await recorder.start()
    denied = (await noted(recorder, limiter, ANN, ANN, ANN))[-1]
    for _ in range(999):
        recorder.note(ANN, denied, 1, time.time_ns())
    await until_async(lambda: recorder._sink and recorder._sink.written == 1_000, "written")
    await recorder.stop()
    assert await rows(url, "SELECT count(*) FROM tollkeeper_decisions") == [(1_000,)]
