"""Allow and deny lists: which requests are on them, by which entry, at any size."""

from __future__ import annotations

import fnmatch
import gc
import ipaddress
import sys
from enum import StrEnum
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError, InvalidKey
from ratekeeper.core.model import Request
from ratekeeper.rules.matching import lists as lists_module
from ratekeeper.rules.matching.lists import (
    IRREGULAR_GLOBS_MAX,
    Lists,
    check_entry,
)
from ratekeeper.rules.matching.patterns import GLOB_LENGTH_MAX

KEY = Request(api_key="sk_live_42", user="u7", ip="10.1.2.3", tenant="acme", tier="free")


@pytest.mark.parametrize(
    ("entry", "request_", "why"),
    [
        # A named attribute, exactly.
        ("api_key:sk_live_42", KEY, "api_key:sk_live_42"),
        ("user:u7", KEY, "user:u7"),
        ("tenant:acme", KEY, "tenant:acme"),
        ("tier:free", KEY, "tier:free"),
        ("user:sk_live_42", KEY, None),
        ("user:U7", KEY, None),
        ("user:u", KEY, None),
        ("user:42", Request(), None),
        ("region:eu", Request(attributes={"region": "eu"}), "region:eu"),
        ("region:eu", Request(attributes={"region": "us"}), None),
        ("region:eu", Request(), None),
        ("api_key:live:7", Request(api_key="live:7"), "api_key:live:7"),
        ("api_key:10.0.0.0/8", Request(api_key="10.0.0.0/8"), "api_key:10.0.0.0/8"),
        # A glob.
        ("api_key:sk_live_*", KEY, "api_key:sk_live_*"),
        ("api_key:sk_live_42*", KEY, "api_key:sk_live_42*"),
        ("api_key:sk_live_42?*", KEY, None),
        ("api_key:sk_live_421*", KEY, None),
        ("api_key:*", KEY, "api_key:*"),
        ("api_key:*", Request(user="u7"), None),
        ("api_key:*_42", KEY, "api_key:*_42"),
        ("api_key:sk_*_42", KEY, "api_key:sk_*_42"),
        ("api_key:sk_*_43", KEY, None),
        ("api_key:sk_live_4[0-3]", KEY, "api_key:sk_live_4[0-3]"),
        ("api_key:sk_live_4?", KEY, "api_key:sk_live_4?"),
        ("region:eu-*", Request(attributes={"region": "eu-1"}), "region:eu-*"),
        # Characters that would be wildcards.
        ("user:[*]", Request(user="*"), "user:[*]"),
        ("user:[*]", Request(user="x"), None),
        ("user:a[?]*", Request(user="a?b"), "user:a[?]*"),
        # A user that is named like an API key.
        ("api_key:sk_live_*", Request(user="sk_live_42"), None),
        ("user:sk_live_*", KEY, None),
        # No name: an address or a network.
        ("10.0.0.0/8", KEY, "ip:10.0.0.0/8"),
        ("10.1.2.3", KEY, "ip:10.1.2.3"),
        ("10.1.2.3/32", KEY, "ip:10.1.2.3"),
        ("10.1.2.4", KEY, None),
        ("ip:10.0.0.0/8", KEY, "ip:10.0.0.0/8"),
        ("ip:0.0.0.0/0", KEY, "ip:0.0.0.0/0"),
        ("10.0.0.0/8", Request(ip="::ffff:10.1.2.3"), "ip:10.0.0.0/8"),
        ("::ffff:10.0.0.0/104", KEY, "ip:10.0.0.0/8"),
        ("10.0.0.0/8", Request(ip="not an address"), None),
        ("10.0.0.0/8", Request(user="10.1.2.3"), None),
        ("2001:db8::/32", Request(ip="2001:DB8::7"), "ip:2001:db8::/32"),
        ("fe80::/10", Request(ip="fe80::1%eth0"), "ip:fe80::/10"),
        ("ip:::1", Request(ip="::1"), "ip:::1"),
        ("::1", Request(ip="::1"), "ip:::1"),
        ("::/0", KEY, None),
        # Hexadecimal, and still the name of an attribute.
        ("face:off", Request(attributes={"face": "off"}), "face:off"),
        ("dead:beef", Request(attributes={"dead": "beef"}), "dead:beef"),
    ],
)
def test_requests_on_a_list(entry: str, request_: Request, why: str | None) -> None:
    """An entry, a request, and the entry that `why` returns; None: the request is not on it."""
    for name, lists in (
        ("allow", Lists.compile(allow=[entry])),
        ("deny", Lists.compile(deny=[entry])),
    ):
        assert lists.verdict(request_) == (name if why else None)
        assert lists.why(request_) == why


