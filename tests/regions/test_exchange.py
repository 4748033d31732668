"""The leader of a region."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from threading import Event
from threading import enumerate as enumerate_threads
from time import monotonic
from typing import cast

import pytest

from ratekeeper.core.clock import NS_PER_SECOND, SystemClock
from ratekeeper.core.errors import ChangeRefused, ConfigError, StoreError
from ratekeeper.decide.regional import (
    LAYOUT,
    AcrossRegions,
    MemoryRegional,
    RegionalCounts,
)
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.table import (
    REGION_NOTE,
    TABLE_NOTE,
    Heard,
    Membership,
    ShareTable,
    parse_region,
    share_table,
)
from tests.regions.virtual import Process, World, run, until, usable


def leaders(processes: list[Process]) -> list[str]:
    """Return the names of the processes that lead."""
    return [each.exchange.name for each in processes if each.exchange.is_leader]


async def until_found(condition: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> float:
    """Wait for an awaited condition; return how long it took."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while not await condition():
        assert loop.time() - started_s < seconds, "the condition is never true"
        await asyncio.sleep(0.005)
    return loop.time() - started_s


def problem(process: Process, peer: str) -> str:
    """Return what the leader says of a link: its state and what is wrong."""
    term = process.exchange.term
    assert term is not None
    (link,) = [each for each in term.status().links if each.peer == peer]
    return f"{link.state} {link.problem}"


# ── Reports ────────────────────────────────────────────────────────────────────────────────────


def test_units_are_known_everywhere_and_accepted() -> None:
    """Within 100 ms and the latency of the link, the others know of units that one admits."""

    async def main() -> None:
        world = World("eu", "us", "ap", delay_s=0.1)
        await world.started()
        assert world.counter("eu").check("ann", 30)

        async def is_known() -> bool:
            return min(await world.used("us"), await world.used("ap")) >= 30

        assert await until_found(is_known) <= 0.1 + 0.1
        await until(lambda: not world.stores["eu"]._due, 1)
        usage = await world.stores["eu"].usage(world.counter("eu").limits, "api", "ann")
        assert usage.unaccepted == (0,)

    run(main())


def test_a_link_is_ready_before_the_first_report() -> None:
    """The leader calls `learn` of each other store without reports: a Cluster has many servers."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        eu, *_ = await world.started()
        others = [eu.stores["us"], eu.stores["ap"]]
        await until(lambda: all("learn" in each.calls for each in others), 2)

    run(main())


def test_a_dead_link_delays_no_other() -> None:
    """Two regions know of each other's units as fast as before if a third does not answer."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        await world.started()
        world.cut("eu", "ap")
        for at in range(5):
            assert world.counter("eu").check("ann", 3)

            async def is_known(units: int = 3 * at + 3) -> bool:
                return await world.used("us") >= units

            assert await until_found(is_known) <= 0.15
            await asyncio.sleep(0.6)
        assert await world.used("ap") == 0

    run(main())


@pytest.mark.parametrize("across", ["exact", "eventual"])
def test_the_lag_is_the_age_of_a_total_that_a_cut_off_region_lacks(across: AcrossRegions) -> None:
    """It grows through the partition and ends with the report. Before a check there is none."""

    async def main() -> None:
        world = World("eu", "us")
        eu, _ = await world.started()

        def lag() -> float:
            assert eu.exchange.term is not None
            (link,) = eu.exchange.term.status().links
            return link.lag_s

        world.cut("eu", "us")
        await asyncio.sleep(30)
        assert lag() == 0
        for at in range(9):
            assert world.counter("eu", across=across).check(f"user:{at}", 3)
        for passed_s in (5, 60):
            await asyncio.sleep(passed_s)
            assert passed_s - 1 <= lag() <= 66
        world.cuts.clear()
        await until(lambda: lag() == 0, 15)

    run(main())


