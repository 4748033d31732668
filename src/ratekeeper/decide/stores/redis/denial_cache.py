"""Denials that this process remembers, so that a client that retries too soon costs Redis nothing.

Only time gives quota back. So if a check of one unit is denied and nothing remains, every check of
one unit is denied until the retry-after has passed. Until then this process answers with the same
decision, and subtracts the time that has passed from its waits.

A refund, a grant or a reset ends a denial sooner. If this process makes one, it drops the denials
of the subject, and does not keep the reply to a check that was sent before. It does not learn about
those of other processes, so a denial is kept for at most a second by default: a unit that another
process returns may be visible here that much later. A changed limit is a different denial.

The clocks of this process and of the server are never compared. A denial ends as if the server had
decided when the check was sent, and its waits count from the arrival of the reply. So a denial is
never kept for too long, and a client that waits for its `retry_after` is not too early.

Checks of several units are not remembered: units that return before the retry-after would remain,
and the decision would still report none.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, decision_with
from ratekeeper.decide.stores.redis.codec import NS_PER_US
from ratekeeper.decide.stores.redis.scripts import RuleScripts, ScriptCharge, ScriptTime

Moment = tuple[ScriptTime, int]

DENIALS_MAX: Final = 16_384
# Subjects are spread over this many numbers. Those that share one are dropped together.
_STRIPES: Final = 4_096


class _Denial(NamedTuple):
    decision: Decision
    asked_ns: int
    """When the check was sent, by the monotonic clock."""
    sent_ns: int
    received_ns: int
    until_ns: int


class DenialCache:
    """The denials of one store. Bounded: the oldest is evicted first. Thread-safe.

    `longest_ns` is the longest time for which a denial is kept; 0 turns the cache off.
    """

    __slots__ = ("_dropped_ns", "_lock", "_longest_ns", "by_rule", "denials", "hits")

    def __init__(self, longest_ns: int) -> None:
        self._longest_ns = longest_ns
        self._lock = fork_safe(threading.Lock())
        # When the subjects of a stripe were dropped, by the monotonic clock.
        self._dropped_ns = [0] * _STRIPES
        # By the limits, as the scripts get them, and the subject.
        self.denials: dict[tuple[bytes, str], _Denial] = {}
        # Counted without a lock, so approximate.
        self.hits = 0
        # Hits by rule: at most one entry for each rule that has a counter.
        self.by_rule: dict[str, int] = {}

    def find(self, scripts: RuleScripts, subject: str, cost: int) -> Decision | None:
        """Return the denial of a check, as of now, if it is a check of one unit."""
        key = (scripts.encoded, subject)
        denial = self.denials.get(key)
        if denial is None:
            return None
        now = scripts.now()
        now_ns = moment_ns(now, time.monotonic_ns())
        dropped_ns = self._dropped_ns[hash(subject) % _STRIPES]
        if now_ns >= denial.until_ns or denial.asked_ns <= dropped_ns:
            self.denials.pop(key, None)
            return None
        # A test's clock may be set back: nothing is known of the time before the check.
        if cost != 1 or now_ns < denial.sent_ns:
            return None
        decision = denial.decision
        self.hits += 1
        self.by_rule[decision.rule] = self.by_rule.get(decision.rule, 0) + 1
        # Redis counts microseconds. Rounded down, which rounds the waits up.
        passed_ns = max(now_ns - denial.received_ns, 0)
        if type(now[0]) is bytes:
            passed_ns -= passed_ns % NS_PER_US
        return decision_with(
            decision,
            retry_after_ns=decision.retry_after_ns - passed_ns,
            reset_after_ns=max(decision.reset_after_ns - passed_ns, 0),
            decided_ns=decision.decided_ns + passed_ns,
        )

    def keep(self, charge: ScriptCharge, decision: Decision, now: Moment, asked_ns: int) -> None:
        """Keep the denial of a check of one unit that found none left, unless it was dropped.

        `now` is the time that was sent along, and `asked_ns` when, by the monotonic clock.
        """
        sent_ns = moment_ns(now, asked_ns)
        # A test's clock was sent along, so the script decided at exactly that time.
        received_ns = time.monotonic_ns() if type(now[0]) is bytes else sent_ns
        until_ns = sent_ns + min(decision.retry_after_ns, self._longest_ns)
        denial = _Denial(decision, asked_ns, sent_ns, received_ns, until_ns)
        key = (charge.scripts.encoded, charge.subject)
        with self._lock:
            self.denials.pop(key, None)  # and insert it at the end: the oldest come first
            if self._longest_ns:
                if len(self.denials) >= DENIALS_MAX:
                    del self.denials[next(iter(self.denials))]
                self.denials[key] = denial

    def drop(self, subject: str) -> None:
        """Drop the denials of a subject, also those of checks in flight: it was given units."""
        self._dropped_ns[hash(subject) % _STRIPES] = time.monotonic_ns()

    def clear(self) -> None:
        """Drop all denials."""
        with self._lock:
            self._dropped_ns = [time.monotonic_ns()] * _STRIPES
            self.denials.clear()


def moment_ns(now: Moment, own_ns: int) -> int:
    """Return a time of `RuleScripts.now`: of a test's clock, or ours for the server's clock."""
    return now[0] * NS_PER_US + now[1] if type(now[0]) is int else own_ns
