"""THE PATH: identify → match → decide → answer → record, the same for threads and asyncio.

    identify  a key, or the fields of a Request that a rule counts by, becomes a subject
    match     a `Plan` has the charges of the rules that match, or the verdict of the lists
    decide    the store makes all charges, or none (`Store.check_together`, `decide/decider.py`)
    answer    the decisions of the rules become one; where the store cannot decide, the failure
              policy of the rule answers (`decide/failure.py`)
    record    counts of rules and checks, and penalties

The rules in force make the plan (`rules/compiled.py`), or `OwnLimits` for a limiter without rules.

The logic is written once, as steps (`core/steps.py`). Nearly every request has one enforced rule,
no shadow rule and no penalties. `decide` and `decide_async` make the charge of such a request
directly, because a generator would cost more than a check in memory. Any other request, and any
error, takes the steps.

- *Enforced rules* decide together: none is charged unless all of them pass.
- *Shadow rules* are decided separately, at the same time. They are charged and counted, and never
  deny.
- *Failure policies* answer for the rules that the store cannot decide: each rule by its
  `on_failure`, or the limiter's. The store decides and charges the other rules. The request passes
  if all of them let it pass. A denial of the store is exact, whatever the failed rules would say.
- *Limits that follow the load* may be too low for a cost that they admit at a lower load. That is
  a denial. A cost that never fits raises CapacityError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ratekeeper.core.errors import CapacityError, SlotLost, StoreError, StoreTimeout, show
from ratekeeper.core.model import (
    DENIED_NS,
    IN_FLIGHT,
    UNLIMITED,
    CheckResult,
    Decision,
    Request,
    ResultKind,
    decision_with,
)
from ratekeeper.core.steps import Ask, Call, CallerGone, Steps, Together, Undo, run, run_async
from ratekeeper.core.subjects import Key
from ratekeeper.decide.decider import NOT_CHARGED, passes, returning
from ratekeeper.decide.failure import (
    OPTIONAL_POLICIES,
    RETRY_AFTER_NS,
    FailedCheck,
    FailurePolicy,
    LocalCheck,
    LocalLimits,
    undecided,
)
from ratekeeper.decide.store import Answer, Charge, Store, stamp_of, stamped
from ratekeeper.limiter.charges import joined, with_charges
from ratekeeper.metrics.tally import RATE_SAMPLE_EVERY, Counts
from ratekeeper.regions.settings import Regions, limits_of_region
from ratekeeper.rules.compiled import CheckPlan, MakeCounter, RuleCheck, at_step, highest_step
from ratekeeper.rules.explain import RuleAnswer
from ratekeeper.rules.penalties import Penalties
from ratekeeper.rules.splitting import sum_of_parts, whole_decision

_KINDS: Final[dict[str | None, ResultKind]] = {
    None: "unlimited",
    "allow": "exempt",
    "deny": "blocked",
}
# The decisions on requests that no limit applies to, by the verdict of the lists.
_WITHOUT_LIMITS: Final[dict[str | None, Decision]] = {
    None: Decision(True, UNLIMITED, UNLIMITED.capacity),
    "allow": Decision(True, UNLIMITED, UNLIMITED.capacity, rule="allow"),
    "deny": Decision(False, UNLIMITED, 0, DENIED_NS, DENIED_NS, rule="deny"),
}
# Three times as fast as calling CheckResult, whose constructor is written in Python.
new_result: Final = tuple.__new__

# Fields that many clients share. A rule that counts by nothing else has no client as its subject.
_NOT_CLIENTS: Final = frozenset({"endpoint", "method", "tier"})

RuleChecks = Sequence[RuleCheck]
# A key or a request, with the plan of its charges.
Planned = tuple[CheckPlan, Key | Request]
# A decision, and the shadow rules that would have denied.
Decided = tuple[Decision, RuleChecks]


class _MayFail:
    """The positions of the rules that may fail: the other rules are still charged.

    Nearly every request has no failure, so a position is computed only when a store asks for it.
    """

    __slots__ = ("_checks", "_default")

    def __init__(self, default: FailurePolicy, checks: RuleChecks) -> None:
        self._default = default
        self._checks = checks

    def __contains__(self, at: object) -> bool:
        if not isinstance(at, int):
            return False
        return (self._checks[at].rule.on_failure or self._default) in OPTIONAL_POLICIES


class CheckPath:
    """The path of a check on one store."""

    def __init__(
        self,
        store: Store,
        on_failure: FailurePolicy,
        local: LocalLimits,
        counts: Counts,
        penalties: Penalties,
        regions: Regions | None = None,
    ) -> None:
        """`on_failure` is the failure policy of rules that have none.

        `local` decides in the store's place for rules that are `on_failure: local`.
        """
        self._check_together = store.check_together
        self.on_failure = on_failure
        self.local = local
        self._counts = counts
        self._tally = counts.tally
        self._by_rule = counts.by_rule
        self._penalties = penalties
        self._regions = regions

    # ── Decide: the two links ──────────────────────────────────────────────────────────────────

    def decide(self, plan: CheckPlan, key: Key | Request) -> Decided:
        """Charge a request in this thread, if all of its rules have room."""
        checks = plan.enforced
        penalties = self._penalties
        if plan.shadowed or (penalties.counters and not penalties.are_clear(checks)):
            return run(self.deciding([(plan, key)]))[0]
        if not checks:
            return self._without_limits(plan), ()
        answers: Any = None
        try:
            if len(checks) == 1:
                check = checks[0]
                answer: Any = check.counter.check(check.counted, check.units)
                if type(answer) is Ask:
                    answer = answer.wait(*answer.args)
                self._count_check(answer, checks)
                decision = self._counted(check, answer)
            else:
                answers = self._check_together(plan.joint, _MayFail(self.on_failure, checks))
                if type(answers) is Ask:
                    answers = answers.wait(*answers.args)
        except StoreError as error:
            answers = [error] * len(checks)
        except CapacityError:  # rare: the steps find out whether it never fits
            return run(self.deciding([(plan, key)]))[0]
        if answers is not None:
            if _has(StoreError, answers):
                return run(self._decisions([(plan, key)], answers))[0], ()
            decision = self._combined(checks, answers)
        if penalties.counters and not decision.allowed:
            run(penalties.penalise(checks, decision))
        return decision, ()

    async def decide_async(self, plan: CheckPlan, key: Key | Request) -> Decided:
        """Charge a request on asyncio, if all of its rules have room."""
        checks = plan.enforced
        penalties = self._penalties
        if plan.shadowed or (penalties.counters and not penalties.are_clear(checks)):
            return (await run_async(self.deciding([(plan, key)])))[0]
        if not checks:
            return self._without_limits(plan), ()
        answers: Any = None
        try:
            if len(checks) == 1:
                check = checks[0]
                answer: Any = check.counter.check(check.counted, check.units)
                if type(answer) is Ask:
                    answer = await answer.send(*answer.args)
                self._count_check(answer, checks)
                decision = self._counted(check, answer)
            else:
                answers = self._check_together(plan.joint, _MayFail(self.on_failure, checks))
                if type(answers) is Ask:
                    answers = await answers.send(*answers.args)
        except StoreError as error:
            answers = [error] * len(checks)
        except CapacityError:  # rare: the steps find out whether it never fits
            return (await run_async(self.deciding([(plan, key)])))[0]
        if answers is not None:
            if _has(StoreError, answers):
                return (await run_async(self._decisions([(plan, key)], answers)))[0], ()
            decision = self._combined(checks, answers)
        if penalties.counters and not decision.allowed:
            await run_async(penalties.penalise(checks, decision))
        return decision, ()

    # ── Decide: the steps ──────────────────────────────────────────────────────────────────────

    def deciding(self, planned: Sequence[Planned]) -> Steps[list[Decided]]:
        """Decide requests with any rules together: if one of them is denied, none is charged."""
        checks = [check for plan, _ in planned for check in plan.enforced]
        shadowed = [check for plan, _ in planned for check in plan.shadowed]
        barred, looks = self._penalties.standing(checks)
        answers: list[Answer] = []
        shadow_answers: Sequence[RuleAnswer] | None = None
        is_denied = bool(barred) or any(plan.verdict == "deny" for plan, _ in planned)
        if not is_denied:
            try:
                answers, barred, shadow_answers = yield from self._answers(checks, looks, shadowed)
            except CapacityError as error:
                barred = yield from _too_high(checks, error)
        if is_denied or barred:
            decisions = yield from self._denied_together(planned, barred)
        else:
            decisions = yield from self._decisions(planned, answers)
        for (plan, _), decision in zip(planned, decisions, strict=True):
            yield from self._penalties.penalise(plan.enforced, decision)
        if not shadowed:
            return [(decision, ()) for decision in decisions]
        # A request that has waited until the deadline does not wait again for rules that cannot
        # deny it.
        if shadow_answers is None and not _has(StoreTimeout, answers):
            shadow_answers = yield Together([_check_call(each) for each in shadowed])
        return self._with_shadows(planned, decisions, shadow_answers or [])

    def _answers(
        self, checks: RuleChecks, looks: Mapping[int, Charge], shadowed: RuleChecks
    ) -> Steps[tuple[list[Answer], dict[int, Decision], Sequence[RuleAnswer] | None]]:
        """Charge the rules, all or none, and look at cool-downs in the same step.

        Returns the answers, the denials by cool-downs by position, and the answers of shadow rules
        if they are known. `looks` are the charges of the cool-downs, by the positions of their
        rules. Raises CapacityError; nothing is charged then.
        """
        if not checks:
            return [], {}, None
        asked_ns = self._penalties.now_ns()
        charges = [*_charges(checks), *looks.values()]
        may_fail = _MayFail(self.on_failure, [*checks, *[checks[at] for at in looks]])
        call = _check_call(checks[0])
        if len(charges) > 1:
            call = Call(self._check_together, charges, may_fail)
        answer, shadow_answers, cancelled = yield from _asked_with(call, shadowed)
        found = answer if isinstance(answer, list) else [answer] * len(charges)
        answers, barred = found[: len(checks)], {}
        for at, look in zip(looks, found[len(checks) :], strict=True):
            if not isinstance(look, StoreError):
                denial = self._penalties.learn(checks[at], look, _retry_ns(answers[at]), asked_ns)
                if denial is not None:
                    barred[at] = denial
            elif at not in may_fail:
                answers[at] = look
        if (cancelled or barred) and passes(dict(enumerate(found)), may_fail):
            yield from returning(charges, found)
        if cancelled:
            raise CallerGone
        return answers, barred, shadow_answers

    def _denied_together(
        self, planned: Sequence[Planned], denied: Mapping[int, Decision]
    ) -> Steps[list[Decision]]:
        """Return the decisions on requests of which one is denied without a charge.

        A list denies it, or a rule in `denied`, by the positions of the rules.
        """
        decisions: list[Decision] = []
        place = 0
        for plan, key in planned:
            own = [at for at in range(len(plan.enforced)) if place + at in denied]
            if not plan.enforced:
                decision = self._without_limits(plan)
            elif own:
                decision = self._counted(plan.enforced[own[0]], denied[place + own[0]])
            else:
                decision = yield from self.peeking(plan, key)
            if plan.enforced:
                self._count_check(decision, plan.enforced)
            decisions.append(decision)
            place += len(plan.enforced)
        return decisions

    def peeking(self, plan: CheckPlan, key: Key | Request) -> Steps[Decision]:
        """Return the decision that a check would get. Spends and counts nothing."""
        checks = plan.enforced
        if not checks:
            return _WITHOUT_LIMITS[plan.verdict]
        answers: list[Answer] = []
        try:
            for check in checks:
                try:
                    answers.append((yield from self.peeking_rule(check)))
                except StoreError as error:
                    answers.append(error)
        except CapacityError as error:
            denied = yield from _too_high(checks, error)
            return next(iter(denied.values()))
        for answer in answers:
            if isinstance(answer, Decision) and answer.penalty is not None:
                return answer
        return self._decision(checks, key, answers, spend=False)

    def peeking_rule(self, check: RuleCheck) -> Steps[Decision]:
        """Return the decision of one rule as the store has it now: by its penalty, or its limits.

        Raises StoreError and CapacityError.
        """
        try:
            denial = yield from self._penalties.peeking(check)
            if denial is not None:
                return denial
        except StoreError as error:
            # A request does not wait twice for a store that has not answered.
            if isinstance(error, StoreTimeout) or self._policy(check) not in OPTIONAL_POLICIES:
                raise
        return (yield from _peeking_limits(check))

    # ── Answer ─────────────────────────────────────────────────────────────────────────────────

    def _without_limits(self, plan: CheckPlan) -> Decision:
        """Return the decision on a request without limits, counted."""
        kind = _KINDS[plan.verdict]
        self._tally.unruled[kind] = self._tally.unruled.get(kind, 0) + 1
        return _WITHOUT_LIMITS[plan.verdict]

    def _decisions(
        self, planned: Sequence[Planned], answers: Sequence[Answer]
    ) -> Steps[list[Decision]]:
        """Return the decision on each request from the answers to all of their rules, in order.

        If the store has failed, limits of this machine may deny a request whose other rules it has
        charged. Those charges are returned.
        """
        checks = [check for plan, _ in planned for check in plan.enforced]
        yield from self._freeing(checks, answers)
        may_fail = _MayFail(self.on_failure, checks)
        charged = _has(StoreError, answers) and passes(dict(enumerate(answers)), may_fail)
        left: Iterator[Any] = iter(answers)
        decisions = [
            self._decision(plan.enforced, key, [next(left) for _ in plan.enforced], charged=charged)
            if plan.enforced
            else self._without_limits(plan)
            for plan, key in planned
        ]
        if charged and not all(decisions):
            yield from returning(_charges(checks), answers)
            decisions = [decision_with(decision, charged_ns=None) for decision in decisions]
        return decisions

    def freeing(self, checks: RuleChecks) -> Steps[None]:
        """Free the slots of a request. Raises StoreError, after all rules were tried."""
        failure: StoreError | None = None
        for check in checks:
            self._tally.slots.drop(check.rule.id, stamp_of(check.counter))
            try:
                yield Undo(check.counter.refund, check.counted, 0, None)
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def renewing(self, make_counter: MakeCounter, checks: RuleChecks) -> Steps[None]:
        """Let the slots of a request last as long again as at first. Raises SlotLost, StoreError.

        With the store's last word on one of them, the others are not asked.
        """
        for check in checks:
            limits = tuple(each for each in check.counter.limits if each.algorithm == IN_FLIGHT)
            slots = stamped(make_counter(limits, check.rule.id), stamp_of(check.counter))
            decision: Decision | None = None
            try:
                decision = yield Call(slots.check, check.counted, 1)
            finally:
                if not decision:
                    self._counts.of(check.rule.id).renewals_failed += 1
            if not decision.allowed:
                raise SlotLost(
                    f"a request of {show(check.subject)} was in flight for longer than "
                    f"{decision.policy.per} s without a renewal, and others have all "
                    f"{decision.policy.limit} slots of rule {show(check.rule.id)}; renew slots in "
                    f"time, or raise the longest time of the limit"
                )
            self._note_slot(check)

    def _freeing(self, checks: RuleChecks, answers: Sequence[Answer]) -> Steps[None]:
        """Free the slots that failed checks may have taken: an answer may have been lost."""
        for check, answer in zip(checks, answers, strict=True):
            unknown = isinstance(answer, StoreError) and not isinstance(answer, NOT_CHARGED)
            if unknown and stamp_of(check.counter):
                with suppress(StoreError):  # it ends by itself
                    yield from self.freeing([check])

    def _combined(self, checks: RuleChecks, decisions: Sequence[Decision]) -> Decision:
        """Return one decision from those of several rules; count each rule, and the check once."""
        combined = joined(list(map(self._counted, checks, decisions)))
        self._count_check(combined, checks)
        return combined

    def _decision(
        self,
        checks: RuleChecks,
        key: Key | Request,
        answers: Sequence[Answer],
        *,
        charged: bool = True,
        spend: bool = True,
    ) -> Decision:
        """Return the decision on a request from its rules' answers; or raise an error among them.

        `charged`  whether local limits are charged; not if the request is denied already.
        `spend`    False for a peek, which is not counted and charges nothing.
        """
        decided: list[Decision] = []
        failed: list[FailedCheck] = []
        for check, answer in zip(checks, answers, strict=True):
            if isinstance(answer, StoreError):
                failed.append(self._failed_check(check, answer))
            else:
                decided.append(self._counted(check, answer) if spend else answer)
        if failed:
            self.local.note_failure(failed[0].error)
        decision: Decision | None = None
        try:
            if failed and all(decided):
                address = key.ip if isinstance(key, Request) else None
                decision = self.local.answer(failed, decided, address, spend=spend and charged)
                decision = with_charges(decision, decided)
            else:
                decision = joined(decided)
        finally:
            if spend and failed:
                self._count_failures(failed, decision, by_store=not all(decided))
        if spend:
            self._count_check(decision, checks)
        return decision

    def _failed_check(self, check: RuleCheck, error: StoreError) -> FailedCheck:
        # The whole limits, even if the rule is split: the share of each part would be rounded.
        limits = limits_of_region(check.prepared.limits, check.rule.across, self._regions)
        is_split = len(check.prepared.counters) > 1
        part = (tuple(check.counter.limits), check.counted) if is_split else None
        local = LocalCheck(limits, check.rule.id, check.subject, check.units, part)
        return FailedCheck(error, self._policy(check), local)

    def _policy(self, check: RuleCheck) -> FailurePolicy:
        return check.rule.on_failure or self.on_failure

    def _is_closed(self, checks: RuleChecks, rule: str) -> bool:
        """Return True if the rule of this id denies whenever the store cannot decide."""
        return any(check.rule.id == rule and self._policy(check) == "closed" for check in checks)

    def result(
        self, plan: CheckPlan, decision: Decision, shadow_denied: RuleChecks = ()
    ) -> CheckResult:
        """Return a decision with the rules that applied."""
        if plan.verdict is not None:
            return CheckResult(decision, kind=_KINDS[plan.verdict])
        checks = plan.enforced
        kind: ResultKind = "limited" if checks else "unlimited"
        if decision.degraded and not decision.allowed and self._is_closed(checks, decision.rule):
            kind = "unavailable"
        return new_result(
            CheckResult,
            (
                decision,
                checks[0].prepared.alone
                if len(checks) == 1
                else tuple([check.prepared.applied for check in checks]),
                kind,
                tuple([check.rule.id for check in shadow_denied]),
                tuple([(check.subject, check.units) for check in checks]),
                tuple([check.subject for check in shadow_denied]),
            ),
        )

    # ── Record ─────────────────────────────────────────────────────────────────────────────────

    def _with_shadows(
        self,
        planned: Sequence[Planned],
        decisions: Sequence[Decision],
        answers: Sequence[RuleAnswer],
    ) -> list[Decided]:
        """Count the answers of shadow rules; return each decision with those that would deny.

        A refund of the decision also returns the charges of its shadow rules.
        """
        decided: list[Decided] = []
        left = iter(answers)
        for (plan, _), decision in zip(planned, decisions, strict=True):
            own = [(check, next(left, None)) for check in plan.shadowed]
            denied = [check for check, answer in own if self._shadow_denies(check, answer)]
            charged = [answer for _, answer in own if isinstance(answer, Decision)]
            decided.append((with_charges(decision, [decision, *charged]), denied))
        return decided

    def _shadow_denies(self, check: RuleCheck, answer: RuleAnswer) -> bool:
        """Count the answer of a shadow rule, None if there is none; return True if it denies."""
        if isinstance(answer, Decision):
            return not self._counted(check, answer).allowed
        if isinstance(answer, CapacityError):
            self._counts.of(check.rule.id).shadow_denied += 1
            return True
        if answer is not None and not isinstance(answer, StoreError):
            raise answer
        self._counts.of(check.rule.id).failed += 1
        return False

    def _counted(self, check: RuleCheck, decision: Decision) -> Decision:
        """Count a rule's decision; return it as one about the whole limit if the rule is split."""
        rule = check.rule
        try:
            counts = self._by_rule[rule.id]
        except KeyError:
            counts = self._counts.of(rule.id)
        if decision.allowed:
            counts.allowed += 1
            decision.source = check
            if check.prepared.has_slots:
                self._note_slot(check)
        elif rule.mode == "shadow":
            counts.shadow_denied += 1
        elif decision.penalty is None:
            counts.denied += 1
        else:
            counts.penalty_denied += 1
            return decision
        if rule.split == 1 or len(check.prepared.counters) == 1:
            return decision
        return whole_decision(decision, check.counter.limits, check.prepared.limits)

    def _note_slot(self, check: RuleCheck) -> None:
        longest_s = max(
            each.window for each in check.prepared.limits if each.algorithm == IN_FLIGHT
        )
        self._tally.slots.note(check.rule.id, stamp_of(check.counter), longest_s)

    def _sample(self, checks: RuleChecks) -> None:
        """Note the clients of a check that is due to be sampled."""
        clients = (check.subject for check in checks if set(check.rule.by) - _NOT_CLIENTS)
        self._tally.subjects.sample(clients)

    def _count_check(self, decision: Decision, checks: RuleChecks) -> None:
        """Count a check by its decision. One in RATE_SAMPLE_EVERY is sampled."""
        tally = self._tally
        tally.degraded += decision.degraded
        if decision.allowed:
            tally.allowed = count = tally.allowed + 1
        elif decision.degraded and self._is_closed(checks, decision.rule):
            tally.unavailable = count = tally.unavailable + 1
        else:
            tally.denied = count = tally.denied + 1
        if not count % RATE_SAMPLE_EVERY:
            self._sample(checks)

    def _count_failures(
        self, failed: Sequence[FailedCheck], decision: Decision | None, *, by_store: bool
    ) -> None:
        """Count rules that the store could not decide; without a decision, an error was raised.

        `by_store` is True if the store has denied the request by other rules.
        """
        self._tally.failed(failed[0].error)
        is_local = not by_store and all(each.policy != "closed" for each in failed)
        for each in failed:
            counts = self._counts.of(each.check.rule)
            counts.failed += 1
            if decision is None:
                counts.raised += 1
            elif is_local and each.policy == "local":
                counts.local_allowed += decision.allowed
                counts.local_denied += not decision.allowed
            else:
                counts.policy_allowed += decision.allowed
                counts.policy_denied += not decision.allowed
        if decision is None:
            self._tally.raised += 1
            self._tally.degraded += 1


