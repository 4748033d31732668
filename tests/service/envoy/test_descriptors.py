"""Descriptors as requests, costs and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limiter, Request
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import UNITS_MAX
from ratekeeper.core.rates import parse_limit
from ratekeeper.core.subjects import subject_of, subject_of_request
from ratekeeper.service.envoy.descriptors import (
    DESCRIPTORS_MAX,
    ENTRIES_MAX,
    KEY_NAME_LENGTH_MAX,
    NAMES_MAX,
    UNIT_NS,
    VALUE_LENGTH_MAX,
    DescriptorCheck,
    DescriptorLimit,
    _names,
    checks_of,
    countable,
    everything_of,
    request_of,
)
from ratekeeper.service.envoy.protocol.messages import RateLimitRequest

SHOP = {"domain": "shop"}


def without_keys(request: Request) -> Request:
    """Return the request without the attribute that has the keys of all entries."""
    rest = {name: each for name, each in request.attributes.items() if name != "descriptor_keys"}
    return replace(request, attributes=rest)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("user", "42")], Request(user="42", attributes=SHOP)),
        ([("api_key", "sk_1")], Request(api_key="sk_1", attributes=SHOP)),
        ([("api-key", "sk_1")], Request(api_key="sk_1", attributes=SHOP)),
        ([("ApiKey", "sk_1")], Request(api_key="sk_1", attributes=SHOP)),
        ([("tenant", "a"), ("tier", "pro")], Request(tenant="a", tier="pro", attributes=SHOP)),
        ([(":path", "/a?b=1"), (":method", "GET")],
         Request(endpoint="/a?b=1", method="GET", attributes=SHOP)),
        ([("path", "/a"), ("method", "GET")],
         Request(endpoint="/a", method="GET", attributes=SHOP)),
        ([("endpoint", "/a")], Request(endpoint="/a", attributes=SHOP)),
        ([("remote_address", "192.0.2.7")], Request(ip="192.0.2.7", attributes=SHOP)),
        ([("remote_address", "2001:db8:1:2:3::4")], Request(ip="2001:db8:1:2::", attributes=SHOP)),
        ([("remote_address", "::1")], Request(ip="::1", attributes=SHOP)),
        ([("remote_address", "::ffff:192.0.2.7")], Request(ip="192.0.2.7", attributes=SHOP)),
        ([("masked_remote_address", "192.0.2.0/24")], Request(ip="192.0.2.0", attributes=SHOP)),
        ([("masked_remote_address", "2001:db8::/48")], Request(ip="2001:db8::", attributes=SHOP)),
        ([("ip", "not an address")], Request(ip="not an address", attributes=SHOP)),
        ([("generic_key", "slow")], Request(attributes={**SHOP, "generic_key": "slow"})),
        ([("x-region", "eu")], Request(attributes={**SHOP, "x_region": "eu"})),
        ([(":authority", "a.b")], Request(attributes={**SHOP, "_authority": "a.b"})),
        ([("7up", "x")], Request(attributes={**SHOP, "_7up": "x"})),
        ([("größe", "x")], Request(attributes={**SHOP, "gr__e": "x"})),
        ([("k", "")], Request(attributes={**SHOP, "k": ""})),
    ],
)  # fmt: skip
def test_a_key_is_a_field_or_an_attribute(
    entries: list[tuple[str, str]], expected: Request
) -> None:
    """Keys that name a field fill it, also by Envoy's names; all others are attributes."""
    assert without_keys(request_of("shop", entries)) == expected


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("k", "a"), ("k", "b"), ("k", "c")],
         Request(attributes={**SHOP, "k": "a", "k_2": "b", "k_3": "c"})),
        ([("k_2", "a"), ("k", "b"), ("k", "c")],
         Request(attributes={**SHOP, "k_2": "a", "k": "b", "k_3": "c"})),
        ([("a-b", "1"), ("a.b", "2")], Request(attributes={**SHOP, "a_b": "1", "a_b_2": "2"})),
        ([("domain", "x")], Request(attributes={**SHOP, "domain_2": "x"})),
        ([("user", "a"), ("user", "b")], Request(user="a", attributes={**SHOP, "user_2": "b"})),
        ([("ip", "192.0.2.7"), ("remote_address", "192.0.2.8")],
         Request(ip="192.0.2.7", attributes={**SHOP, "remote_address": "192.0.2.8"})),
    ],
)  # fmt: skip
def test_a_repeated_key_gets_a_number(entries: list[tuple[str, str]], expected: Request) -> None:
    """No value is lost or joined to another."""
    assert without_keys(request_of("shop", entries)) == expected


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("remote_address", "192.0.2.7")], "remote_address"),
        ([("remote_address", "192.0.2.7"), (":path", "/a")], "remote_address,:path"),
        ([(":path", "/a"), ("remote_address", "192.0.2.7")], ":path,remote_address"),
        ([("k", "a"), ("k", "b")], "k,k"),
        ([("descriptor_keys", "x")], "descriptor_keys"),
    ],
)
def test_descriptor_keys_has_all_keys_in_order(
    entries: list[tuple[str, str]], expected: str
) -> None:
    """A client's value never replaces it: an entry of that name gets a number."""
    request = request_of("shop", entries)
    assert request.attributes["descriptor_keys"] == expected
    if entries == [("descriptor_keys", "x")]:
        assert request.attributes["descriptor_keys_2"] == "x"


