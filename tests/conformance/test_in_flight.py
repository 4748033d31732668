"""Requests in flight: every engine agrees with the reference, field by field.

Each trace has its own seed. A failure prints it, and `trace(seed, …)` replays it alone.
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
WAITS_NS = (10**6, 10**8, 5 * 10**8, 10**9, 3 * 10**9)


def essence(answers: Sequence[Any], *, exact: bool) -> list[Any]:
    """Return the fields of answers to one request, or if not `exact`, none if it was denied.

    On Redis, a check that would pass says what remains before it, not before the request; in a
    cluster, those of another slot say what remains without the request.
    """
    if exact or all(answers):
        return [decision_fields(each) for each in answers]
    return []


def trace(seed: int, store: LocalStore, clock: SteppedClock, *, exact: bool) -> None:
    """Run one trace on a store and on the reference."""
    random = Random(seed)
    model = PythonMemoryStore(clock)
    # Two traces in one store count apart.
    rule = f"rule {seed}"
    pairs: list[tuple[Any, Any]] = [
        (model.counter(parse_limits(rate), rule), store.counter(parse_limits(rate), rule))
        for rate in RATES
    ]
    for number in range(STEPS):
        verb = random.choice(("check",) * 5 + ("peek", "refund", "refund", "wait", "several"))
        if random.random() < 0.03:
            verb = random.choice(("reset", "owe", "grant", "rewind"))
        wanted, got = pair = [
            each.stamped(stamp)
            for stamp in [random.choice(STAMPS)]
            for each in random.choice(pairs)
        ]
        subject, cost = random.choice(SUBJECTS), random.choice((0, 1, 1, 1, 2))
        answers: list[Any] = [None, None]
        if verb == "wait":
            clock.advance_ns(random.choice(WAITS_NS))
        elif verb == "rewind":
            clock.advance_ns(-3 * 10**8)
        elif verb in {"check", "peek"}:
            answers = [decision_fields(getattr(each, verb)(subject, cost)) for each in pair]
        elif verb == "refund":
            charged_ns = random.choice((None, clock.now_ns()))
            for each in pair:
                each.refund(subject, cost, charged_ns)
        elif verb == "several":
            drawn = [
                (
                    random.randrange(len(pairs)),
                    # A cluster returns what it charged to a denied request, but shortens no slot.
                    random.choice(STAMPS) if exact else random.randrange(9, STAMP_MAX),
                    random.choice(SUBJECTS),
                    random.choice((0, 1, 1, 2)),
                )
                for _ in range(random.randrange(1, 6))
            ]
            answers = [
                essence(
                    owner.check_together(
                        [(pairs[at][side].stamped(stamp), *rest) for at, stamp, *rest in drawn]
                    ),
                    exact=exact,
                )
                for side, owner in enumerate((model, store))
            ]
        elif verb == "grant":
            wanted.grant(subject, cost, None)
            got.grant(subject, cost, None)
        elif verb == "reset":
            wanted.reset(subject)
            got.reset(subject)
        elif hasattr(got, "owe"):
            wanted.owe(subject, cost)
            got.owe(subject, cost)
        what = f"seed {seed}, step {number}: {verb} {wanted.stamp} {subject} {cost}"
        assert answers[0] == answers[1], f"{what} of {wanted.limits}"
        for reference, tested in pairs:
            looks = [each.peek(subject, 0) for each in (reference, tested)]
            assert looks[0] == looks[1], f"after {what} of {wanted.limits}: {reference.limits}"
    for reference, tested in pairs:
        for subject in SUBJECTS:
            reference.reset(subject)
            tested.reset(subject)


@every_connection
def test_every_engine_counts_requests_in_flight_as_the_reference(
    open_store: OpenStore, factory: StoreFactory, clock: SteppedClock
) -> None:
    """Checks alone and together, with costs, repeated stamps, refunds, waits and other limits."""
    with open_store(clock) as store:
        for seed in range(int(EXAMPLES * factory.examples)):
            trace(seed, store, clock, exact=not factory.server)
