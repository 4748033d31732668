"""Coalescing: concurrent checks of one key are sent as one call. For the tasks of one event loop.

While checks of a key are in flight, further ones of the same rule, subject and cost wait. When a
call returns, the waiting checks leave as one batch: one check of that many times the cost. If it is
allowed, each of them would have been allowed, one after another at that instant, and each answer
can be computed from the states before. If it is denied, nothing was spent, and the states show how
many would have fit. Then that many go as one check, and the rest are denied. So a hot key costs
Redis a few calls per round trip instead of one per request.

The first check never waits, and no check waits for more than the call before it: a batch leaves
when that call returns, or when it is as large as it may be. Another client may spend between two
calls. A check that loses such a race is sent separately, so no answer is ever a guess.

A batch that leaves after an answer has the deadlines of its calls, which begin when they are sent:
the server works, and the checks may have waited for a connection, or for a processor. If the call
before failed, a check has only the rest of the deadline that began when it started to wait.

`batch_steps` decides what to do after each reply, without I/O. `Coalescer` carries it out.

Only asyncio coalesces. A thread that waits for another is woken by a lock, which takes as long as
the call that it would save; and there are few threads, compared with tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.core.model import Decision
from ratekeeper.decide.stores.redis.connections import ITERATIONS
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.scripts import CheckAttempt, CheckKey, ScriptCall

BATCH_MAX: Final = 256
# If a limit holds fewer checks than this, coalescing them saves little.
BATCH_MIN: Final = 8
# This many single checks of a key may be in flight before further ones wait.
FREE_MAX: Final = 8

_LOOP_ENDED: Final = (
    "the event loop ended before the answer came; the call may have been counted once"
)


# ── What to do with a batch ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SendAsOne:
    """Send `count` of the remaining checks as one call."""

    count: int


@dataclass(frozen=True, slots=True)
class DenyRemaining:
    """Deny all remaining checks with the last reply."""


@dataclass(frozen=True, slots=True)
class SendSeparately:
    """Send each remaining check as a call of its own."""


BatchStep = SendAsOne | DenyRemaining | SendSeparately


class BatchOutcome(NamedTuple):
    """The result of a SendAsOne. If it is allowed, all of its checks are."""

    allowed: bool
    fits: int
    """How many checks fit: instead of the denied ones, or after the allowed ones."""
    denies_next: bool
    """True if the reply contains the denial of one more check, in case none fits."""
    cancelled: int = 0
    """How many of the waiting checks were cancelled; other checks get their allowed units."""


def batch_max(capacity: int, cost: int) -> int:
    """Return how many checks of a cost may go as one, at most; 0 if coalescing is not worth it.

    `capacity` is that of the smallest limit: a batch must fit every limit.
    """
    most = capacity // cost if cost else 0
    return min(most, BATCH_MAX) if most >= BATCH_MIN else 0


def batch_steps(waiting: int) -> Generator[BatchStep, BatchOutcome | None, None]:
    """Yield the steps for a batch of `waiting` checks; each SendAsOne needs its outcome.

    At most three calls, and then one for each check that is sent separately.
    """
    count, lost, retried_one = waiting, False, False
    while True:
        outcome = yield SendAsOne(count)
        if outcome is None:
            raise TypeError("a SendAsOne needs its BatchOutcome")
        waiting -= outcome.cancelled + (count if outcome.allowed else 0)
        if waiting <= 0:
            return
        if not outcome.fits and outcome.denies_next:
            yield DenyRemaining()
            return
        if (lost and outcome.fits) or retried_one:
            # Other clients were faster, or quota was refilled: stop guessing.
            yield SendSeparately()
            return
        lost, retried_one = True, not outcome.fits
        count = min(outcome.fits, waiting) or 1


# ── The checks in flight on one event loop ─────────────────────────────────────────────────────


class WaitingCheck(NamedTuple):
    """A check that waits for its batch, and its deadline."""

    due_ns: int
    decision: asyncio.Future[Decision]


class Coalescer:
    """The checks that are in flight or wait on one event loop.

    `run` sends a call and settles refusals. `is_connected` returns True if a call of a key would
    leave at once.
    """

    __slots__ = (
        "_batches",
        "_cache",
        "_deadline_ns",
        "_is_connected",
        "_run",
        "_tasks",
        "coalesced",
        "in_flight",
        "waiting",
    )

    def __init__(
        self,
        deadline_ns: int,
        cache: DenialCache,
        run: Callable[[ScriptCall], Awaitable[Any]],
        is_connected: Callable[[bytes], bool],
    ) -> None:
        self._deadline_ns = deadline_ns
        self._cache = cache
        self._run = run
        self._is_connected = is_connected
        # For each check: the number of calls in flight, how many of them are batches, and the
        # waiting checks.
        self.in_flight: dict[CheckKey, int] = {}
        self._batches: dict[CheckKey, int] = {}
        self.waiting: dict[CheckKey, list[WaitingCheck]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference
        # Number of checks that waited for a batch.
        self.coalesced = 0

    def must_wait(self, check: CheckKey) -> bool:
        """Return True if one more check has to wait for a call in flight.

        The first few do not wait: with few callers, waiting would only cost time. A check waits if
        a batch is in flight. It also waits for any call if the subject was denied recently: the
        reply may deny all of them.
        """
        calls = self.in_flight.get(check, 0)
        if check in self._batches or calls >= FREE_MAX:
            return True
        return calls > 0 and check[1] in self._cache.subjects

    def join(self, check: CheckKey, most: int) -> asyncio.Future[Decision]:
        """Wait for the next batch. A batch of `most` checks leaves at once."""
        decision = asyncio.get_running_loop().create_future()
        checks = self.waiting.setdefault(check, [])
        checks.append(WaitingCheck(time.monotonic_ns() + self._deadline_ns, decision))
        if len(checks) >= most:
            self._send_batch(check, answered=True)
        return decision

    def started(self, check: CheckKey) -> None:
        """Count a single check; the caller must call `finished` whatever happens to it."""
        self.in_flight[check] = self.in_flight.get(check, 0) + 1

    def finished(self, check: CheckKey, answered: bool) -> None:
        """A call was answered, or failed. Send the waiting checks, unless a batch is in flight."""
        _decrement(self.in_flight, check)
        if check in self.waiting and check not in self._batches:
            self._send_batch(check, answered)

    def batch_finished(self, check: CheckKey, answered: bool) -> None:
        """A batch was answered, or failed. Send the waiting checks."""
        _decrement(self._batches, check)
        _decrement(self.in_flight, check)
        if check in self.waiting:
            self._send_batch(check, answered)

    def _send_batch(self, check: CheckKey, answered: bool) -> None:
        # A check that was cancelled while it waited was not sent and costs nothing.
        checks = _not_done(self.waiting.pop(check))
        if not checks:
            return
        self.started(check)
        self._batches[check] = self._batches.get(check, 0) + 1
        self.coalesced += len(checks)
        connected = self._is_connected(check[0].key(check[1]))
        deadline = _BatchDeadline(self, check, checks, connected)
        if connected and not answered:
            deadline.watch()
        task = asyncio.get_running_loop().create_task(self._run_batch(check, checks, deadline))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step does not run its `finally`.
        task.add_done_callback(deadline.task_ended)

    async def _run_batch(
        self, check: CheckKey, checks: list[WaitingCheck], deadline: _BatchDeadline
    ) -> None:
        try:
            await self._decide_batch(check, checks, deadline)
            deadline.answered = True
        except Exception as error:  # every caller must see a defect, too
            _fail(checks, error)
        finally:
            deadline.task_ended()

    async def _decide_batch(
        self, check: CheckKey, checks: list[WaitingCheck], deadline: _BatchDeadline
    ) -> None:
        """Send calls until every check has a decision or is overdue."""
        cached = self._cached(check)
        if cached is not None:
            _answer(checks, [cached] * len(checks))
            return
        if not deadline.connected:
            await self._reach_server(check)
        checks = _not_done(checks)
        if not checks:
            return
        steps = batch_steps(len(checks))
        step = next(steps)
        while isinstance(step, SendAsOne) and not deadline.finished:
            attempt, reply = await self._send(check, step.count)
            outcome, decisions = self._outcome(attempt, reply)
            # Drop the checks that were cancelled meanwhile; the others get their units.
            before, checks = len(checks), _not_done(checks)
            cancelled = before - len(checks)
            _answer(checks[: len(decisions)], decisions[: len(checks)])
            del checks[: len(decisions)]
            try:
                step = steps.send(outcome._replace(cancelled=cancelled))
            except StopIteration:
                return
        if deadline.finished:
            return
        if isinstance(step, DenyRemaining):
            _answer(checks, [self._denial(attempt, reply)] * len(checks))
            return
        await asyncio.gather(*(self._send_separately(check, each) for each in checks))

    def _cached(self, check: CheckKey) -> Decision | None:
        if check[1] not in self._cache.subjects:
            return None
        return self._cache.find(check, check[0].now())

    async def _reach_server(self, check: CheckKey) -> None:
        """Wait until the server is found and connected, with a call that spends nothing.

        A check that waited for the connection would be charged for the whole batch, although some
        of its callers may have been cancelled meanwhile.
        """
        scripts, subject, cost = check
        await self._run(scripts.peek(subject, cost, scripts.now()[0]))

    async def _send(self, check: CheckKey, count: int) -> tuple[CheckAttempt, list[int]]:
        """Send `count` checks as one call; return the attempt and the script's reply."""
        attempt = CheckAttempt(check, self._cache.mark, count)
        return attempt, await self._run(attempt.call())

    def _outcome(
        self, attempt: CheckAttempt, reply: list[int]
    ) -> tuple[BatchOutcome, list[Decision]]:
        """Return what a reply means for the batch, and the decisions that it allowed."""
        decoder, cost, count = attempt.scripts.decoder, attempt.cost, attempt.count
        # This raises for an invalid reply, and if the server decided otherwise than we would.
        decoder.check(reply, count * cost)
        if reply[0] < 0:
            fits = decoder.fits(reply, cost)
            return BatchOutcome(False, fits, decoder.explains_one(reply, cost, count)), []
        decisions = decoder.checks(reply, cost, count, attempt.early_ns)
        left = decisions[-1].remaining
        if left < cost or attempt.subject in self._cache.subjects:
            self._cache.keep(attempt, reply, decisions[-1])
        denies = left < cost and decoder.denial_after(reply, count * cost, cost) is not None
        return BatchOutcome(True, left // cost, denies), decisions

    def _denial(self, attempt: CheckAttempt, reply: list[int]) -> Decision:
        """Return the decision on one more check, from a reply that contains its denial."""
        decoder, cost = attempt.scripts.decoder, attempt.cost
        denial: list[int] | None = reply
        if reply[0] >= 0:
            denial = decoder.denial_after(reply, attempt.count * cost, cost)
        if denial is None:
            raise StoreUnavailable("the reply does not contain the denial of one more check")
        decision = decoder.check(denial, cost, attempt.early_ns)
        if reply[0] < 0:
            self._cache.keep(attempt, denial, decision)
        return decision

    async def _send_separately(self, check: CheckKey, waiting: WaitingCheck) -> None:
        try:
            attempt, reply = await self._send(check, 1)
            decision = attempt.scripts.decoder.check(reply, attempt.cost, attempt.early_ns)
            if decision.remaining < attempt.cost or attempt.subject in self._cache.subjects:
                self._cache.keep(attempt, reply, decision)
        except StoreError as error:
            _fail([waiting], error)
        else:
            _answer([waiting], [decision])


class _BatchDeadline:
    """Fails each check of a batch, and ends the batch with the last of them.

    The calls of the batch have deadlines. After a failed call the checks have their own besides:
    then the batch ends even if its calls take longer, because checks that wait for the batch must
    not wait longer than that. One timer serves all, at the next deadline.
    """

    __slots__ = (
        "_check",
        "_checks",
        "_coalescer",
        "_timer",
        "answered",
        "connected",
        "finished",
    )

    def __init__(
        self,
        coalescer: Coalescer,
        check: CheckKey,
        checks: Sequence[WaitingCheck],
        connected: bool,
    ) -> None:
        self._coalescer = coalescer
        self._check = check
        self._checks = checks
        self._timer: asyncio.Handle | None = None
        # False if the server must be reached before a call that spends may leave.
        self.connected = connected
        # True if the calls of the batch did not fail.
        self.answered = False
        self.finished = False

    def watch(self) -> None:
        """Begin to watch the deadlines of the checks."""
        self._expire_after(self._checks[0].due_ns - time.monotonic_ns())

    def _expire_after(self, pause_ns: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause_ns / NS_PER_SECOND, self._expire, ITERATIONS)

    def _expire(self, iterations: int) -> None:
        """Fail the overdue checks, after the replies that have arrived were read."""
        if iterations:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_soon(self._expire, iterations - 1)
        else:
            self._fail_overdue()

    def _fail_overdue(self) -> None:
        now_ns = time.monotonic_ns()
        for waiting in self._checks:  # in the order of their deadlines
            if waiting.decision.done():
                continue
            if waiting.due_ns > now_ns:
                self._expire_after(waiting.due_ns - now_ns)
                return
            waiting.decision.set_exception(
                StoreTimeout("no answer by the deadline; the call may have been counted once")
            )
        self._finish()

    def task_ended(self, _: object = None) -> None:
        """Fail the checks that have no decision: the batch's task has ended."""
        _fail(self._checks, StoreUnavailable(_LOOP_ENDED))
        self._finish()

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.finished:
            self.finished = True
            self._coalescer.batch_finished(self._check, self.answered)


def _decrement(counts: dict[CheckKey, int], check: CheckKey) -> None:
    left = counts.pop(check) - 1
    if left:
        counts[check] = left


def _not_done(checks: Sequence[WaitingCheck]) -> list[WaitingCheck]:
    return [each for each in checks if not each.decision.done()]


def _answer(checks: Sequence[WaitingCheck], decisions: Sequence[Decision]) -> None:
    for (_, future), decision in zip(checks, decisions, strict=True):
        if not future.done():
            future.set_result(decision)


def _fail(checks: Sequence[WaitingCheck], error: Exception) -> None:
    """Give each check its own error, because each caller adds its own traceback."""
    for _, future in checks:
        if not future.done():
            own = type(error)(str(error)) if isinstance(error, StoreError) else error
            future.set_exception(own)
