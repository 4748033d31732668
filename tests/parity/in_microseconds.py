"""Redis and the reference side by side, on a clock of whole microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

from ratekeeper.core.model import DECISION_FIELDS, AlgorithmName, Limit
from ratekeeper.decide.algorithms import ALGORITHMS, LeasingAlgorithm, Outcome, State
from ratekeeper.decide.store import LocalStore
from ratekeeper.testing import ManualClock
from tests.parity.reference import ReferenceCounter, States, answer
from tests.parity.traces import Step

NS_PER_US = 1_000
# Before 2096, so that every wait at the end of a trace fits into the range of all stores.
NOW_NS_MAX = 3_480_000_000 * 10**9
RETRY, RESET = (DECISION_FIELDS.index(f"{name}_after_ns") for name in ("retry", "reset"))


def up_to_us(nanoseconds: int) -> int:
    """Return a time rounded up to a whole microsecond."""
    return -(-nanoseconds // NS_PER_US) * NS_PER_US


class _WaitsInMicroseconds:
    """An algorithm for a clock of whole microseconds. A client that retries a part of a microsecond
    early is denied again, so waits are rounded up. The delay of a leaky bucket is not, because no
    check follows it."""

    def __init__(self, algorithm: LeasingAlgorithm) -> None:
        self._algorithm = algorithm
        self.refund = algorithm.refund
        self.owe = algorithm.owe
        self.debt_of = algorithm.debt_of

    def decide(self, state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
        assert now_ns % NS_PER_US == 0
        after, outcome = self._algorithm.decide(state, limit, now_ns, cost)
        return after, outcome._replace(
            retry_after_ns=up_to_us(outcome.retry_after_ns),
            reset_after_ns=up_to_us(outcome.reset_after_ns),
        )


ALGORITHMS_US: dict[AlgorithmName, Any] = {
    name: _WaitsInMicroseconds(algorithm) for name, algorithm in ALGORITHMS.items()
}


class Moments:
    """Moves steps of a trace to the exact microsecond at which a wait or a grant ends."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._ends_ns: list[int] = []
        self._offset_ns = 0

    def timed(self, step: Step) -> Step:
        """Return the step at its time, or sometimes at the end of a wait or a microsecond
        before."""
        now_ns = max(step.now_ns, 0) // NS_PER_US * NS_PER_US + self._offset_ns
        if self._ends_ns and self._random.random() < 0.15:
            end_ns = self._random.choice(self._ends_ns) - self._random.choice((0, 0, NS_PER_US))
            if now_ns <= end_ns < NOW_NS_MAX:
                self._offset_ns += end_ns - now_ns
                now_ns = end_ns
        return replace(step, now_ns=now_ns)

    def note(self, step: Step, answered: tuple[Any, ...] | None) -> None:
        """Remember the end of the waits of an answer, and of a grant."""
        waits_ns = [step.ttl_ns or 0] if step.verb == "grant" else []
        if answered is not None and step.verb != "owe" and answered[0] != "can never fit":
            waits_ns += [answered[RETRY], answered[RESET]]
        self._ends_ns += [step.now_ns + up_to_us(wait_ns) for wait_ns in waits_ns if wait_ns]
        del self._ends_ns[:-8]  # only the latest ones still matter


class Pair:
    """The limits of one rule on Redis and on the reference. Both get the same calls."""

    def __init__(
        self, store: LocalStore, clock: ManualClock, limits: tuple[Limit, ...], rule: str = ""
    ) -> None:
        self._store, self._clock, self._rule = store, clock, rule
        self._states: States = {}
        self._ever: dict[str, Limit] = {}
        self.change(limits)

    def change(self, limits: tuple[Limit, ...]) -> None:
        """Change the limits of the rule. Spent units stay."""
        self.limits = limits
        self._ever.update((limit.identity, limit) for limit in limits)
        self.counter = self._store.counter(limits, self._rule)
        self.reference = ReferenceCounter(self._states, limits, self._rule, ALGORITHMS_US)

    def forget(self, subjects: Iterable[str]) -> None:
        """Reset the subjects on Redis, under every limit that was ever used."""
        counter = self._store.counter(tuple(self._ever.values()), self._rule)
        for subject in subjects:
            counter.reset(subject)

    def apply(self, step: Step) -> tuple[Any, Any]:
        """Apply the step to both at its microsecond; return both answers."""
        verb, subject, units = step.verb, step.subject, step.units
        now_ns = step.now_ns
        self._clock.advance_ns(now_ns - self._clock.now_ns())
        if verb in ("check", "peek"):
            spend = verb == "check"
            return (
                answer(self.counter.check if spend else self.counter.peek, subject, units),
                answer(self.reference.check, subject, units, now_ns, spend=spend),
            )
        if verb == "refund":
            charged_ns = self.reference.charged_ns(step.charge)
            self.counter.refund(subject, units, charged_ns)
            self.reference.refund(subject, units, charged_ns, now_ns)
        elif verb == "owe":
            got = self.counter.owe(subject, units), self.counter.owed(subject)
            wanted = self.reference.owe(subject, units, now_ns)
            return got, (wanted, self.reference.owed(subject, now_ns))
        elif verb == "grant":
            ttl_ns = None if step.ttl_ns is None else up_to_us(step.ttl_ns)
            self.counter.grant(subject, units, ttl_ns)
            self.reference.grant(subject, units, ttl_ns, now_ns)
        elif verb == "reset":
            self.counter.reset(subject)
            self.reference.reset(subject)
        return None, None
