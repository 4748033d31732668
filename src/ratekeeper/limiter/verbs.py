"""The verbs of a limiter, as steps: the same for threads and asyncio.

`Limiter` runs the steps in the calling thread, `AsyncLimiter` on asyncio. `check` is decided by the
path (`path.py`); the other verbs look, return units, charge them late, or wait. Steps call the
public verbs of their limiter, for example `Call(self.check, …)`: `Limiter.check` returns the
decision, `AsyncLimiter.check` is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from ratekeeper.core import switches
from ratekeeper.core.clock import NS_PER_SECOND, Clock, duration_ns, seconds_from_ns
from ratekeeper.core.costs import Cost, Costs, check_settlement, checked_cost, largest_in
from ratekeeper.core.errors import (
    CapacityError,
    ConfigError,
    LimitExceeded,
    StoreError,
    StoreFull,
    show,
)
from ratekeeper.core.model import (
    UNLIMITED,
    WINDOW_NS_MAX,
    CheckResult,
    Decision,
    Request,
    Settlement,
    check_name,
    decision_with,
)
from ratekeeper.core.steps import Call, Steps, Undo, asking
from ratekeeper.core.subjects import Key, subject_of
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.failure import FailurePolicy, LocalLimits
from ratekeeper.decide.store import Store, stamp_of, stamped
from ratekeeper.limiter.arguments import request_of
from ratekeeper.limiter.charges import (
    CHARGED,
    Owed,
    RuleCharge,
    charges_in,
    owing,
    refunding,
    settlement_of,
    slots_in,
    without_slots,
)
from ratekeeper.limiter.denials import denials
from ratekeeper.limiter.own_limits import OwnLimits
from ratekeeper.limiter.path import CheckPath
from ratekeeper.limiter.reservations import Reservation, ReservationVerbs
from ratekeeper.limiter.waiting import (
    BEHIND_NS_MIN,
    LOOK_S_MAX,
    Priority,
    SharedTurn,
    Waiter,
    WaitingQueues,
    check_priority,
    jitter_ns,
    leaving_room,
    places_of,
)
from ratekeeper.metrics.tally import Counts
from ratekeeper.rules.compiled import CheckPlan, RuleCheck, stamped_plan
from ratekeeper.rules.engine import RuleEngine
from ratekeeper.rules.explain import Explanation, RuleAnswer, with_answers
from ratekeeper.rules.splitting import shares_of

Duration = float | timedelta
"""A length of time: seconds, or a timedelta."""

# The store remembers the names of a subject's reservations until this long after the last one.
SETTLED_NS: Final = 3_600 * NS_PER_SECOND
# A longer timeout does not fit a clock, and means no timeout.
_TIMEOUT_NS_MAX: Final = 100 * WINDOW_NS_MAX


class LimiterVerbs:
    """The verbs of a limiter, as steps. `LimiterSetup` provides the parts."""

    _name: str
    _store: Store
    _engine: RuleEngine | None = None
    """The rules in force; None for a limiter without rules."""
    _own: OwnLimits | None = None
    """The limiter's own limits; None for a limiter from rules."""
    _path: CheckPath
    _clock: Clock
    _on_failure: FailurePolicy
    _local: LocalLimits
    _queues: WaitingQueues
    """The requests that wait on the store."""
    _counts: Counts

    # The public verbs, which steps call. Those of AsyncLimiter are awaited.
    check: Callable[..., Any]
    peek: Callable[..., Any]
    refund: Callable[..., Any]
    _sleep: Callable[[float], Any]
    _reservation_verbs: Callable[[], ReservationVerbs]

    # ── Check ──────────────────────────────────────────────────────────────────────────────────

    def _plan(self, key: Key | Request, cost: Cost, what: str = "cost") -> CheckPlan:
        """Return the charges of a check. Raises InvalidKey, InvalidCost and ConfigError."""
        # Nearly every call has these types, which need no further examination.
        units = cost if type(cost) is int and cost >= 0 else checked_cost(cost, what)
        if self._engine is not None:
            request = key if type(key) is Request else request_of(key)
            return self._engine.compiled_rules.plan(request, units)
        assert self._own is not None, "a limiter has rules or limits"  # noqa: S101 - ours
        return self._own.plan(key, units)

    def _check(self, key: Key | Request, cost: Cost = 1, *, costs: Costs | None = None) -> Decision:
        """Check in this thread."""
        plan = self._plan(key, cost if costs is None else costs)
        return self._unlimited() if switches.limiting_off else self._path.decide(plan, key)[0]

    def _evaluate(self, key: Key | Request, cost: Cost = 1) -> CheckResult:
        """Check in this thread, and return a result."""
        if switches.limiting_off:
            self._plan(key, cost)
            return CheckResult(self._unlimited(), kind="unlimited")
        if self._engine is not None and type(key) is Request and type(cost) is int and cost == 1:
            found = self._engine.compiled_rules.compiled(key)
            decision = None if found is None else found[1].check(key)
            if found is not None and decision is not None:
                return found[0].result(key, decision)
        plan = self._plan(key, cost)
        return self._path.result(plan, *self._path.decide(plan, key))

    def _peek_result(self, key: Key | Request, cost: Cost) -> Steps[CheckResult]:
        plan = self._plan(key, cost)
        if switches.limiting_off:
            return CheckResult(self._unlimited(), kind="unlimited")
        return self._path.result(plan, (yield from self._path.peeking(plan, key)))

    def _peek(self, key: Key | Request, cost: Cost) -> Steps[Decision]:
        return (yield from self._peek_result(key, cost)).decision

    def _evaluate_all(
        self, checks: Sequence[tuple[Key | Request, Cost]], stamps: Sequence[int] = ()
    ) -> Steps[list[CheckResult]]:
        planned = [(self._plan(key, cost), key) for key, cost in checks]
        if stamps:
            planned = [
                (stamped_plan(plan, stamp) if stamp else plan, key)
                for (plan, key), stamp in zip(planned, stamps, strict=True)
            ]
        if switches.limiting_off:
            return [CheckResult(self._unlimited(), kind="unlimited") for _ in checks]
        decided = yield from self._path.deciding(planned)
        return [
            self._path.result(plan, *each) for (plan, _), each in zip(planned, decided, strict=True)
        ]

    def _unlimited(self) -> Decision:
        """Return the answer of every check while a test has switched limiting off."""
        limit = UNLIMITED if self._own is None else self._own.limits[0]
        return Decision(True, limit, limit.capacity, rule=self._name)

    def result_of(self, decision: Decision) -> CheckResult:
        """Return the result of `evaluate`, given a decision by the limiter's own limits."""
        if self._own is None or switches.limiting_off:
            return CheckResult(decision, kind="unlimited")
        failed = decision.degraded and not decision.allowed and self._on_failure == "closed"
        kind = "unavailable" if failed else "limited"
        # A third of the time of the constructor, which is written in Python.
        return tuple.__new__(CheckResult, (decision, self._own.applied, kind, (), (), ()))

    def log_denial(self, key: Key | Request, decision: Decision) -> None:
        """Log a denial on `ratekeeper.denied`: at most one line a minute for each subject.

        Middleware, decorators, `reserve` and `wait` log their denials. For a caller of `check`.
        """
        if decision.allowed:
            return
        if self._own is not None:
            denials.note(self.result_of(decision), self._own.subject_of(key))
        else:
            request = request_of(key)
            denials.note(self._path.result(self._plan(request, 0), decision), request)

    # ── Refund and settle ──────────────────────────────────────────────────────────────────────

    def _refund(
        self, key: Key | Request, cost: Cost, decision: Decision | None = None
    ) -> Steps[None]:
        """Return units to every rule that a decision charged; without a decision, that applies now.

        Raises StoreError, after all rules were tried.
        """
        _check_decision(decision)
        charged = self._charges_of(self._plan(key, cost), cost, decision)
        if not switches.limiting_off:
            charges = without_slots(charged)
            yield from refunding([(check, check.units, at_ns) for check, at_ns in charges])
        if decision is not None:
            yield from self._release(decision)

    def _charges_of(
        self, plan: CheckPlan, cost: Cost, decision: Decision | None
    ) -> list[RuleCharge]:
        """Return the rules that a cost has charged, each with the time of its charge if known."""
        if decision is None:
            return [(check, None) for check in plan.checks]
        charged_ns = decision.charged_ns
        if charged_ns is None:
            return []
        if self._own is not None and not slots_in(decision):
            return [(check, charged_ns) for check in plan.checks]
        if decision.source is not None:
            return [(check.at(cost), at_ns) for check, at_ns in charges_in(decision)]
        # A copy of a decision, from another process: only its own rule is known.
        return [(check, charged_ns) for check in plan.checks if check.rule.id == decision.rule]

    def _release(self, decision: Decision) -> Steps[None]:
        """Free the slots that a decision took. Raises StoreError."""
        _check_decision(decision)
        yield from self._path.freeing(slots_in(decision))

    def _release_quietly(self, decision: Decision) -> Steps[None]:
        """Free the slots that a decision took, or let them end by themselves."""
        with suppress(StoreError):
            yield from self._path.freeing(slots_in(decision))

    def _renew(self, decision: Decision) -> Steps[None]:
        """Let the slots of a decision last as long again. Raises SlotLost, StoreError."""
        _check_decision(decision)
        yield from self._path.renewing(self._store.counter, slots_in(decision))

    def _slots_of(self, key: Key | Request, stamp: int) -> list[RuleCheck]:
        """Return the rules in which a request with this stamp may have slots."""
        plan = stamped_plan(self._plan(key, 1), stamp)
        return [check for check in plan.checks if check.prepared.has_slots]

    def _release_stamp(self, key: Key | Request, stamp: int) -> Steps[None]:
        parts = [
            check._replace(counter=stamped(counter, stamp), counted=subject)
            for check in self._slots_of(key, stamp)
            for counter, subject in check.parts
        ]
        yield from self._path.freeing(parts)

    def _renew_stamp(self, key: Key | Request, stamp: int) -> Steps[None]:
        checks = self._slots_of(key, stamp)
        if any(len(check.prepared.counters) > 1 for check in checks):
            raise ConfigError(
                "a slot of a rule with `split` cannot be renewed by its number, which does not say "
                "in which part it is; raise the longest time of the limit"
            )
        yield from self._path.renewing(self._store.counter, checks)

    def _grant(self, key: Key | Request, units: int, ttl: Duration | None) -> Steps[None]:
        return self._grant_rules(self._plan(key, units, "units").checks, ttl)

    def _grant_rules(self, checks: Sequence[RuleCheck], ttl: Duration | None) -> Steps[None]:
        """Add the units of each check on top of the limits of its rule. Raises StoreError."""
        ttl_ns = _ttl_ns(ttl)
        for check in checks:
            shares = shares_of(check.units, len(check.parts))
            for (counter, subject), share in zip(check.parts, shares, strict=True):
                yield Call(counter.grant, subject, share, ttl_ns)

    def _reset(self, key: Key | Request) -> Steps[None]:
        return self._reset_rules(self._plan(key, 1).checks)

    def _reset_rules(self, checks: Sequence[RuleCheck]) -> Steps[None]:
        """Forget all units and penalties under each of these rules. Raises StoreError."""
        for check in checks:
            for counter, subject in check.parts:
                yield Call(counter.reset, subject)
            if self._engine is not None:
                yield from self._engine.penalties.reset(check)

    def _settle(
        self,
        key: Key | Request,
        reserved: Cost,
        actual: Cost,
        decision: Decision | None = None,
        reservation: str = "",
    ) -> Steps[Settlement]:
        _check_decision(decision)
        if reservation != "":
            check_name("reservation", reservation)
        plan = self._plan(key, reserved, "reserved")
        actual = checked_cost(actual, "actual")
        if not isinstance(actual, int):
            self._plan(key, actual)  # rejects a unit that no rule counts
        elif not isinstance(reserved, int):
            check_settlement(reserved, actual)
        charged = self._charges_of(plan, reserved, decision)
        checks = plan.checks
        if self._own is None:
            # A rule that was charged nothing is in no decision, and may have to be charged now.
            by_rule = {check.rule.id: check for check in checks}
            by_rule |= {check.rule.id: check for check, _ in charged}
            checks = [*by_rule.values()]
        owed: list[Owed] | None
        if reservation:
            owed = yield from self._once(key, reservation, charged, checks, actual)
        else:
            owed = yield from self._settling(charged, checks, actual)
        return settlement_of(checks, owed, reserved, actual)

    def _once(
        self,
        key: Key | Request,
        reservation: str,
        charged: Sequence[RuleCharge],
        checks: Sequence[RuleCheck],
        actual: Cost,
        scope: tuple[str, ...] = (),
    ) -> Steps[list[Owed] | None]:
        """Settle a reservation of a key; return None if the store knows that it was settled.

        Reservations of another `scope` are others. The name stays known if the settlement fails
        afterwards, because some of its units may have been charged or returned: a second attempt
        would return them again. For the same reason it completes if the caller is cancelled.
        """
        if switches.limiting_off:
            return (yield from self._settling(charged, checks, actual))
        subject = _settled_subject(self._name, key, scope)
        name = int.from_bytes(blake2b(reservation.encode(), digest_size=8).digest()) >> 3 or 1
        settling = self._settling(charged, checks, actual)
        owed: list[Owed] | None = yield Undo(asking, self._marked, subject, name, settling)
        return owed

    def _marked(
        self, subject: str, name: int, settling: Steps[list[Owed]]
    ) -> Steps[list[Owed] | None]:
        try:
            is_new: bool = yield Call(self._store.mark, subject, name, SETTLED_NS)
        except StoreFull:  # the settlement does not fail because its name cannot be kept
            is_new = True
        return (yield from settling) if is_new else None

    def _settling(
        self, charged: Sequence[RuleCharge], checks: Sequence[RuleCheck], actual: Cost
    ) -> Steps[list[Owed]]:
        """Make a request cost `actual` that has cost each rule the units of its check so far.

        Units of `charged` may be returned, as of the times of the charges; units of `checks` are
        charged in full. Returns what was not charged, for each of `checks`. Raises StoreError,
        after all rules were tried, if units could not be returned.
        """
        if switches.limiting_off:
            return [CHARGED] * len(checks)
        owed: list[Owed] = []
        for check in checks:
            missing = check.settled(actual) - check.units
            owed.append(
                (yield from owing(check, missing, self._counts)) if missing > 0 else CHARGED
            )
        returned = [
            (check, surplus, charged_ns)
            for check, charged_ns in without_slots(charged)
            if (surplus := check.units - check.settled(actual)) > 0
        ]
        if returned:
            yield from refunding(returned)
        return owed

    # ── Rules ──────────────────────────────────────────────────────────────────────────────────

    def _answers_of(
        self, explanation: Explanation, checks: Sequence[RuleCheck | None]
    ) -> Steps[Explanation]:
        """Return an explanation with the decision of each rule. Spends nothing."""
        answers: list[RuleAnswer] = []
        for check in checks:
            try:
                answers.append(
                    None if check is None else (yield from self._path.peeking_rule(check))
                )
            except (StoreError, CapacityError) as error:
                answers.append(error)
        return with_answers(explanation, answers)

    def _is_barred(self, rule: str, subject: str) -> Steps[bool]:
        """Return True if a cool-down is in force, or if this process cannot find out."""
        if self._store.is_private:
            return True
        try:
            return (yield from self._rules().penalties.is_barred(rule, subject))
        except StoreError:
            return True

    def _rules(self) -> RuleEngine:
        if self._engine is None:
            raise ConfigError(
                f"this limiter has limits, not rules; make it with "
                f'{type(self).__name__}.from_rules("limits.yaml")'
            )
        return self._engine

    # ── Wait ───────────────────────────────────────────────────────────────────────────────────

    def _wait(
        self,
        key: Key | Request,
        cost: Cost,
        timeout: Duration | None,
        priority: Priority = "interactive",
    ) -> Steps[Decision]:
        """Wait for room: an interactive request in the queue of its subject (`waiting.py`)."""
        check_priority(priority)
        deadline_ns: int | None = None
        if timeout is not None:
            deadline_ns = self._clock.now_ns() + duration_ns(
                "timeout", timeout, _TIMEOUT_NS_MAX, "timeout=5 (seconds)"
            )
        waiter = self._queues.arrive(largest_in(cost))
        turn = SharedTurn(self._store, self._clock, self._sleep)
        try:
            decision = yield from self._until_served(waiter, turn, key, cost, deadline_ns, priority)
        except GeneratorExit:  # an abandoned task cannot call the store; its turn expires
            raise
        except BaseException:
            yield from turn.give()
            raise
        finally:
            self._queues.leave(waiter)
        yield from turn.give()
        return decision

    def _until_served(
        self,
        waiter: Waiter,
        turn: SharedTurn,
        key: Key | Request,
        cost: Cost,
        deadline_ns: int | None,
        priority: Priority,
    ) -> Steps[Decision]:
        """Ask until there is room, or until the deadline would be passed."""
        is_interactive = priority == "interactive"
        if not is_interactive:
            turn.aim(places_of(self._plan(key, cost)))
        while True:
            if is_interactive:
                denial = yield from self._turn(waiter, key, cost, deadline_ns)
                if denial is not None:
                    self.log_denial(key, denial)
                    return denial
            yield from turn.take(deadline_ns)
            decision = yield from self._prioritised_check(key, cost, priority)
            pause_ns, now_ns = _pause_ns(decision), self._clock.now_ns()
            if deadline_ns is not None and pause_ns:
                late_ns = now_ns + pause_ns - deadline_ns
                if late_ns > 0:
                    return (yield from self._too_late(key, cost, decision, late_ns))
            if decision.allowed:
                yield from turn.give()
                self._queues.leave(waiter, decision.remaining)
                yield from self._pause(key, cost, decision)
                return decision_with(decision, delay_ns=0) if decision.delay_ns else decision
            places = places_of(self._plan(key, cost), decision)
            if is_interactive and not self._queues.denied(waiter, places, pause_ns, now_ns):
                self.log_denial(key, decision)
                return decision
            yield from turn.denied(places, pause_ns, may_keep=is_interactive)
            spread_ns = jitter_ns(self._store, pause_ns)
            if deadline_ns is not None:
                spread_ns = min(spread_ns, deadline_ns - now_ns - pause_ns)
            yield Call(self._sleep, seconds_from_ns(pause_ns + spread_ns))

    def _turn(
        self, waiter: Waiter, key: Key | Request, cost: Cost, deadline_ns: int | None
    ) -> Steps[Decision | None]:
        """Wait until no earlier request waits for a subject of this one.

        Returns a denial if that certainly takes too long, or if too many requests wait.
        """
        if self._queues.are_empty or switches.limiting_off:
            return None
        waiter.watched = places_of(self._plan(key, cost))
        earliest_ns: int | None = None
        while (ahead_ns := self._queues.ahead_ns(waiter)) is not None:
            has_joined = self._queues.join(waiter)
            if earliest_ns is None:
                # A cost that never fits raises CapacityError now, not when its turn has come.
                decision: Decision = yield Call(self.peek, key, cost)
                earliest_ns = self._clock.now_ns() + decision.retry_after_ns
            ahead_ns = max(ahead_ns, self._clock.now_ns() + 1)
            if not has_joined or (
                deadline_ns is not None and max(ahead_ns, earliest_ns) > deadline_ns
            ):
                return (yield from self._behind(key, cost, ahead_ns))
            left_s = LOOK_S_MAX
            if deadline_ns is not None:
                left_s = seconds_from_ns(deadline_ns - self._clock.now_ns())
            yield Call(self._queues.turn, waiter, left_s)
        return None

    def _behind(self, key: Key | Request, cost: Cost, ahead_ns: int) -> Steps[Decision]:
        """Return the denial of a request that may not ask before those ahead of it.

        Its retry time is that of the front of the queue, or its own if that is longer.
        """
        peeked: Decision = yield Call(self.peek, key, cost)
        ahead_ns = max(ahead_ns - self._clock.now_ns(), BEHIND_NS_MIN)
        retry_ns = max(peeked.retry_after_ns, ahead_ns)
        return decision_with(peeked, allowed=False, retry_after_ns=retry_ns, delay_ns=0)

    def _prioritised_check(
        self, key: Key | Request, cost: Cost, priority: Priority
    ) -> Steps[Decision]:
        """Check; a batch request is also denied the last fifth of each limit, and by waiters."""
        if priority == "interactive" or switches.limiting_off:
            return (yield from self._counted_check(key, cost))
        plan = self._plan(key, cost)
        ahead_ns = self._queues.front_asks_ns(places_of(plan))
        if ahead_ns is not None:
            return (yield from self._behind(key, cost, ahead_ns))
        denial = yield from leaving_room(self._store.counter, plan, spent=False)
        if denial is not None:
            return denial
        decision = yield from self._counted_check(key, cost)
        if decision.allowed:
            denial = yield from leaving_room(self._store.counter, plan, spent=True)
        if denial is None:
            return decision
        yield from self._take_back(key, cost, decision)
        return denial

    def _counted_check(
        self, key: Key | Request, cost: Cost, check: Callable[..., Any] | None = None
    ) -> Steps[Decision]:
        """Check; if the store fails and the policy is `open`, count on this machine instead."""
        decision: Decision = yield Call(check or self.check, key, cost)
        if not decision.degraded or not decision.allowed or not decision.uncounted:
            return decision
        counted = combine_decisions(self._local.count(decision.uncounted))
        if not counted.allowed:
            yield from self._take_back(key, cost, decision)
            return counted
        if decision.charged_ns is not None:  # the store has decided other rules
            counted = combine_decisions([decision, counted])
        return decision_with(
            decision,
            policy=counted.policy,
            remaining=counted.remaining,
            reset_after_ns=counted.reset_after_ns,
            delay_ns=counted.delay_ns,
            rule=counted.rule,
        )

    def _too_late(
        self, key: Key | Request, cost: Cost, decision: Decision, late_ns: int
    ) -> Steps[Decision]:
        """Return a denial; refund an admission whose delay ends after the deadline."""
        if decision.allowed:
            yield from self._take_back(key, cost, decision)
            peeked: Decision = yield Call(self.peek, key, cost)
            decision = decision_with(peeked, allowed=False, retry_after_ns=late_ns, delay_ns=0)
        self.log_denial(key, decision)
        return decision

    def _reserving(
        self, key: Key | Request, cost: Cost, wait: Duration, priority: Priority
    ) -> Steps[Reservation]:
        """Charge a reservation. Raises LimitExceeded for a denial."""
        # A copy: what is settled must be what was reserved.
        kept = cost if isinstance(cost, int) or not isinstance(cost, Mapping) else dict(cost)
        decision = yield from self._pass(key, kept, wait, priority)
        verbs = self._reservation_verbs()
        if slots := slots_in(decision):  # a top-up takes no other slot
            stamp = stamp_of(slots[0].counter)
            verbs = verbs._replace(charge=partial(self._check_stamped, stamp))
        return Reservation(verbs, key, kept, decision)

    def _check_stamped(self, stamp: int, key: Key | Request, cost: Cost) -> Steps[Decision]:
        """Check a request that may have slots already, under the stamp that it has."""
        plan = stamped_plan(self._plan(key, cost), stamp)
        [(decision, _)] = yield from self._path.deciding([(plan, key)])
        return decision

    def _pass(
        self, key: Key | Request, cost: Cost, wait: Duration, priority: Priority = "interactive"
    ) -> Steps[Decision]:
        """Check, or wait for room, and sleep the delay. Raises LimitExceeded for a denial."""
        if wait:
            decision = yield from self._wait(key, cost, wait, priority)
        else:
            if priority == "interactive":
                decision = yield from self._counted_check(key, cost)
            else:
                check_priority(priority)
                decision = yield from self._prioritised_check(key, cost, priority)
            if not decision.allowed:
                self.log_denial(key, decision)
        if not decision.allowed:
            raise LimitExceeded(decision)
        if decision.delay_ns:
            yield from self._pause(key, cost, decision)
        return decision

    def _pause(self, key: Key | Request, cost: Cost, decision: Decision) -> Steps[None]:
        """Sleep until a decision takes effect; refund it if the sleep is interrupted."""
        pause_ns = _pause_ns(decision)
        if not pause_ns:
            return
        try:
            yield Call(self._sleep, seconds_from_ns(pause_ns))
        except BaseException:
            yield from self._take_back(key, cost, decision)
            raise

    def _take_back(self, key: Key | Request, cost: Cost, decision: Decision) -> Steps[None]:
        """Refund an admission, as far as it was charged.

        If the store fails here, the units stay spent; the caller's own error matters more.
        """
        if decision.charged_ns is not None:
            with suppress(StoreError):
                yield Undo(self.refund, key, cost, decision)


