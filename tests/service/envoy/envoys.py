"""A model of Envoys with rate shares, of the workers that assign them, and of their store.

Nothing runs by itself: a list of events moves the time and breaks things. The workers run the real
`reporting`, one store call at a time, so their calls interleave in every way, fail, and stop
half-way. An Envoy has a token bucket as Envoy has it: it starts full, keeps the fill ratio when its
size changes, and ends with the time to live of its assignment.

After each event the model checks the bounds of `shares.py`: the rates that all Envoys have at this
moment, and every admission against one bucket of the whole limit.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreTimeout
from ratekeeper.core.steps import run
from ratekeeper.service.envoy import shares
from ratekeeper.service.envoy.shares import (
    HOLDER_BYTES,
    NOTHING,
    Assignment,
    Holding,
    Pool,
    Share,
    name_of,
)

MS: Final = NS_PER_SECOND // 1_000
REPORT_NS: Final = 5 * NS_PER_SECOND
CELL: Final = "rule subject"
ACTIONS: Final = (
    *("go on", "spend", "spend all", "demand", "idle", "break", "break silently"),
    *("restart Envoy", "crash worker", "stall", "timeout", "late", "abandon"),
)


class Event(NamedTuple):
    """After a time, one thing happens to one Envoy."""

    wait_ms: int
    action: str
    envoy: int
    number: int


def random_events(random: Random, count: int) -> list[Event]:
    """Return events, most of which break nothing."""
    usual = ("go on", "spend", "spend all", "demand", "idle")
    return [
        Event(
            random.choice((0, 1, 10, 100, 400, 1_000)),
            random.choice(usual if random.random() < 0.8 else ACTIONS),
            random.randrange(4),
            random.randrange(256),
        )
        for _ in range(count)
    ]


class MemoryCells:
    """One cell in memory, with the model's time. The next write may time out."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.now_ns = 10**18
        self.times_out: bool | None = None
        """None: the next write is answered. Otherwise whether it is carried out."""

    def read(self, name: str) -> tuple[bytes | None, int]:
        """See Cells."""
        return self.value, self.now_ns

    def write(self, name: str, expected: bytes | None, value: bytes, lasts_ns: int) -> bool:
        """See Cells."""
        carried_out, self.times_out = self.times_out, None
        if carried_out is not False and self.value == expected:
            self.value = value
            if carried_out is None:
                return True
        if carried_out is not None:
            raise StoreTimeout("no answer")
        return False


@dataclass
class Bucket:
    """The token bucket of an Envoy, in exact numbers."""

    share: Share
    fill_s: int
    tokens: Fraction
    at_ns: int
    ends_ns: int

    def refill(self, now_ns: int) -> None:
        """Add the tokens of the time since the last call."""
        until_ns = min(now_ns, self.ends_ns)
        passed = Fraction(max(until_ns - self.at_ns, 0) * self.share.rate)
        self.tokens += passed / (self.fill_s * NS_PER_SECOND)
        self.tokens = min(self.tokens, Fraction(self.share.burst))
        self.at_ns = now_ns


@dataclass(eq=False)
class Envoy:
    """One Envoy with one bucket of the rule."""

    name: str
    bucket: Bucket | None = None
    stream: Stream | None = None
    demand: Fraction = Fraction(0)
    """Requests in a second."""
    requests: Fraction = Fraction(0)
    """Since the last report."""
    report_ns: int = 0

    def assign(self, message: Assignment, now_ns: int) -> None:
        """Apply an assignment as Envoy does."""
        share, before = message.share, self.bucket
        ends_ns = now_ns + shares.TTL_S * NS_PER_SECOND
        if share == NOTHING:
            self.bucket = None
            return
        tokens = Fraction(share.burst)
        if before is not None and before.ends_ns > now_ns and not message.is_new:
            assert before.fill_s == message.fill_s, "Envoy ignores another fill interval"
            before.refill(now_ns)
            tokens = before.tokens * share.burst / before.share.burst
        self.bucket = Bucket(share, message.fill_s, tokens, now_ns, ends_ns)

    def rate(self, now_ns: int) -> Fraction:
        """Return the tokens that it gets in a second."""
        if self.bucket is None or self.bucket.ends_ns <= now_ns:
            return Fraction(0)
        return Fraction(self.bucket.share.rate, self.bucket.fill_s)

    def spend(self, units: int, now_ns: int) -> int:
        """Admit up to so many requests; return how many."""
        if self.bucket is None or self.bucket.ends_ns <= now_ns:
            return 0
        self.bucket.refill(now_ns)
        admitted = min(units, int(self.bucket.tokens))
        self.bucket.tokens -= admitted
        return admitted


@dataclass(eq=False)
class Stream:
    """A stream between an Envoy and a worker."""

    envoy: Envoy
    worker: int
    holding: Holding
    messages: list[tuple[int, Assignment]] = field(default_factory=list)
    """What is on its way to the Envoy, with the time at which it arrives."""
    work: Generator[Any, Any, Assignment | None] | None = None
    call: Any = None
    ready: Assignment | None = None
    again: bool = False
    is_push: bool = False
    """The work is not because of a report."""
    retry_ns: int = 0


