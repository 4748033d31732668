"""FleetStore: strict rules cost nothing more, and mixed requests pass together or cost nothing."""

from __future__ import annotations

import asyncio
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
    StoreError,
    StoreUnavailable,
)
from ratekeeper.core.model import CONSISTENCIES, Consistency
from ratekeeper.core.rates import limits_of
from ratekeeper.decide.stores.memory import MemoryCounter, PythonMemoryStore
from ratekeeper.fleet import node as nodes
from ratekeeper.fleet.counters import NodeCounter
from ratekeeper.fleet.store import FleetStore, JointCalls, deciding, fleet_store_of
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringCounter, AnsweringStore
from tests.failing_store import PartlyFailingShared
from tests.fleet.nodes import NodeOfTest, SharedStore

KEY = "user:42"


def fleet_of_two() -> tuple[ManualClock, SharedStore, NodeOfTest, NodeOfTest]:
    """Return a clock, an authority and two nodes."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    return clock, shared, NodeOfTest(shared, clock), NodeOfTest(shared, clock)


def test_a_strict_rule_has_the_counter_of_the_authority_itself() -> None:
    """Not a wrapper: a strict check crosses no code of the fleet. No table is opened for it."""
    clock = ManualClock()
    store = FleetStore(SharedStore(clock), Fleet(), clock)
    assert type(store.counter(limits_of("5/minute"), "r")) is MemoryCounter
    assert store.node is None
    store.close()


def test_a_request_of_strict_rules_goes_to_the_authority_as_it_is() -> None:
    """`check_together` of the wrapped store decides."""
    _clock, shared, one, _ = fleet_of_two()
    calls: list[Any] = []
    shared.check_together = lambda checks, optional=(): calls.append(checks) or []  # type: ignore[method-assign, func-returns-value, assignment]  # a stub
    counter = one.store.counter(limits_of("5/minute"), "r").counter
    one.store.check_together([(counter, "a", 1), (counter, "b", 1)])
    assert calls == [[(counter, "a", 1), (counter, "b", 1)]]


def test_the_rest_is_that_of_the_wrapped_store() -> None:
    """Its statistics and its capabilities."""
    _clock, shared, one, _ = fleet_of_two()
    store = one.store.store
    store.counter(limits_of("5/minute"), "r").check(KEY, 1)
    assert store.stats() == shared.stats()
    assert store.sweep() == 0
    assert (store.is_private, store.is_local) == (False, False)
    assert (store.monitor, store.channel) == (shared.monitor, shared.channel)
    assert store.fleet is not None
    assert [each.is_self for each in store.fleet.nodes()] == [True]
    assert store.authority is shared.authority
    assert store.fleet.reports() is one.node.counters


def test_a_node_says_its_region() -> None:
    """Other nodes, the admin API and `ratekeeper fleet` show it."""
    clock = ManualClock()
    shared = SharedStore(clock)
    store = FleetStore(shared, Fleet(), clock, region="eu")
    store.counter(limits_of("5/minute"), "r", "leased")  # opens the node
    assert store.fleet is not None
    assert [each.region for each in store.fleet.nodes()] == ["eu"]
    store.close()


def test_a_store_that_no_other_machine_sees_is_not_wrapped() -> None:
    """Its limits are decided here already; a leased one is an error with the reason."""
    clock = ManualClock()
    store = PythonMemoryStore(clock)
    assert fleet_store_of(store, Fleet(), clock, owned=True) is store
    with pytest.raises(ConfigError, match="no other machine shares this one"):
        fleet_store_of(store, Fleet(gossip="127.0.0.1:7946"), clock, owned=True)
    with pytest.raises(ConfigError, match=r"'leased' does not work here: .*redis://localhost"):
        store.counter(limits_of("5/minute"), "r", "leased")
    shared = SharedStore(clock)
    with pytest.raises(ConfigError, match="does not work here"):
        shared.counter(limits_of("5/minute"), "r", "eventual")


def test_the_store_of_another_limiter_keeps_its_fleet() -> None:
    """A second Fleet is an error; the same one is not."""
    clock = ManualClock()
    store = FleetStore(SharedStore(clock), Fleet(nodes=3), clock)
    assert fleet_store_of(store, Fleet(), clock, owned=False) is store
    assert fleet_store_of(store, Fleet(nodes=3), clock, owned=False) is store
    with pytest.raises(ConfigError, match="omit fleet"):
        fleet_store_of(store, Fleet(nodes=4), clock, owned=False)


@pytest.mark.parametrize("owned", [True, False])
def test_closing_gives_leases_back_and_closes_what_it_owns(*, owned: bool) -> None:
    """The authority has the unspent units again."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    store = AnsweringStore(FleetStore(shared, Fleet(), clock, owns_store=owned))
    counter = store.counter(limits_of("1000/hour"), "r", "leased")
    for _ in range(6):
        counter.check(KEY, 1)
    other = shared.counter(limits_of("1000/hour"), "r")
    assert other.peek(KEY, 0).remaining < 994
    remaining: list[int] = []
    closed = shared.close
    shared.close = lambda: (remaining.append(other.peek(KEY, 0).remaining), closed())  # type: ignore[method-assign, assignment, return-value]  # looks first
    asyncio.run(store.aclose()) if owned else store.close()
    if owned:
        assert remaining == [994]
        with pytest.raises(StoreUnavailable):
            other.peek(KEY, 0)
    else:
        assert other.peek(KEY, 0).remaining == 994


