"""Batches: on asyncio, requests of one turn of the event loop share script calls.

A group of charges leaves at once if no other group is in flight: a single caller never waits. If
one is, the group leaves at the end of this turn, together with all groups of the turn: a call has
up to CHARGES_MAX charges. Equal checks (of one rule, subject and cost) are one charge, and the
script admits as many of them as have room. So a busy process costs Redis a few calls for each round
trip, and a hot key costs one.

The deadline begins when a call leaves, as for any call. A caller that is cancelled before that
costs nothing. A request of several charges that is cancelled later gets them back. A single check
stays charged.

In a cluster, only equal checks share a call: a script can only use keys of one slot, and while a
slot moves, its keys are on two servers. So a group waits for the end of the turn only if one with
its subject has left in this turn. A connection sends all calls of a turn in one write, anyway.

Threads have no batches. A thread that waits for another is woken by a lock, which takes as long as
the call that it would save.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Hashable, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.steps import run_async
from ratekeeper.decide.decider import lost, may_be_charged
from ratekeeper.decide.stores.redis.connections import PENDING_MAX, NotSent
from ratekeeper.decide.stores.redis.scripts import (
    CHARGES_MAX,
    ScriptCall,
    charge_replies,
)

if TYPE_CHECKING:
    from ratekeeper.decide.stores.redis.counters import CheckGroup
    from ratekeeper.decide.stores.redis.driver import AsyncioDriver

# Equal checks that one charge stands for, at most.
EQUAL_MAX: Final = 256
_LOOP_ENDED: Final = (
    "the event loop ended before the answer came; the call may have been counted once"
)


class Batcher:
    """The groups that wait or are in flight on one event loop."""

    __slots__ = (
        *("_clustered", "_coalesces", "_driver", "_left", "_tasks", "_waiting"),
        *("coalesced", "in_flight"),
    )

    def __init__(self, driver: AsyncioDriver) -> None:
        self._driver = driver
        self._coalesces = driver.servers.config.coalesce
        self._clustered = driver.servers.clustered
        self._waiting: list[CheckGroup] = []
        # In a cluster: the first subjects of the groups that have left in this turn.
        self._left: set[str] = set()
        self.in_flight = 0
        # asyncio itself keeps no reference to a task.
        self._tasks: set[asyncio.Task[Any]] = set()
        # Number of checks that shared a call with others.
        self.coalesced = 0

    async def decide(self, group: CheckGroup) -> Any:
        """Await the answer. If the caller is cancelled and the answer is there, undo the charges.

        If it is not there, they are undone when it comes.
        """
        try:
            return await self.submit(group)
        except asyncio.CancelledError:
            self.undo(group)
            raise

    def submit(self, group: CheckGroup) -> asyncio.Future[Any]:
        """Send a group now or at the end of this turn; return the future of its answer.

        A caller that is cancelled gets no charges back. The decider undoes what it has charged.
        """
        # Asking for the running loop costs a system call (getpid).
        loop = self._driver.loop or asyncio.get_running_loop()
        group.future = future = loop.create_future()
        waiting = self._waiting
        if len(waiting) + self.in_flight >= PENDING_MAX:
            why = f"{PENDING_MAX:,} checks are in flight already; the server is too slow"
            self.fail([group], NotSent(why))
        elif not self._coalesces or not (waiting or self.in_flight):
            self._send([[group]], len(group.charges))
        else:
            left = self._left
            if not (waiting or left):
                loop.call_soon(self._flush)
            subject = group.charges[0].subject
            if not self._clustered or subject in left:
                waiting.append(group)
            else:
                left.add(subject)
                self._send([[group]], len(group.charges))
        return future

    def _flush(self) -> None:
        """Send the groups of this turn, without those whose callers are cancelled by now."""
        waiting, self._waiting = self._waiting, []
        self._left.clear()
        lanes: dict[Hashable, dict[Hashable, list[CheckGroup]]] = {}
        for group in waiting:
            if group.future.done():
                continue
            lane = lanes.setdefault(group.lane(clustered=self._clustered), {})
            same = group.equal()
            equal = lane.setdefault(same, [])
            equal.append(group)
            if len(equal) == EQUAL_MAX:
                lane[group] = lane.pop(same)
        for lane in lanes.values():
            batch: list[list[CheckGroup]] = []
            charges = 0
            for equal in lane.values():
                size = len(equal[0].charges)
                if batch and charges + size > CHARGES_MAX:
                    self._send(batch, charges)
                    batch, charges = [], 0
                batch.append(equal)
                charges += size
            self._send(batch, charges)

    def _send(self, groups: list[list[CheckGroup]], charges: int) -> None:
        """Send groups as one call. Those in one list are equal checks."""
        batch = SharedCall(self, groups, charges)
        self.in_flight += batch.checks
        try:
            key, payload = groups[0][0].command() if batch.checks == 1 else batch.command()
            self._driver.connection_of(key).submit(payload, 0, batch)
        except Exception as error:  # every caller must see a defect, too
            batch.set_exception(error)
        if batch.checks > 1:
            self.coalesced += batch.checks

    # ── Answers ────────────────────────────────────────────────────────────────────────────────

    def settle(self, batch: SharedCall, refusal: Any) -> None:
        """Handle a reply that is no answer, in the background."""
        due_ns = batch.sent_ns + self._driver.servers.config.deadline_ns
        settling = self._driver.settle(batch.call(), due_ns, refusal)
        self._spawn(settling).add_done_callback(batch.settled)

    def fail(self, groups: Iterable[CheckGroup], error: BaseException) -> None:
        """Give the groups their error. Count the charges of cancelled requests that may be made."""
        for group in groups:
            if group.future.done():
                if not group.raises and may_be_charged(error):
                    lost.unknown += len(group.charges)
                continue
            if group.raises or not isinstance(error, StoreError):
                group.future.set_exception(error)
            else:
                group.future.set_result(group.failed(error))
            error = copy(error)  # its own for each, because each caller adds its own traceback

    def undo(self, group: CheckGroup) -> None:
        """Return what was charged for a caller that was cancelled."""
        if group.is_charged:
            self._spawn(run_async(group.undoing(self._driver))).add_done_callback(_count_lost)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _count_lost(undoing: asyncio.Future[None]) -> None:
    """Count an undo that failed."""
    error = None if undoing.cancelled() else undoing.exception()
    if undoing.cancelled() or isinstance(error, StoreError):
        lost.returns += 1
    elif error is not None:
        raise error


class SharedCall:
    """One call with several groups. A connection gives it the reply, as it does to a future."""

    __slots__ = ("_batcher", "_charges", "_done", "_groups", "_settles", "checks", "sent_ns")

    def __init__(self, batcher: Batcher, groups: list[list[CheckGroup]], charges: int) -> None:
        self._batcher = batcher
        self._groups = groups
        self._charges = charges
        self._done = self._settles = False
        self.sent_ns = time.monotonic_ns()
        self.checks = 1 if len(groups) == 1 == len(groups[0]) else sum(map(len, groups))

    def call(self) -> ScriptCall:
        """Return the call."""
        first = self._groups[0][0]
        if self.checks == 1:
            return first.call()
        charges = [
            equal[0].charges
            if len(equal) == 1
            else [equal[0].charges[0]._replace(requests=len(equal))]
            for equal in self._groups
        ]
        return first.call_of(charges)

    def command(self) -> tuple[bytes, bytes]:
        """Return the key and the payload of the call."""
        if self.checks == 1:
            return self._groups[0][0].command()
        call = self.call()
        return call.key, call.by_sha()

    def leave(self) -> bytes:
        """Return the payload once there is a connection, without callers cancelled meanwhile.

        If none is left, the call is done.
        """
        groups = [[each for each in equal if not each.future.done()] for equal in self._groups]
        self._groups = [equal for equal in groups if equal]
        left = sum(map(len, self._groups))
        self._batcher.in_flight -= self.checks - left
        self.checks = left
        self._charges = sum(len(equal[0].charges) for equal in self._groups)
        self._done = not left
        return self.command()[1] if left else b""

    # ── As a future ────────────────────────────────────────────────────────────────────────────

    def done(self) -> bool:
        """Return True if the reply does not matter any more."""
        return self._done

    def set_result(self, reply: Any) -> None:
        """Answer the groups, or handle a refusal."""
        if self._done:
            return
        if type(reply) is not list:
            self._refused(reply)
            return
        self._done = True
        self._batcher.in_flight -= self.checks
        replies = (reply,) if self._charges == 1 else charge_replies(reply, self._charges)
        at = 0
        for equal in self._groups:
            group = equal[0]
            try:
                if len(equal) == 1:
                    answers = [group.read(replies, at)]
                else:
                    answers = group.read_equal(replies[at], len(equal))
            except Exception as error:  # every caller must see a defect, too
                self._batcher.fail(equal, error)
            else:
                for group, answer in zip(equal, answers):  # noqa: B905 - as many, and on the hot path
                    if not group.future.done():
                        group.future.set_result(answer)
                    elif not group.raises:
                        self._batcher.undo(group)
            at += len(group.charges)

    def set_exception(self, error: BaseException) -> None:
        """Fail the groups, or look for another server if the call was not sent."""
        if isinstance(error, NotSent):
            self._refused(error)
        else:
            self._fail(error)

    def _refused(self, refusal: Any) -> None:
        if self._settles:
            self._fail(refusal)
        else:
            self._settles = True
            self._batcher.settle(self, refusal)

    def settled(self, settling: asyncio.Future[Any]) -> None:
        """Answer the groups after a refusal."""
        if settling.cancelled():
            self._fail(StoreUnavailable(_LOOP_ENDED))
        elif (error := settling.exception()) is not None:
            self._fail(error)
        else:
            self.set_result(settling.result())

    def _fail(self, error: BaseException) -> None:
        if not self._done:
            self._done = True
            self._batcher.in_flight -= self.checks
        self._batcher.fail((group for equal in self._groups for group in equal), error)
