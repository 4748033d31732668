"""Costs: what a request spends, as a plain number or by unit.

A rule counts one unit: requests (by default), tokens, micro-dollars, or any other name. Every rule
also has a `weight`: what one request costs it, the rule's own `cost`.

- A plain cost of 3 is three requests. It costs each rule three times its weight, whatever the
  rule's unit is.
- Costs by unit, `{"requests": 1, "tokens": 1_200}`, name the units themselves. A rule that counts
  tokens charges 1,200. The requests, 1 if they are not named, cost every other rule its weight.

So a rule whose unit a caller forgets still counts the request at its own `cost`: no request passes
a rule uncounted, unless the caller writes a 0. Money is whole micro-dollars: a sum of floats would
be a different limit on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ratekeeper.core.errors import InvalidCost, show
from ratekeeper.core.model import units_of

REQUESTS: Final = "requests"
"""The unit of a rule that names none."""

Costs = Mapping[str, int]
"""Units by name: `{"requests": 1, "tokens": 1_200}`."""
Cost = int | Costs
"""What a request spends: a number of requests, or costs by unit."""


def checked_cost(cost: Cost, what: str) -> Cost:
    """Return a cost whose numbers are whole and not negative. Raises InvalidCost."""
    if isinstance(cost, int) or not isinstance(cost, Mapping):  # the first test is the faster one
        return units_of(cost, what)
    for unit, units in cost.items():
        if not isinstance(unit, str):
            raise InvalidCost(
                f'{show(unit)} is not the name of a unit; for example {{"tokens": 9}}'
            )
        units_of(units, f"{what} of {unit}")
    return cost


def units_in(cost: Cost, unit: str, weight: int) -> int:
    """Return the units that a cost charges to a rule.

    >>> units_in(3, "tokens", 2), units_in({"tokens": 1_200}, "tokens", 2)
    (6, 1200)
    >>> units_in({"tokens": 1_200}, "requests", 2), units_in({"requests": 3}, "micro_dollars", 2)
    (2, 6)
    """
    if isinstance(cost, int):
        return cost * weight
    if unit != REQUESTS and unit in cost:
        return cost[unit]
    return cost.get(REQUESTS, 1) * weight


def settled_units(charged: int, actual: Cost, unit: str, weight: int) -> int:
    """Return the units that a rule has charged in the end. A unit that is not named stays as it is.

    >>> settled_units(1_200, {"tokens": 800}, "tokens", 1), settled_units(1, {"tokens": 8}, "x", 1)
    (800, 1)
    """
    return units_in(actual, unit, weight) if isinstance(actual, int) or unit in actual else charged


def merged_cost(charged: Cost, actual: Cost) -> Cost:
    """Return what a request has cost in the end. A unit that is not named stays as it is.

    >>> merged_cost({"requests": 1, "tokens": 1_200}, {"tokens": 800})
    {'requests': 1, 'tokens': 800}
    """
    if isinstance(actual, int):
        return actual
    return {**({REQUESTS: charged} if isinstance(charged, int) else charged), **actual}


def largest_in(cost: Cost) -> int:
    """Return the most units of a cost: with fewer left of every limit, it may not fit."""
    return max([*cost.values(), 1]) if isinstance(cost, Mapping) else cost


def requests_in(cost: Cost) -> int:
    """Return the requests of a cost."""
    return cost if isinstance(cost, int) else cost.get(REQUESTS, 1)


def check_settlement(reserved: Cost, actual: Cost) -> None:
    """Raise InvalidCost if it is unclear which units `actual` means; 0 means all of them."""
    if isinstance(actual, int) and actual and not isinstance(reserved, int):
        raise InvalidCost(
            f"actual={actual} does not say which unit it counts; write costs as they were "
            f"reserved, for example actual={{{show(unit_used(reserved) or 'tokens')}: {actual}}}"
        )


def unit_used(reserved: Cost) -> str:
    """Return the unit that a plain number of used units means; empty if there are several.

    >>> unit_used(1), unit_used({"requests": 1, "tokens": 9}), unit_used({"a": 1, "b": 1})
    ('requests', 'tokens', '')
    """
    if isinstance(reserved, int):
        return REQUESTS
    late = [unit for unit in reserved if unit != REQUESTS] or [REQUESTS]
    return late[0] if len(late) == 1 else ""


def used_costs(reserved: Cost, units: int, costs: Costs | None, example: str) -> Costs:
    """Return what was used, by unit: `costs`, or a plain number of the one unit that is reserved.

    Raises InvalidCost for units that are not reserved, and for a plain number of several.
    """
    known = {REQUESTS: 0} if isinstance(reserved, int) else reserved
    if costs is None:
        unit = unit_used(reserved)
        if not unit:
            raise InvalidCost(
                f"{units_of(units, 'units')} of which unit? These were reserved: "
                f"{', '.join(known)}; for example {example}"
            )
        return {unit: units_of(units, "units")}
    checked_cost(costs, "costs")
    for unit in costs:
        if unit not in known:
            raise InvalidCost(
                f"no {show(unit)} were reserved, only {', '.join(known)}; reserve them too, "
                f"0 if nothing is known"
            )
    return costs
