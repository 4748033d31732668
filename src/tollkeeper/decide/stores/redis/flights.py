"""Checks that wait for one of the same key, and go out as one: for the tasks of one event loop.

A *flight* is what is under way for one question: the rule, the subject and the cost. The first
check of a key is a flight of its own and goes as any other does; here are those that find it under
way. See `decide/coalesce.py` for what is asked, and why that is exact.

For asyncio alone. A thread that waits for another is woken by a lock, which takes as long as the
call that it would save; and threads are few beside tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from tollkeeper.core.model import Decision
from tollkeeper.decide.coalesce import Ask, DenyRest, Reply, rounds
from tollkeeper.decide.stores.redis.calls import NotSent
from tollkeeper.decide.stores.redis.denied import Denied, Sent
from tollkeeper.decide.stores.redis.scripts import CHECK

if TYPE_CHECKING:
    from tollkeeper.decide.stores.redis.drive import Tasks
    from tollkeeper.decide.stores.redis.gates import Commands

# So many checks of a key go by themselves at the same time before any waits.
FREE_MAX: Final = 8

_ENDED: Final = "the event loop ended before the answer came; the call may have been counted once"

# The rule's commands, the subject and the cost.
Question = tuple["Commands", str, int]


class Waiter(NamedTuple):
    """A check that waits, and when its deadline is over."""

    due_ns: int
    decision: asyncio.Future[Decision]


@dataclass(slots=True)
class _Answered:
    """The last answer of a flight, and for how many checks it was asked."""

    sent: Sent
    answer: list[int]
    count: int


class Flights:
    """What is under way on one event loop."""

    __slots__ = (
        "_calls",
        "_deadline_ns",
        "_denied",
        "_large",
        "_tasks",
        "coalesced",
        "under_way",
        "waiting",
    )

    def __init__(self, deadline_ns: int, denied: Denied, calls: Tasks) -> None:
        self._deadline_ns = deadline_ns
        self._denied = denied
        self._calls = calls
        # By question: how many flights; how many of them are of several; and who waits.
        self.under_way: dict[Question, int] = {}
        self._large: dict[Question, int] = {}
        self.waiting: dict[Question, list[Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # or nobody would keep them
        # Checks that waited to go with others.
        self.coalesced = 0

    def must_wait(self, question: Question) -> bool:
        """Is one more to wait for a flight to be back?

        Not for the first few: where callers are few, waiting would only cost them time. But for one
        of several; and for any, if the subject was denied of late: it may tell that all are.
        """
        flights = self.under_way.get(question, 0)
        if question in self._large or flights >= FREE_MAX:
            return True
        return flights > 0 and question[1] in self._denied.kept

    def join(self, question: Question, most: int) -> asyncio.Future[Decision]:
        """Wait for a flight to be back. A list that is full leaves at once."""
        decision = asyncio.get_running_loop().create_future()
        waiter = Waiter(time.monotonic_ns() + self._deadline_ns, decision)
        waiters = self.waiting.setdefault(question, [])
        waiters.append(waiter)
        if len(waiters) >= most:
            self._leave(question)
        return waiter.decision

    def begin(self, question: Question) -> None:
        """A check goes by itself; it is to `land` whatever becomes of it."""
        self.under_way[question] = self.under_way.get(question, 0) + 1

    def land(self, question: Question) -> None:
        """It is back: those who wait are the next flight, unless one of several is under way."""
        _less(self.under_way, question)
        if question in self.waiting and question not in self._large:
            self._leave(question)

    def land_large(self, question: Question) -> None:
        """`land`, for a flight of several."""
        _less(self._large, question)
        _less(self.under_way, question)
        if question in self.waiting:
            self._leave(question)

    def _leave(self, question: Question) -> None:
        # One that was cancelled meanwhile was not sent, and costs nothing.
        waiters = _still_waiting(self.waiting.pop(question))
        if not waiters:
            return
        self.begin(question)
        self._large[question] = self._large.get(question, 0) + 1
        self.coalesced += len(waiters)
        landing = _Landing(self, question, waiters)
        task = asyncio.get_running_loop().create_task(self._fly(question, waiters, landing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One that is cancelled before it has begun runs nothing of its own, its end neither.
        task.add_done_callback(landing.over)

    async def _fly(self, question: Question, waiters: list[Waiter], landing: _Landing) -> None:
        try:
            await self._decide(question, waiters, landing)
        except Exception as error:  # a defect too: everyone is to see it
            _fail(waiters, error)
        finally:
            landing.over()

    async def _decide(self, question: Question, waiters: list[Waiter], landing: _Landing) -> None:
        """Ask for as many as may pass, until everyone has a decision, or is overdue."""
        known = self._known(question)
        if known is not None:
            _give(waiters, [known] * len(waiters))
            return
        if landing.unreached is not None:
            await self._reach(question)
            landing.unreached = None
        waiters = _still_waiting(waiters)
        if not waiters:
            return
        steps = rounds(len(waiters))
        step = next(steps)
        while isinstance(step, Ask) and not landing.landed:
            sent, answer = await self._ask(question, step.count)
            last = _Answered(sent, answer, step.count)
            reply, decisions = self._reply(question, last)
            # Who has left meanwhile is asked for no more, and what was his is another's.
            asked_for, waiters = len(waiters), _still_waiting(waiters)
            gone = asked_for - len(waiters)
            _give(waiters[: len(decisions)], decisions[: len(waiters)])
            del waiters[: len(decisions)]
            try:
                step = steps.send(reply._replace(gone=gone))
            except StopIteration:
                return
        if landing.landed:
            return
        if isinstance(step, DenyRest):
            _give(waiters, [self._denial(question, last)] * len(waiters))
            return
        await asyncio.gather(*(self._alone(question, each) for each in waiters))

    async def _reach(self, question: Question) -> None:
        """Wait until its server is found and connected, with a call that spends nothing.

        A check that waited for a connection would be sent for everyone it was asked for, also for
        those who have been told meanwhile that nothing was sent.
        """
        commands, subject, cost = question
        now, _ = commands.now()
        call = commands.look(commands.key(subject), cost, now)
        await self._calls.run(call, call.by_sha())

    async def _ask(self, question: Question, count: int) -> tuple[Sent, list[int]]:
        """Check so many times the cost: when it was asked for, and the script's answer."""
        commands, subject, cost = question
        mark = self._denied.denials.mark
        now, early_ns = commands.now()
        sent = Sent.of(now, early_ns, time.monotonic_ns(), mark)
        call = commands.call(CHECK, commands.key(subject), count * cost, now)
        return sent, await self._calls.run(call, call.by_sha())

    def unconnected(self, question: Question) -> str | None:
        """Where a call would wait for a connection; None: it would leave at once."""
        commands, subject, _ = question
        return self._calls.unconnected(commands.key(subject))

    def _known(self, question: Question) -> Decision | None:
        commands, subject, cost = question
        if subject not in self._denied.kept:
            return None
        return self._denied.find(commands, subject, cost, *commands.now())

    def _reply(self, question: Question, last: _Answered) -> tuple[Reply, list[Decision]]:
        """What an answer means for those that are left, and the decisions on those it allowed."""
        commands, subject, cost = question
        answers = commands.answers
        # What no script says is found out here, and that the server decided as we would.
        answers.check(last.answer, last.count * cost)
        if last.answer[0] < 0:
            fits = answers.fits(last.answer, cost)
            return Reply(False, fits, answers.tells(last.answer, cost, last.count)), []
        decisions = answers.checks(last.answer, cost, last.count, last.sent.early_ns)
        left = decisions[-1].remaining
        if left < cost or subject in self._denied.kept:
            self._denied.keep(question, last.answer, decisions[-1], last.sent, last.count)
        tells = left < cost and answers.after(last.answer, last.count * cost, cost) is not None
        return Reply(True, left // cost, tells), decisions

    def _denial(self, question: Question, last: _Answered) -> Decision:
        """The decision on one more, by an answer that tells it."""
        commands, _, cost = question
        answer: list[int] | None = last.answer
        if last.answer[0] >= 0:
            answer = commands.answers.after(last.answer, last.count * cost, cost)
        if answer is None:
            raise StoreUnavailable("not an answer that tells of a denial")
        decision = commands.answers.check(answer, cost, last.sent.early_ns)
        if last.answer[0] < 0:
            self._denied.keep(question, answer, decision, last.sent)
        return decision

    async def _alone(self, question: Question, waiter: Waiter) -> None:
        commands, subject, cost = question
        try:
            sent, answer = await self._ask(question, 1)
            decision = commands.answers.check(answer, cost, sent.early_ns)
            if decision.remaining < cost or subject in self._denied.kept:
                self._denied.keep(question, answer, decision, sent)
        except StoreError as error:
            _fail([waiter], error)
        else:
            _give([waiter], [decision])


class _Landing:
    """Fails each waiter at its own deadline; with the last of them, the flight is over.

    However long its calls still take: who waits for the flight must not wait longer than that. One
    timer for all, at the next one's deadline.
    """

    __slots__ = ("_flights", "_question", "_timer", "_waiters", "landed", "unreached")

    def __init__(self, flights: Flights, question: Question, waiters: Sequence[Waiter]) -> None:
        self._flights = flights
        self._question = question
        self._waiters = waiters
        self.landed = False
        # The server that is yet to be reached, before anything is spent; None: a check has left.
        self.unreached = flights.unconnected(question)
        self._timer = self._later(waiters[0].due_ns - time.monotonic_ns())

    def _later(self, pause_ns: int) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(pause_ns / NS_PER_SECOND, self._look)

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        for waiter in self._waiters:  # in the order of their deadlines
            if waiter.decision.done():
                continue
            if waiter.due_ns > now_ns:
                self._timer = self._later(waiter.due_ns - now_ns)
                return
            waiter.decision.set_exception(self._too_late())
        self.land()

    def _too_late(self) -> StoreError:
        if self.unreached is None:
            return StoreTimeout("no answer by the deadline; the call may have been counted once")
        return NotSent(f"no connection to {self.unreached} by the deadline")

    def over(self, _: object = None) -> None:
        """Its task has ended, in whatever way: nobody is left waiting."""
        _fail(self._waiters, StoreUnavailable(_ENDED))
        self.land()

    def land(self) -> None:
        """It is over; once."""
        self._timer.cancel()
        if not self.landed:
            self.landed = True
            self._flights.land_large(self._question)


def _less(counts: dict[Question, int], question: Question) -> None:
    left = counts.pop(question) - 1
    if left:
        counts[question] = left


def _still_waiting(waiters: Sequence[Waiter]) -> list[Waiter]:
    return [each for each in waiters if not each.decision.done()]


def _give(waiters: Sequence[Waiter], decisions: Sequence[Decision]) -> None:
    for (_, future), decision in zip(waiters, decisions, strict=True):
        if not future.done():
            future.set_result(decision)


def _fail(waiters: Sequence[Waiter], error: Exception) -> None:
    """Each gets an error of its own: many callers cannot add to one traceback."""
    for _, future in waiters:
        if not future.done():
            own = type(error)(str(error)) if isinstance(error, StoreError) else error
            future.set_exception(own)
