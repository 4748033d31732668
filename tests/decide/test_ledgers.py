"""The levels of a limit that several members share."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.model import MICROS_PER_UNIT, UNIT_ALGORITHMS, AlgorithmName, Limit
from ratekeeper.decide.ledgers import exact_room, ledger_of, load, outcome

SECOND = 1_000_000_000
START = 1_800_000_000 * SECOND
FIFTH = Fraction(1, 5)

Step = tuple[int, int, int, int]  # nanoseconds until then; units to add to known and own; to move
steps = st.lists(
    st.tuples(
        st.integers(0, 20 * SECOND), st.integers(0, 40), st.integers(0, 20), st.integers(0, 20)
    ),
    max_size=12,
)


@given(algorithm=st.sampled_from(UNIT_ALGORITHMS), taken=steps, cost=st.integers(1, 20))
def test_a_denied_cost_fits_after_its_wait(
    algorithm: AlgorithmName, taken: list[Step], cost: int
) -> None:
    """`retry_after` turns out true if nothing is added meanwhile."""
    ledger = ledger_of(Limit(100, per=60, algorithm=algorithm))
    now_ns = START
    for wait_ns, known, own, last in taken:
        now_ns += wait_ns
        ledger.add(now_ns, FIFTH, known * MICROS_PER_UNIT, own * MICROS_PER_UNIT)
        ledger.move(now_ns, FIFTH, last * MICROS_PER_UNIT)
    now_load, room = load(ledger, now_ns, FIFTH), exact_room(ledger, now_ns, FIFTH)
    found = outcome(ledger, now_ns, FIFTH, now_load, cost, room, charged=False)
    if not found.allowed:
        assert exact_room(ledger, now_ns + found.retry_after_ns, FIFTH) >= cost
    whole_ns = now_ns + ledger.wait_ns(now_ns, FIFTH, 0, now_load)
    assert load(ledger, whole_ns, FIFTH) == 0


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_numbers_are_all_that_a_ledger_has(algorithm: AlgorithmName) -> None:
    """A ledger with the numbers of another is the same; units that are given back are gone."""
    limit = Limit(100, per=60, algorithm=algorithm)
    ledger, copy = ledger_of(limit), ledger_of(limit)
    ledger.add(START, FIFTH, 30 * MICROS_PER_UNIT, 10 * MICROS_PER_UNIT)
    copy.numbers = ledger.numbers
    assert copy.levels(START, FIFTH) == (30 * MICROS_PER_UNIT, 10 * MICROS_PER_UNIT)
    copy.give_back(START, FIFTH, 50 * MICROS_PER_UNIT, 4 * MICROS_PER_UNIT)
    assert copy.levels(START, FIFTH) == (0, 6 * MICROS_PER_UNIT)
