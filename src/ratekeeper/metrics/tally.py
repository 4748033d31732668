"""The counters of a rule engine: plain fields and dictionaries.

A check and its rules are counted apart. A check that three rules apply to is one check (Tally) and
three decisions of rules (RuleCounts).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ratekeeper.core.errors import StoreError, StoreFull, StoreTimeout
from ratekeeper.core.forks import fork_safe
from ratekeeper.decide.store import CompiledCounts

_ERRORS: Final = {StoreTimeout: "timeout", StoreFull: "full"}


# The shortest time over which the rate of a subject is measured.
RATE_SECONDS: Final = 30.0
# One check in so many is sampled: at 100 checks a second, a subject has 47 samples. It is a prime
# number, so that clients which take turns are all sampled.
RATE_SAMPLE_EVERY: Final = 61
SUBJECTS_MAX: Final = 128
# Subjects whose rates are reported to the other workers of the machine.
RATES_MAX: Final = 16
# Slots of one process that are counted as in use: 20 MB.
SLOTS_MAX: Final = 100_000


class SubjectRates:
    """The checks per second of the busiest subjects, from a sample of the checks.

    The samples of a period go into a space-saving sketch of SUBJECTS_MAX names: a new name replaces
    the one with the fewest samples and inherits its count. So every subject with clearly more than
    1 / SUBJECTS_MAX of all checks is in the sketch. A check is sampled once for each of its
    subjects, however many rules count it.
    """

    __slots__ = ("_began_s", "_rates", "_samples", "lock")

    def __init__(self) -> None:
        self._samples: dict[str, int] = {}
        self._began_s: float | None = None
        self._rates: dict[str, float] = {}
        self.lock = fork_safe(threading.Lock())

    def sample(self, subjects: Iterable[str]) -> None:
        """Note the subjects of a check that is sampled."""
        with self.lock:
            samples = self._samples
            for subject in dict.fromkeys(subjects):
                if subject not in samples and len(samples) == SUBJECTS_MAX:
                    fewest = min(samples, key=samples.__getitem__)
                    samples[subject] = samples.pop(fewest)
                samples[subject] = samples.get(subject, 0) + 1

    def rates(self, now_s: float) -> Mapping[str, float]:
        """Return the rates in the last whole period, and begin the next one if it is time.

        A name that replaced another in the full sketch inherited its count. That part is left out,
        so that many rare subjects do not look like a busy one.
        """
        with self.lock:
            if self._began_s is None:  # it is not known when the samples began
                self._samples, self._began_s = {}, now_s
            taken_s = now_s - self._began_s
            if taken_s >= RATE_SECONDS:
                found = sorted(self._samples.items(), key=lambda item: -item[1])
                inherited = found[-1][1] if len(found) == SUBJECTS_MAX else 0
                self._rates = {
                    subject: (samples - inherited) * RATE_SAMPLE_EVERY / taken_s
                    for subject, samples in found[:RATES_MAX]
                    if samples > inherited
                }
                self._samples, self._began_s = {}, now_s
            return self._rates


@dataclass(slots=True)
class RuleCounts:
    """The decisions of a rule in this process. Counted without a lock, so slightly inexact."""

    allowed: int = 0
    denied: int = 0
    """Denied by a limit."""
    penalty_denied: int = 0
    """Denied by a cool-down or a block."""
    shadow_denied: int = 0
    failed: int = 0
    """Checks that the store could not decide. The next fields say how they were answered."""
    local_allowed: int = 0
    local_denied: int = 0
    """Answered by the counts of this machine."""
    policy_allowed: int = 0
    policy_denied: int = 0
    """Answered because the rule's failure policy is open or closed."""
    raised: int = 0
    """Not answered: the error was raised to the caller."""
    cooldowns: int = 0
    blocks: int = 0
    """Penalties that this process gave."""
    settled: int = 0
    """Units that settlements have charged above what was reserved."""
    forgiven: int = 0
    """Units that they have not charged, because a limit owed as much as it may."""
    renewals_failed: int = 0
    """Slots that were not renewed: their requests go on without one."""