class OverLimit(AssertionError):
    """The Envoys may do more than the limit."""


class Model:
    """Some Envoys, two workers and a store."""

    forgets = False
    """A defect: a worker that crashes loses the table."""

    def __init__(self, pool: Pool, names: list[str], *others: Pool) -> None:
        """With `others`, the limit changes in between. Then the highest of them must hold."""
        self.pool = pool
        self.pools = (pool, *others)
        self.rate_max = max(Fraction(each.rate, each.fill_s) for each in self.pools)
        self.cells = MemoryCells()
        self.envoys = [Envoy(name) for name in names]
        self.streams: list[Stream] = []
        self.stalled_ns = [0, 0]
        self.delay_ns = MS
        self.level = Fraction(0)
        """Of one bucket for the whole limit: what was admitted and not drained yet."""
        self.level_max = Fraction(max(each.burst for each in self.pools))
        self.level_ns = self.now_ns
        self.admitted = 0
        self._holders = 0

    @property
    def now_ns(self) -> int:
        """The time of everything: of the store, of all workers and Envoys."""
        return self.cells.now_ns

    def time_ns(self) -> int:
        """Return the time, as a worker's clock."""
        return self.now_ns

    # ── Events ─────────────────────────────────────────────────────────────────────────────────

    def run(self, events: list[Event]) -> None:
        """Let things happen. Raises OverLimit."""
        for event in events:
            self.happen(event)

    def happen(self, event: Event) -> None:
        """Let one thing happen, and everything go on by one step."""
        self.pass_time(event.wait_ms * MS)
        envoy = self.envoys[event.envoy % len(self.envoys)]
        self._act(event, envoy)
        for stream in list(self.streams):
            self.step(stream)
        self.check()

    def pass_time(self, wait_ns: int) -> None:
        """Let the time pass, with messages and reports when they are due."""
        until_ns = self.now_ns + wait_ns
        while True:
            due = [stream.messages[0][0] for stream in self.streams if stream.messages]
            due += [envoy.report_ns for envoy in self.envoys if envoy.report_ns]
            if min(due, default=until_ns) >= until_ns:
                break
            self._move_to(max(min(due), self.now_ns))
            self._deliver()
            self.check()
        self._move_to(until_ns)
        self._deliver()

    def _move_to(self, now_ns: int) -> None:
        passed_ns = now_ns - self.now_ns
        self.cells.now_ns = now_ns
        for envoy in self.envoys:
            envoy.requests += envoy.demand * passed_ns / NS_PER_SECOND

    def _deliver(self) -> None:
        for stream in list(self.streams):
            while stream.messages and stream.messages[0][0] <= self.now_ns:
                stream.envoy.assign(stream.messages.pop(0)[1], self.now_ns)
            if stream.envoy.stream is not stream and not stream.messages and stream.work is None:
                self.streams.remove(stream)
        for envoy in self.envoys:
            if envoy.report_ns and envoy.report_ns <= self.now_ns:
                envoy.report_ns = self.now_ns + REPORT_NS
                self.report(envoy)

    def _act(self, event: Event, envoy: Envoy) -> None:
        number = event.number
        match event.action:
            case "spend":
                self.spend(envoy, number)
            case "spend all":
                for each in self.envoys:
                    self.spend(each, 10**9)
            case "demand":
                envoy.demand = Fraction(self.pool.rate * number, 64 * self.pool.fill_s)
                self.connect(envoy, number % 2)
            case "idle":
                envoy.demand = Fraction(0)
                self.pool = self.pools[number % len(self.pools)]
            case "abandon":
                self.abandon(envoy)
            case _:
                self._break(event, envoy)

    def _break(self, event: Event, envoy: Envoy) -> None:
        number = event.number
        match event.action:
            case "break":
                self.break_stream(envoy, noticed=True, delivered=number % 2 == 0)
            case "break silently":
                self.break_stream(envoy, noticed=False, delivered=number % 2 == 0)
            case "restart Envoy":
                self.break_stream(envoy, noticed=number % 2 == 0, delivered=False)
                envoy.bucket, envoy.report_ns = None, 0
            case "crash worker":
                self.crash(number % 2)
            case "stall":
                self.stalled_ns[number % 2] = self.now_ns + number * NS_PER_SECOND // 16
            case "timeout":
                self.cells.times_out = number % 2 == 0
            case "late":
                self.delay_ns = shares.DELIVERY_NS * number // 256

    # ── Envoys ─────────────────────────────────────────────────────────────────────────────────

    def connect(self, envoy: Envoy, worker: int) -> None:
        """Open the stream of an Envoy that has none, and report."""
        if envoy.stream is None:
            self._holders += 1
            holder = self._holders.to_bytes(HOLDER_BYTES)
            holding = Holding(holder, name_of(envoy.name))
            envoy.stream = Stream(envoy, worker, holding)
            self.streams.append(envoy.stream)
            envoy.report_ns = self.now_ns + REPORT_NS
            self.report(envoy)

    def report(self, envoy: Envoy) -> None:
        """Report the requests of an Envoy. One without a stream connects, and loses its counts."""
        if envoy.stream is None:
            envoy.requests = Fraction(0)
            self.connect(envoy, self._holders % 2)
            return
        stream, requests = envoy.stream, int(envoy.requests)
        envoy.requests -= requests
        stream.holding.reported(requests, self.now_ns)
        self.start(stream)

    def spend(self, envoy: Envoy, units: int) -> None:
        """Admit requests, and count them against the whole limit."""
        admitted = envoy.spend(units, self.now_ns)
        passed_ns, self.level_ns = self.now_ns - self.level_ns, self.now_ns
        drained = passed_ns * self.rate_max / NS_PER_SECOND
        self.level = max(self.level - drained, Fraction(0)) + admitted
        self.admitted += admitted
        if self.level > self.level_max:
            raise OverLimit(f"{float(self.level)} units in a bucket of {float(self.level_max)}")

    def break_stream(self, envoy: Envoy, *, noticed: bool, delivered: bool) -> None:
        """End a stream; messages on their way may still arrive. The worker may not notice it."""
        stream, envoy.stream = envoy.stream, None
        if stream is None:
            return
        if not delivered:
            stream.messages.clear()
        self._stop(stream)
        if noticed:
            cells: Any = self.cells
            stream.work = shares.losing(cells, CELL, self.pool, stream.holding, self.time_ns)

    def abandon(self, envoy: Envoy) -> None:
        """Tell an Envoy to forget its bucket, as if it had reported nothing for long."""
        stream = envoy.stream
        if stream is None or stream.work is not None or stream.ready or stream.messages:
            return
        cells: Any = self.cells  # it is not awaited
        self.cells.times_out = None
        run(shares.losing(cells, CELL, self.pool, stream.holding, self.time_ns, abandoned=True))
        self.streams.remove(stream)
        envoy.stream, envoy.bucket, envoy.report_ns = None, None, 0

    # ── Workers ────────────────────────────────────────────────────────────────────────────────

    def crash(self, worker: int) -> None:
        """End a worker: its streams, and what it was doing."""
        for stream in list(self.streams):
            if stream.worker == worker:
                if stream.envoy.stream is stream:
                    stream.envoy.stream = None
                self._stop(stream)
                stream.messages.clear()
        if self.forgets:
            self.cells.value = None

    def _stop(self, stream: Stream) -> None:
        if stream.work is not None:
            stream.work.close()
        stream.work = stream.call = stream.ready = None

    def start(self, stream: Stream, *, is_push: bool = False) -> None:
        """Begin to report a holder, after the report that is under way."""
        if stream.work is not None or stream.ready is not None:
            stream.again = stream.again or not is_push
            return
        stream.is_push, stream.retry_ns = is_push, 0
        cells: Any = self.cells
        stream.work = shares.reporting(cells, CELL, self.pool, stream.holding, self.time_ns)

    def step(self, stream: Stream) -> None:
        """Let the worker of a stream make its next call, or send what is ready."""
        if self.stalled_ns[stream.worker] > self.now_ns:
            return
        if 0 < stream.retry_ns <= self.now_ns and stream.envoy.stream is stream:
            self.start(stream, is_push=True)
        if stream.ready is not None:
            self._send(stream, stream.ready)
            stream.ready = None
        elif stream.work is not None:
            self._call(stream, stream.work)
        if stream.again and stream.work is None and stream.ready is None:
            stream.again = False
            self.start(stream)

    def _call(self, stream: Stream, work: Generator[Any, Any, Assignment | None]) -> None:
        try:
            if stream.call is None:
                stream.call = next(work)
                return
            try:
                result = stream.call.function(*stream.call.args)
            except StoreTimeout as error:
                stream.call = work.throw(error)
            else:
                stream.call = work.send(result)
        except StopIteration as done:
            stream.work = stream.call = None
            stream.ready = done.value
        except StoreError:
            stream.work = stream.call = None

    def _send(self, stream: Stream, message: Assignment) -> None:
        if stream.envoy.stream is not stream:
            return
        if self.now_ns > message.send_by_ns:
            stream.again = True
            return
        if stream.holding._before is not None:  # the exception to the bound
            self.level_max += stream.holding._before.share.burst
        stream.holding.sending(message)
        arrives_ns = max([self.now_ns + self.delay_ns, *(at for at, _ in stream.messages)])
        stream.messages.append((arrives_ns, message))
        stream.holding.sent(self.now_ns)
        stream.retry_ns = self.now_ns + shares.RETRY_S * NS_PER_SECOND if message.is_short else 0
        if stream.is_push:
            return
        for other in self.streams:
            if other.worker == stream.worker and other.holding.holder in message.others:
                self.start(other, is_push=True)

    # ── The bounds ─────────────────────────────────────────────────────────────────────────────

    @property
    def rate(self) -> Fraction:
        """The tokens that all Envoys get in a second."""
        return sum((envoy.rate(self.now_ns) for envoy in self.envoys), Fraction(0))

    def check(self) -> None:
        """Raise OverLimit if all Envoys together have more than the rate."""
        if self.rate > self.rate_max:
            raise OverLimit(f"{float(self.rate)} tokens in a second of {self.pool}")