@pytest.mark.parametrize(
    ("allow", "deny", "verdict", "why"),
    [
        ([], [], None, None),
        (["api_key:sk_live_42"], ["api_key:sk_*"], "deny", "api_key:sk_*"),
        (["api_key:sk_*"], ["api_key:sk_live_42"], "deny", "api_key:sk_live_42"),
        (["user:u7"], ["ip:10.0.0.0/8"], "deny", "ip:10.0.0.0/8"),
        (["ip:10.0.0.0/8"], ["user:u8", "192.0.2.0/24"], "allow", "ip:10.0.0.0/8"),
        (["user:u8"], ["user:u9"], None, None),
        # The first found of: exact, the shortest start, other globs; then the widest network.
        (["user:u*", "user:u7*", "user:u7"], [], "allow", "user:u7"),
        (["user:u7*", "user:u*", "user:u*7"], [], "allow", "user:u*"),
        (["10.1.2.3", "10.0.0.0/8", "10.1.0.0/16"], [], "allow", "ip:10.0.0.0/8"),
    ],
)
def test_a_deny_takes_precedence(
    allow: list[str], deny: list[str], verdict: str | None, why: str | None
) -> None:
    """Even if the allow entry is more exact."""
    lists = Lists.compile(allow, deny)
    assert (lists.verdict(KEY), lists.why(KEY)) == (verdict, why)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("", "'' is empty; write it like api_key:sk_internal_*"),
        (" user:42", "has a space before or after it"),
        ("user:42\n", "has a space before or after it"),
        ("user: 42", "the value must have 1 to 512 characters and must not start with a space"),
        ("user:", "the value must have 1 to 512 characters"),
        ("user:" + "x" * (GLOB_LENGTH_MAX + 1), "the value must have 1 to 512 characters"),
        (42, "42 is int, not text"),
        (None, "None is NoneType, not text"),
        ("10.0.0.1/8", "write 10.0.0.0/8 for the whole network"),
        ("10.0.0.0/33", "must be from 0 to 32"),
        ("10.0.0.256", "is not an address"),
        ("10.0.*", "is not an address"),
        ("1.2.3", "if it is a key, write api_key:1.2.3"),
        ("2001:db8::/129", "must be from 0 to 128"),
        ("ip:10.0.*", "entry 'ip:10.0.*': network '10.0.*': '10.0.*' is not an address"),
        ("ip:localhost", "is not an address"),
        ("IP:10.0.0.1", "IP must be spelled ip"),
        ("apikey:sk_1", "apikey must be spelled api_key"),
        ("API_KEY:sk_1", "API_KEY must be spelled api_key"),
        ("Tenant:acme", "Tenant must be spelled tenant"),
        ("endpoint:/health", "lists name clients, not an endpoint; write a rule that matches"),
        ("method:GET", "write a rule that matches the method"),
        ("api-key:sk_1", "'api-key' is not a valid attribute name"),
        ("10.0.0.1:80", "'10.0.0.1' is not a valid attribute name"),
        (":x", "'' is not a valid attribute name"),
        ("x" * 129 + ":y", "is not a valid attribute name"),
        ("user:[ab", "the set [ at character 1 is not closed"),
        ("42", "does not say what it names; write 'user:42' or 'api_key:42' or 'tenant:42'"),
        ("sk_*", "does not say what it names"),
        ("user:[z-a]", "the range 'z-a' is empty"),
    ],
    ids=range(30),
)
def test_a_wrong_entry_shows_a_correct_one(entry: Any, says: str) -> None:
    """The error names the list, shows the entry and a correct one."""
    with pytest.raises(ConfigError) as caught:
        Lists.compile(deny=["user:42", entry])
    assert str(caught.value).startswith("deny list: entry ")
    assert says in str(caught.value)
    with pytest.raises(ConfigError):
        check_entry(entry)


