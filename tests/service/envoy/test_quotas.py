"""The stream of an Envoy: its buckets, blanket answers, bounds, and streams that are refused."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import AsyncLimiter
from ratekeeper.core.clock import ManualClock
from ratekeeper.metrics.counters import Counters
from ratekeeper.service.envoy import quotas, shares
from ratekeeper.service.envoy.buckets import Assigned
from ratekeeper.service.envoy.quotas import QuotaService
from ratekeeper.service.grpc.calls import CallError, Status
from ratekeeper.service.http.tokens import Tokens, create_token
from tests.service.envoy.streams import FakeCall, FakeCells, FakeLimiter

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

    def __init__(self, limiter: Any, clock: ManualClock, **options: Any) -> None:
        self.clock = clock
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
    async with (
        AsyncLimiter.from_rules(rules) as limiter,
        running(StreamTest(limiter, ManualClock(), **options)) as test,
    ):
        yield test


@asynccontextmanager
async def running(test: StreamTest) -> AsyncIterator[StreamTest]:
    """Yield it; close its streams at the end."""
    yield test
    test.service.stop()
    await asyncio.wait_for(asyncio.gather(*test.ended), 10)
    await test.service.ended()
    assert not test.service.streams
    assert not test.service._sharing
    assert (test.counters.quota_streams, test.counters.quota_buckets) == (0, 0)


class RateTest(StreamTest):
    """A service whose rules are assigned as rates, with a store that a test can break."""

    def __init__(self, limits: str = "100/s", on_failure: str = "open") -> None:
        clock = ManualClock(1_000)
        self.limiter = FakeLimiter(rate_rules(limits), clock)
        super().__init__(self.limiter, clock, on_failure=on_failure)

    @property
    def cells(self) -> FakeCells:
        """The cells of the store."""
        return self.limiter.cells

    def table(self) -> shares.Table:
        """Return the only table in the store."""
        (value,) = self.cells.values.values()
        return shares.decode(value)


def rate_rules(limits: str) -> str:
    """Return a rule for all tenants."""
    return (
        f"{{version: 1, rules: [{{id: tenants, match: {{tenant: '*'}}, by: tenant, "
        f"limits: {limits}, consistency: leased, envoy_quota: rate}}]}}"
    )


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams serve waiting buckets every few milliseconds."""
    monkeypatch.setattr(quotas, "TICK_S", 0.005)


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


async def test_a_domain_that_no_rule_has_is_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its buckets are not limited, as by the other filter."""
    async with streams() as test:
        envoy = test.open()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                envoy.report((ACME, 1, 0), domain="shopp")
                assert await envoy.answer() == [(ACME, "allow all")]
            test.clock.advance(quotas.LOG_EVERY_S)
            envoy.report((ACME, 1, 0), domain="shopp")
            await envoy.answer()
        first, _ = [record.message for record in caplog.records]
        assert "domain 'shopp': all requests pass in some buckets of Envoys: no rule" in first
        assert test.counters.quota_blankets == {"unlimited": 4}


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that the service does after it has answered a report."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - the service sets no event
            await asyncio.sleep(0)


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
        await until(lambda: test.counters.quota_buckets == 0)
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
        await until(lambda: len(stream.buckets) <= 3)
        await until(lambda: test.counters.quota_buckets == len(stream.buckets))


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


async def test_a_long_report_is_answered_in_parts_and_a_bucket_listed_twice_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of buckets that are remembered is bounded too."""
    monkeypatch.setattr(quotas, "REMEMBERED_MAX", 100)
    async with streams() as test:
        envoy = test.open(x_envoy_node="a\nb")
        ids = [{"tenant": f"{at}"} for at in range(3 * quotas.TOGETHER_MAX)]
        envoy.report(*((each, 1, 0) for each in (ids[0], *ids)))
        answers = [answer for _ in range(4) for answer in await envoy.answer()]
        assert answers == [(each, "allow all") for each in ids]
        (stream,) = test.service.streams.values()
        assert (stream.name, len(stream.buckets)) == ("a?b", 100)
        await until(lambda: test.counters.quota_buckets == 100)


async def test_a_stream_that_ends_in_a_bad_report_leaves_no_count() -> None:
    """The buckets before the bad one were remembered."""
    async with streams() as test:
        test.open().report((ACME, 1, 0), ({}, 1, 0))
        await test.error()
        assert (test.counters.quota_streams, test.counters.quota_buckets) == (0, 0)


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
                call.report((MALLORY, 1, 0))
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


# ── Shares of a rate ───────────────────────────────────────────────────────────────────────────


async def test_a_bucket_gets_a_share_which_each_report_renews() -> None:
    """It starts full after DENY_ALL; a renewal keeps its tokens."""
    async with running(RateTest()) as test:
        envoy = test.open(x_envoy_node="a")
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "deny all"), (ACME, "100, 100/1s")]
        test.clock.advance(5)
        envoy.report((ACME, 80, 0))
        assert await envoy.answer() == [(ACME, "100, 100/1s")]
        assert test.counters.quota_assignments == {"rate": 1, "renewal": 1}
        (shown,) = test.service.statuses("node-1", 7)
        (part,) = shown.parts
        assert (shown.envoy, shown.node, shown.worker, shown.buckets) == ("a", "node-1", 7, 1)
        assert (part.bucket, part.rule, part.quota) == ("tenant=acme", "tenants", "rate")
        assert (part.has, part.demand) == ("100/s of 100/s, burst 100", 16.2)


