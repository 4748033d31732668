"""Limiters of two regions on two real Redis servers: all verbs, mixed rules and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from ratekeeper import AsyncLimiter, ConfigError, Limiter, Regions, Request, StoreUnavailable
from ratekeeper.cli.main import app
from ratekeeper.decide.region_monitor import RegionMonitor
from ratekeeper.decide.regional import RegionalCounts
from ratekeeper.rules.document.reading import read
from tests.redis_servers import Single
from tests.redis_servers.waiting import until

# A machine that is busy with other tests starts a leader in this time.
START_S = 60.0
# Windows of a day: buckets would refill while a test runs.
RULES = """
version: 1
rules:
  - {id: here, by: user, match: {user: "*"}, limits: 20/hour}
  - id: all
    by: tenant
    match: {tenant: "*"}
    limits: {limit: 10, per: 1d, algorithm: fixed_window}
    scope: global
  - id: never-over
    by: api_key
    match: {api_key: "*"}
    limits:
      - {limit: 10, per: 1d, algorithm: fixed_window}
      - {limit: 100, per: 7d, algorithm: fixed_window}
    scope: global
    across_regions: exact
  - id: trial
    by: tenant
    match: {tenant: "*"}
    limits: {limit: 1, per: 1d, algorithm: fixed_window}
    scope: global
    mode: shadow
"""


class Node:
    """A limiter of either kind in one region, called from this thread."""

    def __init__(self, kind: Any, regions: Regions, runner: asyncio.Runner, **more: Any) -> None:
        self._run = runner.run
        self.rules = {rule.id: rule for rule in read(RULES).rules}
        self.limiter = kind.from_rules(RULES, regions=regions, follow=False, **more)

    def __call__(self, verb: str, *args: Any, **more: Any) -> Any:
        found = getattr(self.limiter, verb)(*args, **more)
        return self._run(found) if asyncio.iscoroutine(found) else found

    def left(self, **request: str) -> int:
        """Return the remaining units of a request."""
        found: int = self("peek", Request(**request), 0).remaining
        return found

    def used(self, rule: str, subject: str) -> int:
        """Return the units of a global rule that count in all regions, as this region knows."""
        counts: RegionalCounts = self.limiter.store.regional
        usage = self._run(counts.usage(self.rules[rule].limits, rule, subject))
        return usage.used[0]


class TwoRegions:
    """A Redis for each region, and nodes in both."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.servers = {region: stack.enter_context(Single()) for region in ("eu", "us")}
        self._stores = {
            region: f"{server.uri}?deadline_ms=5000&prefix={uuid4().hex[:6]}"
            for region, server in self.servers.items()
        }
        self._runner = stack.enter_context(asyncio.Runner())
        self._monitors: list[RegionMonitor] = []

    @property
    def is_linked(self) -> bool:
        """Whether the leaders of both regions, which are among these nodes, hear each other."""
        found = [monitor.here() for monitor in self._monitors]
        links = [link.state for each in found if each is not None for link in each.links]
        return links == ["up", "up"]

    def regions(self, region: str) -> Regions:
        """Return the settings of a region."""
        return Regions(region, self._stores)

    def node(self, kind: Any, region: str, **more: Any) -> Node:
        """Return a node, when its region has its share."""
        node = Node(kind, self.regions(region), self._runner, **more)
        self._stack.callback(node, "close")
        self._monitors.append(node.limiter.regions)
        probe = Request(api_key="probe")
        until(lambda: not node("peek", probe, 0).degraded, f"{region} has a share", START_S)
        return node


@pytest.fixture(scope="module")
def two() -> Iterator[TwoRegions]:
    """Two regions."""
    with ExitStack() as stack:
        yield TwoRegions(stack)


@pytest.fixture(scope="module", params=[Limiter, AsyncLimiter])
def nodes(request: pytest.FixtureRequest, two: TwoRegions) -> tuple[Node, Node]:
    """A node in each region, for both drivers."""
    eu, us = two.node(request.param, "eu"), two.node(request.param, "us")
    until(lambda: two.is_linked, "the regions exchange reports", START_S)
    return eu, us


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return uuid4().hex


def learnt(node: Node, rule: str, subject: str, units: int) -> None:
    """Wait until a region knows that so many units count, of all regions."""
    until(lambda: node.used(rule, subject) == units, f"{units} are known", START_S)


def test_regions_share_a_global_rule_and_not_a_regional_one(
    nodes: tuple[Node, Node], name: str
) -> None:
    """All verbs, in both modes: what one region spends and gives back, the other learns."""
    eu, us = nodes
    tenant, subject = Request(tenant=name), f"tenant:{name}"
    decision = eu("check", tenant, 4)
    assert (decision.allowed, decision.rule) == (True, "all")
    learnt(us, "all", subject, 4)
    assert eu("settle", tenant, 4, 7, decision).charged == 7
    learnt(us, "all", subject, 7)
    eu("refund", tenant, 2, decision)
    learnt(us, "all", subject, 5)
    us("grant", tenant, 3)
    assert us("check", tenant, 3).allowed
    until(lambda: eu.used("all", subject) == us.used("all", subject), "both know it", START_S)
    eu("reset", tenant)
    assert (eu.used("all", subject), us.used("all", subject)) == (0, 0)


