"""GET /v1/admin/activity: the steps as arrays, and the present state of the node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratekeeper.core.histogram import Histogram
from ratekeeper.core.version import __version__
from ratekeeper.metrics.counters import OTHERS
from ratekeeper.rules.document.reading import read
from ratekeeper.service.admin.activity import busiest, degraded_share
from ratekeeper.service.http.activity import RULES_MAX, Row, Step
from tests.redis_servers.ports import free_port
from tests.service.admin.client import RULES, Admin, admin, admin_of, template
from tests.stub_fleet import store_with_fleet
from tests.stub_regions import store_with_regions

__all__ = ["admin", "template"]  # fixtures, found by name


def taken(*each_ns: int) -> list[int]:
    """Return the data of a histogram of these durations."""
    found = Histogram()
    for duration in each_ns:
        found.note(duration)
    return found.data()


def keep(admin: Admin, steps: Sequence[Step]) -> None:
    """Give the node these steps."""
    admin.context.activity.steps = lambda: steps  # type: ignore[method-assign]  # instead of time


STEPS = [
    Step(100.0, 2.0, {"allowed": 7, "exempt": 2}, 0, {"users": (7, 0, 1, 0)}, taken(60_000)),
    Step(102.0, 2.0),
    Step(104.5, 2.5, {"denied": 3}, 1, {"orders": (0, 9, 0, 1)}, taken(*[60_000] * 99, 2_000_000)),
]


async def test_the_steps_are_arrays(admin: Admin) -> None:
    """One value for each step in every array; busiest rules first."""
    keep(admin, STEPS)
    found = (await admin.call("GET", "/activity")).json()
    del found["now"]
    assert found == {
        "node_id": "node-1",
        "step_seconds": 2.0,
        "history_seconds": 900.0,
        "complete": True,
        "at": [100.0, 102.0, 104.5],
        "seconds": [2.0, 2.0, 2.5],
        "checks": {
            "allowed": [7, 0, 0],
            "denied": [0, 0, 3],
            "unavailable": [0, 0, 0],
            "failed": [0, 0, 0],
            "unlimited": [0, 0, 0],
            "exempt": [2, 0, 0],
            "blocked": [0, 0, 0],
        },
        "shadow_denied": [1, 0, 0],
        "degraded": [0, 0, 1],
        "p50_ms": [0.075, None, 0.0753],
        "p99_ms": [0.0995, None, 0.1],
        "rules": [
            {
                "rule": "orders",
                "allowed": [0, 0, 0],
                "denied": [0, 0, 9],
                "shadow_denied": [0, 0, 0],
                "degraded": [0, 0, 1],
            },
            {
                "rule": "users",
                "allowed": [7, 0, 0],
                "denied": [0, 0, 0],
                "shadow_denied": [1, 0, 0],
                "degraded": [0, 0, 0],
            },
        ],
    }


async def test_since_returns_newer_steps(admin: Admin) -> None:
    """With the rules of the whole history; with an unknown time all steps return."""
    keep(admin, STEPS)
    newer = (await admin.call("GET", "/activity?since=100.0")).json()
    assert (newer["complete"], newer["at"]) == (False, [102.0, 104.5])
    assert [(each["rule"], each["denied"]) for each in newer["rules"]] == [
        ("orders", [0, 9]),
        ("users", [0, 0]),
    ]
    none = (await admin.call("GET", "/activity?since=104.5")).json()
    assert (none["complete"], none["at"], none["rules"][0]["denied"]) == (False, [], [])
    for unknown in ("103", "999999999999", "0"):
        found = (await admin.call("GET", f"/activity?since={unknown}")).json()
        assert (found["complete"], found["at"]) == (True, [100.0, 102.0, 104.5])


async def test_a_time_that_is_none_is_rejected(admin: Admin) -> None:
    """The problem names the parameter."""
    for wrong in ("nan", "inf", "-1", "yesterday"):
        found = await admin.rejected("GET", f"/activity?since={wrong}", 400)
        assert "since" in found["detail"]


async def test_a_reader_may_look_and_a_checker_may_not(admin: Admin) -> None:
    """The role is `read`."""
    for role, status in (("read", 200), ("check", 403)):
        headers = {"Authorization": f"Bearer {admin.secrets[role]}"}
        await admin.call("GET", "/activity", status, headers=headers)


async def test_rules_beyond_the_busiest_are_others(admin: Admin) -> None:
    """Steps may name different rules; the reply has twenty of them, and one row for the rest."""
    steps = [
        Step(100.0 + number, 1.0, rules={f"r{number}": (number, 1, 0, 0), OTHERS: (5, 0, 0, 0)})
        for number in range(30)
    ]
    keep(admin, steps)
    found = (await admin.call("GET", "/activity")).json()["rules"]
    assert [each["rule"] for each in found] == [
        *(f"r{number}" for number in range(29, 29 - RULES_MAX, -1)),
        OTHERS,
    ]
    assert sum(sum(each["allowed"]) for each in found) == sum(range(30)) + 5 * 30
    assert sum(sum(each["denied"]) for each in found) == 30
    assert found[-1]["allowed"][:3] == [5, 6, 7]


async def test_the_state_of_a_node(admin: Admin) -> None:
    """Its rules, store, workers and the fleet of one."""
    keep(admin, STEPS)
    now = (await admin.call("GET", "/activity")).json()["now"]
    assert now["rules"] == (await admin.call("GET", "/node")).json()["rules"]
    assert (now["software"], now["workers"], now["breakers"]) == (__version__, 1, [])
    assert now["store"] == {"name": "memory://", "healthy": True, "error": ""}
    assert now["fleet"] == {
        "gossip": False,
        "live_nodes": 1,
        "alive": 1,
        "suspected": 0,
        "dead": 0,
    }
    assert now["regions"] is None
    assert now["degraded_share"] == round(1 / 12, 4)


async def test_the_first_moment_of_a_node(admin: Admin) -> None:
    """Without steps there is a state nevertheless."""
    found = (await admin.call("GET", "/activity")).json()
    assert (found["at"], found["rules"], found["now"]["workers"]) == ([], [], 1)


async def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """The state has its error, and the worst breaker of all workers."""
    uri = f"redis://127.0.0.1:{free_port()}"
    async with admin_of(tmp_path, read(RULES), None, store=uri) as admin:
        keep(admin, [Step(1.0, 1.0, breakers={"cache-2:6379": 2}, workers=3)])
        now = (await admin.call("GET", "/activity")).json()["now"]
    assert not now["store"]["healthy"]
    assert "127.0.0.1" in now["store"]["error"]
    assert now["breakers"] == [
        {"server": uri.removeprefix("redis://"), "state": "closed"},
        {"server": "cache-2:6379", "state": "open"},
    ]
    assert now["workers"] == 3


async def test_the_fleet_and_the_region_at_a_glance(tmp_path: Path) -> None:
    """How many nodes are alive, and which links are up."""
    async with admin_of(tmp_path, read(RULES), None, store=store_with_fleet()) as admin:
        fleet = (await admin.call("GET", "/activity")).json()["now"]["fleet"]
        assert fleet == {
            "gossip": True,
            "live_nodes": 3,
            "alive": 2,
            "suspected": 1,
            "dead": 0,
        }
    async with admin_of(tmp_path, read(RULES), None, store=store_with_regions()) as admin:
        region = (await admin.call("GET", "/activity")).json()["now"]["regions"]
    assert region == {
        "region": "eu",
        "leader": "eu-1/4711",
        "up": 1,
        "down": 1,
        "refused": 0,
        "problem": "",
    }


def test_the_busiest_rules() -> None:
    """By decisions of the whole history, without `(others)`."""
    row: Row = (1, 1, 1, 3)
    steps = [Step(1.0, 1.0, rules={"a": row, OTHERS: (99, 0, 0, 0)}), Step(2.0, 1.0)]
    assert busiest(steps) == ["a"]
    assert busiest([]) == []


def test_the_degraded_share_is_of_the_last_minute() -> None:
    """Older steps do not count, and no checks are no share."""
    assert degraded_share([]) == 0
    assert degraded_share([Step(1.0, 2.0)]) == 0
    old = Step(1.0, 2.0, {"allowed": 10}, 10)
    assert degraded_share([old, Step(100.0, 2.0, {"allowed": 8, "denied": 2}, 1)]) == 0.1