def test_a_rule_can_match_one_of_two_descriptors() -> None:
    """[remote_address] is counted, and [remote_address, path] is not counted a second time."""
    rule = {"id": "a", "match": {"attributes": {"descriptor_keys": "remote_address"}},
            "by": ["ip"], "limits": ["1/hour"]}  # fmt: skip
    address = ("remote_address", "192.0.2.7")
    with Limiter.from_rules({"version": 1, "rules": [rule]}) as limiter:
        assert limiter.evaluate(request_of("shop", [address, ("path", "/a")])).kind == "unlimited"
        assert limiter.check(request_of("shop", [address])).allowed
        assert not limiter.check(request_of("shop", [address])).allowed


def test_long_descriptor_keys_are_counted_by_a_digest_and_matched_whole() -> None:
    """A rule that counts by them gets a key that fits, and a rule that matches them matches."""
    entries = [(f"{'k' * 120}{number}", "v") for number in range(9)]
    request = request_of("shop", entries)
    keys = ",".join(key for key, _ in entries)
    assert request.attributes["descriptor_keys"] == countable(keys) != keys
    assert request.matched_as.attributes["descriptor_keys"] == keys


def test_a_limit_of_a_descriptor_is_counted_by_its_entries_alone() -> None:
    """Counts that are in the store from before there were `descriptor_keys` stay valid."""
    request = request_of("shop", [("user", "ann"), ("region", "eu")])
    assert everything_of(request) == ("user:ann", "domain:shop", "region:eu")


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=8), st.text(max_size=300) | st.binary(max_size=9)),
        min_size=1,
        max_size=8,
    )
)
def test_any_values_can_be_counted(entries: list[tuple[str, str | bytes]]) -> None:
    """Each value is in one place, every name is an identifier, and each makes a key."""
    request = request_of("shop", entries)
    names = [name for name in ("user", "api_key", "ip", "tenant", "tier", "endpoint", "method")
             if getattr(request, name) is not None]  # fmt: skip
    assert len(names) + len(request.attributes) == len(entries) + 2
    for name in request.attributes:
        assert name.isidentifier()
        assert name.isascii()
        subject_of_request(request, [name])
    with Limiter.from_rules({"version": 1, "rules": [
        {"id": "all", "by": [name for name in names if name != "endpoint"] or ["domain"],
         "limits": ["1/hour"]},
    ]}) as limiter:  # fmt: skip
        assert limiter.check(request).allowed
    subject_of(everything_of(request))