async def test_a_second_envoy_gets_its_share_when_the_first_has_reported() -> None:
    """The first is lowered between reports, and what it gives back waits for its next report."""
    async with running(RateTest()) as test:
        first, second = test.open(x_envoy_node="a"), test.open(x_envoy_node="b")
        first.report((ACME, 1, 0))
        await first.answer()
        second.report((ACME, 0, 1))
        assert await second.answer() == [(ACME, "deny all")]
        assert (await first.answer())[0][1].startswith("50, 50/")
        assert len(test.table().entries) == 2
        test.clock.advance(5)
        first.report((ACME, 250, 0))
        await first.answer()
        # Its bucket is paid from the rate that is free now.
        test.clock.advance(1)
        # Between its reports, because it waits.
        (refused, (bucket, text)) = await second.answer()
        assert (refused, bucket) == ((ACME, "deny all"), ACME)
        assert int(text.partition(",")[0]) > 0
        reserved = test.table().reserved
        assert (reserved.rate, reserved.burst) <= (100, 100)


async def test_a_stream_that_ends_leaves_its_share_reserved() -> None:
    """Its Envoy decides by it until it expires."""
    async with running(RateTest()) as test:
        envoy = test.open(x_envoy_node="a")
        envoy.report((ACME, 1, 0))
        await envoy.answer()
        envoy.put(None)
        await asyncio.wait_for(test.ended.pop(), 10)
        await test.service.ended()
        (entry,) = test.table().entries
        assert entry.is_lost
        assert entry.reserved.rate == 100


async def test_the_failure_policy_answers_a_new_bucket_while_the_store_is_down() -> None:
    """When the store is back, the bucket gets a share, without waiting for its next report."""
    for policy, answer in (("open", "allow all"), ("closed", "deny all")):
        async with running(RateTest(on_failure=policy)) as test:
            test.cells.fails = True
            envoy = test.open()
            envoy.report((ACME, 1, 0))
            assert await envoy.answer() == [(ACME, answer)]
            assert test.counters.quota_blankets == {"store": 1}
            (part,) = test.service.statuses("n", 1)[0].parts
            assert (part.rule, part.has) == ("tenants", "store")
            await asyncio.sleep(0.05)
            assert not envoy.unread  # the same answer is not sent again
            test.cells.fails = False
            assert await envoy.answer() == [(ACME, "deny all"), (ACME, "100, 100/1s")]


async def test_an_assignment_outlives_a_short_outage_of_the_store() -> None:
    """The call is repeated between reports; shortly before the end the failure policy answers."""
    async with running(RateTest()) as test:
        envoy = test.open()
        envoy.report((ACME, 1, 0))
        await envoy.answer()
        test.cells.fails = True
        test.clock.advance(5)
        envoy.report((ACME, 1, 0))
        await asyncio.sleep(0.05)
        assert not envoy.unread
        test.clock.advance(2.9)
        await asyncio.sleep(0.05)
        assert not envoy.unread
        test.clock.advance(0.2)
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "allow all")]


