"""The results of a simulated fleet: numbers and a table."""

from __future__ import annotations

from dataclasses import dataclass

from ratekeeper.core.clock import NS_PER_SECOND
from tests.simulator.checkers import percentile
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.network import NS_PER_MS


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The results of a run. Shares are from 0 to 1."""

    requests: int
    admitted: int
    denied: int
    failed: int
    """Denied because the authority did not answer in time."""
    locally: int
    """Admitted by the fleet's totals, while the authority did not answer."""
    over_units: int
    """Units by which the worst subject exceeded its limit, in any interval."""
    over_share: float
    """The same as a share of the limit."""
    fewer_requests: int
    """Requests that a perfect central limiter would have admitted in addition."""
    fewer_share: float
    """The same as a share of all requests."""
    in_node_share: float
    """Requests that a node answered without a call, denials included."""
    calls_per_request: float
    """Calls to the authority, reports included."""
    known_ms_p99: float
    """From a denial on one node until another node knows of it, by gossip."""
    stopped_ms_p99: float
    """From the first denial of a subject until no node admits it by itself. With `leased`, 0: the
    units of a lease are part of the limit."""
    joined_s_max: float
    """From the last start of a node until all nodes know all others."""
    noticed_s_max: float
    """From the death of a node until no node counts it any more."""
    gossip_bytes_per_s: float
    """The bytes that one node sends, headers included: the mean of all nodes."""
    gossip_bytes_per_s_max: float
    """The same for the node that sends most."""
    problems: tuple[str, ...]
    """The promises that were broken, such as an admission beyond a strict or leased limit."""


def summary_of(fleet: SimulatedFleet) -> FleetSummary:
    """Return the results of a fleet that has run."""
    counts, never_over = fleet.counts, fleet.never_over
    requests = max(counts.requests, 1)
    fewer = fleet.central.shortfall(counts.by_subject)
    return FleetSummary(
        requests=counts.requests,
        admitted=counts.admitted,
        denied=counts.denied,
        failed=counts.failed,
        locally=counts.locally,
        over_units=max(never_over.over.values(), default=0),
        over_share=never_over.overshoot(),
        fewer_requests=fewer,
        fewer_share=fewer / requests,
        in_node_share=counts.in_node / requests,
        calls_per_request=counts.calls / requests,
        known_ms_p99=percentile(fleet.denial_times.heard_ns, 0.99) / NS_PER_MS,
        stopped_ms_p99=percentile(fleet.stopped_ns, 0.99) / NS_PER_MS,
        joined_s_max=max(fleet.joined_ns, default=0) / NS_PER_SECOND,
        noticed_s_max=max(fleet.noticed_ns, default=0) / NS_PER_SECOND,
        gossip_bytes_per_s=sum(fleet.sent_bytes) / fleet.plan.nodes / fleet.plan.seconds,
        gossip_bytes_per_s_max=max(fleet.sent_bytes) / fleet.plan.seconds,
        problems=tuple(fleet.problems()),
    )


def rows_of(summary: FleetSummary) -> list[tuple[str, str]]:
    """Return the rows of a table: a name and a value."""
    mean_kb, most_kb = summary.gossip_bytes_per_s / 1_000, summary.gossip_bytes_per_s_max / 1_000
    return [
        ("requests", f"{summary.requests:,}"),
        ("admitted", f"{summary.admitted:,}"),
        ("denied", f"{summary.denied:,}"),
        ("failed: the authority did not answer", f"{summary.failed:,}"),
        ("admitted without the authority", f"{summary.locally:,}"),
        ("answered in the node", f"{summary.in_node_share:.1%}"),
        ("calls to the authority per request", f"{summary.calls_per_request:.3f}"),
        (
            "over the limit, worst subject and moment",
            f"{summary.over_units:,} units, {summary.over_share:.2%}",
        ),
        (
            "admitted fewer than a perfect central limiter",
            f"{summary.fewer_requests:,}, {summary.fewer_share:.3%} of requests",
        ),
        ("no node admits after the first denial, p99", f"{summary.stopped_ms_p99:.0f} ms"),
        ("other nodes know of a denial, p99", f"{summary.known_ms_p99:.1f} ms"),
        ("all nodes know each other", f"{summary.joined_s_max:.2f} s"),
        ("a dead node is noticed by all", f"{summary.noticed_s_max:.2f} s"),
        (
            "gossip of a node, mean and maximum",
            f"{mean_kb:.1f} and {most_kb:.1f} KB/s",
        ),
    ]
