"""Fair waiting: the queues of the requests that wait for room, first come, first served.

A request that waits asks again when its retry time is over. If each request did so alone, small
ones would take each unit as it becomes free, and a large one would never find enough. Therefore the
requests that wait for the same limits and the same subject stand in a queue. A request asks when no
earlier one waits for a subject that it counts, and a new request with `wait` joins the end.

A request of several rules waits in the queues of the rules that denied it. All queues share one
order, the order of arrival, so the earliest request of all never waits for another one: no two
requests wait for each other. A request that was denied by one rule, waited, and was then denied by
another keeps its first place as long as it does not have to wait longer for the second than it did
for the first. Without its first place it would find the first limit used up again, and so on for
ever. With an unbounded one, a client that waits an hour for its own limit would hold up all clients
of its tenant.

A request that leaves the front, for whatever reason, wakes the next one. An admission also wakes
those that fit into the units that it left. So a queue is as fast as its limit, although each
request waits for the answer of the store.

The queues belong to a store, so threads and tasks of a process share them if their limiters share
the store. They are bounded, and an empty one costs no memory.

Other processes have other queues. The first request of each asks again at its retry time, and a
little later than necessary, so that they do not all ask at once. A large request would starve
beside small ones of other processes. So each of these first requests takes the *turn* of the
subject before it asks: a mark in the store, which one process has at a time. A request that is
denied again and again, each time after its whole retry time, keeps the turn until it is served or
gives up. Meanwhile the units that it needs accumulate in the limit. Nothing is charged for it in
advance, so the limit holds whatever happens to a turn. A mark that is lost, or that expires after
its process was killed, costs fairness only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from typing import Final, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.clock import NS_PER_SECOND, Clock
from ratekeeper.core.errors import CapacityError, ConfigError, StoreError, show
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.core.model import IN_FLIGHT, Decision, Limit, decision_with
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.core.steps import Ask, Call, Steps, Undo
from ratekeeper.decide.algorithms.in_flight import RETRY_MIN_NS
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.store import Counter, Store
from ratekeeper.rules.compiled import CheckPlan, MakeCounter, RuleCheck

Priority = Literal["interactive", "batch"]
"""The class of a request that waits.

