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
from typing import Any, Final

from ratekeeper.core.errors import CapacityError, StoreError, StoreTimeout
from ratekeeper.core.model import (
    DENIED_NS,
    UNLIMITED,
    CheckResult,
    Decision,
    Request,
    ResultKind,
    decision_with,
)
from ratekeeper.core.steps import Ask, Call, CallerGone, Steps, Together, run, run_async
from ratekeeper.core.subjects import Key
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.decider import passes, returning
from ratekeeper.decide.failure import (
    OPTIONAL_POLICIES,
    RETRY_AFTER_NS,
    FailedCheck,
    FailurePolicy,
    LocalCheck,
    LocalLimits,
    decision_on_failure,
    uncounted_of,
)
from ratekeeper.decide.store import Answer, Store
from ratekeeper.metrics.tally import RATE_SAMPLE_EVERY, Counts
from ratekeeper.regions.settings import Regions, limits_of_region
from ratekeeper.rules.compiled import CheckPlan, RuleCheck, at_step, highest_step
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
_new_result: Final = tuple.__new__

# Fields that many clients share. A rule that counts by nothing else has no client as its subject.
_NOT_CLIENTS: Final = frozenset({"endpoint", "method", "tier"})

RuleChecks = Sequence[RuleCheck]
# A rule that was charged, and the time of the charge; None if that is not known.
RuleCharge = tuple[RuleCheck, int | None]
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
        self._store = store
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
        if plan.shadowed or self._penalties.counters:
            return run(self.deciding([(plan, key)]))[0]
        if not checks:
            return self._without_limits(plan), ()
        try:
            if len(checks) == 1:
                check = checks[0]
                answer: Any = check.counter.check(check.counted, check.units)
                if type(answer) is Ask:
                    answer = answer.wait(*answer.args)
                self._count_check(answer, checks)
                return self._counted(check, answer), ()
            answers: Any = self._check_together(plan.joint, _MayFail(self.on_failure, checks))
            if type(answers) is Ask:
                answers = answers.wait(*answers.args)
        except (StoreError, CapacityError) as error:
            return run(self._deciding_after(plan, key, error)), ()
        if _has(StoreError, answers):
            return run(self._decisions([(plan, key)], answers))[0], ()
        return self._combined(checks, answers), ()

    async def decide_async(self, plan: CheckPlan, key: Key | Request) -> Decided:
        """Charge a request on asyncio, if all of its rules have room."""
        checks = plan.enforced
        if plan.shadowed or self._penalties.counters:
            return (await run_async(self.deciding([(plan, key)])))[0]
        if not checks:
            return self._without_limits(plan), ()
        try:
            if len(checks) == 1:
                check = checks[0]
                answer: Any = check.counter.check(check.counted, check.units)
                if type(answer) is Ask:
                    answer = await answer.send(*answer.args)
                self._count_check(answer, checks)
                return self._counted(check, answer), ()
            answers: Any = self._check_together(plan.joint, _MayFail(self.on_failure, checks))
            if type(answers) is Ask:
                answers = await answers.send(*answers.args)
        except (StoreError, CapacityError) as error:
            return await run_async(self._deciding_after(plan, key, error)), ()
        if _has(StoreError, answers):
            return (await run_async(self._decisions([(plan, key)], answers)))[0], ()
        return self._combined(checks, answers), ()

    # ── Decide: the steps ──────────────────────────────────────────────────────────────────────

    def deciding(self, planned: Sequence[Planned]) -> Steps[list[Decided]]:
        """Decide requests with any rules together: if one of them is denied, none is charged."""
        barred, failures = yield from self._penalty_denials(planned)
        checks = [check for plan, _ in planned for check in plan.enforced]
        shadowed = [check for plan, _ in planned for check in plan.shadowed]
        shadow_answers: Sequence[RuleAnswer] | None = None
        waited = False
        is_barred = any(denial is not None for denial in barred)  # a denial is false
        if is_barred or any(plan.verdict == "deny" for plan, _ in planned):
            decisions = yield from self._denied_together(planned, barred)
        else:
            try:
                answers, shadow_answers = yield from self._answers(checks, failures, shadowed)
            except CapacityError as error:
                answers = yield from self._scaled_down_answers(checks, error)
            decisions = yield from self._decisions(planned, answers)
            waited = _has(StoreTimeout, answers)
        if self._penalties.counters:
            for (plan, _), decision in zip(planned, decisions, strict=True):
                yield from self._penalties.penalise(plan, decision)
        if not shadowed:
            return [(decision, ()) for decision in decisions]
        if shadow_answers is None:
            # A request that has waited until the deadline does not wait again for rules that
            # cannot deny it.
            shadow_answers = (
                [] if waited else (yield Together([_check_call(each) for each in shadowed]))
            )
        return self._with_shadows(planned, decisions, shadow_answers)

    def _deciding_after(
        self, plan: CheckPlan, key: Key | Request, error: StoreError | CapacityError
    ) -> Steps[Decision]:
        """Return the decision after an error of the store or of a cost, or raise the error."""
        if isinstance(error, StoreError):
            answers: list[Answer] = [error] * len(plan.enforced)
        else:
            answers = yield from self._scaled_down_answers(plan.enforced, error)
        return (yield from self._decisions([(plan, key)], answers))[0]

    def _penalty_denials(
        self, planned: Sequence[Planned]
    ) -> Steps[tuple[list[Decision | None], Mapping[int, StoreError]]]:
        """Return the denial of each request by a cool-down, and the rules that fail.

        The rules are those of all requests, by position; see Penalties.denial.
        """
        barred: list[Decision | None] = []
        failures: dict[int, StoreError] = {}
        if not self._penalties.counters:
            return barred, failures
        place = 0
        for plan, _ in planned:
            found, failed = yield from self._penalties.denial(plan)
            barred.append(found and found[1])
            if found is not None:
                self._counts.of(found[0].rule.id).penalty_denied += 1
            failures |= {place + at: error for at, error in self._failures_of(plan, failed).items()}
            place += len(plan.enforced)
        return barred, failures

    def _failures_of(
        self, plan: CheckPlan, failures: Mapping[int, StoreError]
    ) -> Mapping[int, StoreError]:
        """Return the rules that fail if these cool-downs cannot be read.

        All of them after a timeout of a store on one server: a request waits for it only once.
        """
        if not self._store.is_sharded:
            for error in failures.values():
                if isinstance(error, StoreTimeout):
                    return dict.fromkeys(range(len(plan.enforced)), error)
        return failures

    def _denied_together(
        self, planned: Sequence[Planned], barred: Sequence[Decision | None]
    ) -> Steps[list[Decision]]:
        """Return the decisions on requests of which a penalty or a list denies one."""
        decisions = []
        for at, (plan, key) in enumerate(planned):
            if not plan.enforced:
                decisions.append(self._without_limits(plan))
                continue
            decision = barred[at] if barred else None
            if decision is None:
                decision = yield from self.peeking(plan, key)
            self._count_check(decision, plan.enforced)
            decisions.append(decision)
        return decisions

    def _answers(
        self, checks: RuleChecks, failures: Mapping[int, StoreError], shadowed: RuleChecks
    ) -> Steps[tuple[list[Answer], Sequence[RuleAnswer] | None]]:
        """Charge the rules, all or none; return their answers, and those of shadow rules if known.

        `failures` are the rules that the store could not decide before, by position. They are not
        checked again. Raises CapacityError; nothing is charged then.
        """
        for at, failure in failures.items():
            if self._policy(checks[at]) not in OPTIONAL_POLICIES:
                return [failure] * len(checks), None  # the request ends here
        undecided = [check for at, check in enumerate(checks) if at not in failures]
        if not undecided:
            return _merged([], failures), None
        if len(undecided) == 1:
            call = _check_call(undecided[0])
        else:
            may_fail = _MayFail(self.on_failure, undecided)
            call = Call(self._check_together, _charges(undecided), may_fail)
        if not shadowed:
            try:
                answer = yield call
            except StoreError as error:
                answer = error
            return _merged(_answers_in(answer, undecided), failures), None
        # A caller that is cancelled while it waits for a shadow rule has spent nothing.
        batch = Together([call, *map(_check_call, shadowed)], completes=True)
        answer, *shadow_answers = yield batch
        if isinstance(answer, BaseException) and not isinstance(answer, StoreError):
            raise answer
        found = _answers_in(answer, undecided)
        if batch.cancelled:
            charged = passes(dict(enumerate(found)), _MayFail(self.on_failure, undecided))
            if charged:
                yield from returning(_charges(undecided), found)
            raise CallerGone
        return _merged(found, failures), shadow_answers

    def _scaled_down_answers(self, checks: RuleChecks, error: CapacityError) -> Steps[list[Answer]]:
        """Peek at all rules; the one whose limits are too low at this load denies.

        Raises the error if the cost never fits.
        """
        scaled_down = _scaled_down(checks, error)
        answers: list[Answer] = []
        for check in checks:
            try:
                decision: Decision = yield Call(check.counter.peek, check.counted, 0)
            except StoreError as failure:
                if check is scaled_down:
                    answers.append(_denied_without_numbers(check, failure))
                else:
                    answers.append(failure)
            else:
                answers.append(_denied_for_now(decision) if check is scaled_down else decision)
        return answers

    def peeking(self, plan: CheckPlan, key: Key | Request) -> Steps[Decision]:
        """Return the decision that a check would get. Spends and counts nothing."""
        checks = plan.enforced
        if not checks:
            return _WITHOUT_LIMITS[plan.verdict]
        failures: Mapping[int, StoreError] = {}
        if self._penalties.counters:
            found, failures = yield from self._penalties.denial(plan)
            if found is not None:
                return found[1]
        undecided = [check for at, check in enumerate(checks) if at not in failures]
        try:
            answers = yield from _peek_rules(undecided)
        except CapacityError as error:
            answers = yield from self._scaled_down_answers(undecided, error)
        return self._decision(checks, key, _merged(answers, failures), spend=False)

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

        Limits of this machine may deny a request whose other rules the store has charged. Those
        charges are returned.
        """
        left: Iterator[Any] = iter(answers)
        if not _has(StoreError, answers):
            return [
                self._combined(plan.enforced, [next(left) for _ in plan.enforced])
                if plan.enforced
                else self._without_limits(plan)
                for plan, _ in planned
            ]
        checks = [check for plan, _ in planned for check in plan.enforced]
        charged = passes(dict(enumerate(answers)), _MayFail(self.on_failure, checks))
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

    def _combined(self, checks: RuleChecks, decisions: Sequence[Decision]) -> Decision:
        """Return one decision from those of several rules; count each rule, and the check once."""
        counted = list(map(self._counted, checks, decisions))
        combined = combine_decisions(counted)
        self._count_check(combined, checks)
        return combined if len(counted) == 1 else _with_charges(combined, counted)

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
        failed: list[tuple[RuleCheck, StoreError]] = []
        for check, answer in zip(checks, answers, strict=True):
            if isinstance(answer, StoreError):
                failed.append((check, answer))
            else:
                decided.append(self._counted(check, answer) if spend else answer)
        if failed:
            self._note_failures(failed, spend=spend)
        if failed and all(decided):
            return self._policy_decision(key, checks, decided, failed, charged=charged, spend=spend)
        decision = combine_decisions(decided)
        if spend:
            self._count_check(decision, checks)
            self._count_degraded(failed, allowed=False, is_local=False)
        return _with_charges(decision, decided)

    def _policy_decision(
        self,
        key: Key | Request,
        checks: RuleChecks,
        decided: Sequence[Decision],
        failed: Sequence[tuple[RuleCheck, StoreError]],
        *,
        charged: bool,
        spend: bool,
    ) -> Decision:
        """Return the decision on a request that the store allows, as far as it could decide."""
        failed_checks = [self._failed_check(check, error) for check, error in failed]
        address = key.ip if isinstance(key, Request) else None
        try:
            found = self.local.answer(failed_checks, address, spend=spend and charged)
        except StoreError:
            if spend:
                self._count_raised(failed)
            raise
        if decided or found:
            decision = decision_with(combine_decisions([*decided, *found]), degraded=True)
            decision = _with_charges(decision, decided)
        else:
            decision = combine_decisions([each.decision() for each in failed_checks])
        decision.uncounted = uncounted_of(failed_checks)
        if spend:
            self._count_check(decision, checks)
            is_local = bool(found) and all(each.policy != "closed" for each in failed_checks)
            self._count_degraded(failed, allowed=decision.allowed, is_local=is_local)
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
        if not checks:
            ids, subjects = _shadows(shadow_denied) if shadow_denied else ((), ())
            return CheckResult(decision, (), "unlimited", ids, (), subjects)
        kind: ResultKind = "limited"
        if decision.degraded and not decision.allowed and self._is_closed(checks, decision.rule):
            kind = "unavailable"
        ids, subjects = _shadows(shadow_denied) if shadow_denied else ((), ())
        return _new_result(
            CheckResult,
            (
                decision,
                checks[0].prepared.alone
                if len(checks) == 1
                else tuple([check.prepared.applied for check in checks]),
                kind,
                ids,
                tuple([(check.subject, check.units) for check in checks]),
                subjects,
            ),
        )

    # ── Record ─────────────────────────────────────────────────────────────────────────────────

    def _with_shadows(
        self,
        planned: Sequence[Planned],
        decisions: Sequence[Decision],
        answers: Sequence[RuleAnswer],
    ) -> list[Decided]:
        """Count the answers of shadow rules; return each decision with those that would deny."""
        decided: list[Decided] = []
        place = 0
        for (plan, _), decision in zip(planned, decisions, strict=True):
            own = answers[place : place + len(plan.shadowed)]
            place += len(plan.shadowed)
            denied = self._count_shadows(plan.shadowed, own)
            decided.append((_with_shadow_charges(decision, own), denied))
        return decided

    def _count_shadows(self, checks: RuleChecks, answers: Sequence[RuleAnswer]) -> RuleChecks:
        """Count the answers of shadow rules; return those that would have denied."""
        denied: list[RuleCheck] = []
        for check, answer in zip(checks, answers, strict=False):
            if isinstance(answer, Decision):
                self._counted(check, answer)
            elif isinstance(answer, CapacityError):
                self._counts.of(check.rule.id).shadow_denied += 1
            elif isinstance(answer, StoreError):
                self._count_failed([check])
                continue
            elif answer is not None:
                raise answer
            if not isinstance(answer, Decision) or not answer.allowed:
                denied.append(check)
        self._count_failed(checks[len(answers) :])
        return denied

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
        elif rule.mode == "shadow":
            counts.shadow_denied += 1
        else:
            counts.denied += 1
        if rule.split == 1 or len(check.prepared.counters) == 1:
            return decision
        return whole_decision(decision, check.counter.limits, check.prepared.limits)

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

    def _count_failed(self, checks: RuleChecks) -> None:
        for check in checks:
            self._counts.of(check.rule.id).failed += 1

    def _note_failures(
        self, failed: Sequence[tuple[RuleCheck, StoreError]], *, spend: bool
    ) -> None:
        self.local.note_failure(failed[0][1])
        if spend:
            self._tally.failed(failed[0][1])
            self._count_failed([check for check, _ in failed])

    def _count_raised(self, failed: Sequence[tuple[RuleCheck, StoreError]]) -> None:
        self._tally.raised += 1
        self._tally.degraded += 1
        for check, _ in failed:
            self._counts.of(check.rule.id).raised += 1

    def _count_degraded(
        self, failed: Sequence[tuple[RuleCheck, StoreError]], *, allowed: bool, is_local: bool
    ) -> None:
        """Count rules that were decided without the store, by local limits or by policy."""
        for check, _ in failed:
            counts = self._counts.of(check.rule.id)
            if is_local and self._policy(check) == "local":
                counts.local_allowed += allowed
                counts.local_denied += not allowed
            else:
                counts.policy_allowed += allowed
                counts.policy_denied += not allowed


def _with_charges(decision: Decision, decided: Sequence[Decision]) -> Decision:
    """Return a decision with its rules: each charge, for a refund, or all rules that denied."""
    if not decision.allowed:
        denied = tuple([each.rule for each in decided if not each.allowed])
        if len(denied) > 1:
            decision.source = denied
        return decision
    if decision.charged_ns is None:
        charged_ns = next(
            (each.charged_ns for each in decided if each.charged_ns is not None), None
        )
        if charged_ns is None:
            return decision
        decision = decision_with(decision, charged_ns=charged_ns)
    decision.source = [(each.source, each.charged_ns) for each in decided]
    return decision


def _with_shadow_charges(decision: Decision, answers: Sequence[RuleAnswer]) -> Decision:
    """Return a decision with the charges of shadow rules: a refund returns these too."""
    found = [each for each in answers if isinstance(each, Decision)]
    charges = [charge for each in (decision, *found) for charge in charges_in(each)]
    if not charges or not decision.allowed:
        return decision
    if decision.charged_ns is None:  # also a copy of the decision that all requests share
        decision = decision_with(decision, charged_ns=charges[0][1])
    decision.source = charges
    return decision


def charges_in(decision: Decision) -> list[RuleCharge]:
    """Return the rules that a decision charged, as the path has kept them with it."""
    source = decision.source
    if type(source) is tuple and decision.allowed:  # of a compiled check
        compiled, request, *times = source
        checks = compiled.owner.charges(request)
        found = zip(checks, *times or [(decision.charged_ns,)], strict=True)
        return [charge for charge in found if charge[1] is not None]
    if isinstance(source, list):
        return [charge for charge in source if charge[1] is not None]
    if source is None or decision.charged_ns is None:
        return []
    return [(source, decision.charged_ns)]


def _shadows(denied: RuleChecks) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids and the subjects of shadow rules that would have denied."""
    return tuple([check.rule.id for check in denied]), tuple([check.subject for check in denied])


