"""Envoy's RateLimitQuotaService (experimental): one stream for each Envoy.

An Envoy opens one stream. It reports a bucket when the first request enters it, and every 5 s all
of its buckets, with the requests that it has allowed and denied since the last report. The service
answers with assignments. Envoy decides by them until they expire, and never waits for the service.

Each report renews the assignments of its buckets. A bucket without requests in IDLE_REPORTS reports
is abandoned: Envoy never forgets one itself, and lists all of them in each report. Between reports
a timer serves buckets that wait for units.

**Bounds.** A stream has at most BUCKETS_MAX buckets of a rule with an assignment, and ID_BYTES_MAX
bytes of ids. Any bucket beyond them gets a blanket answer and is not remembered.

**Failures.** A report that cannot be read ends the stream as INVALID_ARGUMENT. If the store cannot
be reached, the failure policy of the rule makes a blanket answer. When the stream ends, Envoy
decides by its assignments until they expire, so the service keeps their units until then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from typing import Final

from google.protobuf.message import DecodeError

from tollkeeper.core.clock import NS_PER_SECOND, Clock, SystemClock
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import Request
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.metrics.counters import Counters
from tollkeeper.service.envoy.buckets import (
    WARNINGS,
    Assigned,
    Blanket,
    Demand,
    Target,
    add_abandon,
    add_blanket,
    on_failure_of,
    target_of,
)
from tollkeeper.service.envoy.descriptors import VALUE_LENGTH_MAX, countable, request_of
from tollkeeper.service.envoy.protocol.messages import (
    RateLimitQuotaResponse,
    RateLimitQuotaUsageReports,
)
from tollkeeper.service.grpc.calls import CallError, GrpcCall, Status, StreamingCall
from tollkeeper.service.http.tokens import OPEN, Token, TokenRejection, Tokens, confined

# Envoy sends its own name under this key of `initial_metadata`.
NODE_METADATA: Final = "x-envoy-node"
NODE_LENGTH_MAX: Final = 128
STREAMS_MAX: Final = 1_000
# Of one rule in one stream. Each costs the store a call at each report.
BUCKETS_MAX: Final = 2_000
# Of all buckets of a stream that are remembered.
ID_BYTES_MAX: Final = 16 * 1024 * 1024
IDLE_REPORTS: Final = 3
# A bucket that Envoy does not list any more is forgotten. A report comes every 5 s.
UNLISTED_NS: Final = 60 * NS_PER_SECOND
TICK_S: Final = 1.0
# Buckets whose parts are decided at the same time.
TOGETHER_MAX: Final = 64
LOG_EVERY_NS: Final = 60 * NS_PER_SECOND

log = logging.getLogger("tollkeeper.envoy")

BucketUsage = RateLimitQuotaUsageReports.BucketQuotaUsage


class QuotaBucket:
    """One bucket of one Envoy."""

    __slots__ = ("allowed", "demand", "id", "idle_reports", "reported_ns", "request", "target")

    def __init__(self, bucket: bytes, request: Request, now_ns: int) -> None:
        self.id = bucket
        """The id as Envoy sent it, encoded."""
        self.request = request
        self.demand = Demand(now_ns)
        self.allowed = 0
        """Requests that Envoy has allowed, by its reports of this stream."""
        self.idle_reports = 0
        """Reports without a request, one after another."""
        self.reported_ns = now_ns
        self.target: Target | None = None
        """What the bucket got last."""

    def note(self, usage: BucketUsage, now_ns: int) -> None:
        """Take note of the counts in a report."""
        requests = usage.num_requests_allowed + usage.num_requests_denied
        self.idle_reports = 0 if requests else self.idle_reports + 1
        self.allowed += usage.num_requests_allowed
        self.demand.note(requests, now_ns)
        self.reported_ns = now_ns


class QuotaStream:
    """One Envoy: its name, and its buckets."""

    def __init__(self, name: str, token: Token, now_ns: int) -> None:
        self.id = os.urandom(8).hex()
        """Names the holder of the shares. Two streams of one Envoy are two holders."""
        self.name = name
        self.token = token
        self.domain = ""
        self.since_ns = self.reported_ns = now_ns
        self.buckets: dict[bytes, QuotaBucket] = {}
        self.by_rule: dict[str, int] = {}
        """How many buckets have assignments of each rule."""
        self._id_bytes = 0

    def bucket_of(self, usage: BucketUsage, now_ns: int) -> QuotaBucket:
        """Return the bucket of a report, with its counts. Raises CallError for an invalid id."""
        found = usage.bucket_id.SerializeToString(deterministic=True)
        bucket = self.buckets.get(found)
        if bucket is None:
            bucket = QuotaBucket(found, self._request_of(usage), now_ns)
            if self._id_bytes + len(found) <= ID_BYTES_MAX:
                self.buckets[found] = bucket
                self._id_bytes += len(found)
        bucket.note(usage, now_ns)
        return bucket

    def _request_of(self, usage: BucketUsage) -> Request:
        try:
            request = request_of(self.domain, list(usage.bucket_id.bucket.items()))
        except ConfigError as error:
            raise CallError(Status.INVALID_ARGUMENT, f"a bucket: {error}") from None
        found = confined(self.token, request)
        if isinstance(found, TokenRejection):
            raise CallError(Status.PERMISSION_DENIED, found.detail)
        return found

    def may_assign(self, bucket: QuotaBucket, rule: str) -> bool:
        """Return True if the rule may have one more bucket here, or has this one."""
        if bucket.id not in self.buckets:
            return False
        has = isinstance(bucket.target, Assigned) and bucket.target.rule == rule
        return has or self.by_rule.get(rule, 0) < BUCKETS_MAX

    def use(self, bucket: QuotaBucket, target: Target) -> None:
        """Take note of what a bucket gets."""
        self._count(bucket.target, -1)
        self._count(target, 1)
        bucket.target = target

    def _count(self, target: Target | None, change: int) -> None:
        if isinstance(target, Assigned):
            left = self.by_rule.get(target.rule, 0) + change
            if left:
                self.by_rule[target.rule] = left
            else:
                del self.by_rule[target.rule]

    def forget(self, bucket: QuotaBucket) -> None:
        """Forget a bucket."""
        if self.buckets.pop(bucket.id, None) is not None:
            self._id_bytes -= len(bucket.id)
            self._count(bucket.target, -1)

    def unlisted(self, now_ns: int) -> list[QuotaBucket]:
        """Return the buckets that Envoy has not listed for a long time."""
        before_ns = now_ns - UNLISTED_NS
        return [each for each in self.buckets.values() if each.reported_ns < before_ns]


class QuotaService:
    """Implements StreamRateLimitQuotas with a limiter that has rules."""

    def __init__(
        self,
        limiter: AsyncLimiter,
        *,
        tokens: Tokens | None = None,
        on_failure: FailurePolicy = "open",
        clock: Clock | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Assign the limits of the rules of `limiter`.

        `tokens`      the tokens of Envoys; None: every Envoy is accepted.
        `on_failure`  the failure policy of rules that have none.
        `counters`    the counters of streams, reports and assignments.
        """
        self._limiter = limiter
        self._tokens = tokens
        self._on_failure = on_failure
        self._clock = clock or SystemClock()
        self._counters = counters or Counters()
        self._stopping = asyncio.Event()
        self._logged_ns: dict[str, int] = {}
        self.streams: dict[str, QuotaStream] = {}

    def stop(self) -> None:
        """End all streams. The Envoys connect to another worker or node."""
        self._stopping.set()

    # ── A stream ───────────────────────────────────────────────────────────────────────────────

    async def stream(self, call: StreamingCall) -> None:
        """Serve one Envoy until it goes away."""
        try:
            stream = self._open(call)
        except CallError as error:
            self._count(error.status)
            raise
        self._counters.quota_streams = len(self.streams)
        try:
            await self._serve(stream, call)
            self._count(Status.OK)
        except CallError as error:
            self._count(error.status)
            raise
        finally:
            del self.streams[stream.id]
            self._counters.quota_streams = len(self.streams)
            self._counters.quota_buckets -= len(stream.buckets)

    def _open(self, call: StreamingCall) -> QuotaStream:
        token = self._permitted(call)
        if len(self.streams) >= STREAMS_MAX:
            raise CallError(
                Status.RESOURCE_EXHAUSTED, f"this worker has {STREAMS_MAX:,} streams already"
            )
        name = (call.metadata(NODE_METADATA) or "")[:NODE_LENGTH_MAX]
        if name and any(each.name == name for each in self.streams.values()):
            self._log_seldom(
                f"name {name}",
                f"two streams have {NODE_METADATA}={show(name)}; give each Envoy its own name. "
                f"They count as two Envoys.",
            )
        stream = QuotaStream(name, token, self._clock.now_ns())
        self.streams[stream.id] = stream
        return stream

    def _permitted(self, call: GrpcCall) -> Token:
        if self._tokens is None:
            return OPEN
        token = self._tokens.permitted(call.metadata("authorization"), "check")
        if isinstance(token, TokenRejection):
            status = Status.UNAUTHENTICATED if token.status == 401 else Status.PERMISSION_DENIED
            raise CallError(status, token.detail)
        return token

    async def _serve(self, stream: QuotaStream, call: StreamingCall) -> None:
        """Answer reports, and serve waiting buckets in between. One task does both, in turn."""
        stopped = asyncio.ensure_future(self._stopping.wait())
        receiving: asyncio.Future[bytes | None] = asyncio.ensure_future(call.receive())
        try:
            while not self._stopping.is_set():
                await asyncio.wait(
                    (receiving, stopped), timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if receiving.done():
                    body = receiving.result()
                    if body is None:
                        return
                    receiving = asyncio.ensure_future(call.receive())
                    stream.token = self._permitted(call)
                    response = await self._reported(stream, body)
                else:
                    response = await self._ticked(stream)
                if response.bucket_action:
                    await call.send(response.SerializeToString())
        finally:
            receiving.cancel()
            stopped.cancel()

    # ── A report ───────────────────────────────────────────────────────────────────────────────

    async def _reported(self, stream: QuotaStream, body: bytes) -> RateLimitQuotaResponse:
        """Return the answer to a report: an action for each bucket that needs one."""
        report = _decoded(stream, body)
        now_ns = self._clock.now_ns()
        stream.reported_ns = now_ns
        self._counters.quota_reports += 1
        response = RateLimitQuotaResponse()
        buckets = []
        known = len(stream.buckets)
        for usage in report.bucket_quota_usages:
            bucket = stream.bucket_of(usage, now_ns)
            if bucket.idle_reports >= IDLE_REPORTS:
                self._abandon(stream, bucket, response)
            else:
                buckets.append(bucket)
        for bucket in stream.unlisted(now_ns):
            stream.forget(bucket)
        self._counters.quota_buckets += len(stream.buckets) - known
        await self._assign(stream, buckets, response)
        return response

    async def _ticked(self, stream: QuotaStream) -> RateLimitQuotaResponse:  # noqa: ARG002 - soon
        """Return the actions for buckets that wait for units."""
        return RateLimitQuotaResponse()

    async def _assign(
        self, stream: QuotaStream, buckets: Iterable[QuotaBucket], response: RateLimitQuotaResponse
    ) -> None:
        """Add an action for each bucket. Buckets with parts of limits are decided together."""
        compiled = self._limiter.compiled_rules
        for bucket in buckets:
            target = target_of(compiled.plan(bucket.request, 1), self._on_failure)
            if isinstance(target, Assigned):
                if not stream.may_assign(bucket, target.rule):
                    target = on_failure_of(target.checks, "too_many_buckets", self._on_failure)
                else:
                    target = on_failure_of(target.checks, "store", self._on_failure)
            stream.use(bucket, target)
            if isinstance(target, Blanket):
                self._add_blanket(response, bucket, target)

    def _add_blanket(
        self, response: RateLimitQuotaResponse, bucket: QuotaBucket, target: Blanket
    ) -> None:
        add_blanket(response, bucket.id, allow=target.allow)
        self._count_assignment("allow_all" if target.allow else "deny_all")
        blankets = self._counters.quota_blankets
        blankets[target.reason] = blankets.get(target.reason, 0) + 1
        if target.reason in WARNINGS:
            answer = "all requests pass" if target.allow else "no request passes"
            self._log_seldom(
                f"{target.reason} {target.rule}",
                f"rule {target.rule}: {answer} in some buckets of Envoys: "
                f"{WARNINGS[target.reason]}",
            )

    def _abandon(
        self, stream: QuotaStream, bucket: QuotaBucket, response: RateLimitQuotaResponse
    ) -> None:
        stream.forget(bucket)
        add_abandon(response, bucket.id)
        self._count_assignment("abandon")

    # ── Counts ─────────────────────────────────────────────────────────────────────────────────

    def _count(self, status: Status) -> None:
        counted = self._counters.grpc_requests
        counted[status.name] = counted.get(status.name, 0) + 1

    def _count_assignment(self, kind: str) -> None:
        counted = self._counters.quota_assignments
        counted[kind] = counted.get(kind, 0) + 1

    def _log_seldom(self, what: str, text: str) -> None:
        """Log a warning, unless the same was logged in the last minute."""
        now_ns = self._clock.now_ns()
        if now_ns >= self._logged_ns.get(what, 0):
            if len(self._logged_ns) >= STREAMS_MAX:
                self._logged_ns.clear()
            self._logged_ns[what] = now_ns + LOG_EVERY_NS
            log.warning("%s", text)


def _decoded(stream: QuotaStream, body: bytes) -> RateLimitQuotaUsageReports:
    """Return the report. Raises CallError if it is none, or of another domain than the first."""
    try:
        report = RateLimitQuotaUsageReports.FromString(body)
    except DecodeError:
        raise CallError(
            Status.INVALID_ARGUMENT, "this is not a RateLimitQuotaUsageReports"
        ) from None
    domain = report.domain
    if not stream.domain:
        if not 1 <= len(domain) <= VALUE_LENGTH_MAX:
            raise CallError(
                Status.INVALID_ARGUMENT,
                f"domain={show(domain)} is not text of 1 to {VALUE_LENGTH_MAX} characters; "
                f"give the filter rate_limit_quota one, for example domain: shop",
            )
        stream.domain = countable(domain)
    elif domain and countable(domain) != stream.domain:
        raise CallError(
            Status.INVALID_ARGUMENT,
            f"a stream has one domain: the first report was of {show(stream.domain)}, and this "
            f"one is of {show(domain)}",
        )
    return report
