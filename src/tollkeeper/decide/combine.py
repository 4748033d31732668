"""Several limits, one decision: all pass or none does, and the tightest limit is reported.

A request may have to pass several limits of one rule (`combine`) and several rules
(`combine_decisions`). Both report the *tightest*: a limit that denies comes before one that
allows, then the least remaining, then the longest time to retry and to reset. A denied decision
always reports a limit that denied: each of those has less remaining than the cost, and each limit
that would have allowed the request has at least the cost.

`check_in_turn` decides several subjects of one request in memory: all pass, or none is charged.
It peeks at every subject first and charges only if all of them have room, the one with the least
room first. Another thread or process may spend in between. If that took the last units of the
first subject, nothing is charged. Otherwise the units that were already charged are refunded. A
check that the store cannot decide (its table is full) says nothing about the others: they are
decided, and charged if the caller declares the failed one optional. Redis decides the subjects in
one script call instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tollkeeper.core.errors import StoreError
from tollkeeper.core.model import UNITS_MAX, Decision, Limit, decision_with
from tollkeeper.decide.store import Answer, GateCheck


def combine(
    limits: Sequence[Limit],
    outcomes: Sequence[tuple[bool, int, int, int, int, int | None]],
    rule: str,
    now_ns: int,
    granted: Sequence[int] = (),
) -> Decision:
    """Return the decision at `now_ns` from the outcome of each of a rule's limits.

    `granted` has the granted units that each limit has left; it may be empty if none has.

    An outcome is an Outcome or a plain tuple of its fields. One loop without function calls: on
    Redis this runs for every check of several limits. The decision's time of the charge is the
    earliest of the limits' times: for each of them, an earlier time refunds less or the same.
    """
    passed, left, longest_ns, reset_ns, delay_ns, charged_ns = outcomes[0]
    if len(outcomes) == 1:
        return Decision(
            passed,
            limits[0],
            left,
            longest_ns,
            reset_ns,
            delay_ns,
            rule,
            False,
            charged_ns,
            now_ns,
            granted[0] if granted else 0,
        )
    tightest, place = (passed, left, -longest_ns, -reset_ns), 0
    for index, (allowed, remaining, retry_ns, reset_ns, hold_ns, at_ns) in enumerate(outcomes):
        if hold_ns > delay_ns:
            delay_ns = hold_ns
        if at_ns is not None and (charged_ns is None or at_ns < charged_ns):
            charged_ns = at_ns
        if allowed and remaining > left:
            continue  # the usual case: it cannot be the tightest
        if retry_ns > longest_ns:
            longest_ns = retry_ns
        tightness = (allowed, remaining, -retry_ns, -reset_ns)
        if tightness < tightest:
            tightest, place, left = tightness, index, remaining
    passed, left, _, reset_ns = tightest
    if not passed:
        delay_ns, charged_ns = 0, None
    return Decision(
        passed,
        limits[place],
        left,
        longest_ns,
        -reset_ns,
        delay_ns,
        rule,
        False,
        charged_ns,
        now_ns,
        granted[place] if granted else 0,
    )


def combine_decisions(decisions: Sequence[Decision]) -> Decision:
    """Return one decision on a request from the decisions of several rules."""
    if len(decisions) == 1:
        return decisions[0]
    tightest = min(decisions, key=_tightness)
    retry_after_ns = max([decision.retry_after_ns for decision in decisions])
    delay_ns = max([decision.delay_ns for decision in decisions]) if tightest.allowed else 0
    degraded = any(decision.degraded for decision in decisions)
    if (
        tightest.retry_after_ns == retry_after_ns
        and tightest.delay_ns == delay_ns
        and tightest.degraded == degraded
    ):
        return tightest  # the usual case: it already says everything
    return decision_with(
        tightest, retry_after_ns=retry_after_ns, delay_ns=delay_ns, degraded=degraded
    )


def _tightness(answer: Decision) -> tuple[bool, int, int, int]:
    """Return the sort key of a decision, as in `combine`; the smallest is the tightest."""
    return answer.allowed, answer.remaining, -answer.retry_after_ns, -answer.reset_after_ns


def check_in_turn(checks: Sequence[GateCheck], optional: Collection[int] = ()) -> list[Answer]:
    """Check each (gate, subject, cost) on gates that answer at once; see Store.check_together."""
    answers: list[Answer] = []
    passes, least, first = True, UNITS_MAX, 0
    for at, (gate, subject, cost) in enumerate(checks):
        try:
            decision = gate.peek(subject, cost)
        except StoreError as error:
            answers.append(error)
            passes = passes and at in optional
        else:
            answers.append(decision)
            passes = passes and decision.allowed
            if decision.remaining < least:
                least, first = decision.remaining, at
    if not passes:
        return answers
    looks = list(answers)
    charged: list[tuple[int, int | None]] = []
    passes = False
    try:
        for at in range(len(checks)) if not first else _with_first(first, len(checks)):
            if isinstance(looks[at], StoreError):
                continue
            gate, subject, cost = checks[at]
            try:
                decision = gate.check(subject, cost)
            except StoreError as error:  # no room for a new state
                answers[at] = error
                if at not in optional:
                    return answers
                continue
            answers[at] = decision
            if not decision.allowed:
                return answers
            charged.append((at, decision.charged_ns))
        passes = True
    finally:
        for at, charged_ns in () if passes else charged:
            gate, subject, cost = checks[at]
            gate.refund(subject, cost, charged_ns)
            answers[at] = looks[at]
    return answers


def _with_first(first: int, count: int) -> list[int]:
    return [first, *range(first), *range(first + 1, count)]