def _answers_in(answer: Any, checks: RuleChecks) -> list[Answer]:
    """Return the answer of each rule from that of one check, of several, or an error of all."""
    return answer if isinstance(answer, list) else [answer] * len(checks)


def _check_call(check: RuleCheck) -> Call:
    return Call(check.counter.check, check.counted, check.units)


def _charges(checks: RuleChecks) -> list[Any]:
    """Return the arguments of `check_together`."""
    return [(check.counter, check.counted, check.units) for check in checks]


def _merged(answers: Sequence[Answer], failures: Mapping[int, StoreError]) -> list[Answer]:
    """Return the answers with the failures inserted at their positions."""
    left = iter(answers)
    return [failures.get(at) or next(left) for at in range(len(answers) + len(failures))]


def _has(kind: type[StoreError], answers: Sequence[Answer]) -> bool:
    """Return True if an answer is an error of this kind.

    After a StoreTimeout, the request has waited for a store until the deadline.
    """
    for answer in answers:  # noqa: SIM110 - `any` and its generator take twice as long
        if isinstance(answer, kind):
            return True
    return False


def _peek_rules(checks: RuleChecks) -> Steps[list[Answer]]:
    """Peek at each of the rules. Raises CapacityError."""
    answers: list[Answer] = []
    for check in checks:
        try:
            answers.append((yield from peeking_rule(check)))
        except StoreError as error:
            answers.append(error)
    return answers