# ── Mixed requests ─────────────────────────────────────────────────────────────────────────────

RULES = ("20/hour", "30/hour", "8/hour; 100/day", "50/hour")
VERBS = st.sampled_from(["check"] * 8 + ["flush", "fail", "heal", "alone"])


@given(
    consistency=st.tuples(*[st.sampled_from(CONSISTENCIES)] * 3),
    steps=st.lists(
        st.tuples(VERBS, st.integers(0, 1), st.lists(st.integers(0, 4), min_size=3, max_size=3)),
        max_size=60,
    ),
)
def test_rules_of_different_consistency_pass_together_or_cost_nothing(
    consistency: tuple[Consistency, ...], steps: list[tuple[str, int, list[int]]]
) -> None:
    """After each request, what is used anywhere is what was admitted, rule by rule."""
    clock = ManualClock(1_000)
    shared = SharedStore(clock)
    nodes = [NodeOfTest(shared, clock) for _ in range(2)]
    limits = [limits_of(rule) for rule in RULES[:3]]
    strict = [shared.counter(each, f"r{at}") for at, each in enumerate(limits)]
    used = [0, 0, 0]
    for verb, at, costs in steps:
        counters = [
            nodes[at].store.counter(each, f"r{number}", consistency[number])
            for number, each in enumerate(limits)
        ]
        if verb == "flush":
            clock.advance_ns(300_000)
            nodes[at].flush(ending=True)
        elif verb in ("fail", "heal"):
            shared.controlled.fails = StoreUnavailable("away") if verb == "fail" else None
        elif verb == "alone":
            used[0] += _allowed(counters[0])
        elif verb == "check":
            checks = [(counter, KEY, cost) for counter, cost in zip(counters, costs, strict=True)]
            try:
                answers = nodes[at].store.check_together(checks)
            except StoreError:
                answers = []
            if answers and all(isinstance(each, Decision) and each.allowed for each in answers):
                used = [units + cost for units, cost in zip(used, costs, strict=True)]
        shared.controlled.fails, failing = None, shared.controlled.fails
        for number, counter in enumerate(strict):
            held = sum(_held(node, limits[number], number, consistency) for node in nodes)
            lost = sum(node.node.counters.lost_units for node in nodes)
            on_the_way = sum(each.units for node in nodes for each in node.node.replaced)
            room = counter.peek(KEY, 0).remaining + held
            capacity = counter.limits[0].capacity
            left = most = capacity - used[number]
            if consistency[number] == "eventual":
                # It may be over by what the other node owes. The bucket forgets that when the
                # charge arrives, because it owes nothing beyond its capacity.
                assert left >= -capacity // 4
                most = max(left, 0)
            assert left - lost - on_the_way <= room <= most
        shared.controlled.fails = failing


def _allowed(counter: AnsweringCounter) -> bool:
    try:
        return counter.check(KEY, 1).allowed
    except StoreError:
        return False


def _held(node: NodeOfTest, limits: Any, number: int, consistency: tuple[Consistency, ...]) -> int:
    counter = node.store.counter(limits, f"r{number}", consistency[number])
    return counter.held(KEY) if isinstance(counter.counter, NodeCounter) else 0


