"""Addresses that are denied again and again, for a block list of a gateway or a firewall."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network
from itertools import islice
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import Field

from ratekeeper.core.model import Request
from ratekeeper.service.admin.control import AdminContext
from ratekeeper.service.admin.operations import READ, AdminRoute, Control, error_responses
from ratekeeper.service.admin.problems import AdminError, ApiOutput
from ratekeeper.service.admin.records import RecorderOf

router = APIRouter(tags=["records"], route_class=AdminRoute)

AT_LEAST: Final = 1_000
# Networks that a block list must not contain; with more of them, the reply is incomplete.
EXEMPT_MAX: Final = 10_000
_PREFIX: Final = {4: 32, 6: 64}
_HERE: Final = (ip_network("127.0.0.0/8"), ip_network("::1"))

AnyNetwork = IPv4Network | IPv6Network


class RejectedOut(ApiOutput):
    """An address that was denied many times in a row."""

    network: str = Field(description="An IPv4 address, or the /64 of an IPv6 address.")
    denied: int = Field(description="Denials in a row, by all workers of this node.")
    age_seconds: float = Field(description="Seconds since the last denial.")


class RejectedPage(ApiOutput):
    """The addresses to block, and those that must never be blocked."""

    items: list[RejectedOut]
    exempt: list[str] = Field(description="Networks of the allow list and of trusted proxies.")
    exempt_omitted: bool = Field(description="True if `exempt` is incomplete.")


@router.get(
    "/rejected",
    operation_id="list_rejected",
    summary="Addresses that are denied again and again",
    responses=error_responses(*READ, 404),
)
async def list_rejected(
    control: Control,
    recorder: RecorderOf,
    at_least: Annotated[
        int, Query(ge=10, le=1_000_000_000, description="Denials in a row.")
    ] = AT_LEAST,
) -> RejectedPage:
    """Return addresses that rules by `ip` or the deny list denied this often in a row.

    A request that passes starts the count again, and so do ten minutes without a denial. The list
    never has an address of the allow list, of a trusted proxy or of this machine.
    """
    if recorder.subjects != "plain":
        raise AdminError(
            404,
            "NOT_RECORDED",
            "this service records no addresses; start it with --record-subjects plain",
        )
    context = control.context
    exempt = list(islice(exempt_networks(context), EXEMPT_MAX + 1))
    items = []
    for streak, age_s in recorder.denied_in_a_row(at_least):
        network = network_of(streak.address)
        if network is not None and not _is_exempt(context, streak.address, network, exempt):
            items.append(
                RejectedOut(network=str(network), denied=streak.denied, age_seconds=round(age_s, 3))
            )
    return RejectedPage(
        items=sorted(items, key=lambda each: -each.denied),
        exempt=[str(each) for each in exempt[:EXEMPT_MAX]],
        exempt_omitted=len(exempt) > EXEMPT_MAX,
    )


def network_of(address: str) -> AnyNetwork | None:
    """Return the network to block for an address; None if there is none.

    >>> network_of("192.0.2.7"), network_of("2001:db8::7"), network_of("unix")
    (IPv4Network('192.0.2.7/32'), IPv6Network('2001:db8::/64'), None)
    """
    try:
        network = ip_network(address)
    except ValueError:
        return None
    prefix = min(_PREFIX[network.version], network.prefixlen)
    return network if prefix == network.prefixlen else network.supernet(new_prefix=prefix)


def exempt_networks(context: AdminContext) -> Iterator[AnyNetwork]:
    """Yield the networks of the trusted proxies and of the allow list."""
    for proxies in context.identity.trusted_networks:
        yield ip_network(proxies)
    for network in context.limiter.compiled_rules.allowed_networks():
        yield ip_network(str(network))


def _is_exempt(
    context: AdminContext, address: str, network: AnyNetwork, exempt: Iterable[AnyNetwork]
) -> bool:
    if network.is_link_local or network.is_multicast:
        return True
    if context.limiter.compiled_rules.listed(Request(ip=address))[0] == "allow":
        return True
    return any(
        each.version == network.version and each.overlaps(network) for each in (*_HERE, *exempt)
    )
