"""Leases and late charges: the size of a lease, its end, and the bounds of the algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName, Decision
from ratekeeper.core.rates import scaled
from ratekeeper.decide.allowances import CLAIM_NS
from ratekeeper.decide.leasing import (
    LEASE_NS_MAX,
    LEASE_NS_MIN,
    NO_LEASE,
    GiveBack,
    LateCharge,
    Lease,
    LeaseCheck,
    LeaseTerms,
    Report,
    lifetime_ns,
)
from ratekeeper.decide.stores.memory import MemoryAuthority, MemoryCounter
from ratekeeper.testing import ManualClock
from tests.promises.leases import (
    CLOCK_STEPS,
    LeasePlay,
    lease_traces,
    leased_limits,
    several_leased_limits,
)
from tests.promises.oracles import assert_never_over
from tests.promises.strategies import KEY, clock_at, promise, starts_ns

SECOND_NS = 10**9
HOUR = Limit(100, per=3_600)
LEASING = tuple(name for name in UNIT_ALGORITHMS if name != "leaky_bucket")


class _Authority:
    """A store with one rule."""

    def __init__(self, *limits: Limit, start: float = 1_000) -> None:
        self.clock = ManualClock(start)
        self.store = MemoryAuthority(self.clock)
        self.counter: MemoryCounter = self.store.counter(limits, "r")

    def lease(
        self, cost: int, wanted: int, nodes: int = 1, lifetime: float = 1
    ) -> tuple[Decision, Lease]:
        terms = LeaseTerms(wanted, nodes, int(lifetime * SECOND_NS))
        [answer] = self.store.lease([LeaseCheck(self.counter, KEY, cost, terms)])
        assert isinstance(answer, tuple)
        return answer

    def give_back(self, units: int, lease: Lease) -> int:
        """Return what remains after the units came back."""
        return self.report(GiveBack(self.counter, KEY, units, lease.ends_ns))

    def late(self, units: int, age: float) -> int:
        """Return what remains after a late charge."""
        return self.report(LateCharge(self.counter, KEY, units, int(age * SECOND_NS)))

    def report(self, report: Report) -> int:
        [answer] = self.store.report([report])
        assert isinstance(answer, Decision)
        return answer.remaining

    @property
    def remaining(self) -> int:
        return self.counter.peek(KEY, 0).remaining


# ── The size and the end of a lease ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cost", "wanted", "nodes", "units"),
    [
        (1, 10, 1, 10),
        (1, 60, 1, 49),  # half of the 99 that are left
        (1, 60, 3, 16),
        (90, 60, 1, 5),
        (99, 60, 1, 0),
        (1, 60, 50, 0),
        (1, 0, 1, 0),
        (0, 10, 1, 0),
    ],
)
def test_a_lease_is_at_most_half_a_nodes_part_of_the_room(
    cost: int, wanted: int, nodes: int, units: int
) -> None:
    """min(wanted, room / (2 × nodes)), where room is what the check has left."""
    authority = _Authority(HOUR)
    decision, lease = authority.lease(cost, wanted, nodes)
    assert decision.allowed
    assert decision.remaining == 100 - cost
    assert lease.units == units
    assert authority.remaining == 100 - cost - units


def test_all_limits_of_a_rule_are_debited() -> None:
    """The tightest limit sets the size; every limit is charged."""
    authority = _Authority(Limit(20, per=60), HOUR)
    _, lease = authority.lease(1, 50)
    assert lease.units == 9
    assert authority.remaining == 10
    authority.clock.advance(60)  # a minute refills the first, and one unit of the second
    assert authority.remaining == 20
    assert authority.store.counter([HOUR], "r").peek(KEY, 0).remaining == 91


@pytest.mark.parametrize(
    ("limits", "wanted_ns", "lasts_ns"),
    [
        ([HOUR], SECOND_NS, SECOND_NS),
        ([HOUR], 60 * SECOND_NS, LEASE_NS_MAX),
        ([Limit(100, per=5)], SECOND_NS, SECOND_NS // 2),
        ([Limit(100, per=5, capacity=10)], SECOND_NS, SECOND_NS // 20),
        ([Limit(100, per=0.1)], SECOND_NS, 0),
        ([HOUR], LEASE_NS_MIN - 1, 0),
        ([HOUR, Limit(5, per=1, algorithm="sliding_window_log")], SECOND_NS, SECOND_NS // 10),
        ([HOUR, Limit(5, per=60, algorithm="leaky_bucket")], SECOND_NS, 0),
    ],
)
def test_a_lease_lasts_at_most_a_tenth_of_the_shortest_limit(
    limits: Sequence[Limit], wanted_ns: int, lasts_ns: int
) -> None:
    """And never longer than two seconds; below 20 ms there is none."""
    assert lifetime_ns(limits, wanted_ns) == lasts_ns


def test_units_are_reported_again_only_after_they_cannot_be_given_back() -> None:
    """A node that does not know whether units were given back reports them again after CLAIM_NS."""
    assert 2 * LEASE_NS_MAX < CLAIM_NS


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window_counter"])
def test_a_lease_of_a_window_ends_at_its_edge(algorithm: AlgorithmName) -> None:
    """Its units are spent in the window that counts them; close to the edge there is no lease."""
    authority = _Authority(Limit(100, per=60, algorithm=algorithm), start=59.5)
    _, lease = authority.lease(1, 10)
    assert (lease.units, lease.ends_ns, lease.lasts_ns) == (10, 60 * SECOND_NS, SECOND_NS // 2)
    authority.clock.advance(0.481)
    assert authority.lease(1, 10)[1].units == 0


def test_a_leaky_bucket_does_not_lease() -> None:
    """Others would wait behind requests that may never come."""
    authority = _Authority(Limit(100, per=60, algorithm="leaky_bucket"))
    assert authority.lease(1, 10)[1] == NO_LEASE


def test_granted_units_are_not_leased() -> None:
    """A request that needs a grant is strict, and a grant does not make a lease larger."""
    authority = _Authority(HOUR)
    authority.counter.grant(KEY, 50, None)
    assert authority.lease(100, 10)[1].units == 0
    decision, lease = authority.lease(1, 10)
    assert decision.allowed
    assert lease.units == 0
    assert authority.remaining == 49


def test_a_clock_that_was_set_back_leases_nothing() -> None:
    """A window that is ahead of the clock would be charged for spending in the one before."""
    authority = _Authority(HOUR)
    authority.counter.check(KEY, 1)
    authority.clock.advance(-1)
    assert authority.lease(1, 10)[1].units == 0


def test_a_denial_and_the_last_unit_say_how_long_the_cost_is_denied() -> None:
    """A node then answers the next checks itself."""
    authority = _Authority(Limit(10, per=100))
    decision, lease = authority.lease(10, 5)
    assert decision.allowed
    assert lease == Lease(0, 0, 0, denied_ns=100 * SECOND_NS)
    decision, lease = authority.lease(1, 5)
    assert not decision.allowed
    assert lease == NO_LEASE


def test_units_that_are_leased_can_be_spent_so_the_cost_is_not_denied() -> None:
    """The authority has too little left for the same cost, but the node has it."""
    authority = _Authority(Limit(10, per=100))
    _, lease = authority.lease(3, 5)
    assert (lease.units, lease.denied_ns) == (3, 0)
    _, lease = authority.lease(3, 5)
    assert lease.units == 0
    assert lease.denied_ns > 0


def test_checks_of_one_request_lease_only_if_all_pass() -> None:
    """A request that one rule denies leases nothing."""
    authority = _Authority(HOUR)
    tight = authority.store.counter([Limit(1, per=3_600)], "tight")
    terms = LeaseTerms(10, 1, SECOND_NS)
    checks = [LeaseCheck(authority.counter, KEY, 1, terms), LeaseCheck(tight, KEY, 1, terms)]
    first = authority.store.lease(checks)
    assert [answer[1].units for answer in first if isinstance(answer, tuple)] == [10, 0]
    assert authority.remaining == 89
    second = authority.store.lease(checks)
    assert [answer[1] for answer in second if isinstance(answer, tuple)] == [NO_LEASE, NO_LEASE]
    assert authority.remaining == 89


# ── Holds, give-backs and late charges ─────────────────────────────────────────────────────────


def test_refill_does_not_return_units_that_may_still_be_spent() -> None:
    """They are held until one lifetime after the lease's end; then refill goes on."""
    authority = _Authority(Limit(10, per=10, capacity=40))
    _, lease = authority.lease(1, 19)
    assert (lease.units, lease.lasts_ns) == (19, SECOND_NS)
    assert authority.remaining == 20
    for _ in range(2):  # one second, and two more of the longest lease
        authority.clock.advance(1.25)
        assert authority.remaining == 21
    authority.clock.advance(1.5)
    assert authority.remaining == 22
    authority.clock.advance(30)
    assert authority.remaining == 40


