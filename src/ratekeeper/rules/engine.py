"""The rule engine: turns a request and compiled rules into one decision.

The logic is written once, as steps (`core/steps.py`): generators that yield the calls they need.
`run` drives them in a thread, `run_async` in an event loop. Methods whose names end in `_steps`
return steps.

Nearly every request has one enforced rule, no shadow rule and no penalties. `decide` and
`decide_async` call the counter of such a request directly, because a generator would cost more than
the check in memory. Any other request, and any error, takes the steps.

- *Enforced rules* decide together: none is charged unless all of them pass.
- *Shadow rules* are decided separately. They are charged and counted, and never deny. On asyncio
  they are called at the same time as the enforced rules, so that they cost no extra round trip.
- *Failure policies* answer for the rules that the store cannot decide: each rule by its
  `on_failure`, or the limiter's. The store decides and charges the other rules. The request passes
  if all of them let it pass. A denial of the store is exact, whatever the failed rules would say.
- *Limits that follow the load* may be too low for a cost that they admit at a lower load. That is
  a denial. A cost that never fits raises CapacityError.

Each verb reads `compiled_rules` once. A document that is swapped in meanwhile applies to the next
call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import CapacityError, ConfigError, StoreError, StoreTimeout
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import (
    DENIED_NS,
    UNLIMITED,
    CheckResult,
    Decision,
    Request,
    ResultKind,
    decision_with,
)
from ratekeeper.core.steps import Ask, Call, Steps, Together, Undo, run, run_async
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.failure import (
    OPTIONAL_POLICIES,
    RETRY_AFTER_NS,
    FailedCheck,
    FailurePolicy,
    LocalCheck,
    LocalFallback,
    LocalLimits,
    decision_on_failure,
    uncounted_of,
)
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import (
    NEEDS_AUTHORITY,
    NEEDS_REGIONS,
    Answer,
    Counter,
    Store,
)
from ratekeeper.fleet.store import FleetStore
from ratekeeper.metrics.tally import RATE_SAMPLE_EVERY, RuleCounts, Tally
from ratekeeper.regions.settings import Regions, limits_of_region, require_shares
from ratekeeper.rules.compiled import (
    FACTOR_STEPS,
    CheckPlan,
    CompiledRules,
    MakeCounter,
    RuleCheck,
    at_step,
    factor_step,
    highest_step,
)
from ratekeeper.rules.document.model import Document, Rule
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.rules.explain import Explanation, RuleAnswer, explain, with_answers
from ratekeeper.rules.load import Factor, Loads, SourceFactor
from ratekeeper.rules.penalties import Penalties
from ratekeeper.rules.splitting import (
    part_count,
    part_limits,
    shares_of,
    sum_of_parts,
    whole_decision,
)

_log = logging.getLogger("ratekeeper.rules")

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

# Attempts to charge a limit, each with the room that the last one found.
CHARGE_ATTEMPTS_MAX: Final = 8

RuleChecks = Sequence[RuleCheck]
# A rule that was charged, and the time of the charge; None if that is not known.
RuleCharge = tuple[RuleCheck, int | None]
# The rules, the plan that they made, and a result whose applied rules can be reused.
KnownPlan = tuple[CompiledRules, CheckPlan, CheckResult | None]
# A decision, and the shadow rules that would have denied.
Decided = tuple[Decision, RuleChecks]


class RepeatedCheck:
    """A request that is checked often. Its plan is made once for each version of the rules.

    No decision is kept. Nothing is kept for rules whose plans can change (`is_steady`).
    """

    __slots__ = ("cost", "known", "request", "settles")

    def __init__(self, request: Request, cost: int, *, settles: bool = False) -> None:
        self.request = request
        self.cost = cost
        self.settles = settles
        """True if the caller will settle the cost, and needs the charges."""
        self.known: KnownPlan | None = None
        """The plan, if it can be used again."""


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


class RuleEngine:
    """A rule document in force on a store."""

    def __init__(
        self,
        store: Store,
        document: Document,
        clock: Clock,
        version: str = "",
        on_failure: FailurePolicy = "open",
        local: LocalLimits | None = None,
        *,
        entries: EntryTable | None = None,
        regions: Regions | None = None,
    ) -> None:
        """Put a document in force on a store.

        `clock`        the time by which overrides end and factors are smoothed.
        `on_failure`   the failure policy of rules that have none.
        `local`        decides in the store's place for rules that are `on_failure: local`.
        `entries`      the assignments, overrides and list entries beside the document.
        `regions`      the regions that share rules with `scope: global`.
        """
        self.loads = Loads(clock.now_ns)
        self.counts: dict[str, RuleCounts] = {}
        self.tally = Tally()
        self._store = store
        self._make_counter = store.counter
        self._check_together = store.check_together
        self._now_ns = clock.now_ns
        self._on_failure = on_failure
        self._regions = regions
        self._local = local or LocalLimits(LocalFallback(), clock)
        self._use_lock = fork_safe(threading.Lock())
        self._factors: dict[str, Factor] = {}
        self.penalties = Penalties(clock, self._make_counter, self._counts_of)
        self.compiled_rules = self._compile(document, version, entries or EntryTable())

    # ── The document ───────────────────────────────────────────────────────────────────────────

    def use(self, document: Document, version: str = "") -> None:
        """Put another document in force, in one step. Raises ConfigError and keeps the old one."""
        with self._use_lock:
            entries = self.compiled_rules.entries
            self.compiled_rules = self._compile(document, version, entries)
            # Counts are kept for the rules of the document only, so their number is bounded.
            ids = {rule.id for rule in document.rules}
            self.counts = {rule: counts for rule, counts in self.counts.items() if rule in ids}

    def use_entries(self, entries: EntryTable) -> None:
        """Put entries in force, or apply a change of those in force. It compiles nothing."""
        with self._use_lock:
            self.compiled_rules = self.compiled_rules.with_entries(entries)

    def _compile(self, document: Document, version: str, entries: EntryTable) -> CompiledRules:
        self.require_usable(document)
        self._prepare(document)
        factors: dict[str, Factor] = {}
        for rule in document.rules:
            if not rule.scale:
                continue
            factor = self._factors.get(rule.id)
            if factor is None or factor.scales != rule.scale:
                factor = Factor(rule.scale, self.loads.reading, self._now_ns)
            factors[rule.id] = factor
        self.loads.follow(scale.source for rule in document.rules for scale in rule.scale)
        compiled = CompiledRules(
            document, self._make_counter, self._now_ns, version, factors, entries
        )
        self._factors = factors
        self.penalties.use(document)
        if self._store.fleet is not None:
            self._store.fleet.use_rules(compiled.version)
        return compiled

    def require_usable(self, document: Document) -> None:
        """Raise ConfigError if this store cannot count the document's rules as it says. No I/O."""
        place, consistency = next(document.not_strict(), ("", "strict"))
        if consistency != "strict" and not isinstance(self._store, FleetStore):
            raise ConfigError(
                f"{place}: consistency: {consistency} does not work here: {NEEDS_AUTHORITY}"
            )
        for rule in document.rules:
            if rule.across is None:
                continue
            if self._regions is None:
                raise ConfigError(
                    f"rule {rule.id}: scope: global does not work without regions: {NEEDS_REGIONS}"
                )
            if rule.across == "exact":
                self._require_exact(self._regions, document, rule)

    @staticmethod
    def _require_exact(regions: Regions, document: Document, rule: Rule) -> None:
        """Raise ConfigError if a region's share of an exact rule is less than one unit."""
        # Imported here: most documents have no exact rules.
        from ratekeeper.rules.document.safety import limit_sets  # noqa: PLC0415 - see above

        for where, limits in limit_sets(document, f"rule {rule.id}", rule):
            if limits:
                parts = part_count(limits, rule.split)
                require_shares(regions, part_limits(limits, parts, parts - 1), where)

    def _prepare(self, document: Document) -> None:
        """Prepare the store for rules that nodes or regions share, and log advice about them."""
        if isinstance(self._store, FleetStore) and any(document.not_strict()):
            self._store.open_node()  # one that cannot be used is an error at startup
        found = [rule for rule in document.rules if rule.across is not None]
        for rule in found:
            # The first global rule of a process waits for the leader of the region.
            self._make_counter((UNLIMITED,), rule.id, across=rule.across)
        if self._regions is None or not any(rule.across == "exact" for rule in found):
            return
        # Imported here: most documents have no exact rules.
        from ratekeeper.rules.document.safety import (  # noqa: PLC0415 - see above
            open_exact,
            short_windows,
        )

        short = short_windows(document, len(self._regions.stores))
        for finding in (*short, *open_exact(document, self._on_failure)):
            _log.warning("%s", finding)

    def factors(self) -> dict[str, float]:
        """Return the factor of its limits, for each rule that follows the load."""
        return {
            rule: factor_step(factor()) / FACTOR_STEPS for rule, factor in self._factors.items()
        }

    def factors_by_source(self) -> dict[str, list[SourceFactor]]:
        """Return the factor by each load, for each rule that follows the load."""
        return {rule: factor.by_source() for rule, factor in self._factors.items()}

    # ── Checks: the two drivers ────────────────────────────────────────────────────────────────

    def fast_check(self, fallback: Callable[..., Decision]) -> Callable[..., Decision] | None:
        """Return `check(request, cost=1)`; None if the store does not answer at once.

        It calls `fallback` for anything but a Request and a plain cost.
        """
        if not self._store.is_local:
            return None
        decide = self.decide

        def check(request: Request, cost: int = 1) -> Decision:
            plain = type(request) is Request and type(cost) is int and cost >= 0
            if plain and not switches.limiting_off:
                return decide(self.compiled_rules.plan(request, cost), request)[0]
            return fallback(request, cost)

        return check

    def check(self, request: Request, cost: int) -> Decision:
        """Check a request in this thread."""
        return self.decide(self.compiled_rules.plan(request, cost), request)[0]

    async def check_async(self, request: Request, cost: int) -> Decision:
        """Check a request on asyncio."""
        return (await self.decide_async(self.compiled_rules.plan(request, cost), request))[0]

    def evaluate(self, request: Request, cost: int, *, spend: bool = True) -> CheckResult:
        """Check a request in this thread, or without `spend` peek; return the result."""
        plan = self.compiled_rules.plan(request, cost)
        if not spend:
            return self._result(plan, run(self._peek(plan, request)))
        return self._result(plan, *self.decide(plan, request))

    async def evaluate_async(
        self, request: Request, cost: int, *, spend: bool = True
    ) -> CheckResult:
        """Check a request on asyncio, or without `spend` peek; return the result."""
        plan = self.compiled_rules.plan(request, cost)
        if not spend:
            return self._result(plan, await run_async(self._peek(plan, request)))
        return self._result(plan, *await self.decide_async(plan, request))

    def evaluate_repeated(self, repeated: RepeatedCheck) -> CheckResult:
        """Check a request that is checked often, in this thread."""
        known = repeated.known
        if known is None or known[0] is not self.compiled_rules:
            known = self._plan_repeated(repeated)
        _, plan, earlier = known
        decision, shadow_denied = self.decide(plan, repeated.request)
        if earlier is None or shadow_denied or decision.degraded:
            return self._result(plan, decision, shadow_denied)
        return _new_result(CheckResult, (decision, earlier[1], "limited", (), earlier[4], ()))

    async def evaluate_repeated_async(self, repeated: RepeatedCheck) -> CheckResult:
        """Check a request that is checked often, on asyncio."""
        known = repeated.known
        if known is None or known[0] is not self.compiled_rules:
            known = self._plan_repeated(repeated)
        _, plan, earlier = known
        decision, shadow_denied = await self.decide_async(plan, repeated.request)
        if earlier is None or shadow_denied or decision.degraded:
            return self._result(plan, decision, shadow_denied)
        return _new_result(CheckResult, (decision, earlier[1], "limited", (), earlier[4], ()))

    def decide(self, plan: CheckPlan, request: Request) -> Decided:
        """Charge a request in this thread, if all of its rules have room."""
        checks = plan.enforced
        if plan.shadowed or self.penalties.counters:
            return run(self._decide(plan, request))
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
            answers: Any = self._check_together(plan.joint, _MayFail(self._on_failure, checks))
            if type(answers) is Ask:
                answers = answers.wait(*answers.args)
        except (StoreError, CapacityError) as error:
            return run(self._not_decided(checks, request, error)), ()
        if _has(StoreError, answers):
            return run(self._decisions([(plan, request)], answers))[0], ()
        return self._combined(checks, answers), ()

    async def decide_async(self, plan: CheckPlan, request: Request) -> Decided:
        """Charge a request on asyncio, if all of its rules have room."""
        checks = plan.enforced
        if plan.shadowed or self.penalties.counters:
            return await run_async(self._decide(plan, request))
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
            answers: Any = self._check_together(plan.joint, _MayFail(self._on_failure, checks))
            if type(answers) is Ask:
                answers = await answers.send(*answers.args)
        except (StoreError, CapacityError) as error:
            return await run_async(self._not_decided(checks, request, error)), ()
        if _has(StoreError, answers):
            return (await run_async(self._decisions([(plan, request)], answers)))[0], ()
        return self._combined(checks, answers), ()

    # ── Checks: the steps ──────────────────────────────────────────────────────────────────────

    def _decide(self, plan: CheckPlan, request: Request) -> Steps[Decided]:
        """Return the decision on a request with any number of rules, shadow rules, penalties."""
        decision, failures = yield from self._penalty_denial(plan)
        shadow_answers: Sequence[RuleAnswer] | None = None
        waited = False
        if decision is not None:
            self._count_check(decision, plan.enforced)
        elif not plan.enforced:
            decision = self._without_limits(plan)
        else:
            try:
                answers, shadow_answers = yield from self._answers(
                    plan.enforced, failures, plan.shadowed
                )
            except CapacityError as error:
                decision = yield from self._not_decided(plan.enforced, request, error)
            else:
                waited = _has(StoreTimeout, answers)
                [decision] = yield from self._decisions([(plan, request)], answers)
        if self.penalties.counters:
            yield from self.penalties.penalise(plan, decision)
        if not plan.shadowed:
            return decision, ()
        if shadow_answers is None:
            shadow_answers = yield from self._shadow_answers(plan.shadowed, waited=waited)
        denied = self._count_shadows(plan.shadowed, shadow_answers)
        return _with_shadow_charges(decision, shadow_answers), denied

    def _answers(
        self,
        checks: RuleChecks,
        failures: Mapping[int, StoreError],
        shadowed: RuleChecks = (),
    ) -> Steps[tuple[list[Answer], Sequence[RuleAnswer] | None]]:
        """Charge the rules, all or none; return their answers, and those of shadow rules if known.

        `failures` are the rules that the store could not decide before, by position. They are not
        checked again. Raises CapacityError; nothing is charged then.
        """
        for at, failure in failures.items():
            if self._policy(checks[at]) not in OPTIONAL_POLICIES:
                return [failure] * len(checks), None  # the request ends here
        undecided = checks
        if failures:
            undecided = [check for at, check in enumerate(checks) if at not in failures]
        shadow_answers = None
        found = []
        if undecided:
            call = (
                _check_call(undecided[0])
                if len(undecided) == 1
                else Call(
                    self._check_together, _charges(undecided), _MayFail(self._on_failure, undecided)
                )
            )
            if shadowed and not self._store.is_local:
                # All at the same time: the shadow rules cost no extra round trip.
                calls = [call, *map(_check_call, shadowed)]
                answer, *shadow_answers = yield Together(calls)
                if isinstance(answer, BaseException) and not isinstance(answer, StoreError):
                    raise answer
            else:
                try:
                    answer = yield call
                except StoreError as error:
                    answer = error
            found = answer if isinstance(answer, list) else [answer] * len(undecided)
        return _merged(found, failures) if failures else found, shadow_answers

    def _penalty_denial(
        self, plan: CheckPlan
    ) -> Steps[tuple[Decision | None, Mapping[int, StoreError]]]:
        """Return the denial of a cool-down, counted for its rule, or None; and the rules that fail.

        See Penalties.denial.
        """
        if not self.penalties.counters:
            return None, {}
        found, failures = yield from self.penalties.denial(plan)
        if found is None:
            return None, self._failures_of(plan, failures)
        check, decision = found
        self._counts_of(check.rule.id).penalty_denied += 1
        return decision, failures

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

    def _without_limits(self, plan: CheckPlan) -> Decision:
        """Return the decision on a request without limits, counted."""
        kind = _KINDS[plan.verdict]
        self.tally.unruled[kind] = self.tally.unruled.get(kind, 0) + 1
        return _WITHOUT_LIMITS[plan.verdict]

    def _shadow_answers(self, checks: RuleChecks, *, waited: bool) -> Steps[list[RuleAnswer]]:
        """Check shadow rules after the decision is known.

        A request that has `waited` for a store until the deadline does not wait again for rules
        that cannot deny it: the rest have no answer.
        """
        if waited:
            return []
        if not self._store.is_local:
            answers: list[RuleAnswer] = yield Together([_check_call(check) for check in checks])
            return answers
        answers = []
        for check in checks:
            try:
                answers.append((yield _check_call(check)))
            except StoreTimeout:
                break
            except (CapacityError, StoreError) as error:
                answers.append(error)
        return answers

    def _count_shadows(self, checks: RuleChecks, answers: Sequence[RuleAnswer]) -> RuleChecks:
        """Count the answers of shadow rules; return those that would have denied."""
        denied: list[RuleCheck] = []
        for check, answer in zip(checks, answers, strict=False):
            if isinstance(answer, Decision):
                self._counted(check, answer)
            elif isinstance(answer, CapacityError):
                self._counts_of(check.rule.id).shadow_denied += 1
            elif isinstance(answer, StoreError):
                self._count_failed([check])
                continue
            elif answer is not None:
                raise answer
            if not isinstance(answer, Decision) or not answer.allowed:
                denied.append(check)
        self._count_failed(checks[len(answers) :])
        return denied

    def evaluate_all_steps(
        self, requests: Sequence[tuple[Request, int]]
    ) -> Steps[list[CheckResult]]:
        """Return a result for each request; if one of them is denied, none is charged."""
        compiled = self.compiled_rules
        planned = [(compiled.plan(request, cost), request) for request, cost in requests]
        failures: dict[int, StoreError] = {}
        denials: list[tuple[CheckPlan, Decision]] = []
        checks: list[RuleCheck] = []
        for plan, _ in planned:
            if self.penalties.counters:
                denial, failed = yield from self._penalty_denial(plan)
                failures.update({len(checks) + at: error for at, error in failed.items()})
                if denial is not None:
                    denials.append((plan, denial))
            checks += plan.enforced
        if denials or any(plan.verdict == "deny" for plan, _ in planned):
            for plan, denial in denials:
                yield from self.penalties.penalise(plan, denial)
            results = []
            for plan, request in planned:
                if plan.enforced:
                    decision = yield from self._peek(plan, request)
                    self._count_check(decision, plan.enforced)
                else:
                    decision = self._without_limits(plan)
                results.append(self._result(plan, decision))
            return results
        try:
            answers, _ = yield from self._answers(checks, failures)
        except CapacityError as error:
            answers = yield from self._scaled_down_answers(checks, error)
        decisions = yield from self._decisions(planned, answers)
        waited = _has(StoreTimeout, answers)
        return (yield from self._results_of(planned, decisions, waited=waited))

    def _results_of(
        self,
        planned: Sequence[tuple[CheckPlan, Request]],
        decisions: Sequence[Decision],
        *,
        waited: bool,
    ) -> Steps[list[CheckResult]]:
        """Return the results of several requests, after penalties and shadow rules."""
        results = []
        for (plan, _), decision in zip(planned, decisions, strict=True):
            if self.penalties.counters:
                yield from self.penalties.penalise(plan, decision)
            if plan.shadowed:
                answers = yield from self._shadow_answers(plan.shadowed, waited=waited)
                denied = self._count_shadows(plan.shadowed, answers)
                charged = _with_shadow_charges(decision, answers)
                results.append(self._result(plan, charged, denied))
            else:
                results.append(self._result(plan, decision))
        return results

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

    def result_of(self, request: Request, decision: Decision) -> CheckResult:
        """Return a decision of `check` on a request as `evaluate` returns it."""
        return self._result(self.compiled_rules.plan(request, 0), decision)

    # ── Results and counts ─────────────────────────────────────────────────────────────────────

    def _result(
        self, plan: CheckPlan, decision: Decision, shadow_denied: RuleChecks = ()
    ) -> CheckResult:
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
                tuple([check.prepared.applied for check in checks]),
                kind,
                ids,
                tuple([(check.subject, check.units) for check in checks]),
                subjects,
            ),
        )

    def _plan_repeated(self, repeated: RepeatedCheck) -> KnownPlan:
        """Plan a repeated check, and keep the plan if it can be used again."""
        compiled = self.compiled_rules
        plan = compiled.plan(repeated.request, repeated.cost)
        if not plan.enforced or not compiled.is_steady_for(repeated.request):
            repeated.known = None
            return compiled, plan, None
        repeated.known = compiled, plan, self._result(plan, _WITHOUT_LIMITS[None])
        return repeated.known

    def _combined(self, checks: RuleChecks, decisions: Sequence[Decision]) -> Decision:
        """Return one decision from those of several rules; count each rule, and the check once."""
        counted = list(map(self._counted, checks, decisions))
        combined = combine_decisions(counted)
        self._count_check(combined, checks)
        return combined if len(counted) == 1 else _with_charges(combined, counted)

    def _counted(self, check: RuleCheck, decision: Decision) -> Decision:
        """Count a rule's decision; return it as one about the whole limit if the rule is split."""
        rule = check.rule
        try:
            counts = self.counts[rule.id]
        except KeyError:
            counts = self._counts_of(rule.id)
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
        self.tally.subjects.sample(dict.fromkeys(clients))

    def _count_check(self, decision: Decision, checks: RuleChecks) -> None:
        """Count a check by its decision. One in RATE_SAMPLE_EVERY is sampled."""
        tally = self.tally
        tally.degraded += decision.degraded
        if decision.allowed:
            tally.allowed = count = tally.allowed + 1
        elif decision.degraded and self._is_closed(checks, decision.rule):
            tally.unavailable = count = tally.unavailable + 1
        else:
            tally.denied = count = tally.denied + 1
        if not count % RATE_SAMPLE_EVERY:
            self._sample(checks)

    def _counts_of(self, rule: str) -> RuleCounts:
        counts = self.counts.get(rule)
        if counts is None:
            counts = self.counts.setdefault(rule, RuleCounts())
        return counts

    def _count_failed(self, checks: RuleChecks) -> None:
        for check in checks:
            self._counts_of(check.rule.id).failed += 1

    # ── When the store cannot decide ───────────────────────────────────────────────────────────

    def _policy(self, check: RuleCheck) -> FailurePolicy:
        return check.rule.on_failure or self._on_failure

    def _is_closed(self, checks: RuleChecks, rule: str) -> bool:
        """Return True if the rule of this id denies whenever the store cannot decide."""
        return any(check.rule.id == rule and self._policy(check) == "closed" for check in checks)

    def _not_decided(
        self, checks: RuleChecks, request: Request, error: StoreError | CapacityError
    ) -> Steps[Decision]:
        """Return the decision after an error of the store or of a cost, or raise the error."""
        if isinstance(error, StoreError):
            return self._decision(checks, request, [error] * len(checks))
        check = _scaled_down(checks, error)
        try:
            peeked: Decision = yield Call(check.counter.peek, check.counted, 0)
        except StoreError as failure:
            decision = _denied_without_numbers(check, failure)
        else:
            decision = _denied_for_now(peeked)
        self._count_check(decision, checks)
        self._counted(check, decision)
        return decision

    def _decisions(
        self, planned: Sequence[tuple[CheckPlan, Request]], answers: Sequence[Answer]
    ) -> Steps[list[Decision]]:
        """Return the decision on each request from the answers to all of their rules, in order.

        Limits of this machine may deny a request whose other rules the store has charged. Those
        charges are refunded.
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
        charged = all(
            self._policy(check) in OPTIONAL_POLICIES
            if isinstance(answer, StoreError)
            else answer.allowed
            for check, answer in zip(checks, answers, strict=True)
        )
        decisions = [
            self._decision(
                plan.enforced, request, [next(left) for _ in plan.enforced], charged=charged
            )
            if plan.enforced
            else self._without_limits(plan)
            for plan, request in planned
        ]
        if charged and not all(decisions):
            for check, answer in zip(checks, answers, strict=True):
                if not isinstance(answer, StoreError) and answer.charged_ns is not None:
                    with suppress(StoreError):
                        charged_ns = answer.charged_ns
                        yield Undo(check.counter.refund, check.counted, check.units, charged_ns)
            decisions = [decision_with(decision, charged_ns=None) for decision in decisions]
        return decisions

    def _decision(
        self,
        checks: RuleChecks,
        request: Request,
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
        if not failed or not all(decided):
            decision = combine_decisions(decided)
            if spend:
                self._count_check(decision, checks)
                self._count_degraded(failed, allowed=False, is_local=False)
            return _with_charges(decision, decided)
        failed_checks = [self._failed_check(check, error) for check, error in failed]
        try:
            found = self._local.answer(failed_checks, request.ip, spend=spend and charged)
        except StoreError:
            if spend:
                self.tally.raised += 1
                self.tally.degraded += 1
                for check, _ in failed:
                    self._counts_of(check.rule.id).raised += 1
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

    def _note_failures(
        self, failed: Sequence[tuple[RuleCheck, StoreError]], *, spend: bool
    ) -> None:
        self._local.note_failure(failed[0][1])
        self.tally.failed(failed[0][1])
        if spend:
            self._count_failed([check for check, _ in failed])

    def _count_degraded(
        self, failed: Sequence[tuple[RuleCheck, StoreError]], *, allowed: bool, is_local: bool
    ) -> None:
        """Count rules that were decided without the store, by local limits or by policy."""
        for check, _ in failed:
            counts = self._counts_of(check.rule.id)
            if is_local and self._policy(check) == "local":
                counts.local_allowed += allowed
                counts.local_denied += not allowed
            else:
                counts.policy_allowed += allowed
                counts.policy_denied += not allowed

    # ── The other verbs ────────────────────────────────────────────────────────────────────────

    def peek_steps(self, request: Request, cost: int) -> Steps[Decision]:
        """Return the decision that a check would get. Spends and counts nothing."""
        return self._peek(self.compiled_rules.plan(request, cost), request)

    def _peek(self, plan: CheckPlan, request: Request) -> Steps[Decision]:
        checks = plan.enforced
        if not checks:
            return _WITHOUT_LIMITS[plan.verdict]
        failures: Mapping[int, StoreError] = {}
        if self.penalties.counters:
            found, failures = yield from self.penalties.denial(plan)
            if found is not None:
                return found[1]
        undecided = [check for at, check in enumerate(checks) if at not in failures]
        try:
            answers = yield from _peek_rules(undecided)
        except CapacityError as error:
            answers = yield from self._scaled_down_answers(undecided, error)
        return self._decision(checks, request, _merged(answers, failures), spend=False)

    def peek_rule_steps(self, check: RuleCheck) -> Steps[Decision]:
        """Return the decision of one rule: that of its penalty, or of its limits.

        Raises StoreError and CapacityError.
        """
        penalty = yield from self.penalty_steps(check)
        return (yield from _peek_rule(check)) if penalty is None else penalty

    def penalty_steps(self, check: RuleCheck) -> Steps[Decision | None]:
        """Return the denial of a cool-down or block in force for a rule's subject, or None."""
        return (yield from self.penalties.look(check)) if self.penalties.counters else None

    def refund_steps(self, request: Request, cost: int, decision: Decision | None) -> Steps[None]:
        """Return units to every rule that a decision charged; without a decision, that applies now.

        Raises StoreError, after all rules were tried.
        """
        charges = self._charges_of(request, cost, decision)
        yield from self.refund_charges_steps(charges, cost)

    def refund_charges_steps(self, charges: Iterable[RuleCharge], cost: int) -> Steps[None]:
        """Return units to each of these rules. Raises StoreError, after all rules were tried."""
        failure: StoreError | None = None
        for check, charged_ns in charges:
            try:
                units = check.units_of(cost)
                yield Call(check.counter.refund, check.counted, units, charged_ns)
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def charge_steps(self, request: Request, cost: int, decision: Decision | None) -> Steps[int]:
        """Charge a cost to each limit as far as it has room; return the cost that did not fit.

        The limits are those of the rules that a decision charged or, if it charged none, that apply
        now.
        """
        if decision is not None and decision.charged_ns is None:
            decision = None
        most = 0
        for check, _ in self._charges_of(request, cost, decision):
            units = check.units_of(cost)
            counters = counters_of_limits(
                self._make_counter, check.counter, check.rule.id, check.rule.across
            )
            left = yield from charge_limits(counters, check.counted, units)
            if check.rule.mode != "shadow" and units:
                most = max(most, -(-left * cost // units))  # rounded up: it did not fit whole
        return most

    def _charges_of(
        self, request: Request, cost: int, decision: Decision | None
    ) -> Iterable[RuleCharge]:
        """Return the rules to refund, each with the time of its charge if that is known."""
        if decision is None:
            return [(check, None) for check in self.compiled_rules.plan(request, cost).checks]
        charged_ns = decision.charged_ns
        if charged_ns is None or decision.source is not None:
            return charges_in(decision)
        # A copy of a decision, from another process: only its own rule is known.
        checks = self.compiled_rules.plan(request, cost).checks
        return [(check, charged_ns) for check in checks if check.rule.id == decision.rule]

    def grant_steps(self, request: Request, units: int, ttl_ns: int | None) -> Steps[None]:
        """Add extra units on top of every limit of the request. Raises StoreError."""
        yield from self.grant_rules_steps(self.compiled_rules.plan(request, units).checks, ttl_ns)

    def grant_rules_steps(self, checks: RuleChecks, ttl_ns: int | None) -> Steps[None]:
        """Add the units of each check on top of the limits of its rule. Raises StoreError."""
        for check in checks:
            shares = shares_of(check.units, len(check.parts))
            for (counter, subject), share in zip(check.parts, shares, strict=True):
                yield Call(counter.grant, subject, share, ttl_ns)

    def reset_steps(self, request: Request) -> Steps[None]:
        """Forget all units and penalties of the request's subjects. Raises StoreError."""
        yield from self.reset_rules_steps(self.compiled_rules.plan(request, 1).checks)

    def reset_rules_steps(self, checks: RuleChecks) -> Steps[None]:
        """Forget all units and penalties under each of these rules. Raises StoreError."""
        for check in checks:
            for counter, subject in check.parts:
                yield Call(counter.reset, subject)
            yield from self.penalties.reset(check)

    def is_barred_steps(self, rule: str, subject: str) -> Steps[bool]:
        """Return True if a cool-down is in force, or if this process cannot find out."""
        if self._store.is_private:
            return True
        try:
            return (yield from self.penalties.is_barred(rule, subject))
        except StoreError:
            return True

    def explained(self, request: Request, cost: int) -> tuple[Explanation, list[RuleCheck | None]]:
        """Explain which rules apply and why. It examines every rule: 10,000 take 100 ms."""
        return explain(self.compiled_rules, request, cost)

    def answer_steps(
        self, explanation: Explanation, checks: Sequence[RuleCheck | None]
    ) -> Steps[Explanation]:
        """Return an explanation with the decision of each rule. Spends nothing."""
        answers: list[RuleAnswer] = []
        for check in checks:
            try:
                answers.append(None if check is None else (yield from self.peek_rule_steps(check)))
            except (StoreError, CapacityError) as error:
                answers.append(error)
        return with_answers(explanation, answers)


def counters_of_limits(
    make_counter: MakeCounter, counter: Counter, rule: str, across: AcrossRegions | None
) -> list[Counter]:
    """Return a counter for each limit of a rule.

    In one region, a counter of one limit has the same count as the counter of all of them. The
    limits of a global rule are counted together, so they have one counter.
    """
    if len(counter.limits) == 1 or across is not None:
        return [counter]
    return [make_counter((limit,), rule) for limit in counter.limits]


def charge_limits(counters: Sequence[Counter], subject: str, units: int) -> Steps[int]:
    """Charge units to each counter as far as it has room; return the most that did not fit.

    Units that the store cannot count are not charged.
    """
    most = 0
    for alone in counters:
        left = units
        with suppress(StoreError):
            # Another request may spend in between: then there is less room, and soon none.
            for _ in range(CHARGE_ATTEMPTS_MAX):
                room: Decision = yield Call(alone.peek, subject, 0)
                fits = min(left, room.remaining)
                if not fits or (yield Call(alone.check, subject, fits)).allowed:
                    left -= fits
                    break
        most = max(most, left)
    return most


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
    """Return the rules that a decision charged, as the engine has kept them with it."""
    source: RuleCheck | list[RuleCharge] | None = decision.source
    if isinstance(source, list):
        return [charge for charge in source if charge[1] is not None]
    if source is None or decision.charged_ns is None:
        return []
    return [(source, decision.charged_ns)]


def _shadows(denied: RuleChecks) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids and the subjects of shadow rules that would have denied."""
    return tuple([check.rule.id for check in denied]), tuple([check.subject for check in denied])


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
            answers.append((yield from _peek_rule(check)))
        except StoreError as error:
            answers.append(error)
    return answers


def _peek_rule(check: RuleCheck) -> Steps[Decision]:
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
