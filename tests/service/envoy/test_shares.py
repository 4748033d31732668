"""Rate shares: the bounds hold whatever breaks, and demand gets the rate. See `envoys.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.model import Limit
from ratekeeper.core.steps import run
from ratekeeper.service.envoy import shares
from ratekeeper.service.envoy.shares import (
    DELIVERY_NS,
    HOLDER_BYTES,
    HOLDERS_MAX,
    NOTHING,
    RESERVED_NS,
    SEND_NS_MAX,
    TOKENS_MAX,
    TTL_S,
    Assignment,
    Holding,
    Pool,
    Share,
    ShareClaim,
    Table,
    TableFull,
    UnreadableTable,
    decode,
    divide,
    lose,
    name_of,
    new_table,
    pool_of,
    report,
    reporting,
    targets,
    unknown_table,
    wanted,
)
from tests.service.envoy import envoys
from tests.service.envoy.envoys import (
    ACTIONS,
    REPORT_NS,
    Event,
    Model,
    OverLimit,
    random_events,
)

POOL = Pool(100, 100, 1)
POOLS = [POOL, Pool(100, 100, 60), Pool(100, 10, 10), Pool(3, 2, 5), Pool(1_000, 5_000, 1)]
NAMES = [["", "", ""], ["a", "b", "c"], ["a", "b", "c", "d"]]
START_NS = 10**18

events = st.lists(
    st.builds(
        Event,
        st.sampled_from([0, 1, 10, 100, 400, 1_000, 3_000]),
        st.sampled_from(ACTIONS),
        st.integers(0, 3),
        st.integers(0, 255),
    ),
    max_size=120,
)


def holder(number: int) -> bytes:
    return number.to_bytes(HOLDER_BYTES)


def claim(number: int, has: Share = NOTHING, demand: int = -1, **values: Any) -> ShareClaim:
    """Return the claim of a holder that keeps its bucket, if it has one."""
    first = ShareClaim(holder(number), b"", has, has.burst, demand, has == NOTHING, has != NOTHING)
    return first._replace(**values)


# ── The bounds ─────────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from(POOLS), st.sampled_from(NAMES), events)
def test_all_envoys_together_never_exceed_the_limit(
    pool: Pool, names: list[str], events: list[Event]
) -> None:
    """Whatever Envoys, workers, streams and the store do: neither the rate nor the burst."""
    Model(pool, names).run(events)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([Pool(200, 100, 2), Pool(6_000, 100, 60)], id="another fill interval"),
        pytest.param([Pool(10, 10, 1), Pool(50, 5, 1)], id="another limit"),
        pytest.param([Pool(100, 10, 30), Pool(7, 90, 3), Pool(1, 1, 1)], id="both"),
    ],
)
@given(st.sampled_from(NAMES), st.integers(0, 10**9))
def test_a_limit_that_changes_is_not_exceeded(
    others: list[Pool], names: list[str], seed: int
) -> None:
    """While it changes, the Envoys never have more than the highest."""
    Model(POOL, names, *others).run(random_events(Random(seed), 120))


@pytest.mark.parametrize("seed", range(40))
def test_long_runs_never_exceed_the_limit(seed: int) -> None:
    """Mostly undisturbed, so that shares move and buckets fill."""
    random = Random(seed)
    model = Model(random.choice(POOLS), random.choice(NAMES))
    model.run(random_events(random, 200))


def forgets_a_lost_stream(patch: pytest.MonkeyPatch) -> None:
    def forgetting(table: Table, claim: ShareClaim, now_ns: int) -> Table:
        rest = [each for each in table.entries if each.holder != claim.holder]
        return replace(table, entries=tuple(rest))

    patch.setattr(shares, "lose", forgetting)


def raises_before_others_have_lowered(patch: pytest.MonkeyPatch) -> None:
    def hasty(table: Table, pool: Pool, claim: ShareClaim, now_ns: int) -> shares.Reported:
        return report(table, pool, claim._replace(may_have=NOTHING), now_ns)

    patch.setattr(shares, "report", hasty)


def forgets_the_table_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Model, "forgets", True, raising=False)


def gives_bursts_without_credit(patch: pytest.MonkeyPatch) -> None:
    def generous(table: Table, rate: int, keeps: int) -> tuple[Share, int]:
        own = [each for each in table.entries if each.assigned == NOTHING][-1]
        room = table.pool.burst - table.reserved.burst + own.reserved.burst
        burst = min(max(table.pool.burst * rate // table.pool.rate, 1), max(room, 0))
        return (Share(rate, burst) if rate and burst else NOTHING), burst

    patch.setattr(shares, "_share_in", generous)


def reserves_for_the_time_to_live_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shares, "RESERVED_NS", TTL_S * NS_PER_SECOND)


def ignores_that_a_bucket_expires(patch: pytest.MonkeyPatch) -> None:
    def keeps(self: Holding, pool: Pool, now_ns: int) -> bool:
        return bool(self._sent and self._sent[-1].share.burst)

    patch.setattr(Holding, "keeps_bucket", keeps)


def replaces_old_entries_without_reserving(patch: pytest.MonkeyPatch) -> None:
    def taking(table: Table, claim: ShareClaim, now_ns: int) -> tuple[Table, ShareClaim, Share]:
        rest = [each for each in table.entries if each.name != claim.name or not each.name]
        return replace(table, entries=tuple(rest)), claim, NOTHING

    patch.setattr(shares, "_take_over", taking)


def counts_what_was_not_sent(patch: pytest.MonkeyPatch) -> None:
    send = Model._send

    def pretending(self: Model, stream: envoys.Stream, message: Assignment) -> None:
        if self.now_ns <= message.send_by_ns:
            send(self, stream, message)
        else:
            stream.holding.sending(message)
            stream.holding.sent(self.now_ns)

    patch.setattr(Model, "_send", pretending)


def many_runs(first: int) -> None:
    for seed in range(first, first + 400):
        random = Random(seed)
        model = Model(random.choice(POOLS), random.choice(NAMES[:2]))
        model.run(random_events(random, 150))


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (forgets_a_lost_stream, 16),
        (raises_before_others_have_lowered, 3),
        (forgets_the_table_at_a_restart, 6),
        (gives_bursts_without_credit, 3),
        (reserves_for_the_time_to_live_only, 12),
        (ignores_that_a_bucket_expires, 146),
        (replaces_old_entries_without_reserving, 5),
        (counts_what_was_not_sent, 8),
    ],
)
def test_the_model_finds_a_wrong_variant(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is over the limit in one of the runs. `first` is the first that finds it now."""
    plant(monkeypatch)
    with pytest.raises(OverLimit):
        many_runs(first)


