"""Limits that regions share: the reference."""

from __future__ import annotations

from collections.abc import Coroutine
from fractions import Fraction
from typing import TypeVar

from tollkeeper.core.clock import ManualClock
from tollkeeper.core.model import Limit
from tollkeeper.decide.regional import Accepted, AcrossRegions, MemoryRegional, Shares

T = TypeVar("T")


def done(call: Coroutine[None, None, T]) -> T:
    """Return the result of a call that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as stopped:
        return stopped.value  # type: ignore[no-any-return]
    raise AssertionError("the call waits")


def region(clock: ManualClock, others: tuple[str, ...]) -> MemoryRegional:
    """Return the store of a region with an equal share."""
    store = MemoryRegional(clock)
    share = Fraction(1, 1 + len(others))
    _, token = done(store.lead("leader", 10**18))
    assert done(store.set_shares(Shares(1, share, share, 0, others), token))
    return store


def admitted(store: MemoryRegional, across: AcrossRegions, asked: int) -> int:
    """Return how many of so many requests pass."""
    gate = store.global_gate((Limit(100, per=60),), "api", across)
    return sum(gate.check("ann", 1).allowed for _ in range(asked))


def test_an_accepted_total_gives_room_again() -> None:
    """A region has its share at once, and its share of what is left with each acknowledgement."""
    clock = ManualClock(1_800_000_000)
    here, there = region(clock, ("there",)), region(clock, ("here",))
    assert admitted(here, "exact", 100) == 50
    (report,) = done(here.due(10, 1))
    (learnt,) = done(there.learn("here", 1, [report]))
    assert learnt.accepted
    done(here.accept(1, [Accepted(report.key, report.generation, report.total, 0)], 1))
    assert admitted(here, "exact", 100) == 25
    assert admitted(there, "exact", 100) == 25