def test_an_exact_rule_and_a_regional_one(nodes: tuple[Node, Node], name: str) -> None:
    """A region has half of what is left of an exact limit, and all of a regional one."""
    eu, us = nodes
    assert eu("check", Request(api_key=name), 5).allowed
    assert not eu("check", Request(api_key=name), 5).allowed
    learnt(us, "never-over", f"api_key:{name}", 5)
    assert us.left(api_key=name) == 2
    assert eu("check", Request(user=name), 15).allowed
    assert us.left(user=name) == 20


def test_a_mixed_request_passes_whole_or_costs_nothing(nodes: tuple[Node, Node], name: str) -> None:
    """On real Redis: the regional rule is charged in one script, the global ones in others."""
    eu, _ = nodes
    whole = Request(user=name, tenant=name, api_key=name)

    def used() -> tuple[int, ...]:
        shared = eu.used("all", f"tenant:{name}"), eu.used("never-over", f"api_key:{name}")
        return 20 - eu.left(user=name), *shared

    assert eu("check", whole, 3).allowed
    assert used() == (3, 3, 3)
    # Half of what is left of the exact limit: 3 at most, if the other region has accepted.
    denied = eu("evaluate", whole, 4)
    assert (denied.decision.allowed, denied.decision.rule) == (False, "never-over")
    assert used() == (3, 3, 3)
    assert eu("check", Request(user=name), 16).allowed
    denied = eu("check", whole, 2)
    assert (denied.allowed, denied.rule) == (False, "here")
    assert used() == (19, 3, 3)
    together = eu("evaluate_all", [(Request(tenant=name), 5), (Request(api_key=name), 4)])
    assert [each.decision.allowed for each in together] == [True, False]
    assert used() == (19, 3, 3)


def test_a_shadow_rule_can_be_global(nodes: tuple[Node, Node], name: str) -> None:
    """It is charged and counted, and never denies; a refund returns its units as well."""
    eu, _ = nodes
    first, second = (eu("evaluate", Request(tenant=name)) for _ in range(2))
    assert (first.shadow_denied, second.shadow_denied) == ((), ("trial",))
    assert second.decision.allowed
    eu("refund", Request(tenant=name), 1, first.decision)
    assert eu.left(tenant=name) == 9


def test_the_counts_are_explained_and_not_taken_for_others(
    nodes: tuple[Node, Node], two: TwoRegions, name: str, tmp_path: Any
) -> None:
    """`rules explain` reads them from the region's Redis, and `reconcile` knows the keys."""
    eu, _ = nodes
    eu("check", Request(tenant=name), 4)
    path = tmp_path / "limits.yaml"
    path.write_text(RULES)
    run = CliRunner()
    store = two.regions("eu").store
    found = run.invoke(app, ["rules", "explain", str(path), "--tenant", name, "--json"])
    by_id = {rule["id"]: rule for rule in json.loads(found.stdout)["rules"]}
    assert by_id["all"]["decision"]["remaining"] == 10  # without a store: as one region
    assert (by_id["all"]["scope"], by_id["never-over"]["across_regions"]) == ("global", "exact")
    found = run.invoke(
        app, ["rules", "explain", str(path), "--tenant", name, "--json", "--store", store]
    )
    by_id = {rule["id"]: rule for rule in json.loads(found.stdout)["rules"]}
    assert by_id["all"]["decision"]["remaining"] == 6
    checked = run.invoke(app, ["reconcile", "--store", store, "--rules", str(path), "--json"])
    levels = {each["check"]: each["level"] for each in json.loads(checked.stdout)["findings"]}
    assert "problem" not in levels.values(), checked.stdout


def test_each_rule_has_its_answer_if_the_regions_redis_fails(name: str) -> None:
    """By its failure policy: local has the share of the region. The other region goes on."""
    with ExitStack() as stack:
        two = TwoRegions(stack)
        eu, us = two.node(Limiter, "eu", on_failure="local"), two.node(Limiter, "us")
        two.servers["eu"].stop()
        answers = [eu("check", Request(tenant=name)) for _ in range(8)]
        assert [each.allowed for each in answers] == [True] * 5 + [False] * 3
        assert all(each.degraded for each in answers)
        with pytest.raises(StoreUnavailable):
            eu("reset", Request(tenant=name))
        with pytest.raises(StoreUnavailable, match="reset, but not in eu"):
            us("reset", Request(tenant=name))
        assert us("check", Request(tenant=name), 3).allowed
        eu.limiter.close()


def test_a_region_whose_counts_no_leader_has_set_up_is_degraded() -> None:
    """A process that does not sync: its failure policy answers until another one leads."""
    with Single() as server:
        regions = Regions("eu", {"eu": server.uri}, sync=False)
        with Limiter("5/minute", regions=regions, scope="global", on_failure="closed") as limiter:
            denied = limiter.check("user:1")
            assert (denied.allowed, denied.degraded) == (False, True)
        with pytest.raises(ConfigError, match="store has no effect with regions"):
            Limiter("5/minute", regions=regions, store="redis://other")
