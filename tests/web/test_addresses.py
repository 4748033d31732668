"""The client's address: forwarding headers are used only if a trusted proxy sent them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper import ConfigError, Request
from ratekeeper.rules.matching.lists import Lists
from ratekeeper.rules.matching.patterns import address_of
from ratekeeper.web import addresses
from ratekeeper.web.addresses import ClientAddresses
from ratekeeper.web.requests import AsgiRequest, WebRequest, clean_value, digest_of

PROXIES = ["10.0.0.0/8", "2001:db8:ffff::/48"]
PROXY = "10.0.0.2"
CLIENT = "203.0.113.9"


def web_request(peer: str | None = PROXY, **headers: str) -> WebRequest:
    """Return a request from this peer; `x_forwarded_for=` is a header."""
    raw = [(name.replace("_", "-").encode(), v.encode("latin-1")) for name, v in headers.items()]
    return AsgiRequest({"type": "http", "client": peer and (peer, 1), "headers": raw})


def behind(header: str, **more: Any) -> str | None:
    """Return the client of a trusted proxy that sends this X-Forwarded-For."""
    return ClientAddresses(PROXIES, **more).of(web_request(x_forwarded_for=header))


def forwarded(header: str) -> str | None:
    """Return the client of a trusted proxy that sends this Forwarded."""
    return ClientAddresses(PROXIES).of(web_request(forwarded=header))


# ------------------------------------------------------------------------------------ trust


@pytest.mark.parametrize("proxies", [[], PROXIES])
def test_headers_of_an_untrusted_peer_are_ignored(proxies: list[str]) -> None:
    """The client is the peer of the socket, whatever headers it sends."""
    request = web_request(
        CLIENT, x_forwarded_for="1.2.3.4", forwarded="for=1.2.3.4", x_real_ip="1.2.3.4"
    )
    for header in (None, *addresses.FORWARDED_HEADERS):
        assert ClientAddresses(proxies, forwarded=header).of(request) == CLIENT


@pytest.mark.parametrize(
    ("proxies", "peers", "warned"),
    [
        ([], [None, PROXY, None], ["unix", PROXY]),
        (["loopback"], [None, PROXY, None], ["unix"]),
        (["unix"], [None], []),
        ([], [PROXY, "192.168.0.7", PROXY], [PROXY]),
        ([], ["::1"], ["::1"]),
        ([], [CLIENT], []),  # otherwise any client could fill the log
        (["loopback"], [PROXY], []),
        (["unix"], [PROXY], []),
    ],
)
def test_an_unlisted_proxy_is_logged_once(
    proxies: list[str], peers: list[str | None], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """All clients behind it count as one, so the operator gets one warning."""
    known = ClientAddresses(proxies)
    for peer in peers:
        known.of(web_request(peer, x_forwarded_for="1.2.3.4"))
    known.of(web_request("10.9.9.9"))
    assert [re.findall(r'trusted_proxies=\["(.*)"\]', each) for each in caplog.messages] == [
        [peer] for peer in warned
    ]


def test_an_unlisted_proxy_is_found_after_its_own_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Load balancers send health checks first. The search ends after a number of requests."""
    known = ClientAddresses()
    assert [known.of(web_request(PROXY)) for _ in range(3)] == [PROXY] * 3
    assert not known.is_cached(PROXY)
    assert known.of(web_request(PROXY, x_forwarded_for="1.2.3.4")) == PROXY
    assert len(caplog.messages) == 1
    assert known.of(web_request(PROXY)) == PROXY
    assert known.is_cached(PROXY)
    alone = ClientAddresses()
    for _ in range(addresses.PROXY_SEARCHES_MAX + 1):
        alone.of(web_request(PROXY))
    alone.of(web_request(PROXY, x_forwarded_for="1.2.3.4"))
    assert alone.is_cached(PROXY)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("header", "client"),
    [
        (CLIENT, CLIENT),
        (f"1.2.3.4, {CLIENT}", CLIENT),
        (f"1.2.3.4, {CLIENT}, 10.0.0.1", CLIENT),
        (f"{CLIENT},10.9.9.9 ,\t10.0.0.1", CLIENT),
        (f"{CLIENT}:4711", CLIENT),
        (f"{CLIENT}, [2001:db8:ffff::1]:443", CLIENT),
        (f"::ffff:{CLIENT}", CLIENT),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::1"),
        ("10.0.0.1", "10.0.0.1"),  # all are trusted: the first of them is the client
        ("10.0.0.7, 10.0.0.1", "10.0.0.7"),
        ("", PROXY),
        (" , ,", PROXY),
        (f"{CLIENT}, ,", CLIENT),
        (f"{CLIENT}, nonsense", PROXY),
        (f"{CLIENT}, nonsense, 10.0.0.1", "10.0.0.1"),
        ("unknown", PROXY),
        ("999.1.1.1", PROXY),
        ("01.2.3.4", PROXY),
        ("1.2.3.4:99999999", PROXY),
        ("[1.2.3.4]", PROXY),
        ("[::1", PROXY),
        ("1.2.3.4\x00", PROXY),
        ("caf\xe9", PROXY),
    ],
)
def test_the_first_untrusted_from_the_right_is_the_client(header: str, client: str) -> None:
    """Trusted proxies are skipped; an invalid element ends the search at the proxy that sent it."""
    assert behind(header) == client