def test_a_text_is_not_a_list() -> None:
    """A text would be read as many entries of one character."""
    with pytest.raises(
        ConfigError, match=r"allow list: 'sk_\*' is text, not a list.* write \['sk_\*'\]"
    ):
        Lists.compile(allow="sk_*")


class Plan(StrEnum):
    FREE = "free"


@pytest.mark.parametrize("entry", ["tier:free", "tier:f*", "tier:f*e"])
def test_a_value_may_be_a_subclass_of_str(entry: str) -> None:
    """A member of a StrEnum counts as its text."""
    assert Lists.compile(deny=[entry]).verdict(Request(tier=Plan.FREE)) == "deny"


@pytest.mark.parametrize(
    "request_",
    [
        Request(user=42),  # type: ignore[arg-type]  # callers without type checks may send it
        Request(ip=42),  # type: ignore[arg-type]  # same
        Request(attributes={"region": 42}),  # type: ignore[dict-item]  # same
        Request(attributes={"region": ["eu"]}),  # type: ignore[dict-item]  # same
    ],
)
def test_a_value_that_is_not_text_is_rejected(request_: Request) -> None:
    """The number 42 would not match the entry user:42 that denies it."""
    lists = Lists.compile(deny=["user:42", "ip:0.0.0.0/0", "region:eu"])
    with pytest.raises(InvalidKey, match="convert it to text"):
        lists.verdict(request_)


def test_irregular_globs_are_bounded() -> None:
    """Globs that must be tried one by one are bounded; the error says how to write them."""
    most = [f"user:*_{number}" for number in range(IRREGULAR_GLOBS_MAX)]
    assert Lists.compile(deny=most).why(Request(user="u_999")) == "user:*_999"
    with pytest.raises(ConfigError, match=r"more than 1,000 globs .* like api_key:sk_internal_\*"):
        Lists.compile(deny=[*most, "user:*_x"])
    # Each list has its own, and the regular ones do not count.
    Lists.compile(allow=most, deny=[*most, *(f"user:k{number}*" for number in range(5_000))])