def test_a_region_that_reaches_all_holds_exact_totals_while_two_others_are_apart() -> None:
    """It would take the rate of all. A region whose leader is gone says nothing any more."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        eu, _, ap = await world.started()
        await asyncio.sleep(2)
        world.cuts.add(("eu", "us"))
        assert await until(lambda: ap.exchange.sync.holds_exact) < 6
        assert usable(ap) == ("eu", "us")
        assert world.counter("ap").check("ann", 30)
        await asyncio.sleep(2)
        assert await world.used("us") == 0
        eu.stopped = True
        assert await until(lambda: not ap.exchange.sync.holds_exact) < 8
        await asyncio.sleep(2)
        assert await world.used("us") >= 29

    run(main())


def test_a_region_that_is_removed_is_apart_from_none() -> None:
    """It cannot be reached any more, and the others go on with their shares of all."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        eu, us, ap = await world.started()
        world.cut("eu", "ap")
        world.cut("us", "ap")
        await until(lambda: eu.exchange.sync.holds_exact and us.exchange.sync.holds_exact)
        await monitor(world, "eu").change_shares(dict.fromkeys(("eu", "us"), Fraction(1, 2)))
        ap.stopped = True
        await until(lambda: not eu.exchange.sync.holds_exact)
        await until(lambda: not us.exchange.sync.holds_exact)

    run(main())


def test_eventual_limits_merge_after_a_partition() -> None:
    """Also a subject that no client touches any more: the others learn of it in seconds."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        eu, _, ap = await world.started()
        world.cut("eu", "ap")
        world.cut("us", "ap")
        await until(lambda: usable(eu) == ("us",) and usable(ap) == ())
        assert world.counter("eu", 1_000, "eventual").check("ann", 900)
        assert world.counter("ap", 1_000, "eventual").check("ann", 900)
        await asyncio.sleep(5)
        assert await world.used("us", 1_000) < 1_000
        world.cuts.clear()

        async def is_merged() -> bool:
            return min([await world.used(region, 1_000) for region in world.stores]) > 1_500

        assert await until_found(is_merged) < 15
        await asyncio.sleep(1)  # until the answers are back
        excess = [each.exchange.sync.counts("us").excess_units for each in (eu, ap)]
        assert max(excess) > 200
        assert max(excess) < 900

    run(main())


# ── The lead ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wakes", [False, True])
def test_a_leader_that_dies_or_stops_is_replaced(wakes: bool) -> None:
    """Another process works in under 5 s. The old one that wakes up does no harm."""

    async def main() -> None:
        world = World("eu", "us")
        first, _ = await world.started()
        others = [world.start("eu", f"eu-{at}") for at in (2, 3, 4)]
        await asyncio.sleep(3)
        assert leaders([first, *others]) == ["eu-1"]
        first.stopped = True
        assert world.counter("eu").check("ann", 10)

        async def is_known() -> bool:
            return await world.used("us") >= 10

        assert await until_found(is_known) < 5
        first.stopped = not wakes
        assert world.counter("eu").check("ann", 10)
        await asyncio.sleep(5)
        assert len(leaders(others)) == 1
        assert not first.exchange.is_leader
        assert await world.used("us") == 20  # learnt once

    run(main())


def test_a_leader_that_stops_orderly_is_replaced_at_once() -> None:
    """It gives up the lead, so that the next candidate does not wait until it has expired."""

    async def main() -> None:
        world = World("eu", "us")
        first, _ = await world.started()
        second = world.start("eu", "eu-2")
        await asyncio.sleep(1)
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        assert await until(lambda: second.exchange.is_leader) < 1.3

    run(main())


def test_a_defect_in_the_leader_is_logged_and_it_begins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exception that is not a StoreError ends neither the thread nor the lead."""

    async def main() -> None:
        world = World("eu", "us")
        first, _ = await world.started()
        store = world.stores["eu"]
        due = store.due
        store.due = None  # type: ignore[method-assign, assignment]  # a call of it raises TypeError
        await until(lambda: "a defect" in caplog.text)
        store.due = due  # type: ignore[method-assign]  # it works again
        assert world.counter("eu").check("ann", 10)

        async def is_known() -> bool:
            return await world.used("us") >= 10

        await until_found(is_known, 10)
        assert first.exchange.is_leader

    run(main())


