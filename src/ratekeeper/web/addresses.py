"""The address of a client, behind trusted proxies.

Any client can send `X-Forwarded-For`, so the header is believed only if the other end of the socket
is a proxy that the operator has configured. Each proxy appends the address that called it, so the
list is read from the right: trusted proxies are skipped, and the first address that is not trusted
is the client. The client may have made up everything to the left of it, so that is ignored.

    socket's peer 10.0.0.2 (trusted)    X-Forwarded-For: 1.2.3.4, 203.0.113.9, 10.0.0.1
                                                         made up  the client   trusted

An element that cannot be parsed ends the search, and the proxy that sent it counts as the client.
So do `unknown` and names such as `_hidden`, which `Forwarded` (RFC 7239) allows as an address.

Proxies write `X-Forwarded-For`, `Forwarded` or `X-Real-IP`, and pass on the headers that they do
not write themselves. If several are present and lead to different clients, one of them is made up,
and the proxy counts as the client: all requests of this kind share one count. `forwarded=` names
the header that the proxies write, and the others are then ignored. `X-Real-IP` has one address: if
that is a trusted proxy, it says nothing about the client, and the other headers decide.

IPv6 clients are counted by network, because each client has 2**64 addresses to choose from. Such a
client is written as the first address of its network, without a prefix length, so that rules and
lists can still match it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Final, Literal, get_args

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.rules.matching.patterns import Address, Network, address_of, compile_network
from ratekeeper.web.requests import WebRequest, clean_value, digest_of

LOG: Final = logging.getLogger("ratekeeper.web")

ForwardedHeader = Literal["x-forwarded-for", "forwarded", "x-real-ip"]
"""The header in which proxies write the client's address."""
FORWARDED_HEADERS: Final[tuple[ForwardedHeader, ...]] = get_args(ForwardedHeader)

# An IPv6 client can use every address of its network, which is usually a /64.
IPV6_PREFIX: Final = 64
PROXIES_MAX: Final = 1_000
# The part of a header that is read, from the right.
ELEMENTS_MAX: Final = 50
CHARACTERS_MAX: Final = 2_048
# Peers whose address is cached, about 200 bytes each.
PEERS_MAX: Final = 4_096
# Requests from this machine or a private network that are searched for signs of a proxy that is not
# configured. One request of each peer is not enough: a load balancer sends health checks before it
# forwards anything.
PROXY_SEARCHES_MAX: Final = 1_000