def test_others_units_are_refilled_while_some_are_held() -> None:
    """Only the held units stay; a check of another node gets what was refilled."""
    authority = _Authority(Limit(10, per=10, capacity=40))
    _, lease = authority.lease(1, 10)
    assert lease.units == 10
    assert authority.counter.check(KEY, 29).remaining == 0
    authority.clock.advance(2)
    denied = authority.counter.check(KEY, 3)
    assert (denied.remaining, denied.retry_after) == (2, 1)
    assert authority.give_back(10, lease) == 12


def test_a_wait_includes_the_end_of_a_hold() -> None:
    """A denied client that waits as told is allowed, and not a moment earlier."""
    authority = _Authority(Limit(10, per=10, capacity=10))
    authority.lease(1, 4)
    denied = authority.counter.check(KEY, 10)
    assert not denied
    authority.clock.advance_ns(denied.retry_after_ns - 1)
    assert not authority.counter.check(KEY, 10)
    authority.clock.advance_ns(1)
    assert authority.counter.check(KEY, 10)


@pytest.mark.parametrize("algorithm", LEASING)
def test_units_that_are_given_back_can_be_spent_again(algorithm: AlgorithmName) -> None:
    """All of them, during the lease and after its end."""
    authority = _Authority(Limit(100, per=600, algorithm=algorithm))
    assert authority.counter.check(KEY, 20).allowed
    _, lease = authority.lease(10, 40)
    assert lease.units == 35
    assert authority.give_back(28, lease) == 63
    assert authority.give_back(7, lease) == 70
    _, second = authority.lease(10, 40)
    assert second.units == 30
    authority.clock.advance(1.2)
    assert authority.give_back(30, second) == 60


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
def test_a_hold_gives_back_no_more_than_was_leased(algorithm: AlgorithmName) -> None:
    """A give-back of more units than are outstanding returns those."""
    authority = _Authority(Limit(100, per=600, algorithm=algorithm))
    _, lease = authority.lease(10, 40)
    assert authority.give_back(1_000, lease) == 90
    assert authority.give_back(1_000, lease) == 90


