"""The stream of an Envoy: its buckets, blanket answers, bounds, and streams that are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.envoy.streams import FakeCall
from tollkeeper import AsyncLimiter
from tollkeeper.core.clock import ManualClock
from tollkeeper.metrics.counters import Counters
from tollkeeper.service.envoy import quotas
from tollkeeper.service.envoy.quotas import QuotaService
from tollkeeper.service.grpc.calls import CallError, Status
from tollkeeper.service.http.tokens import Tokens, create_token

RULES = {
    "version": 1,
    "rules": [
        {"id": "plain", "match": {"attributes": {"name": "plain"}}, "by": [], "limits": "9/s"}
    ],
    "deny": ["tenant:mallory"],
}
ACME, MALLORY = {"tenant": "acme"}, {"tenant": "mallory"}
PLAIN = {"name": "plain"}


class StreamTest:
    """A service and the streams that are open on it."""

    def __init__(self, limiter: AsyncLimiter, **options: Any) -> None:
        self.clock = ManualClock()
        self.counters = Counters()
        self.service = QuotaService(limiter, clock=self.clock, counters=self.counters, **options)
        self.ended: list[asyncio.Task[None]] = []

    def open(self, **metadata: str) -> FakeCall:
        """Open a stream."""
        call = FakeCall(**metadata)
        self.ended.append(asyncio.create_task(self.service.stream(call)))
        return call

    async def error(self) -> CallError:
        """Return the error that ended the stream opened last."""
        with pytest.raises(CallError) as caught:
            await asyncio.wait_for(self.ended.pop(), 10)
        return caught.value


@asynccontextmanager
async def streams(rules: Any = RULES, **options: Any) -> AsyncIterator[StreamTest]:
    """Yield a service with these rules; close its streams at the end."""
    async with AsyncLimiter.from_rules(rules) as limiter:
        test = StreamTest(limiter, **options)
        yield test
        test.service.stop()
        await asyncio.wait_for(asyncio.gather(*test.ended), 10)
        assert not test.service.streams
        assert (test.counters.quota_streams, test.counters.quota_buckets) == (0, 0)


async def test_every_report_renews_the_blanket_answers_of_its_buckets() -> None:
    """A report without buckets gets no response."""
    async with streams() as test:
        envoy = test.open()
        envoy.report((ACME, 1, 0), (MALLORY, 1, 0))
        expected = [(ACME, "allow all"), (MALLORY, "deny all")]
        assert await envoy.answer() == expected
        envoy.report()
        envoy.report((ACME, 5, 0), (MALLORY, 0, 7))
        assert await envoy.answer() == expected
        assert not envoy.unread
        assert test.counters.quota_reports == 3
        assert test.counters.quota_assignments == {"allow_all": 2, "deny_all": 2}
        assert test.counters.quota_blankets == {"unlimited": 2, "blocked": 2}
        assert (test.counters.quota_streams, test.counters.quota_buckets) == (1, 2)


async def test_a_rule_without_a_quota_answers_by_its_failure_policy_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once a minute, not at each report."""
    async with streams() as test:
        envoy = test.open()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                envoy.report((PLAIN, 1, 0))
                assert await envoy.answer() == [(PLAIN, "allow all")]
        (record,) = caplog.records
        assert "rule plain: all requests pass in some buckets" in record.message
        assert "a rule that applies has no envoy_quota" in record.message
        assert test.counters.quota_blankets == {"not_assigned": 3}
    async with streams(on_failure="closed") as test:
        envoy = test.open()
        envoy.report((PLAIN, 1, 0))
        assert await envoy.answer() == [(PLAIN, "deny all")]


async def test_an_idle_bucket_is_abandoned_and_comes_back_with_its_next_request() -> None:
    """Envoy forgets it, so that its reports stay short."""
    async with streams() as test:
        envoy = test.open()
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "allow all")]
        for _ in range(quotas.IDLE_REPORTS - 1):
            envoy.report((ACME, 0, 0))
            assert await envoy.answer() == [(ACME, "allow all")]
        envoy.report((ACME, 0, 0))
        assert await envoy.answer() == [(ACME, "abandon")]
        assert test.counters.quota_buckets == 0
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "allow all")]


