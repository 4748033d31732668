"""The table of shares, and how it changes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tollkeeper.core.errors import ConfigError
from tollkeeper.regions.table import Membership, next_shares, parse_region, share_table

HALF = share_table(1, {"eu": 0.5, "us": 0.5})
NEXT = share_table(2, {"eu": 0.2, "us": 0.8})


def test_the_epoch_tells_tables_apart() -> None:
    """A later version is a later epoch, and two tables of one version are different epochs."""
    other = share_table(1, {"eu": 0.4, "us": 0.6})
    assert HALF.epoch != other.epoch
    assert max(HALF.epoch, other.epoch) < NEXT.epoch
    assert share_table(1, {"us": Fraction(1, 2), "eu": 0.5}) == HALF


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({"eu": 0.5, "us": 0.4}, "add up to 9/10"),
        ({}, "0 regions"),
        ({"EU": 1}, "not the name"),
        ({"eu": 1, "us": 0}, "above 0"),
    ],
)
def test_a_wrong_table_is_refused(shares: dict[str, float], says: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(ConfigError, match=says):
        share_table(2, shares)


def test_a_share_falls_at_once_and_rises_when_all_have_announced() -> None:
    """In between, shares add up to less than 1."""
    eu = next_shares("eu", HALF, None, {}, 0, (), first=True)
    us = next_shares("us", HALF, None, {}, 0, (), first=True)
    eu = next_shares("eu", NEXT, eu, {}, 1, ())
    us = next_shares("us", NEXT, us, {}, 1, ())
    assert (eu.share, us.share) == (Fraction(1, 5), Fraction(1, 2))
    us = next_shares("us", NEXT, us, {"eu": HALF.epoch}, 2, ())
    assert us.share == Fraction(1, 2)
    us = next_shares("us", NEXT, us, {"eu": NEXT.epoch}, 3, ())
    assert us[:4] == (NEXT.epoch, Fraction(4, 5), Fraction(1, 2), 3)


def test_the_first_start_and_an_empty_store() -> None:
    """The first start takes the share at once; a store that has lost its data rejoins."""
    first = Membership("us", HALF, ["eu"])
    assert first.plan({}, None, 5, ()).shares is None  # eu was not asked yet
    first.missed("eu")
    plan = first.plan({}, None, 5, ())
    assert plan.shares is not None
    assert (plan.shares.share, plan.shares.before) == (Fraction(1, 2), Fraction(1, 2))
    note = parse_region(plan.note)
    assert note.announced == {"us": HALF.epoch}