async def test_a_rule_has_a_bound_of_buckets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Above it, the failure policy answers, and a warning says what to do."""
    monkeypatch.setattr(quotas, "BUCKETS_MAX", 2)
    async with running(RateTest(on_failure="closed")) as test:
        envoy = test.open()
        ids = [{"tenant": f"t{at}"} for at in range(4)]
        with caplog.at_level(logging.WARNING):
            envoy.report(*((each, 1, 0) for each in ids))
            answers = await envoy.answer()
        assert [text for _, text in answers[-2:]] == ["deny all", "deny all"]
        assert len(answers) == 6
        assert test.counters.quota_blankets == {"too_many_buckets": 2}
        (record,) = caplog.records
        assert "no request passes in some buckets" in record.message
        assert "the rule has too many buckets; count by a tenant, plan or" in record.message
        # A bucket that is abandoned makes room.
        for _ in range(quotas.IDLE_REPORTS):
            envoy.report((ids[0], 0, 0), *((each, 1, 0) for each in ids[1:]))
            answers = await envoy.answer()
        assert await envoy.answer() == [(ids[0], "abandon")]
        assert answers == [
            *((ids[1], "100, 100/1s"), (ids[2], "deny all"), (ids[2], "100, 100/1s")),
            (ids[3], "deny all"),
        ]


async def test_other_limits_take_effect_at_the_next_report() -> None:
    """Also with another fill interval, which Envoy would ignore without DENY_ALL."""
    async with running(RateTest()) as test:
        envoy = test.open()
        envoy.report((ACME, 1, 0))
        await envoy.answer()
        test.limiter.use(rate_rules("10/minute"))
        test.clock.advance(13)  # the old share has expired
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "deny all"), (ACME, "10, 10/60s")]
        test.limiter.use("{version: 1}")
        envoy.report((ACME, 1, 0))
        assert await envoy.answer() == [(ACME, "allow all")]


async def test_a_lower_limit_lowers_the_share_that_an_envoy_has() -> None:
    """It is not taken away until the old one has expired: the Envoy goes on at the lower rate."""
    async with running(RateTest()) as test:
        envoy = test.open(x_envoy_node="a")
        envoy.report((ACME, 1, 0))
        await envoy.answer()
        test.limiter.use(rate_rules("60/s"))
        test.clock.advance(5)
        envoy.report((ACME, 400, 0))
        assert await envoy.answer() == [(ACME, "60, 60/1s")]
        assert test.table().reserved == (100, 100)
        test.clock.advance(5)
        envoy.report((ACME, 400, 0))
        await envoy.answer()
        assert test.table().reserved == (60, 60)


async def test_two_buckets_of_one_subject_are_both_taken_over() -> None:
    """When their Envoy returns, each keeps its own share."""
    async with running(RateTest()) as test:
        buckets = [{**ACME, "path": path} for path in "xy"]
        for _ in range(2):
            envoy = test.open(x_envoy_node="a")
            envoy.report(*((each, 9, 9) for each in buckets))
            await envoy.answer()
            for _ in range(3):
                test.clock.advance(5)
                envoy.report(*((each, 500, 500) for each in buckets))
                await envoy.answer()
            envoy.put(None)
            await asyncio.wait_for(test.ended.pop(), 10)
            await test.service.ended()
            assert len(test.table().entries) == 2
            assert min(each.assigned.rate for each in test.table().entries) >= 45


async def test_a_client_that_does_not_read_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that arrives too late would outlive the reservation of its share."""
    monkeypatch.setattr(quotas, "SEND_NS_MAX", 10_000_000)
    async with running(RateTest()) as test:
        envoy = test.open()
        envoy.reads.clear()
        envoy.report((ACME, 1, 0))
        error = await test.error()
        assert (error.status, error.message) == (
            Status.UNAVAILABLE,
            "the client does not read its messages",
        )


async def test_a_silent_stream_is_ended() -> None:
    """An Envoy reports every 5 s, even without buckets."""
    async with running(RateTest()) as test:
        envoy = test.open()
        envoy.report((ACME, 1, 0))
        await envoy.answer()
        test.clock.advance(31)
        error = await test.error()
        assert error.status is Status.DEADLINE_EXCEEDED
        assert "there was no report for 30 s" in error.message


# ── Any sequence of events ─────────────────────────────────────────────────────────────────────

EVENTS = st.one_of(
    st.tuples(
        st.just("report"),
        st.integers(0, 1),
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(0, 9)), max_size=5),
    ),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 5, 13, 29])),
    st.tuples(st.just("store"), st.booleans()),
    st.tuples(st.just("rules"), st.sampled_from(["100/s", "9/minute", "1/365d"])),
)


def check_books(service: QuotaService) -> None:
    """Assert that all tables of the service say the same."""
    sharing: dict[str, set[quotas.QuotaBucket]] = {}
    for stream in service.streams.values():
        buckets = stream.buckets.values()
        assert stream._id_bytes == sum(len(each.id) for each in buckets)
        rules = [each.target.rule for each in buckets if isinstance(each.target, Assigned)]
        assert stream.by_rule == Counter(rules)
        assert len(rules) <= 3
        for each in buckets:
            if each.part is not None:
                assert isinstance(each.target, Assigned)
                sharing.setdefault(each.part.cell, set()).add(each)
    assert service._sharing == sharing
    counters = service._counters
    assert counters.quota_buckets == sum(len(each.buckets) for each in service.streams.values())


async def until_books_agree(service: QuotaService, reports: int) -> None:
    """Wait until so many reports were answered, and the books agree."""
    for _ in range(2_000):
        await asyncio.sleep(0.001)
        with suppress(AssertionError):
            assert service._counters.quota_reports == reports
            check_books(service)
            return
    check_books(service)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(EVENTS, max_size=25))
def test_the_books_agree_after_any_events(events: list[Any]) -> None:
    """Two Envoys report, the store fails, the rules change and time passes."""

    async def main() -> None:
        async with running(RateTest()) as test:
            assert isinstance(test, RateTest)
            calls = [test.open(x_envoy_node=name) for name in "ab"]
            reports = 0
            for kind, *values in (("wait", 0), *events):
                if kind == "report":
                    usages = [({"tenant": f"t{at}"}, *counts) for at, *counts in values[1]]
                    calls[values[0]].report(*usages)
                    reports += 1
                elif kind == "store":
                    test.cells.fails = not values[0]
                elif kind == "rules":
                    test.limiter.use(rate_rules(values[0]))
                else:
                    test.clock.advance(values[0])
                    for call in calls:  # an Envoy reports, even without buckets
                        call.report()
                    reports += 2
                await until_books_agree(test.service, reports)
            test.cells.fails = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quotas, "BUCKETS_MAX", 3)
        patch.setattr(quotas, "TICK_S", 0.001)
        asyncio.run(main())
