"""Which reports go to which region, and which totals all have accepted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.model import Limit
from ratekeeper.decide.regional import Accepted, AcrossRegions, Learnt, Report, SubjectKey
from ratekeeper.regions import sync as sync_module
from ratekeeper.regions.sync import Batch, Excess, Sync

LIMITS = (Limit(100, per=60),)
YES, NO = Learnt(True, 0), Learnt(False, 0)


def report(
    subject: str = "ann",
    total: int = 5,
    across: AcrossRegions = "exact",
    *,
    generation: int = 1,
    returned: int = 0,
    demand: int = 0,
) -> Report:
    """Return a report of one subject."""
    key = SubjectKey("r", subject)
    counts = (total * 1_000_000,)
    return Report(
        key, LIMITS, across, generation, total, (returned,), counts, demand, total, at_ns=0
    )


def started(live: tuple[str, ...] = ("us", "ap")) -> Sync:
    """Return a sync with two other regions."""
    sync = Sync()
    sync.use(("us", "ap"), live, 1)
    return sync


def test_an_exact_total_is_accepted_by_all_regions_of_the_epoch() -> None:
    """One region that has not accepted it is enough to keep it."""
    sync = started()
    batches = sync.sending([report()], 0)
    assert batches.keys() == {"us", "ap"}
    sync.answered("us", batches["us"], [YES], 1)
    assert not sync.accepted()
    sync.answered("ap", batches["ap"], [YES], 1)
    assert sync.accepted() == [Accepted(SubjectKey("r", "ann"), 1, 5, (0,))]
    assert not sync.accepted()
    assert sync.unaccepted_units == 0


def test_a_region_that_does_not_accept_or_answer_keeps_the_total() -> None:
    """A learnt total that is not accepted does not count, and neither does a lost answer."""
    for answer in (NO, None):
        sync = started()
        batches = sync.sending([report()], 0)
        sync.answered("us", batches["us"], [YES], 1)
        if answer is None:
            sync.failed("ap", batches["ap"])
        else:
            sync.answered("ap", batches["ap"], [answer], 1)
        assert not sync.accepted()
        assert sync.unaccepted_units == 5
        # It is due again. The region that has accepted it is not asked twice.
        again = sync.sending([report()], 2)
        assert again.keys() == {"ap"}
        sync.answered("ap", again["ap"], [YES], 3)
        assert [each.total for each in sync.accepted()] == [5]


def test_the_least_of_several_totals_is_accepted() -> None:
    """Regions that are at different totals have all accepted the smallest one."""
    sync = started()
    first = sync.sending([report(total=5)], 0)
    second = sync.sending([report(total=9, returned=2)], 1)
    sync.answered("us", second["us"], [YES], 2)
    sync.answered("ap", first["ap"], [YES], 2)
    assert [(each.total, each.returned) for each in sync.accepted()] == [(5, (0,))]
    sync.answered("us", first["us"], [YES], 3)  # an old answer takes nothing back
    sync.answered("ap", second["ap"], [YES], 3)
    assert [(each.total, each.returned) for each in sync.accepted()] == [(9, (2,))]


def test_answers_of_another_epoch_or_generation_do_not_count() -> None:
    """The regions and the shares were others, or the region has counted anew."""
    sync = started()
    old = sync.sending([report()], 0)
    sync.use(("us", "ap"), ("us", "ap"), 2)
    sync.sending([report()], 1)
    for region, batch in old.items():
        sync.answered(region, batch, [YES], 2)
    assert not sync.accepted()
    sync = started()
    old = sync.sending([report(generation=1)], 0)
    sync.sending([report(generation=2, total=1)], 1)
    for region, batch in old.items():
        sync.answered(region, batch, [YES], 2)
    assert not sync.accepted()


def test_an_eventual_total_needs_the_live_regions_only() -> None:
    """It is reported again later, until the region that was away has learnt it."""
    sync = started(live=("us",))
    batches = sync.sending([report(across="eventual")], 0)
    assert batches.keys() == {"us"}
    sync.answered("us", batches["us"], [YES], 1)
    (done,) = sync.accepted()
    assert (done.total, done.everywhere) == (5, False)
    # Still away: the store is told again, and no region is.
    assert not sync.sending([report(across="eventual")], 2)
    assert [each.everywhere for each in sync.accepted()] == [False]
    # It is back.
    sync.use(("us", "ap"), ("us", "ap"), 1)
    batches = sync.sending([report(across="eventual")], 3)
    assert batches.keys() == {"ap"}
    sync.answered("ap", batches["ap"], [YES], 4)
    assert [each.everywhere for each in sync.accepted()] == [True]


def test_an_older_total_is_not_accepted_again() -> None:
    """The store has accepted the newer one without a region that was away and is back now."""
    sync = Sync()
    sync.use(("us",), ("us",), 1)
    batch = sync.sending([report(total=5, across="eventual")], 0)["us"]
    sync.answered("us", batch, [YES], 1)
    assert [each.everywhere for each in sync.accepted()] == [True]
    batch = sync.sending([report(total=6, across="eventual")], 2)["us"]
    sync.answered("us", batch, [YES], 3)
    sync.accepted()
    first = sync.sending([report(total=7, across="eventual")], 4)["us"]
    sync.answered("us", first, [YES], 5)
    sync.accepted()
    older = sync.sending([report(total=8, across="eventual")], 6)["us"]
    sync.use(("us",), (), 1)
    sync.sending([report(total=9, across="eventual")], 7)
    assert [(each.total, each.everywhere) for each in sync.accepted()] == [(9, False)]
    sync.use(("us",), ("us",), 1)
    sync.answered("us", older, [YES], 8)
    assert not sync.accepted()
    batch = sync.sending([report(total=9, across="eventual")], 9)["us"]
    assert not sync.accepted()
    sync.answered("us", batch, [YES], 10)
    assert [(each.total, each.everywhere) for each in sync.accepted()] == [(9, True)]


def test_a_region_alone_accepts_eventual_totals_itself() -> None:
    """Without live regions, eventual totals are accepted at once, and exact ones never."""
    sync = started(live=())
    assert not sync.sending([report("ann", across="eventual"), report("bob")], 0)
    assert [each.key.subject for each in sync.accepted()] == ["ann"]


def test_demand_is_sent_although_the_total_is_known() -> None:
    """The share of an eventual limit follows the demand, also of denied requests."""
    sync = started()
    for now_ns in (0, 1):
        batches = sync.sending([report(across="eventual", demand=3)], now_ns)
        assert batches.keys() == {"us", "ap"}
        sync.answered("us", batches["us"], [YES], now_ns)


def test_excess_is_counted_and_returned() -> None:
    """The leader reports which subjects are above their limits."""
    sync = started()
    batches = sync.sending([report()], 0)
    assert sync.answered("us", batches["us"], [Learnt(True, 7)], 1) == [
        Excess(SubjectKey("r", "ann"), 7)
    ]
    counts = sync.counts("us")
    assert (counts.excess_units, counts.accepted, counts.pending) == (7, 1, 0)


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, the batches on their way, the queue and the subjects have their maxima."""
    monkeypatch.setattr(sync_module, "BATCH_MAX", 2)
    monkeypatch.setattr(sync_module, "BATCHES_MAX", 2)
    monkeypatch.setattr(sync_module, "WAITING_MAX", 6)
    monkeypatch.setattr(sync_module, "SUBJECTS_MAX", 8)
    sync = Sync()
    sync.use(("us",), ("us",), 1)
    first = sync.sending([report(f"s{at}") for at in range(20)], 5)["us"]
    assert [each.key.subject for each in first.reports] == ["s0", "s1"]
    assert len(sync._subjects) == 8
    second = sync.sending([], 6)["us"]
    assert not sync.sending([], 7)
    assert sync.in_flight("us") == 2
    assert sync.waits_since_ns("us", 7) == 5
    sync.failed("us", first)
    sync.answered("us", second, [YES, YES], 8)
    third = sync.sending([], 9)["us"]
    assert [each.key.subject for each in third.reports] == ["s4", "s5"]
    sync.answered("us", third, [YES, YES], 10)
    assert not sync.sending([], 11)
    again = sync.sending(first.reports, 12)["us"]  # the store reports them again
    assert sync.waits_since_ns("us", 12) == 5
    sync.answered("us", again, [YES, YES], 13)
    assert sync.waits_since_ns("us", 13) is None
    assert sync.counts("us").failed == 2


