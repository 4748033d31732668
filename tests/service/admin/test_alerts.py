"""GET /v1/admin/alerts and /runbooks/{alert}: the alerts that a node evaluates itself."""

from __future__ import annotations

from datetime import datetime

from ratekeeper.metrics import operations
from ratekeeper.metrics.counters import MetricsSnapshot
from ratekeeper.metrics.operations.conditions import LABELS, NOT_EVALUATED
from ratekeeper.service.http.activity import ActivityHistory
from ratekeeper.testing import ManualClock
from tests.service.admin.client import Admin, admin, template

__all__ = ["admin", "template"]  # fixtures, found by name


class Watched:
    """A node whose counters and clocks a test sets."""

    def __init__(self, admin: Admin) -> None:
        self.wall, self.boot = ManualClock(1_000_000), ManualClock(50)
        self.counted = MetricsSnapshot()
        history = ActivityHistory(None, now_ns=self.wall.now_ns, since_boot_ns=self.boot.now_ns)
        history.totals = lambda: self.counted
        admin.context.activity = history

    def go_on(self, admin: Admin, seconds: int) -> None:
        """Let time pass, as the task of the service sees it."""
        for _ in range(0, seconds, 2):
            self.wall.advance(2)
            self.boot.advance(2)
            admin.context.activity.advance()


async def test_an_alert_is_active_after_its_time_and_ends(admin: Admin) -> None:
    """A breaker is open: nothing for half a minute, then the alert, then none."""
    node = Watched(admin)
    node.go_on(admin, 60)
    node.counted.put("breaker_state", 2, "10.0.0.7:6379")
    node.go_on(admin, 30)
    found = (await admin.call("GET", "/alerts")).json()
    assert found["active"] == []
    node.go_on(admin, 30)
    found = (await admin.call("GET", "/alerts")).json()
    (alert,) = found["active"]
    since = datetime.fromisoformat(alert.pop("since")).timestamp()
    assert 1_000_060 <= since <= 1_000_070
    assert alert == {
        "alert": "RatekeeperBreakerOpen",
        "severity": "critical",
        "summary": "The breaker of the store's server 10.0.0.7:6379 is open.",
        "description": "So many calls to 10.0.0.7:6379 failed that node-1 no longer calls it, and "
        "probes it until it answers. The failure policy decides for the keys on that server.",
        "labels": {"server": "10.0.0.7:6379"},
        "value": 2,
        "runbook": "ratekeeperbreakeropen",
    }
    evaluated = datetime.fromisoformat(found["evaluated_at"])
    assert 1_000_110 <= evaluated.timestamp() <= 1_000_120
    node.wall.advance(-3_600)  # the clock is set: the alert is as old as before
    node.go_on(admin, 10)
    (alert,) = (await admin.call("GET", "/alerts")).json()["active"]
    assert datetime.fromisoformat(alert["since"]).timestamp() == since - 3_600
    node.counted.put("breaker_state", 0, "10.0.0.7:6379")
    node.go_on(admin, 12)
    assert (await admin.call("GET", "/alerts")).json()["active"] == []


async def test_critical_alerts_come_first(admin: Admin) -> None:
    """Then the oldest."""
    node = Watched(admin)
    node.counted.put("rules_failing", 1)
    node.go_on(admin, 40)
    node.counted.put("gossip_lag_seconds", 60)
    node.counted.put("breaker_state", 1, "h:1")
    node.go_on(admin, 200)
    found = (await admin.call("GET", "/alerts")).json()["active"]
    assert [each["alert"] for each in found] == [
        "RatekeeperBreakerOpen",
        "RatekeeperRulesStale",
        "RatekeeperGossipLagging",
    ]
    assert "node-1 has heard nothing of a live node for 60.0 s" in found[2]["description"]


async def test_a_node_says_what_it_cannot_evaluate(admin: Admin) -> None:
    """All alerts of the file are in one of the two lists, from the first moment."""
    found = (await admin.call("GET", "/alerts")).json()
    assert (found["active"], found["evaluated_at"]) == ([], None)
    assert {each["alert"]: each["why"] for each in found["not_evaluated"]} == NOT_EVALUATED
    assert set(found["evaluated"]) == set(LABELS)


async def test_the_runbook_of_every_alert(admin: Admin) -> None:
    """With its steps; an unknown alert is not found."""
    for alert in operations.described():
        found = (await admin.call("GET", f"/runbooks/{alert}")).json()
        assert found["alert"] == alert
        assert found["text"].startswith("*")
        assert "\n1. " in found["text"]
    assert (await admin.call("GET", "/runbooks/RatekeeperDegraded")).json()["for_seconds"] == 60
    problem = await admin.rejected("GET", "/runbooks/Nothing", 404)
    assert "ratekeeper metrics alerts" in problem["detail"]


async def test_a_reader_may_look(admin: Admin) -> None:
    """The role is `read`; a token for checks is not enough."""
    for role, status in (("read", 200), ("check", 403)):
        headers = {"Authorization": f"Bearer {admin.secrets[role]}"}
        for path in ("/alerts", "/runbooks/RatekeeperDegraded"):
            await admin.call("GET", path, status, headers=headers)
