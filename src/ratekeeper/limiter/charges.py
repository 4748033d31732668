"""The charges of a decision: kept with it, returned by a refund, and made late by a settlement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ratekeeper.core.errors import StoreError
from ratekeeper.core.model import Decision, decision_with
from ratekeeper.core.steps import Call, Steps
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.store import Counter
from ratekeeper.rules.compiled import MakeCounter, RuleCheck

# A rule that was charged, and the time of the charge; None if that is not known.
RuleCharge = tuple[RuleCheck, int | None]

# Attempts to charge a limit, each with the room that the last one found.
CHARGE_ATTEMPTS_MAX: Final = 8


def joined(decided: Sequence[Decision]) -> Decision:
    """Return one decision from those of several rules, with the charges or all rules that deny."""
    decision = combine_decisions(decided)
    if len(decided) == 1:
        return decision
    if decision.allowed:
        return with_charges(decision, decided)
    denied = tuple([each.rule for each in decided if not each.allowed])
    if len(denied) > 1:
        decision.source = denied
    return decision


def with_charges(decision: Decision, decided: Sequence[Decision]) -> Decision:
    """Return an admission with the charge of each rule, for a refund."""
    charges = [charge for each in decided for charge in charges_in(each)]
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


def refunding(charges: Sequence[RuleCharge]) -> Steps[None]:
    """Return the units of each check to its rule. Raises StoreError, after all rules were tried."""
    failure: StoreError | None = None
    for check, charged_ns in charges:
        try:
            yield Call(check.counter.refund, check.counted, check.units, charged_ns)
        except StoreError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def charging(make_counter: MakeCounter, check: RuleCheck, units: int) -> Steps[int]:
    """Charge units to each limit of a rule as far as it has room; return the most that did not fit.

    Units that the store cannot count are not charged.
    """
    most = 0
    for alone in _counters_of_limits(make_counter, check):
        left = units
        with suppress(StoreError):
            # Another request may spend in between: then there is less room, and soon none.
            for _ in range(CHARGE_ATTEMPTS_MAX):
                room: Decision = yield Call(alone.peek, check.counted, 0)
                fits = min(left, room.remaining)
                if not fits or (yield Call(alone.check, check.counted, fits)).allowed:
                    left -= fits
                    break
        most = max(most, left)
    return most


def _counters_of_limits(make_counter: MakeCounter, check: RuleCheck) -> list[Counter]:
    """Return a counter for each limit of a rule.

    In one region, a counter of one limit has the same count as the counter of all of them. The
    limits of a global rule are counted together, so they have one counter.
    """
    counter, rule = check.counter, check.rule
    if len(counter.limits) == 1 or rule.across is not None:
        return [counter]
    return [make_counter((limit,), rule.id) for limit in counter.limits]
