"""Costs: what each rule charges for a plain cost, and for costs by unit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.costs import (
    Cost,
    checked_cost,
    merged_cost,
    settled_units,
    units_in,
    used_costs,
)
from ratekeeper.core.errors import InvalidCost

UNITS = st.sampled_from(["requests", "tokens", "micro_dollars"])
NUMBERS = st.integers(0, 1_000)
COSTS = st.one_of(NUMBERS, st.dictionaries(UNITS, NUMBERS))

# Cost, unit of the rule, its own cost, units that it charges.
CHARGES: list[tuple[Cost, str, int, int]] = [
    (3, "requests", 5, 15),
    (3, "tokens", 5, 15),
    ({}, "requests", 5, 5),
    ({}, "tokens", 5, 5),
    ({"requests": 3}, "requests", 5, 15),
    ({"requests": 3}, "tokens", 5, 15),
    ({"tokens": 80}, "requests", 5, 5),
    ({"tokens": 80}, "tokens", 5, 80),
    ({"requests": 3, "tokens": 80}, "micro_dollars", 5, 15),
    ({"tokens": 0}, "tokens", 5, 0),
    ({"requests": 0, "tokens": 80}, "micro_dollars", 5, 0),
]


@pytest.mark.parametrize(("cost", "unit", "weight", "units"), CHARGES)
def test_what_a_rule_charges(cost: Cost, unit: str, weight: int, units: int) -> None:
    """Units of its own are charged as given, and requests at its own cost."""
    assert units_in(cost, unit, weight) == units


@given(COSTS, UNITS, st.integers(1, 9))
def test_only_a_written_zero_is_free(cost: Cost, unit: str, weight: int) -> None:
    """No rule is passed uncounted because its unit was forgotten."""
    free = units_in(cost, unit, weight) == 0
    named = [cost] if isinstance(cost, int) else [cost.get(unit), cost.get("requests")]
    assert not free or 0 in named


@given(COSTS, COSTS, UNITS, st.integers(1, 9))
def test_a_settlement_is_what_a_check_of_the_merged_cost_charges(
    reserved: Cost, actual: Cost, unit: str, weight: int
) -> None:
    """For a rule whose unit is named in both, or by plain numbers."""
    merged = merged_cost(reserved, actual)
    settled = settled_units(units_in(reserved, unit, weight), actual, unit, weight)
    if isinstance(actual, int) or unit in actual:
        assert settled == units_in(merged, unit, weight)
    else:
        assert settled == units_in(reserved, unit, weight)


@pytest.mark.parametrize("cost", [-1, 1.5, True, "1", {"tokens": -1}, {"tokens": "9"}, {3: 1}])
def test_wrong_costs_are_rejected(cost: Any) -> None:
    """Each number is whole, and from 0 up; each name is text."""
    with pytest.raises(InvalidCost):
        checked_cost(cost, "cost")


@pytest.mark.parametrize(
    ("reserved", "units", "costs", "used"),
    [
        (9, 3, None, {"requests": 3}),
        (9, 0, {"requests": 3}, {"requests": 3}),
        ({"tokens": 9}, 3, None, {"tokens": 3}),
        ({"requests": 1, "tokens": 9}, 3, None, {"tokens": 3}),
        ({"requests": 9}, 3, None, {"requests": 3}),
        ({"a": 9, "b": 9}, 0, {"b": 3}, {"b": 3}),
    ],
)
def test_which_unit_was_used(reserved: Cost, units: int, costs: Any, used: Any) -> None:
    """A plain number is of the one unit that was reserved besides requests."""
    assert used_costs(reserved, units, costs, "use(…)") == used
