"""The counters of a node: what they answer themselves, and what they ask the authority for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import CapacityError, Fleet, Limit, StoreUnavailable
from ratekeeper.core.model import AlgorithmName, Consistency
from ratekeeper.core.rates import LimitsArgument, limits_of
from ratekeeper.core.steps import Ask, Call
from ratekeeper.decide.leasing import Report
from ratekeeper.decide.store import Answer
from ratekeeper.fleet.counters import NodeCounter
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringCounter, Link, in_thread, on_loop
from tests.fleet.nodes import NodeOfTest, SharedStore
from tests.promises.oracles import Admission, assert_never_over

KEY = "user:42"
LEASING: tuple[AlgorithmName, ...] = (
    "token_bucket",
    "fixed_window",
    "sliding_window_counter",
    "sliding_window_log",
)


class Fixture:
    """Two nodes and their authority."""

    def __init__(
        self, limits: LimitsArgument, consistency: Consistency, fleet: Fleet | None = None
    ) -> None:
        self.clock = ManualClock(1_000)
        self.shared = SharedStore(self.clock)
        self.limits = limits_of(limits)
        self.one = NodeOfTest(self.shared, self.clock, fleet)
        self.two = NodeOfTest(self.shared, self.clock, fleet)
        self.counter = self.counter_of(self.one, consistency)
        self.other = self.counter_of(self.two, consistency)
        self.strict = self.shared.counter(self.limits, "r")

    def counter_of(self, node: NodeOfTest, consistency: Consistency) -> AnsweringCounter:
        """Return the counter of a node."""
        counter = node.store.counter(self.limits, "r", consistency)
        assert isinstance(counter.counter, NodeCounter)
        return counter

    def asked(self) -> int:
        """Return how many checks the first node did not answer."""
        return sum(each.asked for each in self.one.node.answers().values())

    def warm_up(self, counter: AnsweringCounter, count: int = 3) -> None:
        """Make a node see demand, so that its next lease has units."""
        for _ in range(count):
            assert counter.check(KEY, 1).allowed


# ── Leased ─────────────────────────────────────────────────────────────────────────────────────


def test_most_checks_of_a_busy_subject_are_answered_in_the_node() -> None:
    """Leases grow with the demand: 200 checks ask the authority a few times."""
    found = Fixture("100000/minute", "leased")
    for _ in range(200):
        assert found.counter.check(KEY, 1).allowed
        found.clock.advance(0.001)
    assert found.asked() <= 12
    answers = found.one.node.answers()["r", "leased"]
    assert answers.allowed + answers.asked == 200
    assert found.strict.peek(KEY, 0).remaining <= 100_000 - 200 + 4


def test_what_a_lease_has_left_goes_back_when_it_ends() -> None:
    """The authority has the units again after the flush, and counts what was spent."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 6)
    held = found.counter.held(KEY)
    assert held > 0
    assert found.strict.peek(KEY, 0).remaining == 1000 - 6 - held
    assert found.one.flush() == 0
    found.clock.advance(1.1)
    assert found.counter.held(KEY) == 0
    assert found.one.flush() == 1
    assert found.strict.peek(KEY, 0).remaining == 1000 - 6
    assert found.one.node.counters.returned_units == held


def test_a_replaced_lease_is_given_back_without_blocking_the_request() -> None:
    """The rest waits for the next flush."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 6)
    held = found.counter.held(KEY)
    assert held
    found.counter.check(KEY, held + 1)
    [back] = found.one.node.replaced
    assert back.units == held
    found.one.flush()
    spent = 6 + held + 1
    assert found.strict.peek(KEY, 0).remaining == 1000 - spent - found.counter.held(KEY)


def test_only_one_check_of_a_subject_asks_for_a_lease() -> None:
    """A second check in flight at the same time is an ordinary one."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 2)
    authority = found.one.node.authority
    first = found.counter.asking(KEY, 1)
    call = next(first)
    assert isinstance(call, Call)
    assert call.function == authority.lease
    second = found.counter.asking(KEY, 1)
    call = next(second)
    assert isinstance(call, Call)
    assert call.function == found.counter.counter.counter.check
    first.close()
    third = next(found.counter.asking(KEY, 1))
    assert isinstance(third, Call)
    assert third.function == authority.lease


