"""The recorder: from results of checks to rows and usage, sampled, bounded and handed over."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ratekeeper import AsyncLimiter, Request
from ratekeeper.control.database import Database
from ratekeeper.core.model import CheckResult
from ratekeeper.history import recorder as recorders
from ratekeeper.history.events import UsageBuckets, recorded_subject
from ratekeeper.history.live import ReportFolder
from ratekeeper.history.reading import Records
from ratekeeper.history.recorder import EXCESS_MAX, Recorder
from ratekeeper.history.sink import EVENTS_MAX, Sink, WritePace
from ratekeeper.rules.document.reading import read
from ratekeeper.testing import ManualClock
from tests.history.databases import rows, until_async

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
QUICK = WritePace(write_seconds=0.02, usage_seconds=0.02, batch_seconds=0)
USAGE = "SELECT subject, rule, allowed, denied, units FROM ratekeeper_usage ORDER BY subject, rule"
ANN = Request(user="ann")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'records.db'}"


@pytest.fixture
async def limiter() -> AsyncIterator[AsyncLimiter]:
    """A limiter with RULES and a clock that stands still."""
    async with AsyncLimiter.from_rules(RULES, clock=ManualClock(start=1_800_000_000)) as made:
        yield made


Make = Callable[..., Recorder]


@pytest.fixture
def make(url: str) -> Make:
    """Create recorders on the database; they log no allowed requests by default."""

    def made(**options: Any) -> Recorder:
        options.setdefault("share", 0.0)
        return Recorder(
            lambda row_of: Sink(
                Database(url), pace=QUICK, row_of=row_of, region=options.get("region", "")
            ),
            Records(Database(url)),
            node="eu-1",
            **options,
        )

    return made


async def noted(recorder: Recorder, limiter: AsyncLimiter, *requests: Request) -> list[CheckResult]:
    """Check these requests one by one, and note each."""
    results = []
    for request in requests:
        results.append(await limiter.evaluate(request))
        recorder.note(request, results[-1], 1, time.time_ns())
    return results


async def test_usage_matches_the_decisions(make: Make, limiter: AsyncLimiter, url: str) -> None:
    """Usage is by subject and units of each rule; a denial counts for the rule that denied."""
    recorder = make(share=0.0)
    await recorder.start()
    both = Request(user="bob", tenant="acme")
    await noted(recorder, limiter, ANN, ANN, ANN, both, both, both)
    await noted(recorder, limiter, Request(user="root"), Request(user="mallory"), Request())
    await recorder.stop()
    assert await rows(url, USAGE) == [
        ("tenant:acme", "tenants", 2, 0, 2),
        ("tenant:acme", "users", 0, 0, 0),
        ("user:ann", "users", 2, 1, 4),
        ("user:bob", "users", 2, 1, 4),
        ("user:mallory", "(deny)", 0, 1, 0),
        ("user:root", "(allow)", 1, 0, 1),
    ]
    found = "SELECT subject, rule, outcome, kind FROM ratekeeper_decisions ORDER BY subject"
    assert await rows(url, found) == [
        ("user:ann", "users", "denied", "limited"),
        ("user:bob", "users", "denied", "limited"),
        ("user:mallory", "(deny)", "denied", "blocked"),
    ]
    assert recorder.dropped() == 0


async def test_a_denial_counts_for_the_other_subjects_of_its_request(
    make: Make, limiter: AsyncLimiter, url: str
) -> None:
    """Once for each, apart from `denied`; the second time from memory."""
    recorder = make()
    await recorder.start()
    both = Request(user="bob", tenant="acme", api_key="sk_1")
    await noted(recorder, limiter, *[both] * 4, Request(user="mallory", tenant="acme"))
    await recorder.stop()
    found = "SELECT subject, rule, denied, denied_indirectly FROM ratekeeper_usage ORDER BY 1, 2"
    assert await rows(url, found) == [
        ("tenant:acme", "(deny)", 0, 1),
        ("tenant:acme", "tenants", 0, 0),
        ("tenant:acme", "users", 0, 2),
        ("user:bob", "users", 2, 0),
        ("user:mallory", "(deny)", 1, 0),
    ]
    identities = "SELECT DISTINCT user_id, tenant, api_key LIKE '#%' FROM ratekeeper_decisions"
    assert sorted(await rows(url, identities)) == [("bob", "acme", 1), ("mallory", "acme", 0)]


async def test_no_identity_is_recorded_without_subjects(
    make: Make, limiter: AsyncLimiter, url: str, tmp_path: Path
) -> None:
    """Neither in decisions nor in usage."""
    recorder = make(subjects="none")
    await recorder.start()
    await noted(recorder, limiter, *[Request(user="bob", tenant="acme", ip="192.0.2.1")] * 4)
    await recorder.stop()
    found = "SELECT DISTINCT subject, user_id, tenant, api_key, ip FROM ratekeeper_decisions"
    assert await rows(url, found) == [("", "", "", "", "")]
    stored = (tmp_path / "records.db").read_bytes()
    assert not any(value in stored for value in (b"bob", b"acme", b"192.0.2.1"))


async def test_a_denied_atomic_batch_is_no_usage(
    make: Make, limiter: AsyncLimiter, url: str
) -> None:
    """Checks of the batch that would have passed alone are not counted."""
    recorder = make(share=1.0)
    await recorder.start()
    for _ in range(3):
        checks = [(ANN, 1), (Request(user="eve"), 1)]
        recorder.note_all(checks, await limiter.evaluate_all(checks), time.time_ns())
        checks = [(ANN, 1), (Request(user="bob"), 1)]
        recorder.note_all(checks, await limiter.evaluate_all(checks), time.time_ns())
    await recorder.stop()
    assert await rows(url, USAGE) == [
        ("user:ann", "users", 2, 4, 4),
        ("user:bob", "users", 1, 0, 2),
        ("user:eve", "users", 1, 0, 2),
    ]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (1.0, 5)])
async def test_a_share_of_the_allowed_requests_is_logged(
    make: Make, limiter: AsyncLimiter, url: str, share: float, kept: int
) -> None:
    """None or all are logged; denials of shadow rules are always logged."""
    recorder = make(share=share)
    await recorder.start()
    await noted(recorder, limiter, *(Request(ip=f"192.0.2.{number}") for number in range(5)))
    trial = Request(ip="192.0.2.1", endpoint="/trial", method="GET")
    first, second = await noted(recorder, limiter, trial, trial)
    assert (first.shadow_denied, second.shadow_denied) == ((), ("trial",))
    await recorder.stop()
    found = "SELECT count(*) FROM ratekeeper_decisions WHERE endpoint = ''"
    assert await rows(url, found) == [(kept,)]
    shadows = "SELECT shadow_denied FROM ratekeeper_decisions WHERE shadow_denied <> '[]'"
    assert await rows(url, shadows) == [('["trial"]',)]


async def test_a_sample_has_about_its_share(make: Make, limiter: AsyncLimiter) -> None:
    """A tenth of five thousand is logged; a deviation of six sigmas is a one-in-10^9 event."""
    recorder = make(share=0.1)
    result = await limiter.evaluate(Request())
    for _ in range(5_000):
        recorder.note(Request(), result, 1, 0)
    assert 373 < len(recorder._noted) < 627
    await recorder.stop()


async def test_the_buffers_are_bounded(make: Make, limiter: AsyncLimiter) -> None:
    """Without a thread, decisions are dropped, and usage is counted together."""
    recorder = make()
    denied = (await noted(recorder, limiter, ANN, ANN, ANN))[-1]
    for _ in range(EVENTS_MAX + 10):
        recorder.note(ANN, denied, 1, 0)
    assert len(recorder._noted) == EVENTS_MAX
    assert recorder.dropped() >= 10
    for number in range(60_000):
        result = denied._replace(counted=((f"user:{number}", 1),))
        recorder.note(ANN, result, 1, 0)
    assert len(recorder._usage) <= 50_001
    await recorder.stop()


async def test_the_buffers_are_bounded_in_bytes(make: Make, limiter: AsyncLimiter) -> None:
    """Long fields of a request are cut."""
    recorder = make(share=1.0)
    await noted(recorder, limiter, Request(api_key="k" * 50_000, endpoint="/" * 50_000))
    await noted(recorder, limiter, Request(user="root", method="M" * 50_000))
    for _, _, _, caller, endpoint, method, identity, _ in recorder._noted:
        texts = [caller, endpoint, method, *identity]
        assert sum(len(each or "") for each in texts) < 1_500
    assert all(len(subject) < 1_000 for subject, _, _ in recorder._usage.buckets)
    await recorder.stop()


async def test_subjects_are_hashed_everywhere(
    make: Make, limiter: AsyncLimiter, url: str, tmp_path: Path
) -> None:
    """This holds for usage, decisions and the busiest subjects."""
    recorder = make(subjects="hashed")
    await recorder.start()
    await noted(recorder, limiter, ANN, ANN, ANN)
    recorder._hand_over()  # the timer would do it within a second
    await until_async(lambda: recorder.top("denied", 5)[0], "the thread has counted")
    digest = recorded_subject("user:ann", "hashed")
    assert [each.item for each in recorder.top("denied", 5)[0]] == [(digest, "users")]
    await recorder.stop()
    assert [row[0] for row in await rows(url, USAGE)] == [digest]
    assert await rows(url, "SELECT DISTINCT subject FROM ratekeeper_decisions") == [(digest,)]
    assert b"user:ann" not in (tmp_path / "records.db").read_bytes()


async def test_reports_of_workers_are_merged(
    make: Make, limiter: AsyncLimiter, tmp_path: Path
) -> None:
    """Each worker adds up the reports of the running workers."""
    one = make(live=ReportFolder(tmp_path, number=1))
    # Process 1 always exists.
    two = make(live=ReportFolder(tmp_path))
    await one.start()
    await two.start()
    await noted(one, limiter, ANN, ANN, ANN)
    await noted(two, limiter, ANN, Request(user="bob"))

    for recorder in (one, two):
        recorder._hand_over()  # the timer would do it within a second

    def both() -> bool:
        return two.top("checks", 5)[1] > 4

    await until_async(both, "the report of the other is there")
    found, total = two.top("checks", 5)
    assert [each.item for each in found] == [("user:ann", "users"), ("user:bob", "users")]
    assert found[0].count == pytest.approx(4, rel=0.2)
    assert total == pytest.approx(5, rel=0.2)
    await one.stop()
    await two.stop()


async def test_denials_in_a_row_of_all_workers(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are added; an address that any of them has allowed since is left out."""
    monkeypatch.setattr(recorders, "HAND_OVER_SECONDS", 0.02)
    one, two = make(live=ReportFolder(tmp_path, number=1)), make(live=ReportFolder(tmp_path))
    rules = "version: 1\nrules: [{id: api, by: ip, limits: 1/minute}]"
    clock = ManualClock()
    async with AsyncLimiter.from_rules(rules, clock=clock) as limiter:
        for recorder in (one, two):
            await recorder.start()
        bad, good = Request(ip="192.0.2.7"), Request(ip="192.0.2.8")
        await limiter.check(bad)
        await limiter.check(good)
        await noted(one, limiter, *[bad] * 30, *[good] * 30)
        await noted(two, limiter, *[bad] * 20)

        def listed(at_least: int) -> dict[str, int]:
            found = two.denied_in_a_row(at_least)
            return {each.address: each.denied for each, _ in found}

        both = {"192.0.2.7": 50, "192.0.2.8": 30}
        await until_async(lambda: listed(10) == both, "both workers have reported")
        assert listed(51) == {}
        clock.advance(60)
        await noted(one, limiter, good)
        await until_async(lambda: listed(10) == {"192.0.2.7": 50}, "the allowed one is left out")
        for recorder in (one, two):
            await recorder.stop()


