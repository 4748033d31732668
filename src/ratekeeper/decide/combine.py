"""Several limits, one decision: all pass or none does, and the tightest limit is reported.

A request may have to pass several limits of one rule (`combine`) and several rules
(`combine_decisions`). Both report the *tightest*: a limit that denies comes before one that
allows, then the least remaining, then the longest time to retry and to reset. A denied decision
always reports a limit that denied: each of those has less remaining than the cost, and each limit
that would have allowed the request has at least the cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratekeeper.core.model import Decision, Limit, decision_with


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
