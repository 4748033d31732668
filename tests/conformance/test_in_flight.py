"""Requests in flight: every engine agrees with the reference, field by field.

Each trace has its own seed. A failure prints it, and `Trace(seed, …)` replays it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from ratekeeper.core.model import decision_fields
from ratekeeper.core.rates import parse_limits
from ratekeeper.decide.algorithms.in_flight import STAMP_MAX
from ratekeeper.decide.store import LocalStore
from ratekeeper.decide.stores.memory import PythonMemoryStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, StoreFactory, every_connection

STEPS = 120
EXAMPLES = 200
# Rules that count the same requests. Each of their other limits has a count of its own: a state
# that limits of different numbers share may end at different times in two stores.
RATES = (
    "3 at once for 2s",
    "3 at once for 2s; 5/second",
    "7 at once for 500ms; 100/3s; 9 in any second",
    "2 at once for 9s; 4/minute fixed_window",
)
SUBJECTS = ("a", "b")
STAMPS = (0, 0, 1, 2, 3, 4, 5, 6, 2**31, 2**52 + 1, STAMP_MAX)
VERBS = ("check",) * 5 + ("peek", "refund", "refund", "wait", "several")
SELDOM = ("reset", "owe", "grant", "rewind")
WAITS_NS = (10**6, 10**8, 5 * 10**8, 10**9, 3 * 10**9)


class Trace:
    """A random trace on a store and on the reference."""

    def __init__(self, seed: int, store: LocalStore, clock: SteppedClock, *, exact: bool) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = clock
        self.exact = exact
        self.stores = (PythonMemoryStore(clock), store)
        rule = f"rule {seed}"  # two traces in one store count apart
        self.pairs: list[list[Any]] = [
            [each.counter(parse_limits(rate), rule) for each in self.stores] for rate in RATES
        ]

    def run(self) -> None:
        for number in range(STEPS):
            verb = self.random.choice(VERBS if self.random.random() < 0.97 else SELDOM)
            stamp, subject = self.random.choice(STAMPS), self.random.choice(SUBJECTS)
            counters = self.random.choice(self.pairs)
            pair = [each.stamped(stamp) for each in counters]
            wanted, got = getattr(self, verb)(pair, subject, self.random.choice((0, 1, 1, 1, 2)))
            what = f"seed {self.seed}, step {number}: {verb} {stamp} {subject} of {RATES}"
            assert wanted == got, what
            for reference, tested in self.pairs:
                assert reference.peek(subject, 0) == tested.peek(subject, 0), f"after {what}"
        for reference, tested in self.pairs:
            for subject in SUBJECTS:
                self.reset([reference, tested], subject, 0)

    def wait(self, *_: object) -> tuple[None, None]:
        self.clock.advance_ns(self.random.choice(WAITS_NS))
        return None, None

    def rewind(self, *_: object) -> tuple[None, None]:
        self.clock.advance_ns(-(10**5))
        return None, None

    def check(self, pair: Sequence[Any], subject: str, cost: int) -> list[Any]:
        return [decision_fields(each.check(subject, cost)) for each in pair]

    def peek(self, pair: Sequence[Any], subject: str, cost: int) -> list[Any]:
        return [decision_fields(each.peek(subject, cost)) for each in pair]

    def refund(self, pair: Sequence[Any], subject: str, cost: int) -> list[Any]:
        charged_ns = self.random.choice((None, self.clock.now_ns()))
        return [each.refund(subject, cost, charged_ns) for each in pair]

    def grant(self, pair: Sequence[Any], subject: str, cost: int) -> list[Any]:
        return [each.grant(subject, cost, None) for each in pair]

    def reset(self, pair: Sequence[Any], subject: str, _: int) -> list[Any]:
        return [each.reset(subject) for each in pair]

    def owe(self, pair: Sequence[Any], subject: str, cost: int) -> list[Any]:
        if all(hasattr(each, "owe") for each in pair):
            return [each.owe(subject, cost) for each in pair]
        return [None, None]

    def several(self, _: object, subject: str, __: int) -> list[Any]:
        """Charge several in one step. Subjects of two slots of a cluster are not one step."""
        random = self.random
        drawn = [
            (
                random.randrange(len(RATES)),
                random.choice(STAMPS),
                random.choice(SUBJECTS) if self.exact else subject,
                random.choice((0, 1, 1, 2)),
            )
            for _ in range(random.randrange(1, 6))
        ]
        answers = [
            store.check_together(
                [(self.pairs[at][side].stamped(stamp), *rest) for at, stamp, *rest in drawn]
            )
            for side, store in enumerate(self.stores)
        ]
        if self.exact or all(answers[0]):
            return [[decision_fields(one) for one in each] for each in answers]
        # On Redis, a check that would pass says what remains before it, not before the request.
        return [all(each) for each in answers]


@every_connection
def test_every_engine_counts_requests_in_flight_as_the_reference(
    open_store: OpenStore, factory: StoreFactory, clock: SteppedClock
) -> None:
    """Checks alone and together, with costs, repeated stamps, refunds, waits and other limits."""
    with open_store(clock) as store:
        for seed in range(int(EXAMPLES * factory.examples)):
            Trace(seed, store, clock, exact=not factory.server).run()
