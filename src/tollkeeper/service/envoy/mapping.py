"""What Envoy asks, as requests that rules are for.

Envoy describes a request by descriptors: lists of keys and values, in a domain. Each descriptor
becomes one Request.

    domain: shop                                    Request(
    [remote_address: 192.0.2.7, path: /v1/orders,     ip="192.0.2.7", endpoint="/v1/orders",
     plan: gold, x-region: eu]                        attributes={"domain": "shop", "plan": "gold",
                                                                  "x_region": "eu"})

**Fields.** A key that is spelled like a field of a Request fills it: `user`, `api_key` (also
`api-key`, `ApiKey`), `ip`, `tenant`, `tier`, `endpoint`, `method`; and so do the names that Envoy
has for them: `remote_address`, `masked_remote_address`, `path`, `:path`, `:method`.

**Attributes.** Any other key is an attribute, what a name cannot have written as `_`. The domain is
the attribute `domain`. A key that comes again gets a number, so that no two values are mixed up:
`generic_key`, `generic_key_2`. So does one that would fill a field that is filled already.

**Values** come from clients, and no client may get past the limits by sending what cannot be
counted: an error is for Envoy a reason to let the request pass. So a value that is long, or not
text, is counted by its digest.

**Costs.** A descriptor costs its own `hits_addend`, else the request's, else 1. Its own 0 spends
nothing: it asks whether there is room for 1. With `is_negative_hits` the units are given back. One
that Envoy sends when the response is over (`apply_on_stream_done`) comes too late to be denied, and
a denial costs nothing; with an entry of the key SETTLE it is never denied, and spends what fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import REQUEST_FIELDS, UNITS_MAX, WINDOW_NS_MAX, Limit, Request
from tollkeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR
from tollkeeper.rules.matching.patterns import address_of
from tollkeeper.web.addresses import counted_address

if TYPE_CHECKING:
    from tollkeeper.service.envoy.protocol.messages import RateLimitDescriptor, RateLimitRequest

# The key of an entry that is for us and not for rules, whatever its value.
SETTLE: Final = "tollkeeper.settle"

DESCRIPTORS_MAX: Final = 100
ENTRIES_MAX: Final = 64
KEY_NAME_LENGTH_MAX: Final = 128
# A longer value is counted by its digest; a key may have KEY_LENGTH_MAX in all.
VALUE_LENGTH_MAX: Final = 256
NAMES_MAX: Final = 1_024
_DIGEST_BYTES: Final = 16
_DIGEST_LENGTH: Final = 1 + 2 * _DIGEST_BYTES

_DAY_NS: Final = 86_400 * NS_PER_SECOND
# Envoy's numbers of units. A month is 30 days and a year 365, as in rates.
UNIT_NS: Final = {
    1: NS_PER_SECOND,
    2: 60 * NS_PER_SECOND,
    3: 3_600 * NS_PER_SECOND,
    4: _DAY_NS,
    5: 30 * _DAY_NS,
    6: 365 * _DAY_NS,
}

_FIELDS: Final = {
    **{name.replace("_", ""): name for name in REQUEST_FIELDS},
    "remoteaddress": "ip",
    "maskedremoteaddress": "ip",
    "path": "endpoint",
}
_NOT_OF_NAMES: Final = re.compile(r"[^A-Za-z0-9_]")
# For each key that was seen: the field that it may fill, and its name as an attribute.
_names: dict[str, tuple[str | None, str]] = {}


class Override(NamedTuple):
    """A limit that a descriptor brings along, in place of the rules'."""

    units: int
    window_ns: int

    @property
    def limit(self) -> Limit | None:
        """The limit; None where it lets nothing pass."""
        return Limit(self.units, per=self.window_ns / NS_PER_SECOND) if self.units else None


class Asked(NamedTuple):
    """One descriptor: whom it is about, for how much, and under which limit."""

    request: Request
    units: int = 1
    """To spend; 0: only look; below 0: give back."""
    override: Override | None = None
    settles: bool = False
    """Spend as much as fits, and do not deny: the request is over."""
    scope: Mapping[str, str] | None = None
    """What the caller's token is confined to."""

    @property
    def spends(self) -> bool:
        """Whether it is charged, all of it or nothing."""
        return self.units > 0 and not self.settles


def asked_of(message: RateLimitRequest) -> list[Asked]:
    """What a message asks for, in its order. Raises ConfigError for what no Envoy sends."""
    domain = message.domain
    if not 1 <= len(domain) <= VALUE_LENGTH_MAX:
        raise ConfigError(
            f"domain={show(domain)} is not text of 1 to {VALUE_LENGTH_MAX} characters; "
            f"give the rate limit filter one, for example domain: shop"
        )
    domain = countable(domain)
    descriptors = message.descriptors
    if not 1 <= len(descriptors) <= DESCRIPTORS_MAX:
        raise ConfigError(
            f"a request has 1 to {DESCRIPTORS_MAX} descriptors, and this has {len(descriptors)}"
        )
    units = message.hits_addend or 1
    return [_asked(domain, descriptor, units) for descriptor in descriptors]


