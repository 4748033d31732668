"""Batches: which groups share a call, and what a cancelled caller costs. Without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hiredis import ReplyError

from ratekeeper import CapacityError, Decision, Limit, StoreTimeout
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.decide.decider import lost
from ratekeeper.decide.stores.redis import batches
from ratekeeper.decide.stores.redis.batches import EQUAL_MAX
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.connections import NotSent
from ratekeeper.decide.stores.redis.scripts import (
    CHARGES_MAX,
    SERVER_TIME,
    ScriptCall,
    ScriptCharge,
    batch_call,
)
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.answering import awaited

# A full bucket at a time in microseconds: allowed. And an empty one: denied.
ALLOWED = [10, -1, 0]
DENIED = [~10, 10, 9_000_000]


class Wire:
    """The connection of one loop. A test answers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, Any]] = []
        self.settled: list[ScriptCall] = []
        self.undone: list[tuple[bytes, bytes]] = []

    def submit(self, payload: bytes, _discarded: int = 0, reply: Any = None) -> Any:
        self.calls.append((payload, reply))
        return reply

    def answer(self, *replies: Any) -> None:
        """Give the oldest calls their replies."""
        for reply in replies:
            _, call = self.calls.pop(0)
            if not call.done():
                if isinstance(reply, BaseException) and not isinstance(reply, ReplyError):
                    call.set_exception(reply)
                else:
                    call.set_result(reply)


async def turn() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


class Store:
    """A store whose event loop has this wire, and a counter of each limit."""

    def __init__(self, uri: str = "redis://localhost", *finals: Any) -> None:
        self.store = RedisStore(parse(uri))
        self.wire = wire = Wire()
        self.driver: Any = self.store._links.of_loop()
        self.driver.connection_of = lambda _: wire
        left = list(finals)

        async def settle(call: ScriptCall, _due_ns: int, refusal: Any) -> Any:
            wire.settled.append(call)
            found = left.pop(0) if left else refusal
            if isinstance(found, BaseException):
                raise found
            return found

        async def send_all(commands: Sequence[tuple[bytes, bytes]], _due_ns: int) -> list[Any]:
            wire.undone += commands
            return [left.pop(0) if left else [1] for _ in commands]

        self.driver.settle = settle
        self.driver._send_all = send_all
        self.counter = self.store.counter([Limit(5, per=60)], "rule")

    def check(self, subject: str, cost: int = 1) -> asyncio.Future[Any]:
        return asyncio.ensure_future(awaited(self.counter.check(subject, cost)))

    def together(self, *subjects: str) -> asyncio.Future[Any]:
        charges = [(self.counter, subject, 1) for subject in subjects]
        return asyncio.ensure_future(awaited(self.store.check_together(charges)))

    async def busy(self) -> asyncio.Future[Any]:
        """Make a check whose call is in flight."""
        first = self.check("first")
        await turn()
        return first


async def test_a_single_caller_does_not_wait_for_a_turn() -> None:
    """The call has left when the caller first waits."""
    store = Store()
    ask = store.counter.check("a", 1)
    answer = ask.send(*ask.args)  # type: ignore[union-attr]  # no denial is known
    assert len(store.wire.calls) == 1
    store.wire.answer(ALLOWED)
    assert (await answer).allowed
    assert store.driver.batches.coalesced == 0


async def test_the_groups_of_a_turn_share_calls() -> None:
    """A call has up to CHARGES_MAX charges, of single checks and of whole requests."""
    store = Store()
    first = await store.busy()
    checks = [store.check(f"user {number}") for number in range(CHARGES_MAX - 1)]
    request = store.together("a", "b")
    await turn()
    assert len(store.wire.calls) == 3
    store.wire.answer(ALLOWED, [ALLOWED] * (CHARGES_MAX - 1), [ALLOWED, DENIED])
    assert all(await asyncio.gather(first, *checks))
    assert [each.allowed for each in await request] == [True, False]
    assert store.driver.batches.coalesced == CHARGES_MAX - 1


async def test_without_coalescing_each_group_is_a_call() -> None:
    """`coalesce=off`."""
    store = Store("redis://localhost?coalesce=off")
    checks = [store.check(f"user {number}") for number in range(3)]
    await turn()
    assert len(store.wire.calls) == 3
    store.wire.answer(ALLOWED, ALLOWED, ALLOWED)
    assert all(await asyncio.gather(*checks))