`interactive`  it stands in the queue.
`batch`        it leaves a fifth of each limit to others, and never stands in a queue.
"""
PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)

# Requests that wait for one subject, and all that wait on one store. Others are denied at once.
WAITERS_OF_SUBJECT_MAX: Final = 1_000
WAITERS_MAX: Final = 10_000
# The least retry time of a request that is denied because others wait.
BEHIND_NS_MIN: Final = 10_000_000
# The part of a limit's capacity that a request of the class `batch` never takes.
BATCH_LEAVES: Final = 5
BATCH_SHARE: Final = "for batch requests, which leave the last fifth"
# A request in a queue looks at its place at least this often.
LOOK_S_MAX: Final = 10.0
# A lock is held for microseconds, unless this very thread holds it: see `WaitingQueues.leave`.
_LOCK_S_MAX: Final = 1.0
# Processes that wait for one subject spread their retries over this part of the wait, and at most
# this time.
_JITTER_PART: Final = 10
_JITTER_NS_MAX: Final = 50_000_000
# The name of the mark that is a turn.
_TURN: Final = 1
# How often at least a process looks whether a turn is free: ten times in the wait of its request,
# but between these bounds.
_LOOKS_OF_WAIT: Final = 10
_LOOK_S_MIN: Final = 0.04
_LOOK_S_MAX: Final = 1.0
# A process that was killed keeps a turn for twice the wait of its request and a second, but no
# longer than this.
_TURN_NS_MAX: Final = 3_600 * NS_PER_SECOND
# A request that was denied so often keeps its turn. The first denial is that of its arrival.
_DENIALS_PATIENT: Final = 2

log: Final = logging.getLogger("ratekeeper.waiting")
_seldom: Final = SeldomLog(log, logging.WARNING)


class Place(NamedTuple):
    """What a queue is for: the limits of one rule, for one subject."""

    rule: str
    subject: str
    limits: tuple[str, ...]
    """The identities of the limits, because several limiters without a name may share a store."""


class Waiter:
    """One request that waits, or that asks for the first time."""

    __slots__ = (
        *("asks_ns", "cost", "held_ns", "is_abandoned", "loop", "passes"),
        *("ticket", "wake", "watched"),
    )

    def __init__(self, ticket: int, cost: int) -> None:
        self.ticket = ticket
        """The order of arrival."""
        self.cost = cost
        self.watched: Sequence[Place] = ()
        """The queues in which no earlier request may wait when this one asks."""
        self.held_ns: dict[Place, int] = {}
        """The queues it stands in, each with the time that it had to wait for that limit."""
        self.asks_ns = 0
        """When it asks again, by the limiter's clock."""
        self.passes: Place | None = None
        """A queue from which another request left enough units for this one, too."""
        self.wake: Callable[[], object] | None = None
        """Wakes the thread or the task, while it waits for its turn."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_abandoned = False

    @property
    def is_gone(self) -> bool:
        """True if it will never ask again, for example because its event loop was closed."""
        return self.is_abandoned or (self.loop is not None and self.loop.is_closed())


class WaitingStats(NamedTuple):
    """The requests that wait now."""

    waiters: int
    longest: int
    """Requests in the longest queue."""


class WaitingQueues:
    """The queues of one store."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._tickets = count()
        self._queues: dict[Place, list[Waiter]] = {}
        self._waiters = 0
        after_fork(self.forked)

    def forked(self) -> None:
        """Forget the waiters in a forked child, where their threads and event loops do not run."""
        self._queues.clear()
        self._waiters = 0

    @property
    def are_empty(self) -> bool:
        """True if no request waits."""
        return not self._queues

    def stats(self) -> WaitingStats:
        """Return how many requests wait."""
        with self._lock:
            return WaitingStats(self._waiters, max(map(len, self._queues.values()), default=0))

    def arrive(self, cost: int) -> Waiter:
        """Return a new waiter, which stands in no queue yet."""
        return Waiter(next(self._tickets), cost)

    def front_asks_ns(self, watched: Sequence[Place]) -> int | None:
        """Return when the last of the fronts of these queues asks; None if they are empty."""
        with self._lock:
            fronts = [front for place in watched if (front := self._front(place)) is not None]
        return max([each.asks_ns for each in fronts], default=None)

    def join(self, waiter: Waiter) -> bool:
        """Stand in each queue where an earlier request waits. Returns False if it is full."""
        with self._lock:
            earlier = self._earlier(waiter)
            if not self._has_room(waiter, earlier):
                return False
            self._stand(waiter, dict.fromkeys(earlier, 0) | waiter.held_ns)
        return True

    def ahead_ns(self, waiter: Waiter) -> int | None:
        """Return when the requests ask for which this one has to wait; None if there are none."""
        with self._lock:
            earlier = self._earlier(waiter)
            if earlier:  # also where it could have passed
                waiter.passes = None
        return max([each.asks_ns for each in earlier.values()], default=None)

    def denied(self, waiter: Waiter, places: Sequence[Place], pause_ns: int, now_ns: int) -> bool:
        """Stand in the queues of the rules that denied a request for `pause_ns`.

        It leaves the queues of limits for which it had to wait for a shorter time. Returns False if
        a queue is full.
        """
        with self._lock:
            if not self._has_room(waiter, places):
                return False
            kept = {place: ns for place, ns in waiter.held_ns.items() if ns >= pause_ns}
            waiter.passes, waiter.asks_ns = None, now_ns + pause_ns
            woken = self._stand(waiter, kept | dict.fromkeys(places, pause_ns))
        _wake(woken)
        return True

    def leave(self, waiter: Waiter, room: int = 0) -> None:
        """Leave all queues, and wake the requests that may ask next.

        `room` is how many units are left: all requests that fit may ask at the same time.
        """
        if not waiter.held_ns:
            return
        # The garbage collector ends the steps of a task that was abandoned. It may run in any
        # thread at any time, also in one that holds this lock.
        if not self._lock.acquire(timeout=_LOCK_S_MAX):
            waiter.is_abandoned = True
            return
        try:
            woken = self._stand(waiter, {}, room)
        finally:
            self._lock.release()
        _wake(woken)

    def turn(self, waiter: Waiter, seconds: float) -> Ask:
        """Wait until it may be the waiter's turn, but at most for some seconds."""
        return Ask(_turn_in_thread, _turn_awaited, self, waiter, min(seconds, LOOK_S_MAX))

    def sleeps(self, waiter: Waiter, wake: Callable[[], object]) -> bool:
        """Register how to wake a waiter. Returns False if its turn has come already."""
        with self._lock:
            waiter.wake = wake if self._earlier(waiter) else None
            return waiter.wake is not None

    # The methods below are called with the lock.

    def _front(self, place: Place) -> Waiter | None:
        """Return the first of a queue, and remove those that are gone; None if it is empty."""
        queue = self._queues.get(place, [])
        while queue and queue[0].is_gone:
            gone = queue.pop(0)
            del gone.held_ns[place]
            self._waiters -= not gone.held_ns
        if not queue:
            self._queues.pop(place, None)
        return queue[0] if queue else None

    def _earlier(self, waiter: Waiter) -> dict[Place, Waiter]:
        """Return the front of each queue in which an earlier request waits."""
        return {
            place: front
            for place in waiter.watched
            if (front := self._front(place)) is not None
            and front.ticket < waiter.ticket
            and place != waiter.passes
        }

    def _has_room(self, waiter: Waiter, places: Iterable[Place]) -> bool:
        """Return True if a request may stand in these queues; otherwise log it."""
        for place in places:
            waiting = len(self._queues.get(place, ()))
            if waiting >= WAITERS_OF_SUBJECT_MAX and place not in waiter.held_ns:
                _seldom.note(
                    "denied at once: %d requests already wait for %s of the rule %s; send fewer, "
                    "or raise the limit",
                    waiting,
                    show(place.subject),
                    show(place.rule),
                    key=str(place),
                )
                return False
        if self._waiters >= WAITERS_MAX and not waiter.held_ns:
            _seldom.note(
                "denied at once: %d requests already wait on one store; send fewer", self._waiters
            )
            return False
        return True

    def _stand(self, waiter: Waiter, held_ns: dict[Place, int], room: int = 0) -> list[Waiter]:
        """Stand in these queues and in no others. Returns the waiters to wake."""
        left = [place for place in waiter.held_ns if place not in held_ns]
        for place in held_ns:
            queue = self._queues.setdefault(place, [])
            at = bisect_left(queue, waiter.ticket, key=_ticket)
            if at == len(queue) or queue[at] is not waiter:
                queue.insert(at, waiter)
        self._waiters += bool(held_ns) - bool(waiter.held_ns)
        waiter.held_ns = held_ns
        return [each for place in left for each in self._without(waiter, place, room)]

    def _without(self, waiter: Waiter, place: Place, room: int) -> list[Waiter]:
        """Remove a waiter from a queue. Returns the waiters that may ask next."""
        queue = self._queues.get(place, [])  # there is none if it is from before a fork
        at = bisect_left(queue, waiter.ticket, key=_ticket)
        if at < len(queue) and queue[at] is waiter:
            del queue[at]
        front = self._front(place)
        woken = [] if front is None else [front]
        for each in queue:
            room -= each.cost
            # A request that has to wait for another limit, too, is not overtaken.
            if room < 0 or len(each.held_ns) > 1:
                break
            each.passes = place
            woken.append(each)
        return woken