# ── Demand ─────────────────────────────────────────────────────────────────────────────────────


def running(model: Model, seconds: float, step_ms: int = 50) -> int:
    """Let undisturbed time pass, in which all Envoys admit what they can; return how much."""
    before = model.admitted
    for _ in range(int(seconds * 1_000 / step_ms)):
        for wait_ms in (step_ms, *[0] * 5):  # the store answers at once
            model.happen(Event(wait_ms, "go on", 0, 0))
        for envoy in model.envoys:
            model.spend(envoy, int(envoy.demand * step_ms // 1_000) + 1 if envoy.demand else 0)
    return model.admitted - before


def with_demand(pool: Pool, *demands: float, workers: int = 2) -> Model:
    """Return Envoys with a demand in multiples of the rate, connected one second apart."""
    model = Model(pool, [f"envoy {each}" for each in range(len(demands))])
    for place, demand in enumerate(demands):
        model.envoys[place].demand = Fraction(demand) * pool.rate / pool.fill_s
        model.connect(model.envoys[place], place % workers)
        running(model, 1)
    return model


def assigned(model: Model) -> list[int]:
    return [envoy.bucket.share.rate if envoy.bucket else 0 for envoy in model.envoys]


def test_one_envoy_gets_everything() -> None:
    """At its first report, and the whole burst."""
    model = with_demand(POOL, 2)
    assert model.envoys[0].bucket is not None
    assert model.envoys[0].bucket.share == (100, 100)
    assert running(model, 20) >= 100 * 20 * 0.99


@pytest.mark.parametrize("pool", [POOL, Pool(1_000, 1_000, 1), Pool(100, 100, 60)])
def test_envoys_that_want_all_get_equal_parts(pool: Pool) -> None:
    """Three reports after the last of them has come; also if the first had everything."""
    model = with_demand(pool, 2, 2, 2)
    running(model, 15)
    assert min(assigned(model)) >= pool.rate // 3 - 1
    assert max(assigned(model)) <= pool.rate // 3 + 1


@pytest.mark.parametrize(("workers", "used_min"), [(1, 0.6), (2, 0.5)])
def test_demand_that_moves_takes_the_rate_along(workers: int, used_min: float) -> None:
    """Two Envoys, and all demand is at one of them, in turn for 30 s each.

    Four reports later almost everything has moved. One worker need not wait for the next report of
    the Envoy that is to lower its share.
    """
    model = with_demand(POOL, 2, 0, workers=workers)
    running(model, 10)
    used = []
    for turn in range(2):
        for place, envoy in enumerate(model.envoys):
            envoy.demand = Fraction(200 if place == turn % 2 else 0)
        used.append(running(model, 20))
        assert assigned(model)[turn % 2] >= 95
        used[-1] += running(model, 10)
    assert min(used) >= 100 * 30 * used_min


def test_a_small_demand_is_met_beside_a_large_one() -> None:
    """The Envoy that wants a tenth gets it, and the other the rest."""
    model = with_demand(POOL, 3, 0.1)
    running(model, 20)
    large, small = assigned(model)
    assert small >= 10
    assert large >= 80


def test_unused_rate_is_given_to_those_who_are_there() -> None:
    """So demand that grows is met before the next report."""
    model = with_demand(POOL, 0.1, 0.1)
    running(model, 30)
    assert sum(assigned(model)) >= 95
    assert min(assigned(model)) >= 45


@pytest.mark.parametrize("pool", [Pool(1, 1, 10), Pool(2, 2, 10), Pool(100, 1, 10)])
def test_with_fewer_tokens_than_envoys_they_take_turns(pool: Pool) -> None:
    """No Envoy starves for ever."""
    model = with_demand(pool, 2, 2, 2)
    seen = [0, 0, 0]
    for _ in range(20):
        running(model, 10, step_ms=1_000)
        seen = [most + now for most, now in zip(seen, assigned(model), strict=True)]
    assert min(seen) > 0


def test_an_envoy_that_returns_keeps_its_share() -> None:
    """Its worker crashes, it returns at the next report, and admits all the time."""
    model = with_demand(POOL, 2)
    running(model, 10)
    model.crash(0)
    assert running(model, 30) >= 100 * 30 * 0.99


def test_an_envoy_without_a_name_waits_until_its_old_share_has_expired() -> None:
    """It may be another Envoy: the old share stays reserved."""
    model = Model(POOL, [""])
    model.envoys[0].demand = Fraction(200)
    model.connect(model.envoys[0], 0)
    running(model, 10)
    model.crash(0)
    running(model, 5.2)
    assert assigned(model) == [0]
    running(model, 15)
    assert assigned(model)[0] >= 90


# ── Dividing ───────────────────────────────────────────────────────────────────────────────────


@given(
    st.integers(0, 1_000),
    st.lists(st.integers(1, 2_000), min_size=1, max_size=9),
    st.integers(0, 9),
    st.integers(0, 10**10),
)
def test_divide_wastes_nothing_and_is_fair(
    rate: int, wants: list[int], places: int, turn: int
) -> None:
    """All of the rate is given or left over; only satisfied holders get less than others."""
    parts, rest = divide(rate, wants, places, turn)
    served = [(part, want) for part, want in zip(parts, wants, strict=True) if part]
    assert len(served) == min(len(wants), places, rate)
    assert sum(parts) + rest == (rate if served else 0)
    assert all(part <= want for part, want in served)
    if rest:
        assert all(part == want for part, want in served)
    unmet = [part for part, want in served if part < want]
    assert not unmet or max(part for part, _ in served) <= min(unmet) + 1


@given(st.integers(1, 3), st.integers(1, 4))
def test_turns_reach_every_holder(places: int, count: int) -> None:
    """After as many turns as there are holders, each has had a part."""
    seen = [divide(9, [5] * count, places, turn)[0] for turn in range(count)]
    assert all(any(parts[at] for parts in seen) for at in range(count))


def test_head_room() -> None:
    """A quarter more than the demand; half of a fair part if it is not known."""
    assert [wanted(demand, 50) for demand in (-1, 0, 8, 100)] == [25, 1, 11, 126]
    assert wanted(-1, 1) == 1


limits = st.builds(
    Limit,
    st.integers(1, 10**9),
    per=st.one_of(st.integers(1, 10**7), st.sampled_from([0.001, 0.25, 1.5])),
)


@given(limits)
def test_a_pool_is_never_more_than_its_limit(limit: Limit) -> None:
    """It is at most one token in a fill interval less, or as much as Envoy can count."""
    pool = pool_of(limit)
    exact = Fraction(limit.limit * pool.fill_s * NS_PER_SECOND, limit.window_ns)
    assert pool.rate <= exact
    assert pool.rate > exact - 1 or pool.rate == TOKENS_MAX
    assert pool.burst == limit.capacity
    assert 1 <= pool.fill_s <= max(limit.window_ns // NS_PER_SECOND + 1, 1)
    assert pool.rate >= 1


# ── Tables ─────────────────────────────────────────────────────────────────────────────────────


def three() -> Table:
    """Return a table with three holders, of which one is lost."""
    table = new_table(POOL, START_NS)
    for number in range(3):
        known = claim(number, name=b"n" * 8, is_applied=True)
        table = report(table, POOL, known, START_NS + number).table
    return lose(table, claim(1, Share(9, 9)), START_NS + 9)


def test_a_table_survives_its_encoding() -> None:
    """And it is small."""
    table = three()
    assert decode(table.encoded()) == table
    assert len(table.encoded()) < 200
    full = replace(table, entries=table.entries[:1] * HOLDERS_MAX)
    assert len(full.encoded()) < 10_000


@given(st.data())
def test_a_damaged_value_is_refused(data: st.DataObject) -> None:
    """Whatever was changed, there is a table with sensible numbers or an UnreadableTable."""
    value = bytearray(three().encoded())
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(value[: data.draw(st.integers(0, len(value)))])
    for each in (bytes(value), cut):
        with suppress(UnreadableTable):
            assert decode(each).at(POOL, START_NS + 10).credit_nanos >= 0


def test_an_unreadable_table_is_replaced_by_one_in_which_nothing_is_free() -> None:
    """Until all assignments have expired; the credit begins to refill then."""
    table = unknown_table(POOL, START_NS)
    found = report(table, POOL, claim(1), START_NS)
    assert found.share == NOTHING
    assert found.is_short
    found = report(found.table, POOL, claim(1), START_NS + RESERVED_NS - 1)
    assert found.share == NOTHING
    later = report(found.table, POOL, claim(1), START_NS + RESERVED_NS + NS_PER_SECOND // 2)
    assert later.share.rate > 50
    assert 0 < later.share.burst <= 50


def test_a_holder_whose_table_was_lost_keeps_its_share() -> None:
    """It is known again; all others stay unknown until they report or expire."""
    table = unknown_table(POOL, START_NS)
    found = report(table, POOL, claim(1, Share(60, 60), demand=200), START_NS)
    assert found.share.rate == 60
    assert found.table.reserved.rate == 100
    other = report(found.table, POOL, claim(2, Share(30, 30), demand=200), START_NS)
    assert other.share.rate == 30
    assert report(other.table, POOL, claim(3), START_NS).share == NOTHING


def test_a_table_has_a_bounded_number_of_holders() -> None:
    """The error says how many; those that are in it are served on."""
    table = new_table(POOL, START_NS)
    for number in range(HOLDERS_MAX):
        table = report(table, POOL, claim(number), START_NS).table
    with pytest.raises(TableFull, match="at most 128 Envoys"):
        report(table, POOL, claim(HOLDERS_MAX), START_NS)
    assert len(report(table, POOL, claim(5), START_NS).table.encoded()) < 10_000


def test_a_lower_limit_lowers_shares_before_it_raises_any() -> None:
    """A second Envoy gets nothing while the first may still use more than the new limit."""
    table = report(new_table(POOL, START_NS), POOL, claim(1), START_NS).table
    lower = Pool(40, 40, 1)
    other = report(table, lower, claim(2), START_NS + 1)
    assert other.share == NOTHING
    had = report(other.table, lower, claim(1, Share(100, 100), demand=500), START_NS + 2)
    assert 0 < had.share.rate <= 40
    assert had.table.reserved == (100, 100)
    assert report(had.table, lower, claim(2), START_NS + 3).share == NOTHING
    # Its worker knows that it has been applied.
    settled = report(had.table, lower, claim(1, had.share, demand=500), START_NS + 4)
    assert settled.table.reserved.rate <= 40


def test_a_higher_limit_is_used_at_the_next_report() -> None:
    """The burst grows when some of the rate is not used."""
    table = report(new_table(POOL, START_NS), POOL, claim(1), START_NS).table
    higher = Pool(400, 400, 1)
    now_ns, has = START_NS, Share(100, 100)
    for demand, rate_min in ((500, 400), (50, 200), (50, 200), (50, 200)):
        now_ns += NS_PER_SECOND
        found = report(table, higher, claim(1, has, demand), now_ns)
        table, has = found.table, found.share
        assert has.rate >= rate_min
    assert has.burst > 150


def test_another_fill_interval_needs_a_new_bucket() -> None:
    """What Envoys have is converted and rounded up, and nobody takes such an entry over."""
    known = claim(1, name=b"n", is_applied=True)
    table = report(new_table(POOL, START_NS), POOL, known, START_NS).table
    slower = Pool(150, 100, 60)
    found = table.at(slower, START_NS)
    assert found.entries[0].reserved == (6_000, 100)
    assert found.entries[0].name == b""
    holding = Holding(holder(1), b"n")
    holding.sending(Assignment(Share(100, 100), 1, is_new=True, send_by_ns=0))
    holding.sent(0)
    assert holding.claim(slower, 1) == ShareClaim(holder(1), b"n", Share(6_000, 100), 0, -1)


def test_a_clock_that_is_set_back_refills_nothing() -> None:
    """And no entry lasts longer than a new one."""
    table = report(new_table(POOL, START_NS), POOL, claim(1), START_NS).table
    before = table.at(POOL, START_NS - 10**15)
    assert before.credit_nanos == table.credit_nanos
    assert before.entries[0].expires_ns == START_NS - 10**15 + RESERVED_NS


def test_a_table_is_kept_until_it_does_not_differ_from_a_new_one() -> None:
    """So a cell that has expired is a new table."""
    table = report(new_table(POOLS[1], START_NS), POOLS[1], claim(1), START_NS).table
    later_ns = START_NS + table.lasts_ns
    assert table.at(POOLS[1], later_ns) == new_table(POOLS[1], later_ns)


def test_a_name_of_two_envoys_is_not_taken_over() -> None:
    """Nor is an entry that was renewed just now."""
    name = name_of("envoy-a")
    table = new_table(POOL, START_NS)
    unknown = report(table, POOL, claim(1, name=name), START_NS).table
    table = report(table, POOL, claim(1, name=name, is_applied=True), START_NS).table
    soon_ns, late_ns = START_NS + NS_PER_SECOND, START_NS + 5 * NS_PER_SECOND
    assert report(table, POOL, claim(2, name=name), soon_ns).taken_over == NOTHING
    assert report(table, POOL, claim(2, name=name), late_ns).taken_over == (100, 100)
    lost = lose(table, claim(1, Share(100, 100), name=name), soon_ns)
    assert report(lost, POOL, claim(2, name=name), soon_ns).taken_over == (100, 100)
    gone = lose(table, claim(1, Share(100, 100)), soon_ns)
    assert report(gone, POOL, claim(2, name=name), soon_ns).taken_over == NOTHING
    assert report(unknown, POOL, claim(2, name=name), late_ns).taken_over == NOTHING
    both = report(table, POOL, claim(3, name=name, is_applied=True), soon_ns).table
    assert report(both, POOL, claim(2, name=name), late_ns).taken_over == NOTHING
    assert name_of("") == b""
    assert report(table, POOL, claim(4), late_ns).taken_over == NOTHING


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 6)), min_size=1, max_size=9))
def test_targets_fit_into_the_rate(holders: list[tuple[int, int]]) -> None:
    """Together they are at most the rate, without what lost streams reserve."""
    table = new_table(POOL, START_NS)
    for number, (demand, _) in enumerate(holders):
        table = report(table, POOL, claim(number, demand=demand), START_NS).table
    for number, (_, lost) in enumerate(holders):
        if not lost:
            table = lose(table, claim(number), START_NS)
    reserved = sum(each.reserved.rate for each in table.entries if each.is_lost)
    assert sum(targets(table, START_NS).values()) <= POOL.rate - reserved