async def test_in_a_cluster_only_equal_checks_wait_for_each_other() -> None:
    """The first of a turn leaves at once, as all others do; the rest are one charge."""
    store = Store("redis+cluster://localhost")
    first = await store.busy()
    checks = [store.check(subject) for subject in ("a", "b", "hot", "hot", "hot")]
    await asyncio.sleep(0)
    assert len(store.wire.calls) == 4
    await turn()
    assert len(store.wire.calls) == 5
    store.wire.answer(*[ALLOWED] * 4, [*ALLOWED, 2])
    assert all(await asyncio.gather(first, *checks))
    assert store.driver.batches.coalesced == 2


async def test_equal_checks_are_one_charge() -> None:
    """The script admits as many as have room; each caller gets its own decision."""
    store = Store()
    first = await store.busy()
    checks = [store.check("hot") for _ in range(7)]
    other = store.check("hot", 2)
    await turn()
    store.wire.answer(ALLOWED, [[*ALLOWED, 5], ALLOWED])
    decisions = await asyncio.gather(*checks)
    assert [each.remaining for each in decisions] == [4, 3, 2, 1, 0, 0, 0]
    assert [each.allowed for each in decisions] == [True] * 5 + [False] * 2
    assert (await first).allowed
    assert (await other).remaining == 3


async def test_a_charge_stands_for_a_bounded_number_of_checks() -> None:
    """A script must not be occupied with one key for long."""
    store = Store()
    store.counter = store.store.counter([Limit(1_000, per=60)], "rule")
    first = await store.busy()
    checks = [store.check("hot") for _ in range(EQUAL_MAX + 1)]
    await turn()
    store.wire.answer(ALLOWED, [[*ALLOWED, EQUAL_MAX], ALLOWED])
    assert all(await asyncio.gather(first, *checks))


async def test_a_caller_that_is_cancelled_before_its_group_leaves_costs_nothing() -> None:
    """Its charge is not in the call, however many charges it has."""
    store = Store()
    first = await store.busy()
    checks = [store.check("a"), store.together("b", "c"), store.check("d")]
    await asyncio.sleep(0)  # they are waiting, and leave at the end of this turn
    for check in checks[:2]:
        check.cancel()
    await turn()
    assert [payload for payload, _ in store.wire.calls][1:] == [
        store.counter.scripts.check_command("d", 1)[1]
    ]
    store.wire.answer(ALLOWED, ALLOWED)
    assert (await checks[2]).allowed
    assert (await first).allowed


async def test_a_request_whose_task_never_runs_is_not_sent() -> None:
    """It is cancelled before its first step, so it could not undo its charges."""
    store = Store()
    charges = [(store.counter, subject, 1) for subject in "ab"]
    ask: Any = store.store.check_together(charges)
    request = asyncio.ensure_future(ask.send(*ask.args))
    request.cancel()
    await turn()
    assert store.wire.calls == []


@pytest.mark.parametrize("when", ["in flight", "answered"])
@pytest.mark.parametrize("reply", [ALLOWED, DENIED])
async def test_a_cancelled_request_of_several_charges_gets_them_back(
    when: str, reply: list[int]
) -> None:
    """Also if the reply is here, but the caller has not run since. A denial charged nothing."""
    store = Store()
    request = store.together("a", "b")
    await turn()
    if when == "in flight":
        request.cancel()
        await turn()
        store.wire.answer([reply, ALLOWED])
    else:
        store.wire.answer([reply, ALLOWED])
        request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await turn()
    assert len(store.wire.undone) == (2 if reply is ALLOWED else 0)


async def test_an_undo_that_fails_is_counted() -> None:
    """The units of the cancelled request may stay charged."""
    before = lost.returns
    store = Store("redis://localhost", StoreTimeout("no answer"))
    request = store.together("a", "b")
    await turn()
    request.cancel()
    await turn()
    store.wire.answer([ALLOWED, ALLOWED])
    await turn()
    assert lost.returns == before + 1


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (StoreTimeout("no answer in 50 ms"), 2),
        (StoreUnavailable("the connection broke; the call may have been counted once"), 2),
        (NotSent("cannot connect"), 0),
    ],
)
async def test_a_cancelled_request_whose_reply_is_lost_is_counted(
    error: StoreError, unknown: int
) -> None:
    """Its charges may have been made, and are not returned: the request has no caller to ask."""
    before = lost.unknown
    store = Store()
    requests = [store.together("a", "b"), store.together("c", "d")]
    await turn()
    requests[0].cancel()
    await turn()
    store.wire.answer(error, error)
    assert [type(each) for each in await requests[1]] == [type(error)] * 2
    await turn()
    assert lost.unknown == before + unknown
    assert store.wire.undone == []


async def test_a_single_check_that_is_cancelled_in_flight_stays_charged() -> None:
    """The others of its call are answered."""
    store = Store()
    first = await store.busy()
    checks = [store.check("a"), store.check("b")]
    await turn()
    checks[0].cancel()
    await turn()
    store.wire.answer(ALLOWED, [ALLOWED, ALLOWED])
    assert (await checks[1]).allowed
    assert (await first).allowed
    assert store.wire.undone == []