async def test_the_number_of_drops_never_decreases(make: Make, limiter: AsyncLimiter) -> None:
    """It stays the same while a batch is between the recorder and the writing thread."""
    recorder = make()
    recorder._usage = UsageBuckets(buckets_max=0, others_max=0)
    recorder._buckets = recorder._usage.buckets
    await noted(recorder, limiter, ANN, ANN)
    assert recorder.dropped() == 2
    handed: list[Any] = []
    waiting = SimpleNamespace(call_soon_threadsafe=lambda *given: handed.append(given))
    recorder._loop = cast("asyncio.AbstractEventLoop", waiting)
    recorder._hand_over()
    assert (len(handed), recorder.dropped()) == (1, 2)


def test_a_missing_report_folder_is_logged_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning is repeated only if the folder existed in between."""
    recorder = make(live=ReportFolder(tmp_path / "run"))
    for _ in range(2):
        recorder._publish()
        recorder._publish()
        (tmp_path / "run").mkdir()
        recorder._publish()
        shutil.rmtree(tmp_path / "run")
    assert caplog.text.count("report for other workers cannot be written") == 2


async def test_counts_decay_by_the_monotonic_clock(make: Make, limiter: AsyncLimiter) -> None:
    """Setting the wall clock back changes nothing."""
    wall_s, passed_s = 1_800_000_000.0, 0.0
    recorder = make(now_ns=lambda: int(wall_s * 1e9), monotonic_s=lambda: passed_s)
    await recorder.start()
    await noted(recorder, limiter, *[ANN] * 80)
    recorder._hand_over()  # the timer would do it within a second
    await until_async(lambda: recorder.top("checks", 1)[0], "the thread has counted")
    wall_s, passed_s = wall_s - 3_600, 120.0
    found, total = recorder.top("checks", 1)
    assert (found[0].count, total) == (20, 20)
    await recorder.stop()


async def test_an_unavailable_database_does_not_affect_checks(
    limiter: AsyncLimiter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busiest subjects are known, and the shutdown is quick."""
    monkeypatch.setattr(recorders, "STOP_SECONDS_MAX", 0.5)
    gone = f"sqlite:///{tmp_path / 'nowhere' / 'records.db'}"
    recorder = Recorder(
        lambda row_of: Sink(Database(gone), pace=QUICK, row_of=row_of), Records(Database(gone))
    )
    await recorder.start()
    for _ in range(3):
        await noted(recorder, limiter, ANN)
    recorder._hand_over()  # the timer would do it within a second
    await until_async(lambda: recorder.top("checks", 1)[0], "the thread has counted")
    await asyncio.wait_for(recorder.stop(), 10)
    assert not recorder._thread.is_alive()