def _turn_in_thread(queues: WaitingQueues, waiter: Waiter, seconds: float) -> None:
    woken = threading.Event()
    if queues.sleeps(waiter, woken.set):
        woken.wait(seconds)


async def _turn_awaited(queues: WaitingQueues, waiter: Waiter, seconds: float) -> None:
    woken = asyncio.Event()
    loop = waiter.loop = asyncio.get_running_loop()
    if queues.sleeps(waiter, lambda: loop.call_soon_threadsafe(woken.set)):
        timer = loop.call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()


def _ticket(waiter: Waiter) -> int:
    return waiter.ticket


def _wake(waiters: Sequence[Waiter]) -> None:
    for each in waiters:
        if each.wake is not None:
            with suppress(RuntimeError):  # its event loop was closed
                each.wake()


class SharedTurn:
    """The turn of one request, among the processes whose requests wait for the same subject."""

    __slots__ = ("_clock", "_denials", "_is_held", "_pause_ns", "_sleep", "_store", "_subject")

    def __init__(self, store: Store, clock: Clock, sleep: Callable[[float], object]) -> None:
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._subject = ""
        self._pause_ns = 0
        self._denials = 0
        self._is_held = False

    def take(self, deadline_ns: int | None) -> Steps[None]:
        """Wait for the turn before a request asks again. At its deadline it asks without."""
        if not self._subject or self._is_held:
            return
        lasts_ns = min(2 * self._pause_ns + NS_PER_SECOND, _TURN_NS_MAX)
        while True:
            self._is_held = True  # also if the caller is cancelled before the reply is there
            try:
                self._is_held = yield Call(self._store.mark, self._subject, _TURN, lasts_ns)
            except StoreError:  # the failure policy answers the check
                self._is_held = False
                return
            most_s = self._pause_ns / NS_PER_SECOND / _LOOKS_OF_WAIT
            most_s = min(max(most_s, _LOOK_S_MIN), _LOOK_S_MAX)
            look_s = RANDOM.uniform(most_s / 4, most_s)
            left_ns = None if deadline_ns is None else deadline_ns - self._clock.now_ns()
            if self._is_held or (left_ns is not None and left_ns < look_s * NS_PER_SECOND):
                return
            yield Call(self._sleep, look_s)

    def aim(self, places: Sequence[Place], pause_ns: int = 0) -> None:
        """Take the turn of the first of these subjects before the next check."""
        if self._is_held or self._store.is_private:
            return
        self._pause_ns, self._subject = pause_ns, ""
        if places:
            text = repr(places[0]).encode("utf-8", "surrogatepass")
            self._subject = blake2b(text, digest_size=16).hexdigest()

    def denied(self, places: Sequence[Place], pause_ns: int, *, may_keep: bool) -> Steps[None]:
        """Give the turn back, unless the request has waited long enough to keep it."""
        self._denials += 1
        if self._denials <= _DENIALS_PATIENT or not may_keep or not places:
            yield from self.give()
        self.aim(places, pause_ns)

    def give(self) -> Steps[None]:
        """Give the turn back."""
        if self._is_held:
            self._is_held = False
            with suppress(StoreError):
                yield Undo(self._store.mark, self._subject, _TURN, 0)


