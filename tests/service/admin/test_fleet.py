"""The fleet over HTTP: nodes, and what this node answers itself."""

from __future__ import annotations

import time
from pathlib import Path

from ratekeeper.core.version import __version__
from ratekeeper.rules.document.reading import read
from ratekeeper.service.http.envoys import EnvoyPart, EnvoyStatus
from tests.service.admin.client import RULES, Admin, admin, admin_of, template
from tests.stub_fleet import store_with_fleet

__all__ = ["admin", "template"]  # fixtures, found by name


async def test_a_node_without_a_fleet_is_alone(admin: Admin) -> None:
    """It names itself, its versions, and no counts."""
    found = (await admin.call("GET", "/fleet")).json()
    (node,) = found.pop("nodes")
    assert node == {
        "node": "node-1",
        "address": "",
        "state": "alive",
        "this_node": True,
        "version": __version__,
        "rules_version": admin.context.limiter.rules_status().version,
        "region": "",
        "leased_units": 0,
        "pending_units": 0,
        "lag_seconds": None,
    }
    assert (found["gossip"], found["live_nodes"], found["rules"]) == (False, 1, [])
    assert found["allowances_max"] == 0


async def test_the_nodes_and_the_counts_of_a_fleet(tmp_path: Path) -> None:
    """Each node with its state and status; each rule with its hit rate, busiest first."""
    async with admin_of(tmp_path, read(RULES), None, store=store_with_fleet()) as admin:
        found = (await admin.call("GET", "/fleet")).json()
    shown = [(each["node"], each["state"], each["lag_seconds"]) for each in found["nodes"]]
    assert shown == [("node-1", "alive", None), ("b", "alive", 0.25), ("c", "suspected", 6.5)]
    assert [each["this_node"] for each in found["nodes"]] == [True, False, False]
    assert found["nodes"][2]["rules_version"] == "v11"
    assert found["rules"] == [
        {
            "rule": "users",
            "consistency": "leased",
            "allowed": 80,
            "denied": 5,
            "asked": 15,
            "hit_rate": 0.85,
        },
        {
            "rule": "default",
            "consistency": "eventual",
            "allowed": 3,
            "denied": 0,
            "asked": 1,
            "hit_rate": 0.75,
        },
    ]
    del found["nodes"], found["rules"]
    assert found == {
        "node_id": "node-1",
        "node_header": "07204389",
        "gossip": True,
        "live_nodes": 3,
        "registered_nodes": 3,
        "allowances": 40,
        "allowances_max": 100_000,
        "allowances_refused": 2,
        "leased_units": 350,
        "pending_units": 6,
        "returned_units": 7,
        "charged_units": 9,
        "reports_failed": 1,
        "divergence_units": 2,
        "envoys": [],
    }


async def test_the_fleet_needs_a_token_that_may_read(admin: Admin) -> None:
    """The list names machines and their addresses."""
    for role, status in (("read", 200), ("admin", 200), ("check", 403)):
        headers = {"Authorization": f"Bearer {admin.secrets[role]}"}
        await admin.call("GET", "/fleet", status, headers=headers)
    await admin.rejected("GET", "/fleet", 401, headers={"Authorization": ""})
    await admin.rejected("GET", "/fleet?all=1", 400)


async def test_the_envoys_of_all_workers(admin: Admin) -> None:
    """Each with what it has; two streams of one name are marked."""
    part = EnvoyPart("tenant=acme", "tenants", "rate", "50/s of 100/s, burst 50", 80.5)
    now_s = time.time()
    streams = [
        EnvoyStatus(name, stream, "node-1", 7, "shop", now_s - 60, now_s - 3, 1, [part])
        for name, stream in (("edge", "1"), ("edge", "2"), ("other", "3"), ("", "4"), ("", "5"))
    ]
    admin.context.envoys.own = lambda: streams
    found = (await admin.call("GET", "/envoys")).json()["envoys"]
    assert [(each["envoy"], each["duplicate"]) for each in found] == [
        *(("", False), ("", False), ("edge", True), ("edge", True), ("other", False))
    ]
    other = found[-1]
    assert 60 <= other.pop("connected_seconds") < 90
    assert 3 <= other.pop("reported_seconds") < 33
    assert other == {
        "envoy": "other",
        "node": "node-1",
        "worker": 7,
        "domain": "shop",
        "duplicate": False,
        "buckets": 1,
        "parts": [
            {
                "bucket": "tenant=acme",
                "rule": "tenants",
                "quota": "rate",
                "has": "50/s of 100/s, burst 50",
                "demand": 80.5,
            }
        ],
    }
    assert len((await admin.call("GET", "/fleet")).json()["envoys"]) == 5