def _check_decision(decision: object) -> None:
    if decision is not None and not isinstance(decision, Decision):
        raise ConfigError(
            f"decision={show(decision)} is not a Decision; pass the one that check returned, or "
            f"leave it out to correct a quota"
        )


def _pause_ns(decision: Decision) -> int:
    """Return how long to sleep: the delay of an admission, or the time until a retry."""
    return decision.delay_ns if decision.allowed else decision.retry_after_ns


def _ttl_ns(ttl: Duration | None) -> int | None:
    if ttl is None:
        return None
    ttl_ns = duration_ns("ttl", ttl, WINDOW_NS_MAX + 1, "ttl=3600 (seconds)")
    if not 0 < ttl_ns <= WINDOW_NS_MAX:
        raise ConfigError(f"ttl={show(ttl)} is not between 1 ns and 366 days; for example ttl=3600")
    return ttl_ns


def _settled_subject(limiter: str, key: Key | Request, scope: tuple[str, ...]) -> str:
    """Return the subject whose settlements are remembered together: one client of a limiter.

    Of a request, it is the client that the request names, whatever it asks for.
    """
    parts: Sequence[str | None]
    if isinstance(key, Request):
        attributes = [f"{name}={value}" for name, value in sorted(key.attributes.items())]
        parts = (key.tenant, key.user, key.api_key, key.ip, *attributes)
    else:
        parts = (subject_of(key),)
    text = repr((limiter, scope, *parts))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