# ── What a worker knows ────────────────────────────────────────────────────────────────────────


def sent(holding: Holding, share: Share, now_ns: int) -> None:
    holding.sending(Assignment(share, 1, is_new=False, send_by_ns=now_ns))
    holding.sent(now_ns)


def test_a_lower_share_counts_from_the_report_after_its_delivery() -> None:
    """A report that arrives earlier may be older than the assignment."""
    holding = Holding(holder(1), b"")
    sent(holding, Share(100, 100), 0)
    sent(holding, Share(10, 10), 3 * NS_PER_SECOND)
    holding.reported(1, 3 * NS_PER_SECOND + DELIVERY_NS - 1)
    assert holding.claim(POOL, 4 * NS_PER_SECOND).may_have == (100, 100)
    assert holding.claim(POOL, 4 * NS_PER_SECOND).keeps == 10
    holding.reported(1, 3 * NS_PER_SECOND + DELIVERY_NS)
    assert holding.claim(POOL, 4 * NS_PER_SECOND).may_have == (10, 10)


def test_an_assignment_that_is_being_sent_may_be_used_and_does_not_settle() -> None:
    """A client that does not read delays it."""
    holding = Holding(holder(1), b"")
    sent(holding, Share(50, 50), 0)
    holding.sending(Assignment(Share(80, 10), 1, is_new=False, send_by_ns=0))
    holding.reported(1, 9 * NS_PER_SECOND)
    found = holding.claim(POOL, 9 * NS_PER_SECOND)
    assert found.may_have == (80, 50)
    assert found.keeps == 0


