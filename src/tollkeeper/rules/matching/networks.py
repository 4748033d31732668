"""Networks: IPv4 and IPv6 addresses and CIDR blocks.

An IPv4 address that is written as an IPv6 one (`::ffff:10.1.2.3`, as a socket of both kinds says)
is that IPv4 address, in requests and in networks. So `::/0` is all of IPv6 and nothing else.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from socket import AF_INET, AF_INET6, inet_pton
from typing import Final, NamedTuple

from tollkeeper.core.errors import ConfigError, show

# Version and number. A plain tuple: one is made for every request that is looked up in a list.
Address = tuple[int, int]

_BITS: Final = {4: 32, 6: 128}
_LENGTHS: Final = {str(length): length for length in range(129)}
_MAPPED: Final = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96, how IPv6 writes IPv4 addresses


def address_of(text: str) -> Address | None:
    """The address that a text is; None if it is none. An IPv6 zone (`%eth0`) is left out.

    >>> address_of("0.0.1.2"), address_of("::ffff:0.0.1.2"), address_of("::2"), address_of("1.2")
    ((4, 258), (4, 258), (6, 2), None)
    """
    # inet_pton and not ipaddress: the same answers, in a tenth of the time.
    try:
        if ":" not in text:
            return 4, int.from_bytes(inet_pton(AF_INET, text))
        packed = inet_pton(AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return None
    if packed.startswith(_MAPPED):
        return 4, int.from_bytes(packed[12:])
    return 6, int.from_bytes(packed)


class Network(NamedTuple):
    """A block of addresses: those whose first `prefix_length` bits are `prefix`."""

    version: int
    prefix_length: int
    prefix: int

    def contains(self, text: str) -> bool:
        """Whether an address is in it; False for what is no address."""
        address = address_of(text)
        if address is None or address[0] != self.version:
            return False
        return address[1] >> self.shift == self.prefix

    @property
    def shift(self) -> int:
        """How many bits of an address are not of the prefix."""
        return _BITS[self.version] - self.prefix_length

    def __str__(self) -> str:
        kind = IPv4Network if self.version == 4 else IPv6Network
        block = kind((self.prefix << self.shift, self.prefix_length))
        return str(block if self.shift else block.network_address)


def compile_network(text: str) -> Network:
    """The network or the single address that a text is, or a ConfigError.

    >>> compile_network("10.0.0.0/8").contains("::ffff:10.1.2.3")
    True
    """
    if not isinstance(text, str):
        raise ConfigError(f"network {show(text)} is not text; write it like 10.0.0.0/8")
    start, slash, length = text.partition("/")
    address = None if "%" in start else address_of(start)
    if address is None:
        raise ConfigError(
            f"network {show(text)}: {show(start)} is not an address; "
            f"write it like 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32"
        )
    version, value = address
    bits = _BITS[version]
    # In ::ffff:10.0.0.0/104 the first 96 bits say that it is IPv4.
    before = 96 if version == 4 and ":" in start else 0
    prefix_length = _LENGTHS.get(length, -1) - before if slash else bits
    if not 0 <= prefix_length <= bits:
        raise ConfigError(
            f"network {show(text)}: after the slash comes the number of leading bits, "
            f"{before} to {before + bits}; for example 10.0.0.0/8"
        )
    shift = bits - prefix_length
    network = Network(version, prefix_length, value >> shift)
    if value >> shift << shift != value:
        raise ConfigError(
            f"network {show(text)} has bits set after the first {length}; "
            f"write {network} for all of it, or the address alone"
        )
    return network