def _asked_with(
    call: Call, shadowed: RuleChecks
) -> Steps[tuple[Any, Sequence[RuleAnswer] | None, bool]]:
    """Return the answer of a call or its StoreError, and those of shadow rules, if there are any.

    The third is True if the caller was cancelled: what was charged has to be returned.
    """
    if not shadowed:
        try:
            return (yield call), None, False
        except StoreError as error:
            return error, None, False
    # A caller that is cancelled while it waits for a shadow rule has spent nothing.
    batch = Together([call, *map(_check_call, shadowed)], completes=True)
    answer, *shadow_answers = yield batch
    if isinstance(answer, BaseException) and not isinstance(answer, StoreError):
        raise answer
    return answer, shadow_answers, batch.cancelled


def _retry_ns(answer: Answer) -> int:
    return answer.retry_after_ns if isinstance(answer, Decision) else 0


def _check_call(check: RuleCheck) -> Call:
    return Call(check.counter.check, check.counted, check.units)


def _charges(checks: RuleChecks) -> list[Any]:
    """Return the arguments of `check_together`."""
    return [(check.counter, check.counted, check.units) for check in checks]


def _has(kind: type[StoreError], answers: Sequence[Answer]) -> bool:
    """Return True if an answer is an error of this kind.

    After a StoreTimeout, the request has waited for a store until the deadline.
    """
    for answer in answers:  # noqa: SIM110 - `any` and its generator take twice as long
        if isinstance(answer, kind):
            return True
    return False