def test_units_that_come_too_late_are_not_given_back() -> None:
    """They may have been given back before."""
    authority = _Authority(HOUR)
    _, lease = authority.lease(1, 10)
    authority.clock.advance(1 + 2)
    assert authority.give_back(10, lease) == 89


@pytest.mark.parametrize(
    ("algorithm", "age", "remaining"),
    [
        ("token_bucket", 0, 50),
        ("token_bucket", 30, 80),  # half a minute refills 30
        ("leaky_bucket", 30, 80),
        ("sliding_window_log", 30, 50),
        ("sliding_window_log", 59, 50),
        ("fixed_window", 5, 50),
        ("fixed_window", 30, 100),  # in the window before
        ("sliding_window_counter", 5, 50),
        ("sliding_window_counter", 30, 61),  # 50 × 46 / 60, rounded up
        ("sliding_window_counter", 90, 100),
    ],
)
def test_a_late_charge_counts_at_its_age(
    algorithm: AlgorithmName, age: float, remaining: int
) -> None:
    """As if it had been charged then, if nothing else was."""
    limit = Limit(100, per=60, algorithm=algorithm)
    if "bucket" in algorithm:
        limit = Limit(60, per=60, algorithm=algorithm, capacity=100)
    authority = _Authority(limit, start=600 + 14)
    assert authority.late(50, age) == remaining


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_an_excess_of_late_charges_is_forgotten(algorithm: AlgorithmName) -> None:
    """A limit is never owed more than all of it."""
    authority = _Authority(Limit(10, per=60, algorithm=algorithm), start=600)
    for _ in range(5):
        assert authority.late(7, 0) in (0, 3)
    assert authority.late(10**6, 0) == 0
    authority.clock.advance(120)
    assert authority.remaining == 10


