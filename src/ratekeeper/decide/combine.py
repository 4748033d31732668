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

from collections.abc import Container, Sequence

from ratekeeper.core.errors import StoreError
from ratekeeper.core.model import UNITS_MAX, Decision, Limit, decision_with
from ratekeeper.decide.store import Answer, GateCheck


def combine(
    limits: Sequence[Limit],
    outcomes: Sequence[tuple[bool, int, int, int, int, int | None]],
    rule: str,
    now_ns: int,
    granted: Sequence[int] = (),
    tick_ns: int = 1,
) -> Decision:
    """Return the decision at `now_ns` from the outcome of each of a rule's limits.

    `granted` has the granted units that each limit has left; it may be empty if none has. The times
    to retry and to reset are rounded up to whole ticks.

    An outcome is an Outcome or a plain tuple of its fields. One loop without function calls: on
    Redis this runs for every check of several limits. The decision's time of the charge is the
    earliest of the limits' times: for each of them, an earlier time refunds less or the same.
    """
    allowed, left, retry_ns, reset_ns, delay_ns, charged_ns = outcomes[0]
    longest_ns = retry_ns
    place = 0
    for at in range(1, len(outcomes)):
        passes, remaining, wait_ns, whole_ns, hold_ns, at_ns = outcomes[at]
        if hold_ns > delay_ns:
            delay_ns = hold_ns
        if at_ns is not None and (charged_ns is None or at_ns < charged_ns):
            charged_ns = at_ns
        if passes and remaining > left:
            continue  # the usual case: it cannot be the tightest
        if wait_ns > longest_ns:
            longest_ns = wait_ns
        # The times are on the other sides: the longer one is the tighter.
        if (passes, remaining, retry_ns, reset_ns) < (allowed, left, wait_ns, whole_ns):
            place, allowed, left, retry_ns, reset_ns = at, passes, remaining, wait_ns, whole_ns
    if not allowed:
        delay_ns, charged_ns = 0, None
    if tick_ns > 1:
        longest_ns = -(-longest_ns // tick_ns) * tick_ns
        reset_ns = -(-reset_ns // tick_ns) * tick_ns
    return Decision(
        allowed,
        limits[place],
        left,
        longest_ns,
        reset_ns,
        delay_ns,
        rule,
        False,
        charged_ns,
        now_ns,
        granted[place] if granted else 0,
    )


def combine_decisions(decisions: Sequence[Decision]) -> Decision:
    """Return one decision on a request from the decisions of several rules.

    One loop without function calls in the usual case: this runs for every request of several rules.
    """
    if len(decisions) == 1:
        return decisions[0]
    tightest, *others = decisions
    left, delay_ns, degraded = tightest.remaining, tightest.delay_ns, tightest.degraded
    for each in others:
        if each.delay_ns > delay_ns:
            delay_ns = each.delay_ns
        if each.degraded:
            degraded = True
        remaining = each.remaining
        if remaining > left and each.allowed:
            continue  # the usual case: it cannot be the tightest
        if (remaining < left and tightest.allowed) or _tightness(each) < _tightness(tightest):
            tightest, left = each, remaining
    retry_after_ns = 0
    if not tightest.allowed:
        delay_ns, retry_after_ns = 0, max([each.retry_after_ns for each in decisions])
    if (
        tightest.delay_ns == delay_ns
        and tightest.degraded == degraded
        and tightest.retry_after_ns == retry_after_ns
    ):
        return tightest  # the usual case: it already says everything
    return decision_with(
        tightest, retry_after_ns=retry_after_ns, delay_ns=delay_ns, degraded=degraded
    )


def uncharged(decision: Decision, cost: int) -> Decision:
    """Return the answer of a check whose cost was put back, because the request was denied."""
    if decision.charged_ns is None:
        return decision
    return decision_with(decision, charged_ns=None, remaining=decision.remaining + cost)


def _tightness(answer: Decision) -> tuple[bool, int, int, int]:
    """Return the sort key of a decision, as in `combine`; the smallest is the tightest."""
    return answer.allowed, answer.remaining, -answer.retry_after_ns, -answer.reset_after_ns


def check_in_turn(checks: Sequence[GateCheck], optional: Container[int] = ()) -> list[Answer]:
    """Check each (gate, subject, cost) on gates that answer at once; see Store.check_together."""
    looks: list[Answer] = []
    failed: list[int] = []
    least, first = UNITS_MAX, 0
    for gate, subject, cost in checks:
        try:
            look = gate.peek(subject, cost)
        except StoreError as error:
            failed.append(len(looks))
            looks.append(error)
        else:
            remaining = look.remaining
            if remaining < least:
                least, first = remaining, len(looks)
            looks.append(look)
    if not all(looks):  # a denial; an error counts as true
        return looks
    order = list(range(len(checks)))
    if first:
        order.insert(0, order.pop(first))
    if failed:
        if any(at not in optional for at in failed):
            return looks
        order = [at for at in order if at not in failed]
    return _charge_in_turn(checks, looks, order, optional)


def _charge_in_turn(
    checks: Sequence[GateCheck],
    looks: Sequence[Answer],
    order: Sequence[int],
    optional: Container[int],
) -> list[Answer]:
    """Charge the checks at these positions, all or none; `looks` are the answers of a peek."""
    answers = list(looks)
    try:
        for at in order:
            gate, subject, cost = checks[at]
            try:
                answers[at] = decision = gate.check(subject, cost)
            except StoreError as error:  # no room for a new state
                answers[at] = error
                if at in optional:
                    continue
                break
            if not decision.allowed:
                break
        else:
            return answers
    except BaseException:
        _refund_charged(checks, looks, answers)
        raise
    _refund_charged(checks, looks, answers)
    return answers


def _refund_charged(
    checks: Sequence[GateCheck], looks: Sequence[Answer], answers: list[Answer]
) -> None:
    """Refund the checks that were charged; their answers are those of the peek again."""
    for at, (gate, subject, cost) in enumerate(checks):
        answer = answers[at]
        if answer is not looks[at] and not isinstance(answer, StoreError) and answer.allowed:
            gate.refund(subject, cost, answer.charged_ns)
            answers[at] = looks[at]
