"""`ratekeeper fleet`: the nodes that share the limits, and the checks that a node answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ratekeeper.cli.common import (
    OK,
    JsonOption,
    print_json,
    print_table,
    print_text,
    seconds_text,
    with_options,
)
from ratekeeper.cli.service_client import ServiceClient, json_objects, service_client

_PATH: Final = "/v1/admin/fleet"
_NODES: Final = ("NODE", "STATE", "VERSION", "RULES", "REGION", "LEASED", "PENDING", "LAG", "")
_RULES: Final = ("RULE", "CONSISTENCY", "ALLOWED", "DENIED", "ASKED", "HIT RATE")
_ENVOYS: Final = ("ENVOY", "NODE", "REPORT", "DEMAND", "BUCKET", "RULE", "QUOTA", "HAS")
# Of one Envoy; the busiest come first.
_PARTS_MAX: Final = 20


@with_options(service=service_client)
def fleet(service: ServiceClient, as_json: JsonOption = False) -> None:
    """Show the nodes of the fleet as one node knows them, and what that node answers itself.

    LAG is the time since the last news of a node. HIT RATE is the share of the checks that the node
    answered without a call of the authority. Needs a token with the role read or admin, if the
    service has a token file.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper fleet

    Example: ratekeeper fleet --url https://limits.example.com --json
    """
    with service:
        found = service.call("GET", _PATH, expected="nodes")
    if as_json:
        print_json({"exit_code": OK, **found})
        return
    nodes = json_objects(found.get("nodes"))
    print_table(_NODES, [_node_row(each) for each in nodes])
    if not found.get("gossip"):
        print_text("this node does not gossip; start it with --gossip ADDRESS to see the others")
    # A node that has just joined has not reported its version yet.
    alive = [each for each in nodes if each.get("state") == "alive"]
    if len({each.get("rules_version") for each in alive if each.get("rules_version")}) > 1:
        print_text("the nodes have different versions of the rules")
    rules = json_objects(found.get("rules"))
    if rules:
        print_table(_RULES, [_rule_row(each) for each in rules])
    print_text(_counts_text(found))
    envoys = json_objects(found.get("envoys"))
    if envoys:
        print_table(_ENVOYS, [row for each in envoys for row in _envoy_rows(each)])
    if any(each.get("duplicate") for each in envoys):
        print_text("two Envoys have the same name; give each its own x-envoy-node")


def _envoy_rows(envoy: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each bucket; an Envoy without buckets has one row."""
    reported_s = envoy.get("reported_seconds") or 0.0
    head = (
        str(envoy.get("envoy") or "-"),
        str(envoy.get("node")),
        f"{seconds_text(reported_s)} ago",
    )
    parts = json_objects(envoy.get("parts"))[:_PARTS_MAX]
    return [(*head, *_part_row(part)) for part in parts] or [(*head, "-", "-", "-", "-", "-")]


def _part_row(part: Mapping[str, Any]) -> tuple[str, ...]:
    demand = part.get("demand")
    return (
        "-" if demand is None else f"{demand:,.0f}/s",
        str(part.get("bucket")),
        str(part.get("rule") or "-"),
        str(part.get("quota")),
        str(part.get("has") or "-"),
    )


def _node_row(node: Mapping[str, Any]) -> tuple[str, ...]:
    lag = node.get("lag_seconds")
    return (
        str(node.get("node")),
        str(node.get("state")),
        str(node.get("version") or "-"),
        str(node.get("rules_version") or "-"),
        str(node.get("region") or "-"),
        f"{node.get('leased_units', 0):,}",
        f"{node.get('pending_units', 0):,}",
        "-" if lag is None else seconds_text(lag),
        "this node" if node.get("this_node") else str(node.get("address", "")),
    )


def _rule_row(rule: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (f"{rule.get(name, 0):,}" for name in ("allowed", "denied", "asked"))
    rate = f"{rule.get('hit_rate', 0.0):.1%}"
    return (str(rule.get("rule")), str(rule.get("consistency")), *counts, rate)


def _counts_text(found: dict[str, Any]) -> str:
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    text = (
        f"{counts.get('live_nodes', 1):,} live; allowances {counts.get('allowances', 0):,} of "
        f"{counts.get('allowances_max', 0):,}; units: {counts.get('leased_units', 0):,} leased, "
        f"{counts.get('pending_units', 0):,} pending, {counts.get('returned_units', 0):,} given "
        f"back, {counts.get('charged_units', 0):,} charged late"
    )
    if (registered := counts.get("registered_nodes", 0)) > counts.get("live_nodes", 1):
        text += f"; {registered:,} nodes have registered in the store"
    if counts.get("reports_failed"):
        text += f"; {counts['reports_failed']:,} reports failed"
    if counts.get("allowances_refused"):
        text += f"; {counts['allowances_refused']:,} allowances did not fit"
    return text
