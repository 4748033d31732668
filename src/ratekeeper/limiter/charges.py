"""The charges of a decision: kept with it, returned by a refund, and made late by a settlement.

So are its slots of requests in flight: they are freed when the request ends.

A settlement charges the rest of a cost in full: the limits owe what they have no room for
(`decide/algorithms/debt.py`), up to a bound. Units beyond it are forgiven: counted by rule, and
logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from ratekeeper.core.costs import REQUESTS, Cost, merged_cost
from ratekeeper.core.errors import StoreError, show
from ratekeeper.core.model import UNITS_MAX, Decision, Settlement, decision_with
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.core.steps import Ask, Steps, answered
from ratekeeper.decide.algorithms.in_flight import NO_STAMP
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.store import stamp_of, stamped
from ratekeeper.metrics.tally import Counts
from ratekeeper.rules.compiled import RuleCheck

# A rule that was charged, and the time of the charge; None if that is not known.
RuleCharge = tuple[RuleCheck, int | None]

_log: Final = SeldomLog(logging.getLogger("ratekeeper"), logging.WARNING, every_s=60.0)


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


def slots_in(decision: Decision) -> list[RuleCheck]:
    """Return the rules whose limits of requests in flight a decision took slots of.

    Their counters are those of the request: they have its stamp.
    """
    source = decision.source
    if isinstance(source, RuleCheck):
        source = [(source, None)]
    if not isinstance(source, list) or not decision.allowed:
        return []
    return [check for check, _ in source if stamp_of(check.counter)]


def without_slots(charges: Sequence[RuleCharge]) -> list[RuleCharge]:
    """Return the charges with counters whose refund frees no slot."""
    return [
        (check._replace(counter=stamped(check.counter, NO_STAMP)), charged_ns)
        if stamp_of(check.counter)
        else (check, charged_ns)
        for check, charged_ns in charges
    ]


def refunding(refunds: Sequence[tuple[RuleCheck, int, int | None]]) -> Steps[None]:
    """Return units to each rule, charged at that time. Raises StoreError, after all were tried."""
    failure: StoreError | None = None
    for check, units, charged_ns in refunds:
        try:
            done = check.counter.refund(check.counted, units, charged_ns)
            if type(done) is Ask:
                yield answered(done)
        except StoreError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _log_forgiven(rule: str, units: int, wanted: int) -> None:
    _log.note(
        "rule %r owes as much as it may for one of its subjects: %s of %s units that were settled "
        "late are forgiven; reserve more, or raise `debt` of its limits",
        rule,
        show(units),
        show(wanted),
        key=f"forgiven {rule}",
    )


class Owed(NamedTuple):
    """The units of a late charge that a rule was not charged."""

    forgiven: int
    """A limit owes as much as it may."""
    uncounted: int
    """The store has not confirmed the charge. It is not repeated: it may have been made."""


CHARGED: Final = Owed(0, 0)


def owing(check: RuleCheck, wanted: int, counts: Counts) -> Steps[Owed]:
    """Charge more units to a rule, in full. Returns what was not charged."""
    beyond, failed = max(wanted - UNITS_MAX, 0), 0
    try:
        forgiven = check.counter.owe(check.counted, wanted - beyond)
        beyond += (yield answered(forgiven)) if isinstance(forgiven, Ask) else forgiven
    except StoreError as error:
        beyond, failed = 0, wanted
        _log.note("a settled cost may not have been charged: %s", error, key="failed")
    if check.rule.mode == "shadow":
        return CHARGED
    counted = counts.of(check.rule.id)
    counted.settled += wanted - beyond - failed
    # A wrong number of 400 digits must not make the metrics unreadable for ever.
    counted.forgiven += min(beyond, UNITS_MAX)
    if beyond:
        _log_forgiven(check.rule.id, beyond, wanted)
    return Owed(beyond, failed)


def settlement_of(
    checks: Sequence[RuleCheck], owed: Sequence[Owed] | None, reserved: Cost | None, actual: Cost
) -> Settlement:
    """Return what a settled request is charged. `owed` is None if it was settled before."""
    if owed is None:
        return Settlement(0, repeated=True)
    if isinstance(actual, int) and owed.count(CHARGED) == len(owed):
        # Without the constructor of the class, which is written in Python.
        return tuple.__new__(Settlement, (actual, 0, 0, False))
    forgiven: dict[str, int] = {}
    uncounted: dict[str, int] = {}
    for check, each in zip(checks, owed, strict=True):
        unit = check.rule.unit
        # Rounded up: what a rule charges in part is not charged whole.
        weight = check.weight if isinstance(actual, int) or unit == REQUESTS else 1
        for found, units in ((forgiven, each.forgiven), (uncounted, each.uncounted)):
            if units:
                found[unit] = max(found.get(unit, 0), -(-units // weight))
    most, failed = max(forgiven.values(), default=0), max(uncounted.values(), default=0)
    if isinstance(actual, int):
        least = min(reserved, actual) if isinstance(reserved, int) else 0
        return Settlement(max(actual - most - failed, least), most, failed)
    cost = actual if reserved is None else merged_cost(reserved, actual)
    charged = {
        unit: max(units - forgiven.get(unit, 0) - uncounted.get(unit, 0), 0)
        for unit, units in cost.items()  # type: ignore[union-attr]  # actual is by unit, and so is it
    }
    return Settlement(charged, most, failed)