def test_a_late_charge_is_never_before_the_last_change() -> None:
    """The states do not know what happened before it."""
    authority = _Authority(Limit(60, per=60))
    authority.counter.check(KEY, 1)
    assert authority.late(10, 30) == 49


# ── Limits that change, and resets ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("algorithm", LEASING)
def test_units_of_a_lower_limit_are_given_back_alone(algorithm: AlgorithmName) -> None:
    """The limit is raised while a lease is out. What was admitted since stays charged."""
    authority = _Authority(Limit(50, per=3_600, algorithm=algorithm), start=3_600)
    _, lease = authority.lease(1, 20)
    raised = authority.store.counter([Limit(100, per=3_600, algorithm=algorithm)], "r")
    assert raised.check(KEY, 79).allowed
    authority.give_back(20, lease)
    assert raised.peek(KEY, 0).remaining == 20


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_a_late_charge_of_a_lower_limit_erases_nothing(algorithm: AlgorithmName) -> None:
    """The charge is cut to the lower limit; other units stay charged."""
    authority = _Authority(Limit(50, per=3_600, algorithm=algorithm), start=3_600)
    raised = authority.store.counter([Limit(100, per=3_600, algorithm=algorithm)], "r")
    assert raised.check(KEY, 90).allowed
    authority.late(20, 0)
    assert raised.peek(KEY, 0).remaining <= 10


# ── Properties ─────────────────────────────────────────────────────────────────────────────────


