"""Denials that this process remembers, so that a client that retries too soon costs Redis nothing.

A denial says how long it holds: until its retry-after, because only time gives quota back. Until
then the same check has the same answer, and the process need not send it. A client that retries
without waiting, a retry storm, is then answered from here.

Three things end a denial sooner: a refund, a grant or a reset. If this process makes one, it drops
the cached denials of the subject, and does not cache the reply to a check that was sent before. It
does not learn about those of other processes. So by default a denial is cached for at most a
second: a unit that another process gives back may be visible here that much later. A changed limit
is a different check.

One thing makes a denial last longer: a check with a smaller cost that was allowed meanwhile, under
the same limits. In this process it drops the cached denial too. If another process spent, a denial
of a cost above 1 may report too much remaining quota for that second. A cost of 1 is denied only
if nothing remains.

And one thing makes a denial wrong: in a cluster, a request of several subjects was charged at the
time, and then denied by another subject and refunded. So denials that were answered in between are
dropped. A single server decides such a request in one step.

A denied check may concern several subjects, and only some of them denied it. The denial is kept
under those: a rule's field and a subject, a `CounterKey`. Events at the others change nothing: a
tenant whose users are all denied, each by a limit of their own, may be charged all the time.

The check that spends the last unit implies the denial that follows, so that is cached too.

A cached denial can only deny, so no defect of the cache admits a request. A denial that was dropped
or evicted costs one round trip and nothing else.

The cache keeps the script's reply (the states), not a decision. The decision is computed again each
time, by the same code as the first one, and has every field as the script would answer it then, if
no other client touched the key. This process does not know exactly how much time has passed on the
server's clock, so it uses the safe bound each time. A denial is repeated only until it would end if
the server had decided at the moment the check was sent. The waits that it reports count from the
moment the reply arrived, so a client that waits for its `retry_after` is not too early.

A log's reply contains only the time of its oldest relevant entry. It is cached only if that is
enough: if one unit is missing, which is always so for a cost of 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Sequence
from typing import Final, NamedTuple

from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision
from ratekeeper.decide.stores.redis.codec import NS_PER_US
from ratekeeper.decide.stores.redis.scripts import CheckAttempt, CheckKey, ScriptTime

ENTRIES_MAX: Final = 16_384
# Counters and subjects whose last drop is known. For others, the last forgotten drop counts.
DROPS_MAX: Final = 4_096

# A rule's field, and a subject that the rule counts.
CounterKey = tuple[Hashable, str]
# Identifies a check, or several that are decided together: limits, subject and cost of each.
DenialKey = Hashable


class CachedDenial(NamedTuple):
    """The replies that denied a check, and the time in which they are valid."""

    sent_ns: int
    """When the check was sent. The server decided then or later."""
    until_ns: int
    """From this time on, the check must be sent again."""
    received_ns: int
    """When the reply arrived. The server decided then or earlier."""
    replies: Sequence[list[int]]
    counters: tuple[CounterKey, ...]
    """The counters that denied."""


class DenialTable:
    """Denials by check. Bounded: the oldest is evicted first. Thread-safe.

    Times are of any clock, as long as it is always the same one.
    """

    __slots__ = (
        "_by_check",
        "_drops",
        "_forgotten",
        "_lock",
        "checks_of_subject",
        "entries_max",
        "hits",
        "mark",
    )

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        self._lock = fork_safe(threading.Lock())
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._by_check: dict[DenialKey, CachedDenial] = {}
        # The denied checks of each subject. Read without the lock: a subject that is not in it has
        # no cached denial, a test that every check can afford.
        self.checks_of_subject: dict[str, set[DenialKey]] = {}
        # Cache hits. Counted without a lock, so approximate.
        self.hits = 0
        # Grows with each drop. A caller reads it before it sends a check, and sees later whether
        # there was a drop since.
        self.mark = 0
        self._drops: dict[Hashable, int] = {}
        self._forgotten = 0

    @property
    def count(self) -> int:
        """Number of cached denials."""
        return len(self._by_check)

    def find(self, check: DenialKey, now_ns: int) -> CachedDenial | None:
        """Return the denial of a check that is valid now."""
        denial = self._by_check.get(check)
        # A clock that was set back is before the check was sent: nothing is known of that time.
        if denial is None or not denial.sent_ns <= now_ns < denial.until_ns:
            return None
        self.hits += 1
        return denial

    def keep(self, check: DenialKey, denial: CachedDenial, mark: int) -> None:
        """Cache a denial, unless something was dropped at its counters since `mark`."""
        with self._lock:
            if self._is_current(denial, mark):
                self._put(check, denial)

    def drop_subject(self, subject: str) -> None:
        """Drop a subject's denials, also those of checks in flight: it was given units."""
        with self._lock:
            self._note_drop(subject)
            for check in list(self.checks_of_subject.get(subject, ())):
                self._remove(check)

    def spent(
        self,
        counters: Collection[CounterKey],
        check: DenialKey = None,
        denial: CachedDenial | None = None,
        mark: int = 0,
    ) -> None:
        """Drop the denials at counters that were charged; cache the denial that follows."""
        self._replace(counters, None, check, denial, mark)

    def refunded(
        self,
        counters: Collection[CounterKey],
        since_ns: int,
        check: DenialKey = None,
        denial: CachedDenial | None = None,
        mark: int = 0,
    ) -> None:
        """Drop denials answered since `since_ns` at counters that were charged and refunded.

        Cache the denial that was the reason for the refund.
        """
        self._replace(counters, since_ns, check, denial, mark)

    def _replace(
        self,
        counters: Collection[CounterKey],
        since_ns: int | None,
        check: DenialKey,
        denial: CachedDenial | None,
        mark: int,
    ) -> None:
        with self._lock:
            current = denial is not None and self._is_current(denial, mark)
            for counter in counters:
                self._drop(counter, since_ns)
            if denial is not None and current:
                self._put(check, denial)

    def _is_current(self, denial: CachedDenial, mark: int) -> bool:
        last, forgotten = self._drops, self._forgotten
        return all(
            last.get(counter, forgotten) <= mark and last.get(counter[1], forgotten) <= mark
            for counter in denial.counters
        )

    def _put(self, check: DenialKey, denial: CachedDenial) -> None:
        self._remove(check)  # and insert it at the end: the oldest come first
        if len(self._by_check) >= self.entries_max:
            self._remove(next(iter(self._by_check)))
        self._by_check[check] = denial
        for _, subject in denial.counters:
            self.checks_of_subject.setdefault(subject, set()).add(check)

    def _remove(self, check: DenialKey) -> None:
        denial = self._by_check.pop(check, None)
        if denial is None:
            return
        for _, subject in denial.counters:
            checks = self.checks_of_subject.get(subject)
            if checks is not None:
                checks.discard(check)
                if not checks:
                    del self.checks_of_subject[subject]

    def _drop(self, counter: CounterKey, since_ns: int | None) -> None:
        """Drop the denials at a counter: all, or those answered since `since_ns`."""
        self._note_drop(counter)
        for check in list(self.checks_of_subject.get(counter[1], ())):
            denial = self._by_check[check]
            if counter in denial.counters and (since_ns is None or denial.received_ns >= since_ns):
                self._remove(check)

    def _note_drop(self, dropped: Hashable) -> None:
        self.mark += 1
        self._drops.pop(dropped, None)
        self._drops[dropped] = self.mark
        if len(self._drops) > DROPS_MAX:
            self._forgotten = self._drops.pop(next(iter(self._drops)))


