"""Acknowledged totals: never over without an authority, whatever is lost, late or cut."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import AlgorithmName, Limit
from ratekeeper.decide.failure import RETRY_AFTER_NS, LocalCheck
from ratekeeper.decide.ledgers import BucketLedger
from ratekeeper.fleet import totals as totals_module
from ratekeeper.fleet.datagrams import MEMBERS_MAX, PAYLOAD_BYTES_MAX
from ratekeeper.fleet.totals import (
    JOIN_NS,
    REPEAT_NS,
    Totals,
    equal_shares,
)

SECOND = 1_000_000_000
START = 1_800_000_000 * SECOND


def check_of(limit: Limit, units: int = 1, subject: str = "ann") -> LocalCheck:
    return LocalCheck((limit,), "api", subject, units)


class Checker:
    """A perfect central limiter: it says by how many units an admission is over."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.level = Fraction(0)
        self.last_ns = 0
        self.admitted: deque[tuple[int, int]] = deque()

    def over(self, now_ns: int, units: int) -> Fraction:
        limit = self.limit
        if limit.refill_step_ns > 1:
            return self._over_in_steps(now_ns, units)
        if limit.algorithm in {"token_bucket", "leaky_bucket"}:
            drained = Fraction((now_ns - self.last_ns) * limit.limit, limit.window_ns)
            self.level = max(self.level - drained, Fraction(0)) + units
            self.last_ns = now_ns
            return self.level - limit.capacity
        self.admitted.append((now_ns, units))
        window_ns = limit.window_ns
        if limit.algorithm == "sliding_window_log":
            while self.admitted[0][0] <= now_ns - window_ns:
                self.admitted.popleft()
            return Fraction(sum(units for _, units in self.admitted) - limit.limit)
        number = now_ns // window_ns
        counts = [0, 0]
        for at_ns, each in self.admitted:
            if 0 <= number - at_ns // window_ns <= 1:
                counts[number - at_ns // window_ns] += each
        fade = Fraction((number + 1) * window_ns - now_ns, window_ns)
        if limit.algorithm == "fixed_window":
            fade = Fraction(0)
        return counts[0] + counts[1] * fade - limit.limit

    def _over_in_steps(self, now_ns: int, units: int) -> Fraction:
        """Return the most that any interval until now is over: a step may end just within it."""
        self.admitted.append((now_ns, units))
        step_ns = self.limit.refill_step_ns
        refill = Fraction(step_ns * self.limit.limit, self.limit.window_ns)
        total, worst = 0, Fraction(-1)
        for at_ns, each in reversed(self.admitted):
            total += each
            steps = -((at_ns - now_ns) // step_ns)
            worst = max(worst, total - self.limit.capacity - steps * refill)
        return worst


@dataclass
class Network:
    """Members, the messages on their way, and the limit as a central limiter counts it."""

    random: Random
    limit: Limit
    make: Callable[[int], Totals] = Totals
    loss: float = 0.0
    lag_ns: int = 2 * SECOND
    now_ns: int = START
    members: dict[int, Totals] = field(default_factory=dict)
    cuts: set[tuple[int, int]] = field(default_factory=set)
    admitted: dict[int, int] = field(default_factory=dict)
    worst: Fraction = Fraction(-1)
    events: list[tuple[int, int, Callable[[], object]]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.checker = Checker(self.limit)

    def at(self, at_ns: int, action: Callable[..., object], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self.events, (at_ns, self._count, partial(action, *args)))

    def run(self, until_ns: int) -> None:
        while self.events and self.events[0][0] <= until_ns:
            self.now_ns, _, action = heapq.heappop(self.events)
            action()
        self.now_ns = until_ns

    def start(self, count: int) -> None:
        """Start members that know one another before the first request."""
        for member in range(1, count + 1):
            self.members[member] = self.make(member)
        self.share_equally()
        loss, self.loss = self.loss, 0.0
        self.run(self.now_ns + 10 * SECOND)
        assert all(each.settled for each in self.members.values())
        self.loss = loss

    def share_equally(self) -> None:
        for each in self.members.values():
            each.use(equal_shares(list(self.members)), self.now_ns)
        for member in self.members:
            self.at(self.now_ns, self.send, member)

    def send(self, member: int) -> None:
        """Send what a member has to say, about ten times a second."""
        if member not in self.members:
            return
        payload = self.members[member].compose(self.now_ns)
        pause_ns = self.random.randint(70, 130) * SECOND // 1000
        self.at(self.now_ns + pause_ns, self.send, member)
        if payload is None:
            return
        assert len(payload) <= PAYLOAD_BYTES_MAX
        for other in self.members:
            for _ in range(self.random.choice((1, 1, 1, 2))):
                if (member, other) not in self.cuts and self.random.random() >= self.loss:
                    late_ns = self.random.randint(0, self.lag_ns)
                    self.at(self.now_ns + late_ns, self.arrive, member, other, payload)

    def arrive(self, member: int, other: int, payload: bytes) -> None:
        if other in self.members and other != member:
            self.members[other].receive(member, payload, self.now_ns)

    def ask(self, member: int, units: int = 1) -> bool:
        if member not in self.members:
            return False
        found = self.members[member].decide([check_of(self.limit, units)], self.now_ns, spend=True)
        if not found or not found[0].allowed:
            return False
        self.admitted[member] = self.admitted.get(member, 0) + units
        self.worst = max(self.worst, self.checker.over(self.now_ns, units))
        return True


def limit_of(random: Random, algorithm: AlgorithmName) -> Limit:
    units, seconds = random.randint(20, 200), random.choice((5, 10, 30))
    if algorithm == "token_bucket":
        return Limit(units, seconds, capacity=random.randint(20, 2 * units))
    return Limit(units, seconds, algorithm=algorithm)


def random_fleet(
    seed: int,
    algorithm: AlgorithmName = "token_bucket",
    make: Callable[[int], Totals] = Totals,
    step_s: float = 0,
) -> Network:
    """Run a random fleet for a minute: loss, lag, one-way cuts, a crash, bursts, idle members."""
    random = Random(seed)
    limit = limit_of(random, algorithm)
    if step_s:
        limit = Limit(limit.limit, limit.per, capacity=limit.limit, refill_every=step_s)
    network = Network(random, limit, make)
    network.loss = random.choice((0.0, 0.2, 0.6))
    network.lag_ns = random.choice((SECOND // 100, SECOND // 5, 2 * SECOND))
    count = random.randint(2, 5)
    network.start(count)
    end_ns = network.now_ns + 40 * SECOND

    def cut() -> None:
        network.cuts = {
            (a, b)
            for a in range(1, count + 1)
            for b in range(1, count + 1)
            if random.random() < 0.3
        }
        network.at(network.now_ns + random.randint(1, 5) * SECOND, heal)

    def heal() -> None:
        network.cuts = set()
        network.at(network.now_ns + random.randint(1, 8) * SECOND, cut)

    network.at(network.now_ns + random.randint(1, 5) * SECOND, cut)
    if random.random() < 0.3:
        dead = random.randint(1, count)
        network.at(network.now_ns + 15 * SECOND, network.members.pop, dead, None)
    rate = limit.limit * random.choice((0.5, 2, 20)) / limit.window / count

    def traffic(member: int) -> None:
        network.ask(member, random.choice((1, 1, 1, 3)))
        pause_s = random.expovariate(rate) if random.random() < 0.995 else random.randint(1, 8)
        at_ns = network.now_ns + int(pause_s * SECOND) + 1
        if at_ns < end_ns:
            network.at(at_ns, traffic, member)

    for member in range(1, count + 1):
        if random.random() < 0.8:
            network.at(network.now_ns + random.randint(0, 10 * SECOND), traffic, member)
    network.run(end_ns)
    return network


FLEETS = 4
ALGORITHMS: tuple[AlgorithmName, ...] = (
    "token_bucket",
    "fixed_window",
    "sliding_window_counter",
    "sliding_window_log",
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_fleets_are_never_over(algorithm: AlgorithmName) -> None:
    """No admission is over, with loss, lag, repeats, one-way cuts, a crash, 20 times the limit."""
    for seed in range(FLEETS):
        network = random_fleet(seed, algorithm)
        assert network.worst <= 0, f"seed {seed}: {float(network.worst)} over {network.limit}"
        assert network.admitted, f"seed {seed}"


def test_buckets_that_are_refilled_in_steps_are_never_over() -> None:
    """In any interval, at most the capacity and the steps that can end in it."""
    for seed in range(3):
        assert random_fleet(seed, step_s=2.5).worst <= 0, f"seed {seed}"


@settings(max_examples=settings().max_examples * 2 // 5)  # a fleet takes a tenth of a second
@given(seed=st.integers(min_value=0), algorithm=st.sampled_from(ALGORITHMS))
def test_any_fleet_is_never_over(seed: int, algorithm: AlgorithmName) -> None:
    """The same for seeds that Hypothesis chooses."""
    assert random_fleet(seed, algorithm).worst <= 0


class OwnDrainsBesideKnown(BucketLedger):
    """Wrong: `own` drains while `known` is not empty."""

    __slots__ = ()

    def _at(self, now_ns: int, share: Fraction) -> tuple[int, int, int]:
        elapsed_ns = max(now_ns - self._last_ns, 0)
        drained = elapsed_ns * self.limit.micros_numerator // self.limit.ns_denominator
        own = max(self._own - drained * share.numerator // share.denominator, 0)
        return max(self._known - drained, 0), own, self._last_ns + elapsed_ns


class OwnInsideKnown(OwnDrainsBesideKnown):
    """Wrong: own units are in `known` from the start, and are drained separately as well."""

    __slots__ = ()

    def levels(self, now_ns: int, share: Fraction) -> tuple[int, int]:
        known, own, _ = self._at(now_ns, share)
        return max(known - own, 0), own

    def add(self, now_ns: int, share: Fraction, known: int, own: int) -> None:
        super().add(now_ns, share, known + own, own)

    def move(self, now_ns: int, share: Fraction, last: int) -> None:
        self._known, self._own, self._last_ns = self._at(now_ns, share)
        self._own = min(self._own, last)


class MaximumOfTotals(Totals):
    """Wrong: a total counts only as far as it exceeds the largest total of any member."""

    def _learn(self, member: int, entry: Any, now_ns: int) -> tuple[int, int] | None:
        state = self._states.get((entry.gate.number, entry.subject))
        if state is None:
            return super()._learn(member, entry, now_ns)
        top = max([state.total, *(total for _, total in state.seen.values())])
        before = state.seen.get(member, (0, 0))[1]
        key = super()._learn(member, entry._replace(total=0), now_ns)
        state.learn(now_ns, self._share, max(entry.total - top, 0))
        state.seen[member] = (entry.generation, max(entry.total, before))
        return key


def worst_of(seeds: range, make: Callable[[int], Totals] = Totals) -> Fraction:
    return max(random_fleet(seed, "token_bucket", make).worst for seed in seeds)


@pytest.mark.parametrize(
    ("ledger", "make", "seeds"),
    [
        (OwnDrainsBesideKnown, Totals, range(6, 10)),
        (OwnInsideKnown, Totals, range(60, 61)),
        (BucketLedger, MaximumOfTotals, range(6, 10)),
    ],
    ids=["own drains beside known", "own inside known", "maximum of totals"],
)
def test_the_checker_finds_wrong_variants(
    ledger: type[BucketLedger],
    make: Callable[[int], Totals],
    seeds: range,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same checker and fleets find each of the tempting variants over the limit."""
    assert worst_of(seeds) <= 0
    monkeypatch.setattr(totals_module, "ledger_of", ledger)
    assert worst_of(seeds, make) > 0


class AcceptsEverything(Totals):
    """Wrong: a member acknowledges a total that it has no room to give way to."""

    def _accepts(self, key: tuple[int, int] | None, now_ns: int) -> bool:
        return True


def three_with_a_cut(make: Callable[[int], Totals]) -> int:
    """Member 1 spends its share, and 3 cannot hear it; 2 and 3 then spend all that they can."""
    network = Network(Random(1), Limit(900, per=36000), make, lag_ns=0)
    network.start(3)
    network.cuts = {(1, 3)}
    for member in (1, 2, 3):
        for _ in range(20):
            while network.ask(member):
                pass
            network.run(network.now_ns + SECOND // 5)
    return sum(network.admitted.values())


def test_a_member_that_has_no_room_does_not_accept() -> None:
    """With three members, acknowledging at once is over, although all else is as designed."""
    assert three_with_a_cut(Totals) <= 901
    assert three_with_a_cut(AcceptsEverything) > 950


def changing_fleet(seed: int, algorithm: AlgorithmName) -> Network:
    """Run a fleet in which members die and join while requests come; each is noticed late."""
    random = Random(seed)
    network = Network(random, limit_of(random, algorithm))
    network.loss = random.choice((0.0, 0.3))
    network.lag_ns = random.choice((SECOND // 100, SECOND))
    network.start(random.randint(2, 4))
    end_ns = network.now_ns + 40 * SECOND
    rate = network.limit.limit * random.choice((2, 20)) / network.limit.window / 4

    def traffic(member: int) -> None:
        network.ask(member)
        at_ns = network.now_ns + int(random.expovariate(rate) * SECOND) + 1
        if member in network.members and at_ns < end_ns:
            network.at(at_ns, traffic, member)

    def notice(member: int) -> None:
        if member in network.members:
            network.members[member].use(equal_shares(sorted(network.members)), network.now_ns)

    def change() -> None:
        if random.random() < 0.5 and len(network.members) > 1:
            del network.members[random.choice(sorted(network.members))]
            late_ns = 5 * SECOND
        else:
            new = 10 + len(network.events) + random.getrandbits(40)
            network.members[new] = Totals(new)
            notice(new)
            network.at(network.now_ns, network.send, new)
            network.at(network.now_ns, traffic, new)
            late_ns = SECOND
        for member in network.members:
            at_ns = network.now_ns + random.randint(0, late_ns)
            network.at(at_ns, notice, member)
        network.at(network.now_ns + random.randint(6, 15) * SECOND, change)

    for member in network.members:
        network.at(network.now_ns, traffic, member)
    network.at(network.now_ns + random.randint(1, 8) * SECOND, change)
    network.run(end_ns)
    return network


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_members_that_die_and_join_are_never_over(algorithm: AlgorithmName) -> None:
    """A share falls before others rise, and a rise gives no units at once."""
    for seed in range(FLEETS // 2):
        network = changing_fleet(seed, algorithm)
        assert network.worst <= 0, f"seed {seed}: {float(network.worst)} over {network.limit}"


class RisesAtOnce(Totals):
    """Wrong: a share that rises gives its units at once."""

    def _rise(self, part: Fraction, now_ns: int) -> None:
        pass


def after_a_death(make: Callable[[int], Totals]) -> int:
    """One of three members is cut off, spends its share and dies; the others take it over."""
    network = Network(Random(1), Limit(900, per=36000), make, lag_ns=0)
    network.start(3)
    network.cuts = {(1, 2), (1, 3)}
    for member in (1, 2):
        while network.ask(member):
            pass
    network.run(network.now_ns + SECOND)
    del network.members[1]
    network.share_equally()
    for _ in range(40):
        while network.ask(2) or network.ask(3):
            pass
        network.run(network.now_ns + SECOND // 5)
    assert network.members[2].share == Fraction(1, 2)
    return sum(network.admitted.values())


def test_the_units_of_a_dead_member_count() -> None:
    """Survivors take its share as spent; without that, they would spend it a second time."""
    assert after_a_death(Totals) <= 901
    assert after_a_death(RisesAtOnce) > 950


def test_a_busy_member_gets_nearly_the_whole_limit() -> None:
    """Idle members accept its totals, although they never saw a request of the rule."""
    network = Network(Random(1), Limit(900, per=36000), lag_ns=SECOND // 100)
    network.start(3)
    for _ in range(60):
        while network.ask(1):
            pass
        network.run(network.now_ns + SECOND // 5)
    assert 850 <= network.admitted[1] <= 901


def test_a_member_that_is_cut_off_keeps_its_share() -> None:
    """In any partition, a member goes on with its share of capacity and rate."""
    network = Network(Random(1), Limit(30, per=30), loss=1.0)
    network.start(3)
    for _ in range(300):
        network.ask(1)
        network.run(network.now_ns + SECOND // 10)
    assert 10 + 9 <= network.admitted[1] <= 10 + 10


def settled(limit: Limit, count: int = 3) -> Network:
    network = Network(Random(1), limit, lag_ns=0)
    network.start(count)
    return network


def test_the_decision_of_a_share() -> None:
    """`remaining` and the waits are those of the share; what a check returns is not degraded."""
    network = settled(Limit(30, per=30))
    decide = network.members[1].decide
    [decision] = decide([check_of(network.limit, 4)], network.now_ns, spend=True) or []
    assert (decision.allowed, decision.remaining, decision.rule) == (True, 6, "api")
    assert decision.reset_after == pytest.approx(12, abs=0.01)
    [denied] = decide([check_of(network.limit, 8)], network.now_ns, spend=True) or []
    assert (denied.allowed, denied.remaining) == (False, 6)
    assert denied.retry_after == pytest.approx(6, abs=0.01)


@given(
    algorithm=st.sampled_from((*ALGORITHMS, "leaky_bucket")),
    spent=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4 * SECOND)), max_size=12),
    learnt=st.lists(st.integers(1, 60), max_size=3),
    cost=st.integers(1, 10),
    step=st.sampled_from((0, 0.5)),
)
def test_waiting_always_suffices(
    algorithm: AlgorithmName,
    spent: list[tuple[int, int]],
    learnt: list[int],
    cost: int,
    step: float,
) -> None:
    """After `retry_after`, the same cost is allowed; after `reset_after`, the whole share is."""
    limit = Limit(30, 10, algorithm, refill_every=step if algorithm == "token_bucket" else 0)
    member = settled(limit).members[1]
    now_ns = START + 60 * SECOND
    for units, pause_ns in spent:
        member.decide([check_of(limit, units)], now_ns, spend=True)
        now_ns += pause_ns
    for units in learnt:
        for state in member._states.values():
            state.learn(now_ns, member.share, units)
    [decision] = member.decide([check_of(limit, cost)], now_ns, spend=False) or []
    now_ns += decision.retry_after_ns
    [later] = member.decide([check_of(limit, cost)], now_ns, spend=False) or []
    assert later.allowed
    now_ns += later.reset_after_ns
    [whole] = member.decide([check_of(limit, cost)], now_ns, spend=False) or []
    assert whole.remaining == 10
    assert whole.reset_after_ns == 0


def test_the_rules_of_a_request_pass_together() -> None:
    """A rule that denies keeps the others from being charged; so does a second use of a subject."""
    network = settled(Limit(30, per=30))
    decide, now_ns = network.members[1].decide, network.now_ns
    small = LocalCheck((Limit(3, per=30),), "login", "ann", 2)
    checks = [check_of(network.limit, 5), small]
    found = decide(checks, now_ns, spend=True) or []
    assert [(each.allowed, each.remaining) for each in found] == [(True, 10), (False, 0)]
    twice = [check_of(network.limit, 6), check_of(network.limit, 6)]
    decide(twice, now_ns, spend=True)
    [left] = decide([check_of(network.limit, 0)], now_ns, spend=False) or []
    assert left.remaining == 10


def test_a_cost_above_the_share_is_denied() -> None:
    """It fits the limit, so it may pass when the authority is back."""
    network = settled(Limit(30, per=30))
    [denied] = network.members[1].decide([check_of(network.limit, 11)], START, spend=True) or []
    assert (denied.allowed, denied.retry_after_ns) == (False, RETRY_AFTER_NS)


def test_a_share_below_one_unit_is_not_answered() -> None:
    """Nothing would ever pass; the caller falls back to one unit for each node."""
    network = settled(Limit(2, per=30))
    assert network.members[1].decide([check_of(network.limit)], START, spend=True) is None


def test_a_member_without_a_share_denies() -> None:
    """A node that joins in an outage admits nothing until all others have lowered their shares."""
    new = Totals(7)
    new.use(equal_shares([7, 8]), START)
    assert new.share == 0
    [denied] = new.decide([check_of(Limit(30, per=30))], START, spend=True) or []
    assert not denied.allowed
    assert new.decide([check_of(Limit(30, per=30))], START + JOIN_NS, spend=True) is None


def test_a_member_that_joins_an_idle_fleet_has_its_share_at_once() -> None:
    """No member holds units, so nothing can have been spent."""
    network = settled(Limit(30, per=30))
    new = network.members[4] = Totals(4)
    network.share_equally()
    network.run(network.now_ns + 5 * SECOND)
    [decision] = new.decide([check_of(network.limit)], network.now_ns, spend=False) or []
    assert decision.remaining == 7


def test_a_member_that_joins_in_an_outage_starts_with_nothing() -> None:
    """It cannot know what others have spent. Time gives it its share."""
    network = settled(Limit(30, per=30))
    network.ask(1)
    new = network.members[4] = Totals(4)
    network.share_equally()
    network.run(network.now_ns + SECOND)
    assert new.share == Fraction(1, 4)
    check = [check_of(network.limit)]
    [denied] = new.decide(check, network.now_ns, spend=False) or []
    assert not denied.allowed
    [whole] = new.decide(check, network.now_ns + 40 * SECOND, spend=False) or []
    assert whole.remaining == 7


def test_states_expire_and_are_bounded() -> None:
    """A full table is not answered; states that are empty for long are forgotten."""
    network = settled(Limit(30, per=30))
    member = network.members[1] = Totals(1, states_max=50)
    member.use(equal_shares([1]), START)
    now_ns = START
    for number in range(80):
        found = member.decide([check_of(network.limit, 1, str(number))], now_ns, spend=True)
        assert (found is None) == (number >= 50)
    assert (len(member), member.refused) == (50, 30)
    member.compose(now_ns + 200 * SECOND)
    assert len(member) == 0


def test_limits_of_old_versions_of_the_rules_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would use up the room for new ones."""
    monkeypatch.setattr(totals_module, "GATES_MAX", 3)
    member = Totals(1)
    member.use(equal_shares([1]), START)
    for units in range(1, 10):
        spend = units < 3
        check = [check_of(Limit(units, per=30))]
        assert member.decide(check, START, spend=spend) is not None
    assert len(member) == 2
    for units in (20, 21):
        found = member.decide([check_of(Limit(units, per=30))], START, spend=True)
        assert (found is None) == (units == 21)


def test_a_full_table_accepts_nothing() -> None:
    """A member that cannot keep a total does not acknowledge it: others stay at their share."""
    network = Network(Random(1), Limit(900, per=36000), lambda each: Totals(each, 1), lag_ns=0)
    network.start(2)
    network.members[2].decide([check_of(network.limit, 1, "bob")], network.now_ns, spend=True)
    for _ in range(20):
        while network.ask(1):
            pass
        network.run(network.now_ns + SECOND)
    assert network.admitted[1] <= 451


def test_many_subjects_take_turns_in_payloads_of_bounded_size() -> None:
    """The totals that changed most go first; all are accepted in the end."""
    network = settled(Limit(30, per=3000))
    first, second = network.members[1], network.members[2]
    for number in range(300):
        units = 9 if number == 150 else 1
        first.decide([check_of(network.limit, units, str(number))], network.now_ns, spend=True)
    payload = first.compose(network.now_ns) or b""
    assert len(payload) <= PAYLOAD_BYTES_MAX
    second.receive(1, payload, network.now_ns)
    [decision] = (
        second.decide([check_of(network.limit, 0, "150")], network.now_ns, spend=False) or []
    )
    assert decision.remaining == 7  # of 10, with a third of 9 units
    network.run(network.now_ns + 10 * SECOND)
    assert len(second) == 300
    assert not first._open


def test_a_message_that_comes_again_changes_nothing() -> None:
    """Also an older one after a newer one."""
    network = settled(Limit(30, per=3000))
    first, second = network.members[1], network.members[2]
    payloads = []
    for _ in range(2):
        first.decide([check_of(network.limit, 3)], network.now_ns, spend=True)
        payloads.append(first.compose(network.now_ns) or b"")
    for payload in (payloads[1], payloads[0], payloads[1]):
        second.receive(1, payload, network.now_ns)
    [decision] = second.decide([check_of(network.limit, 0)], network.now_ns, spend=False) or []
    assert decision.remaining == 8


def test_totals_are_repeated_until_they_are_accepted() -> None:
    """A lost payload is sent again after a second."""
    network = settled(Limit(30, per=3000))
    first = network.members[1]
    first.decide([check_of(network.limit, 3)], network.now_ns, spend=True)
    assert first.compose(network.now_ns)
    assert first.compose(network.now_ns + REPEAT_NS // 2) is None
    assert first.compose(network.now_ns + REPEAT_NS)


@given(st.binary(max_size=300), st.integers(0, 200), st.integers(0, 255))
def test_any_payload_is_read_or_dropped(content: bytes, at: int, byte: int) -> None:
    """Random bytes, and a payload with a wrong byte or cut short, never raise."""
    network = settled(Limit(30, per=3000))
    first, second = network.members[1], network.members[2]
    second.receive(1, content, network.now_ns)
    first.decide([check_of(network.limit, 3)], network.now_ns, spend=True)
    good = first.compose(network.now_ns) or b""
    second.receive(1, good[:at] + bytes([byte]) + good[at + 1 :], network.now_ns)
    second.receive(1, good[:at], network.now_ns)
    second.compose(network.now_ns)


def test_a_payload_of_an_unknown_member_is_ignored() -> None:
    """It counts nothing."""
    network = settled(Limit(30, per=3000))
    first, second = network.members[1], network.members[2]
    first.decide([check_of(network.limit, 3)], network.now_ns, spend=True)
    second.receive(99, first.compose(network.now_ns) or b"", network.now_ns)
    assert len(second) == 0


def test_shares_that_cannot_be_used_are_rejected() -> None:
    """This member is among them, and they add up to 1 at most."""
    for shares in ({}, {2: Fraction(1)}, {1: Fraction(2, 3), 2: Fraction(2, 3)}):
        with pytest.raises(ConfigError, match="this one"):
            Totals(1).use(shares, START)


def test_as_many_members_as_gossip_keeps_can_be_used() -> None:
    """Gossip keeps so many others; with this one, there is one more."""
    members = range(1, MEMBERS_MAX + 2)
    Totals(1).use(equal_shares(members), START)
    with pytest.raises(ConfigError, match="at most 1,001 members"):
        Totals(1).use(equal_shares([*members, 9_999]), START)


def test_a_member_may_use_less_than_its_share() -> None:
    """The others need not know: the shares in use still add up to 1 at most."""
    network = settled(Limit(30, per=30))
    member = network.members[1]
    member.use(equal_shares([1, 2, 3]), network.now_ns, at_most=Fraction(1, 10))
    assert (member.share, member.settled) == (Fraction(1, 10), True)
    member.use(equal_shares([1, 2, 3]), network.now_ns, at_most=Fraction(1, 2))
    assert member.share == Fraction(1, 3)


def test_shares_of_different_sizes() -> None:
    """The rule is the same for members that count differently, as regions may."""
    network = Network(Random(3), Limit(900, per=36000), lag_ns=0)
    shares = {1: Fraction(1, 2), 2: Fraction(1, 3), 3: Fraction(1, 6)}
    for member in shares:
        network.members[member] = Totals(member)
        network.members[member].use(shares, network.now_ns)
        network.at(network.now_ns, network.send, member)
    network.run(network.now_ns + 5 * SECOND)
    network.loss = 1.0
    for member in shares:
        while network.ask(member):
            pass
    assert network.admitted == {1: 450, 2: 300, 3: 150}