def test_a_store_that_does_not_answer_for_a_while() -> None:
    """The leader loses its lead and gets it back; what was due meanwhile arrives."""

    async def main() -> None:
        world = World("eu", "us")
        first, _ = await world.started()
        first.stopped = True
        await until(lambda: not first.exchange.is_leader)
        assert world.counter("eu").check("ann", 10)
        await asyncio.sleep(10)
        assert await world.used("us") == 0
        first.stopped = False

        async def is_known() -> bool:
            return await world.used("us") >= 10

        await until_found(is_known, 10)

    run(main())


def test_the_live_regions_survive_a_change_of_leaders() -> None:
    """A new leader does not leave out regions that it has not asked yet."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        first, *_ = await world.started()
        await asyncio.sleep(2)
        seen: set[tuple[str, ...]] = set()

        async def watch() -> None:
            while True:
                shares = await world.stores["eu"].shares()
                assert shares is not None
                seen.add(shares.live)
                await asyncio.sleep(0.01)

        watching = asyncio.get_running_loop().create_task(watch())
        first.stopped = True
        second = world.start("eu", "eu-2")
        await until(lambda: usable(second) == ("ap", "us"))
        await asyncio.sleep(5)
        watching.cancel()
        assert seen == {("ap", "us")}

    run(main())


# ── Shares ─────────────────────────────────────────────────────────────────────────────────────


async def change(world: World, shares: dict[str, float], regions: tuple[str, ...] = ()) -> None:
    """Write a table as the command does, into the stores of these regions, or of all."""
    versions = []
    for store in world.stores.values():
        note = (await store.notes()).get(REGION_NOTE)
        versions.append(1 if note is None else parse_region(note).table.version)
    text = share_table(max(versions) + 1, shares).text()
    for region in regions or tuple(world.stores):
        await world.stores[region].note(TABLE_NOTE, text)


async def watch_shares(world: World, sums: list[Fraction]) -> None:
    """Note the sum of all shares, all the time."""
    while True:
        sums.append(sum([await world.share(region) for region in world.stores], Fraction(0)))
        await asyncio.sleep(0.02)


def test_a_region_is_removed_and_added_and_shares_are_set() -> None:
    """Shares never add up to more than 1, and each change is finished in seconds."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        processes = await world.started()
        sums: list[Fraction] = []
        watching = asyncio.get_running_loop().create_task(watch_shares(world, sums))

        async def has(**shares: float) -> bool:
            found = {region: await world.share(region) for region in world.stores}
            return found == {
                name: Fraction(share).limit_denominator() for name, share in shares.items()
            }

        await change(world, {"eu": 0.5, "us": 0.5}, ("us",))  # the others hear of it
        await until_found(lambda: has(eu=0.5, us=0.5, ap=0.0), 10)
        shares = await world.stores["eu"].shares()
        assert shares is not None
        assert shares.before == Fraction(1, 3)
        assert "has no share" in problem(processes[0], "ap")
        assert problem(processes[0], "ap").startswith("removed")
        await change(world, {"eu": 0.2, "us": 0.3, "ap": 0.5})
        await until_found(lambda: has(eu=0.2, us=0.3, ap=0.5), 10)
        shares = await world.stores["ap"].shares()
        assert shares is not None
        assert shares.before == 0
        await change(world, {"eu": 0.4, "us": 0.4, "ap": 0.2})
        await until_found(lambda: has(eu=0.4, us=0.4, ap=0.2), 10)
        watching.cancel()
        assert max(sums) == 1

    run(main())


