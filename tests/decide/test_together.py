"""Several subjects of one request: all pass, or none is charged, on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.redis_servers import running
from tollkeeper import CapacityError, Limit, StoreTimeout, StoreUnavailable
from tollkeeper.core.model import ALGORITHM_NAMES
from tollkeeper.decide.store import Gate, Store
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.calls import NotSent
from tollkeeper.decide.stores.redis.denied import Denied
from tollkeeper.decide.stores.redis.gates import Commands, Together
from tollkeeper.testing import ManualClock

_prefixes = count()
KINDS = (
    "memory",
    pytest.param("single", marks=pytest.mark.server),
    pytest.param("cluster", marks=pytest.mark.server),
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Store]:
    """An empty store of each kind."""
    if request.param == "memory":
        opened = open_store("memory://", clock)
    else:
        servers = running(request.param)
        prefix = f"together{next(_prefixes)}"
        opened = open_store(servers.uri, clock, prefix=prefix, deadline_ms=10_000)
    yield opened
    opened.close()


def gates_of(store: Store) -> tuple[Gate, Gate]:
    """Ten a minute for a user, and fifteen for the tenant: two rules, two subjects."""
    return store.gate([Limit(10, per=60)], "user"), store.gate([Limit(15, per=60)], "tenant")


def test_all_pass_and_each_is_charged(store: Store) -> None:
    """One decision for each, in order, as its own gate would give it."""
    user, tenant = gates_of(store)
    decisions = store.check_together([(user, "u:1", 2), (tenant, "t:1", 3)])
    assert [(d.allowed, d.remaining, d.rule) for d in decisions] == [
        (True, 8, "user"),
        (True, 12, "tenant"),
    ]
    assert user.peek("u:1", 0).remaining == 8
    assert tenant.peek("t:1", 0).remaining == 12


@pytest.mark.parametrize("denied", [0, 1])
def test_where_one_denies_the_other_is_not_charged(store: Store, denied: int) -> None:
    """Whichever of the two denies, the other keeps its quota; the denial says when to return."""
    gates = gates_of(store)
    subjects = ("u:1", "t:1")
    gates[denied].check(subjects[denied], gates[denied].limits[0].capacity)
    decisions = store.check_together(
        [(gate, subject, 1) for gate, subject in zip(gates, subjects, strict=True)]
    )
    assert not decisions[denied].allowed
    assert decisions[denied].retry_after_ns > 0
    other = 1 - denied
    whole = gates[other].limits[0].capacity
    assert gates[other].peek(subjects[other], 0).remaining == whole


def test_one_subject_under_two_rules(store: Store) -> None:
    """The same subject twice, in two rules: both are charged, or neither."""
    user, tenant = gates_of(store)
    assert all(store.check_together([(user, "x", 10), (tenant, "x", 10)]))
    denied = store.check_together([(user, "x", 1), (tenant, "x", 1)])
    assert not denied[0].allowed
    assert tenant.peek("x", 0).remaining == 5


def test_a_cost_that_can_never_fit_charges_nobody(store: Store) -> None:
    """CapacityError, as from a single check, and the others have their units."""
    user, tenant = gates_of(store)
    with pytest.raises(CapacityError):
        store.check_together([(tenant, "t:1", 1), (user, "u:1", 11)])
    assert tenant.peek("t:1", 0).remaining == 15


def test_a_closed_store_is_unavailable(store: Store) -> None:
    """As for a single check."""
    user, tenant = gates_of(store)
    store.close()
    with pytest.raises(StoreUnavailable):
        store.check_together([(user, "u:1", 1), (tenant, "t:1", 1)])


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_awaited_it_is_the_same(kind: str, clock: ManualClock) -> None:
    """On the asyncio wire: passes together, and is given back together."""
    prefix = f"together{next(_prefixes)}"
    store: Any = open_store(running(kind).uri, clock, prefix=prefix, deadline_ms=10_000)
    user = store.async_gate([Limit(10, per=60)], "user")
    tenant = store.async_gate([Limit(15, per=60)], "tenant")
    asked = [(user, "u:1", 10), (tenant, "t:1", 10)]
    assert all(await store.check_together_async(asked))
    denied = await store.check_together_async(asked)
    assert [d.allowed for d in denied] == [False, False]
    assert (await tenant.peek("t:1", 0)).remaining == 5
    denied = await store.check_together_async([(user, "u:2", 10), (tenant, "t:1", 6)])
    assert [d.allowed for d in denied] == [True, False]
    assert (await user.peek("u:2", 0)).remaining == 10
    await store.aclose()


@pytest.mark.parametrize("seed", range(30))
def test_a_denied_request_costs_nothing_whatever_was_spent_before(
    seed: int, store: Store, clock: ManualClock
) -> None:
    """Random limits, spending and grants; then a request that one subject denies. At that instant
    every quota is as it was, granted units included."""
    random = Random(seed)
    limits = [
        Limit(random.randint(5, 30), per=60, algorithm=random.choice(ALGORITHM_NAMES))
        for _ in range(3)
    ]
    gates = [store.gate([limit], rule) for rule, limit in zip("abc", limits, strict=True)]
    for gate in gates:
        for _ in range(random.randint(0, 3)):
            if random.random() < 0.5:
                gate.check("s", random.randint(1, 5))
            else:
                gate.grant("s", random.randint(1, 5), random.choice((None, 10**9)))
        clock.advance_ns(random.choice((0, 10**9 // 2, 7 * 10**9)))
    full = random.randrange(3)
    while gates[full].check("s", 1):
        pass
    looked = [look(gate, cost) for gate in gates for cost in (0, 1, 3, 8)]
    cost = random.randint(1, 5)
    assert not all(store.check_together([(gate, "s", cost) for gate in gates]))
    for before, gate_and_cost in zip(looked, product(gates, (0, 1, 3, 8)), strict=True):
        after = look(*gate_and_cost)
        assert after[:2] == before[:2]
        # A bucket that was charged and refunded has its refill rounded once more: by less than a
        # millionth of a unit, which takes 12 µs to come in at the least of these rates.
        assert 0 <= after[2] - before[2] <= 13_000


def look(gate: Gate, cost: int) -> tuple[bool, int, int]:
    """Allowed, remaining, and the wait, of what the gate would answer."""
    try:
        decision = gate.peek("s", cost)
    except CapacityError:
        return False, -1, 0
    return decision.allowed, decision.remaining, decision.reset_after_ns


def test_what_may_have_been_counted_is_told() -> None:
    """Of several things that went wrong, whichever was first; and where undoing the rest failed."""
    commands = Commands((Limit(5, per=60),), "rule", "tk", lambda: None)
    gate: Any = SimpleNamespace(commands=commands)
    together = Together([(gate, "a", 1), (gate, "b", 1)], Denied(0))
    unsent = NotSent("no connection")
    maybe = StoreTimeout("no answer in 50 ms; the call may have been counted once")
    for answers, wrong in (
        ([unsent, maybe], maybe),
        ([maybe, unsent], maybe),
        ([unsent, NotSent("neither")], unsent),
    ):
        assert together.decisions(answers)[1] is wrong
    assert together.told(unsent, [1, 1]) is unsent
    assert together.told(maybe, [1, unsent]) is maybe
    assert together.told(None, [unsent]) is None
    both = "no connection; another part of the request may have been counted once"
    assert str(together.told(unsent, [1, unsent])) == both
