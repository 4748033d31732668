"""Penalties: growing cool-downs, then a block, for clients that do not wait after a denial.

A denial says when to retry. A client that sends more requests before that time, `after` of them
`within` a period, gets a cool-down: every request is denied until it ends. A request during a
cool-down is another one that did not wait. So a client that does not stop gets the next cool-down
on top, twice as long, and after `block_after` of them a block. One cool-down is forgotten every
`decay`.

The cool-downs are kept in the store, so that they hold on every node, in two buckets for each
subject:

- *cool-down*: it refills by one unit a second, so the time until it is full is what is left. A
  cool-down of ten seconds spends ten units.
- *level*: it refills by one unit in each `decay`, so the missing units are the cool-downs so far.

**A cool-down is a charge of the plan.** A check of a rule with penalties also charges the cool-down
bucket, with no units. The store answers with the units that are missing, in the same step as it
charges the limits. So a check is one call, as without penalties. If units are missing, the request
is denied, and the path returns the units of the limits (`limiter/path.py`).

Each process remembers a cool-down for LOOK_NS. Within that time it leaves the charge out, or denies
the request without a call: a flood of denials must not become a flood of calls. A cool-down that
another node gave, or a reset, takes effect after that time at the latest. Each process also counts
the requests that did not wait by itself.

A client that was never told about a cool-down is not penalised for requests it made during it:
requests in flight while the cool-down was given, and requests that another node denied before it
knew about the cool-down, do not lead to another one. A client gets no further penalty while more is
left than all cool-downs together last, that is during most of a block.

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
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from ratekeeper.core import switches
from ratekeeper.core.clock import NS_PER_SECOND, Clock
from ratekeeper.core.errors import CapacityError, StoreError
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, Limit
from ratekeeper.core.steps import Call, Steps
from ratekeeper.core.subjects import shown_subject
from ratekeeper.decide.store import Charge, Counter
from ratekeeper.metrics.tally import RuleCounts
from ratekeeper.rules.compiled import MakeCounter, RuleCheck
from ratekeeper.rules.document.model import Document, PenaltySettings

LOOK_NS: Final = NS_PER_SECOND
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
    level: Counter
    all_cooldowns_ns: int
    """The length of all cool-downs together, without the block."""


def penalty_counters(
    settings: PenaltySettings, rule: str, make_counter: MakeCounter
) -> PenaltyCounters:
    """Prepare a rule's penalties on a store."""
    room = Limit(1, per=1, capacity=room_s(settings))
    levels = Limit(1, per=settings.decay_s, capacity=settings.block_after + 1)
    return PenaltyCounters(
        settings,
        make_counter((room,), rule + COOLDOWN),
        make_counter((levels,), rule + LEVEL),
        sum(_cooldowns_s(settings)) * NS_PER_SECOND,
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
    """Return the length of all cool-downs, with the longest penalty on top of them.

    >>> room_s(PenaltySettings(cooldown_s=10, block_after=3))
    3670
    """
    cooldowns = _cooldowns_s(settings)
    return sum(cooldowns) + max(cooldowns[-1], penalty_s(settings, len(cooldowns) + 1))


def _cooldowns_s(settings: PenaltySettings) -> list[int]:
    return [penalty_s(settings, level) for level in range(1, settings.block_after + 1)]


@dataclass(slots=True)
class _Tracked:
    denied_until_ns: int = 0
    """When the subject was last told to retry."""
    strikes: int = 0
    since_ns: int = 0
    looked_ns: int = -LOOK_NS
    barred_until_ns: int = 0
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

    def denied_ns(self, key: TrackedKey, now_ns: int) -> int:
        """Return the time until the subject may retry, as this process last answered it."""
        tracked = self._tracked.get(key)
        return 0 if tracked is None else max(tracked.denied_until_ns - now_ns, 0)

    def is_block(self, key: TrackedKey) -> bool:
        """Return True if the last penalty that this process gave the subject is a block."""
        tracked = self._tracked.get(key)
        return tracked is not None and tracked.penalty is not None and tracked.penalty.blocked

    def note_cooldown(self, key: TrackedKey, asked_ns: int, left_ns: int) -> bool:
        """Remember the time left of a cool-down, as the store had it when it was asked.

        Returns True if this process did not know of a cool-down.
        """
        with self._lock:
            tracked = self._of(key)
            is_new = left_ns > 0 and tracked.barred_until_ns <= asked_ns
            if asked_ns >= tracked.looked_ns:  # no later answer came, and no penalty was given
                tracked.looked_ns = asked_ns
                tracked.barred_until_ns = asked_ns + left_ns
                if not left_ns:
                    tracked.penalty = None
            return is_new

    def note_denial(
        self, key: TrackedKey, counters: PenaltyCounters, now_ns: int, retry_after_ns: int
    ) -> bool:
        """Count a denial; return True if the subject is to be penalised.

        After True, the caller gives the penalty and calls `finish`.
        """
        settings = counters.settings
        with self._lock:
            tracked = self._of(key)
            waited = now_ns >= tracked.denied_until_ns
            tracked.denied_until_ns = now_ns + retry_after_ns
            no_room = tracked.barred_until_ns - now_ns > counters.all_cooldowns_ns
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

    def finish(self, key: TrackedKey) -> None:
        """Count denials of the subject again, after `note_denial` returned True."""
        with self._lock:
            if key in self._tracked:
                self._tracked[key].being_penalised = False

    def note_penalty(
        self, key: TrackedKey, counters: PenaltyCounters, level: int, spent: Decision, now_ns: int
    ) -> Penalty:
        """Remember a penalty that the store has `spent`."""
        blocked = level > counters.settings.block_after
        # The time until the bucket is full: it includes cool-downs that other nodes gave.
        until_ns = now_ns + spent.reset_after_ns
        penalty = Penalty(*key, level, penalty_s(counters.settings, level), blocked, until_ns)
        with self._lock:
            tracked = self._of(key)
            tracked.looked_ns, tracked.barred_until_ns = now_ns, until_ns
            tracked.penalty = penalty
        return penalty

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
        self.now_ns = clock.now_ns
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

    def are_clear(self, checks: Sequence[RuleCheck]) -> bool:
        """Return True if this process knows that no cool-down of these rules is in force."""
        barred, looks = self.standing(checks)
        return not (barred or looks)

    def standing(
        self, checks: Sequence[RuleCheck]
    ) -> tuple[dict[int, Decision], dict[int, Charge]]:
        """Return the denials by cool-downs, and the charges of those that are not known.

        Both are by the positions of the rules in `checks`.
        """
        denials: dict[int, Decision] = {}
        charges: dict[int, Charge] = {}
        counters_of = self.counters
        for at, check in enumerate(checks):
            counters = counters_of.get(check.rule.id)
            if counters is None:
                continue
            key, now_ns = _key(check), self.now_ns()
            left_ns = self.tracker.cooldown_ns(key, now_ns)
            if left_ns is None:
                charges[at] = (counters.cooldown, check.subject, 0)
            elif left_ns:
                limited_ns = self.tracker.denied_ns(key, now_ns)
                denials[at] = self._denial(check, counters, left_ns, limited_ns, now_ns)
        return denials, charges

    def learn(
        self, check: RuleCheck, look: Decision, limited_ns: int, asked_ns: int
    ) -> Decision | None:
        """Remember the `look` at a rule's cool-down; return its denial, None if there is none.

        The limits of the rule deny for `limited_ns`.
        """
        counters, left_ns = self.counters.get(check.rule.id), look.reset_after_ns
        self.tracker.note_cooldown(_key(check), asked_ns, left_ns)
        if counters is None or not left_ns:
            return None
        return self._denial(check, counters, left_ns, limited_ns, self.now_ns())

    def peeking(self, check: RuleCheck) -> Steps[Decision | None]:
        """Return the denial of a rule's cool-down as the store has it now. Raises StoreError."""
        counters = self.counters.get(check.rule.id)
        if counters is None or check.rule.mode != "enforce":
            return None
        asked_ns, limited_ns = self.now_ns(), 0
        look: Decision = yield Call(counters.cooldown.peek, check.subject, 0)
        if look.reset_after_ns:
            with suppress(StoreError, CapacityError):
                limits: Decision = yield Call(check.counter.peek, check.counted, check.units)
                limited_ns = limits.retry_after_ns
        return self.learn(check, look, limited_ns, asked_ns)

    def _denial(
        self,
        check: RuleCheck,
        counters: PenaltyCounters,
        left_ns: int,
        limited_ns: int,
        now_ns: int,
    ) -> Decision:
        is_block = left_ns > counters.all_cooldowns_ns or self.tracker.is_block(_key(check))
        wait_ns = max(left_ns, limited_ns)
        return Decision(
            allowed=False,
            policy=check.prepared.limits[0],
            remaining=0,
            retry_after_ns=wait_ns,
            reset_after_ns=wait_ns,
            rule=check.rule.id,
            decided_ns=now_ns,
            penalty="block" if is_block else "cooldown",
        )

    def penalise(self, checks: Sequence[RuleCheck], decision: Decision) -> Steps[None]:
        """Give a penalty if the subject of this denial has too often retried without waiting."""
        if decision.allowed or decision.degraded:
            return
        check = next((each for each in checks if each.rule.id == decision.rule), None)
        counters = None if check is None else self.counters.get(check.rule.id)
        if check is None or counters is None:
            return
        key, tracker = _key(check), self.tracker
        if tracker.note_denial(key, counters, self.now_ns(), decision.retry_after_ns):
            try:
                with suppress(StoreError):
                    yield from self._giving(check, counters)
            finally:
                tracker.finish(key)

    def _giving(self, check: RuleCheck, counters: PenaltyCounters) -> Steps[None]:
        key, subject, asked_ns = _key(check), check.subject, self.now_ns()
        look: Decision = yield Call(counters.cooldown.peek, subject, 0)
        if self.tracker.note_cooldown(key, asked_ns, look.reset_after_ns):
            return
        levels = counters.settings.block_after + 1
        step: Decision = yield Call(counters.level.check, subject, 1)
        level = levels - step.remaining if step.allowed else levels
        # The store denies this if other nodes have given penalties meanwhile, and left no room.
        seconds = penalty_s(counters.settings, level)
        spent: Decision = yield Call(counters.cooldown.check, subject, seconds)
        if spent.allowed:
            now_ns = self.now_ns()
            self._report(self.tracker.note_penalty(key, counters, level, spent, now_ns))

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
            shown_subject(penalty.subject),
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
        if counters is None:
            return False
        look: Decision = yield Call(counters.cooldown.peek, subject, 0)
        return look.reset_after_ns > 0


def _key(check: RuleCheck) -> TrackedKey:
    return check.rule.id, check.subject
