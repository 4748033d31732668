"""From the path to the records: one call that never waits, and a thread that does the rest.

`note` is called with every ruling, in the event loop that answers. It adds to a bucket of usage
and, for denials and a share of what is allowed, puts a small tuple aside: about a microsecond, and
no lock, because nobody else touches either. Once a second, or when BATCH_EVENTS_MAX tuples are
there, both are handed over as they are, and empty ones put in their place: a constant time, however
much it is.

A thread with an event loop of its own takes them: it counts who asks most, adds the buckets to
those that wait for the database, and makes rows of the tuples and writes (`sink.py`). It works in
small portions with a pause after each, because while it holds Python's lock nobody is answered. If
it is behind, nothing is handed over; what is here then fills up, and what does not fit is dropped
and counted. So nothing that happens there reaches a request: not a slow database, nor a dead one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from random import random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from tollkeeper.core.errors import ConfigError, StoreError
from tollkeeper.history.events import (
    ENDPOINT_LENGTH_MAX,
    LISTED,
    METHOD_LENGTH_MAX,
    Event,
    Noted,
    Subjects,
    event_of,
    known_as,
    told,
)
from tollkeeper.history.live import PENALTIES_MAX, Counted, Known, Live, Standing
from tollkeeper.history.sink import BATCH_EVENTS_MAX, EVENTS_MAX, Sink
from tollkeeper.history.sketch import Heavy, Sketch
from tollkeeper.history.usage import MINUTE_NS, Usage

if TYPE_CHECKING:
    from tollkeeper.core.model import CheckResult, Request
    from tollkeeper.history.reading import Records

HAND_OVER_SECONDS: Final = 1.0
# With nothing to hand over, the other workers are still told what stands, every so many seconds.
IDLE_TICKS: Final = 5
# How long the end waits for what was last recorded to be written.
STOP_SECONDS_MAX: Final = 5.0
CLOSE_SECONDS_MAX: Final = 1.0
# What the thread does at a time, some 200 µs, and how long it then lets others go on.
PORTION: Final = 100
PORTION_PAUSE_SECONDS: Final = 0.000_5

By = Literal["checks", "denied"]
Who = tuple[str, str]
Portion = TypeVar("Portion")

log = logging.getLogger("tollkeeper.history")


class _Handed(NamedTuple):
    noted: list[Noted]
    usage: Usage


class Recorder:
    """Records what one worker decides. `note` is for one event loop."""

    def __init__(
        self,
        sink: Callable[[Callable[[Noted], Event]], Sink],
        records: Records,
        *,
        node: str = "",
        share: float = 0.01,
        subjects: Subjects = "plain",
        live: Live | None = None,
        penalties: Callable[[], Iterable[Standing]] = tuple,
        now_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Not yet writing: see `start`.

        `sink`       makes what writes, in the event loop that it will write in, from what makes a
                     row of what was noted.
        `records`    what reads the same database, for whoever asks.
        `share`      of the decisions that allow, how many are kept; all that deny are.
        `subjects`   how much is told of who was counted.
        `live`       where workers tell each other who asks most; None: there is one.
        `penalties`  those that this worker has given and that are not over.
        `monotonic_s`  what counts of who asks most fade by: a clock that nobody sets, and that all
                     processes of a machine have in common.
        """
        self.records = records
        self.subjects: Subjects = subjects
        self._make_sink = sink
        self._sink: Sink | None = None
        self._node = node
        self._share = share
        self._live = live
        self._penalties = penalties
        self._now_ns = now_ns
        self._monotonic_s = monotonic_s
        self._noted: list[Noted] = []
        self._usage = Usage()
        self._buckets = self._usage.buckets
        self._dropped = 0
        self._is_behind = False
        self._is_silent = False
        self._idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="tollkeeper-record", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._ending: asyncio.Event | None = None
        self._sketches: dict[By, Sketch[Who]] = {"checks": Sketch(), "denied": Sketch()}
        self._lock = threading.Lock()  # of the sketches: they are read elsewhere

    # ── On the path ──────────────────────────────────────────────────────────────────────────

    def note(self, request: Request, ruling: CheckResult, cost: int, now_ns: int) -> None:
        """Record a decision; `now_ns` is the Unix time."""
        decision, applied, kind, shadows, counted = ruling
        allowed = decision.allowed
        minute = now_ns // MINUTE_NS
        if len(counted) == 1:
            subject, units = counted[0]
            bucket = (subject, applied[0].rule, minute)
            counts = self._buckets.get(bucket)
            if counts is None:
                counts = self._usage.new(bucket)
            if allowed:
                counts[0] += 1
                counts[2] += units
            else:
                counts[1] += 1
        elif counted:
            self._note_several(ruling, allowed, minute)
        elif kind != "unlimited":
            self._note_uncounted(request, ruling, cost, minute)
        if not allowed or shadows or random() < self._share:  # noqa: S311 - a sample
            noted = self._noted
            if len(noted) >= EVENTS_MAX:
                self._dropped += 1
                return
            known = "" if counted else known_as(request)
            endpoint, method = request.endpoint, request.method
            # What waits is bounded in bytes, too: a path may be as long as a body.
            if endpoint is not None and len(endpoint) > ENDPOINT_LENGTH_MAX:
                endpoint = endpoint[: ENDPOINT_LENGTH_MAX + 1]
            if method is not None and len(method) > METHOD_LENGTH_MAX:
                method = method[: METHOD_LENGTH_MAX + 1]
            noted.append((now_ns, ruling, cost, known, endpoint, method))
            if len(noted) == BATCH_EVENTS_MAX:
                self._hand_over()

    def note_all(
        self, asked: Sequence[tuple[Request, int]], rulings: Sequence[CheckResult], now_ns: int
    ) -> None:
        """Record decisions that were made together: if one denies, the others spent nothing."""
        all_pass = all(ruling.decision.allowed for ruling in rulings)
        for (request, cost), ruling in zip(asked, rulings, strict=True):
            if all_pass or not ruling.decision.allowed:
                self.note(request, ruling, cost, now_ns)

    def settle(self, ruling: CheckResult, units: int, now_ns: int) -> None:
        """Correct usage by units that were spent, or given back (below 0), after a check.

        `ruling` is one on the same request for one unit: it says who is counted, and how dear.
        """
        minute = now_ns // MINUTE_NS
        for applied, (subject, each) in zip(ruling.applied, ruling.counted, strict=False):
            bucket = (subject, applied.rule, minute)
            counts = self._buckets.get(bucket)
            if counts is None:
                counts = self._usage.new(bucket)
            counts[2] += units * each

    def _note_several(self, ruling: CheckResult, allowed: bool, minute: int) -> None:
        buckets = self._buckets
        rule = ruling.decision.rule
        for applied, (subject, units) in zip(ruling.applied, ruling.counted, strict=True):
            # A denial is the rule's that spoke; the others were charged nothing.
            if not allowed and applied.rule != rule:
                continue
            bucket = (subject, applied.rule, minute)
            counts = buckets.get(bucket)
            if counts is None:
                counts = self._usage.new(bucket)
            if allowed:
                counts[0] += 1
                counts[2] += units
            else:
                counts[1] += 1

    def _note_uncounted(
        self, request: Request, ruling: CheckResult, cost: int, minute: int
    ) -> None:
        """Usage of those whom a list knows, or who brought a limit of their own."""
        rule = LISTED.get(ruling.kind) or (ruling.applied[0].rule if ruling.applied else "")
        bucket = (known_as(request), rule, minute)
        counts = self._buckets.get(bucket) or self._usage.new(bucket)
        if ruling.decision.allowed:
            counts[0] += 1
            counts[2] += cost
        else:
            counts[1] += 1

    def _hand_over(self) -> None:
        if self._is_behind or self._loop is None:
            return
        handed = _Handed(self._noted, self._usage)
        # At once, or the count would go down until the thread comes to it.
        self._dropped += self._usage.dropped
        self._noted, self._usage = [], Usage()
        self._buckets = self._usage.buckets
        self._is_behind = True
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._take, handed)

    # ── Start and end ────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Begin to write. Does not wait for the database."""
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
        """Write what is there, for as long as STOP_SECONDS_MAX, and end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and self._ending is not None:
            deadline_s = time.monotonic() + STOP_SECONDS_MAX
            while self._is_behind and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a thread's
                await asyncio.sleep(0.01)
            self._hand_over()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.set)
            await asyncio.to_thread(self._thread.join, 2 * STOP_SECONDS_MAX)
        await _closed(self.records)

    # ── In the thread ────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception:
            log.exception("nothing is recorded any more")
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
            # Nobody who writes is cut off but by the time: it might be in the middle of a commit.
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await asyncio.gather(writing, *self._taking, return_exceptions=True)
                await sink.finish()
        except (StoreError, ConfigError, TimeoutError) as error:
            log.warning("the last records are not written: %s", str(error) or "no time is left")
        await _closed(sink)

    def _take(self, handed: _Handed) -> None:
        task = asyncio.get_running_loop().create_task(self._taken(handed))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _taken(self, handed: _Handed) -> None:
        try:
            await self._add(handed)
            self._leave()
        except Exception:
            log.exception("records are lost")
            self._dropped += len(handed.noted)
        finally:
            self._is_behind = False

    async def _add(self, handed: _Handed) -> None:
        assert self._sink is not None, "made before anything is handed over"  # noqa: S101 - ours
        usage = self._sink.usage
        checks: dict[Who, float] = {}
        denied: dict[Who, float] = {}
        for portion in _portions(list(handed.usage.buckets.items())):
            for (who, rule, minute), counts in portion:
                subject = told(who, self.subjects)
                usage.add((subject, rule, minute), counts)
                key = (subject, rule)
                checks[key] = checks.get(key, 0) + counts[0] + counts[1]
                if counts[1]:
                    denied[key] = denied.get(key, 0) + counts[1]
            await asyncio.sleep(PORTION_PAUSE_SECONDS)
        now_s = self._monotonic_s()
        with self._lock:
            self._sketches["checks"].add(checks, now_s)
            self._sketches["denied"].add(denied, now_s)
        self._sink.offer(handed.noted)

    def _row_of(self, noted: Noted) -> Event:
        return event_of(noted, self._node, self.subjects)

    def _leave(self) -> None:
        """Tell the other workers."""
        if self._live is None:
            return
        try:
            self._live.leave(self._known())
        except OSError as error:
            if not self._is_silent:  # said once, and not every second
                log.warning("the other workers are not told who asks most: %s", error.strerror)
            self._is_silent = True
        else:
            self._is_silent = False

    def _known(self) -> Known:
        now_s = self._monotonic_s()
        with self._lock:
            counted = {by: Counted(*sketch.data(now_s)) for by, sketch in self._sketches.items()}
        penalties = list(self._penalties())[:PENALTIES_MAX]
        return Known(now_s, counted["checks"], counted["denied"], penalties)

    # ── For those who look ───────────────────────────────────────────────────────────────────

    def dropped(self) -> int:
        """Decisions and counts that there was no room for, in this worker."""
        lost = 0 if self._sink is None else self._sink.dropped()
        return self._dropped + self._usage.dropped + lost

    def top(self, by: By, most: int) -> tuple[list[Heavy[Who]], float]:
        """Who asks most, or is denied most, of all workers; and the count of everybody."""
        now_s = self._monotonic_s()
        merged: Sketch[Who] = Sketch(now_s=now_s)
        for known in self._all():
            counted = known.checks if by == "checks" else known.denied
            age_s = now_s - known.at_s
            merged.merge(counted.counts, counted.missed, counted.total, age_s)
        return merged.top(most, now_s), merged.total

    def penalties(self) -> list[Standing]:
        """Cool-downs and blocks of all workers that are not over, the longest first.

        One for each subject and rule: the next is on top of the last, whoever gave it.
        """
        now_ns = self._now_ns()
        found: dict[Who, Standing] = {}
        for known in self._all():
            for each in known.penalties:
                last = found.get((each.rule, each.subject))
                if each.until_ns > now_ns and (last is None or last.until_ns < each.until_ns):
                    found[each.rule, each.subject] = each
        return sorted(found.values(), key=lambda each: -each.until_ns)[:PENALTIES_MAX]

    def _all(self) -> Iterator[Known]:
        yield self._known()
        if self._live is not None:
            yield from self._live.others()


async def _closed(connections: Records | Sink) -> None:
    """Close them; a server that does not answer is not waited for."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS_MAX):
            await connections.close()


def _portions(items: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]