def test_no_share_rises_while_a_region_of_the_table_is_away() -> None:
    """It has not lowered its share, as far as the others know."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        await world.started()
        world.cut("eu", "ap")
        world.cut("us", "ap")
        await change(world, {"eu": 0.5, "us": 0.4, "ap": 0.1}, ("eu", "us"))
        await asyncio.sleep(30)
        assert await world.share("eu") == Fraction(1, 3)
        world.cuts = {("ap", "us"), ("us", "ap"), ("eu", "ap")}  # ap reaches eu, and eu not ap
        await asyncio.sleep(5)
        assert [await world.share(region) for region in ("ap", "eu")] == [
            Fraction(1, 10),
            Fraction(1, 3),
        ]
        world.cuts = {("ap", "us"), ("us", "ap")}  # us hears through eu what ap has announced
        await asyncio.sleep(5)
        assert [await world.share(region) for region in ("eu", "us")] == [
            Fraction(1, 2),
            Fraction(2, 5),
        ]

    run(main())


def test_a_region_that_was_removed_while_it_was_away_checks_nothing_before_it_knows() -> None:
    """Its processes wait for the leader, and the leader asks the other regions first."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        *_, ap = await world.started()
        await asyncio.sleep(2)
        ap.stopped = True
        await change(world, {"eu": 0.5, "us": 0.5}, ("eu", "us"))
        await asyncio.sleep(10)
        assert [await world.share(region) for region in ("eu", "ap")] == [
            Fraction(1, 2),
            Fraction(1, 3),
        ]
        started = [world.start("ap", f"ap-{at}") for at in (2, 3)]
        shares = set()
        for process in started:
            assert await until(process.exchange.settled.is_set) < 2
            shares.add(await world.share("ap"))
        assert shares == {Fraction(0)}
        world.cuts = {("us", "eu"), ("us", "ap")}
        late = world.start("us", "us-2")  # a region that is led: no process waits for links
        assert await until(late.exchange.settled.is_set) < 0.2

    run(main())


def test_a_store_that_has_lost_its_data_starts_without_units() -> None:
    """What the region has spent is unknown, so it starts as if all was spent."""

    async def main() -> None:
        world = World("eu", "us")
        eu, us = await world.started()
        await asyncio.sleep(3)  # eu notes which store us has
        assert world.counter("us").check("ann", 50)
        lost, new = world.stores["us"], MemoryRegional(world.clocks["us"])
        lost.__dict__.update(new.__dict__)

        async def has_shares() -> bool:
            return await world.share("us") == Fraction(1, 2)

        assert await until_found(has_shares) < 10
        shares = await lost.shares()
        assert shares is not None
        assert shares.before == 0
        assert not world.counter("us").check("ann", 10)
        await until(lambda: usable(eu) == ("us",) and usable(us) == ("eu",))

    run(main())


def test_a_store_that_has_lost_its_data_alone_starts_without_units() -> None:
    """Nobody can tell its new leader that this is not the first start."""

    async def main() -> None:
        world = World("eu", "us")
        _, us = await world.started()
        world.cut("eu", "us")
        us.task.cancel()
        lost, new = world.stores["us"], MemoryRegional(world.clocks["us"])
        lost.__dict__.update(new.__dict__)
        world.start("us", "us-2")

        async def has_shares() -> bool:
            return await world.share("us") == Fraction(1, 2)

        assert await until_found(has_shares) < 10
        assert not world.counter("us").check("ann", 10)

    run(main())