@pytest.mark.parametrize(
    ("header", "client"),
    [
        (f"for={CLIENT}", CLIENT),
        (f"For={CLIENT};proto=https;by=10.0.0.1", CLIENT),
        (f'for="{CLIENT}:4711"', CLIENT),
        ('for="[2001:db8:1:2::1]:4711"', "2001:db8:1:2::"),
        ("for=[2001:db8:1:2::1]", "2001:db8:1:2::"),
        (f'for={CLIENT}, for="[2001:db8:ffff::1]", for=10.0.0.1', CLIENT),
        (f'for={CLIENT};host="a,b;c\\"d", for=10.0.0.1', CLIENT),
        ('for="203.0.113.\\9", for=10.0.0.1;host="\\\\"', CLIENT),
        (f"for=1.2.3.4;by=x , for={CLIENT} ; proto=http", CLIENT),
        (f'for={CLIENT}, for="_hidden"', PROXY),
        (f"for={CLIENT}, for=unknown", PROXY),
        (f"for={CLIENT}, proto=https", PROXY),
        (f"for={CLIENT};for=1.2.3.4", PROXY),
        (f'for="{CLIENT}', PROXY),
        (f"for {CLIENT}", PROXY),
        (f'for={CLIENT}:_port, for="10.0.0.1:_a.b"', CLIENT),
        (CLIENT, PROXY),
    ],
)
def test_forwarded_follows_rfc_7239(header: str, client: str) -> None:
    """Quoted strings, ports, IPv6 in brackets and hidden names are read from the right."""
    assert forwarded(header) == client


def test_a_quote_in_the_clients_part_hides_nothing() -> None:
    """Quotes are paired from the right, where the proxies write."""
    assert forwarded(f'for="1.2.3.4, for={CLIENT}, for="10.0.0.1"') == CLIENT
    assert forwarded(f'for=1.2.3.4;x="\\, for={CLIENT}') == CLIENT


def test_two_headers_must_agree() -> None:
    """A proxy passes on the header that it does not write, so one of the two is made up."""
    clients = ClientAddresses(PROXIES)
    agreed = web_request(forwarded=f"for={CLIENT}", x_forwarded_for=f"1.2.3.4, {CLIENT}")
    assert clients.of(agreed) == CLIENT
    torn = web_request(forwarded="for=1.2.3.4", x_forwarded_for=CLIENT)
    assert clients.of(torn) == PROXY
    assert ClientAddresses(PROXIES, forwarded="x-forwarded-for").of(torn) == CLIENT
    assert ClientAddresses(PROXIES, forwarded="forwarded").of(torn) == "1.2.3.4"