class SlotsInUse:
    """The slots that requests of this process have of limits of requests in flight.

    One is in use until it is freed, or until its longest time has passed.
    """

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        # By rule and stamp; the one that ends first is usually in front.
        self._until_s: dict[tuple[str, int], float] = {}

    def note(self, rule: str, stamp: int, lasts_s: float) -> None:
        """Note that a slot was taken, or renewed."""
        self._until_s.pop((rule, stamp), None)
        if len(self._until_s) >= SLOTS_MAX:
            self._until_s.pop(next(iter(self._until_s)), None)
        self._until_s[rule, stamp] = time.monotonic() + lasts_s

    def drop(self, rule: str, stamp: int) -> None:
        """Note that a slot was freed."""
        self._until_s.pop((rule, stamp), None)

    def by_rule(self) -> dict[str, int]:
        """Return how many slots are in use, for each rule that has taken any."""
        now_s = time.monotonic()
        found: dict[str, int] = {}
        for key, until_s in list(self._until_s.items()):
            if until_s <= now_s:
                self._until_s.pop(key, None)
            found[key[0]] = found.get(key[0], 0) + (until_s > now_s)
        return found


@dataclass(slots=True)
class Tally:
    """The checks of this process, each counted once. Counted without a lock, as RuleCounts are."""

    allowed: int = 0
    """Checks that limits allowed."""
    denied: int = 0
    """Checks that a limit or a penalty denied."""
    unavailable: int = 0
    """Checks that were denied because the store failed and a rule is `on_failure: closed`."""
    raised: int = 0
    """Checks without a decision: the error of the store was raised to the caller."""
    degraded: int = 0
    """Checks that the store did not decide alone: a failure policy took part, or raised."""
    subjects: SubjectRates = field(default_factory=SubjectRates)
    unruled: dict[str, int] = field(default_factory=dict)
    """Checks without a limit, by reason: unlimited, exempt or blocked."""
    slots: SlotsInUse = field(default_factory=SlotsInUse)
    errors: dict[str, int] = field(default_factory=dict)
    """Checks that the store could not decide: timeout, unavailable or full."""

    def failed(self, error: StoreError) -> None:
        """Count an error of the store by its kind."""
        note_error(self.errors, error)


def note_error(errors: dict[str, int], error: StoreError) -> None:
    """Count an error of the store by its kind: timeout, full or unavailable."""
    kind = next((name for of, name in _ERRORS.items() if isinstance(error, of)), "unavailable")
    errors[kind] = errors.get(kind, 0) + 1


# No rule has this id.
REQUESTS: Final = ""


class Counts:
    """Everything that a limiter has counted in this process: its checks, and those of each rule.

    Compiled checks count in `compiled`: requests under REQUESTS, and each rule under its id. The
    rest is counted in `by_rule` and `tally`.
    """

    __slots__ = ("by_rule", "compiled", "tally")

    def __init__(self) -> None:
        self.by_rule: dict[str, RuleCounts] = {}
        self.tally = Tally()
        self.compiled: dict[str, CompiledCounts] = {}

    def of_rules(self) -> dict[str, RuleCounts]:
        """Return the counts of each rule, with those of compiled checks."""
        found = dict(self.by_rule)
        for rule, counted in list(self.compiled.items()):
            if rule != REQUESTS:
                own = found.get(rule) or RuleCounts()
                found[rule] = replace(
                    own, allowed=own.allowed + counted.allowed, denied=own.denied + counted.denied
                )
        return found

    def of_checks(self) -> Tally:
        """Return the counts of checks, with those of compiled checks."""
        tally, counted = self.tally, self.compiled.get(REQUESTS)
        if counted is None:
            return tally
        allowed, denied = tally.allowed + counted.allowed, tally.denied + counted.denied
        return replace(tally, allowed=allowed, denied=denied)

    def of(self, rule: str) -> RuleCounts:
        """Return the counts of a rule."""
        counts = self.by_rule.get(rule)
        return self.by_rule.setdefault(rule, RuleCounts()) if counts is None else counts

    def keep(self, rules: Container[str]) -> None:
        """Forget all other rules, so that their number is bounded by the document."""
        for counts in (self.by_rule, self.compiled):
            for rule in [each for each in counts if each and each not in rules]:
                del counts[rule]