def test_a_removed_region_that_has_lost_its_data_alone_adds_its_share_of_the_rate() -> None:
    """This is not guaranteed, as docs/regions.md says: until it reaches another region."""

    async def main() -> None:
        world = World("eu", "us")
        _, us = await world.started()
        us.task.cancel()
        world.cut("eu", "us")
        await change(world, {"eu": 1.0}, ("eu",))

        async def has(eu: Fraction, us: Fraction) -> bool:
            return [await world.share(region) for region in ("eu", "us")] == [eu, us]

        await until_found(lambda: has(Fraction(1), Fraction(1, 2)))
        lost, new = world.stores["us"], MemoryRegional(world.clocks["us"])
        lost.__dict__.update(new.__dict__)
        world.start("us", "us-2")
        await until_found(lambda: has(Fraction(1), Fraction(1, 2)))
        assert not world.counter("us").check("ann", 10)
        world.cuts.clear()
        assert await until_found(lambda: has(Fraction(1), Fraction(0))) < 10

    run(main())


def test_a_batch_that_is_cancelled_before_it_begins_is_not_on_its_way() -> None:
    """Otherwise eight changes of the lead could stop a link for good."""

    async def main() -> None:
        world = World("eu", "us")
        eu, us = await world.started()
        assert world.counter("eu").check("ann", 10)
        us.stopped = True
        term = eu.exchange.term
        assert term is not None
        term._send(await world.stores["eu"].due(10, term.token))
        assert eu.exchange.sync.in_flight("us") == 1
        for task in term._sending:
            task.cancel()
        await until(lambda: not eu.exchange.sync.in_flight("us"), 1)

    run(main())


# ── Mistakes ───────────────────────────────────────────────────────────────────────────────────


def test_a_candidate_survives_an_answer_that_it_does_not_understand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks again; otherwise a region could be without a leader until its nodes restart."""

    async def strange(*_: object) -> None:
        raise IndexError("an empty reply")

    async def main() -> None:
        world = World("eu", "us")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRegional, "lead", strange)
            eu = world.start("eu")
            await asyncio.sleep(3)
        await until(lambda: eu.exchange.is_leader, 5)

    run(main())


def test_a_defect_with_one_region_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader goes on with the other links, and logs the defect once."""
    hear = Membership.hear

    def hears(self: Membership, peer: str, notes: Mapping[str, str]) -> Heard:
        if peer == "ap":
            raise RuntimeError("a note that nobody has thought of")
        return hear(self, peer, notes)

    async def main() -> None:
        world = World("ap", "eu", "us")
        _, eu, _ = await world.started()
        term = eu.exchange.term
        monkeypatch.setattr(Membership, "hear", hears)
        await asyncio.sleep(5)
        assert eu.exchange.term is term
        assert usable(eu) == ("us",)
        assert world.counter("eu", across="eventual").check("ann", 10)

        async def is_known() -> bool:
            return await world.used("us") == 10

        assert await until_found(is_known) < 1

    run(main())
    assert sum("a defect" in each.message for each in caplog.records) == 2  # in eu and us


def test_a_store_of_another_region_is_refused() -> None:
    """The table of one region has the wrong store for another: nothing is sent there."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        eu, *_ = await world.started()
        eu.exchange.others["us"] = eu.exchange.others["ap"]
        assert eu.exchange.term is not None
        eu.exchange.term.links["us"].store = eu.exchange.others["ap"]
        await until(lambda: "is that of the region 'ap'" in problem(eu, "us"))
        assert problem(eu, "us").startswith("refused")
        assert usable(eu) == ("ap",)

    run(main())


def test_two_stores_with_the_name_of_one_region() -> None:
    """Nodes with the name of a region and another store get no share, and say so."""

    async def main() -> None:
        world = World("eu", "us")
        await world.started()
        await asyncio.sleep(3)  # the leader of us notes which store eu is
        wrong = World("eu", "us")
        wrong.stores["us"] = world.stores["us"]
        other = wrong.start("eu", "eu-wrong")
        await asyncio.sleep(10)
        assert await wrong.share("eu") == 0
        assert other.exchange.term is not None
        assert "know another store of the region eu" in other.exchange.term.problem
        assert problem(other, "us").startswith("refused")
        assert await world.share("eu") == Fraction(1, 2)

    run(main())


def test_a_node_with_the_store_of_another_region_does_not_lead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would write the notes of its region into the store of another one."""

    async def main() -> None:
        world = World("eu", "us")
        first, _ = await world.started()
        await asyncio.sleep(2)
        wrong = World("ap", "us")
        wrong.stores["ap"] = world.stores["eu"]
        other = wrong.start("ap", "ap-wrong")
        first.stopped = True  # the wrong one gets the lead, and gives it up
        await until(lambda: "is that of the region 'eu'" in caplog.text)
        assert not other.exchange.is_leader
        second = world.start("eu", "eu-2")
        assert await until(lambda: second.exchange.is_leader) < 2
        assert parse_region((await world.stores["eu"].notes())[REGION_NOTE]).region == "eu"
        (status, _) = await RegionSync("ap", wrong.table, wrong.stores).status()
        assert "is that of 'eu'" in status.problem

    run(main())