def test_the_configured_header_is_the_only_one() -> None:
    """The others are ignored."""
    request = web_request(x_real_ip=CLIENT, x_forwarded_for="1.2.3.4")
    assert ClientAddresses(PROXIES, forwarded="x-real-ip").of(request) == CLIENT
    assert ClientAddresses(PROXIES, forwarded="x-forwarded-for").of(request) == "1.2.3.4"
    assert ClientAddresses(PROXIES, forwarded="forwarded").of(request) == PROXY


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ({"x_real_ip": CLIENT}, CLIENT),
        ({"x_real_ip": "[2001:db8:1:2:3::4]:80"}, "2001:db8:1:2::"),
        ({"x_real_ip": "garbled"}, PROXY),
        ({"x_real_ip": CLIENT, "x_forwarded_for": CLIENT}, CLIENT),
        # One of them is made up.
        ({"x_real_ip": "1.2.3.4", "x_forwarded_for": CLIENT}, PROXY),
        ({"x_real_ip": CLIENT, "forwarded": "for=1.2.3.4"}, PROXY),
        ({"x_real_ip": CLIENT, "x_forwarded_for": "garbled"}, PROXY),
        # The inner of two proxies names the outer one, which has named the client.
        ({"x_real_ip": "10.0.0.1", "x_forwarded_for": f"{CLIENT}, 10.0.0.1"}, CLIENT),
        ({"x_real_ip": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_x_real_ip_of_a_trusted_proxy_is_read(headers: dict[str, str], client: str) -> None:
    """Without a setting. If it contradicts another header, neither is believed."""
    assert ClientAddresses(PROXIES).of(web_request(**headers)) == client
    assert ClientAddresses(PROXIES).of(web_request(CLIENT, **headers)) == CLIENT


def test_words_stand_for_networks() -> None:
    """`loopback` and `private` are networks, and `unix` is a Unix socket without an address."""
    header = {"x_forwarded_for": CLIENT}
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.9"):
        assert ClientAddresses(["loopback"]).of(web_request(peer, **header)) == CLIENT
    for peer in ("10.1.1.1", "172.31.0.1", "192.168.1.1", "fd00::1"):
        assert ClientAddresses(["private"]).of(web_request(peer, **header)) == CLIENT
        assert ClientAddresses(["loopback"]).of(web_request(peer, **header)) != CLIENT
    assert ClientAddresses(["unix"]).of(web_request(None, **header)) == CLIENT
    assert ClientAddresses(["loopback", "private"]).of(web_request(None, **header)) is None
    assert ClientAddresses(["unix"]).of(web_request(None)) is None


# ------------------------------------------------------------------------------------ forms


@pytest.mark.parametrize(
    ("prefix", "client"),
    [(128, "2001:db8:1:2:3:4:5:6"), (64, "2001:db8:1:2::"), (48, "2001:db8:1::"), (1, "::")],
)
def test_ipv6_is_counted_by_network(prefix: int, client: str) -> None:
    """All addresses of one IPv6 network are one client; IPv4 addresses stay whole."""
    clients = ClientAddresses(ipv6_prefix=prefix)
    assert clients.of(web_request("2001:db8:1:2:3:4:5:6")) == client
    assert clients.of(web_request(CLIENT)) == CLIENT


def test_lists_match_counted_addresses() -> None:
    """Networks in rules and lists contain the address in its counted form."""
    lists = Lists.compile(deny=["ip:2001:db8:1:2::/64", "ip:203.0.113.0/24"])
    for peer in ("2001:db8:1:2:3:4:5:6", CLIENT):
        assert lists.verdict(Request(ip=ClientAddresses().of(web_request(peer)))) == "deny"


def test_a_peer_without_an_address_is_counted_by_its_name() -> None:
    """Test clients are called "testclient"."""
    assert ClientAddresses(["loopback"]).of(web_request("testclient")) == "testclient"
    assert ClientAddresses().of(web_request("\x1f")) == digest_of("\x1f")
    assert ClientAddresses().of(web_request(None)) is None


def test_the_cache_of_peers_is_bounded() -> None:
    """It stays within PEERS_MAX for any number of clients."""
    clients = ClientAddresses(["10.0.0.1"])
    for number in range(addresses.PEERS_MAX + 10):
        peer = f"10.{number >> 8}.{number & 255}.1"
        assert clients.of(web_request(peer)) == peer
    assert len(clients._peers) <= addresses.PEERS_MAX


def test_a_bounded_part_of_a_header_is_read() -> None:
    """At most 100 elements and 16,384 characters from the right; a cut element is ignored."""
    many = ", ".join(["10.0.0.3"] * (addresses.ELEMENTS_MAX - 1))
    assert behind(f"{CLIENT}, {many}") == CLIENT
    assert behind(f"{CLIENT}, 10.0.0.4, {many}") == "10.0.0.4"
    wide = "," + "10.0.0.5".rjust(addresses.CHARACTERS_MAX - 1)
    assert behind(f"{CLIENT}{wide}") == "10.0.0.5"
    # Cut, this would read 3.0.113.9, which is another client.
    cut = "3.0.113.9," + " " * (addresses.CHARACTERS_MAX - 10)
    assert behind(f"20{cut}") == PROXY


def test_the_table_of_the_documentation_is_correct() -> None:
    """Each row of the table in docs/identity.md holds."""
    page = Path(__file__).parents[2] / "docs/identity.md"
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([0-9.]+) \| (.+) \| ([0-9a-f.:]+) \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for peer, shown, client in rows:
        pairs = [each.split(": ", 1) for each in re.findall(r"`([^`]+)`", shown)]
        headers = {name.lower().replace("-", "_"): value for name, value in pairs}
        assert ClientAddresses(["10.0.0.0/8"]).of(web_request(peer, **headers)) == client, shown


# ------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"trusted_proxies": "10.0.0.0/8"}, "is not a list"),
        ({"trusted_proxies": ["10.0.0.0/33"]}, "prefix length"),
        ({"trusted_proxies": ["10.0.0.1/8"]}, "bits set"),
        ({"trusted_proxies": ["localhost"]}, "loopback, private, unix"),
        ({"trusted_proxies": [7]}, "is not text"),
        ({"trusted_proxies": ["10.0.0.1"] * 1001}, "at most 1,000"),
        ({"ipv6_prefix": 0}, "from 1 to 128"),
        ({"ipv6_prefix": True}, "from 1 to 128"),
        ({"ipv6_prefix": "64"}, "from 1 to 128"),
        ({"forwarded": "x-client-ip"}, "x-forwarded-for, forwarded, x-real-ip"),
    ],
)
def test_wrong_settings_are_rejected(arguments: dict[str, Any], said: str) -> None:
    """The error comes at the start and suggests a correct setting."""
    with pytest.raises(ConfigError, match=said):
        ClientAddresses(**arguments)