class DenialCache:
    """The cached denials of one store, for all of its gates.

    `longest_ns` is the longest time for which a denial is cached; 0 turns the cache off.
    """

    __slots__ = ("_longest_ns", "by_rule", "subjects", "table")

    def __init__(self, longest_ns: int) -> None:
        self._longest_ns = longest_ns
        self.table = DenialTable()
        # Cache hits by rule. It has at most one entry for each rule that a gate was made for.
        self.by_rule: dict[str, int] = {}
        # The subjects that have a cached denial.
        self.subjects: Collection[str] = self.table.checks_of_subject

    @property
    def hits(self) -> int:
        """Number of checks that were answered from here."""
        return self.table.hits

    @property
    def mark(self) -> int:
        """To be read before a check is sent. See CheckAttempt."""
        return self.table.mark

    def find(self, check: CheckKey, moment: tuple[ScriptTime, int]) -> Decision | None:
        """Return the decision on a check as of now, if its denial is cached."""
        scripts, _, cost = check
        now, early_ns = moment
        now_ns = _moment_ns(now, early_ns)
        denial = self.table.find(_denial_key([check]), now_ns)
        if denial is None:
            return None
        reply = _aged(denial.replies[0], denial.received_ns, now, now_ns)
        decision = scripts.decoder.check(reply, cost, early_ns)
        self._count(decision.rule)
        return decision

    def keep(self, attempt: CheckAttempt, reply: list[int], decision: Decision) -> None:
        """Cache what a reply says about further checks: that they are denied for some time.

        To be called for a denial, and for a check that left less quota than it cost. If the attempt
        stands for several checks, `decision` is that of the last one.
        """
        cost = attempt.cost
        decoder = attempt.scripts.decoder
        check = _denial_key([(attempt.scripts, attempt.subject, cost)])
        counter = (attempt.scripts.field, attempt.subject)
        if not decision.allowed:
            if self._longest_ns and decoder.lasts(reply, cost):
                denial = self._denial(attempt, [reply], decision.retry_after_ns, (counter,))
                self.table.keep(check, denial, attempt.mark)
            return
        next_reply = None
        if self._longest_ns and decision.remaining < cost:
            next_reply = decoder.denial_after(reply, attempt.count * cost, cost)
        if next_reply is None or not decoder.lasts(next_reply, cost):
            if attempt.subject in self.subjects:
                self.table.spent([counter])
            return
        next_decision = decoder.check(next_reply, cost, attempt.early_ns)
        denial = self._denial(attempt, [next_reply], next_decision.retry_after_ns, (counter,))
        self.table.spent([counter], check, denial, attempt.mark)

    def find_joint(self, attempts: Sequence[CheckAttempt]) -> list[Decision] | None:
        """Return the decisions on several checks, if a denial of exactly these is cached."""
        if not self.subjects:
            return None
        first = attempts[0]
        now_ns = _moment_ns(first.now, first.early_ns)
        denial = self.table.find(_joint_key(attempts), now_ns)
        if denial is None:
            return None
        decisions = [
            attempt.denied_with_others(_aged(reply, denial.received_ns, attempt.now, now_ns))
            for attempt, reply in zip(attempts, denial.replies, strict=True)
        ]
        for decision in decisions:
            if not decision.allowed:
                self._count(decision.rule)
        return decisions

    def _count(self, rule: str) -> None:
        self.by_rule[rule] = self.by_rule.get(rule, 0) + 1

    def keep_joint(
        self,
        attempts: Sequence[CheckAttempt],
        replies: Sequence[list[int]],
        decisions: Sequence[Decision],
        refunded: Sequence[CheckAttempt],
    ) -> None:
        """Cache that these checks were denied together, until the first denial among them ends.

        To be called after the charges of `refunded` were undone: checks in between may have been
        denied because of them. Not cached if units were granted: a check that passes now may be
        denied when the grant ends.
        """
        first = attempts[0]
        sent_ns = _sent_ns(first)
        charged = [(attempt.scripts.field, attempt.subject) for attempt in refunded]
        for attempt, reply in zip(attempts, replies, strict=True):
            decoder = attempt.scripts.decoder
            lasts = not decoder.has_grants(reply) and decoder.lasts(reply, attempt.cost)
            if not self._longest_ns or not lasts:
                self.table.refunded(charged, sent_ns)
                return
        waits = [decision.retry_after_ns for decision in decisions if not decision.allowed]
        counters = tuple(
            (attempt.scripts.field, attempt.subject)
            for attempt, reply in zip(attempts, replies, strict=True)
            if reply[0] < 0
        )
        denial = self._denial(first, list(replies), min(waits), counters)
        self.table.refunded(charged, sent_ns, _joint_key(attempts), denial, first.mark)

    def drop_charged(self, attempts: Sequence[CheckAttempt]) -> None:
        """Drop the denials of counters that were charged, or may have been."""
        self.table.spent([(attempt.scripts.field, attempt.subject) for attempt in attempts])

    def drop_subject(self, subject: str) -> None:
        """Drop a subject's denials after a refund, a grant or a reset."""
        self.table.drop_subject(subject)

    def reset(self) -> None:
        """Forget everything."""
        self.table.reset()
        self.subjects = self.table.checks_of_subject

    def _denial(
        self,
        attempt: CheckAttempt,
        replies: Sequence[list[int]],
        wait_ns: int,
        counters: tuple[CounterKey, ...],
    ) -> CachedDenial:
        sent_ns = _sent_ns(attempt)
        # A test's clock was sent along, so the script decided at exactly that time.
        received_ns = time.monotonic_ns() if type(attempt.now) is bytes else sent_ns
        until_ns = sent_ns + min(wait_ns, self._longest_ns)
        return CachedDenial(sent_ns, until_ns, received_ns, replies, counters)


