"""Real services in two regions, each with its own Redis: what an operator sees, and shares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.metrics.counters import FAMILIES
from ratekeeper.regions.exchange import LIVE_S
from tests.cli.stub_service import run
from tests.redis_servers.single import Single
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import ServiceProcess

WAIT_S = 60.0
RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "plan",
            "by": ["user"],
            # Its counts do not change with time.
            "limits": [{"limit": 1_000, "per": "365d", "algorithm": "fixed_window"}],
            "scope": "global",
            "across_regions": "exact",
        }
    ],
}


class TwoRegions:
    """A service in eu and one in us."""

    def __init__(self, servers: dict[str, Single], folder: Path) -> None:
        self.servers = servers
        self.secrets = secrets_of(folder)
        table = [
            part
            for name, server in servers.items()
            for part in ("--regions", f"{name}={server.uri}?deadline_ms=5000&connect_ms=5000")
        ]
        self.services = {
            name: ServiceProcess(
                RULES,
                *("--region", name, *table, "--node-id", f"{name}-1"),
                *("--tokens", str(folder / "tokens.json"), "--drain-seconds", "0"),
                workers=1,
                records=True,
            )
            for name in servers
        }

    def ask(self, region: str, method: str, path: str, body: Any = None) -> Any:
        """Call a service with the administrator's token; return the answer."""
        headers = {"Authorization": f"Bearer {self.secrets['admin']}"}
        return self.services[region].ask(method, path, body, headers=headers)

    def status(self, region: str) -> dict[str, dict[str, Any]]:
        """Return the status of all regions, as one of them shows it."""
        found = self.ask(region, "GET", "/v1/admin/regions").data
        return {each["region"]: each for each in found["regions"]}

    def command(self, region: str, *arguments: str) -> Any:
        """Run `ratekeeper` against a service; return its JSON."""
        url, token = self.services[region].url, self.secrets["admin"]
        done = run(*arguments, "--json", "--timeout", "60", url=url, TOKEN=token)
        return json.loads(done.stdout)

    def all_up(self) -> bool:
        """Return True if both regions have a leader, a share and a link."""
        return all(
            each["leader"] and each["share"] == 0.5 and each["links"][0]["state"] == "up"
            for region in self.services
            for each in self.status(region).values()
        )


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRegions]:
    """Start both, and wait until they exchange totals."""
    with Single() as eu, Single() as us:
        found = TwoRegions({"eu": eu, "us": us}, tmp_path_factory.mktemp("regions"))
        with found.services["eu"], found.services["us"]:
            until(found.all_up, "both regions work", WAIT_S, lambda: found.status("eu"))
            yield found


def test_the_usage_of_one_region_is_seen_in_the_other(regions: TwoRegions) -> None:
    """In the quota: the units that count, each region's part, and its age."""
    assert regions.ask("eu", "POST", "/v1/check", {"user": "ann", "cost": 30}).status == 200

    def seen() -> dict[str, Any]:
        [rule] = regions.ask("us", "GET", "/v1/quota?user=ann").data["rules"]
        return {"used": rule["limits"][0]["used"], "regions": rule["regions"]}

    until(lambda: seen()["used"] == 30, "us has learnt it", WAIT_S, seen)
    parts = {each["region"]: each for each in seen()["regions"]}
    assert (parts["eu"]["units"], parts["us"]["units"]) == (30, 0)
    assert parts["eu"]["age_seconds"] < WAIT_S
    shown = regions.command("us", "quota", "--user", "ann")
    units = {each["region"]: each["units"] for each in shown["rules"][0]["regions"]}
    assert units == {"eu": 30, "us": 0}


