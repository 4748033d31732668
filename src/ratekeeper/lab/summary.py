"""The results of a simulated fleet: numbers, a table, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.lab.checkers import percentile
from ratekeeper.lab.fleet import SimulatedFleet
from ratekeeper.lab.network import NS_PER_MS

_CHART_HEIGHT: Final = 8
_CHART_WIDTH_MAX: Final = 90
_SVG_WIDTH: Final = 900
_SVG_HEIGHT: Final = 320
_SVG_MARGIN: Final = 50


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


def chart_of(fleet: SimulatedFleet) -> list[str]:
    """Return a plot of text: requests and admissions in each second."""
    seconds = fleet.counts.seconds
    group = -(-len(seconds) // _CHART_WIDTH_MAX) or 1
    columns = [
        (
            sum(each.requests for each in seconds[at : at + group]) / group,
            sum(each.admitted for each in seconds[at : at + group]) / group,
        )
        for at in range(0, len(seconds), group)
    ]
    most = max((requests for requests, _ in columns), default=0) or 1
    lines = []
    for row in range(_CHART_HEIGHT, 0, -1):
        least = (row - 0.5) * most / _CHART_HEIGHT
        bars = "".join(
            "█" if admitted >= least else "░" if requests >= least else " "
            for requests, admitted in columns
        )
        lines.append(f"{row * most / _CHART_HEIGHT:9,.0f} │{bars}")
    lines.append(f"{'':9} └{'─' * len(columns)}")
    lines.append(f"{'':11}a column is {group} s; per second: █ admitted, ░ denied")
    return lines


def svg_of(fleet: SimulatedFleet) -> str:
    """Return a plot as SVG: a line each for requests, admissions, and answers in the node."""
    seconds = fleet.counts.seconds
    series = (
        ("requests", "#b0b0b0", [each.requests for each in seconds]),
        ("admitted", "#1b7f4b", [each.admitted for each in seconds]),
        ("perfect limiter", "#c2410c", [each.ideal for each in seconds]),
        ("answered in the node", "#2563eb", [each.in_node for each in seconds]),
    )
    most = max((max(values, default=0) for _, _, values in series), default=0) or 1
    right, bottom = _SVG_WIDTH - _SVG_MARGIN, _SVG_HEIGHT - _SVG_MARGIN
    lines = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" '
        f'points="{_points(values, most, bottom)}"/>\n'
        f'<text x="{_SVG_MARGIN + 160 * at}" y="{_SVG_HEIGHT - 8}" fill="{colour}">{name}</text>\n'
        for at, (name, colour, values) in enumerate(series)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {_SVG_HEIGHT}"
  font-family="sans-serif" font-size="12">
<rect width="{_SVG_WIDTH}" height="{_SVG_HEIGHT}" fill="white"/>
<path d="M{_SVG_MARGIN} 20V{bottom}H{right}" fill="none" stroke="black"/>
<text x="{_SVG_MARGIN}" y="{bottom + 18}">0 s</text>
<text x="{right}" y="{bottom + 18}" text-anchor="end">{len(seconds)} s</text>
<text x="{_SVG_MARGIN}" y="14" text-anchor="middle">{most:,}/s</text>
{lines}</svg>
"""


def _points(values: Sequence[int], most: int, bottom: int) -> str:
    width = _SVG_WIDTH - 2 * _SVG_MARGIN
    step = width / max(len(values) - 1, 1)
    return " ".join(
        f"{_SVG_MARGIN + at * step:.1f},{bottom - value * (bottom - 20) / most:.1f}"
        for at, value in enumerate(values)
    )