def test_a_lease_that_comes_back_too_late_is_not_spent() -> None:
    """Its units go back to the authority; the check itself is allowed."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 3)
    leases = found.shared.controlled.leases
    found.shared.controlled.way_back_ns = 2 * 10**9
    assert found.counter.check(KEY, 1).allowed
    assert found.shared.controlled.leases == leases + 1
    assert found.counter.held(KEY) == 0
    found.one.flush()
    assert found.strict.peek(KEY, 0).remaining == 1000 - 4


def test_the_time_on_the_way_back_is_not_spent() -> None:
    """A lease ends on the node before it ends at the authority, also after a slow reply."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 3)
    found.shared.controlled.way_back_ns = 6 * 10**8
    found.counter.check(KEY, 1)
    assert found.counter.held(KEY) > 0
    found.clock.advance(0.41)
    assert found.counter.held(KEY) == 0


def test_a_denial_is_kept_and_told_to_the_other_nodes() -> None:
    """The second denial asks nobody; the other node denies when it has heard of it."""
    found = Fixture("10/minute", "leased")
    while found.counter.check(KEY, 1).allowed:
        pass
    asked = found.asked()
    denial = found.counter.check(KEY, 1)
    assert not denial.allowed
    assert denial.retry_after_ns > 0
    assert found.asked() == asked
    hint = found.one.heard.said[-1]
    assert hint[0] == "denied"
    found.two.node.heard_denied(*hint[1:])  # type: ignore[arg-type]  # as it was said
    assert not found.other.check(KEY, 1).allowed
    assert found.two.node.answers()["r", "leased"].asked == 0


def test_a_cost_that_needs_what_the_node_holds_gives_it_back_first() -> None:
    """A central limiter would allow it: the units that the node holds are given back."""
    found = Fixture("20/hour", "leased")
    found.warm_up(found.counter, 4)
    held = found.counter.held(KEY)
    remaining = found.strict.peek(KEY, 0).remaining
    assert held > 0
    assert found.counter.check(KEY, remaining + held).allowed
    assert not found.counter.check(KEY, 1).allowed


async def test_units_on_their_way_back_arrive_although_the_caller_is_cancelled() -> None:
    """They are no longer in the table, so nobody else would give them back."""
    found = Fixture("20/hour", "leased")
    found.warm_up(found.counter, 4)
    held, remaining = found.counter.held(KEY), found.strict.peek(KEY, 0).remaining
    sent, arrives, reported = asyncio.Event(), asyncio.Event(), asyncio.Event()
    controlled = found.shared.controlled

    async def slow(reports: Sequence[Report]) -> list[Answer]:
        sent.set()
        await arrives.wait()
        reported.set()
        return report(reports)

    report = controlled.report
    controlled.report = lambda reports: Ask(report, slow, reports)  # type: ignore[method-assign, assignment]  # a stub
    ask = found.counter.counter.check(KEY, remaining + held)
    assert isinstance(ask, Ask)
    check = asyncio.ensure_future(ask.send(*ask.args))
    await sent.wait()
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    arrives.set()
    async with asyncio.timeout(20):
        await reported.wait()
    assert [each.units for each in controlled.reported] == [held]
    assert found.strict.peek(KEY, 0).remaining == remaining + held
    assert found.one.flush(ending=True) == 0


def test_units_that_could_not_be_given_back_are_counted_as_lost() -> None:
    """The authority may have counted them, so they are not given back again."""
    found = Fixture("20/hour", "leased")
    found.warm_up(found.counter, 4)
    held, remaining = found.counter.held(KEY), found.strict.peek(KEY, 0).remaining
    found.shared.controlled.report = lambda _: [StoreUnavailable("away")]  # type: ignore[method-assign, assignment]  # a stub
    assert not found.counter.check(KEY, remaining + held).allowed
    assert found.one.node.counters.lost_units == held


def test_a_refund_gives_back_a_lease_that_another_thread_has_just_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends what the node knows of the subject, and there may be a new lease by then."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 6)
    held = found.counter.held(KEY)
    assert held > 0
    monkeypatch.setattr(NodeCounter, "held", lambda *_: 0)  # it was put since
    found.counter.refund(KEY, 1, None)
    assert [each.units for each in found.one.node.replaced] == [held]


def test_a_cost_that_never_fits_is_an_error_also_during_a_denial() -> None:
    """CapacityError, as on any store."""
    found = Fixture("10/minute", "leased")
    while found.counter.check(KEY, 1).allowed:
        pass
    with pytest.raises(CapacityError):
        found.counter.check(KEY, 11)


