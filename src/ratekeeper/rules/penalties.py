"""Penalties: growing cool-downs, then a block, for clients that do not wait after a denial.

A denial says when to retry. A client that sends more requests before that time, `after` of them
`within` a period, gets a cool-down: every request is denied until it ends. A request during a
cool-down is another one that did not wait. So a client that does not stop gets the next cool-down
on top, twice as long, and after `block_after` of them a block. One cool-down is forgotten every
`decay`.

Each process counts the requests that did not wait by itself. The denial cache answers many denials
without a call to the store, and a flood of them must not become a flood of calls. The penalties
themselves are kept in the store, so that they hold on every node, in two buckets for each subject:

- *cool-down*: it refills by one unit a second, so the missing units are the seconds left. A
  cool-down of ten seconds spends ten units. While the bucket is not full, every request is denied.
  It has room for all cool-downs and a block on top of them. If there is no room for the next
  penalty, none is given, counted or reported until there is.
- *level*: it refills by one unit in each `decay`, so the missing units are the cool-downs so far.

A client that was never told about a cool-down is not penalised for requests it made during it:
requests in flight while the cool-down was given, and requests that another node denied before it
knew about the cool-down, do not lead to another one.

A process reads the cool-down of a subject at most once in LOOK_NS. A cool-down that another node
gave, or a reset, takes effect after that time at the latest.

A client may retry when the penalty is over and the limits of the rule have room: the later of the
two is the time to retry.

Every answer to a denied client says that a penalty denied it (`Decision.penalty`). The buckets do
not say which kind it is. A process knows the kind of a penalty that it gave itself. It reports any
other one as a block if more is left than all cool-downs together last, and else as a cool-down. So
the end of a block that another process gave is reported as a cool-down of the same length.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

from ratekeeper.core import switches
from ratekeeper.core.clock import NS_PER_SECOND, Clock
from ratekeeper.core.errors import CapacityError, StoreError, StoreTimeout
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, Limit, PenaltyKind
from ratekeeper.core.steps import Call, Steps
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.decide.store import Counter
from ratekeeper.metrics.tally import RuleCounts
from ratekeeper.rules.compiled import CheckPlan, MakeCounter, RuleCheck
from ratekeeper.rules.document.model import Document, PenaltySettings

LOOK_NS: Final = NS_PER_SECOND
FOREVER_NS: Final = 2**63 - 1
# The most subjects that a process tracks. If more are denied, it forgets the oldest.
TRACKED_MAX: Final = 16_384

# Rule ids have no control characters, so no rule has these names.
COOLDOWN: Final = "\x1fcooldown"
LEVEL: Final = "\x1flevel"

# A rule's id and the subject.
TrackedKey = tuple[str, str]

_log = logging.getLogger("ratekeeper.rules.penalties")


@dataclass(frozen=True, slots=True)
class Penalty:
    """A cool-down or a block that this process gave."""

    rule: str
    subject: str
    level: int
    """1 for the first cool-down of the subject, and so on."""
    seconds: int
    blocked: bool
    until_ns: int


class PenaltyCounters(NamedTuple):
    """A rule's penalty settings, with the counters that keep its penalties."""

    settings: PenaltySettings
    cooldown: Counter
    cooldown_units: int
    all_cooldowns_ns: int
    """The length of all cool-downs together, without the block."""
    level: Counter
    level_units: int


def penalty_counters(
    settings: PenaltySettings, rule: str, make_counter: MakeCounter
) -> PenaltyCounters:
    """Prepare a rule's penalties on a store."""
    seconds = room_s(settings)
    levels = settings.block_after + 1
    all_cooldowns_s = seconds - penalty_s(settings, levels)
    return PenaltyCounters(
        settings,
        make_counter((Limit(1, per=1, capacity=seconds),), rule + COOLDOWN),
        seconds,
        all_cooldowns_s * NS_PER_SECOND,
        make_counter((Limit(1, per=settings.decay_s, capacity=levels),), rule + LEVEL),
        levels,
    )


def penalty_s(settings: PenaltySettings, level: int) -> int:
    """Return the length of the cool-down or block of a level, rounded up to whole seconds.

    >>> settings = PenaltySettings(cooldown_s=10, block_after=3)
    >>> [penalty_s(settings, level) for level in (1, 2, 3, 4)]
    [10, 20, 40, 3600]
    """
    if level > settings.block_after:
        return math.ceil(settings.block_s)
    return math.ceil(min(settings.cooldown_s * 2.0 ** (level - 1), settings.cooldown_max_s))


