"""THE PATH: identify → match → decide, the same for threads and asyncio.

    identify  a key, or a Request and the fields it is counted by, becomes a subject
    match     a Request has the limits of the rules that match it (`RuleEngine`)
    decide    the counter on the store charges the subject, if all limits have room

`Limiter` and `AsyncLimiter` have the same verbs. The first runs the steps below in the calling
thread, the second on asyncio. Steps call the verbs of their limiter, for example
`Call(self.check, …)`: `Limiter.check` returns the decision, `AsyncLimiter.check` is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final

from ratekeeper.core import switches
from ratekeeper.core.clock import NS_PER_SECOND, Clock, duration_ns, seconds_from_ns
from ratekeeper.core.errors import ConfigError, LimitExceeded, StoreError, StoreFull, show
from ratekeeper.core.model import (
    WINDOW_NS_MAX,
    AppliedRule,
    CheckResult,
    Decision,
    Limits,
    Request,
    check_name,
    decision_with,
    units_of,
)
from ratekeeper.core.steps import Ask, Call, Steps, Undo
from ratekeeper.core.subjects import Key, subject_of, subject_of_request
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.failure import (
    OPTIONAL_POLICIES,
    FailedCheck,
    FailurePolicy,
    LocalCheck,
    LocalLimits,
    uncounted_of,
)
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import Answer, Counter, Store
from ratekeeper.limiter.arguments import request_of
from ratekeeper.limiter.denials import denials
from ratekeeper.metrics.tally import RuleCounts, note_error
from ratekeeper.regions.settings import Regions, limits_of_region
from ratekeeper.rules.compiled import RuleCheck
from ratekeeper.rules.engine import RuleEngine, charge_limits, counters_of_limits

Duration = float | timedelta
"""A length of time: seconds, or a timedelta."""

# The store remembers the names of a subject's reservations until this long after the last one.
SETTLED_NS: Final = 3_600 * NS_PER_SECOND
# A longer timeout does not fit a clock, and means no timeout.
_TIMEOUT_NS_MAX: Final = 100 * WINDOW_NS_MAX


class LimiterPath:
    """The verbs of a limiter, as steps. `LimiterSetup` provides the parts."""

    _name: str
    _by: tuple[str, ...] | None
    _store: Store
    _engine: RuleEngine | None = None
    """The rules in force; None for a limiter without rules."""
    _counter: Counter
    """The limiter's own limits on the store; unset for a limiter from rules."""
    _across: AcrossRegions | None = None
    """How regions share the limiter's own limits; None: the limits count only this region."""
    _regions: Regions | None = None
    """The regions that share the global limits of the store."""
    _limits: Limits
    _applied: tuple[AppliedRule, ...]
    _clock: Clock
    _on_failure: FailurePolicy
    _local: LocalLimits
    _counts: RuleCounts
    """Checks of the limiter's own limits, without those that the store's compiled check counts."""
    _errors: dict[str, int]
    """Such checks that the store could not decide, by kind of error."""

    # The public verbs, which steps call. Those of AsyncLimiter are awaited.
    check: Callable[..., Any]
    peek: Callable[..., Any]
    evaluate: Callable[..., Any]
    refund: Callable[..., Any]
    _sleep: Callable[[float], Any]

    # ── Identify ───────────────────────────────────────────────────────────────────────────────

    def _subject_of(self, key: Key | Request) -> str:
        """Return the subject that a key or a request is counted under."""
        if not isinstance(key, Request):
            return subject_of(key)
        if self._by is None:
            raise ConfigError(
                "to check a Request, pass the fields that it is counted by: "
                'Limiter("100/minute", by=["tenant", "user"])'
            )
        return subject_of_request(key, self._by)

    # ── Decide ─────────────────────────────────────────────────────────────────────────────────

    def _check_limits(
        self, decide: Callable[..., Any], spend: bool, key: Key | Request, cost: int = 1
    ) -> Decision:
        """Check the limiter's own limits in this thread.

        `decide` is `check` of the counter, or `peek`, which does not `spend`. A compiled `check` of
        the store calls this for anything but a plain key and cost.
        """
        subject, units = self._subject_of(key), units_of(cost, "cost")
        if switches.limiting_off:
            return self._unlimited()
        try:
            answer = decide(subject, units)
            decision = answer.wait(*answer.args) if type(answer) is Ask else answer
        except StoreError as error:
            return self._failed(error, key, subject, units, spend=spend, counts=spend)
        return self._counted(decision) if spend else decision

    def _check_rules(self, engine: RuleEngine, key: Key | Request, cost: int = 1) -> Decision:
        """Check the rules in this thread."""
        request, units = request_of(key), units_of(cost, "cost")
        return self._unlimited() if switches.limiting_off else engine.check(request, units)

    def _peek(self, key: Key | Request, cost: int) -> Steps[Decision]:
        if self._engine is not None:
            request, units = request_of(key), units_of(cost, "cost")
            if switches.limiting_off:
                return self._unlimited()
            return (yield from self._engine.peek_steps(request, units))
        subject, units = self._subject_of(key), units_of(cost, "cost")
        if switches.limiting_off:
            return self._unlimited()
        try:
            decision: Decision = yield Call(self._counter.peek, subject, units)
        except StoreError as error:
            return self._failed(error, key, subject, units, spend=False, counts=False)
        return decision

    def _evaluate_all(
        self, checks: Sequence[tuple[Key | Request, int]]
    ) -> Steps[list[CheckResult]]:
        if switches.limiting_off:
            results: list[CheckResult] = []
            for key, cost in checks:
                results.append((yield Call(self.evaluate, key, cost)))
            return results
        if self._engine is not None:
            requests = [(request_of(key), units_of(cost, "cost")) for key, cost in checks]
            return (yield from self._engine.evaluate_all_steps(requests))
        charges = [
            (self._counter, self._subject_of(key), units_of(cost, "cost")) for key, cost in checks
        ]
        may_fail = self._on_failure in OPTIONAL_POLICIES
        answers: list[Answer] = yield Call(
            self._store.check_together, charges, range(len(charges)) if may_fail else ()
        )
        # If the store or a failure policy denies one key, nothing is charged.
        passes = all(
            may_fail if isinstance(answer, StoreError) else answer.allowed for answer in answers
        )
        decisions = [
            self._failed(answer, key, subject, units, spend=passes)
            if isinstance(answer, StoreError)
            else self._counted(answer)
            for (key, _), (_, subject, units), answer in zip(checks, charges, answers, strict=True)
        ]
        if passes and not all(decisions):  # the limits of this machine deny
            for (counter, subject, units), answer in zip(charges, answers, strict=True):
                if not isinstance(answer, StoreError) and answer.charged_ns is not None:
                    with suppress(StoreError):
                        yield Undo(counter.refund, subject, units, answer.charged_ns)
            decisions = [decision_with(decision, charged_ns=None) for decision in decisions]
        return [self.result_of(decision) for decision in decisions]

    def _unlimited(self) -> Decision:
        """Return the answer of every check while a test has switched limiting off."""
        limit = self._limits[0]
        return Decision(True, limit, limit.capacity, rule=self._name)

    def _counted(self, decision: Decision) -> Decision:
        """Count a decision of the store, and return it."""
        counts = self._counts
        if decision.allowed:
            counts.allowed += 1
        else:
            counts.denied += 1
        return decision

    def _failed(
        self,
        error: StoreError,
        key: Key | Request,
        subject: str,
        units: int,
        *,
        spend: bool,
        counts: bool = True,
    ) -> Decision:
        """Return the answer of the failure policy after the store could not decide.

        `counts` is False for a peek, which is not one of the limiter's `counts`.
        """
        self._local.note_failure(error)
        if not counts:
            return self._answer_of_policy(error, key, subject, units, spend=spend)
        note_error(self._errors, error)
        counted = self._counts
        counted.failed += 1
        try:
            decision = self._answer_of_policy(error, key, subject, units, spend=spend)
        except StoreError:
            counted.raised += 1
            raise
        allowed = decision.allowed
        if self._on_failure == "local":
            counted.local_allowed += allowed
            counted.local_denied += not allowed
        else:
            counted.policy_allowed += allowed
            counted.policy_denied += not allowed
        return decision

    def _answer_of_policy(
        self, error: StoreError, key: Key | Request, subject: str, units: int, *, spend: bool
    ) -> Decision:
        limits = limits_of_region(self._limits, self._across, self._regions)
        check = LocalCheck(limits, self._name, subject, units)
        failed = FailedCheck(error, self._on_failure, check)
        address = key.ip if isinstance(key, Request) else None
        found = self._local.answer([failed], address, spend=spend)
        decision = combine_decisions(found) if found else failed.decision()
        decision.uncounted = uncounted_of([failed])
        return decision

    def result_of(self, decision: Decision) -> CheckResult:
        """Return the result of `evaluate`, given a decision by the limiter's own limits."""
        if switches.limiting_off:
            return CheckResult(decision, kind="unlimited")
        failed = decision.degraded and not decision.allowed and self._on_failure == "closed"
        return CheckResult(decision, self._applied, "unavailable" if failed else "limited")

    def log_denial(self, key: Key | Request, decision: Decision) -> None:
        """Log a denial on `ratekeeper.denied`: at most one line a minute for each subject.

        Middleware, decorators, `hold` and `wait` log their denials. For a caller of `check`.
        """
        if decision.allowed:
            return
        if self._engine is None:
            denials.note(self.result_of(decision), self._subject_of(key))
        else:
            request = request_of(key)
            denials.note(self._engine.result_of(request, decision), request)

    # ── Refund and settle ──────────────────────────────────────────────────────────────────────

    def _refund(
        self, key: Key | Request, cost: int, decision: Decision | None = None
    ) -> Steps[None]:
        _check_decision(decision)
        if self._engine is not None:
            request, units = request_of(key), units_of(cost, "cost")
            if not switches.limiting_off:
                yield from self._engine.refund_steps(request, units, decision)
            return
        subject, units = self._subject_of(key), units_of(cost, "cost")
        charged_ns = None if decision is None else decision.charged_ns
        if not switches.limiting_off and (decision is None or charged_ns is not None):
            yield Call(self._counter.refund, subject, units, charged_ns)

    def _grant(self, key: Key | Request, units: int, ttl: Duration | None) -> Steps[None]:
        ttl_ns = _ttl_ns(ttl)
        if self._engine is not None:
            return (
                yield from self._engine.grant_steps(
                    request_of(key), units_of(units, "units"), ttl_ns
                )
            )
        yield Call(self._counter.grant, self._subject_of(key), units_of(units, "units"), ttl_ns)

    def _grant_rules(
        self, engine: RuleEngine, checks: Sequence[RuleCheck], ttl: Duration | None
    ) -> Steps[None]:
        return (yield from engine.grant_rules_steps(checks, _ttl_ns(ttl)))

    def _reset(self, key: Key | Request) -> Steps[None]:
        if self._engine is not None:
            return (yield from self._engine.reset_steps(request_of(key)))
        yield Call(self._counter.reset, self._subject_of(key))

    def _settle(
        self,
        key: Key | Request,
        reserved: int,
        actual: int,
        decision: Decision | None = None,
        reservation: str = "",
    ) -> Steps[int]:
        _check_decision(decision)
        check_name("reservation", reservation)
        units = units_of(actual, "actual") - units_of(reserved, "reserved")
        settling = self._settle_units(key, units, decision)
        if not reservation:
            return (yield from settling)
        return (yield from self._once(key, reservation, settling)) or 0

    def _once(
        self,
        key: Key | Request,
        reservation: str,
        settling: Steps[int],
        scope: tuple[str, ...] = (),
    ) -> Steps[int | None]:
        """Settle a reservation of a key; return None if the store knows that it was settled.

        Reservations of another `scope` are others.
        """
        if switches.limiting_off:
            return (yield from settling)
        subject = _settled_subject(self._name, key, scope)
        name = int.from_bytes(blake2b(reservation.encode(), digest_size=8).digest()) >> 3 or 1
        try:
            is_new: bool = yield Call(self._store.mark, subject, name, SETTLED_NS)
        except StoreFull:  # the settlement does not fail because its name cannot be kept
            is_new = True
        if not is_new:
            settling.close()
            return None
        try:
            return (yield from settling)
        except BaseException:  # the caller may try again
            with suppress(StoreError):
                yield Undo(self._store.mark, subject, name, 0)
            raise

    def _settle_units(
        self, key: Key | Request, units: int, decision: Decision | None
    ) -> Steps[int]:
        """Refund units below 0; charge those above 0, and return how many did not fit."""
        if units < 0:
            yield Call(self.refund, key, -units, decision)
        if units <= 0 or switches.limiting_off:
            return 0
        if self._engine is not None:
            return (yield from self._engine.charge_steps(request_of(key), units, decision))
        subject = self._subject_of(key)
        counters = counters_of_limits(self._store.counter, self._counter, self._name, self._across)
        return (yield from charge_limits(counters, subject, units))

    # ── Wait ───────────────────────────────────────────────────────────────────────────────────

    def _wait(self, key: Key | Request, cost: int, timeout: Duration | None) -> Steps[Decision]:
        deadline_ns: int | None = None
        if timeout is not None:
            deadline_ns = self._clock.now_ns() + duration_ns(
                "timeout", timeout, _TIMEOUT_NS_MAX, "timeout=5 (seconds)"
            )
        while True:
            decision = yield from self._counted_check(key, cost)
            pause_ns = _pause_ns(decision)
            if deadline_ns is not None and pause_ns:
                late_ns = self._clock.now_ns() + pause_ns - deadline_ns
                if late_ns > 0:
                    return (yield from self._too_late(key, cost, decision, late_ns))
            yield from self._pause(key, cost, decision)
            if decision.allowed:
                return decision_with(decision, delay_ns=0)

    def _counted_check(self, key: Key | Request, cost: int) -> Steps[Decision]:
        """Check; if the store fails and the policy is `open`, count on this machine instead."""
        decision: Decision = yield Call(self.check, key, cost)
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
        self, key: Key | Request, cost: int, decision: Decision, late_ns: int
    ) -> Steps[Decision]:
        """Return a denial; refund an admission whose delay ends after the deadline."""
        if decision.allowed:
            yield from self._take_back(key, cost, decision)
            peeked: Decision = yield Call(self.peek, key, cost)
            decision = decision_with(peeked, allowed=False, retry_after_ns=late_ns, delay_ns=0)
        self.log_denial(key, decision)
        return decision

    def _pass(self, key: Key | Request, cost: int, wait: Duration) -> Steps[Decision]:
        """Check, or wait for room, and sleep the delay. Raises LimitExceeded for a denial."""
        if wait:
            decision = yield from self._wait(key, cost, wait)
        else:
            decision = yield from self._counted_check(key, cost)
            if not decision.allowed:
                self.log_denial(key, decision)
        if not decision.allowed:
            raise LimitExceeded(decision)
        yield from self._pause(key, cost, decision)
        return decision

    def _pause(self, key: Key | Request, cost: int, decision: Decision) -> Steps[None]:
        """Sleep until a decision takes effect; refund it if the sleep is interrupted."""
        pause_ns = _pause_ns(decision)
        if not pause_ns:
            return
        try:
            yield Call(self._sleep, seconds_from_ns(pause_ns))
        except BaseException:
            yield from self._take_back(key, cost, decision)
            raise

    def _take_back(self, key: Key | Request, cost: int, decision: Decision) -> Steps[None]:
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