def test_an_authority_that_is_away_is_an_error_once_the_lease_is_spent() -> None:
    """The node spends what it has; then the failure policy decides."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 6)
    found.shared.controlled.fails = StoreUnavailable("away")
    for _ in range(found.counter.held(KEY)):
        assert found.counter.check(KEY, 1).allowed
    with pytest.raises(StoreUnavailable):
        found.counter.check(KEY, 1)


def test_a_cancelled_caller_keeps_no_lease() -> None:
    """Another check may ask for one at once."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 3)
    steps = found.counter.asking(KEY, 1)
    next(steps)
    with pytest.raises(asyncio.CancelledError):
        steps.throw(asyncio.CancelledError())
    assert not found.one.node.leasing
    assert found.counter.held(KEY) == 0


def test_a_lost_table_leaves_the_decision_to_the_authority() -> None:
    """Checks go on, and the units of a lease that cannot be kept go back."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 3)
    found.one.node.table.close()
    assert found.counter.check(KEY, 1).allowed
    assert found.counter.peek(KEY, 1).allowed
    found.counter.refund(KEY, 1, found.clock.now_ns())
    found.clock.advance(10)
    found.counter.reset(KEY)
    assert found.strict.peek(KEY, 0).remaining == 1000


# ── Eventual ───────────────────────────────────────────────────────────────────────────────────


def test_a_cool_subject_is_answered_in_the_node_and_charged_later() -> None:
    """One check asks; the others are pending until the flush, which renews the budget."""
    found = Fixture("1000/hour", "eventual")
    for _ in range(50):
        assert found.counter.check(KEY, 1).allowed
    assert found.asked() == 1
    assert found.strict.peek(KEY, 0).remaining == 999
    assert found.counter.peek(KEY, 0).remaining == 950
    found.clock.advance(0.25)
    assert found.one.flush() == 1
    assert found.strict.peek(KEY, 0).remaining == 950
    for _ in range(50):
        assert found.counter.check(KEY, 1).allowed
    assert found.asked() == 1
    assert found.one.node.counters.charged_units == 49


def test_a_spent_budget_is_reported_before_the_next_one() -> None:
    """A budget is a quarter of the room. The node's own units count in the authority's answer."""
    found = Fixture("1000/hour", "eventual")
    for _ in range(400):
        assert found.counter.check(KEY, 1).allowed
        assert -found.counter.held(KEY) <= 250
    assert found.asked() == 1
    assert [each.units for each in found.shared.controlled.reported] == [249]
    assert found.counter.peek(KEY, 0).remaining == 600


def test_a_burst_on_one_node_is_never_over() -> None:
    """However fast it comes: nothing is due for a report, and yet every unit is counted."""
    found = Fixture("1000/hour", "eventual")
    assert sum(found.counter.check(KEY, 1).allowed for _ in range(1_500)) == 1_000
    assert found.asked() < 510


def test_an_answer_without_the_units_of_the_node_brings_no_second_budget() -> None:
    """If they cannot be reported now, they are subtracted."""
    found = Fixture("1000/hour", "eventual")
    for _ in range(250):
        assert found.counter.check(KEY, 1).allowed
    claims = found.one.node.table.claim(10, 0, ending=True)  # another process reports them
    assert [each.units for each in claims] == [249]
    for _ in range(10):
        assert found.counter.check(KEY, 1).allowed
    assert found.asked() == 11


def test_from_the_warm_share_on_the_authority_decides() -> None:
    """A subject at half of its limit has no budget, and the other nodes are told once a second."""
    found = Fixture("100/hour", "eventual")
    found.strict.check(KEY, 60)
    for _ in range(5):
        assert found.counter.check(KEY, 1).allowed
    assert found.asked() == 5
    assert found.counter.held(KEY) == 0
    assert [each[0] for each in found.one.heard.said] == ["warm"]
    found.clock.advance(1.1)
    found.counter.check(KEY, 1)
    assert [each[0] for each in found.one.heard.said] == ["warm", "warm"]


def test_a_warm_hint_ends_the_budget_of_another_node() -> None:
    """Its next check asks the authority, and its charges are reported before they are due."""
    found = Fixture("100/hour", "eventual")
    found.warm_up(found.other, 3)
    assert found.two.node.answers()["r", "eventual"].asked == 1
    assert found.two.flush() == 0
    found.strict.check(KEY, 60)
    found.two.node.heard_warm(found.counter.allowance.number, KEY)
    found.two.node.heard_warm(12345, KEY)  # of rules that this node does not have
    assert found.two.flush() == 1
    assert found.strict.peek(KEY, 0).remaining == 100 - 3 - 60
    found.warm_up(found.other, 1)
    assert found.two.node.answers()["r", "eventual"].asked == 2
    assert found.other.held(KEY) == 0


def test_a_flush_that_finds_the_subject_warm_tells_the_others() -> None:
    """The reply of a late charge is a look at the authority."""
    found = Fixture("100/hour", "eventual")
    found.warm_up(found.counter, 20)
    found.strict.check(KEY, 60)
    found.clock.advance(0.25)
    found.one.flush()
    assert ("warm", found.counter.allowance.number, KEY) in found.one.heard.said
    asked = found.asked()
    found.counter.check(KEY, 1)
    assert found.asked() == asked + 1
    assert found.one.node.counters.divergence_units >= 60


def _fleet_that_gossips() -> Fixture:
    """Return two nodes that hear each other's hints, and have asked the authority before."""
    found = Fixture("1000/minute", "eventual", Fleet(nodes=2))
    for node, counter in ((found.one, found.counter), (found.two, found.other)):
        assert counter.check("user:first", 1).allowed  # tells the difference of the clocks
        node.node.hears_hints = lambda: True
    return found


