"""Reports: what a node owes the authority arrives, in batches, and never twice for a lease."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Sequence

import pytest

from ratekeeper import Fleet, Limiter, Request, StoreUnavailable
from ratekeeper.core.model import Consistency
from ratekeeper.core.rates import limits_of
from ratekeeper.core.steps import run
from ratekeeper.decide.allowances import CLAIM_NS, FORGET_NS
from ratekeeper.decide.failure import LocalCheck
from ratekeeper.decide.leasing import GiveBack, LateCharge, Report
from ratekeeper.decide.store import Answer
from ratekeeper.fleet import node as nodes
from ratekeeper.fleet import reports
from ratekeeper.fleet.counters import NodeCounter
from ratekeeper.fleet.store import FleetStore
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringStore
from tests.failing_store import PartlyFailingShared
from tests.fleet.nodes import NodeOfTest, SharedStore
from tests.redis_servers.waiting import until

LIMITS = limits_of("1000/hour")
KEY = "user:42"


def spending_node(consistency: str, count: int = 6) -> tuple[ManualClock, SharedStore, NodeOfTest]:
    """Return a node that has spent some units."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    node = NodeOfTest(shared, clock)
    counter = node.store.counter(LIMITS, "r", consistency)  # type: ignore[arg-type]  # one of both
    for _ in range(count):
        assert counter.check(KEY, 1).allowed
    return clock, shared, node


def test_nothing_is_reported_before_it_is_due() -> None:
    """A live lease and a fresh charge stay in the table."""
    for consistency in ("leased", "eventual"):
        _, shared, node = spending_node(consistency)
        assert node.flush() == 0
        assert shared.controlled.reported == []


def test_one_batch_has_the_reports_of_many_subjects() -> None:
    """1,000 subjects are one call; the rest is the next batch."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    node = NodeOfTest(shared, clock)
    counter = node.store.counter(LIMITS, "r", "eventual")
    for number in range(1_200):
        counter.check(f"user:{number}", 1)
        counter.check(f"user:{number}", 2)
    clock.advance(0.3)
    assert node.flush() == reports.BATCH_MAX
    assert node.flush() == 200
    assert node.flush() == 0
    assert {each.units for each in shared.controlled.reported} == {2}
    assert node.node.counters.flush_seconds.data()[0] == 2
    assert node.node.counters.charged_units == 2_400


def test_a_late_charge_has_its_age() -> None:
    """So the authority counts it in the window in which it was admitted."""
    clock, shared, node = spending_node("eventual")
    clock.advance(0.3)
    node.flush()
    [report] = shared.controlled.reported
    assert report == LateCharge(report.counter, KEY, 5, 300_000_000)


def test_a_failed_charge_is_reported_again_and_a_failed_give_back_is_not() -> None:
    """The authority may have counted either: too much is safe, too little is not."""
    clock, shared, node = spending_node("eventual")
    clock.advance(0.3)
    shared.controlled.fails = StoreUnavailable("away")
    assert node.flush() == 1
    assert node.flush() == 0
    assert node.node.counters.failed == 1
    shared.controlled.fails = None
    clock.advance_ns(CLAIM_NS)
    assert node.flush() == 1
    assert shared.counter(LIMITS, "r").peek(KEY, 0).remaining in (994, 995)

    clock, shared, node = spending_node("leased")
    clock.advance(1.1)
    shared.controlled.fails = StoreUnavailable("away")
    assert node.flush() == 1
    assert node.node.counters.lost_units > 0
    shared.controlled.fails = None
    clock.advance_ns(2 * CLAIM_NS)
    assert node.flush() == 0
    assert all(isinstance(each, GiveBack) for each in shared.controlled.reported)


def test_what_was_admitted_in_an_outage_is_charged_once_the_authority_is_back() -> None:
    """Each unit once, with its age; while the authority is away, one attempt a second."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    node = NodeOfTest(shared, clock)
    shared.controlled.fails = StoreUnavailable("away")
    for _ in range(3):
        node.node.note_admitted([LocalCheck(LIMITS, "r", KEY, 10)])
        clock.advance(10)
        assert node.flush() > 0
        assert node.flush() == 0
    assert {each.units for each in shared.controlled.reported} == {10}
    shared.controlled.fails = None
    shared.controlled.reported.clear()
    clock.advance(1)
    assert node.flush() == 3
    assert [(each.units, each.age_ns) for each in late(shared)] == [
        (10, seconds * 10**9) for seconds in (31, 21, 11)
    ]
    assert shared.counter(LIMITS, "r").peek(KEY, 0).remaining == 970 + 1000 * 31 // 3600
    clock.advance(10)
    assert node.flush() == 0
    assert node.node.counters.charged_units == 30