def _asked(domain: str, descriptor: RateLimitDescriptor, units: int) -> Asked:
    entries = []
    settles = False
    for each in descriptor.entries:
        key = each.key
        if key == SETTLE:
            settles = True
        else:
            entries.append((key, each.value))
    return Asked(
        request_of(domain, entries),
        _units_of(descriptor, units),
        _override_of(descriptor) if descriptor.HasField("limit") else None,
        settles,
    )


def _units_of(descriptor: RateLimitDescriptor, units: int) -> int:
    if descriptor.HasField("hits_addend"):
        units = descriptor.hits_addend.value
    # One more than any limit holds is as much as any other number that can never fit.
    units = min(units, UNITS_MAX + 1)
    return -units if descriptor.is_negative_hits else units


def _override_of(descriptor: RateLimitDescriptor) -> Override:
    limit = descriptor.limit
    times = limit.unit_multiplier.value if limit.HasField("unit_multiplier") else 1
    window_ns = UNIT_NS.get(limit.unit, 0) * times
    if not 0 < window_ns <= WINDOW_NS_MAX or limit.requests_per_unit > UNITS_MAX:
        raise ConfigError(
            f"a descriptor's limit of {limit.requests_per_unit} per {times} × unit {limit.unit} is "
            f"none: at most {UNITS_MAX:,} requests, per SECOND (1) to YEAR (6), in all 366 days"
        )
    return Override(limit.requests_per_unit, window_ns)


def request_of(domain: str, entries: Sequence[tuple[str | bytes, str | bytes]]) -> Request:
    """The request that a descriptor stands for.

    >>> request_of("shop", [("generic_key", "slow"), ("method", "GET"), ("generic_key", "b")])
    ... # doctest: +NORMALIZE_WHITESPACE
    Request(user=None, api_key=None, ip=None, tenant=None, tier=None, endpoint=None, method='GET',
            attributes={'domain': 'shop', 'generic_key': 'slow', 'generic_key_2': 'b'})

    Raises ConfigError for a descriptor without entries, with too many, or with a key that is none.
    """
    fields: dict[str, str] = {}
    attributes = {"domain": domain}
    if not 1 <= len(entries) <= ENTRIES_MAX:
        raise ConfigError(
            f"a descriptor has 1 to {ENTRIES_MAX} entries, and this has {len(entries)}"
        )
    for key, value in entries:
        field, name = _names.get(key) or _name_of(key)  # type: ignore[arg-type]  # bytes: not found
        if field is not None and field not in fields:
            # A path may be long: rules match all of it, and count it by a digest themselves.
            text = _text(value) if field == "endpoint" else countable(value)
            fields[field] = _address(text) if field == "ip" else text
        else:
            attributes[_free(name, attributes)] = countable(value)
    return Request(**fields, attributes=attributes)


def _name_of(key: str | bytes) -> tuple[str | None, str]:
    if not isinstance(key, str) or not 1 <= len(key) <= KEY_NAME_LENGTH_MAX:
        raise ConfigError(
            f"{show(key)} is not a key of a descriptor: text of 1 to {KEY_NAME_LENGTH_MAX} "
            f"characters, for example remote_address"
        )
    name = _NOT_OF_NAMES.sub("_", key)
    if name[0].isdigit():
        name = f"_{name}"
    found = _FIELDS.get(name.replace("_", "").lower()), name
    if len(_names) >= NAMES_MAX:
        _names.clear()
    _names[key] = found
    return found


def _free(name: str, attributes: dict[str, str]) -> str:
    # The name of a field cannot be that of an attribute, in rules.
    if name not in attributes and name not in REQUEST_FIELDS:
        return name
    number = 2
    while f"{name}_{number}" in attributes:
        number += 1
    return f"{name}_{number}"


def countable(value: str | bytes) -> str:
    """The value, or its digest where it could not be part of a key.

    >>> countable("sk_1"), countable("x" * 1000)
    ('sk_1', '#c9b2bd4ff487864c29fb41fab3e8187e')
    """
    if not isinstance(value, str) or len(value) > VALUE_LENGTH_MAX or not value.isprintable():
        return _digest(value)
    # Whoever sends somebody's digest must not be counted with him.
    return _digest(value) if len(value) == _DIGEST_LENGTH and value[0] == "#" else value


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _digest(value: str | bytes) -> str:
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return "#" + blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()


def _address(text: str) -> str:
    """An address as it is counted; a masked one (`192.0.2.0/24`) by its first address."""
    start = text.partition("/")[0]
    # What is no address stays whole: a mask would be all that tells it from others.
    return text if address_of(start) is None else counted_address(start)


def everything_of(request: Request) -> tuple[str, ...]:
    """A key of all that is known of a request: what a descriptor's own limit is counted by."""
    known = [
        (name, value) for name in REQUEST_FIELDS if (value := getattr(request, name)) is not None
    ]
    parts = [f"{name}:{value}" for name, value in (*known, *sorted(request.attributes.items()))]
    length = sum(map(len, parts)) + len(parts)
    fits = len(parts) <= PARTS_MAX and length <= KEY_LENGTH_MAX
    if fits and not any(SEPARATOR in part for part in parts):
        return tuple(parts)
    # Lengths too, so that where one part ends and the next begins cannot be moved.
    return (_digest("".join(f"{len(part)},{part}" for part in parts)),)