def test_a_subject_that_nothing_is_known_of_is_cool() -> None:
    """In a fleet that gossips, its first check is answered in the node, and charged later."""
    found = _fleet_that_gossips()
    asked = found.asked()
    assert found.counter.check(KEY, 1).allowed
    assert found.asked() == asked
    assert found.counter.held(KEY) == -1
    assert not found.counter.check(KEY, 1_000)  # more than the first budget, an eighth of the limit
    found.clock.advance(0.3)
    found.one.flush()
    assert found.strict.peek(KEY, 0).remaining == 1_000


def test_without_other_nodes_the_authority_is_asked_first() -> None:
    """No node would say that a subject is warm, so none is presumed to be cool."""
    found = _fleet_that_gossips()
    found.one.node.hears_hints = lambda: False
    asked = found.asked()
    assert found.counter.check(KEY, 1).allowed
    assert found.asked() == asked + 1


def _moved(found: Fixture, limits: str) -> list[AnsweringCounter]:
    """Return the counters of both nodes for other limits of the same rule."""
    found.limits = limits_of(limits)
    return [found.counter_of(node, "eventual") for node in (found.one, found.two)]


def test_new_numbers_of_a_rule_give_no_new_budget() -> None:
    """A load step, a rule change or an override: warm subjects are not known under its number."""
    found = _fleet_that_gossips()
    assert found.strict.check(KEY, 1_000).allowed
    admitted = 0
    for _ in range(3):  # also when the limits return to numbers that were known before
        for step in range(10):
            for counter in _moved(found, f"{999 - step}/minute"):
                admitted += sum(counter.check(KEY, 1).allowed for _ in range(200))
                found.clock.advance(0.25)
            found.one.flush()
            found.two.flush()
    assert admitted <= 3 * 10 * (0.5 * 1_000 / 60 + 1)


def test_numbers_that_stay_are_presumed_again() -> None:
    """When no subject can be warm under the numbers before, an unknown one is cool."""
    found = _fleet_that_gossips()
    counter, _ = _moved(found, "999/minute")
    asked = found.asked()
    assert counter.check("user:1", 1).allowed
    assert found.asked() == asked + 1
    found.clock.advance(120)
    assert counter.check("user:2", 1).allowed
    assert found.asked() == asked + 1


def test_warm_subjects_of_long_limits_take_no_room_in_the_table() -> None:
    """Such limits are not presumed to be cool, so a hint has nothing to keep for days."""
    found = Fixture("10/day", "eventual", Fleet(nodes=2))
    assert found.counter.check("user:first", 1).allowed
    found.one.node.hears_hints = lambda: True
    number = found.counter.allowance.number
    for each in range(50):
        found.one.node.heard_warm(number, f"user:{each}")
    assert found.one.node.table.stats().held == 1
    assert found.strict.check(KEY, 9).allowed
    asked = found.asked()
    for _ in range(3):  # the authority decides each check
        found.counter.check(KEY, 1)
        found.clock.advance(2)
    assert found.asked() == asked + 3
    assert found.counter.allowance.spend(KEY, 0) is None  # nothing is kept


