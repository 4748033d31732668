"""Real services that gossip on loopback and share a real Redis."""

from __future__ import annotations

import json
import re
import secrets
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import Limiter, Request
from ratekeeper.fleet.settings import split_address
from ratekeeper.metrics.counters import FAMILIES
from tests.conformance.stores import PATIENT
from tests.faults.conditions import lost_datagrams
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.single import Single
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import ServiceProcess, run_to_end

WAIT_S = 60.0
DEAD_S = 6.0
RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "users",
            "match": {"user": "*"},
            "by": ["user"],
            "limits": ["3/hour"],
            "consistency": "leased",
        },
        {
            "id": "tenants",
            "match": {"tenant": "*"},
            "by": ["tenant"],
            "limits": ["100000/hour"],
            "consistency": "leased",
        },
        # Their counts do not change with time.
        {
            "id": "keys",
            "match": {"api_key": "*"},
            "by": ["api_key"],
            "limits": [{"limit": 10_000, "per": "365d", "algorithm": "fixed_window"}],
            "consistency": "leased",
        },
        {
            "id": "addresses",
            "match": {"ip": "192.0.2.0/24"},
            "by": ["ip"],
            "limits": [{"limit": 10_000, "per": "365d", "algorithm": "fixed_window"}],
            "consistency": "eventual",
        },
    ],
}


class Fleet:
    """Two services, each with the address of the other."""

    def __init__(self, redis: Single, folder: Path) -> None:
        self.redis = redis
        self.token = secrets_of(folder)["admin"]
        key = folder / "gossip.key"
        key.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
        key.chmod(0o600)
        self.addresses = [f"{HOST}:{free_port()}" for _ in range(2)]
        self.services = [
            ServiceProcess(
                RULES,
                *("--store", f"{redis.uri}?{PATIENT}", "--gossip", own, "--gossip-key", str(key)),
                *("--peers", other, "--dead-seconds", f"{DEAD_S:g}", "--node-id", f"node-{number}"),
                *("--tokens", str(folder / "tokens.json"), "--drain-seconds", "0"),
                workers=workers,
            )
            for number, workers, own, other in (
                (0, 2, *self.addresses),
                (1, 1, *reversed(self.addresses)),
            )
        ]

    def seen(self, by: int) -> dict[str, Any]:
        """Return the answer of one service; of several workers, that of any."""
        headers = {"Authorization": f"Bearer {self.token}"}
        found: dict[str, Any] = (
            self.services[by].ask("GET", "/v1/admin/fleet", headers=headers).data
        )
        return found

    def states(self, by: int) -> dict[str, str]:
        """Return the states of the nodes by their addresses, as one service knows them."""
        return {each["address"]: each["state"] for each in self.seen(by)["nodes"]}

    def check(self, at: int, **fields: Any) -> int:
        """Check a request at one service; return the status."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return self.services[at].ask("POST", "/v1/check", fields, headers).status


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run Redis and two services."""
    with Single() as redis:
        found = Fleet(redis, tmp_path_factory.mktemp("fleet"))
        with found.services[0], found.services[1]:
            yield found


def _sees(fleet: Fleet, by: int, states: dict[str, str]) -> bool:
    return fleet.states(by) == states


def test_each_service_lists_both(fleet: Fleet) -> None:
    """Also the worker that does not gossip; and the command prints the same."""
    both = dict.fromkeys(fleet.addresses, "alive")
    for by in (0, 0, 0, 1):
        until(partial(_sees, fleet, by, both), "both are alive", WAIT_S, partial(fleet.seen, by))
    found = fleet.seen(1)
    assert (found["gossip"], found["live_nodes"]) == (True, 2)
    own, other = found["nodes"]
    assert (own["node"], own["this_node"], own["lag_seconds"]) == ("node-1", True, None)
    assert not other["this_node"]
    until(
        lambda: len({each["rules_version"] for each in fleet.seen(1)["nodes"]} - {""}) == 1,
        "both have told the version of their rules",
        WAIT_S,
        lambda: fleet.seen(1),
    )
    headers = {"Authorization": f"Bearer {fleet.token}"}
    glance = fleet.services[1].ask("GET", "/v1/admin/activity", None, headers).data["now"]["fleet"]
    assert (glance["gossip"], glance["live_nodes"], glance["alive"]) == (True, 2, 2)
    shown = run_to_end(["fleet", "--url", fleet.services[1].url], RATEKEEPER_TOKEN=fleet.token)
    assert shown.returncode == 0, shown.stderr
    assert "2 live" in shown.stdout


