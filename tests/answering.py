"""Stores and counters whose Asks are carried at once, so that a test reads like the protocol.

The suites of conformance, parity, promises and faults see every store through this adapter. A link
carries each Ask: `in_thread` waits in the calling thread, and `on_loop` in the event loop of one
background thread, where calls of many threads meet and share its connections.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container, Sequence
from functools import cache
from typing import Any, cast

from ratekeeper.core.model import Consistency, Decision, Limit
from ratekeeper.core.steps import Ask
from ratekeeper.decide.leasing import Authority, LeaseCheck, LeasedAnswer, Report
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import (
    Answer,
    Charge,
    Counter,
    SharedStore,
    Store,
    StoreWrapper,
    stamped,
)

Link = Callable[[Ask], Any]


def in_thread(ask: Ask) -> Any:
    """Carry an Ask in the calling thread."""
    return ask.wait(*ask.args)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop. The first call starts it; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def on_loop(ask: Ask) -> Any:
    """Carry an Ask on asyncio."""

    async def sent() -> Any:
        return await ask.send(*ask.args)

    return asyncio.run_coroutine_threadsafe(sent(), _loop()).result()


def answer(value: Any, link: Link = in_thread) -> Any:
    """Return a value, or the answer of an Ask."""
    return link(value) if type(value) is Ask else value


async def awaited(value: Any) -> Any:
    """Return a value, or the answer of an Ask that this event loop carries."""
    return await value.send(*value.args) if type(value) is Ask else value


class AnsweringCounter:
    """A counter that has every answer. Other attributes are those of the counter."""

    def __init__(self, counter: Counter, link: Link = in_thread) -> None:
        self.counter = counter
        self.limits = counter.limits
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self.counter, name)

    def check(self, subject: str, cost: int) -> Decision:
        return cast("Decision", answer(self.counter.check(subject, cost), self._link))

    def peek(self, subject: str, cost: int) -> Decision:
        return cast("Decision", answer(self.counter.peek(subject, cost), self._link))

    def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        answer(self.counter.refund(subject, units, charged_ns), self._link)

    def owe(self, subject: str, units: int) -> int:
        return cast("int", answer(self.counter.owe(subject, units), self._link))

    def owed(self, subject: str) -> int:
        return cast("int", answer(self.counter.owed(subject), self._link))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        answer(self.counter.grant(subject, units, ttl_ns), self._link)

    def reset(self, subject: str) -> None:
        answer(self.counter.reset(subject), self._link)

    def stamped(self, stamp: int) -> AnsweringCounter:
        return AnsweringCounter(stamped(self.counter, stamp), self._link)

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        return None


class AnsweringStore(StoreWrapper):
    """A store that has every answer. Other attributes are those of the store."""

    def __init__(self, store: Store, link: Link = in_thread) -> None:
        super().__init__(cast("SharedStore", store))
        self.store = store
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> AnsweringCounter:
        return AnsweringCounter(self.store.counter(limits, rule, consistency, across), self._link)

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = ()
    ) -> list[Answer]:
        own = [(_inner(counter), subject, cost) for counter, subject, cost in checks]
        return cast("list[Answer]", self.answer(self.store.check_together(own, optional)))

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer]:
        own = [check._replace(counter=_inner(check.counter)) for check in checks]
        return cast("list[LeasedAnswer]", self.answer(self._store.authority.lease(own, optional)))

    def report(self, reports: Sequence[Report]) -> list[Answer]:
        own = [report._replace(counter=_inner(report.counter)) for report in reports]
        return cast("list[Answer]", self.answer(self._store.authority.report(own)))

    @property
    def authority(self) -> Authority:
        return self

    def mark(self, subject: str, name: int, lasts_ns: int) -> bool:
        return cast("bool", self.answer(self.store.mark(subject, name, lasts_ns)))

    def answer(self, value: Any) -> Any:
        """Return a value, or the answer of an Ask."""
        return answer(value, self._link)

    def close(self) -> None:
        if self._link is on_loop:
            asyncio.run_coroutine_threadsafe(self.store.aclose(), _loop()).result()
        else:
            self.store.close()

    async def aclose(self) -> None:
        await self.store.aclose()


def _inner(counter: Counter) -> Counter:
    return counter.counter if isinstance(counter, AnsweringCounter) else counter