def _denial_key(checks: Sequence[CheckKey]) -> DenialKey:
    return tuple((scripts.encoded, subject, cost) for scripts, subject, cost in checks)


def _joint_key(attempts: Sequence[CheckAttempt]) -> DenialKey:
    return _denial_key([(each.scripts, each.subject, each.cost) for each in attempts])


def _sent_ns(attempt: CheckAttempt) -> int:
    """Return when a check was sent: by a test's clock, or by ours for the server's clock."""
    if type(attempt.now) is bytes:
        return attempt.sent_ns
    return _moment_ns(attempt.now, attempt.early_ns)


def _moment_ns(now: ScriptTime, early_ns: int) -> int:
    """Return the current time: by a test's clock, or by ours for the server's clock."""
    return now * NS_PER_US + early_ns if type(now) is int else time.monotonic_ns()


def _aged(reply: list[int], received_ns: int, now: ScriptTime, now_ns: int) -> list[int]:
    """Return the script's reply as of now, if only time has passed."""
    denied = reply[0] < 0
    at_us = ~reply[0] if denied else reply[0]
    # Rounded down, which rounds the reported wait up.
    at_us = now if type(now) is int else at_us + max(now_ns - received_ns, 0) // NS_PER_US
    return [~at_us if denied else at_us, *reply[1:]]
