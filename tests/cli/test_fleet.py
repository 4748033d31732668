"""`ratekeeper fleet`: nodes, hit rates and counts."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.stub_service import run, stub_service

NODE = {
    "node": "eu-1",
    "address": "10.0.0.5:7946",
    "state": "alive",
    "this_node": True,
    "version": "0.1.0",
    "rules_version": "12",
    "region": "",
    "leased_units": 1_200,
    "pending_units": 7,
    "lag_seconds": None,
}
FLEET: dict[str, Any] = {
    "node_id": "eu-1",
    "gossip": True,
    "live_nodes": 2,
    "registered_nodes": 2,
    "nodes": [
        NODE,
        {
            **NODE,
            "node": "eu-2",
            "this_node": False,
            "address": "10.0.0.6:7946",
            "state": "suspected",
            "lag_seconds": 6.5,
        },
    ],
    "rules": [
        {
            "rule": "orders",
            "consistency": "leased",
            "allowed": 80,
            "denied": 5,
            "asked": 15,
            "hit_rate": 0.85,
        }
    ],
    "allowances": 1_200,
    "allowances_max": 100_000,
    "leased_units": 350,
    "pending_units": 7,
    "returned_units": 9,
    "charged_units": 4,
}


def test_the_nodes_and_the_rules() -> None:
    """This node is marked; every other one has its address and its lag."""
    with stub_service(200, FLEET) as service:
        found = run("fleet", url=service.url, TOKEN="rk_1")
    assert found.exit_code == 0, found.output
    assert [(each.method, each.target) for each in service.received] == [("GET", "/v1/admin/fleet")]
    assert found.output == (
        "NODE  STATE      VERSION  RULES  REGION  LEASED  PENDING  LAG\n"
        "eu-1  alive      0.1.0    12     -       1,200   7        -      this node\n"
        "eu-2  suspected  0.1.0    12     -       1,200   7        6.5 s  10.0.0.6:7946\n"
        "RULE    CONSISTENCY  ALLOWED  DENIED  ASKED  HIT RATE\n"
        "orders  leased       80       5       15     85.0%\n"
        "2 live; allowances 1,200 of 100,000; units: 350 leased, 7 pending, 9 given back, "
        "4 charged late\n"
    )


def test_json_is_the_answer_of_the_service() -> None:
    """Programs get every field."""
    with stub_service(200, FLEET) as service:
        found = run("fleet", "--json", url=service.url)
    assert json.loads(found.output) == {"exit_code": 0, **FLEET}


def test_what_an_operator_should_notice() -> None:
    """No gossip, lost gossip, different rules, failed reports, a full table: each has words."""
    other = {**NODE, "node": "eu-3", "rules_version": "11"}
    counts = {"registered_nodes": 9, "reports_failed": 2, "allowances_refused": 3}
    with stub_service(200, {**FLEET, **counts, "nodes": [NODE, other]}) as service:
        differ = run("fleet", url=service.url).output
    assert "the nodes have different versions of the rules" in differ
    joined = {**other, "rules_version": ""}
    with stub_service(200, {**FLEET, "nodes": [NODE, joined]}) as service:
        assert "different versions" not in run("fleet", url=service.url).output
    assert (
        "; 9 nodes have registered in the store; 2 reports failed; 3 allowances did not fit"
        in differ
    )
    with stub_service(200, {**FLEET, "gossip": False, "nodes": [NODE]}) as service:
        alone = run("fleet", url=service.url).output
    assert "this node does not gossip; start it with --gossip ADDRESS" in alone


def test_an_answer_of_another_program() -> None:
    """A service without the endpoint is an error, not an empty table."""
    with stub_service(200, {"items": []}) as service:
        found = run("fleet", url=service.url)
    assert found.exit_code == 2


def test_envoys_and_their_quotas() -> None:
    """A row for each bucket; an Envoy without any has one row; equal names are reported."""
    part = {"bucket": "tenant=acme", "rule": "tenants", "quota": "rate",
"has": "50/s of 100/s", "demand": 1_200.4}  # fmt: skip
    blanket = {"bucket": "tenant=x", "rule": "", "quota": "allow_all", "has": "unlimited",
               "demand": None}  # fmt: skip
    envoy = {"envoy": "edge", "node": "eu-1", "reported_seconds": 2.5, "duplicate": True}
    envoys = [{**envoy, "parts": [part, blanket]}, {**envoy, "parts": []}]
    with stub_service(200, {**FLEET, "envoys": envoys}) as service:
        found = run("fleet", url=service.url)
    assert found.output.endswith(
        "ENVOY  NODE  REPORT     DEMAND   BUCKET       RULE     QUOTA      HAS\n"
        "edge   eu-1  2.5 s ago  1,200/s  tenant=acme  tenants  rate       50/s of 100/s\n"
        "edge   eu-1  2.5 s ago  -        tenant=x     -        allow_all  unlimited\n"
        "edge   eu-1  2.5 s ago  -        -            -        -          -\n"
        "two Envoys have the same name; give each its own x-envoy-node\n"
    )
