"""Envoy's descriptors as requests that rules can match.

Envoy describes a request by descriptors: lists of keys and values, in a domain. Each descriptor
becomes one Request.

    domain: shop                                    Request(
    [remote_address: 192.0.2.7, path: /v1/orders,     ip="192.0.2.7", endpoint="/v1/orders",
     plan: gold, x-region: eu]                        attributes={"domain": "shop", "plan": "gold",
                                                        "x_region": "eu", "descriptor_keys":
                                                        "remote_address,path,plan,x-region"})

**Fields.** A key that is spelled like a field of a Request fills the field: `user`, `api_key` (also
`api-key`, `ApiKey`), `ip`, `tenant`, `tier`, `endpoint`, `method`. So do Envoy's names for them:
`remote_address`, `masked_remote_address`, `path`, `:path`, `:method`.

**Attributes.** Any other key is an attribute; characters that a name cannot have become `_`. The
domain is the attribute `domain`. A repeated key gets a number, so that no two values are mixed up:
`generic_key`, `generic_key_2`. So does a key whose field is already filled.

**Keys.** Envoy may describe one request by the descriptors [ip] and [ip, path]. A rule that matches
the first matches the second too, because it tests only the attributes that it names. So the
attribute `descriptor_keys` has all keys of the descriptor, in order and separated by commas. A rule
with `descriptor_keys: remote_address` matches the first alone.

**Values** come from clients. A client must not evade its limits with a value that cannot be
counted: after an error, Envoy lets the request pass. So a value that is long or not text is counted
by its digest. Rules and lists match the value itself.

**Costs.** A descriptor costs its own `hits_addend`, or else the request's, or else 1. Its own 0
spends nothing and checks whether there is room for 1. With `is_negative_hits` the units are
returned. With an entry of the key UNIT, the units are those of its value, such as `tokens`, and
rules of other units count nothing.

A descriptor that Envoy sends after the response (`apply_on_stream_done`) comes too late to be
denied, and a denial would cost nothing. With an entry of the key SETTLE it is never denied, and
spends as much as fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.costs import REQUESTS
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import REQUEST_FIELDS, UNITS_MAX, WINDOW_NS_MAX, Limit, Request
from ratekeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, SEPARATOR
from ratekeeper.rules.matching.patterns import address_of
from ratekeeper.web.addresses import counted_address

if TYPE_CHECKING:
    from ratekeeper.service.envoy.protocol.messages import RateLimitDescriptor, RateLimitRequest

# Entries with these keys are instructions to the service; rules do not see them.
SETTLE: Final = "ratekeeper.settle"
UNIT: Final = "ratekeeper.unit"
# The attributes that no entry fills.
DOMAIN: Final = "domain"
DESCRIPTOR_KEYS: Final = "descriptor_keys"

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
# For each known key: the field that it may fill, and its name as an attribute.
_names: dict[str, tuple[str | None, str]] = {}


class DescriptorLimit(NamedTuple):
    """The limit of a descriptor, which replaces the rules."""

    units: int
    window_ns: int

    @property
    def limit(self) -> Limit | None:
        """The limit; None if no request passes."""
        return Limit(self.units, per=self.window_ns / NS_PER_SECOND) if self.units else None


class DescriptorCheck(NamedTuple):
    """One descriptor: the request, the units, and its own limit."""

    request: Request
    units: int = 1
    """Units to spend; 0: only peek; below 0: return them."""
    override: DescriptorLimit | None = None
    settles: bool = False
    """Spend as much as fits and do not deny: the request has ended."""
    scope: Mapping[str, str] | None = None
    """The scope of the caller's token."""
    unit: str = ""
    """What `units` count; empty: requests."""

    @property
    def requests(self) -> int:
        """The requests that it counts."""
        return self.units if self.unit in {"", REQUESTS} else 0

    @property
    def spends(self) -> bool:
        """True if the check charges all of its units or nothing."""
        return self.units > 0 and not self.settles


def checks_of(message: RateLimitRequest) -> list[DescriptorCheck]:
    """Return the checks of a message, in order. Raises ConfigError for an invalid message."""
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
            f"a request has 1 to {DESCRIPTORS_MAX} descriptors, and this one has {len(descriptors)}"
        )
    units = message.hits_addend or 1
    return [_check_of(domain, descriptor, units) for descriptor in descriptors]


def _check_of(domain: str, descriptor: RateLimitDescriptor, units: int) -> DescriptorCheck:
    entries = []
    settles = False
    unit = ""
    for each in descriptor.entries:
        key = each.key
        if key == SETTLE:
            settles = True
        elif key == UNIT:
            unit = _text(each.value)
        else:
            entries.append((key, each.value))
    return DescriptorCheck(
        request_of(domain, entries),
        _units_of(descriptor, units),
        _override_of(descriptor) if descriptor.HasField("limit") else None,
        settles,
        None,
        unit,
    )


