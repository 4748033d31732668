"""The table of regions: what is accepted, and errors that say what would be right."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from ratekeeper import ConfigError, Limit, Regions
from ratekeeper.regions.settings import across_of, regions_of, require_shares

STORES = {"eu": "redis://eu.internal", "us": "rediss://app:secret@us.internal/2"}


def test_regions_have_equal_shares_by_default() -> None:
    """The shares of all regions add up to 1 exactly."""
    regions = Regions("a", {name: f"redis://{name}" for name in "abc"})
    assert set(regions.fractions.values()) == {Fraction(1, 3)}
    assert regions.store == "redis://a"
    assert regions.others == ("b", "c")


def test_shares_are_exact_fractions() -> None:
    """A float is read as the simple fraction that it stands for."""
    regions = Regions("eu", STORES, {"eu": 0.4, "us": 0.6})
    assert regions.fractions == {"eu": Fraction(2, 5), "us": Fraction(3, 5)}
    stores = {name: f"redis://{name}" for name in "abc"}
    assert Regions("eu", STORES, {"eu": Fraction(2, 5), "us": 0.6}) == regions
    assert Regions("eu", STORES) != regions
    assert Regions("a", stores, dict.fromkeys("abc", 1 / 3)).fractions["a"] == Fraction(1, 3)


def test_passwords_are_not_shown() -> None:
    """The representation of the settings has no URI."""
    assert "secret" not in repr(Regions("eu", STORES))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"region": "jp"}, r"region='jp' is not in the table of regions, which has eu, us"),
        ({"region": None}, r"region=None is not in the table"),
        ({"stores": {}}, r"stores is not a table of regions"),
        ({"stores": ["redis://a"]}, r"stores is not a table of regions"),
        ({"stores": {"EU": "redis://a"}}, r"'EU' is not a name of up to 32 characters"),
        ({"stores": {"x" * 33: "redis://a"}}, r"is not a name of up to 32 characters"),
        ({"stores": {"eu": "memory://"}}, r"'eu' needs the URI of its Redis.*no known scheme"),
        ({"stores": {"eu": 7}}, r"'eu' needs the URI of its Redis.*must be text"),
        ({"stores": {**STORES, "jp": STORES["eu"]}}, r"'eu' and 'jp' have the same Redis"),
        ({"stores": {f"r{n}": f"redis://{n}" for n in range(17)}}, r"17 regions, and 16 are"),
        ({"shares": [0.5, 0.5]}, r"shares=\[0.5, 0.5\] is not a table"),
        ({"shares": {"eu": 1}}, r"no share for 'us'.*which are eu, us"),
        ({"shares": {"eu": 0.5, "us": 0.25, "jp": 0.25}}, r"no store for 'jp'"),
        ({"shares": {"eu": 0.5, "us": 0.6}}, r"1/2 \+ 3/5 is 11/10 \(about 1.1000\).*add up to 1"),
        ({"shares": {"eu": 1, "us": 0}}, r"the share of 'us' is 0, and a share is a number above"),
        ({"shares": {"eu": 1, "us": True}}, r"the share of 'us' is True"),
        ({"shares": {"eu": 1, "us": "0.1"}}, r"the share of 'us' is '0.1'"),
        ({"shares": {"eu": 1, "us": float("nan")}}, r"the share of 'us' is nan"),
        ({"shares": {"eu": 1, "us": 1e-9}}, r"below 1/10,000"),
    ],
)
def test_a_wrong_table_is_refused(arguments: dict[str, Any], says: str) -> None:
    """The error names the setting, the region and what would be right; never a password."""
    with pytest.raises(ConfigError, match=says) as caught:
        Regions(**{"region": "eu", "stores": STORES, **arguments})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda uri: regions_of({"eu": uri}),
        lambda uri: Regions("eu", {uri: "eu"}),
        lambda uri: Regions("eu", {"eu": uri + ":port"}),
    ],
)
def test_no_mistake_shows_a_password(mistake: Callable[[str], object]) -> None:
    """A table where Regions belong, and a table the other way round, have URIs."""
    with pytest.raises(ConfigError) as error:
        mistake("redis://app:hunter2@eu.internal")
    assert "hunter2" not in str(error.value)


def test_a_limiter_takes_nothing_but_regions() -> None:
    """The error of another argument shows a correct one."""
    assert regions_of(None) is None
    with pytest.raises(ConfigError, match=r"regions='eu' is not a Regions; for example Regions"):
        regions_of("eu")


@pytest.mark.parametrize(
    ("scope", "across", "consistency", "found"),
    [
        ("region", None, "strict", None),
        ("region", None, "leased", None),
        ("global", None, "strict", "eventual"),
        ("global", "eventual", "strict", "eventual"),
        ("global", "exact", "strict", "exact"),
    ],
)
def test_the_scope_of_a_limit(scope: str, across: str | None, consistency: Any, found: str) -> None:
    """A global limit is eventual unless it is said to be exact."""
    assert across_of(scope, across, consistency) == found


@pytest.mark.parametrize(
    ("scope", "across", "consistency", "says"),
    [
        ("planet", None, "strict", r"scope='planet' is not known; choose one of region, global"),
        (["global"], None, "strict", r"scope=\['global'\] is not known"),
        ("global", "strict", "strict", r"across_regions='strict' is not known.*exact, eventual"),
        (
            "region",
            "exact",
            "strict",
            r"no effect on a limit of one region; write scope=\"global\"",
        ),
        ("global", None, "leased", r"'leased' does not work with scope=\"global\".*every check"),
        ("global", "exact", "eventual", r"'eventual' does not work with scope=\"global\""),
    ],
)
def test_scopes_that_make_no_sense(scope: Any, across: Any, consistency: Any, says: str) -> None:
    """The error says which combination is wrong, and what would be right."""
    with pytest.raises(ConfigError, match=says):
        across_of(scope, across, consistency)


def test_an_exact_limit_has_a_unit_for_each_region() -> None:
    """A region whose share is less than one unit could never admit a request."""
    regions = Regions("eu", STORES, {"eu": 0.9, "us": 0.1})
    require_shares(regions, (Limit(10, per=60),), "rule api")
    says = r"rule api: a limit of 9 is less than one unit for the region 'us'.*1/10.*at least 10"
    with pytest.raises(ConfigError, match=says):
        require_shares(regions, (Limit(100, per=60), Limit(9, per=3600)), "rule api")