# ------------------------------------------------------------------------------------ properties

# Headers of a client: any text, and more often text that is nearly valid.
ATTACKS = st.one_of(
    st.text(alphabet=st.characters(max_codepoint=255)),
    st.lists(
        st.sampled_from(
            ["1.2.3.4", "10.0.0.1", "for=1.2.3.4", "for=10.0.0.1", '"', "\\", ",", ";", "for=", " "]
        ),
        max_size=12,
    ).map("".join),
)
HOPS = st.lists(st.sampled_from(["10.0.0.1", "10.200.0.1", "2001:db8:ffff::7"]), max_size=3)


@given(ATTACKS, HOPS)
@example('for="', ["10.0.0.1"])
def test_addresses_left_of_the_client_are_ignored(attack: str, hops: list[str]) -> None:
    """The client may send anything before the addresses that the proxies append."""
    usual = ", ".join([attack, CLIENT, *hops])
    assert behind(usual) == CLIENT
    written = [f'for="[{hop}]:443"' if ":" in hop else f"for={hop};proto=https" for hop in hops]
    assert forwarded(", ".join([attack, f"for={CLIENT}", *written])) == CLIENT


@given(ATTACKS, ATTACKS, st.sampled_from([None, PROXY, CLIENT, "", "x", "\ud800", "::"]))
def test_any_headers_give_an_address(one: str, other: str, peer: str | None) -> None:
    """No header raises an error, and every address found can be parsed again."""
    request = web_request(peer, forwarded=one, x_forwarded_for=other, x_real_ip=other)
    named = clean_value(peer) if peer else None
    for header in (None, *addresses.FORWARDED_HEADERS):
        found = ClientAddresses([*PROXIES, "unix"], forwarded=header).of(request)
        assert found is None or found == named or address_of(found) is not None


COUNTED = [
    ("192.0.2.7", "192.0.2.7"),
    ("2001:db8::7", "2001:db8::"),
    ("2001:DB8:0:0:ffff::1", "2001:db8::"),
    ("2001:db8:0:1::7", "2001:db8:0:1::"),
    ("::ffff:192.0.2.7", "192.0.2.7"),
    ("::1", "::1"),
    ("nonsense", "nonsense"),
    ("not:an:address", "not:an:address"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "counted"), COUNTED)
def test_an_address_is_counted_by_its_network(text: str, counted: str) -> None:
    """An IPv6 address counts as its /64, and a second call changes nothing."""
    assert addresses.counted_address(text) == counted
    assert addresses.counted_address(counted) == counted
