"""One rule's limits on Redis, for threads and for asyncio; and checks of several subjects.

A check is one call of the check script. It is answered without a call if its denial is cached, and
fails at once if the circuit breaker of its server is open. On asyncio it may go together with other
checks of the same key (see `coalescing.py`).

A check is the hot path: it has no generator, and asyncio awaits the future of the connection
itself. The other verbs are steps that both drivers run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, Final

from hiredis import ReplyError

from ratekeeper.core.errors import CapacityError, StoreError, StoreUnavailable, show
from ratekeeper.core.model import Decision
from ratekeeper.core.steps import Ask, Steps, Undo, run, run_async
from ratekeeper.decide.leasing import NO_LEASE, Lease, LeaseTerms
from ratekeeper.decide.store import Answer
from ratekeeper.decide.stores.redis.coalescing import batch_max
from ratekeeper.decide.stores.redis.codec import NS_PER_US
from ratekeeper.decide.stores.redis.connections import NotSent
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.driver import (
    AsyncioDriver,
    RedisDriver,
    RedisServers,
    ThreadDriver,
)
from ratekeeper.decide.stores.redis.scripts import (
    CheckAttempt,
    CheckKey,
    ReportAttempt,
    RuleScripts,
    ScriptCall,
    charge_replies,
    joint_call,
    report_call,
)

# Reports in one call: a script holds up all other calls of its server.
REPORTS_MAX: Final = 64
# Part of every error after which the server may have run the call.
_MAY_BE_COUNTED: Final = "may have been counted"


class RedisCounter:
    """One rule's limits on Redis: every verb is an Ask, for threads or for asyncio.

    The verbs of threads use the driver of threads, and those of asyncio that of the running loop.
    """

    __slots__ = (
        "_breakers",
        "_cache",
        "_capacity",
        "_deadline_ns",
        "_driver",
        "_driver_of_loop",
        "_servers",
        "_threads",
        "limits",
        "scripts",
    )

    def __init__(
        self,
        scripts: RuleScripts,
        threads: ThreadDriver,
        driver_of_loop: Callable[[], AsyncioDriver],
        cache: DenialCache,
    ) -> None:
        self.limits = scripts.decoder.limits
        self.scripts = scripts
        self._threads = threads
        self._driver_of_loop = driver_of_loop
        self._driver: AsyncioDriver | None = None
        self._servers = servers = threads.servers
        self._breakers = servers.breakers
        self._deadline_ns = servers.config.deadline_ns
        self._cache = cache
        # The units that may go as one call on asyncio; 0 if coalescing is off.
        coalesce = servers.config.coalesce
        self._capacity = min(limit.capacity for limit in self.limits) if coalesce else 0

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: the server decides."""

    def check(self, subject: str, cost: int) -> Ask:
        """Spend `cost` units if every limit has room. One round trip."""
        return Ask(self._check, self._check_async, subject, cost)

    def peek(self, subject: str, cost: int) -> Ask:
        """Return the answer of `check`, with the remaining quota as it is now."""
        return self._asking(self._peeking, subject, cost)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> Ask:
        """Give units that were charged at `charged_ns` back to every limit."""
        return self._asking(self._giving, subject, self.scripts.refund(subject, units, charged_ns))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> Ask | None:
        """Add extra units on top of every limit."""
        if not units:
            return None
        return self._asking(self._giving, subject, self.scripts.grant(subject, units, ttl_ns))

    def reset(self, subject: str) -> Ask:
        """Forget what the subject spent and was granted."""
        return self._asking(self._giving, subject, self.scripts.reset(subject))

    def _asking(self, steps: Callable[..., Steps[Any]], *args: Any) -> Ask:
        """Return the Ask of steps that begin with a driver."""
        return Ask(self._in_thread, self._awaited, steps, *args)

    def _in_thread(self, steps: Callable[..., Steps[Any]], *args: Any) -> Any:
        return run(steps(self._threads, *args))

    def _awaited(self, steps: Callable[..., Steps[Any]], *args: Any) -> Awaitable[Any]:
        return run_async(steps(self._driver_of_loop(), *args))

    def _decided_locally(self, check: CheckKey) -> Decision | None:
        """Return a cached denial. Raises StoreUnavailable if the server's breaker is open."""
        scripts, subject, _ = check
        if subject in self._cache.subjects:
            decision = self._cache.find(check, scripts.now())
            if decision is not None:
                return decision
        if self._breakers.any_open:
            self._servers.require_closed(scripts.key(subject))
        return None

    def _decision(self, attempt: CheckAttempt, reply: list[int]) -> Decision:
        """Return the decision in a reply; cache it if further checks are denied."""
        decision = attempt.scripts.decoder.check(reply, attempt.cost, attempt.early_ns)
        if decision.remaining < attempt.cost or attempt.subject in self._cache.subjects:
            self._cache.keep(attempt, reply, decision)
        return decision

    def _peeking(self, driver: RedisDriver, subject: str, cost: int) -> Steps[Decision]:
        scripts = self.scripts
        now, early_ns = scripts.now()
        reply = yield from driver.running(scripts.peek(subject, cost, now))
        return scripts.decoder.peek(reply, cost, early_ns)

    def _giving(self, driver: RedisDriver, subject: str, call: ScriptCall) -> Steps[None]:
        """Run a refund, a grant or a reset."""
        try:
            yield from driver.running(call)
        finally:  # also if it failed or was cancelled: the server may have run it
            self._cache.drop_subject(subject)

    def _check(self, subject: str, cost: int) -> Decision:
        check = (self.scripts, subject, cost)
        if subject in self._cache.subjects or self._breakers.any_open:
            decision = self._decided_locally(check)
            if decision is not None:
                return decision
        attempt = CheckAttempt(check, self._cache.table.mark)
        try:
            reply = self._threads.send(attempt.key, attempt.payload())
        except NotSent as error:
            reply = error
        if type(reply) is not list:
            due_ns = attempt.sent_ns + self._deadline_ns
            reply = self._threads.settle(attempt.call(), due_ns, reply)
        return self._decision(attempt, reply)

    async def _check_async(self, subject: str, cost: int) -> Decision:
        check = (self.scripts, subject, cost)
        if subject in self._cache.subjects or self._breakers.any_open:
            decision = self._decided_locally(check)
            if decision is not None:
                return decision
        driver = self._driver
        if driver is None or driver.loop is not asyncio.get_running_loop():
            driver = self._driver = self._driver_of_loop()
        coalescer = driver.coalescer
        if check not in coalescer.in_flight:
            coalescer.in_flight[check] = 1
        elif (most := batch_max(self._capacity, cost)) and coalescer.must_wait(check):
            return await coalescer.join(check, most)
        else:
            coalescer.started(check)
        answered = False
        try:
            attempt = CheckAttempt(check, self._cache.table.mark)
            try:
                reply = await driver.send(attempt.key, attempt.payload())
            except NotSent as error:
                reply = error
            if type(reply) is not list:
                due_ns = attempt.sent_ns + self._deadline_ns
                reply = await driver.settle(attempt.call(), due_ns, reply)
            answered = True
        finally:
            if coalescer.waiting or coalescer.in_flight[check] > 1:
                coalescer.finished(check, answered)
            else:  # the same without a function call, for the usual case: it was the only one
                del coalescer.in_flight[check]
        return self._decision(attempt, reply)


