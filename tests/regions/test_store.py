"""RegionStore: regional rules cost nothing more; mixed requests pass together or cost nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    CapacityError,
    ConfigError,
    Decision,
    Fleet,
    Limit,
    Regions,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.decide.regional import GlobalGate
from ratekeeper.decide.stores.memory import MemoryGate, PythonMemoryStore
from ratekeeper.fleet.store import FleetStore
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.store import RegionStore
from ratekeeper.testing import ManualClock
from tests.redis_servers.waiting import until
from tests.regions.stores import RegionalStore, two_regions

MINUTE = (Limit(10, per=60, algorithm="fixed_window"),)
KEY = "user:42"
# A whole minute, so that no window ends by chance.
START_S = 6_000


class Drive:
    """The calls of a store for one driver, made in this thread."""

    def __init__(self, store: Any, *, awaited: bool) -> None:
        self.store = store
        self.awaited = awaited

    def gate(self, limits: Sequence[Limit], rule: str, across: Any = None) -> Any:
        """Return a gate of the driver."""
        make = self.store.async_gate if self.awaited else self.store.gate
        return make(limits, rule, across=across)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call, and await if the driver is asyncio."""
        return asyncio.run(function(*args)) if self.awaited else function(*args)

    def together(self, checks: Any, optional: Container[int] = ()) -> Any:
        """Check several subjects."""
        verb = self.store.check_together_async if self.awaited else self.store.check_together
        return self.call(verb, checks, optional)

    def remaining(self, gate: Any) -> int:
        """Return what a gate has left for the key."""
        found: int = self.call(gate.peek, KEY, 0).remaining
        return found


@pytest.fixture(params=["threads", "asyncio"])
def drive(request: pytest.FixtureRequest) -> Iterator[Drive]:
    """A node in eu, for each driver."""
    store, _, _ = two_regions(ManualClock(START_S))
    yield Drive(store, awaited=request.param == "asyncio")
    store.close()


def test_a_regional_rule_has_the_gate_of_the_wrapped_store_itself() -> None:
    """Not a wrapper: a check of one region crosses no code of the regions."""
    store, eu, _ = two_regions(ManualClock())
    assert type(store.gate(MINUTE, "r")) is MemoryGate
    calls: list[Any] = []
    eu.check_together = lambda checks, optional=(): calls.append(checks) or []  # type: ignore[method-assign, func-returns-value, assignment]  # a stub
    gate = store.gate(MINUTE, "r")
    store.check_together([(gate, "a", 1), (gate, "b", 1)])
    assert calls == [[(gate, "a", 1), (gate, "b", 1)]]


def test_the_rest_is_that_of_the_wrapped_store() -> None:
    """Its statistics and its capabilities."""
    store, eu, _ = two_regions(ManualClock())
    store.gate(MINUTE, "r").check(KEY, 1)
    assert store.stats() == eu.stats()
    assert store.sweep() == 0
    assert (store.is_private, store.is_sharded) == (False, False)
    assert (store.monitor, store.channel, store.fleet, store.allowances) == (None,) * 4
    assert (store.authority, store.regional) == (eu.authority, eu.counts)
    assert store.as_async is store


def test_a_store_that_cannot_be_a_region_is_refused() -> None:
    """The error names the region and a store that can."""
    clock = ManualClock()
    regions = Regions("eu", {"eu": "redis://eu.internal"})
    with pytest.raises(ConfigError, match=r"'eu' cannot count global limits; use a Redis"):
        RegionStore(PythonMemoryStore(clock), regions, clock)