def test_expired_assignments_are_not_used() -> None:
    """After the time to live and the time of a delivery; the bucket may be gone before."""
    holding = Holding(holder(1), b"")
    sent(holding, Share(50, 50), 0)
    ttl_ns = TTL_S * NS_PER_SECOND
    early_ns = ttl_ns - SEND_NS_MAX - DELIVERY_NS
    assert holding.claim(POOL, early_ns - 1).keeps == 50
    assert holding.claim(POOL, early_ns).keeps == 0
    assert holding.claim(POOL, ttl_ns + DELIVERY_NS - 1).may_have == (50, 50)
    assert holding.claim(POOL, ttl_ns + DELIVERY_NS).may_have == NOTHING


def test_what_was_sent_is_bounded() -> None:
    """Many assignments between two reports: none that may be used is forgotten."""
    holding = Holding(holder(1), b"")
    for number in range(50):
        sent(holding, Share(100 - number, number), number)
    assert len(holding._sent) <= 8
    assert holding.claim(POOL, 60).may_have == (100, 49)


def test_demand_is_measured_by_the_workers_clock() -> None:
    """The first report covers an unknown time, and two in a row count as one."""
    holding = Holding(holder(1), b"")
    slow = Pool(100, 100, 60)

    def demand(requests: int, seconds: float) -> int:
        holding.reported(requests, int(seconds * NS_PER_SECOND))
        return holding.claim(slow, 0).demand

    assert demand(10**9, 0) == -1
    assert demand(3, 0.5) == -1
    assert demand(7, 5) == 120
    assert demand(50, 5.1) == 120
    assert demand(0, 10) == 600
    assert holding.claim(Pool(10, 10, 6), 0).demand == 60  # another limit has another interval
    assert demand(10**30, 15) == TOKENS_MAX