def assert_bounded(
    limit: Limit, start_ns: int, steps: list[bytes], clock_step: str, *, resets: bool = False
) -> None:
    """Play a trace on the reference, and check the bound in every interval."""
    clock = clock_at(start_ns // 1_000 * 1_000)
    play = LeasePlay(MemoryAuthority(clock), clock, [limit], (clock_step,), resets=resets)
    play.play(steps)
    play.assert_never_over(limit)


@pytest.mark.parametrize("algorithm", LEASING)
@promise(250, data=st.data())
def test_never_over_whenever_nodes_spend_their_leases(
    algorithm: AlgorithmName, data: st.DataObject
) -> None:
    """Nodes spend at any time until the end, crash, and give back early, late and repeatedly.

    The authority's clock is set forward now and then.
    """
    limit = data.draw(leased_limits(algorithm))
    assert_bounded(limit, data.draw(starts_ns()), data.draw(lease_traces()), "clock forward")


@pytest.mark.parametrize("algorithm", LEASING)
@promise(200, data=st.data())
def test_never_over_from_a_reset_on(algorithm: AlgorithmName, data: st.DataObject) -> None:
    """Nodes do not know of a reset: they spend the leases that they have, and give them back."""
    limit = data.draw(leased_limits(algorithm))
    steps = data.draw(lease_traces())
    assert_bounded(limit, data.draw(starts_ns()), steps, "clock forward", resets=True)


@pytest.mark.parametrize("algorithm", LEASING)
@promise(60, data=st.data())
def test_never_over_if_the_authoritys_clock_goes_back(
    algorithm: AlgorithmName, data: st.DataObject
) -> None:
    """Time never rewinds for a state."""
    limit = data.draw(leased_limits(algorithm))
    assert_bounded(limit, data.draw(starts_ns()), data.draw(lease_traces()), "clock back")


@pytest.mark.parametrize("algorithm", LEASING)
@promise(150, data=st.data())
def test_never_over_if_a_limit_is_raised(algorithm: AlgorithmName, data: st.DataObject) -> None:
    """Leases and late charges of the lower limit do not erase what the higher one has admitted."""
    limit = data.draw(leased_limits(algorithm))
    parts = sorted(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    clock = clock_at(data.draw(starts_ns()) // 1_000 * 1_000)
    earlier = [scaled([limit], Fraction(part, 8)) for part in parts]
    play = LeasePlay(MemoryAuthority(clock), clock, [limit], CLOCK_STEPS[:1], earlier=earlier)
    play.play(data.draw(lease_traces()))
    assert_never_over(limit, sorted(play.admitted))


@promise(100, limits=several_leased_limits(), start_ns=starts_ns(), steps=lease_traces())
def test_never_over_in_any_of_several_leased_limits(
    limits: list[Limit], start_ns: int, steps: list[bytes]
) -> None:
    """All limits of a rule keep their bounds."""
    clock = clock_at(start_ns // 1_000 * 1_000)
    play = LeasePlay(MemoryAuthority(clock), clock, limits, CLOCK_STEPS[:1])
    play.play(steps)
    for limit in limits:
        assert_never_over(limit, sorted(play.admitted))


@pytest.mark.parametrize("algorithm", LEASING)
@promise(60, data=st.data())
def test_a_lease_that_is_given_back_whole_leaves_no_trace(
    algorithm: AlgorithmName, data: st.DataObject
) -> None:
    """While other units are in use, every later decision is that of a limit that never leased."""
    limit = Limit(data.draw(st.integers(8, 60)), per=60, algorithm=algorithm)
    leased, plain = _Authority(limit, start=600), _Authority(limit, start=600)
    base = limit.limit // 2
    for each in (leased, plain):
        assert each.counter.check(KEY, base).allowed
    leases = []
    for gap in data.draw(st.lists(st.integers(0, 300))):
        for each in (leased, plain):
            each.clock.advance(gap / 1_000)
        if plain.counter.peek(KEY, 1).remaining < limit.limit // 4:
            break
        decision, lease = leased.lease(1, 5, lifetime=0.5)
        assert plain.counter.check(KEY, 1).allowed is decision.allowed
        leases.append(lease)
        if len(leases) == 2:
            assert leased.give_back(leases[0].units, leases.pop(0)) <= plain.remaining
    for lease in leases:
        leased.give_back(lease.units, lease)
    assert leased.counter.peek(KEY, 1) == plain.counter.peek(KEY, 1)


def test_late_charges_that_come_one_by_one_are_not_forgotten() -> None:
    """Each unit is refilled before it is reported; together they are more than refill returns.

    Other subjects come in between, so that the store would drop a state that has ended.
    """
    authority = _Authority(Limit(1_000, per=60))
    for number in range(100):  # 100 units in a second, each reported after 0.25 s
        authority.late(1, 0.25)
        authority.counter.check(f"other:{number}", 1)
        authority.clock.advance(0.01)
    # 1 s of refill returns 17 units, and 0.25 s four more.
    assert 1_000 - authority.counter.peek(KEY, 0).remaining in range(78, 83)