@pytest.mark.parametrize("pause_s", [0.5, 3.1, 11, 60])
def test_a_client_that_pauses_gets_no_second_budget(pause_s: float) -> None:
    """It has used up its limit: what it gets after each pause is what time has returned."""
    found = _fleet_that_gossips()
    while found.counter.check(KEY, 1).allowed or found.other.check(KEY, 1).allowed:
        pass
    began_ns = found.clock.now_ns()
    admitted = 0
    for _ in range(10):
        found.clock.advance(pause_s)
        for counter in (found.counter, found.other):
            admitted += sum(counter.check(KEY, 1).allowed for _ in range(300))
        found.one.flush()
        found.two.flush()
    refilled = 1_000 * (found.clock.now_ns() - began_ns) / (60 * 10**9)
    assert admitted <= refilled + 1


def test_a_refund_gives_no_budget() -> None:
    """One unit is returned to a client that has used up its limit, and one is admitted."""
    found = _fleet_that_gossips()
    last = None
    while (decision := found.counter.check(KEY, 1)).allowed:
        last = decision
    assert last is not None
    for _ in range(3):
        found.counter.refund(KEY, 1, last.charged_ns)
        assert sum(found.counter.check(KEY, 1).allowed for _ in range(50)) == 1


@pytest.mark.parametrize("hint", ["warm", "denied", "own"])
def test_a_subject_that_is_warm_is_asked_for(hint: str) -> None:
    """After a hint or a denial, the authority decides for as long as the limit can be warm."""
    found = _fleet_that_gossips()
    number = found.counter.allowance.number
    if hint == "warm":
        found.one.node.heard_warm(number, KEY)
    elif hint == "denied":
        found.one.node.heard_denied(number, KEY, 1, 10**8)
    else:
        assert found.strict.check(KEY, 1_000).allowed
        assert not found.counter.check(KEY, 500).allowed
    found.clock.advance(20)  # a budget and a denial would have ended
    asked = found.asked()
    found.counter.check(KEY, 1)
    assert found.asked() == asked + 1
    found.counter.reset(KEY)
    assert found.counter.check(KEY, 1).allowed
    assert found.asked() == asked + 2
    found.clock.advance(3)  # that answer was that it is cool
    assert found.counter.check(KEY, 1).allowed
    assert found.asked() == asked + 2


def test_a_warm_subject_that_another_node_has_told_is_not_told_again() -> None:
    """One hint a second is enough for the whole fleet."""
    found = _fleet_that_gossips()
    assert found.strict.check(KEY, 900).allowed
    found.one.node.heard_warm(found.counter.allowance.number, KEY)
    found.counter.check(KEY, 1)
    assert not [hint for hint in found.one.heard.said if hint[0] == "warm"]
    found.clock.advance(1)
    found.counter.check(KEY, 1)
    assert [hint for hint in found.one.heard.said if hint[0] == "warm"]


def test_of_several_limits_the_tightest_decides_who_is_warm() -> None:
    """The budget fits every limit; from half of the tightest one on, the authority decides."""
    found = Fixture("50/second; 1000/hour", "eventual")
    assert found.strict.check(KEY, 40).allowed
    for _ in range(22):
        found.clock.advance(1)
        assert found.strict.check(KEY, 40).allowed
    found.clock.advance(1)
    found.warm_up(found.counter, 1)
    room = 1_000 - 23 * 40
    budget = 0
    while found.counter.allowance.spend(KEY, 1) is not None:
        budget += 1
    assert 0 < budget <= room // 4
    found.one.flush(ending=True)
    assert found.strict.check(KEY, 35).allowed
    found.clock.advance(1)
    asked = found.asked()
    found.warm_up(found.counter, 3)
    assert found.asked() == asked + 3


def test_limits_too_small_for_all_nodes_are_decided_by_the_authority() -> None:
    """A part below one unit is no budget."""
    found = Fixture("100/hour", "eventual", Fleet(nodes=30))
    found.warm_up(found.counter, 5)
    assert found.asked() == 5


# ── The other verbs ────────────────────────────────────────────────────────────────────────────


