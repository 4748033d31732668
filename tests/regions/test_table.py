"""The table of shares, and how it changes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tollkeeper.core.errors import ConfigError
from tollkeeper.regions.table import (
    Membership,
    next_shares,
    parse_region,
    share_table,
    shares_with,
    shares_without,
)

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


def test_a_region_is_added_and_removed_in_proportion() -> None:
    """Shares always add up to 1, also after many changes, with allowed denominators."""
    shares = {"eu": Fraction(1, 3), "us": Fraction(2, 3)}
    for number, share in enumerate((Fraction(1, 7), Fraction(3, 11), Fraction(9, 97), None)):
        shares = shares_with(shares, f"r{number}", share)
        share_table(1, shares)
    for number in (2, 0, 3, 1):
        shares = shares_without(shares, f"r{number}")
        share_table(1, shares)
    assert abs(shares["eu"] - Fraction(1, 3)) < Fraction(1, 1_000)


def test_a_region_is_added_once_and_the_last_one_stays() -> None:
    """The errors name the regions that have a share."""
    with pytest.raises(ConfigError, match="has the share 1/2 already"):
        shares_with(dict(HALF.shares), "us", None)
    with pytest.raises(ConfigError, match="eu, us have one"):
        shares_without(dict(HALF.shares), "mars")
    with pytest.raises(ConfigError, match="only region"):
        shares_without({"eu": Fraction(1)}, "eu")
    with pytest.raises(ConfigError, match="leaves nothing"):
        shares_with({"eu": Fraction(1)}, "us", Fraction(1))
