"""The settings of a node in one of several regions that share global limits.

Each region has its own Redis. All nodes of all regions have the same table of regions, and each
node knows its own region.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal, cast

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import Consistency, Limits
from ratekeeper.core.rates import scaled
from ratekeeper.decide.regional import REGIONS_MAX, AcrossRegions
from ratekeeper.decide.store import require_strict_across
from ratekeeper.decide.stores.redis.config import RedisConfig
from ratekeeper.decide.stores.redis.config import parse as parse_redis

Scope = Literal["region", "global"]
"""Where a limit counts: in the region of the node, or in all regions."""

SCOPES: Final[tuple[Scope, ...]] = ("region", "global")
ACROSS_REGIONS: Final[tuple[AcrossRegions, ...]] = ("exact", "eventual")
# A share is a fraction with at most this denominator.
SHARE_PARTS_MAX: Final = 10_000
REGION_NAME: Final = re.compile(r"[a-z0-9-]{1,32}")
_EXAMPLE: Final = (
    'for example Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"})'
)


@dataclass(frozen=True, slots=True)
class Regions:
    """The regions that share global limits, and the region of this node.

    >>> regions = Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"})
    >>> regions.fractions["eu"]
    Fraction(1, 2)

    `region`  the name of this node's region: one of `stores`.
    `stores`  the URI of each region's Redis or Cluster, by the name of the region. A name has up
              to 32 characters of a-z, 0-9 and "-". The table is the same in all regions; at most
              16 have a share.
    `shares`  the share of each region in limits that are exact, for example {"eu": 0.4, "us": 0.6}.
              They add up to 1. By default all regions have the same share.
    `sync`    False: this process counts, and leaves the exchange with other regions to the other
              processes of its region. For commands and other processes that end soon.
    """

    region: str
    stores: Mapping[str, str] = field(repr=False)  # URIs may have passwords
    shares: Mapping[str, float | Fraction] | None = field(default=None, compare=False)
    sync: bool = field(default=True, compare=False)
    fractions: Mapping[str, Fraction] = field(init=False, repr=False)
    """The share of each region; they add up to 1."""

    def __post_init__(self) -> None:
        stores = _checked_stores(self.stores)
        object.__setattr__(self, "stores", MappingProxyType(stores))
        if not isinstance(self.region, str) or self.region not in stores:
            raise ConfigError(
                f"region={show(self.region)} is not in the table of regions, which has "
                f"{', '.join(stores)}; {_EXAMPLE}"
            )
        fractions = _equal(stores) if self.shares is None else _checked_shares(self.shares, stores)
        object.__setattr__(self, "fractions", MappingProxyType(fractions))

    @property
    def store(self) -> str:
        """The URI of this region's store."""
        return self.stores[self.region]

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the other regions, sorted."""
        return tuple(sorted(self.stores.keys() - {self.region}))


def _checked_stores(stores: object) -> dict[str, str]:
    if not isinstance(stores, Mapping) or not stores:
        raise ConfigError(
            f"stores is not a table of regions and the URIs of their Redis; {_EXAMPLE}"
        )
    if len(stores) > REGIONS_MAX:
        raise ConfigError(f"stores has {len(stores)} regions, and {REGIONS_MAX} are the most")
    known: dict[RedisConfig, str] = {}
    for name, uri in stores.items():
        if not isinstance(name, str) or REGION_NAME.fullmatch(name) is None:
            raise ConfigError(
                f"stores: the region {_shown(name)} is not a name of up to 32 characters of a-z, "
                f'0-9 and "-"; for example "eu" or "us-east-1"'
            )
        try:
            config = parse_redis(uri)
        except ConfigError as error:
            raise ConfigError(
                f"stores: the region {name!r} needs the URI of its Redis, for example "
                f'"redis://{name}.internal": {error}'
            ) from None
        if config in known:
            raise ConfigError(
                f"stores: the regions {known[config]!r} and {name!r} have the same Redis "
                f"({config.shown()}); each region has its own"
            )
        known[config] = name
    return dict(stores)


def _shown(value: object) -> str:
    """Return a value for an error message. URIs may have passwords."""
    return "(a URI)" if "://" in str(value) else show(value)


def _equal(stores: Mapping[str, str]) -> dict[str, Fraction]:
    return dict.fromkeys(stores, Fraction(1, len(stores)))


def _checked_shares(shares: object, stores: Mapping[str, str]) -> dict[str, Fraction]:
    if not isinstance(shares, Mapping):
        raise ConfigError(
            f"shares={show(shares)} is not a table of regions and shares; "
            f'for example {{"eu": 0.4, "us": 0.6}}'
        )
    unknown = sorted(map(str, shares.keys() - stores.keys()))
    missing = sorted(stores.keys() - shares.keys())
    if unknown or missing:
        wrong = (
            f"has no store for {unknown[0]!r}" if unknown else f"has no share for {missing[0]!r}"
        )
        raise ConfigError(
            f"shares: the table {wrong}; shares has exactly the regions of stores, which are "
            f"{', '.join(sorted(stores))}"
        )
    fractions = {name: share_of(name, shares[name]) for name in stores}
    total = sum(fractions.values())
    if total != 1:
        raise ConfigError(
            f"shares: {' + '.join(map(str, fractions.values()))} is {total} (about "
            f"{float(total):.4f}), and shares add up to 1; omit shares for equal ones"
        )
    return fractions


def share_of(region: str, share: object) -> Fraction:
    """Return the share of a region as an exact fraction. Raises ConfigError.

    >>> share_of("eu", 0.4), share_of("us", 1 / 3)
    (Fraction(2, 5), Fraction(1, 3))
    """
    is_number = isinstance(share, int | float | Fraction) and not isinstance(share, bool)
    number = cast("float | Fraction", share)
    if not is_number or not 0 < number <= 1:
        raise ConfigError(
            f"shares: the share of {region!r} is {show(share)}, and a share is a number above 0, "
            f"up to 1; for example 0.4"
        )
    found = Fraction(number).limit_denominator(SHARE_PARTS_MAX)
    if not found:
        raise ConfigError(
            f"shares: the share of {region!r} is {show(share)}, which is below "
            f"1/{SHARE_PARTS_MAX:,}; remove the region, or give it more"
        )
    return found


def regions_of(regions: object) -> Regions | None:
    """Return the argument of a limiter. Raises ConfigError for anything but Regions or None."""
    if regions is None or isinstance(regions, Regions):
        return regions
    raise ConfigError(f"regions={_shown(regions)} is not a Regions; {_EXAMPLE}")


def across_of(
    scope: object, across_regions: object, consistency: Consistency
) -> AcrossRegions | None:
    """Return how regions share a limit; None for a limit of one region. Raises ConfigError."""
    if scope not in SCOPES:
        raise ConfigError(f"scope={show(scope)} is not known; choose one of {', '.join(SCOPES)}")
    if across_regions is not None and across_regions not in ACROSS_REGIONS:
        raise ConfigError(
            f"across_regions={show(across_regions)} is not known; choose one of "
            f"{', '.join(ACROSS_REGIONS)}"
        )
    if scope == "region":
        if across_regions is not None:
            raise ConfigError(
                f"across_regions={across_regions!r} has no effect on a limit of one region; "
                f'write scope="global" too, or omit it'
            )
        return None
    across: AcrossRegions = "exact" if across_regions == "exact" else "eventual"
    require_strict_across(consistency, across)
    return across


def limits_of_region(
    limits: Limits, across: AcrossRegions | None, regions: Regions | None
) -> Limits:
    """Return this region's share of global limits, for a node that cannot reach its store."""
    if across is None or regions is None:
        return limits
    return scaled(limits, regions.fractions[regions.region])


def require_shares(regions: Regions, limits: Limits, what: str) -> None:
    """Raise ConfigError if a region's share of an exact limit is less than one unit."""
    name, least = min(regions.fractions.items(), key=lambda each: each[1])
    for limit in limits:
        if limit.capacity * least < 1:
            raise ConfigError(
                f"{what}: a limit of {limit.capacity} is less than one unit for the region "
                f"{name!r}, whose share is {least}; write across_regions: eventual, or a limit of "
                f"at least {-(-1 // least)}"
            )
