"""Networks: which addresses are in them, and what is no network."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tollkeeper.core.errors import ConfigError
from tollkeeper.rules.matching.networks import address_of, compile_network


@pytest.mark.parametrize(
    ("network", "address", "is_in"),
    [
        ("10.0.0.0/8", "10.0.0.0", True),
        ("10.0.0.0/8", "10.255.255.255", True),
        ("10.0.0.0/8", "11.0.0.0", False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.0.0.0/8", "::FFFF:0a01:0203", True),
        ("10.0.0.0/8", "::10.1.2.3", False),
        ("::ffff:10.0.0.0/104", "10.1.2.3", True),
        ("::ffff:10.1.2.3", "10.1.2.3", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.7/32", "192.0.2.7", True),
        ("0.0.0.0/0", "255.255.255.255", True),
        ("0.0.0.0/0", "::1", False),
        ("::/0", "::1", True),
        ("::/0", "1.2.3.4", False),
        ("::/0", "::ffff:1.2.3.4", False),
        ("2001:db8::/32", "2001:0DB8:0:0::1", True),
        ("2001:db8::/32", "2001:db9::1", False),
        ("fe80::/10", "fe80::1%eth0", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        # What is no address is in no network.
        ("0.0.0.0/0", "", False),
        ("0.0.0.0/0", "1.2.3", False),
        ("0.0.0.0/0", "1.2.3.4:80", False),
        ("0.0.0.0/0", "01.2.3.4", False),
        ("0.0.0.0/0", " 1.2.3.4", False),
        ("0.0.0.0/0", "1.2.3.4%eth0", False),
        ("0.0.0.0/0", "1.2.3.4\0", False),
        ("0.0.0.0/0", "1.2.3.4/32", False),
        ("0.0.0.0/0", "\ud800", False),
        ("0.0.0.0/0", "unknown", False),
        ("::/0", "[::1]", False),
        ("::/0", ":::", False),
        ("::/0", "::1\0", False),
        ("::/0", "::\ud800", False),
    ],
)
def test_what_a_network_holds(network: str, address: str, is_in: bool) -> None:
    """The network holds the address, or it does not."""
    assert compile_network(network).contains(address) is is_in


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.3/32", "10.1.2.3"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("2001:DB8:0::/32", "2001:db8::/32"),
        ("::1/128", "::1"),
        ("0.0.0.0/0", "0.0.0.0/0"),
    ],
)
def test_a_network_is_shown_in_one_way(text: str, shown: str) -> None:
    """A person reads it as it is usually written."""
    assert str(compile_network(text)) == shown
    assert compile_network(shown) == compile_network(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.1/8", "write 10.0.0.0/8 for all of it, or the address alone"),
        ("2001:db8::1/32", "write 2001:db8::/32 for all of it"),
        ("::ffff:10.0.0.1/104", "after the first 104; write 10.0.0.0/8"),
        ("10.0.0.0/33", "leading bits, 0 to 32"),
        ("::/129", "leading bits, 0 to 128"),
        ("::ffff:10.0.0.0/95", "leading bits, 96 to 128"),
        ("10.0.0.0/", "leading bits"),
        ("10.0.0.0/-1", "leading bits"),
        ("10.0.0.0/+8", "leading bits"),
        ("10.0.0.0/08", "leading bits"),
        ("10.0.0.0/٨", "leading bits"),
        ("10.0.0.0/8/8", "leading bits"),
        ("10.0.0.0/255.0.0.0", "leading bits"),
        ("10.0.0/8", "'10.0.0' is not an address; write it like 10.0.0.0/8"),
        ("10.0.*", "is not an address"),
        ("", "is not an address"),
        ("localhost", "is not an address"),
        ("fe80::1%eth0", "is not an address"),
        (" 10.0.0.0/8", "is not an address"),
        (None, "is not text"),
        (10, "is not text"),
    ],
)
def test_a_wrong_network_says_what_is_right(text: Any, says: str) -> None:
    """The error shows the text, what is wrong with it and a right one."""
    with pytest.raises(ConfigError) as caught:
        compile_network(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


def _reference(text: str) -> tuple[int, int] | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    return address.version, int(address)


ADDRESSES = st.ip_addresses().map(str) | st.builds(
    lambda address: f"::ffff:{address}", st.ip_addresses(v=4)
)


@given(ADDRESSES | st.text(alphabet="0123456789abcdef:./f") | st.text())
def test_addresses_are_those_of_the_standard_library(text: str) -> None:
    """The fast way reads every text as `ipaddress` does."""
    assert address_of(text) == _reference(text)


@given(st.ip_addresses(), st.integers(0, 128), st.ip_addresses(), st.integers(0, 128))
def test_networks_are_those_of_the_standard_library(
    start: Any, length: int, other: Any, low_bits: int
) -> None:
    """A network holds the addresses that `ipaddress` says, near its edges too."""
    assume(getattr(start, "ipv4_mapped", None) is None)  # those are IPv4 here; the table has them
    length = min(length, start.max_prefixlen)
    network = ipaddress.ip_network((int(start), length), strict=False)
    flipped = int(start) ^ (1 << min(low_bits, start.max_prefixlen - 1))
    compiled = compile_network(str(network))
    for address in (start, other, type(start)(flipped)):
        # What is IPv4 in IPv6's clothes is IPv4.
        plain = getattr(address, "ipv4_mapped", None) or address
        assert compiled.contains(str(address)) is (plain in network)


@given(st.text() | st.text(alphabet="0123456789abcdef:./%"))
def test_any_text_is_a_network_or_an_error(text: str) -> None:
    """Nothing else comes out, and the message can be printed anywhere."""
    try:
        network = compile_network(text)
    except ConfigError as error:
        str(error).encode()
    else:
        assert compile_network(str(network)) == network
