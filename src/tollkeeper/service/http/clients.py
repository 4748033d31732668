"""The address of a client, as it is counted whichever way a request comes in.

Whoever has one address of IPv6 has a network of 2**64 of them, and could otherwise have as many
quotas. So an address stands for its network, by the network's first address; a middleware
(`web/addresses.py`) counts the same client under the same name.
"""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Final

from tollkeeper.rules.matching.patterns import address_of

IPV6_PREFIX: Final = 64


def counted_address(text: str) -> str:
    """An address as it is counted; what is none stays as it is.

    >>> counted_address("2001:db8::7"), counted_address("::ffff:192.0.2.7")
    ('2001:db8::', '192.0.2.7')
    """
    found = address_of(text) if ":" in text else None
    if found is None:
        return text
    version, number = found
    if version == 4:
        return ".".join(map(str, number.to_bytes(4)))
    shift = 0 if number == 1 else 128 - IPV6_PREFIX  # ::1 is this machine and no network
    return str(IPv6Address(number >> shift << shift))