def room_s(settings: PenaltySettings) -> int:
    """Return the length of all cool-downs and a block together.

    >>> room_s(PenaltySettings(cooldown_s=10, block_after=3))
    3670
    """
    return sum(penalty_s(settings, level) for level in range(1, settings.block_after + 2))


@dataclass(slots=True)
class _Tracked:
    denied_until_ns: int = 0
    limited_until_ns: int = 0
    """When the limits of the rule would pass again what they last denied."""
    strikes: int = 0
    since_ns: int = 0
    looked_ns: int = -LOOK_NS
    barred_until_ns: int = 0
    no_room_above_ns: int = FOREVER_NS
    """While more than this is left of a cool-down, the next one has no room on top of it."""
    being_penalised: bool = False
    penalty: Penalty | None = None


class PenaltyTracker:
    """The denied subjects that this process has seen, with their strikes and cool-downs."""

    def __init__(self) -> None:
        self._tracked: dict[TrackedKey, _Tracked] = {}
        self._lock = fork_safe(threading.Lock())
        switches.forgetting(self)

    def forget_all(self) -> None:
        """Forget all subjects."""
        with self._lock:
            self._tracked.clear()

    def cooldown_ns(self, key: TrackedKey, now_ns: int) -> int | None:
        """Return the time left of a subject's cool-down; None if only the store knows."""
        tracked = self._tracked.get(key)
        if tracked is None or not 0 <= now_ns - tracked.looked_ns < LOOK_NS:
            return None
        return max(tracked.barred_until_ns - now_ns, 0)

    def is_block(self, key: TrackedKey) -> bool:
        """Return True if the last penalty that this process gave the subject is a block."""
        tracked = self._tracked.get(key)
        return tracked is not None and tracked.penalty is not None and tracked.penalty.blocked

    def note_cooldown(self, key: TrackedKey, now_ns: int, left_ns: int) -> None:
        """Remember the time left of a cool-down, as the store has it."""
        with self._lock:
            tracked = self._of(key)
            tracked.looked_ns = now_ns
            tracked.barred_until_ns = now_ns + left_ns
            if not left_ns:
                tracked.penalty = None
                tracked.no_room_above_ns = FOREVER_NS

    def limited_ns(self, key: TrackedKey, now_ns: int) -> int:
        """Return how long the limits of the rule deny, apart from its penalties."""
        tracked = self._tracked.get(key)
        return 0 if tracked is None else max(tracked.limited_until_ns - now_ns, 0)

    def note_limited(self, key: TrackedKey, until_ns: int) -> None:
        """Remember when the limits of the rule would pass again what they denied."""
        with self._lock:
            self._of(key).limited_until_ns = until_ns

    def note_denial(
        self, key: TrackedKey, settings: PenaltySettings, now_ns: int, retry_after_ns: int
    ) -> bool:
        """Count a denial; return True if the subject is to be penalised.

        After True, the caller gives the penalty and calls `finish`.
        """
        with self._lock:
            tracked = self._of(key)
            waited = now_ns >= tracked.denied_until_ns
            tracked.denied_until_ns = now_ns + retry_after_ns
            no_room = tracked.barred_until_ns - now_ns > tracked.no_room_above_ns
            if waited or no_room or tracked.being_penalised:
                return False
            if now_ns - tracked.since_ns > settings.within_s * NS_PER_SECOND:
                tracked.since_ns = now_ns
                tracked.strikes = 0
            tracked.strikes += 1
            if tracked.strikes < settings.after:
                return False
            tracked.strikes = 0
            tracked.being_penalised = True
            return True

    def is_new_cooldown(self, key: TrackedKey, now_ns: int, left_ns: int) -> bool:
        """Remember a cool-down of the store; return True if this process did not know it."""
        with self._lock:
            tracked = self._of(key)
            is_new = left_ns > 0 and tracked.barred_until_ns <= now_ns
            tracked.looked_ns = now_ns
            tracked.barred_until_ns = now_ns + left_ns
            return is_new

    def finish(self, key: TrackedKey) -> None:
        """Count denials of the subject again, after `note_denial` returned True."""
        with self._lock:
            if key in self._tracked:
                self._tracked[key].being_penalised = False

    def note_penalty(
        self, key: TrackedKey, counters: PenaltyCounters, level: int, spent: Decision, now_ns: int
    ) -> Penalty | None:
        """Remember a penalty that the store has `spent`; None if the store had no room for it."""
        seconds = penalty_s(counters.settings, level)
        with self._lock:
            tracked = self._of(key)
            if not spent.allowed:
                tracked.no_room_above_ns = (counters.cooldown_units - seconds) * NS_PER_SECOND
                return None
            tracked.looked_ns = now_ns
            # The time until the bucket is full: it includes cool-downs that other nodes gave.
            tracked.barred_until_ns = now_ns + spent.reset_after_ns
            blocked = level > counters.settings.block_after
            tracked.penalty = Penalty(*key, level, seconds, blocked, tracked.barred_until_ns)
            return tracked.penalty

    def forget(self, key: TrackedKey) -> None:
        """Forget a subject."""
        with self._lock:
            self._tracked.pop(key, None)

    def active(self, now_ns: int) -> list[Penalty]:
        """Return the penalties that this process gave and that are not over, longest first."""
        with self._lock:
            found = [
                tracked.penalty
                for tracked in self._tracked.values()
                if tracked.penalty is not None and tracked.barred_until_ns > now_ns
            ]
        return sorted(found, key=lambda penalty: -penalty.until_ns)

    def _of(self, key: TrackedKey) -> _Tracked:
        tracked = self._tracked.get(key)
        if tracked is None:
            if len(self._tracked) >= TRACKED_MAX:
                del self._tracked[next(iter(self._tracked))]  # the oldest
            tracked = self._tracked[key] = _Tracked()
        return tracked