def test_a_subject_denied_on_one_service_is_denied_on_the_other(fleet: Fleet) -> None:
    """Without a call of Redis: the second service has never seen the subject."""

    def counts() -> tuple[int, int]:
        (rule,) = [each for each in fleet.seen(1)["rules"] if each["rule"] == "users"] or [{}]
        return rule.get("denied", 0), rule.get("asked", 0)

    def denied_without_a_call() -> bool:
        user = secrets.token_hex(4)
        assert fleet.check(0, user=user, cost=3) == 200
        assert fleet.check(0, user=user) == 429
        denied, asked = counts()
        assert fleet.check(1, user=user) == 429
        return counts() == (denied + 1, asked)

    until(denied_without_a_call, "a hint arrives before the check", WAIT_S, counts)


def test_most_checks_of_a_busy_tenant_need_no_call(fleet: Fleet) -> None:
    """Both workers of a service spend from one lease."""
    for _ in range(200):
        assert fleet.check(0, tenant="busy") == 200

    def hit_rate() -> float:
        rules = {each["rule"]: each["hit_rate"] for each in fleet.seen(0)["rules"]}
        return float(rules.get("tenants", 0.0))

    until(lambda: hit_rate() > 0.5, "most were answered in the node", WAIT_S, hit_rate)


def test_the_metrics_of_a_node(fleet: Fleet) -> None:
    """A scrape has a value for each metric of a fleet; only drops have none without a drop."""
    assert fleet.check(1, tenant="seen") == 200
    names = {each.full_name for each in FAMILIES if each.name.startswith(("fleet_", "gossip_"))}

    def scrape() -> str:
        return fleet.services[1].ask("GET", "/metrics").body.decode()

    def missing() -> set[str]:
        lines = [line for line in scrape().splitlines() if not line.startswith("#")]
        found = {
            re.sub(r"_(bucket|count|sum)$", "", line.split("{")[0].split(" ")[0]) for line in lines
        }
        values = {"ratekeeper_fleet_live_nodes 2.0", 'ratekeeper_fleet_nodes{state="alive"} 2.0'}
        return (names - found - {"ratekeeper_gossip_drops_total"}) | values.difference(lines)

    until(lambda: not missing(), "every metric has a value", WAIT_S, missing)


def test_a_fleet_that_has_lost_all_gossip_is_not_taken_for_one_node(fleet: Fleet) -> None:
    """Each node is alone by gossip, and says how many nodes Redis knows."""

    def live_and_registered() -> list[str]:
        lines = [
            line
            for service in fleet.services
            for line in service.ask("GET", "/metrics").body.decode().splitlines()
        ]
        names = ("ratekeeper_fleet_live_nodes ", "ratekeeper_fleet_registered_nodes ")
        return [line.split()[1] for name in names for line in lines if line.startswith(name)]

    one, other = (split_address("gossip", address) for address in fleet.addresses)
    until(lambda: live_and_registered() == ["2.0"] * 4, "all is well", WAIT_S, live_and_registered)
    with lost_datagrams([(one, other), (other, one)]):
        alone = ["1.0", "1.0", "2.0", "2.0"]
        until(lambda: live_and_registered() == alone, "both are alone", WAIT_S, live_and_registered)
        assert (fleet.seen(1)["live_nodes"], fleet.seen(1)["registered_nodes"]) == (1, 2)
    until(lambda: live_and_registered() == ["2.0"] * 4, "they meet", WAIT_S, live_and_registered)


def test_a_killed_service_is_suspected_and_then_dead(fleet: Fleet) -> None:
    """It is counted until it is dead."""
    other = fleet.addresses[0]
    seen = partial(fleet.states, 1)
    fleet.services[0].kill()
    until(lambda: seen().get(other) == "suspected", "it is suspected", WAIT_S, seen)
    until(lambda: seen().get(other) == "dead", "it is dead", WAIT_S, seen)
    assert fleet.seen(1)["live_nodes"] == 1


def test_a_service_that_stops_settles_with_the_authority(fleet: Fleet) -> None:
    """It gives its leases back and reports its charges, so that Redis has exactly what it spent."""
    service, spent = fleet.services[1], 0

    def has_lease_and_charges() -> bool:
        nonlocal spent
        assert fleet.check(1, api_key="stopping", ip="192.0.2.7") == 200
        spent += 1
        found = fleet.seen(1)["nodes"][0]
        return bool(found["leased_units"] and found["pending_units"])

    until(has_lease_and_charges, "the node owes units of both kinds", WAIT_S)
    assert service.end(signal.SIGTERM) == 0
    strict = {**RULES, "rules": [{**each, "consistency": "strict"} for each in RULES["rules"]]}
    store = f"{fleet.redis.uri}?{PATIENT}"
    with Limiter.from_rules(json.dumps(strict), store=store) as limiter:
        found = limiter.explain(Request(api_key="stopping", ip="192.0.2.7"))
        left = {each.id: each.decision.remaining for each in found.rules if each.decision}
    assert left == {"keys": 10_000 - spent, "addresses": 10_000 - spent}
