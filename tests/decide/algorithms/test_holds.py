"""Holds, row by row."""

from __future__ import annotations

import pytest

from ratekeeper import Limit
from ratekeeper.decide.algorithms.holds import (
    LEASE_NS_MAX,
    Holds,
    given_back,
    lease_ns_max,
    live,
    with_lease,
)

SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("holds", "units", "until_ns", "after"),
    [
        ((), 5, 10, ((5, 10),)),
        (((5, 10),), 3, 20, ((5, 10), (3, 20))),
        (((5, 10),), 3, 10, ((8, 10),)),
        (((5, 10), (3, 20)), 2, 30, ((5, 10), (5, 30))),
        (((5, 10), (3, 20)), 2, 15, ((5, 10), (5, 20))),
        (((5, 10), (3, 20)), 2, 7, ((7, 10), (3, 20))),
    ],
)
def test_leases_add_up_in_two_groups(holds: Holds, units: int, until_ns: int, after: Holds) -> None:
    """A lease that ends no later than the first group joins it; any other joins the second."""
    assert with_lease(holds, units, until_ns) == after


@pytest.mark.parametrize(
    ("units", "until_ns", "after"),
    [
        (2, 10, (((3, 10), (3, 20)), 2)),
        (5, 9, (((3, 20),), 5)),
        (7, 10, (((3, 20),), 5)),
        (3, 11, (((5, 10),), 3)),
        (1, 21, (((5, 10), (3, 20)), 0)),
    ],
)
def test_units_leave_the_group_that_they_are_in(
    units: int, until_ns: int, after: tuple[Holds, int]
) -> None:
    """And no other group, even if more are given back than it has."""
    assert given_back(((5, 10), (3, 20)), units, until_ns) == after


def test_a_hold_ends_at_its_time() -> None:
    """At that very time it does not hold any more."""
    assert live(((5, 10), (3, 20)), 9) == ((5, 10), (3, 20))
    assert live(((5, 10), (3, 20)), 10) == ((3, 20),)
    assert live(((5, 10), (3, 20)), 20) == ()


@pytest.mark.parametrize(
    ("limit", "lasts_ns"),
    [
        (Limit(100, per=60), LEASE_NS_MAX),
        (Limit(100, per=10), SECOND_NS),
        (Limit(100, per=10, capacity=50), SECOND_NS // 2),
        (Limit(3, per=1, capacity=1), 33_333_000),
        (Limit(5, per=1, algorithm="fixed_window"), SECOND_NS // 10),
    ],
)
def test_a_lease_lasts_at_most_a_tenth_of_a_limit(limit: Limit, lasts_ns: int) -> None:
    """In whole microseconds, rounded down."""
    assert lease_ns_max(limit) == lasts_ns
