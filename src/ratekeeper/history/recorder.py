"""From the path of a request to the records: one call that never waits, and a thread.

**On the path**, the event loop that answers calls `note` with every result. It adds to a bucket of
usage and, for denials and a share of the allowed requests, puts a small tuple aside. That takes
about a microsecond and no lock, because no other thread touches either. Once a second, or when
BATCH_EVENTS_MAX tuples are there, both are handed over and replaced by empty ones, which takes
constant time.

**The thread** has its own event loop. It counts the busiest subjects, adds the buckets to those
that wait for the database, makes rows of the tuples, and writes (`sink.py`). It works in small
portions with a pause after each, because the worker cannot answer while the thread holds Python's
lock. While it is behind, nothing is handed over: the buffers on the path fill up, and records that
do not fit are dropped and counted. So no request ever waits for a slow or unavailable database.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.core.forks import fork_safe
from ratekeeper.history.events import (
    ENDPOINT_LENGTH_MAX,
    LISTED,
    METHOD_LENGTH_MAX,
    MINUTE_NS,
    PART,
    Bucket,
    Counts,
    DecisionEvent,
    NotedDecision,
    SubjectMode,
    UsageBuckets,
    caller_of,
    event_of,
    excess_of,
    identity_of,
    recorded_subject,
    rule_of,
    subject_of,
    subject_of_field,
)
from ratekeeper.history.live import (
    PENALTIES_MAX,
    STREAKS_REPORTED_MAX,
    ActivePenalty,
    DenialStreak,
    DenialStreaks,
    HeavyHitter,
    ReportFolder,
    Sketch,
    SketchData,
    WorkerReport,
)
from ratekeeper.history.sink import BATCH_EVENTS_MAX, EVENTS_MAX, Sink

if TYPE_CHECKING:
    from ratekeeper.core.model import CheckResult, Request
    from ratekeeper.history.reading import Records

HAND_OVER_SECONDS: Final = 1.0
# Without records to hand over, the report for the other workers is still renewed this often.
IDLE_TICKS: Final = 5
# A shutdown waits this long for the last records to be written.
STOP_SECONDS_MAX: Final = 5.0
# Items that the thread handles at a time, some 200 µs, and its pause after them.
PORTION: Final = 100
PORTION_PAUSE_SECONDS: Final = 0.000_5
# Records of an excess in a second.
EXCESS_MAX: Final = 100
# Denied requests whose other subjects are kept: to find them takes two microseconds.
INDIRECT_MAX: Final = 1_000

TopBy = Literal["checks", "denied", "shadow_denied"]
# The subject of a rule that counts by address, and of a denied address.
_ADDRESS: Final = "ip:"
# A subject and a rule.
SubjectRule = tuple[str, str]
Portion = TypeVar("Portion")

log = logging.getLogger("ratekeeper.history")


class _HandOver(NamedTuple):
    noted: list[NotedDecision]
    usage: UsageBuckets


class Recorder:
    """Records the decisions of one worker. `note` is for one event loop."""

    def __init__(
        self,
        sink: Callable[[Callable[[NotedDecision], DecisionEvent]], Sink],
        records: Records,
        *,
        node: str = "",
        region: str = "",
        share: float = 0.01,
        subjects: SubjectMode = "plain",
        live: ReportFolder | None = None,
        penalties: Callable[[], Iterable[ActivePenalty]] = tuple,
        now_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `start` begins to write.

        `sink`         creates the Sink, in the event loop of the thread; its argument makes a row
                       of a noted decision.
        `node`, `region`  where the decisions are made, for the records.
        `records`      queries the same database, for the admin API.
        `share`        the share of the allowed requests that is logged; denials always are.
        `subjects`     how subjects are recorded.
        `live`         where workers publish their reports; None: there is only this worker.
        `penalties`    returns the active penalties that this worker has given.
        `monotonic_s`  the clock of the sketches, shared by all processes of a machine.
        """
        self.records = records
        self.subjects: SubjectMode = subjects
        self._make_sink = sink
        self._sink: Sink | None = None
        self._node = node
        self._region = region
        self.share = share
        self._reports = live
        self._penalties = penalties
        self._now_ns = now_ns
        self._monotonic_s = monotonic_s
        self._noted: list[NotedDecision] = []
        self._usage = UsageBuckets()
        self._buckets = self._usage.buckets
        self._indirect: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._dropped = 0
        self._is_behind = False
        self._has_warned = False
        self._idle_ticks = 0
        self._excess_second = self._excess_noted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="ratekeeper-record", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._ending: asyncio.Event | None = None
        self._sketches: dict[TopBy, Sketch[SubjectRule]] = {
            "checks": Sketch(),
            "denied": Sketch(),
            "shadow_denied": Sketch(),
        }
        self._streaks = DenialStreaks()
        # Of the sketches and streaks, which other threads read.
        self._lock = fork_safe(threading.Lock())

    # ── On the path ──────────────────────────────────────────────────────────────────────────

    def note(
        self,
        request: Request,
        result: CheckResult,
        cost: int,
        now_ns: int,
        request_id: bytes | str = b"",
    ) -> None:
        """Record a decision; `now_ns` is the Unix time, `request_id` that of the reply."""
        decision, applied, kind, shadows, counted, _ = result
        allowed = decision.allowed
        minute = now_ns // MINUTE_NS
        if len(counted) == 1:
            subject, units = counted[0]
            bucket = (subject, applied[0].rule, minute)
            counts = self._buckets.get(bucket) or self._usage.new(bucket)
            if allowed:
                counts[0] += 1
                counts[2] += units
            else:
                counts[1] += 1
        elif counted:
            self._note_several(result, allowed, minute)
        elif kind != "unlimited":
            self._note_uncounted(request, result, cost, minute)
        if not allowed or shadows:
            # A rule that counts the only subject of a request leaves no other to count.
            is_only = request.user is None and request.tenant is None and len(counted) == 1
            if shadows or not is_only:
                self._note_denials(request, result, minute)
        elif RANDOM.random() >= self.share:
            return
        noted = self._noted
        if len(noted) >= EVENTS_MAX:
            self._dropped += 1
            return
        caller = "" if counted else caller_of(request)
        endpoint, method = request.endpoint, request.method
        # The buffer is bounded in bytes, too: a path may be very long.
        if endpoint is not None and len(endpoint) > ENDPOINT_LENGTH_MAX:
            endpoint = endpoint[: ENDPOINT_LENGTH_MAX + 1]
        if method is not None and len(method) > METHOD_LENGTH_MAX:
            method = method[: METHOD_LENGTH_MAX + 1]
        identity = identity_of(request)
        noted.append((now_ns, result, cost, caller, endpoint, method, identity, request_id))
        if len(noted) == BATCH_EVENTS_MAX:
            self._hand_over()

    def note_all(
        self,
        checks: Sequence[tuple[Request, int]],
        results: Sequence[CheckResult],
        now_ns: int,
        request_id: bytes | str = b"",
    ) -> None:
        """Record decisions of an atomic batch: if one denies, the others spent nothing."""
        all_pass = all(result.decision.allowed for result in results)
        for (request, cost), result in zip(checks, results, strict=True):
            if all_pass or not result.decision.allowed:
                self.note(request, result, cost, now_ns, request_id)

    def settle(self, rule: str, subject: str, units: int, now_ns: int) -> None:
        """Correct usage by units that were spent, or given back (below 0), after a check."""
        self._counts((subject, rule, now_ns // MINUTE_NS))[2] += units

    def note_excess(self, rule: str, subject: str, region: str, units: int) -> None:  # noqa: ARG002 - as the listener of RegionMonitor.on_excess
        """Record that regions together were above an eventual limit. For the thread of the sync.

        At most EXCESS_MAX a second: after a long partition there may be one for each subject.
        """
        second = int(self._monotonic_s())
        if second != self._excess_second:
            self._excess_second, self._excess_noted = second, 0
        loop = self._loop
        if loop is None or self._excess_noted >= EXCESS_MAX:
            self._dropped += 1
            return
        self._excess_noted += 1
        now_ns = self._now_ns()
        event = excess_of(now_ns, self._node, self._region, rule, subject, units, self.subjects)
        with suppress(RuntimeError):  # the thread of the records has ended
            loop.call_soon_threadsafe(self._offer, event)

    def _offer(self, event: DecisionEvent) -> None:
        if self._sink is not None:
            self._sink.offer([event])

    def _note_several(self, result: CheckResult, allowed: bool, minute: int) -> None:
        rule, buckets = result.decision.rule, self._buckets
        for applied, (subject, units) in zip(result.applied, result.counted, strict=True):
            # A denial counts for the rule that denied; the others charged nothing.
            if not allowed and applied.rule != rule:
                continue
            bucket = (subject, applied.rule, minute)
            counts = buckets.get(bucket) or self._usage.new(bucket)
            if allowed:
                counts[0] += 1
                counts[2] += units
            else:
                counts[1] += 1

    def _note_uncounted(
        self, request: Request, result: CheckResult, cost: int, minute: int
    ) -> None:
        """Count usage under a list, or under limits that came with the call."""
        rule = LISTED.get(result.kind) or (result.applied[0].rule if result.applied else "")
        counts = self._counts((caller_of(request), rule, minute))
        if result.decision.allowed:
            counts[0] += 1
            counts[2] += cost
        else:
            counts[1] += 1

    def _note_denials(self, request: Request, result: CheckResult, minute: int) -> None:
        """Count shadow denials, and a denial for the subjects that its rule does not count."""
        decision, _, _, shadows, counted, subjects = result
        if shadows:
            for rule, subject in zip(shadows, subjects, strict=False):
                self._counts((subject, rule, minute))[3] += 1
        if decision.allowed:
            return
        rule = decision.rule
        key = (rule, request.tenant, request.user, counted)
        indirect = self._indirect.get(key)
        if indirect is None or not counted:
            rule, indirect = rule_of(result), _indirect(request, result)
            if len(self._indirect) >= INDIRECT_MAX:
                self._indirect.clear()
            self._indirect[key] = indirect
        for subject in indirect:
            self._counts((subject, rule, minute))[4] += 1

    def _counts(self, bucket: Bucket) -> Counts:
        return self._buckets.get(bucket) or self._usage.new(bucket)

    def _hand_over(self) -> None:
        if self._is_behind or self._loop is None:
            return
        handed = _HandOver(self._noted, self._usage)
        # At once, so that the total does not go down until the thread has taken them.
        self._dropped += self._usage.dropped
        self._noted, self._usage = [], UsageBuckets()
        self._buckets = self._usage.buckets
        self._is_behind = True
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._take, handed)

    # ── Start and end ────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the thread. Does not wait for the database."""
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)
        self._tick()

    def _tick(self) -> None:
        self._idle_ticks += 1
        if self._noted or self._buckets or self._idle_ticks >= IDLE_TICKS:
            self._idle_ticks = 0
            self._hand_over()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HAND_OVER_SECONDS, self._tick)

    async def stop(self) -> None:
        """Write the records in memory, within STOP_SECONDS_MAX, and end the thread."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and self._ending is not None:
            deadline_s = time.monotonic() + STOP_SECONDS_MAX
            while self._is_behind and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.01)
            self._hand_over()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.set)
            await asyncio.to_thread(self._thread.join, 2 * STOP_SECONDS_MAX)
        await self.records.close()

    # ── In the thread ────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception:
            log.exception("recording has stopped, because of a bug")
        finally:
            self._loop = None
            self._ready.set()

    async def _work(self) -> None:
        self._taking: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._sink = sink = self._make_sink(self._row_of)
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        writing = asyncio.create_task(sink.run())
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({writing, ending}, return_when=asyncio.FIRST_COMPLETED)
        sink.stop()
        try:
            # A write is only cancelled by the timeout: it may be in the middle of a commit.
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await asyncio.gather(writing, *self._taking, return_exceptions=True)
                await sink.finish()
        except (StoreError, ConfigError, TimeoutError) as error:
            log.warning("the last records are not written: %s", str(error) or "a timeout")
        await sink.close()

    def _take(self, handed: _HandOver) -> None:
        task = asyncio.get_running_loop().create_task(self._process(handed))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _process(self, handed: _HandOver) -> None:
        try:
            await self._add(handed)
            self._publish()
        except Exception:
            log.exception("records are dropped, because of a bug")
            self._dropped += len(handed.noted)
        finally:
            self._is_behind = False

    async def _add(self, handed: _HandOver) -> None:
        assert self._sink is not None, "made before anything is handed over"  # noqa: S101 - ours
        usage = self._sink.usage
        checks: dict[SubjectRule, float] = {}
        denied: dict[SubjectRule, float] = {}
        shadow_denied: dict[SubjectRule, float] = {}
        addresses: dict[str, tuple[int, int]] = {}
        for portion in _portions(list(handed.usage.buckets.items())):
            for (counted, rule, minute), counts in portion:
                subject = recorded_subject(counted, self.subjects)
                usage.add((subject, rule, minute), counts)
                key = (subject, rule)
                if requests := counts[0] + counts[1]:
                    checks[key] = checks.get(key, 0) + requests
                if counts[1]:
                    denied[key] = denied.get(key, 0) + counts[1]
                if counts[3]:
                    shadow_denied[key] = shadow_denied.get(key, 0) + counts[3]
                # An address alone: of one with a user, another user may still pass.
                is_address = counted.startswith(_ADDRESS) and PART not in counted
                if requests and is_address and self.subjects == "plain":
                    address = counted.removeprefix(_ADDRESS)
                    allowed, rejected = addresses.get(address, (0, 0))
                    addresses[address] = allowed + counts[0], rejected + counts[1]
            await asyncio.sleep(PORTION_PAUSE_SECONDS)
        now_s = self._monotonic_s()
        with self._lock:
            self._sketches["checks"].add(checks, now_s)
            self._sketches["denied"].add(denied, now_s)
            self._sketches["shadow_denied"].add(shadow_denied, now_s)
            self._streaks.add(addresses, now_s)
        self._sink.offer(handed.noted)

    def _row_of(self, noted: NotedDecision | DecisionEvent) -> DecisionEvent:
        if isinstance(noted, DecisionEvent):
            return noted
        return event_of(noted, self._node, self.subjects, self._region)

    def _publish(self) -> None:
        """Publish a report for the other workers."""
        if self._reports is None:
            return
        try:
            self._reports.publish(self._report())
        except OSError as error:
            if not self._has_warned:  # once, not every second
                log.warning("the report for other workers cannot be written: %s", error.strerror)
            self._has_warned = True
        else:
            self._has_warned = False

    def _report(self) -> WorkerReport:
        now_s = self._monotonic_s()
        with self._lock:
            data = {by: SketchData(*sketch.data(now_s)) for by, sketch in self._sketches.items()}
            streaks = self._streaks.most(STREAKS_REPORTED_MAX, now_s)
            allowed = self._streaks.allowed(now_s)
        penalties = list(self._penalties())[:PENALTIES_MAX]
        return WorkerReport(
            now_s,
            data["checks"],
            data["denied"],
            penalties,
            data["shadow_denied"],
            streaks,
            allowed,
        )

    # ── Queries ──────────────────────────────────────────────────────────────────────────────

    def dropped(self) -> int:
        """Return the number of decisions and requests that this worker has dropped."""
        lost = 0 if self._sink is None else self._sink.dropped()
        return self._dropped + self._usage.dropped + lost

    def top(self, by: TopBy, limit: int) -> tuple[list[HeavyHitter[SubjectRule]], float]:
        """Return the subjects of all workers with most checks or denials, and the count of all.

        `shadow_denied`: denials that rules in shadow mode did not enforce.
        """
        now_s = self._monotonic_s()
        merged: Sketch[SubjectRule] = Sketch(now_s=now_s)
        for report in self._all():
            data = {
                "checks": report.checks,
                "denied": report.denied,
                "shadow_denied": report.shadow_denied,
            }[by]
            merged.merge(data.counts, data.missed, data.total, now_s - report.at_s)
        return merged.top(limit, now_s), merged.total

    def penalties(self) -> list[ActivePenalty]:
        """Return the active penalties of all workers, those that last longest first.

        There is one per subject and rule: the one that ends last.
        """
        now_ns = self._now_ns()
        found: dict[SubjectRule, ActivePenalty] = {}
        for report in self._all():
            for each in report.penalties:
                last = found.get((each.rule, each.subject))
                if each.until_ns > now_ns and (last is None or last.until_ns < each.until_ns):
                    found[each.rule, each.subject] = each
        return sorted(found.values(), key=lambda each: -each.until_ns)[:PENALTIES_MAX]

    def denied_in_a_row(self, at_least: int) -> list[tuple[DenialStreak, float]]:
        """Return addresses that were denied this often in a row, and the age of the last denial.

        The denials of all workers are added. An address that one of them has denied before, and has
        allowed in the last minute, is left out.
        """
        now_s = self._monotonic_s()
        found: dict[str, DenialStreak] = {}
        allowed: set[str] = set()
        for report in self._all():
            allowed.update(report.allowed)
            for each in report.streaks:
                known = found.get(each.address, DenialStreak(each.address, 0, each.last_s))
                denied, last_s = known.denied + each.denied, max(known.last_s, each.last_s)
                found[each.address] = DenialStreak(each.address, denied, last_s)
        return [
            (each, max(now_s - each.last_s, 0.0))
            for each in found.values()
            if each.denied >= at_least and each.address not in allowed
        ]

    def _all(self) -> Iterator[WorkerReport]:
        yield self._report()
        if self._reports is not None:
            yield from self._reports.others()


def _indirect(request: Request, result: CheckResult) -> tuple[str, ...]:
    """Return the subjects of a denied request that the rule does not count."""
    found = {subject for subject, _ in result.counted}
    if request.tenant is not None:
        found.add(subject_of_field("tenant", request.tenant))
    if request.user is not None:
        found.add(subject_of_field("user", request.user))
    return tuple(found - {subject_of(result) if result.counted else caller_of(request)})


def _portions(items: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]
