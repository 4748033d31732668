"""RegionStore: regional rules cost nothing more; mixed requests pass together or cost nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from functools import partial
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
    Limiter,
    Regions,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.core.steps import Ask
from ratekeeper.decide.regional import GlobalCounter
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.fleet.store import FleetStore
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.store import RegionStore
from ratekeeper.testing import ManualClock
from tests.answering import (
    AnsweringCounter,
    AnsweringStore,
    Link,
    answer,
    awaited,
    in_thread,
    on_loop,
)
from tests.redis_servers.waiting import until
from tests.regions.stores import RegionalStore, asking, two_regions

MINUTE = (Limit(10, per=60, algorithm="fixed_window"),)
KEY = "user:42"
# A whole minute, so that no window ends by chance.
START_S = 6_000


class Drive:
    """A node in eu, whose Asks a link carries."""

    def __init__(self, link: Link = in_thread) -> None:
        self.region, self.eu, self.us = two_regions(ManualClock(START_S))
        self.store = AnsweringStore(self.region, link)

    def counter(self, limits: Sequence[Limit], rule: str, across: Any = None) -> AnsweringCounter:
        """Return a counter that has every answer."""
        return self.store.counter(limits, rule, across=across)

    def fail(self, counter: AnsweringCounter, verb: str, error: StoreError) -> list[str]:
        """Make a verb of a counter fail; return the list of its calls."""
        calls: list[str] = []

        def fails(*_: Any) -> Any:
            calls.append(verb)
            raise error

        setattr(counter.counter, verb, lambda *args: asking(fails, *args))
        return calls


def remaining(counter: AnsweringCounter) -> int:
    """Return what a counter has left for the key."""
    return counter.peek(KEY, 0).remaining


@pytest.fixture
def drive() -> Iterator[Drive]:
    """A node in eu."""
    found = Drive()
    yield found
    found.store.close()


def test_a_regional_rule_has_the_counter_of_the_wrapped_store_itself() -> None:
    """Not a wrapper: a check of one region crosses no code of the regions."""
    store, eu, _ = two_regions(ManualClock())
    assert type(store.counter(MINUTE, "r")) is type(eu.counter(MINUTE, "r"))
    calls: list[Any] = []
    eu.check_together = lambda checks, optional=(): calls.append(checks) or []  # type: ignore[method-assign, func-returns-value, assignment]  # a stub
    counter = store.counter(MINUTE, "r")
    store.check_together([(counter, "a", 1), (counter, "b", 1)])
    assert calls == [[(counter, "a", 1), (counter, "b", 1)]]


def test_the_rest_is_that_of_the_wrapped_store() -> None:
    """Its statistics and its capabilities."""
    store, eu, _ = two_regions(ManualClock())
    answer(store.counter(MINUTE, "r").check(KEY, 1))
    assert store.stats() == eu.stats()
    assert store.sweep() == 0
    assert (store.is_private, store.is_local) == (False, False)
    assert (store.monitor, store.channel, store.cells) == (eu.monitor, eu.channel, eu.cells)
    assert (store.authority, store.regional) == (eu.authority, eu.counts)


def test_a_store_that_cannot_be_a_region_is_refused() -> None:
    """The error names the region and a store that can."""
    clock = ManualClock()
    store = PythonMemoryStore(clock)
    regions = Regions("eu", {"eu": "redis://eu.internal"}, sync=False)
    with pytest.raises(ConfigError, match=r"'eu' cannot count global limits; use a Redis"):
        Limiter("5/minute", store=store, regions=regions)
    assert Limiter("5/minute", store=store).check(KEY)  # the store was not closed


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
        store.counter(MINUTE, rule, across="exact")
    store.close()
    assert waited == [1.0]


@pytest.mark.parametrize("link", [in_thread, on_loop])
def test_a_global_counter_has_all_verbs(link: Link) -> None:
    """Check, peek, refund, grant and reset, with the same answers in a thread and on asyncio."""
    drive = Drive(link)
    counter = drive.counter(MINUTE, "g", "eventual")
    assert isinstance(counter.counter, GlobalCounter)
    assert counter.limits == MINUTE
    decision = counter.check(KEY, 10)
    assert (decision.allowed, counter.check(KEY, 1).allowed) == (True, False)
    counter.refund(KEY, 4, decision.charged_ns)
    assert remaining(counter) == 4
    counter.grant(KEY, 3, None)
    assert remaining(counter) == 7
    counter.reset(KEY)
    assert remaining(counter) == 10


def test_a_reset_reaches_every_region(drive: Drive) -> None:
    """The store of the other region forgets the subject as well."""
    there = AnsweringCounter(drive.us.counts.global_counter(MINUTE, "g", "eventual"))
    there.check(KEY, 7)
    drive.counter(MINUTE, "g", "eventual").reset(KEY)
    assert there.peek(KEY, 0).remaining == 10


def test_a_reset_says_which_region_it_did_not_reach(drive: Drive) -> None:
    """The own region is reset. The error names the other one, and what to do."""

    def fail(_: Any) -> None:
        raise StoreUnavailable("no route")

    drive.us.counts.reset = fail  # type: ignore[method-assign]  # a stub
    counter = drive.counter(MINUTE, "g", "eventual")
    counter.check(KEY, 7)
    says = r"were reset, but not in us; reset again .*\(us: no route\)"
    with pytest.raises(StoreUnavailable, match=says):
        counter.reset(KEY)
    assert remaining(counter) == 10


@pytest.mark.parametrize("link", [in_thread, on_loop])
def test_a_mixed_request_charges_every_rule(link: Link) -> None:
    """If all have room, in a thread and on asyncio."""
    drive = Drive(link)
    counters = [
        drive.counter(MINUTE, "r"),
        drive.counter(MINUTE, "g", "exact"),
        drive.counter(MINUTE, "r2"),
    ]
    answers = drive.store.check_together([(counter, KEY, 2) for counter in counters])
    assert [each.allowed for each in answers] == [True] * 3
    assert [remaining(counter) for counter in counters] == [8, 3, 8]
    assert [each.rule for each in answers] == ["r", "g", "r2"]


@pytest.mark.parametrize("full", range(4))
def test_a_mixed_request_that_one_rule_denies_costs_nothing(drive: Drive, full: int) -> None:
    """Whichever rule denies: the others keep their units, and say what they would answer."""
    counters = [
        drive.counter(MINUTE, "r"),
        drive.counter(MINUTE, "g", "eventual"),
        drive.counter(MINUTE, "g2", "eventual"),
        drive.counter(MINUTE, "r2"),
    ]
    counters[full].check(KEY, 9)
    before = [remaining(counter) for counter in counters]
    answers = drive.store.check_together([(counter, KEY, 2) for counter in counters])
    assert [each.allowed for each in answers] == [at != full for at in range(4)]
    assert [each.charged_ns for each in answers] == [None] * 4
    assert [each.remaining for each in answers] == before
    assert [remaining(counter) for counter in counters] == before


def test_one_subject_twice_is_counted_twice(drive: Drive) -> None:
    """The second check sees the charge of the first, and both are refunded if it is denied."""
    counter = drive.counter(MINUTE, "g", "eventual")
    assert [
        each.allowed for each in drive.store.check_together([(counter, KEY, 4), (counter, KEY, 5)])
    ] == [True] * 2
    counter.reset(KEY)
    answers = drive.store.check_together([(counter, KEY, 6), (counter, KEY, 6)])
    assert [each.allowed for each in answers] == [True, False]
    assert remaining(counter) == 10


@pytest.mark.parametrize("cost", [1, 6])
def test_a_cost_that_never_fits_costs_nothing(drive: Drive, cost: int) -> None:
    """The share of an exact limit is 5 units here: 6 never fit."""
    counters = [drive.counter(MINUTE, "r"), drive.counter(MINUTE, "g", "exact")]
    checks = [(counters[0], KEY, 1), (counters[1], KEY, cost)]
    if cost > 5:
        with pytest.raises(CapacityError):
            drive.store.check_together(checks)
    else:
        drive.store.check_together(checks)
    assert remaining(counters[0]) == 10 - (cost <= 5)


@pytest.mark.parametrize("optional", [True, False])
def test_a_global_rule_that_fails(drive: Drive, *, optional: bool) -> None:
    """Its error is its answer. The others are charged if its policy may let the request pass."""
    counters = [drive.counter(MINUTE, "r"), drive.counter(MINUTE, "g", "eventual")]
    error = StoreUnavailable("the region's Redis is down")
    drive.fail(counters[1], "check", error)
    answers = drive.store.check_together(
        [(counter, KEY, 2) for counter in counters], {1} if optional else ()
    )
    assert answers[1] is error
    assert (answers[0].charged_ns is not None) is optional
    assert remaining(counters[0]) == (8 if optional else 10)


def test_a_rule_that_fails_does_not_hide_a_denial(drive: Drive) -> None:
    """With several global rules, one that fails and one that denies: nothing is charged."""
    counters = [drive.counter(MINUTE, name, "eventual") for name in ("g1", "g2", "g3")]
    counters[2].check(KEY, 10)
    error = StoreUnavailable("down")
    drive.fail(counters[0], "check", error)
    answers = drive.store.check_together([(counter, KEY, 2) for counter in counters], range(3))
    assert answers[0] is error
    assert [each.allowed for each in answers[1:]] == [True, False]
    assert remaining(counters[1]) == 10


def test_a_request_waits_once_for_a_server_that_does_not_answer(drive: Drive) -> None:
    """After a timeout of the regional rules, the global ones are not asked on the same server."""
    counters = [drive.counter(MINUTE, "r"), drive.counter(MINUTE, "g", "eventual")]
    error = StoreTimeout("no answer")
    calls = [drive.fail(counters[1], verb, StoreUnavailable("no")) for verb in ("check", "peek")]
    drive.eu.check_together = lambda *args: asking(lambda *_: [error], *args)  # type: ignore[method-assign]  # a stub
    for optional in ((), (0, 1)):
        answers = drive.store.check_together([(counter, KEY, 2) for counter in counters], optional)
        assert answers[0] is error
        assert str(answers[1]) == "not asked after another call's timeout: no answer"
    assert calls == [[], []]


async def test_a_cancelled_request_has_spent_nothing() -> None:
    """Cancelled while the global rule is checked: the regional ones are refunded."""
    store, _, _ = two_regions(ManualClock(START_S))
    regional, shared = store.counter(MINUTE, "r"), store.counter(MINUTE, "g", across="exact")
    reached, answers = asyncio.Event(), asyncio.Event()

    async def late(*args: Any) -> Any:
        reached.set()
        await answers.wait()
        return await awaited(check(*args))

    check = shared.check
    shared.check = lambda *args: Ask(late, late, *args)  # type: ignore[method-assign]  # a stub
    ask = store.check_together([(regional, KEY, 2), (shared, KEY, 2)])
    assert isinstance(ask, Ask)
    task = asyncio.ensure_future(ask.send(*ask.args))
    await reached.wait()
    assert answer(regional.peek(KEY, 0)).remaining == 8
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answers.set()
    returned = partial(until, lambda: answer(regional.peek(KEY, 0)).remaining == 10)
    await asyncio.to_thread(returned, "the units are returned", 20)
    assert answer(shared.peek(KEY, 0)).remaining == 5  # the region's share


def test_a_node_of_a_fleet_decides_all_kinds_together() -> None:
    """Leased, strict and global rules of one request: all pass, or none is charged."""
    clock = ManualClock(START_S)
    region, _, _ = two_regions(clock)
    store = AnsweringStore(FleetStore(region, Fleet(), clock))
    leased = store.counter(MINUTE, "leased", "leased")
    strict = store.counter(MINUTE, "strict")
    shared = store.counter(MINUTE, "global", across="eventual")
    checks = [(leased, KEY, 2), (strict, KEY, 2), (shared, KEY, 2)]
    assert all(store.check_together(checks))
    assert [counter.peek(KEY, 0).remaining for counter, _, _ in checks] == [8, 8, 8]
    shared.check(KEY, 8)
    answers = store.check_together(checks)
    assert [bool(each) for each in answers] == [True, True, False]
    assert [counter.peek(KEY, 0).remaining for counter, _, _ in checks] == [8, 8, 0]
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
    counters = [
        AnsweringStore(store).counter(MINUTE, "orders", across="eventual")
        for store in stores.values()
    ]
    subjects = (f"user:{number}" for number in count())

    def exceeded() -> bool:
        """Both regions admit 8 of 10 units, unless a report comes in between."""
        subject = next(subjects)
        for counter in counters:
            counter.check(subject, 8)
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
    store = Drive().store
    counters = [store.counter(MINUTE, f"r{at}", across=kind) for at, kind in enumerate(kinds)]
    for costs in requests:
        before = [counter.peek(KEY, 0).remaining for counter in counters]
        checks = [(counter, KEY, cost) for counter, cost in zip(counters, costs, strict=False)]
        answers = store.check_together(checks)
        after = [counter.peek(KEY, 0).remaining for counter in counters]
        passes = all(cost <= left for cost, left in zip(costs, before, strict=False))
        assert all(answers) is passes
        taken = [was - left for was, left in zip(before, after, strict=True)]
        assert taken == ([cost for _, _, cost in checks] if passes else [0] * len(counters))
        for each, cost, left in zip(answers, costs, before, strict=False):
            assert isinstance(each, Decision)
            assert passes or each.allowed is (cost <= left)