def _peeking_limits(check: RuleCheck) -> Steps[Decision]:
    """Peek at the limits of one rule: at its counter, or at all parts if it is split."""
    decisions: list[Decision] = []
    for counter, subject in check.parts:
        decisions.append((yield Call(counter.peek, subject, check.units)))
    if len(decisions) == 1:
        return decisions[0]
    return sum_of_parts(decisions, check.counter.limits, check.prepared.limits)


def _too_high(checks: RuleChecks, error: CapacityError) -> Steps[dict[int, Decision]]:
    """Return the denial of a cost that is too high at this load, by the position of its rule.

    When the load falls is unknown. Raises the error if the cost never fits, or does not fit into
    one part of a split rule.
    """
    for check in checks:
        limits = at_step(check.choice.limits, highest_step(check.rule))
        counted = [limit.capacity for limit in limits if limit.algorithm != IN_FLIGHT]
        if counted and check.units > min(counted):
            raise error
    for at, check in enumerate(checks):
        if check.step < highest_step(check.rule):
            try:
                decision: Decision = yield Call(check.counter.peek, check.counted, 0)
            except StoreError:
                decision = undecided(check.prepared.limits[0], check.rule.id)
            denial = decision_with(
                decision, allowed=False, retry_after_ns=RETRY_AFTER_NS, delay_ns=0
            )
            return {at: denial}
    raise error