def test_only_the_first_global_rule_waits_for_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests prepare limits, too: a region without a leader must not delay each of them."""
    clock = ManualClock(START_S)
    eu, us = RegionalStore(clock), RegionalStore(clock)
    regions = Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"})
    waited: list[float] = []
    monkeypatch.setattr(RegionSync, "start", lambda _: None)
    monkeypatch.setattr(RegionSync, "wait", lambda _: waited.append(1.0))
    store = RegionStore(eu, regions, clock, links={"eu": eu, "us": us})
    for rule in ("a", "b", "c"):
        store.gate(MINUTE, rule, across="exact")
    store.close()
    assert waited == [1.0]


def test_a_global_gate_has_all_verbs(drive: Drive) -> None:
    """Check, peek, refund, grant and reset."""
    gate = drive.gate(MINUTE, "g", "eventual")
    assert isinstance(gate, GlobalGate)
    assert gate.limits == MINUTE
    decision = drive.call(gate.check, KEY, 10)
    assert (decision.allowed, drive.call(gate.check, KEY, 1).allowed) == (True, False)
    drive.call(gate.refund, KEY, 4, decision.charged_ns)
    assert drive.remaining(gate) == 4
    drive.call(gate.grant, KEY, 3, None)
    assert drive.remaining(gate) == 7
    drive.call(gate.reset, KEY)
    assert drive.remaining(gate) == 10


def test_a_reset_reaches_every_region(drive: Drive) -> None:
    """The store of the other region forgets the subject as well."""
    us = drive.store._links["us"]
    there = us.counts.global_gate(MINUTE, "g", "eventual")
    there.check(KEY, 7)
    drive.call(drive.gate(MINUTE, "g", "eventual").reset, KEY)
    assert there.peek(KEY, 0).remaining == 10


def test_a_reset_says_which_region_it_did_not_reach(drive: Drive) -> None:
    """The own region is reset. The error names the other one, and what to do."""
    us = drive.store._links["us"]

    def fail(_: Any) -> None:
        raise StoreUnavailable("no route")

    us.counts.reset = fail
    gate = drive.gate(MINUTE, "g", "eventual")
    drive.call(gate.check, KEY, 7)
    says = r"were reset, but not in us; reset again .*\(us: no route\)"
    with pytest.raises(StoreUnavailable, match=says):
        drive.call(gate.reset, KEY)
    assert drive.remaining(gate) == 10


def test_a_mixed_request_charges_every_rule(drive: Drive) -> None:
    """If all have room."""
    gates = [drive.gate(MINUTE, "r"), drive.gate(MINUTE, "g", "exact"), drive.gate(MINUTE, "r2")]
    answers = drive.together([(gate, KEY, 2) for gate in gates])
    assert [each.allowed for each in answers] == [True] * 3
    assert [drive.remaining(gate) for gate in gates] == [8, 3, 8]
    assert [each.rule for each in answers] == ["r", "g", "r2"]


@pytest.mark.parametrize("full", range(4))
def test_a_mixed_request_that_one_rule_denies_costs_nothing(drive: Drive, full: int) -> None:
    """Whichever rule denies: the others keep their units, and say what they would answer."""
    gates = [
        drive.gate(MINUTE, "r"),
        drive.gate(MINUTE, "g", "eventual"),
        drive.gate(MINUTE, "g2", "eventual"),
        drive.gate(MINUTE, "r2"),
    ]
    drive.call(gates[full].check, KEY, 9)
    before = [drive.remaining(gate) for gate in gates]
    answers = drive.together([(gate, KEY, 2) for gate in gates])
    assert [each.allowed for each in answers] == [at != full for at in range(4)]
    assert [each.charged_ns for each in answers] == [None] * 4
    assert [each.remaining for each in answers] == before
    assert [drive.remaining(gate) for gate in gates] == before


def test_one_subject_twice_is_counted_twice(drive: Drive) -> None:
    """The second check sees the charge of the first, and both are refunded if it is denied."""
    gate = drive.gate(MINUTE, "g", "eventual")
    assert [each.allowed for each in drive.together([(gate, KEY, 4), (gate, KEY, 5)])] == [True] * 2
    drive.call(gate.reset, KEY)
    answers = drive.together([(gate, KEY, 6), (gate, KEY, 6)])
    assert [each.allowed for each in answers] == [True, False]
    assert drive.remaining(gate) == 10


@pytest.mark.parametrize("cost", [1, 6])
def test_a_cost_that_never_fits_costs_nothing(drive: Drive, cost: int) -> None:
    """The share of an exact limit is 5 units here: 6 never fit."""
    gates = [drive.gate(MINUTE, "r"), drive.gate(MINUTE, "g", "exact")]
    checks = [(gates[0], KEY, 1), (gates[1], KEY, cost)]
    if cost > 5:
        with pytest.raises(CapacityError):
            drive.together(checks)
    else:
        drive.together(checks)
    assert drive.remaining(gates[0]) == 10 - (cost <= 5)


class _Fails:
    """Makes a gate fail."""

    def __init__(self, error: StoreError, drive: Drive) -> None:
        self.error = error
        self.awaited = drive.awaited
        self.calls = 0

    def __call__(self, *_: Any) -> Any:
        self.calls += 1
        return self._awaited() if self.awaited else self._fail()

    def _fail(self) -> Any:
        raise self.error

    async def _awaited(self) -> Any:
        self._fail()


@pytest.mark.parametrize("optional", [True, False])
def test_a_global_rule_that_fails(drive: Drive, *, optional: bool) -> None:
    """Its error is its answer. The others are charged if its policy may let the request pass."""
    gates = [drive.gate(MINUTE, "r"), drive.gate(MINUTE, "g", "eventual")]
    error = StoreUnavailable("the region's Redis is down")
    gates[1].check = _Fails(error, drive)
    answers = drive.together([(gate, KEY, 2) for gate in gates], {1} if optional else ())
    assert answers[1] is error
    assert (answers[0].charged_ns is not None) is optional
    assert drive.remaining(gates[0]) == (8 if optional else 10)


def test_a_rule_that_fails_does_not_hide_a_denial(drive: Drive) -> None:
    """With several global rules, one that fails and one that denies: nothing is charged."""
    gates = [drive.gate(MINUTE, name, "eventual") for name in ("g1", "g2", "g3")]
    drive.call(gates[2].check, KEY, 10)
    gates[0].peek = failing = _Fails(StoreUnavailable("down"), drive)
    answers = drive.together([(gate, KEY, 2) for gate in gates], range(3))
    assert answers[0] is failing.error
    assert [each.allowed for each in answers[1:]] == [True, False]
    assert drive.remaining(gates[1]) == 10


def test_a_request_waits_once_for_a_server_that_does_not_answer(drive: Drive) -> None:
    """After a timeout of the regional rules, the global ones are not asked on the same server."""
    gates = [drive.gate(MINUTE, "r"), drive.gate(MINUTE, "g", "eventual")]
    error = StoreTimeout("no answer")
    gates[1].check = gates[1].peek = never = _Fails(StoreUnavailable("not this"), drive)
    verb = "check_together_async" if drive.awaited else "check_together"

    def timed_out(*_: Any) -> Any:
        async def awaited() -> Any:
            return [error]

        return awaited() if drive.awaited else [error]

    setattr(drive.store._store, verb, timed_out)
    for optional in ((), (0, 1)):
        answers = drive.together([(gate, KEY, 2) for gate in gates], optional)
        assert answers == [error, error]
    assert never.calls == 0


async def test_a_cancelled_request_has_spent_nothing() -> None:
    """Cancelled while the global rule is checked: the regional ones are refunded."""
    store, _, _ = two_regions(ManualClock(START_S))
    regional, shared = store.async_gate(MINUTE, "r"), store.async_gate(MINUTE, "g", across="exact")
    reached = asyncio.Event()

    async def never(*_: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()

    shared.check = never  # type: ignore[method-assign]  # a stub
    task = asyncio.create_task(store.check_together_async([(regional, KEY, 2), (shared, KEY, 2)]))
    await reached.wait()
    assert (await regional.peek(KEY, 0)).remaining == 8
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await regional.peek(KEY, 0)).remaining == 10


def test_a_node_of_a_fleet_decides_all_kinds_together() -> None:
    """Leased, strict and global rules of one request: all pass, or none is charged."""
    clock = ManualClock(START_S)
    region, _, _ = two_regions(clock)
    store = FleetStore(region, Fleet(), clock)
    leased = store.gate(MINUTE, "leased", "leased")
    strict = store.gate(MINUTE, "strict")
    shared = store.gate(MINUTE, "global", across="eventual")
    checks = [(leased, KEY, 2), (strict, KEY, 2), (shared, KEY, 2)]
    assert all(store.check_together(checks))
    assert [gate.peek(KEY, 0).remaining for gate, _, _ in checks] == [8, 8, 8]
    shared.check(KEY, 8)
    answers = store.check_together(checks)
    assert [bool(each) for each in answers] == [True, True, False]
    assert [gate.peek(KEY, 0).remaining for gate, _, _ in checks] == [8, 8, 0]
    store.close()


def test_closing_closes_what_the_store_has_opened() -> None:
    """The stores of the other regions, and its own if it owns it."""
    for owned in (True, False):
        clock = ManualClock()
        eu, us = RegionalStore(clock), RegionalStore(clock)
        regions = Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"})
        links = {"eu": RegionalStore(clock), "us": us}
        store = RegionStore(eu, regions, clock, owns_store=owned, links=links)
        assert store.regions is not None
        assert (store.regions.region, set(store.regions.names)) == ("eu", {"eu", "us"})
        store.close() if owned else asyncio.run(store.aclose())
        with pytest.raises(StoreUnavailable):
            us.stats()
        if owned:
            with pytest.raises(StoreUnavailable):
                eu.stats()
        else:
            eu.stats()


def test_the_sync_runs_from_the_start_to_the_end_of_the_store() -> None:
    """It carries reports, and names rules as people know them. Closing ends its thread."""
    clock = ManualClock(START_S)
    links = {"eu": RegionalStore(clock), "us": RegionalStore(clock)}
    table = {name: f"redis://{name}.internal" for name in links}
    before = threading.active_count()
    stores = {
        name: RegionStore(links[name], Regions(name, table), clock, links=links) for name in links
    }
    excess: list[tuple[str, str, str, int]] = []
    assert stores["eu"].regions is not None
    stores["eu"].regions.on_excess(lambda *told: excess.append(told))
    gates = [store.gate(MINUTE, "orders", across="eventual") for store in stores.values()]
    subjects = (f"user:{number}" for number in count())

    def exceeded() -> bool:
        """Both regions admit 8 of 10 units, unless a report comes in between."""
        subject = next(subjects)
        for gate in gates:
            gate.check(subject, 8)
        return bool(excess)

    until(exceeded, "a report brings a subject above its limit", 30)
    assert (excess[0][0], excess[0][2]) == ("orders", "us")
    for store in stores.values():
        store.close()
    assert threading.active_count() == before


KINDS = st.sampled_from([None, "exact", "eventual"])


@given(
    kinds=st.lists(KINDS, min_size=2, max_size=4),
    requests=st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), max_size=12),
)
def test_all_pass_or_none_is_charged(kinds: list[Any], requests: list[list[int]]) -> None:
    """For any mix of rules and costs: a request takes its cost of every rule, or of none."""
    store, _, _ = two_regions(ManualClock(START_S))
    gates = [store.gate(MINUTE, f"r{at}", across=kind) for at, kind in enumerate(kinds)]
    for costs in requests:
        before = [gate.peek(KEY, 0).remaining for gate in gates]
        checks = [(gate, KEY, cost) for gate, cost in zip(gates, costs, strict=False)]
        answers = store.check_together(checks)
        after = [gate.peek(KEY, 0).remaining for gate in gates]
        passes = all(cost <= left for cost, left in zip(costs, before, strict=False))
        assert all(answers) is passes
        taken = [was - left for was, left in zip(before, after, strict=True)]
        assert taken == ([cost for _, _, cost in checks] if passes else [0] * len(gates))
        for answer, cost, left in zip(answers, costs, before, strict=False):
            assert isinstance(answer, Decision)
            assert passes or answer.allowed is (cost <= left)
