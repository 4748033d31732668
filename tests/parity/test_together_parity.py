"""Several charges in one step: the kernel decides as the Python store, and charges all or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import CapacityError, Limit, StoreError
from ratekeeper.core.model import UNIT_ALGORITHMS, decision_fields
from ratekeeper.decide.store import Answer, Charge, LocalCounter, LocalStore
from ratekeeper.decide.stores import open_local_store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.testing import ManualClock

SECOND_NS = 10**9
SUBJECTS = "xyz"

# Small numbers, so that charges of one call meet each other's units, and denials are frequent.
limits_drawn = st.builds(
    Limit,
    st.integers(1, 12),
    per=st.sampled_from((1, 7, 60)),
    algorithm=st.sampled_from(UNIT_ALGORITHMS),
)
# Limits of one rule: each counter of the rule has some of them, and their counts in common.
rules_drawn = st.lists(st.lists(limits_drawn, min_size=1, max_size=3), min_size=1, max_size=3)
subjects_drawn = st.sampled_from(SUBJECTS)


def counters_of(store: LocalStore, rules: Sequence[Sequence[Limit]]) -> list[LocalCounter]:
    """Return the counters of each rule: with all of its limits, and with the first alone."""
    counters: list[LocalCounter] = []
    for number, limits in enumerate(rules):
        named = [
            Limit(
                each.limit, per=each.window_ns / SECOND_NS, algorithm=each.algorithm, name=f"{at}"
            )
            for at, each in enumerate(limits)
        ]
        counters += [store.counter(some, f"rule-{number}") for some in (named, named[:1])]
    return counters


def essence(call: Callable[[], Sequence[Answer]]) -> Any:
    """Return every field of the answers, or the error that was raised."""
    try:
        answers = call()
    except CapacityError as error:
        return "can never fit", error.cost, error.limit
    return [
        str(each) if isinstance(each, StoreError) else decision_fields(each) for each in answers
    ]


@contextmanager
def opened(kind: str, clock: ManualClock, room: str) -> Iterator[LocalStore]:
    """Open a store on the kernel with so much room."""
    with TemporaryDirectory() as folder:
        uri = "memory://" if kind == "memory" else f"shared://{folder}/limits"
        store = open_local_store(f"{uri}?{room}", clock)
        yield store
        store.close()


kinds = pytest.mark.parametrize("kind", ["memory", "shared"])


def checks_of(data: st.DataObject, counters: Sequence[LocalCounter]) -> list[tuple[int, str, int]]:
    """Draw the checks of one call: the number of a counter, a subject and a cost."""
    each = st.tuples(st.integers(0, len(counters) - 1), subjects_drawn, st.integers(0, 6))
    return data.draw(st.lists(each, min_size=1, max_size=12), "checks")


def bound(counters: Sequence[LocalCounter], checks: Sequence[tuple[int, str, int]]) -> list[Charge]:
    return [(counters[number], subject, cost) for number, subject, cost in checks]


@kinds
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), rules=rules_drawn)
def test_the_kernel_decides_as_the_python_store(
    kind: str, data: st.DataObject, rules: list[list[Limit]]
) -> None:
    """Field for field: mixed algorithms, costs, grants, debts, the same subject several times."""
    clock = ManualClock(start=1_700_000_000)
    with opened(kind, clock, "capacity=2000&log_bytes=100000") as kernel:
        compare((PythonMemoryStore(clock), kernel), clock, data, rules)


def compare(
    stores: Sequence[LocalStore], clock: ManualClock, data: st.DataObject, rules: list[list[Limit]]
) -> None:
    engines = [counters_of(store, rules) for store in stores]
    numbers = st.integers(0, len(engines[0]) - 1)
    for _ in range(data.draw(st.integers(1, 8), "calls")):
        clock.advance_ns(data.draw(st.sampled_from((0, 1, SECOND_NS // 3, 7 * SECOND_NS)), "pause"))
        if data.draw(st.booleans(), "grant"):
            number, subject, units = data.draw(
                st.tuples(numbers, subjects_drawn, st.integers(1, 9))
            )
            ttl_ns = data.draw(st.sampled_from((None, SECOND_NS)))
            for counters in engines:
                counters[number].grant(subject, units, ttl_ns)
        if data.draw(st.booleans(), "owe"):
            number, subject, units = data.draw(
                st.tuples(numbers, subjects_drawn, st.integers(1, 30))
            )
            for counters in engines:
                counter: Any = counters[number]  # no public verb yet
                counter.owe(subject, units)
        checks = checks_of(data, engines[0])
        python, kernel = (
            essence(lambda: store.check_together(bound(counters, checks)))  # noqa: B023 - called here
            for store, counters in zip(stores, engines, strict=True)
        )
        assert kernel == python
        python, kernel = (
            essence(
                lambda: [each.peek(subject, 0) for each in counters for subject in SUBJECTS]  # noqa: B023 - called here
            )
            for counters in engines
        )
        assert kernel == python


@kinds
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), rules=rules_drawn, states=st.integers(1, 6))
def test_a_charge_without_room_charges_nothing_or_is_left_out(
    kind: str, data: st.DataObject, rules: list[list[Limit]], states: int
) -> None:
    """In a full table and a full slab of logs, the units that remain prove what was charged.

    Every limit of a subject loses the units of all charges that were made in it, or none.
    """
    clock = ManualClock(start=1_700_000_000)
    with opened(kind, clock, f"capacity={states}&log_bytes=256") as store:
        conserve(store, data, rules)


def conserve(store: LocalStore, data: st.DataObject, rules: list[list[Limit]]) -> None:
    counters = counters_of(store, [*rules, [Limit(50, per=60)]])
    singles = {
        (number // 2, limit.name): store.counter([limit], f"rule-{number // 2}")
        for number, counter in enumerate(counters)
        for limit in counter.limits
    }
    for _ in range(6):
        checks = checks_of(data, counters)
        optional = data.draw(st.sets(st.integers(0, len(checks) - 1)), "optional")
        before = {
            (at, subject): counter.peek(subject, 0).remaining
            for at, counter in singles.items()
            for subject in SUBJECTS
        }
        try:
            answers = store.check_together(bound(counters, checks), optional)
        except CapacityError:
            answers = []
        failed = {at for at, each in enumerate(answers) if isinstance(each, StoreError)}
        charged = bool(answers) and all(answers) and failed <= optional
        for at, (number, subject, cost) in enumerate(checks):
            if charged and at not in failed:
                for limit in counters[number].limits:
                    before[(number // 2, limit.name), subject] -= cost
        for (at, subject), remaining in before.items():
            assert singles[at].peek(subject, 0).remaining == remaining