@pytest.mark.parametrize(
    "value",
    ["x" * (VALUE_LENGTH_MAX + 1), "a\x1fb", "a\x00b", "a\nb", "\ud800", b"\xff", "#" + "0" * 32],
)
def test_a_value_that_does_not_fit_a_key_has_a_digest(value: str | bytes) -> None:
    """An error would let the client pass."""
    found = countable(value)
    assert found.startswith("#")
    assert len(found) == 33
    assert found != value


@pytest.mark.parametrize("key", ["api_key", "region"])
@pytest.mark.parametrize(
    "value", ["sk_revoked_" + "x" * 300, "sk_revoked_\x07", b"sk_revoked_\xff"]
)
def test_lists_match_a_value_that_is_counted_by_its_digest(key: str, value: str | bytes) -> None:
    """Otherwise a long key would evade the deny list."""
    request = request_of("shop", [("user", "ann"), (key, value)])
    assert "sk_revoked" not in repr(request)
    rules = {"version": 1, "rules": [{"id": "a", "by": [key], "limits": ["1/hour"]}]}
    with Limiter.from_rules({**rules, "deny": [f"{key}:sk_revoked_*"]}) as limiter:
        assert limiter.evaluate(request).kind == "blocked"
    with Limiter.from_rules(rules) as limiter:
        assert limiter.evaluate(request).counted[0][0].startswith(f"{key}:#")
    assert request_of("shop", [("user", "ann")]).digests is None


def test_two_values_never_share_a_digest_or_a_text() -> None:
    """A value that looks like another's digest is not counted with it."""
    long = "x" * 1000
    assert countable(countable(long)) != countable(long)
    assert countable("x" * VALUE_LENGTH_MAX) == "x" * VALUE_LENGTH_MAX
    assert countable("#tag") == "#tag"


def test_a_long_path_still_matches() -> None:
    """Rules match the whole path, however long it is."""
    path = "/v1/orders/" + "x" * 2000
    request = request_of("shop", [("path", path)])
    assert request.endpoint == path
    rule = {"id": "o", "match": {"endpoint": "/v1/orders/*"}, "by": ["endpoint"],
            "limits": ["1/hour"]}  # fmt: skip
    with Limiter.from_rules({"version": 1, "rules": [rule]}) as limiter:
        assert [limiter.check(request).allowed for _ in range(2)] == [True, False]


def _asked(**message: object) -> list[DescriptorCheck]:
    fields: dict[str, Any] = {"domain": "shop", **message}
    return checks_of(RateLimitRequest(**fields))


ENTRY = {"entries": [{"key": "k", "value": "v"}]}


@pytest.mark.parametrize(
    ("descriptor", "hits_addend", "units"),
    [
        ({}, 0, 1),
        ({}, 5, 5),
        ({"hits_addend": {"value": 3}}, 0, 3),
        ({"hits_addend": {"value": 3}}, 5, 3),
        ({"hits_addend": {"value": 0}}, 0, 0),
        ({"hits_addend": {"value": 0}}, 5, 0),
        ({"hits_addend": {"value": 3}, "is_negative_hits": True}, 0, -3),
        ({"is_negative_hits": True}, 5, -5),
        ({"hits_addend": {"value": 2**64 - 1}}, 0, UNITS_MAX + 1),
    ],
)
def test_the_cost_of_a_descriptor(
    descriptor: dict[str, object], hits_addend: int, units: int
) -> None:
    """Its own number has priority; its own 0 peeks; a negative one returns units."""
    found = _asked(descriptors=[{**ENTRY, **descriptor}], hits_addend=hits_addend)
    assert [each.units for each in found] == [units]