# ── With a store ───────────────────────────────────────────────────────────────────────────────


def assignment(model: Model, number: int = 1) -> Assignment:
    """Return the assignment of a new holder."""
    cells: Any = model.cells
    holding = Holding(holder(number), b"")
    return run(reporting(cells, envoys.CELL, model.pool, holding, model.time_ns))


def test_a_table_of_a_newer_version_is_left_alone() -> None:
    """Its Envoys are still assigned shares by it; the error says why."""
    model = Model(POOL, [])
    model.cells.value = b"\x02whatever"
    with pytest.raises(UnreadableTable, match="its version is 2, and this program knows 1"):
        assignment(model)
    assert model.cells.value == b"\x02whatever"


@pytest.mark.parametrize("value", [b"", b"\x00", b"\x01\xff", b"\x01\x96\x01", b"x"[:0]])
def test_a_damaged_table_is_replaced(value: bytes) -> None:
    """Nothing is free until everything that it may have assigned has expired."""
    model = Model(POOL, [])
    model.cells.value = value
    assert assignment(model).share == NOTHING
    model.pass_time(RESERVED_NS + NS_PER_SECOND)
    assert assignment(model, 2).share.rate > 0


def test_a_cell_that_others_change_all_the_time_is_an_error() -> None:
    """It is not tried for ever."""
    model = Model(POOL, [])
    model.cells.write = lambda *args: False  # type: ignore[method-assign]  # others are faster
    with pytest.raises(StoreUnavailable, match="changed by others 20 times in a row"):
        assignment(model)