def test_every_metric_of_a_region_has_a_value(regions: TwoRegions) -> None:
    """Labels are the names of the regions."""
    names = {each.full_name for each in FAMILIES if each.name.startswith("region_")}

    def missing() -> set[str]:
        regions.ask("eu", "POST", "/v1/check", {"user": "bob"})
        text = regions.services["eu"].ask("GET", "/metrics").body.decode()
        lines = [line for line in text.splitlines() if line.startswith("ratekeeper_region_")]
        assert all('region="eu"' in line for line in lines)
        found = {
            re.sub(r"(_seconds)_(bucket|count|sum)$", r"\1", re.split(r"[{ ]", line)[0])
            for line in lines
        }
        values = {'ratekeeper_region_leader{region="eu"} 1.0'}
        values |= {'ratekeeper_region_link_state{peer="us",region="eu"} 0.0'}
        # Nothing of another region, or of no link, is reported.
        return (names - found) | {each for each in values if each not in lines}

    until(lambda: not missing(), "every metric has a value", WAIT_S, missing)


def test_the_lag_grows_while_the_other_region_cannot_be_reached(regions: TwoRegions) -> None:
    """It passes the time after which a link is down. With the link, the lag ends."""

    def lag() -> float:
        text = regions.services["eu"].ask("GET", "/metrics").body.decode()
        line = 'ratekeeper_region_lag_seconds{peer="us",region="eu"} '
        return max(float(each.removeprefix(line)) for each in text.splitlines() if line in each)

    regions.servers["us"].pause()
    try:
        assert regions.ask("eu", "POST", "/v1/check", {"user": "far"}).status == 200
        until(lambda: lag() > LIVE_S + 2, "the lag grows", WAIT_S, lag)
    finally:
        regions.servers["us"].resume()
    until(lambda: lag() == 0 and regions.all_up(), "all is reported", WAIT_S, lag)


def test_the_region_at_a_glance(regions: TwoRegions) -> None:
    """The activity of a node names the leader of its region and counts the links."""
    found = regions.ask("eu", "GET", "/v1/admin/activity").data["now"]["regions"]
    assert found.pop("leader")
    assert found == {"region": "eu", "up": 1, "down": 0, "refused": 0, "problem": ""}


def test_a_cost_above_the_share_is_refused_with_the_share(regions: TwoRegions) -> None:
    """It can never pass in this region, although the limit itself would hold it."""
    answer = regions.ask("us", "POST", "/v1/check", {"user": "max", "cost": 600})
    assert (answer.status, answer.data["error"]["details"]["limit"]) == (422, 500)
    assert "at most 500 each" in answer.data["detail"]


def test_decisions_and_usage_carry_the_region(regions: TwoRegions) -> None:
    """Records of a service have the name of its region."""
    spent = [regions.ask("us", "POST", "/v1/check", {"user": "eve", "cost": 400}) for _ in "12"]
    assert [each.status for each in spent] == [200, 429]

    def recorded() -> list[str | None]:
        path = "/v1/admin/decisions?outcome=denied&user=eve"
        return [each["region"] for each in regions.ask("us", "GET", path).data["items"]]

    def used() -> list[str | None]:
        path = "/v1/admin/usage?subject=user:eve&region=us"
        return [each["region"] for each in regions.ask("us", "GET", path).data["items"]]

    until(lambda: recorded() == ["us"] == used(), "the denial is recorded", WAIT_S, recorded)


def test_a_region_is_removed_and_added(regions: TwoRegions) -> None:
    """The shares change when all regions have heard of it, and are again what they were."""
    removed = regions.command("eu", "regions", "remove", "us", "--reason", "a test")
    assert (removed["exit_code"], removed["shares"]) == (0, {"eu": 1.0})

    def shares() -> dict[str, float]:
        return {name: each["share"] for name, each in regions.status("eu").items()}

    until(lambda: shares() == {"eu": 1.0, "us": 0.0}, "eu has all", WAIT_S, shares)
    denied = regions.ask("us", "POST", "/v1/check", {"user": "new"})
    assert denied.data["degraded"]  # the failure policy decides: the region has no share
    added = regions.command("us", "regions", "add", "us", "--share", "0.5")
    assert added["shares"] == {"eu": 0.5, "us": 0.5}
    until(regions.all_up, "both have their shares", WAIT_S, shares)


def test_an_unknown_region_is_named_with_the_known_ones(regions: TwoRegions) -> None:
    """By the service and by the command."""
    answer = regions.command("eu", "regions", "add", "mars")
    assert answer["exit_code"] == 2
    assert "eu, us" in json.dumps(answer)
