"""Limits of requests in flight: the verbs of a limiter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Decision,
    Limiter,
    LimitExceeded,
    Request,
    SlotLost,
    StoreTimeout,
)
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.stores.memory import MemoryCounter, PythonMemoryStore
from ratekeeper.httpx import LimitTransport
from ratekeeper.testing import ManualClock

RULES = """
version: 1
rules:
  - id: user
    by: [user]
    limits: ["5/minute", "2 at once for 60s"]
  - id: all
    by: []
    limits: ["3 at once for 60s"]
"""
ALICE, BOB = Request(user="alice"), Request(user="bob")


@pytest.fixture
def rules(tmp_path: Path) -> Limiter:
    """A limiter with two rules that count requests in flight."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES, encoding="utf-8")
    return Limiter.from_rules(path, clock=ManualClock())


def test_several_rules_take_their_slots_together(rules: Limiter) -> None:
    """A request that one rule denies has no slot of the other, and costs nothing."""
    first, second = rules.check(ALICE), rules.check(ALICE)
    assert first
    assert second
    assert rules.check(ALICE).rule == "user"
    third = rules.check(BOB)
    assert third
    denied = rules.check(BOB)
    assert (denied.allowed, denied.rule) == (False, "all")
    rules.release(first)
    assert rules.check(BOB)  # its own slot, and that of the first request
    rules.release(second)
    assert rules.peek(ALICE).remaining == 1


def test_a_release_keeps_the_units_and_a_refund_returns_them(rules: Limiter) -> None:
    """A release ends a request; a refund undoes it. Both free its slots."""
    for _ in range(2):
        rules.release(rules.check(ALICE))
    decision = rules.check(ALICE)
    rules.refund(ALICE, 1, decision)
    decision = rules.check(ALICE)
    rules.settle(ALICE, 1, 0, decision)  # returns the unit, and keeps the slot
    assert rules.peek(ALICE).remaining == 1
    rules.release(decision)
    assert rules.peek(ALICE).remaining == 2
    for units_left in (2, 1, 0):
        rules.release(rules.check(ALICE))
        assert rules.peek(ALICE).remaining == units_left


def test_a_decision_without_slots_can_be_released(rules: Limiter) -> None:
    """It frees nothing: a denial, a peek, and one of a limiter without such limits."""
    taken = [rules.check(ALICE), rules.check(ALICE)]
    for decision in (rules.check(ALICE), rules.peek(BOB), Limiter("5/minute").check("x")):
        rules.release(decision)
    assert rules.peek(BOB).remaining == 1
    assert all(taken)


class LosingCounter(MemoryCounter):
    """A counter whose answers are lost after the check was made."""

    __slots__ = ()

    def check(self, subject: str, cost: int) -> Decision:
        super().check(subject, cost)
        raise StoreTimeout("the reply was lost")


class LosingStore(PythonMemoryStore):
    """A store with such counters."""

    is_losing = True

    def counter(self, limits: Any, rule: str, *others: Any) -> MemoryCounter:
        found = super().counter(limits, rule, *others)
        if self.is_losing:
            found.__class__ = LosingCounter
        return found


def test_a_lost_reply_blocks_nothing() -> None:
    """The client frees the slot by its stamp; it does not know whether it had one."""
    store = LosingStore(SystemClock())
    limiter = Limiter("1 at once for 60s", store=store, on_failure="raise")
    with pytest.raises(StoreTimeout):
        limiter.check("user:1")
    store.is_losing = False
    assert Limiter("1 at once for 60s", store=store).check("user:1")