def test_another_layout_is_refused() -> None:
    """The scripts of one release must not write states of another one."""

    async def main() -> None:
        world = World("eu", "us")
        eu, us = await world.started()
        us.task.cancel()
        note = parse_region((await world.stores["us"].notes())[REGION_NOTE])
        await asyncio.sleep(1)
        await world.stores["us"].note(REGION_NOTE, note._replace(layout=LAYOUT + 1).text())
        await until(lambda: problem(eu, "us").startswith("refused"))
        assert "use the same release" in problem(eu, "us")
        assert usable(eu) == ()

    run(main())


def test_clocks_that_differ_are_reported() -> None:
    """Totals are exchanged all the same."""

    async def main() -> None:
        world = World("eu", "us")
        world.clocks["us"].ahead_ns = 3 * NS_PER_SECOND
        eu, us = await world.started()
        await until(lambda: "+3.0 s" in problem(eu, "us"))
        await until(lambda: "-3.0 s" in problem(us, "eu"))
        assert usable(eu) == ("us",)
        assert problem(eu, "us").startswith("up")

    run(main())


def test_settings_with_different_shares_are_reported() -> None:
    """One table is in use everywhere in the end, and the region whose settings differ says so."""

    async def main() -> None:
        world = World("eu", "us")
        eu = world.start("eu")
        await asyncio.sleep(2)
        world.table = share_table(1, {"eu": 0.2, "us": 0.8})
        us = world.start("us")
        await asyncio.sleep(5)
        shares = [await world.share(region) for region in ("eu", "us")]
        assert sum(shares) == 1
        terms = [each.exchange.term for each in (eu, us)]
        assert ["other shares" in term.problem for term in terms if term is not None] == [
            False,
            True,
        ]

    run(main())


@pytest.mark.parametrize("apart_s", [0.0, 0.1, 0.2, 0.3])
def test_different_shares_at_a_simultaneous_first_start(apart_s: float) -> None:
    """No region takes a share before all have one table, and no limit is exceeded."""

    async def main() -> None:
        world = World("eu", "us")
        tables = [share_table(1, {"eu": 0.9, "us": 0.1}), share_table(1, {"eu": 0.1, "us": 0.9})]
        processes = []
        for region, table in zip(world.stores, tables, strict=True):
            world.table = table
            processes.append(world.start(region))
            await asyncio.sleep(apart_s)
        admitted, problems = 0, set()
        for _ in range(60):
            await asyncio.sleep(0.05)
            for process in processes:
                with suppress(StoreError):  # it has no share yet
                    counter = world.counter(process.region)
                    admitted += sum(bool(counter.check("ann", 1)) for _ in range(100))
                term = process.exchange.term
                problems.add("" if term is None else term.problem)
        assert admitted <= 100
        assert any("have other shares" in each for each in problems)
        assert sum([await world.share(region) for region in world.stores]) == 1

    run(main())