class JointCheck:
    """Checks of several subjects of one request: all are allowed, or none is charged.

    One server decides all of them in one script call, in one step: no other client sees a charge of
    a request that is denied. In a cluster, a script can only access keys of one slot. So there:

    1. The checks of one slot are charged, and the others are peeked at, in the same round trip.
       Those with the lowest limit go first, because they are the most likely to deny.
    2. If all of them have room, the others are charged, in a second round trip.

    A request that the first ones deny charges no other subject, not even for a moment. If one of
    the others denies, the first ones were charged for one round trip, and a refund returns exactly
    the units that they took. If another client took the last unit between the two round trips, so
    were the others that allowed the request.

    A check that fails has an error as its answer. The others are charged all the same if its
    position is in `optional`.
    """

    __slots__ = (
        "_answers",
        "_attempts",
        "_cache",
        "_charged",
        "_optional",
        "_replies",
        "_with_leases",
        "cancelled",
        "leases",
    )

    def __init__(
        self,
        checks: Sequence[CheckKey],
        cache: DenialCache,
        optional: Container[int] = (),
        terms: Sequence[LeaseTerms] = (),
    ) -> None:
        """`terms` are those of a lease for each check; without them there are no leases."""
        # Set when the caller is cancelled: then every charge must be given back.
        self.cancelled = False
        self._cache = cache
        self._optional = optional
        moment, mark = checks[0][0].now(), cache.mark
        self._attempts = [
            CheckAttempt(check, mark, moment=moment, terms=terms[at] if terms else None)
            for at, check in enumerate(checks)
        ]
        self._with_leases = bool(terms)
        # By position: the leases that came with the checks that were charged.
        self.leases: dict[int, Lease] = {}
        # By position: the last reply of each check, and its decision or error.
        self._replies: dict[int, list[int]] = {}
        self._answers: dict[int, Answer | CapacityError] = {}
        self._charged: set[int] = set()

    def decided_locally(self, servers: RedisServers) -> list[Answer] | None:
        """Return the answers if a denial of these checks is cached, or if nothing is to be sent.

        Nothing is, if the breaker of a server is open and its check is not optional: the healthy
        servers would be charged and refunded. Then all checks have the error of that server.
        """
        cached = self._cache.find_joint(self._attempts)
        if cached is not None:
            return list(cached)
        for at, attempt in enumerate(self._attempts if servers.breakers.any_open else ()):
            try:
                servers.require_closed(attempt.key)
            except StoreError as error:
                if at not in self._optional:
                    return [error] * len(self._attempts)
                self._answers[at] = error
        return None

    def deciding(self, driver: RedisDriver) -> Steps[list[Answer]]:
        """Decide the checks; return their answers. Raises CapacityError."""
        if self.cancelled:  # before anything was sent
            return []
        first, *others = self._groups(driver.servers) or [[]]
        yield from self._asking(driver, [(first, True), *((group, False) for group in others)])
        if others and self._passes() and not self.cancelled:
            rest = [[at for at in group if at in self._replies] for group in others]
            yield from self._asking(driver, [(group, True) for group in rest])
        refunded: Sequence[CheckAttempt] = ()
        passed = self._passes()
        if not passed or self.cancelled:
            refunded = yield from self._undoing(driver)
        self._note_denials(refunded)
        answers: list[Answer] = []
        for at in range(len(self._attempts)):
            answer = self._answers[at]
            if isinstance(answer, CapacityError):
                raise answer
            if not passed and at in self._replies:
                answer = self._attempts[at].denied_with_others(self._replies[at])
            answers.append(answer)
        return answers

    def _groups(self, servers: RedisServers) -> list[list[int]]:
        """Return the positions of the checks to send, by slot; the lowest limit comes first."""
        by_slot: dict[int, list[int]] = {}
        for at, attempt in enumerate(self._attempts):
            if at not in self._answers:
                by_slot.setdefault(servers.slot(attempt.key), []).append(at)
        groups = list(by_slot.values())
        if len(groups) > 1:
            groups.sort(key=lambda group: min(map(self._room_max, group)))
        return groups

    def _room_max(self, at: int) -> float:
        """Return how many such checks an untouched quota has room for."""
        attempt = self._attempts[at]
        limits = attempt.scripts.decoder.limits
        return min(limit.capacity for limit in limits) / (attempt.cost or 1)

    def _asking(self, driver: RedisDriver, groups: Sequence[tuple[list[int], bool]]) -> Steps[None]:
        """Send one call for each group of positions; charge it, or only peek."""
        called = [(group, spend) for group, spend in groups if group]
        if not called:
            return
        replies = yield from driver.running_all([self._call(*each) for each in called])
        for (group, spend), reply in zip(called, replies, strict=True):
            found = reply if type(reply) is list and len(group) > 1 else [reply] * len(group)
            if len(found) != len(group):
                found = [_unknown(reply)] * len(group)
            leased = spend and self._with_leases
            for at, part in zip(group, found, strict=True):
                error = driver.error_of(part) if isinstance(part, ReplyError) else None
                self._note(at, error or part, leased=leased)
            if spend and self._passes(group):
                self._charged.update(at for at in group if at in self._replies)
            else:
                for at in group:
                    self.leases.pop(at, None)

    def _call(self, group: list[int], spend: bool) -> ScriptCall:
        attempts = [self._attempts[at] for at in group]
        if len(attempts) > 1:
            optional = [at in self._optional for at in group]
            return joint_call(attempts, optional, spend=spend)
        [one] = attempts
        return one.call() if spend else one.scripts.peek(one.subject, one.cost, one.now)

    def _note(self, at: int, reply: Any, *, leased: bool) -> None:
        """Keep a check's reply, and the decision, the lease or the error in it."""
        self._replies.pop(at, None)
        if isinstance(reply, StoreError):
            self._answers[at] = reply
            return
        attempt = self._attempts[at]
        try:
            if type(reply) is not list:
                raise _unknown(reply)
            plain = reply[: -attempt.scripts.decoder.lease_numbers] if leased else reply
            self._answers[at] = decision = attempt.decision(plain)
            self._replies[at] = plain
            if leased and decision.allowed:
                self.leases[at] = attempt.scripts.decoder.lease(reply, decision, attempt.cost)
        except (CapacityError, StoreError) as error:
            self._answers[at] = error

    def _passes(self, group: Sequence[int] | None = None) -> bool:
        """Return True if no check denies, and only optional ones failed."""
        for at in range(len(self._attempts)) if group is None else group:
            answer = self._answers[at]
            if isinstance(answer, StoreError):
                if at not in self._optional:
                    return False
            elif isinstance(answer, CapacityError) or not answer.allowed:
                return False
        return True

    def undoing_late(self, driver: RedisDriver) -> Steps[None]:
        """Refund the charges if the caller was cancelled after all checks were decided."""
        if self._passes():  # otherwise it was given back
            yield Undo(run_async, self._undoing(driver))
            self._cache.drop_charged(self._attempts)

    def _undoing(self, driver: RedisDriver) -> Steps[list[CheckAttempt]]:
        """Refund the charges; return the checks that were charged."""
        charged = [at for at in sorted(self._charged) if self._attempts[at].cost]
        if not charged:
            return []
        calls = [
            attempt.scripts.undo(attempt.subject, self._replies[at], attempt.cost)
            for at in charged
            for attempt in [self._attempts[at]]
        ]
        for at in charged:
            lease, attempt = self.leases.pop(at, NO_LEASE), self._attempts[at]
            if lease.units:
                ends_us = lease.ends_ns // NS_PER_US
                back = ReportAttempt(attempt.scripts, attempt.subject, lease.units, False, ends_us)
                calls.append(report_call([back], attempt.now))
        undone = yield from driver.running_all(calls)
        if any(isinstance(each, StoreError) for each in undone):
            self._answers = {at: _with_undo_failure(each) for at, each in self._answers.items()}
        return [self._attempts[at] for at in charged]

    def _note_denials(self, refunded: Sequence[CheckAttempt]) -> None:
        """Cache the denial of these checks, or drop denials that may be out of date."""
        decisions = [each for each in self._answers.values() if not isinstance(each, Exception)]
        if len(decisions) == len(self._attempts) and not all(decisions):
            positions = range(len(self._attempts))
            replies = [self._replies[at] for at in positions]
            self._cache.keep_joint(self._attempts, replies, decisions, refunded)
        else:
            self._cache.drop_charged(self._attempts)