class AdmittingFleet:
    """Counts of a fleet that leave each decision to this machine. Implements SharedCounts."""

    store = None

    def __init__(self, node: nodes.Node) -> None:
        self.note_admitted = node.note_admitted

    def nodes(self) -> int:
        return 1

    def decide(self, checks: Sequence[LocalCheck], *, spend: bool) -> None:
        return None


def test_a_split_rule_is_charged_where_the_authority_counts_it() -> None:
    """In the part that the check was for: no check reads the counts of the whole subject."""
    clock = ManualClock(1_000)
    shared = PartlyFailingShared(clock)
    rules = "version: 1\nrules: [{id: hot, by: user, limits: 80/hour, split: 4, on_failure: local}]"
    with Limiter.from_rules(rules, store=shared, clock=clock) as limiter:
        store = limiter.store
        assert isinstance(store, FleetStore)
        node = store.open_node()
        node.on_work = node.on_urgent = lambda: None
        limiter._local.fleet = AdmittingFleet(node)
        shared.failing = frozenset({"hot"})
        for _ in range(9):
            assert limiter.check(Request(user="ann")).allowed
        shared.failing = frozenset()
        while run(reports.Reports(node).flushing(node.authority.report)):
            pass
        assert limiter.peek(Request(user="ann")).remaining == 80 - 9


def late(shared: SharedStore) -> list[LateCharge]:
    return [each for each in shared.controlled.reported if isinstance(each, LateCharge)]


def test_a_forked_process_does_not_charge_what_its_parent_admitted() -> None:
    """The parent does."""
    _, _, node = spending_node("leased", count=0)
    node.node.note_admitted([LocalCheck(LIMITS, "r", KEY, 10)])
    node.node.forked()
    assert node.flush() == 0


def test_a_charge_that_failed_is_reported_once_more_at_the_end() -> None:
    """The process does not wait until it can be claimed again; a later claim replaces it."""
    clock, shared, node = spending_node("eventual")
    clock.advance(0.3)
    shared.controlled.fails = StoreUnavailable("away")
    assert node.flush() == 1
    shared.controlled.fails = None
    assert node.flush(ending=True) == 1
    assert node.flush(ending=True) == 0
    assert shared.counter(LIMITS, "r").peek(KEY, 0).remaining in (994, 995)

    clock, shared, node = spending_node("eventual")
    clock.advance(0.3)
    shared.controlled.fails = StoreUnavailable("away")
    assert node.flush() == 1
    clock.advance_ns(2 * CLAIM_NS)
    shared.controlled.fails = None
    assert node.flush() == 1
    assert node.flush(ending=True) == 0


def test_an_authority_that_raises_fails_the_whole_batch() -> None:
    """Not only one that answers with errors."""
    clock, shared, node = spending_node("eventual")
    clock.advance(0.3)

    def raising(_: object) -> None:
        raise StoreUnavailable("away")

    shared.controlled.report = raising  # type: ignore[method-assign, assignment]  # a stub
    assert node.flush() == 1
    assert node.node.counters.failed == 1


