"""Envoy's RateLimitQuotaService (experimental): one stream for each Envoy.

An Envoy opens one stream. It reports a bucket when the first request enters it, and every 5 s all
of its buckets, with the requests that it has allowed and denied since the last report. The service
answers with assignments. Envoy decides by them until they expire, and never waits for the service.

Each report renews the assignments of its buckets. A bucket without requests in IDLE_REPORTS reports
is abandoned: Envoy never forgets one itself, and lists all of them in each report. Between reports
a timer serves buckets that wait for units.

**Bounds.** A stream has at most BUCKETS_MAX buckets of a rule with an assignment, REMEMBERED_MAX in
all, and ID_BYTES_MAX bytes of ids. Any bucket beyond them gets a blanket answer and is not
remembered.

**Failures.** A report that cannot be read ends the stream as INVALID_ARGUMENT. If the store cannot
be reached, the failure policy of the rule makes a blanket answer. When the stream ends, Envoy
decides by its assignments until they expire, so the service keeps their units until then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from ratekeeper.core.clock import NS_PER_SECOND, Clock, SystemClock
from ratekeeper.core.errors import ConfigError, StoreError, show
from ratekeeper.core.model import Request
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.decide.store import Cells, shared_store
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.metrics.counters import Counters
from ratekeeper.service.envoy.buckets import (
    WARNINGS,
    Assigned,
    Blanket,
    Demand,
    Target,
    add_abandon,
    add_assignment,
    blanket,
    bucket_of,
    on_failure_of,
    printable,
    resolve,
)
from ratekeeper.service.envoy.descriptors import VALUE_LENGTH_MAX, countable, request_of
from ratekeeper.service.envoy.parts import Action, GrantPart, Part, RatePart
from ratekeeper.service.envoy.protocol.messages import (
    RateLimitQuotaResponse,
    RateLimitQuotaUsageReports,
)
from ratekeeper.service.envoy.service import permitted, refusal_of
from ratekeeper.service.envoy.shares import SEND_NS_MAX, TableFull, UnreadableTable
from ratekeeper.service.grpc.calls import CallError, GrpcCall, Status, StreamingCall
from ratekeeper.service.http.envoys import PARTS_MAX, TEXT_LENGTH_MAX, EnvoyPart, EnvoyStatus
from ratekeeper.service.http.tokens import OPEN, Token, TokenRejection, Tokens, confined

# Envoy sends its own name under this key of `initial_metadata`.
NODE_METADATA: Final = "x-envoy-node"
NODE_LENGTH_MAX: Final = 128
STREAMS_MAX: Final = 1_000
# Buckets of one rule in one stream. Each costs the store a call at each report.
BUCKETS_MAX: Final = 2_000
# The buckets of a stream that are remembered, and the bytes of their ids.
REMEMBERED_MAX: Final = 20_000
ID_BYTES_MAX: Final = 16 * 1024 * 1024
IDLE_REPORTS: Final = 3
# A bucket that Envoy does not list any more is forgotten. A report comes every 5 s.
UNLISTED_NS: Final = 60 * NS_PER_SECOND
TICK_S: Final = 1.0
# Between reports a bucket is served for so long after its last one: its Envoy may be gone.
SERVED_NS: Final = 8 * NS_PER_SECOND
# An Envoy reports every 5 s, even without buckets. A stream without a report for so long is ended.
SILENT_NS: Final = 30 * NS_PER_SECOND
# Buckets whose parts are decided at the same time.
TOGETHER_MAX: Final = 64
# While Envoy's assignment lasts longer than this, a failed call to the store is repeated.
LEFT_NS_MIN: Final = 2 * NS_PER_SECOND
END_S_MAX: Final = 5.0
LOG_EVERY_S: Final = 60.0

log = logging.getLogger("ratekeeper.envoy")

BucketUsage = RateLimitQuotaUsageReports.BucketQuotaUsage
_Item = TypeVar("_Item")


class QuotaBucket:
    """One bucket of one Envoy."""

    __slots__ = (
        *("again", "answer", "demand", "id", "idle_reports", "part", "reported"),
        *("reported_ns", "request", "target"),
    )

    def __init__(self, bucket: bytes, request: Request, now_ns: int) -> None:
        self.id = bucket
        """The id as Envoy sent it, encoded."""
        self.request = request
        self.demand = Demand(now_ns)
        self.idle_reports = 0
        """Reports without a request, one after another."""
        self.reported = (0, 0)
        """Allowed and denied requests in the last report."""
        self.reported_ns = now_ns
        self.target: Target | None = None
        """The target that the bucket got last."""
        self.part: Part | None = None
        """Its part of the limits, if the target is Assigned."""
        self.answer: Blanket | None = None
        """The blanket answer that Envoy has for it. A token bucket that follows it starts full."""
        self.again = False
        """True if it is to be decided again before its next report."""

    @property
    def waits(self) -> bool:
        """True if it is to be served between reports."""
        return self.again or (self.part is not None and self.part.waits)

    def may_abandon(self) -> bool:
        """Return True if it is idle, and has returned all units that can be returned."""
        is_idle = self.idle_reports >= IDLE_REPORTS
        return is_idle and (self.part is None or self.part.may_abandon())

    def note(self, usage: BucketUsage, now_ns: int) -> None:
        """Take note of the counts in a report."""
        allowed, denied = usage.num_requests_allowed, usage.num_requests_denied
        self.idle_reports = 0 if allowed or denied else self.idle_reports + 1
        self.demand.note(allowed + denied, now_ns)
        self.reported = allowed, denied
        self.reported_ns = now_ns
        if self.part is not None:
            self.part.note(allowed, denied, now_ns)


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
            fits = self._id_bytes + len(found) <= ID_BYTES_MAX
            if fits and len(self.buckets) < REMEMBERED_MAX:
                self.buckets[found] = bucket
                self._id_bytes += len(found)
        bucket.note(usage, now_ns)
        return bucket

    def _request_of(self, usage: BucketUsage) -> Request:
        try:
            request = request_of(self.domain, sorted(usage.bucket_id.bucket.items()))
        except ConfigError as error:
            raise CallError(Status.INVALID_ARGUMENT, f"a bucket: {error}") from None
        found = confined(self.token, request)
        if isinstance(found, TokenRejection):
            raise refusal_of(found)
        return found

    def may_assign(self, bucket: QuotaBucket, rule: str) -> bool:
        """Return True if the rule may have one more bucket here, or has this one."""
        if bucket.id not in self.buckets:
            return False
        has = isinstance(bucket.target, Assigned) and bucket.target.rule == rule
        return has or self.by_rule.get(rule, 0) < BUCKETS_MAX

    def use(self, bucket: QuotaBucket, target: Target) -> None:
        """Set the target of a bucket."""
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

    def waiting(self, now_ns: int) -> list[QuotaBucket]:
        """Return the buckets to serve between reports: those that want more, or failed."""
        after_ns = now_ns - SERVED_NS
        found = (each for each in self.buckets.values() if each.waits)
        return [*islice((each for each in found if each.reported_ns > after_ns), TOGETHER_MAX)]

    def busiest(self, at_most: int) -> list[QuotaBucket]:
        """Return the buckets with the most requests."""
        return nlargest(
            at_most, self.buckets.values(), key=lambda each: each.demand.per_second or 0
        )

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
        self._warnings = SeldomLog(
            log, logging.WARNING, LOG_EVERY_S, lambda: self._clock.now_ns() / NS_PER_SECOND
        )
        self._ending: set[asyncio.Task[None]] = set()
        self._sharing: dict[str, set[QuotaBucket]] = {}
        """The buckets of this worker that have parts of the same limit, by `Part.cell`."""
        self.streams: dict[str, QuotaStream] = {}

    def stop(self) -> None:
        """End all streams. The Envoys connect to another worker or node."""
        self._stopping.set()

    async def ended(self) -> None:
        """Wait until the parts of all streams that have ended are released."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_S_MAX)

    # ── A stream ───────────────────────────────────────────────────────────────────────────────

    async def stream(self, call: StreamingCall) -> None:
        """Serve one Envoy until it goes away."""
        try:
            stream = self._open(call)
        except CallError as error:
            self._count(error.status)
            raise
        self._count_buckets()
        try:
            await self._serve(stream, call)
            self._count(Status.OK)
        except CallError as error:
            self._count(error.status)
            raise
        finally:
            del self.streams[stream.id]
            ending = asyncio.create_task(self._end([*stream.buckets.values()], abandoned=False))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            self._count_buckets()

    def _open(self, call: StreamingCall) -> QuotaStream:
        token = self._permitted(call)
        if len(self.streams) >= STREAMS_MAX:
            raise CallError(
                Status.RESOURCE_EXHAUSTED, f"this worker has {STREAMS_MAX:,} streams already"
            )
        name = printable((call.metadata(NODE_METADATA) or "")[:NODE_LENGTH_MAX])
        if name and any(each.name == name for each in self.streams.values()):
            self._warnings.note(
                "two streams have %s=%s; give each Envoy its own name. They count as two Envoys.",
                NODE_METADATA,
                show(name),
                key=f"name {name}",
            )
        stream = QuotaStream(name, token, self._clock.now_ns())
        self.streams[stream.id] = stream
        return stream

    def _permitted(self, call: GrpcCall) -> Token:
        if self._tokens is None:
            return OPEN
        return permitted(self._tokens, call)

    async def _serve(self, stream: QuotaStream, call: StreamingCall) -> None:
        """Answer reports, and serve waiting buckets in between. One task does both, in turn."""
        stopped = asyncio.ensure_future(self._stopping.wait())
        receiving: asyncio.Future[bytes | None] = asyncio.ensure_future(call.receive())
        try:
            while not self._stopping.is_set():
                await asyncio.wait(
                    (receiving, stopped), timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not receiving.done():
                    await self._ticked(stream, call)
                    continue
                body = receiving.result()
                if body is None:
                    return
                receiving = asyncio.ensure_future(call.receive())
                stream.token = self._permitted(call)
                await self._reported(stream, body, call)
        finally:
            receiving.cancel()
            stopped.cancel()

    # ── A report ───────────────────────────────────────────────────────────────────────────────

    async def _reported(self, stream: QuotaStream, body: bytes, call: StreamingCall) -> None:
        """Answer a report: with an action for each bucket."""
        report = _decoded(stream, body)
        now_ns = self._clock.now_ns()
        stream.reported_ns = now_ns
        self._counters.quota_reports += 1
        idle: list[QuotaBucket] = []
        for usages in batched(report.bucket_quota_usages, TOGETHER_MAX):
            # A dictionary: a report may list a bucket twice.
            listed = dict.fromkeys(stream.bucket_of(usage, now_ns) for usage in usages)
            unused = [each for each in listed if each.may_abandon()]
            for bucket in unused:
                stream.forget(bucket)
                del listed[bucket]
            idle += unused
            await self._assign(stream, [*listed], call)
            await asyncio.sleep(0)  # other calls go on while a long report is answered
        unlisted = stream.unlisted(now_ns)
        for bucket in unlisted:
            stream.forget(bucket)
        self._count_buckets()
        await self._abandon(idle, call)
        await self._end(unlisted, abandoned=True)

    async def _ticked(self, stream: QuotaStream, call: StreamingCall) -> None:
        """Serve the buckets that wait. Raises CallError if the Envoy reports no more."""
        now_ns = self._clock.now_ns()
        if now_ns - stream.reported_ns > SILENT_NS:
            raise CallError(
                Status.DEADLINE_EXCEEDED,
                f"there was no report for {SILENT_NS // NS_PER_SECOND} s; Envoy reports every 5 s",
            )
        await self._assign(stream, stream.waiting(now_ns), call, renew=False)

    async def _assign(
        self,
        stream: QuotaStream,
        buckets: Sequence[QuotaBucket],
        call: StreamingCall,
        *,
        renew: bool = True,
    ) -> None:
        """Decide and send an action for each bucket, TOGETHER_MAX at a time.

        Without `renew`, an action that changes nothing is not sent.
        """
        compiled = self._limiter.compiled_rules
        for some in batched(buckets, TOGETHER_MAX):
            for bucket in some:
                target = resolve(compiled.plan(bucket.request, 1), self._on_failure)
                await self._use(stream, bucket, target)
            parts = [each for each in some if each.part is not None]
            answers = await asyncio.gather(*[self._decided(each, renew=renew) for each in parts])
            await self._send(some, dict(zip(parts, answers, strict=True)), call, renew=renew)

    async def _use(self, stream: QuotaStream, bucket: QuotaBucket, target: Target) -> None:
        """Give a bucket its target, and a new part if the limits have changed."""
        shared = shared_store(self._limiter.store)
        cells = None if shared is None else shared.cells
        if isinstance(target, Assigned):
            if not stream.may_assign(bucket, target.rule):
                target = on_failure_of(target.checks, "too_many_buckets", self._on_failure)
            elif cells is None:
                target = on_failure_of(target.checks, "store", self._on_failure)
        stream.use(bucket, target)
        if isinstance(target, Assigned) and bucket.part is not None and bucket.part.use(target):
            return
        await self._end([bucket], abandoned=True)
        if isinstance(target, Assigned) and cells is not None:
            # A share that an Envoy takes over keeps its tokens; a blanket answer has removed them.
            # Two buckets of an Envoy may count for one subject, so the name has the bucket too.
            known = bucket.answer is None and stream.name
            name = f"{stream.name}\x1f{bucket.id.hex()}" if known else ""
            bucket.part = self._part_of(bucket, target, cells, name)
            self._sharing.setdefault(bucket.part.cell, set()).add(bucket)
            bucket.part.note(*bucket.reported, bucket.reported_ns)

    def _part_of(self, bucket: QuotaBucket, target: Assigned, cells: Cells, name: str) -> Part:
        now_ns = self._clock.now_ns
        if target.quota == "rate":
            return RatePart(cells, target.checks[0], name, now_ns)
        return GrantPart(self._limiter, bucket.request, target.checks, self._envoys, now_ns)

    def _envoys(self, cell: str) -> int:
        return len(self._sharing.get(cell, ()))

    async def _decided(self, bucket: QuotaBucket, *, renew: bool) -> Action | Blanket | None:
        """Return the answer to send for a bucket with a part; None to send nothing now."""
        part, target = bucket.part, bucket.target
        if part is None or not isinstance(target, Assigned):
            raise AssertionError("the bucket has no part")
        try:
            action = await part.decide()
        except TableFull:
            return on_failure_of(target.checks, "too_many_envoys", self._on_failure)
        except (StoreError, UnreadableTable) as error:
            log.debug("rule %s: %s", target.rule, error)
            bucket.again = True
            if self._clock.now_ns() + LEFT_NS_MIN < part.until_ns:
                return None
            return on_failure_of(target.checks, "store", self._on_failure)
        bucket.again = False
        if action is None:
            return None
        if renew and action.others:
            for other in self._sharing.get(part.cell, ()):
                if other.part is not None and other.part.holder in action.others:
                    other.again = True
        return action if renew or action.changes else None

    async def _send(
        self,
        buckets: Sequence[QuotaBucket],
        answers: Mapping[QuotaBucket, Action | Blanket | None],
        call: StreamingCall,
        *,
        renew: bool,
    ) -> None:
        """Send the answers for these buckets in one message."""
        response = RateLimitQuotaResponse()
        parts: list[Part] = []
        now_ns = self._clock.now_ns()
        send_by_ns = now_ns + SEND_NS_MAX
        for bucket in buckets:
            answer = answers.get(bucket, bucket.target)
            if isinstance(answer, Blanket):
                if renew or answer != bucket.answer:
                    self._add_blanket(response, bucket, answer)
            elif isinstance(answer, Action) and answer.send_by_ns <= now_ns:
                bucket.again = True
            elif isinstance(answer, Action) and bucket.part is not None:
                add_assignment(response, bucket.id, answer.strategies, answer.ttl_s)
                self._count_assignment(answer.kind)
                bucket.part.sending()
                parts.append(bucket.part)
                bucket.answer = None
                send_by_ns = min(send_by_ns, answer.send_by_ns)
        if not response.bucket_action:
            return
        try:
            async with asyncio.timeout((send_by_ns - now_ns) / NS_PER_SECOND):
                await call.send(response.SerializeToString())
        except TimeoutError:
            # A message that arrives later would outlive the reservation of its units.
            raise CallError(Status.UNAVAILABLE, "the client does not read its messages") from None
        now_ns = self._clock.now_ns()
        for part in parts:
            part.sent(now_ns)

    def _add_blanket(
        self, response: RateLimitQuotaResponse, bucket: QuotaBucket, target: Blanket
    ) -> None:
        add_assignment(response, bucket.id, blanket(allow=target.allow))
        self._drop(bucket)
        bucket.answer = target
        self._count_assignment("allow_all" if target.allow else "deny_all")
        blankets = self._counters.quota_blankets
        blankets[target.reason] = blankets.get(target.reason, 0) + 1
        if target.reason in WARNINGS:
            answer = "all requests pass" if target.allow else "no request passes"
            domain = show(bucket.request.attributes["domain"])
            of = f"rule {target.rule}" if target.rule else f"domain {domain}"
            self._warnings.note(
                "%s: %s in some buckets of Envoys: %s",
                of,
                answer,
                WARNINGS[target.reason],
                key=f"{target.reason} {of}",
            )

    async def _abandon(self, buckets: Sequence[QuotaBucket], call: StreamingCall) -> None:
        """Make Envoy forget idle buckets."""
        response = RateLimitQuotaResponse()
        for bucket in buckets:
            add_abandon(response, bucket.id)
            self._count_assignment("abandon")
        if buckets:
            await call.send(response.SerializeToString())
            await self._end(buckets, abandoned=True)

    def _drop(self, bucket: QuotaBucket) -> None:
        """Remove the part of a bucket."""
        part, bucket.part = bucket.part, None
        if part is not None:
            sharing = self._sharing[part.cell]
            sharing.discard(bucket)
            if not sharing:
                del self._sharing[part.cell]

    async def _end(self, buckets: Sequence[QuotaBucket], *, abandoned: bool) -> None:
        """Release the parts of buckets. A part that cannot be released expires."""
        parts = [bucket.part for bucket in buckets if bucket.part is not None]
        for bucket in buckets:
            self._drop(bucket)
        for some in batched(parts, TOGETHER_MAX):
            ends = [part.end(abandoned=abandoned) for part in some]
            for result in await asyncio.gather(*ends, return_exceptions=True):
                if isinstance(result, StoreError):
                    return  # the others would fail too, and each after its timeout
                if isinstance(result, BaseException):
                    raise result

    # ── For operators ──────────────────────────────────────────────────────────────────────────

    def statuses(self, node: str, worker: int) -> list[EnvoyStatus]:
        """Return the Envoys that are connected to this worker, with their busiest buckets."""
        parts_max = max(PARTS_MAX // max(len(self.streams), 1), 1)
        return [
            EnvoyStatus(
                stream.name,
                stream.id,
                node,
                worker,
                stream.domain,
                stream.since_ns / NS_PER_SECOND,
                stream.reported_ns / NS_PER_SECOND,
                len(stream.buckets),
                [_shown(bucket) for bucket in stream.busiest(parts_max)],
            )
            for stream in self.streams.values()
        ]

    # ── Counts ─────────────────────────────────────────────────────────────────────────────────

    def _count(self, status: Status) -> None:
        counted = self._counters.grpc_requests
        counted[status.name] = counted.get(status.name, 0) + 1

    def _count_buckets(self) -> None:
        self._counters.quota_streams = len(self.streams)
        self._counters.quota_buckets = sum(len(each.buckets) for each in self.streams.values())

    def _count_assignment(self, kind: str) -> None:
        counted = self._counters.quota_assignments
        counted[kind] = counted.get(kind, 0) + 1


def batched(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Yield the items in order, in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _shown(bucket: QuotaBucket) -> EnvoyPart:
    target = bucket.target
    demand = bucket.demand.per_second
    name = ", ".join(f"{key}={value}" for key, value in bucket_of(bucket.id).items())
    found = EnvoyPart(
        name[:TEXT_LENGTH_MAX], "", "", demand=None if demand is None else round(demand, 1)
    )
    if isinstance(target, Assigned) and bucket.part is not None:
        found.rule, found.quota, found.has = target.rule, target.quota, bucket.part.shown()
    elif bucket.answer is not None:
        found.rule, found.has = bucket.answer.rule, bucket.answer.reason
        found.quota = "allow_all" if bucket.answer.allow else "deny_all"
    return found


def _decoded(stream: QuotaStream, body: bytes) -> RateLimitQuotaUsageReports:
    """Return the report. Raises CallError if it is invalid, or of another domain than the first."""
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