def reporting(
    driver: RedisDriver, cache: DenialCache, reports: Sequence[ReportAttempt]
) -> Steps[list[Answer]]:
    """Send the reports of a node in one batch for each server; return their answers, in order."""
    moment = reports[0].scripts.now()
    groups: dict[tuple[int, int], list[int]] = {}
    for at, each in enumerate(reports):
        slot = driver.servers.slot(each.scripts.key(each.subject))
        groups.setdefault((slot, 0 if driver.servers.clustered else at // REPORTS_MAX), []).append(
            at
        )
    calls = [report_call([reports[at] for at in group], moment[0]) for group in groups.values()]
    try:
        replies = yield from driver.running_all(calls)
    finally:  # also if it failed: the server may have taken the units back
        for each in reports:
            cache.drop_subject(each.subject)
    answers: dict[int, Answer] = {}
    for group, reply in zip(groups.values(), replies, strict=True):
        for at, part in zip(group, charge_replies(reply, len(group)), strict=True):
            answers[at] = _reported(driver, reports[at].scripts, part, moment[1])
    return [answers[at] for at in range(len(reports))]


def _reported(driver: RedisDriver, scripts: RuleScripts, reply: Any, early_ns: int) -> Answer:
    if isinstance(reply, ReplyError):
        return driver.error_of(reply)
    if isinstance(reply, StoreError):
        return reply
    try:
        if type(reply) is not list:
            raise _unknown(reply)
        return scripts.decoder.peek(reply, 0, early_ns)
    except StoreError as error:
        return error


def _unknown(reply: object) -> StoreUnavailable:
    return StoreUnavailable(f"not a reply of Redis: {show(reply)}; the call {_MAY_BE_COUNTED} once")


def _with_undo_failure(answer: Answer | CapacityError) -> Answer | CapacityError:
    """Return the error of a check; it also says that another part could not be undone."""
    if not isinstance(answer, StoreError) or _MAY_BE_COUNTED in str(answer):
        return answer
    both = StoreUnavailable(f"{answer}; another part of the request {_MAY_BE_COUNTED} once")
    both.__cause__ = answer
    return both