def test_claims_of_unknown_rules_are_left_to_other_processes_for_a_time() -> None:
    """Another process may know them; long after the rules are gone, they are dropped and counted.

    Otherwise they would be claimed for ever.
    """
    clock, shared, node = spending_node("eventual")
    known = dict(node.node.gates)
    node.node.gates.clear()
    for _ in range(3):
        clock.advance_ns(2 * CLAIM_NS)
        assert node.flush() == 1
    assert node.node.counters.lost_units == 0
    node.node.gates.update(known)
    clock.advance_ns(2 * CLAIM_NS)
    assert node.flush() == 1
    assert [each.units for each in shared.controlled.reported] == [5]

    clock, _, node = spending_node("eventual")
    node.node.gates.clear()
    clock.advance_ns(FORGET_NS)
    assert node.flush() == 1
    assert node.node.counters.lost_units == 5
    clock.advance_ns(2 * CLAIM_NS)
    assert node.flush() == 0
    assert node.node.counters.lost_units == 5


@pytest.mark.parametrize("consistency", ["leased", "eventual"])
def test_limits_in_use_are_known_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, consistency: Consistency
) -> None:
    """Their charges are reported and their units given back: none is lost."""
    monkeypatch.setattr(nodes, "GATES_MAX", 3)
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    node = NodeOfTest(shared, clock)
    rules = [f"r{number}" for number in range(10)]
    counters = [node.store.counter(LIMITS, rule, consistency) for rule in rules]
    admitted = 0
    for _ in range(20):
        admitted += sum(counter.check(KEY, 10).allowed for counter in counters for _ in range(12))
        clock.advance(1.1)
        node.flush()
    assert node.node.counters.lost_units == 0
    # 23 s give back up to 7 units for each rule, and an eventual rule is over by one budget.
    assert 10 * 990 <= admitted * 10 <= 10 * (1_007 + (consistency == "eventual") * 250)


def test_the_thread_reports_what_is_due() -> None:
    """It starts with the first allowance, and not before."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(flush_seconds=0.02), clock, owns_store=False))
    counter = store.counter(LIMITS, "r", "eventual")
    before = set(threading.enumerate())
    assert counter.check(KEY, 1).allowed
    assert counter.check(KEY, 1).allowed
    [thread] = set(threading.enumerate()) - before
    clock.advance(0.1)
    strict = shared.counter(LIMITS, "r")
    until(lambda: strict.peek(KEY, 0).remaining == 998, "the charge is reported", 20)
    store.close()
    assert not thread.is_alive()


def test_the_thread_goes_on_after_a_defect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, nothing that was taken for the batch is lost, and the next rounds report."""
    monkeypatch.setattr(reports, "DEFECT_S", 0.01)
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(flush_seconds=0.02), clock, owns_store=False))
    node = store.open_node()
    report, defects = shared.controlled.report, [ValueError("a defect")]

    def reporting(sent: Sequence[Report]) -> list[Answer]:
        if defects:
            raise defects.pop()
        return report(sent)

    shared.controlled.report = reporting  # type: ignore[method-assign]  # a stub
    node.note_admitted([LocalCheck(LIMITS, "r", KEY, 10)])
    until(lambda: not defects, "the first report fails", 20)
    clock.advance(2)
    strict = shared.counter(LIMITS, "r")
    until(lambda: strict.peek(KEY, 0).remaining == 990, "the charge is reported", 20)
    assert "a defect; the thread goes on" in caplog.text
    assert node.counters.failed == 1
    store.close()


def test_a_thread_that_has_ended_is_started_again() -> None:
    """Whatever has ended it."""
    clock, shared = ManualClock(1_000), SharedStore(ManualClock(1_000))
    store = AnsweringStore(FleetStore(shared, Fleet(), clock, owns_store=False))
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    store.open_node()
    thread = store._thread
    assert thread is not None
    thread._thread = ended
    thread.start()
    assert thread._thread is not ended
    assert thread._thread.is_alive()
    store.close()


