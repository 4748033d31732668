"""A rule document, compiled and prepared on a store: the limits that a request has to pass.

CompiledRules never change. A new document is compiled into a new object, which replaces the old one
in one step. A request uses the same object from start to end.

The limits of a rule, from the general to the specific: its own `limits` (or, if it has none, the
document's limits for the request's tier), its `tiers`, its `keys`, and an override that is in force
now. Consumption carries over between limits that differ only in their numbers.

A counter is made when it is first needed and kept with the choice of limits it belongs to. The
number of counters is bounded by the document, not by its callers: one choice for each set of limits
in the document, and for each choice at most one counter for each step of the factor (times the
parts of a rule that splits its limits). The same holds for the limits of overrides, of which each
choice keeps at most TERMS_MAX. Overrides with equal terms share their counters.

Entries beside the document (`entry_table.py`) take precedence over those in it, and change in
place. After each change, `with_entries` makes a new CompiledRules that shares everything else.

Requests resemble one another. So CompiledRules remembers the *shape* of a request by the values
that the rules examine: the rules that match, each with its limits, counter and units. What is left
for each request is the subject of each rule. A local store compiles the check of a shape, which
then takes one call (`LocalStore.request_check`). The memory depends on the document only: lists,
assigned tiers and overrides are looked up for each request. A full memory is cleared as a whole,
which needs no lock and no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from hashlib import blake2b
from operator import attrgetter
from typing import Final, Literal, NamedTuple, Protocol

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.costs import REQUESTS, Cost, settled_units, units_in
from ratekeeper.core.errors import ConfigError, InvalidCost, quoted
from ratekeeper.core.model import (
    REQUEST_FIELDS,
    AppliedRule,
    CheckResult,
    Consistency,
    Decision,
    Limits,
    Request,
)
from ratekeeper.core.rates import scaled
from ratekeeper.core.subjects import KEY_LENGTH_MAX, SEPARATOR, subject_of_request
from ratekeeper.decide.algorithms.in_flight import NEEDS_STRICT, has_slots, new_stamp
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import CheckedRule, Counter, RequestCheck, stamped
from ratekeeper.rules.document.model import (
    DEFAULT_TIER,
    FACTOR_MAX,
    OWNERS,
    Document,
    Override,
    Rule,
    override_changes,
)
from ratekeeper.rules.document.tree import suggestion
from ratekeeper.rules.entry_table import EntryTable, OwnerTable, unpacked
from ratekeeper.rules.matching.lists import Lists, Verdict
from ratekeeper.rules.matching.patterns import Network, normalised, spellings
from ratekeeper.rules.matching.table import CompiledRule, RuleTable, Values
from ratekeeper.rules.splitting import part_count, part_limits, part_subject

LimitSource = Literal["default", "tier", "key", "override"]
# The limits of an override, or its factor.
_Terms = tuple[Limits, float | None]


class CompileCheck(Protocol):
    """Compiles the check of a shape on a local store."""

    def __call__(self, rules: Sequence[CheckedRule], owner: Shape) -> RequestCheck | None:
        """Return the check; None if the store cannot compile it."""
        ...


class MakeCounter(Protocol):
    """Prepares limits under a rule's id on a store: `store.counter`."""

    def __call__(
        self,
        limits: Limits,
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> Counter:
        """Return the counter."""
        ...


# Limits follow the load in this many steps up to a factor of 1. Each step has a counter.
FACTOR_STEPS: Final = 100
# The subject of rules that count all requests together.
_EVERYONE: Final = "*"
# For each choice of limits, the number of different overrides whose counters are kept.
TERMS_MAX: Final = 1_000
# The number of remembered shapes.
SHAPES_MAX: Final = 4_096
# Longer values are never remembered: clients must not fill the memory.
VALUE_LENGTH_MAX: Final = 256
# Fields that are normalised before they are counted: see CompiledRules.subject_of.
_NORMALISED: Final = frozenset({"tier", "endpoint", "method"})
# A longer path is counted by its digest, and so is one with %1F: a client may send any path.
_PATH_LENGTH_MAX: Final = 256
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Twice as fast as calling a NamedTuple, whose constructor is written in Python.
_new: Final = tuple.__new__


class PreparedLimits:
    """Limits on a store: one counter, or one for each part if the rule splits its limits."""

    __slots__ = ("alone", "applied", "counters", "has_slots", "limits")

    def __init__(
        self,
        limits: Limits,
        rule: str,
        split: int,
        make_counter: MakeCounter,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
        name: str = "",
    ) -> None:
        """`name` is that of the rule in results, if it is not its id."""
        self.limits = limits
        self.has_slots = has_slots(limits)
        if self.has_slots and (consistency != "strict" or across is not None):
            raise ConfigError(NEEDS_STRICT)
        """True if a limit counts requests in flight."""
        self.applied = AppliedRule(name or rule, limits)
        self.alone = (self.applied,)
        """The rules of a result if no other one applied; the same object for all of them."""
        parts = part_count(limits, split)
        shares = [limits] if parts == 1 else [part_limits(limits, parts, at) for at in range(parts)]
        self.counters = [make_counter(share, rule, consistency, across) for share in shares]


class LimitChoice:
    """Limits that a rule has for some requests, and where in the document they come from."""

    __slots__ = (
        "by_step",
        "by_terms",
        "consistency",
        "detail",
        "limits",
        "override",
        "source",
    )

    def __init__(
        self,
        limits: Limits,
        consistency: Consistency,
        source: LimitSource,
        detail: str = "",
        override: Override | None = None,
    ) -> None:
        self.limits = limits
        self.consistency: Consistency = consistency
        self.source: LimitSource = source
        self.detail = detail
        self.override = override
        self.by_step: dict[int, PreparedLimits] = {}
        self.by_terms: dict[_Terms, tuple[Limits, dict[int, PreparedLimits]]] = {}
        """The limits of overrides that replace these, and what is prepared for them."""

    def overridden_by(self, owner: str, override: Override) -> LimitChoice:
        """Return the limits of an override of these. Overrides with equal terms share counters."""
        terms = override.limits, override.multiply
        known = self.by_terms.get(terms)
        if known is None:
            if len(self.by_terms) >= TERMS_MAX:
                self.by_terms.clear()
            limits = override.limits or scaled(self.limits, override.multiply or 1.0)
            known = self.by_terms[terms] = limits, {}
        found = LimitChoice(known[0], self.consistency, "override", owner, override)
        found.by_step = known[1]
        return found


class RuleCheck(NamedTuple):
    """One rule's part in a request: the counter, the subject and the units to check."""

    counter: Counter
    counted: str
    """The subject that the counter counts: `subject`, or one part of it if the rule is split."""
    units: int
    rule: Rule
    choice: LimitChoice
    step: int
    """The factor of the limits at this load, in steps of 1 / FACTOR_STEPS."""
    prepared: PreparedLimits
    subject: str
    weight: int
    """The units that the rule charges for each request."""

    def at(self, cost: Cost) -> RuleCheck:
        """Return the check of the same request at another cost."""
        units = units_in(cost, self.rule.unit, self.weight)
        return self if units == self.units else self._replace(units=units)

    def settled(self, actual: Cost) -> int:
        """Return the units that the rule has charged once the request cost `actual`."""
        if type(actual) is int:  # nearly always
            return actual * self.weight
        return settled_units(self.units, actual, self.rule.unit, self.weight)

    @property
    def applied(self) -> AppliedRule:
        """The rule with its limits; the same object for all requests that have them."""
        return self.prepared.applied

    @property
    def parts(self) -> list[tuple[Counter, str]]:
        """Every counter and subject that the counts are kept under."""
        counters = self.prepared.counters
        if len(counters) == 1:
            return [(self.counter, self.counted)]
        return [(counter, part_subject(self.subject, at)) for at, counter in enumerate(counters)]


class CheckPlan(NamedTuple):
    """The rules that a request has to pass; or only a verdict, if the request is on a list."""

    enforced: tuple[RuleCheck, ...] = ()
    shadowed: tuple[RuleCheck, ...] = ()
    verdict: Verdict | None = None
    joint: tuple[tuple[Counter, str, int], ...] = ()
    """Counter, subject and units of each rule, for `check_together`; empty if there is one."""

    @property
    def checks(self) -> list[RuleCheck]:
        """Every rule that charges the request: the enforced ones and those in shadow mode."""
        return [*self.enforced, *self.shadowed]


def stamped_plan(plan: CheckPlan, stamp: int) -> CheckPlan:
    """Return the plan of one request, which has this stamp: see SlotCounter."""
    enforced, shadowed = (
        tuple(
            check._replace(counter=stamped(check.counter, stamp))
            if check.prepared.has_slots
            else check
            for check in checks
        )
        for checks in (plan.enforced, plan.shadowed)
    )
    joint = tuple([check[:3] for check in enforced]) if len(enforced) > 1 else ()
    return CheckPlan(enforced, shadowed, plan.verdict, joint)


class PreparedRule:
    """A rule, and the part of its preparation that does not depend on the request."""

    __slots__ = (
        "by_key",
        "by_tier",
        "default",
        "factor",
        "field",
        "id",
        "is_plain",
        "keys",
        "prefix",
        "read",
        "rule",
        "unlimited",
        "varies",
    )

    def __init__(self, rule: CompiledRule, factor: Callable[[], float] | None) -> None:
        written = rule.rule
        self.rule = rule
        self.id = written.id
        self.factor = factor
        own = written.consistency
        self.default = LimitChoice(written.limits, own, "default") if written.limits else None
        self.by_tier = {
            tier: LimitChoice(one.limits, one.consistency or own, "tier", tier)
            for tier, one in written.tiers.items()
        }
        self.unlimited = LimitChoice((), own, "default")
        """What an override with limits replaces, for a tier without limits."""
        self.keys = tuple(written.keys.items())
        self.by_key: dict[tuple[str, Consistency], LimitChoice] = {}
        # Most rules count by one field as the request has it, which has a short cut.
        field = written.by[0] if len(written.by) == 1 else ""
        plain = field in REQUEST_FIELDS and field not in _NORMALISED
        self.field = field
        self.read = attrgetter(field) if plain else None
        self.prefix = f"{field}:"
        self.is_plain = plain and written.mode == "enforce" and written.penalty is None
        changes = factor is not None or written.split > 1
        self.varies = changes or bool(self.keys) or written.rollout < 100
        """True if the limits or the counter are chosen for each request."""

    def of_key(self, position: int, choice: LimitChoice | None) -> LimitChoice:
        """Return the limits of a key. Its consistency is its own, or that of `choice`."""
        key, one = self.keys[position]
        consistency = one.consistency or (choice or self.unlimited).consistency
        found = self.by_key.get((key, consistency))
        if found is None:
            found = LimitChoice(one.limits, consistency, "key", key)
            self.by_key[key, consistency] = found
        return found

    def subject_of(self, request: Request, tier: str | None) -> str:
        """Return the subject that the rule counts the request under."""
        if self.read is not None:
            value = self.read(request)
            if type(value) is str:
                subject = self.prefix + value
                # The other conditions on keys hold for every string that passes these three.
                if (
                    len(subject) <= KEY_LENGTH_MAX
                    and subject.isascii()
                    and SEPARATOR not in subject
                ):
                    return subject
        by = self.rule.rule.by
        if not by:
            return _EVERYONE
        if not _NORMALISED.isdisjoint(by):
            request = _as_counted(request, tier)
        return subject_of_request(request, by)


def _as_counted(request: Request, tier: str | None) -> Request:
    """Return the request as it is counted, with endpoint and method in their one spelling.

    `tier` is the assigned one, for a request without a tier.
    """
    path = request.endpoint
    if isinstance(path, str):
        path = normalised(path)
        if len(path) > _PATH_LENGTH_MAX or SEPARATOR in path:
            path = "#" + blake2b(path.encode("utf-8", "replace"), digest_size=16).hexdigest()
    method = request.method.upper() if isinstance(request.method, str) else request.method
    tier = tier if request.tier is None else request.tier
    return replace(request, tier=tier, endpoint=path, method=method)


# What a rule has for all requests of a shape: the counter, and the units for each request.
_Fixed = tuple[PreparedRule, Counter, int, Rule, LimitChoice, PreparedLimits]
# For one `by` and unit: its matching rules (see `RuleTable.match`), and what the first one has;
# None if that is chosen for each request.
_Part = tuple[tuple[CompiledRule, ...], _Fixed | None]


class Shape:
    """What follows from the values of a request that the rules examine."""

    __slots__ = ("applied", "check", "parts")

    def __init__(self, parts: tuple[_Part, ...], compile_check: CompileCheck | None) -> None:
        self.parts = parts
        fixed = [each for _, each in parts if each is not None and each[0].is_plain]
        self.applied = tuple([limits.applied for *_, limits in fixed])
        self.check: RequestCheck | None = None
        """The compiled check of requests of this shape, without digests and overrides; None if a
        rule is not plain, or the store compiles nothing."""
        if compile_check is not None and fixed and len(fixed) == len(parts):
            rules = [(each[1], each[0].field, each[2], each[0].id) for each in fixed]
            self.check = compile_check(rules, self)

    def result(self, request: Request, decision: Decision) -> CheckResult:
        """Return the result of a compiled check."""
        counted = tuple([(each.subject, each.units) for each in self.charges(request)])
        return _new(CheckResult, (decision, self.applied, "limited", (), counted, ()))

    def charges(self, request: Request) -> list[RuleCheck]:
        """Return the charges of a compiled check."""
        return [_charge_of(each, request, None, 1) for _, each in self.parts if each is not None]


def _charge_of(fixed: _Fixed, request: Request, tier: str | None, cost: Cost) -> RuleCheck:
    prepared, counter, weight, rule, choice, limits = fixed
    subject = prepared.subject_of(request, tier)
    units = weight * cost if type(cost) is int else units_in(cost, rule.unit, weight)
    return _new(
        RuleCheck,
        (counter, subject, units, rule, choice, FACTOR_STEPS, limits, subject, weight),
    )


class CompiledRules:
    """A rule document, compiled and prepared on a store."""

    __slots__ = (
        "_assign",
        "_assigned",
        "_by_rules",
        "_compile_check",
        "_has_overrides",
        "_has_rollouts",
        "_has_slots",
        "_is_extended",
        "_lists",
        "_make_counter",
        "_now_ns",
        "_orders",
        "_overrides",
        "_read",
        "_rules",
        "_shapes",
        "document",
        "entries",
        "table",
        "units",
        "version",
    )

    def __init__(
        self,
        document: Document,
        make_counter: MakeCounter,
        now_ns: Callable[[], int],
        version: str = "",
        factors: Mapping[str, Callable[[], float]] | None = None,
        entries: EntryTable | None = None,
        compile_check: CompileCheck | None = None,
    ) -> None:
        """Compile a document.

        `make_counter`   prepares limits under a rule's id on the store.
        `now_ns`         the time by which overrides end.
        `factors`        by rule id, the factor of rules whose limits follow the load.
        `entries`        the assignments, overrides and list entries beside the document.
        `compile_check`  compiles the check of a shape; None if the store cannot.
        """
        self.document = document
        self.version = version
        self.table = RuleTable(document.rules)
        self.units = (REQUESTS, *sorted({rule.unit for rule in document.rules} - {REQUESTS}))
        """What the rules count."""
        self._read = self.table.read
        self._shapes: dict[Values, Shape] = {}
        # The same shapes by their rules: a new path usually leads to the rules of another one.
        self._by_rules: dict[tuple[str | None, tuple[tuple[int, ...], ...]], Shape] = {}
        self._compile_check = compile_check
        self._lists: tuple[Lists, ...] = ()
        self._assign = document.assign
        self._make_counter = make_counter
        self._now_ns = now_ns
        factors = factors or {}
        self._has_slots = False
        self._rules = [PreparedRule(rule, factors.get(rule.rule.id)) for rule in self.table.rules]
        self._has_rollouts = any(each.rollout < 100 for each in document.rules)
        # The places of the rules, if a rule in shadow mode tries to take the place of another.
        trials = any(each.replaces and each.mode == "shadow" for each in document.rules)
        self._orders = {rule.rule.id: rule.order for rule in self.table.rules} if trials else {}
        self._overrides: OwnerTable[Override] = OwnerTable()
        # The first of the document applies, and the table puts the newest item first.
        for override in reversed(document.overrides):
            self._overrides.add(override.attribute, override.value, override)
        self._use_entries(entries or EntryTable())

    def _use_entries(self, entries: EntryTable) -> None:
        document = self.document
        self.entries = entries
        # None if there are none, so that requests without entries pay nothing for them.
        self._assigned = entries.assigned or None
        self._has_overrides = bool(self._overrides or entries.overrides)
        # True if the examined values are not just fields of the request.
        self._is_extended = bool(self._assign or self._assigned or self.table.others)
        found = [entries.lists] if entries.lists else []
        if document.allow or document.deny:
            known = self._lists[-1] if self._lists else None
            found.append(known or Lists.compile(document.allow, document.deny))
        self._lists = tuple(found)

    def with_entries(self, entries: EntryTable) -> CompiledRules:
        """Return the same rules after a change of the entries."""
        found = copy(self)
        found._use_entries(entries)  # noqa: SLF001 - of the copy
        return found

    def compiled(self, request: Request) -> tuple[Shape, RequestCheck] | None:
        """Return the shape and the compiled check of a request, for a cost of 1.

        None for a request without one. The look-up of the shape is that of `plan`, written out,
        because this runs for every request.
        """
        if request.digests is not None:
            return None
        if self._lists and self._listed(request)[0] is not None:
            return None
        values = self._read(request)
        tier = values[-1]
        if self._is_extended:
            tier = self.tier_of(request)
            values = self.table.values_of(request, tier)
        try:
            shape = self._shapes.get(values)
        except TypeError:  # a value that is not text: the match rejects it
            shape = None
        if shape is None:
            shape = self._shape_of(values, request, tier)
        if shape.check is None or (self._has_overrides and self._is_overridden(request)):
            return None
        return shape, shape.check

    def plan(self, request: Request, cost: Cost) -> CheckPlan:
        """Return the rules that a request has to pass, with the counters to check.

        Raises InvalidCost for a unit that no rule counts: most likely its name is misspelt.
        """
        if type(cost) is not int:
            check_units(cost, self.units)
        matched = request if request.digests is None else request.matched_as
        if self._lists:
            verdict = self._listed(matched)[0]
            if verdict is not None:
                return CheckPlan(verdict=verdict)
        values = self._read(matched)
        tier = values[-1]
        if self._is_extended:
            tier = self.tier_of(matched)
            values = self.table.values_of(matched, tier)
        try:
            # `get`, because a KeyError for a new request takes 0.4 us.
            shape = self._shapes.get(values)
        except TypeError:  # a value that is not text: the match rejects it
            shape = None
        if shape is None:
            shape = self._shape_of(values, matched, tier)
        is_plain = matched is request and not (self._has_overrides and self._is_overridden(request))
        enforced: list[RuleCheck] = []
        shadowed: list[RuleCheck] = []
        for candidates, fixed in shape.parts:
            check: RuleCheck | None
            if is_plain and fixed is not None:
                check = _charge_of(fixed, request, tier, cost)
            else:
                check = self._first_check(candidates, request, matched, tier, cost)
            if check is not None:
                (shadowed if check.rule.mode == "shadow" else enforced).append(check)
        if self._has_rollouts:
            enforced, shadowed = _different(enforced), _different(shadowed)
        if shadowed and self._orders:
            shadowed = [each for each in shadowed if not self.goes_first(each.rule, enforced)]
        joint = tuple([check[:3] for check in enforced]) if len(enforced) > 1 else ()
        plan = _new(CheckPlan, (tuple(enforced), tuple(shadowed), None, joint))
        return stamped_plan(plan, new_stamp()) if self._has_slots else plan

    def _shape_of(self, values: Values, matched: Request, tier: str | None) -> Shape:
        """Return the shape of requests with these values, and remember it."""
        found = self.table.match(values)
        key = tier, tuple([self._key_of(candidates, matched) for candidates in found])
        shape = self._by_rules.get(key)
        if shape is None:
            parts = [(each, self._fixed(each[0], matched, tier)) for each in found]
            shape = Shape(tuple(parts), self._compile_check)
        if _are_short(values) and _are_short(tier):
            if len(self._shapes) >= SHAPES_MAX or len(self._by_rules) >= SHAPES_MAX:
                self._shapes.clear()
                self._by_rules.clear()
            self._shapes[values] = self._by_rules[key] = shape
        return shape

    def _key_of(self, candidates: Sequence[CompiledRule], matched: Request) -> tuple[int, ...]:
        """Return what the part of a shape follows from: the matching rules, and the units."""
        first = candidates[0]
        units = self.cost_of(first, matched) if first.costs else 0
        return (units, *[each.order for each in candidates])

    def _fixed(self, rule: CompiledRule, matched: Request, tier: str | None) -> _Fixed | None:
        prepared = self._rules[rule.order]
        choice = None if prepared.varies else self._choice_of_tier(prepared, tier)
        if choice is None:
            return None
        limits = self._limits_at(prepared, choice, FACTOR_STEPS)
        units = self.cost_of(rule, matched) if rule.costs else rule.rule.cost
        return prepared, limits.counters[0], units, rule.rule, choice, limits

    def _first_check(
        self,
        candidates: Sequence[CompiledRule],
        request: Request,
        matched: Request,
        tier: str | None,
        cost: Cost,
    ) -> RuleCheck | None:
        """Return the check of the first rule that is in force for the request's subject."""
        for rule in candidates:
            prepared = self._rules[rule.order]
            subject = prepared.subject_of(request, tier)
            if rule.in_force_for(subject):
                choice = self._choose(prepared, matched, tier)
                if choice is not None:
                    return self._check_of(prepared, subject, choice, request, cost)
                break
        return None

    def checks_of_subject(self, request: Request, cost: int, most: int) -> list[RuleCheck]:
        """Return at most `most` rules that count a subject, whatever its other attributes are.

        A rule is among them if the request has all attributes that the rule counts by, and if the
        rule can apply to a request that has more than those: `user:42` is counted by the rules for
        users of all endpoints. The lists are ignored. It tests every rule, so it is slow.
        """
        tier = self.tier_of(request)
        matched = request.matched_as
        paths = () if request.endpoint is None else spellings(request.endpoint)
        found: list[RuleCheck] = []
        # Once a rule applies to all requests of the subject, no later one of its group does.
        settled: set[int] = set()
        for prepared in self._rules:
            rule = prepared.rule
            by = rule.rule.by
            if rule.rule.mode == "off" or rule.group in settled or not by:
                continue
            if any(value_of(matched, name, tier) is None for name in by):
                continue
            excluded = rule.excludes(paths, lambda name: value_of(matched, name, tier))
            subject = prepared.subject_of(request, tier)
            if excluded or not rule.in_force_for(subject):
                continue
            if excluded is False:
                settled.add(rule.group)
            choice = self._choose(prepared, matched, tier)
            if choice is not None:
                found.append(self._check_of(prepared, subject, choice, request, cost))
            if len(found) == most:
                break
        return found

    def goes_first(self, trial: Rule, enforced: Sequence[RuleCheck]) -> str:
        """Return the enforced rule that would apply instead of a promoted trial; "" if none would.

        A rule in shadow mode that replaces another counts only the requests that it would decide
        in the place of the other.
        """
        if trial.replaces is None or trial.mode != "shadow":
            return ""
        rivals = [
            check.rule.id
            for check in enforced
            if (check.rule.by, check.rule.unit) == (trial.by, trial.unit)
        ]
        order = self._orders[trial.id]
        return rivals[0] if rivals and all(self._orders[each] < order for each in rivals) else ""

    def _check_of(
        self,
        prepared: PreparedRule,
        subject: str,
        choice: LimitChoice,
        request: Request,
        cost: Cost,
    ) -> RuleCheck:
        rule = prepared.rule
        written = rule.rule
        step = FACTOR_STEPS if prepared.factor is None else factor_step(prepared.factor())
        limits = self._limits_at(prepared, choice, step)
        weight = written.cost if not rule.costs else self.cost_of(rule, request)
        units = units_in(cost, written.unit, weight)
        counters = limits.counters
        if len(counters) == 1:
            return _new(
                RuleCheck,
                (counters[0], subject, units, written, choice, step, limits, subject, weight),
            )
        part = int(RANDOM.random() * len(counters))
        counted = part_subject(subject, part)
        return RuleCheck(
            counters[part], counted, units, written, choice, step, limits, subject, weight
        )

    def _limits_at(self, prepared: PreparedRule, choice: LimitChoice, step: int) -> PreparedLimits:
        limits = choice.by_step.get(step)
        if limits is None:
            written = prepared.rule.rule
            # Two threads may both prepare these limits; both counters have the same counts.
            limits = choice.by_step[step] = PreparedLimits(
                at_step(choice.limits, step),
                written.id,
                written.split,
                self._make_counter,
                choice.consistency,
                written.across,
            )
            self._has_slots = self._has_slots or limits.has_slots
        return limits

    def cost_of(self, rule: CompiledRule, request: Request) -> int:
        """Return the units that the rule charges for each request."""
        return rule.cost(() if request.endpoint is None else spellings(request.endpoint))

    def subject_of(self, rule: CompiledRule, request: Request, tier: str | None) -> str:
        """Return the subject that a rule counts the request under.

        An endpoint is counted as `matching/patterns.py` normalises it and a method in capitals;
        otherwise each spelling would have a separate count. The tier is the assigned one.
        """
        return self._rules[rule.order].subject_of(request, tier)

    def tier_of(self, request: Request) -> str | None:
        """Return the request's tier: its own, or the one assigned to its user, key or tenant."""
        request = request if request.digests is None else request.matched_as
        if request.tier is not None or not (self._assign or self._assigned):
            return request.tier
        assigned, assign = self.entries.assigned, self._assign
        for attribute in OWNERS:
            value = getattr(request, attribute)
            if value is not None:
                owner = f"{attribute}:{value}"
                tier = assigned.get(owner) or assign.get(owner)
                if tier is not None:
                    return tier
        return None

    def choose(self, rule: CompiledRule, request: Request, tier: str | None) -> LimitChoice | None:
        """Return the limits of a rule for a request; None if the rule has none for its tier."""
        return self._choose(self._rules[rule.order], request.matched_as, tier)

    def _choice_of_tier(self, prepared: PreparedRule, tier: str | None) -> LimitChoice | None:
        choice = prepared.default
        if choice is None or tier is not None:
            tiers = self.document.tiers
            known = tier in prepared.by_tier or tier in tiers
            if tier is None or (choice is None and not known):
                tier = DEFAULT_TIER
            choice = prepared.by_tier.get(tier, choice)
            if choice is None and tier in tiers:
                one = tiers[tier]
                consistency = one.consistency or prepared.rule.rule.consistency
                choice = LimitChoice(one.limits, consistency, "tier", tier)
                prepared.by_tier[tier] = choice
        return choice

    def _choose(
        self, prepared: PreparedRule, request: Request, tier: str | None
    ) -> LimitChoice | None:
        choice = self._choice_of_tier(prepared, tier)
        if prepared.keys:
            value = value_of(request, prepared.rule.rule.by[0], tier)
            position = None if value is None else prepared.rule.keys.find(value)
            if position is not None:
                choice = prepared.of_key(position, choice)
        return self._overridden(prepared, request, choice) if self._has_overrides else choice

    def _is_overridden(self, request: Request) -> bool:
        """Return True if an owner of the request has an override, in force or not."""
        for _ in self.entries.overrides.find(request):
            return True
        for _ in self._overrides.find(request):
            return True
        return False

    def _overridden(
        self, prepared: PreparedRule, request: Request, choice: LimitChoice | None
    ) -> LimitChoice | None:
        """Return the limits of the first override that applies, or `choice`.

        Entries go before the document, and user, API key, tenant and address in this order.
        """
        for owner, override in self._overrides_of(request):
            if not override_changes(prepared.rule.rule, override.attribute, override.rule):
                continue
            if override.until is not None and self._now_ns() >= _ns(override.until):
                continue
            if choice is None and not override.limits:
                return None
            return (choice or prepared.unlimited).overridden_by(owner, override)
        return choice

    def _overrides_of(self, request: Request) -> Iterator[tuple[str, Override]]:
        """Yield the owners of a request and their overrides, in force or not."""
        for owner, item in self.entries.overrides.find(request):
            yield owner, unpacked(owner, item)
        yield from self._overrides.find(request)

    def why_not(self, rule: CompiledRule, request: Request, tier: str | None) -> str:
        """Return why a rule does not apply to a request, in words; empty if it does."""
        if rule.rule.mode == "off":
            return "it is off"
        paths = () if request.endpoint is None else spellings(request.endpoint)
        matched = request.matched_as
        why = rule.failing(paths, lambda name: value_of(matched, name, tier))
        if not why and not rule.in_force_for(self.subject_of(rule, request, tier)):
            why = f"its rollout of {rule.rule.rollout} % does not reach this subject"
        return why

    def listed(self, request: Request) -> tuple[Verdict | None, str]:
        """Return the verdict of the allow and deny lists, and the entry that matched."""
        verdict, lists = self._listed(request.matched_as)
        return verdict, "" if lists is None else str(lists.why(request.matched_as))

    def allowed_networks(self) -> Iterator[Network]:
        """Yield the networks on the allow lists, of the entries and of the document."""
        for lists in self._lists:
            yield from lists.allowed_networks()

    def _listed(self, request: Request) -> tuple[Verdict | None, Lists | None]:
        """Return the verdict of the lists, a deny before an allow, and the list that decides."""
        found: tuple[Verdict | None, Lists | None] = None, None
        for lists in self._lists:
            verdict = lists.verdict(request)
            if verdict == "deny":
                return verdict, lists
            if verdict is not None and found[0] is None:
                found = verdict, lists
        return found


def check_units(cost: Cost, known: Sequence[str]) -> None:
    """Raise InvalidCost for costs in a unit that is counted nowhere: it is most likely misspelt."""
    for unit in () if isinstance(cost, int) else cost:
        if unit not in known:
            raise InvalidCost(f"costs: no limit counts {quoted(unit)}; {suggestion(unit, known)}")


def _are_short(values: object) -> bool:
    """Return True if no text is long among these values, one or a tuple of them."""
    for value in values if isinstance(values, tuple) else (values,):
        if value is not None and len(value) > VALUE_LENGTH_MAX:
            return False
    return True


def _different(checks: list[RuleCheck]) -> list[RuleCheck]:
    """Return the checks without repetitions.

    If a path has several spellings, rules that are not rolled out to all subjects may lead from
    each spelling to the same rule.
    """
    return list({check.rule.id: check for check in checks}.values())


def factor_step(factor: float) -> int:
    """Return a factor in whole steps, rounded towards 1: a slightly busy machine keeps its limits.

    >>> factor_step(0.55), factor_step(0.551), factor_step(0.0), factor_step(1.259)
    (55, 56, 1, 125)
    """
    # As a float, 0.55 * 100 is slightly more than 55.
    if factor <= 1.0:
        return max(math.ceil(factor * FACTOR_STEPS - 1e-6), 1)
    return math.floor(min(factor, FACTOR_MAX) * FACTOR_STEPS + 1e-6)


def highest_step(rule: Rule) -> int:
    """Return the highest factor that the rule's limits can have, in steps."""
    return factor_step(min((scale.most for scale in rule.scale), default=1.0))


def at_step(limits: Limits, step: int) -> Limits:
    """Return limits multiplied by a factor, given in steps."""
    return limits if step == FACTOR_STEPS else scaled(limits, Fraction(step, FACTOR_STEPS))


def value_of(request: Request, name: str, tier: str | None) -> str | None:
    """Return the value of a request's field or attribute, as rules match it."""
    if name == "tier":
        return tier
    if name == "method":
        return None if request.method is None else request.method.upper()
    if name in REQUEST_FIELDS:
        value: str | None = getattr(request, name)
        return value
    return request.attributes.get(name)


def _ns(time: datetime) -> int:
    """Return exact nanoseconds since the epoch. A float would be off by a microsecond."""
    return (time - _EPOCH) // timedelta(microseconds=1) * 1_000
