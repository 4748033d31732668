"""Several limits, one decision: all pass or none does, and the tightest one speaks."""

from __future__ import annotations

from collections.abc import Sequence

from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.algorithms import Outcome


def combine(limits: Sequence[Limit], outcomes: Sequence[Outcome], rule: str) -> Decision:
    """The decision on a request that every limit has answered.

    Denied, it speaks of a limit that denied: each of those has less remaining than the cost, and
    each that would have allowed has at least the cost.
    """
    if len(outcomes) == 1:
        return Decision(outcomes[0][0], limits[0], *outcomes[0][1:], rule)
    allowed = all(outcome.allowed for outcome in outcomes)
    speaking = range(len(outcomes))
    speaker = min(
        (index for index in speaking if outcomes[index].allowed is allowed),
        key=lambda index: _tightness(outcomes[index]),
    )
    tightest = outcomes[speaker]
    return Decision(
        allowed,
        limits[speaker],
        tightest.remaining,
        max(outcome.retry_after_ns for outcome in outcomes),
        tightest.reset_after_ns,
        max(outcome.delay_ns for outcome in outcomes) if allowed else 0,
        rule,
    )


def _tightness(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.remaining, -outcome.retry_after_ns, -outcome.reset_after_ns