def test_a_long_request_renews_its_slot() -> None:
    """A renewal that comes too late is raised and counted, if others have the slots."""
    clock = ManualClock()
    limiter = Limiter("2 at once for 60s", clock=clock)
    decision = limiter.check("user:1")
    for _ in range(5):
        clock.advance(50)
        limiter.renew(decision)
    clock.advance(60)
    limiter.renew(decision)  # late, but there is room
    clock.advance(60)
    others = [limiter.check("user:1"), limiter.check("user:1")]
    with pytest.raises(SlotLost, match="longer than 60 s"):
        limiter.renew(decision)
    limiter.release(decision)
    assert limiter.peek("user:1").remaining == 0
    assert limiter.counts()["default"].renewals_failed == 1
    assert limiter.tally().slots.by_rule() == {"": 2}
    assert all(others)


def test_the_block_and_the_decorator_free_the_slot() -> None:
    """At the end, and on an error."""
    limiter = Limiter("1 at once for 60s")

    @limiter.limit(key="f")
    def call(error: bool) -> None:
        assert limiter.peek("f").remaining == 0
        if error:
            raise ZeroDivisionError

    for error in (False, True, False):
        try:
            call(error)
            with limiter.reserve("f"), pytest.raises(LimitExceeded):
                call(error)
        except ZeroDivisionError:
            assert error
    assert limiter.peek("f").remaining == 1


async def test_a_cancelled_task_frees_its_slot() -> None:
    """Also if it is cancelled in the block or the decorated function."""
    limiter = AsyncLimiter("2 at once for 60s")
    started = asyncio.Event()

    @limiter.limit(key="f")
    async def call() -> None:
        async with limiter.reserve("f"):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await started.wait()
    assert (await limiter.peek("f")).remaining == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await limiter.peek("f")).remaining == 2


@pytest.mark.parametrize(
    "options", [{"consistency": "leased"}, {"consistency": "eventual"}, {"scope": "global"}]
)
def test_nodes_and_regions_do_not_share_slots(options: dict[str, Any]) -> None:
    """The message says what to write instead."""
    with pytest.raises(ConfigError, match="consistency: strict"):
        Limiter("20 at once for 60s", store="redis://127.0.0.1:1", **options)


def test_a_split_rule_has_a_share_of_the_slots_in_each_part(tmp_path: Path) -> None:
    """All parts together have the slots of the limit."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES.replace("by: []", "by: []\n    split: 3"), encoding="utf-8")
    limiter = Limiter.from_rules(path, clock=ManualClock())
    taken: Sequence[Decision] = [limiter.check(Request(user=f"{n}")) for n in range(60)]
    assert sum(map(bool, taken)) == 3
    for each in taken:
        limiter.release(each)
    assert sum(bool(limiter.check(Request(user=f"x{n}"))) for n in range(60)) == 3


async def test_waiting_for_a_slot() -> None:
    """A waiting request passes when another one has ended."""
    limiter = AsyncLimiter("1 at once for 60s")
    decision = await limiter.check("f")
    waiting = asyncio.create_task(limiter.wait("f", timeout=60))
    await asyncio.sleep(0)
    assert not waiting.done()
    await limiter.release(decision)
    assert await waiting


def test_a_top_up_takes_no_other_slot() -> None:
    """The reservation keeps its slot, however often it is topped up."""
    limiter = Limiter("1000/minute; 1 at once for 60s")
    with limiter.reserve("f", 10) as reservation:
        for _ in range(20):
            assert reservation.use(10)
        assert not limiter.check("f")
    assert limiter.check("f")


async def test_batch_requests_leave_the_last_fifth_of_the_slots() -> None:
    """And a cost above the number of slots is no reason to deny a request."""
    limiter = AsyncLimiter("10 at once for 60s")
    for _ in range(8):
        assert await limiter.wait("f", 50, priority="batch", timeout=0)
    assert not await limiter.wait("f", 50, priority="batch", timeout=0)
    assert await limiter.wait("f", 50, timeout=0)


def test_a_transport_limits_no_requests_in_flight() -> None:
    """It does not know when a response has been read."""
    with pytest.raises(ConfigError, match=r"limiter\.reserve"):
        LimitTransport(Limiter("2 at once for 60s"))