_WORDS: Final = {
    "loopback": ("127.0.0.0/8", "::1"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
}
_NEAR: Final = tuple(compile_network(each) for several in _WORDS.values() for each in several)
# A Unix socket: its peer has no address and is on this machine.
_UNIX: Final = "unix"
_EXAMPLE: Final = 'for example trusted_proxies=["10.0.0.0/8", "loopback"]'
_LOOPBACK: Final = (6, 1)  # ::1 is this machine, not a network

_BRACKETED: Final = re.compile(r"\[([^\]]*:[^\]]*)\](?::(?:[0-9]{1,5}|_[A-Za-z0-9._-]+))?")
_WITH_PORT: Final = re.compile(r"([0-9.]+):(?:[0-9]{1,5}|_[A-Za-z0-9._-]+)")
# A comma, or a quote with the backslashes before it.
_MARK: Final = re.compile(r',|\\*+"')
_PAIR: Final = re.compile(
    r"[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)="
    r'(?:"((?:[^"\\]|\\.)*)"|([^\s;,"]*))[ \t]*(?:;|$)',
    re.DOTALL,
)


class ClientAddresses:
    """Finds the address of each request's client.

    `trusted_proxies`  networks and addresses of proxies, and the words `loopback`, `private` and
                       `unix` (a Unix socket).
    `ipv6_prefix`      the number of leading bits of an IPv6 address that identify a client.
    `forwarded`        the header that the proxies write; by default any of FORWARDED_HEADERS.
    """

    def __init__(
        self,
        trusted_proxies: Sequence[str] = (),
        *,
        ipv6_prefix: int = IPV6_PREFIX,
        forwarded: ForwardedHeader | None = None,
    ) -> None:
        if type(ipv6_prefix) is not int or not 1 <= ipv6_prefix <= 128:
            raise ConfigError(
                f"ipv6_prefix={show(ipv6_prefix)} is not a number of bits from 1 to 128; "
                f"for example ipv6_prefix=64"
            )
        if forwarded is not None and forwarded not in FORWARDED_HEADERS:
            raise ConfigError(
                f"forwarded={show(forwarded)} is not a known header; "
                f"choose one of {', '.join(FORWARDED_HEADERS)}"
            )
        networks, self._trusts_unix = _compiled(trusted_proxies)
        self.trusted_networks = tuple(map(str, networks))
        self._networks = tuple((each.version, each.shift, each.prefix) for each in networks)
        self._searches_left = 0 if trusted_proxies else PROXY_SEARCHES_MAX
        # Only a proxy connects through a Unix socket, so this search does not depend on the others.
        self._unix_searches_left = PROXY_SEARCHES_MAX
        self._ipv6_shift = 128 - ipv6_prefix
        self._forwarded = forwarded
        # For each peer: its address if it is a trusted proxy, otherwise None, and its text.
        self._peers: dict[str, tuple[Address | None, str]] = {}

    @property
    def trusts_proxies(self) -> bool:
        """True if the address depends on anything but the peer."""
        return bool(self._networks) or self._trusts_unix

    def of(self, request: WebRequest) -> str | None:
        """Return the client's address; None if it is unknown. Never raises."""
        peer = request.peer
        if peer is None:
            if self._trusts_unix:
                return self._forwarded_client(request, None)
            if self._unix_searches_left:
                found = _warn_about_proxy(_UNIX, request)
                self._unix_searches_left = 0 if found else self._unix_searches_left - 1
            return None
        proxy, text = self._peers.get(peer) or self._learn(peer, request)
        return text if proxy is None else self._forwarded_client(request, proxy)

    def is_from_proxy(self, request: WebRequest) -> bool:
        """Return True if a trusted proxy has sent the request."""
        peer = request.peer
        if peer is None:
            return self._trusts_unix
        return (self._peers.get(peer) or self._learn(peer, request))[0] is not None

    def is_cached(self, peer: str) -> bool:
        """Return True if the address of this peer is cached and no search for a proxy is due."""
        return peer in self._peers

    def _learn(self, peer: str, request: WebRequest) -> tuple[Address | None, str]:
        address = address_of(peer)
        # Tests and some servers use a name instead of an address. It is counted as it is.
        text = clean_value(peer) or digest_of(peer) if address is None else self._text(address)
        trusted = address if address is not None and self._trusts(address) else None
        if self._searches_left and any(network.contains(peer) for network in _NEAR):
            found = _warn_about_proxy(peer, request)
            self._searches_left = 0 if found else self._searches_left - 1
            return trusted, text  # not cached: the next request is searched too
        if len(self._peers) >= PEERS_MAX:
            self._peers.clear()
        self._peers[peer] = trusted, text
        return trusted, text

    def _trusts(self, address: Address) -> bool:
        version, value = address
        for known, shift, prefix in self._networks:
            if known == version and value >> shift == prefix:
                return True
        return False

    def _forwarded_client(self, request: WebRequest, proxy: Address | None) -> str | None:
        """Return the client for which a trusted proxy forwards this request."""
        if self._forwarded is not None:
            client = self._walk(request.header(self._forwarded), self._forwarded, proxy)
        else:
            client = self._by_any(request, proxy)
        return None if client is None else self._text(client)

    def _by_any(self, request: WebRequest, proxy: Address | None) -> Address | None:
        """Return the client that all headers lead to; the proxy if they contradict each other."""
        clients: list[Address | None] = []
        for kind in FORWARDED_HEADERS:
            header = request.header(kind)
            if header is not None:
                client = self._walk(header, kind, proxy)
                is_silent = kind == "x-real-ip" and (client is None or self._trusts(client))
                if not is_silent or not clients:
                    clients.append(client)
        if not clients:
            return proxy
        return clients[0] if clients.count(clients[0]) == len(clients) else proxy

    def _walk(
        self, header: str | None, kind: ForwardedHeader, proxy: Address | None
    ) -> Address | None:
        client = proxy
        for address in _addresses(header, kind) if header else ():
            if address is None:
                break
            client = address
            if not self._trusts(address):
                break
        return client

    def _text(self, address: Address) -> str:
        return _network_text(address, self._ipv6_shift)


def counted_address(text: str) -> str:
    """Return an address as it is counted by default; any other text is returned as it is.

    The service calls it for addresses that arrive in a body or a query, so that a client has one
    counter, whichever way its requests come in.

    >>> counted_address("2001:db8::7"), counted_address("::ffff:192.0.2.7")
    ('2001:db8::', '192.0.2.7')
    """
    found = address_of(text) if ":" in text else None
    return text if found is None else _network_text(found, 128 - IPV6_PREFIX)


def _network_text(address: Address, ipv6_shift: int) -> str:
    """Return an IPv4 address, or the first address of an IPv6 client's network."""
    version, value = address
    if version == 4:
        return inet_ntop(AF_INET, value.to_bytes(4))
    shift = 0 if address == _LOOPBACK else ipv6_shift
    return inet_ntop(AF_INET6, (value >> shift << shift).to_bytes(16))


def _warn_about_proxy(peer: str, request: WebRequest) -> bool:
    """Log a warning if this peer looks like a proxy that is not configured.

    Call it only for a peer on this machine or in a private network: any other client may write the
    header itself.
    """
    if all(request.header(kind) is None for kind in FORWARDED_HEADERS):
        return False
    LOG.warning(
        "%s forwards requests, but trusted_proxies does not include it, so all clients behind it "
        'count as one; if it is your proxy, set trusted_proxies=["%s"]',
        "a Unix socket" if peer == _UNIX else peer,
        peer,
    )
    return True


def _compiled(trusted_proxies: Sequence[str]) -> tuple[tuple[Network, ...], bool]:
    if not isinstance(trusted_proxies, list | tuple) or len(trusted_proxies) > PROXIES_MAX:
        raise ConfigError(
            f"trusted_proxies={show(trusted_proxies)} is not a list of at most {PROXIES_MAX:,} "
            f"networks; {_EXAMPLE}"
        )
    networks: list[Network] = []
    trusts_unix = False
    for text in trusted_proxies:
        if isinstance(text, str) and text == _UNIX:
            trusts_unix = True
            continue
        words = _WORDS.get(text, (text,)) if isinstance(text, str) else (text,)
        try:
            networks += [compile_network(each) for each in words]
        except ConfigError as error:
            words_known = ", ".join([*_WORDS, _UNIX])
            raise ConfigError(
                f"trusted_proxies: {error}; these words work too: {words_known}"
            ) from None
    return tuple(networks), trusts_unix


def _addresses(header: str, kind: ForwardedHeader) -> Iterator[Address | None]:
    """Yield the addresses of a header from the right; None for an element that is invalid."""
    if len(header) > CHARACTERS_MAX:
        # Up to the first comma, an element may have been cut in half.
        header = header[-CHARACTERS_MAX:].partition(",")[2]
    read = _forwarded_for if kind == "forwarded" else _node
    for element in islice(_from_the_right(header), ELEMENTS_MAX):
        if element and not element.isspace():  # a list may have empty elements
            yield read(element)


def _from_the_right(text: str) -> Iterator[str]:
    """Yield the elements of a list, the last one first; a comma in quotes does not separate.

    Quotes are paired from the right. From the left, one quote that the client sends would swallow
    everything that the proxies append.
    """
    end = len(text)
    if '"' not in text:
        while end >= 0:
            comma = text.rfind(",", 0, end)
            yield text[comma + 1 : end]
            end = comma
        return
    quoted = False
    for mark in reversed(list(_MARK.finditer(text))):
        # A quote after an odd number of backslashes is escaped.
        if mark[0] != ",":
            quoted ^= len(mark[0]) % 2 == 1
        elif not quoted:
            yield text[mark.end() : end]
            end = mark.start()
    yield text[:end]


def _forwarded_for(element: str) -> Address | None:
    """Parse an element of Forwarded: `for="[2001:db8::1]:4711";proto=https`."""
    found: str | None = None
    position = 0
    while position < len(element):
        pair = _PAIR.match(element, position)
        if pair is None:
            return None
        if pair[1].lower() == "for":
            if found is not None:
                return None
            found = pair[3] if pair[2] is None else re.sub(r"\\(.)", r"\1", pair[2])
        position = pair.end()
    return None if found is None else _node(found)


def _node(text: str) -> Address | None:
    """Parse an address with or without a port: 192.0.2.7:80, [2001:db8::1]:80, 2001:db8::1%eth0."""
    text = text.strip(" \t")
    if ":" in text:
        found = _BRACKETED.fullmatch(text) or _WITH_PORT.fullmatch(text)
        text = found[1] if found else text
    return address_of(text)
