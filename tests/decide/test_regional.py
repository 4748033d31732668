"""Limits that regions share: the reference."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND, ManualClock
from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName, Limit
from ratekeeper.decide.regional import (
    Accepted,
    AcrossRegions,
    MemoryRegional,
    MemoryRegionalCounter,
    Report,
    Shares,
)
from tests.decide.regional_fleet import run_random
from tests.simulator.regions import result_of

START_S = 1_800_000_000
HUNDRED = (Limit(100, per=60),)


def region(
    clock: ManualClock, others: tuple[str, ...] = ("there",), share: Fraction | None = None
) -> MemoryRegional:
    """Return the store of a region, by default with an equal share."""
    store = MemoryRegional(clock)
    _, token = result_of(store.lead("leader", 10**18))
    use(store, clock, share or Fraction(1, 1 + len(others)), others=others)
    assert token == 1
    return store


def use(
    store: MemoryRegional,
    clock: ManualClock,
    share: Fraction,
    before: Fraction | None = None,
    *,
    epoch: int = 1,
    others: tuple[str, ...] = ("there",),
) -> None:
    """Set the share of a region."""
    shares = Shares(epoch, share, before or share, clock.now_ns(), others)
    assert result_of(store.set_shares(shares, 1))


def admitted(
    store: MemoryRegional, across: AcrossRegions, asked: int, limits: tuple[Limit, ...] = HUNDRED
) -> int:
    """Return how many of so many requests pass."""
    counter = store.global_counter(limits, "api", across)
    return sum(counter.check("ann", 1).allowed for _ in range(asked))


def reported(store: MemoryRegional) -> Report:
    """Return the only report that is due."""
    (report,) = result_of(store.due(10, 1))
    return report


def accept(store: MemoryRegional, report: Report) -> None:
    """Tell a region that all others have accepted its report."""
    found = Accepted(report.key, report.generation, report.total, report.returned)
    result_of(store.accept(1, [found], 1))


def exchange(here: MemoryRegional, there: MemoryRegional, name: str = "here") -> bool:
    """Give the report of a region to another; return True if it was accepted."""
    report = reported(here)
    (learnt,) = result_of(there.learn(name, 1, [report]))
    if learnt.accepted:
        accept(here, report)
    return learnt.accepted


def used(store: MemoryRegional, limits: tuple[Limit, ...] = HUNDRED) -> tuple[int, ...]:
    """Return the units that count, of each limit."""
    return result_of(store.usage(limits, "api", "ann")).used


def both(clock: ManualClock) -> tuple[MemoryRegional, MemoryRegional]:
    """Return two regions with a half of the limits each."""
    return region(clock, ("there",)), region(clock, ("here",))


def counters(
    clock: ManualClock, across: AcrossRegions, limits: tuple[Limit, ...] = HUNDRED
) -> tuple[MemoryRegional, MemoryRegional, MemoryRegionalCounter, MemoryRegionalCounter]:
    """Return two regions, and a counter on each."""
    here, there = both(clock)
    return (
        here,
        there,
        here.global_counter(limits, "api", across),
        there.global_counter(limits, "api", across),
    )


# ── Totals ─────────────────────────────────────────────────────────────────────────────────────


def test_an_accepted_total_gives_room_again() -> None:
    """A region has its share at once, and its share of what is left with each acknowledgement."""
    here, there = both(ManualClock(START_S))
    assert admitted(here, "exact", 100) == 50
    assert exchange(here, there)
    assert admitted(here, "exact", 100) == 25
    assert admitted(there, "exact", 100) == 25


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_exact_is_never_over(algorithm: AlgorithmName, seed: int) -> None:
    """Random fleets: lags, loss, repeats, cuts in one direction, refunds and share changes."""
    limits = (
        Limit((20, 60, 200)[seed % 3], per=(2, 5, 20)[seed // 3 % 3], algorithm=algorithm),
        Limit(300, per=60, algorithm=UNIT_ALGORITHMS[seed % 5], name="second"),
    )
    fleet = run_random(seed, limits[: 1 + seed % 2], seconds=12)
    assert all(central.over <= 0 for central in fleet.central), f"over with the seed {seed}"
    assert fleet.admitted


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32), algorithm=st.sampled_from(["token_bucket", "sliding_window_log"])
)
def test_a_clock_that_is_set_back_puts_nothing_over(seed: int, algorithm: AlgorithmName) -> None:
    """Levels do not drain until the clock is where it was."""
    limit = Limit(60, per=5, algorithm=algorithm)
    fleet = run_random(seed, (limit,), seconds=12, refunds=False, shares=False, clocks=(-3, 0))
    assert fleet.central[0].over <= 0, f"over with the seed {seed}"


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_clocks_that_differ_put_no_fixed_window_over(seed: int) -> None:
    """The windows of all regions are counted by their numbers; clocks differ by up to 3 s."""
    limit = Limit(60, per=5, algorithm="fixed_window")
    fleet = run_random(seed, (limit,), seconds=12, refunds=False, shares=False, ahead_s=3)
    assert fleet.central[0].over <= 0, f"over with the seed {seed}"


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_a_clock_that_is_set_forward_gives_the_units_of_that_time(seed: int) -> None:
    """The share of the region, of what the limit refills in that time; no more."""
    limit = Limit(60, per=5)
    fleet = run_random(seed, (limit,), seconds=12, refunds=False, shares=False, clocks=(-3, 3))
    assert fleet.central[0].over <= fleet.gained * 12, f"over with the seed {seed}"


def test_a_region_without_room_does_not_accept() -> None:
    """The case of ADR 14: a region that has spent its share leaves no room for others."""
    here, there = both(ManualClock(START_S))
    assert admitted(there, "exact", 100) == 50
    assert admitted(here, "exact", 10) == 10
    assert not exchange(here, there)
    assert used(there) == (60,)


def test_a_store_that_lost_its_last_totals_moves_no_more_than_it_has() -> None:
    """A total above that of the store is accepted: its failover has lost the last units."""
    here, _ = both(ManualClock(START_S))
    admitted(here, "exact", 10)
    report = reported(here)
    accept(here, report._replace(total=30))
    assert used(here) == (10,)
    assert result_of(here.usage(HUNDRED, "api", "ann")).unaccepted == (0,)


def test_a_store_that_lost_all_counts_begins_anew() -> None:
    """Its totals begin at zero with a later generation; late reports of the old one are refused."""
    clock = ManualClock(START_S)
    here, there = both(clock)
    admitted(here, "exact", 30)
    late = reported(here)
    assert result_of(there.learn("here", 1, [late]))[0].accepted
    clock.advance(1)
    here = region(clock)
    admitted(here, "exact", 10)
    assert exchange(here, there)
    before = used(there)
    assert not result_of(there.learn("here", 1, [late]))[0].accepted
    assert used(there) == before


def test_counts_that_begin_anew_are_learnt_although_the_clock_was_set_back() -> None:
    """A generation that seems older is new, if the later one was silent for a while."""
    clock = ManualClock(START_S)
    here, there = both(clock)
    admitted(here, "eventual", 30)
    assert exchange(here, there)
    older = ManualClock(START_S - 3_600)
    here = region(older)
    admitted(here, "eventual", 20)
    clock.advance(60)
    assert exchange(here, there)
    assert used(there) == (20,)


def test_a_report_with_other_numbers_or_another_mode_changes_no_rule() -> None:
    """A region uses the limits and the mode of its own rule."""
    clock = ManualClock(START_S)
    here, there = both(clock)
    admitted(here, "eventual", 10, (Limit(1_000, per=60),))
    assert exchange(here, there)
    assert admitted(there, "exact", 100) == 45
    assert admitted(there, "exact", 100, (Limit(200, per=60),)) == 50


def test_a_report_of_another_number_of_limits_is_not_learnt() -> None:
    """It cannot be of this rule; the regions go on."""
    here, there = both(ManualClock(START_S))
    admitted(here, "exact", 10)
    admitted(there, "exact", 1)
    report = reported(here)
    wrong = report._replace(counts=(*report.counts, 5), returned=(0, 0))
    assert result_of(there.learn("here", 1, [wrong])) == [(False, 0)]
    assert used(there) == (1,)


# ── Refunds ────────────────────────────────────────────────────────────────────────────────────


def test_returned_units_of_one_report_are_not_taken_off_twice() -> None:
    """The units that a report says still count are without those returned already."""
    clock = ManualClock(START_S)
    here, there, counter, _ = counters(clock, "exact")
    decision = counter.check("ann", 10)
    counter.refund("ann", 4, decision.charged_ns)
    assert exchange(here, there)
    assert used(here) == used(there) == (6,)


def test_returned_units_are_not_those_of_another_region() -> None:
    """Time has drained the units elsewhere, when a late report says that they were returned."""
    clock = ManualClock(START_S)
    here, there, counter, other = counters(clock, "exact")
    decision = counter.check("ann", 10)
    assert exchange(here, there)
    counter.refund("ann", 10, decision.charged_ns)
    clock.advance(30)
    other.check("ann", 20)
    accept(there, reported(there))
    assert used(there) == (20,)
    assert exchange(here, there)
    assert used(there) == (20,)


def test_returned_units_are_known_to_the_other_region() -> None:
    """A refund gives room in both regions, whether the units were accepted or not."""
    clock = ManualClock(START_S)
    here, there, counter, _ = counters(clock, "exact")
    decision = counter.check("ann", 40)
    assert exchange(here, there)
    counter.refund("ann", 30, decision.charged_ns)
    assert exchange(here, there)
    assert used(here) == used(there) == (10,)


def test_each_limit_gets_back_what_time_has_not_returned() -> None:
    """A bucket that is full again takes nothing from the refund of a daily limit."""
    clock = ManualClock(START_S)
    limits = (Limit(100, per=1), Limit(1_000, per=86_400, algorithm="fixed_window"))
    here, there, counter, _ = counters(clock, "exact", limits)
    decision = counter.check("ann", 40)
    assert exchange(here, there)
    clock.advance(10)
    counter.refund("ann", 30, decision.charged_ns)
    assert exchange(here, there)
    assert used(here, limits) == used(there, limits) == (0, 10)


def test_a_region_that_asks_alone_is_not_over() -> None:
    """An eventual limit of 5 admits 5, also when its first units were accepted elsewhere."""
    clock = ManualClock(START_S)
    here, there, counter, _ = counters(clock, "eventual", (Limit(5, per=3_600),))
    admitted = 0
    for _ in range(10):
        admitted += counter.check("ann", 1).allowed
        exchange(here, there)
        clock.advance(3)
    assert admitted == 5


@pytest.mark.parametrize("across", ["exact", "eventual"])
def test_a_refund_of_one_unit_returns_it(across: AcrossRegions) -> None:
    """Time has returned a thousandth of it already; the rest is returned here and elsewhere."""
    clock = ManualClock(START_S)
    limits = (Limit(100, per=100),)
    here, there, counter, _ = counters(clock, across, limits)
    for _ in range(20):
        decision = counter.check("ann", 1)
        clock.advance(0.001)
        counter.refund("ann", 1, decision.charged_ns)
    assert exchange(here, there)
    clock.advance(0.1)
    assert used(here, limits) == used(there, limits) == (0,)


def test_a_log_gives_back_the_entries_of_the_charge() -> None:
    """A newer entry stays: without it, the log would admit more than the limit later on."""
    clock = ManualClock(START_S)
    limits = (Limit(100, per=60, algorithm="sliding_window_log"),)
    store = region(clock, share=Fraction(1))
    counter = store.global_counter(limits, "api", "exact")
    first = counter.check("ann", 50)
    clock.advance(50)
    counter.check("ann", 50)
    counter.refund("ann", 50, first.charged_ns)
    clock.advance(20)
    assert used(store, limits) == (50,)


# ── Windows and clocks ─────────────────────────────────────────────────────────────────────────


def test_clocks_that_differ_do_not_put_a_window_over() -> None:
    """A report of a window that has not begun here is learnt when it has."""
    limits = (Limit(100, per=60, algorithm="fixed_window"),)
    ahead, behind = ManualClock(START_S + 60), ManualClock(START_S + 59)
    here, there = region(ahead), region(behind, ("here",))
    assert admitted(here, "exact", 100, limits) == 50
    assert not exchange(here, there)
    ahead.advance(1)
    behind.advance(1)
    assert exchange(here, there)
    assert admitted(there, "exact", 100, limits) == 25


def test_a_report_of_the_window_before_is_counted_there_and_not_accepted() -> None:
    """A fixed window forgets it, and the previous window of a sliding counter fades."""
    for algorithm, counted in (("fixed_window", 0), ("sliding_window_counter", 20)):
        limits = (Limit(100, per=60, algorithm=algorithm),)  # type: ignore[arg-type]  # a literal
        clock = ManualClock(START_S + 59)
        here, there = both(clock)
        admitted(here, "exact", 20, limits)
        report = reported(here)
        clock.advance(1)
        assert not result_of(there.learn("here", 1, [report]))[0].accepted
        assert used(there, limits) == (counted,)


def test_a_clock_that_is_set_back_delays_neither_reports_nor_a_leader() -> None:
    """Times that lie too far ahead were noted before."""
    clock = ManualClock(START_S)
    here, _ = both(clock)
    admitted(here, "exact", 10)
    assert reported(here).total == 10
    result_of(here.step_down("leader"))
    assert result_of(here.lead("first", 3 * NS_PER_SECOND))[0] == "first"
    clock.advance(-3_600)
    assert [report.total for report in result_of(here.due(10, 2))] == [10]
    assert result_of(here.lead("second", 3 * NS_PER_SECOND))[0] == "second"


def test_demand_of_a_region_fades_although_the_clock_was_set_back() -> None:
    """Otherwise the share of an eventual limit would stay low for as long."""
    clock = ManualClock(START_S)
    here, there = both(clock)
    admitted(there, "eventual", 90)
    assert exchange(there, here, "there")
    clock.advance(-3_600)
    assert admitted(here, "eventual", 100) == 10


# ── Shares ─────────────────────────────────────────────────────────────────────────────────────


def test_a_state_that_missed_a_fall_of_its_share_gets_the_rise() -> None:
    """Another region had the share meanwhile, and may have spent it."""
    clock = ManualClock(START_S)
    store = region(clock)
    assert admitted(store, "exact", 1) == 1
    use(store, clock, Fraction(1, 10), epoch=2)
    use(store, clock, Fraction(1, 2), Fraction(1, 10), epoch=2)
    assert used(store) == (81,)
    assert admitted(store, "exact", 100) == 9


def test_a_rise_drains_own_units_at_the_share_of_before() -> None:
    """The time before the rise counts with the lower share."""
    clock = ManualClock(START_S)
    store = region(clock, share=Fraction(1, 10))
    assert admitted(store, "exact", 100) == 10
    clock.advance(30)
    use(store, clock, Fraction(1, 2), Fraction(1, 10))
    assert result_of(store.usage(HUNDRED, "api", "ann")).unaccepted == (5,)


@pytest.mark.parametrize("first", ["refund", "due", "accept", "check"])
def test_whichever_call_is_the_first_after_a_rise_counts_it(first: str) -> None:
    """Own units drained at the lower share until then, and others learn all of them."""
    clock = ManualClock(START_S)
    store = region(clock, share=Fraction(1, 10))
    counter = store.global_counter(HUNDRED, "api", "exact")
    assert admitted(store, "exact", 100) == 10
    (before,) = result_of(store.due(10, 1))
    clock.advance(30)
    use(store, clock, Fraction(1, 2), Fraction(1, 10))
    if first == "refund":
        counter.refund("ann", 1, clock.now_ns())
    elif first == "due":
        (report,) = result_of(store.due(10, 1))
        assert report.counts == (5_000_000,)
    elif first == "accept":
        result_of(store.accept(1, [Accepted(before.key, before.generation, 5, (0,))], 1))
    left = 4 if first == "refund" else 5
    assert result_of(store.usage(HUNDRED, "api", "ann")).unaccepted == (left,)
    # 80 of 100 may have been spent by another region, which are 40 of this one's 50.
    assert admitted(store, "exact", 100) == 10 - left


def test_eventual_limits_take_no_part_in_a_change_of_shares() -> None:
    """Their share follows the demand."""
    clock = ManualClock(START_S)
    store = region(clock, share=Fraction(1, 10))
    use(store, clock, Fraction(1, 2), Fraction(1, 10))
    assert admitted(store, "eventual", 200) == 100


# ── Eventual ───────────────────────────────────────────────────────────────────────────────────


def test_an_eventual_limit_admits_one_request_that_its_share_cannot_hold() -> None:
    """The other region asks for much, and there is room for a request of many units."""
    clock = ManualClock(START_S)
    here, there, counter, other = counters(clock, "eventual")
    for _ in range(50):
        other.check("ann", 1)
    assert exchange(there, here, "there")
    assert counter.check("ann", 20)
    denied = counter.check("ann", 20)
    assert not denied
    assert denied.retry_after_ns == NS_PER_SECOND // 2
    assert exchange(here, there)
    assert counter.check("ann", 20)


def test_two_regions_that_were_alone_learn_what_still_counts_once() -> None:
    """A region does not report the units of another as its own."""
    clock = ManualClock(START_S)
    here, there = both(clock)
    for store in (here, there):
        use(store, clock, Fraction(1, 2), others=())
    for _ in range(300):
        clock.advance(0.6)
        admitted(here, "eventual", 1)
        admitted(there, "eventual", 1)
    for store in (here, there):
        admitted(store, "eventual", 100)
        accept(store, reported(store))  # without live regions, all have accepted
    clock.advance(1)
    admitted(here, "eventual", 1)
    admitted(there, "eventual", 1)
    (learnt,) = result_of(there.learn("here", 1, [reported(here)]))
    assert 93 <= learnt.excess <= 95
    (learnt,) = result_of(here.learn("there", 1, [reported(there)]))
    assert 93 <= learnt.excess <= 95


def test_a_few_units_over_are_no_excess() -> None:
    """Two busy regions are over by a unit now and then; an operator hears of partitions only."""
    clock = ManualClock(START_S)
    here, there = both(clock)
    assert admitted(here, "eventual", 100) == 100
    assert admitted(there, "eventual", 5) == 5
    (learnt,) = result_of(there.learn("here", 1, [reported(here)]))
    assert learnt.excess == 0
    assert used(there) == (105,)


def test_a_cost_above_the_limit_never_fits() -> None:
    """Exact: above the share."""
    store = region(ManualClock(START_S))
    with pytest.raises(CapacityError):
        store.global_counter(HUNDRED, "api", "eventual").check("ann", 101)
    with pytest.raises(CapacityError):
        store.global_counter(HUNDRED, "api", "exact").check("ann", 51)


# ── Grants ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("across", ["exact", "eventual"])
def test_a_grant_is_spent_by_units_that_do_not_fit(across: AcrossRegions) -> None:
    """A region that is above its share spends no more of a grant than the cost."""
    clock = ManualClock(START_S)
    store = region(clock, share=Fraction(1, 2))
    counter = store.global_counter(HUNDRED, "api", across)
    while counter.check("ann", 1):
        pass
    use(store, clock, Fraction(1, 10), epoch=2)
    counter.grant("ann", 30, None)
    assert sum(counter.check("ann", 1).allowed for _ in range(50)) == 30
    assert reported(store).total in {50, 100}


def test_a_total_that_a_region_has_missed_is_due_until_it_has_learnt_it() -> None:
    """Also if the leader that has read the report dies before it can give it to that region."""
    clock = ManualClock(START_S)
    store = region(clock)
    assert admitted(store, "eventual", 1) == 1
    report = reported(store)
    missed = Accepted(report.key, report.generation, report.total, report.returned, False)
    result_of(store.accept(1, [missed], 1))
    assert not result_of(store.due(10, 1))
    for seconds in (10, 1, 1):
        clock.advance(seconds)
        assert reported(store).total == 1  # it was not accepted since
    accept(store, report)
    clock.advance(20)
    assert not result_of(store.due(10, 1))