def test_peek_counts_what_this_node_holds_as_remaining() -> None:
    """The other node sees the authority's view only."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 6)
    held = found.counter.held(KEY)
    assert found.counter.peek(KEY, 1).remaining == 994
    assert found.other.peek(KEY, 1).remaining == 994 - held
    found.strict.check(KEY, found.strict.peek(KEY, 0).remaining)
    look = found.counter.peek(KEY, 1)
    assert look.allowed
    assert (look.remaining, look.retry_after_ns) == (held, 0)
    assert not found.other.peek(KEY, 1).allowed
    assert not found.counter.peek(KEY, held + 1).allowed


def test_a_refund_goes_back_into_the_live_lease() -> None:
    """The node can spend the unit again; without the lease the authority takes it back."""
    found = Fixture("1000/hour", "leased")
    found.warm_up(found.counter, 6)
    held = found.counter.held(KEY)
    decision = found.counter.check(KEY, 1)
    found.counter.refund(KEY, 1, decision.charged_ns)
    assert found.counter.held(KEY) == held
    found.clock.advance(1.1)
    found.one.flush()
    found.counter.refund(KEY, 1, decision.charged_ns)
    assert found.strict.peek(KEY, 0).remaining == 1000 - 5


@pytest.mark.parametrize("consistency", ["leased", "eventual"])
def test_a_grant_is_seen_by_this_node_at_once(consistency: Consistency) -> None:
    """A denial that the node knew does not hide it."""
    found = Fixture("10/hour", consistency)
    while found.counter.check(KEY, 1).allowed:
        pass
    found.counter.grant(KEY, 5, None)
    assert found.counter.check(KEY, 1).allowed
    found.other.grant(KEY, 5, None)
    found.clock.advance(1.1)
    assert found.counter.check(KEY, 5).allowed


@pytest.mark.parametrize("algorithm", LEASING)
def test_after_a_reset_the_units_that_nodes_may_still_spend_are_used(
    algorithm: AlgorithmName,
) -> None:
    """The limit is admitted once, and the lease of the other node is a part of it."""
    found = Fixture(Limit(1000, per=3600, algorithm=algorithm), "leased")
    for counter in (found.counter, found.other):
        found.warm_up(counter, 6)
    kept = found.other.held(KEY)
    assert kept
    found.counter.reset(KEY)
    found.one.flush()
    admitted = 0
    while found.strict.check(KEY, 1).allowed:
        admitted += 1
    for _ in range(kept):
        admitted += found.other.check(KEY, 1).allowed
    assert 1000 - 20 <= admitted <= 1000


@pytest.mark.parametrize("consistency", ["leased", "eventual"])
def test_a_reset_is_seen_by_every_node_within_one_lifetime(consistency: Consistency) -> None:
    """By this node at once, by the others when their denial or lease has ended."""
    found = Fixture("10/hour", consistency)
    while found.counter.check(KEY, 1).allowed:
        pass
    assert not found.other.check(KEY, 1).allowed
    found.counter.reset(KEY)
    assert found.counter.check(KEY, 1).allowed
    found.clock.advance(1.1)
    assert found.other.check(KEY, 1).allowed


def test_a_refund_ends_a_denial_that_this_node_knows() -> None:
    """The unit that the authority has again can be spent here."""
    found = Fixture("10/hour", "leased")
    last = found.counter.check(KEY, 1)
    while (decision := found.counter.check(KEY, 1)).allowed:
        last = decision
    found.counter.refund(KEY, 1, last.charged_ns)
    assert found.counter.check(KEY, 1).allowed


@pytest.mark.parametrize("link", [in_thread, on_loop])
def test_an_ask_has_the_same_answer_in_a_thread_and_on_asyncio(link: Link) -> None:
    """Each verb, with a lease and without."""
    found = Fixture("1000/hour", "leased")
    counter = AnsweringCounter(found.counter.counter, link)
    for _ in range(6):
        decision = counter.check(KEY, 1)
        assert decision.allowed
    assert found.counter.held(KEY)
    assert counter.peek(KEY, 1).remaining == 994
    counter.refund(KEY, 1, decision.charged_ns)
    assert counter.peek(KEY, 1).remaining == 995
    counter.grant(KEY, 5, None)
    found.clock.advance(10)
    counter.reset(KEY)
    assert counter.peek(KEY, 1).remaining == 1000


# ── Never over ─────────────────────────────────────────────────────────────────────────────────

LIMITS = st.sampled_from(
    [
        Limit(20, per=10),
        Limit(20, per=1, capacity=40),
        Limit(12, per=6, refill_every=1),
        Limit(20, per=5, algorithm="sliding_window_log"),
        Limit(20, per=5, algorithm="sliding_window_counter"),
        Limit(20, per=5, algorithm="fixed_window"),
    ]
)
NODES = 3
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["check"] * 12 + ["flush"] * 3 + ["refund", "stop", "crash", "slow"]),
        st.integers(0, NODES - 1),
        st.integers(1, 4),
        st.sampled_from([0, 0, 0, 1, 10, 100, 300, 999, 1_000, 1_001, 2_500]),
    ),
    max_size=120,
)


@given(limit=LIMITS, steps=STEPS)
def test_leased_limits_are_never_over(limit: Limit, steps: list[tuple[str, int, int, int]]) -> None:
    """In every interval, whatever nodes do: crash, give back late, refund, answer slowly."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    fleet = Fleet(nodes=2)  # fewer than there are: the bound does not depend on it
    nodes = [NodeOfTest(shared, clock, fleet) for _ in range(NODES)]
    admitted: list[Admission] = []
    refundable: list[tuple[int, int, int, Admission]] = []
    for verb, at, cost, gap_ms in steps:
        clock.advance_ns(gap_ms * 1_000_000)
        counter = nodes[at].store.counter([limit], "r", "leased")
        shared.controlled.way_back_ns = gap_ms * 500_000 if verb == "slow" else 0
        if verb in ("check", "slow"):
            sent_ns = clock.now_ns()
            decision = counter.check(KEY, cost)
            if decision.allowed:
                # Decided at the authority, or here: a slow answer counts as of its decision.
                asked = clock.now_ns() != sent_ns
                admitted.append((sent_ns if asked else clock.now_ns(), cost))
                if decision.charged_ns is not None:
                    refundable.append((at, cost, decision.charged_ns, admitted[-1]))
        elif verb == "flush":
            nodes[at].flush(ending=cost == 4)
        elif verb == "refund" and refundable:
            which, units, charged_ns, admission = refundable.pop(cost % len(refundable))
            nodes[which].store.counter([limit], "r", "leased").refund(KEY, units, charged_ns)
            admitted.remove(admission)
        elif verb == "stop":
            nodes[at].node.give_back(counter.counter.counter, KEY, counter.stop(KEY))  # type: ignore[attr-defined]  # of a node
        elif verb == "crash":
            nodes[at] = NodeOfTest(shared, clock, fleet)
            refundable = [each for each in refundable if each[0] != at]
    assert_never_over(limit, admitted)