@pytest.mark.parametrize("delay_s", [0.001, 0.15])
def test_a_first_start_of_all_regions_is_quick(delay_s: float) -> None:
    """All have their shares, and all units, within two seconds."""

    async def main() -> None:
        world = World("eu", "us", "ap", delay_s=delay_s)
        processes = [world.start(region) for region in world.stores]
        settled = [each.exchange.settled for each in processes]
        assert await until(lambda: all(each.is_set() for each in settled)) < 2
        for region in world.stores:
            assert world.counter(region).check("ann", 33)

    run(main())


# ── What operators see and change ──────────────────────────────────────────────────────────────


def monitor(world: World, region: str) -> RegionSync:
    """Return the view of a process that does not take part."""
    return RegionSync(region, world.table, world.stores)


def test_the_status_of_all_regions() -> None:
    """Any process reads it from the stores. A region without a leader is found out."""

    async def main() -> None:
        world = World("eu", "us")
        _, us = await world.started()
        await asyncio.sleep(2)
        found = await monitor(world, "us").status()
        assert [(each.region, each.is_self, each.leader) for each in found] == [
            ("us", True, "us-1"),
            ("eu", False, "eu-1"),
        ]
        assert [each.share for each in found] == [Fraction(1, 2)] * 2
        assert [link.state for each in found for link in each.links] == ["up", "up"]
        us.stopped = True
        await asyncio.sleep(8)
        found = await monitor(world, "eu").status()
        assert found[1].leader == ""
        assert "no process has led" in found[1].problem
        assert [link.state for link in found[0].links] == ["up"]  # its store still answers

    run(main())


def test_the_command_changes_the_table() -> None:
    """It writes the next version everywhere, and names the regions that it cannot reach."""

    async def main() -> None:
        world = World("eu", "us")
        await world.started()
        view = monitor(world, "eu")
        assert await view.table() == {"eu": Fraction(1, 2), "us": Fraction(1, 2)}
        assert await view.change_shares({"eu": Fraction(1)}) == {}

        async def is_alone() -> bool:
            return await world.share("eu") == 1 and await world.share("us") == 0

        assert await until_found(is_alone) < 10
        assert await view.table() == {"eu": Fraction(1)}
        for wrong in ({"eu": Fraction(1, 2)}, {"eu": Fraction(1, 2), "xx": Fraction(1, 2)}):
            with pytest.raises(ConfigError):
                await view.change_shares(wrong)

    run(main())


def test_of_two_changes_at_once_one_is_refused() -> None:
    """The error names the change that is in use instead."""

    async def main() -> None:
        world = World("eu", "us")
        await world.started()
        wanted = [{"eu": Fraction(1, 5), "us": Fraction(4, 5)}, {"eu": Fraction(1)}]
        changes = [
            RegionSync(region, world.table, slow_stores(world, region)).change_shares(shares)
            for region, shares in zip(world.stores, wanted, strict=True)
        ]
        results = await asyncio.gather(*changes, return_exceptions=True)
        await asyncio.sleep(10)
        used = await monitor(world, "eu").table()
        assert used in wanted
        lost = results[1 - wanted.index(dict(used))]
        assert isinstance(lost, ChangeRefused)
        assert f"eu={used['eu']}" in str(lost)

    run(main())


def test_a_change_waits_once_for_a_region_that_is_gone() -> None:
    """An operator who removes a lost region waits for one deadline, and learns of the error."""

    async def main() -> None:
        world = World("eu", "us", "ap")
        await world.started()
        world.cut("eu", "ap")
        operator = RegionSync("eu", world.table, slow_stores(world, "eu"))
        began_s = asyncio.get_running_loop().time()
        unreached = await operator.change_shares(dict.fromkeys(("eu", "us"), Fraction(1, 2)))
        assert unreached == {"ap": "no answer within 2 s"}
        assert asyncio.get_running_loop().time() - began_s < 3

    run(main())


def slow_stores(world: World, region: str) -> dict[str, RegionalCounts]:
    """Return the stores as an operator of a region reaches them."""
    process = Process(world, region, "operator")
    process.task.cancel()
    return cast("dict[str, RegionalCounts]", process.stores)