def test_an_assignment_must_be_sent_soon() -> None:
    """The reservation began when the table was read."""
    model = Model(POOL, [])
    found = assignment(model)
    assert found == Assignment(
        Share(100, 100), 1, is_new=True, send_by_ns=model.now_ns + SEND_NS_MAX
    )
    assert RESERVED_NS == TTL_S * NS_PER_SECOND + SEND_NS_MAX + DELIVERY_NS
    assert REPORT_NS * 2 >= TTL_S * NS_PER_SECOND


def test_others_that_should_change_are_named() -> None:
    """First the Envoy that must lower its share; when it has, the one that can raise it."""
    model = with_demand(POOL, 2)
    now_ns = model.now_ns
    table = decode(model.cells.value or b"")
    table = report(table, POOL, claim(99, demand=200), now_ns).table
    assert shares.to_change(table, now_ns) == {holder(1)}
    lowered = report(table, POOL, claim(1, Share(50, 50), demand=0), now_ns).table
    soon_ns = now_ns + NS_PER_SECOND // 10
    assert shares.to_change(lowered.at(POOL, soon_ns), soon_ns) == {holder(99)}
    alone = report(new_table(POOL, now_ns), POOL, claim(1, demand=0), now_ns).table
    assert shares.to_change(alone, now_ns) == frozenset()