def _units_of(descriptor: RateLimitDescriptor, units: int) -> int:
    if descriptor.HasField("hits_addend"):
        units = descriptor.hits_addend.value
    # More than any limit can hold never fits, whatever the number.
    units = min(units, UNITS_MAX + 1)
    return -units if descriptor.is_negative_hits else units


def _override_of(descriptor: RateLimitDescriptor) -> DescriptorLimit:
    limit = descriptor.limit
    times = limit.unit_multiplier.value if limit.HasField("unit_multiplier") else 1
    window_ns = UNIT_NS.get(limit.unit, 0) * times
    if not 0 < window_ns <= WINDOW_NS_MAX or limit.requests_per_unit > UNITS_MAX:
        raise ConfigError(
            f"a descriptor's limit of {limit.requests_per_unit} per {times} × unit {limit.unit} is "
            f"invalid; at most {UNITS_MAX:,} requests, per SECOND (1) to YEAR (6), in all 366 days"
        )
    return DescriptorLimit(limit.requests_per_unit, window_ns)


def request_of(domain: str, entries: Sequence[tuple[str | bytes, str | bytes]]) -> Request:
    """Return the request that a descriptor describes.

    >>> request_of("shop", [("generic_key", "slow"), ("method", "GET"), ("generic_key", "b")])
    ... # doctest: +NORMALIZE_WHITESPACE
    Request(user=None, api_key=None, ip=None, tenant=None, tier=None, endpoint=None, method='GET',
            attributes={'domain': 'shop', 'descriptor_keys': 'generic_key,method,generic_key',
                        'generic_key': 'slow', 'generic_key_2': 'b'})

    Raises ConfigError for a descriptor without entries, with too many, or with an invalid key.
    """
    fields: dict[str, str] = {}
    attributes = {DOMAIN: domain, DESCRIPTOR_KEYS: ""}
    digests: dict[str, str] = {}
    if not 1 <= len(entries) <= ENTRIES_MAX:
        raise ConfigError(
            f"a descriptor has 1 to {ENTRIES_MAX} entries, and this one has {len(entries)}"
        )
    for key, value in entries:
        field, name = _names.get(key) or _name_of(key)  # type: ignore[arg-type]  # bytes: not found
        if field is not None and field not in fields:
            # A path may be long: rules match all of it and count it by a digest.
            text = _text(value) if field == "endpoint" else countable(value)
            fields[field] = _address(text) if field == "ip" else text
        else:
            text = attributes[_free(name, attributes)] = countable(value)
        if text is not value:
            digests[text] = _text(value)
    # All keys are text now: `_name_of` rejects others.
    keys = ",".join([key for key, _ in entries])  # type: ignore[misc]  # see above
    attributes[DESCRIPTOR_KEYS] = counted_keys = countable(keys)
    if counted_keys is not keys:
        digests[counted_keys] = keys
    return Request(**fields, attributes=attributes, digests=digests or None)


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
    # In rules, an attribute cannot have the name of a field.
    if name not in attributes and name not in REQUEST_FIELDS:
        return name
    number = 2
    while f"{name}_{number}" in attributes:
        number += 1
    return f"{name}_{number}"


def countable(value: str | bytes) -> str:
    """Return the value, or its digest if it cannot be part of a key.

    >>> countable("sk_1"), countable("x" * 1000)
    ('sk_1', '#c9b2bd4ff487864c29fb41fab3e8187e')
    """
    if not isinstance(value, str) or len(value) > VALUE_LENGTH_MAX or not value.isprintable():
        return _digest(value)
    # A client that sends another value's digest must not share its counter.
    return _digest(value) if len(value) == _DIGEST_LENGTH and value[0] == "#" else value


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _digest(value: str | bytes) -> str:
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return "#" + blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()


def _address(text: str) -> str:
    """Return an address as it is counted; a masked one (`192.0.2.0/24`) by its first address."""
    start = text.partition("/")[0]
    # Any other text stays whole: the part after the slash may be the only difference.
    return text if address_of(start) is None else counted_address(start)


def everything_of(request: Request) -> tuple[str, ...]:
    """Return a key of all entries of a descriptor; a descriptor limit is counted by it."""
    known = [
        (name, value) for name in REQUEST_FIELDS if (value := getattr(request, name)) is not None
    ]
    others = [each for each in sorted(request.attributes.items()) if each[0] != DESCRIPTOR_KEYS]
    parts = [f"{name}:{value}" for name, value in (*known, *others)]
    length = sum(map(len, parts)) + len(parts)
    fits = len(parts) <= PARTS_MAX and length <= KEY_LENGTH_MAX
    if fits and not any(SEPARATOR in part for part in parts):
        return tuple(parts)
    # With lengths, so that no two lists of parts give the same text.
    return (_digest("".join(f"{len(part)},{part}" for part in parts)),)