def test_a_denial_in_the_middle_puts_the_units_of_the_node_back() -> None:
    """A strict rule denies; the lease has as much as before, and the answer shows it."""
    _clock, _shared, one, _ = fleet_of_two()
    leased = one.store.counter(limits_of("1000/hour"), "leased", "leased")
    eventual = one.store.counter(limits_of("1000/hour"), "eventual", "eventual")
    strict = one.store.counter(limits_of("1/hour"), "strict")
    for counter in (leased, eventual):
        for _ in range(6):
            counter.check(KEY, 1)
    strict.check(KEY, 1)
    assert isinstance(leased.counter, NodeCounter)
    assert isinstance(eventual.counter, NodeCounter)
    before = leased.held(KEY), eventual.held(KEY)
    checks = [(leased, KEY, 1), (strict, KEY, 1), (eventual, KEY, 1)]
    answers = one.store.check_together(checks)
    assert [bool(each) for each in answers] == [True, False, True]
    assert all(isinstance(each, Decision) and each.charged_ns is None for each in answers)
    assert (leased.held(KEY), eventual.held(KEY)) == before
    assert answers[0].remaining == 994  # type: ignore[union-attr]  # a decision


def test_a_denial_that_the_node_knows_charges_no_strict_rule() -> None:
    """The strict rule is only looked at."""
    _clock, _shared, one, _ = fleet_of_two()
    leased = one.store.counter(limits_of("3/hour"), "leased", "leased")
    strict = one.store.counter(limits_of("10/hour"), "strict")
    while leased.check(KEY, 1).allowed:
        pass
    answers = one.store.check_together([(strict, KEY, 1), (leased, KEY, 1)])
    assert [bool(each) for each in answers] == [True, False]
    assert strict.peek(KEY, 0).remaining == 10


@pytest.mark.parametrize("kind", CONSISTENCIES)
def test_requests_that_the_node_denies_ask_the_authority_once_a_second(
    monkeypatch: pytest.MonkeyPatch, kind: Consistency
) -> None:
    """A client over its leased limit must not load the authority more than a strict one."""
    clock, shared, one, _ = fleet_of_two()
    leased = one.store.counter(limits_of("3/hour"), "leased", "leased")
    other = one.store.counter(limits_of("10/hour"), "other", kind)
    while leased.check(KEY, 1).allowed:
        pass
    peeks: list[str] = []
    peek = MemoryCounter.peek

    def counted(counter: MemoryCounter, subject: str, cost: int) -> Decision:
        peeks.append(subject)
        return peek(counter, subject, cost)

    monkeypatch.setattr(MemoryCounter, "peek", counted)
    calls = shared.controlled.leases, len(shared.controlled.reported)
    for _ in range(100):
        clock.advance(0.005)
        answers = one.store.check_together([(other, KEY, 1), (leased, KEY, 1)])
        assert [bool(each) for each in answers] == [True, False]
        assert answers[0].remaining == 10  # type: ignore[union-attr]  # a decision
    assert peeks == [KEY]
    assert (shared.controlled.leases, len(shared.controlled.reported)) == calls
    one.store.check_together([(other, "user:43", 1), (leased, KEY, 1)])
    assert peeks == [KEY, "user:43"]