def test_exact_totals_are_sent_only_while_all_regions_can_be_reached() -> None:
    """A region that learns a total which not all can accept would deliver less than its share."""
    sync = started(live=("us",))
    exact, eventual = report("ann"), report("bob", across="eventual")
    batches = sync.sending([exact, eventual], 0)
    assert [each.reports for each in batches.values()] == [[eventual]]
    sync.use(("us", "ap"), ("us", "ap"), 1)
    batches = sync.sending([exact], 1)
    assert batches.keys() == {"us", "ap"}


def test_exact_totals_wait_while_two_other_regions_are_apart() -> None:
    """Those two report nothing, so a region that reaches all would take the rate of all."""
    sync = started()
    exact, eventual = report("ann"), report("bob", across="eventual")
    sync.use(("us", "ap"), ("us", "ap"), 1, is_whole=False)
    batches = sync.sending([exact, eventual], 0)
    assert [each.reports for each in batches.values()] == [[eventual], [eventual]]
    sync.use(("us", "ap"), ("us", "ap"), 1)
    assert sync.sending([exact], 1).keys() == {"us", "ap"}


def test_the_newest_report_of_a_subject_waits() -> None:
    """A subject that is touched again while it waits is sent once, with its last total."""
    sync = started()
    for at in range(9):  # more than may be on their way
        sync.sending([report(f"s{at}")], 0)
    sync.sending([report("ann", total=5)], 1)
    sync.sending([report("ann", total=6)], 2)
    queue = sync._queues["us"]
    assert [(at_ns, each.total) for at_ns, each in queue.waiting.values()] == [(0, 5), (1, 6)]