def peeking_rule(check: RuleCheck) -> Steps[Decision]:
    """Peek at one rule: at its counter, or at all parts if it is split."""
    decisions: list[Decision] = []
    for counter, subject in check.parts:
        decisions.append((yield Call(counter.peek, subject, check.units)))
    if len(decisions) == 1:
        return decisions[0]
    return sum_of_parts(decisions, check.counter.limits, check.prepared.limits)


def _scaled_down(checks: RuleChecks, error: CapacityError) -> RuleCheck:
    """Return the rule whose limits are too low for the cost at this load only.

    Raises the error if the cost never fits, or does not fit into one part of a split rule.
    """
    for check in checks:
        most = highest_step(check.rule)
        limits = at_step(check.choice.limits, most)
        if check.units > min(limit.capacity for limit in limits):
            raise error
    found = next((check for check in checks if check.step < highest_step(check.rule)), None)
    if found is None:
        raise error
    return found


def _denied_without_numbers(check: RuleCheck, error: StoreError) -> Decision:
    """Return the denial of a cost that is too high at this load if the quota cannot be read."""
    return decision_on_failure(error, "closed", check.prepared.limits[0], check.rule.id)


def _denied_for_now(decision: Decision) -> Decision:
    """Return a denial for a cost that is too high at this load. When the load falls is unknown."""
    return decision_with(decision, allowed=False, retry_after_ns=RETRY_AFTER_NS, delay_ns=0)