# ── The thread ─────────────────────────────────────────────────────────────────────────────────


def two_regions() -> tuple[ShareTable, dict[str, MemoryRegional]]:
    """Return a table and stores in memory."""
    names = ("eu", "us")
    table = share_table(1, dict.fromkeys(names, Fraction(1, 2)))
    return table, {name: MemoryRegional(SystemClock()) for name in names}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait in real time for a thread."""
    until_s = monotonic() + 10
    while not condition():
        assert monotonic() < until_s, "the condition is never true"
        Event().wait(0.01)


def threads() -> list[str]:
    """Return the names of the sync threads."""
    return [each.name for each in enumerate_threads() if each.name == "ratekeeper-regions"]


def test_the_thread_leads_and_steps_down() -> None:
    """Closing takes no time and gives up the lead; nothing is left behind."""
    table, stores = two_regions()
    syncs = [RegionSync(region, table, stores) for region in ("eu", "us")]
    for sync in syncs:
        sync.start()
        sync.start()
    assert len(threads()) == 2
    assert all(sync.wait(10) for sync in syncs)
    assert all(sync.here() is not None for sync in syncs)
    assert {sync.counts().keys() == {"eu", "us"} - {sync.region} for sync in syncs} == {True}
    for sync in syncs:
        started_s = monotonic()
        sync.close()
        assert monotonic() - started_s < 5
        sync.close()
        sync.start()  # closed for good
        assert sync.here() is None
    assert not threads()
    assert [store._leader[0] for store in stores.values()] == ["", ""]


def test_a_sync_that_is_garbage_stops() -> None:
    """A limiter that nobody closes leaves no thread behind."""
    table, stores = two_regions()
    sync = RegionSync("eu", table, stores)
    sync.start()
    wait_for(lambda: bool(stores["eu"]._leader[0]))
    del sync
    gc.collect()
    wait_for(lambda: not threads())
    assert stores["eu"]._leader[0] == ""


def test_closing_is_quick_if_the_store_does_not_answer() -> None:
    """The lead expires then."""

    class Silent(MemoryRegional):
        async def step_down(self, name: str) -> None:
            await asyncio.Event().wait()

    table, stores = two_regions()
    stores["eu"] = Silent(SystemClock())
    sync = RegionSync("eu", table, stores)
    sync.start()
    wait_for(lambda: sync.is_leader)
    started_s = monotonic()
    sync.close()
    assert monotonic() - started_s < 5
    assert not threads()


_PROGRAM = """
import logging, os, sys, time, warnings
from fractions import Fraction
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.regional import MemoryRegional
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.table import share_table

class Store(MemoryRegional):
    async def step_down(self, name):
        print("stepped down", os.getpid() == parent, flush=True)

# Python 3.12 and later warn every application that forks while a thread runs, as this one does
# on purpose. Anything else on stderr fails the test.
warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\\(\\)", DeprecationWarning)
# In development mode, asyncio also reports steps that take long: on a busy machine, any step may.
logging.getLogger("asyncio").setLevel(logging.ERROR)
parent = os.getpid()
store = Store(SystemClock())
sync = RegionSync("eu", share_table(1, {"eu": Fraction(1)}), {"eu": store})
sync.start()

def wait():
    until = time.monotonic() + 10
    while not sync.is_leader and time.monotonic() < until:
        time.sleep(0.01)
    return sync.is_leader

assert wait()
name = sync._exchange.name
child = os.fork()
if child == 0:
    assert sync._exchange.name != name
    store._leads_until_ns = 0  # this copy says that the parent leads
    assert wait()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert wait()
print("end", flush=True)
"""


def test_forks_and_the_end_of_the_interpreter() -> None:
    """A forked child has a thread and a name of its own. A program that ends steps down."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["stepped down False", "end", "stepped down True"]