async def test_a_bucket_that_envoy_does_not_list_any_more_is_forgotten() -> None:
    """Otherwise a client that reports other buckets each time would fill the memory."""
    async with streams() as test:
        envoy = test.open()
        for at in range(5):
            envoy.report(({"tenant": f"t{at}"}, 1, 0))
            await envoy.answer()
            test.clock.advance(quotas.UNLISTED_NS / 2e9)
        (stream,) = test.service.streams.values()
        assert len(stream.buckets) <= 3
        assert test.counters.quota_buckets == len(stream.buckets)


async def test_ids_beyond_the_bound_are_answered_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound is in bytes, because clients choose the values."""
    monkeypatch.setattr(quotas, "ID_BYTES_MAX", 200)
    async with streams() as test:
        envoy = test.open()
        ids = [{"tenant": f"{at:050}"} for at in range(9)]
        envoy.report(*((each, 1, 0) for each in ids))
        assert await envoy.answer() == [(each, "allow all") for each in ids]
        (stream,) = test.service.streams.values()
        assert len(stream.buckets) == 3


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"\xff\xff", "this is not a RateLimitQuotaUsageReports"),
        (b"", "domain='' is not text of 1 to 256 characters; give the filter rate_limit_quota"),
    ],
)
async def test_a_report_that_cannot_be_read_ends_the_stream(body: bytes, problem: str) -> None:
    """Its status is INVALID_ARGUMENT, and it is counted."""
    async with streams() as test:
        envoy = test.open()
        envoy.put(body)
        error = await test.error()
        assert error.status is Status.INVALID_ARGUMENT
        assert problem in error.message
        assert test.counters.grpc_requests == {"INVALID_ARGUMENT": 1}


async def test_a_bucket_without_an_id_and_another_domain_end_the_stream() -> None:
    """No correctly configured Envoy sends them."""
    async with streams() as test:
        test.open().report(({}, 1, 0))
        assert "a bucket: a descriptor has 1 to 64 entries" in (await test.error()).message
        envoy = test.open()
        envoy.report((ACME, 1, 0))
        await envoy.answer()
        envoy.report((ACME, 1, 0), domain="")
        await envoy.answer()
        envoy.report((ACME, 1, 0), domain="other")
        error = await test.error()
        assert error.status is Status.INVALID_ARGUMENT
        assert "the first report was of 'shop', and this one is of 'other'" in error.message


async def test_streams_need_a_token_and_stay_in_its_scope(tmp_path: Path) -> None:
    """A token that is removed ends the stream at the next report."""
    path = tmp_path / "tokens"
    secret = create_token(path, "envoy", "check", {"tenant": "acme"})
    tokens = Tokens.load(path)
    async with streams(tokens=tokens) as test:
        test.open()
        assert (await test.error()).status is Status.UNAUTHENTICATED
        envoy = test.open(authorization=f"Bearer {secret}")
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "allow all")]
        envoy.report((MALLORY, 1, 0))
        error = await test.error()
        assert error.status is Status.PERMISSION_DENIED
        assert "confined to tenant='acme'" in error.message


async def test_two_streams_of_one_name_are_two_envoys_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two Envoys with the same name each get their part."""
    async with streams() as test:
        with caplog.at_level(logging.WARNING):
            calls = [test.open(x_envoy_node="edge") for _ in range(2)]
            for call in calls:
                call.report((ACME, 1, 0))
                await call.answer()
        assert [each.name for each in test.service.streams.values()] == ["edge", "edge"]
        (record,) = caplog.records
        assert "two streams have x-envoy-node='edge'; give each Envoy its own" in record.message


async def test_a_worker_has_a_bound_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused, and a place is free again when a stream ends."""
    monkeypatch.setattr(quotas, "STREAMS_MAX", 1)
    async with streams() as test:
        first = test.open()
        first.report((ACME, 1, 0))
        await first.answer()
        test.open()
        assert (await test.error()).status is Status.RESOURCE_EXHAUSTED
        first.put(None)
        await asyncio.wait_for(test.ended.pop(), 10)
        second = test.open()
        second.report((ACME, 1, 0))
        await second.answer()