async def test_a_call_leaves_without_callers_that_are_cancelled_before_it_is_connected() -> None:
    """The others are answered. A call without callers is not sent."""
    store = Store()
    first = await store.busy()
    checks = [store.check(subject) for subject in ("a", "b", "c", "c")]
    request = store.together("d", "e")
    await turn()
    for caller in (first, checks[1], checks[2], request):
        caller.cancel()
    await turn()
    calls = [call for _, call in store.wire.calls]
    charges = [[ScriptCharge(store.counter.scripts, subject, 1)] for subject in "ac"]
    sent = batch_call(charges, SERVER_TIME, spend=True).by_sha()
    assert [call.leave() for call in calls] == [b"", sent]
    assert [call.done() for call in calls] == [True, False]
    store.wire.answer(ALLOWED, [ALLOWED, DENIED])
    assert [(await checks[at]).allowed for at in (0, 3)] == [True, False]
    assert store.driver.batches.in_flight == 0
    assert store.wire.undone == []


@pytest.mark.parametrize("refusal", [ReplyError("NOSCRIPT No matching script."), NotSent("gone")])
async def test_a_refused_call_is_sent_again_as_a_whole(refusal: Exception) -> None:
    """Once, by the driver; its groups get the final reply."""
    store = Store("redis://localhost", [ALLOWED, DENIED])
    first = await store.busy()
    checks = [store.check("a"), store.check("b")]
    await turn()
    store.wire.answer(ALLOWED, refusal)
    assert (await first).allowed
    assert [each.allowed for each in await asyncio.gather(*checks)] == [True, False]
    assert len(store.wire.settled) == 1


async def test_each_caller_gets_an_error_of_its_own() -> None:
    """A check raises it; a request of several charges has it as the answer to each of them."""
    store = Store()
    first = await store.busy()
    checks = [store.check("a"), store.check("a"), store.check("b")]
    request = store.together("a", "b")
    await turn()
    store.wire.answer(ALLOWED, StoreTimeout("no answer; the call may have been counted once"))
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(each) for each in found] == [StoreTimeout] * 3
    assert len({id(each) for each in found}) == 3
    assert [type(each) for each in await request] == [StoreTimeout] * 2
    assert (await first).allowed
    assert store.driver.batches.in_flight == 0


async def test_a_charge_that_fails_fails_alone() -> None:
    """Its key holds something else; the other groups of the call are decided."""
    store = Store()
    first = await store.busy()
    checks = [store.check("a"), store.check("b"), store.check("c", 6)]
    request = store.together("d", "e")
    await turn()
    broken = ReplyError("WRONGTYPE Operation against a key")
    store.wire.answer(ALLOWED, [broken, ALLOWED, DENIED, broken, ALLOWED])
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(each) for each in found] == [StoreUnavailable, Decision, CapacityError]
    failed, decided = await request
    assert isinstance(failed, StoreError)
    assert decided.remaining == 5  # nothing was charged
    assert (await first).allowed


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that finds too many others in flight was not sent."""
    monkeypatch.setattr(batches, "PENDING_MAX", 2)
    store = Store()
    first = await store.busy()
    checks = [store.check("a"), store.check("b")]
    await asyncio.sleep(0)
    found = (await asyncio.wait({checks[1]}))[0].pop().exception()
    assert isinstance(found, NotSent)
    await turn()
    store.wire.answer(ALLOWED, ALLOWED)
    assert all(await asyncio.gather(first, checks[0]))


async def test_a_reply_of_another_program_fails_every_check() -> None:
    """It has as many elements as no script would return."""
    store = Store()
    first = await store.busy()
    checks = [store.check("a"), store.check("b")]
    await turn()
    store.wire.answer(ALLOWED, [ALLOWED])
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(each) for each in found] == [StoreUnavailable] * 2
    assert (await first).allowed


@pytest.mark.parametrize("error", [NotSent("no primary is known"), ZeroDivisionError()])
async def test_a_call_that_cannot_be_sent_leaves_nothing_in_flight(error: Exception) -> None:
    """Every caller gets the error, also a defect of our own; the next check leaves at once."""
    store = Store("redis://localhost", error)
    first = await store.busy()

    def connection_of(_: bytes) -> Any:
        raise error

    store.driver.connection_of = connection_of
    checks = [store.check("a"), store.check("b")]
    await turn()
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(each) for each in found] == [type(error)] * 2
    store.wire.answer(ALLOWED)
    assert (await first).allowed
    assert store.driver.batches.in_flight == 0