def test_the_answers_that_are_repeated_grow_older_and_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A denial among them ends when it should, and other subjects fill no memory."""
    monkeypatch.setattr(nodes, "_LOOKS_MAX", 10)
    clock, _, one, _ = fleet_of_two()
    node, counter, limit = one.node, object(), Limit(5, per=60)
    denial = Decision(False, limit, 0, retry_after_ns=300, reset_after_ns=900, decided_ns=50)
    node.keep_look((counter, KEY, 1), denial)
    clock.advance_ns(200)
    look = node.look_of((counter, KEY, 1))
    assert look is not None
    assert (look.retry_after_ns, look.reset_after_ns, look.decided_ns) == (100, 700, 250)
    assert node.look_of((counter, KEY, 2)) is None
    clock.advance_ns(100)
    assert node.look_of((counter, KEY, 1)) is None
    node.keep_look((counter, KEY, 1), Decision(True, limit, 5))
    clock.advance(0.9)
    assert node.look_of((counter, KEY, 1)) is not None
    clock.advance(0.1)
    assert node.look_of((counter, KEY, 1)) is None
    for number in range(100):
        node.keep_look((counter, f"user:{number}", 1), denial)
    assert len(node._looked) <= 10


def test_a_check_takes_no_lock_of_the_store() -> None:
    """The node is opened once."""
    clock = ManualClock(1_000)
    store = FleetStore(SharedStore(clock), Fleet(), clock, owns_store=False)
    node = store.open_node()
    with store._lock:
        assert store.open_node() is node
    store.close()


def test_an_optional_rule_may_fail_and_the_others_are_charged() -> None:
    """Without `optional`, the failure costs nothing."""
    clock = ManualClock(1_000)
    inner = PartlyFailingShared(clock)
    store = AnsweringStore(FleetStore(inner, Fleet(), clock, owns_store=False))
    failing = store.counter(limits_of("10/hour"), "failing")
    leased = store.counter(limits_of("1000/hour"), "leased", "leased")
    for _ in range(6):
        leased.check(KEY, 1)
    inner.failing = frozenset({"failing"})
    before = leased.peek(KEY, 0).remaining
    answers = store.check_together([(failing, KEY, 1), (leased, KEY, 1)])
    assert isinstance(answers[0], StoreUnavailable)
    assert leased.peek(KEY, 0).remaining == before
    answers = store.check_together([(failing, KEY, 1), (leased, KEY, 1)], {0})
    assert isinstance(answers[0], StoreUnavailable)
    assert isinstance(answers[1], Decision)
    assert answers[1].charged_ns is not None
    assert leased.peek(KEY, 0).remaining == before - 1


def test_a_cost_that_never_fits_or_a_cancelled_caller_charges_nothing() -> None:
    """The units that the node had spent are put back before the error goes on."""
    _clock, shared, one, _ = fleet_of_two()
    leased = one.store.counter(limits_of("1000/hour"), "leased", "leased")
    strict = one.store.counter(limits_of("10/hour"), "strict")
    for _ in range(6):
        leased.check(KEY, 1)
    before = leased.peek(KEY, 0).remaining
    with pytest.raises(CapacityError):
        one.store.check_together([(leased, KEY, 1), (strict, KEY, 11)])
    assert leased.peek(KEY, 0).remaining == before
    calls = JointCalls(shared.check_together, one.node.authority)
    checks = [(leased.counter, KEY, 1), (strict.counter, KEY, 1)]
    steps = deciding(calls, checks, (), [leased.check(KEY, 1), None])
    next(steps)
    assert leased.peek(KEY, 0).remaining == before - 1
    with pytest.raises(asyncio.CancelledError):
        steps.throw(asyncio.CancelledError())
    assert leased.peek(KEY, 0).remaining == before


def test_a_mixed_request_asks_for_leases_too() -> None:
    """One call of the authority checks all rules that the node cannot decide, and leases."""
    _clock, shared, one, _ = fleet_of_two()
    leased = one.store.counter(limits_of("1000/hour"), "leased", "leased")
    strict = one.store.counter(limits_of("1000/hour"), "strict")
    for _ in range(8):
        answers = one.store.check_together([(leased, KEY, 1), (strict, KEY, 1)])
        assert all(answers)
    assert isinstance(leased.counter, NodeCounter)
    assert shared.controlled.leases >= 2
    assert leased.held(KEY) > 0
    assert strict.peek(KEY, 0).remaining == 992
    assert leased.peek(KEY, 0).remaining == 992


def test_the_lease_of_a_request_that_failed_is_put_back_at_the_authority() -> None:
    """If the lease has ended meanwhile, the authority takes the units back."""
    clock, shared, one, _ = fleet_of_two()
    leased = one.store.counter(limits_of("1000/hour"), "leased", "leased")
    strict = one.store.counter(limits_of("1/hour"), "strict")
    for _ in range(6):
        leased.check(KEY, 1)
    strict.check(KEY, 1)
    calls = JointCalls(shared.check_together, one.node.authority)
    checks = [(leased.counter, KEY, 1), (strict.counter, KEY, 1)]
    steps = deciding(calls, checks, (), [leased.check(KEY, 1), None])
    call: Any = next(steps)
    answer = call.function(*call.args)
    clock.advance(1.5)
    one.flush()
    undo: Any = steps.send(answer)
    undone = undo.function(*undo.args)
    with pytest.raises(StopIteration) as done:
        steps.send(undone)
    assert [bool(each) for each in done.value.value] == [True, False]
    assert shared.counter(limits_of("1000/hour"), "leased").peek(KEY, 0).remaining == 994
