"""The page of `console/fleet.py`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.decide.fleet_monitor import FleetNode
from ratekeeper.service.console.fleet import NODES_PER_PAGE, warnings_of
from ratekeeper.service.http.envoys import EnvoyPart, EnvoyStatus
from tests.service.console.client import ConsoleClient, console_of
from tests.stub_fleet import StubFleet, store_with_fleet
from tests.stub_regions import store_with_regions

PARTIAL = {"HX-Request": "true"}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ConsoleClient]:
    """Yield an operator of a node with two others, in one of three regions."""
    store = store_with_fleet(store_with_regions())
    async with console_of(tmp_path, None, store=store) as found:
        yield await found.log_in("read")


def nodes_of(fleet: ConsoleClient) -> list[FleetNode]:
    """Return the nodes that the node of a client knows, for changes."""
    known = fleet.context.limiter.fleet
    assert isinstance(known, StubFleet)
    return known.known


async def test_a_single_node_is_told_how_to_gossip(console: ConsoleClient) -> None:
    """It sees itself, and how to get a fleet, local answers and regions."""
    text = await console.get("/fleet")
    assert "node-1 <small>(this node)</small>" in text
    assert "This node does not gossip" in text
    assert "--gossip 10.0.0.5:7946 --gossip-key" in text
    assert "consistency: leased" in text
    assert "This service has no regions." in text
    assert "Look at this first" not in text
    assert "Envoys" not in text


async def test_the_nodes_of_a_fleet(fleet: ConsoleClient) -> None:
    """Each with its state, version, leases, pending charges and lag; those in trouble first."""
    text = await fleet.get("/fleet")
    assert text.index("(this node)") < text.index(">c<") < text.index(">b<")
    assert '<span class="tag warn">suspected</span></td><td class="number">6.5 s</td>' in text
    assert (
        '<td class="number">250 ms</td><td class="number">3</td><td class="number">6</td>' in text
    )
    assert "c is suspected." in text
    assert "does not gossip" not in text
    assert 'value="0.85"' in text
    assert "40 of 100,000" in text
    assert "2 did not fit" in text


async def test_the_regions_and_their_links(fleet: ConsoleClient) -> None:
    """Each region with its leader, share and excess; each link with its state and problem."""
    text = await fleet.get("/fleet")
    assert "eu <small>(this region)</small></th><td>eu-1/4711</td>" in text
    assert "soon 50.0 %" in text
    assert "Region eu does not exchange totals with ap." in text
    assert "Region ap: no answer within 2 s." in text
    assert '<span class="tag bad">refused</span>' in text
    assert "this is the store of region sa" in text
    assert "<dt>Excess, all regions</dt><dd>7</dd>" in text


async def test_the_page_asks_for_its_content_alone(fleet: ConsoleClient) -> None:
    """htmx gets the fragment, with the state of now."""
    nodes_of(fleet)[2] = replace(nodes_of(fleet)[2], state="dead")
    text = await fleet.get("/fleet", headers=PARTIAL)
    assert text.lstrip().startswith("<section")
    assert "c is dead." in text
    assert "<html" not in text


async def test_many_nodes_have_pages(fleet: ConsoleClient) -> None:
    """A page has at most so many nodes, and a page that does not exist is the last one."""
    known = nodes_of(fleet)
    template = known[1]
    known[1:] = [replace(template, name=f"n{i:04}") for i in range(2 * NODES_PER_PAGE + 10)]
    first = await fleet.get("/fleet")
    assert (first.count('<th scope="row">n'), "Nodes before" in first) == (NODES_PER_PAGE, False)
    assert 'href="/console/fleet?from=100"' in first
    last = await fleet.get("/fleet?from=99999")
    assert 'hx-get="/console/fleet?from=200"' in last
    assert "n0209" in last
    assert "Nodes after" not in last
    for odd in ("x", "-1", "9" * 30, "²"):
        assert "n0000" in await fleet.get(f"/fleet?from={odd}")


async def test_nodes_are_shown_if_regions_cannot_be_read(
    fleet: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page then says why."""

    async def fails() -> Any:
        raise StoreUnavailable("the Redis of region eu does not answer")

    monkeypatch.setattr(fleet.context.limiter.regions, "status", fails)
    text = await fleet.get("/fleet")
    assert "The regions cannot be read: the Redis of region eu does not answer" in text
    assert "(this node)" in text


async def test_the_envoys(fleet: ConsoleClient) -> None:
    """Each Envoy with what it has; its names are text."""
    part = EnvoyPart("tenant=<b>", "tenants", "rate", "50/s of 100/s, burst 50", 80.5)
    now_s = time.time()
    streams = [
        EnvoyStatus("<i>edge", stream, "node-1", 7, "shop", now_s, now_s, 1, [part])
        for stream in ("1", "2")
    ]
    fleet.context.envoys.own = lambda: streams
    text = await fleet.get("/fleet")
    assert '&lt;i&gt;edge <span class="tag warn">name used twice</span>' in text
    assert "<code>tenant=&lt;b&gt;</code>: 50/s of 100/s, burst 50" in text


def test_versions_that_differ_are_a_warning() -> None:
    """Nodes that are not alive do not count: they may be old."""
    nodes = [
        {"node": "a", "state": "alive", "version": "1", "rules_version": "7"},
        {"node": "b", "state": "alive", "version": "2", "rules_version": "7"},
        {"node": "c", "state": "alive", "version": "2", "rules_version": ""},
        {"node": "d", "state": "dead", "version": "0", "rules_version": "6"},
    ]
    assert warnings_of(nodes, []) == [
        "d is dead.",
        "Nodes run different versions of Ratekeeper: 2 (2) and 1 (1).",
        "Nodes have different rules in force: 7 (2) and none (1).",
    ]


def test_registered_nodes_that_do_not_gossip_are_a_warning() -> None:
    """Every node may believe that it is alone."""
    assert warnings_of([], [], 2) == ["2 more nodes have registered in the store than gossip here."]
    assert not warnings_of([], [], -1)  # they are not counted yet


def test_a_region_without_a_leader_is_a_warning() -> None:
    """Its totals are not exchanged."""
    region = {"region": "eu", "problem": "", "leader": None, "links": []}
    (found,) = warnings_of([], [region])
    assert found == "Region eu has no leader, so its totals are not exchanged."