def test_closing_flushes_charges_and_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an authority that is away: the process ends."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(), clock, owns_store=False))
    counter = store.counter(LIMITS, "r", "eventual")
    for _ in range(5):
        counter.check(KEY, 1)
    store.close()
    assert shared.counter(LIMITS, "r").peek(KEY, 0).remaining == 995
    store.close()

    monkeypatch.setattr(reports, "CLOSE_S_MAX", 0.0)
    other = AnsweringStore(FleetStore(shared, Fleet(), clock, owns_store=False))
    other.counter(LIMITS, "r", "eventual").check(KEY, 1)
    shared.controlled.fails = StoreUnavailable("away")
    other.close()


@pytest.mark.parametrize("failing", [1, 7])
def test_closing_flushes_charges_of_servers_that_answer(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A server that is away does not keep the charges of others from being reported."""
    monkeypatch.setattr(reports, "BATCH_MAX", 4)
    monkeypatch.setattr(reports, "CLOSE_S_MAX", 20.0)
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(), clock, owns_store=False))
    counter = store.counter(LIMITS, "r", "eventual")
    store.open_node().on_work = lambda: None
    subjects = [f"user:{number}" for number in range(20)]
    for subject in subjects:
        for _ in range(3):
            counter.check(subject, 1)
    away = set(subjects[::2][:failing])
    report = shared.controlled.report
    sent: list[str] = []

    def partly_failing(batch: Sequence[Report]) -> list[Answer]:
        sent.extend(each.subject for each in batch)
        answers = report(batch)
        return [
            StoreUnavailable("away") if each.subject in away else answer
            for each, answer in zip(batch, answers, strict=True)
        ]

    shared.controlled.report = partly_failing  # type: ignore[method-assign]  # a stub
    store.close()
    assert sorted(sent) == sorted(subjects)


def test_closing_has_its_whole_time_after_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that waits for a server uses none of it."""
    monkeypatch.setattr(reports, "CLOSE_S_MAX", 0.2)
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(), clock, owns_store=False))
    counter = store.counter(LIMITS, "r", "eventual")
    store.open_node().on_work = lambda: None
    for _ in range(5):
        counter.check(KEY, 1)
    thread = store._thread
    assert thread is not None
    released = threading.Event()
    thread._thread = threading.Thread(target=released.wait, daemon=True)
    thread._thread.start()
    store.close()
    released.set()
    assert shared.counter(LIMITS, "r").peek(KEY, 0).remaining == 995


def test_a_store_that_is_garbage_takes_its_thread_along() -> None:
    """A limiter that was never closed does not live for ever."""
    clock = ManualClock(1_000)
    store = AnsweringStore(
        FleetStore(SharedStore(clock), Fleet(flush_seconds=0.02), clock, owns_store=False)
    )
    counter = store.counter(LIMITS, "r", "eventual")
    before = set(threading.enumerate())
    counter.check(KEY, 1)
    [thread] = set(threading.enumerate()) - before
    node = weakref.ref(store.open_node())
    del store, counter
    until(lambda: gc.collect() >= 0 and node() is None, "the node is garbage", 20)
    until(lambda: not thread.is_alive(), "the thread has ended", 20)


def test_a_forked_process_spends_no_unit_of_its_parent() -> None:
    """It has a copy of the table in memory, and the parent spends the leases in it."""
    _, _, node = spending_node("leased")
    counter = node.store.counter(LIMITS, "r", "leased")
    assert isinstance(counter.counter, NodeCounter)
    held = counter.held(KEY)
    assert held > 0
    child = os.fork()
    if child == 0:
        # No test framework here: the exit status is the answer.
        empty = counter.held(KEY) == 0 and counter.allowance.spend(KEY, 1) is None
        os._exit(0 if empty and not node.node.leasing else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert counter.held(KEY) == held


def test_a_forked_process_starts_a_thread_of_its_own() -> None:
    """With its first allowance."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(flush_seconds=0.02), clock, owns_store=False))
    counter = store.counter(LIMITS, "r", "eventual")
    counter.check(KEY, 1)
    child = os.fork()
    if child == 0:
        counter.check("user:43", 1)
        names = [thread.name for thread in threading.enumerate()]
        os._exit(0 if names.count("ratekeeper-reports") == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    store.close()