async def test_a_full_batch_is_handed_over_at_once(
    make: Make, limiter: AsyncLimiter, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand decisions do not wait for the timer."""
    monkeypatch.setattr(recorders, "HAND_OVER_SECONDS", 3_600.0)
    recorder = make()
    await recorder.start()
    denied = (await noted(recorder, limiter, ANN, ANN, ANN))[-1]
    for _ in range(999):
        recorder.note(ANN, denied, 1, time.time_ns())
    await until_async(lambda: recorder._sink and recorder._sink.written == 1_000, "written")
    await recorder.stop()
    assert await rows(url, "SELECT count(*) FROM ratekeeper_decisions") == [(1_000,)]


async def test_records_carry_the_region(make: Make, limiter: AsyncLimiter, url: str) -> None:
    """Regions that share a database have rows of their own."""
    for region in ("eu", "us"):
        recorder = make(region=region)
        await recorder.start()
        await noted(recorder, limiter, ANN, ANN, ANN)
        await recorder.stop()
    usage = "SELECT region, subject, allowed, denied FROM ratekeeper_usage ORDER BY region"
    assert await rows(url, usage) == [("eu", "user:ann", 2, 1), ("us", "user:ann", 0, 3)]
    decisions = "SELECT region, count(*) FROM ratekeeper_decisions GROUP BY region ORDER BY region"
    assert await rows(url, decisions) == [("eu", 1), ("us", 3)]


async def test_an_excess_is_recorded_and_bounded(make: Make, url: str) -> None:
    """From any thread, with the units above the limit; at most EXCESS_MAX in a second."""
    recorder = make(region="eu", monotonic_s=lambda: 7.5)
    recorder.note_excess("plan", "user:ann", "us", 1)  # it has not started: dropped
    await recorder.start()
    for _ in range(EXCESS_MAX + 5):
        await asyncio.to_thread(recorder.note_excess, "plan", "user:ann", "us", 40)
    await recorder.stop()
    found = "SELECT DISTINCT outcome, rule, subject, cost, region, node FROM ratekeeper_decisions"
    assert await rows(url, found) == [("excess", "plan", "user:ann", 40, "eu", "eu-1")]
    count = await rows(url, "SELECT count(*) FROM ratekeeper_decisions")
    assert (count, recorder.dropped()) == ([(EXCESS_MAX,)], 6)


async def test_an_excess_has_the_recorded_form_of_the_subject(make: Make, url: str) -> None:
    """A subject that is hashed in other records is hashed here."""
    recorder = make(subjects="hashed")
    await recorder.start()
    recorder.note_excess("plan", "user:ann", "us", 40)
    await recorder.stop()
    [(subject,)] = await rows(url, "SELECT subject FROM ratekeeper_decisions")
    assert "ann" not in subject