class Penalties:
    """The penalties of a rule document's rules: denies during them and gives new ones."""

    def __init__(
        self, clock: Clock, make_counter: MakeCounter, counts_of: Callable[[str], RuleCounts]
    ) -> None:
        self.tracker = PenaltyTracker()
        self.listener: Callable[[Penalty], None] | None = None
        self.is_logged = True
        """False in a replay of recorded decisions, whose penalties apply to no client."""
        self._now_ns = clock.now_ns
        self._make_counter = make_counter
        self._counts_of = counts_of
        self.counters: dict[str, PenaltyCounters] = {}
        """By rule id; empty if no rule has penalties."""

    def use(self, document: Document) -> None:
        """Prepare the penalties of a document's rules."""
        self.counters = {
            rule.id: penalty_counters(rule.penalty, rule.id, self._make_counter)
            for rule in document.rules
            if rule.penalty is not None
        }

    def denial(
        self, plan: CheckPlan
    ) -> Steps[tuple[tuple[RuleCheck, Decision] | None, dict[int, StoreError]]]:
        """Return the rule and its denial if a cool-down is in force, else None; and the errors.

        The errors are those of rules whose cool-down the store could not read, by position. After a
        timeout the request does not wait for another cool-down: the limits of those rules decide.
        """
        failures: dict[int, StoreError] = {}
        timed_out = False
        counters_of = self.counters
        for at, check in enumerate(plan.enforced):
            counters = counters_of.get(check.rule.id)
            if counters is None:
                continue
            key, now_ns = _key(check), self._now_ns()
            left_ns = self.tracker.cooldown_ns(key, now_ns)
            if left_ns is None and timed_out:
                continue
            if left_ns is None:
                try:
                    left_ns = yield from _cooldown_left_ns(counters, check.subject)
                except StoreError as error:
                    failures[at] = error
                    timed_out = isinstance(error, StoreTimeout)
                    continue
                self.tracker.note_cooldown(key, now_ns, left_ns)
                yield from self._look_at_limits(check, now_ns, left_ns)
            if left_ns:
                return (check, self._denied(check, counters, left_ns, now_ns)), failures
        return None, failures

    def look(self, check: RuleCheck) -> Steps[Decision | None]:
        """Return the denial of a rule's cool-down as the store has it now; None if there is none.

        For views of a quota. Unlike `denial`, it always asks the store. Raises StoreError.
        """
        counters = self.counters.get(check.rule.id)
        if counters is None or check.rule.mode != "enforce":
            return None
        now_ns = self._now_ns()
        left_ns = yield from _cooldown_left_ns(counters, check.subject)
        if not left_ns:
            return None
        self.tracker.note_cooldown(_key(check), now_ns, left_ns)
        yield from self._look_at_limits(check, now_ns, left_ns)
        return self._denied(check, counters, left_ns, now_ns)

    def _look_at_limits(self, check: RuleCheck, now_ns: int, left_ns: int) -> Steps[None]:
        """During a cool-down, note how long the limits of the rule deny: it may be longer."""
        if left_ns:
            with suppress(StoreError, CapacityError):
                peeked: Decision = yield Call(check.counter.peek, check.counted, check.units)
                self.tracker.note_limited(_key(check), now_ns + peeked.retry_after_ns)

    def _denied(
        self, check: RuleCheck, counters: PenaltyCounters, left_ns: int, now_ns: int
    ) -> Decision:
        is_block = left_ns > counters.all_cooldowns_ns or self.tracker.is_block(_key(check))
        kind: PenaltyKind = "block" if is_block else "cooldown"
        limit = check.prepared.limits[0]
        wait_ns = max(left_ns, self.tracker.limited_ns(_key(check), now_ns))
        return Decision(
            allowed=False,
            policy=limit,
            remaining=0,
            retry_after_ns=wait_ns,
            reset_after_ns=wait_ns,
            rule=check.rule.id,
            decided_ns=now_ns,
            penalty=kind,
        )

    def penalise(self, plan: CheckPlan, decision: Decision) -> Steps[None]:
        """Give a penalty if the subject of this denial has too often retried without waiting."""
        if decision.allowed or decision.degraded:
            return
        for check in plan.enforced:
            counters = self.counters.get(check.rule.id)
            if counters is None or check.rule.id != decision.rule:
                continue
            key, now_ns, retry_ns = _key(check), self._now_ns(), decision.retry_after_ns
            if decision.penalty is None:
                self.tracker.note_limited(key, now_ns + retry_ns)
            if self.tracker.note_denial(key, counters.settings, now_ns, retry_ns):
                try:
                    with suppress(StoreError):
                        yield from self._give(check, counters)
                finally:
                    self.tracker.finish(key)
                return

    def _give(self, check: RuleCheck, counters: PenaltyCounters) -> Steps[None]:
        key = _key(check)
        left_ns = yield from _cooldown_left_ns(counters, check.subject)
        if self.tracker.is_new_cooldown(key, self._now_ns(), left_ns):
            return
        step: Decision = yield Call(counters.level.check, check.subject, 1)
        level = counters.level_units - step.remaining if step.allowed else counters.level_units
        # The store denies this if there is no room on top of the cool-down that is left.
        seconds = penalty_s(counters.settings, level)
        spent: Decision = yield Call(counters.cooldown.check, check.subject, seconds)
        penalty = self.tracker.note_penalty(key, counters, level, spent, self._now_ns())
        if penalty is not None:
            self._report(penalty)

    def _report(self, penalty: Penalty) -> None:
        counts = self._counts_of(penalty.rule)
        counts.blocks += penalty.blocked
        counts.cooldowns += not penalty.blocked
        if not self.is_logged:
            return
        _log.warning(
            "rule %r: %s of %d s, number %d, for %s; limiter.penalties() names the subject",
            penalty.rule,
            "a block" if penalty.blocked else "a cool-down",
            penalty.seconds,
            penalty.level,
            _pseudonym(penalty.subject),
        )
        if self.listener is not None:
            try:
                self.listener(penalty)
            except Exception:  # the request is denied all the same
                _log.exception("the on_penalty callback failed")

    def reset(self, check: RuleCheck) -> Steps[None]:
        """End the penalties of a subject, on every node."""
        counters = self.counters.get(check.rule.id)
        if counters is not None:
            yield Call(counters.cooldown.reset, check.subject)
            yield Call(counters.level.reset, check.subject)
            self.tracker.forget(_key(check))

    def is_barred(self, rule: str, subject: str) -> Steps[bool]:
        """Return True if the store has a cool-down for the subject. Raises StoreError."""
        counters = self.counters.get(rule)
        return counters is not None and bool((yield from _cooldown_left_ns(counters, subject)))


def _cooldown_left_ns(counters: PenaltyCounters, subject: str) -> Steps[int]:
    decision: Decision = yield Call(counters.cooldown.peek, subject, counters.cooldown_units)
    return decision.retry_after_ns


def _key(check: RuleCheck) -> TrackedKey:
    return check.rule.id, check.subject


def _pseudonym(subject: str) -> str:
    """Return a name of a subject for logs: always the same, without the key it may contain.

    >>> _pseudonym("api_key:sk_1")
    'api_key:#458f48e6efe6'
    """
    digest = blake2b(subject.encode("utf-8", "replace"), digest_size=6).hexdigest()
    name = re.split(f"[:#{SEPARATOR}]", subject, maxsplit=1)[0]
    return f"{name}:#{digest}"