OTHERS = ("us", "ap", "za")


def settles(sync: Sync, last: Report) -> None:
    """Check that a total is accepted in the end, when all regions are live and answer."""
    batches = sync.sending([last], 0)
    assert batches.keys() == set(OTHERS)
    for region, batch in batches.items():
        sync.answered(region, batch, [YES] * len(batch.reports), 0)
    found = sync.accepted()[-1]
    assert (found.total, found.everywhere) == (last.total, True)
    assert sync.unaccepted_units == 0


@given(seed=st.integers(0, 2**32))
def test_only_what_all_have_accepted_is_accepted(seed: int) -> None:
    """Whatever is lost, late, refused or reported again, and whichever regions are live."""
    draw = random.Random(seed)
    across: AcrossRegions = draw.choice(("exact", "eventual"))
    sync, epoch, live = Sync(), 1, set(OTHERS)
    sync.use(OTHERS, live, epoch)
    in_flight: list[tuple[str, Batch]] = []
    known: set[tuple[int, str, int, int]] = set()  # epoch, region, generation, total
    generation, total = 1, 0

    def check() -> None:
        for each in sync.accepted():
            has = {
                name: max(
                    (t for e, n, g, t in known if (e, n, g) == (epoch, name, each.generation)),
                    default=0,
                )
                for name in OTHERS
            }
            needed = OTHERS if across == "exact" or each.everywhere else tuple(live)
            assert all(has[name] >= each.total for name in needed), (each, has)

    def send() -> None:
        reports = [report(total=total, across=across, generation=generation)] if total else []
        in_flight.extend(sync.sending(reports, 0).items())
        check()

    def answer(region: str, batch: Batch, learnt: Learnt) -> None:
        if learnt.accepted:
            known.update(
                (batch.epoch, region, each.generation, each.total) for each in batch.reports
            )
        sync.answered(region, batch, [learnt] * len(batch.reports), 0)
        check()

    for _ in range(60):
        match draw.choice(("spend", "send", "send", "answer", "answer", "fail", "live", "change")):
            case "spend":
                total += draw.randint(1, 3)
            case "send":
                send()
            case "answer" if in_flight:
                answer(*in_flight.pop(draw.randrange(len(in_flight))), draw.choice((YES, YES, NO)))
            case "fail" if in_flight:
                sync.failed(*in_flight.pop(draw.randrange(len(in_flight))))
            case "live":
                live = {name for name in OTHERS if draw.random() < 0.7}
                sync.use(OTHERS, live, epoch)
            case "change" if draw.random() < 0.3:
                if draw.random() < 0.5:
                    epoch += 1
                    sync.use(OTHERS, live, epoch)
                else:
                    generation, total = generation + 1, 0
    for region, batch in in_flight:
        sync.failed(region, batch)
    sync.use(OTHERS, OTHERS, epoch)
    settles(sync, report(total=total + 1, across=across, generation=generation))