_queues_of: Final[WeakKeyDictionary[Store, WaitingQueues]] = WeakKeyDictionary()


def queues_of(store: Store) -> WaitingQueues:
    """Return the queues of a store, which all limiters on it share."""
    return _queues_of.setdefault(store, WaitingQueues())


def check_priority(priority: object) -> None:
    """Raise ConfigError for an unknown class of requests."""
    if not isinstance(priority, str) or priority not in PRIORITIES:
        raise ConfigError(
            f"priority={show(priority)} is not known; choose one of {', '.join(PRIORITIES)}"
        )


def places_of(plan: CheckPlan, denial: Decision | None = None) -> list[Place]:
    """Return the queues for which a request may have to wait; of a denial, those of its rules."""
    rules: set[str] | None = None
    if denial is not None and len(plan.enforced) > 1:
        rules = {denial.rule}
        if isinstance(denial.source, tuple):  # several rules denied it
            rules.update(denial.source)
    return [
        Place(
            check.rule.id,
            check.subject,
            tuple([limit.identity for limit in check.counter.limits]),
        )
        for check in plan.enforced
        if rules is None or check.rule.id in rules
    ]


def jitter_ns(store: Store, pause_ns: int) -> int:
    """Return how much later than necessary a request asks again, if other processes wait, too."""
    if store.is_private:
        return 0
    return int(RANDOM.random() * min(pause_ns // _JITTER_PART, _JITTER_NS_MAX))


def leaving_room(
    make_counter: MakeCounter, plan: CheckPlan, *, spent: bool
) -> Steps[Decision | None]:
    """Return the denial of a batch request that would take the last fifth of a limit, or None.

    Call it before the units are spent, and again afterwards: another request may have spent between
    the two. A limit of fewer than five units has no fifth to leave. Raises CapacityError.
    """
    denied: list[Decision] = []
    for check in plan.enforced:
        for alone in _counters_of_limits(make_counter, check):
            least = min(alone.limits, key=_capacity)
            left = least.capacity // BATCH_LEAVES
            if least.algorithm == IN_FLIGHT:  # a request takes one slot, whatever its units
                with suppress(StoreError):
                    now: Decision = yield Call(alone.peek, check.counted, 0)
                    if now.remaining < left + (not spent):
                        wait_ns = max(now.retry_after_ns, RETRY_MIN_NS)
                        denied.append(decision_with(now, allowed=False, retry_after_ns=wait_ns))
                continue
            units = left if spent else left + check.units
            if check.units > least.capacity - left:
                raise CapacityError(check.units, least, least.capacity - left, BATCH_SHARE)
            with suppress(StoreError):  # the check has the answer of the failure policy
                found: Decision = yield Call(alone.peek, check.counted, units)
                if not found.allowed:
                    denied.append(found)
    return combine_decisions(denied) if denied else None


def _counters_of_limits(make_counter: MakeCounter, check: RuleCheck) -> list[Counter]:
    """Return a counter for each limit of a rule.

    In one region, a counter of one limit has the same count as the counter of all of them. The
    limits of a global rule are counted together, so they have one counter.
    """
    counter, rule = check.counter, check.rule
    if len(counter.limits) == 1 or rule.across is not None:
        return [counter]
    return [make_counter((limit,), rule.id) for limit in counter.limits]


def _capacity(limit: Limit) -> int:
    return limit.capacity