def test_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless list is an error and does not fill the memory."""
    monkeypatch.setattr(lists_module, "ENTRIES_MAX", 10)
    Lists.compile(deny=["user:42"] * 10)
    with pytest.raises(ConfigError, match="deny list: there are more than 10 entries"):
        Lists.compile(deny=iter(lambda: "user:42", None))


class CountingText(str):
    """Text that counts how often it is hashed, compared or sliced."""

    __slots__ = ("touched",)
    touched: int

    def __new__(cls, text: str) -> Self:
        self = super().__new__(cls, text)
        self.touched = 0
        return self

    def __hash__(self) -> int:
        self.touched += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        self.touched += 1
        return super().__eq__(other)

    def __getitem__(self, key: Any) -> str:
        self.touched += 1
        return super().__getitem__(key)

    def startswith(self, *arguments: Any) -> bool:
        self.touched += 1
        return super().startswith(*arguments)


@pytest.mark.parametrize("form", ["sk_{:07d}", "sk_{:07d}_*", "sk_{:07d}*_x"])
def test_a_look_up_does_not_grow_with_the_list(form: str) -> None:
    """A value is looked up as often among a thousand entries as among ten."""

    def touched(count: int) -> int:
        value = CountingText("sk_0000007_and_more")
        lists = Lists.compile(
            deny=(f"api_key:{form}".format(1_000_000 + number) for number in range(count))
        )
        assert lists.verdict(Request(api_key=value)) is None
        return value.touched

    assert 1 <= touched(1_000) == touched(10) <= 10


def test_networks_of_every_length() -> None:
    """Each of the 33 and 129 prefix lengths is looked up separately."""
    for kind in (ipaddress.IPv4Network, ipaddress.IPv6Network):
        bits = kind(0).max_prefixlen
        ones = [kind((1 << (bits - length), length)) for length in range(1, bits + 1)]
        lists = Lists.compile(deny=map(str, ones))
        for network in ones:
            shown = f"ip:{network}".removesuffix(f"/{bits}")
            for address in (network[0], network[network.num_addresses // 2]):
                assert lists.why(Request(ip=str(address))) == shown
        assert lists.verdict(Request(ip=str(kind(0)[0]))) is None
        everything = Lists.compile(deny=[str(kind((0, 0)))])
        assert everything.verdict(Request(ip=str(ones[3][5]))) == "deny"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="since 3.14 the collector walks dicts too")
def test_the_garbage_collector_does_not_traverse_a_list() -> None:
    """The number of objects that it traverses does not grow with the list."""

    def walked(count: int) -> int:
        forms = ("api_key:sk_{}", "user:u{}", "user:u{}*", "2001:db8::{:x}")
        entries = (form.format(number) for form in forms for number in range(count))
        lists = Lists.compile(deny=entries)
        gc.collect()  # which leaves out, from then on, containers of nothing but plain values
        found, seen = 0, set[int]()
        ahead: list[object] = [lists]
        while ahead:
            each = ahead.pop()
            if gc.is_tracked(each) and not isinstance(each, type) and id(each) not in seen:
                seen.add(id(each))
                ahead += gc.get_referents(each)
                found += len(gc.get_referents(each))
        assert lists.verdict(Request(user="u7")) == "deny"
        return found

    assert walked(10_000) - walked(100) < 1_000


ENTRY_VALUES = st.text(alphabet="ab*?", min_size=1, max_size=5)
ATTRIBUTES = st.sampled_from(["user:", "api_key:", "tenant:", "region:"])
NETWORKS = st.tuples(
    st.sampled_from(["10.0.0.0", "10.0.0.3", "::8", "::"]), st.integers(0, 32)
).map(lambda pair: str(ipaddress.ip_network(f"{pair[0]}/{pair[1]}", strict=False)))
ENTRIES = st.lists(st.tuples(ATTRIBUTES, ENTRY_VALUES).map("".join) | NETWORKS, max_size=8)
VALUES = st.none() | st.text(alphabet="ab", max_size=5)
REQUESTS = st.builds(
    lambda user, api_key, tenant, region, ip: Request(
        user=user,
        api_key=api_key,
        tenant=tenant,
        ip=ip,
        attributes={} if region is None else {"region": region},
    ),
    VALUES,
    VALUES,
    VALUES,
    VALUES,
    st.sampled_from(
        [None, "10.0.0.1", "10.0.0.3", "11.0.0.1", "::9", "1::", "::ffff:10.0.0.3", "x"]
    ),
)


def _naively_on(entry: str, request: Request) -> bool:
    """Return whether an entry matches, parsed again for each request."""
    try:
        network = ipaddress.ip_network(entry)
    except ValueError:
        name, _, pattern = entry.rpartition(":")
        value = request.attributes.get(name) if name == "region" else getattr(request, name)
        return value is not None and fnmatch.fnmatchcase(value, pattern)
    if request.ip in {None, "x"}:
        return False
    address = ipaddress.ip_address(str(request.ip))
    return (getattr(address, "ipv4_mapped", None) or address) in network


@given(ENTRIES, ENTRIES, REQUESTS)
def test_lists_agree_with_a_naive_search(
    allow: list[str], deny: list[str], request: Request
) -> None:
    """The verdict equals that of trying every entry, and the reason is an entry that matches."""
    lists = Lists.compile(allow, deny)
    expected = None
    for name, entries in (("deny", deny), ("allow", allow)):
        if expected is None and any(_naively_on(entry, request) for entry in entries):
            expected = name
    assert lists.verdict(request) == expected
    why = lists.why(request)
    assert (why is None) is (expected is None)
    if why is not None:
        assert _naively_on(why.removeprefix("ip:"), request)
        assert Lists.compile(deny=[why]).verdict(request) == "deny"


@given(st.text() | st.text(alphabet="user:ip10./*?[]-# \n", max_size=20))
def test_any_text_is_an_entry_or_an_error(text: str) -> None:
    """No text raises another error, and every message can be printed."""
    try:
        lists = Lists.compile(allow=[text])
    except ConfigError as error:
        str(error).encode()
    else:
        assert lists.verdict(KEY) in {"allow", None}