def test_checks_keep_the_order_of_descriptors() -> None:
    """The statuses of the reply have the same order."""
    descriptors = [{"entries": [{"key": "user", "value": str(n)}]} for n in range(3)]
    assert [each.request.user for each in _asked(descriptors=descriptors)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"requests_per_unit": 5, "unit": 2}, DescriptorLimit(5, UNIT_NS[2])),
        ({"requests_per_unit": 5, "unit": 1, "unit_multiplier": {"value": 30}},
         DescriptorLimit(5, 30 * UNIT_NS[1])),
        ({"requests_per_unit": 0, "unit": 6}, DescriptorLimit(0, UNIT_NS[6])),
    ],
)  # fmt: skip
def test_a_descriptor_may_have_a_limit(limit: dict[str, object], expected: DescriptorLimit) -> None:
    """Requests per unit, or per several units."""
    assert _asked(descriptors=[{**ENTRY, "limit": limit}])[0].override == expected


def test_units_are_as_long_as_in_rates() -> None:
    """A month is 30 days in both."""
    names = {1: "second", 2: "minute", 3: "hour", 4: "day", 5: "month", 6: "year"}
    assert {unit: parse_limit(f"1/{name}").window_ns for unit, name in names.items()} == UNIT_NS


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"domain": "", "descriptors": [ENTRY]}, "domain=''"),
        ({"domain": "x" * 257, "descriptors": [ENTRY]}, "1 to 256"),
        ({"descriptors": []}, "1 to 100 descriptors, and this one has 0"),
        ({"descriptors": [ENTRY] * (DESCRIPTORS_MAX + 1)}, "this one has 101"),
        ({"descriptors": [{}]}, "1 to 64 entries, and this one has 0"),
        ({"descriptors": [{"entries": ENTRY["entries"] * (ENTRIES_MAX + 1)}]}, "this one has 65"),
        ({"descriptors": [{"entries": [{"key": "", "value": "v"}]}]}, "not a key"),
        ({"descriptors": [{"entries": [{"key": "k" * (KEY_NAME_LENGTH_MAX + 1)}]}]}, "not a key"),
        ({"descriptors": [{**ENTRY, "limit": {"requests_per_unit": 1}}]}, "is invalid"),
        ({"descriptors": [{**ENTRY, "limit": {"requests_per_unit": 2**32 - 1, "unit": 1}}]},
         "at most 1,000,000,000"),
        ({"descriptors": [{**ENTRY, "limit": {"requests_per_unit": 1, "unit": 6,
                                              "unit_multiplier": {"value": 2}}}]}, "366 days"),
    ],
)  # fmt: skip
def test_an_invalid_message_is_rejected(message: dict[str, object], said: str) -> None:
    """The error says what is wrong and what would be valid."""
    with pytest.raises(ConfigError, match=said):
        _asked(**message)


def test_the_cache_of_names_is_bounded() -> None:
    """New keys fill no memory."""
    for number in range(NAMES_MAX + 10):
        request_of("shop", [(f"key{number}", "v")])
    assert 0 < len(_names) <= NAMES_MAX


def test_an_ipv6_network_has_one_counter() -> None:
    """A client with a /64 has 2**64 addresses, and one quota."""
    one, two, other = (
        request_of("shop", [("remote_address", text)]).ip
        for text in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
    )
    assert one == two != other


def test_all_fields_of_a_request_make_a_key() -> None:
    """Different requests never share a key, and equal ones always do."""
    many = [(f"k{n}", "v" * 200) for n in range(20)]
    long = [("a", "x" * 255), ("b", "y" * 255)]
    moved = [("a", "x" * 255 + "y"), ("b", "y" * 254)]
    keys = [
        everything_of(request_of("shop", entries))
        for entries in ([("user", "1")], [("user", "2")], [("k", "1")], many, long, moved)
    ]
    assert len({subject_of(key) for key in keys}) == len(keys)
    assert everything_of(request_of("shop", many[::-1])) == everything_of(request_of("shop", many))