@given(
    limit=LIMITS,
    checks=st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, 30)), max_size=150),
)
def test_eventual_limits_are_over_by_what_is_pending_at_most(
    limit: Limit, checks: list[tuple[int, int]]
) -> None:
    """All nodes together admit at most a quarter more than the limit before they report."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    nodes = [NodeOfTest(shared, clock, Fleet(nodes=NODES)) for _ in range(NODES)]
    strict = shared.counter([limit], "r")
    used = 0
    for at, gap_ms in checks:
        clock.advance_ns(gap_ms)  # nanoseconds: nothing is refilled
        used += nodes[at].store.counter([limit], "r", "eventual").check(KEY, 1).allowed
    unreported = sum(
        -node.store.counter([limit], "r", "eventual").held(KEY)  # type: ignore[attr-defined]  # of a node
        for node in nodes
    )
    assert unreported <= limit.capacity // 4
    counted = limit.capacity - strict.peek(KEY, 0).remaining
    assert counted == min(used - unreported, limit.capacity)  # an excess is forgotten
    assert used <= limit.capacity * 5 // 4


# ── Which limits can be leased ─────────────────────────────────────────────────────────────────


def test_limits_that_cannot_be_leased_have_the_counter_of_the_authority() -> None:
    """A leaky bucket and a window of 100 ms are strict, whatever the rule says."""
    clock = ManualClock()
    node = NodeOfTest(SharedStore(clock), clock)
    for limit in (Limit(5, per=1, algorithm="leaky_bucket"), Limit(5, per=0.1)):
        assert not isinstance(node.store.counter([limit], "r", "leased").counter, NodeCounter)
        assert not isinstance(node.store.counter([limit], "r", "eventual").counter, NodeCounter)
