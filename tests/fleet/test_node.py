"""What the counters of a node share: budgets, hints, give-backs and counters."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest

from ratekeeper import Decision, Fleet, Limit, StoreUnavailable
from ratekeeper.core.rates import limits_of
from ratekeeper.decide.allowances import DENIED_NS_MAX, Replaced
from ratekeeper.fleet import node as nodes
from ratekeeper.fleet.counters import NodeCounter
from ratekeeper.testing import ManualClock
from tests.fleet.nodes import NodeOfTest, SharedStore

KEY = "user:42"


def new_node(fleet: Fleet | None = None) -> NodeOfTest:
    """Return a node."""
    clock = ManualClock(1_000)
    return NodeOfTest(SharedStore(clock), clock, fleet)


@pytest.mark.parametrize(
    ("remaining", "granted", "count", "budget"),
    [
        (1000, 0, 1, 250),
        (501, 0, 1, 125),
        (500, 0, 1, 0),
        (1000, 0, 10, 25),
        (1000, 0, 251, 0),
        (700, 300, 1, 0),
        (0, 0, 1, 0),
    ],
)
def test_a_budget_is_a_part_of_the_room_of_a_cool_subject(
    remaining: int, granted: int, count: int, budget: int
) -> None:
    """Granted units are no room, and from the warm share on there is none."""
    node = new_node().node
    node.live_nodes = lambda: count
    decision = Decision(remaining > 0, Limit(1000, per=60), remaining, granted=granted)
    assert node.budget_of(decision) == budget


def test_the_warm_share_is_a_setting() -> None:
    """1.0: a subject has a budget up to its limit; 0.0: never."""
    decision = Decision(True, Limit(1000, per=60), 100)
    assert new_node(Fleet(warm=0.95)).node.budget_of(decision) == 25
    fresh = Decision(True, Limit(1000, per=60), 1000)
    assert new_node(Fleet(warm=0)).node.budget_of(fresh) == 0


def test_short_denials_are_not_told() -> None:
    """They end before another node could use them; long ones are cut to the longest."""
    node = new_node()
    node.node.tell_denied(1, KEY, 1, nodes.HINT_DENIED_NS_MIN - 1)
    node.node.tell_denied(1, KEY, 0, 10**9)
    assert node.heard.said == []
    node.node.tell_denied(1, KEY, 2, 10**12)
    assert node.heard.said == [("denied", 1, KEY, 2, DENIED_NS_MAX)]


def test_the_subjects_that_were_told_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that makes many subjects warm fills no memory."""
    monkeypatch.setattr(nodes, "_HINTED_MAX", 10)
    node = new_node()
    for number in range(1_000):
        node.node.tell_warm(1, f"user:{number}")
    assert len(node.node._hinted) <= 10


def test_hints_of_unknown_limits_and_senseless_ones_change_nothing() -> None:
    """Another node may have other rules, or another version."""
    node = new_node()
    counter = node.store.counter(limits_of("10/minute"), "r", "eventual")
    number = next(iter(node.node.gates))
    node.node.heard_denied(number + 1, KEY, 1, 10**9)
    node.node.heard_denied(number, KEY, 0, 10**9)
    node.node.heard_denied(number, KEY, 1, -5)
    node.node.heard_warm(number + 1, KEY)
    assert counter.check(KEY, 1).allowed


def test_give_backs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that do not fit stay charged until their lease ends, and are counted."""
    monkeypatch.setattr(nodes, "REPLACED_MAX", 3)
    node = new_node()
    counter = node.store.counter(limits_of("10/minute"), "r")
    for _ in range(5):
        node.node.give_back(counter, KEY, Replaced(2, 1))
    node.node.give_back(counter, KEY, None)
    assert len(node.node.replaced) == 3
    assert node.node.counters.lost_units == 4


def test_the_known_limits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that change often do not fill memory; the newest are known."""
    monkeypatch.setattr(nodes, "GATES_MAX", 5)
    node = new_node()
    for number in range(20):
        node.store.counter(limits_of(f"{number + 1}/minute"), "r", "leased").check(KEY, 1)
    gc.collect()
    assert len(node.node.gates) == 5
    assert node.node.answers()["r", "leased"].asked == 20


def test_the_counts_of_limits_that_are_gone_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that has another name in each version fills no memory."""
    monkeypatch.setattr(nodes, "GATES_MAX", 5)
    node = new_node()
    for number in range(20):
        node.store.counter(limits_of("5/minute"), f"r{number}", "leased").check(KEY, 1)
    gc.collect()
    assert len(node.node.answers()) <= 10


def test_checks_that_failed_were_asked_too() -> None:
    """Otherwise a node without its authority would seem to answer all checks itself."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    node = NodeOfTest(shared, clock)
    counters = [
        node.store.counter(limits_of("1000/hour"), "r", kind) for kind in ("leased", "eventual")
    ]
    shared.controlled.fails = StoreUnavailable("away")
    for counter in counters:
        for _ in range(3):
            with suppress(StoreUnavailable):
                counter.check(KEY, 1)
    with suppress(StoreUnavailable):
        node.store.check_together([(counter, "user:43", 1) for counter in counters])
    asked = {kind: each.asked for (_, kind), each in node.node.answers().items()}
    assert asked == {"leased": 4, "eventual": 4}


def test_the_same_limits_count_together_in_each_version_of_the_rules() -> None:
    """Counters do not go back when a document is put in force again."""
    node = new_node()
    for _ in range(3):
        counter = node.store.counter(limits_of("1000/minute"), "r", "leased")
        counter.check(KEY, 1)
        counter.check(KEY, 1)
    assert len(node.node.gates) == 1
    answers = node.node.answers()["r", "leased"]
    assert answers.allowed + answers.asked == 6


def test_more_live_nodes_make_leases_and_budgets_smaller() -> None:
    """The number comes from gossip, when there is one."""
    node = new_node()
    node.node.live_nodes = lambda: 500
    counter = node.store.counter(limits_of("1000/hour"), "r", "leased")
    for _ in range(10):
        counter.check(KEY, 1)
    used = 1_000 - node.store.counter(limits_of("1000/hour"), "r").peek(KEY, 0).remaining
    assert 10 <= used <= 11


@pytest.mark.parametrize(("pause_s", "kept"), [(0, True), (0.0005, True), (0.002, False)])
def test_a_lease_is_ended_if_the_process_was_suspended_before_it_was_put(
    pause_s: float, *, kept: bool
) -> None:
    """The table counts the time of a lease from its own clock, when it is too late already."""
    clock = ManualClock(1_000)
    node = NodeOfTest(SharedStore(clock), clock)
    counter = node.store.counter(limits_of("1000/hour"), "r", "leased")
    assert isinstance(counter.counter, NodeCounter)
    for _ in range(3):
        counter.check(KEY, 1)
    put = node.node._put

    def suspended(*arguments: Any) -> None:
        clock.advance(pause_s)
        put(*arguments)

    node.node._put = suspended  # type: ignore[method-assign]  # a pause just before
    assert counter.check(KEY, 1).allowed
    assert (counter.held(KEY) > 0) == kept
    assert bool(node.node.replaced) != kept
